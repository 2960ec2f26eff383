"""recipes/extend, used from outside the package: what each part does by hand, in a training, and all in one run."""

import json
import sys

import pytest
import torch

from onetrunk import cli
from onetrunk.judges.judge import Pair
from onetrunk.judges.labels import judge_pairs
from onetrunk.rewards.combine import resolve_reward
from onetrunk.rollouts.base import RolloutBackend, SamplingParams
from tests.ppo.support import logged, make_trainer
from tests.stages.recipes import ROOT, load_recipe_module

FOLDER = ROOT / "recipes" / "extend"
PARTS = ("reward", "backend", "advantage", "judge")
modules = {name: load_recipe_module("extend", name) for name in PARTS}


def test_the_reward_counts_what_the_row_asks_for():
    reward = resolve_reward(f"{FOLDER}/reward.py:names_the_task")
    columns = {"action": ["find", "move"], "thing": ["lamp", "cup"], "place": ["attic", "hall"]}
    texts = ["I will find the lamp in the hall.", [{"role": "assistant", "content": "Move the cup to the Hall."}]]
    assert reward(prompts=None, completions=texts, **columns) == pytest.approx([2 / 3, 1])
    assert reward(prompts=None, completions=texts) == [None, None]


def test_the_backend_samples_the_policy_and_each_completion_depends_on_its_key(tmp_path):
    backend = modules["backend"].TransformersBackend()
    assert isinstance(backend, RolloutBackend)
    trainer = make_trainer(tmp_path, rollout_backend=backend, num_rollouts=2, num_ppo_epochs=2, temperature=0.7)
    trainer.train()
    assert max(logged(trainer, "sampling/logprob_gap_max")) < 1e-4
    assert logged(trainer, "policy/ratio_max")[0] == 1 and logged(trainer, "kl/ref")[0] == 0
    params = SamplingParams(6, temperature=0.7, stop_token_ids=(1,))
    backend.sync(trainer.model, 0)
    keys = [(3, 0, i) for i in range(6)]
    together = backend.generate([[5, 6]] * 6, params, keys)
    alone = backend.generate([[5, 6]], params, keys[4:5])
    assert alone.completion_ids == together.completion_ids[4:5]
    assert torch.equal(alone.sampler_logprobs[0], together.sampler_logprobs[4])
    assert len({tuple(ids) for ids in together.completion_ids}) > 1
    assert together.stopped == [ids[-1] == 1 for ids in together.completion_ids]


def test_the_advantage_is_the_score_less_the_mean_of_the_prompts_other_completions(tmp_path):
    settings = {"num_generations": 2, "beta": 0.0, "whiten_advantages": False, "rollout_batch_size": 4}
    trainer_class = modules["advantage"].LeaveOneOutTrainer
    stream = make_trainer(tmp_path, trainer_class=trainer_class, **settings).get_train_dataloader()
    experiences = stream.make_rollout()
    scored = stream.last_scored
    scores: dict[int, list[float]] = {}
    for key, score in zip(scored.batch.keys, scored.scores.total.tolist(), strict=True):
        scores.setdefault(key[2] // 2, []).append(score)
    # Of two scores a and b: a - b and b - a.
    expected = sorted(s for a, b in scores.values() for s in (a - b, b - a))
    first = torch.cat([e.advantages[:, 0] for e in experiences])
    assert sorted(first.tolist()) == pytest.approx(expected, abs=1e-6)
    assert max(expected) > 0
    for e in experiences:
        assert torch.equal(e.advantages, e.advantages[:, :1] * e.pack.completion_mask)


def test_the_judge_compares_in_both_orders_and_is_a_reward():
    on_topic = resolve_reward(f"{FOLDER}/judge.py:on_topic")
    prompt = "Find the green lamp in the attic."  # find, green, lamp, attic
    good, poor = "The green lamp is in the attic.", "The lamp broke."
    assert on_topic(prompts=[prompt] * 2, completions=[good, poor]) == pytest.approx([3 / 4, 1 / 4])
    (label,) = judge_pairs(on_topic.judge, [Pair(prompt, good, poor)], on_topic.constitution)
    # 1 / (1 + exp(-5 / 2)), the same from both orders.
    assert label.probability == pytest.approx(0.924142, abs=1e-6) and label.consistent


@pytest.mark.slow
def test_the_four_parts_run_together_and_three_of_them_from_yaml(workplace, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    load_recipe_module("tiny", "make_data").make_all(num_sft_rows=50)
    (workplace / "runs/tiny/sft").symlink_to("base")
    trainer = load_recipe_module("extend", "train").main(num_rollouts=1)
    assert trainer.state.global_step == 4 and (workplace / "runs/extend/train/adapter_model.safetensors").is_file()
    assert len(logged(trainer, "score/names_the_task")) == 1
    few = "--num_rollouts 1 --rollout_batch_size 8 --max_completion_length 6 --num_minibatches 1 --eval_strategy no"
    sampler = ["--rollout_backend", "recipes/extend/backend.py:TransformersBackend"]
    assert cli.main(["ppo", "--config", "recipes/extend/ppo.yaml", *few.split(), *sampler]) == 0
    metrics = json.loads((workplace / "runs/extend/ppo/metrics.json").read_text())
    assert {"score/names_the_task", "score/judge"} <= set(metrics["policy"]) and metrics["steps"] == 2
