"""Every form that a loader takes: how to make one, how to load it, and a slow second reading.

A second reading (`decoders`) is plain Python over the payload, value by value, that shares nothing
with the loaders. It gives what an accepted payload must have been loaded as, and fails where a
value is not of the type that the form has there.
"""

from __future__ import annotations

import base64
import importlib
import itertools
import math
import random
import struct
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rlreplay.engines import sglang, slime, transformers, vllm
from rlreplay.rollout import Rollout
from rlreplay.sampling_mask import RolloutSamplingMask
from tests.fast.payloads import VOCAB, Drawn

MASK = "output_token_sampling_mask"
LOG_PROBS = "output_token_sampling_logprobs"
LENGTH = "output_token_sampling_mask_length"
PAD, EOS = VOCAB - 1, VOCAB - 2


@dataclass(frozen=True)
class Read:
    """What a response says, in plain lists; None in place of what is not checked."""

    tokens: list[int] | None
    supports: list[list[int] | None]
    log_probs: list[float] | None = None


@dataclass(frozen=True)
class Form:
    make: Callable[[Drawn], Any]
    load: Callable[[Any], Any]
    """of the payload: a `Rollout`, several, or a mask"""
    decoders: tuple[Callable[[Any], list[Read]], ...]
    """second readings, of which one must be what was loaded"""
    whole: bool = True
    """whether the payload is one value, rather than a dict of the loader's arguments"""


def draw(rng: random.Random) -> Drawn:
    """A response of 1 to 5 tokens, none of which is the padding or the EOS."""
    supports = [
        rng.sample(range(VOCAB - 2), rng.choice((1, 1, 2, 3, 5))) for _ in range(rng.randint(1, 5))
    ]
    return Drawn(
        prompt=[rng.randrange(VOCAB - 2) for _ in range(rng.randint(1, 3))],
        tokens=[rng.choice(row) for row in supports],
        supports=supports,
        weights=[[rng.randint(1, 1000) for _ in row] for row in supports],
        finish_reason=rng.choice(("stop", "length", "abort")),
    )


def ends_of(n: int) -> list[int]:
    """Where the chunks of a stream of `n` rows end: one, then two at a time."""
    return sorted({*range(1, n + 1, 2), n})


# Reading one value after another


def integer(value: Any) -> int:
    assert isinstance(value, int | np.integer), f"{value!r} passed for an integer"
    assert not isinstance(value, bool | np.timedelta64), f"{value!r} passed for an integer"
    return int(value)


def integers(values: Any) -> list[int]:
    if isinstance(values, torch.Tensor):
        values = values.numpy()
    assert isinstance(values, list | tuple | np.ndarray | array | range), type(values)
    return [integer(value) for value in values]


def number(value: Any) -> float:
    assert isinstance(value, int | float | np.floating), f"{value!r} passed for a number"
    assert not isinstance(value, bool), f"{value!r} passed for a number"
    return float(np.float32(value))


def numbers(values: Any) -> list[float]:
    if isinstance(values, torch.Tensor):
        values = values.float().numpy()
    return [number(value) for value in values]


def field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def rows_of(ids: Any, offsets: Any) -> list[list[int]]:
    listed, ends = integers(ids), integers(offsets)
    assert ends[0] == 0
    assert ends[-1] == len(listed)
    assert ends == sorted(ends)
    return [listed[a:b] for a, b in itertools.pairwise(ends)]


def selected(tokens: list[int], supports: list[list[int]], values: Any) -> list[float] | None:
    """The sampled tokens' log-probs of SGLang's either mode."""
    if values is None:
        return None
    if not any(isinstance(v, list | tuple | np.ndarray | torch.Tensor) for v in values):
        return numbers(values)
    triples = zip(tokens, supports, values, strict=True)
    return [numbers(row)[support.index(token)] for token, support, row in triples]


# SGLang


def sglang_body(r: Drawn, rows: slice = slice(None), support: bool = False) -> dict[str, Any]:
    values = r.support_log_probs() if support else r.log_probs()
    done = rows.stop is None or rows.stop == len(r)
    total = len(r) if rows.stop is None else rows.stop
    meta = {
        "id": "request",
        "finish_reason": {"type": r.finish_reason} if done else None,
        "prompt_tokens": len(r.prompt),
        "completion_tokens": total,
        "weight_version": "7",
        MASK: r.supports[rows],
        LOG_PROBS: values[rows],
        LENGTH: total,
    }
    return {"output_ids": r.tokens[rows], "meta_info": meta}


def read_sglang(body: Any, ids: str = "output_ids") -> Read:
    meta = body["meta_info"]
    aborted = field(meta.get("finish_reason"), "type") == "abort"
    aborted = aborted or meta.get("finish_reason") == "abort"
    if aborted and not body.get(ids) and not meta.get(MASK):
        return Read([], [])  # before its first token
    tokens, supports = integers(body[ids]), [integers(row) for row in meta[MASK]]
    return Read(tokens, supports, selected(tokens, supports, meta.get(LOG_PROBS)))


def sglang_stream(r: Drawn, cumulative: bool) -> list[dict[str, Any]]:
    starts = [0, *ends_of(len(r))[:-1]]
    pairs = zip(starts, ends_of(len(r)), strict=True)
    return [sglang_body(r, slice(0 if cumulative else start, end)) for start, end in pairs]


def read_sglang_stream(chunks: Any, cumulative: bool) -> Read:
    chunks = list(chunks)
    if cumulative:
        return read_sglang(chunks[-1])
    parts = [
        read_sglang({**chunk, "meta_info": {**chunk["meta_info"], "finish_reason": None}})
        for chunk in chunks
        if chunk["output_ids"]
    ]
    values = [part.log_probs for part in parts]
    return Read(
        flat(part.tokens or [] for part in parts),
        flat(part.supports for part in parts),
        None if None in values else flat(v or [] for v in values),
    )


def sglang_chunks(r: Drawn, support: bool) -> dict[str, Any]:
    values, chunks = (r.support_log_probs() if support else r.log_probs()), []
    for start, end in itertools.pairwise([0, *ends_of(len(r))]):
        rows, own = r.supports[start:end], values[start:end]
        chunks.append(
            SimpleNamespace(
                lengths=np.array([len(row) for row in rows]),
                token_ids=np.array(flat(rows), np.int32),
                logprobs=np.array(flat(own) if support else own, np.float32),
            )
        )
    return {"chunks": chunks, "output_ids": r.tokens}


def read_sglang_chunks(payload: Any) -> Read:
    lengths, ids, values = (
        flat(read(getattr(chunk, name)) for chunk in payload["chunks"])
        for name, read in (("lengths", integers), ("token_ids", integers), ("logprobs", numbers))
    )
    tokens = integers(payload["output_ids"])
    ends = [0, *itertools.accumulate(lengths)]
    supports = rows_of(ids, ends)
    if len(values) != len(tokens):
        by_row = [values[a:b] for a, b in itertools.pairwise(ends)]
        return Read(tokens, supports, selected(tokens, supports, by_row))
    return Read(tokens, supports, values)


# vLLM


def vllm_choice(r: Drawn, rows: slice = slice(None), csr: bool = False) -> dict[str, Any]:
    supports, tokens = r.supports[rows], r.tokens[rows]
    done = rows.stop is None or rows.stop == len(r)
    mask: Any = supports
    if csr:
        ends = [0, *itertools.accumulate(map(len, supports))]
        mask = {"token_ids": flat(supports), "offsets": ends}
    return {
        "index": 0,
        "finish_reason": r.finish_reason if done else None,
        "token_ids": tokens,
        "sampling_mask": mask,
        "logprobs": {
            "content": [
                {"token_id": t, "logprob": v}
                for t, v in zip(tokens, r.log_probs()[rows], strict=True)
            ]
        },
    }


def vllm_completion(r: Drawn, rows: slice = slice(None), csr: bool = False) -> SimpleNamespace:
    fields = vllm_choice(r, rows, csr)
    content = fields["logprobs"]["content"]
    logged = [{each["token_id"]: SimpleNamespace(logprob=each["logprob"])} for each in content]
    mask = fields["sampling_mask"]
    if csr:
        mask = SimpleNamespace(
            token_ids=np.array(mask["token_ids"], np.int32), offsets=torch.tensor(mask["offsets"])
        )
    else:
        mask = SimpleNamespace(token_ids=mask)
    own = {"sampling_mask": mask, "logprobs": logged, "token_ids": array("q", fields["token_ids"])}
    return SimpleNamespace(**{**fields, **own})


def read_vllm(choice: Any) -> Read:
    tokens, mask = integers(field(choice, "token_ids")), field(choice, "sampling_mask")
    ids = field(mask, "token_ids") if not isinstance(mask, list | tuple) else mask
    offsets = field(mask, "offsets") if not isinstance(mask, list | tuple) else None
    supports = [integers(row) for row in ids] if offsets is None else rows_of(ids, offsets)
    entries = field(choice, "logprobs")
    entries = entries.get("content") if isinstance(entries, dict) else entries
    if entries is None:
        return Read(tokens, supports)
    values = []
    for token, entry in zip(tokens, entries, strict=True):
        if "logprob" in entry:
            assert entry.get("token_id") is None or integer(entry["token_id"]) == token
            values.append(number(entry["logprob"]))
        else:
            values.append(number(getattr(entry[token], "logprob", entry[token])))
    return Read(tokens, supports, values)


def vllm_stream(r: Drawn, cumulative: bool, csr: bool) -> list[Any]:
    chunks: list[Any] = []
    for start, end in itertools.pairwise([0, *ends_of(len(r))]):
        part = vllm_completion(r, slice(0 if cumulative else start, end), csr)
        chunks.append(SimpleNamespace(request_id="r", prompt_token_ids=None, outputs=[part]))
    return chunks


def read_vllm_stream(chunks: Any, cumulative: bool) -> Read:
    listed: list[Any] = []
    for chunk in chunks:
        choices = field(chunk, "choices" if isinstance(chunk, dict) else "outputs")
        listed += [chunk] if choices is None else choices
    if cumulative:
        return read_vllm(listed[-1])
    told = [choice for choice in listed if field(choice, "token_ids") is not None]
    parts = [read_vllm(choice) for choice in told if len(field(choice, "token_ids"))]
    values = [part.log_probs for part in parts]
    return Read(
        flat(part.tokens or [] for part in parts),
        flat(part.supports for part in parts),
        None if None in values else flat(v or [] for v in values),
    )


def vllm_tensors(r: Drawn) -> dict[str, Any]:
    width, size = 3, -(-VOCAB // 8)
    token_ids = np.full((len(r), width), -7, np.int32)
    packed = np.zeros((len(r), size), np.uint8)
    for row, ids in enumerate(r.supports):
        token_ids[row, : len(ids[:width])] = ids[:width]
        for i in ids:
            packed[row, i // 8] |= 1 << (i % 8)
    counts = torch.tensor([len(ids) for ids in r.supports], dtype=torch.int32)
    return {
        "token_ids": token_ids,
        "counts": counts,
        "packed_mask": torch.from_numpy(packed),
        "vocab_size": VOCAB,
    }


def read_vllm_tensors(payload: Any) -> Read:
    counts, supports = integers(payload["counts"]), []
    for row, count in enumerate(counts):
        if count <= payload["token_ids"].shape[1]:
            supports.append(integers(payload["token_ids"][row][:count]))
            continue
        packed = integers(payload["packed_mask"][row])
        supports.append(
            [8 * b + j for b, byte in enumerate(packed) for j in range(8) if byte >> j & 1]
        )
        assert len(supports[-1]) == count
    assert len(counts) == len(payload["token_ids"])
    return Read(None, [sorted(row) for row in supports])


# slime


def to_base64(values: list[int]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}i", *values)).decode()


def int32s(value: Any) -> list[int]:
    if isinstance(value, str):
        value = base64.b64decode(value, validate=True)
    if isinstance(value, bytes | bytearray):
        return list(struct.unpack(f"<{len(value) // 4}i", value))
    return integers(value)


def slime_body(r: Drawn, encode: Callable[[list[int]], Any]) -> dict[str, Any]:
    logged = zip(r.log_probs(), r.tokens, strict=True)
    return {
        "output_ids": r.tokens,
        "meta_info": {
            "finish_reason": {"type": r.finish_reason},
            "completion_tokens": len(r),
            "top_p_token_ids": encode(flat(r.supports)),
            "top_p_token_offsets": encode([0, *itertools.accumulate(map(len, r.supports))]),
            "output_token_logprobs": [[value, token, None] for value, token in logged],
        },
    }


def read_slime(body: Any) -> Read:
    meta = body["meta_info"]
    logged, ids = meta.get("output_token_logprobs"), body.get("output_ids")
    tokens = integers([entry[1] for entry in logged] if ids is None else ids)
    values = None if logged is None else numbers([entry[0] for entry in logged])
    pair = (
        next(
            meta[f"top_p_{kept}token_{name}"]
            for kept in ("", "kept_")
            if meta.get(f"top_p_{kept}token_{name}") is not None
        )
        for name in ("ids", "offsets")
    )
    return Read(tokens, rows_of(*map(int32s, pair)), values)


def slime_batch(r: Drawn) -> dict[str, Any]:
    return {
        "tokens": [r.prompt + r.tokens, np.array(r.prompt + r.tokens)],
        "response_lengths": [len(r)] * 2,
        "loss_masks": [[1] * len(r), None],
        "rollout_log_probs": [r.log_probs(), np.array(r.log_probs(), np.float32)],
        "rollout_top_p_token_ids": [flat(r.supports), np.array(flat(r.supports), np.int32)],
        "rollout_top_p_token_offsets": [[0, *itertools.accumulate(map(len, r.supports))]] * 2,
    }


def read_slime_batch(fields: Any) -> list[Read]:
    reads = []
    for index, tokens in enumerate(fields["tokens"]):
        n = integer(fields["response_lengths"][index])
        ids = fields["rollout_top_p_token_ids"][index]
        rows = rows_of(int32s(ids), int32s(fields["rollout_top_p_token_offsets"][index]))
        masks = fields.get("loss_masks")
        for t, row in enumerate(rows):
            assert row or not masks[index][t], "an unrestricted row in the loss"
        column = fields.get("rollout_log_probs")
        values = None if column is None or column[index] is None else numbers(column[index])
        response = integers(tokens)[len(tokens) - n :]
        reads.append(Read(response, [row or None for row in rows], values))
    return reads


# transformers


def generated(r: Drawn) -> dict[str, Any]:
    """Two rows: the response, and its first token alone, an EOS and padding."""
    steps = len(r) + 1
    scores = torch.full((steps, 2, VOCAB), -math.inf)
    for t, (ids, weights) in enumerate(zip(r.supports, r.weights, strict=True)):
        scores[t, 0, ids] = torch.tensor(weights).float().log()
    scores[0, 1, r.supports[0]] = torch.tensor(r.weights[0]).float().log()
    scores[-1, 0, EOS] = scores[1, 1, EOS] = 0.0
    rows = [[*r.tokens, EOS], [r.tokens[0], EOS, *[PAD] * (steps - 2)]]
    return {
        "output": {
            "sequences": torch.tensor([r.prompt + row for row in rows]),
            "scores": tuple(scores),
        },
        "prompt_lengths": [len(r.prompt)],
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }


def read_generated(payload: Any) -> list[Read]:
    output, eos = payload["output"], payload.get("eos_token_id")
    ends = [] if eos is None else [eos] if isinstance(eos, int | np.integer) else integers(eos)
    scores, reads = output["scores"], []
    for index, row in enumerate(output["sequences"]):
        tokens = integers(row)[len(row) - len(scores) :]
        end = next((t + 1 for t, token in enumerate(tokens) if token in ends), len(tokens))
        assert all(token == payload["pad_token_id"] for token in tokens[end:])
        supports = [
            [i for i, score in enumerate(scores[t][index].tolist()) if score > -math.inf]
            for t in range(end)
        ]
        reads.append(Read(tokens[:end], supports))
    return reads


# Files


def file_form(path: Path) -> Form:
    """A file of two rollouts, as bytes; what is in it must come out, or nothing."""
    storage = importlib.import_module("rlreplay.storage")
    written: list[Rollout] = []

    def make(r: Drawn) -> bytes:
        written[:] = [r.rollout(), r.rollout(rollout_log_probs=None)]
        storage.write_rollouts(path, written)
        return path.read_bytes()

    def load(content: bytes) -> list[Rollout]:
        path.write_bytes(content)
        return list(storage.read_rollouts(path))

    return Form(make, load, (lambda content: read_of(written),))


# The table

OPTIONS: dict[str, Any] = {"prompt_ids": [1, 2, 3], "vocab_size": VOCAB}


def _sglang_stream_form(cumulative: bool, told: bool) -> Form:
    styles = [cumulative] if told else [True, False]
    return Form(
        lambda r: unprompted(sglang_stream(r, cumulative)),
        lambda p: sglang.from_stream(p, cumulative=cumulative if told else None, **OPTIONS),
        tuple(lambda p, style=style: [read_sglang_stream(p, style)] for style in styles),
    )


def _vllm_stream_form(cumulative: bool, csr: bool) -> Form:
    return Form(
        lambda r: vllm_stream(r, cumulative, csr),
        lambda p: vllm.from_stream(p, cumulative=cumulative, **OPTIONS),
        (lambda p: [read_vllm_stream(p, cumulative)],),
    )


def unprompted(bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The loaders are given another prompt than the response was drawn with."""
    for body in bodies:
        body["meta_info"]["prompt_tokens"] = 3
    return bodies


def _each(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


FORMS: dict[str, Form] = {
    "sglang response, selected": Form(
        lambda r: unprompted([sglang_body(r), sglang_body(r)]),
        lambda p: sglang.from_response(p, **OPTIONS),
        (lambda p: [read_sglang(body) for body in _each(p)],),
    ),
    "sglang response, support": Form(
        lambda r: unprompted([sglang_body(r, support=True)]),
        lambda p: sglang.from_response(p, **OPTIONS),
        (lambda p: [read_sglang(body) for body in _each(p)],),
    ),
    "sglang chat": Form(
        lambda r: {
            "choices": [
                {"completion_token_ids": b["output_ids"], "meta_info": b["meta_info"]}
                for b in unprompted([sglang_body(r), sglang_body(r)])
            ]
        },
        lambda p: sglang.from_chat(p, **OPTIONS),
        (lambda p: [read_sglang(c, "completion_token_ids") for c in p["choices"]],),
    ),
    "sglang stream, cumulative": _sglang_stream_form(True, told=True),
    "sglang stream, incremental": _sglang_stream_form(False, told=True),
    "sglang stream, cumulative, untold": _sglang_stream_form(True, told=False),
    "sglang stream, incremental, untold": _sglang_stream_form(False, told=False),
    "sglang chunks, selected": Form(
        lambda r: sglang_chunks(r, support=False),
        lambda p: sglang.from_chunks(p["chunks"], output_ids=p["output_ids"], **OPTIONS),
        (lambda p: [read_sglang_chunks(p)],),
        whole=False,
    ),
    "sglang chunks, support": Form(
        lambda r: sglang_chunks(r, support=True),
        lambda p: sglang.from_chunks(p["chunks"], output_ids=p["output_ids"], **OPTIONS),
        (lambda p: [read_sglang_chunks(p)],),
        whole=False,
    ),
    "vllm response": Form(
        lambda r: {"choices": [vllm_choice(r), vllm_choice(r, csr=True)]},
        lambda p: vllm.from_response(p, **OPTIONS),
        (lambda p: [read_vllm(c) for body in _each(p) for c in body["choices"]],),
    ),
    "vllm choice": Form(
        vllm_choice,
        lambda p: vllm.from_choice(p, **OPTIONS),
        (lambda p: [read_vllm(p)],),
    ),
    "vllm output": Form(
        lambda r: SimpleNamespace(outputs=[vllm_completion(r), vllm_completion(r, csr=True)]),
        lambda p: vllm.from_output(p, **OPTIONS),
        (lambda p: [read_vllm(c) for c in getattr(p, "outputs", None) or []],),
    ),
    "vllm stream, HTTP": Form(
        lambda r: [
            {"choices": [vllm_choice(r, slice(start, end))]}
            for start, end in itertools.pairwise([0, *ends_of(len(r))])
        ],
        lambda p: vllm.from_stream(p, cumulative=False, **OPTIONS),
        (lambda p: [read_vllm_stream(p, False)],),
    ),
    "vllm stream, cumulative": _vllm_stream_form(True, csr=False),
    "vllm stream, cumulative, CSR": _vllm_stream_form(True, csr=True),
    "vllm stream, deltas": _vllm_stream_form(False, csr=False),
    "vllm stream, deltas, CSR": _vllm_stream_form(False, csr=True),
    "vllm tensors": Form(
        vllm_tensors,
        lambda p: vllm.from_tensors(**p),
        (lambda p: [read_vllm_tensors(p)],),
        whole=False,
    ),
    "slime response, base64": Form(
        lambda r: [slime_body(r, to_base64)],
        lambda p: slime.from_response(p, log_probs_over="support", **OPTIONS),
        (lambda p: [read_slime(body) for body in _each(p)],),
    ),
    "slime response, arrays": Form(
        lambda r: slime_body(r, lambda v: np.array(v, np.int32)),
        lambda p: slime.from_response(p, log_probs_over="support", **OPTIONS),
        (lambda p: [read_slime(body) for body in _each(p)],),
    ),
    "slime batch": Form(
        slime_batch,
        lambda p: slime.from_train_data(p, vocab_size=VOCAB, log_probs_over="support"),
        (lambda p: read_slime_batch(p),),
    ),
    "transformers": Form(
        generated,
        lambda p: transformers.from_generate(**p, vocab_size=VOCAB),
        (lambda p: read_generated(p),),
        whole=False,
    ),
}


def read_of(loaded: Any) -> list[Read]:
    """What was loaded, as a reading."""
    if isinstance(loaded, RolloutSamplingMask):
        return [Read(None, loaded.to_mask_list())]
    return [
        Read(
            rollout.response_ids.tolist(),
            rollout.sampling_mask.to_mask_list(),
            None if rollout.rollout_log_probs is None else rollout.rollout_log_probs.tolist(),
        )
        for rollout in ([loaded] if isinstance(loaded, Rollout) else loaded)
    ]


def agrees(loaded: Read, decoded: Read) -> bool:
    """Are they the same? Ids of a row in any order, log-probs only where both have them."""
    supports = [None if row is None else sorted(row) for row in decoded.supports]
    same = loaded.tokens == decoded.tokens and loaded.supports == supports
    both = loaded.log_probs is not None and decoded.log_probs is not None
    return same and (not both or loaded.log_probs == decoded.log_probs)
