"""The Triton kernels against their torch twins at the widths of real models: seconds, memory, difference.

    python scripts/bench/gpu_twins.py --hidden 896 3584 --vocab 152000

It prints one JSON line. With TRITON_INTERPRET=1 and --device cpu it runs in Triton's interpreter. That the kernels are
right is shown by tests/ops/kernel_theorems.py; the difference here is that of one large random case.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from ops_cases import logprobs_run, seconds

from onetrunk.ops.kernels import SWITCH

# Each with the setting of the switch that selects it.
VARIANTS = {"naive": "off", "torch": "off", "kernel": "on"}


@contextmanager
def kernels(setting: str) -> Iterator[None]:
    """Turn the kernels on or off inside the block."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = setting
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before


def cost(run: Callable[[], Any], device: str, repeats: int) -> dict[str, float]:
    """Return the median seconds of a run, and on a GPU its peak memory beyond what is held, in MiB."""
    run()
    result = {}
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        result["extra_mib"] = (torch.cuda.max_memory_allocated() - held) / 2**20
    return {"seconds": statistics.median(seconds(run, device) for _ in range(repeats)), **result}


def logprobs_case(given: argparse.Namespace, hidden: int, trains: bool) -> dict[str, Any]:
    """Return the cost of each variant for one width, and how far the kernel is from its twin."""
    found: dict[str, Any] = {}
    outputs = {}
    for variant, setting in VARIANTS.items():
        function = "naive" if variant == "naive" else "fused"
        torch.manual_seed(0)  # Every variant has the same inputs.
        run = logprobs_run(function, given.tokens, hidden, given.vocab, trains, given.dtype, given.device)
        with kernels(setting):
            found[variant] = cost(run, given.device, given.repeats)
            outputs[variant] = [output.float() for output in run() if output is not None]
    for name, ours, twin in zip(("logprobs", "gradients"), outputs["kernel"], outputs["torch"], strict=False):
        found[f"{name}_difference"] = ((ours - twin).norm() / twin.norm()).item()
    return found


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--hidden", type=int, nargs="+", default=[896, 3584])
    parser.add_argument("--vocab", type=int, default=152_000)
    parser.add_argument("--tokens", type=int, default=1024, help="completion tokens of a pack")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    given = parse()
    logprobs = {
        f"width {hidden}, {'forward and backward' if trains else 'scoring'}": logprobs_case(given, hidden, trains)
        for hidden in given.hidden
        for trains in (True, False)
    }
    shape = {name: getattr(given, name) for name in ("tokens", "vocab", "dtype")}
    print(json.dumps({"shape": shape, "logprobs": logprobs}))


if __name__ == "__main__":
    main()
