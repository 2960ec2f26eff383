"""Measurements of this machine (`onetrunk plan --calibrate`).

`calibrate` lets random models of a few widths and depths run what a trainer runs: decoding, scoring forwards, and
forwards with backward. The rates are fitted such that the formulas of `plan/timing.py` give the measured seconds.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

from onetrunk.costs import ModelShape, host_memory_bytes
from onetrunk.models.build import build_trunk
from onetrunk.models.trunk import TrunkModel
from onetrunk.ops.packing import make_pack
from onetrunk.parallel.groups import pack_outputs
from onetrunk.plan.hardware import GIB, Catalog, Device, Rates, devices_like
from onetrunk.plan.job import Job, Lengths, ModelFacts
from onetrunk.plan.timing import LOCAL, SampleLayout, TrainLayout, generate_time, score_time, update_time
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.local import LocalBackend
from onetrunk.types import to_device
from onetrunk.utils.files import atomic_write_text

# Width and layers of the models, rows of a forward, and tokens of prompts and completions, on a CPU and on a GPU.
CPU_SHAPES, GPU_SHAPES = ((48, 2), (96, 4), (192, 2), (256, 6)), ((512, 4), (1024, 8), (2048, 4))
CPU_ROWS, GPU_ROWS = (8, 32, 96), (8, 64)
CPU_TOKENS, GPU_TOKENS = (16, 24), (128, 128)
VOCAB, RANK = 512, 8
# A measurement is the median of this many runs, after one that is not counted.
RUNS = 3
# What is fitted to trainings and to decoding, and where the search begins.
TRAINING = {
    "matmul": 0.3, "layer_s": 1e-3, "adapter_layer_s": 1e-3, "forward_s": 1e-3, "token_s": 1e-6, "hidden_half": 64.0,
    "tokens_half": 64.0,
}  # fmt: skip
DECODING = {"decode_matmul": 0.3, "bandwidth": 0.5, "decode_layer_s": 3e-4, "decode_step_s": 1e-3, "row_s": 1e-5}
# Steps of the search, as factors: it ends at the smallest one.
WIDEST, NARROWEST = 4.0, 0.02
# Linux keeps the peak of the memory of a process that has imported what a PPO run imports.
STATUS = Path("/proc/self/status")
IMPORTS = f"import onetrunk.stages.ppo; print(open('{STATUS}').read().partition('VmHWM:')[2].split()[0])"


@dataclass(frozen=True)
class Observation:
    """A measured duration; `kind` is decode, score or update."""

    kind: str
    job: Job
    seconds: float

    def error(self, device: Device) -> float:
        """Return predicted over measured seconds, minus 1."""
        return predicted(self.kind, self.job, device) / self.seconds - 1


def predicted(kind: str, job: Job, device: Device) -> float:
    """Return the seconds that the formulas give for an observation."""
    if kind == "decode":
        return generate_time(job, SampleLayout(device, LOCAL, 1)).seconds
    layout = TrainLayout(device, 1, base_bytes=job.base_bytes, rows=job.microbatch_rows, tokens=2**31)
    return {"score": score_time, "update": update_time}[kind](job, layout).seconds


def run(path: Path, catalog: Catalog) -> None:
    """Measure this machine, write its hardware file, and print what was measured."""
    device, observations = calibrate(catalog)
    atomic_write_text(path, hardware_text(device))
    sizes = sorted(abs(seen.error(device)) for seen in observations)
    print(
        f"{device.name}: {device.tflops * 1e3:.1f} GFLOP/s in large products,"
        f" {device.bandwidth_gb_s:.1f} GB/s, {device.memory_gib:.1f} GiB\n"
        f"a process takes {device.rates.runtime_gib:.2f} GiB before it has a model\n"
        f"{len(sizes)} measurements; the formulas repeat them within {statistics.median(sizes):.0%} (median),"
        f" {sizes[int(0.9 * (len(sizes) - 1))]:.0%} (9 of 10)\n"
        f"wrote {path}; use it with --hardware_file {path} --hardware {device.name}"
    )


def calibrate(catalog: Catalog) -> tuple[Device, list[Observation]]:
    """Return the measured machine (its GPU if torch has one, else one process on its CPU) and the measurements."""
    on_gpu, device = torch.cuda.is_available(), _measured_device(catalog)
    observations, steps = [], []
    for hidden, layers in GPU_SHAPES if on_gpu else CPU_SHAPES:
        job = _job(hidden, layers, on_gpu)
        model = _model(job.shape, on_gpu)
        for rows in GPU_ROWS if on_gpu else CPU_ROWS:
            observations += list(_observe(model, replace(job, rollout_batch_size=rows, microbatch_rows=rows)))
        steps.append(_optimizer_seconds(model))
    rates = replace(fit_rates(device, observations), step_s=statistics.median(steps))
    if not on_gpu and STATUS.is_file():
        done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
        rates = replace(rates, runtime_gib=int(done.stdout) * 1024 / GIB)
    return replace(device, rates=rates), observations


def fit_rates(device: Device, observations: Sequence[Observation]) -> Rates:
    """Return the rates with which the formulas come closest to measured seconds."""
    rates = Rates()
    for start, kinds in ((TRAINING, ("score", "update")), (DECODING, ("decode",))):
        own = [seen for seen in observations if seen.kind in kinds]

        def with_values(values: Sequence[float], start: dict = start, known: Rates = rates) -> Rates:
            found = dict(zip(start, values, strict=True))
            return replace(known, **found, **({"attention": found["matmul"]} if "matmul" in found else {}))

        def mean_error(values: Sequence[float], own: list = own, rates_of: Callable = with_values) -> float:
            tried = replace(device, rates=rates_of(values))
            return statistics.fmean(abs(seen.error(tried)) for seen in own)

        rates = with_values(descend(mean_error, list(start.values()), WIDEST, NARROWEST))
    return rates


def descend(
    error: Callable[[Sequence[float]], float], start: Sequence[float], widest: float, narrowest: float
) -> list[float]:
    """Return the numbers with the least error, by factors that shrink: of one number, or of two against each other."""
    best, width = (error(start), list(start)), widest
    while width > narrowest:
        # One more place than numbers: a pair with it changes one number alone.
        tried = [
            [v * (1 + width if i == up else 1 / (1 + width) if i == down else 1) for i, v in enumerate(best[1])]
            for up, down in itertools.permutations(range(len(start) + 1), 2)
        ]
        least = min(((error(values), values) for values in tried), key=lambda entry: entry[0])
        if least[0] < best[0] - 1e-9:
            best = least
        else:
            width /= 2
    return best[1]


def hardware_text(device: Device) -> str:
    """Return the hardware file of a measured machine, with six significant digits of each number."""

    def rounded(value: Any) -> Any:
        return float(f"{value:.6g}") if isinstance(value, float) else value

    values = {name: rounded(value) for name, value in asdict(device).items() if name != "name" and value is not None}
    values["rates"] = {name: rounded(value) for name, value in asdict(device.rates).items()}
    head = "# Measured by onetrunk plan --calibrate. Set usd_per_hour to what this machine costs you.\n"
    return head + yaml.safe_dump({"devices": {device.name: values}}, sort_keys=False)


def _measured_device(catalog: Catalog) -> Device:
    """Return this machine with its measured peak and bandwidth; the rest is of the known device that comes closest."""
    on_gpu = torch.cuda.is_available()
    memory = torch.cuda.get_device_properties(0).total_memory / GIB if on_gpu else host_memory_bytes() / GIB
    if on_gpu:
        near = devices_like(torch.cuda.get_device_name(), catalog) or [catalog.devices["H100-80GB"]]
        known = replace(min(near, key=lambda device: abs(device.memory_gib - memory)), name="THIS-GPU")
    else:
        known = replace(catalog.devices["CPU"], name="THIS-CPU", host_gib=memory)
    where = {"device": "cuda" if on_gpu else "cpu"}
    size, dtype, copied = (8192, torch.bfloat16, 2**26) if on_gpu else (1024, torch.float32, 2**24)
    a, b = (torch.randn(size, size, dtype=dtype, **where) for _ in range(2))
    source, target = torch.ones(copied, **where), torch.empty(copied, **where)
    flops = 2 * size**3 / _median_seconds(lambda: a @ b)
    moved = 2 * source.nbytes / _median_seconds(lambda: target.copy_(source))
    return replace(known, memory_gib=memory, tflops=flops / 1e12, bandwidth_gb_s=moved / 1e9)


def _median_seconds(work: Callable[[], Any]) -> float:
    """Return the seconds of some work; with one CPU thread processor time, which other programs do not lengthen."""
    on_gpu, times = torch.cuda.is_available(), []
    clock = time.perf_counter if on_gpu or torch.get_num_threads() > 1 else time.process_time
    for _ in range(RUNS + 1):
        start = clock()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(clock() - start)
    return statistics.median(times[1:])


def _job(hidden: int, layers: int, on_gpu: bool) -> Job:
    heads = hidden // (64 if on_gpu else 16)
    shape = ModelShape(VOCAB, hidden, layers, 3 * hidden, heads, heads, hidden // heads)
    prompt, completion = GPU_TOKENS if on_gpu else CPU_TOKENS
    itemsize = 2.0 if on_gpu else 4.0
    return Job(
        ModelFacts("random", shape, itemsize, "calibration"), itemsize, itemsize,
        Lengths(prompt, completion, completion, prompt, 0.0), RANK, layers, num_ppo_epochs=1, is_padding_free=True,
    )  # fmt: skip


def _model(shape: ModelShape, on_gpu: bool) -> TrunkModel:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=shape.hidden_size, num_hidden_layers=shape.num_layers,
        intermediate_size=shape.intermediate_size, num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    base = LlamaForCausalLM(config)
    base = base.to("cuda", torch.bfloat16) if on_gpu else base
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    trunk = build_trunk(base, lora)
    if on_gpu:  # As accelerate does for a run, whose bf16 is on by default there.
        trunk.forward = torch.autocast("cuda", torch.bfloat16)(trunk.forward)
    return trunk


def _observe(model: TrunkModel, job: Job) -> Iterator[Observation]:
    """Yield what one model takes for a batch: decoding, scoring, and forward with backward."""

    def ids(row: int, length: int) -> list[int]:
        return [3 + (7 * row + i) % (VOCAB - 3) for i in range(length)]

    prompts = [ids(row, job.lengths.longest_prompt) for row in range(job.rows)]
    backend = LocalBackend()
    backend.sync(model, 0)
    params, keys = SamplingParams(job.lengths.longest), [(0, 0, row) for row in range(job.rows)]
    model.eval()
    yield Observation("decode", job, _median_seconds(lambda: backend.generate(prompts, params, keys)))
    completions = [ids(row, job.lengths.longest) for row in range(job.rows)]
    pack = to_device(make_pack(prompts, completions, 0), next(model.parameters()).device)

    def score() -> None:
        with torch.no_grad():
            list(pack_outputs(model, [pack], ("policy", "value", "reference"), temperature=1.0))

    yield Observation("score", job, _median_seconds(score))
    model.train()

    def update() -> None:
        model(pack=pack, roles=("policy",)).logprobs.sum().backward()
        model.zero_grad()

    yield Observation("update", job, _median_seconds(update))


def _optimizer_seconds(model: TrunkModel) -> float:
    trained = [p for p in model.parameters() if p.requires_grad]
    for weight in trained:
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW(trained, lr=1e-9)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()

    return _median_seconds(step)
