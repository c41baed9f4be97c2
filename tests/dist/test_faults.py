"""What a fault on some ranks does to all of them: the right error everywhere, and no hang.

Every test runs TP 2 x CP 2 on real groups and ends inside its timeout.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlreplay import (
    SCORE_NAMES,
    MissingMaskError,
    MissingTokenError,
    ParallelState,
    ReplayError,
    RolloutSamplingMask,
    ScoringConfig,
    get_log_probs_and_entropy,
)
from tests.batches import Batch, cut_columns, cut_rows, held_responses, make_batch
from tests.dist.harness import (
    Outcome,
    make_grid,
    rank_device,
    run_ranks,
    run_ranks_expecting_errors,
)

TP, CP = 2, 2
TIMEOUT = 20.0

Change = Callable[[Batch, int], dict[str, Any]]


def local_logits(batch: Batch, parallel: ParallelState) -> torch.Tensor:
    rows = cut_rows(
        batch.logits,
        qkv_format="thd",
        cp_layout="zigzag",
        cp_rank=parallel.cp_rank,
        cp_size=parallel.cp_size,
    )
    shard = cut_columns(rows, parallel.tp_rank, parallel.tp_size)
    return shard.to(rank_device()).requires_grad_()


def score(batch: Batch, parallel: ParallelState, **options: Any) -> dict[str, Any]:
    options.setdefault("rollout_sampling_mask", batch.masks)
    return get_log_probs_and_entropy(
        options.pop("logits", None) if "logits" in options else local_logits(batch, parallel),
        unconcat_tokens=options.pop("tokens", batch.tokens),
        **batch.lengths,
        config=ScoringConfig(vocab_size=batch.vocab_size),
        parallel=parallel,
        with_entropy=True,
        scores=SCORE_NAMES,
        **options,
    )


def _score_changed(rank: int, world_size: int, change: Change) -> None:
    parallel = ParallelState.from_groups(*make_grid(TP, CP))
    batch = make_batch(3, samples=4)
    score(batch, parallel, **change(batch, rank))


def outcomes_of(change: Change) -> list[Outcome]:
    return run_ranks_expecting_errors(TP * CP, _score_changed, change, timeout=TIMEOUT)


def masks_with(batch: Batch, sample: int, mask: Any) -> dict[str, Any]:
    assert batch.masks is not None
    masks = list(batch.masks)
    masks[sample] = mask
    return {"rollout_sampling_mask": masks}


def short_mask(batch: Batch, rank: int) -> dict[str, Any]:
    assert batch.masks is not None
    return masks_with(batch, 1, batch.masks[1].truncate(len(batch.masks[1]) - 1))


def foreign_id(batch: Batch, rank: int) -> dict[str, Any]:
    rows = [[0, 1, batch.vocab_size]] * batch.response_lengths[1]
    return masks_with(batch, 1, RolloutSamplingMask.from_mask_list(rows))


def held_by(batch: Batch, sample: int, cp_rank: int) -> list[int]:
    """Response tokens of a sample that one CP rank scores."""
    indices = [torch.arange(n) for n in batch.response_lengths]
    layout: dict[str, Any] = {"qkv_format": "thd", "cp_layout": "zigzag"}
    held = held_responses(batch, indices, **layout, cp_rank=cp_rank, cp_size=CP)
    return held[sample].tolist()


def missing_token(batch: Batch, rank: int) -> dict[str, Any]:
    """A sampled token outside its support, in a row that only CP rank 1 holds."""
    sample = max(range(len(batch.tokens)), key=lambda i: batch.response_lengths[i])
    row = held_by(batch, sample, cp_rank=1)[0]
    prompt = batch.total_lengths[sample] - batch.response_lengths[sample]
    rows: list[list[int]] = [[int(t)] for t in batch.tokens[sample][prompt:]]
    rows[row] = [(rows[row][0] + 1) % batch.vocab_size]
    return masks_with(batch, sample, RolloutSamplingMask.from_mask_list(rows))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (short_mask, ReplayError, "sample 1: the sampling mask does not have the response's"),
        (foreign_id, ReplayError, "sample 1, row 0: support id out of range"),
        (missing_token, MissingTokenError, "the sampled token is not in its support"),
        (lambda b, r: masks_with(b, 2, None), MissingMaskError, "sample 2: no sampling mask"),
        (lambda b, r: {"tokens": b.tokens[:-1]}, ReplayError, "not one for each sample"),
    ],
)
def test_bad_data_raises_the_same_error_on_every_rank(
    change: Change, kind: type[ReplayError], message: str
) -> None:
    errors = [outcome.error for outcome in outcomes_of(change)]
    assert {type(e) for e in errors} == {kind}
    assert len({str(e) for e in errors}) == 1
    assert message in str(errors[0])


def test_a_missing_token_is_told_with_sample_and_row_also_where_the_row_is_not_held() -> None:
    batch = make_batch(3, samples=4)
    sample = max(range(len(batch.tokens)), key=lambda i: batch.response_lengths[i])
    row = held_by(batch, sample, cp_rank=1)[0]
    assert row not in held_by(batch, sample, cp_rank=0)
    for outcome in outcomes_of(missing_token):
        assert isinstance(outcome.error, MissingTokenError)
        assert (outcome.error.sample, outcome.error.row) == (sample, row)


def on_rank(which: int, change: Change) -> Change:
    return lambda batch, rank: change(batch, rank) if rank == which else {}


@pytest.mark.parametrize("faulty", range(TP * CP))
@pytest.mark.parametrize("change", [short_mask, foreign_id, missing_token])
def test_bad_data_on_one_rank_alone_raises_on_every_rank(change: Change, faulty: int) -> None:
    for rank, outcome in enumerate(outcomes_of(on_rank(faulty, change))):
        assert isinstance(outcome.error, ReplayError)
        told_by_a_peer = "another rank refused this micro-batch" in str(outcome.error)
        assert told_by_a_peer == (rank != faulty)


def _wrong_rows(batch: Batch, rank: int) -> dict[str, Any]:
    return {"logits": torch.zeros(1, 3, 12, device=rank_device())}


def _not_even_masks(batch: Batch, rank: int) -> dict[str, Any]:
    return {"rollout_sampling_mask": 7}


def _meta_logits(batch: Batch, rank: int) -> dict[str, Any]:
    return {"logits": torch.zeros(1, 3, 12, device="meta")}


@pytest.mark.parametrize("change", [_wrong_rows, _not_even_masks, _meta_logits])
def test_any_other_error_of_one_rank_reaches_its_peers_too(change: Change) -> None:
    outcomes = outcomes_of(on_rank(2, change))
    for rank in (0, 1, 3):
        assert "another rank refused this micro-batch" in str(outcomes[rank].error)
    assert isinstance(outcomes[2].error, ReplayError)
    assert "another rank" not in str(outcomes[2].error)


def _score_in_mode(rank: int, world_size: int, on_policy: bool, odd: str) -> Any:
    """All ranks score and go back; rank 1's logits need no gradient, or its grad mode is off."""
    parallel = ParallelState.from_groups(*make_grid(TP, CP))
    batch = make_batch(3, samples=4)
    logits = local_logits(batch, parallel)
    if rank == 1 and odd == "requires_grad":
        logits = logits.detach()
    with torch.set_grad_enabled(not (rank == 1 and odd == "grad mode")):
        results = get_log_probs_and_entropy(
            logits,
            unconcat_tokens=batch.tokens,
            **batch.lengths,
            config=ScoringConfig(vocab_size=batch.vocab_size, true_on_policy=on_policy),
            parallel=parallel,
            rollout_sampling_mask=batch.masks,
        )
    total = torch.cat(results["log_probs"]).sum()
    if total.requires_grad:
        total.backward()
    return None if logits.grad is None else bool(logits.grad.isfinite().all())


@pytest.mark.parametrize("on_policy", [True, False])
def test_a_rank_whose_logits_need_no_gradient_does_not_leave_its_peers_waiting(
    on_policy: bool,
) -> None:
    assert run_ranks(4, _score_in_mode, on_policy, "requires_grad", timeout=TIMEOUT) == [
        True,
        None,
        True,
        True,
    ]


@pytest.mark.parametrize("on_policy", [True, False])
def test_grad_mode_on_some_ranks_and_off_on_others(on_policy: bool) -> None:
    outcomes = run_ranks_expecting_errors(
        4, _score_in_mode, on_policy, "grad mode", timeout=TIMEOUT
    )
    assert all("the ranks hold different data" in str(o.error) for o in outcomes)


@pytest.mark.parametrize("without", [(0,), (1,), (2, 3), (0, 2)])
def test_masks_on_some_ranks_and_none_on_others(without: tuple[int, ...]) -> None:
    def change(batch: Batch, rank: int) -> dict[str, Any]:
        return {"rollout_sampling_mask": None} if rank in without else {}

    for outcome in outcomes_of(change):
        assert isinstance(outcome.error, ReplayError)
        assert "the ranks hold different data" in str(outcome.error)


def test_other_supports_on_one_rank() -> None:
    def change(batch: Batch, rank: int) -> dict[str, Any]:
        free = RolloutSamplingMask.full(batch.response_lengths[0])
        forced = RolloutSamplingMask.forced(batch.tokens[0][-batch.response_lengths[0] :])
        return masks_with(batch, 0, free if rank == 3 else forced)

    for outcome in outcomes_of(change):
        assert "the ranks hold different data" in str(outcome.error)


def _score_spoiled(rank: int, world_size: int, value: float, whole_row: bool) -> Any:
    """Scores and gradients of clean logits, and of logits with one row spoiled on one shard."""
    parallel = ParallelState.from_groups(*make_grid(TP, CP))
    batch = make_batch(3, samples=4)
    sample = max(range(len(batch.tokens)), key=lambda i: batch.response_lengths[i])
    batch = replace(batch, masks=None)
    row = held_by(batch, sample, cp_rank=1)[0]
    first = batch.total_lengths[sample] - batch.response_lengths[sample] - 1
    results = []
    for spoil in (False, True):
        logits = [rows.clone() for rows in batch.logits]
        if spoil:  # columns of the second vocab shard
            width = -(-batch.vocab_size // TP)
            columns = slice(0 if whole_row else width, None if whole_row else width + 1)
            logits[sample][first + row, columns] = value
        local = local_logits(replace(batch, logits=logits), parallel)
        scores = score(batch, parallel, logits=local)
        flat = torch.stack([torch.cat(scores[name]) for name in SCORE_NAMES])
        (gradient,) = torch.autograd.grad(flat.sum(), local)
        results.append((flat.detach().cpu(), gradient[0].cpu()))
    held = held_responses(
        batch,
        [
            torch.full((n,), i) * 1000 + torch.arange(n)
            for i, n in enumerate(batch.response_lengths)
        ],
        qkv_format="thd",
        cp_layout="zigzag",
        cp_rank=parallel.cp_rank,
        cp_size=CP,
    )
    return results, (torch.cat(held) == sample * 1000 + row)


@pytest.mark.parametrize(
    ("value", "whole_row"), [(float("nan"), False), (float("inf"), False), (-float("inf"), True)]
)
def test_a_spoiled_row_of_one_shard_is_nan_on_every_shard_and_no_other_row_changes(
    value: float, whole_row: bool
) -> None:
    outcomes = run_ranks(TP * CP, _score_spoiled, value, whole_row, timeout=TIMEOUT)
    spoiled_rows = 0
    for ((clean, clean_gradient), (bad, bad_gradient)), hit in outcomes:
        spoiled_rows += int(hit.sum())
        assert bad[:, hit].isnan().all()
        assert torch.equal(bad[:, ~hit], clean[:, ~hit])
        changed = ~(bad_gradient == clean_gradient).all(dim=1)
        assert int(changed.sum()) == int(hit.sum())
        assert bad_gradient[changed].isnan().any(dim=1).all()
    assert spoiled_rows == TP  # one row, held by the TP group of CP rank 1


def test_a_shard_of_minus_infinity_alone_counts_nothing() -> None:
    outcomes = run_ranks(TP * CP, _score_half_dropped, timeout=TIMEOUT)
    for results, expected in outcomes:
        for name, values in results.items():
            torch.testing.assert_close(values, expected[name], rtol=1e-5, atol=1e-5)


def _score_half_dropped(rank: int, world_size: int) -> Any:
    """The second shard of every row is -inf: the same as a vocabulary of the first shard."""
    parallel = ParallelState.from_groups(*make_grid(TP, CP))
    batch = make_batch(5, samples=4, vocab_size=12, with_masks=False)
    small = replace(batch, tokens=[t % 6 for t in batch.tokens])
    dropped = [rows.clone() for rows in batch.logits]
    for rows in dropped:
        rows[:, 6:] = -torch.inf
    scores = score(replace(small, logits=dropped), parallel)
    halved = replace(small, logits=[rows[:, :6] for rows in batch.logits], vocab_size=6)
    expected = score(halved, parallel)
    return tuple(
        {name: torch.cat(values).detach().cpu() for name, values in r.items()}
        for r in (scores, expected)
    )


def _killed_in_the_middle(rank: int, world_size: int) -> None:
    parallel = ParallelState.from_groups(*make_grid(TP, CP))
    batch = make_batch(3, samples=4)
    all_reduce = torch.distributed.all_reduce
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if rank == 1 and len(calls) == 3:  # agreement over both axes, then the scores' MAX
            os.kill(os.getpid(), signal.SIGKILL)
        return all_reduce(*args, **kwargs)

    torch.distributed.all_reduce = counted
    score(batch, parallel)


def test_the_peers_of_a_killed_rank_end_with_the_backends_error() -> None:
    outcomes = run_ranks_expecting_errors(
        TP * CP, _killed_in_the_middle, timeout=TIMEOUT, collective_timeout=5.0
    )
    assert outcomes[1].status not in ("returned", "raised")
    peer = outcomes[0]
    assert peer.status == "raised", peer.describe()
    assert not isinstance(peer.error, ReplayError)
    assert isinstance(peer.error, RuntimeError)
    # The other TP group shares no collective with the killed rank after the agreement.
    assert all(outcomes[r].status in ("returned", "raised") for r in (2, 3))
