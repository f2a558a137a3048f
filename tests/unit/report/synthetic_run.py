"""A run as training writes it, of two pipeline stages or two context-parallel ranks that take what their cost says."""

import json

from wlb.cost import FittedCost, QuadraticTime
from wlb.schedule import replica_timeline
from wlb.sharding import Division, ShardCosts, Sharding
from wlb.sharding.micro_batch_cost import ShardedCost

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


def write_run(folder, steps, *, outside_s=0.01, micro_batch_s=0.0, losses=None, seed=1, max_delay_steps=0):
    """A run of two pipeline stages that takes exactly what a quadratic cost says; a loss a step, or falling ones."""
    folder.mkdir(parents=True)
    (folder / "timeline").mkdir()
    arguments = SHAPE | {"seed": seed, "wlb_max_delay_steps": max_delay_steps}
    lines = [f"  {name} ........ {value}" for name, value in arguments.items()]
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


CP_WINDOW = 4096
CP_COST = FittedCost(
    forward=QuadraticTime(square_s=4e-9, token_s=7e-6, micro_batch_s=2e-3),
    backward=QuadraticTime(square_s=1e-8, token_s=1.5e-5, micro_batch_s=3e-3),
)
CP_PRICES = ShardCosts(tile_tokens=16, span_pairs=3000, received_token_pairs=500, exchange_pairs=20_000)
# Plain's windows are cut badly by per-sequence sharding: a long document, then dust.
CP_PLAIN = [
    [[2900, 500, 300, 250, 146], [1700, 1600, 400, 396]],
    [[3700, 200, 196], [100, 900, 2800, 296]],
    [[2100, 1300, 696], [3000, 1000, 96]],
    [[600, 600, 600, 600, 1696], [2000, 2000, 96]],
    [[3500, 400, 196], [1200, 1300, 1400, 196]],
    [[4096], [150, 250, 3400, 296]],
]
CP_MORE = [
    [[2900, 146], [1700, 400], [500, 300, 250], [1600, 396]],
    [[3700], [200, 196, 100, 296], [2800, 900]],
    [[2100, 696], [3000, 96], [1300, 1000]],
    [[1696, 600], [600, 600, 600], [2000], [2000, 96]],
    [[3500], [400, 196, 1200], [1300, 1400, 196]],
    [[4096], [3400], [150, 250, 296]],
]


def cp_division(sharder, *, operations_per_byte=2000.0):
    """As the options of a run of `write_cp_run` say."""
    costs = ShardCosts.for_model(
        num_heads=1, num_kv_heads=1, bytes_per_number=4, operations_per_byte=operations_per_byte
    )
    return Division(
        sharding=Sharding(name=sharder, cp_size=2, costs=costs), pad_to_multiple=2, typical_tokens=CP_WINDOW
    )


def write_cp_run(folder, steps, *, sharder=None, operations_per_byte=None, outside_s=0.01):
    """A run of two context-parallel ranks whose slowest takes what CP_COST and CP_PRICES say; the other starts first.

    sharder: as given on the command line; without it per sequence.
    """
    division = cp_division(sharder or "per_sequence", operations_per_byte=operations_per_byte or 2000.0)
    cost = ShardedCost(whole=CP_COST, division=division.priced(CP_PRICES))
    folder.mkdir(parents=True)
    (folder / "timeline").mkdir()
    options = SHAPE | {
        "seq_length": CP_WINDOW,
        "context_parallel_size": 2,
        "wlb_cp_sharding": sharder,
        "wlb_operations_per_byte": operations_per_byte,
    }
    lines = [f"  {name} ........ {value}" for name, value in options.items()]
    rows = {0: [], 1: []}
    now_s = 1000.0
    for i, step in enumerate(steps):
        begin_s, passes = now_s, []
        for kind, seconds_of in (("forward", cost.forward_s), ("backward", cost.backward_s)):
            for micro_batch in step:
                passes.append((f"{kind}-compute", now_s, now_s + seconds_of(micro_batch)))
                now_s = passes[-1][2]
        for rank, records in rows.items():
            early_s = 1e-4 * rank
            records.append(
                {
                    "step": i,
                    "rank": rank,
                    "pp_rank": 0,
                    "dp_rank": 0,
                    "cp_rank": rank,
                    "begin_s": begin_s,
                    "end_s": now_s,
                    "lengths": step,
                    "events": [(name, start - early_s, stop - early_s) for name, start, stop in passes],
                }
            )
        now_s += outside_s
        lines.append(
            f" iteration {i + 1}/ {len(steps)} | elapsed time per iteration (ms): {(now_s - begin_s) * 1e3:.6f} | "
            f"lm loss: {7 - i / 10:.6E} |"
        )
    (folder / "log.txt").write_text("\n".join(lines) + "\n")
    for rank, records in rows.items():
        (folder / "timeline" / f"rank{rank:03}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder
