"""What the documentation says that can be checked: commands, links, pictures, flags, code."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# An indented block is one of commands if a line begins with one of these, after assignments and `nice -n 19`.
RUNNERS = (
    *("python", "python3", "pip", "torchrun", "srun", "sbatch", "scancel", "squeue", "scontrol", "docker", "enroot"),
    *("git", "cd", "export", "source", "unset", "mkdir", "cp", "mv", "rm", "ls", "cat", "tail", "head"),
    *("tensorboard", "nvidia-smi", "grep", "make", "apt", "apt-get", "curl", "wget", "bash", "sh", "sed", "pytest"),
)
_PATHS = ("scripts/", "tools/", "benchmarks/", ".venv/", "./", "pretrain_gpt_wlb.py")
_PREFIX = re.compile(r"^(?:[A-Z_][A-Z0-9_]*=\S*\s+|nice -n \d+\s+)+")
_FENCE = re.compile(r"^```(\w*)\s*$")
_SPAN = re.compile(r"`([^`]+)`", re.DOTALL)
_LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")
_FLAG = re.compile(r"--wlb-[a-z][a-z-]*[a-z]")
_SHELLS = ("bash", "sh", "console")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of a page: `text` is a single line, continuations joined, comment removed."""

    page: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class CodeBlock:
    """A fenced block, its language and the line after its fence."""

    page: Path
    line: int
    language: str
    text: str


@cache
def pages() -> tuple[Path, ...]:
    """Every page that a reader is sent to."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    return (*found, *sorted(ROOT.glob("megatron/wlb/**/README.md")), *sorted(ROOT.glob("docker/*.md")))


@cache
def code_blocks(page: Path) -> tuple[CodeBlock, ...]:
    """Fenced blocks, and those indented by four spaces with language "" (outside of lists nothing else is so)."""
    blocks: list[CodeBlock] = []
    fence: tuple[str, int] | None = None
    held: list[str] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate([*lines, ""], start=1):
        if fence is not None:
            if line.strip() == "```":
                blocks.append(CodeBlock(page=page, line=fence[1], language=fence[0], text="\n".join(held)))
                fence, held = None, []
            else:
                held.append(line)
        elif opened := _FENCE.match(line):
            fence = (opened[1] or "text", number + 1)
        elif line.startswith("    "):
            held.append(line[4:])
        elif held:
            blocks.append(CodeBlock(page=page, line=number - len(held), language="", text="\n".join(held)))
            held = []
    assert fence is None, f"{page}: a fence is not closed"
    return tuple(blocks)


@cache
def commands(page: Path) -> tuple[Command, ...]:
    """In the order of the page: every line of a shell block and of an indented block in which one looks like a
    command, and inline code that calls a program with arguments."""
    found: list[Command] = []
    for block in code_blocks(page):
        if block.language in _SHELLS or block.language == "":
            lines = _logical_lines(block)
            if block.language or any(_is_command(text) for _, text in lines):
                found += [Command(page=page, line=line, text=text) for line, text in lines]
    for line, span in _prose(page):
        words = span.split()
        if len(words) > 1 and (words[0] in ("python", "torchrun", "sbatch") or words[0].startswith(_PATHS)):
            found.append(Command(page=page, line=line, text=" ".join(words)))
    return tuple(sorted(found, key=lambda c: c.line))


def words_of(text: str) -> list[str]:
    """The command's words, assignments left out."""
    return shlex.split(_PREFIX.sub("", text))


def links(page: Path) -> list[tuple[bool, str]]:
    """(whether it is a picture, target) of every link outside of code."""
    return [(bool(mark), target) for mark, target in _LINK.findall(_SPAN.sub("", _without_blocks(page)))]


def wlb_flags(page: Path) -> set[str]:
    return set(_FLAG.findall(page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.+)$", _without_blocks(page), flags=re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        found[name] = found.get(name, -1) + 1
    return {name if i == 0 else f"{name}-{i}" for name, count in found.items() for i in range(count + 1)}


def _logical_lines(block: CodeBlock) -> list[tuple[int, str]]:
    """(line, text) with continuations joined; comments and empty lines left out; here-documents are not used."""
    lines: list[tuple[int, str]] = []
    pending, begin = "", 0
    for i, raw in enumerate(block.text.splitlines()):
        text = raw.strip()
        if not pending:
            begin = block.line + i
        if text.endswith("\\"):
            pending += text[:-1].rstrip() + " "
            continue
        text, pending = (pending + text).strip(), ""
        text = re.sub(r"\s+#\s.*$", "", text)
        if text and not text.startswith("#"):
            lines.append((begin, text.removeprefix("$ ")))
    return lines


def _is_command(text: str) -> bool:
    first = _PREFIX.sub("", text).split(maxsplit=1)
    return bool(first) and (first[0] in RUNNERS or first[0].startswith(_PATHS))


def _without_blocks(page: Path) -> str:
    """The text with code blocks emptied, line numbers kept."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for block in code_blocks(page):
        for i in range(block.line - 1, block.line - 1 + len(block.text.splitlines())):
            lines[i] = ""
    return "\n".join(lines)


def _prose(page: Path) -> list[tuple[int, str]]:
    """(line, content) of inline code."""
    text = _without_blocks(page).replace("```", "   ")
    return [(text.count("\n", 0, m.start()) + 1, m[1]) for m in _SPAN.finditer(text)]
