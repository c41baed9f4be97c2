"""Where these tests cannot run they are skipped, and the reason is printed (pytest's -ra)."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch


def missing() -> str | None:
    """What keeps these tests from running."""
    if not torch.cuda.is_available():
        return f"no CUDA device for torch {torch.__version__}"
    if importlib.util.find_spec("triton") is None:
        return "no triton"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1: kernels would not run on the GPU"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items:
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
