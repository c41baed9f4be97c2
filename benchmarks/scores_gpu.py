"""Log-prob and entropy on a GPU, beside what trainers do today: time, memory, gradient error.

    python benchmarks/scores_gpu.py --out benchmarks/results/scores_gpu.jsonl
    python benchmarks/scores_gpu.py --results benchmarks/results/scores_gpu.jsonl --plot scores.png

All paths score the same 4,096 rows in one run. Times are medians by CUDA events, with the L2 cache
flushed before each call, in three ways: eager on an idle GPU (which waits for the launches from
Python), eager behind other GPU work, as the loss stands behind the model in a training step
(launches are hidden as far as they can be), and as the replay of a CUDA graph (GPU time alone).
Peak memory is what a call allocates over what was there, gradient included. The gradient error is
the largest against float64, relative to the largest gradient, on 64 of the rows.

Each peer is treated kindly: its dense mask is there before the clock starts, its rows need no
gathering, and it may overwrite its input where it does so. Peers that can't run are listed with the
reason. One JSON line a measurement, with versions, commit and GPU.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlreplay import ParallelState, ReplayPlan, RolloutSamplingMask, RowLayout, score_logits
from rlreplay.kernels.reference import dense_scores, masked_log_softmax

ROWS = 4096
VOCABS = (32_768, 262_144, 151_936)  # the peers last: failed captures keep their memory
IDS = (8, 50, 1000)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ENTROPIES = ("off", "metric", "differentiable")
WORKS = ("forward", "forward+backward")
CENTRE = {"vocab": 151_936, "ids": 50}  # where the peers are measured
OURS, DENSE, MEGATRON = "rlreplay", "dense mask", "dense mask, Megatron fused CE"
COMPILED, CROSS_ENTROPY, LIGER = "torch.compile, full vocab", "F.cross_entropy", "Liger CE"

REPEATS, WARM_UP, CHECKED_ROWS, BEHIND = 25, 3, 64, 100

BYTES = """Bytes that rlreplay moves; e bytes a logit, R scored rows, T rows, N support ids in all:
  forward          36 N, and e R V where the entropy is asked for
  backward         68 N, and e T V (zeros), or e (R + T) V where the entropy is differentiable"""

Result = dict[str, Any]
Outputs = tuple[Tensor, ...]
"""Log-probs, and entropies where there are any, each [R]."""


@dataclass
class Inputs:
    """Logits `[R + 1, V]`: one sample, a prompt of one token, so that rows [0, R) are scored."""

    logits: Tensor
    plan: ReplayPlan
    sampled: Tensor
    upstream: Outputs
    """gradients of the log-probs and of the entropies"""

    @property
    def rows(self) -> Tensor:
        """[R, V], a view."""
        return self.logits[:ROWS]

    def mask(self) -> Tensor:
        """bool [R, V]: the dense form of the supports."""
        dense = torch.zeros(self.rows.shape, dtype=torch.bool, device=self.logits.device)
        return dense.index_put_(
            (self.plan.row_of_id(), self.plan.ids.long()), torch.ones((), device="cuda").bool()
        )


@dataclass(frozen=True)
class Scorer:
    """One way to score."""

    name: str
    forward: Callable[[Tensor], Outputs]
    """of logits [R + 1, V]"""
    replay: bool
    """whether log-probs are normalised over the support"""


def make_supports(vocab: int, ids: int) -> tuple[np.ndarray, np.ndarray]:
    """Random supports [R, ids] and one sampled token of each, from a fixed seed."""
    rng = np.random.default_rng(0)
    stride = vocab // ids
    supports = np.arange(ids) * stride + rng.integers(0, stride, (ROWS, ids))
    return supports, supports[np.arange(ROWS), rng.integers(0, ids, ROWS)]


@functools.cache
def noise() -> Tensor:
    """Standard normal numbers, drawn before anything is captured: a capture that fails leaves
    the CUDA generator unusable."""
    torch.manual_seed(0)
    return torch.randn(1 << 28, device="cuda")


def make_logits(vocab: int, dtype: torch.dtype) -> Tensor:
    """Normal logits of standard deviation 2, [ROWS + 1, vocab]; the noise repeats after 2**28."""
    logits = torch.empty(ROWS + 1, vocab, dtype=dtype, device="cuda")
    flat, source = logits.view(-1), noise()
    for part in flat.split(source.numel()):
        part.copy_(source[: part.numel()]).mul_(2)
    return logits


def make_inputs(logits: Tensor, ids: int) -> Inputs:
    vocab = logits.shape[1]
    supports, sampled = make_supports(vocab, ids)
    mask = RolloutSamplingMask(supports.reshape(-1), np.arange(ROWS + 1) * ids, vocab_size=vocab)
    plan = ReplayPlan.build(
        [np.concatenate([[0], sampled])],
        [mask],
        RowLayout.packed([ROWS + 1], [ROWS]),
        parallel=ParallelState.single(),
        vocab_size=vocab,
        device="cuda",
    )
    upstream = (noise()[:ROWS].clone(), noise()[ROWS : 2 * ROWS] * 0.1)
    return Inputs(logits, plan, torch.from_numpy(sampled).to("cuda"), upstream)


# Paths


def ours(inputs: Inputs, entropy: str) -> Scorer:
    names = ("log_probs",) if entropy == "off" else ("log_probs", "entropy")
    trained = names if entropy == "differentiable" else ("log_probs",)

    def forward(logits: Tensor) -> Outputs:
        scores = score_logits(logits, inputs.plan, scores=names, differentiable=trained)
        return tuple(scores.asked().values())

    return Scorer(OURS, forward, True)


def torch_entropy(rows: Tensor) -> Tensor:
    return torch.logsumexp(rows, dim=-1) - (torch.softmax(rows, dim=-1) * rows).sum(dim=-1)


def dense(inputs: Inputs, entropy: str) -> Scorer:
    mask, y = inputs.mask(), inputs.sampled[:, None]

    def forward(logits: Tensor) -> Outputs:
        rows = logits[:ROWS].float()
        log_probs = masked_log_softmax(rows, mask).gather(1, y).squeeze(1)
        return (log_probs,) if entropy == "off" else (log_probs, torch_entropy(rows))

    return Scorer(DENSE, forward, True)


def megatron(inputs: Inputs, entropy: str) -> Scorer:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    mask, y, group = inputs.mask(), inputs.sampled[:, None], group_of_one()
    torch._dynamo.reset()  # as in `compiled`: parts of it are compiled

    def forward(logits: Tensor) -> Outputs:
        # the masked copy protects fp32 logits, which it would overwrite
        masked = logits[:ROWS].masked_fill(~mask, -torch.inf)[:, None]
        log_probs = -fused_vocab_parallel_cross_entropy(masked, y, group)[:, 0]
        return (
            (log_probs,) if entropy == "off" else (log_probs, torch_entropy(logits[:ROWS].float()))
        )

    return Scorer(MEGATRON, forward, True)


def group_of_one() -> Any:
    """A tensor-parallel group of this process alone."""
    if not torch.distributed.is_initialized():
        store = torch.distributed.FileStore(tempfile.mkstemp()[1], 1)
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    return torch.distributed.group.WORLD


def compiled(inputs: Inputs, entropy: str) -> Scorer:
    y = inputs.sampled[:, None]
    # else a few sizes and types would reach the limit of recompilations, and run uncompiled
    torch._dynamo.reset()

    def forward(logits: Tensor) -> Outputs:
        log_p = torch.log_softmax(logits[:ROWS].float(), dim=-1)
        log_probs = log_p.gather(1, y).squeeze(1)
        return (log_probs,) if entropy == "off" else (log_probs, -(log_p.exp() * log_p).sum(-1))

    return Scorer(COMPILED, torch.compile(forward), False)


def cross_entropy(inputs: Inputs, entropy: str) -> Scorer:
    def forward(logits: Tensor) -> Outputs:
        return (-F.cross_entropy(logits[:ROWS], inputs.sampled, reduction="none"),)

    return Scorer(CROSS_ENTROPY, forward, False)


def liger(inputs: Inputs, entropy: str) -> Scorer:
    from liger_kernel.transformers.functional import liger_cross_entropy

    def forward(logits: Tensor) -> Outputs:
        # a leaf of its own: it writes the gradient over its input in the forward
        return (-liger_cross_entropy(logits[:ROWS], inputs.sampled, reduction="none"),)

    return Scorer(LIGER, forward, False)


PEERS: dict[str, tuple[Callable[[Inputs, str], Scorer], tuple[str, ...]]] = {
    DENSE: (dense, ("off", "differentiable")),
    MEGATRON: (megatron, ("off", "differentiable")),
    COMPILED: (compiled, ("off", "differentiable")),
    CROSS_ENTROPY: (cross_entropy, ("off",)),
    LIGER: (liger, ("off",)),
}


# Measuring


def step_of(path: Scorer, inputs: Inputs, work: str) -> Callable[[], Any]:
    if work == "forward":

        def forward() -> Outputs:
            with torch.no_grad():
                return path.forward(inputs.logits)

        return forward

    def both() -> Tensor:
        leaf = inputs.logits.detach().requires_grad_()
        values = path.forward(leaf)
        pairs = zip(values, inputs.upstream[: len(values)], strict=True)
        trained = [(value, up.to(value.dtype)) for value, up in pairs if value.requires_grad]
        outputs, upstream = zip(*trained, strict=True)
        return torch.autograd.grad(outputs, leaf, upstream)[0]

    return both


_flush = None


def milliseconds(call: Callable[[], Any], behind: int = 0, repeats: int = REPEATS) -> float:
    """Median of the repeats, each with a cold L2 cache.

    Args:
        behind: how often the cache is flushed once more before, which keeps the GPU busy for
            about 40 us each while the host runs ahead.
    """
    global _flush
    if _flush is None:
        _flush = torch.empty(1 << 27, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(1 + behind):
            _flush.zero_()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def graph_milliseconds(step: Callable[[], Any]) -> tuple[float | None, str | None]:
    """Of a replay; or None, and why the step can't be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            kept = step()
    except Exception as error:
        torch.cuda.synchronize()
        release(graph)
        return None, first_line(error)
    result = milliseconds(graph.replay)
    del kept
    release(graph)
    return result, None


def release(graph: torch.cuda.CUDAGraph) -> None:
    """Give back the memory that a capture took for itself."""
    graph.reset()
    gc.collect()
    torch.cuda.empty_cache()


def peak_bytes(step: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = step()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def gradient_error(path: Scorer, inputs: Inputs, entropy: str, kept: Tensor) -> float:
    """Largest error over some rows, relative to the largest gradient there.

    Args:
        kept: these rows of the logits, from before a path could overwrite them.
    """
    chosen = chosen_rows()
    actual = step_of(path, inputs, "forward+backward")()[chosen].double()
    vocab = inputs.logits.shape[1]
    support = torch.ones(len(chosen), vocab, dtype=torch.bool, device="cuda")
    if path.replay:
        support = inputs.mask()[chosen]
    leaf = kept.double().requires_grad_()
    scores = dense_scores(leaf, inputs.sampled[chosen], support)
    value = (scores["log_probs"] * inputs.upstream[0][chosen]).sum()
    if entropy == "differentiable":
        value = value + (scores["entropy"] * inputs.upstream[1][chosen]).sum()
    (exact,) = torch.autograd.grad(value, leaf)
    return float((actual - exact).abs().max() / exact.abs().max())


def chosen_rows() -> Tensor:
    return torch.arange(0, ROWS, ROWS // CHECKED_ROWS, device="cuda")


def copy_bandwidth() -> float:
    """Bytes read and written a second by a copy of 2 GiB."""
    source = torch.empty(1 << 31, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.numel() / (milliseconds(lambda: target.copy_(source)) / 1e3)


def bytes_moved(inputs: Inputs, work: str, entropy: str) -> int:
    """By the formula in `BYTES`."""
    size, vocab, ids = inputs.logits.element_size(), inputs.logits.shape[1], inputs.plan.num_ids
    moved = 36 * ids + (0 if entropy == "off" else size * ROWS * vocab)
    if work == "forward":
        return moved
    passes = 2 * ROWS + 1 if entropy == "differentiable" else ROWS + 1
    return moved + 68 * ids + size * passes * vocab


def measure(path: Scorer, inputs: Inputs, work: str, entropy: str, bandwidth: float) -> Result:
    # Liger overwrites the logits: what it may not destroy is put back at the end
    kept = inputs.logits.clone() if path.name == LIGER else None
    rows = inputs.logits[chosen_rows()]
    result: Result = {}
    if work == "forward+backward":
        result["gradient_error"] = gradient_error(path, inputs, entropy, rows)
    step = step_of(path, inputs, work)
    for _ in range(WARM_UP):
        step()
    result["eager_ms"] = round(milliseconds(step), 4)
    result["queued_ms"] = round(milliseconds(step, BEHIND), 4)
    result["peak_bytes"] = peak_bytes(step)
    graph, reason = graph_milliseconds(step)
    result["graph_ms"] = graph if graph is None else round(graph, 4)
    if reason:
        result["graph_reason"] = reason
    if path.name == OURS:
        moved = bytes_moved(inputs, work, entropy)
        best = result["eager_ms"] if graph is None else graph
        result["bytes"] = moved
        result["share_of_copy_bandwidth"] = round(moved / (best / 1e3) / bandwidth, 4)
    if kept is not None:
        inputs.logits.copy_(kept)
    return result


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200]


def attempts(make: Any, inputs: Inputs, work: str, entropy: str, bandwidth: float) -> Result:
    try:
        return measure(make(inputs, entropy), inputs, work, entropy, bandwidth)
    except Exception as error:  # a peer that is not installed, or does not run here
        return {"failed": first_line(error)}


def sweep(quick: bool, bandwidth: float) -> Iterator[Result]:
    for vocab in VOCABS:
        for name, dtype in DTYPES.items():
            if quick and vocab != CENTRE["vocab"]:
                continue
            logits = make_logits(vocab, dtype)
            for ids in (CENTRE["ids"],) if quick else IDS:
                inputs = make_inputs(logits, ids)
                point = {"vocab": vocab, "ids": ids, "dtype": name, "rows": ROWS}
                for label, make, entropy, work in points(vocab, ids):
                    # ours is not to fail; a peer may
                    if label == OURS:
                        result = measure(make(inputs, entropy), inputs, work, entropy, bandwidth)
                    else:
                        result = attempts(make, inputs, work, entropy, bandwidth)
                    yield {"path": label, "work": work, "entropy": entropy, **point, **result}
                    torch.cuda.empty_cache()
            del inputs, logits
            torch.cuda.empty_cache()


def points(vocab: int, ids: int) -> Iterator[tuple[str, Any, str, str]]:
    """What is measured at one size: all of ours; all peers at the centre; the dense path at any
    vocabulary."""
    for entropy in ENTROPIES:
        for work in WORKS:
            yield OURS, ours, entropy, work
    if ids != CENTRE["ids"]:
        return
    if vocab != CENTRE["vocab"]:
        yield DENSE, dense, "differentiable", "forward+backward"
        return
    for label, (make, entropies) in PEERS.items():
        for entropy in entropies:
            for work in WORKS:
                yield label, make, entropy, work


# Reporting


def environment(bandwidth: float) -> Result:
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        **{name: version_of(name) for name in ("torch", "triton", "megatron-core", "liger-kernel")},
        "commit": os.environ.get("RLREPLAY_COMMIT")
        or output_of("git", "describe", "--always", "--dirty"),
        "date": time.strftime("%Y-%m-%d"),
        "copy_bytes_per_second": round(bandwidth),
    }


def output_of(*command: str) -> str:
    try:
        run = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.splitlines()[0].strip() if run.stdout.strip() else "unknown"


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


COLUMNS = (
    "path", "work", "entropy", "type", "V", "ids", "eager ms", "queued ms", "graph ms", "of copy",
    "peak GiB", "gradient error",
)  # fmt: skip


def cells(row: Result) -> list[str]:
    start = [row["path"], row["work"], row["entropy"], row["dtype"]]
    start += [f"{row['vocab']:,}", f"{row['ids']:,}"]
    if "failed" in row:
        return [*start, "failed", *[""] * 5]
    graph, share = row["graph_ms"], row.get("share_of_copy_bandwidth")
    error = row.get("gradient_error")
    return [
        *start,
        f"{row['eager_ms']:.3f}",
        f"{row['queued_ms']:.3f}",
        "not captured" if graph is None else f"{graph:.3f}",
        "" if share is None else f"{share:.1%}",
        f"{row['peak_bytes'] / 2**30:.3f}",
        "" if error is None else f"{error:.1e}",
    ]


def print_rows(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(columns, *lines, strict=True)]
        for line in (columns, *lines):
            print("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip())
    else:
        table = Table(*columns)
        for line in lines:
            table.add_row(*line)
        # rich would cut the columns to a terminal's width where there is none
        Console(width=180).print(table)


def print_table(results: list[Result]) -> None:
    print_rows(COLUMNS, [cells(row) for row in results])
    for path, reason in sorted({(r["path"], r["failed"]) for r in results if "failed" in r}):
        print(f"not measured: {path}: {reason}")
    for path, reason in sorted(
        {(r["path"], r["graph_reason"]) for r in results if r.get("graph_reason")}
    ):
        print(f"not captured in a CUDA graph: {path}: {reason}")


def draw(results: list[Result], file: Path) -> None:
    """Time and memory of forward + backward with differentiable entropy at the centre, bf16."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    wanted = {**CENTRE, "dtype": "bf16", "work": "forward+backward", "entropy": "differentiable"}
    latest = {r["path"]: r for r in results if all(r[k] == v for k, v in wanted.items())}
    bars = [r for r in latest.values() if "failed" not in r]
    if not bars:
        raise SystemExit(f"no results for {wanted}")
    names = [r["path"].replace(", ", ",\n") for r in bars]
    colours = ["#1b7f5c" if r["path"] == OURS else "#9aa5b1" for r in bars]
    figure, axes = plt.subplots(1, 2, figsize=(9, 0.9 + 0.62 * len(bars)), sharey=True)
    panels = (
        ("time behind queued work, ms", [r["queued_ms"] for r in bars], "{:.2f} ms"),
        ("peak extra memory, GiB", [r["peak_bytes"] / 2**30 for r in bars], "{:.2f} GiB"),
    )
    for axis, (label, values, form) in zip(axes, panels, strict=True):
        container = axis.barh(names, values, color=colours, height=0.62)
        axis.bar_label(container, [form.format(v) for v in values], padding=4, fontsize=9)
        axis.set_xlabel(label)
        axis.set_xlim(0, max(values) * 1.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    one = bars[0]
    figure.suptitle(
        "Log-prob + differentiable entropy, forward + backward\n"
        f"{one['rows']:,} rows x {one['vocab']:,} bf16, {one['ids']} ids a row, {one['gpu']}",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(file, dpi=150)


def read_results(file: Path) -> list[Result]:
    return [json.loads(line) for line in file.read_text().splitlines() if line.strip()]


def run(options: argparse.Namespace) -> list[Result]:
    if not torch.cuda.is_available():
        raise SystemExit(f"no CUDA device for torch {torch.__version__}")
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    facts = environment(bandwidth)
    print(json.dumps(facts), flush=True)
    started, results = time.perf_counter(), []
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("")
    for result in sweep(options.quick, bandwidth):
        results.append({**result, **facts})
        line = json.dumps(results[-1])
        if options.out:
            with options.out.open("a") as file:
                file.write(line + "\n")
        else:
            print(line, flush=True)
    print(BYTES)
    print(f"copy: {bandwidth / 1e12:.3f} TB/s, read and written; shares are of the graph's time")
    print_table(results)
    print(f"{len(results)} measurements in {time.perf_counter() - started:.0f} s")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="GPU scores beside the trainers' usual paths")
    parser.add_argument("--out", type=Path, help="write JSON lines to this file")
    parser.add_argument("--quick", action="store_true", help="one vocabulary and 50 ids only")
    parser.add_argument("--plot", type=Path, help="draw bars into this file")
    parser.add_argument("--results", type=Path, help="take results from a file, measure nothing")
    options = parser.parse_args()
    if options.results:
        results = read_results(options.results)
        print_table(results)
    else:
        results = run(options)
    if options.plot:
        draw(results, options.plot)


if __name__ == "__main__":
    main()
