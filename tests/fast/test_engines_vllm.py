"""vLLM: the fixtures' answers; drawn payloads over HTTP, in process, as deltas and as tensors."""

import copy
import itertools
import json
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlreplay import RolloutSamplingMask
from rlreplay.engines import vllm
from rlreplay.errors import MissingMaskError, MissingTokenError, ReplayError
from tests.fast.payloads import (
    ANSWERS,
    DATA,
    NO_INTEGERS,
    NO_PLAIN_TENSORS,
    VOCAB,
    Drawn,
    cuts,
    drawn_responses,
    fixture,
    sound_or_refused,
    spans,
    spoiled,
    tensors_of_no_integers,
    tensors_that_numpy_lacks,
)
from tests.fast.strategies import refused

PROCESSED = "processed_logprobs"
PROMPT = [1, 2, 3]


def choice_of(response: Drawn, **other):
    """One choice over HTTP."""
    content = [
        {"token_id": token, "logprob": value, "rank": None, "top_logprobs": []}
        for token, value in zip(response.tokens, response.log_probs(), strict=True)
    ]
    return {
        "index": 0,
        "finish_reason": response.finish_reason,
        "token_ids": response.tokens,
        "logprobs": {"content": content},
        "sampling_mask": response.supports,
        **other,
    }


def completion_of(response: Drawn, mask, **other):
    """One in-process `CompletionOutput`."""
    values = zip(response.tokens, response.log_probs(), strict=True)
    return SimpleNamespace(
        index=0,
        token_ids=array("q", response.tokens),
        logprobs=[{token: SimpleNamespace(logprob=value, rank=1)} for token, value in values],
        finish_reason=response.finish_reason,
        sampling_mask=mask,
        **other,
    )


def nested(supports):
    return SimpleNamespace(token_ids=supports)


def csr(supports, convert=np.array):
    ids = list(itertools.chain.from_iterable(supports))
    ends = [0, *itertools.accumulate(map(len, supports))]
    return SimpleNamespace(
        token_ids=convert(np.array(ids, np.int32)), offsets=convert(np.array(ends, np.int64))
    )


MASK_FORMS = {
    "nested": lambda s: s,
    "nested object": nested,
    "nested dict": lambda s: {"token_ids": s},
    "arrays": lambda s: [np.array(row, np.int32) for row in s],
    "csr object": csr,
    "csr tensors": lambda s: csr(s, torch.from_numpy),
    "csr dict": lambda s: vars(csr(s, np.ndarray.tolist)),
}


def small(**other):
    """A choice of three tokens; the second was the only one left to sample."""
    values = zip([7, 5, 2], [-0.5, 0.0, -0.25], strict=True)
    return {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": [7, 5, 2],
        "logprobs": {"content": [{"token_id": t, "logprob": v} for t, v in values]},
        "sampling_mask": [[7, 3], [5], [9, 2]],
        **other,
    }


def load(choice, **options):
    options = {"logprobs_mode": PROCESSED, **options}
    (rollout,) = vllm.from_response({"choices": [choice]}, prompt_ids=PROMPT, **options)
    assert vllm.from_choice(choice, prompt_ids=PROMPT, **options) == rollout
    return rollout


# Fixtures


def test_fixture_with_one_choice_missing_its_mask():
    data, answer = fixture("vllm_generate.json"), ANSWERS["vllm[0]"]
    said = ANSWERS["vllm[1]"].removeprefix("error: ")
    for mode in ("raw_logprobs", PROCESSED):
        with refused(said, sample=1, row=0, kind=MissingMaskError):
            vllm.from_response(data["response"], prompt_ids=data["prompt_ids"], logprobs_mode=mode)
    first, second = vllm.from_response(
        data["response"],
        prompt_ids=data["prompt_ids"],
        vocab_size=512,
        on_missing_mask="unrestricted",
        logprobs_mode=PROCESSED,
    )
    assert len(first) == answer["response_length"]
    assert first.sampling_mask.lengths.tolist() == answer["support_sizes"]
    assert first.rollout_log_probs.astype(np.float64).sum() == answer["log_prob_sum"]
    assert [list(span) for span in first.weight_versions] == answer["weight_versions"]
    assert first.prompt_ids.tolist() == data["prompt_ids"][0]
    assert first.finish_reason == "stop"
    assert second.sampling_mask == RolloutSamplingMask.full(3)
    assert second.rollout_log_probs is None
    assert second.finish_reason == "length"
    alone = vllm.from_choice(
        data["response"]["choices"][0], prompt_ids=data["prompt_ids"], logprobs_mode=PROCESSED
    )
    assert alone == first


@pytest.mark.parametrize("form", ["nested object", "arrays", "csr object", "csr tensors"])
def test_fixture_in_process(form):
    data, answer = fixture("vllm_generate.json"), ANSWERS["vllm[0]"]
    choice = data["response"]["choices"][0]
    prompt = data["prompt_ids"][0]
    expected = vllm.from_choice(choice, prompt_ids=prompt)
    logged = [{e["token_id"]: SimpleNamespace(**e)} for e in choice["logprobs"]["content"]]

    def outputs(*, cumulative):
        for start, end in spans([5, len(logged)]):
            rows = slice(0 if cumulative else start, end)
            mask = MASK_FORMS[form](choice["sampling_mask"][rows])
            own = {"token_ids": choice["token_ids"][rows], "logprobs": logged[rows]}
            ended = end == len(logged)
            own["finish_reason"] = choice["finish_reason"] if ended else None
            own["weight_versions"] = choice["weight_versions"] if ended else None
            yield SimpleNamespace(prompt_token_ids=prompt, outputs=[completion(mask, **own)])

    def completion(mask, **own):
        return SimpleNamespace(**{**choice, "sampling_mask": mask, **own})

    whole = completion(MASK_FORMS[form](choice["sampling_mask"]), logprobs=logged)
    rollouts = vllm.from_output(SimpleNamespace(prompt_token_ids=prompt, outputs=[whole]))
    for cumulative in (True, False):
        chunks = list(outputs(cumulative=cumulative))
        rollouts.append(vllm.from_stream(chunks, prompt_ids=prompt, cumulative=cumulative))
    for rollout in rollouts:
        assert rollout == expected
        assert rollout.sampling_mask.lengths.tolist() == answer["support_sizes"]
        assert rollout.rollout_log_probs.astype(np.float64).sum() == answer["log_prob_sum"]
        assert [list(span) for span in rollout.weight_versions] == answer["weight_versions"]


def test_tensor_fixture():
    answer = ANSWERS["vllm_tensors"]["rows"]
    with np.load(DATA / "vllm_sampling_mask_tensors.npz") as data:
        arrays = {name: data[name] for name in ("token_ids", "counts", "packed_mask")}
        vocab_size = int(data["vocab_size"])
    assert vllm.from_tensors(**arrays, vocab_size=vocab_size).to_mask_list() == answer
    tensors = {name: torch.from_numpy(value) for name, value in arrays.items()}
    assert vllm.from_tensors(**tensors, vocab_size=vocab_size).to_mask_list() == answer


# Every form gives the drawn rollout


@given(st.lists(drawn_responses(), max_size=3), st.data())
def test_response(responses: list[Drawn], data):
    prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4))
    body = {
        "prompt_token_ids": prompt,
        "choices": [choice_of(response, index=i) for i, response in enumerate(responses)],
    }
    text = json.loads(json.dumps(body))
    options = {"vocab_size": VOCAB, "logprobs_mode": PROCESSED}
    expected = [response.rollout(prompt_ids=prompt) for response in responses]
    assert vllm.from_response(text, prompt_ids=prompt, **options) == expected
    assert vllm.from_response([text, text], prompt_ids=[prompt] * 2, **options) == expected * 2


@pytest.mark.parametrize("form", MASK_FORMS)
@given(response=drawn_responses())
def test_mask_forms(form, response: Drawn):
    mask = MASK_FORMS[form](response.supports)
    options = {"prompt_ids": response.prompt, "vocab_size": VOCAB, "logprobs_mode": PROCESSED}
    over_http = choice_of(response, sampling_mask=mask)
    assert vllm.from_choice(over_http, **options) == response.rollout()
    (in_process,) = vllm.from_output(completion_of(response, mask), **options)
    assert in_process == response.rollout()


@given(st.lists(drawn_responses(), max_size=3))
def test_request_output(responses: list[Drawn]):
    output = SimpleNamespace(
        prompt_token_ids=PROMPT,
        outputs=[completion_of(response, nested(response.supports)) for response in responses],
    )
    expected = [response.rollout(prompt_ids=PROMPT) for response in responses]
    assert vllm.from_output(output, logprobs_mode=PROCESSED) == expected
    assert vllm.from_output(output, prompt_ids=PROMPT, logprobs_mode=PROCESSED) == expected
    with refused("prompt_token_ids are not"):
        vllm.from_output(output, prompt_ids=[1, 2], logprobs_mode=PROCESSED)


def deltas(choice, ends, form="nested"):
    """A choice over HTTP as a stream whose chunks end at `ends`."""
    chunks = []
    for start, end in spans(ends):
        new = copy.deepcopy(choice)
        new["token_ids"] = choice["token_ids"][start:end]
        new["sampling_mask"] = MASK_FORMS[form](choice["sampling_mask"][start:end])
        if choice["logprobs"] is not None:
            new["logprobs"] = {"content": choice["logprobs"]["content"][start:end]}
        if end < ends[-1] or len(chunks) < len(ends) - 1:
            new["finish_reason"] = None
        chunks.append({"choices": [new]})
    return chunks


@pytest.mark.parametrize("form", ["nested", "nested dict", "csr dict"])
@given(response=drawn_responses(), data=st.data())
def test_deltas(form, response: Drawn, data):
    chunks = deltas(choice_of(response), data.draw(cuts(len(response))), form)
    chunks[0]["prompt_token_ids"] = response.prompt
    chunks.append({"choices": [], "usage": {}})
    options = {"prompt_ids": response.prompt, "vocab_size": VOCAB, "logprobs_mode": PROCESSED}
    assert vllm.from_stream(iter(chunks), **options) == response.rollout()


@given(response=drawn_responses(min_size=1), data=st.data())
def test_the_forms_of_a_stream_may_differ(response: Drawn, data):
    cumulative = data.draw(st.booleans())
    chunks = outputs(response, data.draw(cuts(len(response))), cumulative=cumulative)
    for chunk in chunks:
        own = chunk.outputs[0]
        rows = [data.draw(st.permutations(row)) for row in own.sampling_mask.token_ids]
        own.sampling_mask = data.draw(st.sampled_from(list(MASK_FORMS.values())))(rows)
    rollout = vllm.from_stream(chunks, prompt_ids=response.prompt, cumulative=cumulative)
    assert rollout == response.rollout()


def outputs(response: Drawn, ends, *, cumulative, form=nested):
    """A response as in-process outputs that end at `ends`."""
    whole = completion_of(response, None)
    chunks = []
    for start, end in spans(ends):
        start = 0 if cumulative else start
        part = copy.copy(whole)
        part.token_ids, part.logprobs = whole.token_ids[start:end], whole.logprobs[start:end]
        part.sampling_mask = form(response.supports[start:end])
        part.finish_reason = None
        chunks.append(SimpleNamespace(prompt_token_ids=response.prompt, outputs=[part]))
    chunks[-1].outputs[0].finish_reason = response.finish_reason
    return chunks


@pytest.mark.parametrize("cumulative", [True, False])
@pytest.mark.parametrize("form", [nested, csr, MASK_FORMS["arrays"]])
@given(response=drawn_responses(), data=st.data())
def test_in_process_streams(form, cumulative, response: Drawn, data):
    ends = data.draw(cuts(len(response)))
    chunks = outputs(response, ends, cumulative=cumulative, form=form)
    rollout = vllm.from_stream(
        iter(chunks), prompt_ids=response.prompt, vocab_size=VOCAB, cumulative=cumulative
    )
    assert rollout == response.rollout()


@pytest.mark.parametrize("cumulative", [True, False])
@given(response=drawn_responses(), data=st.data())
def test_the_style_of_an_in_process_stream_is_proved_or_asked_for(
    cumulative, response: Drawn, data
):
    ends = data.draw(cuts(len(response)))
    chunks = outputs(response, ends, cumulative=cumulative)
    tokens = [list(chunk.outputs[0].token_ids) for chunk in chunks]
    repeated = all(new[: len(old)] == old for old, new in itertools.pairwise(tokens))
    if repeated and sum(map(len, tokens)) > len(tokens[-1]):
        with refused("may be cumulative or deltas"):
            vllm.from_stream(chunks, prompt_ids=response.prompt)
    else:
        assert vllm.from_stream(chunks, prompt_ids=response.prompt) == response.rollout()
    versions = [{"version": "7", "start": 0, "end": len(response)}]
    chunks[-1].outputs[0].weight_versions = versions
    rollout = vllm.from_stream(chunks, prompt_ids=response.prompt)
    assert rollout == response.rollout(weight_versions=[("7", 0, len(response))])


@given(st.lists(drawn_responses(), min_size=2, max_size=3), st.data())
def test_a_stream_of_several_choices(responses: list[Drawn], data):
    streams = [
        deltas(choice_of(response, index=i), data.draw(cuts(len(response))))
        for i, response in enumerate(responses)
    ]
    chunks = [c for each in itertools.zip_longest(*streams) for c in each if c is not None]
    for i, response in enumerate(responses):
        rollout = vllm.from_stream(chunks, prompt_ids=PROMPT, logprobs_mode=PROCESSED, choice=i)
        assert rollout == response.rollout(prompt_ids=PROMPT)
    with refused("several choices"):
        vllm.from_stream(chunks, prompt_ids=PROMPT, logprobs_mode=PROCESSED)
    with refused("no such choice"):
        vllm.from_stream(chunks, prompt_ids=PROMPT, logprobs_mode=PROCESSED, choice=9)


supports_of_a_step = st.lists(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20, unique=True).map(sorted),
    max_size=8,
)


def device_form(supports, width, vocab_size=VOCAB):
    """Compact ids, counts and bitmask, with garbage in what must not be read."""
    token_ids = np.full((len(supports), width), -7, np.int32)
    packed = np.full((len(supports), -(-vocab_size // 8)), 0xFF, np.uint8)
    for row, ids in enumerate(supports):
        token_ids[row, : len(ids)] = ids[:width]
        if len(ids) > width:
            packed[row] = 0
            for i in ids:
                packed[row, i // 8] |= 1 << (i % 8)
    return token_ids, np.array([len(ids) for ids in supports], np.int32), packed


@given(supports_of_a_step, st.integers(1, 24), st.booleans())
def test_tensors(supports, width, tensors):
    token_ids, counts, packed = device_form(supports, width)
    if tensors:
        token_ids, counts, packed = map(torch.from_numpy, (token_ids, counts, packed))
    mask = vllm.from_tensors(token_ids, counts, packed, VOCAB)
    assert mask == RolloutSamplingMask.from_mask_list(supports)
    if max(map(len, supports), default=0) <= width:
        assert vllm.from_tensors(token_ids, counts, None, VOCAB) == mask


# What log-probs are normalised over


def test_only_processed_log_probs_are_taken_and_they_are_the_default():
    (rollout,) = vllm.from_response({"choices": [small()]}, prompt_ids=PROMPT)
    assert rollout == load(small())
    assert rollout.rollout_log_probs.tolist() == [-0.5, 0.0, -0.25]
    for mode in ("raw_logprobs", "processed_logits", "raw_logits"):
        assert load(small(), logprobs_mode=mode).rollout_log_probs is None
    for absent in (None, {}, {"content": None}):
        assert load(small(logprobs=absent)).rollout_log_probs is None


@pytest.mark.parametrize("mode", ["processed", "", 3, True, [], None])
def test_unknown_modes(mode):
    for make in (
        lambda: load(small(), logprobs_mode=mode),
        lambda: vllm.from_stream([], prompt_ids=PROMPT, logprobs_mode=mode),
        lambda: vllm.from_output(None, prompt_ids=PROMPT, logprobs_mode=mode),
    ):
        with refused("unknown logprobs_mode"):
            make()


def test_raw_log_probs_passed_off_as_processed_show_on_singletons():
    with refused("not normalised over the support", sample=0, row=1):
        load(with_log_probs([-0.5, -0.1, -0.25]))


def with_log_probs(values, ids=(7, 5, 2)):
    content = [{"token_id": t, "logprob": v} for t, v in zip(ids, values, strict=True)]
    return small(logprobs={"content": content})


@pytest.mark.parametrize(
    ("values", "row"),
    [
        ([-0.5, None, -0.25], 1),
        ([-0.5, "0", -0.25], 1),
        ([-0.5, 0.0, float("nan")], 2),
        ([-0.5, 0.0, 0.5], 2),
        ([-0.5, 0.0, -9999.0], 2),
        ([-float("inf"), 0.0, -0.25], 0),
        ([-0.5, True, -0.25], 1),
        ([-0.5, 0.0, 10**400], 2),
    ],
)
def test_log_probs_that_are_none(values, row):
    with refused("logprobs|log_probs", sample=0, row=row):
        load(with_log_probs(values))


@pytest.mark.parametrize(
    ("ids", "row"), [((7, 5, 3), 2), ((5, 7, 2), 0), ((7, None, 2), 1), ((7, "5", 2), 1)]
)
def test_log_probs_of_other_tokens(ids, row):
    with refused("logprobs", sample=0, row=row):
        load(with_log_probs([-0.5, 0.0, -0.25], ids))


def test_log_probs_without_ids():
    content = [{"logprob": v, "token": "token_id:7"} for v in (-0.5, 0.0, -0.25)]
    assert load(small(logprobs={"content": content})) == load(small())


@pytest.mark.parametrize(
    ("logprobs", "row"),
    [
        ({"content": []}, 0),
        ({"content": [{"token_id": 7, "logprob": -0.5}]}, 1),
        ({"content": [{"logprob": -0.5}, None, {"logprob": -0.5}]}, 1),
        ({"content": [{"logprob": -0.5}, -0.5, {"logprob": -0.5}]}, 1),
        ({"content": "abc"}, None),
        ({"content": 3}, None),
        ({"content": {"logprob": 1}}, None),
        ({"tokens": ["a", "b", "c"], "token_logprobs": [-0.5, 0.0, -0.25]}, None),
        ({7: -0.5, 5: 0.0, 2: -0.25}, None),
        (memoryview(np.array(-0.5)), None),
        (memoryview(np.zeros((3, 2))), None),
        ({"content": memoryview(np.zeros((3, 2)))}, None),
        ([{}, {}, {}], 0),
        ([{7: -0.5}, {4: 0.0}, {2: -0.25}], 1),
        ([{7: -0.5}, {5: "0"}, {2: -0.25}], 1),
        ([{7: None}, {5: 0.0}, {2: -0.25}], 0),
        ("abc", None),
        (7, None),
        (True, None),
    ],
)
def test_log_probs_of_the_wrong_type(logprobs, row):
    with refused("logprobs|log-prob", sample=0, row=row):
        load(small(logprobs=logprobs))


def test_in_process_log_probs_as_plain_floats():
    assert load(small(logprobs=[{7: -0.5, 1: -9.0}, {5: 0.0}, {2: -0.25}])) == load(small())


# Masks, prompts, versions


@pytest.mark.parametrize(
    ("mask", "row"),
    [
        ([[7, 3], [5]], 2),
        ([[7, 3], [5], [9, 2], [1]], 3),
        ([[7, 3], [], [9, 2]], 1),
        ([[7, 3], None, [9, 2]], 1),
        ([[7, 3], [5.0], [9, 2]], 1),
        ([[7, 3], [5, 5], [9, 2]], 1),
        ([[7, 3], [5], [9, -2]], 2),
        ([[7, 3], [5], [10, 2]], 2),
        ([[7, 3], "5", [9, 2]], 1),
        ({"token_ids": [7, 3, 5, 9, 2], "offsets": [0, 2, 3]}, 1),
        ({"token_ids": [7, 3, 5, 9, 2], "offsets": [0, 2, 5]}, 2),
        ({"token_ids": [7, 3, 5, 9, 2], "offsets": [0, 2, 1, 5]}, 1),
        ({"token_ids": [7, 3, 5, 9, 2], "offsets": [0, 2, 2, 5]}, 1),
        ({"token_ids": [7, 3, 5, 9, 2], "offsets": "abcd"}, None),
        ({"offsets": [0, 2, 3, 5]}, None),
        ({"token_ids": None}, None),
        ({}, None),
        ("abc", None),
        (7, None),
        (True, None),
    ],
)
def test_masks_refused(mask, row):
    with refused("expected", sample=0, row=row):
        vllm.from_response(
            {"choices": [small(sampling_mask=mask)]},
            prompt_ids=PROMPT,
            vocab_size=10,
            logprobs_mode=PROCESSED,
        )


def test_sampled_token_outside():
    with refused("not in its support", sample=0, row=2, kind=MissingTokenError):
        load(small(token_ids=[7, 5, 3], logprobs=None))


@pytest.mark.parametrize("gone", [True, False])
def test_missing_mask(gone):
    choice = small(sampling_mask=None)
    if gone:
        del choice["sampling_mask"]
    with refused("for this choice", sample=0, row=0, kind=MissingMaskError):
        vllm.from_response({"choices": [choice]}, prompt_ids=PROMPT)
    with refused("for this choice", row=0, kind=MissingMaskError):
        vllm.from_choice(choice, prompt_ids=PROMPT)
    with refused("for this choice", row=0, kind=MissingMaskError):
        vllm.from_stream([{"choices": [choice]}], prompt_ids=PROMPT)
    with refused("for this choice", sample=0, row=0, kind=MissingMaskError):
        vllm.from_output(SimpleNamespace(**choice), prompt_ids=PROMPT)
    rollout = load(choice, on_missing_mask="unrestricted")
    assert rollout.sampling_mask == RolloutSamplingMask.full(3)
    assert rollout.rollout_log_probs is None


@pytest.mark.parametrize("declared", [[1, 2], [1, 2, 4], [], "abc", 7, [1, None, 3]])
def test_prompts_must_agree(declared):
    body = {"choices": [small()], "prompt_token_ids": declared}
    with pytest.raises(ReplayError) as caught:
        vllm.from_response(body, prompt_ids=PROMPT, logprobs_mode=PROCESSED)
    assert caught.value.sample == 0
    with pytest.raises(ReplayError):
        vllm.from_stream([body], prompt_ids=PROMPT, logprobs_mode=PROCESSED)


def test_in_process_output_without_a_prompt():
    with refused("prompt_ids has the wrong type"):
        vllm.from_output(SimpleNamespace(**small()), logprobs_mode=PROCESSED)


@pytest.mark.parametrize("bad", [None, 7, "ab", [7], {}, {"outputs": []}])
def test_what_is_no_output(bad):
    with pytest.raises(ReplayError):
        vllm.from_output(bad, prompt_ids=PROMPT, logprobs_mode=PROCESSED)


@pytest.mark.parametrize("bad", [None, 7, "ab", [7], {}, {"choices": None}, {"choices": [None]}])
def test_what_is_no_response(bad):
    with pytest.raises(ReplayError):
        vllm.from_response(bad, prompt_ids=PROMPT, logprobs_mode=PROCESSED)
    with pytest.raises(ReplayError):
        vllm.from_choice(bad, prompt_ids=PROMPT, logprobs_mode=PROCESSED)


def test_samples_count_choices_of_all_responses():
    good, bad = {"choices": [small(), small()]}, {"choices": [small(token_ids=[7, 5, 3])]}
    with refused("expected", sample=2, row=2, kind=MissingTokenError):
        vllm.from_response([good, bad], prompt_ids=[PROMPT] * 2, logprobs_mode="raw_logprobs")


def test_weight_versions():
    listed = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 3}]
    assert load(small(weight_versions=listed)).weight_versions == (("7", 0, 1), ("8", 1, 3))
    with refused("spans do not cover", sample=0, row=1):
        load(small(weight_versions=listed[:1]))
    chunks = deltas(small(), [1, 3])
    chunks[-1]["choices"][0]["weight_versions"] = listed
    rollout = vllm.from_stream(chunks, prompt_ids=PROMPT, logprobs_mode=PROCESSED)
    assert rollout == load(small(weight_versions=listed))


# The style of a stream


def growing(*tokens, **last):
    """In-process outputs of these tokens, each with its token as its support."""
    chunks = [
        SimpleNamespace(token_ids=list(each), sampling_mask=nested([[t] for t in each]))
        for each in tokens
    ]
    vars(chunks[-1]).update(last)
    return chunks


def test_cumulative_outputs_are_not_taken_twice():
    chunks = growing([1], [1, 3], [1, 3, 5])
    with refused("may be cumulative or deltas"):
        vllm.from_stream(chunks, prompt_ids=PROMPT)
    whole = vllm.from_stream(chunks, prompt_ids=PROMPT, cumulative=True)
    assert whole.response_ids.tolist() == [1, 3, 5]
    joined = vllm.from_stream(chunks, prompt_ids=PROMPT, cumulative=False)
    assert joined.response_ids.tolist() == [1, 1, 3, 1, 3, 5]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([[1], [3], [5]], [1, 3, 5]),
        ([[1], [1, 3], [5]], [1, 1, 3, 5]),
        ([[1, 3], []], [1, 3]),
        ([[], [], [1, 3]], [1, 3]),
        ([[1, 3]], [1, 3]),
        ([[], []], []),
        ([[1, 3], [1]], [1, 3, 1]),
        ([[1], [1]], None),
        ([[], [1], [1, 3]], None),
    ],
)
def test_styles_proved_by_the_tokens(tokens, expected):
    if expected is None:
        with refused("may be cumulative or deltas"):
            vllm.from_stream(growing(*tokens), prompt_ids=PROMPT)
    else:
        rollout = vllm.from_stream(growing(*tokens), prompt_ids=PROMPT)
        assert rollout.response_ids.tolist() == expected


@pytest.mark.parametrize(("end", "expected"), [(2, [1, 3]), (3, [1, 1, 3]), (4, None), ("3", None)])
def test_styles_proved_by_weight_versions(end, expected):
    chunks = growing([1], [1, 3], weight_versions=[{"version": "7", "start": 0, "end": end}])
    if expected is None:
        with refused("may be cumulative or deltas"):
            vllm.from_stream(chunks, prompt_ids=PROMPT)
    else:
        assert vllm.from_stream(chunks, prompt_ids=PROMPT).response_ids.tolist() == expected


def test_http_chunks_are_deltas_unless_told():
    bodies = [{"choices": [vars(chunk)]} for chunk in growing([1], [1, 3])]
    joined = vllm.from_stream(bodies, prompt_ids=PROMPT)
    assert joined.response_ids.tolist() == [1, 1, 3]
    whole = vllm.from_stream(bodies, prompt_ids=PROMPT, cumulative=True)
    assert whole.response_ids.tolist() == [1, 3]


@pytest.mark.parametrize(
    ("change", "row", "match"),
    [
        ({"token_ids": [4, 3]}, 0, "token_ids of chunk 1 changes"),
        ({"token_ids": []}, 0, "does not agree"),
        ({"token_ids": [], "sampling_mask": []}, 0, "token_ids of chunk 1 shrinks"),
        ({"sampling_mask": [[1, 4], [3]]}, 0, "sampling_mask of chunk 1 changes"),
        ({"sampling_mask": None}, 0, "sampling_mask of chunk 1 shrinks"),
        ({"sampling_mask": {"token_ids": [4, 3], "offsets": [0, 1, 2]}}, 0, "chunk 1 changes"),
        ({"sampling_mask": {"token_ids": [1, 3], "offsets": [0, 1, 3]}}, 1, "do not end"),
        ({"sampling_mask": {"token_ids": [1, 3], "offsets": [1, 1, 2]}}, 0, "start at 0"),
        ({"sampling_mask": {"token_ids": [1, 3], "offsets": [0, 2]}}, 1, "does not agree"),
        ({"sampling_mask": [[1], []]}, 1, "empty support"),
        ({"sampling_mask": [[1], None]}, 1, "not a list"),
        ({"token_ids": [1, "3"]}, 1, "integers"),
        ({"token_ids": [1, 4]}, 1, "not in its support"),
        ({"logprobs": None}, 0, "logprobs of chunk 1 shrinks"),
        ({"logprobs": [{1: -0.5}, {3: 0.0}]}, 0, "logprobs of chunk 1 changes"),
    ],
)
def test_cumulative_streams_refused(change, row, match):
    chunks = growing([1], [1, 3])
    chunks[0].logprobs, chunks[1].logprobs = [{1: 0.0}], [{1: 0.0}, {3: 0.0}]
    assert len(vllm.from_stream(chunks, prompt_ids=PROMPT, cumulative=True)) == 2
    vars(chunks[1]).update(change)
    mode = "raw_logprobs" if match == "not in its support" else PROCESSED
    if match == "not in its support":
        chunks[1].logprobs = [{1: 0.0}, {4: 0.0}]
    with pytest.raises(ReplayError, match=match) as caught:
        vllm.from_stream(chunks, prompt_ids=PROMPT, cumulative=True, logprobs_mode=mode)
    assert caught.value.row == row


@pytest.mark.parametrize("neither", ["yes", 1, 0, [], torch.tensor(True)], ids=str)
def test_a_style_is_a_flag(neither):
    with refused("cumulative has the wrong type"):
        vllm.from_stream(growing([1]), prompt_ids=PROMPT, cumulative=neither)


def test_chunks_of_two_requests():
    chunks = deltas(small(), [1, 2, 3])
    chunks[0]["id"], chunks[1]["id"], chunks[2]["id"] = "a", None, "b"
    with refused("chunk 2 belongs to another request"):
        vllm.from_stream(chunks, prompt_ids=PROMPT)
    chunks = [
        SimpleNamespace(request_id=name, prompt_token_ids=PROMPT, outputs=[each])
        for name, each in zip("ab", growing([1], [2, 3]), strict=True)
    ]
    with refused("chunk 1 belongs to another request"):
        vllm.from_stream(chunks, prompt_ids=PROMPT)
    chunks[1].request_id = "a"
    assert vllm.from_stream(chunks, prompt_ids=PROMPT).response_ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize("bad", ["0", True, -1, 1.0, [], {}, torch.tensor(0), False], ids=str)
def test_a_choice_is_a_number(bad):
    with refused("index is not a count"):
        vllm.from_stream([{"choices": [small(index=bad)]}], prompt_ids=PROMPT)
    with refused("choice is not a count"):
        vllm.from_stream([{"choices": [small()]}], prompt_ids=PROMPT, choice=bad)


# Tensors of the wrong type


@pytest.mark.parametrize("kind", NO_INTEGERS)
def test_tensors_of_no_integers(kind):
    bad = tensors_of_no_integers([7, 5, 2])[kind]
    offsets = tensors_of_no_integers([0, 1, 2])[kind]
    one_a_row = [[7, 3], bad, [9, 2]]
    for field in (
        {"token_ids": bad},
        {"sampling_mask": bad},
        {"sampling_mask": one_a_row},
        {"sampling_mask": {"token_ids": bad, "offsets": [0, 1, 2, 3]}},
        {"sampling_mask": {"token_ids": [7, 5, 2], "offsets": offsets}},
        {"logprobs": bad},
        {"weight_versions": bad},
        {"finish_reason": bad},
    ):
        with pytest.raises(ReplayError):
            load(small(**field))
        with pytest.raises(ReplayError):
            vllm.from_output(SimpleNamespace(**small(**field)), prompt_ids=PROMPT)
        for cumulative in (None, True, False):
            with pytest.raises(ReplayError):
                vllm.from_stream(
                    [SimpleNamespace(**small(**field))], prompt_ids=PROMPT, cumulative=cumulative
                )
    for stream in (bad, [bad]):
        with pytest.raises(ReplayError):
            vllm.from_stream(stream, prompt_ids=PROMPT)
    with pytest.raises(ReplayError):
        vllm.from_response({"choices": [small()]}, prompt_ids=bad if kind != "bool" else [bad])


@pytest.mark.parametrize("kind", NO_INTEGERS)
def test_device_tensors_of_no_integers(kind):
    bad = tensors_of_no_integers([1, 2])[kind]
    flat = torch.tensor([[1, 2], [3, 4]])
    with pytest.raises(ReplayError):
        vllm.from_tensors(flat, bad, None, VOCAB)
    for matrix in (bad, flat.bfloat16(), flat.bool(), flat.to("meta"), flat.to_sparse()):
        with refused("token_ids has the wrong shape or type"):
            vllm.from_tensors(matrix, [1, 1], None, VOCAB)
        with refused("packed_mask has the wrong shape or type"):
            vllm.from_tensors(flat, [1, 3], matrix, VOCAB)


# Streams that must be refused


def broken(chunks, name, value, at=1):
    chunks[at]["choices"][0][name] = value
    return chunks


@pytest.mark.parametrize(
    ("chunks", "row", "match"),
    [
        (broken(deltas(small(), [1, 3]), "sampling_mask", None), 1, "some deltas"),
        (broken(deltas(small(), [1, 3]), "sampling_mask", None, at=0), 0, "some deltas"),
        (broken(deltas(small(), [1, 3]), "sampling_mask", [[5]]), 2, "does not agree"),
        (
            broken(deltas(small(), [1, 3], "csr dict"), "sampling_mask", {"token_ids": [5, 9, 2]}),
            3,
            "does not agree",
        ),
        (
            broken(
                deltas(small(), [1, 3], "csr dict"),
                "sampling_mask",
                {"token_ids": [5, 9, 2], "offsets": [0, 4, 3]},
            ),
            2,
            "decrease",
        ),
        (
            broken(deltas(small(), [1, 3], "csr dict"), "sampling_mask", [[5], [9, 9]]),
            2,
            "repeated",
        ),
        (broken(deltas(small(), [1, 3]), "token_ids", [5, 3]), 2, "not in its support"),
        (broken(deltas(small(), [1, 3]), "token_ids", [5, "2"]), 2, "integers"),
        (broken(deltas(small(), [1, 3]), "logprobs", None), 1, "missing from chunk 1"),
        (broken(deltas(small(), [1, 3]), "logprobs", None, at=0), 0, "missing from chunk 0"),
        (broken(deltas(small(), [1, 3]), "finish_reason", "stop", at=0), None, "after the choice"),
        (broken(deltas(small(), [1, 3]), "index", "0"), None, "index"),
        ([{"choices": [{"index": 0, "token_ids": None}]}], None, "no token ids"),
        ([{"choices": []}], None, "no such choice"),
        ([], None, "no such choice"),
        ([None], None, "wrong type"),
        ([{}], None, "wrong type"),
        ([7], None, "wrong type"),
        ({"choices": []}, None, "wrong type"),
        ("ab", None, "wrong type"),
        (7, None, "wrong type"),
        (memoryview(np.array(1.0)), None, "wrong type"),
        (memoryview(np.zeros((2, 3))), None, "wrong type"),
    ],
)
def test_streams_refused(chunks, row, match):
    options = {"prompt_ids": PROMPT, "logprobs_mode": PROCESSED}
    if match == "not in its support":
        options["logprobs_mode"] = "raw_logprobs"
    with pytest.raises(ReplayError, match=match) as caught:
        vllm.from_stream(chunks, **options)
    assert caught.value.row == row


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("cumulative", [True, False])
@pytest.mark.parametrize(("kept", "row"), [(0, 0), (1, 1), (3, 2)])
def test_log_probs_belong_to_their_own_chunk(with_ids, cumulative, kept, row):
    content = small()["logprobs"]["content"]
    if not with_ids:
        content = [{"logprob": each["logprob"]} for each in content]
    chunks = deltas(small(logprobs={"content": content}), [2, 3])
    if cumulative:
        chunks[1] = {"choices": [small(logprobs={"content": content})]}
    options = {"prompt_ids": PROMPT, "cumulative": cumulative}
    assert vllm.from_stream(chunks, **options) == load(small())
    broken(chunks, "logprobs", {"content": content[:kept]}, at=0)
    if not cumulative:
        broken(chunks, "logprobs", {"content": content[kept:]})
    with refused("logprobs of chunk 0 does not agree with its token_ids", row=row):
        vllm.from_stream(chunks, **options)


def test_log_probs_late_and_all_at_once():
    chunks = broken(deltas(small(), [2, 3]), "logprobs", None, at=0)
    content = [{"logprob": each["logprob"]} for each in small()["logprobs"]["content"]]
    with refused("logprobs are missing from chunk 0", row=0):
        vllm.from_stream(broken(chunks, "logprobs", {"content": content}), prompt_ids=PROMPT)


def versions(*triples):
    return [dict(zip(("version", "start", "end"), each, strict=True)) for each in triples]


@pytest.mark.parametrize("cumulative", [True, False])
@pytest.mark.parametrize(
    ("first", "last", "row", "match"),
    [
        ([("7", 0, 2)], [("7", 0, 3)], None, None),
        ([], [("7", 0, 3)], None, None),
        ([("7", 0, 2)], [("8", 0, 3)], 0, "chunk 1 changes what an earlier"),
        ([("7", 0, 2)], [("7", 0, 1), ("8", 1, 3)], 1, "chunk 1 changes what an earlier"),
        ([("7", 0, 7)], [("7", 0, 3)], 2, "chunk 0 do not cover"),
        ([("7", 0, 3)], None, 2, "chunk 0 do not cover"),
        ([("7", 0, 2)], [], 2, "spans do not cover"),
        ([("7", 0, 2)], None, 2, "spans do not cover"),
    ],
)
def test_versions_of_a_stream_must_agree(cumulative, first, last, row, match):
    chunks = deltas(small(), [2, 3])
    if cumulative:
        chunks[1] = {"choices": [small()]}
    for at, said in enumerate((first, last)):
        broken(chunks, "weight_versions", said if said is None else versions(*said), at)
    if match is None:
        rollout = vllm.from_stream(chunks, prompt_ids=PROMPT, cumulative=cumulative)
        assert rollout == load(small(weight_versions=versions(*last)))
    else:
        with refused(match, row=row):
            vllm.from_stream(chunks, prompt_ids=PROMPT, cumulative=cumulative)


class Incomparable:
    def __eq__(self, other):
        raise RuntimeError

    __hash__ = object.__hash__


@pytest.mark.parametrize("kind", [*NO_PLAIN_TENSORS, "array", "object"])
def test_tokens_that_do_not_compare(kind):
    def token():
        others = {"array": np.array([1, 2]), "object": Incomparable()}
        return {**tensors_that_numpy_lacks([1, 2]), **others}[kind]

    chunks = growing([1], [1, 3])
    chunks[0].token_ids, chunks[1].token_ids = [token()], [token(), 3]
    for cumulative in (None, True, False):
        with pytest.raises(ReplayError):
            vllm.from_stream(chunks, prompt_ids=PROMPT, cumulative=cumulative)


# Device tensors that must be refused


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ({"counts": np.array([1, 3, -1])}, 2),
        ({"counts": np.array([1, 3, VOCAB + 1])}, 2),
        ({"counts": np.array([1, 3, 10**9])}, 2),
        ({"counts": np.array([1, 0, 9])}, 1),
        ({"counts": np.array([1, 3, 8])}, 2),
        ({"counts": np.array([1, 3])}, None),
        ({"counts": np.array([1.0, 3.0, 9.0])}, None),
        ({"token_ids": np.array([[5, 0, 0, 0], [1, 1, 2, 0], [0, 1, 2, 3]])}, 1),
        ({"token_ids": np.array([[5, 0, 0, 0], [1, -2, 2, 0], [0, 1, 2, 3]])}, 1),
        ({"token_ids": np.array([[5, 0, 0, 0], [1, VOCAB, 2, 0], [0, 1, 2, 3]])}, 1),
        ({"token_ids": np.zeros((3, 4))}, None),
        ({"token_ids": np.zeros(3, np.int64)}, None),
        ({"token_ids": [[5], [1], [2]]}, None),
        ({"token_ids": None}, None),
        ({"packed_mask": None}, None),
        ({"packed_mask": np.zeros((3, 12), np.uint8)}, None),
        ({"packed_mask": np.zeros((2, 13), np.uint8)}, None),
        ({"packed_mask": np.zeros((3, 13), np.uint8)}, 2),
        ({"packed_mask": np.full((3, 13), 255, np.uint8)}, 2),
        ({"packed_mask": np.zeros((3, 13), np.int32)}, None),
        ({"vocab_size": -1}, None),
        ({"vocab_size": 97.0}, None),
        ({"vocab_size": None}, None),
    ],
)
def test_tensors_refused(change, row):
    token_ids, counts, packed = device_form([[5], [1, 2, 4], list(range(9))], 4)
    good = {"token_ids": token_ids, "counts": counts, "packed_mask": packed, "vocab_size": VOCAB}
    assert len(vllm.from_tensors(**good)) == 3
    with pytest.raises(ReplayError) as caught:
        vllm.from_tensors(**{**good, **change})
    assert caught.value.row == row, caught.value


# Junk

OPTIONS = st.fixed_dictionaries(
    {
        "on_missing_mask": st.sampled_from(["raise", "unrestricted"]),
        "logprobs_mode": st.sampled_from([PROCESSED, "raw_logprobs"]),
        "vocab_size": st.just(10),
    }
)
CHOICES = st.sampled_from(
    [
        small(weight_versions=[{"version": "7", "start": 0, "end": 3}]),
        small(sampling_mask={"token_ids": [7, 3, 5, 9, 2], "offsets": [0, 2, 3, 5]}),
    ]
)


@given(
    CHOICES.flatmap(lambda c: spoiled({"prompt_token_ids": PROMPT, "choices": [c, small()]})),
    OPTIONS,
)
def test_junk_in_a_response(body, options):
    sound_or_refused(10, lambda: vllm.from_response(body, prompt_ids=PROMPT, **options))


@given(CHOICES.flatmap(spoiled), OPTIONS)
def test_junk_in_a_choice(choice, options):
    sound_or_refused(10, lambda: vllm.from_choice(choice, prompt_ids=PROMPT, **options))


@given(CHOICES.flatmap(spoiled), OPTIONS)
def test_junk_in_an_output(choice, options):
    names = choice if isinstance(choice, dict) else {}
    output = SimpleNamespace(**{str(name): value for name, value in names.items()})
    sound_or_refused(10, lambda: vllm.from_output(output, prompt_ids=PROMPT, **options))


@given(st.sampled_from([[1, 3], [0, 1, 3]]).flatmap(lambda e: spoiled(deltas(small(), e))), OPTIONS)
def test_junk_in_a_stream(chunks, options):
    sound_or_refused(10, lambda: vllm.from_stream(chunks, prompt_ids=PROMPT, **options))
