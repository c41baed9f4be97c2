"""vLLM: HTTP responses, in-process outputs, delta streams, and the sampler's device tensors.

vLLM returns supports when it was started with `return_sampling_mask`: `sampling_mask` holds one
list of ids for each output token (over HTTP), or is an object whose `token_ids` is such a list, or
a CSR pair (`token_ids` flat, `offsets`).

vLLM's `logprobs` field does not say what it is normalised over: that depends on the server's
`--logprobs-mode`, which the loaders are told. They take the mode that replay needs, and that the
server has to be started with, for granted:

- "processed_logprobs": after temperature, top-k, top-p and min-p, hence normalised over the
  support. They become `rollout_log_probs`.
- "raw_logprobs" (the server's own default): over the full vocabulary, before temperature. They are
  another policy's log-probs and are left out: say `logprobs_mode="raw_logprobs"` for such a server.
- "processed_logits", "raw_logits": no log-probs at all, and left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlreplay.engines._common import (
    SHIFTED,
    WRONG_LAYOUT,
    LoadOptions,
    OnMissingMask,
    PromptIds,
    in_sample,
    mapping,
    prompts_for,
    sequence,
    wrong_type,
)
from rlreplay.engines._vllm_choice import (
    LogprobsMode,
    check_mode,
    check_prompt,
    completion_fields,
    read_choice,
)
from rlreplay.engines._vllm_stream import merge_chunks
from rlreplay.errors import ReplayError
from rlreplay.rollout import Rollout
from rlreplay.sampling_mask import (
    IntArrayLike,
    RolloutSamplingMask,
    check_count,
    host_array,
    integer_array,
    offsets_of,
)


def from_response(
    response: dict[str, Any] | Sequence[dict[str, Any]],
    *,
    prompt_ids: PromptIds,
    vocab_size: int | None = None,
    on_missing_mask: OnMissingMask = "raise",
    logprobs_mode: LogprobsMode = "processed_logprobs",
) -> list[Rollout]:
    """The rollouts of an HTTP response, one a choice, in the order of the payload.

    Args:
        response: a response with `choices`, or a list of responses.
        prompt_ids: one prompt's ids, or a list of them, one a response. The choices of a response
            share its prompt, which must be its `prompt_token_ids` where it has them.
        vocab_size: where given, every id must be below it.
        on_missing_mask: "raise", or "unrestricted": a choice without a mask was drawn from the
            full vocabulary. A null row inside a mask is refused either way. To read the choices
            that have a mask, use `from_choice`.
        logprobs_mode: the server's `--logprobs-mode`; log-probs of any but the default here are
            left out.

    Raises:
        MissingMaskError: the mask of a choice is missing or null; `sample` is its place among all
            choices.
        MissingTokenError: a sampled token is outside its support.
        ReplayError: anything else that does not hold together.
    """
    options = LoadOptions(vocab_size, on_missing_mask)
    check_mode(logprobs_mode)
    responses = list(response) if isinstance(response, list | tuple) else [response]
    rollouts: list[Rollout] = []
    for body, prompt in zip(responses, prompts_for(prompt_ids, len(responses)), strict=True):
        with in_sample(len(rollouts)):
            fields = mapping(body, "the response")
            choices = sequence(fields.get("choices"), "choices")
            check_prompt(fields.get("prompt_token_ids"), prompt)
        for index, choice in enumerate(choices):  # before anything else that one may lack
            with in_sample(len(rollouts) + index):
                if mapping(choice, "a choice").get("sampling_mask") is None:
                    options.missing_mask("choice", row=0)
        for choice in choices:
            with in_sample(len(rollouts)):
                rollouts.append(read_choice(choice, prompt, options, logprobs_mode))
    return rollouts


def from_choice(
    choice: dict[str, Any],
    *,
    prompt_ids: IntArrayLike,
    vocab_size: int | None = None,
    on_missing_mask: OnMissingMask = "raise",
    logprobs_mode: LogprobsMode = "processed_logprobs",
) -> Rollout:
    """The rollout of one choice of an HTTP response. Arguments as in `from_response`."""
    check_mode(logprobs_mode)
    options = LoadOptions(vocab_size, on_missing_mask)
    (prompt,) = prompts_for(prompt_ids, 1)
    return read_choice(mapping(choice, "the choice"), prompt, options, logprobs_mode)


def from_output(
    output: Any,
    *,
    prompt_ids: IntArrayLike | None = None,
    vocab_size: int | None = None,
    on_missing_mask: OnMissingMask = "raise",
    logprobs_mode: LogprobsMode = "processed_logprobs",
) -> list[Rollout]:
    """The rollouts of an in-process `RequestOutput` (or one `CompletionOutput`), one a completion.

    Args:
        output: has `outputs` and `prompt_token_ids`; or is a completion itself, with `token_ids`,
            `sampling_mask`, `logprobs` and `finish_reason`.
        prompt_ids: int `[P]`. May be left out where `output` has `prompt_token_ids`, and must
            agree with them where it is given.
        vocab_size, on_missing_mask, logprobs_mode: as in `from_response`.
    """
    check_mode(logprobs_mode)
    options = LoadOptions(vocab_size, on_missing_mask)
    own_prompt = getattr(output, "prompt_token_ids", None)
    prompt = own_prompt if prompt_ids is None else prompt_ids
    if prompt is None:
        wrong_type("prompt_ids", "the prompt's ids, from the caller or in the output", None)
    check_prompt(own_prompt, prompt)
    completions = getattr(output, "outputs", None)
    if completions is None:
        completions = [output]
    rollouts = []
    for index, each in enumerate(sequence(completions, "outputs")):
        with in_sample(index):
            rollouts.append(read_choice(completion_fields(each), prompt, options, logprobs_mode))
    return rollouts


def from_stream(
    chunks: Iterable[Any],
    *,
    prompt_ids: IntArrayLike,
    vocab_size: int | None = None,
    on_missing_mask: OnMissingMask = "raise",
    logprobs_mode: LogprobsMode = "processed_logprobs",
    choice: int | None = None,
    cumulative: bool | None = None,
) -> Rollout:
    """The rollout of one streamed choice.

    vLLM streams in two styles: deltas (each chunk holds what is new), always over HTTP and in
    process with `output_kind=DELTA`; and cumulative outputs (each repeats everything so far), the
    default in process. Nothing in an output names its style. In process, an output that does not
    repeat the tokens before it proves deltas, and the rows that `weight_versions` count prove
    either; where neither does, the caller has to say.

    Args:
        chunks: HTTP chunks (dicts with `choices`), or in-process outputs, in order.
            `weight_versions`, where sent, count rows of the whole response.
        prompt_ids: int `[P]`; must agree with `prompt_token_ids` where a chunk has them.
        vocab_size, on_missing_mask, logprobs_mode: as in `from_response`.
        choice: the `index` to read, needed only where the stream carries several choices.
        cumulative: the style. None takes HTTP chunks for deltas, and tells the style of
            in-process outputs by what proves it.

    Raises:
        ReplayError: chunks of several choices and no `choice`, in-process outputs that could be of
            either style and no `cumulative`, a chunk after the last, chunks of two requests, a mask
            or log-probs in some deltas and not in others, log-probs unlike the tokens of their own
            chunk, a cumulative output that shrinks, a chunk that changes what an earlier one said;
            and all that `from_response` refuses. Rows are rows of the whole response.
    """
    check_mode(logprobs_mode)
    options = LoadOptions(vocab_size, on_missing_mask)
    (prompt,) = prompts_for(prompt_ids, 1)
    fields = merge_chunks(chunks, prompt, choice, cumulative)
    return read_choice(fields, prompt, options, logprobs_mode)


def from_tensors(
    token_ids: Any, counts: Any, packed_mask: Any, vocab_size: int
) -> RolloutSamplingMask:
    """The supports of the sampler's device form, one row for each sampled position.

    Args:
        token_ids: int `[rows, width]`; the first `counts[r]` entries of row r are its support,
            what follows is not read.
        counts: int `[rows]`, the support size of each row.
        packed_mask: uint8 `[rows, ceil(vocab_size / 8)]`, little-endian: bit j of byte b stands
            for id `8 * b + j`. Read for the rows with `counts > width`, and for them only; may be
            None where there is none.
        vocab_size: number of ids that the bitmask stands for.

    The arrays may be numpy arrays or tensors on any device. They hold the rows of a step's batch,
    not of one response: `select` and `concat` put the responses together.

    Raises:
        ReplayError: shapes or types that do not fit, a count above `vocab_size` or unlike the
            number of bits set, and all that `RolloutSamplingMask` refuses; rows are rows of the
            batch.
    """
    limit = check_count(vocab_size, "vocab_size")
    sizes = integer_array(counts, "counts")
    compact = _host(token_ids, "token_ids", "iu", f"integers of shape [{sizes.size}, width]")
    if compact.shape[0] != sizes.size:
        raise _misshapen("token_ids", f"{sizes.size} rows", f"{compact.shape[0]}")
    wrong = (sizes < 0) | (sizes > limit)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ReplayError(
            "counts holds a number that is no support size",
            expected=f"an integer in [0, {limit}]",
            got=f"{sizes[row]}",
            consequence=SHIFTED,
            row=row,
        )
    wide = sizes > compact.shape[1]
    # First, for it finds counts that no bitmask bears out before anything is made of their size.
    wide_ids = _wide_ids(packed_mask, np.flatnonzero(wide), sizes, limit) if wide.any() else None
    ids = np.zeros(int(sizes.sum()), dtype=np.int64)
    from_bits = np.repeat(wide, sizes)
    ids[~from_bits] = compact[(np.arange(compact.shape[1]) < sizes[:, None]) & ~wide[:, None]]
    if wide_ids is not None:
        ids[from_bits] = wide_ids
    return RolloutSamplingMask(ids, offsets_of(sizes), vocab_size=limit)


def _wide_ids(packed_mask: Any, rows: Any, sizes: Any, vocab_size: int) -> Any:
    """Ids of the rows that do not fit the compact form, one row after another."""
    packed = _host(packed_mask, "packed_mask", "u", f"uint8 of shape [{sizes.size}, bytes]")
    if packed.shape[0] != sizes.size:
        raise _misshapen("packed_mask", f"{sizes.size} rows", f"{packed.shape[0]}")
    try:
        mask = RolloutSamplingMask.from_packed_bits(packed[rows], vocab_size)
    except ReplayError as error:
        row = None if error.row is None else int(rows[error.row])
        raise error.located(row=row) from None
    off = mask.lengths != sizes[rows]
    if off.any():
        at = int(np.argmax(off))
        raise ReplayError(
            "the bitmask does not hold as many ids as counted",
            expected=f"{sizes[rows[at]]} bits set",
            got=f"{mask.lengths[at]}",
            consequence="the policy would be scored on another support than the one sampled from",
            row=int(rows[at]),
        )
    return mask.ids


def _host(values: Any, name: str, kinds: str, expected: str) -> Any:
    return host_array(values, kinds, 2, lambda got: _misshapen(name, expected, got))


def _misshapen(name: str, expected: str, got: str) -> ReplayError:
    return ReplayError(
        f"{name} has the wrong shape or type",
        expected=expected,
        got=got,
        consequence=WRONG_LAYOUT,
    )
