"""The README says what is there: its first code block is the quickstart, and that runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlreplay import Rollout, RolloutSamplingMask
from rlreplay.storage import read_rollouts

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_first_code_block_is_the_quickstart() -> None:
    first = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert first is not None
    assert first.group(1) == (ROOT / "examples" / "quickstart.py").read_text()


def test_the_quickstart_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "examples/quickstart.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [int(line.split()[0]) for line in lines] == [12, 13, 14]
    # the third response is greedy: singleton supports, log-prob exactly 0
    assert "log-prob 0.000" in lines[2]


def test_the_other_snippets_run_after_the_quickstart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    exec(blocks[0], names)
    rows = names["logits"].shape[1]
    names |= {
        "hidden": torch.randn(rows, 8),
        "weight": torch.randn(512, 8),
        "turns": conversation(),
    }
    for block in blocks[1:]:
        exec(block, names)
    response = sum(len(rollout) for rollout in names["rollouts"])
    assert names["scores"].log_probs.shape == (response,)
    assert names["sample"].mean.shape == ()
    assert names["whole"].loss_mask.tolist() == [1, 0, 1, 1]
    assert len(read_rollouts("step_7.parquet")) == len(names["rollouts"])


def conversation() -> list[Rollout]:
    """Two turns, with one token of a tool between them."""
    return [
        Rollout(
            prompt_ids=[1, 2],
            response_ids=[3],
            sampling_mask=RolloutSamplingMask.from_mask_list([[3, 4]]),
        ),
        Rollout(
            prompt_ids=[1, 2, 3, 9],
            response_ids=[4, 5],
            sampling_mask=RolloutSamplingMask.from_mask_list([[4, 6], [5, 7]]),
        ),
    ]


def test_files_that_the_readme_names_exist() -> None:
    named = re.findall(r"`((?:examples|benchmarks|tests|docs)/[\w./]+\.\w+)`", README)
    shown = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README)
    assert named
    assert shown
    for path in [*named, *shown]:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("module", sorted((ROOT / "rlreplay").glob("*.py")))
def test_the_module_map_names_every_module(module: Path) -> None:
    if module.name != "__init__.py":
        assert f"`{module.name}`" in README
