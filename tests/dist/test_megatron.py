"""The library under Megatron's own groups, and beside Megatron's own cross-entropy."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rlreplay import ParallelState, ReplayError, ScoringConfig, get_log_probs_and_entropy
from rlreplay.log_probs import get_responses
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
from tests.dist.harness import TRANSPORT, rank_device, run_ranks


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    """Imported before any rank forks: it takes seconds. On a GPU it starts CUDA: in the ranks."""
    if TRANSPORT != "cpu":
        return
    import megatron.core.parallel_state
    import megatron.core.tensor_parallel  # noqa: F401


def _initialise(tp: int, cp: int) -> ParallelState:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, context_parallel_size=cp
    )
    return ParallelState.from_megatron()


# ParallelState.from_megatron


def _places(rank: int, world_size: int, tp: int, cp: int) -> list[object]:
    state = _initialise(tp, cp)
    groups = (state.tp_group, state.cp_group, state.tp_cp_group)
    return [
        (state.tp_rank, state.tp_size, state.cp_rank, state.cp_size),
        *(None if group is None else dist.get_process_group_ranks(group) for group in groups),
    ]


@pytest.mark.parametrize(
    ("tp", "cp", "expected"),
    [
        (
            2,
            2,
            [
                [(0, 2, 0, 2), [0, 1], [0, 2], [0, 1, 2, 3]],
                [(1, 2, 0, 2), [0, 1], [1, 3], [0, 1, 2, 3]],
                [(0, 2, 1, 2), [2, 3], [0, 2], [0, 1, 2, 3]],
                [(1, 2, 1, 2), [2, 3], [1, 3], [0, 1, 2, 3]],
            ],
        ),
        # two data-parallel replicas: an axis of size 1 has no group, and none spans the replicas
        (
            2,
            1,
            [
                [(0, 2, 0, 1), [0, 1], None, [0, 1]],
                [(1, 2, 0, 1), [0, 1], None, [0, 1]],
                [(0, 2, 0, 1), [2, 3], None, [2, 3]],
                [(1, 2, 0, 1), [2, 3], None, [2, 3]],
            ],
        ),
        (
            1,
            2,
            [
                [(0, 1, 0, 2), None, [0, 1], [0, 1]],
                [(0, 1, 1, 2), None, [0, 1], [0, 1]],
                [(0, 1, 0, 2), None, [2, 3], [2, 3]],
                [(0, 1, 1, 2), None, [2, 3], [2, 3]],
            ],
        ),
        (1, 1, [[(0, 1, 0, 1), None, None, None]] * 4),
        (2, 1, [[(0, 2, 0, 1), [0, 1], None, [0, 1]], [(1, 2, 0, 1), [0, 1], None, [0, 1]]]),
        (1, 2, [[(0, 1, 0, 2), None, [0, 1], [0, 1]], [(0, 1, 1, 2), None, [0, 1], [0, 1]]]),
    ],
)
def test_from_megatron_reads_ranks_sizes_and_groups(
    tp: int, cp: int, expected: list[list[object]]
) -> None:
    assert run_ranks(len(expected), _places, tp, cp) == expected


def _before_initialisation(rank: int, world_size: int) -> None:
    with pytest.raises(ReplayError, match="not initialised"):
        ParallelState.from_megatron()


def test_from_megatron_is_refused_before_initialisation() -> None:
    run_ranks(1, _before_initialisation)


def _after_destruction(rank: int, world_size: int) -> None:
    from megatron.core import parallel_state

    _initialise(tp=world_size, cp=1)
    parallel_state.destroy_model_parallel()
    with pytest.raises(ReplayError, match="not initialised"):
        ParallelState.from_megatron()


def test_from_megatron_is_refused_after_destruction() -> None:
    run_ranks(2, _after_destruction)


# Parity with Megatron's cross-entropy, which also knows no masks. It overwrites fp32 logits, so it
# gets copies.


def _cross_entropy(rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Megatron's loss of each row, for logits `[rows, V]` that stay as they are."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    losses: torch.Tensor = vocab_parallel_cross_entropy(rows.clone()[:, None], targets[:, None])
    return losses[:, 0]


def _check_parity(rank: int, world_size: int, tp: int, cp: int, dtype: torch.dtype) -> int:
    parallel = _initialise(tp, cp)
    batch = make_batch(11, samples=6, max_response=12, vocab_size=64, dtype=dtype, with_masks=False)
    layout = {
        "qkv_format": "thd",
        "cp_layout": "zigzag",
        "cp_rank": parallel.cp_rank,
        "cp_size": cp,
    }

    def shard(rows: list[torch.Tensor]) -> torch.Tensor:
        return cut_columns(cut_rows(rows, **layout, filler=0.0), parallel.tp_rank, tp)

    logits = shard(batch.logits).to(rank_device())
    weights = random_weights(batch, ["log_probs"])
    exact, exact_gradient = dense_answers(batch, weights)
    mine = held_responses(batch, exact["log_probs"], **layout)
    held_weights = torch.cat(held_responses(batch, weights["log_probs"], **layout))
    mine_weights = held_weights.float().to(rank_device())
    arguments = {"unconcat_tokens": batch.tokens, **batch.lengths, "config": ScoringConfig()}

    theirs_leaf = logits.clone().requires_grad_()
    responses = list(get_responses(theirs_leaf, **arguments, parallel=parallel))
    theirs = -_cross_entropy(
        torch.cat([r.logits_rows for r in responses]),
        torch.cat([r.target_tokens for r in responses]),
    )
    (theirs * mine_weights).sum().backward()

    ours_leaf = logits.clone().requires_grad_()
    scores = get_log_probs_and_entropy(ours_leaf, **arguments, parallel=parallel)
    ours = torch.cat(scores["log_probs"])
    (ours * mine_weights).sum().backward()
    assert torch.equal(ours_leaf.detach(), logits), "the logits were written to"

    budget = error_budget([theirs.detach()], [torch.cat(mine)], torch.float32)
    assert_within(ours, torch.cat(mine), budget, "log-probs")
    assert_within(ours, theirs.detach().double(), budget, "log-probs beside Megatron's")
    assert ours_leaf.grad is not None
    assert theirs_leaf.grad is not None
    exact_shard = shard(exact_gradient)
    budget = error_budget([theirs_leaf.grad], [exact_shard], dtype)
    assert_within(ours_leaf.grad, exact_shard, budget, "gradient")
    assert_within(ours_leaf.grad, theirs_leaf.grad.double(), budget, "gradient beside Megatron's")
    return len(ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tp", "cp"), [(4, 1), (2, 2), (1, 4), (2, 1), (1, 2)])
def test_without_masks_it_is_megatrons_cross_entropy(tp: int, cp: int, dtype: torch.dtype) -> None:
    rows = run_ranks(tp * cp, _check_parity, tp, cp, dtype)
    batch = make_batch(11, samples=6, max_response=12, vocab_size=64)
    assert sum(rows) == tp * sum(batch.response_lengths)
