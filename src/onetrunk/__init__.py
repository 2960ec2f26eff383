"""onetrunk: PPO for language models on one frozen base; policy, value, reference and reward are branches of it.

The public names are imported when first used, so that `import onetrunk` loads neither torch nor transformers.
"""

import logging
from typing import TYPE_CHECKING

from onetrunk.utils.startup import imported_when_used

if TYPE_CHECKING:
    from onetrunk.checkpoints.trl_trainers import ResumableSFTTrainer
    from onetrunk.judges.hacking_monitor import HackingMonitor
    from onetrunk.models.trunk import TrunkModel
    from onetrunk.models.value_model import ValueModel, load_value_model
    from onetrunk.ppo.config import PPOConfig
    from onetrunk.ppo.experience import ExperienceStream
    from onetrunk.ppo.trainer import PPOTrainer
    from onetrunk.reward_models.distill import RewardDistillationConfig, RewardDistillationTrainer
    from onetrunk.reward_models.training import RewardModelConfig, RewardModelTrainer

__version__ = "0.1.0"

# It says on import that a kernel for 4-bit models on a CPU is missing.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

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
    "ValueModel",
    "__version__",
    "load_value_model",
]

_HOMES = {
    "ExperienceStream": "ppo.experience",
    "HackingMonitor": "judges.hacking_monitor",
    "PPOConfig": "ppo.config",
    "PPOTrainer": "ppo.trainer",
    "ResumableSFTTrainer": "checkpoints.trl_trainers",
    "RewardDistillationConfig": "reward_models.distill",
    "RewardDistillationTrainer": "reward_models.distill",
    "RewardModelConfig": "reward_models.training",
    "RewardModelTrainer": "reward_models.training",
    "TrunkModel": "models.trunk",
    "ValueModel": "models.value_model",
    "load_value_model": "models.value_model",
}


if not TYPE_CHECKING:  # A type checker would take every name for one that exists.
    __getattr__ = imported_when_used(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
