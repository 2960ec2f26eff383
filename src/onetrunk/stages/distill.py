"""Distillation: reward models, or a judge's probabilities -> a small reward model, and how faithful it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onetrunk.ppo.config import bf16_by_default
from onetrunk.reward_models.distill import RewardDistillationConfig
from onetrunk.reward_models.trainer import option
from onetrunk.stages.arguments import OVERWRITE, ModelArguments, TrainingDataArguments
from onetrunk.stages.parsing import parse
from onetrunk.stages.reward import SCALE_ROWS, finish, load_kwargs, require_output_dir_is_set, trained_reward
from onetrunk.stages.running import run_stage

# Stands for a name while ModelConfig looks whether there is one.
_MADE = "student_config"


@dataclass
class DistillDataArguments(TrainingDataArguments):
    """Preference rows, further rows with one completion, and who teaches on them."""

    teacher: list[str] | None = option(
        None,
        "Reward models or reward adapters, folders or Hub names; several are an ensemble. None: the rows' probability,"
        " which a judge gave.",
    )
    teacher_temperature: float = option(1.0, "Divides a teacher's lead before it becomes a probability; above 0.")
    teacher_batch_size: int = option(32, "Rows in one forward of a teacher.")
    unlabelled_dataset_name: str | None = option(
        None, "Rows with prompt and completion and no label, which teach through the teacher's score."
    )
    unlabelled_dataset_split: str = option("train", "Their split.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.teacher, str):
            self.teacher = [self.teacher]
        if self.teacher is not None and not self.teacher:
            raise ValueError("teacher is an empty list; name reward models, or leave it out")
        if not 0 < self.teacher_temperature < float("inf"):
            raise ValueError(f"teacher_temperature is {self.teacher_temperature}; set a number above 0, such as 1")
        if self.teacher_batch_size < 1:
            raise ValueError(f"teacher_batch_size is {self.teacher_batch_size}; set 1 or more")
        if self.unlabelled_dataset_name and not self.teacher:
            raise ValueError(
                "unlabelled_dataset_name needs a teacher that scores completions; name reward models in teacher"
            )


@dataclass
class StudentArguments(ModelArguments):
    """The student: a model by name (use_peft: an adapter on it, for the policy's trunk), or one made from a config."""

    student_config: dict[str, Any] | str | None = option(
        None,
        "Instead of model_name_or_path: model_type and fields of its config, for random weights; as JSON on the"
        " command line.",
    )
    student_tokenizer: str | None = option(
        None, "Folder or Hub name of the student's tokenizer; None: the one beside model_name_or_path."
    )
    student_vocab_size: int | None = option(
        None, "Instead of student_tokenizer: train a byte-level BPE tokenizer of that many tokens on the rows."
    )

    def __post_init__(self) -> None:
        if isinstance(self.student_config, str):
            self.student_config = _mapping(self.student_config)
        if self.student_config and self.model_name_or_path:
            raise ValueError("model_name_or_path and student_config are both set; keep one of them")
        if self.student_tokenizer and self.student_vocab_size:
            raise ValueError("student_tokenizer and student_vocab_size are both set; keep one of them")
        if not self.student_config:
            if not self.model_name_or_path:
                raise ValueError("no student: set model_name_or_path, or student_config for one with random weights")
            if self.student_vocab_size:
                raise ValueError(
                    "student_vocab_size trains a new tokenizer, which the weights of model_name_or_path don't know; it"
                    " goes with student_config"
                )
            super().__post_init__()
            return
        if self.use_peft:
            raise ValueError("use_peft puts an adapter on a base model, and student_config makes a new one; keep one")
        if not (self.student_tokenizer or self.student_vocab_size):
            raise ValueError(
                "student_config makes a model without a tokenizer; set student_tokenizer to a folder or Hub name, or"
                " student_vocab_size to train one on the rows"
            )
        self.model_name_or_path = _MADE
        super().__post_init__()
        self.model_name_or_path = None


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        example = '{"model_type": "llama", "hidden_size": 64}'
        raise ValueError(f"student_config is {text!r}; expected a mapping as JSON, such as '{example}'")
    return value


@dataclass(repr=False)
class DistillArguments(RewardDistillationConfig):
    """RewardDistillationConfig, with bfloat16 autocast only where an accelerator supports it, and adapter layers."""

    adapter_layers: str = option(
        "all", "With use_peft, layers that get LoRA: all, or top-k (at or above the cut of PPO it reuses its states)."
    )
    overwrite_output_dir: bool = option(False, OVERWRITE)

    def __post_init__(self) -> None:
        require_output_dir_is_set(self)
        if self.bf16 is None:
            self.bf16 = bf16_by_default(self)
        super().__post_init__()


# Of the teacher's scores over the training rows: what brings a student's score back to its scale.
TEACHER_FILE = "teacher.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `onetrunk distill` with these words; return the exit code."""
    return run_stage("distill", parse_distill, run, argv)


def run(data: Any, args: Any, student: Any) -> None:
    """Read the rows, let the teacher label them, train the student, save, measure, push."""
    from onetrunk.checkpoints.hub import require_push
    from onetrunk.stages.resuming import begin, delete_old_run
    from onetrunk.stages.rows import load_preference_rows, load_unlabelled_rows

    is_done, resume = begin("distill", args)
    if is_done:
        return
    train, held_out = load_preference_rows(data, args.seed)
    singles = load_unlabelled_rows(data.unlabelled_dataset_name, data.unlabelled_dataset_split)
    if not data.teacher and "probability" not in train.column_names:
        raise ValueError(
            "no teacher: name reward models in teacher, or give rows with a column probability, which a judge gave"
            " (`onetrunk prefs` writes them)"
        )
    require_push(args)
    model, tokenizer, peft_config = make_student(
        args, student, [r for r in (train, held_out, singles) if r is not None]
    )
    teacher, labelled, labelled_held_out = label(data, args, train, held_out, singles)
    trainer = make_trainer(args, model, tokenizer, peft_config, (labelled, labelled_held_out))
    if teacher is not None and trainer.is_world_process_zero():
        from onetrunk.reward_models.distill import warn_if_larger

        warn_if_larger(model, teacher.num_parameters)
    delete_old_run(args, resume)
    trainer.train(resume_from_checkpoint=resume)
    trainer.to_teacher_scale()
    trainer.save_model()
    if trainer.is_world_process_zero():
        report(trainer, data, teacher, train, held_out)
    finish("distill", trainer, student, data.hub_dataset)


def parse_distill(argv: Sequence[str]) -> tuple[Any, ...]:
    """Return DistillDataArguments, DistillArguments and StudentArguments."""

    types = (DistillDataArguments, DistillArguments, StudentArguments)
    return parse(argv, types, "distill", "Teach a small reward model what reward models, or a judge, say.")


def make_student(args: Any, student: Any, rows: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Return the student before its training, its tokenizer, and its LoRA config, if it is an adapter.

    Args:
        args: DistillArguments.
        student: StudentArguments.
        rows: datasets, those for training first: a tokenizer that is trained here sees these.
    """
    from transformers import set_seed

    from onetrunk.models.new_scorer import (
        load_reward_tokenizer,
        load_with_new_head,
        scorer_from_config,
        train_tokenizer,
    )
    from onetrunk.models.sources import is_adapter, load_config
    from onetrunk.ppo.checks import check_tokenizer
    from onetrunk.stages.reward import score_peft_config

    kwargs = load_kwargs(args, student)
    name = student.model_name_or_path
    if name and is_adapter(name, student.model_revision):
        raise ValueError(f"{name} is an adapter; a student starts from a base model: give that")
    if student.student_vocab_size:
        texts = [*rows[0]["prompt"], *rows[0]["chosen"]]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(
                "student_vocab_size trains a tokenizer on texts, and the rows are conversations; name one"
            )
        tokenizer = train_tokenizer(texts, student.student_vocab_size)
    else:
        # The pinned commit is the model's: of another repository no code runs.
        source = (None, False) if student.student_tokenizer else (kwargs["revision"], kwargs["trust_remote_code"])
        tokenizer = load_reward_tokenizer(student.student_tokenizer or name, *source)
    if name:
        check_tokenizer(
            tokenizer, name, rows, load_config(name, kwargs["revision"], kwargs["trust_remote_code"]).vocab_size
        )
    set_seed(args.seed)  # The new weights are random.
    model = load_with_new_head(name, **kwargs) if name else scorer_from_config(student.student_config, tokenizer)
    return model, tokenizer, score_peft_config(args, student, model)


def label(data: Any, args: Any, train: Any, held_out: Any, singles: Any) -> tuple[Any, Any, Any]:
    """Return the teacher (None: a judge), and the labelled training and held-out rows.

    Every process labels in its turn, the first one for all: the others find its scores in the ledger.
    """
    from accelerate import PartialState

    from onetrunk.reward_models.teacher import SCORES_FILE, Teacher, label_rows

    if not data.teacher:
        return None, train, held_out
    state = PartialState()
    settings = {
        "batch_size": data.teacher_batch_size,
        "device": args.device,
        "temperature": data.teacher_temperature,
        "is_shown": state.is_main_process and not args.disable_tqdm,
    }
    teacher = Teacher.load(data.teacher, Path(args.output_dir) / SCORES_FILE, **settings)
    for process in range(state.num_processes):
        if process == state.process_index:
            labelled = label_rows(teacher, train, singles)
            labelled_held_out = held_out and teacher.label_pairs(held_out)
        state.wait_for_everyone()
    return teacher, labelled, labelled_held_out


def make_trainer(args: Any, model: Any, tokenizer: Any, peft_config: Any, rows: tuple[Any, Any]) -> Any:
    """Return the trainer of a student on labelled rows: those for training and those held out."""
    from onetrunk.reward_models.distill import RewardDistillationTrainer

    train, held_out = rows
    return RewardDistillationTrainer(model, args, train, held_out, tokenizer, peft_config=peft_config)


def report(trainer: Any, data: Any, teacher: Any, train: Any, held_out: Any) -> None:
    """Measure student and teacher on the held-out rows; write metrics.json, plots, and what the scores are like."""
    from onetrunk.models.scorer import ScoreScale
    from onetrunk.reward_models.metrics import score_pairs, teacher_labels
    from onetrunk.utils.files import atomic_write_json
    from onetrunk.utils.redaction import redact_all

    reward, folder = trained_reward(trainer), Path(trainer.args.output_dir)
    if teacher is not None:
        # A member's own zero, and what the mean over members of the centred scores is.
        zero = float(teacher.means.mean()) + trainer.scale.mean
        about = {"teacher": redact_all(data.teacher), "score_mean": zero, "score_std": trainer.scale.std}
        atomic_write_json(folder / TEACHER_FILE, about)
    rows = train.select(range(min(SCALE_ROWS, len(train)))) if held_out is None else held_out
    probabilities, teacher_pairs = teacher_labels(teacher, reward, rows)
    pairs = score_pairs(reward, rows, probabilities)
    if held_out is None:
        print("distill: no held-out rows, so nothing is measured; set eval_dataset_name or eval_size")
    else:
        write_report(trainer, data, teacher, rows, (pairs, probabilities, teacher_pairs))
    ScoreScale.of(pairs.scores).save(folder)


def write_report(trainer: Any, data: Any, teacher: Any, rows: Any, scored: tuple[Any, Any, Any]) -> None:
    """Write and show fidelity, agreement with the rows' own labels, and what student and teacher cost."""
    from dataclasses import replace

    from onetrunk.reward_models.metrics import (
        cost_figures,
        cost_ratios,
        fidelity_figures,
        preference_figures,
        true_labels,
    )
    from onetrunk.stages.plots import plot_reliability, plot_scores
    from onetrunk.stages.report import show_figures, write_figures

    folder = Path(trainer.args.output_dir)
    pairs, probabilities, teacher_pairs = scored
    fidelity = fidelity_figures(pairs, probabilities, teacher_pairs)
    figures = {
        "teacher": data.teacher or "probability",
        "train_rows": len(trainer.train_dataset),
        "seed": trainer.args.seed,
        "num_processes": trainer.accelerator.num_processes,
        "fidelity": fidelity,
    }
    columns: dict[str, Any] = {"student": dict(fidelity)}
    truth = true_labels(rows, has_teacher=teacher is not None)
    sides = {"student": pairs} if teacher_pairs is None else {"student": pairs, "teacher": teacher_pairs}
    if truth is not None:
        figures["labels"] = {name: preference_figures(replace(side, labels=truth)) for name, side in sides.items()}
        for name, own in figures["labels"].items():
            columns.setdefault(name, {}).update(
                {f"labels/{key}": own[key] for key in ("accuracy", "accuracy_interval", "calibration_error")}
            )
    if teacher is not None:
        texts = rows["prompt"], rows["chosen"]
        student = trained_reward(trainer)
        student.batch_size = data.teacher_batch_size  # Both are timed alike.
        costs = {"student": cost_figures([student], *texts)}
        costs["teacher"] = cost_figures(teacher.members, *texts)
        figures["cost"] = {**costs, "teacher_over_student": cost_ratios(costs["student"], costs["teacher"])}
        for name, cost in costs.items():
            columns.setdefault(name, {}).update({f"cost/{key}": value for key, value in cost.items()})
        plot_scores(folder, teacher_pairs.scores.tolist(), pairs.scores.tolist())
    plot_reliability(folder, {"student, by the teacher's probabilities": fidelity["reliability"]})
    write_figures(folder, figures)
    show_figures(f"{folder} on {len(rows)} held-out pairs", columns)
