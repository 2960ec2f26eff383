"""Held-out evaluation: sample, score, and measure the KL of a policy to its reference; tables of samples.

The same prompts get the same random numbers at every evaluation, so that differences come from the policy.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm

from onetrunk.models.parallel import reshard
from onetrunk.models.trunk import TrunkModel
from onetrunk.ppo.metrics import rollout_metrics
from onetrunk.ppo.sampling import (
    RolloutPack,
    Sampler,
    ScoredRollout,
    equal_counts,
    prompt_batch,
    rollout_packs,
)
from onetrunk.utils.files import require_name
from onetrunk.utils.randomness import EVALUATION_STREAM
from onetrunk.utils.redaction import redact


def evaluate_prompts(
    model: TrunkModel,
    sampler: Sampler,
    dataset: Dataset,
    accelerator: Accelerator,
    *,
    seed: int,
    rows_per_pack: int,
    max_tokens: int | None = None,
    role: str = "policy",
    version: int = 0,
    extras: dict[str, Any] | None = None,
) -> tuple[dict[str, float], ScoredRollout]:
    """Return the metrics of one completion per prompt, and this process's scored rollout.

    Args:
        model: the trunk; `role` samples.
        sampler: backend, reward functions, tokenizer, sampling parameters.
        dataset: rows with `prompt` and `prompt_ids`, dealt to the processes in turn.
        accelerator: processes, device and autocast.
        seed: of the completions.
        rows_per_pack: most rows in one scoring forward.
        max_tokens: most padded tokens in one; None: no bound.
        role: "policy", or "reference" for the metrics before training (its KL to itself is not reported).
        version: optimizer steps that the policy has seen.
        extras: keywords for the reward functions.
    """
    process, num_processes = accelerator.process_index, accelerator.num_processes
    share = math.ceil(len(dataset) / num_processes)
    # Metrics are gathered, so every process has equally many rows; surplus rows repeat others and do not count.
    places = [process + i * num_processes for i in range(share)]
    rows, counted = [place % len(dataset) for place in places], torch.tensor(places) < len(dataset)
    batch = prompt_batch(dataset, rows, [(seed, EVALUATION_STREAM, row) for row in rows])
    with torch.no_grad(), accelerator.autocast(), model.as_role(role):
        sampler.backend.sync(model, version)
        rollout = sampler.generate(batch)
    roles = sampler.roles(*(("policy", "reference") if role == "policy" else ()))
    packs: list[RolloutPack] = []
    if roles:
        pad_id = sampler.params.pad_token_id
        everything = [range(len(rollout))]
        agree = equal_counts(model, accelerator)
        packs = rollout_packs(rollout, everything, rows_per_pack, max_tokens, pad_id, accelerator.device, agree)
    temperature = sampler.params.temperature or 1.0
    was_training = model.training
    model.eval()
    with torch.no_grad(), accelerator.autocast():
        packs = [replace(p, output=model(pack=p.pack, roles=roles, temperature=temperature)) for p in packs]
    reshard(model)
    model.train(was_training)
    scored = sampler.score(batch, rollout, lambda: packs, **(extras or {}))
    metrics = rollout_metrics(scored, packs, accelerator, counted)
    del metrics["num_tokens"]
    return metrics, scored


FOLDER = "completions"
LONGEST_CELL = 400


class SampleLog:
    """Prints the first rows of a scored rollout and writes all of them into `output_dir`/completions.

    Args:
        output_dir: output folder of the run.
        num_rows: rows of the table; 0 prints none.
        is_on: False records nothing.
    """

    def __init__(self, output_dir: str | Path, num_rows: int, is_on: bool):
        self.folder = Path(output_dir) / FOLDER
        self.num_rows = num_rows
        self.is_on = is_on
        self._extra: dict[str, list[Any]] = {}

    def begin(self) -> None:
        """Forget the columns of the previous rollout."""
        self._extra = {}

    def add_column(self, column: str, values: list[Any]) -> None:
        """Add a column to the current rollout; reward functions call it as `log_extra`."""
        self._extra[column] = list(values)

    def record(self, name: str, scored: ScoredRollout, with_columns: bool = True) -> None:
        """Write `name`.jsonl, and print the table if `num_rows` is above 0."""
        if not self.is_on:
            return
        write_samples(self.folder, name, scored, self._extra if with_columns else {})
        if self.num_rows:
            show(sample_table(scored, name, self.num_rows))


def write_samples(folder: str | Path, name: str, scored: ScoredRollout, extra: dict[str, list[Any]]) -> Path:
    """Write every row of a scored rollout as JSON lines into `folder`/`name`.jsonl; return the path.

    Raises:
        ValueError: the name could lead out of the folder.
    """
    require_name(name, "the name of the samples")
    path = Path(folder) / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    with path.open("w", encoding="utf-8") as file:
        for i, prompt in enumerate(scored.batch.prompts):
            row = {"prompt": prompt, "completion": scored.completions[i], "score": _number(scored.scores.total[i])}
            row |= {f"score/{n}": _number(s[i]) for n, s in scored.scores.by_function.items()}
            row["stopped"] = bool(scored.rollout.stopped[i])
            row |= {column: values[i] for column, values in extra.items() if len(values) == len(scored.completions)}
            lines.append(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        file.write(redact("".join(lines)))
    return path


def _number(value: Any) -> float | None:
    # JSON has no NaN and no infinity; a row without a score has null.
    number = float(value)
    return number if math.isfinite(number) else None


def sample_table(scored: ScoredRollout, title: str, num_rows: int) -> Table:
    """Return a table of the first rows of a scored rollout."""
    table = Table(title=title, show_lines=True)
    for column in ("prompt", "completion", "score"):
        table.add_column(column, overflow="fold")
    for i in range(min(num_rows, len(scored.completions))):
        cells = (_cell(scored.batch.prompts[i]), _cell(scored.completions[i]), f"{scored.scores.total[i].item():.3f}")
        table.add_row(*cells)
    return table


def _cell(text: Any) -> str:
    plain = text if isinstance(text, str) else "\n".join(f"{m['role']}: {m['content']}" for m in text)
    plain = plain if len(plain) <= LONGEST_CELL else plain[:LONGEST_CELL] + " ..."
    return plain.replace("[", r"\[")


def show(table: Table) -> None:
    """Print a table to the terminal, above a running progress bar."""
    console = Console(width=None)
    with console.capture() as capture:
        console.print(table)
    tqdm.write(capture.get())
