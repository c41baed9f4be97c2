"""Sampler side: what the sampler kept, as supports, and a reference sampler to capture it from.

Shapes: `B` rows (one a sequence, at one decoding step), `V` vocabulary, `W` columns of a compact
form whose ids are named beside it. Everything here works on whole batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from rlreplay.errors import MissingTokenError, ReplayError
from rlreplay.sampling_mask import IntArrayLike, RolloutSamplingMask, integer_array

Cutoff = Literal["threshold", "positional"]
FilterOrder = Literal["joint", "sequential"]

# How far a row of probabilities may sum from 1: fp32 rounding stays far below, logits do not.
_MASS_TOLERANCE = 1e-3
# Below it a sampler means greedy; much below, float32 would divide by 0.
_LEAST_TEMPERATURE = 1e-6

_WRONG_SUPPORT = "the captured support would not be the one the token was drawn from"
_WRONG_DRAW = "tokens would be drawn from another distribution than the one asked for"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled: `softmax(logits / temperature)`, then the filters.

    Args:
        temperature: 0, which takes the most probable id, or a finite number of at least 1e-6.
        top_k: how many ids the cut-off by rank lets through, at least 1; None for no limit.
        top_p: in (0, 1], the probability mass that the kept ids must reach; 1 for no limit.
        min_p: in [0, 1], the least probability kept, as a fraction of the highest.

    Raises:
        ReplayError: a value outside these ranges, or that is no number.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        t, top_p, min_p, top_k = self.temperature, self.top_p, self.min_p, self.top_k
        if not (_is_finite(t) and (t == 0 or t >= _LEAST_TEMPERATURE)):
            raise _bad_param("temperature", t, "0 (greedy), or a finite number >= 1e-6")
        if not (_is_finite(top_p) and 0 < top_p <= 1):
            raise _bad_param("top_p", top_p, "a number in (0, 1]")
        if not (_is_finite(min_p) and 0 <= min_p <= 1):
            raise _bad_param("min_p", min_p, "a number in [0, 1]")
        if not (top_k is None or (_is_int(top_k) and top_k >= 1)):
            raise _bad_param("top_k", top_k, "an integer >= 1, or None for no limit")

    @property
    def greedy(self) -> bool:
        """The most probable id is taken, the lowest of them where several tie."""
        return self.temperature == 0 or self.top_k == 1


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """One decoding step of a batch.

    Attributes:
        token_ids: int64 `[B]`, the drawn tokens.
        log_probs: float32 `[B]`, their log-probs, normalised over the support.
        mask: B rows, the supports that they were drawn from.
    """

    token_ids: Int[Tensor, " B"]
    log_probs: Float[Tensor, " B"]
    mask: RolloutSamplingMask


def support_from_weights(
    weights: Float[Tensor, "B W"],
    token_ids: Int[Tensor, "B W"] | None = None,
    rows: IntArrayLike | None = None,
) -> RolloutSamplingMask:
    """The ids that have a weight above 0.

    Args:
        weights: what the sampler draws from after its filters, normalised or not: finite, >= 0.
        token_ids: the id of each column, where the sampler works on a compact form. By default
            column j is id j. Columns of weight 0 may hold anything.
        rows: int `[b]`, the rows to capture, in this order; the others are not looked at. By
            default all rows.

    Returns:
        A mask of b (or B) rows.

    Raises:
        ReplayError: a weight that is negative, NaN or infinite; a row without any weight; an id
            that is negative or repeated in its row. `row` is the row of the batch.
    """
    chosen, index = _chosen_rows(_float_batch(weights, "weights"), rows)
    bad = ~((chosen >= 0) & (chosen < math.inf))
    _refuse_values(bad, chosen, index, "a sampling weight", "a finite number >= 0")
    return _support(chosen > 0, _chosen_ids(token_ids, weights, rows), index)


def support_from_logits(
    processed_logits: Float[Tensor, "B V"], rows: IntArrayLike | None = None
) -> RolloutSamplingMask:
    """The ids that have a finite logit, in logits that the sampler has set to -inf elsewhere.

    Args:
        processed_logits: after every filter; column j is id j.
        rows: as in `support_from_weights`.

    Raises:
        ReplayError: a logit that is NaN or +inf; a row without a finite logit. `row` is the row
            of the batch.
    """
    chosen, index = _chosen_rows(_float_batch(processed_logits, "processed_logits"), rows)
    _refuse_logits(chosen, index)
    return _support(chosen > -math.inf, None, index)


def filter_probs(
    probs: Float[Tensor, "B V"],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    cutoff: Cutoff = "threshold",
    order: FilterOrder = "joint",
) -> Float[Tensor, "B V"]:
    """The probabilities that survive top-k, top-p and min-p, and zeros elsewhere.

    Ids are ranked by probability, the lower id first where two tie. Top-k lets the first k
    through, top-p those that have less than `top_p` of the mass ranked before them, min-p (always
    last) those of at least `min_p` times the highest probability.

    Args:
        probs: each row sums to 1, after the temperature.
        params: one for all rows, or one a row. The temperature is used only to tell greedy rows.
        cutoff: `"positional"` cuts between ranks. `"threshold"` cuts between values, as FlashInfer
            does: whatever ties with the last id that top-k or top-p let through is kept as well,
            so that a support can be larger than k.
        order: `"joint"` applies top-k and top-p to the same probabilities, `"sequential"` applies
            top-p to what top-k left, renormalised.

    Returns:
        The kept weights, not renormalised, float32 (float64 where `probs` is).

    Raises:
        ReplayError: a row that is no distribution, an unknown `cutoff` or `order`, or a number of
            params that is not the number of rows.
    """
    _check_choice("cutoff", cutoff, ("threshold", "positional"))
    _check_choice("order", order, ("joint", "sequential"))
    probs = _at_least_float32(_float_batch(probs, "probs"))
    _check_distributions(probs)
    limits = _limits(params, probs)
    ranked, ids = probs.sort(dim=-1, descending=True, stable=True)
    count = _kept_count(ranked, limits, cutoff, order)
    survives = torch.arange(probs.shape[1], device=probs.device) < count
    kept = torch.where(survives, ranked, 0)
    return torch.zeros_like(probs).scatter(1, ids, kept)


def selected_log_probs(
    weights: Float[Tensor, "B V"], token_ids: Int[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """`log(w_y / sum(w))` of each row's token y, float32 `[B]`.

    For a token that was replaced after the draw (tensor-parallel sync, grammar): look it up again
    in the weights that were captured.

    Raises:
        MissingTokenError: the token has no weight, so it is outside the support.
    """
    weights = _at_least_float32(_float_batch(weights, "weights"))
    token_ids = _sampled_ids(token_ids, weights)
    selected = weights.gather(1, token_ids[:, None])[:, 0]
    _refuse_outside(selected > 0, token_ids)
    return torch.log(selected / weights.sum(dim=-1)).to(torch.float32)


def sample(
    logits: Float[Tensor, "B V"],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    cutoff: Cutoff = "threshold",
    order: FilterOrder = "joint",
    generator: torch.Generator | None = None,
) -> SampledTokens:
    """Draw one token a row, and capture the support and the log-prob from the same weights.

    Equivalent to drawing from `filter_probs(softmax(logits / temperature), params)`; a greedy row
    is a singleton with log-prob 0. The work is done in float32, in float64 for float64 logits.

    Args:
        logits: finite, or -inf for ids that are banned.
        params: one for all rows, or one a row.
        cutoff, order: as in `filter_probs`.
        generator: of the device of `logits`; the default one of that device if None.

    Raises:
        ReplayError: a logit that is NaN or +inf, a row that bans every id, or params that do not
            fit, as in `filter_probs`.
        MissingTokenError: the drawn token is outside the captured support. It is never repaired.
    """
    logits = _at_least_float32(_float_batch(logits, "logits"))
    _refuse_logits(logits, None)
    _refuse_empty(torch.isneginf(logits).all(dim=-1), None)
    probs = _tempered(logits, _limits(params, logits))
    weights = filter_probs(probs, params, cutoff=cutoff, order=order)
    token_ids = torch.multinomial(weights, 1, generator=generator)[:, 0]
    log_probs = selected_log_probs(weights, token_ids)
    return SampledTokens(token_ids, log_probs, support_from_weights(weights))


# Filters


class _Limits(NamedTuple):
    """The params of a batch as columns `[B, 1]`, on the device and in the type of the logits."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    greedy: Tensor


def _limits(params: SamplingParams | Sequence[SamplingParams], like: Tensor) -> _Limits:
    batch, vocab = like.shape
    each = [params] * batch if isinstance(params, SamplingParams) else list(params)
    if len(each) != batch:
        raise ReplayError(
            "params do not match the batch",
            expected=f"one SamplingParams, or {batch}, one for each row",
            got=f"{len(each)}",
            consequence=_WRONG_DRAW,
        )

    def column(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=like.device).reshape(batch, 1)

    return _Limits(
        column([p.temperature for p in each], like.dtype),
        column(
            [vocab if p.top_k is None else min(p.top_k, vocab) for p in each],
            torch.int64,
        ),
        column([p.top_p for p in each], like.dtype),
        column([p.min_p for p in each], like.dtype),
        column([p.greedy for p in each], torch.bool),
    )


def _tempered(logits: Tensor, limits: _Limits) -> Tensor:
    """Probabilities at each row's temperature; one-hot where the row is greedy."""
    below_max = logits - logits.amax(dim=-1, keepdim=True)  # a tiny temperature cannot overflow
    probs = torch.softmax(below_max / torch.where(limits.greedy, 1, limits.temperature), dim=-1)
    # From the logits, for probabilities may tie where the logits do not.
    best = torch.zeros_like(probs).scatter(1, logits.argmax(dim=-1, keepdim=True), 1)
    return torch.where(limits.greedy, best, probs)


def _kept_count(ranked: Tensor, limits: _Limits, cutoff: Cutoff, order: FilterOrder) -> Tensor:
    """How many leading ranks each row keeps, int64 `[B, 1]`, at least 1."""

    def with_ties(count: Tensor) -> Tensor:
        if cutoff == "positional":
            return count
        return (ranked >= ranked.gather(1, count - 1)).sum(dim=-1, keepdim=True)

    cumulative = ranked.cumsum(dim=-1)
    mass_before = functional.pad(cumulative[:, :-1], (1, 0))
    count, mass_wanted = limits.top_k, limits.top_p
    if order == "sequential":
        count = with_ties(count)
        mass_wanted = limits.top_p * cumulative.gather(1, count - 1)
    # top_p = 1 means no limit; by rounding, the mass before a tail id may have reached 1 already
    in_nucleus = (mass_before < mass_wanted) | (limits.top_p >= 1)
    by_mass = in_nucleus.sum(dim=-1, keepdim=True).clamp(min=1)  # top_p may round to 0 in float32
    count = with_ties(torch.minimum(count, by_mass))
    above_floor = ranked >= limits.min_p * ranked[:, :1]
    count = torch.minimum(count, above_floor.sum(dim=-1, keepdim=True))
    return torch.where(limits.greedy, 1, count)


# Supports


def _support(
    kept: Bool[Tensor, "b W"],
    token_ids: Int[Tensor, "b W"] | None,
    index: Tensor | None,
) -> RolloutSamplingMask:
    """The mask of the kept columns; errors name the row of the batch that `index` maps to."""
    counts = kept.sum(dim=-1)
    _refuse_empty(counts == 0, index)
    ids = kept.nonzero()[:, 1] if token_ids is None else token_ids[kept]
    offsets = functional.pad(counts.cumsum(dim=0), (1, 0))
    try:
        return RolloutSamplingMask(ids=ids, offsets=offsets)
    except ReplayError as error:
        if error.row is None or index is None:
            raise
        raise error.located(row=int(index[error.row])) from None


def _chosen_rows(batch: Tensor, rows: IntArrayLike | None) -> tuple[Tensor, Tensor | None]:
    """The opted-in rows, and their places in the batch; no copy where all are (`rows=None`)."""
    if rows is None:
        return batch, None
    wanted = integer_array(rows, "rows")
    outside = (wanted < 0) | (wanted >= batch.shape[0])
    if outside.any():
        raise ReplayError(
            "no such row to capture",
            expected=f"rows in [0, {batch.shape[0]})",
            got=f"{int(wanted[np.argmax(outside)])}",
            consequence="a request would get another request's supports, or none",
        )
    index = torch.tensor(wanted, device=batch.device)
    return batch[index], index


def _chosen_ids(
    token_ids: Tensor | None, weights: Tensor, rows: IntArrayLike | None
) -> Tensor | None:
    if token_ids is None:
        return None
    if token_ids.shape != weights.shape or token_ids.dtype not in (
        torch.int32,
        torch.int64,
    ):
        raise ReplayError(
            "token_ids do not name the columns of the weights",
            expected=f"int32 or int64 of shape {list(weights.shape)}",
            got=f"{token_ids.dtype} of shape {list(token_ids.shape)}",
            consequence=_WRONG_SUPPORT,
        )
    return _chosen_rows(token_ids, rows)[0]


# Checks


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return (_is_int(value) or isinstance(value, float | np.floating)) and math.isfinite(value)


def _bad_param(name: str, value: Any, expected: str) -> ReplayError:
    return ReplayError(
        f"{name} is out of range",
        expected=expected,
        got=repr(value),
        consequence=_WRONG_DRAW,
    )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        expected = " or ".join(map(repr, choices))
        raise _bad_param(name, value, expected)


def _float_batch(values: Tensor, name: str) -> Tensor:
    is_tensor = isinstance(values, Tensor)
    if not is_tensor or values.ndim != 2 or not values.is_floating_point() or not values.shape[1]:
        raise ReplayError(
            f"{name} are not a batch of rows",
            expected="a two-dimensional floating-point tensor with at least one column",
            got=f"{values.dtype} of shape {list(values.shape)}" if is_tensor else repr(values)[:60],
            consequence=_WRONG_SUPPORT,
        )
    return values.detach()


def _at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.to(torch.float32)


def _refuse_values(
    bad: Bool[Tensor, "b W"],
    values: Tensor,
    index: Tensor | None,
    what: str,
    expected: str,
) -> None:
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise ReplayError(
            f"{what} is no number to sample by",
            expected=expected,
            got=f"{float(values[row, column])} in column {column}",
            consequence=_WRONG_SUPPORT,
            row=row if index is None else int(index[row]),
        )


def _refuse_logits(logits: Tensor, index: Tensor | None) -> None:
    bad = torch.isnan(logits) | torch.isposinf(logits)
    _refuse_values(bad, logits, index, "a logit", "a finite number, or -inf for an id cut off")


def _refuse_empty(empty: Bool[Tensor, " b"], index: Tensor | None) -> None:
    if bool(empty.any()):
        row = int(empty.nonzero()[0])
        raise ReplayError(
            "empty support",
            expected="at least one id that the sampler kept",
            got="none",
            consequence="no token can be drawn from an empty support",
            row=row if index is None else int(index[row]),
        )


def _check_distributions(probs: Tensor) -> None:
    _refuse_values(
        ~((probs >= 0) & (probs < math.inf)),
        probs,
        None,
        "a probability",
        "a finite number >= 0",
    )
    mass = probs.sum(dim=-1)
    off = (mass - 1).abs() > _MASS_TOLERANCE
    if bool(off.any()):
        row = int(off.nonzero()[0])
        raise ReplayError(
            "not a distribution",
            expected="probabilities that sum to 1",
            got=f"a sum of {float(mass[row]):.6f}",
            consequence="top_p would cut at another mass than the one asked for",
            row=row,
        )


def _sampled_ids(token_ids: Tensor, weights: Tensor) -> Tensor:
    batch, vocab = weights.shape
    if token_ids.shape != (batch,) or token_ids.dtype not in (torch.int32, torch.int64):
        raise ReplayError(
            "token_ids are not one token a row",
            expected=f"int32 or int64 of shape [{batch}]",
            got=f"{token_ids.dtype} of shape {list(token_ids.shape)}",
            consequence="log-probs would be another token's",
        )
    _refuse_outside((token_ids >= 0) & (token_ids < vocab), token_ids)
    return token_ids.to(torch.int64)


def _refuse_outside(inside: Bool[Tensor, " B"], token_ids: Tensor) -> None:
    if not bool(inside.all()):
        row = int((~inside).nonzero()[0])
        raise MissingTokenError(
            "the sampled token is outside the captured support",
            expected="a token that the sampler kept",
            got=f"token {int(token_ids[row])}",
            consequence="the token would have log-prob -inf under the replayed policy",
            row=row,
        )
