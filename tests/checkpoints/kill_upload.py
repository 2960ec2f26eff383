"""Pushes the checkpoints of a folder, and ends its own process in the middle of a write or deletion, as kill -9 would.

Arguments: output_dir, mirror folder, number of the operation.
"""

import os
import sys
from pathlib import Path

from onetrunk.checkpoints.folders import checkpoint_folders
from onetrunk.checkpoints.mirror import Mirror
from tests.checkpoints import hooked_store


def main() -> None:
    output_dir, mirror_dir, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    count = 0

    def die(operation: str, path: str) -> None:
        nonlocal count
        count += operation != "read"
        if count == last:
            os._exit(9)

    hooked_store.register()
    mirror = Mirror(f"hooked://{mirror_dir}", keep=2, warn=print, waits_s=())
    mirror.claim("run-a", is_resuming=False, overwrite=False)
    hooked_store.HookedFileSystem.hook = staticmethod(die)
    for folder in checkpoint_folders(output_dir):
        mirror.push(folder)
        mirror.wait(60)


if __name__ == "__main__":
    main()
