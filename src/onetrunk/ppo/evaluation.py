"""Held-out evaluation, tables of samples, and the reference's completions that pairwise rewards compare with.

The same prompts get the same random numbers at every evaluation, so that differences come from the policy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from rich.table import Table
from tqdm.auto import tqdm
from transformers import Trainer

from onetrunk.data.sharded import ShardedRows
from onetrunk.feedback.ledger import Ledger
from onetrunk.feedback.sampling import PromptItem, TextSampler
from onetrunk.judges.judge import prompt_key
from onetrunk.models.adapters import REFERENCE, adapter_parameters
from onetrunk.models.loading import base_fingerprint
from onetrunk.models.trunk import TrunkModel
from onetrunk.ops.packing import PackLimits
from onetrunk.parallel.groups import DataParallel
from onetrunk.parallel.sharding import equal_counts, gathered, reshard
from onetrunk.parallel.staged import pack_outputs, trains_in_stages
from onetrunk.ppo.metrics import rollout_metrics
from onetrunk.ppo.rollout import (
    PromptOrder,
    Sampled,
    Sampler,
    ScoredRollout,
    prompt_batch,
    rollout_packs,
    with_importance,
)
from onetrunk.rewards.judge_reward import COLUMN
from onetrunk.rollouts.local import LocalBackend
from onetrunk.types import SampledText
from onetrunk.utils.escaping import table_console
from onetrunk.utils.files import require_name
from onetrunk.utils.randomness import EVALUATION_STREAM, ROLLOUT_STREAM, seed_generators
from onetrunk.utils.redaction import redact

# What a resumed run needs from judges and reference. Trainer pushes no path that begins with an underscore to the Hub.
KEPT_FOLDER = "_kept"
# Prompts whose reference completions are sampled together; a killed run loses at most one chunk.
CHUNK = 64
# Characters of a text in a table.
LONGEST_CELL = 400


class EvaluationSettings(Protocol):
    """The settings that an evaluation reads, under the names of PPOConfig."""

    seed: int
    per_device_eval_batch_size: int
    microbatch_tokens: int | None


def evaluate_prompts(
    model: TrunkModel,
    sampler: Sampler,
    dataset: Dataset,
    accelerator: Accelerator,
    args: EvaluationSettings,
    *,
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
        args: of the run or of the evaluation.
        role: "policy", or "reference" for the metrics before training (its KL to itself is not reported).
        version: optimizer steps that the policy has seen.
        extras: keywords for the reward functions.
    """
    ranks = DataParallel(accelerator)
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
    roles = sampler.roles(*(("policy", "reference") if role == "policy" else ()))
    packs, everything, pad_id = [], [range(len(rollout))], sampler.params.pad_token_id
    if roles:
        limits = PackLimits(args.per_device_eval_batch_size, args.microbatch_tokens, args.padding_free)
        agree = equal_counts(model, accelerator)
        packs = rollout_packs(rollout, everything, limits, pad_id, accelerator.device, agree)
    temperature = sampler.params.temperature or 1.0
    was_training = model.training
    model.eval()
    with torch.no_grad(), accelerator.autocast():
        outputs = pack_outputs(model, [item.pack for item in packs], roles, temperature)
        packs = [replace(item, output=output) for item, output in zip(packs, outputs, strict=True)]
    if sampler.params.truncates and role == "policy":
        packs = [with_importance(item, rollout, clip_max=None) for item in packs]
    reshard(model)
    model.train(was_training)
    seed_generators(args.seed, ROLLOUT_STREAM, EVALUATION_STREAM, process)
    scored = sampler.score(Sampled(batch, rollout), lambda: packs, **(extras or {}))
    metrics = rollout_metrics(scored, packs, accelerator, counted)
    del metrics["num_tokens"]
    return metrics, scored


class SampleLog:
    """Prints the first `num_rows` of a scored rollout and writes all of them into `output_dir`/completions, if on."""

    def __init__(self, output_dir: str | Path, num_rows: int, is_on: bool):
        self.folder = Path(output_dir) / "completions"
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
            console = table_console()
            with console.capture() as capture:
                console.print(sample_table(scored, name, self.num_rows))
            tqdm.write(capture.get())  # above a running progress bar


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
    return plain if len(plain) <= LONGEST_CELL else plain[:LONGEST_CELL] + " ..."


def sample_references(trainer: Trainer, more: Sequence[Dataset] = ()) -> dict[str, SampledText]:
    """Return a completion of the reference by `prompt_key`, for the prompts of the planned run and its evaluations.

    Every process samples a share and saves it in `output_dir`/_kept, so a resumed run compares with the same texts.
    All processes return all completions.

    Args:
        trainer: a PPOTrainer before training; its reference samples.
        more: further tokenized prompts. Rows with a column for the reference completion need none.
    """
    if trains_in_stages(trainer.model):
        raise ValueError(
            "reference completions are sampled by one process on its own, and with pipeline_training none has the"
            " whole model; give the rows a column with them, or leave the judge that compares with them out"
        )
    held_out = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"": trainer.eval_dataset}
    datasets = [_planned_rows(trainer), *(rows for rows in held_out.values() if rows is not None), *more]
    prompts = {
        prompt_key(prompt): (prompt, ids)
        for dataset in datasets
        if COLUMN not in dataset.column_names
        for prompt, ids in zip(dataset["prompt"], dataset["prompt_ids"], strict=True)
    }
    process, ranks = trainer.accelerator.process_index, DataParallel(trainer.accelerator)
    own = list(prompts.items())[ranks.process_index :: ranks.num_processes]
    share = [PromptItem(prompt, key, ids) for key, (prompt, ids) in own]
    path = Path(trainer.args.output_dir) / KEPT_FOLDER / f"reference_completions-{process}.db"
    model: TrunkModel = trainer.model
    bar_options = {"desc": "reference completions", "unit": "prompt", "dynamic_ncols": True}
    is_hidden = trainer.args.disable_tqdm or process > 0
    completions: dict[str, SampledText] = {}
    with (
        Ledger(path) as ledger,
        gathered(trainer.model),  # Once for all chunks: processes have different numbers of them.
        torch.no_grad(),
        trainer.accelerator.autocast(),
        model.as_role("reference"),
        tqdm(total=len(share), disable=is_hidden, **bar_options) as bar,
    ):
        sampler = TextSampler(
            # In this process, whatever backend the run has: a server has only the policy.
            backend=LocalBackend(model, max_rows=trainer.args.max_rollout_rows),
            tokenizer=trainer.sampler.tokenizer,
            params=trainer.sampler.params,
            identity={"base": base_fingerprint(model.get_base_model()), "adapter": _adapter_fingerprint(model)},
            seed=trainer.args.seed,
            ledger=ledger,
        )
        for start in range(0, len(share), CHUNK):
            items = share[start : start + CHUNK]
            for item, texts in zip(items, sampler.sample(items, 1), strict=True):
                completions[item.key] = texts[0]
            bar.update(len(items))
    return {key: text for part in gather_object([completions]) for key, text in part.items()}


def _planned_rows(trainer: Trainer) -> Dataset:
    """Return the rows that the planned rollouts use."""
    args, dataset = trainer.args, trainer.train_dataset
    order = PromptOrder.from_config(args, dataset)
    if args.max_steps <= 0 or args.max_steps >= order.rollouts_per_pass * args.slots_per_rollout:
        return dataset.select(range(len(dataset))) if isinstance(dataset, ShardedRows) else dataset
    num_rollouts = -(-args.max_steps // args.slots_per_rollout)
    return dataset.select(sorted({int(row) for i in range(num_rollouts) for row in order.prompts(i)}))


@torch.no_grad()
def _adapter_fingerprint(model: TrunkModel) -> str | None:
    """Return a digest of the reference's adapter; None if the reference is the bare base."""
    if not model.has_reference_adapter:
        return None
    digest = hashlib.sha256()
    for name, parameter in sorted(adapter_parameters(model, REFERENCE).items()):
        digest.update(f"{name} {list(parameter.shape)}".encode())
        digest.update(parameter.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
