"""Hostile payloads of every form: each ends in a `ReplayError`, or in what the payload says."""

import base64
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlreplay.engines import sglang, slime, vllm
from rlreplay.errors import ReplayError
from tests.fast.payloads import DATA, VOCAB, Drawn
from tests.fuzz.forms import FORMS, LENGTH, LOG_PROBS, MASK
from tests.fuzz.fuzz_loaders import (
    check,
    child,
    children,
    damaged_payload,
    draw,
    nested,
    with_child,
)

RESPONSE = Drawn(
    prompt=[1, 2, 3],
    tokens=[7, 5, 2],
    supports=[[7, 3], [5], [9, 2, 8, 1]],
    weights=[[3, 1], [1], [2, 2, 1, 1]],
    finish_reason="stop",
)

LONGER = Drawn(
    prompt=[1, 2, 3],
    tokens=[7, 5, 2, 4, 6, 8],
    supports=[[7, 3], [5], [9, 2, 8, 1], [4, 0], [6], [8, 6]],
    weights=[[3, 1], [1], [2, 2, 1, 1], [1, 1], [1], [4, 1]],
    finish_reason="stop",
)

# Where each form keeps the ids of its supports, its tokens and its log-probs.
_SGLANG = (("meta_info", MASK), ("output_ids",), ("meta_info", LOG_PROBS))
_CHAT = (("meta_info", MASK), ("completion_token_ids",), ("meta_info", LOG_PROBS))
_VLLM = (("sampling_mask",), ("token_ids",), ("logprobs", "content"))
_IN_PROCESS = (("sampling_mask", "token_ids"), ("token_ids",), ("logprobs",))
_CHUNKS = (("chunks", 0, "token_ids"), ("output_ids",), ("chunks", 0, "logprobs"))
_SLIME = (("meta_info", "top_p_token_ids"), ("output_ids",), ("meta_info", "output_token_logprobs"))
_BATCH = (("rollout_top_p_token_ids", 0), ("tokens", 0), ("rollout_log_probs", 0))


def _inside(*path):
    return lambda paths: tuple((*path, *each) for each in paths)


FIELDS = {
    "sglang response, selected": _inside(0)(_SGLANG),
    "sglang response, support": _inside(0)(_SGLANG),
    "sglang chat": _inside("choices", 1)(_CHAT),
    "sglang stream, cumulative": _inside(1)(_SGLANG),
    "sglang stream, incremental": _inside(1)(_SGLANG),
    "sglang stream, cumulative, untold": _inside(1)(_SGLANG),
    "sglang stream, incremental, untold": _inside(0)(_SGLANG),
    "sglang chunks, selected": _CHUNKS,
    "sglang chunks, support": _CHUNKS,
    "vllm response": _inside("choices", 0)(_VLLM),
    "vllm choice": _VLLM,
    "vllm output": _inside("outputs", 1)(_IN_PROCESS),
    "vllm stream, HTTP": _inside(1, "choices", 0)(_VLLM),
    "vllm stream, cumulative": _inside(1, "outputs", 0)(_IN_PROCESS),
    "vllm stream, cumulative, CSR": _inside(0, "outputs", 0)(_IN_PROCESS),
    "vllm stream, deltas": _inside(1, "outputs", 0)(_IN_PROCESS),
    "vllm stream, deltas, CSR": _inside(0, "outputs", 0)(_IN_PROCESS),
    "vllm tensors": (("token_ids",), ("counts",), ("packed_mask",)),
    "slime response, base64": _inside(0)(_SLIME),
    "slime response, arrays": _SLIME,
    "slime batch": _BATCH,
    "transformers": (("output", "scores"), ("output", "sequences"), ("prompt_lengths",)),
}

WRONG = {
    "bool": True,
    "number": 7,
    "fraction": 0.5,
    "NaN": math.nan,
    "huge": 10**400,
    "text": "abc!",
    "half a line": '{"output_ids": [1, 2',
    "bytes": b"123",
    "dict": {"content": 7},
    "object": object(),
    "nested": nested(5000),
    "endless": range(10**18),
    "nulls": [None] * 3,
    "bools": [True] * 3,
    "floats": [7.0, 5.5, 2.0],
    "texts": ["7", "5", "2"],
    "huge ints": [10**30] * 3,
    "NaNs": [math.nan] * 3,
    "scalar array": np.array(7),
    "object array": np.array([7, None, "2"], dtype=object),
    "uint64": np.array([2**64 - 1] * 3, np.uint64),
    "scalar tensor": torch.tensor(7),
    "complex tensor": torch.zeros(3, dtype=torch.complex64),
    "meta tensor": torch.zeros(3, dtype=torch.int64, device="meta"),
}


def at(payload, path):
    for key in path:
        payload = child(payload, key)
    return payload


def exchanged(payload, path, new):
    """A copy of the payload with the value at `path` exchanged; `new` may be a function of it."""
    if not path:
        return new(payload) if callable(new) else new
    key, *rest = path
    return with_child(payload, key, exchanged(child(payload, key), rest, new))


def paths(value, path=()):
    yield path
    for key in children(value):
        yield from paths(child(value, key), (*path, key))


def test_every_form_has_its_fields_and_loads():
    assert FIELDS.keys() == FORMS.keys()
    for name, form in FORMS.items():
        payload = form.make(RESPONSE)
        assert all(at(payload, path) is not None for path in FIELDS[name])
        assert check(form, payload) == "accepted"


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("name", FORMS)
def test_wrong_types(name, kind):
    payload = FORMS[name].make(RESPONSE)
    for path in FIELDS[name]:
        with pytest.raises(ReplayError):
            FORMS[name].load(exchanged(payload, path, lambda _: WRONG[kind]))


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.whole])
@pytest.mark.parametrize("kind", [None, *WRONG])
def test_what_is_no_payload(name, kind):
    wrong = None if kind is None else WRONG[kind]
    for payload in (wrong, [wrong], [wrong] * 3, {"choices": wrong}, {"choices": [wrong]}):
        with pytest.raises(ReplayError):
            FORMS[name].load(payload)


@pytest.mark.parametrize("name", FORMS)
def test_null_everywhere(name):
    """Any field may be null: the result is the same, or there is none."""
    payload = FORMS[name].make(RESPONSE)
    for path in paths(payload):
        if path or FORMS[name].whole:
            check(FORMS[name], exchanged(payload, path, lambda _: None))
    support_ids = FIELDS[name][0]
    with pytest.raises(ReplayError):
        FORMS[name].load(exchanged(payload, support_ids, lambda _: None))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("junk", [True, -1, 10**400, math.nan, "7", [], [[]], {}, nested(2000)])
def test_junk_everywhere(name, junk):
    payload = FORMS[name].make(RESPONSE)
    for path in paths(payload):
        if path or FORMS[name].whole:
            check(FORMS[name], exchanged(payload, path, lambda _: junk))


@pytest.mark.parametrize("name", FORMS)
@given(rng=st.randoms(use_true_random=False), places=st.integers(1, 3))
def test_random_damage(name, rng, places):
    form = FORMS[name]
    payload = form.make(draw(rng))
    for _ in range(places):
        payload = damaged_payload(rng, form, payload)
    check(form, payload)


# What only some forms can suffer


def _flipped(ends):
    return ends[::-1].copy() if isinstance(ends, np.ndarray) else torch.flip(ends, (0,))


def _recoded(change):
    """A change of the integers inside base64."""

    def apply(text):
        values = np.frombuffer(base64.b64decode(text), "<i4").copy()
        return base64.b64encode(np.asarray(change(values)).astype("<i4").tobytes()).decode()

    return apply


def _set(index, value):
    def apply(values):
        own = values.clone() if isinstance(values, torch.Tensor) else list(values)
        own[index] = value
        return own if isinstance(values, list | torch.Tensor) else np.array(own)

    return apply


_SLIME_IDS = (0, "meta_info", "top_p_token_ids")
_SLIME_ENDS = (0, "meta_info", "top_p_token_offsets")
_CSR_ENDS = ("outputs", 1, "sampling_mask", "offsets")
_FIRST = (0, "meta_info")


@pytest.mark.parametrize(
    ("name", "path", "change"),
    [
        # base64: odd length, odd bytes, cut short, not the alphabet
        ("slime response, base64", _SLIME_IDS, lambda text: text[:-1]),
        ("slime response, base64", _SLIME_IDS, lambda text: text[: len(text) // 2]),
        ("slime response, base64", _SLIME_IDS, lambda text: text[1:]),
        ("slime response, base64", _SLIME_IDS, lambda text: text + "AAAA"),
        ("slime response, base64", _SLIME_IDS, lambda _: base64.b64encode(b"12345").decode()),
        ("slime response, base64", _SLIME_IDS, lambda text: text.replace("A", "-")),
        ("slime response, base64", _SLIME_IDS, lambda text: f" {text}"),
        ("slime response, base64", _SLIME_IDS, _recoded(lambda v: v.byteswap())),
        ("slime response, base64", _SLIME_ENDS, lambda text: text[:-4]),
        # offsets: backwards, too few, too many, too far, not from 0
        ("slime response, base64", _SLIME_ENDS, _recoded(lambda v: v[::-1])),
        ("slime response, base64", _SLIME_ENDS, _recoded(lambda v: v[[0, 2, 1, 3]])),
        ("slime response, base64", _SLIME_ENDS, _recoded(lambda v: v[:-1])),
        ("slime response, base64", _SLIME_ENDS, _recoded(lambda v: np.append(v, v[-1]))),
        ("slime response, base64", _SLIME_ENDS, _recoded(lambda v: v + 1)),
        ("slime response, base64", _SLIME_ENDS, _recoded(lambda v: np.append(v[:-1], 10**9))),
        ("slime response, base64", _SLIME_ENDS, _recoded(lambda v: np.append(v[:-1], -1))),
        ("slime batch", ("rollout_top_p_token_offsets", 0), lambda ends: ends[::-1]),
        ("slime batch", ("rollout_top_p_token_offsets", 0), _set(-1, 2**63)),
        ("slime batch", ("response_lengths", 0), lambda _: 10**9),
        ("slime batch", ("response_lengths", 0), lambda _: 10**30),
        ("vllm output", _CSR_ENDS, _flipped),
        ("vllm output", _CSR_ENDS, lambda ends: ends[:-1]),
        ("vllm output", _CSR_ENDS, lambda ends: ends + 1),
        ("vllm output", _CSR_ENDS, _set(-1, 10**9)),
        ("vllm output", _CSR_ENDS, _set(1, -(2**63))),
        ("vllm stream, deltas, CSR", (0, *_CSR_ENDS[:1], 0, *_CSR_ENDS[2:]), _flipped),
        ("vllm stream, deltas, CSR", (1, *_CSR_ENDS[:1], 0, *_CSR_ENDS[2:]), _set(1, 10**9)),
        ("vllm stream, deltas, CSR", (1, *_CSR_ENDS[:1], 0, *_CSR_ENDS[2:]), _set(0, 1)),
        # counts of rows and of ids
        *(
            ("sglang response, selected", (*_FIRST, field), lambda _, n=n: n)
            for field in (LENGTH, "completion_tokens", "prompt_tokens")
            for n in (10**9, 10**30, -1, 3.0, "3", True, math.nan, [3])
        ),
        *(
            ("sglang stream, incremental, untold", (1, "meta_info", LENGTH), lambda _, n=n: n)
            for n in (10**9, 10**30, -1, 3.5, "3", True)
        ),
        *(
            ("sglang chunks, selected", ("chunks", 0, "lengths"), _set(0, n))
            for n in (10**9, 2**62, -1, 0)
        ),
        *(("vllm tensors", ("counts",), _set(0, n)) for n in (10**9, 2**31 - 1, -1, 0, 3)),
        *(("vllm tensors", ("vocab_size",), lambda _, n=n: n) for n in (10**9, 10**30, 8, True)),
        # the bitmask
        ("vllm tensors", ("packed_mask",), lambda bits: bits[:, :-1]),
        ("vllm tensors", ("packed_mask",), lambda bits: torch.cat([bits, bits], dim=1)),
        ("vllm tensors", ("packed_mask",), lambda bits: bits[:-1]),
        ("vllm tensors", ("packed_mask",), lambda bits: bits.int()),
        ("vllm tensors", ("packed_mask",), lambda bits: bits.bool()),
        ("vllm tensors", ("packed_mask",), torch.zeros_like),
        ("vllm tensors", ("packed_mask",), lambda bits: ~bits),
        ("vllm tensors", ("packed_mask",), lambda bits: bits.flip(1)),
        ("vllm tensors", ("packed_mask",), lambda _: None),
        # ids
        *(
            (name, (*FIELDS[name][0], 0), lambda _, row=row: row)
            for name in ("sglang response, selected", "vllm choice", "vllm stream, HTTP")
            for row in ([], None, [True], [5.0], ["5"], [-5], [5, 5], [VOCAB], [2**31], [10**30])
        ),
        # log-probs: NaN as null, positive, another policy's
        *(
            ("sglang response, selected", (*_FIRST, LOG_PROBS, 2), lambda _, v=v: v)
            for v in (None, math.nan, math.inf, -math.inf, 0.5, True, "-0.5", 10**400, [None])
        ),
        *(
            ("sglang response, support", (*_FIRST, LOG_PROBS, 2, 0), lambda _, v=v: v)
            for v in (None, math.nan, math.inf, -math.inf, 0.5, True, "-0.5", 10**400, -9.0)
        ),
        *(
            ("vllm choice", ("logprobs", "content", 2, "logprob"), lambda _, v=v: v)
            for v in (None, math.nan, -math.inf, -9999.0, 0.5, True, "-0.5", 10**400)
        ),
        ("sglang response, support", (*_FIRST, LOG_PROBS, 2), lambda row: row[:-1]),
        ("sglang response, support", (*_FIRST, LOG_PROBS), lambda rows: rows[:-1]),
        # versions
        *(
            ("sglang response, selected", (*_FIRST, "weight_version"), lambda _, v=v: v)
            for v in (7, True, ["7"], {}, nested(2000))
        ),
        # transformers
        ("transformers", ("output", "scores"), lambda scores: scores[:-1]),
        ("transformers", ("output", "scores", 0), lambda step: step[:, :-VOCAB]),
        ("transformers", ("output", "scores", 0), lambda step: step[:1]),
        ("transformers", ("output", "scores", 0), lambda step: step.nan_to_num(neginf=math.nan)),
        ("transformers", ("output", "scores", 0), lambda step: step.int()),
        ("transformers", ("output", "sequences"), lambda ids: ids.float()),
        ("transformers", ("output", "sequences"), lambda ids: ids.flip(1)),
        ("transformers", ("output", "sequences"), lambda ids: ids[:, :2]),
    ],
)
def test_damage_of_one_form(name, path, change):
    payload = FORMS[name].make(RESPONSE)
    with pytest.raises(ReplayError):
        FORMS[name].load(exchanged(payload, path, change))


@pytest.mark.parametrize("name", [name for name in FORMS if "stream" in name])
def test_chunks_lost_and_repeated(name):
    chunks = FORMS[name].make(LONGER)
    assert len(chunks) == 4
    whole = FORMS[name].load(chunks)
    told_by_counts = name.startswith("sglang")
    if told_by_counts and "cumulative" not in name:
        for broken in (chunks[1:], chunks[::2], [*chunks[:1], *chunks], chunks[::-1]):
            with pytest.raises(ReplayError):
                FORMS[name].load(broken)
    if "cumulative" in name:
        for broken in (chunks[::-1], [*chunks, chunks[0]], [chunks[1], chunks[0], *chunks[2:]]):
            with pytest.raises(ReplayError):
                FORMS[name].load(broken)
        assert FORMS[name].load([chunks[0], chunks[-1]]).response_ids.tolist() == (
            whole.response_ids.tolist()
        )


@pytest.mark.parametrize("name", ["sglang_stream_cumulative", "sglang_stream_incremental"])
def test_a_line_cut_in_half(name):
    """A line that no longer parses has to be kept as text, and text is no chunk."""
    lines = (DATA / f"{name}.jsonl").read_text().splitlines()
    chunks = [json.loads(line) for line in lines]
    assert len(sglang.from_stream(chunks, prompt_ids=[1, 2, 3])) == 12
    cut = [*chunks[:-1], lines[-1][: len(lines[-1]) // 2]]
    with pytest.raises(ReplayError, match="wrong type"):
        sglang.from_stream(cut, prompt_ids=[1, 2, 3])


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_prompts_of_the_wrong_type(wrong):
    loads = {
        "sglang": lambda p: sglang.from_response(_without_counts(), prompt_ids=p),
        "vllm": lambda p: vllm.from_choice(FORMS["vllm choice"].make(RESPONSE), prompt_ids=p),
        "slime": lambda p: slime.from_response(
            FORMS["slime response, base64"].make(RESPONSE), prompt_ids=p
        ),
    }
    for load in loads.values():
        load([1, 2, 3])
        with pytest.raises(ReplayError):
            load(wrong)


def _without_counts():
    (body, _) = FORMS["sglang response, selected"].make(RESPONSE)
    del body["meta_info"]["prompt_tokens"]
    return body


def test_comparisons_that_raise():
    """A request id may be anything, and so may its comparison."""
    chunks = FORMS["vllm stream, deltas"].make(RESPONSE)
    for first, second in [
        (torch.tensor(1), 2**70),
        (np.array([1, 2]), np.array([1, 2, 3])),
        (nested(100_000), nested(100_000)),
        (torch.zeros(2), torch.zeros(3)),
    ]:
        told = [
            SimpleNamespace(**{**vars(chunk), "request_id": name})
            for chunk, name in zip(chunks, (first, second), strict=True)
        ]
        with pytest.raises(ReplayError, match="another request"):
            FORMS["vllm stream, deltas"].load(told)
