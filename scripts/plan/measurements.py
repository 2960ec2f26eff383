"""Published measurements of trainings, and the fits of the planner's constants to them.

`measured/training.csv` has peaks of memory and step times of one program (prime-rl), `measured/steps.csv` step times
of five others; `measured/published.yaml` names their sources. The planner itself needs none of it: what is fitted
stands as numbers in `onetrunk.plan`, and tests repeat the fits.
"""

from __future__ import annotations

import csv
import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from onetrunk.costs import ModelShape
from onetrunk.plan.costs import forward_flops, head_flops
from onetrunk.plan.hardware import GIB, Device, Rates, load_catalog
from onetrunk.plan.job import FP32, NF4_BYTES, known_shapes, read_model
from onetrunk.plan.memory import FITTED, Constants, Training, features, training_parts
from onetrunk.plan.timing import UNCHECKPOINTED, exposed_seconds, product_seconds, unpack_seconds
from onetrunk.stages.calibrate import descend

MEASURED = Path(__file__).parent / "measured" / "training.csv"
STEPS = MEASURED.with_name("steps.csv")
DEVICES = {
    "RTX A6000": "A6000-48GB", "H100 80GB HBM3": "H100-80GB", "H200": "H200-141GB", "B200": "B200-180GB",
}  # fmt: skip
# Matrices of a layer that adapters on all of them have.
MATRICES = 7
# Without a fused head, per logit: itself, its logprob and its gradient in float32, and two copies in bfloat16.
LOGIT_BYTES = 3 * 4 + 2 * 2
# Of adapters, by program whose peaks are compared.
RANKS = {"Qwen finetune.py": 64, "fms-hf-tuning": 16}
FITTED_RATES = ("matmul", "layer_s", "adapter_layer_s", "unpack_bytes")


def non_negative_fit(rows: Sequence[Sequence[float]], targets: Sequence[float], floor: float) -> list[float]:
    """Return coefficients of at least 0 that make the least sum of absolute errors, by reweighted least squares.

    The sum of absolute errors lets a few points of another kind be wrong, where least squares would bend the rest.

    Args:
        rows: the features of each point.
        targets: of each point.
        floor: errors below it count as equal.
    """
    features, target = np.array(rows, dtype=float), np.array(targets, dtype=float)
    # Columns of equal size, or a small number of a large unit would be taken for none.
    scale = np.abs(features).max(axis=0)
    scale[scale == 0] = 1.0
    features = features / scale
    weights, solution = np.ones(len(target)), np.zeros(features.shape[1])
    for _ in range(200):
        root = np.sqrt(weights)[:, None]
        kept = list(range(features.shape[1]))
        while True:
            values = np.linalg.lstsq(features[:, kept] * root, target * root[:, 0], rcond=None)[0]
            if not kept or values.min() >= -1e-12:
                break
            kept.pop(int(values.argmin()))
        solution = np.zeros(features.shape[1])
        solution[kept] = np.maximum(values, 0)
        weights = 1 / np.maximum(np.abs(features @ solution - target), floor)
    return [float(value) for value in solution / scale]


@dataclass(frozen=True)
class Measured:
    """A row of measured/training.csv."""

    label: str
    key: tuple[str, ...]
    gpu: str
    gpus: int
    micro_batches: int
    training: Training
    is_full: bool
    keeps_logits: bool
    peak_gib: float
    step_s: float
    tokens_per_s: float
    measured_on: str


@functools.cache
def measured_rows() -> tuple[Measured, ...]:
    """Return the measured trainings: a base in float32 that prime-rl shards, with all that trains, over its GPUs."""
    rows = []
    with MEASURED.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            shape = _shape_named(row["model"])
            is_full = row["lora_rank"] == "full"
            trained = shape.parameters if is_full else shape.lora_parameters(int(row["lora_rank"]))
            names = ("model", "type", "lora_rank", "seq_len", "activation_checkpointing", "gpus")
            rows.append(
                Measured(
                    label=" ".join([f"{row['gpus']}x {row['gpu']}", *(row[name] for name in names[:5])]),
                    key=tuple(row[name] for name in names),
                    gpu=row["gpu"],
                    gpus=int(row["gpus"]),
                    micro_batches=int(row["micro_batches"]),
                    training=Training(
                        shape, int(row["seq_len"]), FP32, trained / int(row["gpus"]), shards=int(row["gpus"]),
                        is_offloaded=row["activation_checkpointing"] == "Offload",
                    ),
                    is_full=is_full,
                    keeps_logits=row["type"] == "sft",
                    peak_gib=float(row["peak_memory_gib"]),
                    step_s=float(row["step_time_s"]),
                    tokens_per_s=float(row["tokens_per_s"]),
                    measured_on=row["measured_on"],
                )
            )  # fmt: skip
    return tuple(rows)


def _shape_named(model: str) -> ModelShape:
    owners = {"INTELLECT-3": "PrimeIntellect"}
    return read_model(f"{owners.get(model, 'Qwen')}/{model}").shape


def halves(rows: Sequence[Measured]) -> tuple[list[Measured], list[Measured]]:
    """Return two halves; equal trainings on other GPUs stay in one half, so that none is seen in both."""
    keys = list(dict.fromkeys(row.key for row in rows))
    parts: tuple[list[Measured], list[Measured]] = ([], [])
    for row in rows:
        parts[keys.index(row.key) % 2].append(row)
    return parts


def peak_bytes(
    training: Training, constants: Constants = FITTED, *, is_full: bool = False, keeps_logits: bool = False
) -> float:
    """Return the predicted peak of a training that may train all weights, in float32, or keep all logits."""
    parts, shape = training_parts(training, constants), training.shape
    if is_full:
        parts["weights"], parts["adapters"] = FP32 * training.trained, 0.0
        # The float32 gradient of the embedding before it is shared out.
        parts["transient"] += FP32 * shape.head_parameters if training.gathers else 0.0
    if keeps_logits:
        parts["logits"] = LOGIT_BYTES * training.tokens * shape.vocab_size
    return sum(parts.values())


def peak_of(row: Measured, constants: Constants) -> float:
    """Return the predicted peak of a measured training."""
    return peak_bytes(row.training, constants, is_full=row.is_full, keeps_logits=row.keeps_logits)


def fit_constants(rows: Sequence[Measured]) -> Constants:
    """Return the constants with the least mean relative error on measured rows."""
    nothing, scaled, targets = Constants(0, 0, 0, 0, 0), [], []
    for row in rows:
        peak = row.peak_gib * GIB
        scaled.append([value / peak for value in features(row.training)])
        targets.append(1 - peak_of(row, nothing) / peak)
    return Constants(*non_negative_fit(scaled, targets, floor=0.01))


def relative_errors(rows: Sequence[Measured], constants: Constants) -> list[float]:
    """Return predicted over measured peak, minus 1, of each row."""
    return [peak_of(row, constants) / (row.peak_gib * GIB) - 1 for row in rows]


@dataclass(frozen=True)
class Step:
    """A measured forward with its backward.

    Args:
        program: that ran it.
        rows, seq_len: of a forward.
        forwards: whose `seconds` were measured together.
        adapted: matrices of a layer with adapters; 0: all weights train.
        base_bytes: bytes of a weight.
        peak_gb: of memory; NaN: not published.
    """

    program: str
    device: Device
    shape: ModelShape
    adapted: int
    base_bytes: float
    rows: int
    seq_len: float
    forwards: int
    is_checkpointed: bool
    seconds: float
    peak_gb: float = math.nan


@functools.cache
def measured_steps() -> tuple[Step, ...]:
    """Return the step times of all programs."""
    devices, shapes = load_catalog().devices, known_shapes()
    with STEPS.open(encoding="utf-8") as file:
        steps = [
            Step(
                row["program"], devices[row["gpu"]], shapes[row["model"]], int(row["adapted"]),
                NF4_BYTES if row["bits"] == "4" else 2.0, int(row["rows"]), float(row["seq_len"]),
                int(row["forwards"]), row["checkpointing"] == "1", float(row["seconds"]),
                float(row["peak_gb"] or "nan"),
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip
    for row in measured_rows():
        training = row.training
        steps.append(
            Step("prime-rl", devices[DEVICES[row.gpu]], training.shape, 0 if row.is_full else MATRICES, 2.0, 1,
                 training.tokens, row.micro_batches, True, row.step_s)
        )  # fmt: skip
    return tuple(steps)


def step_seconds(step: Step, rates: Rates) -> float:
    """Return the predicted seconds of a step, by the formulas of the planner."""
    shape, tokens, device = step.shape, step.rows * step.seq_len, replace(step.device, rates=rates)
    is_full, inputs = not step.adapted, 3 if step.is_checkpointed else 2
    matrix = forward_flops(shape, 1, shape.num_layers) * (inputs + is_full) + head_flops(shape, 1) * (2 + is_full)
    attention = 4 * tokens * step.seq_len / 2 * shape.num_layers * shape.num_heads * shape.head_dim
    computed = product_seconds(
        shape, device, 2.0, matrix_flops=matrix * tokens, attention_flops=attention * (inputs + 0.5), tokens=tokens
    )
    computed += unpack_seconds(device, inputs * shape.num_layers * shape.layer_parameters, step.base_bytes)
    per_layer = rates.layer_s + rates.adapter_layer_s * step.adapted / MATRICES
    launches = shape.num_layers * per_layer * (1.0 if step.is_checkpointed else UNCHECKPOINTED)
    return step.forwards * (computed + exposed_seconds(device, launches, computed))


def peak_ratios() -> dict[str, list[float]]:
    """Return predicted over measured peaks of memory of the programs that no constant was fitted to."""
    found: dict[str, list[float]] = {}
    for step in (step for step in measured_steps() if step.peak_gb > 0):
        trained = step.shape.lora_parameters(RANKS[step.program])
        training = Training(step.shape, int(step.rows * step.seq_len), step.base_bytes, trained, gathers=False,
                            is_checkpointed=step.is_checkpointed)  # fmt: skip
        found.setdefault(step.program, []).append(peak_bytes(training, keeps_logits=True) / 1e9 / step.peak_gb)
    return found


def fit_steps(steps: Sequence[Step]) -> Rates:
    """Return the rates with the least mean error of logarithms, in which every program weighs the same.

    A search along one rate after the other with shrinking steps; there are four, and each has a minimum.
    """
    base = Rates()
    # Of each step: products, launches of layers and of adapters, and unpacking, at rates of 1.
    zero = replace(base, matmul=1e30, attention=1e30, layer_s=0.0, adapter_layer_s=0.0, unpack_bytes=0.0)
    ones = [{"matmul": 1.0, "attention": 1.0}, {"layer_s": 1.0}, {"adapter_layer_s": 1.0}, {"unpack_bytes": 1.0}]
    table = [[step_seconds(step, replace(zero, **one)) for one in ones] for step in steps]
    members = {program: [i for i, s in enumerate(steps) if s.program == program] for program in programs(steps)}

    def error(values: Sequence[float]) -> float:
        matmul, layer, adapter, unpack = values
        logs = [
            abs(math.log(max(row[0] / matmul + row[3] * unpack, row[1] * layer + row[2] * adapter) / step.seconds))
            for row, step in zip(table, steps, strict=True)
        ]
        return statistics.fmean(statistics.fmean(logs[i] for i in own) for own in members.values())

    found = descend(error, [0.5, 0.004, 0.004, 20.0], 0.5, 0.01)
    return replace(base, attention=found[0], **dict(zip(FITTED_RATES, found, strict=True)))


def programs(steps: Sequence[Step]) -> list[str]:
    """Return the programs, in the order of their first steps."""
    return list(dict.fromkeys(step.program for step in steps))


@functools.cache
def left_out() -> dict[str, list[float]]:
    """Return measured over predicted seconds by program, with rates that were fitted to all other programs."""
    steps, found = measured_steps(), {}
    for program in programs(steps):
        rates = fit_steps([step for step in steps if step.program != program])
        found[program] = [step.seconds / step_seconds(step, rates) for step in steps if step.program == program]
    return found


def share_within(low: float, high: float) -> float:
    """Return the share of the steps of a left-out program between two factors of its prediction, over programs."""
    return statistics.fmean(
        statistics.fmean(low <= ratio <= high for ratio in ratios) for ratios in left_out().values()
    )
