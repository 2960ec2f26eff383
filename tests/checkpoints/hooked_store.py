"""A file system on a local folder that calls a function in the middle of each write and before each deletion or read.

The function may raise, wait, or end the process: half a file is there then.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from onetrunk.checkpoints.folders import write_manifest
from onetrunk.checkpoints.mirror import SCHEMES


def nothing(operation: str, path: str) -> None:
    """Let an operation pass."""


class HookedFileSystem(LocalFileSystem):
    """`hooked:///a/path`; `hook(operation, path)` with operation "write", "delete" or "read"."""

    protocol = ("hooked",)
    hook: Callable[[str, str], None] = staticmethod(nothing)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("hooked://"))

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def get_file(self, rpath: str, lpath: str, **kwargs: Any) -> None:
        type(self).hook("read", rpath)
        super().get_file(rpath, lpath, **kwargs)

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(value[: len(value) // 2])
        type(self).hook("write", path)
        Path(path).write_bytes(value)

    def rm_file(self, path: str) -> None:
        if Path(path).exists():
            type(self).hook("delete", path)
        super().rm_file(path)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        type(self).hook("delete", path)
        super().rm(path, recursive, maxdepth)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        type(self).hook("read", path)
        return super()._open(path, mode, **kwargs)


def register() -> None:
    """Let fsspec know the scheme, in this process."""
    fsspec.register_implementation("hooked", HookedFileSystem, clobber=True)
    SCHEMES.add("hooked")


def make_checkpoint(output_dir: Path, step: int) -> Path:
    """Return a whole checkpoint folder of three files, whose bytes tell the step."""
    folder = output_dir / f"checkpoint-{step}"
    for name in ("adapter.safetensors", "value/adapter.safetensors", "trainer_state.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(f"{step} {name} ".encode() * 100)
    write_manifest(folder, step=step)
    return folder
