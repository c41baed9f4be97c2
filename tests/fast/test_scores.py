"""`score_logits` on the portable backend, against the float64 reference."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlreplay import (
    SCORE_NAMES,
    BackendError,
    ParallelState,
    ReplayError,
    ReplayPlan,
    RolloutSamplingMask,
    RowLayout,
    score_logits,
)
from rlreplay.kernels import torch_scores
from rlreplay.kernels.reference import dense_scores
from tests.batches import GARBAGE, Batch, assert_within, error_budget, make_batch

FULL_SCORES = ("full_log_probs", "entropy", "log_support_mass")
SUPPORT_SCORES = ("log_probs", "support_entropy")


def plan_of(batch: Batch, **options: Any) -> ReplayPlan:
    return ReplayPlan.build(
        batch.tokens,
        batch.masks,
        RowLayout.packed(**batch.lengths),
        parallel=ParallelState.single(),
        vocab_size=batch.vocab_size,
        device="cpu",
        **options,
    )


def logits_of(batch: Batch, padding: int = 0) -> Tensor:
    """[T, V + padding] of a packed batch; the padding columns hold garbage."""
    rows = torch.cat(batch.logits)
    return torch.cat([rows, rows.new_full((len(rows), padding), GARBAGE)], dim=1)


def weights_of(plan: ReplayPlan, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(plan.num_rows, generator=generator, dtype=torch.float64)
        for name in SCORE_NAMES
    }


def objective(scores: dict[str, Tensor], weights: dict[str, Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    return sum(((v.double() * weights[k]).sum() for k, v in scores.items()), total)


def reference(
    logits: Tensor,
    batch: Batch,
    plan: ReplayPlan,
    temperature: float | Tensor,
    dtype: torch.dtype,
    weights: dict[str, Tensor],
) -> tuple[dict[str, Tensor], Tensor]:
    """Scores and gradient of the whole logits by plain torch in `dtype`."""
    leaf = logits.detach().to(dtype, copy=True).requires_grad_()
    support = torch.cat(batch.supports())
    support = torch.nn.functional.pad(support, (0, logits.shape[1] - batch.vocab_size))
    lengths = zip(batch.tokens, batch.total_lengths, batch.response_lengths, strict=True)
    y = torch.from_numpy(np.concatenate([t[n - r :] for t, n, r in lengths]))
    if isinstance(temperature, Tensor):
        temperature = temperature.to(dtype)
    scores = dense_scores(
        leaf[plan.rows], y, support, temperature=temperature, vocab_size=batch.vocab_size
    )
    (gradient,) = torch.autograd.grad(objective(scores, weights), leaf)
    return {k: v.detach() for k, v in scores.items()}, gradient


def scored(
    logits: Tensor, plan: ReplayPlan, weights: dict[str, Tensor] | None = None, **options: Any
) -> tuple[dict[str, Tensor], Tensor]:
    """Scores and gradient of `score_logits`."""
    options.setdefault("scores", SCORE_NAMES)
    leaf = logits.detach().requires_grad_()
    scores = score_logits(leaf, plan, **options).asked()
    (gradient,) = torch.autograd.grad(objective(scores, weights or weights_of(plan)), leaf)
    return {k: v.detach() for k, v in scores.items()}, gradient


@given(
    seed=st.integers(0, 2**31),
    samples=st.integers(2, 6),
    vocab_size=st.integers(2, 70),
    padding=st.integers(0, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    per_row=st.booleans(),
    with_masks=st.booleans(),
    chunk_bytes=st.sampled_from([1, 1 << 9, 1 << 19]),
    chunk_ids=st.sampled_from([1, 50, 1 << 20]),
)
def test_scores_and_gradient_are_within_the_error_budget(
    seed: int,
    samples: int,
    vocab_size: int,
    padding: int,
    dtype: torch.dtype,
    per_row: bool,
    with_masks: bool,
    chunk_bytes: int,
    chunk_ids: int,
) -> None:
    batch = make_batch(
        seed, samples=samples, vocab_size=vocab_size, dtype=dtype, with_masks=with_masks
    )
    plan, logits = plan_of(batch), logits_of(batch, padding)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(plan.num_rows, generator=generator) + 0.5
    temperature = rows if per_row else float(rows[0])
    weights = weights_of(plan, seed)
    exact, exact_gradient = reference(logits, batch, plan, temperature, torch.float64, weights)
    plain, plain_gradient = reference(logits, batch, plan, temperature, torch.float32, weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(torch_scores._CHUNK_BYTES, "cpu", chunk_bytes)
        patch.setattr(torch_scores, "_CHUNK_IDS", chunk_ids)
        scores, gradient = scored(logits, plan, weights, temperature=temperature)
    for name in SCORE_NAMES:
        assert scores[name].dtype == torch.float32
        budget = error_budget([plain[name]], [exact[name]], torch.float32)
        assert_within(scores[name], exact[name], budget, name)
    assert gradient.dtype == dtype
    budget = error_budget([plain_gradient.to(dtype)], [exact_gradient], dtype)
    assert_within(gradient, exact_gradient, budget, "gradient")
    assert (gradient[:, vocab_size:] == 0).all()
    unscored = np.setdiff1d(np.arange(len(logits)), plan.host_rows)
    assert (gradient[torch.from_numpy(unscored)] == 0).all()


@pytest.mark.parametrize("wanted", [(name,) for name in SCORE_NAMES] + [SCORE_NAMES])
@pytest.mark.parametrize("per_row", [False, True])
def test_gradcheck(wanted: tuple[str, ...], per_row: bool) -> None:
    batch = make_batch(3, samples=4, max_response=4, vocab_size=9, dtype=torch.float64)
    plan, logits = plan_of(batch), logits_of(batch, padding=2).requires_grad_()
    temperature = torch.linspace(0.5, 1.5, plan.num_rows) if per_row else 0.7

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(score_logits(x, plan, scores=wanted, temperature=temperature).asked().values())

    assert torch.autograd.gradcheck(function, (logits,))


def test_gradcheck_of_the_sum_of_all_scores() -> None:
    batch = make_batch(4, samples=4, max_response=4, vocab_size=9, dtype=torch.float64)
    plan, logits = plan_of(batch), logits_of(batch, padding=2).requires_grad_()

    def function(x: Tensor) -> Tensor:
        return sum(score_logits(x, plan, scores=SCORE_NAMES).asked().values(), torch.zeros(()))

    assert torch.autograd.gradcheck(function, (logits,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_is_rounded_once(dtype: torch.dtype) -> None:
    # Computed from the same numbers in float32 and rounded, it has the same bits.
    batch = make_batch(5, dtype=dtype)
    plan, logits = plan_of(batch), logits_of(batch)
    _, short = scored(logits, plan, temperature=0.9)
    _, wide = scored(logits.float(), plan, temperature=0.9)
    assert torch.equal(short, wide.to(dtype))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_subset_of_scores_has_the_same_bits(size: int) -> None:
    batch = make_batch(6)
    plan, logits = plan_of(batch), logits_of(batch)
    everything = score_logits(logits, plan, scores=SCORE_NAMES).asked()
    for subset in itertools.combinations(SCORE_NAMES, size):
        some = score_logits(logits, plan, scores=subset)
        assert tuple(some.asked()) == subset
        for name in SCORE_NAMES:
            value = getattr(some, name)
            assert value is None if name not in subset else torch.equal(value, everything[name])


@pytest.mark.parametrize("trained", [(), *[(name,) for name in SCORE_NAMES]])
def test_metrics_send_no_gradient(trained: tuple[str, ...]) -> None:
    batch = make_batch(7, dtype=torch.float64)
    plan, logits = plan_of(batch), logits_of(batch).requires_grad_()
    scores = score_logits(logits, plan, scores=SCORE_NAMES, differentiable=trained).asked()
    assert {k for k, v in scores.items() if v.requires_grad} == set(trained)
    if trained:
        (some,) = torch.autograd.grad(scores[trained[0]].sum(), logits)
        alone = score_logits(logits, plan, scores=trained).asked()[trained[0]]
        (expected,) = torch.autograd.grad(alone.sum(), logits)
        assert torch.equal(some, expected)


def test_forced_rows_are_exactly_zero_and_send_no_gradient() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50, 9)
    batch = Batch(
        [tokens], [9], [6], [RolloutSamplingMask.forced(tokens[3:])], 50, [torch.randn(9, 50) * 8]
    )
    plan = plan_of(batch)
    scores, gradient = scored(logits_of(batch), plan, scores=SUPPORT_SCORES, temperature=0.37)
    assert scores["log_probs"].tolist() == [0.0] * 6
    assert scores["support_entropy"].tolist() == [0.0] * 6
    assert (gradient == 0).all()


def test_unrestricted_rows_have_a_support_mass_of_exactly_one() -> None:
    batch = make_batch(8, with_masks=False)
    scores, _ = scored(logits_of(batch), plan_of(batch))
    assert (scores["log_support_mass"] == 0).all()
    assert torch.equal(scores["log_probs"], scores["full_log_probs"])
    assert torch.equal(scores["support_entropy"], scores["entropy"])


def test_a_call_without_full_scores_reads_the_supports_only() -> None:
    batch = make_batch(9)
    plan, logits = plan_of(batch), logits_of(batch)
    read = torch.zeros_like(logits, dtype=torch.bool)
    read[plan.rows] = torch.cat(batch.supports())
    poisoned = logits.masked_fill(~read, torch.nan)
    scores, gradient = scored(logits, plan, scores=SUPPORT_SCORES)
    same, same_gradient = scored(poisoned, plan, scores=SUPPORT_SCORES)
    for name in SUPPORT_SCORES:
        assert torch.equal(same[name], scores[name])
    assert torch.equal(same_gradient, gradient)
    assert (gradient[~read] == 0).all()


def test_full_metrics_need_no_dense_backward() -> None:
    batch = make_batch(10)
    plan, logits = plan_of(batch), logits_of(batch)
    _, expected = scored(logits, plan, scores=("log_probs",))
    leaf = logits.requires_grad_()
    both = score_logits(leaf, plan, scores=("log_probs", "entropy"), differentiable=("log_probs",))
    assert both.log_probs is not None
    (gradient,) = torch.autograd.grad(
        (both.log_probs.double() * weights_of(plan)["log_probs"]).sum(), leaf
    )
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("chunk_bytes", [1, 700, 1 << 19])
def test_same_bits_again_and_whatever_else_is_in_the_batch(
    chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(torch_scores._CHUNK_BYTES, "cpu", chunk_bytes)
    batch = make_batch(11, samples=6, vocab_size=131)
    plan, logits = plan_of(batch), logits_of(batch)
    weights = {name: torch.ones(plan.num_rows, dtype=torch.float64) for name in SCORE_NAMES}
    scores, gradient = scored(logits, plan, weights)
    again, gradient_again = scored(logits.clone(), plan, weights)
    assert torch.equal(gradient, gradient_again)
    assert batch.masks is not None
    for name in SCORE_NAMES:
        assert torch.equal(scores[name], again[name])
    first_row = 0
    for i, rows in enumerate(torch.split(gradient, batch.total_lengths)):
        alone = Batch(
            [batch.tokens[i]],
            [batch.total_lengths[i]],
            [batch.response_lengths[i]],
            [batch.masks[i]],
            batch.vocab_size,
            [batch.logits[i]],
        )
        plan_alone = plan_of(alone)
        some = {name: weights[name][: plan_alone.num_rows] for name in SCORE_NAMES}
        scores_alone, gradient_alone = scored(logits_of(alone), plan_alone, some)
        for name in SCORE_NAMES:
            part = scores[name][first_row : first_row + plan_alone.num_rows]
            assert torch.equal(scores_alone[name], part), name
        assert torch.equal(gradient_alone, rows)
        first_row += plan_alone.num_rows


def test_nothing_is_written_to_and_a_second_backward_works() -> None:
    batch = make_batch(12)
    plan, logits = plan_of(batch), logits_of(batch).requires_grad_()
    before = [t.clone() for t in (logits.detach(), plan.ids, plan.offsets, plan.targets, plan.rows)]
    value = objective(score_logits(logits, plan, scores=SCORE_NAMES).asked(), weights_of(plan))
    (first,) = torch.autograd.grad(value, logits, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(value, logits)
    assert torch.equal(first, kept)
    assert torch.equal(second, kept)
    after = (logits.detach(), plan.ids, plan.offsets, plan.targets, plan.rows)
    for was, tensor in zip(before, after, strict=True):
        assert torch.equal(was, tensor)


def test_no_rows_give_empty_scores_that_are_still_attached() -> None:
    layout = RowLayout.packed([3, 2], [0, 0])
    plan = ReplayPlan.build(
        [[1, 2, 3], [4, 5]],
        [RolloutSamplingMask.full(0)] * 2,
        layout,
        parallel=ParallelState.single(),
        vocab_size=7,
        device="cpu",
    )
    logits = torch.randn(5, 7, requires_grad=True)
    scores = score_logits(logits, plan, scores=SCORE_NAMES).asked()
    assert all(v.shape == (0,) and v.requires_grad for v in scores.values())
    sum(v.sum() for v in scores.values()).backward()  # type: ignore[union-attr]
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros(5, 7))


def test_rows_with_a_stride_are_read_in_place() -> None:
    batch = make_batch(13)
    plan, logits = plan_of(batch), logits_of(batch)
    wide = torch.full((len(logits), logits.shape[1] + 4), torch.nan)
    wide[:, : logits.shape[1]] = logits
    view = wide[:, : logits.shape[1]]
    assert not view.is_contiguous()
    scores, gradient = scored(logits, plan)
    strided, strided_gradient = scored(view, plan)
    assert torch.equal(gradient, strided_gradient)
    for name in SCORE_NAMES:
        assert torch.equal(scores[name], strided[name])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_bad_logit_spoils_the_scores_of_its_row_that_read_it_and_no_other(value: float) -> None:
    batch = make_batch(14, samples=6, vocab_size=40)
    plan, logits = plan_of(batch), logits_of(batch)
    scores, gradient = scored(logits, plan)
    support = torch.cat(batch.supports())
    row = int(torch.argmax((~support).any(1).int() * (support.sum(1) > 1).int()))
    column = int(torch.argmax((~support[row]).int()))
    spoiled = logits.clone()
    spoiled[plan.rows[row], column] = value
    bad, bad_gradient = scored(spoiled, plan)
    others = torch.arange(plan.num_rows) != row
    for name in SCORE_NAMES:
        assert torch.equal(bad[name][others], scores[name][others])
        reads_it = name in FULL_SCORES
        assert bool(bad[name][row].isnan()) == reads_it, name
    rows = torch.ones(len(logits), dtype=torch.bool)
    rows[plan.rows[row]] = False
    assert torch.equal(bad_gradient[rows], gradient[rows])
    assert bad_gradient[~rows].isnan().all()


def test_a_row_of_minus_infinity_is_nan_as_in_log_softmax() -> None:
    batch = make_batch(15)
    plan, logits = plan_of(batch), logits_of(batch)
    logits[plan.rows[2]] = -torch.inf
    scores, gradient = scored(logits, plan)
    for name in SCORE_NAMES:
        assert scores[name].isnan().nonzero().flatten().tolist() == [2], name
    assert gradient.isnan().any(1).nonzero().flatten().tolist() == [int(plan.rows[2])]


@pytest.mark.parametrize("seed", range(5))
def test_minus_infinity_outside_and_inside_the_support_counts_nothing(seed: int) -> None:
    batch = make_batch(seed, vocab_size=30)
    plan, logits = plan_of(batch), logits_of(batch)
    generator = torch.Generator().manual_seed(seed)
    drop = torch.rand(logits.shape, generator=generator) < 0.3
    drop[plan.rows, plan.ids[plan.targets].long()] = False  # the sampled tokens stay finite
    logits = logits.masked_fill(drop, -torch.inf)
    weights = weights_of(plan)
    scores, gradient = scored(logits, plan, weights)
    # The dense reference with the dropped entries finite but far too low to count.
    low = logits.masked_fill(drop, -5000.0)
    exact, exact_gradient = reference(low, batch, plan, 1.0, torch.float64, weights)
    plain, plain_gradient = reference(low, batch, plan, 1.0, torch.float32, weights)
    for name in SCORE_NAMES:
        budget = error_budget([plain[name]], [exact[name]], torch.float32)
        assert_within(scores[name], exact[name], budget, name)
    budget = error_budget([plain_gradient], [exact_gradient], torch.float32)
    assert_within(gradient, exact_gradient, budget, "gradient")
    assert (gradient[drop] == 0).all()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0, 1e4])
def test_large_and_offset_logits_neither_overflow_nor_lose_precision(scale: float) -> None:
    batch = make_batch(16, vocab_size=30)
    plan, logits = plan_of(batch), logits_of(batch) * scale + 3 * scale
    weights = weights_of(plan)
    exact, exact_gradient = reference(logits, batch, plan, 1.0, torch.float64, weights)
    plain, plain_gradient = reference(logits, batch, plan, 1.0, torch.float32, weights)
    scores, gradient = scored(logits, plan, weights)
    for name in SCORE_NAMES:
        budget = error_budget([plain[name]], [exact[name]], torch.float32)
        assert_within(scores[name], exact[name], budget, name)
    budget = error_budget([plain_gradient], [exact_gradient], torch.float32)
    assert_within(gradient, exact_gradient, budget, "gradient")


class Recorder(TorchDispatchMode):
    """Notes the operations that run and the largest tensor that one of them makes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.made: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.add(func.name())
        storage = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in storage:
            self.made.append(result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("wanted", [SUPPORT_SCORES, SCORE_NAMES])
def test_no_sync_and_no_dense_temporary(
    wanted: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(torch_scores._CHUNK_BYTES, "cpu", 1 << 12)
    batch = make_batch(17, samples=8, max_response=40, vocab_size=500)
    plan, logits = plan_of(batch), logits_of(batch).requires_grad_()
    with Recorder() as recorder:
        scores = score_logits(logits, plan, scores=wanted).asked()
        torch.autograd.grad(sum(v.sum() for v in scores.values()), logits)  # type: ignore[arg-type]
    syncs = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")
    assert not [n for n in recorder.names if n.split("::")[1].split(".")[0] in syncs]
    whole = logits.numel() * 4
    # The gradient once; everything else is chunks and a few numbers a row and an id.
    assert sorted(recorder.made)[-1] == whole
    assert sorted(recorder.made)[-2] <= max(1 << 14, 8 * (plan.num_ids + 1))


def test_equal_to_log_softmax_where_nothing_is_masked() -> None:
    batch = make_batch(18, with_masks=False, dtype=torch.float64)
    plan, logits = plan_of(batch), logits_of(batch)
    scores, _ = scored(logits, plan)
    y = plan.ids[plan.targets].long()
    expected = torch.log_softmax(logits[plan.rows], -1).gather(1, y[:, None]).squeeze(1)
    torch.testing.assert_close(scores["log_probs"], expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scores": ("logprobs",)}, ReplayError, "unknown score"),
        ({"scores": ()}, ReplayError, "no score asked for"),
        ({"differentiable": ("entropy",)}, ReplayError, "not asked for"),
        ({"differentiable": ("nonsense",)}, ReplayError, "unknown score in differentiable"),
        ({"backend": "cuda"}, BackendError, "no such backend"),
        ({"inplace_backward": True}, BackendError, "in-place backward"),
        ({"temperature": 0.0}, ReplayError, "temperature not above 0"),
        ({"temperature": -1.0}, ReplayError, "temperature not above 0"),
        ({"temperature": float("nan")}, ReplayError, "temperature not above 0"),
        ({"temperature": float("inf")}, ReplayError, "temperature not above 0"),
        ({"temperature": 1e-46}, ReplayError, "temperature not above 0"),
        ({"temperature": 10**400}, ReplayError, "temperature not above 0"),
        ({"temperature": torch.ones(3)}, ReplayError, "temperature does not fit"),
    ],
)
def test_refusals(options: dict[str, Any], error: type[ReplayError], message: str) -> None:
    batch = make_batch(19)
    with pytest.raises(error, match=message):
        score_logits(logits_of(batch), plan_of(batch), **options)


def one_row(support: list[int], vocab_size: int, sampled: int) -> Batch:
    """One response token with a given support, after a prompt of one."""
    return Batch(
        [np.array([0, sampled])],
        [2],
        [1],
        [RolloutSamplingMask.from_mask_list([support])],
        vocab_size,
        [torch.zeros(2, vocab_size)],
    )


@pytest.mark.parametrize("name", ["entropy", "full_log_probs"])
def test_a_score_that_does_not_read_the_support_is_not_spoiled_by_it(name: str) -> None:
    plan = plan_of(one_row([1, 2], 5, sampled=1))
    logits = torch.zeros(2, 5)
    logits[0] = torch.tensor([0.0, -torch.inf, -torch.inf, 1.0, 2.0])
    leaf = logits.requires_grad_()
    score = getattr(score_logits(leaf, plan, scores=(name,)), name)
    (gradient,) = torch.autograd.grad(score.sum(), leaf)
    p = torch.softmax(logits[0].detach(), 0)
    if name == "entropy":
        log_p = p.log().masked_fill(p == 0, 0.0)
        expected = -p * (log_p - (p * log_p).sum())
    else:
        expected = torch.nn.functional.one_hot(torch.tensor(1), 5) - p
    torch.testing.assert_close(gradient[0], expected)


@pytest.mark.parametrize("size", [4096, 150_000])
@pytest.mark.parametrize("flat", [True, False])
def test_supports_of_a_whole_vocabulary_are_summed_as_well_as_the_vocabulary(
    size: int, flat: bool
) -> None:
    batch = one_row(list(range(size)), size, sampled=7)
    plan = plan_of(batch)
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(2, size) if flat else torch.randn(2, size, generator=generator)
    leaf = logits.double()
    exact = dense_scores(leaf[:1], torch.tensor([7]), torch.ones(1, size, dtype=torch.bool))
    plain = dense_scores(logits[:1], torch.tensor([7]), torch.ones(1, size, dtype=torch.bool))
    scores = score_logits(logits, plan, scores=SCORE_NAMES).asked()
    for name in SCORE_NAMES:
        budget = error_budget([plain[name]], [exact[name]], torch.float32)
        # of the row's log-sum-exp, from which the mass is a difference
        budget += torch.finfo(torch.float32).eps * float(np.log(size))
        assert_within(scores[name], exact[name], budget, name)


def test_results_may_be_changed_in_place() -> None:
    batch = make_batch(21)
    plan, logits = plan_of(batch), logits_of(batch).requires_grad_()
    _, expected = scored(logits, plan, scores=("log_probs",))
    scores = score_logits(logits, plan, scores=SCORE_NAMES, differentiable=("log_probs",)).asked()
    for name, value in scores.items():
        if name != "log_probs":
            value.mul_(0.5)
            value.data.add_(1)
    value = objective({"log_probs": scores["log_probs"]}, weights_of(plan))
    (gradient,) = torch.autograd.grad(value, logits)
    assert torch.equal(gradient, expected)


def test_per_row_temperatures_are_checked_on_the_host() -> None:
    batch = make_batch(20)
    plan = plan_of(batch)
    for wrong in (torch.ones(plan.num_rows, dtype=torch.int64), torch.ones(1)):
        with pytest.raises(ReplayError, match="temperature does not fit"):
            score_logits(logits_of(batch), plan, temperature=wrong)
    rows = torch.ones(plan.num_rows)
    rows[1] = 0
    with pytest.raises(ReplayError, match="temperature not above 0"):
        score_logits(logits_of(batch), plan, temperature=rows)
    with pytest.raises(ReplayError, match="requires_grad=True"):
        score_logits(
            logits_of(batch), plan, temperature=torch.ones(plan.num_rows, requires_grad=True)
        )
