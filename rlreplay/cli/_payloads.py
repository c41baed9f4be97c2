"""Lines of engine payloads to records.

A line holds one engine response, or a list of them (a batch), bare or as
`{"prompt_ids": …, "response": …}`. The prompt may also lie in the response itself, in its choice or
in their `meta_info`, as `prompt_ids` or vLLM's `prompt_token_ids`: wherever it is said, it must be
the same. Null says nothing.

Each response is taken for a whole one. The chunks of a stream are not put together
(`rlreplay.engines` does that): one that can be read counts as a response, and as unfinished where
its `finish_reason` is null.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any

import numpy as np

from rlreplay.cli._records import (
    Engine,
    Place,
    Problem,
    ReadOptions,
    Record,
    Response,
    missing,
    refused,
)
from rlreplay.diagnostics import Float64Array
from rlreplay.engines import sglang, slime, vllm
from rlreplay.errors import ReplayError
from rlreplay.rollout import Rollout, prompt_array
from rlreplay.sampling_mask import IntArray, float_array, integer_array, shown

_SLIME_FIELDS = (
    "top_p_token_ids", "top_p_kept_token_ids", "top_p_token_offsets", "top_p_kept_token_offsets",
)  # fmt: skip
_PROMPT_FIELDS = ("prompt_ids", "prompt_token_ids")
_ANOTHER_PROMPT = "the response would be scored after another prompt"
_STAND_IN = (0,)  # the prompt of a payload that names none: nothing is said about prompts then


def records_of(raw: bytes, place: Place, options: ReadOptions) -> Iterator[Record]:
    """The records of one line; none of a blank one."""
    if raw.isspace():
        return
    try:
        payload = _parsed(raw)
    except ReplayError as error:
        yield refused(place, error, "broken_json")
        return
    try:
        bodies = _bodies(payload)
    except ReplayError as error:
        yield refused(place, error)
        return
    index = 0
    for body, prompts in bodies:
        for record in _responses(body, prompts, options, place, index):
            yield record
            index += 1
    if not index:
        yield Problem(place, "empty", missing("the line holds no response", "at least one", "none"))


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw, object_pairs_hook=_object)
    except json.JSONDecodeError as error:  # its own "line 2" is the end of this one
        got = f"{error.msg} at character {error.pos} of {len(error.doc)}"
    except (ValueError, RecursionError) as error:  # no UTF-8, long number, key twice, too deep
        got = str(error)
    raise missing("the line is no JSON", "one JSON value, without a key twice in an object", got)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of its pairs, of which Python's own reader would keep the last for each key."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        ((key, count),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {ascii(key)[:40]} {count} times in one object")
    return fields


def _bodies(payload: Any) -> Iterable[tuple[Any, tuple[Any, ...]]]:
    """(body, the prompts given beside it) of each response in a line."""
    body, given = payload, []
    if isinstance(payload, dict) and "response" in payload and not _known(payload):
        body, given = payload["response"], _said_prompts(payload)
    listed = body if isinstance(body, list) else [body]
    columns = [_prompts(each, len(listed)) for each in given]
    prompts = zip(*columns, strict=True) if columns else itertools.repeat((), len(listed))
    return zip(listed, prompts, strict=True)


def _known(fields: dict[str, Any]) -> bool:
    return "meta_info" in fields or "choices" in fields


def _prompts(prompts: Any, count: int) -> Iterable[Any]:
    """A prompt for each of `count` responses: of a list with one each, or one for all."""
    if not (isinstance(prompts, list) and prompts and isinstance(prompts[0], list)):
        return itertools.repeat(prompts, count)
    if len(prompts) != count:
        raise ReplayError(
            "prompts and responses differ in number",
            expected=f"{count} prompts, one for each response, or a flat list of ids",
            got=f"{len(prompts)}",
            consequence=_ANOTHER_PROMPT,
        )
    return prompts


def _said_prompts(fields: Any) -> list[Any]:
    """What an object says that the prompt is: nothing by a field that is absent or null."""
    held = fields if isinstance(fields, dict) else {}
    return [held[name] for name in _PROMPT_FIELDS if held.get(name) is not None]


# Responses


def _responses(
    body: Any, prompts: tuple[Any, ...], options: ReadOptions, place: Place, first: int
) -> Iterator[Record]:
    """A record for each response of a body; one for the body where it cannot be taken apart."""
    try:
        engine = options.engine or _engine_of(body)
    except ReplayError as error:
        yield refused(place.at(first), error, "unknown_producer")
        return
    try:
        parts = _single_choices(body)
    except ReplayError as error:
        yield refused(place.at(first), error, "invalid")
        return
    if body.get("choices") == []:
        empty = missing("the response holds no choice", "at least one", "none")
        yield Problem(place.at(first), "empty", empty)
    for index, part in enumerate(parts, start=first):
        try:
            rollout = _load(engine, part, _prompt_of(part, prompts), options)
        except ReplayError as error:
            yield refused(place.at(index), error)
        else:
            fields = _fields_of(engine, part)
            mass = _log_kept_mass(fields, rollout) if engine == "sglang" else None
            unfinished = fields.get("finish_reason", "not told") is None
            yield Response(place.at(index), rollout, engine, mass, unfinished)


def _engine_of(body: Any) -> Engine:
    """The producer of a body, told by its fields."""
    fields = body if isinstance(body, dict) else {}
    meta, choices = fields.get("meta_info"), fields.get("choices")
    if isinstance(meta, dict):
        return "slime" if any(name in meta for name in _SLIME_FIELDS) else "sglang"
    if isinstance(choices, list):
        chat = any(isinstance(choice, dict) and "meta_info" in choice for choice in choices)
        return "sglang" if chat else "vllm"
    raise ReplayError(
        "no known engine sends such a payload",
        expected="an object with meta_info (SGLang, slime) or choices (vLLM, SGLang's chat)",
        got=f"an object with {', '.join(sorted(fields))[:80]}" if fields else shown(body),
        consequence="its supports cannot be read",
    )


def _single_choices(body: Any) -> Iterable[dict[str, Any]]:
    """The body, or a body for each of its choices: one that is bad spoils no other."""
    if not isinstance(body, dict):
        raise missing("the response is no payload", "an object", shown(body))
    if "choices" not in body:
        return [body]
    if not isinstance(body["choices"], list):
        raise missing("choices has the wrong type", "a list", shown(body["choices"]))
    return ({**body, "choices": [choice]} for choice in body["choices"])


def _prompt_of(body: dict[str, Any], given: tuple[Any, ...]) -> Any:
    """What is given beside a body of one choice at most, and what it says itself; None if nothing.

    Raises:
        ReplayError: two of them differ, or are no prompts to compare.
    """
    said = [*given]
    for holder in (body, *body.get("choices", ())):
        said += _said_prompts(holder)
        said += _said_prompts(holder.get("meta_info")) if isinstance(holder, dict) else ()
    for other in said[1:]:
        first, second = prompt_array(said[0]), prompt_array(other)
        if not np.array_equal(first, second):
            raise ReplayError(
                "the payload says two prompts",
                expected="the same ids in every prompt_ids and prompt_token_ids",
                got=f"{_told_ids(first)} and {_told_ids(second)}",
                consequence=_ANOTHER_PROMPT,
            )
    return said[0] if said else None


def _told_ids(ids: IntArray) -> str:
    return f"{ids.size} ids {str(ids.tolist())[:40]}"


def _load(engine: Engine, body: dict[str, Any], prompt: Any, options: ReadOptions) -> Rollout:
    if prompt is None and options.need_prompt:
        raise ReplayError(
            "the payload does not say its prompt",
            expected="prompt_ids beside the response",
            got="none",
            consequence=_ANOTHER_PROMPT,
        )
    if prompt is None:
        body, prompt = _without_prompt_length(body), _STAND_IN
    given = _given(options, "vocab_size", "on_missing_mask")
    given["prompt_ids"] = [prompt] if isinstance(prompt, list) else prompt
    if engine == "vllm":
        loaded = vllm.from_response(body, **given, **_given(options, "logprobs_mode"))
    elif engine == "slime":
        loaded = slime.from_response(body, **given, **_given(options, "log_probs_over"))
    else:
        load = sglang.from_chat if "choices" in body else sglang.from_response
        loaded = load(body, **given, **_given(options, "on_uncommitted_token"))
    return loaded[0]


def _given(options: ReadOptions, *names: str) -> dict[str, Any]:
    """Those of the options that are not left to the loader."""
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _without_prompt_length(body: dict[str, Any]) -> dict[str, Any]:
    """The body without the count of prompt tokens, which no ids are there to compare with."""
    cut = dict(body)
    if isinstance(body.get("meta_info"), dict):
        cut["meta_info"] = {**body["meta_info"], "prompt_tokens": None}
    if "choices" in body:
        cut["choices"] = [
            _without_prompt_length(c) if isinstance(c, dict) else c for c in body["choices"]
        ]
    return cut


def _fields_of(engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    """Where a body that was loaded says how its response ended: `meta_info`, or vLLM's choice."""
    chosen = engine != "slime" and "choices" in body
    holder: dict[str, Any] = body["choices"][0] if chosen else body
    return holder if engine == "vllm" else holder["meta_info"]


def _log_kept_mass(meta: dict[str, Any], rollout: Rollout) -> Float64Array | None:
    """Full-vocabulary log-prob less support log-prob of each sampled token; None if not told."""
    entries = meta.get("output_token_logprobs")
    if rollout.rollout_log_probs is None or not isinstance(entries, list):
        return None
    entries = entries[: len(rollout)]  # an uncommitted token was dropped on request
    if set(map(type, entries)) != {list} or min(map(len, entries)) < 2:
        return None
    try:
        full = float_array(list(map(itemgetter(0), entries)), "output_token_logprobs")
        ids = integer_array(list(map(itemgetter(1), entries)), "output_token_logprobs")
    except ReplayError:
        return None
    if not np.array_equal(ids, rollout.response_ids) or not np.isfinite(full).all():
        return None
    return full.astype(np.float64) - rollout.rollout_log_probs
