"""`RolloutSamplingMask`, line by line of what a sampling mask must be and must refuse."""

import array
import copy
import itertools
import pickle
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlreplay.errors import MissingTokenError, ReplayError
from rlreplay.sampling_mask import (
    RolloutSamplingMask,
    consecutive_runs,
    float_array,
    integer_array,
    offsets_of,
)
from tests.fast.payloads import (
    NO_INTEGERS,
    NO_PLAIN_TENSORS,
    tensors_of_no_integers,
    tensors_that_numpy_lacks,
)

VOCAB = 64
INT32_MAX = 2**31 - 1

ids_of_a_row = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12, unique=True)
row_lists = st.lists(ids_of_a_row, max_size=12)
rows_or_none = st.lists(st.none() | ids_of_a_row, max_size=12)


def csr(rows):
    """The flat form of nested rows (None: an empty span), by the definition."""
    filled = [[] if row is None else row for row in rows]
    ids = list(itertools.chain.from_iterable(filled))
    return ids, [0, *itertools.accumulate(map(len, filled))]


def canonical(rows):
    return [None if row is None else sorted(row) for row in rows]


def build(rows):
    return RolloutSamplingMask.from_mask_list(rows, allow_unrestricted=True)


# Construction


@given(row_lists)
def test_nested_lists(rows):
    mask = RolloutSamplingMask.from_mask_list(rows, vocab_size=VOCAB)
    assert mask.to_mask_list() == canonical(rows)
    assert len(mask) == len(rows)
    assert mask.lengths.tolist() == [len(row) for row in rows]
    assert not mask.unrestricted.any()
    assert mask.max_id == max(itertools.chain.from_iterable(rows), default=-1)


@given(rows_or_none)
def test_flat_arrays_give_the_same_mask_as_nested_lists(rows):
    ids, offsets = csr(rows)
    expected = build(rows)
    for make in (list, tuple, np.array, lambda v: array.array("q", v), torch.tensor):
        if make is np.array or make is torch.tensor:
            a = np.array(ids, dtype=np.int32), np.array(offsets, dtype=np.int64)
            a = a if make is np.array else tuple(map(torch.from_numpy, a))
        else:
            a = make(ids), make(offsets)
        assert RolloutSamplingMask(ids=a[0], offsets=a[1], allow_unrestricted=True) == expected


@given(row_lists)
def test_rows_of_any_integer_sequence(rows):
    expected = build(rows)
    for convert in (tuple, np.array, torch.tensor, lambda row: array.array("i", row)):
        assert RolloutSamplingMask.from_mask_list([convert(row) for row in rows]) == expected
    mixed = [np.array(row) if t % 2 else row for t, row in enumerate(rows)]
    assert RolloutSamplingMask.from_mask_list(mixed) == expected


@given(rows_or_none)
def test_storage(rows):
    mask = build(rows)
    ids, offsets = csr(canonical(rows))
    assert (mask.ids.dtype, mask.offsets.dtype) == (np.int32, np.int64)
    assert mask.ids.tolist() == ids
    assert mask.offsets.tolist() == offsets
    assert mask.nbytes == 4 * len(ids) + 8 * len(offsets)
    assert mask.unrestricted.tolist() == [row is None for row in rows]
    assert len(repr(mask)) < 100


@given(rows_or_none)
def test_unrestricted_rows_only_where_asked_for(rows):
    if None in rows:
        with pytest.raises(ReplayError) as caught:
            RolloutSamplingMask.from_mask_list(rows)
        assert caught.value.row == rows.index(None)
        with pytest.raises(ReplayError) as caught:
            RolloutSamplingMask(*csr(rows))
        assert caught.value.row == rows.index(None)
    assert build(rows).to_mask_list() == canonical(rows)


@given(rows_or_none, st.data())
def test_an_empty_list_is_never_a_row(rows, data):
    row = data.draw(st.integers(0, len(rows)))
    for allow in (False, True):
        with pytest.raises(ReplayError) as caught:
            RolloutSamplingMask.from_mask_list(
                [[5]] * row + [[]] + (rows if allow else []), allow_unrestricted=allow
            )
        assert caught.value.row == row


@pytest.mark.parametrize("n", [0, 1, 7])
def test_full(n):
    mask = RolloutSamplingMask.full(n)
    assert mask.to_mask_list() == [None] * n
    assert mask == build([None] * n)


@given(st.lists(st.integers(0, INT32_MAX), max_size=20))
def test_forced_rows_are_singletons(tokens):
    for values in (tokens, np.array(tokens, np.int64), torch.tensor(tokens, dtype=torch.int64)):
        mask = RolloutSamplingMask.forced(values)
        assert mask.to_mask_list() == [[token] for token in tokens]
        assert mask.contains(values).all()


@given(row_lists)
def test_dense_round_trip(rows):
    mask = build(rows)
    dense = mask.to_dense(VOCAB)
    assert dense.shape == (len(rows), VOCAB)
    assert dense.dtype == np.bool_
    expected = [[j in row for j in range(VOCAB)] for row in rows]
    assert dense.tolist() == expected
    for form in (dense, torch.from_numpy(dense)):
        assert RolloutSamplingMask.from_dense(form) == mask


@given(rows_or_none)
def test_dense_rows_are_true_where_unrestricted(rows):
    dense = build(rows).to_dense(VOCAB)
    assert all(dense[t].all() for t, row in enumerate(rows) if row is None)


@given(row_lists, st.integers(VOCAB, VOCAB + 9))
def test_packed_bits_round_trip(rows, vocab_size):
    mask = build(rows)
    bits = np.zeros((len(rows), -(-vocab_size // 8)), np.uint8)
    for t, i in ((t, i) for t, row in enumerate(rows) for i in row):
        bits[t, i // 8] |= 1 << (i % 8)
    for form in (bits, torch.from_numpy(bits)):
        assert RolloutSamplingMask.from_packed_bits(form, vocab_size) == mask


@given(row_lists, st.data())
def test_values_follow_their_ids(rows, data):
    numbers = st.floats(-(2.0**100), 0, width=32, allow_subnormal=False)
    values = [data.draw(st.lists(numbers, min_size=len(r), max_size=len(r))) for r in rows]
    expected = [
        value
        for row, own in zip(rows, values, strict=True)
        for _, value in sorted(zip(row, own, strict=True))
    ]
    mask, nested = RolloutSamplingMask.from_mask_list_with_values(rows, values)
    ids, offsets = csr(rows)
    flat_values = list(itertools.chain.from_iterable(values))
    same, flat = RolloutSamplingMask.from_csr_with_values(ids, offsets, flat_values)
    assert mask == same == build(rows)
    for got in (nested, flat):
        assert got.dtype == np.float32
        assert got.tolist() == expected


# Value semantics


def test_inputs_are_copied():
    ids, offsets = np.array([3, 7, 1], np.int32), np.array([0, 2, 3], np.int64)
    tensor_ids, tensor_offsets = torch.tensor([3, 7, 1]), torch.tensor([0, 2, 3])
    masks = [
        RolloutSamplingMask(ids, offsets),
        RolloutSamplingMask(ids.astype(np.int64), offsets),
        RolloutSamplingMask(tensor_ids, tensor_offsets),
        RolloutSamplingMask.from_mask_list([ids[:2], ids[2:]]),
        RolloutSamplingMask.from_csr_with_values(ids, offsets, np.zeros(3, np.float32))[0],
    ]
    ids[:], offsets[1:], tensor_ids[:], tensor_offsets[1:] = 9, 1, 9, 1
    assert all(mask.to_mask_list() == [[3, 7], [1]] for mask in masks)


def test_values_are_copied():
    values = np.array([-1.0, -2.0], np.float32)
    _, own = RolloutSamplingMask.from_csr_with_values([4, 2], [0, 2], values)
    assert values.tolist() == [-1.0, -2.0]
    assert own.tolist() == [-2.0, -1.0]


@given(rows_or_none)
def test_nothing_can_be_written(rows):
    mask = build(rows)
    for part in (mask, mask[:1], pickle.loads(pickle.dumps(mask, 2)), copy.deepcopy(mask)):
        for buffer in (part.ids, part.offsets, *(part[t] for t in range(len(part)))):
            assert not buffer.flags.writeable
            with pytest.raises(ValueError, match="cannot set WRITEABLE"):
                buffer.flags.writeable = True
            with pytest.raises(ValueError, match="cannot set WRITEABLE"):
                buffer[:0].flags.writeable = True
    for name in ("ids", "offsets", "_ids", "_offsets", "other"):
        with pytest.raises(AttributeError):
            setattr(mask, name, mask.ids)
    with pytest.raises(AttributeError):
        del mask._ids


@pytest.mark.parametrize(
    "make",
    [
        lambda: build([[3, 7], [5]]),
        lambda: RolloutSamplingMask(np.array([3, 7, 5]), torch.tensor([0, 2, 3])),
        lambda: build([[1], [3, 7], [5]])[1:],
        lambda: build([[3, 7], [5], [1]]).truncate(2),
        lambda: RolloutSamplingMask.concat([build([[3, 7]]), build([[5]])]),
        lambda: build([[3], [5]]).include([7, 5]),
        lambda: RolloutSamplingMask.from_dense(build([[3, 7], [5]]).to_dense(9)),
        lambda: RolloutSamplingMask.from_mask_list_with_values([[7, 3], [5]], [[0.0, 0.0], [0.0]])[
            0
        ],
        lambda: copy.copy(build([[3, 7], [5]])),
        lambda: pickle.loads(pickle.dumps(build([[3, 7], [5]]), 5)),
        lambda: moved(build([[3, 7], [5]])),
    ],
)
def test_no_array_of_a_mask_can_be_made_writeable(make):
    mask = make()
    for buffer in (mask.ids, mask.offsets, mask[0], mask.ids[1:], mask.ids.view(np.uint8)):
        base = buffer.base
        for each in (buffer, base) if isinstance(base, np.ndarray) else (buffer,):
            with pytest.raises(ValueError, match="cannot set WRITEABLE"):
                each.flags.writeable = True
            with pytest.raises(ValueError, match="cannot set WRITEABLE"):
                each.setflags(write=True)
            with pytest.raises(ValueError, match="does not own its data"):
                each.resize(1)
    assert mask == build([[3, 7], [5]])


def moved(mask):
    """Through a store that hands over buffers that can be written to."""
    buffers = []
    data = pickle.dumps(mask, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytearray(b.raw()) for b in buffers])


@pytest.mark.filterwarnings("ignore:Setting the (shape|dtype):DeprecationWarning")
def test_whoever_reshapes_an_array_in_place_has_only_that():
    mask = build([[3, 7], [5, 6]])
    mask.ids.shape = (2, 2)
    mask.offsets.dtype = np.uint8
    assert mask.ids.shape == (4,)
    assert mask.offsets.dtype == np.int64


@given(rows_or_none, rows_or_none)
def test_equality_is_by_value(a, b):
    assert build(a) == build(copy.deepcopy(a))
    assert (build(a) == build(b)) == (canonical(a) == canonical(b))
    assert (build(a) != build(b)) == (canonical(a) != canonical(b))
    assert build(a) != a


def test_order_of_ids_does_not_matter():
    assert build([[3, 1, 2], [9]]) == build([[2, 3, 1], [9]])


def test_same_ids_in_other_rows_are_not_equal():
    assert build([[1, 2], [3]]) != build([[1], [2, 3]])


def test_hashing_is_off():
    with pytest.raises(TypeError, match="unhashable"):
        hash(build([[1]]))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@given(rows=rows_or_none)
def test_pickle(protocol, rows):
    mask = build(rows)
    assert pickle.loads(pickle.dumps(mask, protocol)) == mask


@given(st.lists(ids_of_a_row, min_size=1, max_size=12), st.booleans())
def test_pickle_out_of_band_copies_nothing(rows, sliced):
    mask = build([*rows, [1]])[: len(rows)] if sliced else build(rows)
    buffers = []
    data = pickle.dumps(mask, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 2
    assert sum(b.raw().nbytes for b in buffers) == mask.nbytes
    for own, buffer in zip((mask.ids, mask.offsets), buffers, strict=True):
        assert np.shares_memory(own, np.frombuffer(buffer, np.uint8))
    again = pickle.loads(data, buffers=buffers)
    assert again == mask
    assert np.shares_memory(again.ids, mask.ids)
    assert np.shares_memory(again.offsets, mask.offsets)
    received = [bytearray(b.raw()) for b in buffers]
    moved = pickle.loads(data, buffers=received)
    assert moved == mask
    assert not moved.ids.flags.writeable, "read-only whatever buffer it landed in"


# Refusals: each with its row and its value


def refuse(make, *, row, says):
    with pytest.raises(ReplayError) as caught:
        make()
    assert caught.value.row == row, caught.value
    assert says in str(caught.value)
    assert caught.value.consequence


@pytest.mark.parametrize(
    ("offsets", "row", "says"),
    [
        ([], 0, "no offsets at all"),
        ([1, 4], 0, "got 1"),
        ([-1, 4], 0, "got -1"),
        ([0, 3, 2, 4], 1, "got 2"),
        ([0, 2, 5], 1, "got 5"),
        ([0, 2, 3], 1, "got 3"),
        ([0, 1, 1, 4], 1, "empty support"),
        ([0, 2**40], 0, f"got {2**40}"),
        ([0, -(2**40), 4], 0, f"got {-(2**40)}"),
    ],
)
def test_offsets_refused(offsets, row, says):
    refuse(lambda: RolloutSamplingMask([1, 2, 3, 4], offsets), row=row, says=says)
    values = [0.0] * 4
    refuse(
        lambda: RolloutSamplingMask.from_csr_with_values([1, 2, 3, 4], offsets, values),
        row=row,
        says=says,
    )


@given(row_lists.filter(len), st.data())
def test_bad_ids_refused_with_row_and_value(rows, data):
    t = data.draw(st.integers(0, len(rows) - 1))
    i = data.draw(st.integers(0, len(rows[t])))
    bad = data.draw(
        st.one_of(
            st.integers(-(2**63), -1),
            st.integers(VOCAB, 2**63 - 1),
            st.integers(2**63, 2**80),
            st.integers(-(2**80), -(2**63) - 1),
        )
    )
    rows[t].insert(i, bad)
    refuse(lambda: RolloutSamplingMask.from_mask_list(rows, vocab_size=VOCAB), row=t, says=str(bad))
    if -(2**63) <= bad < 2**63:
        refuse(lambda: RolloutSamplingMask(*csr(rows), vocab_size=VOCAB), row=t, says=str(bad))


@pytest.mark.parametrize("vocab_size", [None, 2**31, 2**31 + 1, 2**40])
@pytest.mark.parametrize("bad", [2**31, 2**31 + 5, 2**32, 2**33 + 1, 2**62])
def test_ids_above_int32_refused_whatever_the_vocabulary(vocab_size, bad):
    nested = [[1], [2, bad]]
    refuse(
        lambda: RolloutSamplingMask.from_mask_list(nested, vocab_size=vocab_size),
        row=1,
        says=str(bad),
    )
    refuse(
        lambda: RolloutSamplingMask([1, 2, bad], [0, 1, 3], vocab_size=vocab_size),
        row=1,
        says=str(bad),
    )
    assert RolloutSamplingMask.from_mask_list([[INT32_MAX]], vocab_size=vocab_size).max_id > 0


@given(row_lists.filter(len), st.data())
def test_repeated_ids_refused(rows, data):
    t = data.draw(st.integers(0, len(rows) - 1))
    twice = data.draw(st.sampled_from(rows[t]))
    rows[t].insert(data.draw(st.integers(0, len(rows[t]))), twice)
    for make in (
        lambda: RolloutSamplingMask.from_mask_list(rows),
        lambda: RolloutSamplingMask(*csr(rows)),
        lambda: RolloutSamplingMask.from_mask_list_with_values(
            rows, [[0.0] * len(r) for r in rows]
        ),
    ):
        refuse(make, row=t, says=f"got {twice} more than once")


def test_the_same_id_may_be_in_adjacent_rows():
    assert build([[1, 5], [5, 9], [9]]).to_mask_list() == [[1, 5], [5, 9], [9]]
    assert build([[5, 1], [9, 5]]).to_mask_list() == [[1, 5], [5, 9]]


NOT_INTEGERS = [
    1.0,
    1.5,
    float("nan"),
    "3",
    b"3",
    True,
    False,
    None,
    [1],
    {},
    np.float32(2),
    np.bool_(True),
    1j,
    object(),
]


@pytest.mark.parametrize("bad", NOT_INTEGERS, ids=lambda v: f"{type(v).__name__}-{v!s:.8}")
def test_anything_but_an_integer_refused(bad):
    rows = [[4], [7, bad, 9]]
    refuse(lambda: RolloutSamplingMask.from_mask_list(rows), row=1, says=type(bad).__name__)
    refuse(lambda: RolloutSamplingMask([4, 7, bad], [0, 1, 3]), row=2, says=type(bad).__name__)
    refuse(lambda: RolloutSamplingMask([1, 2], [0, bad, 2]), row=1, says=type(bad).__name__)
    refuse(lambda: RolloutSamplingMask.forced([1, bad]), row=1, says=type(bad).__name__)


@pytest.mark.parametrize("bad", [7, "12", b"12", {1, 2}, {1: 2}, 1.5, True, iter([1])])
def test_a_row_must_be_a_list(bad):
    refuse(lambda: RolloutSamplingMask.from_mask_list([[4], bad]), row=1, says=type(bad).__name__)


@pytest.mark.parametrize("bad", [None, "12", 7, {0: [1]}, np.array(3), iter([[1]])])
def test_the_rows_must_be_a_list(bad):
    refuse(lambda: RolloutSamplingMask.from_mask_list(bad), row=None, says="not a list of rows")


@pytest.mark.parametrize(
    "bad",
    [
        np.array([1.0, 2.0]),
        np.array([True, False]),
        np.array(["1"]),
        np.array([[1, 2]]),
        np.array(3),
        np.array([1, 2], dtype=object),
        np.array([2**63], dtype=np.uint64),
        torch.tensor([1.0]),
        torch.tensor([True]),
        torch.tensor(3),
        torch.tensor([[1]]),
        array.array("d", [1.0]),
    ],
    ids=lambda v: f"{type(v).__name__}-{getattr(v, 'dtype', '')}-{getattr(v, 'shape', '')}",
)
def test_arrays_of_anything_but_integers_refused(bad):
    for rows in ([[4], bad], [np.array([4]), bad], [bad]):
        row = len(rows) - 1
        refuse(lambda rows=rows: RolloutSamplingMask.from_mask_list(rows), row=row, says="")
    with pytest.raises(ReplayError):
        RolloutSamplingMask(bad, [0, 1])
    with pytest.raises(ReplayError):
        RolloutSamplingMask([1], bad)


ID_ARGUMENTS = {
    "ids": lambda bad: RolloutSamplingMask(bad, [0, 1, 2]),
    "offsets": lambda bad: RolloutSamplingMask([1, 2], bad),
    "ids with values": lambda bad: RolloutSamplingMask.from_csr_with_values(
        bad, [0, 1, 2], [0.0, 0.0]
    ),
    "row": lambda bad: RolloutSamplingMask.from_mask_list([[3], bad]),
    "rows": lambda bad: RolloutSamplingMask.from_mask_list(bad),
    "row with values": lambda bad: RolloutSamplingMask.from_mask_list_with_values(
        [[3], bad], [[0.0], [0.0, 0.0]]
    ),
    "forced": lambda bad: RolloutSamplingMask.forced(bad),
    "select": lambda bad: build([[1], [2], [3]]).select(bad),
    "contains": lambda bad: build([[1], [2]]).contains(bad),
    "locate": lambda bad: build([[1], [2]]).locate(bad),
    "check_sampled": lambda bad: build([[1], [2]]).check_sampled(bad),
    "include": lambda bad: build([[1], [2]]).include(bad),
    "fill_unrestricted": lambda bad: build([None, None]).fill_unrestricted(bad),
    "concat": lambda bad: RolloutSamplingMask.concat(bad),
    "dense": lambda bad: RolloutSamplingMask.from_dense(bad),
    "packed": lambda bad: RolloutSamplingMask.from_packed_bits(bad, 8),
    "runs": lambda bad: consecutive_runs(bad),
}


@pytest.mark.parametrize("kind", NO_INTEGERS)
@pytest.mark.parametrize("argument", ID_ARGUMENTS)
def test_tensors_of_no_integers_refused(argument, kind):
    bad = tensors_of_no_integers([1, 2])[kind]
    with pytest.raises(ReplayError) as caught:
        ID_ARGUMENTS[argument](bad)
    assert caught.value.got
    assert caught.value.consequence


@pytest.mark.parametrize("kind", NO_PLAIN_TENSORS)
def test_tensors_that_are_no_values_refused(kind):
    bad = tensors_that_numpy_lacks([0, 0])[kind]
    with pytest.raises(ReplayError):
        RolloutSamplingMask.from_csr_with_values([1, 2], [0, 1, 2], bad)
    with pytest.raises(ReplayError) as caught:
        RolloutSamplingMask.from_mask_list_with_values([[3], [1, 2]], [[0.0], bad])
    assert caught.value.row == 1
    with pytest.raises(ReplayError):
        float_array(bad, "values")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_tensors_of_values(dtype):
    values = torch.tensor([-1.5, -0.25], dtype=dtype, requires_grad=True)
    assert float_array(values, "values").tolist() == [-1.5, -0.25]
    negated = torch.tensor([1.5j, 0.25j], dtype=torch.complex64).conj().imag
    assert float_array(negated, "values").tolist() == [-1.5, -0.25]


@pytest.mark.parametrize(
    "bad", [torch.tensor(True), torch.tensor(1), np.array(1), np.timedelta64(1), 1.0, "1", None]
)
def test_elements_that_pass_for_integers_refused(bad):
    """Some of these have an `__index__`, which is enough for `array` and for `range`."""
    refuse(lambda: RolloutSamplingMask.from_mask_list([[4], [7, bad]]), row=1, says="support ids")
    refuse(lambda: RolloutSamplingMask([4, bad], [0, 1, 2]), row=1, says="ids")
    refuse(lambda: build([[1], [2]]).contains([1, bad]), row=1, says="tokens")
    for make in (
        lambda: RolloutSamplingMask.full(bad),
        lambda: build([[1]]).truncate(bad),
        lambda: build([[1]]).to_dense(bad),
        lambda: RolloutSamplingMask.from_packed_bits(np.ones((1, 1), np.uint8), bad),
    ):
        with pytest.raises(ReplayError):
            make()


def test_integers_of_every_type_pass():
    numbers = [1, np.int8(2), np.uint64(3), np.int64(4)]
    assert integer_array(numbers, "values").tolist() == [1, 2, 3, 4]
    assert build([numbers]).to_mask_list() == [[1, 2, 3, 4]]


@pytest.mark.parametrize("flag", [None, 1, 0, "yes", [], torch.tensor(True)], ids=str)
def test_a_flag_is_a_flag(flag):
    for make in (
        lambda: RolloutSamplingMask([], [0], allow_unrestricted=flag),
        lambda: RolloutSamplingMask.from_mask_list([], allow_unrestricted=flag),
        lambda: RolloutSamplingMask.from_csr_with_values([], [0], [], allow_unrestricted=flag),
        lambda: RolloutSamplingMask.from_mask_list_with_values([], [], allow_unrestricted=flag),
    ):
        with pytest.raises(ReplayError, match="allow_unrestricted is no flag"):
            make()


@pytest.mark.parametrize(
    "many",
    [range(2**70), range(-(2**70), 0), range(0, 2**63, 3), range(10**10), range(10**10, 0, -1)],
    ids=str,
)
def test_ranges_beyond_memory_refused(many):
    refuse(lambda: RolloutSamplingMask.from_mask_list([[1], many]), row=1, says="support id")
    for make in (
        lambda: RolloutSamplingMask(many, [0, 1]),
        lambda: RolloutSamplingMask([1], many),
        lambda: RolloutSamplingMask.forced(many),
        lambda: build([[1]]).select(many),
        lambda: build([[1]]).truncate(2**70),
        lambda: RolloutSamplingMask.full(2**63),
    ):
        with pytest.raises(ReplayError):
            make()


def test_integers_too_long_to_print_refused():
    enormous = 10**6000
    refuse(lambda: RolloutSamplingMask.from_mask_list([[1], [enormous]]), row=1, says="")
    with pytest.raises(ReplayError):
        RolloutSamplingMask([enormous], [0, 1])
    with pytest.raises(ReplayError):
        RolloutSamplingMask.from_mask_list_with_values([[1]], [[enormous]])


@pytest.mark.parametrize("bad", [-1, 1.5, "8", True, None])
def test_sizes_refused(bad):
    with pytest.raises(ReplayError):
        RolloutSamplingMask.full(bad)
    with pytest.raises(ReplayError):
        build([[1]]).truncate(bad)
    if bad is not None:
        with pytest.raises(ReplayError):
            RolloutSamplingMask.from_mask_list([[1]], vocab_size=bad)


@pytest.mark.parametrize(
    ("values", "row"),
    [
        ([[0.0], [0.0]], 1),
        ([[0.0]], None),
        ([[0.0], [0.0, None]], 1),
        ([[0.0], [0.0, "1"]], 1),
        ([[0.0], [True, 0.0]], 1),
        ([[0.0], 0.0], 1),
        ([[0.0], "ab"], 1),
        ([[0.0], np.array([1, 2])], 1),
        ("ab", None),
        (None, None),
    ],
)
def test_values_refused(values, row):
    refuse(
        lambda: RolloutSamplingMask.from_mask_list_with_values([[1], [2, 3]], values),
        row=row,
        says="",
    )


@pytest.mark.parametrize(
    "values", [[0.0], [0.0] * 3, ["0.0"] * 2, [None] * 2, "ab", None, np.zeros((2, 1)), [True] * 2]
)
def test_flat_values_refused(values):
    with pytest.raises(ReplayError):
        RolloutSamplingMask.from_csr_with_values([1, 2], [0, 2], values)


def test_values_beyond_float32_become_infinite_without_a_warning():
    _, values = RolloutSamplingMask.from_mask_list_with_values([[1, 0]], [[-1e300, -1.0]])
    assert values.tolist() == [-1.0, -np.inf]


@pytest.mark.parametrize(
    "bad",
    [
        np.zeros((2, 3)),
        np.zeros(3, np.bool_),
        np.zeros((2, 3), np.int64),
        torch.zeros(2, 3),
        [[1, 0]],
        torch.zeros(2, 3, dtype=torch.bfloat16),
        torch.ones(2, 3, dtype=torch.bool, device="meta"),
        torch.ones(2, 3, dtype=torch.bool).to_sparse(),
        np.ma.masked_array(np.ones((1, 2), np.bool_), mask=[[True, False]]),
        None,
        7,
        "ab",
        {},
    ],
)
def test_not_a_dense_mask_refused(bad):
    with pytest.raises(ReplayError, match="not a dense sampling mask"):
        RolloutSamplingMask.from_dense(bad)


@pytest.mark.parametrize(
    ("bad", "row"),
    [
        ([[True, False], [True]], 1),
        ([[True], [True, False]], 1),
        ([[True, False], 7], 1),
        ([[True, False], None], 1),
        ([True, False], 0),
        (["ab"], 0),
        ([[True, False], [True, 1]], 1),
        ([[True, False], [True, torch.tensor(True)]], 1),
        ([[True, False], [False, False]], 1),
        ([[], []], 0),
    ],
)
def test_nested_lists_that_are_no_dense_mask_refused(bad, row):
    refuse(lambda: RolloutSamplingMask.from_dense(bad), row=row, says="")


def test_dense_nested_lists():
    nested = [[True, False, True], [np.True_, np.False_, np.False_]]
    assert RolloutSamplingMask.from_dense(nested).to_mask_list() == [[0, 2], [0]]
    assert len(RolloutSamplingMask.from_dense([])) == 0


def test_dense_and_packed_empty_rows_refused():
    dense = np.array([[True, False], [False, False]])
    refuse(lambda: RolloutSamplingMask.from_dense(dense), row=1, says="empty support")
    bits = np.array([[1], [0]], np.uint8)
    refuse(lambda: RolloutSamplingMask.from_packed_bits(bits, 8), row=1, says="empty support")


@pytest.mark.parametrize(
    ("bits", "vocab_size", "row"),
    [
        (np.ones((2, 2), np.uint8), 8, None),
        (np.ones((2, 1), np.uint8), 9, None),
        (np.ones((2, 1), np.int64), 8, None),
        (np.ones(2, np.uint8), 8, None),
        (np.array([[1], [1 << 7]], np.uint8), 7, 1),
        (np.ones((2, 1), np.uint8), -1, None),
        (np.ones((2, 1), np.uint8), True, None),
        ([[1], [1, 2]], 8, None),
        ([[1], [1]], 8, None),
        (None, 8, None),
        ("ab", 8, None),
        (torch.ones(2, 1, dtype=torch.bfloat16), 8, None),
        (torch.ones(2, 1, dtype=torch.uint8, device="meta"), 8, None),
        (torch.ones(2, 1, dtype=torch.uint8).to_sparse(), 8, None),
    ],
)
def test_not_packed_bits_refused(bits, vocab_size, row):
    refuse(lambda: RolloutSamplingMask.from_packed_bits(bits, vocab_size), row=row, says="")


@pytest.mark.parametrize("bad", [-1, None, "9", 1.5, True])
def test_dense_needs_a_size(bad):
    for mask in (build([[1]]), build([None]), build([])):
        with pytest.raises(ReplayError, match="vocab_size is not a count"):
            mask.to_dense(bad)


def test_dense_needs_a_vocabulary_that_holds_the_ids():
    refuse(lambda: build([[1], [2, 9]]).to_dense(9), row=1, says="got 9")


# Rows


@given(rows_or_none, st.data())
def test_rows_by_index_and_slice(rows, data):
    mask = build(rows)
    assert [None if not row.size else row.tolist() for row in mask] == canonical(rows)
    cut = data.draw(st.slices(len(rows)))
    assert mask[cut].to_mask_list() == canonical(rows)[cut]
    for t in range(-len(rows), len(rows)):
        assert mask[t].tolist() == (canonical(rows)[t] or [])
    for t in (len(rows), -len(rows) - 1):
        with pytest.raises(IndexError):
            mask[t]


@given(rows_or_none, st.data())
def test_select(rows, data):
    mask, n = build(rows), len(rows)
    start = data.draw(st.integers(0, n))
    span = range(start, data.draw(st.integers(start, n)))
    assert mask.select(span).to_mask_list() == [canonical(rows)[t] for t in span]
    indices = data.draw(st.lists(st.integers(0, n - 1), max_size=20)) if n else []
    for form in (indices, np.array(indices, np.int32), torch.tensor(indices, dtype=torch.int64)):
        assert mask.select(form).to_mask_list() == [canonical(rows)[t] for t in indices]
    for descending in (range(n - 1, -1, -1), range(0, n, 3)):
        assert mask.select(descending).to_mask_list() == [canonical(rows)[t] for t in descending]


@pytest.mark.parametrize(
    "rows",
    [range(4), range(-1, 2), [3], [0, 1, 2, 3], [-1], [0, 2**40], range(4, 5), np.array([-3])],
    ids=str,
)
def test_select_out_of_range_refused(rows):
    with pytest.raises(ReplayError, match="row out of range"):
        build([[1], [2], [3]]).select(rows)


@pytest.mark.parametrize("rows", [[0.0], [True], ["0"], np.array([True, False, True]), None, 1])
def test_select_wants_integers(rows):
    with pytest.raises(ReplayError):
        build([[1], [2], [3]]).select(rows)


def test_select_takes_runs_as_slices(monkeypatch):
    cuts = []
    whole = RolloutSamplingMask._slice

    def counted(self, first, last):
        cuts.append((first, last))
        return whole(self, first, last)

    monkeypatch.setattr(RolloutSamplingMask, "_slice", counted)
    mask = build([[i] for i in range(100)])
    picked = mask.select([*range(10, 40), *range(60, 90), 5])
    assert cuts == [(10, 40), (60, 90), (5, 6)], "one slice for each run"
    assert picked.to_mask_list() == [[i] for i in (*range(10, 40), *range(60, 90), 5)]
    cuts.clear()
    span = mask.select(range(20, 70))
    assert cuts == [(20, 70)]
    assert np.shares_memory(span.ids, mask.ids), "a slice, no gather"


@given(st.lists(rows_or_none, max_size=4))
def test_concat(parts):
    joined = RolloutSamplingMask.concat(build(rows) for rows in parts)
    assert joined.to_mask_list() == [row for rows in parts for row in canonical(rows)]


@given(rows_or_none, rows_or_none, rows_or_none, st.data())
def test_algebra(a, b, c, data):
    concat = RolloutSamplingMask.concat
    a, b, c = build(a), build(b), build(c)
    assert concat([concat([a, b]), c]) == concat([a, concat([b, c])]) == concat([a, b, c])
    assert concat([a, RolloutSamplingMask.full(0)]) == a == concat([a])
    assert concat([a, b]).truncate(len(a)) == a
    assert concat([a, b])[len(a) :] == b
    n = data.draw(st.integers(0, len(a)))
    assert concat([a.truncate(n), a[n:]]) == a
    assert a.truncate(n) == a[:n] == a.select(range(n)) == a.select(list(range(n)))
    assert len(concat([a, b])) == len(a) + len(b)
    assert build(a.to_mask_list()) == a


def test_truncate_cannot_make_longer():
    with pytest.raises(ReplayError, match="row out of range"):
        build([[1]]).truncate(2)


def test_concat_refuses_what_is_no_mask():
    with pytest.raises(ReplayError) as caught:
        RolloutSamplingMask.concat([build([[1]]), [[2]]])
    assert caught.value.sample == 1


@pytest.mark.parametrize("bad", [7, None, "ab", {}, torch.zeros(2), np.zeros(2), 1.5], ids=str)
def test_concat_wants_an_iterable(bad):
    refuse(lambda: RolloutSamplingMask.concat(bad), row=None, says="not a sampling mask")


@given(st.lists(st.integers(-3, 9), max_size=20))
def test_consecutive_runs(index):
    expected = []
    for value in index:
        if expected and expected[-1][1] == value:
            expected[-1][1] = value + 1
        else:
            expected.append([value, value + 1])
    for form in (index, np.array(index, np.int32), torch.tensor(index, dtype=torch.int64)):
        runs = consecutive_runs(form)
        assert runs.dtype == np.int64
        assert runs.shape == (len(expected), 2)
        assert runs.tolist() == expected


@given(st.lists(st.integers(0, 2**40), max_size=9))
def test_offsets_of(lengths):
    for form in (lengths, tuple(lengths), np.array(lengths, np.int64)):
        offsets = offsets_of(form)
        assert offsets.dtype == np.int64
        assert offsets.tolist() == [0, *itertools.accumulate(lengths)]
    flags = np.array([length % 2 == 1 for length in lengths], np.bool_)
    assert offsets_of(flags)[-1] == flags.sum()


# Sampled tokens


@given(rows_or_none, st.data())
def test_contains_against_python(rows, data):
    mask = build(rows)
    anything = st.integers(-5, VOCAB + 5) | st.sampled_from([INT32_MAX, 2**31, -(2**31), 2**40])
    tokens = [data.draw(st.sampled_from(row) | anything if row else anything) for row in rows]
    expected = [row is None or token in row for row, token in zip(rows, tokens, strict=True)]
    for form in (tokens, np.array(tokens, np.int64), torch.tensor(tokens, dtype=torch.int64)):
        assert mask.contains(form).tolist() == expected
    places = mask.locate(tokens).tolist()
    flat = mask.ids.tolist()
    for row, token, place in zip(rows, tokens, places, strict=True):
        assert place == -1 if row is None or token not in row else flat[place] == token
    if all(expected):
        mask.check_sampled(tokens)
    else:
        with pytest.raises(MissingTokenError) as caught:
            mask.check_sampled(tokens)
        assert caught.value.row == expected.index(False)
        assert str(tokens[caught.value.row]) in caught.value.expected


@given(rows_or_none, st.data())
def test_include_adds_what_is_missing(rows, data):
    mask = build(rows)
    tokens = data.draw(st.lists(st.integers(0, VOCAB + 5), min_size=len(rows), max_size=len(rows)))
    included = mask.include(tokens)
    assert included.to_mask_list() == [
        None if row is None else sorted({*row, token})
        for row, token in zip(rows, tokens, strict=True)
    ]
    assert included.contains(tokens).all()
    assert included.include(tokens) == included
    assert mask.to_mask_list() == canonical(rows), "the original stays as it was"


@given(rows_or_none, st.data())
def test_fill_unrestricted_makes_them_singletons(rows, data):
    tokens = data.draw(st.lists(st.integers(0, VOCAB), min_size=len(rows), max_size=len(rows)))
    filled = build(rows).fill_unrestricted(tokens)
    assert filled.to_mask_list() == [
        [token] if row is None else sorted(row) for row, token in zip(rows, tokens, strict=True)
    ]


@pytest.mark.parametrize("bad", [-1, 2**31])
def test_include_refuses_what_is_no_token(bad):
    refuse(lambda: build([[1], [2]]).include([1, bad]), row=1, says=str(bad))


@pytest.mark.parametrize("method", ["contains", "check_sampled", "include", "locate"])
def test_one_token_a_row(method):
    mask = build([[1], [2]])
    for tokens in ([], [1], [1, 2, 3]):
        with pytest.raises(ReplayError, match="differ in number"):
            getattr(mask, method)(tokens)
    for tokens in ([1, 2.0], [True, 2], [None, 2], "12", None):
        with pytest.raises(ReplayError):
            getattr(mask, method)(tokens)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_integer_array(values):
    assert integer_array(values, "values").tolist() == values
    assert integer_array(tuple(values), "values").dtype == np.int64
    own = np.array(values, np.int64)
    assert integer_array(own, "values") is own or not values


# Speed


def nested_rows(rows=16_384, ids=50, vocab=151_936):
    """Descending weight: the order in which SGLang sends supports, unrelated to the ids."""
    drawn = np.random.default_rng(0).integers(0, vocab // ids, (rows, ids))
    spread = drawn + np.arange(ids) * (vocab // ids)
    return np.random.default_rng(1).permuted(spread, axis=1).tolist()


@pytest.mark.parametrize("order", ["ascending", "by weight"])
def test_building_costs_little_more_than_flattening(order, record_property):
    rows = nested_rows()
    if order == "ascending":
        rows = [sorted(row) for row in rows]

    def seconds(work):
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def flatten():
        array.array("i", itertools.chain.from_iterable(rows))

    # Best of several, taken in turn: other jobs on the machine slow both sides alike.
    pairs = [
        (seconds(flatten), seconds(lambda: RolloutSamplingMask.from_mask_list(rows)))
        for _ in range(7)
    ]
    bare, build_time = (min(times) for times in zip(*pairs, strict=True))
    ratio = build_time / bare
    record_property("ratio", ratio)
    print(f"{order}: {build_time * 1e3:.1f} ms, {ratio:.2f} x a bare chain")
    assert ratio < 2.5
