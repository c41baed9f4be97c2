"""Refusals that say what was expected, what came, where, and what it would have broken."""

from __future__ import annotations

from typing import Any, Self


class ReplayError(ValueError):
    """Input that cannot be replayed exactly.

    The message reads ``sample S, row R: problem: expected E, got G; consequence``. The parts are
    attributes, so that a caller can act on them without parsing text.

    Args:
        problem: what is wrong, in a few words.
        expected: what a valid input would have been.
        got: what came instead.
        consequence: what computing on would have broken.
        sample: index of the sample in the batch, where one is to blame.
        row: index of the response token (support row) in that sample, where one is to blame.
    """

    def __init__(
        self,
        problem: str,
        *,
        expected: str,
        got: str,
        consequence: str,
        sample: int | None = None,
        row: int | None = None,
    ) -> None:
        self.problem = problem
        self.expected = expected
        self.got = got
        self.consequence = consequence
        self.sample = sample
        self.row = row
        places = [f"{k} {v}" for k, v in (("sample", sample), ("row", row)) if v is not None]
        where = f"{', '.join(places)}: " if places else ""
        super().__init__(f"{where}{problem}: expected {expected}, got {got}; {consequence}")

    def _parts(self) -> dict[str, Any]:
        names = ("problem", "expected", "got", "consequence", "sample", "row")
        return {name: getattr(self, name) for name in names}

    def located(self, *, sample: int | None = None, row: int | None = None) -> Self:
        """The same error with its sample or row filled in, for a caller who knows more."""
        parts = self._parts()
        parts["sample"] = sample if sample is not None else self.sample
        parts["row"] = row if row is not None else self.row
        return type(self)(**parts)

    def blamed_on(self, sample: int | None) -> Self:
        """The same error with a sample for its place, and no row."""
        parts = self._parts()
        parts["sample"], parts["row"] = sample, None
        return type(self)(**parts)

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross process boundaries; the default reduction passes positional arguments.
        return _rebuild, (type(self), self._parts())


def _rebuild(cls: type[ReplayError], parts: dict[str, Any]) -> ReplayError:
    return cls(**parts)


class MissingMaskError(ReplayError):
    """The engine returned no sampling mask for a response."""


class MissingTokenError(ReplayError):
    """A sampled token is not in the support that is said to have produced it."""


class BackendError(ReplayError):
    """The backend that was asked for cannot run this call."""
