"""Settings of every stage: written without their secrets, and rejected where nothing can happen at an interval."""

import io
import json

import pytest
import torch
from transformers import TrainingArguments

from onetrunk.ppo.config import PPOConfig
from onetrunk.reward_models.distill import RewardDistillationConfig
from onetrunk.reward_models.training import RewardModelConfig
from onetrunk.stages.arguments import PPOArguments, SFTArguments
from onetrunk.stages.distill import DistillArguments
from onetrunk.stages.reward import RewardArguments
from onetrunk.utils.redaction import redact, without_secrets

CANARY, OTHER = "canary-of-the-hub-81", "canary-of-the-model-82"
KINDS = [PPOConfig, PPOArguments, SFTArguments, RewardArguments, DistillArguments]


def settings(kind, folder, **more):
    kwargs = {"token": OTHER, "revision": "main"}
    return kind(output_dir=str(folder), use_cpu=True, hub_token=CANARY, model_init_kwargs=kwargs, **more)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_shown_and_tracked_of_settings_holds_no_secret_and_the_settings_do(tmp_path, kind):
    args = settings(kind, tmp_path, run_name=f"x-{CANARY}")
    for text in (repr(args), str(args), args.to_json_string(), json.dumps(args.to_dict(), default=str)):
        assert CANARY not in text and OTHER not in text
        assert "learning_rate" in text and "<HUB_TOKEN>" in text
    assert args.hub_token == CANARY and args.model_init_kwargs == {"token": OTHER, "revision": "main"}


def test_a_secret_among_the_settings_is_redacted_everywhere_from_then_on(tmp_path):
    settings(PPOConfig, tmp_path)
    assert redact(f"{CANARY} and {OTHER}") == "<redacted hub_token> and <redacted token>"


@pytest.mark.parametrize("kind", [*KINDS, TrainingArguments])
def test_pickled_settings_hold_no_secret_and_have_it_again_afterwards(tmp_path, kind, monkeypatch):
    monkeypatch.setenv("WEB_PASSWORD", "canary-of-the-web-83")
    more = {"project": "http://a/?canary-of-the-web-83"}
    if kind is TrainingArguments:
        args = kind(output_dir=str(tmp_path), use_cpu=True, hub_token=CANARY, **more)
    else:
        args = settings(kind, tmp_path, **more)
    before = dict(vars(args))
    file = io.BytesIO()
    with without_secrets(args):
        torch.save(args, file)
    assert not any(canary.encode() in file.getvalue() for canary in (CANARY, OTHER, "canary-of-the-web-83"))
    assert vars(args) == before and args.hub_token == CANARY
    file.seek(0)
    # What was written here a moment ago.
    kept = torch.load(file, weights_only=False)
    assert kept.hub_token is None and kept.project == "http://a/?<redacted WEB_PASSWORD>"
    if kind is not TrainingArguments:
        assert kept.model_init_kwargs == {"revision": "main"}
    assert kept.learning_rate == args.learning_rate


def test_settings_are_whole_again_after_a_failed_save(tmp_path):
    args = settings(PPOConfig, tmp_path)
    with pytest.raises(OSError, match="full"), without_secrets(args):
        assert args.hub_token is None
        raise OSError("the disk is full")
    assert args.hub_token == CANARY and args.model_init_kwargs["token"] == OTHER


@pytest.mark.parametrize("kind", [PPOConfig, SFTArguments, RewardModelConfig, RewardDistillationConfig])
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
