"""Arguments that several stages share and that extend a library's: the model, and the settings of a training.

The dataclasses are for TrlParser: one field is one YAML key and one command line option. Those that need no library
are in `plain_arguments.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from trl import ModelConfig, SFTConfig, get_peft_config

from onetrunk.checkpoints.config import CheckpointConfig
from onetrunk.checkpoints.secrets import SecretFreeArguments
from onetrunk.models.loading import is_adapter
from onetrunk.ppo.config import PPOConfig, bf16_by_default
from onetrunk.stages.plain_arguments import check_model, check_seeds, require_output_dir_is_set
from onetrunk.utils.options import option

if TYPE_CHECKING:
    from peft import LoraConfig


@dataclass
class ModelArguments(ModelConfig):
    """TRL's ModelConfig (the model, its precision, the LoRA adapter), without LoRA dropout."""

    needs_model: ClassVar[bool] = True

    model_revision: str = option("main", "Branch, tag or commit on the Hub.")
    dtype: str | None = option(
        "auto",
        "Precision of the weights. auto: the checkpoint's own; for full fine-tuning float32.",
        ("auto", "bfloat16", "float16", "float32"),
    )
    use_peft: bool | None = option(None, "sft: train a LoRA adapter instead of all weights. ppo always trains one.")
    lora_dropout: float = option(0.0, "LoRA dropout; sft only.")
    lora_target_modules: list[str] | None = field(
        default_factory=lambda: ["all-linear"],
        metadata={"help": "Names of modules that get LoRA; all-linear: all but the head."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # TRL turns a list of one name into a string, which PEFT would read as a regular expression over whole paths.
        if isinstance(self.lora_target_modules, str) and self.lora_target_modules != "all-linear":
            self.lora_target_modules = [self.lora_target_modules]
        check_model(self, ModelConfig.__dict__, self.needs_model)

    def init_kwargs(self) -> dict[str, Any]:
        attention = self.attn_implementation
        kwargs = {"dtype": self.dtype, "attn_implementation": attention, "revision": self.model_revision}
        return {key: value for key, value in kwargs.items() if value is not None}

    def base_kwargs(self, args: SFTConfig | RewardTrainingArguments, what: str) -> dict[str, Any]:
        """Return the keyword arguments to load a base model with; move those of the settings there.

        Raises:
            ValueError: the model is an adapter; `what` names the training in the message.
        """
        name = self.model_name_or_path
        if name and is_adapter(name, self.model_revision):
            raise ValueError(f"{name} is an adapter; {what} starts from a base model: give that")
        given, args.model_init_kwargs = args.model_init_kwargs or {}, None
        kwargs = {**self.init_kwargs(), "trust_remote_code": args.trust_remote_code, **given}
        if not self.use_peft and kwargs.get("dtype") == "auto":
            # All weights train: bfloat16 would lose small updates.
            kwargs["dtype"] = "float32"
        return kwargs

    def peft_config(self) -> LoraConfig:
        return get_peft_config(replace(self, use_peft=True))

    def changed_lora_fields(self) -> list[str]:
        plain = ModelArguments(model_name_or_path=self.model_name_or_path)
        names = [f.name for f in fields(self) if f.name.startswith("lora_") or f.name in ("use_rslora", "use_dora")]
        return [name for name in names if getattr(self, name) != getattr(plain, name)]


@dataclass
class OptionalModelArguments(ModelArguments):
    """ModelArguments of a stage that may need no model; the stage checks whether it does."""

    needs_model: ClassVar[bool] = False


@dataclass(repr=False)
class StageTrainingArguments:
    """What every training stage adds to its trainer's settings class; it stands before that class.

    bfloat16 autocast is the default only where an accelerator supports it.
    """

    write_report: bool = option(
        True, "At the end, write _report/report.html in output_dir: curves, alarms, samples, settings."
    )

    def __post_init__(self) -> None:
        require_output_dir_is_set(self)
        if self.bf16 is None:
            self.bf16 = bf16_by_default(self)
        super().__post_init__()


@dataclass(repr=False)
class RewardTrainingArguments(StageTrainingArguments):
    """What a stage adds that trains a reward model; which layers of a reward adapter train."""

    adapter_layers: str = option(
        "all", "With use_peft, layers that get LoRA: all, or top-k (at or above the cut of PPO it reuses its states)."
    )


@dataclass(repr=False)
class SFTArguments(StageTrainingArguments, CheckpointConfig, SecretFreeArguments, SFTConfig):
    """Settings of `onetrunk sft`."""

    def __post_init__(self) -> None:
        check_seeds(self)
        super().__post_init__()


@dataclass(repr=False)
class PPOArguments(StageTrainingArguments, PPOConfig):
    """Settings of `onetrunk ppo`."""
