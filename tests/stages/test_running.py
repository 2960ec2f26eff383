"""How a stage ends that does not end well, and where a run may begin: exit codes, signals, folders that are taken."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from onetrunk import cli
from onetrunk.checkpoints.folders import write_manifest
from onetrunk.checkpoints.signals import Stopped
from onetrunk.stages.arguments import SFTArguments
from onetrunk.stages.ppo import parse_ppo
from onetrunk.stages.run_context import explain, run_stage
from tests.stages.recipes import ROOT
from tests.tiny import tiny_model, tiny_tokenizer


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
    assert (
        capsys.readouterr().err
        == f"\ninterrupted; {tmp_path} holds no checkpoint yet, so the next run starts from the beginning\n"
    )
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


def test_a_usage_error_is_exit_code_2_and_two_lines(capsys):
    assert run_stage("ppo", parse_ppo, print, ["--learning_ra", "1"]) == 2
    error, options = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and options == "all options: onetrunk ppo --help"


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
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen([sys.executable, "-c", WAITING], env=env, stdout=-1, stderr=-1, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=1500)
    assert process.returncode == code
    assert word in err and "Traceback" not in err


# --- where a run may begin ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama", num_hidden_layers=2).save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    rows = [{"prompt": f"the {w}", "completion": " runs fast"} for w in ("cat", "dog", "bird", "fish")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text("def short(completions, **kwargs):\n    return [-len(c) for c in completions]\n")
    return folder


def stage(base, verb, out, *options):
    words = ["--model_name_or_path", base / "base", "--dataset_name", base / "rows.jsonl", "--output_dir", out]
    words += ["--use_cpu", "true", "--save_strategy", "steps", "--save_steps", "2", "--report_to", "none"]
    words += ["--disable_tqdm", "true"]
    if verb == "ppo":
        words += ["--reward_funcs", f"{base}/reward.py:short", "--rollout_batch_size", "4", "--num_ppo_epochs", "2"]
        words += ["--max_completion_length", "4", "--lora_r", "2"]
    return cli.main([verb, *map(str, words), *options])


PLANS = {"sft": ["--max_steps", "2"], "ppo": ["--num_rollouts", "1"]}
LONGER = {"sft": ["--max_steps", "4"], "ppo": ["--num_rollouts", "2"]}


def test_a_folder_that_holds_a_run_is_not_begun_anew_unless_told(tmp_path, base, capsys):
    verb = "sft"
    assert stage(base, verb, tmp_path, *LONGER[verb], "--save_total_limit", "1") == 0
    before = (tmp_path / "checkpoint-4/trainer_state.json").read_bytes()
    capsys.readouterr()
    # Before anything is read: the model is not there.
    assert stage(base, verb, tmp_path, *PLANS[verb], "--model_name_or_path", "nowhere") == 1
    err = capsys.readouterr().err
    assert re.search(r"holds a run already \(checkpoint-2, checkpoint-4, \w+\.json\)", err)
    assert "resume_from_checkpoint" in err and "overwrite_output_dir" in err
    assert (tmp_path / "checkpoint-4/trainer_state.json").read_bytes() == before
    # A run that fails before it trains has deleted nothing.
    overwrite = ["--overwrite_output_dir", "true"]
    assert stage(base, verb, tmp_path, *overwrite, "--model_name_or_path", "nowhere") == 1
    assert (tmp_path / "checkpoint-4/trainer_state.json").read_bytes() == before
    (tmp_path / "reference").mkdir()
    assert stage(base, verb, tmp_path, *PLANS[verb], *overwrite, "--save_total_limit", "1") == 0
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2"}
    assert not (tmp_path / "reference").exists()


def test_a_finished_run_that_is_resumed_says_that_nothing_is_left(tmp_path, base, capsys, caplog):
    verb = "ppo"
    assert stage(base, verb, tmp_path, *PLANS[verb]) == 0
    capsys.readouterr()
    resume = ["--resume_from_checkpoint", "true"]
    assert stage(base, verb, tmp_path, *PLANS[verb], *resume) == 0
    said = capsys.readouterr().out + caplog.text
    assert "nothing is left to train" in said and "is finished at step 2" in said and "to train on" in said
    assert not (tmp_path / "checkpoint-3").exists()
    assert stage(base, verb, tmp_path, *LONGER[verb], *resume, "--overwrite_output_dir", "true") == 0
    assert (tmp_path / "checkpoint-2").is_dir() and (tmp_path / "checkpoint-4").is_dir()
