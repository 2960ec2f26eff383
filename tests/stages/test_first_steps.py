"""The commands before the first run: `ppo --dry_run`, `init`, `doctor`, and `python -m onetrunk`."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from onetrunk import cli
from onetrunk.models.build import build_trunk
from onetrunk.stages import doctor, init
from onetrunk.stages.dry_run import model_size
from onetrunk.stages.ppo import parse_ppo
from tests.stages.recipes import ROOT
from tests.stages.small_runs import make_material, run, words_of


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    folder = tmp_path_factory.mktemp("material")
    make_material(folder)
    return folder


@pytest.fixture
def in_folder(material, monkeypatch, tmp_path):
    monkeypatch.chdir(material)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return material


BATCHES = {
    "rollout_batch_size": 4, "num_generations": 2, "num_minibatches": 2, "num_ppo_epochs": 3, "num_rollouts": 5,
    "max_completion_length": 8, "per_device_train_batch_size": 3,
}  # fmt: skip


def dry_words(**settings):
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def test_a_dry_run_says_what_a_run_would_do_and_writes_nothing(in_folder, capsys):
    before = sorted(in_folder.rglob("*"))
    assert run("ppo", "--dry_run", "--save_strategy", "steps", "--save_steps", 6, *dry_words(**BATCHES)) == 0
    out = capsys.readouterr().out
    assert sorted(in_folder.rglob("*")) == before
    # 4 prompts x 2 completions on one process; 3 epochs x 2 minibatches; 5 rollouts of 6 steps and 8 completions.
    for part in (
        "4 prompts x 2 completions on 1 process(es): 8 completions each",
        "3 epochs x 2 minibatches of 4 completions per process = 6 optimizer steps per rollout",
        "forward: at most 3 rows",
        "5 rollouts = 30 optimizer steps, 40 completions of at most 8 tokens",
        "out-ppo (does not exist yet)",
        "out-ppo/checkpoint-*: every 6 optimizer steps",
        "reward.py:short",
        "estimated peak",
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


def test_a_dry_run_finds_what_would_stop_a_run(in_folder, capsys):
    assert run("ppo", "--dry_run", "--adapter_layers", "top-9") == 1
    assert "neither 'all' nor 'top-k' with k from 1 to the model's 2 layers" in capsys.readouterr().err
    assert run("ppo", "--dry_run", "--rollout_batch_size", 4, "--num_minibatches", 3) == 1
    assert "are not divisible by 3 minibatches" in capsys.readouterr().err


@pytest.mark.parametrize("gpu_gib", [0, 24])
def test_init_writes_a_recipe_that_a_dry_run_takes(in_folder, tmp_path, monkeypatch, capsys, gpu_gib):
    folder = tmp_path / "first"
    words = ["init", str(folder), "--model", "base", "--data", "prompts.jsonl", "--gpu_gib", str(gpu_gib)]
    assert cli.main(words) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["ppo.yaml", "rewards.py"]
    config = yaml.safe_load((folder / "ppo.yaml").read_text())
    assert config["dtype"] == ("bfloat16" if gpu_gib else "float32") and "load_in_4bit" not in config
    capsys.readouterr()
    assert cli.main(["ppo", "--config", str(folder / "ppo.yaml"), "--dry_run", "--eval_size", "2"]) == 0
    assert "100 rollouts = 1600 optimizer steps" in capsys.readouterr().out
    # Nothing of the user's is written over.
    assert cli.main(words) == 1 and "exists; name another folder" in capsys.readouterr().err


def test_the_reward_that_init_writes_scores_texts_and_messages(tmp_path, monkeypatch):
    scope = {}
    exec(init.REWARD_FILE, scope)
    assert scope["score"]([""] * 3, ["a b a b", "a b", ""]) == [0.5, 1.0, 0.0]
    assert scope["score"]([[]], [[{"role": "assistant", "content": "A a"}]]) == [0.5]


@pytest.mark.parametrize(
    ("model", "gpu_gib", "is_4bit"),
    [("Qwen/Qwen2.5-7B-Instruct", 24, True), ("Qwen/Qwen2.5-7B-Instruct", 80, False), ("x/SmolLM2-135M", 8, False)],
)
def test_init_loads_in_4_bit_what_would_fill_half_of_the_gpu(tmp_path, monkeypatch, model, gpu_gib, is_4bit):
    # 7e9 weights x 2 bytes are 13.0 GiB: more than half of 24, less than half of 80.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    assert cli.main(["init", "new", "--model", model, "--data", "rows.jsonl", "--gpu_gib", str(gpu_gib)]) == 0
    config = yaml.safe_load((tmp_path / "new" / "ppo.yaml").read_text())
    assert config.get("load_in_4bit", False) is is_4bit


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        ([], "the following arguments are required", 2),
        (["new", "--model", "m/m", "--data", "d/d", "--gpu_gib", "-1"], "give the memory of one GPU", 2),
    ],
)
def test_init_writes_nothing_after_a_mistake(tmp_path, monkeypatch, capsys, words, message, code):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", *words]) == code
    assert message in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_doctor_reports_and_names_the_mending_command(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setitem(doctor.EXTRAS, "absent_package", ("a test", "pip install absent"))
    code = cli.main(["doctor"])
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert code == (1 if any(line.startswith("fault") for line in lines) else 0)
    assert any(line.startswith("ok    python") for line in lines)
    missing = next(i for i, line in enumerate(lines) if "absent_package" in line)
    assert lines[missing].startswith("note") and lines[missing + 1].strip() == "-> pip install absent"
    login = next(i for i, line in enumerate(lines) if line.startswith("note  hub"))
    assert lines[login + 1].strip() == "-> hf auth login"
    (tmp_path / "token").write_text("hf_1234567890abcdef")
    assert doctor.hub_login().status == "ok" and "1234567890" not in doctor.hub_login().text


def test_doctor_finds_a_package_that_is_missing_or_too_old(monkeypatch):
    monkeypatch.setattr(
        doctor.metadata, "requires", lambda name: ["absent-package>=1", "pyyaml>=999", "x; extra == 'y'"]
    )
    findings = list(doctor.packages())
    assert [(f.status, f.subject) for f in findings] == [("fault", "absent-package"), ("fault", "pyyaml")]
    assert findings[0].mend == "pip install 'absent-package>=1'" and "does not fit >=999" in findings[1].text


def test_doctor_warns_of_a_full_disk(monkeypatch):
    usage = type("Usage", (), {"free": 2**30})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    assert {finding.status for finding in doctor.disk()} == {"note"}


def test_the_module_is_the_command():
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "onetrunk", "--version"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0 and process.stdout.startswith("onetrunk ")


def test_the_size_of_a_model_comes_from_its_config(tmp_path):
    config = {
        "model_type": "llama",
        "vocab_size": 10,
        "hidden_size": 4,
        "num_hidden_layers": 3,
        "intermediate_size": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 2}))
    words = type("Words", (), {"folder": "f", "model": str(tmp_path), "data": "d", "reward": None, "gpu_gib": 8.0})
    words.billions = None
    recipe = init.recipe_of(words)
    # 3 layers of 4*2*2*(2+2) attention and 3*4*8 feed-forward weights, and a tied embedding of 10*4.
    assert recipe.num_layers == 3 and recipe.billions == pytest.approx((3 * (64 + 96) + 40) / 1e9)
