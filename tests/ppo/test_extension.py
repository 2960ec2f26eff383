"""What a user may replace from outside: the backend, the objective, the advantages, the prompts, callbacks."""

import inspect
import textwrap
from dataclasses import replace

import pytest
import torch
from transformers import TrainerCallback

from onetrunk.ppo.experience import ExperienceStream
from onetrunk.ppo.trainer import PPOTrainer
from onetrunk.rollouts.base import RolloutBackend
from onetrunk.types import Rollout
from tests.fakes import CannedBackend
from tests.ppo.support import (
    Recorder,
    differ,
    even_share,
    logged,
    make_trainer,
    trained,
    trained_weights,
)


def test_a_backend_of_ones_own_is_synced_before_every_rollout_and_its_tokens_are_trained_on(tmp_path):
    backend = CannedBackend([[5, 6, 1], [7, 8, 9, 1]])
    assert isinstance(backend, RolloutBackend)
    trainer = trained(tmp_path, rollout_backend=backend, num_rollouts=3, num_ppo_epochs=2)
    assert backend.synced == [0, 2, 4]
    assert logged(trainer, "completion/length") == [3.5] * 3
    assert logged(trainer, "completion/stopped_fraction") == [1.0] * 3


def test_a_policy_learns_from_the_completions_of_another_sampler(tmp_path):
    def prefers(completion_ids, **kwargs):
        return [1.0 if ids[0] == 5 else 0.0 for ids in completion_ids]

    backend = CannedBackend([[5, 1], [6, 1]])
    trainer = make_trainer(tmp_path, rollout_backend=backend, reward=prefers, num_rollouts=10, beta=0.0)
    prompt = torch.tensor([trainer.train_dataset[0]["prompt_ids"]])

    def odds():
        with torch.no_grad():
            logits = trainer.model(input_ids=prompt).logits[0, -1]
        return (logits[5] - logits[6]).item()

    before = odds()
    trainer.train()
    assert odds() > before + 1


class Empty(CannedBackend):
    def generate(self, prompt_ids, params, keys):
        rows = super().generate(prompt_ids, params, keys)
        return Rollout(rows.prompt_ids, [[], *rows.completion_ids[1:]], rows.sampler_logprobs, rows.stopped)


class TooFew(CannedBackend):
    def generate(self, prompt_ids, params, keys):
        return super().generate(prompt_ids[1:], params, keys[1:])


@pytest.mark.parametrize("backend", [Empty, TooFew])
def test_a_backend_that_breaks_its_contract_is_named(tmp_path, backend):
    trainer = make_trainer(tmp_path, rollout_backend=backend([[5, 1]]))
    with pytest.raises(RuntimeError, match=f"{backend.__name__}.generate returned . completions for 4 prompts"):
        trainer.train()


class TooFewLogprobs(CannedBackend):
    def generate(self, prompt_ids, params, keys):
        rows = super().generate(prompt_ids, params, keys)
        return replace(rows, sampler_logprobs=[logprobs[:-1] for logprobs in rows.sampler_logprobs])


def test_a_backend_that_leaves_out_logprobs_is_named(tmp_path):
    trainer = make_trainer(tmp_path, rollout_backend=TooFewLogprobs([[5, 1]]))
    with pytest.raises(RuntimeError, match="TooFewLogprobs.generate returned sampler_logprobs of other lengths"):
        trainer.train()


class Imitation(PPOTrainer):
    """Raises the logprob of every sampled token: another objective on the same rollouts."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        experience, minibatch = inputs["experience"], inputs["minibatch"]
        output = model(pack=experience.pack, roles=("policy",), temperature=self.args.temperature)
        return -(output.logprobs * experience.loss_mask).sum() / minibatch.num_tokens


def test_the_objective_can_be_replaced(tmp_path):
    recorder = Recorder()
    trainer = make_trainer(tmp_path, trainer_class=Imitation, callbacks=[recorder], num_ppo_epochs=4)
    trainer.train()
    losses = logged(trainer, "loss")
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1] + 0.1
    assert not any("value_head" in name for gradients in recorder.gradients for name in gradients)


def docstring_example() -> str:
    """Return the code of the example in ExperienceStream's docstring."""
    lines = inspect.getdoc(ExperienceStream).splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith("class "))
    end = next(i for i in range(start, len(lines)) if lines[i] and not lines[i].startswith(" "))
    return textwrap.dedent("\n".join(lines[start:end]))


def test_the_example_of_the_docstring_runs_and_gives_reward_to_go(tmp_path):
    namespace = {"ExperienceStream": ExperienceStream}
    exec(docstring_example(), namespace)

    class Reinforced(PPOTrainer):
        stream_class = namespace["Reinforce"]

    settings = {"rollout_backend": CannedBackend([[5, 6, 1], [5, 1]]), "beta": 0.0, "whiten_advantages": False}
    trainer = make_trainer(tmp_path, trainer_class=Reinforced, **settings)
    for experience in trainer.get_train_dataloader().make_rollout():
        for i, row in enumerate(experience.pack.completion_mask):
            length = int(row.sum())
            # 5, 6, 1 has one even id of three, 5, 1 none; the score reaches every token, undiscounted.
            score = {3: 1 / 3, 2: 0.0}[length]
            torch.testing.assert_close(experience.advantages[i, :length], torch.full((length,), score))
    before = trained_weights(trainer.model)
    trainer.train()
    assert differ(trained_weights(trainer.model), before)


class ReadsNextValues(ExperienceStream):
    def advantages(self, pack, output, rewards, stopped):
        self.seen = [*getattr(self, "seen", []), output.next_values]
        return super().advantages(pack, output, rewards, stopped)


class ReadingTrainer(PPOTrainer):
    stream_class = ReadsNextValues


def test_advantages_of_ones_own_read_real_next_values_also_where_states_are_captured(tmp_path):
    seen = []
    for captures in (True, False):
        settings = {"adapter_layers": "top-1", "value_head_init": None, "capture_trunk_states": captures}
        trainer = make_trainer(tmp_path / str(captures), trainer_class=ReadingTrainer, **settings)
        with torch.no_grad():
            weight = trainer.model.value_head.linear.weight
            weight.copy_(torch.linspace(-1, 1, weight.numel()).reshape(weight.shape))
        stream = trainer.get_train_dataloader()
        trainer.model.eval()
        stream.make_rollout()
        seen.append(torch.cat(stream.seen))
    # float32 rounds a token alone otherwise than within a row.
    torch.testing.assert_close(*seen, atol=2e-4, rtol=2e-4)
    assert seen[0].std() > 1e-2


class Doubled(ExperienceStream):
    def shape_scores(self, scored):
        return 2 * super().shape_scores(scored)


class DoubledTrainer(PPOTrainer):
    stream_class = Doubled


def test_how_scores_are_shaped_can_be_replaced(tmp_path):
    settings = {"beta": 0.0, "whiten_advantages": False, "gamma": 1.0, "lam": 1.0}
    stream = make_trainer(tmp_path, trainer_class=DoubledTrainer, **settings).get_train_dataloader()
    advantages = torch.cat([e.advantages[:, 0] for e in stream.make_rollout()])
    scored = stream.last_scored
    assert sorted(advantages.tolist()) == pytest.approx(sorted((2 * scored.scores.total).tolist()))


def test_optimizer_and_schedule_can_be_handed_over(tmp_path):
    from onetrunk.models.build import build_trunk
    from tests.ppo.support import base_model, lora, make_config, prompts
    from tests.tiny import tiny_tokenizer

    trunk = build_trunk(base_model(), lora())
    optimizer = torch.optim.SGD([p for p in trunk.parameters() if p.requires_grad], lr=0.5)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    trainer = PPOTrainer(
        trunk,
        even_share,
        make_config(tmp_path, num_rollouts=2),
        prompts(),
        processing_class=tiny_tokenizer(),
        optimizers=(optimizer, schedule),
    )
    before = trained_weights(trainer.model)
    trainer.train()
    assert logged(trainer, "learning_rate") == [0.5, 0.5]
    assert differ(trained_weights(trainer.model), before)


class StopsAfterTwo(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "score/mean" in logs:
            assert logs["kl/beta"] == 0.05
        control.should_training_stop = state.global_step >= 2


def test_callbacks_see_the_metrics_and_can_stop_the_run(tmp_path):
    trainer = trained(tmp_path, callbacks=[StopsAfterTwo()], num_rollouts=5)
    assert trainer.state.global_step == 2
