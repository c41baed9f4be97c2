"""Support log-probs from hidden states on a GPU, beside the whole logits: time and memory.

    python benchmarks/hidden_gpu.py --out benchmarks/results/hidden_gpu.jsonl

Log-prob of the sampled token on its support, forward and forward + backward to the hidden states
and the output layer's weight, bf16, V = 151,936. Supports are Zipf-like: each row has one id of
each of n bands of ranks, of equal width in log rank, so a few hundred ids are in most supports.

"dense" makes the logits by one matrix product and scores them with `score_logits`, which reads
only the supports of them; "chunked" is `score_hidden` on its path through whole logits in bounded
memory; Liger's fused linear cross-entropy normalises over the vocabulary, without replay. Times
are medians by CUDA events behind other GPU work, with the ids already sorted, which is done once a
plan and timed apart. The gradient error is that of the hidden states, the largest against float64
over the largest, on 32 rows.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scores_gpu
import torch
from scores_gpu import Result
from torch import Tensor

from rlreplay import ParallelState, ReplayPlan, RolloutSamplingMask, RowLayout, score_logits
from rlreplay.hidden_scores import score_hidden
from rlreplay.id_segments import IdSegments

VOCAB = scores_gpu.CENTRE["vocab"]
IDS = (4, 8, 16, 50, 500)
SIZES = ((8192, 4096), (8192, 2048), (8192, 7168), (32768, 4096), (32768, 2048), (32768, 7168))
CHECKED_ROWS = 32
SPARSE, DENSE, CHUNKED = "sparse", "dense GEMM + score_logits", "chunked"
LIGER = "Liger fused linear CE, full vocab"

Step = Callable[[], Any]


@dataclass
class Inputs:
    hidden: Tensor
    """[R + 1, D]: a prompt of one token, so that rows [0, R) are scored"""
    weight: Tensor
    plan: ReplayPlan
    upstream: Tensor
    sampled: Tensor

    @property
    def rows(self) -> int:
        return self.plan.num_rows


def zipf_supports(rows: int, ids: int) -> tuple[np.ndarray, np.ndarray]:
    """Supports int64 [rows, ids] and a sampled token of each row, from a fixed seed."""
    rng = np.random.default_rng(0)
    bounds = np.round(np.geomspace(1, VOCAB + 1, ids + 1)).astype(np.int64) - 1
    bounds = np.maximum.accumulate(bounds - np.arange(ids + 1)) + np.arange(ids + 1)
    ranks = bounds[:-1] + (rng.random((rows, ids)) * np.diff(bounds)).astype(np.int64)
    supports = rng.permutation(VOCAB)[ranks]
    return supports, supports[np.arange(rows), rng.integers(0, ids, rows)]


def make_inputs(hidden: Tensor, weight: Tensor, ids: int) -> Inputs:
    rows = len(hidden) - 1
    supports, sampled = zipf_supports(rows, ids)
    plan = ReplayPlan.build(
        [np.concatenate([[0], sampled])],
        [RolloutSamplingMask(supports.reshape(-1), np.arange(rows + 1) * ids, vocab_size=VOCAB)],
        RowLayout.packed([rows + 1], [rows]),
        parallel=ParallelState.single(),
        vocab_size=VOCAB,
        device="cuda",
    )
    upstream = scores_gpu.noise()[:rows].clone()
    return Inputs(hidden, weight, plan, upstream, torch.from_numpy(sampled).to("cuda"))


def through_hidden(inputs: Inputs, path: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def forward(hidden: Tensor, weight: Tensor) -> Tensor:
        log_probs = score_hidden(hidden, weight, inputs.plan, path=path).log_probs
        assert log_probs is not None
        return log_probs

    return forward


def dense(inputs: Inputs) -> Callable[[Tensor, Tensor], Tensor]:
    def forward(hidden: Tensor, weight: Tensor) -> Tensor:
        log_probs = score_logits(hidden @ weight.T, inputs.plan).log_probs
        assert log_probs is not None
        return log_probs

    return forward


def liger(inputs: Inputs) -> Callable[[Tensor, Tensor], Tensor]:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def forward(hidden: Tensor, weight: Tensor) -> Tensor:
        rows = hidden[: inputs.rows]
        loss: Tensor = liger_fused_linear_cross_entropy(
            rows, weight, inputs.sampled, reduction="sum"
        )
        return loss

    return forward


def steps(inputs: Inputs, forward: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Step]:
    def alone() -> Tensor:
        with torch.no_grad():
            return forward(inputs.hidden, inputs.weight)

    def both() -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (inputs.hidden, inputs.weight)]
        value = forward(*leaves)
        upstream = inputs.upstream if value.ndim else None
        return torch.autograd.grad(value, leaves, upstream)

    return {"forward": alone, "forward+backward": both}


def gradient_error(inputs: Inputs, step: Step) -> float:
    """Of the hidden states, against float64, on some rows."""
    chosen = torch.arange(0, inputs.rows, inputs.rows // CHECKED_ROWS, device="cuda")
    actual = step()[0][chosen].double()
    ids = inputs.plan.ids.view(inputs.rows, -1)[chosen].long()
    leaf = inputs.hidden[chosen].double().requires_grad_()
    x = torch.einsum("rd,rnd->rn", leaf, inputs.weight[ids].double())
    at = (ids == inputs.sampled[chosen, None]).int().argmax(1, keepdim=True)
    log_probs = torch.log_softmax(x, -1).gather(1, at).squeeze(1)
    (exact,) = torch.autograd.grad(log_probs, leaf, inputs.upstream[chosen].double())
    return float((actual - exact).abs().max() / exact.abs().max())


def weight_difference(inputs: Inputs) -> float:
    """Between the weight's gradients of the sparse and the dense path, the largest over the
    largest; both are rounded to bf16, the dense path's logits too."""
    sparse = steps(inputs, through_hidden(inputs, "sparse"))["forward+backward"]()[1]
    other = steps(inputs, dense(inputs))["forward+backward"]()[1]
    return float((sparse - other).abs().max() / other.abs().max())


def measure(inputs: Inputs, path: str, repeats: int) -> Iterator[Result]:
    make = {
        SPARSE: lambda: through_hidden(inputs, "sparse"),
        CHUNKED: lambda: through_hidden(inputs, "chunked"),
        DENSE: lambda: dense(inputs),
        LIGER: lambda: liger(inputs),
    }[path]
    for work, step in steps(inputs, make()).items():
        result: Result = {"path": path, "work": work}
        try:
            step()
            if work == "forward+backward" and path != LIGER:
                result["gradient_error"] = gradient_error(inputs, step)
            result["ms"] = round(scores_gpu.milliseconds(step, scores_gpu.BEHIND, repeats), 4)
            result["peak_bytes"] = scores_gpu.peak_bytes(step)
        except Exception as error:
            if path in (SPARSE, CHUNKED, DENSE):  # ours are not to fail; a peer may
                raise
            result["failed"] = scores_gpu.first_line(error)
        yield result
        torch.cuda.empty_cache()


def sort_milliseconds(plan: ReplayPlan) -> float:
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        IdSegments.of(plan.ids)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return round(float(np.median(times)), 4)


def sweep(quick: bool) -> Iterator[Result]:
    generator = torch.Generator("cuda").manual_seed(0)
    for rows, width in SIZES[:1] if quick else SIZES:
        draw = lambda *shape: torch.randn(  # noqa: E731
            *shape, generator=generator, device="cuda", dtype=torch.bfloat16
        )
        hidden, weight = draw(rows + 1, width), draw(VOCAB, width).mul_(2 / width**0.5)
        for ids in IDS:
            inputs = make_inputs(hidden, weight, ids)
            point = {"rows": rows, "width": width, "vocab": VOCAB, "ids": ids, "dtype": "bf16"}
            sort = sort_milliseconds(inputs.plan)
            for result in measure(inputs, SPARSE, 15):
                yield {**point, **result, "sort_ms": sort}
            if ids != 16:
                continue
            difference = weight_difference(inputs)
            others = (DENSE, CHUNKED, LIGER) if (rows, width) == SIZES[0] else (DENSE,)
            for path in others:
                for result in measure(inputs, path, 7):
                    extra = {"weight_gradient_difference": difference} if path == DENSE else {}
                    yield {**point, **result, **extra}
        del hidden, weight, inputs
        torch.cuda.empty_cache()


def print_table(results: list[Result]) -> None:
    dense_ms = {(r["rows"], r["width"], r["work"]): r["ms"] for r in results if r["path"] == DENSE}
    lines = []
    for row in results:
        start = [f"{row['rows']:,}", f"{row['width']:,}", f"{row['ids']}", row["path"], row["work"]]
        if "failed" in row:
            lines.append([*start, row["failed"][:40], "", "", ""])
            continue
        reference = dense_ms.get((row["rows"], row["width"], row["work"]))
        error = row.get("gradient_error")
        lines.append(
            [
                *start,
                f"{row['ms']:.3f}",
                "" if reference is None else f"{reference / row['ms']:.1f}x",
                f"{row['peak_bytes'] / 2**30:.2f}",
                "" if error is None else f"{error:.1e}",
            ]
        )
    columns = ("R", "D", "ids", "path", "work", "ms", "dense / it", "peak GiB", "gradient error")
    scores_gpu.print_rows(columns, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write JSON lines to this file")
    parser.add_argument("--quick", action="store_true", help="R = 8,192, D = 4,096 only")
    parser.add_argument("--results", type=Path, help="print a file, measure nothing")
    options = parser.parse_args()
    if options.results:
        print_table(scores_gpu.read_results(options.results))
        return
    facts = scores_gpu.environment(scores_gpu.copy_bandwidth())
    results = []
    for result in sweep(options.quick):
        results.append({**result, **facts})
        if options.out:
            with options.out.open("w" if len(results) == 1 else "a") as file:
                file.write(json.dumps(results[-1]) + "\n")
    print_table(results)


if __name__ == "__main__":
    main()
