"""The commands before the first run: `ppo --dry_run`, `doctor` and `python -m onetrunk`."""

import pytest

from onetrunk import cli
from onetrunk.models.build import build_trunk
from onetrunk.stages.ppo import parse_ppo
from onetrunk.stages.tools import doctor
from onetrunk.stages.tools.dry_run import model_size
from tests.stages.small_runs import run, words_of

BATCHES = "--rollout_batch_size 4 --num_generations 2 --num_minibatches 2 --num_ppo_epochs 3 --num_rollouts 5"
BATCHES += " --max_completion_length 8 --per_device_train_batch_size 3 --save_strategy steps --save_steps 6"


def test_a_dry_run_says_what_a_run_would_do_and_writes_nothing(in_folder, capsys):
    before = sorted(in_folder.rglob("*"))
    assert run("ppo", "--dry_run", *BATCHES.split()) == 0
    out = capsys.readouterr().out
    assert sorted(in_folder.rglob("*")) == before
    # 4 prompts x 2 completions on one process; 3 epochs x 2 minibatches; 5 rollouts of 6 steps and 8 completions.
    for part in (
        "4 prompts x 2 completions on 1 process(es): 8 completions each",
        "3 epochs x 2 minibatches of 4 completions per process = 6 optimizer steps per rollout",
        "forward: at most 3 rows",
        "5 rollouts = 30 optimizer steps, 40 completions of at most 8 tokens",
        "8 prompts, of at most 2 tokens",
        "onetrunk plan",
    ):
        assert part in out, part


@pytest.mark.parametrize(("value_head", "layers"), [("shared", "all"), ("adapter", "top-1")])
def test_a_dry_run_counts_the_weights_that_a_run_trains(in_folder, value_head, layers):
    words = words_of("ppo", "--value_head", value_head, "--adapter_layers", layers, "--lora_r", 3)[1:]
    _, args, model_args, *_ = parse_ppo(words)
    trunk = build_trunk("base", model_args.peft_config(), value_head=value_head, adapter_layers=layers)
    base = trunk.get_base_model()
    size = model_size(base.config, model_args.peft_config(), args)
    assert size.trained == sum(weight.numel() for weight in trunk.parameters() if weight.requires_grad)
    frozen = sum(weight.numel() for name, weight in base.named_parameters() if "lora_" not in name)
    assert size.base == frozen and (size.num_layers, size.first_layer) == (2, 0 if layers == "all" else 1)


def test_a_dry_run_finds_what_would_stop_a_run(in_folder, tmp_path, capsys):
    assert run("ppo", "--dry_run", "--adapter_layers", "top-9") == 1
    assert "neither 'all' nor 'top-k' with k from 1 to the model's 2 layers" in capsys.readouterr().err
    assert run("ppo", "--dry_run", "--rollout_batch_size", 4, "--num_minibatches", 3) == 1
    assert "are not divisible by 3 minibatches" in capsys.readouterr().err
    old_run = tmp_path / "old"
    (old_run / "checkpoint-1").mkdir(parents=True)
    assert run("ppo", "--dry_run", "--output_dir", old_run) == 1
    assert "holds a run already (checkpoint-1)" in capsys.readouterr().err


def test_doctor_reports_the_machine_and_how_to_install_what_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(doctor.EXTRAS, "absent_package", "pip install absent")
    code = cli.main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert code == (1 if any(line.startswith("fault") for line in lines) else 0)
    assert any(line.startswith("- PyTorch version") for line in lines)
    (missing,) = [line for line in lines if "absent_package" in line]
    assert missing.startswith("note") and missing.endswith("not installed (optional): pip install absent")


def test_doctor_says_whether_there_is_a_token_and_not_which(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    usage = type("Usage", (), {"free": 2**30})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    *disks, hub = doctor.surroundings()
    assert {finding[0] for finding in disks} == {"note"}
    assert hub[0] == "note" and "hf auth login" in hub[2]
    (tmp_path / "token").write_text("hf_1234567890abcdef")
    *_, hub = doctor.surroundings()
    assert hub[0] == "ok" and "1234567890" not in hub[2]


def test_doctor_finds_a_package_that_is_missing_or_too_old(monkeypatch):
    required = ["absent-package>=1", "pyyaml>=999", "x; extra == 'y'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: required)
    findings = list(doctor.packages())[:2]
    assert [finding[:2] for finding in findings] == [("fault", "absent-package"), ("fault", "pyyaml")]
    assert "pip install 'absent-package>=1'" in findings[0][2] and "pip install 'pyyaml>=999'" in findings[1][2]
