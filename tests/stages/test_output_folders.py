"""The output folder of every stage: odd ones are one sentence, and two processes never share one."""

import shutil
import subprocess
import sys
import time

import pytest
from filelock import FileLock

from onetrunk import cli
from tests.processes import environment
from tests.stages.small_runs import OWN, error_of, run, words_of

NOWHERE = ["--model_name_or_path", "./nowhere"]
STAGES = tuple(OWN)
pytestmark = pytest.mark.usefixtures("in_folder")


# What is odd -> the name below a folder with a file and a dangling link, or a path; what is said.
ODD = {
    "a file": ("file", "is a file; name a folder, or move the file away"),
    "below a file": ("file/out", "cannot be written (Not a directory)"),
    "a mount that takes no files": ("/proc/onetrunk", "cannot be written ("),
    "a link to nothing": ("dangling", "cannot be written ("),
    "very long": ("x" * 5000, "cannot be written (File name too long)"),
    "the root": ("/../", "name a folder of the run's own"),
}


@pytest.mark.parametrize(("kind", "verb"), zip(ODD, STAGES, strict=True))
def test_an_odd_output_folder_is_refused_before_anything_else(tmp_path, capsys, kind, verb):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone" / "further")
    name, said = ODD[kind]
    assert run(verb, *NOWHERE, "--output_dir", tmp_path / name) == 1
    line = error_of(capsys)
    assert said in line and len(line) < 800


def test_so_is_that_of_a_pipeline(tmp_path, capsys):
    (tmp_path / "eval.yaml").write_text("output_dir: out\nmodel_name_or_path: base\ndataset_name: prompts.jsonl\n")
    (tmp_path / "pipeline.yaml").write_text(f"output_dir: /\nstages: {{eval: {{config: {tmp_path}/eval.yaml}}}}\n")
    assert cli.main(["run", str(tmp_path / "pipeline.yaml")]) in (1, 2)
    error_of(capsys)


def test_a_folder_may_have_any_name_that_the_file_system_takes(tmp_path):
    name = "-Füße\n日本 a'quote\" %s{}"
    assert run("sft", f"--output_dir={tmp_path / name}") == 0
    assert any((tmp_path / name).iterdir())


@pytest.mark.slow
def test_a_second_process_on_a_folder_is_refused_at_once_and_told_who_is_there(material, tmp_path, capsys):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "onetrunk.cli", *words_of("sft", "--max_steps", "100000", "--output_dir", out)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    first = subprocess.Popen(command, env=environment(), cwd=material, **quiet)
    try:
        while not (out / "_report" / "run.json").exists():  # Written when the training begins, long after the lock.
            assert first.poll() is None
            time.sleep(0.05)
        for verb in STAGES:
            assert run(verb, *NOWHERE, "--output_dir", out) == 1
            said = error_of(capsys)
            assert "_run is being written by another process" in said
    finally:
        first.terminate()
        first.wait(timeout=60)


def test_a_second_process_on_a_pipeline_is_refused(material, tmp_path, capsys):
    shutil.copy(material / "prompts.jsonl", tmp_path)
    (tmp_path / "eval.yaml").write_text(
        f"output_dir: {tmp_path}/out\nmodel_name_or_path: base\ndataset_name: prompts.jsonl\nreward_funcs: [len]\n"
    )
    (tmp_path / "pipeline.yaml").write_text(
        f"output_dir: {tmp_path}/state\nstages:\n  eval:\n    config: {tmp_path}/eval.yaml\n"
    )
    (tmp_path / "state").mkdir()
    with FileLock(tmp_path / "state" / "pipeline.json.lock"):
        assert cli.main(["run", str(tmp_path / "pipeline.yaml")]) == 1
    assert "pipeline.json is being written by another process" in error_of(capsys)
