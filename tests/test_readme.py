"""The READMEs: their Python runs, their YAML parses, their links and computed numbers are right.

Every column of the table of what works with what (models/README.md) is run here, with most of the parts together.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from peft import get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from onetrunk.models.build import attach_score_adapter, build_trunk
from onetrunk.models.reward_model import read_score_adapter
from onetrunk.models.trunk import TrunkModel
from onetrunk.parallel.layout import launch_layout
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.setup import check_launch
from onetrunk.stages.ppo import parse_ppo
from tests.models.branches import a_pack, a_trunk, lora, loss_of, move
from tests.models.reward_adapters import saved_base, saved_reward_adapter
from tests.ppo.support import even_share, logged, make_trainer
from tests.rollouts.stub_vllm import StubVLLM
from tests.stages.recipes import DOCUMENTS, ROOT, load_module
from tests.tiny import CHAT_TEMPLATE, tiny_model, tiny_tokenizer

README = (ROOT / "README.md").read_text(encoding="utf-8")
FIGURES = ROOT / "scripts" / "figures"
ROOMS = ROOT / "src" / "onetrunk"
MODELS_README = (ROOMS / "models" / "README.md").read_text(encoding="utf-8")
PPO_README = (ROOMS / "ppo" / "README.md").read_text(encoding="utf-8")
MOST_WORDS = 1300
# Most of the parts that the table under "What works with what" has; states are reused, and the reward is an adapter.
PARTS = {"adapter_layers": "top-2"}


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}


def quantised(tmp_path):
    # Hidden 64: bitsandbytes quantises in blocks of 64.
    tiny_model("llama", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    trunk = build_trunk(tmp_path, lora(), quantization_config=BitsAndBytesConfig(**NF4), **PARTS)
    move(trunk)
    return trunk


def checkpointing(tmp_path):
    trunk = a_trunk(**PARTS)
    trunk.activation_checkpointing_enable()
    return trunk


def continued(tmp_path):
    model = get_peft_model(tiny_model("llama"), lora(task_type="CAUSAL_LM"))
    trunk = TrunkModel.from_adapter(model, **PARTS)
    move(trunk)
    return trunk


def packed(tmp_path):
    trunk = a_trunk(**PARTS)
    trunk.use_padding_free()
    return trunk


BUILDERS = {
    "NF4 / 8-bit base": quantised,
    "activation checkpointing": checkpointing,
    "padding-free packing": packed,
    "continued SFT adapter": continued,
    "DoRA": lambda tmp_path: a_trunk(config=lora(use_dora=True), **PARTS),
    "tied head": lambda tmp_path: a_trunk("qwen2", **PARTS),
    "soft-capping": lambda tmp_path: a_trunk("gemma2", **PARTS),
}
# Run by the tests of their rooms, and below.
ELSEWHERE = {"DDP", "FSDP2", "TP", "vLLM rollouts"}


def test_every_column_of_the_table_is_run():
    section = MODELS_README.split("## What works with what")[1].split("\n## ")[0]
    row = [line for line in section.splitlines() if line.startswith("|")][-1]
    assert set(row.split("|")[2].strip().split("; ")) == ELSEWHERE | BUILDERS.keys()


@pytest.mark.parametrize("column", BUILDERS)
def test_what_the_readme_says_works_gives_gradients_and_a_ratio_of_one(column, tmp_path):
    trunk = BUILDERS[column](tmp_path)
    give_reward_adapter(trunk, tmp_path)
    with torch.no_grad():
        before = trunk.eval()(pack=a_pack(), roles=("policy", "value", "reference", "trunk"))
    output = trunk.train()(pack=a_pack(), roles=("policy", "value"), states=before.states)
    assert torch.equal(output.logprobs, before.logprobs) and torch.equal(output.values, before.values)
    assert not torch.equal(before.logprobs, before.ref_logprobs)
    loss_of(output).backward()
    trained = {n: p for n, p in trunk.named_parameters() if p.requires_grad}
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained.values())
    assert any(p.grad.abs().sum() > 0 for p in trained.values())


def give_reward_adapter(trunk, folder):
    config = trunk.get_base_model().config
    sizes = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size}
    base = saved_base(folder / "rewarded", config.model_type, **sizes)
    has_dora = trunk.peft_config["default"].use_dora
    adapter = saved_reward_adapter(folder / "reward", base, layers=[2, 3], use_dora=has_dora)
    attach_score_adapter(trunk, read_score_adapter(str(adapter)))
    with torch.no_grad():
        states = trunk.eval()(pack=a_pack(), roles=("trunk",)).states
        alone = trunk(pack=a_pack(), roles=("reward",), states=states).scores
        together = trunk(pack=a_pack(), roles=("policy", "value", "reference", "reward")).scores
    assert torch.equal(alone, together) and alone.isfinite().all() and alone.std() > 0


def test_what_the_readme_says_is_rejected_is_rejected(tmp_path, monkeypatch):
    assert "- DeepSpeed ZeRO." in MODELS_README
    config = PPOConfig(output_dir=str(tmp_path), use_cpu=True)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    launch_layout.cache_clear()
    with pytest.raises(ValueError, match="is not supported.*accelerate_configs/fsdp2.yaml"):
        check_launch(config)
    with pytest.raises(ValueError, match="is not supported.*accelerate_configs/fsdp2.yaml"):
        PPOConfig(output_dir=str(tmp_path), use_cpu=True)


def test_what_the_readme_says_of_vllm_trains_on_samples_of_a_server(tmp_path):
    folder = saved_base(tmp_path / "base", num_hidden_layers=2)
    rewards = [even_share, str(saved_reward_adapter(tmp_path / "judge", folder, layers=[1]))]
    base = AutoModelForCausalLM.from_pretrained(folder)
    with StubVLLM(base) as server:
        settings = {"use_vllm": True, "vllm_server_base_url": server.url, "num_ppo_epochs": 2, "num_rollouts": 2}
        settings |= {"adapter_layers": "top-1"}
        trainer = make_trainer(tmp_path / "out", model=base, reward=rewards, **settings)
        trainer.train()
        trainer.sampler.backend.close()
    assert trainer.trunk_plan.cache is not None
    # The server samples from the policy, and the first ratio is still exactly 1.
    assert max(logged(trainer, "sampling/logprob_gap_max")) < 1e-4
    assert logged(trainer, "policy/ratio_max")[0] == 1 and logged(trainer, "kl/ref")[0] == 0


def code_blocks(text: str, language: str) -> list[str]:
    """Return the code blocks of a document in one language."""
    return [textwrap.dedent(block) for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)]


def test_the_python_of_the_readme_runs_as_it_stands_but_for_the_sizes(tmp_path, monkeypatch):
    """Executes the trainer of the README, then the override of ppo/README.md: only names, folder and sizes change."""
    (first,) = code_blocks(README, "python")
    (second,) = code_blocks(PPO_README, "python")
    tiny_model("llama").save_pretrained(tmp_path / "base")
    tiny_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained(tmp_path / "base")
    small = {
        "Qwen/Qwen2.5-0.5B-Instruct": str(tmp_path / "base"),
        "runs/polite": str(tmp_path / "out"),
        "num_rollouts=50": "num_rollouts=1, use_cpu=True",
        "rollout_batch_size=64": "rollout_batch_size=8",
        "max_completion_length=64": "max_completion_length=4",
    }
    for large, tiny in small.items():
        assert large in first
        first = first.replace(large, tiny)
    names: dict = {}
    exec(first, names)
    assert (tmp_path / "out/adapter_model.safetensors").is_file()
    assert list((tmp_path / "out").rglob("events.out.tfevents.*")), "the README promises metrics in TensorBoard"
    exec(second, names)
    before = names["trainer"]
    again = names["ReinforceTrainer"](
        model=tiny_model("llama"),
        reward_funcs=names["short_and_polite"],
        args=replace(before.args, output_dir=str(tmp_path / "again")),
        train_dataset=names["prompts"],
        processing_class=tiny_tokenizer(chat_template=CHAT_TEMPLATE),
    )
    again.train()
    assert again.state.global_step == before.state.global_step > 0


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


FOLDER_EXAMPLES = [
    pytest.param(block, id=f"{relative(path)}-{i}")
    for path in DOCUMENTS
    if path != ROOT / "README.md"
    for i, block in enumerate(code_blocks(path.read_text(encoding="utf-8"), "python"))
]


@pytest.mark.parametrize("block", FOLDER_EXAMPLES)
def test_the_python_of_every_folder_runs(block):
    exec(block, {"__name__": "example"})


def test_the_yaml_of_the_readme_is_a_ppo_config(tmp_path):
    (block,) = code_blocks(README, "yaml")
    path = tmp_path / "first.yaml"
    path.write_text(block)
    settings = yaml.safe_load(block)
    args = next(part for part in parse_ppo(["--config", str(path)]) if isinstance(part, PPOConfig))
    assert (args.num_rollouts, args.output_dir) == (settings["num_rollouts"], settings["output_dir"])


def test_every_link_of_a_document_leads_to_a_file():
    dead = {}
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        links = [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r'(?:src|srcset)="([^"]+)"', text)]
        local = [link.split("#")[0] for link in links if "://" not in link]
        dead[relative(path)] = [link for link in local if link and not (path.parent / link).exists()]
    assert {path: links for path, links in dead.items() if links} == {}


def test_the_readme_is_short_and_leads_to_every_folder_with_a_readme():
    assert len(README.split()) <= MOST_WORDS
    rooms = {path.parent.name for path in ROOMS.glob("*/__init__.py")}
    assert [room for room in rooms if f"  {room}/ " not in README] == []
    assert [room for room in map(relative, ROOMS.glob("*/README.md")) if f"({room})" not in README] == []
    # The gallery lists the recipes (tests/recipes/test_gallery.py).
    assert "(recipes/README.md)" in README and "(recipes/launch/README.md)" in README


def test_the_memory_table_of_the_readme_is_what_its_script_computes():
    memory = load_module(FIGURES / "memory.py")
    assert memory.table() in README
    # Parameters without norms and biases; all of them: 134,515,008 and 8,030,261,248.
    counted = {name: memory.layer_parameters(s) + memory.embedding_parameters(s) for name, s in memory.MODELS.items()}
    assert (counted["SmolLM2-135M"], counted["Llama-3.1-8B"]) == (134_479_872, 8_029_995_008)


def test_the_memory_of_a_model_worked_out_by_hand():
    memory = load_module(FIGURES / "memory.py")
    # Width 8, 2 query heads of 4, 1 key-value head: a layer has 8*4*2*3 + 3*8*16 = 576 weights; 10 words of 8, tied.
    shape = memory.ModelShape(10, 8, 2, 16, 2, 1, 4)
    # Rank 16: inputs plus outputs of q and o (16 each), k and v (12 each), three feed-forward matrices (24 each).
    adapter = 16 * 2 * (2 * 16 + 2 * 12 + 3 * 24)
    cache = 2 * 64 * 1024 * 2 * 1 * 4 * 2
    full = 2 * 576 + 80
    branches = 16 * (adapter + 9) + 4 * (adapter + 8)
    four, lora, qlora = memory.method_bytes(shape).values()
    assert four == 36 * full + cache
    assert lora == 2 * full + branches + cache
    assert qlora == 2 * 576 * memory.NF4 + 2 * 80 + branches + cache


def test_the_drawing_of_the_trunk_is_what_its_script_writes():
    draw = load_module(FIGURES / "draw.py")
    for theme in (draw.LIGHT, draw.DARK):
        path = FIGURES / f"trunk{theme.suffix}.svg"
        assert path.read_text(encoding="utf-8") == draw.trunk_svg(theme)
