"""`score_logits` in a graph that torch.compile makes: no break, the same bits, and sound operators.

The backend "aot_eager" traces forward and backward as the default backend does, and needs no
compiler.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlreplay import SCORE_NAMES, BackendError, ReplayError, score_logits
from tests.batches import make_batch
from tests.fast.test_scores import logits_of, objective, plan_of, weights_of

WANTED = [("log_probs",), ("log_probs", "entropy"), ("support_entropy",), SCORE_NAMES]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("per_row", [True, False])
def test_the_compiled_graph_is_whole_and_gives_the_same_bits(
    wanted: tuple[str, ...], masks: bool, per_row: bool
) -> None:
    batch = make_batch(1, with_masks=masks)
    plan, logits = plan_of(batch), logits_of(batch)
    temperature = torch.linspace(0.5, 1.5, plan.num_rows) if per_row else 0.8
    weights = weights_of(plan)

    def loss(x: Tensor) -> tuple[Tensor, Tensor]:
        scores = score_logits(x * 2, plan, scores=wanted, temperature=temperature).asked()
        return objective(scores, weights), torch.stack(list(scores.values()))

    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        leaf = logits.clone().requires_grad_()
        value, scores = function(leaf)
        (gradient,) = torch.autograd.grad(value, leaf)
        results.append((scores.detach(), gradient))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_metrics_send_no_gradient() -> None:
    batch = make_batch(2)
    plan, logits = plan_of(batch), logits_of(batch).requires_grad_()
    compiled = torch.compile(
        lambda x: score_logits(
            x, plan, scores=("log_probs", "entropy"), differentiable=("log_probs",)
        ).asked(),
        backend="aot_eager",
        fullgraph=True,
    )
    scores = compiled(logits)
    assert scores["log_probs"].requires_grad
    assert not scores["entropy"].requires_grad


def test_a_score_that_the_loss_leaves_out_sends_no_gradient() -> None:
    """Not zeros: they would read whole rows, and spread a NaN."""
    batch = make_batch(6)
    plan, logits = plan_of(batch), logits_of(batch)
    outside = (~torch.cat(batch.supports())).nonzero()[0]
    logits[plan.rows[outside[0]], outside[1]] = torch.nan

    def loss(x: Tensor) -> Tensor:
        scores = score_logits(x, plan, scores=("log_probs", "entropy"))
        assert scores.log_probs is not None
        return scores.log_probs.sum()

    gradients = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        leaf = logits.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf), leaf)
        gradients.append(gradient)
    assert torch.equal(*gradients)
    assert gradients[0].isfinite().all()


def test_new_micro_batches_do_not_recompile_for_ever() -> None:
    compiles = []

    def counting(graph: Any, inputs: Any) -> Any:
        compiles.append(1)
        return graph.forward

    @torch.compile(backend=counting, fullgraph=True)
    def log_probs(x: Tensor, plan: Any) -> Tensor:
        scores = score_logits(x, plan)
        assert scores.log_probs is not None
        return scores.log_probs

    for seed in range(6):
        batch = make_batch(seed)
        plan, logits = plan_of(batch), logits_of(batch)
        expected = score_logits(logits, plan).log_probs
        assert torch.equal(log_probs(logits, plan), expected)
    assert len(compiles) <= 3


def test_opcheck() -> None:
    batch = make_batch(3, samples=3, vocab_size=9)
    plan = plan_of(batch)
    logits = logits_of(batch).requires_grad_()
    joined = ",".join(SCORE_NAMES)
    free = plan.has_unrestricted
    arguments = (logits, plan.rows, None, 0.8, joined, joined, "torch", free, plan.handle)
    torch.library.opcheck(torch.ops.rlreplay.score_rows.default, arguments)
    results = torch.ops.rlreplay.score_rows(*arguments)
    saved = [t.detach() for t in results[len(SCORE_NAMES) :]]
    grads = [torch.randn(plan.num_rows) for _ in SCORE_NAMES]
    torch.library.opcheck(
        torch.ops.rlreplay.score_rows_gradient.default,
        (
            logits.detach(),
            saved,
            grads,
            joined,
            None,
            0.8,
            joined,
            "torch",
            free,
            plan.handle,
        ),
    )


def test_what_is_refused_outside_a_graph_is_refused_in_it() -> None:
    batch = make_batch(4)
    plan, logits = plan_of(batch), logits_of(batch)

    def compiled(x: Tensor, **options: Any) -> Any:
        function = torch.compile(
            lambda x: score_logits(x, plan, **options).asked(), backend="aot_eager"
        )
        return function(x)

    with pytest.raises(ReplayError, match="logits rows do not match"):
        compiled(logits[1:])
    with pytest.raises(BackendError, match="in-place backward in a compiled graph"):
        compiled(logits, inplace_backward=True)


def test_a_plan_that_is_gone_is_told() -> None:
    batch = make_batch(5)
    plan, logits = plan_of(batch), logits_of(batch)
    arguments = (logits, plan.rows, None, 1.0, "log_probs", "", "torch", False, plan.handle)
    del plan
    with pytest.raises(ReplayError, match="the plan is gone"):
        torch.ops.rlreplay.score_rows(*arguments)
