"""Evaluation: a base model, or an adapter beside what it started from, on held-out prompts; figures and samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onetrunk.stages.parsing import parse
from onetrunk.stages.running import run_stage


def main(argv: Sequence[str] | None = None) -> int:
    """Run `onetrunk eval` with these words; return the exit code."""
    return run_stage("eval", parse_eval, run, argv)


def run(args: Any, model_args: Any) -> None:
    """Read the prompts, load the model, sample and score, write and show."""
    from accelerate import Accelerator

    from onetrunk.models.sources import is_adapter
    from onetrunk.stages.rows import load_dataset_rows
    from onetrunk.trainers.callbacks import RolloutProgress

    rows = load_dataset_rows(args)
    config = args.ppo_config(model_args.init_kwargs())
    accelerator = Accelerator(cpu=args.use_cpu, mixed_precision="bf16" if config.bf16 else "no")
    name = model_args.model_name_or_path
    from_adapter = is_adapter(name, model_args.model_revision)
    progress = RolloutProgress()
    parts = load_parts(config, args.reward_funcs, model_args, rows, progress.rollout)
    parts.model.to(accelerator.device)
    if from_adapter:
        restore_reference(parts.model, name, model_args.model_revision)
    roles = ("reference", "policy") if from_adapter else ("reference",)
    sides = {}
    for role in roles:
        with progress.phase(role, is_shown=accelerator.is_main_process):
            sides[role] = evaluate_role(parts, args, accelerator, role)
        check_scored(sides[role][0], args.max_unscored_fraction, parts.sampler.rewards.names)
    report(args, name, accelerator, sides, len(parts.train_dataset))
    accelerator.end_training()


def parse_eval(argv: Sequence[str]) -> tuple[Any, ...]:
    """Return EvalArguments and ModelArguments."""
    from onetrunk.stages.arguments import EvalArguments, ModelArguments

    types = (EvalArguments, ModelArguments)
    return parse(argv, types, "eval", "Sample and score completions of held-out prompts.", knows_ppo=True)


def load_parts(config: Any, reward_funcs: list[str], model_args: Any, rows: Any, progress: Any) -> Any:
    """Return model, tokenizer, checked prompts and sampler, as for a PPO run."""
    from trl import get_quantization_config

    from onetrunk.trainers.setup import prepare_run

    return prepare_run(
        model_args.model_name_or_path,
        reward_funcs,
        config,
        rows,
        None,
        tokenizer=None,
        reward_tokenizers=None,
        quantization_config=get_quantization_config(model_args),
        peft_config=None,
        rollout_backend=None,
        progress=progress,
    )


def restore_reference(model: Any, name: str, revision: str) -> None:
    """Make the reference what training started from: the adapter saved beside the policy, else the bare base."""
    from transformers.utils import find_adapter_config_file

    from onetrunk.models.adapters import REFERENCE

    # A trunk made from an adapter takes that adapter for its reference, as training on from it would.
    if Path(name).is_dir() and (Path(name) / REFERENCE).is_dir():
        model.load_adapter(str(Path(name) / REFERENCE), REFERENCE)
    elif not Path(name).is_dir() and find_adapter_config_file(name, revision=revision, subfolder=REFERENCE):
        model.load_adapter(name, REFERENCE, subfolder=REFERENCE, revision=revision)
    else:
        model.has_reference_adapter = False


def evaluate_role(parts: Any, args: Any, accelerator: Any, role: str) -> tuple[dict[str, float], Any]:
    """Return figures and samples of one role: "reference" or "policy"."""
    from onetrunk.trainers.evaluation import evaluate_prompts

    return evaluate_prompts(
        parts.model,
        parts.sampler,
        parts.train_dataset,
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
    args: Any, name: str, accelerator: Any, sides: dict[str, tuple[dict[str, float], Any]], num_prompts: int
) -> None:
    """Write metrics.json and, per role, a file of this process's samples; show the figures and some samples.

    Args:
        sides: figures and samples by role; a bare base has only "reference", which is then the model itself.
    """
    from onetrunk.stages.report import figures_table, show, write_metrics
    from onetrunk.trainers.samples import sample_table, write_samples

    if not accelerator.is_main_process:
        return
    if "policy" not in sides:
        sides = {"policy": sides["reference"]}
    for role, (_, scored) in sides.items():
        write_samples(args.output_dir, f"samples-{role}", scored, {})
    policy, reference = sides["policy"][0], sides["reference"][0] if "reference" in sides else None
    about = {"model": name, "num_prompts": num_prompts, "seed": args.seed, "num_processes": accelerator.num_processes}
    path = write_metrics(args.output_dir, policy, reference, **about)
    show(figures_table(name, policy, reference))
    if args.num_completions_to_print > 0:
        show(sample_table(sides["policy"][1], "samples", args.num_completions_to_print))
    print(f"eval: wrote {path} and the samples beside it")
