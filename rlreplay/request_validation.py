"""Which requests a trainer can replay: `validate_request` checks one before it is sent.

A trainer that holds a token's support redoes `softmax(logits / temperature)` on it, and nothing
else. So a request is refused if its tokens are drawn from anything else, if the engine returns no
support for it, if nothing bounds the size of its supports, or if it holds a parameter that is not
in the tables here: it may do any of these.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeGuard, get_args

import numpy as np

from rlreplay.capture import DEFAULT_MAX_SUPPORT, SamplingParams
from rlreplay.errors import ReplayError
from rlreplay.sampling_mask import check_count, integer_array, is_integer, shown

Engine = Literal["sglang", "vllm"]
OnMaskedIds = Literal["raise", "allow"]

_SGLANG_GREEDY_BELOW = 1e-6  # SGLang takes such a temperature for top_k = 1
_SGLANG_ALL = 1 << 30  # what SGLang's own objects hold for top_k = -1
_VLLM_LEAST_TEMPERATURE = 1e-2  # vLLM raises a lower one to it, all but 0
_VLLM_PAIRED_LOGPROBS = 2048  # the most ids whose log-probs vLLM returns beside the mask
_SHOWN_NAMES = 5
# SGLang captures supports for these alone: they commit exact draws, one support a token.
_EXACT_SPECULATION = ("DFLASH", "DSPARK")


@dataclass(frozen=True, slots=True)
class _Rule:
    """A parameter that must be absent, null, empty or `neutral`; or not even empty."""

    neutral: Any
    why: str


_UNSET: Any = object()
"""Neutral is nothing but null: an empty grammar is a grammar, and no allowed ids are none."""


def _rules(why: str, **neutral: Any) -> dict[str, _Rule]:
    return {name: _Rule(value, why) for name, value in neutral.items()}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LOGITS = "it changes logits before the draw, which the support does not tell the trainer"
_NO_DRAW = "it commits tokens that were not drawn from the captured distribution"
_PROMPT = "the engine would go on from another context than the token ids that are scored"
_SPLIT_SERVER = (
    "prefill and decode nodes hand the first token over, and its support only where both nodes "
    "reserve room for it: it may be missing"
)
_MASKED = (
    "the ids that it bans are cut before top-k and top-p. Log-probs on the captured support stay "
    "exact, but full-vocabulary entropy and log_support_mass are those of a policy without the ban"
)

_COMMON_LOGITS = _rules(
    _LOGITS,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    repetition_penalty=1.0,
    logit_bias=None,
)
_SAMPLED_BY = frozenset({"temperature", "top_k", "top_p", "min_p"})
# What a server may take from elsewhere where the request is silent.
_DEFAULTED = (*sorted(_SAMPLED_BY), "repetition_penalty")


@dataclass(frozen=True, slots=True)
class _Dialect:
    """What an engine's parameters mean for replay; names are the engine's own."""

    sampling: dict[str, _Rule]  # of `sampling_params`, to be neutral
    sampling_harmless: frozenset[str]
    request: dict[str, _Rule]  # of the request around it, to be neutral
    request_harmless: frozenset[str]
    masking: dict[str, _Rule]  # neutral unless bans of ids are allowed
    server: dict[str, _Rule]
    defaulting: dict[str, Any]  # options that fill in what the request lacks, unless neutral
    server_checked: frozenset[str]  # options with a check of their own
    unlimited: tuple[int, ...]  # values of top_k that mean no limit


_SGLANG = _Dialect(
    sampling=_COMMON_LOGITS | _rules(_LOGITS, custom_params=None) | _rules(_NO_DRAW, beam_width=1),
    sampling_harmless=_names(
        "max_new_tokens stop stop_token_ids stop_regex n ignore_eos skip_special_tokens "
        "spaces_between_special_tokens no_stop_trim stream_interval sampling_seed "
        # derived from these by the engine, in its own objects
        "stop_strs stop_regex_strs stop_str_max_len stop_regex_max_len is_normalized"
    ),
    request=_rules(_LOGITS, custom_logit_processor=None)
    | _rules(_NO_DRAW, max_thinking_tokens=None)
    | _rules(
        _PROMPT,
        input_embeds=None,
        positional_embed_overrides=None,
        session_id=None,
        session_params=None,
    )
    | _rules(
        _SPLIT_SERVER,
        bootstrap_host=None,
        bootstrap_port=None,
        bootstrap_room=None,
        bootstrap_pair_key=None,
        decode_tp_size=None,
        disagg_prefill_dp_rank=None,
    ),
    request_harmless=_names(
        "return_sampling_mask sampling_logprobs_mode rid text input_ids image_data video_data "
        "audio_data modalities mm_hashes mm_content_hashes "
        "use_audio_in_video video_config images_config max_dynamic_patch min_dynamic_patch "
        "image_max_dynamic_patch video_max_dynamic_patch return_logprob logprob_start_len "
        "top_logprobs_num token_ids_logprob return_text_in_logprobs return_flat_raw_top_logprobs "
        "return_flat_raw_top_logprobs_b64 return_flat_raw_output_top_logprobs return_hidden_states "
        "return_routed_experts routed_experts_start_len return_indexer_topk return_bytes "
        "return_entropy return_prompt_token_ids stream background lora_path lora_id "
        "routed_dp_rank data_parallel_rank kv_router_hint routing_key conversation_id "
        "http_worker_ipc require_reasoning priority extra_key cache_salt no_logs log_metrics "
        "custom_labels external_trace_header received_time"
    ),
    masking=_rules(
        _MASKED,
        json_schema=_UNSET,
        regex=_UNSET,
        ebnf=_UNSET,
        structural_tag=_UNSET,
        min_new_tokens=0,
    ),
    server=_rules(_SPLIT_SERVER, disaggregation_mode="null"),
    defaulting={"sampling_defaults": "openai", "preferred_sampling_params": None},
    server_checked=_names(
        "sampling_backend sampling_mask_max_tokens speculative_algorithm "
        "speculative_accept_threshold_single speculative_accept_threshold_acc "
        "SGLANG_SIMULATE_ACC_LEN"
    ),
    unlimited=(-1, _SGLANG_ALL),
)

_VLLM = _Dialect(
    sampling=_COMMON_LOGITS
    | _rules(_LOGITS, logits_processors=None, extra_args=None)
    | _rules(
        _NO_DRAW,
        best_of=1,
        use_beam_search=False,
        beam_width=None,
        length_penalty=1.0,
        early_stopping=False,
        thinking_token_budget=-1,
        trace_decode_token_ids=None,
    )
    | _rules(_PROMPT, truncate_prompt_tokens=None),
    sampling_harmless=_names(
        "n seed stop stop_token_ids ignore_eos max_tokens logprobs prompt_logprobs "
        "prompt_logprob_token_ids prompt_logprob_start logprob_token_ids flat_logprobs detokenize "
        "skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind "
        "stream_interval skip_clone skip_reading_prefix_cache repetition_detection "
        "routed_experts_prompt_start "
        # derived from these by the engine, in its own objects
        "output_text_buffer_length _eos_token_id _all_stop_token_ids _real_n"
    ),
    request=_rules(_SPLIT_SERVER, kv_transfer_params=None),
    request_harmless=_names(
        "request_id model token_ids features stream stream_options cache_salt priority"
    ),
    masking=_rules(
        _MASKED,
        structured_outputs=_UNSET,
        guided_decoding=_UNSET,
        guided_json=_UNSET,
        guided_regex=_UNSET,
        guided_choice=_UNSET,
        guided_grammar=_UNSET,
        allowed_token_ids=_UNSET,
        bad_words=None,
        _bad_words_token_ids=None,
        min_tokens=0,
    ),
    server=_rules(
        "vLLM returns no sampling mask with it", speculative_config=None, logits_processors=None
    )
    | _rules("vLLM may drop the sampling mask with it", enable_batch_sharded_sampling=False),
    defaulting={"generation_config": "vllm", "override_generation_config": None},
    server_checked=_names("return_sampling_mask return_sampling_mask_logprobs logprobs_mode"),
    unlimited=(-1, 0),
)

_DIALECTS = {"sglang": _SGLANG, "vllm": _VLLM}
SERVER_OPTIONS = {
    engine: d.server_checked | d.server.keys() | d.defaulting.keys()
    for engine, d in _DIALECTS.items()
}
"""The server options that `validate_request` knows, by engine; it refuses all others."""


def validate_request(
    params: Any,
    *,
    engine: Engine,
    max_support: int = DEFAULT_MAX_SUPPORT,
    server: Mapping[str, Any] | None = None,
    on_masked_ids: OnMaskedIds = "raise",
) -> SamplingParams:
    """How the tokens of a request will be drawn, if a trainer can replay them.

    What an absent parameter means is the engine's own default. OpenAI-compatible endpoints fill
    it from the model's generation_config.json instead: name those defaults in `server`, and the
    request has to state what they could change.

    Args:
        params: the engine's sampling parameters, or a whole request with `sampling_params` in it
            (SGLang's `/generate`, vLLM's `/inference/v1/generate`); a mapping with the engine's
            own names, or the engine's object. One request, not a batch.
        engine: "sglang" or "vllm".
        max_support: the most ids that a support may have, and so the highest top_k. Ties at the
            cut-off can still exceed top_k: a top_k below the cap leaves room for them.
        server: options the server was started with, by their argument's name
            (`speculative_algorithm`, `logprobs_mode`, ...; see `SERVER_OPTIONS`). Those not given
            are taken to be the engine's defaults, with masks switched on.
        on_masked_ids: "raise" refuses what bans ids outright (grammars, bad words, allowed ids, a
            least length that bans the end of sequence); "allow" lets it pass: the support that
            the engine returns is what the ban left, so log-probs on it are exact.

    Returns:
        Temperature and filters. `greedy` is true of top_k = 1, and of a temperature that SGLang
        takes for it (below 1e-6), which comes back as temperature 0 and top_k 1. vLLM returns no
        mask at temperature 0: there greedy requests have top_k = 1, and a support may hold the
        ids that tie for the highest logit.

    Raises:
        ReplayError: the parameter, why it cannot be replayed, and what it would have to be.
    """
    dialect = _DIALECTS[_choice("engine", engine, get_args(Engine), "names differ by engine")]
    _choice("on_masked_ids", on_masked_ids, get_args(OnMaskedIds), "nobody asked for it")
    request, sampling = _split(params)
    options = _fields({} if server is None else server, "server")
    known = _SAMPLED_BY | dialect.sampling_harmless | dialect.sampling.keys()
    _refuse_unknown(sampling, known | dialect.masking.keys(), "the sampling parameters")
    known = dialect.request_harmless | dialect.request.keys()
    _refuse_unknown(request or {}, known, "the request around sampling_params")
    _refuse_unknown(options, SERVER_OPTIONS[engine], "the server options")
    if on_masked_ids == "raise":
        _check_neutral(sampling, dialect.masking, ' (or on_masked_ids="allow")')
    _check_neutral(sampling, dialect.sampling)
    _check_neutral(request or {}, dialect.request)
    _check_neutral(options, dialect.server)
    _check_stated(sampling, options, dialect.defaulting)
    cap = _positive(max_support, "max_support")
    if engine == "sglang":
        return _validate_sglang(request, sampling, options, cap)
    return _validate_vllm(sampling, options, cap)


def _validate_sglang(
    request: dict[str, Any] | None, sampling: dict[str, Any], options: dict[str, Any], cap: int
) -> SamplingParams:
    if request is not None:
        _check_exactly("return_sampling_mask", request.get("return_sampling_mask"), True)
        mode = request.get("sampling_logprobs_mode")
        if mode is not None:
            why = "SGLang knows no other log-probs of a support"
            _choice("sampling_logprobs_mode", mode, ("selected", "support"), why)
        _check_one_prompt(request)
    backend = options.get("sampling_backend")
    if backend is not None:
        why = "SGLang may return no supports from another sampler (from ascend it does not)"
        _choice("sampling_backend", backend, ("flashinfer", "pytorch"), why)
    if options.get("sampling_mask_max_tokens") is not None:
        cap = min(cap, _positive(options["sampling_mask_max_tokens"], "sampling_mask_max_tokens"))
    drawn = _drawn(sampling, _SGLANG, cap, greedy_below=_SGLANG_GREEDY_BELOW)
    _check_speculation(options, drawn)
    return drawn


def _validate_vllm(sampling: dict[str, Any], options: dict[str, Any], cap: int) -> SamplingParams:
    for name, needed in (("return_sampling_mask", True), ("logprobs_mode", "processed_logprobs")):
        if name in options:
            _check_exactly(name, options[name], needed)
    if not _is_neutral(options.get("return_sampling_mask_logprobs"), False):
        cap = min(cap, _VLLM_PAIRED_LOGPROBS)
    temperature = sampling.get("temperature")
    if _is_number(temperature) and 0 <= temperature < _VLLM_LEAST_TEMPERATURE:
        _refuse(
            "temperature",
            f"a temperature >= {_VLLM_LEAST_TEMPERATURE} (with top_k=1 for greedy requests)",
            temperature,
            "vLLM returns no sampling mask at temperature 0, and draws at 0.01 below that",
        )
    return _drawn(sampling, _VLLM, cap, greedy_below=0.0)


def _drawn(
    sampling: dict[str, Any], dialect: _Dialect, cap: int, *, greedy_below: float
) -> SamplingParams:
    """The engine's temperature and filters; top_k is finite and at most `cap`."""
    given = {name: sampling[name] for name in _SAMPLED_BY if sampling.get(name) is not None}
    temperature, top_k = given.get("temperature", 1.0), given.pop("top_k", dialect.unlimited[0])
    if _is_number(temperature) and 0 <= temperature < greedy_below:
        return SamplingParams(**given | {"temperature": 0.0, "top_k": 1})
    if not (is_integer(top_k) and 1 <= int(top_k) <= cap):
        unlimited = is_integer(top_k) and int(top_k) in dialect.unlimited
        _refuse(
            "top_k",
            f"an integer in [1, {cap}], below the cap to leave room for ties",
            top_k,
            "top_p and min_p bound a support's mass and not its size: where the model is unsure "
            "it may be most of the vocabulary"
            if unlimited
            else "supports above the cap are refused while the request runs",
            "no limit" if unlimited else "",
        )
    return SamplingParams(**given, top_k=int(top_k))


def _check_speculation(options: dict[str, Any], drawn: SamplingParams) -> None:
    algorithm = options.get("speculative_algorithm")
    if algorithm is None:
        return
    if not isinstance(algorithm, str) or algorithm.upper() not in _EXACT_SPECULATION:
        _refuse(
            "speculative_algorithm",
            f"none, or one of {', '.join(_EXACT_SPECULATION)}",
            algorithm,
            "SGLang returns no support for each token that it commits",
        )
    simulated = options.get("SGLANG_SIMULATE_ACC_LEN")
    if simulated is not None and not (_is_number(simulated) and simulated <= 0):
        _refuse("SGLANG_SIMULATE_ACC_LEN", "no simulated acceptance", simulated, _NO_DRAW)
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        threshold = options.get(name, 1.0)
        if not _is_neutral(threshold, 1.0):
            _refuse(name, "1.0", threshold, _NO_DRAW)
    if drawn.min_p > 0:
        _refuse("min_p", "0 with speculative decoding", drawn.min_p, "its verifier ignores min_p")


# Reading


def _split(params: Any) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """(fields of the request around them, None where there is none; sampling parameters)."""
    fields = _fields(params, "the request")
    if "sampling_params" not in fields:
        return None, fields
    nested = fields.pop("sampling_params")
    return fields, _fields({} if nested is None else nested, "sampling_params")


def _fields(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    names = getattr(type(value), "__struct_fields__", None)  # msgspec, as both engines use it
    if names is None and dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
    if names is not None:
        return {field: getattr(value, field, None) for field in names}
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        raise ReplayError(
            f"{name} cannot be read",
            expected="a mapping of parameters, or the engine's own object, of one request",
            got=shown(value),
            consequence="nobody would know what the tokens were drawn from",
        )
    return dict(vars(value))


# Checks


def _refuse_unknown(fields: dict[str, Any], known: frozenset[str], where: str) -> None:
    unknown = [name for name in fields if not isinstance(name, str) or name not in known]
    if unknown:
        told = unknown[:_SHOWN_NAMES]
        raise ReplayError(
            f"unknown parameter in {where}",
            expected="parameters of the engine whose effect on replay is known"
            + _close(told, known),
            got=", ".join(map(shown, told)),
            consequence="it may change what the tokens are drawn from, and nobody would know",
        )


def _close(names: list[Any], known: frozenset[str]) -> str:
    """The known names that these may have been meant for, as the end of a sentence."""
    texts = [name for name in names if isinstance(name, str)]
    close = {near for name in texts for near in difflib.get_close_matches(name, known)}
    return f" (such as {', '.join(sorted(close))})" if close else ""


def _check_neutral(fields: dict[str, Any], rules: dict[str, _Rule], otherwise: str = "") -> None:
    for name, rule in rules.items():
        if name in fields and not _is_neutral(fields[name], rule.neutral):
            neutral = "" if rule.neutral in (None, _UNSET) else f" or {rule.neutral!r}"
            _refuse(name, f"{name} left out{neutral}{otherwise}", fields[name], rule.why)


def _is_neutral(value: Any, neutral: Any) -> bool:
    if value is None or neutral is _UNSET:
        return value is None
    if neutral is None:
        return isinstance(value, list | tuple | dict | set) and not value
    if isinstance(neutral, bool):
        return isinstance(value, bool | np.bool_) and bool(value) is neutral
    if isinstance(neutral, str):
        return isinstance(value, str) and value == neutral
    return _is_number(value) and bool(value == neutral)


def _check_exactly(name: str, value: Any, needed: bool | str) -> None:
    if not (type(value) is type(needed) and value == needed):
        why = "no supports would be returned, or log-probs of another distribution"
        _refuse(name, f"{name}={needed!r}", value, why)


def _check_one_prompt(request: dict[str, Any]) -> None:
    text, ids = request.get("text"), request.get("input_ids")
    if text is not None and not isinstance(text, str):
        _refuse("text", "one prompt, as a string", text, "a batch comes back as several responses")
    if ids is not None:
        integer_array(ids, "input_ids")


def _check_stated(
    sampling: dict[str, Any], options: dict[str, Any], defaulting: dict[str, Any]
) -> None:
    """Refuse a request that leaves to a server's defaults what these could change."""
    absent = [name for name in _DEFAULTED if sampling.get(name) is None]
    for option, neutral in defaulting.items():
        if absent and not _is_neutral(options.get(option), neutral):
            raise ReplayError(
                f"{', '.join(absent)} left to the server's {option}",
                expected=f"a request that states it, or {option} left out or {neutral!r}",
                got=shown(options[option]),
                consequence="tokens would be drawn with values that the trainer does not know",
            )


def _choice(name: str, value: Any, allowed: tuple[str, ...], why: str) -> str:
    if not isinstance(value, str) or value not in allowed:
        _refuse(name, " or ".join(map(repr, allowed)), value, why)
    return value


def _positive(value: Any, name: str) -> int:
    if check_count(value, name) < 1:
        _refuse(name, "an integer >= 1", value, "no token could be drawn")
    return int(value)


def _is_number(value: Any) -> TypeGuard[float]:
    return is_integer(value) or isinstance(value, float | np.floating)


def _refuse(name: str, expected: str, value: Any, why: str, meaning: str = "") -> NoReturn:
    raise ReplayError(
        f"{name} cannot be replayed",
        expected=expected,
        got=shown(value) + (f" ({meaning})" if meaning else ""),
        consequence=why,
    )
