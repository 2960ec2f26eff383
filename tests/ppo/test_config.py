"""PPOConfig: foreign and unknown keys, fields without meaning, ranges, batch arithmetic: rejected with the fix."""

import dataclasses
import math
from typing import get_args, get_type_hints

import pytest
import torch
from transformers.trainer_pt_utils import AcceleratorConfig
from trl import TrlParser

from onetrunk.ppo.config import TRL_DEFAULTS, PPOConfig, describe_cpu, describe_steps, plan_batches
from onetrunk.ppo.foreign_names import FIXED, INHERITED_WITHOUT_MEANING, WITHOUT_EFFECT
from onetrunk.ppo.monitoring.alarm_rules import RULES
from onetrunk.ppo.settings import FLAGS, RANGES
from onetrunk.reward_models.distill import RewardDistillationConfig
from onetrunk.reward_models.training import RewardModelConfig
from onetrunk.stages.arguments import SFTArguments

USE = {"use_vllm": True}
COLOCATE = {**USE, "vllm_mode": "colocate"}
DIS = {"policy_objective": "dis"}
COMPACTION = {"max_context_length": 22, "max_turn_length": 3}
OTHER_VALUES = {
    "label_smoothing_factor": 0.1,
    "dataloader_num_workers": 2,
    "dataloader_pin_memory": False,
    "dataloader_in_order": False,
    "average_tokens_across_devices": False,
    "eval_do_concat_batches": False,
    "log_on_each_node": False,
    "skip_memory_metrics": False,
    "local_rank": 1,
    "gradient_accumulation_steps": 2,
}


def fields(config_class):
    return {f.name: f for f in dataclasses.fields(config_class) if f.init}


def config(**settings):
    return PPOConfig(**{"output_dir": "unused", "use_cpu": True, **settings})


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"exp_name": 1, "zzz": 1}, "exp_name: here run_name; unknown key 'zzz'"),
        ({"lr": 1}, "lr: here learning_rate"),
        ({"min_p": 0.1}, "min_p is 0.1: completions are drawn from the policy itself"),
        ({"sync_ref_model": True}, "sync_ref_model is True: PPO here has nothing like it"),
        ({"loss_type": "cispo"}, "loss_type cispo is another objective than PPO's"),
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, "3 is not divisible by gradient_accumulation"),
        ({"num_iterations": 2, "num_ppo_epochs": 3}, "num_iterations 2 is num_ppo_epochs 2 here, and num_ppo_epochs"),
        ({"datasets": []}, "datasets: one dataset_name, or a file with the rows of all of them"),
        ({"trust_remote_code": True}, "pass model_init_kwargs: {trust_remote_code: true, revision: <commit>}"),
        ({"learning_rat": 1}, "unknown key 'learning_rat': did you mean 'learning_rate'?"),
        ({"num_minibatch": 1}, "unknown key 'num_minibatch': did you mean 'num_minibatches'?"),
    ],
)
def test_a_key_of_another_trainer_is_answered_by_its_name_here_a_reason_or_the_nearest(keys, sentence):
    with pytest.raises(ValueError) as error:
        config(**keys)
    assert sentence in str(error.value)


def test_every_key_of_grpo_config_is_taken_at_its_default_there():
    """A script that writes a default down runs; what TRL's names mean here is in our own fields afterwards."""
    assert len(TRL_DEFAULTS) > 40
    taken = config(**TRL_DEFAULTS)
    assert all(getattr(taken, name) in (None, False) for name in TRL_DEFAULTS)
    assert taken.num_ppo_epochs == 1 and not TRL_DEFAULTS.keys() & taken.to_dict().keys()


def test_rollouts_of_fewer_steps_than_an_optimizer_step_are_one_rollout():
    assert config(steps_per_generation=1, gradient_accumulation_steps=16).num_minibatches == 1
    assert config(steps_per_generation=4, gradient_accumulation_steps=4).num_minibatches == 1


@pytest.mark.parametrize("as_words", [False, True])
def test_names_of_trl_are_read_as_ours_also_by_its_parser_and_a_line_says_so(tmp_path, caplog, as_words):
    theirs = {
        "num_iterations": 1, "steps_per_generation": 8, "gradient_accumulation_steps": 2, "num_generations": 4,
        "generation_batch_size": 64, "importance_sampling_level": "sequence", "delta": 2.0, "scale_rewards": "none",
        "use_vllm": True, "vllm_server_host": "gpu1", "loss_type": "grpo", "use_liger_kernel": True,
    }  # fmt: skip
    if as_words:
        theirs |= {"output_dir": tmp_path, "use_cpu": True}
        words = [word for name, value in theirs.items() for word in (f"--{name}", str(value))]
        (read,) = TrlParser((PPOConfig,)).parse_args_and_config(words)
    else:
        read = config(**theirs)
    ours = {
        "num_ppo_epochs": 1, "num_minibatches": 4, "rollout_batch_size": 16, "ratio_unit": "turn", "dual_clip": 2.0,
        "whiten_advantages": False, "vllm_server_base_url": ["http://gpu1:8000"], "gradient_accumulation_steps": 1,
        "use_liger_kernel": False,
    }  # fmt: skip
    assert {name: getattr(read, name) for name in ours} == ours
    assert "num_iterations 1: read as num_ppo_epochs 1" in caplog.text
    assert "loss_type grpo: no effect here, the loss is a mean over the tokens" in caplog.text
    assert "use_liger_kernel True has no effect here: the fused logprobs" in caplog.text
    # Copies say nothing again.
    caplog.clear()
    assert dataclasses.replace(read).num_minibatches == 4 and not caplog.text


def test_a_line_says_how_many_completions_a_step_has_and_how_many_trl_would_take():
    settings = {"num_generations": 8, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}
    line = "rollout: 512 completions (64 prompts x 8), then 4 steps of 512 completions"
    assert describe_steps(config(**settings)) == f"{line}; in GRPOTrainer the same settings give steps of 32"


def test_a_run_on_a_cpu_says_what_half_precision_and_a_busy_machine_change():
    assert describe_cpu(torch.float32, threads=1, load=9.0, cores=2) == []
    assert describe_cpu(torch.float32, threads=2, load=0.2, cores=2) == []
    (busy,) = describe_cpu(torch.float32, threads=2, load=1.5, cores=2)
    assert busy.startswith("threads: torch uses 2, and other processes keep 1.5 of 2 cores busy") and "OMP" in busy
    (rounded,) = describe_cpu(torch.bfloat16, threads=1, load=0.0, cores=2)
    assert rounded.startswith("precision: on a CPU only a float32 base, not a bfloat16 one,")


@pytest.mark.parametrize("name", sorted(INHERITED_WITHOUT_MEANING | WITHOUT_EFFECT))
def test_an_inherited_field_without_meaning_is_refused_or_has_no_effect(caplog, name):
    settings = {name: OTHER_VALUES.get(name, True), "use_cpu": name != "dataloader_pin_memory"}
    if name in INHERITED_WITHOUT_MEANING:
        with pytest.raises(ValueError, match=f"^{name}=.* has no meaning here: "):
            config(**settings)
    else:
        assert getattr(config(**settings), name) == getattr(config(use_cpu=settings["use_cpu"]), name)
        assert f"{name} {settings[name]} has no effect here: " in caplog.text


@pytest.mark.parametrize(("name", "required"), [(name, value) for name, (value, _) in FIXED.items()])
def test_fields_that_the_stream_rests_on_keep_their_value(caplog, name, required):
    assert getattr(config(**{name: not required}), name) is required
    assert f"{name} stays {required}: " in caplog.text


REFUSED = [
    ({"rollout_batch_size": 6.5}, "rollout_batch_size is 6.5; it must be a whole number"),
    ({"num_minibatches": True}, "num_minibatches is True; it must be a whole number above 0"),
    ({"generation_kwargs": {"num_beams": 4, "top_p": 0.9}}, "generation_kwargs has num_beams; it may have"),
    ({"generation_kwargs": {"top_p": 0.9}, "top_p": 0.5}, "is top_p 0.9 here, and top_p is 0.5; keep one of them"),
    ({"generation_kwargs": "top_p"}, "generation_kwargs is 'top_p'; it must be a dict"),
    ({"fp16": True}, "fp16 needs a GPU"),
    ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "follows a loss on labels"),
    ({"optim": "schedule_free_adamw"}, "its weights in training are not those that it evaluates"),
    ({"optim": "adalomo"}, "it updates weights inside the backward"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"beta": "0.1"}, "beta is the text '0.1'; it must be a number, 0 or more"),
    ({"epsilon": 1.0}, "epsilon is 1.0; it must be below 1"),
    ({"epsilon": 0.3, "epsilon_high": 0.2}, "epsilon_high 0.2 is below epsilon 0.3"),
    ({"gamma": 1.1}, "gamma is 1.1; it must be between 0 and 1"),
    ({"dual_clip": 1.0}, "dual_clip is 1.0; it must be above 1"),
    ({"value_head": "shared"}, "value_head: removed with the value adapter: the value is a small head on"),
    ({"value_coef": 0.1}, "value_coef: the PPO loss has no value term: the value head is fitted after each rollout"),
    ({"cliprange_value": 0.2}, "cliprange_value: the PPO loss has no value term"),
    ({"adapter_layers": "top-0"}, "adapter_layers is 'top-0'; it must be 'all', or 'top-k'"),
    ({"overlong_prompts": "drop"}, "overlong_prompts 'drop' needs max_prompt_length"),
    ({"truncated_completions": "penalize"}, "'penalize' needs a penalty"),
    ({"truncated_completions": "mask", "missing_eos_penalty": 1.0}, "contradict each other"),
    ({"kl_estimator": "k3"}, "use k1, or set kl_in_loss"),
    ({"kl_in_loss": True}, "kl_in_loss with kl_estimator k1 has no useful gradient"),
    ({"kl_in_loss": True, "kl_estimator": "k2", "beta": 0.0}, "kl_in_loss needs beta above 0"),
    ({"kl_target": 1.0, "beta": 0.0}, "kl_target adapts beta by factors"),
    ({"kl_target": 1.0, "kl_horizon": 12}, "kl_horizon is 12, and a rollout of 64 completions could bring beta to 0"),
    ({"num_rollouts": 3, "max_steps": 5}, "num_rollouts 3 makes 12 optimizer steps, but max_steps is 5"),
    ({"seed": -1}, "seed is -1; set a whole number from 0 to 4294967295"),
    ({"data_seed": 2**32}, "data_seed is 4294967296"),
    ({"top_p": 0.0}, "top_p is 0.0; set it above 0 and at most 1"),
    ({"top_k": -1}, "top_k is -1; set a whole number of tokens"),
    ({"top_k": 5, "vllm_importance_sampling_correction": False}, "completions are not sampled from the policy"),
    ({"schedule": "one_step", "max_staleness": 2}, "schedule 'one_step' always has 1"),
    ({**COLOCATE, "schedule": "async"}, "vllm_mode 'colocate' has the trainer's GPU only between two updates"),
    ({"vllm_server_base_url": "http://a"}, "vllm_server_base_url is set and use_vllm is not"),
    ({**USE, "vllm_server_base_url": "a:8000"}, "is not an address; write it with its scheme"),
    ({**USE, "vllm_server_base_url": ["http://a", "http://a/"]}, "names a server twice"),
    ({**USE, "vllm_request_timeout": 0}, "vllm_request_timeout is 0; it must be a number above 0"),
    ({**COLOCATE, "vllm_server_base_url": "http://a"}, "vllm_mode 'colocate' has no server"),
    ({"vllm_mode": "colocate"}, "vllm_mode is set and use_vllm is not"),
    ({**USE, "vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode belongs to vllm_mode 'colocate'"),
    ({**USE, "vllm_importance_sampling_clip_max": None}, "a single rare token could then outweigh a rollout"),
    ({"vllm_importance_sampling_clip_min": 4.0}, "the upper bound must be above 0 and above the lower one"),
    ({"vllm_importance_sampling_mode": "sequence_mask"}, "it must be one of token_truncate, token_mask"),
    ({"pipeline_batches": 2}, "pipeline_batches is set and rollout_backend is not 'pipelined'"),
    ({"rollout_backend": "pipelined", "use_vllm": True}, "leave one of them out"),
    ({"rollout_backend": "sampler.py:Mine", "use_vllm": True}, "leave one of them out"),
    ({"rollout_backend": "vllm"}, "it must be one of local, pipelined, package.module.name and path/to/file.py:name"),
    ({"rollout_backend": "pipelined", "schedule": "one_step"}, "the processes of rollout_backend 'pipelined' work"),
    ({"rollout_backend": "pipelined", "pipeline_training": True, "trunk_cache": "cpu"}, "set it to auto or off"),
    ({**COLOCATE, "pipeline_training": True}, "pipeline_training is not supported with vllm_mode 'colocate'"),
    ({**USE, "pipeline_training": True, "schedule": "async"}, "the processes of pipeline_training work together"),
    ({**USE, "pipeline_training": True, "activation_offloading": True}, "set activation_checkpointing"),
    ({"rollout_backend": "pipelined", "pipeline_split": [2, 0]}, "must be a list of whole numbers above 0"),
    ({"rollout_backend": "pipelined", "pipeline_split": [4]}, "must be a list of whole numbers above 0, at least two"),
    ({"rollout_backend": "pipelined", "pipeline_split": [2, 2], "pipeline_stages": 3}, "has 2 numbers and"),
    ({"pipeline_split": [2, 2]}, "pipeline_split is set and rollout_backend is not 'pipelined'"),
    ({"alarm_limits": {"klo": 1.0}}, "alarm_limits names 'klo', which is not an alarm; expected any of kl,"),
    ({"alarm_limits": {"entropy": -1.0}}, "the alarm limit entropy is -1.0; it must be a number, 0 or more"),
    ({"stop_on_alarm": ["klo"]}, "stop_on_alarm names 'klo', which is not an alarm"),
    ({"stop_on_alarm": "kl", "alarm_limits": {"kl": None}}, "stop_on_alarm names kl, and its limit is null"),
    ({"policy_objective": "sao"}, "policy_objective is 'sao'; it must be one of clip, dis"),
    ({"dis_epsilon_low": 0.5}, "dis_epsilon_low has no effect with policy_objective 'clip'"),
    ({**DIS, "dis_epsilon_low": 1.5}, "dis_epsilon_low is 1.5; it must be at most 1"),
    ({**DIS, "dis_epsilon_high": 0.0}, "dis_epsilon_high is 0.0; it must be a number above 0"),
    ({**DIS, "epsilon": 0.1, "dual_clip": 3.0}, "epsilon, dual_clip has no effect with policy_objective 'dis'"),
    ({**DIS, "ratio_unit": "turn"}, "ratio_unit has no effect with policy_objective 'dis'"),
    ({**DIS, "vllm_importance_sampling_correction": True}, "vllm_importance_sampling_correction has no effect"),
    ({"max_turns": 3, "max_tool_calling_iterations": 3}, "max_tool_calling_iterations 3 is max_turns 4"),
    ({"max_context_length": 22}, "max_context_length needs max_turn_length"),
    ({"kept_turns": 1, "compaction_prompt": "x"}, "has no effect without max_context_length"),
    ({**COMPACTION, "truncated_completions": "bootstrap"}, "'bootstrap' is not supported with max_context_length"),
    ({**COMPACTION, "compaction_prompt": " "}, "compaction_prompt is empty"),
    ({"kept_turns": -1}, "kept_turns is -1; it must be 0 or more"),
    ({"max_compactions": 0}, "max_compactions is 0; it must be a whole number above 0"),
]


@pytest.mark.parametrize(("settings", "sentence"), REFUSED)
def test_a_value_out_of_range_or_a_contradiction_is_refused_by_a_sentence(settings, sentence):
    with pytest.raises(ValueError) as error:
        config(**settings)
    assert sentence in str(error.value)


NONE_IS_OFF = {"beta": 0.0, "max_grad_norm": 0.0}
# None is a value of its own: no bound of a ratio.
NONE_CONTRADICTS = ("vllm_importance_sampling_clip_max",)


@pytest.mark.parametrize("settings_class", [PPOConfig, RewardModelConfig, RewardDistillationConfig, SFTArguments])
def test_none_means_off_or_the_default_in_every_setting(settings_class):
    given = {"output_dir": "unused", "use_cpu": True}
    default, types = settings_class(**given), get_type_hints(settings_class)
    for name in fields(settings_class).keys() - given.keys():
        if settings_class is PPOConfig and name in NONE_CONTRADICTS:
            with pytest.raises(ValueError, match=name):
                settings_class(**given, **{name: None})
            continue
        value = getattr(settings_class(**given, **{name: None}), name)
        expected = NONE_IS_OFF.get(name, getattr(default, name))
        may_be_none = value is None and type(None) in get_args(types[name])
        assert may_be_none or value == expected or type(value) is type(expected) is AcceleratorConfig, name


def test_generation_kwargs_are_read_as_the_settings_that_exist(caplog):
    asked = {"max_new_tokens": 7, "top_p": 0.9, "top_k": 5, "temperature": 0.7, "do_sample": True, "min_p": None}
    read = config(generation_kwargs=asked)
    assert (read.max_completion_length, read.top_p, read.top_k, read.temperature) == (7, 0.9, 5, 0.7)
    assert read.generation_kwargs is None and "read as max_completion_length 7, top_p 0.9" in caplog.text


# What each kind of range forbids, as close to its limits as can be.
FORBIDDEN = {
    "a whole number above 0": [0, 1.5],
    "a number above 0": [0.0, math.inf],
    "0 or more": [-1, math.nan],
    "between 0 and 1": [-1e-9, 1 + 1e-9],
    "above 1": [1.0],
    "below 1": [1.0],
    "at most 1": [1 + 1e-9],
    "above 0 and below 1": [0.0, 1.0],
    "a whole number above 1": [1, 2.5],
    "a list of whole numbers above 0, at least two": [[2], [2, 0]],
    "0 (no clipping) or more": [-1e-9],
}


def test_every_range_is_checked_by_name_at_its_limits_and_its_settings_exist():
    for names, _, expected in RANGES:
        for name in names.split():
            for value in ["?", *FORBIDDEN.get(expected, [])]:
                with pytest.raises(ValueError, match=name):
                    config(**USE, **{name: value})
    assert {*FORBIDDEN} <= {expected for *_, expected in RANGES}
    for name in {*FLAGS} - {"bf16", "fp16", "ignore_data_skip", "remove_unused_columns", "logging_nan_inf_filter"}:
        with pytest.raises(ValueError, match=f"{name} is 'no'; it must be true or false"):
            config(**{**(COLOCATE if name.startswith("vllm_") else {}), name: "no"})


def test_limits_of_alarms_by_what_samples():
    off = {name for name, limit in config(top_k=3).limits.items() if limit is None}
    assert off == {"negative_kl", "logprob_gap"} and None not in config().limits.values()
    ahead = config(**USE, schedule="async", alarm_limits={"kl": 5.0})
    assert {name for name, limit in ahead.limits.items() if limit is None} == {"negative_kl"}
    assert ahead.limits["kl"] == 5.0
    assert config(top_k=3, alarm_limits={"logprob_gap": 1.0}).limits["logprob_gap"] == 1.0
    for word, number in (("all", len(RULES)), (["kl", "entropy"], 2), ("entropy", 1), (None, 0), ("null", 0)):
        assert len(config(stop_on_alarm=word).stop_on_alarm or []) == number


@pytest.mark.parametrize(
    ("settings", "world", "sentence", "remedy"),
    [
        ({"rollout_batch_size": 9}, 2, "rollout_batch_size 9 is not divisible by 2", {"rollout_batch_size": 8}),
        ({"rollout_batch_size": 1}, 4, "not divisible by 4 processes; set it to 4", {"rollout_batch_size": 4}),
        (
            {"rollout_batch_size": 12, "num_generations": 2, "num_minibatches": 7, "per_device_train_batch_size": 1},
            2,
            "set num_minibatches to 4 or 6",
            {"num_minibatches": 4},
        ),
    ],
)
def test_batch_arithmetic_that_leaves_a_rest_names_values_that_divide(settings, world, sentence, remedy):
    with pytest.raises(ValueError) as error:
        plan_batches(config(**settings), world)
    assert sentence in str(error.value)
    plan_batches(config(**{**settings, **remedy}), world)


def test_the_worked_example_of_the_docstring():
    shape = {"rollout_batch_size": 64, "num_minibatches": 4, "num_ppo_epochs": 2, "per_device_train_batch_size": 4}
    example = config(**shape, num_rollouts=5)
    plan = plan_batches(example, 2)
    assert (plan.rows_per_rank, plan.rows_per_minibatch, plan.rows_per_pack) == (32, 8, 4)
    assert (example.steps_per_rollout, example.max_steps) == (8, 40)


def test_defaults_that_depend_on_other_settings():
    assert config().bf16 is False and config(bf16=True).bf16 is True
    assert config(missing_eos_penalty=1.0).truncated_completions == "penalize"
    assert config().truncated_completions == "terminal"


@pytest.mark.parametrize(
    "own", [{"load_best_model_at_end": True, "save_strategy": "steps"}, {"save_strategy": "best"}]
)
def test_the_best_model_is_the_one_with_the_highest_score_unless_said_otherwise(own):
    settings = {"eval_strategy": "steps", **own}
    chosen = config(**settings)
    assert (chosen.metric_for_best_model, chosen.greater_is_better) == ("score/mean", True)
    assert config(**settings, metric_for_best_model="kl/ref", greater_is_better=False).greater_is_better is False


@pytest.mark.parametrize(
    ("settings", "least"),
    [
        ({}, None),
        ({"schedule": "one_step"}, None),
        ({"schedule": "async"}, 1 / 3),
        ({"schedule": "async", "vllm_importance_sampling_clip_min": 0.0}, 0.0),
        ({"schedule": "async", "vllm_importance_sampling_clip_max": 0.2}, 0.2),
        # A token that is left out below a bound trains as little as one of weight 0.
        ({"schedule": "async", "vllm_importance_sampling_mode": "token_mask"}, None),
    ],
)
def test_samples_that_may_be_old_keep_a_third_of_their_weight(settings, least):
    bounds = config(**settings).importance_bounds
    assert bounds["clip_min"] == least
    assert bounds["clip_max"] == settings.get("vllm_importance_sampling_clip_max", 3.0)
