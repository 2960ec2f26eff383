"""`onetrunk plan --check RUN_DIR`: the prediction for a run against what its log has, phase by phase.

The settings come from the run's record, its completion lengths from its log, and the model's shape from its config, so
what is compared is the arithmetic alone.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onetrunk.plan.evaluate import Plan, evaluate, stage_parts
from onetrunk.plan.hardware import GIB, Catalog, Device, find_device, parse_pools
from onetrunk.plan.job import Job, job_of
from onetrunk.plan.shapes import ADAPTER_CONFIG, ModelFacts, read_model
from onetrunk.plan.timing import LOCAL, PIPELINED, SERVER, SampleLayout, TrainLayout

RECORD, LOG = "_report/run.json", "_report/log.jsonl"
PHASES = ("generate", "score", "update")
# Prompts whose tokens are counted.
COUNTED = 256
# What the goals of a plan are, for the last column.
GOALS = {"memory": 0.15, "phase": 0.30}


@dataclass(frozen=True)
class Line:
    """A predicted and a measured number."""

    what: str
    unit: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Checked:
    """A run next to its prediction."""

    folder: Path
    job: Job
    plan: Plan
    rollouts: int
    lines: tuple[Line, ...]
    notes: tuple[str, ...]


def check_run(
    folder: Path, defaults: Mapping[str, Any], catalog: Catalog, own: Mapping[str, Any] | None = None
) -> Checked:
    """Return the prediction for a run and what it logged.

    Args:
        folder: output_dir of a finished or running PPO run.
        defaults: of every setting of `onetrunk ppo`.
        catalog: of the devices.
        own: options hardware, model, reward_model and prompt_tokens, which replace what the record says.

    Raises:
        ValueError: no record, a stage other than ppo, too few rollouts, or a device that is not known.
    """
    try:
        return _checked(folder, defaults, catalog, own or {})
    except (TypeError, AttributeError, KeyError, OverflowError) as error:
        raise ValueError(
            f"{folder}: its record or its log has values of other types than onetrunk ppo writes ({error})"
        ) from error


def _checked(folder: Path, defaults: Mapping[str, Any], catalog: Catalog, own: Mapping[str, Any]) -> Checked:
    record, log = _record(folder), _log(folder)
    settings = {**defaults, **{k: v for k, v in record["settings"].items() if k in defaults}}
    settings["activation_checkpointing"] = settings.get("activation_checkpointing") or settings.get(
        "gradient_checkpointing"
    )
    timed = [entry for entry in log if any(f"time/{phase}_s" in entry for phase in PHASES)]
    rollouts = _rollouts(record, timed)
    begin = next((entry for entry in log if entry.get("event") == "begin"), {})
    processes = int(begin.get("num_processes", 1))
    device = _device(own, begin, catalog)
    model = read_model(own.get("model") or record.get("base") or settings["model_name_or_path"])
    notes: list[str] = []
    lengths = [entry["completion/length"] for entry in timed if "completion/length" in entry]
    completion = statistics.fmean(lengths) if lengths else None
    prompt = own.get("prompt_tokens") or _prompt_tokens(folder, settings, notes)
    job = job_of(
        settings,
        model,
        reward=_reward(own, settings, notes),
        prompt_tokens=min(prompt, settings["max_prompt_length"] or prompt) if prompt else None,
        completion_tokens=None if completion is None else max(1.0, min(completion, settings["max_completion_length"])),
        num_rollouts=rollouts,
        is_continued=(Path(str(settings["model_name_or_path"])) / ADAPTER_CONFIG).is_file(),
        on_cpu=device.is_cpu,
    )
    plan = _plan_of_run(job, device, processes, settings)
    lines = (*_lines(plan, timed, rollouts), *_stage_lines(job, plan, timed))
    return Checked(folder, job, plan, rollouts, lines, (*job.assumed, *notes))


def _record(folder: Path) -> dict[str, Any]:
    path = folder / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} has no readable {RECORD}, which onetrunk ppo writes; give its output_dir"
        ) from error
    if record.get("verb") != "ppo":
        raise ValueError(f"{folder} is a run of {record.get('verb')}; --check compares runs of onetrunk ppo")
    return record


def _log(folder: Path) -> list[dict[str, Any]]:
    entries = []
    for line in (folder / LOG).read_text(encoding="utf-8").splitlines():
        try:
            entries.append(json.loads(line))
        except ValueError:  # Cut short by a kill.
            continue
    entries = [entry for entry in entries if isinstance(entry, dict)]
    for name, value in (pair for entry in entries for pair in entry.items()):
        if isinstance(value, str) and name.startswith(("step", "time/", "memory/", "completion/length")):
            raise TypeError(f"{name} is {value!r}")
    return entries


def _rollouts(record: Mapping[str, Any], timed: Sequence[Mapping[str, Any]]) -> int:
    slots = record.get("slots_per_rollout") or 1
    steps = max((entry.get("step", 0) for entry in timed), default=0)
    rollouts = int(steps // slots)
    if rollouts < 2:
        raise ValueError(f"the log has {steps} optimizer steps, which is fewer than 2 rollouts; check a longer run")
    return rollouts


def _device(own: Mapping[str, Any], begin: Mapping[str, Any], catalog: Catalog) -> Device:
    if own.get("hardware"):
        return parse_pools(own["hardware"], None, catalog)[0].device
    if not begin.get("num_gpus"):
        name = "THIS-CPU" if "THIS-CPU" in catalog.devices else "CPU"
        return catalog.devices[name]
    if "THIS-GPU" in catalog.devices:
        return catalog.devices["THIS-GPU"]
    words = str(begin.get("device", "")).replace("NVIDIA", "").split()
    try:
        return find_device(words[0] if words else "", catalog)
    except ValueError as error:
        raise ValueError(f"the run used {begin.get('device')!r}; name it with --hardware ({error})") from error


def _reward(own: Mapping[str, Any], settings: Mapping[str, Any], notes: list[str]) -> ModelFacts | None:
    if own.get("reward_model"):
        return read_model(own["reward_model"])
    written = settings["reward_funcs"] or []
    models = []
    for spec in [written] if isinstance(written, str) else written:
        try:
            models.append(read_model(str(spec)))
        except ValueError:
            notes.append(f"the reward {spec} counts as free")
    return models[0] if models else None


def _prompt_tokens(folder: Path, settings: Mapping[str, Any], notes: list[str]) -> float | None:
    """Return the mean tokens of the run's prompts, counted with its own tokenizer; None where they are not here.

    They are in the samples of its held-out prompts, or in the file of rows that it trained on.
    """
    tokenizer = folder / "tokenizer.json"
    places = [folder / "_report" / "completions-before.jsonl", Path(str(settings.get("dataset_name") or ""))]
    samples = next((path for path in places if path.suffix == ".jsonl" and path.is_file()), None)
    if samples is None or not tokenizer.is_file():
        return None
    from tokenizers import Tokenizer

    reader, counts = Tokenizer.from_file(str(tokenizer)), []
    with samples.open(encoding="utf-8") as file:
        for line in itertools.islice(file, COUNTED):
            prompt = json.loads(line).get("prompt")
            texts = [prompt] if isinstance(prompt, str) else [str(m.get("content", "")) for m in prompt or []]
            # A message has a mark before it and one after it in most templates, and the reply one before it.
            marks = 0 if isinstance(prompt, str) else 2 * len(texts) + 1
            counts.append(marks + sum(len(reader.encode(text).ids) for text in texts))
    if not counts:
        return None
    notes.append(f"prompts have {statistics.fmean(counts):.1f} tokens on average (counted in {samples})")
    return statistics.fmean(counts)


def _plan_of_run(job: Job, device: Device, processes: int, settings: Mapping[str, Any]) -> Plan:
    train = TrainLayout(
        device, processes, 1, 1, max(1, processes), job.base_bytes, job.microbatch_rows,
        job.microbatch_tokens or 2**31,
        job.is_checkpointed, job.is_offloaded,
    )  # fmt: skip
    if settings.get("rollout_backend") == PIPELINED:
        split = tuple(settings["pipeline_split"] or ())
        stages = settings["pipeline_stages"] or len(split) or processes
        pipelines, batches = max(1, processes // stages), settings["pipeline_batches"] or stages
        if settings.get("pipeline_training"):
            train = replace(train, data=pipelines, stages=stages, split=split)
        own = (device, PIPELINED, pipelines, 1, stages, batches)
        return evaluate(job, train, SampleLayout(*own, split=split, per_node=train.per_node), job.schedule)
    engine = SERVER if job.uses_server else LOCAL
    return evaluate(job, train, SampleLayout(device, engine, processes), job.schedule)


def _lines(plan: Plan, timed: Sequence[Mapping[str, Any]], rollouts: int) -> list[Line]:
    lines = []
    for phase in PHASES:
        seconds = sum(float(entry.get(f"time/{phase}_s", 0.0)) for entry in timed) / rollouts
        if seconds > 0:
            lines.append(Line(phase, "s", plan.phases[phase].seconds, seconds))
    peaks = [float(entry["memory/peak_gib"]) for entry in timed if "memory/peak_gib" in entry]
    if peaks:
        of_trainer = [value for phase, value in plan.peaks().items() if phase != "server"]
        lines.append(Line("peak memory", "GiB", max(of_trainer) / GIB, max(peaks)))
    return lines


def _stage_lines(job: Job, plan: Plan, timed: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Return the memory of each stage of a pipeline while it samples."""
    if plan.sample.engine != PIPELINED:
        return []
    lines, stages = [], stage_parts(job, plan.train, plan.sample)
    # What every process holds besides what its stage does.
    held = plan.peaks()["generate"] - max(sum(parts.values()) for parts in stages)
    for stage, parts in enumerate(stages):
        measured = [float(entry[name]) for entry in timed if (name := f"memory/stage_{stage}_gib") in entry]
        if measured:
            lines.append(Line(f"stage {stage}", "GiB", (held + sum(parts.values())) / GIB, max(measured)))
    return lines


def check_lines(checked: Checked) -> list[str]:
    """Return the comparison, for people."""
    train = checked.plan.train
    lines = [
        f"{checked.folder}: {checked.rollouts} rollouts of {checked.job.rows} rows on {train.count} x"
        f" {train.device.name}",
        *(f"assumed: {note}" for note in checked.notes),
        f"{'':<14}{'predicted':>12}{'measured':>12}{'error':>9}  goal",
    ]
    for line in checked.lines:
        goal = GOALS["memory" if line.unit == "GiB" else "phase"]
        verdict = "within" if abs(line.error) <= goal else "missed"
        lines.append(
            f"{line.what:<14}{line.predicted:>10.3f} {line.unit:<3}{line.measured:>8.3f} {line.unit:<3}"
            f"{line.error:>+7.0%}"
            f"  {verdict} {goal:.0%}"
        )
    if not train.device.rates.is_calibrated:
        lines.append("the device is not calibrated; onetrunk plan --calibrate machine.yaml measures this machine")
    return lines
