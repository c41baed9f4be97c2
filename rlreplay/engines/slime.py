"""slime: its SGLang's `meta_info` with packed supports, and the flat fields of its trainer.

slime sends the supports as two int32 arrays, `top_p_token_ids` and `top_p_token_offsets` (also
called `top_p_kept_token_ids` and `top_p_kept_token_offsets`): base64 of little-endian integers over
HTTP, raw bytes, arrays or lists elsewhere. Row t is `ids[offsets[t]:offsets[t + 1]]`.

`output_token_logprobs` holds `[log-prob, id, text]` for each token. What it is normalised over
depends on the build of SGLang: over the full vocabulary, or over the nucleus where slime's patch
is in. Only the ids are read unless the caller says `log_probs_over="support"`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Literal, get_args

import numpy as np
import torch

from rlreplay.engines._common import (
    WRONG_LAYOUT,
    LoadOptions,
    OnMissingMask,
    PromptIds,
    assemble,
    check_agrees,
    check_option,
    check_prompt_length,
    in_sample,
    is_blank,
    mapping,
    optional_count,
    prompts_for,
    reason_of,
    sequence,
    weight_spans,
    wrong_type,
)
from rlreplay.errors import ReplayError
from rlreplay.rollout import Rollout, token_array
from rlreplay.sampling_mask import (
    IntArray,
    RolloutSamplingMask,
    check_count,
    integer_array,
    shown,
)

LogProbsOver = Literal["vocabulary", "support"]

_IDS = ("top_p_token_ids", "top_p_kept_token_ids")
_OFFSETS = ("top_p_token_offsets", "top_p_kept_token_offsets")
_TRAINER_IDS, _TRAINER_OFFSETS = "rollout_top_p_token_ids", "rollout_top_p_token_offsets"
_TRAINER_FIELDS = (
    "tokens",
    "response_lengths",
    "loss_masks",
    "rollout_log_probs",
    _TRAINER_IDS,
    _TRAINER_OFFSETS,
)


def from_response(
    response: dict[str, Any] | Sequence[dict[str, Any]],
    *,
    prompt_ids: PromptIds,
    vocab_size: int | None = None,
    on_missing_mask: OnMissingMask = "raise",
    log_probs_over: LogProbsOver = "vocabulary",
) -> list[Rollout]:
    """The rollouts of a response, or of the list that a batch returns.

    Args:
        response: `output_ids` (or, without them, the ids of `output_token_logprobs`) and
            `meta_info`.
        prompt_ids: one prompt's ids (for all responses), or a list of them, one a response.
        vocab_size: where given, every id must be below it.
        on_missing_mask: "raise", or "unrestricted": a response without a mask was drawn from the
            full vocabulary. An empty or null row inside a mask is refused either way.
        log_probs_over: what `output_token_logprobs` are normalised over. "support" makes them
            `rollout_log_probs`, and refuses tokens without any; "vocabulary" leaves them out.

    Raises:
        MissingMaskError: the supports are missing or null.
        MissingTokenError: a sampled token is outside its support.
        ReplayError: anything else that does not hold together.
    """
    options = LoadOptions(vocab_size, on_missing_mask)
    check_option("log_probs_over", log_probs_over, get_args(LogProbsOver))
    responses = list(response) if isinstance(response, list | tuple) else [response]
    rollouts = []
    for index, prompt in enumerate(prompts_for(prompt_ids, len(responses))):
        with in_sample(index):
            rollouts.append(_rollout(responses[index], prompt, options, log_probs_over))
    return rollouts


def from_train_data(
    fields: dict[str, Any],
    *,
    vocab_size: int | None = None,
    on_missing_mask: OnMissingMask = "raise",
    log_probs_over: LogProbsOver = "vocabulary",
) -> list[Rollout]:
    """The rollouts of slime's trainer batch.

    Args:
        fields: lists with an entry for each sample: `tokens` (prompt and response),
            `response_lengths`, `rollout_top_p_token_ids`, `rollout_top_p_token_offsets`, and
            where known `loss_masks` and `rollout_log_probs`.
        vocab_size, on_missing_mask, log_probs_over: as in `from_response`.

    slime gives tokens that no sampler drew (tool output) an empty row and loss mask 0. Such a row
    is unrestricted here; an empty row of a token in the loss is refused, whatever
    `on_missing_mask` says.
    """
    options = LoadOptions(vocab_size, on_missing_mask)
    check_option("log_probs_over", log_probs_over, get_args(LogProbsOver))
    data = mapping(fields, "the batch")
    count = len(sequence(data.get("tokens"), "tokens"))
    columns: dict[str, Sequence[Any]] = {}
    for name in _TRAINER_FIELDS:
        column = data.get(name)
        if column is None and name not in ("tokens", "response_lengths"):
            column = [None] * count
        columns[name] = sequence(column, name)
        if len(columns[name]) != count:
            raise ReplayError(
                f"{name} and tokens differ in number",
                expected=f"{count} samples",
                got=f"{len(columns[name])}",
                consequence="samples would get another sample's values",
            )
    rollouts = []
    for index in range(count):
        with in_sample(index):
            sample = {name: column[index] for name, column in columns.items()}
            rollouts.append(_train_rollout(sample, options, log_probs_over))
    return rollouts


def _rollout(response: Any, prompt_ids: Any, options: LoadOptions, over: LogProbsOver) -> Rollout:
    body = mapping(response, "the response")
    meta = mapping(body.get("meta_info"), "meta_info")
    reason = reason_of(meta)
    logged_ids, log_probs = _logged(meta.get("output_token_logprobs"))
    ids = body.get("output_ids")
    if ids is None:
        ids = logged_ids
    if not (reason == "abort" and is_blank(ids)):  # no prompt is counted for those
        check_prompt_length("prompt_tokens", optional_count(meta, "prompt_tokens"), prompt_ids)
    tokens = token_array(ids, "output_ids", options.vocab_size)
    check_agrees(
        "completion_tokens", optional_count(meta, "completion_tokens"), tokens.size, "output_ids"
    )
    if logged_ids is not None:
        _check_logged_ids(logged_ids, tokens)
    mask = _mask(_field(meta, _IDS), _field(meta, _OFFSETS), tokens.size, options)
    if over == "support" and mask is not None:
        _check_present("output_token_logprobs", log_probs, tokens.size)
    return assemble(
        options,
        prompt_ids=prompt_ids,
        response_ids=tokens,
        mask=mask,
        rollout_log_probs=log_probs if over == "support" else None,
        spans=weight_spans(meta, tokens.size),
        finish_reason=reason,
    )


def _train_rollout(sample: dict[str, Any], options: LoadOptions, over: LogProbsOver) -> Rollout:
    tokens, n = sample["tokens"], check_count(sample["response_lengths"], "response_lengths")
    if isinstance(tokens, np.ndarray | torch.Tensor):
        tokens = integer_array(tokens, "tokens")
    elif not isinstance(tokens, list | tuple):
        wrong_type("tokens", "a list or array of ids", tokens)
    cut = len(tokens) - n
    if cut < 1:
        raise ReplayError(
            "the response leaves no token for the prompt",
            expected=f"a response length below {len(tokens)}",
            got=shown(n),
            consequence="no logits row would score the first response token",
        )
    mask = _mask(
        sample[_TRAINER_IDS], sample[_TRAINER_OFFSETS], n, options, allow_unrestricted=True
    )
    if over == "support" and mask is not None:
        _check_present("rollout_log_probs", sample["rollout_log_probs"], n)
    rollout = assemble(
        options,
        prompt_ids=tokens[:cut],
        response_ids=tokens[cut:],
        mask=mask,
        rollout_log_probs=sample["rollout_log_probs"] if over == "support" else None,
        loss_mask=sample["loss_masks"],
    )
    if mask is not None:
        _check_empty_rows(rollout)
    return rollout


def _check_present(name: str, values: Any, n: int) -> None:
    if values is None and n:
        raise ReplayError(
            f"{name} are missing",
            expected='a log-prob for each token, or log_probs_over="vocabulary"',
            got="none",
            consequence="the rollout would lack the log-probs that were asked for",
            row=0,
        )


def _check_empty_rows(rollout: Rollout) -> None:
    bad = rollout.sampling_mask.unrestricted & rollout.loss_mask
    if bad.any():
        raise ReplayError(
            "empty support of a token in the loss",
            expected="at least one id, or loss mask 0",
            got="none",
            consequence="a sampled token would be scored over the full vocabulary",
            row=int(np.argmax(bad)),
        )


def _mask(
    ids: Any, offsets: Any, n: int, options: LoadOptions, *, allow_unrestricted: bool = False
) -> RolloutSamplingMask | None:
    if ids is None and offsets is None:
        options.missing_mask("response", row=0)
        return None
    if ids is None or offsets is None:
        raise ReplayError(
            "the supports lack their ids or their offsets",
            expected="both arrays",
            got=f"no {'ids' if ids is None else 'offsets'}",
            consequence=WRONG_LAYOUT,
        )
    ends = _int32_array(offsets, "the offsets")
    check_agrees("the number of mask rows", max(ends.size - 1, 0), n, "output_ids")
    return RolloutSamplingMask(
        _int32_array(ids, "the support ids"),
        ends,
        vocab_size=options.vocab_size,
        allow_unrestricted=allow_unrestricted,
    )


def _field(meta: dict[str, Any], names: Sequence[str]) -> Any:
    present = [name for name in names if meta.get(name) is not None]
    if len(present) > 1:
        raise ReplayError(
            "one field came under two names",
            expected=f"{' or '.join(names)}",
            got="both",
            consequence=WRONG_LAYOUT,
        )
    return meta[present[0]] if present else None


def _int32_array(value: Any, name: str) -> IntArray:
    """int64 `[m]` from base64 text, raw little-endian bytes, or what `integer_array` takes.

    A `memoryview` of bytes is raw; one of a wider format is an array of that format.
    """
    if isinstance(value, str):
        value = _decoded(value, name)
    if isinstance(value, memoryview):
        value = _viewed(value, name)
    if not isinstance(value, bytes | bytearray):
        return integer_array(value, name)
    if len(value) % 4:
        raise ReplayError(
            f"{name} are cut short",
            expected="a whole number of int32",
            got=f"{len(value)} bytes",
            consequence=WRONG_LAYOUT,
        )
    return np.frombuffer(value, dtype="<i4").astype(np.int64)


def _decoded(text: str, name: str) -> bytes:
    try:
        value = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _no_base64(name, f"{error}") from None
    if base64.b64encode(value) != text.encode():  # the decoder passes over stray padding and bits
        raise _no_base64(name, "text that its own bytes do not encode to")
    return value


def _no_base64(name: str, got: str) -> ReplayError:
    return ReplayError(
        f"{name} are no base64",
        expected="base64 of little-endian int32",
        got=got,
        consequence=WRONG_LAYOUT,
    )


def _viewed(view: memoryview, name: str) -> Any:
    try:
        raw = view.format in ("B", "b", "c") and view.ndim == 1
        return view.tobytes() if raw else np.asarray(view)
    except ValueError:  # released, or of a format that numpy does not know
        wrong_type(name, "a view of bytes or integers", view)


def _logged(value: Any) -> tuple[list[Any] | None, list[Any] | None]:
    """(ids, log-probs) of `output_token_logprobs`."""
    if value is None:
        return None, None
    entries = sequence(value, "output_token_logprobs")
    listed = set(map(type, entries)) <= {list, tuple}
    if not listed or min(map(len, entries), default=2) < 2:
        wrong_type("output_token_logprobs", "a list of [log-prob, id, text]", value)
    return list(map(itemgetter(1), entries)), list(map(itemgetter(0), entries))


def _check_logged_ids(logged: list[Any], tokens: IntArray) -> None:
    check_agrees("the number of output_token_logprobs", len(logged), tokens.size, "output_ids")
    off = integer_array(logged, "the ids of output_token_logprobs") != tokens
    if off.any():
        row = int(np.argmax(off))
        raise ReplayError(
            "output_token_logprobs belong to other tokens",
            expected=f"token {tokens[row]}",
            got=shown(logged[row]),
            consequence="tokens and supports would be shifted against each other",
            row=row,
        )
