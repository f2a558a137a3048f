"""The sentences that docs/troubleshooting.md quotes are sentences of the code."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
ROW = re.compile(r"^\| (?!it says|observation|---)(.+?) \| (.+) \| (.+) \|$", re.MULTILINE)
GAP = "…"


def _quotes():
    """Code in the first column that is a sentence: of more than two words, or with a gap."""
    quoted = [q for symptom, _, _ in ROW.findall(PAGE.read_text()) for q in re.findall(r"`([^`]+)`", symptom)]
    return [q for q in quoted if GAP in q or len(q.split()) > 2]


def _sentences():
    """Every text of the code, what is filled in replaced by a gap."""
    found = []
    for folder in ("wlb", "megatron/wlb"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    found.append("".join(v.value if isinstance(v, ast.Constant) else GAP for v in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


SENTENCES = _sentences()


def _is_of_the_code(quote):
    """Whether one text holds the quote's constant parts, in their order."""
    pieces = [piece for piece in quote.split(GAP) if piece.strip()]
    pattern = re.compile(".*".join(re.escape(piece) for piece in pieces), re.DOTALL)
    return any(pattern.search(sentence) for sentence in SENTENCES)


@pytest.mark.parametrize("quote", _quotes())
def test_a_quoted_sentence_is_in_the_code(quote):
    assert _is_of_the_code(quote)


def test_quotes_are_found_and_others_are_not_of_the_code():
    assert len(_quotes()) > 20
    assert not _is_of_the_code("ranks … planned step … as rank 0 wished")
