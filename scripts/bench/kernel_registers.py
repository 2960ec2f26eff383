"""Registers, spills and shared memory of the Triton kernels on NVIDIA GPUs, compiled without one.

    python scripts/bench/kernel_registers.py

prints a table, and fails if a kernel keeps registers in memory (spills): every program of it would write and read them
again. Compiled are the tiles that the fused logprobs make of public vocabularies, with and without alignment.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from onetrunk.ops.kernels import logprob
from onetrunk.ops.logprobs import CHUNK_BYTES, CHUNK_TOKENS, _Tiling

# By compute capability.
GPUS = {80: "A100", 90: "H100, H200", 100: "B200"}
VOCABULARIES = (32_000, 32_768, 50_257, 128_256, 151_936, 152_064)
TOKENS = (1, 500, 2048, 8192)
# Scoring; training; training of a head with a soft cap and with an entropy bonus, which needs most registers.
SCORE = {"LOGIT_SCALE": 1.0, "SOFTCAP": 0.0, "TEMPERATURE": 0.9, "HAS_WEIGHTS": False, "HAS_SPREAD": False}
TRAIN = SCORE | {"HAS_WEIGHTS": True}
VARIANTS = {
    "score": SCORE,
    "train": TRAIN,
    "train with soft cap and entropy": TRAIN | {"SOFTCAP": 30.0, "HAS_SPREAD": True},
}


@dataclass(frozen=True)
class Compiled:
    """A kernel for one kind of GPU: registers of a thread, bytes of them in memory, bytes of shared memory."""

    registers: int
    spilled: int
    shared: int


def tiles() -> set[tuple[int, bool]]:
    """Return the blocks of the tiles of logits, and whether rows of the tile are aligned for vector loads."""
    tiling = _Tiling(CHUNK_TOKENS["cuda"], CHUNK_BYTES["cuda"], True, False)
    found = set()
    for vocab, tokens in itertools.product(VOCABULARIES, TOKENS):
        widest = min(vocab, tiling.width(tokens, torch.float32))
        for width in {widest, vocab % widest or widest}:
            found.add((logprob.block_of(width), width % 16 == 0))
    return found


def compiled(capability: int, dtype: str, variant: dict[str, Any], block: int, is_aligned: bool) -> Compiled:
    """Return what the tile kernel needs on a kind of GPU."""
    kernel, constants = logprob._absorb_row, variant | {"IS_DOUBLE": False, "BLOCK": block}
    kinds = dict.fromkeys(kernel.arg_names, "*fp32") | dict.fromkeys(constants, "constexpr")
    kinds |= {"logits_ptr": dtype, "spread_weights_ptr": dtype, "targets_ptr": "*i64", "width": "i32"}
    aligned = [name for name, kind in kinds.items() if kind.startswith("*") or (name == "width" and is_aligned)]
    source = ASTSource(
        kernel,
        kinds,
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    built = triton.compile(source, GPUTarget("cuda", capability, 32), dict(logprob.OPTIONS))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(built.asm["cubin"])
        tool = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        text = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return Compiled(numbers["REG"], numbers["STACK"] + numbers["LOCAL"], built.metadata.shared)


def main() -> int:
    """Print the registers with bfloat16 and float32 logits, the most of all tiles; return 1 if a tile spills."""
    print(f"Triton {triton.__version__}; blocks {sorted({block for block, _ in tiles()})}\n")
    print(f"| registers | {' | '.join(GPUS.values())} | spilled bytes | shared bytes |\n|---|---|---|---|---|---|")
    is_spilled = False
    for name, variant in VARIANTS.items():
        found = {
            (capability, dtype): [compiled(capability, dtype, variant, *tile) for tile in tiles()]
            for capability, dtype in itertools.product(GPUS, ("*bf16", "*fp32"))
        }
        registers = [str(max(tile.registers for tile in of_gpu)) for of_gpu in found.values()]
        pairs = [", ".join(registers[i : i + 2]) for i in range(0, len(registers), 2)]
        every = [tile for of_gpu in found.values() for tile in of_gpu]
        spilled, shared = (max(getattr(tile, of) for tile in every) for of in ("spilled", "shared"))
        print(f"| {name} | {' | '.join(pairs)} | {spilled} | {shared} |", flush=True)
        is_spilled |= spilled > 0
    return int(is_spilled)


if __name__ == "__main__":
    sys.exit(main())
