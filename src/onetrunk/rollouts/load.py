"""The backend that the settings of a run choose (`ppo/settings.py`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from onetrunk.rollouts.base import RolloutBackend
from onetrunk.rollouts.local import LocalBackend

if TYPE_CHECKING:
    from onetrunk.rollouts.vllm import VLLMBackend

# Where adapters are published. Trainer pushes no path that begins with an underscore to the Hub.
ADAPTERS_FOLDER = "_adapters"


class ServerSettings(Protocol):
    """The settings that `load_servers` reads, under the names of PPOConfig."""

    output_dir: str
    vllm_server_timeout: float
    vllm_request_timeout: float
    vllm_api_key_env: str | None

    @property
    def server_urls(self) -> list[str]: ...


class BackendSettings(ServerSettings, Protocol):
    """The settings that `load_backend` reads, under the names of PPOConfig."""

    max_rollout_rows: int | None
    rollout_backend: str
    pipeline_stages: int | None
    pipeline_batches: int | None
    pipeline_split: list[int] | None
    pipeline_training: bool
    use_vllm: bool
    vllm_gpu_memory_utilization: float
    vllm_enable_sleep_mode: bool

    @property
    def is_colocated(self) -> bool: ...

    @property
    def versions_in_use(self) -> int: ...


def load_servers(config: ServerSettings, **settings: Any) -> VLLMBackend:
    """Return the backend of the servers that a config names; `settings` are those of VLLMBackend."""
    from onetrunk.rollouts.pool import ServerPolicy
    from onetrunk.rollouts.vllm import VLLMBackend

    return VLLMBackend(
        config.server_urls,
        Path(config.output_dir) / ADAPTERS_FOLDER,
        policy=ServerPolicy(timeout_s=config.vllm_request_timeout, wait_s=config.vllm_server_timeout),
        api_key_env=config.vllm_api_key_env,
        **settings,
    )


def load_backend(config: BackendSettings, **hooks: Callable[..., None]) -> RolloutBackend:
    """Return the backend that samples the rollouts of a run: by vLLM, in a pipeline of processes, or in this process.

    Args:
        config: of the run.
        **hooks: `progress` and `poll` of the backend. vLLM is checked before the trainer that they belong to is
            built, and gets them then.
    """
    if config.rollout_backend == "pipelined":
        from onetrunk.rollouts.pipelined import PipelinedBackend

        return PipelinedBackend(
            stages=config.pipeline_stages,
            batches=config.pipeline_batches,
            split=config.pipeline_split,
            max_rows=config.max_rollout_rows,
            shares_rows=config.pipeline_training,
            **hooks,
        )
    if not config.use_vllm:
        return LocalBackend(max_rows=config.max_rollout_rows, **hooks)
    if config.is_colocated:
        from onetrunk.rollouts.colocate import ColocatedBackend

        return ColocatedBackend(
            Path(config.output_dir) / ADAPTERS_FOLDER,
            gpu_memory_utilization=config.vllm_gpu_memory_utilization,
            sleeps=config.vllm_enable_sleep_mode,
            max_rows=config.max_rollout_rows,
        )
    return load_servers(config, keep_versions=max(2, config.versions_in_use))
