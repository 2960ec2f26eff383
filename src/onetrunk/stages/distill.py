"""Distillation: reward models, or a judge's probabilities -> a small reward model, and how faithful it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from onetrunk.checkpoints.hub import require_push
from onetrunk.checkpoints.resume_settings import check_streaming
from onetrunk.data.rows import is_conversational, without_prompts_of
from onetrunk.data.sharded import ShardedRows
from onetrunk.models.build import scorer_from_config
from onetrunk.models.loading import load_config
from onetrunk.models.reward_model import ScoreScale, load_reward_tokenizer, load_with_new_head
from onetrunk.parallel.groups import forwards_of_first, wait_for_first_process
from onetrunk.parallel.sharding import cast_when_sharded, gathered
from onetrunk.reward_models.distill import (
    SCORES_FILE,
    RewardDistillationConfig,
    RewardDistillationTrainer,
    Teacher,
    label_rows,
    label_streamed,
)
from onetrunk.reward_models.metrics import (
    ScoredPairs,
    compared_costs,
    fidelity_metrics,
    preference_metrics,
    score_pairs,
    teacher_labels,
    true_labels,
)
from onetrunk.rewards.model import load_reward
from onetrunk.stages.arguments import OptionalModelArguments, RewardTrainingArguments, TrainingDataArguments, parse
from onetrunk.stages.results import plot_reliability, show_columns, write_values
from onetrunk.stages.reward import load_kwargs, result_of, rows_to_measure, score_peft_config, trained_reward
from onetrunk.stages.rows import TrainingRows, check_tokenizer, load_preference_rows, load_unlabelled_rows
from onetrunk.stages.run_context import begin, finish, recorded
from onetrunk.utils.options import option

# Of each part of metrics.json in the terminal.
SHOWN = {
    "labels": ("accuracy", "accuracy_interval", "calibration_error"),
    "cost": ("parameters", "weights_mib", "seconds_per_1000"),
}


@dataclass
class DistillDataArguments(TrainingDataArguments):
    """Preference rows, further rows with one completion, and the teacher that labels them."""

    teacher: list[str] | None = option(
        None,
        "Reward models or reward adapters, folders or Hub names; several are an ensemble. None: the rows' probability,"
        " which a judge gave.",
    )
    teacher_temperature: float = option(1.0, "Divides the difference of two scores before the sigmoid; above 0.")
    teacher_batch_size: int = option(32, "Rows in one forward of a teacher.")
    unlabelled_dataset_name: str | None = option(
        None, "Rows with prompt and completion and no label; the student learns the teacher's score of them."
    )
    unlabelled_dataset_split: str = option("train", "Their split.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.teacher_temperature < float("inf"):
            raise ValueError(f"teacher_temperature is {self.teacher_temperature}; set a number above 0, such as 1")
        if self.teacher_batch_size < 1:
            raise ValueError(f"teacher_batch_size is {self.teacher_batch_size}; set 1 or more")
        if self.unlabelled_dataset_name and self.streaming:
            raise ValueError(
                "unlabelled_dataset_name adds rows to a dataset in memory, and streaming keeps none there; leave one"
                " out, or let a teacher label those rows as pairs"
            )
        if self.unlabelled_dataset_name and not self.teacher:
            raise ValueError(
                "unlabelled_dataset_name needs a teacher that scores completions; name reward models in teacher"
            )


@dataclass
class StudentArguments(OptionalModelArguments):
    """The student: a model by name (use_peft: an adapter on it, for the policy's base), or one made from a config."""

    student_config: dict[str, Any] | None = option(
        None,
        "Instead of model_name_or_path: model_type and fields of its config, for random weights; as JSON on the"
        " command line.",
    )
    student_tokenizer: str | None = option(
        None, "Folder or Hub name of the student's tokenizer; None: the tokenizer of model_name_or_path."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        has_config = bool(self.student_config)
        faults = {
            "model_name_or_path and student_config are both set; keep one of them": has_config
            and self.model_name_or_path,
            "no student: set model_name_or_path, or student_config for one with random weights": not has_config
            and not self.model_name_or_path,
            "use_peft puts an adapter on a base model, and student_config makes a new one; keep one": has_config
            and self.use_peft,
            "student_config makes a model without a tokenizer; set student_tokenizer": has_config
            and not self.student_tokenizer,
        }
        for message, is_wrong in faults.items():
            if is_wrong:
                raise ValueError(message)


@dataclass(repr=False)
class DistillArguments(RewardTrainingArguments, RewardDistillationConfig):
    """Settings of `onetrunk distill`."""


def run(data: DistillDataArguments, args: DistillArguments, student: StudentArguments) -> None:
    is_done, resume = begin("distill", args)
    if is_done:
        return
    if data.streaming:
        check_streaming(args, reads_alone=bool(data.teacher))
    pairs, held_out, singles = load_labels(data, args.seed)
    require_push(args)
    model, tokenizer, peft_config = make_student(args, student, (pairs, held_out, singles))
    teacher, labelled, labelled_held_out = label(data, args, pairs, held_out, singles)
    trainer = RewardDistillationTrainer(model, args, labelled, labelled_held_out, tokenizer, peft_config=peft_config)
    with recorded(trainer, resume, "distill", data, student):
        trainer.train(resume_from_checkpoint=resume)
    trainer.to_teacher_scale()
    trainer.save_model()
    with gathered(trainer.model), forwards_of_first(trainer.model) as is_first:
        if is_first:
            report(trainer, data, teacher, pairs, held_out)
    finish("distill", trainer, result_of(student), dataset_name=data.hub_dataset)


def load_labels(data: DistillDataArguments, seed: int) -> tuple[TrainingRows, Dataset | None, Dataset | None]:
    """Return training pairs, held-out pairs and rows with one completion; without a teacher they have its labels."""
    pairs, held_out = load_preference_rows(data, seed, has_labels=True)
    singles = load_unlabelled_rows(data.unlabelled_dataset_name, data.unlabelled_dataset_split)
    if singles is not None and is_conversational(singles) != is_conversational(pairs):
        kinds = ("texts", "conversations") if is_conversational(pairs) else ("conversations", "texts")
        raise ValueError(
            f"unlabelled_dataset_name {data.unlabelled_dataset_name} holds {kinds[0]} and dataset_name {kinds[1]};"
            " give both in the same form"
        )
    if singles is not None and data.eval_size is not None:
        singles, number = without_prompts_of(held_out, singles)
        if number and PartialState().is_main_process:
            print(f"unlabelled rows left out because their prompts are held out: {number:,}")
    if not data.teacher and "probability" not in pairs.column_names:
        raise ValueError(
            "no teacher: name reward models in teacher, or give rows with a column probability, which a judge gave"
            " (`onetrunk prefs` writes them)"
        )
    return pairs, held_out, singles


def make_student(
    args: DistillArguments, student: StudentArguments, datasets: Sequence[TrainingRows | None]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, LoraConfig | None]:
    """Return the untrained student, its tokenizer, and its LoRA config if it is an adapter."""
    name, kwargs = student.model_name_or_path, load_kwargs(args, student, "a student")
    tokenizer = load_student_tokenizer(student, kwargs)
    if name:
        config = load_config(name, kwargs["revision"], kwargs["trust_remote_code"])
        check_tokenizer(tokenizer, name, datasets, config.vocab_size)
    set_seed(args.seed)  # The new weights are random.
    with cast_when_sharded():
        model = load_with_new_head(name, **kwargs) if name else scorer_from_config(student.student_config, tokenizer)
    return model, tokenizer, score_peft_config(args, student, model)


def load_student_tokenizer(student: StudentArguments, kwargs: dict[str, Any]) -> PreTrainedTokenizerBase:
    """Return the student's tokenizer; `kwargs` are those that load its model."""
    # The pinned commit is the model's; code of another repository is not run.
    source = (None, False) if student.student_tokenizer else (kwargs["revision"], kwargs["trust_remote_code"])
    return load_reward_tokenizer(student.student_tokenizer or student.model_name_or_path, *source)


def label(
    data: DistillDataArguments,
    args: DistillArguments,
    train: TrainingRows,
    held_out: Dataset | None,
    singles: Dataset | None,
) -> tuple[Teacher | None, TrainingRows, Dataset | None]:
    """Return the teacher (None if a judge gave the labels), and the labelled training and held-out rows.

    The processes label one after the other: the first computes all scores, and the others read them from the ledger.
    Streamed rows are labelled when they are read, and a sample of them sets the teacher's zero.
    """
    if not data.teacher:
        return None, train, held_out
    state = PartialState()
    members = [load_reward(name, device=args.device, batch_size=data.teacher_batch_size) for name in data.teacher]
    is_shown = state.is_main_process and not args.disable_tqdm
    teacher = Teacher(members, Path(args.output_dir) / SCORES_FILE, data.teacher_temperature, is_shown)
    wait_for_first_process()
    for process in range(state.num_processes):
        if process == state.process_index:
            is_streamed = isinstance(train, ShardedRows)
            labelled = label_streamed(teacher, train) if is_streamed else label_rows(teacher, train, singles)
            labelled_held_out = held_out and teacher.label_pairs(held_out)
        state.wait_for_everyone()
    return teacher, labelled, labelled_held_out


def report(
    trainer: RewardDistillationTrainer,
    data: DistillDataArguments,
    teacher: Teacher | None,
    train: TrainingRows,
    held_out: Dataset | None,
) -> None:
    """Measure student and teacher on the held-out rows; write metrics.json, a plot, and the scale of the scores."""
    reward, folder = trained_reward(trainer), Path(trainer.args.output_dir)
    rows = rows_to_measure(train, held_out)
    probabilities, teacher_pairs = teacher_labels(teacher, reward, rows)
    pairs = score_pairs(reward, rows, probabilities)
    ScoreScale.of(pairs.scores).save(folder)
    if held_out is None:
        print("distill: no held-out rows, so nothing is measured; set eval_dataset_name or eval_size")
        return
    about = {"teacher": data.teacher or "probability", "train_rows": len(trainer.train_dataset)}
    about |= {"seed": trainer.args.seed, "num_processes": trainer.accelerator.num_processes}
    values = measured(rows, pairs, probabilities, teacher_pairs)
    if teacher is not None:
        reward.batch_size = data.teacher_batch_size  # Both are timed with the same batches.
        values["cost"] = compared_costs([reward], teacher.members, rows["prompt"], rows["chosen"])
    plot_reliability(folder, {"student, by the teacher's probabilities": values["fidelity"]["reliability"]})
    write_values(folder, about | values)
    columns: dict[str, dict[str, Any]] = {"student": dict(values["fidelity"])}
    for kind in ("labels", "cost"):
        for side in [name for name in ("student", "teacher") if name in values.get(kind, ())]:
            shown = {f"{kind}/{name}": values[kind][side].get(name) for name in SHOWN[kind]}
            columns.setdefault(side, {}).update(shown)
    show_columns(f"{folder} on {len(rows)} held-out pairs", columns)


def measured(
    rows: Dataset, pairs: ScoredPairs, probabilities: Tensor, teacher_pairs: ScoredPairs | None
) -> dict[str, Any]:
    """Return the student's fidelity to the teacher, and the agreement of both with the rows' own labels."""
    values: dict[str, Any] = {"fidelity": fidelity_metrics(pairs, probabilities, teacher_pairs)}
    truth = true_labels(rows, has_teacher=teacher_pairs is not None)
    if truth is not None:
        sides = {"student": pairs} if teacher_pairs is None else {"student": pairs, "teacher": teacher_pairs}
        values["labels"] = {name: preference_metrics(replace(side, labels=truth)) for name, side in sides.items()}
    return values


parse_distill = partial(
    parse, verb="distill", dataclass_types=(DistillDataArguments, DistillArguments, StudentArguments)
)
