"""The error tables of plan/README.md: predictions against published measurements.

    python -m onetrunk.plan.errors

Memory is compared point by point, on the half of the points that the constants were not fitted on. Times are compared
as ratios within a source, and by their order, because other software, batch sizes and lengths are only partly known.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onetrunk.costs import ModelShape, forward_flops, head_flops
from onetrunk.plan.hardware import Device, load_catalog
from onetrunk.plan.job import Job, Lengths
from onetrunk.plan.memory import Measured, fit_constants, halves, measured_rows, relative_errors
from onetrunk.plan.shapes import ModelFacts, read_model
from onetrunk.plan.timing import LOCAL, SERVER, SampleLayout, generate_time, product_seconds
from onetrunk.utils.yaml_files import read_yaml

PUBLISHED = Path(__file__).parent / "measured" / "published.yaml"
DEVICES = {
    "RTX A6000": "A6000-48GB", "H100 80GB HBM3": "H100-80GB", "H200": "H200-141GB", "B200": "B200-180GB",
}  # fmt: skip
WITHIN = 0.10
STEP_WITHIN = 0.30
# Rows of a forward and of a replica that decode, for runs whose own are not published.
ROWS, SERVED_ROWS, HYBRID_ROWS = 4, 256, 8


@dataclass(frozen=True)
class Compared:
    """A published number next to the predicted one."""

    what: str
    predicted: float
    measured: float


@functools.cache
def published() -> dict[str, Any]:
    """Return the content of published.yaml."""
    return read_yaml(PUBLISHED)[0]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's correlation of the order of two lists; 1: the same order."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return [float(order.index(i)) for i in range(len(values))]

    return statistics.correlation(ranks(first), ranks(second))


def scale(rows: Sequence[Compared]) -> float:
    """Return the geometric mean of predicted over measured: the one factor that ratios leave open."""
    return math.exp(statistics.fmean(math.log(row.predicted / row.measured) for row in rows))


def ratio_errors(rows: Sequence[Compared]) -> list[float]:
    """Return predicted over measured of each row, minus 1, after the common factor."""
    common = scale(rows)
    return [row.predicted / row.measured / common - 1 for row in rows]


# --- memory ---------------------------------------------------------------------------------------------------------


def cross_checked() -> list[tuple[Measured, float]]:
    """Return every measured training with its relative error, under constants fitted on the other half."""
    first, second = halves(measured_rows())
    pairs = []
    for fitted, tested in ((first, second), (second, first)):
        constants = fit_constants(fitted)
        pairs += list(zip(tested, relative_errors(tested, constants), strict=True))
    return pairs


# --- times ----------------------------------------------------------------------------------------------------------


def step_seconds(row: Measured, device: Device) -> float:
    """Return the predicted seconds of a measured training step."""
    training, shape = row.training, row.training.shape
    tokens = training.tokens * row.micro_batches
    passes = 4.0 if training.is_full else 3.0
    attention = 4 * tokens * training.tokens / 2 * shape.num_layers * shape.num_heads * shape.head_dim
    matrix = forward_flops(shape, 1, shape.num_layers) + head_flops(shape, 1)
    products = product_seconds(
        shape,
        device,
        2.0,
        matrix_flops=matrix * tokens * passes,
        attention_flops=attention * 4.5,
        tokens=training.tokens,
    )
    rates = device.rates
    per_layer = rates.layer_s + (0.0 if training.is_full else rates.adapter_layer_s)
    return products + row.micro_batches * shape.num_layers * per_layer / device.kernels


def compared_steps() -> list[Compared]:
    """Return the step times of the measured trainings."""
    devices = load_catalog().devices
    return [Compared(r.label, step_seconds(r, devices[DEVICES[r.gpu]]), r.step_s) for r in measured_rows()]


def _full_job(model: ModelFacts, rows: int, lengths: Lengths) -> Job:
    return Job(model, 2.0, 2.0, lengths, adapted_layers=model.shape.num_layers, rollout_batch_size=rows)


def full_ppo_seconds(
    model: ModelFacts, critic: ModelShape, device: Device, gpus: int, rows: int, lengths: Lengths, engine: str
) -> dict[str, float]:
    """Return the seconds of one pass of PPO that trains policy and critic in full, as the compared software does.

    Args:
        model: policy and reference.
        critic: critic and reward model.
        device, gpus: all of them in every phase.
        rows: of a rollout.
        lengths: of its rows.
        engine: LOCAL: the trainer's own loop over a few rows at a time, with gathered weights; SERVER: an engine.
    """
    shape = model.shape
    tensor = max(1, 2 ** math.ceil(math.log2(max(1, shape.parameters * 2 / (0.5 * device.memory_gib * 2**30)))))
    replicas = max(1, gpus // tensor)
    cap = SERVED_ROWS if engine == SERVER else HYBRID_ROWS * tensor
    layout = SampleLayout(device, engine, replicas, tensor, rows=cap)
    generate = generate_time(_full_job(model, rows, lengths), layout).seconds
    tokens = rows * lengths.row / gpus
    score = update = 0.0
    for part in (shape, critic):
        flops = forward_flops(part, 1, part.num_layers) * tokens
        once = product_seconds(part, device, 2.0, matrix_flops=flops, tokens=ROWS * lengths.row)
        forwards = max(1.0, tokens / (ROWS * lengths.row))
        # Weights of other GPUs are gathered for every forward and backward.
        wire = 2.0 * part.parameters / (device.link_gb_s if gpus <= 8 else device.network_gb_s) / 1e9
        score += 2 * (once + forwards * part.num_layers * device.rates.layer_s / 3)
        update += 4 * once + forwards * max(part.num_layers * device.rates.layer_s, 3 * wire - 4 * once / forwards)
    return {"generate": generate, "score": score, "update": update}


def compared_deepspeed_chat() -> list[Compared]:
    """Return the hours of DeepSpeed-Chat's third step."""
    devices, critic = load_catalog().devices, read_model("facebook/opt-350m").shape
    lengths, rows = Lengths(256, 256, 256, 256, 0.0), []
    for actor, gpus, name, hours in published()["deepspeed_chat"]["rows"]:
        model = read_model(actor)
        seconds = sum(full_ppo_seconds(model, critic, devices[name], gpus, 1024, lengths, LOCAL).values())
        rows.append(Compared(f"{actor.split('/')[1]} on {gpus}", seconds * 131_900 / 1024 / 3600, hours))
    return rows


def compared_openrlhf() -> tuple[list[Compared], list[Compared]]:
    """Return the seconds of DeepSpeed-Chat and of OpenRLHF."""
    devices, lengths = load_catalog().devices, Lengths(512, 512, 1024, 512)
    slow, fast = [], []
    for name, gpus, device, chat, openrlhf in published()["openrlhf"]["rows"]:
        model = read_model(name)
        for engine, measured, rows in ((LOCAL, chat, slow), (SERVER, openrlhf, fast)):
            seconds = sum(full_ppo_seconds(model, model.shape, devices[device], gpus, 1024, lengths, engine).values())
            rows.append(Compared(f"{name.split('/')[1]} on {gpus}", seconds, measured))
    return slow, fast


def compared_engines() -> list[Compared]:
    """Return how many times longer DeepSpeed-Chat takes than OpenRLHF."""
    slow, fast = compared_openrlhf()
    return [
        Compared(a.what, a.predicted / b.predicted, a.measured / b.measured) for a, b in zip(slow, fast, strict=True)
    ]


def compared_verl() -> list[Compared]:
    """Return how many times faster asynchronous PPO is than colocated, by GPUs; long completions with a heavy tail."""
    device, model = load_catalog().devices["H20-96GB"], read_model("Qwen/Qwen2.5-Math-7B")
    lengths, rows, compared = Lengths(512, 3000, 28_672, 512, 1.0), 8192, []
    for gpus, colocated, _, _, _, asynchronous in published()["verl"]["rows"]:
        whole = full_ppo_seconds(model, model.shape, device, gpus, rows, lengths, SERVER)
        half = full_ppo_seconds(model, model.shape, device, gpus // 2, rows, lengths, SERVER)
        layout = SampleLayout(device, SERVER, gpus // 2, rows=SERVED_ROWS)
        sampling = generate_time(_full_job(model, rows, lengths), layout)
        overlapped = max(sampling.seconds - sampling.tail, half["score"] + half["update"])
        compared.append(Compared(f"{gpus} H20", sum(whole.values()) / overlapped, colocated / asynchronous))
    return compared


def compared_hf() -> list[Compared]:
    """Return the gain of leaving checkpointing out, and the tokens per second of two servers."""
    device, model = load_catalog().devices["H200-141GB"], read_model("Qwen/Qwen2.5-Math-1.5B")
    shape, rates = model.shape, device.rates
    flops = forward_flops(shape, 1, shape.num_layers) * 16384
    once = product_seconds(shape, device, 2.0, matrix_flops=flops, tokens=16384)
    launches = shape.num_layers * (rates.layer_s + rates.adapter_layer_s)
    less = shape.num_layers * (0.75 * rates.layer_s + rates.adapter_layer_s)
    lengths = Lengths(200, 600, 2048, 200)
    layout = SampleLayout(device, SERVER, 2, rows=SERVED_ROWS)
    rows = 4096
    seconds = generate_time(replace(_full_job(model, rows, lengths), lora_rank=16), layout).seconds
    packed, bare, throughput = (row[1] for row in published()["hf_async"]["rows"])
    return [
        Compared("checkpointing over none", (3 * once + launches) / (2 * once + less), packed / bare),
        Compared("tokens per second", rows * lengths.completion / seconds, throughput),
    ]


def markdown() -> str:
    """Return the tables of the README."""
    checked = cross_checked()
    within = sum(abs(error) <= WITHIN for _, error in checked)
    lines = [f"memory: {within} of {len(checked)} points within {WITHIN:.0%}", ""]
    lines += ["| training | measured GiB | error |", "|---|---|---|"]
    lines += [f"| {row.label} | {row.peak_gib:.2f} | {error:+.1%} |" for row, error in checked]
    tables = {
        "steps of prime-rl": compared_steps(),
        "DeepSpeed-Chat": compared_deepspeed_chat(),
        "OpenRLHF README, DSChat": compared_openrlhf()[0],
        "OpenRLHF README, OpenRLHF": compared_openrlhf()[1],
    }
    for title, rows in tables.items():
        errors = ratio_errors(rows)
        order = rank_correlation([r.predicted for r in rows], [r.measured for r in rows])
        lines += ["", f"{title}: factor {scale(rows):.2f}, rank correlation {order:.2f}", ""]
        lines += ["| what | predicted | measured | ratio error |", "|---|---|---|---|"]
        for row, error in zip(rows, errors, strict=True):
            lines.append(f"| {row.what} | {row.predicted:.4g} | {row.measured:.4g} | {error:+.0%} |")
    ratios = {
        "OpenRLHF README, DSChat over OpenRLHF": compared_engines(),
        "verl, colocated over asynchronous": compared_verl(),
        "HF blog": compared_hf(),
    }
    for title, rows in ratios.items():
        lines += ["", title, "", "| what | predicted | measured | error |", "|---|---|---|---|"]
        for row in rows:
            error = row.predicted / row.measured - 1
            lines.append(f"| {row.what} | {row.predicted:.4g} | {row.measured:.4g} | {error:+.0%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(markdown() + "\n")
