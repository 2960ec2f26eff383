"""Scoring by the model goes on beside reward functions: neither waits for the other, and errors come through."""

import signal
import subprocess
import sys
import threading

import pytest
import torch

from onetrunk.models.trunk import TrunkModel
from onetrunk.ppo.forward import Background
from tests.ppo.support import assert_same, even_share, make_trainer, trained, trained_weights

CPU = torch.device("cpu")


def test_a_result_or_an_error_comes_through():
    assert Background(lambda: 7, CPU).result() == 7
    assert Background(lambda: threading.current_thread().name, CPU).result() != threading.current_thread().name
    later = Background(lambda: threading.current_thread().name, CPU, in_thread=False)
    assert later.result() == threading.current_thread().name
    with pytest.raises(ZeroDivisionError):
        Background(lambda: 1 / 0, CPU).result()


class Watched(TrunkModel):
    """Says when a pack has been scored."""

    def forward(self, *args, pack=None, **kwargs):
        output = super().forward(*args, pack=pack, **kwargs)
        if pack is not None and not torch.is_grad_enabled():
            self.has_scored.set()
        return output


def test_packs_are_scored_while_a_reward_function_waits_in_the_main_thread(tmp_path):
    has_scored = threading.Event()

    def waits(completion_ids, **kwargs):
        assert threading.current_thread() is threading.main_thread()
        signal.setitimer(signal.ITIMER_REAL, 0)  # what a parser with a time limit does; refused in other threads
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        assert has_scored.wait(timeout=60), "no pack was scored before the reward was there"
        return even_share(None, None, completion_ids)

    trainer = make_trainer(tmp_path, reward=waits, check_memory=False)
    trainer.model.__class__ = Watched
    trainer.model.has_scored = has_scored
    trainer.train()
    plain = trained(tmp_path / "plain", reward=even_share, check_memory=False)
    assert_same(trained_weights(trainer.model), trained_weights(plain.model))


ABANDONED = """
import sys, time, torch
from onetrunk.ppo.forward import Background
def work():
    end = time.monotonic() + 2
    while time.monotonic() < end:
        torch.randn(64, 64, requires_grad=True).matmul(torch.randn(64, 64)).sum().backward()
Background(work, torch.device("cpu"))
time.sleep(0.2)
sys.exit(3)
"""


@pytest.mark.slow
def test_a_process_that_ends_on_an_error_keeps_its_exit_code_while_the_thread_is_at_work():
    run = subprocess.run([sys.executable, "-c", ABANDONED], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (3, "")
