"""Which base a trunk stands on, in one line: a digest of its config and of samples of its frozen weights.

Two loads of the same weights in the same dtype (or the same quantisation) give the same line; other weights, another
dtype or another config give another. Knows parameters by their names; no files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

SAMPLES = 64
# What a config says about a load or about padding rather than about the function that the model computes.
PASSING = frozenset(
    "_name_or_path name_or_path transformers_version architectures dtype torch_dtype use_cache quantization_config"
    " pad_token_id bos_token_id eos_token_id _attn_implementation attn_implementation return_dict".split()
)


def base_fingerprint(base: PreTrainedModel) -> str:
    """Return the line for a base model, with or without adapters in its layers, which do not count.

    Args:
        base: transformers' model; of each parameter at most SAMPLES numbers are read, evenly spread.
    """
    return _fingerprint(base, without=".lora_")


def scorer_fingerprint(model: PreTrainedModel) -> str:
    """Return the line for a reward model, adapters included; a head that the adapter's stands in for does not count.

    Args:
        model: as for `base_fingerprint`.
    """
    return _fingerprint(model, without=".original_module.")


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of all that is in some tensors, by their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


@torch.no_grad()
def _fingerprint(base: PreTrainedModel, without: str) -> str:
    # Only what differs from the defaults of the class: a later version of transformers may add fields.
    config = {k: v for k, v in base.config.to_diff_dict().items() if k not in PASSING}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    parts: list[Tensor] = []
    for name, parameter in base.named_parameters():
        if without in name:
            continue
        # PEFT puts a layer that it adapts into `base_layer`.
        digest.update(f"{name.replace('.base_layer.', '.')} {parameter.dtype} {list(parameter.shape)}".encode())
        parts.append(_samples(parameter.data))
    for dtype in sorted({part.dtype for part in parts}, key=str):
        # One transfer per dtype: on a GPU each of its own would wait for the device.
        joined = torch.cat([part for part in parts if part.dtype == dtype]).cpu().contiguous()
        digest.update(joined.view(torch.uint8).numpy().tobytes())
    return f"{base.config.model_type}, sha256 {digest.hexdigest()[:16]}"


def _samples(weights: Tensor) -> Tensor:
    flat = weights.reshape(-1)
    return flat[:: max(1, -(-flat.numel() // SAMPLES))]
