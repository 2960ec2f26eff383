"""Evaluation on held-out prompts of a model, or of an adapter and what it started from, or against an opponent.

It writes metrics and samples of every side, and with a judge the win rate of the model over its opponent.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from transformers.utils import find_adapter_config_file
from trl import get_quantization_config

from onetrunk.feedback.preferences import plain
from onetrunk.judges.base import Judge, Pair
from onetrunk.judges.constitution import Constitution
from onetrunk.judges.load import JudgeConfig
from onetrunk.models.adapters import REFERENCE
from onetrunk.models.loading import adapter_base, is_adapter, is_same_source, require_safetensors
from onetrunk.models.reward_model import is_adapter_name
from onetrunk.models.trunk import TrunkModel
from onetrunk.ppo.callbacks import RolloutProgress
from onetrunk.ppo.checks import check_launch
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.evaluation import evaluate_prompts, write_samples
from onetrunk.ppo.sampling import ScoredRollout, longest_prompt_of
from onetrunk.ppo.setup import ModelInputs, SampledModel, base_name, load_sampled_model, policy_tokenizer
from onetrunk.report.report import write_report_of
from onetrunk.rewards.base import Completion, RewardFunction, Scores
from onetrunk.rewards.combine import RewardSet
from onetrunk.rewards.model import TrunkReward, tokenizer_difference
from onetrunk.rewards.resolve import names_a_model
from onetrunk.rollouts.load import load_servers
from onetrunk.rollouts.local import LocalBackend
from onetrunk.rollouts.vllm import VLLMBackend
from onetrunk.stages.arguments import ModelArguments
from onetrunk.stages.eval.arguments import EvalArguments, check_purpose
from onetrunk.stages.eval.judge import hold_contest
from onetrunk.stages.eval.report import Evaluation, show_evaluation, write_evaluation
from onetrunk.stages.judging import load_judge_parts
from onetrunk.stages.parsing import parse
from onetrunk.stages.resuming import say_where
from onetrunk.stages.rows import load_dataset_rows, prompt_rows
from onetrunk.stages.running import Terminated, run_stage, say
from onetrunk.types import Prompt

logger = logging.getLogger(__name__)

# Metrics and samples of one side.
Side = tuple[dict[str, float], ScoredRollout]


@dataclass(frozen=True)
class Answers:
    """The completions of one side as the reward functions see them, in the order of the prompts; n entries each."""

    prompts: list[Prompt]
    completions: list[Completion]
    completion_ids: list[list[int]]
    stopped: list[bool]  # False for a completion that was cut off at the length limit.
    columns: dict[str, list[Any]]  # The dataset's other columns.

    @property
    def texts(self) -> list[str]:
        return [plain(completion) for completion in self.completions]


@dataclass(frozen=True)
class Sampled:
    """The sides of an evaluation: metrics and samples by role, the number of prompts, and what sampled each role."""

    sides: dict[str, Side]
    num_prompts: int
    samplers: dict[str, str]

    @property
    def sampled_by(self) -> str:
        """The samplers as a text; one name if all roles have the same."""
        names = set(self.samplers.values())
        by_role = ", ".join(f"{role}: {name}" for role, name in self.samplers.items())
        return names.pop() if len(names) == 1 else by_role


@dataclass(frozen=True)
class Comparison:
    """How the sides are compared."""

    opponent: str | None  # "reference", the name of a model, or None without an opponent.
    checks: RewardSet | None
    judge: Judge | None  # None without a judge, and on all processes but the first.
    constitution: Constitution | None


def run(args: EvalArguments, judge_settings: JudgeConfig, model_args: ModelArguments) -> None:
    rows = prompt_rows(load_dataset_rows(args))
    config = args.ppo_config(model_args.init_kwargs())
    accelerator = Accelerator(cpu=args.use_cpu, mixed_precision="bf16" if config.bf16 else "no")
    # Mistakes in opponent, checks or judge are reported before a large model loads.
    comparison = plan_comparison(args, judge_settings, model_args, rows.column_names, accelerator.is_main_process)
    sampled = sample_sides(args, config, model_args, rows, accelerator, comparison.opponent)
    report(args, model_args.model_name_or_path, accelerator, sampled, comparison)
    accelerator.end_training()


def plan_comparison(
    args: EvalArguments, settings: JudgeConfig, model_args: ModelArguments, columns: Sequence[str], is_first: bool
) -> Comparison:
    """Check the opponent, the checks (which may need columns of the dataset) and the constitution, then the judge.

    Raises:
        ValueError, TypeError, RuntimeError: one of them is not valid. Only the first process asks the judge.
    """
    opponent = named_opponent(args, model_args, has_judge=bool(settings.judge))
    checks = None
    if args.checks:
        try:
            checks = RewardSet(list(args.checks))
            checks.check_columns(columns)
        except (ValueError, TypeError, RuntimeError) as error:
            raise type(error)(f"checks: {error}") from error
    judge, constitution = load_judge_parts(settings, asks=is_first) if settings.judge else (None, None)
    return Comparison(opponent, checks, judge, constitution)


def named_opponent(args: EvalArguments, model_args: ModelArguments, has_judge: bool) -> str | None:
    """Return the opponent: "reference", the name of a model, or None without one. Loads no weights.

    Raises:
        ValueError: a base model has no reference; the opponent is the model itself, or has another tokenizer.
        RuntimeError: there is no model at the opponent's name.
    """
    name, revision = model_args.model_name_or_path, model_args.model_revision
    has_reference = adapter_base(name, revision) is not None
    opponent = args.opponent or (REFERENCE if has_judge else None)
    if opponent == REFERENCE and not has_reference:
        value = "is reference" if args.opponent else "is not set"
        raise ValueError(
            f"opponent {value}, and {name} is a base model, which has no reference; set opponent to the model or the"
            " adapter to compare it with"
        )
    if opponent in (None, REFERENCE):
        return opponent
    if is_same_source(opponent, name):
        raise ValueError(f"opponent {opponent} is the model itself; name another one, or reference for an adapter")
    base = base_name(opponent, {})  # Raises if there is no model.
    tokenizer = policy_tokenizer(name, None, model_args.init_kwargs())
    other = policy_tokenizer(opponent, None, {})
    difference = tokenizer_difference(tokenizer, other)
    if difference is not None:
        raise ValueError(
            f"the tokenizer of opponent {opponent} is not that of {name} ({difference}), so that max_completion_length"
            " would give them unequal room; name an opponent with the same tokenizer"
        )
    if tokenizer.chat_template != other.chat_template:
        logger.warning(
            "opponent %s has another chat template than %s; each is prompted with its own", Path(opponent).name, name
        )
    on_trunk = [spec for spec in args.reward_funcs or [] if names_a_model(spec) and is_adapter_name(spec)]
    if on_trunk and not is_same_source(base, base_name(name, model_args.init_kwargs())):
        raise ValueError(
            f"reward adapter {on_trunk[0]} is a branch of the model's own trunk, and opponent {opponent} stands on"
            f" {base}; merge the adapter into its base and give that folder, or name an opponent on the same base"
        )
    return opponent


def sample_sides(
    args: EvalArguments,
    config: PPOConfig,
    model_args: ModelArguments,
    rows: Dataset,
    accelerator: Accelerator,
    opponent: str | None,
) -> Sampled:
    """Sample and measure every side.

    The roles are "reference" and "policy" for an adapter, "reference" alone for a base model, and "opponent" if that
    is another model. On servers every side is published under names of its own and unloaded after it was measured.
    """
    name, revision = model_args.model_name_or_path, model_args.model_revision
    from_adapter = is_adapter(name, revision)
    roles = ("reference", "policy") if from_adapter else ("reference",)
    progress = RolloutProgress()
    sampled = Sampled({}, 0, {})
    with backend_of(config, roles, progress, on_servers=config.use_vllm) as backend:
        parts = load_parts(config, args.reward_funcs or [unscored], model_args, rows, accelerator, backend)
        if from_adapter:
            restore_reference(parts.model, name, revision)
        check_servers(parts, config)
        sampled = replace(sampled, num_prompts=len(parts.datasets[0]))
        for role in roles:
            sampled.sides[role] = measure_side(parts, args, accelerator, role, role, progress)
            sampled.samplers[role] = backend.description
    if opponent in (None, REFERENCE):
        return sampled
    functions = parts.sampler.rewards.functions
    # A branch of the first trunk is built again from its name.
    specs = zip(functions, args.reward_funcs or functions, strict=True)
    rewards = [spec if isinstance(function, TrunkReward) else function for function, spec in specs]
    base = base_name(name, config.model_init_kwargs)
    del parts, backend
    gc.collect()  # Frees the first model, whose modules refer to each other in cycles.
    opponent_args = replace(model_args, model_name_or_path=opponent, model_revision="main")
    config.model_init_kwargs = opponent_args.init_kwargs()
    on_servers = config.use_vllm and is_same_source(base_name(opponent, config.model_init_kwargs), base)
    if config.use_vllm and not on_servers:
        logger.warning("the servers have another base model than opponent %s: it samples in this process", opponent)
    # The reference of a newly loaded model is that model: the base, or a copy of the adapter.
    with backend_of(config, ("reference",), progress, on_servers) as backend:
        parts = load_parts(config, rewards, opponent_args, rows, accelerator, backend)
        check_servers(parts, config)
        sampled.sides["opponent"] = measure_side(parts, args, accelerator, "reference", "opponent", progress)
        sampled.samplers["opponent"] = backend.description
    return sampled


@contextlib.contextmanager
def backend_of(
    config: PPOConfig, roles: tuple[str, ...], progress: RolloutProgress, on_servers: bool
) -> Iterator[LocalBackend | VLLMBackend]:
    """Yield what samples the roles: the vLLM servers of the config, or this process."""
    if not on_servers:
        yield LocalBackend(max_rows=config.max_rollout_rows, progress=progress.rollout)
        return
    servers = load_servers(config, roles=roles, shares_servers=True, progress=progress.rollout)
    try:
        yield servers
    finally:
        servers.close()


def check_servers(parts: SampledModel, config: PPOConfig) -> None:
    """Check that the servers, if they sample, can serve this model: its base, adapters and lengths."""
    backend = parts.sampler.backend
    if isinstance(backend, VLLMBackend):
        longest_prompt = longest_prompt_of(parts.datasets[0], config)
        backend.check_policy(parts.model, longest_prompt + config.max_completion_length)


def load_parts(
    config: PPOConfig,
    reward_funcs: Sequence[str | RewardFunction],
    model_args: ModelArguments,
    rows: Dataset,
    accelerator: Accelerator,
    backend: LocalBackend | VLLMBackend,
) -> SampledModel:
    """Return model, tokenizer, checked prompts and sampler, as for a PPO run."""
    check_launch(config)
    quantization = get_quantization_config(model_args)
    inputs = ModelInputs(model_args.model_name_or_path, reward_funcs, quantization_config=quantization)
    parts = load_sampled_model(inputs, config, [rows], backend)
    parts.model.to(accelerator.device)
    return parts


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
    """Return metrics and samples of a role; raise RuntimeError if too many completions have no finite score."""
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
        # What `unscored` gave is left out.
        plain_metrics = {name: v for name, v in metrics.items() if not name.startswith(("score/", "reward/"))}
        return plain_metrics, replace(samples, scores=Scores(samples.scores.total, {}))
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
    sampled: Sampled,
    comparison: Comparison,
) -> None:
    """Compare the sides; write metrics.json, report.md and all samples, and print the metrics and some samples.

    Every process must call it; the first one asks the judge and writes. A base model has only the role "reference",
    which is reported as the policy.
    """
    sides, num_prompts = sampled.sides, sampled.num_prompts
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
        about={
            "num_prompts": num_prompts,
            "seed": args.seed,
            "num_processes": accelerator.num_processes,
            "sampled_by": sampled.sampled_by,
        },
    )
    path = write_evaluation(Path(args.output_dir), evaluation)
    show_evaluation(evaluation, sides["policy"][1], args.num_completions_to_print)
    print(f"eval: wrote {path}, and report.md and the samples next to it")
    say_where(write_report_of(args.output_dir), "eval")


def unscored(completions: list[Completion], **columns: Any) -> list[None]:
    """Give no score: takes the place of the reward functions if only a judge compares."""
    return [None] * len(completions)


def gather_answers(scored: ScoredRollout, num_prompts: int, accelerator: Accelerator) -> Answers:
    """Return the completions of one side from all processes; every process must call it.

    `scored` are this process's rows, distributed as in `evaluate_prompts`: after the first `num_prompts` rows of all
    processes, some repeat to fill the last batch.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    ids, stopped = map(list, scored.rollout.completion_ids), map(bool, scored.rollout.stopped)
    columns = scored.batch.columns
    rows = zip(scored.batch.prompts, scored.completions, ids, stopped, *columns.values(), strict=True)
    numbered = gather_object([(rank + i * world, row) for i, row in enumerate(rows)])
    ordered = [row for _, row in sorted(numbered, key=lambda entry: entry[0])]
    *entries, values = zip(*((*row[:4], row[4:]) for row in ordered[:num_prompts]), strict=True)
    by_column = zip(columns, map(list, zip(*values, strict=True)), strict=True)
    return Answers(*map(list, entries), columns=dict(by_column))


def pairs_of(policy: Answers, opponent: Answers) -> list[Pair]:
    """Return the two completions of every prompt, the policy's first; raises ValueError for different prompts."""
    if policy.prompts != opponent.prompts:
        raise ValueError(
            f"the opponent answered {len(opponent.prompts)} prompts and the model {len(policy.prompts)}, not all the"
            " same: their chat templates make some of them overlong for one alone; raise max_prompt_length, or set"
            " overlong_prompts to error"
        )
    columns = (policy.prompts, policy.texts, opponent.texts, policy.stopped, opponent.stopped)
    return [Pair(*entries) for entries in zip(*columns, strict=True)]


def passed_shares(checks: RewardSet, answers: Answers) -> dict[str, float]:
    """Return for each check the share of completions that pass, of those to which it applies; NaN if there are none.

    Raises:
        ValueError: a check returned something other than True, False or None.
    """
    rows = (answers.prompts, answers.completions, answers.completion_ids, answers.columns)
    scores = checks.score(*rows, completion_stopped=answers.stopped)
    shares = {}
    for name, values in scores.by_function.items():
        verdicts = values[~values.isnan()]
        wrong = verdicts[(verdicts != 0) & (verdicts != 1)]
        if len(wrong):
            raise ValueError(
                f"check {name!r} returned {float(wrong[0]):g}; expected True or False, or None where it does not apply"
                " (a function that returns a score belongs in reward_funcs)"
            )
        shares[name] = float(verdicts.double().mean()) if len(verdicts) else float("nan")
    return shares


parse_eval = partial(
    parse, verb="eval", dataclass_types=(EvalArguments, JudgeConfig, ModelArguments), check=check_purpose
)
main = partial(run_stage, "eval", parse_eval, run)
