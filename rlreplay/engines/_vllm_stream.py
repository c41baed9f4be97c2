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
    check_prefix,
    check_same_request,
    check_style,
    items,
    mapping,
    rows_from,
    sequence,
    stream_error,
)
from rlreplay.engines._vllm_choice import (
    check_prompt,
    completion_fields,
    log_prob_entries,
    read_mask,
)
from rlreplay.errors import MissingMaskError
from rlreplay.sampling_mask import RolloutSamplingMask, check_count, integer_array, is_integer


@dataclass(frozen=True, slots=True)
class _Part:
    """What one chunk says of a choice; None where it does not carry the field."""

    tokens: list[int] | None
    mask: RolloutSamplingMask | None
    log_probs: list[Any] | None
    finish_reason: Any
    weight_versions: Any

    @property
    def size(self) -> int:
        return len(self.tokens or [])


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
    versions = [part.weight_versions for part in parts if part.weight_versions is not None]
    return {
        "token_ids": whole.tokens,
        "sampling_mask": whole.mask,
        "logprobs": whole.log_probs,
        "finish_reason": whole.finish_reason,
        "weight_versions": versions[-1] if versions else None,
    }


def _of_choice(chunks: list[Any], prompt_ids: Any, choice: int | None) -> list[dict[str, Any]]:
    """The fields of the wanted choice from each chunk that has it."""
    found: list[dict[str, Any]] = []
    request = None
    for index, chunk in enumerate(chunks):
        declared, name, fields = _choices_of(chunk)
        check_prompt(declared, prompt_ids)
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
    repeats = all(new[: len(old)] == old for old, new in itertools.pairwise(tokens))
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
    tokens, mask = fields.get("token_ids"), fields.get("sampling_mask")
    if tokens is not None:
        tokens = integer_array(tokens, "token_ids").tolist()
    return _Part(
        tokens=tokens,
        mask=None if mask is None else read_mask(mask, len(tokens or [])),
        log_probs=log_prob_entries(fields.get("logprobs")),
        finish_reason=fields.get("finish_reason"),
        weight_versions=fields.get("weight_versions"),
    )


def _last(parts: list[_Part]) -> _Part:
    """The last of cumulative parts, each of which must repeat the one before."""
    for index, (before, after) in enumerate(itertools.pairwise(parts), start=1):
        for name, old, new in (
            ("token_ids", before.tokens, after.tokens),
            ("sampling_mask", before.mask, after.mask),
            ("logprobs", before.log_probs, after.log_probs),
        ):
            check_prefix(f"{name} of chunk {index}", old, new)
    return parts[-1]


def _joined(parts: list[_Part]) -> _Part:
    return _Part(
        tokens=_chained([part.tokens for part in parts]),
        mask=_joined_mask(parts),
        log_probs=_chained([part.log_probs for part in parts]),
        finish_reason=parts[-1].finish_reason,
        weight_versions=None,
    )


def _chained(columns: Sequence[list[Any] | None]) -> list[Any] | None:
    present = [column for column in columns if column is not None]
    return list(itertools.chain.from_iterable(present)) if present else None


def _joined_mask(parts: list[_Part]) -> RolloutSamplingMask | None:
    present = [part.mask for part in parts if part.mask is not None]
    if not present:
        return None
    done = 0
    for part in parts:
        if part.mask is None and part.tokens:
            raise MissingMaskError(
                "some deltas carry a sampling mask and some do not",
                expected="the support of every token",
                got="none for this one",
                consequence=SHIFTED,
                row=done,
            )
        done += part.size
    return RolloutSamplingMask.concat(present)
