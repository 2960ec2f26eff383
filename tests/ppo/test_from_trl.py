"""What arguments of TRL's GRPOTrainer mean here: rows of any kind, names of metrics, attributes."""

import dataclasses

import pytest
from datasets import DatasetDict, IterableDataset

from onetrunk import PPOConfig, PPOTrainer
from tests.ppo import support
from tests.ppo.support import base_model, even_share, logged, make_trainer, prompts, trained, trained_weights

CPU = {"output_dir": "out", "use_cpu": True}


def test_a_copy_of_the_settings_decides_again_what_other_settings_decide():
    config = PPOConfig(**CPU, num_rollouts=2, num_ppo_epochs=3, max_tool_calling_iterations=1)
    changed = {"num_rollouts": 4, "max_tool_calling_iterations": 2, "use_vllm": True, "schedule": "one_step"}
    copy = dataclasses.replace(config, **changed)
    assert (copy.max_steps, copy.max_turns, copy.max_staleness) == (12, 3, 1)
    with pytest.raises(ValueError, match="num_rollouts 4 makes 12 optimizer steps, but max_steps is 5"):
        dataclasses.replace(config, num_rollouts=4, max_steps=5)


def of_each_kind(rows):
    yield rows.to_list()
    yield DatasetDict(train=rows)
    yield rows.to_iterable_dataset()
    yield IterableDataset.from_generator(lambda: iter(rows.to_list()))


def test_lists_a_single_split_and_iterable_rows_train_and_evaluate_as_a_dataset_does(tmp_path):
    expected = trained(tmp_path / "plain", num_rollouts=2)
    metrics = expected.evaluate(prompts(4))
    for number, rows in enumerate(of_each_kind(prompts())):
        trainer = trained(tmp_path / str(number), num_rollouts=2, dataset=rows)
        support.assert_same(trained_weights(trainer.model), trained_weights(expected.model))
    for rows in (prompts(4).to_list(), prompts(4).to_iterable_dataset()):
        again = expected.evaluate(rows)
        assert {n: v for n, v in again.items() if "time" not in n} == {
            n: v for n, v in metrics.items() if "time" not in n
        }


def test_rows_whose_number_is_not_known_say_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="whose length is not known; set num_rollouts or max_steps, or use ShardedR"):
        make_trainer(tmp_path, dataset=prompts().to_iterable_dataset(), num_train_epochs=1)
    with pytest.raises(ValueError, match="train_dataset holds no rows; give at least one"):
        make_trainer(tmp_path, dataset=[])
    with pytest.raises(ValueError, match=r"train_dataset has the splits train, test; pass one of them, such as rows"):
        make_trainer(tmp_path, dataset=DatasetDict(train=prompts(), test=prompts()))


BEST = {"load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "steps", "save_steps": 1}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("eval_reward", "score/mean"), ("rewards/even_share/mean", "score/even_share"), ("kl", "kl/ref")],
)
def test_the_metric_of_the_best_model_may_have_trls_name(tmp_path, theirs, ours):
    settings = {**BEST, "eval_steps": 1, "metric_for_best_model": theirs}
    trainer = make_trainer(tmp_path, eval_dataset=prompts(4), **settings)
    assert trainer.args.metric_for_best_model == ours
    named = (
        make_trainer(
            tmp_path, eval_dataset={"held": prompts(4)}, **{**settings, "metric_for_best_model": f"held_{theirs}"}
        )
        if not theirs.startswith("eval_")
        else trainer
    )
    assert named.args.metric_for_best_model.endswith(ours)
    if theirs == "eval_reward":
        trainer.train()
        assert trainer.state.best_metric == max(logged(trainer, "eval_score/mean"))


def test_a_metric_that_no_evaluation_gives_is_named_before_the_model_loads(tmp_path):
    for metric in (
        "eval_loss",
        "policy/entropy",
        "clip_ratio/low_mean",
        "completions/clipped_ratio",
        "tools/call_frequency",
    ):
        with pytest.raises(ValueError, match="which no evaluation gives; it gives score/mean"):
            make_trainer(tmp_path, eval_dataset=prompts(4), **BEST, eval_steps=1, metric_for_best_model=metric)


@pytest.mark.parametrize("metric", ["rewards/h/mean", "score/h"])
def test_a_best_metric_of_a_reward_function_that_there_is_none_of_is_named_before_the_model_loads(tmp_path, metric):
    with pytest.raises(ValueError, match="no reward function is named 'h'; there is even_share"):
        make_trainer(tmp_path, eval_dataset=prompts(4), **BEST, eval_steps=1, metric_for_best_model=metric)


def test_arguments_and_methods_of_trls_trainer_that_are_missing_here_say_what_to_use(tmp_path):
    config = support.make_config(tmp_path)
    with pytest.raises(TypeError, match="rollout_func: give environment_factory or tools for episodes, or rollout_b"):
        PPOTrainer(base_model(), even_share, config, prompts(), rollout_func=print)
    with pytest.raises(TypeError, match="unknown key 'evaldataset': did you mean 'eval_dataset'"):
        PPOTrainer(base_model(), even_share, config, prompts(), evaldataset=None)
    trainer = make_trainer(tmp_path, beta=0.3)
    assert (trainer.beta, trainer.ref_model, trainer.reward_funcs) == (0.3, None, [even_share])
    assert (trainer.reward_func_names, trainer.reward_processing_classes) == (["even_share"], [None])
    assert trainer.reward_weights.tolist() == [1.0]
    with pytest.raises(ValueError, match=r"has no predict; evaluate\(eval_dataset\) samples"):
        trainer.predict(prompts(2))
    with pytest.raises(RuntimeError, match=f"could not be pushed to {tmp_path.name}: HF_HUB_OFFLINE"):
        trainer.push_to_hub()
