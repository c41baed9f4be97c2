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
    SupportKL,
    SupportStatistics,
    Tally,
    support_entropy,
    support_kl,
    support_log_probs,
)
from rlreplay.engines import sglang
from rlreplay.errors import ReplayError
from rlreplay.layout import RowLayout
from rlreplay.plan import ReplayPlan
from rlreplay.scores import score_logits
from tests.fast.payloads import (
    ANSWERS,
    NO_PLAIN_TENSORS,
    drawn_responses,
    fixture,
    tensors_that_numpy_lacks,
)
from tests.fast.strategies import (
    MicroBatch,
    agreeing_peers,
    make_batch,
    micro_batches,
    parallel_state,
    refused,
)

LOG_PROB = st.floats(-50, 0, width=32)
TOKENS = st.lists(st.tuples(LOG_PROB, LOG_PROB, st.booleans()), max_size=40)
# A sum of m rounded terms in another order: m roundings of the sum of their magnitudes.
EPS = float(np.finfo(np.float64).eps)


def columns(tokens):
    old, new, kept = zip(*tokens, strict=True) if tokens else ((), (), ())
    dtypes = (torch.float32, torch.float32, torch.bool)
    return [torch.tensor(c, dtype=d) for c, d in zip((old, new, kept), dtypes, strict=True)]


def measured(tokens):
    old, new, kept = columns(tokens)
    return LogProbMismatch.measure(old, new, loss_mask=kept)


def kept_deltas(tokens):
    return [new - old for old, new, kept in tokens if kept]


def assert_sums_agree(a: Tally, b: Tally, terms: int):
    """Counts and maxima to the bit, sums to rounding of the parts."""
    counts = [*range(len(a.COUNTS)), *range(len(a.COUNTS) + len(a.SUMS), a.sums.size)]
    assert np.array_equal(a.sums[counts], b.sums[counts])
    assert np.array_equal(a.maxima, b.maxima)
    # the signed sums are of numbers no larger than 50 each; the others have no cancellation
    scale = np.abs(a.sums) + 50 * terms
    assert np.all(np.abs(a.sums - b.sums) <= max(terms, 1) * EPS * scale)


@given(TOKENS)
def test_mismatch_is_what_plain_python_computes(tokens):
    mismatch = measured(tokens)

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
    whole = measured(list(itertools.chain(*parts)))
    tallies = [measured(part) for part in parts]
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
    ranks = [
        LogProbMismatch.tensors(old, new, loss_mask=kept) for old, new, kept in map(columns, parts)
    ]

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
    assert np.array_equal(mismatch.sums[2:], rest.sums[2:])  # all but the two counts
    masked_out = LogProbMismatch.measure(
        np.array([-1.0, old]), np.array([-1.5, new]), loss_mask=np.array([True, False])
    )
    assert (masked_out.tokens, masked_out.non_finite) == (1, 0)


@pytest.mark.parametrize("delta", [-899.0, -400.0, 400.0, 899.0])
def test_ratios_that_no_float_holds_are_measured(delta):
    """They count as e**300 or e**-300, and apart; their distance is what it is."""
    old = np.full(4, -1000.0)
    mismatch = LogProbMismatch.measure(old, old + delta)

    ratio = math.exp(math.copysign(300, delta))
    assert (mismatch.tokens, mismatch.non_finite) == (4, 0)
    assert mismatch.mean_ratio == pytest.approx(ratio, rel=1e-12)
    assert mismatch.clamped == mismatch.summary()["clamped"] == 4
    assert mismatch.k3 == pytest.approx(ratio - 1 - min(delta, 300), rel=1e-12)
    assert mismatch.k1 == -delta
    assert mismatch.max_abs_delta == mismatch.quantile(0.5) == abs(delta)
    assert mismatch.effective_sample_size == pytest.approx(4, rel=1e-12)


def test_the_worst_token_is_seen_beside_ordinary_ones():
    mismatch = LogProbMismatch.measure(np.array([-1.0, -401.0]), np.array([-1.0, -1.0]))

    assert (mismatch.tokens, mismatch.max_abs_delta, mismatch.quantile(1.0)) == (2, 400, 400)
    assert (mismatch.clamped, mismatch.non_finite) == (1, 0)
    assert mismatch.effective_sample_size == pytest.approx(1, rel=1e-12)


@given(st.lists(st.floats(-1e300, 0), min_size=1, max_size=9), st.randoms(use_true_random=False))
def test_no_finite_log_prob_breaks_a_bound(values, random):
    old, new = np.array(values), np.array(random.sample(values, len(values)))

    mismatch = LogProbMismatch.measure(old, new)

    assert mismatch.tokens == len(values)
    assert mismatch.clamped == sum(abs(b - a) > 300 for a, b in zip(old, new, strict=True))
    assert mismatch.k3 >= 0
    assert 0 < mismatch.effective_sample_size <= len(values) * (1 + len(values) * 4 * EPS)
    assert mismatch.quantile(1) == mismatch.max_abs_delta == np.abs(new - old).max()


@pytest.mark.parametrize("delta", [-300.0, 300.0])
def test_the_bound_itself_is_not_clamped(delta):
    old = np.full(3, -1000.0)

    mismatch = LogProbMismatch.measure(old, old + delta)

    assert mismatch.clamped == 0
    assert mismatch.effective_sample_size == pytest.approx(3, rel=1e-12)


def test_the_base_of_the_tallies_is_none_itself():
    with pytest.raises(TypeError, match="abstract"):
        Tally.zero()


def test_columns_in_other_numbers_of_samples_are_refused():
    two, three = [np.zeros(3), np.zeros(5)], [np.zeros(3), np.zeros(2), np.zeros(3)]
    with refused("log_probs and rollout_log_probs differ.*expected 2 samples, got 3"):
        LogProbMismatch.measure(two, three)
    with refused("expected 1 samples, got 2"):
        LogProbMismatch.measure([np.zeros(8)], two)
    flags = [np.ones(3, bool), np.ones(2, bool), np.ones(3, bool)]
    with refused("loss_mask and log_probs differ.*expected 2 samples, got 3"):
        LogProbMismatch.measure(np.zeros(8), two, loss_mask=flags)
    assert LogProbMismatch.measure(np.zeros(8), two, loss_mask=np.ones(8, bool)).tokens == 8


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
        SupportStatistics.of(
            Rollout(prompt_ids=[0], response_ids=[1, 2][: len(m)], sampling_mask=m)
        )
        for m in masks
    ]
    sums, maxima = zip(*(part.to_tensors(8) for part in parts), strict=True)
    reduced = torch.stack(sums).sum(0), torch.stack(maxima).amax(0)
    assert SupportStatistics.from_tensors(*reduced) == parts[0] + parts[1]
    assert SupportStatistics.from_tensors(*SupportStatistics.zero().to_tensors(8)).rows == 0
    with pytest.raises(ReplayError, match="none above max_size=2"):
        parts[1].to_tensors(2)


@pytest.mark.parametrize("wrong", [3, [3], None, "ab"])
def test_support_statistics_of_something_else_are_refused(wrong):
    with pytest.raises(ReplayError, match="no rollout"):
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

    whole = LogProbMismatch.measure(old, torch.tensor(new), loss_mask=kept)
    pieces = LogProbMismatch.measure(
        np.split(old, ends),
        [torch.tensor(p) for p in np.split(new, ends)],
        loss_mask=np.split(kept, ends),
    )

    assert pieces == whole
    assert LogProbMismatch.measure(old, new, loss_mask=kept.astype(np.int32)) == whole
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
    LogProbMismatch.tensors(on_device(), on_device(), loss_mask=on_device(dtype=torch.bool))
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
        LogProbMismatch.tensors(on_device(), on_device(), loss_mask=on_device(dtype=torch.int64))


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
    old, new, *rest = arguments
    with refused(match, sample=sample):
        LogProbMismatch.measure(old, new, loss_mask=rest[0] if rest else None)


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


def test_a_histogram_of_other_tokens_than_the_count_is_refused():
    sums, maxima = LogProbMismatch.tensors(np.zeros(3), np.zeros(3))
    sums[0] += 1

    with refused("bins do not fit the tally"):
        LogProbMismatch.from_tensors(sums, maxima)


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
        LogProbMismatch.measure(old, new, loss_mask=kept).k1, **near
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
    st.floats(0, 1),
)
def test_support_statistics_merge_exactly(responses, q):
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
        assert whole.size_quantile(q) is None
        assert math.isnan(whole.mean_size)
        return
    rank = max(1, math.ceil(q * len(sizes)))
    assert whole.size_quantile(q) == sizes[rank - 1]
    assert whole.max_size == sizes[-1]
    assert whole.mean_size == sum(sizes) / len(sizes)


def test_support_statistics_refuse_what_they_are_not():
    for q in (-0.1, 1.1, math.nan, None, True):
        with pytest.raises(ReplayError):
            SupportStatistics.zero().size_quantile(q)
    with pytest.raises(ReplayError):
        SupportStatistics.zero().merge(1)
    with pytest.raises(TypeError):
        SupportStatistics.zero() + 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"entropy_rows": 3},  # two rows are restricted
        {"entropy_rows": -1},
        {"entropy_rows": 1.0},
        {"entropy_rows": True},
        {"outside_loss": -1},
        {"outside_loss": None},
        {"outside_loss": 2**53},
        {"entropy_rows": 1, "entropy_sum": math.nan},
        {"entropy_rows": 1, "entropy_sum": math.inf},
        {"entropy_rows": 1, "entropy_sum": 10**400},
        {"entropy_rows": 1, "entropy_max": -1.0},
        {"entropy_rows": 1, "entropy_sum": -1.0},
        {"entropy_rows": 1, "entropy_max": "1"},
        {"entropy_sum": 1.0},
        {"entropy_max": 1.0},
        {"size_counts": np.array([0, 2**62, 2**62])},
    ],
)
def test_statistics_that_contradict_themselves_are_refused(wrong):
    sound = {"size_counts": np.array([4, 0, 2])}
    assert SupportStatistics(**sound).rows == 6

    with refused("do not fit the tally"):
        SupportStatistics(**{**sound, **wrong})


@pytest.mark.parametrize(
    ("sums", "maxima"),
    [
        (np.zeros(3), np.zeros(1)),
        (np.zeros(4), np.zeros(2)),
        (np.zeros(4, np.float32), np.zeros(1)),
        (np.array([0.5, 0, 0, 1]), np.zeros(1)),
        (np.array([0, 0, 0, -1.0]), np.zeros(1)),
        (np.array([0, math.nan, 0, 1]), np.zeros(1)),
        (np.array([0, 0, math.nan, 1]), np.zeros(1)),
        (None, np.zeros(1)),
    ],
)
def test_tensors_that_are_no_statistics_are_refused(sums, maxima):
    with refused("do not fit the tally"):
        SupportStatistics.from_tensors(sums, maxima)


def merged_turns(tool_tokens):
    """A turn, two tool tokens, another turn; with the probabilities of both supports."""
    first = Rollout(
        prompt_ids=[1],
        response_ids=[2],
        sampling_mask=RolloutSamplingMask.from_mask_list([[2, 3]]),
        rollout_log_probs=[math.log(0.5)],
        support_log_probs=np.log([0.5, 0.5]),
    )
    second = Rollout(
        prompt_ids=[1, 2, 8, 9],
        response_ids=[4],
        sampling_mask=RolloutSamplingMask.from_mask_list([[4, 5, 6, 7]]),
        rollout_log_probs=[math.log(0.25)],
        support_log_probs=np.log([0.25] * 4),
    )
    return Rollout.merge_turns([first, second], tool_tokens=tool_tokens)


@pytest.mark.parametrize("tool_tokens", ["forced", "unrestricted"])
def test_tool_tokens_are_counted_apart(tool_tokens):
    statistics = SupportStatistics.of(merged_turns(tool_tokens))

    assert statistics.outside_loss == 2
    assert (statistics.rows, statistics.forced, statistics.unrestricted) == (2, 0, 0)
    assert (statistics.entropy_rows, statistics.mean_size) == (2, 3)
    assert statistics.entropy_sum == pytest.approx(math.log(2) + math.log(4), rel=1e-6)
    assert statistics.summary()["outside_loss"] == 2


def test_statistics_survive_tensors_and_pickling():
    statistics = SupportStatistics.of(merged_turns("forced"))

    copy = pickle.loads(pickle.dumps(statistics))
    assert copy == statistics == SupportStatistics.from_tensors(*statistics.to_tensors(100))
    assert not copy.size_counts.flags.writeable
    assert statistics != SupportStatistics.zero()
    sums, maxima = statistics.to_tensors(5)
    assert (sums.shape, maxima.shape, sums.dtype) == ((9,), (1,), torch.float64)
    assert sums.tolist() == [2, 2, statistics.entropy_sum, 0, 0, 1, 0, 1, 0]


def test_statistics_copy_their_counts():
    counts = np.array([1, 2, 0])
    statistics = SupportStatistics(counts)
    counts[0] = 7

    assert statistics.size_counts.tolist() == [1, 2]
    assert statistics == SupportStatistics([1, 2])


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


# The trainer's side of a support


@pytest.fixture(autouse=True, scope="module")
def _peers():
    with agreeing_peers():
        yield


def plan_of(batch: MicroBatch, layout: RowLayout | None = None, **options) -> ReplayPlan:
    layout = layout or RowLayout.packed(batch.total_lengths, batch.response_lengths)
    parallel = options.pop(
        "parallel", parallel_state(cp_rank=layout.cp_rank, cp_size=layout.cp_size)
    )
    return ReplayPlan.build(
        batch.tokens, batch.masks, layout,
        parallel=parallel, vocab_size=batch.vocab_size, device="cpu", **options,
    )  # fmt: skip


def logits_of(plan: ReplayPlan, columns: int, dtype=torch.float64, seed=0):
    rows = plan.layout.num_local_rows
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def expected_values(logits, plan, supports, divisors):
    """Row by row: a log-softmax of the logits at the support."""
    rows = zip(plan.rows.tolist(), supports, divisors, strict=True)
    values = [
        torch.log_softmax(logits[row, ids].double() / divisor, -1)
        for row, ids, divisor in rows
        if ids is not None
    ]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *values])


@given(micro_batches(), st.floats(0.25, 4), st.integers(0, 2**31))
def test_support_log_probs_are_a_log_softmax_of_each_support(batch, temperature, seed):
    plan = plan_of(batch)
    logits = logits_of(plan, batch.vocab_size + 3, seed=seed).requires_grad_()
    supports = [ids for rows in batch.supports for ids in rows]

    values = support_log_probs(logits, plan, temperature=temperature)

    expected = expected_values(logits, plan, supports, [temperature] * plan.num_rows)
    assert values.shape == (sum(mask.ids.size for mask in batch.masks),)
    assert not values.requires_grad
    torch.testing.assert_close(values, expected.detach(), rtol=1e-12, atol=1e-12)


def test_a_temperature_for_each_row_and_the_type_of_the_logits():
    batch = make_batch(np.random.default_rng(3))
    plan = plan_of(batch)
    assert plan.has_unrestricted
    supports = [ids for rows in batch.supports for ids in rows]
    divisors = torch.linspace(0.5, 2, plan.num_rows)
    for dtype, within in ((torch.float32, 1e-5), (torch.bfloat16, 1e-5)):
        logits = logits_of(plan, batch.vocab_size, dtype)

        values = support_log_probs(logits, plan, temperature=divisors)

        assert values.dtype == torch.float32
        expected = expected_values(logits, plan, supports, divisors.double())
        torch.testing.assert_close(values.double(), expected, rtol=within, atol=within)


def test_support_log_probs_hold_those_of_the_sampled_tokens():
    batch = make_batch(np.random.default_rng(4), kinds=("ordinary", "singleton"))
    plan = plan_of(batch)
    logits = logits_of(plan, batch.vocab_size)

    values = support_log_probs(logits, plan)

    scores = score_logits(logits, plan, backend="torch")
    torch.testing.assert_close(values[plan.targets], scores.log_probs, rtol=1e-12, atol=1e-12)
    mass = [part.exp().sum() for part in values.split(np.diff(plan.host_offsets).tolist())]
    torch.testing.assert_close(torch.stack(mass), torch.ones(plan.num_rows).double())


@pytest.mark.parametrize("cp_rank", [0, 1])
def test_a_context_parallel_rank_has_the_values_of_its_rows(cp_rank):
    batch = make_batch(np.random.default_rng(5), num_samples=4)
    whole = plan_of(batch)
    logits = logits_of(whole, batch.vocab_size)
    every = support_log_probs(logits, whole).split([mask.ids.size for mask in batch.masks])
    layout = RowLayout.zigzag(
        batch.total_lengths, batch.response_lengths, cp_rank=cp_rank, cp_size=2
    )
    plan = plan_of(batch, layout)
    # the logits row of every response token this rank has
    starts = np.cumsum([0, *batch.response_lengths])
    mine = np.concatenate([starts[i] + layout.response_indices(i) for i in range(4)])
    local = torch.zeros(layout.num_local_rows, batch.vocab_size, dtype=torch.float64)
    local[plan.rows] = logits[whole.rows[mine]]

    values = support_log_probs(local, plan)

    expected = []
    for i, (mask, own) in enumerate(zip(batch.masks, every, strict=True)):
        rows = np.repeat(np.arange(len(mask)), mask.lengths)
        expected.append(own[np.isin(rows, layout.response_indices(i))])
    assert 0 < mine.size < starts[-1]
    assert torch.equal(values, torch.cat(expected))


@pytest.mark.parametrize("masks", [None, []])
def test_rows_without_supports_have_no_values(masks):
    lengths = ([3, 4], [2, 2]) if masks is None else ([], [])
    layout = RowLayout.packed(*lengths)
    tokens = [np.zeros(n, np.int64) for n in lengths[0]]
    plan = ReplayPlan.build(
        tokens, masks, layout, parallel=parallel_state(), vocab_size=5, device="cpu"
    )

    assert support_log_probs(logits_of(plan, 5), plan).shape == (0,)


def test_a_row_that_has_no_softmax_is_nan_alone():
    batch = make_batch(np.random.default_rng(6), ([7], [5]), num_samples=1, kinds=("ordinary",))
    plan = plan_of(batch)
    clean = logits_of(plan, batch.vocab_size)
    ids = batch.supports[0]
    spoiled = clean.clone()
    spoiled[plan.rows[0], ids[0][0]] = math.nan
    spoiled[plan.rows[1], ids[1][0]] = math.inf
    spoiled[plan.rows[2], ids[2]] = -math.inf
    spoiled[plan.rows[3], ids[3][0]] = -math.inf

    lengths = [len(row) for row in ids]
    parts = support_log_probs(spoiled, plan).split(lengths)

    for row in range(3):
        assert parts[row].isnan().all()
    assert parts[3][0] == -math.inf
    assert parts[3][1:].exp().sum().item() == pytest.approx(1, rel=1e-12)
    assert torch.equal(parts[4], support_log_probs(clean, plan).split(lengths)[4])


def test_support_log_probs_refuse_what_they_cannot_score():
    batch = make_batch(np.random.default_rng(7))
    plan = plan_of(batch)
    good = logits_of(plan, batch.vocab_size)
    with refused("the vocabulary is sharded"):
        sharded = plan_of(batch, parallel=parallel_state(tp_size=2))
        support_log_probs(logits_of(sharded, -(-batch.vocab_size // 2)), sharded)
    with refused("plan is something else"):
        support_log_probs(good, None)
    with refused("differ|rows"):
        support_log_probs(good[:-1], plan)
    for temperature in (0.0, math.nan, "1", torch.ones(plan.num_rows + 1)):
        with refused("temperature"):
            support_log_probs(good, plan, temperature=temperature)


# From an engine's payload to the KL


def batch_of(rollouts, vocab_size):
    return MicroBatch(
        tokens=[rollout.tokens for rollout in rollouts],
        total_lengths=[rollout.total_length for rollout in rollouts],
        response_lengths=[len(rollout) for rollout in rollouts],
        masks=[rollout.sampling_mask for rollout in rollouts],
        vocab_size=vocab_size,
        supports=[rollout.sampling_mask.to_mask_list() for rollout in rollouts],
    )


def sglang_rollouts(tool_tokens):
    """The support-mode fixture, alone and as both turns of a conversation with tool tokens."""
    payload = fixture("sglang_generate_support.json")
    (single,) = sglang.from_response(payload["response"], prompt_ids=payload["prompt_ids"])
    later = [*single.tokens.tolist(), 7, 8, 9]
    meta = {**payload["response"]["meta_info"], "prompt_tokens": len(later)}
    (second,) = sglang.from_response({**payload["response"], "meta_info": meta}, prompt_ids=[later])
    return [single, Rollout.merge_turns([single, second], tool_tokens=tool_tokens)]


def trainer_logits(rollouts, plan, shift):
    """Logits whose softmax over a support is the rollout's, moved by `shift` in one id a row."""
    logits = torch.zeros(plan.layout.num_local_rows, plan.vocab_size, dtype=torch.float64)
    for row, (ids, values) in zip(plan.rows.tolist(), rollout_rows(rollouts), strict=True):
        logits[row] = 3.0  # outside of the support: takes no part
        logits[row, ids] = torch.tensor(values)
        logits[row, ids[:1]] += shift
    return logits


def rollout_rows(rollouts):
    """(ids, float64 log-probs) of every response row."""
    for rollout in rollouts:
        offsets = rollout.sampling_mask.offsets[1:-1]
        values = np.split(rollout.support_log_probs.astype(np.float64), offsets)
        yield from zip(map(np.ndarray.tolist, rollout.sampling_mask), values, strict=True)


@pytest.mark.parametrize("tool_tokens", ["forced", "unrestricted"])
@pytest.mark.parametrize("shift", [0.0, 0.5, -3.0])
def test_the_kl_of_sglang_supports_to_a_trainer(tool_tokens, shift):
    rollouts = sglang_rollouts(tool_tokens)
    vocab_size = 1 + max(rollout.sampling_mask.max_id for rollout in rollouts)
    plan = plan_of(batch_of(rollouts, vocab_size))
    logits = trainer_logits(rollouts, plan, shift)
    masks = [rollout.sampling_mask for rollout in rollouts]
    old = [rollout.support_log_probs for rollout in rollouts]
    flags = [rollout.loss_mask for rollout in rollouts]

    new = support_log_probs(logits, plan)
    tally = SupportKL.measure(masks, old, new, loss_mask=flags)

    # moving one logit of probability q by s: KL = log(1 - q + q e^s) - q s
    kept = np.concatenate(flags)
    q = [math.exp(values[0]) if len(values) else None for _, values in rollout_rows(rollouts)]
    exact = [
        math.log1p(q * math.expm1(shift)) - q * shift
        for q, in_loss in zip(q, kept, strict=True)
        if in_loss
    ]
    # the engine's fp32 log-probs sum to 1 within their rounding, the trainer's exactly
    within = {"rel": 1e-5, "abs": 1e-9}
    assert (tally.tokens, tally.non_finite, tally.unnormalised) == (3 * len(rollouts[0]), 0, 0)
    assert tally.mean_kl == pytest.approx(sum(exact) / len(exact), **within)
    assert tally.max_kl == pytest.approx(max(exact), **within)
    rows = np.concatenate(
        [
            support_kl(mask, values, part.numpy(), loss_mask=own)
            for mask, values, part, own in zip(
                masks, old, new.split([mask.ids.size for mask in masks]), flags, strict=True
            )
        ]
    )
    assert np.array_equal(np.isnan(rows), ~kept)
    assert rows[kept] == pytest.approx(np.array(exact), **within)
    assert np.nanmean(rows) == pytest.approx(tally.mean_kl, rel=1e-12, abs=1e-15)


@given(drawn_responses(min_size=1), st.data())
def test_the_kl_tally_sums_the_rows_and_merges(drawn, data):
    mask, log_q = RolloutSamplingMask.from_mask_list_with_values(
        drawn.supports, drawn.support_log_probs()
    )
    weights = [[data.draw(st.integers(1, 1000)) for _ in row] for row in drawn.supports]
    _, log_p = RolloutSamplingMask.from_mask_list_with_values(
        drawn.supports, [normalised(row) for row in weights]
    )
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=len(mask), max_size=len(mask))))
    at = data.draw(st.integers(0, len(mask)))
    cut = int(mask.offsets[at])

    whole = SupportKL.measure(mask, log_q, log_p, loss_mask=kept)
    pieces = [
        SupportKL.measure(mask[:at], log_q[:cut], log_p[:cut], loss_mask=kept[:at]),
        SupportKL.measure(mask[at:], log_q[cut:], log_p[cut:], loss_mask=kept[at:]),
    ]
    by_sample = SupportKL.measure(
        [mask[:at], mask[at:]],
        [log_q[:cut], log_q[cut:]],
        torch.tensor(log_p),
        loss_mask=[kept[:at], kept[at:]],
    )

    rows = support_kl(mask, log_q, log_p, loss_mask=kept)
    assert whole.tokens == kept.sum()
    assert math.fsum(rows[kept]) == pytest.approx(float(whole.sums[3]), rel=1e-12, abs=1e-15)
    assert whole.max_kl == pytest.approx(rows[kept].max(initial=0), rel=1e-12, abs=1e-15)
    assert by_sample == whole
    assert_sums_agree(sum(pieces, SupportKL.zero()), whole, len(mask))


def test_a_kl_that_cannot_be_measured_is_counted_and_left_out():
    half, full = math.log(0.5), math.log(1.0)
    mask = RolloutSamplingMask.from_mask_list(
        [[1, 2], [1, 2], None, [1, 2], [1, 2], [5], [1, 2]], allow_unrestricted=True
    )
    log_q = np.array([half, half, half, half, half, half, half, half, full, half, half])
    log_p = log_q.copy()
    log_p[:2] = np.log([0.25, 0.75])
    log_p[3] = math.nan
    log_p[4] = -math.inf
    log_p[6:8] = np.log([0.25, 0.25])
    kept = np.array([True] * 6 + [False])
    log_p[-1] = math.nan

    tally = SupportKL.measure(mask, log_q, log_p, loss_mask=kept)

    assert (tally.tokens, tally.non_finite, tally.unnormalised) == (2, 2, 1)
    kl = -0.5 * math.log(0.5) - 0.5 * math.log(1.5)
    assert tally.max_kl == pytest.approx(kl, rel=1e-12)
    assert tally.summary()["mean_kl"] == pytest.approx(kl / 2, rel=1e-12)
    assert math.isnan(SupportKL.zero().mean_kl)
    empty = SupportKL.measure([], [], [])
    assert empty == SupportKL.zero() == SupportKL.measure(RolloutSamplingMask.full(2), [], [])


@pytest.mark.parametrize(
    ("arguments", "loss_mask", "sample", "match"),
    [
        ((None, np.zeros(2), np.zeros(2)), None, None, "not a sampling mask"),
        (([3], np.zeros(2), np.zeros(2)), None, 0, "not a sampling mask"),
        (("forced", np.zeros(3), np.zeros(2)), None, None, "expected 2 support ids, got 3"),
        (("forced", np.zeros(2), np.zeros(1)), None, None, "expected 2 support ids, got 1"),
        (("forced", np.zeros(2), ["no"]), None, 0, "no column"),
        (("forced", np.zeros(2), np.zeros(2)), np.ones(3, bool), None, "expected 2 tokens, got 3"),
        (
            ("list", [np.zeros(1), np.zeros(1)], np.zeros(2)),
            None,
            None,
            "expected 1 samples, got 2",
        ),
        (("pair", [np.zeros(2), np.zeros(0)], np.zeros(2)), None, 0, "expected 1 support ids"),
        (("pair", np.zeros(2), [np.zeros(0), np.zeros(2)]), None, 0, "expected 1 support ids"),
    ],
)
def test_a_kl_of_what_does_not_fit_is_refused(arguments, loss_mask, sample, match):
    forced, one = RolloutSamplingMask.forced([1, 2]), RolloutSamplingMask.forced([1])
    masks = {"forced": forced, "list": [forced], "pair": [one, one]}
    mask, *values = arguments
    with refused(match, sample=sample):
        SupportKL.measure(
            masks[mask] if isinstance(mask, str) else mask, *values, loss_mask=loss_mask
        )


def test_the_kl_of_a_row_outside_the_loss_is_nan():
    mask = RolloutSamplingMask.from_mask_list([[1, 2], [5]])
    log_q = np.log([0.5, 0.5, 1.0])

    kl = support_kl(mask, log_q, log_q, loss_mask=np.array([0, 1]))

    assert np.isnan(kl).tolist() == [True, False]
    with refused("expected 2 tokens, got 1"):
        support_kl(mask, log_q, log_q, loss_mask=np.array([True]))
    with refused("mask is something else"):
        support_kl([[1, 2], [5]], log_q, log_q)


def test_lists_and_float64_arrays_are_measured_alike():
    mask = RolloutSamplingMask.from_mask_list([[1, 2]])
    log_q, log_p = np.log([0.3, 0.7]), np.log([0.3 + 1e-9, 0.7 - 1e-9])

    (kl,) = support_kl(mask, log_q, log_p)

    # 1e-18 / 2 * (1 / 0.3 + 1 / 0.7); float32 would round it to 0 or to 1e-15
    assert kl == pytest.approx(1e-18 / 0.42, rel=1e-5)
    assert support_kl(mask, log_q.tolist(), log_p.tolist()).tolist() == [kl]
    assert support_entropy(mask, log_q.tolist()) == support_entropy(mask, log_q)


def test_the_kl_reads_nothing_back(on_device):
    mask = RolloutSamplingMask.from_mask_list([[1, 2, 3], [5, 6, 7]])

    sums, maxima = SupportKL.tensors(mask, on_device(), on_device())

    assert sums.device.type == maxima.device.type == "lazy"


@pytest.mark.parametrize(
    ("place", "value", "match"),
    [
        ("maxima", math.nan, "maxima"),
        ("maxima", -5.0, "maxima"),
        ("clamped", 2.0, "clamped do not fit the tally: expected at most 1 tokens"),
    ],
)
def test_tallies_that_contradict_themselves_are_refused(place, value, match):
    tally = LogProbMismatch.measure(np.array([-1.0]), np.array([-2.0]))
    sums, maxima = tally.sums.copy(), tally.maxima.copy()
    if place == "maxima":
        maxima[0] = value
    else:
        sums[LogProbMismatch.COUNTS.index(place)] = value
    with pytest.raises(ReplayError, match=match):
        LogProbMismatch(sums, maxima)


def test_quantiles_take_the_decimal_that_was_written():
    statistics = SupportStatistics(np.array([0] + [1] * 100))  # sizes 1 to 100
    for percent in range(1, 101):
        assert statistics.size_quantile(percent / 100) == percent
