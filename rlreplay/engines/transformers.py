"""Hugging Face transformers: what `generate` returns with scores.

The call has to be `generate(..., output_scores=True, return_dict_in_generate=True)`. Of its output
are read, for `B` rows, `n` steps and `V` columns:

- `sequences`, int `[B, W + n]`: prompts, padded on the left to width `W`, then what was generated;
- `scores`, a tuple of `n` float `[B, V]`: the logits after every processor and warper, -inf outside
  the support. Their softmax is what each token was drawn from.

`logits` (`output_logits=True`) are those before any processor, and say nothing of the support: they
are never read. Neither can a `logits_processor` that is passed to `generate` capture the support:
it runs before temperature, top-k, top-p and min-p, and does not see what they cut off.

A row that ends before the others goes on as padding, and has scores that no token was drawn from.
Encoder-decoder models are refused: `sequences` lacks the prompt that their encoder has read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlreplay.capture import (
    CaptureStatus,
    SupportCapture,
    capture_from_logits,
    support_from_logits,
)
from rlreplay.engines._common import (
    WRONG_LAYOUT,
    LoadOptions,
    PromptIds,
    assemble,
    in_sample,
    prompts_for,
    wrong_type,
)
from rlreplay.errors import ReplayError
from rlreplay.rollout import Rollout, prompt_array
from rlreplay.sampling_mask import (
    FloatArray,
    IntArray,
    IntArrayLike,
    RolloutSamplingMask,
    check_count,
    check_flag,
    check_ids_below,
    host_array,
    integer_array,
    is_integer,
    offsets_of,
    shown,
)

_OF_ENCODERS = ("encoder_attentions", "encoder_hidden_states")  # encoder-decoder outputs have them
_ANOTHER_PROMPT = "the response would be scored after another prompt"
_NOT_SAMPLED = "tokens that nobody sampled would be scored, or sampled ones left out"


def from_generate(
    output: Any,
    *,
    prompt_ids: PromptIds | None = None,
    prompt_lengths: IntArrayLike | None = None,
    eos_token_id: int | IntArrayLike | None = None,
    pad_token_id: int | None = None,
    response_lengths: IntArrayLike | None = None,
    do_sample: bool = True,
    vocab_size: int | None = None,
) -> list[Rollout]:
    """The rollouts of one call of `generate`, one a row of `output.sequences`.

    The support of a token is the ids with a finite score, its log-prob the log-softmax of the
    scores. A step that cut nothing off has all `V` ids for its support.

    Args:
        output: has `sequences` and `scores`, as attributes or keys.
        prompt_ids: one prompt's ids without padding, or a list of them; they must be what
            `sequences` holds. Of fewer prompts than rows, each serves as many consecutive rows as
            `num_return_sequences` makes.
        prompt_lengths: int, in place of `prompt_ids`: how many tokens before the response are the
            prompt's, one for each prompt.
        eos_token_id: the id or ids that end a row, those of the generation config. None if
            generation was not to stop at any.
        pad_token_id: what follows a row that has ended. None where no row ends before the others.
        response_lengths: int `[B]`, where the caller knows them. Needed where rows ended otherwise
            than by `eos_token_id` (stop strings, stopping criteria of one's own), which leaves no
            trace in the output. By default a row ends with its first `eos_token_id`.
        do_sample: as told to `generate`. False makes every support the token itself, with log-prob
            0: greedy search draws nothing, and its scores are those before the choice.
        vocab_size: where given, every id must be below it.

    `finish_reason` is "stop" where a row ended with `eos_token_id`, or before the last step with
    nothing but padding after it; "length" where it has all steps; None where `response_lengths`
    cuts it before other tokens, which leaves no trace of why.

    Raises:
        MissingTokenError: a sampled token has a score of -inf.
        ReplayError: the output of a beam search or of an encoder-decoder model; no scores, whether
            or not there are `logits`; anything but padding after the end of a row, or padding where
            no end can be told; prompts that are not in `sequences`; a greedy token without the
            highest score; a score that is NaN or +inf; scores of another shape.
    """
    options = LoadOptions(vocab_size, "raise")
    check_flag(do_sample, "do_sample")
    sequences, scores = _fields(output)
    width = sequences.shape[1] - len(scores)
    prompts = _prompts(sequences[:, :width], prompt_ids, prompt_lengths, pad_token_id)
    generated = sequences[:, width:]
    eos = _eos_ids(eos_token_id)
    lengths = _lengths(generated, eos, pad_token_id, response_lengths)
    active = np.arange(len(scores))[:, None] < lengths
    steps = _read_steps(scores, generated.T, active, do_sample)
    reasons = _finish_reasons(generated, lengths, eos, pad_token_id)
    offsets = offsets_of(lengths).tolist()
    rollouts = []
    for index, prompt in enumerate(prompts):
        rows = slice(offsets[index], offsets[index + 1])
        mask = steps.mask[rows]
        with in_sample(index):
            if vocab_size is not None:
                check_ids_below(mask, vocab_size)
            rollout = assemble(
                options,
                prompt_ids=prompt,
                response_ids=generated[index, : lengths[index]],
                mask=mask,
                rollout_log_probs=steps.log_probs[rows],
                finish_reason=reasons[index],
            )
        rollouts.append(rollout)
    return rollouts


# Fields


def _fields(output: Any) -> tuple[IntArray, list[Tensor]]:
    """`sequences` and `scores`, of shapes that fit each other."""

    def get(name: str) -> Any:
        return output.get(name) if isinstance(output, dict) else getattr(output, name, None)

    for name in ("beam_indices", "sequences_scores"):
        if get(name) is not None:
            raise ReplayError(
                "the output of a beam search",
                expected="sampling, or greedy search, without beams",
                got=name,
                consequence="its tokens were ranked across beams, not drawn from their scores",
            )
    for name in _OF_ENCODERS:  # transformers leaves out of its mapping what is None
        if hasattr(output, name) or (isinstance(output, dict) and name in output):
            raise ReplayError(
                "the output of an encoder-decoder model",
                expected="a decoder alone, whose prompts are in sequences",
                got=name,
                consequence="the response would be scored without what the encoder has read",
            )
    scores = get("scores")
    if scores is None:
        raw = " (logits are those before any processor)" if get("logits") is not None else ""
        raise ReplayError(
            "the output has no scores",
            expected="generate(..., output_scores=True, return_dict_in_generate=True)",
            got=shown(output)[:40] + raw,
            consequence="nobody knows what was cut off when sampling",
        )
    if not isinstance(scores, list | tuple):
        wrong_type("scores", "a tuple with a tensor for each step", scores)
    sequences = host_array(get("sequences"), "iu", 2, _not_sequences)
    if len(scores) > sequences.shape[1]:
        raise _not_sequences(f"{sequences.shape[1]} columns for {len(scores)} steps")
    width = None
    for step, each in enumerate(scores):
        width = _check_scores(each, step, sequences.shape[0], width)
    wide = integer_array(sequences.reshape(-1), "sequences")
    return wide.reshape(sequences.shape), list(scores)


def _check_scores(values: Any, step: int, rows: int, width: int | None) -> int:
    """The number of columns of one step's scores, which must be `width` where that is given."""
    plain = type(values) is torch.Tensor and values.layout is torch.strided
    if not plain or not values.is_floating_point() or values.is_meta or values.is_nested:
        wrong_type(f"the scores of step {step}", "a floating-point tensor [B, V]", values)
    shape = tuple(values.shape)
    if len(shape) != 2 or shape[0] != rows or shape[1] == 0 or width not in (None, shape[1]):
        raise ReplayError(
            "scores have the wrong shape",
            expected=f"[{rows}, {'V' if width is None else width}] at every step",
            got=f"{list(shape)}",
            consequence=WRONG_LAYOUT,
            row=step,
        )
    return int(shape[1])


def _not_sequences(got: str) -> ReplayError:
    return ReplayError(
        "sequences are not the ids that scores belong to",
        expected="integers of shape [B, prompt + steps]",
        got=got,
        consequence=WRONG_LAYOUT,
    )


# Prompts


def _prompts(padded: IntArray, prompt_ids: Any, prompt_lengths: Any, pad: Any) -> list[IntArray]:
    """The prompt of each row, without padding; `padded` is int `[B, W]`."""
    if (prompt_ids is None) == (prompt_lengths is None):
        raise ReplayError(
            "the prompts are not told",
            expected="prompt_ids or prompt_lengths",
            got="neither" if prompt_ids is None else "both",
            consequence=_ANOTHER_PROMPT,
        )
    rows = padded.shape[0]
    if prompt_ids is not None:
        told = [prompt_array(prompt) for prompt in _each_served(prompt_ids, rows)]
        lengths = np.array([prompt.size for prompt in told], np.int64)
    else:
        lengths = integer_array(prompt_lengths, "prompt_lengths")
        lengths = np.repeat(lengths, _served(lengths.size, rows))
        told = None
    _check_padding(padded, lengths, pad)
    found = [row[row.size - length :] for row, length in zip(padded, lengths, strict=True)]
    for index, (ours, theirs) in enumerate(zip(told or found, found, strict=True)):
        if not np.array_equal(ours, theirs):
            raise ReplayError(
                "prompt_ids are not the prompt in sequences",
                expected=f"{str(theirs.tolist())[:60]}, before what was generated",
                got=f"{str(ours.tolist())[:60]}",
                consequence=_ANOTHER_PROMPT,
                sample=index,
            )
    return found


def _each_served(prompt_ids: Any, rows: int) -> list[Any]:
    """The prompt of each row, where one prompt may serve several."""
    listed = isinstance(prompt_ids, list | tuple) and len(prompt_ids) > 0
    if not listed or is_integer(prompt_ids[0]):
        return prompts_for(prompt_ids, rows)
    times = _served(len(prompt_ids), rows)
    return [prompt for prompt in prompts_for(prompt_ids, len(prompt_ids)) for _ in range(times)]


def _served(prompts: int, rows: int) -> int:
    if prompts == 0 or rows % prompts:
        raise ReplayError(
            "prompts and rows differ in number",
            expected=f"a prompt for each of {rows} rows, or for each {rows}/k of k rows in a row",
            got=f"{prompts}",
            consequence=_ANOTHER_PROMPT,
        )
    return rows // prompts


def _check_padding(padded: IntArray, lengths: IntArray, pad: Any) -> None:
    """Refuse prompts that do not fit, and anything but padding before them."""
    width = padded.shape[1]
    bad = (lengths < 1) | (lengths > width)
    if bad.any():
        raise ReplayError(
            "the prompt is not in sequences",
            expected=f"from 1 to {width} prompt tokens, all in sequences",
            got=f"{lengths[np.argmax(bad)]}",
            consequence=_ANOTHER_PROMPT,
            sample=int(np.argmax(bad)),
        )
    before = np.arange(width) < width - lengths[:, None]
    if pad is None and not before.any():
        return
    wrong = before & (True if pad is None else padded != check_count(pad, "pad_token_id"))
    if wrong.any():
        sample, column = np.argwhere(wrong)[0].tolist()
        raise ReplayError(
            "the prompt is longer than told, or padded with something else",
            expected="nothing" if pad is None else f"pad_token_id {pad} before the prompt",
            got=f"token {padded[sample, column]}",
            consequence=_ANOTHER_PROMPT,
            sample=sample,
        )


# Where responses end


def _eos_ids(value: Any) -> IntArray:
    if value is None:
        return np.zeros(0, np.int64)
    return integer_array([value] if is_integer(value) else value, "eos_token_id")


def _lengths(generated: IntArray, eos: IntArray, pad: Any, told: Any) -> IntArray:
    """int64 `[B]`: how many of each row's tokens were sampled. All others must be padding."""
    rows, steps = generated.shape
    ends = np.isin(generated, eos)
    by_eos = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1 if steps else 0, steps)
    lengths = by_eos if told is None else integer_array(told, "response_lengths")
    if lengths.size != rows:
        raise _bad_length(f"{rows} response_lengths", f"{lengths.size}")
    bad = (lengths < 0) | (lengths > by_eos)  # a row goes on after its EOS as padding only
    if bad.any():
        sample = int(np.argmax(bad))
        raise _bad_length(f"at most {by_eos[sample]} tokens", f"{lengths[sample]}", sample)
    after = np.arange(steps) >= lengths[:, None]
    # Where no EOS is configured, a row that has met its stop string goes on being sampled.
    wrong = after & (by_eos == lengths)[:, None]
    wrong &= True if pad is None else generated != check_count(pad, "pad_token_id")
    if wrong.any():
        sample, row = np.argwhere(wrong)[0].tolist()
        expected = "nothing, without pad_token_id" if pad is None else f"pad_token_id {pad}"
        raise _bad_length(f"{expected} after the end", f"{generated[sample, row]}", sample, row)
    if told is None and pad is not None and steps:
        unclear = (generated[:, -1] == pad) & (lengths == steps) & ~np.isin(pad, eos)
        if unclear.any():
            raise _bad_length(
                "eos_token_id before padding, or response_lengths",
                f"a row that ends in pad_token_id {pad} without any",
                int(np.argmax(unclear)),
                steps - 1,
            )
    return lengths


def _finish_reasons(
    generated: IntArray, lengths: IntArray, eos: IntArray, pad: Any
) -> list[str | None]:
    """Why each row ends where it does, None where nothing tells."""
    steps = generated.shape[1]
    column = np.arange(steps)
    by_eos = (np.isin(generated, eos) & (column == lengths[:, None] - 1)).any(axis=1)
    padded = np.zeros(lengths.size, np.bool_)
    if pad is not None:
        padded = (lengths < steps) & ((generated == pad) | (column < lengths[:, None])).all(axis=1)
    reasons = np.where(by_eos | padded, "stop", np.where(lengths == steps, "length", ""))
    return [reason or None for reason in reasons.tolist()]


def _bad_length(
    expected: str, got: str, sample: int | None = None, row: int | None = None
) -> ReplayError:
    return ReplayError(
        "the end of the response cannot be told",
        expected=expected,
        got=got,
        consequence=_NOT_SAMPLED,
        sample=sample,
        row=row,
    )


# Scores


@dataclass(frozen=True, slots=True)
class _Steps:
    """The sampled rows of all samples, one sample after another."""

    mask: RolloutSamplingMask
    log_probs: FloatArray


def _read_steps(scores: Sequence[Tensor], tokens: IntArray, active: Any, do_sample: bool) -> _Steps:
    """Supports and log-probs where `active` (bool `[n, B]`) says that a token was sampled."""
    masks, log_probs = [], [np.zeros(0, np.float32)]
    for step, (values, chosen) in enumerate(zip(scores, active, strict=True)):
        samples = np.flatnonzero(chosen)
        if not samples.size:
            break  # rows never start again
        try:
            captured = _read_step(values.detach(), tokens[step], samples, do_sample)
        except ReplayError as error:
            raise error.located(sample=error.row, row=step) from None
        masks.append(captured.mask)
        log_probs.append(captured.log_probs)
    mask = RolloutSamplingMask.concat(masks)
    order = np.argsort(np.nonzero(active)[1], kind="stable")  # from steps to samples
    return _Steps(_reordered(mask, order), np.concatenate(log_probs)[order])


def _read_step(
    scores: Tensor, tokens: IntArray, samples: IntArray, do_sample: bool
) -> SupportCapture:
    """One step of some of the rows; `scores` are `[B, V]`, `tokens` `[B]`."""
    sampled = torch.tensor(tokens, device=scores.device)
    greedy = None if do_sample else torch.ones_like(sampled, dtype=torch.bool)
    captured = capture_from_logits(
        scores, sampled, samples, greedy=greedy, max_support=scores.shape[1]
    )
    invalid = captured.statuses == CaptureStatus.INVALID
    if invalid.any():
        support_from_logits(scores, captured.rows[invalid])  # says which score is none
    captured.check()
    if not do_sample:
        _check_best(scores, sampled, samples)
    return captured


def _check_best(scores: Tensor, sampled: Tensor, samples: IntArray) -> None:
    rows = torch.tensor(samples, device=scores.device)
    best = scores.amax(dim=-1)[rows]
    own = scores[rows, sampled[rows]]
    beaten = (own < best).cpu().numpy()
    if beaten.any():
        row = int(np.argmax(beaten))
        raise ReplayError(
            "a greedy token without the highest score",
            expected=f"a score of {float(best[row])} with do_sample=False",
            got=f"{float(own[row])}",
            consequence="a sampled token would be replayed as one that was certain",
            row=int(samples[row]),
        )


def _reordered(mask: RolloutSamplingMask, order: IntArray) -> RolloutSamplingMask:
    """The rows in another order; equivalent to `select`, which has a slice for each run."""
    lengths = mask.lengths[order]
    offsets = offsets_of(lengths)
    where = np.repeat(mask.offsets[order] - offsets[:-1], lengths) + np.arange(offsets[-1])
    return RolloutSamplingMask(mask.ids[where], offsets)
