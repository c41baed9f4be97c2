"""What is asserted of `score_hidden` on a backend, on whatever device and at whatever size.

`HiddenTests` runs through its subclasses: on the torch backend and with Triton's interpreter in
tests/fast, on a GPU in tests/gpu. The truth is `score_logits` on `hidden @ weight.T` in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from rlreplay import RowLayout, id_segments, score_logits
from rlreplay.hidden_scores import sample_entropy, score_hidden
from rlreplay.id_segments import PIECE
from rlreplay.kernels.softmax import SCORE_NAMES
from rlreplay.plan import ReplayPlan
from rlreplay.sampling_mask import RolloutSamplingMask
from tests.batches import assert_within, error_budget
from tests.kernel_checks import Case, Sample, make_case, objective, plan_of, weights_of

SPARSE_SCORES = ("log_probs", "support_entropy")
Results = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Scores, and gradients of hidden, weight and bias."""


@dataclass(frozen=True)
class Layer:
    """Hidden states of a case's rows, and an output layer."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, case: Case, width: int, dtype: torch.dtype, bias: bool, seed: int = 0) -> Layer:
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        device = case.logits.device
        return cls(
            draw(len(case.logits), width).to(device, dtype),
            (draw(case.vocab_size, width) * 2 / width**0.5).to(device, dtype),
            draw(case.vocab_size).to(device, dtype) if bias else None,
        )

    def leaves(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        named = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        return {
            name: tensor.detach().to(dtype or tensor.dtype, copy=True).requires_grad_()
            for name, tensor in named.items()
            if tensor is not None
        }


def scored(layer: Layer, plan: ReplayPlan, weights: dict[str, Tensor], **options: Any) -> Results:
    leaves = layer.leaves()
    scores = score_hidden(
        leaves["hidden"], leaves["weight"], plan, scores=tuple(weights), bias=leaves.get("bias"),
        **options,
    ).asked()  # fmt: skip
    gradients = torch.autograd.grad(objective(scores, weights), list(leaves.values()))
    named = dict(zip(leaves, gradients, strict=True))
    return {k: v.detach() for k, v in scores.items()}, named


def through_logits(
    layer: Layer,
    plan: ReplayPlan,
    weights: dict[str, Tensor],
    dtype: torch.dtype,
    temperature: Any = 1.0,
    dots: bool = False,
    rounding: int | None = None,
) -> Results:
    """By whole logits in `dtype`, on the torch backend.

    Args:
        dots: by sums of products, not by a product of matrices.
        rounding: the exact logits instead, each rounded up or down as this seed says: a sum may
            end on either side.
    """
    leaves = layer.leaves(dtype)
    if dots:
        logits = (leaves["hidden"][:, None] * leaves["weight"]).sum(-1)
        logits = logits + leaves["bias"] if "bias" in leaves else logits
    else:
        logits = torch.nn.functional.linear(leaves["hidden"], leaves["weight"], leaves.get("bias"))
    if rounding is not None:
        generator = torch.Generator().manual_seed(rounding)
        up = (torch.rand(logits.shape, generator=generator) < 0.5).to(logits.device)
        exact = torch.nn.functional.linear(
            *(None if t is None else t.double() for t in (layer.hidden, layer.weight, layer.bias))
        )
        logits = logits + (rounded(exact, up, dtype) - logits).detach()
    if isinstance(temperature, Tensor):
        temperature = temperature.to(torch.promote_types(dtype, torch.float32))
    scores = score_logits(
        logits, plan, scores=tuple(weights), temperature=temperature, backend="torch"
    ).asked()
    gradients = torch.autograd.grad(objective(scores, weights), list(leaves.values()))
    named = dict(zip(leaves, gradients, strict=True))
    return {k: v.detach() for k, v in scores.items()}, named


def rounded(exact: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
    """The neighbours in `dtype` of float64 values, the upper ones where `up`."""
    nearest = exact.to(dtype)
    below = torch.where(nearest > exact, _next(nearest, -torch.inf), nearest)
    above = torch.where(nearest < exact, _next(nearest, torch.inf), nearest)
    return torch.where(up, above, below)


def _next(values: Tensor, towards: float) -> Tensor:
    return torch.nextafter(values, torch.full_like(values, towards))


def check(
    results: Results,
    layer: Layer,
    plan: ReplayPlan,
    weights: dict[str, Tensor],
    temperature: Any = 1.0,
    dots: bool = True,
) -> None:
    """Within twice the error of plain torch with whole logits in the same type, by a product of
    matrices or by sums of products. For float64 it is that of float32 in its units, and what the
    two ways differ by in float64, since the truth is off by as much.

    In float32 also within twice what rounding the exact logits up or down alone does, of four
    draws: a sum may end on either side, and a gradient's largest error can hang on one logit. So it
    was in the case of width 7 at scale 16: 8.0e-6 by a product on a CPU and by the kernels, between
    1.4e-6 and 2e-6 by both ways in torch on a GPU.
    """
    exact = through_logits(layer, plan, weights, torch.float64, temperature)
    dtype = layer.hidden.dtype
    wide = dtype == torch.float64
    compared = torch.float32 if wide else dtype
    units = torch.finfo(dtype).eps / torch.finfo(compared).eps
    plain = [
        through_logits(layer, plan, weights, compared, temperature, by_dots)
        for by_dots in ((False, True) if dots else (False,))
    ]
    if dtype == torch.float32 and layer.hidden.shape[1] > 1:
        plain += [
            through_logits(layer, plan, weights, compared, temperature, rounding=seed)
            for seed in range(4)
        ]
    other = through_logits(layer, plan, weights, dtype, temperature, dots=True) if wide else exact
    for kind, short in ((0, torch.float32), (1, compared)):
        for name, truth in exact[kind].items():
            budget = units * max(error_budget([p[kind][name]], [truth], short) for p in plain)
            if wide:
                budget += error_budget([other[kind][name]], [truth], dtype)
            assert_within(results[kind][name], truth, budget, name)


def same_bits(a: Results, b: Results) -> None:
    for kind in (0, 1):
        for name in a[kind]:
            assert torch.equal(a[kind][name], b[kind][name]), name


class HiddenTests:
    """Subclasses say where."""

    device: str
    backend: str
    scale = 1
    vocab = 150

    def samples(self) -> list[Sample]:
        n = self.scale
        return [(1, 3 * n, "mixed"), (3, 2 * n, "free"), (2, 2 * n, "forced"), (2, 5 * n, "mixed")]

    def case(self, **options: Any) -> Case:
        options.setdefault("sizes", [1, 2, 17, 40, self.vocab, None])
        return make_case(self.device, self.samples(), self.vocab, extra_rows=2, **options)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize(("width", "bias"), [(32, False), (7, True), (300, True)])
    @pytest.mark.parametrize("per_row", [False, True])
    def test_sparse_scores_and_gradients(
        self, dtype: torch.dtype, width: int, bias: bool, per_row: bool
    ) -> None:
        case = self.case()
        layer = Layer.of(case, width, dtype, bias)
        rows = torch.linspace(0.5, 1.5, case.plan.num_rows, device=self.device)
        temperature: Any = rows if per_row else 0.7
        weights = weights_of(case.plan, SPARSE_SCORES)
        options: Any = {"path": "sparse", "backend": self.backend, "temperature": temperature}
        results = scored(layer, case.plan, weights, **options)
        check(results, layer, case.plan, weights, temperature)
        unscored = np.setdiff1d(np.arange(len(layer.hidden)), case.plan.host_rows)
        assert (results[1]["hidden"][torch.from_numpy(unscored).to(self.device)] == 0).all()
        same_bits(scored(layer, case.plan, weights, **options), results)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("max_bytes", [1, 20_000, 1 << 30])
    @pytest.mark.parametrize("wanted", [SCORE_NAMES, ("full_log_probs", "entropy"), SPARSE_SCORES])
    def test_chunked_scores_and_gradients(
        self, dtype: torch.dtype, max_bytes: int, wanted: tuple[str, ...]
    ) -> None:
        case = self.case(seed=1)
        layer = Layer.of(case, 24, dtype, bias=True)
        weights = weights_of(case.plan, wanted)
        results = scored(
            layer, case.plan, weights, path="chunked", backend=self.backend, max_bytes=max_bytes
        )
        check(results, layer, case.plan, weights)

    def test_support_logits_are_never_rounded_to_the_models_type(self) -> None:
        case = make_case(self.device, [(2, 30, "mixed")], self.vocab, sizes=[1, 2, 17, 40])
        layer = Layer.of(case, 64, torch.bfloat16, bias=True)
        weights = weights_of(case.plan, SPARSE_SCORES)
        scores, _ = scored(layer, case.plan, weights, path="sparse", backend=self.backend)
        exact, _ = through_logits(layer, case.plan, weights, torch.float64)
        plain, _ = through_logits(layer, case.plan, weights, torch.float32)
        for name, truth in exact.items():
            budget = error_budget([plain[name]], [truth], torch.float32)
            assert_within(scores[name], truth, budget, name)

    @pytest.mark.parametrize("target", ["dense", "main_grad"])
    def test_many_parts_add_up_the_weights_gradient_in_float32(self, target: Any) -> None:
        """Logits of 0 over four columns: products are exact, and one column sums 600 like terms.

        Sums in bfloat16 would stop at 256 of them.
        """
        rows = 600
        case = make_case(self.device, [(1, rows, "free")], 4, sampled=2)
        hidden = torch.linspace(1, 2, rows + 1, device=self.device).bfloat16()[:, None]
        weight = torch.zeros(4, 1, device=self.device, dtype=torch.bfloat16, requires_grad=True)
        weight.main_grad = torch.zeros(4, 1, device=self.device)  # type: ignore[attr-defined]
        scores = score_hidden(
            hidden, weight, case.plan, path="chunked", max_bytes=1, weight_gradient=target,
            backend=self.backend,  # type: ignore[arg-type]
        )  # fmt: skip
        assert scores.log_probs is not None
        scores.log_probs.sum().backward()
        gradient = weight.grad if target == "dense" else weight.main_grad  # type: ignore[attr-defined]
        signs = torch.tensor([-0.25, -0.25, 0.75, -0.25], dtype=torch.float64, device=self.device)
        exact = (signs * hidden[:rows].double().sum())[:, None]
        # a term is rounded at most once, and the sum once
        assert (
            (gradient.double() - exact).abs() <= torch.finfo(torch.bfloat16).eps * exact.abs()
        ).all()

    def test_nan_where_nothing_is_scored_stays_there(self) -> None:
        """Sizes of rows and of ids' pieces that no loop of four divides."""
        cases = (
            make_case(
                self.device, [(2, 14, "mixed")], self.vocab, sizes=[1, 2, 3, 5], sampled=7, seed=k
            )
            for k in range(100)
        )
        case = next(case for case in cases if 0 not in case.plan.ids)
        with mock.patch.object(id_segments, "PIECE", 3):
            assert case.plan.by_id.host_split_starts[-1] >= 5
        layer = Layer.of(case, 20, torch.float32, bias=False)
        weights = weights_of(case.plan, SPARSE_SCORES)
        _, expected = scored(layer, case.plan, weights, path="sparse", backend=self.backend)
        unscored = torch.ones(len(layer.hidden), dtype=torch.bool, device=self.device)
        unscored[case.plan.rows] = False
        unnamed = torch.ones(len(layer.weight), dtype=torch.bool, device=self.device)
        unnamed[case.plan.ids.long()] = False
        assert unscored[0]
        assert unnamed[0]
        layer.hidden[unscored] = torch.nan
        layer.weight[unnamed] = torch.nan
        _, gradients = scored(layer, case.plan, weights, path="sparse", backend=self.backend)
        for name in ("hidden", "weight"):
            assert torch.equal(gradients[name], expected[name])
            assert gradients[name].isfinite().all()

    @pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation.*")
    def test_nothing_is_read_before_it_is_written(self) -> None:
        """Memory that is handed out is full of NaN under torch's deterministic algorithms."""
        case = self.case(seed=9)
        for dtype in (torch.float32, torch.bfloat16):
            layer = Layer.of(case, 24, dtype, bias=True)
            for path, names in (("sparse", SPARSE_SCORES), ("chunked", SCORE_NAMES)):
                for max_bytes in (1, 20_000, 1 << 30):
                    weights = weights_of(case.plan, names)
                    options: Any = {"path": path, "backend": self.backend, "max_bytes": max_bytes}
                    torch.use_deterministic_algorithms(True, warn_only=True)
                    try:
                        results = scored(layer, case.plan, weights, **options)
                    finally:
                        torch.use_deterministic_algorithms(False)
                    same_bits(results, scored(layer, case.plan, weights, **options))

    @pytest.mark.parametrize(
        ("dtype", "of_main_grad"),
        [
            (torch.float64, torch.float32),
            (torch.float32, torch.float64),
            (torch.float32, torch.bfloat16),
            (torch.float16, torch.float32),
            (torch.bfloat16, torch.bfloat16),
        ],
    )
    @pytest.mark.parametrize("path", ["sparse", "chunked"])
    def test_main_grad_of_another_type(
        self, path: Any, dtype: torch.dtype, of_main_grad: torch.dtype
    ) -> None:
        case = make_case(self.device, [(2, 9, "mixed")], self.vocab, sizes=[1, 2, 17])
        layer = Layer.of(case, 16, dtype, bias=False)
        weights = weights_of(case.plan, SPARSE_SCORES)
        options: Any = {"path": path, "backend": self.backend, "max_bytes": 20_000}
        weight = torch.nn.Parameter(layer.weight.clone())
        weight.main_grad = torch.ones(weight.shape, device=self.device, dtype=of_main_grad)  # type: ignore[attr-defined]
        scores = score_hidden(
            layer.hidden, weight, case.plan, scores=SPARSE_SCORES, weight_gradient="main_grad",
            **options,
        ).asked()  # fmt: skip
        objective(scores, weights).backward()
        exact = 1 + through_logits(layer, case.plan, weights, torch.float64)[1]["weight"]
        coarser = max(dtype, of_main_grad, key=lambda kind: torch.finfo(kind).eps)
        plain = through_logits(layer, case.plan, weights, coarser)[1]["weight"] + 1
        budget = error_budget([plain], [exact], coarser)
        assert_within(weight.main_grad, exact, budget, "main_grad")  # type: ignore[attr-defined]

    @pytest.mark.parametrize("path", ["sparse", "chunked"])
    def test_an_unrestricted_row_at_minus_inf_without_gradient_stays_alone(self, path: Any) -> None:
        case = make_case(self.device, [(2, 5, "mixed"), (1, 3, "free")], self.vocab, sizes=[2, 4])
        layer = Layer.of(case, 6, torch.float32, bias=True)
        row = case.plan.num_rows - 1
        assert case.plan.host_unrestricted[row]
        assert layer.bias is not None
        layer.bias[case.plan.ids[case.plan.targets[row]].long()] = -torch.inf
        weights = torch.randn(row, device=self.device)
        leaves = layer.leaves()
        log_probs = score_hidden(
            **leaves, plan=case.plan, path=path, backend=self.backend,  # type: ignore[arg-type]
        ).log_probs  # fmt: skip
        assert log_probs is not None
        assert log_probs[row] == -torch.inf
        (log_probs[:row] * weights).sum().backward()
        assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves.values())

    def test_gradcheck(self) -> None:
        samples: list[Sample] = [(1, 2, "mixed"), (1, 1, "free"), (1, 1, "forced")]
        case = make_case(self.device, samples, 5)
        layer = Layer.of(case, 3, torch.float64, bias=True)
        for path, names in (("sparse", SPARSE_SCORES), ("chunked", SCORE_NAMES)):

            def function(
                h: Tensor, w: Tensor, b: Tensor, path: Any = path, names: Any = names
            ) -> tuple[Tensor, ...]:
                options: Any = {"path": path, "backend": self.backend, "max_bytes": 100}
                return tuple(
                    score_hidden(h, w, case.plan, bias=b, scores=names, **options).asked().values()
                )

            assert torch.autograd.gradcheck(function, tuple(layer.leaves().values()))

    def test_one_id_in_every_row_and_many_rows_of_it(self) -> None:
        rows = 2 * PIECE + 1
        case = make_case(
            self.device, [(2, rows, "mixed")], self.vocab, sizes=[1, 5, 9], sampled=self.vocab - 1
        )
        layer = Layer.of(case, 20, torch.float32, bias=True)
        weights = weights_of(case.plan, SPARSE_SCORES)
        segments = case.plan.by_id
        assert segments.split_columns.tolist() == [self.vocab - 1]
        assert segments.host_split_starts[-1] == 3
        check(
            scored(layer, case.plan, weights, path="sparse", backend=self.backend),
            layer,
            case.plan,
            weights,
        )

    @pytest.mark.parametrize("width", [7, 40, 301])
    def test_same_bits_whatever_else_is_in_the_batch(self, width: int) -> None:
        case = self.case(seed=3, sizes=[1, 2, 17])
        layer = Layer.of(case, width, torch.bfloat16, bias=False)
        weights = weights_of(case.plan, SPARSE_SCORES)
        results = scored(layer, case.plan, weights, path="sparse", backend=self.backend)
        starts = np.cumsum([0, *case.layout.total_lengths])
        for i in (0, 2, 3):
            plan, _, rows = case.part(i)
            some = slice(int(starts[i]), int(starts[i + 1]))
            part = Layer(layer.hidden[some], layer.weight, None)
            mine = {k: v[rows] for k, v in weights.items()}
            alone = scored(part, plan, mine, path="sparse", backend=self.backend)
            for name in SPARSE_SCORES:
                assert torch.equal(alone[0][name], results[0][name][rows])
            assert torch.equal(alone[1]["hidden"], results[1]["hidden"][some])

    def test_no_rows_and_no_ids(self) -> None:
        plan = plan_of(
            [np.arange(3)],
            [RolloutSamplingMask.full(0)],
            RowLayout.packed([3], [0]),
            9,
            self.device,
        )
        hidden = torch.ones(3, 4, device=self.device)
        layer = Layer(hidden, torch.ones(9, 4, device=self.device), None)
        for path, names in (("sparse", SPARSE_SCORES), ("chunked", SCORE_NAMES)):
            weights = weights_of(plan, names)
            scores, gradients = scored(layer, plan, weights, path=path, backend=self.backend)
            assert all(v.shape == (0,) for v in scores.values())
            assert all((g == 0).all() for g in gradients.values())

    @pytest.mark.parametrize("path", ["sparse", "chunked"])
    def test_hidden_states_of_no_size(self, path: Any) -> None:
        case = self.case(seed=11)
        layer = Layer.of(case, 1, torch.float32, bias=True)
        empty = Layer(layer.hidden[:, :0], layer.weight[:, :0], layer.bias)
        weights = weights_of(case.plan, SPARSE_SCORES)
        results = scored(empty, case.plan, weights, path=path, backend=self.backend)
        exact = through_logits(empty, case.plan, weights, torch.float64)
        plain = through_logits(empty, case.plan, weights, torch.float32)
        for kind, names in ((0, SPARSE_SCORES), (1, ("bias",))):
            for name in names:
                budget = error_budget([plain[kind][name]], [exact[kind][name]], torch.float32)
                assert_within(results[kind][name], exact[kind][name], budget, name)
        assert results[1]["hidden"].shape == empty.hidden.shape
        assert results[1]["weight"].shape == empty.weight.shape

    def test_forced_rows_are_exactly_zero_and_send_no_gradient(self) -> None:
        case = make_case(self.device, [(2, 6, "forced")], self.vocab)
        layer = Layer.of(case, 33, torch.bfloat16, bias=True)
        weights = weights_of(case.plan, SPARSE_SCORES)
        scores, gradients = scored(
            layer, case.plan, weights, path="sparse", backend=self.backend, temperature=0.37
        )
        assert all((v == 0).all() for v in scores.values())
        assert all((g == 0).all() for g in gradients.values())

    def test_rows_and_a_bias_with_a_stride(self) -> None:
        case = self.case(seed=8)
        layer = Layer.of(case, 12, torch.float32, bias=True)
        assert layer.bias is not None
        weights = weights_of(case.plan, SPARSE_SCORES)

        def spread(tensor: Tensor) -> Tensor:
            wide = torch.full((*tensor.shape, 2), torch.nan, device=self.device)
            wide[..., 0] = tensor
            if tensor.ndim == 1:
                return wide[:, 0]
            return torch.cat([tensor, wide[..., 1]], dim=1)[:, : tensor.shape[1]]

        strided = Layer(spread(layer.hidden), spread(layer.weight), spread(layer.bias))
        assert not any(t.is_contiguous() for t in (strided.hidden, strided.weight, strided.bias))
        for path in ("sparse", "chunked"):
            leaves = [strided.hidden, strided.weight, strided.bias]
            leaves = [t.detach().requires_grad_() for t in leaves]
            scores = score_hidden(
                leaves[0], leaves[1], case.plan, bias=leaves[2], scores=SPARSE_SCORES, path=path,
                backend=self.backend,  # type: ignore[arg-type]
            ).asked()  # fmt: skip
            gradients = torch.autograd.grad(objective(scores, weights), leaves)
            named = dict(zip(("hidden", "weight", "bias"), gradients, strict=True))
            check(({k: v.detach() for k, v in scores.items()}, named), layer, case.plan, weights)

    def test_main_grad_of_a_weight_that_is_the_embedding_too(self) -> None:
        """Megatron's hook then adds the gradient that autograd has."""
        case = make_case(self.device, [(2, 9, "mixed")], self.vocab, sizes=[1, 2, 17])
        layer = Layer.of(case, 16, torch.float32, bias=False)
        weight = torch.nn.Parameter(layer.weight.clone())
        weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        weight.zero_out_wgrad = True  # type: ignore[attr-defined]
        scores = score_hidden(
            layer.hidden, weight, case.plan, weight_gradient="main_grad",
            backend=self.backend,  # type: ignore[arg-type]
        )  # fmt: skip
        assert scores.log_probs is not None
        scores.log_probs.sum().backward()
        assert weight.grad is not None
        assert (weight.grad == 0).all()

    @pytest.mark.parametrize("path", ["sparse", "chunked"])
    @pytest.mark.parametrize("flagged", [True, False])
    def test_main_grad_is_added_to_in_named_rows_only(self, path: str, flagged: bool) -> None:
        case = self.case(seed=4, sizes=[1, 2, 17])
        if path == "sparse":  # an unrestricted row names every column
            case = make_case(self.device, [(2, 9, "mixed")], self.vocab, sizes=[1, 2, 17])
        layer = Layer.of(case, 16, torch.bfloat16, bias=False)
        weights = weights_of(case.plan, SPARSE_SCORES)
        options: Any = {"path": path, "backend": self.backend, "max_bytes": 20_000}
        _, expected = scored(layer, case.plan, weights, **options)
        weight = torch.nn.Parameter(layer.weight.clone())
        before = torch.randn(weight.shape, device=self.device)
        weight.main_grad = before.clone()  # type: ignore[attr-defined]
        if flagged:
            weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        hidden = layer.hidden.clone().requires_grad_()
        scores = score_hidden(
            hidden, weight, case.plan, scores=SPARSE_SCORES, weight_gradient="main_grad", **options
        ).asked()
        objective(scores, weights).backward()
        assert (weight.grad is not None) == flagged
        if flagged:
            assert weight.grad_added_to_main_grad is True  # type: ignore[attr-defined]
        added = weight.main_grad - before  # type: ignore[attr-defined]
        exact = through_logits(layer, case.plan, weights, torch.float64)[1]["weight"]
        plain = through_logits(layer, case.plan, weights, torch.bfloat16)[1]["weight"]
        assert_within(added, exact, error_budget([plain], [exact], torch.bfloat16), "main_grad")
        assert torch.equal(hidden.grad, expected["hidden"])
        if path == "sparse":
            named = torch.zeros(self.vocab, dtype=torch.bool, device=self.device)
            named[case.plan.ids.long()] = True
            assert 0 < int(named.sum()) < self.vocab
            assert torch.equal(weight.main_grad[~named], before[~named])  # type: ignore[attr-defined]

    def test_nothing_is_written_to_and_a_second_backward_works(self) -> None:
        case = self.case(seed=5)
        layer = Layer.of(case, 16, torch.float32, bias=True)
        many_parts = 20_000
        for path, names, max_bytes in (
            ("sparse", SPARSE_SCORES, 1 << 30),
            ("chunked", SCORE_NAMES, 1 << 30),
            ("chunked", SCORE_NAMES, many_parts),
        ):
            leaves = layer.leaves()
            scores = score_hidden(
                leaves["hidden"], leaves["weight"], case.plan, bias=leaves["bias"], scores=names,
                path=path, backend=self.backend, max_bytes=max_bytes,
            ).asked()  # fmt: skip
            value = objective(scores, weights_of(case.plan, names))
            first = torch.autograd.grad(value, list(leaves.values()), retain_graph=True)
            kept = [g.clone() for g in first]
            second = torch.autograd.grad(value, list(leaves.values()))
            assert all(torch.equal(a, b) for a, b in zip(kept, second, strict=True))
            for name, leaf in leaves.items():
                assert torch.equal(leaf.detach(), getattr(layer, name))

    def test_a_sum_sends_a_gradient_with_a_stride_of_zero(self) -> None:
        case = self.case(seed=6)
        layer = Layer.of(case, 16, torch.float32, bias=False)
        ones = {"log_probs": torch.ones(case.plan.num_rows, device=self.device)}
        for path in ("sparse", "chunked"):
            options: Any = {"path": path, "backend": self.backend}
            _, expected = scored(layer, case.plan, ones, **options)
            leaves = layer.leaves()
            scores = score_hidden(leaves["hidden"], leaves["weight"], case.plan, **options)
            assert scores.log_probs is not None
            scores.log_probs.sum().backward()
            assert torch.equal(leaves["hidden"].grad, expected["hidden"])

    @pytest.mark.parametrize("count", [1, 4, 10_000])
    def test_sampled_entropy(self, count: int) -> None:
        case = self.case(seed=7)
        layer = Layer.of(case, 16, torch.float32, bias=True)
        sample = sample_entropy(
            layer.hidden, layer.weight, case.plan, entropy_rows=count, bias=layer.bias,
            backend=self.backend, max_bytes=5_000, temperature=0.8,  # type: ignore[arg-type]
        )  # fmt: skip
        weights = weights_of(case.plan, ("entropy",))
        truth = through_logits(layer, case.plan, weights, torch.float64, 0.8)[0]["entropy"]
        total = case.plan.num_rows
        assert len(sample.rows) == min(count, total)
        assert (np.diff(sample.rows) > 0).all()
        some = truth[torch.from_numpy(sample.rows).to(self.device)]
        torch.testing.assert_close(sample.entropy.double(), some, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sample.mean.double(), some.mean(), rtol=1e-5, atol=1e-5)
        if count >= total:
            assert float(sample.standard_error) == 0
        elif count == 1:
            assert bool(sample.standard_error.isnan())
        else:
            expected = some.std() / count**0.5 * (1 - count / total) ** 0.5
            torch.testing.assert_close(
                sample.standard_error.double(), expected, rtol=1e-4, atol=1e-6
            )


class TritonTests(HiddenTests):
    """What is asserted of the Triton backend besides."""

    backend = "triton"

    def test_few_partial_sums_at_a_time_give_the_same_bits(self) -> None:
        from rlreplay.kernels import triton_linear

        case = self.case(seed=10, sizes=[9, 17, 40])
        with mock.patch.object(id_segments, "PIECE", 2):
            segments = case.plan.by_id
        layer = Layer.of(case, 24, torch.bfloat16, bias=False)
        weights = weights_of(case.plan, SPARSE_SCORES)
        options: Any = {"path": "sparse", "backend": self.backend}
        expected = scored(layer, case.plan, weights, **options)
        for most in (1, 5):
            assert len(list(segments.batches(most))) > 3
            with mock.patch.object(triton_linear, "_PARTIAL_BYTES", most * 4 * 24):
                same_bits(scored(layer, case.plan, weights, **options), expected)
