"""One completion of the reference per prompt, sampled once and saved in the output folder.

The reference is a role of the trunk, so no second model is loaded. The randomness of a completion derives from the
seed and the prompt, and a file keeps the completions: a resumed run compares with the same texts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from tqdm.auto import tqdm

from onetrunk.feedback.ledger import Ledger
from onetrunk.feedback.sampling import PromptItem, TextSampler
from onetrunk.models.adapters import REFERENCE, adapter_parameters
from onetrunk.models.parallel import gathered
from onetrunk.models.sources import base_fingerprint
from onetrunk.models.trunk import TrunkModel
from onetrunk.ppo.sampling import PromptOrder
from onetrunk.ppo.trainer import PPOTrainer
from onetrunk.rewards.judge import COLUMN, prompt_key
from onetrunk.rollouts.local import LocalBackend
from onetrunk.types import SampledText

# Trainer pushes no file to the Hub whose path begins with an underscore.
FOLDER = "_kept"
FILE = "reference_completions"
# Prompts whose completions are sampled together; a killed run loses at most one chunk.
CHUNK = 64


def sample_references(trainer: PPOTrainer, more: Sequence[Dataset] = ()) -> dict[str, SampledText]:
    """Return a completion of the reference by `prompt_key`, for the prompts of the planned run and its evaluations.

    Every process samples a share and saves it in `output_dir`/_kept; all processes return all completions.

    Args:
        trainer: before training; its reference samples.
        more: further tokenized prompts. Rows with a column for the reference completion need none.
    """
    prompts = dict(_prompts([_planned_rows(trainer), *_held_out(trainer), *more]))
    process, num_processes = trainer.accelerator.process_index, trainer.accelerator.num_processes
    share = [PromptItem(prompt, key, ids) for key, (prompt, ids) in list(prompts.items())[process::num_processes]]
    path = Path(trainer.args.output_dir) / FOLDER / f"{FILE}-{process}.jsonl"
    model = trainer.model
    bar_options = {"desc": "reference completions", "unit": "prompt", "dynamic_ncols": True}
    is_hidden = trainer.args.disable_tqdm or process > 0
    completions: dict[str, SampledText] = {}
    with (
        Ledger(path) as ledger,
        # Once for all chunks: processes have different numbers of them.
        gathered(model),
        torch.no_grad(),
        trainer.accelerator.autocast(),
        model.as_role("reference"),
        tqdm(total=len(share), disable=is_hidden, **bar_options) as bar,
    ):
        sampler = _sampler(trainer, model, ledger)
        for start in range(0, len(share), CHUNK):
            items = share[start : start + CHUNK]
            for item, texts in zip(items, sampler.sample(items, 1), strict=True):
                completions[item.key] = texts[0]
            bar.update(len(items))
    return {key: text for part in gather_object([completions]) for key, text in part.items()}


def _prompts(datasets: Iterable[Dataset]) -> Iterable[tuple[str, tuple[Any, list[int]]]]:
    for dataset in datasets:
        if COLUMN not in dataset.column_names:
            for prompt, ids in zip(dataset["prompt"], dataset["prompt_ids"], strict=True):
                yield prompt_key(prompt), (prompt, ids)


def _held_out(trainer: PPOTrainer) -> list[Dataset]:
    held_out = trainer.eval_dataset
    return list(held_out.values()) if isinstance(held_out, dict) else [held_out] if held_out is not None else []


def _planned_rows(trainer: PPOTrainer) -> Dataset:
    """Return the rows that the planned rollouts use."""
    args, dataset = trainer.args, trainer.train_dataset
    order = PromptOrder.from_config(args, len(dataset))
    if args.max_steps <= 0 or args.max_steps >= order.rollouts_per_pass * args.slots_per_rollout:
        return dataset
    num_rollouts = -(-args.max_steps // args.slots_per_rollout)
    return dataset.select(sorted({int(row) for i in range(num_rollouts) for row in order.prompts(i)}))


def _sampler(trainer: PPOTrainer, model: TrunkModel, ledger: Ledger) -> TextSampler:
    sampler = trainer.sampler
    return TextSampler(
        # In this process, whatever backend the run has: a server has only the policy.
        backend=LocalBackend(model, max_rows=trainer.args.max_rollout_rows),
        tokenizer=sampler.tokenizer,
        params=sampler.params,
        identity={"base": base_fingerprint(model.get_base_model()), "adapter": _adapter_fingerprint(model)},
        seed=trainer.args.seed,
        ledger=ledger,
    )


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
