"""What a recipe of `onetrunk reward` can say beside rows and model. Knows no rows and no model yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onetrunk.stages.arguments import OVERWRITE, ModelArguments
from onetrunk.trainers.ppo_config import bf16_by_default
from onetrunk.trainers.reward import RewardModelConfig, option


def require_output_dir_is_set(args: Any) -> None:
    """Refuse settings that don't say where to write.

    Raises:
        ValueError: output_dir is not set.
    """
    if not args.output_dir:
        raise ValueError("output_dir is not set; name the folder that this run writes to")


@dataclass(repr=False)
class RewardArguments(RewardModelConfig):
    """RewardModelConfig, with bfloat16 autocast only where an accelerator supports it, and the adapter's layers."""

    adapter_layers: str = option(
        "all", "With use_peft, layers that get LoRA: all, or top-k (at or above the cut of PPO it reuses its states)."
    )
    overwrite_output_dir: bool = option(False, OVERWRITE)

    def __post_init__(self) -> None:
        require_output_dir_is_set(self)
        if self.bf16 is None:
            self.bf16 = bf16_by_default(self)
        super().__post_init__()


def score_peft_config(args: Any, model_args: ModelArguments, model: Any) -> Any:
    """Return the LoRA config of a reward adapter on a model, None where all weights train.

    Args:
        args: with `adapter_layers`.
        model_args: with the LoRA fields.
        model: the sequence-classification model.

    Raises:
        ValueError: adapter_layers beyond the model, or without use_peft.
    """
    from onetrunk.models.adapters import fit_layers, parse_adapter_layers, policy_config
    from onetrunk.models.backbone import decoder_layers

    if not model_args.use_peft:
        if args.adapter_layers != "all":
            raise ValueError(f"adapter_layers is {args.adapter_layers!r} and all weights train; set use_peft: true")
        return None
    config = model_args.peft_config()
    if args.adapter_layers != "all":
        layers = decoder_layers(model)
        config = policy_config(config, parse_adapter_layers(args.adapter_layers, len(layers)), len(layers))
        fit_layers(config, layers)
    config.task_type = "SEQ_CLS"
    return config
