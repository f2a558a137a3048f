"""What the bound of a document's wait buys: a table and a picture.

A curve is a list of dictionaries, one a bound, as benchmarks/packing.py makes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wlb.data.atomic_files import atomic_path


def draw_delay_curve(curve: list[dict[str, Any]], path: Path) -> None:
    """Step time and mean delay by the bound, as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.add_subplot()
    places = range(len(curve))
    left.plot(places, [c["step_time_over_ideal"] for c in curve], "o-", color="tab:blue")
    left.set_ylabel("step time / ideal", color="tab:blue")
    left.set_xlabel("--max-delay-steps")
    left.set_xticks(list(places), [str(c["max_delay_steps"]) for c in curve])
    right = left.twinx()
    right.plot(places, [c["mean_delay_steps"] for c in curve], "s--", color="tab:orange")
    right.set_ylabel("mean delay of a token, steps", color="tab:orange")
    with atomic_path(path) as written:
        figure.savefig(written, format="png", dpi=120)


def delay_table(curve: list[dict[str, Any]]) -> str:
    """One bound a line."""
    rows = ["  K  time/ideal  speedup/token  delay  longest  tokens cv  thresholds"]
    for c in curve:
        tokens = " ".join(map(str, c["thresholds_tokens"])) or "none"
        rows.append(
            f"{c['max_delay_steps']:3}  {c['step_time_over_ideal']:10.3f}  {c['speedup_vs_plain']:13.3f}  "
            f"{c['mean_delay_steps']:5.2f}  {c['longest_wait_steps']:7}  {c['step_tokens_cv']:9.4f}  {tokens}"
        )
    return "\n".join(rows)
