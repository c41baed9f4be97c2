"""What tells a benchmark's result from another's: versions, commit, machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

_CPUINFO = Path("/proc/cpuinfo")


def environment(*libraries: str) -> dict[str, Any]:
    """Commit, Python, the version of each of the libraries, CPU and date."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return {
        "commit": commit.stdout.strip() or "unknown",
        "python": platform.python_version(),
        **{library: importlib.metadata.version(library) for library in libraries},
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu() -> str:
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
