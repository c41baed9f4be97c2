"""What `inspect` gathers from records, in memory that does not grow with the files."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlreplay.cli._records import KINDS, Kind, Problem, Record, Response
from rlreplay.diagnostics import Float64Array, SupportStatistics, support_entropy
from rlreplay.rollout import Rollout
from rlreplay.sampling_mask import BoolArray, IntArray

PERCENTILES = (0, 1, 10, 25, 50, 75, 90, 99, 100)

_POSITIONS = 64
# the smallest size of each bin: 1, 2, … 16, and then eight in each octave
_SIZE_BINS = np.concatenate([np.arange(1, 8), *(np.arange(8, 16) << k for k in range(28))])

ENTROPY_BIN = 0.1  # nats
_ENTROPY_BINS = 220  # the entropy of 2**31 ids is 21.5

# fp32 rounding of two log-probs; the log of a kept mass is no further above 0
_MASS_ROUNDING = 1e-4
_NO_FULL_LOG_PROBS = "needs full-vocabulary log-probs too"
_ANOTHER_DISTRIBUTION = "the full-vocabulary log-probs are of another distribution (temperature?)"


@dataclass(slots=True)
class Range:
    """Count, sum and extremes of numbers."""

    count: int = 0
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    def add(self, values: Float64Array) -> None:
        """Take in float64 `[m]`."""
        if values.size:
            self.count += values.size
            self.total += float(values.sum())
            self.least = min(self.least, float(values.min()))
            self.most = max(self.most, float(values.max()))

    def to_dict(self) -> dict[str, Any]:
        """`rows`, `mean`, `min` and `max`, null where there are no rows."""
        if not self.count:
            return {"rows": 0, "mean": None, "min": None, "max": None}
        mean = self.total / self.count
        return {"rows": self.count, "mean": mean, "min": self.least, "max": self.most}


class SizeProfile:
    """Support sizes along the response: a histogram of sizes for each stretch of positions.

    There are always 64 stretches. They are `width` tokens long; where a longer response comes,
    neighbours are folded together and the width doubles. Rows of size 0 are left out.
    """

    def __init__(self) -> None:
        self.width = 1
        self.counts = np.zeros((_POSITIONS, _SIZE_BINS.size), np.int64)

    def add(self, lengths: IntArray) -> None:
        """Take in the support sizes `[n]` of one response."""
        while lengths.size > self.width * _POSITIONS:
            folded = self.counts[0::2] + self.counts[1::2]
            self.counts = np.concatenate([folded, np.zeros_like(folded)])
            self.width *= 2
        at = np.flatnonzero(lengths)
        bins = np.searchsorted(_SIZE_BINS, lengths[at], side="right") - 1
        flat = (at // self.width) * _SIZE_BINS.size + bins
        self.counts += np.bincount(flat, minlength=self.counts.size).reshape(self.counts.shape)

    def quantile(self, q: float) -> tuple[Float64Array, IntArray]:
        """(middle position, q-quantile of the sizes) of each stretch that has rows.

        Sizes are exact to 16, and rounded down by less than an eighth above.
        """
        total = self.counts.sum(axis=1)
        rank = np.maximum(1, np.ceil(q * total))
        used = total > 0
        bins = (np.cumsum(self.counts, axis=1) < rank[:, None]).sum(axis=1)
        middles = (np.arange(_POSITIONS) + 0.5) * self.width
        return middles[used], _SIZE_BINS[bins[used]]


@dataclass(slots=True)
class KeptMass:
    """The full-vocabulary mass of supports, as the payloads' log-probs have it.

    A mass above 1 proves that its full-vocabulary log-probs are of another distribution than the
    supports'. So are then those of the other rows, whose mass would only look possible: none is
    reported. A mass that is above 1 by no more than fp32 rounding counts as 1.
    """

    below: Range = field(default_factory=Range)
    rounded: int = 0
    above: int = 0

    def add(self, log_mass: Float64Array) -> None:
        """Take in float64 `[m]`, of restricted rows."""
        possible = log_mass <= _MASS_ROUNDING
        self.above += int(np.count_nonzero(~possible))
        self.rounded += int(np.count_nonzero(possible & (log_mass > 0)))
        self.below.add(np.exp(np.minimum(log_mass[possible], 0.0)))

    def to_dict(self, restricted: int) -> dict[str, Any]:
        """Numbers over those of `restricted` rows whose mass is known, and why others are not."""
        known = Range() if self.above else self.below
        unknown = restricted - known.count
        why = _ANOTHER_DISTRIBUTION if self.above else _NO_FULL_LOG_PROBS if unknown else None
        return {
            **known.to_dict(),
            "rows_rounded_to_one": 0 if self.above else self.rounded,
            "rows_above_one": self.above,
            "rows_unknown": unknown,
            "why_unknown": why,
        }


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong, and where."""

    kind: Kind
    file: str
    line: int | None
    response: int | None
    row: int | None
    message: str

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return {name: getattr(self, name) for name in self.__slots__}


def printable(text: str) -> str:
    """The text with control characters and lone surrogates, which files may hold, escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass(slots=True)
class Inspection:
    """The running state of `inspect`.

    What the loss mask leaves out, such as tool output, is counted and not measured.

    Args:
        max_findings: how many findings are kept with their place; all are counted.
    """

    max_findings: int
    files: list[str] = field(default_factory=list)
    responses: int = 0
    bad_responses: int = 0
    unfinished: int = 0
    engines: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    supports: SupportStatistics = field(default_factory=SupportStatistics.zero)
    entropy_counts: IntArray = field(default_factory=lambda: np.zeros(_ENTROPY_BINS, np.int64))
    log_probs: Range = field(default_factory=Range)
    kept_mass: KeptMass = field(default_factory=KeptMass)
    profile: SizeProfile = field(default_factory=SizeProfile)

    def add(self, record: Record) -> None:
        """Take in one record."""
        if isinstance(record, Problem):
            self._find(record)
        else:
            self.responses += 1
            self.unfinished += record.unfinished
            self.engines[record.engine or "stored"] += 1
            self._measure(record)

    def _find(self, problem: Problem) -> None:
        place, error = problem.place, problem.error
        self.bad_responses += place.response is not None
        self.found[problem.kind] += 1
        if len(self.findings) < self.max_findings:
            message = printable(str(error.blamed_on(None)))  # the row is a field beside it
            self.findings.append(
                Finding(problem.kind, place.file, place.line, place.response, error.row, message)
            )

    def _measure(self, response: Response) -> None:
        rollout, in_loss = response.rollout, response.rollout.loss_mask
        restricted = in_loss & ~rollout.sampling_mask.unrestricted
        self._measure_supports(rollout, restricted)
        if rollout.rollout_log_probs is not None:
            self.log_probs.add(rollout.rollout_log_probs[in_loss].astype(np.float64))
        if response.log_kept_mass is not None:
            self.kept_mass.add(response.log_kept_mass[restricted])

    def _measure_supports(self, rollout: Rollout, restricted: BoolArray) -> None:
        mask, log_q = rollout.sampling_mask, rollout.support_log_probs
        entropy = None if log_q is None else support_entropy(mask, log_q)
        self.supports += SupportStatistics.of_rows(mask, rollout.loss_mask, entropy)
        self.profile.add(np.where(restricted, mask.lengths, 0))
        if entropy is not None:
            bins = np.minimum(entropy[restricted] / ENTROPY_BIN, _ENTROPY_BINS - 1)
            self.entropy_counts += np.bincount(bins.astype(np.int64), minlength=_ENTROPY_BINS)

    @property
    def is_sound(self) -> bool:
        """Was nothing found?"""
        return not self.found

    def to_dict(self) -> dict[str, Any]:
        """All there is to report, as JSON: the keys are stable, unknown numbers null."""
        supports = self.supports
        return {
            "files": self.files,
            "responses": {
                "read": self.responses,
                "bad": self.bad_responses,
                "unfinished": self.unfinished,
            },
            "producers": dict(sorted(self.engines.items())),
            "rows": {
                "total": supports.rows + supports.outside_loss,
                "not_in_loss": supports.outside_loss,
                "in_loss": supports.rows,
                "forced": supports.forced,
                "unrestricted": supports.unrestricted,
            },
            **_supports_to_dict(supports),
            "kept_mass": self.kept_mass.to_dict(supports.rows - supports.unrestricted),
            "rollout_log_probs": self.log_probs.to_dict(),
            "findings": {
                "total": self.found.total(),
                "by_kind": {kind: self.found[kind] for kind in KINDS},
                "first": [finding.to_dict() for finding in self.findings],
            },
        }


def _supports_to_dict(supports: SupportStatistics) -> dict[str, Any]:
    known = supports.entropy_rows > 0
    return {
        "support_size": {
            "mean": supports.mean_size if supports.ids else None,
            "percentiles": {str(p): supports.size_quantile(p / 100) for p in PERCENTILES},
            "ids": supports.ids,
        },
        "support_entropy": {
            "rows": supports.entropy_rows,
            "mean": supports.mean_entropy if known else None,
            "max": supports.entropy_max if known else None,
        },
    }
