"""One module for each producer of rollouts: its payloads and in-process objects to `Rollout`.

Every loader fails closed: a missing mask, a count that does not agree, a value of the wrong type
or a sampled token outside its support is a `ReplayError` that names the sample and the row.

The options of the loaders that take one of a few words have types here: `OnMissingMask` (all),
`OnUncommittedToken` (SGLang), `LogprobsMode` (vLLM), `LogProbsOver` (slime).
"""

from rlreplay.engines import sglang, slime, transformers, vllm
from rlreplay.engines._common import OnMissingMask
from rlreplay.engines._vllm_choice import LogprobsMode
from rlreplay.engines.sglang import OnUncommittedToken
from rlreplay.engines.slime import LogProbsOver

__all__ = [
    "LogProbsOver",
    "LogprobsMode",
    "OnMissingMask",
    "OnUncommittedToken",
    "sglang",
    "slime",
    "transformers",
    "vllm",
]
