"""What each process does in test_staged.py: every case in one process and in stages, compared."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from onetrunk.models.adapters import role as in_role
from onetrunk.models.base_model import decoder_layers
from onetrunk.models.build import build_trunk
from onetrunk.models.loading import base_fingerprint, base_marks
from onetrunk.models.trunk import PackOutput
from onetrunk.ops.losses import ppo_loss
from onetrunk.ops.packing import make_pack
from onetrunk.parallel import staged as staged_module
from onetrunk.parallel.groups import pack_outputs, staged
from onetrunk.parallel.sharding import casting_later, local_bytes
from onetrunk.parallel.staged import keep_stage, reduce_gradients
from onetrunk.parallel.stages import LayerSplit
from onetrunk.types import Experience, LossCoefficients, Pack, to_device
from tests.models.branches import COMPLETIONS, PROMPTS, a_trunk, gradients, lora, loss_of
from tests.parallel.cast_on_read_worker import M_MMAP_THRESHOLD, highest, private_bytes
from tests.parallel.split_worker import continued, packed, relative_difference, stored_bytes
from tests.places import CPU, join_group

TEMPERATURE = 0.8
LOSS = LossCoefficients(entropy_coef=0.01, kl_weight=0.05)


def cases() -> dict[str, dict[str, Any]]:
    """Return what builds the trunk of each case, and what else differs from the usual."""
    return {
        "llama": {"build": a_trunk},
        "gemma2": {"build": partial(a_trunk, "gemma2")},
        "top-2": {"build": partial(a_trunk, adapter_layers="top-2")},
        "uneven": {"build": partial(a_trunk, adapter_layers="top-2"), "sizes": (1, 3)},
        "checkpointing": {"build": a_trunk, "checkpointing": True},
        "padding-free": {"build": partial(packed, "mistral", adapter_layers="top-2")},
        "continued": {"build": continued},
        "one pack": {"build": a_trunk, "num_packs": 1},
        "bfloat16": {"build": partial(a_trunk, dtype=torch.bfloat16)},
    }


def packs(number: int, device: torch.device) -> list[Pack]:
    """Return packs of different shapes."""
    rows = [[0, 1], [2], [3, 1, 0], [1], [2, 3]][:number]
    return [to_device(make_pack([PROMPTS[i] for i in r], [COMPLETIONS[i] for i in r], 0), device) for r in rows]


def an_experience(pack: Pack, output: PackOutput, seed: int) -> Experience:
    """Return an experience whose old policy is near the current one."""
    generator = torch.Generator().manual_seed(seed)
    shape = pack.completion_mask.shape

    def noise(scale: float) -> Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(pack.input_ids.device)

    return Experience(
        pack=pack,
        loss_mask=pack.completion_mask,
        old_logprobs=output.logprobs + noise(0.1),
        old_values=output.values + noise(0.3),
        advantages=noise(1.0),
        returns=output.values + noise(1.0),
        ref_logprobs=output.ref_logprobs,
    )


def as_dict(outputs: list[PackOutput]) -> dict[str, Tensor]:
    return {f"{i}.{k}": v.detach() for i, x in enumerate(outputs) for k, v in x._asdict().items() if v is not None}


@contextlib.contextmanager
def noted_schedules() -> Iterator[list[str]]:
    """Note the schedules that run inside the block."""
    names: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for schedule in (Schedule1F1B, ScheduleGPipe):

            class Noted(schedule):
                def step(self, *args: Any, **keywords: Any) -> Any:
                    names.append(type(self).__bases__[0].__name__)
                    return super().step(*args, **keywords)

            patch.setattr(staged_module, schedule.__name__, Noted)
        yield names


def compare(rank: int, world_size: int, stages: int, device: torch.device, case: dict[str, Any]) -> dict[str, Any]:
    """Return what differs between a trunk in one process and in stages."""
    whole, divided = case["build"]().to(device).train(), case["build"]().train()
    if case.get("checkpointing"):
        whole.activation_checkpointing_enable()
        divided.activation_checkpointing_enable()
    split = LayerSplit(case.get("sizes") or (len(decoder_layers(whole)) // stages,) * stages)
    before = (base_marks(whole.get_base_model()), base_fingerprint(whole.get_base_model()))
    # What every process keeps whole.
    kept_bytes = sum(p.nbytes for n, p in whole.named_parameters() if "lora_" in n or "value_head" in n)
    whole_bytes = local_bytes(whole) - kept_bytes
    line = keep_stage(divided, split, device)
    after = (base_marks(divided.get_base_model()), base_fingerprint(divided.get_base_model()))
    wrapped = DistributedDataParallel(divided, find_unused_parameters=True, broadcast_buffers=False)
    own = staged(wrapped)
    every, roles = packs(case.get("num_packs", 5), device), ("policy",)
    # Each pipeline has rows of its own; together they have those of one process.
    own_rows = slice(rank // stages, None, world_size // stages)
    mine = every[own_rows]
    everything = ("policy", "value", "reference")
    expected = list(pack_outputs(whole.eval(), every, everything, TEMPERATURE))
    found = list(pack_outputs(wrapped.eval(), mine, everything, TEMPERATURE))
    experiences = [an_experience(*pair, seed) for seed, pair in enumerate(zip(every, expected, strict=True))]
    tokens = sum(e.loss_mask.sum() for e in experiences)
    whole.train()
    for experience in experiences:
        output = whole(pack=experience.pack, roles=roles, temperature=TEMPERATURE, entropy_grad=True)
        ppo_loss(experience, output, LOSS, tokens)[0].backward()
    wrapped.train()
    seen: list[int] = []
    theirs = experiences[own_rows]

    def noted_loss(number: int, model: Any) -> Tensor:
        seen.append(number)
        return ppo_loss(theirs[number], model(pack=theirs[number].pack, roles=roles), LOSS, tokens)[0]

    with noted_schedules() as schedules:
        # The second step must not add what the first has left.
        for _ in range(2):
            divided.zero_grad(set_to_none=True)
            trained = as_dict(own.update(mine, noted_loss, TEMPERATURE, entropy_grad=True))
            alone = sorted(gradients(divided))
            reduce_gradients(divided)
    expected = as_dict(expected[own_rows])
    ids = torch.arange(2, 14, device=device).view(2, 6)
    rows = make_pack([row[:2] for row in ids.tolist()], [row[2:] for row in ids.tolist()], 0)
    with in_role(whole, None), torch.no_grad():
        bare = (
            whole(input_ids=ids, use_cache=False).logits[:, 1:-1].log_softmax(-1).gather(2, ids[:, 2:, None])[:, :, 0]
        )
    wrapped.eval()
    return {
        "bare": relative_difference({"logprobs": own.base_logprobs(to_device(rows, device), 1.0)}, {"logprobs": bare}),
        "line": line,
        "stage": own.stage,
        "layers": [own.layers.start, own.layers.stop],
        "seen": seen,
        "schedules": schedules,
        "output": relative_difference(as_dict(found), expected),
        "trained output": relative_difference(trained, {name: expected[name] for name in trained}),
        "gradients": relative_difference(gradients(divided), gradients(whole)),
        "names alone": alone,
        "whole bytes": whole_bytes,
        "local bytes": local_bytes(divided) - kept_bytes,
        "stored bytes": stored_bytes(divided) - kept_bytes,
        "embedding bytes": whole.get_input_embeddings().weight.nbytes,
        "identity": after == before,
    }


def work(rank: int, folder: str, world_size: int, stages: int, names: list[str], place: str = CPU) -> dict[str, Any]:
    device = join_group(place, folder, rank, world_size)
    every = cases()
    return {name: compare(rank, world_size, stages, device, every[name]) for name in names}


def measure(name: str, split: LayerSplit | None) -> dict[str, float]:
    """Load a base, whole or one stage, and train on packs; return private bytes in shares of the base in float32."""
    gc.collect()
    before = private_bytes()
    with highest() as peak:
        with casting_later() if split else contextlib.nullcontext():
            trunk = build_trunk(name, lora(r=1), model_init_kwargs={"dtype": "float32"})
        whole = sum(math.prod(tensor.shape) * 4 for tensor in trunk.get_base_model().parameters())
        if split is not None:
            keep_stage(trunk, split, torch.device(CPU))
        every = packs(4, torch.device(CPU))
        if split is None:
            for pack in every:
                loss_of(trunk(pack=pack)).backward()
        else:
            staged(trunk).update(every, lambda number, run: loss_of(run(pack=every[number])))
            reduce_gradients(trunk)
    gc.collect()
    return {"peak": (peak[0] - before) / whole, "end": (private_bytes() - before) / whole, "whole": whole / 2**20}


def work_on_memory(rank: int, folder: str, name: str) -> dict[str, dict[str, float]]:
    """Return what this process needs for a stage of a trunk, and for a whole one."""
    # Matrices of large models are returned to the system when they are freed; so are those of this small one.
    ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 2**20)
    join_group(CPU, folder, rank, 2)
    split = LayerSplit((5, 5))
    measure(name, split)  # Buffers that are allocated once.
    return {"stage": measure(name, split), "whole": measure(name, None)}
