"""The branches of the trunk: which LoRA adapter plays which role, how one is switched to, and the value head.

Knows adapter names and parameters; no batch, no loss. PEFT's switching also flips `requires_grad`: `role` is the one
place that switches, and it leaves every flag as it was.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from onetrunk.files import load_tensors, save_tensors

logger = logging.getLogger(__name__)

POLICY = "default"
VALUE = "value"
REFERENCE = "reference"
VALUE_HEAD_FILE = "value_head.safetensors"
VALUE_HEADS = ("shared", "detached", "adapter")


class ValueHead(nn.Module):
    """A linear map from a hidden state to a value, in float32 whatever the trunk's dtype; zero at the start.

    Args:
        hidden_size: width of the trunk.
        device: where the trunk's last layer lives.
    """

    def __init__(self, hidden_size: int, device: torch.device | None = None):
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the values [...] of hidden states [..., H], in float32."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.linear(hidden.float()).squeeze(-1)

    def save(self, folder: str | Path) -> None:
        """Write `value_head.safetensors` into `folder`."""
        tensors = {name: p.detach().cpu().contiguous() for name, p in self.linear.named_parameters()}
        save_tensors(Path(folder) / VALUE_HEAD_FILE, tensors)

    def load(self, folder: str | Path) -> None:
        """Read `value_head.safetensors` from `folder`.

        Raises:
            ValueError: the file is missing, or it belongs to a trunk of another width.
        """
        path = Path(folder) / VALUE_HEAD_FILE
        if not path.is_file():
            raise ValueError(f"{path} is missing: the value head lies beside the adapter; pass the folder that has both")
        tensors = load_tensors(path)
        shapes = {name: tuple(t.shape) for name, t in tensors.items()}
        expected = {name: tuple(p.shape) for name, p in self.linear.named_parameters()}
        if shapes != expected:
            raise ValueError(f"{path} holds {shapes}, this trunk needs {expected}: it was trained on another base model")
        self.linear.load_state_dict(tensors)


@contextlib.contextmanager
def role(model: nn.Module, adapter: str | None) -> Iterator[None]:
    """Make `adapter` the active one (None: adapters off) inside the block; no `requires_grad` flag changes.

    Source: PEFT's `set_adapter` and `enable_adapters` set the flags of every adapter that they touch.
    """
    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer)]
    before = [(layer.active_adapters, layer.disable_adapters) for layer in layers]
    if all(_is_active(layer, adapter) for layer in layers):
        yield
        return
    flags = _adapter_flags(layers)
    for layer in layers:
        _activate(layer, [adapter] if adapter else layer.active_adapters, adapter is None)
    _restore(flags)
    try:
        yield
    finally:
        for layer, (names, disabled) in zip(layers, before, strict=True):
            _activate(layer, names, disabled)
        _restore(flags)


def _is_active(layer: BaseTunerLayer, adapter: str | None) -> bool:
    if adapter is None:
        return layer.disable_adapters
    return not layer.disable_adapters and list(layer.active_adapters) == [adapter]


def _activate(layer: BaseTunerLayer, names: list[str], disabled: bool) -> None:
    layer.set_adapter(names)
    if layer.disable_adapters != disabled:
        layer.enable_adapters(not disabled)


def _adapter_flags(layers: list[BaseTunerLayer]) -> list[tuple[nn.Parameter, bool]]:
    return [
        (p, p.requires_grad)
        for layer in layers
        for name in layer.adapter_layer_names
        for p in _parameters(getattr(layer, name, None))
    ]


def _parameters(container: nn.Module | None) -> list[nn.Parameter]:
    return list(container.parameters()) if isinstance(container, nn.Module) else []


def _restore(flags: list[tuple[nn.Parameter, bool]]) -> None:
    for parameter, requires_grad in flags:
        parameter.requires_grad_(requires_grad)


def adapter_parameters(model: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    """Return the named parameters of one adapter."""
    marker = re.compile(rf"\.{re.escape(adapter)}(\.|$)")
    return {n: p for n, p in model.named_parameters() if "lora_" in n and marker.search(n)}


def layer_index(parameter_name: str, layers_name: str) -> int | None:
    """Return the number of the decoder layer that a parameter belongs to, None outside the layers."""
    found = re.search(rf"\.{re.escape(layers_name)}\.(\d+)\.", parameter_name)
    return int(found.group(1)) if found else None


def parse_adapter_layers(adapter_layers: str, num_layers: int) -> int:
    """Return the first adapted layer: 0 for "all", num_layers - k for "top-k".

    Raises:
        ValueError: another word, or k outside 1..num_layers.
    """
    if adapter_layers == "all":
        return 0
    found = re.fullmatch(r"top-(\d+)", adapter_layers)
    if not found or not 1 <= int(found.group(1)) <= num_layers:
        raise ValueError(
            f"adapter_layers {adapter_layers!r} is neither 'all' nor 'top-k' with k from 1 to the model's"
            f" {num_layers} layers, for example 'top-{max(1, num_layers // 4)}'"
        )
    return num_layers - int(found.group(1))


def check_adapter_config(config: PeftConfig) -> None:
    """Refuse adapters that the shared trunk can't carry.

    Raises:
        ValueError: not LoRA; trained whole modules; an adapted head or embedding; bias training.
    """
    if not isinstance(config, LoraConfig):
        raise ValueError(f"peft_config is a {type(config).__name__}; onetrunk trains LoRA adapters: pass a LoraConfig")
    if config.modules_to_save:
        raise ValueError(
            f"peft_config.modules_to_save={config.modules_to_save} would copy whole modules into the adapter, and the"
            " trunk must stay frozen; leave it unset (the value head is kept beside the adapter)"
        )
    if config.bias != "none":
        raise ValueError(f"peft_config.bias={config.bias!r} trains biases of the frozen trunk; set bias='none'")
    targets = config.target_modules if isinstance(config.target_modules, (list, set, tuple)) else []
    heads = {"lm_head", "embed_tokens", "wte", "embed_out"} & set(targets)
    if heads:
        raise ValueError(
            f"peft_config.target_modules contains {sorted(heads)}: the output head and the embedding are shared by every"
            " role; leave them out (target_modules='all-linear' does)"
        )


def policy_config(config: PeftConfig, first_layer: int, num_layers: int) -> LoraConfig:
    """Return a copy of `config` for the adapted layers first_layer..num_layers-1, without dropout."""
    check_adapter_config(config)
    config = copy.deepcopy(config)
    if config.lora_dropout:
        logger.warning("lora_dropout %s is set to 0: dropout makes the first PPO ratio differ from 1", config.lora_dropout)
        config.lora_dropout = 0.0
    if first_layer > 0:
        if config.layers_to_transform is not None:
            raise ValueError(
                f"peft_config.layers_to_transform={config.layers_to_transform} and adapter_layers"
                f" 'top-{num_layers - first_layer}' both choose layers; set one of them"
            )
        config.layers_to_transform = list(range(first_layer, num_layers))
    config.task_type = "CAUSAL_LM"
    config.inference_mode = False
    return config


def copy_adapter(model: PeftModel, source: str, target: str, trainable: bool) -> None:
    """Add adapter `target` with the config and the weights of `source`."""
    model.add_adapter(target, copy.deepcopy(model.peft_config[source]))
    weights = adapter_parameters(model, source)
    with torch.no_grad():
        for name, parameter in adapter_parameters(model, target).items():
            parameter.copy_(weights[name.replace(f".{target}", f".{source}")])
            parameter.requires_grad_(trainable)
