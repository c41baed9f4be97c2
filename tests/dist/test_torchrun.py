"""What runs as a user runs it: under torchrun, with processes of its own for every rank."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.batches import make_batch
from tests.dist import torchrun_smoke
from tests.dist.harness import TRANSPORT

ROOT = Path(__file__).parents[2]
# one rank a GPU on NCCL, and grids of as many ranks as there are GPUs
RANKS = torch.cuda.device_count() if TRANSPORT == "nccl" else 4
GRIDS = [(2, RANKS // 2)] if RANKS >= 4 else [(RANKS, 1), (1, RANKS)]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")


def run_python(*arguments: str, timeout: float) -> str:
    """The standard output of a Python that runs in the repository's root, and succeeds."""
    # One thread a rank: the ranks share this machine's cores.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }
    # without bytecode, each rank spends thrice the time on its imports
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except BaseException:
        process.terminate()  # torchrun then ends its ranks
        print(*process.communicate(), sep="\n")
        raise
    assert process.returncode == 0, f"exit code {process.returncode}\n{output}\n{errors}"
    return output


@pytest.mark.parametrize(("tp", "cp"), GRIDS)
def test_scores_and_gradient_on_processes_of_their_own(tmp_path: Path, tp: int, cp: int) -> None:
    module = ("-m", torchrun_smoke.__name__, "--tp", f"{tp}", "--cp", f"{cp}")
    run_python(*TORCHRUN, *module, "--out", str(tmp_path), timeout=60)
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    places = [(tp_rank, cp_rank) for cp_rank in range(cp) for tp_rank in range(tp)]
    assert [(r["tp_rank"], r["cp_rank"]) for r in reports] == places
    assert {r["backend"] for r in reports} == {"nccl" if TRANSPORT == "nccl" else "gloo"}
    # The context-parallel ranks hold every response row once, and each has some.
    lengths = make_batch(3, samples=8, max_response=20).response_lengths
    held = [r["rows"] for r in reports if r["tp_rank"] == 0]
    assert [sum(rows) for rows in zip(*held, strict=True)] == lengths
    assert all(sum(rows) > 0 for rows in held)


@pytest.mark.timeout(260)
@pytest.mark.parametrize(("tp", "cp"), GRIDS)
def test_the_megatron_example_does_not_depend_on_the_layout(
    tmp_path: Path, tp: int, cp: int
) -> None:
    example, saved = "examples/megatron_grpo.py", str(tmp_path / "run.pkl")
    grid = ("--tp", f"{tp}", "--cp", f"{cp}")
    sharded = run_python(*TORCHRUN, example, *grid, "--save", saved, timeout=80)
    unsharded = run_python(example, "--reference", saved, timeout=40)
    # sharded again, from the hidden states
    arguments = (*grid, "--reference", saved, "--hidden")
    hidden = run_python(*TORCHRUN, example, *arguments, timeout=80)
    for output in (unsharded, hidden):
        difference = re.search(r"largest difference .*: (\S+)", output)
        assert difference is not None, output
        assert float(difference[1]) <= 1e-5
    for output in (sharded, unsharded, hidden):
        rewards, ratios = _columns(output)
        # Replay: before an update, the trainer is the policy that sampled.
        assert ratios == pytest.approx([1] * len(ratios), abs=2e-5)
        assert rewards[-1] > rewards[0] + 0.3


def _columns(table: str) -> tuple[list[float], list[float]]:
    """Rewards and ratios of the table that the example prints."""
    rows = re.findall(r"^ *\d+ +(\d\.\d+) +(\d\.\d+) .*$", table, flags=re.MULTILINE)
    assert len(rows) == 6, table
    return [float(reward) for reward, _ in rows], [float(ratio) for _, ratio in rows]
