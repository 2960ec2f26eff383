"""What each process does in test_tensor_parallel.py: every case with a whole and with a divided base, compared."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from onetrunk.models.build import attach_score_adapter
from onetrunk.models.loading import base_fingerprint, base_marks
from onetrunk.models.reward_model import read_score_adapter
from onetrunk.models.trunk import TrunkModel
from onetrunk.parallel.sharding import Layout, is_divided, local_bytes
from onetrunk.parallel.tensor import divide_frozen
from onetrunk.types import to_device
from tests.models.branches import a_pack, a_trunk, gradients, loss_of
from tests.models.reward_adapters import saved_base, saved_reward_adapter
from tests.parallel.sharding_worker import ROLES, continued, packed, samples
from tests.places import CPU, join_group
from tests.tiny import tiny_model


def prepare(folder: Path) -> None:
    """Write the files that the cases read; in one process, because transformers writes on the first one only."""
    saved_reward_adapter(folder / "reward", saved_base(folder / "rewarded"), layers=[2, 3])


def rewarded(folder: Path) -> TrunkModel:
    """Return a trunk with a reward adapter."""
    trunk = a_trunk(adapter_layers="top-2")
    attach_score_adapter(trunk, read_score_adapter(str(folder / "reward")))
    return trunk


def of_base(family: str, **overrides: Any) -> TrunkModel:
    return a_trunk(family, base=tiny_model(family, **overrides))


CASES = (
    "shared",
    "detached, top-2",
    "adapter, top-2",
    "checkpointing",
    "padding-free",
    "tied head",
    "soft-capping",
    "gathered projections",
    "normed heads",
    "scaled logits",
    "uneven widths",
    "continued adapter",
    "reward adapter",
    "bfloat16",
    "float64",
)


def cases(folder: Path) -> dict[str, Any]:
    """Return what builds the trunk of each case."""
    return {
        "shared": a_trunk,
        "detached, top-2": partial(a_trunk, value_head="detached", adapter_layers="top-2"),
        "adapter, top-2": partial(a_trunk, value_head="adapter", adapter_layers="top-2"),
        "checkpointing": partial(a_trunk, value_head="adapter"),
        "padding-free": partial(packed, "mistral", value_head="adapter", adapter_layers="top-2"),
        "tied head": partial(a_trunk, "qwen2"),
        "soft-capping": partial(a_trunk, "gemma2", adapter_layers="top-2"),
        "gathered projections": partial(a_trunk, "phi3"),
        "normed heads": partial(a_trunk, "qwen3"),
        "scaled logits": partial(a_trunk, "cohere"),
        "uneven widths": partial(of_base, "llama", vocab_size=63, intermediate_size=61),
        "continued adapter": continued,
        "reward adapter": partial(rewarded, folder),
        "bfloat16": partial(a_trunk, dtype=torch.bfloat16),
        "float64": partial(a_trunk, value_head="adapter", dtype=torch.float64),
    }


def mean_error(one: dict[str, Any], truth: dict[str, Any]) -> float:
    """Return the mean absolute difference of logprobs."""
    return (one["logprobs"] - truth["logprobs"]).abs().mean().item()


def step(model: Any, trunk: TrunkModel, row: int, device: torch.device) -> tuple[dict, dict]:
    """Return outputs and gradients of a step on this group's rows."""
    pack = to_device(a_pack(rows=slice(row % 2, None, 2)), device)
    roles = ROLES if trunk.reward_branch is None else (*ROLES, "reward")
    for _ in range(2):  # The second step needs the first one's reduction to have ended.
        trunk.zero_grad(set_to_none=True)
        output = model(pack=pack, roles=roles)
        loss_of(output).backward()
    return {k: v.detach() for k, v in output._asdict().items() if v is not None}, gradients(trunk)


@contextlib.contextmanager
def counted_collectives() -> Iterator[Counter]:
    """Count the numbers in gathers (of DTensor) and in sums (of DTensor and ours) inside the block."""
    count: Counter = Counter()
    places = [(_functional_collectives, "all_gather_single"), (_functional_collectives, "all_reduce")]
    places += [(dist, "all_reduce"), (dist, "all_gather")]
    originals = [getattr(module, name) for module, name in places]

    def counting(name: str, original: Any) -> Any:
        def run(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            count[name] += 1
            count[f"{name} of numbers"] += (
                sum(t.numel() for t in tensor) if isinstance(tensor, list) else tensor.numel()
            )
            return original(tensor, *args, **kwargs)

        return run

    for (module, name), original in zip(places, originals, strict=True):
        setattr(module, name, counting(name, original))
    try:
        yield count
    finally:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, original)


def relative_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of two sets of tensors, relative to the largest entry of each tensor."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    pairs = [(one[k].double(), other[k].double()) for k in one]
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-6)).item() for a, b in pairs if b.numel())


def stored_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of memory behind all weights of this process, views of larger tensors counted whole."""
    tensors = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def compare(
    build: Any, layout: Layout, rank: int, device: torch.device, folder: Path, checkpointing: bool
) -> dict[str, Any]:
    """Return what differs between a whole and a divided base."""
    # Dividing moves its base to the device.
    whole, divided = build().to(device).train(), build().train()
    if checkpointing:
        whole.activation_checkpointing_enable()
        divided.activation_checkpointing_enable()
    wrap = partial(DistributedDataParallel, find_unused_parameters=True, broadcast_buffers=False)
    row = rank // layout.tensor
    expected, expected_gradients = step(wrap(whole), whole, row, device)
    before = (base_marks(whole.get_base_model()), base_fingerprint(whole.get_base_model()))
    # Norms, adapters, the value head and the reward head stay whole.
    kept = [p for n, p in divided.named_parameters() if p.dim() < 2 or ".lora_" in n or "head.linear" in n]
    whole_matrices = sum(p.nbytes for p in kept)
    matrices = local_bytes(divided) - whole_matrices
    line = divide_frozen(divided, layout, device)
    with counted_collectives() as traffic:
        output, found = step(wrap(divided), divided, row, device)
    errors = []
    if divided.get_base_model().dtype == torch.bfloat16:
        exact = build().to(device).float()
        truth, _ = step(exact, exact, row, device)
        errors = [mean_error(given, truth) for given in (output, expected)]
    completions = samples(divided, row)
    divided.save_pretrained(folder / f"divided-{rank}")
    whole.save_pretrained(folder / f"whole-{rank}")
    after = (base_marks(divided.get_base_model()), base_fingerprint(divided.get_base_model()))
    names = sorted(p.name for p in (folder / f"whole-{rank}").iterdir() if p.is_file())
    saved = [[(folder / f"{kind}-{rank}" / name).read_bytes() for name in names] for kind in ("whole", "divided")]
    divided.load_branches(folder / f"divided-{rank}")
    return {
        "line": line,
        "is_divided": is_divided(divided) and not is_divided(whole),
        "kinds": sorted({(type(p).__name__, p.requires_grad) for p in divided.parameters()}),
        "local": local_bytes(divided),
        "stored": stored_bytes(divided),
        "matrices": matrices,
        "whole_matrices": whole_matrices,
        "output": relative_difference(output, expected),
        "gradients": relative_difference(found, expected_gradients),
        "collectives": dict(traffic),
        "completions": completions == samples(whole, row),
        "identity": after == before,
        "files": names,
        "saved": saved[0] == saved[1],
        "errors": errors,
    }


def work(rank: int, folder: str, world_size: int, layout: Layout, names: list[str], place: str = CPU) -> None:
    """Write the facts of every case into `folder`."""
    device = join_group(place, folder, rank, world_size)
    results = {}
    builders = cases(Path(folder))
    for name in names:
        own = Path(folder) / name.replace(",", "").replace(" ", "-")
        own.mkdir(exist_ok=True)
        results[name] = compare(builders[name], layout, rank, device, own, name == "checkpointing")
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
