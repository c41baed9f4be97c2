"""`Rollout`: one sampled response with everything the trainer needs to score it again.

Shapes: `P` prompt tokens, `n` response tokens (rows), `N` support ids in total.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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
    check_count,
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
MASS_TOLERANCE = 1e-3
"""How far the probabilities of one support may sum from 1. fp32 rounding over some thousand ids
stays below it; logits do not, and log-probs over the whole vocabulary miss it by the truncated
mass."""
# Two fp32 computations of one log-prob, absolute and relative.
_SAME_VALUE = 1e-5

_WRONG_RATIO = "the importance ratio would be taken between two different policies"
_SHIFTED = "later tokens would be scored with another token's values"
_WRONG_CONTEXT = "the trainer would condition on other tokens than the engine did"


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
            over its support (over the vocabulary where the row is unrestricted). 0 for a token
            that no sampler drew (see `merge_turns`): there the loss mask is false, and nothing is
            to be measured against it.
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

    # Turns, resumed requests, and cutting off

    @classmethod
    def merge_turns(
        cls,
        turns: Iterable[Rollout],
        *,
        tool_tokens: Literal["forced", "unrestricted"] = "forced",
    ) -> Rollout:
        """The turns of one conversation as one rollout that is scored in one forward.

        Each turn's prompt is the prompt and response of the turn before, and then the tokens that
        a tool or the environment added. Those become response tokens that the loss mask leaves
        out, with rollout log-prob 0, and are charged to the weights that read them, those of the
        next turn with a response; after the last one, its own.

        Args:
            turns: at least one, in order.
            tool_tokens: the support of what no sampler drew: `"forced"` for singleton rows,
                `"unrestricted"` for rows scored over the full vocabulary. The trainer's log-prob
                of an unrestricted one is not 0, so that its difference to the rollout log-prob
                says nothing: leave out of every ratio and metric what the loss mask leaves out.

        Returns:
            A rollout with the first turn's prompt and the last turn's finish reason. Neighbouring
            spans of one weight version are joined.

        Raises:
            ReplayError: a turn that does not start with what came before, with the first position
                that differs; an optional field that some of the turns with a response have and
                others lack. Where no turn has a response, one turn that has the field is enough.
        """
        if not (isinstance(tool_tokens, str) and tool_tokens in ("forced", "unrestricted")):
            raise ReplayError(
                "tool_tokens names no kind of row",
                expected="'forced' or 'unrestricted'",
                got=shown(tool_tokens),
                consequence="tokens that no sampler drew would get a support that nobody asked for",
            )
        listed = _turn_list(turns)
        between = [
            _continuation(before, after, f"the prompt of turn {k}")
            for k, (before, after) in enumerate(itertools.pairwise(listed), start=1)
        ]
        return _joined(listed, between, forced=tool_tokens == "forced")

    def resume(self, rest: Rollout) -> Rollout:
        """This rollout and what the engine went on to sample after an abort, as one.

        Args:
            rest: of a request whose prompt was this rollout's prompt and response.

        Returns:
            A rollout with the finish reason of `rest`. Neighbouring spans of one weight version
            are joined.

        Raises:
            ReplayError: a prompt of `rest` that is not exactly that, with the first position that
                differs; an optional field that one of the two has and the other lacks (unless that
                one has no response).
        """
        listed = _turn_list([self, rest])
        extra = _continuation(self, rest, "the prompt of the resumed request")
        if extra.size:
            raise ReplayError(
                "the prompt of the resumed request holds more than was sampled",
                expected=f"{self.total_length} tokens (merge_turns takes tokens in between)",
                got=f"{rest.prompt_ids.size}",
                consequence="tokens that no sampler drew would enter the loss",
            )
        return _joined(listed, [extra], forced=True)

    def truncate(self, n: int, *, finish_reason: str | None = None) -> Rollout:
        """The first `n` response tokens, `0 <= n <= len(self)`.

        Args:
            finish_reason: why the response ends there. If None, the rollout's own where nothing is
                cut off, and None (it has not ended) otherwise.

        Raises:
            ReplayError: `n` above the number of response tokens.
        """
        keep = check_count(n, "the number of response tokens to keep")
        if keep > len(self):
            raise ReplayError(
                "more tokens would be kept than the response has",
                expected=f"at most {len(self)}",
                got=f"{keep}",
                consequence="tokens would be scored that nobody sampled",
            )
        if finish_reason is None and keep == len(self):
            finish_reason = self.finish_reason
        log_probs, support = self.rollout_log_probs, self.support_log_probs
        num_ids = self.sampling_mask.offsets[keep]
        return Rollout(
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids[:keep],
            sampling_mask=self.sampling_mask.truncate(keep),
            rollout_log_probs=None if log_probs is None else log_probs[:keep],
            support_log_probs=None if support is None else support[:num_ids],
            loss_mask=self.loss_mask[:keep],
            weight_versions=cut_spans(self.weight_versions, keep),
            finish_reason=finish_reason,
        )

    def truncate_at_stop(
        self, stop: str | Sequence[str], decode: Callable[[list[int]], str]
    ) -> Rollout:
        """Cut off after the token that completes a stop string, with finish reason `"stop"`.

        Equivalent to `truncate(k, finish_reason="stop")` for the least k where
        `decode(response_ids[:k])` contains a stop string, and to the rollout itself where no k
        does. Found by bisection: `decode` is called `log2(n) + 1` times or so, and must not take
        back text, so that what a prefix's text contains a longer one's does as well.

        Args:
            stop: a stop string, or several.
            decode: token ids to text, such as a tokenizer's `decode`.

        Raises:
            ReplayError: a stop string that is empty or no text; `decode` that cannot be called, or
                returns no text.
        """
        strings = _stop_strings(stop)
        if not callable(decode):
            raise _no_stop("a decode that can be called", shown(decode))
        ids = self.response_ids.tolist()

        def stops(count: int) -> bool:
            text = decode(ids[:count])
            if not isinstance(text, str):
                raise _no_stop("decode to return a string", shown(text))
            return any(string in text for string in strings)

        if not ids or not stops(len(ids)):
            return self
        keep = bisect.bisect_left(range(len(ids)), True, lo=1, key=stops)
        return self.truncate(keep, finish_reason="stop")

    # Value semantics

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


# Joining and cutting


def _turn_list(turns: Any) -> list[Rollout]:
    listed = list(turns) if is_iterable(turns) else [turns]
    wrong = [turn for turn in listed if not isinstance(turn, Rollout)]
    if wrong or not listed:
        raise ReplayError(
            "turns are no rollouts",
            expected="at least one Rollout",
            got=shown(wrong[0]) if wrong else "none",
            consequence="there would be nothing to score",
        )
    return listed


def _continuation(before: Rollout, after: Rollout, name: str) -> IntArray:
    """What the prompt of `after` adds to the tokens of `before`; `name` is what errors call it."""
    known, prompt = before.tokens, after.prompt_ids
    common = min(known.size, prompt.size)
    differs = known[:common] != prompt[:common]
    at = int(np.argmax(differs)) if differs.any() else common
    if at < known.size:
        raise ReplayError(
            f"{name} does not start with what came before",
            expected=f"token {int(known[at])} at position {at}",
            got=f"{int(prompt[at])}" if at < prompt.size else f"the end of {at} prompt tokens",
            consequence=_WRONG_CONTEXT,
        )
    return prompt[known.size :]


def _joined(turns: list[Rollout], between: list[IntArray], *, forced: bool) -> Rollout:
    """The turns as one, with the tokens `between[k]` after turn k."""
    first, last = turns[0], turns[-1]
    pieces: list[Rollout | _Gap] = [first]
    for tokens, turn in zip(between, turns[1:], strict=True):
        pieces += [_gap(tokens, forced), turn]
    sampled = [turn for turn in turns if len(turn)] or turns

    def joined(name: str) -> Any:
        if not _agreed(name, sampled, [getattr(turn, name) is not None for turn in sampled]):
            return None
        values = [getattr(piece, name) for piece in pieces]
        # what lacks it now is a turn without a response
        return np.concatenate([value for value in values if value is not None])

    return Rollout(
        prompt_ids=first.prompt_ids,
        response_ids=np.concatenate([piece.response_ids for piece in pieces]),
        sampling_mask=RolloutSamplingMask.concat(piece.sampling_mask for piece in pieces),
        rollout_log_probs=joined("rollout_log_probs"),
        support_log_probs=joined("support_log_probs"),
        loss_mask=np.concatenate([piece.loss_mask for piece in pieces]),
        weight_versions=_joined_spans(sampled, first.prompt_ids.size, last),
        finish_reason=last.finish_reason,
    )


class _Gap(NamedTuple):
    """Tokens that no sampler drew, with the fields of a rollout that have a value a token or id."""

    response_ids: IntArray
    sampling_mask: RolloutSamplingMask
    rollout_log_probs: FloatArray
    support_log_probs: FloatArray
    loss_mask: BoolArray


def _gap(tokens: IntArray, forced: bool) -> _Gap:
    n = tokens.size
    mask = RolloutSamplingMask.forced(tokens) if forced else RolloutSamplingMask.full(n)
    zeros = np.zeros(n, np.float32)
    return _Gap(tokens, mask, zeros, zeros[: mask.ids.size], np.zeros(n, np.bool_))


def _agreed(name: str, turns: list[Rollout], has: list[bool]) -> bool:
    """Is there this optional field? Turns with a response must agree; of empty ones any will do."""
    if any(has) and not all(has) and any(map(len, turns)):
        raise ReplayError(
            f"some turns have {name} and others lack them",
            expected="all of the turns that have a response, or none",
            got=f"{sum(has)} of {len(has)}",
            consequence="values would be dropped or made up",
        )
    return any(has)


def _joined_spans(
    turns: list[Rollout], prompt_length: int, last: Rollout
) -> list[tuple[str, int, int]]:
    """The spans of the turns, each stretched back to the end of the one before."""
    if not _agreed("weight_versions", turns, [bool(turn.weight_versions) for turn in turns]):
        return []
    n = last.total_length - prompt_length
    ends = [
        (span.version, turn.prompt_ids.size - prompt_length + span.end)
        for turn in turns
        for span in turn.weight_versions
    ]
    starts = [0, *(end for _, end in ends)]
    spans = united_spans(
        (version, start, end)
        for start, (version, end) in zip(starts, ends, strict=False)
        if end > start
    )
    # Tokens after the last span can only be those before a last turn without a response.
    version, start, _ = spans[-1] if spans else (ends[-1][0], 0, 0)
    return [*spans[:-1], (version, start, n)]


def cut_spans(spans: Iterable[tuple[str, int, int]], n: int) -> list[tuple[str, int, int]]:
    """The spans of the first `n` rows; a response without tokens keeps its first version."""
    return [(version, start, min(end, n)) for version, start, end in spans if start < max(n, 1)]


def united_spans(spans: Iterable[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """The spans with neighbours of one version made one."""
    united: list[tuple[str, int, int]] = []
    for version, start, end in spans:
        if united and united[-1][0] == version:
            start = united.pop()[1]
        united.append((version, start, end))
    return united


def _stop_strings(stop: Any) -> list[str]:
    listed = [stop] if isinstance(stop, str) else list(stop) if is_iterable(stop) else []
    wrong = [string for string in listed if not (isinstance(string, str) and string)]
    if wrong or not listed:
        raise _no_stop("a stop string of at least one character, or several", shown(stop))
    return listed


def _no_stop(expected: str, got: str) -> ReplayError:
    return ReplayError(
        "no stop string can be looked for",
        expected=expected,
        got=got,
        consequence="the response would be cut off at the wrong token, or not at all",
    )


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
    off = (mask.lengths == 1) & (np.abs(np.expm1(log_probs)) > MASS_TOLERANCE)
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
        off = np.abs(mass - 1.0) > MASS_TOLERANCE
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
