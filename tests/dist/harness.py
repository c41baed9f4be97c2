"""Runs a function on several ranks, each a fork of the test process.

`RLREPLAY_TEST_TRANSPORT` says what carries their collectives and where their tensors lie: "cpu"
(gloo, the default), "cuda" (gloo over CUDA tensors; ranks share the GPUs there are), or "nccl" (one
rank a GPU; a test of more ranks than GPUs is skipped). A parent of the latter two must not have
touched CUDA itself.

A fork inherits the imported modules, so a test of 2 ranks takes hundredths of a second where
torchrun takes seconds, and `fn` may be a closure. Ranks also inherit the parent's random state:
all of them draw the same numbers unless they seed apart.

Each rank has one pipe, which carries one report: what `fn` returned or raised, and when. A rank
that raised exits at once, as a trainer's would, so that its peers see a closed connection. One that
returned stays until all have reported: its peers may still be reading from it.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NoReturn

import pytest
import torch
import torch.distributed as dist

RankFunction = Callable[..., Any]
"""Called as `fn(rank, world_size, *args)`."""

DEATH_HEAD_START_S = 0.05
"""A death is seen when its pipe closes, perhaps after the peers have raised for the lost rank."""

STACK_DUMP_S = 1.0
"""How long a hung rank may take to write where it stands, before it is killed."""

HEADER_BYTES = 8

TRANSPORT = os.environ.get("RLREPLAY_TEST_TRANSPORT", "cpu")
GPU_START_S = 60.0
"""How much longer a test may take where each rank starts CUDA first."""

_collective_timeout = timedelta(seconds=15)  # Of the process group, set in each rank.
_device = torch.device("cpu")  # Set in each rank.


def rank_device() -> torch.device:
    """Where the tensors of the calling rank lie."""
    return _device


class RemoteError(Exception):
    """Stands for a rank's exception that can't be pickled; its text is that exception's repr."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Attributes:
        rank: the rank.
        status: "returned", "raised", "exited" (without a report), "killed" (by a signal), or
            "hung" (no report within the timeout).
        seconds: from the first fork to the end of `fn`, or to when the parent saw the rank's end.
        value: what `fn` returned.
        error: what `fn` raised; a `RemoteError` where that can't be pickled.
        details: the traceback of a rank that raised, the stack of one that hung.
        exit_code: of a rank that exited.
        signal: that killed the rank, None for the harness's own kill.
    """

    rank: int
    status: Literal["returned", "raised", "exited", "killed", "hung"]
    seconds: float
    value: Any = None
    error: BaseException | None = None
    details: str = ""
    exit_code: int | None = None
    signal: signal.Signals | None = None

    def describe(self) -> str:
        """A headline and the details, as they stand in a failure's message."""
        what = {
            "returned": "returned",
            "raised": "raised",
            "exited": f"exited with code {self.exit_code} and no report",
            "killed": f"was killed by {self.signal.name if self.signal else None}",
            "hung": "hung: no report",
        }[self.status]
        headline = f"--- rank {self.rank} {what} after {self.seconds:.3f} s ---"
        return f"{headline}\n{self.details}" if self.details else headline

    @property
    def _order(self) -> float:
        died = self.status in ("exited", "killed")
        return self.seconds - (DEATH_HEAD_START_S if died else 0.0)


class RankFailure(Exception):
    """Some ranks did not return; the message holds their tracebacks, the earliest first.

    Attributes:
        outcomes: of all ranks, in rank order.
        errors: per failed rank its exception, or a line that says how it ended.
    """

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        failed = [outcome for outcome in outcomes if outcome.status != "returned"]
        failed.sort(key=lambda outcome: outcome._order)
        self.outcomes = list(outcomes)
        self.errors: dict[int, BaseException | str] = {
            outcome.rank: outcome.error or outcome.describe() for outcome in failed
        }
        headline = f"{len(failed)} of {len(outcomes)} ranks failed; the first is likely the cause"
        super().__init__("\n".join([headline, *(outcome.describe() for outcome in failed)]))


def run_ranks(
    world_size: int,
    fn: RankFunction,
    *args: Any,
    timeout: float = 30.0,
    collective_timeout: float | None = None,
) -> list[Any]:
    """Runs `fn(rank, world_size, *args)` on every rank and returns the results in rank order.

    Args:
        world_size: number of ranks.
        fn: runs with the default process group (gloo) initialised; what it returns is pickled.
        timeout: seconds after which all ranks that have not reported are killed.
        collective_timeout: seconds after which a collective that waits raises on its rank; half of
            `timeout` by default, so that a wait is reported with its traceback.

    Raises:
        RankFailure: a rank raised, died or hung.
    """
    outcomes = run_ranks_expecting_errors(
        world_size, fn, *args, timeout=timeout, collective_timeout=collective_timeout
    )
    if any(outcome.status != "returned" for outcome in outcomes):
        raise RankFailure(outcomes)
    return [outcome.value for outcome in outcomes]


def run_ranks_expecting_errors(
    world_size: int,
    fn: RankFunction,
    *args: Any,
    timeout: float = 30.0,
    collective_timeout: float | None = None,
) -> list[Outcome]:
    """As `run_ranks`, but returns how each rank ended, in rank order, and raises for none."""
    if collective_timeout is None:
        collective_timeout = timeout / 2
    if TRANSPORT != "cpu":
        timeout += GPU_START_S
        gpus = torch.cuda.device_count()
        if gpus < (world_size if TRANSPORT == "nccl" else 1):
            pytest.skip(f"{world_size} ranks on {TRANSPORT}, and {gpus} GPUs")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = _Ranks(world_size, Path(folder), timeout, collective_timeout)
        try:
            ranks.fork(fn, args)
            ranks.collect()
        finally:
            ranks.kill()
        return [ranks.outcomes[rank] for rank in range(world_size)]


def make_grid(tp: int, cp: int) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The tensor- and context-parallel group of the calling rank, None for an axis of size 1.

    Megatron's order: rank = tp_rank + tp * (cp_rank + cp * dp_rank). Collective: every rank of the
    world calls it with the same sizes.

    Raises:
        ValueError: the world is not a multiple of tp * cp.
    """
    world_size = dist.get_world_size()
    if world_size % (tp * cp):
        raise ValueError(f"{world_size} ranks do not divide into grids of tp {tp} x cp {cp}")
    ranks = torch.arange(world_size).view(-1, cp, tp)
    return (
        _own_group(ranks.reshape(-1, tp)),
        _own_group(ranks.transpose(1, 2).reshape(-1, cp)),
    )


def _own_group(groups: torch.Tensor) -> dist.ProcessGroup | None:
    """The row of `groups` [number of groups, size] that this rank is in, as a process group."""
    if groups.shape[1] == 1:
        return None
    own = None
    for ranks in groups.tolist():
        # Without a timeout it would be torch's 30 minutes, whatever the default group has.
        group = dist.new_group(ranks, timeout=_collective_timeout)
        if dist.get_rank() in ranks:
            own = group
    return own


@dataclass
class _Child:
    rank: int
    pid: int
    pipe: int
    received: bytearray = field(default_factory=bytearray)
    reaped: bool = False


@dataclass(frozen=True)
class _Report:
    """What a rank sends; times are of the monotonic clock, which all processes share."""

    time: float
    value: Any = None
    error: BaseException | None = None
    details: str = ""

    def outcome(self, rank: int, start: float) -> Outcome:
        return Outcome(
            rank,
            "returned" if self.error is None else "raised",
            self.time - start,
            value=self.value,
            error=self.error,
            details=self.details,
        )


class _Ranks:
    """The parent's side: forks the ranks, reads their reports while they run, ends them all."""

    def __init__(
        self, world_size: int, folder: Path, timeout: float, collective_timeout: float
    ) -> None:
        self.world_size = world_size
        self.folder = folder
        self.timeout = timeout
        self.collective_timeout = collective_timeout
        self.outcomes: dict[int, Outcome] = {}
        self._children: list[_Child] = []
        self._start = time.monotonic()
        # Closing the write end tells the ranks that all have reported.
        self._exit_read, self._exit_write = os.pipe()

    def fork(self, fn: RankFunction, args: tuple[Any, ...]) -> None:
        # What is buffered would otherwise be written by every child too.
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(self.world_size):
            read_end, write_end = os.pipe()
            pid = _fork()
            if pid == 0:
                self._run_child(rank, fn, args, write_end)
            os.close(write_end)
            self._children.append(_Child(rank, pid, read_end))

    def _run_child(
        self, rank: int, fn: RankFunction, args: tuple[Any, ...], write_end: int
    ) -> NoReturn:
        """Whatever happens in it, a child never returns into the test runner."""
        exit_code = 1
        try:
            os.close(self._exit_write)
            stack_file = _stack_file(self.folder, rank).open("w")
            faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
            report = self._call(rank, fn, args)
            _write_all(write_end, _pack(report))
            os.close(write_end)
            if report.error is None:
                os.read(self._exit_read, 1)
                if dist.is_initialized():  # `fn` may have ended it itself.
                    dist.destroy_process_group()
                exit_code = 0
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(exit_code)

    def _call(self, rank: int, fn: RankFunction, args: tuple[Any, ...]) -> _Report:
        try:
            _init_group(rank, self.world_size, self.folder, self.collective_timeout)
            value = fn(rank, self.world_size, *args)
            return _Report(time.monotonic(), value=value)
        except BaseException as error:
            now = time.monotonic()
            return _Report(now, error=_picklable(error), details=traceback.format_exc())

    def collect(self) -> None:
        """Reads all pipes until each is closed or the time is up."""
        deadline = self._start + self.timeout
        waiting = {child.pipe: child for child in self._children}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in select.select(list(waiting), [], [], left)[0]:
                child = waiting[pipe]
                piece = os.read(pipe, 1 << 20)
                child.received += piece
                if not piece:
                    del waiting[pipe]
                    self.outcomes[child.rank] = self._ended(child)
        if waiting:
            self._note_hung(list(waiting.values()))

    def _ended(self, child: _Child) -> Outcome:
        report = _unpack(child.received)
        if report is not None:
            return report.outcome(child.rank, self._start)
        seconds = time.monotonic() - self._start
        _, status = os.waitpid(child.pid, 0)
        child.reaped = True
        if os.WIFSIGNALED(status):
            killer = signal.Signals(os.WTERMSIG(status))
            return Outcome(child.rank, "killed", seconds, signal=killer)
        return Outcome(child.rank, "exited", seconds, exit_code=os.WEXITSTATUS(status))

    def _note_hung(self, hung: Sequence[_Child]) -> None:
        seconds = time.monotonic() - self._start
        for child in hung:
            os.kill(child.pid, signal.SIGUSR1)
        for child in hung:
            stack = _wait_for_stack(_stack_file(self.folder, child.rank))
            self.outcomes[child.rank] = Outcome(child.rank, "hung", seconds, details=stack)

    def kill(self) -> None:
        """Lets the ranks that returned exit, kills the others, and reaps all."""
        os.close(self._exit_write)
        os.close(self._exit_read)
        for child in self._children:
            os.close(child.pipe)
            outcome = self.outcomes.get(child.rank)
            if not child.reaped and (outcome is None or outcome.status == "hung"):
                os.kill(child.pid, signal.SIGKILL)
        deadline = time.monotonic() + self.collective_timeout
        for child in self._children:
            if not child.reaped:
                _reap(child.pid, deadline)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 and later warn that the parent has threads; the ranks use none of them.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        return os.fork()


def _init_group(rank: int, world_size: int, folder: Path, timeout: float) -> None:
    global _collective_timeout
    _collective_timeout = timedelta(seconds=timeout)
    torch.set_num_threads(1)
    # The address that the host's name resolves to may not be this machine's.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    # No rank leaves the making of a group before all have made it: one that fails right after would
    # break the connections that its peers still open. On NCCL (torch 2.11) the ranks of a group
    # would wait there for those outside of it, and these for them in a split of the communicator.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "0" if TRANSPORT == "nccl" else "1"
    if TRANSPORT != "cpu":
        global _device
        _device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(_device)
    dist.init_process_group(
        "nccl" if TRANSPORT == "nccl" else "gloo",
        store=dist.FileStore(str(folder / "store"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=_collective_timeout,
        device_id=_device if TRANSPORT == "nccl" else None,
    )


def _picklable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RemoteError(repr(error))
    return error


def _pack(report: _Report) -> bytes:
    """The pickled report behind its length, which tells a complete one from a piece of one."""
    try:
        body = pickle.dumps(report)
    except Exception as error:
        details = f"the rank's result can't be pickled\n{traceback.format_exc()}"
        body = pickle.dumps(_Report(report.time, error=_picklable(error), details=details))
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def _unpack(received: bytearray) -> _Report | None:
    """None where the rank ended before its report was complete."""
    header, body = received[:HEADER_BYTES], received[HEADER_BYTES:]
    if len(header) < HEADER_BYTES or len(body) < int.from_bytes(header, "little"):
        return None
    report = pickle.loads(body)
    assert isinstance(report, _Report)
    return report


def _write_all(pipe: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(pipe, view) :]


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank}"


def _wait_for_stack(file: Path) -> str:
    """The stack that the rank writes on SIGUSR1; a stopped rank writes none."""
    deadline = time.monotonic() + STACK_DUMP_S
    stack = ""
    while time.monotonic() < deadline:
        time.sleep(0.01)
        previous, stack = stack, file.read_text() if file.exists() else ""
        if stack and stack == previous:
            break
    return stack


def _reap(pid: int, deadline: float) -> None:
    """Waits for the process to end; kills it where it doesn't by itself."""
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
