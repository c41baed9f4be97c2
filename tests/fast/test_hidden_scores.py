"""`score_hidden` on the torch backend, what it refuses, and its choice of path."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

pytest.register_assert_rewrite("tests.linear_checks", "tests.kernel_checks")

from rlreplay import BackendError, ReplayError, id_segments  # noqa: E402
from rlreplay.hidden_scores import (  # noqa: E402
    BREAK_EVEN_IDS,
    _is_chunked,
    sample_entropy,
    score_hidden,
)
from rlreplay.id_segments import IdSegments  # noqa: E402
from rlreplay.kernels import torch_linear  # noqa: E402
from tests.kernel_checks import make_case, objective, weights_of  # noqa: E402
from tests.linear_checks import (  # noqa: E402
    SPARSE_SCORES,
    HiddenTests,
    Layer,
    check,
    same_bits,
    scored,
)


class TestOnTorch(HiddenTests):
    device = "cpu"
    backend = "torch"


@settings(max_examples=40, deadline=None)
@given(
    samples=st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 4), st.sampled_from(["mixed", "free"])),
        min_size=1,
        max_size=3,
    ),
    vocab=st.integers(1, 12),
    width=st.integers(1, 9),
    max_bytes=st.integers(1, 600),
    seed=st.integers(0, 1000),
)
def test_any_shape_gives_the_answers_of_whole_logits(
    samples: Any, vocab: int, width: int, max_bytes: int, seed: int
) -> None:
    assume(any(response for _, response, _ in samples))
    case = make_case("cpu", samples, vocab, seed=seed)
    layer = Layer.of(case, width, torch.float64, bias=bool(seed % 2), seed=seed)
    weights = weights_of(case.plan, SPARSE_SCORES)
    for path in ("sparse", "chunked"):
        results = scored(layer, case.plan, weights, path=path, max_bytes=max_bytes)
        check(results, layer, case.plan, weights)


@given(st.lists(st.integers(0, 6), max_size=60), st.integers(1, 9))
def test_segments_hold_every_entry_once_by_column_and_row(ids: list[int], piece: int) -> None:
    with mock.patch.object(id_segments, "PIECE", piece):
        segments = IdSegments.of(torch.tensor(ids, dtype=torch.int32))
    order = segments.order.tolist()
    assert order == sorted(range(len(ids)), key=lambda n: (ids[n], n))
    assert segments.columns.tolist() == sorted(set(ids))
    bounds = segments.piece_starts.tolist()
    slots = []
    for first, last, column, slot in zip(
        bounds[:-1],
        bounds[1:],
        segments.piece_columns.tolist(),
        segments.piece_slots.tolist(),
        strict=True,
    ):
        assert 0 < last - first <= piece
        assert {ids[n] for n in order[first:last]} == {column}
        assert (slot >= 0) == (ids.count(column) > piece)
        slots += [slot] if slot >= 0 else []
    assert slots == list(range(segments.host_split_starts[-1]))
    assert bounds[-1] == len(ids)
    several = [c for c in sorted(set(ids)) if ids.count(c) > piece]
    assert segments.split_columns.tolist() == several
    partials = [-(-ids.count(c) // piece) for c in several]
    assert segments.split_starts.tolist() == np.cumsum([0, *partials]).tolist()
    assert segments.host_split_starts.tolist() == segments.split_starts.tolist()
    for most in (1, 4, 100):
        pieces, columns, _ = zip(*segments.batches(most), strict=True) if ids else ((),) * 3
        assert [p for s in pieces for p in range(s.start, s.stop)] == list(range(len(bounds) - 1))
        assert [c for s in columns for c in range(s.start, s.stop)] == list(range(len(several)))
        for own, held in zip(columns, pieces, strict=True):
            assert own.stop - own.start <= 1 or sum(partials[own]) <= most
            cut = segments.piece_slots[held]
            cut = cut[cut >= 0]
            assert cut.tolist() == list(range(*segments.host_split_starts[[own.start, own.stop]]))


@pytest.fixture
def case() -> Any:
    return make_case("cpu", [(2, 4, "mixed")], 20, sizes=[3])


def arguments(case: Any, **changes: Any) -> dict[str, Any]:
    layer = Layer.of(case, 6, torch.float32, bias=True)
    return {
        "hidden": layer.hidden,
        "weight": layer.weight,
        "bias": layer.bias,
        "plan": case.plan,
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": torch.ones(5, 6)}, "logits rows do not match"),
        ({"hidden": torch.ones(6)}, "hidden does not fit"),
        ({"hidden": torch.ones(6, 6, dtype=torch.long)}, "hidden does not fit"),
        ({"hidden": None}, "hidden does not fit"),
        ({"hidden": torch.ones(6, 6).to_sparse()}, "hidden does not fit"),
        ({"hidden": torch.ones(6, 6, device="meta")}, "hidden does not fit"),
        ({"hidden": torch.ones(6, 6).bfloat16()}, "weight does not fit"),
        ({"weight": torch.ones(20, 7)}, "weight does not fit"),
        ({"weight": torch.ones(6, 20).T}, "weight does not fit"),
        ({"weight": torch.ones(19, 6), "bias": None}, "logits columns do not match"),
        ({"bias": torch.ones(19)}, "bias does not fit"),
        ({"bias": torch.ones(20, 1)}, "bias does not fit"),
        ({"scores": ("entropy",), "path": "sparse"}, "full-vocabulary scores on the sparse path"),
        ({"scores": ("nothing",)}, "unknown score"),
        ({"path": "dense"}, "unknown path"),
        ({"weight_gradient": "both"}, "unknown weight_gradient"),
        ({"weight_gradient": "main_grad"}, "weight.main_grad cannot take"),
        ({"temperature": 0.0}, "temperature not above 0"),
        ({"max_bytes": -1}, "max_bytes"),
        ({"max_bytes": 1.5}, "max_bytes"),
    ],
)
def test_what_does_not_fit_is_refused(case: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        score_hidden(**arguments(case, **changes))


def test_an_explicit_backend_is_obeyed_or_refused(case: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError, match="cannot run here"):
        score_hidden(**arguments(case, backend="triton"))


def test_sampled_entropy_refuses_what_score_hidden_refuses(case: Any) -> None:
    given_ = arguments(case, weight=torch.ones(20, 7))
    with pytest.raises(ReplayError, match="weight does not fit"):
        sample_entropy(**given_, entropy_rows=2)
    with pytest.raises(ReplayError, match="entropy_rows"):
        sample_entropy(**arguments(case), entropy_rows=-1)


def test_auto_is_chunked_for_full_scores_and_for_large_supports() -> None:
    def plan(device: str, ids: int) -> Any:
        return SimpleNamespace(
            num_support_ids=ids, num_rows=10, vocab_size=20_000, device=torch.device(device)
        )

    assert _is_chunked(plan("cpu", 10), ("entropy",), "auto")
    for device, ids in (("cuda", BREAK_EVEN_IDS), ("cpu", 100)):
        assert _is_chunked(plan(device, 10 * ids), ("log_probs",), "auto")
        assert not _is_chunked(plan(device, 10 * ids - 1), ("log_probs",), "auto")
        assert not _is_chunked(plan(device, 10 * ids), ("log_probs",), "sparse")


def test_one_id_of_many_rows_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum over more entries than are made at a time is carried on."""
    monkeypatch.setattr(torch_linear, "_CHUNK_BYTES", 8 * 6 * 7)  # seven entries
    case = make_case("cpu", [(2, 40, "mixed")], 20, sizes=[1, 20, 3], sampled=4)
    layer = Layer.of(case, 6, torch.float64, bias=True)
    weights = weights_of(case.plan, SPARSE_SCORES)
    made = []
    double = torch.Tensor.double
    monkeypatch.setattr(torch.Tensor, "double", lambda t: made.append(t.shape) or double(t))
    results = scored(layer, case.plan, weights, path="sparse")
    monkeypatch.undo()
    check(results, layer, case.plan, weights)
    assert max(shape[0] for shape in made if len(shape) == 2) <= 7


@dataclass
class Made:
    """The whole logits that are made: those in memory, the most at a time, the rows of each."""

    alive: weakref.WeakSet[torch.Tensor] = field(default_factory=weakref.WeakSet)
    most: int = 0
    rows: list[int] = field(default_factory=list)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    linear, made = torch.nn.functional.linear, Made()

    def counted(*args: Any) -> torch.Tensor:
        logits = linear(*args)
        made.alive.add(logits)
        made.most = max(made.most, len(made.alive))
        made.rows.append(len(logits))
        return logits

    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    return made


def test_one_part_has_logits_at_a_time_and_the_last_keeps_them(made: Made) -> None:
    case = make_case("cpu", [(2, 13, "mixed")], 50)
    layer = Layer.of(case, 6, torch.float32, bias=False)
    leaves = layer.leaves()
    max_bytes = 2 * 3 * 50 * 4
    scores = score_hidden(**leaves, plan=case.plan, scores=("entropy",), max_bytes=max_bytes)
    assert scores.entropy is not None
    assert (made.rows, len(made.alive)) == ([1, 3, 3, 3, 3], 1)
    torch.autograd.grad(scores.entropy.sum(), list(leaves.values()), retain_graph=True)
    assert (made.rows[5:], len(made.alive)) == ([3, 3, 3, 1], 0)
    torch.autograd.grad(scores.entropy.sum(), list(leaves.values()))
    assert (made.rows[9:], len(made.alive)) == ([3, 3, 3, 3, 1], 0)
    assert made.most == 1


# Three rows a part. On the sparse path the parts are those of the unrestricted rows.
@pytest.mark.parametrize(("kind", "path"), [("mixed", "chunked"), ("free", "sparse")])
def test_each_call_keeps_one_part_until_its_backward(made: Made, kind: Any, path: Any) -> None:
    case = make_case("cpu", [(2, 12, kind), (1, 2, "mixed")], 50, sizes=[3])
    layer = Layer.of(case, 6, torch.float32, bias=False)
    leaves = layer.leaves()
    options: Any = {"plan": case.plan, "path": path, "max_bytes": 2 * 3 * 50 * 4}
    calls = [score_hidden(**leaves, **options).log_probs for _ in range(3)]
    assert sorted(len(logits) for logits in made.alive) == [3, 3, 3]
    calls.pop().sum().backward()
    assert len(made.alive) == 2
    calls.clear()
    assert len(made.alive) == 0
    with torch.no_grad():
        score_hidden(**leaves, **options)
    assert len(made.alive) == 0
    log_probs = score_hidden(**leaves, **options, keep_logits=False).log_probs
    assert len(made.alive) == 0
    kept = torch.autograd.grad(score_hidden(**leaves, **options).log_probs.sum(), leaves["hidden"])
    again = torch.autograd.grad(log_probs.sum(), leaves["hidden"])
    assert torch.equal(*kept, *again)


def test_under_checkpointing_nothing_is_kept(made: Made) -> None:
    case = make_case("cpu", [(2, 12, "mixed")], 50)
    leaves = Layer.of(case, 6, torch.float32, bias=False).leaves()
    options: Any = {"plan": case.plan, "path": "chunked", "max_bytes": 2 * 3 * 50 * 4}
    expected = torch.autograd.grad(
        score_hidden(**leaves, **options).log_probs.sum(), list(leaves.values())
    )

    def log_probs() -> Any:
        return score_hidden(**leaves, **options, keep_logits=False).log_probs

    calls = [checkpoint(log_probs, use_reentrant=False) for _ in range(2)]
    assert len(made.alive) == 0
    for call in calls:
        gradients = torch.autograd.grad(call.sum(), list(leaves.values()))
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert len(made.alive) == 0


@pytest.mark.parametrize("path", ["sparse", "chunked"])
def test_megatron_is_told_where_the_scores_get_no_gradient(case: Any, path: Any) -> None:
    class Blocked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
            return values.view_as(values)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> None:
            return None

    layer = Layer.of(case, 6, torch.float32, bias=False)
    weight = torch.nn.Parameter(layer.weight)
    weight.main_grad = torch.zeros_like(weight)
    weight.grad_added_to_main_grad = False
    options: Any = {"path": path, "weight_gradient": "main_grad"}
    scores = score_hidden(layer.hidden, weight, case.plan, **options)
    Blocked.apply(scores.log_probs).sum().backward()
    assert weight.grad_added_to_main_grad is True
    assert weight.grad is not None
    assert (weight.main_grad == 0).all()


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("path", ["sparse", "chunked"])
def test_autocast_changes_nothing(case: Any, path: Any, inside: bool) -> None:
    case = make_case("cpu", [(2, 6, "mixed"), (1, 3, "free")], 20, sizes=[3])
    layer = Layer.of(case, 6, torch.float32, bias=True)
    weights = weights_of(case.plan, SPARSE_SCORES)
    expected = scored(layer, case.plan, weights, path=path)
    leaves = layer.leaves()
    with torch.autocast("cpu", torch.bfloat16):
        scores = score_hidden(**leaves, plan=case.plan, scores=SPARSE_SCORES, path=path).asked()
        if inside:
            gradients = torch.autograd.grad(objective(scores, weights), list(leaves.values()))
    if not inside:
        gradients = torch.autograd.grad(objective(scores, weights), list(leaves.values()))
    same_bits(({k: v.detach() for k, v in scores.items()}, dict(zip(leaves, gradients))), expected)  # noqa: B905


def test_a_compiled_graph_is_refused_unless_the_caller_is_left_out_of_it(case: Any) -> None:
    given_ = arguments(case)
    expected = score_hidden(**given_).log_probs

    def twice(**arguments: Any) -> torch.Tensor:
        log_probs = score_hidden(**arguments).log_probs
        assert log_probs is not None
        return log_probs * 2

    assert expected is not None
    with pytest.raises(BackendError, match="in a compiled graph"):
        torch.compile(twice, backend="aot_eager")(**given_)
    outside = torch.compiler.disable(twice)
    compiled = torch.compile(lambda **arguments: outside(**arguments) + 1, backend="aot_eager")
    assert torch.equal(compiled(**given_), expected * 2 + 1)


def test_nan_in_the_padding_rows_of_the_weight_stays_there() -> None:
    case = make_case("cpu", [(2, 4, "mixed")], 20, sizes=[3])
    layer = Layer.of(case, 6, torch.float32, bias=False)
    wide = torch.nn.functional.pad(layer.weight, (0, 0, 0, 4), value=torch.nan)
    hidden, weight = layer.hidden.clone().requires_grad_(), wide.requires_grad_()
    scores = score_hidden(hidden, weight, case.plan, scores=("entropy",))
    assert scores.entropy is not None
    scores.entropy.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.isfinite().all()
    assert (weight.grad[20:] == 0).all()
