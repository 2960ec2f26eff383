"""The README.md beside a saved policy: metadata that the Hub reads, and the facts of the run; nothing private."""

from pathlib import Path

import torch
import yaml
from huggingface_hub import ModelCard
from peft import LoraConfig

import onetrunk
from tests.ppo import support
from tests.ppo.support import base_model, logged, make_trainer, prompts
from tests.tiny import moe, tiny_tokenizer


def from_folder(tmp_path, **settings):
    """Return an untrained trainer whose base lies in a folder, as a user's does."""
    base = tmp_path / "private" / "tiny-base"
    base_model().save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    settings |= {"model": str(base), "tokenizer": None, "eval_dataset": prompts(2)}
    return make_trainer(tmp_path / "private" / "my-run", **settings)


def test_a_saved_run_has_a_card_that_says_what_it_is(tmp_path):
    settings = {"num_rollouts": 2, "num_ppo_epochs": 2, "beta": 0.07, "temperature": 0.9, "adapter_layers": "top-1"}
    trainer = from_folder(tmp_path, eval_strategy="epoch", hub_token="hf_a_secret", **settings)
    trainer.train()
    trainer.save_model()
    folder = tmp_path / "private" / "my-run"
    text = (folder / "README.md").read_text()
    metadata = yaml.safe_load(text.split("---")[1])
    assert metadata == {"library_name": "peft", "pipeline_tag": "text-generation", "tags": ["lora", "onetrunk", "ppo"]}
    assert text.count("# my-run\n") == 1
    assert "the base model `tiny-base`, trained by PPO (4 optimizer steps)" in text
    assert f"with onetrunk {onetrunk.__version__}." in text
    facts = {"rank": "4", "layers trained": "the last 1 of 2", "rewards": "even_share"}
    facts |= {"rollouts": "2 of 4 prompts x 1 completions", "beta": "0.07", "temperature": "0.9", "seed": "3"}
    facts |= {"score/mean": f"{logged(trainer, 'score/mean')[-1]:.4g}"}
    facts |= {"eval_kl/ref": f"{logged(trainer, 'eval_kl/ref')[-1]:.4g}"}
    for name, value in facts.items():
        assert f"| {name} | {value} |\n" in text
    assert "hf_a_secret" not in text and "private" not in text
    assert "[More Information Needed]" not in text


def test_with_a_base_at_a_relative_path_the_lines_run_too_also_in_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = from_folder(Path("."), save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.save_model()
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = trainer.model(input_ids=ids).logits
    for folder in (tmp_path / "private/my-run", tmp_path / "private/my-run/checkpoint-1"):
        monkeypatch.chdir(folder)
        scope = {}
        exec(Path("README.md").read_text().split("```python\n")[1].split("```")[0], scope)
        torch.testing.assert_close(scope["model"](input_ids=ids).logits.detach(), expected, atol=5e-5, rtol=0)
        assert scope["tokenizer"].eos_token == "<eos>"
    text = (tmp_path / "private/my-run/README.md").read_text()
    assert "vllm serve ../tiny-base --enable-lora --max-lora-rank 8 --lora-modules my-run=.\n" in text
    assert str(tmp_path) not in text


def test_a_run_that_adapts_experts_is_saved_with_a_card_and_resumes_exactly(tmp_path):
    def trainer(name):
        experts = LoraConfig(r=2, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
        settings = {"peft_config": experts, "save_strategy": "steps", "save_steps": 1, "num_rollouts": 2}
        return make_trainer(tmp_path / name, model=moe(), **settings)

    whole, _ = support.whole_and_resumed(trainer, 1)
    assert logged(whole, "policy/ratio_max")[0] == 1.0
    text = (tmp_path / "whole" / "checkpoint-2" / "README.md").read_text()
    assert "| targets | down_proj, gate_up_proj |\n" in text and "vllm serve" not in text


def test_a_base_from_the_hub_is_named_in_the_metadata_and_linked(tmp_path):
    model = base_model()
    model.config.name_or_path = model.name_or_path = "someone/tiny-base"
    make_trainer(tmp_path, model=model).save_model()
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model == "someone/tiny-base"
    assert "[someone/tiny-base](https://huggingface.co/someone/tiny-base)" in card.text
    assert "vllm serve someone/tiny-base --enable-lora --max-lora-rank 8 " in card.text
    assert "## Last measured" not in card.text  # nothing was


def test_what_push_to_hub_hands_on_stands_in_the_card(tmp_path):
    trainer = make_trainer(tmp_path, hub_model_id="someone/a-policy")
    trainer.create_model_card(tags="maths", dataset="someone/rows", license="apache-2.0", finetuned_from="a/base")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.tags == ["lora", "maths", "onetrunk", "ppo"]
    assert (card.data.datasets, card.data.license, card.data.base_model) == ("someone/rows", "apache-2.0", "a/base")
    trainer.create_model_card(dataset_name="someone/others")
    assert ModelCard.load(tmp_path / "README.md").data.datasets == "someone/others"
    assert card.text.strip().startswith("# a-policy") and 'from_pretrained("someone/a-policy")' in card.text
