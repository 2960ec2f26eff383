"""What only a GPU can show: half precision under autocast, and the gradient scaler of fp16."""

import math

import pytest
import torch

from onetrunk.ppo.trainer import PPOTrainer
from tests.ppo.support import differ, make_trainer, trained_weights

pytestmark = pytest.mark.gpu
ON_GPU = {"use_cpu": False, "num_rollouts": 3, "num_ppo_epochs": 2, "num_minibatches": 2}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_in_half_precision_starts_at_ratio_one_and_changes_the_weights(precision, tmp_path):
    trainer = make_trainer(tmp_path, **ON_GPU, **{precision: True})
    before = trained_weights(trainer.model)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "policy/ratio_max" in entry]
    assert steps[0]["policy/ratio_max"] == 1.0 and steps[0]["kl/approx"] == 0.0
    assert all(math.isfinite(entry["loss"]) for entry in steps)
    assert differ(trained_weights(trainer.model), before)


class NeverFinite(PPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs) * math.nan


def test_gradients_that_are_never_finite_stop_a_run_in_fp16(tmp_path):
    trainer = make_trainer(tmp_path, trainer_class=NeverFinite, **{**ON_GPU, "num_rollouts": 30}, fp16=True)
    with pytest.raises(RuntimeError, match="the gradient was not finite in 50 optimizer steps in a row"):
        trainer.train()


def test_the_gradient_scaler_skips_an_overflow_and_the_run_goes_on(tmp_path):
    trainer = make_trainer(tmp_path, **ON_GPU, fp16=True)
    # The first scale is far above what fp16 gradients hold: the scaler itself has to find the right one.
    trainer.accelerator.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
    trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps
    assert trainer.accelerator.scaler.get_scale() < 2.0**40
