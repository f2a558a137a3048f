"""Which packages a run finds: the installed Megatron-Core, and NVIDIA's optional ones, with what is lost without."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from types import ModuleType

from packaging.version import Version

from wlb.errors import ConfigError


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
        lost="FP8, fused layers, cuDNN attention, without which PyTorch's attends; "
        "needs --transformer-impl local --no-rope-fusion",
    ),
    OptionalPackage(
        name=APEX,
        # The package of that name on the index is another one; only NVIDIA's has this extension.
        module="amp_C",
        distributions=("apex",),
        lost="fused norms of the local spec and gradient accumulation fusion; needs --no-gradient-accumulation-fusion, "
        "and --no-persist-layer-norm with --transformer-impl local",
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


def require_packages(args: Namespace) -> None:
    """Refuse, with every flag that is to be given, options whose package is missing.

    Megatron would name them one after the other, each after a start of its own, the last while it builds the model.

    Raises:
        ConfigError: an option is on, by itself or as Megatron's default, whose package is not installed.
    """
    engine, apex = has_package(TRANSFORMER_ENGINE), has_package(APEX)
    local = args.transformer_impl == "local" or not engine
    # Multi-latent attention rotates by kernels of Megatron's own.
    fuses_rope = args.apply_rope_fusion and not args.multi_latent_attention
    needs = [
        ("--transformer-impl local", TRANSFORMER_ENGINE, not engine and args.transformer_impl == "transformer_engine"),
        ("--no-rope-fusion", TRANSFORMER_ENGINE, not engine and fuses_rope),
        ("--no-gradient-accumulation-fusion", APEX, not apex and args.gradient_accumulation_fusion),
        ("--no-persist-layer-norm", APEX, not apex and local and not args.no_persist_layer_norm),
    ]
    wanted = [(flag, package) for flag, package, missing in needs if missing]
    if wanted:
        packages = " and ".join(dict.fromkeys(package for _, package in wanted))
        raise ConfigError(
            f"without {packages} a run needs {' '.join(flag for flag, _ in wanted)}: give these flags too, or install "
            f"what is missing (docker/Dockerfile brings it), got --transformer-impl {args.transformer_impl}"
        )


def require_installed_core(core: ModuleType, distribution: metadata.Distribution | None) -> None:
    """Refuse a copy of Megatron-Core, such as a checkout on PYTHONPATH, that stands before the installed one.

    core: the module `megatron.core`, as imported.
    distribution: what is installed under the name megatron-core, None for nothing.

    Raises:
        ConfigError: nothing is installed, the version differs, or it lies elsewhere without an editable installation.
    """
    folder = Path(str(core.__file__)).resolve().parent
    if distribution is None:
        raise ConfigError(f"megatron-core must be installed (scripts/setup.sh), got only {folder}")
    installed = Path(str(distribution.locate_file("megatron/core"))).resolve()
    editable = json.loads(distribution.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable", False)
    same_version = Version(core.__version__).public == Version(distribution.version).public
    if not same_version or not (editable or folder == installed):
        raise ConfigError(
            f"megatron.core must be the installed megatron-core {distribution.version}, got {core.__version__} from "
            f"{folder}: remove that folder's checkout from PYTHONPATH"
        )
