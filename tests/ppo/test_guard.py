"""Steps that must leave the weights alone: after `target_kl`, without anything to train on, or not finite."""

import math

import pytest
import torch
from transformers import TrainerCallback

from onetrunk.checkpoints.folders import checkpoint_folders
from onetrunk.ppo.trainer import PPOTrainer
from tests.fakes import CannedBackend
from tests.ppo import support
from tests.ppo.support import Recorder, assert_same, differ, logged, make_trainer, trained, trained_weights
from tests.ppo.test_alarms import Turning


def changed_steps(recorder):
    """Return the numbers of the steps after which the weights differ from those before."""
    series = [recorder.first, *recorder.weights]
    return [i + 1 for i in range(len(series) - 1) if differ(series[i + 1], series[i])]


def optimizer_steps(trainer):
    return {int(s["step"]) for s in trainer.optimizer.state_dict()["state"].values()}


def test_after_target_kl_the_rest_of_the_rollout_is_empty_and_the_count_stays(tmp_path):
    recorder = Recorder()
    settings = {"num_rollouts": 2, "num_ppo_epochs": 2, "num_minibatches": 2, "target_kl": 1e-9}
    trainer = trained(tmp_path, callbacks=[recorder], lr_scheduler_type="constant", **settings)
    assert trainer.state.global_step == len(recorder.gradients) == 8
    # The first step of a rollout has KL 0; the second sees the first one's update, and is thrown away itself.
    assert changed_steps(recorder) == [1, 5]
    assert optimizer_steps(trainer) == {2}
    assert logged(trainer, "policy/skipped_steps") == [1.0] * 6
    # The KL that exceeded the target is logged: 0, then too much, for either rollout.
    first_kl, too_much, *_ = logged(trainer, "kl/approx")
    assert first_kl == 0.0 and too_much > 1e-9
    assert len(logged(trainer, "score/mean")) == 2


class Diverging(PPOTrainer):
    """Has a loss or a gradient that is not finite at chosen steps."""

    bad_steps = (2, 3)
    spoils = "loss"

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs)
        if self.state.global_step + 1 not in self.bad_steps:
            return loss
        if self.spoils == "loss":
            return loss * math.nan
        loss.register_hook(lambda gradient: gradient * math.inf)
        return loss


class InfiniteGradient(Diverging):
    spoils = "gradient"


@pytest.mark.parametrize("trainer_class", [Diverging, InfiniteGradient])
def test_a_step_that_is_not_finite_leaves_weights_and_optimizer_alone_and_nothing_is_saved_after_it(
    tmp_path, trainer_class
):
    recorder = Recorder()
    # On the first pass the loss of the policy may be exactly 0.
    settings = {"num_rollouts": 5, "entropy_coef": 0.1, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(tmp_path, trainer_class=trainer_class, callbacks=[recorder], **settings)
    result = trainer.train()
    assert trainer.state.global_step == 5
    assert changed_steps(recorder) == [1, 4, 5]
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (1, 4, 5)}
    assert optimizer_steps(trainer) == {3}
    assert logged(trainer, "policy/skipped_steps") == [1.0, 1.0]
    losses = logged(trainer, "loss")
    assert 0.0 not in losses
    bad = [2, 3] if trainer_class is Diverging else []
    assert [step for step, loss in enumerate(losses, start=1) if not math.isfinite(loss)] == bad
    assert math.isfinite(result.training_loss)
    assert all(torch.isfinite(w).all() for w in trained_weights(trainer.model).values())


def test_several_steps_in_a_row_that_are_not_finite_stop_the_run(tmp_path, monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(Diverging, "bad_steps", range(2, 100))
    settings = {"num_rollouts": 9, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(tmp_path, trainer_class=Diverging, callbacks=[recorder], **settings)
    with pytest.raises(RuntimeError, match="not finite in 3 optimizer steps in a row .*from the last checkpoint"):
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
    backend = Turning([5, 6, 1], [5, 6, 7], at=1)
    settings = {"truncated_completions": "mask", "max_completion_length": 3, "num_rollouts": 2, "weight_decay": 0.1}
    trainer = trained(tmp_path, rollout_backend=backend, callbacks=[recorder], **settings)
    assert changed_steps(recorder) == [1]
    assert optimizer_steps(trainer) == {1}


def test_advantages_that_overflow_are_an_error_that_names_them(tmp_path):
    def huge(completion_ids, **kwargs):
        return [3e38 if i % 2 else -3e38 for i in range(len(completion_ids))]

    sentence = "of rollout 0 are not finite, or too large for float32.* set score_clip"
    support.require_refusal(make_trainer(tmp_path, reward=huge), RuntimeError, sentence)


def squares(optimizer):
    return next(iter(optimizer.state.values()))["exp_avg_sq"]


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda t: t.model.value_head.linear.bias.fill_(math.nan), "value head: linear.bias.*score_clip"),
        (lambda t: t.model.value_head.moments[1].fill_(math.inf), "value head: moments.*score_clip"),
        (lambda t: squares(t._stream.value_fit.optimizer).fill_(math.inf), r"value head: 0\.exp_avg_sq.*score_clip"),
        (lambda t: squares(t.optimizer).fill_(math.inf), "exp_avg_sq of base_model.*lower learning_rate"),
        (lambda t: setattr(t._stream.score_moments, "m2", math.nan), "m2.*score_clip"),
    ],
)
def test_what_is_not_finite_is_not_saved_whoever_trained_it_and_the_run_resumes(tmp_path, spoil, sentence):
    class Spoiling(TrainerCallback):
        @torch.no_grad()
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                spoil(trainer)

    settings = {"num_rollouts": 5, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    trainer = make_trainer(tmp_path, callbacks=[Spoiling()], **settings)
    with pytest.raises(RuntimeError, match=f"not finite after step 4, .*{sentence}"):
        trainer.train()
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["checkpoint-2", "checkpoint-3"]
    resumed = make_trainer(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 5
