"""Adapters as files that a vLLM server loads: which ones it can serve, writing them, and who owns the folder.

Every version has a new name and a new folder. vLLM keys its prefix cache by name and keeps the weights of a name, so a
name or a folder that is used again would sample from old weights without any error. Names carry a nonce of the run,
because a resumed run repeats the numbers of versions. A folder is deleted only after the server has let go of it: the
engine dies if it reads a loaded adapter again and its files are gone.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from torch import Tensor, nn

from onetrunk.models.adapters import ADAPTER_FILE, POLICY, REFERENCE, adapter_parameters, find_tuner_layers, is_active
from onetrunk.utils.files import load_tensors, save_tensors
from onetrunk.utils.locks import WriterLock
from onetrunk.utils.options import VLLM_RANKS

NAME = re.compile(r"onetrunk-([0-9a-f]{12})-(\d+-[a-z]+-v\d+)")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Modules that vLLM keeps without LoRA.
HEADS = {"lm_head", "embed_tokens", "embed_out", "wte", "score"}


@dataclass(frozen=True)
class Published:
    """An adapter on disk, as the servers know it.

    Args:
        name: under which it is asked for.
        folder: absolute; holds adapter_config.json and adapter_model.safetensors.
        role: "policy" or "reference".
        version: optimizer steps that it has seen.
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


def check_servable(config: LoraConfig, what: str = "the adapter") -> None:
    """Raise ValueError for a LoRA adapter that vLLM does not serve, or would serve as another one."""
    problems = {
        "is DoRA (use_dora), whose magnitudes vLLM does not load": config.use_dora,
        f"has modules_to_save {config.modules_to_save}": config.modules_to_save,
        f"has a bias ({config.bias!r})": config.bias != "none" or getattr(config, "lora_bias", False),
    }
    targets = config.target_modules if isinstance(config.target_modules, (list, set, tuple)) else []
    heads = sorted(HEADS & set(targets))
    problems[f"adapts {', '.join(heads)}, where vLLM has no LoRA"] = heads
    patterned = [name for name in ("rank_pattern", "alpha_pattern") if getattr(config, name, None)]
    problems[f"has {' and '.join(patterned)}, which some versions of vLLM ignore"] = patterned
    for problem, holds in problems.items():
        if holds:
            raise ValueError(
                f"{what} {problem}, so no vLLM server can sample from it; train a plain LoRA adapter, or sample in"
                " this process (leave the rollout backend out)"
            )


def published_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype in which adapters are published: that of the base, float32 if it is quantised."""
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
    """The folder in which one process publishes, locked while it lives; its name is the nonce of the process.

    Args:
        root: folder of the run that the servers can read too.
    """

    def __init__(self, root: str | os.PathLike[str]):
        self.root = Path(root).resolve()
        self.nonce = secrets.token_hex(6)
        self.path = self.root / self.nonce
        self._lock: WriterLock | None = None
        self._num_written = 0

    def open(self) -> None:
        """Make and lock the folder; a second call does nothing."""
        if self._lock is None:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = WriterLock(self.path)

    def write(self, model: PeftModel, adapter: str, role: str, version: int) -> Published:
        """Write an adapter into a new folder, which gets its name only when it is whole."""
        self.open()
        self._num_written += 1
        final = self.path / f"{self._num_written}-{role}-v{version}"
        partial = final.with_name(f".{final.name}.partial")
        partial.mkdir()
        save_tensors(partial / ADAPTER_FILE, adapter_tensors(model, adapter))
        config = copy.deepcopy(model.peft_config[adapter])
        config.inference_mode = True
        config.save_pretrained(str(partial))
        partial.rename(final)
        return Published(f"onetrunk-{self.nonce}-{final.name}", str(final), role, version)

    def delete(self, folder: str) -> None:
        """Delete the files of an adapter; of a process that is gone all its files."""
        if folder:
            path = Path(folder)
            shutil.rmtree(path if path.parent == self.path else path.parent, ignore_errors=True)

    def left_by_another(self, name: str, folder: str) -> list[Published]:
        """Return the adapter `name` of a process that is gone, to be unloaded; its files only if they are in `root`.

        A server says where they are, and what a server says is never deleted unless it is ours by its path.
        """
        match = NAME.fullmatch(name)
        if match is None:
            return []
        own = self.root / match.group(1) / match.group(2)
        return [Published(name, str(own) if str(own) == folder else "", "other", 0)]

    def close(self, keeps_files: bool = False) -> None:
        """Delete everything, unless the servers may still read it, and release the lock."""
        if self._lock is not None:
            if not keeps_files:
                shutil.rmtree(self.path, ignore_errors=True)
            self._lock.release()
            # No other process ever writes under this nonce.
            with contextlib.suppress(OSError):
                self._lock.file.unlink()
            self._lock = None


def is_same_adapter(published: Published, model: PeftModel, adapter: str) -> bool:
    """Return whether the published weights are those of the model, bit for bit."""
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


def policy_adapter(model: nn.Module) -> str | None:
    """Return the adapter that is published as the policy: the active one, or PEFT's "default" if none is active."""
    adapter = active_adapter(model)
    if role_of(adapter) == "policy":
        return adapter
    return POLICY if POLICY in getattr(model, "peft_config", {}) else None


def owner_of(name: str, folder: str) -> str | None:
    """Return who publishes the adapter `name` that a server lists; None if that process is gone, or it is not ours.

    Args:
        name: of the adapter on the server.
        folder: of its files, as the server knows it.
    """
    match = NAME.fullmatch(name)
    if match is None:
        return None
    path = Path(folder).parent
    # Its lock goes when the process ends in order, and with a deleted folder. The name is compared because a server
    # could list any path.
    if path.name != match.group(1) or not path.with_name(f"{path.name}.lock").is_file():
        return None
    try:
        WriterLock(path).release()
    except RuntimeError as error:
        return str(error).split(";")[0]
    return None
