"""RewardDistillationTrainer: a small reward model (the student) learns the labels of a teacher.

The loss is a weighted sum. Regression: half the squared difference of student and teacher score, in standard
deviations of the teacher's scores. Pairwise: the Bradley-Terry loss against the teacher's probability. If the teacher
is a reward model, both have their minimum (at temperature 1) at its scores minus their mean. Rows with one completion
count only in the regression, and a judge's probabilities only in the pairwise loss. Each loss is a mean over the rows
or pairs of an optimizer step, on all processes together. `Teacher` labels rows with reward models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from onetrunk.data.rows import PAIR, SIDES, STOPPED, check_preferences, refuse_variables, require_rows, stopped_column
from onetrunk.data.sharded import ShardedRows, known_rows
from onetrunk.models.reward_model import ScoreScale, score_layer
from onetrunk.ops.losses import bradley_terry_loss
from onetrunk.reward_models.training import PairCollator, PairEncoder, RewardModelConfig, RewardModelTrainer
from onetrunk.rewards.model import ModelReward
from onetrunk.rewards.reward import Completion
from onetrunk.types import Prompt
from onetrunk.utils.bars import WorkBar
from onetrunk.utils.files import digest
from onetrunk.utils.ledger import Ledger
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
            raise ValueError("regression_weight and pairwise_weight are both 0, so nothing is learned; raise one")
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
            f" {', '.join(LABELS)}: let a `Teacher` label them"
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


SCORES_FILE = "teacher_scores.db"
# Prompt, completion, and whether it ended by itself.
Item = tuple[Prompt, Completion, bool]
# Rows scored between two writes to the ledger: the most that a killed run computes again.
CHUNK = 128


class Teacher:
    """One or several reward models: their mean score, and the mean probability that they give to a pair.

    Preferences do not fix the zero of a reward model, so each member's mean over the training rows is subtracted
    (`centre`) before scores are averaged. The probability of a member is sigmoid(lead / temperature). Each score is
    computed once and kept in a ledger in the run's folder, keyed by the model's weights, prompt and completion.

    Args:
        members: at least one reward model with its tokenizer.
        cache: the ledger's file; None: nothing is kept.
        temperature: above 0; above 1 gives softer labels.
        is_shown: True shows a progress bar.
    """

    def __init__(
        self,
        members: Sequence[ModelReward],
        cache: str | Path | None,
        temperature: float = 1.0,
        is_shown: bool = False,
    ):
        self.members, self.cache = list(members), None if cache is None else Path(cache)
        self.temperature, self.is_shown = temperature, is_shown
        self.identities = [member.content() for member in self.members]
        self.means = torch.zeros(len(self.members))
        self.num_computed = 0

    def member_scores(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], stopped: Sequence[bool] | None = None
    ) -> Tensor:
        """Return raw scores [members, n] in float32. Only those that are not in the ledger are computed.

        Args:
            prompts: n texts or conversations.
            completions: n texts, or lists that end with an assistant message.
            stopped: n booleans, False for a completion that was cut off; None: no completion was cut off.
        """
        stopped = [True] * len(prompts) if stopped is None else stopped
        if self.cache is None:
            columns = {"prompts": prompts, "completions": completions, "completion_stopped": stopped}
            return torch.tensor([member(**columns) for member in self.members])
        items = list(zip(prompts, completions, stopped, strict=True))
        with Ledger(self.cache) as ledger:
            return torch.tensor(
                [
                    self._kept_scores(member, items, [_score_key(name, *item) for item in items], ledger)
                    for member, name in zip(self.members, self.identities, strict=True)
                ]
            )

    def _kept_scores(
        self, member: ModelReward, items: Sequence[Item], keys: Sequence[str], ledger: Ledger
    ) -> list[float]:
        missing = list({key: item for key, item in zip(keys, items, strict=True) if key not in ledger}.items())
        hidden = not (self.is_shown and missing)
        with WorkBar(total=len(missing), desc="teacher", unit="row", disable=hidden) as bar:
            for start in range(0, len(missing), CHUNK):
                chunk = missing[start : start + CHUNK]
                prompts, completions, stopped = map(list, zip(*(item for _, item in chunk), strict=True))
                scores = member(prompts=prompts, completions=completions, completion_stopped=stopped)
                with ledger.writing():
                    for (key, _), score in zip(chunk, scores, strict=True):
                        ledger.put(key, score)
                self.num_computed += len(chunk)
                bar.update(len(chunk))
        return [ledger.get(key) for key in keys]

    def centre(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], stopped: Sequence[bool] | None = None
    ) -> None:
        """Set each member's zero to its mean over these rows."""
        self.means = self.member_scores(prompts, completions, stopped).mean(dim=1)

    def scores(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], stopped: Sequence[bool] | None = None
    ) -> Tensor:
        """Return scores [n]: the mean over the members, each minus its zero."""
        return self._centred(self.member_scores(prompts, completions, stopped))

    def _centred(self, member_scores: Tensor) -> Tensor:
        return torch.mean(member_scores - self.means[:, None], dim=0)

    def label_pairs(self, rows: Dataset) -> Dataset:
        """Return preference rows with `chosen_score`, `rejected_score`, and the teacher's `probability`."""
        refuse_variables(rows, "a teacher")
        check_preferences(rows)
        stopped = {name: stopped_column(rows, name) for name in STOPPED}
        sides = [self.member_scores(rows["prompt"], rows[name], stopped[f"{name}_stopped"]) for name in SIDES]
        probability = torch.sigmoid((sides[0] - sides[1]) / self.temperature).mean(dim=0)
        scores = {f"{name}_score": self._centred(side).tolist() for name, side in zip(SIDES, sides, strict=True)}
        columns = {name: rows[name] for name in PAIR}
        columns |= {**stopped, **scores, "probability": probability.tolist()}
        return Dataset.from_dict(columns, on_mixed_types="use_json")  # As `load_rows` reads calls of tools.


def label_rows(teacher: Teacher, pairs: Dataset, singles: Dataset | None = None) -> Dataset:
    """Centre the teacher, and return the labelled training rows.

    Args:
        singles: rows with `prompt` and `completion`, which become pairs without a rejected side; or None.
    """
    prompts, completions = [*pairs["prompt"], *pairs["prompt"]], [*pairs["chosen"], *pairs["rejected"]]
    stopped = [has_stopped for name in STOPPED for has_stopped in stopped_column(pairs, name)]
    if singles is None:
        teacher.centre(prompts, completions, stopped)
        return teacher.label_pairs(pairs)
    single = (list(singles["prompt"]), list(singles["completion"]), stopped_column(singles, "completion_stopped"))
    teacher.centre(prompts + single[0], completions + single[1], stopped + single[2])
    rows = [
        {"prompt": prompt, "chosen": chosen, "chosen_stopped": ended, "rejected_stopped": True, "chosen_score": score}
        for prompt, chosen, ended, score in zip(*single, teacher.scores(*single).tolist(), strict=True)
    ]
    # A column that a row lacks is null in it.
    return Dataset.from_list([*teacher.label_pairs(pairs), *rows], on_mixed_types="use_json")


def label_streamed(teacher: Teacher, pairs: ShardedRows) -> ShardedRows:
    """Centre the teacher on a sample of preference rows, and return the rows, labelled as they are read.

    No ledger keeps their scores: it would grow with the rows.
    """
    sample = pairs.sample()
    sides = [(sample["prompt"], sample[name], stopped_column(sample, f"{name}_stopped")) for name in SIDES]
    teacher.centre(*([value for side in sides for value in side[part]] for part in range(3)))
    labelling = Teacher(teacher.members, None, teacher.temperature)
    labelling.means = teacher.means
    about = f"teacher {digest([*teacher.identities, teacher.temperature])}"
    return pairs.encoded(lambda rows: list(labelling.label_pairs(Dataset.from_list(rows))), about)


def _score_key(model: str, prompt: Prompt, completion: Completion, stopped: bool) -> str:
    about = {"model": model, "prompt": prompt, "completion": completion}
    return digest(about if stopped else {**about, "stopped": False})
