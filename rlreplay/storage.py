"""Arrow (`.arrow`) and Parquet (`.parquet`) files of rollouts. Needs `pip install rlreplay[io]`.

One row a rollout, in groups (Arrow record batches, Parquet row groups), and one column a field:

| column | type |
|---|---|
| `index`, `is_last` | int64, counting from 0 over the file; bool, true for the last rollout alone |
| `prompt_ids`, `response_ids` | list of int32 |
| `sampling_mask` | list of rows, each a list of int32 ids, ascending; null where unrestricted |
| `sampling_mask_deltas` | in its place where coded: the first id of a row, and then differences |
| `rollout_log_probs`, `support_log_probs` | list of float32, or null |
| `loss_mask` | list of bool |
| `weight_versions` | list of (version, start, end) |
| `finish_reason` | string, or null |
| `crc32` | a uint32 for each field of `Rollout`, over its place in the file and its content |

Checksums are over the arrays of `Rollout` in little-endian order, whatever the machine. The
schema's metadata hold `rlreplay.schema_version` and `rlreplay.rollouts_per_group`. Lists have
64-bit offsets. A file is written under another name and moved into place once it is whole, so that
readers of a file that is being replaced keep the old one. Files must not be changed in place while
they are read: see `memory_map` of `read_rollouts`.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from rlreplay.errors import ReplayError
from rlreplay.rollout import Rollout, WeightVersionSpan
from rlreplay.sampling_mask import (
    BoolArray,
    IdArray,
    IntArray,
    IntArrayLike,
    RolloutSamplingMask,
    check_count,
    check_flag,
    frozen,
    integer_array,
    is_iterable,
    offsets_of,
    row_at,
    shown,
)

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise ImportError(
        "rlreplay.storage reads and writes with pyarrow: pip install 'rlreplay[io]'"
    ) from error

PathLike = str | os.PathLike[str]
Compression = Literal["zstd", "lz4"]

SCHEMA_VERSION = 1
FIELDS = (
    "prompt_ids",
    "response_ids",
    "sampling_mask",
    "rollout_log_probs",
    "support_log_probs",
    "loss_mask",
    "weight_versions",
    "finish_reason",
)

_VERSION_KEY, _GROUP_KEY = b"rlreplay.schema_version", b"rlreplay.rollouts_per_group"
_MOST_IN_GROUP = 1 << 16  # a file that declares more in one group is not read at all
_DELTAS = "sampling_mask_deltas"
_LOST = "rollouts would be lost, or scored on other supports than they were sampled from"


def _list_of(element: Any, *, nullable: bool = False) -> Any:
    return pa.large_list(pa.field("element", element, nullable=nullable))


_IDS, _FLOATS = _list_of(pa.int32()), _list_of(pa.float32())
_SPAN = pa.struct(
    [
        pa.field("version", pa.string(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("end", pa.int64(), nullable=False),
    ]
)
_TYPES = {
    "index": pa.int64(),
    "is_last": pa.bool_(),
    "prompt_ids": _IDS,
    "response_ids": _IDS,
    "sampling_mask": _list_of(_IDS, nullable=True),
    "rollout_log_probs": _FLOATS,
    "support_log_probs": _FLOATS,
    "loss_mask": _list_of(pa.bool_()),
    "weight_versions": _list_of(_SPAN),
    "finish_reason": pa.string(),
    "crc32": pa.struct([pa.field(name, pa.uint32(), nullable=False) for name in FIELDS]),
}
_OPTIONAL = ("rollout_log_probs", "support_log_probs", "finish_reason")


def _schema(delta: bool) -> Any:
    names = {"sampling_mask": _DELTAS} if delta else {}
    return pa.schema(
        [
            pa.field(names.get(name, name), kind, nullable=name in _OPTIONAL)
            for name, kind in _TYPES.items()
        ]
    )


@dataclass(frozen=True, slots=True)
class StorageInfo:
    """What a file says of itself.

    Attributes:
        schema_version: of the format, `SCHEMA_VERSION` when it was written.
        num_rollouts: in all groups together.
        num_row_groups: at least one, which is empty where there is no rollout.
        rollouts_per_group: in every group but the last, which may hold fewer.
        delta: whether the support ids are delta-coded.
    """

    schema_version: int
    num_rollouts: int
    num_row_groups: int
    rollouts_per_group: int
    delta: bool


# Masks


def mask_to_arrow(mask: RolloutSamplingMask) -> Any:
    """The mask as a `pyarrow.LargeListArray` of int32 over the same buffers.

    Row t is a list of ids, null where it is unrestricted.

    Raises:
        ReplayError: `mask` is no `RolloutSamplingMask`.
    """
    if not isinstance(mask, RolloutSamplingMask):
        raise ReplayError(
            "not a sampling mask",
            expected="a RolloutSamplingMask",
            got=shown(mask),
            consequence=_LOST,
        )
    return _rows_array(mask.ids, mask.offsets, mask.unrestricted)


def mask_from_arrow(rows: Any) -> RolloutSamplingMask:
    """The inverse of `mask_to_arrow`; ids stay in Arrow's buffer, and so do 64-bit offsets from 0.

    Args:
        rows: a `pyarrow.ListArray` or `LargeListArray` of int32, ids ascending in a row, null for
            unrestricted rows. Nobody may write to its buffers.

    Raises:
        ReplayError: another type, offsets that do not fit, a row without ids that is not null, a
            null that has ids, ids that are negative or do not ascend.
    """
    listed = isinstance(rows, pa.ListArray | pa.LargeListArray)
    if not (listed and rows.type.value_type == pa.int32()):
        raise ReplayError(
            "not a column of supports",
            expected="a pyarrow list array of int32",
            got=shown(rows.type) if isinstance(rows, pa.Array) else type(rows).__name__,
            consequence=_LOST,
        )
    with _arrow_errors("the column of supports"):
        rows.validate(full=True)
    return _mask_of(rows, delta=False)


def _rows_array(ids: IdArray, offsets: IntArray, unrestricted: BoolArray) -> Any:
    nulls = pa.array(unrestricted) if unrestricted.any() else None
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(ids), type=_IDS, mask=nulls)


def _mask_of(rows: Any, *, delta: bool) -> RolloutSamplingMask:
    """The mask of a validated list array, without a copy of plain ids."""
    offsets, values = _offsets_and_values(rows)
    if values.null_count:
        raise _not_sound("the column of supports", "ids", f"{values.null_count} nulls")
    unrestricted = rows.is_null().to_numpy(zero_copy_only=False)
    odd = unrestricted != (offsets[1:] == offsets[:-1])
    if odd.any():
        row = int(np.argmax(odd))
        got = "null with ids" if unrestricted[row] else "no ids, and not null"
        raise _not_sound("a support", "ids, or null (unrestricted)", got, row=row)
    ids = values.to_numpy()
    if delta:
        ids = _from_deltas(ids, offsets)
    _check_ascending(ids, offsets)
    return RolloutSamplingMask.of_checked(ids, offsets)  # checked, and Arrow's buffers don't change


def _offsets_and_values(column: Any) -> tuple[IntArray, Any]:
    """Offsets from 0, int64 `[m + 1]`, and the values that they point into."""
    if len(column) == 0:  # Arrow lets an empty list array go without offsets
        return np.zeros(1, np.int64), column.values.slice(0, 0)
    offsets = column.offsets.to_numpy().astype(np.int64, copy=False)
    first, last = int(offsets[0]), int(offsets[-1])
    return offsets - first if first else offsets, column.values.slice(first, last - first)


def _to_deltas(ids: IdArray, offsets: IntArray) -> IdArray:
    deltas = np.diff(ids, prepend=np.int32(0))
    starts = offsets[:-1][offsets[1:] > offsets[:-1]]
    deltas[starts] = ids[starts]
    return deltas


def _from_deltas(deltas: IdArray, offsets: IntArray) -> IdArray:
    # Sums wrap at 2**31 and wrap back in the difference. A row whose own sum is above that comes
    # out descending or negative, which _check_ascending refuses.
    sums = np.zeros(deltas.size + 1, np.int32)
    np.cumsum(deltas, out=sums[1:], dtype=np.int32)
    return sums[1:] - np.repeat(sums[offsets[:-1]], np.diff(offsets))


def _check_ascending(ids: IdArray, offsets: IntArray) -> None:
    falls = np.flatnonzero(ids[1:] <= ids[:-1]) + 1
    falls = falls[offsets[np.searchsorted(offsets, falls, side="right") - 1] != falls]
    wrong = falls if falls.size else np.flatnonzero(ids < 0)
    if wrong.size:
        at = int(wrong[0])
        expected = "ids that are not negative and ascend within a row"
        raise _not_sound("a support", expected, f"{int(ids[at])}", row=row_at(offsets, at))


# Writing


def write_rollouts(
    path: PathLike,
    rollouts: Iterable[Rollout],
    *,
    rollouts_per_group: int = 256,
    compression: Compression | None = "zstd",
    delta: bool | None = None,
) -> int:
    """Write a file of rollouts, as Arrow or Parquet by its ending, and return their number.

    No more than two groups of rollouts are held at a time. What was at `path` stays until the new
    file is whole. On return the file and its name are on disk, as far as the file system can sync
    a directory.

    Args:
        path: ends in `.arrow` or `.parquet`.
        rollouts_per_group: the unit of reading, from 1 to 65,536.
        compression: `"zstd"`, `"lz4"` or None. An uncompressed Arrow file with plain ids is read
            without copying them.
        delta: store each support id as the difference to the one before it. By default where the
            file is compressed, which makes it a twentieth (few ids a row) to a fifth smaller.

    Raises:
        ReplayError: an ending or option that is not one of these; something in `rollouts` that is
            no `Rollout`, or whose text is no valid Unicode; a path that no file can have.
        OSError: the file cannot be written, or not be put in place.
    """
    target = _checked_path(path)
    per_group = check_count(rollouts_per_group, "rollouts_per_group")
    if not 1 <= per_group <= _MOST_IN_GROUP:
        raise _bad_option("rollouts_per_group", f"1 to {_MOST_IN_GROUP}", per_group)
    if compression is not None and not (
        isinstance(compression, str) and compression in ("zstd", "lz4")
    ):
        raise _bad_option("compression", "'zstd', 'lz4' or None", compression)
    if delta is not None:
        check_flag(delta, "delta")
    if not is_iterable(rollouts):
        raise _not_a_rollout(rollouts, None)
    coded = compression is not None if delta is None else bool(delta)
    metadata = {_VERSION_KEY: str(SCHEMA_VERSION), _GROUP_KEY: str(per_group)}
    schema = _schema(coded).with_metadata(metadata)

    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            count = 0
            with _WRITERS[target.suffix](file, schema, compression) as writer:
                for group, is_last in _groups(rollouts, per_group):
                    writer.write_batch(_batch(group, count, is_last, schema))
                    count += len(group)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
        _sync_directory(target.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _sync_directory(path: Path) -> None:
    """Put a rename on disk; nothing where a directory cannot be opened, or not be synced."""
    if os.name != "posix":
        return
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without it
            raise
    finally:
        os.close(directory)


def _arrow_writer(file: IO[bytes], schema: Any, compression: str | None) -> Any:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    return pa.ipc.new_file(file, schema, options=options)


def _parquet_writer(file: IO[bytes], schema: Any, compression: str | None) -> Any:
    # Bytes of one weight side by side: token ids and log-probs compress better so.
    numbers = {leaf: "BYTE_STREAM_SPLIT" for f in schema for leaf in _number_leaves(f.name, f.type)}
    return pq.ParquetWriter(
        file,
        schema,
        compression=compression or "none",
        use_dictionary=False,
        column_encoding=numbers if compression else None,
        write_statistics=False,
    )


def _number_leaves(path: str, kind: Any) -> list[str]:
    """Parquet's name of the int32 or float32 column at the bottom of nested lists, if it is one."""
    if pa.types.is_large_list(kind):
        return _number_leaves(f"{path}.list.element", kind.value_type)
    return [path] if kind in (pa.int32(), pa.float32()) else []


_WRITERS: dict[str, Callable[..., Any]] = {".arrow": _arrow_writer, ".parquet": _parquet_writer}


def _groups(rollouts: Iterable[Any], size: int) -> Iterator[tuple[list[Any], bool]]:
    """Groups of `size`, and whether each is the last; one empty group if there is nothing."""
    left = iter(rollouts)
    group = list(itertools.islice(left, size))
    while following := list(itertools.islice(left, 1)):
        yield group, False
        group = following + list(itertools.islice(left, size - 1))
    yield group, True


def _batch(group: list[Any], first: int, is_last: bool, schema: Any) -> Any:
    for index, rollout in enumerate(group, start=first):
        if not isinstance(rollout, Rollout):
            raise _not_a_rollout(rollout, index)
        _check_text(rollout, index)
    places = np.arange(first, first + len(group))
    last = np.zeros(len(group), np.bool_)
    last[-1:] = is_last
    columns = {
        "index": pa.array(places),
        "is_last": pa.array(last),
        "weight_versions": _spans_column([r.weight_versions for r in group]),
        "finish_reason": pa.array([r.finish_reason for r in group], pa.string()),
        "crc32": _crc_column(group, places.tolist(), last.tolist()),
    }
    for name in ("prompt_ids", "response_ids"):
        columns[name] = _column([getattr(r, name) for r in group], np.int32, _TYPES[name])
    for name in ("rollout_log_probs", "support_log_probs"):
        columns[name] = _column([getattr(r, name) for r in group], np.float32, _TYPES[name])
    columns["loss_mask"] = _column([r.loss_mask for r in group], np.bool_, _TYPES["loss_mask"])
    masks = [r.sampling_mask for r in group]
    columns["sampling_mask"] = columns[_DELTAS] = _mask_column(masks, _DELTAS in schema.names)
    return pa.record_batch([columns[name] for name in schema.names], schema=schema)


def _column(arrays: list[Any], dtype: npt.DTypeLike, kind: Any) -> Any:
    """A list column of one array a rollout, null where it is None."""
    absent = np.array([array is None for array in arrays], np.bool_)
    own = [array for array in arrays if array is not None]
    flat = np.concatenate([np.zeros(0, dtype), *own]).astype(dtype, copy=False)
    offsets = offsets_of([0 if array is None else array.size for array in arrays])
    return _large_list(offsets, pa.array(flat), kind, pa.array(absent) if absent.any() else None)


def _mask_column(masks: list[RolloutSamplingMask], delta: bool) -> Any:
    whole = RolloutSamplingMask.concat(masks)
    ids = _to_deltas(whole.ids, whole.offsets) if delta else whole.ids
    rows = _rows_array(ids, whole.offsets, whole.unrestricted)
    return _large_list(offsets_of([len(m) for m in masks]), rows, _TYPES["sampling_mask"])


def _spans_column(versions: list[Any]) -> Any:
    flat = list(itertools.chain.from_iterable(versions))
    parts = [
        pa.array([span[i] for span in flat], field.type) for i, field in enumerate(_SPAN.fields)
    ]
    spans = pa.StructArray.from_arrays(parts, fields=_SPAN.fields)
    return _large_list(offsets_of([len(v) for v in versions]), spans, _TYPES["weight_versions"])


def _large_list(offsets: IntArray, values: Any, kind: Any, nulls: Any = None) -> Any:
    return pa.LargeListArray.from_arrays(pa.array(offsets), values, type=kind, mask=nulls)


def _crc_column(group: list[Rollout], places: list[int], last: list[bool]) -> Any:
    kind = _TYPES["crc32"]
    sums = [
        pa.array(
            [
                _crc32(name, getattr(rollout, name), index, is_last)
                for rollout, index, is_last in zip(group, places, last, strict=True)
            ],
            pa.uint32(),
        )
        for name in FIELDS
    ]
    return pa.StructArray.from_arrays(sums, fields=kind.fields)


def _crc32(name: str, value: Any, index: int, is_last: bool) -> int:
    """CRC-32 of the place of one rollout in the file, and of one field's content."""
    head = f"{name} {index} {is_last} {value is None}"
    crc = zlib.crc32(head.encode())
    for part in () if value is None else _content(value):
        crc = zlib.crc32(part, crc)
    return crc


def _content(value: Any) -> list[Any]:
    """The buffers of a field that is not None; numbers in little-endian, whatever the machine."""
    if isinstance(value, RolloutSamplingMask):
        return [*_content(value.offsets), *_content(value.ids)]
    if isinstance(value, np.ndarray):
        return [value.astype(value.dtype.newbyteorder("<"), copy=False)]
    if isinstance(value, str):
        return [str.encode(value)]
    return [f"{span.start} {span.end} ".encode() + str.encode(span.version) for span in value]


def _check_text(rollout: Rollout, index: int) -> None:
    for text in (rollout.finish_reason, *(span.version for span in rollout.weight_versions)):
        try:
            (text or "").encode()
        except UnicodeEncodeError:
            raise ReplayError(
                "text that cannot be stored",
                expected="a finish reason and versions in valid Unicode",
                got=ascii(text)[:40],
                consequence="the file would not hold the rollout as it is",
                sample=index,
            ) from None


# Reading


def read_info(path: PathLike) -> StorageInfo:
    """What a file holds, without reading the rollouts.

    Raises:
        ReplayError: not a whole file of rollouts, or one of a later schema version.
        OSError: the file cannot be opened.
    """
    return _open(path, memory_map=True).info


def read_rollouts(
    path: PathLike,
    *,
    row_groups: IntArrayLike | None = None,
    rank: int = 0,
    world_size: int = 1,
    memory_map: bool = True,
) -> list[Rollout]:
    """The rollouts of a file, or of some of its groups, or one rank's share of those.

    Every rollout passes through the checks of `Rollout`, and every field is compared with its
    checksum. Support ids of an uncompressed Arrow file with plain ids are not copied: they stay in
    the mapped file.

    Args:
        row_groups: int `[k]`, the groups to read, in this order; all by default.
        rank, world_size: which of `world_size` contiguous shares to read, of sizes that differ by
            one at most. Groups outside of it are not read.
        memory_map: map the file instead of reading it into memory. Then nobody may write to it in
            place, but only replace it by rename, as `write_rollouts` does: ids that stay in the
            mapped file would change behind their checks, and where it is cut, reading on may kill
            the process (SIGBUS). With False, a file that is cut meanwhile is a ReplayError.

    Raises:
        ReplayError: a file that is damaged in any way or of a later schema version, a group or
            rank that does not exist. `sample` is the index of the rollout in the file.
        OSError: the file cannot be opened.
    """
    return list(
        iter_rollouts(
            path,
            row_groups=row_groups,
            rank=rank,
            world_size=world_size,
            memory_map=memory_map,
        )
    )


def iter_rollouts(
    path: PathLike,
    *,
    row_groups: IntArrayLike | None = None,
    rank: int = 0,
    world_size: int = 1,
    memory_map: bool = True,
) -> Iterator[Rollout]:
    """`read_rollouts`, one group at a time."""
    source = _open(path, memory_map)
    slices = _slices(source.info, row_groups, rank, world_size)
    return itertools.chain.from_iterable(_rollouts(source, part) for part in slices)


def read_columns(
    path: PathLike,
    columns: Sequence[str],
    *,
    row_groups: IntArrayLike | None = None,
    rank: int = 0,
    world_size: int = 1,
    memory_map: bool = True,
) -> dict[str, list[Any]]:
    """Some fields of the rollouts, without reading the others.

    Equivalent to `{name: [getattr(r, name) for r in read_rollouts(path)] for name in columns}`. A
    mask passes through all checks and every field is compared with its checksum; what ties one
    field to another is checked by `read_rollouts` alone.

    Args:
        columns: names out of `FIELDS`.
        row_groups, rank, world_size, memory_map: as in `read_rollouts`.

    Raises:
        ReplayError, OSError: as in `read_rollouts`; a name that is no field.
    """
    names: list[Any] = list(columns) if is_iterable(columns) else [columns]
    unknown = [name for name in names if not (isinstance(name, str) and name in FIELDS)]
    if unknown or not names:
        got = shown(unknown[0]) if unknown else "no name"
        raise _bad_option("columns", f"names out of {', '.join(FIELDS)}", got)
    source = _open(path, memory_map)
    read: dict[str, list[Any]] = {name: [] for name in names}
    for part in _slices(source.info, row_groups, rank, world_size):
        for name, values in _fields(source, part, names).items():
            read[name] += values
    return read


class _Slice(NamedTuple):
    """Rollouts `[start, end)` of one group."""

    group: int
    start: int
    end: int


def _slices(
    info: StorageInfo, row_groups: IntArrayLike | None, rank: Any, world_size: Any
) -> list[_Slice]:
    shares = check_count(world_size, "world_size")
    share = check_count(rank, "rank")
    if not share < shares:
        raise _bad_option("rank", f"a rank below the world size, {shares}", share)
    groups = np.arange(info.num_row_groups)
    if row_groups is not None:
        groups = integer_array(row_groups, "row_groups")
        wrong = (groups < 0) | (groups >= info.num_row_groups)
        if wrong.any():
            got = int(groups[np.argmax(wrong)])
            raise _bad_option("row_groups", f"groups in [0, {info.num_row_groups})", got)
    ends = offsets_of([_group_size(info, group) for group in groups.tolist()]).tolist()
    first, last = ends[-1] * share // shares, ends[-1] * (share + 1) // shares
    return [
        _Slice(group, max(first, start) - start, min(last, end) - start)
        for group, start, end in zip(groups.tolist(), ends[:-1], ends[1:], strict=True)
        if max(first, start) < min(last, end)
    ]


def _group_size(info: StorageInfo, group: int) -> int:
    return min(info.rollouts_per_group, info.num_rollouts - group * info.rollouts_per_group)


def _rollouts(source: _Source, part: _Slice) -> Iterator[Rollout]:
    fields = _fields(source, part, FIELDS)
    first = part.group * source.info.rollouts_per_group + part.start
    for i in range(part.end - part.start):
        try:
            rollout = Rollout(**{name: fields[name][i] for name in FIELDS})
        except ReplayError as error:
            raise error.located(sample=first + i) from None
        yield rollout


def _fields(source: _Source, part: _Slice, names: Sequence[str]) -> dict[str, list[Any]]:
    """The values of some fields, each compared with its checksum."""
    stored = {"sampling_mask": _DELTAS} if source.info.delta else {}
    wanted = ["index", "is_last", *(stored.get(name, name) for name in names), "crc32"]
    columns = source.read(part, wanted)
    index = _check_places(source.info, part, columns)
    read: dict[str, list[Any]] = {}
    for name in names:
        column = columns[stored.get(name, name)]
        read[name] = _values(name, column, source.info.delta, index[0])
        sums = columns["crc32"].field(FIELDS.index(name)).to_pylist()
        for i, value, expected in zip(index, read[name], sums, strict=True):
            if _crc32(name, value, i, i == source.info.num_rollouts - 1) != expected:
                got = f"a {name} with another one"
                raise _not_sound("the file", f"CRC-32 {expected:08x}", got, sample=i)
    return read


def _check_places(info: StorageInfo, part: _Slice, columns: dict[str, Any]) -> list[int]:
    """The rollouts' indices in the file, which must be those that the group should hold."""
    first = part.group * info.rollouts_per_group
    expected = list(range(first + part.start, first + part.end))
    index, is_last = columns["index"].to_pylist(), columns["is_last"].to_pylist()
    if index != expected or is_last != [i == info.num_rollouts - 1 for i in expected]:
        raise _not_sound("the file", f"rollouts {expected[:1]} on", f"others, {index[:1]} on")
    return expected


def _values(name: str, column: Any, delta: bool, first: int) -> list[Any]:
    """One value a rollout, as `Rollout` holds it; `first` is the index of the first rollout."""
    if name == "finish_reason":
        return list(column.to_pylist())
    if name == "weight_versions":
        return [tuple(WeightVersionSpan(**span) for span in row) for row in column.to_pylist()]
    offsets, values = _offsets_and_values(column)
    bounds = list(itertools.pairwise(offsets.tolist()))
    if name == "sampling_mask":
        try:
            mask = _mask_of(values, delta=delta)
        except ReplayError as error:
            if error.row is None:
                raise
            at = row_at(offsets, error.row)
            raise error.located(sample=first + at, row=error.row - int(offsets[at])) from None
        return [mask[a:b] for a, b in bounds]
    flat = values.to_numpy(zero_copy_only=False)
    if name in ("prompt_ids", "response_ids"):
        flat = flat.astype(np.int64)
    present = column.is_valid().to_pylist()
    return [
        frozen(flat[a:b]) if there else None for there, (a, b) in zip(present, bounds, strict=True)
    ]


# Files


@dataclass(frozen=True, slots=True)
class _Source:
    """An open file, and how to read columns of a group by name."""

    info: StorageInfo
    name: str
    schema: Any
    read_group: Callable[[int, list[str]], Any]

    def read(self, part: _Slice, names: list[str]) -> dict[str, Any]:
        """Arrow arrays of a slice's rollouts: sound offsets, and nulls only where they may be."""
        with _arrow_errors(self.name):
            group = self.read_group(part.group, names)
            columns = {name: _one_array(group.column(name)) for name in names}
            for column in columns.values():
                column.validate(full=True)
        size = _group_size(self.info, part.group)
        found = {group.num_rows, *map(len, columns.values())}
        if found != {size}:
            where = f"group {part.group} of {self.name}"
            raise _not_sound(where, f"{size} rollouts", f"{sorted(found)}")
        for name, column in columns.items():  # pyarrow does not look at what may not be null
            _check_nulls(column, self.schema.field(name), self.name)
        return {name: c.slice(part.start, part.end - part.start) for name, c in columns.items()}


def _one_array(column: Any) -> Any:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _check_nulls(column: Any, field: Any, file: str) -> None:
    if column.null_count and not field.nullable:
        got = f"{column.null_count} nulls in {field.name}"
        raise _not_sound(file, "a value in every place that must have one", got)
    if pa.types.is_large_list(field.type):
        _check_nulls(column.values, field.type.value_field, file)
    elif pa.types.is_struct(field.type):
        for i, part in enumerate(field.type.fields):
            _check_nulls(column.field(i), part, file)


def _open(path: PathLike, memory_map: bool) -> _Source:
    check_flag(memory_map, "memory_map")
    path = _checked_path(path)
    name = os.fsencode(path.name).decode(errors="replace")
    _check_regular(path, name)
    with path.open("rb"):  # a file that cannot be opened is no damaged file
        pass
    with _arrow_errors(name):
        # As bytes: a name need not be UTF-8, which pyarrow would encode it to.
        file = (pa.memory_map if memory_map else pa.OSFile)(os.fsencode(path))
        schema, counts, read_group = _READERS[path.suffix](file)
        info = _info(name, schema, *counts)
    source = _Source(info, name, schema, read_group)
    if info.num_rollouts:
        # The last group says that it is: without it, rollouts would be missing unnoticed.
        group = info.num_row_groups - 1
        end = _Slice(group, 0, _group_size(info, group))
        _check_places(info, end, source.read(end, ["index", "is_last"]))
    return source


def _arrow_reader(file: Any) -> tuple[Any, tuple[int, int], Callable[[int, list[str]], Any]]:
    reader = pa.ipc.open_file(file)
    schema = reader.schema
    stored = schema.names

    def read_group(group: int, names: list[str]) -> Any:
        if _DELTAS not in stored:
            return reader.get_batch(group)  # mapped: what isn't looked at isn't read
        # Decompresses the named columns alone, but copies what is not compressed.
        fields = sorted(stored.index(name) for name in names)
        options = pa.ipc.IpcReadOptions(included_fields=fields)
        return pa.ipc.open_file(file, options=options).get_batch(group)

    return schema, (reader.num_record_batches, reader.count_rows()), read_group


def _parquet_reader(file: Any) -> tuple[Any, tuple[int, int], Callable[[int, list[str]], Any]]:
    reader = pq.ParquetFile(file)
    metadata = reader.metadata
    groups = range(metadata.num_row_groups)
    count = sum(metadata.row_group(group).num_rows for group in groups)
    if count != metadata.num_rows:
        raise _not_sound("the footer", f"{metadata.num_rows} rollouts", f"groups of {count}")

    def read_group(group: int, names: list[str]) -> Any:
        return reader.read_row_group(group, columns=names)

    return reader.schema_arrow, (len(groups), count), read_group


_READERS = {".arrow": _arrow_reader, ".parquet": _parquet_reader}


def _info(name: str, schema: Any, num_groups: int, count: int) -> StorageInfo:
    metadata = schema.metadata or {}
    version = _number(metadata.get(_VERSION_KEY))
    per_group = _number(metadata.get(_GROUP_KEY))
    if version != SCHEMA_VERSION:
        later = version is not None and version > SCHEMA_VERSION
        got = "none" if version is None else f"{version}"
        expected = f"schema version {SCHEMA_VERSION}"
        raise _not_sound(name, expected, got + (" (of a later rlreplay: update it)" * later))
    delta = _DELTAS in schema.names
    if not schema.equals(_schema(delta)):
        raise _not_sound(
            name, f"the columns of version {version}", _first_difference(schema, delta)
        )
    if per_group is None or not 1 <= per_group <= _MOST_IN_GROUP:
        raise _not_sound(name, "a number of rollouts in a group", shown(metadata.get(_GROUP_KEY)))
    if not 0 <= count < 1 << 48 or num_groups != max(1, -(-count // per_group)):
        expected = f"groups of {per_group} rollouts and a rest"
        raise _not_sound(name, expected, f"{count} in {num_groups} groups")
    return StorageInfo(version, count, num_groups, per_group, delta)


def _number(text: bytes | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and len(text) < 10 else None


def _first_difference(schema: Any, delta: bool) -> str:
    fields = itertools.zip_longest(_schema(delta), schema)
    theirs = next((b for a, b in fields if a is None or b is None or not a.equals(b)), None)
    return "fewer columns" if theirs is None else f"{theirs.name}: {theirs.type}"


def _checked_path(path: Any) -> Path:
    """The path, which a file can have and which ends in one of the known endings."""
    text = path.__fspath__() if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise _bad_option("path", "a path as text", path)
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:  # a lone surrogate
        raise _bad_option("path", "a path that can be encoded", ascii(text)) from None
    if b"\0" in encoded:
        raise _bad_option("path", "a path without NUL", ascii(text))
    checked = Path(text)
    if checked.suffix not in _WRITERS:
        raise _bad_option(
            "path", "a file name that ends in .arrow or .parquet", ascii(checked.name)
        )
    return checked


def _check_regular(path: Path, name: str) -> None:
    """Refuse a pipe or device, for files are opened more than once; opening tells of the rest."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise _bad_option("path", "a regular file", f"{name}, a {stat.filemode(mode)[0]!r}")


# Errors

# What pyarrow raises over damaged files; MemoryError where a size in them is beyond all memory.
_DAMAGE = (pa.ArrowException, OSError, ValueError, KeyError, OverflowError, MemoryError)


@contextmanager
def _arrow_errors(what: str) -> Iterator[None]:
    try:
        yield
    except ReplayError:
        raise
    except _DAMAGE as error:
        got = f"{type(error).__name__}: {str(error)[:200]}"
        raise _not_sound(what, "a whole file that pyarrow can read", got) from error


def _not_sound(what: str, expected: str, got: str, **place: int) -> ReplayError:
    return ReplayError(
        f"{what} is damaged, or was not written by rlreplay.storage",
        expected=expected,
        got=got,
        consequence=_LOST,
        **place,
    )


def _bad_option(name: str, expected: str, got: Any) -> ReplayError:
    return ReplayError(
        f"{name} is out of range",
        expected=expected,
        got=got if isinstance(got, str) else shown(got).removeprefix("int "),
        consequence="a file would be written or read in a way nobody asked for",
    )


def _not_a_rollout(got: Any, sample: int | None) -> ReplayError:
    return ReplayError(
        "not a rollout",
        expected="Rollout" if sample is not None else "an iterable of Rollout",
        got=type(got).__name__,
        consequence="the file would not hold what the trainer needs",
        sample=sample,
    )
