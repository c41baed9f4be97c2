"""The arithmetic between a row's statistics and its scores and gradient, shared by all backends.

A few operations on `[R]` vectors each; `R` response rows. Notation as in `kernels.rows`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlreplay.kernels.rows import GradientCoefficients, GradientTerm, RowStats, Temperature

SCORE_NAMES = ("log_probs", "full_log_probs", "entropy", "support_entropy", "log_support_mass")
FULL_SCORES = frozenset({"full_log_probs", "entropy", "log_support_mass"})
"""The scores that read whole rows."""


class Normaliser(NamedTuple):
    """A softmax over a set of columns of each row, all shards together."""

    maximum: Float[Tensor, " R"]
    total: Float[Tensor, " R"]
    """sum of exp(x - maximum)."""
    log_total: Float[Tensor, " R"]
    """lse = maximum + log_total."""
    mean: Float[Tensor, " R"] | None
    """mean of x - maximum under the softmax: entropy = log_total - mean. None if not asked for."""

    @classmethod
    def of(cls, stats: RowStats) -> Normaliser:
        mean = None if stats.weighted is None else stats.weighted / stats.total
        return cls(stats.maximum, stats.total, stats.total.log(), mean)


def where_rows(condition: Bool[Tensor, " R"], a: RowStats, b: RowStats) -> RowStats:
    """Rows of `a` where the condition holds, of `b` elsewhere."""
    weighted = None
    if a.weighted is not None and b.weighted is not None:
        weighted = torch.where(condition, a.weighted, b.weighted)
    return RowStats(
        torch.where(condition, a.maximum, b.maximum),
        torch.where(condition, a.total, b.total),
        weighted,
    )


def score_of(
    name: str, support: Normaliser, full: Normaliser | None, target: Float[Tensor, " R"]
) -> Float[Tensor, " R"]:
    """One score of each row; `full` is there if the score reads whole rows."""
    if name == "log_probs":
        return _log_prob(target, support)
    if name == "support_entropy":
        return _entropy(support)
    assert full is not None
    if name == "full_log_probs":
        return _log_prob(target, full)
    if name == "entropy":
        return _entropy(full)
    return (support.maximum - full.maximum) + (support.log_total - full.log_total)


def _log_prob(target: Tensor, normaliser: Normaliser) -> Tensor:
    # in this order a lone id's log-prob is exactly 0
    return (target - normaliser.maximum) - normaliser.log_total


def _entropy(normaliser: Normaliser) -> Tensor:
    assert normaliser.mean is not None
    return normaliser.log_total - normaliser.mean


def gradient_coefficients(
    support: Normaliser,
    full: Normaliser | None,
    grads: dict[str, Tensor],
    unrestricted: Bool[Tensor, " R"] | None,
    temperature: Temperature,
) -> GradientCoefficients:
    """The chain rule: gradients of the scores to coefficients of the logits' gradient.

    Args:
        full: None where no row has a dense term.
        grads: by score; a score without a gradient is left out.
        unrestricted: rows whose support is the vocabulary, so that their terms are dense and
            their mass is 1; None where there are none.
    """
    if not isinstance(temperature, float) or temperature != 1.0:
        grads = {name: grad * (1 / temperature) for name, grad in grads.items()}
    on_support, on_vocab = grads.get("log_probs"), grads.get("full_log_probs")
    mass, support_entropy = grads.get("log_support_mass"), grads.get("support_entropy")
    sparse = dense = None
    if any(grad is not None for grad in (on_support, mass, support_entropy)):
        sparse = _term(support, _minus(on_support, mass), support_entropy)
    if full is not None and (unrestricted is not None or not FULL_SCORES.isdisjoint(grads)):
        leaving = mass
        entropy = grads.get("entropy")
        if unrestricted is not None:
            sparse = None if sparse is None else sparse.zero_where(unrestricted)
            leaving = _choose(unrestricted, on_support, mass)
            entropy = _sum(entropy, _choose(unrestricted, support_entropy, None))
        dense = _term(full, _sum(on_vocab, leaving), entropy)
    amount = _sum(on_support, on_vocab)
    return GradientCoefficients(
        dense, sparse, torch.zeros_like(support.total) if amount is None else amount
    )


def _term(normaliser: Normaliser, constant: Tensor | None, entropy: Tensor | None) -> GradientTerm:
    """The term of p_j (constant + entropy (log p_j + H)); None is zero.

    With d = x_j - maximum: p_j = exp(d) / total and log p_j + H = d - mean. A lone id has a total
    of exactly 1, so its term and its target's amount cancel exactly.
    """
    if constant is not None:
        constant = constant / normaliser.total
    if entropy is None:
        return GradientTerm(normaliser.maximum, constant, None, None)
    return GradientTerm(normaliser.maximum, constant, entropy / normaliser.total, normaliser.mean)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _minus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if b is None:
        return a
    return -b if a is None else a - b


def _choose(condition: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """`a` where the condition holds, `b` elsewhere; None is zero."""
    if a is None:
        return None if b is None else b.masked_fill(condition, 0.0)
    return torch.where(condition, a, 0.0 if b is None else b)
