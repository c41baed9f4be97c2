"""GRPO with replay on a Megatron model, sharded over tensor- and context-parallel ranks.

    torchrun --nproc-per-node=4 examples/megatron_grpo.py --tp 2 --cp 2

A small `megatron.core` GPTModel learns to say even numbers. Its rollouts are drawn at temperature
0.9 with top-k 20 and top-p 0.9, each token with its support, and the trainer scores each token over
that support. Runs on GPUs with NCCL where every rank has one, else on CPUs with gloo. Ranks beyond
tp x cp are data-parallel. Started without torchrun, it is one rank.

To copy: `pack` (a micro-batch on a zigzag context-parallel rank), `Batch`, `forward_hidden`,
`grpo_loss`, `all_reduce_gradients`.

Sharding must not change the numbers. To see that, save one run and replay its rollouts unsharded:

    torchrun --nproc-per-node=4 examples/megatron_grpo.py --tp 2 --cp 2 --save run.pkl
    python examples/megatron_grpo.py --reference run.pkl

With `--hidden` the loss takes the hidden states before the output layer, and the logits are never
made: the log-probs from the supports' dot products alone, the entropy a chunk of rows at a time.

Shapes: `T` rows of the packed stream on this rank, `R` response rows on this rank, `V` columns of
the padded vocabulary on this rank.
"""

from __future__ import annotations

import argparse
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from rlreplay import (
    ParallelState,
    ReplayPlan,
    Rollout,
    RolloutSamplingMask,
    RowLayout,
    ScoringConfig,
    get_log_probs_and_entropy,
    score_hidden,
)
from rlreplay.capture import SamplingParams, sample

VOCAB = 50
PADDED_VOCAB = 64  # divides over TP; the same for every TP size, and so are the initial weights
LONGEST_PROMPT, LONGEST_RESPONSE = 9, 8

SAMPLING = SamplingParams(temperature=0.9, top_k=20, top_p=0.9)
SCORING = ScoringConfig(
    qkv_format="thd", cp_layout="zigzag", temperature=SAMPLING.temperature, vocab_size=VOCAB
)
TOLERANCE = 1e-5  # on losses of about 0.1, in float32

ON_GPU = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
DEVICE = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if ON_GPU else "cpu")


@dataclass(frozen=True)
class Settings:
    """Sizes and rates."""

    seed: int = 0
    steps: int = 6  # rollout batches
    prompts: int = 8  # a batch
    group: int = 8  # responses to each prompt
    updates: int = 2  # optimiser steps on each batch
    learning_rate: float = 5e-3
    adam_eps: float = 1e-4  # a tiny one makes whole steps of the rounding of tiny gradients
    clip: float = 0.2
    entropy_bonus: float = 1e-3


# The model: Megatron's, but for the modules that call CUDA.


class AllGather(torch.autograd.Function):
    """`[t, ...]` of every rank of a group, one after another: `[size * t, ...]`.

    Every rank's loss depends on all of it, so the backward sums over the ranks.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local, group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None


class GatheredAttention(nn.Module):
    """Attention of this rank's queries to the keys and values of all context-parallel ranks.

    Stands in for Transformer Engine's, for short sequences: it takes the whole `attention_mask`
    of `Packed`.
    """

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.cp_group = parallel_state.get_context_parallel_group()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: Any
    ) -> Tensor:
        if self.cp_group.size() > 1:
            key, value = AllGather.apply(torch.stack([key, value], dim=1), self.cp_group).unbind(1)
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))  # [1, heads, rows, width]
        attended = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=attention_mask, enable_gqa=True
        )
        return attended[0].transpose(0, 1).flatten(1)


class Rotary(RotaryEmbedding):
    """Megatron's, on any device."""

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        angles = self.get_freqs_non_repeated(max_seq_len, offset).to(DEVICE)
        return angles.repeat(1, 2)[:, None, None]


def build_model(parallel: ParallelState) -> GPTModel:
    """This rank's shard of a model whose initial weights do not depend on the parallel layout.

    With `use_cpu_initialization`, every rank draws each whole weight and keeps its part.
    """
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=8,
        num_query_groups=4,
        tensor_model_parallel_size=parallel.tp_size,
        context_parallel_size=parallel.cp_size,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
    )
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = GatheredAttention
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=PADDED_VOCAB,
        max_sequence_length=LONGEST_PROMPT + LONGEST_RESPONSE,
        position_embedding_type="rope",
    )
    model.rotary_pos_emb = Rotary(config.kv_channels, 1.0, use_cpu_initialization=True)
    return model.to(DEVICE)


# Packing: every sequence zigzag over the context-parallel ranks


@dataclass(frozen=True)
class Packed:
    """Sequences as one thd micro-batch, and this rank's rows of it."""

    padded_lengths: list[int]  # of each sequence in the stream
    places: Tensor  # [T], where each row of this rank stands in the stream
    token_ids: Tensor  # [1, T]
    attention_mask: Tensor  # bool [T, cp * T], true where a row sees a key
    sequence_params: PackedSeqParams  # by which Megatron finds each row's rotary position


def zigzag(padded_lengths: Sequence[int], cp_rank: int, cp_size: int) -> Tensor:
    """Places in the stream of one rank's rows: chunks c and 2cp - 1 - c of each sequence."""
    sequences = torch.arange(sum(padded_lengths)).split(list(padded_lengths))
    chunks = [s.chunk(2 * cp_size) for s in sequences]
    return torch.cat([part for c in chunks for part in (c[cp_rank], c[-1 - cp_rank])])


def pack(sequences: Sequence[Tensor], parallel: ParallelState) -> Packed:
    """Pad each sequence to a multiple of 2cp, put them one after another, take this rank's rows."""
    multiple = 2 * parallel.cp_size
    padded = [-(-len(s) // multiple) * multiple for s in sequences]
    parts = zip(sequences, padded, strict=True)
    stream = torch.cat([functional.pad(s, (0, n - len(s))) for s, n in parts])
    owner = torch.repeat_interleave(torch.tensor(padded))  # the sequence at each place
    by_rank = [zigzag(padded, c, parallel.cp_size) for c in range(parallel.cp_size)]
    mine, keys = by_rank[parallel.cp_rank], torch.cat(by_rank)  # keys: as attention gathers them
    sees = (owner[mine, None] == owner[keys]) & (mine[:, None] >= keys)
    ends = functional.pad(torch.tensor(padded).cumsum(0), (1, 0)).to(torch.int32)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(padded),
        max_seqlen_kv=max(padded),
    )
    return Packed(padded, mine, stream[None, mine].to(DEVICE), sees.to(DEVICE), params)


def forward(model: GPTModel, packed: Packed) -> Tensor:
    """Logits `[1, T, V]` of this rank's rows and vocab shard, before temperature."""
    return model(
        input_ids=packed.token_ids,
        position_ids=None,
        attention_mask=packed.attention_mask,
        packed_seq_params=packed.sequence_params,
    )


def forward_hidden(model: GPTModel, packed: Packed) -> Tensor:
    """Hidden states `[T, D]` before the output layer, after the last norm.

    A GPTModel that is not the pipeline's last stage returns them, `[T, 1, D]`; the last norm is
    the decoder's, which stays.
    """
    model.post_process = False
    try:
        return forward(model, packed).squeeze(1)
    finally:
        model.post_process = True


# Rollouts


def make_prompts(count: int, generator: torch.Generator) -> list[Tensor]:
    lengths = torch.randint(1, LONGEST_PROMPT + 1, (count,), generator=generator).tolist()
    return [torch.randint(VOCAB, (n,), generator=generator) for n in lengths]


def reward(rollout: Rollout) -> float:
    """Share of the response's numbers that are even."""
    return float(np.mean(rollout.response_ids % 2 == 0))


@torch.no_grad()
def next_token_logits(model: GPTModel, sequences: list[Tensor], parallel: ParallelState) -> Tensor:
    """`[sequences, VOCAB]` in host memory, the same bits on every rank.

    Each rank fills in the rows and columns that it holds, and one all-reduce adds them up.
    """
    packed = pack(sequences, parallel)
    logits = forward(model, packed)[0]
    starts = packed.sequence_params.cu_seqlens_q[:-1]
    last = starts + torch.tensor([len(s) - 1 for s in sequences])
    row, sequence = (packed.places[:, None] == last).nonzero(as_tuple=True)
    whole = logits.new_zeros(len(sequences), parallel.tp_size, logits.shape[1])
    whole[sequence.to(DEVICE), parallel.tp_rank] = logits[row.to(DEVICE)]
    if parallel.is_split:
        dist.all_reduce(whole, group=parallel.tp_cp_group)
    return whole.flatten(1)[:, :VOCAB].cpu()


def generate(
    model: GPTModel,
    prompts: list[Tensor],
    limits: list[int],
    generator: torch.Generator,
    parallel: ParallelState,
) -> list[Rollout]:
    """Draw `limits[i]` tokens after prompt i, each with its support and log-prob."""
    sequences, draws = list(prompts), [[] for _ in prompts]
    for step in range(max(limits)):
        running = [i for i, limit in enumerate(limits) if step < limit]
        logits = next_token_logits(model, [sequences[i] for i in running], parallel)
        drawn = sample(logits, SAMPLING, generator=generator)
        for k, i in enumerate(running):
            sequences[i] = torch.cat([sequences[i], drawn.token_ids[k : k + 1]])
            draws[i].append((drawn.mask[k : k + 1], float(drawn.log_probs[k])))
    rollouts = []
    for prompt, sequence, rows in zip(prompts, sequences, draws, strict=True):
        masks, log_probs = zip(*rows, strict=True)
        rollout = Rollout(
            prompt_ids=prompt,
            response_ids=sequence[len(prompt) :],
            sampling_mask=RolloutSamplingMask.concat(masks),
            rollout_log_probs=log_probs,
        )
        rollouts.append(rollout)
    dist.broadcast_object_list(rollouts, src=0, device=DEVICE)  # the same for all replicas
    return rollouts


# The trainer


@dataclass(frozen=True)
class Batch:
    """What the loss needs. Lists: this replica's whole samples. Tensors `[R]`: this rank's rows."""

    packed: Packed
    layout: RowLayout
    tokens: list[np.ndarray]  # prompt + response of each sample
    masks: list[RolloutSamplingMask]
    old_log_probs: Tensor  # the engine's, normalised over the supports
    advantages: Tensor
    loss_mask: Tensor
    num_tokens: int  # that take part in the loss, on all ranks
    plan: ReplayPlan  # of the micro-batch, for `hidden_scores`

    @classmethod
    def of(cls, rollouts: list[Rollout], advantages: Tensor, parallel: ParallelState) -> Batch:
        """This rank's share of rollouts that all ranks hold."""
        replica = parallel_state.get_data_parallel_rank()
        replicas = parallel_state.get_data_parallel_world_size()
        samples = rollouts[replica::replicas]
        packed = pack([torch.from_numpy(r.tokens) for r in samples], parallel)
        layout = RowLayout.zigzag(
            [r.total_length for r in samples],
            [len(r) for r in samples],
            cp_rank=parallel.cp_rank,
            cp_size=parallel.cp_size,
            padded_lengths=packed.padded_lengths,
        )

        def rows(responses: list[Tensor]) -> Tensor:
            return torch.cat(layout.slice(responses)).to(DEVICE)

        mine = zip(advantages[replica::replicas], samples, strict=True)
        tokens, masks = [r.tokens for r in samples], [r.sampling_mask for r in samples]
        return cls(
            packed=packed,
            layout=layout,
            tokens=tokens,
            masks=masks,
            plan=ReplayPlan.build(
                tokens,
                masks,
                layout,
                parallel=parallel,
                vocab_size=VOCAB,
                device=DEVICE,
                shard_columns=PADDED_VOCAB // parallel.tp_size,
                sort_ids=True,
            ),
            old_log_probs=rows([torch.tensor(r.rollout_log_probs) for r in samples]),
            advantages=rows([advantage.expand(len(r)) for advantage, r in mine]),
            loss_mask=rows([torch.tensor(r.loss_mask) for r in samples]),
            num_tokens=sum(int(r.loss_mask.sum()) for r in rollouts),
        )


def group_advantages(rewards: Tensor, group: int) -> Tensor:
    """Each reward against the others of its prompt."""
    groups = rewards.view(-1, group)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + 1e-6)).flatten()


def logits_scores(model: GPTModel, batch: Batch, parallel: ParallelState) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies `[R]` from the logits."""
    scores = get_log_probs_and_entropy(
        forward(model, batch.packed),
        unconcat_tokens=batch.tokens,
        total_lengths=batch.layout.total_lengths,
        response_lengths=batch.layout.response_lengths,
        padded_lengths=batch.packed.padded_lengths,
        config=SCORING,
        parallel=parallel,
        rollout_sampling_mask=batch.masks,
        with_entropy=True,
    )
    return torch.cat(scores["log_probs"]), torch.cat(scores["entropy"])


def hidden_scores(model: GPTModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """The same from the hidden states, without logits."""
    hidden, weight = forward_hidden(model, batch.packed), model.output_layer.weight
    if model.share_embeddings_and_output_weights:
        weight = model.shared_embedding_or_output_weight()

    def score(name: str) -> Tensor:
        scores = score_hidden(
            hidden, weight, batch.plan, scores=name, temperature=SAMPLING.temperature
        )
        return scores.asked()[name]

    return score("log_probs"), score("entropy")


def grpo_loss(
    log_probs: Tensor, entropy: Tensor, batch: Batch, settings: Settings
) -> tuple[Tensor, dict[str, Tensor]]:
    """This rank's share of the GRPO loss, and of the batch's means.

    PPO's clipped surrogate and an entropy bonus. Log-probs are over the supports, entropy is over
    the vocabulary. A share is a sum over this rank's rows divided by the tokens of all ranks, so
    that shares add up over the data- and context-parallel ranks. Tensor-parallel ranks hold the
    same rows and the same share: theirs do not add up.

    Args:
        log_probs, entropy: `[R]`.
    """
    ratio = torch.exp(log_probs - batch.old_log_probs)
    clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    surrogate = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)

    def share(values: Tensor) -> Tensor:
        return (values * batch.loss_mask).sum() / batch.num_tokens

    loss = -share(surrogate + settings.entropy_bonus * entropy)
    return loss, {"loss": loss, "ratio": share(ratio), "entropy": share(entropy)}


def all_reduce_gradients(model: nn.Module) -> None:
    """Sum the gradients over the data- and context-parallel ranks.

    Over tensor-parallel ranks there is nothing to add up: each has the gradient of its own shard,
    and without sequence parallelism all have that of the norms' weights.
    """
    gradients = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def added_up(shares: dict[str, Tensor]) -> dict[str, float]:
    """The ranks' shares added up, on every rank."""
    total = torch.stack([share.detach() for share in shares.values()])
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return dict(zip(shares, total.tolist(), strict=True))


@dataclass(frozen=True)
class Step:
    """One rollout batch, and what training on it gave."""

    rollouts: list[Rollout]
    reward: float
    ratio: float  # mean importance ratio before the first update: 1 but for rounding
    entropy: float  # before the first update
    losses: list[float]  # of each update


def train(
    settings: Settings, parallel: ParallelState, recorded: list[Step] | None, hidden: bool
) -> Iterator[Step]:
    """GRPO on the model's own rollouts, or on recorded ones. Yields each step, on every rank."""
    torch.manual_seed(settings.seed)
    model = build_model(parallel)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, eps=settings.adam_eps, weight_decay=0
    )
    random = torch.Generator().manual_seed(settings.seed + 1)
    for step in range(settings.steps):
        if recorded is None:
            once = make_prompts(settings.prompts, random)
            prompts = [prompt for prompt in once for _ in range(settings.group)]
            limits = torch.randint(1, LONGEST_RESPONSE + 1, (len(prompts),), generator=random)
            rollouts = generate(model, prompts, limits.tolist(), random, parallel)
        else:
            rollouts = recorded[step].rollouts
        rewards = torch.tensor([reward(r) for r in rollouts])
        batch = Batch.of(rollouts, group_advantages(rewards, settings.group), parallel)
        updates = []
        for _ in range(settings.updates):
            if hidden:
                scores = hidden_scores(model, batch)
            else:
                scores = logits_scores(model, batch, parallel)
            loss, shares = grpo_loss(*scores, batch, settings)
            optimizer.zero_grad()
            loss.backward()
            all_reduce_gradients(model)
            optimizer.step()
            updates.append(added_up(shares))
        before, losses = updates[0], [update["loss"] for update in updates]
        yield Step(rollouts, float(rewards.mean()), before["ratio"], before["entropy"], losses)


# Main


def initialise(tp: int, cp: int) -> ParallelState:
    """Join the other ranks."""
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    backend = "nccl" if ON_GPU else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:  # started without torchrun
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, context_parallel_size=cp
    )
    return ParallelState.from_megatron()


def print_table(steps: list[Step]) -> None:
    print("step  reward  ratio before  entropy  loss of each update")
    for k, s in enumerate(steps):
        losses = "  ".join(f"{loss:+.5f}" for loss in s.losses)
        print(f"{k:4}  {s.reward:6.3f}  {s.ratio:12.5f}  {s.entropy:7.3f}  {losses}")


def largest_difference(steps: list[Step], reference: list[Step]) -> float:
    """Of a loss from the reference's; the run fails where it is too large."""
    losses, expected = (torch.tensor([s.losses for s in run]) for run in (steps, reference))
    largest = float((losses - expected).abs().max())
    if not largest <= TOLERANCE:  # NaN is not
        raise SystemExit(f"a loss is {largest:.1e} from the reference's, more than {TOLERANCE}")
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="rollout batches")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the run to FILE")
    said = "train on the rollouts that --save wrote to FILE; its losses must come out"
    parser.add_argument("--reference", type=Path, metavar="FILE", help=said)
    without = "score the hidden states, without making logits"
    parser.add_argument("--hidden", action="store_true", help=without)
    options = parser.parse_args()
    settings, recorded = Settings(seed=options.seed, steps=options.steps), None
    if options.reference:
        settings, recorded = pickle.loads(options.reference.read_bytes())
    parallel = initialise(options.tp, options.cp)
    steps = list(train(settings, parallel, recorded, options.hidden))
    first = dist.get_rank() == 0
    if first:
        print_table(steps)
    if first and options.save:
        options.save.write_bytes(pickle.dumps((settings, steps)))
    if recorded is not None:
        largest = largest_difference(steps, recorded)
        if first:
            print(f"largest difference of a loss from the reference's: {largest:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
