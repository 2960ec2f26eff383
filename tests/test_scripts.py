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
    done = bench_ops("--tokens", "8", "--hidden", "8", "--vocab", "32", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    assert "logprobs, fused against naive" in done.stdout and "GAE, scan against loop" in done.stdout
    assert len(re.findall(r"\d\.\d\dx", done.stdout)) == 2


def test_a_size_of_zero_is_refused_by_the_benchmark():
    done = bench_ops("--vocab", "0")
    assert done.returncode == 2
    assert "every number must be 1 or more" in done.stderr
