"""Checkpoint folders that are links, of which only the link is deleted, and those of an abandoned course."""

from onetrunk.checkpoints.folders import checkpoint_folders, checkpoint_problems, publish, rotate, set_aside_later
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
