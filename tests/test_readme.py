"""The README's table of what works with what, read cell by cell: "yes" is run here, "refused" raises its sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from transformers import BitsAndBytesConfig

from onetrunk.models.build import build_trunk
from onetrunk.models.trunk_model import TrunkModel
from onetrunk.trainers.ppo_config import PPOConfig
from onetrunk.trainers.setup import check_launch
from tests.models.branches import a_pack, a_trunk, lora, loss_of, move
from tests.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROWS = {
    "fused logprobs": {},
    "value_head shared, detached": {"value_head": "detached"},
    "value_head adapter": {"value_head": "adapter"},
    "adapter_layers top-k": {"adapter_layers": "top-2", "value_head": "adapter"},
}


def table() -> dict[tuple[str, str], str]:
    """Return {(row, column): cell} of the table under "What works with what"."""
    section = README.split("## What works with what")[1].split("\n## ")[0]
    lines = [line.strip().strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    head, _, *body = [[cell.strip() for cell in line] for line in lines]
    return {(row[0], column): cell for row in body for column, cell in zip(head[1:], row[1:], strict=True)}


CELLS = table()
YES = [place for place, cell in CELLS.items() if cell == "yes"]


def test_every_cell_says_yes_or_refused_and_every_row_is_known():
    assert set(CELLS.values()) <= {"yes", "refused"}
    assert {row for row, _ in CELLS} == set(ROWS)


def quantised(settings, tmp_path):
    # Hidden 64: bitsandbytes quantises in blocks of 64.
    tiny_model("llama", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    trunk = build_trunk(tmp_path, lora(), quantization_config=config, **settings)
    move(trunk)
    return trunk


def checkpointing(settings, tmp_path):
    trunk = a_trunk(**settings)
    trunk.activation_checkpointing_enable()
    return trunk


def continued(settings, tmp_path):
    model = get_peft_model(tiny_model("llama"), lora(task_type="CAUSAL_LM"))
    trunk = TrunkModel.from_adapter(model, **settings)
    move(trunk)
    return trunk


BUILDERS = {
    "NF4 / 8-bit base": quantised,
    "activation checkpointing": checkpointing,
    "continued SFT adapter": continued,
    "DoRA": lambda settings, tmp_path: a_trunk(config=lora(use_dora=True), **settings),
    "tied head": lambda settings, tmp_path: a_trunk("qwen2", **settings),
    "soft-capping": lambda settings, tmp_path: a_trunk("gemma2", **settings),
}


@pytest.mark.parametrize("row, column", [place for place in YES if place[1] in BUILDERS])
def test_what_the_readme_says_works_gives_gradients_and_a_ratio_of_one(row, column, tmp_path):
    trunk = BUILDERS[column](ROWS[row], tmp_path)
    with torch.no_grad():
        before = trunk.eval()(pack=a_pack(), roles=("policy", "value", "reference"))
    output = trunk.train()(pack=a_pack(), roles=("policy", "value"))
    assert torch.equal(output.logprobs, before.logprobs) and torch.equal(output.values, before.values)
    assert not torch.equal(before.logprobs, before.ref_logprobs)
    loss_of(output).backward()
    trained = {n: p for n, p in trunk.named_parameters() if p.requires_grad}
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained.values())
    assert any(p.grad.abs().sum() > 0 for p in trained.values())


@pytest.mark.parametrize("row", [row for row, column in YES if column == "DDP"])
def test_what_the_readme_says_of_ddp_has_a_case_of_two_processes(row):
    worker = (ROOT / "tests/models/ddp_worker.py").read_text() + (ROOT / "tests/trainers/two_processes.py").read_text()
    for value in ROWS[row].values():
        assert value in worker or re.sub(r"\d", "", value) in worker, f"no case of two processes has {value}"


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_what_the_readme_says_is_refused_is_refused(kind, tmp_path, monkeypatch):
    assert all(cell == "refused" for (_, column), cell in CELLS.items() if column == "FSDP2 / ZeRO")
    config = PPOConfig(output_dir=str(tmp_path), use_cpu=True)
    monkeypatch.setenv(f"ACCELERATE_USE_{kind}", "true")
    with pytest.raises(ValueError, match="not supported yet; launch with accelerate_configs/ddp.yaml"):
        check_launch(config)
