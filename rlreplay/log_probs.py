"""The entry points: a trainer's logits to per-sample log-probs, entropy and the other scores.

Shapes: `B` samples, `S` positions of a padded row, `T` rows of a packed stream and `V` vocabulary
columns, all as this rank holds them.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlreplay.errors import ReplayError
from rlreplay.kernels.softmax import SCORE_NAMES
from rlreplay.layout import RowLayout, RowSpan
from rlreplay.parallel import ParallelState
from rlreplay.plan import (
    OnMissingToken,
    ReplayPlan,
    check_kind,
    to_device,
    tokens_on_host,
)
from rlreplay.sampling_mask import (
    IntArray,
    IntArrayLike,
    RolloutSamplingMask,
    check_count,
    integer_array,
)
from rlreplay.scores import (
    BACKENDS,
    Backend,
    check_temperature,
    known_scores,
    score_assembled,
    score_logits,
)


@dataclass(frozen=True)
class ScoringConfig:
    """How a trainer's logits are laid out and scored. A value: nothing reads a global.

    Attributes:
        qkv_format: `"thd"`, logits `[1, T, V]` of a packed stream, or `"bshd"`, logits `[B, S, V]`.
        temperature: the rollout's sampling temperature; divides the logits.
        cp_layout: which sequence shards a CP rank holds, `"zigzag"` or `"contiguous"` (all-gather
            CP, Ulysses); without CP they are the same.
        end_padding: the packed (thd) stream may be longer than its samples, padded at its end.
            Padding of each sample is declared by `padded_lengths`. A contiguous stream is cut into
            equal pieces and so may be padded at its end in any case.
        redistribute_to_zigzag: give the results of contiguous CP in the zigzag layout.
        vocab_size: true size of the vocabulary; None where the logits have no padded columns.
        true_on_policy: reproduce the bits of an engine's `log_softmax` over the full row in the
            model's dtype (`score_assembled`).
        model_dtype: that dtype, where the logits come in a wider one; only for `true_on_policy`.
        on_missing_token: see `ReplayPlan.build`.
        backend: see `score_logits`.
    """

    qkv_format: Literal["thd", "bshd"] = "thd"
    temperature: float = 1.0
    cp_layout: Literal["zigzag", "contiguous"] = "zigzag"
    end_padding: bool = False
    redistribute_to_zigzag: bool = False
    vocab_size: int | None = None
    true_on_policy: bool = False
    model_dtype: torch.dtype | None = None
    on_missing_token: OnMissingToken = "raise"
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        _check_choice("qkv_format", self.qkv_format, ("thd", "bshd"))
        _check_choice("cp_layout", self.cp_layout, ("zigzag", "contiguous"))
        _check_choice("on_missing_token", self.on_missing_token, ("raise", "include"))
        _check_choice("backend", self.backend, BACKENDS)
        if self.vocab_size is not None:
            check_count(self.vocab_size, "vocab_size")
        check_temperature(self.temperature)
        if self.model_dtype is not None and not self.true_on_policy:
            raise ReplayError(
                "model_dtype without true_on_policy",
                expected="true_on_policy=True, or no model_dtype",
                got=f"{self.model_dtype}",
                consequence="scores would be taken to have that dtype's bits",
            )
        if self.redistribute_to_zigzag and self.cp_layout != "contiguous":
            raise ReplayError(
                "nothing to redistribute",
                expected="cp_layout='contiguous' with redistribute_to_zigzag=True",
                got=f"cp_layout={self.cp_layout!r}",
                consequence="results would be taken for those of another layout",
            )


class ResponseRows(NamedTuple):
    """One sample's share of the logits on this rank."""

    logits_rows: Float[Tensor, "rows V"]
    """raw logits, no temperature: also good for values and distillation"""
    target_tokens: Int[Tensor, " rows"]
    """the response token that each row scores"""
    response_indices: Int[Tensor, " rows"]
    """its index in the whole response"""


def get_log_probs_and_entropy(
    logits: Float[Tensor, "B S V"],
    *,
    unconcat_tokens: Sequence[IntArrayLike],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    config: ScoringConfig,
    parallel: ParallelState | None = None,
    rollout_sampling_mask: Sequence[RolloutSamplingMask] | None = None,
    with_entropy: bool = False,
    entropy_requires_grad: bool = True,
    max_seq_lens: int | Sequence[int] | None = None,
    padded_lengths: Sequence[int] | None = None,
    scores: Collection[str] = (),
    plan: ReplayPlan | None = None,
) -> dict[str, list[Float[Tensor, " rows"]]]:
    """Log-probs of the sampled tokens on their rollout supports, and other scores, per sample.

    Equivalent to `masked_log_softmax(logits / temperature, support)` at the sampled tokens;
    without masks, to the ordinary log-prob over the full vocabulary. Entropy is over the full
    vocabulary in both cases. Call it inside the loss.

    Args:
        logits: float `[1, T, V]` (thd) or `[B, S, V]` (bshd): this rank's sequence and vocab
            shards, before temperature. A `[B, S, V]` whose rows are not evenly spaced in memory
            is copied.
        unconcat_tokens: for each sample its whole token ids, int `[total_length]`, prompt first.
        total_lengths: prompt + response tokens of each sample.
        response_lengths: response tokens of each sample.
        config: layout and scoring, the same on every rank.
        parallel: this rank's place in its groups; None is a single rank.
        rollout_sampling_mask: for each sample its whole response's supports, on every rank; None
            for the full vocabulary.
        with_entropy: add `"entropy"`.
        entropy_requires_grad: whether the entropy takes part in the gradient (a bonus in the
            loss) or is a metric.
        max_seq_lens: bshd: the common padded length of the samples, before CP; by default that
            of the logits.
        padded_lengths: thd: length that each sample takes in the stream, where the trainer pads.
        scores: further names of `rlreplay.scores.Scores`, differentiable but for the entropy, for
            which `entropy_requires_grad` speaks.
        plan: a plan built before for this micro-batch (PPO epochs, actor and reference), instead
            of building one; `unconcat_tokens` and `rollout_sampling_mask` are then not read, and
            the ranks do not compare their arguments again.

    Returns:
        For `"log_probs"` and each further score one tensor a sample, `[response rows of the sample
        on this rank]`, in the order of the response; float32, or float64 for float64 logits
        (`true_on_policy`: see `score_assembled`).

    Collectives: that of `ParallelState.agreed` unless a plan is given; those of `score_logits`
    (`score_assembled` with `true_on_policy`); with `redistribute_to_zigzag` on more than one CP
    rank one SUM all-reduce over the CP group more, and one in the backward.

    Raises:
        ReplayError: anything that does not fit, before any collective of a score; on every rank,
            also where only one is given something wrong, unless a plan is given: then on the ranks
            that are given it.
    """
    parallel = ParallelState.single() if parallel is None else parallel
    check_kind(parallel, ParallelState, "parallel")
    batch = _Batch(total_lengths, response_lengths, max_seq_lens, padded_lengths)

    def prepare() -> _Prepared:
        check_kind(config, ScoringConfig, "config")
        request = _request(scores, with_entropy, entropy_requires_grad)
        layout = batch.layout_of(logits, config, parallel)
        columns = logits.shape[-1] * parallel.tp_size
        vocab_size = columns if config.vocab_size is None else config.vocab_size
        moves = config.redistribute_to_zigzag and parallel.cp_size > 1
        target = batch.zigzag_of(logits, config, parallel) if moves else None
        if plan is not None:
            check_kind(plan, ReplayPlan, "plan")
            _check_plan(plan, layout, parallel, vocab_size, config)
            return _Prepared(plan, target, *request)
        built = ReplayPlan.build(
            unconcat_tokens,
            rollout_sampling_mask,
            layout,
            parallel=parallel,
            vocab_size=vocab_size,
            device=logits.device,
            on_missing_token=config.on_missing_token,
            shard_columns=logits.shape[-1],
            assembled=config.true_on_policy,
            check_agreement=False,
        )
        built.check_logits(logits.reshape(-1, logits.shape[-1]))
        return _Prepared(built, target, *request)

    def fingerprint(prepared: _Prepared) -> int:
        graph = f"{torch.is_grad_enabled()} {torch.is_inference_mode_enabled()}"
        asked = f"{config} {logits.dtype} {prepared.wanted} {prepared.metrics} {graph}"
        return zlib.crc32(asked.encode(), prepared.plan.fingerprint)

    # ranks agree once a plan, not once a score
    prepared = parallel.agreed(prepare, fingerprint) if plan is None else prepare()
    flat = _scored(logits, prepared, config)
    layout, target = prepared.plan.layout, prepared.target
    if target is None:
        return {name: layout.split(values) for name, values in flat.items()}
    return _redistributed(flat, prepared.metrics, layout, target, parallel)


class _Prepared(NamedTuple):
    """What is known before the first score."""

    plan: ReplayPlan
    target: RowLayout | None
    """the layout that results move to"""
    wanted: tuple[str, ...]
    metrics: tuple[str, ...]


def _request(
    scores: Collection[str], with_entropy: bool, entropy_requires_grad: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The scores wanted, and those of them that are metrics."""
    further = () if not scores else known_scores(scores, "scores")
    asked = {"log_probs", *further, *(("entropy",) if with_entropy else ())}
    wanted = tuple(name for name in SCORE_NAMES if name in asked)
    return wanted, tuple(n for n in wanted if n == "entropy" and not entropy_requires_grad)


def _scored(logits: Tensor, prepared: _Prepared, config: ScoringConfig) -> dict[str, Tensor]:
    rows = logits.reshape(-1, logits.shape[-1])
    wanted = prepared.wanted
    differentiable = tuple(name for name in wanted if name not in prepared.metrics)
    if config.true_on_policy:
        return score_assembled(
            rows,
            prepared.plan,
            scores=wanted,
            differentiable=differentiable,
            temperature=config.temperature,
            model_dtype=config.model_dtype,
        ).asked()
    return score_logits(
        rows,
        prepared.plan,
        scores=wanted,
        differentiable=differentiable,
        temperature=config.temperature,
        backend=config.backend,
    ).asked()


def _redistributed(
    flat: dict[str, Tensor],
    metrics: tuple[str, ...],
    layout: RowLayout,
    target: RowLayout,
    parallel: ParallelState,
) -> dict[str, list[Tensor]]:
    """Results of one layout in another: all scores travel together, in one collective."""
    # stacking widens a narrower dtype, which loses nothing on the way back
    together = torch.stack(list(flat.values()), dim=-1)
    moved = layout.redistribute(layout.split(together), target, parallel.cp_group)
    by_name = {
        name: [part[:, k].to(values.dtype) for part in moved]
        for k, (name, values) in enumerate(flat.items())
    }
    return {k: [v.detach() for v in vs] if k in metrics else vs for k, vs in by_name.items()}


def get_responses(
    logits: Float[Tensor, "B S V"],
    *,
    unconcat_tokens: Sequence[IntArrayLike],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    config: ScoringConfig,
    parallel: ParallelState | None = None,
    max_seq_lens: int | Sequence[int] | None = None,
    padded_lengths: Sequence[int] | None = None,
) -> Iterator[ResponseRows]:
    """The rows of this rank that score each sample's response, in the order of the response.

    For those who want the rows themselves (values, distillation). They are raw: no temperature,
    views where the rows are consecutive. Arguments as in `get_log_probs_and_entropy`; the last
    dimension may be anything. Checks run before the first sample is yielded.

    Collectives: none.
    """
    parallel = parallel or ParallelState.single()
    batch = _Batch(total_lengths, response_lengths, max_seq_lens, padded_lengths)
    layout = batch.layout_of(logits, config, parallel)
    tokens = tokens_on_host(unconcat_tokens, layout)
    return _response_rows(logits.reshape(-1, logits.shape[-1]), tokens, layout)


def _response_rows(
    rows: Tensor, tokens: list[IntArray], layout: RowLayout
) -> Iterator[ResponseRows]:
    indices = [layout.response_indices(i) for i in range(layout.num_samples)]
    lengths = zip(layout.total_lengths, layout.response_lengths, strict=True)
    targets = [
        t[total - response + own]
        for t, (total, response), own in zip(tokens, lengths, indices, strict=True)
    ]
    # one copy to the device for all samples
    on_device = to_device(np.concatenate([np.zeros(0, np.int64), *targets, *indices]), rows.device)
    by_sample = torch.split(on_device, [*layout.row_counts, *layout.row_counts])
    for i, spans in enumerate(layout.spans):
        parts = [rows[first:last] for first, last in _row_runs(spans)]
        yield ResponseRows(
            parts[0] if len(parts) == 1 else torch.cat([rows[:0], *parts]),
            by_sample[i],
            by_sample[layout.num_samples + i],
        )


def _row_runs(spans: Sequence[RowSpan]) -> list[tuple[int, int]]:
    """[first, last) of the runs of consecutive logits rows that the spans make up."""
    runs: list[tuple[int, int]] = []
    for span in spans:
        last = span.local_row + span.length
        if runs and runs[-1][1] == span.local_row:
            runs[-1] = (runs[-1][0], last)
        else:
            runs.append((span.local_row, last))
    return runs


class _Batch(NamedTuple):
    """The lengths of a micro-batch, as the caller gives them."""

    total_lengths: Sequence[int]
    response_lengths: Sequence[int]
    max_seq_lens: int | Sequence[int] | None
    padded_lengths: Sequence[int] | None

    def layout_of(
        self, logits: Tensor, config: ScoringConfig, parallel: ParallelState
    ) -> RowLayout:
        """The row map of this rank; refused where the logits do not have its shape."""
        self._check_shape(logits, config.qkv_format)
        lengths = (self.total_lengths, self.response_lengths)
        padded, width = (
            self.padded_lengths,
            self._width(logits, config, parallel.cp_size),
        )
        rank, size = parallel.cp_rank, parallel.cp_size
        end_padding = config.end_padding or config.cp_layout == "contiguous"
        if size == 1 and width is None:
            layout = RowLayout.packed(*lengths, padded_lengths=padded, end_padding=end_padding)
        elif size == 1 and width is not None:
            layout = RowLayout.padded(*lengths, max_seq_len=width, padded_lengths=padded)
        elif config.cp_layout == "zigzag":
            layout = RowLayout.zigzag(
                *lengths,
                cp_rank=rank,
                cp_size=size,
                max_seq_len=width,
                padded_lengths=padded,
                end_padding=end_padding,
            )
        else:
            layout = RowLayout.contiguous(
                *lengths,
                cp_rank=rank,
                cp_size=size,
                max_seq_len=width,
                padded_lengths=padded,
                stream_length=logits.shape[1] * size if width is None else None,
            )
        layout.check_rows(logits.shape[0] * logits.shape[1])
        return layout

    def zigzag_of(
        self, logits: Tensor, config: ScoringConfig, parallel: ParallelState
    ) -> RowLayout:
        """The zigzag layout of the micro-batch, for this rank, whatever the logits' layout."""
        return RowLayout.zigzag(
            self.total_lengths,
            self.response_lengths,
            cp_rank=parallel.cp_rank,
            cp_size=parallel.cp_size,
            max_seq_len=self._width(logits, config, parallel.cp_size),
            padded_lengths=self.padded_lengths,
        )

    def _width(self, logits: Tensor, config: ScoringConfig, cp_size: int) -> int | None:
        """The padded length of a bshd sample before CP; None for thd."""
        if config.qkv_format == "thd":
            if self.max_seq_lens is not None:
                raise ReplayError(
                    "max_seq_lens of a packed stream",
                    expected="max_seq_lens with qkv_format='bshd' (padded_lengths with thd)",
                    got="max_seq_lens with qkv_format='thd'",
                    consequence="samples would be taken to start where they do not",
                )
            return None
        width = self._common_length()
        return logits.shape[1] * cp_size if width is None else width

    def _common_length(self) -> int | None:
        if self.max_seq_lens is None:
            return None
        if isinstance(self.max_seq_lens, int | np.integer):
            return self.max_seq_lens
        lengths = set(integer_array(self.max_seq_lens, "max_seq_lens").tolist())
        if len(self.max_seq_lens) != len(self.total_lengths) or len(lengths) > 1:
            raise ReplayError(
                "max_seq_lens are not those of one padded batch",
                expected=f"the same length for each of {len(self.total_lengths)} samples",
                got=f"{len(self.max_seq_lens)} lengths, {len(lengths)} of them distinct",
                consequence="rows would be read as another sample's",
            )
        return lengths.pop() if lengths else None

    def _check_shape(self, logits: Tensor, qkv_format: str) -> None:
        batch = 1 if qkv_format == "thd" else len(self.total_lengths)
        if not isinstance(logits, Tensor) or logits.layout != torch.strided:
            raise ReplayError(
                "logits are no tensor",
                expected="a strided torch.Tensor",
                got=type(logits).__name__,
                consequence="there is nothing to score or to send a gradient to",
            )
        if logits.ndim != 3 or logits.shape[0] != batch:
            raise ReplayError(
                f"logits are not a {qkv_format} batch",
                expected=f"shape [{batch}, positions, columns]",
                got=f"shape {tuple(logits.shape)}",
                consequence="rows would be read as another sample's",
            )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ReplayError(
            f"unknown {name}",
            expected=f"one of {list(choices)}",
            got=repr(value),
            consequence="logits would be read or scored in a way that nobody chose",
        )


def _check_plan(
    plan: ReplayPlan,
    layout: RowLayout,
    parallel: ParallelState,
    vocab_size: int,
    config: ScoringConfig,
) -> None:
    """Refuse a plan that was built for something else than what it is to score."""
    built = (plan.vocab_size, plan.on_missing_token)
    if built != (vocab_size, config.on_missing_token):
        raise ReplayError(
            "the plan was built with other options",
            expected=f"vocab_size {vocab_size}, on_missing_token {config.on_missing_token!r}",
            got=f"vocab_size {built[0]}, on_missing_token {built[1]!r}",
            consequence="columns or tokens would be scored that should not be, or left out",
        )
    if (plan.layout, plan.parallel) != (layout, parallel):
        raise ReplayError(
            "the plan was built for another micro-batch or rank",
            expected="the plan of these lengths, this layout and this rank",
            got=f"one of {plan.layout.num_samples} samples with {plan.num_rows} rows here",
            consequence="rows would be scored on another batch's supports",
        )
