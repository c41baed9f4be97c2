"""Files of rollouts as a stream of records: JSONL of engine payloads, Arrow and Parquet.

A record is one response: a `Rollout`, or the error that refused it. One line, or one batch of a
columnar file, is in memory at a time.

A line of JSONL holds one engine response, or a list of them (a batch), bare or as
`{"prompt_ids": …, "response": …}`. The prompt may also lie in the response itself, as `prompt_ids`
or vLLM's `prompt_token_ids`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import numpy as np

from rlreplay.diagnostics import Float64Array
from rlreplay.engines import sglang, slime, vllm
from rlreplay.engines._common import OnMissingMask, mapping, prompts_for, sequence
from rlreplay.engines._vllm_choice import LogprobsMode
from rlreplay.engines.sglang import OnUncommittedToken
from rlreplay.engines.slime import LogProbsOver
from rlreplay.errors import MissingMaskError, MissingTokenError, ReplayError
from rlreplay.rollout import Rollout
from rlreplay.sampling_mask import float_array, integer_array, shown

Engine = Literal["sglang", "vllm", "slime"]
Kind = Literal[
    "broken_json", "unknown_producer", "missing_mask", "token_outside_support", "invalid",
    "unreadable", "empty",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
Advance = Callable[[int], None]

MAX_LINE_BYTES = 1 << 28  # a response of 100,000 tokens with 300 ids each is below it
COLUMNAR = (".arrow", ".parquet")
_MAGIC = (b"PAR1", b"ARROW1")
_SLIME_FIELDS = (
    "top_p_token_ids", "top_p_kept_token_ids", "top_p_token_offsets", "top_p_kept_token_offsets",
)  # fmt: skip
_LOST = "its responses are lost"
_STAND_IN = (0,)  # the prompt of a payload that names none: nothing is said about prompts then


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How payloads are read; see the loaders in `rlreplay.engines`.

    Args:
        engine: the producer of all payloads; None tells it from each payload's shape.
        need_prompt: refuse a payload that does not say its prompt.
    """

    engine: Engine | None = None
    vocab_size: int | None = None
    on_missing_mask: OnMissingMask = "raise"
    on_uncommitted_token: OnUncommittedToken = "raise"
    logprobs_mode: LogprobsMode = "processed_logprobs"
    log_probs_over: LogProbsOver = "vocabulary"
    need_prompt: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """One response of a file, or what was found in its place.

    Args:
        file: path, as given.
        line: from 1; None in columnar files.
        response: place of the response in its line, or in its columnar file, from 0.
        engine: the producer, None where unknown.
        rollout: None where `error` says why.
        log_kept_mass: float64 `[n]`, log of the full-vocabulary mass that the engine gave to each
            support; None where the payload does not tell.
    """

    file: str
    line: int | None
    response: int | None
    engine: Engine | None = None
    rollout: Rollout | None = None
    log_kept_mass: Float64Array | None = None
    error: ReplayError | None = None
    kind: Kind | None = None

    @property
    def place(self) -> str:
        """`file, line L, response R`."""
        names = (("line", self.line), ("response", self.response))
        return ", ".join([self.file, *(f"{k} {v}" for k, v in names if v is not None)])


def read_records(path: Path, options: ReadOptions, advance: Advance) -> Iterator[Record]:
    """The records of one file; `advance` is told how many bytes are done.

    Errors of the file itself are records too. Columnar files need pyarrow: `ImportError` without.
    """
    try:
        if _is_columnar(path):
            yield from _columnar_records(path, advance)
        else:
            yield from _line_records(path, options, advance)
    except OSError as error:
        problem = _error("the file cannot be read", "a readable file", str(error), _LOST)
        yield Record(str(path), None, None, error=problem, kind="unreadable")


def _is_columnar(path: Path) -> bool:
    with path.open("rb") as file:
        return path.suffix in COLUMNAR or file.read(8).startswith(_MAGIC)


def _columnar_records(path: Path, advance: Advance) -> Iterator[Record]:
    """The rollouts of a file, up to the first that is damaged: nothing behind it can be trusted."""
    from rlreplay.storage import iter_rollouts

    try:
        for index, rollout in enumerate(iter_rollouts(path)):
            yield Record(str(path), None, index, rollout=rollout)
    except ReplayError as error:
        bare = error.blamed_on(None).located(row=error.row)
        kind = "unreadable" if error.sample is None else kind_of(error)
        yield Record(str(path), None, error.sample, error=bare, kind=kind)
    advance(path.stat().st_size)


# Lines


def _line_records(path: Path, options: ReadOptions, advance: Advance) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, (raw, size) in enumerate(_raw_lines(file), start=1):
            for record in _records_of(raw, size, options):
                yield replace(record, file=str(path), line=number)
            advance(size)


def _raw_lines(file: BinaryIO) -> Iterator[tuple[bytes | None, int]]:
    """(line, bytes read) of each line; None for one that is longer than `MAX_LINE_BYTES`."""
    while raw := file.readline(MAX_LINE_BYTES + 1):
        size, fits = len(raw), len(raw) <= MAX_LINE_BYTES
        while not fits and raw and not raw.endswith(b"\n"):
            raw = file.readline(MAX_LINE_BYTES)
            size += len(raw)
        yield raw if fits else None, size


def _records_of(raw: bytes | None, size: int, options: ReadOptions) -> Iterator[Record]:
    """The records of one line, without their place in the file; none of a blank line."""
    if raw is None:
        yield _bad(_broken(f"{size} bytes", f"at most {MAX_LINE_BYTES} bytes"), "broken_json")
        return
    if raw.isspace():
        return
    try:
        payload = json.loads(raw)
    except json.JSONDecodeError as error:  # its own "line 2" is the end of this one
        got = f"{error.msg} at character {error.pos} of {len(error.doc)}"
        yield _bad(_broken(got, "one JSON value"), "broken_json")
        return
    except (ValueError, RecursionError) as error:  # no UTF-8, too long a number, too deep
        yield _bad(_broken(str(error), "one JSON value"), "broken_json")
        return
    try:
        bodies = list(_bodies(payload))
    except ReplayError as error:
        yield _bad(error.blamed_on(None), "invalid")
        return
    index = 0
    for body, prompt in bodies:
        for record in _responses(body, prompt, options, index):
            yield record
            index += 1
    if not bodies:
        yield _bad(_error("the line holds no response", "at least one", "none", _LOST), "empty")


def _bodies(payload: Any) -> Iterator[tuple[Any, Any]]:
    """(body, prompt ids or None) of each response in a line."""
    body, prompts = payload, None
    if isinstance(payload, dict) and "response" in payload and not _known(payload):
        body, prompts = payload["response"], payload.get("prompt_ids")
    listed = body if isinstance(body, list) else [body]
    each = [None] * len(listed) if prompts is None else prompts_for(prompts, len(listed))
    for part, prompt in zip(listed, each, strict=True):
        fields = part if isinstance(part, dict) else {}
        beside = fields.get("prompt_ids", fields.get("prompt_token_ids"))
        yield part, beside if prompt is None else prompt


def _known(fields: dict[str, Any]) -> bool:
    return "meta_info" in fields or "choices" in fields


# Responses


def _responses(body: Any, prompt: Any, options: ReadOptions, first: int) -> Iterator[Record]:
    """A record for each response of a body; one for the body where it cannot be taken apart."""
    engine = options.engine
    try:
        engine = engine or _engine_of(body)
        parts = list(_single_choices(body))
    except ReplayError as error:
        kind: Kind = "invalid" if engine else "unknown_producer"
        yield Record("", None, first, engine, error=error, kind=kind)
        return
    if not parts:
        empty = _error("the response holds no choice", "at least one", "none", _LOST)
        yield Record("", None, first, engine, error=empty, kind="empty")
    for index, part in enumerate(parts, start=first):
        try:
            rollout = _load(engine, part, prompt, options)
        except ReplayError as error:
            # the sample is always 0 here: the response says where
            bare = error.blamed_on(None).located(row=error.row)
            yield Record("", None, index, engine, error=bare, kind=kind_of(error))
        else:
            mass = _log_kept_mass(part, rollout) if engine == "sglang" else None
            yield Record("", None, index, engine, rollout, mass)


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


def _single_choices(body: Any) -> Iterator[dict[str, Any]]:
    """The body, or a body for each of its choices: one that is bad spoils no other."""
    fields = mapping(body, "the response")
    if "choices" not in fields:
        yield fields
        return
    for choice in sequence(fields["choices"], "choices"):
        yield {**fields, "choices": [choice]}


def _load(engine: Engine, body: dict[str, Any], prompt: Any, options: ReadOptions) -> Rollout:
    if prompt is None and options.need_prompt:
        raise ReplayError(
            "the payload does not say its prompt",
            expected="prompt_ids beside the response",
            got="none",
            consequence="the response would be scored after another prompt",
        )
    if prompt is None:
        body, prompt = _without_prompt_length(body), _STAND_IN
    common: dict[str, Any] = {
        "prompt_ids": [prompt] if isinstance(prompt, list) else prompt,
        "vocab_size": options.vocab_size,
        "on_missing_mask": options.on_missing_mask,
    }
    if engine == "vllm":
        loaded = vllm.from_response(body, logprobs_mode=options.logprobs_mode, **common)
    elif engine == "slime":
        loaded = slime.from_response(body, log_probs_over=options.log_probs_over, **common)
    else:
        load = sglang.from_chat if "choices" in body else sglang.from_response
        loaded = load(body, on_uncommitted_token=options.on_uncommitted_token, **common)
    return loaded[0]


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


def _log_kept_mass(body: dict[str, Any], rollout: Rollout) -> Float64Array | None:
    """Full-vocabulary log-prob less support log-prob of each sampled token; None if not told."""
    holder = body["choices"][0] if "choices" in body else body
    entries = holder["meta_info"].get("output_token_logprobs")
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


def kind_of(error: ReplayError) -> Kind:
    """What `inspect` counts the error as."""
    if isinstance(error, MissingMaskError):
        return "missing_mask"
    return "token_outside_support" if isinstance(error, MissingTokenError) else "invalid"


def _bad(error: ReplayError, kind: Kind) -> Record:
    return Record("", None, None, error=error, kind=kind)


def _broken(got: str, expected: str) -> ReplayError:
    return _error("the line is no JSON", expected, got, _LOST)


def _error(problem: str, expected: str, got: str, consequence: str) -> ReplayError:
    return ReplayError(problem, expected=expected, got=got, consequence=consequence)
