"""The scripts that are no stage: they run, and say what is wrong with what they were given."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def bench_ops(*options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "scripts/bench_ops.py", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_benchmark_of_the_parts_prints_a_ratio_for_each():
    small = "--tokens 8 --hidden 8 --vocab 32 --prompts 2 --completion 4 --repeats 1"
    done = bench_ops(*small.split())
    assert done.returncode == 0, done.stderr
    assert all(part in done.stdout for part in ("logprobs, fused", "GAE, scan", "decode loop against generate"))
    assert len(re.findall(r"\d\.\d\dx", done.stdout)) == 3


def test_a_size_of_zero_is_refused_by_the_benchmark():
    done = bench_ops("--vocab", "0")
    assert done.returncode == 2
    assert "every number must be 1 or more" in done.stderr
