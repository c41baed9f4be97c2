"""Scores straight from hidden states: the logits of the supports, and never a whole row's.

Shapes: `T` rows of hidden states of size `D` on this rank, `V` vocabulary columns on this rank,
`R` response rows, `N` support ids on this rank's vocab shard.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from rlreplay.errors import BackendError, ReplayError
from rlreplay.kernels import torch_linear, torch_scores
from rlreplay.kernels.rows import ScoreKernels
from rlreplay.kernels.softmax import FULL_SCORES, Normaliser, score_of
from rlreplay.parallel import all_gather_single, reduce_scatter_single
from rlreplay.plan import ReplayPlan, to_device
from rlreplay.sampling_mask import IntArray, check_count
from rlreplay.scores import (
    Backend,
    Request,
    Scores,
    check_supports_of,
    gradient_of,
    kernels_of,
    normalisers_of,
    resolve_scores,
    row_temperature,
)

Path = Literal["auto", "sparse", "chunked"]
PATHS = get_args(Path)
WeightGradient = Literal["dense", "main_grad"]
WEIGHT_GRADIENTS = get_args(WeightGradient)

BREAK_EVEN_IDS = 2000
"""Support ids a row from which whole logits, chunk by chunk, are taken to be faster on a GPU. On an
H200 forward and backward take the same time at 2,150 to 2,250 ids for hidden sizes of 2,048 to
7,168, a forward alone at 1,450; one number for both, so that a forward without gradient
gives the bits of one with it."""

CPU_BREAK_EVEN = 1 / 200
"""The same on CPUs, as a share of the vocabulary."""

MAX_BYTES = 1 << 30


class LinearKernels(Protocol):
    """What a backend's module provides; `torch_linear` says what each function computes."""

    def support_logits(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, plan: ReplayPlan
    ) -> Tensor: ...

    def hidden_gradient(
        self, grad: Tensor, hidden: Tensor, weight: Tensor, plan: ReplayPlan
    ) -> Tensor: ...

    def weight_gradient(
        self, grad: Tensor, hidden: Tensor, plan: ReplayPlan, out: Tensor, accumulate: bool
    ) -> None: ...


def score_hidden(
    hidden: Float[Tensor, "T D"],
    weight: Float[Tensor, "V D"],
    plan: ReplayPlan,
    *,
    scores: Collection[str] = ("log_probs",),
    differentiable: Collection[str] | bool | None = None,
    temperature: float | Float[Tensor, " R"] = 1.0,
    bias: Float[Tensor, " V"] | None = None,
    path: Path = "auto",
    backend: Backend = "auto",
    weight_gradient: WeightGradient = "dense",
    sequence_parallel: bool = False,
    max_bytes: int = MAX_BYTES,
    keep_logits: bool = True,
) -> Scores:
    """Scores of the planned rows from the hidden states before the output layer.

    Equivalent to `score_logits(hidden @ weight.T + bias, plan, ...)`, differentiable in `hidden`,
    `weight` and `bias`, without these logits.

    On the sparse path only the supports' logits are computed, N dot products in float32 (float64
    for float64) that are never rounded to the model's type. Unrestricted rows, and on the chunked
    path all rows, get whole logits in the model's type, a chunk of rows at a time: as a model with
    an output layer computes them. The last chunk's are kept for the backward (`keep_logits`), the
    others' made once more there.

    Args:
        hidden: float `[T, D]`, what the output layer is given, in the plan's rows; with
            `sequence_parallel`, this TP rank's `[T / tp, D]`, rows in rank order, as many on each.
        weight: float `[V, D]`, this rank's rows of the output layer's weight, in `hidden`'s type.
        plan: the micro-batch, as `ReplayPlan.build` laid it out for this rank.
        scores, differentiable, temperature, backend: as in `score_logits`.
        bias: float `[V]`, of the output layer.
        path: `"sparse"` (of the five scores it gives `log_probs` and `support_entropy`),
            `"chunked"`, or `"auto"`: chunked where a full-vocabulary score is asked for or the
            supports are large (`BREAK_EVEN_IDS`, on CPUs `CPU_BREAK_EVEN`), else sparse.
        weight_gradient: `"dense"`: a gradient `[V, D]` as of any operation. `"main_grad"`: added
            in place to the rows of `weight.main_grad` that a support names (Megatron's
            gradient-accumulation fusion, whose flag is set); autograd then gets None, or where
            Megatron's hook waits for a gradient, one that it leaves alone: zeros where it would
            add it all the same (`zero_out_wgrad`), else memory without meaning. On the chunked
            path a chunk's share is rounded to the weight's type before it is added, but for a
            float32 `main_grad` on CUDA with torch 2.8 or later.
        sequence_parallel: `hidden` is cut by rows over the TP group.
        max_bytes: of whole logits and their gradient at a time. Where there is more than one chunk,
            a float32 total of the weight's gradient and its rounding come on top, but for
            `main_grad`. Supports and unrestricted rows in one batch make a gradient each.
        keep_logits: keep the last chunk's logits for the backward. With False all are made again:
            for many calls before their backward, which else hold `max_bytes` each, and under
            activation checkpointing or offloading, which do not see what is kept.

    On the sparse path the gradients of weight and bias need the ids sorted: once a plan, by
    `ReplayPlan.build(sort_ids=True)`, or by the first backward, in which a GPU's host waits for it.

    Runs in the tensors' own type under autocast. Not in a graph that torch.compile makes: wrap the
    function that calls it in `torch.compiler.disable`.

    Collectives: in the forward those of `score_logits`, for the supports and then for each chunk
    of whole rows; before them with `sequence_parallel` an all-gather of `hidden`. In the backward,
    where `hidden` needs a gradient and there is a TP group, one SUM all-reduce of its gradient, or
    reduce-scatter with `sequence_parallel`. All over TP, and the same on every TP rank.

    Raises:
        BackendError: the backend cannot do what was asked, or a compiled graph is being made.
        ReplayError: tensors that do not fit the plan or each other, unknown or unavailable scores.
    """
    _refuse_compiling()
    wanted, trained = resolve_scores(scores, differentiable)
    _check_tensors(hidden, weight, bias, plan, sequence_parallel)
    divisor = row_temperature(temperature, plan, hidden.dtype)
    request = Request(wanted, trained, divisor, kernels_of(backend, hidden), False)
    layer = _OutputLayer(weight, bias, _main_grad(weight, weight_gradient))
    chunked = _is_chunked(plan, wanted, path)
    chunk = _rows_of_a_chunk(weight, max_bytes, request.kernels)
    hidden = _on_every_shard(hidden, plan, sequence_parallel)
    if chunked:
        rows = np.arange(plan.num_rows)
        values = _chunked_scores(hidden, layer, plan, request, rows, chunk, keep_logits)
    else:
        values = _sparse_scores(hidden, layer, plan, request)
        if plan.has_unrestricted:
            free = np.flatnonzero(plan.host_unrestricted)
            whole = _chunked_scores(hidden, layer, plan, request, free, chunk, keep_logits)
            where = to_device(free, plan.device)
            pairs = zip(values, whole, strict=True)
            values = tuple(value.index_copy(0, where, other) for value, other in pairs)
    return Scores(**dict(zip(wanted, values, strict=True)))


class EntropySample(NamedTuple):
    """Entropies over the whole vocabulary of some rows, and what they say of all; in nats."""

    rows: IntArray
    """int64 `[n]`: response rows, evenly spaced."""
    entropy: Float[Tensor, " n"]
    mean: Float[Tensor, ""]
    standard_error: Float[Tensor, ""]
    """of the mean, for rows drawn without replacement; 0 where all rows are in the sample."""


@torch.no_grad()
def sample_entropy(
    hidden: Float[Tensor, "T D"],
    weight: Float[Tensor, "V D"],
    plan: ReplayPlan,
    *,
    entropy_rows: int,
    temperature: float | Float[Tensor, " R"] = 1.0,
    bias: Float[Tensor, " V"] | None = None,
    backend: Backend = "auto",
    sequence_parallel: bool = False,
    max_bytes: int = MAX_BYTES,
) -> EntropySample:
    """The full-vocabulary entropy of evenly spaced rows of this rank: a metric, without gradient.

    The standard error is s / sqrt(n) * sqrt(1 - n / R), s the sample's standard deviation
    (Cochran, Sampling Techniques, 2.6); it takes evenly spaced rows for randomly drawn ones. NaN
    where the sample has no row; of one row out of several it is not known, and NaN too.

    Args:
        entropy_rows: n, how many of this rank's R response rows; all where it has fewer.
        others: as in `score_hidden`.

    Collectives: those of `score_hidden` with `path="chunked"`.
    """
    _refuse_compiling()
    wanted, trained = resolve_scores(("entropy",), False)
    _check_tensors(hidden, weight, bias, plan, sequence_parallel)
    count = min(check_count(entropy_rows, "entropy_rows"), plan.num_rows)
    divisor = row_temperature(temperature, plan, hidden.dtype)
    request = Request(wanted, trained, divisor, kernels_of(backend, hidden), False)
    rows = (np.arange(count) * plan.num_rows) // max(1, count)
    layer = _OutputLayer(weight, bias, None)
    chunk = _rows_of_a_chunk(weight, max_bytes, request.kernels)
    hidden = _on_every_shard(hidden, plan, sequence_parallel)
    (entropy,) = _chunked_scores(hidden, layer, plan, request, rows, chunk, keep=False)
    if count == plan.num_rows and count:
        error = entropy.new_zeros(())
    else:
        spread = entropy.std() if count > 1 else entropy.new_full((), torch.nan)
        error = spread * ((1 / max(1, count) - 1 / max(1, plan.num_rows)) ** 0.5)
    return EntropySample(rows, entropy, entropy.mean(), error)


class _OutputLayer(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    main_grad: Tensor | None
    """Where the weight's gradient is added, instead of returned."""


class _EnterVocabShards(torch.autograd.Function):
    """The same hidden states on every TP rank, whose gradients are partial sums."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup, by_rows: bool) -> Tensor:
        ctx.group, ctx.by_rows = group, by_rows
        if not by_rows:
            return hidden.view_as(hidden)
        whole = hidden.new_empty(hidden.shape[0] * group.size(), hidden.shape[1])
        all_gather_single(whole, hidden.contiguous(), group)
        return whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.by_rows:
            part = grad.new_empty(grad.shape[0] // ctx.group.size(), grad.shape[1])
            reduce_scatter_single(part, grad.contiguous(), ctx.group)
            return part, None, None
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None, None


def _on_every_shard(hidden: Tensor, plan: ReplayPlan, by_rows: bool) -> Tensor:
    """The whole hidden states, as every TP rank of the plan reads them."""
    group = plan.parallel.tp_group
    if group is None:
        return hidden
    whole: Tensor = _EnterVocabShards.apply(hidden, group, by_rows)  # type: ignore[no-untyped-call]
    return whole


# Supports alone


def _sparse_scores(
    hidden: Tensor, layer: _OutputLayer, plan: ReplayPlan, request: Request
) -> tuple[Tensor, ...]:
    logits: Tensor = _SupportLogits.apply(  # type: ignore[no-untyped-call]
        hidden, layer.weight, layer.bias, layer.main_grad, plan, _linear_kernels(request.kernels)
    )
    if plan.has_unrestricted:
        # their scores are written over: nothing of a sampled logit of -inf may reach a gradient
        logits = logits.index_fill(0, plan.unrestricted_ids, 0)
    return request.apply(logits[None], plan.on_supports)


class _SupportLogits(torch.autograd.Function):
    """`[N]`, differentiable in `hidden`, `weight` and `bias`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        main_grad: Tensor | None,
        plan: ReplayPlan,
        kernels: LinearKernels,
    ) -> Tensor:
        ctx.plan, ctx.kernels, ctx.main_grad = plan, kernels, main_grad
        ctx.owner = weight if main_grad is not None else None
        ctx.save_for_backward(hidden, weight, bias)
        return kernels.support_logits(hidden, weight, bias, plan)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        plan, kernels, grad = ctx.plan, ctx.kernels, grad.contiguous()
        of_hidden = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_hidden = kernels.hidden_gradient(grad, hidden, weight, plan)
        if ctx.needs_input_grad[1]:
            if ctx.main_grad is None:
                of_weight = torch.zeros_like(weight, memory_format=torch.contiguous_format)
                kernels.weight_gradient(grad, hidden, plan, of_weight, False)
            else:
                kernels.weight_gradient(grad, hidden, plan, ctx.main_grad, True)
                of_weight = _told_megatron(ctx.owner)
        if ctx.needs_input_grad[2]:
            of_bias = torch_linear.bias_gradient(grad, bias, plan)
        return of_hidden, of_weight, of_bias, None, None, None


def _linear_kernels(kernels: ScoreKernels) -> LinearKernels:
    """The same backend's functions for hidden states."""
    if kernels is torch_scores:
        return torch_linear
    module: LinearKernels = importlib.import_module("rlreplay.kernels.triton_linear")
    return module


# Whole logits, chunk by chunk


def _chunked_scores(
    hidden: Tensor,
    layer: _OutputLayer,
    plan: ReplayPlan,
    request: Request,
    rows: IntArray,
    chunk: int,
    keep: bool,
) -> tuple[Tensor, ...]:
    """The wanted scores of some response rows."""
    parts = [_Part.of(plan, request, some) for some in _split(rows, chunk)]
    values: tuple[Tensor, ...] = _ChunkedScores.apply(  # type: ignore[no-untyped-call]
        hidden, layer.weight, layer.bias, layer.main_grad, request, parts, keep
    )
    return values


def _split(rows: IntArray, size: int) -> Iterator[IntArray]:
    """Parts of `size` rows but for the first: the last one's logits are kept for the backward.

    One part of no rows where there are none: the collectives are entered all the same.
    """
    first = rows.size % size or min(size, rows.size)
    yield rows[:first]
    for start in range(first, rows.size, size):
        yield rows[start : start + size]


class _Part(NamedTuple):
    """Some rows whose whole logits are in memory at a time."""

    plan: ReplayPlan
    request: Request
    rows: Tensor
    """int64: their rows of `hidden`"""

    @classmethod
    def of(cls, plan: ReplayPlan, request: Request, rows: IntArray) -> _Part:
        index = to_device(rows, plan.device)
        divisor = request.temperature
        if isinstance(divisor, Tensor):
            divisor = divisor[index]
        # the torch backend writes gradients to memory of their own
        own = request._replace(
            temperature=divisor, inplace_backward=request.kernels is not torch_scores
        )
        return cls(plan.of_rows(rows), own, plan.rows[index])

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(hidden[self.rows], weight, bias)

    def write_gradients(
        self,
        hidden: Tensor,
        weight: Tensor,
        logits: Tensor,
        normalisers: tuple[Normaliser, Normaliser | None],
        upstream: list[Tensor | None],
        totals: tuple[Tensor | None, Tensor | None, Tensor | None],
        accumulate: bool,
    ) -> None:
        """Write this part's rows of hidden's gradient, and add to those of weight and bias.

        Args:
            logits: may be overwritten.
            totals: the gradients of hidden, weight and bias that are wanted.
            accumulate: add to the weight's, instead of writing over it.
        """
        of_hidden, of_weight, of_bias = totals
        gradient = gradient_of(logits, self.plan, self.request, *normalisers, upstream)
        valid = slice(0, self.plan.shard.valid)  # what stands in the padding may be NaN
        if of_hidden is not None:
            of_hidden[self.rows] = gradient[:, valid] @ weight[valid]
        if of_weight is not None:
            _add_product(of_weight[valid], gradient[:, valid], hidden[self.rows], accumulate)
        if of_bias is not None:
            of_bias += gradient.sum(dim=0, dtype=of_bias.dtype)


class _ChunkedScores(torch.autograd.Function):
    """Scores through whole logits of a part of the rows at a time.

    The last part's can be kept for the backward; the others' are made again there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        main_grad: Tensor | None,
        request: Request,
        parts: list[_Part],
        keep: bool,
    ) -> tuple[Tensor, ...]:
        outputs, saved = [], []
        with torch.autocast(hidden.device.type, enabled=False):
            for part in parts:
                logits = None  # one part's are gone before the next one's are made
                logits = part.logits(hidden, weight, bias)
                support, full, target = normalisers_of(logits, part.plan, part.request)
                outputs.append([score_of(name, support, full, target) for name in request.wanted])
                saved.append((*support, *(full or (None,) * 4)))
        values = tuple(torch.cat(parts_of_one) for parts_of_one in zip(*outputs, strict=True))
        ctx.request, ctx.parts, ctx.main_grad = request, parts, main_grad
        ctx.owner = weight if main_grad is not None else None
        # not as a saved tensor: the first backward overwrites it, a second one makes it again
        ctx.kept = logits if keep else None
        ctx.save_for_backward(hidden, weight, bias, *(t for tensors in saved for t in tensors))
        ctx.set_materialize_grads(False)
        named = zip(request.wanted, values, strict=True)
        ctx.mark_non_differentiable(*(v for k, v in named if k not in request.trained))
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *saved = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None
        needs = ctx.needs_input_grad
        in_place = needs[1] and ctx.main_grad is not None
        if all(grad is None for grad in grads):
            return None, _told_megatron(ctx.owner) if in_place else None, *(None,) * 5
        of_hidden = of_weight = of_bias = None
        if needs[0]:
            of_hidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
        if in_place:
            of_weight = ctx.main_grad
        elif needs[1]:
            # several parts are added in float32: each would else be rounded once more
            dtype = _wide(weight.dtype) if len(ctx.parts) > 1 else weight.dtype
            of_weight = torch.empty(weight.shape, dtype=dtype, device=weight.device)
            of_weight[ctx.parts[0].plan.shard.valid :] = 0
        if needs[2] and bias is not None:
            of_bias = torch.zeros_like(bias, dtype=_wide(bias.dtype))
        bounds = np.cumsum([0, *(part.plan.num_rows for part in ctx.parts)])
        normalisers, totals = list(_normalisers(saved)), (of_hidden, of_weight, of_bias)
        last = len(ctx.parts) - 1
        for k in range(last, -1, -1):  # the last one first: its logits are there
            part = ctx.parts[k]
            upstream = [None if g is None else g[bounds[k] : bounds[k + 1]] for g in grads]
            with torch.autocast(hidden.device.type, enabled=False):
                logits = part.logits(hidden, weight, bias) if kept is None else kept
                kept = None
                part.write_gradients(
                    hidden, weight, logits, normalisers[k], upstream, totals, in_place or k < last
                )
            del logits
        if in_place:
            of_weight = _told_megatron(ctx.owner)
        elif of_weight is not None:
            of_weight = of_weight.to(weight.dtype)
        if bias is not None and of_bias is not None:
            of_bias = of_bias.to(bias.dtype)
        return of_hidden, of_weight, of_bias, *(None,) * 4


_TILE_BYTES = 1 << 26


def _add_product(total: Tensor, gradient: Tensor, rows: Tensor, accumulate: bool) -> None:
    """total += gradient.T @ rows, rounded to the total's type; or = where nothing is added to.

    Where torch has no such product (on CPUs, before 2.8, into float64), each tile of the vocabulary
    is rounded to the rows' type first.
    """
    beta = 1 if accumulate else 0
    is_half = rows.dtype in (torch.bfloat16, torch.float16)
    mixed = is_half and rows.is_cuda and hasattr(torch.ops.aten.addmm, "dtype_out")
    if rows.shape[0] == 0:
        if not accumulate:
            total.zero_()
    elif total.dtype == rows.dtype:
        total.addmm_(gradient.T, rows, beta=beta)
    elif mixed and total.dtype == torch.float32:
        torch.addmm(total, gradient.T, rows, beta=beta, out_dtype=torch.float32, out=total)
    else:
        tile = max(1, _TILE_BYTES // (rows.element_size() * max(1, rows.shape[1])))
        for start in range(0, total.shape[0], tile):
            columns = slice(start, start + tile)
            product = gradient[:, columns].T @ rows
            total[columns] = total[columns] + product if accumulate else product


def _normalisers(saved: Sequence[Any]) -> Iterator[tuple[Normaliser, Normaliser | None]]:
    """Of each part, over its supports and over the vocabulary, as they were saved."""
    for start in range(0, len(saved), 8):
        support, full = saved[start : start + 4], saved[start + 4 : start + 8]
        yield Normaliser(*support), None if full[0] is None else Normaliser(*full)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _told_megatron(weight: Tensor) -> Tensor | None:
    """What autograd gets for a weight whose gradient is in `main_grad` already.

    Megatron's hook runs on a gradient only, and leaves one alone whose flag is set; but it adds the
    one of a weight that is the embedding's too.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)


# Checks and choices


def _refuse_compiling() -> None:
    # as a decorator, `torch.compiler.disable` would import the compiler with this module
    if torch.compiler.is_compiling():
        raise BackendError(
            "scores from hidden states in a compiled graph",
            expected="a call outside of it: wrap the caller in torch.compiler.disable",
            got="torch.compile",
            consequence="there are no operators for it that a graph could hold",
        )


def _check_tensors(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, plan: ReplayPlan, by_rows: bool
) -> None:
    for name, tensor, ndim in (("hidden", hidden, 2), ("weight", weight, 2), ("bias", bias, 1)):
        if tensor is None and name == "bias":
            continue
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise _unfit(name, "a strided torch.Tensor", type(tensor).__name__)
        if tensor.ndim != ndim or not tensor.is_floating_point():
            expected = f"a floating-point tensor of {ndim} dimensions"
            raise _unfit(name, expected, f"{tensor.dtype} of shape {tuple(tensor.shape)}")
        if tensor.device != plan.device or tensor.dtype != hidden.dtype:
            expected = f"{hidden.dtype} on the plan's {plan.device}"
            raise _unfit(name, expected, f"{tensor.dtype} on {tensor.device}")
    if weight.shape[1] != hidden.shape[1] or weight.stride(1) != 1 or hidden.stride(1) != 1:
        expected = f"[columns, {hidden.shape[1]}], rows of both without a stride"
        raise _unfit("weight", expected, f"{tuple(weight.shape)}, strides {weight.stride()}")
    if bias is not None and bias.shape[0] != weight.shape[0]:
        raise _unfit("bias", f"{weight.shape[0]} columns", f"{bias.shape[0]}")
    parts = plan.parallel.tp_size if by_rows else 1
    plan.layout.check_rows(hidden.shape[0] * parts)
    plan.check_columns(weight.shape[0])
    check_supports_of(plan, assembled=False)


def _unfit(name: str, expected: str, got: str) -> ReplayError:
    return ReplayError(
        f"{name} does not fit",
        expected=expected,
        got=got,
        consequence="other logits than the model's would be scored",
    )


def _main_grad(weight: Tensor, weight_gradient: str) -> Tensor | None:
    if weight_gradient not in WEIGHT_GRADIENTS:
        raise ReplayError(
            "unknown weight_gradient",
            expected="'dense' or 'main_grad'",
            got=repr(weight_gradient)[:40],
            consequence="the gradient would be looked for in the wrong place",
        )
    if weight_gradient == "dense":
        return None
    main_grad = getattr(weight, "main_grad", None)
    fits = (
        isinstance(main_grad, Tensor)
        and main_grad.shape == weight.shape
        and main_grad.device == weight.device
        and main_grad.is_floating_point()
        and main_grad.is_contiguous()
    )
    if not fits:
        raise ReplayError(
            "weight.main_grad cannot take the gradient",
            expected=f"a contiguous floating-point tensor {tuple(weight.shape)} on {weight.device}",
            got="none"
            if not isinstance(main_grad, Tensor)
            else f"{main_grad.dtype} of shape {tuple(main_grad.shape)} on {main_grad.device}",
            consequence="the weight's gradient would be lost",
        )
    return main_grad


def _is_chunked(plan: ReplayPlan, wanted: tuple[str, ...], path: str) -> bool:
    """Decided from what all TP ranks have alike."""
    if path not in PATHS:
        raise ReplayError(
            "unknown path",
            expected="'auto', 'sparse' or 'chunked'",
            got=repr(path)[:40],
            consequence="an explicit path is never swapped for another",
        )
    full = [name for name in wanted if name in FULL_SCORES]
    if path == "sparse" and full:
        raise ReplayError(
            "full-vocabulary scores on the sparse path",
            expected="path='chunked' or 'auto', or log_probs and support_entropy alone",
            got=f"{full}",
            consequence="whole rows of logits are never made there",
        )
    ids = BREAK_EVEN_IDS
    if plan.device.type == "cpu":
        ids = max(1, round(CPU_BREAK_EVEN * plan.vocab_size))
    many = plan.num_support_ids >= ids * max(1, plan.num_rows)
    return path == "chunked" or (path == "auto" and (bool(full) or many))


def _rows_of_a_chunk(weight: Tensor, max_bytes: int, kernels: ScoreKernels) -> int:
    """Rows whose logits and their gradient fit into `max_bytes`; at least one."""
    row = weight.shape[0] * weight.element_size()
    if kernels is torch_scores:  # elsewhere the gradient is written over the logits
        row *= 2
    return max(1, check_count(max_bytes, "max_bytes") // max(1, row))
