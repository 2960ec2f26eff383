"""The value: pretraining, a learning rate of its own, and the optimizers that train it."""

import pytest
import torch

from tests.ppo.support import Recorder, differ, logged, make_trainer, trained_weights

HEADS = ("shared", "detached", "adapter")


def is_policy(name):
    return "lora_" in name and ".default." in name


@pytest.mark.parametrize("value_head", HEADS)
def test_value_pretraining_moves_the_value_and_not_the_policy(tmp_path, value_head):
    recorder = Recorder()
    settings = {"num_rollouts": 2, "num_ppo_epochs": 3, "value_pretraining_rollouts": 1, "weight_decay": 0.1}
    trainer = make_trainer(tmp_path, value_head=value_head, callbacks=[recorder], **settings)
    first = trained_weights(trainer.model)
    trainer.train()
    pretrained, last = recorder.weights[2], recorder.weights[-1]
    assert differ(pretrained, first) == {n for n in first if not is_policy(n)}
    assert {n for n in differ(last, pretrained) if is_policy(n)} == {n for n in first if is_policy(n)}
    assert all(not is_policy(n) for gradients in recorder.gradients[:3] for n in gradients)
    assert trainer.state.global_step == 6
    # What is measured of the policy is measured once it trains.
    assert len(logged(trainer, "policy/loss")) == 3
    value_losses = logged(trainer, "value/loss")
    assert len(value_losses) == 6 and value_losses[2] < value_losses[0]


@pytest.mark.parametrize("value_head", HEADS)
def test_value_learning_rate_is_that_of_head_and_value_adapter_alone(tmp_path, value_head):
    recorder = Recorder()
    rates = {"learning_rate": 1e-3, "value_learning_rate": 5e-2, "lr_scheduler_type": "constant"}
    trainer = make_trainer(tmp_path, value_head=value_head, callbacks=[recorder], optim="sgd", **rates)
    first = trained_weights(trainer.model)
    trainer.train()
    for name, before in first.items():
        rate = 1e-3 if is_policy(name) else 5e-2
        # SGD: the step is rate * gradient; float32 rounding of the weight.
        expected = before - rate * recorder.gradients[0][name]
        torch.testing.assert_close(recorder.weights[0][name], expected, atol=1e-7, rtol=0)
    groups = trainer.optimizer.param_groups
    assert {g["lr"] for g in groups} == {1e-3, 5e-2}
    assert sum(len(g["params"]) for g in groups) == len(first)
