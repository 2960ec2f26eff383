"""The backend that the settings of a run choose (`ppo/settings.py`); a run imports no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from onetrunk.rollouts.base import RolloutBackend
from onetrunk.rollouts.local import LocalBackend


def load_backend(config: Any, **hooks: Callable[..., None]) -> RolloutBackend:
    """Return the backend that samples the rollouts of a run: by vLLM, in a pipeline of processes, or in this process.

    Args:
        config: the run's PPOConfig.
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
        from onetrunk.rollouts.publishing import ADAPTERS_FOLDER

        return ColocatedBackend(
            Path(config.output_dir) / ADAPTERS_FOLDER,
            gpu_memory_utilization=config.vllm_gpu_memory_utilization,
            sleeps=config.vllm_enable_sleep_mode,
            max_rows=config.max_rollout_rows,
        )
    from onetrunk.rollouts.vllm import load_servers

    return load_servers(config, keep_versions=max(2, config.versions_in_use))
