"""What is read from files: a record is one response, or the problem found in its place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from rlreplay.diagnostics import Float64Array
from rlreplay.engines import LogprobsMode, LogProbsOver, OnMissingMask, OnUncommittedToken
from rlreplay.errors import MissingMaskError, MissingTokenError, ReplayError
from rlreplay.rollout import Rollout

Engine = Literal["sglang", "vllm", "slime"]
Kind = Literal[
    "broken_json", "unknown_producer", "missing_mask", "token_outside_support", "invalid",
    "unreadable", "empty",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)

LOST = "its responses are lost"

_OF_PAYLOADS = (
    "engine", "on_missing_mask", "on_uncommitted_token", "logprobs_mode", "log_probs_over",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How files are read; see the loaders in `rlreplay.engines`, whose defaults None stands for.

    Args:
        engine: the producer of all payloads; None tells it from each payload's shape.
        need_prompt: refuse a payload that does not say its prompt.
    """

    engine: Engine | None = None
    vocab_size: int | None = None
    on_missing_mask: OnMissingMask | None = None
    on_uncommitted_token: OnUncommittedToken | None = None
    logprobs_mode: LogprobsMode | None = None
    log_probs_over: LogProbsOver | None = None
    need_prompt: bool = False

    @property
    def of_payloads(self) -> list[str]:
        """Names of the given options that mean nothing in files of rollouts."""
        return [name for name in _OF_PAYLOADS if getattr(self, name) is not None]

    def with_prompts(self) -> ReadOptions:
        """The same, and a payload must say its prompt."""
        return replace(self, need_prompt=True)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record is.

    Args:
        file: path, as given.
        line: from 1; None in columnar files.
        response: place of the response in its line, or in its columnar file, from 0.
    """

    file: str
    line: int | None = None
    response: int | None = None

    def at(self, response: int) -> Place:
        """The place of one response here."""
        return replace(self, response=response)

    def __str__(self) -> str:
        names = (("line", self.line), ("response", self.response))
        return ", ".join([self.file, *(f"{k} {v}" for k, v in names if v is not None)])


@dataclass(frozen=True, slots=True)
class Response:
    """A response that was read.

    Args:
        engine: the producer of its payload; None in columnar files.
        log_kept_mass: float64 `[n]`, log of the full-vocabulary mass that the engine gave to each
            support; None where the payload does not tell.
        unfinished: the payload says that the response goes on (its `finish_reason` is null).
    """

    place: Place
    rollout: Rollout
    engine: Engine | None = None
    log_kept_mass: Float64Array | None = None
    unfinished: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """What is there instead of a response; the error names no sample, since the place does."""

    place: Place
    kind: Kind
    error: ReplayError


Record = Response | Problem


def refused(place: Place, error: ReplayError, kind: Kind | None = None) -> Problem:
    """The problem at `place`; its kind is told by the error's class if None."""
    return Problem(place, kind or kind_of(error), error.blamed_on(None).located(row=error.row))


def missing(problem: str, expected: str, got: str) -> ReplayError:
    """The error for responses that cannot be found in what is there."""
    return ReplayError(problem, expected=expected, got=got, consequence=LOST)


def kind_of(error: ReplayError) -> Kind:
    """What `inspect` counts the error as."""
    if isinstance(error, MissingMaskError):
        return "missing_mask"
    return "token_outside_support" if isinstance(error, MissingTokenError) else "invalid"
