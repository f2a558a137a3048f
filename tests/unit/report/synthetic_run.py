"""A run as training writes it, of two pipeline stages that take exactly what their cost says."""

import json

from wlb.schedule import replica_timeline

WINDOW = 100
SQUARE_S, TOKEN_S = 2e-4, 5e-3  # of both passes of one stage: the crossover is 25 tokens
MICRO_BATCH_S = 0.05  # fixed, of both passes of one stage: as much as 10 tokens
SHAPE = {
    "seq_length": WINDOW,
    "hidden_size": 8,
    "ffn_hidden_size": 16,
    "num_layers": 2,
    "num_attention_heads": 1,
    "group_query_attention": False,
    "kv_channels": 8,
    "padded_vocab_size": 32,
    "swiglu": False,
}
# The same pieces; in the plain run a long one often stands beside short ones.
PLAIN = [
    [[100], [30, 20]],
    [[50, 50], [40]],
    [[100], [10, 60]],
    [[30, 70], [80]],
    [[20, 80], [100]],
    [[100], [5, 95]],
]
BALANCED = [
    [[30, 20], [40]],
    [[50, 50], [10, 60]],
    [[100], [100]],
    [[30, 70], [80]],
    [[100], [100]],
    [[20, 80], [5, 95]],
]
# Plain's pieces in every step, in micro-batches of other number and size.
MAKESPAN = [
    [[30], [100], [20]],
    [[40, 50], [50]],
    [[10], [100], [60]],
    [[30], [80], [70]],
    [[20], [80], [100]],
    [[5], [100], [95]],
]


def forward_s(lengths, *, micro_batch_s=0.0):
    return (SQUARE_S * sum(n * n for n in lengths) + TOKEN_S * sum(lengths) + micro_batch_s) / 3


def write_run(folder, steps, *, outside_s=0.01, micro_batch_s=0.0, losses=None, seed=1):
    """A run of two pipeline stages that takes exactly what a quadratic cost says; a loss a step, or falling ones."""
    folder.mkdir(parents=True)
    (folder / "timeline").mkdir()
    lines = [f"  {name} ........ {value}" for name, value in (SHAPE | {"seed": seed}).items()]
    rows = {0: [], 1: []}
    now_s = 1000.0
    for i, step in enumerate(steps):
        forward = [[forward_s(m, micro_batch_s=micro_batch_s)] * 2 for m in step]
        timeline = replica_timeline(forward, [[2 * s for s in row] for row in forward])
        for stage, passes in enumerate(timeline.stages):
            rows[stage].append(
                {
                    "step": i,
                    "rank": stage,
                    "pp_rank": stage,
                    "dp_rank": 0,
                    "begin_s": now_s,
                    "end_s": now_s + timeline.makespan_s,
                    "lengths": step,
                    "events": [
                        *([f"{p.kind}-compute", now_s + p.start_s, now_s + p.end_s] for p in passes),
                        ["forward-backward", now_s, now_s + timeline.makespan_s],
                    ],
                }
            )
        elapsed_s = timeline.makespan_s + outside_s + (5.0 if i == 0 else 0.0)  # the first step warms up
        now_s += elapsed_s
        lines.append(
            f" iteration {i + 1}/ {len(steps)} | elapsed time per iteration (ms): {elapsed_s * 1e3:.6f} | "
            f"lm loss: {7 - i / 10 if losses is None else losses[i]:.6E} | "
            f"waiting tokens: {0 if i == len(steps) - 1 else 100} | "
            f"mean delay (steps): {0.5 if i else 0.0:.2f} |"
        )
    (folder / "log.txt").write_text("\n".join(lines) + "\n")
    for rank, records in rows.items():
        (folder / "timeline" / f"rank{rank:03}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder
