"""Evaluation on held-out prompts: a model, or an adapter beside what it started from, or beside an opponent.

Figures and samples of every side; with a judge the win rate of the model over its opponent.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onetrunk.stages.parsing import UsageError, parse
from onetrunk.stages.running import Terminated, run_stage, say


def main(argv: Sequence[str] | None = None) -> int:
    """Run `onetrunk eval` with these words; return the exit code."""
    return run_stage("eval", parse_eval, run, argv)


def run(args: Any, judge_settings: Any, model_args: Any) -> None:
    """Read the prompts, load the model, sample and score, let a judge compare, write and show."""
    from accelerate import Accelerator

    from onetrunk.stages.eval.judge import plan_comparison
    from onetrunk.stages.rows import load_dataset_rows, prompt_rows

    rows = prompt_rows(load_dataset_rows(args))
    config = args.ppo_config(model_args.init_kwargs())
    accelerator = Accelerator(cpu=args.use_cpu, mixed_precision="bf16" if config.bf16 else "no")
    # What is wrong with opponent, checks or judge is said before anything large is loaded.
    comparison = plan_comparison(args, judge_settings, model_args, rows.column_names, accelerator.is_main_process)
    sides, num_prompts = sample_sides(args, config, model_args, rows, accelerator, comparison.opponent)
    report(args, model_args.model_name_or_path, accelerator, sides, num_prompts, comparison)
    accelerator.end_training()


def parse_eval(argv: Sequence[str]) -> tuple[Any, ...]:
    """Return EvalArguments, JudgeSettings and ModelArguments."""
    from onetrunk.judges.load import JudgeSettings
    from onetrunk.stages.arguments import ModelArguments
    from onetrunk.stages.eval.arguments import EvalArguments, check_purpose

    types = (EvalArguments, JudgeSettings, ModelArguments)
    parsed = parse(argv, types, "eval", "Sample, score and compare completions of held-out prompts.", knows_ppo=True)
    try:
        check_purpose(parsed[0], parsed[1].judge, parsed[1].constitution)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return parsed


def sample_sides(
    args: Any, config: Any, model_args: Any, rows: Any, accelerator: Any, opponent: str | None
) -> tuple[dict[str, tuple[dict[str, float], Any]], int]:
    """Return figures and samples by role, and the number of prompts.

    The roles are "reference" and "policy" of an adapter, of a base model "reference" alone; then "opponent", where
    that is another model.
    """
    import gc
    from dataclasses import replace

    from onetrunk.models.sources import is_adapter
    from onetrunk.stages.eval.sides import REFERENCE, reward_specs, unscored

    name = model_args.model_name_or_path
    from_adapter = is_adapter(name, model_args.model_revision)
    parts, progress = load_parts(config, args.reward_funcs or [unscored], model_args, rows)
    parts.model.to(accelerator.device)
    if from_adapter:
        restore_reference(parts.model, name, model_args.model_revision)
    sides = {}
    for role in ("reference", "policy") if from_adapter else ("reference",):
        sides[role] = measure_side(parts, args, accelerator, role, role, progress)
    num_prompts = len(parts.datasets[0])
    if opponent not in (None, REFERENCE):
        rewards = reward_specs(parts.sampler.rewards, args.reward_funcs)
        del parts
        gc.collect()  # One trunk in memory at a time: modules refer to each other in circles.
        theirs = replace(model_args, model_name_or_path=opponent, model_revision="main")
        config.model_init_kwargs = theirs.init_kwargs()
        parts, progress = load_parts(config, rewards, theirs, rows)
        parts.model.to(accelerator.device)
        # The reference of a trunk just loaded is what was loaded: the base, or a copy of the adapter.
        sides["opponent"] = measure_side(parts, args, accelerator, "reference", "opponent", progress)
    return sides, num_prompts


def load_parts(config: Any, reward_funcs: Sequence[Any], model_args: Any, rows: Any) -> tuple[Any, Any]:
    """Return the model with its tokenizer, checked prompts and sampler, and the progress of the sampler."""
    from trl import get_quantization_config

    from onetrunk.ppo.callbacks import RolloutProgress
    from onetrunk.ppo.checks import check_launch
    from onetrunk.ppo.setup import load_sampled_model
    from onetrunk.rollouts.local import LocalBackend

    check_launch(config)
    progress = RolloutProgress()
    backend = LocalBackend(max_rows=config.max_rollout_rows, progress=progress.rollout)
    quantization = get_quantization_config(model_args)
    name = model_args.model_name_or_path
    return load_sampled_model(name, reward_funcs, config, [rows], backend, quantization_config=quantization), progress


def restore_reference(model: Any, name: str, revision: str) -> None:
    """Make the reference what training started from: the adapter saved beside the policy, else the bare base."""
    from transformers.utils import find_adapter_config_file

    from onetrunk.models.adapters import REFERENCE
    from onetrunk.models.sources import require_safetensors

    # A trunk made from an adapter takes that adapter for its reference, as training on from it would.
    if Path(name).is_dir() and (Path(name) / REFERENCE).is_dir():
        require_safetensors(str(Path(name) / REFERENCE))
        model.load_adapter(str(Path(name) / REFERENCE), REFERENCE)
    elif not Path(name).is_dir() and find_adapter_config_file(name, revision=revision, subfolder=REFERENCE):
        require_safetensors(name, revision, REFERENCE)
        model.load_adapter(name, REFERENCE, subfolder=REFERENCE, revision=revision)
    else:
        model.has_reference_adapter = False


def measure_side(
    parts: Any, args: Any, accelerator: Any, role: str, shown: str, progress: Any
) -> tuple[dict[str, float], Any]:
    """Return figures and samples of a role, its progress shown under a name; without reward functions no scores."""
    from onetrunk.stages.eval.sides import without_scores

    with progress.phase(shown, is_shown=accelerator.is_main_process):
        side = evaluate_role(parts, args, accelerator, role)
    if not args.reward_funcs:
        return without_scores(*side)
    check_scored(side[0], args.max_unscored_fraction, parts.sampler.rewards.names)
    return side


def evaluate_role(parts: Any, args: Any, accelerator: Any, role: str) -> tuple[dict[str, float], Any]:
    """Return figures and samples of one role: "reference" or "policy"."""
    from onetrunk.ppo.evaluation import evaluate_prompts

    return evaluate_prompts(
        parts.model,
        parts.sampler,
        parts.datasets[0],
        accelerator,
        seed=args.seed,
        rows_per_pack=args.per_device_eval_batch_size,
        max_tokens=args.microbatch_tokens,
        role=role,
    )


def check_scored(figures: dict[str, float], most: float, reward_names: Sequence[str]) -> None:
    """Refuse figures of which too many rows have no part, as training does.

    Raises:
        RuntimeError: more than that share of the completions has no finite score.
    """
    unscored = figures["reward/unscored_fraction"]
    if unscored > most:
        raise RuntimeError(
            f"{unscored:.0%} of the completions have no finite score, more than max_unscored_fraction {most:.0%}; look"
            f" at the reward functions ({', '.join(reward_names)}) or raise the limit"
        )


def report(
    args: Any,
    name: str,
    accelerator: Any,
    sides: dict[str, tuple[dict[str, float], Any]],
    num_prompts: int,
    comparison: Any,
) -> None:
    """Compare the sides; write metrics.json, report.md and all samples, and show the figures and some samples.

    Every process must call it; the first one asks the judge and writes.

    Args:
        sides: figures and samples by role; a bare base has only "reference", which is then the model itself.
        comparison: opponent, checks and judge.
    """
    from onetrunk.ppo.evaluation import write_samples
    from onetrunk.stages.eval.judge import hold_contest, passed_shares
    from onetrunk.stages.eval.report import Evaluation, show_evaluation, write_evaluation
    from onetrunk.stages.eval.sides import gather_answers, pairs_of

    if "policy" not in sides:
        sides = {"policy": sides["reference"]} | {role: sides[role] for role in sides if role != "reference"}
    answers = {role: gather_answers(scored, num_prompts, accelerator) for role, (_, scored) in sides.items()}
    if not accelerator.is_main_process:
        return
    for role, (_, scored) in sides.items():
        write_samples(args.output_dir, f"samples-{role}", scored, {})
    checks = comparison.checks
    passed = {role: passed_shares(checks, given) for role, given in answers.items()} if checks else {}
    rival = next((role for role in ("opponent", "reference") if role in answers), None)
    pairs = pairs_of(answers["policy"], answers[rival]) if rival else []
    try:
        contest = hold_contest(args, comparison.judge, comparison.constitution, pairs) if comparison.judge else None
    except (KeyboardInterrupt, Terminated):
        say("what was judged is kept; the same command goes on from there", after_bar=True)
        raise
    evaluation = Evaluation(
        model=name,
        opponent=rival and (comparison.opponent or rival),
        figures={role: figures for role, (figures, _) in sides.items()},
        pairs=pairs,
        contest=contest,
        checks=passed,
        about={"num_prompts": num_prompts, "seed": args.seed, "num_processes": accelerator.num_processes},
    )
    path = write_evaluation(Path(args.output_dir), evaluation)
    show_evaluation(evaluation, sides["policy"][1], args.num_completions_to_print)
    print(f"eval: wrote {path}, report.md and the samples beside it")
