"""The two styles of vLLM stream, merged into the fields of one choice.

Over HTTP a chunk holds what is new. In process that is up to the request's `output_kind`:
`CUMULATIVE`, vLLM's default, repeats all tokens in every output, and `DELTA` does not.
"""

from __future__ import annotations

import array
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlreplay.engines._common import (
    SHIFTED,
    check_chunk_lengths,
    check_prefix,
    check_same_request,
    check_same_spans,
    check_spans,
    check_style,
    is_blank,
    items,
    mapping,
    rows_from,
    same_value,
    sequence,
    stream_error,
    weight_spans,
)
from rlreplay.engines._vllm_choice import (
    check_prompt,
    completion_fields,
    log_prob_entries,
    mask_parts,
    mask_rows,
    read_mask,
)
from rlreplay.errors import MissingMaskError
from rlreplay.sampling_mask import (
    IntArray,
    RolloutSamplingMask,
    check_count,
    integer_array,
    is_integer,
    offsets_of,
)


@dataclass(frozen=True, slots=True)
class _Part:
    """What one chunk says of a choice; None where it does not carry the field."""

    tokens: IntArray | None
    mask: Any
    log_probs: list[Any] | None
    finish_reason: Any
    weight_versions: Any

    @property
    def size(self) -> int:
        return 0 if self.tokens is None else self.tokens.size


def merge_chunks(
    chunks: Any, prompt_ids: Any, choice: int | None, cumulative: bool | None
) -> dict[str, Any]:
    """The chunks of one choice as the fields of the whole choice.

    `cumulative` is the style where the caller knows it, None where the chunks have to tell.
    """
    check_style(cumulative)
    listed = items(chunks, "the stream", "chunks")
    found = _of_choice(listed, prompt_ids, choice)
    if cumulative is None:
        over_http = all(isinstance(chunk, dict) for chunk in listed)
        cumulative = not over_http and _is_cumulative(found)
    parts: list[_Part] = []
    done = 0
    for fields in found:
        if parts and parts[-1].finish_reason is not None:
            raise stream_error("a chunk comes after the choice has finished", "none", "one")
        with rows_from(0 if cumulative else done):
            parts.append(_read_part(fields))
        done += parts[-1].size
    if all(part.tokens is None for part in parts):
        raise stream_error("the stream carries no token ids", "token_ids in its chunks", "none")
    whole = _last(parts) if cumulative else _joined(parts)
    sizes = [part.size for part in parts]
    ends = sizes if cumulative else list(itertools.accumulate(sizes))
    log_probs = [part.log_probs for part in parts]
    check_chunk_lengths("logprobs", log_probs, ends, sizes, "its token_ids")
    return {
        "token_ids": whole.tokens,
        "sampling_mask": whole.mask,
        "logprobs": whole.log_probs,
        "finish_reason": whole.finish_reason,
        "weight_versions": _last_versions(parts, ends),
    }


def _of_choice(chunks: list[Any], prompt_ids: Any, choice: int | None) -> list[dict[str, Any]]:
    """The fields of the wanted choice from each chunk that has it."""
    found: list[dict[str, Any]] = []
    request = checked = None
    for index, chunk in enumerate(chunks):
        declared, name, fields = _choices_of(chunk)
        if declared is not checked:  # in process every output holds the one list
            check_prompt(declared, prompt_ids)
        checked = declared
        check_same_request(index, request, name)
        request = request if name is None else name
        found += fields
    told = [fields.get("index") for fields in found]
    numbers = [0 if number is None else check_count(number, "index") for number in told]
    if choice is None and len(set(numbers)) > 1:
        names = f"choices {sorted(set(numbers))[:8]}"
        raise stream_error("the stream carries several choices", "one, or choice=", names)
    wanted = (numbers or [0])[0] if choice is None else check_count(choice, "choice")
    kept = [fields for fields, number in zip(found, numbers, strict=True) if number == wanted]
    if not kept:
        raise stream_error("the stream has no such choice", f"choice {wanted}", "none")
    return kept


def _choices_of(chunk: Any) -> tuple[Any, Any, list[dict[str, Any]]]:
    """The prompt ids and the request id that a chunk declares, and the fields of its choices."""
    if isinstance(chunk, dict):
        choices = sequence(chunk.get("choices"), "choices")
        fields = [mapping(each, "a choice") for each in choices]
        return chunk.get("prompt_token_ids"), chunk.get("id"), fields
    outputs = getattr(chunk, "outputs", None)
    completions = [chunk] if outputs is None else sequence(outputs, "outputs")
    fields = [completion_fields(each) for each in completions]
    return getattr(chunk, "prompt_token_ids", None), getattr(chunk, "request_id", None), fields


def _is_cumulative(found: list[dict[str, Any]]) -> bool:
    """The style of in-process outputs, where their tokens or weight versions prove it.

    An output that does not repeat the tokens before it proves deltas. Nothing in the tokens can
    prove the other style: deltas may happen to repeat what came before. What does prove it is
    `weight_versions`, which count the rows of the whole response in both styles.
    """
    tokens = [_listed(fields.get("token_ids")) for fields in found]
    repeats = all(same_value(new[: len(old)], old) for old, new in itertools.pairwise(tokens))
    joined, last = sum(map(len, tokens)), len(tokens[-1])
    if not repeats or joined == last:  # equal: only the last has tokens, which is both styles
        return False
    total = _rows_covered(found[-1].get("weight_versions"))
    if total not in (joined, last):
        raise stream_error(
            "the outputs may be cumulative or deltas",
            "cumulative=True (vLLM's default output_kind) or cumulative=False (DELTA)",
            f"outputs that each repeat the one before, of {last} tokens or {joined}",
        )
    return total == last


def _listed(tokens: Any) -> list[Any]:
    """The tokens for comparison only; they are checked when they are read."""
    if isinstance(tokens, np.ndarray | torch.Tensor | array.array):
        tokens = integer_array(tokens, "token_ids").tolist()
    return list(tokens) if isinstance(tokens, list | tuple) else []


def _rows_covered(weight_versions: Any) -> int | None:
    """Where the last span ends, None where that is not told."""
    spans = weight_versions if isinstance(weight_versions, list | tuple) else []
    end: Any = spans[-1].get("end") if spans and isinstance(spans[-1], dict) else None
    return int(end) if is_integer(end) else None


def _read_part(fields: dict[str, Any]) -> _Part:
    """One chunk; its mask is counted here, and read when it is known what of it is new."""
    tokens, mask = fields.get("token_ids"), fields.get("sampling_mask")
    part = _Part(
        tokens=None if tokens is None else integer_array(tokens, "token_ids"),
        mask=mask,
        log_probs=log_prob_entries(fields.get("logprobs")),
        finish_reason=fields.get("finish_reason"),
        weight_versions=fields.get("weight_versions"),
    )
    if mask is not None and _csr_of(part) is None:
        mask_rows(mask_parts(mask)[0], part.size)
    return part


def _csr_of(part: _Part) -> tuple[IntArray, IntArray] | None:
    """(ids, offsets) of a part whose mask has a CSR form; their ends and number are checked."""
    ids, offsets = mask_parts(part.mask)
    if offsets is None:
        return None
    flat, ends = integer_array(ids, "token_ids"), integer_array(offsets, "offsets")
    if ends.size != part.size + 1 or ends[0] != 0 or ends[-1] != flat.size:
        read_mask(part.mask, part.size)
    return flat, ends


def _last_versions(parts: list[_Part], ends: list[int]) -> Any:
    """The last `weight_versions`, with which those of earlier chunks must agree."""
    listed = []
    for index, (part, end) in enumerate(zip(parts, ends, strict=True)):
        if not is_blank(part.weight_versions):
            spans = weight_spans({"weight_versions": part.weight_versions}, end)
            check_spans(spans, f"weight_versions of chunk {index}", end)
            listed.append((index, spans, end))
    check_same_spans(listed)
    return parts[listed[-1][0]].weight_versions if listed else None


def _last(parts: list[_Part]) -> _Part:
    """The last of cumulative parts, each of which must repeat the one before."""
    for index, (before, after) in enumerate(itertools.pairwise(parts), start=1):
        _check_tokens_repeated(index, before.tokens, after.tokens)
        _check_mask_repeated(f"sampling_mask of chunk {index}", before, after)
        check_prefix(f"logprobs of chunk {index}", before.log_probs, after.log_probs)
    return parts[-1]


def _check_tokens_repeated(index: int, old: IntArray | None, new: IntArray | None) -> None:
    same = old is None or (new is not None and np.array_equal(new[: old.size], old))
    if not same:
        said, says = (None if each is None else each.tolist() for each in (old, new))
        check_prefix(f"token_ids of chunk {index}", said, says)


def _check_mask_repeated(name: str, before: _Part, after: _Part) -> None:
    """The supports of `before` must be the first of `after`, in any order within a row.

    Where they are repeated as they came, no chunk but the last has to be read.
    """
    if before.mask is None or after.mask is None:
        read = None if before.mask is None else read_mask(before.mask, before.size)
        check_prefix(name, read, after.mask)
    elif not _repeats(before, after):
        check_prefix(name, *(read_mask(part.mask, part.size) for part in (before, after)))


def _repeats(before: _Part, after: _Part) -> bool:
    """Does `after` start with the mask of `before`, in the same form, id by id?"""
    old, new = _csr_of(before), _csr_of(after)
    if old is None and new is None:
        said, says = (mask_parts(part.mask)[0] for part in (before, after))
        return same_value(list(says[: len(said)]), list(said))
    if old is None or new is None:
        return False
    return all(np.array_equal(says[: said.size], said) for said, says in zip(old, new, strict=True))


def _joined(parts: list[_Part]) -> _Part:
    return _Part(
        tokens=_concatenated([part.tokens for part in parts]),
        mask=_joined_mask(parts),
        log_probs=_joined_log_probs(parts),
        finish_reason=parts[-1].finish_reason,
        weight_versions=None,
    )


def _concatenated(columns: Sequence[IntArray | None]) -> IntArray | None:
    present = [column for column in columns if column is not None]
    return np.concatenate(present) if present else None


def _joined_log_probs(parts: list[_Part]) -> list[Any] | None:
    """The log-probs of all deltas; None where none has any."""
    present = [part.log_probs for part in parts if part.log_probs is not None]
    if not present:
        return None
    done = 0
    for index, part in enumerate(parts):
        if part.log_probs is None and part.size:
            problem = f"logprobs are missing from chunk {index}"
            raise stream_error(problem, "them in all deltas or in none", "none", row=done)
        done += part.size
    return list(itertools.chain.from_iterable(present))


def _joined_mask(parts: list[_Part]) -> Any:
    """The masks of all deltas, in the form that they have; None where none has one."""
    masked = [part for part in parts if part.mask is not None]
    if not masked:
        return None
    done = 0
    for part in parts:
        if part.mask is None and part.size:
            raise MissingMaskError(
                "some deltas carry a sampling mask and some do not",
                expected="the support of every token",
                got="none for this one",
                consequence=SHIFTED,
                row=done,
            )
        done += part.size
    pairs = [_csr_of(part) for part in masked]
    flat = [pair for pair in pairs if pair is not None]
    if not flat:
        return list(itertools.chain.from_iterable(mask_parts(part.mask)[0] for part in masked))
    if len(flat) == len(masked):
        lengths = np.concatenate([np.diff(ends) for _, ends in flat])
        return {
            "token_ids": np.concatenate([ids for ids, _ in flat]),
            "offsets": offsets_of(lengths),
        }
    masks, done = [], 0
    for part in masked:
        with rows_from(done):
            masks.append(read_mask(part.mask, part.size))
        done += part.size
    return RolloutSamplingMask.concat(masks)
