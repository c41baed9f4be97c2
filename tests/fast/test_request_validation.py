"""Which requests can be replayed: one refusal for each reason, and nothing unknown let through."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlreplay.capture import SamplingParams
from rlreplay.errors import ReplayError
from rlreplay.request_validation import SERVER_OPTIONS, Engine, validate_request

BASE: dict[str, Any] = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.02}
EXPECTED = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, min_p=0.02)
both = pytest.mark.parametrize("engine", ["sglang", "vllm"])
STATED = BASE | {"repetition_penalty": 1.0}

# What each engine's own object holds if nothing was asked for, by its public sources.
SGLANG_DEFAULTS: dict[str, Any] = {
    "max_new_tokens": 128,
    "stop": None,
    "stop_token_ids": None,
    "stop_regex": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 1 << 30,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "n": 1,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
    "custom_params": None,
    "stream_interval": None,
    "logit_bias": None,
    "sampling_seed": None,
    "stop_strs": None,
    "stop_regex_strs": None,
    "stop_str_max_len": 0,
    "stop_regex_max_len": 0,
    "is_normalized": False,
}
VLLM_DEFAULTS: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "prompt_logprob_token_ids": None,
    "prompt_logprob_start": None,
    "logprob_token_ids": None,
    "flat_logprobs": False,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "output_kind": object(),
    "stream_interval": None,
    "skip_clone": False,
    "output_text_buffer_length": 0,
    "_eos_token_id": 2,
    "_all_stop_token_ids": {2},
    "structured_outputs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "extra_args": None,
    "bad_words": [],
    "_bad_words_token_ids": None,
    "skip_reading_prefix_cache": False,
    "thinking_token_budget": None,
    "repetition_detection": None,
    "routed_experts_prompt_start": 0,
    "trace_decode_token_ids": None,
}
DEFAULTS = {"sglang": SGLANG_DEFAULTS, "vllm": VLLM_DEFAULTS}


class Struct:
    """An object of declared fields, as msgspec makes them; what else it holds is no field."""

    __struct_fields__: tuple[str, ...] = ()

    def __init__(self, **fields: Any) -> None:
        type(self).__struct_fields__ = tuple(fields)
        self.__dict__.update(fields, cached_by_a_property=1)


# What passes


@both
def test_a_plain_request_passes(engine: Engine) -> None:
    assert validate_request(BASE, engine=engine) == EXPECTED
    assert validate_request({"top_k": 5}, engine=engine) == SamplingParams(top_k=5)
    assert validate_request(BASE, engine=engine, server={}) == EXPECTED


@both
@pytest.mark.parametrize("make", [dict, Struct, SimpleNamespace])
def test_the_engines_own_objects_pass(engine: Engine, make: Any) -> None:
    assert validate_request(make(**DEFAULTS[engine] | BASE), engine=engine) == EXPECTED


@both
def test_dataclasses_pass(engine: Engine) -> None:
    @dataclass
    class Params:
        temperature: float = 0.5
        top_k: int = 4

    expected = SamplingParams(temperature=0.5, top_k=4)
    assert validate_request(Params(), engine=engine) == expected


@both
def test_null_is_the_default(engine: Engine) -> None:
    nulls = dict.fromkeys(DEFAULTS[engine]) | {"top_k": 7}
    assert validate_request(nulls, engine=engine) == SamplingParams(top_k=7)


def test_whole_requests_pass() -> None:
    sglang = {
        "input_ids": [1, 2],
        "sampling_params": BASE | {"max_new_tokens": 8, "n": 4},
        "return_sampling_mask": True,
        "sampling_logprobs_mode": "support",
        "return_logprob": True,
        "stream": True,
    }
    assert validate_request(sglang, engine="sglang") == EXPECTED
    vllm = {"token_ids": [1, 2], "model": "m", "sampling_params": BASE | {"logprobs": 0}}
    assert validate_request(vllm, engine="vllm") == EXPECTED


@both
@pytest.mark.parametrize("top_k", [1, 2, 4096, np.int64(9)])
def test_top_k_up_to_the_cap(engine: Engine, top_k: int) -> None:
    assert validate_request({"top_k": top_k}, engine=engine).top_k == top_k


def test_greedy_requests() -> None:
    for temperature in (0, 0.0, 1e-7, np.float32(0)):
        greedy = validate_request({"temperature": temperature, "top_p": 0.9}, engine="sglang")
        assert greedy == SamplingParams(temperature=0.0, top_k=1, top_p=0.9)
        assert greedy.greedy
    for engine in ("sglang", "vllm"):
        greedy = validate_request({"temperature": 0.7, "top_k": 1}, engine=engine)
        assert greedy == SamplingParams(temperature=0.7, top_k=1)
        assert greedy.greedy


def test_vllm_greedy_by_temperature_has_no_mask() -> None:
    for temperature in (0, 0.0, 1e-5, 0.009):
        with pytest.raises(ReplayError, match=r"temperature .*>= 0.01 \(with top_k=1 for greedy"):
            validate_request({"temperature": temperature, "top_k": 5}, engine="vllm")
    assert validate_request({"temperature": 0.01, "top_k": 5}, engine="vllm").temperature == 0.01


# Sizes


@both
def test_supports_without_a_bound_are_refused(engine: Engine) -> None:
    unlimited = {"sglang": [-1, 1 << 30, None], "vllm": [-1, 0, None]}[engine]
    for request in ({"top_p": 0.9}, {}, *({"top_k": k, "top_p": 0.9} for k in unlimited)):
        with pytest.raises(
            ReplayError, match=r"top_k .*\[1, 4096\].*\(no limit\); .* mass and not its size"
        ):
            validate_request(request, engine=engine)


@both
@pytest.mark.parametrize(
    "top_k", [4097, -2, 5.0, "5", True, [5], math.nan, pytest.param(10**6000, id="huge")]
)
def test_top_k_that_is_none_or_above_the_cap_is_refused(engine: Engine, top_k: Any) -> None:
    with pytest.raises(ReplayError, match=r"^top_k cannot be replayed: expected an integer in"):
        validate_request({"top_k": top_k}, engine=engine)


@both
def test_the_cap_is_the_callers(engine: Engine) -> None:
    assert validate_request({"top_k": 8}, engine=engine, max_support=8).top_k == 8
    with pytest.raises(ReplayError, match=r"integer in \[1, 8\], .* got int 9"):
        validate_request({"top_k": 9}, engine=engine, max_support=8)
    for cap in (0, -1, 2.0, None, True):
        with pytest.raises(ReplayError, match="max_support"):
            validate_request(BASE, engine=engine, max_support=cap)  # type: ignore[arg-type]


def test_the_server_lowers_the_cap() -> None:
    request, low = {"top_k": 65}, {"sampling_mask_max_tokens": 64}
    for engine, server in (("sglang", low), ("vllm", {"return_sampling_mask_logprobs": True})):
        cap = 64 if engine == "sglang" else 2048
        assert validate_request({"top_k": cap}, engine=engine, server=server).top_k == cap
        with pytest.raises(ReplayError, match=rf"\[1, {cap}\]"):
            validate_request({"top_k": cap + 1}, engine=engine, server=server)
    assert validate_request(request, engine="sglang", server={"sampling_mask_max_tokens": 9999})
    with pytest.raises(ReplayError, match="sampling_mask_max_tokens"):
        validate_request(request, engine="sglang", server={"sampling_mask_max_tokens": -4})


@both
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.5),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        pytest.param("temperature", 10**6000, id="temperature-huge"),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("min_p", [0.1]),
    ],
)
def test_values_out_of_range_are_refused(engine: Engine, name: str, value: Any) -> None:
    with pytest.raises(ReplayError, match=f"^{name} "):
        validate_request(BASE | {name: value}, engine=engine)


# What changes the draw

LOGITS = "changes logits before the draw"
NO_DRAW = "were not drawn from the captured distribution"
PROMPT = "another context"


@both
@pytest.mark.parametrize(
    ("name", "neutral", "value"),
    [
        ("frequency_penalty", 0.0, 0.5),
        ("frequency_penalty", 0, -1e-9),
        ("presence_penalty", 0.0, -0.5),
        ("presence_penalty", 0.0, math.nan),
        ("repetition_penalty", 1.0, 1.05),
        ("repetition_penalty", 1, 0.0),
        ("repetition_penalty", np.float64(1), "1.0"),
        ("repetition_penalty", 1, True),
        ("logit_bias", {}, {"5": 1.0}),
        ("logit_bias", None, [(5, 1.0)]),
    ],
)
def test_penalties_and_biases_are_refused(
    engine: Engine, name: str, neutral: Any, value: Any
) -> None:
    assert validate_request(BASE | {name: neutral}, engine=engine) == EXPECTED
    for allow in ("raise", "allow"):
        with pytest.raises(ReplayError, match=rf"^{name} cannot .*{name} left out.*{LOGITS}"):
            validate_request(BASE | {name: value}, engine=engine, on_masked_ids=allow)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("engine", "name", "value", "why"),
    [
        ("sglang", "custom_params", {"a": 1}, LOGITS),
        ("sglang", "beam_width", 2, NO_DRAW),
        ("vllm", "logits_processors", [print], LOGITS),
        ("vllm", "extra_args", {"a": 1}, LOGITS),
        ("vllm", "best_of", 4, NO_DRAW),
        ("vllm", "use_beam_search", True, NO_DRAW),
        ("vllm", "beam_width", 4, NO_DRAW),
        ("vllm", "length_penalty", 0.8, NO_DRAW),
        ("vllm", "early_stopping", "never", NO_DRAW),
        ("vllm", "thinking_token_budget", 100, NO_DRAW),
        ("vllm", "trace_decode_token_ids", [5, 6], NO_DRAW),
        ("vllm", "truncate_prompt_tokens", 100, PROMPT),
    ],
)
def test_sampling_parameters_of_one_engine(engine: Engine, name: str, value: Any, why: str) -> None:
    with pytest.raises(ReplayError, match=rf"^{name} cannot be replayed: .*{why}"):
        validate_request(BASE | {name: value}, engine=engine)
    assert validate_request(BASE | {name: None}, engine=engine) == EXPECTED


@pytest.mark.parametrize(
    ("engine", "name", "value", "why"),
    [
        ("sglang", "custom_logit_processor", "{}", LOGITS),
        ("sglang", "max_thinking_tokens", 10, NO_DRAW),
        ("sglang", "input_embeds", [[0.1]], PROMPT),
        ("sglang", "session_id", "s1", PROMPT),
        ("sglang", "session_params", {"id": "s1", "rid": "r1"}, PROMPT),
        ("sglang", "positional_embed_overrides", [1], PROMPT),
        ("sglang", "bootstrap_host", "10.0.0.1", "first token"),
        ("sglang", "bootstrap_room", 5, "first token"),
        ("vllm", "kv_transfer_params", {"do_remote_decode": True}, "first token"),
    ],
)
def test_fields_of_whole_requests(engine: Engine, name: str, value: Any, why: str) -> None:
    request = {"sampling_params": BASE}
    if engine == "sglang":
        request["return_sampling_mask"] = True
    assert validate_request(request | {name: None}, engine=engine) == EXPECTED
    with pytest.raises(ReplayError, match=rf"^{name} cannot be replayed: .*{why}"):
        validate_request(request | {name: value}, engine=engine)


@pytest.mark.parametrize("asked", [None, False, 1, "true", [True]])
def test_a_whole_sglang_request_asks_for_the_mask(asked: Any) -> None:
    request = {"sampling_params": BASE, "return_sampling_mask": asked}
    with pytest.raises(ReplayError, match="expected return_sampling_mask=True"):
        validate_request(request, engine="sglang")
    with pytest.raises(ReplayError, match="expected return_sampling_mask=True"):
        validate_request({"sampling_params": BASE}, engine="sglang")
    request = {"sampling_params": BASE, "return_sampling_mask": True, "sampling_logprobs_mode": "x"}
    with pytest.raises(ReplayError, match="'selected' or 'support'"):
        validate_request(request, engine="sglang")


MASKING = [
    ("sglang", "json_schema", "{}"),
    ("sglang", "regex", ""),
    ("sglang", "ebnf", "root ::= 'a'"),
    ("sglang", "structural_tag", "{}"),
    ("sglang", "min_new_tokens", 3),
    ("vllm", "structured_outputs", SimpleNamespace(json="{}")),
    ("vllm", "guided_decoding", {"regex": "a"}),
    ("vllm", "guided_json", {"type": "object"}),
    ("vllm", "guided_json", {}),
    ("vllm", "structured_outputs", {}),
    ("vllm", "allowed_token_ids", []),
    ("vllm", "guided_regex", "a"),
    ("vllm", "guided_choice", ["a", "b"]),
    ("vllm", "guided_grammar", "root ::= 'a'"),
    ("vllm", "allowed_token_ids", [1, 2]),
    ("vllm", "bad_words", ["no"]),
    ("vllm", "_bad_words_token_ids", [[4]]),
    ("vllm", "min_tokens", 3),
]


@pytest.mark.parametrize(("engine", "name", "value"), MASKING)
def test_bans_of_ids_have_to_be_allowed(engine: Engine, name: str, value: Any) -> None:
    request = BASE | {name: value}
    with pytest.raises(ReplayError, match=rf'^{name} .*\(or on_masked_ids="allow"\).*stay exact'):
        validate_request(request, engine=engine)
    assert validate_request(request, engine=engine, on_masked_ids="allow") == EXPECTED


# Servers


@pytest.mark.parametrize(
    ("engine", "server", "match"),
    [
        ("sglang", {"speculative_algorithm": "EAGLE"}, "no support for each token"),
        ("sglang", {"speculative_algorithm": "NGRAM"}, "DFLASH, DSPARK, got str NGRAM"),
        ("sglang", {"speculative_algorithm": 3}, "speculative_algorithm"),
        ("sglang", {"sampling_backend": "ascend"}, "from ascend it does not"),
        ("sglang", {"disaggregation_mode": "prefill"}, "first token"),
        ("sglang", {"disaggregation_mode": "decode"}, "first token"),
        ("sglang", {"disaggregation_mode": 0}, "disaggregation_mode"),
        ("vllm", {"speculative_config": {"method": "eagle"}}, "no sampling mask with it"),
        ("vllm", {"logits_processors": ["a.b"]}, "no sampling mask with it"),
        ("vllm", {"return_sampling_mask": False}, "return_sampling_mask=True"),
        ("vllm", {"logprobs_mode": "raw_logprobs"}, "logprobs_mode='processed_logprobs'"),
        ("vllm", {"enable_batch_sharded_sampling": True}, "may drop"),
    ],
)
def test_servers_that_do_not_capture_are_refused(
    engine: Engine, server: dict[str, Any], match: str
) -> None:
    with pytest.raises(ReplayError, match=match):
        validate_request(BASE, engine=engine, server=server)


def test_servers_as_they_should_be_pass() -> None:
    sglang = {
        "speculative_algorithm": None,
        "speculative_accept_threshold_single": 0.5,  # without speculation it does nothing
        "sampling_backend": "flashinfer",
        "disaggregation_mode": "null",
        "sampling_mask_max_tokens": 4096,
        "sampling_defaults": "openai",
        "preferred_sampling_params": None,
    }
    assert validate_request(BASE, engine="sglang", server=sglang) == EXPECTED
    vllm = {
        "return_sampling_mask": True,
        "logprobs_mode": "processed_logprobs",
        "speculative_config": None,
        "logits_processors": [],
        "generation_config": "vllm",
        "override_generation_config": {},
    }
    assert validate_request(BASE, engine="vllm", server=vllm) == EXPECTED


@pytest.mark.parametrize("algorithm", ["DFLASH", "dspark"])
def test_speculation_passes_where_it_commits_exact_draws(algorithm: str) -> None:
    request, server = {"top_k": 5}, {"speculative_algorithm": algorithm}
    assert validate_request(request, engine="sglang", server=server) == SamplingParams(top_k=5)
    for option, value in (
        ("speculative_accept_threshold_single", 0.9),
        ("speculative_accept_threshold_acc", 0.9),
        ("SGLANG_SIMULATE_ACC_LEN", 2.5),
        ("SGLANG_SIMULATE_ACC_LEN", "2"),
    ):
        with pytest.raises(ReplayError, match=f"^{option} .*{NO_DRAW}"):
            validate_request(request, engine="sglang", server=server | {option: value})
    exact = {"speculative_accept_threshold_acc": 1, "SGLANG_SIMULATE_ACC_LEN": -1}
    assert validate_request(request, engine="sglang", server=server | exact).top_k == 5
    with pytest.raises(ReplayError, match=r"min_p .*its verifier ignores min_p"):
        validate_request(request | {"min_p": 0.1}, engine="sglang", server=server)


@pytest.mark.parametrize(
    ("engine", "server"),
    [
        ("vllm", {"generation_config": "auto"}),
        ("vllm", {"override_generation_config": {"repetition_penalty": 1.05}}),
        ("sglang", {"sampling_defaults": "model"}),
        ("sglang", {"preferred_sampling_params": '{"top_p": 0.8}'}),
    ],
)
def test_what_a_server_would_fill_in_has_to_be_stated(
    engine: Engine, server: dict[str, Any]
) -> None:
    assert validate_request(STATED, engine=engine, server=server) == EXPECTED
    for name in STATED:
        silent = {key: value for key, value in STATED.items() if key != name}
        with pytest.raises(ReplayError, match=f"^{name} left to the server's {next(iter(server))}"):
            validate_request(silent, engine=engine, server=server)
        with pytest.raises(ReplayError, match=f"^{name} left to"):
            validate_request(STATED | {name: None}, engine=engine, server=server)


# What nobody knows


@both
@pytest.mark.parametrize("name", ["typical_p", "top_K", "", 5, None, ("top_k",), "messages"])
def test_unknown_parameters_are_refused(engine: Engine, name: Any) -> None:
    for request in (
        BASE | {name: None},
        {"sampling_params": BASE | {name: 1}, "return_sampling_mask": True},
    ):
        with pytest.raises(ReplayError, match="unknown parameter in the sampling parameters"):
            validate_request(request, engine=engine)
    with pytest.raises(ReplayError, match="unknown parameter in the request around"):
        validate_request({"sampling_params": BASE, name: 1}, engine=engine)
    with pytest.raises(ReplayError, match="unknown parameter in the server options"):
        validate_request(BASE, engine=engine, server={name: None})


@both
def test_names_that_were_meant_are_told(engine: Engine) -> None:
    for name, meant in (("top_K", "top_k"), ("temprature", "temperature")):
        with pytest.raises(ReplayError, match=rf"\(such as .*{meant}.*\), got str {name};"):
            validate_request(BASE | {name: 1}, engine=engine)
    with pytest.raises(ReplayError) as caught:
        validate_request(BASE | {"zzz": 1, 5: 1}, engine=engine)
    assert caught.value.expected == "parameters of the engine whose effect on replay is known"


def test_names_of_the_other_engine_are_unknown() -> None:
    for engine, name in (("sglang", "min_tokens"), ("vllm", "min_new_tokens")):
        with pytest.raises(ReplayError, match=rf"unknown parameter .* got str {name};"):
            validate_request(BASE | {name: 0}, engine=engine)  # type: ignore[arg-type]


def test_parameters_do_not_hide_at_the_wrong_level() -> None:
    request = {"sampling_params": BASE, "return_sampling_mask": True, "frequency_penalty": 0.5}
    with pytest.raises(ReplayError, match="unknown parameter in the request around"):
        validate_request(request, engine="sglang")
    with pytest.raises(ReplayError, match="unknown parameter in the sampling parameters"):
        validate_request({"sampling_params": {"sampling_params": BASE}}, engine="vllm")


def test_batches_of_prompts_are_refused() -> None:
    request = {"sampling_params": BASE, "return_sampling_mask": True}
    for one in ({"text": "a"}, {"text": None, "input_ids": [1]}, {"input_ids": np.array([1, 2])}):
        assert validate_request(request | one, engine="sglang") == EXPECTED
    for text in (["a"], ["a", "b"], [], ("a",), b"a", 5):
        with pytest.raises(ReplayError, match="text cannot be replayed: expected one prompt"):
            validate_request(request | {"text": text}, engine="sglang")
    for ids in ([[1, 2]], [[1], [2]], ["1"], "12", np.ones((1, 2), np.int64), 5):
        with pytest.raises(ReplayError, match="input_ids must be integers"):
            validate_request(request | {"input_ids": ids}, engine="sglang")


@both
@pytest.mark.parametrize("params", [None, 5, "top_k=5", [BASE], (), SamplingParams, dict, b""])
def test_what_is_no_request_is_refused(engine: Engine, params: Any) -> None:
    with pytest.raises(ReplayError, match=r"cannot be read: .* of one request"):
        validate_request(params, engine=engine)
    if params is not None:
        with pytest.raises(ReplayError, match=r"sampling_params cannot be read"):
            validate_request({"sampling_params": params}, engine=engine)
        with pytest.raises(ReplayError, match=r"server cannot be read"):
            validate_request(BASE, engine=engine, server=params)


@pytest.mark.parametrize("engine", ["trt", None, "SGLang", 5, ["vllm"]])
def test_engines_and_options_that_are_none_are_refused(engine: Any) -> None:
    with pytest.raises(ReplayError, match=r"engine cannot .*'sglang' or 'vllm'"):
        validate_request(BASE, engine=engine)
    with pytest.raises(ReplayError, match=r"on_masked_ids cannot .*'raise' or 'allow'"):
        validate_request(BASE, engine="vllm", on_masked_ids=engine)


def test_requests_are_not_written_to() -> None:
    request = {"sampling_params": dict(BASE), "return_sampling_mask": True}
    validate_request(request, engine="sglang")
    assert request == {"sampling_params": BASE, "return_sampling_mask": True}


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    st.just(np.zeros(3)),
    st.just(object()),
)


@both
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_whatever_comes_is_validated_or_refused(engine: Engine, data: st.DataObject) -> None:
    name = st.sampled_from([*DEFAULTS[engine], "sampling_params", "return_sampling_mask"])
    fields = st.dictionaries(st.one_of(name, st.text(max_size=3)), anything, max_size=4)
    option = st.sampled_from(sorted(SERVER_OPTIONS[engine]))
    request = BASE | data.draw(fields)
    server = data.draw(st.dictionaries(option, anything, max_size=2))
    try:
        params = validate_request(request, engine=engine, server=server)
    except ReplayError:
        return
    assert params.top_k is not None
    assert 1 <= params.top_k <= 4096
    assert params.greedy or params.temperature > 0
