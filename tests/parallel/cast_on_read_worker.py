"""What each process does in test_cast_on_read.py: load a base in float32 and share it; measure its own memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model

from onetrunk.models.base_model import load_base
from onetrunk.models.loading import tensors_digest
from onetrunk.parallel.layout import Layout
from onetrunk.parallel.sharding import casting_later, local_bytes
from onetrunk.parallel.tensor import distribute_frozen
from tests.models.branches import lora
from tests.places import CPU, join_group

# 10 layers of 8.4 MiB in bfloat16, and embedding and head of 8 MiB each.
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 10,
    "vocab_size": 4096,
}
M_MMAP_THRESHOLD = -3  # malloc.h


def private_bytes() -> int:
    """Return the bytes that this process shares with no other: not those of mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


@contextlib.contextmanager
def highest() -> Iterator[list[int]]:
    """Yield a list whose only entry is the highest number of private bytes in the block."""
    peak, is_over = [private_bytes()], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.001):
            peak[0] = max(peak[0], private_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        is_over.set()
        watcher.join()


def measure(name: str, block: Any) -> dict[str, Any]:
    """Load and share a base; return private bytes in shares of the whole base, and a digest of a share."""
    gc.collect()
    before = private_bytes()
    with highest() as peak:
        with block:
            base = load_base(name, dtype="float32")
        whole = local_bytes(base)
        torch.manual_seed(0)
        model = get_peft_model(base, lora(task_type="CAUSAL_LM", r=1, target_modules=["q_proj"]))
        distribute_frozen(model, Layout(), torch.device(CPU))
    gc.collect()
    end = private_bytes() - before
    shares = {n: p.to_local() if hasattr(p, "to_local") else p for n, p in model.named_parameters()}
    return {"peak": (peak[0] - before) / whole, "end": end / whole, "weights": tensors_digest(shares)}


def work(rank: int, folder: str, name: str) -> dict[str, dict[str, Any]]:
    # Matrices of large models are returned to the system when they are freed; so are those of this small one.
    ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 2**20)
    join_group(CPU, folder, rank, 2)
    measure(name, contextlib.nullcontext())  # Buffers that are allocated once.
    return {"late": measure(name, casting_later()), "at once": measure(name, contextlib.nullcontext())}
