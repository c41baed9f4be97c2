"""Support logits from hidden states by torch operations, in chunks of bounded memory.

Shapes: `T` rows of hidden states of size `D`, `V` columns of this vocab shard, `N` support ids on
this shard. The two gradients are sums in a fixed order, by segments, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlreplay.kernels.rows import accumulator
from rlreplay.plan import ReplayPlan
from rlreplay.sampling_mask import IntArray

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

    def terms(a: int, b: int) -> Tensor:
        return weight[plan.ids[a:b].long()].double() * grad[a:b, None]

    for first, last, sums in _segment_sums(terms, plan.host_offsets, plan.offsets, hidden.shape[1]):
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
    rows = plan.id_rows_by_id

    def terms(a: int, b: int) -> Tensor:
        return hidden[rows[a:b]].double() * grad[segments.order[a:b], None]

    bounds = (segments.host_starts, segments.starts)
    for first, last, sums in _segment_sums(terms, *bounds, hidden.shape[1]):
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
    gradient[segments.columns] = torch.segment_reduce(
        # unsafe spares the sync that checks the offsets
        grad[segments.order].double(),
        "sum",
        offsets=segments.starts,
        unsafe=True,
        initial=0,
    ).to(bias.dtype)
    return gradient


def _chunks(count: int, width: int) -> Iterator[tuple[int, int]]:
    step = max(1, _CHUNK_BYTES // (8 * max(1, width)))
    for start in range(0, count, step):
        yield start, min(start + step, count)


def _segment_sums(
    terms: Callable[[int, int], Tensor], host_offsets: IntArray, offsets: Tensor, width: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Runs (first, last, sums `[last - first, width]`) of the segments' sums, 0 over nothing.

    Args:
        terms: the entries [a, b), float64 `[b - a, width]`, of which a bounded number is made at a
            time; what a segment of more has so far is carried on.
        host_offsets, offsets: where each segment begins, on the host and on the device.
    """
    step = max(1, _CHUNK_BYTES // (8 * max(1, width)))
    first, count, a = 0, len(host_offsets) - 1, 0
    carried: Tensor | None = None
    while first < count:
        b = min(a + step, int(host_offsets[-1]))
        last = int(np.searchsorted(host_offsets, b, side="right")) - 1
        is_open = last < count and int(host_offsets[last]) < b
        bounds = (offsets[first : last + 1 + is_open] - a).clamp(0, b - a)
        sums: Tensor = torch.segment_reduce(
            terms(a, b), "sum", offsets=bounds, unsafe=True, initial=0
        )
        if carried is not None:
            sums[0] += carried
        if last > first:
            yield first, last, sums[: last - first]
        carried = sums[-1] if is_open else None
        first, a = last, b
