"""Build a TrunkModel from a name, a model, a PEFT model, or the folder of an adapter."""

from __future__ import annotations

import logging
import warnings
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from onetrunk.models.adapters import (
    ADAPTER_FILE,
    POLICY,
    VALUE,
    VALUE_HEAD_FILE,
    check_adapter_config,
    check_adapter_fits,
    check_targets,
    parse_adapter_layers,
    read_adapter,
    set_adapter_weights,
)
from onetrunk.models.base import decoder_layers, load_base
from onetrunk.models.loading import (
    adapter_base,
    base_of,
    check_base_marks,
    is_adapter,
    pinned_source,
    put_adapter_on,
    read_adapter_weights,
    read_config,
)
from onetrunk.models.scorer import load_scorer
from onetrunk.models.trunk import TrunkModel

logger = logging.getLogger(__name__)


def default_peft_config() -> LoraConfig:
    """Return the default LoRA config: rank 16 on every linear layer of the trunk."""
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def build_trunk(
    model: str | PathLike[str] | PreTrainedModel | PeftModel,
    peft_config: PeftConfig | None = None,
    *,
    value_head: str = "shared",
    adapter_layers: str = "all",
    quantization_config: Any = None,
    model_init_kwargs: dict[str, Any] | None = None,
) -> TrunkModel:
    """Return the trunk with its branches.

    Args:
        model: a name or path of a base model or of an adapter, a transformers decoder, or a PeftModel. The policy
            continues an adapter, with a frozen copy of it as the reference, and a value head saved with it.
        peft_config: LoRA config of a new policy; None: rank 16 on all linear layers.
        value_head: "shared", "detached" or "adapter".
        adapter_layers: "all" or "top-k".
        quantization_config: for a model given by name.
        model_init_kwargs: keywords of from_pretrained, for a model given by name.

    Raises:
        ValueError: settings that exclude each other, or a model that can't be a trunk.
        TypeError: not a model.
        RuntimeError: nothing loadable at its name.
    """
    model = source = fspath(model) if isinstance(model, PathLike) else model
    check_model_type(model)
    check_new_adapter(peft_config, model, model_init_kwargs or {})
    if not isinstance(model, str) and (quantization_config is not None or model_init_kwargs):
        raise ValueError(
            "quantization_config and model_init_kwargs are for a model given by name or path; this one is loaded"
            " already"
        )
    if isinstance(model, str):
        model = _load(model, peft_config, quantization_config, model_init_kwargs or {})
    if isinstance(model, TrunkModel):
        _check_settings(model, peft_config, value_head, adapter_layers)
        return model
    if isinstance(model, PeftModel):
        if peft_config is not None:
            raise ValueError(
                "the model carries an adapter already and peft_config asks for a new one: leave peft_config out to"
                " continue the adapter, or merge it first (model.merge_and_unload())"
            )
        trunk = TrunkModel.from_adapter(model, value_head=value_head, adapter_layers=adapter_layers)
        if isinstance(source, str):
            _restore_value(trunk, source, (model_init_kwargs or {}).get("revision"))
        return trunk
    peft_config = peft_config or default_peft_config()
    return TrunkModel(model, peft_config, value_head=value_head, adapter_layers=adapter_layers)


def check_new_adapter(
    config: PeftConfig | None, model: str | PreTrainedModel | PeftModel, kwargs: dict[str, Any]
) -> None:
    """Check the LoRA config of a new policy against its model; of a model given by name no weights are loaded.

    Raises:
        ValueError: an option that the trunk cannot carry, or a target that the model does not have.
    """
    if config is None:
        return
    check_adapter_config(config)
    if isinstance(model, PreTrainedModel):
        check_targets(config, model)
    elif isinstance(model, str) and not is_adapter(model, kwargs.get("revision")):
        check_targets_by_name(config, model, kwargs.get("revision"), kwargs.get("trust_remote_code"))


def check_targets_by_name(
    config: PeftConfig, name: str, revision: str | None = None, trust_remote_code: bool | None = None
) -> None:
    """Check LoRA's targets against the base model at `name`, without its weights; code of the Hub is not run here.

    Raises:
        ValueError: the model does not have one of the targets.
    """
    if trust_remote_code:
        return
    base = read_config("model", name, **pinned_source(revision, False))
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(base, trust_remote_code=False)
    except Exception:
        return  # `from_pretrained` makes the model in the same way, and its error is translated.
    check_targets(config, model)


def check_model_type(model: Any) -> None:
    """Raise a TypeError for anything but a name or a model."""
    if not isinstance(model, (str, PathLike, PreTrainedModel, PeftModel)):
        kind = "None" if model is None else f"of type {type(model).__name__}"
        raise TypeError(f"model is {kind}; give a name or path, a transformers decoder, or a PeftModel")


def init_value_head(trunk: TrunkModel, scorer: str, revision: str | None = None) -> None:
    """Initialise the value head with the score head of a reward model at the name or path `scorer`.

    Raises:
        ValueError: the reward model has another width, or no linear score head.
    """
    head = getattr(load_scorer(scorer, revision=revision), "score", None)
    weight, expected = getattr(head, "weight", None), trunk.value_head.linear.weight
    if weight is None or weight.shape != expected.shape:
        shape = "none" if weight is None else f"one of {list(weight.shape)}"
        raise ValueError(
            f"value_head_init {scorer} has {shape} as its head `score`, and the value head needs"
            f" {list(expected.shape)}; take a reward model of the trunk's own architecture and size, or leave it out"
        )
    with torch.no_grad():
        expected.copy_(weight)
        if getattr(head, "bias", None) is not None:
            trunk.value_head.linear.bias.copy_(head.bias)


def _restore_value(trunk: TrunkModel, adapter: str, revision: str | None) -> None:
    if not Path(adapter).is_dir():
        adapter = snapshot_download(adapter, revision=revision, allow_patterns=[VALUE_HEAD_FILE, f"{VALUE}/*"])
    folder = Path(adapter)
    if (folder / VALUE_HEAD_FILE).is_file():
        trunk.value_head.load(folder)
        logger.info("the value head continues from %s", folder)
    if VALUE in trunk.peft_config and (folder / VALUE / ADAPTER_FILE).is_file():
        set_adapter_weights(trunk, read_adapter(folder / VALUE), VALUE, folder / VALUE)


def _check_settings(model: TrunkModel, peft_config: PeftConfig | None, value_head: str, adapter_layers: str) -> None:
    if peft_config is not None:
        raise ValueError("the model is a TrunkModel, which has its own LoRA config; leave peft_config out")
    if value_head != model.value_head_kind:
        raise ValueError(
            f"the model is a TrunkModel with value_head {model.value_head_kind!r}, and the settings ask for"
            f" {value_head!r}; set value_head to {model.value_head_kind!r}"
        )
    if parse_adapter_layers(adapter_layers, len(decoder_layers(model))) > model.cut:
        raise ValueError(
            f"the model is a TrunkModel that trains from layer {model.cut} on, which is below adapter_layers"
            f" {adapter_layers!r}; build it with adapter_layers, or set 'all'"
        )


def _load(
    name: str, peft_config: PeftConfig | None, quantization_config: Any, kwargs: dict[str, Any]
) -> PreTrainedModel | PeftModel:
    revision = kwargs.get("revision")
    if not is_adapter(name, revision):
        return load_base(name, quantization_config=quantization_config, **kwargs)
    if peft_config is not None:
        raise ValueError(f"{name} is an adapter and peft_config asks for a new one; leave peft_config out")
    base_name = adapter_base(name, revision)
    with base_of(name):
        base_kwargs = {key: value for key, value in kwargs.items() if key != "revision"}
        base = load_base(base_name, quantization_config=quantization_config, **base_kwargs)
    # PEFT would list every tensor that does not fit; `check_adapter_fits` raises one error instead.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some weights of|Found missing adapter keys")
        model = put_adapter_on(base, name, revision, ignore_mismatched_sizes=True)
    check_adapter_fits(model, read_adapter_weights(name, revision), POLICY, name)
    check_base_marks(model.get_base_model(), name, revision)
    return model
