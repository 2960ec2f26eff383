"""The READMEs: their Python runs, their YAML parses, their links and computed numbers are right.

Every combination in the table of what works with what (models/README.md) is run here.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import textwrap
from dataclasses import replace
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import yaml
from peft import get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import ModelConfig

from onetrunk.models.build import attach_score_adapter, build_trunk
from onetrunk.models.reward_model import read_score_adapter
from onetrunk.models.trunk import TrunkModel
from onetrunk.parallel.sharding import launch_layout
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.setup import check_launch
from onetrunk.stages.ppo import parse_ppo
from tests.models.branches import a_pack, a_trunk, lora, loss_of, move
from tests.models.reward_adapters import saved_base, saved_reward_adapter
from tests.ppo.support import base_model, even_share, logged, make_trainer
from tests.rollouts.stub_vllm import StubVLLM
from tests.stages.recipes import DOCUMENTS
from tests.tiny import CHAT_TEMPLATE, tiny_model, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROOMS = ROOT / "src" / "onetrunk"
MODELS_README = (ROOMS / "models" / "README.md").read_text(encoding="utf-8")
PPO_README = (ROOMS / "ppo" / "README.md").read_text(encoding="utf-8")
MOST_WORDS = 1300
ROWS = {
    "fused logprobs": {},
    "value_head shared, detached": {"value_head": "detached"},
    "value_head adapter": {"value_head": "adapter"},
    "adapter_layers top-k": {"adapter_layers": "top-2", "value_head": "adapter"},
    "trunk cache": {"adapter_layers": "top-2", "value_head": "adapter"},
    "reward adapter": {"adapter_layers": "top-2", "value_head": "adapter"},
}


def combinations() -> list[tuple[str, str]]:
    """Return (part, column) for all that the table under "What works with what" says work with each other."""
    section = MODELS_README.split("## What works with what")[1].split("\n## ")[0]
    *_, cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    parts, columns = (cell.split("; ") for cell in cells)
    return list(product(parts, columns))


YES = combinations()


def test_every_part_of_the_table_is_known():
    assert {part for part, _ in YES} == set(ROWS)


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}


def quantised(settings, tmp_path, **kind):
    # Hidden 64: bitsandbytes quantises in blocks of 64.
    tiny_model("llama", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    trunk = build_trunk(tmp_path, lora(), quantization_config=BitsAndBytesConfig(**(kind or NF4)), **settings)
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


def packed(settings, tmp_path):
    trunk = a_trunk(**settings)
    trunk.use_padding_free()
    return trunk


# With the most parts: states that are reused, adapters and heads of their own.
KEPT = ("trunk cache", "reward adapter")
BUILDERS = {
    "NF4 / 8-bit base": quantised,
    "activation checkpointing": checkpointing,
    "padding-free packing": packed,
    "continued SFT adapter": continued,
    "DoRA": lambda settings, tmp_path: a_trunk(config=lora(use_dora=True), **settings),
    "tied head": lambda settings, tmp_path: a_trunk("qwen2", **settings),
    "soft-capping": lambda settings, tmp_path: a_trunk("gemma2", **settings),
}


@pytest.mark.parametrize("row, column", [place for place in YES if place[0] in KEPT and place[1] in BUILDERS])
def test_what_the_readme_says_works_gives_gradients_and_a_ratio_of_one(row, column, tmp_path):
    check(BUILDERS[column](ROWS[row], tmp_path), row, tmp_path)


@pytest.mark.parametrize("row", KEPT)
def test_what_the_readme_says_of_8_bits_gives_gradients_and_a_ratio_of_one(row, tmp_path):
    check(quantised(ROWS[row], tmp_path, load_in_8bit=True), row, tmp_path)


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


def check(trunk, row, folder):
    keeps_states = row == "trunk cache"
    if row == "reward adapter":
        give_reward_adapter(trunk, folder)
    with torch.no_grad():
        before = trunk.eval()(pack=a_pack(), roles=("policy", "value", "reference", "trunk"))
    states = before.states if keeps_states else None
    assert (states is not None) == keeps_states
    output = trunk.train()(pack=a_pack(), roles=("policy", "value"), states=states)
    assert torch.equal(output.logprobs, before.logprobs) and torch.equal(output.values, before.values)
    assert not torch.equal(before.logprobs, before.ref_logprobs)
    loss_of(output).backward()
    trained = {n: p for n, p in trunk.named_parameters() if p.requires_grad}
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained.values())
    assert any(p.grad.abs().sum() > 0 for p in trained.values())


def test_what_the_readme_says_is_rejected_is_rejected(tmp_path, monkeypatch):
    assert "- DeepSpeed ZeRO." in MODELS_README
    config = PPOConfig(output_dir=str(tmp_path), use_cpu=True)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    launch_layout.cache_clear()
    with pytest.raises(ValueError, match="is not supported.*accelerate_configs/fsdp2.yaml"):
        check_launch(config)
    with pytest.raises(ValueError, match="is not supported.*accelerate_configs/fsdp2.yaml"):
        PPOConfig(output_dir=str(tmp_path), use_cpu=True)


@pytest.mark.parametrize("row", ["reward adapter"])
def test_what_the_readme_says_of_vllm_trains_on_samples_of_a_server(row, tmp_path):
    # Two layers, of which the top one is adapted where ROWS has two of four.
    settings = {name: value.replace("top-2", "top-1") for name, value in ROWS[row].items()}
    base, rewards = base_model(), [even_share]
    if row == "reward adapter":
        folder = saved_base(tmp_path / "base", num_hidden_layers=2)
        rewards.append(str(saved_reward_adapter(tmp_path / "judge", folder, layers=[1])))
        base = AutoModelForCausalLM.from_pretrained(folder)
    with StubVLLM(base) as server:
        settings |= {"use_vllm": True, "vllm_server_base_url": server.url, "num_ppo_epochs": 2, "num_rollouts": 2}
        trainer = make_trainer(tmp_path / "out", model=base, reward=rewards, **settings)
        trainer.train()
        trainer.sampler.backend.close()
    assert (trainer.trunk_plan.cache is not None) == (row in ("trunk cache", "adapter_layers top-k", "reward adapter"))
    # The server samples from the policy, and the first ratio is still exactly 1.
    assert max(logged(trainer, "sampling/logprob_gap_max")) < 1e-4
    assert logged(trainer, "policy/ratio_max")[0] == 1 and logged(trainer, "kl/ref")[0] == 0


def test_tensor_parallelism_is_asked_for_by_the_accelerate_config_alone(tmp_path):
    with pytest.raises(ValueError, match="model_init_kwargs has tp_plan; it may have"):
        make_trainer(tmp_path, model_init_kwargs={"tp_plan": "auto"})


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


def test_the_folders_have_the_examples_of_a_stream_a_backend_and_a_reward():
    assert len(code_blocks(PPO_README, "python")) == 1
    assert len(FOLDER_EXAMPLES) >= 2
    assert "(../../../recipes/extend/backend.py)" in PPO_README


def test_the_yaml_of_padding_free_is_read_by_the_command(tmp_path):
    (block,) = code_blocks(MODELS_README, "yaml")
    path = tmp_path / "packed.yaml"
    needed = {"model_name_or_path": "base", "dataset_name": "rows", "output_dir": str(tmp_path), "use_cpu": True}
    path.write_text(yaml.safe_dump({**needed, "reward_funcs": ["rewards.py:score"], **yaml.safe_load(block)}))
    parts = parse_ppo(["--config", str(path)])
    args, model_args = (next(part for part in parts if isinstance(part, kind)) for kind in (PPOConfig, ModelConfig))
    assert args.padding_free and args.microbatch_tokens == 16384 and args.per_device_train_batch_size == 256
    loads = {"attn_implementation": "flash_attention_2", "dtype": "bfloat16"}
    assert loads.items() <= model_args.init_kwargs().items()


def test_the_yaml_of_the_readme_is_a_ppo_config(tmp_path):
    (block,) = code_blocks(README, "yaml")
    path = tmp_path / "first.yaml"
    path.write_text(block)
    settings = yaml.safe_load(block)
    args = next(part for part in parse_ppo(["--config", str(path)]) if isinstance(part, PPOConfig))
    assert (args.num_rollouts, args.output_dir) == (settings["num_rollouts"], settings["output_dir"])


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_every_link_of_a_document_leads_to_a_file(path):
    text = path.read_text(encoding="utf-8")
    links = [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r'(?:src|srcset)="([^"]+)"', text)]
    local = [link.split("#")[0] for link in links if "://" not in link]
    assert [link for link in local if link and not (path.parent / link).exists()] == []


def test_the_readme_is_short_and_leads_to_every_folder_with_a_readme():
    assert len(README.split()) <= MOST_WORDS
    assert [room for room in map(relative, ROOMS.glob("*/README.md")) if f"({room})" not in README] == []
    assert "(recipes/README.md)" in README
    gallery = (ROOT / "recipes" / "README.md").read_text()
    recipes = [path.parent.name for path in (ROOT / "recipes").glob("*/README.md")]
    assert [
        name
        for name in recipes
        if f"({name}/README.md)" not in gallery and f"(recipes/{name}/README.md)" not in README
    ] == []


def test_the_readme_shows_every_room():
    rooms = {
        path.name for path in ROOMS.iterdir() if (path / "__init__.py").is_file() or (path / "README.md").is_file()
    }
    assert [room for room in rooms if f"  {room}/ " not in README] == []


def load_figure_script(name: str):
    spec = importlib.util.spec_from_file_location(f"figures_{name}", ROOT / "scripts" / "figures" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_memory_table_of_the_readme_is_what_its_script_computes():
    memory = load_figure_script("memory")
    assert memory.table() in README
    # Parameters without norms and biases; all of them: 134,515,008 and 8,030,261,248.
    counted = {name: memory.layer_parameters(s) + memory.embedding_parameters(s) for name, s in memory.MODELS.items()}
    assert (counted["SmolLM2-135M"], counted["Llama-3.1-8B"]) == (134_479_872, 8_029_995_008)


def test_the_memory_of_a_model_worked_out_by_hand():
    memory = load_figure_script("memory")
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


@pytest.mark.parametrize("name", ["trunk.svg", "trunk_dark.svg", "results.svg", "results_dark.svg"])
def test_a_picture_of_the_readme_is_well_formed_and_shown(name):
    path = ROOT / "scripts" / "figures" / name
    assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert f'"scripts/figures/{name}"' in README


def test_the_drawing_of_the_trunk_is_what_its_script_writes():
    draw = load_figure_script("draw")
    for theme in (draw.LIGHT, draw.DARK):
        path = ROOT / "scripts" / "figures" / f"trunk{theme.suffix}.svg"
        assert path.read_text(encoding="utf-8") == draw.trunk_svg(theme)
