"""What arguments of TRL's GRPOTrainer mean here: rows of any kind, names of metrics, attributes."""

import dataclasses

import pytest
from datasets import DatasetDict, IterableDataset

from onetrunk import PPOTrainer
from tests.ppo import support
from tests.ppo.support import BEST, even_share, make_trainer, prompts, trained, trained_weights


def test_a_copy_of_the_settings_decides_again_what_other_settings_decide():
    config = support.make_config("out", num_rollouts=2, num_ppo_epochs=3, max_tool_calling_iterations=1)
    changed = {"num_rollouts": 4, "max_tool_calling_iterations": 2, "use_vllm": True, "schedule": "one_step"}
    copy = dataclasses.replace(config, **changed)
    assert (copy.max_steps, copy.max_turns, copy.max_staleness) == (12, 3, 1)
    with pytest.raises(ValueError, match="num_rollouts 4 makes 12 optimizer steps, but max_steps is 5"):
        dataclasses.replace(config, num_rollouts=4, max_steps=5)


def test_lists_a_single_split_and_iterable_rows_train_and_evaluate_as_a_dataset_does(tmp_path):
    expected = trained(tmp_path / "plain", num_rollouts=2)
    metrics = support.without_wall_clock([expected.evaluate(prompts(4))])
    rows = prompts()
    kinds = [rows.to_list(), DatasetDict(train=rows), rows.to_iterable_dataset()]
    kinds.append(IterableDataset.from_generator(lambda: iter(rows.to_list())))
    for number, given in enumerate(kinds):
        trainer = trained(tmp_path / str(number), num_rollouts=2, dataset=given)
        support.assert_same(trained_weights(trainer.model), trained_weights(expected.model))
    for rows in (prompts(4).to_list(), prompts(4).to_iterable_dataset()):
        assert support.without_wall_clock([expected.evaluate(rows)]) == metrics


def test_rows_in_a_list_keep_the_columns_that_only_some_of_them_have(tmp_path):
    seen = []

    def wants_answer(completions, answer, **kwargs):
        seen.extend(answer)
        return [0.0] * len(completions)

    rows = [{"prompt": "the cat"}, {"prompt": "a dog", "answer": "4"}]
    trained(tmp_path, dataset=rows, reward=wants_answer, rollout_batch_size=2, num_rollouts=1)
    assert sorted(seen, key=str) == ["4", None]


@pytest.mark.parametrize(
    ("theirs", "ours"), [("reward", "score/mean"), ("rewards/even_share/mean", "score/even_share"), ("kl", "kl/ref")]
)
def test_the_metric_of_the_best_model_may_have_trls_name(tmp_path, theirs, ours):
    trainer = make_trainer(tmp_path, eval_dataset=prompts(4), metric_for_best_model=f"eval_{theirs}", **BEST)
    assert trainer.args.metric_for_best_model == ours
    named = {"eval_dataset": {"held": prompts(4)}, "metric_for_best_model": f"held_{theirs}"}
    assert make_trainer(tmp_path, **named, **BEST).args.metric_for_best_model == f"held_{ours}"


def test_arguments_and_methods_of_trls_trainer_that_are_missing_here_say_what_to_use(tmp_path):
    config = support.make_config(tmp_path)
    with pytest.raises(TypeError, match="rollout_func: give environment_factory or tools for episodes, or rollout_b"):
        PPOTrainer(support.base_model(), even_share, config, prompts(), rollout_func=print)
    with pytest.raises(TypeError, match="unknown key 'evaldataset': did you mean 'eval_dataset'"):
        PPOTrainer(support.base_model(), even_share, config, prompts(), evaldataset=None)
    trainer = make_trainer(tmp_path, beta=0.3)
    assert (trainer.beta, trainer.ref_model, trainer.reward_funcs) == (0.3, None, [even_share])
    assert (trainer.reward_func_names, trainer.reward_processing_classes) == (["even_share"], [None])
    assert trainer.reward_weights.tolist() == [1.0]
    with pytest.raises(ValueError, match=r"has no predict; evaluate\(eval_dataset\) samples"):
        trainer.predict(prompts(2))
    with pytest.raises(RuntimeError, match=f"could not be pushed to {tmp_path.name}: HF_HUB_OFFLINE"):
        trainer.push_to_hub()
