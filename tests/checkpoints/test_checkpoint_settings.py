"""Intervals at which nothing can happen, and a best model that nothing chooses, are refused in every stage."""

from importlib.util import find_spec

import pytest

from onetrunk.checkpoints import config as checkpoint_config
from onetrunk.ppo.config import PPOConfig
from onetrunk.reward_models.distill import RewardDistillationConfig
from onetrunk.reward_models.training import RewardModelConfig
from onetrunk.stages.arguments import SFTArguments

CONFIGS = [PPOConfig, SFTArguments, RewardModelConfig, RewardDistillationConfig]


def config(kind, tmp_path, **settings):
    return kind(output_dir=str(tmp_path), use_cpu=True, report_to="none", bf16=False, **settings)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("tracker", ["wandb", "trackio", "mlflow"])
@pytest.mark.sampled(4)
def test_a_tracker_without_its_package_is_rejected_before_anything_loads(tmp_path, kind, tracker, monkeypatch):
    settings = {"use_cpu": True, "bf16": False}
    found = dict.fromkeys((tracker,))
    monkeypatch.setattr(checkpoint_config, "find_spec", lambda name: found.get(name, find_spec("json")))
    with pytest.raises(ValueError, match=f"report_to names {tracker}, which is not installed; pip install {tracker}"):
        kind(output_dir=str(tmp_path), report_to=[tracker], **settings)
    monkeypatch.setattr(checkpoint_config, "find_spec", lambda name: find_spec("json"))
    assert kind(output_dir=str(tmp_path), report_to=[tracker], **settings).report_to == [tracker]


def test_the_trackers_are_those_of_transformers():
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    assert set(checkpoint_config.TRACKERS) == set(INTEGRATION_TO_CALLBACK)


def test_an_unknown_tracker_is_answered_with_the_nearest(tmp_path):
    with pytest.raises(ValueError, match="'tensorbord', which is no tracker: did you mean 'tensorboard'?"):
        PPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="tensorbord")


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"save_strategy": "steps", "save_steps": 0}, "save_steps is 0, and save_strategy is 'steps'; set a whole"),
        ({"save_strategy": "steps", "save_steps": -5}, "save_steps is -5"),
        ({"save_strategy": "steps", "save_steps": -0.5}, "save_steps is -0.5"),
        ({"save_strategy": "steps", "save_steps": float("nan")}, "save_steps is nan"),
        ({"eval_strategy": "steps", "eval_steps": 0}, "eval_steps is 0, and eval_strategy is 'steps'"),
        ({"eval_strategy": "steps", "eval_steps": -1}, "eval_steps is -1"),
        ({"logging_strategy": "steps", "logging_steps": -1}, "logging_steps is -1"),
        (
            {"load_best_model_at_end": True, "save_strategy": "no"},
            "load_best_model_at_end needs evaluations to choose by, and eval_strategy is 'no'",
        ),
        ({"save_strategy": "best", "metric_for_best_model": "loss"}, "save_strategy 'best' needs evaluations"),
        ({"num_train_epochs": -1}, "num_train_epochs is -1, and max_steps is not set: no step would be trained"),
        ({"num_train_epochs": 0, "max_steps": 0}, "num_train_epochs is 0"),
    ],
)
def test_a_setting_with_which_nothing_happens_is_refused(tmp_path, kind, settings, sentence):
    with pytest.raises(ValueError) as raised:
        config(kind, tmp_path, **settings)
    assert sentence in str(raised.value)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(
    "settings",
    [
        {"save_strategy": "steps", "save_steps": 0.25},
        {"save_strategy": "steps", "save_steps": 1},
        {"save_strategy": "no", "save_steps": 0},
        {"save_strategy": "no", "num_train_epochs": -1, "max_steps": 1},
        {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True},
        {"eval_strategy": "epoch", "save_strategy": "best", "metric_for_best_model": "loss"},
    ],
)
def test_every_other_interval_is_taken(tmp_path, kind, settings):
    assert config(kind, tmp_path, **settings).save_strategy == settings["save_strategy"]
