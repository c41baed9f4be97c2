"""The Triton kernels in Triton's interpreter: what tests/gpu asserts, at small sizes, without one.

The interpreter is chosen when Triton is imported, for the whole process; so nothing is run where
that is too late, or where tests on a GPU may follow.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

pytest.register_assert_rewrite("tests.kernel_checks")

with pytest.MonkeyPatch.context() as _patch:
    if os.environ.get("TRITON_INTERPRET") != "1":
        if torch.cuda.is_available():
            reason = "tests/gpu needs the compiler: run this file alone with TRITON_INTERPRET=1"
            pytest.skip(reason, allow_module_level=True)
        if "triton" in sys.modules:
            reason = "triton is imported already, with its compiler: run this file alone"
            pytest.skip(reason, allow_module_level=True)
    _patch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton", reason="needs triton (pip install triton)")
    from rlreplay.kernels import triton_scores

from rlreplay import BackendError, score_logits  # noqa: E402
from tests.kernel_checks import KernelTests  # noqa: E402

# numpy tells of NaN and infinities that the kernels make on purpose
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


@pytest.fixture(autouse=True)
def _interpreter_with_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a row of a few hundred columns is several blocks."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton_scores, "_full_configuration", lambda logits: (64, 1, 1))
    monkeypatch.setattr(triton_scores, "_gradient_configuration", lambda logits: (128, 1))


@pytest.fixture(params=[300], ids="V={}".format)
def vocab_size(request: pytest.FixtureRequest) -> int:
    return request.param


class TestInInterpreter(KernelTests):
    device = "cpu"
    scale = 1
    runs = 1

    roundings = 2  # the interpreter cuts float32 off to bfloat16, where a GPU rounds to the nearest


@pytest.mark.parametrize("size", [2, 37, 63, 64, 65, 127, 128, 129, 256])
def test_vocabularies_around_the_size_of_a_block(size: int) -> None:
    tests = TestInInterpreter()
    tests.test_scores_and_gradient_are_within_the_error_budget(size, torch.float32, per_row=True)


def test_bad_and_missing_logits_in_a_vocabulary_smaller_than_a_block() -> None:
    tests = TestInInterpreter()
    tests.test_bad_logits_spoil_the_scores_that_read_them_and_no_others(37)
    tests.test_minus_infinity_outside_and_inside_the_support_counts_nothing(37, torch.float32)


def test_the_configurations_that_gpus_run_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    logits = torch.empty(1, 5000)
    assert triton_scores._full_configuration(logits)[0] == 4096
    tests = TestInInterpreter()
    tests.test_scores_and_gradient_are_within_the_error_budget(5000, torch.bfloat16, per_row=False)


def test_refused_on_the_cpu_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    case = TestInInterpreter().case(37)
    with pytest.raises(BackendError, match="cannot run here"):
        score_logits(case.logits, case.plan, backend="triton")
