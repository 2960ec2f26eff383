"""Which signals stop a run at once (a second Ctrl-C only), and what one leaves behind."""

import os
import signal

import pytest
from transformers import TrainerCallback

from onetrunk.checkpoints.signals import Stopped, StopSignals
from tests.checkpoints import crash_runs


@pytest.fixture
def signals():
    # In the background of a shell SIGINT is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield StopSignals()
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_only_a_second_signal_that_is_ctrl_c_stops_at_once(signals, first):
    with signals.listening():
        for number in (first, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert signals.received == signal.Signals(first).name
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


class TermAt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)


def test_what_a_signal_leaves_can_be_resumed_also_where_checkpoints_hold_the_model_only(tmp_path):
    first = crash_runs.sft(tmp_path, save_only_model=True)
    first.add_callback(TermAt())
    with pytest.raises(Stopped):
        first.train()
    again = crash_runs.sft(tmp_path, save_only_model=True)
    again.train(resume_from_checkpoint="auto")
    assert again.state.global_step == 9 and again.args.save_only_model
