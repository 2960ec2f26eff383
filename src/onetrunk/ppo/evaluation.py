"""Held-out evaluation, and tables of samples.

The same prompts get the same random numbers at every evaluation, so that differences come from the policy.
"""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from rich.table import Table
from tqdm.auto import tqdm

from onetrunk.models.trunk import TrunkModel
from onetrunk.ops.packing import PackLimits
from onetrunk.parallel.groups import RowGroups, pack_outputs
from onetrunk.parallel.sharding import equal_counts, reshard
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.monitoring.metrics import episode_metrics, rollout_metrics
from onetrunk.ppo.packs import joined, rollout_packs, with_importance
from onetrunk.ppo.rollout import CONTEXT, RolloutMaker, Sampled, ScoredRollout, prompt_batch, with_turn_values
from onetrunk.rewards.reward import turn_sums
from onetrunk.types import Completion
from onetrunk.utils.files import require_name
from onetrunk.utils.randomness import EVALUATION_STREAM, ROLLOUT_STREAM, seed_generators
from onetrunk.utils.redaction import redact, table_console
from onetrunk.utils.sample_text import score_text, short_text, transcript_text

# Characters of a text in a table.
LONGEST_CELL = 400


def evaluate_prompts(
    model: TrunkModel,
    sampler: RolloutMaker,
    dataset: Dataset,
    accelerator: Accelerator,
    args: PPOConfig,
    role: str = "policy",
    version: int = 0,
    **extras: Any,
) -> tuple[dict[str, float], ScoredRollout]:
    """Return the metrics of one completion per prompt, and this process's scored rollout.

    Args:
        dataset: rows with `prompt` and `prompt_ids`, dealt to the processes in turn.
        role: "policy", or "reference" for the metrics before training (its KL to itself is not reported).
        version: optimizer steps that the policy has seen.
    """
    ranks = RowGroups(accelerator)
    process, num_processes = ranks.process_index, ranks.num_processes
    share = math.ceil(len(dataset) / num_processes)
    # Metrics are gathered, so every process has equally many rows; surplus rows repeat others and do not count.
    places = [process + i * num_processes for i in range(share)]
    rows, counted = [place % len(dataset) for place in places], torch.tensor(places) < len(dataset)
    batch = prompt_batch(dataset, rows, [(args.seed, EVALUATION_STREAM, row) for row in rows])
    # A versioned backend gets the policy whichever role samples; any other samples from the weights that are active.
    plays = contextlib.nullcontext() if sampler.is_versioned else model.as_role(role)
    with torch.no_grad(), accelerator.autocast(), plays:
        sampler.backend.sync(model, version)
        rollout = sampler.generate(batch, role=role, version=version)
    # A transcript shows the values of its turns.
    wanted = ("policy", "reference") if rollout.turn_ids is None else ("policy", "value", "reference")
    roles = sampler.roles(*(wanted if role == "policy" else ()))
    packs, everything, pad_id = [], [range(len(rollout))], sampler.params.pad_token_id
    if roles:
        limits = PackLimits.of(args, args.per_device_eval_batch_size)
        agree = equal_counts(model, accelerator)
        packs = rollout_packs(rollout, everything, limits, pad_id, accelerator.device, agree)
    temperature = sampler.params.temperature or 1.0
    was_training = model.training
    model.eval()
    with torch.no_grad(), accelerator.autocast():
        outputs = pack_outputs(model, [item.pack for item in packs], roles, temperature)
        outputs = (output._replace(value_states=None) for output in outputs)
        packs = [replace(item, output=output) for item, output in zip(packs, outputs, strict=True)]
        packs = joined(packs, rollout)
    if sampler.params.truncates and role == "policy":
        packs = [with_importance(item, rollout, clip_max=None) for item in packs]
    reshard(model)
    model.train(was_training)
    seed_generators(args.seed, ROLLOUT_STREAM, EVALUATION_STREAM, process)
    scored = sampler.score(Sampled(batch, rollout), lambda: packs, **extras)
    scored = with_turn_values(scored, packs) if "value" in roles else scored
    metrics = rollout_metrics(scored, packs, accelerator, counted)
    metrics |= episode_metrics(scored, accelerator, counted)
    sampler.require_played(rollout, metrics)
    return {n: v for n, v in metrics.items() if n != "num_tokens" and not n.startswith("time/")}, scored


class SampleLog:
    """Prints the first rows of a scored rollout and writes all of them into `output_dir`/completions, if on."""

    def __init__(self, output_dir: str | Path, is_on: bool):
        self.folder = Path(output_dir) / "completions"
        self.is_on = is_on
        self._extra: dict[str, list[Any]] = {}

    def begin(self) -> None:
        """Forget the columns of the previous rollout."""
        self._extra = {}

    def add_column(self, column: str, values: list[Any]) -> None:
        """Add a column to the current rollout; reward functions call it as `log_extra`."""
        self._extra[column] = list(values)

    def record(self, name: str, scored: ScoredRollout, with_columns: bool = True) -> None:
        """Write `name`.jsonl, and print the table."""
        if not self.is_on:
            return
        write_samples(self.folder, name, scored, self._extra if with_columns else {})
        console = table_console()
        with console.capture() as capture:
            console.print(sample_table(scored, name))
        tqdm.write(capture.get())  # above a running progress bar


def write_samples(folder: str | Path, name: str, scored: ScoredRollout, extra: dict[str, list[Any]]) -> Path:
    """Write every row of a scored rollout as JSON lines into `folder`/`name`.jsonl; return the path."""
    require_name(name, "the name of the samples")
    path = Path(folder) / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines, extra = [], {name: spread(values, scored) for name, values in extra.items()}
    with path.open("w", encoding="utf-8") as file:
        for i, prompt in enumerate(scored.batch.prompts):
            row = {"prompt": prompt, "completion": scored.completions[i], "score": _number(scored.scores.total[i])}
            row |= {f"score/{n}": _number(s[i]) for n, s in scored.scores.by_function.items()}
            row["stopped"] = bool(scored.rollout.stopped[i])
            row |= where_rewarded(scored, i)
            row |= {} if scored.parts is None else {"transcript": transcript(scored, i)}
            row |= {column: values[i] for column, values in extra.items() if values}
            lines.append(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        file.write(redact("".join(lines)))
    return path


def spread(values: list[Any], scored: ScoredRollout) -> list[Any]:
    """Return a value per row of a column that a reward function logged; it has none for episodes that failed, None."""
    rows = range(len(scored.completions))
    episodes = scored.rollout.episodes
    played = [row for row in rows if episodes is None or episodes[row].failure is None]
    if len(values) != len(played):
        return []
    by_row = dict(zip(played, values, strict=True))
    return [by_row.get(row) for row in rows]


def where_rewarded(scored: ScoredRollout, row: int) -> dict[str, list[Any]]:
    """Return where the reward of a row fell, as columns of a sample; {} if rewards are not dense.

    `turn_rewards` has a number per turn. If several rewards arrived in a turn, `token_rewards` has the number of each
    token at which one did, and the reward.
    """
    if scored.scores.by_token is None or not scored.scores.total[row].isfinite():
        return {}
    found = scored.arrivals(row)
    columns: dict[str, list[Any]] = {"turn_rewards": [round(reward, 6) for reward in turn_sums(found)]}
    if len(found) > len({arrival.turn for arrival in found}):
        columns["token_rewards"] = [[arrival.token, round(arrival.reward, 6)] for arrival in found]
    return columns


def transcript(scored: ScoredRollout, row: int) -> list[dict[str, Any]]:
    """Return the turns of an episode and what was given between them, with each turn's reward and first value."""
    has_score = bool(scored.scores.total[row].isfinite())
    rewards = turn_sums(scored.arrivals(row)) if has_score else []
    values = [] if scored.turn_values is None else scored.turn_values[row]
    entries: list[dict[str, Any]] = []
    for turn, text in scored.parts[row]:
        given = {CONTEXT: "context"}.get(turn, "observation")
        entry: dict[str, Any] = {given: text} if turn < 0 else {"turn": turn, "text": text}
        for name, numbers in (("reward", rewards), ("value", values)):
            if 0 <= turn < len(numbers):
                entry[name] = round(numbers[turn], 6)
        entries.append(entry)
    return entries


def shown_completion(scored: ScoredRollout, row: int) -> Completion:
    """Return what a sample shows as the completion of a row: of an episode its transcript."""
    return scored.completions[row] if scored.parts is None else transcript_text(transcript(scored, row))


def _number(value: Any) -> float | None:
    # JSON has no NaN and no infinity; a row without a score has null.
    number = float(value)
    return number if math.isfinite(number) else None


def sample_table(scored: ScoredRollout, title: str, num_rows: int = 4) -> Table:
    """Return a table of the first rows of a scored rollout."""
    table = Table(title=title, show_lines=True)
    for column in ("prompt", "completion", "score"):
        table.add_column(column, overflow="fold")
    for i in range(min(num_rows, len(scored.completions))):
        texts = (short_text(text, LONGEST_CELL) for text in (scored.batch.prompts[i], shown_completion(scored, i)))
        table.add_row(*texts, score_text(f"{scored.scores.total[i].item():.3f}", where_rewarded(scored, i)))
    return table
