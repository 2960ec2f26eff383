"""Evaluation on held-out prompts of a model, or of an adapter and what it started from, or against an opponent.

It writes metrics and samples of every side, and with a judge the win rate of the model over its opponent.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from transformers.utils import find_adapter_config_file
from trl import get_quantization_config

from onetrunk.checkpoints.folders import require_no_training
from onetrunk.feedback.asking import Asker, Completed, Contest, contest_of, labels_of, load_judge_parts, pairs_of
from onetrunk.judges.constitution import Constitution, require_both
from onetrunk.judges.judge import Judge, Pair
from onetrunk.judges.judge_config import JudgeConfig
from onetrunk.models.adapters import REFERENCE
from onetrunk.models.loading import adapter_base, is_adapter, is_same_source, require_safetensors
from onetrunk.models.reward_model import is_adapter_name
from onetrunk.models.trunk import TrunkModel
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.evaluation import evaluate_prompts, write_samples
from onetrunk.ppo.monitoring.progress import RolloutProgress
from onetrunk.ppo.rollout import ScoredRollout, longest_prompt_of
from onetrunk.ppo.settings import EpisodeConfig
from onetrunk.ppo.setup import ModelInputs, SampledModel, base_name, check_launch, load_sampled_model, policy_tokenizer
from onetrunk.report.blocks import contest_findings
from onetrunk.report.runs import PAIRS
from onetrunk.report.verdict import quantile
from onetrunk.rewards.model import TrunkReward, tokenizer_difference
from onetrunk.rewards.reward import Completion, RewardFunction, Scores
from onetrunk.rewards.specs import read_spec
from onetrunk.rollouts.base import longest_row
from onetrunk.rollouts.local import LocalBackend
from onetrunk.rollouts.vllm import VLLMBackend, load_servers
from onetrunk.stages.arguments import DatasetArguments, EpisodeArguments, ModelArguments, SamplingArguments, parse
from onetrunk.stages.judge import LEDGER
from onetrunk.stages.results import METRICS_FILE, compared, show_columns, write_values
from onetrunk.stages.rows import load_dataset_rows, prompt_rows
from onetrunk.stages.run_context import Terminated, say, say_how
from onetrunk.utils.bars import WorkBar
from onetrunk.utils.files import atomic_write_text
from onetrunk.utils.ledger import Ledger
from onetrunk.utils.options import option
from onetrunk.utils.redaction import printable, redact

logger = logging.getLogger(__name__)

# Fields that PPOConfig does not have.
NOT_IN_PPO = {"reward_funcs", "opponent", "tie_margin", "max_failed_fraction", "tools", "environment", "compact"}


@dataclass
class EvalArguments(EpisodeArguments, EpisodeConfig, SamplingArguments):
    """Reward functions, tools, environments and the opponent."""

    reward_funcs: list[str] | None = option(
        None, "As in ppo, without judge; may be left out if a judge compares or an environment gives rewards."
    )
    reward_weights: list[float] | None = option(None, "Weight of each reward function; None: 1 each.")
    opponent: str | None = option(
        None,
        "What to compare the model with: reference (what an adapter started from; the default with a judge), or the"
        " folder or Hub name of a model or an adapter that answers the same prompts.",
    )
    max_unscored_fraction: float = option(0.1, "Fail when a larger share of the completions has no finite score.")
    per_device_eval_batch_size: int = option(8, "Rows in one forward that measures the KL.")
    microbatch_tokens: int | None = option(
        None, "Most tokens in one such forward, padding included unless padding_free is set; None: no bound."
    )
    padding_free: bool = option(
        False, "Run the rows of such a forward in one sequence, without padding (see onetrunk ppo --help)."
    )
    bf16: bool | None = option(None, "bfloat16 autocast. None: where an accelerator supports it.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward_weights and not self.reward_funcs:
            raise ValueError("reward_weights is set and reward_funcs is not; give the functions, or leave both out")

    def ppo_config(self, model_init_kwargs: dict[str, Any]) -> PPOConfig:
        left_out = {f.name for f in fields(DatasetArguments)} | NOT_IN_PPO
        settings = {name: value for name, value in asdict(self).items() if name not in left_out}
        config = PPOConfig(**settings, per_device_train_batch_size=1, model_init_kwargs=model_init_kwargs)
        config.rollout_batch_size = config.world_size
        return config


def check_purpose(args: EvalArguments, settings: JudgeConfig, model_args: ModelArguments) -> None:
    """Raise ValueError if nothing would be measured, or only one of judge and constitution is set."""
    require_both(settings.judge, settings.constitution)
    if not settings.judge and not args.reward_funcs and not args.environment:
        raise ValueError(
            "reward_funcs is not set, and neither is a judge: nothing would be measured; give at least one reward"
            " function, such as path/to/file.py:function, or judge and constitution"
        )


@dataclass(frozen=True)
class Side:
    """What one side did on the prompts of this process, and what sampled it."""

    metrics: dict[str, Any]
    samples: ScoredRollout
    sampled_by: str


def run(args: EvalArguments, judge_settings: JudgeConfig, model_args: ModelArguments) -> None:
    require_no_training(args.output_dir)
    rows = prompt_rows(load_dataset_rows(args), is_open=bool(args.environment))
    config = args.ppo_config(model_args.init_kwargs())
    accelerator = Accelerator(cpu=args.use_cpu, mixed_precision="bf16" if config.bf16 else "no")
    # Mistakes in opponent or judge are reported before a large model loads.
    opponent = named_opponent(args, model_args, has_judge=bool(judge_settings.judge))
    judge = constitution = None
    if judge_settings.judge:
        judge, constitution = load_judge_parts(judge_settings, asks=accelerator.is_main_process)
    sides, num_prompts = sample_sides(args, config, model_args, rows, accelerator, opponent)
    answers = {role: gather_answers(side.samples, num_prompts, accelerator) for role, side in sides.items()}
    if accelerator.is_main_process:
        # Sides of an earlier evaluation would be taken for those of this one.
        for old in Path(args.output_dir).glob("samples-*.jsonl"):
            old.unlink()
        for name in (PAIRS, METRICS_FILE):
            (Path(args.output_dir) / name).unlink(missing_ok=True)
        for role, side in sides.items():
            write_samples(args.output_dir, f"samples-{role}", side.samples, {})
        other = next((role for role in ("opponent", "reference") if role in answers), None)
        pairs = pairs_of(answers["policy"], answers[other]) if other else []
        about = facts_of(args, model_args, sides, num_prompts, accelerator.num_processes)
        about |= {"opponent_model": opponent} if "opponent" in sides else {}
        write = partial(write_evaluation, Path(args.output_dir), about, sides, pairs)
        try:
            contest = None if judge is None else hold_contest(args, judge, constitution, pairs, opponent)
        except RuntimeError:
            write(None)  # The sides are measured, whatever happens to the judge.
            raise
        path = write(contest)
        show_evaluation(model_args.model_name_or_path, sides, contest)
        print(f"eval: wrote {path}, and the samples next to it")
        say_how(args.output_dir, "eval")
    accelerator.end_training()


def named_opponent(args: EvalArguments, model_args: ModelArguments, has_judge: bool) -> str | None:
    """Return the opponent: "reference", the name of a model, or None without one. Loads no weights."""
    name, opponent = model_args.model_name_or_path, args.opponent or (REFERENCE if has_judge else None)
    has_reference = adapter_base(name, model_args.model_revision) is not None
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
    base = base_name(opponent, {})  # Raises if the name leads to no model.
    tokenizer = policy_tokenizer(name, None, model_args.init_kwargs())
    other = policy_tokenizer(opponent, None, {})
    difference = tokenizer_difference(tokenizer, other)
    if difference is not None:
        raise ValueError(
            f"the tokenizer of opponent {opponent} is not that of {name} ({difference}), so that max_completion_length"
            " would give them unequal room; name an opponent with the same tokenizer"
        )
    on_trunk = [spec for spec in args.reward_funcs or [] if read_spec(spec).kind.is_model and is_adapter_name(spec)]
    if on_trunk and not is_same_source(base, base_name(name, model_args.init_kwargs())):
        raise ValueError(
            f"reward adapter {on_trunk[0]} is a branch of the model's own trunk, and opponent {opponent} has the base"
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
) -> tuple[dict[str, Side], int]:
    """Return every side by its role, and the number of prompts.

    The roles are "reference" and "policy" for an adapter, "policy" alone for a base model, and "opponent" if that is
    another model. On servers every side is published under names of its own and unloaded after it was measured.
    """
    name, revision = model_args.model_name_or_path, model_args.model_revision
    progress, sides, episodes = RolloutProgress(), {}, args.episode_parts()

    def sample(
        model: ModelArguments, rewards: Sequence[str | RewardFunction], roles: dict[str, str], on_servers: bool
    ) -> tuple[int, list[str | RewardFunction]]:
        """Measure a model in each role of the trunk, under the name of a side; return rewards for another model."""
        with backend_of(config, tuple(roles.values()), progress, on_servers) as backend:
            check_launch(config)
            quantization = get_quantization_config(model)
            inputs = ModelInputs(model.model_name_or_path, rewards, quantization_config=quantization, **episodes)
            parts = load_sampled_model(inputs, config, [rows], backend)
            parts.model.to(accelerator.device)
            if "policy" in roles.values():
                restore_reference(parts.model, name, revision)
            if isinstance(backend, VLLMBackend):
                longest_prompt = longest_prompt_of(parts.datasets[0], config)
                backend.check_policy(parts.model, longest_row(longest_prompt, config))
            for side, role in roles.items():
                closing = contextlib.closing(parts.sampler)
                with closing, progress.phase(side, is_shown=accelerator.is_main_process):
                    sides[side] = Side(*measure_side(parts, args, accelerator, role), backend.description)
        # A branch of this trunk is built again from its name.
        loaded = zip(parts.sampler.rewards.functions, rewards, strict=True)
        reusable = [spec if isinstance(function, TrunkReward) else function for function, spec in loaded]
        return len(parts.datasets[0]), reusable

    # A base model has only the role "reference".
    both = {"reference": "reference", "policy": "policy"}
    roles = both if is_adapter(name, revision) else {"policy": "reference"}
    num_prompts, rewards = sample(
        model_args, args.reward_funcs or ([] if args.environment else [unscored]), roles, config.use_vllm
    )
    if opponent in (None, REFERENCE):
        return sides, num_prompts
    gc.collect()  # Frees the first model, whose modules refer to each other in cycles.
    base = base_name(name, config.model_init_kwargs)
    opponent_args = replace(model_args, model_name_or_path=opponent, model_revision="main")
    config.model_init_kwargs = opponent_args.init_kwargs()
    on_servers = config.use_vllm and is_same_source(base_name(opponent, config.model_init_kwargs), base)
    if config.use_vllm and not on_servers:
        logger.warning("the servers have another base model than opponent %s: it samples in this process", opponent)
    # The reference of a newly loaded model is that model: the base, or a copy of the adapter.
    sample(opponent_args, rewards, {"opponent": "reference"}, on_servers)
    return sides, num_prompts


@contextlib.contextmanager
def backend_of(
    config: PPOConfig, roles: tuple[str, ...], progress: RolloutProgress, on_servers: bool
) -> Iterator[LocalBackend | VLLMBackend]:
    """Yield what samples the roles: the vLLM servers of the config, or this process."""
    if not on_servers:
        yield LocalBackend(max_rows=config.max_rollout_rows, progress=progress.rollout)
        return
    servers = load_servers(config, roles=roles, progress=progress.rollout)
    with contextlib.closing(servers):
        yield servers


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
    parts: SampledModel, args: EvalArguments, accelerator: Accelerator, role: str
) -> tuple[dict[str, Any], ScoredRollout]:
    """Return metrics and samples of a role, the mean score with its 95% interval (of Student's t).

    RuntimeError: too many completions have no finite score.
    """
    sampler = parts.sampler
    metrics, samples = evaluate_prompts(parts.model, sampler, parts.datasets[0], accelerator, args, role=role)
    if not args.reward_funcs and not args.environment:
        # What `unscored` gave is left out.
        metrics = {name: v for name, v in metrics.items() if not name.startswith(("score/", "reward/"))}
        return metrics, replace(samples, scores=Scores(samples.scores.total, {}))
    unscored_fraction = metrics["reward/unscored_fraction"]
    if unscored_fraction > args.max_unscored_fraction:
        raise RuntimeError(
            f"{unscored_fraction:.0%} of the completions have no finite score, more than max_unscored_fraction"
            f" {args.max_unscored_fraction:.0%}; look at the reward functions ({', '.join(sampler.rewards.names)}) or"
            " raise the limit"
        )
    mean, num_scored = metrics["score/mean"], round(len(parts.datasets[0]) * (1 - unscored_fraction))
    half = quantile(num_scored - 1) * metrics["score/std"] / math.sqrt(max(1, num_scored))
    return metrics | {"score/interval": [mean - half, mean + half]}, samples


def unscored(completions: list[Completion], **columns: Any) -> list[None]:
    """Give no score: takes the place of the reward functions if only a judge compares."""
    return [None] * len(completions)


def facts_of(
    args: EvalArguments, model_args: ModelArguments, sides: dict[str, Side], num_prompts: int, num_processes: int
) -> dict[str, Any]:
    """Return the entries of metrics.json that say what was evaluated, and how."""
    samplers = {role: side.sampled_by for role, side in sides.items()}
    by_role = ", ".join(f"{role}: {sampler}" for role, sampler in samplers.items())
    return {
        "model": model_args.model_name_or_path,
        "num_prompts": num_prompts,
        "seed": args.seed,
        "num_processes": num_processes,
        "sampled_by": by_role if len(set(samplers.values())) > 1 else samplers["policy"],
    }


def gather_answers(scored: ScoredRollout, num_prompts: int, accelerator: Accelerator) -> list[Completed]:
    """Return the completions of one side from all processes; every process must call it.

    `scored` are this process's rows, distributed as in `evaluate_prompts`: after the first `num_prompts` rows of all
    processes, some repeat to fill the last batch.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    rows = zip(scored.batch.prompts, scored.completions, map(bool, scored.rollout.stopped), strict=True)
    numbered = gather_object([(rank + i * world, row) for i, row in enumerate(rows)])
    return [row for _, row in sorted(numbered, key=lambda entry: entry[0])][:num_prompts]


def hold_contest(
    args: EvalArguments, judge: Judge, constitution: Constitution, pairs: Sequence[Pair], opponent: str
) -> Contest:
    """Ask the judge about all pairs in both orders. Its answers are kept in a ledger in `output_dir`."""
    total = 2 * sum(pair.first != pair.second for pair in pairs) * len(constitution.principles)
    bar = WorkBar(total=total, desc="judge", unit="question")
    with bar, Ledger(Path(args.output_dir) / LEDGER) as ledger:
        asker = Asker(judge, constitution, ledger, args.max_failed_fraction, bar=bar)
        try:
            labels = labels_of(asker, pairs)
        except (KeyboardInterrupt, Terminated):
            say("the verdicts so far are saved; the same command continues from them", after_bar=True)
            raise
        bar.update(total - bar.n)  # Answers from the ledger.
    return contest_of(asker, pairs, labels, opponent, args.tie_margin, args.seed)


def write_evaluation(
    folder: Path, about: dict[str, Any], sides: dict[str, Side], pairs: Sequence[Pair], contest: Contest | None
) -> Path:
    """Write metrics.json and, with an opponent, pairs.jsonl and plots; return the path of metrics.json."""
    rows = [{"prompt": pair.prompt, "policy": pair.first, "opponent": pair.second} for pair in pairs]
    if contest is not None:
        rows = [
            row | {"outcome": outcome, **asdict(label)}
            for row, outcome, label in zip(rows, contest.outcomes, contest.labels, strict=True)
        ]
        about |= {"win_rate": contest.metrics}
    if rows:
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        atomic_write_text(folder / PAIRS, redact("".join(lines)))
    # Last: when metrics.json exists, so do the other files.
    return write_values(folder, {**about, **{role: side.metrics for role, side in sides.items()}})


def show_evaluation(name: str, sides: dict[str, Side], contest: Contest | None) -> None:
    """Print metrics and win rate as tables, and the findings."""
    metrics = {role: side.metrics for role, side in sides.items()}
    columns = (
        compared(metrics["reference"], metrics["policy"]) if metrics.keys() == {"reference", "policy"} else metrics
    )
    show_columns(name, columns)
    if contest is not None:
        position = {f"position/{key}": value for key, value in contest.metrics["position"].items()}
        # Booleans are reported in the findings.
        numbers = {key: v for key, v in (contest.metrics | position).items() if not isinstance(v, bool)}
        show_columns(f"{name} against {contest.metrics['opponent']}", {"value": numbers})
        for finding in contest_findings(contest.metrics):
            print(printable(f"eval: {finding}"))


parse_eval = partial(
    parse, verb="eval", dataclass_types=(EvalArguments, JudgeConfig, ModelArguments), check=check_purpose
)
