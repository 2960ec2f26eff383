"""How a stage ends that does not end well, and where a run may begin: exit codes, signals, folders that are taken."""

import re
import signal
import subprocess
import sys

import pytest
import torch

from onetrunk.checkpoints.folders import write_manifest
from onetrunk.checkpoints.signals import Stopped
from onetrunk.stages.arguments import SFTArguments
from onetrunk.stages.run_context import explain, run_stage
from tests.processes import environment
from tests.stages.small_runs import run


def ending_with(error, folder=None):
    """Run a stage that raises; with a folder its arguments are those of a training run."""

    def work(*parsed):
        raise error

    def parse(argv):
        return () if folder is None else (SFTArguments(output_dir=str(folder), use_cpu=True),)

    return run_stage("sft", parse, work, [])


def whole_checkpoint(folder, step):
    (folder / f"checkpoint-{step}").mkdir(parents=True)
    (folder / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    write_manifest(folder / f"checkpoint-{step}", step=step)


def test_only_what_nobody_foresaw_leaves_as_an_exception(capsys):
    with pytest.raises(KeyError):
        ending_with(KeyError("x"))
    with pytest.raises(RuntimeError):
        ending_with(RuntimeError("shapes"))
    assert ending_with(OSError("gated")) == 1
    assert "gated (OSError; ONETRUNK_TRACEBACK=1 shows where)" in capsys.readouterr().err
    assert "lower per_device_train_batch_size" in explain(torch.OutOfMemoryError("CUDA out of memory."))


def test_a_training_without_a_terminal_says_in_lines_how_far_it_is(in_folder, tmp_path, capsys):
    options = ["--logging_steps", "1", "--eval_size", "4", "--disable_tqdm", "false", "--output_dir", str(tmp_path)]
    assert run("sft", *options) == 0
    said = r"step 1/2: loss [\d.]+, token accuracy [\d.e-]+; \d\d:\d\d left\nstep 2/2: .*\nevaluation at step 2: loss "
    found = capsys.readouterr()
    assert re.search(said, found.err) and "{'loss'" not in found.out


def test_lines_arrive_at_once_through_a_pipe():
    code = "from onetrunk.utils.redaction import print_any_text as p; p(); print('done 1'); open(0).read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], env=environment(), **pipes) as process:
        assert process.stdout.readline() == "done 1\n"
        process.stdin.close()


def test_an_exit_with_words_says_them_without_secrets(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "canary-of-an-exit")
    assert ending_with(SystemExit("no access with canary-of-an-exit")) == 1
    assert "error: no access with <redacted HF_TOKEN>" in capsys.readouterr().err
    assert ending_with(SystemExit(None)) == 0 and ending_with(SystemExit(3)) == 3
    assert capsys.readouterr().err == ""


def test_ctrl_c_names_a_checkpoint_only_where_one_was_written_to_its_end(tmp_path, capsys):
    assert ending_with(KeyboardInterrupt()) == 130  # An evaluation has none.
    assert capsys.readouterr().err == "\ninterrupted\n"
    assert ending_with(KeyboardInterrupt(), tmp_path) == 130
    said = f"{tmp_path} holds no checkpoint yet, so the next run starts from the beginning"
    assert capsys.readouterr().err == f"\ninterrupted; {said}\n"
    whole_checkpoint(tmp_path, 9)
    whole_checkpoint(tmp_path, 10)
    ending_with(KeyboardInterrupt(), tmp_path)
    assert capsys.readouterr().err.endswith(f"--resume auto resumes from {tmp_path}/checkpoint-10\n")
    (tmp_path / "checkpoint-11").mkdir()
    ending_with(KeyboardInterrupt(), tmp_path)
    assert capsys.readouterr().err.endswith(f"--resume auto resumes from {tmp_path}/checkpoint-10\n")


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 0)])
def test_a_training_that_saved_ends_with_0_but_after_ctrl_c_with_130(tmp_path, capsys, name, code):
    """So `onetrunk ppo ... && onetrunk eval ...` ends at Ctrl-C, and a scheduler sees a clean end."""
    assert ending_with(Stopped("out/checkpoint-2", name), tmp_path) == code
    assert f"stopped ({name}); everything is saved in out/checkpoint-2" in capsys.readouterr().err


WAITING = """
import signal, sys, time
from onetrunk.stages.run_context import run_stage
signal.signal(signal.SIGINT, signal.default_int_handler)  # Ignored where the tests run in the background.
def work(*parsed):
    print("ready", flush=True)
    time.sleep(60)
sys.exit(run_stage("eval", lambda argv: (), work, []))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "inter")]
)
def test_a_signal_ends_a_stage_with_a_sentence_and_its_exit_code(number, code, word):
    process = subprocess.Popen([sys.executable, "-c", WAITING], env=environment(), stdout=-1, stderr=-1, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=1500)
    assert process.returncode == code
    assert word in err and "Traceback" not in err


def test_a_folder_that_holds_a_run_is_not_begun_anew_unless_told(own_material, capsys):
    words = "--save_strategy steps --save_steps 2 --save_total_limit 1 --output_dir out".split()
    out = own_material / "out"
    assert run("sft", *words, "--max_steps", 4) == 0
    before = (out / "checkpoint-4/trainer_state.json").read_bytes()
    capsys.readouterr()
    # Before anything is read: the model is not there.
    assert run("sft", *words, "--model_name_or_path", "nowhere") == 1
    err = capsys.readouterr().err
    assert re.search(r"holds a run already \(checkpoint-2, checkpoint-4, \w+\.json\)", err)
    assert "resume_from_checkpoint" in err and "overwrite_output_dir" in err
    assert (out / "checkpoint-4/trainer_state.json").read_bytes() == before
    # A run that fails before it trains has deleted nothing.
    overwrite = ["--overwrite_output_dir", "true"]
    assert run("sft", *words, *overwrite, "--model_name_or_path", "nowhere") == 1
    assert (out / "checkpoint-4/trainer_state.json").read_bytes() == before
    (out / "reference").mkdir()
    assert run("sft", *words, *overwrite) == 0
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-2"}
    assert not (out / "reference").exists()
