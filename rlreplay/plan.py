"""`ReplayPlan`: one micro-batch's supports and row map, turned once into device tensors.

Shapes: `R` response rows on this rank, `N` support ids of these rows on this rank's vocab shard.
"""

from __future__ import annotations

import functools
import itertools
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlreplay.errors import MissingMaskError, ReplayError
from rlreplay.id_segments import IdSegments
from rlreplay.layout import RowLayout
from rlreplay.parallel import ParallelState
from rlreplay.sampling_mask import (
    BoolArray,
    IdArray,
    IntArray,
    IntArrayLike,
    RolloutSamplingMask,
    check_count,
    check_ids_below,
    frozen,
    integer_array,
    offsets_of,
    row_at,
)

OnMissingToken = Literal["raise", "include"]


_HANDLES = itertools.count()
_PLANS: weakref.WeakValueDictionary[int, ReplayPlan] = weakref.WeakValueDictionary()


class VocabShard(NamedTuple):
    """The columns of the vocabulary that this rank's logits hold."""

    start: int
    """Vocabulary id of column 0."""
    columns: int | None
    """Columns that the logits must have; None where the shard is the whole vocabulary, whose
    logits may be padded at will."""
    valid: int
    """Leading columns that are in the vocabulary; the rest is padding and takes no part."""

    def to_local(self, ids: IntArray | IdArray) -> tuple[IntArray, BoolArray]:
        """Local columns of vocabulary ids, and which of them lie on this shard."""
        local = ids.astype(np.int64) - self.start
        return local, (local >= 0) & (local < self.valid)


@dataclass(frozen=True, eq=False)
class ReplayPlan:
    """What the scores need to know of one micro-batch, on the device. Build it with `build`.

    Score it as often as needed: PPO epochs, actor and reference. All tensors are read-only by
    convention. In `ids`, an unrestricted row stands as its sampled token alone.

    Attributes:
        layout: the row map.
        parallel: this rank's place in its groups.
        vocab_size: true size of the vocabulary.
        shard: this rank's columns.
        assembled: whether the supports are laid over the whole vocabulary, for
            `score_assembled`, instead of over this rank's shard.
        fingerprint: a checksum of the whole micro-batch, by which ranks tell whether they agree.
        on_missing_token: what it was built with.
        num_missing: sampled tokens of the whole micro-batch that were added to their support
            (`on_missing_token="include"`); the same on every rank.
        rows: int64 `[R]`, the logits row of each response row.
        offsets: int64 `[R + 1]`, rows of `ids`.
        ids: int32 `[N]`, local columns of the supports, ascending in a row.
        targets: int64 `[R]`, position in `ids` of the sampled token, -1 where it lies on another
            shard.
        unrestricted: bool `[R]`, rows that are scored over the full vocabulary.
        response_rows: int64 `[rows of the layout]`, the inverse of `rows`: the response row that a
            logits row scores, -1 for none.
        host_rows, host_offsets, host_unrestricted: `rows`, `offsets`, `unrestricted` in host
            memory, by which the host cuts work into chunks without a sync.
        has_unrestricted: whether some row on this rank is scored over the full vocabulary.
        num_support_ids: support ids of this rank's rows over all vocab shards, the same on every
            TP rank.
        handle: a number that names the plan in this process while it lives.
    """

    layout: RowLayout
    parallel: ParallelState
    vocab_size: int
    shard: VocabShard
    assembled: bool
    fingerprint: int
    on_missing_token: OnMissingToken
    num_missing: int
    rows: Int[Tensor, " R"]
    offsets: Int[Tensor, " R+1"]
    ids: Int[Tensor, " N"]
    targets: Int[Tensor, " R"]
    unrestricted: Bool[Tensor, " R"]
    response_rows: Int[Tensor, " rows"]
    host_rows: IntArray
    host_offsets: IntArray
    host_unrestricted: BoolArray
    has_unrestricted: bool
    num_support_ids: int
    handle: int = field(default_factory=_HANDLES.__next__, init=False)

    def __post_init__(self) -> None:
        _PLANS[self.handle] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, or one from another process, is a plan with a handle of its own."""
        self.__dict__.update(state, handle=next(_HANDLES))
        _PLANS[self.handle] = self

    @staticmethod
    def of_handle(handle: int) -> ReplayPlan:
        """The living plan with this handle, by which operators of a compiled graph refer to it."""
        plan = _PLANS.get(handle)
        if plan is None:
            raise ReplayError(
                "the plan is gone",
                expected="a plan that is kept until the backward of its scores",
                got=f"handle {handle}",
                consequence="nothing is known of the supports",
            )
        return plan

    @property
    def num_rows(self) -> int:
        """R: response rows on this rank."""
        return int(self.host_rows.size)

    @property
    def num_ids(self) -> int:
        """N: support ids on this rank's shard."""
        return int(self.host_offsets[-1])

    @property
    def device(self) -> torch.device:
        return self.ids.device

    def row_of_id(self) -> Int[Tensor, " N"]:
        """int64 `[N]`: the response row of each support id; made anew by each call."""
        rows = torch.arange(self.num_rows, device=self.device)
        # output_size spares the sync that counts the ids
        return torch.repeat_interleave(rows, self.offsets.diff(), output_size=self.num_ids)

    @functools.cached_property
    def id_rows(self) -> Int[Tensor, " N"]:
        """int64 `[N]`: the logits row of each support id."""
        return self.rows[self.row_of_id()]

    @functools.cached_property
    def by_id(self) -> IdSegments:
        """The support ids sorted by column, once for the plan. On a GPU the host waits for it:
        where it is made, by `build(sort_ids=True)` or else by the first backward that needs it.
        With what else is kept for it, 24 bytes an id."""
        return IdSegments.of(self.ids)

    @functools.cached_property
    def id_rows_by_id(self) -> Int[Tensor, " N"]:
        """int64 `[N]`: `id_rows` in the order of `by_id`."""
        return self.id_rows[self.by_id.order]

    @functools.cached_property
    def unrestricted_ids(self) -> Int[Tensor, " rows"]:
        """int64: where the sampled tokens that stand for unrestricted rows are in `ids`."""
        own = self.host_unrestricted & (np.diff(self.host_offsets) > 0)
        with torch.inference_mode(False):  # autograd saves it
            return to_device(self.host_offsets[:-1][own], self.device)

    @functools.cached_property
    def on_supports(self) -> ReplayPlan:
        """The plan of the support ids' own logits `[1, N]`: every row reads its columns of one row.

        Unrestricted rows stand as their sampled token alone.
        """
        restricted = np.zeros(self.num_rows, dtype=np.bool_)
        return replace(
            self,
            rows=torch.zeros_like(self.rows),
            ids=torch.arange(self.num_ids, dtype=torch.int32, device=self.device),
            unrestricted=torch.zeros_like(self.unrestricted),
            shard=VocabShard(0, self.num_ids, self.num_ids),
            host_rows=frozen(np.zeros(self.num_rows, dtype=np.int64)),
            host_unrestricted=frozen(restricted),
            has_unrestricted=False,
        )

    def of_rows(self, index: IntArray) -> ReplayPlan:
        """The plan of some response rows, for logits `[len(index), V]` of these rows alone.

        Args:
            index: int `[rows]`, response rows of this rank, ascending.
        """
        starts = self.host_offsets[index]
        offsets = offsets_of(self.host_offsets[index + 1] - starts)
        shift = starts - offsets[:-1]
        free = self.host_unrestricted[index]
        count, parts = len(index), (index, offsets, shift)
        on_device = to_device(np.concatenate(parts).astype(np.int64), self.device)
        index_, offsets_, shift_ = torch.split(on_device, [len(part) for part in parts])
        # the host works on rows, the device on ids; output_size spares the sync that counts them
        total = int(offsets[-1])
        shifts = torch.repeat_interleave(shift_, offsets_.diff(), output_size=total)
        positions = torch.arange(total, device=self.device) + shifts
        targets = self.targets[index_]
        rows = torch.arange(count, device=self.device)
        return replace(
            self,
            rows=rows,
            offsets=offsets_,
            ids=self.ids[positions],
            targets=torch.where(targets >= 0, targets - shift_, -1),
            unrestricted=self.unrestricted[index_],
            response_rows=rows,
            host_rows=frozen(np.arange(count)),
            host_offsets=offsets,
            host_unrestricted=frozen(free),
            has_unrestricted=bool(free.any()),
        )

    @classmethod
    def build(
        cls,
        unconcat_tokens: Sequence[IntArrayLike],
        masks: Sequence[RolloutSamplingMask] | None,
        layout: RowLayout,
        *,
        parallel: ParallelState,
        vocab_size: int,
        device: torch.device | str,
        on_missing_token: OnMissingToken = "raise",
        shard_columns: int | None = None,
        assembled: bool = False,
        sort_ids: bool = False,
        check_agreement: bool = True,
    ) -> ReplayPlan:
        """Check a micro-batch and lay it out for this rank: O(N) array work and two copies.

        Args:
            unconcat_tokens: for each sample its tokens, int `[total_length]`, prompt first. On
                the host by preference: tokens on a device cost one copy back.
            masks: for each sample its whole response's supports, or None to score every row over
                the full vocabulary. Every rank passes the whole responses, whatever rows it holds.
            layout: the row map of this rank.
            parallel: this rank's place in its groups.
            vocab_size: true size of the vocabulary.
            device: where the logits will be.
            on_missing_token: what a sampled token outside its support does: `"raise"`, or
                `"include"` it in the support and count it in `num_missing`.
            shard_columns: columns of this rank's logits, needed where a sharded vocabulary is
                padded. By default `ceil(vocab_size / tp_size)`.
            assembled: lay the supports over the whole vocabulary, for `score_assembled`.
            sort_ids: sort the support ids by column here, for the sparse path of `score_hidden`,
                whose first backward does it else. On a GPU the host waits for it and for the work
                queued before: build plans before that is queued.
            check_agreement: have the ranks compare what they were given. With False, a rank that
                raises alone leaves its peers waiting in their next collective.

        Collectives: where there are groups and `check_agreement`, that of
        `ParallelState.agreed`, whose answer the host waits for: build the plan before the forward.

        Raises:
            MissingTokenError: a sampled token is outside its support.
            ReplayError: anything else that does not fit. Checks run on whole responses, which
                every rank has, so that all ranks raise alike; where only one rank is given
                something wrong, the others raise too.
        """

        def attempt() -> ReplayPlan:
            with torch.inference_mode(False):  # a plan of a reference pass serves training too
                return cls._build_alone(
                    unconcat_tokens,
                    masks,
                    layout,
                    parallel=parallel,
                    vocab_size=vocab_size,
                    device=device,
                    on_missing_token=on_missing_token,
                    shard_columns=shard_columns,
                    assembled=assembled,
                )

        check_kind(parallel, ParallelState, "parallel")

        if check_agreement:
            plan = parallel.agreed(attempt, lambda plan: plan.fingerprint)
        else:
            plan = attempt()
        if sort_ids:
            with torch.inference_mode(False):
                _ = plan.id_rows_by_id
        return plan

    @classmethod
    def _build_alone(
        cls,
        unconcat_tokens: Sequence[IntArrayLike],
        masks: Sequence[RolloutSamplingMask] | None,
        layout: RowLayout,
        *,
        parallel: ParallelState,
        vocab_size: int,
        device: torch.device | str,
        on_missing_token: OnMissingToken,
        shard_columns: int | None,
        assembled: bool,
    ) -> ReplayPlan:
        """`build` without the agreement of the other ranks."""
        check_kind(layout, RowLayout, "layout")
        vocab_size = check_count(vocab_size, "vocab_size")
        _check_parallel(layout, parallel)
        shard = _vocab_shard(vocab_size, parallel, shard_columns)
        sampled = _response_tokens(tokens_on_host(unconcat_tokens, layout), layout, vocab_size)
        batch = _batch_supports(masks, layout, vocab_size)
        located = batch.locate(sampled)
        missing = (located < 0) & ~batch.unrestricted
        complete = _with_missing(batch, sampled, missing, layout, on_missing_token)
        index = _rows_in_batch(layout)
        local = complete if layout.cp_size == 1 else complete.select(index)
        here = local.fill_unrestricted(sampled[index])
        targets = located if here is batch else here.locate(sampled[index])
        columns = VocabShard(0, shard.columns, vocab_size) if assembled else shard
        options = f"{vocab_size} {shard.columns} {on_missing_token} {assembled} {masks is None}"
        ids, offsets, targets = _shard_supports(here, targets, columns)
        rows, unrestricted = layout.local_rows, local.unrestricted
        response_rows = np.full(layout.num_local_rows, -1, dtype=np.int64)
        response_rows[rows] = np.arange(rows.size)
        parts = [rows, offsets, targets, unrestricted.astype(np.int64), response_rows]
        longs, sizes = np.concatenate(parts), [part.size for part in parts]
        on_device = torch.split(to_device(longs, device), sizes)
        return cls(
            layout=layout,
            parallel=parallel,
            vocab_size=vocab_size,
            shard=columns,
            assembled=assembled,
            fingerprint=_fingerprint(layout, sampled, batch, options) if parallel.is_split else 0,
            on_missing_token=on_missing_token,
            num_missing=int(missing.sum()),
            rows=on_device[0],
            offsets=on_device[1],
            ids=to_device(ids, device),
            targets=on_device[2],
            unrestricted=on_device[3].bool(),
            response_rows=on_device[4],
            host_rows=rows,
            host_offsets=offsets,
            host_unrestricted=frozen(unrestricted),
            has_unrestricted=bool(unrestricted.any()),
            num_support_ids=int(here.ids.size),
        )

    def check_logits(self, logits: Tensor) -> None:
        """Refuse logits that do not fit the plan; data on which all ranks of a group agree."""
        if not isinstance(logits, Tensor) or logits.layout != torch.strided:
            raise ReplayError(
                "logits are no tensor",
                expected="a strided torch.Tensor",
                got=type(logits).__name__,
                consequence="there is nothing to score or to send a gradient to",
            )
        if logits.ndim != 2 or not logits.is_floating_point():
            raise ReplayError(
                "not a matrix of logits",
                expected="a floating-point tensor [rows, vocab columns]",
                got=f"{logits.dtype} of shape {tuple(logits.shape)}",
                consequence="rows and columns would be misread",
            )
        if logits.device != self.device:
            raise ReplayError(
                "logits and plan are on different devices",
                expected=f"logits on {self.device}",
                got=f"{logits.device}",
                consequence="every call would copy the plan",
            )
        self.layout.check_rows(logits.shape[0])
        self.check_columns(logits.shape[1])

    def check_columns(self, columns: int) -> None:
        """Refuse a vocab shard of another width than the plan's."""
        needed = self.shard.columns
        if columns != needed if needed is not None else columns < self.vocab_size:
            raise ReplayError(
                "logits columns do not match the vocab shard",
                expected=f"{needed} columns"
                if needed is not None
                else f"{self.vocab_size} or more",
                got=f"{columns} (shard_columns= tells the plan of a padded vocabulary)",
                consequence="support ids would name other columns",
            )


def build_local_sampling_mask(
    logits: Float[Tensor, "rows V"],
    sampling_mask: RolloutSamplingMask,
    response_indices: Sequence[int] | IntArray,
    *,
    tp_rank: int,
    vocab_size: int | None = None,
) -> Bool[Tensor, "rows V"]:
    """The dense form of some rows' supports on one vocab shard, for those who need it.

    Equivalent to `sampling_mask.select(response_indices).to_dense(...)` cut to the columns
    `tp_rank * V` to `(tp_rank + 1) * V`. The scores of this library never build it.

    Args:
        logits: any tensor with this shard's V columns and one row for each index; gives the
            shape and the device.
        sampling_mask: the supports of the whole response.
        response_indices: the response token of each row of `logits`.
        tp_rank: which shard the columns are.
        vocab_size: true size of the vocabulary; columns past it are false also in unrestricted
            rows.

    Collectives: none.
    """
    mask = sampling_mask.select(response_indices)
    if logits.ndim != 2:
        raise ReplayError(
            "not a matrix of logits",
            expected="shape [rows, vocab columns]",
            got=f"shape {tuple(logits.shape)}",
            consequence="rows and columns would be misread",
        )
    rows, columns = logits.shape
    if rows != len(mask):
        raise ReplayError(
            "logits rows and response indices differ in number",
            expected=f"{len(mask)} rows",
            got=f"{rows}",
            consequence="rows would be masked with another token's support",
        )
    start = check_count(tp_rank, "tp_rank") * columns
    limit = columns if vocab_size is None else min(columns, max(0, vocab_size - start))
    if vocab_size is not None:
        check_ids_below(mask, vocab_size)
    local, here = VocabShard(start, columns, limit).to_local(mask.ids)
    row_of_id = np.repeat(np.arange(rows), mask.lengths)
    free = to_device(mask.unrestricted.astype(np.int64), logits.device) != 0
    dense = free[:, None] & (torch.arange(columns, device=logits.device) < limit)
    where = to_device(np.concatenate([row_of_id[here], local[here]]), logits.device)
    return dense.index_put_(tuple(where.view(2, -1)), dense.new_ones(()))


def _check_parallel(layout: RowLayout, parallel: ParallelState) -> None:
    if (layout.cp_rank, layout.cp_size) != (parallel.cp_rank, parallel.cp_size):
        raise ReplayError(
            "the layout is not this rank's",
            expected=f"context-parallel rank {parallel.cp_rank} of {parallel.cp_size}",
            got=f"rank {layout.cp_rank} of {layout.cp_size}",
            consequence="logits rows would score other tokens than their own",
        )


def _vocab_shard(vocab_size: int, parallel: ParallelState, shard_columns: int | None) -> VocabShard:
    if parallel.tp_size == 1 and shard_columns is None:
        return VocabShard(0, None, vocab_size)
    smallest = -(-vocab_size // parallel.tp_size)
    columns = smallest if shard_columns is None else check_count(shard_columns, "shard_columns")
    if columns < smallest:
        raise ReplayError(
            "the vocab shards are too narrow for the vocabulary",
            expected=f"at least {smallest} columns on each of {parallel.tp_size} ranks",
            got=f"{columns}",
            consequence="the last ids of the vocabulary would have no logits",
        )
    start = parallel.tp_rank * columns
    return VocabShard(start, columns, min(columns, max(0, vocab_size - start)))


def tokens_on_host(unconcat_tokens: Sequence[IntArrayLike], layout: RowLayout) -> list[IntArray]:
    """Each sample's tokens as int64 `[total_length]` in host memory, checked against the layout."""
    _check_num_samples(unconcat_tokens, layout, "unconcat_tokens")
    tokens = _on_host(unconcat_tokens)
    for i, (values, length) in enumerate(zip(tokens, layout.total_lengths, strict=True)):
        if values.size != length:
            raise ReplayError(
                "tokens do not have the declared length",
                expected=f"{length} tokens",
                got=f"{values.size}",
                consequence="every token would be scored against its neighbour",
                sample=i,
            )
    return tokens


def _response_tokens(tokens: Sequence[IntArray], layout: RowLayout, vocab_size: int) -> IntArray:
    """The sampled tokens of all whole responses, sample after sample."""
    lengths = zip(tokens, layout.total_lengths, layout.response_lengths, strict=True)
    parts = [values[total - response :] for values, total, response in lengths]
    sampled = np.concatenate([np.zeros(0, np.int64), *parts])
    bad = (sampled < 0) | (sampled >= vocab_size)
    if bad.any():
        at = int(np.argmax(bad))
        error = ReplayError(
            "response token out of the vocabulary",
            expected=f"an id in [0, {vocab_size})",
            got=f"{int(sampled[at])}",
            consequence="it has no logit to score",
        )
        raise _in_sample(error.located(row=at), layout)
    return sampled


def _on_host(values: Sequence[IntArrayLike]) -> list[IntArray]:
    """Integer arrays on the host; tensors on a device come over in one copy."""
    if values and all(isinstance(v, Tensor) and v.ndim == 1 and v.is_cuda for v in values):
        lengths = [len(v) for v in values]
        joined = integer_array(torch.cat([v for v in values if isinstance(v, Tensor)]), "tokens")
        return np.split(joined, np.cumsum(lengths)[:-1])
    arrays = []
    for i, tokens in enumerate(values):
        try:
            arrays.append(integer_array(tokens, "tokens"))
        except ReplayError as error:
            raise error.blamed_on(i) from None
    return arrays


def _batch_supports(
    masks: Sequence[RolloutSamplingMask] | None, layout: RowLayout, vocab_size: int
) -> RolloutSamplingMask:
    """The supports of all whole responses as one mask."""
    if masks is None:
        return RolloutSamplingMask.full(sum(layout.response_lengths))
    _check_masks(masks, layout)
    batch = RolloutSamplingMask.concat(masks)
    try:
        check_ids_below(batch, vocab_size)
    except ReplayError as error:
        raise _in_sample(error, layout) from None
    return batch


def _with_missing(
    batch: RolloutSamplingMask,
    sampled: IntArray,
    missing: BoolArray,
    layout: RowLayout,
    on_missing_token: OnMissingToken,
) -> RolloutSamplingMask:
    """The supports with the sampled tokens that are missing from them, or an error."""
    if on_missing_token == "include":
        return batch.include(sampled) if missing.any() else batch
    if on_missing_token != "raise":
        raise ReplayError(
            "unknown on_missing_token",
            expected="'raise' or 'include'",
            got=repr(on_missing_token),
            consequence="a sampled token outside its support would be dealt with by chance",
        )
    if missing.any():
        try:
            batch.check_sampled(sampled)
        except ReplayError as error:
            raise _in_sample(error, layout) from None
    return batch


def _check_masks(masks: Sequence[RolloutSamplingMask | None], layout: RowLayout) -> None:
    _check_num_samples(masks, layout, "sampling masks")
    for i, (mask, length) in enumerate(zip(masks, layout.response_lengths, strict=True)):
        if mask is None:
            raise MissingMaskError(
                "no sampling mask for this sample",
                expected="a RolloutSamplingMask (RolloutSamplingMask.full(n) if none was applied)",
                got="None",
                consequence="the sample would be scored as if nothing had been truncated",
                sample=i,
            )
        if not isinstance(mask, RolloutSamplingMask):
            raise ReplayError(
                "not a sampling mask",
                expected="a RolloutSamplingMask",
                got=type(mask).__name__,
                consequence="supports would be misread",
                sample=i,
            )
        if len(mask) != length:
            raise ReplayError(
                "the sampling mask does not have the response's length",
                expected=f"{length} rows",
                got=f"{len(mask)}",
                consequence="tokens would be scored on each other's supports",
                sample=i,
            )


def check_kind(value: object, kind: type, name: str) -> None:
    """Raise `ReplayError` where an argument is not of its type."""
    if not isinstance(value, kind):
        raise ReplayError(
            f"{name} is something else",
            expected=kind.__name__,
            got=type(value).__name__,
            consequence="nothing would be scored as it should",
        )


def _check_num_samples(values: object, layout: RowLayout, name: str) -> None:
    if not isinstance(values, list | tuple):
        raise ReplayError(
            f"{name} are not a list",
            expected="a list with one entry for each sample",
            got=type(values).__name__,
            consequence="samples would be scored with each other's data",
        )
    count = len(values)
    if count != layout.num_samples:
        raise ReplayError(
            f"{name} are not one for each sample",
            expected=f"{layout.num_samples}",
            got=f"{count}",
            consequence="samples would be scored with each other's data",
        )


def _in_sample(error: ReplayError, layout: RowLayout) -> ReplayError:
    """An error at a row of the whole batch, told as sample and row."""
    if error.row is None:
        return error
    starts = offsets_of(layout.response_lengths)
    sample = row_at(starts, error.row)
    return error.located(sample=sample, row=error.row - int(starts[sample]))


def _fingerprint(
    layout: RowLayout, sampled: IntArray, batch: RolloutSamplingMask, options: str
) -> int:
    """CRC-32 of what every rank must have been given alike."""
    lengths = np.array([layout.total_lengths, layout.response_lengths], dtype=np.int64)
    checksum = zlib.crc32(f"{options} {layout.placement}".encode())
    for values in (lengths, sampled, batch.offsets, batch.ids):
        checksum = zlib.crc32(np.ascontiguousarray(values).view(np.uint8).data, checksum)
    return checksum


def _rows_in_batch(layout: RowLayout) -> IntArray:
    """int64 `[R]`: this rank's rows among the rows of all whole responses."""
    starts = offsets_of(layout.response_lengths).tolist()
    runs = (
        np.arange(start + span.response_index, start + span.response_index + span.length)
        for start, spans in zip(starts[:-1], layout.spans, strict=True)
        for span in spans
    )
    return np.concatenate([np.zeros(0, np.int64), *runs])


def _shard_supports(
    mask: RolloutSamplingMask, targets: IntArray, shard: VocabShard
) -> tuple[IdArray, IntArray, IntArray]:
    """Supports on one vocab shard as local CSR (ids, offsets), and the targets' positions in it.

    `targets` are positions in `mask.ids`; they become -1 where they lie on another shard.
    """
    if shard.start == 0 and shard.valid > mask.max_id:
        return mask.ids, mask.offsets, targets
    local, here = shard.to_local(mask.ids)
    kept_before = offsets_of(here)
    on_shard = np.where(here[targets], kept_before[targets], -1)
    return local[here].astype(np.int32), kept_before[mask.offsets], on_shard


def to_device(values: IntArray | IdArray, device: torch.device | str) -> Tensor:
    """Host integers as a tensor, by a copy that the host does not wait for."""
    # a copy: the plan's tensors share memory with nothing that is writable or read-only
    host = torch.from_numpy(np.array(values))
    if torch.device(device).type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)
