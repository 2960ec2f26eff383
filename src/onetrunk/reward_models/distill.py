"""RewardDistillationTrainer: a small reward model (the student) learns the labels of a teacher.

The loss is a weighted sum. Regression: half the squared difference of student and teacher score, in standard
deviations of the teacher's scores. Pairwise: the Bradley-Terry loss against the teacher's probability. If the teacher
is a reward model, both have their minimum (at temperature 1) at its scores minus their mean. Rows with one completion
count only in the regression, and a judge's probabilities only in the pairwise loss. Each loss is a mean over the rows
or pairs of an optimizer step, on all processes together. reward_models/teacher.py labels rows with reward models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from onetrunk.data.rows import require_rows
from onetrunk.data.sharded import ShardedRows, known_rows
from onetrunk.models.reward_model import ScoreScale, score_layer
from onetrunk.ops.losses import bradley_terry_loss
from onetrunk.reward_models.training import PairCollator, PairEncoder, RewardModelConfig, RewardModelTrainer
from onetrunk.utils.options import option

LABELS = ("chosen_score", "rejected_score", "probability")


@dataclass(repr=False)
class RewardDistillationConfig(RewardModelConfig):
    """RewardModelConfig, and the weights of the two losses.

    Raises:
        ValueError: a weight out of range, or a setting about preference labels, which the teacher's labels replace.
    """

    regression_weight: float | None = option(
        None,
        "Weight of the squared error of the score, in the teacher's standard deviations. None: 1 if there are scores.",
    )
    pairwise_weight: float = option(1.0, "Weight of the Bradley-Terry loss against the teacher's probability.")

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
                "use_margin, soft_labels and center_rewards_coefficient are about the rows' own labels, and a student"
                " learns the teacher's; leave them out"
            )


class RewardDistillationTrainer(RewardModelTrainer):
    """Trains a student on labelled rows: `prompt`, `chosen`, and any of `rejected`, `chosen_score`, `rejected_score`,
    `probability`, null where a row has none; and `chosen_stopped`, `rejected_stopped` as in preference rows.

    During training the student's scores are in the teacher's standard deviations. `to_teacher_scale` converts them to
    the teacher's scale minus its mean, so that sigmoid of a difference is a probability. Call it before saving.

    Args: as for RewardModelTrainer.

    Attributes:
        scale: mean and standard deviation of the teacher's scores over the training rows (of streamed rows over a
            sample); 0 and 1 without scores.

    Raises:
        ValueError: rows that neither loss uses, and the errors of RewardModelTrainer.
    """

    args: RewardDistillationConfig

    def __init__(
        self,
        model: Any,
        args: RewardDistillationConfig,
        train_dataset: Dataset | ShardedRows,
        *others: Any,
        **trl: Any,
    ):
        rows = known_rows(train_dataset)
        scores = [s for name in LABELS[:2] if name in rows.column_names for s in rows[name]]
        known = torch.tensor([s for s in scores if s is not None])
        if args.regression_weight is None:
            args.regression_weight = 1.0 if len(known) else 0.0
        if args.regression_weight and not len(known):
            raise ValueError(
                f"regression_weight is {args.regression_weight} and the rows have no teacher scores, only"
                " probabilities; set it to 0, or give a reward model as the teacher"
            )
        self.scale = ScoreScale.of(known) if len(known) else ScoreScale(0.0, 1.0)
        self.unit = self.scale.std
        super().__init__(model, args, train_dataset, *others, **trl)

    def check_rows(self, dataset: Dataset, args: RewardModelConfig) -> None:
        """Raise ValueError for rows that no loss uses."""
        check_labels(dataset, args.regression_weight, args.pairwise_weight)

    def encoder(
        self, columns: Sequence[str], tokenizer: PreTrainedTokenizerBase, args: RewardModelConfig
    ) -> PairEncoder:
        """Return what encodes rows with these columns; all labels, None where there is none."""
        return PairEncoder(tokenizer, self.reads_end, LABELS)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the weighted sum of both losses, each a sum over the rows or pairs of the inputs that it uses.

        The sums are divided by `label_counts`, as in RewardModelTrainer.
        """
        num_scores, num_pairs = PairCollator.denominators(inputs)
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        scores = outputs.logits.squeeze(-1).float() * self.unit
        loss = scores.new_zeros(())
        targets = inputs["scores"]
        is_known = torch.isfinite(targets)
        if self.args.regression_weight:
            target = torch.where(is_known, targets - self.scale.mean, 0.0)
            errors = torch.where(is_known, (scores - target) / self.scale.std, 0.0).square() / 2
            loss = loss + self.args.regression_weight * (errors.sum() / num_scores)
        chosen, rejected, probability = scores[inputs["first"]], scores[inputs["second"]], inputs["probability"]
        if self.args.pairwise_weight and len(probability):
            pairwise = bradley_terry_loss(chosen, rejected, probability) * (len(probability) / num_pairs)
            loss = loss + self.args.pairwise_weight * pairwise
        self.note_pairs(scores.detach(), chosen.detach(), rejected.detach(), probability)
        # A batch that neither loss uses still runs backward, so that all processes stay in step.
        loss = loss + 0.0 * scores.sum()
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def to_teacher_scale(self) -> None:
        """Multiply the score layer by the teacher's standard deviation, once; a second call changes nothing."""
        layer = score_layer(self.model)
        for parameter in layer.parameters():
            parameter.mul_(self.unit)
        self.unit = 1.0


def check_labels(rows: Dataset, regression_weight: float | None, pairwise_weight: float) -> None:
    """Raise ValueError for rows that no loss uses, with their number and the first one."""
    names = set(rows.column_names)
    if not {"prompt", "chosen"} <= names or not names & set(LABELS):
        raise ValueError(
            f"the rows have columns {', '.join(sorted(names))}; expected prompt, chosen, and one of"
            f" {', '.join(LABELS)}: let a teacher label them (reward_models/teacher.py)"
        )
    require_rows(rows)
    used = ("chosen_score", "rejected", "probability")
    columns = zip(*(rows[name] if name in names else [None] * len(rows) for name in used), strict=True)
    teaches = [
        (regression_weight and score is not None)
        or (pairwise_weight and rejected is not None and probability is not None)
        for score, rejected, probability in columns
    ]
    idle = [index for index, is_used in enumerate(teaches) if not is_used]
    if idle:
        raise ValueError(
            f"{len(idle)} of {len(rows)} rows teach nothing (the first is row {idle[0]}): with regression_weight"
            f" {regression_weight} and pairwise_weight {pairwise_weight} a row needs a score, or a rejected completion"
            " and a probability"
        )
