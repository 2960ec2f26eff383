"""Killed with -9, asked to stop, or out of disk: the checkpoints that were there stay, and the resumed run is the same
run, sha256 by sha256."""

import json
import random
import signal
import time
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from onetrunk.checkpoints.folders import checkpoint_folders, checkpoint_problems
from onetrunk.stages.run_context import has_result
from tests.checkpoints import crash_runs
from tests.checkpoints.killing import (
    copied,
    digest_of,
    exit_code,
    resumed_equals_uninterrupted,
    started,
    uninterrupted,
)
from tests.places import FORKED

# Dozens of processes in a test: how long that takes is the machine's to say.
pytestmark = pytest.mark.timeout(3600)
KINDS = tuple(crash_runs.KINDS)
# How many parts the failpoints of a save are dealt to, so that several workers share them. Every part has failpoints
# of all the save; one of them is no slow test.
PARTS = 5
SAVES = [(kind, part) for kind in ("ppo", "sft") for part in range(PARTS)]
# The checkpoint whose writing is killed: the third, when one is rotated away.
THIRD = {"ppo": 9, "sft": 6}


@cache
def before_the_third_save(kind: str) -> Path:
    """Return a run's folder with two checkpoints, killed when its third is about to be written."""
    folder = Path(mkdtemp())
    assert exit_code(crash_runs.killed_while_saving, kind, folder, THIRD[kind], 1) == -signal.SIGKILL
    assert len(checkpoint_folders(folder)) == 2
    return folder


@cache
def file_events(kind: str) -> list[str]:
    """Return what a run does to its folder from its third checkpoint to its end."""
    folder = copied(before_the_third_save(kind), Path(mkdtemp()))
    assert exit_code(crash_runs.killed_while_saving, kind, folder, THIRD[kind], 0) == 0
    return json.loads((folder / "events.json").read_text())


def of_one_save(events: list[str]) -> int:
    """Return how many events there are until the second `.saving` folder is made, a save and its rotation."""
    begins = [i for i, event in enumerate(events) if event == "os.mkdir .saving"]
    return begins[1]


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize(("kind", "part"), SAVES)
def test_a_run_killed_before_any_write_of_a_save_resumes_exactly(tmp_path, kind, part):
    events = file_events(kind)
    last = of_one_save(events)
    for fatal in range(1 + part, last + 1, PARTS):
        folder = copied(before_the_third_save(kind), tmp_path / str(fatal))
        assert exit_code(crash_runs.killed_while_saving, kind, folder, THIRD[kind], fatal) == -signal.SIGKILL
        whole = [path for path in checkpoint_folders(folder) if not checkpoint_problems(path)]
        assert len(whole) >= 2, f"killed before {events[fatal - 1]}"
        resumed_equals_uninterrupted(kind, folder)


@pytest.mark.slow
def test_the_failpoints_are_every_kind_of_event():
    events = file_events("ppo")[: of_one_save(file_events("ppo"))]
    kinds = {event.split()[0] for event in events}
    assert kinds == {"open", "fsync", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}
    for name in ("optimizer.pt", "adapter_model.safetensors", "experience_stream.json", "manifest.json"):
        assert any(name in event for event in events if event.startswith("fsync")), name
    assert len(events) > 40


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("every", [6, 1])
def test_a_run_killed_before_any_write_of_its_result_leaves_all_of_it_or_says_that_it_is_none(tmp_path, every):
    events = file_events("ppo")
    begins = max(i for i, event in enumerate(events) if event == "os.mkdir .saving")
    assert any(event.startswith("os.rename") for event in events[begins:])
    weights = (uninterrupted("ppo") / "adapter_model.safetensors").read_bytes()
    for fatal in range(begins + 1, len(events) + 1, every):
        folder = copied(before_the_third_save("ppo"), tmp_path / str(fatal))
        assert exit_code(crash_runs.killed_while_saving, "ppo", folder, THIRD["ppo"], fatal) == -signal.SIGKILL
        if has_result(folder):
            assert (folder / "adapter_model.safetensors").read_bytes() == weights
        assert exit_code(crash_runs.finish, "ppo", folder) == 0
        assert has_result(folder) and (folder / "adapter_model.safetensors").read_bytes() == weights


def kill_once(kind: str, folder: Path, seed: int) -> str:
    """Kill a run at a random moment; return the phase that it was in."""
    shown = FORKED.Value("i", 0)
    seconds = json.loads((uninterrupted(kind) / "seconds.json").read_text())
    process = started(crash_runs.shown_run, kind, folder, shown)
    while shown.value == 0 and process.is_alive():
        time.sleep(0.001)
    time.sleep(random.Random(seed).uniform(0, seconds))
    phase = crash_runs.PHASES[shown.value]
    process.kill()
    process.join()
    return phase


@pytest.mark.sampled(0, slow=8)
@pytest.mark.parametrize("seed", range(20))
def test_a_run_killed_at_a_random_moment_resumes_exactly(tmp_path, seed):
    kind = KINDS[seed % len(KINDS)]
    kill_once(kind, tmp_path, seed)
    resumed_equals_uninterrupted(kind, tmp_path)


@pytest.mark.soak
def test_300_kills_lose_nothing(tmp_path):
    phases = dict.fromkeys(crash_runs.PHASES, 0)
    for seed in range(300):
        kind, folder = KINDS[seed % len(KINDS)], tmp_path / str(seed)
        folder.mkdir()
        for again in range(3):
            phases[kill_once(kind, folder, 1000 * again + seed)] += 1
        resumed_equals_uninterrupted(kind, folder)
    print(phases)
    assert all(phases[name] for name in ("rollout", "score", "update", "save", "rotate"))


# --- asked to stop --------------------------------------------------------------------------------------------------

PLACES = [
    ("ppo", "token", 9),
    ("ppo", "forward", 700),
    ("ppo", "score", 1),
    ("ppo", "score", 2),
    ("ppo", "update", 1),
    ("ppo", "update", 4),
    ("ppo", "update", 7),
    ("ppo", "pack", 1),
    ("ppo", "pack", 5),
    ("ppo_cut", "pack", 11),
    ("ppo", "save", 20),
    ("ppo_cut", "token", 12),
    ("sft", "update", 4),
    ("sft", "update", 3),
    ("reward", "update", 5),
    ("distill", "save", 8),
]


@pytest.mark.sampled(0, slow=6)
@pytest.mark.parametrize(("kind", "place", "count"), PLACES)
@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_a_signal_in_any_phase_ends_with_a_checkpoint_and_exit_code_0(tmp_path, kind, place, count, number):
    assert exit_code(crash_runs.signalled, kind, tmp_path, place, count, number) == 0
    assert not (tmp_path / "digest.json").exists(), "the run was not stopped"
    last = checkpoint_folders(tmp_path)[-1]
    assert checkpoint_problems(last) == []
    resumed_equals_uninterrupted(kind, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_ctrl_c_the_warning_of_a_scheduler_and_a_closed_terminal_stop_alike(tmp_path, number):
    expected = 130 if number == signal.SIGINT else 0
    assert exit_code(crash_runs.signalled, "ppo", tmp_path, "token", 10, number) == expected
    assert not (tmp_path / "digest.json").exists()
    resumed_equals_uninterrupted("ppo", tmp_path)


@pytest.mark.slow
def test_a_signal_in_an_evaluation_lets_it_end_first(tmp_path):
    """What is logged of a step stays whole."""
    settings = {"eval_strategy": "steps", "eval_steps": 3}
    whole = tmp_path / "whole"
    assert exit_code(crash_runs.finish_evaluating, whole, settings) == 0
    folder = tmp_path / "stopped"
    assert exit_code(crash_runs.signalled_evaluating, folder, settings) == 0
    assert not (folder / "digest.json").exists()
    assert exit_code(crash_runs.finish_evaluating, folder, settings) == 0
    assert digest_of(folder) == digest_of(whole)


@pytest.mark.slow
def test_a_second_signal_stops_at_once(tmp_path):
    assert exit_code(crash_runs.signalled_twice, tmp_path) == 1
    assert not (tmp_path / "digest.json").exists()
    resumed_equals_uninterrupted("ppo", tmp_path)


@pytest.mark.slow
def test_a_sigterm_that_comes_twice_stops_with_a_checkpoint(tmp_path):
    """`ray job stop` signals the launcher and the training process, and the launcher passes its signal on."""
    assert exit_code(crash_runs.signalled_twice, tmp_path, signal.SIGTERM) == 0
    assert checkpoint_folders(tmp_path)[-1].name == "checkpoint-8" and not (tmp_path / "digest.json").exists()
    resumed_equals_uninterrupted("ppo", tmp_path)


@pytest.mark.slow
def test_a_closed_terminal_that_is_told_twice_does_not_stop_at_once(tmp_path):
    """By the system and by the shell."""
    assert exit_code(crash_runs.signalled_twice, tmp_path, signal.SIGHUP) == 0
    assert checkpoint_folders(tmp_path)[-1].name == "checkpoint-8" and not (tmp_path / "digest.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ppo", "sft"])
def test_a_run_whose_output_nobody_reads_any_more_ends_with_a_checkpoint(tmp_path, kind):
    assert exit_code(crash_runs.unread, kind, tmp_path, 4) == 0
    assert not (tmp_path / "digest.json").exists()
    assert checkpoint_folders(tmp_path)[-1].name == "checkpoint-4"
    assert checkpoint_problems(tmp_path / "checkpoint-4") == []


@pytest.mark.slow
def test_a_run_that_goes_on_elsewhere_and_stops_at_once_has_a_checkpoint_there(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert exit_code(crash_runs.killed_after, "ppo", first, 4) == -signal.SIGKILL
    start = str(first / "checkpoint-4")
    assert exit_code(crash_runs.signalled, "ppo", second, "token", 1, signal.SIGTERM, start) == 0
    assert [path.name for path in checkpoint_folders(second)] == ["checkpoint-4"]
    resumed_equals_uninterrupted("ppo", second)
