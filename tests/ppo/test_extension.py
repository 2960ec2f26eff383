"""What a user may replace from outside: the backend, the objective, the advantages, the prompts, callbacks."""

import inspect
import textwrap
from dataclasses import replace
from functools import partial

import pytest
import torch

from onetrunk.models.build import build_trunk
from onetrunk.ppo.experience import ExperienceStream
from onetrunk.ppo.trainer import PPOTrainer
from onetrunk.rollouts.base import RolloutBackend
from tests.fakes import CannedBackend
from tests.ppo.support import Recorder, base_model, differ, logged, lora, make_trainer, trained, trained_weights


def test_a_backend_of_ones_own_is_synced_before_every_rollout_and_its_tokens_are_trained_on(tmp_path):
    backend = CannedBackend([[5, 6, 1], [7, 8, 9, 1]])
    assert isinstance(backend, RolloutBackend)
    trainer = trained(tmp_path, rollout_backend=backend, num_rollouts=3, num_ppo_epochs=2)
    assert backend.synced == [0, 2, 4]
    assert logged(trainer, "completion/length") == [3.5] * 3
    assert logged(trainer, "completion/stopped_fraction") == [1.0] * 3


class Broken(CannedBackend):
    """Returns rollouts whose completions and logprobs are what `change` makes of them."""

    def __init__(self, change):
        super().__init__([[5, 1]])
        self.change = change

    def generate(self, prompt_ids, params, keys):
        rows = super().generate(prompt_ids, params, keys)
        ids, logprobs = self.change(rows.completion_ids, rows.sampler_logprobs)
        return replace(rows, completion_ids=ids, sampler_logprobs=logprobs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids, logprobs: ([[], *ids[1:]], logprobs), "returned 4 completions for 4 prompts, 1 of them empty"),
        (lambda ids, logprobs: (ids[1:], logprobs[1:]), "returned 3 completions for 4 prompts"),
        (lambda ids, logprobs: (ids, [x[:-1] for x in logprobs]), "sampler_logprobs whose lengths differ"),
        (lambda ids, logprobs: (ids, [x - float("inf") for x in logprobs]), "sampler_logprobs that are not finite"),
    ],
    ids=["empty", "too few", "too few logprobs", "not finite"],
)
def test_a_backend_that_breaks_its_contract_is_named(tmp_path, change, message):
    trainer = make_trainer(tmp_path, rollout_backend=Broken(change), check_memory=False)
    with pytest.raises(RuntimeError, match=f"Broken.generate returned .*{message.removeprefix('returned ')}"):
        trainer.train()


class Imitation(PPOTrainer):
    """Raises the logprob of every sampled token: another objective on the same rollouts."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        experience, minibatch = inputs["experience"], inputs["minibatch"]
        output = model(pack=experience.pack, roles=("policy",), temperature=self.args.temperature)
        return -(output.logprobs * experience.loss_mask).sum() / minibatch.num_tokens


def test_the_objective_can_be_replaced(tmp_path):
    recorder = Recorder()
    trainer = trained(tmp_path, trainer_class=Imitation, callbacks=[recorder], num_ppo_epochs=4)
    losses = logged(trainer, "loss")
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1] + 0.1
    assert not any("value_head" in name for gradients in recorder.gradients for name in gradients)


def test_the_example_of_the_docstring_runs_and_gives_reward_to_go(tmp_path):
    lines, namespace = inspect.getdoc(ExperienceStream).splitlines(), {"ExperienceStream": ExperienceStream}
    start = next(i for i, line in enumerate(lines) if line.strip().startswith("class "))
    end = next(i for i in range(start, len(lines)) if lines[i] and not lines[i].startswith(" "))
    exec(textwrap.dedent("\n".join(lines[start:end])), namespace)
    settings = {"rollout_backend": CannedBackend([[5, 6, 1], [5, 1]]), "beta": 0.0, "whiten_advantages": False}
    trainer = make_trainer(tmp_path, **settings)
    trainer.stream_class = namespace["Reinforce"]
    for experience in trainer.get_train_dataloader().make_rollout():
        for i, row in enumerate(experience.pack.completion_mask):
            length = int(row.sum())
            # 5, 6, 1 has one even id of three, 5, 1 none; the score reaches every token, undiscounted.
            score = {3: 1 / 3, 2: 0.0}[length]
            torch.testing.assert_close(experience.advantages[i, :length], torch.full((length,), score))
    before = trained_weights(trainer.model)
    trainer.train()
    assert differ(trained_weights(trainer.model), before)


def reads_next_values(name):
    """Return a stream whose method `name` keeps the values after the last tokens."""

    def read(self, pack, output, *args, **kwargs):
        self.seen = [*getattr(self, "seen", []), output.next_values]
        return getattr(super(own, self), name)(pack, output, *args, **kwargs)

    own = type("ReadsNextValues", (ExperienceStream,), {name: read})
    return own


@pytest.mark.parametrize("name", ["advantages", "estimate"])
def test_advantages_of_ones_own_read_real_next_values_also_where_states_are_captured(tmp_path, name):
    seen = []
    for captures in (True, False):
        settings = {"adapter_layers": "top-1", "capture_trunk_states": captures}
        trainer = make_trainer(tmp_path / str(captures), **settings)
        trainer.stream_class = reads_next_values(name)
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


def test_optimizer_and_schedule_can_be_handed_over(tmp_path):
    trunk = build_trunk(base_model(), lora())
    optimizer = torch.optim.SGD([p for p in trunk.parameters() if p.requires_grad], lr=0.5)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    made = partial(PPOTrainer, optimizers=(optimizer, schedule))
    trainer = make_trainer(tmp_path, model=trunk, trainer_class=made, num_rollouts=2)
    before = trained_weights(trainer.model)
    trainer.train()
    assert logged(trainer, "learning_rate") == [0.5, 0.5]
    assert differ(trained_weights(trainer.model), before)
