"""The CUDA backend: Triton kernels that read each logit once and write each gradient once.

The same three functions as in `torch_scores`, with the same meaning. Shapes: `T` logits rows and
`V` columns of this shard, `R` response rows, `N` support ids on this shard; e bytes a logit.

| kernel | bytes moved | a row's sums |
|---|---|---|
| `_support_kernel` | 36 N: an id, a 32-byte sector of logits | lanes over the ids, then a tree |
| `_full_kernel` | e R V | lanes over the columns, then a tree |
| `_dense_gradient_kernel` | e (R + T) V: scored rows are read, all are written | |
| `_support_gradient_kernel` | 68 N: an id, a sector read, a sector written | |
| `_scatter_kernel` | (36 + e) N, for the in-place backward | |

No atomics, and a row's work is cut up by V alone: the results are the same bit for bit from run to
run and whatever other rows are in the call. Offsets into the logits are 64-bit. Arithmetic is in
float32 (float64 for float64), temperature included; the trees, and lanes where one term can be far
above the others, sum in float64. The compiler may not fuse multiplications with
additions (`enable_fp_fusion=False`): x = logit * (1 / temperature) has to be the same number in
every kernel, so that a lone id's log-prob and gradient are exactly 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from rlreplay.kernels.rows import GradientCoefficients, RowStats, Temperature, accumulator
from rlreplay.plan import ReplayPlan
from rlreplay.sampling_mask import BoolArray

# Fixed: the order of a row's sums shall not depend on the batch.
_SUPPORT_BLOCK, _SUPPORT_WARPS = 512, 4


def support_stats(
    logits: Float[Tensor, "T V"], plan: ReplayPlan, temperature: Temperature, weighted: bool
) -> tuple[RowStats, Float[Tensor, " R"]]:
    """As `torch_scores.support_stats`: O(N), one small program a row."""
    stats, target = _new_stats(logits, plan, weighted)
    if plan.num_rows:
        _support_kernel[(plan.num_rows,)](
            logits,
            logits.stride(0),
            plan.rows,
            plan.offsets,
            plan.ids,
            plan.targets,
            *_inverse_temperature(temperature, stats.maximum),
            stats.maximum,
            stats.total,
            stats.weighted,
            target,
            PER_ROW=_per_row(temperature, stats.maximum),
            WEIGHTED=weighted,
            BLOCK=_SUPPORT_BLOCK,
            num_warps=_SUPPORT_WARPS,
            enable_fp_fusion=False,
        )
    return stats, target


def full_stats(
    logits: Float[Tensor, "T V"],
    plan: ReplayPlan,
    temperature: Temperature,
    weighted: bool,
    rows: BoolArray | None,
    floor: Float[Tensor, " R"],
) -> RowStats:
    """As `torch_scores.full_stats`: one read of a row, one program a row.

    Args:
        rows: None for all rows; otherwise exactly the unrestricted ones are read.
        floor: the maxima over the supports, where the rows' maxima nearly always are.
    """
    stats, _ = _new_stats(logits, plan, weighted)
    if plan.num_rows == 0:
        return stats
    block, warps, stages = _full_configuration(logits)
    _full_kernel[(plan.num_rows,)](
        logits,
        logits.stride(0),
        plan.shard.valid,
        plan.rows,
        plan.unrestricted,
        floor,
        *_inverse_temperature(temperature, stats.maximum),
        stats.maximum,
        stats.total,
        stats.weighted,
        PER_ROW=_per_row(temperature, stats.maximum),
        ALL_ROWS=rows is None,
        WEIGHTED=weighted,
        BLOCK=block,
        STAGES=stages,
        num_warps=warps,
        enable_fp_fusion=False,
    )
    return stats


def logits_gradient(
    logits: Float[Tensor, "T V"],
    plan: ReplayPlan,
    temperature: Temperature,
    coefficients: GradientCoefficients,
    rows: BoolArray | None,
    out: Float[Tensor, "T V"] | None = None,
) -> Float[Tensor, "T V"]:
    """As `torch_scores.logits_gradient`, into `out` where given, which may be `logits`.

    The dense term of all rows is written (a zero fill where there is none), and the support's
    entries over it. Where that overwrites the logits, these entries are computed before.

    Args:
        rows: None for all, or exactly the unrestricted ones.
    """
    arguments = (logits, plan, temperature, coefficients, rows)
    values = None
    if out is not None:
        values = torch.empty(plan.num_ids, dtype=logits.dtype, device=logits.device)
        _write_support(*arguments, values)
    if coefficients.dense is not None:
        gradient = torch.empty_like(logits, memory_format=_CONTIGUOUS) if out is None else out
        _write_dense(*arguments, gradient)
    elif out is None:
        gradient = torch.zeros_like(logits, memory_format=_CONTIGUOUS)
    else:
        gradient = out.zero_()
    if values is None:
        _write_support(*arguments, gradient)
    elif plan.num_ids:
        _scatter_kernel[(plan.num_rows,)](
            gradient,
            gradient.stride(0),
            plan.rows,
            plan.offsets,
            plan.ids,
            values,
            BLOCK=_SUPPORT_BLOCK,
            num_warps=_SUPPORT_WARPS,
        )
    return gradient


_CONTIGUOUS = torch.contiguous_format


def _write_support(
    logits: Tensor,
    plan: ReplayPlan,
    temperature: Temperature,
    coefficients: GradientCoefficients,
    rows: BoolArray | None,
    out: Tensor,
) -> None:
    """The whole gradient at the support's entries: `[N]`, or to its places in a gradient."""
    if plan.num_ids == 0:
        return
    support, dense = coefficients.support, coefficients.dense
    _support_gradient_kernel[(plan.num_rows,)](
        logits,
        logits.stride(0),
        out,
        out.stride(0),
        plan.rows,
        plan.offsets,
        plan.ids,
        plan.targets,
        plan.unrestricted,
        *_inverse_temperature(temperature, coefficients.target),
        *(support or _NO_TERM),
        *(dense or _NO_TERM),
        coefficients.target,
        PER_ROW=_per_row(temperature, coefficients.target),
        TO_ROWS=out.dim() == 2,
        ALL_DENSE=rows is None,
        HAS_SUPPORT=support is not None,
        HAS_DENSE=dense is not None,
        BLOCK=_SUPPORT_BLOCK,
        num_warps=_SUPPORT_WARPS,
        enable_fp_fusion=False,
    )


_NO_TERM = (None, None, None, None)


def _write_dense(
    logits: Tensor,
    plan: ReplayPlan,
    temperature: Temperature,
    coefficients: GradientCoefficients,
    rows: BoolArray | None,
    gradient: Tensor,
) -> None:
    """The dense term of every row that has one, zeros in the others and past the vocabulary."""
    dense = coefficients.dense
    assert dense is not None
    num_rows, columns = logits.shape
    block, warps = _gradient_configuration(logits)
    blocks = triton.cdiv(columns, block)
    if num_rows * blocks == 0:
        return
    _dense_gradient_kernel[(num_rows * blocks,)](
        logits,
        logits.stride(0),
        gradient,
        gradient.stride(0),
        columns,
        plan.shard.valid,
        blocks,
        plan.response_rows,
        plan.response_rows.numel(),
        plan.unrestricted,
        *_inverse_temperature(temperature, dense.shift),
        *dense,
        PER_ROW=_per_row(temperature, dense.shift),
        ALL_DENSE=rows is None,
        BLOCK=block,
        num_warps=warps,
        enable_fp_fusion=False,
    )


def _new_stats(logits: Tensor, plan: ReplayPlan, weighted: bool) -> tuple[RowStats, Tensor]:
    """Memory for a row's statistics and its target, in one piece."""
    shape = (4 if weighted else 3, plan.num_rows)
    memory = torch.empty(shape, dtype=accumulator(logits.dtype), device=logits.device)
    maximum, total, target, *rest = memory.unbind()
    return RowStats(maximum, total, rest[0] if rest else None), target


def _per_row(temperature: Temperature, like: Tensor) -> bool:
    # a scalar argument of a kernel is a float32
    return isinstance(temperature, Tensor) or like.dtype == torch.float64


def _inverse_temperature(temperature: Temperature, like: Tensor) -> tuple[Tensor | None, float]:
    """1 / temperature as a tensor `[R]`, or None and a number."""
    if isinstance(temperature, Tensor):
        return temperature.reciprocal(), 1.0
    if _per_row(temperature, like):
        return torch.full_like(like, 1 / temperature), 1.0
    return None, 1 / temperature


def _full_configuration(logits: Tensor) -> tuple[int, int, int]:
    """Block, warps and pipeline stages of `_full_kernel`, by shape and type alone."""
    block = min(4096, max(256, triton.next_power_of_2(logits.shape[1])))
    return block, max(1, block // 512), 3 if logits.dtype.itemsize >= 4 else 4


def _gradient_configuration(logits: Tensor) -> tuple[int, int]:
    """Block and warps of `_dense_gradient_kernel`, by shape and type alone."""
    block = min(2048, max(256, triton.next_power_of_2(logits.shape[1])))
    return block, max(1, block // 512)


@triton.jit
def _load_inverse_temperature(per_row, scalar, r, PER_ROW: tl.constexpr):
    if PER_ROW:
        return tl.load(per_row + r)
    else:
        return scalar


@triton.jit
def _exp(d, EXACT: tl.constexpr):
    """exp(d). The rounding of d log2(e) is made good where the logits are exact enough to show it.

    16-bit logits are not, and there the three operations more would cost bandwidth.
    """
    # not globals, which are compared again at every launch
    LOG2_E: tl.constexpr = 1.4426950408889634
    LOG2_E_LOW: tl.constexpr = 1.9259629911266175e-08  # log2(e) less its nearest float32
    LN_2: tl.constexpr = 0.6931471805599453
    if EXACT:
        d = tl.where(d < -1000.0, -1000.0, d)  # -inf would make the correction NaN
        exponent = d * LOG2_E
        missing = tl.fma(d, tl.full(d.shape, LOG2_E, d.dtype), -exponent) + d * LOG2_E_LOW
        value = tl.exp2(exponent)
        return value + value * (missing * LN_2)
    else:
        return tl.exp2(d * LOG2_E)


@triton.jit
def _finite(d):
    """d, or where that is -inf an exponent whose exp is exactly 0: 0 * -inf would be NaN."""
    return tl.maximum(d, -1000.0)


@triton.jit
def _support_kernel(
    logits,
    stride,
    rows,
    offsets,
    ids,
    targets,
    inverse_temperatures,
    inverse_temperature,
    maximum,
    total,
    weighted,
    target,
    PER_ROW: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: its maximum over its ids, then the sums relative to it; the target's x."""
    acc = maximum.dtype.element_ty
    EXACT: tl.constexpr = logits.dtype.element_ty == tl.float32
    r = tl.program_id(0)
    row = logits + tl.load(rows + r) * stride
    first = tl.load(offsets + r)
    last = tl.load(offsets + r + 1)
    inverse = _load_inverse_temperature(inverse_temperatures, inverse_temperature, r, PER_ROW)
    lanes = tl.arange(0, BLOCK)

    top = tl.full((BLOCK,), float("-inf"), acc)
    for start in range(first, last, BLOCK):
        here = start + lanes < last
        columns = tl.load(ids + start + lanes, mask=here, other=0)
        x = tl.load(row + columns, mask=here, other=float("-inf")).to(acc) * inverse
        top = tl.maximum(top, x)
    m = tl.max(top, axis=0)
    shift = tl.where(m == float("-inf"), 0.0, m)

    s = tl.zeros((BLOCK,), tl.float64)
    w = tl.zeros((BLOCK,), tl.float64)
    for start in range(first, last, BLOCK):
        here = start + lanes < last
        columns = tl.load(ids + start + lanes, mask=here, other=0)
        x = tl.load(row + columns, mask=here, other=float("-inf")).to(acc) * inverse
        d = x - shift
        e = _exp(d, EXACT)
        s += e
        if WEIGHTED:
            w += e * _finite(d)
    tl.store(maximum + r, m)
    tl.store(total + r, tl.sum(s, axis=0))
    if WEIGHTED:
        tl.store(weighted + r, tl.sum(w, axis=0))

    position = tl.load(targets + r)
    column = tl.load(ids + position, mask=position >= 0, other=0)
    y = tl.load(row + column, mask=position >= 0, other=0.0).to(acc) * inverse
    tl.store(target + r, y)


@triton.jit
def _by_fours(values, BLOCK: tl.constexpr):
    """Sums of four lanes each, in float64: what a thread holds, so they cost little."""
    return tl.sum(tl.reshape(values, (BLOCK // 4, 4)), axis=1).to(tl.float64)


@triton.jit
def _stats_again(
    row, valid, inverse, WEIGHTED: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr
):
    """A row's maximum, and its sums relative to it, by two reads.

    One term may be far above the others of its lane, which float32 would cut short.
    """
    acc = inverse.dtype
    lanes = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), acc)
    for start in range(0, valid, BLOCK):
        here = start + lanes < valid
        x = tl.load(row + start + lanes, mask=here, other=float("-inf")).to(acc) * inverse
        top = tl.maximum(top, x)
    m = tl.max(top, axis=0)
    shift = tl.where(m == float("-inf"), 0.0, m)
    s = tl.zeros((BLOCK // 4,), tl.float64)
    w = tl.zeros((BLOCK // 4,), tl.float64)
    for start in range(0, valid, BLOCK):
        here = start + lanes < valid
        d = tl.load(row + start + lanes, mask=here, other=float("-inf")).to(acc) * inverse - shift
        e = _exp(d, EXACT)
        s += _by_fours(e, BLOCK)
        if WEIGHTED:
            w += _by_fours(e * _finite(d), BLOCK)
    return m, tl.sum(s, axis=0), tl.sum(w, axis=0)


@triton.jit
def _full_kernel(
    logits,
    stride,
    valid,
    rows,
    unrestricted,
    floor,
    inverse_temperatures,
    inverse_temperature,
    maximum,
    total,
    weighted,
    PER_ROW: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One row, read once: sums by lane relative to the maximum of its first block and its support.

    That maximum is a shift like any other: it spares the loop the running maximum, its reductions
    and their barriers. In the rare row where the sums leave a safe range (far larger logits
    elsewhere, nothing but -inf at first, -inf or NaN anywhere), they are redone relative to the
    row's maximum.
    """
    acc = maximum.dtype.element_ty
    EXACT: tl.constexpr = logits.dtype.element_ty == tl.float32
    r = tl.program_id(0)
    if not ALL_ROWS:  # a row that is not to be read has no columns
        valid = tl.where(tl.load(unrestricted + r) != 0, valid, 0)
    row = logits + tl.load(rows + r) * stride
    inverse = _load_inverse_temperature(inverse_temperatures, inverse_temperature, r, PER_ROW)
    lanes = tl.arange(0, BLOCK)
    blocks = valid // BLOCK
    done = blocks * BLOCK

    head = tl.load(row + lanes, mask=lanes < valid, other=float("-inf")).to(acc) * inverse
    shift = tl.maximum(tl.max(head, axis=0), tl.load(floor + r))
    s = tl.zeros((BLOCK,), acc)
    w = tl.zeros((BLOCK,), acc)
    for block in tl.range(0, blocks, num_stages=STAGES):
        d = tl.load(row + block * BLOCK + lanes).to(acc) * inverse - shift
        e = _exp(d, EXACT)
        s += e
        if WEIGHTED:
            w = tl.fma(e, d, w)
    rest = done + lanes < valid
    d = tl.load(row + done + lanes, mask=rest, other=float("-inf")).to(acc) * inverse - shift
    e = tl.where(rest, _exp(d, EXACT), 0.0)
    s += e
    if WEIGHTED:
        w += tl.where(rest, e * d, 0.0)
    m = shift
    row_total = tl.sum(_by_fours(s, BLOCK), axis=0)
    row_weighted = tl.sum(_by_fours(w, BLOCK), axis=0)
    # The more terms lie far above 1, the more digits cancel in the scores: the upper bound is on
    # the mean term of a lane.
    peak = tl.max(s, axis=0)
    safe = (row_total > 1e-20) & (peak < 2.0 * (blocks + 1)) & (row_weighted == row_weighted)

    if not safe:
        m, row_total, row_weighted = _stats_again(row, valid, inverse, WEIGHTED, EXACT, BLOCK)

    tl.store(maximum + r, m)
    tl.store(total + r, row_total)
    if WEIGHTED:
        tl.store(weighted + r, row_weighted)


@triton.jit
def _term(x, r, shift, constant, slope, mean, EXACT: tl.constexpr):
    """The values of a `GradientTerm` at x, with the coefficients of row r."""
    d = x - tl.load(shift + r)
    e = _exp(d, EXACT)
    factor = 0.0
    if constant is not None:
        factor += tl.load(constant + r)
    if slope is not None:
        factor += tl.load(slope + r) * (_finite(d) - tl.load(mean + r))
    return e * factor


@triton.jit
def _support_gradient_kernel(
    logits,
    stride,
    out,
    out_stride,
    rows,
    offsets,
    ids,
    targets,
    unrestricted,
    inverse_temperatures,
    inverse_temperature,
    support_shift,
    support_constant,
    support_slope,
    support_mean,
    dense_shift,
    dense_constant,
    dense_slope,
    dense_mean,
    target,
    PER_ROW: tl.constexpr,
    TO_ROWS: tl.constexpr,
    ALL_DENSE: tl.constexpr,
    HAS_SUPPORT: tl.constexpr,
    HAS_DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: the whole gradient at its ids, to its places in `out` or one after another."""
    acc = target.dtype.element_ty
    EXACT: tl.constexpr = logits.dtype.element_ty == tl.float32
    r = tl.program_id(0)
    t = tl.load(rows + r)
    row = logits + t * stride
    first = tl.load(offsets + r)
    last = tl.load(offsets + r + 1)
    position = tl.load(targets + r)
    amount = tl.load(target + r)
    inverse = _load_inverse_temperature(inverse_temperatures, inverse_temperature, r, PER_ROW)
    is_dense = ALL_DENSE
    if HAS_DENSE and not ALL_DENSE:
        is_dense = tl.load(unrestricted + r) != 0
    lanes = tl.arange(0, BLOCK)
    for start in range(first, last, BLOCK):
        at = start + lanes
        here = at < last
        columns = tl.load(ids + at, mask=here, other=0)
        x = tl.load(row + columns, mask=here, other=0.0).to(acc) * inverse
        gradient = tl.where(at == position, amount, 0.0).to(acc)
        if HAS_SUPPORT:
            gradient -= _term(
                x, r, support_shift, support_constant, support_slope, support_mean, EXACT
            )
        if HAS_DENSE:
            dense = _term(x, r, dense_shift, dense_constant, dense_slope, dense_mean, EXACT)
            gradient -= tl.where(is_dense, dense, 0.0)
        places = out + t * out_stride + columns if TO_ROWS else out + at
        tl.store(places, gradient.to(out.dtype.element_ty), mask=here)


@triton.jit
def _dense_gradient_kernel(
    logits,
    stride,
    gradient,
    gradient_stride,
    columns,
    valid,
    blocks,
    response_rows,
    num_layout_rows,
    unrestricted,
    inverse_temperatures,
    inverse_temperature,
    dense_shift,
    dense_constant,
    dense_slope,
    dense_mean,
    PER_ROW: tl.constexpr,
    ALL_DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of columns of one logits row. `gradient` may be `logits`."""
    acc = dense_shift.dtype.element_ty
    EXACT: tl.constexpr = logits.dtype.element_ty == tl.float32
    t = tl.program_id(0) // blocks
    lanes = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    r = tl.load(response_rows + t, mask=t < num_layout_rows, other=-1)
    is_dense = r >= 0
    if not ALL_DENSE:
        is_dense = is_dense & (tl.load(unrestricted + r, mask=r >= 0, other=0) != 0)
    out = gradient + t.to(tl.int64) * gradient_stride + lanes
    if is_dense:
        inverse = _load_inverse_temperature(inverse_temperatures, inverse_temperature, r, PER_ROW)
        row = logits + t.to(tl.int64) * stride
        x = tl.load(row + lanes, mask=lanes < valid, other=float("-inf")).to(acc) * inverse
        term = _term(x, r, dense_shift, dense_constant, dense_slope, dense_mean, EXACT)
        value = tl.where(lanes < valid, -term, 0.0)
        tl.store(out, value.to(gradient.dtype.element_ty), mask=lanes < columns)
    else:
        tl.store(out, tl.zeros((BLOCK,), gradient.dtype.element_ty), mask=lanes < columns)


@triton.jit
def _scatter_kernel(gradient, stride, rows, offsets, ids, values, BLOCK: tl.constexpr):
    """One row: its values to its ids."""
    r = tl.program_id(0)
    row = gradient + tl.load(rows + r) * stride
    first = tl.load(offsets + r)
    last = tl.load(offsets + r + 1)
    lanes = tl.arange(0, BLOCK)
    for start in range(first, last, BLOCK):
        here = start + lanes < last
        columns = tl.load(ids + start + lanes, mask=here, other=0)
        value = tl.load(values + start + lanes, mask=here, other=0.0)
        tl.store(row + columns, value, mask=here)
