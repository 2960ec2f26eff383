"""Rollouts: prompts in, token ids and sampler logprobs out."""

from onetrunk.utils.startup import imported_when_used

_HOMES = {
    "ColocatedBackend": "colocate",
    "LocalBackend": "local",
    "PipelinedBackend": "pipelined",
    "RolloutBackend": "base",
    "SamplingParams": "base",
    "VLLMBackend": "vllm",
    "VersionedBackend": "base",
}
__all__ = [*_HOMES]  # noqa: PLE0604
__getattr__ = imported_when_used(__name__, _HOMES)
