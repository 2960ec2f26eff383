"""The reward trainer: soft labels, margins, centring, rows as PPO reads them; and distillation from a teacher."""

import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForMaskedLM

from onetrunk.models.loading import read_adapter_config, read_tokenizer
from onetrunk.models.reward_model import load_adapter_scorer, load_with_new_head, reads_end_token, score_layer
from onetrunk.reward_models.distill import RewardDistillationConfig, RewardDistillationTrainer, Teacher, label_rows
from onetrunk.reward_models.training import ENCODED, PairCollator, RewardModelConfig, RewardModelTrainer
from onetrunk.rewards import ModelReward
from onetrunk.utils.files import load_tensors
from onetrunk.utils.ledger import Ledger
from tests.chat import CHAT_VOCAB, chat_tokenizer
from tests.models.reward_adapters import a_scorer, saved_base
from tests.rewards.test_model import scorer
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
STUDENTS = (RewardDistillationTrainer, RewardDistillationConfig)


def a_trainer(base, folder, dataset=None, tokenizer=None, peft_config=None, kinds=KINDS, revision=None, **settings):
    torch.manual_seed(0)
    defaults = {"max_steps": 3, "per_device_train_batch_size": 4, "save_strategy": "no", "learning_rate": 1e-2}
    quiet = {"report_to": "none", "use_cpu": True, "bf16": False, "activation_checkpointing": False}
    trainer, config = kinds
    args = config(output_dir=str(folder), **{**defaults, **quiet, "logging_steps": 1, **settings})
    dataset, tokenizer = dataset or rows(), tokenizer or tiny_tokenizer()
    model = load_with_new_head(str(base), revision=revision)
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


ENCODERS = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    "deberta-v2": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
}


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_without_a_head_becomes_a_reward_model(tmp_path, family):
    config = AutoConfig.for_model(family, vocab_size=64, pad_token_id=0, initializer_range=0.25, **ENCODERS[family])
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    trainer = a_trainer(tmp_path / "base", tmp_path, max_steps=12)
    trainer.train()
    assert trainer.state.log_history[-2]["pairs/accuracy"] == 1
    trainer.save_model()
    trained = scores_of(trainer, first_batch(trainer))[:4].tolist()
    # Other widths of padding
    assert ModelReward(str(tmp_path))(prompts=PROMPTS[:4], completions=GOOD[:4]) == pytest.approx(trained, abs=1e-4)
    weights = load_tensors(tmp_path / "base/model.safetensors")
    save_file({name: weights[name] for name in weights if ".layer.1" not in name}, tmp_path / "base/model.safetensors")
    with pytest.raises(ValueError, match="weights below the head, the first is .*layer.1"):
        load_with_new_head(str(tmp_path / "base"))
    with pytest.raises(ValueError, match="its head is not called score, as that of a decoder is; train the whole"):
        RewardModelTrainer(trainer.model, trainer.args, rows(), None, tiny_tokenizer(), peft_config=lora())


def test_training_learns_and_logs_accuracy_over_the_decided_pairs(base, tmp_path):
    trainer = a_trainer(base, tmp_path, rows(probability=[1.0, 0.0, 0.5, 1.0] * 2), max_steps=12)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "pairs/accuracy" in entry]
    assert logged[-1]["pairs/accuracy"] == 1.0 and {"loss", "pairs/lead", "score/mean"} <= set(logged[-1])
    metrics = trainer.evaluate(rows(probability=[1.0, 0.0, 0.5, 1.0] * 2))
    assert metrics["eval_loss"] < 0.5
    assert trainer.state.log_history[-1]["eval_pairs/accuracy"] == 1.0


def test_rows_that_are_too_long_are_dropped_with_a_warning(base, tmp_path, caplog):
    trainer = a_trainer(base, tmp_path, max_length=6)
    assert len(trainer.train_dataset) < 8
    assert "training rows longer than max_length 6 tokens" in caplog.text


@pytest.mark.filterwarnings("ignore:`pad_token` is deprecated")
@pytest.mark.parametrize("name", ["pad_token", "eos_token"])
def test_tokens_of_the_settings_count_when_rows_are_encoded(base, tmp_path, name):
    trainer = a_trainer(base, tmp_path, **{name: "<unk>"})
    ends = {row[-1] for row in trainer.train_dataset["chosen_ids"]}
    assert ends == {trainer.processing_class.eos_token_id}
    batch, rows = first_batch(trainer), trainer.train_dataset[:4]
    alone = [{"input_ids": torch.tensor([row]), "attention_mask": None} for side in ENCODED for row in rows[side]]
    alone = torch.cat([scores_of(trainer, row) for row in alone])
    # float32: another padded width sums in another order.
    torch.testing.assert_close(scores_of(trainer, batch), alone, atol=5e-5, rtol=0)


@pytest.mark.parametrize("kinds", [KINDS, STUDENTS])
def test_rows_of_about_equal_length_may_share_a_batch(base, tmp_path, kinds):
    labelled, settings = rows(probability=[0.9] * 8), {"train_sampling_strategy": "group_by_length"}
    trainer = a_trainer(base, tmp_path, labelled, kinds=kinds, per_device_train_batch_size=2, **settings)
    trainer.train()
    trainer.evaluate(labelled)
    lengths = [max(len(row[side]) for side in ENCODED) for row in trainer.train_dataset]
    assert trainer.train_dataset["length"] == lengths


@pytest.mark.parametrize("task_type", [None, "CAUSAL_LM"])
def test_the_head_of_an_adapter_is_trained_and_saved_whatever_its_task_type(base, tmp_path, task_type):
    config = LoraConfig(task_type=task_type, r=4, target_modules=["q_proj"])
    trainer = a_trainer(base, tmp_path, peft_config=config, revision="v2")
    before = score_layer(trainer.model).weight.detach().clone()
    trainer.train()
    trainer.save_model()
    saved = load_tensors(tmp_path / "adapter_model.safetensors")["base_model.model.score.weight"]
    assert not torch.equal(saved, before) and config.task_type == task_type
    assert read_adapter_config(str(tmp_path)).revision == "v2"
    with pytest.raises(ValueError, match="model has an adapter of the task_type None"):
        RewardModelTrainer(get_peft_model(a_scorer(), LoraConfig()), trainer.args, rows(), None, tiny_tokenizer())


@pytest.mark.filterwarnings("ignore:`pad_token` is deprecated")
@pytest.mark.parametrize(
    ("columns", "settings", "message"),
    [
        ({}, {"tokenizer": tiny_tokenizer(pad=False)}, "no padding token"),
        ({}, {"pad_token": "<none>"}, "pad_token is '<none>', and the tokenizer has no such token"),
        ({}, {"chat_template_path": "a.jinja"}, "chat_template_path is 'a.jinja': rows are encoded before"),
        ({}, {"label_smoothing_factor": 0.1}, "label_smoothing_factor is 0.1: labels are probabilities"),
        ({"probability": [1.5] * 8}, {}, "probability is 1.5"),
        ({}, {"center_rewards_coefficient": -1}, "center_rewards_coefficient is -1"),
        ({}, {"use_margin": True}, "use_margin is true and the rows have no column margin"),
        ({}, {"max_length": 3}, "all 8 training rows are longer than max_length 3 .the shortest has"),
        ({}, {"max_length": 999}, "max_length 999 is more than the 128 tokens"),
    ],
)
def test_bad_settings_tokenizers_and_rows_are_rejected_with_a_message(base, tmp_path, columns, settings, message):
    with pytest.raises(ValueError, match=message):
        a_trainer(base, tmp_path, rows(**columns), **settings)


SINGLES = Dataset.from_dict({"prompt": ["the moon ", "a fish "], "completion": ["is cold .", "sees snow"]})


def a_teacher(folder, *seeds, temperature=1.0):
    members = []
    for seed in seeds or (3,):
        model = scorer(pad_token_id=0)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(seed)
            model.score.weight.copy_(3 * torch.randn(model.score.weight.shape, generator=generator))
        members.append(ModelReward(model, tiny_tokenizer()))
    return Teacher(members, folder / "teacher_scores.db", temperature)


def a_student(*args, **settings):
    return a_trainer(*args, kinds=STUDENTS, **settings)


def test_the_teacher_gives_centred_scores_and_the_mean_of_the_members_probabilities(tmp_path):
    teacher = a_teacher(tmp_path, 3, 4, temperature=2.0)
    labelled = label_rows(teacher, rows(), SINGLES)
    good, bad = (
        torch.tensor([member(prompts=PROMPTS, completions=texts) for member in teacher.members])
        for texts in (GOOD, BAD)
    )
    expected = torch.sigmoid((good - bad) / 2).mean(0)
    torch.testing.assert_close(torch.tensor(labelled["probability"][:8]), expected)
    assert labelled["probability"][8:] == [None, None] and labelled["rejected"][8:] == [None, None]
    scores = [s for name in ("chosen_score", "rejected_score") for s in labelled[name] if s is not None]
    assert len(scores) == 18 and sum(scores) == pytest.approx(0, abs=1e-4)
    lead = labelled["chosen_score"][0] - labelled["rejected_score"][0]
    assert lead == pytest.approx((good - bad).mean(0)[0].item(), rel=1e-5)


def test_a_teacher_labels_calls_whose_arguments_are_of_mixed_types(tmp_path):
    def sides(argument):
        call = {"type": "function", "function": {"name": "f", "arguments": argument}}
        called = [{"role": "assistant", "content": "", "tool_calls": [call]}]
        return {"chosen": called, "rejected": [{"role": "assistant", "content": "no"}]}

    prompts = [[{"role": "user", "content": text}] for text in PROMPTS[:3]]
    pairs = [
        {"prompt": prompt, **sides(x)} for prompt, x in zip(prompts, ({"x": 1}, {"x": "a"}, {"y": 1}), strict=True)
    ]
    singles = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs]
    member = ModelReward(scorer(vocab_size=CHAT_VOCAB, max_position_embeddings=512), chat_tokenizer("qwen2_5"))
    rows, more = (Dataset.from_list(part, on_mixed_types="use_json") for part in (pairs, singles))
    labelled = label_rows(Teacher([member], None), rows, more)
    calls = [chosen[0]["tool_calls"][0]["function"]["arguments"] for chosen in labelled["chosen"]]
    assert calls == [{"x": 1}, {"x": "a"}, {"y": 1}] * 2
    assert labelled["chosen_score"][:3] == pytest.approx(labelled["chosen_score"][3:], abs=1e-5)


def test_a_student_reads_a_completion_that_was_cut_off_without_an_end_token(base, tmp_path):
    stopped = [True, False] * 4
    pairs = rows(chosen_stopped=stopped, rejected_stopped=stopped[::-1])
    singles = SINGLES.add_column("completion_stopped", [False, True])
    trainer = a_student(base, tmp_path / "run", label_rows(a_teacher(tmp_path), pairs, singles))
    assert [row[-1] == 1 for row in trainer.train_dataset["chosen_ids"]] == [*stopped, False, True]
    assert [row[-1] == 1 for row in trainer.train_dataset["rejected_ids"][:8]] == stopped[::-1]


def test_scores_are_computed_once(tmp_path):
    first = a_teacher(tmp_path)
    expected = first.scores(PROMPTS[:3], GOOD[:3])
    assert first.num_computed == 3
    again = a_teacher(tmp_path)
    assert torch.equal(again.scores(PROMPTS[:4], GOOD[:4])[:3], expected) and again.num_computed == 1
    # Equal rows are computed once; another model is another teacher.
    assert again.scores(PROMPTS, GOOD).shape == (8,) and again.num_computed == 1
    other = a_teacher(tmp_path, 9)
    other.scores(PROMPTS[:2], GOOD[:2])
    assert other.num_computed == 2
    with Ledger(tmp_path / "teacher_scores.db") as ledger:
        assert len(ledger.keys()) == 6


def test_the_loss_is_half_the_squared_error_plus_the_soft_label_loss(base, tmp_path):
    labelled = label_rows(a_teacher(tmp_path), rows(), SINGLES)
    trainer = a_student(base, tmp_path, labelled, regression_weight=0.5, pairwise_weight=2.0)
    scores = torch.tensor([s for n in ("chosen_score", "rejected_score") for s in labelled[n] if s is not None])
    assert trainer.scale.std == pytest.approx(float(scores.std()), rel=1e-5)
    assert trainer.scale.mean == pytest.approx(0, abs=1e-4)
    batch = trainer.data_collator([trainer.train_dataset[i] for i in (0, 8, 1)])
    assert (batch["first"].tolist(), batch["second"].tolist(), len(batch["scores"])) == ([0, 2], [3, 4], 5)
    z, loss = scores_of(trainer, batch), trainer.compute_loss(trainer.model, batch).detach()
    std = trainer.scale.std
    targets = (batch["scores"] - trainer.scale.mean) / std
    regression = ((z - targets) ** 2 / 2).mean()
    leads = std * torch.stack([z[0] - z[3], z[2] - z[4]])
    p = torch.tensor(labelled["probability"][:2])
    pairwise = -(p * torch.sigmoid(leads).log() + (1 - p) * torch.sigmoid(-leads).log()).mean()
    torch.testing.assert_close(loss, 0.5 * regression + 2 * pairwise, rtol=1e-4, atol=1e-5)


def test_accumulated_batches_with_other_numbers_of_labels_train_as_the_whole_batch(base, tmp_path):
    unknown, labelled = {"rejected_score": None, "probability": None}, label_rows(a_teacher(tmp_path), rows(), SINGLES)
    labelled = labelled.map(lambda row, index: unknown if index in (1, 2, 5) else {}, with_indices=True)
    weights = []
    for number in (1, 2, 4):
        settings = {"per_device_train_batch_size": 8 // number, "gradient_accumulation_steps": number}
        trainer = a_student(base, tmp_path / str(number), labelled, optim="sgd", learning_rate=0.1, **settings)
        trainer.train()
        weights.append(dict(trainer.model.named_parameters()))
    for split in weights[1:]:
        for name, expected in weights[0].items():
            torch.testing.assert_close(split[name], expected, rtol=1e-4, atol=1e-6)


def test_the_teachers_own_scores_have_no_gradient(base, tmp_path):
    """Both losses have their minimum at the teacher's scores: there the gradient of the scores is 0."""
    labelled = label_rows(a_teacher(tmp_path), rows())
    trainer = a_student(base, tmp_path, labelled)
    batch = first_batch(trainer)
    z = ((batch["scores"] - trainer.scale.mean) / trainer.scale.std)[:, None].requires_grad_()

    class Student(torch.nn.Module):
        def forward(self, input_ids, attention_mask):
            return type("Output", (), {"logits": z})

    trainer.compute_loss(Student(), batch).backward()
    assert z.grad.abs().max() < 1e-6


def test_a_student_learns_the_teachers_order_and_is_read_on_its_scale(base, tmp_path):
    teacher = a_teacher(tmp_path)
    labelled = label_rows(teacher, rows(), SINGLES)
    trainer = a_student(base, tmp_path, labelled, max_steps=60, per_device_train_batch_size=10)
    trainer.train()
    before = trainer.evaluate(labelled)["eval_loss"]
    trainer.to_teacher_scale()
    trainer.to_teacher_scale()
    assert trainer.evaluate(labelled)["eval_loss"] == pytest.approx(before, rel=1e-4)
    trainer.save_model()
    student = ModelReward(str(tmp_path))
    given = torch.tensor(student(prompts=PROMPTS, completions=GOOD))
    expected = teacher.scores(PROMPTS, GOOD)
    # Sixty steps on ten rows: near, not equal.
    assert (given - expected).abs().mean() < 0.3 * trainer.scale.std


def test_a_judges_probabilities_teach_without_scores(base, tmp_path):
    dataset = rows(probability=[1.0, 0.0, 0.6, 0.9] * 2)
    trainer = a_student(base, tmp_path, dataset, max_steps=30, per_device_train_batch_size=8)
    assert trainer.args.regression_weight == 0 and trainer.unit == 1
    trainer.train()
    assert trainer.evaluate(dataset)["eval_loss"] < 0.45
    assert trainer.state.log_history[-1]["eval_pairs/accuracy"] == 1.0
    with pytest.raises(ValueError, match="no teacher scores, only probabilities; set it to 0"):
        a_student(base, tmp_path, dataset, regression_weight=1.0)


def test_an_adapter_on_the_trunk_is_a_student_and_its_scale_is_in_its_head(base, tmp_path):
    labelled = label_rows(a_teacher(tmp_path), rows())
    trainer = a_student(base, tmp_path, labelled, peft_config=lora())
    trainer.train()
    name = "base_model.model.score.weight"
    trainer.save_model(str(tmp_path / "before"))
    trainer.to_teacher_scale()
    trainer.save_model(str(tmp_path / "after"))
    before, after = (load_tensors(tmp_path / side / "adapter_model.safetensors") for side in ("before", "after"))
    torch.testing.assert_close(after[name], before[name] * trainer.scale.std)


def test_a_batch_keeps_places_of_pairs_and_marks_what_is_missing():
    row = {"chosen_ids": [5], "rejected_ids": [], "chosen_score": 1.0, "rejected_score": None, "probability": None}
    unjudged = {**row, "rejected_ids": [6, 7], "rejected_score": 2.0}
    judged = {**row, "chosen_score": None, "rejected_ids": [8], "probability": 0.25}
    batch = PairCollator(0)([row, unjudged, judged])
    assert batch["input_ids"].tolist() == [[5, 0], [5, 0], [5, 0], [6, 7], [8, 0]]
    assert (batch["first"].tolist(), batch["second"].tolist(), batch["probability"].tolist()) == ([2], [4], [0.25])
    assert [math.isnan(s) for s in batch["scores"].tolist()] == [False, False, True, False, True]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"regression_weight": 0.0, "pairwise_weight": 0.0}, "both 0, so nothing is learned"),
        ({"pairwise_weight": -1.0}, "pairwise_weight is -1"),
        ({"use_margin": True}, "leave them out"),
        ({"regression_weight": 0.0}, "2 of 10 rows teach nothing .the first is row 8."),
    ],
)
def test_settings_and_rows_that_teach_nothing_are_rejected(base, tmp_path, settings, message):
    labelled = label_rows(a_teacher(tmp_path), rows(), SINGLES)
    with pytest.raises(ValueError, match=message):
        a_student(base, tmp_path, labelled, **settings)


def test_the_head_of_an_adapter_on_a_base_in_bfloat16_learns_by_small_steps(base, tmp_path):
    model = load_with_new_head(str(base), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    trainer = a_trainer(tmp_path / "base", tmp_path, peft_config=lora(), learning_rate=1e-5, max_steps=1)
    head = score_layer(trainer.model)
    before = head.weight.detach().clone()
    trainer.train()
    assert trainer.model.dtype == torch.bfloat16 and head.weight.dtype == torch.float32
    assert (head.weight != before).all()
    trainer.save_model()
    loaded, _ = load_adapter_scorer(str(tmp_path))
    batch = first_batch(trainer)
    with torch.no_grad():
        scores = loaded(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    assert torch.equal(score_layer(loaded).weight, head.weight) and torch.equal(scores, scores_of(trainer, batch))
