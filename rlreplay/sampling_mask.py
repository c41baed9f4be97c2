"""`RolloutSamplingMask`: the supports of one response, as a frozen CSR value object.

Shapes: `n` response tokens (rows), `N` support ids in total. Row t holds the ids that the sampler
kept when it drew response token t, ascending.
"""

from __future__ import annotations

import array
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt
import torch

from rlreplay.errors import MissingTokenError, ReplayError

IntArray = npt.NDArray[np.int64]
IdArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
_Scalar = TypeVar("_Scalar", bound=np.generic)
IntArrayLike = Sequence[int] | npt.NDArray[Any] | torch.Tensor

INT32_MAX = int(np.iinfo(np.int32).max)

_WRONG_ACTIONS = "the policy would be scored on another action space than the one sampled from"
_SHIFTED = "every later row would be scored on another token's support"
_ROW_TYPES = frozenset({list, tuple, range, array.array, np.ndarray, torch.Tensor})
# Rows that become arrays before they are joined (a range may be far too long for a list).
_ARRAY_TYPES = frozenset({np.ndarray, torch.Tensor, range})
_BOOLS = frozenset({bool, np.bool_})
_NUMBER_TYPES = frozenset({float, int, np.float32, np.float64})
_FLOAT64_MAX = int(np.finfo(np.float64).max)
_UNPACK_BYTES = 1 << 26  # dense bits unpacked at a time by from_packed_bits
_MOST = 1 << 48  # no array is that long, and sums of such counts do not overflow
_LONGEST_RANGE = 1 << 28  # a range costs nothing to write and 8 bytes an integer to read
# The dtypes that lists of ids, flags and log-probs come in, by the kind that numpy gives them.
_TENSOR_KINDS = {
    torch.bool: "b",
    **dict.fromkeys((torch.int8, torch.int16, torch.int32, torch.int64), "i"),
    **dict.fromkeys((torch.uint8, torch.uint16, torch.uint32, torch.uint64), "u"),
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32, torch.float64), "f"),
}


class RolloutSamplingMask:
    """The support of each token of one response, kept exactly as the sampler reported it.

    Args:
        ids: int `[N]`, the support ids of all rows, one row after another.
        offsets: int `[n + 1]`; row t is `ids[offsets[t]:offsets[t + 1]]`.
        vocab_size: where given, every id must be below it.
        allow_unrestricted: permit zero-length rows, which are scored over the full vocabulary.

    The arguments are copied. Ids are sorted within their row where they are not already. The
    object is immutable (numpy refuses to make its arrays writeable), compares by value, and pickles
    with protocol-5 out-of-band buffers.

    Raises:
        ReplayError: offsets that do not start at 0, end at N or never decrease; an empty row; an
            id that is negative, repeated in its row, at or above `vocab_size` or above int32;
            anything that is not an integer. The error names the row and the value.
    """

    __slots__ = ("_ids", "_offsets")
    __hash__ = None  # type: ignore[assignment]  # equality by value over big arrays: not a key

    _ids: IdArray
    _offsets: IntArray

    def __init__(
        self,
        ids: IntArrayLike,
        offsets: IntArrayLike,
        *,
        vocab_size: int | None = None,
        allow_unrestricted: bool = False,
    ) -> None:
        wide_ids, own_offsets = (
            integer_array(ids, "ids"),
            integer_array(offsets, "offsets").copy(),
        )
        _check_offsets(own_offsets, wide_ids.size)
        own_ids, _ = _canonical(wide_ids, own_offsets, vocab_size, allow_unrestricted, None)
        self._freeze(own_ids, own_offsets)

    def _freeze(self, ids: IdArray, offsets: IntArray) -> None:
        object.__setattr__(self, "_ids", frozen(ids))
        object.__setattr__(self, "_offsets", frozen(offsets))

    @classmethod
    def of_checked(cls, ids: IdArray, offsets: IntArray) -> Self:
        """Wrap arrays that are canonical already and that nobody else can write to."""
        mask = cls.__new__(cls)
        mask._freeze(ids, offsets)
        return mask

    # Constructors

    @classmethod
    def from_mask_list(
        cls,
        rows: Sequence[Sequence[int] | None],
        *,
        vocab_size: int | None = None,
        allow_unrestricted: bool = False,
    ) -> Self:
        """From nested lists, the shape engines send: `rows[t]` holds the ids of row t, any order.

        With `allow_unrestricted=True`, `None` in place of a row makes it unrestricted; `[]` is
        always refused.
        """
        ids, offsets = _flatten_rows(rows, allow_unrestricted)
        own_ids, _ = _canonical(ids, offsets, vocab_size, allow_unrestricted, None)
        return cls.of_checked(own_ids, offsets)

    @classmethod
    def from_mask_list_with_values(
        cls,
        rows: Sequence[Sequence[int] | None],
        values: Sequence[Sequence[float] | None],
        *,
        vocab_size: int | None = None,
        allow_unrestricted: bool = False,
    ) -> tuple[Self, FloatArray]:
        """`from_mask_list` with a number for every id, permuted together with the ids.

        Returns the mask and float32 `[N]` values in the order of `mask.ids`.
        """
        ids, offsets = _flatten_rows(rows, allow_unrestricted)
        flat, value_offsets = _flatten_values(values)
        _check_same_lengths(offsets, value_offsets)
        own_ids, own_values = _canonical(ids, offsets, vocab_size, allow_unrestricted, flat)
        assert own_values is not None
        return cls.of_checked(own_ids, offsets), own_values

    @classmethod
    def from_csr_with_values(
        cls,
        ids: IntArrayLike,
        offsets: IntArrayLike,
        values: npt.ArrayLike,
        *,
        vocab_size: int | None = None,
        allow_unrestricted: bool = False,
    ) -> tuple[Self, FloatArray]:
        """The constructor with a number for every id, permuted together with the ids.

        Returns the mask and float32 `[N]` values in the order of `mask.ids`.
        """
        wide_ids, own_offsets = (
            integer_array(ids, "ids"),
            integer_array(offsets, "offsets").copy(),
        )
        _check_offsets(own_offsets, wide_ids.size)
        flat = float_array(values, "values")
        if flat.shape != wide_ids.shape:
            raise ReplayError(
                "values do not match the support ids",
                expected=f"shape {wide_ids.shape}, one value for each id",
                got=f"shape {flat.shape}",
                consequence="values would be read against other ids",
            )
        own_ids, own_values = _canonical(
            wide_ids, own_offsets, vocab_size, allow_unrestricted, flat
        )
        assert own_values is not None
        return cls.of_checked(own_ids, own_offsets), own_values

    @classmethod
    def from_dense(cls, mask: npt.NDArray[np.bool_] | torch.Tensor | Sequence[Any]) -> Self:
        """From a bool `[n, V]` array, tensor or nested list, true for ids of the support."""
        listed = _bool_matrix(mask) if isinstance(mask, list | tuple) else mask
        dense = host_array(listed, "b", 2, _not_dense)
        _, columns = np.nonzero(dense)
        offsets = offsets_of(np.count_nonzero(dense, axis=1))
        _check_no_empty_row(offsets)
        return cls.of_checked(columns.astype(np.int32), offsets)

    @classmethod
    def from_packed_bits(cls, bits: npt.NDArray[np.uint8] | torch.Tensor, vocab_size: int) -> Self:
        """From a packed bitmask: uint8 `[n, ceil(vocab_size / 8)]`, little-endian within a byte.

        Bit j of byte b of a row stands for id `8 * b + j`; bits past `vocab_size` must be 0.
        """
        width = -(-check_count(vocab_size, "vocab_size") // 8)

        def refuse(got: str) -> ReplayError:
            return ReplayError(
                "not a packed sampling mask",
                expected=f"uint8 of shape [rows, {width}] for a vocabulary of {vocab_size}",
                got=got,
                consequence=_WRONG_ACTIONS,
            )

        packed = host_array(bits, "u", 2, refuse)
        if packed.dtype != np.uint8 or packed.shape[1] != width:
            raise refuse(f"{packed.dtype} of shape {packed.shape}")
        step = max(1, _UNPACK_BYTES // max(1, 8 * width))
        parts, counts = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
        for start in range(0, packed.shape[0], step):
            dense = np.unpackbits(packed[start : start + step], axis=1, bitorder="little")
            beyond = dense[:, vocab_size:].any(axis=1)
            if beyond.any():
                raise ReplayError(
                    "a bit past the vocabulary is set",
                    expected=f"zeros from bit {vocab_size} on",
                    got="a one",
                    consequence=_WRONG_ACTIONS,
                    row=start + int(np.argmax(beyond)),
                )
            parts.append(np.nonzero(dense)[1].astype(np.int32))
            counts.append(np.count_nonzero(dense, axis=1).astype(np.int64))
        offsets = offsets_of(np.concatenate(counts))
        _check_no_empty_row(offsets)
        return cls.of_checked(np.concatenate(parts), offsets)

    @classmethod
    def forced(cls, tokens: IntArrayLike, *, vocab_size: int | None = None) -> Self:
        """Singleton rows for tokens that were not drawn (tool output, greedy rows).

        Their log-prob on the support is exactly 0 and they send no gradient.
        """
        ids = integer_array(tokens, "tokens")
        return cls(ids, np.arange(ids.size + 1, dtype=np.int64), vocab_size=vocab_size)

    @classmethod
    def full(cls, n: int) -> Self:
        """`n` unrestricted rows: tokens that are scored over the full vocabulary."""
        count = check_count(n, "the number of rows")
        return cls.of_checked(np.zeros(0, np.int32), np.zeros(count + 1, np.int64))

    @classmethod
    def concat(cls, masks: Iterable[RolloutSamplingMask]) -> Self:
        """The rows of several masks, one after another (turns, resumed requests)."""
        if not is_iterable(masks):
            raise _not_a_mask("an iterable of RolloutSamplingMask", masks, None)
        parts = list(masks)
        for index, part in enumerate(parts):
            if not isinstance(part, RolloutSamplingMask):
                raise _not_a_mask("RolloutSamplingMask", part, index)
        ids = np.concatenate([np.zeros(0, np.int32), *(p._ids for p in parts)])
        lengths = np.concatenate([np.zeros(0, np.int64), *(p.lengths for p in parts)])
        return cls.of_checked(ids, offsets_of(lengths))

    # Reading

    @property
    def ids(self) -> IdArray:
        """int32 `[N]`, read-only: all supports, one row after another, ascending in a row."""
        return self._ids.view()  # a view of its own: whoever reshapes it in place has only that

    @property
    def offsets(self) -> IntArray:
        """int64 `[n + 1]`, read-only: row t is `ids[offsets[t]:offsets[t + 1]]`."""
        return self._offsets.view()

    @property
    def lengths(self) -> IntArray:
        """int64 `[n]`: support size of each row, 0 where the row is unrestricted."""
        return np.diff(self._offsets)

    @property
    def unrestricted(self) -> BoolArray:
        """bool `[n]`: rows that are scored over the full vocabulary."""
        return np.equal(self._offsets[1:], self._offsets[:-1])

    @property
    def max_id(self) -> int:
        """The largest id of any row, -1 where there is none."""
        return int(self._ids.max(initial=-1))

    @property
    def nbytes(self) -> int:
        """Bytes held by ids and offsets."""
        return self._ids.nbytes + self._offsets.nbytes

    def __len__(self) -> int:
        return self._offsets.size - 1

    @overload
    def __getitem__(self, index: int) -> IdArray: ...
    @overload
    def __getitem__(self, index: slice) -> RolloutSamplingMask: ...
    def __getitem__(self, index: int | slice) -> IdArray | RolloutSamplingMask:
        """`mask[t]` is the ids of row t (read-only); `mask[a:b]` is the mask of those rows.

        Indexing is Python's own, for iteration to work: `IndexError` past the ends, negative rows
        from the end. `select` refuses both with a `ReplayError`.
        """
        if isinstance(index, slice):
            return self.select(range(*index.indices(len(self))))
        row = range(len(self))[index]
        return self._ids[self._offsets[row] : self._offsets[row + 1]]

    def __iter__(self) -> Iterator[IdArray]:
        return (self[t] for t in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RolloutSamplingMask):
            return NotImplemented
        return np.array_equal(self._offsets, other._offsets) and np.array_equal(
            self._ids, other._ids
        )

    def __repr__(self) -> str:
        free = int(self.unrestricted.sum())
        return f"RolloutSamplingMask(rows={len(self)}, ids={self._ids.size}, unrestricted={free})"

    def to_mask_list(self) -> list[list[int] | None]:
        """Nested lists, `None` for unrestricted rows: the inverse of `from_mask_list`."""
        flat, ends = self._ids.tolist(), self._offsets.tolist()
        return [flat[a:b] if b > a else None for a, b in itertools.pairwise(ends)]

    def to_dense(self, vocab_size: int) -> BoolArray:
        """bool `[n, vocab_size]`, true on the support; whole rows where unrestricted."""
        check_ids_below(self, vocab_size)
        dense = np.zeros((len(self), int(vocab_size)), dtype=np.bool_)
        dense[np.repeat(np.arange(len(self)), self.lengths), self._ids] = True
        dense[self.unrestricted] = True
        return dense

    # Rows

    def select(self, rows: range | IntArrayLike) -> RolloutSamplingMask:
        """The named rows, in the order named.

        Args:
            rows: a `range`, or int `[m]` indices in `[0, n)`; negative indices are refused.
                Consecutive indices are found as runs, and each run is one slice.
        """
        if isinstance(rows, range):  # looked at by its ends: it may be far too long for an array
            ends = sorted((rows[0], rows[-1])) if rows else [0, -1]
            self._check_rows(ends[0], ends[1] + 1)
            if rows.step == 1:
                return self._slice(ends[0], ends[1] + 1)
        index = integer_array(rows, "rows")
        if index.size:
            self._check_rows(int(index.min()), int(index.max()) + 1)
        return RolloutSamplingMask.concat(
            self._slice(first, last) for first, last in consecutive_runs(index).tolist()
        )

    def truncate(self, n: int) -> RolloutSamplingMask:
        """The first `n` rows."""
        return self.select(range(check_count(n, "the number of rows")))

    def _slice(self, first: int, last: int) -> RolloutSamplingMask:
        offsets = self._offsets[first : last + 1]
        ids = self._ids[offsets[0] : offsets[-1]]
        return RolloutSamplingMask.of_checked(ids, offsets - offsets[0])

    def _check_rows(self, first: int, last: int) -> None:
        if first < 0 or last > len(self):
            raise ReplayError(
                "row out of range",
                expected=f"rows in [0, {len(self)})",
                got=shown(first if first < 0 else last - 1).removeprefix("int "),
                consequence="tokens would be scored on no support or on another token's",
            )

    # Sampled tokens

    def contains(self, tokens: IntArrayLike) -> BoolArray:
        """bool `[n]`: is `tokens[t]` in row t? Always true where the row is unrestricted."""
        return self.unrestricted | (self.locate(tokens) >= 0)

    def locate(self, tokens: IntArrayLike) -> IntArray:
        """int64 `[n]`: the position in `ids` of `tokens[t]` within row t, or -1."""
        wanted = self._one_a_row(tokens)
        # no id is -1; as int32, like the ids, the comparison moves half the bytes
        narrow = np.where((wanted < 0) | (wanted > INT32_MAX), -1, wanted).astype(np.int32)
        hits = np.flatnonzero(self._ids == np.repeat(narrow, self.lengths))
        positions = np.full(len(self), -1, dtype=np.int64)
        positions[np.searchsorted(self._offsets, hits, side="right") - 1] = hits
        return positions

    def check_sampled(self, tokens: IntArrayLike) -> None:
        """Raise `MissingTokenError` unless every `tokens[t]` is in row t."""
        present = self.contains(tokens)
        if not present.all():
            row = int(np.argmin(present))
            token = int(integer_array(tokens, "tokens")[row])
            ids = self[row]
            shown = ", ".join(str(i) for i in ids[:8].tolist()) + (", …" if ids.size > 8 else "")
            raise MissingTokenError(
                f"the sampled token is not in its support ({(~present).sum()} such rows)",
                expected=f"token {token} among the {ids.size} ids of the row",
                got=f"[{shown}]",
                consequence="the token would have log-prob -inf under the replayed policy",
                row=row,
            )

    def include(self, tokens: IntArrayLike) -> RolloutSamplingMask:
        """The mask with `tokens[t]` added to row t wherever it is missing."""
        wanted = self._one_a_row(tokens)
        return self._inserted(wanted, ~self.contains(wanted))

    def fill_unrestricted(self, tokens: IntArrayLike) -> RolloutSamplingMask:
        """The mask with each unrestricted row t replaced by the singleton `tokens[t]`."""
        return self._inserted(self._one_a_row(tokens), self.unrestricted)

    def _inserted(self, tokens: IntArray, rows: BoolArray) -> RolloutSamplingMask:
        """`tokens[t]` inserted at its sorted place into each of the named rows."""
        if not rows.any():
            return self
        self._check_token_range(tokens, rows)
        below = offsets_of(self._ids < np.repeat(tokens, self.lengths))
        at = self._offsets[:-1] + below[self._offsets[1:]] - below[self._offsets[:-1]]
        ids = np.insert(self._ids, at[rows], tokens[rows].astype(np.int32))
        return RolloutSamplingMask.of_checked(ids, offsets_of(self.lengths + rows))

    def _one_a_row(self, tokens: IntArrayLike) -> IntArray:
        wanted = integer_array(tokens, "tokens")
        if wanted.size != len(self):
            raise ReplayError(
                "tokens and supports differ in number",
                expected=f"{len(self)} tokens, one for each row of the mask",
                got=f"{wanted.size}",
                consequence=_SHIFTED,
            )
        return wanted

    @staticmethod
    def _check_token_range(tokens: IntArray, rows: BoolArray) -> None:
        bad = rows & ((tokens < 0) | (tokens > INT32_MAX))
        if bad.any():
            row = int(np.argmax(bad))
            raise ReplayError(
                "a sampled token is no token id",
                expected="an integer in [0, 2**31)",
                got=f"{int(tokens[row])}",
                consequence=_WRONG_ACTIONS,
                row=row,
            )

    # Value semantics

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"RolloutSamplingMask is immutable: cannot set {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"RolloutSamplingMask is immutable: cannot delete {name!r}")

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self._ids, self._offsets)


def _unpickle(ids: IdArray, offsets: IntArray) -> RolloutSamplingMask:
    return RolloutSamplingMask.of_checked(ids, offsets)


def integer_array(values: Any, name: str) -> IntArray:
    """`values` as int64 `[m]`, without a copy where it is one already; non-integers are refused.

    `name` is what error messages call the argument. Bools are not integers here.
    """
    if isinstance(values, array.array):
        values = np.asarray(values)
    if isinstance(values, np.ndarray | torch.Tensor):
        own = host_array(values, "iu", 1, lambda got: _not_integers(name, got))
        if own.dtype == np.uint64 and own.size and int(own.max()) >= 1 << 63:
            raise _not_integers(name, f"{int(own.max())}", row=int(own.argmax()))
        return own.astype(np.int64, copy=False)
    if isinstance(values, range):
        return _integers_of_range(values, name)
    if not isinstance(values, list | tuple):
        raise _not_integers(name, type(values).__name__)
    return _integers_of(values, name)


def _integers_of_range(values: range, name: str) -> IntArray:
    if values:
        first, last = values[0], values[-1]
        count = (last - first) // values.step + 1  # len() overflows on longer ones
        if count > _LONGEST_RANGE or max(abs(first), abs(last)) >= _MOST:
            raise _not_integers(name, shown(values))
    return np.arange(values.start, values.stop, values.step, dtype=np.int64)


def _integers_of(values: Sequence[Any], name: str) -> IntArray:
    if _all_integers(values):
        try:
            return np.frombuffer(array.array("q", values), dtype=np.int64)
        except OverflowError:
            pass
    for index, value in enumerate(values):
        if not is_integer(value) or not -(1 << 63) <= int(value) < 1 << 63:
            raise _not_integers(name, shown(value), row=index)
    raise _not_integers(name, "values that do not convert")


def _all_integers(values: Sequence[Any]) -> bool:
    """Is every value a Python or numpy integer? `array` alone would take 0-d tensors and bools."""
    if operator.countOf(map(type, values), int) == len(values):  # one pass in C
        return True
    return all(map(_is_integer_type, _types(values)))


def _types(values: Iterable[Any]) -> set[type]:
    return set(map(type, values))


def _is_integer_type(kind: type) -> bool:
    # numpy counts its time spans among its integers
    return issubclass(kind, int | np.integer) and not issubclass(kind, bool | np.timedelta64)


def is_integer(value: Any) -> bool:
    """Is it a Python or numpy integer? Bools and tensors are none."""
    return _is_integer_type(type(value))


def float_array(values: Any, name: str) -> FloatArray:
    """`values` as a fresh float32 `[m]`, infinite where float32 overflows; only numbers pass.

    Takes a list or tuple of floats and ints, or a floating-point array or tensor. `name` is what
    error messages call the argument.
    """
    with np.errstate(over="ignore"):
        narrow: FloatArray = _numbers_of(values, name).astype(np.float32)
    return narrow


def _numbers_of(values: Any, name: str) -> npt.NDArray[Any]:
    if isinstance(values, np.ndarray | torch.Tensor):
        return host_array(values, "f", 1, lambda got: _not_numbers(name, got))
    if not isinstance(values, list | tuple):
        raise _not_numbers(name, type(values).__name__)
    # One pass in C over the types: bool, None and str must not pass for numbers.
    if not set(map(type, values)) <= _NUMBER_TYPES:
        at = next(i for i, v in enumerate(values) if type(v) not in _NUMBER_TYPES)
        raise _not_numbers(name, shown(values[at]), row=at)
    try:
        return np.frombuffer(array.array("d", values), dtype=np.float64)
    except OverflowError:
        at = next(i for i, v in enumerate(values) if abs(v) > _FLOAT64_MAX)
        raise _not_numbers(name, "an integer beyond any float", row=at) from None


def host_array(
    values: Any, kinds: str, ndim: int, refuse: Callable[[str], ReplayError]
) -> npt.NDArray[Any]:
    """A numpy array or a tensor on any device as a numpy array, without a copy where it can be.

    The only way of tensors into numpy. What numpy cannot hold is found before it is converted:
    sparse, nested, quantised and meta tensors, and dtypes outside of bool, integers and floats.

    Args:
        values: array or tensor; bf16 becomes float32.
        kinds: the kinds (`dtype.kind`) to let through, of "b", "i", "u" and "f".
        ndim: the number of dimensions it must have.
        refuse: makes the error from a text that says what came.
    """
    if isinstance(values, torch.Tensor):
        values = _numpy_of(values, kinds, refuse)
    if not isinstance(values, np.ndarray) or isinstance(values, np.ma.MaskedArray):
        raise refuse(type(values).__name__)
    if values.dtype.kind not in kinds or values.ndim != ndim:
        raise refuse(f"{values.dtype} of shape {values.shape}")
    return values


def _numpy_of(
    tensor: torch.Tensor, kinds: str, refuse: Callable[[str], ReplayError]
) -> npt.NDArray[Any]:
    what = f"{tensor.layout} tensor of {tensor.dtype} on {tensor.device.type}"
    hollow = tensor.is_nested or tensor.is_quantized or tensor.is_meta
    if tensor.layout is not torch.strided or hollow:
        raise refuse(what + (" (nested)" if tensor.is_nested else ""))
    kind = _TENSOR_KINDS.get(tensor.dtype)
    if kind is None or kind not in kinds:
        raise refuse(f"{what} of shape {tuple(tensor.shape)}")
    try:
        host = tensor.detach().cpu().resolve_neg()
        return (host.float() if host.dtype == torch.bfloat16 else host).numpy()
    except (RuntimeError, TypeError):  # a subclass of Tensor that keeps its numbers elsewhere
        raise refuse(f"{type(tensor).__name__}, a {what}") from None


def frozen(values: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    """A view of a contiguous 1-D array that numpy refuses to make writeable again."""
    return np.frombuffer(values.data.toreadonly(), dtype=values.dtype)


def is_iterable(values: Any) -> bool:
    """Can `values` be an iterable of objects? Text, dicts, arrays, tensors and ranges are none."""
    opaque = isinstance(
        values, str | bytes | bytearray | memoryview | dict | range | np.ndarray | torch.Tensor
    )
    return isinstance(values, Iterable) and not opaque


def check_flag(value: Any, name: str) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, bool | np.bool_):
        raise ReplayError(
            f"{name} is no flag",
            expected="True or False",
            got=shown(value),
            consequence="the input would be read in a way nobody asked for",
        )


def check_count(value: Any, name: str) -> int:
    """`value` as a non-negative int; anything else is refused."""
    if not is_integer(value) or not 0 <= int(value) < _MOST:
        raise ReplayError(
            f"{name} is not a count",
            expected="a non-negative integer below 2**48",
            got=shown(value),
            consequence="rows and columns would be laid out wrongly",
        )
    return int(value)


def check_ids_below(mask: RolloutSamplingMask, vocab_size: int) -> None:
    """Raise `ReplayError`, with the row, where a support id is not below `vocab_size`."""
    if mask.max_id >= check_count(vocab_size, "vocab_size"):
        at = int(np.argmax(mask.ids >= vocab_size))
        raise _id_out_of_range(mask.ids, mask.offsets, at, vocab_size)


def shown(value: Any) -> str:
    """A short text for error messages: type and start of the value; never raises."""
    try:
        return f"{type(value).__name__} {str(value)[:40]}"
    except Exception:  # integers of thousands of digits, and whatever else an input may hold
        return type(value).__name__


def _not_integers(name: str, got: str, row: int | None = None) -> ReplayError:
    return ReplayError(
        f"{name} must be integers",
        expected="a flat sequence, array or tensor of integers below 2**63",
        got=got,
        consequence="token ids would be rounded or misread",
        row=row,
    )


def _not_numbers(name: str, got: str, row: int | None = None) -> ReplayError:
    return ReplayError(
        f"{name} must be numbers",
        expected="a flat list of floats, or a one-dimensional floating-point array",
        got=got,
        consequence="log-probs would be made up",
        row=row,
    )


def _not_a_mask(expected: str, got: Any, sample: int | None) -> ReplayError:
    return ReplayError(
        "not a sampling mask",
        expected=expected,
        got=type(got).__name__,
        consequence=_WRONG_ACTIONS,
        sample=sample,
    )


def _not_dense(got: str, row: int | None = None) -> ReplayError:
    return ReplayError(
        "not a dense sampling mask",
        expected="a two-dimensional bool array [rows, vocab]",
        got=got,
        consequence=_WRONG_ACTIONS,
        row=row,
    )


def _bool_matrix(rows: Sequence[Any]) -> BoolArray:
    """Nested lists of bools, all of one length, as an array."""
    width = len(rows[0]) if rows and isinstance(rows[0], list | tuple) else 0
    listed = _types(rows) <= {list, tuple} and set(map(len, rows)) <= {width}
    if listed and _types(itertools.chain.from_iterable(rows)) <= _BOOLS:
        return np.array(rows, dtype=np.bool_).reshape(len(rows), width)
    for row, values in enumerate(rows):
        if not isinstance(values, list | tuple):
            raise _not_dense(shown(values), row)
        if len(values) != width or not _types(values) <= _BOOLS:
            raise _not_dense(f"{len(values)} values after {width}, {shown(values)}", row)
    raise _not_dense(shown(rows))


def offsets_of(lengths: npt.ArrayLike) -> IntArray:
    """int64 `[m + 1]`, from 0: where each of `m` pieces of these lengths starts, and the end."""
    sizes = np.asarray(lengths)
    offsets = np.zeros(sizes.size + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:], dtype=np.int64)
    return offsets


def row_at(offsets: IntArray, position: int) -> int:
    """The row of a CSR that holds the id at `position`."""
    return int(np.searchsorted(offsets, position, side="right")) - 1


def consecutive_runs(index: IntArrayLike) -> IntArray:
    """int64 `[k, 2]`: `[first, last)` of each run of consecutive integers in `index`, in order.

    Equivalent to splitting `index` wherever a value is not the one before it plus 1.
    """
    values = integer_array(index, "index")
    starts = np.ones(values.size, dtype=np.bool_)
    np.not_equal(values[1:], values[:-1] + 1, out=starts[1:])
    at = np.flatnonzero(starts)
    ends = np.append(at[1:], values.size)[: at.size] - 1
    return np.stack([values[at], values[ends] + 1], axis=1)


def _check_offsets(offsets: IntArray, num_ids: int) -> None:
    if offsets.size == 0 or offsets[0] != 0:
        raise ReplayError(
            "offsets do not start at 0",
            expected="offsets[0] == 0",
            got=f"{offsets[0]}" if offsets.size else "no offsets at all",
            consequence=_SHIFTED,
            row=0,
        )
    falls = offsets[1:] < offsets[:-1]
    if falls.any():
        row = int(np.argmax(falls))
        raise ReplayError(
            "offsets decrease",
            expected=f"offsets[{row + 1}] >= {offsets[row]}",
            got=f"{offsets[row + 1]}",
            consequence=_SHIFTED,
            row=row,
        )
    if offsets[-1] != num_ids:
        raise ReplayError(
            "offsets do not end at the number of ids",
            expected=f"offsets[-1] == {num_ids}",
            got=f"{offsets[-1]}",
            consequence="ids would be dropped, or rows would reach past the last id",
            row=offsets.size - 2,
        )


def _check_no_empty_row(offsets: IntArray) -> None:
    empty = offsets[1:] == offsets[:-1]
    if empty.any():
        raise ReplayError(
            "empty support",
            expected="at least one id (an unrestricted row has to be asked for)",
            got="none",
            consequence="no token can be drawn from an empty support",
            row=int(np.argmax(empty)),
        )


def _id_out_of_range(
    ids: npt.NDArray[Any], offsets: IntArray, at: int, vocab_size: int | None
) -> ReplayError:
    limit = "2**31" if vocab_size is None else str(vocab_size)
    return ReplayError(
        "support id out of range",
        expected=f"an id in [0, {limit})",
        got=shown(int(ids[at])).removeprefix("int "),
        consequence=_WRONG_ACTIONS,
        row=row_at(offsets, at),
    )


def _canonical(
    ids: npt.NDArray[Any],
    offsets: IntArray,
    vocab_size: int | None,
    allow_unrestricted: bool,
    values: FloatArray | None,
) -> tuple[IdArray, FloatArray | None]:
    """Check the ids of a CSR with sound offsets; return fresh int32 ids, ascending in each row.

    `values` are permuted together with the ids, in place.
    """
    check_flag(allow_unrestricted, "allow_unrestricted")
    if not allow_unrestricted:
        _check_no_empty_row(offsets)
    limit = INT32_MAX + 1
    if vocab_size is not None:
        limit = min(limit, check_count(vocab_size, "vocab_size"))
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= limit):
        at = int(np.argmax((ids < 0) | (ids >= limit)))
        raise _id_out_of_range(ids, offsets, at, limit)
    own = ids.astype(np.int32)
    unsorted = _rows_not_ascending(own, offsets)
    if unsorted.size:
        _sort_rows(own, offsets, unsorted, values)
        _check_no_repeat(own, offsets)
    return own, values


def _rows_not_ascending(ids: IdArray, offsets: IntArray) -> IntArray:
    """Rows in which some id is not above the one before it."""
    falls = np.zeros(ids.size + 1, dtype=np.bool_)
    np.less_equal(ids[1:], ids[:-1], out=falls[1 : ids.size])
    falls[offsets] = False  # the first id of a row has no predecessor
    if not falls.any():
        return np.zeros(0, dtype=np.int64)
    falls_before = offsets_of(falls)[offsets]
    return np.flatnonzero(np.diff(falls_before))


def _sort_rows(ids: IdArray, offsets: IntArray, rows: IntArray, values: FloatArray | None) -> None:
    """Sort the named rows in place: rows of one length form a matrix that is sorted at once.

    The loop runs over distinct lengths, of which N ids allow fewer than sqrt(2 N) + 1.
    """
    lengths = offsets[rows + 1] - offsets[rows]
    for length in np.unique(lengths).tolist():
        starts = offsets[rows[lengths == length]]
        where = starts[:, None] + np.arange(length)
        block = ids[where]
        if values is None:
            block.sort(axis=1)
            ids[where] = block
            continue
        # (id, old column) in one integer: one sort gives both the ids and the permutation
        keyed = (block.astype(np.int64) << 32) | np.arange(length)
        keyed.sort(axis=1)
        ids[where] = keyed >> 32
        values[where] = np.take_along_axis(values[where], keyed & 0xFFFFFFFF, axis=1)


def _check_no_repeat(ids: IdArray, offsets: IntArray) -> None:
    repeats = np.flatnonzero(ids[1:] == ids[:-1]) + 1
    repeats = repeats[offsets[np.searchsorted(offsets, repeats, side="right") - 1] != repeats]
    if repeats.size:
        at = int(repeats[0])
        raise ReplayError(
            "support id repeated within its row",
            expected="each id once",
            got=f"{int(ids[at])} more than once",
            consequence="its probability would be counted twice",
            row=row_at(offsets, at),
        )


def _check_same_lengths(offsets: IntArray, value_offsets: IntArray) -> None:
    if offsets.size != value_offsets.size:
        raise ReplayError(
            "values do not match the supports",
            expected=f"{offsets.size - 1} rows of values",
            got=f"{value_offsets.size - 1}",
            consequence="values would be read against other tokens' ids",
        )
    differ = np.diff(offsets) != np.diff(value_offsets)
    if differ.any():
        row = int(np.argmax(differ))
        raise ReplayError(
            "values do not match the support",
            expected=f"{np.diff(offsets)[row]} values, one for each id",
            got=f"{np.diff(value_offsets)[row]}",
            consequence="values would be read against other ids",
            row=row,
        )


def _flatten_rows(
    rows: Sequence[Sequence[int] | None], allow_unrestricted: bool
) -> tuple[npt.NDArray[Any], IntArray]:
    """Nested rows to (int32 ids, offsets), at the speed of `itertools.chain`."""
    check_flag(allow_unrestricted, "allow_unrestricted")
    kinds = _row_types(rows, "the sampling mask", allow_none=allow_unrestricted)
    kept: Sequence[Any] = rows
    if type(None) in kinds:
        kept = [() if row is None else row for row in rows]
    if kinds & _ARRAY_TYPES:
        kept = [_array_row(row, t) for t, row in enumerate(kept)]
    lengths = np.fromiter(map(len, kept), dtype=np.int64, count=len(kept))
    empty = lengths == 0
    if empty.any():
        told = np.fromiter((row is None for row in rows), dtype=np.bool_, count=len(rows))
        _check_no_empty_row(offsets_of(lengths + told))
    offsets = offsets_of(lengths)
    if kinds & _ARRAY_TYPES:
        return np.concatenate(kept), offsets
    # A list tells `array` its length: faster than from the iterator.
    flat = list(itertools.chain.from_iterable(kept))
    if not _all_integers(flat):
        raise _culprit(kept)
    try:
        return np.frombuffer(array.array("i", flat), dtype=np.int32), offsets
    except OverflowError:
        raise _culprit(kept) from None


def _array_row(row: Any, index: int) -> IntArray:
    try:
        if isinstance(row, range):  # before it grows into an array
            wrong = [end for end in (*row[:1], *row[-1:]) if not 0 <= end <= INT32_MAX]
            if wrong:
                raise _culprit([wrong])
        return integer_array(row, "support ids")
    except ReplayError as error:
        raise error.located(row=index) from None


def _row_types(rows: Any, name: str, *, allow_none: bool) -> set[type]:
    scalar = isinstance(rows, np.ndarray) and rows.ndim == 0
    if scalar or not isinstance(rows, list | tuple | np.ndarray):
        raise ReplayError(
            f"{name} is not a list of rows",
            expected="one list of ids for each response token",
            got=type(rows).__name__,
            consequence=_WRONG_ACTIONS,
        )
    kinds = set(map(type, rows))
    wrong = kinds - _ROW_TYPES - ({type(None)} if allow_none else set())
    if wrong:
        row = next(t for t, value in enumerate(rows) if type(value) in wrong)
        raise ReplayError(
            f"a row of {name} is not a list",
            expected="a list of integers" + (" or None (unrestricted)" if allow_none else ""),
            got=shown(rows[row]),
            consequence=_WRONG_ACTIONS,
            row=row,
        )
    return kinds


def _culprit(rows: Sequence[Any]) -> ReplayError:
    """The error for the first value that is no int32; called only once something is wrong."""
    for row, values in enumerate(rows):
        for value in values:
            if not is_integer(value):
                error = _not_integers("support ids", shown(value))
                return error.located(row=row)
            if not 0 <= int(value) <= INT32_MAX:
                return _id_out_of_range(
                    np.array([value], dtype=object), np.array([0, 1]), 0, None
                ).located(row=row)
    return _not_integers("support ids", "values that do not convert")


def _flatten_values(
    values: Sequence[Sequence[float] | None],
) -> tuple[FloatArray, IntArray]:
    kinds = _row_types(values, "the values", allow_none=True)
    kept = [() if row is None else row for row in values] if type(None) in kinds else values
    if kinds & _ARRAY_TYPES:
        rows = [_float_row(row, t) for t, row in enumerate(kept)]
        return np.concatenate(rows), offsets_of(np.array([row.size for row in rows]))
    lengths = np.fromiter(map(len, kept), dtype=np.int64, count=len(kept))  # type: ignore[arg-type]
    offsets = offsets_of(lengths)
    try:
        flat = list(itertools.chain.from_iterable(kept))  # type: ignore[arg-type]
        return float_array(flat, "the values"), offsets
    except ReplayError as error:
        row = None if error.row is None else row_at(offsets, error.row)
        raise error.located(row=row) from None


def _float_row(row: Any, index: int) -> FloatArray:
    try:
        return float_array(row, "the values")
    except ReplayError as error:
        raise error.located(row=index) from None
