"""How `onetrunk plan` prints a plan: tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from onetrunk.plan.cost import Cost
from onetrunk.plan.evaluate import Plan, host_gib, stage_memory, stage_parts, summary
from onetrunk.plan.hardware import GIB, Pool
from onetrunk.plan.job import ALLOCATOR, MARGIN, Job
from onetrunk.plan.memory import role_layouts
from onetrunk.plan.search import MANY_ROWS, Ranked
from onetrunk.plan.timing import PIPELINED, PhaseTime, TrainLayout, band, most_rows_of

# Order of the parts in the memory table.
PARTS = (
    "weights", "adapters", "gradients", "optimizer", "activations", "buffers", "logits", "kv_cache", "states",
    "reward", "transient", "runtime",
)  # fmt: skip
GPU_ERA_NOTE = (
    "times of GPUs rest on published measurements of other software (scripts/plan/README.md has their errors); none"
    " of them was measured with onetrunk"
)
EXPERTS_NOTE = "; the one program that trained mixtures of experts took 1.2 to 7 times as long as predicted"


def plan_lines(
    job: Job,
    pools: Sequence[Pool],
    ranking: Sequence[Ranked],
    cost: Cost,
    own: Mapping[str, Any],
    around: Mapping[str, PhaseTime],
    unused: str | None = None,
) -> list[str]:
    """Return everything about the best plan, and the table of the others.

    Args:
        unused: why devices are left over.
    """
    best, experts = ranking[0].plan, EXPERTS_NOTE if job.shape.num_experts else ""
    return [
        *job_lines(job, pools),
        "",
        f"best plan ({own['objective']})",
        *(f"  {line}" for line in best_lines(job, best)),
        *([f"  {unused}"] if unused else []),
        "",
        "memory of a device, GiB",
        *(f"  {line}" for line in memory_lines(best)),
        "",
        "the run",
        *(f"  {line}" for line in cost_lines(job, best, cost, own["market"], around)),
        "",
        "plans, best of each family",
        *(f"  {line}" for line in ranking_lines(ranking, own["market"])),
        "",
        "the roles on one device: weights, gradients, optimizer and cache, GiB (no activations)",
        *(f"  {line}" for line in role_lines(job, best)),
        *([] if best.train.device.is_cpu else ["", f"note: {GPU_ERA_NOTE}{experts}"]),
    ]


def job_lines(job: Job, pools: Sequence[Pool]) -> list[str]:
    """Return what is planned, and what had to be assumed."""
    shape = job.shape
    layers = (
        "all" if job.adapted_layers == shape.num_layers else f"the last {job.adapted_layers} of {shape.num_layers}"
    )
    lengths = job.lengths
    lines = [
        f"model     {job.model.name}: {shape.parameters / 1e9:.3g}B weights of {job.base_bytes:g} bytes, LoRA rank"
        f" {job.lora_rank} on {layers} layers; from {job.model.source}",
        f"rollout   {job.rollout_batch_size} prompts x {job.num_generations} completions, {lengths.prompt:g} +"
        f" {lengths.completion:g} tokens on average, at most {lengths.longest_prompt} + {lengths.longest}",
        f"update    {job.num_ppo_epochs} epochs x {job.num_minibatches} minibatches; {job.num_rollouts} rollouts",
        f"hardware  {' + '.join(map(str, pools))}",
    ]
    return lines + [f"assumed   {text}" for text in job.assumed]


def layout_text(layout: TrainLayout) -> str:
    """Return a layout of the trainer in words."""
    base = f"each matrix over {layout.tensor}" if layout.tensor > 1 else "whole base"
    if layout.shards > 1:
        base = f"base sharded over {layout.shards}"
    if layout.is_staged:
        base = f"trained in {layout.stages} stages"
    forward = f"{layout.tokens} tokens" if layout.rows == MANY_ROWS else f"{layout.rows} rows"
    extra = ", checkpointed" if layout.is_checkpointed else ""
    return f"{layout.data} x {layout.tensor * layout.stages}, {base}, forwards of {forward}{extra}" + (
        ", offloaded" if layout.is_offloaded else ""
    )


def best_lines(job: Job, plan: Plan) -> list[str]:
    """Return layouts and seconds of a plan."""
    sample, (low, high) = plan.sample, band(plan.train.device)
    where = {
        "local": "in the trainer's processes",
        "pipelined": f"in the trainer's processes, {sample.replicas} x {sample.stages} stages of a pipeline",
        "colocate": "by a vLLM engine in the trainer process, which sleeps meanwhile",
        "server": f"by {sample.replicas} vLLM servers of {sample.tensor} x {sample.stages} {sample.device.name}",
    }[sample.engine]
    lines = [
        f"schedule {plan.schedule}; trainer {plan.train.count} x {plan.train.device.name}: {layout_text(plan.train)}",
        f"sampling {where}, at most {min(most_rows_of(job, sample), job.rows)} rows at once"
        + (f", {sample.in_flight} batches in flight" if sample.stages > 1 else ""),
    ]
    if sample.engine == PIPELINED:
        lines += stage_lines(job, plan)
    if plan.has_reward_server:
        lines.append(f"the reward model on a {plan.train.device.name} of its own")
    lines.append(f"{'phase':<10}{'seconds':>9}{'between':>18}  bound by")
    for name, phase in plan.phases.items():
        s = phase.seconds
        tail = f", {phase.tail / s:.0%} of it for the longest completions" if phase.tail > 0.1 * s else ""
        lines.append(f"{name:<10}{s:>9.2f}{f'{low * s:.2f} to {high * s:.2f}':>18}  {phase.bottleneck}{tail}")
    lines.append(f"{'publish':<10}{plan.publish_s:>9.2f}")
    total = plan.iteration_s
    lines.append(f"{'iteration':<10}{total:>9.2f}{f'{low * total:.2f} to {high * total:.2f}':>18}")
    idle = ", ".join(f"{name} {share:.0%}" for name, share in plan.idle().items() if share > 0.005)
    return [*lines, f"idle: {idle or 'nothing'}"]


def stage_lines(job: Job, plan: Plan) -> list[str]:
    """Return the layers of each stage of a pipeline of the trainer's processes, and its memory."""
    layers = " + ".join(map(str, plan.sample.sizes(job.shape)))
    if not plan.train.is_staged:
        added = [f"{sum(parts.values()) / GIB:.2f}" for parts in stage_parts(job, plan.train, plan.sample)]
        return [f"stages of {layers} layers; sampling adds {', '.join(added)} GiB to them"]
    needs = {
        phase: ", ".join(f"{sum(parts.values()) / GIB:.2f}" for parts in stages)
        for phase, stages in stage_memory(job, plan).items()
    }
    return [
        f"stages of {layers} layers, which sample, score and update; each has the frozen weights of its layers only",
        *(f"  GiB of each stage, {phase}: {text}" for phase, text in needs.items()),
    ]


def memory_lines(plan: Plan) -> list[str]:
    """Return the memory by part, a column per phase."""
    phases = list(plan.memory)
    lines = [f"{'':<14}" + "".join(f"{phase:>10}" for phase in phases)]
    for part in PARTS:
        values = [plan.memory[phase].get(part, 0.0) for phase in phases]
        if max(values) > 0.0005 * GIB:
            lines.append(f"{part:<14}" + "".join(f"{value / GIB:>10.2f}" for value in values))
    peaks = plan.peaks()
    lines.append(f"{'peak':<14}" + "".join(f"{peaks[phase] / GIB:>10.2f}" for phase in phases))
    room = [plan.usable(phase) for phase in phases]
    lines.append(f"{'usable':<14}" + "".join(f"{value / GIB:>10.2f}" for value in room))
    left = [(r - peaks[phase]) / GIB for r, phase in zip(room, phases, strict=True)]
    lines.append(f"{'left':<14}" + "".join(f"{value:>10.2f}" for value in left))
    if plan.margin > MARGIN:
        lines.append(
            f"{plan.margin:.0%} of a device stay free, because rows change their length; {MARGIN:.0%} where"
            f" {ALLOCATOR[0]}=expandable_segments:True is set, here and in the run"
        )
    return lines


def cost_lines(job: Job, plan: Plan, cost: Cost, market: str, around: Mapping[str, PhaseTime]) -> list[str]:
    """Return hours, money, storage and system memory."""
    hours = ", ".join(f"{value:,.2f} {name}" for name, value in cost.device_hours.items())
    prices = ", ".join(f"{name} ${usd:,.2f}" for name, usd in cost.usd.items())
    kept = ", ".join(f"{name} {value:.3g}" for name, value in cost.storage_gb.items() if value >= 0.0005)
    memory = host_gib(job, plan)
    lines = [
        f"{cost.hours:.2f} hours ({cost.low_hours:.2f} to {cost.high_hours:.2f}); device hours: {hours}",
        f"devices: {prices}",
        f"storage: {kept or 'under 1 MB'} GB: ${cost.storage_usd:.2f} per month; transfer ${cost.transfer_usd:.2f}",
        f"in all: ${cost.total(market):,.2f} ({market})",
        f"system memory per device: {sum(memory.values()):.1f} GiB"
        f" ({', '.join(f'{name} {value:.1f}' for name, value in memory.items())})",
    ]
    for name, phase in around.items():
        price = phase.seconds / 3600 * plan.usd_per_hour(market)
        lines.append(f"{name}: {phase.seconds / 3600:.2f} hours, ${price:,.2f}, bound by {phase.bottleneck}")
    return lines


def ranking_lines(ranking: Sequence[Ranked], market: str) -> list[str]:
    """Return a line per plan, with what it has worse than the first."""
    lines = [
        f"{'schedule':<10}{'sampling':<15}{'devices':<26}{'s/iteration':>12}{'$/iteration':>13}"
        "  why it is not the first"
    ]
    for entry in ranking:
        plan = entry.plan
        devices = "+".join(f"{count}x{name}" for name, count in plan.devices.items())
        usd = plan.iteration_s / 3600 * plan.usd_per_hour(market)
        stages = f" pp{plan.sample.stages}" if plan.sample.stages > 1 else ""
        lines.append(
            f"{plan.schedule:<10}{plan.sample.engine + stages:<15}{devices:<26}{plan.iteration_s:>12.2f}{usd:>13.4f}"
            f"  {entry.why}".rstrip()
        )
        lines.append(f"{'':<25}{layout_text(plan.train)}")
    return lines


def role_lines(job: Job, plan: Plan) -> list[str]:
    """Return the layouts of the roles side by side."""
    rows = max(1, job.rows // plan.train.data)
    layouts = role_layouts(job.shape, job.lora_rank, job.reward or job.shape, rows, job.lengths.width)
    return [f"{value / GIB:>9.1f}  {name}" for name, value in layouts.items()]


def json_text(job: Job, ranking: Sequence[Ranked], cost: Cost, market: str, around: Mapping[str, PhaseTime]) -> str:
    """Return the plans and the cost of the best one as JSON."""
    best = ranking[0].plan
    content = {
        "model": job.model.name,
        "weights": job.shape.parameters,
        "assumed": list(job.assumed),
        "best": summary(best)
        | {
            "memory_parts_gib": {
                phase: {part: value / GIB for part, value in parts.items()} for phase, parts in best.memory.items()
            },
            "stages_gib": {
                phase: [sum(parts.values()) / GIB for parts in stages]
                for phase, stages in (stage_memory(job, best).items() if best.train.is_staged else ())
            },
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
