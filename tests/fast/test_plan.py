"""`ReplayPlan` and `build_local_sampling_mask` against supports laid out id by id in Python."""

from __future__ import annotations

import copy
import pickle
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlreplay.errors import MissingMaskError, MissingTokenError, ReplayError
from rlreplay.layout import RowLayout
from rlreplay.plan import ReplayPlan, VocabShard, build_local_sampling_mask
from rlreplay.sampling_mask import RolloutSamplingMask
from tests.fast.strategies import (
    LayoutCase,
    MicroBatch,
    agreeing_peers,
    layout_cases,
    make_batch,
    micro_batches,
    parallel_state,
    refused,
)


@pytest.fixture(autouse=True, scope="module")
def _peers() -> Iterator[None]:
    with agreeing_peers():
        yield


def build(
    batch: MicroBatch,
    case: LayoutCase | None = None,
    *,
    rank: int = 0,
    tp_rank: int = 0,
    tp_size: int = 1,
    **options: Any,
) -> ReplayPlan:
    """The plan of one rank; packed unless another layout is given."""
    if case is None:
        case = LayoutCase("packed", batch.total_lengths, batch.response_lengths)
    parallel = parallel_state(tp_rank=tp_rank, tp_size=tp_size, cp_rank=rank, cp_size=case.cp_size)
    arguments: dict[str, Any] = {
        "parallel": parallel,
        "vocab_size": batch.vocab_size,
        "device": "cpu",
    }
    tokens = options.pop("tokens", batch.tokens)
    masks = options.pop("masks", batch.masks)
    return ReplayPlan.build(tokens, masks, case.layout(rank), **(arguments | options))


def expected_rows(
    batch: MicroBatch, case: LayoutCase, rank: int, start: int, columns: int
) -> tuple[list[list[int]], list[int | None]]:
    """For each response row of a rank: its support on a vocab shard, and its token's place in it.

    The place is None where the token lies on another shard.
    """
    supports, places = [], []
    for _, sample, index in case.scored(rank):
        token = batch.sampled(sample)[index]
        support = batch.supports[sample][index]
        ids = [token] if support is None else support
        local = [j - start for j in ids if start <= j < min(start + columns, batch.vocab_size)]
        supports.append(local)
        places.append(local.index(token - start) if token - start in local else None)
    return supports, places


def assert_is_expected(
    plan: ReplayPlan, batch: MicroBatch, case: LayoutCase, rank: int, start: int, columns: int
) -> None:
    supports, places = expected_rows(batch, case, rank, start, columns)
    scored = case.scored(rank)
    offsets = [sum(map(len, supports[:r])) for r in range(len(supports) + 1)]
    ids = [j for support in supports for j in support]
    targets = [-1 if p is None else offsets[r] + p for r, p in enumerate(places)]
    unrestricted = [batch.supports[s.sample][s.response_index] is None for s in scored]
    rows = [s.local_row for s in scored]
    for tensor, values, dtype in (
        (plan.rows, rows, torch.int64),
        (plan.offsets, offsets, torch.int64),
        (plan.ids, ids, torch.int32),
        (plan.targets, targets, torch.int64),
        (plan.unrestricted, unrestricted, torch.bool),
    ):
        assert tensor.dtype == dtype
        assert tensor.device == plan.device == torch.device("cpu")
        assert tensor.tolist() == values
    assert plan.host_rows.tolist() == rows
    assert plan.host_offsets.tolist() == offsets
    assert plan.host_unrestricted.tolist() == unrestricted
    assert (plan.num_rows, plan.num_ids) == (len(rows), len(ids))


batches_in_layouts = micro_batches().flatmap(
    lambda batch: st.tuples(
        st.just(batch),
        layout_cases(st.just((batch.total_lengths, batch.response_lengths)), max_cp=4),
    )
)


# Device tensors


@given(batches_in_layouts, st.sampled_from([1, 2, 4]), st.sampled_from([None, 0, 1, 5]))
@settings(max_examples=150)
def test_device_tensors_on_every_rank(
    drawn: tuple[MicroBatch, LayoutCase], tp_size: int, padding: int | None
) -> None:
    batch, case = drawn
    smallest = -(-batch.vocab_size // tp_size)
    columns = smallest + (padding or 0)
    for rank in range(case.cp_size):
        for tp_rank in range(tp_size):
            plan = build(
                batch,
                case,
                rank=rank,
                tp_rank=tp_rank,
                tp_size=tp_size,
                shard_columns=None if padding is None else columns,
            )
            start = tp_rank * columns
            assert_is_expected(plan, batch, case, rank, start, columns)
            assert plan.num_missing == 0
            assert plan.vocab_size == batch.vocab_size
            assert plan.layout == case.layout(rank)
            valid = max(0, min(columns, batch.vocab_size - start))
            known = tp_size > 1 or padding is not None
            assert plan.shard == VocabShard(start, columns if known else None, valid)


def test_batches_have_every_kind_of_row() -> None:
    # What the tests here rest on.
    batch = make_batch(np.random.default_rng(0), num_samples=5, max_response=9)
    rows = [row for support in batch.supports for row in support]
    assert {0 if row is None else min(len(row), 2) for row in rows} == {0, 1, 2}
    assert [mask.to_mask_list() for mask in batch.masks] == batch.supports


@given(micro_batches(), st.sampled_from([2, 4]))
def test_shards_together_hold_each_support_once(batch: MicroBatch, tp_size: int) -> None:
    columns = -(-batch.vocab_size // tp_size)
    shards = [build(batch, tp_rank=r, tp_size=tp_size) for r in range(tp_size)]
    whole = build(batch)
    for row in range(whole.num_rows):
        ids: list[int] = []
        for tp_rank, plan in enumerate(shards):
            first, last = plan.offsets[row : row + 2].tolist()
            ids += (plan.ids[first:last] + tp_rank * columns).tolist()
        first, last = whole.offsets[row : row + 2].tolist()
        assert ids == whole.ids[first:last].tolist()
        assert sum(int(plan.targets[row] >= 0) for plan in shards) == 1


def test_plan_worked_out_by_hand() -> None:
    # Sample 0: prompt [7, 1], response [2, 9, 4]; sample 1: prompt [3], response [0].
    masks = [
        RolloutSamplingMask.from_mask_list([[8, 2], None, [4]], allow_unrestricted=True),
        RolloutSamplingMask.from_mask_list([[9, 0, 5]]),
    ]
    tokens = [torch.tensor([7, 1, 2, 9, 4]), torch.tensor([3, 0])]
    layout = RowLayout.packed([5, 2], [3, 1])
    plans = [
        ReplayPlan.build(
            tokens,
            masks,
            layout,
            parallel=parallel_state(tp_rank=r, tp_size=2),
            vocab_size=10,
            device="cpu",
        )
        for r in range(2)
    ]
    assert [p.rows.tolist() for p in plans] == [[1, 2, 3, 5]] * 2
    assert plans[0].ids.tolist() == [2, 4, 0]
    assert plans[0].offsets.tolist() == [0, 1, 1, 2, 3]
    assert plans[0].targets.tolist() == [0, -1, 1, 2]
    assert plans[1].ids.tolist() == [3, 4, 0, 4]  # ids 8; 9; none; 5 and 9
    assert plans[1].offsets.tolist() == [0, 1, 2, 2, 4]
    assert plans[1].targets.tolist() == [-1, 1, -1, -1]
    assert plans[0].unrestricted.tolist() == [False, True, False, False]


@given(batches_in_layouts)
def test_without_masks_every_row_is_unrestricted(drawn: tuple[MicroBatch, LayoutCase]) -> None:
    batch, case = drawn
    full = [RolloutSamplingMask.full(n) for n in batch.response_lengths]
    free = batch._replace(masks=full, supports=[[None] * n for n in batch.response_lengths])
    for rank in range(case.cp_size):
        assert_is_expected(
            build(batch, case, rank=rank, masks=None), free, case, rank, 0, batch.vocab_size
        )
        assert_is_expected(build(free, case, rank=rank), free, case, rank, 0, batch.vocab_size)


def test_no_samples_and_no_response_rows() -> None:
    empty = MicroBatch([], [], [], [], 8, [])
    none = make_batch(np.random.default_rng(0), ([3, 1], [0, 0]), vocab_size=8)
    for batch in (empty, none):
        for tp_size in (1, 2):
            plan = build(batch, tp_size=tp_size)
            assert (plan.num_rows, plan.num_ids) == (0, 0)
            assert plan.offsets.tolist() == [0]
            assert plan.ids.tolist() == plan.rows.tolist() == plan.targets.tolist() == []


def test_tokens_of_any_integer_type() -> None:
    batch = make_batch(np.random.default_rng(3))
    expected = build(batch)
    for convert in (
        lambda t: t.tolist(),
        lambda t: t.astype(np.int32),
        lambda t: torch.from_numpy(t),
        lambda t: torch.from_numpy(t).to(torch.int16),
    ):
        plan = build(batch, tokens=[convert(t) for t in batch.tokens])
        assert torch.equal(plan.ids, expected.ids)
        assert torch.equal(plan.targets, expected.targets)


# Sampled tokens outside their support


@given(batches_in_layouts, st.sampled_from([1, 2]), st.data())
def test_include_adds_missing_tokens_and_counts_them(
    drawn: tuple[MicroBatch, LayoutCase], tp_size: int, data: st.DataObject
) -> None:
    batch, case = drawn
    wanted, thinned, missing = [], [], 0
    for i, supports in enumerate(batch.supports):
        rows = list(supports)
        for r, (ids, token) in enumerate(zip(supports, batch.sampled(i), strict=True)):
            if ids is not None and len(ids) > 1 and data.draw(st.booleans()):
                rows[r] = [j for j in ids if j != token]
                missing += 1
        wanted.append(RolloutSamplingMask.from_mask_list(rows, allow_unrestricted=True))
        thinned.append(rows)
    columns = -(-batch.vocab_size // tp_size)
    for rank in range(case.cp_size):
        for tp_rank in range(tp_size):
            place = {"rank": rank, "tp_rank": tp_rank, "tp_size": tp_size}
            plan = build(batch, case, masks=wanted, on_missing_token="include", **place)
            assert_is_expected(plan, batch, case, rank, tp_rank * columns, columns)
            assert plan.num_missing == missing  # those of all ranks' rows
            if missing:
                with pytest.raises(MissingTokenError):
                    build(batch, case, masks=wanted, **place)
    assert [mask.to_mask_list() for mask in wanted] == thinned


def without_token(batch: MicroBatch, sample: int, row: int) -> list[RolloutSamplingMask]:
    """The batch's masks, one row of which lacks its sampled token."""
    token = batch.sampled(sample)[row]
    supports = [list(rows) for rows in batch.supports]
    supports[sample][row] = [j for j in range(batch.vocab_size) if j != token]
    return [RolloutSamplingMask.from_mask_list(s, allow_unrestricted=True) for s in supports]


@given(batches_in_layouts, st.sampled_from([1, 2]), st.data())
def test_a_missing_token_is_refused_alike_on_every_rank(
    drawn: tuple[MicroBatch, LayoutCase], tp_size: int, data: st.DataObject
) -> None:
    batch, case = drawn
    places = [(i, r) for i, n in enumerate(batch.response_lengths) for r in range(n)]
    assume(places)
    sample, row = data.draw(st.sampled_from(places))
    masks = without_token(batch, sample, row)
    messages = set()
    for rank in range(case.cp_size):
        for tp_rank in range(tp_size):
            with refused(
                "not in its support", sample=sample, row=row, kind=MissingTokenError
            ) as caught:
                build(batch, case, rank=rank, tp_rank=tp_rank, tp_size=tp_size, masks=masks)
            messages.add(str(caught.value))
    assert len(messages) == 1
    assert f"token {batch.sampled(sample)[row]} among" in messages.pop()


# Refusals

# Samples with responses of 4, 0 and 3 tokens, which the refusals below name by sample and row.
BATCH = make_batch(np.random.default_rng(1), ([6, 2, 4], [4, 0, 3]), vocab_size=10)


def with_token(sample: int, row: int, token: int) -> list[Any]:
    tokens = [t.copy() for t in BATCH.tokens]
    tokens[sample][BATCH.total_lengths[sample] - BATCH.response_lengths[sample] + row] = token
    return tokens


def with_row(sample: int, row: int, ids: list[int]) -> list[RolloutSamplingMask]:
    supports = [list(rows) for rows in BATCH.supports]
    supports[sample][row] = ids
    return [RolloutSamplingMask.from_mask_list(s, allow_unrestricted=True) for s in supports]


@pytest.mark.parametrize(
    ("options", "match", "sample", "row"),
    [
        ({"tokens": BATCH.tokens[:2]}, "tokens are not one for each sample", None, None),
        ({"tokens": [*BATCH.tokens, BATCH.tokens[0]]}, "not one for each sample", None, None),
        (
            {"tokens": [*BATCH.tokens[:2], BATCH.tokens[2][:-1]]},
            "tokens do not have the declared length: expected 4 tokens, got 3",
            2,
            None,
        ),
        (
            {"tokens": [np.append(BATCH.tokens[0], 1), *BATCH.tokens[1:]]},
            "tokens do not have the declared length: expected 6 tokens, got 7",
            0,
            None,
        ),
        ({"tokens": with_token(2, 1, 10)}, "out of the vocabulary: .* got 10", 2, 1),
        ({"tokens": with_token(0, 3, -1)}, "out of the vocabulary: .* got -1", 0, 3),
        ({"tokens": with_token(2, 0, 2**40)}, f"out of the vocabulary: .* got {2**40}", 2, 0),
        ({"masks": BATCH.masks[:2]}, "sampling masks are not one for each sample", None, None),
        ({"masks": []}, "sampling masks are not one for each sample", None, None),
        (
            {"masks": [*BATCH.masks[:2], BATCH.masks[2].to_mask_list()]},
            "not a sampling mask: .* got list",
            2,
            None,
        ),
        (
            {"masks": [*BATCH.masks[:2], BATCH.masks[2].truncate(2)]},
            "does not have the response's length: expected 3 rows, got 2",
            2,
            None,
        ),
        (
            {"masks": [BATCH.masks[0], RolloutSamplingMask.full(1), BATCH.masks[2]]},
            "does not have the response's length: expected 0 rows, got 1",
            1,
            None,
        ),
        (
            {"masks": with_row(2, 2, [3, BATCH.sampled(2)[2], 10])},
            "support id out of range: .* got 10",
            2,
            2,
        ),
        ({"on_missing_token": "ignore"}, "unknown on_missing_token", None, None),
        ({"on_missing_token": "ignore", "masks": None}, "unknown on_missing_token", None, None),
        ({"vocab_size": -1}, "vocab_size is not a count", None, None),
        ({"vocab_size": 10.0}, "vocab_size is not a count", None, None),
        ({"shard_columns": 9}, "too narrow .* at least 10 columns", None, None),
        ({"shard_columns": 4, "tp_size": 2}, "too narrow .* at least 5 columns", None, None),
        ({"shard_columns": 2.5, "tp_size": 4}, "shard_columns is not a count", None, None),
    ],
)
def test_refusals(options: dict[str, Any], match: str, sample: int | None, row: int | None) -> None:
    with refused(match, sample=sample, row=row):
        build(BATCH, **options)


def test_a_sample_without_a_mask_is_never_taken_for_unrestricted() -> None:
    with refused("no sampling mask for this sample", sample=1, kind=MissingMaskError):
        build(BATCH, masks=[BATCH.masks[0], None, BATCH.masks[2]])


@pytest.mark.parametrize("tokens", [[0.5, 1.0], torch.tensor([True, False]), "ab", None])
def test_tokens_that_are_no_integers_are_refused(tokens: Any) -> None:
    with refused("must be integers", sample=1):
        build(BATCH, tokens=[BATCH.tokens[0], tokens, BATCH.tokens[2]])


def test_the_layout_of_another_rank_is_refused() -> None:
    case = LayoutCase("zigzag", BATCH.total_lengths, BATCH.response_lengths, 2)
    for parallel, expected in (
        (parallel_state(), "expected context-parallel rank 0 of 1, got rank 0 of 2"),
        (parallel_state(cp_rank=1, cp_size=2), "expected context-parallel rank 1 of 2"),
        (parallel_state(cp_rank=0, cp_size=4), "expected context-parallel rank 0 of 4"),
    ):
        with refused(f"the layout is not this rank's: {expected}"):
            build(BATCH, case, parallel=parallel)


def test_the_first_of_several_faults_is_named() -> None:
    masks = with_row(2, 1, [j for j in range(10) if j != BATCH.sampled(2)[1]])
    masks[0] = RolloutSamplingMask.from_mask_list(
        [None, [j for j in range(10) if j != BATCH.sampled(0)[1]], None, None],
        allow_unrestricted=True,
    )
    with refused(r"\(2 such rows\)", sample=0, row=1, kind=MissingTokenError):
        build(BATCH, masks=masks)


def test_a_vocabulary_with_empty_shards() -> None:
    batch = make_batch(np.random.default_rng(2), vocab_size=3, max_support=3)
    case = LayoutCase("packed", batch.total_lengths, batch.response_lengths)
    for tp_rank in range(4):
        plan = build(batch, tp_rank=tp_rank, tp_size=4, shard_columns=2)
        assert_is_expected(plan, batch, case, 0, 2 * tp_rank, 2)
        assert plan.shard.valid == (2, 1, 0, 0)[tp_rank]


# Agreement of the ranks


@given(batches_in_layouts)
def test_fingerprints_agree_on_every_rank(drawn: tuple[MicroBatch, LayoutCase]) -> None:
    batch, case = drawn
    fingerprints = [
        {
            build(batch, case, rank=rank, tp_rank=tp_rank, tp_size=2, **options).fingerprint
            for rank in range(case.cp_size)
            for tp_rank in range(2)
        }
        for options in (
            {},
            {"assembled": True},
            {"vocab_size": batch.vocab_size + 1},
            {"shard_columns": batch.vocab_size + 3},
            {"on_missing_token": "include"},
        )
    ]
    assert all(len(same) == 1 for same in fingerprints)
    assert len(set.union(*fingerprints)) == len(fingerprints)


def test_fingerprints_tell_different_micro_batches_apart() -> None:
    free = [list(rows) for rows in BATCH.supports]
    free[2][0] = [j for j in range(10) if j != free[2][0]] if free[2][0] is None else None
    split = {"tp_size": 2}
    fingerprints = {
        build(BATCH, **split).fingerprint,
        build(BATCH, masks=None, **split).fingerprint,
        build(BATCH, tokens=with_token(2, 1, 0), masks=None, **split).fingerprint,
        build(BATCH, tokens=with_token(2, 1, 9), masks=None, **split).fingerprint,
        build(BATCH, masks=with_row(2, 2, list(range(10))), **split).fingerprint,
        build(BATCH, masks=with_row(0, 0, list(range(10))), **split).fingerprint,
        build(
            BATCH,
            LayoutCase("packed", [7, 1, 4], BATCH.response_lengths),
            tokens=[np.append([0], BATCH.tokens[0]), BATCH.tokens[1][1:], BATCH.tokens[2]],
            **split,
        ).fingerprint,
    }
    assert len(fingerprints) == 7


def test_a_plan_asks_the_other_ranks_once_and_only_if_there_are_any() -> None:
    case = LayoutCase("zigzag", BATCH.total_lengths, BATCH.response_lengths, 2)
    for options, collectives in (
        ({}, 0),
        ({"tp_size": 2}, 1),
        ({"case": case}, 1),
        ({"case": case, "tp_size": 2}, 2),
        ({"case": case, "tp_size": 2, "check_agreement": False}, 0),
    ):
        with agreeing_peers() as told:
            mark = build(BATCH, **options).fingerprint
        assert told == [[0, 0, mark, -mark]] * collectives


def test_a_rank_that_refuses_tells_the_others_first() -> None:
    for options in ({"masks": BATCH.masks[:2]}, {"vocab_size": -1}, {"tokens": [None] * 3}):
        with agreeing_peers() as told, pytest.raises(ReplayError):
            build(BATCH, tp_size=2, **options)
        assert told == [[1, 0, 0, 0]]


# Supports over the whole vocabulary


@given(batches_in_layouts, st.sampled_from([1, 2, 4]), st.sampled_from([0, 3]))
def test_assembled_supports_are_those_of_the_whole_vocabulary(
    drawn: tuple[MicroBatch, LayoutCase], tp_size: int, padding: int
) -> None:
    batch, case = drawn
    columns = -(-batch.vocab_size // tp_size) + padding
    for rank in range(case.cp_size):
        for tp_rank in range(tp_size):
            place = {"rank": rank, "tp_rank": tp_rank, "tp_size": tp_size}
            plan = build(batch, case, assembled=True, shard_columns=columns, **place)
            assert plan.assembled
            assert_is_expected(plan, batch, case, rank, 0, batch.vocab_size)
            plan.check_logits(torch.zeros(len(case.cells(rank)), columns))
            with refused("logits columns do not match"):
                plan.check_logits(torch.zeros(len(case.cells(rank)), columns + 1))


# Logits


def test_logits_that_fit() -> None:
    rows = sum(BATCH.total_lengths)
    plan = build(BATCH)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        plan.check_logits(torch.zeros(rows, 10, dtype=dtype))
    plan.check_logits(torch.zeros(rows, 16))
    build(BATCH, shard_columns=16).check_logits(torch.zeros(rows, 16))
    build(BATCH, tp_size=2).check_logits(torch.zeros(rows, 5))


@pytest.mark.parametrize(
    ("logits", "options", "match"),
    [
        (torch.zeros(11, 10), {}, "logits rows .* expected 12 rows, got 11"),
        (torch.zeros(12, 9), {}, "logits columns .* expected 10 or more, got 9"),
        (torch.zeros(12, 10), {"shard_columns": 16}, "expected 16 columns, got 10"),
        (torch.zeros(12, 10), {"tp_size": 2}, "expected 5 columns, got 10"),
        (torch.zeros(12, 6), {"tp_size": 2}, "expected 5 columns, got 6"),
        (torch.zeros(12, 10, dtype=torch.int64), {}, "not a matrix of logits: .* torch.int64"),
        (torch.zeros(12, 10, dtype=torch.bool), {}, "not a matrix of logits"),
        (torch.zeros(12, 10, dtype=torch.complex64), {}, "not a matrix of logits"),
        (torch.zeros(1, 12, 10), {}, r"not a matrix of logits: .* \(1, 12, 10\)"),
        (torch.zeros(120), {}, "not a matrix of logits"),
        (torch.zeros(12, 10, device="meta"), {}, "different devices: .* on cpu, got meta"),
    ],
)
def test_logits_that_do_not_fit(logits: Tensor, options: dict[str, Any], match: str) -> None:
    with refused(match):
        build(BATCH, **options).check_logits(logits)


# Inputs are not written to, and share nothing with the plan


def test_inputs_stay_as_they_are() -> None:
    batch = make_batch(np.random.default_rng(5))
    tokens = [torch.from_numpy(t.copy()) for t in batch.tokens]
    masks = list(batch.masks)
    plan = build(batch, tokens=tokens, masks=masks)
    for tensor in (plan.ids, plan.rows, plan.offsets, plan.targets):
        tensor.fill_(0)
    plan.unrestricted.fill_(True)
    assert [mask.to_mask_list() for mask in masks] == batch.supports
    assert all(a is b for a, b in zip(masks, batch.masks, strict=True))
    assert all((t.numpy() == u).all() for t, u in zip(tokens, batch.tokens, strict=True))
    again = build(batch, tokens=tokens, masks=masks)
    case = LayoutCase("packed", batch.total_lengths, batch.response_lengths)
    assert_is_expected(again, batch, case, 0, 0, batch.vocab_size)


def test_a_plan_does_not_follow_later_changes_of_the_tokens() -> None:
    batch = make_batch(np.random.default_rng(6))
    tokens = [t.copy() for t in batch.tokens]
    plan = build(batch, tokens=tokens, masks=None)
    for values in tokens:
        values[:] = -1
    sampled = [y for i in range(len(tokens)) for y in batch.sampled(i)]
    assert plan.ids.tolist() == sampled


# Cost


def test_building_is_50_times_cheaper_than_filling_a_dense_mask() -> None:
    # 32,768 rows in 64 samples, 8 ids a row. The dense path makes one tensor of ids and one write
    # a row. Its cost hardly depends on the vocabulary, which is small here to bound the memory, and
    # is that of its rows: 1/8 of them are timed. CPU time, because the machine may be shared.
    samples, response, ids_a_row, vocab_size, share = 64, 512, 8, 1024, 8
    rng = np.random.default_rng(0)
    rows = samples * response
    firsts = rng.integers(0, vocab_size - 100, rows)
    steps = rng.integers(1, 12, (rows, ids_a_row)).cumsum(axis=1)
    ids = (firsts[:, None] + steps).reshape(samples, response, ids_a_row)
    sampled = ids[:, :, 3]
    offsets = np.arange(response + 1) * ids_a_row
    masks = [RolloutSamplingMask(part.reshape(-1), offsets) for part in ids]
    tokens = [torch.from_numpy(np.concatenate([[0], part])) for part in sampled]
    layout = RowLayout.packed([response + 1] * samples, [response] * samples)
    lists = ids[: samples // share].reshape(-1, ids_a_row).tolist()

    def plan() -> ReplayPlan:
        return ReplayPlan.build(
            tokens, masks, layout, parallel=parallel_state(), vocab_size=vocab_size, device="cpu"
        )

    def fill() -> Tensor:
        dense = torch.zeros(len(lists), vocab_size, dtype=torch.bool)
        for row, support in enumerate(lists):
            dense[row, torch.tensor(support)] = True
        return dense

    assert plan().num_ids == rows * ids_a_row
    assert int(fill().sum()) == rows // share * ids_a_row
    dense_seconds = share * median_seconds(fill)
    plan_seconds = median_seconds(plan)
    assert dense_seconds >= 50 * plan_seconds, f"{plan_seconds=}, {dense_seconds=}"


def median_seconds(work: Callable[[], Any], runs: int = 3) -> float:
    times = []
    for _ in range(runs):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times)


# The dense form


@given(micro_batches(), st.sampled_from([1, 2, 3, 4]), st.integers(0, 3), st.data())
@settings(max_examples=150)
def test_dense_mask_of_every_shard(
    batch: MicroBatch, tp_size: int, padding: int, data: st.DataObject
) -> None:
    columns = -(-batch.vocab_size // tp_size) + padding
    width = columns * tp_size
    for i, length in enumerate(batch.response_lengths):
        rows = data.draw(st.lists(st.integers(0, length - 1), max_size=6)) if length else []
        for indices in (rows, np.array(rows, dtype=np.int64)):
            shards = [
                build_local_sampling_mask(
                    torch.empty(len(rows), columns),
                    batch.masks[i],
                    indices,
                    tp_rank=tp_rank,
                    vocab_size=batch.vocab_size,
                )
                for tp_rank in range(tp_size)
            ]
            assert all(s.dtype == torch.bool and s.shape == (len(rows), columns) for s in shards)
            whole = torch.cat(shards, dim=1).numpy()
            assert (whole == batch.dense_support(i, width)[rows]).all()
            uncut = batch.masks[i].select(rows).to_dense(batch.vocab_size)
            assert (whole[:, : batch.vocab_size] == uncut).all()


def test_dense_mask_of_unrestricted_rows_without_a_vocab_size() -> None:
    mask = RolloutSamplingMask.from_mask_list([None, [5, 1], None], allow_unrestricted=True)
    logits = torch.empty(3, 4)
    first, second = (
        build_local_sampling_mask(logits, mask, range(3), tp_rank=r).tolist() for r in range(2)
    )
    assert first == [[True] * 4, [False, True, False, False], [True] * 4]
    assert second == [[True] * 4, [False, True, False, False], [True] * 4]
    cut = build_local_sampling_mask(logits, mask, range(3), tp_rank=1, vocab_size=6)
    free = [True, True, False, False]
    assert cut.tolist() == [free, [False, True, False, False], free]


def test_dense_mask_refusals() -> None:
    mask = RolloutSamplingMask.from_mask_list([[0, 3], [2], [7]])
    with refused("logits rows and response indices differ in number: expected 2 rows, got 3"):
        build_local_sampling_mask(torch.empty(3, 8), mask, [0, 1], tp_rank=0)
    with refused("support id out of range: .* got 7", row=2):
        build_local_sampling_mask(torch.empty(3, 8), mask, range(3), tp_rank=0, vocab_size=7)
    with refused("row out of range"):
        build_local_sampling_mask(torch.empty(1, 8), mask, [3], tp_rank=0)
    with refused("row out of range"):
        build_local_sampling_mask(torch.empty(1, 8), mask, [-1], tp_rank=0)
    for wrong in (-1, 0.0, True):
        with refused("tp_rank is not a count"):
            build_local_sampling_mask(torch.empty(1, 8), mask, [0], tp_rank=wrong)


@pytest.mark.parametrize("shape", [(8,), (1, 1, 8)])
def test_dense_mask_refuses_logits_that_are_no_matrix(shape: tuple[int, ...]) -> None:
    mask = RolloutSamplingMask.from_mask_list([[0, 3]])
    with pytest.raises(ReplayError):
        build_local_sampling_mask(torch.empty(shape), mask, [0], tp_rank=0)


@pytest.mark.parametrize("check_agreement", [True, False])
def test_ids_are_sorted_where_the_plan_is_built(check_agreement: bool) -> None:
    def build(sort_ids: bool) -> ReplayPlan:
        return ReplayPlan.build(
            [np.array([1, 2, 3])],
            [RolloutSamplingMask.from_mask_list([[4, 2], [3, 2]])],
            RowLayout.packed([3], [2]),
            parallel=parallel_state(),
            vocab_size=6,
            device="cpu",
            sort_ids=sort_ids,
            check_agreement=check_agreement,
        )

    assert "by_id" not in vars(build(False))
    with torch.inference_mode():
        plan = build(True)
    made = vars(plan)["id_rows_by_id"]
    assert plan.ids.tolist() == [2, 4, 2, 3]
    assert vars(plan)["by_id"].order.tolist() == [0, 2, 3, 1]
    assert (made.tolist(), made.is_inference()) == ([0, 1, 1, 0], False)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))]
)
def test_a_copy_of_a_plan_has_a_handle_of_its_own(copied: Any) -> None:
    """Handles are numbers of one process: a plan from another would else name one of this."""
    plan = ReplayPlan.build(
        [[1, 2, 3]],
        [RolloutSamplingMask.forced([2, 3])],
        RowLayout.packed([3], [2]),
        parallel=parallel_state(),
        vocab_size=4,
        device="cpu",
    )
    other = copied(plan)
    assert other.handle != plan.handle
    assert ReplayPlan.of_handle(other.handle) is other
    assert ReplayPlan.of_handle(plan.handle) is plan
    assert torch.equal(other.ids, plan.ids)
