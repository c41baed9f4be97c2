"""Supports from weights and logits, and the reference sampler in both cut-off families."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlreplay.capture import (
    Cutoff,
    FilterOrder,
    SamplingParams,
    filter_probs,
    sample,
    selected_log_probs,
    support_from_logits,
    support_from_weights,
)
from rlreplay.errors import MissingTokenError, ReplayError
from rlreplay.sampling_mask import RolloutSamplingMask

# The distribution of the design's example: two pairs of ties.
TIED = [0.4, 0.2, 0.2, 0.1, 0.1]
FAMILIES: list[tuple[Cutoff, FilterOrder]] = [
    ("threshold", "joint"),
    ("threshold", "sequential"),
    ("positional", "joint"),
    ("positional", "sequential"),
]
all_families = pytest.mark.parametrize(("cutoff", "order"), FAMILIES)


def kept(
    probs: list[float], params: SamplingParams, cutoff: Cutoff, order: FilterOrder = "joint"
) -> list[int]:
    """Ids that survive in one row."""
    weights = filter_probs(torch.tensor([probs]), params, cutoff=cutoff, order=order)
    return weights[0].nonzero()[:, 0].tolist()


# Supports


def test_support_from_weights_is_what_has_weight() -> None:
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.1], [1e-30, 0.0, 0.0, 0.0]])
    assert support_from_weights(weights).to_mask_list() == [[1, 3], [0]]


def test_support_from_weights_in_compact_form() -> None:
    weights = torch.tensor([[0.5, 0.3, 0.0], [0.9, 0.1, 0.2]])
    token_ids = torch.tensor([[70, 9, -1], [3, 500, 20]])  # the column without weight is unused
    assert support_from_weights(weights, token_ids).to_mask_list() == [[9, 70], [3, 20, 500]]
    assert support_from_weights(weights, token_ids, rows=[1]).to_mask_list() == [[3, 20, 500]]


def test_support_from_logits_is_what_is_finite() -> None:
    inf = math.inf
    logits = torch.tensor([[-inf, 3.0, -9e30], [0.0, -inf, -inf]], dtype=torch.bfloat16)
    assert support_from_logits(logits).to_mask_list() == [[1, 2], [0]]


@pytest.mark.parametrize("rows", [[2, 0], torch.tensor([2, 0]), range(2, -1, -2)])
def test_only_the_rows_opted_in_are_looked_at(rows: object) -> None:
    weights = torch.tensor([[0.0, 1.0], [math.nan, 0.0], [1.0, 1.0]])
    mask = support_from_weights(weights, rows=rows)  # type: ignore[arg-type]
    assert mask.to_mask_list() == [[0, 1], [1]]
    with pytest.raises(ReplayError, match=r"row 1: a sampling weight"):
        support_from_weights(weights)


def test_no_rows() -> None:
    assert len(support_from_weights(torch.ones(3, 4), rows=[])) == 0
    assert len(support_from_logits(torch.ones(0, 4))) == 0
    assert len(sample(torch.ones(0, 4), SamplingParams(top_k=2)).mask) == 0


def test_supports_read_non_contiguous_batches() -> None:
    columns_first = torch.tensor([[0.0, 1.0], [2.0, 0.0], [3.0, 0.0]])
    assert support_from_weights(columns_first.T).to_mask_list() == [[1, 2], [0]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.5])
@pytest.mark.parametrize(("rows", "place"), [(None, 2), ([0, 2], 2)])
def test_weights_that_are_none_are_refused(bad: float, rows: list[int] | None, place: int) -> None:
    weights = torch.full((3, 4), 0.25)
    weights[place, 1] = bad
    with pytest.raises(ReplayError, match=f"row {place}: .* in column 1"):
        support_from_weights(weights, rows=rows)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_none_are_refused(bad: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 3] = bad
    for call in (support_from_logits, lambda x: sample(x, SamplingParams())):
        with pytest.raises(ReplayError, match=r"row 1: a logit .* in column 3") as caught:
            call(logits)
        assert caught.value.row == 1


def test_rows_without_support_are_refused() -> None:
    weights = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    for rows in (None, [1, 2]):
        with pytest.raises(ReplayError, match="row 2: empty support"):
            support_from_weights(weights, rows=rows)
        with pytest.raises(ReplayError, match="row 2: empty support"):
            support_from_logits(weights.log(), rows=rows)
    with pytest.raises(ReplayError, match="row 2: empty support"):
        sample(weights.log(), SamplingParams())


@pytest.mark.parametrize(
    ("token_ids", "match"),
    [
        ([[0, 1], [5, 5]], "row 1: support id repeated"),
        ([[0, 1], [5, -5]], "row 1: support id out of range"),
        ([[0, 1], [5, 1 << 31]], "row 1: support id out of range"),
    ],
)
def test_bad_compact_ids_name_the_row_of_the_batch(token_ids: list[list[int]], match: str) -> None:
    for rows in (None, [1]):
        with pytest.raises(ReplayError, match=match):
            support_from_weights(torch.ones(2, 2), torch.tensor(token_ids), rows=rows)


def test_arguments_of_the_wrong_shape_are_refused() -> None:
    ones = torch.ones(2, 3)
    with pytest.raises(ReplayError, match="two-dimensional"):
        support_from_weights(torch.ones(3))
    with pytest.raises(ReplayError, match="at least one column"):
        sample(torch.ones(2, 0), SamplingParams())
    with pytest.raises(ReplayError, match=r"torch.int64 of shape \[2, 3\]"):
        support_from_logits(ones.long())
    with pytest.raises(ReplayError, match=r"processed_logits .* got None"):
        support_from_logits(None)  # type: ignore[arg-type]
    with pytest.raises(ReplayError, match=r"int64 of shape \[2, 3\], got torch.int64 of shape"):
        support_from_weights(ones, torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(ReplayError, match="token_ids do not name"):
        support_from_weights(ones, ones)
    for rows in ([0, 2], [-1]):
        with pytest.raises(ReplayError, match=rf"rows in \[0, 2\), got {rows[-1]}"):
            support_from_weights(ones, rows=rows)
    with pytest.raises(ReplayError, match="rows must be integers"):
        support_from_weights(ones, rows=torch.tensor([True, False]))
    with pytest.raises(ReplayError, match="one token a row"):
        selected_log_probs(ones, torch.zeros(3, dtype=torch.int64))


# Filters: values to check by hand


@pytest.mark.parametrize(
    ("params", "threshold", "positional"),
    [
        # The second and third id tie at the cut-off: a threshold cannot tell them apart.
        (SamplingParams(top_k=2, top_p=0.45), [0, 1, 2], [0, 1]),
        (SamplingParams(top_k=2), [0, 1, 2], [0, 1]),
        (SamplingParams(top_k=3), [0, 1, 2], [0, 1, 2]),
        (SamplingParams(top_k=4), [0, 1, 2, 3, 4], [0, 1, 2, 3]),
        (SamplingParams(top_p=0.3), [0], [0]),
        (SamplingParams(top_p=0.45), [0, 1, 2], [0, 1]),
        (SamplingParams(top_p=0.7), [0, 1, 2], [0, 1, 2]),
        (SamplingParams(top_p=0.85), [0, 1, 2, 3, 4], [0, 1, 2, 3]),
        (SamplingParams(min_p=0.5), [0, 1, 2], [0, 1, 2]),
        (SamplingParams(min_p=0.25), [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
        (SamplingParams(min_p=1.0), [0], [0]),
        (SamplingParams(top_k=4, min_p=0.3), [0, 1, 2], [0, 1, 2]),
        (SamplingParams(top_k=1), [0], [0]),
        (SamplingParams(temperature=0.0), [0], [0]),
        (SamplingParams(), [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
        (SamplingParams(top_k=1000), [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
    ],
)
def test_joint_filters(params: SamplingParams, threshold: list[int], positional: list[int]) -> None:
    assert kept(TIED, params, "threshold") == threshold
    assert kept(TIED, params, "positional") == positional


@pytest.mark.parametrize(
    ("top_k", "top_p", "threshold", "positional"),
    [
        # top-k by threshold leaves 0.4, 0.2, 0.2, that is 0.5, 0.25, 0.25;
        # by position 0.4, 0.2, that is 2/3, 1/3
        (2, 0.45, [0], [0]),
        (2, 0.6, [0, 1, 2], [0]),
        (2, 0.7, [0, 1, 2], [0, 1]),
        (4, 0.45, [0, 1, 2], [0, 1]),  # by position 4/9, 2/9, 2/9, 1/9: 4/9 = 0.444 < 0.45
        (4, 0.42, [0, 1, 2], [0]),  # by threshold all five are left, so 0.4 < 0.42
        (5, 0.45, [0, 1, 2], [0, 1]),
    ],
)
def test_sequential_filters(
    top_k: int, top_p: float, threshold: list[int], positional: list[int]
) -> None:
    params = SamplingParams(top_k=top_k, top_p=top_p)
    assert kept(TIED, params, "threshold", "sequential") == threshold
    assert kept(TIED, params, "positional", "sequential") == positional


@all_families
def test_top_p_stops_where_its_mass_is_reached(cutoff: Cutoff, order: FilterOrder) -> None:
    # exact in binary, so 0.5 is reached by the first id alone
    assert kept([0.25, 0.5, 0.25], SamplingParams(top_p=0.5), cutoff, order) == [1]
    assert kept([0.125, 0.5, 0.375], SamplingParams(top_p=0.875), cutoff, order) == [1, 2]


@all_families
def test_ties_go_to_the_lower_id(cutoff: Cutoff, order: FilterOrder) -> None:
    everywhere = [0.125] * 8
    params = SamplingParams(top_k=3)
    expected = list(range(8)) if cutoff == "threshold" else [0, 1, 2]
    assert kept(everywhere, params, cutoff, order) == expected
    assert kept(everywhere, SamplingParams(top_k=1), cutoff, order) == [0]


@all_families
def test_ids_without_probability_are_never_kept(cutoff: Cutoff, order: FilterOrder) -> None:
    assert kept([0.0, 0.5, 0.0, 0.5], SamplingParams(top_k=3), cutoff, order) == [1, 3]
    assert kept([0.0, 0.5, 0.0, 0.5], SamplingParams(), cutoff, order) == [1, 3]


@all_families
def test_top_p_1_keeps_the_far_tail(cutoff: Cutoff, order: FilterOrder) -> None:
    # In float32 the mass before the last id has been rounded up to 1.
    probs = torch.full((1, 3), 1e-12)
    probs[0, 0] = 1.0
    for params in (SamplingParams(), SamplingParams(top_k=3)):
        assert (filter_probs(probs, params, cutoff=cutoff, order=order) == probs).all()


def test_kept_weights_are_not_renormalised() -> None:
    probs = torch.tensor([TIED, TIED])
    weights = filter_probs(probs, SamplingParams(top_k=2))
    assert weights.tolist() == [[*probs[0, :3].tolist(), 0.0, 0.0]] * 2


@all_families
def test_params_per_row(cutoff: Cutoff, order: FilterOrder) -> None:
    probs = torch.tensor([TIED, TIED, TIED, TIED])
    params = [
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.3),
        SamplingParams(min_p=0.5),
        SamplingParams(temperature=0.0),
    ]
    together = filter_probs(probs, params, cutoff=cutoff, order=order)
    apart = [
        filter_probs(row[None], p, cutoff=cutoff, order=order)
        for row, p in zip(probs, params, strict=True)
    ]
    assert torch.equal(together, torch.cat(apart))
    assert (together > 0).sum(dim=1).tolist() == [3, 1, 3, 1]


def _brute_force(
    probs: list[float], top_k: int, top_p: float, cutoff: Cutoff, order: FilterOrder
) -> set[int]:
    """The definition of each family, id by id, in exact integer-valued floats."""
    ranked = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    place = {token: rank for rank, token in enumerate(ranked)}

    def before(i: int, among: set[int]) -> set[int]:
        if cutoff == "threshold":
            return {j for j in among if probs[j] > probs[i]}
        return {j for j in among if place[j] < place[i]}

    def mass(ids: set[int]) -> float:
        return sum(probs[j] for j in ids)

    everything = set(range(len(probs)))
    by_k = {i for i in everything if len(before(i, everything)) < top_k}
    if order == "sequential":
        return {i for i in by_k if mass(before(i, by_k)) < top_p * mass(by_k)}
    return {i for i in by_k if mass(before(i, everything)) < top_p * mass(everything)}


@settings(max_examples=200, deadline=None)
@given(
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=9),
    top_k=st.integers(2, 9),
    sixteenths=st.integers(1, 15),
    family=st.sampled_from(FAMILIES),
)
def test_filters_follow_the_definition(
    counts: list[int], top_k: int, sixteenths: int, family: tuple[Cutoff, FilterOrder]
) -> None:
    total = sum(counts)
    top_p = sixteenths / 16
    # A cut-off that falls exactly on a boundary is decided by rounding once counts are divided by
    # their total, so nudge it off: the masses are whole numbers of counts.
    top_p += 1 / (32 * total)
    probs = torch.tensor([counts], dtype=torch.float64) / total
    cutoff, order = family
    params = SamplingParams(top_k=top_k, top_p=top_p)
    weights = filter_probs(probs, params, cutoff=cutoff, order=order)
    expected = _brute_force([float(c) for c in counts], top_k, top_p, cutoff, order)
    assert set(weights[0].nonzero()[:, 0].tolist()) == expected


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1),
    top_k=st.one_of(st.none(), st.integers(1, 40)),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_families_agree_without_ties(
    seed: int, top_k: int | None, top_p: float, min_p: float
) -> None:
    logits = 4 * torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))
    probs = torch.softmax(logits.double(), dim=-1)
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    for order in ("joint", "sequential"):
        threshold = filter_probs(probs, params, cutoff="threshold", order=order)
        assert torch.equal(threshold, filter_probs(probs, params, cutoff="positional", order=order))
    if top_k is None:  # with one filter alone there is no order
        joint = filter_probs(probs, params, order="joint")
        assert torch.equal(joint, filter_probs(probs, params, order="sequential"))


@settings(max_examples=50, deadline=None)
@given(
    counts=st.lists(st.integers(1, 4), min_size=2, max_size=12),
    top_k=st.integers(1, 12),
    top_p=st.floats(0.01, 1.0),
)
def test_threshold_keeps_what_positional_keeps(counts: list[int], top_k: int, top_p: float) -> None:
    probs = torch.tensor([counts], dtype=torch.float64) / sum(counts)
    params = SamplingParams(top_k=top_k, top_p=top_p)
    positional = filter_probs(probs, params, cutoff="positional") > 0
    threshold = filter_probs(probs, params, cutoff="threshold") > 0
    assert bool((threshold | ~positional).all())
    assert int(positional.sum()) <= top_k


# Draws


@all_families
def test_sample_reports_the_capture_it_drew_from(cutoff: Cutoff, order: FilterOrder) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(64, 50, generator=generator)
    params = SamplingParams(temperature=0.7, top_k=12, top_p=0.9)
    drawn = sample(logits, params, cutoff=cutoff, order=order, generator=generator)
    probs = torch.softmax(logits.double() / 0.7, dim=-1)
    weights = filter_probs(probs, params, cutoff=cutoff, order=order)
    assert drawn.mask == RolloutSamplingMask.from_dense(weights > 0)
    drawn.mask.check_sampled(drawn.token_ids)
    exact = (weights / weights.sum(1, keepdim=True)).gather(1, drawn.token_ids[:, None])[:, 0].log()
    # fp32: the scaled logits have magnitude below 32, so each is off by at most 32 * eps / 2,
    # twice (the division and the maximum taken off); exp, sums and log add a few eps more.
    budget = (32 + 8) * torch.finfo(torch.float32).eps
    assert drawn.log_probs.dtype == torch.float32
    assert float((drawn.log_probs - exact).abs().max()) <= budget


def test_sample_in_float64() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    drawn = sample(logits, SamplingParams(temperature=2.0, top_k=2))
    exact = torch.log_softmax(logits[:, :2] / 2, dim=-1)[0, drawn.token_ids]
    assert drawn.log_probs.tolist() == exact.to(torch.float32).tolist()
    assert drawn.mask.to_mask_list() == [[0, 1]]


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(top_k=1)])
@all_families
def test_greedy_rows_are_singletons(
    params: SamplingParams, cutoff: Cutoff, order: FilterOrder
) -> None:
    # The second row ties, and the third ties as soon as probabilities are rounded to fp32.
    logits = torch.tensor([[0.0, 3.0, 1.0], [-1.0, 2.0, 2.0], [1e-3, 1.0001e-3, 0.0]])
    logits[2, 1] = torch.nextafter(logits[2, 0], torch.tensor(1.0))
    drawn = sample(logits, params, cutoff=cutoff, order=order)
    assert drawn.token_ids.tolist() == [1, 1, 1]
    assert drawn.mask.to_mask_list() == [[1], [1], [1]]
    assert drawn.log_probs.tolist() == [0.0, 0.0, 0.0]


def test_greedy_and_sampled_rows_in_one_batch() -> None:
    logits = torch.tensor([[0.0, 0.0, 5.0], [0.0, 0.0, 5.0]])
    drawn = sample(logits, [SamplingParams(temperature=0.0), SamplingParams(temperature=100.0)])
    assert drawn.mask.to_mask_list() == [[2], [0, 1, 2]]
    assert drawn.log_probs[0] == 0.0
    assert drawn.log_probs[1] < -1.0


def test_banned_ids_are_never_kept() -> None:
    logits = torch.zeros(1, 6)
    logits[0, ::2] = -math.inf
    assert sample(logits, SamplingParams()).mask.to_mask_list() == [[1, 3, 5]]


def test_the_smallest_temperature_and_the_largest_logits() -> None:
    logits = torch.tensor([[3e38, -3e38, 2.9e38], [1.0, 1.0, -1.0]])
    drawn = sample(logits, SamplingParams(temperature=1e-6))
    assert drawn.mask.to_mask_list() == [[0], [0, 1]]
    assert drawn.log_probs[0] == 0.0
    assert drawn.log_probs[1] == pytest.approx(-math.log(2))


@all_families
def test_draws_follow_the_renormalised_weights(cutoff: Cutoff, order: FilterOrder) -> None:
    draws = 100_000
    logits = torch.tensor([1.5, 1.0, 1.0, 0.5, 0.0, -0.5, -2.0, -3.0])
    params = SamplingParams(temperature=0.8, top_k=6, top_p=0.9)
    drawn = sample(
        logits.expand(draws, -1),
        params,
        cutoff=cutoff,
        order=order,
        generator=torch.Generator().manual_seed(11),
    )
    weights = filter_probs(
        torch.softmax(logits[None] / 0.8, -1), params, cutoff=cutoff, order=order
    )
    expected = (draws * weights[0] / weights.sum()).double()
    counts = torch.bincount(drawn.token_ids, minlength=8).double()
    support = expected > 0
    assert 2 <= int(support.sum()) < 8
    assert counts[~support].sum() == 0
    chi_square = float(((counts - expected)[support] ** 2 / expected[support]).sum())
    # 1 - 1e-6 quantile of chi-square with 5 degrees of freedom is 35.9, with fewer it is less
    assert int(support.sum()) <= 6
    assert chi_square < 35.9


def test_draws_repeat_with_the_generator() -> None:
    logits = torch.randn(32, 20, generator=torch.Generator().manual_seed(0))
    draws = [
        sample(logits, SamplingParams(top_k=5), generator=torch.Generator().manual_seed(s))
        for s in (1, 1, 2)
    ]
    assert torch.equal(draws[0].token_ids, draws[1].token_ids)
    assert not torch.equal(draws[0].token_ids, draws[2].token_ids)


# A token replaced after the draw


def test_selected_log_probs_by_hand() -> None:
    weights = torch.tensor([[0.4, 0.2, 0.2, 0.0], [0.0, 0.0, 0.3, 0.0]])
    log_probs = selected_log_probs(weights, torch.tensor([1, 2]))
    assert log_probs.tolist() == pytest.approx([math.log(0.25), 0.0])
    assert log_probs[1] == 0.0


@pytest.mark.parametrize("token", [3, -1, 4])
def test_a_token_outside_the_capture_is_an_error(token: int) -> None:
    weights = torch.tensor([[0.4, 0.2, 0.2, 0.0], [0.4, 0.2, 0.2, 0.0]])
    with pytest.raises(MissingTokenError, match=f"row 1: .*token {token}") as caught:
        selected_log_probs(weights, torch.tensor([0, token]))
    assert caught.value.row == 1


def test_sample_refuses_a_draw_outside_its_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_draw(weights: torch.Tensor, n: int, **_: object) -> torch.Tensor:
        return torch.full((weights.shape[0], n), 2)

    monkeypatch.setattr(torch, "multinomial", broken_draw)
    logits = torch.tensor([[0.0, 0.0, 9.0], [5.0, 4.0, 0.0]])
    with pytest.raises(MissingTokenError, match=r"row 1: .*token 2"):
        sample(logits, SamplingParams(top_k=2))


# Refusals of parameters


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e-9),
        ("temperature", True),
        ("temperature", None),
        ("temperature", "1"),
        ("top_k", 0),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_p", None),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("min_p", "0"),
    ],
)
def test_params_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(ReplayError, match=f"^{name} is out of range: expected .*, got "):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_params_and_choices_that_do_not_fit_are_refused() -> None:
    logits = torch.zeros(3, 4)
    with pytest.raises(ReplayError, match=r"one SamplingParams, or 3, .* got 2"):
        sample(logits, [SamplingParams()] * 2)
    with pytest.raises(ReplayError, match="'threshold' or 'positional', got 'rank'"):
        sample(logits, SamplingParams(), cutoff="rank")  # type: ignore[arg-type]
    with pytest.raises(ReplayError, match="'joint' or 'sequential', got 'both'"):
        sample(logits, SamplingParams(), order="both")  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [math.nan, -0.1, math.inf])
def test_rows_that_are_no_distribution_are_refused(bad: float) -> None:
    probs = torch.tensor([TIED, TIED])
    probs[1, 4] = bad
    with pytest.raises(ReplayError, match="row 1: a probability"):
        filter_probs(probs, SamplingParams())
    with pytest.raises(ReplayError, match=r"row 1: not a distribution: .* got a sum of 2\.0"):
        filter_probs(torch.tensor([TIED, [2 * p for p in TIED]]), SamplingParams())
