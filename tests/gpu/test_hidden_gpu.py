"""`score_hidden` on a GPU: what `TritonTests` asserts, sizes of a model, and no sync."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.register_assert_rewrite("tests.linear_checks", "tests.kernel_checks")

from rlreplay.hidden_scores import score_hidden  # noqa: E402
from tests.gpu.test_scores_gpu import no_sync  # noqa: E402
from tests.kernel_checks import make_case, plan_of, weights_of  # noqa: E402
from tests.linear_checks import (  # noqa: E402
    SPARSE_SCORES,
    Layer,
    TritonTests,
    check,
    same_bits,
    scored,
)

# The first test of each kernel waits for its compilation.
pytestmark = pytest.mark.timeout(600)


class TestOnGpu(TritonTests):
    device = "cuda"
    scale = 16
    vocab = 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sizes_of_a_model(dtype: torch.dtype) -> None:
    case = make_case("cuda", [(8, 400, "mixed")], 151_936, sizes=[1, 16, 50, 1000])
    layer = Layer.of(case, 1024, dtype, bias=False)
    weights = weights_of(case.plan, SPARSE_SCORES)
    results = scored(layer, case.plan, weights, path="sparse", backend="triton")
    for _ in range(5):
        same_bits(scored(layer, case.plan, weights, path="sparse", backend="triton"), results)
    exact_rows = Layer(layer.hidden, layer.weight, None)
    # sums of products of whole logits would not fit: one product of matrices is the measure
    check(results, exact_rows, case.plan, weights, dots=False)


@pytest.mark.parametrize(("path", "names"), [("sparse", SPARSE_SCORES), ("chunked", ("entropy",))])
def test_no_sync(path: Any, names: tuple[str, ...]) -> None:
    case = TestOnGpu().case()
    layer = Layer.of(case, 64, torch.bfloat16, bias=True)
    weights = weights_of(case.plan, names)
    plan = plan_of(case.tokens, case.masks, case.layout, case.vocab_size, "cuda", sort_ids=True)
    leaves = layer.leaves()
    with no_sync():
        scores = score_hidden(
            leaves["hidden"], leaves["weight"], plan, bias=leaves["bias"], scores=names,
            path=path, max_bytes=1 << 20,
        ).asked()  # fmt: skip
        total = torch.stack([(v * weights[k].float()).sum() for k, v in scores.items()]).sum()
        total.backward()
