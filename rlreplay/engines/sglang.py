"""SGLang: responses to requests made with `return_sampling_mask`, and streams of them.

What SGLang returns in `meta_info`, for `n` committed output tokens:

- `output_token_sampling_mask`: `n` lists of ids, highest weight first;
- `output_token_sampling_logprobs`, normalised over the support: `n` floats ("selected" mode), or
  `n` lists with a float for each id ("support" mode);
- `output_token_sampling_mask_length`: rows so far, also where a stream's chunk carries a slice;
- `weight_version`, the newest one, and `weight_versions`, (version, start, end) spans;
- `output_token_logprobs`, normalised over the full vocabulary: never read here.

An aborted response holds the tokens committed before the abort, each with its row. The token that
was being sampled is not committed: it has no row. Servers that let it slip into `output_ids` all
the same send one id more than rows. That is refused, unless the caller says
`on_uncommitted_token="drop"`: nothing is known about the distribution of that token, and a
resumed request samples the position again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch

from rlreplay.engines._common import (
    LoadOptions,
    OnMissingMask,
    PromptIds,
    assemble,
    check_agrees,
    check_option,
    check_prompt_length,
    in_sample,
    is_blank,
    items,
    mapping,
    optional_count,
    prompts_for,
    reason_of,
    sequence,
    stream_error,
    weight_spans,
    wrong_type,
)
from rlreplay.engines._sglang_stream import (
    LENGTH,
    LOG_PROBS,
    MASK,
    holds_uncommitted,
    merge_chunks,
)
from rlreplay.errors import ReplayError
from rlreplay.rollout import Rollout, log_prob_array, token_array
from rlreplay.sampling_mask import (
    FloatArray,
    IntArray,
    IntArrayLike,
    RolloutSamplingMask,
    float_array,
    integer_array,
    offsets_of,
)

OnUncommittedToken = Literal["raise", "drop"]


def from_response(
    response: dict[str, Any] | Sequence[dict[str, Any]],
    *,
    prompt_ids: PromptIds,
    vocab_size: int | None = None,
    on_missing_mask: OnMissingMask = "raise",
    on_uncommitted_token: OnUncommittedToken = "raise",
) -> list[Rollout]:
    """The rollouts of a `/generate` response: a dict, or the list that a batch returns.

    Args:
        response: `output_ids` and `meta_info`, once or several times.
        prompt_ids: one prompt's ids (for all responses), or a list of them, one a response.
        vocab_size: where given, every id must be below it.
        on_missing_mask: "raise", or "unrestricted": a response without a mask was drawn from the
            full vocabulary. An aborted response without any token needs no mask. A null row inside
            a mask is refused either way.
        on_uncommitted_token: "raise", or "drop": leave out the last id of an aborted response
            that has one id more than supports.

    Raises:
        MissingMaskError: a mask is missing or null.
        MissingTokenError: a sampled token is outside its support.
        ReplayError: anything else that does not hold together. All name the sample, and the row
            where one is to blame.
    """
    options = LoadOptions(vocab_size, on_missing_mask)
    check_option("on_uncommitted_token", on_uncommitted_token, get_args(OnUncommittedToken))
    responses = list(response) if isinstance(response, list | tuple) else [response]
    rollouts = []
    for index, prompt in enumerate(prompts_for(prompt_ids, len(responses))):
        with in_sample(index):
            rollouts.append(_rollout(responses[index], prompt, options, on_uncommitted_token))
    return rollouts


def from_chat(
    response: dict[str, Any],
    *,
    prompt_ids: PromptIds,
    vocab_size: int | None = None,
    on_missing_mask: OnMissingMask = "raise",
    on_uncommitted_token: OnUncommittedToken = "raise",
) -> list[Rollout]:
    """The rollouts of a `/v1/chat/completions` response, one a choice.

    The request must have asked for `return_sampling_mask`, `return_meta_info` and
    `return_completion_token_ids`. The arguments and errors are those of `from_response`.
    """
    choices = sequence(mapping(response, "the response").get("choices"), "choices")
    payloads = []
    for index, choice in enumerate(choices):
        with in_sample(index):
            fields = mapping(choice, "a choice")
        ids, meta = fields.get("completion_token_ids"), fields.get("meta_info")
        payloads.append({"output_ids": ids, "meta_info": meta})
    return from_response(
        payloads,
        prompt_ids=prompt_ids,
        vocab_size=vocab_size,
        on_missing_mask=on_missing_mask,
        on_uncommitted_token=on_uncommitted_token,
    )


def from_stream(
    chunks: Iterable[dict[str, Any]],
    *,
    prompt_ids: IntArrayLike,
    vocab_size: int | None = None,
    on_missing_mask: OnMissingMask = "raise",
    on_uncommitted_token: OnUncommittedToken = "raise",
    cumulative: bool | None = None,
) -> Rollout:
    """The rollout of one streamed response.

    SGLang streams in two styles: cumulative (each chunk repeats everything so far) and incremental
    (each chunk holds what is new). In both, `output_token_sampling_mask_length` is the total so
    far (`completion_tokens` stands in where it is absent): the style is found by comparing it with
    the lists. Where chunks carry `weight_version` only, the rows that a chunk adds count as
    sampled by the version it names; `weight_versions`, where sent, count rows of the whole
    response, and stand above that.

    Args:
        chunks: the decoded chunks, in order.
        prompt_ids: the prompt's ids.
        vocab_size, on_missing_mask, on_uncommitted_token: as in `from_response`.
        cumulative: the style, needed only where chunks carry no total.

    Raises:
        ReplayError: a gap, a chunk that shrinks or changes what an earlier one said, log-probs
            unlike the rows of their own chunk, a change of style, a chunk after the last, chunks of
            two requests; and all that `from_response` refuses. Rows are rows of the whole response.
    """
    options = LoadOptions(vocab_size, on_missing_mask)
    check_option("on_uncommitted_token", on_uncommitted_token, get_args(OnUncommittedToken))
    merged = merge_chunks(chunks, cumulative)
    (prompt,) = prompts_for(prompt_ids, 1)
    return _rollout(merged, prompt, options, on_uncommitted_token)


def from_chunks(
    chunks: Iterable[Any],
    *,
    prompt_ids: IntArrayLike,
    output_ids: IntArrayLike,
    vocab_size: int | None = None,
    weight_versions: Iterable[tuple[str, int, int]] = (),
    finish_reason: str | None = None,
) -> Rollout:
    """The rollout of in-process mask chunks, with no list for each token on the way.

    Args:
        chunks: objects with `lengths` int `[rows]`, `token_ids` int `[sum(lengths)]` and
            `logprobs` float `[rows]` (selected mode) or `[sum(lengths)]` (support mode), in order.
            Where all supports are singletons the two are the same numbers, taken as selected.
        prompt_ids: int `[P]`.
        output_ids: int `[n]`, `n` rows in all chunks together.
        vocab_size: where given, every id must be below it.
        weight_versions: (version, start, end) spans over `[0, n)`.
        finish_reason: why the response ended.
    """
    options = LoadOptions(vocab_size, "raise")
    response = token_array(output_ids, "output_ids", vocab_size)
    lengths, ids, values = _join_chunks(chunks)
    check_agrees("the number of mask rows", lengths.size, response.size, "output_ids")
    offsets = offsets_of(lengths)
    log_probs, support = values, None
    if values.size == ids.size != lengths.size:
        mask, support = RolloutSamplingMask.from_csr_with_values(
            ids, offsets, values, vocab_size=vocab_size
        )
        log_probs = _sampled(mask, support, response)
    else:
        mask = RolloutSamplingMask(ids, offsets, vocab_size=vocab_size)
    return assemble(
        options,
        prompt_ids=prompt_ids,
        response_ids=response,
        mask=mask,
        rollout_log_probs=log_probs,
        support_log_probs=support,
        spans=items(weight_versions, "weight_versions", "(version, start, end) spans"),
        finish_reason=finish_reason,
    )


def _rollout(
    response: Any, prompt_ids: Any, options: LoadOptions, on_uncommitted: OnUncommittedToken
) -> Rollout:
    body = mapping(response, "the response")
    meta = mapping(body.get("meta_info"), "meta_info")
    reason, rows, ids = reason_of(meta), meta.get(MASK), body.get("output_ids")
    if reason == "abort" and is_blank(ids) and is_blank(rows):
        # Aborted in the queue: SGLang then sends no mask and counts no prompt tokens.
        ids, rows = [], []
    else:
        check_prompt_length("prompt_tokens", optional_count(meta, "prompt_tokens"), prompt_ids)
    ids = sequence(ids, "output_ids")
    dropped = holds_uncommitted(ids, rows, reason)
    if dropped and on_uncommitted == "raise":
        raise _uncommitted(len(ids) - 1)
    kept = ids[:-1] if dropped else ids
    completed = optional_count(meta, "completion_tokens")
    if completed != len(kept):  # a server may or may not count the uncommitted token
        check_agrees("completion_tokens", completed, len(ids), "output_ids")
    mask, log_probs, support = _support(meta, rows, kept, options)
    return assemble(
        options,
        prompt_ids=prompt_ids,
        response_ids=kept,
        mask=mask,
        rollout_log_probs=log_probs,
        support_log_probs=support,
        spans=weight_spans(meta, len(kept), clip=dropped),
        finish_reason=reason,
    )


def _uncommitted(row: int) -> ReplayError:
    return ReplayError(
        "the aborted response ends with a token that was never committed",
        expected='a support for every token, or on_uncommitted_token="drop"',
        got="one id more than supports",
        consequence="the token would be scored on an action space that nobody knows",
        row=row,
    )


def _support(
    meta: dict[str, Any], rows: Any, ids: Sequence[Any], options: LoadOptions
) -> tuple[RolloutSamplingMask | None, Any, FloatArray | None]:
    """Mask, log-prob of each sampled token, log-prob of each support id."""
    if rows is None:
        options.missing_mask("response", row=0)
        return None, None, None
    rows = sequence(rows, MASK)
    check_agrees(MASK, len(rows), len(ids), "output_ids")
    check_agrees(LENGTH, optional_count(meta, LENGTH), len(rows), MASK)
    values = meta.get(LOG_PROBS)
    if values is None:
        return RolloutSamplingMask.from_mask_list(rows, vocab_size=options.vocab_size), None, None
    values = sequence(values, LOG_PROBS)
    check_agrees(LOG_PROBS, len(values), len(rows), MASK)
    if not set(map(type, values)) & {list, tuple, np.ndarray, torch.Tensor}:
        mask = RolloutSamplingMask.from_mask_list(rows, vocab_size=options.vocab_size)
        return mask, log_prob_array(values, LOG_PROBS), None
    mask, support = RolloutSamplingMask.from_mask_list_with_values(
        rows, values, vocab_size=options.vocab_size
    )
    support = log_prob_array(support, LOG_PROBS, per_id_of=mask)
    return mask, _sampled(mask, support, token_array(ids, "output_ids")), support


def _sampled(mask: RolloutSamplingMask, support: FloatArray, response: Any) -> FloatArray:
    """float32 `[n]`: the log-prob of each sampled token, looked up by its id."""
    mask.check_sampled(response)
    return support[mask.locate(response)]


def _join_chunks(chunks: Iterable[Any]) -> tuple[IntArray, IntArray, FloatArray]:
    """`lengths`, `token_ids` and `logprobs` of all chunks."""
    lengths, ids = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    values = [np.zeros(0, np.float32)]
    modes, done = ["selected", "support"], 0  # all chunks have one mode
    for index, chunk in enumerate(items(chunks, "the stream", "chunks")):
        sizes = integer_array(_array(chunk, "lengths", index), f"lengths of chunk {index}")
        tokens = integer_array(_array(chunk, "token_ids", index), f"token_ids of chunk {index}")
        logged = float_array(_array(chunk, "logprobs", index), f"logprobs of chunk {index}")
        wrong = (sizes < 0) | (sizes > tokens.size)
        if wrong.any() or int(sizes.sum()) != tokens.size:
            raise stream_error(
                f"the lengths of chunk {index} do not add up to its ids",
                f"{tokens.size} ids",
                f"a length of {sizes[wrong][0]}" if wrong.any() else f"{sizes.sum()}",
                row=done + (int(np.argmax(wrong)) if wrong.any() else 0),
            )
        counts = {"selected": sizes.size, "support": tokens.size}
        fitting = [mode for mode in modes if counts[mode] == logged.size]
        if not fitting:
            raise stream_error(
                f"logprobs of chunk {index} are not as many as its rows or ids",
                " or ".join(f"{counts[mode]} in {mode} mode" for mode in modes),
                f"{logged.size}",
                row=done + min(logged.size, sizes.size),
            )
        modes = fitting
        lengths.append(sizes)
        ids.append(tokens)
        values.append(logged)
        done += sizes.size
    return np.concatenate(lengths), np.concatenate(ids), np.concatenate(values)


def _array(chunk: Any, name: str, index: int) -> Any:
    value = getattr(chunk, name, None)
    if not isinstance(value, np.ndarray | torch.Tensor):
        wrong_type(f"{name} of chunk {index}", "an array or tensor", value)
    return value
