"""`onetrunk plan --calibrate`: measure this machine in about a minute, and write it as a hardware file.

Random models of a few widths and depths run what a trainer runs: decoding, scoring forwards, and forwards with
backward. The rates are fitted such that the formulas of `timing.py` give the measured seconds. This is the one module
of the room that imports torch, and only when it runs.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import yaml

from onetrunk.costs import ModelShape, host_memory_bytes
from onetrunk.plan.hardware import GIB, Catalog, Device, find_device
from onetrunk.plan.job import Job, Lengths
from onetrunk.plan.rates import Rates, non_negative_fit
from onetrunk.plan.shapes import ModelFacts
from onetrunk.plan.timing import LOCAL, SampleLayout, TrainLayout, generate_time, score_time, update_time

if TYPE_CHECKING:
    from onetrunk.models.trunk import TrunkModel

# Width and layers of the models, and rows of a forward, on a CPU and on a GPU.
CPU_SHAPES, GPU_SHAPES = ((48, 2), (96, 4), (192, 2), (256, 6)), ((512, 4), (1024, 8), (2048, 4))
CPU_ROWS, GPU_ROWS = (8, 32, 96), (8, 64)
PROMPT, COMPLETION = 16, 24
GPU_PROMPT, GPU_COMPLETION = 128, 128
VOCAB, RANK = 512, 8
# A measurement is the median of this many runs, after one that is not counted.
RUNS = 3
HALVES = (0.0, 16.0, 64.0, 256.0, 1024.0)
# Rates of launches, which a GPU's work hides or which hide it; and rounds in which a fit finds out which of the two.
LAUNCHES = ("layer_s", "adapter_layer_s", "forward_s", "decode_layer_s", "decode_step_s", "row_s")
ROUNDS = 6
# The kernel's own peak of the process: getrusage would count the memory of the parent, from which it was forked.
IMPORTS = """
import onetrunk.stages.ppo
try:
    lines = open("/proc/self/status").read().splitlines()
    print(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")))
except (OSError, StopIteration):
    import resource, sys
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
"""


@dataclass(frozen=True)
class Observation:
    """A measured duration; `kind` is decode, score or update."""

    kind: str
    job: Job
    rows: int
    seconds: float


@dataclass(frozen=True)
class Calibration:
    """A measured machine, and how well the formulas repeat its measurements."""

    device: Device
    observations: tuple[Observation, ...]

    def errors(self) -> list[tuple[Observation, float]]:
        """Return each observation with predicted over measured seconds, minus 1."""
        return [(seen, predicted(seen, self.device) / seen.seconds - 1) for seen in self.observations]

    def lines(self) -> list[str]:
        """Return what was measured, for people."""
        sizes = [abs(error) for _, error in self.errors()]
        rates = self.device.rates
        return [
            f"{self.device.name}: {self.device.tflops * 1e3:.1f} GFLOP/s in large products,"
            f" {self.device.bandwidth_gb_s:.1f} GB/s, {self.device.memory_gib:.1f} GiB",
            f"a process takes {rates.runtime_gib:.2f} GiB before it has a model",
            f"{len(sizes)} measurements; the formulas repeat them within {statistics.median(sizes):.0%} (median),"
            f" {sorted(sizes)[int(0.9 * (len(sizes) - 1))]:.0%} (9 of 10)",
        ]


def calibrate(catalog: Catalog) -> Calibration:
    """Return the measured machine: its GPU if torch has one, else one process on its CPU."""
    import torch

    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    device = _device(catalog, torch.cuda.get_device_name() if on_gpu else None)
    device = replace(device, tflops=_peak(dtype) / 1e12, bandwidth_gb_s=_bandwidth() / 1e9)
    observations, steps = [], []
    shapes, rows = (GPU_SHAPES, GPU_ROWS) if on_gpu else (CPU_SHAPES, CPU_ROWS)
    for hidden, layers in shapes:
        model = _model(hidden, layers, dtype)
        for count in rows:
            observations += list(_observe(model, hidden, layers, count, on_gpu))
        steps.append(_optimizer_seconds(model))
        del model
        gc.collect()
    device = replace(device, rates=fit_rates(device, observations))
    runtime = 0.7 if on_gpu else _imported_gib()
    device = replace(device, rates=replace(device.rates, step_s=statistics.median(steps), runtime_gib=runtime))
    return Calibration(device, tuple(observations))


def fit_rates(device: Device, observations: list[Observation]) -> Rates:
    """Return the rates with which the formulas come closest to measured seconds."""
    training = [seen for seen in observations if seen.kind != "decode"]
    decoding = [seen for seen in observations if seen.kind == "decode"]
    names = ("matmul", "layer_s", "adapter_layer_s", "forward_s", "token_s")
    best, rates = None, Rates()
    for hidden_half in HALVES:
        for tokens_half in HALVES:
            tried = _fitted(device, training, names, Rates(hidden_half=hidden_half, tokens_half=tokens_half))
            error = _mean_error(replace(device, rates=tried), training)
            if best is None or error < best:
                best, rates = error, tried
    return _fitted(device, decoding, ("decode_matmul", "bandwidth", "decode_layer_s", "decode_step_s", "row_s"), rates)


def _fitted(device: Device, observations: list[Observation], names: tuple[str, ...], base: Rates) -> Rates:
    """Return `base` with some rates fitted; the seconds are linear in times, and in one over shares.

    On a GPU an observation is either bound by launches or not, so only these or only the other rates count in its row.
    """
    shares = ("matmul", "decode_matmul", "bandwidth")
    # What is not asked for costs nothing.
    nothing = replace(base, attention=1e30, **{name: 1e30 if name in shares else 0.0 for name in names})
    rows, targets = [], []
    for seen in observations:
        row, known = [], predicted(seen, replace(device, rates=nothing)) / seen.seconds
        targets.append(1.0 - known)
        for name in names:
            only = replace(nothing, **{name: 1.0})
            only = replace(only, attention=1.0 if name in ("matmul", "decode_matmul") else 1e30)
            row.append(predicted(seen, replace(device, rates=only)) / seen.seconds - known)
        rows.append(row)
    own = [name in LAUNCHES for name in names]
    counted = rows
    for _ in range(1 if device.is_cpu else ROUNDS):
        solution = non_negative_fit(counted, targets, floor=0.02)
        counted = []
        for row in rows:
            launched = sum(v * s for v, s, is_own in zip(row, solution, own, strict=True) if is_own)
            computed = sum(v * s for v, s in zip(row, solution, strict=True)) - launched
            counted.append([v if is_own == (launched > computed) else 0.0 for v, is_own in zip(row, own, strict=True)])
    values = dict(zip(names, solution, strict=True))
    found = {name: 1 / max(value, 1e-6) if name in shares else value for name, value in values.items()}
    if not device.is_cpu:
        # Launches hid it in every observation, so nothing is known about it.
        found |= {name: getattr(base, name) for name, value in values.items() if name in shares and not value}
    if "matmul" in found:
        found["attention"] = found["matmul"]
    return replace(base, **found)


def predicted(seen: Observation, device: Device) -> float:
    """Return the seconds that the formulas give for an observation."""
    if seen.kind == "decode":
        return generate_time(seen.job, SampleLayout(device, LOCAL, 1)).seconds
    layout = TrainLayout(device, 1, base_bytes=seen.job.base_bytes, rows=seen.rows, tokens=2**31)
    time_of = score_time if seen.kind == "score" else update_time
    return time_of(seen.job, layout).seconds


def _mean_error(device: Device, observations: list[Observation]) -> float:
    return statistics.fmean(abs(predicted(seen, device) / seen.seconds - 1) for seen in observations)


# --- measurements ---------------------------------------------------------------------------------------------------


def _device(catalog: Catalog, gpu: str | None) -> Device:
    """Return the known device that comes closest, with the name and the memory of this machine."""
    import torch

    if gpu is None:
        cpu = next(device for device in catalog.devices.values() if device.is_cpu)
        memory = host_memory_bytes() / GIB
        return replace(cpu, name="THIS-CPU", memory_gib=memory, host_gib=memory)
    memory = torch.cuda.get_device_properties(0).total_memory / GIB
    words = gpu.replace("NVIDIA", "").replace("HBM3", "").split()
    try:
        known = find_device(f"{words[0]}-{round(memory)}", catalog)
    except ValueError:
        known = next((d for n, d in catalog.devices.items() if n.startswith(words[0])), catalog.devices["H100-80GB"])
    return replace(known, name="THIS-GPU", memory_gib=memory)


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _clock() -> Callable[[], float]:
    """Return the clock: with one thread on a CPU, processor time, which other programs do not lengthen."""
    import torch

    is_alone = not torch.cuda.is_available() and torch.get_num_threads() == 1
    return time.process_time if is_alone else time.perf_counter


def _median_seconds(work: Callable[[], Any]) -> float:
    clock = _clock()
    work()
    _synchronize()
    times = []
    for _ in range(RUNS):
        start = clock()
        work()
        _synchronize()
        times.append(clock() - start)
    return statistics.median(times)


def _peak(dtype: Any) -> float:
    import torch

    size = 8192 if torch.cuda.is_available() else 1024
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    a, b = (torch.randn(size, size, dtype=dtype, device=kind) for _ in range(2))
    return 2 * size**3 / _median_seconds(lambda: a @ b)


def _bandwidth() -> float:
    import torch

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.ones(2**26 if kind == "cuda" else 2**24, device=kind)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_seconds(lambda: target.copy_(source))


def _model(hidden: int, layers: int, dtype: Any) -> TrunkModel:
    import torch
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM

    from onetrunk.models.build import build_trunk

    head = 16 if hidden < 512 else 64
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, num_hidden_layers=layers, intermediate_size=3 * hidden,
        num_attention_heads=hidden // head, num_key_value_heads=hidden // head, max_position_embeddings=512,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    base = LlamaForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu", dtype)
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    return build_trunk(base, lora)


def _job(hidden: int, layers: int, rows: int, on_gpu: bool) -> Job:
    head = 16 if hidden < 512 else 64
    shape = ModelShape(VOCAB, hidden, layers, 3 * hidden, hidden // head, hidden // head, head, is_tied=True)
    prompt, completion = (GPU_PROMPT, GPU_COMPLETION) if on_gpu else (PROMPT, COMPLETION)
    itemsize = 2.0 if on_gpu else 4.0
    return Job(
        ModelFacts("random", shape, itemsize, "calibration"), itemsize, itemsize,
        Lengths(prompt, completion, completion, prompt, 0.0), RANK, layers, rollout_batch_size=rows, num_ppo_epochs=1,
        microbatch_rows=rows, is_padding_free=True,
    )  # fmt: skip


def _observe(model: TrunkModel, hidden: int, layers: int, rows: int, on_gpu: bool) -> Iterator[Observation]:
    """Yield what one model takes for a batch: decoding, scoring, and forward with backward."""
    import torch

    from onetrunk.ops.packing import make_pack
    from onetrunk.rollouts.base import SamplingParams
    from onetrunk.rollouts.local import LocalBackend
    from onetrunk.types import to_device

    job = _job(hidden, layers, rows, on_gpu)
    prompt, completion = int(job.lengths.prompt), job.lengths.longest
    prompts = [[3 + (row + i) % (VOCAB - 3) for i in range(prompt)] for row in range(rows)]
    backend = LocalBackend()
    backend.sync(model, 0)
    params, keys = SamplingParams(completion), [(0, 0, row) for row in range(rows)]
    model.eval()
    yield Observation("decode", job, rows, _median_seconds(lambda: backend.generate(prompts, params, keys)))
    completions = [[3 + (7 * row + i) % (VOCAB - 3) for i in range(completion)] for row in range(rows)]
    pack = to_device(make_pack(prompts, completions, 0), next(model.parameters()).device)

    def score() -> None:
        with torch.no_grad():
            model(pack=pack, roles=("policy", "value", "reference"))

    yield Observation("score", job, rows, _median_seconds(score))
    model.train()

    def update() -> None:
        output = model(pack=pack)
        (output.logprobs.sum() + output.values.sum()).backward()
        model.zero_grad()

    yield Observation("update", job, rows, _median_seconds(update))


def _optimizer_seconds(model: TrunkModel) -> float:
    import torch

    trained = [p for p in model.parameters() if p.requires_grad]
    for weight in trained:
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW(trained, lr=1e-9)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()

    return _median_seconds(step)


def _imported_gib() -> float:
    """Return the memory of a process that has imported what a PPO run imports."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"the imports of a PPO run fail: {done.stderr.strip().splitlines()[-1]}; see onetrunk doctor"
        )
    return int(done.stdout.split()[-1]) / GIB


def hardware_text(measured: Calibration) -> str:
    """Return the hardware file of a measured machine."""
    device = measured.device
    values: dict[str, Any] = {
        f.name: getattr(device, f.name) for f in fields(device) if f.name not in ("name", "rates")
    }
    values = {name: round(v, 6) if isinstance(v, float) else v for name, v in values.items() if v is not None}
    # Six significant digits: a time of microseconds is lost by rounding to a place.
    values["rates"] = {name: float(f"{value:.6g}") for name, value in device.rates.as_values().items()}
    head = "# Measured by onetrunk plan --calibrate. Set usd_per_hour to what this machine costs you.\n"
    return head + yaml.safe_dump({"devices": {device.name: values}}, sort_keys=False)
