"""The kernels for hidden states in Triton's interpreter: what tests/gpu asserts, at small sizes."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.linear_checks", "tests.kernel_checks")

# Skips where the interpreter cannot be chosen any more, and makes the scores' blocks small.
from tests.fast.test_triton_scores import _interpreter_with_small_blocks  # noqa: E402, F401
from tests.linear_checks import TritonTests  # noqa: E402

# numpy tells of NaN and infinities that the kernels make on purpose
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


class TestInInterpreter(TritonTests):
    device = "cpu"
    vocab = 60
