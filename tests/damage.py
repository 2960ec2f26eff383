"""Damaged model folders for the tests: a whole tiny model, and ways in which a downloaded file can be damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Damage = Callable[[Path], None]

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
TEMPLATE = "chat_template.jinja"


def truncated(name: str, share: float = 0.5) -> Damage:
    """Cut a file off, as an interrupted download leaves it."""

    def damage(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(share * len(data))])

    return damage


def written(name: str, data: bytes | str) -> Damage:
    """Replace a file's content."""

    def damage(folder: Path) -> None:
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)

    return damage


def changed(name: str, **fields: Any) -> Damage:
    """Set fields of a JSON file."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(content | fields))

    return damage


def tensors_changed(name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Damage:
    """Change the tensors of a safetensors file."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name, metadata={"format": "pt"})

    return damage


def removed(name: str) -> Damage:
    """Delete a file."""
    return lambda folder: (folder / name).unlink()


def both(*damages: Damage) -> Damage:
    """Apply several changes in turn."""

    def damage(folder: Path) -> None:
        for each in damages:
            each(folder)

    return damage
