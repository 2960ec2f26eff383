"""`onetrunk sft`, `reward` and `distill` on two processes, through the shipped accelerate configs: the run of one."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from onetrunk import cli
from onetrunk.utils.files import load_tensors
from tests.models.reward_adapters import saved_base
from tests.stages.recipes import ROOT

pytestmark = [pytest.mark.multi_process, pytest.mark.slow]

NOUNS = "cat dog bird fish tree house river stone".split()
# SGD: weights are linear in the gradient, so that no sign of a rounding error decides.
OPTIONS = "--report_to none --activation_checkpointing false --optim sgd --learning_rate 0.1 --max_grad_norm 0".split()
OPTIONS += "--disable_tqdm true --max_steps 4 --save_steps 2 --lr_scheduler_type constant --eval_size 4".split()
OPTIONS += "--model_name_or_path base --use_peft true --lora_r 4 --dtype float32".split()
VERBS = {
    "sft": ["--dataset_name", "texts.jsonl", "--lora_target_modules", "all-linear"],
    "reward": ["--dataset_name", "pairs.jsonl", "--adapter_layers", "top-2"],
    "distill": ["--dataset_name", "pairs.jsonl"],
}
CONFIGS = ["ddp", "fsdp2"]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    saved_base(folder / "base")
    rows = [(NOUNS[i % 8], NOUNS[(i + 3) % 8], i) for i in range(36)]
    # Equally long completions: the mean over the tokens of two processes is then the mean over all.
    write(folder / "texts.jsonl", [{"prompt": f"the {n} ", "completion": f"runs {o} fast ."} for n, o, _ in rows])
    pairs = [{"prompt": f"the {n} ", "chosen": f"runs {n} .", "rejected": f"no {o}", "probability": 0.6 + i % 3 / 10}
             for n, o, i in rows]  # fmt: skip
    write(folder / "pairs.jsonl", pairs)
    return folder


@pytest.fixture(autouse=True)
def in_folder(there, monkeypatch):
    monkeypatch.chdir(there)


def launched(config, verb, *options):
    """Run a stage on two processes; return what it printed."""
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT / "src")}
    files = [str(ROOT / f"accelerate_configs/{config}.yaml"), str(ROOT / f"scripts/{verb}.py")]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", files[0], "--num_processes", "2"]
    command = [*launch, "--main_process_port", "0", files[1], *VERBS[verb], *OPTIONS, *options]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500)


def adapter(folder):
    return load_tensors(folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def alone(there):
    """Run every stage in this process, with the rows of both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(there)
        for verb, data in VERBS.items():
            options = ["--use_cpu", "true", "--per_device_train_batch_size", "4", "--output_dir", f"{verb}-alone"]
            assert cli.main([verb, *data, *OPTIONS, *options]) == 0
    return {verb: adapter(there / f"{verb}-alone") for verb in VERBS}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("verb", VERBS)
def test_two_processes_end_with_the_adapter_of_one(there, alone, verb, config):
    output = f"{verb}-{config}"
    done = launched(config, verb, "--per_device_train_batch_size", "2", "--output_dir", output)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(f"{verb}: saved") == 1
    assert ("the frozen base is sharded over 2 processes" in done.stderr) == (config == "fsdp2")
    found = adapter(there / output)
    assert found.keys() == alone[verb].keys()
    for name, expected in alone[verb].items():
        # The same sums in another order.
        torch.testing.assert_close(found[name], expected, atol=2e-5, rtol=1e-4)
    before = {name for name in found if "lora_B" in name and not found[name].any()}
    assert not before, "nothing was trained"


@pytest.mark.parametrize("verb", VERBS)
def test_a_sharded_run_resumes_bit_for_bit(there, alone, verb):
    whole, resumed = there / f"{verb}-fsdp2", there / f"{verb}-resumed"
    if not whole.exists():
        done = launched("fsdp2", verb, "--per_device_train_batch_size", "2", "--output_dir", whole.name)
        assert done.returncode == 0, done.stderr[-3000:]
    shutil.copytree(whole / "checkpoint-2", resumed / "checkpoint-2")
    options = ["--per_device_train_batch_size", "2", "--output_dir", resumed.name, "--resume", "auto"]
    done = launched("fsdp2", verb, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, expected in adapter(whole).items():
        assert torch.equal(adapter(resumed)[name], expected), name


def test_a_model_whose_weights_all_train_is_rejected_by_name(there):
    done = launched("fsdp2", "sft", "--use_peft", "false", "--output_dir", "whole")
    assert done.returncode == 1
    assert "set use_peft: true, or launch with accelerate_configs/ddp.yaml" in done.stderr
    assert "Traceback" not in done.stderr.split("torch/distributed")[0]
