"""Evaluation on held-out prompts of a model, or of an adapter and what it started from, or against an opponent.

It writes metrics and samples of every side, and with a judge the win rate of the model over its opponent.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from accelerate import Accelerator
from datasets import Dataset
from transformers.utils import find_adapter_config_file
from trl import get_quantization_config

from onetrunk.judges.load import JudgeConfig
from onetrunk.models.adapters import REFERENCE
from onetrunk.models.sources import is_adapter, require_safetensors
from onetrunk.models.trunk import TrunkModel
from onetrunk.ppo.callbacks import RolloutProgress
from onetrunk.ppo.checks import check_launch
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.evaluation import evaluate_prompts, write_samples
from onetrunk.ppo.setup import ModelInputs, SampledModel, load_sampled_model
from onetrunk.rewards.base import RewardFunction
from onetrunk.rollouts.local import LocalBackend
from onetrunk.stages.arguments import ModelArguments
from onetrunk.stages.eval.arguments import EvalArguments, check_purpose
from onetrunk.stages.eval.judge import Comparison, hold_contest, passed_shares, plan_comparison
from onetrunk.stages.eval.report import Evaluation, show_evaluation, write_evaluation
from onetrunk.stages.eval.sides import Side, gather_answers, pairs_of, reward_specs, unscored, without_scores
from onetrunk.stages.parsing import UsageError, parse
from onetrunk.stages.rows import load_dataset_rows, prompt_rows
from onetrunk.stages.running import Terminated, run_stage, say


def main(argv: Sequence[str] | None = None) -> int:
    """Run `onetrunk eval` with these words; return the exit code."""
    return run_stage("eval", parse_eval, run, argv)


def parse_eval(argv: Sequence[str]) -> tuple[EvalArguments, JudgeConfig, ModelArguments]:
    """Parse and check the arguments of the stage."""
    types = (EvalArguments, JudgeConfig, ModelArguments)
    parsed = parse(argv, types, "eval", "Sample, score and compare completions of held-out prompts.", knows_ppo=True)
    try:
        check_purpose(parsed[0], parsed[1].judge, parsed[1].constitution)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return parsed


def run(args: EvalArguments, judge_settings: JudgeConfig, model_args: ModelArguments) -> None:
    """Read the prompts, load the model, sample and score, let a judge compare, write and show."""
    rows = prompt_rows(load_dataset_rows(args))
    config = args.ppo_config(model_args.init_kwargs())
    accelerator = Accelerator(cpu=args.use_cpu, mixed_precision="bf16" if config.bf16 else "no")
    # Mistakes in opponent, checks or judge are reported before a large model loads.
    comparison = plan_comparison(args, judge_settings, model_args, rows.column_names, accelerator.is_main_process)
    sides, num_prompts = sample_sides(args, config, model_args, rows, accelerator, comparison.opponent)
    report(args, model_args.model_name_or_path, accelerator, sides, num_prompts, comparison)
    accelerator.end_training()


def sample_sides(
    args: EvalArguments,
    config: PPOConfig,
    model_args: ModelArguments,
    rows: Dataset,
    accelerator: Accelerator,
    opponent: str | None,
) -> tuple[dict[str, Side], int]:
    """Return metrics and samples by role, and the number of prompts.

    The roles are "reference" and "policy" for an adapter, "reference" alone for a base model, and "opponent" if that
    is another model.
    """
    name, revision = model_args.model_name_or_path, model_args.model_revision
    from_adapter = is_adapter(name, revision)
    parts, progress = load_parts(config, args.reward_funcs or [unscored], model_args, rows)
    parts.model.to(accelerator.device)
    if from_adapter:
        restore_reference(parts.model, name, revision)
    sides = {}
    for role in ("reference", "policy") if from_adapter else ("reference",):
        sides[role] = measure_side(parts, args, accelerator, role, role, progress)
    num_prompts = len(parts.datasets[0])
    if opponent not in (None, REFERENCE):
        rewards = reward_specs(parts.sampler.rewards, args.reward_funcs)
        del parts
        gc.collect()  # Frees the first model, whose modules refer to each other in cycles.
        opponent_args = replace(model_args, model_name_or_path=opponent, model_revision="main")
        config.model_init_kwargs = opponent_args.init_kwargs()
        parts, progress = load_parts(config, rewards, opponent_args, rows)
        parts.model.to(accelerator.device)
        # The reference of a newly loaded model is that model: the base, or a copy of the adapter.
        sides["opponent"] = measure_side(parts, args, accelerator, "reference", "opponent", progress)
    return sides, num_prompts


def load_parts(
    config: PPOConfig, reward_funcs: Sequence[str | RewardFunction], model_args: ModelArguments, rows: Dataset
) -> tuple[SampledModel, RolloutProgress]:
    """Return model, tokenizer, checked prompts and sampler, as for a PPO run, and the sampler's progress bar."""
    check_launch(config)
    progress = RolloutProgress()
    backend = LocalBackend(max_rows=config.max_rollout_rows, progress=progress.rollout)
    quantization = get_quantization_config(model_args)
    inputs = ModelInputs(model_args.model_name_or_path, reward_funcs, quantization_config=quantization)
    return load_sampled_model(inputs, config, [rows], backend), progress


def restore_reference(model: TrunkModel, name: str, revision: str) -> None:
    """Make the reference what training started from: the adapter saved next to the policy, or else the bare base."""
    # A trunk loaded from an adapter has that adapter as its reference, as a training that continues from it would.
    if Path(name).is_dir() and (Path(name) / REFERENCE).is_dir():
        require_safetensors(str(Path(name) / REFERENCE))
        model.load_adapter(str(Path(name) / REFERENCE), REFERENCE)
    elif not Path(name).is_dir() and find_adapter_config_file(name, revision=revision, subfolder=REFERENCE):
        require_safetensors(name, revision, REFERENCE)
        model.load_adapter(name, REFERENCE, subfolder=REFERENCE, revision=revision)
    else:
        model.has_reference_adapter = False


def measure_side(
    parts: SampledModel,
    args: EvalArguments,
    accelerator: Accelerator,
    role: str,
    label: str,
    progress: RolloutProgress,
) -> Side:
    """Return metrics and samples of a role ("reference" or "policy"), with a labelled progress bar.

    Raises:
        RuntimeError: too many completions have no finite score.
    """
    with progress.phase(label, is_shown=accelerator.is_main_process):
        metrics, samples = evaluate_prompts(
            parts.model,
            parts.sampler,
            parts.datasets[0],
            accelerator,
            args,
            role=role,
        )
    if not args.reward_funcs:
        return without_scores(metrics, samples)
    unscored_fraction = metrics["reward/unscored_fraction"]
    if unscored_fraction > args.max_unscored_fraction:
        raise RuntimeError(
            f"{unscored_fraction:.0%} of the completions have no finite score, more than max_unscored_fraction"
            f" {args.max_unscored_fraction:.0%}; look at the reward functions"
            f" ({', '.join(parts.sampler.rewards.names)}) or raise the limit"
        )
    return metrics, samples


def report(
    args: EvalArguments,
    name: str,
    accelerator: Accelerator,
    sides: dict[str, Side],
    num_prompts: int,
    comparison: Comparison,
) -> None:
    """Compare the sides; write metrics.json, report.md and all samples, and print the metrics and some samples.

    Every process must call it; the first one asks the judge and writes. A base model has only the role "reference",
    which is reported as the policy.
    """
    if "policy" not in sides:
        sides = {"policy": sides["reference"]} | {role: sides[role] for role in sides if role != "reference"}
    answers = {role: gather_answers(samples, num_prompts, accelerator) for role, (_, samples) in sides.items()}
    if not accelerator.is_main_process:
        return
    for role, (_, samples) in sides.items():
        write_samples(args.output_dir, f"samples-{role}", samples, {})
    checks = comparison.checks
    passed = {role: passed_shares(checks, answer) for role, answer in answers.items()} if checks else {}
    opponent_role = next((role for role in ("opponent", "reference") if role in answers), None)
    pairs = pairs_of(answers["policy"], answers[opponent_role]) if opponent_role else []
    try:
        contest = hold_contest(args, comparison.judge, comparison.constitution, pairs) if comparison.judge else None
    except (KeyboardInterrupt, Terminated):
        say("the verdicts so far are saved; the same command continues from them", after_bar=True)
        raise
    evaluation = Evaluation(
        model=name,
        opponent=opponent_role and (comparison.opponent or opponent_role),
        metrics={role: metrics for role, (metrics, _) in sides.items()},
        pairs=pairs,
        contest=contest,
        checks=passed,
        about={"num_prompts": num_prompts, "seed": args.seed, "num_processes": accelerator.num_processes},
    )
    path = write_evaluation(Path(args.output_dir), evaluation)
    show_evaluation(evaluation, sides["policy"][1], args.num_completions_to_print)
    print(f"eval: wrote {path}, and report.md and the samples next to it")
