"""What each process does in test_split_bases.py: each case with a whole and with a split base, compared."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import accelerate.accelerator
import pytest
import torch
import torch.distributed as dist
from peft import get_peft_model
from torch.distributed import _functional_collectives
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import BitsAndBytesConfig

from onetrunk.models.build import attach_score_adapter, build_trunk
from onetrunk.models.loading import base_fingerprint, base_marks
from onetrunk.models.reward_model import read_score_adapter
from onetrunk.models.trunk import TrunkModel
from onetrunk.parallel.groups import limit_waits, process_mesh, wait_for_first_process
from onetrunk.parallel.layout import Layout, train_in_stages
from onetrunk.parallel.sharding import gathered, is_divided, is_sharded, local_bytes, replicas_of_what_trains
from onetrunk.parallel.tensor import distribute_frozen
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.local import LocalBackend
from onetrunk.types import to_device
from tests.models.branches import a_pack, a_trunk, gradients, lora, loss_of, move
from tests.models.reward_adapters import saved_base, saved_reward_adapter
from tests.places import CPU, join_group
from tests.tiny import tiny_model

CPU_DEVICE = torch.device("cpu")
ROLES = ("policy", "value", "reference")
PROMPTS = [[4, 5, 6, 7], [20, 21], [30, 31, 32]]
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
BOTH = ("all layers", "top-2", "checkpointing", "padding-free", "continued adapter", "bfloat16")
CASES = {
    "FSDP2": (*BOTH, "nf4"),
    "TP": (*BOTH, "tied head", "soft-capping", "gathered projections", "uneven widths", "reward adapter"),
}


def continued() -> TrunkModel:
    """Return a trunk that continues an adapter on all layers, of which the lower half stays frozen."""
    model = get_peft_model(tiny_model("llama"), lora(task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return TrunkModel.from_adapter(model, adapter_layers="top-2")


def quantized(folder: Path, device: torch.device = CPU_DEVICE, **config: Any) -> TrunkModel:
    # bitsandbytes quantises where the base is loaded.
    loading = {"device_map": {"": device}, "dtype": torch.float32}
    settings = {"quantization_config": BitsAndBytesConfig(**config), "model_init_kwargs": loading}
    trunk = build_trunk(folder / "base", lora(), adapter_layers="top-2", **settings)
    move(trunk)
    return trunk


def packed(*args: Any, **settings: Any) -> TrunkModel:
    """Return a trunk that runs rows in one sequence; the proof of it precedes sharding."""
    trunk = a_trunk(*args, **settings)
    trunk.use_padding_free()
    return trunk


def prepare(folder: Path) -> None:
    """Write the files that the cases read; in one process, because transformers writes on the first one only."""
    # Hidden 64: bitsandbytes quantises in blocks of 64.
    tiny_model("llama", hidden_size=64, intermediate_size=128).save_pretrained(folder / "base")
    saved_reward_adapter(folder / "reward", saved_base(folder / "rewarded"), layers=[2, 3])


def rewarded(folder: Path) -> TrunkModel:
    trunk = a_trunk(adapter_layers="top-2")
    attach_score_adapter(trunk, read_score_adapter(str(folder / "reward")))
    return trunk


def cases(folder: Path, device: torch.device) -> dict[str, Any]:
    """Return what builds the trunk of each case; a quantised one on `device`, the others on the CPU."""
    return {
        "all layers": a_trunk,
        "top-2": partial(a_trunk, adapter_layers="top-2"),
        "checkpointing": a_trunk,
        "padding-free": partial(packed, "mistral", adapter_layers="top-2"),
        "tied head": partial(a_trunk, "qwen2"),
        "soft-capping": partial(a_trunk, "gemma2", adapter_layers="top-2"),
        "continued adapter": continued,
        "bfloat16": partial(a_trunk, dtype=torch.bfloat16),
        "nf4": partial(quantized, folder, device, **NF4),
        "gathered projections": partial(a_trunk, "phi3"),
        "uneven widths": lambda: a_trunk(base=tiny_model("llama", vocab_size=63, intermediate_size=61)),
        "reward adapter": partial(rewarded, folder),
    }


def step(model: Any, trunk: TrunkModel, row: int, device: torch.device) -> tuple[dict, dict]:
    """Return outputs and gradients of a step on this group's rows."""
    pack = to_device(a_pack(rows=slice(row % 2, None, 2)), device)
    roles = ROLES if trunk.reward_branch is None else (*ROLES, "reward")
    for _ in range(2):  # The second step needs the first one's reduction to have ended.
        trunk.zero_grad(set_to_none=True)
        output = model(pack=pack, roles=roles)
        loss_of(output).backward()
    return {k: v.detach() for k, v in output._asdict().items() if v is not None}, gradients(trunk)


def samples(trunk: TrunkModel, rank: int) -> list[list[int]]:
    params = SamplingParams(max_completion_length=3 + 5 * rank, temperature=1.0, stop_token_ids=(1,), pad_token_id=0)
    # Processes sample different numbers of tokens.
    return LocalBackend(trunk).generate(PROMPTS, params, [(0, 0, row) for row in range(3)]).completion_ids


@contextlib.contextmanager
def counted_collectives() -> Iterator[Counter]:
    """Count gathers (of FSDP2 and DTensor) and sums (of DTensor and ours) inside the block."""
    count: Counter = Counter()
    places = [(_functional_collectives, "all_gather_single"), (_functional_collectives, "all_reduce")]
    places += [(dist, "all_reduce"), (dist, "all_gather"), (dist, "all_gather_single")]

    def counting(name: str, original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            count[name] += 1
            return original(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for module, name in places:
            patch.setattr(module, name, counting(name, getattr(module, name)))
        yield count


def relative_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of two sets of tensors, relative to the largest entry of each tensor."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    pairs = [(one[k].double(), other[k].double()) for k in one]
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-6)).item() for a, b in pairs if b.numel())


def stored_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of memory behind all weights of this process, views of larger tensors counted whole."""
    tensors = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def whole_bytes(trunk: TrunkModel, is_tensor: bool) -> int:
    """Return the bytes of what every process keeps whole: adapters and heads; with tensor parallelism norms too."""
    kept = [
        p
        for n, p in trunk.named_parameters()
        if p.requires_grad or ".lora_" in n or "value_head" in n or "reward_branch" in n or (is_tensor and p.dim() < 2)
    ]
    return sum(p.nbytes for p in kept)


def compare(build: Any, layout: Layout, rank: int, device: torch.device, folder: Path, checkpointing: bool) -> dict:
    """Return what differs between a whole and a sharded or divided base."""
    # Splitting moves its base to the device.
    whole, split = build().to(device).train(), build().train()
    if checkpointing:
        whole.activation_checkpointing_enable()
        split.activation_checkpointing_enable()
    wrap = partial(DistributedDataParallel, find_unused_parameters=True, broadcast_buffers=False)
    row = rank // layout.tensor
    expected, expected_gradients = step(wrap(whole), whole, row, device)
    before = (base_marks(whole.get_base_model()), base_fingerprint(whole.get_base_model()))
    kept = whole_bytes(split, layout.tensor > 1)
    shared = local_bytes(split) - kept
    line = distribute_frozen(split, layout, device)
    with counted_collectives() as traffic:
        output, found = step(wrap(split), split, row, device)
    with counted_collectives() as traffic_of_rollout:
        completions = samples(split, row)
    with gathered(split):
        kinds_inside = {type(p).__name__ for p in split.parameters()}
    errors = []
    if split.get_base_model().dtype == torch.bfloat16:
        exact = build().to(device).float()
        truth, _ = step(exact, exact, row, device)
        errors = [(one["logprobs"] - truth["logprobs"]).abs().mean().item() for one in (output, expected)]
    split.save_pretrained(folder / f"split-{rank}")
    whole.save_pretrained(folder / f"whole-{rank}")
    after = (base_marks(split.get_base_model()), base_fingerprint(split.get_base_model()))
    names = sorted(p.name for p in (folder / f"whole-{rank}").iterdir() if p.is_file())
    saved = [[(folder / f"{kind}-{rank}" / name).read_bytes() for name in names] for kind in ("whole", "split")]
    split.load_branches(folder / f"split-{rank}")
    with replicas_of_what_trains(split):
        accepted = not accelerate.accelerator.model_has_dtensor(split)
    return {
        "line": line,
        "accepted": accepted and accelerate.accelerator.model_has_dtensor(split),
        "is_split": [is_sharded(split) or is_divided(split), is_sharded(whole) or is_divided(whole)],
        "kinds": sorted({(type(p).__name__, p.requires_grad) for p in split.parameters()}),
        "kinds_inside": sorted(kinds_inside),
        "share": (local_bytes(split) - kept) / shared,
        "is_stored": stored_bytes(split) == local_bytes(split),
        "output": relative_difference(output, expected),
        "gradients": relative_difference(found, expected_gradients),
        "collectives": dict(traffic),
        "collectives_of_rollout": dict(traffic_of_rollout),
        "completions": completions == samples(whole, row),
        "identity": after == before,
        "files": names,
        "saved": saved[0] == saved[1],
        "errors": errors,
    }


def work(rank: int, folder: str, world_size: int, layout: Layout, names: list[str], place: str = CPU) -> dict:
    device = join_group(place, folder, rank, world_size)
    results = {}
    builders = cases(Path(folder), device)
    for name in names:
        own = Path(folder) / name.replace(",", "").replace(" ", "-")
        own.mkdir(exist_ok=True)
        results[name] = compare(builders[name], layout, rank, device, own, name == "checkpointing")
    return results


def work_on_limits(rank: int, folder: str) -> list[float]:
    """Return how many seconds each process group waits, of a sharded base and of training stages."""
    device = join_group(CPU, folder, rank, 4)
    trunk = a_trunk()
    distribute_frozen(trunk, Layout(replicas=2), device)
    train_in_stages(2)
    process_mesh(2)
    limit_waits(77.0, trunk)
    groups = dist.distributed_c10d._world.pg_map
    limited = [group._get_backend(device).options._timeout.total_seconds() for group in groups]
    wait_for_first_process()
    longest = dist.group.WORLD._get_backend(device).options._timeout.total_seconds()
    return limited if longest > 86400 else [longest]
