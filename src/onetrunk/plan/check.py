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

from onetrunk.plan.evaluate import Plan, evaluate
from onetrunk.plan.hardware import GIB, Catalog, Device, devices_like, parse_pools
from onetrunk.plan.job import ADAPTER_CONFIG, Job, ModelFacts, job_of, read_model, reward_specs
from onetrunk.plan.timing import LOCAL, PIPELINED, SERVER, SampleLayout, TrainLayout

RECORD, LOG, SAMPLES = "_report/run.json", "_report/log.jsonl", "_report/completions-before.jsonl"
PHASES = ("generate", "score", "update")
# Prompts whose tokens are counted.
COUNTED = 256
# Errors that a plan should not exceed, by the unit of the number.
GOALS = {"GiB": 0.15, "s": 0.30}


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
    """A run next to its prediction; `notes` say what was assumed."""

    job: Job
    plan: Plan
    rollouts: int
    lines: tuple[Line, ...]
    notes: tuple[str, ...]


def check_run(folder: Path, defaults: Mapping[str, Any], catalog: Catalog, own: Mapping[str, Any]) -> Checked:
    """Return the prediction for a run and what it logged.

    Args:
        defaults: of every setting of `onetrunk ppo`.
        own: options hardware, model, reward_model and prompt_tokens, which replace what the record says.
    """
    record, log = _record(folder), _log(folder)
    settings = {**defaults, **{k: v for k, v in record["settings"].items() if k in defaults}}
    timed = [entry for entry in log if any(f"time/{phase}_s" in entry for phase in PHASES)]
    steps = max((entry.get("step", 0) for entry in timed), default=0)
    rollouts = int(steps // (record.get("slots_per_rollout") or 1))
    if rollouts < 2:
        raise ValueError(f"the log has {steps} optimizer steps, which is fewer than 2 rollouts; check a longer run")
    begin = next((entry for entry in log if entry.get("event") == "begin"), {})
    device = _device(own, begin, catalog)
    lengths = [entry["completion/length"] for entry in timed if "completion/length" in entry]
    prompt = own.get("prompt_tokens") or _prompt_tokens(folder)
    reward, notes = _reward(own, settings)
    model = read_model(own.get("model") or record.get("base") or settings["model_name_or_path"])
    if (Path(str(settings["model_name_or_path"])) / ADAPTER_CONFIG).is_file():
        model = replace(model, base=model.name)
    job = job_of(
        {**settings, "num_rollouts": rollouts},
        model,
        reward,
        prompt_tokens=min(prompt, settings["max_prompt_length"] or prompt) if prompt else None,
        completion_tokens=max(1.0, statistics.fmean(lengths)) if lengths else None,
        on_cpu=device.is_cpu,
    )
    plan = _plan_of_run(job, device, int(begin.get("num_processes", 1)), settings)
    return Checked(job, plan, rollouts, tuple(_lines(plan, timed, rollouts)), (*job.assumed, *notes))


def _record(folder: Path) -> dict[str, Any]:
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} has no readable {RECORD}, which onetrunk ppo writes; give its output_dir"
        ) from error
    if record.get("verb") != "ppo":
        raise ValueError(f"{folder} is a run of {record.get('verb')}; --check compares runs of onetrunk ppo")
    return record


def _log(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of a log, whose last line a kill may have cut short."""
    *lines, last = (folder / LOG).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in (*lines, *([last] if last.endswith("}") else ()))]


def _device(own: Mapping[str, Any], begin: Mapping[str, Any], catalog: Catalog) -> Device:
    if own.get("hardware"):
        return parse_pools(own["hardware"], None, catalog)[0].device
    is_gpu = bool(begin.get("num_gpus"))
    names = ("THIS-GPU",) if is_gpu else ("THIS-CPU", "CPU")
    near = [catalog.devices[name] for name in names if name in catalog.devices]
    near = near or devices_like(str(begin.get("device")), catalog)
    if is_gpu and len(near) != 1:
        raise ValueError(f"the run used {begin.get('device')!r}; name it with --hardware, such as 1xH100-80GB")
    return near[0]


def _reward(own: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[ModelFacts | None, list[str]]:
    """Return the reward model, if there is one, and what is assumed about other rewards."""
    if own.get("reward_model"):
        return read_model(own["reward_model"]), []
    models, notes = [], []
    for spec in reward_specs(settings):
        try:
            models.append(read_model(spec))
        except ValueError:
            notes.append(f"the reward {spec} counts as free")
    return (models[0] if models else None), notes


def _prompt_tokens(folder: Path) -> float | None:
    """Return the mean tokens of the run's held-out prompts, without marks of a chat template; None without them."""
    if not (folder / SAMPLES).is_file() or not (folder / "tokenizer.json").is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with (folder / SAMPLES).open(encoding="utf-8") as file:
        prompts = [json.loads(line)["prompt"] for line in itertools.islice(file, COUNTED)]
    texts = [p if isinstance(p, str) else "\n".join(message["content"] for message in p) for p in prompts]
    return statistics.fmean(len(tokenizer.encode(text).ids) for text in texts) if texts else None


def _plan_of_run(job: Job, device: Device, processes: int, settings: Mapping[str, Any]) -> Plan:
    train = TrainLayout(
        device, processes, per_node=max(1, processes), base_bytes=job.base_bytes, rows=job.microbatch_rows,
        tokens=job.microbatch_tokens or 2**31, is_checkpointed=job.is_checkpointed, is_offloaded=job.is_offloaded,
    )  # fmt: skip
    sample = SampleLayout(device, SERVER if job.uses_server else LOCAL, processes)
    if settings.get("rollout_backend") == PIPELINED:
        split = tuple(settings["pipeline_split"] or ())
        stages = settings["pipeline_stages"] or len(split) or processes
        pipelines = max(1, processes // stages)
        if settings.get("pipeline_training"):
            train = replace(train, data=pipelines, stages=stages, split=split)
        sample = SampleLayout(device, PIPELINED, pipelines, 1, stages, split=split, per_node=train.per_node)
    return evaluate(job, train, sample, job.schedule)


def _lines(plan: Plan, timed: Sequence[Mapping[str, Any]], rollouts: int) -> list[Line]:
    lines = []
    for phase in PHASES:
        seconds = sum(float(entry.get(f"time/{phase}_s", 0.0)) for entry in timed) / rollouts
        if seconds > 0:
            lines.append(Line(phase, "s", plan.phases[phase].seconds, seconds))
    peaks = [float(entry["memory/peak_gib"]) for entry in timed if "memory/peak_gib" in entry]
    if peaks:
        own = max(value for phase, value in plan.peaks().items() if phase != "server")
        lines.append(Line("peak memory", "GiB", own / GIB, max(peaks)))
    return lines
