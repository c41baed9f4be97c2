"""Random micro-batches, their float64 answers, and logits cut for a rank, all by brute force.

Nothing here uses `RowLayout` or `ReplayPlan`: layouts are made by padding and cutting whole
sequences as a trainer does, so that the library's row map is tested against something else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rlreplay import RolloutSamplingMask
from rlreplay.kernels.reference import dense_scores

# What stands where nothing may be read: sums over it would be off by far more than rounding.
GARBAGE = 50.0


@dataclass(frozen=True)
class Batch:
    """A ragged micro-batch. `logits[i]` are the whole, unsharded rows of sample i, [total, V]."""

    tokens: list[np.ndarray]
    total_lengths: list[int]
    response_lengths: list[int]
    masks: list[RolloutSamplingMask] | None
    vocab_size: int
    logits: list[Tensor]

    @property
    def lengths(self) -> dict[str, list[int]]:
        return {"total_lengths": self.total_lengths, "response_lengths": self.response_lengths}

    def supports(self) -> list[Tensor]:
        """bool [response, vocab] of each sample."""
        masks = self.masks or [RolloutSamplingMask.full(n) for n in self.response_lengths]
        return [torch.from_numpy(m.to_dense(self.vocab_size)) for m in masks]


def make_batch(
    seed: int,
    *,
    samples: int = 5,
    max_prompt: int = 5,
    max_response: int = 9,
    vocab_size: int = 23,
    dtype: torch.dtype = torch.float32,
    with_masks: bool = True,
) -> Batch:
    """A batch that always holds a response of one token, a prompt of one token, a sample whose
    rows are all unrestricted, a sample of forced rows, and mixed rows elsewhere."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(1, max_prompt + 1, samples)
    responses = rng.integers(1, max_response + 1, samples)
    prompts[0], responses[samples // 2] = 1, 1
    total = (prompts + responses).tolist()
    tokens = [rng.integers(0, vocab_size, n) for n in total]
    kinds = rng.permutation(["free", "forced", *["mixed"] * (samples - 2)])
    masks = [
        make_mask(rng, t[p:], vocab_size, kind)
        for t, p, kind in zip(tokens, prompts, kinds, strict=True)
    ]
    logits = [torch.from_numpy(rng.normal(0, 3, (n, vocab_size))).to(dtype) for n in total]
    return Batch(
        tokens, total, responses.tolist(), masks if with_masks else None, vocab_size, logits
    )


def make_mask(
    rng: np.random.Generator, sampled: np.ndarray, vocab_size: int, kind: str = "mixed"
) -> RolloutSamplingMask:
    """Supports for some sampled tokens: "free" (unrestricted), "forced", or "mixed" rows."""
    if kind == "free":
        return RolloutSamplingMask.full(len(sampled))
    if kind == "forced":
        return RolloutSamplingMask.forced(sampled)
    rows: list[list[int] | None] = []
    for token in sampled.tolist():
        size = int(rng.choice([1, 2, vocab_size // 2, vocab_size]))
        others = rng.permutation(np.setdiff1d(np.arange(vocab_size), [token]))
        row = rng.permutation([token, *others[: size - 1].tolist()]).tolist()
        rows.append(None if rng.random() < 0.15 else row)
    return RolloutSamplingMask.from_mask_list(rows, allow_unrestricted=True)


def dense_answers(
    batch: Batch,
    weights: dict[str, list[Tensor]],
    *,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
    """All scores of every whole response by plain torch in `dtype`, and the gradient
    [total, V] of each sample's logits for the objective that weighs the scores by `weights`."""
    leaves = [rows.to(dtype, copy=True).requires_grad_() for rows in batch.logits]
    scores: dict[str, list[Tensor]] = {name: [] for name in weights}
    objective = torch.zeros((), dtype=dtype)
    for i, support in enumerate(batch.supports()):
        response, total = batch.response_lengths[i], batch.total_lengths[i]
        rows = leaves[i][total - response - 1 : total - 1]
        y = torch.from_numpy(batch.tokens[i][total - response :])
        values = dense_scores(rows, y, support, temperature=temperature)
        for name in weights:
            scores[name].append(values[name].detach())
            objective = objective + (values[name] * weights[name][i].to(dtype)).sum()
    return scores, list(torch.autograd.grad(objective, leaves))


def random_weights(batch: Batch, names: Any, seed: int = 0) -> dict[str, list[Tensor]]:
    """float64 weights, one for each score of each response token."""
    rng = np.random.default_rng(seed)
    return {
        name: [torch.from_numpy(rng.normal(size=n)) for n in batch.response_lengths]
        for name in names
    }


Format = Literal["thd", "bshd"]
CpLayout = Literal["zigzag", "contiguous"]


def pad_rows(rows: Tensor, length: int, filler: float) -> Tensor:
    extra = rows.new_full((length - rows.shape[0], *rows.shape[1:]), filler)
    return torch.cat([rows, extra])


def zigzag_part(rows: Tensor, cp_rank: int, cp_size: int) -> Tensor:
    chunks = rows.chunk(2 * cp_size)
    return torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])


def cut_rows(
    samples: list[Tensor],
    *,
    qkv_format: Format,
    cp_layout: CpLayout,
    cp_rank: int = 0,
    cp_size: int = 1,
    padded_lengths: list[int] | None = None,
    max_seq_len: int | None = None,
    filler: float = GARBAGE,
) -> Tensor:
    """Whole rows [total, ...] of each sample to what one CP rank holds, [1, T, ...] or
    [B, S, ...], by padding and cutting."""
    multiple = 2 * cp_size if cp_layout == "zigzag" else cp_size
    if qkv_format == "bshd":
        width = max_seq_len or max(rows.shape[0] for rows in samples)
        width = -(-width // multiple) * multiple
        padded = [pad_rows(rows, width, filler) for rows in samples]
        if cp_layout == "zigzag" and cp_size > 1:
            return torch.stack([zigzag_part(rows, cp_rank, cp_size) for rows in padded])
        return torch.stack([rows.chunk(cp_size)[cp_rank] for rows in padded])
    lengths = padded_lengths or [rows.shape[0] for rows in samples]
    if cp_layout == "zigzag" and cp_size > 1:
        lengths = [-(-n // multiple) * multiple for n in lengths]
        parts = [
            zigzag_part(pad_rows(rows, n, filler), cp_rank, cp_size)
            for rows, n in zip(samples, lengths, strict=True)
        ]
        return torch.cat(parts)[None]
    stream = torch.cat([pad_rows(r, n, filler) for r, n in zip(samples, lengths, strict=True)])
    stream = pad_rows(stream, -(-stream.shape[0] // cp_size) * cp_size, filler)
    return stream.chunk(cp_size)[cp_rank][None]


def cut_columns(
    rows: Tensor, tp_rank: int, tp_size: int, *, extra: int = 0, filler: float = GARBAGE
) -> Tensor:
    """A vocab shard of [..., V], the vocabulary padded to equal shards and `extra` columns each."""
    width = -(-rows.shape[-1] // tp_size) + extra
    padded = rows.new_full((*rows.shape[:-1], width * tp_size), filler)
    padded[..., : rows.shape[-1]] = rows
    return padded[..., tp_rank * width : (tp_rank + 1) * width].clone()


def held_responses(batch: Batch, values: list[Tensor], **layout: Any) -> list[Tensor]:
    """Which of each response's `values` one CP rank holds, in the order of the response."""
    held = []
    for i, response in enumerate(batch.response_lengths):
        # Mark the scoring position of each response token, cut, and see what is left.
        marks = [torch.full((n,), -1) for n in batch.total_lengths]
        first = batch.total_lengths[i] - response - 1
        marks[i][first : first + response] = torch.arange(response)
        local = cut_rows(marks, **layout, filler=-1).flatten()
        held.append(values[i][local[local >= 0].sort().values])
    return held


def error_budget(plain: list[Tensor], exact: list[Tensor], dtype: torch.dtype) -> float:
    """How far results in `dtype` may be off: twice what the same computation in plain torch is
    off by anywhere in the batch, and one rounding of the batch's largest value.

    Args:
        plain: plain torch at the accumulation type, rounded to `dtype` where that is lower.
        exact: plain torch in float64.
    """
    errors = torch.cat(
        [(p.to(e.device).double() - e).abs().flatten() for p, e in zip(plain, exact, strict=True)]
    )
    largest = torch.cat([e.abs().flatten() for e in exact]).max()
    return float(2 * errors.max() + torch.finfo(dtype).eps * largest)


def assert_within(actual: Tensor, exact: Tensor, budget: float, what: str) -> None:
    assert actual.shape == exact.shape, f"{what}: {actual.shape} is not {exact.shape}"
    values = actual.detach().to(exact.device).double()
    error = float((values - exact).abs().max()) if actual.numel() else 0.0
    assert error <= budget, f"{what}: error {error:.3e} exceeds the budget {budget:.3e}"
