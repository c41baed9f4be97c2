"""The portable backend: torch operations on row chunks that fit in the cache.

Shapes: `T` logits rows and `V` columns of this shard, `R` response rows, `N` support ids on this
shard. Works on any device and type; float64 in, float64 through. It makes no dense mask and no
copy of the logits: extra memory is a few chunks and a few numbers a row and an id.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlreplay.kernels.rows import (
    UNDERFLOW,
    GradientCoefficients,
    GradientTerm,
    RowStats,
    accumulator,
)
from rlreplay.plan import ReplayPlan
from rlreplay.sampling_mask import BoolArray

# One buffer of a chunk. On the CPU two of them share a core's L2 cache with the logits they come
# from; elsewhere they only bound the memory.
_CHUNK_BYTES = {"cpu": 1 << 19}
_CHUNK_BYTES_ELSEWHERE = 1 << 26

Temperature = float | Float[Tensor, " R"]


def support_stats(
    logits: Float[Tensor, "T V"],
    plan: ReplayPlan,
    temperature: Temperature,
    weighted: bool,
) -> tuple[RowStats, Float[Tensor, " R"]]:
    """Statistics of each row over its support on this shard, and its target's x (0 if elsewhere).

    Reads N logits. An unrestricted row gives those of its sampled token alone.
    """
    row_of_id = plan.row_of_id()
    x = _support_logits(logits, plan, row_of_id, temperature)
    maximum = _segments(x, plan, "max")
    shifted = (x - _finite(maximum)[row_of_id]).clamp_min_(UNDERFLOW)
    weights = shifted.exp()
    stats = RowStats(
        maximum,
        _segments(weights, plan, "sum"),
        _segments(weights.mul_(shifted), plan, "sum") if weighted else None,
    )
    return stats, _target_logits(x, plan)


def full_stats(
    logits: Float[Tensor, "T V"],
    plan: ReplayPlan,
    temperature: Temperature,
    weighted: bool,
    rows: BoolArray | None,
) -> RowStats:
    """Statistics of rows over all valid columns of this shard: one read of each row.

    Args:
        rows: host bool `[R]`, which rows to read; None for all. The others get those of no
            columns.
    """
    dtype = accumulator(logits.dtype)
    maximum = logits.new_full((plan.num_rows,), -torch.inf, dtype=dtype)
    total = torch.zeros_like(maximum)
    moment = torch.zeros_like(maximum) if weighted else None
    if plan.shard.valid == 0:
        return RowStats(maximum, total, moment)
    for first, last, x in _row_chunks(logits, plan, temperature, rows):
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
    dense_rows: BoolArray,
) -> Float[Tensor, "T V"]:
    """The gradient of the logits, in their type, rounded once.

    Args:
        dense_rows: host bool `[R]`, the rows whose dense term is not zero.
    """
    row_of_id = plan.row_of_id()
    x_support = _support_logits(logits, plan, row_of_id, temperature)
    values = _term(x_support, coefficients.support.at(row_of_id))
    values = _add_at_targets(values, plan, coefficients.target)
    columns = plan.ids.long()

    if dense_rows.all():
        gradient = _zeros_but_for_rows(logits, plan)
    else:
        gradient = torch.zeros_like(logits, memory_format=torch.contiguous_format)
        gradient.index_put_((plan.rows[row_of_id], columns), values.to(gradient.dtype))
    if coefficients.dense is None:
        return gradient
    for first, last, x in _row_chunks(logits, plan, temperature, dense_rows):
        dense = _term(x, coefficients.dense.at((slice(first, last), None)))
        a, b = int(plan.host_offsets[first]), int(plan.host_offsets[last])
        where = (row_of_id[a:b] - first, columns[a:b])
        dense.index_put_(where, dense[where] + values[a:b])
        _write_rows(gradient, plan, first, last, dense)
    return gradient


def _term(x: Tensor, term: GradientTerm) -> Tensor:
    """The gradient term at x, as a new tensor."""
    shifted = (x - term.shift).clamp_min_(UNDERFLOW)
    weights = shifted.exp()
    if term.slope is None:
        return weights.mul_(term.constant)
    return weights.mul_(shifted.mul_(term.slope).add_(term.constant))


def _support_logits(
    logits: Tensor, plan: ReplayPlan, row_of_id: Tensor, temperature: Temperature
) -> Tensor:
    x = logits[plan.rows[row_of_id], plan.ids.long()].to(accumulator(logits.dtype))
    return _scaled(x, temperature[row_of_id] if isinstance(temperature, Tensor) else temperature)


def _scaled(x: Tensor, temperature: float | Tensor) -> Tensor:
    if isinstance(temperature, float) and temperature == 1.0:
        return x
    return x / temperature


def _segments(values: Tensor, plan: ReplayPlan, reduce: str) -> Tensor:
    """`[R]`: max (-inf over nothing) or sum (0 over nothing) of each row's values, in order."""
    # unsafe spares the sync that checks the offsets, which the plan has built itself
    reduced: Tensor = torch.segment_reduce(
        values,
        reduce,
        offsets=plan.offsets,
        unsafe=True,
        initial=-torch.inf if reduce == "max" else 0.0,
    )
    return reduced


def _finite(maximum: Tensor) -> Tensor:
    """A shift for exponents: rows over nothing, or over -inf alone, are not shifted."""
    return torch.where(maximum == -torch.inf, 0.0, maximum)


def _target_slots(values: Tensor, plan: ReplayPlan) -> tuple[Tensor, Tensor]:
    """Values with a slot past the end, and for each row the slot of its target.

    The extra slot is that of the targets that lie on another shard.
    """
    slots = torch.where(plan.targets >= 0, plan.targets, plan.num_ids)
    return torch.cat([values, values.new_zeros(1)]), slots


def _target_logits(x: Tensor, plan: ReplayPlan) -> Tensor:
    padded, slots = _target_slots(x, plan)
    return padded[slots]


def _add_at_targets(values: Tensor, plan: ReplayPlan, amounts: Tensor) -> Tensor:
    padded, slots = _target_slots(values, plan)
    return padded.index_put_((slots,), padded[slots] + amounts)[: plan.num_ids]


def _row_chunks(
    logits: Tensor, plan: ReplayPlan, temperature: Temperature, rows: BoolArray | None
) -> Iterator[tuple[int, int, Tensor]]:
    """Chunks (first, last, x) of response rows [first, last), x `[rows, valid columns]`.

    x is not to be written to: it may be a view of the logits. A lone row comes beside a copy of
    itself: torch reduces one row in another order than several, and a row's scores shall not
    depend on the rows around it.
    """
    columns = logits[:, : plan.shard.valid]
    dtype = accumulator(logits.dtype)
    budget = _CHUNK_BYTES.get(logits.device.type, _CHUNK_BYTES_ELSEWHERE)
    size = max(2, budget // max(1, plan.shard.valid * dtype.itemsize))
    for first, last in _chunk_bounds(plan.num_rows, rows, size):
        start, end = int(plan.host_rows[first]), int(plan.host_rows[last - 1])
        if first + 1 == last:
            x = columns[start : start + 1].expand(2, -1).contiguous()
        elif end - start == last - 1 - first:  # rows ascend, so these are consecutive
            x = columns[start : end + 1]
        else:
            x = columns.index_select(0, plan.rows[first:last])
        by_row = temperature[first:last, None] if isinstance(temperature, Tensor) else temperature
        yield first, last, _scaled(x.to(dtype), by_row)


def _chunk_bounds(num_rows: int, rows: BoolArray | None, size: int) -> Iterator[tuple[int, int]]:
    """Runs of the wanted rows, cut evenly into chunks of about `size`, none of one row but runs
    of one."""
    if rows is None:
        rows = np.ones(num_rows, dtype=np.bool_)
    for first, last in _runs(rows):
        count = last - first
        chunks = max(1, min(-(-count // size), count // 2))
        bounds = [first + count * c // chunks for c in range(chunks + 1)]
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
