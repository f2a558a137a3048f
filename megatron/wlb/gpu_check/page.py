"""The GPU check on one page: a few lines for each section. All numbers are in the JSON. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron.wlb.gpu_check.results import Result

NOT_CHECKED = (
    "not checked with one GPU: NCCL between devices, exchanges that overlap with attention on their own stream, TP, "
    "PP, DP, EP and CP over several devices, FP8; no network was timed"
)
_WIDTH = 118
_ERROR_LINES = 6


def header(environment: dict[str, Any]) -> list[str]:
    """What the check runs on, and what it does without."""
    memory = environment["memory_bytes"]
    lines = [
        f"python {environment['python']}, torch {environment['torch']}, CUDA {environment['cuda']}, "
        f"on {environment['device']}" + (f" with {memory / 2**30:.0f} GiB" if memory else "")
    ]
    for name, package in environment["packages"].items():
        version = f", {package['version']}" if package["version"] else ""
        lines.append(f"{name}: {f'found{version}' if package['found'] else f'not found; lost: {package["lost"]}'}")
    for name, reason in environment["kernels"].items():
        lines.append(f"kernel {name}: {reason or 'usable'}")
    return lines


def section(result: Result) -> list[str]:
    """Whether it passed, and what it comes to."""
    lines = [f"{'ok  ' if result.passed else 'FAIL'} {result.name} ({result.duration_s:.1f} s)"]
    if "error" in result.measured:
        error = str(result.measured["error"]).strip().splitlines()
        return [*lines, *(f"     {line[:_WIDTH]}" for line in error[-_ERROR_LINES:])]
    write = _WRITERS.get(result.kind, _worst_ratio)
    if not result.passed:
        lines.append(f"     rule: {result.rule}")
    return [*lines, *(f"     {line}" for line in write(result.measured))]


def footer(results: list[Result], device: str, seconds: float) -> list[str]:
    """How many passed and how long it took."""
    passed = sum(r.passed for r in results)
    return [NOT_CHECKED, f"{passed} of {len(results)} sections passed on {device} in {seconds:.0f} s"]


def _worst_ratio(measured: dict[str, Any]) -> Iterator[str]:
    """Of cases whose numbers are ratios by result."""
    ratios: list[tuple[float, str]] = []
    for case, values in measured.items():
        if isinstance(values, dict):
            for name, value in values.items():
                if name in _RATIOS:
                    ratios.append((value, f"{case}: {name}"))
                elif name == "longest document":
                    ratios += [(ratio, f"{case}, longest document: {result}") for result, ratio in value.items()]
    if ratios:
        # Where one is not a number, it is the worst.
        worst, where = max(ratios, key=lambda r: float("inf") if r[0] != r[0] else r[0])
        yield f"largest ratio {worst:.2f} of 2 allowed ({where}); {len(ratios)} ratios"
    if layer := measured.get("layer"):
        yield f"layer: {layer}"
    for case, values in measured.items():
        if isinstance(values, dict):
            if values.get("independent") is False:
                yield f"{case}: documents see each other"
            if values.get("failed", "none") != "none":
                yield f"{case}: {values['failed']}"
            if "refused" in values:
                yield f"{case}: not taken: {values['refused']}"


def _syncs(measured: dict[str, Any]) -> Iterator[str]:
    cases = {name: case for name, case in measured.items() if "known plan" in case}
    yield "; ".join(f"{name}: {case['known plan']} and {case['new plan']}" for name, case in cases.items()) + (
        " (known plan, new plan)"
    )
    for name, case in measured.items():
        if case["places"] != "none":
            count = f"{case['host syncs']} " if "host syncs" in case else ""
            yield f"{name}: {count}at {case['places']}"[:_WIDTH]


def _exchange(measured: dict[str, Any]) -> Iterator[str]:
    for name, case in measured.items():
        if "skipped" in case:
            yield f"{name}: not run: {case['skipped']}"
        elif "messages" in case:
            sent = f"{case['messages']} messages, {case['MiB']:.3g} MiB together"
            yield f"{name}: {case['wrong numbers']} wrong numbers in {sent}"
        else:
            worst = max(case, key=lambda k: case[k] if case[k] == case[k] else float("inf"))
            yield f"{name}: largest difference {case[worst]:.1e} ({worst})"


def _cost(measured: dict[str, Any]) -> Iterator[str]:
    for name, case in measured.items():
        profile = case["profile"]
        length, seconds = profile["attention"][-1]
        yield (
            f"{name}: {1e6 * profile['linear_token_s']:.3g} us a token, {1e3 * profile.get('fixed_s', 0):.3g} ms a "
            f"micro-batch, {1e3 * seconds:.3g} ms attention of {length} tokens "
            f"({case['attention forward TFLOP/s']:.3g} TFLOP/s), all forward;"
        )
        yield (
            f"  backward {profile['attention_backward_ratio']:.2f} x and {profile['rest_backward_ratio']:.2f} x; "
            f"crossover {case['crossover tokens']:.0f} tokens, {case['crossover tokens by counting']:.0f} by counting; "
            f"mixed pack predicted {case['mixed pack predicted over measured']:.2f} x of measured"
        )


def _training(measured: dict[str, Any]) -> Iterator[str]:
    runs = {name: case for name, case in measured.items() if isinstance(case, dict)}
    yield from _table(
        ["", "first loss", "last 3", "micro-batches", "step ms", "time per token over plain", "predicted"],
        [
            [
                name,
                f"{case['first loss']:.4f}",
                f"{case['final loss']:.4f}",
                str(case["micro-batches"]),
                f"{case['step ms']:.1f}",
                f"{case['time per token over plain']:.3f}",
                f"{case['predicted']:.3f}" if "predicted" in case else "-",
            ]
            for name, case in runs.items()
        ],
    )
    yield f"losses of plain and exact apart by at most {measured['plain and exact apart']:.1e}"


def _tiles(measured: dict[str, Any]) -> Iterator[str]:
    for name, fit in measured.items():
        if name.startswith("suggested"):
            yield (
                f"{name}: tile_tokens {fit['tile_tokens']}, span_pairs {fit['span_pairs']}, {fit['ps a pair']:.3g} ps "
                f"a pair, off by {fit['relative error']:.0%}"
            )


def _rank_times(measured: dict[str, Any]) -> Iterator[str]:
    cases = {name: case for name, case in measured.items() if isinstance(case, dict)}
    sharders = [name for name, value in next(iter(cases.values()), {}).items() if isinstance(value, dict)]
    yield "attention measured, predicted with assumed tiles, predicted with the suggested prices:"
    rows = [
        [
            name,
            f"{next(v for k, v in case.items() if not isinstance(v, dict)):.3g}",
            *(" ".join(f"{case[s][q]:.2f}" for q in ("attention", "predicted", "calibrated")) for s in sharders),
        ]
        for name, case in cases.items()
        # The ring's are in the JSON: its ratios answer the same question with more and smaller calls.
        if name.endswith("all_gather")
    ]
    yield from _table(["pack", "ms", *sharders], rows)
    yield f"packs of each size: {measured['packs of each size']}; worst row error {measured['worst row error']:.2%}"


def _memory(measured: dict[str, Any]) -> Iterator[str]:
    yield f"keys and values of the pack {measured['keys and values of the pack MiB']:.3g} MiB; MiB at most in a rank:"
    cases = {name: case for name, case in measured.items() if isinstance(case, dict)}
    columns = list(next(iter(cases.values()), {}))
    rows = [[name, *(f"{case[c]:.3g}" for c in columns)] for name, case in cases.items()]
    yield from _table(["", *(c.removesuffix(" MiB") for c in columns)], rows)


def _allocator(measured: dict[str, Any]) -> Iterator[str]:
    yield ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in measured.items()
    )


def _table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        first, *others = zip(row, widths, strict=True)
        yield "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip()


_RATIOS = ("out", "dq", "dk", "dv", "logits", "gradients")
_WRITERS: dict[str, Callable[[dict[str, Any]], Iterator[str]]] = {
    "NCCL to itself": _exchange,
    "host syncs": _syncs,
    "cost profile": _cost,
    "training": _training,
    "kernel time by rows of queries": _tiles,
    "slowest rank over that of per_sequence": _rank_times,
    "gathered keys and values": _memory,
    "allocator": _allocator,
}
