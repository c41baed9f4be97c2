"""The differentiable scores: what is asked for, which backend, which collectives, which gradient.

With x = logits / temperature, S the support of a row, y its sampled token, q the softmax over S
and p the softmax over the vocabulary:

    log_probs         x_y - lse_S             d/dx_j = [j=y] - q_j [j in S]
    full_log_probs    x_y - lse                        [j=y] - p_j
    entropy           lse - sum p_j x_j                -p_j (log p_j + H)
    support_entropy   lse_S - sum_S q_j x_j            -q_j (log q_j + H_S)
    log_support_mass  lse_S - lse                      q_j [j in S] - p_j

Shapes: `T` logits rows and `V` columns on this rank, `R` response rows on this rank.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import numbers
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from rlreplay.errors import BackendError, ReplayError
from rlreplay.kernels import torch_scores
from rlreplay.kernels.assembled import ChunkSupports, chunk_scores
from rlreplay.kernels.rows import (
    UNDERFLOW,
    RowStats,
    ScoreKernels,
    Temperature,
    accumulator,
)
from rlreplay.kernels.softmax import (
    FULL_SCORES,
    SCORE_NAMES,
    Normaliser,
    gradient_coefficients,
    score_of,
    where_rows,
)
from rlreplay.parallel import all_gather_single
from rlreplay.plan import ReplayPlan

Backend = Literal["auto", "torch", "triton"]
BACKENDS = get_args(Backend)

# Bounds within which a temperature and its inverse are normal numbers in float32.
_LOWEST_TEMPERATURE, _HIGHEST_TEMPERATURE = 1e-37, 1e37
_ASSEMBLED_CHUNK_BYTES = 1 << 25  # bounds the temporaries of rows that are assembled


@dataclass(frozen=True, eq=False)
class Scores:
    """One tensor `[R]` for each score that was asked for, None for the others.

    float32, or float64 where the logits are float64; from `score_assembled`, as it says. Rows are
    in the order of the plan; the layout's `split` cuts them into samples.
    """

    log_probs: Float[Tensor, " R"] | None = None
    """log-prob of the sampled token on its support"""
    full_log_probs: Float[Tensor, " R"] | None = None
    """log-prob of the sampled token on the whole vocabulary"""
    entropy: Float[Tensor, " R"] | None = None
    """entropy over the whole vocabulary, nats"""
    support_entropy: Float[Tensor, " R"] | None = None
    """entropy over the support, nats"""
    log_support_mass: Float[Tensor, " R"] | None = None
    """log of the support's mass under the whole vocabulary's softmax"""

    def asked(self) -> dict[str, Tensor]:
        """The scores that are not None, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def score_logits(
    logits: Float[Tensor, "T V"],
    plan: ReplayPlan,
    *,
    scores: Collection[str] = ("log_probs",),
    differentiable: Collection[str] | bool | None = None,
    temperature: float | Float[Tensor, " R"] = 1.0,
    backend: Backend = "auto",
    inplace_backward: bool = False,
) -> Scores:
    """Scores of the planned rows, with their gradients, on this rank's vocab shard.

    Equivalent to `kernels.reference.dense_scores` on the assembled rows, without dense masks,
    copies or a loop over rows. Accumulates in float32 (float64 for float64); the gradient has the
    logits' type and is rounded once. Rows that score nothing and columns past the vocabulary get
    zeros. Neither the logits nor anything saved is written to, so a second backward works. A row
    with a NaN, a +inf, or nothing but -inf among the entries that a score reads has that score NaN;
    no other row changes.

    Where no full-vocabulary score (`full_log_probs`, `entropy`, `log_support_mass`) is asked for,
    only the supports' logits are read, and whole rows only where they are unrestricted. Where none
    is differentiable, the backward is a zero fill and a write on the supports.

    Args:
        logits: float `[T, V]`, this rank's rows and vocab shard, before temperature.
        plan: the micro-batch, as `ReplayPlan.build` laid it out for this rank. A compiled graph
            names it by its handle: keep it until the backward, or the last replay, is done.
        scores: names of the scores wanted (see `Scores`).
        differentiable: those of `scores` that take part in the gradient; None or True for all,
            False for none. The others are metrics.
        temperature: divides the logits. One number, or float `[R]` with one for each row; gets no
            gradient. Values on a device are not checked, which would be a sync. In a compiled graph
            a number is part of the graph: one that changes belongs into a tensor.
        backend: `"torch"` (any device and type), `"triton"` (CUDA), or `"auto"`, which is triton
            for CUDA tensors where it is installed and torch elsewhere.
        inplace_backward: on the triton backend, write the gradient over the logits, which saves
            its memory. Nobody may read the logits after that: autograd raises where it is asked
            to, a second backward included. Refused for a leaf and for rows that overlap.

    Collectives: over the TP group one MAX and one SUM all-reduce of a few floats a row in the
    forward, whatever the data; none if its size is 1; none in the backward. The loss is taken to
    be replicated over TP, so the gradient of a shard is exact as it is.

    Raises:
        BackendError: the backend cannot do what was asked.
        ReplayError: logits that do not fit the plan, unknown scores, a temperature not above 0.
    """
    wanted, trained = resolve_scores(scores, differentiable)
    if torch.compiler.is_compiling():
        values = tuple(
            _score_in_graph(logits, plan, wanted, trained, temperature, backend, inplace_backward)
        )
    else:
        request = _checked_request(
            logits, plan, wanted, trained, temperature, backend, inplace_backward
        )
        values = request.apply(logits, plan)
    return Scores(**dict(zip(wanted, values, strict=True)))


def _checked_request(
    logits: Tensor,
    plan: ReplayPlan,
    wanted: tuple[str, ...],
    trained: frozenset[str],
    temperature: Temperature,
    backend: str,
    inplace_backward: bool,
) -> Request:
    """What `score_logits` was asked for, after every check that can raise."""
    plan.check_logits(logits)
    check_supports_of(plan, assembled=False)
    kernels = kernels_of(backend, logits)
    if inplace_backward:
        _check_inplace(logits, kernels)
    divisor = row_temperature(temperature, plan, logits.dtype)
    return Request(wanted, trained, divisor, kernels, inplace_backward)


def score_assembled(
    logits: Float[Tensor, "T V"],
    plan: ReplayPlan,
    *,
    scores: Collection[str] = ("log_probs",),
    differentiable: Collection[str] | bool | None = None,
    temperature: float = 1.0,
    model_dtype: torch.dtype | None = None,
) -> Scores:
    """Scores with the bits of an engine that runs `log_softmax` over the full row (true on-policy).

    Equivalent, bit for bit, to assembling the row from the vocab shards, cutting the padding,
    `x = row.to(model_dtype).div(torch.tensor([temperature])).to(model_dtype)` and
    `torch.log_softmax(x.masked_fill(~support, -inf), -1)` at the sampled token; and so is its
    gradient, for a loss that is replicated over TP, gathered in `model_dtype`. Slower than
    `score_logits` and held to the rounding of `model_dtype`: use it where the engine does the same.

    Args:
        logits: float `[T, V]`, this rank's rows and vocab shard, before temperature.
        plan: the micro-batch, built with `assembled=True` (on one TP rank any plan will do).
        scores, differentiable: as in `score_logits`.
        temperature: divides the rows, in `model_dtype`.
        model_dtype: a floating-point type that the rows are cast to first; by default the logits'.

    Returns:
        `log_probs` and `full_log_probs` in `model_dtype`; the entropies and `log_support_mass`,
        which no engine returns, in float32 computed from the divided rows.

    Collectives: one all-gather over the TP group in the forward, of R rows in `model_dtype`,
    which serves all scores; the same once in the backward, where the rows are assembled again
    rather than kept. None if the group's size is 1.

    Raises:
        ReplayError: as `score_logits`; a plan whose supports are laid over one shard.
    """
    plan.check_logits(logits)
    check_supports_of(plan, assembled=True)
    wanted, trained = resolve_scores(scores, differentiable)
    checked = row_temperature(temperature, plan, logits.dtype)
    if not isinstance(checked, float):
        raise ReplayError(
            "temperature is a tensor",
            expected="one number, as the engine divides by",
            got=f"shape {tuple(checked.shape)}",
            consequence="the scores would not have the engine's bits",
        )
    dtype = logits.dtype if model_dtype is None else model_dtype
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ReplayError(
            "model_dtype is no floating-point type",
            expected="torch.bfloat16, torch.float16, torch.float32 or torch.float64",
            got=f"{dtype}",
            consequence="the rows would be cut to integers",
        )
    request = Request(wanted, trained, checked, torch_scores, False)
    # An input that needs a gradient on every rank: one whose logits need none would else stay out
    # of the backward's collective, for which its peers wait.
    split = plan.parallel.tp_size > 1
    anchor = torch.zeros((), device=logits.device, requires_grad=True) if split else None
    values: tuple[Tensor, ...] = _ScoreAssembled.apply(  # type: ignore[no-untyped-call]
        logits, plan, request, dtype, anchor
    )
    return Scores(**dict(zip(wanted, values, strict=True)))


class _ScoreAssembled(torch.autograd.Function):
    """Recomputes each chunk of rows under autograd in the backward.

    Autocast is off in both: it would run `log_softmax` in another type than the engine.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        plan: ReplayPlan,
        request: Request,
        dtype: torch.dtype,
        anchor: Tensor | None,
    ) -> tuple[Tensor, ...]:
        with torch.autocast(logits.device.type, enabled=False):
            parts = [
                chunk_scores(rows, supports, float(request.temperature), request.wanted)
                for _, _, rows, supports in _assembled_chunks(logits, plan, dtype)
            ]
        outputs = tuple(torch.cat(values) for values in zip(*parts, strict=True))
        ctx.plan, ctx.request, ctx.dtype = plan, request, dtype
        ctx.save_for_backward(logits)
        ctx.set_materialize_grads(False)
        named = zip(request.wanted, outputs, strict=True)
        ctx.mark_non_differentiable(*(v for k, v in named if k not in request.trained))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        (logits,) = ctx.saved_tensors
        plan, request = ctx.plan, ctx.request
        given = {
            name: grad
            for name, grad in zip(request.wanted, grads, strict=True)
            if grad is not None and name in request.trained
        }
        gradient = torch.zeros_like(logits, memory_format=torch.contiguous_format)
        start = plan.parallel.tp_rank * logits.shape[1]
        width = max(0, min(logits.shape[1], plan.vocab_size - start))
        for first, last, rows, supports in _assembled_chunks(logits, plan, ctx.dtype):
            if not given:
                break  # nothing to send back; the gather has been entered all the same
            with torch.enable_grad(), torch.autocast(logits.device.type, enabled=False):
                leaf = rows.detach().requires_grad_()
                values = chunk_scores(leaf, supports, float(request.temperature), tuple(given))
            upstream = [grad[first:last] for grad in given.values()]
            (whole,) = torch.autograd.grad(values, leaf, upstream)
            mine = whole[:, start : start + width].to(gradient.dtype)
            gradient[:, :width].index_copy_(0, plan.rows[first:last], mine)
        return gradient, None, None, None, None


def _assembled_chunks(
    logits: Tensor, plan: ReplayPlan, dtype: torch.dtype
) -> Iterator[tuple[int, int, Tensor, ChunkSupports]]:
    """Chunks (first, last, rows, supports) of assembled rows, padding cut, after one all-gather.

    There is always one chunk, of no rows where there are none.
    """
    shards = None if plan.parallel.tp_group is None else _gathered_rows(logits, plan, dtype)
    step = max(1, _ASSEMBLED_CHUNK_BYTES // max(1, plan.vocab_size * dtype.itemsize))
    row_of_id = plan.row_of_id()
    for first in range(0, max(1, plan.num_rows), step):
        last = min(first + step, plan.num_rows)
        if shards is None:
            rows = logits.index_select(0, plan.rows[first:last]).to(dtype)
        else:
            rows = shards[:, first:last].transpose(0, 1).flatten(1)
        a, b = int(plan.host_offsets[first]), int(plan.host_offsets[last])
        supports = ChunkSupports(
            row_of_id[a:b] - first,
            plan.ids[a:b].long(),
            plan.ids[plan.targets[first:last]].long(),
            plan.unrestricted[first:last] if plan.has_unrestricted else None,
        )
        yield first, last, rows[:, : plan.vocab_size], supports


def _gathered_rows(logits: Tensor, plan: ReplayPlan, dtype: torch.dtype) -> Float[Tensor, "tp R V"]:
    """The planned rows of every vocab shard, in `dtype`: cast first, so that less is sent."""
    rows = logits.index_select(0, plan.rows).to(dtype)
    # at least one row: not every backend takes an empty message
    sent = rows if plan.num_rows else rows.new_zeros(1, rows.shape[1])
    received = sent.new_empty(plan.parallel.tp_size * sent.shape[0], sent.shape[1])
    all_gather_single(received, sent, plan.parallel.tp_group)
    return received.view(-1, *sent.shape)[:, : plan.num_rows]


class Request(NamedTuple):
    """What one call asks for."""

    wanted: tuple[str, ...]
    trained: frozenset[str]
    temperature: Temperature
    kernels: ScoreKernels
    inplace_backward: bool

    def apply(self, logits: Tensor, plan: ReplayPlan) -> tuple[Tensor, ...]:
        """The wanted scores of the planned rows, in their order, attached to the logits."""
        values: tuple[Tensor, ...] = _ScoreLogits.apply(  # type: ignore[no-untyped-call]
            logits, plan, self
        )
        return values


class _ScoreLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, plan: ReplayPlan, request: Request) -> tuple[Tensor, ...]:
        support, full, target = normalisers_of(logits, plan, request)
        outputs = [score_of(name, support, full, target) for name in request.wanted]
        ctx.plan, ctx.request = plan, request
        # the temperature too: overwritten before the backward, autograd shall notice
        by_row = request.temperature if isinstance(request.temperature, Tensor) else None
        ctx.save_for_backward(logits, by_row, *support, *(full or ()))
        ctx.set_materialize_grads(False)
        named = zip(request.wanted, outputs, strict=True)
        ctx.mark_non_differentiable(*(v for k, v in named if k not in request.trained))
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None]:
        logits, _, *saved = ctx.saved_tensors
        support = Normaliser(*saved[:4])
        full = Normaliser(*saved[4:]) if len(saved) > 4 else None
        gradient = gradient_of(logits, ctx.plan, ctx.request, support, full, grads)
        if ctx.request.inplace_backward:  # whoever else has saved the logits shall notice
            torch.autograd.graph.increment_version(logits)
        return gradient, None, None


def gradient_of(
    logits: Tensor,
    plan: ReplayPlan,
    request: Request,
    support: Normaliser,
    full: Normaliser | None,
    grads: Sequence[Tensor | None],
) -> Tensor:
    """The logits' gradient from those of the wanted scores; None is no gradient."""
    given = {
        name: grad.contiguous()  # a sum sends one number to all rows, with a stride of 0
        for name, grad in zip(request.wanted, grads, strict=True)
        if grad is not None and name in request.trained
    }
    coefficients = gradient_coefficients(
        support,
        full,
        given,
        plan.unrestricted if plan.has_unrestricted else None,
        request.temperature,
    )
    return request.kernels.logits_gradient(
        logits,
        plan,
        request.temperature,
        coefficients,
        plan.host_unrestricted if FULL_SCORES.isdisjoint(given) else None,
        logits.detach() if request.inplace_backward else None,
    )


# In a compiled graph: the same two steps as operators, which torch.compile takes as they are.
# An operator has no argument for a plan, so it is named by its handle.


def _score_in_graph(
    logits: Tensor,
    plan: ReplayPlan,
    wanted: tuple[str, ...],
    trained: frozenset[str],
    temperature: Temperature,
    backend: str,
    inplace_backward: bool,
) -> list[Tensor]:
    if inplace_backward:
        raise BackendError(
            "in-place backward in a compiled graph",
            expected="inplace_backward=False under torch.compile",
            got="True",
            consequence="the compiler would not know that the logits change",
        )
    rows = isinstance(temperature, Tensor)
    results = torch.ops.rlreplay.score_rows(
        logits,
        plan.rows,
        temperature if rows else None,
        1.0 if rows else temperature,
        ",".join(wanted),
        ",".join(name for name in wanted if name in trained),
        backend,
        plan.has_unrestricted,
        plan.handle,
    )
    return [
        value if name in trained else value.detach()
        for name, value in zip(wanted, results[: len(wanted)], strict=True)
    ]


def _names(joined: str) -> tuple[str, ...]:
    """Names that travel as one string, which an operator takes."""
    return tuple(joined.split(",")) if joined else ()


def _saved_fields(wanted: Sequence[str], free: bool) -> list[bool]:
    """For the support's and the vocabulary's normaliser, where there is one: has it a mean?"""
    on_support = "support_entropy" in wanted
    if FULL_SCORES.isdisjoint(wanted) and not free:
        return [on_support]
    on_vocab = "entropy" in wanted or (on_support and free)
    # the rows of the vocabulary's statistics that stand in for the support's have both or none
    return [on_support, on_vocab]


@torch.library.custom_op("rlreplay::score_rows", mutates_args=())
def _score_rows(
    logits: Tensor,
    rows: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    wanted: str,
    trained: str,
    backend: str,
    free: bool,
    handle: int,
) -> list[Tensor]:
    """The wanted scores, and after them what the backward needs."""
    plan = ReplayPlan.of_handle(handle)
    used = temperature if temperatures is None else temperatures
    names, kept = _names(wanted), frozenset(_names(trained))
    request = _checked_request(logits, plan, names, kept, used, backend, False)
    support, full, target = normalisers_of(logits, plan, request)
    outputs = [score_of(name, support, full, target) for name in names]
    saved = [t for t in (*support, *(full or ())) if t is not None]
    return [t.clone() for t in (*outputs, *saved)]  # an operator's results share no memory


@_score_rows.register_fake
def _(
    logits: Tensor,
    rows: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    wanted: str,
    trained: str,
    backend: str,
    free: bool,
    handle: int,
) -> list[Tensor]:
    names = _names(wanted)
    count = len(names) + sum(3 + mean for mean in _saved_fields(names, free))
    like = logits.new_empty(rows.shape[0], dtype=accumulator(logits.dtype))
    return [torch.empty_like(like) for _ in range(count)]


@torch.library.custom_op("rlreplay::score_rows_gradient", mutates_args=())
def _score_rows_gradient(
    logits: Tensor,
    saved: Sequence[Tensor],
    grads: Sequence[Tensor],
    given: str,
    temperatures: Tensor | None,
    temperature: float,
    wanted: str,
    backend: str,
    free: bool,
    handle: int,
) -> Tensor:
    plan = ReplayPlan.of_handle(handle)
    used = temperature if temperatures is None else temperatures
    names = _names(given)
    request = _checked_request(logits, plan, names, frozenset(names), used, backend, False)
    rest, normalisers = iter(saved), []
    for has_mean in _saved_fields(_names(wanted), free):
        maximum, total, log_total = next(rest), next(rest), next(rest)
        mean = next(rest) if has_mean else None
        normalisers.append(Normaliser(maximum, total, log_total, mean))
    full = normalisers[1] if len(normalisers) > 1 else None
    return gradient_of(logits, plan, request, normalisers[0], full, grads)


@_score_rows_gradient.register_fake
def _(logits: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _save_for_gradient(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    logits, _, temperatures, temperature, wanted, trained, backend, free, handle = inputs
    ctx.set_materialize_grads(False)
    ctx.settings = (temperature, wanted, trained, backend, free, handle)
    ctx.has_rows = temperatures is not None
    extra = [] if temperatures is None else [temperatures]
    ctx.save_for_backward(logits, *output[len(_names(wanted)) :], *extra)


def _gradient_in_graph(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    temperature, wanted, trained, backend, free, handle = ctx.settings
    logits, *saved = ctx.saved_tensors
    temperatures = saved.pop() if ctx.has_rows else None
    given = [
        (name, grad)
        for name, grad in zip(_names(wanted), grads, strict=False)  # the rest is what was saved
        if grad is not None and name in _names(trained)
    ]
    gradient = None
    if given:
        gradient = torch.ops.rlreplay.score_rows_gradient(
            logits,
            saved,
            [grad for _, grad in given],
            ",".join(name for name, _ in given),
            temperatures,
            temperature,
            wanted,
            backend,
            free,
            handle,
        )
    return (gradient, *[None] * 8)


_score_rows.register_autograd(_gradient_in_graph, setup_context=_save_for_gradient)


def normalisers_of(
    logits: Tensor, plan: ReplayPlan, request: Request
) -> tuple[Normaliser, Normaliser | None, Tensor]:
    """Normalisers over the supports and the vocabulary, and the sampled tokens' x, over all shards.

    The second is None where nothing reads whole rows, and holds only the unrestricted rows where
    no full-vocabulary score is asked for.
    """
    kernels, temperature, free = request.kernels, request.temperature, plan.has_unrestricted
    weighted = "support_entropy" in request.wanted
    support, target = kernels.support_stats(logits, plan, temperature, weighted)
    stats = [support]
    every_row = not FULL_SCORES.isdisjoint(request.wanted)
    if every_row or free:
        full_weighted = "entropy" in request.wanted or (weighted and free)
        rows = None if every_row else plan.host_unrestricted
        stats.append(
            kernels.full_stats(logits, plan, temperature, full_weighted, rows, support.maximum)
        )
    stats, target = _over_shards(stats, target, plan.parallel.tp_group)
    if free:  # after the sums, whose order may differ: such a row's support mass is exactly 1
        stats[0] = where_rows(plan.unrestricted, stats[1], stats[0])
    normalisers = [Normaliser.of(each) for each in stats]
    return normalisers[0], normalisers[1] if len(normalisers) > 1 else None, target


def _over_shards(
    stats: list[RowStats], target: Tensor, group: dist.ProcessGroup | None
) -> tuple[list[RowStats], Tensor]:
    """Statistics of whole rows from those of the shards: one MAX and one SUM all-reduce.

    A NaN maximum travels as +inf, because a MAX over NaN is up to the collective's library; the
    NaN itself arrives with the sum.
    """
    if group is None:
        return stats, target
    local = torch.stack([s.maximum for s in stats])
    maxima = torch.where(local.isnan(), torch.inf, local)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    # exp(x - maximum) of the shard to exp(x - maximum of the row); nothing stays nothing
    shifts = (local - torch.where(maxima == -torch.inf, 0.0, maxima)).clamp_min_(UNDERFLOW)
    summands = [target]
    for stat, shift in zip(stats, shifts, strict=True):
        scale = shift.exp()
        summands.append(stat.total * scale)
        if stat.weighted is not None:
            summands.append((stat.weighted + stat.total * shift) * scale)
    sums = torch.stack(summands)
    dist.all_reduce(sums, group=group)
    rest = iter(sums)
    target = next(rest)
    whole = [
        RowStats(maximum, next(rest), None if stat.weighted is None else next(rest))
        for stat, maximum in zip(stats, maxima, strict=True)
    ]
    return whole, target


# Checks


def resolve_scores(
    scores: Collection[str], differentiable: Collection[str] | bool | None
) -> tuple[tuple[str, ...], frozenset[str]]:
    wanted = known_scores(scores, "scores")
    if differentiable is None or isinstance(differentiable, bool):
        return wanted, frozenset() if differentiable is False else frozenset(wanted)
    trained = known_scores(differentiable, "differentiable")
    if not set(trained) <= set(wanted):
        raise ReplayError(
            "a score is differentiable but not asked for",
            expected=f"some of {list(wanted)}",
            got=f"{sorted(set(trained) - set(wanted))}",
            consequence="its gradient would be missing without a word",
        )
    return wanted, frozenset(trained)


def known_scores(names: Any, argument: str) -> tuple[str, ...]:
    """Names of scores, one or several, in the order of `SCORE_NAMES`; unknown ones are refused."""
    if not isinstance(names, Collection):
        names = (repr(names),)
    given = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in given if name not in SCORE_NAMES]
    if unknown or (not given and argument == "scores"):
        raise ReplayError(
            f"unknown score in {argument}" if unknown else "no score asked for",
            expected=f"some of {list(SCORE_NAMES)}",
            got=f"{unknown}",
            consequence="there is nothing to compute",
        )
    return tuple(name for name in SCORE_NAMES if name in given)


def check_supports_of(plan: ReplayPlan, *, assembled: bool) -> None:
    if plan.parallel.tp_size > 1 and plan.assembled != assembled:
        raise ReplayError(
            "the plan was built for another way of scoring",
            expected=f"ReplayPlan.build(..., assembled={assembled})",
            got=f"assembled={plan.assembled}",
            consequence="support ids would name other columns",
        )


def kernels_of(backend: str, logits: Tensor) -> ScoreKernels:
    """The module of a backend: the one asked for, or a refusal."""
    if backend not in BACKENDS:
        raise BackendError(
            "no such backend",
            expected="'auto', 'torch' or 'triton'",
            got=repr(backend),
            consequence="an explicit backend is never swapped for another",
        )
    on_gpu, unit_columns = logits.device.type == "cuda", logits.stride(1) == 1
    if backend == "torch":
        return torch_scores
    if backend == "auto" and not (on_gpu and unit_columns and _has_triton()):
        return torch_scores
    interpreted = logits.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if not (_has_triton() and unit_columns and (on_gpu or interpreted)):
        raise BackendError(
            "the triton backend cannot run here",
            expected="triton installed, and logits on a CUDA device with consecutive columns",
            got=f"logits on {logits.device} with strides {logits.stride()}"
            if _has_triton()
            else "no triton",
            consequence="an explicit backend is never swapped for another",
        )
    # Imported here: it takes long, and the other backends need it not.
    kernels: ScoreKernels = importlib.import_module("rlreplay.kernels.triton_scores")
    return kernels


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _check_inplace(logits: Tensor, kernels: ScoreKernels) -> None:
    if kernels is torch_scores:
        raise BackendError(
            "in-place backward on the torch backend",
            expected="backend='triton', or inplace_backward=False",
            got="inplace_backward=True",
            consequence="the gradient would need memory of its own all the same",
        )
    dense_rows = logits.stride(1) == 1 and logits.stride(0) >= logits.shape[1]
    owner = logits if logits._base is None else logits._base
    of_leaf = owner.is_leaf and owner.requires_grad
    if of_leaf or not dense_rows:
        raise BackendError(
            "in-place backward would destroy logits that are still needed",
            expected="logits that an operation made, in rows that do not overlap",
            got=f"memory of a leaf={of_leaf}, strides {logits.stride()}",
            consequence="the leaf would hold its own gradient, or rows each other's",
        )


def row_temperature(
    temperature: float | Tensor, plan: ReplayPlan, dtype: torch.dtype
) -> float | Tensor:
    """A checked temperature: a float, or `[R]` in the accumulation type on the plan's device."""
    if not isinstance(temperature, Tensor):
        return check_temperature(temperature)
    fits = temperature.shape == (plan.num_rows,) and temperature.device == plan.device
    if temperature.requires_grad or not fits or not temperature.is_floating_point():
        raise ReplayError(
            "temperature does not fit the rows",
            expected=f"a number, or a float tensor of shape ({plan.num_rows},) on {plan.device} "
            "without gradient",
            got=f"{temperature.dtype} of shape {tuple(temperature.shape)} on "
            f"{temperature.device}, requires_grad={temperature.requires_grad}",
            consequence="rows would be scored at another row's temperature",
        )
    if temperature.device.type == "cpu":
        usable = (temperature >= _LOWEST_TEMPERATURE) & (temperature <= _HIGHEST_TEMPERATURE)
        for value in temperature[~usable][:1].tolist():
            check_temperature(value)
    return temperature.to(accumulator(dtype))


def check_temperature(temperature: Any) -> float:
    """`temperature` as a float; refused where neither it nor its inverse is a normal float32."""
    number = isinstance(temperature, numbers.Real) and not isinstance(temperature, bool)
    if not number or not _LOWEST_TEMPERATURE <= temperature <= _HIGHEST_TEMPERATURE:
        raise ReplayError(
            "temperature not above 0",
            expected="a finite number above 0 (a greedy row is a support of one id)",
            got=f"{temperature!r}"[:40],
            consequence="the logits would be divided by it",
        )
    return float(temperature)
