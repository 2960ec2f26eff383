"""Which checkpoint is the last from before something went wrong. Knows the names of folders; reads none."""

from __future__ import annotations

from pathlib import Path

from onetrunk.checkpoints.folders import checkpoint_folders, step_of


def last_checkpoint(output_dir: str | Path, step: int) -> str | None:
    """Return the name of the last checkpoint in a folder that was saved at `step` or before; None: there is none."""
    found = [folder.name for folder in checkpoint_folders(output_dir) if step_of(folder) <= step]
    return found[-1] if found else None
