"""True on-policy mode: the bits of `torch.log_softmax` over the assembled row, on any TP size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlreplay import (
    SCORE_NAMES,
    ParallelState,
    ReplayError,
    ReplayPlan,
    RowLayout,
    ScoringConfig,
    get_log_probs_and_entropy,
    score_assembled,
    score_logits,
)
from rlreplay import scores as scores_module
from rlreplay.kernels.reference import entropy_of
from tests.batches import (
    Batch,
    assert_within,
    cut_columns,
    error_budget,
    make_batch,
    random_weights,
)
from tests.dist.harness import TRANSPORT, make_grid, rank_device, run_ranks

TEMPERATURE = 0.7
# What an engine returns. On a GPU the other scores' sums depend on how many rows are in a call.
SAME_BITS = SCORE_NAMES if TRANSPORT == "cpu" else ("log_probs", "full_log_probs")


def engine_scores(
    batch: Batch, rows: Tensor, dtype: torch.dtype, exact: bool = False
) -> dict[str, Tensor]:
    """What an engine computes from the whole rows [R, V], by dense differentiable torch.

    With `exact`, the scores of the divided rows in float64.
    """
    # as SGLang divides in its on-policy mode: by a float32 tensor, cast back to the model's dtype
    x = rows.to(dtype).div(rows.new_tensor([TEMPERATURE], dtype=torch.float32)).to(dtype)
    masked = x.masked_fill(~torch.cat(batch.supports()).to(x.device), -torch.inf)
    y = torch.cat(
        [
            torch.from_numpy(t[n - r :])
            for t, n, r in zip(
                batch.tokens, batch.total_lengths, batch.response_lengths, strict=True
            )
        ]
    )[:, None].to(x.device)
    wide = x.to(torch.float64 if exact else torch.promote_types(dtype, torch.float32))
    wide_masked = masked.to(wide.dtype)
    if exact:
        x, masked = wide, wide_masked
    return {
        "log_probs": torch.log_softmax(masked, -1).gather(1, y)[:, 0],
        "full_log_probs": torch.log_softmax(x, -1).gather(1, y)[:, 0],
        "entropy": entropy_of(torch.log_softmax(wide, -1)),
        "support_entropy": entropy_of(torch.log_softmax(wide_masked, -1)),
        "log_support_mass": wide_masked.logsumexp(-1) - wide.logsumexp(-1),
    }


def scoring_rows(batch: Batch) -> Tensor:
    """Index of each response token's scoring row in the packed stream."""
    starts = np.cumsum([0, *batch.total_lengths[:-1]])
    return torch.from_numpy(
        np.concatenate(
            [
                s + np.arange(n - r - 1, n - 1)
                for s, n, r in zip(starts, batch.total_lengths, batch.response_lengths, strict=True)
            ]
        )
    )


def weigh(batch: Batch, values: dict[str, Tensor]) -> Tensor:
    weights = random_weights(batch, values)
    terms = [(v.double().cpu() * torch.cat(weights[k])).sum() for k, v in values.items()]
    return torch.stack(terms).sum()


def _check(
    rank: int, world_size: int, logits_dtype: torch.dtype, dtype: torch.dtype, masks: bool
) -> None:
    parallel = ParallelState.from_groups(*make_grid(world_size, 1))
    # one row a chunk, all rows in one chunk, and what a large batch would have
    for seed, chunk_bytes in enumerate((1, 1 << 25, 1 << 9)):
        scores_module._ASSEMBLED_CHUNK_BYTES = chunk_bytes
        batch = make_batch(seed, vocab_size=90, dtype=logits_dtype, with_masks=masks)
        whole = torch.cat(batch.logits).to(rank_device()).requires_grad_()
        expected = engine_scores(batch, whole[scoring_rows(batch)], dtype)
        exact = engine_scores(batch, whole[scoring_rows(batch)], dtype, exact=True)
        logits = cut_columns(whole.detach(), rank, world_size, extra=2)[None].requires_grad_()
        kept = logits.detach().clone()
        results = get_log_probs_and_entropy(
            logits,
            unconcat_tokens=batch.tokens,
            **batch.lengths,
            config=ScoringConfig(
                temperature=TEMPERATURE,
                vocab_size=batch.vocab_size,
                true_on_policy=True,
                model_dtype=None if dtype == logits_dtype else dtype,
            ),
            parallel=parallel,
            rollout_sampling_mask=batch.masks,
            with_entropy=True,
            scores=SCORE_NAMES,
        )
        values = {name: torch.cat(parts) for name, parts in results.items()}
        for name, value in values.items():
            assert value.dtype == expected[name].dtype, name
            if name in SAME_BITS:
                assert torch.equal(value.detach(), expected[name].detach()), name
            else:
                budget = error_budget(
                    [expected[name].detach()], [exact[name].detach()], value.dtype
                )
                assert_within(value, exact[name].detach(), budget, name)
        # One score at a time: of several, the bits depend on the order that autograd adds them in.
        for name, value in values.items():
            mine, theirs = weigh(batch, {name: value}), weigh(batch, {name: expected[name]})
            (gradient,) = torch.autograd.grad(mine, logits, retain_graph=True)
            (whole_gradient,) = torch.autograd.grad(theirs, whole, retain_graph=True)
            shard = cut_columns(whole_gradient, rank, world_size, extra=2, filler=0.0)[None]
            if name in SAME_BITS:
                assert torch.equal(gradient, shard), name
                continue
            value = weigh(batch, {name: exact[name]})
            (exact_gradient,) = torch.autograd.grad(value, whole, retain_graph=True)
            exact_shard = cut_columns(
                exact_gradient.double(), rank, world_size, extra=2, filler=0.0
            )
            budget = error_budget([whole_gradient], [exact_gradient.double()], logits_dtype)
            assert_within(gradient, exact_shard[None], budget, f"gradient of {name}")
        assert torch.equal(logits.detach(), kept)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize(
    ("logits_dtype", "dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float32),
    ],
)
def test_scores_and_gradient_have_the_bits_of_the_assembled_row(
    tp: int, masks: bool, logits_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    run_ranks(tp, _check, logits_dtype, dtype, masks)


def single_plan(batch: Batch, **options: Any) -> ReplayPlan:
    options.setdefault("parallel", ParallelState.single())
    return ReplayPlan.build(
        batch.tokens,
        batch.masks,
        RowLayout.packed(**batch.lengths),
        vocab_size=batch.vocab_size,
        device=rank_device(),
        **options,
    )


def _gradcheck(rank: int, world_size: int) -> None:
    batch = make_batch(1, samples=3, max_response=4, vocab_size=8, dtype=torch.float64)
    plan = single_plan(batch)
    logits = torch.cat(batch.logits).to(rank_device()).requires_grad_()

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(score_assembled(x, plan, scores=SCORE_NAMES, temperature=0.7).asked().values())

    assert torch.autograd.gradcheck(function, (logits,))


def test_gradcheck() -> None:
    run_ranks(1, _gradcheck)  # in a rank: a backward starts CUDA in a process, where there is one


def test_bf16_bits_are_not_those_of_the_float32_scores() -> None:
    # If they were, the tests above would say nothing about the order of the roundings.
    batch = make_batch(2, vocab_size=90, dtype=torch.bfloat16)
    plan, logits = single_plan(batch), torch.cat(batch.logits)
    short = score_assembled(logits, plan, temperature=TEMPERATURE).log_probs
    wide = score_logits(logits, plan, temperature=TEMPERATURE).log_probs
    assert short is not None
    assert wide is not None
    assert not torch.equal(short, wide.to(torch.bfloat16))
    torch.testing.assert_close(short.float(), wide, rtol=2**-6, atol=2**-6)


def _check_wrong_plan(rank: int, world_size: int) -> None:
    batch = make_batch(3)
    parallel = ParallelState.from_groups(*make_grid(2, 1))
    logits = cut_columns(torch.cat(batch.logits), rank, 2).to(rank_device())
    with pytest.raises(ReplayError, match="another way of scoring"):
        score_assembled(logits, single_plan(batch, parallel=parallel))
    with pytest.raises(ReplayError, match="another way of scoring"):
        score_logits(logits, single_plan(batch, parallel=parallel, assembled=True))


def test_a_plan_for_the_other_way_of_scoring_is_refused() -> None:
    run_ranks(2, _check_wrong_plan)


def test_temperature_is_one_number_above_zero() -> None:
    batch = make_batch(4)
    plan, logits = single_plan(batch), torch.cat(batch.logits)
    with pytest.raises(ReplayError, match="temperature is a tensor"):
        score_assembled(logits, plan, temperature=torch.ones(plan.num_rows))  # type: ignore[arg-type]
    with pytest.raises(ReplayError, match="not above 0"):
        score_assembled(logits, plan, temperature=0.0)
