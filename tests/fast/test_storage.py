"""Files of rollouts: exact round trips, and damage of every kind that must not get through."""

import contextlib
import dataclasses
import enum
import errno
import itertools
import os
import signal
import stat
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlreplay import Rollout, RolloutSamplingMask
from rlreplay.errors import ReplayError
from rlreplay.storage import (
    FIELDS,
    StorageInfo,
    iter_rollouts,
    mask_from_arrow,
    mask_to_arrow,
    read_columns,
    read_info,
    read_rollouts,
    write_rollouts,
)
from tests.fast.payloads import cuts, drawn_responses, spans
from tests.fast.strategies import refused

ENDINGS = [".arrow", ".parquet"]
OPTIONS = [
    {"compression": compression, "delta": delta}
    for compression in ("zstd", "lz4", None)
    for delta in (True, False)
]
KINDS = [(ending, options) for ending in ENDINGS for options in OPTIONS]
NAMES = [f"{e[1:]}-{o['compression']}-{'delta' if o['delta'] else 'plain'}" for e, o in KINDS]
every_kind = pytest.mark.parametrize(("ending", "options"), KINDS, ids=NAMES)


def rollout(seed: int, n: int = 12) -> Rollout:
    """Supports of 1 to 8 ids below 2**31 and unrestricted rows; the seed picks what is optional."""
    rng = np.random.default_rng(seed)
    supports = [
        None if t % 5 == 3 else np.unique(rng.integers(0, 1 << 31, t % 8 + 1)).tolist()
        for t in range(n)
    ]
    sizes = np.array([0 if row is None else len(row) for row in supports], np.int64)
    log_probs = np.where(sizes == 0, -3.0, -np.log(np.maximum(sizes, 1)))
    fields = {
        "rollout_log_probs": log_probs if seed % 4 else None,
        "support_log_probs": np.repeat(log_probs, sizes) if seed % 4 > 1 else None,
        "loss_mask": rng.integers(0, 2, n) if seed % 3 else None,
        "weight_versions": [("7", 0, n // 2), ("ä8", n // 2, n)] if seed % 2 and n > 1 else (),
        "finish_reason": [None, "", "stop"][seed % 3],
    }
    return Rollout(
        prompt_ids=rng.integers(0, 1 << 31, 1 + seed % 4),
        response_ids=[2**31 - 1 if row is None else row[-1] for row in supports],
        sampling_mask=RolloutSamplingMask.from_mask_list(supports, allow_unrestricted=True),
        **fields,
    )


# The third has no tokens, and the group of the sixth has optional fields throughout.
ROLLOUTS = [rollout(seed, 0 if seed == 2 else 12) for seed in range(9)]


@pytest.fixture
def files(tmp_path):
    def write(rollouts=ROLLOUTS, *, ending=".arrow", per_group=4, **options):
        path = tmp_path / f"rollouts{ending}"
        count = write_rollouts(path, rollouts, rollouts_per_group=per_group, **options)
        assert count == len(rollouts)
        return path

    return write


# Round trips


@every_kind
def test_round_trip(files, ending, options):
    for count in (9, 8, 1, 0):
        path = files(ROLLOUTS[:count], ending=ending, **options)
        assert read_rollouts(path) == ROLLOUTS[:count]
        assert read_rollouts(path, memory_map=False) == ROLLOUTS[:count]
        assert read_info(path) == StorageInfo(1, count, max(1, -(-count // 4)), 4, options["delta"])
    assert list(path.parent.iterdir()) == [path], "nothing is left beside it"


@st.composite
def drawn_rollouts(draw):
    response = draw(drawn_responses())
    n = len(response)
    bounds = [(start, end) for start, end in spans(draw(cuts(n))) if end > start]
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
    full = response.rollout(
        weight_versions=[(draw(text), *bound) for bound in bounds],
        loss_mask=draw(st.lists(st.booleans(), min_size=n, max_size=n)),
        support_log_probs=response.sorted_support_log_probs(),
        finish_reason=draw(st.none() | text),
    )
    without = {"support_log_probs": None}
    if draw(st.booleans()):
        without["rollout_log_probs"] = None
    if draw(st.booleans()):
        without["weight_versions"] = ()
    return dataclasses.replace(full, **without) if draw(st.booleans()) else full


@pytest.mark.parametrize("ending", ENDINGS)
@given(
    rollouts=st.lists(drawn_rollouts(), max_size=7),
    per_group=st.integers(1, 4),
    options=st.sampled_from(OPTIONS),
)
def test_any_rollouts_round_trip(tmp_path_factory, ending, rollouts, per_group, options):
    path = tmp_path_factory.getbasetemp() / f"drawn{ending}"
    write_rollouts(path, rollouts, rollouts_per_group=per_group, **options)
    assert read_rollouts(path) == rollouts
    columns = read_columns(path, FIELDS)
    for name in FIELDS:
        assert len(columns[name]) == len(rollouts)
        assert all(map(same, columns[name], [getattr(r, name) for r in rollouts]))


def same(a, b):
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and a == b


@every_kind
def test_shares_of_ranks(files, ending, options):
    path = files(ending=ending, **options)
    for world_size in (1, 2, 4, 9, 11):
        shares = [
            read_rollouts(path, rank=rank, world_size=world_size) for rank in range(world_size)
        ]
        assert list(itertools.chain.from_iterable(shares)) == ROLLOUTS
        sizes = list(map(len, shares))
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("ending", ENDINGS)
def test_groups(files, ending):
    path = files(ending=ending)
    assert read_rollouts(path, row_groups=[1]) == ROLLOUTS[4:8]
    assert read_rollouts(path, row_groups=[2, 0]) == [ROLLOUTS[8], *ROLLOUTS[:4]]
    assert read_rollouts(path, row_groups=[]) == []
    assert read_rollouts(path, row_groups=np.array([2, 1]), rank=1, world_size=2) == ROLLOUTS[5:8]


@pytest.mark.parametrize("ending", ENDINGS)
def test_iteration_reads_group_by_group(files, ending):
    path = files(ending=ending, compression=None)
    damaged = flipped(path, b"stop", 2)  # the only one of the second group
    rollouts = iter_rollouts(damaged)
    assert [next(rollouts) for _ in range(4)] == ROLLOUTS[:4]
    with pytest.raises(ReplayError, match="damaged"):
        next(rollouts)


def flipped(path: Path, text: bytes, occurrence: int) -> Path:
    """A copy of the file with a bit flipped in the n-th occurrence (from 1) of a text."""
    data = bytearray(path.read_bytes())
    at = -1
    for _ in range(occurrence):
        at = data.index(text, at + 1)
    data[at] ^= 1
    other = path.with_stem("flipped")
    other.write_bytes(data)
    return other


def test_a_column_is_read_without_the_others(files):
    for ending in ENDINGS:
        path = files(ending=ending, compression=None)
        damaged = flipped(path, b"stop", 1)
        masks = read_columns(damaged, ["sampling_mask"])
        assert masks == {"sampling_mask": [r.sampling_mask for r in ROLLOUTS]}
        with refused("damaged", sample=2):
            read_columns(damaged, ["sampling_mask", "finish_reason"])


def test_columns_of_a_share(files):
    path = files()
    read = read_columns(path, ["finish_reason"], row_groups=[0, 1], rank=1, world_size=2)
    assert read == {"finish_reason": [r.finish_reason for r in ROLLOUTS[4:8]]}


def test_any_iterable_of_any_size_is_written_with_two_groups_in_memory(tmp_path):
    alive, most = [], 0

    class Tracked(Rollout):
        __slots__ = ()

        def __del__(self):
            alive.pop()

    def produce():
        nonlocal most
        for seed in range(40):
            made = rollout(seed)
            alive.append(None)
            most = max(most, len(alive))
            yield Tracked(**{name: getattr(made, name) for name in FIELDS})

    assert write_rollouts(tmp_path / "r.arrow", produce(), rollouts_per_group=4) == 40
    assert most <= 4 + 4 + 1, "two groups and the one being made"


def test_text_of_a_subclass_of_str(tmp_path):
    class Reason(enum.StrEnum):
        STOP = "stop"

    path = tmp_path / "r.parquet"
    write_rollouts(path, [dataclasses.replace(ROLLOUTS[1], finish_reason=Reason.STOP)])
    assert read_rollouts(path)[0].finish_reason == "stop"


@pytest.mark.parametrize("ending", ENDINGS)
def test_other_readers_see_the_masks(files, ending):
    path = files(ending=ending, delta=False)
    opened = pa.ipc.open_file(path).read_all() if ending == ".arrow" else pq.read_table(path)
    masks = opened.column("sampling_mask").to_pylist()
    assert masks == [r.sampling_mask.to_mask_list() for r in ROLLOUTS]
    coded = files(ending=ending, delta=True)
    opened = pa.ipc.open_file(coded).read_all() if ending == ".arrow" else pq.read_table(coded)
    assert "sampling_mask" not in opened.column_names, "differences cannot be taken for ids"


def test_checksums_are_those_of_the_documented_bytes(files):
    one = Rollout(
        prompt_ids=[5],
        response_ids=[7, 8],
        sampling_mask=RolloutSamplingMask.from_mask_list([[7, 9], [8]]),
        rollout_log_probs=[-0.25, 0.0],
        weight_versions=[("v", 0, 2)],
        finish_reason="stop",
    )
    content = {
        "prompt_ids": struct.pack("<q", 5),
        "response_ids": struct.pack("<2q", 7, 8),
        "sampling_mask": struct.pack("<3q3i", 0, 2, 3, 7, 9, 8),
        "rollout_log_probs": struct.pack("<2f", -0.25, 0.0),
        "support_log_probs": b"",
        "loss_mask": b"\1\1",
        "weight_versions": b"0 2 v",
        "finish_reason": b"stop",
    }
    table = pa.ipc.open_file(files([one])).read_all()
    assert table.column("crc32").to_pylist()[0] == {
        name: zlib.crc32(f"{name} 0 True {name == 'support_log_probs'}".encode() + content[name])
        for name in FIELDS
    }


# No copies


def test_arrow_shares_the_mask_s_buffers():
    for mask in (ROLLOUTS[3].sampling_mask, RolloutSamplingMask.forced([5, 7])):
        rows = mask_to_arrow(mask)
        assert rows.to_pylist() == mask.to_mask_list()
        again = mask_from_arrow(rows)
        assert again == mask
        assert address(rows.values) == address_of(mask.ids) == address_of(again.ids)
        assert address(rows.offsets) == address_of(again.offsets)
        assert not again.ids.flags.writeable
        assert mask.unrestricted.any() or address(rows.offsets) == address_of(mask.offsets)
    free = RolloutSamplingMask.full(3)
    assert mask_from_arrow(mask_to_arrow(free)) == free


def address(array) -> int:
    return array.buffers()[1].address


def address_of(array) -> int:
    return array.__array_interface__["data"][0]


def test_masks_from_slices_and_short_offsets():
    rows = mask_to_arrow(ROLLOUTS[3].sampling_mask)
    assert mask_from_arrow(rows[2:9]) == ROLLOUTS[3].sampling_mask[2:9]
    assert mask_from_arrow(rows[5:5]) == RolloutSamplingMask.full(0)
    short = rows.cast(pa.list_(pa.int32()))
    assert mask_from_arrow(short) == ROLLOUTS[3].sampling_mask


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc/self/maps")
def test_an_uncompressed_arrow_file_is_mapped_not_copied(files):
    path = files(compression=None)
    masks = [r.sampling_mask for r in read_rollouts(path)]
    mapped = [
        [int(end, 16) for end in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(path))
    ]
    assert mapped
    for mask in masks:
        at = address_of(mask.ids)
        assert mask.ids.size == 0 or any(a <= at < b for a, b in mapped)
    path.unlink()
    assert masks == [r.sampling_mask for r in ROLLOUTS], "the mapping outlives the name"


def test_a_file_that_is_replaced_stays_whole_for_its_readers(files):
    path = files(compression=None)
    rollouts = iter_rollouts(path)
    first = next(rollouts)
    files(ROLLOUTS[::-1], compression=None)
    assert [first, *rollouts] == ROLLOUTS
    assert read_rollouts(path) == ROLLOUTS[::-1]


@every_kind
def test_a_file_that_is_cut_while_it_is_read_unmapped_is_refused(files, ending, options):
    """As `memory_map` says; what is mapped would kill the process."""
    path = files(ending=ending, per_group=1, **options)
    rollouts = iter_rollouts(path, memory_map=False)
    assert next(rollouts) == ROLLOUTS[0]
    os.truncate(path, 8)
    with refused("damaged"):
        list(rollouts)


# Atomic


def test_what_is_there_stays_until_the_new_file_is_whole(files):
    path = files()

    def fails():
        yield from ROLLOUTS[:6]
        raise KeyError("no more")

    with pytest.raises(KeyError, match="no more"):
        write_rollouts(path, fails(), rollouts_per_group=2)
    assert read_rollouts(path) == ROLLOUTS
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="directories are synced on POSIX alone")
def test_the_file_is_synced_before_it_is_renamed_and_the_directory_after(tmp_path, monkeypatch):
    path, seen = tmp_path / "r.arrow", []
    real = os.fsync

    def fsync(fd):
        seen.append(("directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file", path.exists()))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    write_rollouts(path, ROLLOUTS)
    assert seen == [("file", False), ("directory", True)]


@pytest.mark.skipif(os.name != "posix", reason="directories are synced on POSIX alone")
@pytest.mark.parametrize(("code", "passes"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_a_directory_that_cannot_be_synced(tmp_path, monkeypatch, code, passes):
    real = os.fsync

    def fsync(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with contextlib.nullcontext() if passes else pytest.raises(OSError, match=os.strerror(code)):
        write_rollouts(tmp_path / "r.arrow", ROLLOUTS)
    assert read_rollouts(tmp_path / "r.arrow") == ROLLOUTS


KILLED = """
import sys
from rlreplay.storage import write_rollouts
from tests.fast.test_storage import rollout

def produce():
    for seed in range(100_000_000):
        if seed == 50:
            print("writing", flush=True)
        yield rollout(seed)

write_rollouts(sys.argv[1], produce(), rollouts_per_group=2)
"""


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_kill_leaves_no_half_file(tmp_path, ending):
    path = tmp_path / f"r{ending}"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    with process:
        assert process.stdout.readline() == b"writing\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not path.exists()
    (left,) = tmp_path.iterdir()
    with pytest.raises(ReplayError, match="path"):
        read_rollouts(left)


# Damage


def read_or_refuse(path: Path, expected: list[Rollout], memory_map: bool) -> bool:
    """The rollouts as they were, or a `ReplayError`; was it refused?"""
    try:
        rollouts = read_rollouts(path, memory_map=memory_map)
    except ReplayError:
        return True
    assert rollouts == expected
    return False


@every_kind
def test_flipped_bytes_and_bits(files, ending, options):
    path = files(ending=ending, **options)
    whole, rng, refusals = path.read_bytes(), np.random.default_rng(7), 0
    for case in range(150):
        data = bytearray(whole)
        for at in rng.integers(0, len(data), 1 + case % 3):
            data[at] ^= 1 << rng.integers(0, 8) if case % 2 else rng.integers(1, 256)
        path.write_bytes(data)
        refusals += read_or_refuse(path, ROLLOUTS, memory_map=bool(case % 4))
    assert refusals > 75, "most bytes matter"


@every_kind
def test_truncated_files(files, ending, options):
    path = files(ending=ending, **options)
    whole, rng = path.read_bytes(), np.random.default_rng(8)
    for size in [0, 1, 8, len(whole) - 1, *rng.integers(0, len(whole), 30)]:
        path.write_bytes(whole[:size])
        assert read_or_refuse(path, ROLLOUTS, memory_map=bool(size % 2))
        with pytest.raises(ReplayError, match="damaged"):
            read_info(path)


@every_kind
def test_overwritten_words(files, ending, options):
    path = files(ending=ending, **options)
    whole, rng = path.read_bytes(), np.random.default_rng(9)
    words = [10**9, -1, 0, 2**62, 10**9 << 32]
    for word in words:
        for at in rng.integers(0, len(whole) // 8, 20) * 8:
            data = bytearray(whole)
            data[at : at + 8] = word.to_bytes(8, "little", signed=True)
            path.write_bytes(data)
            read_or_refuse(path, ROLLOUTS, memory_map=True)


def test_a_billion_rows_declared_in_an_arrow_file(files):
    whole = files([rollout(1)] * 7, per_group=7, compression=None).read_bytes()
    path = files([rollout(1)] * 7, per_group=7, compression=None)
    seven, billion = ((n).to_bytes(8, "little") for n in (7, 10**9))
    places = [at for at in range(0, len(whole), 8) if whole[at : at + 8] == seven]
    assert len(places) > 5, "the batch's length and those of its columns"
    for chosen in [*([at] for at in places), places]:
        data = bytearray(whole)
        for at in chosen:
            data[at : at + 8] = billion
        path.write_bytes(data)
        assert read_or_refuse(path, [rollout(1)] * 7, memory_map=True)


def test_a_billion_rows_declared_in_a_parquet_file(files):
    path = files([rollout(1)] * 7, per_group=7, ending=".parquet")
    whole = path.read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little")
    body, thrift = whole[: -8 - footer], whole[-8 - footer : -8]
    seven, billion = b"\x16\x0e", b"\x16\x80\xa8\xd6\xb9\x07"  # an i64 field, zigzag varints
    pieces = thrift.split(seven)
    assert len(pieces) > 2, "the file's rows and its group's"

    def declare(joints: list[bytes]) -> None:
        new = b"".join(itertools.chain(*zip(pieces, [*joints, b""], strict=True)))
        path.write_bytes(body + new + len(new).to_bytes(4, "little") + b"PAR1")

    joints = [seven] * (len(pieces) - 1)
    declare(joints)
    assert path.read_bytes() == whole
    for i in range(len(joints)):
        declare([billion if i == j else seven for j in range(len(joints))])
        read_or_refuse(path, [rollout(1)] * 7, memory_map=True)
    declare([billion] * len(joints))
    with refused("damaged"):
        read_rollouts(path)


# Files that pyarrow reads and that are none of ours


def rewritten(path: Path, change) -> Path:
    """The file with its batches changed by `change(table)`, in groups of four."""
    if path.suffix == ".arrow":
        table = change(pa.ipc.open_file(path).read_all())
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    else:
        table = change(pq.read_table(path))
        pq.write_table(table, path, row_group_size=4)
    return path


def metadata(**changes):
    def change(table):
        old = dict(table.schema.metadata)
        new = {f"rlreplay.{k}".encode(): v for k, v in changes.items()}
        kept = {k: v for k, v in {**old, **new}.items() if v is not None}
        return table.replace_schema_metadata(kept)

    return change


def column(name, make):
    def change(table):
        at = table.schema.get_field_index(name)
        new = make(table.column(at))
        return table.set_column(at, table.schema.field(at).with_type(new.type), new)

    return change


def swap_rows(table):
    return table.take([1, 0, *range(2, len(table))])


FOREIGN = {
    "no metadata": lambda table: table.replace_schema_metadata(None),
    "no schema version": metadata(schema_version=None),
    "a later schema version": metadata(schema_version=b"2"),
    "schema version 0": metadata(schema_version=b"0"),
    "a schema version that is no number": metadata(schema_version=b"\xff"),
    "a schema version beyond all": metadata(schema_version=b"9" * 9999),
    "no group size": metadata(rollouts_per_group=None),
    "a group size of 0": metadata(rollouts_per_group=b"0"),
    "a group size of a billion": metadata(rollouts_per_group=b"1000000000"),
    "another group size": metadata(rollouts_per_group=b"3"),
    "a column too few": lambda table: table.drop_columns(["loss_mask"]),
    "a column too many": lambda table: table.append_column("x", table.column("index")),
    "a column of another name": lambda t: t.rename_columns([*t.column_names[:-1], "sum"]),
    "columns in another order": lambda table: table.select(table.column_names[::-1]),
    "wide ids": column("response_ids", lambda c: c.cast(pa.large_list(pa.int64()))),
    "float ids": column("prompt_ids", lambda c: c.cast(pa.large_list(pa.float64()))),
    "text as index": column("index", lambda c: c.cast(pa.string())),
    "rollouts missing at the end": lambda table: table.slice(0, 4),
    "rollouts missing in the middle": lambda t: pa.concat_tables([t.slice(0, 4), t.slice(5)]),
    "rollouts missing at the start": lambda table: table.slice(1),
    "rollouts twice": lambda table: pa.concat_tables([table, table]),
    "rollouts swapped": swap_rows,
    "columns swapped": lambda t: t.set_column(
        2, t.schema.field(2), t.column("response_ids")
    ).set_column(3, t.schema.field(3), t.column("prompt_ids")),
    "a reason exchanged": column("finish_reason", lambda c: pa.chunked_array([["stop"] * len(c)])),
    "an optional field lost": column(
        "rollout_log_probs", lambda c: pa.chunked_array([pa.nulls(len(c), c.type)])
    ),
    "nulls for tokens": column(
        "response_ids", lambda c: pa.chunked_array([pa.nulls(len(c), c.type)])
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("case", FOREIGN)
def test_other_files(files, ending, case):
    path = files(ending=ending)
    assert read_rollouts(rewritten(path, lambda table: table)) == ROLLOUTS, "the helper is sound"
    with pytest.raises(ReplayError, match="damaged"):
        read_rollouts(rewritten(path, FOREIGN[case]))


def test_every_rank_notices_that_the_end_is_missing(files):
    for ending in ENDINGS:
        path = rewritten(files(ending=ending), lambda table: table.slice(0, 8))
        for call in (read_info, lambda p: read_rollouts(p, rank=0, world_size=4)):
            with refused("damaged"):
                call(path)


def test_checksums_that_are_null(files):
    with refused("damaged") as caught:  # pyarrow refuses to write them as Parquet
        read_rollouts(
            rewritten(
                files(), column("crc32", lambda c: pa.chunked_array([pa.nulls(len(c), c.type)]))
            )
        )
    assert caught.value.got == "4 nulls in crc32"


def test_a_later_version_says_so(files):
    with refused("damaged") as caught:
        read_info(rewritten(files(), metadata(schema_version=b"2")))
    assert caught.value.expected == "schema version 1"
    assert "later rlreplay" in caught.value.got


def test_a_file_of_the_other_kind(files):
    for ending, other in itertools.permutations(ENDINGS):
        path = files(ending=ending)
        with refused("damaged"):
            read_info(path.rename(path.with_suffix(other)))


def large_list(offsets, ids, nulls=None):
    """A list array over whatever is given: pyarrow checks only what it was made with."""
    validity = None if nulls is None else pa.array([not null for null in nulls]).buffers()[1]
    own = np.zeros(len(offsets), np.int64)
    rows = pa.Array.from_buffers(
        pa.large_list(pa.int32()),
        len(offsets) - 1,
        [validity, pa.py_buffer(own)],
        children=[pa.array(ids, pa.int32())],
    )
    own[:] = offsets
    return rows


@pytest.mark.parametrize(
    ("rows", "row"),
    [
        (large_list([0, 2, 1, 3], [1, 2, 3]), None),
        (large_list([0, 2, 9], [1, 2, 3]), None),
        (large_list([-1, 2, 3], [1, 2, 3]), None),
        (large_list([0, 10**9, 10**9], [1, 2, 3]), None),
        (large_list([0, 2, 3], [1, None, 3]), None),
        (large_list([0, 2, 2], [1, 2]), 1),
        (large_list([0, 2, 3], [1, 2, 3], nulls=[False, True]), 1),
        (large_list([0, 1, 3], [9, 5, 5]), 1),
        (large_list([0, 1, 3], [9, 5, 4]), 1),
        (large_list([0, 1, 3], [9, -5, 4]), 1),
        (large_list([0, 0, 2], [5, 4], nulls=[True, False]), 1),
    ],
)
def test_supports_that_arrow_would_let_through(rows, row):
    with refused("damaged", row=row):
        mask_from_arrow(rows)


@pytest.mark.parametrize(
    "bad",
    [
        None,
        [[1]],
        pa.array([1, 2]),
        pa.array([[1.0]]),
        pa.array([[1]]),
        pa.chunked_array([pa.array([[1]], pa.list_(pa.int32()))]),
    ],
    ids=lambda bad: type(bad).__name__,
)
def test_what_is_no_column_of_supports(bad):
    with refused("not a column of supports"):
        mask_from_arrow(bad)


def test_a_bad_support_is_blamed_on_its_rollout(files):
    def descending(masks):
        listed = masks.to_pylist()
        listed[6][4] = listed[6][4][::-1]
        return pa.chunked_array([pa.array(listed, masks.type)])

    path = rewritten(files(delta=False), column("sampling_mask", descending))
    with refused("a support is damaged", sample=6, row=4):
        read_rollouts(path)


def test_coded_sums_beyond_int32_are_refused(files):
    def steep(masks):
        listed = masks.to_pylist()
        listed[6][4] = [2**31 - 1] * len(listed[6][4])
        return pa.chunked_array([pa.array(listed, masks.type)])

    path = rewritten(files(delta=True), column("sampling_mask_deltas", steep))
    with refused("a support is damaged", sample=6, row=4):
        read_rollouts(path)


# Arguments


class BytesPath:
    def __fspath__(self):
        return b"r.arrow"


@pytest.mark.parametrize(
    "path",
    [
        *("r.json", "r", "r.arrow.gz", ".arrow", 7, None, b"r.arrow", BytesPath()),
        *("r\0.arrow", "r\ud800.arrow", "\0/r.parquet", "r.\ud800"),
    ],
    ids=ascii,
)
def test_paths_end_in_arrow_or_parquet(path):
    for call in (read_info, read_rollouts, lambda p: write_rollouts(p, [])):
        with refused("path is out of range"):
            call(path)


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes on Linux alone")
def test_a_file_name_that_is_not_utf8(tmp_path):
    for ending in ENDINGS:
        path = tmp_path / os.fsdecode(b"r\xff" + ending.encode())
        assert write_rollouts(path, ROLLOUTS) == len(ROLLOUTS)
        for memory_map in (True, False):
            assert read_rollouts(path, memory_map=memory_map) == ROLLOUTS
        path.write_bytes(b"damage")
        with refused("\ufffd" + ending + " is damaged"):
            read_info(path)


@pytest.mark.skipif(os.name != "posix", reason="named pipes are POSIX's")
def test_only_regular_files_are_read(tmp_path):
    for ending in ENDINGS:
        path = tmp_path / f"r{ending}"
        os.mkfifo(path)
        for call in (read_info, read_rollouts):
            with refused("path is out of range") as caught:
                call(path)
            assert caught.value.got == f"r{ending}, a 'p'"
        link = tmp_path / f"null{ending}"
        link.symlink_to(os.devnull)
        with refused("path is out of range"):
            read_info(link)


@pytest.mark.parametrize("bad", [3, None, [[1]], RolloutSamplingMask], ids=str)
def test_only_masks_become_columns_of_supports(bad):
    with refused("not a sampling mask"):
        mask_to_arrow(bad)


def test_a_file_that_is_not_there_is_not_damaged(tmp_path):
    for ending in ENDINGS:
        with pytest.raises(FileNotFoundError):
            read_rollouts(tmp_path / f"r{ending}")
        (tmp_path / f"d{ending}").mkdir()
        with pytest.raises(IsADirectoryError):
            read_rollouts(tmp_path / f"d{ending}")
        with pytest.raises(FileNotFoundError):
            write_rollouts(tmp_path / "nowhere" / f"r{ending}", [])


@pytest.mark.parametrize(
    "bad",
    [
        {"rank": 2, "world_size": 2},
        {"rank": -1},
        {"rank": 1},
        {"rank": 0, "world_size": 0},
        {"world_size": 1.0},
        {"row_groups": [3]},
        {"row_groups": [-1]},
        {"row_groups": [0.0]},
        {"row_groups": 1},
        {"memory_map": 1},
    ],
    ids=str,
)
def test_what_cannot_be_read(files, bad):
    path = files()
    for call in (read_rollouts, iter_rollouts, lambda p, **o: read_columns(p, ["loss_mask"], **o)):
        with pytest.raises(ReplayError):
            call(path, **bad)


@pytest.mark.parametrize("bad", [[], ["tokens"], "tokens", None, [None], ["index"]], ids=str)
def test_columns_are_fields(files, bad):
    with refused("columns is out of range"):
        read_columns(files(), bad)


@pytest.mark.parametrize(
    "bad",
    [
        {"rollouts_per_group": 0},
        {"rollouts_per_group": 65537},
        {"rollouts_per_group": 1.0},
        {"compression": "gzip"},
        {"compression": True},
        {"compression": np.zeros(2)},
        {"delta": 1},
    ],
    ids=str,
)
def test_options_of_writing(tmp_path, bad):
    with pytest.raises(ReplayError):
        write_rollouts(tmp_path / "r.arrow", ROLLOUTS, **bad)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "bad", [None, 7, "ab", {}, np.zeros(2)], ids=lambda bad: type(bad).__name__
)
def test_only_rollouts_are_written(tmp_path, bad):
    path = tmp_path / "r.arrow"
    with refused("not a rollout"):
        write_rollouts(path, bad)
    with refused("not a rollout", sample=5):
        write_rollouts(path, [*ROLLOUTS[:5], bad], rollouts_per_group=2)
    assert list(tmp_path.iterdir()) == []


def test_text_that_is_no_unicode(tmp_path):
    for bad in ({"finish_reason": "\ud800"}, {"weight_versions": [("\udfff", 0, 12)]}):
        with refused("cannot be stored", sample=1):
            write_rollouts(
                tmp_path / "r.arrow", [ROLLOUTS[0], dataclasses.replace(ROLLOUTS[1], **bad)]
            )


def test_without_pyarrow_the_extra_is_named():
    code = "import sys\nsys.modules['pyarrow'] = None\nimport rlreplay.storage"
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert "ImportError" in finished.stderr.splitlines()[-1]
    assert "rlreplay[io]" in finished.stderr.splitlines()[-1]
