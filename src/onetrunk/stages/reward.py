"""Reward model: preference rows -> a scalar model, or a LoRA adapter with a score head for the policy's base."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from transformers import PreTrainedModel, set_seed

from onetrunk.checkpoints.hub import require_push
from onetrunk.checkpoints.resume_settings import check_streaming
from onetrunk.models.adapters import check_targets, fit_layers, policy_config
from onetrunk.models.base_model import decoder_layers
from onetrunk.models.loading import load_config, pinned_source
from onetrunk.models.reward_model import ScoreScale, load_reward_tokenizer, load_with_new_head
from onetrunk.parallel.groups import forwards_of_first
from onetrunk.parallel.sharding import cast_when_sharded, gathered
from onetrunk.reward_models.metrics import labels_of, preference_metrics, score_pairs
from onetrunk.reward_models.training import RewardModelConfig, RewardModelTrainer
from onetrunk.rewards.model import ModelReward
from onetrunk.stages.arguments import ModelArguments, RewardTrainingArguments, TrainingDataArguments, parse
from onetrunk.stages.results import plot_reliability, show_columns, write_values
from onetrunk.stages.rows import TrainingRows, check_tokenizer, load_preference_rows
from onetrunk.stages.run_context import begin, finish, recorded
from onetrunk.utils.options import parse_adapter_layers

# Without held-out rows, this number of training rows gives the scale of the scores.
SCALE_ROWS = 500


@dataclass(repr=False)
class RewardArguments(RewardTrainingArguments, RewardModelConfig):
    """Settings of `onetrunk reward`."""


def run(data: TrainingDataArguments, args: RewardArguments, model_args: ModelArguments) -> None:
    is_done, resume = begin("reward", args)
    if is_done:
        return
    if data.streaming:
        check_streaming(args)
    rows, held_out = load_preference_rows(data, args.seed)
    require_push(args)
    trainer = make_trainer(args, model_args, rows, held_out)
    with recorded(trainer, resume, "reward", data, model_args):
        trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    with gathered(trainer.model), forwards_of_first(trainer.model) as is_first:
        if is_first:
            report(trainer, model_args.model_name_or_path, rows, held_out)
    finish("reward", trainer, result_of(model_args), dataset_name=data.hub_dataset)


def make_trainer(
    args: RewardArguments, model_args: ModelArguments, train: TrainingRows, held_out: Dataset | None
) -> RewardModelTrainer:
    name = model_args.model_name_or_path
    kwargs = load_kwargs(args, model_args, "a reward model")
    tokenizer = load_reward_tokenizer(name, kwargs["revision"], kwargs["trust_remote_code"])
    config = load_config(name, kwargs["revision"], kwargs["trust_remote_code"])
    check_tokenizer(tokenizer, name, (train, held_out), config.vocab_size)
    set_seed(args.seed)  # The new head is random.
    with cast_when_sharded():
        model = load_with_new_head(name, **kwargs)
    peft_config = score_peft_config(args, model_args, model)
    return RewardModelTrainer(model, args, train, held_out, tokenizer, peft_config=peft_config)


def load_kwargs(args: RewardTrainingArguments, model_args: ModelArguments, what: str) -> dict[str, Any]:
    """Return `ModelArguments.base_kwargs`, with a pinned commit for remote code.

    Raises:
        ValueError: a quantised base, or LoRA dropout.
    """
    if model_args.load_in_4bit or model_args.load_in_8bit:
        raise ValueError(
            "a reward model on a quantised base is not tested; leave load_in_4bit and load_in_8bit out (dtype bfloat16"
            " halves the memory)"
        )
    if model_args.lora_dropout:
        raise ValueError(
            f"lora_dropout is {model_args.lora_dropout}, and a reward adapter is trained without dropout; leave it out"
        )
    kwargs = model_args.base_kwargs(args, what)
    return kwargs | pinned_source(kwargs.get("revision"), kwargs["trust_remote_code"])


def score_peft_config(
    args: RewardTrainingArguments, model_args: ModelArguments, model: PreTrainedModel
) -> LoraConfig | None:
    """Return the LoRA config of a reward adapter on a sequence-classification model; None where all weights train."""
    if not model_args.use_peft:
        if args.adapter_layers != "all":
            raise ValueError(f"adapter_layers is {args.adapter_layers!r} and all weights train; set use_peft: true")
        return None
    config = model_args.peft_config()
    check_targets(config, model)
    if args.adapter_layers != "all":
        layers = decoder_layers(model)
        config = policy_config(config, parse_adapter_layers(args.adapter_layers, len(layers)), len(layers))
        fit_layers(config, model, layers)
    config.task_type = "SEQ_CLS"
    return config


def report(trainer: RewardModelTrainer, base: str, train: TrainingRows, held_out: Dataset | None) -> None:
    """Measure the model on the held-out rows; write metrics.json, a plot and the scale of its scores."""
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
        show_columns(f"{folder} on {len(held_out)} held-out pairs", {"reward model": metrics})
    ScoreScale.of(pairs.scores).save(folder)


def rows_to_measure(train: TrainingRows, held_out: Dataset | None) -> Dataset:
    """Return the held-out rows; without them the first training rows, enough for the scale of the scores."""
    return train.select(range(min(SCALE_ROWS, len(train)))) if held_out is None else held_out


def trained_reward(trainer: RewardModelTrainer) -> ModelReward:
    """Return the trained model as a reward function, as PPO will call it."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    name, batch_size = Path(trainer.args.output_dir).name, trainer.args.per_device_eval_batch_size
    return ModelReward(model, trainer.processing_class, name=name, batch_size=batch_size)


def result_of(model_args: ModelArguments) -> str:
    return "an adapter with its score head" if model_args.use_peft else "a reward model"


parse_reward = partial(parse, verb="reward", dataclass_types=(TrainingDataArguments, RewardArguments, ModelArguments))
