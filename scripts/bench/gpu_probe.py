"""Prints what `scripts/check_gpu.py` must know of the GPUs and packages of this machine, as one JSON line.

A process of its own: one that has touched a GPU holds some hundred MiB of its memory.
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "triton", "bitsandbytes")


def version_of(package: str) -> str | None:
    """Return the installed version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    gpus = []
    if torch.cuda.is_available():
        properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        gpus = [{"name": gpu.name, "memory_gib": round(gpu.total_memory / 2**30, 1)} for gpu in properties]
    versions = {package: found for package in PACKAGES if (found := version_of(package))}
    print(json.dumps({"gpus": gpus, "cuda": torch.version.cuda, "versions": versions}))


if __name__ == "__main__":
    main()
