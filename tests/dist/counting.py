"""A process group that counts its collectives and leaves every tensor as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future
from torch.testing._internal.distributed.fake_pg import FakeStore


class Call(NamedTuple):
    axis: str
    name: str
    shape: tuple[int, ...]


class CountingGroup(dist.ProcessGroup):
    """Rank `rank` of `size` whose peers contribute nothing: zeros, -inf, or this rank's shard."""

    def __init__(self, axis: str, rank: int, size: int, calls: list[Call]) -> None:
        super().__init__(rank, size)
        self.axis, self.calls = axis, calls
        # where torch.distributed looks a group's ranks up
        c10d._world.pg_group_ranks[self] = {0: rank}
        c10d._world.pg_map[self] = ("counting", None)

    def getBackendName(self) -> str:
        return "counting"

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        self.calls.append(Call(self.axis, _op_name(opts.reduceOp), tuple(tensors[0].shape)))
        return _done(tensors)

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> Any:
        self.calls.append(Call(self.axis, "all_gather", tuple(given.shape)))
        output.view(self.size(), *given.shape).copy_(given.expand(self.size(), *given.shape))
        return _done(output)

    all_gather_single = _allgather_base  # its name from torch 2.13 on


def _op_name(op: Any) -> str:
    return {dist.ReduceOp.MAX: "max", dist.ReduceOp.SUM: "sum"}[op.op if hasattr(op, "op") else op]


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


@contextmanager
def fake_world() -> Iterator[None]:
    """A world of one rank, so that groups can be asked for their rank and size."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
