"""The two styles of SGLang stream, merged into the payload of one response."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlreplay.engines._common import (
    Span,
    check_agrees,
    check_chunk_lengths,
    check_prefix,
    check_same_request,
    check_same_spans,
    check_spans,
    check_style,
    is_blank,
    items,
    mapping,
    optional_count,
    reason_of,
    same_value,
    sequence,
    stream_error,
    weight_spans,
)

MASK = "output_token_sampling_mask"
LOG_PROBS = "output_token_sampling_logprobs"
LENGTH = "output_token_sampling_mask_length"


def holds_uncommitted(ids: Sequence[Any], rows: Any, reason: str | None) -> bool:
    """Does an aborted response end with a token that has no row?"""
    return reason == "abort" and isinstance(rows, list | tuple) and len(ids) == len(rows) + 1


def merge_chunks(chunks: Iterable[Any], cumulative: bool | None) -> dict[str, Any]:
    """The chunks of one stream as the payload of one response.

    `cumulative` is the style where the caller knows it, None where the chunks have to tell.
    """
    check_style(cumulative)
    parts = _read_chunks(chunks)
    return (_merge_cumulative if _is_cumulative(parts, cumulative) else _merge_incremental)(parts)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One chunk of a stream: its lists, and the number of rows that the server counts so far."""

    meta: dict[str, Any]
    ids: list[Any]
    rows: list[Any] | None
    log_probs: list[Any] | None
    total: int | None

    @property
    def size(self) -> int:
        return len(self.ids) if self.rows is None else len(self.rows)


def _read_chunks(chunks: Iterable[Any]) -> list[_Chunk]:
    listed = items(chunks, "the stream", "chunks")
    parts = [_read_chunk(chunk, index) for index, chunk in enumerate(listed)]
    if not parts:
        raise stream_error("the stream is empty", "at least one chunk", "none")
    for index, before in enumerate(parts[:-1], start=1):
        if before.meta.get("finish_reason") is not None:
            problem = f"chunk {index} comes after the response has finished"
            raise stream_error(problem, "no further chunk", "one")
    request = None
    for index, part in enumerate(parts):
        name = part.meta.get("id")
        check_same_request(index, request, name)
        request = request if name is None else name
    return parts


def _read_chunk(chunk: Any, index: int) -> _Chunk:
    body = mapping(chunk, f"chunk {index}")
    meta = mapping(body.get("meta_info"), f"meta_info of chunk {index}")
    ids = list(sequence(body.get("output_ids"), f"output_ids of chunk {index}"))
    rows, values = meta.get(MASK), meta.get(LOG_PROBS)
    if rows is not None:
        rows = list(sequence(rows, f"{MASK} of chunk {index}"))
        if not holds_uncommitted(ids, rows, reason_of(meta)):
            check_agrees(f"{MASK} of chunk {index}", len(rows), len(ids), "its output_ids")
    if values is not None:
        values = list(sequence(values, f"{LOG_PROBS} of chunk {index}"))
    total = optional_count(meta, LENGTH)
    if total is None:
        total = optional_count(meta, "completion_tokens")
    return _Chunk(meta, ids, rows, values, total)


def _is_cumulative(parts: list[_Chunk], told: bool | None) -> bool:
    """The style that fits every total. Where both do, they give the same response."""
    if told is None and len(parts) > 1 and any(part.total is None for part in parts):
        raise stream_error(
            "a chunk carries no total, so that the stream's style is unknown",
            f"{LENGTH} in every chunk, or cumulative=True or False from the caller",
            "neither",
        )
    so_far = 0
    breaks: dict[bool, int | None] = {True: None, False: None}
    starts = []
    for index, part in enumerate(parts):
        starts.append(so_far)
        sizes = {True: part.size, False: so_far + part.size}
        for style in (True, False):
            if breaks[style] is None and part.total not in (None, sizes[style]):
                breaks[style] = index
        so_far = so_far + part.size if part.total is None else part.total
    fitting = [style for style in (True, False) if breaks[style] is None]
    if told is not None:
        fitting = [style for style in fitting if style == told]
    if fitting:
        return fitting[0] if told is None else told
    candidates = [breaks[told]] if told is not None else list(breaks.values())
    index = max(at for at in candidates if at is not None)
    raise stream_error(
        f"chunk {index} fits neither what came before it nor the total it declares",
        f"{parts[index].size} rows to be all there is, or to follow on {starts[index]}",
        f"a total of {parts[index].total}",
        row=starts[index],
    )


def _merge_cumulative(parts: list[_Chunk]) -> dict[str, Any]:
    for index, (before, after) in enumerate(itertools.pairwise(parts), start=1):
        for name, old, new in (
            ("output_ids", before.ids, after.ids),
            (MASK, before.rows, after.rows),
            (LOG_PROBS, before.log_probs, after.log_probs),
        ):
            check_prefix(f"{name} of chunk {index}", old, new)
    return _merged(parts, parts[-1], [part.size for part in parts])


def _merge_incremental(parts: list[_Chunk]) -> dict[str, Any]:
    whole = _Chunk(
        meta=parts[-1].meta,
        ids=list(itertools.chain.from_iterable(part.ids for part in parts)),
        rows=_join([(part.rows, part.ids) for part in parts], MASK),
        log_probs=_join([(part.log_probs, part.ids) for part in parts], LOG_PROBS),
        total=None,
    )
    return _merged(parts, whole, list(itertools.accumulate(part.size for part in parts)))


def _join(columns: list[tuple[list[Any] | None, list[Any]]], name: str) -> list[Any] | None:
    """The chunks' lists, one after another; None where no chunk has one."""
    present = [column for column, _ in columns if column is not None]
    if not present:
        return None
    done = 0
    for index, (column, ids) in enumerate(columns):
        if column is None and ids:
            raise stream_error(f"{name} is missing from chunk {index}", "it in all", "none", done)
        done += len(ids)
    return list(itertools.chain.from_iterable(present))


def _merged(parts: list[_Chunk], whole: _Chunk, ends: list[int]) -> dict[str, Any]:
    """The stream as the payload of one response; `ends` are the rows up to each chunk's end."""
    sizes = [part.size for part in parts]
    check_chunk_lengths(LOG_PROBS, [part.log_probs for part in parts], ends, sizes, "its rows")
    meta = {**whole.meta, MASK: whole.rows, LOG_PROBS: whole.log_probs}
    spans = _spans_of_chunks(parts, ends)
    if spans is not None:
        names = ("version", "start", "end")
        meta["weight_versions"] = [dict(zip(names, span, strict=True)) for span in spans]
        meta.pop("weight_version", None)  # the last chunk may name a version and add no row
    return {"output_ids": whole.ids, "meta_info": meta}


def _spans_of_chunks(parts: list[_Chunk], ends: list[int]) -> list[Span] | None:
    """The last `weight_versions`, and by `weight_version` what came after them.

    None where the last chunk has the whole list, or no chunk says anything.
    """
    listed = _listed_spans(parts, ends)
    last, spans, start = listed[-1] if listed else (-1, [], 0)
    after = slice(last + 1, None)
    versions = [part.meta.get("weight_version") for part in parts[after]]
    if listed:
        done = last == len(parts) - 1
    else:
        own = parts[-1].meta.get("weight_versions")
        done = own is not None or all(version is None for version in versions)
    if done:
        return None
    for version, end in zip(versions, ends[after], strict=True):
        if spans and same_value(spans[-1][0], version):
            spans[-1] = (*spans[-1][:2], end)
        elif end > start or end == ends[-1] == 0:
            spans.append((version, start, end))
        start = end
    return spans


def _listed_spans(parts: list[_Chunk], ends: list[int]) -> list[tuple[int, list[Span], int]]:
    """(chunk, spans, rows so far) of the chunks with `weight_versions`, which must agree."""
    listed = []
    for index, (part, end) in enumerate(zip(parts, ends, strict=True)):
        if is_blank(part.meta.get("weight_versions")):
            continue
        spans = weight_spans(part.meta, end)
        uncommitted = len(part.ids) - part.size  # a server may or may not count that token
        check_spans(spans, f"weight_versions of chunk {index}", end, end + uncommitted)
        if end or not ends[-1]:  # the version of no row says nothing of the rows to come
            listed.append((index, spans, end))
    check_same_spans(listed)
    return listed
