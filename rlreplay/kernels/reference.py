"""What the scores are: the short dense definitions that tests and docstrings refer to.

Plain differentiable torch that materialises everything. Run it in float64 as an oracle; for
training use `rlreplay.scores`, which computes the same numbers without dense masks or copies.

Shapes: `R` rows, `V` vocabulary columns. All scores are `[R]`.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def masked_log_softmax(
    logits: Float[Tensor, "*rows V"], mask: Bool[Tensor, "*rows V"], dim: int = -1
) -> Float[Tensor, "*rows V"]:
    """Log-softmax over the entries where `mask` is true; -inf elsewhere.

    Equivalent to `torch.log_softmax(logits.masked_fill(~mask, -inf), dim)`, and no gradient
    reaches a masked entry.
    """
    return torch.log_softmax(logits.masked_fill(~mask, -torch.inf), dim=dim)


def dense_scores(
    logits: Float[Tensor, "R V"],
    targets: Int[Tensor, " R"],
    support: Bool[Tensor, "R V"],
    *,
    temperature: float | Float[Tensor, " R"] = 1.0,
    vocab_size: int | None = None,
) -> dict[str, Float[Tensor, " R"]]:
    """All five scores of `rlreplay.scores.score_logits`, by their definition.

    Args:
        logits: rows of raw logits, unsharded.
        targets: the sampled token of each row.
        support: true on each row's support; whole rows where unrestricted.
        temperature: divides the logits; one number, or one for each row.
        vocab_size: columns from here on are padding.
    """
    x = logits[:, :vocab_size]
    x = x / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    support = support[:, :vocab_size]
    on_support = masked_log_softmax(x, support)
    on_vocab = torch.log_softmax(x, dim=-1)
    lse_support = torch.logsumexp(x.masked_fill(~support, -torch.inf), dim=-1)
    return {
        "log_probs": on_support.gather(-1, targets[:, None]).squeeze(-1),
        "full_log_probs": on_vocab.gather(-1, targets[:, None]).squeeze(-1),
        "entropy": entropy_of(on_vocab),
        "support_entropy": entropy_of(on_support),
        "log_support_mass": lse_support - torch.logsumexp(x, dim=-1),
    }


def entropy_of(log_probs: Float[Tensor, "*rows V"]) -> Float[Tensor, " *rows"]:
    """Entropy in nats of each row of log-probs, where entries of -inf count nothing."""
    finite = log_probs.masked_fill(log_probs == -torch.inf, 0.0)
    return -(log_probs.exp() * finite).sum(dim=-1)
