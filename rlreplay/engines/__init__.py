"""One module for each producer of rollouts: its payloads and in-process objects to `Rollout`.

Every loader fails closed: a missing mask, a count that does not agree, a value of the wrong type
or a sampled token outside its support is a `ReplayError` that names the sample and the row.
"""

from rlreplay.engines import sglang, slime, transformers, vllm

__all__ = ["sglang", "slime", "transformers", "vllm"]
