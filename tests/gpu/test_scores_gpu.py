"""The scores on a GPU at real sizes: what `KernelTests` asserts, and what needs a device to see."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.register_assert_rewrite("tests.kernel_checks")

from rlreplay import SCORE_NAMES, RowLayout, score_assembled, score_logits  # noqa: E402
from rlreplay import scores as scores_module  # noqa: E402
from rlreplay.kernels import torch_scores  # noqa: E402
from tests.kernel_checks import (  # noqa: E402
    SUPPORT_SCORES,
    Case,
    KernelTests,
    Truth,
    make_case,
    objective,
    plan_of,
    same_bits,
    scored,
    weights_of,
)

QWEN = 151_936
GPT2 = 50_257  # odd: rows of bf16 are not aligned to 4 bytes

# The first test of each kernel waits for its compilation.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(params=[QWEN, GPT2], ids="V={}".format)
def vocab_size(request: pytest.FixtureRequest) -> int:
    return request.param


class TestOnGpu(KernelTests):
    device = "cuda"
    scale = 16
    runs = 10


def ordinary_case(response: int = 512, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Case:
    """Supports of 50 ids and no unrestricted row, as rollouts have."""
    return make_case("cuda", [(8, response, "mixed")], QWEN, sizes=[50], dtype=dtype, **options)


@pytest.mark.parametrize("wanted", [("log_probs",), ("log_probs", "entropy"), SCORE_NAMES])
def test_gradient_error_against_float64(wanted: tuple[str, ...]) -> None:
    """The largest error, relative to the largest gradient."""
    case = ordinary_case(200, torch.float32)
    weights = {name: torch.ones_like(w) for name, w in weights_of(case.plan, wanted).items()}
    exact = Truth.of(case, case.logits, 1.0, weights).gradient
    _, gradient = scored(case.logits, case.plan, weights, scores=wanted)
    error = float((gradient - exact).abs().max() / exact.abs().max())
    assert error <= 2e-7


@contextmanager
def no_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_sync_would_be_found() -> None:
    value = torch.ones(1, device="cuda")
    with no_sync(), pytest.raises(RuntimeError, match="synchronizing"):
        value.item()


@pytest.mark.parametrize("wanted", [SUPPORT_SCORES, SCORE_NAMES])
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("per_row", [False, True])
def test_score_logits_has_no_sync(wanted: tuple[str, ...], backend: str, per_row: bool) -> None:
    case = TestOnGpu().case(QWEN, dtype=torch.bfloat16)
    weights = weights_of(case.plan, wanted)
    temperature = torch.full((case.plan.num_rows,), 0.7, device="cuda") if per_row else 0.7
    with no_sync():
        scored(
            case.logits,
            case.plan,
            weights,
            scores=wanted,
            backend=backend,
            temperature=temperature,
        )


def test_inplace_backward_has_no_sync() -> None:
    case = TestOnGpu().case(QWEN, dtype=torch.bfloat16)
    weights = weights_of(case.plan)
    leaf = case.logits.requires_grad_()
    options: Any = {"scores": SCORE_NAMES, "inplace_backward": True}
    with no_sync():
        objective(score_logits(leaf * 1, case.plan, **options).asked(), weights).backward()


def test_score_assembled_has_no_sync() -> None:
    case = TestOnGpu().case(QWEN, dtype=torch.bfloat16)
    weights = weights_of(case.plan)
    leaf = case.logits.requires_grad_()
    with no_sync():
        scores = score_assembled(leaf, case.plan, scores=SCORE_NAMES, temperature=0.7).asked()
        objective(scores, weights).backward()


@pytest.mark.parametrize("wanted", [("log_probs",), SCORE_NAMES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_graph(wanted: tuple[str, ...], dtype: torch.dtype) -> None:
    case = TestOnGpu().case(QWEN, dtype=dtype)
    weights = weights_of(case.plan, wanted)
    logits = case.logits.clone()

    def step() -> tuple[dict[str, Tensor], Tensor]:
        return scored(logits, case.plan, weights, scores=wanted, temperature=0.7)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for scale in (1.0, 0.5, 3.0):
        logits.copy_(case.logits * scale)
        graph.replay()
        same_bits(captured, step())


@pytest.mark.parametrize("wanted", [("log_probs",), ("log_probs", "entropy"), SCORE_NAMES])
@pytest.mark.parametrize("inplace", [False, True])
def test_memory_peak(wanted: tuple[str, ...], inplace: bool) -> None:
    case = ordinary_case(2048)
    made = case.logits.requires_grad_() * 1
    weights = weights_of(case.plan, wanted)
    gradient_bytes = made.numel() * made.element_size()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    scores = score_logits(made, case.plan, scores=wanted, inplace_backward=inplace).asked()
    (gradient,) = torch.autograd.grad(objective(scores, weights), made)
    growth = torch.cuda.max_memory_allocated() - before
    assert (gradient.data_ptr() == made.data_ptr()) == inplace
    assert growth <= (0.02 if inplace else 1.02) * gradient_bytes


def test_more_than_2_to_the_31_elements() -> None:
    prompt, response, kept = 14_980, 20, 23
    case = make_case("cuda", [(prompt, response, "mixed")], 2_000, sizes=[1, 50, 1000, None])
    free, _ = torch.cuda.mem_get_info()
    needed = 4 * (prompt + response) * QWEN * 2
    if free + torch.cuda.memory_reserved() < needed:
        pytest.skip(f"needs {needed >> 30} GiB of GPU memory")
    generator = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(kept, QWEN, generator=generator, device="cuda").mul_(3).bfloat16()
    logits = torch.zeros(prompt + response, QWEN, dtype=torch.bfloat16, device="cuda")
    assert logits.numel() > 2**31
    logits[-kept:] = rows
    plan = plan_of(case.tokens, case.masks, case.layout, QWEN, "cuda")
    alone = plan_of(
        [case.tokens[0][-kept:]], case.masks, RowLayout.packed([kept], [response]), QWEN, "cuda"
    )
    scores, gradient = scored(logits, plan, temperature=0.7)
    expected = scored(rows, alone, temperature=0.7)
    same_bits((scores, gradient[-kept:]), expected)
    assert int(gradient[:-kept].count_nonzero()) == 0
    # the same in the logits' own memory
    leaf = logits.requires_grad_()
    options: Any = {"scores": SCORE_NAMES, "temperature": 0.7, "backend": "triton"}
    made = leaf * 1
    values = score_logits(made, plan, inplace_backward=True, **options).asked()
    (inplace,) = torch.autograd.grad(objective(values, weights_of(plan)), made)
    assert torch.equal(inplace[-kept:], gradient[-kept:])
    assert int(inplace[:-kept].count_nonzero()) == 0


TEMPERATURES = [
    0.3,
    0.5,
    0.6,
    0.7,
    0.8,
    0.9,
    0.95,
    1.0,
    1.1,
    1.2,
    1.3,
    1.5,
    1.7,
    2.0,
    1 / 3,
    2**0.5,
]


@pytest.mark.parametrize("logits_dtype", [torch.bfloat16, torch.float32])
def test_true_on_policy_bits(vocab_size: int, logits_dtype: torch.dtype) -> None:
    case = TestOnGpu().case(vocab_size, dtype=logits_dtype, padding=3)
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.rand(20, generator=generator) * 2 + 0.05).tolist()
    for temperature in (*TEMPERATURES, *drawn):
        rows = case.logits[case.plan.rows, :vocab_size]
        # as SGLang divides in its on-policy mode: by a float32 tensor, back to the model's dtype
        x = rows.to(torch.bfloat16).div(torch.tensor([temperature], device="cuda"))
        x = x.to(torch.bfloat16)
        y = case.sampled[:, None]
        masked = x.masked_fill(~case.support, -torch.inf)
        values = score_assembled(
            case.logits,
            case.plan,
            scores=("log_probs", "full_log_probs"),
            temperature=temperature,
            model_dtype=torch.bfloat16,
        )
        for actual, row in ((values.log_probs, masked), (values.full_log_probs, x)):
            expected = torch.log_softmax(row, -1).gather(1, y)[:, 0]
            assert actual is not None
            assert torch.equal(actual, expected), temperature


def test_auto_is_triton_for_cuda_tensors_with_consecutive_columns() -> None:
    kernels = importlib.import_module("rlreplay.kernels.triton_scores")
    logits = torch.zeros(4, 8, device="cuda")
    assert scores_module.kernels_of("auto", logits) is kernels
    assert scores_module.kernels_of("auto", logits.t()) is torch_scores
    assert scores_module.kernels_of("torch", logits) is torch_scores
    case = TestOnGpu().case(GPT2)
    same_bits(scored(case.logits, case.plan, backend="auto"), scored(case.logits, case.plan))


# Inductor gives advice by warnings: on TF32, on the number of streaming multiprocessors.
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("wanted", [("log_probs",), SCORE_NAMES])
def test_torch_compile_without_a_graph_break(wanted: tuple[str, ...]) -> None:
    if not hasattr(torch.ops.rlreplay, "score_rows"):
        pytest.skip("torch.ops.rlreplay.score_rows is not registered")
    case = TestOnGpu().case(GPT2, dtype=torch.bfloat16)
    weights = weights_of(case.plan, wanted)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        # powers of two: however the operations around the scores are fused, they round nothing
        scores = score_logits(x * 2, case.plan, scores=wanted, temperature=1.4)
        return tuple(value * 2 for value in scores.asked().values())

    results = []
    for function in (step, torch.compile(step, fullgraph=True)):
        leaf = case.logits.detach().requires_grad_()
        scores = dict(zip(wanted, function(leaf), strict=True))
        objective(scores, weights).backward()
        assert leaf.grad is not None
        results.append(({k: v.detach() for k, v in scores.items()}, leaf.grad))
    same_bits(*results)
