"""`ParallelState`: this rank's place in its tensor- and context-parallel groups, as a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlreplay.errors import ReplayError

T = TypeVar("T")


@dataclass(frozen=True)
class ParallelState:
    """Ranks, sizes and groups of the tensor-parallel (vocab) and context-parallel (sequence) axes.

    A group of None means that the axis has size 1; it never means the whole world. A group of one
    rank is kept as None, so that nothing is ever sent over it. `tp_cp_group`
    is the group of both axes together, where the trainer has one: with it, `agreed` needs one
    collective instead of one for each axis.

    Raises:
        ReplayError: a rank outside its size, an axis larger than 1 without a group, or a
            `tp_cp_group` of another size than tp x cp.
    """

    tp_rank: int = 0
    tp_size: int = 1
    tp_group: dist.ProcessGroup | None = None
    cp_rank: int = 0
    cp_size: int = 1
    cp_group: dist.ProcessGroup | None = None
    tp_cp_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        _check_axis("tensor", self.tp_rank, self.tp_size, self.tp_group)
        _check_axis("context", self.cp_rank, self.cp_size, self.cp_group)
        _check_joint(self.tp_cp_group, self.tp_size * self.cp_size)
        if self.tp_size == 1:
            object.__setattr__(self, "tp_group", None)
        if self.cp_size == 1:
            object.__setattr__(self, "cp_group", None)
        if not self.is_split:
            object.__setattr__(self, "tp_cp_group", None)

    @classmethod
    def single(cls) -> ParallelState:
        """One rank that holds the whole vocabulary and whole sequences."""
        return cls()

    @classmethod
    def from_groups(
        cls,
        tp_group: dist.ProcessGroup | None = None,
        cp_group: dist.ProcessGroup | None = None,
        tp_cp_group: dist.ProcessGroup | None = None,
    ) -> ParallelState:
        """From process groups that this rank belongs to; None for an axis of size 1."""
        tp_rank, tp_size = _place_in("tensor", tp_group)
        cp_rank, cp_size = _place_in("context", cp_group)
        return cls(tp_rank, tp_size, tp_group, cp_rank, cp_size, cp_group, tp_cp_group)

    @classmethod
    def from_megatron(cls) -> ParallelState:
        """From `megatron.core.parallel_state`, the only global state that rlreplay ever reads.

        Raises:
            ReplayError: Megatron's model parallelism is not initialised.
        """
        # Imported here: it takes seconds, and most of the library's users in a process need it not.
        from megatron.core import parallel_state

        if not parallel_state.model_parallel_is_initialized():
            raise ReplayError(
                "Megatron's parallel state is not initialised",
                expected="a call of initialize_model_parallel before",
                got="no groups",
                consequence="vocab and sequence shards would be taken for whole ones",
            )
        tp_group = parallel_state.get_tensor_model_parallel_group()
        cp_group = parallel_state.get_context_parallel_group()
        both = parallel_state.get_tensor_and_context_parallel_group()
        return cls.from_groups(tp_group, cp_group, both)

    @property
    def is_split(self) -> bool:
        """Whether there is more than this one rank."""
        return self.tp_size * self.cp_size > 1

    def agreed(
        self,
        attempt: Callable[[], T],
        fingerprint: Callable[[T], int],
    ) -> T:
        """What `attempt()` returns, if it succeeds on every rank with the same fingerprint.

        A rank whose attempt raises still enters the collectives, so that no peer waits for it and
        every rank raises.

        Args:
            attempt: checks and prepares; enters no collective.
            fingerprint: of what it returned, a number in [0, 2**32).

        Collectives: one MAX all-reduce of four integers over `tp_cp_group`, or over the TP and
        then the CP group where that is None; none on a single rank.

        Raises:
            Exception: what `attempt` raised on this rank.
            ReplayError: it raised on another rank, or fingerprints differ.
        """
        groups = [self.tp_cp_group] if self.tp_cp_group else [self.tp_group, self.cp_group]
        error, state = None, [1, 0, 0, 0]
        try:
            result = attempt()
            mark = fingerprint(result)
            state = [0, 0, mark, -mark]
        except Exception as raised:
            error = raised
        for group in filter(None, groups):
            shared = torch.tensor(state, dtype=torch.int64, device=_device_of(group))
            dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
            failed, differed, most, minus_least = shared.tolist()
            state = [failed, max(differed, int(most != -minus_least)), most, minus_least]
        if error is not None:
            raise error
        if state[0]:
            raise ReplayError(
                "another rank refused this micro-batch",
                expected="the same valid lengths, tokens and masks on every rank",
                got="an error on a rank of this model-parallel group, whose log tells it",
                consequence="the ranks that went on would wait in their next collective",
            )
        if state[1]:
            raise ReplayError(
                "the ranks hold different data for one micro-batch",
                expected="the same lengths, tokens and masks on every rank",
                got="others (masks on some ranks and none on others, say)",
                consequence="shards of different scores would be added up",
            )
        return result


def _place_in(axis: str, group: dist.ProcessGroup | None) -> tuple[int, int]:
    if group is None:
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ReplayError(
            f"this rank is not in the {axis}-parallel group",
            expected="a group that the calling rank belongs to",
            got="a group of other ranks",
            consequence="its collectives would wait for ranks that never enter them",
        )
    return rank, dist.get_world_size(group)


def _device_of(group: dist.ProcessGroup) -> str:
    """A device whose tensors the group's backend takes: the host's where that will do.

    Asked of the group, not of what is being agreed on, which may be wrong.
    """
    if isinstance(group, dist.ProcessGroup) and dist.get_backend(group) == "nccl":
        return "cuda"
    return "cpu"


def _check_joint(group: dist.ProcessGroup | None, size: int) -> None:
    if group is not None and dist.get_world_size(group) != size:
        raise ReplayError(
            "tp_cp_group is not the group of both axes",
            expected=f"{size} ranks",
            got=f"{dist.get_world_size(group)}",
            consequence="an error on one rank would leave others waiting",
        )


def _check_axis(axis: str, rank: int, size: int, group: dist.ProcessGroup | None) -> None:
    if not 0 <= rank < size:
        raise ReplayError(
            f"no such {axis}-parallel rank",
            expected=f"0 <= rank < size {size}",
            got=f"{rank}",
            consequence="another rank's shard would be scored as this one's",
        )
    if size > 1 and group is None:
        raise ReplayError(
            f"no {axis}-parallel group",
            expected=f"a process group of {size} ranks",
            got="None, which means a size of 1",
            consequence="each shard would be normalised on its own",
        )
    # other objects stand for groups in tests
    if isinstance(group, dist.ProcessGroup) and (rank, size) != _place_in(axis, group):
        raise ReplayError(
            f"not this rank's place in its {axis}-parallel group",
            expected="rank {} of {}".format(*_place_in(axis, group)),
            got=f"rank {rank} of {size}",
            consequence="shards would be taken for others, or normalised on their own",
        )


# The names of two collectives changed in torch 2.13.


def all_gather_single(received: Tensor, sent: Tensor, group: dist.ProcessGroup | None) -> None:
    """`received` = what all ranks of the group sent, in rank order."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(received, sent, group=group)


def reduce_scatter_single(received: Tensor, sent: Tensor, group: dist.ProcessGroup | None) -> None:
    """`received` = this rank's part of the sum of what all ranks of the group sent."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(received, sent, group=group)
