"""Support log-probs from hidden states on a GPU, beside the whole logits: time and memory.

    python benchmarks/hidden_gpu.py --out benchmarks/results/hidden_gpu.jsonl

Log-prob of the sampled token on its support, forward and forward + backward to the hidden states
and the output layer's weight, bf16, V = 151,936. Supports are Zipf-like: each row has one id of
each of n bands of ranks, of equal width in log rank.

"dense" makes the logits by one matrix product and scores them with `score_logits`, which reads
only the supports of them; "chunked" is `score_hidden` on its path through whole logits in bounded
memory; both are measured with the differentiable entropy too. "main_grad" adds the weight's
gradient to a float32 buffer of the trainer's, which is not counted as memory. Liger's fused linear
cross-entropy normalises over the vocabulary, without replay. "weight gradient" is that part alone,
added to a float32 buffer: as the library does it, and by atomics, whose order of addition differs
from run to run.

Times are medians by CUDA events behind other GPU work, with the ids already sorted. That is done
once a plan, takes `sort_ms` on an idle GPU, wall-clock, and is needed by the sparse backward alone;
the table's "used once" counts it in. The gradient error is that of the hidden states, the largest
against float64 over the largest, on 32 rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scores_gpu
import torch
import triton
import triton.language as tl
from scores_gpu import Result
from torch import Tensor

from rlreplay import ParallelState, ReplayPlan, RolloutSamplingMask, RowLayout, score_logits
from rlreplay.hidden_scores import MAX_BYTES, score_hidden
from rlreplay.id_segments import IdSegments
from rlreplay.kernels import triton_linear

VOCAB = scores_gpu.CENTRE["vocab"]
CENTRE = (8192, 4096)
ROWS, WIDTHS = (8192, 32768), (4096, 2048, 7168)
IDS = {8192: (4, 8, 16, 50, 500, 1000, 1500, 2000, 2500), 32768: (4, 8, 16, 50, 500, 2000)}
WHOLE_AT = (16, 1000, 1500, 2000, 2500)
"""Ids at which the paths through whole logits are measured too."""
CHECKED_ROWS = 32

SPARSE, DENSE, CHUNKED = "sparse", "dense GEMM + score_logits", "chunked"
MAIN_GRAD = "sparse, main_grad"
LIGER = "Liger fused linear CE, full vocab"
SORTED, ATOMICS = "sorted segments", "atomics"
LOG_PROBS, BOTH = ("log_probs",), ("log_probs", "entropy")

Step = Callable[[], Any]
Forward = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


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


def make_plan(rows: int, ids: int) -> tuple[ReplayPlan, Tensor]:
    """A plan and its sampled tokens."""
    supports, sampled = zipf_supports(rows, ids)
    plan = ReplayPlan.build(
        [np.concatenate([[0], sampled])],
        [RolloutSamplingMask(supports.reshape(-1), np.arange(rows + 1) * ids, vocab_size=VOCAB)],
        RowLayout.packed([rows + 1], [rows]),
        parallel=ParallelState.single(),
        vocab_size=VOCAB,
        device="cuda",
        sort_ids=True,
    )
    return plan, torch.from_numpy(sampled).to("cuda")


def through_hidden(inputs: Inputs, path: Any, names: Any, **options: Any) -> Forward:
    def forward(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        scores = score_hidden(hidden, weight, inputs.plan, scores=names, path=path, **options)
        return tuple(scores.asked().values())

    return forward


def into_main_grad(inputs: Inputs) -> Forward:
    buffer = torch.zeros(inputs.weight.shape, device="cuda")
    forward = through_hidden(inputs, "sparse", LOG_PROBS, weight_gradient="main_grad")

    def with_buffer(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        weight.main_grad = buffer  # type: ignore[attr-defined]
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]  # as under Megatron
        return forward(hidden, weight)

    return with_buffer


def dense(inputs: Inputs, names: Any) -> Forward:
    def forward(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        scores = score_logits(hidden @ weight.T, inputs.plan, scores=names)
        return tuple(scores.asked().values())

    return forward


def liger(inputs: Inputs) -> Forward:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def forward(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        rows = hidden[: inputs.rows]
        loss: Tensor = liger_fused_linear_cross_entropy(
            rows, weight, inputs.sampled, reduction="sum"
        )
        return (loss,)

    return forward


def steps(inputs: Inputs, forward: Forward) -> dict[str, Step]:
    def alone() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return forward(inputs.hidden, inputs.weight)

    def both() -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (inputs.hidden, inputs.weight)]
        values = forward(*leaves)
        upstream = [inputs.upstream if value.ndim else None for value in values]
        return torch.autograd.grad(values, leaves, upstream)

    return {"forward": alone, "forward+backward": both}


@triton.jit
def _atomics_kernel(grad, hidden, stride, rows, ids, out, width, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < width
    row = tl.load(hidden + tl.load(rows + n) * stride + lanes, mask=inside, other=0.0)
    value = row.to(tl.float32) * tl.load(grad + n)
    place = out + tl.load(ids + n).to(tl.int64) * width + lanes
    tl.atomic_add(place, value, mask=inside, sem="relaxed")


def weight_gradients(inputs: Inputs) -> dict[str, Step]:
    """The weight's gradient alone, added to a float32 buffer."""
    plan, hidden = inputs.plan, inputs.hidden
    buffer = torch.zeros(inputs.weight.shape, device="cuda")
    grad = scores_gpu.noise()[: plan.num_ids].clone()
    width, block = hidden.shape[1], 2048  # faster than 1,024 here

    def by_segments() -> Tensor:
        triton_linear.weight_gradient(grad, hidden, plan, buffer, True)
        return buffer

    def by_atomics() -> Tensor:
        _atomics_kernel[(plan.num_ids, triton.cdiv(width, block))](
            grad, hidden, hidden.stride(0), plan.id_rows, plan.ids, buffer, width, BLOCK=block
        )
        return buffer

    return {SORTED: by_segments, ATOMICS: by_atomics}


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
    sparse = steps(inputs, through_hidden(inputs, "sparse", LOG_PROBS))["forward+backward"]()[1]
    other = steps(inputs, dense(inputs, LOG_PROBS))["forward+backward"]()[1]
    return float((sparse - other).abs().max() / other.abs().max())


def measure(inputs: Inputs, path: str, names: tuple[str, ...], repeats: int) -> Iterator[Result]:
    make = {
        SPARSE: lambda: through_hidden(inputs, "sparse", names),
        MAIN_GRAD: lambda: into_main_grad(inputs),
        CHUNKED: lambda: through_hidden(inputs, "chunked", names),
        DENSE: lambda: dense(inputs, names),
        LIGER: lambda: liger(inputs),
    }[path]
    for work, step in steps(inputs, make()).items():
        result: Result = {"path": path, "work": work, "scores": "+".join(names)}
        if path == CHUNKED:
            result["max_bytes"] = MAX_BYTES
        try:
            step()
            if work == "forward+backward" and names == LOG_PROBS and path != LIGER:
                result["gradient_error"] = gradient_error(inputs, step)
            result.update(timed(step, repeats))
        except Exception as error:
            if path != LIGER:  # ours are not to fail; a peer may
                raise
            result["failed"] = scores_gpu.first_line(error)
        yield result
        torch.cuda.empty_cache()


def timed(step: Step, repeats: int) -> Result:
    milliseconds = scores_gpu.milliseconds(step, scores_gpu.BEHIND, repeats)
    return {"ms": round(milliseconds, 4), "peak_bytes": scores_gpu.peak_bytes(step)}


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

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    widths = WIDTHS[:1] if quick else WIDTHS
    weights = {width: draw(VOCAB, width).mul_(2 / width**0.5) for width in widths}
    for rows in ROWS[:1] if quick else ROWS:
        hidden = {width: draw(rows + 1, width) for width in widths}
        upstream = scores_gpu.noise()[:rows].clone()
        for ids in IDS[rows]:
            plan, sampled = make_plan(rows, ids)
            sort = sort_milliseconds(plan)
            for width in widths:
                inputs = Inputs(hidden[width], weights[width], plan, upstream, sampled)
                point = {"rows": rows, "width": width, "vocab": VOCAB, "ids": ids, "dtype": "bf16"}
                for result in at_point(inputs, ids, (rows, width) == CENTRE):
                    yield {**point, **result, "sort_ms": sort}
            del plan, inputs
            torch.cuda.empty_cache()


def at_point(inputs: Inputs, ids: int, centre: bool) -> Iterator[Result]:
    few = ids < 500
    yield from measure(inputs, SPARSE, LOG_PROBS, 15 if few else 7)
    if ids in WHOLE_AT:
        for path in (DENSE, CHUNKED):
            yield from measure(inputs, path, LOG_PROBS, 7)
    if ids == 16:
        yield {"path": "weights' difference", "ratio": weight_difference(inputs)}
        yield from measure(inputs, MAIN_GRAD, LOG_PROBS, 15)
        for path in (DENSE, CHUNKED):
            yield from measure(inputs, path, BOTH, 5)
    if centre and ids == 16:
        yield from measure(inputs, LIGER, LOG_PROBS, 7)
    if centre and ids in (16, 50, 500):
        for path, step in weight_gradients(inputs).items():
            yield {"path": path, "work": "weight gradient", **timed(step, 15)}


def print_table(results: list[Result]) -> None:
    lines = []
    for row in results:
        if "ratio" in row:
            continue
        start = [f"{row['rows']:,}", f"{row['width']:,}", f"{row['ids']}", row["path"], row["work"]]
        start.append(row.get("scores", ""))
        if "failed" in row:
            lines.append([*start, row["failed"][:40], "", "", "", ""])
            continue
        reference = dense_milliseconds(results, row)
        sorts = row["path"] in (SPARSE, MAIN_GRAD) and row["work"] == "forward+backward"
        once = row["ms"] + row["sort_ms"] if sorts else row["ms"]
        error = row.get("gradient_error")
        lines.append(
            [
                *start,
                f"{row['ms']:.3f}",
                "" if reference is None else f"{reference / row['ms']:.2f}x",
                "" if reference is None else f"{reference / once:.2f}x",
                f"{row['peak_bytes'] / 2**30:.2f}",
                "" if error is None else f"{error:.1e}",
            ]
        )
    columns = ("R", "D", "ids", "path", "work", "scores", "ms", "dense / it", "used once")
    scores_gpu.print_rows((*columns, "peak GiB", "error"), lines)


def dense_milliseconds(results: list[Result], row: Result) -> float | None:
    """Of the dense path at the same point; at the measured number of ids nearest to it."""
    same = ("rows", "width", "work", "scores")
    found = [
        (abs(r["ids"] - row["ids"]), r["ms"])
        for r in results
        if r["path"] == DENSE and all(r.get(key) == row.get(key) for key in same)
    ]
    return min(found)[1] if found else None


def break_even(results: list[Result], rows: int, width: int, other: str, work: str) -> str:
    """The ids a row at which the sparse path takes as long as another, to the nearest 50, on the
    line between the measured points around it."""
    times: dict[str, dict[int, float]] = {SPARSE: {}, other: {}}
    for r in results:
        here = (r["rows"], r["width"], r.get("work"), r.get("scores"))
        if r["path"] in times and here == (rows, width, work, "log_probs"):
            times[r["path"]][r["ids"]] = r["ms"]
    both = sorted(times[SPARSE].keys() & times[other].keys())
    behind = [times[SPARSE][n] - times[other][n] for n in both]
    for (n0, d0), (n1, d1) in itertools.pairwise(zip(both, behind, strict=True)):
        if d0 < 0 <= d1:
            return f"{round((n0 - d0 * (n1 - n0) / (d1 - d0)) / 50) * 50:,}"
    if not behind:
        return "not measured"
    return f"> {both[-1]:,}" if behind[-1] < 0 else f"< {both[0]:,}"


def print_break_even(results: list[Result]) -> None:
    columns, lines = list(itertools.product(("forward", "forward+backward"), (DENSE, CHUNKED))), []
    rows = CENTRE[0]  # where there are points close by
    for width in sorted(WIDTHS):
        found = [break_even(results, rows, width, other, work) for work, other in columns]
        lines.append([f"{rows:,}", f"{width:,}", *found])
    titles = [f"{work}, {other}" for work, other in columns]
    scores_gpu.print_rows(("R", "D", *titles), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write JSON lines to this file")
    parser.add_argument("--quick", action="store_true", help="R = 8,192, D = 4,096 only")
    parser.add_argument("--results", type=Path, help="print a file, measure nothing")
    options = parser.parse_args()
    if options.results:
        results = scores_gpu.read_results(options.results)
        print_table(results)
        print_break_even(results)
        return
    facts = scores_gpu.environment(scores_gpu.copy_bandwidth())
    results = []
    for result in sweep(options.quick):
        results.append({**result, **facts})
        if options.out:
            with options.out.open("w" if len(results) == 1 else "a") as file:
                file.write(json.dumps(results[-1]) + "\n")
    print_table(results)
    print_break_even(results)


if __name__ == "__main__":
    main()
