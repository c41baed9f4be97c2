"""SGLang payloads: the fixtures' answers, drawn payloads in every form, and hostile ones."""

import copy
import itertools
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlreplay import RolloutSamplingMask, WeightVersionSpan
from rlreplay.engines import sglang
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
    fixture_lines,
    sound_or_refused,
    spans,
    spoiled,
    tensors_of_no_integers,
    tensors_that_numpy_lacks,
)
from tests.fast.strategies import refused

MASK = "output_token_sampling_mask"
LOG_PROBS = "output_token_sampling_logprobs"
LENGTH = "output_token_sampling_mask_length"
HOSTILE = json.loads((DATA / "hostile_sglang.json").read_text())
PROMPT = [1, 2, 3]


def payload(response: Drawn, *, support: bool = False, **meta):
    """A `/generate` response."""
    values = response.support_log_probs() if support else response.log_probs()
    return {
        "output_ids": response.tokens,
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": response.finish_reason},
            "prompt_tokens": len(response.prompt),
            "completion_tokens": len(response),
            MASK: response.supports,
            LOG_PROBS: values,
            LENGTH: len(response),
            **meta,
        },
    }


def cut(whole, ends, *, cumulative):
    """The same response as a stream whose chunks end at `ends`."""
    chunks = []
    for start, end in spans(ends):
        rows = slice(0 if cumulative else start, end)
        meta = copy.deepcopy(whole["meta_info"])
        meta |= {MASK: meta[MASK][rows], LOG_PROBS: meta[LOG_PROBS][rows], LENGTH: end}
        meta |= {"finish_reason": None, "completion_tokens": end}
        chunks.append({"output_ids": whole["output_ids"][rows], "meta_info": meta})
    chunks[-1]["meta_info"]["finish_reason"] = whole["meta_info"]["finish_reason"]
    return chunks


def load(response, **options):
    (rollout,) = sglang.from_response(response, prompt_ids=PROMPT, **options)
    return rollout


def small(**meta):
    """Three tokens; the second was the only one left to sample."""
    return {
        "output_ids": [7, 5, 2],
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": 2},
            "prompt_tokens": 3,
            "completion_tokens": 3,
            MASK: [[7, 3], [5], [9, 2]],
            LOG_PROBS: [-0.5, 0.0, -0.25],
            LENGTH: 3,
            **meta,
        },
    }


# Fixtures


@pytest.fixture(scope="module")
def selected():
    data = fixture("sglang_generate_selected.json")
    return sglang.from_response(data["response"], prompt_ids=data["prompt_ids"], vocab_size=512)


@pytest.mark.parametrize("index", range(3))
def test_selected_fixture(selected, index):
    answer, rollout = ANSWERS[f"sglang_selected[{index}]"], selected[index]
    data = fixture("sglang_generate_selected.json")
    assert len(selected) == 3
    assert len(rollout) == answer["response_length"]
    assert rollout.sampling_mask.lengths.tolist() == answer["support_sizes"]
    assert rollout.sampling_mask[0].tolist() == answer["first_row_sorted"]
    assert rollout.rollout_log_probs.astype(np.float64).sum() == answer["log_prob_sum"]
    assert rollout.support_log_probs is None
    assert rollout.prompt_ids.tolist() == data["prompt_ids"][index]
    assert rollout.response_ids.tolist() == data["response"][index]["output_ids"]
    assert rollout.weight_versions == (WeightVersionSpan("default", 0, len(rollout)),)
    assert rollout.finish_reason == "length"
    assert rollout.loss_mask.all()


def test_selected_fixture_as_a_chat_response(selected):
    data = fixture("sglang_generate_selected.json")
    choices = [
        {"index": i, "completion_token_ids": body["output_ids"], "meta_info": body["meta_info"]}
        for i, body in enumerate(data["response"])
    ]
    options = {"prompt_ids": data["prompt_ids"], "vocab_size": 512}
    assert sglang.from_chat({"choices": choices}, **options) == selected


@pytest.mark.parametrize("name", ["selected", "support"])
def test_fixtures_as_in_process_chunks(name):
    data = fixture(f"sglang_generate_{name}.json")
    (expected, *_) = sglang.from_response(data["response"], prompt_ids=data["prompt_ids"])
    body = data["response"][0] if name == "selected" else data["response"]
    meta, tokens = body["meta_info"], body["output_ids"]
    chunks = []
    for start, end in spans([5, len(tokens)]):
        rows, values = meta[MASK][start:end], meta[LOG_PROBS][start:end]
        flat = itertools.chain.from_iterable
        chunks.append(
            SimpleNamespace(
                lengths=np.array([len(row) for row in rows]),
                token_ids=np.array(list(flat(rows)), np.int32),
                logprobs=np.array(list(flat(values)) if name == "support" else values, np.float32),
            )
        )
    rollout = sglang.from_chunks(
        chunks,
        prompt_ids=expected.prompt_ids,
        output_ids=tokens,
        vocab_size=512,
        weight_versions=expected.weight_versions,
        finish_reason=expected.finish_reason,
    )
    assert rollout == expected
    answer = ANSWERS["sglang_selected[0]" if name == "selected" else "sglang_support"]
    assert rollout.rollout_log_probs.astype(np.float64).sum() == answer["log_prob_sum"]


def test_support_fixture():
    data, answer = fixture("sglang_generate_support.json"), ANSWERS["sglang_support"]
    (rollout,) = sglang.from_response(data["response"], prompt_ids=data["prompt_ids"])
    log_probs = rollout.support_log_probs.astype(np.float64)
    assert rollout.rollout_log_probs.astype(np.float64).sum() == answer["log_prob_sum"]
    entropy = -(np.exp(log_probs) * log_probs).sum()
    np.testing.assert_allclose(entropy, answer["support_entropy_sum"], rtol=1e-12)
    assert rollout.finish_reason == "stop"
    assert rollout.weight_versions == ()
    assert load(data["response"]) == rollout


@pytest.mark.parametrize("style", ["cumulative", "incremental"])
def test_stream_fixture(style):
    chunks, answer = fixture_lines(f"sglang_stream_{style}.jsonl"), ANSWERS["sglang_stream"]
    rollout = sglang.from_stream(chunks, prompt_ids=PROMPT, vocab_size=512)
    assert len(rollout) == answer["response_length"]
    assert rollout.response_ids.tolist() == answer["output_ids"]
    assert rollout.sampling_mask.lengths.tolist() == answer["support_sizes"]
    assert rollout.finish_reason == "length"
    assert rollout == load(fixture_lines("sglang_stream_cumulative.jsonl")[-1])
    assert rollout == sglang.from_stream(iter(chunks), prompt_ids=[PROMPT])


def test_abort_fixture_keeps_what_was_committed():
    data = fixture("sglang_abort.json")
    (rollout,) = sglang.from_response(data["response"], prompt_ids=data["prompt_ids"])
    assert rollout.finish_reason == "abort"
    assert rollout.response_ids.tolist() == ANSWERS["sglang_stream"]["output_ids"][:4]
    assert len(rollout.sampling_mask) == 4
    assert rollout.rollout_log_probs.size == 4


def hostile_row(case):
    """The row to blame: the one that the fixture names, or the first one without a partner."""
    named = re.search(r"row (\d+)", case["why"])
    return int(named[1]) if named else {"short": 5, "long": 6, "missing": 0}[case["name"]]


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case["name"])
def test_hostile_fixture(case):
    options = {"prompt_ids": case["prompt_ids"], "vocab_size": case["vocab_size"]}
    kinds = {"missing": MissingMaskError, "token_outside": MissingTokenError}
    kind = kinds.get(case["name"], ReplayError)
    with refused("expected", sample=0, row=hostile_row(case), kind=kind):
        sglang.from_response(case["response"], **options)
    with refused("expected", row=hostile_row(case), kind=kind):
        sglang.from_stream([case["response"]], **options)
    good = fixture("sglang_abort.json")["response"]
    with refused("expected", sample=2, row=hostile_row(case), kind=kind):
        sglang.from_response([good, good, case["response"], good], **options)


# Every form gives the drawn rollout


@given(drawn_responses(), st.booleans())
def test_response(response: Drawn, support):
    expected = response.rollout(
        support_log_probs=response.sorted_support_log_probs() if support and len(response) else None
    )
    text = json.dumps(payload(response, support=support))
    (rollout,) = sglang.from_response(
        json.loads(text), prompt_ids=response.prompt, vocab_size=VOCAB
    )
    assert rollout == expected


@given(st.lists(drawn_responses(), max_size=4))
def test_batch(responses: list[Drawn]):
    rollouts = sglang.from_response(
        [payload(response) for response in responses],
        prompt_ids=[response.prompt for response in responses],
    )
    assert rollouts == [response.rollout() for response in responses]


def test_one_prompt_serves_all_responses():
    rollouts = sglang.from_response([small(), small()], prompt_ids=np.array(PROMPT))
    assert rollouts == [load(small())] * 2


@given(drawn_responses(), st.booleans(), st.booleans(), st.data())
def test_streams(response: Drawn, cumulative, support, data):
    whole = payload(response, support=support, weight_version="7")
    chunks = cut(whole, data.draw(cuts(len(response))), cumulative=cumulative)
    rollout = sglang.from_stream(chunks, prompt_ids=response.prompt, vocab_size=VOCAB)
    (expected,) = sglang.from_response(whole, prompt_ids=response.prompt)
    assert rollout == expected
    told = sglang.from_stream(chunks, prompt_ids=response.prompt, cumulative=cumulative)
    assert told == expected
    for chunk in chunks:
        del chunk["meta_info"][LENGTH]
    assert sglang.from_stream(chunks, prompt_ids=response.prompt) == expected
    for chunk in chunks:
        del chunk["meta_info"]["completion_tokens"]
    told = sglang.from_stream(chunks, prompt_ids=response.prompt, cumulative=cumulative)
    assert told == expected


@given(st.lists(drawn_responses(), min_size=1, max_size=3))
def test_chat(responses: list[Drawn]):
    bodies = [payload(response) for response in responses]
    choices = [
        {"index": i, "completion_token_ids": b["output_ids"], "meta_info": b["meta_info"]}
        for i, b in enumerate(bodies)
    ]
    prompts = [response.prompt for response in responses]
    expected = sglang.from_response(bodies, prompt_ids=prompts)
    assert sglang.from_chat({"choices": choices}, prompt_ids=prompts) == expected


@given(drawn_responses(), st.booleans(), st.booleans(), st.data())
def test_in_process_chunks(response: Drawn, support, tensors, data):
    def array(values, dtype):
        own = np.array(values, dtype)
        return torch.from_numpy(own) if tensors else own

    flat, values = itertools.chain.from_iterable, response.log_probs()
    chunks = []
    for start, end in spans(data.draw(cuts(len(response)))):
        rows, by_id = response.supports[start:end], response.support_log_probs()[start:end]
        chunks.append(
            SimpleNamespace(
                lengths=array([len(row) for row in rows], np.int32),
                token_ids=array(list(flat(rows)), np.int32),
                logprobs=array(list(flat(by_id)) if support else values[start:end], np.float32),
            )
        )
    rollout = sglang.from_chunks(
        chunks,
        prompt_ids=response.prompt,
        output_ids=response.tokens,
        vocab_size=VOCAB,
        weight_versions=[("7", 0, len(response))],
        finish_reason=response.finish_reason,
    )
    # With singletons alone, one value a row and one value an id are the same numbers.
    told_apart = any(len(row) > 1 for row in response.supports)
    assert rollout == response.rollout(
        weight_versions=[("7", 0, len(response))],
        support_log_probs=response.sorted_support_log_probs() if support and told_apart else None,
    )


# Log-probs


def test_full_vocabulary_log_probs_are_never_read():
    logged = [[-3.0, 7, None], [-2.5, 5, None], [-4.0, 2, None]]
    assert load(small(output_token_logprobs=logged)) == load(small())
    rollout = load(small(output_token_logprobs=logged, **{LOG_PROBS: None}))
    assert rollout.rollout_log_probs is None
    assert rollout.support_log_probs is None


def test_full_vocabulary_log_probs_in_the_wrong_field_show():
    with refused("not normalised over the support", sample=0, row=1):
        load(small(**{LOG_PROBS: [-3.0, -2.5, -4.0]}))
    with refused("not normalised over the support", sample=0, row=0):
        load(small(**{LOG_PROBS: [[-0.2, -3.0], [0.0], [-0.7, -1.5]]}))


def test_values_follow_ids_that_get_sorted():
    values = [[-0.1053605, -2.3025851], [0.0], [-0.6931472, -0.6931472]]
    rollout = load(small(**{LOG_PROBS: values}))
    assert rollout.sampling_mask.to_mask_list() == [[3, 7], [5], [2, 9]]
    expected = np.array([-2.3025851, -0.1053605, 0.0, -0.6931472, -0.6931472], np.float32)
    assert rollout.support_log_probs.tolist() == expected.tolist()
    assert rollout.rollout_log_probs.tolist() == expected[[1, 2, 3]].tolist()
    arrays = [np.array(row, np.float32) for row in values]
    assert load(small(**{LOG_PROBS: arrays})) == rollout


@pytest.mark.parametrize(
    ("values", "row"),
    [
        ([-0.5, 0.0], 2),
        ([-0.5, 0.0, -0.25, 0.0], 3),
        ([-0.5, [0.0], -0.25], 0),
        ([[-0.5, -0.9], 0.0, [-0.7, -0.7]], 1),
        ([[-0.5, -0.9], [0.0], [-0.7]], 2),
        ([[-0.5, -0.9], [0.0, 0.0], [-0.7, -0.7]], 1),
        ([[-0.7, -0.7], [0.0], [-0.7, None]], 2),
        ([[-0.7, -0.7], [0.0], [-0.7, float("nan")]], 2),
        ([[-0.7, -0.7], [False], [-0.7, -0.7]], 1),
        ([-0.5, 0.0, float("nan")], 2),
        ([-0.5, "0", -0.25], 1),
        ([-0.5, 0.0, 10**400], 2),
    ],
)
def test_log_probs_that_do_not_fit(values, row):
    with refused("expected", sample=0, row=row):
        load(small(**{LOG_PROBS: values}))


# Counts, missing masks, aborts, versions


@pytest.mark.parametrize(
    ("meta", "row"),
    [
        ({LENGTH: 2}, 2),
        ({LENGTH: 4}, 3),
        ({LENGTH: "3"}, None),
        ({LENGTH: True}, None),
        ({LENGTH: 3.0}, None),
        ({LENGTH: -3}, None),
        ({LENGTH: 10**9}, 3),
        ({LENGTH: 10**5000}, None),
        ({"completion_tokens": 2}, 2),
        ({"completion_tokens": 10**9}, 3),
        ({"prompt_tokens": 4}, None),
        ({"prompt_tokens": 0}, None),
        ({"prompt_tokens": None, "completion_tokens": None, LENGTH: None, MASK: [[7, 3]]}, 1),
    ],
)
def test_counts_must_agree(meta, row):
    with refused("expected", sample=0, row=row):
        load(small(**meta))


def test_counts_may_be_absent():
    body = small()
    for name in ("prompt_tokens", "completion_tokens", LENGTH):
        del body["meta_info"][name]
    assert load(body) == load(small())


@pytest.mark.parametrize("gone", [True, False])
def test_missing_mask(gone):
    body = small(**{MASK: None})
    if gone:
        del body["meta_info"][MASK]
    with refused("no sampling mask", sample=0, row=0, kind=MissingMaskError):
        load(body)
    rollout = load(body, on_missing_mask="unrestricted")
    assert rollout.sampling_mask == RolloutSamplingMask.full(3)
    assert rollout.rollout_log_probs is None, "nobody knows what they were normalised over"


def test_null_rows_are_refused_even_then():
    for option in ("raise", "unrestricted"):
        with refused("not a list", sample=0, row=1):
            load(small(**{MASK: [[7, 3], None, [9, 2]]}), on_missing_mask=option)


@pytest.mark.parametrize("name", ["on_missing_mask", "on_uncommitted_token"])
def test_unknown_options(name):
    for value in ("ignore", None, 3, [], True):
        with refused(f"unknown {name}"):
            sglang.from_response(small(), prompt_ids=PROMPT, **{name: value})
        with refused(f"unknown {name}"):
            sglang.from_stream([small()], prompt_ids=PROMPT, **{name: value})


def test_vocabulary_holds_prompt_response_and_supports():
    assert load(small(), vocab_size=10) == load(small())
    with refused("out of range", sample=0, row=2):
        load(small(), vocab_size=9)
    with refused("response holds", sample=0, row=0):
        load(small(**{MASK: None}), vocab_size=7, on_missing_mask="unrestricted")
    with refused("prompt_ids holds", sample=0):
        sglang.from_response(small(), prompt_ids=[1, 2, 10], vocab_size=10)


@pytest.mark.parametrize("counted", [3, 4])
def test_an_uncommitted_token_has_no_row(counted):
    body = small(
        finish_reason={"type": "abort"},
        completion_tokens=counted,
        weight_versions=[
            {"version": "7", "start": 0, "end": 3},
            {"version": "8", "start": 3, "end": 4},
        ],
    )
    body["output_ids"] = [7, 5, 2, 8]
    with refused("never committed", sample=0, row=3):
        load(body)
    with refused("never committed", row=3):
        sglang.from_stream([body], prompt_ids=PROMPT)
    rollout = load(body, on_uncommitted_token="drop")
    assert rollout.response_ids.tolist() == [7, 5, 2]
    assert rollout.weight_versions == (("7", 0, 3),)
    assert rollout == sglang.from_stream([body], prompt_ids=PROMPT, on_uncommitted_token="drop")
    without = small(finish_reason={"type": "abort"}, weight_version="7")
    assert rollout == load(without, on_uncommitted_token="drop"), "nothing to drop, nothing dropped"


@pytest.mark.parametrize(
    ("reason", "ids"), [("stop", [7, 5, 2, 8]), ("abort", [7, 5, 2, 8, 8]), ("abort", [7, 5])]
)
def test_only_the_last_token_of_an_abort_can_be_uncommitted(reason, ids):
    body = small(finish_reason={"type": reason}, completion_tokens=None)
    body["output_ids"] = ids
    with refused("does not agree", sample=0, row=min(3, len(ids))):
        load(body, on_uncommitted_token="drop")


@pytest.mark.parametrize(
    ("triples", "row"),
    [
        ([("7", 0, 60)], 3),
        ([("7", 0, 2)], 2),
        ([("7", 0, 2), ("8", 2, 60)], 3),
        ([("7", 0, 3), ("8", 3, 5)], 3),
        ([("7", 0, 3), ("8", 7, 5)], 3),
        ([("7", 0, 3), ("8", 3, 3)], 3),
        ([("7", 0, 3), ("8", 3, 4), ("9", 4, 4)], 3),
        ([("7", 0, 4), ("8", 2, 3)], 3),
        ([("7", 0, 99), ("8", 3, 4)], 3),
        ([("7", 0, 10**5000), ("8", 3, 4)], 3),
        ([("7", 1, 4)], 0),
        ([("7", 0, 0), ("8", 0, 4)], 0),
        ([("7", 0, 3), (8, 3, 4)], 3),
    ],
)
def test_dropping_a_token_repairs_no_spans(triples, row):
    body = small(finish_reason="abort", weight_versions=version_spans(*triples))
    body["output_ids"] = [7, 5, 2, 8]
    body["meta_info"]["completion_tokens"] = 4
    with refused("do not cover", sample=0, row=row):
        load(body, on_uncommitted_token="drop")


@pytest.mark.parametrize("end", [3, 4])
def test_dropping_a_token_cuts_its_span(end):
    body = small(finish_reason="abort", weight_versions=version_spans(("7", 0, 1), ("8", 1, end)))
    body["output_ids"] = [7, 5, 2, 8]
    expected = (("7", 0, 1), ("8", 1, 3))
    assert load(body, on_uncommitted_token="drop").weight_versions == expected
    first = cut(small(weight_version="7"), [1], cumulative=True)[0]
    first["meta_info"] |= {"finish_reason": None}
    rollout = sglang.from_stream([first, body], prompt_ids=PROMPT, on_uncommitted_token="drop")
    assert rollout.weight_versions == expected
    first["meta_info"] |= {"weight_versions": version_spans(("7", 0, 1))}
    again = sglang.from_stream([first, body], prompt_ids=PROMPT, on_uncommitted_token="drop")
    assert again == rollout


def test_dropping_the_only_token():
    body = small(finish_reason={"type": "abort"}, completion_tokens=1, **{LENGTH: 0})
    body["output_ids"] = [7]
    body["meta_info"] |= {MASK: [], LOG_PROBS: []}
    body["meta_info"]["weight_versions"] = [{"version": "7", "start": 0, "end": 1}]
    rollout = load(body, on_uncommitted_token="drop")
    assert len(rollout) == 0
    assert rollout.weight_versions == (("7", 0, 0),)


@pytest.mark.parametrize("ids", [{}, {"output_ids": None}, {"output_ids": []}])
def test_aborted_in_the_queue(ids):
    meta = {"finish_reason": {"type": "abort", "message": "queue full"}, "prompt_tokens": 0}
    body = {"text": "", "meta_info": {**meta, "completion_tokens": 0, "weight_version": "7"}, **ids}
    rollout = load(body)
    assert (len(rollout), rollout.finish_reason) == (0, "abort")
    assert rollout.weight_versions == (("7", 0, 0),)
    body["meta_info"]["finish_reason"] = {"type": "stop"}
    with pytest.raises(ReplayError):
        load(body)


def version_spans(*triples):
    return [dict(zip(("version", "start", "end"), each, strict=True)) for each in triples]


def test_weight_versions():
    listed = version_spans(("7", 0, 1), ("8", 1, 3))
    assert load(small(weight_versions=listed)).weight_versions == (("7", 0, 1), ("8", 1, 3))
    both = small(weight_versions=listed, weight_version="8")
    assert load(both).weight_versions == (("7", 0, 1), ("8", 1, 3))
    assert load(small(weight_versions=[])).weight_versions == ()
    with refused("not the newest", sample=0):
        load(small(weight_versions=listed, weight_version="7"))


@pytest.mark.parametrize(
    "bad",
    [
        version_spans(("7", 0, 2)),
        version_spans(("7", 0, 1), ("8", 2, 3)),
        version_spans((7, 0, 3)),
        version_spans(("7", 0, None)),
        version_spans(("7", 0.0, 3)),
        [{"version": "7"}],
        [["7", 0, 3]],
        "7",
        {"version": "7"},
        7,
    ],
)
def test_weight_versions_that_do_not_fit(bad):
    with pytest.raises(ReplayError) as caught:
        load(small(weight_versions=bad))
    assert caught.value.sample == 0


@pytest.mark.parametrize("bad", [7, 7.0, True, ["7"], {}])
def test_a_weight_version_is_text(bad):
    with refused("spans do not cover", sample=0):
        load(small(weight_version=bad))


@pytest.mark.parametrize(
    ("reason", "expected"),
    [({"type": "length", "length": 3}, "length"), ("stop", "stop"), (None, None)],
)
def test_finish_reason(reason, expected):
    assert load(small(finish_reason=reason)).finish_reason == expected


@pytest.mark.parametrize("bad", [7, {}, {"type": None}, {"type": 7}, ["stop"], True])
def test_finish_reason_that_does_not_fit(bad):
    with refused("finish_reason", sample=0):
        load(small(finish_reason=bad))


# Prompts


@pytest.mark.parametrize("prompts", [[PROMPT], [PROMPT] * 3, [], [[]], [[1, 2], [4, 5, 6]]])
def test_prompts_that_do_not_fit(prompts):
    with pytest.raises(ReplayError):
        sglang.from_response([small(), small()], prompt_ids=prompts)


@pytest.mark.parametrize("prompt", [None, "abc", 5, [1, "2", 3], [1, [2], 3], {}, [1.0, 2, 3]])
def test_prompts_of_the_wrong_type(prompt):
    with pytest.raises(ReplayError):
        sglang.from_response(small(prompt_tokens=None), prompt_ids=prompt)
    with pytest.raises(ReplayError):
        sglang.from_stream([small()], prompt_ids=prompt)


@pytest.mark.parametrize("prompt", [np.array(PROMPT), torch.tensor(PROMPT), tuple(PROMPT)])
def test_prompts_of_other_types(prompt):
    for prompts in (prompt, [prompt]):
        assert sglang.from_response(small(), prompt_ids=prompts) == [load(small())]


# Streams that must be refused


def stream(cumulative=False, **meta):
    return cut(small(**meta), [1, 3], cumulative=cumulative)


def broken(chunks, path, value):
    chunk = chunks
    for key in path[:-1]:
        chunk = chunk[key]
    chunk[path[-1]] = value
    return chunks


@pytest.mark.parametrize(
    ("chunks", "row", "match"),
    [
        (stream()[1:], 0, "fits neither"),
        ([stream()[1], stream()[0]], None, "after the response has finished"),
        ([cut(small(), [1, 2, 3], cumulative=False)[i] for i in (1, 0, 2)], 0, "fits neither"),
        ([stream()[0], *stream()], 1, "fits neither"),
        ([stream()[0], stream(True)[1], stream()[1]], None, "after the response has finished"),
        (cut(small(), [1, 2, 3], cumulative=False)[::2], 1, "fits neither"),
        (broken(stream(), (1, "meta_info", LENGTH), 4), 1, "fits neither"),
        (broken(stream(), (0, "meta_info", LENGTH), 0), 0, "fits neither"),
        (broken(stream(True), (1, "output_ids"), [8, 5, 2]), 0, "changes what an earlier"),
        (broken(stream(True), (1, "meta_info", MASK, 0), [7, 4]), 0, "changes what an earlier"),
        (broken(stream(True), (1, "meta_info", LOG_PROBS, 0), -0.6), 0, "changes what an earlier"),
        (broken(stream(True), (1, "meta_info", LOG_PROBS), None), 0, "shrinks"),
        (broken(stream(True), (1, "meta_info", MASK), None), 0, "shrinks"),
        (broken(stream(), (1, "meta_info", LOG_PROBS), None), 1, "missing from chunk 1"),
        (broken(stream(), (0, "meta_info", LOG_PROBS), None), 0, "missing from chunk 0"),
        (broken(stream(), (0, "meta_info", MASK), None), 0, "missing from chunk 0"),
        (broken(stream(), (1, "output_ids"), [5]), 1, "does not agree"),
        (broken(stream(), (1, "meta_info", "id"), "other"), None, "another request"),
        (broken(stream(), (0, "meta_info", "finish_reason"), "stop"), None, "after the response"),
        ([], None, "stream is empty"),
        ([*stream()[:1], None], None, "wrong type"),
        (None, None, "wrong type"),
        (7, None, "wrong type"),
        (small(), None, "wrong type"),
        ("ab", None, "wrong type"),
    ],
)
def test_streams_refused(chunks, row, match):
    if isinstance(chunks, list) and len(chunks) == 2 and match == "another request":
        chunks[0]["meta_info"]["id"] = "one"
    with refused(match, row=row):
        sglang.from_stream(chunks, prompt_ids=PROMPT)


@pytest.mark.parametrize("support", [False, True])
@pytest.mark.parametrize("cumulative", [True, False])
@pytest.mark.parametrize(("kept", "row"), [(1, 1), (3, 2)])
def test_log_probs_belong_to_their_own_chunk(support, cumulative, kept, row):
    values = [[-0.6931472] * 2, [0.0], [-0.6931472] * 2]
    whole = small(**{LOG_PROBS: values if support else [v[0] for v in values]})
    chunks = cut(whole, [2, 3], cumulative=cumulative)
    assert sglang.from_stream(chunks, prompt_ids=PROMPT) == load(whole)
    logged = whole["meta_info"][LOG_PROBS]
    chunks[0]["meta_info"][LOG_PROBS] = logged[:kept]
    if not cumulative:
        chunks[1]["meta_info"][LOG_PROBS] = logged[kept:]
    with refused("of chunk 0 does not agree with its rows", row=row):
        sglang.from_stream(chunks, prompt_ids=PROMPT)


def test_the_id_of_a_request_is_kept_over_chunks_without_one():
    chunks = cut(small(), [1, 1, 3], cumulative=True)
    for chunk, name in zip(chunks, ["a", None, "b"], strict=True):
        chunk["meta_info"]["id"] = name
    with refused("chunk 2 belongs to another request"):
        sglang.from_stream(chunks, prompt_ids=PROMPT)
    chunks[2]["meta_info"]["id"] = "a"
    assert sglang.from_stream(chunks, prompt_ids=PROMPT) == load(small())


def test_style_told_must_fit():
    for cumulative in (True, False):
        with refused("fits neither", row=1):
            sglang.from_stream(stream(cumulative), prompt_ids=PROMPT, cumulative=not cumulative)


def test_style_unknown():
    chunks = stream()
    for chunk in chunks:
        del chunk["meta_info"][LENGTH], chunk["meta_info"]["completion_tokens"]
    with refused("style is unknown"):
        sglang.from_stream(chunks, prompt_ids=PROMPT)
    assert sglang.from_stream(chunks, prompt_ids=PROMPT, cumulative=False) == load(small())
    for neither in ("yes", 1, []):
        with refused("cumulative has the wrong type"):
            sglang.from_stream(chunks, prompt_ids=PROMPT, cumulative=neither)


def test_an_unfinished_stream_has_no_finish_reason():
    rollout = sglang.from_stream(stream()[:1], prompt_ids=PROMPT)
    assert (len(rollout), rollout.finish_reason) == (1, None)


def test_rows_of_a_stream_are_rows_of_the_response():
    with refused("not in its support", row=2, kind=MissingTokenError):
        sglang.from_stream(broken(stream(), (1, "output_ids"), [5, 8]), prompt_ids=PROMPT)


@pytest.mark.parametrize("cumulative", [True, False])
def test_versions_of_a_stream(cumulative):
    chunks = cut(small(), [1, 2, 3, 3], cumulative=cumulative)
    for chunk, version in zip(chunks, ["7", "7", "8", "9"], strict=True):
        chunk["meta_info"]["weight_version"] = version
    rollout = sglang.from_stream(chunks, prompt_ids=PROMPT)
    assert rollout.weight_versions == (("7", 0, 2), ("8", 2, 3))
    chunks[1]["meta_info"]["weight_version"] = None
    with refused("spans do not cover"):
        sglang.from_stream(chunks, prompt_ids=PROMPT)
    listed = version_spans(("7", 0, 1), ("9", 1, 3))
    chunks[-1]["meta_info"]["weight_versions"] = listed
    rollout = sglang.from_stream(chunks, prompt_ids=PROMPT)
    assert rollout.weight_versions == (("7", 0, 1), ("9", 1, 3))


def versions_of(chunks, ends, *said):
    """A stream whose chunks say these `weight_versions` or, in text, this `weight_version`."""
    for chunk, end, says in zip(chunks, ends, said, strict=True):
        assert chunk["meta_info"][LENGTH] == end
        name = "weight_version" if isinstance(says, str) else "weight_versions"
        chunk["meta_info"][name] = says
    return sglang.from_stream(chunks, prompt_ids=PROMPT).weight_versions


@pytest.mark.parametrize("cumulative", [True, False])
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([[("7", 0, 2)], None, [("7", 0, 3)]], [("7", 0, 3)]),
        ([[("7", 0, 1), ("7", 1, 2)], [], [("7", 0, 3)]], [("7", 0, 3)]),
        ([[("7", 0, 2)], [("7", 0, 2)], [("7", 0, 2), ("8", 2, 3)]], [("7", 0, 2), ("8", 2, 3)]),
        ([[("7", 0, 1), ("8", 1, 2)], None, "8"], [("7", 0, 1), ("8", 1, 3)]),
        ([[("7", 0, 1), ("8", 1, 2)], "8", "9"], [("7", 0, 1), ("8", 1, 2), ("9", 2, 3)]),
        (["7", None, [("6", 0, 1), ("7", 1, 3)]], [("6", 0, 1), ("7", 1, 3)]),
        ([None, None, []], []),
    ],
)
def test_listed_versions_of_a_stream_are_kept(cumulative, said, expected):
    said = [version_spans(*says) if isinstance(says, list) else says for says in said]
    chunks = cut(small(), [2, 2, 3], cumulative=cumulative)
    assert versions_of(chunks, [2, 2, 3], *said) == tuple(expected)


@pytest.mark.parametrize("cumulative", [True, False])
@pytest.mark.parametrize(
    ("first", "last", "row", "match"),
    [
        ([("7", 0, 2)], [("8", 0, 3)], 0, "chunk 1 changes what an earlier"),
        ([("7", 0, 2)], [("7", 0, 1), ("8", 1, 3)], 1, "chunk 1 changes what an earlier"),
        ([("7", 0, 1), ("8", 1, 2)], [("7", 0, 3)], 1, "chunk 1 changes what an earlier"),
        ([("7", 0, 7)], [("7", 0, 3)], 2, "chunk 0 do not cover"),
        ([("7", 0, 1)], [("7", 0, 3)], 1, "chunk 0 do not cover"),
        ([("7", 0, 1), ("8", 0, 2)], [("8", 0, 3)], 1, "chunk 0 do not cover"),
        ([("7", 0, 2), ("8", 2, 2)], [("7", 0, 3)], 2, "chunk 0 do not cover"),
        ([(7, 0, 2)], [("7", 0, 3)], 0, "chunk 0 do not cover"),
        ([("7", 0, None)], [("7", 0, 3)], 0, "chunk 0 do not cover"),
        ([("7", 0, 2)], [("7", 0, 2)], 2, "chunk 1 do not cover"),
        ([("7", 0, 10**5000)], [("7", 0, 3)], 2, "chunk 0 do not cover"),
        ([("7", 0, 2)], None, None, "spans do not cover"),
        ([("7", 0, 2)], [], None, "spans do not cover"),
    ],
)
def test_listed_versions_of_a_stream_must_agree(cumulative, first, last, row, match):
    said = [says if says is None else version_spans(*says) for says in (first, last)]
    with refused(match, row=row):
        versions_of(cut(small(), [2, 3], cumulative=cumulative), [2, 3], *said)


def test_a_stream_without_any_mask():
    chunks = stream(**{MASK: [], LOG_PROBS: []})
    for chunk in chunks:
        chunk["meta_info"] |= {MASK: None, LOG_PROBS: None}
    with refused("no sampling mask", row=0, kind=MissingMaskError):
        sglang.from_stream(chunks, prompt_ids=PROMPT)
    rollout = sglang.from_stream(chunks, prompt_ids=PROMPT, on_missing_mask="unrestricted")
    assert rollout.sampling_mask == RolloutSamplingMask.full(3)


# In-process chunks that must be refused


def chunk(lengths=(2, 1), token_ids=(7, 3, 5), logprobs=(-0.5, 0.0)):
    return SimpleNamespace(
        lengths=np.array(lengths), token_ids=np.array(token_ids), logprobs=np.array(logprobs)
    )


@pytest.mark.parametrize(
    ("second", "row"),
    [
        (chunk(lengths=(2, 2)), 2),
        (chunk(lengths=(3, 0)), 3),
        (chunk(lengths=(-1, 4)), 2),
        (chunk(lengths=(2**62, 1)), 2),
        (chunk(lengths=(2,)), 2),
        (chunk(lengths=(2.0, 1.0)), None),
        (chunk(token_ids=(7, 7, 5)), 2),
        (chunk(token_ids=(7, 3, -5)), 3),
        (chunk(token_ids=(6, 3, 5)), 2),
        (chunk(logprobs=(-0.5,)), 3),
        (chunk(logprobs=(-0.5, float("nan"))), 3),
        (chunk(logprobs=(-0.5, 0.0, -0.1)), 4),
        (chunk(logprobs=()), 2),
        (chunk(logprobs=(0, 0)), None),
        (SimpleNamespace(lengths=[2, 1], token_ids=[7, 3, 5], logprobs=[-0.5, 0.0]), None),
        (SimpleNamespace(), None),
        (None, None),
    ],
)
def test_in_process_chunks_refused(second, row):
    with pytest.raises(ReplayError) as caught:
        sglang.from_chunks([chunk(), second], prompt_ids=PROMPT, output_ids=[7, 5, 7, 5])
    assert caught.value.row == row, caught.value


@pytest.mark.parametrize(
    ("first", "second", "index", "row"),
    [
        ((-0.5,), (-0.7, 0.0, -0.1), 0, 1),
        ((-0.5, 0.0, -0.7, -0.1), (), 0, 2),
        ((-0.7, -0.7, 0.0), (-0.7,), 1, 3),
        ((-0.5, 0.0), (-0.7, -0.7, 0.0), 1, 4),
        ((-0.7, -0.7, 0.0), (-0.5, 0.0), 1, 4),
        ((-0.7, -0.7), (-0.7, -0.7, 0.0, 0.0), 1, 4),
    ],
)
def test_in_process_log_probs_belong_to_their_own_chunk(first, second, index, row):
    chunks = [chunk(logprobs=first), chunk(logprobs=second)]
    with refused(f"logprobs of chunk {index} are not as many", row=row):
        sglang.from_chunks(chunks, prompt_ids=PROMPT, output_ids=[7, 5, 7, 5])


@pytest.mark.parametrize("kind", NO_INTEGERS)
def test_in_process_tensors_of_no_integers(kind):
    bad = tensors_of_no_integers([1, 2])[kind]
    lengths, ids = SimpleNamespace(**vars(chunk())), SimpleNamespace(**vars(chunk()))
    lengths.lengths = ids.token_ids = bad
    for chunks in ([lengths], [ids], bad, [bad]):
        with pytest.raises(ReplayError):
            sglang.from_chunks(chunks, prompt_ids=PROMPT, output_ids=[7, 5])
    for ids in ({"prompt_ids": bad, "output_ids": [7, 5]}, {"prompt_ids": [1], "output_ids": bad}):
        with pytest.raises(ReplayError):
            sglang.from_chunks([chunk()], **ids)
    for meta in ({MASK: bad}, {MASK: [[7, 3], bad, [9, 2]]}, {LENGTH: bad}, {LOG_PROBS: bad}):
        with pytest.raises(ReplayError):
            load(small(**meta))


@pytest.mark.parametrize("kind", NO_PLAIN_TENSORS)
def test_in_process_tensors_of_no_log_probs(kind):
    bad = chunk()
    bad.logprobs = tensors_that_numpy_lacks([0, 0])[kind]
    with pytest.raises(ReplayError):
        sglang.from_chunks([bad], prompt_ids=PROMPT, output_ids=[7, 5])


VIEWS = [memoryview(np.array(1.0)), memoryview(np.zeros((2, 3))), memoryview(b"ab")]


@pytest.mark.parametrize("bad", [7, None, "ab", {}, np.zeros(2), torch.zeros(2), *VIEWS])
def test_in_process_chunks_and_spans_are_iterables(bad):
    options = {"prompt_ids": PROMPT, "output_ids": [7, 5]}
    with refused("the stream has the wrong type"):
        sglang.from_chunks(bad, **options)
    with refused("the stream has the wrong type"):
        sglang.from_stream(bad, prompt_ids=PROMPT)
    with refused("weight_versions has the wrong type"):
        sglang.from_chunks([chunk()], weight_versions=bad, **options)


def test_in_process_chunks_one_row_a_token():
    for tokens in ([7], [7, 5, 7]):
        with refused("does not agree", row=min(2, len(tokens))):
            sglang.from_chunks([chunk()], prompt_ids=PROMPT, output_ids=tokens)


# Junk


BODIES = st.sampled_from(
    [
        small(weight_versions=version_spans(("7", 0, 1), ("8", 1, 3))),
        small(**{LOG_PROBS: [[-0.6931472] * 2, [0.0], [-0.6931472] * 2]}),
    ]
)
OPTIONS = st.fixed_dictionaries(
    {
        "on_missing_mask": st.sampled_from(["raise", "unrestricted"]),
        "on_uncommitted_token": st.sampled_from(["raise", "drop"]),
        "vocab_size": st.just(10),
    }
)


@given(BODIES.flatmap(spoiled), OPTIONS)
def test_junk_in_a_response(body, options):
    sound_or_refused(10, lambda: sglang.from_response(body, prompt_ids=PROMPT, **options))


@given(BODIES.flatmap(lambda b: spoiled([b, small()])), OPTIONS)
def test_junk_in_a_batch(batch, options):
    sound_or_refused(10, lambda: sglang.from_response(batch, prompt_ids=PROMPT, **options))


@given(st.booleans().flatmap(lambda c: spoiled(stream(c, weight_version="7"))), OPTIONS)
def test_junk_in_a_stream(chunks, options):
    sound_or_refused(10, lambda: sglang.from_stream(chunks, prompt_ids=PROMPT, **options))


@given(spoiled({"choices": [{"completion_token_ids": [7, 5, 2], **small()}]}), OPTIONS)
def test_junk_in_a_chat_response(body, options):
    sound_or_refused(10, lambda: sglang.from_chat(body, prompt_ids=PROMPT, **options))


@given(spoiled(PROMPT))
def test_junk_in_a_prompt(prompt):
    sound_or_refused(
        10,
        lambda: sglang.from_response(small(prompt_tokens=None), prompt_ids=prompt, vocab_size=10),
    )
