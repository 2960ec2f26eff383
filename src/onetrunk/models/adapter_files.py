"""Weights of adapters from PEFT's files: all that is read is checked before any of it is loaded.

The policy lies at the root of a folder, every other adapter in a folder of its name, as PEFT saves them. Knows names
and shapes; no roles, no training.
"""

from __future__ import annotations

from pathlib import Path

from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor

from onetrunk.files import load_tensors
from onetrunk.models.adapters import POLICY, REFERENCE, REWARD, VALUE

ADAPTER_FILE = "adapter_model.safetensors"


def read_adapter(folder: str | Path) -> dict[str, Tensor]:
    """Return the tensors of the adapter in `folder`, under PEFT's names.

    Raises:
        ValueError: there is none.
        RuntimeError: its file is damaged.
    """
    path = Path(folder) / ADAPTER_FILE
    if not path.is_file():
        raise ValueError(f"{path} is missing: pass a folder that save_pretrained wrote with the same branches")
    return load_tensors(path)


def check_adapter_fits(model: PeftModel, weights: dict[str, Tensor], adapter: str, source: str | Path) -> None:
    """Refuse weights that are not one tensor for each of `adapter`, of its shape.

    Raises:
        ValueError: with `source`, where the weights come from, in the sentence.
    """
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
    """Load weights under PEFT's names into `adapter`; no flag changes. Refuses what `check_adapter_fits` refuses."""
    check_adapter_fits(model, weights, adapter, source)
    set_peft_model_state_dict(model, weights, adapter_name=adapter)


def read_branches(model: PeftModel, folder: str | Path) -> dict[str, dict[str, Tensor]]:
    """Return adapter name -> tensors for every adapter of `model` that is saved, from a folder of the same branches.

    The reward adapter is not: it stays what its own folder says.

    Raises:
        ValueError: a file is missing, one too many, or does not fit.
        RuntimeError: a file is damaged.
    """
    folder = Path(folder)
    for adapter in {VALUE, REFERENCE} - set(model.peft_config):
        if (folder / adapter / ADAPTER_FILE).is_file():
            raise ValueError(f"{folder} holds an adapter {adapter!r} and this trunk has none: build it as it was")
    sources = {
        adapter: folder if adapter == POLICY else folder / adapter
        for adapter in model.peft_config
        if adapter != REWARD
    }
    weights = {adapter: read_adapter(source) for adapter, source in sources.items()}
    for adapter, tensors in weights.items():
        check_adapter_fits(model, tensors, adapter, sources[adapter] / ADAPTER_FILE)
    return weights
