"""Seconds and peak memory of one variant of the logprobs, in a process of its own.

    python scripts/bench/ops_memory.py '{"variant": "fused", "tokens": 1024, "hidden": 512, "vocab": 152000}'

prints {"seconds": ..., "extra_mb": ...}: the peak beyond what the inputs take. Imported by scripts/bench_ops.py, which
starts it once per variant: a peak of memory is a peak of a whole process.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import torch

try:
    from ops_cases import logprobs_run, seconds
except ImportError:
    from bench.ops_cases import logprobs_run, seconds

GROWTH = {
    "vocab": [8_000, 16_000, 32_000, 64_000, 152_000],
    "tokens": [128, 256, 512, 1024, 2048],
    "hidden": [256, 512, 1024],
}


def peak_mb() -> float:
    """Return the peak memory of this process in MiB."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    # Bytes on macOS, which has no /proc. On Linux this number would start at the peak of the parent.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(repeats: int = 1, threads: int = 1, **case: object) -> dict[str, float]:
    """Return the median seconds and the extra memory of a run; its arguments are those of `logprobs_run`."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    # Loads what the products and the gradient need, whose memory is not that of the run.
    logprobs_run(**(case | {"tokens": 2, "vocab": 8}))()
    run = logprobs_run(**case)
    before = peak_mb()
    times = [seconds(run) for _ in range(repeats)]
    return {"seconds": statistics.median(times), "extra_mb": peak_mb() - before}


def measured(**case: object) -> dict[str, float]:
    """Return what `measure` returns, in a process of its own."""
    done = subprocess.run([sys.executable, __file__, json.dumps(case)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{case} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def growth(base: dict[str, object], axes: dict[str, list[int]]) -> list[dict[str, object]]:
    """Return one row per point of every axis and variant; the other sizes are those of `base`."""
    cases = [
        base | {axis: size, "variant": variant}
        for axis, sizes in axes.items()
        for size in sizes
        for variant in ("naive", "fused")
    ]
    axes_of = [axis for axis, sizes in axes.items() for _ in sizes for _ in range(2)]
    return [{"axis": axis} | case | measured(**case) for axis, case in zip(axes_of, cases, strict=True)]


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
