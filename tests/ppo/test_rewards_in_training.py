"""Reward functions inside a run: TRL's own, asynchronous ones, several, what they receive, rows they leave out."""

import math
from dataclasses import replace

import pytest
from datasets import Dataset

from onetrunk.ppo.trainer import PPOTrainer
from tests.ppo import support
from tests.ppo.support import Recorder, assert_same, differ, even_share, logged, prompts, trained
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

CONVERSATIONS = [[{"role": "user", "content": f"the {w}"}] for w in ("cat", "dog", "bird", "fish")]


def test_conversational_prompts_give_reward_functions_lists_of_messages_and_their_columns(tmp_path):
    calls = []

    def reward(prompts, completions, completion_ids, solution, **kwargs):
        calls.append((prompts, completions, completion_ids, solution))
        return [1.0] * len(prompts)

    dataset = Dataset.from_dict({"prompt": CONVERSATIONS, "solution": ["cat"] * 4})
    trained(tmp_path, reward=reward, dataset=dataset, tokenizer=tiny_tokenizer(chat_template=CHAT_TEMPLATE))
    prompts_seen, completions, completion_ids, solution = calls[0]
    assert sorted(p[0]["content"] for p in prompts_seen) == sorted(c[0]["content"] for c in CONVERSATIONS)
    tokenizer = tiny_tokenizer()
    for completion, ids in zip(completions, completion_ids, strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert completion == [{"role": "assistant", "content": text}]
    assert solution == ["cat"] * 4


def test_a_reward_function_sees_the_state_and_can_log(tmp_path):
    steps = []

    def reward(completion_ids, trainer_state, log_metric, log_extra, **kwargs):
        steps.append(trainer_state.global_step)
        log_metric("mine/steps", 10 + trainer_state.global_step)
        log_extra("length", [len(ids) for ids in completion_ids])
        return [1.0] * len(completion_ids)

    trainer = trained(tmp_path, reward=reward, num_rollouts=2, num_ppo_epochs=2, log_completions=True)
    assert steps == [0, 2]
    assert logged(trainer, "mine/steps") == [10.0, 12.0]
    assert '"length": 6' in (tmp_path / "completions" / "step-000001.jsonl").read_text()


def reward_without(mark, score):
    """Return a reward in which prompts that start with `mark` get `score`, the others the share of even ids."""

    def reward(prompts, completions, completion_ids, **kwargs):
        own = even_share(prompts, completions, completion_ids)
        return [score if p.startswith(mark) else s for p, s in zip(prompts, own, strict=True)]

    return reward


class WithoutTheRow(PPOTrainer):
    """Scores every row and takes one out of the loss by hand."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        def kept(e):
            return e.loss_mask & (e.pack.input_ids[:, :1] != tiny_tokenizer().convert_tokens_to_ids("the"))

        experience, minibatch = inputs["experience"], inputs["minibatch"]
        whole = sum(float(kept(e).sum()) for e in minibatch.experiences)
        own = {"experience": replace(experience, loss_mask=kept(experience))}
        return super().compute_loss(model, {**own, "minibatch": replace(minibatch, num_tokens=whole)})


@pytest.mark.parametrize("missing", [None, math.inf])
def test_a_row_without_a_score_is_left_out_of_the_update(tmp_path, missing):
    settings = {"dataset": prompts(4), "max_unscored_fraction": 0.25, "whiten_advantages": False}
    assert [t.startswith("the") for t in prompts(4)["prompt"]] == [False, True, False, False]
    unscored, by_hand = Recorder(), Recorder()
    reward = reward_without("the", missing)
    trainer = trained(tmp_path / "a", reward=reward, callbacks=[unscored], **settings)
    other = {"reward": reward_without("the", 7.0), "trainer_class": WithoutTheRow}
    trained(tmp_path / "b", callbacks=[by_hand], **other, **settings)
    assert_same(unscored.gradients[0], by_hand.gradients[0])
    assert logged(trainer, "reward/unscored_fraction") == [0.25]
    assert math.isfinite(logged(trainer, "score/mean")[0])
    everything = Recorder()
    trained(tmp_path / "c", reward=reward_without("the", 7.0), callbacks=[everything], **settings)
    assert differ(everything.gradients[0], unscored.gradients[0])


def test_too_many_rows_without_a_score_stop_the_run_with_the_names_of_the_functions(tmp_path):
    reward = reward_without("the", None)
    trainer = support.make_trainer(tmp_path, reward=reward, dataset=prompts(4))
    sentence = r"25% of the rows of rollout 0 .* max_unscored_fraction 10%.*\(reward\)"
    support.require_refusal(trainer, RuntimeError, sentence)
