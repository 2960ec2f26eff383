"""Supervised fine-tuning: rows with completions -> a model or a LoRA adapter to start PPO from. TRL trains."""

from __future__ import annotations

from functools import partial
from typing import Any

from datasets import Dataset
from trl import get_quantization_config

from onetrunk.checkpoints.hub import require_push
from onetrunk.checkpoints.resume_settings import check_streaming
from onetrunk.checkpoints.trl_trainers import ResumableSFTTrainer
from onetrunk.data.prompts import check_completions, completion_columns, without_written_bos
from onetrunk.data.rows import is_conversational
from onetrunk.data.sharded import ShardedRows
from onetrunk.models.adapters import check_targets, fit_layers
from onetrunk.models.base_model import decoder_layers, load_base, load_tokenizer
from onetrunk.models.loading import load_config
from onetrunk.parallel.sharding import cast_when_sharded
from onetrunk.stages.arguments import ModelArguments, SFTArguments, TrainingDataArguments, parse
from onetrunk.stages.rows import TrainingRows, check_tokenizer, load_training_rows
from onetrunk.stages.run_context import begin, finish, recorded


def run(data: TrainingDataArguments, args: SFTArguments, model_args: ModelArguments) -> None:
    is_done, resume = begin("sft", args)
    if is_done:
        return
    if data.streaming:
        check_streaming(args)
    check = as_messages if args.text_as_messages else check_completions
    rows, held_out = load_training_rows(data, args.seed, check)
    require_push(args)
    trainer = make_trainer(args, model_args, rows, held_out)
    with recorded(trainer, resume, "sft", data, model_args):
        trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    if held_out is not None:
        trainer.save_metrics("eval", trainer.evaluate())
    what = "an adapter" if model_args.use_peft else "the model"
    finish("sft", trainer, what, dataset_name=data.hub_dataset)


def as_messages(rows: TrainingRows) -> TrainingRows:
    """Return checked rows of two texts, prompt and completion, as messages of the user and the assistant."""
    columns = completion_columns(rows)
    if columns != ["prompt", "completion"] or is_conversational(rows):
        what = "conversations" if is_conversational(rows, columns[0]) else f"the column {columns[0]}"
        raise ValueError(
            f"text_as_messages reads texts in prompt and completion, and the rows have {what}; leave it out"
        )
    rows = check_completions(rows)

    def read(row: dict[str, Any]) -> dict[str, Any]:
        roles = {"prompt": "user", "completion": "assistant"}
        return {**row, **{name: [{"role": role, "content": row[name]}] for name, role in roles.items()}}

    return rows.then(read) if isinstance(rows, ShardedRows) else rows.map(read, desc="messages")


def make_trainer(
    args: SFTArguments, model_args: ModelArguments, train: TrainingRows, held_out: Dataset | None
) -> ResumableSFTTrainer:
    name, kwargs = model_args.model_name_or_path, model_args.base_kwargs(args, "sft")
    source = kwargs["revision"], kwargs["trust_remote_code"]
    quantization = get_quantization_config(model_args)
    if quantization is not None and not model_args.use_peft:
        raise ValueError("a quantised model cannot be trained whole; set use_peft: true")
    if quantization is not None and args.device.type == "cpu" and args.eval_strategy != "no":
        raise ValueError(
            "on a CPU a quantised base passes no gradient after an evaluation (models/base_model.py); leave"
            " eval_strategy out: the held-out rows are evaluated at the end"
        )
    tokenizer = load_tokenizer(name, *source)
    train, held_out = (rows and without_written_bos(rows, tokenizer) for rows in (train, held_out))
    if args.chat_template_path is None:
        check_tokenizer(tokenizer, name, (train, held_out), load_config(name, *source).vocab_size)
    with cast_when_sharded(quantization):
        model = load_base(name, quantization_config=quantization, **kwargs)
    lora = model_args.peft_config() if model_args.use_peft else None
    if lora is not None:
        check_targets(lora, model)
        fit_layers(lora, model, decoder_layers(model))
    trainer = ResumableSFTTrainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=lora,
    )
    if len(trainer.train_dataset) == 0:
        raise ValueError(f"max_length is {args.max_length}, and no row keeps a token of its completion; raise it")
    return trainer


parse_sft = partial(parse, verb="sft", dataclass_types=(TrainingDataArguments, SFTArguments, ModelArguments))
