"""Rollouts as files: bytes, and seconds to write and to read, beside JSON and pickle.

    python benchmarks/storage.py [--out benchmarks/results/storage.jsonl]

The same rollouts (prompt, response, supports, log-probs of the sampled tokens, loss mask, weight
version) in every format, written to a file and read back into `Rollout` objects, which must be
equal. Support sizes are geometric, and ids are drawn by popularity (Zipf) out of a vocabulary whose
ids follow popularity loosely, as those of a BPE do. Formats take turns, and the figures are
medians. Ours alone pay for checksums, and for flushing the file to the disk when it is written;
pickle alone checks nothing. Times vary from run to run, bytes do not.

One JSON line a format and size: versions, commit, machine, sizes, bytes, seconds, ratios.
"""

from __future__ import annotations

import argparse
import base64
import json
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from environment import environment

from rlreplay import Rollout, RolloutSamplingMask
from rlreplay.storage import read_columns, read_rollouts, write_rollouts

VOCAB = 151_936
PROMPT = 256
LARGEST_SUPPORT = 1000


# Data


def make_rollouts(responses: int, length: int, mean_ids: float) -> list[Rollout]:
    """From a fixed seed."""
    rng = np.random.default_rng(0)
    # popular ids are low, give or take
    by_popularity = np.argsort(np.log(np.arange(VOCAB) + 10) + rng.normal(0, 1, VOCAB))
    mass = np.cumsum(1 / (np.arange(VOCAB) + 10))
    return [
        _rollout(rng, by_popularity, mass / mass[-1], length, mean_ids) for _ in range(responses)
    ]


def _rollout(
    rng: np.random.Generator,
    by_popularity: npt.NDArray[Any],
    mass: npt.NDArray[Any],
    length: int,
    mean_ids: float,
) -> Rollout:
    sizes = rng.geometric(1 / mean_ids, length).clip(max=LARGEST_SUPPORT)
    keys, missing = np.zeros(0, np.int64), sizes
    while missing.any():  # until the ids that were drawn twice are made up for
        rows = np.repeat(np.arange(length), missing)
        drawn = by_popularity[np.searchsorted(mass, rng.random(rows.size))]
        keys = np.unique(np.concatenate([keys, rows * VOCAB + drawn]))
        missing = sizes - np.bincount(keys // VOCAB, minlength=length)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    ids = keys % VOCAB
    return Rollout(
        prompt_ids=by_popularity[np.searchsorted(mass, rng.random(PROMPT))],
        response_ids=ids[offsets[:-1] + rng.integers(0, sizes)],
        sampling_mask=RolloutSamplingMask(ids, offsets, vocab_size=VOCAB),
        rollout_log_probs=np.where(sizes == 1, 0, -rng.exponential(1, length)),
        weight_versions=[("7", 0, length)],
        finish_reason="stop",
    )


# Formats


class Format(NamedTuple):
    name: str
    ending: str
    write: Callable[[Path, list[Rollout]], Any]
    read: Callable[[Path], list[Rollout]]
    read_masks: Callable[[Path], list[RolloutSamplingMask]] | None = None


def _plain_fields(rollout: Rollout) -> dict[str, Any]:
    """What JSON takes, but for the supports."""
    log_probs = rollout.rollout_log_probs
    assert log_probs is not None
    return {
        "prompt_ids": rollout.prompt_ids.tolist(),
        "response_ids": rollout.response_ids.tolist(),
        "rollout_log_probs": log_probs.tolist(),
        "loss_mask": rollout.loss_mask.tolist(),
        "weight_versions": rollout.weight_versions,
        "finish_reason": rollout.finish_reason,
    }


def _as_lists(rollout: Rollout) -> dict[str, Any]:
    return {**_plain_fields(rollout), "sampling_mask": rollout.sampling_mask.to_mask_list()}


def _of_lists(fields: dict[str, Any]) -> Rollout:
    mask = RolloutSamplingMask.from_mask_list(fields.pop("sampling_mask"))
    return Rollout(**fields, sampling_mask=mask)


def _as_base64(rollout: Rollout) -> dict[str, Any]:
    mask = rollout.sampling_mask
    csr = {"ids": mask.ids, "offsets": mask.offsets.astype(np.int32)}
    coded = {name: base64.b64encode(array).decode() for name, array in csr.items()}
    return {**_plain_fields(rollout), **coded}


def _of_base64(fields: dict[str, Any]) -> Rollout:
    csr = {n: np.frombuffer(base64.b64decode(fields.pop(n)), np.int32) for n in ("ids", "offsets")}
    return Rollout(**fields, sampling_mask=RolloutSamplingMask(**csr))


def _json_format(
    name: str, encode: Callable[[Rollout], Any], decode: Callable[[Any], Rollout]
) -> Format:
    def write(path: Path, rollouts: list[Rollout]) -> None:
        with path.open("w") as file:
            file.writelines(json.dumps(encode(r), separators=(",", ":")) + "\n" for r in rollouts)

    def read(path: Path) -> list[Rollout]:
        with path.open() as file:
            return [decode(json.loads(line)) for line in file]

    return Format(name, ".jsonl", write, read)


def _stored(name: str, ending: str, **options: Any) -> Format:
    return Format(
        name,
        ending,
        lambda path, rollouts: write_rollouts(path, rollouts, **options),
        read_rollouts,
        lambda path: read_columns(path, ["sampling_mask"])["sampling_mask"],
    )


BASELINE = "JSON, nested lists"
FORMATS = (
    _json_format(BASELINE, _as_lists, _of_lists),
    _json_format("JSON, base64 CSR", _as_base64, _of_base64),
    Format(
        "pickle, protocol 5",
        ".pickle",
        lambda path, rollouts: path.write_bytes(pickle.dumps(rollouts, protocol=5)),
        lambda path: pickle.loads(path.read_bytes()),
    ),
    _stored("Arrow, mapped", ".arrow", compression=None),
    _stored("Arrow, lz4 + deltas", ".arrow", compression="lz4"),
    _stored("Arrow, zstd", ".arrow", delta=False),
    _stored("Arrow, zstd + deltas", ".arrow"),
    _stored("Parquet, zstd", ".parquet", delta=False),
    _stored("Parquet, zstd + deltas", ".parquet"),
)


# Measuring


def measure(rollouts: list[Rollout], repeats: int, folder: Path) -> list[dict[str, Any]]:
    """One record a format."""
    seconds: dict[str, dict[str, list[float]]] = {f.name: {} for f in FORMATS}
    sizes = {}
    for _ in range(repeats):
        for form in FORMATS:
            path = folder / f"rollouts{form.ending}"
            times = seconds[form.name]
            timed(times, "write_seconds", lambda f=form, p=path: f.write(p, rollouts))
            sizes[form.name] = path.stat().st_size
            again = timed(times, "read_seconds", lambda f=form, p=path: f.read(p))
            assert again == rollouts, form.name
            del again
            if form.read_masks is not None:
                timed(times, "read_masks_seconds", lambda f=form, p=path: f.read_masks(p))
            path.unlink()
    medians = {
        name: {what: statistics.median(values) for what, values in times.items()}
        for name, times in seconds.items()
    }
    tokens, base = sum(map(len, rollouts)), medians[BASELINE]
    return [
        {
            "format": f.name,
            "bytes": sizes[f.name],
            "bytes_per_token": round(sizes[f.name] / tokens, 2),
            **{what: round(value, 4) for what, value in medians[f.name].items()},
            "smaller": round(sizes[BASELINE] / sizes[f.name], 2),
            "write_speedup": round(base["write_seconds"] / medians[f.name]["write_seconds"], 1),
            "read_speedup": round(base["read_seconds"] / medians[f.name]["read_seconds"], 1),
        }
        for f in FORMATS
    ]


def timed(times: dict[str, list[float]], what: str, call: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    result = call()
    times.setdefault(what, []).append(time.perf_counter() - started)
    return result


def print_table(title: str, records: list[dict[str, Any]]) -> None:
    heads = ("write s", "read s", "masks s", "smaller", "write x", "read x")
    print(f"\n{title}\n{'':24}{'bytes/token':>12}{''.join(f'{head:>9}' for head in heads)}")
    for r in records:
        masks = r.get("read_masks_seconds")
        print(
            f"{r['format']:24}{r['bytes_per_token']:12.2f}{r['write_seconds']:9.3f}"
            f"{r['read_seconds']:9.3f}{'' if masks is None else f'{masks:.3f}':>9}"
            f"{r['smaller']:9.2f}{r['write_speedup']:9.1f}{r['read_speedup']:9.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Files of rollouts beside JSON and pickle")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--responses", type=int, default=512)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--ids", type=float, nargs="+", default=[7.6, 50.0], help="mean ids a row")
    options = parser.parse_args()
    lines = []
    for mean_ids in options.ids:
        rollouts = make_rollouts(options.responses, options.length, mean_ids)
        with tempfile.TemporaryDirectory() as folder:
            records = measure(rollouts, options.repeats, Path(folder))
        tokens = sum(map(len, rollouts))
        sizes = {
            "responses": options.responses,
            "length": options.length,
            "vocab": VOCAB,
            "ids_per_token": round(sum(r.sampling_mask.ids.size for r in rollouts) / tokens, 2),
            "repeats": options.repeats,
        }
        print_table(
            f"{options.responses:,} responses x {options.length:,} tokens, "
            f"{sizes['ids_per_token']} ids a token, beside {BASELINE}",
            records,
        )
        lines += [
            json.dumps({**record, **sizes, **environment("numpy", "pyarrow")}) for record in records
        ]
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a") as file:
            file.writelines(line + "\n" for line in lines)


if __name__ == "__main__":
    main()
