"""Files as a stream of records: JSONL of engine payloads, Arrow and Parquet.

One line (of `MAX_LINE_BYTES` at most), or one group of a columnar file, is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from rlreplay.cli._payloads import records_of
from rlreplay.cli._records import (
    Place,
    Problem,
    ReadOptions,
    Record,
    Response,
    kind_of,
    missing,
    refused,
)
from rlreplay.errors import ReplayError
from rlreplay.rollout import Rollout, prompt_array, token_array
from rlreplay.sampling_mask import check_ids_below

Advance = Callable[[int], None]

# A response of 32,000 tokens with 250 ids each is below it. What a line is parsed to may take some
# 30 times its size (`[{"":0},{"":0},…]`).
MAX_LINE_BYTES = 1 << 26
COLUMNAR = (".arrow", ".parquet")
_MAGIC = (b"PAR1", b"ARROW1")


def read_records(path: Path, options: ReadOptions, advance: Advance) -> Iterator[Record]:
    """The records of one file; `advance` is told how many bytes are done.

    Errors of the file itself are records too, and so is that it holds none. Columnar files need
    pyarrow: `ImportError` without.
    """
    empty = True
    try:
        read = _columnar_records if is_columnar(path) else _line_records
        for record in read(path, options, advance):
            empty = False
            yield record
    except OSError as error:
        problem = missing("the file cannot be read", "a readable file", str(error))
        yield Problem(Place(str(path)), "unreadable", problem)
        return
    if empty:
        problem = missing("the file holds no response", "at least one", "none")
        yield Problem(Place(str(path)), "empty", problem)


def is_columnar(path: Path) -> bool:
    """Arrow or Parquet, told by the name or the first bytes.

    A pipe, which can be read but once, is not touched: it is taken for lines.
    """
    if path.suffix in COLUMNAR:
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(8).startswith(_MAGIC)


def _columnar_records(path: Path, options: ReadOptions, advance: Advance) -> Iterator[Record]:
    """The rollouts of a file, up to the first that is damaged: nothing behind it can be trusted."""
    from rlreplay.storage import iter_rollouts, read_info

    if not path.is_file():
        raise OSError("Arrow and Parquet are read in places, which a pipe has not")
    place, size, told = Place(str(path)), path.stat().st_size, 0
    try:
        info = read_info(path)
        for index, rollout in enumerate(iter_rollouts(path)):
            yield _stored(place.at(index), rollout, options.vocab_size)
            if (index + 1) % info.rollouts_per_group == 0:
                done = size * (index + 1) // info.num_rollouts
                advance(done - told)
                told = done
    except ReplayError as error:
        if error.sample is None:
            yield refused(place, error, "unreadable")
        else:
            yield refused(place.at(error.sample), error, kind_of(error))
    advance(size - told)


def _stored(place: Place, rollout: Rollout, vocab_size: int | None) -> Record:
    if vocab_size is None:
        return Response(place, rollout)
    try:
        prompt_array(rollout.prompt_ids, vocab_size)
        token_array(rollout.response_ids, "the response", vocab_size)
        check_ids_below(rollout.sampling_mask, vocab_size)
    except ReplayError as error:
        return refused(place, error)
    return Response(place, rollout)


def _line_records(path: Path, options: ReadOptions, advance: Advance) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, (raw, size) in enumerate(_raw_lines(file), start=1):
            place = Place(str(path), number)
            if raw is None:
                most = f"at most {MAX_LINE_BYTES:,} bytes"
                problem = missing("the line is too long to be read", most, f"{size:,} bytes")
                yield Problem(place, "broken_json", problem)
            else:
                yield from records_of(raw, place, options)
            advance(size)


def _raw_lines(file: BinaryIO) -> Iterator[tuple[bytes | None, int]]:
    """(line, bytes read) of each line; None for one that is longer than `MAX_LINE_BYTES`."""
    while raw := file.readline(MAX_LINE_BYTES + 1):
        size, fits = len(raw), len(raw) <= MAX_LINE_BYTES
        while not fits and raw and not raw.endswith(b"\n"):
            raw = file.readline(MAX_LINE_BYTES)
            size += len(raw)
        yield raw if fits else None, size
