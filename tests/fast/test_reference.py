"""`kernels.reference`: the oracle itself, against values worked out by hand and plain torch."""

from __future__ import annotations

import math

import torch

from rlreplay.kernels.reference import dense_scores, entropy_of, masked_log_softmax

LOGITS = torch.tensor([[0.0, math.log(2.0), math.log(3.0), math.log(4.0)]], dtype=torch.float64)
SUPPORT = torch.tensor([[False, True, True, False]])


def test_scores_of_a_row_worked_out_by_hand() -> None:
    # Weights 1, 2, 3, 4; the support {1, 2} has weights 2 and 3 of 10; token 2 was sampled.
    scores = dense_scores(LOGITS, torch.tensor([2]), SUPPORT)
    q, p = [2 / 5, 3 / 5], [0.1, 0.2, 0.3, 0.4]
    expected = {
        "log_probs": math.log(3 / 5),
        "full_log_probs": math.log(3 / 10),
        "entropy": -sum(x * math.log(x) for x in p),
        "support_entropy": -sum(x * math.log(x) for x in q),
        "log_support_mass": math.log(5 / 10),
    }
    for name, value in expected.items():
        torch.testing.assert_close(
            scores[name], torch.tensor([value], dtype=torch.float64), rtol=1e-15, atol=1e-15
        )


def test_temperature_divides_and_padding_columns_are_cut() -> None:
    padded = torch.cat([LOGITS * 0.5, torch.full((1, 2), 99.0, dtype=torch.float64)], dim=1)
    support = torch.cat([SUPPORT, torch.ones(1, 2, dtype=torch.bool)], dim=1)
    cut = dense_scores(padded, torch.tensor([2]), support, temperature=0.5, vocab_size=4)
    plain = dense_scores(LOGITS, torch.tensor([2]), SUPPORT)
    for name in plain:
        torch.testing.assert_close(cut[name], plain[name], rtol=1e-15, atol=1e-15)


def test_masked_log_softmax_is_log_softmax_of_what_is_left() -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits.requires_grad_()
    mask = torch.tensor([[True] * 7, [True, False] * 3 + [True], [False] * 6 + [True]])
    result = masked_log_softmax(logits, mask)
    for row in range(3):
        kept = torch.log_softmax(logits[row][mask[row]], dim=0)
        torch.testing.assert_close(result[row][mask[row]], kept)
        assert (result[row][~mask[row]] == -torch.inf).all()
    (gradient,) = torch.autograd.grad(result[mask].sum(), logits)
    assert (gradient[~mask] == 0).all()
    along_rows = masked_log_softmax(logits.T, mask.T, dim=0).T
    assert torch.equal(along_rows, result)


def test_entropy_of_certain_and_uniform_rows() -> None:
    rows = torch.tensor([[0.0, -torch.inf], [math.log(0.5), math.log(0.5)]], dtype=torch.float64)
    assert entropy_of(rows).tolist() == [0.0, math.log(2.0)]
