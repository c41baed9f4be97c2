"""A rank that dies in the middle of a step on NCCL: what its peer reports, and when.

NCCL itself does not see a dead peer: torch's watchdog ends the waiting process some time after the
group's timeout is over.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from rlreplay import ParallelState, ScoringConfig, get_log_probs_and_entropy
from tests.batches import cut_columns, make_batch
from tests.dist.harness import TRANSPORT, make_grid, rank_device, run_ranks_expecting_errors

pytestmark = pytest.mark.skipif(
    TRANSPORT != "nccl", reason="needs RLREPLAY_TEST_TRANSPORT=nccl and two GPUs"
)

COLLECTIVE_TIMEOUT_S = 10.0
# The watchdog looks every second or so, and then waits four times this long for a dump of what ran.
DUMP_MS = 1000
WATCHDOG_S = 25.0


def _exits_in_the_middle(rank: int, world_size: int) -> None:
    parallel = ParallelState.from_groups(*make_grid(2, 1))
    batch = make_batch(3, samples=4)
    logits = cut_columns(torch.cat(batch.logits)[None], parallel.tp_rank, 2).to(rank_device())
    all_reduce, calls = torch.distributed.all_reduce, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if rank == 1 and len(calls) == 3:  # the agreement, the scores' MAX, their SUM
            torch.cuda.synchronize()
            os._exit(3)
        return all_reduce(*args, **kwargs)

    torch.distributed.all_reduce = counted
    results = get_log_probs_and_entropy(
        logits,
        unconcat_tokens=batch.tokens,
        **batch.lengths,
        config=ScoringConfig(vocab_size=batch.vocab_size),
        parallel=parallel,
        rollout_sampling_mask=batch.masks,
    )
    torch.cat(results["log_probs"]).cpu()


@pytest.mark.timeout(200)
def test_the_watchdog_ends_the_peer_after_the_groups_timeout(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", str(DUMP_MS))
    peer, dead = run_ranks_expecting_errors(
        2, _exits_in_the_middle, timeout=90.0, collective_timeout=COLLECTIVE_TIMEOUT_S
    )
    errors = capfd.readouterr().err
    waited = peer.seconds - dead.seconds
    with capfd.disabled():
        print(f"{dead.describe()}\n{peer.describe()}\nthe peer ended {waited:.1f} s later")
        print("\n".join(line[:300] for line in errors.splitlines() if "atchdog" in line))
    assert (dead.status, dead.exit_code) == ("exited", 3)
    assert peer.status == "killed", peer.describe()
    assert COLLECTIVE_TIMEOUT_S - 2 <= waited <= COLLECTIVE_TIMEOUT_S + WATCHDOG_S
    assert "Watchdog caught collective operation timeout" in errors
