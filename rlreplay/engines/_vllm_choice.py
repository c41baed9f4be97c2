"""One vLLM choice, as a dict of its fields, to a `Rollout`."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, methodcaller
from typing import Any, Literal, get_args

import numpy as np

from rlreplay.engines._common import (
    LoadOptions,
    assemble,
    check_agrees,
    check_option,
    sequence,
    weight_spans,
    wrong_type,
)
from rlreplay.errors import ReplayError
from rlreplay.rollout import Rollout, prompt_array, token_array
from rlreplay.sampling_mask import (
    FloatArray,
    IntArray,
    RolloutSamplingMask,
    check_ids_below,
    float_array,
    integer_array,
    is_iterable,
    shown,
)

LogprobsMode = Literal["processed_logprobs", "raw_logprobs", "processed_logits", "raw_logits"]

# What vLLM writes over HTTP in place of a log-prob that is -inf or unknown.
_NO_LOG_PROB = -9999.0
_FIELDS = ("token_ids", "sampling_mask", "logprobs", "finish_reason", "weight_versions", "index")


def check_mode(mode: LogprobsMode) -> None:
    """Refuse a `logprobs_mode` that vLLM does not have."""
    check_option("logprobs_mode", mode, get_args(LogprobsMode))


def check_prompt(declared: Any, prompt_ids: Any) -> None:
    """Refuse the ids that vLLM says it was prompted with if they are not the caller's."""
    if declared is None:
        return
    ours, theirs = prompt_array(prompt_ids), prompt_array(declared)
    if not np.array_equal(ours, theirs):
        raise ReplayError(
            "prompt_token_ids are not the prompt_ids that the caller gave",
            expected=f"{ours.size} ids, {str(ours.tolist())[:60]}",
            got=f"{theirs.size} ids, {str(theirs.tolist())[:60]}",
            consequence="the response would be scored after another prompt",
        )


def completion_fields(output: Any) -> dict[str, Any]:
    """The attributes of an in-process completion, under the names of the HTTP form."""
    fields = {name: getattr(output, name, None) for name in _FIELDS}
    if fields["token_ids"] is None:
        wrong_type("the output", "an object with token_ids", output)
    return fields


def read_choice(
    fields: dict[str, Any], prompt_ids: Any, options: LoadOptions, mode: LogprobsMode
) -> Rollout:
    """The rollout of one choice; `fields` as over HTTP or from `completion_fields`."""
    response = token_array(fields.get("token_ids"), "token_ids", options.vocab_size)
    mask = _mask(fields.get("sampling_mask"), response.size, options)
    return assemble(
        options,
        prompt_ids=prompt_ids,
        response_ids=response,
        mask=mask,
        rollout_log_probs=None if mask is None else _log_probs(fields, response, mode),
        spans=weight_spans(fields, response.size),
        finish_reason=fields.get("finish_reason"),
    )


def _mask(value: Any, n: int, options: LoadOptions) -> RolloutSamplingMask | None:
    if value is None:
        options.missing_mask("choice", row=0)
        return None
    mask = read_mask(value, n)
    if options.vocab_size is not None:
        check_ids_below(mask, options.vocab_size)
    return mask


def read_mask(value: Any, n: int) -> RolloutSamplingMask:
    """The `sampling_mask` of `n` tokens in any of its forms, or read already."""
    rows, offsets = mask_parts(value)
    if isinstance(value, RolloutSamplingMask):
        mask = value
    elif offsets is not None:
        mask = RolloutSamplingMask(rows, offsets)
    else:
        mask = RolloutSamplingMask.from_mask_list(mask_rows(rows, n))
    check_agrees("the number of mask rows", len(mask), n, "token_ids")
    return mask


def mask_parts(value: Any) -> tuple[Any, Any]:
    """(rows, None) of a nested form, (ids, offsets) of a CSR form."""
    if isinstance(value, dict):
        return value.get("token_ids"), value.get("offsets")
    return getattr(value, "token_ids", value), getattr(value, "offsets", None)


def mask_rows(rows: Any, n: int) -> list[Any] | tuple[Any, ...]:
    """The rows of a nested form, which must be `n`; what they hold is not looked at."""
    listed = sequence(rows, "sampling_mask")
    check_agrees("the number of mask rows", len(listed), n, "token_ids")
    return listed


def _log_probs(fields: dict[str, Any], response: IntArray, mode: LogprobsMode) -> FloatArray | None:
    entries = log_prob_entries(fields.get("logprobs"))
    if entries is None:
        return None
    if mode != "processed_logprobs":
        return None
    check_agrees("the number of log-probs", len(entries), response.size, "token_ids")
    values = float_array(_sampled_values(entries, response), "logprobs")
    absent = values <= _NO_LOG_PROB
    if absent.any():
        row = int(np.argmax(absent))
        raise _bad_log_prob("the log-prob of a token that can be sampled", values[row], row)
    return values


def log_prob_entries(logprobs: Any) -> list[Any] | None:
    """What `logprobs` holds for each token: `{"logprob": …}` over HTTP, else `{id: Logprob}`."""
    if isinstance(logprobs, dict):
        if logprobs and "content" not in logprobs:
            wrong_type("logprobs", "an object with content, or a list", logprobs)
        logprobs = logprobs.get("content")
    if logprobs is None:
        return None
    if not is_iterable(logprobs) or not isinstance(logprobs, Sequence):
        wrong_type("logprobs", "a list with an entry for each token", logprobs)
    return list(logprobs)


def _sampled_values(entries: list[Any], response: IntArray) -> list[Any]:
    """The log-prob of the sampled token from each entry, with the type that it has there."""
    kinds = list(map(type, entries))
    if not set(kinds) <= {dict}:
        row = next(r for r, kind in enumerate(kinds) if kind is not dict)
        raise _bad_log_prob("an object for each token", shown(entries[row]), row)
    if entries and "logprob" in entries[0]:
        _check_sampled_ids(list(map(methodcaller("get", "token_id"), entries)), response)
        return list(map(methodcaller("get", "logprob"), entries))
    values = list(map(dict.get, entries, response.tolist()))
    if type(None) in set(map(type, values)):
        row = list(map(type, values)).index(type(None))
        raise _bad_log_prob(f"the log-prob of sampled token {response[row]}", "none", row)
    try:
        return list(map(attrgetter("logprob"), values))
    except AttributeError:
        return values


def _check_sampled_ids(ids: list[Any], response: IntArray) -> None:
    if set(map(type, ids)) <= {type(None)}:
        return  # servers may send the token's text only
    off = integer_array(ids, "the token_id of logprobs") != response
    if off.any():
        row = int(np.argmax(off))
        raise _bad_log_prob(f"the log-prob of token {response[row]}", f"one of {ids[row]}", row)


def _bad_log_prob(expected: str, got: Any, row: int) -> ReplayError:
    return ReplayError(
        "logprobs do not belong to the sampled tokens",
        expected=expected,
        got=f"{got}",
        consequence="the importance ratio would be taken between two different policies",
        row=row,
    )
