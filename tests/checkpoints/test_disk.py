"""Disks that fill up, die or belong to somebody else: what was there stays, and one sentence says what to do."""

import json
import shutil
import signal

import pytest

from onetrunk.checkpoints.folders import checkpoint_folders, checkpoint_problems, last_whole
from onetrunk.utils.files import held_folder
from tests.checkpoints import crash_runs
from tests.checkpoints.killing import digest_of, exit_code, resumed_equals_uninterrupted, started, uninterrupted
from tests.places import FORKED
from tests.ppo.support import BEST, StopAt, make_trainer, prompts
from tests.stages.small_runs import make_material, words_of


def names_in(folder):
    return [path.name for path in checkpoint_folders(folder)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "most"), [("ppo", 5_000), ("reward", 0), ("ppo", 40_000)])
def test_a_disk_that_is_full_leaves_the_checkpoints_before(tmp_path, kind, most):
    step = {"ppo": 9, "reward": 6}[kind]
    assert exit_code(crash_runs.finish_limited, kind, tmp_path, step, most) == 0
    error = (tmp_path / "error.txt").read_text()
    assert f"{tmp_path}/checkpoint-{step} could not be written" in error and "bytes are free there" in error
    assert "\n" not in error and "--resume auto" in error
    found = checkpoint_folders(tmp_path)
    assert len(found) == 2 and not any(checkpoint_problems(folder) for folder in found)
    resumed_equals_uninterrupted(kind, tmp_path)


def test_a_limit_of_one_keeps_two_also_beside_the_best(tmp_path):
    trainer = make_trainer(tmp_path, eval_dataset=prompts(3), save_total_limit=1, num_rollouts=4, **BEST)
    trainer.train()
    steps = [int(folder.name.split("-")[-1]) for folder in checkpoint_folders(tmp_path)]
    best = int(trainer.state.best_model_checkpoint.split("-")[-1])
    per_rollout = trainer.state.max_steps // 4
    assert steps == sorted({best, 3 * per_rollout, 4 * per_rollout})


def test_a_folder_has_one_writer_and_a_dead_one_leaves_it(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    ready = FORKED.Event()
    process = started(crash_runs.hold, tmp_path, ready)
    assert ready.wait(60)
    for how in ({"overwrite_output_dir": True}, {}):
        with pytest.raises(RuntimeError, match="is being written by another process"):
            make_trainer(tmp_path, **how).train()
    assert (tmp_path / "checkpoint-1").is_dir()
    process.kill()
    process.join()
    with held_folder(tmp_path), held_folder(tmp_path):
        pass
    make_trainer(tmp_path, overwrite_output_dir=True).train()


@pytest.mark.slow
def test_a_run_whose_disk_died_goes_on_from_its_mirror(tmp_path):
    folder, mirror = tmp_path / "run", tmp_path / "mirror"
    assert exit_code(crash_runs.finish_mirrored, "ppo", folder, str(mirror), 8) == -signal.SIGKILL
    names = names_in(mirror)
    assert names == names_in(folder) and len(names) == 2
    # As if the disk were another one, and then as if it had damaged them all.
    shutil.rmtree(folder / names[0])
    (folder / names[1] / "optimizer.pt").unlink()
    assert exit_code(crash_runs.finish_mirrored, "ppo", folder, str(mirror)) == 0
    assert digest_of(folder) == digest_of(uninterrupted("ppo"))
    # The result is there too, beside as many checkpoints as stay here.
    for name in json.loads((folder / "manifest.json").read_text())["files"]:
        assert (mirror / name).read_bytes() == (folder / name).read_bytes()
    assert names_in(mirror) == names_in(folder)


def test_a_mirror_that_can_t_be_written_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    trainer = make_trainer(tmp_path / "out", checkpoint_mirror=str(tmp_path / "file" / "mirror"))
    with pytest.raises(RuntimeError, match="mirror"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_mirror_of_another_run_is_not_written_over(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "checkpoint_mirror": str(tmp_path / "mirror")}

    def train_and_upload(name, **more):
        make_trainer(tmp_path / name, **settings, **more).train()
        crash_runs.wait_for_mirror(tmp_path / name, tmp_path / "mirror")

    train_and_upload("one")
    with pytest.raises(RuntimeError, match="another run"):
        train_and_upload("two")
    # A run that starts over deletes the other one's checkpoints there, as in its output_dir.
    (tmp_path / "one" / "checkpoint-1").rename(tmp_path / "mirror" / "checkpoint-9")
    train_and_upload("two", overwrite_output_dir=True)
    assert names_in(tmp_path / "mirror") == names_in(tmp_path / "two")


def test_a_run_that_resumes_earlier_no_longer_offers_what_it_gave_up(tmp_path):
    mirror = tmp_path / "mirror"
    settings = {"save_strategy": "steps", "save_steps": 1, "num_rollouts": 4, "checkpoint_mirror": str(mirror)}
    make_trainer(tmp_path / "out", **settings).train()
    crash_runs.wait_for_mirror(tmp_path / "out", mirror)
    trainer = make_trainer(tmp_path / "out", callbacks=[StopAt(2)], save_total_limit=2, **settings)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    crash_runs.wait_for_mirror(tmp_path / "out", mirror)
    assert last_whole(mirror, tell=print).name == "checkpoint-2"


def test_a_mirror_that_dies_in_the_middle_does_not_stop_the_run(tmp_path, caplog):
    mirror = tmp_path / "mirror"

    def dies():
        crash_runs.wait_for_mirror(tmp_path / "out", mirror)
        shutil.rmtree(mirror)
        mirror.write_text("")

    settings = {"save_strategy": "steps", "save_steps": 1, "num_rollouts": 4, "checkpoint_mirror": str(mirror)}
    trainer = make_trainer(tmp_path / "out", callbacks=[crash_runs.AtEndOf(2, dies)], **settings)
    trainer.train()
    assert trainer.state.global_step == 4 and len(checkpoint_folders(tmp_path / "out")) == 4


def test_a_disk_that_is_full_at_the_start_is_one_sentence(tmp_path):
    make_material(tmp_path)
    assert exit_code(crash_runs.command_limited, tmp_path, words_of("ppo")) == 1
    said = (tmp_path / "said.txt").read_text().strip().splitlines()
    assert "cannot be written (File too large); make room there, or" in said[-1]
    assert "Errno" not in said[-1]
