"""`examples/grpo.py`, end to end in a size that takes seconds."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import rlreplay

EXAMPLE = Path(rlreplay.__file__).parents[1] / "examples" / "grpo.py"

# Engine and trainer compute the same logits in matrix products of different shapes. Logits stay
# below 32 here, where one fp32 rounding is at most 2e-6, and a log-prob takes a handful of them.
SAME_LOG_PROB = 5 * 32 * 2**-24


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("grpo_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def tiny(example: ModuleType) -> Any:
    return example.Settings(
        steps=3, prompts=4, group=4, pretrain_steps=12, pretrain_batch=32, width=32
    )


class Run:
    """One run of both arms, its report, and where it wrote."""

    def __init__(self, example: ModuleType, settings: Any, out: Path) -> None:
        console = Console(file=io.StringIO(), width=100)
        self.out = out
        self.arms = example.run(settings, out, console)
        example.report(self.arms, out, console)
        self.printed = console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def finished(example: ModuleType, tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(example, tiny, tmp_path_factory.mktemp("demo") / "out")


def test_with_replay_the_ratio_is_one(example: ModuleType, finished: Run) -> None:
    for metrics in finished.arms[example.REPLAY_ON]:
        assert metrics.max_delta <= SAME_LOG_PROB
        assert metrics.ratio == pytest.approx(1.0, abs=SAME_LOG_PROB)
        assert metrics.clipped == 0.0


def test_without_replay_the_ratio_is_the_kept_mass(example: ModuleType, finished: Run) -> None:
    # Token by token, (p / 1) / (p / mass) = mass: the means agree exactly, up to rounding.
    for metrics in finished.arms[example.REPLAY_OFF]:
        assert metrics.ratio == pytest.approx(metrics.mass, abs=SAME_LOG_PROB)
        assert metrics.mass < 0.95  # else the case would show nothing
        assert metrics.kl > 0.0


def test_both_arms_start_alike(example: ModuleType, finished: Run) -> None:
    on, off = (finished.arms[name][0] for name in (example.REPLAY_ON, example.REPLAY_OFF))
    assert (on.reward, on.support_size, on.mass) == (off.reward, off.support_size, off.mass)
    rewards = [[m.reward for m in arm] for arm in finished.arms.values()]
    assert rewards[0] != rewards[1]  # and part once they are trained


def test_the_report(finished: Run) -> None:
    line = next(x for x in finished.printed.splitlines() if "mean importance ratio" in x)
    assert "1.0000" in line
    assert "Worse without replay: before any update the importance ratio is" in finished.printed
    plot = finished.out / "grpo.png"
    assert str(plot) in finished.printed.replace("\n", "")
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_rollouts_on_disk_are_sglang_payloads(
    example: ModuleType, finished: Run, tiny: Any
) -> None:
    files = sorted(finished.out.glob("rollouts_*.jsonl"))
    assert [f.name for f in files] == ["rollouts_replay_off.jsonl", "rollouts_replay_on.jsonl"]
    for file in files:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(lines) == tiny.prompts * tiny.group
        rollouts = example.read_jsonl(file)
        for line, rollout in zip(lines, rollouts, strict=True):
            meta = line["response"]["meta_info"]
            assert rollout.response_ids.tolist() == line["response"]["output_ids"]
            assert rollout.rollout_log_probs.tolist() == meta["output_token_sampling_logprobs"]
            sent = meta["output_token_sampling_mask"]
            assert [sorted(row) for row in sent] == rollout.sampling_mask.to_mask_list()
            assert meta["output_token_sampling_mask_length"] == len(rollout)
            assert rollout.weight_versions[-1].version == str(tiny.steps - 1)


def test_supports_are_written_highest_weight_first(example: ModuleType) -> None:
    torch.manual_seed(0)
    policy = example.Policy(32)
    (request,) = example.generate(policy, [[5, 9, 3, 7, example.SEPARATOR]], torch.Generator())
    with torch.no_grad():
        tokens = torch.tensor([request.prompt_ids + request.output_ids])
        logits = policy(tokens)[0, len(request.prompt_ids) - 1 : -1]
    assert len(request.supports) == len(logits) > 1
    for row, support in zip(logits, request.supports, strict=True):
        assert len(support) > 1
        falls = row[support].diff()
        assert float(falls.max()) <= 32 * 2**-24 * 2  # neighbours may tie up to rounding


def test_runs_repeat_bit_for_bit(
    example: ModuleType, finished: Run, tiny: Any, tmp_path: Path
) -> None:
    again = Run(example, tiny, tmp_path)
    assert again.arms == finished.arms
    for file in finished.out.glob("rollouts_*.jsonl"):
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()


def test_the_loss_sends_gradient_into_the_supports_only(example: ModuleType) -> None:
    torch.manual_seed(1)
    draws = torch.Generator().manual_seed(1)
    policy = example.Policy(32)
    prompts = [prompt for prompt in example.make_prompts(2, draws) for _ in range(4)]
    payloads = [r.payload("0") for r in example.generate(policy, prompts, draws)]
    rollouts = example.sglang.from_response(payloads, prompt_ids=prompts)
    batch = example.Batch.of(rollouts, group=4)
    # an untrained policy earns nothing; any advantage shows where the gradient goes
    batch = dataclasses.replace(batch, advantages=torch.ones_like(batch.advantages))
    settings = example.Settings(entropy_bonus=0.0)  # entropy is over the whole vocabulary
    touched = {}
    for replay in (True, False):
        logits = example.packed_logits(policy, batch.tokens).detach().requires_grad_()
        example.grpo_loss(logits, batch, replay=replay, settings=settings).backward()
        touched[replay] = int(torch.count_nonzero(logits.grad))
    assert touched[True] == sum(mask.ids.size for mask in batch.masks)
    assert touched[False] == sum(batch.response_lengths) * example.VOCAB


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ([7, 3, 9, 5, 255], 1.0),
        ([7, 3, 9, 5], 0.8),
        ([7, 3, 0, 5, 255], 0.8),
        ([7, 3, 9, 5, 255, 1, 1, 1], 5 / 8),
        ([255], 0.0),
    ],
)
def test_reward_by_hand(example: ModuleType, response: list[int], expected: float) -> None:
    assert example.reward([5, 9, 3, 7, 254], response) == pytest.approx(expected)


def _metrics(example: ModuleType, rewards: list[float]) -> list[Any]:
    rest = {"ratio": 0.8, "max_delta": 1.0, "kl": 0.1, "support_size": 9.0, "mass": 0.8}
    return [example.Metrics(reward=r, clipped=0.0, **rest) for r in rewards]


@pytest.mark.parametrize(
    ("on", "off", "verdict"),
    [
        ([0.5, 0.6, 0.7], [0.4, 0.49, 0.62], "Worse without replay: the reward is 0.097 lower"),
        ([0.4, 0.49, 0.62], [0.5, 0.6, 0.7], "Not worse without replay: the reward is 0.097"),
        ([0.5, 0.6, 0.7], [0.6, 0.5, 0.7], "rewards that are the same within the noise"),
        ([0.5], [0.1], "too few batches to compare"),
    ],
)
def test_the_verdict_follows_the_rewards(
    example: ModuleType, on: list[float], off: list[float], verdict: str
) -> None:
    text = example.compared(_metrics(example, on), _metrics(example, off), "last batches")
    assert verdict in text
    assert f"{np.mean(on):.3f} with replay" in text


def test_a_clip_that_cut_nothing_is_not_reported(example: ModuleType) -> None:
    arms = {name: _metrics(example, [0.1, 0.2]) for name in ("replay on", "replay off")}
    assert not any("PPO's clip" in line for line in example.findings(arms))
