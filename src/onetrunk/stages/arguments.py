"""What a recipe can say beside the trainers' own settings: which rows, which reward functions, which model.

Dataclasses for TrlParser: one field is one YAML key and one command line option. Knows no rows and no model yet.
"""

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from trl import ModelConfig, SFTConfig, get_peft_config

from onetrunk.checkpoints.secrets import SecretFreeArguments
from onetrunk.checkpoints.settings import CheckpointSettings
from onetrunk.ppo.config import PPOConfig, bf16_by_default
from onetrunk.utils.randomness import require_seed


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class DatasetArguments:
    """Where the rows come from."""

    dataset_name: str | None = _option(None, "A .jsonl, .json, .parquet or .csv file, a folder, or a name on the Hub.")
    dataset_config: str | None = _option(None, "Configuration of a Hub dataset with several.")
    dataset_split: str = _option("train", "Split, with a slice if wanted: train[:1000]. A file has only train.")
    dataset_columns: dict[str, str] | str | None = _option(
        None, "Columns under another name, ours first: {prompt: question}; as JSON on the command line."
    )

    def __post_init__(self) -> None:
        if not self.dataset_name:
            raise ValueError("dataset_name is not set; give a file, a folder, or the name of a dataset on the Hub")
        if isinstance(self.dataset_columns, str):
            self.dataset_columns = _json_mapping("dataset_columns", self.dataset_columns)

    @property
    def hub_dataset(self) -> str | None:
        """The dataset's name for a model card; None for a local one, which the Hub would not know."""
        return None if Path(self.dataset_name).exists() else self.dataset_name


def _json_mapping(name: str, text: str) -> dict[str, str]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f'{name} is {text!r}; expected a mapping as JSON, such as \'{{"prompt": "question"}}\'')
    return value


@dataclass
class TrainingDataArguments(DatasetArguments):
    """Training rows and held-out rows: those of another dataset or split, or a part of the training rows."""

    eval_dataset_name: str | None = _option(None, "Held-out rows: a file, folder or Hub name with the same columns.")
    eval_dataset_split: str | None = _option(None, "Their split; alone it names a split of dataset_name.")
    eval_size: float | None = _option(
        None, "Else hold out so many training rows (1 or more), or that share (below 1)."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval_size is not None and (self.eval_dataset_name or self.eval_dataset_split):
            raise ValueError("eval_size and eval_dataset_name or eval_dataset_split are both set; keep one of them")
        if self.eval_size is not None and self.eval_size >= 1:
            if self.eval_size != int(self.eval_size):
                raise ValueError(f"eval_size is {self.eval_size}; give a whole number of rows, or a share below 1")
            self.eval_size = int(self.eval_size)


@dataclass
class PPODataArguments(TrainingDataArguments):
    """Rows of prompts, and what scores the completions."""

    reward_funcs: list[str] | None = _option(
        None,
        "package.module.function, path/to/file.py:function, a reward model's folder or Hub name (an adapter on the"
        " policy's own base is a branch of its trunk), a server's address, http://host:port/classify#model=NAME, or"
        " with a judge the words judge (its rating) and pairwise (log P of beating the reference); one or several.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reward_funcs = _several("reward_funcs", self.reward_funcs)


def _several(name: str, value: list[str] | str | None) -> list[str]:
    if not value:
        raise ValueError(f"{name} is not set; give at least one, such as path/to/file.py:function")
    return [value] if isinstance(value, str) else value


@dataclass
class ModelArguments(ModelConfig):
    """TRL's ModelConfig: the model, its precision, and the LoRA adapter; without dropout, which PPO cannot have."""

    model_revision: str = _option("main", "Branch, tag or commit on the Hub.")
    dtype: str | None = field(
        default="auto",
        metadata={
            "help": "Precision of the weights. auto: the checkpoint's own; for full fine-tuning float32.",
            "choices": ["auto", "bfloat16", "float16", "float32"],
        },
    )
    use_peft: bool | None = _option(None, "sft: train a LoRA adapter instead of all weights. ppo always trains one.")
    lora_dropout: float = _option(0.0, "LoRA dropout; sft only.")
    lora_target_modules: list[str] | None = field(
        default_factory=lambda: ["all-linear"],
        metadata={"help": "Names of modules that get LoRA; all-linear: all but the head."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # TRL makes one name a text, which PEFT would read as a regular expression over whole paths.
        if isinstance(self.lora_target_modules, str) and self.lora_target_modules != "all-linear":
            self.lora_target_modules = [self.lora_target_modules]
        if not self.model_name_or_path:
            raise ValueError("model_name_or_path is not set; give a folder or a name on the Hub")
        for name, reason in WITHOUT_MEANING.items():
            if getattr(self, name) != getattr(ModelConfig, name):
                raise ValueError(f"{name}={getattr(self, name)!r} has no meaning here: {reason}")
        if self.load_in_4bit and self.dtype in (None, "auto"):
            raise ValueError("load_in_4bit computes in dtype, which is auto; set dtype to bfloat16 (float32 on a CPU)")

    def init_kwargs(self) -> dict[str, Any]:
        """Return the keywords of `load_base` that the fields say."""
        kwargs = {
            "dtype": self.dtype,
            "attn_implementation": self.attn_implementation,
            "revision": self.model_revision,
        }
        return {key: value for key, value in kwargs.items() if value is not None}

    def peft_config(self) -> Any:
        """Return the LoraConfig that the fields say."""
        return get_peft_config(replace(self, use_peft=True))

    def changed_lora_fields(self) -> list[str]:
        """Return the names of the LoRA fields that differ from their defaults."""
        plain = ModelArguments(model_name_or_path=self.model_name_or_path)
        names = [f.name for f in fields(self) if f.name.startswith("lora_") or f.name in ("use_rslora", "use_dora")]
        return [name for name in names if getattr(self, name) != getattr(plain, name)]


WITHOUT_MEANING = {
    "lora_modules_to_save": "the trunk stays frozen, and the value head is kept beside the adapter",
    "lora_target_parameters": "adapters stand on linear layers; use lora_target_modules",
    "lora_task_type": "it is always CAUSAL_LM",
    "bnb_4bit_quant_storage": "it is for sharded training, which is not supported yet",
}


OVERWRITE = "Start anew in an output_dir that holds a run: its checkpoints are deleted when training begins."


def _require_output_dir(args: Any) -> None:
    if not args.output_dir:
        raise ValueError("output_dir is not set; name the folder that this run writes to")


@dataclass(repr=False)
class SFTArguments(CheckpointSettings, SecretFreeArguments, SFTConfig):
    """TRL's SFTConfig, with bfloat16 autocast only where an accelerator supports it, as in PPOConfig."""

    overwrite_output_dir: bool = _option(False, OVERWRITE)

    def __post_init__(self) -> None:
        _require_output_dir(self)
        require_seed("seed", self.seed)
        require_seed("data_seed", self.data_seed)
        if self.bf16 is None:
            self.bf16 = bf16_by_default(self)
        super().__post_init__()


@dataclass(repr=False)
class PPOArguments(PPOConfig):
    """PPOConfig, which must be told where to write."""

    overwrite_output_dir: bool = _option(False, OVERWRITE)

    def __post_init__(self) -> None:
        _require_output_dir(self)
        super().__post_init__()
