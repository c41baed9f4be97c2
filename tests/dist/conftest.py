"""Set before any test forks: a forked rank can't use OpenMP threads that its parent had started."""

import torch

torch.set_num_threads(1)

# The first backward with explicit gradients imports this, which takes a second or two: once here
# instead of once in every forked rank.
import torch.fx.experimental.symbolic_shapes  # noqa: E402
