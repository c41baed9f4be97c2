"""Rollout-versus-trainer mismatch, the drift that truncation makes, and statistics of supports.

Shapes: `R` response tokens in a call, `n` rows of a mask, `N` support ids in total.

What is summed over tokens is a frozen `Tally`: a vector of sums and one of maxima, both float64 and
of fixed length. Tallies of parts of a batch (samples, micro-batches, ranks) add up to the tally of
the whole: counts exactly, sums up to rounding. A trainer may also take the two tensors before they
leave the device, reduce them itself (one SUM, one MAX), and read the result:

    sums, maxima = LogProbMismatch.tensors(rollout_log_probs, log_probs, loss_mask)
    dist.all_reduce(sums, dist.ReduceOp.SUM)
    dist.all_reduce(maxima, dist.ReduceOp.MAX)
    mismatch = LogProbMismatch.from_tensors(sums, maxima)

Tool tokens of merged turns have a log-prob of 0 that no policy gave: leave them out by the loss
mask. Wrong lengths, shapes and types are refused. Numbers that cannot be measured (NaN, infinities)
are counted in `non_finite` and left out of everything else: to refuse them would take a device
sync, and one rank would raise while the others wait in their all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlreplay.errors import ReplayError
from rlreplay.rollout import Rollout, log_prob_array
from rlreplay.sampling_mask import (
    IntArray,
    RolloutSamplingMask,
    check_count,
    frozen,
    host_array,
    integer_array,
    shown,
)

Float64Array = npt.NDArray[np.float64]
Piece = Tensor | npt.NDArray[Any]
Column = Piece | Sequence[Piece]

# Bins of |delta|: 16 equal ones in each octave of [2**-24, 2**6), one below and one above. fp32
# rounding of a log-prob ends where they begin; a bin is read off a float64's leading bits.
_SUB_BITS = 4
_LOWEST_OCTAVE, _OCTAVES = -24, 30
_BINS = (_OCTAVES << _SUB_BITS) + 2
_SHIFT = 52 - _SUB_BITS
_FIRST = (1023 + _LOWEST_OCTAVE) << _SUB_BITS

_LARGEST_LOG_RATIO = 300.0

# How far the probabilities of one support may sum from 1: fp32 rounding stays below, log-probs
# normalised over the whole vocabulary miss it by the truncated mass.
_MASS_TOLERANCE = 1e-3

_WRONG_PAIRS = "log-probs of different tokens would be compared"
_NO_MERGE = "the numbers of one batch would be read as those of another"


class TallyTensors(NamedTuple):
    """A tally on its way through a reduction: SUM all-reduce the one, MAX all-reduce the other."""

    sums: Float[Tensor, " K"]
    maxima: Float[Tensor, " M"]


@dataclass(frozen=True, init=False, eq=False, repr=False, slots=True)
class Tally:
    """Sums and maxima over tokens, float64 `[K]` and `[M]`; read-only, equal by value.

    `a + b` (or `a.merge(b)`) is the tally of both sets of tokens.

    Raises:
        ReplayError: vectors of another length than this class has, a count that is no count, or a
            merge of tallies of two classes.
    """

    SUMS: ClassVar[tuple[str, ...]] = ()
    MAXIMA: ClassVar[tuple[str, ...]] = ()
    BINS: ClassVar[int] = 0

    sums: Float64Array
    maxima: Float64Array

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, sums: npt.ArrayLike | Tensor, maxima: npt.ArrayLike | Tensor) -> None:
        own = _vector(sums, "sums", len(self.SUMS) + self.BINS)
        counts = np.concatenate([own[:2], own[len(self.SUMS) :]])
        # NaN fails the comparison, and `inf` the second one
        if not ((counts >= 0) & (counts == np.floor(counts)) & (counts < 2.0**53)).all():
            raise _not_a_tally("counts", "non-negative integers", "other numbers")
        object.__setattr__(self, "sums", own)
        object.__setattr__(self, "maxima", _vector(maxima, "maxima", len(self.MAXIMA)))

    @classmethod
    def zero(cls) -> Self:
        """The tally of no token: `zero() + a == a`."""
        return cls(np.zeros(len(cls.SUMS) + cls.BINS), np.zeros(len(cls.MAXIMA)))

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

    def summary(self) -> dict[str, float]:
        """What there is to report, by name."""
        return {"tokens": self.tokens, "non_finite": self.non_finite}

    @property
    def tokens(self) -> int:
        """Tokens that were measured: in the loss, and finite."""
        return int(self._sum("tokens"))

    @property
    def non_finite(self) -> int:
        """Tokens in the loss that could not be measured, and that nothing else counts."""
        return int(self._sum("non_finite"))

    def _sum(self, name: str) -> float:
        return float(self.sums[self.SUMS.index(name)])

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

    Means over no token are NaN. A token is `non_finite` where a log-prob is NaN or infinite. A
    ratio beyond e**300 or below e**-300 is counted as that, so that its square is a number.
    """

    __slots__ = ()
    SUMS = ("tokens", "non_finite", "ratio", "ratio_squared", "k1", "k3", "abs_delta")
    MAXIMA = ("abs_delta",)
    BINS = _BINS

    @classmethod
    def tensors(
        cls,
        rollout_log_probs: Column,
        log_probs: Column,
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
        near = delta.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
        ratio = torch.where(measured, torch.exp(near), 0.0)
        magnitude = delta.abs()
        totals = [measured, kept & ~finite, ratio, ratio * ratio, -delta]
        totals += [torch.expm1(near) - delta, magnitude]
        histogram = _histogram(magnitude, measured)
        return TallyTensors(torch.cat([_totals(totals), histogram]), _maxima([magnitude]))

    @classmethod
    def measure(
        cls,
        rollout_log_probs: Column,
        log_probs: Column,
        loss_mask: Column | None = None,
    ) -> Self:
        """`tensors`, read at once."""
        return cls.from_tensors(*cls.tensors(rollout_log_probs, log_probs, loss_mask))

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
        if isinstance(q, bool) or not isinstance(q, int | float) or not 0 <= q <= 1:
            raise _not_a_tally("q", "a number in [0, 1]", shown(q))
        if not self.tokens:
            return math.nan
        rank = max(1, math.ceil(q * self.tokens))
        at = int(np.searchsorted(np.cumsum(self.sums[len(self.SUMS) :]), rank))
        return min(_bin_end(at), self.max_abs_delta)

    def summary(self) -> dict[str, float]:
        """What there is to report, by name."""
        return {
            "tokens": self.tokens,
            "non_finite": self.non_finite,
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
    SUMS = ("tokens", "non_finite", "drift", "truncation", "numeric", "abs_numeric")
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


@dataclass(frozen=True, eq=False, slots=True)
class SupportStatistics:
    """Sizes and entropies of supports, row by row; mergeable with `+`, counts exactly.

    Args:
        size_counts: int64 `[largest size + 1]`, how many rows have a support of each size; at 0
            the unrestricted rows.
        entropy_rows: rows whose support's entropy is known: the restricted rows of rollouts with
            `support_log_probs`.
        entropy_sum, entropy_max: of those, in nats.
    """

    size_counts: IntArray
    entropy_rows: int = 0
    entropy_sum: float = 0.0
    entropy_max: float = 0.0

    __hash__ = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        counts = integer_array(self.size_counts, "size_counts")
        numbers = (self.entropy_rows, self.entropy_sum, self.entropy_max)
        sound = counts.size > 0 and bool((counts >= 0).all())
        if not sound or not all(isinstance(n, int | float) and 0 <= n < math.inf for n in numbers):
            got = f"{shown(self.size_counts)}, {numbers}"
            raise _not_a_tally("the statistics", "counts and sums that are not negative", got)
        object.__setattr__(self, "size_counts", frozen(counts.copy()))

    @classmethod
    def zero(cls) -> SupportStatistics:
        """The statistics of no row."""
        return cls(np.zeros(1, np.int64))

    @classmethod
    def of(cls, rollouts: Rollout | Iterable[Rollout]) -> SupportStatistics:
        """Those of every response row of the rollouts, tool tokens too: they are forced rows."""
        if not isinstance(rollouts, Rollout | Iterable):
            raise _not_a_tally("what is measured", "rollouts", shown(rollouts))
        total = cls.zero()
        for rollout in [rollouts] if isinstance(rollouts, Rollout) else rollouts:
            if not isinstance(rollout, Rollout):
                raise _not_a_tally("what is measured", "a Rollout", shown(rollout))
            mask = rollout.sampling_mask
            counts = np.bincount(mask.lengths, minlength=1)
            if rollout.support_log_probs is None:
                total += cls(counts)
                continue
            entropy = support_entropy(mask, rollout.support_log_probs)[~mask.unrestricted]
            total += cls(
                counts, entropy.size, float(entropy.sum()), float(entropy.max(initial=0.0))
            )
        return total

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
        )

    __add__ = merge

    def to_tensors(self, max_size: int, device: torch.device | str | None = None) -> TallyTensors:
        """Float64 sums `[max_size + 3]` and maxima `[1]`, for a SUM and a MAX all-reduce.

        Args:
            max_size: the largest support that any rank may have: the cap of the sampler.
        """
        limit = check_count(max_size, "max_size")
        if self.size_counts.size > limit + 1:
            got = f"a support of {self.size_counts.size - 1} ids"
            raise _not_a_tally("the sizes", f"at most {limit} ids", got)
        sums = np.zeros(limit + 3)
        sums[: self.size_counts.size] = self.size_counts
        sums[-2:] = self.entropy_rows, self.entropy_sum
        return TallyTensors(
            torch.tensor(sums, device=device),
            torch.tensor([self.entropy_max], dtype=torch.float64, device=device),
        )

    @classmethod
    def from_tensors(cls, sums: Tensor, maxima: Tensor) -> SupportStatistics:
        """Read (reduced) tensors; this waits for the device."""
        own, most = _vector(sums, "sums", sums.numel()), _vector(maxima, "maxima", 1)
        counts = np.trim_zeros(own[:-2], "b")
        whole = np.zeros(max(1, counts.size), np.int64)
        whole[: counts.size] = counts
        return cls(whole, int(own[-2]), float(own[-1]), float(most[0]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SupportStatistics):
            return NotImplemented
        ours, theirs = (
            (np.trim_zeros(s.size_counts, "b").tolist(), s.entropy_rows, s.entropy_sum)
            for s in (self, other)
        )
        return ours == theirs and self.entropy_max == other.entropy_max

    @property
    def rows(self) -> int:
        """All rows."""
        return int(self.size_counts.sum())

    @property
    def unrestricted(self) -> int:
        """Rows that are scored over the full vocabulary; they have no size."""
        return int(self.size_counts[0])

    @property
    def forced(self) -> int:
        """Rows with a single id: greedy steps, tool output."""
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
    def mean_entropy(self) -> float:
        """Mean entropy of the supports where it is known, in nats, NaN where none is."""
        return self.entropy_sum / self.entropy_rows if self.entropy_rows else math.nan

    def size_percentile(self, percent: float) -> int | None:
        """The `ceil(percent / 100 * rows)`-th smallest size (at least the first), exactly.

        Over the restricted rows; None where there is none.
        """
        in_range = isinstance(percent, int | float) and 0 <= percent <= 100
        if isinstance(percent, bool) or not in_range:
            raise _not_a_tally("the percentile", "a number in [0, 100]", shown(percent))
        counts = self.size_counts[1:]
        total = int(counts.sum())
        if not total:
            return None
        rank = max(1, math.ceil(percent / 100 * total))
        return int(np.searchsorted(np.cumsum(counts), rank)) + 1


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
    mask: RolloutSamplingMask, rollout_support_log_probs: Any, trainer_support_log_probs: Any
) -> Float64Array:
    """float64 `[n]`: the exact KL(rollout || trainer) of each row, over its support.

    With q the rollout's and p the trainer's distribution over the row's ids, the sum of
    `q log(q / p) - q + p`: the KL, since both sum to 1, in a form of which no term is negative and
    whose rounding errors do not pass for divergence. NaN where the row is unrestricted: the engine
    says nothing of q there.

    Args:
        mask: the supports.
        rollout_support_log_probs: float `[N]`, log q of each id (`Rollout.support_log_probs`).
        trainer_support_log_probs: float `[N]`, log p of each id, normalised over the support: the
            trainer's logits at the ids, less each row's logsumexp.

    Raises:
        ReplayError: another number of values than ids, a value that is no log-prob (-inf too: it
            would be an infinite KL), or a row whose probabilities do not sum to 1.
    """
    log_q = _per_id(rollout_support_log_probs, "rollout_support_log_probs", mask)
    log_p = _per_id(trainer_support_log_probs, "trainer_support_log_probs", mask)
    delta = log_p - log_q
    q, near = np.exp(log_q), np.minimum(delta, 1.0)
    # where p is far above q, exp(delta) may overflow though q exp(delta) = p does not
    far = np.exp(log_p) - q - q * delta
    return _row_sums(np.where(delta < 1, q * (np.expm1(near) - near), far), mask)


def _per_id(values: Any, name: str, mask: RolloutSamplingMask) -> Float64Array:
    """float64 `[N]`, checked: log-probs that are normalised over each support."""
    if isinstance(values, np.ndarray | Tensor):  # before a wrong length is blamed on some row
        values = host_array(values, "f", 1, lambda got: _not_a_column(name, got))
    if isinstance(values, np.ndarray | list | tuple) and len(values) != mask.ids.size:
        raise ReplayError(
            f"{name} do not match the supports",
            expected=f"{mask.ids.size} values, one for each support id",
            got=f"{len(values)}",
            consequence=_WRONG_PAIRS,
        )
    # float32 checks the values; a float64 array is measured as it is
    checked = log_prob_array(values, name, mask)
    own = np.asarray(values if isinstance(values, np.ndarray) else checked, dtype=np.float64)
    mass = _row_sums(np.exp(own), mask)
    off = np.abs(mass - 1.0) > _MASS_TOLERANCE  # NaN, of unrestricted rows, is not above it
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


# Columns


def _columns(
    named: dict[str, Any], loss_mask: Any
) -> tuple[list[Float[Tensor, " R"]], Bool[Tensor, " R"]]:
    """float64 columns of one length on the device of the trainer's, and the loss mask as bool."""
    pieces = {name: _pieces(values, name, "f") for name, values in named.items()}
    if loss_mask is not None:
        pieces["loss_mask"] = _pieces(loss_mask, "loss_mask", "biu")
    _check_lengths(pieces)
    trainers = [p for name in named if name != "rollout_log_probs" for p in pieces[name]]
    device = trainers[0].device if trainers else torch.device("cpu")
    columns = [_joined(pieces[name], torch.float64, device) for name in named]
    if loss_mask is None:
        return columns, torch.ones_like(columns[0], dtype=torch.bool)
    return columns, _joined(pieces["loss_mask"], torch.bool, device)


def _joined(pieces: list[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    own = [piece.to(device=device, dtype=dtype) for piece in pieces]
    return torch.cat([torch.zeros(0, dtype=dtype, device=device), *own])


def _pieces(values: Any, name: str, kinds: str) -> list[Tensor]:
    """A column, or a list with a piece for each sample, as detached tensors."""
    if not isinstance(values, list | tuple):
        return [_piece(values, name, kinds)]
    pieces = []
    for sample, value in enumerate(values):
        try:
            pieces.append(_piece(value, name, kinds))
        except ReplayError as error:
            raise error.located(sample=sample) from None
    return pieces


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


def _check_lengths(pieces: dict[str, list[Tensor]]) -> None:
    """All columns must have the same number of tokens, sample by sample where all are in pieces."""
    first, *others = pieces
    for name in others:
        ours, theirs = ([p.numel() for p in pieces[key]] for key in (first, name))
        in_pieces = len(ours) == len(theirs) > 1
        apart = len(ours) > 1 and len(theirs) > 1 and not in_pieces
        if ours != theirs and (in_pieces or apart or sum(ours) != sum(theirs)):
            at = [a != b for a, b in zip(ours, theirs, strict=True)].index(True) if in_pieces else 0
            raise ReplayError(
                f"{name} and {first} differ in length",
                expected=f"{len(ours)} samples"
                if apart
                else f"{ours[at] if in_pieces else sum(ours)} tokens",
                got=f"{len(theirs) if apart else theirs[at] if in_pieces else sum(theirs)}",
                consequence=_WRONG_PAIRS,
                sample=at if in_pieces else None,
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


def _vector(values: Any, name: str, length: int) -> Float64Array:
    """`values` as a read-only float64 copy of this length."""
    own = np.asarray(values) if isinstance(values, list | tuple) else values
    host = host_array(own, "f", 1, lambda got: _not_a_tally(name, "float64 numbers", got))
    if host.size != length or host.dtype != np.float64:  # float32 would round the counts
        raise _not_a_tally(name, f"{length} float64 numbers", f"{host.size} of {host.dtype}")
    copy = host.copy()
    copy.flags.writeable = False
    return copy


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
