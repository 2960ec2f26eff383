"""How `onetrunk plan` shows a plan and a check: tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from onetrunk.plan.check import GOALS, Checked
from onetrunk.plan.evaluate import Cost, Plan, host_gib
from onetrunk.plan.hardware import GIB, Pool
from onetrunk.plan.job import ALLOCATOR, MARGIN, Job
from onetrunk.plan.search import MANY_ROWS, Ranked
from onetrunk.plan.timing import PhaseTime, TrainLayout, band, most_rows_of, split_of
from onetrunk.utils.redaction import table_console

# Order of the parts in the memory table.
PARTS = (
    "weights", "adapters", "gradients", "optimizer", "activations", "buffers", "logits", "kv_cache", "states",
    "reward", "transient", "runtime",
)  # fmt: skip
GPU_NOTE = (
    "note: times of GPUs rest on published measurements of other software (scripts/plan/README.md has their errors);"
    " none of them was measured with onetrunk"
)
EXPERTS_NOTE = "; the one program that trained mixtures of experts took 1.2 to 7 times as long as predicted"
# Columns of a text that goes to a file or a pipe.
WIDTH = 160


def show(*parts: RenderableType) -> None:
    """Print texts and tables."""
    console = table_console()
    if not console.is_terminal:
        console.width = WIDTH
    for part in parts:
        console.print(part, highlight=False, soft_wrap=isinstance(part, str))


def table_of(title: str, headers: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[str] = ()) -> Table:
    """Return a table; columns are numbers, but for the first one and those named in `words`."""
    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for place, header in enumerate(headers):
        is_text = place == 0 or header in words
        table.add_column(header, justify="left" if is_text else "right", no_wrap=header != "why it is not the first")
    for row in rows:
        table.add_row(*row)
    return table


def plan_parts(
    job: Job, pools: Sequence[Pool], ranking: Sequence[Ranked], cost: Cost, own: Mapping[str, Any]
) -> list[RenderableType]:
    """Return everything about the best plan, and the table of the others."""
    best = ranking[0].plan
    return [
        *job_lines(job, pools),
        f"\nbest plan ({own['objective']})",
        *best_lines(job, best, sum(pool.count for pool in pools)),
        phase_table(best),
        memory_table(best),
        *margin_lines(best),
        "\nthe run",
        *cost_lines(job, best, cost, own["market"]),
        ranking_table(ranking, own["market"]),
        *([] if best.train.device.is_cpu else ["", GPU_NOTE + (EXPERTS_NOTE if job.shape.num_experts else "")]),
    ]


def job_lines(job: Job, pools: Sequence[Pool]) -> list[str]:
    """Return what is planned, and what had to be assumed."""
    shape, lengths = job.shape, job.lengths
    is_whole = job.adapted_layers == shape.num_layers
    layers = "all" if is_whole else f"the last {job.adapted_layers} of {shape.num_layers}"
    return [
        f"model     {job.model.name}: {shape.parameters / 1e9:.3g}B weights of {job.base_bytes:g} bytes, LoRA rank"
        f" {job.lora_rank} on {layers} layers; from {job.model.source}",
        f"rollout   {job.rollout_batch_size} prompts x {job.num_generations} completions, {lengths.prompt:g} +"
        f" {lengths.completion:g} tokens on average, at most {lengths.longest_prompt} + {lengths.longest}",
        f"update    {job.num_ppo_epochs} epochs x {job.num_minibatches} minibatches; {job.num_rollouts} rollouts",
        f"hardware  {' + '.join(map(str, pools))}",
        *(f"assumed   {text}" for text in job.assumed),
    ]


def layout_text(layout: TrainLayout) -> str:
    """Return a layout of the trainer in words."""
    forward = f"{layout.tokens} tokens" if layout.rows == MANY_ROWS else f"{layout.rows} rows"
    extra = (", checkpointed" if layout.is_checkpointed else "") + (", offloaded" if layout.is_offloaded else "")
    return f"{layout.words}, forwards of {forward}{extra}"


def best_lines(job: Job, plan: Plan, total: int) -> list[str]:
    """Return the layouts of a plan; `total` devices may be used."""
    train, sample = plan.train, plan.sample
    where = {
        "local": "in the trainer's processes",
        "pipelined": f"in the trainer's processes, {sample.replicas} x {sample.stages} stages of a pipeline",
        "colocate": "by a vLLM engine in the trainer process, which sleeps meanwhile",
        "server": f"by {sample.replicas} vLLM servers of {sample.tensor} {sample.device.name}",
    }[sample.engine]
    lines = [
        f"schedule {plan.schedule}; trainer {train.count} x {train.device.name}: {layout_text(train)}",
        f"sampling {where}, at most {min(most_rows_of(job, sample), job.rows)} rows at once",
    ]
    if sample.stages > 1:
        work = "which sample, score and update" if train.is_staged else "which sample"
        lines.append(f"stages of {' + '.join(map(str, split_of(sample, job.shape)))} layers, {work}")
    if train.serves_reward:
        lines.append(f"the reward model on a {train.device.name} of its own")
    idle = ", ".join(f"{name} {share:.0%}" for name, share in plan.idle().items() if share > 0.005)
    lines.append(f"idle: {idle or 'nothing'}")
    if plan.count < total:
        reason = "processes must have equally many prompts; another rollout_batch_size may use them"
        lines.append(f"{total - plan.count} of {total} devices are unused: {reason}")
    return lines


def phase_table(plan: Plan) -> Table:
    """Return the seconds of each phase, with the band and what bounds them."""
    low, high = band(plan.train.device)

    def row(name: str, seconds: float, bound: str = "") -> tuple[str, ...]:
        return name, f"{seconds:.2f}", f"{low * seconds:.2f} to {high * seconds:.2f}", bound

    rows = []
    for name, phase in plan.phases.items():
        share = phase.tail / phase.seconds
        tail = f", {share:.0%} of it for the longest completions" if share > 0.1 else ""
        rows.append(row(name, phase.seconds, phase.bottleneck + tail))
    rows += [row("publish", plan.publish_s), row("iteration", plan.iteration_s)]
    return table_of("seconds", ("phase", "seconds", "between", "bound by"), rows, ("bound by",))


def memory_table(plan: Plan) -> Table:
    """Return the memory of a device by part, a column per phase."""
    phases, peaks = list(plan.memory), plan.peaks()
    rows = {part: [plan.memory[phase].get(part, 0.0) for phase in phases] for part in PARTS}
    rows = {part: values for part, values in rows.items() if max(values) > 0.0005 * GIB}
    rows["peak"] = [peaks[phase] for phase in phases]
    rows["usable"] = [plan.usable(phase) for phase in phases]
    rows["left"] = [usable - peak for usable, peak in zip(rows["usable"], rows["peak"], strict=True)]
    cells = [(name, *(f"{value / GIB:.2f}" for value in values)) for name, values in rows.items()]
    return table_of("memory of a device, GiB", ("part", *phases), cells)


def margin_lines(plan: Plan) -> list[str]:
    """Return why much of a device stays free, where it does."""
    if plan.margin <= MARGIN:
        return []
    return [
        f"{plan.margin:.0%} of a device stay free, because rows change their length; {MARGIN:.0%} where"
        f" {ALLOCATOR[0]}=expandable_segments:True is set, here and in the run"
    ]


def cost_lines(job: Job, plan: Plan, cost: Cost, market: str) -> list[str]:
    """Return hours, money, storage and system memory."""
    hours = ", ".join(f"{value:,.2f} {name}" for name, value in cost.device_hours.items())
    prices = ", ".join(f"{name} ${usd:,.2f}" for name, usd in cost.usd.items())
    kept = ", ".join(f"{name} {value:.3g}" for name, value in cost.storage_gb.items() if value >= 0.0005)
    memory = host_gib(job, plan)
    return [
        f"{cost.hours:.2f} hours ({cost.low_hours:.2f} to {cost.high_hours:.2f}); device hours: {hours}",
        f"devices: {prices}",
        f"storage: {kept or 'under 1 MB'} GB: ${cost.storage_usd:.2f} per month; transfer ${cost.transfer_usd:.2f}",
        f"in all: ${cost.total(market):,.2f} ({market})",
        f"system memory per device: {sum(memory.values()):.1f} GiB"
        f" ({', '.join(f'{name} {value:.1f}' for name, value in memory.items())})",
    ]


def around_lines(plan: Plan, around: Mapping[str, PhaseTime], market: str) -> list[str]:
    """Return hours and money of the stages around PPO."""
    price = plan.usd_per_hour(market) / 3600
    return [
        f"{name}: {phase.seconds / 3600:.2f} hours, ${phase.seconds * price:,.2f}, bound by {phase.bottleneck}"
        for name, phase in around.items()
    ]


def ranking_table(ranking: Sequence[Ranked], market: str) -> Table:
    """Return the plans, with what each has worse than the first."""
    headers = ("schedule", "sampling", "devices", "training", "s/iteration", "$/iteration", "why it is not the first")
    rows = []
    for plan, why in ((entry.plan, entry.why) for entry in ranking):
        stages = f" pp{plan.sample.stages}" if plan.sample.stages > 1 else ""
        devices = "+".join(f"{count}x{name}" for name, count in plan.devices.items())
        usd = plan.iteration_s / 3600 * plan.usd_per_hour(market)
        where = (plan.schedule, plan.sample.engine + stages, devices, layout_text(plan.train))
        rows.append((*where, f"{plan.iteration_s:.2f}", f"{usd:.4f}", why))
    return table_of("plans, best of each family", headers, rows, (*headers[:4], headers[-1]))


def check_parts(folder: Path, checked: Checked) -> list[RenderableType]:
    """Return the comparison of a run with its prediction."""
    train, rows = checked.plan.train, []
    for line in checked.lines:
        goal = GOALS[line.unit]
        verdict = f"{'within' if abs(line.error) <= goal else 'missed'} {goal:.0%}"
        numbers = [f"{value:.3f} {line.unit}" for value in (line.predicted, line.measured)]
        rows.append((line.what, *numbers, f"{line.error:+.0%}", verdict))
    about = f"{folder}: {checked.rollouts} rollouts of {checked.job.rows} rows on {train.count} x {train.device.name}"
    note = "the device is not calibrated; onetrunk plan --calibrate machine.yaml measures this machine"
    return [
        about,
        *(f"assumed: {text}" for text in checked.notes),
        table_of("a rollout", ("", "predicted", "measured", "error", "goal"), rows),
        *([] if train.device.rates.is_calibrated else [note]),
    ]


def summary(plan: Plan) -> dict[str, Any]:
    """Return the main numbers of a plan as JSON values."""
    return {
        "schedule": plan.schedule,
        "training": plan.train.words,
        "engine": plan.sample.engine,
        "devices": plan.devices,
        "iteration_s": plan.iteration_s,
        "phases_s": {name: phase.seconds for name, phase in plan.phases.items()},
        "memory_gib": {phase: value / GIB for phase, value in plan.peaks().items()},
    }


def json_text(job: Job, ranking: Sequence[Ranked], cost: Cost, market: str, around: Mapping[str, PhaseTime]) -> str:
    """Return the plans and the cost of the best one as JSON."""
    best = ranking[0].plan
    parts = {phase: {part: value / GIB for part, value in parts.items()} for phase, parts in best.memory.items()}
    content = {
        "model": job.model.name,
        "weights": job.shape.parameters,
        "assumed": list(job.assumed),
        "best": summary(best)
        | {
            "memory_parts_gib": parts,
            "idle": best.idle(),
            "bottlenecks": {name: phase.bottleneck for name, phase in best.phases.items()},
            "host_gib": host_gib(job, best),
        },
        "cost": {
            "market": market,
            "hours": cost.hours,
            "band_hours": [cost.low_hours, cost.high_hours],
            "device_hours": cost.device_hours,
            "devices_usd": cost.usd,
            "storage_gb": cost.storage_gb,
            "total_usd": cost.total(market),
        },
        "around_s": {name: phase.seconds for name, phase in around.items()},
        "ranking": [summary(entry.plan) | {"why": entry.why} for entry in ranking],
    }
    return json.dumps(content, indent=2)
