"""Killed with -9, asked to stop, or out of disk: the checkpoints that were there stay, and the resumed run is the same
run, sha256 by sha256."""

import json
import signal

import pytest

from onetrunk.checkpoints.folders import checkpoint_folders, checkpoint_problems
from onetrunk.stages.run_context import has_result
from tests.checkpoints import crash_runs
from tests.checkpoints.killing import copied, exit_code, interrupted, resumed_equals_uninterrupted, uninterrupted

# Dozens of processes in a test: how long that takes is the machine's to say.
pytestmark = pytest.mark.timeout(3600)
# The checkpoint whose writing is killed: the third, when one is rotated away.
THIRD = 9


@pytest.mark.slow
def test_a_run_killed_before_every_sixth_write_of_a_save_and_of_its_result_resumes_exactly(tmp_path):
    folder = copied(interrupted("ppo"), tmp_path / "counted")
    assert exit_code(crash_runs.killed_while_saving, "ppo", folder, THIRD, 0) == 0
    events = json.loads((folder / "events.json").read_text())
    kinds = "open fsync os.rename os.remove os.mkdir os.rmdir"
    assert {event.split()[0] for event in events} == set(kinds.split())
    weights = (uninterrupted("ppo") / "adapter_model.safetensors").read_bytes()
    for fatal in range(1, len(events) + 1, 6):
        folder = copied(interrupted("ppo"), tmp_path / str(fatal))
        assert exit_code(crash_runs.killed_while_saving, "ppo", folder, THIRD, fatal) == -signal.SIGKILL
        whole = [path for path in checkpoint_folders(folder) if not checkpoint_problems(path)]
        assert len(whole) >= 2, f"killed before {events[fatal - 1]}"
        if has_result(folder):
            assert (folder / "adapter_model.safetensors").read_bytes() == weights
        resumed_equals_uninterrupted("ppo", folder)
        assert has_result(folder) and (folder / "adapter_model.safetensors").read_bytes() == weights


PLACES = [
    ("ppo", "forward", 700, signal.SIGTERM, 0),
    ("ppo_cut", "token", 12, signal.SIGTERM, 0),
    ("sft", "update", 4, signal.SIGTERM, 0),
    ("ppo_monitor", "evaluation", 2, signal.SIGTERM, 0),
    ("ppo", "token", 10, signal.SIGINT, 130),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "place", "count", "number", "code"), PLACES)
def test_a_signal_in_any_phase_ends_with_a_checkpoint_and_ctrl_c_with_the_exit_code_of_a_shell(
    tmp_path, kind, place, count, number, code
):
    assert exit_code(crash_runs.signalled, kind, tmp_path, place, count, number) == code
    assert not (tmp_path / "digest.json").exists(), "the run was not stopped"
    last = checkpoint_folders(tmp_path)[-1]
    assert checkpoint_problems(last) == []
    resumed_equals_uninterrupted(kind, tmp_path)


@pytest.mark.slow
def test_a_run_that_goes_on_elsewhere_and_stops_at_once_has_a_checkpoint_there(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert exit_code(crash_runs.killed_after, "ppo", first, 4) == -signal.SIGKILL
    start = str(first / "checkpoint-4")
    assert exit_code(crash_runs.signalled, "ppo", second, "token", 1, signal.SIGTERM, start) == 0
    assert [path.name for path in checkpoint_folders(second)] == ["checkpoint-4"]
    resumed_equals_uninterrupted("ppo", second)
