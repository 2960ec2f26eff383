"""The branches of the trunk: their LoRA adapters and files, and the switch between roles.

PEFT's `set_adapter` and `enable_adapters` also change `requires_grad`: `role` is the only place that switches, and it
keeps every flag.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, PeftModel, PeftType, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils.other import get_pattern_key
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from onetrunk.utils.files import load_tensors, require_finite_tensors
from onetrunk.utils.startup import time_limit

logger = logging.getLogger(__name__)

POLICY = "default"
REFERENCE = "reference"
REWARD = "reward"
ADAPTER_FILE = "adapter_model.safetensors"
# The attribute of a model with the revision that it was loaded from, which transformers does not keep.
REVISION = "onetrunk_revision"
# Modules that no adapter may change, because every role shares them.
HEAD_MODULES = frozenset(("lm_head", "embed_tokens", "wte", "embed_out"))
# LoRA options that are not supported, and why.
UNSUPPORTED_OPTIONS = {
    "trainable_token_indices": "trains rows of the embedding, which every role shares",
    "layer_replication": "changes the layers of the shared trunk",
    "alora_invocation_tokens": "starts at a token offset that only PEFT's own forward passes to the layers",
    "arrow_config": "mixes adapters, where one adapter is one role",
    "kasa_config": "changes weights of the shared trunk",
    "monteclora_config": "draws random weights, so that the first PPO ratio would differ from 1",
    "velora_config": "approximates the gradients",
    "use_qalora": "has not been tried",
    "use_bdlora": "has not been tried",
    "megatron_config": "is for Megatron's parallel layers, which the trunk does not have",
}
# Families in which PEFT rejects LoRA on out_proj: their fused kernel reads its weight without calling the layer.
READS_OUT_PROJ = ("falcon_h1", "nemotron_h")


def find_tuner_layers(model: nn.Module) -> list[BaseTunerLayer]:
    """Return the modules that carry adapters. It walks over all modules, so a TrunkModel keeps the list."""
    return [m for m in model.modules() if isinstance(m, BaseTunerLayer)]


@contextlib.contextmanager
def role(model: nn.Module, adapter: str | None) -> Iterator[None]:
    """Activate `adapter` (None: adapters off) inside the block; no `requires_grad` flag changes."""
    layers = getattr(model, "tuner_layers", None) or find_tuner_layers(model)
    before = [(layer.active_adapters, layer.disable_adapters) for layer in layers]
    if all(is_active(layer, adapter) for layer in layers):
        yield
        return
    if any(layer.merged for layer in layers):
        # PEFT skips every other adapter of a merged layer, so each role would get the output of the merged one.
        raise RuntimeError("an adapter is merged into the weights; switch to another adapter after it is unmerged")
    flags = [
        (parameter, parameter.requires_grad)
        for layer in layers
        for name in layer.adapter_layer_names
        if isinstance(getattr(layer, name, None), nn.Module)
        for parameter in getattr(layer, name).parameters()
    ]
    for layer in layers:
        _activate(layer, [adapter] if adapter else layer.active_adapters, adapter is None)
    _restore(flags)
    try:
        yield
    finally:
        for layer, (names, disabled) in zip(layers, before, strict=True):
            _activate(layer, names, disabled)
        _restore(flags)


def is_active(layer: BaseTunerLayer, adapter: str | None) -> bool:
    """Return whether `adapter` is the only active one of a layer (None: adapters are off)."""
    if adapter is None:
        return layer.disable_adapters
    return not layer.disable_adapters and list(layer.active_adapters) == [adapter]


def _activate(layer: BaseTunerLayer, names: list[str], disabled: bool) -> None:
    layer.set_adapter(names)
    if layer.disable_adapters != disabled:
        layer.enable_adapters(not disabled)


def _restore(flags: list[tuple[nn.Parameter, bool]]) -> None:
    for parameter, requires_grad in flags:
        parameter.requires_grad_(requires_grad)


def adapter_parameters(model: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    """Return the named parameters of one adapter."""
    marker = re.compile(rf"\.lora_\w+\.{re.escape(adapter)}(\.|$)")
    return {n: p for n, p in model.named_parameters() if marker.search(n)}


def layer_index(parameter_name: str, layers_name: str) -> int | None:
    """Return the number of the decoder layer that a parameter belongs to, or None outside the layers."""
    match = re.search(rf"\.{re.escape(layers_name)}\.(\d+)\.", parameter_name)
    return int(match.group(1)) if match else None


def list_name(model: nn.Module, modules: nn.ModuleList) -> str:
    """Return the last part of the name of a module list in `model`, such as "layers" or "h"."""
    return next(name for name, m in model.named_modules() if m is modules).rsplit(".", 1)[-1]


def require_lora(config: PeftConfig, subject: str) -> None:
    """Raise a ValueError, in which the adapter is called `subject`, unless the adapter is plain LoRA."""
    # By its type, not its class: AdaLoRA's config is a LoraConfig, and its ranks change only on a schedule of its own.
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != PeftType.LORA.value or not isinstance(config, LoraConfig):
        raise ValueError(
            f"{subject} is of the kind {kind} ({type(config).__name__}), and only LORA is supported; train a LoRA"
            " adapter, or merge this one into its base model and give that folder"
        )


def check_adapter_config(config: PeftConfig) -> None:
    """Raise a ValueError for an adapter that the shared trunk can't carry."""
    require_lora(config, "peft_config")
    if config.modules_to_save:
        raise ValueError(
            f"peft_config.modules_to_save={config.modules_to_save} would copy whole modules into the adapter, and the"
            " trunk must stay frozen; leave it unset (the value head is saved separately)"
        )
    if config.bias != "none":
        raise ValueError(f"peft_config.bias={config.bias!r} trains biases of the frozen trunk; set bias='none'")
    targets = config.target_modules if isinstance(config.target_modules, (list, set, tuple)) else []
    heads = HEAD_MODULES & set(targets)
    if heads:
        raise ValueError(
            f"peft_config.target_modules contains {sorted(heads)}: the output head and the embedding are shared by"
            " every role; leave them out (target_modules='all-linear' does)"
        )
    if config.init_lora_weights not in (True, "gaussian"):
        raise ValueError(
            f"peft_config.init_lora_weights={config.init_lora_weights!r} starts the policy away from the base model or"
            " changes the base itself, so the base could not be the reference; set it to True or 'gaussian'"
        )
    for option, reason in UNSUPPORTED_OPTIONS.items():
        if getattr(config, option):
            raise ValueError(f"peft_config.{option} {reason}; leave it unset")


def match_modules(config: LoraConfig, model: nn.Module) -> None:
    """Match a config's expressions with the modules' names; ValueError if one is not an expression, or has no end."""
    config = copy.copy(config)
    config.target_modules = config.target_modules or []  # None: PEFT knows the names.
    with time_limit("matching the LoRA config's expressions (target_modules, exclude_modules, rank_pattern, ...)"):
        try:
            for name, _ in model.named_modules():
                if check_target_module_exists(config, name):
                    get_pattern_key([*config.rank_pattern, *config.alpha_pattern], name)
        except re.error as error:
            raise ValueError(f"LoRA config: {error.pattern!r} is not a regular expression ({error})") from error


def check_targets(config: PeftConfig, model: nn.Module) -> None:
    """Raise a ValueError if a name in `target_modules` is not a module of a base model; PEFT adapts only the others.

    The rule is PEFT's: a name is the last parts of a module's path, and a text alone is a pattern of whole paths.
    """
    targets = config.target_modules
    match_modules(config, model)
    if targets is None or targets == "all-linear":
        return
    modules = dict(model.named_modules())
    if isinstance(targets, str):
        missing = [] if any(map(re.compile(targets).fullmatch, modules)) else [targets]
    else:
        missing = [t for t in targets if not any(name == t or name.endswith(f".{t}") for name in modules)]
    if not missing:
        return
    linear = {name.rsplit(".", 1)[-1]: None for name, m in modules.items() if isinstance(m, (nn.Linear, Conv1D))}
    known = [name for name in linear if name not in HEAD_MODULES]
    raise ValueError(
        f"LoRA target_modules names {', '.join(map(repr, missing))}, and the model has no such module; its linear"
        f" modules are {', '.join(known)}, and 'all-linear' means all of them. On the command line the setting is"
        " lora_target_modules"
    )


def policy_config(config: PeftConfig, first_layer: int, num_layers: int) -> LoraConfig:
    """Return a copy of `config` for the adapted layers first_layer..num_layers-1, without dropout."""
    check_adapter_config(config)
    config = copy.deepcopy(config)
    if config.lora_dropout:
        logger.warning("lora_dropout %s is set to 0: with it the first PPO ratio differs from 1", config.lora_dropout)
        config.lora_dropout = 0.0
    if first_layer > 0:
        top = f"adapter_layers 'top-{num_layers - first_layer}'"
        if config.layers_to_transform is not None:
            raise ValueError(
                f"peft_config.layers_to_transform={config.layers_to_transform} and {top} both choose layers; set one"
                " of them"
            )
        if isinstance(config.target_modules, str) and config.target_modules != "all-linear":
            # PEFT would adapt every layer that the pattern matches, and then fail to load its own file.
            raise ValueError(
                f"peft_config.target_modules={config.target_modules!r} is a pattern and {top} chooses layers; write"
                " the layers into the pattern and set adapter_layers to 'all', or list module names"
            )
        config.layers_to_transform = list(range(first_layer, num_layers))
    config.task_type = "CAUSAL_LM"
    config.inference_mode = False
    return config


def fit_layers(config: LoraConfig, base: nn.Module, layers: nn.ModuleList) -> None:
    """Set the fields of the config that PEFT would guess wrong or with a warning, and the base's revision.

    If the config chooses layers, 'all-linear' becomes the names of the linear modules: PEFT would make it full paths
    in a model of fewer than 20 linear modules, and those overrule the choice. So it does where PEFT rejects one of
    them. `fan_in_fan_out` means that the weights are transposed (GPT-2's Conv1D).
    """
    if config.target_parameters:
        _fit_parameters(config, base, layers)
    keep_revision(config, base)
    reads_out_proj = base.config.model_type in READS_OUT_PROJ
    linear = {name: type(m) for name, m in layers.named_modules() if isinstance(m, (nn.Linear, Conv1D))}
    kinds = set(linear.values())
    if kinds in ({Conv1D}, {nn.Linear}):
        config.fan_in_fan_out = kinds == {Conv1D}
    if config.target_modules == "all-linear" and (config.layers_to_transform is not None or reads_out_proj):
        names = {name.rsplit(".", 1)[-1] for name in linear}
        config.target_modules = sorted(names - {"out_proj"} if reads_out_proj else names)


def keep_revision(config: PeftConfig, base: nn.Module) -> None:
    """Write the revision of a base into the config of an adapter, unless it is main: PEFT does not know it."""
    if vars(base).get(REVISION) not in (None, "main"):
        config.revision = vars(base)[REVISION]


def _fit_parameters(config: LoraConfig, base: nn.Module, layers: nn.ModuleList) -> None:
    """Check `target_parameters`, and write the chosen layers into them: PEFT adapts parameters of every layer."""
    layers_name = list_name(base, layers)
    layer_of = {name: layer_index(name, layers_name) for name, _ in base.named_parameters()}
    matches = {t: [n for n in layer_of if n == t or n.endswith(f".{t}")] for t in config.target_parameters}
    wrong = [t for t, names in matches.items() if not names or any(layer_of[name] is None for name in names)]
    if wrong:
        raise ValueError(
            f"peft_config.target_parameters names {', '.join(map(repr, wrong))}, not a parameter of the decoder"
            " layers; give the end of a path in a layer, such as 'mlp.experts.down_proj'"
        )
    chosen = config.layers_to_transform
    if chosen is not None:
        chosen = [chosen] if isinstance(chosen, int) else chosen
        config.target_parameters = [name for names in matches.values() for name in names if layer_of[name] in chosen]


def initial_weights(model: PeftModel) -> tuple[LoraConfig, dict[str, Tensor]]:
    """Return the config and a copy of the weights of the active adapter, for a policy to continue."""
    names = model.active_adapters
    if len(names) != 1:
        raise ValueError(f"adapters {names} are active together; call model.set_adapter with the one to continue")
    config = copy.deepcopy(model.peft_config[names[0]])
    require_lora(config, "peft_config")
    if config.init_lora_weights in (False, "eva", "orthogonal"):
        # These leave the base unchanged; the loaded weights replace the initial ones.
        config.init_lora_weights = True
    check_adapter_config(config)
    if any(layer.merged for layer in find_tuner_layers(model)):
        raise ValueError("the adapter is merged into the base model, which must stay unchanged; load the model again")
    weights = get_peft_model_state_dict(model, adapter_name=names[0], save_embedding_layers=False)
    return config, {key: tensor.clone() for key, tensor in weights.items()}


def first_trained_layer(model: nn.Module, layers_name: str) -> int:
    """Return the lowest decoder layer with a trained weight of the policy; 0 for one outside the layers."""
    trained = [name for name, p in adapter_parameters(model, POLICY).items() if p.requires_grad]
    if not trained:
        raise ValueError("no layer that adapter_layers chooses has a weight of the adapter; set it to 'all'")
    return min(layer_index(name, layers_name) or 0 for name in trained)


def copy_adapter(model: PeftModel, source: str, target: str) -> None:
    """Add adapter `target` with the config and the weights of `source`; it is frozen."""
    model.add_adapter(target, copy.deepcopy(model.peft_config[source]))
    weights = adapter_parameters(model, source)
    with torch.no_grad():
        for name, parameter in adapter_parameters(model, target).items():
            parameter.copy_(weights[re.sub(rf"(\.lora_\w+)\.{target}(?=\.|$)", rf"\1.{source}", name)])
            parameter.requires_grad_(False)


def freeze_below(model: nn.Module, layers_name: str, first_layer: int) -> None:
    """Freeze the weights of the policy below a layer; those outside the layers count as layer 0."""
    for name, parameter in adapter_parameters(model, POLICY).items():
        if (layer_index(name, layers_name) or 0) < first_layer:
            parameter.requires_grad_(False)


def read_adapter(folder: str | Path) -> dict[str, Tensor]:
    """Return the tensors of the adapter in `folder`, under PEFT's names; ValueError if there is none."""
    path = Path(folder) / ADAPTER_FILE
    if not path.is_file():
        raise ValueError(f"{path} is missing: pass a folder that save_pretrained wrote with the same branches")
    tensors = load_tensors(path)
    require_finite_tensors(path, tensors)
    return tensors


def check_adapter_fits(model: PeftModel, weights: dict[str, Tensor], adapter: str, source: str | Path) -> None:
    """Raise a ValueError that names `source` unless the weights match the tensors of `adapter` and their shapes."""
    expected = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    wrong = sorted(expected.keys() ^ weights.keys())
    wrong += sorted(k for k in expected.keys() & weights.keys() if expected[k].shape != weights[k].shape)
    if wrong:
        shapes = [list(tensors[wrong[0]].shape) if wrong[0] in tensors else "none" for tensors in (weights, expected)]
        raise ValueError(
            f"{source} does not fit adapter {adapter!r} of this trunk: {len(wrong)} tensors are missing, unexpected"
            f" or of another shape, the first is {wrong[0]} (in the file {shapes[0]}, here {shapes[1]}); use the base"
            " model and LoRA config it was trained with"
        )


def set_adapter_weights(model: PeftModel, weights: dict[str, Tensor], adapter: str, source: str | Path) -> None:
    """Load weights under PEFT's names into `adapter`, if they pass `check_adapter_fits`; no flag changes."""
    check_adapter_fits(model, weights, adapter, source)
    set_peft_model_state_dict(model, weights, adapter_name=adapter)


def read_branches(model: PeftModel, folder: str | Path) -> dict[str, dict[str, Tensor]]:
    """Return adapter name -> tensors from a folder with the branches of `model`, except the reward adapter."""
    folder = Path(folder)
    if REFERENCE not in model.peft_config and (folder / REFERENCE / ADAPTER_FILE).is_file():
        raise ValueError(f"{folder} holds an adapter {REFERENCE!r} and this trunk has none; build it as when saved")
    weights = {}
    for adapter in [name for name in model.peft_config if name != REWARD]:
        source = folder if adapter == POLICY else folder / adapter
        weights[adapter] = read_adapter(source)
        check_adapter_fits(model, weights[adapter], adapter, source / ADAPTER_FILE)
    return weights
