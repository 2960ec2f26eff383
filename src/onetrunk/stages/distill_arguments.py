"""What a recipe of `onetrunk distill` can say: teacher, student and rows. Knows no rows and no model yet."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from onetrunk.stages.arguments import OVERWRITE, ModelArguments, TrainingDataArguments
from onetrunk.stages.reward_arguments import require_output_dir_is_set
from onetrunk.trainers.distill import RewardDistillationConfig
from onetrunk.trainers.ppo_config import bf16_by_default
from onetrunk.trainers.reward import option

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
