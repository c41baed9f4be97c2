"""Forward + backward of log-prob and entropy on the CPU, beside the dense-mask path.

    python benchmarks/scores_cpu.py [--out benchmarks/results/scores_cpu.jsonl]

Both paths do the same job on the same logits: log-prob of the sampled token on its support,
full-vocabulary entropy, and the logits' gradient of both. Every repetition of a path runs in a
process of its own, the two paths take turns, and the figures are medians. Peak memory is the
growth of the process's peak resident set over its size before the call (Linux). The plan is timed
beside filling a dense mask row by row in Python.

One JSON line a measurement: versions, commit, machine, sizes, seconds, bytes, ratios.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from environment import environment

from rlreplay import ParallelState, ReplayPlan, RolloutSamplingMask, RowLayout, score_logits
from rlreplay.kernels.reference import masked_log_softmax

PROMPT = 16


def make_batch(samples: int, response: int, vocab: int, ids: int) -> dict[str, Any]:
    """A packed micro-batch with `ids` ids a row, drawn from a fixed seed."""
    rng = np.random.default_rng(0)
    rows = samples * response
    stride = vocab // ids
    supports = np.arange(ids) * stride + rng.integers(0, stride, (rows, ids))
    sampled = supports[np.arange(rows), rng.integers(0, ids, rows)]
    tokens = [
        np.concatenate([rng.integers(0, vocab, PROMPT), part])
        for part in sampled.reshape(samples, response)
    ]
    masks = [
        RolloutSamplingMask(part.reshape(-1), np.arange(response + 1) * ids, vocab_size=vocab)
        for part in supports.reshape(samples, response, ids)
    ]
    lengths = {
        "total_lengths": [PROMPT + response] * samples,
        "response_lengths": [response] * samples,
    }
    return {"tokens": tokens, "masks": masks, "lengths": lengths, "sampled": sampled}


def build_plan(batch: dict[str, Any], vocab: int) -> ReplayPlan:
    return ReplayPlan.build(
        batch["tokens"],
        batch["masks"],
        RowLayout.packed(**batch["lengths"]),
        parallel=ParallelState.single(),
        vocab_size=vocab,
        device="cpu",
    )


def replay_step(logits: torch.Tensor, plan: ReplayPlan) -> None:
    scores = score_logits(logits, plan, scores=("log_probs", "entropy"))
    assert scores.log_probs is not None
    assert scores.entropy is not None
    (scores.log_probs.sum() + 0.01 * scores.entropy.sum()).backward()


def dense_step(logits: torch.Tensor, plan: ReplayPlan, mask: torch.Tensor, y: torch.Tensor) -> None:
    """The dense-mask path: masked copy, `log_softmax`, and a second softmax for the entropy."""
    rows = logits[plan.rows]
    log_probs = masked_log_softmax(rows, mask).gather(1, y[:, None]).squeeze(1)
    entropy = torch.logsumexp(rows, dim=-1) - (torch.softmax(rows, dim=-1) * rows).sum(dim=-1)
    (log_probs.sum() + 0.01 * entropy.sum()).backward()


def resident(field: str) -> int:
    """Bytes of this process's `VmRSS` or `VmHWM`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: peak memory needs Linux")


def measure_once(path: str, sizes: dict[str, int], threads: int) -> dict[str, float]:
    """Seconds of a step (the second of two) and peak memory of a step, in this process."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    vocab = sizes["vocab"]
    batch = make_batch(sizes["samples"], sizes["response"], vocab, sizes["ids"])
    plan = build_plan(batch, vocab)
    rows = sum(batch["lengths"]["total_lengths"])
    logits = torch.randn(rows, vocab).mul_(2).requires_grad_()
    if path == "replay":
        step: Callable[[], None] = lambda: replay_step(logits, plan)  # noqa: E731
    else:
        mask = torch.from_numpy(np.concatenate([m.to_dense(vocab) for m in batch["masks"]]))
        y = torch.from_numpy(batch["sampled"])
        step = lambda: dense_step(logits, plan, mask, y)  # noqa: E731
    step()
    logits.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident("VmRSS")
    started = time.perf_counter()
    step()
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "peak_bytes": resident("VmHWM") - before}


def in_new_process(path: str, sizes: dict[str, int], threads: int) -> dict[str, float]:
    """`measure_once` in a fresh interpreter, so that no path inherits another's heap."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, path, sizes, threads))
    process.start()
    theirs.close()
    result: dict[str, float] = ours.recv()
    process.join()
    return result


def _send(pipe: Connection, path: str, sizes: dict[str, int], threads: int) -> None:
    pipe.send(measure_once(path, sizes, threads))


def measure_scores(sizes: dict[str, int], repeats: int, threads: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, float]]] = {"replay": [], "dense": []}
    for _ in range(repeats):
        for path, results in runs.items():
            results.append(in_new_process(path, sizes, threads))
    rows = sizes["samples"] * (sizes["response"] + PROMPT)
    gradient = rows * sizes["vocab"] * 4
    figures: dict[str, Any] = {"what": "forward + backward, log-prob + entropy, fp32", **sizes}
    for path, results in runs.items():
        seconds = [r["seconds"] for r in results]
        figures[f"{path}_seconds"] = round(statistics.median(seconds), 4)
        figures[f"{path}_seconds_all"] = [round(s, 4) for s in seconds]
        peak = statistics.median(r["peak_bytes"] for r in results)
        figures[f"{path}_peak_in_gradients"] = round(peak / gradient, 3)
    pairs = zip(runs["dense"], runs["replay"], strict=True)
    figures["speedup"] = round(statistics.median(d["seconds"] / r["seconds"] for d, r in pairs), 2)
    figures["gradient_bytes"] = gradient
    return figures


def measure_plan(repeats: int) -> dict[str, Any]:
    """Host time of a plan beside filling a dense mask row by row, as trainers do."""
    sizes = {"samples": 64, "response": 512, "vocab": 4096, "ids": 8}
    batch = make_batch(**sizes)
    build_plan(batch, sizes["vocab"])
    plan_seconds, fill_seconds = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        build_plan(batch, sizes["vocab"])
        plan_seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
        for mask in batch["masks"]:
            dense = torch.zeros(len(mask), sizes["vocab"], dtype=torch.bool)
            for row, ids in enumerate(mask.to_mask_list()):
                dense[row, torch.tensor(ids)] = True
        fill_seconds.append(time.perf_counter() - started)
    plan, fill = statistics.median(plan_seconds), statistics.median(fill_seconds)
    return {
        "what": "plan building beside a row-by-row dense fill",
        **sizes,
        "plan_seconds": round(plan, 5),
        "fill_seconds": round(fill, 4),
        "speedup": round(fill / plan, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU scores beside the dense-mask path")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    base = {"samples": 4, "response": 512, "vocab": 32768, "ids": 50}
    cases = [base, {**base, "vocab": 151936, "response": 128}]
    results = [measure_scores(case, options.repeats, options.threads) for case in cases]
    results.append(measure_plan(options.repeats))
    facts = {**environment("torch", "numpy"), "threads": options.threads}
    lines = [json.dumps({**r, **facts}) for r in results]
    print("\n".join(lines))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a") as file:
            file.writelines(line + "\n" for line in lines)


if __name__ == "__main__":
    main()
