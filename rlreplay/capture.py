"""Sampler side: what the sampler kept, as supports, and a reference sampler to capture it from.

Shapes: `B` rows (one a request, at one decoding step), `b` of them opted in to be captured, `V`
vocabulary, `W` columns of a compact form whose ids are named beside it. Everything here works on
whole batches. Which requests can be replayed at all is `request_validation.validate_request`'s.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from rlreplay.errors import MissingTokenError, ReplayError
from rlreplay.rollout import MASS_TOLERANCE
from rlreplay.sampling_mask import (
    BoolArray,
    FloatArray,
    IntArray,
    IntArrayLike,
    RolloutSamplingMask,
    check_count,
    consecutive_runs,
    frozen,
    integer_array,
    is_integer,
    shown,
)

Cutoff = Literal["threshold", "positional", "mixed"]
FilterOrder = Literal["joint", "sequential", "min_p_first"]

DEFAULT_MAX_SUPPORT = 4096

# Below it a sampler means greedy; much below, float32 would divide by 0.
_LEAST_TEMPERATURE = 1e-6
_MOST_TEMPERATURE = torch.finfo(torch.float32).max

_WRONG_SUPPORT = "the captured support would not be the one the token was drawn from"
_WRONG_DRAW = "tokens would be drawn from another distribution than the one asked for"
_OTHER_TOKEN = "log-probs would be another token's"
_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SHOWN_ROWS = 8
_MULTINOMIAL_COLUMNS = 1 << 24


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled: `softmax(logits / temperature)`, then the filters.

    Args:
        temperature: 0, which takes the most probable id, or from 1e-6 to float32's largest number.
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
        if not (_is_finite(t) and (t == 0 or _LEAST_TEMPERATURE <= t <= _MOST_TEMPERATURE)):
            expected = f"0 (greedy), or a number from 1e-6 to {_MOST_TEMPERATURE:.2e} (float32)"
            raise _bad_param("temperature", t, expected)
        if not (_is_finite(top_p) and 0 < top_p <= 1):
            raise _bad_param("top_p", top_p, "a number in (0, 1]")
        if not (_is_finite(min_p) and 0 <= min_p <= 1):
            raise _bad_param("min_p", min_p, "a number in [0, 1]")
        if not (top_k is None or (is_integer(top_k) and top_k >= 1)):
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
        mask: b rows, the supports of the rows that opted in; by default of all B.
    """

    token_ids: Int[Tensor, " B"]
    log_probs: Float[Tensor, " B"]
    mask: RolloutSamplingMask


class CaptureStatus(enum.IntEnum):
    """What became of a captured row. Anything but OK refuses the row's request as a whole."""

    OK = 0
    """The support is complete; a greedy row's is its token alone."""
    INVALID = 1
    """The weights were no distribution (NaN, infinite, negative, all zero), or the sampled token's
    log-prob is beyond float32: nothing to replay."""
    OVERFLOW = 2
    """The support has more ids than the cap. It is left out, never cut to fit."""
    LOST_TOKEN = 3
    """The sampled token has no weight in a row that is a distribution. It is never repaired."""


@dataclass(frozen=True, slots=True, eq=False)
class SupportCapture:
    """The supports of one decoding step, with a status for each captured row.

    A request can be replayed only if all its steps are OK. `mask` and `check` raise where a row
    is not; `accepted` goes on with the requests whose rows are. The arrays are read-only.

    Attributes:
        rows: int64 `[b]`, the captured rows of the batch, in the order asked for.
        sampled_ids: int64 `[b]`, their sampled tokens.
        statuses: int8 `[b]`, a `CaptureStatus` each.
        support_sizes: int64 `[b]`, how many ids the sampler kept: complete where the row
            overflows or has lost its token, 0 where it is invalid.
        log_probs: float32 `[b]`, of the sampled tokens, normalised over their supports; NaN
            where the status is not OK.
        max_support: the cap on a row's support.
    """

    rows: IntArray
    sampled_ids: IntArray
    statuses: npt.NDArray[np.int8]
    support_sizes: IntArray
    log_probs: FloatArray
    max_support: int
    _ok_mask: RolloutSamplingMask  # the rows that are OK, and no others

    def __len__(self) -> int:
        return self.rows.size

    @property
    def ok(self) -> BoolArray:
        """bool `[b]`: rows whose support is complete."""
        return np.equal(self.statuses, CaptureStatus.OK)

    @property
    def mask(self) -> RolloutSamplingMask:
        """The supports of all b rows; raises like `check` where there is a row without one."""
        self.check()
        return self._ok_mask

    def check(self) -> None:
        """Refuse the step unless the status of each row is OK.

        Raises:
            MissingTokenError: a row is LOST_TOKEN. `row` is the first such row; the message names
                all others that are not OK too, after these.
            ReplayError: a row is INVALID or OVERFLOW.
        """
        refused = np.flatnonzero(~self.ok)
        if not refused.size:
            return
        lost = self.statuses[refused] == CaptureStatus.LOST_TOKEN
        refused = refused[np.argsort(~lost, kind="stable")]
        told = ", ".join(self._told(i) for i in refused[:_SHOWN_ROWS].tolist())
        raise (MissingTokenError if lost.any() else ReplayError)(
            f"{refused.size} of {len(self)} captured rows have no support to replay",
            expected="the status OK for each",
            got=told + (", …" if refused.size > _SHOWN_ROWS else ""),
            consequence="their requests would be trained on supports that are incomplete, or lack "
            "the token: refuse those requests, and for an overflow lower top_k or raise the cap",
            row=int(self.rows[refused[0]]),
        )

    def accepted(self) -> SupportCapture:
        """The capture of the rows that are OK; the requests of all others are refused."""
        ok = self.ok
        return SupportCapture(
            rows=frozen(self.rows[ok]),
            sampled_ids=frozen(self.sampled_ids[ok]),
            statuses=frozen(self.statuses[ok]),
            support_sizes=frozen(self.support_sizes[ok]),
            log_probs=frozen(self.log_probs[ok]),
            max_support=self.max_support,
            _ok_mask=self._ok_mask,
        )

    def _told(self, index: int) -> str:
        row, size = self.rows[index], self.support_sizes[index]
        if self.statuses[index] == CaptureStatus.OVERFLOW:
            return f"row {row} OVERFLOW ({size} ids, cap {self.max_support})"
        if self.statuses[index] == CaptureStatus.LOST_TOKEN:
            return f"row {row} LOST_TOKEN (token {self.sampled_ids[index]}, not among {size} ids)"
        return f"row {row} INVALID"


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
        rows: int `[b]`, the rows to capture, in this order; the others are neither looked at nor
            copied. By default all rows. Consecutive rows are read in place.

    Returns:
        A mask of b (or B) rows.

    Raises:
        ReplayError: a weight that is negative, NaN or infinite; a row without any weight; an id
            that is negative or repeated in its row. `row` is the row of the batch.
    """
    weights = _float_batch(weights, "weights")
    chosen, places = _chosen_rows(weights, rows)
    bad = ~_are_weights(chosen)
    _refuse_values(bad, chosen, places, "a sampling weight", "a finite number >= 0")
    return _support(chosen > 0, _chosen_ids(token_ids, weights, rows), places)


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
    chosen, places = _chosen_rows(_float_batch(processed_logits, "processed_logits"), rows)
    _refuse_logits(chosen, places)
    return _support(chosen > -math.inf, None, places)


def capture_from_weights(
    weights: Float[Tensor, "B W"],
    sampled_ids: Int[Tensor, " B"],
    token_ids: Int[Tensor, "B W"] | None = None,
    rows: IntArrayLike | None = None,
    *,
    greedy: Bool[Tensor, " B"] | None = None,
    max_support: int = DEFAULT_MAX_SUPPORT,
) -> SupportCapture:
    """The supports and log-probs of one step, a row that cannot be replayed marked by its status.

    `support_from_weights` for a server: whatever one request's weights and token are, its row gets
    a status, and the batch goes on.

    Args:
        weights, token_ids, rows: as in `support_from_weights`.
        sampled_ids: int32 or int64 `[B]`, the tokens that were drawn.
        greedy: bool `[B]`, rows whose token was taken as the most probable one, not drawn. Their
            support is that token, whatever else has weight, and its log-prob is 0.
        max_support: the most ids that a row may have.

    Raises:
        ReplayError: arguments that do not fit; compact ids that are negative or repeated in the
            support of a row that is OK; a sampled id repeated in a row that is a distribution.
    """
    weights = _float_batch(weights, "weights")
    chosen, places = _chosen_rows(weights, rows)
    names = _chosen_ids(token_ids, weights, rows)
    sampled = _chosen_rows(_sampled_ids(sampled_ids, weights), rows)[0]
    kept = chosen > 0
    mass = chosen.sum(dim=-1, dtype=torch.float64)
    valid = _are_weights(chosen).all(dim=-1) & kept.any(dim=-1) & mass.isfinite()
    columns = _sampled_columns(sampled, kept, names)
    _refuse_repeated(sampled, kept & valid[:, None], names, places)
    return _capture(
        kept,
        names,
        valid=valid,
        sampled=sampled,
        columns=columns,
        log_probs=_log_shares(chosen, columns, mass),
        greedy=_chosen_greedy(greedy, weights, rows),
        places=places,
        max_support=max_support,
    )


def capture_from_logits(
    processed_logits: Float[Tensor, "B V"],
    sampled_ids: Int[Tensor, " B"],
    rows: IntArrayLike | None = None,
    *,
    greedy: Bool[Tensor, " B"] | None = None,
    max_support: int = DEFAULT_MAX_SUPPORT,
) -> SupportCapture:
    """`capture_from_weights` of logits that the sampler has set to -inf outside the support.

    A logit far below the others is in the support though its probability rounds to 0. A row with
    a NaN, +inf or no finite logit is INVALID, and so is one whose token's log-prob is beyond
    float32.
    """
    logits = _float_batch(processed_logits, "processed_logits")
    chosen, places = _chosen_rows(logits, rows)
    sampled = _chosen_rows(_sampled_ids(sampled_ids, logits), rows)[0]
    kept = chosen > -math.inf
    columns = _sampled_columns(sampled, kept, None)
    selected = _at_least_float32(_at_columns(chosen, columns))
    # relative to the highest: large logits, of low temperatures, would round their differences
    highest = _at_least_float32(chosen.amax(dim=-1))
    log_mass = torch.logsumexp(_at_least_float32(chosen) - highest[:, None], dim=-1)
    return _capture(
        kept,
        None,
        valid=log_mass.isfinite(),  # no NaN and no +inf, and not all -inf
        sampled=sampled,
        columns=columns,
        log_probs=(selected - highest) - log_mass,
        greedy=_chosen_greedy(greedy, logits, rows),
        places=places,
        max_support=max_support,
    )


def filter_probs(
    probs: Float[Tensor, "B V"],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    cutoff: Cutoff = "threshold",
    order: FilterOrder = "joint",
) -> Float[Tensor, "B V"]:
    """The probabilities that survive top-k, top-p and min-p, and zeros elsewhere.

    Ids are ranked by probability, the lower id first where two tie. Top-k lets the first k
    through, top-p those that have less than `top_p` of the mass ranked before them, min-p those
    of at least `min_p` times the highest probability.

    Samplers differ from each other, and from this, where an id has exactly `top_p` of the mass
    before it (here it is cut), and where a cut by rank goes through ids that tie: vLLM and
    transformers leave to an unstable `torch.sort` which of them survive. The kept probabilities
    are the same, the ids need not be: of 0.4, 0.2, 0.2, 0.1, 0.1 at top_p = 0.55, ids 0 and 1 are
    kept here, and 0 and 2 there where the sort happens to be stable.

    | sampler | cutoff | order |
    |---|---|---|
    | SGLang with FlashInfer; with min-p | threshold | joint; sequential |
    | SGLang in torch | positional | joint |
    | vLLM, by sorting | mixed | min_p_first |
    | transformers | mixed | sequential |

    Args:
        probs: each row sums to 1, after the temperature.
        params: one for all rows, or one a row. The temperature is used only to tell greedy rows.
        cutoff: `"positional"` cuts between ranks. `"threshold"` cuts between values: whatever
            ties with the last id that top-k or top-p let through is kept as well, so that a
            support can be larger than k. `"mixed"` cuts by value for top-k, by rank for top-p.
        order: `"joint"` applies top-k and top-p to the same probabilities, `"sequential"` applies
            top-p to what top-k left, renormalised, and min-p last. `"min_p_first"` applies
            top-p to what min-p and top-k left, renormalised.

    Returns:
        The kept weights, not renormalised, float32 (float64 where `probs` is).

    Raises:
        ReplayError: a row that is no distribution, an unknown `cutoff` or `order`, or a number of
            params that is not the number of rows.
    """
    _check_choice("cutoff", cutoff, get_args(Cutoff))
    _check_choice("order", order, get_args(FilterOrder))
    probs = _at_least_float32(_float_batch(probs, "probs"))
    _check_distributions(probs)
    limits = _limits(params, probs)
    ranked, ids = probs.sort(dim=-1, descending=True, stable=True)
    count = _kept_count(ranked, limits, cutoff, order)
    survives = torch.arange(probs.shape[1], device=probs.device) < count
    kept = torch.where(survives, ranked, 0)
    return torch.zeros_like(probs).scatter(1, ids, kept)


def selected_log_probs(
    weights: Float[Tensor, "B W"],
    sampled_ids: Int[Tensor, " B"],
    *,
    token_ids: Int[Tensor, "B W"] | None = None,
) -> Float[Tensor, " B"]:
    """`log(w_y / sum(w))` of each row's token y, float32 `[B]`.

    For a token that was replaced after the draw (tensor-parallel sync, grammar): look it up again
    in the weights that were captured.

    Args:
        weights, token_ids: as in `support_from_weights`.
        sampled_ids: int32 or int64 `[B]`, one token a row.

    Raises:
        MissingTokenError: the token has no weight, so it is outside the support.
        ReplayError: the weights of a row do not sum to a finite number, or the token's id is
            repeated among those that have one.
    """
    weights = _float_batch(weights, "weights")
    sampled = _sampled_ids(sampled_ids, weights)
    kept, names = weights > 0, _chosen_ids(token_ids, weights, None)
    columns = _sampled_columns(sampled, kept, names)
    _refuse_outside(columns >= 0, sampled)
    _refuse_repeated(sampled, kept, names, None)
    mass = weights.sum(dim=-1, dtype=torch.float64)
    off = (~(_are_weights(weights) & mass.isfinite()[:, None])).any(dim=-1)
    if bool(off.any()):
        row = int(off.nonzero()[0])
        raise ReplayError(
            "the weights of a row are no distribution",
            expected="finite numbers >= 0 with a finite sum",
            got=f"a sum of {float(mass[row])}, least {float(weights[row].min())}",
            consequence="the log-prob would not be the sampled token's",
            row=row,
        )
    return _log_shares(weights, columns, mass)


def sample(
    logits: Float[Tensor, "B V"],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    cutoff: Cutoff = "threshold",
    order: FilterOrder = "joint",
    rows: IntArrayLike | None = None,
    generator: torch.Generator | None = None,
) -> SampledTokens:
    """Draw one token a row, and capture the support and the log-prob from the same weights.

    Equivalent to drawing from `filter_probs(softmax(logits / temperature), params)`; a greedy row
    is a singleton with log-prob 0. The work is done in float32, in float64 for float64 logits.

    Args:
        logits: finite, or -inf for ids that are banned.
        params: one for all rows, or one a row.
        cutoff, order: as in `filter_probs`.
        rows: int `[b]`, the rows whose supports are wanted; by default all. Every row is drawn.
        generator: of the device of `logits`; the default one of that device if None.

    Raises:
        ReplayError: a logit that is NaN or +inf, a row that bans every id, params that do not
            fit, as in `filter_probs`, or a generator that is none or of another device.
        MissingTokenError: the drawn token is outside the captured support. It is never repaired.
    """
    logits = _at_least_float32(_float_batch(logits, "logits"))
    _check_generator(generator, logits)
    _refuse_logits(logits, None)
    _refuse_empty(torch.isneginf(logits).all(dim=-1), None)
    probs = _tempered(logits, _limits(params, logits))
    weights = filter_probs(probs, params, cutoff=cutoff, order=order)
    if weights.shape[1] > _MULTINOMIAL_COLUMNS:
        raise ReplayError(
            "too many columns to draw from",
            expected=f"at most {_MULTINOMIAL_COLUMNS}, as torch.multinomial takes",
            got=f"{weights.shape[1]}",
            consequence="there is no draw",
        )
    token_ids = torch.multinomial(weights, 1, generator=generator)[:, 0]
    log_probs = selected_log_probs(weights, token_ids)
    return SampledTokens(token_ids, log_probs, support_from_weights(weights, rows=rows))


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
    each = [params] * batch if isinstance(params, SamplingParams) else params
    listed = isinstance(each, list | tuple)
    if not (listed and len(each) == batch and all(isinstance(p, SamplingParams) for p in each)):
        raise ReplayError(
            "params do not match the batch",
            expected=f"one SamplingParams, or a list of {batch}, one for each row",
            got=f"{len(each)}, {shown(each)}" if listed else shown(each),
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
        return (ranked >= ranked.gather(1, count - 1)).sum(dim=-1, keepdim=True)

    cumulative = ranked.cumsum(dim=-1)
    mass_before = functional.pad(cumulative[:, :-1], (1, 0))
    by_rank = limits.top_k if cutoff == "positional" else with_ties(limits.top_k)
    by_floor = (ranked >= limits.min_p * ranked[:, :1]).sum(dim=-1, keepdim=True)
    mass_wanted = limits.top_p
    if order != "joint":
        left = by_rank if order == "sequential" else torch.minimum(by_rank, by_floor)
        mass_wanted = limits.top_p * cumulative.gather(1, left - 1)
    # top_p = 1 means no limit; by rounding, the mass before a tail id may have reached 1 already
    in_nucleus = (mass_before < mass_wanted) | (limits.top_p >= 1)
    by_mass = in_nucleus.sum(dim=-1, keepdim=True).clamp(min=1)  # top_p may round to 0 in float32
    if cutoff == "threshold":
        by_mass = with_ties(by_mass)
    count = torch.minimum(torch.minimum(by_rank, by_mass), by_floor)
    return torch.where(limits.greedy, 1, count)


# Supports


def _support(
    kept: Bool[Tensor, "b W"],
    names: Int[Tensor, "b W"] | None,
    places: IntArray | None,
) -> RolloutSamplingMask:
    """The mask of the kept columns; errors name the row of the batch that `places` maps to."""
    counts = kept.sum(dim=-1)
    _refuse_empty(counts == 0, places)
    ids = kept.nonzero()[:, 1] if names is None else names[kept]
    offsets = functional.pad(counts.cumsum(dim=0), (1, 0))
    try:
        return RolloutSamplingMask(ids=ids, offsets=offsets)
    except ReplayError as error:
        if error.row is None:
            raise
        raise error.located(row=_place(error.row, places)) from None


def _capture(
    kept: Bool[Tensor, "b W"],
    names: Int[Tensor, "b W"] | None,
    *,
    valid: Bool[Tensor, " b"],
    sampled: Int[Tensor, " b"],
    columns: Int[Tensor, " b"],
    log_probs: Float[Tensor, " b"],
    greedy: Bool[Tensor, " b"] | None,
    places: IntArray | None,
    max_support: int,
) -> SupportCapture:
    """Statuses of the rows, and the mask of those that are OK."""
    cap = check_count(max_support, "max_support")
    found = columns >= 0
    if greedy is not None:
        alone = torch.zeros_like(kept).scatter(1, columns.clamp(min=0)[:, None], True)
        kept = kept & (alone | ~(greedy & found)[:, None])
        log_probs = torch.where(greedy, 0, log_probs)
    log_probs = log_probs.to(torch.float32)
    valid = valid & (log_probs.isfinite() | ~found)
    sizes = torch.where(valid, kept.sum(dim=-1), 0)
    ok = valid & found & (sizes <= cap)
    statuses = torch.where(ok, CaptureStatus.OK, CaptureStatus.OVERFLOW)
    statuses = torch.where(found, statuses, CaptureStatus.LOST_TOKEN)
    statuses = torch.where(valid, statuses, CaptureStatus.INVALID)
    rows = np.arange(kept.shape[0]) if places is None else places.copy()
    if not bool(ok.all()):
        kept, names = kept[ok], None if names is None else names[ok]
        places = rows[ok.cpu().numpy()]
    return SupportCapture(
        rows=frozen(rows),
        sampled_ids=frozen(sampled.cpu().numpy().copy()),
        statuses=frozen(statuses.to(torch.int8).cpu().numpy()),
        support_sizes=frozen(sizes.cpu().numpy()),
        log_probs=frozen(torch.where(ok, log_probs, math.nan).cpu().numpy()),
        max_support=cap,
        _ok_mask=_support(kept, names, places),
    )


def _sampled_columns(
    sampled: Int[Tensor, " b"], kept: Bool[Tensor, "b W"], names: Int[Tensor, "b W"] | None
) -> Int[Tensor, " b"]:
    """The kept column that holds each row's sampled id, -1 where none does."""
    if names is not None:
        hits = kept & (names == sampled[:, None])
        return torch.where(hits.any(dim=-1), hits.to(torch.uint8).argmax(dim=-1), -1)
    inside = (sampled >= 0) & (sampled < kept.shape[1])
    columns = torch.where(inside, sampled, 0)
    return torch.where(inside & _at_columns(kept, columns), columns, -1)


def _at_columns(values: Tensor, columns: Int[Tensor, " b"]) -> Tensor:
    """`values[i, columns[i]]`; column 0 where a row has none."""
    return values.gather(1, columns.clamp(min=0)[:, None])[:, 0]


def _log_shares(weights: Tensor, columns: Tensor, mass: Tensor) -> Tensor:
    """float32 `[b]`; of logs, for a share may be below float64's least."""
    return (_at_columns(weights, columns).double().log() - mass.log()).to(torch.float32)


def _chosen_rows(batch: Tensor, rows: IntArrayLike | None) -> tuple[Tensor, IntArray | None]:
    """The opted-in rows, and their places in the batch; a view where the rows are consecutive."""
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
    runs = consecutive_runs(wanted)
    if len(runs) == 1:
        return batch[int(runs[0, 0]) : int(runs[0, 1])], wanted
    return batch[torch.tensor(wanted, device=batch.device)], wanted


def _chosen_ids(
    token_ids: Tensor | None, weights: Tensor, rows: IntArrayLike | None
) -> Tensor | None:
    if token_ids is None:
        return None
    _check_tensor(
        token_ids,
        "token_ids do not name the columns of the weights",
        (torch.int32, torch.int64),
        list(weights.shape),
        weights,
        _WRONG_SUPPORT,
    )
    return _chosen_rows(token_ids, rows)[0]


def _chosen_greedy(
    greedy: Tensor | None, weights: Tensor, rows: IntArrayLike | None
) -> Tensor | None:
    if greedy is None:
        return None
    problem = "greedy is not one flag a row"
    _check_tensor(greedy, problem, (torch.bool,), [weights.shape[0]], weights, _WRONG_SUPPORT)
    return _chosen_rows(greedy, rows)[0]


def _place(row: int, places: IntArray | None) -> int:
    return row if places is None else int(places[row])


# Checks


def _is_finite(value: Any) -> bool:
    number = is_integer(value) or isinstance(value, float | np.floating)
    try:
        return number and math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False


def _bad_param(name: str, value: Any, expected: str) -> ReplayError:
    return ReplayError(
        f"{name} is out of range",
        expected=expected,
        got=shown(value),
        consequence=_WRONG_DRAW,
    )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        expected = " or ".join(map(repr, choices))
        raise _bad_param(name, value, expected)


def _float_batch(values: Tensor, name: str) -> Tensor:
    if not _is_plain(values, _FLOAT_DTYPES) or values.ndim != 2 or not values.shape[1]:
        raise ReplayError(
            f"{name} are not a batch of rows",
            expected="a two-dimensional floating-point tensor with at least one column",
            got=_described(values),
            consequence=_WRONG_SUPPORT,
        )
    return values.detach()


def _check_tensor(
    values: Any,
    problem: str,
    dtypes: tuple[torch.dtype, ...],
    shape: list[int],
    beside: Tensor,
    consequence: str,
) -> None:
    """Refuse anything but a tensor of one of the dtypes, of this shape, on the other's device."""
    if not _is_plain(values, dtypes) or list(values.shape) != shape:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        expected, got = f"{names} of shape {shape}", _described(values)
    elif values.device != beside.device:
        expected, got = f"a tensor on {beside.device}", f"one on {values.device}"
    else:
        return
    raise ReplayError(problem, expected=expected, got=got, consequence=consequence)


def _is_plain(values: Any, dtypes: tuple[torch.dtype, ...]) -> bool:
    plain = isinstance(values, Tensor) and values.layout is torch.strided
    return plain and not values.is_nested and not values.is_meta and values.dtype in dtypes


def _described(values: Any) -> str:
    if not isinstance(values, Tensor):
        return shown(values)
    if values.is_nested:
        return "a nested tensor"
    return f"{values.dtype} of shape {list(values.shape)} ({values.layout}, {values.device})"


def _at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.to(torch.float32)


def _are_weights(values: Tensor) -> Tensor:
    return (values >= 0) & (values < math.inf)


def _are_no_logits(values: Tensor) -> Tensor:
    return torch.isnan(values) | torch.isposinf(values)


def _refuse_values(
    bad: Bool[Tensor, "b W"],
    values: Tensor,
    places: IntArray | None,
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
            row=_place(row, places),
        )


def _refuse_logits(logits: Tensor, places: IntArray | None) -> None:
    expected = "a finite number, or -inf for an id cut off"
    _refuse_values(_are_no_logits(logits), logits, places, "a logit", expected)


def _refuse_empty(empty: Bool[Tensor, " b"], places: IntArray | None) -> None:
    if bool(empty.any()):
        raise ReplayError(
            "empty support",
            expected="at least one id that the sampler kept",
            got="none",
            consequence="no token can be drawn from an empty support",
            row=_place(int(empty.nonzero()[0]), places),
        )


def _check_distributions(probs: Tensor) -> None:
    _refuse_values(
        ~_are_weights(probs),
        probs,
        None,
        "a probability",
        "a finite number >= 0",
    )
    mass = probs.sum(dim=-1)
    off = (mass - 1).abs() > MASS_TOLERANCE
    if bool(off.any()):
        row = int(off.nonzero()[0])
        raise ReplayError(
            "not a distribution",
            expected="probabilities that sum to 1",
            got=f"a sum of {float(mass[row]):.6f}",
            consequence="top_p would cut at another mass than the one asked for",
            row=row,
        )


def _sampled_ids(sampled_ids: Tensor, weights: Tensor) -> Tensor:
    _check_tensor(
        sampled_ids,
        "the sampled ids are not one token a row",
        (torch.int32, torch.int64),
        [weights.shape[0]],
        weights,
        _OTHER_TOKEN,
    )
    return sampled_ids.to(torch.int64)


def _check_generator(generator: Any, beside: Tensor) -> None:
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        got = shown(generator)
    elif generator.device.type != beside.device.type:
        got = f"one of {generator.device}"
    else:
        return
    raise ReplayError(
        "the generator cannot draw for these logits",
        expected=f"a torch.Generator of {beside.device}, or None",
        got=got,
        consequence="no token could be drawn",
    )


def _refuse_repeated(
    sampled: Int[Tensor, " b"],
    kept: Bool[Tensor, "b W"],
    names: Int[Tensor, "b W"] | None,
    places: IntArray | None,
) -> None:
    """Refuse a sampled id that several kept columns have: its log-prob would be one column's."""
    if names is None:
        return
    repeated = (kept & (names == sampled[:, None])).sum(dim=-1) > 1
    if bool(repeated.any()):
        row = int(repeated.nonzero()[0])
        raise ReplayError(
            "support id repeated within its row",
            expected="each id once",
            got=f"the sampled id {int(sampled[row])} more than once",
            consequence="its log-prob would be that of a part of its weight",
            row=_place(row, places),
        )


def _refuse_outside(inside: Bool[Tensor, " b"], sampled: Int[Tensor, " b"]) -> None:
    if not bool(inside.all()):
        row = int((~inside).nonzero()[0])
        raise MissingTokenError(
            "the sampled token is outside the captured support (its weight is lost)",
            expected="a token that the sampler kept",
            got=f"token {int(sampled[row])}",
            consequence="the token would have log-prob -inf under the replayed policy",
            row=row,
        )
