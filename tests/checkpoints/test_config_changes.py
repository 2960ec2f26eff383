"""What a resumed run may not change, and every key of PPOConfig: refused, refused unless that is meant, or free."""

import dataclasses
import functools
import re
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig

from onetrunk.checkpoints.resume_settings import is_free
from onetrunk.models.trunk import TrunkModel
from onetrunk.parallel.groups import RowGroups
from onetrunk.ppo import stream_state as rules
from onetrunk.ppo.config import TRL_DEFAULTS, PPOConfig
from onetrunk.ppo.monitoring.alarm_rules import RULES
from onetrunk.ppo.stream_state import reward_path
from onetrunk.rewards.combine import RewardSet, resolve_reward
from tests.checkpoints.crash_runs import SHAPE
from tests.ppo.support import StopAt, base_model, even_share, logged, make_config, make_trainer, prompts

FIELDS = [f.name for f in dataclasses.fields(PPOConfig) if f.init and f.name not in TRL_DEFAULTS]
BOUND = set(rules.SETTINGS["place"])
KEPT = set(rules.SETTINGS["optimizer"])
STEERING = {
    "temperature", "top_p", "top_k", "beta", "kl_in_loss", "adapter_layers", "max_prompt_length", "overlong_prompts",
    "max_completion_length", "stop_tokens", "chat_template_kwargs", "reward_weights", "missing_eos_penalty",
    "length_penalty", "truncated_completions", "normalize_scores", "score_clip", "kl_estimator", "kl_horizon", "gamma",
    "gae_unit", "lam", "lam_value", "length_adaptive_lam", "whiten_advantages", "whiten_rewards", "epsilon",
    "ratio_unit", "epsilon_high", "dual_clip", "value_steps", "value_learning_rate", "entropy_coef", "target_kl",
    "policy_objective", "dis_epsilon_low", "dis_epsilon_high",
    "value_pretraining_rollouts", "capture_trunk_states", "lr_scheduler_type", "lr_scheduler_kwargs",
    "warmup_steps", "max_grad_norm", "optim", "optim_args", "bf16", "fp16", "tf32", "full_determinism",
    "schedule", "max_staleness", "use_vllm",
    "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min", "vllm_mode", "max_turns", "max_turn_length",
    "max_context_length", "max_compactions", "kept_turns", "compaction_prompt",
    "max_observation_characters", "observation_control_tokens",
}  # fmt: skip
# PPO takes only one value of these.
FIXED = set(
    "optim_target_modules gradient_accumulation_steps average_tokens_across_devices label_smoothing_factor deepspeed"
    " bf16_full_eval fp16_full_eval use_liger_kernel liger_kernel_config use_cache neftune_noise_alpha fsdp"
    " fsdp_config auto_find_batch_size include_num_input_tokens_seen prediction_loss_only batch_eval_metrics"
    " ignore_data_skip dataloader_drop_last remove_unused_columns label_names train_sampling_strategy"
    " length_column_name".split()
)


def test_an_alarm_says_which_of_the_settings_that_it_advises_need_a_new_run():
    advised = {name for rule in RULES.values() for name in re.findall(r"\w+", rule.change) if name in FIELDS}
    before = settings_of()
    rejected = {name for name in advised if compare(before, changed(before, name), is_allowed=True) or name in KEPT}
    assert {"rollout_batch_size", "learning_rate"} <= rejected <= rules.NEW_RUN


@cache
def parts() -> tuple[Any, Dataset]:
    trainer = make_trainer(mkdtemp())
    return trainer.model, trainer.train_dataset


@cache
def settings_of(**values: Any) -> dict[str, Any]:
    config, (model, rows) = make_config("out", **values), parts()
    return rules.run_settings(config, rows, RowGroups(Accelerator(cpu=True)), model, RewardSet([even_share]))


def changed(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """Return settings of a run with another value of one, which a free one does not have."""
    if name in settings["steering"]:
        return {**settings, "steering": {**settings["steering"], name: "another"}}
    return {**settings, name: "another"} if name in settings else settings


def compare(before: dict[str, Any], now: dict[str, Any], is_allowed: bool, in_rollout: bool = False) -> str | None:
    """Return what resuming says; None: nothing."""
    try:
        rules.check_settings(Path("checkpoint-4/state.json"), before, now, in_rollout, is_allowed)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "output_dir"])
def test_every_key_is_refused_or_free_as_it_is_sorted(name):
    before = settings_of()
    now = changed(before, name)
    plain, meant = compare(before, now, is_allowed=False), compare(before, now, is_allowed=True)
    if name in BOUND:
        assert name in plain and name in meant
    elif name in KEPT:
        assert f"{name} stays" in plain and meant is None
    elif name in STEERING | FIXED:
        assert f"{name}: " in plain and "allow_config_change" in plain and meant is None
    else:
        assert is_free(name) or name in rules.FREE_IN_PPO, f"{name} is not sorted: say what it changes, here and there"
        assert plain is None and meant is None


def test_no_key_is_sorted_twice_and_none_is_unknown():
    for name in BOUND | KEPT | STEERING | FIXED:
        assert name in FIELDS and not is_free(name), name
    assert not BOUND & KEPT and not BOUND & STEERING and not KEPT & STEERING


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.5), ("beta", 0.2)])
def test_in_the_middle_of_a_rollout_what_it_was_sampled_under_is_bound(name, value):
    said = compare(settings_of(), settings_of(**{name: value}), is_allowed=True, in_rollout=True)
    assert f"{name} " in said and "start a new run" in said


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint between two rollouts; the base is the one that `base_model` makes."""
    folder = tmp_path_factory.mktemp("run")
    make_trainer(folder, dataset=prompts(6), callbacks=[StopAt(4)], **SHAPE).train()
    return folder / "checkpoint-4"


def resume(folder, checkpoint, **changed):
    trainer = make_trainer(folder, dataset=prompts(6), **{**SHAPE, **changed})
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return trainer


def test_another_base_of_the_same_shape_is_refused_by_its_name(tmp_path, checkpoint):
    other = base_model(initializer_range=0.3)
    other.config.name_or_path = "someone/other"
    with pytest.raises(ValueError, match=r"written on the base model .* and this run uses someone/other \(llama, sha"):
        resume(tmp_path, checkpoint, model=other)


def test_an_adapter_of_another_scale_is_refused(tmp_path, checkpoint):
    scaled = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match=r"lora_alpha 8 \(here 16\)"):
        resume(tmp_path, checkpoint, model=TrunkModel(base_model(), scaled))


def odd_share(**columns):
    return [1 - share for share in even_share(**columns)]


def test_a_changed_objective_is_said_in_one_warning_and_holds_from_the_next_rollout_on_and_the_optimizer_s_own_stays(
    tmp_path, checkpoint, caplog
):
    changed = {"gamma": 0.9, "epsilon": 0.3, "value_steps": 50, "length_penalty": 0.1, "temperature": 0.7}
    changed |= {"reward": [odd_share, even_share], "reward_weights": [1.0, 2.0], "beta": 0.5}
    with pytest.raises(ValueError, match="gamma: 1.0 -> 0.9.*set allow_config_change to true to resume with"):
        resume(tmp_path, checkpoint, **changed)
    with pytest.raises(ValueError, match=r"weight_decay stays 0.0 \(here 0.1\).* allow_config_change"):
        resume(tmp_path, checkpoint, weight_decay=0.1)
    trainer = resume(tmp_path, checkpoint, allow_config_change=True, weight_decay=0.1, **changed)
    assert logged(trainer, "kl/beta") == [0.05, 0.5, 0.5]
    assert "weight_decay stays 0.0 (here 0.1)" in caplog.text
    told = [r.getMessage() for r in caplog.records if "settings that have changed since" in r.getMessage()]
    assert len(told) == 1
    expected = ["gamma: 1.0 -> 0.9", "epsilon: 0.2 -> 0.3", "value_steps: 40 -> 50", "length_penalty: 0.0 -> 0.1"]
    expected += ["reward_weights: None -> [1.0, 2.0]", "temperature: 1.0 -> 0.7", "beta: 0.05 -> 0.5"]
    own = "tests.ppo.support.even_share"
    expected += [f"reward_funcs: ['{own}'] -> ['{__name__}.odd_share', '{own}']"]
    assert all(pair in told[0] for pair in expected), told[0]
    assert told[0].count(" -> ") == len(expected)


REWARD = """
def kind(completion_ids, answer, **rest):
    return [float(len(ids)) - len(text) for ids, text in zip(completion_ids, answer)]
"""


def scored(folder, rules, answer="no", source="here", **changed):
    """Return a trainer whose reward is written in `rules.py` and reads the column `answer`."""
    folder.mkdir(exist_ok=True)
    (folder / "rules.py").write_text(rules)
    rows = prompts(6, answer=[answer] * 6, source=[source] * 6)
    reward = resolve_reward(f"{folder}/rules.py:kind")
    return make_trainer(folder / "out", dataset=rows, reward=reward, **{**SHAPE, **changed})


@pytest.mark.slow
def test_a_changed_reward_file_or_column_is_refused_unless_it_is_meant(tmp_path, caplog):
    scored(tmp_path / "one", REWARD, callbacks=[StopAt(4)]).train()
    checkpoint = str(tmp_path / "one/out/checkpoint-4")
    digests = "kind, sha256 [0-9a-f]{16} -> kind, sha256 [0-9a-f]{16}"
    with pytest.raises(ValueError, match=f"changed since: reward_funcs.kind: {digests}; set them back, or set allow"):
        scored(tmp_path / "two", REWARD + "# twice\n").train(checkpoint)
    rows = "6 rows, sha256 [0-9a-f]{16}"
    with pytest.raises(ValueError, match=f"changed since: reward_columns.answer: {rows} -> {rows}; set"):
        scored(tmp_path / "three", REWARD, answer="yes").train(checkpoint)
    scored(tmp_path / "four", REWARD + "# twice\n", answer="yes", allow_config_change=True).train(checkpoint)
    assert "reward_funcs.kind" in caplog.text and "reward_columns.answer" in caplog.text


def test_resuming_elsewhere_for_longer_on_the_same_base_by_another_name_is_no_change(tmp_path, checkpoint, caplog):
    base_model().save_pretrained(tmp_path / "base")
    free = {"num_rollouts": 4, "save_strategy": "steps", "save_steps": 2, "logging_steps": 2, "report_to": ["none"]}
    free |= {"model": str(tmp_path / "base"), "run_name": "again", "microbatch_tokens": 64, "max_rollout_rows": 2}
    trainer = resume(tmp_path / "elsewhere", checkpoint, **free)
    assert trainer.state.global_step == 16
    assert "changed since" not in caplog.text and "stays" not in caplog.text


def test_a_reward_function_is_known_by_where_it_comes_from(tmp_path):
    (tmp_path / "rubric.py").write_text("def kind(completions, **columns):\n    return [1.0]\n")
    assert reward_path(resolve_reward(f"{tmp_path}/rubric.py:kind")) == "rubric.py:kind"
    assert reward_path(functools.partial(even_share, x=1)) == "tests.ppo.support.even_share"

    names = {}
    exec("def made(**columns): ...", names)
    names["made"].__module__ = None
    assert reward_path(names["made"]) == "made"

    class Judge:
        name = "judge"

        def __call__(self, **columns): ...

    assert reward_path(Judge()).endswith("Judge judge")
