"""GRPO from truncated rollouts, with and without replay of the sampler's supports.

A small transformer learns to say numbers backwards. It is first trained on noisy demonstrations,
which leave it mediocre and with a flat tail over the whole vocabulary, and then by GRPO. Its
rollouts are drawn at temperature 0.9 with top-k 20 and top-p 0.9 and travel as SGLang payloads:
written as JSONL, read back through `rlreplay.engines.sglang`.

Two arms start from the same checkpoint, with the same prompts and the same random numbers:

- replay on: the trainer scores each token over the support that the sampler drew it from;
- replay off: the trainer scores it over the full vocabulary, as most trainers do.

`grpo_loss` is the function to copy. Needs torch, rlreplay and its extra `cli` (rich, matplotlib):

    python examples/grpo.py [--out DIR] [--steps N] [--seed N]
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from rlreplay import Rollout, RolloutSamplingMask, ScoringConfig, get_log_probs_and_entropy
from rlreplay.capture import SamplingParams, sample
from rlreplay.engines import sglang

NUMBERS = 254  # ids 0 to 253 are the numbers to reverse
SEPARATOR, END, VOCAB = 254, 255, 256
SHORTEST, LONGEST = 4, 6  # numbers in a prompt
MAX_RESPONSE = LONGEST + 1
MAX_POSITIONS = LONGEST + 1 + MAX_RESPONSE

SAMPLING = SamplingParams(temperature=0.9, top_k=20, top_p=0.9)
SCORING = ScoringConfig(qkv_format="thd", temperature=SAMPLING.temperature, vocab_size=VOCAB)


@dataclass(frozen=True)
class Settings:
    """Sizes and rates. The defaults take less than a minute on one core."""

    seed: int = 0
    steps: int = 100  # rollout batches
    prompts: int = 16  # a batch
    group: int = 8  # responses to each prompt
    updates: int = 2  # optimiser steps on each batch
    learning_rate: float = 1e-3
    clip: float = 0.2
    entropy_bonus: float = 1e-3
    pretrain_steps: int = 75
    pretrain_batch: int = 128
    pretrain_rate: float = 3e-3
    noise: float = 0.25  # share of the demonstrations' numbers that are wrong
    width: int = 96


# The task: prompt "9 4 7 1 |", answer "1 7 4 9 end".


def make_prompts(count: int, generator: torch.Generator) -> list[list[int]]:
    """Random numbers and the separator, `count` times."""
    lengths = torch.randint(SHORTEST, LONGEST + 1, (count,), generator=generator).tolist()
    numbers = [torch.randint(NUMBERS, (n,), generator=generator).tolist() for n in lengths]
    return [[*some, SEPARATOR] for some in numbers]


def answer(prompt: list[int]) -> list[int]:
    """The numbers of the prompt backwards, and the end."""
    return [*reversed(prompt[:-1]), END]


def reward(prompt: list[int], response: list[int]) -> float:
    """Share of the places that are right, out of the longer of the answer and the response."""
    wanted = answer(prompt)
    right = sum(a == b for a, b in zip(wanted, response, strict=False))
    return right / max(len(wanted), len(response))


# The policy


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm_mlp(x))


class Policy(nn.Module):
    """Token ids `[B, S]` to logits `[B, S, V]`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = (nn.Embedding(n, width) for n in (VOCAB, MAX_POSITIONS))
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=width**-0.5)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB)

    def forward(self, token_ids: Tensor) -> Tensor:
        x = self.tokens(token_ids) + self.positions.weight[: token_ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def packed_logits(policy: Policy, sequences: list[Tensor]) -> Tensor:
    """Logits `[1, T, V]` of sequences packed one after another, as a thd trainer has them."""
    padded = pad_sequence(sequences, batch_first=True)  # causal: padding behind changes nothing
    lengths = torch.tensor([len(s) for s in sequences])
    real = torch.arange(padded.shape[1]) < lengths[:, None]
    return policy(padded)[real][None]


def pretrain(policy: Policy, settings: Settings, generator: torch.Generator) -> Iterator[None]:
    """Next-token training on demonstrations, some of whose numbers are random. Yields each step."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.pretrain_rate)
    for step in range(settings.pretrain_steps):
        warm_up, decay = (step + 1) / 20, 1 - 0.9 * step / settings.pretrain_steps
        optimizer.param_groups[0]["lr"] = settings.pretrain_rate * min(1.0, warm_up) * decay
        prompts = make_prompts(settings.pretrain_batch, generator)
        answers = [torch.tensor(answer(p)) for p in prompts]
        for tokens in answers:
            wrong = torch.rand(len(tokens), generator=generator) < settings.noise
            tokens[wrong] = torch.randint(NUMBERS, (int(wrong.sum()),), generator=generator)
        sequences = [torch.cat([torch.tensor(p), a]) for p, a in zip(prompts, answers, strict=True)]
        logits = packed_logits(policy, [s[:-1] for s in sequences])[0]
        targets = torch.cat([s[1:] for s in sequences])
        in_answer = torch.cat(
            [torch.arange(1, len(s)) >= len(p) for s, p in zip(sequences, prompts, strict=True)]
        )
        optimizer_step(
            policy, optimizer, functional.cross_entropy(logits[in_answer], targets[in_answer])
        )
        yield


def optimizer_step(policy: Policy, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step down the gradient, clipped to norm 1."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()


# The rollout engine: stands in for SGLang, and writes what SGLang returns


@dataclass
class Request:
    """One response under way."""

    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    supports: list[list[int]] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.output_ids) == MAX_RESPONSE or END in self.output_ids

    def payload(self, weight_version: str) -> dict[str, Any]:
        """The response in SGLang's format."""
        stopped = END in self.output_ids
        reason = {"type": "stop", "matched": END} if stopped else {"type": "length"}
        return {
            "output_ids": self.output_ids,
            "meta_info": {
                "finish_reason": reason | ({} if stopped else {"length": len(self.output_ids)}),
                "prompt_tokens": len(self.prompt_ids),
                "completion_tokens": len(self.output_ids),
                "weight_version": weight_version,
                "output_token_sampling_mask": self.supports,
                "output_token_sampling_logprobs": self.log_probs,
                "output_token_sampling_mask_length": len(self.supports),
            },
        }


@torch.no_grad()
def generate(policy: Policy, prompts: list[list[int]], generator: torch.Generator) -> list[Request]:
    """Sample a response to each prompt, with the support and the log-prob of each token."""
    requests = [Request(prompt) for prompt in prompts]
    while running := [r for r in requests if not r.done]:
        sequences = [torch.tensor(r.prompt_ids + r.output_ids) for r in running]
        last = torch.tensor([len(s) - 1 for s in sequences])
        logits = policy(pad_sequence(sequences, batch_first=True))[torch.arange(len(last)), last]
        drawn = sample(logits, SAMPLING, cutoff="threshold", order="joint", generator=generator)
        for i, request in enumerate(running):
            support = torch.from_numpy(drawn.mask[i].astype(np.int64))
            highest_first = support[logits[i, support].argsort(descending=True, stable=True)]
            request.supports.append(highest_first.tolist())
            request.output_ids.append(int(drawn.token_ids[i]))
            request.log_probs.append(float(drawn.log_probs[i]))
    return requests


def write_jsonl(path: Path, requests: list[Request], weight_version: str) -> None:
    """One line a response: its prompt and SGLang's answer."""
    lines = [
        json.dumps({"prompt_ids": r.prompt_ids, "response": r.payload(weight_version)})
        for r in requests
    ]
    path.write_text("\n".join(lines) + "\n")


def read_jsonl(path: Path) -> list[Rollout]:
    """The rollouts of a file, every one checked."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return sglang.from_response(
        [line["response"] for line in lines],
        prompt_ids=[line["prompt_ids"] for line in lines],
        vocab_size=VOCAB,
    )


# The trainer


@dataclass(frozen=True)
class Batch:
    """What the loss needs. `R`: response tokens of all samples, one after another."""

    tokens: list[Tensor]  # prompt + response of each sample
    total_lengths: list[int]
    response_lengths: list[int]
    masks: list[RolloutSamplingMask]
    old_log_probs: Tensor  # [R], the engine's, normalised over the supports
    advantages: Tensor  # [R]
    loss_mask: Tensor  # [R]
    mean_reward: float

    @classmethod
    def of(cls, rollouts: list[Rollout], group: int) -> Batch:
        """Reward each response, and compare it with the others of its group."""
        rewards = torch.tensor(
            [reward(r.prompt_ids.tolist(), r.response_ids.tolist()) for r in rollouts]
        )
        groups = rewards.view(-1, group)
        centred = groups - groups.mean(dim=1, keepdim=True)
        advantages = (centred / (groups.std(dim=1, keepdim=True) + 1e-6)).flatten()
        lengths = [len(r) for r in rollouts]
        return cls(
            tokens=[torch.from_numpy(r.tokens) for r in rollouts],
            total_lengths=[r.total_length for r in rollouts],
            response_lengths=lengths,
            masks=[r.sampling_mask for r in rollouts],
            old_log_probs=torch.from_numpy(np.concatenate([r.rollout_log_probs for r in rollouts])),
            advantages=advantages.repeat_interleave(torch.tensor(lengths)),
            loss_mask=torch.from_numpy(np.concatenate([r.loss_mask for r in rollouts])),
            mean_reward=float(rewards.mean()),
        )


def score(logits: Tensor, batch: Batch, *, replay: bool, **wanted: Any) -> dict[str, Tensor]:
    """Scores `[R]` of all response tokens, on the sampler's supports or on the vocabulary."""
    scores = get_log_probs_and_entropy(
        logits,
        unconcat_tokens=batch.tokens,
        total_lengths=batch.total_lengths,
        response_lengths=batch.response_lengths,
        config=SCORING,
        rollout_sampling_mask=batch.masks if replay else None,
        **wanted,
    )
    return {name: torch.cat(values) for name, values in scores.items()}


def grpo_loss(logits: Tensor, batch: Batch, *, replay: bool, settings: Settings) -> Tensor:
    """GRPO: PPO's clipped surrogate on group-normalised advantages, with an entropy bonus.

    `logits` `[1, T, V]` are raw: the temperature is applied inside. Log-probs are over the
    supports, entropy is over the full vocabulary. The mean is over the tokens of the batch.
    """
    scores = score(logits, batch, replay=replay, with_entropy=True)
    ratio = torch.exp(scores["log_probs"] - batch.old_log_probs)
    clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    surrogate = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    objective = surrogate + settings.entropy_bonus * scores["entropy"]
    return -(objective * batch.loss_mask).sum() / batch.loss_mask.sum()


@dataclass(frozen=True)
class Metrics:
    """One rollout batch, scored by the weights that sampled it, before any update."""

    reward: float
    ratio: float  # mean importance ratio
    max_delta: float  # max |trainer's log-prob - engine's|
    kl: float  # k3 estimate of KL(engine, trainer), nats a token
    clipped: float  # share of the tokens whose gradient PPO's clip has already cut
    support_size: float
    mass: float  # mean probability that the trainer's full softmax gives to the support


@torch.no_grad()
def measure(logits: Tensor, batch: Batch, *, replay: bool, settings: Settings) -> Metrics:
    """How far the trainer's log-probs are from the engine's."""
    log_ratio = score(logits, batch, replay=replay)["log_probs"] - batch.old_log_probs
    mass = score(logits, batch, replay=True, scores=("log_support_mass",))["log_support_mass"]
    ratio, rises = log_ratio.exp(), batch.advantages > 0
    cut = (rises & (ratio > 1 + settings.clip)) | (~rises & (ratio < 1 - settings.clip))
    return Metrics(
        reward=batch.mean_reward,
        ratio=float(ratio.mean()),
        max_delta=float(log_ratio.abs().max()),
        kl=float((torch.expm1(log_ratio.double()) - log_ratio).mean()),
        clipped=float((cut & (batch.advantages != 0)).float().mean()),
        support_size=float(np.concatenate([m.lengths for m in batch.masks]).mean()),
        mass=float(mass.exp().mean()),
    )


def train(policy: Policy, settings: Settings, path: Path, *, replay: bool) -> Iterator[Metrics]:
    """GRPO on one arm. Yields the metrics of each rollout batch; `path` holds the latest one."""
    prompt_source = torch.Generator().manual_seed(settings.seed + 1)
    draws = torch.Generator().manual_seed(settings.seed + 2)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate, weight_decay=0)
    for step in range(settings.steps):
        prompts = make_prompts(settings.prompts, prompt_source)
        asked = [prompt for prompt in prompts for _ in range(settings.group)]
        write_jsonl(path, generate(policy, asked, draws), weight_version=str(step))
        batch = Batch.of(read_jsonl(path), settings.group)
        for update in range(settings.updates):
            logits = packed_logits(policy, batch.tokens)
            if update == 0:
                yield measure(logits, batch, replay=replay, settings=settings)
            loss = grpo_loss(logits, batch, replay=replay, settings=settings)
            optimizer_step(policy, optimizer, loss)


# The report


REPLAY_ON, REPLAY_OFF = "replay on", "replay off"
COLOURS = {REPLAY_ON: "#0072b2", REPLAY_OFF: "#d55e00"}


def tenth(metrics: list[Metrics]) -> int:
    """How many batches make the start or the end of a run."""
    return max(1, len(metrics) // 10)


def reward_of(part: list[Metrics]) -> float:
    """Mean reward of some batches."""
    return fmean(m.reward for m in part)


# What the table calls a metric, how it writes it, and how it sums up several batches.
ROWS: dict[str, tuple[str, str, Callable[[list[float]], float]]] = {
    "ratio": ("mean importance ratio", ".4f", fmean),
    "max_delta": ("max |Δ log-prob|", ".1e", max),
    "kl": ("mismatch KL (k3), nats a token", ".1e", fmean),
    "clipped": ("tokens already past PPO's clip", ".1%", fmean),
    "support_size": ("mean support size", ".1f", fmean),
    "mass": ("mean kept mass", ".4f", fmean),
}


def table_of(arms: dict[str, list[Metrics]]) -> Table:
    """One column an arm: the first batch, all batches, and the rewards."""
    table = Table("", *arms, title="GRPO from top-k/top-p rollouts")
    for column in table.columns[1:]:
        column.justify = "right"

    def add_section(title: str, parts: list[list[Metrics]]) -> None:
        table.add_row(f"[bold]{title}")
        for name, (label, shape, total) in ROWS.items():
            values = [total([getattr(m, name) for m in part]) for part in parts]
            table.add_row(f"  {label}", *(format(value, shape) for value in values))
        table.add_section()

    add_section("first batch, before any update", [arm[:1] for arm in arms.values()])
    add_section("all batches, before their first update", list(arms.values()))
    ends = tenth(arms[REPLAY_ON])
    starts = [reward_of(arm[:1]) for arm in arms.values()]
    finals = [reward_of(arm[-ends:]) for arm in arms.values()]
    table.add_row("reward at the start", *(f"{r:.3f}" for r in starts))
    table.add_row(f"reward at the end (last {ends})", *(f"{r:.3f}" for r in finals))
    return table


def findings(arms: dict[str, list[Metrics]]) -> list[str]:
    """What replay off did worse in this run, and what it did not, from the figures."""
    on, off = arms[REPLAY_ON], arms[REPLAY_OFF]
    ratio, mass, cut = (fmean(getattr(m, n) for m in off) for n in ("ratio", "mass", "clipped"))
    third, end = max(1, len(on) // 3), tenth(on)
    lines = [
        f"Worse without replay: before any update the importance ratio is {ratio:.3f} on average "
        f"({off[0].ratio:.3f} on the first batch), where it should be 1. It is the kept mass "
        f"({mass:.3f}): the engine normalises over the support, the trainer over the vocabulary."
    ]
    if cut > 0:
        lines.append(
            f"Worse without replay: {cut:.1%} of the tokens ({off[0].clipped:.1%} on the first "
            "batch) are past PPO's clip before the policy has moved, and send no gradient."
        )
    return [
        *lines,
        compared(on[:third], off[:third], f"first {third} batches"),
        compared(on[-end:], off[-end:], f"last {end} batches"),
        "One small task and one seed: the ratio is wrong wherever supports are truncated, but what "
        "that does to the rewards may differ elsewhere.",
    ]


def compared(on: list[Metrics], off: list[Metrics], when: str) -> str:
    """Which arm has the higher reward, unless the difference is within two standard errors.

    Both arms see the same prompts, so that the difference is taken batch by batch.
    """
    differences = np.array([a.reward - b.reward for a, b in zip(on, off, strict=True)])
    mean = float(differences.mean())
    figures = f"{reward_of(on):.3f} with replay, {reward_of(off):.3f} without"
    if len(on) < 2:
        return f"Reward, {when}: {figures}; too few batches to compare."
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    if abs(mean) <= 2 * error:
        verdict = "Not worse without replay: rewards that are the same within the noise"
    elif mean > 0:
        verdict = f"Worse without replay: the reward is {mean:.3f} lower"
    else:
        verdict = f"Not worse without replay: the reward is {-mean:.3f} higher"
    return f"{verdict} in the {when} ({figures}; standard error {error:.3f})."


def smoothed(values: list[float], window: int) -> list[float]:
    """The mean of the last `window` values at each step."""
    return [fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def plot(arms: dict[str, list[Metrics]], path: Path) -> None:
    """Reward, and mean importance ratio before the first update, over the rollout batches."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    reward_axes, ratio_axes = figure.subplots(1, 2)
    window = tenth(arms[REPLAY_ON])
    for name, metrics in arms.items():
        rewards = [m.reward for m in metrics]
        reward_axes.plot(rewards, color=COLOURS[name], alpha=0.25, linewidth=1)
        reward_axes.plot(smoothed(rewards, window), color=COLOURS[name], linewidth=2, label=name)
        ratio_axes.plot([m.ratio for m in metrics], color=COLOURS[name], linewidth=2, label=name)
    mass = [m.mass for m in arms[REPLAY_OFF]]
    ratio_axes.plot(mass, "k:", linewidth=1.5, label="kept mass of replay off")
    reward_axes.set(title=f"Reward of each batch, and mean of the last {window}", ylabel="reward")
    ratio_axes.set(title="Mean importance ratio before the first update", ylabel="mean ratio")
    for axes in (reward_axes, ratio_axes):
        axes.set_xlabel("rollout batch")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


# Main


def run(settings: Settings, out: Path, console: Console) -> dict[str, list[Metrics]]:
    """Pretrain once, then train both arms from that checkpoint."""
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(settings.seed)
    checkpoint = Policy(settings.width)
    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    arms = {}
    with Progress(*columns, console=console) as progress:
        source = torch.Generator().manual_seed(settings.seed)
        steps = pretrain(checkpoint, settings, source)
        list(progress.track(steps, settings.pretrain_steps, description="noisy demonstrations"))
        for name in (REPLAY_ON, REPLAY_OFF):
            path = out / f"rollouts_{name.replace(' ', '_')}.jsonl"
            batches = train(copy.deepcopy(checkpoint), settings, path, replay=name == REPLAY_ON)
            arms[name] = list(progress.track(batches, settings.steps, description=f"GRPO, {name}"))
    return arms


def report(arms: dict[str, list[Metrics]], out: Path, console: Console) -> None:
    """Print the table and what it says; draw the plot."""
    console.print(table_of(arms))
    for finding in findings(arms):
        console.print(f"- {finding}", highlight=False)
    path = out / "grpo.png"
    plot(arms, path)
    console.print(f"Plot: {path.resolve()}", soft_wrap=True)
    console.print(f"Latest rollouts of each arm: {out.resolve()}/rollouts_*.jsonl", soft_wrap=True)


def positive(text: str) -> int:
    """A command-line number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="output directory")
    parser.add_argument(
        "--steps", type=positive, default=Settings.steps, help="rollout batches of each arm"
    )
    parser.add_argument("--seed", type=int, default=Settings.seed)
    # The matrices are small: a second thread gains little, and loses a lot on a busy machine.
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    console = Console()
    began = time.perf_counter()
    arms = run(Settings(seed=options.seed, steps=options.steps), options.out, console)
    report(arms, options.out, console)
    console.print(f"Time: {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
