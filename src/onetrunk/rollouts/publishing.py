"""Adapters as files that a vLLM server loads: which ones it can serve, and their folders.

Every version has a new name and a new folder. vLLM keys its prefix cache by name and keeps the weights of a name, so a
name or a folder that is used again would sample from old weights without any error. Names carry a nonce of the run,
because a resumed run repeats the numbers of versions. A folder is deleted only after the server has let go of it: the
engine dies if it reads a loaded adapter again and its files are gone.
"""

from __future__ import annotations

import copy
import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from torch import Tensor, nn

from onetrunk.models.adapters import ADAPTER_FILE, POLICY, REFERENCE, adapter_parameters, find_tuner_layers, is_active
from onetrunk.utils.files import load_tensors, save_tensors
from onetrunk.utils.options import VLLM_RANKS

# Where the adapters of a run are published. Trainer pushes no path that begins with an underscore to the Hub.
ADAPTERS_FOLDER = "_adapters"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROLES = ("policy", "reference")
# Modules that vLLM keeps without LoRA.
HEADS = {"lm_head", "embed_tokens", "embed_out", "wte", "score"}


@dataclass(frozen=True)
class Published:
    """An adapter on disk, as the servers know it.

    Args:
        folder: absolute; holds adapter_config.json and adapter_model.safetensors.
        role: "policy" or "reference".
    """

    name: str
    folder: str
    role: str
    version: int


def active_adapter(model: nn.Module) -> str | None:
    """Return the adapter that samples, None if the bare base does; ValueError if layers disagree."""
    layers = getattr(model, "tuner_layers", None) or find_tuner_layers(model)
    if not layers or all(is_active(layer, None) for layer in layers):
        return None
    names = {name for layer in layers for name in layer.active_adapters}
    if len(names) != 1 or any(layer.disable_adapters for layer in layers):
        raise ValueError(f"adapters {sorted(names)} are active together; a server samples from one of them")
    return names.pop()


def published_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype in which adapters are published: the base's dtype, or float32 if it is quantised."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return base.dtype if base.dtype in DTYPES else torch.float32


def served_rank(rank: int) -> int:
    """Return the smallest rank that vLLM reserves memory for and that an adapter of `rank` fits in; ValueError."""
    if rank > VLLM_RANKS[-1]:
        raise ValueError(f"the adapter has rank {rank}, and vLLM serves ranks up to {VLLM_RANKS[-1]}; lower lora_r")
    return next(served for served in VLLM_RANKS if served >= rank)


def adapter_tensors(model: PeftModel, adapter: str) -> dict[str, Tensor]:
    """Return the weights of an adapter under PEFT's names, on the CPU, in `published_dtype`."""
    dtype = published_dtype(model)
    own = {name: parameter.detach() for name, parameter in adapter_parameters(model, adapter).items()}
    tensors = get_peft_model_state_dict(model, state_dict=own, adapter_name=adapter, save_embedding_layers=False)
    return {name: tensor.to("cpu", dtype).contiguous() for name, tensor in tensors.items()}


class AdapterFolder:
    """A folder of this process below `root`, in which each published adapter has a folder of its own.

    Args:
        root: folder of the run, which no other process uses at the same time; the servers can read it too.
    """

    def __init__(self, root: str | os.PathLike[str]):
        self.root = Path(root).resolve()
        self.nonce = secrets.token_hex(6)
        self.path = self.root / self.nonce
        self._num_written = 0

    def write(self, model: PeftModel, adapter: str, role: str, version: int) -> Published:
        """Write an adapter into a new folder, which gets its name only when it is whole."""
        self._num_written += 1
        final = self.path / f"{self._num_written}-{role}-v{version}"
        partial = final.with_name(f".{final.name}.partial")
        partial.mkdir(parents=True)
        save_tensors(partial / ADAPTER_FILE, adapter_tensors(model, adapter))
        config = copy.deepcopy(model.peft_config[adapter])
        config.inference_mode = True
        config.save_pretrained(str(partial))
        partial.rename(final)
        return Published(f"onetrunk-{self.nonce}-{final.name}", str(final), role, version)

    def is_leftover(self, folder: str) -> bool:
        """Return whether a killed process of this run has published an adapter in a folder."""
        owner = Path(folder).parent
        return owner.parent == self.root and owner != self.path

    def delete_leftovers(self) -> None:
        """Delete what killed processes of this run have written; no server may have it any more."""
        for path in self.root.glob("[0-9a-f]" * 12):
            if path != self.path:
                shutil.rmtree(path, ignore_errors=True)

    def delete(self) -> None:
        """Delete all that this process has written; no server may have it any more."""
        shutil.rmtree(self.path, ignore_errors=True)


def is_same_adapter(published: Published, model: PeftModel, adapter: str) -> bool:
    """Return whether the published weights equal the model's, bit for bit."""
    tensors = adapter_tensors(model, adapter)
    written = load_tensors(Path(published.folder) / ADAPTER_FILE)
    return tensors.keys() == written.keys() and all(torch.equal(tensors[name], written[name]) for name in tensors)


def role_of(adapter: str | None) -> str:
    """Return the role that an active adapter plays."""
    return "reference" if adapter in (None, REFERENCE) else "policy"


def reference_adapter(model: nn.Module) -> str | None:
    """Return the adapter of the reference; None if it is the bare base."""
    # A trunk says which of the two it is: it may keep a copy of its initial adapter that nobody asks for.
    has_adapter = getattr(model, "has_reference_adapter", REFERENCE in getattr(model, "peft_config", {}))
    return REFERENCE if has_adapter else None


def servable_adapters(model: nn.Module, roles: Sequence[str] = ROLES) -> dict[str, str]:
    """Return the adapter of each role; a role that the bare base plays has none."""
    policy = active_adapter(model)
    if role_of(policy) != "policy":  # An evaluation of the reference: the policy is PEFT's "default".
        policy = POLICY if POLICY in getattr(model, "peft_config", {}) else None
    by_role = {"policy": policy, "reference": reference_adapter(model)}
    adapters = {role: by_role[role] for role in roles if by_role[role] is not None}
    for adapter in adapters.values():
        check_servable(model.peft_config[adapter], f"the adapter {adapter!r}")
    return adapters


def check_servable(config: LoraConfig, what: str = "the adapter") -> None:
    """Raise ValueError for a LoRA adapter that vLLM does not serve, or would serve as another one."""
    problems = {
        "is DoRA (use_dora), whose magnitudes vLLM does not load": config.use_dora,
        f"has modules_to_save {config.modules_to_save}": config.modules_to_save,
        "adapts parameters (target_parameters), which has not been tried with vLLM": config.target_parameters,
        f"has a bias ({config.bias!r})": config.bias != "none" or config.lora_bias,
    }
    targets = config.target_modules if isinstance(config.target_modules, (list, set, tuple)) else []
    heads = sorted(HEADS & set(targets))
    problems[f"adapts {', '.join(heads)}, where vLLM has no LoRA"] = heads
    patterned = [name for name in ("rank_pattern", "alpha_pattern") if getattr(config, name)]
    problems[f"has {' and '.join(patterned)}, which some versions of vLLM ignore"] = patterned
    for problem, holds in problems.items():
        if holds:
            raise ValueError(
                f"{what} {problem}, so no vLLM server can sample from it; train a plain LoRA adapter, or sample in"
                " this process (leave the rollout backend out)"
            )
