"""onetrunk: PPO for language models on one frozen base; policy, value, reference and reward are branches of it.

The public names are imported when first used, so that `import onetrunk` loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from onetrunk.quiet import silence_imports

if TYPE_CHECKING:
    from onetrunk.models.trunk_model import TrunkModel
    from onetrunk.trainers.distill import RewardDistillationConfig, RewardDistillationTrainer
    from onetrunk.trainers.experience import ExperienceStream
    from onetrunk.trainers.hacking_monitor import HackingMonitor
    from onetrunk.trainers.ppo import PPOTrainer
    from onetrunk.trainers.ppo_config import PPOConfig
    from onetrunk.trainers.reward import RewardModelConfig, RewardModelTrainer
    from onetrunk.trainers.sft import ResumableSFTTrainer

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
    "ExperienceStream": "onetrunk.trainers.experience",
    "HackingMonitor": "onetrunk.trainers.hacking_monitor",
    "PPOConfig": "onetrunk.trainers.ppo_config",
    "PPOTrainer": "onetrunk.trainers.ppo",
    "ResumableSFTTrainer": "onetrunk.trainers.sft",
    "RewardDistillationConfig": "onetrunk.trainers.distill",
    "RewardDistillationTrainer": "onetrunk.trainers.distill",
    "RewardModelConfig": "onetrunk.trainers.reward",
    "RewardModelTrainer": "onetrunk.trainers.reward",
    "TrunkModel": "onetrunk.models.trunk_model",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'onetrunk' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
