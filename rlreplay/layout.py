"""`RowLayout`: which local logits row scores which response token. Pure integers.

A sample of prompt length P and response length R is a sequence of P + R tokens. Response token r
sits at position P + r and is scored by the logits of position P + r - 1. Every layout is described
by *segments*: runs of sequence positions that are consecutive rows on a rank. Intersecting them
with the scoring positions gives *spans*, local row <-> response index. No other module knows what
a layout is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlreplay.errors import ReplayError
from rlreplay.sampling_mask import IntArray, check_count, integer_array

_MISALIGNED = "logits rows would score other tokens than their own"


class RowSpan(NamedTuple):
    """Consecutive logits rows of this rank that score consecutive response tokens."""

    local_row: int
    response_index: int
    length: int


class _Segment(NamedTuple):
    """Consecutive rows of a rank that hold consecutive positions of one sequence."""

    local_row: int
    position: int
    length: int


class _Piece(NamedTuple):
    """Values of consecutive response tokens."""

    start: int
    values: Tensor


class _Placement(Protocol):
    """Where the sequences lie: the one thing in which the layouts differ."""

    @property
    def rows_per_rank(self) -> int: ...

    def segments(self, sample: int, rank: int) -> list[_Segment]: ...


@dataclass(frozen=True)
class _Stream:
    """Sequences one after another in a stream, of which rank c holds the c-th piece."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    rows_per_rank: int

    def segments(self, sample: int, rank: int) -> list[_Segment]:
        piece = rank * self.rows_per_rank
        first = max(piece, self.starts[sample])
        last = min(piece + self.rows_per_rank, self.starts[sample] + self.lengths[sample])
        if first >= last:
            return []
        return [_Segment(first - piece, first - self.starts[sample], last - first)]


@dataclass(frozen=True)
class _Chunks:
    """Each sequence is cut into equal chunks, and rank c holds the chunks `held[c]` of each."""

    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    held: tuple[tuple[int, ...], ...]
    rows_per_rank: int

    def segments(self, sample: int, rank: int) -> list[_Segment]:
        size, start = self.sizes[sample], self.starts[sample]
        return [
            _Segment(start + slot * size, chunk * size, size)
            for slot, chunk in enumerate(self.held[rank])
        ]


@dataclass(frozen=True)
class RowLayout:
    """The row map of one rank for one micro-batch. Build it with one of the four constructors.

    Attributes:
        total_lengths: prompt + response tokens of each sample.
        response_lengths: response tokens of each sample; each prompt has at least one token.
        cp_rank, cp_size: this rank's place in its context-parallel group.
        exact_rows: whether the logits must have exactly `num_local_rows` rows, or may have more,
            at the end of the stream (`end_padding=True`).

    Raises:
        ReplayError: lengths that contradict each other or the layout.
    """

    total_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]
    cp_rank: int
    cp_size: int
    exact_rows: bool
    placement: _Placement

    # Constructors

    @classmethod
    def packed(
        cls,
        total_lengths: Sequence[int],
        response_lengths: Sequence[int],
        *,
        padded_lengths: Sequence[int] | None = None,
        end_padding: bool = False,
    ) -> RowLayout:
        """thd without CP: samples one after another, each taking its padded length.

        `end_padding=True` says that the stream may be longer, padded at its end.
        """
        total, response = _check_lengths(total_lengths, response_lengths)
        lengths = _check_padded(padded_lengths, total, multiple_of=1)
        placement = _Stream(_starts(lengths), lengths, sum(lengths))
        return cls(total, response, 0, 1, not end_padding, placement)

    @classmethod
    def padded(
        cls,
        total_lengths: Sequence[int],
        response_lengths: Sequence[int],
        *,
        max_seq_len: int,
        padded_lengths: Sequence[int] | None = None,
    ) -> RowLayout:
        """bshd without CP: sample i starts at row `i * max_seq_len` of the flattened batch."""
        total, response = _check_lengths(total_lengths, response_lengths)
        lengths = _check_padded(padded_lengths, total, multiple_of=1)
        width = _check_max_seq_len(max_seq_len, lengths)
        starts = tuple(i * width for i in range(len(total)))
        return cls(total, response, 0, 1, True, _Stream(starts, lengths, len(total) * width))

    @classmethod
    def zigzag(
        cls,
        total_lengths: Sequence[int],
        response_lengths: Sequence[int],
        *,
        cp_rank: int,
        cp_size: int,
        max_seq_len: int | None = None,
        padded_lengths: Sequence[int] | None = None,
        end_padding: bool = False,
    ) -> RowLayout:
        """Zigzag CP: each sample is 2·cp equal chunks, and rank c holds c and 2·cp - 1 - c.

        thd without `max_seq_len` (each sample padded to a multiple of 2·cp, or to its padded
        length, which must be one); bshd with it (every sample padded to `max_seq_len` rounded up).
        `end_padding=True` says that a thd stream may be longer, each rank's padded at its end.
        """
        cp_rank, cp_size = _check_rank(cp_rank, cp_size)
        total, response = _check_lengths(total_lengths, response_lengths)
        multiple = 2 * cp_size
        if max_seq_len is None:
            lengths = _check_padded(padded_lengths, total, multiple_of=multiple)
        else:
            lengths = _check_padded(padded_lengths, total, multiple_of=1)
            lengths = (_check_max_seq_len(max_seq_len, lengths),) * len(total)
        held = tuple((c, multiple - 1 - c) for c in range(cp_size))
        placement = _chunked(lengths, multiple, held)
        exact = max_seq_len is not None or not end_padding
        return cls(total, response, cp_rank, cp_size, exact, placement)

    @classmethod
    def contiguous(
        cls,
        total_lengths: Sequence[int],
        response_lengths: Sequence[int],
        *,
        cp_rank: int,
        cp_size: int,
        max_seq_len: int | None = None,
        padded_lengths: Sequence[int] | None = None,
        stream_length: int | None = None,
    ) -> RowLayout:
        """Contiguous CP (all-gather CP, Ulysses): cp equal pieces, rank c holds the c-th.

        thd without `max_seq_len`: the packed stream is cut, after padding at its end to
        `stream_length` (by default to the next multiple of cp). bshd with it: every sequence,
        padded to `max_seq_len` rounded up, is cut.
        """
        cp_rank, cp_size = _check_rank(cp_rank, cp_size)
        total, response = _check_lengths(total_lengths, response_lengths)
        lengths = _check_padded(padded_lengths, total, multiple_of=1)
        placement: _Placement
        if max_seq_len is None:
            piece = _check_stream(stream_length, sum(lengths), cp_size) // cp_size
            placement = _Stream(_starts(lengths), lengths, piece)
        else:
            lengths = (_check_max_seq_len(max_seq_len, lengths),) * len(total)
            placement = _chunked(lengths, cp_size, tuple((c,) for c in range(cp_size)))
        return cls(total, response, cp_rank, cp_size, True, placement)

    # This rank's rows

    @property
    def num_samples(self) -> int:
        return len(self.total_lengths)

    @property
    def num_local_rows(self) -> int:
        """Logits rows that the layout occupies on this rank."""
        return self.placement.rows_per_rank

    @cached_property
    def spans(self) -> tuple[tuple[RowSpan, ...], ...]:
        """For each sample, the spans of this rank in sequence order; empty where it holds none."""
        return tuple(self._sample_spans(i) for i in range(self.num_samples))

    def _sample_spans(self, sample: int) -> tuple[RowSpan, ...]:
        response = self.response_lengths[sample]
        shift = self.total_lengths[sample] - response - 1  # position that scores response token 0
        spans: list[RowSpan] = []
        for local_row, position, length in self.placement.segments(sample, self.cp_rank):
            first, last = max(position, shift), min(position + length, shift + response)
            if first >= last:
                continue
            span = RowSpan(local_row + first - position, first - shift, last - first)
            if spans and _continues(spans[-1], span):
                span = _joined(spans.pop(), span)
            spans.append(span)
        return tuple(spans)

    @cached_property
    def row_counts(self) -> tuple[int, ...]:
        """Response rows of each sample on this rank."""
        return tuple(sum(span.length for span in spans) for spans in self.spans)

    @property
    def num_rows(self) -> int:
        """R: response rows on this rank."""
        return sum(self.row_counts)

    @cached_property
    def local_rows(self) -> IntArray:
        """int64 `[R]`: the logits row of each response row of this rank, sample by sample."""
        return _indices((s.local_row, s.length) for spans in self.spans for s in spans)

    def response_indices(self, sample: int) -> IntArray:
        """int64: which response tokens of the sample this rank scores, in row order."""
        return _indices((s.response_index, s.length) for s in self.spans[sample])

    def for_rank(self, cp_rank: int) -> RowLayout:
        """The same micro-batch as another CP rank sees it."""
        rank, _ = _check_rank(cp_rank, self.cp_size)
        return RowLayout(
            self.total_lengths,
            self.response_lengths,
            rank,
            self.cp_size,
            self.exact_rows,
            self.placement,
        )

    def check_rows(self, num_rows: int) -> None:
        """Refuse logits that have another number of rows than the layout."""
        fits = num_rows == self.num_local_rows or (
            not self.exact_rows and num_rows > self.num_local_rows
        )
        if not fits:
            raise ReplayError(
                "logits rows do not match the layout",
                expected=f"{'' if self.exact_rows else 'at least '}{self.num_local_rows} rows",
                got=f"{num_rows}",
                consequence=f"{_MISALIGNED} (padding, of each sample or of the stream's end, has "
                "to be declared)",
            )

    # Response values: whole responses <-> this rank's rows

    def split(self, rows: Tensor) -> list[Tensor]:
        """`[R, ...]` values of all this rank's rows to one tensor a sample (views)."""
        self._check_first_dim(rows, self.num_rows, sample=None)
        return list(torch.split(rows, list(self.row_counts)))

    def slice(self, responses: Sequence[Tensor]) -> list[Tensor]:
        """Whole responses `[response_length, ...]` to this rank's rows of each. Differentiable."""
        self._check_samples(responses)
        sliced = []
        for i, (values, spans) in enumerate(zip(responses, self.spans, strict=True)):
            self._check_first_dim(values, self.response_lengths[i], sample=i)
            parts = [values[s.response_index : s.response_index + s.length] for s in spans]
            sliced.append(torch.cat(parts) if parts else values[:0])
        return sliced

    def assemble(self, parts_by_rank: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Every CP rank's rows to whole responses: the inverse of `slice`, in one process.

        Args:
            parts_by_rank: for each CP rank in order, one tensor a sample, as `slice` gives them.
        """
        if len(parts_by_rank) != self.cp_size:
            raise ReplayError(
                "a rank's rows are missing",
                expected=f"the rows of {self.cp_size} context-parallel ranks",
                got=f"{len(parts_by_rank)}",
                consequence="the responses would have holes",
            )
        pieces: list[list[_Piece]] = [[] for _ in range(self.num_samples)]
        for rank, parts in enumerate(parts_by_rank):
            for own, more in zip(pieces, self.for_rank(rank)._pieces(parts), strict=True):
                own.extend(more)
        return [_joined_pieces(own) for own in pieces]

    def gather(
        self, parts: Sequence[Tensor], group: dist.ProcessGroup | None = None
    ) -> list[Tensor]:
        """This rank's rows to whole responses on every rank of the CP group.

        Equivalent to `assemble` of what every rank passes. Differentiable: the objective is the
        sum of the ranks' losses, so the backward sums the ranks' gradients of the gathered values
        before each rank takes its rows.

        The results take part in the graph wherever grad mode is on, also where this rank's parts
        need no gradient: another rank's may, and then all have to enter the backward.

        Args:
            parts: one tensor `[rows of the sample here, ...]` a sample, same trailing shape and
                dtype on every rank.
            group: the CP group; may be None only where `cp_size` is 1.

        Collectives: one SUM all-reduce over `group` in the forward; one in the backward, entered
        by each rank whose loss depends on any of the results, rows or not. None if `cp_size` is 1.
        """
        self._check_group(group)
        wholes = self._spread(parts)
        if group is None or self.cp_size == 1 or not wholes:
            return wholes
        stream: Tensor = _SumOverGroup.apply(  # type: ignore[no-untyped-call]
            torch.cat(wholes), _gradient_anchor(parts), group
        )
        return list(torch.split(stream, list(self.response_lengths)))

    def redistribute(
        self,
        parts: Sequence[Tensor],
        target: RowLayout,
        group: dist.ProcessGroup | None = None,
    ) -> list[Tensor]:
        """This layout's rows to those of `target` (contiguous to zigzag). Differentiable.

        Equivalent to `target.slice(self.gather(parts, group))`, with its collectives.
        """
        same = (self.total_lengths, self.response_lengths, self.cp_rank, self.cp_size)
        if (
            target.total_lengths,
            target.response_lengths,
            target.cp_rank,
            target.cp_size,
        ) != same:
            raise ReplayError(
                "the two layouts do not describe the same micro-batch and rank",
                expected=f"lengths and CP rank {self.cp_rank} of {self.cp_size} of the source",
                got=f"CP rank {target.cp_rank} of {target.cp_size}, or other lengths",
                consequence=_MISALIGNED,
            )
        return target.slice(self.gather(parts, group))

    def _pieces(self, parts: Sequence[Tensor]) -> list[list[_Piece]]:
        """For each sample, this rank's rows by their places in the response.

        Where it holds none, one piece of none of them ties the result to this rank's graph.
        """
        self._check_samples(parts)
        pieces: list[list[_Piece]] = []
        for i, (values, spans) in enumerate(zip(parts, self.spans, strict=True)):
            self._check_first_dim(values, self.row_counts[i], sample=i)
            lengths = [span.length for span in spans] or [0]
            starts = [span.response_index for span in spans] or [0]
            own = torch.split(values, lengths)
            pieces.append([_Piece(a, v) for a, v in zip(starts, own, strict=True)])
        return pieces

    def _spread(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """This rank's rows at their places in whole responses, zeros elsewhere."""
        wholes = []
        for length, own in zip(self.response_lengths, self._pieces(parts), strict=True):
            end, padded = 0, []
            for start, values in own:
                padded.append(_Piece(end, values.new_zeros(start - end, *values.shape[1:])))
                padded.append(_Piece(start, values))
                end = start + values.shape[0]
            padded.append(_Piece(end, own[0].values.new_zeros(length - end, *values.shape[1:])))
            wholes.append(torch.cat([piece.values for piece in padded]))
        return wholes

    def _check_samples(self, values: Sequence[Tensor]) -> None:
        if len(values) != self.num_samples:
            raise ReplayError(
                "wrong number of samples",
                expected=f"{self.num_samples} tensors, one for each sample",
                got=f"{len(values)}",
                consequence="values would be read as another sample's",
            )

    def _check_first_dim(self, values: Tensor, length: int, *, sample: int | None) -> None:
        if values.ndim == 0 or values.shape[0] != length:
            raise ReplayError(
                "wrong number of rows",
                expected=f"{length} rows",
                got=f"shape {tuple(values.shape)}",
                consequence="values would be read as another token's",
                sample=sample,
            )

    def _check_group(self, group: dist.ProcessGroup | None) -> None:
        size = 1 if group is None else dist.get_world_size(group)
        rank = 0 if group is None else dist.get_rank(group)
        if (rank, size) != (self.cp_rank, self.cp_size):
            raise ReplayError(
                "the group is not this layout's context-parallel group",
                expected=f"rank {self.cp_rank} of {self.cp_size}",
                got=f"rank {rank} of {size}" if group is not None else "no group",
                consequence="responses would be put together from the wrong ranks' rows",
            )


class _SumOverGroup(torch.autograd.Function):
    """SUM all-reduce whose adjoint is a SUM all-reduce."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, anchor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None, None


def _gradient_anchor(parts: Sequence[Tensor]) -> Tensor:
    """An input that needs a gradient on every rank.

    A rank whose own rows need none would otherwise record no node and stay out of the backward's
    collective, for which its peers wait.
    """
    return torch.zeros((), device=parts[0].device, requires_grad=True)


def _joined_pieces(pieces: list[_Piece]) -> Tensor:
    # a piece of no tokens comes before the one that starts at its place
    ordered = sorted(pieces, key=lambda piece: (piece.start, piece.values.shape[0]))
    return torch.cat([piece.values for piece in ordered])


def _continues(before: RowSpan, after: RowSpan) -> bool:
    return (
        before.local_row + before.length == after.local_row
        and before.response_index + before.length == after.response_index
    )


def _joined(before: RowSpan, after: RowSpan) -> RowSpan:
    return before._replace(length=before.length + after.length)


def _indices(runs: Iterable[tuple[int, int]]) -> IntArray:
    parts = [np.arange(first, first + length, dtype=np.int64) for first, length in runs]
    indices = np.concatenate([np.zeros(0, np.int64), *parts])
    indices.flags.writeable = False
    return indices


def _starts(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple([0, *np.cumsum(lengths).tolist()][: len(lengths)])


def _chunked(
    lengths: tuple[int, ...], num_chunks: int, held: tuple[tuple[int, ...], ...]
) -> _Chunks:
    sizes = tuple(-(-length // num_chunks) for length in lengths)
    per_rank = tuple(size * len(held[0]) for size in sizes)
    return _Chunks(sizes, _starts(per_rank), held, sum(per_rank))


# Checks


def _lengths(values: Sequence[int], name: str) -> tuple[int, ...]:
    try:
        return tuple(integer_array(values, name).tolist())
    except ReplayError as error:  # a place in this list is a sample
        raise error.blamed_on(error.row) from None


def _check_lengths(
    total_lengths: Sequence[int], response_lengths: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    total = _lengths(total_lengths, "total_lengths")
    response = _lengths(response_lengths, "response_lengths")
    _check_one_each(len(response), len(total), "response_lengths")
    for i, (whole, part) in enumerate(zip(total, response, strict=True)):
        if not 0 <= part < whole:
            raise ReplayError(
                "response length does not fit its sample",
                expected=f"0 <= response length < total length {whole} (a prompt has a token)",
                got=f"{part}",
                consequence="the first response token would have no logits row to score it",
                sample=i,
            )
    return total, response


def _check_one_each(count: int, samples: int, name: str) -> None:
    if count != samples:
        raise ReplayError(
            f"{name} does not have one entry for each sample",
            expected=f"{samples}",
            got=f"{count}",
            consequence="samples would be scored with each other's lengths",
        )


def _check_padded(
    padded_lengths: Sequence[int] | None, total: tuple[int, ...], *, multiple_of: int
) -> tuple[int, ...]:
    """Padded lengths; by default the total lengths rounded up to a multiple."""
    if padded_lengths is None:
        return tuple(-(-length // multiple_of) * multiple_of for length in total)
    padded = _lengths(padded_lengths, "padded_lengths")
    _check_one_each(len(padded), len(total), "padded_lengths")
    for i, (length, needed) in enumerate(zip(padded, total, strict=True)):
        if length < needed or length % multiple_of:
            raise ReplayError(
                "padded length does not fit its sample",
                expected=f"at least {needed}, a multiple of {multiple_of}",
                got=f"{length}",
                consequence=_MISALIGNED,
                sample=i,
            )
    return padded


def _check_max_seq_len(max_seq_len: int, lengths: tuple[int, ...]) -> int:
    width = check_count(max_seq_len, "max_seq_len")
    for i, length in enumerate(lengths):
        if length > width:
            raise ReplayError(
                "sample longer than max_seq_len",
                expected=f"at most {width} tokens",
                got=f"{length}",
                consequence="its last tokens would be scored by the next sample's rows",
                sample=i,
            )
    return width


def _check_stream(stream_length: int | None, tokens: int, cp_size: int) -> int:
    if stream_length is None:
        return -(-tokens // cp_size) * cp_size
    length = check_count(stream_length, "stream_length")
    if length < tokens or length % cp_size:
        raise ReplayError(
            "stream length does not fit the samples",
            expected=f"at least {tokens} rows, a multiple of {cp_size}",
            got=f"{length}",
            consequence=_MISALIGNED,
        )
    return length


def _check_rank(cp_rank: int, cp_size: int) -> tuple[int, int]:
    rank, size = check_count(cp_rank, "cp_rank"), check_count(cp_size, "cp_size")
    if rank >= size:
        raise ReplayError(
            "no such context-parallel rank",
            expected=f"a rank in [0, {size})",
            got=f"{rank}",
            consequence="rows of no rank would be scored",
        )
    return rank, size
