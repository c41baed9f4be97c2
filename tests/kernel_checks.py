"""What is asserted of the Triton kernels, on whatever device and at whatever size.

`KernelTests` runs through its subclasses: in tests/fast with Triton's interpreter at small sizes,
in tests/gpu on a GPU at real ones. So each of these tests exists in both.

Shapes: `T` logits rows, `R` response rows, `V` vocabulary columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from rlreplay import (
    SCORE_NAMES,
    BackendError,
    ParallelState,
    ReplayPlan,
    RolloutSamplingMask,
    RowLayout,
    score_logits,
)
from rlreplay.kernels.reference import dense_scores
from tests.batches import GARBAGE, assert_within, error_budget

FULL_SCORES = ("full_log_probs", "entropy", "log_support_mass")
SUPPORT_SCORES = ("log_probs", "support_entropy")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Result = TypeVar("Result")
Sample = tuple[int, int, str]
"""Prompt length, response length, and "mixed", "free" (unrestricted) or "forced" rows."""


@dataclass(frozen=True)
class Case:
    """A packed micro-batch on a device."""

    tokens: list[np.ndarray]
    masks: list[RolloutSamplingMask]
    layout: RowLayout
    vocab_size: int
    logits: Tensor
    """[T, V and padding columns]; what may not be read is garbage"""
    support: Tensor
    """bool [R, V]"""
    plan: ReplayPlan

    @property
    def sampled(self) -> Tensor:
        """int64 [R]: vocabulary ids."""
        return self.plan.ids[self.plan.targets].long()

    def part(self, sample: int) -> tuple[ReplayPlan, Tensor, slice]:
        """One sample by itself: its plan, a copy of its logits, its response rows."""
        total, response = self.layout.total_lengths, self.layout.response_lengths
        first, start = sum(total[:sample]), sum(response[:sample])
        plan = plan_of(
            [self.tokens[sample]],
            [self.masks[sample]],
            RowLayout.packed([total[sample]], [response[sample]]),
            self.vocab_size,
            self.logits.device,
        )
        rows = self.logits[first : first + total[sample]].clone()
        return plan, rows, slice(start, start + response[sample])


def plan_of(
    tokens: Sequence[Any],
    masks: list[RolloutSamplingMask],
    layout: RowLayout,
    vocab_size: int,
    device: Any,
    **options: Any,
) -> ReplayPlan:
    options.setdefault("parallel", ParallelState.single())
    return ReplayPlan.build(tokens, masks, layout, vocab_size=vocab_size, device=device, **options)


def make_case(
    device: str,
    samples: Sequence[Sample],
    vocab_size: int,
    *,
    seed: int = 0,
    sizes: Sequence[int | None] | None = None,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    extra_rows: int = 0,
    sampled: int | None = None,
) -> Case:
    """A random micro-batch.

    Args:
        sizes: of the supports of "mixed" rows, taken in turn; None for an unrestricted row. By
            default sizes from one id to all, around the kernels' block of 128 ids.
        padding: columns past the vocabulary.
        extra_rows: logits rows past the layout's.
        sampled: the sampled token of every row; by default random ones.
    """
    rng = np.random.default_rng(seed)
    if sizes is None:
        lengths = {1, 2, 50, 127, 128, 129, vocab_size // 2, vocab_size - 1, vocab_size}
        sizes = [*rng.permutation([n for n in lengths if 0 < n <= vocab_size]).tolist(), None]
    turns = itertools.cycle(sizes)
    tokens, masks = [], []
    for prompt, response, kind in samples:
        known = rng.integers(0, vocab_size, prompt + response)
        if sampled is not None:
            known[prompt:] = sampled
        fixed: dict[str, int | None] = {"free": None, "forced": 1}
        rows = [
            _support(rng, vocab_size, token, fixed[kind] if kind in fixed else next(turns))
            for token in known[prompt:].tolist()
        ]
        tokens.append(known)
        masks.append(_mask_of(rows))
    totals = [prompt + response for prompt, response, _ in samples]
    layout = RowLayout.packed(totals, [n for _, n, _ in samples], end_padding=extra_rows > 0)
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.full(
        (sum(totals) + extra_rows, vocab_size + padding), GARBAGE, device=device, dtype=dtype
    )
    shape = (len(logits), vocab_size)
    logits[:, :vocab_size] = torch.randn(shape, generator=generator, device=device).mul_(3)
    dense = np.concatenate([mask.to_dense(vocab_size) for mask in masks])
    return Case(
        tokens,
        masks,
        layout,
        vocab_size,
        logits,
        torch.from_numpy(dense).to(device),
        plan_of(tokens, masks, layout, vocab_size, device),
    )


def _support(
    rng: np.random.Generator, vocab_size: int, token: int, size: int | None
) -> np.ndarray | None:
    if size is None:
        return None
    others = rng.choice(vocab_size - 1, size - 1, replace=False)
    return np.sort(np.append(others + (others >= token), token))


def _mask_of(rows: list[np.ndarray | None]) -> RolloutSamplingMask:
    ids = [np.empty(0, np.int64) if row is None else row for row in rows]
    offsets = np.cumsum([0, *map(len, ids)])
    return RolloutSamplingMask(
        np.concatenate([np.empty(0, np.int64), *ids]), offsets, allow_unrestricted=True
    )


def weights_of(plan: ReplayPlan, names: Sequence[str] = SCORE_NAMES) -> dict[str, Tensor]:
    """float64 weights of the scores in the objective, from a fixed seed."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(plan.num_rows, generator=generator, dtype=torch.float64)  # noqa: E731
    everything = {name: draw().to(plan.device) for name in SCORE_NAMES}
    return {name: everything[name] for name in names}


def objective(scores: dict[str, Tensor], weights: dict[str, Tensor]) -> Tensor:
    return torch.stack([(v.double() * weights[k]).sum() for k, v in scores.items()]).sum()


def scored(
    logits: Tensor, plan: ReplayPlan, weights: dict[str, Tensor] | None = None, **options: Any
) -> tuple[dict[str, Tensor], Tensor]:
    """Scores and gradient of `score_logits`, on the Triton backend unless told otherwise."""
    options = {"backend": "triton", "scores": SCORE_NAMES, **options}
    leaf = logits.detach().requires_grad_()
    scores = score_logits(leaf, plan, **options).asked()
    value = objective(scores, weights or weights_of(plan))
    (gradient,) = torch.autograd.grad(value, leaf)
    return {k: v.detach() for k, v in scores.items()}, gradient


def reference(
    case: Case,
    logits: Tensor,
    dtype: torch.dtype,
    temperature: float | Tensor = 1.0,
    weights: dict[str, Tensor] | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Scores and gradient by plain torch in `dtype`."""
    if isinstance(temperature, Tensor):
        temperature = temperature.to(dtype)
    leaf = logits.detach().to(dtype, copy=True).requires_grad_()
    scores = dense_scores(
        leaf[case.plan.rows, : case.vocab_size],
        case.sampled,
        case.support,
        temperature=temperature,
    )
    weights = weights or weights_of(case.plan)
    value = objective({k: scores[k] for k in weights}, weights)
    (gradient,) = torch.autograd.grad(value, leaf)
    return {k: scores[k].detach() for k in weights}, gradient


@dataclass(frozen=True)
class Truth:
    """float64 results by plain torch, and how far others may be off from them."""

    scores: dict[str, Tensor]
    gradient: Tensor
    budgets: dict[str, float]

    @classmethod
    def of(cls, case: Case, logits: Tensor, *args: Any) -> Truth:
        """For float64 logits the budget is the one of float32 in float64's units, and half of it
        again: there the truth is itself off by as much as plain torch is."""
        scores, gradient = reference(case, logits, torch.float64, *args)
        plain, plain_gradient = reference(case, logits, torch.float32, *args)
        wide = logits.dtype == torch.float64
        dtype = torch.float32 if wide else logits.dtype
        budgets = {k: error_budget([plain[k]], [scores[k]], torch.float32) for k in scores}
        budgets["gradient"] = error_budget([plain_gradient.to(dtype)], [gradient], dtype)
        if wide:
            ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
            budgets = {k: 1.5 * budget * ratio for k, budget in budgets.items()}
        return cls(scores, gradient, budgets)

    def check(self, scores: dict[str, Tensor], gradient: Tensor, slack: float = 1.0) -> None:
        for name, exact in self.scores.items():
            assert_within(scores[name], exact, slack * self.budgets[name], name)
        assert_within(gradient, self.gradient, slack * self.budgets["gradient"], "gradient")


def same_bits(a: tuple[dict[str, Tensor], Tensor], b: tuple[dict[str, Tensor], Tensor]) -> None:
    for name in a[0]:
        assert torch.equal(a[0][name], b[0][name]), name
    assert torch.equal(a[1], b[1]), "gradient"


class TakingTurns:
    """`torch.distributed.all_reduce` among ranks that run one after another in this process.

    They run over and over. What a rank sends is kept; a reduction happens once all have sent, so
    with each turn one more collective of every rank has its result.
    """

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int], Tensor] = {}
        self.rank = self.size = self.entered = 0

    def all_reduce(
        self, tensor: Tensor, op: Any = torch.distributed.ReduceOp.SUM, group: Any = None
    ) -> None:
        assert group is self
        self.sent[self.entered, self.rank] = tensor.clone()
        places = [(self.entered, rank) for rank in range(self.size)]
        self.entered += 1
        if all(place in self.sent for place in places):
            parts = torch.stack([self.sent[place] for place in places])
            is_max = op == torch.distributed.ReduceOp.MAX
            tensor.copy_(parts.amax(0) if is_max else parts.sum(0))

    def run(self, size: int, collectives: int, fn: Callable[[int], Result]) -> list[Result]:
        self.size, self.sent = size, {}
        for _ in range(collectives + 1):
            results = []
            for self.rank in range(size):
                self.entered = 0
                results.append(fn(self.rank))
                assert self.entered == collectives
        return results


class KernelTests:
    """Subclasses say where and how large; `vocab_size` is a fixture of theirs."""

    device: str
    scale: int
    """times the response lengths of the smallest case"""
    runs: int
    """how often a run is repeated to see that its bits stay"""

    def samples(self) -> list[Sample]:
        n = self.scale
        return [
            (1, 3 * n, "mixed"),
            (3, 2 * n, "free"),
            (2, 2 * n, "forced"),
            (2, 1, "mixed"),
            (3, 6 * n, "mixed"),
        ]

    def case(self, vocab_size: int, **options: Any) -> Case:
        return make_case(self.device, self.samples(), vocab_size, **options)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("per_row", [False, True])
    def test_scores_and_gradient_are_within_the_error_budget(
        self, vocab_size: int, dtype: torch.dtype, per_row: bool
    ) -> None:
        case = self.case(vocab_size, dtype=dtype, padding=5, extra_rows=2)
        rows = torch.linspace(0.5, 1.5, case.plan.num_rows, device=self.device)
        temperature = rows if per_row else 0.7
        truth = Truth.of(case, case.logits, temperature)
        scores, gradient = scored(case.logits, case.plan, temperature=temperature)
        accumulator = torch.float64 if dtype == torch.float64 else torch.float32
        assert {v.dtype for v in scores.values()} == {accumulator}
        assert gradient.dtype == dtype
        truth.check(scores, gradient)
        assert (gradient[:, vocab_size:] == 0).all()
        unscored = np.setdiff1d(np.arange(len(gradient)), case.plan.host_rows)
        assert len(unscored) > 2
        assert (gradient[torch.from_numpy(unscored).to(self.device)] == 0).all()
        # both backends are within the budget of the truth, so within two of each other
        other = scored(case.logits, case.plan, temperature=temperature, backend="torch")
        Truth({k: v.double() for k, v in other[0].items()}, other[1].double(), truth.budgets).check(
            scores, gradient, slack=2.0
        )

    @pytest.mark.parametrize("wanted", [(name,) for name in SCORE_NAMES])
    def test_each_score_by_itself_is_within_the_error_budget(
        self, vocab_size: int, wanted: tuple[str]
    ) -> None:
        case = self.case(vocab_size, seed=1)
        weights = weights_of(case.plan, wanted)
        truth = Truth.of(case, case.logits, 0.7, weights)
        alone = scored(case.logits, case.plan, weights, scores=wanted, temperature=0.7)
        truth.check(*alone)
        everything, _ = scored(case.logits, case.plan, temperature=0.7)
        assert torch.equal(alone[0][wanted[0]], everything[wanted[0]])

    def test_gradcheck(self) -> None:
        samples = [(1, 2, "mixed"), (1, 1, "free"), (1, 1, "forced")]
        case = make_case(self.device, samples, 5, dtype=torch.float64, padding=1)
        temperature = torch.linspace(0.5, 1.5, case.plan.num_rows, device=self.device)

        def function(x: Tensor) -> tuple[Tensor, ...]:
            options: Any = {"scores": SCORE_NAMES, "backend": "triton"}
            return tuple(
                score_logits(x, case.plan, temperature=temperature, **options).asked().values()
            )

        assert torch.autograd.gradcheck(function, (case.logits.requires_grad_(),))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_the_gradient_is_rounded_once(self, vocab_size: int, dtype: torch.dtype) -> None:
        # It is one rounding away from the gradient of the same numbers in float32: a second
        # rounding would double that. The rest allowed is what two float32 kernels differ by.
        case = self.case(vocab_size, seed=2, dtype=dtype)
        _, short = scored(case.logits, case.plan, temperature=0.9)
        _, wide = scored(case.logits.float(), case.plan, temperature=0.9)
        rounding = self.roundings * torch.finfo(dtype).eps / 2
        allowed = wide.abs() * (rounding + 1e-4) + 2e-6 * wide.abs().max()
        allowed = allowed + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        assert ((short.float() - wide).abs() <= allowed).all()

    roundings = 1
    """How many half units a store to a shorter type is off by at most."""

    @pytest.mark.parametrize("wanted", [*[(name,) for name in SCORE_NAMES], SCORE_NAMES])
    @pytest.mark.parametrize("inplace", [False, True])
    def test_upstream_gradients_with_any_stride(
        self, vocab_size: int, wanted: tuple[str, ...], inplace: bool
    ) -> None:
        case = self.case(vocab_size, seed=18)
        ones = {name: torch.ones_like(w) for name, w in weights_of(case.plan, wanted).items()}
        _, expected = scored(case.logits, case.plan, ones, scores=wanted)

        def values() -> tuple[Tensor, Tensor]:
            made = case.logits.detach().requires_grad_() * 1
            options: Any = {"backend": "triton", "inplace_backward": inplace}
            scores = score_logits(made, case.plan, scores=wanted, **options).asked()
            return made, torch.stack(list(scores.values()), dim=1)

        # strides 0 and 0, then those of a column
        for reduce in (
            lambda v: v.sum(),
            lambda v: v.T[0].sum() + v.T[1:].sum(),
            lambda v: (v * 1).sum(),
        ):
            made, stacked = values()
            (gradient,) = torch.autograd.grad(reduce(stacked), made)
            assert torch.equal(gradient, expected)

    def test_a_temperature_overwritten_before_the_backward_is_noticed(self) -> None:
        case = self.case(37, seed=19)
        leaf = case.logits.requires_grad_()
        temperature = torch.full((case.plan.num_rows,), 0.5, device=self.device)
        for backend in ("triton", "torch"):
            options: Any = {"temperature": temperature, "backend": backend}
            (log_probs,) = score_logits(leaf, case.plan, **options).asked().values()
            temperature.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                log_probs.sum().backward()

    @pytest.mark.parametrize("trained", [("log_probs",), ("entropy",), SUPPORT_SCORES])
    def test_metrics_send_no_gradient(self, vocab_size: int, trained: tuple[str, ...]) -> None:
        case = self.case(vocab_size, seed=3)
        weights = weights_of(case.plan, trained)
        leaf = case.logits.detach().requires_grad_()
        scores = score_logits(
            leaf, case.plan, scores=SCORE_NAMES, differentiable=trained, backend="triton"
        ).asked()
        assert {k for k, v in scores.items() if v.requires_grad} == set(trained)
        (some,) = torch.autograd.grad(objective({k: scores[k] for k in trained}, weights), leaf)
        _, alone = scored(case.logits, case.plan, weights, scores=trained)
        assert torch.equal(some, alone)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_forced_rows_are_exactly_zero_and_send_no_gradient(
        self, vocab_size: int, dtype: torch.dtype
    ) -> None:
        samples = [(3, 7 * self.scale, "forced")]
        case = make_case(self.device, samples, vocab_size, dtype=dtype)
        scores, gradient = scored(
            case.logits * 3, case.plan, scores=SUPPORT_SCORES, temperature=0.37
        )
        assert (scores["log_probs"] == 0).all()
        assert (scores["support_entropy"] == 0).all()
        assert (gradient == 0).all()

    def test_unrestricted_rows_have_a_support_mass_of_exactly_one(self, vocab_size: int) -> None:
        case = make_case(self.device, [(2, 5 * self.scale, "free")], vocab_size)
        scores, _ = scored(case.logits, case.plan)
        assert (scores["log_support_mass"] == 0).all()
        assert torch.equal(scores["log_probs"], scores["full_log_probs"])
        assert torch.equal(scores["support_entropy"], scores["entropy"])

    def test_a_call_without_full_scores_reads_the_supports_only(self, vocab_size: int) -> None:
        case = self.case(vocab_size, seed=4, padding=3)
        read = torch.zeros_like(case.logits, dtype=torch.bool)
        read[case.plan.rows, :vocab_size] = case.support
        poisoned = case.logits.masked_fill(~read, torch.nan)
        expected = scored(case.logits, case.plan, scores=SUPPORT_SCORES)
        results = scored(poisoned, case.plan, scores=SUPPORT_SCORES)
        same_bits(results, expected)
        assert (expected[1][~read] == 0).all()

    def test_full_metrics_need_no_dense_backward(self, vocab_size: int) -> None:
        case = self.case(vocab_size, seed=5, sizes=[1, 2, 30])
        weights = weights_of(case.plan, ("log_probs",))
        _, expected = scored(case.logits, case.plan, weights, scores=("log_probs",))
        leaf = case.logits.detach().requires_grad_()
        options: Any = {"differentiable": ("log_probs",), "backend": "triton"}
        scores = score_logits(leaf, case.plan, scores=("log_probs", "entropy"), **options).asked()
        value = objective({"log_probs": scores["log_probs"]}, weights)
        (gradient,) = torch.autograd.grad(value, leaf)
        assert torch.equal(gradient, expected)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_same_bits_again_and_whatever_else_is_in_the_batch(
        self, vocab_size: int, dtype: torch.dtype
    ) -> None:
        case = self.case(vocab_size, seed=6, dtype=dtype)
        weights = weights_of(case.plan)
        results = scored(case.logits, case.plan, weights)
        for _ in range(self.runs):
            same_bits(scored(case.logits.clone(), case.plan, weights), results)
        by_sample = torch.split(results[1], list(case.layout.total_lengths))
        for i, gradient in enumerate(by_sample):
            plan, logits, rows = case.part(i)
            part = {k: v[rows] for k, v in weights.items()}
            alone = scored(logits, plan, part)
            same_bits(alone, ({k: v[rows] for k, v in results[0].items()}, gradient))

    def test_nothing_is_written_to_and_a_second_backward_works(self, vocab_size: int) -> None:
        case = self.case(vocab_size, seed=7)
        plan, leaf = case.plan, case.logits.detach().requires_grad_()
        inputs = (case.logits, plan.ids, plan.offsets, plan.targets, plan.rows, plan.response_rows)
        before = [tensor.clone() for tensor in inputs]
        scores = score_logits(leaf, plan, scores=SCORE_NAMES, backend="triton").asked()
        value = objective(scores, weights_of(plan))
        (first,) = torch.autograd.grad(value, leaf, retain_graph=True)
        kept = first.clone()
        (second,) = torch.autograd.grad(value, leaf)
        assert torch.equal(first, kept)
        assert torch.equal(second, kept)
        for was, tensor in zip(before, inputs, strict=True):
            assert torch.equal(was, tensor)

    @pytest.mark.parametrize("totals", [[3, 2], [1]])
    def test_no_response_rows_give_empty_scores_that_are_still_attached(
        self, totals: list[int]
    ) -> None:
        tokens = [np.arange(n) for n in totals]
        masks = [RolloutSamplingMask.full(0)] * len(totals)
        layout = RowLayout.packed(totals, [0] * len(totals))
        plan = plan_of(tokens, masks, layout, 7, self.device)
        logits = torch.randn(sum(totals), 7, device=self.device)
        scores, gradient = scored(logits, plan)
        assert all(v.shape == (0,) for v in scores.values())
        assert torch.equal(gradient, torch.zeros_like(logits))

    def test_no_logits_rows(self) -> None:
        plan = plan_of([], [], RowLayout.packed([], []), 7, self.device)
        scores, gradient = scored(torch.empty(0, 7, device=self.device), plan)
        assert all(v.shape == (0,) for v in scores.values())
        assert gradient.shape == (0, 7)

    def test_rows_with_a_stride_are_read_in_place(self, vocab_size: int) -> None:
        case = self.case(vocab_size, seed=8)
        wide = torch.full((len(case.logits), vocab_size + 32), torch.nan, device=self.device)
        view = wide[:, 16 : vocab_size + 16]
        view.copy_(case.logits)
        assert not view.is_contiguous()
        same_bits(scored(view, case.plan), scored(case.logits, case.plan))

    def test_rows_out_of_alignment(self, vocab_size: int) -> None:
        # Loads are narrower, which may change the order of a row's sums.
        case = self.case(vocab_size, seed=8)
        wide = torch.full((len(case.logits), vocab_size + 5), torch.nan, device=self.device)
        view = wide[:, 1 : vocab_size + 1]
        view.copy_(case.logits)
        weights = weights_of(case.plan)
        Truth.of(case, case.logits, 1.0, weights).check(*scored(view, case.plan, weights))

    def test_logits_with_a_column_stride_are_refused(self) -> None:
        case = self.case(37)
        with pytest.raises(BackendError, match="cannot run here"):
            score_logits(case.logits.t().contiguous().t(), case.plan, backend="triton")

    def test_bad_logits_spoil_the_scores_that_read_them_and_no_others(
        self, vocab_size: int
    ) -> None:
        case = self.case(vocab_size, seed=9)
        clean, clean_gradient = scored(case.logits, case.plan)
        spoiled = case.logits.clone()
        every_row = torch.arange(case.plan.num_rows, device=self.device)
        hit = torch.zeros_like(case.support)
        values = (torch.nan, torch.inf)
        columns = (0, vocab_size // 2, vocab_size - 1)
        for i, (value, column) in enumerate(itertools.product(values, columns)):
            row = 2 * i  # the rows between stay clean
            spoiled[case.plan.rows[row], column] = value
            hit[row, column] = True
        gone = 2 * len(values) * len(columns)
        spoiled[case.plan.rows[gone]] = -torch.inf
        hit[gone] = True
        scores, gradient = scored(spoiled, case.plan)
        for name in SCORE_NAMES:
            reads = hit if name in FULL_SCORES else hit & case.support
            bad = reads.any(1)
            assert torch.equal(scores[name].isnan(), bad), name
            assert bad.any()
            assert torch.equal(scores[name][~bad], clean[name][~bad]), name
        rows = torch.zeros(len(spoiled), dtype=torch.bool, device=self.device)
        rows[case.plan.rows[every_row[hit.any(1)]]] = True
        assert gradient[rows].isnan().all()
        assert torch.equal(gradient[~rows], clean_gradient[~rows])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_minus_infinity_outside_and_inside_the_support_counts_nothing(
        self, vocab_size: int, dtype: torch.dtype
    ) -> None:
        # Every row samples the last id. In every other row nothing before it is finite in the
        # kernel's first block, or in the whole row where that is one block.
        case = self.case(vocab_size, seed=10, dtype=dtype, sampled=vocab_size - 1)
        generator = torch.Generator(self.device).manual_seed(10)
        drop = torch.rand(case.logits.shape, generator=generator, device=self.device) < 0.3
        drop[::2, : self.first_block(case.logits)] = True
        drop[:, vocab_size - 1] = False
        logits = case.logits.masked_fill(drop, -torch.inf)
        # The dense reference with the dropped entries finite but far too low to count.
        truth = Truth.of(case, case.logits.masked_fill(drop, -5000.0))
        scores, gradient = scored(logits, case.plan)
        truth.check(scores, gradient)
        assert (gradient[drop] == 0).all()

    @pytest.mark.parametrize("rise", [11.0, 20.0, 200.0, 1e4])
    @pytest.mark.parametrize("where", [0.5, 1.0])
    def test_logits_far_above_those_of_the_first_block(
        self, vocab_size: int, rise: float, where: float
    ) -> None:
        case = self.case(vocab_size, seed=11)
        logits = case.logits.clone()
        logits[::3, int(where * (vocab_size - 1))] += rise
        truth = Truth.of(case, logits)
        results = scored(logits, case.plan)
        truth.check(*results)
        assert results[1].isfinite().all()
        clean = scored(case.logits, case.plan)
        untouched = case.plan.rows % 3 != 0
        for name in SCORE_NAMES:
            assert torch.equal(results[0][name][untouched], clean[0][name][untouched]), name

    @pytest.mark.parametrize("scale", [1e-3, 100.0, 1e4])
    def test_large_and_offset_logits_neither_overflow_nor_lose_precision(
        self, vocab_size: int, scale: float
    ) -> None:
        case = self.case(vocab_size, seed=12)
        logits = case.logits * scale + 3 * scale
        Truth.of(case, logits).check(*scored(logits, case.plan))

    def first_block(self, logits: Tensor) -> int:
        from rlreplay.kernels import triton_scores

        return triton_scores._full_configuration(logits)[0]

    @pytest.mark.parametrize(
        ("tp", "spare"), [(2, 0), (4, 3), (3, "a shard")], ids=["even", "padded", "no ids at all"]
    )
    @pytest.mark.parametrize("wanted", [SCORE_NAMES, SUPPORT_SCORES])
    def test_vocab_shards(
        self,
        vocab_size: int,
        tp: int,
        spare: int | str,
        wanted: tuple[str, ...],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        # small supports: most shards have none of a row's ids
        case = self.case(vocab_size, seed=13, sizes=[1, 2, 3, None, min(vocab_size, 150)])
        columns = -(-vocab_size // tp) + spare if isinstance(spare, int) else vocab_size
        whole = torch.full(
            (len(case.logits), columns * tp), GARBAGE, device=self.device, dtype=torch.float32
        )
        whole[:, :vocab_size] = case.logits
        turns = TakingTurns()
        monkeypatch.setattr(torch.distributed, "all_reduce", turns.all_reduce)
        plans = [
            plan_of(
                case.tokens,
                case.masks,
                case.layout,
                vocab_size,
                self.device,
                parallel=ParallelState(rank, tp, turns),  # type: ignore[arg-type]
                shard_columns=columns,
                check_agreement=False,
            )
            for rank in range(tp)
        ]
        weights = weights_of(case.plan, wanted)

        def sharded(backend: Any) -> tuple[list[dict[str, Tensor]], Tensor]:
            leaves = [part.clone().requires_grad_() for part in whole.split(columns, dim=1)]
            options: Any = {"scores": wanted, "temperature": 0.7, "backend": backend}
            results = turns.run(
                tp, 2, lambda rank: score_logits(leaves[rank], plans[rank], **options).asked()
            )
            gradients = [
                torch.autograd.grad(objective(scores, weights), leaf)[0]
                for scores, leaf in zip(results, leaves, strict=True)
            ]
            return results, torch.cat(gradients, dim=1)

        results, gradient = sharded("triton")
        for scores in results[1:]:
            assert all(torch.equal(scores[name], results[0][name]) for name in wanted)
        assert (gradient[:, vocab_size:] == 0).all()
        truth = Truth.of(case, case.logits, 0.7, weights)
        # the same computation, sharded, in plain torch
        plain, plain_gradient = sharded("torch")
        for name in wanted:
            own = error_budget([plain[0][name].detach()], [truth.scores[name]], torch.float32)
            truth.budgets[name] = max(truth.budgets[name], own)
        own = error_budget([plain_gradient[:, :vocab_size]], [truth.gradient], torch.float32)
        truth.budgets["gradient"] = max(truth.budgets["gradient"], own)
        truth.check(results[0], gradient[:, :vocab_size])
        forced = (case.support.sum(1) == 1) & ~case.plan.unrestricted
        assert forced.any()
        for name in SUPPORT_SCORES:
            assert (results[0][name][forced] == 0).all()
        if wanted == SUPPORT_SCORES:
            assert (gradient[case.plan.rows[forced]] == 0).all()

    @pytest.mark.parametrize("wanted", [SCORE_NAMES, ("log_probs",)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_inplace_backward_has_the_same_bits_in_the_logits_memory(
        self, vocab_size: int, wanted: tuple[str, ...], dtype: torch.dtype
    ) -> None:
        case = self.case(vocab_size, seed=14, padding=2, extra_rows=1, dtype=dtype)
        weights = weights_of(case.plan, wanted)
        scores, gradient = scored(case.logits, case.plan, weights, scores=wanted)
        # rows apart from each other: what lies between is not the logits'
        leaf = torch.nn.functional.pad(case.logits, (0, 3), value=7.0).requires_grad_()
        wide = leaf * 1
        logits = wide[:, :-3]
        options: Any = {"scores": wanted, "backend": "triton", "inplace_backward": True}
        values = score_logits(logits, case.plan, **options).asked()
        for name in wanted:
            assert torch.equal(values[name], scores[name])
        total = objective(values, weights)
        (inplace,) = torch.autograd.grad(total, logits, retain_graph=True)
        assert inplace.data_ptr() == logits.data_ptr()
        assert torch.equal(inplace, gradient)
        assert (wide[:, -3:] == 7).all()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(total, leaf)

    def test_inplace_backward_reaches_what_made_the_logits(self, vocab_size: int) -> None:
        case = self.case(vocab_size, seed=15)
        _, gradient = scored(case.logits, case.plan)
        leaf = case.logits.detach().requires_grad_()
        options: Any = {"scores": SCORE_NAMES, "backend": "triton", "inplace_backward": True}
        scores = score_logits(leaf * 2, case.plan, temperature=2.0, **options).asked()
        objective(scores, weights_of(case.plan)).backward()
        assert leaf.grad is not None
        # x = 2 leaf / 2; powers of two round nothing
        assert torch.equal(leaf.grad, gradient)

    def test_inplace_backward_is_noticed_by_others_who_saved_the_logits(self) -> None:
        case = self.case(37, seed=16)
        logits = case.logits.requires_grad_() * 1
        square = logits.square().sum()
        options: Any = {"backend": "triton", "inplace_backward": True}
        (log_probs,) = score_logits(logits, case.plan, **options).asked().values()
        torch.autograd.grad(log_probs.sum(), logits)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(square, logits)

    def test_inplace_backward_is_refused_where_it_is_seen_to_be_unsafe(self) -> None:
        case = self.case(37, seed=17)
        made = case.logits.detach().requires_grad_() * 1
        options: Any = {"plan": case.plan, "inplace_backward": True}
        with pytest.raises(BackendError, match="on the torch backend"):
            score_logits(made, backend="torch", **options)
        with pytest.raises(BackendError, match="a leaf=True"):
            score_logits(made.detach().requires_grad_(), backend="triton", **options)
        with pytest.raises(BackendError, match="a leaf=True"):
            score_logits(case.logits.requires_grad_().view(made.shape), backend="triton", **options)
        overlapping = made[:1].expand(len(made), -1)
        with pytest.raises(BackendError, match="rows that do not overlap"):
            score_logits(overlapping, backend="triton", **options)
