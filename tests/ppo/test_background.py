"""The model scores packs while reward functions work in the main thread."""

import signal
import threading

import pytest
import torch

from onetrunk.models.trunk import TrunkModel
from tests.ppo.support import assert_same, even_share, make_trainer, trained, trained_weights


class Watched(TrunkModel):
    """Says when a pack has been scored."""

    def forward(self, *args, pack=None, **kwargs):
        output = super().forward(*args, pack=pack, **kwargs)
        if pack is not None and not torch.is_grad_enabled():
            self.has_scored.set()
        return output


def watched(folder, reward, has_scored, **settings):
    trainer = make_trainer(folder, reward=reward, check_memory=False, **settings)
    trainer.model.__class__ = Watched
    trainer.model.has_scored = has_scored
    return trainer


def test_packs_are_scored_while_a_reward_function_waits_in_the_main_thread(tmp_path):
    has_scored = threading.Event()

    def waits(completion_ids, **kwargs):
        assert threading.current_thread() is threading.main_thread()
        signal.setitimer(signal.ITIMER_REAL, 0)  # what a parser with a time limit does; refused in other threads
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        assert has_scored.wait(timeout=60), "no pack was scored before the reward was there"
        return even_share(None, None, completion_ids)

    trainer = watched(tmp_path, waits, has_scored)
    trainer.train()
    plain = trained(tmp_path / "plain")
    assert_same(trained_weights(trainer.model), trained_weights(plain.model))


def test_no_forward_goes_on_after_a_reward_function_has_failed(tmp_path):
    has_scored = threading.Event()

    def fails(prompts, **kwargs):
        assert has_scored.wait(timeout=60)
        raise ValueError("no score today")

    before = threading.enumerate()
    trainer = watched(tmp_path, fails, has_scored, per_device_train_batch_size=1)
    with pytest.raises(RuntimeError, match="no score today"):
        trainer.train()
    assert threading.enumerate() == before
