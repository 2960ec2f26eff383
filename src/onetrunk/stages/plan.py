"""The stage `onetrunk plan`: memory, time and cost of a PPO run, and the best plan for some hardware.

    onetrunk plan --model Qwen/Qwen2.5-7B --hardware 8xH100-80GB
    onetrunk plan --config llama-3.1-8b/ppo --model meta-llama/Llama-3.1-8B --hardware 2xH100 --write plans/llama
    onetrunk plan --calibrate machine.yaml
    onetrunk plan --check runs/tiny/ppo --hardware THIS-CPU --hardware_file machine.yaml

It answers in about a second: neither torch nor transformers is imported, except by --calibrate and --check.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table

from onetrunk.costs import ModelShape
from onetrunk.plan.hardware import GIB, Catalog, Device, Pool, load_catalog, parse_pools
from onetrunk.plan.job import (
    ALLOCATOR,
    CHANGING_MARGIN,
    DTYPES,
    MARGIN,
    Job,
    ModelFacts,
    job_of,
    read_model,
    reward_specs,
    trunk_rewards,
)
from onetrunk.plan.launch import Launch, write_files
from onetrunk.plan.search import (
    MANY_ROWS,
    Cost,
    Plan,
    Space,
    cost_of,
    evaluate,
    host_gib,
    rejected,
    search,
    smallest_hardware,
    why_not,
)
from onetrunk.plan.timing import (
    COLOCATED,
    LOCAL,
    PIPELINED,
    SERVER,
    PhaseTime,
    SampleLayout,
    TrainLayout,
    band,
    distillation_time,
    label_time,
    most_rows_of,
    packs_of,
    reward_training_time,
    split_of,
)
from onetrunk.ppo.settings import SERVER_SETTINGS, PPOSettings
from onetrunk.stages.options.reading import DRY_RUN, UsageError, plan_parser, plan_words, read, say
from onetrunk.stages.options.table import load_options
from onetrunk.utils.files import atomic_write_text, require_output_dir
from onetrunk.utils.redaction import table_console

if TYPE_CHECKING:
    from onetrunk.report.runs import Run

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
MARGIN_NOTE = (
    f"{CHANGING_MARGIN:.0%} of a device stay free, because rows change their length; {MARGIN:.0%} where"
    f" {ALLOCATOR[0]}=expandable_segments:True is set, here and in the run"
)
# Columns of a text that goes to a file or a pipe.
WIDTH = 160
# Options that count something.
COUNTS = ("nodes", "top", "label_prompts", "label_completions", "reward_pairs", "distill_rows")
# Options that --check reads; the run has the other settings.
OF_CHECK = ("check", "hardware", "hardware_file", "model", "reward_model", "prompt_tokens", "length_spread")


@dataclass(frozen=True)
class Request:
    """What is planned: a job, the devices for it, what may be varied, and the reward model that may be served."""

    job: Job
    pools: tuple[Pool, ...]
    catalog: Catalog
    space: Space
    reward: str | None


def parse_plan(argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the own options, with the words of PPO's, and the values of all of PPO's; UsageError for a mistake."""
    own, words = plan_words(argv)
    _check_options(own, words)
    own["words"] = tuple(word for word in words if word not in DRY_RUN)
    config = [] if own["config"] is None else ["--config", own["config"]]
    values = _defaults() | read("ppo", [*config, *words])
    settings = object.__new__(_Settings)
    # A plan of a model alone has no folder, and the default of bf16 would ask this machine.
    vars(settings).update(values, output_dir=values["output_dir"] or "runs/plan", bf16=bool(values["bf16"]))
    try:
        settings.__post_init__()
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    # TRL's names, and other settings, may have decided these.
    decided = ("rollout_batch_size", "num_minibatches", "num_ppo_epochs", "pipeline_stages")
    values |= {name: getattr(settings, name) for name in decided}
    return own, values


def _check_options(own: Mapping[str, Any], words: Sequence[str]) -> None:
    """Raise UsageError for a count that is not whole, and for options without effect next to --check."""
    for name in COUNTS:
        if isinstance(own[name], float):
            raise UsageError(f"--{name} is {own[name]:g}; give a whole number")
    usual = vars(plan_parser().parse_args([]))
    ignored = [f"--{name}" for name, value in own.items() if name not in OF_CHECK and value != usual[name]]
    if own["check"] is not None and (ignored or words):
        raise UsageError(f"next to --check these have no effect; leave them out: {' '.join([*ignored, *words])}")


def _defaults() -> dict[str, Any]:
    return {name: option.default for name, option in load_options("ppo").items()}


class _Inherited:
    def __post_init__(self) -> None:
        pass


class _Settings(PPOSettings, _Inherited):
    """PPOConfig without TrainingArguments, whose import takes seconds; it checks the ranges of PPO's own settings."""

    def _inherited_defaults(self) -> dict[str, Any]:
        return _defaults()


def run(own: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    if own["calibrate"] is not None:
        _calibrate(own)
    elif own["check"] is not None:
        _check(own)
    else:
        _plan(own, values)


def request_of(own: Mapping[str, Any], values: Mapping[str, Any]) -> Request:
    """Return what the options ask for."""
    catalog = load_catalog(own["hardware_file"])
    pools = parse_pools(own["hardware"], own["nodes"], catalog)
    job, reward_name = _job_and_reward(own, values, pools)
    space = Space(
        schedules=tuple(own["schedules"]),
        **_stages_of(own, values, pools, job.model),
        base_bytes=tuple(DTYPES[dtype] for dtype in own["dtypes"] or ()),
        keeps_settings=own["keep_settings"],
        serves_reward=reward_name is not None,
    )
    return Request(job, pools, catalog, space, reward_name)


def _job_and_reward(
    own: Mapping[str, Any], values: Mapping[str, Any], pools: Sequence[Pool]
) -> tuple[Job, str | None]:
    """Return the job, and the name of its reward model if that may run on a server."""
    name = own["model"] or values["model_name_or_path"]
    if not name:
        raise UsageError("the recipe names no model; give --model")
    model = read_model(name)
    reward, reward_name = _reward_of(own, values, model)
    job = job_of(
        values,
        model,
        reward,
        prompt_tokens=own["prompt_tokens"],
        completion_tokens=own["completion_tokens"],
        spread=own["length_spread"],
        on_cpu=all(pool.device.is_cpu for pool in pools),
    )
    return job, reward_name


def _stages_of(
    own: Mapping[str, Any], values: Mapping[str, Any], pools: Sequence[Pool], model: ModelFacts
) -> dict[str, Any]:
    """Return the fields of Space that say where completions are sampled, and in which stages.

    A recipe with `rollout_backend: pipelined` samples so in every plan, and trains so if it has `pipeline_training`.
    One with settings of vLLM servers samples on servers, because a command line cannot unset an address.
    """
    if values["rollout_backend"] != PIPELINED:
        if values["pipeline_training"]:
            raise UsageError(
                "the recipe trains in pipeline stages on rows of a server, which plan does not know; add"
                " --rollout_backend pipelined, or --pipeline_training false"
            )
        names = [name for name in SERVER_SETTINGS if values[name] != _defaults()[name]]
        if names and (SERVER not in own["engines"] or sum(pool.count for pool in pools) == 1):
            raise UsageError(
                f"the recipe sets {', '.join(names)}, and servers need --engines server and two or more devices; add"
                f" them, or leave {names[0]} out"
            )
        return {"engines": (SERVER,) if names else tuple(own["engines"])}
    if max(pool.count for pool in pools) == 1 or PIPELINED not in own["engines"]:
        raise UsageError(
            "the recipe's rollout_backend is 'pipelined', which needs --engines pipelined and two or more devices of a"
            " kind; add them, or --rollout_backend local"
        )
    split, layers = tuple(values["pipeline_split"] or ()), model.shape.num_layers
    if split and sum(split) != layers:
        raise UsageError(
            f"pipeline_split has {sum(split)} layers and the model {layers}; give the layers of each stage, or leave"
            " it out"
        )
    training = bool(values["pipeline_training"]) or None
    return {
        "engines": (PIPELINED,), "stages": values["pipeline_stages"], "split": split, "stage_training": training,
    }  # fmt: skip


def _reward_of(
    own: Mapping[str, Any], values: Mapping[str, Any], model: ModelFacts
) -> tuple[ModelFacts | None, str | None]:
    """Return the reward model, and its name if it may run on a server.

    It is the one that is named, or the recipe's first model whose config is here, but for branches of the policy's
    trunk. One of several rewards stays where it is, because the launch files would have to repeat the others.
    """
    specs, named = reward_specs(values), own["reward_model"]
    names = [spec.text for spec in specs if spec.kind.is_model] if named is None else [named]
    branches = trunk_rewards(names, model)
    for name in (name for name in names if name not in branches):
        try:
            return read_model(name), name if len(specs) <= 1 else None
        except ValueError:
            if named is not None:
                raise
    return None, None


def _plan(own: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    request = request_of(own, values)
    job, market = request.job, own["market"]
    ranking = search(job, request.pools, request.space, own["objective"], market, own["top"])
    if not ranking:
        raise ValueError(does_not_fit(request, market))
    ranking = _within_budget(request, own, ranking)
    best = ranking[0]
    cost = cost_of(job, best, request.catalog)
    around = around_times(job, best, own)
    numbers = json_text(job, ranking, cost, own, around)
    if own["write"] is not None:
        folder = require_output_dir(own["write"])
        is_overridden = own["model"] not in (None, values["model_name_or_path"])
        launch = Launch(
            job, best, request.catalog, own["config"] or "YOUR_RECIPE.yaml", str(folder), market, is_overridden,
            request.reward, own["words"],
        )  # fmt: skip
        atomic_write_text(folder / "plan.json", numbers + "\n")
        for path in (*write_files(launch), folder / "plan.json"):
            say(f"wrote {path}")
    if own["json"]:
        print(numbers, flush=True)
        return
    show(*plan_parts(job, request.pools, ranking, cost, own), *around_lines(best, around, market))
    lost = rejected(job, request.pools, request.space)
    show(*(["\nwhat does not fit even at its best, or is not tried"] if lost else []), *lost)


def around_times(job: Job, plan: Plan, own: Mapping[str, Any]) -> dict[str, PhaseTime]:
    """Return the seconds of the stages around PPO that the options ask for, on the devices of a plan."""

    def shape_of(name: str | None) -> ModelShape:
        return job.shape if name is None else read_model(name).shape

    times, train = {}, plan.train
    if own["label_prompts"]:
        labelled = (own["label_prompts"], own["label_completions"], shape_of(own["judge_model"]))
        times["label"] = label_time(job, train, plan.sample, *labelled)
    if own["reward_pairs"]:
        times["reward training"] = reward_training_time(job, train, own["reward_pairs"])
    if own["distill_rows"]:
        times["distillation"] = distillation_time(job, train, own["distill_rows"], shape_of(own["student_model"]))
    return times


def _within_budget(request: Request, own: Mapping[str, Any], ranking: list[Plan]) -> list[Plan]:
    """Return the plans that the budget allows, the best first; the cheapest of all if it allows no other."""
    market, budget = own["market"], own["budget"]
    if budget is None:
        return ranking
    cheapest = search(request.job, request.pools, request.space, "cost", market, 1)
    totals = [cost_of(request.job, plan, request.catalog).total(market) for plan in (*ranking, *cheapest)]
    if totals[-1] > budget:
        raise ValueError(
            f"the cheapest plan costs ${totals[-1]:,.2f} ({market}), and the budget is ${budget:,.2f}; lower"
            " num_rollouts or num_ppo_epochs, take another market (--market spot), or raise --budget"
        )
    return [plan for plan, total in zip(ranking, totals, strict=False) if total <= budget] or cheapest


def does_not_fit(request: Request, market: str) -> str:
    """Return why nothing fits, and the cheapest hardware on which something does."""
    reasons = rejected(request.job, request.pools, request.space)
    reasons = reasons or ["no number of processes divides rollout_batch_size into equal minibatches"]
    hint = "No known device holds it, not even 64 of the largest"
    smallest = smallest_hardware(request.job, request.catalog, request.space, market)
    if smallest is not None:
        hint = f"The smallest hardware on which it fits is {smallest[0]}, at ${smallest[1]:.2f} per hour ({market})"
    settings = "" if request.space.base_bytes else "; --dtypes nf4 quantises the base"
    return f"nothing fits {' + '.join(map(str, request.pools))}: {'; '.join(reasons[:3])}. {hint}{settings}"


def _calibrate(own: Mapping[str, Any]) -> None:
    path = Path(os.path.expanduser(own["calibrate"]))
    if path.is_dir():
        raise ValueError(f"--calibrate {path} is a folder; name the file that is written")
    say("measuring this machine; about a minute, with nothing else running")
    from onetrunk.stages import calibrate  # Here: it imports torch.

    calibrate.run(path, load_catalog(own["hardware_file"]))


def _check(own: Mapping[str, Any]) -> None:
    from onetrunk.report.runs import read_run  # Here: it imports torch.

    show(*check_parts(read_run(own["check"]), own))


def check_parts(run: Run, own: Mapping[str, Any]) -> list[RenderableType]:
    """Return what a PPO run measured per rollout, next to the prediction for its settings and mean length."""
    if run.verb != "ppo" or not run.about:
        raise ValueError(f"{run.folder} has no record of a PPO run; give the output_dir of onetrunk ppo")
    timed = {phase: run.series(f"time/{phase}_s") for phase in ("generate", "score", "update")}
    num_steps = max((steps[-1] for steps, _ in timed.values() if steps), default=0)
    rollouts = int(num_steps // run.about["steps_per_rollout"])
    if rollouts < 2:
        raise ValueError(
            f"the log has {num_steps} optimizer steps, which is fewer than 2 rollouts; check a longer run"
        )
    values = _defaults()
    values |= {name: value for name, value in run.about["settings"].items() if name in values}
    pools = parse_pools(own["hardware"], None, load_catalog(own["hardware_file"]))
    mean_length = fmean(run.series("completion/length")[1])
    job, _ = _job_and_reward({**own, "completion_tokens": mean_length}, {**values, "num_rollouts": rollouts}, pools)
    device, begin = pools[0].device, next(event for event in run.events if event.get("event") == "begin")
    plan = plan_of_run(job, device, begin["num_processes"], values)
    lines = [(phase, "s", plan.phases[phase].seconds, sum(s) / rollouts) for phase, (_, s) in timed.items() if s]
    peak = max(value for phase, value in plan.peaks().items() if phase != "server")
    if measured := max(run.series("memory/peak_gib")[1], default=0):
        lines.append(("peak memory", "GiB", peak / GIB, measured))
    rows = [(w, f"{a:.3f} {unit}", f"{b:.3f} {unit}", f"{a / b - 1:+.0%}") for w, unit, a, b in lines]
    note = "the device is not calibrated; onetrunk plan --calibrate machine.yaml measures this machine"
    return [
        f"{run.folder}: {rollouts} rollouts of {job.rows} rows on {plan.train.count} x {device.name}",
        *(f"assumed: {text}" for text in job.assumed),
        table_of("a rollout", ("", "predicted", "measured", "error"), rows),
        *([] if device.rates.is_calibrated else [note]),
    ]


def plan_of_run(job: Job, device: Device, processes: int, values: Mapping[str, Any]) -> Plan:
    """Return the plan that a run with these settings has followed."""
    train = TrainLayout(
        device, processes, per_node=processes, base_bytes=job.base_bytes, rows=job.microbatch_rows,
        tokens=job.microbatch_tokens or 2**31, is_checkpointed=job.is_checkpointed, is_offloaded=job.is_offloaded,
    )  # fmt: skip
    sample = SampleLayout(device, LOCAL, processes)
    if job.uses_server and values["vllm_mode"] == "colocate":
        sample = SampleLayout(device, COLOCATED, processes)
    elif job.uses_server:
        sample = SampleLayout(device, SERVER, len(values["vllm_server_base_url"] or [""]))
    if values["rollout_backend"] == PIPELINED:
        split = tuple(values["pipeline_split"] or ())
        stages = values["pipeline_stages"] or processes
        if values["pipeline_training"]:
            train = replace(train, data=processes // stages, stages=stages, split=split)
        sample = SampleLayout(device, PIPELINED, processes // stages, stages=stages, split=split, per_node=processes)
    return evaluate(job, train, sample, job.schedule)


def show(*parts: RenderableType) -> None:
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
    job: Job, pools: Sequence[Pool], ranking: Sequence[Plan], cost: Cost, own: Mapping[str, Any]
) -> list[RenderableType]:
    """Return everything about the best plan, and the table of the others."""
    best = ranking[0]
    return [
        *job_lines(job, pools),
        f"\nbest plan ({own['objective']})",
        *best_lines(job, best, sum(pool.count for pool in pools)),
        phase_table(best),
        *launch_lines(job, best),
        memory_table(best),
        *([MARGIN_NOTE] if best.margin > MARGIN else []),
        "\nthe run",
        *cost_lines(job, best, cost, own["market"]),
        ranking_table(ranking, own["objective"], own["market"]),
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


def launch_lines(job: Job, plan: Plan) -> list[str]:
    """Return the long phases in which a GPU waits for the launches of its host, and what helps."""
    rows = min(most_rows_of(job, plan.sample), -(-job.rows // plan.sample.replicas))
    packs = (f"packs of {packs_of(job, plan.train).tokens:.0f} tokens are", "larger ones, by more microbatch_tokens")
    words = {
        "generate": (f"decoding of {rows} rows at once is", "use_vllm, whose engine has CUDA graphs, or more rows"),
        "score": packs,
        "update": packs,
    }
    return [
        f"{name}: {words[name][0]} bound by launches, which take {phase.launched:.2f} s at least: {words[name][1]}"
        for name, phase in plan.phases.items()
        if phase.launched and phase.bottleneck == "launches" and phase.seconds > 0.1 * plan.iteration_s
    ]


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


def ranking_table(ranking: Sequence[Plan], objective: str, market: str) -> Table:
    """Return the plans, with what each has worse than the first."""
    headers = ("schedule", "sampling", "devices", "training", "s/iteration", "$/iteration", "why it is not the first")
    rows = []
    for plan in ranking:
        stages = f" pp{plan.sample.stages}" if plan.sample.stages > 1 else ""
        devices = "+".join(f"{count}x{name}" for name, count in plan.devices.items())
        usd = plan.iteration_s / 3600 * plan.usd_per_hour(market)
        where = (plan.schedule, plan.sample.engine + stages, devices, layout_text(plan.train))
        why = why_not(plan, ranking[0], objective, market)
        rows.append((*where, f"{plan.iteration_s:.2f}", f"{usd:.4f}", why))
    return table_of("plans, best of each family", headers, rows, (*headers[:4], headers[-1]))


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


def json_text(
    job: Job, ranking: Sequence[Plan], cost: Cost, own: Mapping[str, Any], around: Mapping[str, PhaseTime]
) -> str:
    """Return the plans and the cost of the best one as JSON."""
    best, objective, market = ranking[0], own["objective"], own["market"]
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
            "launched_s": {name: phase.launched for name, phase in best.phases.items()},
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
        "ranking": [summary(plan) | {"why": why_not(plan, best, objective, market)} for plan in ranking],
    }
    return json.dumps(content, indent=2)
