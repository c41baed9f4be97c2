"""One vLLM choice, as a dict of its fields, to a `Rollout`; its deltas to such a dict."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from typing import Any, Literal, get_args

import numpy as np

from rlreplay.engines._common import (
    SHIFTED,
    LoadOptions,
    assemble,
    check_agrees,
    check_option,
    mapping,
    rows_from,
    sequence,
    weight_spans,
    wrong_type,
)
from rlreplay.errors import MissingMaskError, ReplayError
from rlreplay.rollout import FloatArray, IntArray, Rollout, prompt_array, token_array
from rlreplay.sampling_mask import (
    RolloutSamplingMask,
    check_count,
    float_array,
    integer_array,
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
    rows, offsets = _mask_parts(value)
    if offsets is not None:
        mask = RolloutSamplingMask(rows, offsets, vocab_size=options.vocab_size)
        check_agrees("the number of mask rows", len(mask), n, "token_ids")
        return mask
    rows = sequence(rows, "sampling_mask")
    check_agrees("the number of mask rows", len(rows), n, "token_ids")
    return RolloutSamplingMask.from_mask_list(rows, vocab_size=options.vocab_size)


def _mask_parts(value: Any) -> tuple[Any, Any]:
    """(rows, None) of a nested form, (ids, offsets) of a CSR form."""
    if isinstance(value, dict):
        return value.get("token_ids"), value.get("offsets")
    return getattr(value, "token_ids", value), getattr(value, "offsets", None)


def _log_probs(fields: dict[str, Any], response: IntArray, mode: LogprobsMode) -> FloatArray | None:
    entries = _entries(fields.get("logprobs"))
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


def _entries(logprobs: Any) -> list[Any] | None:
    """What `logprobs` holds for each token: `{"logprob": …}` over HTTP, else `{id: Logprob}`."""
    if isinstance(logprobs, dict):
        logprobs = logprobs.get("content")
    if logprobs is None:
        return None
    if isinstance(logprobs, str | bytes) or not isinstance(logprobs, Sequence):
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


@dataclass(frozen=True, slots=True)
class _Delta:
    """What one chunk adds to a choice; None where it does not carry the field."""

    tokens: list[int] | None
    rows: list[Any] | None
    log_probs: list[Any] | None
    finish_reason: Any
    weight_versions: Any


def merge_deltas(chunks: Any, prompt_ids: Any, choice: int | None) -> dict[str, Any]:
    """The deltas of one choice as the fields of the whole choice."""
    parts: list[_Delta] = []
    done = 0
    for fields in _deltas(chunks, prompt_ids, choice):
        if parts and parts[-1].finish_reason is not None:
            raise _bad_stream("a delta comes after the choice has finished", "none", "one")
        with rows_from(done):
            parts.append(_read_delta(fields))
        done += len(parts[-1].tokens or [])
    if all(part.tokens is None for part in parts):
        raise _bad_stream("the stream carries no token ids", "token_ids in its chunks", "none")
    versions = [part.weight_versions for part in parts if part.weight_versions is not None]
    return {
        "token_ids": _joined([part.tokens for part in parts]),
        "sampling_mask": _joined_rows(parts),
        "logprobs": _joined([part.log_probs for part in parts]),
        "finish_reason": parts[-1].finish_reason,
        "weight_versions": versions[-1] if versions else None,
    }


def _deltas(chunks: Any, prompt_ids: Any, choice: int | None) -> list[dict[str, Any]]:
    """The fields of the wanted choice from each chunk that has it."""
    if isinstance(chunks, dict | str | bytes) or not isinstance(chunks, Iterable):
        wrong_type("the stream", "an iterable of chunks", chunks)
    found: list[dict[str, Any]] = []
    for chunk in chunks:
        declared, fields = _choices_of(chunk)
        check_prompt(declared, prompt_ids)
        found += fields
    numbers = [check_count(fields.get("index") or 0, "index") for fields in found]
    if choice is None and len(set(numbers)) > 1:
        names = f"choices {sorted(set(numbers))[:8]}"
        raise _bad_stream("the stream carries several choices", "one, or choice=", names)
    wanted = numbers[0] if choice is None and numbers else choice
    kept = [fields for fields, number in zip(found, numbers, strict=True) if number == wanted]
    if not kept:
        raise _bad_stream("the stream has no such choice", f"choice {wanted}", "none")
    return kept


def _choices_of(chunk: Any) -> tuple[Any, list[dict[str, Any]]]:
    """The prompt ids that a chunk declares, and the fields of its choices."""
    if isinstance(chunk, dict):
        choices = sequence(chunk.get("choices"), "choices")
        return chunk.get("prompt_token_ids"), [mapping(each, "a choice") for each in choices]
    outputs = getattr(chunk, "outputs", None)
    completions = [chunk] if outputs is None else sequence(outputs, "outputs")
    fields = [completion_fields(each) for each in completions]
    return getattr(chunk, "prompt_token_ids", None), fields


def _read_delta(fields: dict[str, Any]) -> _Delta:
    tokens, mask = fields.get("token_ids"), fields.get("sampling_mask")
    if tokens is not None:
        tokens = integer_array(tokens, "token_ids").tolist()
    rows: list[Any] | None = None
    if mask is not None:
        nested, offsets = _mask_parts(mask)
        if offsets is not None:
            nested = RolloutSamplingMask(nested, offsets).to_mask_list()
        rows = list(sequence(nested, "sampling_mask"))
        check_agrees("the number of mask rows", len(rows), len(tokens or []), "token_ids")
    entries = _entries(fields.get("logprobs"))
    return _Delta(tokens, rows, entries, fields.get("finish_reason"), fields.get("weight_versions"))


def _joined(columns: list[list[Any] | None]) -> list[Any] | None:
    present = [column for column in columns if column is not None]
    return list(itertools.chain.from_iterable(present)) if present else None


def _joined_rows(parts: list[_Delta]) -> list[Any] | None:
    rows = _joined([part.rows for part in parts])
    done = 0
    for part in parts:
        if rows is not None and part.rows is None and part.tokens:
            raise MissingMaskError(
                "some deltas carry a sampling mask and some do not",
                expected="the support of every token",
                got="none for this one",
                consequence=SHIFTED,
                row=done,
            )
        done += len(part.tokens or [])
    return rows


def _bad_stream(problem: str, expected: str, got: str) -> ReplayError:
    return ReplayError(problem, expected=expected, got=got, consequence=SHIFTED)
