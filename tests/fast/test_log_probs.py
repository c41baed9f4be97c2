"""The entry points, in every layout, against the dense reference on rows picked by hand.

Padding rows and padding columns of the logits are NaN, so that a score that read one would show it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlreplay.errors import BackendError, MissingMaskError, MissingTokenError, ReplayError
from rlreplay.kernels.reference import dense_scores
from rlreplay.layout import RowLayout
from rlreplay.log_probs import ScoringConfig, get_log_probs_and_entropy, get_responses
from rlreplay.plan import ReplayPlan
from rlreplay.sampling_mask import RolloutSamplingMask
from rlreplay.scores import SCORE_NAMES
from tests.fast.strategies import (
    LayoutCase,
    MicroBatch,
    agreeing_peers,
    layout_cases,
    make_batch,
    micro_batches,
    parallel_state,
    refused,
)

PerSample = dict[str, list[Tensor]]


@pytest.fixture(autouse=True, scope="module")
def _peers() -> Iterator[None]:
    with agreeing_peers():
        yield


# Logits of a micro-batch, whole and as a rank holds them


def random_logits(
    batch: MicroBatch, seed: int, dtype: torch.dtype = torch.float32, scale: float = 4.0
) -> list[Tensor]:
    """One tensor `[total_length, vocab_size]` a sample."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (scale * torch.randn(n, batch.vocab_size, generator=generator)).to(dtype)
        for n in batch.total_lengths
    ]


def on_rank(
    case: LayoutCase,
    sequences: Sequence[Tensor],
    rank: int = 0,
    *,
    columns: int | None = None,
    filler: float = torch.nan,
) -> Tensor:
    """A rank's logits `[1, T, columns]` or `[B, S, columns]`, `filler` where there is padding."""
    cells = case.cells(rank)
    width = sequences[0].shape[1] if sequences else 1
    local = torch.full((len(cells), columns or width), filler, dtype=sequences[0].dtype)
    for row, cell in enumerate(cells):
        if cell is not None:
            sample, position = cell
            local[row, :width] = sequences[sample][position]
    batches = 1 if case.qkv_format == "thd" else len(sequences)
    return local.view(batches, -1, columns or width)


def packed(batch: MicroBatch) -> LayoutCase:
    return LayoutCase("packed", batch.total_lengths, batch.response_lengths)


def score(
    batch: MicroBatch,
    case: LayoutCase,
    logits: Tensor,
    *,
    rank: int = 0,
    config: ScoringConfig | None = None,
    **options: Any,
) -> PerSample:
    """`get_log_probs_and_entropy` of one rank, all scores unless told otherwise."""
    arguments: dict[str, Any] = {
        "parallel": parallel_state(cp_rank=rank, cp_size=case.cp_size),
        "rollout_sampling_mask": batch.masks,
        "unconcat_tokens": batch.tokens,
        "total_lengths": batch.total_lengths,
        "response_lengths": batch.response_lengths,
        "config": config or config_of(case),
        "scores": SCORE_NAMES,
        "max_seq_lens": case.max_seq_len,
        "padded_lengths": case.padded_lengths,
    }
    return get_log_probs_and_entropy(logits, **(arguments | options))


def config_of(case: LayoutCase, **options: Any) -> ScoringConfig:
    return ScoringConfig(qkv_format=case.qkv_format, cp_layout=case.cp_layout, **options)


# What must come out


def reference(
    batch: MicroBatch,
    sequences: Sequence[Tensor],
    *,
    dtype: torch.dtype = torch.float64,
    temperature: float = 1.0,
    masked: bool = True,
) -> PerSample:
    """Dense scores of the rows that score each response, one tensor a sample."""
    scores: PerSample = {name: [] for name in SCORE_NAMES}
    for i, logits in enumerate(sequences):
        prompt = batch.total_lengths[i] - batch.response_lengths[i]
        picked = [logits[prompt + r - 1] for r in range(batch.response_lengths[i])]
        rows = torch.stack(picked) if picked else logits[:0]
        support = torch.from_numpy(batch.dense_support(i))
        own = dense_scores(
            rows.to(dtype),
            torch.tensor(batch.sampled(i), dtype=torch.int64),
            support if masked else torch.ones_like(support),
            temperature=temperature,
        )
        for name in SCORE_NAMES:
            scores[name].append(own[name])
    return scores


def held(case: LayoutCase, rank: int, responses: Sequence[Tensor]) -> list[Tensor]:
    """The rows of each response that a rank holds."""
    indices: list[list[int]] = [[] for _ in responses]
    for _, sample, index in case.scored(rank):
        indices[sample].append(index)
    return [values[own] for values, own in zip(responses, indices, strict=True)]


def largest_error(values: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    pairs = zip(values, truth, strict=True)
    errors = [(a.double() - b.double()).detach().abs().flatten() for a, b in pairs]
    return float(torch.cat([torch.zeros(1, dtype=torch.float64), *errors]).max())


def budget(
    plain: Sequence[Tensor], truth: Sequence[Tensor], batch: MicroBatch | None = None
) -> float:
    """What an fp32 computation may get wrong: twice what plain torch does, and one rounding.

    The rounding is that of the largest value, for scores of at least log V: they are differences
    of numbers up to that, which a lucky draw may give plain torch exactly.
    """
    largest = max((float(t.detach().abs().max()) for t in truth if t.numel()), default=0.0)
    if batch is not None:
        largest = max(largest, math.log(batch.vocab_size))
    return 2 * largest_error(plain, truth) + torch.finfo(torch.float32).eps * largest


def assert_exact(results: PerSample, truth: PerSample, plain: PerSample, batch: MicroBatch) -> None:
    """All scores within the budget, NaN nowhere."""
    for name, values in results.items():
        assert [v.shape for v in values] == [t.shape for t in truth[name]], name
        error, allowed = largest_error(values, truth[name]), budget(plain[name], truth[name], batch)
        assert error <= allowed, f"{name}: {error} > {allowed}"


# Every layout


batches_in_layouts = micro_batches().flatmap(
    lambda batch: st.tuples(
        st.just(batch),
        layout_cases(st.just((batch.total_lengths, batch.response_lengths)), max_cp=4),
    )
)


@given(batches_in_layouts, st.sampled_from([1.0, 0.7, 1.9]), st.integers(0, 3))
@settings(max_examples=120)
def test_each_rank_scores_its_rows_and_together_they_are_the_unsharded_ones(
    drawn: tuple[MicroBatch, LayoutCase], temperature: float, extra_columns: int
) -> None:
    batch, case = drawn
    assume(case.name != "zigzag" or case.cp_size > 1)  # without CP the entry points have no zigzag
    logits = random_logits(batch, seed=batch.vocab_size)
    truth = reference(batch, logits, temperature=temperature)
    plain = reference(batch, logits, temperature=temperature, dtype=torch.float32)
    config = config_of(case, temperature=temperature, vocab_size=batch.vocab_size)
    single = dataclasses.replace(config, qkv_format="thd")
    whole = score(batch, packed(batch), on_rank(packed(batch), logits), config=single)
    assert_exact(whole, truth, plain, batch)
    parts = []
    for rank in range(case.cp_size):
        local = on_rank(case, logits, rank, columns=batch.vocab_size + extra_columns)
        own = score(batch, case, local, rank=rank, config=config)
        assert list(own) == list(SCORE_NAMES)
        for name, values in own.items():
            mine = held(case, rank, truth[name])
            assert [len(v) for v in values] == [len(t) for t in mine]
            assert largest_error(values, mine) <= budget(plain[name], truth[name], batch)
        parts.append(own)
    for name in SCORE_NAMES:
        together = case.layout().assemble([own[name] for own in parts])
        assert all(torch.equal(a, b) for a, b in zip(together, whole[name], strict=True)), name


FOUR = make_batch(np.random.default_rng(0), num_samples=4, max_response=9)


def every_case(batch: MicroBatch) -> list[LayoutCase]:
    """One case of every layout, with each of its paddings."""
    total, response = batch.total_lengths, batch.response_lengths
    longest = max(total)
    odd = [n + 3 * (i % 2) for i, n in enumerate(total)]
    cases = [
        LayoutCase("packed", total, response),
        LayoutCase("packed", total, response, padded_lengths=odd),
        LayoutCase("padded", total, response, max_seq_len=longest),
        LayoutCase("padded", total, response, max_seq_len=longest + 5),
    ]
    for cp in (2, 4):
        even = [(-(-n // (2 * cp)) + i % 2) * 2 * cp for i, n in enumerate(total)]
        stream = (-(-sum(odd) // cp) + 2) * cp
        cases += [
            LayoutCase("zigzag", total, response, cp),
            LayoutCase("zigzag", total, response, cp, padded_lengths=even),
            LayoutCase("zigzag", total, response, cp, max_seq_len=longest + 1),
            LayoutCase("contiguous", total, response, cp),
            LayoutCase("contiguous", total, response, cp, None, odd, stream),
            LayoutCase("contiguous", total, response, cp, max_seq_len=longest + 1),
        ]
    return cases


def case_id(case: LayoutCase) -> str:
    padded = "-padded_lengths" if case.padded_lengths else ""
    return f"{case.name}-{case.qkv_format}-cp{case.cp_size}{padded}"


in_every_layout = pytest.mark.parametrize("case", every_case(FOUR), ids=case_id)


@in_every_layout
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_and_gradient_of_each_type(case: LayoutCase, dtype: torch.dtype) -> None:
    temperature = 0.8
    sequences = [x.requires_grad_() for x in random_logits(FOUR, 1, dtype)]
    weights = random_weights(FOUR, seed=2)

    def objective(scores: PerSample, own: PerSample) -> Tensor:
        pairs = [
            (a.double() * b).sum() for k in scores for a, b in zip(scores[k], own[k], strict=True)
        ]
        return torch.stack(pairs).sum()

    exact, exact_gradient = scores_and_gradient(FOUR, sequences, weights, torch.float64)
    plain, plain_gradient = scores_and_gradient(FOUR, sequences, weights, torch.float32)
    # Both round the same fp32 gradient to the logits' type: that costs half a unit of each entry.
    allowed = budget(plain_gradient, exact_gradient)
    half_unit = torch.finfo(dtype).eps / 2
    for rank in range(case.cp_size):
        columns = FOUR.vocab_size + 3
        logits = on_rank(case, [x.detach() for x in sequences], rank, columns=columns)
        before = logits.clone()
        logits.requires_grad_()
        config = config_of(case, temperature=temperature, vocab_size=FOUR.vocab_size)
        own = score(FOUR, case, logits, rank=rank, config=config)
        for name, values in own.items():
            assert all(v.dtype == torch.float32 for v in values)
            mine = held(case, rank, exact[name])
            assert largest_error(values, mine) <= budget(plain[name], exact[name], FOUR), name
        mine = {name: held(case, rank, weights[name]) for name in SCORE_NAMES}
        (gradient,) = torch.autograd.grad(objective(own, mine), logits)
        assert gradient.dtype == dtype
        wanted = on_rank(case, scored_only(FOUR, exact_gradient), rank, columns=columns, filler=0)
        error = (gradient.double() - wanted).abs()
        assert (error <= allowed + half_unit * wanted.abs()).all()
        assert (gradient[wanted == 0] == 0).all()
        assert torch.equal(logits.detach().nan_to_num(-1), before.nan_to_num(-1))


def random_weights(batch: MicroBatch, seed: int) -> PerSample:
    """float64 factors of every score, the gradients that a loss would send into them."""
    rng = torch.Generator().manual_seed(seed)
    return {
        name: [torch.randn(n, generator=rng).double() for n in batch.response_lengths]
        for name in SCORE_NAMES
    }


def scores_and_gradient(
    batch: MicroBatch,
    sequences: Sequence[Tensor],
    weights: PerSample,
    dtype: torch.dtype,
    temperature: float = 0.8,
) -> tuple[PerSample, list[Tensor]]:
    """The reference's scores in a type and the gradient, in it too, of their weighted sum."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in sequences]
    scores = reference(batch, leaves, dtype=dtype, temperature=temperature)
    total = torch.zeros((), dtype=dtype)
    for name in SCORE_NAMES:
        for values, factors in zip(scores[name], weights[name], strict=True):
            total = total + (values * factors.to(dtype)).sum()
    gradient = list(torch.autograd.grad(total, leaves))
    return {k: [v.detach() for v in vs] for k, vs in scores.items()}, gradient


def scored_only(batch: MicroBatch, gradient: Sequence[Tensor]) -> list[Tensor]:
    """The gradients, which must be zero already wherever no response token is scored."""
    for i, values in enumerate(gradient):
        first = batch.total_lengths[i] - batch.response_lengths[i] - 1
        assert (values[:first] == 0).all()
        assert (values[first + batch.response_lengths[i] :] == 0).all()
    return list(gradient)


@in_every_layout
def test_float64_passes_through(case: LayoutCase) -> None:
    logits = random_logits(FOUR, 3, torch.float64)
    truth = reference(FOUR, logits)
    # Both sum V terms of at most the largest |x|, in any order.
    largest = max(float(x.abs().max()) for x in logits)
    rounding = torch.finfo(torch.float64).eps * FOUR.vocab_size * largest
    for rank in range(case.cp_size):
        own = score(FOUR, case, on_rank(case, logits, rank), rank=rank)
        for name, values in own.items():
            assert all(v.dtype == torch.float64 for v in values)
            assert largest_error(values, held(case, rank, truth[name])) <= rounding, name


@in_every_layout
def test_max_seq_lens_as_a_number_a_list_or_the_logits_own(case: LayoutCase) -> None:
    logits = random_logits(FOUR, 4)
    local = on_rank(case, logits)
    expected = score(FOUR, case, local)
    alternatives: list[Any] = [None]
    if case.max_seq_len is not None:
        widths = [case.max_seq_len] * 4
        alternatives += [widths, tuple(widths), np.array(widths), torch.tensor(widths)]
    for given_lengths in alternatives:
        assert_same_bits(score(FOUR, case, local, max_seq_lens=given_lengths), expected)


def assert_same_bits(results: PerSample, expected: PerSample) -> None:
    assert list(results) == list(expected)
    for name in expected:
        for a, b in zip(results[name], expected[name], strict=True):
            assert torch.equal(a, b), name


def test_max_seq_lens_as_a_numpy_integer() -> None:
    case = LayoutCase("padded", FOUR.total_lengths, FOUR.response_lengths, max_seq_len=16)
    logits = on_rank(case, random_logits(FOUR, 4))
    width: Any = np.int64(16)
    assert_same_bits(score(FOUR, case, logits, max_seq_lens=width), score(FOUR, case, logits))


@pytest.mark.parametrize("cp_size", [1, 2])
def test_a_packed_stream_may_be_padded_at_its_end(cp_size: int) -> None:
    lengths = (FOUR.total_lengths, FOUR.response_lengths)
    case = packed(FOUR) if cp_size == 1 else LayoutCase("zigzag", *lengths, cp_size)
    logits = on_rank(case, random_logits(FOUR, 5))
    longer = torch.cat([logits, torch.full((1, 7, logits.shape[2]), torch.nan)], dim=1)
    config = config_of(case, end_padding=True)
    assert_same_bits(score(FOUR, case, longer, config=config), score(FOUR, case, logits))
    with refused(f"expected {logits.shape[1]} rows, got {longer.shape[1]}"):  # nobody said so
        score(FOUR, case, longer)


def test_samples_padded_one_by_one_have_to_say_so() -> None:
    # Taken for padding at the end, it would shift every sample but the first.
    padded = [n + 3 for n in FOUR.total_lengths]
    case = LayoutCase("packed", FOUR.total_lengths, FOUR.response_lengths, padded_lengths=padded)
    logits = on_rank(case, random_logits(FOUR, 5))
    with refused(f"expected {sum(FOUR.total_lengths)} rows, got {sum(padded)}"):
        score(FOUR, packed(FOUR), logits)


def test_bshd_logits_in_any_memory_order() -> None:
    case = LayoutCase("padded", FOUR.total_lengths, FOUR.response_lengths, max_seq_len=16)
    logits = on_rank(case, random_logits(FOUR, 6))
    expected = score(FOUR, case, logits)
    sequence_first = logits.transpose(0, 1).contiguous().requires_grad_()
    results = score(FOUR, case, sequence_first.transpose(0, 1))
    assert_same_bits(results, expected)
    torch.cat(results["log_probs"]).sum().backward()
    assert sequence_first.grad is not None
    assert int((sequence_first.grad != 0).any(dim=2).sum()) > 0


# Kinds of rows


def test_each_kind_of_row() -> None:
    results = score(FOUR, packed(FOUR), on_rank(packed(FOUR), random_logits(FOUR, 7)))
    flat = {name: torch.cat(values) for name, values in results.items()}
    sizes = [len(ids) if ids else 0 for rows in FOUR.supports for ids in rows]
    free = torch.tensor([size == 0 for size in sizes])
    lone = torch.tensor([size == 1 for size in sizes])
    rest = ~(free | lone)
    assert free.any()
    assert lone.any()
    assert rest.any()
    assert torch.equal(flat["log_probs"][free], flat["full_log_probs"][free])
    assert torch.equal(flat["support_entropy"][free], flat["entropy"][free])
    assert (flat["log_support_mass"][free] == 0).all()
    assert (flat["log_probs"][lone] == 0).all()
    assert (flat["support_entropy"][lone] == 0).all()
    assert (flat["log_support_mass"][~free] < 0).all()
    assert (flat["log_probs"][rest] > flat["full_log_probs"][rest]).all()


@in_every_layout
def test_without_masks_it_is_log_softmax(case: LayoutCase) -> None:
    logits = random_logits(FOUR, 8)
    config = config_of(case, temperature=0.6)

    def log_softmax(dtype: torch.dtype) -> list[Tensor]:
        results = []
        for i, rows in enumerate(logits):
            first = FOUR.total_lengths[i] - FOUR.response_lengths[i] - 1
            scaled = rows[first:-1].to(dtype) / 0.6
            sampled = torch.tensor(FOUR.sampled(i))
            results.append(torch.log_softmax(scaled, -1)[range(len(sampled)), sampled])
        return results

    truth, plain = log_softmax(torch.float64), log_softmax(torch.float32)
    for rank in range(case.cp_size):
        local = on_rank(case, logits, rank)
        own = score(FOUR, case, local, rank=rank, config=config, rollout_sampling_mask=None)
        mine = held(case, rank, truth)
        assert largest_error(own["log_probs"], mine) <= budget(plain, truth, FOUR)
        assert_same_bits({"a": own["log_probs"]}, {"a": own["full_log_probs"]})
        assert all((v == 0).all() for v in own["log_support_mass"])


def test_missing_tokens_are_included_where_asked() -> None:
    case = packed(FOUR)
    logits = on_rank(case, random_logits(FOUR, 9))
    thinned = []
    for i, rows in enumerate(FOUR.supports):
        sampled = FOUR.sampled(i)
        kept = [ids and ([j for j in ids if j != sampled[r]] or ids) for r, ids in enumerate(rows)]
        thinned.append(RolloutSamplingMask.from_mask_list(kept, allow_unrestricted=True))
    with pytest.raises(MissingTokenError):
        score(FOUR, case, logits, rollout_sampling_mask=thinned)
    config = config_of(case, on_missing_token="include")
    results = score(FOUR, case, logits, config=config, rollout_sampling_mask=thinned)
    assert_same_bits(results, score(FOUR, case, logits))


def test_nothing_to_score_stays_in_the_graph() -> None:
    for lengths in (([3, 1], [0, 0]), ([], [])):
        batch = make_batch(np.random.default_rng(0), lengths)
        logits = torch.zeros(1, sum(lengths[0]), batch.vocab_size, requires_grad=True)
        results = score(batch, packed(batch), logits, with_entropy=True)
        assert all(
            [v.shape for v in values] == [(0,)] * len(lengths[0]) for values in results.values()
        )
        for values in results.values():
            for empty in values:
                (gradient,) = torch.autograd.grad(empty.sum(), logits, retain_graph=True)
                assert (gradient == 0).all()


# Metrics and gradients


@pytest.mark.parametrize(
    ("options", "differentiable", "metrics"),
    [
        ({"scores": ()}, {"log_probs"}, set()),
        ({"with_entropy": True}, {"log_probs", "entropy"}, set()),
        ({"with_entropy": True, "entropy_requires_grad": False}, {"log_probs"}, {"entropy"}),
        ({"scores": ("entropy",)}, {"log_probs", "entropy"}, set()),
        (
            {"with_entropy": True, "entropy_requires_grad": False, "scores": ("support_entropy",)},
            {"log_probs", "support_entropy"},
            {"entropy"},
        ),
        (
            {"scores": ["full_log_probs", "log_support_mass", "log_probs"]},
            {"log_probs", "full_log_probs", "log_support_mass"},
            set(),
        ),
    ],
)
def test_which_scores_come_and_which_have_a_gradient(
    options: dict[str, Any], differentiable: set[str], metrics: set[str]
) -> None:
    case = packed(FOUR)
    logits = on_rank(case, random_logits(FOUR, 10)).requires_grad_()
    results = score(FOUR, case, logits, **({"scores": ()} | options))
    assert set(results) == differentiable | metrics
    everything = score(FOUR, case, logits)
    for name, values in results.items():
        assert all(v.requires_grad == (name in differentiable) for v in values), name
        assert_same_bits({name: values}, {name: everything[name]})
    total = torch.stack([v.sum() for name in differentiable for v in results[name]]).sum()
    expected = torch.stack([v.sum() for name in differentiable for v in everything[name]]).sum()
    (gradient,) = torch.autograd.grad(total, logits)
    (wanted,) = torch.autograd.grad(expected, logits)
    # The same terms in both, but for those that are zero: they may be added in another order.
    rounding = 4 * torch.finfo(torch.float32).eps * float(wanted.abs().max())
    assert largest_error([gradient.nan_to_num(1)], [wanted.nan_to_num(1)]) <= rounding


def test_logits_without_a_gradient_give_none() -> None:
    case = packed(FOUR)
    results = score(FOUR, case, on_rank(case, random_logits(FOUR, 11)))
    assert not any(v.requires_grad for values in results.values() for v in values)


# Plans


@in_every_layout
def test_a_plan_built_before_gives_the_same_bits(case: LayoutCase) -> None:
    logits = random_logits(FOUR, 12)
    for rank in range(case.cp_size):
        local = on_rank(case, logits, rank)
        plan = ReplayPlan.build(
            FOUR.tokens,
            FOUR.masks,
            case.layout(rank),
            parallel=parallel_state(cp_rank=rank, cp_size=case.cp_size),
            vocab_size=FOUR.vocab_size,
            device="cpu",
        )
        expected = score(FOUR, case, local, rank=rank)
        for _ in range(2):
            unread: dict[str, Any] = {"unconcat_tokens": [], "rollout_sampling_mask": None}
            assert_same_bits(score(FOUR, case, local, rank=rank, plan=plan, **unread), expected)


def test_a_plan_of_another_batch_or_rank_is_refused() -> None:
    case = LayoutCase("zigzag", FOUR.total_lengths, FOUR.response_lengths, 2)

    def plan_of(batch: MicroBatch, case: LayoutCase, rank: int) -> ReplayPlan:
        return ReplayPlan.build(
            batch.tokens,
            batch.masks,
            case.layout(rank),
            parallel=parallel_state(cp_rank=rank, cp_size=case.cp_size),
            vocab_size=batch.vocab_size,
            device="cpu",
        )

    shorter = [n - 1 for n in FOUR.total_lengths], [n - 1 for n in FOUR.response_lengths]
    other = make_batch(np.random.default_rng(1), shorter)
    logits = on_rank(case, random_logits(FOUR, 13))
    for plan in (
        plan_of(FOUR, case, 1),
        plan_of(FOUR, dataclasses.replace(case, name="contiguous"), 0),
        plan_of(FOUR, packed(FOUR), 0),
        plan_of(other, LayoutCase("zigzag", *shorter, 2), 0),
    ):
        with refused("the plan was built for another micro-batch or rank"):
            score(FOUR, case, logits, plan=plan)
    config = config_of(case, vocab_size=FOUR.vocab_size)
    with refused("logits columns do not match"):
        score(FOUR, case, logits[:, :, :-1], plan=plan_of(FOUR, case, 0), config=config)
    included = config_of(case, vocab_size=FOUR.vocab_size, on_missing_token="include")
    with refused("the plan was built with other options: .* 'include', got .* 'raise'"):
        score(FOUR, case, logits, plan=plan_of(FOUR, case, 0), config=included)


def test_a_plan_of_another_vocabulary_is_refused() -> None:
    case = packed(FOUR)
    wider = FOUR.vocab_size + 2
    logits = on_rank(case, random_logits(FOUR, 13), columns=wider, filler=0)
    plan = ReplayPlan.build(
        FOUR.tokens,
        FOUR.masks,
        case.layout(),
        parallel=parallel_state(),
        vocab_size=wider,
        device="cpu",
    )
    config = config_of(case, vocab_size=FOUR.vocab_size)
    with refused(f"{FOUR.vocab_size}.* got .*{wider}"):
        score(FOUR, case, logits, config=config, plan=plan)


# The bits of an engine


@in_every_layout
@pytest.mark.parametrize(
    ("dtype", "model_dtype"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
    ],
)
def test_true_on_policy_has_the_bits_of_log_softmax_in_the_models_type(
    case: LayoutCase, dtype: torch.dtype, model_dtype: torch.dtype | None
) -> None:
    sequences = random_logits(FOUR, 20, dtype)
    weights = random_weights(FOUR, seed=21)["log_probs"]
    leaves = [x.clone().requires_grad_() for x in sequences]
    expected, full = [], []
    for i, rows in enumerate(leaves):
        first = FOUR.total_lengths[i] - FOUR.response_lengths[i] - 1
        scaled = rows[first:-1].to(model_dtype or dtype) / 0.7
        outside = ~torch.from_numpy(FOUR.dense_support(i))
        sampled = torch.tensor(FOUR.sampled(i))[:, None]
        masked = scaled.masked_fill(outside, -torch.inf)
        expected.append(torch.log_softmax(masked, -1).gather(1, sampled)[:, 0])
        full.append(torch.log_softmax(scaled, -1).gather(1, sampled)[:, 0])
    loss = [(a * w.to(a.dtype)).sum() for a, w in zip(expected, weights, strict=True)]
    gradient = torch.autograd.grad(torch.stack(loss).sum(), leaves)
    config = config_of(
        case,
        temperature=0.7,
        vocab_size=FOUR.vocab_size,
        true_on_policy=True,
        model_dtype=model_dtype,
    )
    columns = FOUR.vocab_size + 2
    for rank in range(case.cp_size):
        logits = on_rank(case, sequences, rank, columns=columns).requires_grad_()
        own = score(FOUR, case, logits, rank=rank, config=config)
        wanted = {
            "log_probs": held(case, rank, expected),
            "full_log_probs": held(case, rank, full),
        }
        assert_same_bits({k: own[k] for k in wanted}, wanted)
        assert all(v.dtype == (model_dtype or dtype) for k in wanted for v in own[k])
        mine = held(case, rank, weights)
        pairs = zip(own["log_probs"], mine, strict=True)
        loss = [(a * w.to(a.dtype)).sum() for a, w in pairs]
        (own_gradient,) = torch.autograd.grad(torch.stack(loss).sum(), logits)
        assert torch.equal(own_gradient, on_rank(case, gradient, rank, columns=columns, filler=0))


# Rows of the responses


@in_every_layout
def test_get_responses_gives_raw_rows_with_their_tokens(case: LayoutCase) -> None:
    sequences = random_logits(FOUR, 14)
    for rank in range(case.cp_size):
        logits = on_rank(case, sequences, rank).requires_grad_()
        rows = list(responses(case, logits, rank))
        assert len(rows) == 4
        for i, (logits_rows, target_tokens, response_indices) in enumerate(rows):
            own = [s for s in case.scored(rank) if s.sample == i]
            assert target_tokens.dtype == response_indices.dtype == torch.int64
            assert response_indices.tolist() == [s.response_index for s in own]
            assert target_tokens.tolist() == [FOUR.sampled(i)[s.response_index] for s in own]
            prompt = FOUR.total_lengths[i] - FOUR.response_lengths[i]
            positions = [prompt + s.response_index - 1 for s in own]
            assert torch.equal(logits_rows, sequences[i][positions])
            if len(case.layout(rank).spans[i]) == 1:
                first = logits.detach().view(-1, logits.shape[2])[own[0].local_row]
                assert logits_rows.data_ptr() == first.data_ptr()
            (gradient,) = torch.autograd.grad(logits_rows.sum(), logits)
            touched = gradient.view(-1, gradient.shape[2])[:, 0].nonzero().flatten().tolist()
            assert touched == [s.local_row for s in own]


def responses(case: LayoutCase, logits: Tensor, rank: int = 0, **options: Any) -> Any:
    arguments: dict[str, Any] = {
        "unconcat_tokens": FOUR.tokens,
        "total_lengths": FOUR.total_lengths,
        "response_lengths": FOUR.response_lengths,
        "config": config_of(case, temperature=0.3, vocab_size=FOUR.vocab_size),
        "parallel": parallel_state(cp_rank=rank, cp_size=case.cp_size),
        "max_seq_lens": case.max_seq_len,
        "padded_lengths": case.padded_lengths,
    }
    return get_responses(logits, **(arguments | options))


def test_consecutive_rows_of_two_chunks_are_a_view_too() -> None:
    # Rank 0 of zigzag holds positions 0, 1, 6 and 7 in consecutive rows; the last scores nothing.
    batch = make_batch(np.random.default_rng(0), ([8], [7]))
    case = LayoutCase("zigzag", [8], [7], 2)
    logits = on_rank(case, random_logits(batch, 24))
    lengths = {"total_lengths": [8], "response_lengths": [7]}
    ((rows, _, indices),) = responses(case, logits, unconcat_tokens=batch.tokens, **lengths)
    assert indices.tolist() == [0, 1, 6]
    assert rows.data_ptr() == logits.data_ptr()


def test_get_responses_of_values() -> None:
    values = torch.arange(float(sum(FOUR.total_lengths))).view(1, -1, 1)
    rows = [r.logits_rows for r in responses(packed(FOUR), values)]
    end = 0
    for i, own in enumerate(rows):
        end += FOUR.total_lengths[i]
        assert own.flatten().tolist() == list(range(end - FOUR.response_lengths[i] - 1, end - 1))


def test_get_responses_checks_before_it_yields() -> None:
    case = packed(FOUR)
    logits = on_rank(case, random_logits(FOUR, 15))
    with refused("tokens do not have the declared length", sample=1):
        responses(
            case,
            logits,
            unconcat_tokens=[FOUR.tokens[0], FOUR.tokens[1][1:], *FOUR.tokens[2:]],
        )
    with refused("unconcat_tokens are not one for each sample"):
        responses(case, logits, unconcat_tokens=FOUR.tokens[:3])
    with refused("logits rows do not match the layout"):
        responses(case, logits[:, :-1])
    with refused("logits are not a thd batch"):
        responses(case, logits[0])


# Contiguous results in the zigzag layout


def run_in_turn(
    monkeypatch: pytest.MonkeyPatch, cp_size: int, work: Callable[[int, Any], Any]
) -> list[tuple[Any, list[str]]]:
    """What `work(rank, group)` returns on each CP rank, and which all-reduces it entered.

    The ranks run one after another, twice: the first time to note what each gives to its
    all-reduces, the second time with the results. What they give must not depend on what they get.
    """
    given: list[list[Tensor]] = [[] for _ in range(cp_size)]
    entered: list[list[str]] = [[] for _ in range(cp_size)]
    reduce = {dist.ReduceOp.MAX: torch.amax, dist.ReduceOp.SUM: torch.sum}

    def note(values: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        given[group.rank].append(values.clone())

    def answer(values: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        call = len(entered[group.rank])
        entered[group.rank].append(op.name)
        assert torch.equal(values, given[group.rank][call])
        values.copy_(reduce[op](torch.stack([tensors[call] for tensors in given]), dim=0))

    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group: cp_size)
    groups = [SimpleNamespace(rank=rank) for rank in range(cp_size)]
    monkeypatch.setattr(dist, "all_reduce", note)
    for rank, group in enumerate(groups):
        work(rank, group)
    monkeypatch.setattr(dist, "all_reduce", answer)
    results = [work(rank, group) for rank, group in enumerate(groups)]
    assert [len(ops) for ops in entered] == [len(tensors) for tensors in given]
    return list(zip(results, entered, strict=True))


@pytest.mark.parametrize("cp_size", [2, 4])
@pytest.mark.parametrize("qkv_format", ["thd", "bshd"])
@pytest.mark.parametrize("told_width", [True, False])
def test_redistribution_gives_zigzag_rows_and_their_gradient(
    monkeypatch: pytest.MonkeyPatch,
    cp_size: int,
    qkv_format: Literal["thd", "bshd"],
    told_width: bool,
) -> None:
    lengths = ([3, 12, 6, 4], [2, 11, 1, 0])  # some ranks hold nothing of the contiguous rows
    batch = make_batch(np.random.default_rng(1), lengths)
    # bshd: the widths are such that no layout rounds them up
    width = 16 if qkv_format == "bshd" else None
    contiguous = LayoutCase("contiguous", *lengths, cp_size, max_seq_len=width)
    zigzag = LayoutCase("zigzag", *lengths, cp_size, max_seq_len=width)
    config = config_of(contiguous, redistribute_to_zigzag=True)
    sequences = random_logits(batch, 16, torch.float64)
    weights = [torch.randn(n, dtype=torch.float64) for n in batch.response_lengths]

    def work(rank: int, group: Any) -> tuple[PerSample, Tensor]:
        logits = on_rank(contiguous, sequences, rank).requires_grad_()
        state = dataclasses.replace(parallel_state(cp_rank=rank, cp_size=cp_size), cp_group=group)
        results = score(
            batch,
            contiguous,
            logits,
            config=config,
            parallel=state,
            scores=("full_log_probs",),
            with_entropy=True,
            entropy_requires_grad=False,
            max_seq_lens=width if told_width else None,
        )
        assert not any(v.requires_grad for v in results["entropy"])
        own = zip(results["log_probs"], held(zigzag, rank, weights), strict=True)
        loss = torch.stack([(a * b).sum() for a, b in own]).sum()
        return results, torch.autograd.grad(loss, logits)[0]

    whole = on_rank(packed(batch), sequences).requires_grad_()
    expected = score(batch, packed(batch), whole)
    loss = [(a * b).sum() for a, b in zip(expected["log_probs"], weights, strict=True)]
    (gradient,) = torch.autograd.grad(torch.stack(loss).sum(), whole)
    by_sample = list(torch.split(gradient[0], batch.total_lengths))
    for rank, ((results, own_gradient), entered) in enumerate(
        run_in_turn(monkeypatch, cp_size, work)
    ):
        assert entered == ["MAX", "SUM", "SUM"]  # agreement, results, their gradients
        assert set(results) == {"log_probs", "full_log_probs", "entropy"}
        mine = {k: held(zigzag, rank, vs) for k, vs in expected.items() if k in results}
        assert_same_bits(results, {k: mine[k] for k in results})
        assert torch.equal(own_gradient, on_rank(contiguous, by_sample, rank, filler=0))


@pytest.mark.parametrize("grad_mode", [True, False])
def test_redistributed_results_take_part_in_the_graph_wherever_grad_mode_is_on(
    monkeypatch: pytest.MonkeyPatch, grad_mode: bool
) -> None:
    # Also where this rank's logits need none: another rank's may, and all enter the backward.
    case = LayoutCase("contiguous", FOUR.total_lengths, FOUR.response_lengths, 2)
    sequences = random_logits(FOUR, 23)

    def work(rank: int, group: Any) -> list[bool]:
        config = config_of(case, redistribute_to_zigzag=True)
        state = dataclasses.replace(parallel_state(cp_rank=rank, cp_size=2), cp_group=group)
        logits = on_rank(case, sequences, rank)
        with torch.set_grad_enabled(grad_mode):
            results = score(FOUR, case, logits, config=config, parallel=state)
        return [v.requires_grad for values in results.values() for v in values]

    for requires_grad, _ in run_in_turn(monkeypatch, 2, work):
        assert set(requires_grad) == {grad_mode}


def test_redistribution_keeps_the_type_of_each_score(monkeypatch: pytest.MonkeyPatch) -> None:
    case = LayoutCase("contiguous", FOUR.total_lengths, FOUR.response_lengths, 2)
    sequences = random_logits(FOUR, 22, torch.bfloat16)

    def types(redistribute: bool, rank: int, group: Any) -> dict[str, set[torch.dtype]]:
        config = config_of(case, true_on_policy=True, redistribute_to_zigzag=redistribute)
        state = dataclasses.replace(parallel_state(cp_rank=rank, cp_size=2), cp_group=group)
        results = score(FOUR, case, on_rank(case, sequences, rank), config=config, parallel=state)
        return {name: {v.dtype for v in values} for name, values in results.items()}

    stayed, moved = (
        run_in_turn(monkeypatch, 2, lambda rank, group, r=r: types(r, rank, group))
        for r in (False, True)
    )
    assert [types for types, _ in moved] == [types for types, _ in stayed]


def test_redistribution_of_a_batch_without_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = make_batch(np.random.default_rng(0), ([], []))

    def work(rank: int, group: Any) -> PerSample:
        state = dataclasses.replace(parallel_state(cp_rank=rank, cp_size=2), cp_group=group)
        return get_log_probs_and_entropy(
            torch.zeros(0, 4, 8),
            unconcat_tokens=empty.tokens,
            total_lengths=[],
            response_lengths=[],
            config=ScoringConfig(
                qkv_format="bshd", cp_layout="contiguous", redistribute_to_zigzag=True
            ),
            parallel=state,
            rollout_sampling_mask=empty.masks,
        )

    for results, _ in run_in_turn(monkeypatch, 2, work):
        assert results == {"log_probs": []}


def test_without_cp_there_is_nothing_to_redistribute() -> None:
    case = packed(FOUR)
    logits = on_rank(case, random_logits(FOUR, 17))
    config = ScoringConfig(cp_layout="contiguous", redistribute_to_zigzag=True)
    assert_same_bits(score(FOUR, case, logits, config=config), score(FOUR, case, logits))


def test_a_group_of_one_enters_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective was entered")

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    group: Any = SimpleNamespace(rank=0)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    state = dataclasses.replace(parallel_state(), tp_group=group, cp_group=group)
    case = packed(FOUR)
    logits = on_rank(case, random_logits(FOUR, 18))
    config = ScoringConfig(cp_layout="contiguous", redistribute_to_zigzag=True)
    results = score(FOUR, case, logits, parallel=state, config=config)
    assert_same_bits(results, score(FOUR, case, logits))


# Refusals: before any collective but that in which ranks tell whether they have refused

SMALL = make_batch(np.random.default_rng(4), ([6, 3, 5], [4, 0, 3]), vocab_size=12)
THD = torch.zeros(1, 14, 6)  # one of two vocab shards
BSHD = torch.zeros(3, 6, 6)


@pytest.mark.parametrize(
    ("options", "match", "sample", "row"),
    [
        ({"total_lengths": [6, 3]}, "response_lengths does not have one entry", None, None),
        ({"response_lengths": [4, 0]}, "response_lengths does not have one entry", None, None),
        ({"response_lengths": [4, 3, 3]}, "response length does not fit", 1, None),
        ({"padded_lengths": [6, 4]}, "padded_lengths does not have one entry", None, None),
        ({"padded_lengths": [6, 2, 6]}, "padded length does not fit", 1, None),
        ({"padded_lengths": [8, 3, 5]}, "expected 16 rows, got 14", None, None),
        ({"unconcat_tokens": SMALL.tokens[:2]}, "not one for each sample", None, None),
        (
            {"unconcat_tokens": [SMALL.tokens[0][1:], *SMALL.tokens[1:]]},
            "tokens do not have the declared length: expected 6 tokens, got 5",
            0,
            None,
        ),
        (
            {"unconcat_tokens": [*SMALL.tokens[:2], np.array([0, 1, 2, 12, 3])]},
            "response token out of the vocabulary",
            2,
            1,
        ),
        ({"rollout_sampling_mask": SMALL.masks[:2]}, "masks are not one for each", None, None),
        (
            {"rollout_sampling_mask": [*SMALL.masks[:2], SMALL.masks[2].truncate(2)]},
            "does not have the response's length: expected 3 rows, got 2",
            2,
            None,
        ),
        (
            {"rollout_sampling_mask": [*SMALL.masks[:2], RolloutSamplingMask.forced([0, 12, 0])]},
            "support id out of range",
            2,
            1,
        ),
        ({"logits": THD[0]}, r"not a thd batch: expected shape \[1, .* \(14, 6\)", None, None),
        ({"logits": THD.expand(2, -1, -1)}, "not a thd batch", None, None),
        ({"logits": THD[None]}, "not a thd batch", None, None),
        ({"logits": THD[:, :13]}, "expected 14 rows, got 13", None, None),
        ({"logits": THD.long()}, "not a matrix of logits: .* torch.int64", None, None),
        ({"scores": ("logprobs",)}, r"unknown score in scores: .* got \['logprobs'\]", None, None),
        ({"config": ScoringConfig(vocab_size=13)}, "too narrow for the vocabulary", None, None),
    ],
)
def test_refusals_in_thd(
    options: dict[str, Any], match: str, sample: int | None, row: int | None
) -> None:
    options = dict(options)
    case = packed(SMALL)
    logits = options.pop("logits", THD)
    with agreeing_peers() as told, refused(match, sample=sample, row=row):
        score(SMALL, case, logits, parallel=parallel_state(tp_rank=1, tp_size=2), **options)
    assert len(told) == 1


@pytest.mark.parametrize(
    ("options", "match", "sample"),
    [
        ({"logits": BSHD[:2]}, r"not a bshd batch: expected shape \[3, .* \(2, 6, 6\)", None),
        ({"logits": BSHD[0]}, "not a bshd batch", None),
        ({"logits": BSHD[:, :5]}, "sample longer than max_seq_len", 0),
        ({"max_seq_lens": 7}, "expected 21 rows, got 18", None),
        ({"max_seq_lens": 5}, "sample longer than max_seq_len", 0),
        ({"max_seq_lens": [6, 6]}, "max_seq_lens are not those of one padded batch", None),
        ({"max_seq_lens": [6, 6, 7]}, "max_seq_lens are not those of one padded batch", None),
        ({"max_seq_lens": True}, "max_seq_len is not a count", None),
        ({"max_seq_lens": -6}, "max_seq_len is not a count", None),
        ({"max_seq_lens": 6.0}, "max_seq_lens must be integers", None),
    ],
)
def test_refusals_in_bshd(options: dict[str, Any], match: str, sample: int | None) -> None:
    options = dict(options)
    case = LayoutCase("padded", SMALL.total_lengths, SMALL.response_lengths, max_seq_len=6)
    logits = options.pop("logits", BSHD)
    options.setdefault("max_seq_lens", None)
    with agreeing_peers() as told, refused(match, sample=sample):
        score(SMALL, case, logits, parallel=parallel_state(tp_rank=1, tp_size=2), **options)
    assert told == [[1, 0, 0, 0]]


def test_refusals_that_have_a_class_of_their_own() -> None:
    case = packed(SMALL)
    parallel = parallel_state(tp_rank=1, tp_size=2)
    with refused("no sampling mask for this sample", sample=1, kind=MissingMaskError):
        masks: list[Any] = [SMALL.masks[0], None, SMALL.masks[2]]
        score(SMALL, case, THD, parallel=parallel, rollout_sampling_mask=masks)
    wrong = RolloutSamplingMask.from_mask_list([[(y + 1) % 12] for y in SMALL.sampled(2)])
    with refused("not in its support", sample=2, row=0, kind=MissingTokenError):
        masks = [*SMALL.masks[:2], wrong]
        score(SMALL, case, THD, parallel=parallel, rollout_sampling_mask=masks)
    with refused("the triton backend cannot run here", kind=BackendError):
        config = ScoringConfig(backend="triton", vocab_size=SMALL.vocab_size)
        score(SMALL, case, THD, parallel=parallel, config=config)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"qkv_format": "sbhd"}, "unknown qkv_format: expected one of .* got 'sbhd'"),
        ({"qkv_format": None}, "unknown qkv_format"),
        ({"backend": "fortran"}, "unknown backend: expected one of .* got 'fortran'"),
        ({"vocab_size": -1}, "vocab_size is not a count"),
        ({"cp_layout": "ring"}, "unknown cp_layout: expected one of .* got 'ring'"),
        ({"on_missing_token": "skip"}, "unknown on_missing_token"),
        ({"redistribute_to_zigzag": True}, "nothing to redistribute"),
        ({"model_dtype": torch.bfloat16}, "model_dtype without true_on_policy"),
    ],
)
def test_config_refusals(options: dict[str, Any], match: str) -> None:
    with refused(match):
        ScoringConfig(**options)


def test_a_vocabulary_of_nothing_is_refused() -> None:
    config = ScoringConfig(vocab_size=0)
    with refused(
        r"response token out of the vocabulary: expected an id in \[0, 0\)", sample=0, row=0
    ):
        score(SMALL, packed(SMALL), torch.zeros(1, 14, 12), config=config)


def test_the_config_is_a_value() -> None:
    assert ScoringConfig() == ScoringConfig()
    assert ScoringConfig(temperature=0.5) != ScoringConfig()
    assert hash(ScoringConfig(vocab_size=3)) == hash(ScoringConfig(vocab_size=3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        ScoringConfig().temperature = 2.0  # type: ignore[misc]


@pytest.mark.parametrize("cp_layout", ["zigzag", "contiguous"])
def test_cp_logits_of_another_length_are_refused(
    cp_layout: Literal["zigzag", "contiguous"],
) -> None:
    # 5 rows a rank cannot be two chunks of each sample; contiguous: 2 x 5 rows are too few for 14.
    for rank in range(2):
        state = parallel_state(cp_rank=rank, cp_size=2)
        with refused("do(es)? not (match|fit)"):
            score(
                SMALL,
                packed(SMALL),
                torch.zeros(1, 5, 12),
                config=ScoringConfig(cp_layout=cp_layout),
                parallel=state,
            )


def test_the_layout_is_the_one_that_the_config_names() -> None:
    # The same rows read in the other layout score other tokens.
    case = LayoutCase("zigzag", [8], [7], 2)
    batch = make_batch(np.random.default_rng(9), ([8], [7]))
    local = on_rank(case, random_logits(batch, 19))
    assert RowLayout.zigzag([8], [7], cp_rank=0, cp_size=2).row_counts == (3,)
    zigzag = score(batch, case, local)
    contiguous = score(batch, dataclasses.replace(case, name="contiguous"), local)
    assert [len(v) for v in zigzag["log_probs"]] == [3]
    assert [len(v) for v in contiguous["log_probs"]] == [4]


@pytest.mark.parametrize(
    "temperature", [0.0, -1.0, float("nan"), float("inf"), "hot", None, True, 1j]
)
def test_a_config_needs_a_temperature_above_zero(temperature: Any) -> None:
    with refused("temperature not above 0"):
        ScoringConfig(temperature=temperature)


def test_max_seq_lens_of_a_packed_stream_are_refused() -> None:
    case = packed(FOUR)
    logits = on_rank(case, random_logits(FOUR, 30))
    with refused("max_seq_lens of a packed stream"):
        score(FOUR, case, logits, max_seq_lens=64)


def test_a_single_further_score_may_be_a_string_and_the_entropy_a_metric() -> None:
    case = packed(FOUR)
    logits = on_rank(case, random_logits(FOUR, 31)).requires_grad_()
    results = score(FOUR, case, logits, scores="entropy", entropy_requires_grad=False)
    assert set(results) == {"log_probs", "entropy"}
    assert all(v.requires_grad for v in results["log_probs"])
    assert not any(v.requires_grad for v in results["entropy"])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"unconcat_tokens": torch.zeros(3, 5, dtype=torch.int64)}, "unconcat_tokens are not a"),
        ({"unconcat_tokens": None}, "unconcat_tokens are not a list"),
        ({"unconcat_tokens": 5}, "unconcat_tokens are not a list"),
        ({"rollout_sampling_mask": 7}, "sampling masks are not a list"),
        ({"rollout_sampling_mask": (m for m in SMALL.masks)}, "sampling masks are not a list"),
        ({"logits": np.zeros((1, 14, 12))}, "logits are no tensor"),
        ({"logits": torch.zeros(1, 14, 12).to_sparse()}, "logits are no tensor"),
        ({"config": None}, "config is something else: expected ScoringConfig"),
        ({"plan": 5}, "plan is something else: expected ReplayPlan"),
        ({"parallel": 5}, "parallel is something else: expected ParallelState"),
        ({"scores": 7}, "unknown score"),
    ],
)
def test_arguments_of_another_kind_are_refused(options: dict[str, Any], match: str) -> None:
    arguments: dict[str, Any] = {
        "logits": torch.zeros(1, 14, 12),
        "unconcat_tokens": SMALL.tokens,
        "total_lengths": SMALL.total_lengths,
        "response_lengths": SMALL.response_lengths,
        "config": ScoringConfig(),
        "rollout_sampling_mask": SMALL.masks,
        **options,
    }
    with pytest.raises(ReplayError, match=match):
        get_log_probs_and_entropy(arguments.pop("logits"), **arguments)


def test_a_plan_of_a_reference_pass_serves_training() -> None:
    case = packed(FOUR)
    for on_policy in (False, True):
        config = config_of(case, true_on_policy=on_policy)
        logits = on_rank(case, random_logits(FOUR, 32))
        with torch.inference_mode():
            plan = ReplayPlan.build(
                FOUR.tokens,
                FOUR.masks,
                case.layout(),
                parallel=parallel_state(),
                vocab_size=FOUR.vocab_size,
                device="cpu",
            )
            score(FOUR, case, logits, plan=plan, config=config)
        trained = logits.clone().requires_grad_()
        results = score(FOUR, case, trained, plan=plan, config=config)
        torch.cat(results["log_probs"]).sum().backward()
        assert trained.grad is not None
