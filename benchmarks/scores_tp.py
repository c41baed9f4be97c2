"""One scoring step with the vocabulary over several GPUs, beside gathering the whole logits.

    torchrun --nproc-per-node=2 benchmarks/scores_tp.py --out benchmarks/results/scores_tp.jsonl

One run for each TP size; each replaces its own lines in the file. A step is forward + backward of
the log-prob on the support and the differentiable entropy, in bf16: 4,096 rows, V = 151,936,
50 ids a row; each rank holds V / TP columns.

Times are medians by CUDA events of the slowest rank, behind other GPU work, so that launches from
Python are hidden. "collectives" are the step's two all-reduces by themselves, of the same messages.
The peers' path gathers the logits of all ranks, scores whole rows on every rank and keeps its own
columns of the gradient: with the dense mask, as trainers have it, and with this library's kernels
on the gathered rows.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scores_gpu
import torch
import torch.distributed as dist
from scores_gpu import ROWS, Result
from torch import Tensor

from rlreplay import ParallelState, ReplayPlan, RolloutSamplingMask, RowLayout, score_logits
from rlreplay.kernels.reference import masked_log_softmax

VOCAB, NUM_IDS = scores_gpu.CENTRE["vocab"], scores_gpu.CENTRE["ids"]
NAMES = ("log_probs", "entropy")
BEHIND = 400
"""Flushes before a step, of about 40 us each: the gathering paths launch much."""

Step = Callable[[], Tensor]


def make_plan(parallel: ParallelState) -> tuple[ReplayPlan, Tensor]:
    """The plan of one sample whose prompt is one token, and its sampled tokens."""
    supports, sampled = scores_gpu.make_supports(VOCAB, NUM_IDS)
    offsets = np.arange(ROWS + 1) * NUM_IDS
    plan = ReplayPlan.build(
        [np.concatenate([[0], sampled])],
        [RolloutSamplingMask(supports.reshape(-1), offsets, vocab_size=VOCAB)],
        RowLayout.packed([ROWS + 1], [ROWS]),
        parallel=parallel,
        vocab_size=VOCAB,
        device="cuda",
    )
    return plan, torch.from_numpy(sampled).to("cuda")


class _GatherColumns(torch.autograd.Function):
    """[T, v] of each rank to [T, V] on every rank; back, each rank's own columns."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor) -> Tensor:
        ctx.columns = shard.shape[1]
        received = shard.new_empty(dist.get_world_size(), *shard.shape)
        dist.all_gather_into_tensor(received, shard)
        return received.transpose(0, 1).flatten(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        start = dist.get_rank() * ctx.columns
        return gradient[:, start : start + ctx.columns].contiguous()


def whole_rows(shard: Tensor) -> Tensor:
    return _GatherColumns.apply(shard) if dist.get_world_size() > 1 else shard


def stepped(shard: Tensor, forward: Callable[[Tensor], tuple[Tensor, ...]]) -> Step:
    upstream = (scores_gpu.noise()[:ROWS].clone(), scores_gpu.noise()[ROWS : 2 * ROWS] * 0.1)

    def step() -> Tensor:
        leaf = shard.detach().requires_grad_()
        values = forward(leaf)
        return torch.autograd.grad(values, leaf, upstream)[0]

    return step


def paths(shard: Tensor) -> dict[str, Step]:
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    sharded, sampled = make_plan(ParallelState.from_groups(tp_group=group))
    whole, _ = make_plan(ParallelState.single())
    mask = torch.zeros(ROWS, VOCAB, dtype=torch.bool, device="cuda")
    mask[whole.row_of_id(), whole.ids.long()] = True

    def scored(logits: Tensor, plan: ReplayPlan) -> tuple[Tensor, ...]:
        return tuple(score_logits(logits, plan, scores=NAMES).asked().values())

    def dense(leaf: Tensor) -> tuple[Tensor, ...]:
        rows = whole_rows(leaf)[:ROWS].float()
        log_probs = masked_log_softmax(rows, mask).gather(1, sampled[:, None]).squeeze(1)
        return log_probs, scores_gpu.torch_entropy(rows)

    steps = {
        "rlreplay": stepped(shard, lambda leaf: scored(leaf, sharded)),
        "gathered, dense mask": stepped(shard, dense),
    }
    if group is not None:
        steps["gathered, rlreplay"] = stepped(shard, lambda leaf: scored(whole_rows(leaf), whole))
    return steps


def all_reduces() -> Step:
    """The two collectives of a step with a log-prob and an entropy, by themselves."""
    maxima = torch.zeros(2, ROWS, device="cuda")
    sums = torch.zeros(4, ROWS, device="cuda")

    def step() -> Tensor:
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        dist.all_reduce(sums)
        return sums

    return step


def slowest(value: float) -> float:
    every = torch.tensor(value, dtype=torch.float64, device="cuda")
    dist.all_reduce(every, op=dist.ReduceOp.MAX)
    return round(float(every), 4)


def timed(step: Step) -> float:
    for _ in range(3):
        step()
    dist.barrier()
    return slowest(scores_gpu.milliseconds(step, BEHIND))


def measure() -> list[Result]:
    size, rank = dist.get_world_size(), dist.get_rank()
    bandwidth = scores_gpu.copy_bandwidth()
    facts = scores_gpu.environment(bandwidth)
    columns = VOCAB // size
    whole = scores_gpu.make_logits(VOCAB, torch.bfloat16)
    shard = whole[:, rank * columns : (rank + 1) * columns].clone()
    del whole
    steps, results = paths(shard), []
    own = steps["rlreplay"]()
    for name, step in steps.items():
        # the same gradient, within the rounding of two computations in bf16
        difference = (step().float() - own.float()).abs().max() / own.float().abs().max()
        result: Result = {"path": name, "tp": size, "rows": ROWS, "vocab": VOCAB, "ids": NUM_IDS}
        result["gradient_difference"] = slowest(float(difference))
        result["ms"] = timed(step)
        result["peak_bytes"] = scores_gpu.peak_bytes(step)
        if name == "rlreplay":
            result["collectives_ms"] = timed(all_reduces()) if size > 1 else 0.0
            moved = (36 + 68) * ROWS * NUM_IDS // size + 2 * (3 * ROWS + 1) * columns
            result["bytes"] = moved
            result["share_of_copy_bandwidth"] = round(moved / (result["ms"] / 1e3) / bandwidth, 4)
        results.append({**result, "dtype": "bf16", **facts})
        torch.cuda.empty_cache()
    return results


def print_table(results: list[Result]) -> None:
    lines = []
    for row in sorted(results, key=lambda row: row["tp"]):
        share, collectives = row.get("share_of_copy_bandwidth"), row.get("collectives_ms")
        lines.append(
            [
                str(row["tp"]),
                row["path"],
                f"{row['ms']:.3f}",
                "" if collectives is None else f"{collectives:.3f}",
                "" if share is None else f"{share:.0%}",
                f"{row['peak_bytes'] / 2**30:.2f}",
            ]
        )
    scores_gpu.print_rows(("TP", "path", "ms", "collectives ms", "of copy", "peak GiB"), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="a file of JSON lines")
    parser.add_argument("--results", action="store_true", help="print the file, measure nothing")
    options = parser.parse_args()
    kept = []
    if options.out and options.out.exists():
        kept = scores_gpu.read_results(options.out)
    if options.results:
        print_table(kept)
        return
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    results = measure()
    if dist.get_rank() == 0:
        lines = [row for row in kept if row["tp"] != dist.get_world_size()] + results
        print_table(lines)
        if options.out:
            options.out.write_text("".join(json.dumps(row) + "\n" for row in lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
