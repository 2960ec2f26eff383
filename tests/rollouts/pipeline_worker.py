"""What each process of a pipeline does in test_pipelined.py: it samples its rows in stages and alone."""

from __future__ import annotations

from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.cache_utils import DynamicLayer

from onetrunk.models.base_model import decoder_layers
from onetrunk.models.trunk import TrunkModel
from onetrunk.rollouts import LocalBackend, SamplingParams
from onetrunk.rollouts.pipelined import PipelinedBackend
from tests.models.branches import a_trunk, counted, lora, move
from tests.places import CPU, join_group
from tests.rollouts.small import PROMPTS, mixed_params, tiny
from tests.tiny import tiny_model

ROWS = 11
GREEDY = SamplingParams(max_completion_length=12, temperature=0, stop_token_ids=tuple(range(4, 24)))
SEEDED = mixed_params(temperature=1.3)
TRUNCATED = mixed_params(temperature=1.3, top_p=0.7, top_k=9)


def rows_of(rank: int, world_size: int) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    """Return this process's prompts and keys; some prompts repeat, and the last process has one row less."""
    places = range(rank, ROWS, world_size)
    return [PROMPTS[(i // 2) % len(PROMPTS)] for i in places], [(4, 0, i) for i in places]


def four_bit() -> nn.Module:
    """Return a trunk over a base in NF4; its layers have at least 64 columns."""
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    plain_base = tiny_model("llama", hidden_size=64, eos_token_id=None)
    with TemporaryDirectory() as folder:
        # Not save_pretrained: in a group it writes on the first process only.
        plain_base.config.save_pretrained(folder)
        save_file(dict(plain_base.state_dict()), f"{folder}/model.safetensors", {"format": "pt"})
        base = type(plain_base).from_pretrained(folder, quantization_config=config, device_map={"": "cpu"})
    trunk = TrunkModel(base, lora())
    move(trunk)
    return trunk


MODELS: dict[str, Any] = {
    **{family: partial(tiny, family) for family in ("llama", "gemma3", "gpt2")},
    "lora": a_trunk,
    "lora, tied": partial(a_trunk, "qwen2"),
    "lora, soft-capped": partial(a_trunk, "gemma2"),
    "lora, top-2": partial(a_trunk, adapter_layers="top-2"),
    "lora, 4-bit": four_bit,
    "lora, bfloat16": partial(a_trunk, dtype=torch.bfloat16),
}
# name: (model, settings of the backend, settings of the call)
CASES: dict[str, tuple[str, dict[str, Any], SamplingParams]] = {
    **{f"{name}, seeded": (name, {}, SEEDED) for name in MODELS},
    **{f"{name}, greedy": (name, {}, GREEDY) for name in ("llama", "lora")},
    "lora, truncated": ("lora", {}, TRUNCATED),
    "one batch": ("lora", {"batches": 1}, SEEDED),
    "more batches than stages": ("lora", {"batches": 5}, SEEDED),
    # Of four processes; two are one pipeline.
    "pipelines of two": ("lora", {"stages": 2}, SEEDED),
    "refilled": ("lora", {"max_rows": 2}, SEEDED),
    "refilled sliding windows": ("gemma3", {"max_rows": 1, "batches": 3}, SEEDED),
}


@torch.no_grad()
def compare(name: str, device: torch.device) -> dict[str, Any]:
    """Return how the rows of this process differ between a pipeline and one process."""
    kind, settings, params = CASES[name]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = MODELS[kind]().to(device)
    prompts, keys = rows_of(rank, world_size)
    backend = PipelinedBackend(model, **settings)
    backend.check_policy(model)
    progress: list[tuple[int, int, int]] = []
    backend.progress = lambda *done: progress.append(done)
    # The first call also proves, by forwards of the whole model, that the policy may be merged.
    rollout = backend.generate(prompts, params, keys)
    # A second call on the same links, and one on the whole model, find it as it was.
    with counted(decoder_layers(model)) as counts:
        again = backend.generate(prompts, params, keys)
    alone = LocalBackend(model).generate(prompts, params, keys)
    is_same = [list(x) for x in rollout.completion_ids] == [list(x) for x in alone.completion_ids]
    logprobs, expected = torch.cat([*rollout.sampler_logprobs]), torch.cat([*alone.sampler_logprobs])
    return {
        "own_layers": list(backend.split_of(model).layers(rank % backend.num_stages)),
        "layers_run": [number for number, count in enumerate(counts) if count],
        "turns": max(counts),
        "rows": len(rollout),
        "same_tokens": is_same,
        "same_stops": list(rollout.stopped) == list(alone.stopped),
        "logprob_gap": (logprobs - expected).abs().max().item() if is_same else None,
        "repeats": rollout.completion_ids == again.completion_ids,
        "lengths": [len(ids) for ids in alone.completion_ids],
        "progress": progress[-1:],
    }


def faults(device: torch.device) -> dict[str, str]:
    """Return the error messages of calls that go wrong on one stage."""
    rank = dist.get_rank()
    model = tiny().to(device)
    backend = PipelinedBackend(model)
    messages = {}

    def attempt(name: str, call: Any) -> None:
        try:
            call()
            messages[name] = ""
        except (ValueError, RuntimeError) as error:
            messages[name] = str(error)

    prompts, keys = rows_of(rank, dist.get_world_size())
    attempt("empty prompt", lambda: backend.generate([[], *prompts[1:]] if rank else prompts, GREEDY, keys))
    other = SamplingParams(max_completion_length=12 + rank, temperature=0)
    attempt("other settings", lambda: backend.generate(prompts, other, keys))
    with torch.no_grad():
        weight = model.get_output_embeddings().weight
        kept = weight[3].clone()
        weight[3] = float("nan")
        attempt("not finite", lambda: backend.generate(prompts, GREEDY, keys))
        weight[3] = kept
    # After an error the links are empty: the next call works.
    attempt("afterwards", lambda: backend.generate(prompts, GREEDY, keys))
    return messages


def cache_bytes(device: torch.device) -> dict[str, int]:
    """Return the bytes of keys and values that a stage and a whole model have at their most, over the same rows."""
    held: dict[int, int] = {}
    most = 0
    update = DynamicLayer.update

    def counting(layer: DynamicLayer, *args: Any, **kwargs: Any) -> Any:
        nonlocal most
        result = update(layer, *args, **kwargs)
        held[id(layer)] = layer.keys.nbytes + layer.values.nbytes
        most = max(most, sum(held.values()))
        return result

    model = tiny().to(device)
    params = SamplingParams(max_completion_length=8, temperature=0)
    prompts, keys = [[5, 6, 7, 8]] * 4, [(0, 0, row) for row in range(4)]
    DynamicLayer.update = counting
    found = {}
    try:
        # One batch of all rows: with several, rounding the rows of a batch up would show.
        for name, backend in (("pipeline", PipelinedBackend(model, batches=1)), ("alone", LocalBackend(model))):
            held.clear()
            most = 0
            backend.generate(prompts, params, keys)
            found[name] = most
    finally:
        DynamicLayer.update = update
    return found


def work(rank: int, folder: str, world_size: int, names: list[str], place: str = CPU) -> dict[str, Any]:
    device = join_group(place, folder, rank, world_size)
    found: dict[str, Any] = {name: compare(name, device) for name in names}
    found["faults"] = faults(device)
    found["cache"] = cache_bytes(device)
    return found
