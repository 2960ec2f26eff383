"""The planner's predictions against published measurements.

    python -m scripts.plan.errors

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

from onetrunk.costs import ModelShape
from onetrunk.plan.costs import forward_flops
from onetrunk.plan.hardware import Device, load_catalog
from onetrunk.plan.job import Job, Lengths, ModelFacts, read_model
from onetrunk.plan.timing import LOCAL, SERVER, SampleLayout, generate_time, product_seconds
from onetrunk.utils.files import read_yaml
from scripts.plan.measurements import (
    Measured,
    Step,
    fit_constants,
    halves,
    left_out,
    measured_rows,
    relative_errors,
    step_seconds,
)

PUBLISHED = Path(__file__).parent / "measured" / "published.yaml"
WITHIN = 0.10
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


def cross_checked() -> list[tuple[Measured, float]]:
    """Return every measured training with its relative error, under constants fitted on the other half."""
    first, second = halves(measured_rows())
    pairs = []
    for fitted, tested in ((first, second), (second, first)):
        constants = fit_constants(fitted)
        pairs += list(zip(tested, relative_errors(tested, constants), strict=True))
    return pairs


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
        launches = part.num_layers * device.rates.layer_s
        score += 2 * forwards * max(once / forwards, launches / 3)
        update += forwards * max(4 * once / forwards, launches, 3 * wire)
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
    kept = Step("HF blog", device, model.shape, 7, 2.0, 1, 16384, 1, True, 1.0)
    packed_s, bare_s = (step_seconds(replace(kept, is_checkpointed=c), device.rates) for c in (True, False))
    lengths = Lengths(200, 600, 2048, 200)
    layout = SampleLayout(device, SERVER, 2, rows=SERVED_ROWS)
    rows = 4096
    seconds = generate_time(replace(_full_job(model, rows, lengths), lora_rank=16), layout).seconds
    packed, bare, throughput = (row[1] for row in published()["hf_async"]["rows"])
    return [
        Compared("checkpointing over none", packed_s / bare_s, packed / bare),
        Compared("tokens per second", rows * lengths.completion / seconds, throughput),
    ]


def markdown() -> str:
    """Return the tables of the README."""
    checked = cross_checked()
    within = sum(abs(error) <= WITHIN for _, error in checked)
    lines = [f"memory: {within} of {len(checked)} points within {WITHIN:.0%}", ""]
    lines += ["| training | measured GiB | error |", "|---|---|---|"]
    lines += [f"| {row.label} | {row.peak_gib:.2f} | {error:+.1%} |" for row, error in checked]
    lines += ["", "step times of a program, by rates that were fitted to the others; measured over predicted", ""]
    lines += ["| program | steps | least | median | most |", "|---|---|---|---|---|"]
    for program, ratios in left_out().items():
        numbers = " | ".join(f"{pick(ratios):.2f}" for pick in (min, statistics.median, max))
        lines.append(f"| {program} | {len(ratios)} | {numbers} |")
    tables = {
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
