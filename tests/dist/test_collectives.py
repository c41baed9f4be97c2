"""Which collectives a call enters: the same ones in the same order whatever the data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlreplay import (
    SCORE_NAMES,
    ParallelState,
    ReplayPlan,
    RolloutSamplingMask,
    RowLayout,
    ScoringConfig,
    get_log_probs_and_entropy,
    score_assembled,
    score_hidden,
    score_logits,
)
from tests.batches import Batch, cut_columns, cut_rows, make_batch
from tests.dist.counting import Call, CountingGroup, fake_world

TP, CP = 2, 4


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    with fake_world():
        yield


def fake_parallel(calls: list[Call], *, cp_rank: int = 0, joint: bool = True) -> ParallelState:
    return ParallelState(
        1,
        TP,
        CountingGroup("tp", 1, TP, calls),
        cp_rank,
        CP,
        CountingGroup("cp", cp_rank, CP, calls),
        CountingGroup("both", cp_rank * TP + 1, TP * CP, calls) if joint else None,
    )


def empty_rank_batch() -> Batch:
    """One short sample: with four CP ranks, some hold no response row in either layout."""
    batch = make_batch(0, samples=2, max_prompt=2, max_response=2)
    return Batch(
        batch.tokens[:1],
        batch.total_lengths[:1],
        batch.response_lengths[:1],
        batch.masks[:1] if batch.masks else None,
        batch.vocab_size,
        batch.logits[:1],
    )


def run(
    batch: Batch,
    *,
    cp_rank: int,
    cp_layout: Any = "zigzag",
    masks: bool = True,
    backward: bool = True,
    joint: bool = True,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[Call], list[Call], int]:
    """Collectives of the forward, of the backward, and the response rows of the rank."""
    calls: list[Call] = []
    parallel = fake_parallel(calls, cp_rank=cp_rank, joint=joint)
    local = cut_rows(
        batch.logits, qkv_format="thd", cp_layout=cp_layout, cp_rank=cp_rank, cp_size=CP
    )
    logits = cut_columns(local, 1, TP).requires_grad_()
    results = get_log_probs_and_entropy(
        logits,
        unconcat_tokens=batch.tokens,
        **batch.lengths,
        config=ScoringConfig(cp_layout=cp_layout, vocab_size=batch.vocab_size, **(config or {})),
        parallel=parallel,
        rollout_sampling_mask=batch.masks if masks else None,
        **options,
    )
    forward = list(calls)
    calls.clear()
    if backward:
        sum(v.sum() for values in results.values() for v in values if v.requires_grad).backward()
        assert logits.grad is not None
    return forward, list(calls), sum(len(v) for v in results["log_probs"])


OPTIONS = [
    {},
    {"with_entropy": True},
    {"with_entropy": True, "entropy_requires_grad": False},
    {"scores": SCORE_NAMES},
    {"scores": ("support_entropy",)},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_one_max_and_one_sum_over_tp_and_none_in_the_backward(options: dict[str, Any]) -> None:
    schedules, row_counts = set(), set()
    for seed, cp_rank, masks in itertools.product(range(4), range(CP), (True, False)):
        batch = empty_rank_batch() if seed == 0 else make_batch(seed)
        forward, backward, rows = run(batch, cp_rank=cp_rank, masks=masks, **options)
        schedules.add(tuple((c.axis, c.name) for c in forward))
        assert backward == []
        row_counts.add(rows)
    assert schedules == {(("both", "max"), ("tp", "max"), ("tp", "sum"))}
    assert 0 in row_counts
    assert len(row_counts) > 2


def test_messages_are_a_few_floats_a_row() -> None:
    batch = make_batch(3)
    forward, _, rows = run(batch, cp_rank=1, scores=SCORE_NAMES)
    (agreement, maxima, sums) = (c.shape for c in forward)
    assert agreement == (4,)
    assert maxima == (2, rows)
    assert sums == (5, rows)  # two totals, two weighted totals, the target's logit
    forward, _, rows = run(batch, cp_rank=1)
    assert forward[2].shape[1] == rows


def test_without_a_joint_group_each_axis_agrees_once() -> None:
    forward, _, _ = run(make_batch(1), cp_rank=2, joint=False)
    assert [(c.axis, c.name) for c in forward] == [
        ("tp", "max"),
        ("cp", "max"),
        ("tp", "max"),
        ("tp", "sum"),
    ]


@pytest.mark.parametrize("backward", [True, False])
def test_redistribution_adds_one_sum_over_cp_each_way(backward: bool) -> None:
    for seed, cp_rank in itertools.product(range(4), range(CP)):
        batch = empty_rank_batch() if seed == 0 else make_batch(seed)
        forward, back, _ = run(
            batch,
            cp_rank=cp_rank,
            cp_layout="contiguous",
            backward=backward,
            config={"redistribute_to_zigzag": True},
            with_entropy=True,
            scores=SCORE_NAMES,
        )
        names = [(c.axis, c.name) for c in forward]
        assert names == [("both", "max"), ("tp", "max"), ("tp", "sum"), ("cp", "sum")]
        assert [(c.axis, c.name) for c in back] == [("cp", "sum")] * backward


def test_a_rank_whose_values_need_no_gradient_enters_the_backward_of_a_gather() -> None:
    calls: list[Call] = []
    layout = RowLayout.contiguous([4], [2], cp_rank=0, cp_size=2)
    parts = [torch.zeros(n) for n in layout.row_counts]
    assert not any(p.requires_grad for p in parts)
    (whole,) = layout.gather(parts, CountingGroup("cp", 0, 2, calls))
    whole.sum().backward()
    assert [c.name for c in calls] == ["sum", "sum"]


@pytest.mark.parametrize("options", OPTIONS)
def test_true_on_policy_gathers_once_each_way(options: dict[str, Any]) -> None:
    for seed, cp_rank, masks in itertools.product(range(3), range(CP), (True, False)):
        batch = empty_rank_batch() if seed == 0 else make_batch(seed)
        forward, back, _ = run(
            batch, cp_rank=cp_rank, masks=masks, config={"true_on_policy": True}, **options
        )
        assert [(c.axis, c.name) for c in forward] == [("both", "max"), ("tp", "all_gather")]
        assert [(c.axis, c.name) for c in back] == [("tp", "all_gather")]


def test_scoring_a_plan_again_enters_no_collective_but_its_own() -> None:
    calls: list[Call] = []
    batch = make_batch(5)
    parallel = ParallelState(1, TP, CountingGroup("tp", 1, TP, calls))
    logits = cut_columns(torch.cat(batch.logits), 1, TP)

    def plan(**options: Any) -> ReplayPlan:
        return ReplayPlan.build(
            batch.tokens,
            batch.masks,
            RowLayout.packed(**batch.lengths),
            parallel=parallel,
            vocab_size=batch.vocab_size,
            device="cpu",
            **options,
        )

    sharded = plan()
    assert [c.name for c in calls] == ["max"]
    calls.clear()
    for _ in range(2):
        score_logits(logits, sharded)
    assert [c.name for c in calls] == ["max", "sum"] * 2
    calls.clear()
    score_assembled(logits, plan(assembled=True, check_agreement=False))
    assert [c.name for c in calls] == ["all_gather"]


@pytest.mark.parametrize(
    ("path", "names", "chunks"),
    [("sparse", ("log_probs",), 1), ("chunked", ("entropy",), 3), ("auto", ("entropy",), 3)],
)
def test_hidden_states_enter_those_of_the_logits_and_one_sum_in_the_backward(
    path: Any, names: tuple[str, ...], chunks: int
) -> None:
    for masks in (True, False):
        calls: list[Call] = []
        batch = make_batch(5, with_masks=masks, max_response=3)
        parallel = ParallelState(1, TP, CountingGroup("tp", 1, TP, calls))
        plan = ReplayPlan.build(
            batch.tokens,
            batch.masks,
            RowLayout.packed(**batch.lengths),
            parallel=parallel,
            vocab_size=batch.vocab_size,
            device="cpu",
        )
        calls.clear()
        hidden = torch.randn(sum(batch.total_lengths), 4, requires_grad=True)
        weight = torch.randn(-(-batch.vocab_size // TP), 4, requires_grad=True)
        size = -(-plan.num_rows // chunks)
        scores = score_hidden(
            hidden, weight, plan, scores=names, path=path, max_bytes=size * 2 * len(weight) * 4
        ).asked()
        # unrestricted rows are a chunk more, on all ranks that hold the same rows
        free = int(path == "sparse" and plan.has_unrestricted)
        assert [c.name for c in calls] == ["max", "sum"] * (chunks + free)
        calls.clear()
        scores[names[0]].sum().backward()
        assert [c.name for c in calls] == ["sum"]


def test_a_single_rank_enters_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective on a single rank")

    for name in ("all_reduce", "all_gather_into_tensor", "all_gather_single"):
        monkeypatch.setattr(torch.distributed, name, refuse)
    batch = make_batch(6)
    logits = torch.cat(batch.logits)[None].requires_grad_()
    for config in (ScoringConfig(), ScoringConfig(true_on_policy=True)):
        results = get_log_probs_and_entropy(
            logits,
            unconcat_tokens=batch.tokens,
            **batch.lengths,
            config=config,
            rollout_sampling_mask=batch.masks,
            with_entropy=True,
        )
        torch.cat(results["log_probs"]).sum().backward()


def test_a_refusing_rank_tells_its_peers_and_enters_nothing_else() -> None:
    calls: list[Call] = []
    batch = make_batch(7)
    parallel = ParallelState(1, TP, CountingGroup("tp", 1, TP, calls))
    wrong = [RolloutSamplingMask.full(n + 1) for n in batch.response_lengths]
    with pytest.raises(ValueError, match="length"):
        get_log_probs_and_entropy(
            cut_columns(torch.cat(batch.logits)[None], 1, TP),
            unconcat_tokens=batch.tokens,
            **batch.lengths,
            config=ScoringConfig(vocab_size=batch.vocab_size),
            parallel=parallel,
            rollout_sampling_mask=wrong,
        )
    assert [c.name for c in calls] == ["max"]
