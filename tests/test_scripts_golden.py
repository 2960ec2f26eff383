"""scripts/golden.py: what changed is found, what the clock decides is not compared, and a tree equals itself."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from scripts.golden.comparing import compare, verdict
from tests.processes import ROOT, python

LOG = {"loss": 0.5, "kl/ref": 2.0, "time/generate_s": 1.0, "train_runtime": 9.0, "step": 3}
ROWS = [{"prompt": "the cat", "ids": [4, 1]}, {"prompt": "the dog", "ids": [5, 6, 1]}]


def written(folder: Path, weight: float = 0.25, rows: list = ROWS, names: tuple = ("adapter", "head"), **log) -> Path:
    """Write what a case leaves behind: weights, a log and completions; return its folder."""
    checkpoint = folder / "out" / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    for name in names:
        save_file({"layer": np.array([1.0, weight], dtype=np.float32)}, folder / "out" / f"{name}.safetensors")
    (checkpoint / "trainer_state.json").write_text(json.dumps({"log_history": [LOG | log]}))
    (folder / "completions-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize(
    ("changed", "tolerance", "is_equal"),
    [
        ({}, 0.0, True),
        ({"time/generate_s": 7.0, "train_runtime": 1.0}, 0.0, True),
        ({"rows": ROWS[::-1]}, 0.0, True),
        ({"weight": 0.25 + 2**-25}, 0.0, False),
        ({"weight": 0.25 + 2**-25}, 1e-6, True),
        ({"weight": np.nan}, 1e-6, False),
        ({"loss": 0.5001}, 1e-6, False),
        ({"kl/ref": 2.000001}, 1e-6, True),
        ({"new": 1.0}, 1e-6, False),
        ({"rows": [ROWS[0], ROWS[1] | {"ids": [5, 7, 1]}]}, 1e-6, False),
        ({"names": ("adapter",)}, 1e-6, False),
    ],
)
def test_only_what_a_case_computes_must_be_equal(tmp_path, changed, tolerance, is_equal):
    passes, text = verdict(compare(written(tmp_path / "base"), written(tmp_path / "new", **changed)), tolerance)
    assert passes == is_equal and text.startswith(("equal", "max") if is_equal else "DIFFERS"), text


def test_a_base_without_results_is_no_success(tmp_path):
    (tmp_path / "base").mkdir()
    with pytest.raises(ValueError, match="has no results to compare"):
        compare(tmp_path / "base", written(tmp_path / "new"))


@pytest.mark.slow
def test_a_tree_computes_what_its_own_commit_computes_and_the_results_of_the_commit_are_kept(tmp_path):
    # A commit of the tree as it is, changes included; nothing if there are none.
    words = ["git", "-c", "user.name=golden", "-c", "user.email=golden@localhost", "stash", "create"]
    base = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip() or "HEAD"
    for cases in (["plan", "ppo-top-layer"], ["plan"]):
        done = python("scripts/golden.py", base, "--cache", tmp_path, "--only", *cases, cwd=ROOT)
        assert f"{len(cases)} of {len(cases)} cases are equal" in done.stdout
    assert len(list(tmp_path.glob("*/plan-*/seconds.json"))) == 1


def test_an_unknown_commit_is_one_message():
    said = python("scripts/golden.py", "no-such-commit", code=2, cwd=ROOT).stderr
    assert "no-such-commit is not a commit" in said and "Traceback" not in said
