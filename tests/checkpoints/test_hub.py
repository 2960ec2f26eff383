"""What `push_to_hub` leaves on the Hub: the adapter where PEFT and vLLM look for it, and the value head beside it."""

import pytest
from safetensors.torch import load

from tests.checkpoints.hub_stub import stand_in
from tests.ppo.support import make_trainer, sft_model

BRANCHES = ("adapter_model.safetensors", "adapter_config.json", "value_head.safetensors", "tokenizer.json")
REFERENCE = ("reference/adapter_model.safetensors", "reference/adapter_config.json")


@pytest.mark.slow
def test_a_push_carries_all_branches_and_no_base(tmp_path, monkeypatch):
    settings = {"push_to_hub": True, "hub_model_id": "someone/out", "hub_strategy": "every_save"}
    settings |= {"save_strategy": "steps", "save_steps": 1, "num_rollouts": 2, "hub_always_push": True}
    with stand_in(monkeypatch) as hub:
        trainer = make_trainer(tmp_path, model=sft_model(), **settings)
        trainer.train()
        trainer.push_to_hub()
    for name in (*BRANCHES, *REFERENCE, "README.md"):
        assert name in hub.files, sorted(hub.files)
    assert not [name for name in hub.files if "checkpoint-" in name]
    for name in ("adapter_model.safetensors", "value_head.safetensors", REFERENCE[0]):
        assert hub.files[name] == (tmp_path / name).read_bytes()
    tensors = load(hub.files["adapter_model.safetensors"])
    assert tensors and all("lora_" in key for key in tensors)
    assert {"moments", "weight", "bias"} < set(load(hub.files["value_head.safetensors"]))
    card = hub.files["README.md"].decode()
    assert "- onetrunk" in card and "- ppo" in card
    progress = [paths for summary, paths in hub.commits if summary.startswith("Training in progress")]
    assert progress and {*BRANCHES[:3], *REFERENCE} <= {path for paths in progress for path in paths}
