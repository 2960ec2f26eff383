"""The scripts that are not stages: they run, and reject bad options with a message."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def bench_ops(*options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "scripts/bench_ops.py", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)


SMALL = "--tokens 8 --hidden 8 --vocab 32 --prompts 2 --completion 4 --repeats 1".split()


@pytest.mark.slow
def test_the_benchmark_of_the_parts_prints_a_ratio_for_each_and_the_memory_of_the_logprobs():
    done = bench_ops(*SMALL)
    assert done.returncode == 0, done.stderr
    assert all(part in done.stdout for part in ("logprobs, fused", "GAE, vectorised", "decode loop against generate"))
    # Training and scoring, three shapes of GAE, the decode loop
    assert len(re.findall(r"\d\.\d\dx", done.stdout)) == 2 + 3 + 1
    assert len(re.findall(r"logprobs, (?:forward and backward|scoring), vocabulary 32 ", done.stdout)) == 2


@pytest.mark.slow
def test_the_fused_logprobs_take_a_small_part_of_the_memory_of_the_naive_ones():
    # Naive: several [512, 20000] float32 tensors of 39 MiB; fused: tiles of 4 MiB
    done = bench_ops("--tokens", "512", "--hidden", "32", "--vocab", "20000", "--only", "memory")
    assert done.returncode == 0, done.stderr
    shares = [float(share) for share in re.findall(r"([\d.]+)%", done.stdout)]
    assert len(shares) == 2 and max(shares) < 25, done.stdout
