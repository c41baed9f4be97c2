from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.dist.harness import (
    RankFailure,
    RemoteError,
    make_grid,
    run_ranks,
    run_ranks_expecting_errors,
)


def _children_and_descriptors() -> tuple[str, list[str]]:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    return children.read_text(), sorted(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    if sys.platform != "linux":
        yield
        return
    before = _children_and_descriptors()
    yield
    assert _children_and_descriptors() == before


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_in_rank_order(world_size):
    def later_the_lower(rank, size, offset):
        time.sleep(0.02 * (size - rank))
        return rank + offset, size

    results = run_ranks(world_size, later_the_lower, 10)

    assert results == [(10 + rank, world_size) for rank in range(world_size)]


def test_ranks_compute_on_one_thread():
    torch.set_num_threads(2)
    try:
        threads = run_ranks(2, lambda rank, size: torch.get_num_threads())
    finally:
        torch.set_num_threads(1)

    assert threads == [1, 1]


def test_backward_works_in_ranks_after_one_in_the_parent():
    def gradient(rank, size):
        x = torch.ones(64, 64, requires_grad=True)
        (x @ x).sum().backward()
        return x.grad.sum().item()

    expected = gradient(0, 1)

    assert run_ranks(2, gradient) == [expected, expected]


@pytest.mark.parametrize(("world_size", "tp", "cp"), [(4, 2, 2), (4, 4, 1), (4, 1, 4), (8, 2, 2)])
def test_grid_groups_reduce_over_their_own_ranks(world_size, tp, cp):
    def sums(rank, size):
        totals = []
        for group in make_grid(tp, cp):
            total = torch.tensor([float(rank)])
            if group is not None:
                dist.all_reduce(total, group=group)
            totals.append((total.item(), dist.get_rank(group) if group is not None else 0))
        return totals

    results = run_ranks(world_size, sums)

    for rank, (tp_result, cp_result) in enumerate(results):
        tp_rank, cp_rank, first = rank % tp, rank // tp % cp, rank - rank % (tp * cp)
        tp_peers = [first + cp_rank * tp + i for i in range(tp)]
        cp_peers = [first + i * tp + tp_rank for i in range(cp)]
        assert tp_result == (sum(tp_peers), tp_rank)
        assert cp_result == (sum(cp_peers), cp_rank)


def test_grid_that_does_not_fit_is_refused():
    with pytest.raises(RankFailure, match="3 ranks do not divide into grids of tp 2 x cp 1"):
        run_ranks(3, lambda rank, size: make_grid(2, 1))


def test_first_failure_leads_the_message():
    def fail_in_turn(rank, size):
        if rank == 1:
            raise KeyError("the cause")
        dist.barrier()

    with pytest.raises(RankFailure) as caught:
        run_ranks(3, fail_in_turn)

    message = str(caught.value)
    assert message.startswith("3 of 3 ranks failed")
    positions = [message.index(f"--- rank {rank} raised") for rank in (1, 0, 2)]
    assert positions[0] < min(positions[1:])
    assert "KeyError: 'the cause'" in message[positions[0] : min(positions[1:])]
    assert "fail_in_turn" in message
    assert isinstance(caught.value.errors[1], KeyError)
    assert set(caught.value.errors) == {0, 1, 2}


def test_ranks_that_fail_right_after_their_groups_are_made_each_report_their_own_error():
    def fail(rank, size):
        make_grid(2, 2)
        raise ValueError(f"rank {rank}")

    for _ in range(5):
        outcomes = run_ranks_expecting_errors(4, fail)

        assert [str(outcome.error) for outcome in outcomes] == [f"rank {rank}" for rank in range(4)]


def test_exceptions_come_back_as_objects_where_they_can():
    class Local(Exception):
        pass

    def fail(rank, size):
        raise (ValueError("bad row") if rank == 0 else Local("deep"))

    first, second = run_ranks_expecting_errors(2, fail)

    assert (first.status, second.status) == ("raised", "raised")
    assert isinstance(first.error, ValueError)
    assert str(first.error) == "bad row"
    assert isinstance(second.error, RemoteError)
    assert str(second.error) == "Local('deep')"
    assert "raise (ValueError" in first.details


def test_result_that_cannot_be_pickled_is_an_error_of_its_rank():
    def result(rank, size):
        return (lambda: None) if rank == 0 else rank

    first, second = run_ranks_expecting_errors(2, result)

    assert first.status == "raised"
    assert "the rank's result can't be pickled" in first.details
    assert second.value == 1


def test_hanging_rank_is_killed_at_the_timeout_and_named():
    def hang_on_one(rank, size):
        if rank == 1:
            time.sleep(60)

    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, hang_on_one, timeout=0.5)

    assert 0.5 <= time.monotonic() - start < 5
    assert list(caught.value.errors) == [1]
    assert "rank 1 hung" in str(caught.value)
    assert "in hang_on_one" in str(caught.value)
    assert [outcome.status for outcome in caught.value.outcomes] == ["returned", "hung"]


def test_stopped_rank_is_killed_too():
    def stop(rank, size):
        os.kill(os.getpid(), signal.SIGSTOP)

    (outcome,) = run_ranks_expecting_errors(1, stop, timeout=0.3)

    assert outcome.status == "hung"


def test_collective_that_a_peer_skips_raises_at_its_own_timeout():
    def skip_on_one(rank, size):
        if rank == 0:
            dist.barrier()

    first, second = run_ranks_expecting_errors(2, skip_on_one, collective_timeout=0.5)

    assert first.status == "raised"
    assert "barrier" in first.details
    assert first.seconds < 10
    assert second.status == "returned"


def test_subgroups_have_the_collective_timeout():
    def skip_on_one(rank, size):
        group, _ = make_grid(2, 1)
        if rank == 0:
            dist.all_reduce(torch.ones(1), group=group)

    first, _ = run_ranks_expecting_errors(2, skip_on_one, collective_timeout=0.5)

    assert first.status == "raised"
    assert first.seconds < 10


def test_rank_killed_by_a_signal_is_reported():
    def die_on_one(rank, size):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    first, second = run_ranks_expecting_errors(2, die_on_one)

    assert first.status == "raised"
    assert (second.status, second.signal) == ("killed", signal.SIGKILL)
    assert "rank 1 was killed by SIGKILL" in second.describe()


def test_rank_that_exits_without_a_report_is_reported():
    (outcome,) = run_ranks_expecting_errors(1, lambda rank, size: os._exit(3))

    assert (outcome.status, outcome.exit_code) == ("exited", 3)
    assert "exited with code 3 and no report" in outcome.describe()


def test_results_larger_than_a_pipe_come_through():
    def large(rank, size):
        return torch.full((10_000_000,), rank, dtype=torch.uint8)

    results = run_ranks(2, large)

    assert [result.numel() for result in results] == [10_000_000] * 2
    assert [result.unique().tolist() for result in results] == [[0], [1]]


def test_warnings_are_errors_in_ranks():
    def warn(rank, size):
        warnings.warn("look", stacklevel=1)

    (outcome,) = run_ranks_expecting_errors(1, warn)

    assert isinstance(outcome.error, UserWarning)


def test_what_ranks_print_is_captured_once(capfd):
    print("parent")

    run_ranks(2, lambda rank, size: print(f"rank {rank}"))

    out = capfd.readouterr().out
    assert [out.count(text) for text in ("parent", "rank 0", "rank 1")] == [1, 1, 1]
