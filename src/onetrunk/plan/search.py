"""Plans, what each needs, and the search for the best one: schedule, placement, parallelism, settings of a forward.

Score and update run in the trainer's processes, generation in a layout of its own. Every layout of each side is
enumerated, what does not fit is left out, and the rest is combined: of each division of the trainer's devices with the
fastest settings of a forward.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from onetrunk.plan.hardware import GIB, MARKETS, Catalog, Device, Pool
from onetrunk.plan.job import FP32, INT8_BYTES, MARGIN, SCHEDULES, Job
from onetrunk.plan.memory import engine_parts, sample_memory, train_memory
from onetrunk.plan.timing import (
    COLOCATED,
    ENGINES,
    LOCAL,
    PIPELINED,
    SERVER,
    PhaseTime,
    SampleLayout,
    TrainLayout,
    band,
    generate_time,
    packs_of,
    publish_seconds,
    score_time,
    shares_base,
    update_time,
)

GB = 1e9
# Loading, the check of the largest pack, the last save.
START_S = 180.0
# A float32 weight and the two numbers of Adam in a checkpoint of what trains.
CHECKPOINT_BYTES = 12
# Bytes of a token of a rollout in a checkpoint: ids, logprobs of sampler, policy and reference, value, advantage.
ROLLOUT_BYTES = 32
# Text of a prompt or a completion, per token.
TEXT_BYTES = 4.5
# Memory of a process of the trainer on its machine.
PROCESS_GIB = 4.0


@dataclass(frozen=True)
class Trained:
    """The trainer's side of a plan: seconds and memory of score and update."""

    layout: TrainLayout
    phases: Mapping[str, PhaseTime]
    memory: Mapping[str, Mapping[str, float]]

    @property
    def seconds(self) -> float:
        """Seconds of score and update."""
        return sum(phase.seconds for phase in self.phases.values())

    @property
    def count(self) -> int:
        """Devices that it takes, with the one of a reward server."""
        return self.layout.count + self.layout.serves_reward

    @property
    def peak(self) -> float:
        """Bytes of its fullest device at the peak of scoring and update."""
        return max(sum(parts.values()) for parts in self.memory.values())


@dataclass(frozen=True)
class Plan:
    """A plan and what it needs.

    Args:
        train, sample: how the phases run.
        phases: seconds of generate, score and update by part.
        publish_s: seconds between an update and the next rollout.
        iteration_s: seconds of an iteration in the long run.
        memory: bytes of a device by part, for each phase, and for "server" where there is one.
        margin: share of a trainer's device that stays free.
    """

    schedule: str
    train: TrainLayout
    sample: SampleLayout
    phases: Mapping[str, PhaseTime]
    publish_s: float
    iteration_s: float
    memory: Mapping[str, Mapping[str, float]]
    margin: float = MARGIN

    @property
    def served_devices(self) -> int:
        """Devices of servers: of samplers, and of the reward."""
        return (self.sample.count if self.sample.engine == SERVER else 0) + self.train.serves_reward

    @property
    def count(self) -> int:
        """Devices in all."""
        return self.train.count + self.served_devices

    @property
    def devices(self) -> dict[str, int]:
        """Devices in all, by name."""
        counts = {self.train.device.name: self.train.count + self.train.serves_reward}
        if self.sample.engine == SERVER:
            counts[self.sample.device.name] = counts.get(self.sample.device.name, 0) + self.sample.count
        return counts

    def usd_per_hour(self, market: str) -> float:
        """Return dollars per hour of all devices."""
        known = {device.name: device for device in (self.train.device, self.sample.device)}
        return sum(known[name].price(market) * count for name, count in self.devices.items())

    def peaks(self) -> dict[str, float]:
        """Return the bytes of a device at the peak of each phase."""
        return {phase: sum(parts.values()) for phase, parts in self.memory.items()}

    def usable(self, phase: str) -> float:
        """Return the bytes of a device that a phase may use."""
        is_server = phase == "server"
        device = self.sample.device if is_server else self.train.device
        return usable_bytes(device, MARGIN if is_server else self.margin)

    def shortage(self) -> tuple[str, float, float] | None:
        """Return the phase that lacks most, its bytes, and the bytes that a device has; None if all phases fit."""
        needs = [(phase, needed, self.usable(phase)) for phase, needed in self.peaks().items()]
        worst = max(needs, key=lambda entry: entry[1] / entry[2])
        return worst if worst[1] > worst[2] else None

    def idle(self) -> dict[str, float]:
        """Return the share of an iteration in which the devices of each pool wait."""
        if self.sample.engine != SERVER:
            return {"trainer": 0.0}
        seconds = {name: phase.seconds for name, phase in self.phases.items()}
        busy = {"trainer": seconds["score"] + seconds["update"], "sampler": seconds["generate"]}
        return {name: max(0.0, 1 - work / self.iteration_s) for name, work in busy.items()}


def usable_bytes(device: Device, margin: float = MARGIN) -> float:
    """Return the bytes of a device that a plan may use; a server, which takes its memory at its start, by default."""
    return device.memory_gib * GIB * (1 - margin)


def trained(job: Job, layout: TrainLayout) -> Trained:
    """Return what a layout of the trainer needs."""
    phases = {"score": score_time(job, layout), "update": update_time(job, layout)}
    return Trained(layout, phases, train_memory(job, layout))


def sampling_time(job: Job, train: TrainLayout, sample: SampleLayout) -> PhaseTime:
    """Return the seconds of generation; in the trainer's processes the base has the trainer's precision."""
    return generate_time(replace(job, base_bytes=train.base_bytes), sample)


def combine(job: Job, side: Trained, sample: SampleLayout, generate: PhaseTime, schedule: str) -> Plan:
    """Return the plan of a trainer and a sampler, whether it fits or not.

    sync: one after the other. one_step: a rollout is sampled during an update. async: the same, and the tail of a
    rollout is filled with rows of the next.
    """
    train, publish = side.layout, publish_seconds(job, side.layout, sample)
    sampling = generate.seconds - (generate.tail if schedule == "async" else 0.0)
    total = (sampling + side.seconds if schedule == "sync" else max(sampling, side.seconds)) + publish
    memory = side.memory | sample_memory(job, train, sample, side.memory["score"])
    return Plan(schedule, train, sample, {"generate": generate, **side.phases}, publish, total, memory, job.margin)


def evaluate(job: Job, train: TrainLayout, sample: SampleLayout, schedule: str) -> Plan:
    """Return a plan with everything that it needs, whether it fits or not."""
    return combine(job, trained(job, train), sample, sampling_time(job, train, sample), schedule)


def host_gib(job: Job, plan: Plan) -> dict[str, float]:
    """Return the GiB of system memory per trainer device, by what takes them."""
    loading = job.shape.parameters * job.model.itemsize / GIB / plan.train.per_node
    parts = {"process": PROCESS_GIB, "weights while loading": loading}
    if plan.train.is_offloaded:
        stored = packs_of(job, plan.train).tokens * job.shape.hidden_size * job.itemsize * job.adapted_layers
        parts["offloaded activations"] = stored / GIB
    if plan.sample.engine == COLOCATED and not shares_base(job, plan.train, plan.sample):
        parts["sleeping engine"] = 2.0 * job.shape.parameters / plan.sample.tensor / GIB
    return parts


# --- cost -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """What a run takes.

    Args:
        low_hours, high_hours: the band.
        usd: of all devices, by market; storage and transfer are apart.
        storage_gb: by what is kept.
        storage_usd, transfer_usd: for a month, and once.
    """

    hours: float
    low_hours: float
    high_hours: float
    device_hours: dict[str, float]
    usd: dict[str, float]
    storage_gb: dict[str, float]
    storage_usd: float
    transfer_usd: float

    def total(self, market: str) -> float:
        """Return dollars of the run on a market, with storage and transfer."""
        return self.usd[market] + self.storage_usd + self.transfer_usd


def storage_gb(job: Job) -> dict[str, float]:
    """Return the gigabytes that a run leaves and needs on disk, by what they are."""
    rollout = ROLLOUT_BYTES * job.rows * job.lengths.row
    steps = job.num_rollouts * job.num_ppo_epochs * job.num_minibatches
    kept = steps // job.save_every if job.save_every else 0
    if job.keeps_checkpoints:
        kept = min(kept, max(2, job.keeps_checkpoints))
    return {
        "base model": job.shape.parameters * job.model.itemsize / GB,
        "reward model": 0.0 if job.reward is None else job.reward.parameters * job.reward_bytes / GB,
        f"{kept} checkpoints": kept * (CHECKPOINT_BYTES * job.adapter_weights + rollout) / GB,
        "result": 4.0 * job.adapter_weights / GB,
        "rollout in work": rollout / GB,
        "prompts": job.num_rollouts * job.rollout_batch_size * job.lengths.prompt * TEXT_BYTES / GB,
    }


def cost_of(job: Job, plan: Plan, catalog: Catalog) -> Cost:
    """Return what a run of a plan costs."""
    hours = (START_S + job.num_rollouts * plan.iteration_s) / 3600
    low, high = band(plan.train.device)
    kept = storage_gb(job)
    # The base is downloaded once to each machine; checkpoints go to a bucket once.
    sent = kept["base model"] * -(-plan.count // plan.train.per_node) + kept["result"]
    return Cost(
        hours=hours,
        low_hours=hours * low,
        high_hours=hours * high,
        device_hours={name: hours * count for name, count in plan.devices.items()},
        usd={market: hours * plan.usd_per_hour(market) for market in MARKETS},
        storage_gb=kept,
        storage_usd=sum(kept.values()) * catalog.storage_usd_per_gb_month,
        transfer_usd=sent * catalog.transfer_usd_per_gb,
    )


# --- the search -----------------------------------------------------------------------------------------------------

OBJECTIVES = ("time", "cost", "gpus")
# Tokens of a forward that are tried, besides the recipe's own.
TOKENS = (2048, 4096, 8192, 16384, 32768, 65536)
# With a budget of tokens the number of rows does not bound a forward.
MANY_ROWS = 512
# Rows of a server that decode at once; it keeps a queue for the rest.
SERVED_ROWS = (8, 32, 64, 128, 256, 512)
# More rows do not decode at once in a process: a larger rollout takes no longer to search.
MOST_DECODING = 4096
# Stages of a pipeline of the trainer's processes that are tried at most; each must have a layer.
MOST_STAGES = 16
# Counts of a device that are tried for the smallest hardware that fits.
COUNTS = (1, 2, 4, 8, 16, 32, 64)
# Bytes of a weight that a colocated engine rejects: it quantises to 4 bits alone, and adapters need 16 bits.
NOT_COLOCATED = (INT8_BYTES, FP32)


@dataclass(frozen=True)
class Space:
    """What may be varied.

    Args:
        schedules: that are tried; all but sync need a server.
        engines: that are tried.
        base_bytes: bytes of a weight of the base that may be chosen; empty: the recipe's.
        keeps_settings: microbatch, checkpointing and offloading stay as the recipe has them.
        stages: of a pipeline of the trainer's processes; None: all that divide them.
        split: layers of each of these stages; empty: those that the run chooses by itself.
        stage_training: whether the trainer's processes score and update in such stages too; None: both are tried.
        tokens: of a forward that are tried.
        serves_reward: the reward model may have a device of its own.
    """

    schedules: Sequence[str] = SCHEDULES
    engines: Sequence[str] = ENGINES
    base_bytes: Sequence[float] = ()
    keeps_settings: bool = False
    stages: int | None = None
    split: tuple[int, ...] = ()
    stage_training: bool | None = None
    tokens: Sequence[int] = TOKENS
    serves_reward: bool = True

    @property
    def offers_stages(self) -> bool:
        """Whether layouts may train in pipeline stages, which always sample in them, before the next update."""
        return self.stage_training is not False and PIPELINED in self.engines and "sync" in self.schedules


# --- layouts --------------------------------------------------------------------------------------------------------


def train_layouts(job: Job, pool: Pool, space: Space) -> Iterator[TrainLayout]:
    """Yield every layout of the trainer on at most all devices of a pool."""
    prompts = job.rollout_batch_size
    may_serve = space.serves_reward and job.reward is not None and not pool.device.is_cpu
    for data in (d for d in range(1, min(prompts, pool.count) + 1) if prompts % d == 0):
        if (prompts // data * job.num_generations) % job.num_minibatches:
            continue
        for base in _divided_layouts(job, pool, space, data):
            for layout in _with_settings(base, job, space):
                if _is_accepted(job, layout):
                    yield layout
                    if may_serve and _has_room(pool, layout, 1):
                        yield replace(layout, serves_reward=True)


def _is_accepted(job: Job, layout: TrainLayout) -> bool:
    """Return whether the trainer accepts a layout at startup, with its precision of the base and with episodes."""
    is_quantised = layout.base_bytes <= INT8_BYTES
    machines = -(-layout.count // layout.per_node)
    if layout.count % machines or layout.count // machines % layout.tensor:
        return False
    if layout.is_offloaded and (layout.is_staged or layout.tensor > 1 or layout.shards > 1):
        return False
    if layout.is_staged:
        return not is_quantised
    if layout.tensor > 1:
        return not (is_quantised or job.plays)
    return layout.shards == 1 or layout.base_bytes != INT8_BYTES


def _has_room(pool: Pool, train: TrainLayout, served: int) -> bool:
    """Return whether a pool has this many devices for servers, all on one machine, next to a trainer."""
    count = train.count + served
    # Without room on the trainer's machine they have another one.
    machines = -(-train.count // pool.per_node) + (count > pool.per_node)
    return served <= pool.per_node and count <= pool.count and machines <= -(-pool.count // pool.per_node)


def _divided_layouts(job: Job, pool: Pool, space: Space, data: int) -> Iterator[TrainLayout]:
    """Yield the ways in which `data` processes, groups or pipelines with different rows hold the base."""
    for tensor in _divisions(job, pool) if not space.stage_training else ():
        if data * tensor <= pool.count:
            counts = {1, data} if tensor == 1 else {1}
            if tensor == 1 and data > pool.per_node and data % pool.per_node == 0:
                counts.add(pool.per_node)
            for shards in sorted(counts):
                yield TrainLayout(pool.device, data, tensor, shards, pool.per_node)
    if space.offers_stages and stage_obstacle(job, space) is None:
        for stages in _pipeline_sizes(job, pool.count // data, space.stages):
            yield TrainLayout(pool.device, data, per_node=pool.per_node, stages=stages, split=space.split)


def stage_obstacle(job: Job, space: Space) -> str | None:
    """Return why the recipe excludes training in pipeline stages, or None."""
    if job.stage_obstacle is None and all(size <= INT8_BYTES for size in space.base_bytes or (job.base_bytes,)):
        return "a quantised base loads on one device as a whole"
    if job.stage_obstacle is None and space.keeps_settings and job.is_offloaded:
        return "activation_offloading wraps a whole forward"
    return job.stage_obstacle


def _divisions(job: Job, pool: Pool) -> list[int]:
    """Return the sizes of groups that may divide every matrix: they share the key-value heads of one machine."""
    heads = job.shape.num_kv_heads
    return [1] if pool.device.is_cpu else [t for t in (1, 2, 4, 8) if t <= pool.per_node and heads % t == 0]


def _with_settings(base: TrainLayout, job: Job, space: Space) -> Iterator[TrainLayout]:
    """Yield a layout with each dtype of the base and each setting of a forward."""
    own = (job.microbatch_rows, job.microbatch_tokens or 2**31)
    forwards = [own, *((MANY_ROWS, tokens) for tokens in space.tokens if tokens >= job.lengths.width)]
    savings = [(False, False), (True, False), (True, True)]
    if space.keeps_settings:
        forwards, savings = [own], [(job.is_checkpointed, job.is_offloaded)]
    for size, (rows, tokens), (checkpointed, offloaded) in itertools.product(
        space.base_bytes or (job.base_bytes,), forwards, savings
    ):
        yield replace(
            base, base_bytes=size, rows=rows, tokens=tokens, is_checkpointed=checkpointed, is_offloaded=offloaded
        )


def server_layouts(job: Job, pool: Pool) -> Iterator[SampleLayout]:
    """Yield every layout of servers on at most all devices of a machine of a pool."""
    for tensor in _divisions(job, pool):
        for replicas in range(1, min(job.rows, min(pool.count, pool.per_node) // tensor) + 1):
            yield from (SampleLayout(pool.device, SERVER, replicas, tensor, rows=rows) for rows in SERVED_ROWS)


def inner_layouts(job: Job, train: TrainLayout, space: Space) -> Iterator[SampleLayout]:
    """Yield the layouts of samplers that share the trainer's devices; training stages sample in the same stages."""
    # Rows of a process; training stages have the same rows.
    rows = min(MOST_DECODING, -(-job.rows // (train.data * train.stages)))
    caps = sorted({rows, *(2**i for i in range(rows.bit_length()))}, reverse=True)
    if LOCAL in space.engines and not train.is_staged:
        yield from (SampleLayout(train.device, LOCAL, train.data, train.tensor, rows=cap) for cap in caps)
    if PIPELINED in space.engines and train.tensor == 1 and not job.plays:
        sizes = _pipeline_sizes(job, train.data, space.stages)
        for stages in [train.stages] if train.is_staged else [size for size in sizes if train.data % size == 0]:
            pipelines = train.count // stages
            own = SampleLayout(train.device, PIPELINED, pipelines, 1, stages, 1, space.split, train.per_node)
            yield from (replace(own, rows=cap * stages) for cap in caps)
    # The colocated engine works with one process, and reads a whole base.
    is_colocatable = train.count == 1 and train.base_bytes not in NOT_COLOCATED and not train.device.is_cpu
    if COLOCATED in space.engines and is_colocatable:
        yield from (SampleLayout(train.device, COLOCATED, 1, rows=cap) for cap in SERVED_ROWS)


def _pipeline_sizes(job: Job, most: int, stages: int | None) -> Sequence[int]:
    """Return the stages of a pipeline that are tried; each has a layer."""
    most = min(most, job.shape.num_layers, MOST_STAGES)
    return range(2, most + 1) if stages is None else [stages] if 2 <= stages <= most else []


# --- what fits ------------------------------------------------------------------------------------------------------


def plans(job: Job, pools: Sequence[Pool], space: Space) -> Iterator[Plan]:
    """Yield the plans that fit, of each division of the devices with its fastest forwards.

    What stays in memory while a rollout is sampled does not depend on the settings of a forward, so the fastest
    forward that fits is the best one with every sampler.
    """
    fastest: dict[tuple, tuple[Pool, Trained]] = {}
    for pool in pools:
        for layout in train_layouts(job, pool, space):
            side = trained(job, layout)
            if side.peak <= usable_bytes(layout.device, job.margin):
                division = replace(layout, rows=0, tokens=0, is_checkpointed=False, is_offloaded=False)
                _, known = fastest.setdefault(division, (pool, side))
                if side.seconds < known.seconds:
                    fastest[division] = pool, side
    servers = _servers(job, pools) if SERVER in space.engines and fastest else []
    for pool, side in fastest.values():
        if "sync" in space.schedules:
            for sample in inner_layouts(job, side.layout, space):
                plan = combine(job, side, sample, sampling_time(job, side.layout, sample), "sync")
                if plan.shortage() is None:
                    yield plan
        # With tensor parallelism the trainer rejects other schedules.
        schedules = [name for name in space.schedules if name == "sync" or side.layout.tensor == 1]
        for other, sample, time in servers if not side.layout.is_staged else ():
            serves = side.layout.serves_reward
            if not serves if other != pool else _has_room(pool, side.layout, sample.count + serves):
                yield from (combine(job, side, sample, time, schedule) for schedule in schedules)


def _servers(job: Job, pools: Sequence[Pool]) -> list[tuple[Pool, SampleLayout, PhaseTime]]:
    """Return the layouts of servers that fit; of those that differ in rows alone, the fastest without its tail too."""
    groups: dict[tuple, list[tuple[Pool, SampleLayout, PhaseTime]]] = {}
    for pool in pools:
        for layout in server_layouts(job, pool):
            if sum(engine_parts(job, layout).values()) <= usable_bytes(pool.device):
                group = groups.setdefault((pool, layout.tensor, layout.replicas), [])
                group.append((pool, layout, generate_time(job, layout)))
    chosen = []
    for group in groups.values():
        best = [min(group, key=lambda e: e[2].seconds), min(group, key=lambda e: e[2].seconds - e[2].tail)]
        chosen += best[: 1 if best[0] is best[1] else 2]
    return chosen


# --- the ranking ----------------------------------------------------------------------------------------------------


def value_of(plan: Plan, objective: str, market: str) -> tuple[float, ...]:
    """Return what an objective makes as small as possible; ties go to fewer seconds, dollars and devices.

    Next to a sampler that takes longer, the trainer's speed does not change the iteration, so it comes last.
    """
    seconds, count, cost = plan.iteration_s, plan.count, plan.iteration_s * plan.usd_per_hour(market)
    order = {"time": (seconds, cost, count), "cost": (cost, seconds, count), "gpus": (count, seconds, cost)}
    return (*order[objective], plan.phases["score"].seconds + plan.phases["update"].seconds)


def search(
    job: Job, pools: Sequence[Pool], space: Space, objective: str = "time", market: str = "on_demand", most: int = 8
) -> list[Plan]:
    """Return the best plan of each family of plans that fits, the best first; [] if none fits.

    A family is a schedule, an engine, and a way to hold the base. The first is the best of all plans.

    Args:
        objective: what the best plan has least of, one of OBJECTIVES.
    """
    best: dict[tuple, tuple[tuple[float, ...], Plan]] = {}
    for plan in plans(job, pools, space):
        train, sample = plan.train, plan.sample
        way = "tensor" if train.tensor > 1 else "shards" if train.shards > 1 else train.is_staged
        family = (plan.schedule, sample.engine, way, sample.stages > 1, train.device.name, sample.device.name)
        entry = (value_of(plan, objective, market), plan)
        best[family] = min(best.get(family, entry), entry, key=lambda e: e[0])
    return [plan for _, plan in sorted(best.values(), key=lambda e: e[0])[:most]]


def why_not(plan: Plan, winner: Plan, objective: str, market: str) -> str:
    """Return in words what a plan has worse than the winner; "" of the winner."""
    if plan is winner:
        return ""
    words = []
    ratio = plan.iteration_s / winner.iteration_s
    cost = ratio * plan.usd_per_hour(market) / winner.usd_per_hour(market)
    if objective == "cost" or (ratio < 1.005 and cost >= 1.005):
        words.append(f"costs {cost:.2f} times as much")
    if objective == "gpus" and plan.count > winner.count:
        words.append(f"takes {plan.count} devices instead of {winner.count}")
    if ratio < 1.005:
        words.append("is faster" if ratio < 0.995 else "is as fast")
    else:
        words.append(f"takes {ratio:.2f} times as long")
        losses = {name: plan.phases[name].seconds - winner.phases[name].seconds for name in plan.phases}
        name = max(losses, key=losses.__getitem__)
        wait = ""
        if plan.schedule == "sync" and winner.schedule != "sync":
            wait = "its phases wait for each other"
        elif plan.schedule != "async" and winner.schedule == "async":
            wait = "its rollouts wait for their longest completions"
        # Next to a schedule that waits, a slower phase is the reason if it explains most of the difference.
        if losses[name] > ((plan.iteration_s - winner.iteration_s) / 2 if wait else 0.0):
            words.append(f"{name} needs {losses[name]:.1f} s more, most of it {plan.phases[name].bottleneck}")
        else:
            words.append(wait or f"publishing takes {plan.publish_s:.1f} s")
    words += [f"{name} idle {share:.0%}" for name, share in plan.idle().items() if share > 0.25]
    return "; ".join(words)


# --- what does not fit ----------------------------------------------------------------------------------------------


def rejected(job: Job, pools: Sequence[Pool], space: Space) -> list[str]:
    """Return why the layouts that come closest to fitting do not, one line per way to hold the base."""
    closest: dict[str, tuple[float, str]] = {}
    own = replace(space, engines=[e for e in (LOCAL, PIPELINED) if e in space.engines] or [LOCAL], serves_reward=False)
    for layout in (layout for pool in pools for layout in train_layouts(job, pool, own)):
        side = trained(job, layout)
        for sample in inner_layouts(job, layout, own):
            plan = combine(job, side, sample, PhaseTime(), "sync")
            phase, needed, room = plan.shortage() or ("", 0.0, 1.0)
            if phase and needed / room < closest.get(layout.held, (float("inf"),))[0]:
                parts = plan.memory[phase]
                part = max(parts, key=parts.__getitem__)
                text = (
                    f"{layout.held} ({layout.device.name}): {phase} needs {needed / GIB:.1f} of {room / GIB:.1f} GiB,"
                    f" of which {part} {parts[part] / GIB:.1f}"
                )
                closest[layout.held] = (needed / room, text)
    lines = [text for _, text in sorted(closest.values())]
    obstacle = stage_obstacle(job, space)
    if obstacle is not None and space.offers_stages and max(pool.count for pool in pools) > 1:
        lines.append(f"training in pipeline stages is not tried: {obstacle}")
    if COLOCATED in space.engines and all(size in NOT_COLOCATED for size in space.base_bytes or (job.base_bytes,)):
        lines.append("a colocated engine is not tried: vLLM needs 16 bits for adapters, and quantises to 4 bits alone")
    return lines


def smallest_hardware(job: Job, catalog: Catalog, space: Space, market: str) -> tuple[Pool, float] | None:
    """Return the cheapest count of one device on which some plan fits, and its dollars per hour."""
    # What needs the least memory: one row in a forward and one that decodes, checkpointed.
    small = replace(job, microbatch_rows=1, microbatch_tokens=None, is_checkpointed=True, num_minibatches=1)
    least = replace(space, tokens=(), schedules=("sync",), engines=(LOCAL, PIPELINED))
    pools = [
        (count * device.price(market), count, Pool(device, count, min(count, 8)))
        for device in catalog.devices.values()
        for count in COUNTS
        if not device.is_cpu
    ]
    for price, _, pool in sorted(pools, key=lambda entry: entry[:2]):
        if next(plans(small, (pool,), least), None) is not None:
            return pool, price
    return None
