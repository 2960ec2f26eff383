"""The reward trainer: soft labels, margins, centring; the rows as PPO reads them; save -> load."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from onetrunk.models.loading import read_tokenizer
from onetrunk.models.reward_model import load_adapter_scorer, load_with_new_head, reads_end_token
from onetrunk.reward_models.training import PairCollator, RewardModelConfig, RewardModelTrainer
from onetrunk.rewards import ModelReward
from tests.models.reward_adapters import saved_base
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

PROMPTS = ["the cat ", "a dog and a bird ", "the old house in the rain ", "how warm is the sun "] * 2
GOOD = ["runs fast .", "sings", "is big and old .", "the sun is warm , yes ."] * 2
BAD = ["no", "w1 w2 no", "no no no , no", "sleeps under snow"] * 2


def rows(**columns):
    return Dataset.from_dict({"prompt": PROMPTS, "chosen": GOOD, "rejected": BAD, **columns})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return saved_base(tmp_path_factory.mktemp("base"))


KINDS = (RewardModelTrainer, RewardModelConfig)


def a_trainer(base, folder, dataset=None, tokenizer=None, peft_config=None, kinds=KINDS, **settings):
    torch.manual_seed(0)
    defaults = {"max_steps": 3, "per_device_train_batch_size": 4, "save_strategy": "no", "learning_rate": 1e-2}
    quiet = {"report_to": "none", "use_cpu": True, "bf16": False, "activation_checkpointing": False}
    trainer, config = kinds
    args = config(output_dir=str(folder), **{**defaults, **quiet, "logging_steps": 1, **settings})
    dataset, tokenizer = dataset or rows(), tokenizer or tiny_tokenizer()
    model = load_with_new_head(str(base))
    return trainer(model, args, dataset, processing_class=tokenizer, peft_config=peft_config)


def lora(**settings):
    return LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], **settings)


def first_batch(trainer):
    return trainer.data_collator([trainer.train_dataset[i] for i in range(4)])


@torch.no_grad()
def scores_of(trainer, batch):
    return trainer.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]


def test_a_completion_that_was_cut_off_is_read_without_an_end_token(base, tmp_path):
    stopped = [True, False] * 4
    columns = {"chosen_stopped": stopped, "rejected_stopped": stopped[::-1]}
    trainer = a_trainer(base, tmp_path, rows(**columns))
    ends = {name: [row[-1] == 1 for row in trainer.train_dataset[f"{name}_ids"]] for name in ("chosen", "rejected")}
    assert ends == {"chosen": stopped, "rejected": stopped[::-1]}
    whole = a_trainer(base, tmp_path / "whole", rows())
    assert [row[:-1] for row in whole.train_dataset["chosen_ids"]][1::2] == trainer.train_dataset["chosen_ids"][1::2]


def test_the_gradient_of_a_lead_is_the_prediction_less_the_label(base, tmp_path):
    labels = [0.9, 0.5, 0.1, 0.7] * 2
    trainer, seen = a_trainer(base, tmp_path, rows(probability=labels)), []

    def keep(module, inputs, output):
        output.retain_grad()
        seen.append(output)

    trainer.model.score.register_forward_hook(keep)
    batch = first_batch(trainer)
    trainer.compute_loss(trainer.model, batch).backward()
    at_end = torch.arange(8), batch["attention_mask"].sum(1) - 1
    gradient = seen[0].grad[..., 0][at_end]
    chosen, rejected = seen[0].detach()[..., 0][at_end].chunk(2)
    expected = (torch.sigmoid(chosen - rejected) - torch.tensor(labels[:4])) / 4
    torch.testing.assert_close(gradient, torch.cat([expected, -expected]), rtol=1e-5, atol=1e-7)


def test_margins_and_centring_change_the_loss_as_their_formulas_say(base, tmp_path):
    dataset = rows(margin=[0.5, 1.0, 0.0, 2.0] * 2)
    plain = a_trainer(base, tmp_path, dataset)
    batch = first_batch(plain)
    assert "margin" not in batch
    chosen, rejected = scores_of(plain, batch).chunk(2)
    both = a_trainer(base, tmp_path, dataset, use_margin=True, center_rewards_coefficient=0.1)
    loss = both.compute_loss(both.model, first_batch(both)).detach()
    margin = torch.tensor([0.5, 1.0, 0.0, 2.0])
    expected = -torch.nn.functional.logsigmoid(chosen - rejected - margin).mean()
    torch.testing.assert_close(loss, expected + 0.1 * (chosen + rejected).square().mean())


def test_accumulated_batches_of_which_the_last_is_short_train_as_one_batch(base, tmp_path):
    dataset = rows(probability=[0.9, 0.1, 0.7, 1.0, 0.3, 0.8, 0.0, 0.6]).select(range(7))
    weights = []
    for size, number in ((8, 1), (2, 4)):
        settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": number, "max_steps": 1}
        settings |= {"optim": "sgd", "learning_rate": 0.1, "center_rewards_coefficient": 0.1}
        trainer = a_trainer(base, tmp_path / str(size), dataset, **settings)
        trainer.train()
        weights.append(dict(trainer.model.named_parameters()))
    for name, expected in weights[0].items():
        torch.testing.assert_close(weights[1][name], expected, rtol=1e-4, atol=1e-6)


def test_a_batch_holds_the_chosen_rows_first_padded_on_the_right():
    features = [
        {"chosen_ids": [5, 6], "rejected_ids": [7], "probability": 0.5},
        {"chosen_ids": [8], "rejected_ids": [9, 10, 11], "probability": 1.0},
    ]
    batch = PairCollator(0)(features)
    assert batch["input_ids"].tolist() == [[5, 6, 0], [8, 0, 0], [7, 0, 0], [9, 10, 11]]
    assert batch["attention_mask"].sum(1).tolist() == [2, 1, 1, 3]
    assert batch["probability"].tolist() == [0.5, 1.0]
    assert PairCollator(0, 4)(features)["input_ids"].shape == (4, 4)


@pytest.mark.parametrize("conversational", [False, True])
def test_rows_are_tokenized_as_a_reward_function_reads_them(base, tmp_path, conversational):
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    prompts, chosen, rejected = PROMPTS, GOOD, BAD
    if conversational:
        prompts = [[{"role": "user", "content": p}] for p in PROMPTS]
        chosen, rejected = ([[{"role": "assistant", "content": t}] for t in texts] for texts in (GOOD, BAD))
    dataset = rows(prompt=prompts, chosen=chosen, rejected=rejected)
    trainer = a_trainer(base, tmp_path, dataset, tokenizer, max_steps=1)
    ids = trainer.train_dataset[0]["chosen_ids"]
    assert ids[-1] == tokenizer.eos_token_id and ids.count(tokenizer.eos_token_id) == 1
    trainer.train()
    reward = ModelReward(trainer.model.eval(), tokenizer)
    given = torch.tensor(reward(prompts=prompts[:4], completions=chosen[:4]))
    # Other widths of padding
    torch.testing.assert_close(given, scores_of(trainer, first_batch(trainer))[:4], atol=5e-5, rtol=0)


@pytest.mark.parametrize("adapted", [False, True])
def test_saved_and_loaded_it_scores_the_same(base, tmp_path, adapted):
    trainer = a_trainer(base, tmp_path, peft_config=lora() if adapted else None)
    trainer.train()
    trainer.save_model()
    inner = trainer.model.get_base_model() if adapted else trainer.model
    before = ModelReward(inner.eval(), tiny_tokenizer())(prompts=PROMPTS, completions=GOOD)
    loaded = load_adapter_scorer(str(tmp_path))[0] if adapted else str(tmp_path)
    after = ModelReward(loaded, read_tokenizer(str(tmp_path)))
    assert reads_end_token(after.model)
    assert after(prompts=PROMPTS, completions=GOOD) == before
    assert len(set(before)) > 2


def test_training_learns_and_logs_accuracy_over_the_decided_pairs(base, tmp_path):
    trainer = a_trainer(base, tmp_path, rows(probability=[1.0, 0.0, 0.5, 1.0] * 2), max_steps=12)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "pairs/accuracy" in entry]
    assert logged[-1]["pairs/accuracy"] == 1.0 and {"loss", "pairs/lead", "score/mean"} <= set(logged[-1])
    metrics = trainer.evaluate(rows(probability=[1.0, 0.0, 0.5, 1.0] * 2))
    assert metrics["eval_loss"] < 0.5
    assert trainer.state.log_history[-1]["eval_pairs/accuracy"] == 1.0


def test_rows_that_are_too_long_are_dropped_with_a_warning_and_an_empty_rest_is_rejected(base, tmp_path, caplog):
    trainer = a_trainer(base, tmp_path, max_length=6)
    assert len(trainer.train_dataset) < 8
    assert "training rows longer than max_length 6 tokens" in caplog.text
    with pytest.raises(ValueError, match="all 8 training rows are longer than max_length 3 .the shortest has"):
        a_trainer(base, tmp_path, max_length=3)
    with pytest.raises(ValueError, match="max_length 999 is more than the 128 tokens"):
        a_trainer(base, tmp_path, max_length=999)


def test_bad_settings_tokenizers_and_rows_are_rejected_with_a_message(base, tmp_path):
    with pytest.raises(ValueError, match="no padding token"):
        a_trainer(base, tmp_path, tokenizer=tiny_tokenizer(pad=False))
    with pytest.raises(ValueError, match="probability is 1.5"):
        a_trainer(base, tmp_path, rows(probability=[1.5] * 8))
    with pytest.raises(ValueError, match="center_rewards_coefficient is -1"):
        a_trainer(base, tmp_path, center_rewards_coefficient=-1)
