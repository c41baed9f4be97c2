"""Mismatch, drift and support statistics against plain float64, and their merges."""

import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from rlreplay import Rollout, RolloutSamplingMask
from rlreplay.diagnostics import (
    DriftSplit,
    LogProbMismatch,
    SupportStatistics,
    Tally,
    support_entropy,
    support_kl,
)
from rlreplay.engines import sglang
from rlreplay.errors import ReplayError
from tests.fast.payloads import (
    ANSWERS,
    NO_PLAIN_TENSORS,
    drawn_responses,
    fixture,
    tensors_that_numpy_lacks,
)

LOG_PROB = st.floats(-50, 0, width=32)
TOKENS = st.lists(st.tuples(LOG_PROB, LOG_PROB, st.booleans()), max_size=40)
# A sum of m rounded terms in another order: m roundings of the sum of their magnitudes.
EPS = float(np.finfo(np.float64).eps)


def columns(tokens):
    old, new, kept = zip(*tokens, strict=True) if tokens else ((), (), ())
    dtypes = (torch.float32, torch.float32, torch.bool)
    return [torch.tensor(c, dtype=d) for c, d in zip((old, new, kept), dtypes, strict=True)]


def kept_deltas(tokens):
    return [new - old for old, new, kept in tokens if kept]


def assert_sums_agree(a: Tally, b: Tally, terms: int):
    """Counts and maxima to the bit, sums to rounding of the parts."""
    counts = [0, 1, *range(len(a.SUMS), a.sums.size)]
    assert np.array_equal(a.sums[counts], b.sums[counts])
    assert np.array_equal(a.maxima, b.maxima)
    # the signed sums are of numbers no larger than 50 each; the others have no cancellation
    scale = np.abs(a.sums) + 50 * terms
    assert np.all(np.abs(a.sums - b.sums) <= max(terms, 1) * EPS * scale)


@given(TOKENS)
def test_mismatch_is_what_plain_python_computes(tokens):
    mismatch = LogProbMismatch.measure(*columns(tokens))

    deltas = kept_deltas(tokens)
    assert mismatch.tokens == len(deltas)
    assert mismatch.non_finite == 0
    if not deltas:
        assert math.isnan(mismatch.k1)
        assert math.isnan(mismatch.quantile(0.5))
        assert mismatch.effective_sample_size == 0
        return
    ratios = [math.exp(d) for d in deltas]
    total, squares = math.fsum(ratios), math.fsum(r * r for r in ratios)
    near = {"rel": 1e-12, "abs": 1e-12}
    assert mismatch.mean_ratio == pytest.approx(total / len(deltas), **near)
    assert mismatch.k1 == pytest.approx(-math.fsum(deltas) / len(deltas), **near)
    k3 = math.fsum(math.expm1(d) - d for d in deltas) / len(deltas)
    assert mismatch.k3 == pytest.approx(k3, **near)
    assert mismatch.k3 >= 0
    assert mismatch.effective_sample_size == pytest.approx(total * total / squares, **near)
    assert mismatch.mean_abs_delta == pytest.approx(
        math.fsum(map(abs, deltas)) / len(deltas), **near
    )
    assert mismatch.max_abs_delta == max(map(abs, deltas))


def test_equal_policies_have_no_mismatch():
    values = -torch.arange(5, dtype=torch.float32)

    mismatch = LogProbMismatch.measure(values, values)

    assert (mismatch.mean_ratio, mismatch.k1, mismatch.k3) == (1, 0, 0)
    assert mismatch.effective_sample_size == mismatch.tokens == 5
    assert mismatch.quantile(1) == 0


def test_the_estimators_mean_the_kl_of_rollout_to_trainer():
    """Every token of a small vocabulary, as often as the rollout policy draws it."""
    times = np.array([6, 3, 1])
    trainer = np.array([0.3, 0.3, 0.4])
    old = np.repeat(np.log(times / times.sum()), times)
    new = np.repeat(np.log(trainer), times)

    mismatch = LogProbMismatch.measure(old, new)

    q = times / times.sum()
    kl = float(np.sum(q * np.log(q / trainer)))
    assert mismatch.k1 == pytest.approx(kl, rel=1e-12)
    assert mismatch.k3 == pytest.approx(kl, rel=1e-12)
    assert mismatch.mean_ratio == pytest.approx(1, rel=1e-12)


@given(st.lists(st.floats(0, 100) | st.floats(0, 1e-6), min_size=1, max_size=50), st.floats(0, 1))
def test_quantiles_are_rounded_up_by_at_most_a_sixteenth(sizes, q):
    mismatch = LogProbMismatch.measure(np.zeros(len(sizes)), -np.array(sizes))

    exact = sorted(sizes)[max(1, math.ceil(q * len(sizes))) - 1]
    found = mismatch.quantile(q)

    assert exact <= found <= max(sizes)
    if exact < 2**-24:
        assert found <= 2**-24
    elif exact < 64:
        assert found <= exact * 17 / 16
    else:
        assert found == max(sizes)


@given(st.lists(TOKENS, min_size=1, max_size=4))
def test_parts_add_up_to_the_whole_in_any_grouping(parts):
    whole = LogProbMismatch.measure(*columns(list(itertools.chain(*parts))))
    tallies = [LogProbMismatch.measure(*columns(part)) for part in parts]
    terms = sum(map(len, parts))

    left = sum(tallies, LogProbMismatch.zero())
    right = LogProbMismatch.zero()
    for tally in reversed(tallies):
        right = tally.merge(right)

    # ratios reach e**50: the sums of one part may dwarf those of another
    for merged in (left, right):
        assert_sums_agree(merged, whole, terms)
        assert merged.quantile(0.9) == whole.quantile(0.9) or not whole.tokens
    assert left + LogProbMismatch.zero() == left


@given(st.lists(TOKENS, min_size=2, max_size=3))
def test_two_reductions_do_what_merging_does(parts):
    ranks = [LogProbMismatch.tensors(*columns(part)) for part in parts]

    sums = torch.stack([rank.sums for rank in ranks]).sum(dim=0)
    maxima = torch.stack([rank.maxima for rank in ranks]).amax(dim=0)
    reduced = LogProbMismatch.from_tensors(sums, maxima)

    merged = sum((LogProbMismatch.from_tensors(*rank) for rank in ranks), LogProbMismatch.zero())
    assert {rank.sums.shape for rank in ranks} == {sums.shape}
    assert_sums_agree(reduced, merged, sum(map(len, parts)))


def test_a_tally_survives_tensors_and_pickling():
    mismatch = LogProbMismatch.measure(np.array([-1.0, -2.0]), np.array([-1.5, -2.5]))

    assert LogProbMismatch.from_tensors(*mismatch.to_tensors()) == mismatch
    assert pickle.loads(pickle.dumps(mismatch)) == mismatch
    assert mismatch != LogProbMismatch.zero()
    with pytest.raises(ValueError, match="read-only"):
        mismatch.sums[0] = 7
    assert "k3=" in repr(mismatch)
    assert LogProbMismatch.zero() != DriftSplit.zero()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (-1.0, math.nan),
        (math.nan, -1.0),
        (-1.0, -math.inf),
        (-math.inf, -1.0),
        (-1.0, math.inf),
        (-math.inf, -math.inf),
    ],
)
def test_what_cannot_be_measured_is_counted_and_left_out(old, new):
    rest = LogProbMismatch.measure(np.array([-1.0, -2.0]), np.array([-1.5, -1.0]))

    mismatch = LogProbMismatch.measure(np.array([-1.0, old, -2.0]), np.array([-1.5, new, -1.0]))

    assert (mismatch.tokens, mismatch.non_finite) == (2, 1)
    assert np.array_equal(mismatch.sums[2:], rest.sums[2:])
    masked_out = LogProbMismatch.measure(
        np.array([-1.0, old]), np.array([-1.5, new]), np.array([True, False])
    )
    assert (masked_out.tokens, masked_out.non_finite) == (1, 0)


@pytest.mark.parametrize("delta", [-899.0, -400.0, 400.0, 899.0])
def test_ratios_that_no_float_holds_are_measured(delta):
    """They count as e**300 or e**-300; their distance is what it is."""
    old = np.full(4, -1000.0)
    mismatch = LogProbMismatch.measure(old, old + delta)

    ratio = math.exp(math.copysign(300, delta))
    assert (mismatch.tokens, mismatch.non_finite) == (4, 0)
    assert mismatch.mean_ratio == pytest.approx(ratio, rel=1e-12)
    assert mismatch.k3 == pytest.approx(ratio - 1 - delta, rel=1e-12)
    assert mismatch.max_abs_delta == mismatch.quantile(0.5) == abs(delta)
    assert mismatch.effective_sample_size == pytest.approx(4, rel=1e-12)


def test_the_worst_token_is_seen_beside_ordinary_ones():
    mismatch = LogProbMismatch.measure(np.array([-1.0, -401.0]), np.array([-1.0, -1.0]))

    assert (mismatch.tokens, mismatch.max_abs_delta, mismatch.quantile(1.0)) == (2, 400, 400)


def test_columns_in_other_numbers_of_samples_are_refused():
    apart = [np.zeros(3), np.zeros(5)], [np.zeros(3), np.zeros(2), np.zeros(3)]
    with pytest.raises(ReplayError, match="expected 2 samples, got 3"):
        LogProbMismatch.measure(*apart)


@pytest.mark.parametrize(
    ("log_q", "log_p", "expected"),
    [
        ([0.0, -800.0], [math.log(0.5)] * 2, math.log(2)),
        ([0.0, -740.0], [-740.0, 0.0], 740.0),
    ],
)
def test_a_kl_of_distributions_far_apart_is_a_number(log_q, log_p, expected):
    mask = RolloutSamplingMask(ids=np.array([3, 7]), offsets=np.array([0, 2]))
    (kl,) = support_kl(mask, np.array(log_q), np.array(log_p))
    assert kl == pytest.approx(expected, rel=1e-12)


def test_support_statistics_go_through_an_all_reduce():
    masks = [RolloutSamplingMask.forced([1, 2]), RolloutSamplingMask.from_mask_list([[1, 2, 3]])]
    parts = [
        SupportStatistics.of(Rollout(prompt_ids=[0], response_ids=[1] * len(m), sampling_mask=m))
        if k
        else SupportStatistics.of(Rollout(prompt_ids=[0], response_ids=[1, 2], sampling_mask=m))
        for k, m in enumerate(masks)
    ]
    sums, maxima = zip(*(part.to_tensors(8) for part in parts), strict=True)
    reduced = torch.stack(sums).sum(0), torch.stack(maxima).amax(0)
    assert SupportStatistics.from_tensors(*reduced) == parts[0] + parts[1]
    assert SupportStatistics.from_tensors(*SupportStatistics.zero().to_tensors(8)).rows == 0
    with pytest.raises(ReplayError, match="at most 2 ids"):
        parts[1].to_tensors(2)


@pytest.mark.parametrize("wrong", [3, [3], None, "ab"])
def test_support_statistics_of_something_else_are_refused(wrong):
    with pytest.raises(ReplayError, match="what is measured"):
        SupportStatistics.of(wrong)


@pytest.mark.parametrize("wrong", [None, [], [-1], [1.5], "a"])
def test_support_statistics_of_no_counts_are_refused(wrong):
    with pytest.raises(ReplayError):
        SupportStatistics(wrong)
    counts = SupportStatistics(np.array([1, 2])).size_counts
    assert not counts.flags.writeable


def test_pieces_for_each_sample_are_one_column():
    rng = np.random.default_rng(0)
    old, new = -rng.random((2, 7)).astype(np.float32)
    kept = rng.random(7) < 0.5
    ends = [2, 2, 6]

    whole = LogProbMismatch.measure(old, torch.tensor(new), kept)
    pieces = LogProbMismatch.measure(
        np.split(old, ends), [torch.tensor(p) for p in np.split(new, ends)], np.split(kept, ends)
    )

    assert pieces == whole
    assert LogProbMismatch.measure(old, new, kept.astype(np.int32)) == whole
    assert LogProbMismatch.measure([], []) == LogProbMismatch.zero()


def test_measuring_reads_what_needs_grad_and_what_is_read_only():
    old = np.array([-1.0, -2.0], np.float32)
    old.flags.writeable = False
    new = torch.tensor([-1.0, -2.0], requires_grad=True)

    sums, _ = LogProbMismatch.tensors(old, new)

    assert not sums.requires_grad


@pytest.fixture
def on_device():
    """Tensors without values on a device that is not the host: to read one fails."""
    with FakeTensorMode():
        yield lambda **kwargs: torch.zeros(6, device="lazy", **kwargs)


def test_measuring_on_a_device_reads_nothing_back(on_device):
    LogProbMismatch.tensors(on_device(), on_device(), on_device(dtype=torch.bool))
    for piece in (on_device(), [on_device(), on_device()]):
        for rank in (
            LogProbMismatch.tensors(piece, piece),
            DriftSplit.tensors(piece, piece, log_probs=piece),
            DriftSplit.tensors(piece, piece, log_support_mass=piece),
        ):
            assert rank.sums.device.type == rank.maxima.device.type == "lazy"
            assert rank.sums.dtype == rank.maxima.dtype == torch.float64


def test_integer_loss_masks_on_a_device_are_read_back(on_device):
    with pytest.raises(DataDependentOutputException):
        LogProbMismatch.tensors(on_device(), on_device(), on_device(dtype=torch.int64))


@pytest.mark.parametrize(
    "bad", [{"dtype": torch.int64}, {"dtype": torch.complex64}, {"dtype": torch.bool}]
)
def test_columns_of_another_type_are_refused_on_a_device_too(on_device, bad):
    with pytest.raises(ReplayError, match="no column"):
        LogProbMismatch.tensors(on_device(**bad), on_device())
    with pytest.raises(ReplayError, match="no column"):
        LogProbMismatch.tensors(on_device(), on_device()[None])


@pytest.mark.parametrize(
    ("arguments", "sample", "match"),
    [
        ((np.zeros(3), np.zeros(2)), None, "differ in length"),
        ((np.zeros(3), np.zeros(3), np.ones(2, bool)), None, "differ in length"),
        (([np.zeros(1), np.zeros(2)], [np.zeros(2), np.zeros(1)]), 0, "differ in length"),
        (([np.zeros(1), np.zeros(2)], [np.zeros(1), np.zeros(3)]), 1, "differ in length"),
        ((np.zeros((2, 2)), np.zeros(4)), None, "no column"),
        ((np.zeros(2, np.int64), np.zeros(2)), None, "no column"),
        (([np.zeros(1), "no"], np.zeros(2)), 1, "no column"),
        (([0.0, 0.0], np.zeros(2)), 0, "no column"),
        ((None, np.zeros(2)), None, "no column"),
        ((np.zeros(2), np.zeros(2), np.array([0, 2])), None, "0 and 1"),
        ((np.zeros(2), np.zeros(2), np.array([0.0, 1.0])), None, "no column"),
    ],
)
def test_what_is_no_column_of_tokens_is_refused(arguments, sample, match):
    with pytest.raises(ReplayError, match=match) as caught:
        LogProbMismatch.measure(*arguments)

    assert caught.value.sample == sample


@pytest.mark.parametrize("kind", NO_PLAIN_TENSORS)
def test_tensors_that_numpy_lacks_are_refused(kind):
    with pytest.raises(ReplayError):
        LogProbMismatch.measure(np.zeros(2), tensors_that_numpy_lacks([1, 2])[kind])


@pytest.mark.parametrize(
    ("sums", "maxima"),
    [
        (np.zeros(3), np.zeros(2)),
        (np.zeros(6), np.zeros(1)),
        (np.array([-1.0, 0, 0, 0, 0, 0]), np.zeros(2)),
        (np.array([0.5, 0, 0, 0, 0, 0]), np.zeros(2)),
        (np.array([math.nan, 0, 0, 0, 0, 0]), np.zeros(2)),
        (np.array([math.inf, 0, 0, 0, 0, 0]), np.zeros(2)),
        (np.zeros(6, np.int64), np.zeros(2)),
        (np.zeros(6, np.float32), np.zeros(2)),
        (None, np.zeros(2)),
    ],
)
def test_tensors_that_are_no_tally_are_refused(sums, maxima):
    with pytest.raises(ReplayError, match="do not fit the tally"):
        DriftSplit(sums, maxima)


def test_tallies_of_two_kinds_do_not_add():
    with pytest.raises(ReplayError, match="do not fit the tally"):
        LogProbMismatch.zero() + DriftSplit.zero()
    with pytest.raises(TypeError):
        LogProbMismatch.zero() + 1
    for q in (-0.1, 1.1, math.nan, "half", True):
        with pytest.raises(ReplayError):
            LogProbMismatch.zero().quantile(q)


# Drift


@given(st.integers(0, 20), st.integers(0, 2**32 - 1))
def test_drift_is_truncation_plus_numeric(n, seed):
    rng = np.random.default_rng(seed)
    old, new, log_mass = -rng.random((3, n))
    kept = rng.random(n) < 0.7
    full = new + log_mass

    by_mass = DriftSplit.measure(old, full, log_support_mass=log_mass, loss_mask=kept)
    by_support = DriftSplit.measure(old, full, log_probs=new, loss_mask=kept)

    count = int(kept.sum())
    assert by_mass.tokens == by_support.tokens == count
    if not count:
        assert math.isnan(by_mass.mean_drift)
        return
    near = {"rel": 1e-12, "abs": 1e-12}
    for split in (by_mass, by_support):
        assert split.mean_drift == pytest.approx((old - full)[kept].mean(), **near)
        assert split.mean_truncation == pytest.approx(-log_mass[kept].mean(), **near)
        assert split.mean_numeric == pytest.approx((old - new)[kept].mean(), **near)
        assert split.mean_drift == pytest.approx(split.mean_truncation + split.mean_numeric, **near)
        assert split.max_truncation == pytest.approx(-log_mass[kept].min(), **near)
        assert split.max_abs_numeric == pytest.approx(np.abs(old - new)[kept].max(), **near)
        assert split.mean_abs_numeric == pytest.approx(np.abs(old - new)[kept].mean(), **near)
    assert by_support.mean_numeric == pytest.approx(
        LogProbMismatch.measure(old, new, kept).k1, **near
    )


def test_drift_parts_merge():
    rng = np.random.default_rng(1)
    old, full, log_mass = -rng.random((3, 10))

    whole = DriftSplit.measure(old, full, log_support_mass=log_mass)
    parts = [
        DriftSplit.measure(old[part], full[part], log_support_mass=log_mass[part])
        for part in (slice(0, 4), slice(4, 4), slice(4, 10))
    ]

    assert_sums_agree(sum(parts, DriftSplit.zero()), whole, 10)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", range(3))
def test_drift_counts_what_is_not_finite(bad, column):
    values = np.full((3, 4), -1.0)
    values[column, 2] = bad
    old, full, log_mass = values

    split = DriftSplit.measure(old, full, log_support_mass=log_mass)

    assert (split.tokens, split.non_finite, split.mean_drift) == (3, 1, 0)


@pytest.mark.parametrize("given_parts", [(), ("log_probs", "log_support_mass")])
def test_drift_needs_one_of_two(given_parts):
    with pytest.raises(ReplayError, match="cannot be split"):
        DriftSplit.measure(np.zeros(1), np.zeros(1), **dict.fromkeys(given_parts, np.zeros(1)))


# Supports


def normalised(weights):
    return [math.log(w / sum(weights)) for w in weights]


@given(drawn_responses(), st.randoms(use_true_random=False))
def test_kl_and_entropy_are_those_of_each_row(drawn, random):
    trainer = [[random.randint(1, 1000) for _ in row] for row in drawn.supports]
    mask, log_q = RolloutSamplingMask.from_mask_list_with_values(
        drawn.supports, drawn.support_log_probs()
    )
    _, log_p = RolloutSamplingMask.from_mask_list_with_values(
        drawn.supports, [normalised(row) for row in trainer]
    )

    kl, entropy = support_kl(mask, log_q, log_p), support_entropy(mask, log_q)

    for t, (weights, others) in enumerate(zip(drawn.weights, trainer, strict=True)):
        pairs = list(zip(normalised(weights), normalised(others), strict=True))
        # fp32 log-probs: each within a rounding of its own magnitude, 7 at most
        within = 16 * float(np.finfo(np.float32).eps) * 7
        assert kl[t] >= 0
        assert kl[t] == pytest.approx(sum(math.exp(q) * (q - p) for q, p in pairs), abs=within)
        assert entropy[t] == pytest.approx(-sum(math.exp(q) * q for q, _ in pairs), abs=within)
    assert np.array_equal(support_kl(mask, log_q, log_q), np.zeros(len(mask)))


def test_unrestricted_rows_have_no_kl_and_no_entropy():
    mask = RolloutSamplingMask.from_mask_list([[1, 2], None, [5], None], allow_unrestricted=True)
    log_q = np.log([0.25, 0.75, 1.0])

    kl = support_kl(mask, log_q, np.log([0.5, 0.5, 1.0]))

    assert np.isnan(kl).tolist() == [False, True, False, True]
    assert kl[0] == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), rel=1e-12)
    assert kl[2] == 0
    assert np.isnan(support_entropy(mask, log_q)).tolist() == [False, True, False, True]
    assert support_kl(RolloutSamplingMask.full(0), np.zeros(0), np.zeros(0)).size == 0


@pytest.mark.parametrize(
    ("values", "row", "match"),
    [
        (np.log([0.5, 0.5]), None, "one value for each|3 values"),
        (np.log([0.5, 0.5, 0.5]), 1, "not normalised"),
        (np.array([-0.1, -0.1, 0.0]), 0, "not normalised"),
        (np.array([math.nan, -0.5, 0.0]), 0, "no log-prob"),
        (np.array([0.0, -math.inf, 0.0]), 0, "no log-prob"),
        (np.array([0, 0, 0]), None, "no column"),
        (["a", "b", "c"], 0, "numbers"),
        (None, None, "numbers"),
    ],
)
def test_support_log_probs_that_are_none_are_refused(values, row, match):
    mask = RolloutSamplingMask.from_mask_list([[1, 2], [5]])
    good = np.log([0.5, 0.5, 1.0])

    for arguments in ((values, good), (good, values)):
        with pytest.raises(ReplayError, match=match) as caught:
            support_kl(mask, *arguments)
        assert caught.value.row == row


def test_statistics_of_the_support_fixture():
    payload = fixture("sglang_generate_support.json")
    (rollout,) = sglang.from_response(payload["response"], prompt_ids=payload["prompt_ids"])

    statistics = SupportStatistics.of(rollout)

    expected = ANSWERS["sglang_support"]["support_entropy_sum"]
    assert statistics.entropy_sum == pytest.approx(expected, rel=1e-6)
    assert statistics.entropy_rows == statistics.rows == len(rollout)


@given(
    st.lists(
        st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=9, unique=True) | st.none()),
        max_size=4,
    ),
    st.floats(0, 100),
)
def test_support_statistics_merge_exactly(responses, percent):
    rollouts = [
        Rollout(
            prompt_ids=[1],
            response_ids=[row[0] if row else 3 for row in rows],
            sampling_mask=RolloutSamplingMask.from_mask_list(rows, allow_unrestricted=True),
        )
        for rows in responses
    ]

    whole = SupportStatistics.of(rollouts)
    merged = SupportStatistics.zero()
    for rollout in reversed(rollouts):
        merged = SupportStatistics.of(rollout) + merged

    sizes = sorted(len(row) for rows in responses for row in rows if row)
    assert merged == whole
    assert whole.rows == sum(map(len, responses))
    assert whole.unrestricted == sum(row is None for rows in responses for row in rows)
    assert whole.forced == sizes.count(1)
    assert whole.ids == sum(sizes)
    assert whole.entropy_rows == 0
    assert math.isnan(whole.mean_entropy)
    if not sizes:
        assert whole.size_percentile(percent) is None
        assert math.isnan(whole.mean_size)
        return
    rank = max(1, math.ceil(percent / 100 * len(sizes)))
    assert whole.size_percentile(percent) == sizes[rank - 1]
    assert whole.mean_size == sum(sizes) / len(sizes)


def test_support_statistics_refuse_what_they_are_not():
    for percent in (-1, 101, math.nan, None, True):
        with pytest.raises(ReplayError):
            SupportStatistics.zero().size_percentile(percent)
    with pytest.raises(ReplayError):
        SupportStatistics.zero() + 1


def test_a_log_prob_rounded_to_above_zero_makes_no_negative_entropy():
    rollout = Rollout(
        prompt_ids=[0],
        response_ids=[1, 2],
        sampling_mask=RolloutSamplingMask.forced([1, 2]),
        rollout_log_probs=[1e-7, 1e-7],
        support_log_probs=[1e-7, 1e-7],
    )
    statistics = SupportStatistics.of(rollout)
    assert (statistics.entropy_rows, statistics.entropy_sum, statistics.entropy_max) == (2, 0, 0)
