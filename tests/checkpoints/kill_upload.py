"""A process that pushes checkpoints and ends in the middle of a write or deletion, as kill -9 would end it."""

import os
from pathlib import Path

from onetrunk.checkpoints.folders import checkpoint_folders
from onetrunk.checkpoints.mirror import Mirror
from tests.checkpoints import hooked_store


def push_and_die(output_dir: Path, mirror_dir: Path, last: int) -> None:
    """Push the checkpoints of a folder; end the process with code 9 in the write or deletion with number `last`."""
    count = 0

    def die(operation: str, path: str) -> None:
        nonlocal count
        count += operation != "read"
        if count == last:
            os._exit(9)

    hooked_store.register()
    mirror = Mirror(f"hooked://{mirror_dir}", keep=2, warn=print)
    hooked_store.HookedFileSystem.hook = staticmethod(die)
    for folder in checkpoint_folders(output_dir):
        mirror.push(folder)
        mirror.wait(60)
