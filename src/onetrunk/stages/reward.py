"""Reward model: preference rows -> a scalar model, or a LoRA adapter with a score head for the policy's trunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onetrunk.ppo.config import bf16_by_default
from onetrunk.reward_models.trainer import RewardModelConfig, option
from onetrunk.stages.arguments import OVERWRITE, ModelArguments
from onetrunk.stages.parsing import parse
from onetrunk.stages.running import run_stage


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
    from onetrunk.models.base import decoder_layers

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


# Training rows that give the scale of the scores where none are held out.
SCALE_ROWS = 500


def main(argv: Sequence[str] | None = None) -> int:
    """Run `onetrunk reward` with these words; return the exit code."""
    return run_stage("reward", parse_reward, run, argv)


def run(data: Any, args: Any, model_args: Any) -> None:
    """Read the rows, load the model, train, save, measure, push."""
    from onetrunk.checkpoints.hub import require_push
    from onetrunk.stages.resuming import begin, delete_old_run
    from onetrunk.stages.rows import load_preference_rows

    is_done, resume = begin("reward", args)
    if is_done:
        return
    train, held_out = load_preference_rows(data, args.seed)
    require_push(args)
    trainer = make_trainer(args, model_args, train, held_out)
    delete_old_run(args, resume)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    if trainer.is_world_process_zero():
        report(trainer, model_args.model_name_or_path, train, held_out)
    finish("reward", trainer, model_args, data.hub_dataset)


def parse_reward(argv: Sequence[str]) -> tuple[Any, ...]:
    """Return TrainingDataArguments, RewardArguments and ModelArguments."""
    from onetrunk.stages.arguments import ModelArguments, TrainingDataArguments

    types = (TrainingDataArguments, RewardArguments, ModelArguments)
    return parse(argv, types, "reward", "Train a reward model on preferences (prompt, chosen, rejected, probability).")


def finish(verb: str, trainer: Any, model_args: Any, hub_dataset: str | None) -> None:
    """Push where it is wanted, say where the result lies, and end."""
    from onetrunk.stages.resuming import note_finished

    trainer.accelerator.wait_for_everyone()
    if trainer.args.push_to_hub:
        trainer.push_to_hub(dataset_name=hub_dataset)
    note_finished(trainer)
    if trainer.is_world_process_zero():
        what = "an adapter with its score head" if model_args.use_peft else "a reward model"
        print(f"{verb}: saved {what} in {trainer.args.output_dir}")
    trainer.accelerator.end_training()


def load_kwargs(args: Any, model_args: Any) -> dict[str, Any]:
    """Return the keywords with which the model loads; a model that trains whole is in float32.

    Raises:
        ValueError: a quantised model, or remote code without a pinned commit.
    """
    from onetrunk.models.sources import pinned_source

    if model_args.load_in_4bit or model_args.load_in_8bit:
        raise ValueError(
            "a reward model on a quantised base is not tested; leave load_in_4bit and load_in_8bit out (dtype bfloat16"
            " halves the memory)"
        )
    kwargs = {**model_args.init_kwargs(), **(args.model_init_kwargs or {})}
    args.model_init_kwargs = None
    if not model_args.use_peft and kwargs.get("dtype") == "auto":
        # All weights train: updates below bfloat16's resolution would be lost.
        kwargs["dtype"] = "float32"
    trusts = kwargs.pop("trust_remote_code", args.trust_remote_code)
    return {**kwargs, **pinned_source(kwargs.get("revision"), trusts)}


def make_trainer(args: Any, model_args: Any, train: Any, held_out: Any) -> Any:
    """Return the trainer with its model loaded."""
    from transformers import set_seed

    from onetrunk.models.new_scorer import load_reward_tokenizer, load_with_new_head
    from onetrunk.models.sources import is_adapter, load_config
    from onetrunk.ppo.checks import check_tokenizer
    from onetrunk.reward_models.trainer import RewardModelTrainer

    name, revision = model_args.model_name_or_path, model_args.model_revision
    if is_adapter(name, revision):
        raise ValueError(f"{name} is an adapter; a reward model starts from a base model: give that")
    kwargs = load_kwargs(args, model_args)
    tokenizer = load_reward_tokenizer(name, kwargs["revision"], kwargs["trust_remote_code"])
    datasets = [rows for rows in (train, held_out) if rows is not None]
    check_tokenizer(tokenizer, name, datasets, load_config(name, revision, kwargs["trust_remote_code"]).vocab_size)
    set_seed(args.seed)  # The new head is random.
    model = load_with_new_head(name, **kwargs)
    peft_config = score_peft_config(args, model_args, model)
    return RewardModelTrainer(model, args, train, held_out, tokenizer, peft_config=peft_config)


def trained_reward(trainer: Any) -> Any:
    """Return the trained model as a reward function, as PPO will call it."""
    from peft import PeftModel

    from onetrunk.rewards.model import ModelReward

    model = trainer.accelerator.unwrap_model(trainer.model)
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    settings = {"max_length": trainer.args.max_length, "batch_size": trainer.args.per_device_eval_batch_size}
    return ModelReward(inner, trainer.processing_class, name=Path(trainer.args.output_dir).name, **settings)


def report(trainer: Any, base: str, train: Any, held_out: Any) -> None:
    """Measure the model on the held-out rows; write metrics.json, plots and the scale of its scores."""
    from onetrunk.models.scorer import ScoreScale
    from onetrunk.reward_models.metrics import labels_of, preference_figures, score_pairs
    from onetrunk.stages.plots import plot_by_margin, plot_reliability
    from onetrunk.stages.report import show_figures, write_figures

    reward, folder = trained_reward(trainer), Path(trainer.args.output_dir)
    rows = train.select(range(min(SCALE_ROWS, len(train)))) if held_out is None else held_out
    pairs = score_pairs(reward, rows, labels_of(rows))
    if held_out is None:
        print("reward: no held-out rows, so nothing is measured; set eval_dataset_name or eval_size")
    else:
        figures = preference_figures(pairs)
        about = {"model": base, "train_pairs": len(trainer.train_dataset), "seed": trainer.args.seed}
        about["num_processes"] = trainer.accelerator.num_processes
        write_figures(folder, {**about, "held_out": figures})
        plot_reliability(folder, {"reward model": figures["reliability"]})
        plot_by_margin(folder, figures["accuracy_by_margin"])
        show_figures(f"{folder} on {len(held_out)} held-out pairs", {"reward model": figures})
    ScoreScale.of(pairs.scores).save(folder)
