import json
from pathlib import Path

import torch

from rlreplay import ScoringConfig, get_log_probs_and_entropy
from rlreplay.engines import sglang

# What SGLang's /generate returned, and the logits of your model for the same tokens.
payload = json.loads(Path("examples/sglang_response.json").read_text())
rollouts = sglang.from_response(payload["response"], prompt_ids=payload["prompt_ids"])
logits = torch.randn(1, sum(r.total_length for r in rollouts), 512, requires_grad=True)

scores = get_log_probs_and_entropy(
    logits,
    unconcat_tokens=[r.tokens for r in rollouts],
    total_lengths=[r.total_length for r in rollouts],
    response_lengths=[len(r) for r in rollouts],
    rollout_sampling_mask=[r.sampling_mask for r in rollouts],
    config=ScoringConfig(qkv_format="thd", temperature=1.0),
    with_entropy=True,
)
torch.cat(scores["log_probs"]).mean().backward()
for log_probs, entropy in zip(scores["log_probs"], scores["entropy"], strict=True):
    print(f"{len(log_probs)} tokens: log-prob {log_probs.mean():.3f}, entropy {entropy.mean():.3f}")
