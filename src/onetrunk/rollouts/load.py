"""The backend that the settings of a run choose (`ppo/server_settings.py`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from onetrunk.rollouts.base import RolloutBackend
from onetrunk.rollouts.local import LocalBackend
from onetrunk.rollouts.pool import ServerPolicy
from onetrunk.rollouts.vllm import VLLMBackend

# Where adapters are published. Trainer pushes no path that begins with an underscore to the Hub.
ADAPTERS_FOLDER = "_adapters"


class BackendSettings(Protocol):
    """The settings that `load_backend` reads, under the names of PPOConfig."""

    output_dir: str
    max_rollout_rows: int | None
    use_vllm: bool
    vllm_server_timeout: float

    @property
    def server_urls(self) -> list[str]: ...

    @property
    def versions_in_use(self) -> int: ...


def load_backend(config: BackendSettings, **hooks: Callable[..., None]) -> RolloutBackend:
    """Return the backend that samples the rollouts of a run: vLLM servers with `use_vllm`, else this process.

    Args:
        config: of the run.
        **hooks: `progress` and `poll` of LocalBackend. A server is called before the trainer that they belong to is
            built, and gets them then.
    """
    if not config.use_vllm:
        return LocalBackend(max_rows=config.max_rollout_rows, **hooks)
    return VLLMBackend(
        config.server_urls,
        Path(config.output_dir) / ADAPTERS_FOLDER,
        keep_versions=max(2, config.versions_in_use),
        policy=ServerPolicy(wait_s=config.vllm_server_timeout),
    )
