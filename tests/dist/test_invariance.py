"""Scores and gradients do not depend on the parallel layout.

Every rank cuts its logits out of the whole ones by brute force and compares what the library
gives it with the unsharded float64 reference: its rows of every score, its columns and rows of
the gradient, and zeros everywhere else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlreplay import SCORE_NAMES, ParallelState, ScoringConfig, get_log_probs_and_entropy
from tests.batches import (
    Batch,
    assert_within,
    cut_columns,
    cut_rows,
    dense_answers,
    error_budget,
    held_responses,
    make_batch,
    random_weights,
)
from tests.dist.harness import make_grid, rank_device, run_ranks

FORMATS = ("thd", "bshd")
LAYOUTS = ("zigzag", "contiguous")
DTYPES = (torch.float32, torch.bfloat16)
TEMPERATURE = 0.8


def _cases(cp_size: int) -> Iterator[dict[str, Any]]:
    """Every layout x type x padding; without CP the two layouts are one."""
    layouts = LAYOUTS if cp_size > 1 else LAYOUTS[:1]
    for fmt, cp_layout, dtype, pad_lengths, pad_vocab in itertools.product(
        FORMATS, layouts, DTYPES, (False, True), (False, True)
    ):
        yield {
            "qkv_format": fmt,
            "cp_layout": cp_layout,
            "dtype": dtype,
            "pad_lengths": pad_lengths,
            "pad_vocab": pad_vocab,
        }


def _padding(batch: Batch, case: dict[str, Any], cp_size: int) -> dict[str, Any]:
    """The padded lengths (thd) or the padded width (bshd) of a case."""
    if not case["pad_lengths"]:
        return {}
    multiple = 2 * cp_size
    padded = [-(-(n + 3) // multiple) * multiple for n in batch.total_lengths]
    if case["qkv_format"] == "bshd":
        return {"max_seq_len": max(padded)}
    return {"padded_lengths": padded}


def _check_case(
    case: dict[str, Any], batch: Batch, parallel: ParallelState, redistribute: bool = False
) -> int:
    """Compare one layout's results on this rank with the reference; returns its response rows."""
    dtype = case["dtype"]
    padding = _padding(batch, case, parallel.cp_size)
    layout = {
        "qkv_format": case["qkv_format"],
        "cp_layout": case["cp_layout"],
        "cp_rank": parallel.cp_rank,
        "cp_size": parallel.cp_size,
        **padding,
    }
    extra = 3 if case["pad_vocab"] else 0

    def shard(rows: list[torch.Tensor], filler: float) -> torch.Tensor:
        local = cut_rows(rows, **layout, filler=filler)
        return cut_columns(local, parallel.tp_rank, parallel.tp_size, extra=extra, filler=filler)

    weights = random_weights(batch, SCORE_NAMES)
    exact, exact_gradient = dense_answers(batch, weights, temperature=TEMPERATURE)
    plain, plain_gradient = dense_answers(
        batch, weights, temperature=TEMPERATURE, dtype=torch.float32
    )
    logits = shard(batch.logits, 50.0).to(rank_device()).requires_grad_()
    before = logits.detach().clone()
    results = get_log_probs_and_entropy(
        logits,
        unconcat_tokens=batch.tokens,
        **batch.lengths,
        config=ScoringConfig(
            qkv_format=case["qkv_format"],
            temperature=TEMPERATURE,
            cp_layout=case["cp_layout"],
            vocab_size=batch.vocab_size,
            redistribute_to_zigzag=redistribute,
        ),
        parallel=parallel,
        rollout_sampling_mask=batch.masks,
        with_entropy=True,
        scores=SCORE_NAMES,
        max_seq_lens=padding.get("max_seq_len"),
        padded_lengths=padding.get("padded_lengths"),
    )
    held = {**layout, "cp_layout": "zigzag"} if redistribute else layout
    objective = torch.zeros((), dtype=torch.float64)
    for name in SCORE_NAMES:
        mine = held_responses(batch, exact[name], **held)
        budget = error_budget(plain[name], exact[name], torch.float32)
        mine_weights = held_responses(batch, weights[name], **held)
        for i, values in enumerate(results[name]):
            assert values.dtype == torch.float32
            assert_within(values, mine[i], budget, f"{name} of sample {i}, {case}")
            objective = objective + (values.double().cpu() * mine_weights[i]).sum()
    objective.backward()
    assert logits.grad is not None
    assert logits.grad.dtype == dtype
    rounded = [g.to(dtype) for g in plain_gradient]
    budget = error_budget(rounded, exact_gradient, dtype)
    assert_within(logits.grad, shard(exact_gradient, 0.0), budget, f"gradient, {case}")
    scored = shard([_scored(batch, i).expand_as(g) for i, g in enumerate(exact_gradient)], 0.0)
    assert (logits.grad.cpu()[scored == 0] == 0).all(), f"gradient where nothing is scored, {case}"
    assert torch.equal(logits.detach(), before), "the logits were written to"
    return sum(len(v) for v in results["log_probs"])


def _scored(batch: Batch, sample: int) -> torch.Tensor:
    """[total, 1]: 1 where the row scores a response token."""
    total, response = batch.total_lengths[sample], batch.response_lengths[sample]
    rows = torch.zeros(total, 1, dtype=torch.float64)
    rows[total - response - 1 : total - 1] = 1
    return rows


def _run_all_cases(rank: int, world_size: int, tp: int, cp: int, seed: int) -> list[int]:
    parallel = ParallelState.from_groups(*make_grid(tp, cp))
    rows = []
    for k, case in enumerate(_cases(cp)):
        batch = make_batch(seed + k, dtype=case["dtype"], with_masks=k % 8 != 7)
        rows.append(_check_case(case, batch, parallel))
        if case["cp_layout"] == "contiguous":
            _check_case(case, batch, parallel, redistribute=True)
    return rows


@pytest.mark.parametrize(("tp", "cp"), list(itertools.product((1, 2, 4), (1, 2, 4))))
def test_results_do_not_depend_on_the_parallel_layout(tp: int, cp: int) -> None:
    rows = run_ranks(tp * cp, _run_all_cases, tp, cp, 100, timeout=100)
    if cp == 4:
        assert min(min(r) for r in rows) == 0, "no rank was without rows: the batches are too long"


def _check_float64(rank: int, world_size: int) -> None:
    parallel = ParallelState.from_groups(*make_grid(2, 2))
    case = dict(next(_cases(2)), dtype=torch.float64)
    batch = make_batch(7, dtype=torch.float64)
    logits = cut_columns(
        cut_rows(
            batch.logits,
            qkv_format="thd",
            cp_layout="zigzag",
            cp_rank=parallel.cp_rank,
            cp_size=2,
        ),
        parallel.tp_rank,
        2,
    ).to(rank_device())
    exact, _ = dense_answers(batch, random_weights(batch, SCORE_NAMES))
    results = get_log_probs_and_entropy(
        logits,
        unconcat_tokens=batch.tokens,
        **batch.lengths,
        config=ScoringConfig(vocab_size=batch.vocab_size),
        parallel=parallel,
        rollout_sampling_mask=batch.masks,
    )
    held = held_responses(
        batch,
        exact["log_probs"],
        qkv_format=case["qkv_format"],
        cp_layout=case["cp_layout"],
        cp_rank=parallel.cp_rank,
        cp_size=2,
    )
    for mine, theirs in zip(results["log_probs"], held, strict=True):
        assert mine.dtype == torch.float64
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-13, atol=1e-13)


def test_float64_passes_through_the_collectives() -> None:
    run_ranks(4, _check_float64)
