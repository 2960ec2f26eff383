"""A run that has ended stays as it is: its command repeated, or killed at any write after the last step.

What it ends with is not what its last checkpoint holds: the best checkpoint's weights, what the monitor liked best,
and that an alarm or early stopping ended it.
"""

import json
import shutil
import signal
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from transformers import EarlyStoppingCallback

from onetrunk.checkpoints.folders import checkpoint_folders
from tests.checkpoints import crash_runs
from tests.checkpoints.killing import copied, digest_of, exit_code
from tests.ppo.support import BEST, assert_same, make_trainer, prompts, trained_weights

KIND, LAST = "ppo_best", 12
pytestmark = pytest.mark.timeout(3600)
# Made by the tests.
APART = ("digest.json", "events.json", "_run.lock")


class Ending:
    """A run that was killed when its last step was made and nothing of it written, and how it ends from there.

    It always lies in the same folder: its name is among the settings that are saved.
    """

    def __init__(self) -> None:
        self.root = Path(mkdtemp())
        self.folder = self.root / "run"
        assert exit_code(crash_runs.killed_while_saving, KIND, self.folder, LAST, 1) == -signal.SIGKILL
        copied(self.folder, self.root / "before")
        assert exit_code(crash_runs.finish, KIND, self.folder) == 0
        copied(self.folder, self.root / "finished")
        self.result, self.digest = self.files(), digest_of(self.folder)
        self.checkpoints = checkpoint_folders(self.folder)

    def files(self) -> dict[str, bytes]:
        """Return the files beside the checkpoints."""
        files = [path for path in self.folder.iterdir() if path.is_file() and path.name not in APART]
        return {path.name: path.read_bytes() for path in files}

    def restore(self, name: str) -> Path:
        """Bring the run back as it was: "finished" or "before" its last save; return its folder."""
        shutil.rmtree(self.folder)
        return copied(self.root / name, self.folder)

    def finish_again(self, why: str) -> None:
        """Repeat the command, and compare what the folder holds with how it ended before."""
        assert exit_code(crash_runs.finish, KIND, self.folder) == 0, why
        found, files = digest_of(self.folder), self.files()
        assert found == {part: self.digest[part] for part in found}, why
        assert {"ended", "best", "weights"} <= set(found)
        assert files.keys() == self.result.keys(), why
        assert [name for name in files if files[name] != self.result[name]] == [], why
        # What was to be rotated away when it was killed stays.
        assert set(self.checkpoints) <= set(checkpoint_folders(self.folder)), why


@cache
def ending() -> Ending:
    return Ending()


@pytest.mark.slow
def test_a_finished_run_that_is_repeated_stays_as_it_is():
    ending().restore("finished")
    ending().finish_again("repeated")


@pytest.mark.slow
def test_a_run_killed_while_it_ends_ends_the_same():
    """Right after its last checkpoint has its name, and before the last file of its result."""
    run = ending()
    run.restore("before")
    assert exit_code(crash_runs.killed_while_saving, KIND, run.folder, LAST, 0) == 0
    events = json.loads((run.folder / "events.json").read_text())
    published = [i for i, event in enumerate(events, 1) if event == f"os.rename checkpoint-{LAST}"]
    installed = [i for i, event in enumerate(events, 1) if event.startswith("os.rename")]
    for fatal in (published[0] + 2, installed[-1]):
        run.restore("before")
        assert exit_code(crash_runs.killed_while_saving, KIND, run.folder, LAST, fatal) == -signal.SIGKILL
        run.finish_again(f"killed before {events[fatal - 1]}, {fatal} of {len(events)}")


class Spoiled:
    """The evaluations of a reward: the first is the best one."""

    def __init__(self):
        self.calls = 0

    def __call__(self, prompts, completion_ids, **kwargs):
        if len(prompts) == 2:
            self.calls += 1
            return [-float(self.calls)] * 2
        return [len(ids) / 6 for ids in completion_ids]


def stopping_early(folder: Path, patience: int = 2, **settings):
    settings = {**BEST, "num_rollouts": 8, "eval_dataset": prompts(2), **settings}
    callbacks = [EarlyStoppingCallback(early_stopping_patience=patience)]
    return make_trainer(folder, reward=Spoiled(), callbacks=callbacks, **settings)


@pytest.mark.slow
def test_early_stopping_is_an_end_too_unless_there_is_more_patience_now(tmp_path, caplog):
    first = stopping_early(tmp_path)
    first.train()
    assert first.state.global_step == 3 and "early stopping: 2 evaluations in a row" in first.ended
    again = stopping_early(tmp_path)
    again.train(resume_from_checkpoint="auto")
    assert again.state.global_step == 3 and again.ended == first.ended
    assert_same(trained_weights(again.model), trained_weights(first.model))
    assert "set continue_ended_run to true to continue" in caplog.text
    patient = stopping_early(tmp_path, patience=3)
    patient.train(resume_from_checkpoint="auto")
    assert patient.state.global_step > 3
    again = stopping_early(tmp_path, continue_ended_run=True)
    again.train(resume_from_checkpoint="auto")
    assert again.state.global_step == patient.state.global_step + 1


def test_the_best_checkpoint_of_a_run_that_has_moved_is_found(tmp_path):
    first = stopping_early(tmp_path / "here")
    first.train()
    assert first.state.best_model_checkpoint == str(tmp_path / "here/checkpoint-1")
    (tmp_path / "here").rename(tmp_path / "there")
    moved = stopping_early(tmp_path / "there")
    moved.train(resume_from_checkpoint="auto")
    assert moved.state.best_model_checkpoint == str(tmp_path / "there/checkpoint-1")
    assert_same(trained_weights(moved.model), trained_weights(first.model))
