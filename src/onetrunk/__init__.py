"""onetrunk: PPO for language models on one frozen base; policy, value, reference and reward are branches of it.

The public names are imported when first used, so that `import onetrunk` loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from onetrunk.utils.loading import without_collection
from onetrunk.utils.quiet import silence_imports

if TYPE_CHECKING:
    from onetrunk.checkpoints.trainer import ResumableSFTTrainer
    from onetrunk.models.trunk import TrunkModel
    from onetrunk.ppo.config import PPOConfig
    from onetrunk.ppo.experience import ExperienceStream
    from onetrunk.ppo.monitoring.hacking_monitor import HackingMonitor
    from onetrunk.ppo.trainer import PPOTrainer
    from onetrunk.reward_models.distill import RewardDistillationConfig, RewardDistillationTrainer
    from onetrunk.reward_models.training import RewardModelConfig, RewardModelTrainer

__version__ = "0.1.0"

silence_imports()

__all__ = [
    "ExperienceStream",
    "HackingMonitor",
    "PPOConfig",
    "PPOTrainer",
    "ResumableSFTTrainer",
    "RewardDistillationConfig",
    "RewardDistillationTrainer",
    "RewardModelConfig",
    "RewardModelTrainer",
    "TrunkModel",
    "__version__",
]

_HOMES = {
    "ExperienceStream": "onetrunk.ppo.experience",
    "HackingMonitor": "onetrunk.ppo.monitoring.hacking_monitor",
    "PPOConfig": "onetrunk.ppo.config",
    "PPOTrainer": "onetrunk.ppo.trainer",
    "ResumableSFTTrainer": "onetrunk.checkpoints.trainer",
    "RewardDistillationConfig": "onetrunk.reward_models.distill",
    "RewardDistillationTrainer": "onetrunk.reward_models.distill",
    "RewardModelConfig": "onetrunk.reward_models.training",
    "RewardModelTrainer": "onetrunk.reward_models.training",
    "TrunkModel": "onetrunk.models.trunk",
}


if not TYPE_CHECKING:  # A type checker would take every name for one that exists.

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'onetrunk' has no attribute {name!r}; it has {', '.join(__all__)}")
        with without_collection():
            value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
