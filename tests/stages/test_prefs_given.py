"""`onetrunk prefs` with completions that exist: every shape becomes rows that trainers take, without a model.

TRL's own trainers take them too, and they hold nothing that these would use unasked.
"""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

from onetrunk import cli
from onetrunk.data.files import load_rows
from onetrunk.feedback.shards import read_rows
from tests.judges.stub_server import StubServer
from tests.stages.small_runs import NOUNS, error_of, statistics, write_rows
from tests.tiny import CHAT_TEMPLATE, tiny_model, tiny_tokenizer

CHECKS = """
def longer(prompts, completions, **columns):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [min(1.0, len(text) / 20) for text in texts]
"""
CONSTITUTION = "name: t\nprinciples:\n  - {text: 'Which is longer?', tags: [longer]}\n"
PAIRS = [{"prompt": f"prompt {i}", "chosen": "short", "rejected": "much longer " + "x" * (i % 5)} for i in range(12)]
USER = {"role": "user", "content": "Name a bird."}


@pytest.fixture
def prefs(empty_folder):
    """Return a function that runs the verb on given rows in an empty folder; it returns the exit code."""
    (empty_folder / "checks.py").write_text(CHECKS)
    (empty_folder / "c.yaml").write_text(CONSTITUTION)

    def call(rows, *options, out="out", judge=("rubric",)):
        write_rows(empty_folder / "given.jsonl", rows)
        words = ["--completions", "given", "--dataset_name", "given.jsonl", "--constitution", "c.yaml"]
        words += ["--judge", *judge, "--output_dir", out]
        words += ["--rubric", '{"longer": "checks.py:longer"}'] if judge == ("rubric",) else []
        return cli.main(["prefs", *map(str, [*words, *options])])

    return call


def about(stub, number):
    """Return the calls to a server that ask about the prompt of this number."""
    return [body for body in stub.bodies if f"> prompt {number}\n" in body["messages"][0]["content"]]


def rows_of(folder):
    return list(read_rows(folder / "data/preferences.jsonl"))


def test_pairs_are_labelled_by_the_judge_whatever_their_order_and_streamed_to_the_same_bytes(prefs, tmp_path):
    assert prefs(PAIRS) == 0
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 12 and all(row["chosen"].startswith("much longer") for row in rows)
    expected = "prompt chosen rejected chosen_stopped rejected_stopped probability votes consistent"
    assert set(rows[0]) == set(expected.split())
    found = statistics(tmp_path / "out")
    assert found["counts"]["prompts"] == found["counts"]["labelled"] == 12
    card = (tmp_path / "out/README.md").read_text()
    assert "given by given.jsonl" in card and "temperature" not in card
    assert prefs(PAIRS, "--streaming", "true", out="streamed") == 0
    name = "data/preferences.jsonl"
    assert (tmp_path / "streamed" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_logged_conversations_of_one_prompt_are_compared(prefs, tmp_path):
    logs = [{"messages": [USER, {"role": "assistant", "content": text}]} for text in ("A robin.", "A bird is a wren.")]
    logs.append({"messages": [{"role": "user", "content": "Alone?"}, {"role": "assistant", "content": "Yes."}]})
    assert prefs(logs) == 0
    (row,) = rows_of(tmp_path / "out")
    assert row["prompt"] == [USER] and row["chosen"] == [{"role": "assistant", "content": "A bird is a wren."}]
    assert statistics(tmp_path / "out")["counts"]["prompts_without_pair"] == 1


def test_ties_are_dropped_or_kept_within_a_margin(prefs, tmp_path):
    rows = [{"prompt": "p", "completions": ["aaaa", "bbbb", "aaaaa"]}]
    assert prefs(rows) == 0 and len(rows_of(tmp_path / "out")) == 2
    assert prefs(rows, "--keep_ties", "true", out="kept") == 0 and len(rows_of(tmp_path / "kept")) == 3
    # One character more of twenty is a difference of 0.05: P = logistic(0.05 / 0.2) = 0.562.
    assert prefs(rows, "--tie_margin", "0.07", "--keep_ties", "true", out="margin") == 0
    assert statistics(tmp_path / "margin")["counts"]["ties"] == 3


def test_a_trial_of_a_few_prompts_buys_nothing_twice(prefs, tmp_path):
    with StubServer() as stub:
        model = ["--judge_model", stub.model]
        assert prefs(PAIRS, *model, "--limit", "3", judge=(stub.url,)) == 0
        assert len(rows_of(tmp_path / "out")) == 3
        assert len(about(stub, 1)) == 2 and about(stub, 5) == []
        assert prefs(PAIRS, *model, judge=(stub.url,)) == 0
        assert len(about(stub, 1)) == 2 == len(about(stub, 5)) and len(rows_of(tmp_path / "out")) == 12


def test_completions_of_one_prompt_in_several_rows_cannot_be_streamed(prefs, capsys):
    assert prefs([{"prompt": "p", "completion": "a"}] * 2, "--streaming", "true") == 1
    assert "stand in several rows" in error_of(capsys)


SETTINGS = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 1, "save_strategy": "no"}
SETTINGS |= {"per_device_train_batch_size": 4, "max_length": 48, "gradient_checkpointing": False}


@pytest.fixture
def conversations(prefs, tmp_path):
    """Return the rows that the verb makes of conversations with two completions each, next to a base."""
    rows = []
    for number, noun in enumerate(NOUNS):
        texts = ["runs fast", "runs" + " fast" * (1 + number % 3) + " the tree"]
        rows.append({"prompt": [{"role": "user", "content": f"the {noun}"}], "completions": texts})
    assert prefs(rows) == 0
    tiny_model("llama", num_hidden_layers=2).save_pretrained("base")
    return load_rows(tmp_path / "out/data")


def test_a_reward_trainer_of_trl_finds_no_margin(conversations, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained("base", num_labels=1)
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    model.config.pad_token_id = tokenizer.pad_token_id
    args = RewardConfig(output_dir=str(tmp_path / "rm"), **SETTINGS)
    trainer = RewardTrainer(model, args, train_dataset=conversations, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    assert "margin" not in batch and len(batch["input_ids"]) == 2 * 4
    with torch.no_grad():
        loss, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
        chosen, rejected = outputs.logits.squeeze(-1).chunk(2)
    # Their plain loss: -log sigmoid of the lead.
    torch.testing.assert_close(loss, -torch.nn.functional.logsigmoid(chosen - rejected).mean())


@pytest.mark.slow
def test_a_dpo_trainer_of_trl_trains_on_the_rows(conversations, tmp_path):
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    args = DPOConfig(output_dir=str(tmp_path / "dpo"), **SETTINGS)
    model = AutoModelForCausalLM.from_pretrained("base")
    trainer = DPOTrainer(model, args=args, train_dataset=conversations, processing_class=tokenizer)
    # Policy and reference are equal before the first step: -log sigmoid(0).
    assert trainer.train().training_loss == pytest.approx(math.log(2), abs=1e-4)
