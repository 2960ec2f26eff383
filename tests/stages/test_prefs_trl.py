"""The rows of `onetrunk prefs` are what TRL's own trainers take, and hold nothing that these would use unasked."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

from onetrunk import cli
from onetrunk.data.files import load_rows
from tests.tiny import CHAT_TEMPLATE, tiny_model, tiny_tokenizer

CHECKS = "def longer(completions, **columns):\n    return [float(len(str(c))) / 40 for c in completions]\n"
WORDS = "cat dog bird fish tree house river stone".split()
SETTINGS = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 1, "save_strategy": "no"}
SETTINGS |= {"per_device_train_batch_size": 4, "max_length": 48, "gradient_checkpointing": False}


def made(folder):
    """Return the rows that the verb makes of given pairs of conversations."""
    rows = []
    for number, word in enumerate(WORDS):
        texts = ["runs fast", "runs" + " fast" * (1 + number % 3) + " the tree"]
        rows.append({"prompt": [{"role": "user", "content": f"the {word}"}], "completions": texts})
    (folder / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "checks.py").write_text(CHECKS)
    (folder / "c.yaml").write_text("name: t\nprinciples:\n  - {text: longer, tags: [longer]}\n")
    words = "--completions given --dataset_name given.jsonl --constitution c.yaml --judge rubric".split()
    words += ["--rubric", '{"longer": "checks.py:longer"}', "--output_dir", "out"]
    assert cli.main(["prefs", *words]) == 0
    return load_rows(folder / "out/data")


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_model("llama", num_hidden_layers=2).save_pretrained("base")


def test_a_reward_trainer_of_trl_finds_no_margin(tmp_path):
    rows = made(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained("base", num_labels=1)
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    model.config.pad_token_id = tokenizer.pad_token_id
    args = RewardConfig(output_dir=str(tmp_path / "rm"), **SETTINGS)
    trainer = RewardTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    assert "margin" not in batch and len(batch["input_ids"]) == 2 * 4
    with torch.no_grad():
        loss, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
        chosen, rejected = outputs.logits.squeeze(-1).chunk(2)
    # Their plain loss: -log sigmoid of the lead.
    torch.testing.assert_close(loss, -torch.nn.functional.logsigmoid(chosen - rejected).mean())


@pytest.mark.slow
def test_a_dpo_trainer_of_trl_trains_on_the_rows(tmp_path):
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    pairs = made(tmp_path)
    args = DPOConfig(output_dir=str(tmp_path / "dpo"), **SETTINGS)
    model = AutoModelForCausalLM.from_pretrained("base")
    trainer = DPOTrainer(model, args=args, train_dataset=pairs, processing_class=tokenizer)
    # Policy and reference are equal before the first step: -log sigmoid(0).
    assert trainer.train().training_loss == pytest.approx(math.log(2), abs=1e-4)
