"""`Rollout`: one sampled response with everything the trainer needs to score it again.

Shapes: `P` prompt tokens, `n` response tokens (rows), `N` support ids in total.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rlreplay.errors import ReplayError
from rlreplay.sampling_mask import (
    INT32_MAX,
    BoolArray,
    FloatArray,
    IntArray,
    IntArrayLike,
    RolloutSamplingMask,
    float_array,
    frozen,
    host_array,
    integer_array,
    is_integer,
    is_iterable,
    row_at,
    shown,
)

FloatArrayLike = Sequence[float] | npt.NDArray[Any] | torch.Tensor
BoolArrayLike = Sequence[bool] | npt.NDArray[Any] | torch.Tensor

# A log-softmax in fp32 may end a few roundings above 0.
_ROUNDING = 8 * float(np.finfo(np.float32).eps)
# How far the probabilities of one support may sum from 1. fp32 rounding over some thousand ids
# stays below it; log-probs normalised over the whole vocabulary miss it by the truncated mass.
_MASS_TOLERANCE = 1e-3
# Two fp32 computations of one log-prob, absolute and relative.
_SAME_VALUE = 1e-5

_WRONG_RATIO = "the importance ratio would be taken between two different policies"
_SHIFTED = "later tokens would be scored with another token's values"


class WeightVersionSpan(NamedTuple):
    """Response rows `[start, end)` were sampled with the weights called `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, init=False, eq=False, repr=False, slots=True)
class Rollout:
    """One prompt, one response, and the action space that each response token was drawn from.

    All arrays are private copies that numpy refuses to make writeable. Two rollouts are equal when
    all their fields are; they cannot be hashed. Pickling with protocol 5 hands the arrays over out
    of band.

    Args:
        prompt_ids: int `[P]`, at least one.
        response_ids: int `[n]`.
        sampling_mask: `n` rows. The sampled token of every restricted row is in its support.
        rollout_log_probs: float `[n]`, the engine's log-prob of each response token, normalised
            over its support (over the vocabulary where the row is unrestricted).
        support_log_probs: float `[N]`, the engine's log-prob of every support id, normalised over
            the support, in the order of `sampling_mask.ids`. Needs `rollout_log_probs`.
        loss_mask: bool or 0/1 `[n]`, true where the token takes part in the loss; all true if None.
        weight_versions: spans in order that cover `[0, n)` without gap or overlap, or none at all.
            A span is empty only where the response is.
        finish_reason: the engine's word for why the response ended, None while it has not.

    Raises:
        ReplayError: anything above that does not hold, with the row where one is to blame.
            Log-probs must be finite and at most 0 (8 fp32 roundings above are let through, and
            kept as they are). A log-prob on a singleton row must be 0 and the probabilities of a
            support must sum to 1, both within 1e-3: full-vocabulary log-probs put into these
            fields by mistake show themselves there.
        MissingTokenError: a sampled token outside its support.
    """

    prompt_ids: IntArray
    response_ids: IntArray
    sampling_mask: RolloutSamplingMask
    rollout_log_probs: FloatArray | None
    support_log_probs: FloatArray | None
    loss_mask: BoolArray
    weight_versions: tuple[WeightVersionSpan, ...]
    finish_reason: str | None

    __hash__ = None  # type: ignore[assignment]  # equality by value over big arrays: not a key

    def __init__(
        self,
        *,
        prompt_ids: IntArrayLike,
        response_ids: IntArrayLike,
        sampling_mask: RolloutSamplingMask,
        rollout_log_probs: FloatArrayLike | None = None,
        support_log_probs: FloatArrayLike | None = None,
        loss_mask: BoolArrayLike | None = None,
        weight_versions: Iterable[tuple[str, int, int]] = (),
        finish_reason: str | None = None,
    ) -> None:
        prompt, response = (
            prompt_array(prompt_ids),
            token_array(response_ids, "response_ids"),
        )
        _check_mask(sampling_mask, response)
        log_probs = support = None
        if rollout_log_probs is not None:
            log_probs = log_prob_array(rollout_log_probs, "rollout_log_probs")
            _check_rollout_log_probs(log_probs, sampling_mask)
        if support_log_probs is not None:
            support = log_prob_array(support_log_probs, "support_log_probs", sampling_mask)
            _check_support_log_probs(support, log_probs, sampling_mask, response)
        self._store(
            prompt_ids=prompt,
            response_ids=response,
            sampling_mask=sampling_mask,
            rollout_log_probs=log_probs,
            support_log_probs=support,
            loss_mask=_loss_mask_array(loss_mask, response.size),
            weight_versions=_spans(weight_versions, response.size),
            finish_reason=_checked_reason(finish_reason),
        )

    def _store(self, **fields: Any) -> None:
        for name, value in fields.items():
            own = frozen(value) if isinstance(value, np.ndarray) else value
            object.__setattr__(self, name, own)

    @property
    def tokens(self) -> IntArray:
        """int64 `[P + n]`: prompt and response, as `unconcat_tokens` wants them (a new array)."""
        return np.concatenate([self.prompt_ids, self.response_ids])

    @property
    def total_length(self) -> int:
        """`P + n`."""
        return self.prompt_ids.size + self.response_ids.size

    def __len__(self) -> int:
        """The number of response tokens."""
        return self.response_ids.size

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rollout):
            return NotImplemented
        return all(_same(getattr(self, f), getattr(other, f)) for f in self.__slots__)

    def __repr__(self) -> str:
        return (
            f"Rollout(prompt={self.prompt_ids.size}, response={len(self)}, "
            f"sampling_mask={self.sampling_mask!r}, finish_reason={self.finish_reason!r})"
        )

    def __copy__(self) -> Rollout:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Rollout:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, ({name: getattr(self, name) for name in self.__slots__},)


def _unpickle(fields: dict[str, Any]) -> Rollout:
    # The fields were checked when the original was made, and the arrays belong to nobody else.
    rollout = Rollout.__new__(Rollout)
    rollout._store(**fields)
    return rollout


def token_array(values: Any, name: str, vocab_size: int | None = None) -> IntArray:
    """`values` as a fresh int64 `[m]` of token ids below `vocab_size` (2**31 if None).

    `ReplayError` names the position as the row: meant for response tokens.
    """
    tokens = integer_array(values, name).copy()
    limit = INT32_MAX + 1 if vocab_size is None else min(vocab_size, INT32_MAX + 1)
    if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= limit):
        at = int(np.argmax((tokens < 0) | (tokens >= limit)))
        raise ReplayError(
            f"{name} holds a number that is no token id",
            expected=f"an integer in [0, {limit})",
            got=f"{int(tokens[at])}",
            consequence="the trainer would embed and score a token that the policy does not have",
            row=at,
        )
    return tokens


def prompt_array(values: Any, vocab_size: int | None = None) -> IntArray:
    """`token_array` for a prompt: not empty, and errors name no row (a row is a response token)."""
    try:
        tokens = token_array(values, "prompt_ids", vocab_size)
    except ReplayError as error:
        at = "" if error.row is None else f" at prompt position {error.row}"
        raise ReplayError(
            error.problem,
            expected=error.expected,
            got=error.got + at,
            consequence=error.consequence,
        ) from None
    if tokens.size == 0:
        raise ReplayError(
            "the prompt is empty",
            expected="at least one prompt token",
            got="none",
            consequence="no logits row would score the first response token",
        )
    return tokens


def log_prob_array(
    values: Any, name: str, per_id_of: RolloutSamplingMask | None = None
) -> FloatArray:
    """`values` as a fresh float32 `[m]` of finite log-probs, none above 0 by more than rounding.

    Args:
        values: a list or tuple of floats or ints, or a floating-point array or tensor `[m]`.
        name: what error messages call it.
        per_id_of: where given, there is one value for each id of this mask, and errors name the
            row that the id belongs to; otherwise one value a row.
    """

    def row_of(position: int) -> int:
        return position if per_id_of is None else row_at(per_id_of.offsets, position)

    try:
        narrow = float_array(values, name)
    except ReplayError as error:
        raise error.located(row=None if error.row is None else row_of(error.row)) from None
    bad = ~np.isfinite(narrow) | (narrow > _ROUNDING)
    if bad.any():
        at = int(np.argmax(bad))
        raise ReplayError(
            f"{name} holds a number that is no log-prob",
            expected="a finite number that is at most 0",
            got=f"{narrow[at]}",
            consequence=_WRONG_RATIO,
            row=row_of(at),
        )
    return narrow


def _check_mask(mask: Any, response: IntArray) -> None:
    if not isinstance(mask, RolloutSamplingMask):
        raise ReplayError(
            "the rollout has no sampling mask",
            expected="a RolloutSamplingMask (RolloutSamplingMask.full(n) if nothing was cut off)",
            got=type(mask).__name__,
            consequence="the policy would be scored over the full vocabulary",
        )
    if len(mask) != response.size:
        raise _wrong_count("the sampling mask", "rows", response.size, len(mask))
    mask.check_sampled(response)


def _wrong_count(name: str, what: str, expected: int, got: int) -> ReplayError:
    return ReplayError(
        f"{name} does not match the response",
        expected=f"{expected} {what}",
        got=f"{got}",
        consequence=_SHIFTED,
        row=min(expected, got),  # the first row that one of the two lacks
    )


def _check_rollout_log_probs(log_probs: FloatArray, mask: RolloutSamplingMask) -> None:
    if log_probs.size != len(mask):
        raise _wrong_count("rollout_log_probs", "values", len(mask), log_probs.size)
    off = (mask.lengths == 1) & (np.abs(np.expm1(log_probs)) > _MASS_TOLERANCE)
    if off.any():
        row = int(np.argmax(off))
        raise ReplayError(
            "the log-prob is not normalised over the support",
            expected="0 for the only id of its support",
            got=f"{float(log_probs[row])}",
            consequence=_WRONG_RATIO,
            row=row,
        )


def _check_support_log_probs(
    support: FloatArray,
    log_probs: FloatArray | None,
    mask: RolloutSamplingMask,
    response: IntArray,
) -> None:
    if support.size != mask.ids.size:
        raise ReplayError(
            "support_log_probs do not match the sampling mask",
            expected=f"{mask.ids.size} values, one for each support id",
            got=f"{support.size}",
            consequence="log-probs would be read against other ids",
        )
    restricted = np.flatnonzero(mask.lengths)
    if restricted.size:
        mass = np.add.reduceat(np.exp(support.astype(np.float64)), mask.offsets[restricted])
        off = np.abs(mass - 1.0) > _MASS_TOLERANCE
        if off.any():
            at = int(np.argmax(off))
            raise ReplayError(
                "support_log_probs are not normalised over the support",
                expected="probabilities that sum to 1",
                got=f"{mass[at]:.6f}",
                consequence=_WRONG_RATIO,
                row=int(restricted[at]),
            )
    if log_probs is None:
        raise ReplayError(
            "support_log_probs came without rollout_log_probs",
            expected="both, or rollout_log_probs alone",
            got="support_log_probs alone",
            consequence="the sampled token's own log-prob would be missing",
        )
    _check_sampled_log_probs(support, log_probs, mask, response)


def _check_sampled_log_probs(
    support: FloatArray,
    log_probs: FloatArray,
    mask: RolloutSamplingMask,
    response: IntArray,
) -> None:
    rows = np.flatnonzero(mask.lengths)
    ours, theirs = log_probs[rows], support[mask.locate(response)[rows]]
    off = np.abs(ours - theirs) > _SAME_VALUE * (1.0 + np.abs(theirs))
    if off.any():
        at = int(np.argmax(off))
        raise ReplayError(
            "rollout_log_probs and support_log_probs disagree on the sampled token",
            expected=f"{float(theirs[at])}",
            got=f"{float(ours[at])}",
            consequence=_WRONG_RATIO,
            row=int(rows[at]),
        )


def _loss_mask_array(values: Any, n: int) -> BoolArray:
    if values is None:
        return np.ones(n, dtype=np.bool_)
    if isinstance(values, list | tuple) and set(map(type, values)) <= {bool, np.bool_}:
        values = np.array(values, dtype=np.bool_)
    if isinstance(values, np.ndarray | torch.Tensor):
        values = host_array(values, "biu", 1, _not_a_loss_mask)
    if not (isinstance(values, np.ndarray) and values.dtype == np.bool_):
        values = integer_array(values, "loss_mask")
        wrong = (values != 0) & (values != 1)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise _not_a_loss_mask(f"{int(values[row])}", row)
    if values.size != n:
        raise _wrong_count("loss_mask", "values", n, values.size)
    own: BoolArray = values.astype(np.bool_)
    return own


def _not_a_loss_mask(got: str, row: int | None = None) -> ReplayError:
    return ReplayError(
        "loss_mask is no mask",
        expected="one bool, 0 or 1 for each response token",
        got=got,
        consequence="tokens would enter the loss, or be left out of it, by accident",
        row=row,
    )


def _spans(values: Any, n: int) -> tuple[WeightVersionSpan, ...]:
    listed = list(values) if is_iterable(values) else [values]
    for span in listed:
        if not isinstance(span, list | tuple) or len(span) != 3:
            raise _bad_span("(version, start, end) triples", shown(span), None)
    spans = [WeightVersionSpan(*span) for span in listed]
    end = 0
    for span in spans:
        if (
            not isinstance(span.version, str)
            or not is_integer(span.start)
            or not is_integer(span.end)
        ):
            raise _bad_span("a string and two integers", shown(tuple(span)), None)
        if span.start != end:
            raise _bad_span(f"a span that starts at {end}", shown(tuple(span)), end)
        if span.end < span.start or (span.end == span.start and (n > 0 or len(spans) > 1)):
            raise _bad_span("a span of at least one row", shown(tuple(span)), end)
        end = int(span.end)
        if end > n:
            raise _bad_span(f"spans that end at {n}", shown(tuple(span)), n)
    if spans and end != n:
        raise _bad_span(f"spans that end at {n}", f"the last one ends at {end}", end)
    return tuple(WeightVersionSpan(s.version, int(s.start), int(s.end)) for s in spans)


def _bad_span(expected: str, got: str, row: int | None) -> ReplayError:
    return ReplayError(
        "the weight-version spans do not cover the response",
        expected=expected,
        got=got,
        consequence="tokens would be charged to weights that did not sample them",
        row=row,
    )


def _checked_reason(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ReplayError(
            "finish_reason is no text",
            expected="a string or None",
            got=type(value).__name__,
            consequence="an aborted response could not be told from a finished one",
        )
    return value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return False  # one of them is None
    return bool(a == b)
