"""Random damage to valid payloads of every form: what is loaded must be what the payload says.

    python tests/fuzz/fuzz_loaders.py --cases 100000 --seed 0 [--form NAME] [--first 1234]

Each case makes a valid payload, damages it in one to three places, and loads it. It must end in a
`ReplayError`, or in rollouts that hold together and are what a slow second reading of the damaged
payload gives. Any other exception, and any result that differs, is a failure: it is printed with
the number of the case, which `--form`, `--seed` and `--first` bring back. Prints counts a form;
exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from rlreplay.errors import ReplayError
from rlreplay.rollout import Rollout
from rlreplay.sampling_mask import RolloutSamplingMask
from tests.fast.payloads import VOCAB, check_sound
from tests.fuzz.forms import FORMS, Form, agrees, draw, file_form, read_of

SHOWN = 8  # failures


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


_PLAIN_JUNK: tuple[Callable[[], Any], ...] = tuple(
    (lambda value=value: copy.copy(value))  # type: ignore[misc]
    for value in (
        *(None, True, False, -1, 0, 1, 2, 1.0, 0.5, -0.0, float("nan"), float("inf")),
        *(VOCAB, 2**31, 2**31 - 1, 2**32 + 1, 2**63, 2**64, 10**9, 10**18, 10**400, -(2**63)),
        *("", "7", "abc", '{"output_ids": [1, 2', b"", b"1234", b"123", bytearray(8)),
        *([], [[]], {}, (), [None], ["7"], [True], [1.0], [-1], {"type": "stop"}, set(), object()),
        *(
            np.int64(3),
            np.float32(-0.5),
            np.bool_(True),
            np.array(3),
            np.zeros(0),
            np.zeros((2, 2)),
        ),
        *(np.array([True]), np.array(["a"]), np.array([None]), np.timedelta64(3, "s")),
        *(np.array([1, 2], np.uint64), np.array([2**64 - 1], np.uint64), np.array([0.5])),
        *(torch.tensor(3), torch.tensor([1, 2]), torch.tensor([0.5]), torch.zeros(2, 2)),
        *(torch.tensor([True]), torch.zeros(1, dtype=torch.bfloat16), torch.zeros(2).to("meta")),
        *(range(3), range(10**18), SimpleNamespace(), slice(3), Ellipsis, NotImplemented),
    )
)
JUNK = (*_PLAIN_JUNK, lambda: nested(3), lambda: nested(5000), lambda: iter([1]))


# Damage


def children(value: Any) -> list[Any]:
    """The keys of what can be damaged inside a value."""
    if isinstance(value, dict):
        return list(value)
    if isinstance(value, list | tuple):
        return list(range(len(value)))
    return list(vars(value)) if isinstance(value, SimpleNamespace) else []


def child(value: Any, key: Any) -> Any:
    return getattr(value, key) if isinstance(value, SimpleNamespace) else value[key]


def with_child(value: Any, key: Any, new: Any) -> Any:
    """A copy of the value with one child exchanged."""
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**{**vars(value), key: new})
    if isinstance(value, tuple):
        return (*value[:key], new, *value[key + 1 :])
    own = copy.copy(value)
    own[key] = new
    return own


def damaged(rng: random.Random, value: Any) -> Any:
    """The payload damaged in one place, any depth being as likely as the others."""
    keys = children(value)
    if keys and rng.random() < 0.8:
        key = rng.choice(keys)
        return with_child(value, key, damaged(rng, child(value, key)))
    if rng.random() < 0.4:
        return rng.choice(JUNK)()
    for kinds, damage in DAMAGE:
        if isinstance(value, kinds):
            return damage(rng, value)
    return rng.choice(JUNK)()


def damaged_number(rng: random.Random, value: Any) -> Any:
    with np.errstate(all="ignore"):
        ways = [
            *(lambda: value + 1, lambda: value - 1, lambda: -value, lambda: float(value)),
            *(lambda: str(value), lambda: bool(value), lambda: value + 2**32, lambda: [value]),
            *(lambda: value * 1.0001, lambda: np.int32(value), lambda: np.float64(value)),
        ]
        try:
            return rng.choice(ways)()
        except (OverflowError, ValueError):
            return None


def damaged_list(rng: random.Random, value: Any) -> Any:
    items = list(value)
    at = rng.randrange(len(items)) if items else 0
    way = rng.randrange(12)
    if way == 0:
        items = items[:at] + items[at + 1 :]
    elif way == 1:
        items[at:at] = items[at : at + 1]
    elif way == 2:
        rng.shuffle(items)
    elif way == 3:
        items = items[:at]
    elif way == 4:
        items.insert(at, rng.choice(JUNK)())
    elif way == 5:
        items = items * 2
    elif way == 6:
        items = items[::-1]
    elif way == 7 and items:
        items[at] = items[rng.randrange(len(items))]
    elif way == 8:
        return tuple(items)
    elif way == 9:
        return as_array(items)
    elif way == 10 and all(type(item) is int and abs(item) < 2**63 for item in items):
        return torch.tensor(items)
    elif way == 11:
        return dict(enumerate(items))
    return type(value)(items)


def as_array(items: list[Any]) -> Any:
    try:
        return np.array(items)
    except (ValueError, TypeError, OverflowError, RuntimeError, MemoryError):
        return np.zeros(len(items))


def damaged_dict(rng: random.Random, value: dict[Any, Any]) -> Any:
    own, keys = dict(value), list(value)
    if not keys:
        return None
    key, other = rng.choice(keys), rng.choice(keys)
    way = rng.randrange(5)
    if way == 0:
        del own[key]
    elif way == 1:
        own[key] = value[other]
    elif way == 2:
        own[key], own[other] = value[other], value[key]
    elif way == 3:
        own[f"{key}s"] = own.pop(key)
    else:
        return list(own.values())
    return own


def damaged_object(rng: random.Random, value: SimpleNamespace) -> Any:
    fields = damaged_dict(rng, vars(value))
    as_object = isinstance(fields, dict) and rng.random() < 0.8
    return SimpleNamespace(**fields) if as_object else fields


def damaged_text(rng: random.Random, value: Any) -> Any:
    at = rng.randrange(len(value)) if value else 0
    junk = "A" if isinstance(value, str) else b"\x01"
    return rng.choice(
        [value[:at], value[:-1], value[at:], value + junk, value[:at] + junk + value[at + 1 :]]
        + ([value + "=", value[:at] + "é", value.lower()] if isinstance(value, str) else [])
    )


def damaged_array(rng: random.Random, value: Any) -> Any:
    """An array or tensor of another type, shape or content."""
    if isinstance(value, torch.Tensor) and value.is_meta:
        return None
    own = value.copy() if isinstance(value, np.ndarray) else value.clone()
    tensor = isinstance(own, torch.Tensor)
    kinds: list[Any] = (
        [torch.bool, torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.complex64]
        if tensor
        else [
            np.bool_,
            np.float32,
            np.int8,
            np.uint8,
            np.uint64,
            np.int64,
            object,
            np.complex64,
            "U4",
        ]
    )
    way = rng.randrange(9)
    size = own.numel() if tensor else own.size
    if way < 3 and size:
        flat = own.reshape(-1)
        junk = [0, 1, -1, 2, VOCAB, 127, 255, 2**31 - 1, float("nan"), float("inf"), -float("inf")]
        try:
            flat[rng.randrange(size)] = rng.choice(junk)
        except (OverflowError, ValueError, RuntimeError):
            flat[0] = 0
        return flat.reshape(value.shape)
    if way == 3:
        kind = rng.choice(kinds)
        try:
            with np.errstate(all="ignore"):
                return own.to(kind) if tensor else own.astype(kind)
        except (ValueError, TypeError, OverflowError, RuntimeError):
            return None
    if way == 4:
        return own[: rng.randint(0, len(own))] if own.ndim else own
    if way == 5:
        return own[None]
    if way == 6:
        return own.reshape(-1)
    if way == 7:
        return own.T if own.ndim == 2 else (torch.cat([own, own]) if tensor and own.ndim else own)
    return own.tolist()


DAMAGE: tuple[tuple[Any, Callable[[random.Random, Any], Any]], ...] = (
    (bool, lambda rng, value: not value),
    ((int, float), damaged_number),
    ((list, tuple), damaged_list),
    (dict, damaged_dict),
    (SimpleNamespace, damaged_object),
    ((str, bytes), damaged_text),
    ((np.ndarray, torch.Tensor), damaged_array),
)


# Checking


def check(form: Form, payload: Any) -> str:
    """ "refused" or "accepted"; whatever else comes of it is an exception."""
    try:
        loaded = form.load(payload)
    except ReplayError as error:
        return "refused" if str(error) else "refused without a word"
    check_loaded(loaded)
    reads, problems = read_of(loaded), []
    for decode in form.decoders:
        try:
            reading = decode(payload)
        except Exception as error:
            problems.append(error)
            continue
        if len(reading) == len(reads) and all(map(agrees, reads, reading)):
            return "accepted"
        problems.append(AssertionError(f"loaded {reads}, but the payload says {reading}"))
    raise problems[-1]


def check_loaded(loaded: Any) -> None:
    if isinstance(loaded, RolloutSamplingMask):
        assert loaded.lengths.all()
        assert loaded.max_id < VOCAB
        return
    for rollout in [loaded] if isinstance(loaded, Rollout) else loaded:
        check_sound(rollout, VOCAB)


def one_case(form: Form, seed: str) -> str:
    rng = random.Random(seed)
    payload = form.make(draw(rng))
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 2, 3))):
        payload = damaged_payload(rng, form, payload)
    return check(form, payload)


def damaged_payload(rng: random.Random, form: Form, payload: Any) -> Any:
    if isinstance(payload, bytes):  # a file is made of bytes, whatever happens to it
        return damaged_text(rng, payload)
    if form.whole:
        return damaged(rng, payload)
    name = rng.choice(list(payload))
    return {**payload, name: damaged(rng, payload[name])}


def forms(folder: Path) -> dict[str, Form]:
    """All forms; files too where `rlreplay.storage` is there with what it needs."""
    found = dict(FORMS)
    if importlib.util.find_spec("rlreplay.storage") and importlib.util.find_spec("pyarrow"):
        for suffix in ("parquet", "arrow"):
            found[f"file, {suffix}"] = file_form(folder / f"rollouts.{suffix}")
    return found


def run(names: list[str], table: dict[str, Form], cases: int, first: int, seed: int) -> int:
    counts: dict[str, Counter[str]] = {name: Counter() for name in names}
    failures = 0
    started = time.perf_counter()
    for case in range(first, first + cases):
        name = names[case % len(names)]
        try:
            counts[name][one_case(table[name], f"{seed}/{name}/{case}")] += 1
        except Exception:
            counts[name]["failed"] += 1
            failures += 1
            if failures <= SHOWN:
                print(f"\n--form '{name}' --seed {seed} --first {case} --cases 1")
                traceback.print_exc(limit=-6, file=sys.stdout)
    width = max(map(len, names))
    print(f"{'form':{width}} {'refused':>8} {'accepted':>8} {'failed':>8}")
    for name, count in counts.items():
        print(f"{name:{width}}", *(f"{count[k]:8}" for k in ("refused", "accepted", "failed")))
    print(f"{cases} cases, {failures} failed, {time.perf_counter() - started:.0f} s")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description="random damage to the payloads of every form")
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--form", help="this form only")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        table = forms(Path(folder))
        names = list(table) if options.form is None else [options.form]
        failures = run(names, table, options.cases, options.first, options.seed)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
