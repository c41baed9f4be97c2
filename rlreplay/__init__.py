"""Exact log-probs for truncated rollouts: the trainer's half of distribution replay.

Supports: `RolloutSamplingMask`, `Rollout`, and `rlreplay.engines` that make them of payloads.
Laying out: `RowLayout`, `ParallelState`, `ReplayPlan`, `build_local_sampling_mask`.
Scoring: `get_log_probs_and_entropy`, `get_responses`, `score_logits`, `score_assembled`,
`score_hidden`, `sample_entropy`, `masked_log_softmax`.
Beside a run: `validate_request`, `rlreplay.storage`, `rlreplay.diagnostics`, and the command
`rlreplay`.
"""

from rlreplay.errors import (
    BackendError,
    MissingMaskError,
    MissingTokenError,
    ReplayError,
)
from rlreplay.hidden_scores import EntropySample, sample_entropy, score_hidden
from rlreplay.kernels.reference import masked_log_softmax
from rlreplay.kernels.softmax import SCORE_NAMES
from rlreplay.layout import RowLayout
from rlreplay.log_probs import (
    ResponseRows,
    ScoringConfig,
    get_log_probs_and_entropy,
    get_responses,
)
from rlreplay.parallel import ParallelState
from rlreplay.plan import ReplayPlan, build_local_sampling_mask
from rlreplay.request_validation import validate_request
from rlreplay.rollout import Rollout, WeightVersionSpan
from rlreplay.sampling_mask import RolloutSamplingMask
from rlreplay.scores import Scores, score_assembled, score_logits

__version__ = "0.1.0"

__all__ = [
    "SCORE_NAMES",
    "BackendError",
    "EntropySample",
    "MissingMaskError",
    "MissingTokenError",
    "ParallelState",
    "ReplayError",
    "ReplayPlan",
    "ResponseRows",
    "Rollout",
    "RolloutSamplingMask",
    "RowLayout",
    "Scores",
    "ScoringConfig",
    "WeightVersionSpan",
    "build_local_sampling_mask",
    "get_log_probs_and_entropy",
    "get_responses",
    "masked_log_softmax",
    "sample_entropy",
    "score_assembled",
    "score_hidden",
    "score_logits",
    "validate_request",
]
