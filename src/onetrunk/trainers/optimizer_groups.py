"""Parameter groups of the optimizer: the value's own learning rate. Knows parameters; no loss and no step."""

from __future__ import annotations

import torch

from onetrunk.models.adapters import VALUE, adapter_parameters
from onetrunk.models.trunk_model import TrunkModel


def split_off_value(optimizer: torch.optim.Optimizer, model: TrunkModel, learning_rate: float) -> None:
    """Give the value head, and the adapter `value` where there is one, groups of their own in `optimizer`."""
    of_value = {id(p) for p in model.value_head.parameters()}
    of_value |= {id(p) for p in adapter_parameters(model, VALUE).values()}
    for group in list(optimizer.param_groups):
        own = [p for p in group["params"] if id(p) in of_value]
        group["params"] = [p for p in group["params"] if id(p) not in of_value]
        settings = {k: v for k, v in group.items() if k not in ("params", "lr", "initial_lr")}
        if own:
            optimizer.add_param_group({**settings, "params": own, "lr": learning_rate})
