"""Reward model: preference rows -> a scalar model, or a LoRA adapter with a score head for the policy's base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import PreTrainedModel, set_seed

from onetrunk.checkpoints.hub import require_push
from onetrunk.models.adapters import fit_layers, parse_adapter_layers, policy_config
from onetrunk.models.base import decoder_layers
from onetrunk.models.new_scorer import load_reward_tokenizer, load_with_new_head
from onetrunk.models.parallel import gathered
from onetrunk.models.scorer import ScoreScale
from onetrunk.models.sources import is_adapter, load_config, pinned_source
from onetrunk.ppo.checks import check_tokenizer
from onetrunk.reward_models.metrics import labels_of, preference_metrics, score_pairs
from onetrunk.reward_models.trainer import RewardModelConfig, RewardModelTrainer
from onetrunk.rewards.model import ModelReward
from onetrunk.stages.arguments import (
    AdapterLayersArguments,
    ModelArguments,
    StageTrainingArguments,
    TrainingDataArguments,
)
from onetrunk.stages.parsing import parse
from onetrunk.stages.plots import plot_by_margin, plot_reliability
from onetrunk.stages.report import show_columns, write_values
from onetrunk.stages.resuming import begin, delete_old_run, note_finished
from onetrunk.stages.rows import load_preference_rows
from onetrunk.stages.running import run_stage

if TYPE_CHECKING:
    from onetrunk.reward_models.distill import RewardDistillationConfig

# Without held-out rows, this number of training rows gives the scale of the scores.
SCALE_ROWS = 500


@dataclass(repr=False)
class RewardArguments(StageTrainingArguments, AdapterLayersArguments, RewardModelConfig):
    """Settings of `onetrunk reward`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `onetrunk reward` with these words; return the exit code."""
    return run_stage("reward", parse_reward, run, argv)


def parse_reward(argv: Sequence[str]) -> tuple[TrainingDataArguments, RewardArguments, ModelArguments]:
    """Parse and check the arguments of the stage."""
    types = (TrainingDataArguments, RewardArguments, ModelArguments)
    return parse(argv, types, "reward", "Train a reward model on preferences (prompt, chosen, rejected, probability).")


def run(data: TrainingDataArguments, args: RewardArguments, model_args: ModelArguments) -> None:
    """Read the rows, load the model, train, save, measure, push."""
    is_done, resume = begin("reward", args)
    if is_done:
        return
    train, held_out = load_preference_rows(data, args.seed)
    require_push(args)
    trainer = make_trainer(args, model_args, train, held_out)
    delete_old_run(args, resume)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    with gathered(trainer.model):
        if trainer.is_world_process_zero():
            report(trainer, model_args.model_name_or_path, train, held_out)
    finish("reward", trainer, model_args, data.hub_dataset)


def make_trainer(
    args: RewardArguments, model_args: ModelArguments, train: Dataset, held_out: Dataset | None
) -> RewardModelTrainer:
    """Check the tokenizer, load the model, and return its trainer."""
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


def load_kwargs(args: RewardModelConfig | RewardDistillationConfig, model_args: ModelArguments) -> dict[str, Any]:
    """Return the keyword arguments to load the model with; a model whose weights all train is in float32.

    Raises:
        ValueError: a quantised model, or remote code without a pinned commit.
    """
    if model_args.load_in_4bit or model_args.load_in_8bit:
        raise ValueError(
            "a reward model on a quantised base is not tested; leave load_in_4bit and load_in_8bit out (dtype bfloat16"
            " halves the memory)"
        )
    kwargs = {**model_args.init_kwargs(), **(args.model_init_kwargs or {})}
    args.model_init_kwargs = None
    if not model_args.use_peft and kwargs.get("dtype") == "auto":
        # All weights train: bfloat16 would lose small updates.
        kwargs["dtype"] = "float32"
    trusts = kwargs.pop("trust_remote_code", args.trust_remote_code)
    return {**kwargs, **pinned_source(kwargs.get("revision"), trusts)}


def score_peft_config(
    args: AdapterLayersArguments, model_args: ModelArguments, model: PreTrainedModel
) -> LoraConfig | None:
    """Return the LoRA config of a reward adapter on a sequence-classification model; None where all weights train.

    Raises:
        ValueError: the model does not have the layers of adapter_layers, or adapter_layers is set without use_peft.
    """
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


def report(trainer: RewardModelTrainer, base: str, train: Dataset, held_out: Dataset | None) -> None:
    """Measure the model on the held-out rows; write metrics.json, plots and the scale of its scores."""
    reward, folder = trained_reward(trainer), Path(trainer.args.output_dir)
    rows = rows_to_measure(train, held_out)
    pairs = score_pairs(reward, rows, labels_of(rows))
    if held_out is None:
        print("reward: no held-out rows, so nothing is measured; set eval_dataset_name or eval_size")
    else:
        metrics = preference_metrics(pairs)
        about = {"model": base, "train_pairs": len(trainer.train_dataset), "seed": trainer.args.seed}
        about["num_processes"] = trainer.accelerator.num_processes
        write_values(folder, {**about, "held_out": metrics})
        plot_reliability(folder, {"reward model": metrics["reliability"]})
        plot_by_margin(folder, metrics["accuracy_by_margin"])
        show_columns(f"{folder} on {len(held_out)} held-out pairs", {"reward model": metrics})
    ScoreScale.of(pairs.scores).save(folder)


def rows_to_measure(train: Dataset, held_out: Dataset | None) -> Dataset:
    """Return the held-out rows; without them the first training rows, enough for the scale of the scores."""
    return train.select(range(min(SCALE_ROWS, len(train)))) if held_out is None else held_out


def trained_reward(trainer: RewardModelTrainer) -> ModelReward:
    """Return the trained model as a reward function, as PPO will call it."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    settings = {"max_length": trainer.args.max_length, "batch_size": trainer.args.per_device_eval_batch_size}
    return ModelReward(inner, trainer.processing_class, name=Path(trainer.args.output_dir).name, **settings)


def finish(verb: str, trainer: RewardModelTrainer, model_args: ModelArguments, hub_dataset: str | None) -> None:
    """Push the result if that is set, record that the run is finished, and print where the result is."""
    trainer.accelerator.wait_for_everyone()
    if trainer.args.push_to_hub:
        trainer.push_to_hub(dataset_name=hub_dataset)
    note_finished(trainer)
    if trainer.is_world_process_zero():
        what = "an adapter with its score head" if model_args.use_peft else "a reward model"
        print(f"{verb}: saved {what} in {trainer.args.output_dir}")
    trainer.accelerator.end_training()
