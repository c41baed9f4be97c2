"""Support logits from hidden states by torch operations, in chunks of bounded memory.

Shapes: `T` rows of hidden states of size `D`, `V` columns of this vocab shard, `N` support ids on
this shard. The two gradients are sums in a fixed order, by segments, in float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlreplay.kernels.rows import accumulator
from rlreplay.plan import ReplayPlan

_CHUNK_BYTES = 1 << 24


def support_logits(
    hidden: Float[Tensor, "T D"],
    weight: Float[Tensor, "V D"],
    bias: Float[Tensor, " V"] | None,
    plan: ReplayPlan,
) -> Float[Tensor, " N"]:
    """hidden[row] . weight[id] (+ bias[id]) of each support id, in the accumulation type."""
    dtype = accumulator(hidden.dtype)
    logits = torch.empty(plan.num_ids, dtype=dtype, device=hidden.device)
    for a, b in _chunks(plan.num_ids, hidden.shape[1]):
        ids = plan.ids[a:b].long()
        rows = hidden[plan.id_rows[a:b]].to(dtype)
        logits[a:b] = (rows * weight[ids].to(dtype)).sum(dim=1)
        if bias is not None:
            logits[a:b] += bias[ids].to(dtype)
    return logits


def hidden_gradient(
    grad: Float[Tensor, " N"],
    hidden: Float[Tensor, "T D"],
    weight: Float[Tensor, "V D"],
    plan: ReplayPlan,
) -> Float[Tensor, "T D"]:
    """The gradient of `hidden`, from that of the support logits; zeros where no row is scored."""
    gradient = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
    for first, last, a, b in _segment_chunks(plan.host_offsets, hidden.shape[1]):
        terms = weight[plan.ids[a:b].long()].double() * grad[a:b, None]
        sums = _segment_sums(terms, plan.offsets[first : last + 1] - a)
        gradient[plan.rows[first:last]] = sums.to(gradient.dtype)
    return gradient


def weight_gradient(
    grad: Float[Tensor, " N"],
    hidden: Float[Tensor, "T D"],
    plan: ReplayPlan,
    out: Float[Tensor, "V D"],
    accumulate: bool,
) -> None:
    """The gradient of the weight's rows that a support names, written or added into `out`."""
    segments = plan.by_id
    starts = segments.starts.cpu().numpy()
    for first, last, a, b in _segment_chunks(starts, hidden.shape[1]):
        order = segments.order[a:b]
        terms = hidden[plan.id_rows[order]].double() * grad[order, None]
        sums = _segment_sums(terms, segments.starts[first : last + 1] - a)
        columns = segments.columns[first:last]
        if accumulate:
            sums = sums + out[columns]
        out[columns] = sums.to(out.dtype)


def bias_gradient(
    grad: Float[Tensor, " N"], bias: Float[Tensor, " V"], plan: ReplayPlan
) -> Float[Tensor, " V"]:
    """The gradient of the bias, zeros for columns that no support names. For either backend."""
    gradient = torch.zeros_like(bias)
    segments = plan.by_id
    sums = _segment_sums(grad[segments.order].double(), segments.starts)
    gradient[segments.columns] = sums.to(bias.dtype)
    return gradient


def _chunks(count: int, width: int) -> Iterator[tuple[int, int]]:
    step = max(1, _CHUNK_BYTES // (8 * max(1, width)))
    for start in range(0, count, step):
        yield start, min(start + step, count)


def _segment_chunks(offsets: np.ndarray, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Runs (first, last, a, b) of segments [first, last) with the entries [a, b), of a bounded
    number of entries, or one segment."""
    step = max(1, _CHUNK_BYTES // (8 * max(1, width)))
    first, count = 0, len(offsets) - 1
    while first < count:
        a = int(offsets[first])
        last = int(np.searchsorted(offsets, a + step, side="right")) - 1
        last = min(count, max(first + 1, last))
        yield first, last, a, int(offsets[last])
        first = last


def _segment_sums(terms: Tensor, offsets: Tensor) -> Tensor:
    """`[segments, D]`: sums of consecutive rows of `terms`, 0 over none."""
    # unsafe spares the sync that checks the offsets
    sums: Tensor = torch.segment_reduce(terms, "sum", offsets=offsets, unsafe=True, initial=0)
    return sums
