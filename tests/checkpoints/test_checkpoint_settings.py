"""Intervals at which nothing can happen, and a best model that nothing chooses, are rejected in every stage."""

import pytest

from onetrunk.ppo.config import PPOConfig
from onetrunk.reward_models.distill import RewardDistillationConfig
from onetrunk.reward_models.training import RewardModelConfig
from onetrunk.stages.arguments import SFTArguments

CONFIGS = [PPOConfig, SFTArguments, RewardModelConfig, RewardDistillationConfig]


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"save_strategy": "steps", "save_steps": 0}, "save_steps is 0, and save_strategy is 'steps'; set a whole"),
        ({"eval_strategy": "steps", "eval_steps": -1}, "eval_steps is -1"),
        ({"logging_strategy": "steps", "logging_steps": -1}, "logging_steps is -1"),
        ({"save_strategy": "best", "metric_for_best_model": "loss"}, "save_strategy 'best' needs evaluations"),
        ({"save_strategy": "steps", "save_steps": 0.25}, None),
        ({"save_strategy": "no", "save_steps": 0}, None),
        ({"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True}, None),
    ],
)
def test_an_interval_at_which_nothing_happens_is_rejected_and_every_other_taken(tmp_path, kind, settings, message):
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "bf16": False, **settings}
    if message is None:
        kind(**settings)
        return
    with pytest.raises(ValueError) as raised:
        kind(**settings)
    assert message in str(raised.value)
