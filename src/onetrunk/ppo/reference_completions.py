"""One completion per prompt of the model that training starts from, sampled once and kept beside the run.

The reference is a role of the trunk, so no second model is loaded. All randomness of a completion derives from the
seed and the prompt, and a file keeps what was sampled: a run that goes on compares with the same texts. Knows the
trainer's parts; no reward.
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
from onetrunk.models.sources import base_fingerprint
from onetrunk.models.trunk import TrunkModel
from onetrunk.ppo.sampling import PromptOrder
from onetrunk.ppo.trainer import PPOTrainer
from onetrunk.rewards.judge import COLUMN, prompt_key
from onetrunk.rollouts.local import LocalBackend
from onetrunk.types import SampledText

# What a run keeps for itself: Trainer pushes nothing to the Hub whose name begins so.
FOLDER = "_kept"
FILE = "reference_completions"
# Prompts whose completions are sampled together, and lost together by a kill.
CHUNK = 64


def sample_references(trainer: PPOTrainer, more: Sequence[Dataset] = ()) -> dict[str, SampledText]:
    """Return a completion of the reference by `prompt_key`, for the prompts of the planned run and its evaluations.

    Every process samples a share, and keeps it in `output_dir`/_kept; all get all of them.

    Args:
        trainer: before training; its reference samples.
        more: further tokenized prompts that need one. Rows that have a column for it need none.
    """
    wanted = dict(_prompts([_planned_rows(trainer), *_held_out(trainer), *more]))
    rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
    own = [PromptItem(prompt, key, ids) for key, (prompt, ids) in list(wanted.items())[rank::world]]
    path = Path(trainer.args.output_dir) / FOLDER / f"{FILE}-{rank}.jsonl"
    model = trainer.model
    with Ledger(path) as ledger, torch.no_grad(), trainer.accelerator.autocast(), model.as_role("reference"):
        sampler = _sampler(trainer, model, ledger)
        bar = tqdm(
            total=len(own),
            desc="reference completions",
            unit="prompt",
            dynamic_ncols=True,
            disable=trainer.args.disable_tqdm or rank > 0,
        )
        found: dict[str, SampledText] = {}
        with bar:
            for start in range(0, len(own), CHUNK):
                items = own[start : start + CHUNK]
                for item, texts in zip(items, sampler.sample(items, 1), strict=True):
                    found[item.key] = texts[0]
                bar.update(len(items))
    return {key: text for shares in gather_object([found]) for key, text in shares.items()}


def _prompts(datasets: Iterable[Dataset]) -> Iterable[tuple[str, tuple[Any, list[int]]]]:
    for dataset in datasets:
        if COLUMN not in dataset.column_names:
            for prompt, ids in zip(dataset["prompt"], dataset["prompt_ids"], strict=True):
                yield prompt_key(prompt), (prompt, ids)


def _held_out(trainer: PPOTrainer) -> list[Dataset]:
    held_out = trainer.eval_dataset
    return list(held_out.values()) if isinstance(held_out, dict) else [held_out] if held_out is not None else []


def _planned_rows(trainer: PPOTrainer) -> Dataset:
    """Return the rows that the planned rollouts take; all where they are as many."""
    args, dataset = trainer.args, trainer.train_dataset
    order = PromptOrder(
        len(dataset),
        args.rollout_batch_size,
        args.num_generations,
        order_seed=args.seed if args.data_seed is None else args.data_seed,
        seed=args.seed,
        shuffle=args.shuffle_dataset,
    )
    if args.max_steps <= 0 or args.max_steps >= order.rollouts_per_pass * args.slots_per_rollout:
        return dataset
    num_rollouts = -(-args.max_steps // args.slots_per_rollout)
    return dataset.select(sorted({int(row) for i in range(num_rollouts) for row in order.prompts(i)}))


def _sampler(trainer: PPOTrainer, model: TrunkModel, ledger: Ledger) -> TextSampler:
    sampler = trainer.sampler
    return TextSampler(
        # Own, whatever the run samples with: a server has the policy alone.
        backend=LocalBackend(model, max_rows=trainer.args.max_rollout_rows),
        tokenizer=sampler.tokenizer,
        params=sampler.params,
        identity={"base": base_fingerprint(model.get_base_model()), "adapter": _adapter_fingerprint(model)},
        seed=trainer.args.seed,
        ledger=ledger,
    )


@torch.no_grad()
def _adapter_fingerprint(model: TrunkModel) -> str | None:
    """Return a digest of the reference's own adapter; None where the reference is the bare base."""
    if not model.has_reference_adapter:
        return None
    digest = hashlib.sha256()
    for name, parameter in sorted(adapter_parameters(model, REFERENCE).items()):
        digest.update(f"{name} {list(parameter.shape)}".encode())
        digest.update(parameter.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
