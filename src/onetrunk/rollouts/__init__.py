"""Rollouts: prompts in, token ids and sampler logprobs out."""

from onetrunk.utils.loading import imported_when_used

_HOMES = {
    "ColocatedBackend": "colocate",
    "LocalBackend": "local",
    "PipelinedBackend": "pipelined",
    "RolloutBackend": "base",
    "SamplingParams": "base",
    "VLLMBackend": "vllm",
    "VersionedBackend": "base",
    "load_backend": "load",
}
__all__ = [*_HOMES]  # noqa: PLE0604
__getattr__ = imported_when_used(__name__, _HOMES)
