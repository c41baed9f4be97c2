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


# Turns, resumed requests, and cutting off


def part(whole: Rollout, start: int, end: int, **changes):
    """What an engine would have returned for these tokens, asked to go on from those before."""
    ids = whole.sampling_mask.offsets
    spans = whole.weight_versions
    fields = {
        "prompt_ids": whole.tokens[: whole.prompt_ids.size + start],
        "response_ids": whole.response_ids[start:end],
        "sampling_mask": whole.sampling_mask[start:end],
        "rollout_log_probs": whole.rollout_log_probs[start:end],
        "support_log_probs": whole.support_log_probs[ids[start] : ids[end]],
        "loss_mask": whole.loss_mask[start:end],
        "weight_versions": [
            (s.version, max(s.start, start) - start, min(s.end, end) - start)
            for s in spans
            if max(s.start, start) < min(s.end, end)
        ],
        "finish_reason": whole.finish_reason,
    }
    return Rollout(**{**fields, **changes})


@st.composite
def whole_rollouts(draw, min_size=0):
    """Rollouts with every field; neighbouring spans differ in their version."""
    response = draw(drawn_responses(min_size=min_size))
    n = len(response)
    bounds = [(start, end) for start, end in spans(draw(cuts(n))) if end > start]
    return response.rollout(
        weight_versions=[(str(i % 2), *bound) for i, bound in enumerate(bounds)],
        loss_mask=draw(st.lists(st.booleans(), min_size=n, max_size=n)),
        support_log_probs=response.sorted_support_log_probs(),
    )


@given(whole_rollouts(), st.data())
def test_resume_undoes_an_abort(whole, data):
    at = data.draw(st.integers(0, len(whole)))
    begun = whole.truncate(at, finish_reason="abort")
    assert begun == part(whole, 0, at, finish_reason="abort", **versions_of_nothing(whole, at))
    resumed = begun.resume(part(whole, at, len(whole)))
    assert resumed == whole


def versions_of_nothing(whole: Rollout, at: int):
    """A truncated rollout keeps its first version even where no token is left."""
    empty = [(span.version, 0, 0) for span in whole.weight_versions[:1]]
    return {"weight_versions": empty} if at == 0 else {}


@given(whole_rollouts(), st.data())
def test_resume_any_number_of_times(whole, data):
    pieces = [part(whole, a, b) for a, b in spans(data.draw(cuts(len(whole))))]
    left = pieces[0]
    for piece in pieces[1:]:
        left = left.resume(piece)
    assert left == whole
    right = pieces[-1]
    for piece in pieces[-2::-1]:
        right = piece.resume(right)
    assert right == whole
    assert Rollout.merge_turns(pieces) == whole, "turns without tokens in between"


@given(whole_rollouts(), st.data())
def test_truncate(whole, data):
    n = data.draw(st.integers(0, len(whole)))
    m = data.draw(st.integers(0, n))
    cut = whole.truncate(n)
    assert len(cut) == n
    assert cut.truncate(m) == whole.truncate(m, finish_reason=cut.truncate(m).finish_reason)
    assert cut.tokens.tolist() == whole.tokens.tolist()[: whole.prompt_ids.size + n]
    assert cut.sampling_mask.to_mask_list() == whole.sampling_mask.to_mask_list()[:n]
    assert whole.truncate(len(whole)) == whole
    assert cut.finish_reason == (whole.finish_reason if n == len(whole) else None)
    assert whole.truncate(n, finish_reason="length").finish_reason == "length"


def test_truncate_is_written_out():
    assert make().truncate(2) == Rollout(
        prompt_ids=[1, 2],
        response_ids=[7, 5],
        sampling_mask=MASK[:2],
        rollout_log_probs=[LOG_HALF, 0.0],
        support_log_probs=[LOG_HALF] * 2 + [0.0],
        loss_mask=[True, False],
        weight_versions=[("7", 0, 2)],
    )
    assert make().truncate(1).weight_versions == (("7", 0, 1),)
    assert without_log_probs().truncate(1).rollout_log_probs is None


@pytest.mark.parametrize("n", [-1, 1.0, None, True, "2"])
def test_truncate_takes_a_count(n):
    with refused("not a count"):
        make().truncate(n)


def test_truncate_keeps_no_more_than_there_is():
    with refused("more tokens would be kept"):
        make().truncate(4)


# Turns


@given(whole_rollouts(), st.data(), st.sampled_from(["forced", "unrestricted"]))
def test_merge_turns_is_a_rollout_whose_tools_are_left_out(whole, data, tool_tokens):
    """Tokens of a whole rollout are declared to be tool tokens, and everything else must stay."""
    ends = data.draw(cuts(len(whole)))
    bounds = spans(ends)
    sampled, tools = bounds[::2], bounds[1::2]
    turns = [part(whole, a, b, weight_versions=[("7", 0, b - a)]) for a, b in sampled]
    merged = Rollout.merge_turns(turns, tool_tokens=tool_tokens)

    n = sampled[-1][1]
    rows, log_probs = whole.sampling_mask.to_mask_list(), whole.rollout_log_probs.tolist()
    loss_mask, tokens = whole.loss_mask.tolist(), whole.response_ids.tolist()
    for a, b in tools:
        for t in range(a, b):
            rows[t] = [tokens[t]] if tool_tokens == "forced" else None
            log_probs[t], loss_mask[t] = 0.0, False
    assert merged.tokens.tolist() == whole.tokens.tolist()[: whole.prompt_ids.size + n]
    assert merged.sampling_mask.to_mask_list() == rows[:n]
    assert merged.loss_mask.tolist() == loss_mask[:n]
    assert merged.rollout_log_probs.tolist() == log_probs[:n]
    assert merged.support_log_probs.size == merged.sampling_mask.ids.size
    assert merged.weight_versions == (("7", 0, n),)
    assert merged.finish_reason == whole.finish_reason


def second_turn(**changes):
    """Goes on from `make()` after two tool tokens, 40 and 41."""
    fields = {
        "prompt_ids": [1, 2, 7, 5, 2, 40, 41],
        "response_ids": [6],
        "sampling_mask": RolloutSamplingMask.from_mask_list([[6, 8]]),
        "rollout_log_probs": [LOG_HALF],
        "support_log_probs": [LOG_HALF, LOG_HALF],
        "weight_versions": [("8", 0, 1)],
        "finish_reason": "length",
    }
    return Rollout(**{**fields, **changes})


def test_merge_turns_is_written_out():
    merged = Rollout.merge_turns([make(), second_turn()])
    assert merged == Rollout(
        prompt_ids=[1, 2],
        response_ids=[7, 5, 2, 40, 41, 6],
        sampling_mask=RolloutSamplingMask.from_mask_list(
            [[3, 7], [5], [9, 2, 4], [40], [41], [6, 8]]
        ),
        rollout_log_probs=[LOG_HALF, 0.0, LOG_THIRD, 0.0, 0.0, LOG_HALF],
        support_log_probs=[LOG_HALF] * 2 + [0.0] + [LOG_THIRD] * 3 + [0.0] * 2 + [LOG_HALF] * 2,
        loss_mask=[True, False, True, False, False, True],
        weight_versions=[("7", 0, 2), ("8", 2, 6)],
        finish_reason="length",
    )
    free = Rollout.merge_turns([make(), second_turn()], tool_tokens="unrestricted")
    assert free.sampling_mask.to_mask_list()[3:5] == [None, None]
    assert free.rollout_log_probs[3:5].tolist() == [0.0, 0.0]
    assert free.loss_mask[3:5].tolist() == [False, False]
    assert free.support_log_probs.tolist() == pytest.approx(
        [LOG_HALF] * 2 + [0.0] + [LOG_THIRD] * 3 + [LOG_HALF] * 2
    )


def test_tool_tokens_are_charged_to_the_weights_that_read_them():
    merged = Rollout.merge_turns([make(), second_turn(weight_versions=[("9", 0, 1)])])
    assert merged.weight_versions == (("7", 0, 2), ("8", 2, 3), ("9", 3, 6))


def test_a_turn_without_response_may_lack_what_others_have():
    bare = {"response_ids": [], "sampling_mask": RolloutSamplingMask.full(0)}
    no_values = {"rollout_log_probs": None, "support_log_probs": None, "weight_versions": ()}
    silent = second_turn(**bare, **no_values)
    merged = Rollout.merge_turns([make(), silent])
    assert merged.weight_versions == (("7", 0, 2), ("8", 2, 5))
    assert merged.rollout_log_probs.tolist()[3:] == [0.0, 0.0]
    last = second_turn(prompt_ids=[*silent.tokens, 42])
    assert Rollout.merge_turns([make(), silent, last]).weight_versions == (("7", 0, 2), ("8", 2, 7))
    alone = Rollout.merge_turns([make().truncate(0), make().truncate(0)])
    assert alone.weight_versions == (("7", 0, 0),)


def test_turns_that_are_all_empty_need_not_agree():
    has = make().truncate(0)
    no_values = {"rollout_log_probs": None, "support_log_probs": None, "weight_versions": ()}
    lacks = dataclasses.replace(has, **no_values)
    for turns in ([has, lacks], [lacks, has]):
        for joined in (turns[0].resume(turns[1]), Rollout.merge_turns(turns)):
            assert joined.weight_versions == has.weight_versions == (("7", 0, 0),)
            assert joined.rollout_log_probs.size == joined.support_log_probs.size == 0
    none = lacks.resume(lacks)
    assert none.rollout_log_probs is none.support_log_probs is None
    assert none.weight_versions == ()
    for first, second in ([has, lacks], [lacks, has]):
        merged = Rollout.merge_turns(
            [first, dataclasses.replace(second, prompt_ids=[*first.tokens, 40, 41])]
        )
        assert merged.weight_versions == (("7", 0, 2),)
        assert merged.rollout_log_probs.tolist() == merged.support_log_probs.tolist() == [0.0, 0.0]
        assert not merged.loss_mask.any()


def test_one_turn_is_itself():
    assert Rollout.merge_turns([make()]) == make()
    assert Rollout.merge_turns(iter([make(), second_turn()])) == Rollout.merge_turns(
        [make(), second_turn()]
    )


@pytest.mark.parametrize(
    ("prompt", "position", "got"),
    [
        ([1, 3, 7, 5, 2, 40], 1, "3"),
        ([1, 2, 7, 5, 9, 40], 4, "9"),
        ([1, 2, 7], 3, "the end of 3 prompt tokens"),
        ([9], 0, "9"),
    ],
)
def test_a_turn_starts_with_what_came_before(prompt, position, got):
    other = second_turn(prompt_ids=prompt)
    with refused("turn 1 does not start with what came before") as caught:
        Rollout.merge_turns([make(), other])
    assert f"position {position}" in caught.value.expected
    assert caught.value.got == got
    with refused("resumed request does not start with what came before"):
        make().resume(other)


def test_only_the_turn_that_differs_is_blamed():
    with refused("the prompt of turn 2 "):
        Rollout.merge_turns([make(), second_turn(), second_turn()])


def test_nothing_comes_between_an_abort_and_its_rest():
    with refused("holds more than was sampled") as caught:
        make().resume(second_turn())
    assert "5 tokens" in caught.value.expected
    assert caught.value.got == "7"


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        ("rollout_log_probs", {"rollout_log_probs": None, "support_log_probs": None}),
        ("support_log_probs", {"support_log_probs": None}),
        ("weight_versions", {"weight_versions": ()}),
    ],
)
def test_turns_agree_on_optional_fields(name, lacking):
    for turns in ([make(**lacking), second_turn()], [make(), second_turn(**lacking)]):
        with refused(f"some turns have {name}") as caught:
            Rollout.merge_turns(turns)
        assert caught.value.got == "1 of 2"
    merged = Rollout.merge_turns([make(**lacking), second_turn(**lacking)])
    assert not getattr(merged, name)


@pytest.mark.parametrize(
    "bad", [None, 7, "ab", [], [None], [{}], ["ab"], np.zeros(2), torch.ones(2)]
)
def test_turns_are_rollouts(bad):
    with refused("turns are no rollouts"):
        Rollout.merge_turns(bad)
    with refused("turns are no rollouts"):
        make().resume(bad)


@pytest.mark.parametrize("bad", [None, "", "full", True, np.zeros(2)])
def test_tool_tokens_have_a_known_support(bad):
    with refused("tool_tokens"):
        Rollout.merge_turns([make(), second_turn()], tool_tokens=bad)


# Stop strings


def spelled(texts):
    """A decoder of a vocabulary, and how often it was called."""
    calls = []

    def decode(ids):
        calls.append(len(ids))
        return "".join(texts[i] for i in ids)

    return decode, calls


def saying(tokens):
    return Rollout(
        prompt_ids=[0],
        response_ids=tokens,
        sampling_mask=RolloutSamplingMask.forced(tokens),
        finish_reason="length",
    )


TEXTS = ["", "a", "b", "ab", "ba", "aab", "c"]


@given(
    st.lists(st.integers(0, len(TEXTS) - 1), max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_truncate_at_stop_finds_the_shortest_prefix(tokens, stop):
    decode, calls = spelled(TEXTS)
    rollout = saying(tokens)
    cut = rollout.truncate_at_stop(stop, decode)
    assert len(calls) <= 1 + max(1, len(tokens)).bit_length()
    for k in range(len(tokens) + 1):
        if any(string in decode(tokens[:k]) for string in stop):
            assert cut == rollout.truncate(k, finish_reason="stop")
            return
    assert cut is rollout


def test_truncate_at_stop_takes_one_string():
    decode, _ = spelled(TEXTS)
    rollout = saying([1, 2, 6, 1])
    assert rollout.truncate_at_stop("bc", decode) == rollout.truncate(3, finish_reason="stop")
    assert rollout.truncate_at_stop("ca", decode).finish_reason == "stop", "nothing is cut off"
    assert saying([]).truncate_at_stop("a", decode) == saying([])


@pytest.mark.parametrize("stop", ["", [], [""], ["a", ""], None, 7, [7], b"a", [b"a"], np.zeros(2)])
def test_stop_strings_are_text(stop):
    with refused("no stop string"):
        saying([1]).truncate_at_stop(stop, spelled(TEXTS)[0])


@pytest.mark.parametrize("decode", [5, None, "ab"])
@pytest.mark.parametrize("tokens", [[1], []])
def test_decode_can_be_called(decode, tokens):
    with refused("no stop string"):
        saying(tokens).truncate_at_stop("a", decode)


@pytest.mark.parametrize("text", [None, b"a", ["a"], 7])
def test_decode_returns_text(text):
    with refused("no stop string"):
        saying([1]).truncate_at_stop("a", lambda ids: text)


# longer than any memory: a list of it fails at once
ENDLESS = range(1 << 62)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Rollout.merge_turns(ENDLESS),
        lambda: RolloutSamplingMask.concat(ENDLESS),
        lambda: Rollout(
            prompt_ids=[1],
            response_ids=[2],
            sampling_mask=RolloutSamplingMask.forced([2]),
            weight_versions=ENDLESS,
        ),
        lambda: Rollout(
            prompt_ids=[1], response_ids=[2], sampling_mask=RolloutSamplingMask.forced([2])
        ).truncate_at_stop(ENDLESS, str),
    ],
)
def test_a_range_is_no_list_of_objects(call):
    with pytest.raises(ReplayError):
        call()
