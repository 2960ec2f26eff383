"""What `push_to_hub` leaves on the Hub: the adapter where PEFT and vLLM look for it, and the value head beside it."""

import os
import subprocess
import sys

import pytest
from safetensors.torch import load

from tests.checkpoints.hub_stub import HubStub
from tests.processes import environment

# In a process of its own: huggingface_hub reads its settings once, when it is imported.
SCRIPT = """
import sys
import torch
torch.set_num_threads(1)
from tests.ppo.support import make_trainer, sft_model

settings = {"push_to_hub": True, "hub_model_id": "someone/out", "hub_token": "hf_none"}
settings |= {"save_strategy": "steps", "save_steps": 1, "num_rollouts": 2, "hub_strategy": "every_save"}
settings |= {"hub_always_push": True}
trainer = make_trainer(sys.argv[1], model=sft_model(), **settings)
trainer.train()
trainer.push_to_hub()
"""
BRANCHES = ("adapter_model.safetensors", "adapter_config.json", "value_head.safetensors", "tokenizer.json")
REFERENCE = ("reference/adapter_model.safetensors", "reference/adapter_config.json")


@pytest.fixture
def hub():
    with HubStub() as stub:
        yield stub


def push(hub, folder):
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env |= {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
    env |= {"HF_HOME": str(folder / "home"), "PYTHONPATH": environment()["PYTHONPATH"]}
    command = [sys.executable, "-c", SCRIPT, str(folder / "out")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
def test_a_push_carries_all_branches_and_no_base(tmp_path, hub):
    push(hub, tmp_path)
    for name in (*BRANCHES, *REFERENCE, "README.md"):
        assert name in hub.files, sorted(hub.files)
    assert not [name for name in hub.files if "checkpoint-" in name]
    local = tmp_path / "out"
    for name in ("adapter_model.safetensors", "value_head.safetensors", REFERENCE[0]):
        assert hub.files[name] == (local / name).read_bytes()
    tensors = load(hub.files["adapter_model.safetensors"])
    assert tensors and all("lora_" in key for key in tensors)
    assert {"moments", "weight", "bias"} < set(load(hub.files["value_head.safetensors"]))
    card = hub.files["README.md"].decode()
    assert "- onetrunk" in card and "- ppo" in card
    progress = [paths for summary, paths in hub.commits if summary.startswith("Training in progress")]
    assert progress and {*BRANCHES[:3], *REFERENCE} <= {path for paths in progress for path in paths}
