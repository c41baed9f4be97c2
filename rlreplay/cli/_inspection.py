"""What `inspect` gathers from records, in memory that does not grow with the files."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlreplay.cli._payloads import KINDS, Kind, Record
from rlreplay.diagnostics import Float64Array, SupportStatistics, support_entropy
from rlreplay.rollout import Rollout
from rlreplay.sampling_mask import IntArray

PERCENTILES = (0, 1, 10, 25, 50, 75, 90, 99, 100)

_POSITIONS = 64
_SUB_BITS = 3  # sizes to 16 have a bin each, larger ones one of 8 in their octave
_SIZE_BINS = 31 << _SUB_BITS
_SHIFT = 52 - _SUB_BITS
_ZERO = 1023 << _SUB_BITS

ENTROPY_BIN = 0.1  # nats
_ENTROPY_BINS = 220  # the entropy of 2**31 ids is 21.5

# fp32 rounding of two log-probs; the log of a kept mass is no further above 0
_MASS_ROUNDING = 1e-4


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
    neighbours are folded together and the width doubles. Unrestricted rows are left out.
    """

    def __init__(self) -> None:
        self.width = 1
        self.counts = np.zeros((_POSITIONS, _SIZE_BINS), np.int64)

    def add(self, lengths: IntArray) -> None:
        """Take in the support sizes `[n]` of one response."""
        while lengths.size > self.width * _POSITIONS:
            folded = self.counts[0::2] + self.counts[1::2]
            self.counts = np.concatenate([folded, np.zeros_like(folded)])
            self.width *= 2
        at = np.flatnonzero(lengths)
        bins = (lengths[at].astype(np.float64).view(np.int64) >> _SHIFT) - _ZERO
        flat = (at // self.width) * _SIZE_BINS + bins
        self.counts += np.bincount(flat, minlength=self.counts.size).reshape(self.counts.shape)

    def quantile(self, q: float) -> tuple[Float64Array, Float64Array]:
        """(middle position, q-quantile of the sizes) of each stretch that has rows.

        Sizes are exact to 16, and rounded down by less than an eighth above.
        """
        total = self.counts.sum(axis=1)
        rank = np.maximum(1, np.ceil(q * total))
        bins = (np.cumsum(self.counts, axis=1) < rank[:, None]).sum(axis=1)
        sizes = ((bins + _ZERO).astype(np.int64) << _SHIFT).view(np.float64)
        middles = (np.arange(_POSITIONS) + 0.5) * self.width
        return middles[total > 0], sizes[total > 0]


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

    Args:
        max_findings: how many findings are kept with their place; all are counted.
    """

    max_findings: int
    files: list[str] = field(default_factory=list)
    responses: int = 0
    bad_responses: int = 0
    engines: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    supports: SupportStatistics = field(default_factory=SupportStatistics.zero)
    entropy_counts: IntArray = field(default_factory=lambda: np.zeros(_ENTROPY_BINS, np.int64))
    log_probs: Range = field(default_factory=Range)
    kept_mass: Range = field(default_factory=Range)
    kept_mass_above_one: int = 0
    profile: SizeProfile = field(default_factory=SizeProfile)

    def add(self, record: Record) -> None:
        """Take in one record."""
        if record.error is not None:
            self.bad_responses += record.response is not None
            self._find(record)
        if record.rollout is not None:
            self.responses += 1
            self.engines[record.engine or "stored"] += 1
            self._measure(record.rollout, record.log_kept_mass)

    def _find(self, record: Record) -> None:
        assert record.error is not None
        assert record.kind is not None
        self.found[record.kind] += 1
        if len(self.findings) < self.max_findings:
            message = printable(str(record.error.blamed_on(None)))  # the row is a field beside it
            self.findings.append(
                Finding(
                    record.kind, record.file, record.line, record.response, record.error.row,
                    message,
                )
            )  # fmt: skip

    def _measure(self, rollout: Rollout, log_kept_mass: Float64Array | None) -> None:
        mask = rollout.sampling_mask
        self.supports += SupportStatistics.of(rollout)
        self.profile.add(mask.lengths)
        if rollout.rollout_log_probs is not None:
            self.log_probs.add(rollout.rollout_log_probs.astype(np.float64))
        if rollout.support_log_probs is not None:
            entropy = support_entropy(mask, rollout.support_log_probs)[~mask.unrestricted]
            bins = np.clip(entropy / ENTROPY_BIN, 0, _ENTROPY_BINS - 1).astype(np.int64)
            self.entropy_counts += np.bincount(bins, minlength=_ENTROPY_BINS)
        if log_kept_mass is not None:
            log_mass = log_kept_mass[~mask.unrestricted]
            above = log_mass > _MASS_ROUNDING
            self.kept_mass_above_one += int(above.sum())
            self.kept_mass.add(np.exp(log_mass[~above]))

    @property
    def is_sound(self) -> bool:
        """Was nothing found?"""
        return not self.found

    def to_dict(self) -> dict[str, Any]:
        """All there is to report, as JSON: the keys are stable, unknown numbers null."""
        supports = self.supports
        mean_size = supports.mean_size if supports.ids else None
        restricted = supports.rows - supports.unrestricted
        return {
            "files": self.files,
            "responses": {"read": self.responses, "bad": self.bad_responses},
            "producers": dict(sorted(self.engines.items())),
            "rows": {
                "total": supports.rows,
                "forced": supports.forced,
                "unrestricted": supports.unrestricted,
            },
            "support_size": {
                "mean": mean_size,
                "percentiles": {str(p): supports.size_percentile(p) for p in PERCENTILES},
                "ids": supports.ids,
            },
            "support_entropy": {
                "rows": supports.entropy_rows,
                "mean": supports.mean_entropy if supports.entropy_rows else None,
                "max": supports.entropy_max if supports.entropy_rows else None,
            },
            "kept_mass": {
                **self.kept_mass.to_dict(),
                "rows_above_one": self.kept_mass_above_one,
                "rows_unknown": restricted - self.kept_mass.count - self.kept_mass_above_one,
            },
            "rollout_log_probs": self.log_probs.to_dict(),
            "findings": {
                "total": self.found.total(),
                "by_kind": {kind: self.found[kind] for kind in KINDS},
                "first": [finding.to_dict() for finding in self.findings],
            },
        }
