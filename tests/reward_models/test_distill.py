"""Distillation: both losses by their formulas, rows of every kind, the teacher's scale, and scores computed once."""

import math

import pytest
import torch
from datasets import Dataset

from onetrunk.reward_models.distill import RewardDistillationConfig, RewardDistillationTrainer, Teacher, label_rows
from onetrunk.reward_models.training import PairCollator
from onetrunk.rewards import ModelReward
from onetrunk.utils.files import load_tensors
from onetrunk.utils.ledger import Ledger
from tests.models.reward_adapters import saved_base
from tests.reward_models.test_reward_trainer import BAD, GOOD, PROMPTS, first_batch, lora, scores_of
from tests.reward_models.test_reward_trainer import a_trainer as reward_trainer
from tests.reward_models.test_reward_trainer import rows as pair_rows
from tests.rewards.test_model import scorer
from tests.tiny import tiny_tokenizer

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


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return saved_base(tmp_path_factory.mktemp("base"))


def a_trainer(*args, **settings):
    return reward_trainer(*args, kinds=(RewardDistillationTrainer, RewardDistillationConfig), **settings)


def test_the_teacher_gives_centred_scores_and_the_mean_of_the_members_probabilities(tmp_path):
    teacher = a_teacher(tmp_path, 3, 4, temperature=2.0)
    labelled = label_rows(teacher, pair_rows(), SINGLES)
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


def test_a_student_reads_a_completion_that_was_cut_off_without_an_end_token(base, tmp_path):
    stopped = [True, False] * 4
    pairs = pair_rows(chosen_stopped=stopped, rejected_stopped=stopped[::-1])
    singles = SINGLES.add_column("completion_stopped", [False, True])
    trainer = a_trainer(base, tmp_path / "run", label_rows(a_teacher(tmp_path), pairs, singles))
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
    labelled = label_rows(a_teacher(tmp_path), pair_rows(), SINGLES)
    trainer = a_trainer(base, tmp_path, labelled, regression_weight=0.5, pairwise_weight=2.0)
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


def without_some_labels(row, index):
    return {"rejected_score": None, "probability": None} if index in (1, 2, 5) else {}


def test_accumulated_batches_with_other_numbers_of_labels_train_as_the_whole_batch(base, tmp_path):
    rows = label_rows(a_teacher(tmp_path), pair_rows(), SINGLES).map(without_some_labels, with_indices=True)
    weights = []
    for number in (1, 2, 4):
        settings = {"per_device_train_batch_size": 8 // number, "gradient_accumulation_steps": number}
        trainer = a_trainer(base, tmp_path / str(number), rows, optim="sgd", learning_rate=0.1, **settings)
        trainer.train()
        weights.append(dict(trainer.model.named_parameters()))
    for split in weights[1:]:
        for name, expected in weights[0].items():
            torch.testing.assert_close(split[name], expected, rtol=1e-4, atol=1e-6)


def test_the_teachers_own_scores_have_no_gradient(base, tmp_path):
    """Both losses have their minimum at the teacher's scores: there the gradient of the scores is 0."""
    labelled = label_rows(a_teacher(tmp_path), pair_rows())
    trainer = a_trainer(base, tmp_path, labelled)
    batch = first_batch(trainer)
    z = ((batch["scores"] - trainer.scale.mean) / trainer.scale.std)[:, None].requires_grad_()

    class Student(torch.nn.Module):
        def forward(self, input_ids, attention_mask):
            return type("Output", (), {"logits": z})

    trainer.compute_loss(Student(), batch).backward()
    assert z.grad.abs().max() < 1e-6


def test_a_student_learns_the_teachers_order_and_is_read_on_its_scale(base, tmp_path):
    teacher = a_teacher(tmp_path)
    labelled = label_rows(teacher, pair_rows(), SINGLES)
    trainer = a_trainer(base, tmp_path, labelled, max_steps=60, per_device_train_batch_size=10)
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
    dataset = pair_rows(probability=[1.0, 0.0, 0.6, 0.9] * 2)
    trainer = a_trainer(base, tmp_path, dataset, max_steps=30, per_device_train_batch_size=8)
    assert trainer.args.regression_weight == 0 and trainer.unit == 1
    trainer.train()
    assert trainer.evaluate(dataset)["eval_loss"] < 0.45
    assert trainer.state.log_history[-1]["eval_pairs/accuracy"] == 1.0
    with pytest.raises(ValueError, match="no teacher scores, only probabilities; set it to 0"):
        a_trainer(base, tmp_path, dataset, regression_weight=1.0)


def test_an_adapter_on_the_trunk_is_a_student_and_its_scale_is_in_its_head(base, tmp_path):
    labelled = label_rows(a_teacher(tmp_path), pair_rows())
    trainer = a_trainer(base, tmp_path, labelled, peft_config=lora())
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
        ({"regression_weight": 0.0, "pairwise_weight": 0.0}, "both 0, so nothing is learnt"),
        ({"pairwise_weight": -1.0}, "pairwise_weight is -1"),
        ({"use_margin": True}, "leave them out"),
        ({"regression_weight": 0.0}, "2 of 10 rows teach nothing .the first is row 8."),
    ],
)
def test_settings_and_rows_that_teach_nothing_are_rejected(base, tmp_path, settings, message):
    labelled = label_rows(a_teacher(tmp_path), pair_rows(), SINGLES)
    with pytest.raises(ValueError, match=message):
        a_trainer(base, tmp_path, labelled, **settings)
