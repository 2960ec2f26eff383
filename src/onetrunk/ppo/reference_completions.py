"""The reference's completions that pairwise rewards compare with; sampled once, before training."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import Trainer

from onetrunk.data.sharded import ShardedRows
from onetrunk.feedback.ledger import Ledger
from onetrunk.feedback.sampling import PromptItem, TextSampler
from onetrunk.judges.judge import prompt_key
from onetrunk.models.adapters import REFERENCE, adapter_parameters
from onetrunk.models.loading import base_fingerprint
from onetrunk.models.trunk import TrunkModel
from onetrunk.parallel.groups import DataParallel
from onetrunk.parallel.sharding import gathered
from onetrunk.ppo.rollout import PromptOrder
from onetrunk.rewards.judge_reward import COLUMN
from onetrunk.rollouts.local import LocalBackend
from onetrunk.types import SampledText

# What a resumed run needs from judges and reference. Trainer pushes no path that begins with an underscore to the Hub.
KEPT_FOLDER = "_kept"
# Prompts whose reference completions are sampled together; a killed run loses at most one chunk.
CHUNK = 64


def sample_references(trainer: Trainer, more: Sequence[Dataset] = ()) -> dict[str, SampledText]:
    """Return a completion of the reference by `prompt_key`, for the prompts of the planned run and its evaluations.

    Every process samples a share and saves it in `output_dir`/_kept, so a resumed run compares with the same texts.
    All processes return all completions.

    Args:
        trainer: a PPOTrainer before training; its reference samples.
        more: further tokenized prompts. Rows with a column for the reference completion need none.
    """
    if trainer.args.pipeline_training:
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
