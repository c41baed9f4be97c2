"""Rollout-versus-trainer mismatch, the drift that truncation makes, and statistics of supports.

Shapes: `R` response tokens in a call, `n` rows of a mask, `N` support ids in total.

Pass the loss mask wherever there is one. The tool tokens of merged turns (`Rollout.merge_turns`)
are response tokens that no sampler drew, with rollout log-prob 0: on a forced row they pass for
perfect agreement, on an unrestricted one for a certainty that the trainer does not share.

What is summed over tokens is a frozen `Tally`: a vector of sums and one of maxima, both float64 and
of fixed length. Tallies of parts of a batch (samples, micro-batches, ranks) add up to the tally of
the whole: counts exactly, sums up to rounding. A trainer may also take the two tensors before they
leave the device, reduce them itself (one SUM, one MAX), and read the result:

    sums, maxima = LogProbMismatch.tensors(rollout_log_probs, log_probs, loss_mask)
    dist.all_reduce(sums, dist.ReduceOp.SUM)
    dist.all_reduce(maxima, dist.ReduceOp.MAX)
    mismatch = LogProbMismatch.from_tensors(sums, maxima)

Wrong lengths, shapes and types are refused. Numbers that cannot be measured (NaN, infinities) are
counted in `non_finite` and left out of everything else: to refuse them would take a device sync,
and one rank would raise while the others wait in their all-reduce.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlreplay.errors import ReplayError
from rlreplay.kernels.rows import accumulator
from rlreplay.plan import ReplayPlan, check_kind, to_device
from rlreplay.rollout import MASS_TOLERANCE, Rollout, log_prob_array
from rlreplay.sampling_mask import (
    BoolArray,
    IntArray,
    RolloutSamplingMask,
    check_count,
    frozen,
    host_array,
    integer_array,
    is_integer,
    is_iterable,
    shown,
)
from rlreplay.scores import row_temperature

Float64Array = npt.NDArray[np.float64]
Piece = Tensor | npt.NDArray[Any]
Column = Piece | Sequence[Piece]
Masks = RolloutSamplingMask | Sequence[RolloutSamplingMask]

# Bins of |delta|: 16 equal ones in each octave of [2**-24, 2**6), one below and one above. fp32
# rounding of a log-prob ends where they begin; a bin is read off a float64's leading bits.
_SUB_BITS = 4
_LOWEST_OCTAVE, _OCTAVES = -24, 30
_BINS = (_OCTAVES << _SUB_BITS) + 2
_SHIFT = 52 - _SUB_BITS
_FIRST = (1023 + _LOWEST_OCTAVE) << _SUB_BITS

# Ratios are taken of deltas within +-300 nats. No square, and no sum of 2**53 of them, leaves the
# normal float64 then: exp(600) is 4e260 and exp(-600) 3e-261. A bound that is the same everywhere
# lets one SUM reduce them; a shift by the largest delta would have to be reduced before.
_LARGEST_LOG_RATIO = 300.0

_MOST = 2.0**53  # float64 counts exactly below it


_WRONG_PAIRS = "log-probs of different tokens would be compared"
_NO_MERGE = "the numbers of one batch would be read as those of another"


class TallyTensors(NamedTuple):
    """A tally on its way through a reduction: SUM all-reduce the one, MAX all-reduce the other."""

    sums: Float[Tensor, " K"]
    maxima: Float[Tensor, " M"]


@dataclass(frozen=True, init=False, eq=False, repr=False, slots=True)
class Tally(ABC):
    """Sums and maxima over tokens, float64 `[K]` and `[M]`; read-only, equal by value.

    `a + b` (or `a.merge(b)`) is the tally of both sets of tokens. `sums` holds what `COUNTS` and
    `SUMS` name, and then `BINS` counts of a histogram over the measured tokens.

    Raises:
        ReplayError: vectors of another length than this class has, a count that is no count, or a
            merge of tallies of two classes.
    """

    COUNTS: ClassVar[tuple[str, ...]] = ("tokens", "non_finite")
    PARTS: ClassVar[tuple[str, ...]] = ()
    """Counts of measured tokens."""
    SUMS: ClassVar[tuple[str, ...]] = ()
    MAXIMA: ClassVar[tuple[str, ...]] = ()
    BINS: ClassVar[int] = 0

    sums: Float64Array
    maxima: Float64Array

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, sums: npt.ArrayLike | Tensor, maxima: npt.ArrayLike | Tensor) -> None:
        own = _vector(sums, "sums", self._num_sums())
        bins = own[own.size - self.BINS :]
        if not _are_counts(np.concatenate([own[: len(self.COUNTS)], bins])):
            raise _not_a_tally("counts", "non-negative integers", "other numbers")
        if self.BINS and bins.sum() != own[0]:
            raise _not_a_tally("bins", f"{own[0]:.0f} tokens in all", f"{bins.sum():.0f}")
        for name in self.PARTS:
            part = own[self.COUNTS.index(name)]
            if part > own[0]:
                raise _not_a_tally(name, f"at most {own[0]:.0f} tokens", f"{part:.0f}")
        highest = _vector(maxima, "maxima", len(self.MAXIMA))
        if not (highest >= 0).all():
            raise _not_a_tally("maxima", "non-negative numbers", shown(highest.tolist()))
        object.__setattr__(self, "sums", own)
        object.__setattr__(self, "maxima", highest)

    @classmethod
    def _num_sums(cls) -> int:
        return len(cls.COUNTS) + len(cls.SUMS) + cls.BINS

    @classmethod
    def zero(cls) -> Self:
        """The tally of no token: `zero() + a == a`."""
        return cls(np.zeros(cls._num_sums()), np.zeros(len(cls.MAXIMA)))

    @classmethod
    def from_tensors(cls, sums: Tensor, maxima: Tensor) -> Self:
        """Read (reduced) tensors; this waits for the device."""
        return cls(sums, maxima)

    def to_tensors(self, device: torch.device | str | None = None) -> TallyTensors:
        """The tally as two float64 tensors, for a reduction."""
        return TallyTensors(
            torch.tensor(self.sums, device=device), torch.tensor(self.maxima, device=device)
        )

    def merge(self, other: Self) -> Self:
        """The tally of the tokens of both."""
        if type(other) is not type(self):
            raise _not_a_tally("what is merged", f"a {type(self).__name__}", shown(other))
        return type(self)(self.sums + other.sums, np.maximum(self.maxima, other.maxima))

    def __add__(self, other: Self) -> Self:
        return self.merge(other) if isinstance(other, Tally) else NotImplemented

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return np.array_equal(self.sums, other.sums) and np.array_equal(self.maxima, other.maxima)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value:.6g}" for name, value in self.summary().items())
        return f"{type(self).__name__}({fields})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.sums, self.maxima)

    @abstractmethod
    def summary(self) -> dict[str, float]:
        """What there is to report, by name."""

    @property
    def tokens(self) -> int:
        """Tokens that were measured: in the loss, and finite."""
        return int(self._sum("tokens"))

    @property
    def non_finite(self) -> int:
        """Tokens in the loss that could not be measured, and that nothing else counts."""
        return int(self._sum("non_finite"))

    def _sum(self, name: str) -> float:
        return float(self.sums[(*self.COUNTS, *self.SUMS).index(name)])

    def _mean(self, name: str) -> float:
        """The sum over `tokens`; NaN where there are none."""
        return self._sum(name) / self.tokens if self.tokens else math.nan

    def _max(self, name: str) -> float:
        return float(self.maxima[self.MAXIMA.index(name)])


class LogProbMismatch(Tally):
    """How far the trainer's policy is from the one that sampled, at the sampled tokens.

    With `delta = log_prob - rollout_log_prob` and `ratio = exp(delta)`, over the tokens in the
    loss:

    - `mean_ratio`: mean of `ratio`; 1 in expectation where both are normalised over one support.
    - `k1`: mean of `-delta`, the plain estimate of KL(rollout || trainer); may be negative.
    - `k3`: mean of `ratio - 1 - delta`, the same in expectation, with less variance, never
      negative. Both are John Schulman's, "Approximating KL Divergence" (2020,
      http://joschu.net/blog/kl-approx.html), for samples of the rollout policy.
    - `effective_sample_size`: `sum(ratio)**2 / sum(ratio**2)` (Kish), in tokens.
    - `mean_abs_delta`, `max_abs_delta`, and `quantile(q)` of `|delta|`.
    - `clamped`: tokens with `|delta|` above 300. Their `ratio` is taken as e**300 or e**-300, so
      that its square is a number, and so is `k3` where they are above. `k1` and whatever is of
      `|delta|` have no bound. Where `clamped` is 0, nothing was bounded.

    Means over no token are NaN. A token is `non_finite` where a log-prob, or `delta`, is NaN or
    infinite.
    """

    __slots__ = ()
    COUNTS = ("tokens", "non_finite", "clamped")
    PARTS = ("clamped",)
    SUMS = ("ratio", "ratio_squared", "k1", "k3", "abs_delta")
    MAXIMA = ("abs_delta",)
    BINS = _BINS

    @classmethod
    def tensors(
        cls,
        rollout_log_probs: Column,
        log_probs: Column,
        *,
        loss_mask: Column | None = None,
    ) -> TallyTensors:
        """Measure on the device of `log_probs`, in float64, with no device-to-host sync.

        Args:
            rollout_log_probs: float `[R]`, or a list with a piece for each sample.
            log_probs: float `[R]`, or such a list: the trainer's, over the same support.
            loss_mask: bool `[R]`, or such a list; true where the token takes part. All if None.
                Integers must be 0 or 1: on a device, checking them costs a sync.

        Raises:
            ReplayError: lengths that differ, or anything that is no such column.
        """
        (old, new), kept = _columns(
            {"rollout_log_probs": rollout_log_probs, "log_probs": log_probs}, loss_mask
        )
        delta = new - old
        finite = torch.isfinite(delta)
        measured = kept & finite
        delta = torch.where(measured, delta, 0.0)
        magnitude = delta.abs()
        upper = delta.clamp_max(_LARGEST_LOG_RATIO)
        ratio = torch.where(measured, upper.clamp_min(-_LARGEST_LOG_RATIO).exp(), 0.0)
        counts = [measured, kept & ~finite, magnitude > _LARGEST_LOG_RATIO]
        totals = [ratio, ratio * ratio, -delta, torch.expm1(upper) - upper, magnitude]
        sums = torch.cat([_totals(counts + totals), _histogram(magnitude, measured)])
        return TallyTensors(sums, _maxima([magnitude]))

    @classmethod
    def measure(
        cls,
        rollout_log_probs: Column,
        log_probs: Column,
        *,
        loss_mask: Column | None = None,
    ) -> Self:
        """`tensors`, read at once."""
        return cls.from_tensors(*cls.tensors(rollout_log_probs, log_probs, loss_mask=loss_mask))

    @property
    def clamped(self) -> int:
        """Measured tokens with `|delta|` above 300 nats, whose ratio is bounded."""
        return int(self._sum("clamped"))

    @property
    def mean_ratio(self) -> float:
        """Mean importance ratio."""
        return self._mean("ratio")

    @property
    def k1(self) -> float:
        """Mean of `rollout_log_prob - log_prob`."""
        return self._mean("k1")

    @property
    def k3(self) -> float:
        """Mean of `ratio - 1 - log(ratio)`."""
        return self._mean("k3")

    @property
    def effective_sample_size(self) -> float:
        """Tokens that the ratio-weighted batch is worth, in (0, tokens]; 0 of no token."""
        squares = self._sum("ratio_squared")
        return self._sum("ratio") / squares * self._sum("ratio") if squares else 0.0

    @property
    def mean_abs_delta(self) -> float:
        """Mean of `|delta|`."""
        return self._mean("abs_delta")

    @property
    def max_abs_delta(self) -> float:
        """Largest `|delta|`; 0 of no token."""
        return self._max("abs_delta")

    def quantile(self, q: float) -> float:
        """The q-quantile of `|delta|`, rounded up to the end of its bin, NaN of no token.

        Exactly: with `x` the `ceil(q * tokens)`-th smallest `|delta|` (at least the first), the
        result is in `[x, 17/16 x]` for `x` in [2**-24, 64); in `[x, 2**-24]` below; and the
        maximum above. The bins merge exactly, so parts and whole give the same.
        """
        rank = _rank(q, self.tokens)
        if not self.tokens:
            return math.nan
        at = int(np.searchsorted(np.cumsum(self.sums[-self.BINS :]), rank))
        return min(_bin_end(at), self.max_abs_delta)

    def summary(self) -> dict[str, float]:
        """What there is to report, by name."""
        return {
            "tokens": self.tokens,
            "non_finite": self.non_finite,
            "clamped": self.clamped,
            "mean_ratio": self.mean_ratio,
            "k1": self.k1,
            "k3": self.k3,
            "effective_sample_size": self.effective_sample_size,
            "mean_abs_delta": self.mean_abs_delta,
            "p50_abs_delta": self.quantile(0.5),
            "p99_abs_delta": self.quantile(0.99),
            "max_abs_delta": self.max_abs_delta,
        }


class DriftSplit(Tally):
    """What a trainer without the supports would see as drift, split into its two causes.

    Over the tokens in the loss, with `m` the mass that the trainer gives to the support:

        rollout_log_prob - full_log_prob = -log m + (rollout_log_prob - log_prob)
        drift                            = truncation + numeric

    `truncation` is the price of a full-vocabulary softmax and is gone once the trainer scores on
    the supports; `numeric` (kernels, precision, stale weights) stays. `mean_numeric` is the `k1`
    of `LogProbMismatch`. Means over no token are NaN; a token with a log-prob that is NaN or
    infinite is `non_finite`.
    """

    __slots__ = ()
    SUMS = ("drift", "truncation", "numeric", "abs_numeric")
    MAXIMA = ("truncation", "abs_numeric")

    @classmethod
    def tensors(
        cls,
        rollout_log_probs: Column,
        full_log_probs: Column,
        *,
        log_probs: Column | None = None,
        log_support_mass: Column | None = None,
        loss_mask: Column | None = None,
    ) -> TallyTensors:
        """Measure on the device of `full_log_probs`, in float64, with no device-to-host sync.

        Args:
            rollout_log_probs: float `[R]`, or a list with a piece for each sample.
            full_log_probs: the trainer's, over the whole vocabulary.
            log_probs, log_support_mass: one of the two: the trainer's log-probs over the
                supports, or the log of the mass that it gives to them.
            loss_mask: as in `LogProbMismatch.tensors`.

        Raises:
            ReplayError: both or neither of the two, lengths that differ, or anything that is no
                such column.
        """
        name, other = "log_probs", log_probs
        if log_support_mass is not None:
            name, other = "log_support_mass", log_support_mass
        if other is None or (log_probs is not None and log_support_mass is not None):
            raise ReplayError(
                "the drift cannot be split",
                expected="log_probs or log_support_mass, one of them",
                got="neither" if other is None else "both",
                consequence="truncation could not be told from numeric drift",
            )
        (full, old, given), kept = _columns(
            {"full_log_probs": full_log_probs, "rollout_log_probs": rollout_log_probs, name: other},
            loss_mask,
        )
        truncation = -given if log_probs is None else given - full
        drift = old - full
        numeric = drift - truncation if log_probs is None else old - given
        finite = torch.isfinite(drift) & torch.isfinite(truncation) & torch.isfinite(numeric)
        measured = kept & finite
        drift, truncation, numeric = (
            torch.where(measured, part, 0.0) for part in (drift, truncation, numeric)
        )
        size = numeric.abs()
        sums = _totals([measured, kept & ~finite, drift, truncation, numeric, size])
        return TallyTensors(sums, _maxima([truncation, size]))

    @classmethod
    def measure(
        cls,
        rollout_log_probs: Column,
        full_log_probs: Column,
        *,
        log_probs: Column | None = None,
        log_support_mass: Column | None = None,
        loss_mask: Column | None = None,
    ) -> Self:
        """`tensors`, read at once."""
        sums, maxima = cls.tensors(
            rollout_log_probs,
            full_log_probs,
            log_probs=log_probs,
            log_support_mass=log_support_mass,
            loss_mask=loss_mask,
        )
        return cls.from_tensors(sums, maxima)

    @property
    def mean_drift(self) -> float:
        """Mean of `rollout_log_prob - full_log_prob`."""
        return self._mean("drift")

    @property
    def mean_truncation(self) -> float:
        """Mean of `-log m`."""
        return self._mean("truncation")

    @property
    def mean_numeric(self) -> float:
        """Mean of `rollout_log_prob - log_prob`."""
        return self._mean("numeric")

    @property
    def mean_abs_numeric(self) -> float:
        """Mean of `|rollout_log_prob - log_prob|`."""
        return self._mean("abs_numeric")

    @property
    def max_truncation(self) -> float:
        """Largest `-log m`; 0 of no token."""
        return self._max("truncation")

    @property
    def max_abs_numeric(self) -> float:
        """Largest `|rollout_log_prob - log_prob|`; 0 of no token."""
        return self._max("abs_numeric")

    def summary(self) -> dict[str, float]:
        """What there is to report, by name."""
        return {
            "tokens": self.tokens,
            "non_finite": self.non_finite,
            "mean_drift": self.mean_drift,
            "mean_truncation": self.mean_truncation,
            "mean_numeric": self.mean_numeric,
            "mean_abs_numeric": self.mean_abs_numeric,
            "max_truncation": self.max_truncation,
            "max_abs_numeric": self.max_abs_numeric,
        }


# Supports


def support_log_probs(
    logits: Float[Tensor, "T V"],
    plan: ReplayPlan,
    *,
    temperature: float | Float[Tensor, " R"] = 1.0,
) -> Float[Tensor, " N"]:
    """The trainer's log-prob of every support id, normalised over its support.

    The counterpart of `Rollout.support_log_probs`, in the same order: row after row, a row's ids
    ascending, sample after sample. A plan of whole responses gives the values of

        np.concatenate([rollout.support_log_probs for rollout in rollouts])

    and one of a context-parallel rank those of its rows, `layout.response_indices(i)` of sample i:

        rows = np.repeat(np.arange(len(mask)), mask.lengths)
        rollout.support_log_probs[np.isin(rows, layout.response_indices(i))]

    Unrestricted rows have no values, as their rows of the mask have no ids, although the plan
    holds their sampled token. A plan with `num_missing > 0` has ids that the rollout's masks lack,
    and the values of these too.

    Equivalent to a log-softmax over each row's support, by one gather and sums over segments: no
    loop, no dense mask, no device-to-host sync, no gradient.

    Args:
        logits: float `[T, V]`, before temperature, with all columns of the vocabulary.
        plan: the micro-batch, as `ReplayPlan.build` laid it out.
        temperature: divides the logits; a number, or float `[R]` with one for each row.

    Returns:
        float32 `[N]`, float64 where the logits are; NaN in a row with a NaN, a +inf, or nothing
        but -inf on its support.

    Raises:
        ReplayError: logits that do not fit the plan, a temperature not above 0, or a vocabulary
            that is sharded: the ids of one support then lie on several ranks, and a rank has
            values for its own alone.
    """
    check_kind(plan, ReplayPlan, "plan")
    if plan.parallel.tp_size > 1:
        raise ReplayError(
            "the vocabulary is sharded",
            expected="a plan with tp_size 1, and logits of the whole vocabulary",
            got=f"tp_size {plan.parallel.tp_size}",
            consequence="a rank would return its own part of each support, in no rollout's order",
        )
    plan.check_logits(logits)
    divisor = row_temperature(temperature, plan, logits.dtype)
    restricted = np.flatnonzero(~plan.host_unrestricted)
    supports, index = plan.of_rows(restricted), to_device(restricted, plan.device)
    row_of_id = supports.row_of_id()
    at_ids = logits.detach()[plan.rows[index][row_of_id], supports.ids.long()]
    x = at_ids.to(accumulator(logits.dtype))
    x = x / (divisor[index][row_of_id] if isinstance(divisor, Tensor) else divisor)
    top = _segments(x, "max", supports.offsets)
    shifted = x - top[row_of_id]
    total = _segments(shifted.double().exp(), "sum", supports.offsets)
    return shifted - total.log().to(x.dtype)[row_of_id]


class SupportKL(Tally):
    """The exact KL(rollout || trainer) of restricted rows, over their supports, in nats.

    What `support_kl` says row by row, summed over the tokens in the loss, on the device and
    without raising over values. Unrestricted rows take no part: the engine says nothing of its
    distribution there. A row is `non_finite` where its KL is NaN or infinite, and `unnormalised`
    where the probabilities of one of the two do not sum to 1 (within 1e-3); neither is measured.
    The mean over no token is NaN.
    """

    __slots__ = ()
    COUNTS = ("tokens", "non_finite", "unnormalised")
    SUMS = ("kl",)
    MAXIMA = ("kl",)

    @classmethod
    def tensors(
        cls,
        masks: Masks,
        rollout_support_log_probs: Column,
        trainer_support_log_probs: Column,
        *,
        loss_mask: Column | None = None,
    ) -> TallyTensors:
        """Measure on the device of the trainer's, in float64, with no device-to-host sync.

        Args:
            masks: the supports, `n` rows and `N` ids; or a list with a mask for each sample.
            rollout_support_log_probs: float `[N]`, or a list with a piece for each sample
                (`Rollout.support_log_probs`).
            trainer_support_log_probs: float `[N]`, or such a list (see `support_log_probs`).
            loss_mask: bool or 0/1 `[n]`, or such a list. As in `LogProbMismatch.tensors`.

        Raises:
            ReplayError: lengths that differ, or anything that is no such mask or column.
        """
        old = _pieces(rollout_support_log_probs, "rollout_support_log_probs", "f")
        new = _pieces(trainer_support_log_probs, "trainer_support_log_probs", "f")
        flags = _flags(loss_mask)
        mask = _joined_masks(masks, old, new, flags)
        device = _device_of(new.parts)
        restricted = np.flatnonzero(mask.lengths)
        index = to_device(restricted, device)
        offsets = to_device(np.append(mask.offsets[restricted], mask.ids.size), device)
        kept = _kept(flags, len(mask), device)[index]
        log_q, log_p = (column.joined(torch.float64, device) for column in (old, new))
        kl = _segments(_kl_terms(log_q, log_p), "sum", offsets)
        masses = [_segments(values.exp(), "sum", offsets) for values in (log_q, log_p)]
        off = [(mass - 1).abs() > MASS_TOLERANCE for mass in masses]
        finite, unnormalised = torch.isfinite(kl), off[0] | off[1]
        measured = kept & finite & ~unnormalised
        kl = torch.where(measured, kl, 0.0)
        counts = [measured, kept & ~finite, kept & finite & unnormalised]
        return TallyTensors(_totals([*counts, kl]), _maxima([kl]))

    @classmethod
    def measure(
        cls,
        masks: Masks,
        rollout_support_log_probs: Column,
        trainer_support_log_probs: Column,
        *,
        loss_mask: Column | None = None,
    ) -> Self:
        """`tensors`, read at once."""
        sums, maxima = cls.tensors(
            masks, rollout_support_log_probs, trainer_support_log_probs, loss_mask=loss_mask
        )
        return cls.from_tensors(sums, maxima)

    @property
    def unnormalised(self) -> int:
        """Restricted rows in the loss that were left out: their probabilities do not sum to 1."""
        return int(self._sum("unnormalised"))

    @property
    def mean_kl(self) -> float:
        """Mean KL of a measured row."""
        return self._mean("kl")

    @property
    def max_kl(self) -> float:
        """Largest KL of a row; 0 of no token."""
        return self._max("kl")

    def summary(self) -> dict[str, float]:
        """What there is to report, by name."""
        return {
            "tokens": self.tokens,
            "non_finite": self.non_finite,
            "unnormalised": self.unnormalised,
            "mean_kl": self.mean_kl,
            "max_kl": self.max_kl,
        }


@dataclass(frozen=True, eq=False, slots=True)
class SupportStatistics:
    """Sizes and entropies of supports, row by row; read-only, equal by value.

    `a + b` (or `a.merge(b)`) is the statistics of both sets of rows, counts exactly. Rows that the
    loss mask leaves out (the tool tokens of merged turns) are counted in `outside_loss`, and in
    nothing else: no sampler was restricted to their supports. Across ranks:

        sums, maxima = SupportStatistics.of(rollouts).to_tensors(vocab_size, device)
        dist.all_reduce(sums, dist.ReduceOp.SUM)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        statistics = SupportStatistics.from_tensors(sums, maxima)

    Args:
        size_counts: int `[m]`, how many rows have a support of each size; at 0 the unrestricted
            rows. Kept as int64 `[max_size + 1]`, without zeros at the end.
        entropy_rows: rows whose support's entropy is known: the restricted rows of rollouts with
            `support_log_probs`.
        entropy_sum, entropy_max: of those, in nats.
        outside_loss: rows that the loss mask leaves out.

    Raises:
        ReplayError: counts that are none, entropies that are negative or not finite, or those of
            more rows than are restricted.
    """

    size_counts: IntArray
    entropy_rows: int = 0
    entropy_sum: float = 0.0
    entropy_max: float = 0.0
    outside_loss: int = 0

    __hash__ = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        given = integer_array(self.size_counts, "size_counts")
        # in float64, which does not wrap around: neither rows nor ids may be more than it counts
        ids = given.astype(np.float64) @ np.maximum(np.arange(given.size), 1)
        if not given.size or (given < 0).any() or not ids < _MOST:
            got = f"{shown(self.size_counts)}, of {ids:.0f} ids"
            raise _not_a_tally("size_counts", "at least one count, none below 0", got)
        counts = np.trim_zeros(given[1:], "b")
        counts = np.concatenate([given[:1], counts])
        object.__setattr__(self, "size_counts", frozen(counts))
        for name in ("entropy_rows", "outside_loss"):
            object.__setattr__(self, name, _row_count(getattr(self, name), name))
        for name in ("entropy_sum", "entropy_max"):
            object.__setattr__(self, name, _finite_number(getattr(self, name), name))
        restricted = self.rows - self.unrestricted
        if self.entropy_rows > restricted:
            raise _not_a_tally("entropy_rows", f"at most {restricted}", f"{self.entropy_rows}")
        entropies = (self.entropy_sum, self.entropy_max)
        if min(entropies) < 0 or (not self.entropy_rows and max(entropies) > 0):
            got = f"sum {self.entropy_sum} and maximum {self.entropy_max}"
            raise _not_a_tally("entropies", "none below 0, and 0 of no row", got)

    @classmethod
    def zero(cls) -> SupportStatistics:
        """The statistics of no row."""
        return cls(np.zeros(1, np.int64))

    @classmethod
    def of(cls, rollouts: Rollout | Iterable[Rollout]) -> SupportStatistics:
        """Those of the response rows of the rollouts."""
        listed: Any = rollouts if is_iterable(rollouts) else [rollouts]
        return sum((cls._of_one(rollout) for rollout in listed), cls.zero())

    @classmethod
    def _of_one(cls, rollout: Any) -> SupportStatistics:
        if not isinstance(rollout, Rollout):
            raise ReplayError(
                "what is measured is no rollout",
                expected="a Rollout, or an iterable of such",
                got=shown(rollout),
                consequence="there would be no supports to measure",
            )
        mask, log_q = rollout.sampling_mask, rollout.support_log_probs
        entropy = None if log_q is None else support_entropy(mask, log_q)
        return cls.of_rows(mask, rollout.loss_mask, entropy)

    @classmethod
    def of_rows(
        cls, mask: RolloutSamplingMask, loss_mask: BoolArray, entropy: Float64Array | None
    ) -> SupportStatistics:
        """Those of one response, whose `support_entropy` `[n]`, where known, is there already."""
        counts = np.bincount(mask.lengths[loss_mask], minlength=1)
        outside = int(loss_mask.size - np.count_nonzero(loss_mask))
        if entropy is None:
            return cls(counts, outside_loss=outside)
        kept = entropy[loss_mask & ~mask.unrestricted]
        return cls(counts, kept.size, float(kept.sum()), float(kept.max(initial=0.0)), outside)

    @classmethod
    def from_tensors(cls, sums: Tensor, maxima: Tensor) -> SupportStatistics:
        """Read (reduced) tensors of `to_tensors`; this waits for the device."""
        own, (largest,) = _vector(sums, "sums", None), _vector(maxima, "maxima", 1).tolist()
        counts = np.delete(own, [2]) if own.size > 3 else np.full(1, math.nan)
        if not _are_counts(counts):
            raise _not_a_tally("counts", "those of to_tensors", shown(own))
        outside, rows, *_ = counts.astype(np.int64).tolist()
        return cls(own[3:].astype(np.int64), rows, float(own[2]), largest, outside)

    def to_tensors(self, max_size: int, device: torch.device | str | None = None) -> TallyTensors:
        """The statistics as two float64 tensors, for a reduction.

        Args:
            max_size: the largest size there is a count for, the same on every rank; the size of
                the vocabulary is always enough.
            device: where the tensors shall be.

        Returns:
            sums `[max_size + 4]`: `outside_loss`, `entropy_rows`, `entropy_sum`, and
            `size_counts` from 0 to `max_size`. maxima `[1]`: `entropy_max`.

        Raises:
            ReplayError: a support larger than `max_size`.
        """
        padding = check_count(max_size, "max_size") - self.max_size
        if padding < 0:
            raise _not_a_tally("sizes", f"none above max_size={max_size}", f"{self.max_size}")
        head = np.array([self.outside_loss, self.entropy_rows, self.entropy_sum])
        sums = np.concatenate([head, self.size_counts, np.zeros(padding)])
        return TallyTensors(
            torch.tensor(sums, device=device),
            torch.tensor([self.entropy_max], dtype=torch.float64, device=device),
        )

    def merge(self, other: SupportStatistics) -> SupportStatistics:
        """The statistics of the rows of both."""
        if not isinstance(other, SupportStatistics):
            raise _not_a_tally("what is merged", "a SupportStatistics", shown(other))
        short, long = sorted((self.size_counts, other.size_counts), key=len)
        counts = long.copy()
        counts[: short.size] += short
        return SupportStatistics(
            counts,
            self.entropy_rows + other.entropy_rows,
            self.entropy_sum + other.entropy_sum,
            max(self.entropy_max, other.entropy_max),
            self.outside_loss + other.outside_loss,
        )

    def __add__(self, other: SupportStatistics) -> SupportStatistics:
        return self.merge(other) if isinstance(other, SupportStatistics) else NotImplemented

    def _scalars(self) -> tuple[int, float, float, int]:
        return self.entropy_rows, self.entropy_sum, self.entropy_max, self.outside_loss

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SupportStatistics):
            return NotImplemented
        same_sizes = np.array_equal(self.size_counts, other.size_counts)
        return same_sizes and self._scalars() == other._scalars()

    def __reduce__(self) -> tuple[Any, ...]:
        return SupportStatistics, (self.size_counts, *self._scalars())

    def summary(self) -> dict[str, float]:
        """What there is to report, by name; NaN where it is unknown."""
        median, high = (self.size_quantile(q) for q in (0.5, 0.99))
        return {
            "rows": self.rows,
            "outside_loss": self.outside_loss,
            "unrestricted": self.unrestricted,
            "forced": self.forced,
            "ids": self.ids,
            "mean_size": self.mean_size,
            "p50_size": math.nan if median is None else median,
            "p99_size": math.nan if high is None else high,
            "max_size": self.max_size,
            "entropy_rows": self.entropy_rows,
            "mean_entropy": self.mean_entropy,
            "max_entropy": self.entropy_max,
        }

    @property
    def rows(self) -> int:
        """All rows in the loss."""
        return int(self.size_counts.sum())

    @property
    def unrestricted(self) -> int:
        """Rows that are scored over the full vocabulary; they have no size."""
        return int(self.size_counts[0])

    @property
    def forced(self) -> int:
        """Rows with a single id: greedy steps."""
        return int(self.size_counts[1]) if self.size_counts.size > 1 else 0

    @property
    def ids(self) -> int:
        """Support ids in all."""
        return int(self.size_counts @ np.arange(self.size_counts.size))

    @property
    def mean_size(self) -> float:
        """Mean size of the restricted rows, NaN of none."""
        restricted = self.rows - self.unrestricted
        return self.ids / restricted if restricted else math.nan

    @property
    def max_size(self) -> int:
        """Largest size of a restricted row; 0 of none."""
        return self.size_counts.size - 1

    @property
    def mean_entropy(self) -> float:
        """Mean entropy of the supports where it is known, in nats, NaN where none is."""
        return self.entropy_sum / self.entropy_rows if self.entropy_rows else math.nan

    def size_quantile(self, q: float) -> int | None:
        """The `ceil(q * rows)`-th smallest size (at least the first), exactly.

        Over the restricted rows; None where there is none.
        """
        counts = self.size_counts[1:]
        rank = _rank(q, int(counts.sum()))
        return int(np.searchsorted(np.cumsum(counts), rank)) + 1 if counts.size else None


def support_entropy(mask: RolloutSamplingMask, support_log_probs: Any) -> Float64Array:
    """float64 `[n]`: `-sum(q log q)` over each row's support, in nats; NaN where unrestricted.

    Args:
        mask: the supports.
        support_log_probs: float `[N]`, log q of each id, in the order of `mask.ids`.

    Raises:
        ReplayError: another number of values than ids, a value that is no log-prob, or a row
            whose probabilities do not sum to 1.
    """
    log_q = _per_id(support_log_probs, "support_log_probs", mask)
    # a lone id's log-prob may be rounded to above 0, and no entropy is below
    return np.maximum(_row_sums(-np.exp(log_q) * log_q, mask), 0.0)


def support_kl(
    mask: RolloutSamplingMask,
    rollout_support_log_probs: Any,
    trainer_support_log_probs: Any,
    *,
    loss_mask: Piece | None = None,
) -> Float64Array:
    """float64 `[n]`: the exact KL(rollout || trainer) of each row, over its support.

    With q the rollout's and p the trainer's distribution over the row's ids, the sum of
    `q log(q / p) - q + p`: the KL, since both sum to 1, in a form of which no term is negative and
    whose rounding errors do not pass for divergence. NaN where the row is unrestricted, since the
    engine says nothing of q there, and where the loss mask leaves it out. `SupportKL` sums it over
    a batch, on the device.

    Args:
        mask: the supports.
        rollout_support_log_probs: float `[N]`, log q of each id (`Rollout.support_log_probs`).
        trainer_support_log_probs: float `[N]`, log p of each id, normalised over the support
            (`support_log_probs`).
        loss_mask: bool or 0/1 `[n]`, true where the row takes part. All if None.

    Raises:
        ReplayError: another number of values than ids, a value that is no log-prob (-inf too: it
            would be an infinite KL), or a row whose probabilities do not sum to 1.
    """
    log_q = _per_id(rollout_support_log_probs, "rollout_support_log_probs", mask)
    log_p = _per_id(trainer_support_log_probs, "trainer_support_log_probs", mask)
    kl = _row_sums(_kl_terms(torch.tensor(log_q), torch.tensor(log_p)).numpy(), mask)
    if loss_mask is not None:
        flags = _piece(loss_mask, "loss_mask", "biu")
        rows = {"the mask": len(mask), "loss_mask": flags.numel()}
        _check_lengths({name: _Lengths([count], False) for name, count in rows.items()}, "tokens")
        kl[flags.cpu().numpy() == 0] = math.nan
    return kl


def _joined_masks(
    masks: Masks, old: _Pieces, new: _Pieces, flags: dict[str, _Pieces]
) -> RolloutSamplingMask:
    """The masks as one, checked against the values of their ids and the flags of their rows."""
    alone = isinstance(masks, RolloutSamplingMask)
    listed: Any = [masks] if alone else list(masks) if is_iterable(masks) else masks
    mask = RolloutSamplingMask.concat(listed)
    ids = _Lengths([one.ids.size for one in listed], not alone)
    rows = _Lengths([len(one) for one in listed], not alone)
    values = {"rollout_support_log_probs": old, "trainer_support_log_probs": new}
    for own, columns, of in ((ids, values, "support ids"), (rows, flags, "tokens")):
        given = {name: column.lengths for name, column in columns.items()}
        _check_lengths({"the sampling masks": own, **given}, of)
    return mask


def _kl_terms(log_q: Float[Tensor, " N"], log_p: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """`q log(q / p) - q + p` of each id."""
    delta, q = log_p - log_q, log_q.exp()
    near = delta.clamp_max(1.0)
    # where p is far above q, exp(delta) may overflow though q * exp(delta) = p does not
    far = log_p.exp() - q - q * delta
    return torch.where(delta < 1, q * (torch.expm1(near) - near), far)


def _per_id(values: Any, name: str, mask: RolloutSamplingMask) -> Float64Array:
    """float64 `[N]`, checked: log-probs that are normalised over each support."""
    check_kind(mask, RolloutSamplingMask, "mask")
    if isinstance(values, np.ndarray | Tensor):  # before a wrong length is blamed on some row
        values = host_array(values, "f", 1, lambda got: _not_a_column(name, got))
    if isinstance(values, np.ndarray | list | tuple) and len(values) != mask.ids.size:
        raise ReplayError(
            f"{name} do not match the supports",
            expected=f"{mask.ids.size} values, one for each support id",
            got=f"{len(values)}",
            consequence=_WRONG_PAIRS,
        )
    log_prob_array(values, name, mask)  # checks them as float32; they are measured as they are
    own = np.asarray(values, dtype=np.float64)
    mass = _row_sums(np.exp(own), mask)
    off = np.abs(mass - 1.0) > MASS_TOLERANCE  # NaN, of unrestricted rows, is not above it
    if off.any():
        row = int(np.argmax(off))
        raise ReplayError(
            f"{name} are not normalised over the support",
            expected="probabilities that sum to 1",
            got=f"{mass[row]:.6f}",
            consequence="truncation would be measured as divergence",
            row=row,
        )
    return own


def _row_sums(values: Float64Array, mask: RolloutSamplingMask) -> Float64Array:
    """float64 `[n]`: the sum of each row's values; NaN where the row is unrestricted."""
    sums = np.full(len(mask), math.nan)
    restricted = np.flatnonzero(mask.lengths)
    if restricted.size:
        sums[restricted] = np.add.reduceat(values, mask.offsets[restricted])
    return sums


def _segments(
    values: Float[Tensor, " N"], reduce: str, offsets: Int[Tensor, " rows+1"]
) -> Float[Tensor, " rows"]:
    """The sum or max of each segment, none of them empty; summed in order on every device."""
    if offsets.numel() == 1:  # a kernel over no segment cannot be launched
        return values.new_zeros(0)
    # unsafe spares the sync that checks offsets which this module has made itself
    reduced: Tensor = torch.segment_reduce(values, reduce, offsets=offsets, unsafe=True)
    return reduced


def _row_count(value: Any, name: str) -> int:
    if not is_integer(value) or not 0 <= value < _MOST:
        raise _not_a_tally(name, "a non-negative integer", shown(value))
    return int(value)


def _finite_number(value: Any, name: str) -> float:
    number = isinstance(value, float) or is_integer(value)
    if not number or not abs(value) <= sys.float_info.max:
        raise _not_a_tally(name, "a finite number", shown(value))
    return float(value)


# Columns


class _Lengths(NamedTuple):
    """What columns must have in common."""

    counts: list[int]
    by_sample: bool
    """whether there is one for each sample"""


class _Pieces(NamedTuple):
    """A column as detached tensors."""

    parts: list[Tensor]
    by_sample: bool
    """whether it came as a list with a piece for each sample"""

    @property
    def lengths(self) -> _Lengths:
        return _Lengths([part.numel() for part in self.parts], self.by_sample)

    def joined(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        own = [part.to(device=device, dtype=dtype) for part in self.parts]
        return torch.cat([torch.zeros(0, dtype=dtype, device=device), *own])


def _columns(
    named: dict[str, Any], loss_mask: Any
) -> tuple[list[Float[Tensor, " R"]], Bool[Tensor, " R"]]:
    """float64 columns of one length on the device of the trainer's, and the loss mask as bool."""
    pieces = {name: _pieces(values, name, "f") for name, values in named.items()}
    flags = _flags(loss_mask)
    _check_lengths({name: column.lengths for name, column in {**pieces, **flags}.items()}, "tokens")
    trainers = [p for name in named if name != "rollout_log_probs" for p in pieces[name].parts]
    device = _device_of(trainers)
    columns = [pieces[name].joined(torch.float64, device) for name in named]
    return columns, _kept(flags, columns[0].numel(), device)


def _flags(loss_mask: Any) -> dict[str, _Pieces]:
    """The loss mask under its name; nothing where none was given."""
    return {} if loss_mask is None else {"loss_mask": _pieces(loss_mask, "loss_mask", "biu")}


def _kept(flags: dict[str, _Pieces], rows: int, device: torch.device) -> Bool[Tensor, " R"]:
    """The rows in the loss: all where no mask was given."""
    if not flags:
        return torch.ones(rows, dtype=torch.bool, device=device)
    return flags["loss_mask"].joined(torch.bool, device)


def _device_of(parts: list[Tensor]) -> torch.device:
    return parts[0].device if parts else torch.device("cpu")


def _pieces(values: Any, name: str, kinds: str) -> _Pieces:
    """A column, or a list with a piece for each sample."""
    if not isinstance(values, list | tuple):
        return _Pieces([_piece(values, name, kinds)], False)
    pieces = []
    for sample, value in enumerate(values):
        try:
            pieces.append(_piece(value, name, kinds))
        except ReplayError as error:
            raise error.located(sample=sample) from None
    return _Pieces(pieces, True)


def _piece(values: Any, name: str, kinds: str) -> Tensor:
    """One array or tensor; a tensor stays on its device."""
    if isinstance(values, Tensor) and values.device.type not in ("cpu", "meta"):
        column = values.detach()
        kind = "f" if column.is_floating_point() else "c" if column.is_complex() else "biu"
        plain = column.layout is torch.strided and not column.is_nested
        if not plain or column.ndim != 1 or kind not in kinds:
            raise _not_a_column(name, f"{column.dtype} tensor of shape {list(column.shape)}")
    else:
        own = host_array(values, kinds, 1, lambda got: _not_a_column(name, got))
        wide = np.float64 if kinds == "f" else own.dtype if own.dtype.kind == "b" else np.int64
        # a copy: torch takes no array that cannot be written to, as a rollout's are
        column = torch.tensor(np.ascontiguousarray(own, dtype=wide))
    if kinds != "f" and column.dtype != torch.bool and bool(((column != 0) & (column != 1)).any()):
        raise _not_a_column(name, "other integers than 0 and 1")
    return column


def _check_lengths(lengths: dict[str, _Lengths], of: str) -> None:
    """All columns must be of one length, sample by sample where two come in samples."""
    first, *others = lengths
    in_samples = [name for name in lengths if lengths[name].by_sample]
    pairs = [(first, name) for name in others]
    pairs += [(in_samples[0], name) for name in in_samples[1:] if in_samples[0] != first]
    for model, name in pairs:
        by_sample = model in in_samples and name in in_samples
        wanted, got = (
            lengths[key].counts if by_sample else [sum(lengths[key].counts)]
            for key in (model, name)
        )
        if len(wanted) != len(got):
            raise _unequal(name, model, f"{len(wanted)} samples", len(got))
        if wanted != got:
            at = [a != b for a, b in zip(wanted, got, strict=True)].index(True)
            sample = at if by_sample else None
            raise _unequal(name, model, f"{wanted[at]} {of}", got[at], sample)


def _unequal(
    name: str, model: str, expected: str, got: int, sample: int | None = None
) -> ReplayError:
    return ReplayError(
        f"{name} and {model} differ in length",
        expected=expected,
        got=f"{got}",
        consequence=_WRONG_PAIRS,
        sample=sample,
    )


def _totals(parts: list[Tensor]) -> Float[Tensor, " K"]:
    return torch.stack([part.sum(dtype=torch.float64) for part in parts])


def _maxima(parts: list[Float[Tensor, " R"]]) -> Float[Tensor, " M"]:
    """The largest of each, at least 0: what a rank without tokens brings to a MAX reduction."""
    return torch.stack([torch.cat([part.new_zeros(1), part]).max() for part in parts])


def _histogram(magnitude: Float[Tensor, " R"], measured: Bool[Tensor, " R"]) -> Tensor:
    """float64 `[_BINS]`: measured tokens in each bin of `|delta|`."""
    bins = (magnitude.view(torch.int64) >> _SHIFT) - (_FIRST - 1)
    counts = torch.zeros(_BINS, dtype=torch.float64, device=magnitude.device)
    return counts.scatter_add(0, bins.clamp(0, _BINS - 1), measured.to(torch.float64))


def _bin_end(index: int) -> float:
    """The upper end of a bin, infinite for the last."""
    if index == _BINS - 1:
        return math.inf
    return float(np.array((_FIRST + index) << _SHIFT, dtype=np.int64).view(np.float64))


# Checks


def _vector(values: Any, name: str, length: int | None) -> Float64Array:
    """`values` as a read-only float64 copy, of this length unless it is None."""
    own = np.asarray(values) if isinstance(values, list | tuple) else values
    host = host_array(own, "f", 1, lambda got: _not_a_tally(name, "float64 numbers", got))
    wanted = host.size if length is None else length
    if host.size != wanted or host.dtype != np.float64:  # float32 would round the counts
        raise _not_a_tally(name, f"{wanted} float64 numbers", f"{host.size} of {host.dtype}")
    return frozen(host.copy())


def _are_counts(values: Float64Array) -> bool:
    """Are all of them integers that float64 counts exactly? NaN and infinities are none."""
    return bool(((values >= 0) & (values < _MOST) & (values == np.floor(values))).all())


def _rank(q: Any, count: int) -> int:
    """Which of `count` numbers in ascending order is their q-quantile, from 1."""
    if isinstance(q, bool) or not isinstance(q, int | float) or not 0 <= q <= 1:
        raise _not_a_tally("q", "a number in [0, 1]", shown(q))
    # as the decimal that was written: 0.07 * 100 is more than 7 in floating point
    return max(1, math.ceil(Fraction(repr(float(q))) * count))


def _not_a_tally(name: str, expected: str, got: str) -> ReplayError:
    return ReplayError(
        f"{name} do not fit the tally", expected=expected, got=got, consequence=_NO_MERGE
    )


def _not_a_column(name: str, got: str) -> ReplayError:
    flags = name == "loss_mask"
    return ReplayError(
        f"{name} is no column of tokens",
        expected=("bool (or 0 and 1)" if flags else "floating-point")
        + " [R], an array or tensor, or a list of such, one for each sample",
        got=got,
        consequence=_WRONG_PAIRS,
    )
