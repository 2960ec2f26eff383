"""One copy of the frozen base for the trainer and an engine in its process: the trainer's weights become views.

vLLM keeps matrices that read the same input as one (`qkv_proj`, `gate_up_proj`). What transformers calls `q_proj`,
`k_proj` and so on are blocks of its rows. The base never changes, so both can read the same storage.
"""

from __future__ import annotations

import torch
from peft import PeftModel
from torch import Tensor, nn


@torch.no_grad()
def share_base(model: nn.Module, engine: nn.Module) -> tuple[int, int]:
    """Replace the storage of frozen weights of `model` by the engine's; return the bytes shared and not shared.

    A weight is shared if the engine has the same numbers, of the same dtype, in rows of a parameter of this name, or
    of the one that its `packed_modules_mapping` names. Others keep their storage: two copies. All other tensors of
    `model` move to the engine's device.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    ours, theirs = _base_weights(base), _base_weights(engine)
    packed = {}
    for whole, parts in getattr(engine, "packed_modules_mapping", {}).items():
        packed |= {part: (whole, parts[: parts.index(part)]) for part in parts}
    shared = apart = 0
    for name, weight in ours.items():
        block = _rows_of(name, ours, theirs, packed)
        # A cast or a layout of the engine's own makes other numbers.
        if block is not None and block.dtype == weight.dtype and torch.equal(block, weight.to(block.device)):
            weight.data = block
            shared += weight.nbytes
        else:
            apart += weight.nbytes
    model.to(next(iter(theirs.values())).device)
    return shared, apart


def _base_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights outside of adapters under their names without adapters; tied ones once."""
    names = ((name.replace(".base_layer.", "."), weight) for name, weight in model.named_parameters())
    return {name: weight for name, weight in names if "lora_" not in name}


def _rows_of(
    name: str, ours: dict[str, Tensor], theirs: dict[str, Tensor], packed: dict[str, tuple[str, list[str]]]
) -> Tensor | None:
    """Return the rows of the engine's parameter that belong to our weight `name`; None if it has none of this name."""
    first, (*path, module, leaf) = 0, ["", *name.split(".")]
    whole = theirs.get(name)
    if whole is None and module in packed:
        fused, before = packed[module]
        sizes = [ours.get(".".join([*path[1:], part, leaf])) for part in before]
        if any(size is None for size in sizes):
            return None
        whole, first = theirs.get(".".join([*path[1:], fused, leaf])), sum(len(size) for size in sizes)
    # The engine may have more rows than the vocabulary.
    return None if whole is None or whole.ndim != ours[name].ndim else whole.data[first : first + len(ours[name])]
