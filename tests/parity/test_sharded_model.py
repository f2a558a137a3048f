"""A GPT on packs, divided over context-parallel, tensor-parallel and pipeline ranks, equals its documents one by one.

The packs are of the kinds that public trackers report as going wrong. Every sharder divides every one of them, layers
take turns in gathering and passing round, and `one by one` is the same trainer with each document a micro-batch of its
own, in one process (which `test_packed_model` holds against Megatron's stock model).
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.chosen_packs import FAULTS, Measured, Pack, run_packs
from tests.harness.data import write_index
from tests.harness.training import Layout, Run
from wlb.sharding import SHARDERS

LENGTHS = (33, 1, 7, 20, 4)
LONG = (300, 1, 2, 250, 145)  # 698 tokens
# Sequences 0 to 4 and 5 to 9 have LENGTHS, 10 to 14 LONG; 15 is cut; 16 is of padding only.
STORED = (*LENGTHS, *LENGTHS, *LONG, 47, 7)
BASE = tuple((i, 0, n) for i, n in enumerate(LENGTHS))
CUT = ((15, 30, 17), (2, 0, 7), (15, 0, 30))
ZEROS = ((16, 0, 7),)
PIECES = {
    "base": BASE,
    "first changed": ((5, 0, 33), *BASE[1:]),
    "fourth changed": (*BASE[:3], (8, 0, 20), BASE[4]),
    "long": tuple((10 + i, 0, n) for i, n in enumerate(LONG)),
    "as long as the table": ((0, 0, 33), (6, 0, 1), (15, 0, 30)),
    "one token": ((1, 0, 1),),
    "cut": CUT,
    "zeros": ZEROS,
}
# The very micro-batch again, and with padding of other tokens; padded to 704 tokens at every layout.
LONG_TOO = {"long": {}, "long again": {}, "long with other padding": {"padding_token": 77}}
PACKS = {
    **{(name, way): Pack(pieces=pieces, sharder=way) for name, pieces in PIECES.items() for way in SHARDERS},
    **{
        (name, way): Pack(pieces=PIECES["long"], sharder=way, pad_unit=16, **more)
        for name, more in LONG_TOO.items()
        for way in SHARDERS
    },
    ("empty", "hybrid"): Pack(pieces=(), sharder="hybrid"),
}
NAMES = dict.fromkeys([*PIECES, *LONG_TOO])

THREE_STAGES = ["--decoder-first-pipeline-num-layers", "2"]
LAYOUTS = [
    (Layout(), []),
    (Layout(cp=2), []),
    (Layout(cp=4), []),
    (Layout(pp=3), THREE_STAGES),
    (Layout(cp=2, pp=3), THREE_STAGES),
    (Layout(cp=2, tp=2), ["--sequence-parallel"]),
]
RELATIVE = 1e-5
each_sharder = pytest.mark.parametrize("sharder", list(SHARDERS))


class Step:
    """One training step of a layout, by pack."""

    def __init__(self, layout: Layout, run: Run, measured: dict[tuple[str, str], Measured]) -> None:
        self.layout, self.run, self.measured = layout, run, measured


@pytest.fixture(scope="module")
def stored() -> list[list[int]]:
    rng = np.random.default_rng(3)
    drawn = [rng.integers(1, 126, size=length + 1).tolist() for length in STORED]
    return [*drawn[:-1], [0] * (STORED[-1] + 1)]


@pytest.fixture(scope="module")
def args(stored: list[list[int]], start_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    data = write_index(tmp_path_factory.mktemp("chosen") / "documents", stored)
    return [
        *("--data-path", data, "--split", "100,0,0", "--wlb-packing", "plain"),
        *("--seq-length", "704", "--max-position-embeddings", "704"),
        *("--load", start_checkpoint, "--finetune", "--no-load-optim", "--no-load-rng"),
        *("--cp-comm-type", "p2p", "all_gather", "all_gather", "p2p"),
    ]


@pytest.fixture(scope="module")
def one_by_one(args: list[Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[Any, np.ndarray]]:
    """The run, and the losses of each document."""
    pieces = [piece for name in NAMES for piece in PIECES["long" if name in LONG_TOO else name]]
    folder = tmp_path_factory.mktemp("one_by_one") / "packs"
    run, measured = run_packs([Pack(pieces=(piece,)) for piece in pieces], folder, args, layout=Layout())
    return run, {piece: m.losses for piece, m in zip(pieces, measured, strict=True)}


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda p: str(p[0]))
def step(request: pytest.FixtureRequest, args: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Step:
    layout, options = request.param
    folder = tmp_path_factory.mktemp("layout") / "packs"
    run, measured = run_packs(list(PACKS.values()), folder, [*args, *options], layout=layout)
    return Step(layout, run, dict(zip(PACKS, measured, strict=True)))


def _largest_error(measured: Measured, pack: Pack, one_by_one: dict[Any, np.ndarray]) -> float:
    """Of the losses of the documents, over the largest of them."""
    wanted = np.concatenate([one_by_one[piece] for piece in pack.pieces])
    return float(np.abs(measured.losses[: len(wanted)] - wanted).max() / np.abs(wanted).max())


def test_losses_are_those_of_the_documents_one_by_one(
    step: Step, one_by_one: tuple[Run, dict[Any, np.ndarray]]
) -> None:
    for case, pack in PACKS.items():
        measured = step.measured[case]
        assert np.isfinite(measured.losses).all(), case
        if pack.pieces:
            assert _largest_error(measured, pack, one_by_one[1]) <= RELATIVE, case


def test_loss_and_gradient_do_not_depend_on_what_shares_a_micro_batch(
    step: Step, one_by_one: tuple[Run, dict[Any, np.ndarray]]
) -> None:
    """Documents of 1 to 300 tokens alone, or in packs with and without padding: a mean over tokens is one number."""
    wanted = one_by_one[0]
    assert step.run.losses == pytest.approx(wanted.losses, rel=RELATIVE)
    assert step.run.grad_norms == pytest.approx(wanted.grad_norms, rel=RELATIVE)
    assert step.run.grad_norms[0] > 0.1


@each_sharder
@pytest.mark.parametrize(("changed", "document"), [("first changed", 0), ("fourth changed", 3)])
def test_another_document_moves_no_bit_of_the_others(changed: str, document: int, sharder: str, step: Step) -> None:
    before, after = step.measured["base", sharder], step.measured[changed, sharder]
    assert not np.array_equal(before.documents(before.tokens)[document], after.documents(after.tokens)[document])
    unmoved = [
        np.array_equal(was, now)
        for was, now in zip(before.documents(before.losses), after.documents(after.losses), strict=True)
    ]
    assert unmoved == [i != document for i in range(len(unmoved))]


@each_sharder
def test_the_same_micro_batch_twice_gives_the_same_bits(sharder: str, step: Step) -> None:
    """Also of the 6 rows of padding, which are a document of their own."""
    one, two = step.measured["long", sharder], step.measured["long again", sharder]
    assert one.plan == two.plan
    assert one.plan.lengths == (*LONG, 6)
    assert np.array_equal(one.losses, two.losses)


@each_sharder
@pytest.mark.parametrize("name", ["base", "long", "one token"])
def test_padding_is_a_document_of_its_own(
    name: str, sharder: str, step: Step, one_by_one: tuple[Run, dict[Any, np.ndarray]]
) -> None:
    """What padding loses is what a document of the same tokens loses: it sees itself alone, from position 0."""
    measured = step.measured[name, sharder]
    padding = measured.plan.num_tokens - PACKS[name, sharder].micro_batch.num_tokens
    assert padding > 0 or step.layout.cp == 1
    zeros = one_by_one[1][ZEROS[0]]
    losses = measured.losses[measured.plan.num_tokens - padding :]
    assert np.abs(losses - zeros[:padding]).max(initial=0) <= RELATIVE * np.abs(zeros).max()


@each_sharder
def test_other_padding_moves_no_bit_of_a_document(sharder: str, step: Step) -> None:
    one, two = step.measured["long", sharder], step.measured["long with other padding", sharder]
    assert not np.array_equal(one.losses[698:], two.losses[698:])
    assert np.array_equal(one.losses[:698], two.losses[:698])


def test_labels_positions_and_mask_are_those_of_the_document(step: Step, stored: list[list[int]]) -> None:
    for case, pack in PACKS.items():
        measured = step.measured[case]
        rows = [(sequence, start + i, i) for sequence, start, length in pack.pieces for i in range(length)]
        assert measured.tokens[: len(rows)].tolist() == [stored[sequence][at] for sequence, at, _ in rows], case
        assert measured.labels[: len(rows)].tolist() == [stored[sequence][at + 1] for sequence, at, _ in rows], case
        padding = measured.plan.num_tokens - len(rows)
        assert measured.positions.tolist() == [*(i for *_, i in rows), *range(padding)], case
        assert measured.mask.tolist() == [1] * len(rows) + [0] * padding, case
        assert sum(measured.rank_tokens) == len(rows), case


def test_shards_are_equal_and_padded_no_more_than_they_must(step: Step) -> None:
    """CP ranks hold equally many tokens, which sequence parallelism divides: the multiple is cp * tp, not 2 * cp."""
    for case, pack in PACKS.items():
        plan, num_tokens = step.measured[case].plan, pack.micro_batch.num_tokens
        multiple = step.layout.cp * step.layout.tp * pack.pad_unit
        assert plan.num_tokens == max(1, -(-num_tokens // multiple)) * multiple, case
        assert [sum(s.num_tokens for s in spans) for spans in plan.ranks] == [plan.rank_tokens] * step.layout.cp, case


def test_the_rope_table_follows_the_longest_segment_not_the_pack(step: Step) -> None:
    for case in PACKS:
        measured = step.measured[case]
        longest = max(measured.plan.lengths)
        assert measured.positions.max() < longest <= measured.table_tokens <= max(2 * longest - 2, 1), case
        if case[0] == "as long as the table":
            assert measured.table_tokens == measured.plan.num_tokens == 64, case


def test_ranks_that_hold_padding_only_train_nothing_and_break_nothing(step: Step) -> None:
    counts = [step.measured["one token", sharder].rank_tokens for sharder in SHARDERS]
    assert all(sorted(c) == [0] * (step.layout.cp - 1) + [1] for c in counts)
    assert set(step.measured["empty", "hybrid"].rank_tokens) == {0}
    assert all(np.isfinite(m.losses).all() for m in step.measured.values())
    assert np.isfinite([*step.run.losses, *step.run.grad_norms]).all()


@pytest.fixture(scope="module")
def faulty(args: list[Any], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, str], Measured]:
    """By fault and name, on two ranks."""
    keys = list(product((None, *FAULTS), ("base", "first changed")))
    packs = [Pack(pieces=PIECES[name], fault=fault) for fault, name in keys]
    folder = tmp_path_factory.mktemp("faulty") / "packs"
    return dict(zip(keys, run_packs(packs, folder, args, layout=Layout(cp=2))[1], strict=True))


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees_each_fault(
    fault: str, faulty: dict[tuple[Any, str], Measured], one_by_one: tuple[Run, dict[Any, np.ndarray]]
) -> None:
    """The control, on two ranks: made on purpose, a fault is far beyond the tolerance."""
    pack = PACKS["base", "per_sequence"]
    assert _largest_error(faulty[None, "base"], pack, one_by_one[1]) <= RELATIVE
    assert _largest_error(faulty[fault, "base"], pack, one_by_one[1]) > 1000 * RELATIVE


def test_a_leak_moves_the_other_documents(faulty: dict[tuple[Any, str], Measured]) -> None:
    """The control of what must not move."""
    before, after = (faulty["leak", name] for name in ("base", "first changed"))
    for was, now in list(zip(before.documents(before.losses), after.documents(after.losses), strict=True))[1:5]:
        assert not np.array_equal(was, now)
