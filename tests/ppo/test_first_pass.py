"""Before an update old and new policy are the same, exactly: ratio 1, KL 0."""

import pytest
import torch

from tests.checkpoints import crash_runs
from tests.ppo.support import logged, trained


@pytest.mark.parametrize(
    ("family", "own"), [("gemma2", {}), ("llama", {"bf16": True}), ("llama", {"num_minibatches": 2})]
)
def test_the_first_step_on_a_rollout_has_ratio_one_and_no_kl(tmp_path, family, own):
    settings = {"num_rollouts": 3, "num_ppo_epochs": 2, "rollout_batch_size": 6, "learning_rate": 3e-2, **own}
    trainer = trained(tmp_path, model=family, **settings)
    ratio, kl, clipped = (logged(trainer, n) for n in ("policy/ratio_max", "kl/approx", "policy/clip_fraction"))
    steps = trainer.args.steps_per_rollout
    # A KL of exactly 0 means that every logprob has the bits that it had in the rollout.
    assert (ratio[::steps], kl[::steps], clipped[::steps]) == ([1.0] * 3, [0.0] * 3, [0.0] * 3)
    # The next step follows an update: the figures can move.
    assert min(ratio[1::steps]) > 1.01 and min(kl[1::steps]) > 0


@pytest.mark.slow
def test_a_base_in_4_bit_keeps_its_bits_and_the_first_ratio_is_1(tmp_path):
    trainer = crash_runs.ppo_nf4(tmp_path, num_rollouts=2, logging_steps=1)
    tensors = {name: x for name, x in trainer.model.state_dict().items() if torch.is_tensor(x)}
    frozen = {n: x.clone() for n, x in tensors.items() if "lora_" not in n and "value_head" not in n}
    trainer.train()
    after = trainer.model.state_dict()
    assert len(frozen) > 20 and all(torch.equal(after[name], tensor) for name, tensor in frozen.items())
    # The first of four steps on each rollout.
    assert logged(trainer, "policy/ratio_max")[::4] == [1.0, 1.0] and logged(trainer, "kl/approx")[::4] == [0.0, 0.0]
    assert logged(trainer, "kl/ref")[0] == 0.0
