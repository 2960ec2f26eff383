"""Damaged checkpoints: the one before is taken and that is said, or a sentence; never half of one."""

import json
import os
import pickle
import re
from pathlib import Path

import pytest
import torch

from onetrunk.checkpoints.folders import MANIFEST, checkpoint_folders, checkpoint_problems, last_whole
from onetrunk.stages.run_context import explain
from onetrunk.utils.files import load_tensors, save_tensors
from tests.checkpoints.crash_runs import KINDS, digest
from tests.checkpoints.killing import change_json, copied, digest_of, interrupted, uninterrupted, with_new_manifest


def damage(path: Path, kind: str, other: Path) -> bool:
    """Damage a file; return False where that kind would change nothing."""
    content = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "half":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "one bit flipped":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif kind == "of another step":
        if not other.exists() or other.read_bytes() == content:
            return False
        path.write_bytes(other.read_bytes())
    else:
        if path.suffix != ".json":
            return False
        path.write_text(json.dumps([json.loads(content)]))
    return True


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_any_damage_to_any_file_is_found_and_the_checkpoint_before_is_taken(tmp_path):
    first, last = checkpoint_folders(copied(interrupted("ppo"), tmp_path / "run"))
    files = files_of(last)
    assert len(files) >= 10 and {"optimizer.pt", "rng_state.pth", "scheduler.pt", MANIFEST} <= set(files)
    tried = 0
    for name in files:
        whole = (last / name).read_bytes()
        for how in ("missing", "empty", "half", "one bit flipped", "of another step", "another JSON type"):
            if damage(last / name, how, first / name):
                tried += 1
                said = []
                assert last_whole(tmp_path / "run", said.append) == first, (name, how)
                assert len(said) == 1 and f"{last} is damaged and skipped ({name}: " in said[0], (name, how)
            (last / name).write_bytes(whole)
    assert tried > 4 * len(files) and checkpoint_problems(last) == []


def test_a_run_goes_on_from_the_checkpoint_before_and_ends_the_same(tmp_path, caplog):
    folder = copied(interrupted("ppo"), tmp_path / "run")
    first, last = checkpoint_folders(folder)
    assert damage(last / "optimizer.pt", "half", first / "optimizer.pt")
    trainer = KINDS["ppo"](folder)
    trainer.train(resume_from_checkpoint="auto")
    assert digest(trainer) == digest_of(uninterrupted("ppo"))
    assert f"{last} is damaged and skipped (optimizer.pt: " in caplog.text


def test_where_all_are_damaged_the_run_does_not_begin_anew_in_silence(tmp_path):
    folder = copied(interrupted("ppo"), tmp_path / "run")
    for checkpoint in checkpoint_folders(folder):
        (checkpoint / "scheduler.pt").unlink()
    with pytest.raises(RuntimeError, match=r"none of the 2 checkpoints .* is whole .*scheduler.pt: missing"):
        KINDS["ppo"](folder).train(resume_from_checkpoint="auto")


def test_a_damaged_checkpoint_that_is_named_is_rejected(tmp_path):
    last = checkpoint_folders(copied(interrupted("ppo"), tmp_path / "run"))[-1]
    (last / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match=f"{re.escape(str(last))} is damaged .optimizer.pt: missing.; pass another"):
        KINDS["ppo"](tmp_path / "out").train(resume_from_checkpoint=str(last))


def test_a_checkpoint_of_weights_alone_is_refused(tmp_path):
    settings = {"save_only_model": True, "save_strategy": "steps", "save_steps": 2}
    KINDS["sft"](tmp_path / "run", max_steps=2, **settings).train()
    with pytest.raises(ValueError, match="was saved with save_only_model"):
        KINDS["sft"](tmp_path / "run", **settings).train(resume_from_checkpoint="auto")
    with pytest.raises(ValueError, match="save_only_model=True has no meaning here"):
        KINDS["ppo"](tmp_path / "run", **settings)


def test_a_checkpoint_of_another_kind_of_run_is_refused(tmp_path):
    last = checkpoint_folders(copied(interrupted("sft"), tmp_path / "run"))[-1]
    with pytest.raises(ValueError, match="lacks experience_stream.json, value_head.safetensors"):
        KINDS["ppo"](tmp_path / "out").train(resume_from_checkpoint=str(last))


class Bomb:
    """What a hostile pickle does when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("kind", ["ppo", pytest.param("sft", marks=pytest.mark.slow)])
def test_no_file_of_a_checkpoint_can_run_code(tmp_path, kind):
    exploded = tmp_path / "exploded"
    pickle.loads(pickle.dumps(Bomb(exploded)))
    assert exploded.exists()
    exploded.unlink()
    names = [name for name in files_of(checkpoint_folders(interrupted(kind))[-1]) if name != MANIFEST]
    for name in names:
        last = checkpoint_folders(copied(interrupted(kind), tmp_path / name.replace("/", "_")))[-1]
        (last / name).write_bytes(pickle.dumps(Bomb(exploded)))
        with_new_manifest(last)
        try:
            KINDS[kind](tmp_path / "out").train(resume_from_checkpoint=str(last))
        except Exception:
            pass
        else:
            assert not name.endswith((".pt", ".pth", ".safetensors")), name
        assert not exploded.exists(), name


def test_a_link_in_a_checkpoint_is_not_followed(tmp_path):
    first, last = checkpoint_folders(copied(interrupted("ppo"), tmp_path / "run"))
    os.rename(last / "optimizer.pt", tmp_path / "elsewhere.pt")
    (last / "optimizer.pt").symlink_to(tmp_path / "elsewhere.pt")
    assert checkpoint_problems(last) == ["optimizer.pt: a link"]
    manifest = json.loads((first / MANIFEST).read_text())
    manifest["files"]["../../elsewhere.pt"] = manifest["files"]["optimizer.pt"]
    (first / MANIFEST).write_text(json.dumps(manifest))
    assert "is not a file name in the folder" in checkpoint_problems(first)[0]


def of_value_optimizer(change):
    def forge(folder):
        path = folder / "value_optimizer.safetensors"
        tensors = load_tensors(path)
        change(tensors)
        save_tensors(path, tensors)

    return forge


def of_json(name, change):
    return lambda folder: change_json(folder / name, change)


STREAM, LOOP = "experience_stream.json", "loop_state_0.json"
FORGED = {
    "another shape": of_value_optimizer(lambda t: t.update({"0.exp_avg": torch.zeros(3)})),
    "another name": of_value_optimizer(lambda t: t.update({"first": t.pop("0.exp_avg")})),
    "a NaN moment": of_value_optimizer(lambda t: t["0.exp_avg_sq"].fill_(float("nan"))),
    "a list": of_json(STREAM, lambda state: state.update(stream=[1])),
    "a text": of_json(STREAM, lambda state: state["stream"].update(iteration="one")),
    "a giant slot": of_json(STREAM, lambda state: state["stream"].update(slot=10**400)),
    "another step": of_json(STREAM, lambda state: state["stream"].update(iteration=10**9)),
    "no settings": of_json(STREAM, lambda state: state.pop("settings")),
    "a moment of scores": of_json(STREAM, lambda state: state["score_moments"].update(m2="many")),
    "a loss": of_json(LOOP, lambda state: state.update(tr_loss="low")),
    "early stopping": of_json(LOOP, lambda state: state.update(early_stopping=["none"])),
    "no state": of_json(LOOP, lambda state: state.pop("own")),
    "alarms": of_json(LOOP, lambda state: state["own"].update(alarms=3)),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_a_checkpoint_with_forged_content_is_named_in_one_message(tmp_path, forge):
    last = checkpoint_folders(copied(interrupted("ppo"), tmp_path / "run"))[-1]
    forge(last)
    with_new_manifest(last)
    with pytest.raises((RuntimeError, ValueError)) as failure:
        KINDS["ppo"](tmp_path / "run").train(resume_from_checkpoint=True)
    assert last.name in str(failure.value) and explain(failure.value) == str(failure.value)
    assert checkpoint_folders(tmp_path / "run")[-1] == last
