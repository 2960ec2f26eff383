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
from ops_cases import seconds

from onetrunk.ops import Head, fused_token_logprobs, token_logprobs
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
    kind = {"dtype": getattr(torch, given.dtype), "device": given.device}
    torch.manual_seed(0)
    weight = torch.empty(given.vocab, hidden, **kind).normal_(std=hidden**-0.5)
    states = torch.randn(given.tokens, hidden, **kind).requires_grad_(trains)
    targets = torch.randint(0, given.vocab, (given.tokens,), device=given.device)
    found: dict[str, Any] = {}
    outputs = {}
    for variant, setting in VARIANTS.items():
        function = token_logprobs if variant == "naive" else fused_token_logprobs

        def run(function: Any = function) -> torch.Tensor:
            logprobs, _ = function(states, Head(weight), targets)
            if trains:
                states.grad = None
                logprobs.sum().backward()
            return logprobs.detach()

        with kernels(setting):
            found[variant] = cost(run, given.device, given.repeats)
            outputs[variant] = (run().float(), states.grad.float() if trains else None)
    for number, name in enumerate(("logprobs", "gradients")[: 1 + trains]):
        ours, twin = (outputs[variant][number] for variant in ("kernel", "torch"))
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
