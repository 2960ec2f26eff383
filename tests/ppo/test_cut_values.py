"""What a cut completion is bootstrapped with: the value of the state after it, which must have trained."""

import pytest
import torch

from onetrunk.ppo.experience import ExperienceStream
from tests.ppo.test_episodes_in_training import Words, words_trainer

# From every state the rest is worth 1, so every value is.
FITS = {"truncated_completions": "bootstrap", "gamma": 1.0, "lam": 1.0, "beta": 0.0, "max_completion_length": 40}
SMALL = {"learning_rate": 0.0, "rollout_batch_size": 16, "num_rollouts": 6, "num_minibatches": 1, "num_ppo_epochs": 1}
SMALL["value_steps"] = 160  # As many as a rollout of 128 completions has.


class OneIsLeft(Words):
    """Ends with the reward 1 after three turns; half of the episodes are cut before, after the first or second."""

    def step(self, action):
        observation, *_ = super().step(action)
        is_over = self.turn == 3
        return observation, float(is_over), is_over, self.seed % 4 == self.turn, {}


class KeepsAfter(ExperienceStream):
    """Keeps what cut rows are bootstrapped with."""

    def advantages(self, pack, output, rewards, stopped):
        if output.values.any():  # Not those of the comparison with a critic of zeros.
            self.trainer.after.append(output.next_values[~stopped])
        return super().advantages(pack, output, rewards, stopped)


@pytest.mark.parametrize("gae_unit", ["token", "turn"])
def test_the_value_after_a_cut_between_turns_is_what_is_left(tmp_path, gae_unit):
    trainer = words_trainer(tmp_path, OneIsLeft, gae_unit=gae_unit, **FITS, **SMALL)
    trainer.stream_class, trainer.after = KeepsAfter, []
    trainer.train()
    after = torch.cat(trainer.after[-(len(trainer.after) // 6) :])
    # Never fitted, it stays near 0.
    assert len(after) > 4
    assert abs(after.mean() - 1) < 0.15 and after.std() < 0.15, (after.mean(), after.std())
