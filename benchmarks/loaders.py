"""Engine payloads to rollouts: ids a second of every loader, beside the JSON parser.

    python benchmarks/loaders.py [--responses 512] [--out benchmarks/results/loaders.jsonl]

A batch of responses, by default 512 of 4,096 tokens with 8 support ids each, in the forms in which
engines hand them over; ids come highest weight first, so that every loader has to sort. Flat forms
(arrays, tensors, base64) are loaded from memory. Nested ones are JSON text, a text a response:
parsing it and keeping the nested lists is timed beside parsing it and loading it, in turns. Streams
are those of single responses, a chunk a token, decoded before the clock starts; cumulative ones
repeat everything in every chunk and are measured at two lengths.

32 distinct responses are drawn from a fixed seed and repeated. Figures are medians; every
repetition loads the whole batch and keeps what comes out until it ends. One JSON line a form.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from environment import environment

from rlreplay.engines import sglang, slime, vllm

VOCAB, DISTINCT = 151_936, 32
PROMPT = [1, 2, 3]
MASK, LOG_PROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"
OPTIONS: dict[str, Any] = {"prompt_ids": PROMPT, "vocab_size": VOCAB}
Result = dict[str, Any]


@dataclass(frozen=True)
class Response:
    """One response: supports and log-probs `[tokens, ids]`, highest weight first."""

    supports: np.ndarray
    support_log_probs: np.ndarray
    tokens: np.ndarray
    log_probs: np.ndarray

    @property
    def offsets(self) -> np.ndarray:
        rows, ids = self.supports.shape
        return np.arange(rows + 1, dtype=np.int32) * ids


def draw_response(rng: np.random.Generator, tokens: int, ids: int) -> Response:
    stride = VOCAB // ids
    supports = np.arange(ids) * stride + rng.integers(0, stride, (tokens, ids))
    weights = rng.random((tokens, ids)) + 0.01
    order = np.argsort(-weights, axis=1)
    supports, weights = (np.take_along_axis(each, order, axis=1) for each in (supports, weights))
    log_probs = np.log(weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    at = np.arange(tokens), rng.integers(0, ids, tokens)
    return Response(supports.astype(np.int32), log_probs, supports[at], log_probs[at])


# Flat forms: the payload of a response, and what loads it


def vllm_csr(r: Response) -> Any:
    mask = SimpleNamespace(token_ids=r.supports.reshape(-1), offsets=r.offsets)
    return SimpleNamespace(
        index=0,
        token_ids=r.tokens.tolist(),
        sampling_mask=mask,
        logprobs=[
            {t: SimpleNamespace(logprob=v)}
            for t, v in zip(r.tokens.tolist(), r.log_probs.tolist(), strict=True)
        ],
        finish_reason="stop",
    )


def vllm_tensors(r: Response) -> Any:
    counts = torch.full((len(r.tokens),), r.supports.shape[1], dtype=torch.int32)
    return torch.from_numpy(r.supports), counts, None, VOCAB


def slime_base64(r: Response) -> Any:
    def encoded(values: np.ndarray) -> str:
        return base64.b64encode(values.astype("<i4").tobytes()).decode()

    meta = {
        "finish_reason": {"type": "stop"},
        "top_p_token_ids": encoded(r.supports),
        "top_p_token_offsets": encoded(r.offsets),
    }
    return {"output_ids": r.tokens.tolist(), "meta_info": meta}


def sglang_chunks(r: Response, support: bool = False) -> Any:
    chunk = SimpleNamespace(
        lengths=np.diff(r.offsets),
        token_ids=r.supports.reshape(-1),
        logprobs=r.support_log_probs.reshape(-1) if support else r.log_probs,
    )
    return [chunk], r.tokens


FLAT: dict[str, tuple[Callable[[Response], Any], Callable[[Any], Any]]] = {
    "vLLM, CSR with log-probs": (vllm_csr, lambda p: vllm.from_output(p, **OPTIONS)),
    "vLLM, device tensors": (vllm_tensors, lambda p: vllm.from_tensors(*p)),
    "slime, base64": (slime_base64, lambda p: slime.from_response(p, **OPTIONS)),
    "SGLang, chunks, selected": (
        sglang_chunks,
        lambda p: sglang.from_chunks(p[0], output_ids=p[1], **OPTIONS),
    ),
    "SGLang, chunks, support": (
        lambda r: sglang_chunks(r, support=True),
        lambda p: sglang.from_chunks(p[0], output_ids=p[1], **OPTIONS),
    ),
}


# Nested forms


def sglang_json(r: Response, support: bool = False) -> str:
    values = r.support_log_probs if support else r.log_probs
    meta = {
        "finish_reason": {"type": "stop"},
        MASK: r.supports.tolist(),
        LOG_PROBS: values.tolist(),
    }
    return json.dumps({"output_ids": r.tokens.tolist(), "meta_info": meta})


def vllm_json(r: Response) -> str:
    content = [
        {"token_id": t, "logprob": v, "rank": None, "top_logprobs": []}
        for t, v in zip(r.tokens.tolist(), r.log_probs.tolist(), strict=True)
    ]
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": r.tokens.tolist(),
        "sampling_mask": r.supports.tolist(),
        "logprobs": {"content": content},
    }
    return json.dumps({"choices": [choice]})


NESTED: dict[str, tuple[Callable[[Response], str], Callable[[Any], Any]]] = {
    "SGLang, JSON, selected": (sglang_json, lambda p: sglang.from_response(p, **OPTIONS)),
    "SGLang, JSON, support": (
        lambda r: sglang_json(r, support=True),
        lambda p: sglang.from_response(p, **OPTIONS),
    ),
    "vLLM, JSON": (vllm_json, lambda p: vllm.from_response(p, **OPTIONS)),
}


# Streams, a chunk a token


def sglang_stream(r: Response, cumulative: bool) -> list[Any]:
    rows, tokens = r.supports.tolist(), r.tokens.tolist()
    values = r.log_probs.tolist()
    chunks = []
    for end in range(1, len(tokens) + 1):
        new = slice(0 if cumulative else end - 1, end)
        meta = {MASK: rows[new], LOG_PROBS: values[new], f"{MASK}_length": end}
        chunks.append({"output_ids": tokens[new], "meta_info": meta})
    return chunks


def vllm_stream(r: Response, cumulative: bool) -> list[Any]:
    rows, tokens = r.supports.tolist(), r.tokens.tolist()
    chunks = []
    for end in range(1, len(tokens) + 1):
        new = slice(0 if cumulative else end - 1, end)
        mask = SimpleNamespace(token_ids=rows[new])
        chunks.append(SimpleNamespace(token_ids=tokens[new], sampling_mask=mask))
    return chunks


STREAMS: dict[str, tuple[Callable[..., list[Any]], Callable[..., Any]]] = {
    "SGLang": (sglang_stream, sglang.from_stream),
    "vLLM": (vllm_stream, vllm.from_stream),
}


# Measuring


def seconds_of(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - started
    del kept
    return seconds


def figures(form: str, ids: int, seconds: list[float], **more: Any) -> Result:
    median = statistics.median(seconds)
    return {
        "form": form,
        "million_ids_per_second": round(ids / median / 1e6, 3),
        "seconds": round(median, 4),
        "seconds_all": [round(s, 4) for s in seconds],
        **more,
    }


def repeated(payloads: list[Any], responses: int) -> list[Any]:
    return list(itertools.islice(itertools.cycle(payloads), responses))


def measure_flat(drawn: list[Response], responses: int, repeats: int) -> list[Result]:
    results = []
    for form, (make, load) in FLAT.items():
        payloads = repeated([make(r) for r in drawn], responses)
        seconds = [seconds_of(lambda: list(map(load, payloads))) for _ in range(repeats)]  # noqa: B023
        results.append(figures(form, responses * drawn[0].supports.size, seconds))
    return results


def measure_nested(drawn: list[Response], responses: int, repeats: int) -> list[Result]:
    results = []
    for form, (make, load) in NESTED.items():
        texts = repeated([make(r) for r in drawn], responses)
        parse, both = [], []
        for _ in range(repeats):
            parse.append(seconds_of(lambda: list(map(json.loads, texts))))  # noqa: B023
            both.append(seconds_of(lambda: [load(json.loads(text)) for text in texts]))  # noqa: B023
        ratio = statistics.median(b / p for b, p in zip(both, parse, strict=True))
        more = {
            "parse_and_keep_seconds": round(statistics.median(parse), 4),
            "parse_and_keep_seconds_all": [round(s, 4) for s in parse],
            "to_parse_and_keep": round(ratio, 3),
        }
        results.append(figures(form, responses * drawn[0].supports.size, both, **more))
    return results


def measure_streams(response: Response, repeats: int) -> list[Result]:
    results = []
    for name, (make, load) in STREAMS.items():
        for cumulative, parts in ((False, (1,)), (True, (2, 1))):
            for part in parts:
                n = len(response.tokens) // part
                fields = (response.supports, response.support_log_probs)
                columns = (response.tokens, response.log_probs)
                head = Response(*(each[:n] for each in (*fields, *columns)))
                chunks = make(head, cumulative)
                seconds = [
                    seconds_of(lambda: load(chunks, cumulative=cumulative, **OPTIONS))  # noqa: B023
                    for _ in range(repeats)
                ]
                style = "cumulative" if cumulative else "incremental"
                form = f"{name}, stream, {style}, {n} chunks"
                results.append(figures(form, head.supports.size, seconds, responses=1, tokens=n))
    return results


def print_table(results: list[Result]) -> None:
    print(f"{'form':44} {'M ids/s':>9} {'seconds':>9} {'parse+keep':>11} {'ratio':>6}")
    for r in results:
        parse, ratio = r.get("parse_and_keep_seconds", ""), r.get("to_parse_and_keep", "")
        speed = r["million_ids_per_second"]
        print(f"{r['form']:44} {speed:9.2f} {r['seconds']:9.3f} {parse:>11} {ratio:>6}")


def main() -> None:
    parser = argparse.ArgumentParser(description="engine payloads to rollouts")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--responses", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--ids", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    distinct = min(DISTINCT, options.responses)
    drawn = [draw_response(rng, options.tokens, options.ids) for _ in range(distinct)]
    results = measure_flat(drawn, options.responses, options.repeats)
    results += measure_streams(drawn[0], options.repeats)
    results += measure_nested(drawn, options.responses, options.repeats)
    print_table(results)
    if options.out:
        sizes = {name: getattr(options, name) for name in ("responses", "tokens", "ids")}
        lines = [json.dumps({**sizes, **r, **environment("torch", "numpy")}) for r in results]
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a") as file:
            file.writelines(line + "\n" for line in lines)


if __name__ == "__main__":
    main()
