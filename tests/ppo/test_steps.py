"""An optimizer step: its gradient does not depend on how it is cut, its count is exact, and only branches move."""

import pytest
import torch

from onetrunk.ppo.config import planned_steps
from tests.fakes import CannedBackend
from tests.ppo import support
from tests.ppo.support import (
    Recorder,
    assert_same,
    base_model,
    logged,
    make_config,
    prompts,
    trained,
    trained_weights,
)  # fmt: skip

CUTS = (
    {"per_device_train_batch_size": 1},
    {"per_device_train_batch_size": 3},
    {"per_device_train_batch_size": 8, "microbatch_tokens": 23},
    {"per_device_train_batch_size": 3, "microbatch_tokens": 1000},
)


def one_run(folder, **cut):
    recorder = Recorder()
    # Without momentum and normalisation weights are linear in the gradient: no sign of a rounding error decides.
    settings = {"rollout_batch_size": 8, "num_ppo_epochs": 2, "num_minibatches": 2}
    settings |= {"optim": "sgd", "learning_rate": 0.3, "max_grad_norm": 0.0}
    trained(folder, callbacks=[recorder], **settings, **cut)
    return recorder


def test_how_a_minibatch_is_cut_into_forwards_changes_neither_gradient_nor_weights(tmp_path):
    whole = one_run(tmp_path / "whole", per_device_train_batch_size=8)
    assert max(g.abs().max() for g in whole.gradients[0].values()) > 1e-2
    for number, cut in enumerate(CUTS):
        other = one_run(tmp_path / str(number), **cut)
        for step in range(4):
            # float32: other padding and another order of the sums; the largest gradient is about 1.
            assert_same(other.gradients[step], whole.gradients[step], atol=2e-6, rtol=1e-4)
            assert_same(other.weights[step], whole.weights[step], atol=2e-6, rtol=1e-4)


def test_a_share_of_a_pass_is_rounded_as_trainer_rounds_it(tmp_path):
    # In floats 0.2 * 6 * 5 is above 6 and 0.2 * 30 is not; 1.1 * 10 * 5 is 55, and 1.1 * 50 is above it.
    shape = {"rollout_batch_size": 4, "num_ppo_epochs": 5, "num_minibatches": 1}
    trainer = trained(tmp_path, dataset=prompts(24), num_train_epochs=0.2, **shape)
    assert trainer.state.global_step == trainer.state.max_steps == trainer.planned_steps() == 6
    assert planned_steps(make_config(tmp_path, num_train_epochs=1.1, **shape), 40) == 56


@pytest.mark.parametrize(
    ("num_prompts", "settings", "rollouts"),
    [(5, {"num_train_epochs": 2}, 4), (3, {"num_train_epochs": 1}, 1), (9, {"num_rollouts": 2}, 2)],
)
def test_optimizer_steps_are_rollouts_times_epochs_times_minibatches(tmp_path, num_prompts, settings, rollouts):
    recorder = Recorder()
    shape = {"num_ppo_epochs": 2, "num_minibatches": 2, "per_device_train_batch_size": 1}
    trainer = trained(tmp_path, dataset=prompts(num_prompts), callbacks=[recorder], **shape, **settings)
    steps = rollouts * 2 * 2
    assert trainer.state.global_step == trainer.state.max_steps == len(recorder.gradients) == steps
    assert len(logged(trainer, "score/mean")) == rollouts
    # The linear schedule ends at 0 after the last step, and the last step ran at 1 / steps of the peak.
    assert logged(trainer, "learning_rate") == pytest.approx([1e-2 * (1 - i / steps) for i in range(steps)])
    assert trainer.lr_scheduler.get_last_lr() == [0.0] * len(trainer.optimizer.param_groups)
    assert trainer.state.epoch == pytest.approx(rollouts / -(-num_prompts // 4))


def test_which_rows_share_a_minibatch_depends_on_seed_and_rollout_and_not_on_lengths_or_packs(tmp_path):
    # Every completion is as long as its number in the rollout, so that a length names a row.
    backend = CannedBackend([[5] * length for length in range(1, 9)])

    def lengths(folder, **settings):
        shape = {"rollout_batch_size": 8, "num_minibatches": 4, "max_completion_length": 8, "dataset": prompts(16)}
        trainer = support.make_trainer(tmp_path / folder, rollout_backend=backend, **shape, **settings)
        steps = [item["minibatch"].experiences for item in trainer.get_train_dataloader()]
        return [sorted(n for e in step for n in e.pack.completion_mask.sum(1).tolist()) for step in steps]

    one = lengths("one", per_device_train_batch_size=1)
    assert sorted(sum(one[:4], [])) == sorted(sum(one[4:], [])) == list(range(1, 9))
    assert lengths("two", per_device_train_batch_size=2) == one
    assert sorted(one[:4]) != sorted(one[4:])
    assert sorted(lengths("other", seed=9)[:4]) != sorted(one[:4])
    by_length = [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert sorted(one[:4]) != by_length != sorted(one[4:])


def test_the_gradient_is_clipped_per_optimizer_step(tmp_path):
    recorder = Recorder()
    settings = {"num_ppo_epochs": 2, "per_device_train_batch_size": 1, "max_grad_norm": 0.01}
    trainer = trained(tmp_path, callbacks=[recorder], **settings)
    assert min(logged(trainer, "grad_norm")) > 0.1  # before clipping
    for gradients in recorder.gradients:
        norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
        assert norm == pytest.approx(0.01, rel=1e-3)


def test_only_the_policys_adapter_has_gradients_and_moves(tmp_path):
    recorder = Recorder()
    original = base_model().state_dict()
    trainer = trained(tmp_path, callbacks=[recorder], num_ppo_epochs=3)
    for gradients in recorder.gradients:
        assert gradients and all("lora_" in n and ".default." in n for n in gradients)
    assert support.differ(trained_weights(trainer.model), recorder.first) == set(recorder.first)
    kept = {
        n.removeprefix("base_model.model.").replace(".base_layer", ""): p
        for n, p in trainer.model.state_dict().items()
        if "lora_" not in n and "value_head" not in n
    }
    assert_same(kept, original)


def test_activation_checkpointing_recomputes_and_changes_nothing(tmp_path):
    runs, calls = [], {False: 0, True: 0}
    for on in calls:
        settings = {"num_ppo_epochs": 3, "activation_checkpointing": on, "check_memory": False}
        trainer = support.make_trainer(tmp_path / str(on), **settings)
        inside = trainer.model.get_base_model().model.layers[0].input_layernorm

        def count(module, inputs, on=on):
            calls[on] += torch.is_grad_enabled()

        inside.register_forward_pre_hook(count)
        trainer.train()
        runs.append(trainer)
    assert calls[True] == 2 * calls[False] > 0
    assert_same(*(trained_weights(run.model) for run in runs))
    histories = [support.without_wall_clock(run.state.log_history) for run in runs]
    assert histories[0] == histories[1]
