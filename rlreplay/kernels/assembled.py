"""Scores of whole rows in the model's dtype, with the operations and so the bits of an engine.

An engine in its reinforcement-learning on-policy mode casts the row to the model's dtype, divides
it by the temperature in that dtype, masks it outside the support with -inf and calls
`log_softmax`. The same operations in the same order give the same bits.

Shapes: `n` rows of a chunk, `V` the true vocabulary, `m` support ids of the chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlreplay.kernels.reference import entropy_of
from rlreplay.kernels.rows import accumulator


class ChunkSupports(NamedTuple):
    """The supports of a chunk of rows, over the whole vocabulary."""

    row_of_id: Int[Tensor, " m"]
    ids: Int[Tensor, " m"]
    targets: Int[Tensor, " n"]
    unrestricted: Bool[Tensor, " n"] | None
    """None where no row is."""


def chunk_scores(
    rows: Float[Tensor, "n V"],
    supports: ChunkSupports,
    temperature: float,
    wanted: tuple[str, ...],
) -> tuple[Tensor, ...]:
    """The wanted scores `[n]` of whole rows, by differentiable torch operations.

    `log_probs` and `full_log_probs` come in the rows' dtype, with the bits of `torch.log_softmax`
    on it. Entropies and the support's mass are computed in float32 from the divided rows.
    """
    x = _divided(rows, temperature)
    masked = _masked(x, supports) if set(wanted) - {"full_log_probs", "entropy"} else x
    return tuple(_score(name, x, masked, supports.targets) for name in wanted)


def _score(name: str, x: Tensor, masked: Tensor, targets: Tensor) -> Tensor:
    wide = accumulator(x.dtype)
    if name == "log_probs":
        return _at(torch.log_softmax(masked, dim=-1), targets)
    if name == "full_log_probs":
        return _at(torch.log_softmax(x, dim=-1), targets)
    if name == "entropy":
        return entropy_of(torch.log_softmax(x.to(wide), dim=-1))
    if name == "support_entropy":
        return entropy_of(torch.log_softmax(masked.to(wide), dim=-1))
    return masked.to(wide).logsumexp(dim=-1) - x.to(wide).logsumexp(dim=-1)


def _divided(rows: Tensor, temperature: float) -> Tensor:
    """Rows by temperature as an engine divides: by a float32 tensor, rounded back to their type.

    Division by a number would not do: on CUDA torch multiplies by its reciprocal instead.
    """
    divisor = torch.full((1,), temperature, dtype=accumulator(rows.dtype), device=rows.device)
    return rows.div(divisor).to(rows.dtype)


def _masked(x: Tensor, supports: ChunkSupports) -> Tensor:
    """x on the support, -inf elsewhere."""
    where = (supports.row_of_id, supports.ids)
    masked = torch.full_like(x, -torch.inf).index_put(where, x[where])
    if supports.unrestricted is None:
        return masked
    return torch.where(supports.unrestricted[:, None], x, masked)


def _at(values: Tensor, columns: Tensor) -> Tensor:
    return values.gather(-1, columns[:, None]).squeeze(-1)
