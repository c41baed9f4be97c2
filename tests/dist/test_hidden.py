"""`score_hidden` with the output layer's weight over vocab shards: the unsharded answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlreplay import SCORE_NAMES, ParallelState, ReplayPlan, RowLayout
from rlreplay.hidden_scores import sample_entropy, score_hidden
from tests.batches import Batch, make_batch, random_weights
from tests.dist.harness import make_grid, rank_device, run_ranks

WIDTH, VOCAB, TEMPERATURE = 12, 23, 0.8
CASES = (
    ("sparse", ("log_probs", "support_entropy")),
    ("chunked", SCORE_NAMES),
    ("auto", ("log_probs",)),
)


def plan_of(batch: Batch, parallel: ParallelState) -> ReplayPlan:
    return ReplayPlan.build(
        batch.tokens,
        batch.masks,
        RowLayout.packed(**batch.lengths, end_padding=True),
        parallel=parallel,
        vocab_size=VOCAB,
        device=rank_device(),
    )


def backward(
    hidden: Tensor, weight: Tensor, bias: Tensor, plan: ReplayPlan, batch: Batch, **options: Any
) -> tuple[dict[str, Tensor], list[Tensor]]:
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, weight, bias)]
    scores = score_hidden(
        leaves[0], leaves[1], plan, bias=leaves[2], temperature=TEMPERATURE, **options
    ).asked()
    weights = random_weights(batch, scores)
    terms = [(v * torch.cat(weights[k]).to(v)).sum() for k, v in scores.items()]
    gradients = torch.autograd.grad(torch.stack(terms).sum(), leaves)
    return {k: v.detach() for k, v in scores.items()}, list(gradients)


def close(actual: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11, msg=what)


def _check(rank: int, world_size: int, by_rows: bool) -> None:
    parallel = ParallelState.from_groups(*make_grid(world_size, 1))
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    for seed in range(3):
        batch = make_batch(seed, vocab_size=VOCAB)
        total = -(-sum(batch.total_lengths) // world_size) * world_size  # rows divide evenly
        hidden, weight, bias = (
            t.to(rank_device()) for t in (draw(total, WIDTH), draw(VOCAB, WIDTH), draw(VOCAB))
        )
        alone = plan_of(batch, ParallelState.single())
        plan = plan_of(batch, parallel)
        columns = -(-VOCAB // world_size)
        padding = columns * world_size - VOCAB
        shards = torch.nn.functional.pad(weight, (0, 0, 0, padding), value=7.0).split(columns)
        biases = torch.nn.functional.pad(bias, (0, padding), value=9.0).split(columns)
        mine = hidden.chunk(world_size)[rank] if by_rows else hidden
        own = slice(rank * columns, min((rank + 1) * columns, VOCAB))
        count = own.stop - own.start
        for path, names in CASES:
            options: Any = {"path": path, "scores": names, "max_bytes": 2000}
            expected, whole = backward(hidden, weight, bias, alone, batch, **options)
            scores, parts = backward(
                mine, shards[rank], biases[rank], plan, batch, sequence_parallel=by_rows, **options
            )
            for name in names:
                close(scores[name], expected[name], f"{name}, {path}")
            of_hidden = whole[0].chunk(world_size)[rank] if by_rows else whole[0]
            close(parts[0], of_hidden, f"hidden, {path}")
            close(parts[1][:count], whole[1][own], f"weight, {path}")
            close(parts[2][:count], whole[2][own], f"bias, {path}")
            assert (parts[1][count:] == 0).all()
        entropy = sample_entropy(
            mine, shards[rank], plan, bias=biases[rank], entropy_rows=5, sequence_parallel=by_rows
        )
        reference = sample_entropy(hidden, weight, alone, bias=bias, entropy_rows=5)
        close(entropy.entropy, reference.entropy, "sampled entropy")
        close(entropy.standard_error, reference.standard_error, "standard error")


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("by_rows", [False, True])
def test_a_sharded_output_layer_gives_the_unsharded_answers(tp: int, by_rows: bool) -> None:
    run_ranks(tp, _check, by_rows)
