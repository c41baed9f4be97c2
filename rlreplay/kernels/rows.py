"""What every backend takes and gives: statistics of a row, and coefficients of its gradient.

A backend reads logits and writes a gradient; everything between (combining vocab shards, the
scores, the chain rule) is arithmetic on a few numbers a row and is shared, in `rlreplay.scores`.

Notation: x = logits / temperature; M and M_S the maxima of a row over the vocabulary and over its
support. Both are subtracted before anything is exponentiated, so nothing overflows, and entries
of -inf count nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlreplay.plan import ReplayPlan
from rlreplay.sampling_mask import BoolArray

Temperature = float | Float[Tensor, " R"]
"""One number, or one for each row, in the accumulation type."""

UNDERFLOW = -1000.0
"""An exponent below which exp is exactly 0 in float32 and float64, to replace -inf by: the
products `0 * -inf` would be NaN."""


class RowStats(NamedTuple):
    """Softmax statistics of rows over some columns, relative to their maximum over these."""

    maximum: Float[Tensor, " rows"]
    """max x; -inf over no columns."""
    total: Float[Tensor, " rows"]
    """sum of exp(x - maximum)."""
    weighted: Float[Tensor, " rows"] | None
    """sum of exp(x - maximum) * (x - maximum); None where no entropy was asked for."""


class GradientTerm(NamedTuple):
    """A gradient of the form exp(x_j - shift) * (constant + slope * (x_j - shift)).

    Every score's gradient but the [j = y] part has this form. The coefficients hold the
    normaliser and 1 / temperature. `slope` is None where it is zero in all rows.
    """

    shift: Float[Tensor, " R"]
    constant: Float[Tensor, " R"]
    slope: Float[Tensor, " R"] | None

    def at(self, index: Any) -> GradientTerm:
        """The coefficients of some rows; `index` is what a tensor of rows takes."""
        slope = None if self.slope is None else self.slope[index]
        return GradientTerm(self.shift[index], self.constant[index], slope)

    def zero_where(self, rows: Bool[Tensor, " R"]) -> GradientTerm:
        """The term, gone from the rows where `rows` is true."""
        slope = None if self.slope is None else self.slope.masked_fill(rows, 0.0)
        return GradientTerm(self.shift, self.constant.masked_fill(rows, 0.0), slope)


class GradientCoefficients(NamedTuple):
    """The logits' gradient: a dense term, a term on the support, a term at the sampled token.

    A term is None where no row has it: zero coefficients would not do, since 0 * NaN is NaN.
    """

    dense: GradientTerm | None
    support: GradientTerm | None
    target: Float[Tensor, " R"]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type that sums run in: float64 for float64, float32 for everything shorter."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class ScoreKernels(Protocol):
    """What a backend's module provides; `torch_scores` says what each function computes."""

    def support_stats(
        self, logits: Tensor, plan: ReplayPlan, temperature: Temperature, weighted: bool
    ) -> tuple[RowStats, Tensor]: ...

    def full_stats(
        self,
        logits: Tensor,
        plan: ReplayPlan,
        temperature: Temperature,
        weighted: bool,
        rows: BoolArray | None,
        floor: Tensor,
    ) -> RowStats: ...

    def logits_gradient(
        self,
        logits: Tensor,
        plan: ReplayPlan,
        temperature: Temperature,
        coefficients: GradientCoefficients,
        dense_rows: BoolArray,
        out: Tensor | None = None,
    ) -> Tensor: ...
