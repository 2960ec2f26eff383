"""Steps that must leave the weights alone: after `target_kl`, without anything to train on, or not finite."""

import math

import pytest
import torch
from transformers import TrainerCallback

from onetrunk.checkpoints.folders import checkpoint_folders
from onetrunk.ppo.trainer import PPOTrainer
from tests.fakes import CannedBackend
from tests.ppo.support import Recorder, assert_same, differ, logged, make_trainer, trained_weights


def changed_steps(recorder, first):
    """Return the numbers of the steps after which the weights differ from those before."""
    series = [first, *recorder.weights]
    return [i + 1 for i in range(len(series) - 1) if differ(series[i + 1], series[i])]


def optimizer_steps(trainer):
    return {int(s["step"]) for s in trainer.optimizer.state_dict()["state"].values()}


def test_after_target_kl_the_rest_of_the_rollout_is_empty_and_the_count_stays(tmp_path):
    recorder = Recorder()
    settings = {"num_rollouts": 2, "num_ppo_epochs": 2, "num_minibatches": 2, "target_kl": 1e-9}
    trainer = make_trainer(tmp_path, callbacks=[recorder], lr_scheduler_type="constant", **settings)
    first = trained_weights(trainer.model)
    trainer.train()
    assert trainer.state.global_step == recorder.num_optimizer_steps == 8
    # The first step of a rollout has KL 0; the second sees the first one's update, and is thrown away itself.
    assert changed_steps(recorder, first) == [1, 5]
    assert optimizer_steps(trainer) == {2}
    assert logged(trainer, "policy/skipped_steps") == [1.0] * 6
    # The KL that exceeded the target is logged: 0, then too much, for either rollout.
    first_kl, too_much, *_ = logged(trainer, "kl/approx")
    assert first_kl == 0.0 and too_much > 1e-9
    assert len(logged(trainer, "score/mean")) == 2


class Diverging(PPOTrainer):
    """Has a loss or a gradient that is not finite at chosen steps."""

    bad_steps = ()
    spoils = "loss"

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs)
        if self.state.global_step + 1 not in self.bad_steps:
            return loss
        if self.spoils == "loss":
            return loss * math.nan
        loss.register_hook(lambda gradient: gradient * math.inf)
        return loss


class NanLoss(Diverging):
    bad_steps = (2, 3)


class InfiniteGradient(Diverging):
    bad_steps = (2, 3)
    spoils = "gradient"


@pytest.mark.parametrize("trainer_class", [NanLoss, InfiniteGradient])
def test_a_step_that_is_not_finite_leaves_weights_and_optimizer_alone(tmp_path, trainer_class):
    recorder = Recorder()
    # On the first pass the loss of the policy may be exactly 0.
    settings = {"num_rollouts": 5, "entropy_coef": 0.1}
    trainer = make_trainer(tmp_path, trainer_class=trainer_class, callbacks=[recorder], **settings)
    first = trained_weights(trainer.model)
    result = trainer.train()
    assert trainer.state.global_step == 5
    assert changed_steps(recorder, first) == [1, 4, 5]
    assert optimizer_steps(trainer) == {3}
    assert logged(trainer, "policy/skipped_steps") == [1.0, 1.0]
    losses = logged(trainer, "loss")
    assert 0.0 not in losses
    bad = {2, 3} if trainer_class is NanLoss else set()
    assert [step for step, loss in enumerate(losses, start=1) if not math.isfinite(loss)] == sorted(bad)
    assert math.isfinite(result.training_loss)
    assert all(torch.isfinite(w).all() for w in trained_weights(trainer.model).values())


def test_nothing_is_saved_after_a_step_that_is_not_finite(tmp_path):
    make_trainer(tmp_path, trainer_class=NanLoss, num_rollouts=5, save_strategy="steps", save_steps=1).train()
    saved = sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*"))
    assert saved == [1, 4, 5]


class AlwaysNan(Diverging):
    bad_steps = range(2, 100)


def test_several_steps_in_a_row_that_are_not_finite_stop_the_run(tmp_path):
    recorder = Recorder()
    settings = {"num_rollouts": 9, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(tmp_path, trainer_class=AlwaysNan, callbacks=[recorder], **settings)
    with pytest.raises(
        RuntimeError, match="not finite in 3 optimizer steps in a row .*resume from the last checkpoint"
    ):
        trainer.train()
    assert trainer.state.global_step == 3
    assert_same(trained_weights(trainer.model), recorder.weights[0])


def test_a_policy_that_has_diverged_is_named_at_the_next_rollout(tmp_path):
    trainer = make_trainer(tmp_path, rollout_backend=CannedBackend([[5, 6, 1]]))
    with torch.no_grad():
        trainer.model.value_head.linear.bias.fill_(math.nan)
    with pytest.raises(RuntimeError, match="logprobs or values of rollout 0 are not finite"):
        trainer.train()


def test_a_minibatch_without_a_token_to_train_on_does_not_move_the_weights_by_momentum(tmp_path):
    recorder = Recorder()
    # Every completion of the second rollout is cut off, and those are left out of the update.
    backend = CannedBackend([[5, 6, 1]])
    settings = {"truncated_completions": "mask", "max_completion_length": 3, "num_rollouts": 2, "weight_decay": 0.1}

    class ThenCut(CannedBackend):
        def generate(self, prompt_ids, params, keys):
            backend.completions = [[5, 6, 1]] if keys[0][1] == 0 else [[5, 6, 7]]
            return backend.generate(prompt_ids, params, keys)

    trainer = make_trainer(tmp_path, rollout_backend=ThenCut([]), callbacks=[recorder], **settings)
    first = trained_weights(trainer.model)
    trainer.train()
    assert changed_steps(recorder, first) == [1]
    assert optimizer_steps(trainer) == {1}


def test_advantages_that_overflow_are_an_error_that_names_them(tmp_path):
    def huge(completion_ids, **kwargs):
        return [3e38 if i % 2 else -3e38 for i in range(len(completion_ids))]

    trainer = make_trainer(tmp_path, reward=huge)
    before = trained_weights(trainer.model)
    with pytest.raises(RuntimeError, match="of rollout 0 are not finite, or too large for float32.* set score_clip"):
        trainer.train()
    assert_same(trained_weights(trainer.model), before)


def spoil_value_head(trainer):
    trainer.model.value_head.linear.bias.fill_(math.nan)


def spoil_scale_of_returns(trainer):
    trainer.model.value_head.moments[1] = math.inf


def spoil_optimizer_of_the_fit(trainer):
    next(iter(trainer._stream.value_fit.optimizer.state.values()))["exp_avg_sq"].fill_(math.inf)


def spoil_optimizer(trainer):
    next(iter(trainer.optimizer.state.values()))["exp_avg_sq"].fill_(math.inf)


def spoil_score_moments(trainer):
    trainer._stream.score_moments.m2 = math.nan


@pytest.mark.parametrize(
    ("spoil", "name", "advice"),
    [
        (spoil_value_head, "value head: linear.bias", "score_clip"),
        (spoil_scale_of_returns, "value head: moments", "score_clip"),
        (spoil_optimizer_of_the_fit, r"value head: 0\.exp_avg_sq", "score_clip"),
        (spoil_optimizer, "exp_avg_sq of base_model", "lower learning_rate"),
        (spoil_score_moments, "m2", "score_clip"),
    ],
)
@torch.no_grad()
def test_what_is_not_finite_is_not_saved_whoever_trained_it_and_the_run_resumes(tmp_path, spoil, name, advice):
    class Spoiling(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                spoil(trainer)

    settings = {"num_rollouts": 5, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    trainer = make_trainer(tmp_path, callbacks=[Spoiling()], **settings)
    with torch.enable_grad(), pytest.raises(RuntimeError, match=f"not finite after step 4, .*{name}.*{advice}"):
        trainer.train()
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["checkpoint-2", "checkpoint-3"]
    resumed = make_trainer(tmp_path, **settings)
    with torch.enable_grad():
        resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 5
