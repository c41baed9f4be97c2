"""What every backend takes and gives: statistics of a row, and coefficients of its gradient.

A backend reads logits and writes a gradient; everything between (combining vocab shards, the
scores, the chain rule) is arithmetic on a few numbers a row and is shared, in `rlreplay.scores`.

Notation: x = logits / temperature; M and M_S the maxima of a row over the vocabulary and over its
support. Both are subtracted before anything is exponentiated, so nothing overflows, and entries
of -inf count nothing.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

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
    """The values exp(d_j) * (constant + slope * (d_j - mean)), with d_j = x_j - shift.

    The gradient of every score, but for its [j = y] part, is minus such a term. The coefficients
    hold the normaliser and 1 / temperature.
    """

    shift: Float[Tensor, " R"]
    constant: Float[Tensor, " R"] | None
    slope: Float[Tensor, " R"] | None
    """None where it is zero in all rows, as is the constant; then so is `mean`."""
    mean: Float[Tensor, " R"] | None

    def zero_where(self, rows: Bool[Tensor, " R"]) -> GradientTerm:
        """The term, gone from the rows where `rows` is true."""
        constant = None if self.constant is None else self.constant.masked_fill(rows, 0.0)
        slope = None if self.slope is None else self.slope.masked_fill(rows, 0.0)
        return self._replace(constant=constant, slope=slope)


class GradientCoefficients(NamedTuple):
    """The logits' gradient: an amount at the sampled token, less a term on the support and a dense
    term.

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
        rows: BoolArray | None,
        out: Tensor | None = None,
    ) -> Tensor: ...
