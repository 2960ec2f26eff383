"""PPOConfig: foreign and unknown keys, fields without meaning, ranges, batch arithmetic: rejected with the fix."""

import dataclasses

import pytest
from transformers import HfArgumentParser, TrainingArguments

from onetrunk.ppo.checks import plan_batches
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.foreign_keys import FOREIGN_KEYS, SAME_MEANING
from onetrunk.ppo.settings import INHERITED_WITHOUT_MEANING

# Fields of the last PPOConfig in TRL (1.12) that have another name or none here; from its documentation.
TRL_PPO = """exp_name reward_model_path model_adapter_name ref_adapter_name num_mini_batches total_episodes
local_rollout_forward_batch_size num_sample_generations response_length stop_token stop_token_id kl_coef cliprange
vf_coef cliprange_value ds3_gather_for_generation sft_model_path""".split()


def fields(config_class):
    return {f.name: f for f in dataclasses.fields(config_class) if f.init}


def config(**settings):
    return PPOConfig(**{"output_dir": "unused", "use_cpu": True, **settings})


@pytest.mark.parametrize("key", sorted({*FOREIGN_KEYS, *TRL_PPO} - {*SAME_MEANING}))
def test_a_key_of_another_trainer_fails_with_its_name_here_or_the_reason(key):
    with pytest.raises(ValueError, match=rf"^PPOConfig: {key}: ") as error:
        config(**{key: 3})
    assert len(str(error.value)) >= len(f"PPOConfig: {key}: here beta")
    named = str(error.value).split(": here ")[-1].split()[0].strip("(),:") if ": here " in str(error.value) else None
    # Where another name is given it is one of ours (or of the recipes, for models and rewards).
    assert named is None or named in fields(PPOConfig) or named in ("model_name_or_path", "a")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"num_iterations": 3}, {"num_ppo_epochs": 3}),
        ({"steps_per_generation": 4}, {"num_minibatches": 4}),
        ({"generation_batch_size": 64, "num_generations": 8}, {"rollout_batch_size": 8, "num_generations": 8}),
        ({"generation_batch_size": None}, {}),
        ({"delta": 3.0}, {"dual_clip": 3.0}),
        ({"mask_truncated_completions": True}, {"truncated_completions": "mask"}),
        ({"mask_truncated_completions": False}, {}),
        ({"vllm_importance_sampling_cap": 2.0}, {"vllm_importance_sampling_clip_max": 2.0}),
        ({"kl_coef": 0.2, "cliprange": 0.1}, {"beta": 0.2, "epsilon": 0.1}),
        ({"cliprange_value": 0.3, "vf_coef": 0.5}, {"value_clip": 0.3, "value_coef": 0.5}),
        ({"response_length": 9, "num_mini_batches": 2}, {"max_completion_length": 9, "num_minibatches": 2}),
    ],
)
def test_a_name_of_trl_with_our_meaning_is_accepted_in_python(theirs, ours):
    one, other = config(**theirs).to_dict(), config(**ours).to_dict()
    assert {**one, "logging_dir": None} == {**other, "logging_dir": None}
    copied = dataclasses.replace(config(**theirs))
    assert {**copied.to_dict(), "logging_dir": None} == {**one, "logging_dir": None}


def test_every_name_with_our_meaning_is_tested_above_and_no_field_of_ours():
    assert (
        not SAME_MEANING.keys() & fields(PPOConfig).keys() and set(SAME_MEANING.values()) <= fields(PPOConfig).keys()
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_iterations": 2, "num_ppo_epochs": 2}, "num_iterations and num_ppo_epochs are the same setting"),
        ({"kl_coef": 0.1, "beta": 0.1}, "kl_coef and beta are the same setting, and both are given; keep beta"),
        ({"generation_batch_size": 9, "num_generations": 2}, "9 is not divisible by num_generations 2; set rollout"),
    ],
)
def test_a_setting_under_two_names_is_rejected(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        config(**settings)


@dataclasses.dataclass(repr=False)
class OwnConfig(PPOConfig):
    more: int = 0


def test_a_dataclass_that_inherits_has_our_names_only():
    with pytest.raises(ValueError, match="num_iterations: here num_ppo_epochs"):
        OwnConfig(output_dir="unused", num_iterations=2)


# Fields of GRPOConfig without another name or a replacement here.
WITHOUT_REPLACEMENT = """cache_implementation log_multimodal log_unique_prompts max_tool_calling_iterations
num_generations_eval pad_to_multiple_of ref_model_mixup_alpha ref_model_sync_steps router_aux_loss_coef sync_ref_model
""".split()


def test_every_key_of_grpo_config_is_rejected_and_those_with_a_replacement_name_it():
    from trl import GRPOConfig

    foreign = fields(GRPOConfig).keys() - fields(PPOConfig).keys() - SAME_MEANING.keys()
    assert len(foreign) > 40
    for key in foreign:
        named = f"unknown key '{key}'" if key in WITHOUT_REPLACEMENT else f"{key}: "
        with pytest.raises(ValueError, match=f"^PPOConfig: {named}"):
            config(**{key: 3})


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("learning_rat", "learning_rate"),
        ("rollout_batchsize", "rollout_batch_size"),
        ("num_minibatch", "num_minibatches"),
        ("epsilom", "epsilon"),
    ],
)
def test_an_unknown_key_fails_with_its_nearest_neighbour(key, nearest):
    with pytest.raises(ValueError, match=f"unknown key '{key}': did you mean '{nearest}'"):
        config(**{key: 1})


def test_several_wrong_keys_are_named_together():
    with pytest.raises(
        ValueError, match="exp_name: here run_name; stop_token_id: here stop_tokens .*; unknown key 'zzz'$"
    ):
        config(exp_name="a", stop_token_id=1, zzz=1)


def test_a_parser_that_hands_over_every_field_and_a_copy_with_changes_work():
    (parsed,) = HfArgumentParser(PPOConfig).parse_args_into_dataclasses(
        ["--output_dir", "unused", "--use_cpu", "--beta", "0.2", "--num_minibatches", "2", "--stop_tokens", "a", "b"]
    )
    assert (parsed.beta, parsed.num_minibatches, parsed.stop_tokens) == (0.2, 2, ["a", "b"])
    assert dataclasses.replace(parsed, gamma=0.5).gamma == 0.5


OTHER_VALUES = {
    "neftune_noise_alpha": 1.0,
    "label_smoothing_factor": 0.1,
    "include_num_input_tokens_seen": "all",
    "dataloader_num_workers": 2,
    "dataloader_prefetch_factor": 2,
    "dataloader_multiprocessing_context": "spawn",
    "train_sampling_strategy": "group_by_length",
    "torch_compile_backend": "inductor",
    "torch_compile_mode": "default",
    "torch_empty_cache_steps": 1,
    "eval_accumulation_steps": 1,
    "include_for_metrics": ["inputs"],
    "label_names": ["labels"],
    "deepspeed": "zero.json",
    "parallelism_config": {"dp": 2},
    "fsdp": "full_shard",
    "dataloader_pin_memory": False,
    "dataloader_in_order": False,
    "average_tokens_across_devices": False,
    "eval_do_concat_batches": False,
    "length_column_name": "tokens",
    "liger_kernel_config": {"rope": True},
}


@pytest.mark.parametrize("name", sorted(INHERITED_WITHOUT_MEANING))
def test_an_inherited_field_without_meaning_is_refused_by_name(name):
    assert name in fields(TrainingArguments)
    with pytest.raises(ValueError, match=f"^{name}=.* has no meaning here: "):
        config(**{name: OTHER_VALUES.get(name, True), "use_cpu": name != "dataloader_pin_memory"})


def test_a_foreign_key_at_its_neutral_value_is_to_be_left_out_too():
    with pytest.raises(ValueError, match="leave it out, also at 0.0$"):
        config(min_p=0.0)


def test_gradient_accumulation_is_refused_with_what_takes_its_place():
    with pytest.raises(ValueError, match="gradient_accumulation_steps 2 has no meaning here.*microbatch_tokens"):
        config(gradient_accumulation_steps=2)


@pytest.mark.parametrize(
    "setting",
    [
        {"ignore_data_skip": False},
        {"remove_unused_columns": True},
        {"logging_nan_inf_filter": True},
        {"ddp_find_unused_parameters": False},
        {"ddp_broadcast_buffers": True},
    ],
)
def test_fields_that_the_stream_rests_on_cannot_be_changed(setting):
    with pytest.raises(ValueError, match=f"{next(iter(setting))} must stay"):
        config(**setting)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rollout_batch_size": 0}, "rollout_batch_size is 0; it must be a whole number above 0"),
        ({"rollout_batch_size": 6.5}, "rollout_batch_size is 6.5; it must be a whole number"),
        ({"num_ppo_epochs": -1}, "num_ppo_epochs is -1"),
        ({"num_minibatches": True}, "num_minibatches is True; it must be a whole number above 0"),
        ({"rollout_batch_size": None}, "rollout_batch_size is None"),
        ({"beta": None}, "beta is None; it must be 0 or more"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size is 0"),
        ({"per_device_eval_batch_size": 0}, "per_device_eval_batch_size is 0"),
        ({"max_grad_norm": None}, "max_grad_norm is None; it must be 0 (no clipping) or more"),
        ({"fp16": True}, "fp16 needs a GPU"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "follows a loss on labels"),
        ({"optim": "schedule_free_adamw"}, "its weights in training are not those that it evaluates"),
        ({"optim": "adalomo"}, "it updates weights inside the backward"),
        ({"optim": "galore_adamw_layerwise"}, "it updates weights inside the backward"),
        ({"truncated_completions": "terminal", "missing_eos_penalty": 1.0}, "contradict each other"),
        ({"temperature": 0.0}, "temperature is 0.0; it must be a number above 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"epsilon": "0.2"}, "epsilon is the text '0.2'; it must be a number above 0"),
        ({"beta": "0.1"}, "beta is the text '0.1'; it must be a number, 0 or more"),
        ({"num_minibatches": "2"}, "num_minibatches is the text '2'; it must be a whole number above 0"),
        ({"epsilon": 1.0}, "epsilon is 1.0; it must be below 1"),
        ({"epsilon": 0.3, "epsilon_high": 0.2}, "epsilon_high 0.2 is below epsilon 0.3"),
        ({"beta": -0.1}, "beta is -0.1; it must be 0 or more"),
        ({"gamma": 1.1}, "gamma is 1.1; it must be between 0 and 1"),
        ({"lam": float("inf")}, "lam is inf"),
        ({"dual_clip": 1.0}, "dual_clip is 1.0; it must be above 1"),
        ({"value_head": "twin"}, "value_head is 'twin'; it must be one of shared, detached, adapter"),
        ({"kl_estimator": "k4"}, "one of k1, k2, k3"),
        ({"truncated_completions": "drop"}, "one of terminal, bootstrap, penalize, mask"),
        ({"overlong_prompts": "skip"}, "one of error, drop, truncate"),
        ({"overlong_prompts": "drop"}, "overlong_prompts 'drop' needs max_prompt_length"),
        ({"truncated_completions": "penalize"}, "'penalize' needs a penalty"),
        ({"truncated_completions": "mask", "missing_eos_penalty": 1.0}, "contradict each other"),
        ({"kl_estimator": "k2"}, "kl_estimator k2 in the reward has another gradient than the KL"),
        ({"kl_estimator": "k3"}, "use k1, or set kl_in_loss"),
        ({"kl_in_loss": True}, "kl_in_loss with kl_estimator k1 has no useful gradient"),
        ({"kl_in_loss": True, "kl_estimator": "k2", "beta": 0.0}, "kl_in_loss needs beta above 0"),
        ({"kl_target": 1.0, "beta": 0.0}, "kl_target adapts beta by factors"),
        ({"length_adaptive_lam": 0.05, "lam_policy": 0.9}, "both set the policy's lambda"),
        ({"num_rollouts": 3, "max_steps": 5}, "num_rollouts 3 makes 12 optimizer steps, but max_steps is 5"),
        ({"value_pretraining_rollouts": -1}, "value_pretraining_rollouts is -1"),
        ({"seed": -1}, "seed is -1; set a whole number from 0 to 4294967295"),
        ({"seed": 2**32}, "seed is 4294967296"),
        ({"data_seed": -1}, "data_seed is -1"),
        ({"max_unscored_fraction": 2.0}, "max_unscored_fraction is 2.0"),
    ],
)
def test_a_value_out_of_range_or_a_contradiction_is_refused_by_a_sentence(settings, sentence):
    with pytest.raises(ValueError) as error:
        config(**settings)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("settings", "world", "sentence", "remedy"),
    [
        ({"rollout_batch_size": 9}, 2, "rollout_batch_size 9 is not divisible by 2", {"rollout_batch_size": 8}),
        ({"rollout_batch_size": 1}, 4, "not divisible by 4 processes; set it to 4", {"rollout_batch_size": 4}),
        (
            {"rollout_batch_size": 48, "num_minibatches": 5, "per_device_train_batch_size": 4},
            1,
            "not divisible by 5 minibatches; set num_minibatches to 4 or 6",
            {"num_minibatches": 6},
        ),
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
    example = config(
        rollout_batch_size=64, num_minibatches=4, num_ppo_epochs=2, per_device_train_batch_size=4, num_rollouts=5
    )
    plan = plan_batches(example, 2)
    assert (plan.rows_per_rank, plan.rows_per_minibatch, plan.rows_per_pack) == (32, 8, 4)
    assert (example.slots_per_rollout, example.max_steps) == (8, 40)


def test_every_field_of_ours_says_what_it_is():
    own = fields(PPOConfig).keys() - fields(TrainingArguments).keys()
    assert len(own) > 40
    for name in own:
        assert len(fields(PPOConfig)[name].metadata["help"]) > 10, name


def test_what_has_not_run_on_hardware_says_so():
    for name in ("bf16", "fp16"):
        assert "not yet run on hardware" in fields(PPOConfig)[name].metadata["help"]


def test_bf16_is_off_on_the_cpu_unless_asked_for():
    assert config().bf16 is False
    assert config(bf16=True).bf16 is True


@pytest.mark.parametrize(
    "settings",
    [
        {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"},
        {"save_strategy": "best", "eval_strategy": "steps"},
    ],
)
def test_the_best_model_is_the_one_with_the_highest_score_unless_said_otherwise(settings):
    chosen = config(**settings)
    assert (chosen.metric_for_best_model, chosen.greater_is_better) == ("score/mean", True)
    assert config(**settings, metric_for_best_model="kl/ref", greater_is_better=False).greater_is_better is False


def test_no_table_of_samples_can_be_asked_for_and_a_penalty_implies_penalize():
    assert config(num_completions_to_print=0).num_completions_to_print == 0
    assert config(missing_eos_penalty=1.0).truncated_completions == "penalize"
    assert config().truncated_completions == "terminal"
