"""The portable backend: torch operations on row chunks that fit in the cache.

Shapes: `T` logits rows and `V` columns of this shard, `R` response rows, `N` support ids on this
shard. Works on any device and type; float64 in, float64 through. It makes no dense mask and no
copy of the logits: extra memory is a few chunks and a few numbers a row and an id.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlreplay.kernels.rows import (
    UNDERFLOW,
    GradientCoefficients,
    GradientTerm,
    RowStats,
    Temperature,
    accumulator,
)
from rlreplay.plan import ReplayPlan
from rlreplay.sampling_mask import BoolArray

# One buffer of a chunk. On the CPU two of them share a core's L2 cache with the logits they come
# from; elsewhere they only bound the memory.
_CHUNK_BYTES = {"cpu": 1 << 19}
_CHUNK_BYTES_ELSEWHERE = 1 << 26
_CHUNK_IDS = 1 << 20  # support ids gathered at a time; about 50 bytes each


def support_stats(
    logits: Float[Tensor, "T V"],
    plan: ReplayPlan,
    temperature: Temperature,
    weighted: bool,
) -> tuple[RowStats, Float[Tensor, " R"]]:
    """Statistics of each row over its support on this shard, and its target's x (0 if elsewhere).

    Reads N logits. An unrestricted row gives those of its sampled token alone.
    """
    dtype = accumulator(logits.dtype)
    maximum = torch.empty(plan.num_rows, dtype=dtype, device=logits.device)
    total, target = torch.empty_like(maximum), torch.empty_like(maximum)
    moment = torch.empty_like(maximum) if weighted else None
    for part in _id_chunks(plan):
        x = _support_logits(logits, plan, part, temperature)
        top = part.reduced(x, "max")
        shifted = (x - _finite(top)[part.row_of_id]).clamp_min_(UNDERFLOW)
        weights = shifted.exp()
        maximum[part.rows] = top
        total[part.rows] = part.reduced(weights, "sum")
        target[part.rows] = part.at_targets(x)
        if moment is not None:
            moment[part.rows] = part.reduced(weights.mul_(shifted), "sum")
    return RowStats(maximum, total, moment), target


def full_stats(
    logits: Float[Tensor, "T V"],
    plan: ReplayPlan,
    temperature: Temperature,
    weighted: bool,
    rows: BoolArray | None,
    floor: Float[Tensor, " R"],
) -> RowStats:
    """Statistics of rows over all valid columns of this shard: one read of each row.

    Args:
        rows: host bool `[R]`, which rows to read; None for all. The others get those of no
            columns.
        floor: the maximum over some columns, which a backend may use as a hint; not this one.
    """
    dtype = accumulator(logits.dtype)
    maximum = logits.new_full((plan.num_rows,), -torch.inf, dtype=dtype)
    total = torch.zeros_like(maximum)
    moment = torch.zeros_like(maximum) if weighted else None
    if plan.shard.valid == 0:
        return RowStats(maximum, total, moment)
    for first, last, x in _row_chunks(logits, plan, temperature, rows, slice(0, plan.num_rows)):
        count = last - first
        top = x.amax(dim=1)
        shifted = (x - _finite(top)[:, None]).clamp_min_(UNDERFLOW)
        weights = shifted.exp()
        maximum[first:last] = top[:count]
        total[first:last] = weights.sum(dim=1)[:count]
        if moment is not None:
            moment[first:last] = weights.mul_(shifted).sum(dim=1)[:count]
    return RowStats(maximum, total, moment)


def logits_gradient(
    logits: Float[Tensor, "T V"],
    plan: ReplayPlan,
    temperature: Temperature,
    coefficients: GradientCoefficients,
    rows: BoolArray | None,
    out: Float[Tensor, "T V"] | None = None,
) -> Float[Tensor, "T V"]:
    """The gradient of the logits, in their type, rounded once.

    Args:
        rows: host bool `[R]`, which rows have a dense term; None for all.
        out: None; this backend writes to memory of its own.
    """
    assert out is None
    on_support, dense_term = _Line.of(coefficients.support), _Line.of(coefficients.dense)
    whole = rows is None or bool(rows.all())
    if whole:
        gradient = _zeros_but_for_rows(logits, plan)
    else:
        gradient = torch.zeros_like(logits, memory_format=torch.contiguous_format)
    for part in _id_chunks(plan):
        x = _support_logits(logits, plan, part, temperature)
        if on_support is None:
            values = torch.zeros_like(x)
        else:
            values = on_support.at(part.rows).at(part.row_of_id).gradient(x)
        values = part.added_at_targets(values, coefficients.target[part.rows])
        columns = part.ids.long()
        if not whole:
            where = (plan.rows[part.rows][part.row_of_id], columns)
            gradient.index_put_(where, values.to(gradient.dtype))
        if dense_term is None:
            continue
        chunks = _row_chunks(logits, plan, temperature, rows, part.rows)
        for first, last, chunk in chunks:
            dense = dense_term.at((slice(first, last), None)).gradient(chunk)
            a, b = part.id_range(plan, first, last)
            where = (part.row_of_id[a:b] - (first - part.rows.start), columns[a:b])
            # ids are unique in a row, so nothing is added twice
            dense.index_put_(where, dense[where] + values[a:b])
            _write_rows(gradient, plan, first, last, dense)
    return gradient


class _Line(NamedTuple):
    """Minus a `GradientTerm` as exp(d) * (constant + slope * d): one operation less an entry."""

    shift: Tensor
    constant: Tensor
    slope: Tensor | None

    @classmethod
    def of(cls, term: GradientTerm | None) -> _Line | None:
        if term is None:
            return None
        constant = torch.zeros_like(term.shift) if term.constant is None else term.constant
        if term.slope is None or term.mean is None:
            return cls(term.shift, -constant, None)
        return cls(term.shift, term.slope * term.mean - constant, -term.slope)

    def at(self, index: Any) -> _Line:
        """The coefficients of some rows; `index` is what a tensor of rows takes."""
        slope = None if self.slope is None else self.slope[index]
        return _Line(self.shift[index], self.constant[index], slope)

    def gradient(self, x: Tensor) -> Tensor:
        """The values at x, as a new tensor."""
        shifted = (x - self.shift).clamp_min_(UNDERFLOW)
        weights = shifted.exp()
        if self.slope is None:
            return weights.mul_(self.constant)
        return weights.mul_(shifted.mul_(self.slope).add_(self.constant))


class _Ids(NamedTuple):
    """The support ids of consecutive response rows, m in number."""

    rows: slice
    ids: Int[Tensor, " m"]
    row_of_id: Int[Tensor, " m"]
    """counted from the first of the rows"""
    offsets: Int[Tensor, " rows+1"]
    targets: Int[Tensor, " rows"]
    """position among the m ids; m where the target lies on another shard"""

    def reduced(self, values: Tensor, reduce: str) -> Tensor:
        """`[rows]`: max (-inf over nothing) or sum (0 over nothing) of each row's values.

        Sums run in float64, since they run serially: in float32 a support of a whole vocabulary
        would lose two digits.
        """
        wide = values.double() if reduce == "sum" else values
        # unsafe spares the sync that checks the offsets, which the plan has built itself
        result: Tensor = torch.segment_reduce(
            wide,
            reduce,
            offsets=self.offsets,
            unsafe=True,
            initial=-torch.inf if reduce == "max" else 0.0,
        )
        return result.to(values.dtype)

    def at_targets(self, values: Tensor) -> Tensor:
        """`[rows]`: each row's value at its target, 0 where that is on another shard."""
        return torch.cat([values, values.new_zeros(1)])[self.targets]

    def added_at_targets(self, values: Tensor, amounts: Tensor) -> Tensor:
        """The values with each row's amount added at its target."""
        padded = torch.cat([values, values.new_zeros(1)])  # others' targets go past the end
        return padded.index_put_((self.targets,), padded[self.targets] + amounts)[:-1]

    def id_range(self, plan: ReplayPlan, first: int, last: int) -> tuple[int, int]:
        """Where the ids of rows [first, last) stand among these."""
        start = int(plan.host_offsets[self.rows.start])
        return int(plan.host_offsets[first]) - start, int(plan.host_offsets[last]) - start


def _id_chunks(plan: ReplayPlan) -> Iterator[_Ids]:
    """The plan's support ids, by runs of rows with a bounded number of ids (or one row)."""
    first = 0
    while first < plan.num_rows:
        a = int(plan.host_offsets[first])
        last = int(np.searchsorted(plan.host_offsets, a + _CHUNK_IDS, side="right")) - 1
        last = min(plan.num_rows, max(first + 1, last))
        b = int(plan.host_offsets[last])
        offsets = plan.offsets[first : last + 1] - a
        targets = plan.targets[first:last]
        rows = torch.arange(last - first, device=plan.device)
        yield _Ids(
            slice(first, last),
            plan.ids[a:b],
            # output_size spares the sync that counts the ids
            torch.repeat_interleave(rows, offsets.diff(), output_size=b - a),
            offsets,
            torch.where(targets >= 0, targets - a, b - a),
        )
        first = last


def _support_logits(
    logits: Tensor, plan: ReplayPlan, part: _Ids, temperature: Temperature
) -> Tensor:
    rows = plan.rows[part.rows][part.row_of_id]
    x = logits[rows, part.ids.long()].to(accumulator(logits.dtype))
    if isinstance(temperature, Tensor):
        return x / temperature[part.rows][part.row_of_id]
    return _scaled(x, temperature)


def _scaled(x: Tensor, temperature: float | Tensor) -> Tensor:
    if isinstance(temperature, float) and temperature == 1.0:
        return x
    return x / temperature


def _finite(maximum: Tensor) -> Tensor:
    """A shift for exponents: rows over nothing, or over -inf alone, are not shifted."""
    return torch.where(maximum == -torch.inf, 0.0, maximum)


def _row_chunks(
    logits: Tensor,
    plan: ReplayPlan,
    temperature: Temperature,
    wanted: BoolArray | None,
    among: slice,
) -> Iterator[tuple[int, int, Tensor]]:
    """Chunks (first, last, x) of response rows [first, last), x `[rows, valid columns]`.

    All rows of `among` that `wanted` names (None: all), in runs.

    x is not to be written to: it may be a view of the logits. A lone row comes beside a copy of
    itself: torch reduces one row in another order than several, and a row's scores shall not
    depend on the rows around it.
    """
    columns = logits[:, : plan.shard.valid]
    dtype = accumulator(logits.dtype)
    budget = _CHUNK_BYTES.get(logits.device.type, _CHUNK_BYTES_ELSEWHERE)
    size = max(2, budget // max(1, plan.shard.valid * dtype.itemsize))
    if wanted is None:
        wanted = np.ones(plan.num_rows, dtype=np.bool_)
    for first, last in _chunk_bounds(wanted, among, size):
        start, end = int(plan.host_rows[first]), int(plan.host_rows[last - 1])
        if first + 1 == last:
            x = columns[start : start + 1].expand(2, -1).contiguous()
        elif end - start == last - 1 - first:  # rows ascend, so these are consecutive
            x = columns[start : end + 1]
        else:
            x = columns.index_select(0, plan.rows[first:last])
        by_row = temperature[first:last, None] if isinstance(temperature, Tensor) else temperature
        yield first, last, _scaled(x.to(dtype), by_row)


def _chunk_bounds(wanted: BoolArray, among: slice, size: int) -> Iterator[tuple[int, int]]:
    """Runs of the wanted rows, cut evenly into chunks of about `size`, none of one row but runs
    of one."""
    for first, last in _runs(wanted[among]):
        count = last - first
        chunks = max(1, min(-(-count // size), count // 2))
        bounds = [among.start + first + count * c // chunks for c in range(chunks + 1)]
        yield from itertools.pairwise(bounds)


def _zeros_but_for_rows(logits: Tensor, plan: ReplayPlan) -> Tensor:
    """A gradient that is zero wherever the rows' valid columns, still unwritten, are not."""
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    gradient[:, plan.shard.valid :].zero_()
    unscored = np.ones(logits.shape[0], dtype=np.bool_)
    unscored[plan.host_rows] = False
    for first, last in _runs(unscored):
        gradient[first:last].zero_()
    return gradient


def _runs(wanted: BoolArray) -> list[list[int]]:
    """[first, last) of each run of true entries."""
    runs: list[list[int]] = (
        np.flatnonzero(np.diff(wanted, prepend=False, append=False)).reshape(-1, 2).tolist()
    )
    return runs


def _write_rows(gradient: Tensor, plan: ReplayPlan, first: int, last: int, values: Tensor) -> None:
    """Round the rows of a chunk into the gradient."""
    start, end = int(plan.host_rows[first]), int(plan.host_rows[last - 1])
    valid = plan.shard.valid
    if end - start == last - 1 - first:
        gradient[start : end + 1, :valid] = values[: last - first]
    else:
        gradient[:, :valid].index_copy_(0, plan.rows[first:last], values.to(gradient.dtype))
