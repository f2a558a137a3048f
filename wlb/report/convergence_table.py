"""The table of a convergence report."""

from __future__ import annotations

from typing import Any

from wlb.report.convergence import ALL


def table_of(report: dict[str, Any]) -> str:
    """One line a run. `longest` is the last bucket; noise is of the last weights at which it was taken."""
    header = "run seed tokens cv delay max-delay train-loss held-out -plain se longest -plain se weight noise se"
    rows = [header.split()]
    last, longest = str(report["steps"]), report["buckets"][-1]
    for name, by_seed in report["runs"].items():
        for seed, run in by_seed.items():
            heldout = run["heldout"].get(last, {})
            noises = list(run["gradient_noise"].values())
            noise = noises[-1]["noise_over_signal"] if noises else {}
            weight = next((w["mean"] for w in reversed(run["weights"]) if w is not None), None)
            rows.append(
                [
                    name,
                    seed,
                    str(run["trained_tokens"]),
                    _text(run["step_tokens"]["cv"], ".3f"),
                    _text(run["mean_delay_steps"], ".2f"),
                    _text(run["max_delay_steps"], ".0f"),
                    _text(run["last_training_loss"], ".4f"),
                    *_heldout_cells(heldout.get(ALL, {})),
                    *_heldout_cells(heldout.get(longest, {})),
                    _text(weight, ".3f"),
                    _text(noise.get("value"), ".3f"),
                    _text(noise.get("standard_error"), ".3f"),
                ]
            )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    if report["incomplete"]:
        lines.append(f"not complete, left out: {', '.join(report['incomplete'])}")
    return "\n".join(lines)


def _heldout_cells(entry: dict[str, Any]) -> list[str]:
    difference = entry.get("difference", {})
    return [
        _text(entry.get("loss"), ".4f"),
        _text(difference.get("value"), "+.4f"),
        _text(difference.get("standard_error"), ".4f"),
    ]


def _text(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
