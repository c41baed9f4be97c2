"""Support logits from hidden states in Triton: N dot products, and their two gradients.

The same three functions as in `torch_linear`. Shapes: `T` rows of hidden states of size `D`, `V`
columns of this shard, `N` support ids, `U` distinct ids; e bytes an entry.

Rows of `hidden`, and of the weight where an id is popular, come from the caches mostly:

| kernel | bytes read and written | a sum's order |
|---|---|---|
| `_logits_kernel` | 2 e N D | lanes over D, then a tree |
| `_hidden_gradient_kernel` | e N D + e T D | id after id |
| `_weight_gradient_kernel` | e N D + e' D an id of one piece + a D another piece | row after row |
| `_split_gradient_kernel` | a D a piece + e' D an id of several | piece after piece |

e' is the size of an entry of what is written to (twice where it is added to), a that of a sum: sums
run in float32 (float64 for float64).

No atomics: an id that more than `PIECE` rows name is cut into pieces, whose sums are kept and added
in order, for so many ids at a time that they fit into `_PARTIAL_BYTES`. Popular ids are not given
to a small product of matrices: the logits and the hidden states' gradient of a row would then
depend on which ids are popular in its batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from rlreplay.kernels.rows import accumulator
from rlreplay.plan import ReplayPlan

# Fixed: the order of a sum shall not depend on the batch.
_ENTRIES, _LOGITS_COLUMNS, _LOGITS_WARPS = 16, 256, 4
_UNROLL, _GRADIENT_COLUMNS, _GRADIENT_WARPS = 4, 512, 1

_PARTIAL_BYTES = 1 << 28
"""Of partial sums at a time."""


def support_logits(
    hidden: Float[Tensor, "T D"],
    weight: Float[Tensor, "V D"],
    bias: Float[Tensor, " V"] | None,
    plan: ReplayPlan,
) -> Float[Tensor, " N"]:
    """As `torch_linear.support_logits`: one program for 16 ids."""
    logits = torch.empty(plan.num_ids, dtype=accumulator(hidden.dtype), device=hidden.device)
    if plan.num_ids == 0:
        return logits
    width = hidden.shape[1]
    block = _block(width, _LOGITS_COLUMNS)
    _logits_kernel[(triton.cdiv(plan.num_ids, _ENTRIES),)](
        hidden,
        hidden.stride(0),
        weight,
        weight.stride(0),
        bias,
        0 if bias is None else bias.stride(0),
        plan.id_rows,
        plan.ids,
        logits,
        plan.num_ids,
        width,
        EVEN=width % block == 0,
        ENTRIES=_ENTRIES,
        BLOCK=block,
        num_warps=_LOGITS_WARPS,
    )
    return logits


def hidden_gradient(
    grad: Float[Tensor, " N"],
    hidden: Float[Tensor, "T D"],
    weight: Float[Tensor, "V D"],
    plan: ReplayPlan,
) -> Float[Tensor, "T D"]:
    """As `torch_linear.hidden_gradient`: one program for a row and a block of its columns."""
    gradient = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    rows, width = hidden.shape
    block = _block(width, _GRADIENT_COLUMNS)
    if gradient.numel():
        _hidden_gradient_kernel[(rows, triton.cdiv(width, block))](
            grad,
            weight,
            weight.stride(0),
            plan.response_rows,
            plan.response_rows.numel(),
            plan.offsets,
            plan.ids,
            gradient,
            width,
            UNROLL=_UNROLL,
            BLOCK=block,
            num_warps=_GRADIENT_WARPS,
        )
    return gradient


def weight_gradient(
    grad: Float[Tensor, " N"],
    hidden: Float[Tensor, "T D"],
    plan: ReplayPlan,
    out: Float[Tensor, "V D"],
    accumulate: bool,
) -> None:
    """As `torch_linear.weight_gradient`, without atomics: pieces of ids, then their sums."""
    segments, width = plan.by_id, hidden.shape[1]
    if plan.num_ids == 0 or width == 0:
        return
    block = _block(width, _GRADIENT_COLUMNS)
    blocks = triton.cdiv(width, block)
    acc, sorted_grad = accumulator(hidden.dtype), grad[segments.order]
    batches = list(segments.batches(max(1, _PARTIAL_BYTES // (acc.itemsize * width))))
    most = max(slots.stop - slots.start for *_, slots in batches)
    partials = torch.empty(most, width, dtype=acc, device=hidden.device)
    for pieces, columns, slots in batches:
        _weight_gradient_kernel[(pieces.stop - pieces.start, blocks)](
            sorted_grad,
            hidden,
            hidden.stride(0),
            plan.id_rows_by_id,
            segments.piece_starts,
            segments.piece_columns,
            segments.piece_slots,
            pieces.start,
            slots.start,
            partials,
            out,
            out.stride(0),
            width,
            ACCUMULATE=accumulate,
            UNROLL=_UNROLL,
            BLOCK=block,
            num_warps=_GRADIENT_WARPS,
        )
        if columns.start == columns.stop:
            continue
        _split_gradient_kernel[(columns.stop - columns.start, blocks)](
            partials,
            segments.split_starts,
            segments.split_columns,
            columns.start,
            slots.start,
            out,
            out.stride(0),
            width,
            ACCUMULATE=accumulate,
            UNROLL=_UNROLL,
            BLOCK=block,
            num_warps=_GRADIENT_WARPS,
        )


def _block(width: int, most: int) -> int:
    """Columns of `hidden` at a time, by shape alone."""
    return min(most, max(16, 1 << max(0, width - 1).bit_length()))


@triton.jit
def _logits_kernel(
    hidden,
    hidden_stride,
    weight,
    weight_stride,
    bias,
    bias_stride,
    id_rows,
    ids,
    logits,
    num_ids,
    width,
    EVEN: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The logits of `ENTRIES` ids, of whatever rows."""
    acc = logits.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    here = at < num_ids
    row = tl.load(id_rows + at, mask=here, other=0)
    column = tl.load(ids + at, mask=here, other=0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    h_rows = hidden + row[:, None] * hidden_stride + lanes[None, :]
    w_rows = weight + column[:, None] * weight_stride + lanes[None, :]
    total = tl.zeros((ENTRIES, BLOCK), acc)
    for start in range(0, width, BLOCK):
        if EVEN:
            h = tl.load(h_rows + start)
            w = tl.load(w_rows + start)
        else:
            inside = (start + lanes < width)[None, :]
            h = tl.load(h_rows + start, mask=inside, other=0.0)
            w = tl.load(w_rows + start, mask=inside, other=0.0)
        total += h.to(acc) * w.to(acc)
    value = tl.sum(total, axis=1)
    if bias is not None:
        value += tl.load(bias + column * bias_stride).to(acc)
    tl.store(logits + at, value, mask=here)


@triton.jit
def _hidden_gradient_kernel(
    grad,
    weight,
    weight_stride,
    response_rows,
    num_layout_rows,
    offsets,
    ids,
    gradient,
    width,
    UNROLL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of `hidden`, some of its columns: the sum of its ids' rows of the weight."""
    t = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < width
    r = tl.load(response_rows + t, mask=t < num_layout_rows, other=-1)
    scored = r >= 0
    first = tl.load(offsets + r, mask=scored, other=0)
    last = tl.load(offsets + r + 1, mask=scored, other=0)
    total = _weighted_rows(
        weight, weight_stride, ids, grad, first, last, lanes, width, UNROLL, BLOCK
    )
    tl.store(gradient + t * width + lanes, total.to(gradient.dtype.element_ty), mask=inside)


# Numbers that differ between the batches of a call: a kernel for each kind would be compiled else.
@triton.jit(do_not_specialize=["first_piece", "first_slot"])
def _weight_gradient_kernel(
    grad,
    hidden,
    hidden_stride,
    rows,
    piece_starts,
    piece_columns,
    piece_slots,
    first_piece,
    first_slot,
    partials,
    out,
    out_stride,
    width,
    ACCUMULATE: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One piece of an id's rows, some columns of `hidden`. `grad` and `rows` are sorted by id."""
    p = first_piece + tl.program_id(0)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < width
    first = tl.load(piece_starts + p)
    last = tl.load(piece_starts + p + 1)
    slot = tl.load(piece_slots + p)
    column = tl.load(piece_columns + p)
    total = _weighted_rows(
        hidden, hidden_stride, rows, grad, first, last, lanes, width, UNROLL, BLOCK
    )
    if slot >= 0:
        tl.store(partials + (slot - first_slot) * width + lanes, total, mask=inside)
    else:
        _write(out + column * out_stride + lanes, total, inside, ACCUMULATE)


@triton.jit
def _weighted_rows(
    matrix,
    stride,
    rows,
    factors,
    first,
    last,
    lanes,
    width,
    UNROLL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of factors[i] * matrix[rows[i]] for i in [first, last), one after another.

    The loads of `UNROLL` rows are under way at a time.
    """
    acc = factors.dtype.element_ty
    total = tl.zeros((BLOCK,), acc)
    for start in range(0, last - first, UNROLL):
        for i in tl.static_range(UNROLL):
            at = first + start + i
            row = tl.load(rows + at, mask=at < last, other=0).to(tl.int64)
            factor = tl.load(factors + at, mask=at < last, other=0.0)
            # past the end nothing; a scalar in the mask itself is more than the interpreter takes
            here = lanes < tl.where(at < last, width, 0)
            values = tl.load(matrix + row * stride + lanes, mask=here, other=0.0)
            total += values.to(acc) * factor
    return total


@triton.jit(do_not_specialize=["first_column", "first_slot"])
def _split_gradient_kernel(
    partials,
    split_starts,
    split_columns,
    first_column,
    first_slot,
    out,
    out_stride,
    width,
    ACCUMULATE: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One id of several pieces, some columns of `hidden`: their sum, in order."""
    m = first_column + tl.program_id(0)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < width
    first = tl.load(split_starts + m) - first_slot
    last = tl.load(split_starts + m + 1) - first_slot
    total = tl.zeros((BLOCK,), partials.dtype.element_ty)
    for start in range(0, last - first, UNROLL):
        for i in tl.static_range(UNROLL):
            at = first + start + i
            here = lanes < tl.where(at < last, width, 0)
            total += tl.load(partials + at * width + lanes, mask=here, other=0.0)
    place = out + tl.load(split_columns + m) * out_stride + lanes
    _write(place, total, inside, ACCUMULATE)


@triton.jit
def _write(place, value, inside, ACCUMULATE: tl.constexpr):
    if ACCUMULATE:  # in the wider of the two types
        if place.dtype.element_ty == tl.float64:
            value = value.to(tl.float64)
        value += tl.load(place, mask=inside, other=0.0).to(value.dtype)
    tl.store(place, value.to(place.dtype.element_ty), mask=inside)
