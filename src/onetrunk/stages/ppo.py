"""PPO: prompts and reward functions -> a LoRA adapter on the frozen base; held-out metrics before and after."""

from __future__ import annotations

from collections.abc import Sequence

from datasets import Dataset
from trl import get_quantization_config

from onetrunk.checkpoints.hub import require_push
from onetrunk.judges.load import JudgeConfig
from onetrunk.models.sources import is_adapter
from onetrunk.ppo.monitor import HackingMonitor
from onetrunk.ppo.trainer import PPOTrainer
from onetrunk.rewards.base import RewardFunction
from onetrunk.stages.arguments import ModelArguments, PPOArguments, PPODataArguments
from onetrunk.stages.parsing import UsageError, parse
from onetrunk.stages.ppo_judges import PPOJudgeArguments, check_judges, run_judges
from onetrunk.stages.report import metrics_table, show, without_prefix, write_metrics
from onetrunk.stages.resuming import begin, delete_old_run, note_finished
from onetrunk.stages.rows import load_training_rows, prompt_rows
from onetrunk.stages.running import run_stage


def main(argv: Sequence[str] | None = None) -> int:
    """Run `onetrunk ppo` with these words; return the exit code."""
    return run_stage("ppo", parse_ppo, run, argv)


def parse_ppo(
    argv: Sequence[str],
) -> tuple[PPODataArguments, PPOArguments, ModelArguments, JudgeConfig, PPOJudgeArguments]:
    """Parse and check the arguments of the stage."""
    types = (PPODataArguments, PPOArguments, ModelArguments, JudgeConfig, PPOJudgeArguments)
    parsed = parse(argv, types, "ppo", "Train a LoRA policy on one frozen base by PPO.", knows_ppo=True)
    try:
        check_judges(parsed[0].reward_funcs, *parsed[3:])
    except ValueError as error:
        raise UsageError(str(error)) from error
    return parsed


def run(
    data: PPODataArguments,
    args: PPOArguments,
    model_args: ModelArguments,
    judge_settings: JudgeConfig,
    judge_args: PPOJudgeArguments,
) -> None:
    """Read the rows, load judges, build the trainer, train, save, compare, push."""
    is_done, resume = begin("ppo", args, PPOTrainer.needed_files)
    if is_done:
        return
    train, held_out = load_training_rows(data, args.seed, prompt_rows)
    require_push(args)
    with run_judges(data.reward_funcs, args, judge_settings, judge_args) as judges:
        trainer = make_trainer(judges.reward_funcs, args, model_args, train, held_out)
        judges.begin(trainer)
        reference = trainer.evaluate_reference() if held_out is not None else None
        delete_old_run(args, resume)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
        if reference is not None:
            compare(trainer, reference, model_args.model_name_or_path, judges.monitor)
    if args.push_to_hub:
        trainer.push_to_hub(dataset=data.hub_dataset)
    note_finished(trainer)
    if trainer.is_world_process_zero():
        if judges.monitor is not None and judges.monitor.explanation:
            print(f"ppo: the monitor's last alarm: {judges.monitor.explanation}")
        if trainer.alarms.explanation:
            print(f"ppo: the last alarm: {trainer.alarms.explanation}")
        print(f"ppo: saved the adapter in {args.output_dir}")
    trainer.accelerator.end_training()


def make_trainer(
    reward_funcs: Sequence[str | RewardFunction],
    args: PPOArguments,
    model_args: ModelArguments,
    train: Dataset,
    held_out: Dataset | None,
) -> PPOTrainer:
    """Return the trainer. If the model is an adapter, that adapter is trained further; else a new one is added."""
    name = model_args.model_name_or_path
    if model_args.use_peft is False:
        raise ValueError("use_peft is false, but ppo trains a LoRA adapter on a frozen base; leave it out")
    args.model_init_kwargs = {**model_args.init_kwargs(), **(args.model_init_kwargs or {})}
    peft_config = model_args.peft_config()
    if is_adapter(name, model_args.model_revision):
        changed = model_args.changed_lora_fields()
        if changed:
            raise ValueError(f"{name} is an adapter with a LoRA config of its own; remove {', '.join(changed)}")
        peft_config = None
    return PPOTrainer(
        model=name,
        reward_funcs=list(reward_funcs),
        args=args,
        train_dataset=train,
        eval_dataset=held_out,
        quantization_config=get_quantization_config(model_args),
        peft_config=peft_config,
    )


def compare(trainer: PPOTrainer, reference: dict[str, float], model_name: str, monitor: HackingMonitor | None) -> None:
    """Evaluate the trained policy; write metrics.json, and print reference and policy in one table."""
    policy = without_prefix(trainer.final_evaluation())
    if trainer.is_world_process_zero():
        about = {"model": model_name, "num_prompts": len(trainer.eval_dataset), "steps": trainer.state.global_step}
        about |= {"seed": trainer.args.seed, "num_processes": trainer.accelerator.num_processes}
        if monitor is not None:
            about["monitor"] = monitor.summary()
        write_metrics(trainer.args.output_dir, policy, reference, **about)
        show(metrics_table(f"PPO from {model_name}", policy, reference))
