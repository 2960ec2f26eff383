"""One of two processes is killed or stopped: the other names it, ends with exit code 1, and the run can be resumed."""

import signal
import socket
import time

import pytest

from onetrunk.utils.beats import read_beat
from tests.checkpoints.test_elastic_restart import OPTIONS, prepared, uninterrupted
from tests.places import ROOT, finish_pair, started_pair

WORDS = [str(ROOT / "scripts/ppo.py"), *OPTIONS.split()]
pytestmark = [pytest.mark.multi_process, pytest.mark.slow, pytest.mark.timeout(1800)]


def check_message(folder, lost):
    log = (folder / "log-0.txt").read_text()
    (message,) = [line for line in log.splitlines() if "lost the connection to another process" in line]
    assert f"rank 1 (process {lost.pid} on {socket.gethostname()}), last sign " in message
    assert "--resume auto" in message
    assert "Traceback" not in log and "gloo" not in message


def test_the_other_process_lists_the_lost_one_and_the_run_resumes(tmp_path):
    folder = prepared(tmp_path)
    (folder / "kill").touch()
    with started_pair(folder, WORDS) as (first, second):
        assert first.wait() == 1
        assert second.wait() == -signal.SIGKILL
    check_message(folder, second)
    assert read_beat(folder / "out", 1).pid == second.pid
    assert read_beat(folder / "out", 0) is None
    finish_pair(folder, WORDS)
    for name in ("adapter_model.safetensors", "value_head.safetensors"):
        assert (folder / "out" / name).read_bytes() == (uninterrupted() / "out" / name).read_bytes()
    assert not list((folder / "out").glob("*heartbeat*"))


def test_a_stopped_process_is_waited_for_no_longer_than_ddp_timeout(tmp_path):
    folder = prepared(tmp_path)
    (folder / "stop").touch()
    with started_pair(folder, [*WORDS, "--ddp_timeout", "15"]) as (first, second):
        while (folder / "stop").exists():
            assert first.poll() is None and second.poll() is None
            time.sleep(0.2)
        assert first.wait(120) == 1
    check_message(folder, second)
    finish_pair(folder, WORDS)
