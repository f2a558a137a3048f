"""What pages point to exists: files, headings, pictures and the commands that make them, flags."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.pages import ROOT, anchors, code_blocks, commands, links, pages, wlb_flags

# Pictures that no `--out`, `--png` or `--delay-curve` of a command on their page names.
MADE_BY = {
    "docs/images/quickstart.png": "scripts/quickstart.sh writes it as runs/quickstart/report.png",
}
_WRITES = re.compile(r"--(?:out|png|delay-curve)[ =](\S+)")


def _link_problem(page, target):
    """What is wrong with a relative link, or nothing."""
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists():
        return "no such file"
    if file.is_relative_to(ROOT) is False:
        return "outside of the repository"
    if anchor and file.suffix == ".md" and anchor not in anchors(file):
        return "no such heading"
    return None


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    relative = [target for _, target in links(page) if "://" not in target]
    assert [(target, _link_problem(page, target)) for target in relative if _link_problem(page, target)] == []


def test_links_are_found():
    assert sum(len(links(page)) for page in pages()) > 80
    assert _link_problem(ROOT / "README.md", "docs/nothing.md") == "no such file"
    assert _link_problem(ROOT / "README.md", "docs/packing.md#nothing") == "no such heading"
    assert _link_problem(ROOT / "README.md", "docs/packing.md#delay") is None


def test_every_page_is_in_the_index():
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for _, target in links(index)}
    assert [page.name for page in (ROOT / "docs").glob("*.md") if page != index and page not in linked] == []


def test_every_picture_is_shown_and_made_by_a_command():
    shown = {}
    for page in pages():
        for is_picture, target in links(page):
            if is_picture and "://" not in target:
                shown.setdefault(str((page.parent / target).resolve().relative_to(ROOT)), []).append(page)
    there = {str(p.relative_to(ROOT)) for p in (ROOT / "docs" / "images").iterdir()}
    assert there == set(shown)
    written = {name for page in pages() for c in commands(page) for name in _WRITES.findall(c.text)}
    assert there <= {p for p in shown if p in written or p in MADE_BY}


def _flags_of_the_parser():
    tree = ast.parse((ROOT / "megatron/wlb/arguments.py").read_text())
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args)
    texts = (call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant))
    return {text for text in texts if isinstance(text, str) and text.startswith("--wlb-")}


def test_flags_of_pages_and_of_the_parser_are_the_same():
    flags = _flags_of_the_parser()
    assert len(flags) > 20
    # benchmarks/packing.py has this one too; `--wlb-*` stands for all.
    named = {(flag, page.name) for page in pages() for flag in wlb_flags(page)}
    assert [n for n in named if n[0] not in flags] == []
    assert sorted(flags - {flag for flag, _ in named}) == [], "say what they are for, in docs/choosing.md or README.md"


def test_python_of_pages_compiles():
    blocks = [b for page in pages() for b in code_blocks(page) if b.language == "python"]
    assert blocks
    for block in blocks:
        compile(block.text, str(block.page), "exec")


def test_every_field_of_the_log_line_is_explained():
    tree = ast.parse((ROOT / "megatron/wlb/telemetry.py").read_text())
    (formats,) = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_FORMATS"
    ]
    fields = ast.literal_eval(formats)
    text = (ROOT / "docs" / "telemetry.md").read_text()
    table = text.split("| field | meaning |", 1)[1].split("\n\n", 1)[0]
    assert len(fields) > 15
    assert [name for name in fields if f"`{name}`" not in table] == []
