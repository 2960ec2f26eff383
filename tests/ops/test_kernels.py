"""The Triton kernels: their theorems in Triton's interpreter or on a GPU, and that they compile for GPUs."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from onetrunk.ops import Head, fused_token_logprobs
from onetrunk.ops.kernels import SWITCH, runs_kernels
from tests.processes import ROOT, python

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton; pip install -e '.[dev]'")


def run(*command, **environment):
    # A process of its own: Triton decides at its import between its interpreter and its compiler.
    return python(*command, cwd=ROOT, **{"OMP_NUM_THREADS": "1", **environment}).stdout


def theorems(**environment):
    plain = ["-p", "no:xdist", "-p", "no:cacheprovider"]
    said = run("-m", "pytest", "-q", *plain, Path(__file__).with_name("kernel_theorems.py"), **environment)
    assert "passed" in said and "skipped" not in said


@pytest.mark.slow
@needs_triton
def test_the_kernels_are_their_naive_twins_in_the_interpreter():
    theorems(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@needs_triton
@pytest.mark.gpu
def test_the_kernels_are_their_naive_twins_on_a_gpu():
    theorems(TRITON_INTERPRET="0")


@needs_triton
@pytest.mark.slow
def test_the_kernels_compile_for_gpus_without_one_and_keep_all_registers(tmp_path):
    table = run(
        "-W", "ignore", "scripts/bench/kernel_registers.py", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)
    )
    rows = [line.split(" | ") for line in table.splitlines()[4:]]
    assert len(rows) == 3 and {row[4] for row in rows} == {"0"}
    for row in rows:
        # Of bfloat16 and float32 logits on three kinds of GPU.
        assert all(0 < int(number) < 255 for pair in row[1:4] for number in pair.split(", "))


def test_kernels_run_where_the_switch_says_and_otherwise_on_a_gpu(monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    assert not runs_kernels(torch.zeros(1))
    for setting, expected in (("on", True), ("off", False), ("", False)):
        monkeypatch.setenv(SWITCH, setting)
        assert runs_kernels(torch.zeros(1)) is expected
    monkeypatch.setenv(SWITCH, "maybe")
    with pytest.raises(ValueError, match="ONETRUNK_KERNELS is 'maybe'; set it to on or off"):
        fused_token_logprobs(torch.zeros(1, 1), Head(torch.zeros(1, 1)), torch.zeros(1, dtype=torch.int64))


def test_the_room_needs_no_triton_where_no_kernel_runs():
    code = "import sys; sys.modules['triton'] = None\n"
    code += "import torch; from onetrunk.ops import Head, fused_token_logprobs\n"
    code += "x = torch.zeros(2, 1); y = torch.zeros(2, dtype=torch.int64)\n"
    code += "print(fused_token_logprobs(x, Head(x), y)[0].sum())"
    run("-c", code)
