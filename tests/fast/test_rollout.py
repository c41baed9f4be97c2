"""`Rollout`: value semantics, and everything its constructor must refuse."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlreplay import Rollout, RolloutSamplingMask, WeightVersionSpan
from rlreplay.errors import MissingTokenError, ReplayError
from tests.fast.payloads import (
    NO_INTEGERS,
    NO_PLAIN_TENSORS,
    Drawn,
    cuts,
    drawn_responses,
    spans,
    tensors_of_no_integers,
    tensors_that_numpy_lacks,
)
from tests.fast.strategies import refused

MASK = RolloutSamplingMask.from_mask_list([[3, 7], [5], [9, 2, 4]])
LOG_HALF, LOG_THIRD = float(np.log(0.5)), float(np.log(1 / 3))
FIELDS = {
    "prompt_ids": [1, 2],
    "response_ids": [7, 5, 2],
    "sampling_mask": MASK,
    "rollout_log_probs": [LOG_HALF, 0.0, LOG_THIRD],
    "support_log_probs": [LOG_HALF] * 2 + [0.0] + [LOG_THIRD] * 3,
    "loss_mask": [True, False, True],
    "weight_versions": [("7", 0, 2), ("8", 2, 3)],
    "finish_reason": "stop",
}
ARRAYS = ["prompt_ids", "response_ids", "rollout_log_probs", "support_log_probs", "loss_mask"]


def make(**changes):
    return Rollout(**{**FIELDS, **changes})


def without_log_probs(**changes):
    return make(rollout_log_probs=None, support_log_probs=None, **changes)


@given(drawn_responses(), st.data())
def test_fields(response: Drawn, data):
    n = len(response)
    versions = [
        (str(i), start, end)
        for i, (start, end) in enumerate(spans(data.draw(cuts(n))))
        if end > start
    ]
    loss_mask = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    rollout = response.rollout(
        weight_versions=versions,
        loss_mask=loss_mask,
        support_log_probs=response.sorted_support_log_probs(),
    )
    assert len(rollout) == n
    assert rollout.prompt_ids.tolist() == response.prompt
    assert rollout.response_ids.tolist() == response.tokens
    assert rollout.tokens.tolist() == response.prompt + response.tokens
    assert rollout.total_length == len(response.prompt) + n
    assert rollout.rollout_log_probs.tolist() == response.log_probs()
    assert rollout.support_log_probs.tolist() == response.sorted_support_log_probs()
    assert rollout.loss_mask.tolist() == loss_mask
    assert [tuple(span) for span in rollout.weight_versions] == versions
    assert rollout.finish_reason == response.finish_reason


def test_types():
    rollout = make()
    dtypes = [getattr(rollout, name).dtype for name in ARRAYS]
    assert dtypes == [np.int64, np.int64, np.float32, np.float32, np.bool_]
    assert rollout.weight_versions[0] == WeightVersionSpan("7", 0, 2)
    assert rollout.weight_versions[0].version == "7"
    assert len(repr(rollout)) < 160


def test_defaults():
    rollout = Rollout(prompt_ids=[1], response_ids=[5], sampling_mask=MASK[1:2])
    assert rollout.rollout_log_probs is None
    assert rollout.support_log_probs is None
    assert rollout.loss_mask.tolist() == [True]
    assert rollout.weight_versions == ()
    assert rollout.finish_reason is None


def test_lists_arrays_and_tensors_are_the_same():
    arrays = {
        "prompt_ids": np.array([1, 2], np.int32),
        "response_ids": np.array([7, 5, 2]),
        "rollout_log_probs": np.array(FIELDS["rollout_log_probs"], np.float32),
        "support_log_probs": np.array(FIELDS["support_log_probs"]),
        "loss_mask": np.array([1, 0, 1], np.int32),
    }
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    assert make(**arrays) == make(**tensors) == make()
    assert make(loss_mask=[1, 0, 1]) == make(loss_mask=torch.tensor([True, False, True])) == make()


def test_half_precision_tensors():
    rollout = make(
        rollout_log_probs=torch.tensor(FIELDS["rollout_log_probs"], dtype=torch.bfloat16),
        support_log_probs=None,
    )
    assert rollout.rollout_log_probs.dtype == np.float32


# Value semantics


def test_inputs_are_copied():
    inputs = {
        "prompt_ids": np.array([1, 2]),
        "response_ids": np.array([7, 5, 2]),
        "rollout_log_probs": np.array(FIELDS["rollout_log_probs"], np.float32),
        "support_log_probs": np.array(FIELDS["support_log_probs"], np.float32),
        "loss_mask": np.array([True, False, True]),
    }
    for convert in (lambda a: a, torch.from_numpy):
        rollout = make(**{name: convert(array) for name, array in inputs.items()})
        for name, array in inputs.items():
            assert array.flags.writeable
            assert not np.shares_memory(array, getattr(rollout, name))


def test_nothing_can_be_written():
    for rollout in (make(), pickle.loads(pickle.dumps(make(), 2)), copy.deepcopy(make())):
        for name in ARRAYS:
            with pytest.raises(ValueError, match="read-only"):
                getattr(rollout, name)[0] = 0
            with pytest.raises(ValueError, match="cannot set WRITEABLE"):
                getattr(rollout, name).flags.writeable = True
        for name in (*FIELDS, "other"):
            with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
                setattr(rollout, name, None)


OTHER_VALUES = {
    "prompt_ids": [1, 3],
    "response_ids": [3, 5, 2],
    "sampling_mask": RolloutSamplingMask.from_mask_list([[3, 7], [5], [9, 2, 8]]),
    "loss_mask": None,
    "weight_versions": [("7", 0, 3)],
    "finish_reason": None,
}


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_equality_looks_at_every_field(name):
    assert make() == make()
    assert make(**{name: OTHER_VALUES[name]}) != make()
    assert make() != 1


def test_equality_looks_at_log_probs():
    assert make(support_log_probs=None) != make()
    assert without_log_probs() != make(support_log_probs=None)
    moved = [LOG_HALF + 2e-6, 0.0, LOG_THIRD]
    assert make(rollout_log_probs=moved) != make()


def test_hashing_is_off():
    with pytest.raises(TypeError, match="unhashable"):
        hash(make())


def test_replace_checks_again():
    assert dataclasses.replace(make(), finish_reason="length") == make(finish_reason="length")
    with refused("does not match the response", row=2):
        dataclasses.replace(make(), loss_mask=[True, True])


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle(protocol):
    for rollout in (make(), without_log_probs()):
        again = pickle.loads(pickle.dumps(rollout, protocol))
        assert again == rollout
        assert isinstance(again.weight_versions[0], WeightVersionSpan)


@given(drawn_responses(min_size=1))
def test_pickle_out_of_band_copies_nothing(response: Drawn):
    rollout = response.rollout(support_log_probs=response.sorted_support_log_probs())
    buffers = []
    data = pickle.dumps(rollout, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == len(ARRAYS) + 2, "every array, and the two of the mask"
    again = pickle.loads(data, buffers=buffers)
    assert again == rollout
    for name in ARRAYS:
        assert np.shares_memory(getattr(again, name), getattr(rollout, name))
    assert np.shares_memory(again.sampling_mask.ids, rollout.sampling_mask.ids)
    moved = pickle.loads(data, buffers=[bytearray(b.raw()) for b in buffers])
    assert moved == rollout
    for name in ARRAYS:
        assert not getattr(moved, name).flags.writeable
        with pytest.raises(ValueError, match="cannot set WRITEABLE"):
            getattr(moved, name).flags.writeable = True


# Refusals


@pytest.mark.parametrize("kind", NO_INTEGERS)
@pytest.mark.parametrize("name", ["prompt_ids", "response_ids", "loss_mask"])
def test_tensors_of_no_integers(name, kind):
    numbers = [1, 1] if name == "prompt_ids" else [1, 0, 1]
    bad = tensors_of_no_integers(numbers)[kind]
    if (name, kind) == ("loss_mask", "bool"):
        assert make(loss_mask=bad) == make()
        return
    with pytest.raises(ReplayError, match=name.replace("_", ".")):
        make(**{name: bad})


@pytest.mark.parametrize("kind", NO_PLAIN_TENSORS)
@pytest.mark.parametrize("name", ["rollout_log_probs", "support_log_probs"])
def test_tensors_of_no_log_probs(name, kind):
    with pytest.raises(ReplayError, match=name):
        make(**{name: tensors_that_numpy_lacks([0, 0, 0])[kind]})


@pytest.mark.parametrize("kind", NO_PLAIN_TENSORS)
def test_tensors_of_no_spans(kind):
    bad = tensors_that_numpy_lacks([0, 2, 3])[kind]
    for versions in (bad, [bad], [("7", 0, 3), bad], [("7", 0, bad)], [(bad, 0, 3)]):
        with refused("spans do not cover", row=None):
            make(weight_versions=versions)
    with refused("no sampling mask"):
        make(sampling_mask=bad)
    with refused("finish_reason"):
        make(finish_reason=bad)


@pytest.mark.parametrize("name", ["prompt_ids", "response_ids"])
@pytest.mark.parametrize(
    "bad", [-1, 2**31, 2**63, 10**6000, 1.0, True, None, "5", [5]], ids=lambda v: type(v).__name__
)
def test_what_is_no_token_id(name, bad):
    values = [*FIELDS[name]]
    values[1] = bad
    with pytest.raises(ReplayError, match=name) as caught:
        make(**{name: values})
    if name == "response_ids":
        assert caught.value.row == 1
    else:
        assert caught.value.row is None, "rows are response tokens"
        assert "prompt position 1" in caught.value.got


@pytest.mark.parametrize("name", ["prompt_ids", "response_ids"])
@pytest.mark.parametrize("bad", [None, 5, "ab", {}, np.zeros((1, 3), np.int64), np.zeros(3)])
def test_what_is_no_list_of_tokens(name, bad):
    with pytest.raises(ReplayError, match=name):
        make(**{name: bad})


def test_a_prompt_has_a_token():
    with refused("prompt is empty"):
        make(prompt_ids=[])


@pytest.mark.parametrize("bad", [None, [[3, 7], [5], [9, 2]], 3])
def test_a_mask_is_a_mask(bad):
    with refused("no sampling mask"):
        without_log_probs(sampling_mask=bad)


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({"sampling_mask": MASK[:2]}, 2),
        ({"response_ids": [7, 5]}, 2),
        ({"response_ids": [7, 5, 2, 2]}, 3),
        ({"rollout_log_probs": [LOG_HALF, 0.0]}, 2),
        ({"rollout_log_probs": [LOG_HALF, 0.0, LOG_THIRD, 0.0]}, 3),
        ({"loss_mask": [True]}, 1),
        ({"loss_mask": [1, 0, 1, 1]}, 3),
    ],
)
def test_lengths_must_agree(changes, row):
    with refused("does not match the response", row=row):
        make(**{"support_log_probs": None, **changes})


def test_sampled_tokens_are_in_their_supports():
    with refused("not in its support", row=2, kind=MissingTokenError):
        make(response_ids=[7, 5, 5])


def test_unrestricted_rows_hold_every_token():
    rollout = without_log_probs(response_ids=[0, 99, 5], sampling_mask=RolloutSamplingMask.full(3))
    assert rollout.sampling_mask.unrestricted.all()


@pytest.mark.parametrize(
    "bad",
    [float("nan"), float("inf"), -float("inf"), 0.5, 2e-6, -1e300, 10**400, None, "0", True, [0.0]],
    ids=str,
)
def test_what_is_no_log_prob(bad):
    with pytest.raises(ReplayError, match="rollout_log_probs") as caught:
        make(rollout_log_probs=[LOG_HALF, 0.0, bad])
    assert caught.value.row == 2
    with pytest.raises(ReplayError, match="support_log_probs") as caught:
        make(support_log_probs=[LOG_HALF] * 2 + [0.0] + [LOG_THIRD, bad, LOG_THIRD])
    assert caught.value.row == 2, "the row that the id belongs to"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.5])
def test_support_log_probs_name_the_row_not_the_id(bad):
    values = np.array(FIELDS["support_log_probs"], np.float32)
    values[4] = bad
    with refused("no log-prob", row=2):
        make(support_log_probs=values)


@pytest.mark.parametrize("name", ["rollout_log_probs", "support_log_probs"])
@pytest.mark.parametrize("bad", [5, "ab", {}, np.zeros((3, 1)), np.zeros(3, np.int64)])
def test_what_is_no_list_of_log_probs(name, bad):
    with pytest.raises(ReplayError, match=name):
        make(**{name: bad})


def test_rounding_above_zero_is_let_through_and_kept():
    above = float(np.float32(4e-7))
    rollout = make(rollout_log_probs=[LOG_HALF, above, LOG_THIRD], support_log_probs=None)
    assert rollout.rollout_log_probs[1] == np.float32(4e-7)


def test_full_vocabulary_log_probs_show_on_singleton_rows():
    with refused("not normalised over the support", row=1):
        make(rollout_log_probs=[LOG_HALF, -0.05, LOG_THIRD], support_log_probs=None)


def test_full_vocabulary_log_probs_show_on_supports():
    with refused("not normalised over the support", row=0):
        make(support_log_probs=[LOG_HALF - 0.1] * 2 + [0.0] + [LOG_THIRD] * 3)
    with refused("not normalised over the support", row=2):
        make(support_log_probs=[LOG_HALF] * 2 + [0.0] + [LOG_THIRD] * 2 + [LOG_THIRD - 0.1])


def test_support_log_probs_one_an_id():
    for size in (5, 7):
        with refused("do not match the sampling mask"):
            make(support_log_probs=[LOG_HALF] * size)


def test_support_log_probs_need_the_sampled_ones():
    with refused("without rollout_log_probs"):
        make(rollout_log_probs=None)


def test_sampled_log_probs_agree_with_the_support():
    with refused("disagree", row=2):
        make(rollout_log_probs=[LOG_HALF, 0.0, LOG_HALF])


def test_support_log_probs_beside_unrestricted_rows():
    mask = RolloutSamplingMask.from_mask_list([None, [5], None], allow_unrestricted=True)
    rollout = make(sampling_mask=mask, rollout_log_probs=[-3.0, 0.0, -2.0], support_log_probs=[0.0])
    assert rollout.support_log_probs.tolist() == [0.0]
    with refused("not normalised over the support", row=1):
        make(sampling_mask=mask, rollout_log_probs=[-3.0, 0.0, -2.0], support_log_probs=[-0.1])


@pytest.mark.parametrize(
    ("bad", "row"),
    [
        ([True, 2, False], None),
        ([0, 1, 2], 2),
        ([0, -1, 1], 1),
        ([0.0, 1.0, 1.0], 0),
        (["1", "0", "1"], 0),
        ("101", None),
        (np.zeros((3, 1), np.bool_), None),
        (np.ones(3), None),
        (7, None),
    ],
)
def test_what_is_no_loss_mask(bad, row):
    with pytest.raises(ReplayError, match="loss_mask") as caught:
        make(loss_mask=bad)
    if row is not None:
        assert caught.value.row == row


@pytest.mark.parametrize(
    ("versions", "row"),
    [
        ([("7", 0, 2)], 2),
        ([("7", 0, 4)], 3),
        ([("7", 1, 3)], 0),
        ([("7", 0, 1), ("8", 2, 3)], 1),
        ([("7", 0, 2), ("8", 1, 3)], 2),
        ([("7", 0, 0), ("8", 0, 3)], 0),
        ([("7", 0, 3), ("8", 3, 3)], 3),
        ([("7", 0, -1)], 0),
        ([("7", 0, 10**6000)], 3),
        ([("7", 2, 3), ("8", 0, 2)], 0),
        ([(7, 0, 3)], None),
        ([(None, 0, 3)], None),
        ([("7", 0.0, 3)], None),
        ([("7", 0, True), ("8", 1, 3)], None),
        ([("7", 0)], None),
        ([7], None),
        ("abc", None),
        (7, None),
        ([{"version": "7"}], None),
    ],
)
def test_spans_cover_the_response(versions, row):
    with refused("spans do not cover", row=row):
        make(weight_versions=versions)


def test_an_empty_response_has_an_empty_span_or_none():
    empty = {"prompt_ids": [1], "response_ids": [], "sampling_mask": RolloutSamplingMask.full(0)}
    assert Rollout(**empty, weight_versions=[("7", 0, 0)]).weight_versions == (("7", 0, 0),)
    assert len(Rollout(**empty, rollout_log_probs=[], support_log_probs=[], loss_mask=[])) == 0
    with refused("spans do not cover", row=0):
        Rollout(**empty, weight_versions=[("7", 0, 0), ("8", 0, 0)])


@pytest.mark.parametrize("bad", [7, {"type": "stop"}, b"stop", True])
def test_finish_reason_is_text(bad):
    with refused("finish_reason"):
        make(finish_reason=bad)
