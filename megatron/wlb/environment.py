"""Which of the optional NVIDIA packages are there, and what a run loses without each."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata, util


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalPackage:
    """A package that Megatron uses when it is there.

    name: as people know it.
    module: what must be importable for it to be of use; a compiled module where the Python part alone is not.
    distributions: names under which it may have been installed, for its version.
    lost: what a run does without it.
    """

    name: str
    module: str
    distributions: tuple[str, ...]
    lost: str

    @property
    def found(self) -> bool:
        # Looked up, not imported: importing Transformer Engine takes seconds and a driver.
        return util.find_spec(self.module) is not None

    @property
    def version(self) -> str:
        """Empty when it is not found or does not say."""
        for distribution in self.distributions if self.found else ():
            try:
                return metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
        return ""

    def sentence(self) -> str:
        """One line: found and which, or what is lost."""
        if self.found:
            return f"{self.name}: found{f', {self.version}' if self.version else ''}"
        return f"{self.name}: not found; lost: {self.lost}"


TRANSFORMER_ENGINE = "Transformer Engine"
APEX = "Apex (NVIDIA's)"
OPTIONAL_PACKAGES = (
    OptionalPackage(
        name=TRANSFORMER_ENGINE,
        module="transformer_engine",
        distributions=("transformer-engine", "transformer_engine"),
        lost="FP8, fused layers, cuDNN attention; needs --transformer-impl local, whose packed attention is PyTorch's",
    ),
    OptionalPackage(
        name=APEX,
        # The package of that name on the index is another one; only NVIDIA's has this extension.
        module="amp_C",
        distributions=("apex",),
        lost="fused norms of the local spec and gradient accumulation fusion; needs --no-gradient-accumulation-fusion",
    ),
    OptionalPackage(
        name="flash-attn",
        module="flash_attn",
        distributions=("flash-attn", "flash_attn"),
        lost="one of the kernels that Transformer Engine chooses from; cuDNN's remains",
    ),
)


def package_sentences() -> list[str]:
    """A line for each optional package."""
    return [package.sentence() for package in OPTIONAL_PACKAGES]


def has_package(name: str) -> bool:
    """Whether the optional package of that name is there."""
    return next(package.found for package in OPTIONAL_PACKAGES if package.name == name)
