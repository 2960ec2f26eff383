"""RewardDistillationTrainer: a small reward model learns what a teacher says.

Two losses, added with weights. Regression: half the squared difference of student and teacher score, in standard
deviations of the teacher's scores. Pairwise: the Bradley-Terry loss against the teacher's probability. Where the
teacher is a reward model, both are least (at temperature 1) at its scores less their mean; rows with one completion
teach through the regression alone, and a judge's probabilities through the pairs alone. Knows labelled rows
(reward_models/teacher.py makes them of reward models) and no teacher.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from onetrunk.data.preferences import stopped_column
from onetrunk.models.scorer import ScoreScale, score_layer
from onetrunk.ops.losses import bradley_terry_loss
from onetrunk.reward_models.trainer import PairCollator, RewardModelConfig, RewardModelTrainer, option
from onetrunk.rewards.model import encode_rows

logger = logging.getLogger(__name__)

NAN = float("nan")
LABELS = ("chosen_score", "rejected_score", "probability")
NO_SCORES = ScoreScale(0.0, 1.0)


@dataclass(repr=False)
class RewardDistillationConfig(RewardModelConfig):
    """RewardModelConfig, and how much each loss counts.

    Raises:
        ValueError: a weight out of range, or a setting of preference labels, which the teacher's take the place of.
    """

    regression_weight: float | None = option(
        None,
        "Of the squared error of the score, in the teacher's standard deviations. None: 1 where there are scores.",
    )
    pairwise_weight: float = option(1.0, "Of the Bradley-Terry loss against the teacher's probability.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("regression_weight", "pairwise_weight"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; set a finite number of at least 0")
        if self.regression_weight == 0 and self.pairwise_weight == 0:
            raise ValueError("regression_weight and pairwise_weight are both 0, so nothing is learnt; raise one")
        if self.use_margin or not self.soft_labels or self.center_rewards_coefficient:
            raise ValueError(
                "use_margin, soft_labels and center_rewards_coefficient are about labels of the rows; a student learns"
                " the teacher's: leave them out"
            )


@dataclass
class DistillationCollator(PairCollator):
    """Makes a batch of labelled rows: all first completions, then the second ones of the rows that are pairs."""

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Return input_ids and attention_mask [N, T], scores [N], and of labelled pairs places and probability [P].

        A score that a row lacks is NaN.
        """
        pairs = [index for index, f in enumerate(features) if f["rejected_ids"]]
        rows = [f["chosen_ids"] for f in features] + [features[index]["rejected_ids"] for index in pairs]
        scores = [f["chosen_score"] for f in features] + [features[index]["rejected_score"] for index in pairs]
        labelled = [
            (index, len(features) + place, features[index]["probability"])
            for place, index in enumerate(pairs)
            if features[index]["probability"] is not None
        ]
        return {
            **self.pad(rows),
            "scores": torch.tensor([NAN if s is None else s for s in scores], dtype=torch.float32),
            "first": torch.tensor([first for first, _, _ in labelled], dtype=torch.long),
            "second": torch.tensor([second for _, second, _ in labelled], dtype=torch.long),
            "probability": torch.tensor([p for _, _, p in labelled], dtype=torch.float32),
        }


class RewardDistillationTrainer(RewardModelTrainer):
    """Trains a student on labelled rows: `prompt`, `chosen`, and any of `rejected`, `chosen_score`, `rejected_score`,
    `probability`, null where a row has none; and `chosen_stopped`, `rejected_stopped` as in preference rows.

    While it trains, the student's scores are in the teacher's standard deviations; `to_teacher_scale` brings them to
    the teacher's scale less its mean, so that sigmoid of a difference is a probability. Call it before saving.

    Args: as for RewardModelTrainer.

    Attributes:
        scale: mean and standard deviation of the teacher's scores over the training rows; 0 and 1 where it gives none.

    Raises:
        ValueError: rows that teach nothing under the weights, or what RewardModelTrainer refuses.
    """

    args: RewardDistillationConfig

    def __init__(self, model: Any, args: RewardDistillationConfig, train_dataset: Dataset, *others: Any, **trl: Any):
        scores = [s for name in LABELS[:2] if name in train_dataset.column_names for s in train_dataset[name]]
        known = torch.tensor([s for s in scores if s is not None])
        if args.regression_weight is None:
            args.regression_weight = 1.0 if len(known) else 0.0
        if args.regression_weight and not len(known):
            raise ValueError(
                f"regression_weight is {args.regression_weight} and the rows have no teacher scores, only"
                " probabilities; set it to 0, or give a reward model as the teacher"
            )
        self.scale = ScoreScale.of(known) if len(known) else NO_SCORES
        self.unit = self.scale.std
        super().__init__(model, args, train_dataset, *others, **trl)

    def make_collator(self, tokenizer: PreTrainedTokenizerBase, args: RewardModelConfig) -> PairCollator:
        """Return what makes batches of encoded rows."""
        return DistillationCollator(tokenizer.pad_token_id, args.pad_to_multiple_of)

    def encode_rows(self, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, args: RewardModelConfig) -> Dataset:
        """Check that every row teaches something and return token ids and labels; no second completion: no ids."""
        check_labels(dataset, args.regression_weight, args.pairwise_weight)
        prompts, rejected = dataset["prompt"], [[] for _ in range(len(dataset))]
        stopped = {name: stopped_column(dataset, f"{name}_stopped") for name in ("chosen", "rejected")}
        settings = (None, self.reads_end, "to train")
        chosen, _ = encode_rows(tokenizer, prompts, dataset["chosen"], *settings, stopped["chosen"])
        given = dataset["rejected"] if "rejected" in dataset.column_names else [None] * len(dataset)
        pairs = [index for index, completion in enumerate(given) if completion is not None]
        second, _ = encode_rows(
            tokenizer,
            [prompts[index] for index in pairs],
            [given[index] for index in pairs],
            *settings,
            [stopped["rejected"][index] for index in pairs],
        )
        for index, ids in zip(pairs, second, strict=True):
            rejected[index] = ids
        labels = {name: dataset[name] if name in dataset.column_names else [None] * len(dataset) for name in LABELS}
        return Dataset.from_dict({"chosen_ids": chosen, "rejected_ids": rejected, **labels})

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the weighted sum of both losses, each a mean over the rows or pairs of the batch that it reads."""
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        scores = outputs.logits.squeeze(-1).float() * self.unit
        loss = scores.new_zeros(())
        targets = inputs["scores"]
        is_known = torch.isfinite(targets)
        if self.args.regression_weight:
            target = torch.where(is_known, targets - self.scale.mean, 0.0)
            errors = torch.where(is_known, (scores - target) / self.scale.std, 0.0).square() / 2
            loss = loss + self.args.regression_weight * errors.sum() / is_known.sum().clamp(min=1)
        chosen, rejected, probability = scores[inputs["first"]], scores[inputs["second"]], inputs["probability"]
        if self.args.pairwise_weight and len(probability):
            loss = loss + self.args.pairwise_weight * bradley_terry_loss(chosen, rejected, probability)
        self.note_pairs(chosen.detach(), rejected.detach(), probability)
        # A batch that neither loss reads still runs backward, so that all processes stay in step.
        loss = loss + 0.0 * scores.sum()
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def to_teacher_scale(self) -> None:
        """Multiply the score layer by the teacher's standard deviation; twice is as once."""
        layer = score_layer(self.model)
        for parameter in layer.parameters():
            parameter.mul_(self.unit)
        self.unit = 1.0


def check_labels(rows: Dataset, regression_weight: float | None, pairwise_weight: float) -> None:
    """Refuse rows that no loss reads.

    Raises:
        ValueError: how many, and the first one.
    """
    names = set(rows.column_names)
    if not {"prompt", "chosen"} <= names or not names & set(LABELS):
        raise ValueError(
            f"labelled rows have prompt, chosen, and one of {', '.join(LABELS)}; these have"
            f" {', '.join(sorted(names))}: let a teacher label them (reward_models/teacher.py)"
        )
    if len(rows) == 0:
        raise ValueError("there are no labelled rows; give at least one")
    columns = {name: rows[name] if name in names else [None] * len(rows) for name in (*LABELS, "rejected")}
    idle = [
        index
        for index in range(len(rows))
        if not (regression_weight and columns["chosen_score"][index] is not None)
        and not (
            pairwise_weight and columns["rejected"][index] is not None and columns["probability"][index] is not None
        )
    ]
    if idle:
        raise ValueError(
            f"{len(idle)} of {len(rows)} rows teach nothing (the first is row {idle[0]}): with regression_weight"
            f" {regression_weight} and pairwise_weight {pairwise_weight} a row needs a score, or a rejected completion"
            " and a probability"
        )


def warn_if_larger(student: Any, num_teacher_parameters: int) -> bool:
    """Warn of a student with more weights than its teacher: it will not be the cheaper one; return whether it has."""
    size = sum(p.numel() for p in student.parameters())
    if size <= num_teacher_parameters:
        return False
    logger.warning(
        "the student has %s weights, more than the teacher's %s: it will cost more than what it replaces; take a"
        " smaller one",
        f"{size:,}",
        f"{num_teacher_parameters:,}",
    )
    return True
