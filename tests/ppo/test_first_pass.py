"""Before an update old and new policy are the same, exactly: ratio 1, KL 0."""

import pytest
import torch

from onetrunk.ppo.trainer import PPOTrainer
from tests.checkpoints import crash_runs
from tests.ppo.support import logged, make_trainer, sft_model, trained


@pytest.mark.parametrize(("family", "bf16"), [("gemma2", False), ("llama", True)])
def test_the_first_pass_over_a_rollout_has_ratio_one_and_no_kl(tmp_path, family, bf16):
    trainer = trained(
        tmp_path, model=family, bf16=bf16, num_rollouts=3, num_ppo_epochs=2, rollout_batch_size=6, learning_rate=3e-2
    )
    ratio, kl, clipped = (logged(trainer, f"{n}") for n in ("policy/ratio_max", "kl/approx", "policy/clip_fraction"))
    assert (ratio[0::2], kl[0::2], clipped[0::2]) == ([1.0] * 3, [0.0] * 3, [0.0] * 3)
    # The second pass follows an update: the figures can move.
    assert min(ratio[1::2]) > 1.01 and min(kl[1::2]) > 0


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


class Hooked(PPOTrainer):
    """Keeps old and new logprobs of every pack of the first minibatch of a rollout."""

    pairs = ()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, output = super().compute_loss(model, inputs, return_outputs=True)
        if self.state.global_step % self.args.steps_per_rollout == 0:
            self.pairs = (*self.pairs, (inputs["experience"].old_logprobs, output.logprobs.detach()))
        return loss


def test_the_first_of_several_minibatches_sees_the_logprobs_of_the_rollout_bit_by_bit(tmp_path):
    settings = {"num_minibatches": 2, "rollout_batch_size": 8, "num_rollouts": 3}
    trainer = trained(tmp_path, trainer_class=Hooked, **settings)
    assert len(trainer.pairs) == 3 * 2
    assert all(torch.equal(old, new) for old, new in trainer.pairs)
    assert all((old != 0).any() for old, _ in trainer.pairs)


def test_a_continued_adapter_is_compared_with_itself_and_not_with_the_bare_base(tmp_path):
    trainer = make_trainer(tmp_path, model=sft_model(), num_rollouts=2)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        with_adapter = trainer.model(input_ids=ids).logits
        with trainer.model.disable_adapter():
            bare = trainer.model(input_ids=ids).logits
    assert (with_adapter - bare).abs().max() > 0.1
    trainer.train()
    kl = logged(trainer, "kl/ref")
    assert kl[0] == 0.0
    assert kl[1] != 0.0
