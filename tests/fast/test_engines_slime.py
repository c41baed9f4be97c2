"""slime: the fixture's answer, drawn payloads in every form, and hostile ones."""

import base64
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlreplay import RolloutSamplingMask
from rlreplay.engines import slime
from rlreplay.errors import MissingMaskError, MissingTokenError, ReplayError
from tests.fast.payloads import (
    ANSWERS,
    NO_INTEGERS,
    VOCAB,
    Drawn,
    drawn_responses,
    fixture,
    sound_or_refused,
    spoiled,
    tensors_of_no_integers,
)
from tests.fast.strategies import refused

PROMPT = [1, 2, 3]


def to_bytes(values):
    return np.array(values, "<i4").tobytes()


def to_base64(values):
    return base64.b64encode(to_bytes(values)).decode()


FORMS = {
    "base64": to_base64,
    "bytes": to_bytes,
    "bytearray": lambda v: bytearray(to_bytes(v)),
    "memoryview": lambda v: memoryview(to_bytes(v)),
    "memoryview of int32": lambda v: memoryview(np.array(v, np.int32)),
    "memoryview of int64": lambda v: memoryview(np.array(v, np.int64)),
    "strided memoryview": lambda v: memoryview(np.repeat(np.array(v, np.int32), 2))[::2],
    "strided bytes": lambda v: memoryview(np.repeat(np.array(v, "<i4").view(np.uint8), 2))[::2],
    "list": list,
    "array": lambda v: np.array(v, np.int32),
    "tensor": lambda v: torch.tensor(v, dtype=torch.int32),
}


def released():
    view = memoryview(b"1234")
    view.release()
    return view


def csr(supports):
    ids = list(itertools.chain.from_iterable(supports))
    return ids, [0, *itertools.accumulate(map(len, supports))]


def payload(response: Drawn, form="base64", kept=""):
    ids, offsets = map(FORMS[form], csr(response.supports))
    logged = zip(response.log_probs(), response.tokens, strict=True)
    return {
        "output_ids": response.tokens,
        "meta_info": {
            "finish_reason": {"type": response.finish_reason},
            f"top_p_{kept}token_ids": ids,
            f"top_p_{kept}token_offsets": offsets,
            "output_token_logprobs": [[value, token, None] for value, token in logged],
        },
    }


def small(ids=(7, 3, 5, 9, 2), offsets=(0, 2, 3, 5), **meta):
    return {
        "output_ids": [7, 5, 2],
        "meta_info": {
            "finish_reason": {"type": "stop"},
            "top_p_token_ids": to_base64(ids),
            "top_p_token_offsets": to_base64(offsets),
            "output_token_logprobs": [[-0.5, 7, None], [0.0, 5, None], [-0.25, 2, None]],
            **meta,
        },
    }


def load(response, **options):
    (rollout,) = slime.from_response(response, prompt_ids=PROMPT, vocab_size=10, **options)
    return rollout


def test_fixture():
    data, answer = fixture("slime_meta_info.json"), ANSWERS["slime"]
    (rollout,) = slime.from_response(
        data["response"], prompt_ids=data["prompt_ids"], vocab_size=512
    )
    assert len(rollout) == answer["response_length"]
    assert rollout.sampling_mask.lengths.tolist() == answer["support_sizes"]
    assert rollout.response_ids.tolist() == data["response"]["output_ids"]
    assert rollout.rollout_log_probs is None, "over the full vocabulary unless the caller knows"
    assert rollout.finish_reason == "stop"


def test_fixture_as_the_trainer_has_it():
    data, answer = fixture("slime_meta_info.json"), ANSWERS["slime"]
    (expected,) = slime.from_response(data["response"], prompt_ids=data["prompt_ids"])
    meta, tokens = data["response"]["meta_info"], data["response"]["output_ids"]
    flat = [
        np.frombuffer(base64.b64decode(meta[f"top_p_token_{name}"]), "<i4")
        for name in ("ids", "offsets")
    ]
    for convert in (np.ndarray.tolist, np.array, torch.tensor):
        ids, offsets = map(convert, flat)
        fields = {
            "tokens": [[*expected.prompt_ids.tolist(), *tokens]],
            "response_lengths": [len(tokens)],
            "rollout_top_p_token_ids": [ids],
            "rollout_top_p_token_offsets": [offsets],
        }
        (rollout,) = slime.from_train_data(fields, vocab_size=512)
        assert rollout.sampling_mask == expected.sampling_mask
        assert rollout.sampling_mask.lengths.tolist() == answer["support_sizes"]
        assert rollout.tokens.tolist() == expected.tokens.tolist()


@pytest.mark.parametrize("kept", ["", "kept_"])
@pytest.mark.parametrize("form", FORMS)
@given(response=drawn_responses())
def test_response(form, kept, response: Drawn):
    body = payload(response, form, kept)
    options = {"prompt_ids": response.prompt, "vocab_size": VOCAB}
    (rollout,) = slime.from_response(body, **options)
    assert rollout == response.rollout(rollout_log_probs=None)
    (rollout,) = slime.from_response(body, **options, log_probs_over="support")
    assert rollout == response.rollout()
    if len(response):
        del body["output_ids"]
        assert slime.from_response([body], **options, log_probs_over="support") == [rollout]


@given(st.lists(drawn_responses(min_size=1), max_size=3), st.data())
def test_train_data(responses: list[Drawn], data):
    masks = [
        data.draw(st.lists(st.sampled_from([0, 1]), min_size=len(r), max_size=len(r)))
        for r in responses
    ]
    # slime empties the rows of tokens that no sampler drew.
    supports = [
        [row if drawn else [] for row, drawn in zip(r.supports, mask, strict=True)]
        for r, mask in zip(responses, masks, strict=True)
    ]
    fields = {
        "tokens": [r.prompt + r.tokens for r in responses],
        "response_lengths": [len(r) for r in responses],
        "loss_masks": masks,
        "rollout_log_probs": [r.log_probs() for r in responses],
        "rollout_top_p_token_ids": [csr(rows)[0] for rows in supports],
        "rollout_top_p_token_offsets": [torch.tensor(csr(rows)[1]) for rows in supports],
    }
    rollouts = slime.from_train_data(fields, vocab_size=VOCAB, log_probs_over="support")
    for rollout, response, mask, rows in zip(rollouts, responses, masks, supports, strict=True):
        expected = RolloutSamplingMask.from_mask_list(
            [row or None for row in rows], allow_unrestricted=True
        )
        assert rollout == response.rollout(
            sampling_mask=expected, loss_mask=mask, finish_reason=None
        )
    del fields["loss_masks"], fields["rollout_log_probs"]
    if any(0 in mask for mask in masks):
        sample = next(i for i, mask in enumerate(masks) if 0 in mask)
        with refused("empty support", sample=sample, row=masks[sample].index(0)):
            slime.from_train_data(fields, vocab_size=VOCAB)
    else:
        assert len(slime.from_train_data(fields, vocab_size=VOCAB)) == len(responses)


@pytest.mark.parametrize(
    ("meta", "row", "match"),
    [
        ({"top_p_token_ids": "abc!"}, None, "no base64"),
        ({"top_p_token_ids": "é"}, None, "no base64"),
        ({"top_p_token_ids": "AAAAA"}, None, "no base64"),
        ({"top_p_token_ids": to_base64([7, 3, 5]) + "="}, None, "no base64"),
        ({"top_p_token_ids": to_base64([7, 3, 5]) + "==="}, None, "no base64"),
        ({"top_p_token_ids": to_base64([7, 3, 5, 9])[:-3] + "B=="}, None, "no base64"),
        ({"top_p_token_offsets": to_base64([0, 2, 3, 5])[:-3] + "/=="}, None, "no base64"),
        ({"top_p_token_ids": to_base64([7, 3, 5, 9, 2])[:-2] + "J="}, None, "no base64"),
        ({"top_p_token_ids": base64.b64encode(b"12345").decode()}, None, "cut short"),
        ({"top_p_token_offsets": base64.b64encode(b"123").decode()}, None, "cut short"),
        ({"top_p_token_ids": b"123"}, None, "cut short"),
        ({"top_p_token_ids": memoryview(b"12345")}, None, "cut short"),
        ({"top_p_token_ids": memoryview(np.ones(5, np.float32))}, None, "integers"),
        ({"top_p_token_ids": memoryview(np.ones(5, np.bool_))}, None, "integers"),
        ({"top_p_token_ids": memoryview(np.ones((5, 4), np.uint8))}, None, "integers"),
        ({"top_p_token_ids": released()}, None, "wrong type"),
        ({"top_p_token_ids": None}, None, "lack their ids or their offsets"),
        ({"top_p_token_offsets": None}, None, "lack their ids or their offsets"),
        ({"top_p_kept_token_ids": [7, 3, 5, 9, 2]}, None, "under two names"),
        ({"top_p_token_offsets": to_base64([])}, 0, "number of mask rows"),
        ({"top_p_token_offsets": to_base64([0, 2, 5])}, 2, "number of mask rows"),
        ({"top_p_token_offsets": to_base64([0, 2, 3, 4, 5])}, 3, "number of mask rows"),
        ({"top_p_token_offsets": to_base64([1, 2, 3, 5])}, 0, "start at 0"),
        ({"top_p_token_offsets": to_base64([0, 3, 2, 5])}, 1, "decrease"),
        ({"top_p_token_offsets": to_base64([0, 2, 3, 6])}, 2, "end at the number"),
        ({"top_p_token_offsets": to_base64([0, 2, 3, 4])}, 2, "end at the number"),
        ({"top_p_token_offsets": to_base64([0, 2, 2, 5])}, 1, "empty support"),
        ({"top_p_token_ids": to_base64([7, 3, -5, 9, 2])}, 1, "out of range"),
        ({"top_p_token_ids": to_base64([7, 3, 10, 9, 2])}, 1, "out of range"),
        ({"top_p_token_ids": to_base64([7, 7, 5, 9, 2])}, 0, "repeated"),
        ({"top_p_token_ids": [7, 3, 5.0, 9, 2]}, 2, "integers"),
        ({"top_p_token_ids": {}}, None, "integers"),
        ({"output_token_logprobs": [[-0.5, 7, None]]}, 1, "number of output_token_logprobs"),
        ({"output_token_logprobs": [[0, 7], [0, 5], [0, 3]]}, 2, "other tokens"),
        ({"output_token_logprobs": [[0, 7], [0], [0, 2]]}, None, "wrong type"),
        ({"output_token_logprobs": [1, 2, 3]}, None, "wrong type"),
        ({"output_token_logprobs": "abc"}, None, "wrong type"),
        ({"output_token_logprobs": ["ab", "ab", "ab"]}, None, "wrong type"),
        ({"output_token_logprobs": [torch.ones(2).to_sparse()] * 3}, None, "wrong type"),
        ({"completion_tokens": 4}, 3, "completion_tokens"),
        ({"prompt_tokens": 4}, None, "prompt_tokens"),
        ({"finish_reason": 7}, None, "finish_reason"),
        ({"weight_version": 7}, None, "spans"),
    ],
)
def test_refused(meta, row, match):
    with refused(match, sample=0, row=row):
        load(small(**meta))


@pytest.mark.parametrize("kind", NO_INTEGERS)
def test_tensors_of_no_integers(kind):
    bad = tensors_of_no_integers([1, 1, 1])[kind]
    for meta in ({"top_p_token_ids": bad}, {"top_p_token_offsets": bad}):
        with pytest.raises(ReplayError):
            load(small(**meta))
    with pytest.raises(ReplayError):
        load({**small(), "output_ids": bad})
    fields = ["tokens", "rollout_top_p_token_ids", "rollout_top_p_token_offsets"]
    for name in [*fields, *(["loss_masks"] if kind != "bool" else [])]:
        for column in ([bad], bad):
            with pytest.raises(ReplayError):
                slime.from_train_data(train_data(**{name: column}))
    with pytest.raises(ReplayError):
        slime.from_train_data(train_data(response_lengths=[torch.tensor(3)]))


def test_missing_mask():
    body = small(top_p_token_ids=None, top_p_token_offsets=None)
    with refused("no sampling mask", sample=0, row=0, kind=MissingMaskError):
        load(body)
    rollout = load(body, on_missing_mask="unrestricted", log_probs_over="support")
    assert rollout.sampling_mask == RolloutSamplingMask.full(3)
    assert rollout.rollout_log_probs is None


def test_sampled_token_outside():
    with refused("not in its support", sample=0, row=2, kind=MissingTokenError):
        load(small(ids=(7, 3, 5, 9, 1)))


def test_full_vocabulary_log_probs_passed_off_as_the_support_s():
    body = small(output_token_logprobs=[[-0.5, 7, None], [-0.1, 5, None], [-0.25, 2, None]])
    assert load(body).rollout_log_probs is None
    with refused("not normalised over the support", sample=0, row=1):
        load(body, log_probs_over="support")
    for value in ("nobody", None, 3):
        with refused("unknown log_probs_over"):
            load(body, log_probs_over=value)


def test_log_probs_that_were_asked_for_and_are_missing():
    body, data = small(output_token_logprobs=None), train_data(rollout_log_probs=[None])
    assert load(body).rollout_log_probs is None
    with refused("output_token_logprobs are missing", sample=0, row=0):
        load(body, log_probs_over="support")
    for fields in (data, train_data(rollout_log_probs=None)):
        assert slime.from_train_data(fields)[0].rollout_log_probs is None
        with refused("rollout_log_probs are missing", sample=0, row=0):
            slime.from_train_data(fields, log_probs_over="support")
    unmasked = small(top_p_token_ids=None, top_p_token_offsets=None, output_token_logprobs=None)
    rollout = load(unmasked, on_missing_mask="unrestricted", log_probs_over="support")
    assert rollout.rollout_log_probs is None
    empty = {"output_ids": [], "meta_info": {"top_p_token_ids": [], "top_p_token_offsets": [0]}}
    assert len(load(empty, log_probs_over="support")) == 0


def test_weight_version():
    assert load(small(weight_version="7")).weight_versions == (("7", 0, 3),)


def train_data(**changes):
    return {
        "tokens": [[1, 7, 5, 2]],
        "response_lengths": [3],
        "loss_masks": [[1, 1, 1]],
        "rollout_log_probs": [[-0.5, 0.0, -0.25]],
        "rollout_top_p_token_ids": [[7, 3, 5, 9, 2]],
        "rollout_top_p_token_offsets": [[0, 2, 3, 5]],
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "sample", "row"),
    [
        ({"tokens": None}, None, None),
        ({"tokens": [[1, 7, 5, 2]] * 2}, None, None),
        ({"response_lengths": None}, None, None),
        ({"response_lengths": [4]}, 0, None),
        ({"response_lengths": [10**9]}, 0, None),
        ({"response_lengths": [-1]}, 0, None),
        ({"response_lengths": [2]}, 0, 2),
        ({"loss_masks": [[1, 1]]}, 0, 2),
        ({"loss_masks": [[1, 2, 1]]}, 0, 1),
        ({"loss_masks": []}, None, None),
        ({"rollout_log_probs": [[-0.5, 0.0]]}, 0, 2),
        ({"rollout_top_p_token_ids": None}, 0, None),
        ({"rollout_top_p_token_ids": None, "rollout_top_p_token_offsets": None}, 0, 0),
        ({"rollout_top_p_token_offsets": [[0, 2, 2, 5]]}, 0, 1),
        ({"rollout_top_p_token_offsets": [[0, 2, 3, 10**9]]}, 0, 2),
        ({"tokens": [[1, 7, 5, "2"]]}, 0, 2),
        ({"tokens": [["1", 7, 5, 2]]}, 0, None),
        ({"tokens": ["abcd"]}, 0, None),
        ({"tokens": [[[1, 7, 5, 2]]]}, 0, None),
    ],
)
def test_train_data_refused(changes, sample, row):
    assert len(slime.from_train_data(train_data(), log_probs_over="support")) == 1
    with pytest.raises(ReplayError) as caught:
        slime.from_train_data(train_data(**changes), log_probs_over="support")
    assert (caught.value.sample, caught.value.row) == (sample, row), caught.value


OPTIONS = st.fixed_dictionaries(
    {
        "on_missing_mask": st.sampled_from(["raise", "unrestricted"]),
        "log_probs_over": st.sampled_from(["support", "vocabulary"]),
        "vocab_size": st.just(10),
    }
)


@given(st.sampled_from([small(), small(top_p_token_ids=[7, 3, 5, 9, 2])]).flatmap(spoiled), OPTIONS)
def test_junk_in_a_response(body, options):
    sound_or_refused(10, lambda: slime.from_response(body, prompt_ids=PROMPT, **options))


@given(spoiled(train_data()), OPTIONS)
def test_junk_in_train_data(fields, options):
    sound_or_refused(10, lambda: slime.from_train_data(fields, **options))
