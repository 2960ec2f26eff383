"""recipes/one_file/ppo.py: its numbers are those of PPOTrainer, and what it trains gets better."""

import math

import pytest
import torch
from peft import get_peft_model

from onetrunk.ops.advantages import gae
from tests.fakes import CannedBackend
from tests.ppo.support import base_model, even_share, logged, lora, make_trainer, trained_weights
from tests.stages.recipes import load_recipe_module
from tests.tiny import tiny_tokenizer

one_file = load_recipe_module("one_file", "ppo")


def test_a_rollout_moves_the_adapter_as_the_trainer_does(tmp_path):
    seen = {}

    def reward(prompts, completions, completion_ids, **kwargs):
        scores = even_share(prompts, completions, completion_ids)
        seen.update(prompts=prompts, completions=completion_ids, scores=scores)
        return scores

    epochs, rate = 4, 1e-3
    settings = {"num_ppo_epochs": epochs, "learning_rate": rate, "lam": 1.0, "rollout_batch_size": 8}
    trainer = make_trainer(tmp_path, reward=reward, rollout_backend=CannedBackend(), **settings)
    torch.manual_seed(0)
    with torch.no_grad():  # A policy that is no longer the reference.
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    start = trained_weights(trainer.model)
    trainer.train()

    policy = get_peft_model(base_model(), lora())
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name in start:
                parameter.copy_(start[name])
    ppo = one_file.Ppo(policy.eval(), total_steps=epochs, learning_rate=rate, beta=trainer.args.beta, epochs=epochs)
    prompts = tiny_tokenizer()(seen["prompts"])["input_ids"]
    told = ppo.update(*one_file.batch(prompts, seen["completions"], 0), torch.tensor(seen["scores"]))

    # As many steps of the value's fit as the trainer takes after 8 completions.
    steps = math.ceil(40 * min(8 / 128, sum(map(len, seen["completions"])) / 512))
    assert next(iter(ppo.head_optimizer.state.values()))["step"] == steps < 40
    moved = trained_weights(trainer.model)
    adapters = {name for name in moved if "lora" in name}
    assert adapters == set(trained_weights(policy)) and len(adapters) > 10
    for name in adapters:
        assert not torch.equal(moved[name], start[name])
        torch.testing.assert_close(trained_weights(policy)[name], moved[name], atol=2e-5, rtol=1e-3)
    assert told["score"] == pytest.approx(logged(trainer, "score/mean")[0])
    assert told["kl"] == pytest.approx(logged(trainer, "kl/ref")[0], abs=1e-5) and abs(told["kl"]) > 0.01
    assert max(logged(trainer, "policy/clip_fraction")) < 0.5


def test_its_gae_is_that_of_the_library():
    torch.manual_seed(0)
    rewards, values, mask = torch.randn(3, 7), torch.randn(3, 7), torch.rand(3, 7) < 0.7
    for given, expected in zip(
        one_file.gae(rewards, values, mask, 0.9, 0.8), gae(rewards, values, mask, 0.9, 0.8), strict=True
    ):
        torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-5)


def test_it_learns_to_write_less():
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    ppo = one_file.Ppo(get_peft_model(base_model(), lora()), total_steps=40 * 4, learning_rate=1e-2)
    said = one_file.train(ppo, tokenizer, ["cat dog", "river wind"], one_file.brief, 40, 32, 12)
    scores = [entry["score"] for entry in said]
    assert said[0]["kl"] == 0.0 and said[0]["explained"] <= 0.0
    assert sum(scores[-5:]) / 5 > sum(scores[:5]) / 5 + 0.1
