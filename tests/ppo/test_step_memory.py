"""What a run takes at its peak depends on the largest pack, not on how often a rollout is trained on."""

import pytest
import torch

from onetrunk.models.speedups.memory_use import peak_bytes
from tests.ppo.support import make_trainer


def peak_of_a_run(folder, model=None, **settings):
    trainer = make_trainer(folder, check_memory=False, num_rollouts=2, **settings)

    def train():
        with torch.enable_grad():
            trainer.train()

    return peak_bytes(train)


TOP = {"adapter_layers": "top-1", "trunk_cache": "device", "value_head": "adapter"}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, TOP])
def test_the_peak_is_flat_in_the_number_of_epochs(tmp_path, settings):
    one = peak_of_a_run(tmp_path / "one", num_ppo_epochs=1, **settings)
    many = peak_of_a_run(tmp_path / "many", num_ppo_epochs=4, **settings)
    assert one > 100_000
    # The second rollout is of another policy: completions of other lengths.
    assert many == pytest.approx(one, rel=0.1)
