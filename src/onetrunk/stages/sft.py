"""Supervised fine-tuning: rows with completions -> a model or a LoRA adapter to start PPO from. TRL does the work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onetrunk.stages.parsing import parse
from onetrunk.stages.running import run_stage


def main(argv: Sequence[str] | None = None) -> int:
    """Run `onetrunk sft` with these words; return the exit code."""
    return run_stage("sft", run, argv)


def run(argv: list[str]) -> None:
    """Parse, read the rows, load the model, train, save, push."""
    data, args, model_args = parse_sft(argv)
    from onetrunk.files import require_output_dir
    from onetrunk.stages.resuming import require_checkpoint, resume_point
    from onetrunk.stages.rows import load_training_rows

    resume = resume_point(args)
    require_checkpoint(resume, args.output_dir)
    require_output_dir(args.output_dir)
    train, held_out = (rows and completion_rows(rows) for rows in load_training_rows(data, args.seed))
    trainer = make_trainer(args, model_args, train, held_out)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    if held_out is not None:
        trainer.save_metrics("eval", trainer.evaluate())
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=data.hub_dataset)
    if trainer.is_world_process_zero():
        print(f"sft: saved {'an adapter' if model_args.use_peft else 'the model'} in {args.output_dir}")
    trainer.accelerator.end_training()


def parse_sft(argv: Sequence[str]) -> tuple[Any, ...]:
    """Return TrainingDataArguments, SFTArguments and ModelArguments."""
    from onetrunk.stages.arguments import ModelArguments, SFTArguments, TrainingDataArguments

    types = (TrainingDataArguments, SFTArguments, ModelArguments)
    return parse(argv, types, "sft", "Fine-tune a model on prompts and completions, messages, or texts.")


def completion_rows(rows: Any) -> Any:
    """Return the rows with only the columns that they are trained on; every row is checked."""
    from onetrunk.data import validate_completions

    kind = validate_completions(rows)
    return rows.select_columns(["prompt", "completion"] if kind == "prompt" else [kind])


def make_trainer(args: Any, model_args: Any, train: Any, held_out: Any) -> Any:
    """Return TRL's SFTTrainer with its model loaded."""
    from trl import SFTTrainer, get_quantization_config

    from onetrunk.models.backbone import load_base, load_tokenizer
    from onetrunk.models.sources import is_adapter

    name, revision = model_args.model_name_or_path, model_args.model_revision
    if is_adapter(name, revision):
        raise ValueError(f"{name} is an adapter; sft starts from a base model: give that")
    quantization = get_quantization_config(model_args)
    if quantization is not None and not model_args.use_peft:
        raise ValueError("a quantised model cannot be trained whole; set use_peft: true")
    if quantization is not None and args.device.type == "cpu" and args.eval_strategy != "no":
        raise ValueError(
            "on a CPU a quantised base passes no gradient after an evaluation (models/quantized.py); leave"
            " eval_strategy out: the held-out rows are evaluated at the end"
        )
    kwargs = {
        **model_args.init_kwargs(),
        "trust_remote_code": args.trust_remote_code,
        **(args.model_init_kwargs or {}),
    }
    if not model_args.use_peft and kwargs.get("dtype") == "auto":
        # All weights train: updates below bfloat16's resolution would be lost.
        kwargs["dtype"] = "float32"
    args.model_init_kwargs = None
    tokenizer = load_tokenizer(name, revision=revision, trust_remote_code=kwargs["trust_remote_code"])
    return SFTTrainer(
        model=load_base(name, quantization_config=quantization, **kwargs),
        args=args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=model_args.peft_config() if model_args.use_peft else None,
    )
