"""`ParallelState`: what it takes, what it refuses, and where it comes from."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlreplay.parallel import ParallelState
from tests.fast.strategies import FAKE_GROUP, parallel_state, refused

# Run apart: importing megatron takes seconds, and its state is global.
FROM_MEGATRON = """
import json
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # megatron's own, at its import
    from megatron.core import parallel_state
import torch.distributed as dist
from rlreplay import ParallelState, ReplayError

told = {}
try:
    ParallelState.from_megatron()
except ReplayError as error:
    told["error"] = str(error)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
told["single"] = ParallelState.from_megatron() == ParallelState.single()
parallel_state.destroy_model_parallel()
try:
    ParallelState.from_megatron()
except ReplayError as error:
    told["error_after"] = str(error)
dist.destroy_process_group()
print(json.dumps(told))
"""


@pytest.fixture
def group_of_one() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    yield world
    dist.destroy_process_group()


def test_single_rank() -> None:
    single = ParallelState.single()
    assert dataclasses.astuple(single) == (0, 1, None, 0, 1, None, None)
    assert single == ParallelState() == ParallelState.from_groups()


def test_no_group_is_an_axis_of_one_even_in_an_initialised_world(
    group_of_one: dist.ProcessGroup,
) -> None:
    assert ParallelState.from_groups(None, None) == ParallelState.single()
    alone = ParallelState.from_groups(group_of_one, group_of_one, group_of_one)
    assert alone == ParallelState.single()  # nothing is ever sent over a group of one
    assert ParallelState(tp_group=group_of_one) == ParallelState.single()


def test_from_groups_reads_each_group_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    places: dict[Any, tuple[int, int]] = {"tensor": (3, 4), "context": (1, 2)}
    monkeypatch.setattr(dist, "get_rank", lambda group: places[group][0])
    monkeypatch.setattr(dist, "get_world_size", lambda group: places[group][1])
    groups: dict[str, Any] = {"tp_group": "tensor", "cp_group": "context"}
    state = ParallelState.from_groups(**groups)
    assert state == ParallelState(3, 4, groups["tp_group"], 1, 2, groups["cp_group"])
    only_context = ParallelState.from_groups(cp_group=groups["cp_group"])
    assert only_context == ParallelState(0, 1, None, 1, 2, groups["cp_group"])


@pytest.mark.parametrize(("axis", "argument"), [("tensor", "tp_group"), ("context", "cp_group")])
def test_a_group_of_others_is_refused(axis: str, argument: str) -> None:
    others = dist.GroupMember.NON_GROUP_MEMBER
    with refused(f"this rank is not in the {axis}-parallel group") as caught:
        ParallelState.from_groups(**{argument: others})
    assert "-1" not in caught.value.got


@pytest.mark.parametrize(("axis", "short"), [("tensor", "tp"), ("context", "cp")])
@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (1, 1), (0, 0), (0, -1)])
def test_ranks_outside_their_size_are_refused(axis: str, short: str, rank: int, size: int) -> None:
    with refused(f"no such {axis}-parallel rank: .* got {rank}"):
        ParallelState(
            **{f"{short}_rank": rank, f"{short}_size": size, f"{short}_group": FAKE_GROUP}
        )


@pytest.mark.parametrize(("axis", "short"), [("tensor", "tp"), ("context", "cp")])
def test_no_group_never_means_the_whole_world(axis: str, short: str) -> None:
    with refused(f"no {axis}-parallel group: expected a process group of 2 ranks, got None"):
        ParallelState(**{f"{short}_rank": 1, f"{short}_size": 2})


def test_it_is_a_value() -> None:
    state = parallel_state(tp_rank=1, tp_size=2)
    assert state == parallel_state(tp_rank=1, tp_size=2)
    assert state != parallel_state(tp_rank=0, tp_size=2)
    assert state != dataclasses.replace(state, tp_group=object())
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.tp_rank = 0  # type: ignore[misc]


# Agreement


@contextmanager
def peers(answers: dict[str, list[int]]) -> Iterator[list[str]]:
    """All-reduces over groups named by strings, in which one peer tells what `answers` says."""
    entered: list[str] = []

    def all_reduce(values: torch.Tensor, op: Any = None, group: Any = None) -> None:
        assert op == dist.ReduceOp.MAX
        assert values.dtype == torch.int64
        entered.append(group)
        values.copy_(torch.maximum(values, torch.tensor(answers[group])))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        patch.setattr(dist, "get_world_size", lambda group: 4)
        yield entered


FINE = [0, 0, 7, -7]  # a peer with the fingerprint 7
RAISED = [1, 0, 0, 0]


def grid(*, joint: bool = False, tp: bool = True, cp: bool = True) -> ParallelState:
    groups: dict[str, Any] = {"tp": "tp", "cp": "cp", "joint": "joint"}
    return ParallelState(
        tp_size=2 if tp else 1,
        tp_group=groups["tp"] if tp else None,
        cp_size=2 if cp else 1,
        cp_group=groups["cp"] if cp else None,
        tp_cp_group=groups["joint"] if joint else None,
    )


def fail() -> int:
    raise KeyError("mine")


def test_agreement_of_a_single_rank_enters_no_collective() -> None:
    single = ParallelState.single()
    assert not single.is_split
    with peers({}) as entered:
        assert single.agreed(lambda: 3, lambda result: 7) == 3
        with pytest.raises(KeyError, match="mine"):
            single.agreed(fail, lambda result: 7)
    assert entered == []


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({"cp": False}, ["tp"]),
        ({"tp": False}, ["cp"]),
        ({}, ["tp", "cp"]),
        ({"joint": True}, ["joint"]),
    ],
)
def test_agreement_of_all_ranks(options: dict[str, bool], groups: list[str]) -> None:
    for answer, own, problem in (
        (FINE, lambda: 3, None),
        (RAISED, lambda: 3, "another rank refused"),
        ([0, 0, 8, -8], lambda: 3, "the ranks hold different data"),
        ([0, 0, 6, -6], lambda: 3, "the ranks hold different data"),
        ([0, 0, 0, 0], lambda: 3, "the ranks hold different data"),
        (FINE, fail, None),
        (RAISED, fail, None),
        ([0, 0, 8, -8], fail, None),
    ):
        # whichever of the groups the peer is in, the same collectives are entered
        for place in groups:
            answers = dict.fromkeys(groups, FINE) | {place: answer}
            with peers(answers) as entered:
                state = grid(**options)
                assert state.is_split
                if own is fail:
                    with pytest.raises(KeyError, match="mine"):
                        state.agreed(own, lambda result: 7)
                elif problem:
                    with refused(problem):
                        state.agreed(own, lambda result: 7)
                else:
                    assert state.agreed(own, lambda result: 7) == 3
            assert entered == groups


def test_a_disagreement_seen_by_tp_peers_alone_reaches_this_rank_over_cp() -> None:
    # The CP peer has this rank's fingerprint, but its own TP peers hold others.
    with peers({"tp": FINE, "cp": [0, 1, 7, -7]}), refused("the ranks hold different data"):
        grid().agreed(lambda: 3, lambda result: 7)


def test_a_fingerprint_that_fails_is_told_to_the_others() -> None:
    def fingerprint(result: int) -> int:
        return fail()

    with peers({"tp": FINE, "cp": FINE}) as entered, pytest.raises(KeyError, match="mine"):
        grid().agreed(lambda: 3, fingerprint)
    assert entered == ["tp", "cp"]


def test_a_joint_group_of_another_size_is_refused() -> None:
    with peers({}), refused("tp_cp_group is not the group of both axes: expected 2 ranks, got 4"):
        grid(joint=True, cp=False)


# Megatron


def test_from_megatron_refuses_until_megatron_is_initialised() -> None:
    run = subprocess.run(
        [sys.executable, "-c", FROM_MEGATRON], capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["error"].startswith("Megatron's parallel state is not initialised: expected")
    assert told["error_after"] == told["error"]
    assert told["single"] is True
