"""Checkpoints for tests: changed as somebody could who knows the manifest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onetrunk.checkpoints.folders import read_manifest, write_manifest


def with_new_manifest(folder: Path) -> None:
    """Make the manifest fit what the folder holds now."""
    about = read_manifest(folder)
    write_manifest(folder, **{key: value for key, value in about.items() if key != "files"})


def change_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file of a checkpoint, and the manifest with it."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with_new_manifest(path.parent)
