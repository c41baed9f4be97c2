"""What several test modules draw from: ragged micro-batches, and layouts written out cell by cell.

Nothing here uses the library's own arithmetic: supports are Python lists and layouts are Python
lists that are literally padded, cut and handed out, so that both can serve as oracles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st

from rlreplay.errors import ReplayError
from rlreplay.layout import RowLayout
from rlreplay.parallel import ParallelState
from rlreplay.sampling_mask import RolloutSamplingMask

# Kinds of support, in the proportion in which `make_batch` deals them out.
_KINDS = ("ordinary", "unrestricted", "singleton", "ordinary", "ordinary")

FAKE_GROUP: Any = object()
"""Stands for a process group; a collective over it raises, but for `agreeing_peers`."""


def parallel_state(
    *, tp_rank: int = 0, tp_size: int = 1, cp_rank: int = 0, cp_size: int = 1
) -> ParallelState:
    """A rank of a world that isn't there."""
    tp_group = FAKE_GROUP if tp_size > 1 else None
    cp_group = FAKE_GROUP if cp_size > 1 else None
    return ParallelState(tp_rank, tp_size, tp_group, cp_rank, cp_size, cp_group)


@contextmanager
def agreeing_peers() -> Iterator[list[list[int]]]:
    """The other ranks of `FAKE_GROUP` agree to whatever this one tells them.

    Yields what is told, one entry a collective. Any other collective fails the test: results and
    refusals come out of this rank alone.
    """
    told: list[list[int]] = []

    def all_reduce(values: torch.Tensor, op: Any = None, group: Any = None) -> None:
        assert group is FAKE_GROUP
        assert op == dist.ReduceOp.MAX
        assert values.dtype == torch.int64
        assert values.shape == (4,)
        told.append(values.tolist())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        yield told


@contextmanager
def refused(
    match: str,
    *,
    sample: int | None = None,
    row: int | None = None,
    kind: type[ReplayError] = ReplayError,
) -> Iterator[pytest.ExceptionInfo[ReplayError]]:
    """A refusal of exactly this kind, that blames exactly this place, with all its parts."""
    with pytest.raises(ReplayError, match=match) as caught:
        yield caught
    error = caught.value
    assert type(error) is kind
    assert (error.sample, error.row) == (sample, row)
    assert error.expected
    assert error.got
    assert error.consequence


# Micro-batches


class MicroBatch(NamedTuple):
    """What a trainer holds of a micro-batch.

    `supports[i][r]` is the support of response token r of sample i as a sorted list, or None where
    it is unrestricted; `masks` say the same.
    """

    tokens: list[npt.NDArray[np.int64]]
    total_lengths: list[int]
    response_lengths: list[int]
    masks: list[RolloutSamplingMask]
    vocab_size: int
    supports: list[list[list[int] | None]]

    def sampled(self, sample: int) -> list[int]:
        """The response tokens of a sample."""
        prompt = self.total_lengths[sample] - self.response_lengths[sample]
        return self.tokens[sample].tolist()[prompt:]

    def dense_support(self, sample: int, columns: int | None = None) -> npt.NDArray[np.bool_]:
        """bool `[response_length, columns]`, filled id by id; false past the vocabulary."""
        shape = (self.response_lengths[sample], columns or self.vocab_size)
        dense = np.zeros(shape, dtype=np.bool_)
        for row, ids in enumerate(self.supports[sample]):
            for token in range(self.vocab_size) if ids is None else ids:
                dense[row, token] = True
        return dense


def make_batch(
    rng: np.random.Generator,
    lengths: tuple[Sequence[int], Sequence[int]] | None = None,
    *,
    num_samples: int = 3,
    max_prompt: int = 5,
    max_response: int = 8,
    vocab_size: int = 17,
    max_support: int = 6,
    kinds: Sequence[Literal["ordinary", "singleton", "unrestricted"]] = _KINDS,
) -> MicroBatch:
    """A micro-batch whose sampled tokens are all in their supports.

    Args:
        lengths: total and response lengths; drawn where not given, with responses of 1 or more.
        max_support: largest size of an ordinary row, whose smallest is 2.
        kinds: dealt out to the rows in turn and shuffled: a batch of five rows or more has one of
            each kind.
    """
    if lengths is None:
        response = rng.integers(1, max_response + 1, num_samples)
        lengths = (response + rng.integers(1, max_prompt + 1, num_samples)).tolist(), response
    total, response_lengths = [int(n) for n in lengths[0]], [int(n) for n in lengths[1]]
    tokens = [rng.integers(0, vocab_size, n) for n in total]
    dealt = iter(rng.permutation(np.resize(kinds, sum(response_lengths))).tolist())
    supports = [
        [_support(rng, next(dealt), int(y), vocab_size, max_support) for y in seq[n - r :]]
        for seq, n, r in zip(tokens, total, response_lengths, strict=True)
    ]
    masks = [RolloutSamplingMask.from_mask_list(s, allow_unrestricted=True) for s in supports]
    return MicroBatch(tokens, total, response_lengths, masks, vocab_size, supports)


def _support(
    rng: np.random.Generator, kind: str, token: int, vocab_size: int, max_support: int
) -> list[int] | None:
    if kind == "unrestricted":
        return None
    size = 1 if kind == "singleton" else int(rng.integers(2, max_support + 1))
    others = [j for j in range(vocab_size) if j != token]
    return sorted([token, *rng.choice(others, size - 1, replace=False).tolist()])


@st.composite
def ragged_lengths(
    draw: st.DrawFn,
    *,
    min_samples: int = 1,
    max_samples: int = 4,
    max_prompt: int = 6,
    max_response: int = 12,
) -> tuple[list[int], list[int]]:
    """Total and response lengths: prompts from 1 token, responses from none."""
    sample = st.tuples(st.integers(1, max_prompt), st.integers(0, max_response))
    drawn = draw(st.lists(sample, min_size=min_samples, max_size=max_samples))
    return [prompt + response for prompt, response in drawn], [response for _, response in drawn]


@st.composite
def micro_batches(
    draw: st.DrawFn,
    lengths: st.SearchStrategy[tuple[list[int], list[int]]] | None = None,
    *,
    max_vocab: int = 24,
) -> MicroBatch:
    """Micro-batches of any lengths, with supports up to the whole vocabulary."""
    drawn = draw(ragged_lengths() if lengths is None else lengths)
    vocab_size = draw(st.integers(3, max_vocab))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    support = draw(st.integers(2, vocab_size))
    return make_batch(rng, drawn, vocab_size=vocab_size, max_support=support)


# Layouts, cell by cell

Cell = tuple[int, int] | None
"""What a logits row holds: (sample, position), or None for padding."""


class Scored(NamedTuple):
    """A logits row that scores a response token."""

    local_row: int
    sample: int
    response_index: int


@dataclass(frozen=True)
class LayoutCase:
    """One way to lay a micro-batch out; bshd where it has a `max_seq_len`, thd where not."""

    name: Literal["packed", "padded", "zigzag", "contiguous"]
    total_lengths: list[int]
    response_lengths: list[int]
    cp_size: int = 1
    max_seq_len: int | None = None
    padded_lengths: list[int] | None = None
    stream_length: int | None = None

    @property
    def qkv_format(self) -> Literal["thd", "bshd"]:
        return "thd" if self.max_seq_len is None else "bshd"

    @property
    def cp_layout(self) -> Literal["zigzag", "contiguous"]:
        return "contiguous" if self.name == "contiguous" else "zigzag"

    def layout(self, rank: int = 0) -> RowLayout:
        """The library's layout of this case."""
        options = {
            name: getattr(self, name)
            for name in ("max_seq_len", "padded_lengths", "stream_length")
            if getattr(self, name) is not None
        }
        if self.name in ("zigzag", "contiguous"):
            options |= {"cp_rank": rank, "cp_size": self.cp_size}
        build = getattr(RowLayout, self.name)
        layout = build(self.total_lengths, self.response_lengths, **options)
        assert isinstance(layout, RowLayout)
        return layout

    def cells(self, rank: int = 0) -> list[Cell]:
        """What each logits row of a rank holds."""
        sequences = self._padded_sequences()
        if self.name == "zigzag":
            held = (rank, 2 * self.cp_size - 1 - rank)
            chunks = [_cut(sequence, 2 * self.cp_size) for sequence in sequences]
            return [cell for own in chunks for c in held for cell in own[c]]
        if self.name == "contiguous" and self.qkv_format == "bshd":
            return [cell for s in sequences for cell in _cut(s, self.cp_size)[rank]]
        stream = [cell for sequence in sequences for cell in sequence]
        if self.name == "contiguous":
            stream = _pad(stream, self.stream_length or len(stream), self.cp_size)
            return _cut(stream, self.cp_size)[rank]
        return stream

    def scored(self, rank: int = 0) -> list[Scored]:
        """The rows of a rank that score a response token, in their order on the rank."""
        found = []
        for local_row, cell in enumerate(self.cells(rank)):
            if cell is None:
                continue
            sample, position = cell
            prompt = self.total_lengths[sample] - self.response_lengths[sample]
            index = position + 1 - prompt  # a row scores the token after its own
            if 0 <= index < self.response_lengths[sample]:
                found.append(Scored(local_row, sample, index))
        return found

    def _padded_sequences(self) -> list[list[Cell]]:
        multiple = {"zigzag": 2 * self.cp_size, "packed": 1, "padded": 1}.get(self.name)
        if self.name == "contiguous":
            multiple = self.cp_size if self.qkv_format == "bshd" else 1
        assert multiple is not None
        widths = self.padded_lengths or self.total_lengths
        if self.max_seq_len is not None:
            widths = [self.max_seq_len] * len(self.total_lengths)
        return [
            _pad([(i, position) for position in range(total)], width, multiple)
            for i, (total, width) in enumerate(zip(self.total_lengths, widths, strict=True))
        ]


def _pad(cells: list[Cell], width: int, multiple: int) -> list[Cell]:
    padded = list(cells)
    while len(padded) < width or len(padded) % multiple:
        padded.append(None)
    return padded


def _cut(cells: list[Cell], pieces: int) -> list[list[Cell]]:
    size = len(cells) // pieces
    assert size * pieces == len(cells)
    return [cells[k * size : (k + 1) * size] for k in range(pieces)]


@st.composite
def layout_cases(
    draw: st.DrawFn,
    lengths: st.SearchStrategy[tuple[list[int], list[int]]] | None = None,
    *,
    max_cp: int = 8,
) -> LayoutCase:
    """All layouts, with and without their optional paddings, over 1 to `max_cp` CP ranks."""
    total, response = draw(ragged_lengths() if lengths is None else lengths)
    name = draw(st.sampled_from(["packed", "padded", "zigzag", "contiguous"]))
    bshd = name == "padded" or (name != "packed" and draw(st.booleans()))
    cp_size = draw(st.integers(1, max_cp)) if name in ("zigzag", "contiguous") else 1
    longest = max(total)
    padded = None
    if draw(st.booleans()):
        multiple = 2 * cp_size if name == "zigzag" and not bshd else 1
        extra = [draw(st.integers(0, 2)) for _ in total]
        padded = [(-(-n // multiple) + k) * multiple for n, k in zip(total, extra, strict=True)]
        longest = max(padded)
    stream = None
    if name == "contiguous" and not bshd and draw(st.booleans()):
        stream = (-(-sum(padded or total) // cp_size) + draw(st.integers(0, 3))) * cp_size
    width = longest + draw(st.integers(0, 5)) if bshd else None
    return LayoutCase(name, total, response, cp_size, width, padded, stream)
