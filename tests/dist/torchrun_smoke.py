"""One rank of a run under torchrun: scores and gradient of its shards against the whole in float64.

    torchrun --nproc-per-node=4 -m tests.dist.torchrun_smoke --tp 2 --cp 2 --out FOLDER

Each rank writes what it measured to `FOLDER/<rank>.json`. NCCL where every rank has a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from rlreplay import ParallelState, ScoringConfig, get_log_probs_and_entropy
from tests.batches import (
    assert_within,
    cut_columns,
    cut_rows,
    dense_answers,
    error_budget,
    held_responses,
    make_batch,
    random_weights,
)
from tests.dist.harness import make_grid

NAMES = ("log_probs", "entropy", "log_support_mass")
TEMPERATURE = 0.8
VOCAB = 23  # not a multiple of any TP size


@dataclass(frozen=True)
class Report:
    rank: int
    tp_rank: int
    cp_rank: int
    rows: list[int]
    """response rows of each sample on this rank"""
    gradient_columns: int
    """vocabulary columns of this rank, padding included"""
    backend: str


def check(parallel: ParallelState, device: torch.device) -> Report:
    """Compare what the library gives this rank with its part of the answers."""
    batch = make_batch(3, samples=8, max_response=20, vocab_size=VOCAB)
    layout = {
        "qkv_format": "thd",
        "cp_layout": "zigzag",
        "cp_rank": parallel.cp_rank,
        "cp_size": parallel.cp_size,
    }

    def shard(rows: list[torch.Tensor], filler: float) -> torch.Tensor:
        local = cut_rows(rows, **layout, filler=filler)
        return cut_columns(local, parallel.tp_rank, parallel.tp_size, extra=1, filler=filler)

    weights = random_weights(batch, NAMES)
    exact, exact_gradient = dense_answers(batch, weights, temperature=TEMPERATURE)
    plain, plain_gradient = dense_answers(
        batch, weights, temperature=TEMPERATURE, dtype=torch.float32
    )
    logits = shard(batch.logits, 50.0).to(device).requires_grad_()
    results = get_log_probs_and_entropy(
        logits,
        unconcat_tokens=batch.tokens,
        **batch.lengths,
        config=ScoringConfig(temperature=TEMPERATURE, vocab_size=VOCAB),
        parallel=parallel,
        rollout_sampling_mask=batch.masks,
        with_entropy=True,
        scores=NAMES,
    )
    objective = torch.zeros((), dtype=torch.float64, device=device)
    for name in NAMES:
        budget = error_budget(plain[name], exact[name], torch.float32)
        mine = held_responses(batch, exact[name], **layout)
        mine_weights = held_responses(batch, weights[name], **layout)
        for i, values in enumerate(results[name]):
            assert_within(values.cpu(), mine[i], budget, f"{name} of sample {i}")
            objective = objective + (values.double() * mine_weights[i].to(device)).sum()
    objective.backward()
    assert logits.grad is not None
    budget = error_budget(plain_gradient, exact_gradient, torch.float32)
    assert_within(logits.grad.cpu(), shard(exact_gradient, 0.0), budget, "gradient")
    return Report(
        rank=dist.get_rank(),
        tp_rank=parallel.tp_rank,
        cp_rank=parallel.cp_rank,
        rows=[len(values) for values in results["log_probs"]],
        gradient_columns=logits.grad.shape[-1],
        backend=dist.get_backend(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--cp", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    parallel = ParallelState.from_groups(*make_grid(options.tp, options.cp))
    report = check(parallel, device)
    (options.out / f"{report.rank}.json").write_text(json.dumps(asdict(report)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
