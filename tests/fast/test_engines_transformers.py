"""transformers: outputs of `generate` as drawn rollouts, and what must not pass for one."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlreplay.engines import transformers as engine
from rlreplay.errors import MissingTokenError, ReplayError
from rlreplay.rollout import Rollout
from rlreplay.sampling_mask import RolloutSamplingMask
from tests.fast.payloads import (
    NO_INTEGERS,
    VOCAB,
    Drawn,
    drawn_responses,
    tensors_of_no_integers,
)
from tests.fast.strategies import refused

EOS, PAD = VOCAB, VOCAB + 1  # no response draws them
WIDE = VOCAB + 2


def generated(responses: list[Drawn], steps: int, *, shift=0.0, dtype=torch.float32):
    """The output of `generate` for these responses, and the rollouts that it holds.

    A response shorter than `steps` ends with an EOS, of which its last row's support then consists.
    """
    width = max(len(r.prompt) for r in responses)
    sequences = np.full((len(responses), width + steps), PAD)
    scores = torch.randn(steps, len(responses), WIDE, dtype=dtype)  # after the end: never read
    rollouts = []
    for row, r in enumerate(responses):
        weights = [
            dict(zip(*pair, strict=True)) for pair in zip(r.supports, r.weights, strict=True)
        ]
        tokens, ended = list(r.tokens), len(r) < steps
        if ended:
            tokens, weights = [*tokens, EOS], [*weights, {EOS: 1, 0: 1}]
        sequences[row, width - len(r.prompt) : width] = r.prompt
        sequences[row, width : width + len(tokens)] = tokens
        for step, kept in enumerate(weights):
            scores[step, row] = -math.inf
            for token, weight in kept.items():
                scores[step, row, token] = math.log(weight) + shift
        rollouts.append(
            {
                "prompt_ids": r.prompt,
                "response_ids": tokens,
                "sampling_mask": [sorted(kept) for kept in weights],
                "rollout_log_probs": [
                    math.log(kept[t] / sum(kept.values()))
                    for t, kept in zip(tokens, weights, strict=True)
                ],
                "finish_reason": "stop" if ended else "length",
            }
        )
    return SimpleNamespace(sequences=torch.tensor(sequences), scores=tuple(scores)), rollouts


def check(rollouts: list[Rollout], expected, *, atol=1e-5):
    assert len(rollouts) == len(expected)
    for rollout, fields in zip(rollouts, expected, strict=True):
        assert rollout.prompt_ids.tolist() == fields["prompt_ids"]
        assert rollout.response_ids.tolist() == fields["response_ids"]
        assert rollout.sampling_mask.to_mask_list() == fields["sampling_mask"]
        np.testing.assert_allclose(
            rollout.rollout_log_probs, fields["rollout_log_probs"], rtol=0, atol=atol
        )
        assert rollout.finish_reason == fields["finish_reason"]
        assert rollout.support_log_probs is None
        assert rollout.loss_mask.all()


batches = st.lists(drawn_responses(), min_size=1, max_size=4)


@given(batches, st.integers(0, 2), st.sampled_from([torch.float32, torch.float64]))
def test_rows_end_where_they_ended(responses: list[Drawn], longer, dtype):
    steps = max(map(len, responses)) + longer
    output, expected = generated(responses, steps, shift=3.0, dtype=dtype)
    options = {"eos_token_id": EOS, "pad_token_id": PAD, "vocab_size": WIDE}
    prompts = [r.prompt for r in responses]
    check(engine.from_generate(output, prompt_ids=prompts, **options), expected)
    by_length = {"prompt_lengths": [len(p) for p in prompts], **options}
    check(engine.from_generate(output, **by_length), expected)
    check(engine.from_generate(vars(output), **by_length), expected)
    lengths = [len(fields["response_ids"]) for fields in expected]
    check(engine.from_generate(output, response_lengths=lengths, **by_length), expected)
    by_length["eos_token_id"] = torch.tensor([EOS, 0 if steps == 0 else PAD + 5])
    check(engine.from_generate(output, **by_length), expected)


def small(**changes):
    """Two rows of prompt [1, 2], three steps, ids below 6; the second ends with EOS 4, pad 5."""
    kept = [
        [{3: 0.0, 1: 0.0}, {2: 0.5}],
        [{0: -1.0}, {4: 1.0, 1: 1.0, 2: 1.0}],
        [{1: 7.0, 2: 7.0}, {0: 3.0, 1: 3.0}],
    ]
    scores = torch.full((3, 2, 6), -math.inf)
    for step, rows in enumerate(kept):
        for row, support in enumerate(rows):
            for token, value in support.items():
                scores[step, row, token] = value
    fields = {
        "sequences": torch.tensor([[1, 2, 3, 0, 2], [1, 2, 2, 4, 5]]),
        "scores": tuple(scores),
        "logits": None,
        "beam_indices": None,
    }
    return SimpleNamespace(**{**fields, **changes})


PROMPT = [1, 2]
SMALL = {"prompt_ids": PROMPT, "eos_token_id": 4, "pad_token_id": 5}
EXPECTED = [
    {
        "prompt_ids": PROMPT,
        "response_ids": [3, 0, 2],
        "sampling_mask": [[1, 3], [0], [1, 2]],
        "rollout_log_probs": [-math.log(2), 0.0, -math.log(2)],
        "finish_reason": "length",
    },
    {
        "prompt_ids": PROMPT,
        "response_ids": [2, 4],
        "sampling_mask": [[2], [1, 2, 4]],
        "rollout_log_probs": [0.0, -math.log(3)],
        "finish_reason": "stop",
    },
]


def load(output=None, **options):
    return engine.from_generate(small() if output is None else output, **{**SMALL, **options})


@pytest.mark.parametrize("prompts", [PROMPT, [PROMPT], [PROMPT] * 2, torch.tensor(PROMPT)], ids=str)
def test_one_prompt_serves_several_rows(prompts):
    check(load(prompt_ids=prompts), EXPECTED)


@pytest.mark.parametrize("lengths", [[2], [2, 2], np.array([2]), torch.tensor([2, 2])], ids=str)
def test_prompt_lengths_in_place_of_prompts(lengths):
    check(load(prompt_ids=None, prompt_lengths=lengths), EXPECTED)


def test_prompts_serve_consecutive_rows():
    output = small(sequences=torch.tensor([[5, 2, 3, 0, 2], [1, 2, 2, 4, 5]]))
    rollouts = load(output, prompt_ids=[[2], PROMPT])
    check(rollouts, [{**EXPECTED[0], "prompt_ids": [2]}, EXPECTED[1]])
    with refused("not the prompt in sequences", sample=0):
        load(output, prompt_ids=[[1], PROMPT])


def test_padding_with_the_eos_itself():
    output = small(sequences=torch.tensor([[1, 2, 3, 0, 2], [1, 2, 2, 4, 4]]))
    check(load(output, pad_token_id=4), EXPECTED)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_scores_of_other_dtypes(dtype):
    output = small(scores=tuple(step.to(dtype) for step in small().scores))
    check(load(output), EXPECTED)


def test_raw_logits_are_never_read():
    output = small(logits=tuple(torch.randn(3, 2, 6)))
    check(load(output), EXPECTED)
    with refused("no scores") as caught:
        load(small(scores=None, logits=output.logits))
    assert "logits are those before any processor" in caught.value.got


def test_a_step_that_cut_nothing_off():
    scores = torch.zeros(1, 1, 6)
    output = small(sequences=torch.tensor([[1, 2, 3]]), scores=tuple(scores))
    (rollout,) = load(output, vocab_size=6)
    assert rollout.sampling_mask.to_mask_list() == [[0, 1, 2, 3, 4, 5]]
    with refused("out of range", sample=0, row=0):
        load(output, vocab_size=5)


def test_greedy_rows_are_singletons():
    scores = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(0))
    best = scores.argmax(-1).T
    output = small(sequences=torch.cat([torch.tensor([PROMPT] * 2), best], 1), scores=tuple(scores))
    rollouts = load(output, do_sample=False, eos_token_id=None, pad_token_id=None)
    for rollout, tokens in zip(rollouts, best.tolist(), strict=True):
        assert rollout.sampling_mask == RolloutSamplingMask.forced(tokens)
        assert rollout.rollout_log_probs.tolist() == [0.0] * 3
    output.sequences[1, 4] = scores[2, 1].argmin()
    with refused("without the highest score", sample=1, row=2):
        load(output, do_sample=False, eos_token_id=None, pad_token_id=None)


def test_rows_that_end_without_eos():
    """A stop string: padding follows, or whatever is sampled until the last row ends."""
    for after, reason in ((5, "stop"), (0, None)):
        output = small(sequences=torch.tensor([[1, 2, 3, 0, 2], [1, 2, 2, 1, after]]))
        shorter = {**EXPECTED[1], "response_ids": [2, 1], "finish_reason": reason}
        eos = 4 if after == 5 else None
        check(load(output, response_lengths=[3, 2], eos_token_id=eos), [EXPECTED[0], shorter])
    output = small(sequences=torch.tensor([[1, 2, 3, 0, 2], [1, 2, 2, 1, 5]]))
    with refused("end of the response", sample=1, row=2):
        load(output)
    with refused("end of the response", sample=1, row=2):
        load(output, eos_token_id=None)


@pytest.mark.parametrize(
    ("lengths", "pad", "reasons"),
    [
        ([3, 2], 5, ["length", "stop"]),
        ([3, 1], 5, ["length", None]),  # cut before its EOS
        ([2, 2], 5, [None, "stop"]),
        ([0, 0], 5, [None, None]),
        ([3, 1], 4, ["length", "stop"]),  # padded with the EOS: one that was not sampled
    ],
)
def test_a_cut_by_response_lengths_is_no_reason(lengths, pad, reasons):
    output = small(sequences=torch.tensor([[1, 2, 3, 0, 2], [1, 2, 2, 4, pad]]))
    rollouts = load(output, pad_token_id=pad, response_lengths=lengths)
    assert [rollout.finish_reason for rollout in rollouts] == reasons


@pytest.mark.parametrize("name", ["encoder_hidden_states", "encoder_attentions"])
@pytest.mark.parametrize("value", [None, (torch.zeros(2, 3, 4),)], ids=["absent", "there"])
def test_outputs_of_encoder_decoder_models(name, value):
    output = small(**{name: value})
    for each in (output, vars(output)):
        with refused("encoder-decoder"):
            load(each, prompt_ids=None, prompt_lengths=[1])


@pytest.mark.parametrize(
    ("changes", "options", "sample", "row", "match"),
    [
        ({"beam_indices": torch.zeros(2, 3)}, {}, None, None, "beam search"),
        ({"sequences_scores": torch.zeros(2)}, {}, None, None, "beam search"),
        ({"scores": None}, {}, None, None, "no scores"),
        ({"scores": torch.zeros(3, 2, 6)}, {}, None, None, "scores has the wrong type"),
        ({"scores": 7}, {}, None, None, "scores has the wrong type"),
        ({"scores": (None,) * 3}, {}, None, None, "scores of step 0"),
        ({"scores": small().scores[:2]}, {}, 0, None, "longer than told"),
        ({"scores": small().scores * 2}, {}, None, None, "sequences are not"),
        ({"scores": (*small().scores[:2], torch.zeros(2, 7))}, {}, None, 2, "wrong shape"),
        ({"scores": (*small().scores[:2], torch.zeros(1, 6))}, {}, None, 2, "wrong shape"),
        ({"scores": (torch.zeros(2, 0),) * 3}, {}, None, 0, "wrong shape"),
        ({"scores": (torch.zeros(6),) * 3}, {}, None, 0, "wrong shape"),
        ({"scores": (torch.zeros(2, 6, dtype=torch.int64),) * 3}, {}, None, None, "step 0"),
        ({"scores": (torch.full((2, 6), math.nan),) * 3}, {}, 0, 0, "no number to sample by"),
        ({"scores": (torch.full((2, 6), math.inf),) * 3}, {}, 0, 0, "no number to sample by"),
        ({"scores": (torch.full((2, 6), -math.inf),) * 3}, {}, 0, 0, "empty support"),
        ({"scores": (torch.zeros(2, 6).to(torch.float8_e5m2),) * 3}, {}, None, 0, "not a batch"),
        ({"sequences": None}, {}, None, None, "sequences are not"),
        ({"sequences": [[1, 2, 3, 0, 2]] * 2}, {}, None, None, "sequences are not"),
        ({"sequences": torch.zeros(2, 5)}, {}, None, None, "sequences are not"),
        ({"sequences": torch.zeros(2, 5, dtype=torch.bool)}, {}, None, None, "sequences are not"),
        ({"sequences": torch.zeros(10, dtype=torch.int64)}, {}, None, None, "sequences are not"),
        ({}, {"prompt_ids": None}, None, None, "prompts are not told"),
        ({}, {"prompt_lengths": [2, 2]}, None, None, "prompts are not told"),
        ({}, {"prompt_ids": [1, 3]}, 0, None, "not the prompt in sequences"),
        ({}, {"prompt_ids": [2]}, 0, None, "longer than told"),
        ({}, {"prompt_ids": [0, 1, 2]}, 0, None, "prompt is not in sequences"),
        ({}, {"prompt_ids": [PROMPT] * 3}, None, None, "differ in number"),
        ({}, {"prompt_ids": []}, None, None, "prompt is empty"),
        ({}, {"prompt_ids": [PROMPT, [1.0, 2]]}, None, None, "integers"),
        ({}, {"prompt_ids": "ab"}, None, None, "integers"),
        ({}, {"prompt_ids": None, "prompt_lengths": [0]}, 0, None, "prompt is not in sequences"),
        ({}, {"prompt_ids": None, "prompt_lengths": [2, 3]}, 1, None, "prompt is not in"),
        ({}, {"prompt_ids": None, "prompt_lengths": [2] * 3}, None, None, "differ in number"),
        ({}, {"prompt_ids": None, "prompt_lengths": [True]}, None, 0, "integers"),
        ({}, {"pad_token_id": None}, 1, 2, "end of the response"),
        ({}, {"pad_token_id": 3}, 1, 2, "end of the response"),
        ({}, {"pad_token_id": "5"}, None, None, "pad_token_id is not a count"),
        ({}, {"pad_token_id": True}, None, None, "pad_token_id is not a count"),
        ({}, {"eos_token_id": True}, None, None, "eos_token_id must be integers"),
        ({}, {"eos_token_id": "4"}, None, None, "eos_token_id must be integers"),
        ({}, {"eos_token_id": None, "pad_token_id": None}, 1, 2, "LOST_TOKEN"),
        ({}, {"eos_token_id": 0}, 0, 2, "end of the response"),
        ({}, {"response_lengths": [3]}, None, None, "end of the response"),
        ({}, {"response_lengths": [3, 3]}, 1, None, "end of the response"),
        ({}, {"response_lengths": [4, 2]}, 0, None, "end of the response"),
        ({}, {"response_lengths": [-1, 2]}, 0, None, "end of the response"),
        ({}, {"response_lengths": [3.0, 2]}, None, 0, "integers"),
        ({}, {"do_sample": 1}, None, None, "do_sample is no flag"),
        ({}, {"vocab_size": 3}, 0, 0, "out of range"),
        ({}, {"vocab_size": "6"}, None, None, "vocab_size is not a count"),
    ],
)
def test_refused(changes, options, sample, row, match):
    kind = MissingTokenError if match == "LOST_TOKEN" else ReplayError
    with refused(match, sample=sample, row=row, kind=kind):
        load(small(**changes), **options)


@pytest.mark.parametrize("bad", [None, 7, "ab", [], {}, torch.zeros(2, 5, dtype=torch.int64)])
def test_what_is_no_output(bad):
    with refused("no scores"):
        engine.from_generate(bad, **SMALL)


@pytest.mark.parametrize("kind", NO_INTEGERS)
def test_tensors_of_no_integers(kind):
    bad = tensors_of_no_integers([2, 2])[kind]
    options = ("prompt_ids", "eos_token_id", "response_lengths", "pad_token_id")
    for changes, told in [
        ({"sequences": bad}, {}),
        ({"scores": bad}, {}),
        ({"scores": (bad,) * 3}, {}),
        ({}, {"prompt_ids": None, "prompt_lengths": bad}),
        *(({}, {name: bad}) for name in options),
    ]:
        with pytest.raises(ReplayError):
            load(small(**changes), **told)


def test_the_library_itself():
    """A random GPT-2: supports are what top-k let through, log-probs what it was drawn with."""
    library = pytest.importorskip("transformers")
    config = library.GPT2Config(
        vocab_size=61,
        n_positions=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model = library.GPT2LMHeadModel(config).eval()
    prompts = [[5, 6, 7], [8]]
    inputs = torch.tensor([[5, 6, 7], [2, 2, 8]])
    common = {
        "attention_mask": (inputs != 2).long(),
        "max_new_tokens": 12,
        "eos_token_id": list(range(20, 26)),
        "pad_token_id": 2,
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    ends = {"eos_token_id": common["eos_token_id"], "pad_token_id": 2, "vocab_size": 61}
    sampled = {"do_sample": True, "temperature": 0.7, "top_k": 9, "num_return_sequences": 4}
    output = model.generate(inputs, output_logits=True, **sampled, **common)
    rollouts = engine.from_generate(output, prompt_ids=prompts, **ends)
    lengths = [len(rollout) for rollout in rollouts]
    assert len(set(lengths)) > 1, "some row must end early"
    for index, rollout in enumerate(rollouts):
        assert rollout.sampling_mask.lengths.tolist() == [9] * len(rollout)
        for step, token in enumerate(rollout.response_ids):
            top = (output.logits[step][index].double() / 0.7).topk(9)
            assert sorted(top.indices.tolist()) == rollout.sampling_mask[step].tolist()
            exact = top.values.log_softmax(0)[top.indices == token]
            np.testing.assert_allclose(rollout.rollout_log_probs[step], exact, atol=1e-5)
    transitions = model.compute_transition_scores(output.sequences, output.scores, None, True)
    for row, rollout in zip(transitions, rollouts, strict=True):
        np.testing.assert_allclose(
            row[: len(rollout)].numpy(), rollout.rollout_log_probs, rtol=0, atol=1e-5
        )
    greedy = model.generate(inputs, do_sample=False, **common)
    for rollout in engine.from_generate(greedy, prompt_ids=prompts, do_sample=False, **ends):
        assert rollout.sampling_mask == RolloutSamplingMask.forced(rollout.response_ids)
    beams = model.generate(inputs, do_sample=False, num_beams=2, **common)
    with refused("beam search"):
        engine.from_generate(beams, prompt_ids=prompts, **ends)
