"""What each process does in test_parallel.py: every case with a whole and with a sharded base, compared."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import accelerate.accelerator
import torch
import torch.distributed as dist
from peft import get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import BitsAndBytesConfig

from onetrunk.models.build import build_trunk
from onetrunk.models.loading import base_fingerprint, base_marks
from onetrunk.models.trunk import TrunkModel
from onetrunk.parallel.sharding import (
    Layout,
    gathered,
    is_sharded,
    local_bytes,
    replicas_of_what_trains,
    shard_frozen,
)
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.local import LocalBackend
from onetrunk.types import to_device
from tests.models.branches import a_pack, a_trunk, gradients, lora, loss_of, move
from tests.parallel.cast_on_read_worker import private_bytes
from tests.places import CPU, join_group
from tests.tiny import tiny_model

CPU_DEVICE = torch.device("cpu")
ROLES = ("policy", "value", "reference")
PROMPTS = [[4, 5, 6, 7], [20, 21], [30, 31, 32]]
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
NF4_DOUBLE = {**NF4, "bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": torch.bfloat16}


def continued() -> TrunkModel:
    """Return a trunk that continues an adapter on all layers, of which the lower half stays frozen."""
    model = get_peft_model(tiny_model("llama"), lora(task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return TrunkModel.from_adapter(model, adapter_layers="top-2")


def quantized(folder: Path, device: torch.device = CPU_DEVICE, **config: Any) -> TrunkModel:
    trunk = build_trunk(
        folder / "base",
        lora(),
        quantization_config=BitsAndBytesConfig(**config),
        # bitsandbytes quantises where the base is loaded.
        model_init_kwargs={"device_map": {"": device}, "dtype": torch.float32},
        adapter_layers="top-2",
    )
    move(trunk)
    return trunk


def packed(*args: Any, **settings: Any) -> TrunkModel:
    """Return a trunk that runs rows in one sequence; the proof of it precedes sharding."""
    trunk = a_trunk(*args, **settings)
    trunk.use_padding_free()
    return trunk


CASES = (
    "shared",
    "detached, top-2",
    "adapter, top-2",
    "checkpointing",
    "padding-free",
    "tied head",
    "soft-capping",
    "gpt2",
    "DoRA",
    "continued adapter",
    "nf4",
    "nf4, double quantisation",
    "bfloat16",
)


def cases(folder: Path, device: torch.device) -> dict[str, Any]:
    """Return what builds the trunk of each case; a quantised one on `device`, the others on the CPU."""
    return {
        "shared": a_trunk,
        "detached, top-2": partial(a_trunk, value_head="detached", adapter_layers="top-2"),
        "adapter, top-2": partial(a_trunk, value_head="adapter", adapter_layers="top-2"),
        "checkpointing": partial(a_trunk, value_head="adapter"),
        "padding-free": partial(packed, "mistral", value_head="adapter", adapter_layers="top-2"),
        "tied head": partial(a_trunk, "qwen2"),
        "soft-capping": partial(a_trunk, "gemma2", adapter_layers="top-2"),
        "gpt2": partial(a_trunk, "gpt2"),
        "DoRA": partial(a_trunk, config=lora(use_dora=True)),
        "continued adapter": continued,
        "nf4": partial(quantized, folder, device, **NF4),
        "nf4, double quantisation": partial(quantized, folder, device, **NF4_DOUBLE),
        "bfloat16": partial(a_trunk, dtype=torch.bfloat16),
    }


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of two sets of tensors, relative to the largest entry of each tensor."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    pairs = [(one[k].float(), other[k].float()) for k in one if one[k] is not None]
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-6)).item() for a, b in pairs if b.numel())


def step(model, trunk: TrunkModel, rank: int, device: torch.device) -> tuple[dict, dict]:
    """Return outputs and gradients of a step on this process's rows."""
    pack = to_device(a_pack(rows=slice(rank % 2, None, 2)), device)
    for _ in range(2):  # The second step needs the first one's reduction to have ended.
        trunk.zero_grad(set_to_none=True)
        output = model(pack=pack, roles=ROLES)
        loss_of(output).backward()
    return {k: v.detach() for k, v in output._asdict().items() if v is not None}, gradients(trunk)


def samples(trunk: TrunkModel, rank: int) -> list[list[int]]:
    params = SamplingParams(max_completion_length=3 + 5 * rank, temperature=1.0, stop_token_ids=(1,), pad_token_id=0)
    # Processes sample different numbers of tokens.
    return LocalBackend(trunk).generate(PROMPTS, params, [(0, 0, row) for row in range(3)]).completion_ids


def compare(
    build: Any, layout: Layout, rank: int, device: torch.device, folder: Path, checkpointing: bool
) -> dict[str, Any]:
    """Return what differs between a whole and a sharded base."""
    # Sharding moves its base to the device, unit by unit.
    whole, sharded = build().to(device).train(), build().train()
    if checkpointing:
        whole.activation_checkpointing_enable()
        sharded.activation_checkpointing_enable()
    wrap = partial(DistributedDataParallel, find_unused_parameters=True, broadcast_buffers=False)
    expected, expected_gradients = step(wrap(whole), whole, rank, device)
    before = (base_marks(whole.get_base_model()), base_fingerprint(whole.get_base_model()))
    frozen = sum(p.nbytes for p in sharded.parameters() if not p.requires_grad)
    adapters = sum(p.nbytes for n, p in sharded.named_parameters() if p.requires_grad or ".lora_" in n)
    line = shard_frozen(sharded, layout, device)
    counts = {"gathers": 0}
    original = torch.distributed.all_gather_single

    def counting(*args: Any, **kwargs: Any) -> Any:
        counts["gathers"] += 1
        return original(*args, **kwargs)

    torch.distributed.all_gather_single = counting
    try:
        output, found = step(wrap(sharded), sharded, rank, device)
        in_step, counts["gathers"] = counts["gathers"], 0
        completions = samples(sharded, rank)
        in_rollout = counts["gathers"]
    finally:
        torch.distributed.all_gather_single = original
    with gathered(sharded):
        kinds_inside = {type(p).__name__ for p in sharded.parameters()}
    sharded.save_pretrained(folder / f"sharded-{rank}")
    whole.save_pretrained(folder / f"whole-{rank}")
    after = (base_marks(sharded.get_base_model()), base_fingerprint(sharded.get_base_model()))
    names = sorted(p.name for p in (folder / f"whole-{rank}").iterdir() if p.is_file())
    saved = [[(folder / f"{kind}-{rank}" / name).read_bytes() for name in names] for kind in ("whole", "sharded")]
    with replicas_of_what_trains(sharded):
        accepted = not accelerate.accelerator.model_has_dtensor(sharded)
    accepted = accepted and accelerate.accelerator.model_has_dtensor(sharded)
    return {
        "line": line,
        "accepted": accepted,
        "is_sharded": is_sharded(sharded) and not is_sharded(whole),
        "kinds": sorted({(type(p).__name__, p.requires_grad) for p in sharded.parameters()}),
        "kinds_inside": sorted(kinds_inside),
        "local": local_bytes(sharded) - adapters,
        "frozen": frozen,
        "output": largest_difference(output, expected),
        "gradients": largest_difference(found, expected_gradients),
        "gathers_in_two_steps": in_step,
        "gathers_in_rollout": in_rollout,
        "completions": completions == samples(whole, rank),
        "identity": after == before,
        "files": names,
        "saved": saved[0] == saved[1],
    }


def kept_mib() -> float:
    """Return how much of 128 MiB the process keeps after freeing them, as layers are freed: between blocks that stay.

    The second time counts: at first glibc puts every large block into pages of its own.
    """
    staying = []
    for _ in range(2):
        before = private_bytes()
        freed = []
        for _ in range(8):
            freed.append(torch.ones(2**22))
            staying.append(torch.ones(25_000))
        del freed
    return (private_bytes() - before) / 2**20


def work(rank: int, folder: str, world_size: int, layout: Layout, names: list[str], place: str = CPU) -> None:
    device = join_group(place, folder, rank, world_size)
    results = {}
    builders = cases(Path(folder), device)
    for name in names:
        own = Path(folder) / name.replace(",", "").replace(" ", "-")
        own.mkdir(exist_ok=True)
        results[name] = compare(builders[name], layout, rank, device, own, name == "checkpointing")
        results[name]["kept_mib"] = kept_mib()
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
