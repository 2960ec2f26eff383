"""Disks that fill up, die or belong to somebody else: what was there stays, and one sentence says what to do."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from onetrunk.checkpoints.folders import checkpoint_folders, checkpoint_problems
from onetrunk.utils.locks import held_folder
from tests.checkpoints import crash_runs
from tests.checkpoints.killing import (
    digest_of,
    exit_code,
    resumed_equals_uninterrupted,
    started,
    uninterrupted,
)
from tests.places import FORKED
from tests.ppo.support import make_trainer, prompts
from tests.stages.small_runs import make_material, words_of


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["ppo", "reward"])
@pytest.mark.parametrize("most", [0, 100, 5_000, 40_000])
def test_a_disk_that_is_full_leaves_the_checkpoints_before(tmp_path, kind, most):
    step = {"ppo": 9, "reward": 6}[kind]
    assert exit_code(crash_runs.finish_limited, kind, tmp_path, step, most) == 0
    error = (tmp_path / "error.txt").read_text()
    assert f"{tmp_path}/checkpoint-{step} could not be written" in error and "bytes are free there" in error
    assert "\n" not in error and "--resume auto" in error
    found = checkpoint_folders(tmp_path)
    assert len(found) == 2 and not any(checkpoint_problems(folder) for folder in found)
    resumed_equals_uninterrupted(kind, tmp_path)


def test_a_disk_without_room_for_the_checkpoints_is_refused_before_the_first_step(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=1, save_total_limit=3)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 5000, 5000))
    with pytest.raises(RuntimeError, match="has 5,000 bytes free, and 4 checkpoints of about [0-9,]+ bytes take"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_the_estimate_is_an_upper_bound_that_is_not_far_off(tmp_path):
    from onetrunk.checkpoints.save_checks import OTHER_BYTES, checkpoint_bytes

    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=1, num_rollouts=1)
    trainer.train()
    written = sum(path.stat().st_size for path in (tmp_path / "checkpoint-1").rglob("*") if path.is_file())
    assert written <= checkpoint_bytes(trainer, trainer.own_state_bytes()) <= written + OTHER_BYTES


def test_the_estimate_holds_the_states_of_a_rollout_in_use(tmp_path):
    from onetrunk.checkpoints.save_checks import OTHER_BYTES, checkpoint_bytes

    settings = {"adapter_layers": "top-1", "trunk_cache": "cpu", "num_ppo_epochs": 2, "rollout_batch_size": 64}
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=1, max_completion_length=60, **settings)
    trainer.train()
    assert trainer.trunk_plan.captures_states
    sizes = [sum(path.stat().st_size for path in (tmp_path / f"checkpoint-{i}").rglob("*")) for i in (1, 2)]
    states = sizes[0] - sizes[1]
    assert states > 300_000  # In the middle of a rollout, and behind it.
    assert (
        trainer.own_state_bytes() >= states
        and sizes[0] <= checkpoint_bytes(trainer, trainer.own_state_bytes()) <= 2 * sizes[0] + OTHER_BYTES
    )


def test_a_limit_of_one_keeps_two_also_beside_the_best(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    settings |= {"save_total_limit": 1, "load_best_model_at_end": True, "num_rollouts": 4}
    make_trainer(tmp_path, eval_dataset=prompts(3), **settings).train()
    assert len(checkpoint_folders(tmp_path)) >= 2


def test_a_folder_has_one_writer_and_a_dead_one_leaves_it(tmp_path):
    ready, go_on = FORKED.Event(), FORKED.Event()
    process = started(crash_runs.hold, tmp_path, ready, go_on)
    assert ready.wait(60)
    with pytest.raises(RuntimeError, match="is being written by another process"):
        make_trainer(tmp_path).train()
    process.kill()
    process.join()
    with held_folder(tmp_path), held_folder(tmp_path):
        pass
    make_trainer(tmp_path).train()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ppo", "sft"])
def test_a_run_whose_disk_died_goes_on_from_its_mirror(tmp_path, kind):
    folder, mirror = tmp_path / "run", tmp_path / "mirror"
    step = {"ppo": 8, "sft": 5}[kind]
    assert exit_code(crash_runs.finish_mirrored, kind, folder, str(mirror), step) == -signal.SIGKILL
    names = [path.name for path in checkpoint_folders(mirror)]
    assert names == [path.name for path in checkpoint_folders(folder)] and len(names) == 2
    shutil.rmtree(folder)
    assert exit_code(crash_runs.finish_mirrored, kind, folder, str(mirror)) == 0
    assert digest_of(folder) == digest_of(uninterrupted(kind))
    # The result is there too, beside as many checkpoints as stay here.
    for name in json.loads((folder / "manifest.json").read_text())["files"]:
        assert (mirror / name).read_bytes() == (folder / name).read_bytes()
    assert [path.name for path in checkpoint_folders(mirror)] == [path.name for path in checkpoint_folders(folder)]


@pytest.mark.slow
def test_where_all_checkpoints_here_are_damaged_the_mirror_s_are_taken(tmp_path):
    folder, mirror = tmp_path / "run", tmp_path / "mirror"
    assert exit_code(crash_runs.finish_mirrored, "ppo", folder, str(mirror), 8) == -signal.SIGKILL
    for checkpoint in checkpoint_folders(folder):
        (checkpoint / "optimizer.pt").unlink()
    assert exit_code(crash_runs.finish_mirrored, "ppo", folder, str(mirror)) == 0
    assert digest_of(folder) == digest_of(uninterrupted("ppo"))


def test_a_mirror_that_can_t_be_written_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    trainer = make_trainer(tmp_path / "out", checkpoint_mirror=str(tmp_path / "file" / "mirror"))
    with pytest.raises(RuntimeError, match="mirror"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_mirror_of_another_run_is_not_written_over(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "checkpoint_mirror": str(tmp_path / "mirror")}

    def train_and_upload(name, **more):
        trainer = make_trainer(tmp_path / name, **settings, **more)
        trainer.train()
        assert trainer._mirror.wait(120) == []

    train_and_upload("one")
    with pytest.raises(RuntimeError, match="another run"):
        train_and_upload("two")
    # A run that starts over deletes the other one's checkpoints there, as in its output_dir.
    (tmp_path / "one" / "checkpoint-1").rename(tmp_path / "mirror" / "checkpoint-9")
    train_and_upload("two", overwrite_output_dir=True)
    assert [path.name for path in checkpoint_folders(tmp_path / "mirror")] == [
        path.name for path in checkpoint_folders(tmp_path / "two")
    ]


def test_a_mirror_that_dies_in_the_middle_does_not_stop_the_run(tmp_path, caplog):
    from transformers import TrainerCallback

    mirror = tmp_path / "mirror"

    class Dies(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                trainer._mirror.wait(30)
                shutil.rmtree(mirror)
                Path(mirror).write_text("")

    settings = {"save_strategy": "steps", "save_steps": 1, "num_rollouts": 4, "checkpoint_mirror": str(mirror)}
    trainer = make_trainer(tmp_path / "out", callbacks=[Dies()], **settings)
    trainer.train()
    assert trainer.state.global_step == 4 and len(checkpoint_folders(tmp_path / "out")) == 4


@pytest.mark.parametrize("verb", ["sft", "ppo"])
def test_a_disk_that_is_full_at_the_start_is_one_sentence(tmp_path, verb):
    make_material(tmp_path)
    assert exit_code(crash_runs.command_limited, tmp_path, words_of(verb)) == 1
    said = (tmp_path / "said.txt").read_text().strip().splitlines()
    assert "cannot be written (File too large); make room there, or" in said[-1]
    assert "Errno" not in said[-1]
