"""Engine payloads: the fixtures with their answers, and payloads drawn together with the rollout
that must come out of them."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from rlreplay.errors import ReplayError
from rlreplay.rollout import Rollout
from rlreplay.sampling_mask import RolloutSamplingMask

DATA = Path(__file__).parent / "data"
VOCAB = 97

ANSWERS = json.loads((DATA / "answers.json").read_text())


def fixture(name: str) -> dict[str, Any]:
    """A JSON fixture: `prompt_ids` and `response`."""
    return json.loads((DATA / name).read_text())


def fixture_lines(name: str) -> list[dict[str, Any]]:
    """The chunks of a JSONL fixture."""
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


@dataclass(frozen=True)
class Drawn:
    """A response as a sampler might have drawn it, in plain lists.

    `weights[t]` belongs to `supports[t]`, id by id; ids are in no order.
    """

    prompt: list[int]
    tokens: list[int]
    supports: list[list[int]]
    weights: list[list[int]]
    finish_reason: str | None

    def __len__(self) -> int:
        return len(self.tokens)

    def support_log_probs(self) -> list[list[float]]:
        """log(w / sum(w)), in the order of `supports`, rounded to fp32 as engines send them."""
        exact = [np.log(np.array(w, np.float64) / sum(w)) for w in self.weights]
        return [row.astype(np.float32).tolist() for row in exact]

    def log_probs(self) -> list[float]:
        """The sampled tokens' own."""
        rows = zip(self.tokens, self.supports, self.support_log_probs(), strict=True)
        return [values[support.index(token)] for token, support, values in rows]

    def rollout(self, **other: Any) -> Rollout:
        """What must come out of every payload that holds all of this but the support's weights."""
        fields = {
            "prompt_ids": self.prompt,
            "response_ids": self.tokens,
            "sampling_mask": RolloutSamplingMask.from_mask_list(self.supports),
            "rollout_log_probs": self.log_probs(),
            "finish_reason": self.finish_reason,
        }
        return Rollout(**{**fields, **other})

    def sorted_support_log_probs(self) -> list[float]:
        """`support_log_probs` flat, in the order of the mask's ids."""
        rows = zip(self.supports, self.support_log_probs(), strict=True)
        ascending = (sorted(zip(ids, values, strict=True)) for ids, values in rows)
        return [value for row in ascending for _, value in row]


@st.composite
def drawn_responses(draw: st.DrawFn, *, min_size: int = 0, max_size: int = 9) -> Drawn:
    """Responses of few tokens, with supports of 1 to 8 ids out of `VOCAB`."""
    token = st.integers(0, VOCAB - 1)
    support = st.lists(token, min_size=1, max_size=8, unique=True)
    supports = draw(st.lists(support, min_size=min_size, max_size=max_size))
    weights = [
        draw(st.lists(st.integers(1, 1000), min_size=len(row), max_size=len(row)))
        for row in supports
    ]
    return Drawn(
        prompt=draw(st.lists(token, min_size=1, max_size=5)),
        tokens=[draw(st.sampled_from(row)) for row in supports],
        supports=supports,
        weights=weights,
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
    )


def cuts(n: int) -> st.SearchStrategy[list[int]]:
    """Where to cut `n` rows into chunks: ascending ends, the last one `n`; chunks may be empty."""
    return st.lists(st.integers(0, n), max_size=5).map(lambda ends: [*sorted(ends), n])


def spans(ends: list[int]) -> list[tuple[int, int]]:
    """(start, end) of each chunk."""
    return list(itertools.pairwise([0, *ends]))


# JSON of any shape, with what JSON parsers let through beyond the standard (NaN, Infinity).
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**400])
    | st.floats()
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["type", "version", "start", "end", "logprob"]), inner)
    ),
    max_leaves=8,
)


def tensors_that_numpy_lacks(numbers: list[int]) -> dict[str, Any]:
    """The numbers as tensors and arrays that hold them, but not as a plain array can."""
    floats, ints = torch.tensor(numbers, dtype=torch.float32), torch.tensor(numbers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls some of these prototypes, others deprecated
        return {
            "sparse": ints.to_sparse(),
            "sparse matrix": ints[None].to_sparse_csr(),
            "mkldnn": floats.to_mkldnn(),
            "quantised": torch.quantize_per_tensor(floats, 1.0, 0, torch.qint32),
            "meta": ints.to("meta"),
            "nested": torch.nested.nested_tensor([floats]),
            "jagged": torch.nested.nested_tensor([ints], layout=torch.jagged),
            "subclass": FakeTensorMode().from_tensor(ints),
            "complex": floats.to(torch.complex64),
            "float8": floats.to(torch.float8_e4m3fn),
            "scalar": ints[0],
            "masked": np.ma.masked_array(numbers, mask=[True] + [False] * (len(numbers) - 1)),
        }


def tensors_of_no_integers(numbers: list[int]) -> dict[str, Any]:
    """Everything that can look like ids and is refused as such."""
    ints = torch.tensor(numbers)
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    return {
        **tensors_that_numpy_lacks(numbers),
        **{name: ints.to(dtype) for name, dtype in kinds.items()},
        "bool": ints.bool(),
        "list of tensors": list(ints),
        "list of 0-d arrays": list(map(np.array, numbers)),
        "list of flags": [torch.tensor(True)] * len(numbers),
        "list of time spans": list(map(np.timedelta64, numbers)),
        "gradient": ints.float().requires_grad_(),
    }


NO_INTEGERS = list(tensors_of_no_integers([1, 2]))
NO_PLAIN_TENSORS = list(tensors_that_numpy_lacks([1, 2]))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside a JSON value, itself included."""
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *itertools.chain.from_iterable(places(v, (*path, k)) for k, v in inside)]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of a JSON value with the value at `path` exchanged."""
    if not path:
        return new
    key, *rest = path
    items = dict(value) if isinstance(value, dict) else list(value)
    items[key] = replaced(value[key], tuple(rest), new)
    return items


@st.composite
def spoiled(draw: st.DrawFn, payload: Any) -> Any:
    """The payload with one to three of its values exchanged for junk, or cut out."""
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(payload)))
        if path and draw(st.booleans()) and draw(st.booleans()):
            parent = payload
            for key in path[:-1]:
                parent = parent[key]
            smaller = dict(parent) if isinstance(parent, dict) else list(parent)
            del smaller[path[-1]]
            payload = replaced(payload, path[:-1], smaller)
        else:
            payload = replaced(payload, path, draw(JUNK))
    return payload


def check_sound(rollout: Any, vocab_size: int) -> None:
    """Whatever a loader lets through must hold together."""
    assert isinstance(rollout, Rollout)
    n = len(rollout)
    assert rollout.prompt_ids.size >= 1
    assert rollout.loss_mask.shape == (n,)
    assert len(rollout.sampling_mask) == n
    assert rollout.sampling_mask.contains(rollout.response_ids).all()
    assert rollout.sampling_mask.max_id < vocab_size
    assert np.all((rollout.tokens >= 0) & (rollout.tokens < vocab_size))
    for values, size in (
        (rollout.rollout_log_probs, n),
        (rollout.support_log_probs, rollout.sampling_mask.ids.size),
    ):
        if values is not None:
            assert values.shape == (size,)
            assert np.isfinite(values).all()
            assert values.max(initial=0) < 1e-6
    ends = [span.end for span in rollout.weight_versions]
    starts = [span.start for span in rollout.weight_versions]
    assert not ends or (starts == [0, *ends[:-1]] and ends[-1] == n)


def sound_or_refused(vocab_size: int, load: Callable[[], Rollout | list[Rollout]]) -> None:
    """Whatever comes in: valid rollouts or a `ReplayError`, nothing else."""
    try:
        loaded = load()
    except ReplayError:
        return
    for rollout in [loaded] if isinstance(loaded, Rollout) else loaded:
        check_sound(rollout, vocab_size)
