"""The Triton kernels: their theorems in Triton's interpreter or on a GPU, and that they compile for GPUs."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from onetrunk.ops import Head, fused_token_logprobs
from onetrunk.ops.kernels import SWITCH, runs_kernels

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton; pip install -e '.[dev]'")


def run(*command, **environment):
    # A process of its own: Triton decides at its import between its interpreter and its compiler.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")} | environment
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)


def theorems(**environment):
    plain = ["-p", "no:xdist", "-p", "no:cacheprovider"]
    done = run("-m", "pytest", "-q", *plain, str(HERE / "kernel_theorems.py"), **environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.slow
@needs_triton
def test_the_kernels_are_their_naive_twins_in_the_interpreter():
    theorems(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@needs_triton
@pytest.mark.gpu
def test_the_kernels_are_their_naive_twins_on_a_gpu():
    theorems(TRITON_INTERPRET="0")


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from onetrunk.ops.kernels import logprob as logprob_kernel

def build(kernel, capability, pointers, arguments):
    kinds = {name: pointers.get(name, "*fp32") for name in kernel.arg_names}
    kinds |= {name: "constexpr" for name in arguments}
    constants = {(kernel.arg_names.index(name),): value for name, value in arguments.items()}
    source = ASTSource(kernel, kinds, constexprs=constants)
    built = triton.compile(source, GPUTarget("cuda", capability, 32), {"enable_fp_fusion": False})
    assert built.asm["cubin"], kernel

tile = dict(LOGIT_SCALE=1.0, SOFTCAP=30.0, TEMPERATURE=0.9, HAS_WEIGHTS=True, HAS_SPREAD=True, IS_DOUBLE=False,
            BLOCK=4096, NUM_BLOCKS=3)
scored = tile | dict(SOFTCAP=0.0, HAS_WEIGHTS=False, HAS_SPREAD=False, BLOCK=64, NUM_BLOCKS=1)
for capability in (80, 90):
    for logits in ("*bf16", "*fp32"):
        pointers = {"logits_ptr": logits, "spread_weights_ptr": logits, "targets_ptr": "*i64", "width": "i32"}
        for arguments in (tile, scored):
            build(logprob_kernel._absorb_row, capability, pointers, arguments)
"""


@needs_triton
@pytest.mark.slow
def test_the_kernels_compile_for_gpus_without_one(tmp_path):
    done = run("-W", "ignore", "-c", COMPILE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]


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
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
