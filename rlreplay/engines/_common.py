"""What all engine loaders share: reading fields that may hold anything, assembling a `Rollout`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

import numpy as np
import torch

from rlreplay.errors import MissingMaskError, ReplayError
from rlreplay.rollout import Rollout, cut_spans, prompt_array, token_array, united_spans
from rlreplay.sampling_mask import (
    FloatArray,
    IntArrayLike,
    RolloutSamplingMask,
    check_count,
    is_integer,
    is_iterable,
    shown,
)

OnMissingMask = Literal["raise", "unrestricted"]
_Rows = list[Any] | RolloutSamplingMask | None
Span = tuple[Any, Any, Any]
PromptIds = IntArrayLike | Sequence[IntArrayLike]

WRONG_LAYOUT = "the payload would be read as something that it is not"
SHIFTED = "later tokens would be scored on another token's support"
_CHARGED = "tokens would be charged to weights that did not sample them"
_SEQUENCES = (list, tuple, np.ndarray, torch.Tensor)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the caller of a loader decides for all its samples.

    Args:
        vocab_size: where given, every prompt, response and support id must be below it.
        on_missing_mask: "raise" refuses a response that came without a sampling mask;
            "unrestricted" takes all its rows as drawn from the full vocabulary. Either way a null
            row inside a mask is refused: that mask says that something was cut off, not what.
    """

    vocab_size: int | None
    on_missing_mask: OnMissingMask

    def __post_init__(self) -> None:
        if self.vocab_size is not None:
            check_count(self.vocab_size, "vocab_size")
        check_option("on_missing_mask", self.on_missing_mask, get_args(OnMissingMask))

    def missing_mask(self, what: str, row: int | None = None) -> None:
        """Raise `MissingMaskError`, unless the caller takes such a response for unrestricted."""
        if self.on_missing_mask == "raise":
            raise MissingMaskError(
                f"no sampling mask was returned for this {what}",
                expected="the support of every response token "
                '(on_missing_mask="unrestricted" if nothing was cut off when sampling)',
                got="none",
                consequence="the policy would be scored over the full vocabulary, "
                "which is not what the tokens were sampled from",
                row=row,
            )


@contextmanager
def in_sample(index: int) -> Iterator[None]:
    """Name sample `index` in every `ReplayError` that leaves the block."""
    try:
        yield
    except ReplayError as error:
        raise error.located(sample=index).with_traceback(error.__traceback__) from None


@contextmanager
def rows_from(first: int) -> Iterator[None]:
    """Count the row of every `ReplayError` that leaves the block from row `first` on."""
    try:
        yield
    except ReplayError as error:
        if error.row is None:
            raise
        raise error.located(row=error.row + first).with_traceback(error.__traceback__) from None


def check_option(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Refuse an option that is not one of `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise ReplayError(
            f"unknown {name}",
            expected=" or ".join(map(repr, allowed)),
            got=shown(value),
            consequence="the payload would be read in a way nobody asked for",
        )


def same_value(a: Any, b: Any) -> bool:
    """`a == b` for payload values; False where they do not compare (arrays, deep nesting)."""
    try:
        return bool(a == b)
    except Exception:  # whatever the values' own comparison raises
        return False


def is_blank(value: Any) -> bool:
    """Is the field null or an empty list?"""
    return value is None or (isinstance(value, list | tuple) and not value)


def wrong_type(name: str, expected: str, value: Any) -> NoReturn:
    """Raise the error for a field of the wrong type."""
    raise ReplayError(
        f"{name} has the wrong type",
        expected=expected,
        got=shown(value),
        consequence=WRONG_LAYOUT,
    )


def mapping(value: Any, name: str) -> dict[str, Any]:
    """`value`, which must be a dict."""
    if not isinstance(value, dict):
        wrong_type(name, "an object (dict)", value)
    return value


def sequence(value: Any, name: str) -> list[Any] | tuple[Any, ...]:
    """`value`, which must be a list or tuple."""
    if not isinstance(value, list | tuple):
        wrong_type(name, "a list", value)
    return value


def items(values: Any, name: str, what: str) -> list[Any]:
    """The items of any iterable of objects: not of text, a dict, an array or a range."""
    if not is_iterable(values):
        wrong_type(name, f"an iterable of {what}", values)
    return list(values)


def optional_count(fields: dict[str, Any], name: str) -> int | None:
    """The field as a non-negative int, None where it is absent or null."""
    value = fields.get(name)
    return None if value is None else check_count(value, name)


def check_agrees(name: str, declared: int | None, actual: int, what: str) -> None:
    """Refuse a declared count that is not the actual one; the first disputed row is named."""
    if declared is not None and declared != actual:
        raise ReplayError(
            f"{name} does not agree with {what}",
            expected=f"{actual}",
            got=f"{declared}",
            consequence=SHIFTED,
            row=min(declared, actual),
        )


def check_chunk_lengths(
    name: str,
    columns: Iterable[Sequence[Any] | None],
    ends: Sequence[int],
    sizes: Sequence[int],
    what: str,
) -> None:
    """Refuse chunks of a stream that do not hold a value for each of their own rows.

    Args:
        columns: what each chunk holds, None where it does not carry the field.
        ends: rows up to each chunk's end.
        sizes: rows that each chunk holds.
    """
    for index, (column, end, size) in enumerate(zip(columns, ends, sizes, strict=True)):
        if column is not None:
            with rows_from(end - size):
                check_agrees(f"{name} of chunk {index}", len(column), size, what)


def check_prompt_length(name: str, declared: int | None, prompt_ids: Any) -> None:
    """Refuse a declared prompt length that is not the length of `prompt_ids`."""
    actual = prompt_array(prompt_ids).size
    if declared is not None and declared != actual:
        raise ReplayError(
            f"{name} does not agree with prompt_ids",
            expected=f"{actual} prompt tokens, as given by the caller",
            got=f"{declared}",
            consequence="the response would be scored after another prompt",
        )


def stream_error(problem: str, expected: str, got: str, row: int | None = None) -> ReplayError:
    """The error for chunks that are no stream of one response."""
    return ReplayError(problem, expected=expected, got=got, consequence=SHIFTED, row=row)


def check_style(cumulative: Any) -> None:
    """Refuse a `cumulative` that is not True, False or None."""
    if cumulative is not None and not isinstance(cumulative, bool):
        wrong_type("cumulative", "True, False or None", cumulative)


def check_same_request(index: int, first: Any, second: Any) -> None:
    """Refuse chunk `index` if it carries another request's id than the chunk before it."""
    if first is not None and second is not None and not same_value(first, second):
        raise stream_error(f"chunk {index} belongs to another request", shown(first), shown(second))


def check_prefix(name: str, old: _Rows, new: _Rows) -> None:
    """What a cumulative chunk repeats must be what the chunk before it said."""
    if old is None:
        return
    if new is None or len(new) < len(old):
        got = 0 if new is None else len(new)
        raise stream_error(f"{name} shrinks", f"at least {len(old)}", f"{got}", row=got)
    kept = new[: len(old)]
    if same_value(kept, old):
        return
    if isinstance(old, RolloutSamplingMask) and isinstance(kept, RolloutSamplingMask):
        old, kept = old.to_mask_list(), kept.to_mask_list()  # arrays do not compare to one bool
    pairs = enumerate(zip(old, kept, strict=True))
    row, (said, says) = next(
        ((r, pair) for r, pair in pairs if not same_value(*pair)), (0, (old, new))
    )
    problem = f"{name} changes what an earlier chunk said"
    raise stream_error(problem, shown(said), shown(says), row=row)


def reason_of(meta: dict[str, Any]) -> str | None:
    """The type of `finish_reason`, None while the response goes on."""
    reason = meta.get("finish_reason")
    if isinstance(reason, dict):
        reason = reason.get("type")
        if reason is None:
            wrong_type("finish_reason", "an object with a type", meta["finish_reason"])
    if reason is not None and not isinstance(reason, str):
        wrong_type("finish_reason", "null, a string, or an object with a type", reason)
    return reason


def prompts_for(prompt_ids: Any, count: int) -> list[Any]:
    """One prompt for each of `count` responses; a single prompt serves them all."""
    batch = isinstance(prompt_ids, list | tuple) and len(prompt_ids) > 0
    batch = batch and all(isinstance(p, _SEQUENCES) for p in prompt_ids)
    if not batch:
        return [prompt_ids] * count
    if len(prompt_ids) != count:
        raise ReplayError(
            "prompts and responses differ in number",
            expected=f"{count} prompts, one for each response (or a single flat list of ids)",
            got=f"{len(prompt_ids)}",
            consequence="responses would be scored after another response's prompt",
        )
    return list(prompt_ids)


def weight_spans(fields: dict[str, Any], n: int, *, clip: bool = False) -> list[Span]:
    """(version, start, end) of `weight_versions`, or one span of `weight_version`, or nothing.

    `clip` cuts spans of `n` or `n + 1` rows at row `n` (a response whose last token was dropped on
    request).
    """
    newest, listed = fields.get("weight_version"), fields.get("weight_versions")
    if listed is None:
        return [] if newest is None else [(newest, 0, n)]
    entries = [mapping(entry, "a weight-version span") for entry in sequence(listed, "spans")]
    spans: list[Span] = [(e.get("version"), e.get("start"), e.get("end")) for e in entries]
    if spans and newest is not None and not same_value(spans[-1][0], newest):
        raise ReplayError(
            "weight_version is not the newest of weight_versions",
            expected=shown(spans[-1][0]),
            got=shown(newest),
            consequence=_CHARGED,
        )
    if clip and spans:
        check_spans(spans, "weight_versions", n, n + 1)
        spans = cut_spans(spans, n)
    return spans


def check_spans(spans: Sequence[Span], name: str, *ends: int) -> None:
    """Refuse spans that do not cover `[0, end)`, one after another, for one of `ends`."""
    whole = f"spans that end at {' or '.join(map(str, dict.fromkeys(ends)))}"
    done = 0
    for span in spans:
        version, start, end = span
        typed = isinstance(version, str) and is_integer(start) and is_integer(end)
        empty = len(spans) == 1 and 0 in ends and typed and end == 0
        if not typed or start != done or (end <= start and not empty):
            expected = f"(version, start, end) with start {done}, and end above it"
            raise _bad_spans(name, expected, shown(span), min(done, *ends))
        if end > max(ends):
            raise _bad_spans(name, whole, shown(span), min(ends))
        done = int(end)
    if done not in ends:
        raise _bad_spans(name, whole, f"the last one ends at {done}", done)


def check_same_spans(listed: Sequence[tuple[int, Sequence[Span], int]]) -> None:
    """Refuse chunks that charge the same rows to different weights.

    `listed` holds (chunk, spans, rows so far), the spans as `check_spans` lets them pass.
    """
    for (_, before, rows), (index, after, _) in itertools.pairwise(listed):
        old, new = united_spans(cut_spans(before, rows)), united_spans(cut_spans(after, rows))
        for said, says in zip(old, new, strict=False) if rows else ():
            if said != says:
                row = said[1] if said[0] != says[0] else min(said[2], says[2])
                problem = f"weight_versions of chunk {index} changes what an earlier chunk said"
                raise ReplayError(
                    problem, expected=shown(said), got=shown(says), consequence=_CHARGED, row=row
                )


def _bad_spans(name: str, expected: str, got: str, row: int) -> ReplayError:
    return ReplayError(
        f"the spans of {name} do not cover its rows",
        expected=expected,
        got=got,
        consequence=_CHARGED,
        row=row,
    )


def assemble(
    options: LoadOptions,
    *,
    prompt_ids: Any,
    response_ids: Any,
    mask: RolloutSamplingMask | None,
    rollout_log_probs: Any = None,
    support_log_probs: FloatArray | None = None,
    loss_mask: Any = None,
    spans: Sequence[Span] = (),
    finish_reason: Any = None,
) -> Rollout:
    """The `Rollout` of these fields; `mask=None` makes every row unrestricted.

    Without a mask nobody knows what the engine's log-probs are normalised over, so that the
    rollout then has none.
    """
    response = token_array(response_ids, "the response", options.vocab_size)
    return Rollout(
        prompt_ids=prompt_array(prompt_ids, options.vocab_size),
        response_ids=response,
        sampling_mask=RolloutSamplingMask.full(response.size) if mask is None else mask,
        rollout_log_probs=None if mask is None else rollout_log_probs,
        support_log_probs=None if mask is None else support_log_probs,
        loss_mask=loss_mask,
        weight_versions=spans,
        finish_reason=finish_reason,
    )
