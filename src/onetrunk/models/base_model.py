"""The frozen base model: load it, find its body, layers and head, and make its dropout and padding harmless.

Structure is detected, not listed by family: the body comes from `get_decoder`, the layers are its only list of the
config's length, the head comes from the config and is checked by one forward (`verify_head`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from onetrunk.models.loading import check_finite, load_weights, pinned_source, read_config, read_tokenizer
from onetrunk.ops.running_softmax import Head
from onetrunk.utils.versions import takes_key_value_cache

logger = logging.getLogger(__name__)

# Decoders that pass every check of structure but don't work here, and why.
_UNSUPPORTED = {
    "deepseek_v4": "it compresses keys by columns, padding included, so a row would depend on the rows next to it",
    "kimi_linear": "its linear attention is not verified for batches of prompts of different lengths",
    "minimax": "it can't continue a sequence from transformers' own cache, only from a cache class of its model code",
    "phimoe": "its router draws experts at random in training, so that the first PPO ratio would differ from 1",
}

_DROPOUT_MODULES = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_DROPOUT_NAME = re.compile(r"(.*_)?(dropout|pdrop|layerdrop|jitter_noise|jitter_eps)(_p|_prob|_rate)?")


def load_base(
    name_or_path: str,
    *,
    dtype: str | torch.dtype | None = None,
    attn_implementation: str | None = None,
    revision: str | None = None,
    quantization_config: Any = None,
    trust_remote_code: bool = False,
    device_map: Any = None,
) -> PreTrainedModel:
    """Load a causal language model from safetensors; the arguments are those of transformers.

    Args:
        dtype: None: the checkpoint's.
        revision: branch, tag or commit; with `trust_remote_code` a full commit hash.
    """
    source = pinned_source(revision, trust_remote_code)
    name_or_path = str(name_or_path)
    config = read_config("model", name_or_path, **source)
    check_decoder(config, name_or_path)
    if "flash" in (attn_implementation or "") and device_map is None and torch.cuda.is_available():
        # Its kernels run on a GPU only, and the checks of this room run before a trainer moves the model.
        device_map = {"": torch.cuda.current_device()}
    model, report = load_weights(
        AutoModelForCausalLM,
        "model",
        name_or_path,
        dtype="auto" if dtype is None else dtype,
        attn_implementation=attn_implementation,
        quantization_config=quantization_config,
        device_map=device_map,
        **source,
    )
    if report["missing_keys"]:
        raise ValueError(
            f"the checkpoint {name_or_path!r} lacks {len(report['missing_keys'])} weights of "
            f"{type(model).__name__}, among them {min(report['missing_keys'])}; they would be random. Give a causal "
            "language model's checkpoint"
        )
    return model


def check_decoder(config: PreTrainedConfig, name: str) -> None:
    """Raise a ValueError unless a config is that of a decoder that can be a trunk."""
    if config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder ({config.model_type}); give a decoder-only model")
    check_supported(config)


def check_supported(config: PreTrainedConfig) -> None:
    """Raise a ValueError for an architecture that is known not to work as a trunk."""
    model_type = config.get_text_config().model_type
    if model_type in _UNSUPPORTED:
        raise ValueError(
            f"the architecture {model_type} is not supported: {_UNSUPPORTED[model_type]}; take a model of another"
            " architecture"
        )


def check_cache(model: PreTrainedModel) -> None:
    """Raise a ValueError for an architecture whose forward takes no key-value cache, such as Mamba's."""
    if not takes_key_value_cache(model):
        raise ValueError(
            f"{type(model).__name__} has no key-value cache (past_key_values), so it cannot be sampled from; take a"
            " model with attention layers; some hybrids work"
        )


def load_tokenizer(
    name_or_path: str, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load a tokenizer and repair its padding (`repair_padding`)."""
    return repair_padding(read_tokenizer(str(name_or_path), **pinned_source(revision, trust_remote_code)))


def repair_padding(
    tokenizer: PreTrainedTokenizerBase, model_config: PreTrainedConfig | None = None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer; without a usable padding token it now pads with its end-of-sequence token.

    That is safe because every mask is built from lengths, never from `ids != pad`.

    Args:
        model_config: if given, a padding token outside the model's vocabulary counts as unusable (the embedding would
            fail on it), and the config's `pad_token_id` is set to the tokenizer's.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has no end-of-sequence token, so no completion could end; set tokenizer.eos_token"
        )
    vocab_size = float("inf") if model_config is None else model_config.get_text_config().vocab_size
    if tokenizer.eos_token_id >= vocab_size:
        raise ValueError(
            f"the tokenizer's end-of-sequence token is id {tokenizer.eos_token_id}, but the model knows {vocab_size} "
            "tokens; take the tokenizer that belongs to the model"
        )
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= vocab_size:
        logger.info("the tokenizer has no usable padding token: padding with %r instead", tokenizer.eos_token)
        tokenizer.pad_token = tokenizer.eos_token
    if model_config is not None:
        model_config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return tokenizer


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None
) -> tuple[int, ...]:
    """Return the ids that end a completion, ascending: those of the tokenizer and of the generation config."""
    ids = {tokenizer.eos_token_id}
    if generation_config is not None:
        more = generation_config.eos_token_id
        ids.update(more if isinstance(more, (list, tuple)) else [more])
    return tuple(sorted(i for i in ids if i is not None))


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout of the model to 0, so that `train()` computes what `eval()` does.

    These are dropout modules, float attributes that attention code reads (`attention_dropout`), and the `*_dropout`
    and `*_pdrop` of the config and its nested configs, which code may read at run time; dropped layers and the noise
    of routers too.
    """
    for owner in (*model.modules(), *_nested_configs(_base(model).config)):
        if isinstance(owner, _DROPOUT_MODULES):
            owner.p = 0.0
        for name, value in list(vars(owner).items()):
            if isinstance(value, float) and _DROPOUT_NAME.fullmatch(name):
                setattr(owner, name, 0.0)


def active_dropout(model: nn.Module) -> str | None:
    """Return the name of a dropout above 0 that `disable_dropout` would set to 0; None if there is none."""
    for path, owner in model.named_modules():
        if isinstance(owner, _DROPOUT_MODULES) and owner.p > 0:
            return path
        for name, value in vars(owner).items():
            if isinstance(value, float) and value > 0 and _DROPOUT_NAME.fullmatch(name):
                return f"{path}.{name}"
    return None


def backbone(model: nn.Module) -> nn.Module:
    """Return the decoder body whose `last_hidden_state` the head reads; `model` may be wrapped by PEFT."""
    return _base(model).get_decoder()


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the list of decoder layers: the only list in the body with one entry per layer, else a ValueError."""
    body, depth = backbone(model), _base(model).config.get_text_config().num_hidden_layers
    lists = [child for child in body.children() if isinstance(child, nn.ModuleList) and len(child) == depth]
    if len(lists) != 1:
        raise ValueError(
            f"{type(body).__name__} has {len(lists)} lists of {depth} modules where exactly one, the decoder layers, "
            "is expected; this architecture is not supported"
        )
    return lists[0]


def output_head(model: nn.Module) -> Head:
    """Return the head's weight and formula; ValueError unless it is `nn.Linear`, not quantised, without an adapter."""
    base = _base(model)
    head = base.get_output_embeddings()
    kind = type(head).__name__
    if any(hasattr(head, name) for name in ("base_layer", "original_module")):
        raise ValueError(f"the output head carries an adapter ({kind}); leave it out of PEFT's target modules")
    if type(head).__module__.startswith("bitsandbytes") or (
        isinstance(head, nn.Linear) and not head.weight.is_floating_point()
    ):
        raise ValueError(f"the output head is quantised ({kind}); add it to the quantization config's skip modules")
    if not isinstance(head, nn.Linear):
        raise ValueError(f"the output head of {type(base).__name__} is {kind}; only nn.Linear is supported")
    config = base.config.get_text_config()
    scale = getattr(config, "logit_scale", None)
    if scale is None:
        scale = 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(head.weight, head.bias, softcap=softcap, logit_scale=float(scale))


@torch.no_grad()
def verify_head(model: nn.Module) -> None:
    """Check `output_head` and `backbone` by one forward over 8 tokens, before any sharding or wrapping.

    The largest difference may be .1% of the largest logit, or four roundings of a half-precision model: a missing
    scale or soft-cap is far above both.
    """
    base, head = _base(model), output_head(model)
    kept: list[Tensor] = []
    with backbone(model).register_forward_hook(lambda _module, _args, output: kept.append(output[0])):
        logits = base(**probe_inputs(base)).logits.float()
    tolerance = max(1e-3, 4 * torch.finfo(head.weight.dtype).eps) * logits.abs().max().item()
    error = float("inf")
    if len(kept) == 1:
        device, bias = head.weight.device, None if head.bias is None else head.bias.float()
        own = head.transform(F.linear(kept[0].to(device).float(), head.weight.float(), bias))
        error = (own - logits.to(device)).abs().max().item()
    if not error <= tolerance:
        check_finite(base)
        raise ValueError(
            f"the head of {type(base).__name__} computes something else than weight, bias, logit scale "
            f"{head.logit_scale:g} and soft-cap {head.softcap} (largest difference {error:.3g}); it is not supported"
        )


def probe_inputs(model: nn.Module) -> dict[str, Any]:
    """Return the inputs of a forward over 8 tokens, spread over the vocabulary, for the checks of this room."""
    embedding = model.get_input_embeddings().weight
    ids = torch.linspace(0, embedding.shape[0] - 1, 8, device=embedding.device).long()[None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}


def computes(run: Callable[[], Tensor], expected: Tensor) -> bool:
    """Return whether `run` computes `expected`, up to .1% of its largest number: kernels that add in any order pass.

    False also if it raises the errors of a module that returns a tuple or needs more than hidden states.
    """
    try:
        found = run().float()
    except (ValueError, RuntimeError, IndexError, TypeError, AttributeError):
        return False
    expected = expected.float()
    return found.shape == expected.shape and bool((found - expected).abs().max() <= 1e-3 * expected.abs().max())


def keep_kernels(model: nn.Module) -> None:
    """Set every module to the mode in which its arithmetic is always the same: the update computes what scoring did.

    This is train mode for quantised layers, which contain no dropout, and eval mode for the others, because some
    mixers and routers compute another way in training. Modules that can recompute activations keep their mode: they do
    so in train mode only. Call it before the first forward, and after every `train` and `eval`.
    """
    for module in model.modules():
        if not type(module).__module__.startswith("bitsandbytes"):
            module.training = module.training and hasattr(module, "gradient_checkpointing")
            continue
        module.training = True
        quant_state = getattr(getattr(module, "weight", None), "quant_state", None)
        if getattr(quant_state, "packing_format_for_cpu", False):
            raise ValueError(
                "a forward in eval mode on the CPU has repacked the 4-bit weights for inference, so they pass no"
                " gradient; load the model again and pass it before its first forward, or pass its name"
            )


def _base(model: nn.Module) -> PreTrainedModel:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _nested_configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _nested_configs(value)
