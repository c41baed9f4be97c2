"""`ParallelState`: this rank's place in its tensor- and context-parallel groups, as a value."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from rlreplay.errors import ReplayError


@dataclass(frozen=True)
class ParallelState:
    """Ranks, sizes and groups of the tensor-parallel (vocab) and context-parallel (sequence) axes.

    A group of None means that the axis has size 1; it never means the whole world.

    Raises:
        ReplayError: a rank outside its size, or an axis larger than 1 without a group.
    """

    tp_rank: int = 0
    tp_size: int = 1
    tp_group: dist.ProcessGroup | None = None
    cp_rank: int = 0
    cp_size: int = 1
    cp_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        _check_axis("tensor", self.tp_rank, self.tp_size, self.tp_group)
        _check_axis("context", self.cp_rank, self.cp_size, self.cp_group)

    @classmethod
    def single(cls) -> ParallelState:
        """One rank that holds the whole vocabulary and whole sequences."""
        return cls()

    @classmethod
    def from_groups(
        cls,
        tp_group: dist.ProcessGroup | None = None,
        cp_group: dist.ProcessGroup | None = None,
    ) -> ParallelState:
        """From process groups that this rank belongs to; None for an axis of size 1."""
        tp_rank, tp_size = _place_in("tensor", tp_group)
        cp_rank, cp_size = _place_in("context", cp_group)
        return cls(tp_rank, tp_size, tp_group, cp_rank, cp_size, cp_group)

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
        return cls.from_groups(
            tp_group if dist.get_world_size(tp_group) > 1 else None,
            cp_group if dist.get_world_size(cp_group) > 1 else None,
        )


def _place_in(axis: str, group: dist.ProcessGroup | None) -> tuple[int, int]:
    if group is None:
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ReplayError(
            f"this rank is not in the {axis}-parallel group",
            expected="a group that the calling rank belongs to",
            got=f"a group of {dist.get_world_size(group)} other ranks",
            consequence="its collectives would wait for ranks that never enter them",
        )
    return rank, dist.get_world_size(group)


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
