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

import numbers
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from rlreplay.errors import BackendError, ReplayError
from rlreplay.kernels import torch_scores
from rlreplay.kernels.assembled import ChunkSupports, chunk_scores
from rlreplay.kernels.rows import (
    UNDERFLOW,
    GradientCoefficients,
    GradientTerm,
    RowStats,
    accumulator,
)
from rlreplay.plan import ReplayPlan

Backend = Literal["auto", "torch"]

SCORE_NAMES = (
    "log_probs",
    "full_log_probs",
    "entropy",
    "support_entropy",
    "log_support_mass",
)
_ASSEMBLED_CHUNK_BYTES = 1 << 25  # bounds the temporaries of rows that are assembled
_FULL = frozenset({"full_log_probs", "entropy", "log_support_mass"})


@dataclass(frozen=True, eq=False)
class Scores:
    """One tensor `[R]` for each score that was asked for, None for the others.

    float32, or float64 where the logits are float64. Row order is that of the plan; the layout's
    `split` cuts it into samples.
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
        plan: the micro-batch, as `ReplayPlan.build` laid it out for this rank.
        scores: names of the scores wanted (see `Scores`).
        differentiable: those of `scores` that take part in the gradient; None or True for all,
            False for none. The others are metrics.
        temperature: divides the logits. One number, or float `[R]` with one for each row; gets no
            gradient. Values on a device are not checked, which would be a sync.
        backend: `"torch"` (any device), or `"auto"` for the fastest that fits the device.
        inplace_backward: not available on the torch backend.

    Collectives: over the TP group one MAX and one SUM all-reduce of a few floats a row in the
    forward, whatever the data; none if its size is 1; none in the backward. The loss is taken to
    be replicated over TP, so the gradient of a shard is exact as it is.

    Raises:
        BackendError: the backend cannot do what was asked.
        ReplayError: logits that do not fit the plan, unknown scores, a temperature not above 0.
    """
    plan.check_logits(logits)
    _check_supports_of(plan, assembled=False)
    wanted, trained = _resolve(scores, differentiable)
    _check_backend(backend, inplace_backward)
    request = _Request(
        wanted,
        trained,
        _row_temperature(temperature, plan, logits.dtype),
    )
    values: tuple[Tensor, ...] = _ScoreLogits.apply(  # type: ignore[no-untyped-call]
        logits, plan, request
    )
    return Scores(**dict(zip(wanted, values, strict=True)))


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
    `torch.log_softmax((row.to(model_dtype) / temperature).masked_fill(~support, -inf), -1)` at the
    sampled token; and so is its gradient, for a loss that is replicated over TP. Slower than
    `score_logits` and held to the rounding of `model_dtype`: use it where the engine does the same.

    Args:
        logits: float `[T, V]`, this rank's rows and vocab shard, before temperature.
        plan: the micro-batch, built with `assembled=True` (on one TP rank any plan will do).
        scores, differentiable: as in `score_logits`.
        temperature: divides the rows, in `model_dtype`.
        model_dtype: what the rows are cast to first; by default the logits' dtype.

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
    _check_supports_of(plan, assembled=True)
    wanted, trained = _resolve(scores, differentiable)
    checked = _row_temperature(temperature, plan, logits.dtype)
    if not isinstance(checked, float):
        raise ReplayError(
            "temperature is a tensor",
            expected="one number, as the engine divides by",
            got=f"shape {tuple(checked.shape)}",
            consequence="the scores would not have the engine's bits",
        )
    request = _Request(wanted, trained, checked)
    values: tuple[Tensor, ...] = _ScoreAssembled.apply(  # type: ignore[no-untyped-call]
        logits, plan, request, model_dtype or logits.dtype
    )
    return Scores(**dict(zip(wanted, values, strict=True)))


class _ScoreAssembled(torch.autograd.Function):
    """Recomputes each chunk of rows under autograd in the backward."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, plan: ReplayPlan, request: _Request, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
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
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:
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
            with torch.enable_grad():
                leaf = rows.detach().requires_grad_()
                values = chunk_scores(leaf, supports, float(request.temperature), tuple(given))
            upstream = [grad[first:last] for grad in given.values()]
            (whole,) = torch.autograd.grad(values, leaf, upstream)
            mine = whole[:, start : start + width].to(gradient.dtype)
            gradient[:, :width].index_copy_(0, plan.rows[first:last], mine)
        return gradient, None, None, None


def _assembled_chunks(
    logits: Tensor, plan: ReplayPlan, dtype: torch.dtype
) -> Iterator[tuple[int, int, Tensor, ChunkSupports]]:
    """Chunks (first, last, rows, supports) of assembled rows, padding cut, after one all-gather.

    There is always one chunk, of no rows where there are none.
    """
    shards = _gathered_rows(logits, plan, dtype)
    step = max(1, _ASSEMBLED_CHUNK_BYTES // max(1, plan.vocab_size * dtype.itemsize))
    row_of_id = plan.row_of_id()
    for first in range(0, max(1, plan.num_rows), step):
        last = min(first + step, plan.num_rows)
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
    group, size = plan.parallel.tp_group, plan.parallel.tp_size
    if group is None:
        return rows[None]
    # at least one row: not every backend takes an empty message
    sent = rows if plan.num_rows else rows.new_zeros(1, rows.shape[1])
    received = sent.new_empty(size, *sent.shape)
    dist.all_gather(list(received.unbind()), sent, group=group)
    return received[:, : plan.num_rows]


class _Request(NamedTuple):
    """What one call asks for."""

    wanted: tuple[str, ...]
    trained: frozenset[str]
    temperature: float | Tensor

    def weighted(self) -> tuple[bool, bool]:
        """Whether the support's and the vocabulary's statistics need their weighted sum."""
        return "support_entropy" in self.wanted, "entropy" in self.wanted


class _Normaliser(NamedTuple):
    """A softmax over a set of columns of each row, all shards together."""

    maximum: Tensor
    log_total: Tensor
    """log of sum exp(x - maximum): lse = maximum + log_total."""
    entropy: Tensor | None


class _ScoreLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, plan: ReplayPlan, request: _Request
    ) -> tuple[Tensor, ...]:
        support, full, target = _normalisers(logits, plan, request)
        makers: dict[str, Callable[[], Tensor | None]] = {
            "log_probs": lambda: _log_prob(target, support),
            "full_log_probs": lambda: _log_prob(target, full),
            "entropy": lambda: full.entropy,
            "support_entropy": lambda: support.entropy,
            "log_support_mass": lambda: (
                support.maximum - full.maximum + (support.log_total - full.log_total)
            ),
        }
        outputs = {name: makers[name]() for name in request.wanted}
        ctx.plan, ctx.request = plan, request
        ctx.save_for_backward(logits, *support, *full)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(v for k, v in outputs.items() if k not in request.trained))
        return tuple(v for v in outputs.values() if v is not None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None]:
        logits, *saved = ctx.saved_tensors
        plan, request = ctx.plan, ctx.request
        by_name = dict(zip(request.wanted, grads, strict=True))
        by_name = {k: g for k, g in by_name.items() if g is not None and k in request.trained}
        coefficients = _coefficients(
            _Normaliser(*saved[:3]), _Normaliser(*saved[3:]), by_name, plan, request.temperature
        )
        dense_rows = plan.host_unrestricted | (not _FULL.isdisjoint(by_name))
        gradient = torch_scores.logits_gradient(
            logits, plan, request.temperature, coefficients, dense_rows
        )
        return gradient, None, None


def _normalisers(
    logits: Tensor, plan: ReplayPlan, request: _Request
) -> tuple[_Normaliser, _Normaliser, Tensor]:
    """Normalisers over the supports and the vocabulary, and the sampled tokens' x, over all shards.

    Where no full-vocabulary score is asked for, the second holds only the unrestricted rows.
    """
    on_support, on_vocab = request.weighted()
    support, target = torch_scores.support_stats(logits, plan, request.temperature, on_support)
    free = plan.has_unrestricted
    rows = None if _FULL & set(request.wanted) else plan.host_unrestricted
    full = torch_scores.full_stats(
        logits, plan, request.temperature, on_vocab or (on_support and free), rows
    )
    (support, full), target = _over_shards((support, full), target, plan.parallel.tp_group)
    if free:  # after the sums, whose order may differ: such a row's support mass is exactly 1
        support = _where(plan.unrestricted, full, support)
    return _normaliser(support), _normaliser(full), target


def _where(condition: Tensor, a: RowStats, b: RowStats) -> RowStats:
    moment = None
    if a.weighted is not None and b.weighted is not None:
        moment = torch.where(condition, a.weighted, b.weighted)
    return RowStats(
        torch.where(condition, a.maximum, b.maximum),
        torch.where(condition, a.total, b.total),
        moment,
    )


def _over_shards(
    stats: tuple[RowStats, RowStats], target: Tensor, group: dist.ProcessGroup | None
) -> tuple[list[RowStats], Tensor]:
    """Statistics of whole rows from those of the shards: one MAX and one SUM all-reduce.

    A NaN maximum travels as +inf, because a MAX over NaN is up to the collective's library; the
    NaN itself arrives with the sum.
    """
    if group is None:
        return list(stats), target
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


def _normaliser(stats: RowStats) -> _Normaliser:
    log_total = stats.total.log()
    moment = stats.weighted
    return _Normaliser(
        stats.maximum,
        log_total,
        None if moment is None else log_total - moment / stats.total,
    )


def _log_prob(target: Tensor, normaliser: _Normaliser) -> Tensor:
    # in this order a lone id's log-prob is exactly 0
    return (target - normaliser.maximum) - normaliser.log_total


def _coefficients(
    support: _Normaliser,
    full: _Normaliser,
    grads: dict[str, Tensor],
    plan: ReplayPlan,
    temperature: float | Tensor,
) -> GradientCoefficients:
    """The chain rule: gradients of the scores to coefficients of the logits' gradient.

    With d = x_j - maximum, p_j = exp(d - log_total) and log p_j = d - log_total, so
    p_j (a + b (log p_j + H)) = exp(d) (A + B d), A = (a + b (H - log_total)) exp(-log_total),
    B = b exp(-log_total).
    """
    zero = torch.zeros_like(support.maximum)
    on_support = grads.get("log_probs", zero)
    on_vocab = grads.get("full_log_probs", zero)
    mass = grads.get("log_support_mass", zero)
    entropy, support_entropy = grads.get("entropy"), grads.get("support_entropy")
    dense = None
    if not _FULL.isdisjoint(grads) or plan.has_unrestricted:
        # In an unrestricted row the support is the vocabulary: its terms are dense, its mass is 1.
        free = plan.unrestricted
        part = None
        if support_entropy is not None and plan.has_unrestricted:
            part = torch.where(free, support_entropy, zero)
        dense_constant = -on_vocab - torch.where(free, on_support, mass)
        dense = _term(full, dense_constant, _sum(entropy, part), temperature)
    sparse = _term(support, mass - on_support, support_entropy, temperature)
    if plan.has_unrestricted:
        sparse = sparse.zero_where(plan.unrestricted)
    return GradientCoefficients(dense, sparse, (on_support + on_vocab) * (1 / temperature))


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _term(
    normaliser: _Normaliser,
    constant: Tensor,
    entropy: Tensor | None,
    temperature: float | Tensor,
) -> GradientTerm:
    """exp(d) (A + B d) of a = `constant` and b = -`entropy`, with the 1 / temperature of x."""
    # the factor of the target's amount, so that the two cancel exactly on a support of one id
    scale = torch.exp(-normaliser.log_total) * (1 / temperature)
    if entropy is None:
        return GradientTerm(normaliser.maximum, constant * scale, None)
    assert normaliser.entropy is not None
    constant = constant - entropy * (normaliser.entropy - normaliser.log_total)
    return GradientTerm(normaliser.maximum, constant * scale, -entropy * scale)


# Checks


def _resolve(
    scores: Collection[str], differentiable: Collection[str] | bool | None
) -> tuple[tuple[str, ...], frozenset[str]]:
    wanted = _known_scores(scores, "scores")
    if differentiable is None or isinstance(differentiable, bool):
        return wanted, frozenset() if differentiable is False else frozenset(wanted)
    trained = _known_scores(differentiable, "differentiable")
    if not set(trained) <= set(wanted):
        raise ReplayError(
            "a score is differentiable but not asked for",
            expected=f"some of {list(wanted)}",
            got=f"{sorted(set(trained) - set(wanted))}",
            consequence="its gradient would be missing without a word",
        )
    return wanted, frozenset(trained)


def _known_scores(names: Collection[str], argument: str) -> tuple[str, ...]:
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


def _check_supports_of(plan: ReplayPlan, *, assembled: bool) -> None:
    if plan.parallel.tp_size > 1 and plan.assembled != assembled:
        raise ReplayError(
            "the plan was built for another way of scoring",
            expected=f"ReplayPlan.build(..., assembled={assembled})",
            got=f"assembled={plan.assembled}",
            consequence="support ids would name other columns",
        )


def _check_backend(backend: str, inplace_backward: bool) -> None:
    if backend not in ("auto", "torch"):
        raise BackendError(
            "no such backend",
            expected="'auto' or 'torch'",
            got=repr(backend),
            consequence="an explicit backend is never swapped for another",
        )
    if inplace_backward:
        raise BackendError(
            "in-place backward on the torch backend",
            expected="inplace_backward=False",
            got="True",
            consequence="the gradient would need memory of its own all the same",
        )


def _row_temperature(
    temperature: float | Tensor, plan: ReplayPlan, dtype: torch.dtype
) -> float | Tensor:
    """A checked temperature: a float, or `[R]` in the accumulation type on the plan's device."""
    if not isinstance(temperature, Tensor):
        return check_temperature(temperature)
    if temperature.requires_grad or temperature.shape != (plan.num_rows,):
        raise ReplayError(
            "temperature does not fit the rows",
            expected=f"a number, or a tensor of shape ({plan.num_rows},) without gradient",
            got=f"shape {tuple(temperature.shape)}, requires_grad={temperature.requires_grad}",
            consequence="rows would be scored at another row's temperature",
        )
    if temperature.device.type == "cpu":
        for value in temperature[~((temperature > 0) & temperature.isfinite())][:1].tolist():
            check_temperature(value)
    return temperature.to(plan.device, accumulator(dtype))


def check_temperature(temperature: Any) -> float:
    """`temperature` as a float; refused where it is not a finite number above 0."""
    number = isinstance(temperature, numbers.Real) and not isinstance(temperature, bool)
    if not number or not 0 < float(temperature) < float("inf"):
        raise ReplayError(
            "temperature not above 0",
            expected="a finite number above 0 (a greedy row is a support of one id)",
            got=f"{temperature!r}",
            consequence="the logits would be divided by it",
        )
    return float(temperature)
