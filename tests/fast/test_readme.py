"""The README says what is there: its first code block is the quickstart, and that runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
