"""`RowLayout` against layouts written out cell by cell, and split ∘ assemble = identity."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import rlreplay.layout as layout_module
from rlreplay.errors import ReplayError
from rlreplay.layout import RowLayout, RowSpan
from tests.fast.strategies import LayoutCase, Scored, layout_cases, ragged_lengths, refused

# Edge lengths that a random draw may miss: (total, response).
EDGES = {
    "prompt of one": ([5, 9], [4, 8]),
    "response of one": ([7, 2], [1, 1]),
    "response of none": ([4, 6, 3], [0, 5, 0]),
    "no response at all": ([4, 1], [0, 0]),
    "shorter than a chunk": ([2, 1, 3], [1, 0, 2]),
    "one long beside short ones": ([1, 40, 2], [0, 31, 1]),
}


def cases_of(total: list[int], response: list[int], cp_size: int) -> list[LayoutCase]:
    """Every layout of one micro-batch."""
    longest = max(total)
    chunks = 2 * cp_size
    even = [-(-n // chunks) * chunks + chunks * (i % 2) for i, n in enumerate(total)]
    odd = [n + 3 * (i % 2) for i, n in enumerate(total)]
    stream = (-(-sum(odd) // cp_size) + 1) * cp_size
    both = [
        LayoutCase("zigzag", total, response, cp_size),
        LayoutCase("zigzag", total, response, cp_size, padded_lengths=even),
        LayoutCase("zigzag", total, response, cp_size, max_seq_len=longest + 1),
        LayoutCase("contiguous", total, response, cp_size),
        LayoutCase("contiguous", total, response, cp_size, padded_lengths=odd),
        LayoutCase("contiguous", total, response, cp_size, None, odd, stream),
        LayoutCase("contiguous", total, response, cp_size, max_seq_len=longest + 1),
    ]
    if cp_size > 1:
        return both
    return [
        *both,
        LayoutCase("packed", total, response),
        LayoutCase("packed", total, response, padded_lengths=odd),
        LayoutCase("padded", total, response, max_seq_len=longest),
        LayoutCase("padded", total, response, max_seq_len=max(odd) + 2, padded_lengths=odd),
    ]


def maximal_runs(scored: list[Scored], num_samples: int) -> list[list[RowSpan]]:
    """The fewest spans that cover the scored rows of each sample."""
    runs: list[list[RowSpan]] = [[] for _ in range(num_samples)]
    for row, sample, index in scored:
        own = runs[sample]
        if own:
            first_row, first_index, length = own[-1]
            if (first_row + length, first_index + length) == (row, index):
                own[-1] = RowSpan(first_row, first_index, length + 1)
                continue
        own.append(RowSpan(row, index, 1))
    return runs


def assert_matches_cells(case: LayoutCase, rank: int) -> None:
    layout, cells, scored = case.layout(rank), case.cells(rank), case.scored(rank)
    num_samples = len(case.total_lengths)
    assert layout.num_local_rows == len(cells)
    assert layout.num_samples == num_samples
    assert layout.local_rows.dtype == np.int64
    assert layout.local_rows.tolist() == [s.local_row for s in scored]
    assert layout.num_rows == len(scored)
    by_sample = [[s.response_index for s in scored if s.sample == i] for i in range(num_samples)]
    assert [layout.response_indices(i).tolist() for i in range(num_samples)] == by_sample
    assert layout.row_counts == tuple(len(indices) for indices in by_sample)
    assert [list(spans) for spans in layout.spans] == maximal_runs(scored, num_samples)


@pytest.fixture
def group_of_one() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    yield world
    dist.destroy_process_group()


# The row map


@given(layout_cases())
@settings(max_examples=300)
def test_every_rank_scores_the_rows_that_it_holds(case: LayoutCase) -> None:
    for rank in range(case.cp_size):
        assert_matches_cells(case, rank)


@pytest.mark.parametrize("lengths", EDGES.values(), ids=EDGES.keys())
@pytest.mark.parametrize("cp_size", range(1, 9))
def test_edge_lengths_in_every_layout(lengths: tuple[list[int], list[int]], cp_size: int) -> None:
    for case in cases_of(*lengths, cp_size):
        for rank in range(cp_size):
            assert_matches_cells(case, rank)


def test_no_samples_at_all() -> None:
    for case in (
        LayoutCase("packed", [], []),
        LayoutCase("padded", [], [], max_seq_len=4),
        LayoutCase("zigzag", [], [], 2),
        LayoutCase("zigzag", [], [], 2, max_seq_len=4),
        LayoutCase("contiguous", [], [], 2),
        LayoutCase("contiguous", [], [], 2, max_seq_len=4),
    ):
        assert_matches_cells(case, 0)
        assert case.layout().assemble([[]] * case.cp_size) == []
        assert case.layout().slice([]) == []


def test_row_map_worked_out_by_hand() -> None:
    # Sample 0: 3 prompt and 5 response tokens, 8 positions in 4 chunks of 2; scored by 2..6.
    # Sample 1: 1 prompt and 2 response tokens, padded to 4 positions in chunks of 1; by 0 and 1.
    rank0 = RowLayout.zigzag([8, 3], [5, 2], cp_rank=0, cp_size=2)
    assert rank0.num_local_rows == 6
    assert rank0.spans == ((RowSpan(2, 4, 1),), (RowSpan(4, 0, 1),))
    rank1 = rank0.for_rank(1)
    assert rank1.spans == ((RowSpan(0, 0, 4),), (RowSpan(4, 1, 1),))
    assert rank1.local_rows.tolist() == [0, 1, 2, 3, 4]


def test_neighbouring_chunks_make_one_span() -> None:
    # The last rank of zigzag holds the two middle chunks, which are consecutive.
    total, response = [48, 48], [46, 47]
    for cp_size in (2, 4, 8):
        for case in (
            LayoutCase("zigzag", total, response, cp_size),
            LayoutCase("zigzag", total, response, cp_size, max_seq_len=48),
        ):
            assert [len(spans) for spans in case.layout(cp_size - 1).spans] == [1, 1]
            assert [len(spans) for spans in case.layout(0).spans] == [2, 2]


@given(layout_cases())
def test_every_response_token_is_scored_on_exactly_one_rank(case: LayoutCase) -> None:
    layouts = [case.layout(rank) for rank in range(case.cp_size)]
    for i, length in enumerate(case.response_lengths):
        indices = np.concatenate([layout.response_indices(i) for layout in layouts])
        assert sorted(indices.tolist()) == list(range(length))


@given(layout_cases())
def test_for_rank_is_what_that_rank_builds(case: LayoutCase) -> None:
    first = case.layout(0)
    for rank in range(case.cp_size):
        other = first.for_rank(rank)
        assert other == case.layout(rank)
        assert other.spans == case.layout(rank).spans
    with refused("no such context-parallel rank"):
        first.for_rank(case.cp_size)


def test_layouts_compare_by_value() -> None:
    layout = RowLayout.zigzag([8, 3], [5, 2], cp_rank=0, cp_size=2)
    assert layout == RowLayout.zigzag([8, 3], [5, 2], cp_rank=0, cp_size=2, padded_lengths=[8, 4])
    assert layout != RowLayout.zigzag([8, 3], [5, 2], cp_rank=1, cp_size=2)
    assert layout != RowLayout.zigzag([8, 3], [5, 1], cp_rank=0, cp_size=2)
    assert layout != RowLayout.zigzag([8, 3], [5, 2], cp_rank=0, cp_size=2, padded_lengths=[8, 8])
    assert layout != RowLayout.contiguous([8, 3], [5, 2], cp_rank=0, cp_size=2)


def test_lengths_may_be_arrays_and_tensors() -> None:
    expected = RowLayout.packed([5, 3], [2, 1])
    assert RowLayout.packed(np.array([5, 3]), np.array([2, 1], dtype=np.int32)) == expected
    assert RowLayout.packed(torch.tensor([5, 3]), torch.tensor([2, 1])) == expected


# Logits rows


@pytest.mark.parametrize(
    "case",
    [
        LayoutCase("packed", [5, 3], [2, 1]),
        LayoutCase("zigzag", [5, 3], [2, 1], 2),
        LayoutCase("padded", [5, 3], [2, 1], max_seq_len=6),
        LayoutCase("zigzag", [5, 3], [2, 1], 2, max_seq_len=6),
        LayoutCase("contiguous", [5, 3], [2, 1], 2),
        LayoutCase("contiguous", [5, 3], [2, 1], 2, max_seq_len=6),
    ],
    ids=lambda case: f"{case.name}-{case.qkv_format}",
)
def test_another_number_of_rows_is_refused(case: LayoutCase) -> None:
    layout = case.layout()
    rows = len(case.cells())
    layout.check_rows(rows)
    for wrong in (rows - 1, 0, rows + 3):
        with refused(f"logits rows .* expected {rows} rows, got {wrong}"):
            layout.check_rows(wrong)


def test_a_stream_with_end_padding_may_be_longer() -> None:
    lengths = ([5, 3], [2, 1])
    for layout in (
        RowLayout.packed(*lengths, end_padding=True),
        RowLayout.zigzag(*lengths, cp_rank=1, cp_size=2, end_padding=True),
    ):
        rows = layout.num_local_rows
        layout.check_rows(rows)
        layout.check_rows(rows + 3)
        with refused(f"expected at least {rows} rows, got {rows - 1}"):
            layout.check_rows(rows - 1)
    with refused("expected 12 rows, got 13"):
        RowLayout.zigzag(
            *lengths, cp_rank=1, cp_size=2, max_seq_len=9, end_padding=True
        ).check_rows(13)


# Whole responses and rows


def numbered(case: LayoutCase, trailing: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Responses whose values all differ (for bool: alternate irregularly)."""
    sizes = [(n, *trailing) for n in case.response_lengths]
    values = torch.arange(1, 1 + sum(int(np.prod(size)) for size in sizes))
    if dtype is torch.bool:
        values = (values * values // 3) % 2
    parts = torch.split(values.to(dtype), [int(np.prod(size)) for size in sizes])
    return [part.view(size) for part, size in zip(parts, sizes, strict=True)]


@given(
    layout_cases(),
    st.sampled_from([torch.float32, torch.int64, torch.bool]),
    st.sampled_from([(), (3,), (2, 2)]),
)
@settings(max_examples=150)
def test_slice_then_assemble_is_the_identity(
    case: LayoutCase, dtype: torch.dtype, trailing: tuple[int, ...]
) -> None:
    responses = numbered(case, trailing, dtype)
    layouts = [case.layout(rank) for rank in range(case.cp_size)]
    parts = [layout.slice(responses) for layout in layouts]
    for rank, own in enumerate(parts):
        by_hand: list[list[Tensor]] = [[] for _ in case.total_lengths]
        for _, sample, index in case.scored(rank):
            by_hand[sample].append(responses[sample][index])
        for values, expected, whole in zip(own, by_hand, responses, strict=True):
            assert values.dtype == dtype
            assert torch.equal(values, torch.stack(expected) if expected else whole[:0])
    for layout in layouts:
        for whole, expected in zip(layout.assemble(parts), responses, strict=True):
            assert whole.dtype == dtype
            assert torch.equal(whole, expected)


@pytest.mark.parametrize("lengths", EDGES.values(), ids=EDGES.keys())
@pytest.mark.parametrize("cp_size", range(1, 9))
def test_slice_then_assemble_of_edge_lengths(
    lengths: tuple[list[int], list[int]], cp_size: int
) -> None:
    for case in cases_of(*lengths, cp_size):
        responses = numbered(case, (2,), torch.float32)
        layouts = [case.layout(rank) for rank in range(cp_size)]
        wholes = layouts[0].assemble([layout.slice(responses) for layout in layouts])
        assert all(torch.equal(a, b) for a, b in zip(wholes, responses, strict=True))


def test_special_values_keep_their_place() -> None:
    response = torch.tensor([1.0, torch.nan, -0.0, -torch.inf, torch.nan, 2.0, torch.inf])
    for cp_size in (1, 2, 3, 4):
        layouts = [
            RowLayout.zigzag([9], [7], cp_rank=rank, cp_size=cp_size) for rank in range(cp_size)
        ]
        (whole,) = layouts[0].assemble([layout.slice([response]) for layout in layouts])
        assert torch.equal(whole.view(torch.int32), response.view(torch.int32))


def test_split_gives_views_in_sample_order() -> None:
    layout = RowLayout.packed([5, 4, 3], [2, 0, 1])
    rows = torch.arange(6.0).view(3, 2)
    parts = layout.split(rows)
    assert [part.tolist() for part in parts] == [[[0.0, 1.0], [2.0, 3.0]], [], [[4.0, 5.0]]]
    assert all(part.untyped_storage().data_ptr() == rows.data_ptr() for part in parts)
    with refused("wrong number of rows"):
        layout.split(rows[:2])
    with refused("wrong number of rows"):
        layout.split(torch.tensor(1.0))


ZIGZAG = RowLayout.zigzag([8, 5], [6, 3], cp_rank=0, cp_size=2)


def test_missing_ranks_and_wrong_lengths_are_refused() -> None:
    responses = [torch.arange(6.0), torch.arange(3.0)]
    parts = [ZIGZAG.slice(responses), ZIGZAG.for_rank(1).slice(responses)]
    with refused("a rank's rows are missing: expected the rows of 2 .* got 1"):
        ZIGZAG.assemble(parts[:1])
    with refused("a rank's rows are missing: .* got 3"):
        ZIGZAG.assemble([*parts, parts[0]])
    with refused("wrong number of rows", sample=0):
        ZIGZAG.assemble([[parts[0][0][:-1], parts[0][1]], parts[1]])
    with refused("wrong number of rows", sample=1):
        ZIGZAG.assemble([parts[0], [parts[1][0], torch.cat([parts[1][1], parts[1][1]])]])
    with refused("wrong number of samples: expected 2 tensors"):
        ZIGZAG.assemble([parts[0], parts[1][:1]])
    with refused("wrong number of rows", sample=0):
        ZIGZAG.assemble(parts[::-1])  # the ranks in another order
    with refused("wrong number of samples"):
        ZIGZAG.slice(responses[:1])
    with refused("wrong number of rows: expected 3 rows", sample=1):
        ZIGZAG.slice([responses[0], torch.arange(4.0)])
    with refused("wrong number of rows", sample=0):
        ZIGZAG.slice([torch.tensor(1.0), responses[1]])


@given(layout_cases())
def test_gradient_through_slice_goes_to_the_rows_that_the_rank_holds(case: LayoutCase) -> None:
    responses = [r.requires_grad_() for r in numbered(case, (2,), torch.float32)]
    seen = [torch.zeros_like(r) for r in responses]
    for rank in range(case.cp_size):
        own = case.layout(rank).slice(responses)
        loss = sum((k + 2 + rank) * part.sum() for k, part in enumerate(own))
        expected = [torch.zeros_like(r) for r in responses]
        for _, sample, index in case.scored(rank):
            expected[sample][index] = sample + 2 + rank
        grads = torch.autograd.grad(loss, responses)
        for grad, wanted, total in zip(grads, expected, seen, strict=True):
            assert torch.equal(grad, wanted)
            total += grad > 0
    assert all((total == 1).all() for total in seen)


def test_gradient_through_assemble() -> None:
    parts = [
        [torch.rand(n, 2, dtype=torch.float64, requires_grad=True) for n in layout.row_counts]
        for layout in (ZIGZAG, ZIGZAG.for_rank(1))
    ]
    flat = [part for own in parts for part in own]

    def whole(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(ZIGZAG.assemble([tensors[:2], tensors[2:]]))

    assert torch.autograd.gradcheck(whole, flat)


# Collectives: those that need no peer


@given(layout_cases(ragged_lengths(), max_cp=1))
def test_gather_and_redistribute_of_a_single_rank(case: LayoutCase) -> None:
    layout = case.layout()
    parts = [r.requires_grad_() for r in numbered(case, (2,), torch.float32)]
    target = RowLayout.zigzag(case.total_lengths, case.response_lengths, cp_rank=0, cp_size=1)
    for moved in (layout.gather(parts), layout.redistribute(parts, target)):
        assert all(torch.equal(a, b) for a, b in zip(moved, parts, strict=True))
        loss = sum((k + 2) * part.sum() for k, part in enumerate(moved))
        for k, grad in enumerate(torch.autograd.grad(loss, parts)):
            assert torch.equal(grad, torch.full_like(grad, k + 2))


def test_gather_keeps_a_rank_without_rows_in_the_graph(
    monkeypatch: pytest.MonkeyPatch, group_of_one: dist.ProcessGroup
) -> None:
    # Its model's backward enters collectives too, and has to run on every rank.
    layout = RowLayout.contiguous([4, 4], [1, 2], cp_rank=0, cp_size=2)
    assert layout.row_counts == (1, 0)
    monkeypatch.setattr(layout_module.dist, "get_world_size", lambda group: 2)
    for lone in (layout, RowLayout.contiguous([9], [2], cp_rank=0, cp_size=2)):
        source = torch.zeros(7, requires_grad=True)
        parts = [source[:n] for n in lone.row_counts]
        for whole, length in zip(
            lone.gather(parts, group_of_one), lone.response_lengths, strict=True
        ):
            assert whole.shape == (length,)
            (grad,) = torch.autograd.grad(whole.sum(), source, retain_graph=True)
            assert grad.shape == source.shape


def test_gather_keeps_empty_responses_in_the_graph() -> None:
    source = torch.zeros(3, requires_grad=True)
    (whole,) = RowLayout.packed([2], [0]).gather([source[:0]])
    (grad,) = torch.autograd.grad(whole.sum(), source)
    assert grad.tolist() == [0.0, 0.0, 0.0]


def test_redistribute_refuses_another_micro_batch_or_rank() -> None:
    layout = RowLayout.contiguous([8, 5], [6, 3], cp_rank=0, cp_size=2)
    parts = [torch.zeros(n) for n in layout.row_counts]
    for other in (
        RowLayout.zigzag([8, 5], [6, 2], cp_rank=0, cp_size=2),
        RowLayout.zigzag([9, 5], [6, 3], cp_rank=0, cp_size=2),
        RowLayout.zigzag([8, 5], [6, 3], cp_rank=1, cp_size=2),
        RowLayout.zigzag([8, 5], [6, 3], cp_rank=0, cp_size=4),
    ):
        with refused("do not describe the same micro-batch and rank"):
            layout.redistribute(parts, other)


def test_gather_refuses_no_group_and_a_wrong_one(group_of_one: dist.ProcessGroup) -> None:
    parts = [torch.zeros(n) for n in ZIGZAG.row_counts]
    with refused("expected rank 0 of 2, got no group"):
        ZIGZAG.gather(parts)
    with refused("expected rank 0 of 2, got rank 0 of 1"):
        ZIGZAG.gather(parts, group_of_one)
    single = RowLayout.packed([4], [3])
    (whole,) = single.gather([torch.arange(3.0)], group_of_one)
    assert whole.tolist() == [0.0, 1.0, 2.0]


def test_gather_refuses_wrong_rows_before_the_collective() -> None:
    single = RowLayout.packed([4, 4], [3, 2])
    with refused("wrong number of rows", sample=1):
        single.gather([torch.zeros(3), torch.zeros(3)])
    with refused("wrong number of samples"):
        single.gather([torch.zeros(3)])


# Constructors


CP = {"cp_rank": 0, "cp_size": 2}
BUILDERS = {
    "packed": lambda *lengths, **kw: RowLayout.packed(*lengths, **kw),
    "padded": lambda *lengths, **kw: RowLayout.padded(*lengths, max_seq_len=16, **kw),
    "zigzag-thd": lambda *lengths, **kw: RowLayout.zigzag(*lengths, **CP, **kw),
    "zigzag-bshd": lambda *lengths, **kw: RowLayout.zigzag(*lengths, max_seq_len=16, **CP, **kw),
    "contiguous-thd": lambda *lengths, **kw: RowLayout.contiguous(*lengths, **CP, **kw),
    "contiguous-bshd": lambda *lengths, **kw: RowLayout.contiguous(
        *lengths, max_seq_len=16, **CP, **kw
    ),
}
every_builder = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS.keys())


@every_builder
def test_lengths_that_contradict_each_other_are_refused(build: Callable[..., RowLayout]) -> None:
    for response in (4, 5, -1):
        with refused("response length does not fit its sample", sample=1):
            build([5, 4], [2, response])
    with refused("response length does not fit its sample", sample=0):
        build([0, 4], [0, 2])
    with refused("response_lengths does not have one entry for each sample"):
        build([5, 4], [2])


@every_builder
def test_lengths_that_are_no_integers_are_refused(build: Callable[..., RowLayout]) -> None:
    for wrong in ([2, 1.0], [2, True], "21", None, np.array([2.0, 1.0])):
        with pytest.raises(ReplayError, match="response_lengths must be integers"):
            build([5, 4], wrong)
    with refused("total_lengths must be integers", sample=1):
        build([5, 4.0], [2, 1])
    with refused("padded_lengths must be integers", sample=0):
        build([5, 4], [2, 1], padded_lengths=[8.0, 4])


@every_builder
def test_padded_lengths_that_do_not_fit_are_refused(build: Callable[..., RowLayout]) -> None:
    with refused("padded length does not fit its sample: expected at least 4", sample=1):
        build([5, 4], [2, 1], padded_lengths=[8, 3])
    with refused("padded_lengths does not have one entry for each sample"):
        build([5, 4], [2, 1], padded_lengths=[8])


def test_zigzag_padded_lengths_must_divide_into_chunks() -> None:
    with refused("at least 4, a multiple of 4, got 6", sample=1):
        RowLayout.zigzag([5, 4], [2, 1], **CP, padded_lengths=[8, 6])


@pytest.mark.parametrize(
    "build",
    [
        lambda *lengths, **kw: RowLayout.padded(*lengths, **kw),
        lambda *lengths, **kw: RowLayout.zigzag(*lengths, **CP, **kw),
        lambda *lengths, **kw: RowLayout.contiguous(*lengths, **CP, **kw),
    ],
    ids=["padded", "zigzag", "contiguous"],
)
def test_samples_longer_than_max_seq_len_are_refused(build: Callable[..., RowLayout]) -> None:
    with refused("sample longer than max_seq_len: expected at most 4 tokens, got 5", sample=1):
        build([4, 5], [2, 1], max_seq_len=4)
    with refused("sample longer than max_seq_len", sample=0):
        build([4, 5], [2, 1], max_seq_len=6, padded_lengths=[7, 5])
    for wrong in (-1, 4.0, True, "8"):
        with refused("max_seq_len is not a count"):
            build([4, 5], [2, 1], max_seq_len=wrong)


@pytest.mark.parametrize("build", [RowLayout.zigzag, RowLayout.contiguous])
def test_ranks_that_do_not_exist_are_refused(build: Callable[..., RowLayout]) -> None:
    for rank, size in ((2, 2), (5, 4), (0, 0)):
        with refused("no such context-parallel rank"):
            build([4], [2], cp_rank=rank, cp_size=size)
    with refused("cp_rank is not a count"):
        build([4], [2], cp_rank=-1, cp_size=2)
    with refused("cp_size is not a count"):
        build([4], [2], cp_rank=0, cp_size=2.0)


def test_stream_lengths_that_do_not_fit_are_refused() -> None:
    for wrong in (8, 11):
        with refused("stream length does not fit the samples: expected at least 9 rows"):
            RowLayout.contiguous([5, 4], [2, 1], **CP, stream_length=wrong)
    with refused("stream length does not fit the samples: expected at least 12 rows"):
        RowLayout.contiguous([5, 4], [2, 1], **CP, padded_lengths=[6, 6], stream_length=10)
    with refused("stream_length is not a count"):
        RowLayout.contiguous([5, 4], [2, 1], **CP, stream_length=10.0)
