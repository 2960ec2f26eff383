"""The riskiest path first, on canned completions: each kind of trunk under Trainer, killed in mid-rollout and resumed.

What must hold: the first ratio is exactly 1, the base stays bitwise, and killed-and-resumed equals uninterrupted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve()
KINDS = ["nf4"]
VOLATILE = ("time/", "throughput/", "memory/", "train_", "total_flos")

SCRIPT = """
import hashlib, json, os, signal, sys
import torch
from datasets import Dataset
from transformers import BitsAndBytesConfig, TrainerCallback
from onetrunk import PPOConfig, PPOTrainer
from tests.fakes import CannedBackend
from tests.tiny import WORDS, tiny_model, tiny_tokenizer

kind, folder, kill_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)


class KillAfterSave(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        if state.global_step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def even(prompts, completions, completion_ids=None, **columns):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


base = tiny_model("llama", hidden_size=64)
model, quantization = base, None
if kind == "nf4":
    base.save_pretrained(folder + "/base")
    model = folder + "/base"
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
args = PPOConfig(
    output_dir=folder + "/out", use_cpu=True, rollout_batch_size=8, num_rollouts=2, max_completion_length=6,
    num_ppo_epochs=2, num_minibatches=2, per_device_train_batch_size=2, learning_rate=1e-2, seed=5, save_steps=1,
    bf16=kind == "bf16", activation_checkpointing=kind == "checkpointing", kl_target=1.0, normalize_scores=True,
    disable_tqdm=True, report_to="none",
)
rows = Dataset.from_dict({"prompt": [" ".join(WORDS[i : i + 1 + i % 3]) for i in range(8)]})
trainer = PPOTrainer(
    model, even, args, rows, processing_class=tiny_tokenizer(), callbacks=[KillAfterSave()],
    quantization_config=quantization, rollout_backend=CannedBackend(),
)


def digest(only_base):
    whole = hashlib.sha256()
    for name, tensor in sorted(trainer.model.state_dict().items()):
        if ("lora_" in name or "value_head" in name) != only_base and torch.is_tensor(tensor):
            whole.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


before = digest(only_base=True)
trainer.train(resume_from_checkpoint=os.path.isdir(folder + "/out/checkpoint-1") or None)
moments = trainer.optimizer.state_dict()["state"]
optimizer = hashlib.sha256()
for number in sorted(moments):
    for name in sorted(moments[number]):
        optimizer.update(moments[number][name].float().numpy().tobytes())
print(json.dumps({
    "base_kept": before == digest(only_base=True), "branches": digest(only_base=False),
    "optimizer": optimizer.hexdigest(), "log": trainer.state.log_history,
}))
"""


def run(kind: str, folder: Path, kill_at: int = -1) -> subprocess.CompletedProcess:
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, kind, str(folder), str(kill_at)],
        cwd=HERE.parents[2],
        env={**os.environ, "PYTHONPATH": f"{HERE.parents[2]}/src:{HERE.parents[2]}"},
        capture_output=True,
        text=True,
        timeout=1500,
    )


def result(done: subprocess.CompletedProcess) -> dict:
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def steady(log: list[dict]) -> list[dict]:
    """The log without what depends on the clock."""
    return [{k: v for k, v in entry.items() if not k.startswith(VOLATILE)} for entry in log]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_in_mid_rollout_and_resumed_equals_uninterrupted(kind, tmp_path):
    whole = result(run(kind, tmp_path / "whole"))
    killed = run(kind, tmp_path / "killed", kill_at=3)
    assert killed.returncode == -9, "the run was to die by SIGKILL in the middle of its first rollout"
    resumed = result(run(kind, tmp_path / "killed"))

    assert whole["base_kept"] and resumed["base_kept"]
    assert resumed["branches"] == whole["branches"]
    assert resumed["optimizer"] == whole["optimizer"]
    assert steady(resumed["log"]) == steady(whole["log"])
    firsts = [entry for entry in whole["log"] if entry.get("step") in (1, 5)]
    assert [entry["policy/ratio_max"] for entry in firsts] == [1.0, 1.0]
    assert [entry["kl/approx"] for entry in firsts] == [0.0, 0.0]
    assert firsts[0]["kl/ref"] == 0.0
