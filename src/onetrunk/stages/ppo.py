"""PPO: prompts and reward functions -> a LoRA adapter on the frozen base; held-out metrics before and after."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from datasets import Dataset
from trl import get_quantization_config

from onetrunk.checkpoints.hub import require_push
from onetrunk.judges.judge_config import JudgeConfig
from onetrunk.models.loading import is_adapter
from onetrunk.ppo.monitoring.hacking_monitor import HackingMonitor
from onetrunk.ppo.trainer import PPOTrainer
from onetrunk.rewards.combine import resolve_reward
from onetrunk.rewards.model import names_an_ensemble
from onetrunk.rewards.reward import RewardFunction, names_a_model
from onetrunk.stages.arguments import ModelArguments, PPOArguments, PPODataArguments, parse
from onetrunk.stages.options.reading import DRY_RUN
from onetrunk.stages.ppo_judges import JUDGE, PAIRWISE, PPOJudgeArguments, check_judges, run_judges
from onetrunk.stages.rows import load_training_rows, prompt_rows
from onetrunk.stages.run_context import begin, finish, run_stage, train
from onetrunk.stages.tables import metrics_table, show, without_prefix, write_metrics


def run(
    data: PPODataArguments,
    args: PPOArguments,
    model_args: ModelArguments,
    judge_settings: JudgeConfig,
    judge_args: PPOJudgeArguments,
) -> None:
    is_done, resume = begin("ppo", args, PPOTrainer.needed_files)
    if is_done:
        return
    require_functions(data.reward_funcs)
    rows, held_out = load_training_rows(data, args.seed, prompt_rows)
    require_push(args)
    with run_judges(data.reward_funcs, args, judge_settings, judge_args) as judges:
        trainer = make_trainer(judges.reward_funcs, args, model_args, rows, held_out)
        judges.begin(trainer)
        reference = trainer.evaluate_reference() if held_out is not None else None
        train(trainer, resume, "ppo", data, model_args, judge_settings, judge_args)
        trainer.save_model()
        if reference is not None:
            compare(trainer, reference, model_args.model_name_or_path, judges.monitor)
    finish("ppo", trainer, "the adapter", dataset=data.hub_dataset)


def require_functions(reward_funcs: Sequence[str]) -> None:
    """Import the reward functions that are named, so that a wrong name is reported before anything loads."""
    for spec in reward_funcs:
        is_loaded_later = "://" in spec or names_an_ensemble(spec) or names_a_model(spec)
        if spec not in (JUDGE, PAIRWISE) and not is_loaded_later:
            resolve_reward(spec)


def make_trainer(
    reward_funcs: Sequence[str | RewardFunction],
    args: PPOArguments,
    model_args: ModelArguments,
    train: Dataset,
    held_out: Dataset | None,
) -> PPOTrainer:
    """Return the trainer. If the model is an adapter, that adapter is trained further; else a new one is added."""
    name = model_args.model_name_or_path
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


def check_settings(
    data: PPODataArguments,
    args: PPOArguments,
    model_args: ModelArguments,
    judge_settings: JudgeConfig,
    judge_args: PPOJudgeArguments,
) -> None:
    """Raise ValueError for settings that have no meaning in PPO, or that contradict each other."""
    if model_args.use_peft is False:
        raise ValueError("use_peft is false, but ppo trains a LoRA adapter on a frozen base; leave it out")
    if model_args.lora_dropout:
        raise ValueError("lora_dropout makes the first PPO ratio differ from 1; leave it out")
    check_judges(data, args, model_args, judge_settings, judge_args)


parse_ppo = partial(
    parse,
    verb="ppo",
    dataclass_types=(PPODataArguments, PPOArguments, ModelArguments, JudgeConfig, PPOJudgeArguments),
    check=check_settings,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stage, or print what it would do; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not set(DRY_RUN) & set(words):
        return run_stage("ppo", parse_ppo, run, words)
    from onetrunk.stages.tools.dry_run import dry_run

    return run_stage("ppo", parse_ppo, dry_run, words, is_dry=True)
