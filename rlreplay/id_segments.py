"""Support ids sorted by column, for sums over all rows that name a column.

Shapes: `N` support ids, `U` distinct columns among them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from rlreplay.sampling_mask import IntArray

PIECE = 128
"""Entries of one column that one program sums: a column of many entries is cut into pieces."""


@dataclass(frozen=True, eq=False)
class IdSegments:
    """The order of the entries by column, cut into pieces of at most `PIECE` entries of a column.

    Attributes:
        order: int64 `[N]`, positions in the ids; by column, then as they stood (so by row).
        columns: int64 `[U]`, the distinct columns, ascending.
        starts: int64 `[U + 1]`, where each column's entries begin in `order`.
        piece_starts: int64 `[P + 1]`, where each piece begins in `order`.
        piece_columns: int64 `[P]`, the column of each piece.
        piece_slots: int64 `[P]`, the place among the partial sums of a piece whose column has
            several, -1 for a column's only one.
        split_columns: int64 `[M]`, the columns of several pieces.
        split_starts: int64 `[M + 1]`, where the partial sums of each begin.
        host_split_starts: the same in host memory.
        host_split_pieces: int64 `[M + 1]`, the first piece of each, and P; in host memory.
    """

    order: Int[Tensor, " N"]
    columns: Int[Tensor, " U"]
    starts: Int[Tensor, " U+1"]
    piece_starts: Int[Tensor, " P+1"]
    piece_columns: Int[Tensor, " P"]
    piece_slots: Int[Tensor, " P"]
    split_columns: Int[Tensor, " M"]
    split_starts: Int[Tensor, " M+1"]
    host_split_starts: IntArray
    host_split_pieces: IntArray

    @functools.cached_property
    def host_starts(self) -> IntArray:
        """`starts` in host memory; on a GPU the host waits for it, once."""
        return self.starts.cpu().numpy()

    def batches(self, most_partials: int) -> Iterator[tuple[slice, slice, slice]]:
        """Runs of pieces, the columns of several pieces in them, and their slots; without a sync.

        All pieces, in order; no column is cut, and the columns of a run have no more than
        `most_partials` partial sums, but where one alone has more.
        """
        starts, count = self.host_split_starts, len(self.host_split_starts) - 1
        column = piece = 0
        while piece < self.piece_columns.numel():
            fitting = np.searchsorted(starts, starts[column] + most_partials, side="right") - 1
            end = min(count, max(column + 1, int(fitting)))
            end_piece = int(self.host_split_pieces[end])
            yield (
                slice(piece, end_piece),
                slice(column, end),
                slice(int(starts[column]), int(starts[end])),
            )
            column, piece = end, end_piece

    @classmethod
    def of(cls, ids: Int[Tensor, " N"]) -> IdSegments:
        """A stable sort and a few passes over the ids; on a GPU the host waits for their counts."""
        sorted_ids, order = torch.sort(ids, stable=True)
        columns, counts = torch.unique_consecutive(sorted_ids, return_counts=True)
        columns = columns.long()
        starts = _offsets(counts)
        pieces = (counts + PIECE - 1) // PIECE
        of_piece = torch.repeat_interleave(pieces)
        first = _offsets(pieces)
        within = torch.arange(of_piece.numel(), device=ids.device) - first[of_piece]
        piece_starts = torch.cat([starts[of_piece] + within * PIECE, starts[-1:]])
        several = pieces > 1
        in_several = several[of_piece]
        slots = torch.where(in_several, in_several.cumsum(0) - 1, -1)
        split_starts = _offsets(pieces[several])
        split_pieces = torch.cat([first[:-1][several], first[-1:]])
        host = torch.stack([split_starts, split_pieces]).cpu().numpy()
        return cls(
            order,
            columns,
            starts,
            piece_starts,
            columns[of_piece],
            slots,
            columns[several],
            split_starts,
            host[0],
            host[1],
        )


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
