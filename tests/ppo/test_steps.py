"""An optimizer step: its gradient does not depend on how it is cut, its count is exact, and only branches move."""

import pytest
import torch
from transformers import TrainerCallback

from tests.fakes import CannedBackend
from tests.ppo import support
from tests.ppo.support import Recorder, assert_same, base_model, logged, prompts, trained, trained_weights

CUTS = (
    {"per_device_train_batch_size": 1},
    {"per_device_train_batch_size": 2},
    {"per_device_train_batch_size": 3},
    {"per_device_train_batch_size": 4},
    {"per_device_train_batch_size": 8, "microbatch_tokens": 23},
    {"per_device_train_batch_size": 3, "microbatch_tokens": 1000},
)


def one_run(folder, **cut):
    recorder = Recorder()
    # Without momentum and normalisation weights are linear in the gradient: no sign of a rounding error decides.
    settings = {"rollout_batch_size": 8, "num_ppo_epochs": 2, "optim": "sgd", "learning_rate": 0.3}
    trained(folder, callbacks=[recorder], **{**settings, "max_grad_norm": 0.0, **cut})
    return recorder


@pytest.mark.parametrize("num_minibatches", [2])
def test_how_a_minibatch_is_cut_into_forwards_changes_neither_gradient_nor_weights(tmp_path, num_minibatches):
    whole = one_run(tmp_path / "whole", per_device_train_batch_size=8, num_minibatches=num_minibatches)
    assert max(g.abs().max() for g in whole.gradients[0].values()) > 1e-2
    for number, cut in enumerate(CUTS):
        other = one_run(tmp_path / str(number), num_minibatches=num_minibatches, **cut)
        for step in range(2 * num_minibatches):
            # float32: other padding and another order of the sums; the largest gradient is about 1.
            assert_same(other.gradients[step], whole.gradients[step], atol=2e-6, rtol=1e-4)
            assert_same(other.weights[step], whole.weights[step], atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("num_prompts", "settings", "rollouts"),
    [(5, {"num_train_epochs": 2}, 4), (3, {"num_train_epochs": 1}, 1), (9, {"num_rollouts": 2}, 2)],
)
def test_optimizer_steps_are_rollouts_times_epochs_times_minibatches(tmp_path, num_prompts, settings, rollouts):
    recorder = Recorder()
    shape = {"num_ppo_epochs": 2, "num_minibatches": 2, "per_device_train_batch_size": 1}
    trainer = trained(tmp_path, dataset=prompts(num_prompts), callbacks=[recorder], **shape, **settings)
    steps = rollouts * 2 * 2
    assert trainer.state.global_step == trainer.state.max_steps == recorder.num_optimizer_steps == steps
    assert len(logged(trainer, "score/mean")) == rollouts
    # The linear schedule ends at 0 after the last step, and the last step ran at 1 / steps of the peak.
    assert logged(trainer, "learning_rate") == pytest.approx([1e-2 * (1 - i / steps) for i in range(steps)])
    assert trainer.lr_scheduler.get_last_lr() == [0.0] * len(trainer.optimizer.param_groups)
    assert trainer.state.epoch == pytest.approx(rollouts / -(-num_prompts // 4))


def dealt(folder, **settings):
    """Return the rows (as lists of token ids) of every optimizer step of a pass over 16 prompts."""
    shape = {"rollout_batch_size": 8, "num_ppo_epochs": 6, "num_minibatches": 4, "dataset": prompts(16)}
    stream = support.make_trainer(folder, **{**shape, **settings}).get_train_dataloader()
    return [
        [str(row.tolist()) for e in item["minibatch"].experiences for row in e.pack.completion_ids] for item in stream
    ]


def test_which_rows_share_a_minibatch_depends_on_seed_and_rollout_and_not_on_lengths_or_packs(tmp_path):
    # Every completion is as long as its number in the rollout, so that a length names a row.
    backend = CannedBackend([[5] * length for length in range(1, 9)])

    def lengths(folder, **settings):
        settings = {"rollout_backend": backend, "num_ppo_epochs": 1, "max_completion_length": 8, **settings}
        return [sorted(row.count("5") for row in rows) for rows in dealt(tmp_path / folder, **settings)]

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
    trainer = support.make_trainer(tmp_path, callbacks=[recorder], num_ppo_epochs=3)
    before = trained_weights(trainer.model)
    trainer.train()
    for gradients in recorder.gradients:
        assert gradients and all("lora_" in n and ".default." in n for n in gradients)
    assert support.differ(trained_weights(trainer.model), before) == set(before)
    kept = {
        n.removeprefix("base_model.model.").replace(".base_layer", ""): p
        for n, p in trainer.model.state_dict().items()
        if "lora_" not in n and "value_head" not in n
    }
    assert_same(kept, original)


class LayerCalls(TrainerCallback):
    """Counts how often the inside of the first decoder layer begins to run in training mode."""

    def __init__(self):
        self.count = 0

    def on_train_begin(self, args, state, control, model, **kwargs):
        inside = model.get_base_model().model.layers[0].input_layernorm
        inside.register_forward_pre_hook(lambda module, inputs: self._seen(module))

    def _seen(self, module):
        self.count += module.training


def test_activation_checkpointing_recomputes_and_changes_nothing(tmp_path):
    runs = {}
    for on in (False, True):
        calls = LayerCalls()
        settings = {"num_ppo_epochs": 3, "activation_checkpointing": on}
        trainer = trained(tmp_path / str(on), callbacks=[calls], **settings)
        runs[on] = (trained_weights(trainer.model), support.without_wall_clock(trainer.state.log_history), calls.count)
    assert runs[True][2] == 2 * runs[False][2] > 0
    assert_same(runs[True][0], runs[False][0])
    assert runs[True][1] == runs[False][1]
