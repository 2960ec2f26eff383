"""Folders of runs: checkpoints that are links or of an abandoned course, and results that take the place of others."""

import json

from onetrunk.checkpoints.folders import (
    begin_staging,
    checkpoint_folders,
    checkpoint_problems,
    delete_old_run,
    install,
    publish,
    rotate,
    set_aside_later,
)
from onetrunk.models.loading import is_adapter
from onetrunk.report.runs import read_run
from onetrunk.report.verdict import verdict_of
from tests.checkpoints.hooked_store import make_checkpoint


def test_rotation_leaves_what_a_link_leads_to(tmp_path):
    out, elsewhere = tmp_path / "out", make_checkpoint(tmp_path / "elsewhere", 1)
    for step in (2, 3):
        make_checkpoint(out, step)
    (out / "checkpoint-1").symlink_to(elsewhere)
    assert rotate(out, 2) == [out / "checkpoint-1"]
    assert [folder.name for folder in checkpoint_folders(out)] == ["checkpoint-2", "checkpoint-3"]
    assert not (out / "checkpoint-1").is_symlink() and checkpoint_problems(elsewhere) == []


def test_a_checkpoint_takes_the_place_of_a_link(tmp_path):
    elsewhere = make_checkpoint(tmp_path / "elsewhere", 1)
    target = tmp_path / "out/checkpoint-1"
    new = make_checkpoint(tmp_path / "out/.saving", 1)
    for leads_to in (elsewhere, tmp_path / "nowhere"):
        target.symlink_to(leads_to)
        publish(new, target)
        assert not target.is_symlink() and checkpoint_problems(target) == []
        target.rename(new)
    assert checkpoint_problems(elsewhere) == []


def test_checkpoints_of_an_abandoned_course_are_renamed_each_to_a_name_of_its_own(tmp_path):
    for _ in range(2):
        for step in (1, 2, 3):
            make_checkpoint(tmp_path, step)
        aside = set_aside_later(tmp_path, 1)
        assert [folder.name for folder in checkpoint_folders(tmp_path)] == ["checkpoint-1"]
        assert len(aside) == 2 and all(path.is_dir() for path in aside)
    assert len(list(tmp_path.iterdir())) == 5


def test_what_only_the_result_before_had_goes_and_a_file_of_the_user_stays(tmp_path):
    for names in (["config.json", "chat_template.jinja", "value_head.safetensors"], ["config.json"]):
        (tmp_path / "notes.txt").touch()
        staged = begin_staging(tmp_path) / "result"
        staged.mkdir()
        for name in names:
            (staged / name).write_text("{}")
        install(staged, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "notes.txt", "manifest.json"}


def test_a_model_over_an_adapter_is_read_as_the_model_and_the_other_way_round(tmp_path):
    for name, is_one in (("adapter_config.json", True), ("config.json", False), ("adapter_config.json", True)):
        staged = begin_staging(tmp_path) / "result"
        staged.mkdir()
        (staged / name).write_text("{}")
        install(staged, tmp_path)
        assert is_adapter(str(tmp_path)) == is_one and (tmp_path / name).is_file()
        assert (tmp_path / "config.json").is_file() != is_one


def test_what_was_measured_of_an_old_run_is_not_the_verdict_on_the_next(tmp_path):
    measured = {"held_out": {"accuracy": 0.95, "accuracy_interval": [0.9, 1.0]}}
    (tmp_path / "metrics.json").write_text(json.dumps(measured))
    assert "95.0%" in str(verdict_of(read_run(tmp_path)))
    delete_old_run(tmp_path)
    assert not list(tmp_path.iterdir())
