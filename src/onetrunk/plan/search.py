"""The search for the best plan: schedule, placement, parallelism of each phase, and the settings of a forward.

Score and update run in the trainer's processes, generation in a layout of its own. Every layout of each side is
enumerated, what does not fit is left out, and the rest is combined: of each division of the trainer's devices with the
fastest settings of a forward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from onetrunk.plan.evaluate import (
    REWARD_DEVICES,
    Plan,
    engine_parts,
    evaluate,
    iteration_seconds,
    sample_memory,
    sampling_time,
    scored,
    train_memory,
    usable_bytes,
)
from onetrunk.plan.hardware import GIB, Catalog, Pool
from onetrunk.plan.job import Job
from onetrunk.plan.memory import INT8_BYTES
from onetrunk.plan.timing import (
    COLOCATED,
    LOCAL,
    PIPELINED,
    SERVER,
    PhaseTime,
    SampleLayout,
    TrainLayout,
    generate_time,
    publish_seconds,
    update_time,
)

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


@dataclass(frozen=True)
class Space:
    """What may be varied.

    Args:
        schedules: of SCHEDULES; all but sync need a server.
        engines: of LOCAL, PIPELINED, COLOCATED and SERVER.
        base_bytes: bytes of a weight of the base that may be chosen; empty: the recipe's.
        keeps_settings: microbatch, checkpointing and offloading stay as the recipe has them.
        pipelines: stages of a server's pipeline that are tried.
        stages: of a pipeline of the trainer's processes; None: all that divide them.
        split: layers of each of these stages; empty: those that the run chooses by itself.
        stage_training: whether the trainer's processes score and update in such stages too; None: both are tried.
        tokens: of a forward that are tried.
        serves_reward: the reward model may have a device of its own.
    """

    schedules: Sequence[str] = ("sync", "one_step", "async")
    engines: Sequence[str] = (LOCAL, PIPELINED, COLOCATED, SERVER)
    base_bytes: Sequence[float] = ()
    keeps_settings: bool = False
    pipelines: Sequence[int] = (1,)
    stages: int | None = None
    split: tuple[int, ...] = ()
    stage_training: bool | None = None
    tokens: Sequence[int] = TOKENS
    serves_reward: bool = True


# --- layouts --------------------------------------------------------------------------------------------------------


def train_layouts(job: Job, pool: Pool, space: Space) -> Iterator[TrainLayout]:
    """Yield every layout of the trainer on at most all devices of a pool."""
    prompts = job.rollout_batch_size
    for data in (d for d in range(1, min(prompts, pool.count) + 1) if prompts % d == 0):
        if (prompts // data * job.num_generations) % job.num_minibatches:
            continue
        for base in _divided_layouts(job, pool, space, data):
            for layout in _with_settings(base, job, space):
                # A base in stages is neither quantised nor offloaded.
                if not (layout.is_staged and (layout.base_bytes <= INT8_BYTES or layout.is_offloaded)):
                    yield layout


def _divided_layouts(job: Job, pool: Pool, space: Space, data: int) -> Iterator[TrainLayout]:
    """Yield the ways in which `data` processes, groups or pipelines with different rows hold the base."""
    for tensor in _divisions(job, pool) if not space.stage_training else ():
        if data * tensor <= pool.count:
            for shards in _shard_counts(data, tensor, pool):
                yield TrainLayout(pool.device, data, tensor, shards, pool.per_node)
    if _offers_stages(space) and stage_obstacle(job, space) is None:
        for stages in _pipeline_sizes(job, pool.count // data, space.stages):
            yield TrainLayout(pool.device, data, per_node=pool.per_node, stages=stages, split=space.split)


def _offers_stages(space: Space) -> bool:
    """Return whether layouts may train in pipeline stages, which always sample in them, before the next update."""
    return space.stage_training is not False and PIPELINED in space.engines and "sync" in space.schedules


def stage_obstacle(job: Job, space: Space) -> str | None:
    """Return why the recipe excludes training in pipeline stages, or None."""
    if job.stage_obstacle is not None:
        return job.stage_obstacle
    if all(size <= INT8_BYTES for size in space.base_bytes or (job.base_bytes,)):
        return "a quantised base loads on one device as a whole"
    if space.keeps_settings and job.is_offloaded:
        return "activation_offloading wraps a whole forward"
    return None


def _divisions(job: Job, pool: Pool) -> list[int]:
    """Return the sizes of groups that may divide every matrix: they share the key-value heads of one machine."""
    heads = job.shape.num_kv_heads
    return [1] if pool.device.is_cpu else [t for t in (1, 2, 4, 8) if t <= pool.per_node and heads % t == 0]


def _shard_counts(data: int, tensor: int, pool: Pool) -> list[int]:
    if tensor > 1 or data == 1:
        return [1]
    counts = {1, data}
    if data > pool.per_node and data % pool.per_node == 0:
        counts.add(pool.per_node)
    return sorted(counts)


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


def server_layouts(job: Job, pool: Pool, space: Space) -> Iterator[SampleLayout]:
    """Yield every layout of servers on at most all devices of a pool."""
    for tensor in _divisions(job, pool):
        for stages in space.pipelines:
            if stages > job.shape.num_layers:
                continue
            for replicas in range(1, min(job.rows, pool.count // (tensor * stages)) + 1):
                for rows in SERVED_ROWS:
                    yield SampleLayout(pool.device, SERVER, replicas, tensor, stages, stages, rows)


def inner_layouts(
    job: Job, train: TrainLayout, engine: str, pool: Pool, stages: int | None = None, split: tuple[int, ...] = ()
) -> Iterator[SampleLayout]:
    """Yield the layouts of a sampler that shares the trainer's devices; `stages` and `split` as in Space."""
    # Of a process; training stages have the same rows.
    rows = min(MOST_DECODING, -(-job.rows // (train.data * train.stages)))
    caps = sorted({rows, *(2**i for i in range(rows.bit_length()))}, reverse=True)
    if train.is_staged:
        if engine == PIPELINED:
            yield from (_pipelined(train, train.data, train.stages, train.split, cap) for cap in caps)
        return
    if engine == LOCAL:
        yield from (SampleLayout(train.device, LOCAL, train.data, train.tensor, rows=cap) for cap in caps)
        return
    if engine == PIPELINED:
        counts = _pipeline_sizes(job, train.data, stages) if train.tensor == 1 else ()
        for count in (count for count in counts if train.data % count == 0):
            yield from (_pipelined(train, train.data // count, count, split, cap) for cap in caps)
        return
    # The colocated engine works with one process, and reads a whole base.
    if train.count == 1 and not pool.device.is_cpu:
        yield from (SampleLayout(train.device, COLOCATED, train.data, rows=cap) for cap in SERVED_ROWS)


def _pipelined(train: TrainLayout, pipelines: int, stages: int, split: tuple[int, ...], rows: int) -> SampleLayout:
    """Return pipelines of the trainer's processes that decode `rows` rows per process, as many as without them."""
    own = (train.device, PIPELINED, pipelines, 1, stages, stages, rows * stages)
    return SampleLayout(*own, split=split, per_node=train.per_node)


def _pipeline_sizes(job: Job, most: int, stages: int | None) -> Sequence[int]:
    """Return the stages of a pipeline that are tried; each has a layer, and tensor parallelism excludes it."""
    most = min(most, job.shape.num_layers, MOST_STAGES)
    return range(2, most + 1) if stages is None else [stages] if 2 <= stages <= most else []


def reward_places(job: Job, pool: Pool, space: Space) -> tuple[bool, ...]:
    """Return whether the reward model may have a device of its own."""
    is_possible = space.serves_reward and job.reward is not None and pool.count > REWARD_DEVICES
    return (False, True) if is_possible and not pool.device.is_cpu else (False,)


# --- what fits ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trainer:
    """A layout of the trainer with what combinations need of it."""

    pool: Pool
    layout: TrainLayout
    has_reward_server: bool
    seconds: float
    memory: dict[str, dict[str, float]]

    @property
    def devices(self) -> int:
        """Devices of the pool that it takes."""
        return self.layout.count + (REWARD_DEVICES if self.has_reward_server else 0)

    @property
    def peak(self) -> float:
        """Bytes of its fullest device at the peak of scoring and update."""
        return max(sum(parts.values()) for parts in self.memory.values())

    @property
    def division(self) -> tuple:
        """What it shares with layouts that differ in the settings of a forward alone."""
        layout = self.layout
        return (layout.device.name, layout.data, layout.tensor, layout.shards, layout.stages, layout.base_bytes,
                self.has_reward_server)  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """A combination, before everything of it is worked out."""

    schedule: str
    trainer: Trainer
    sample: SampleLayout
    seconds: float

    @property
    def count(self) -> int:
        """Devices in all."""
        return self.trainer.devices + (self.sample.count if self.sample.engine == SERVER else 0)

    def usd_per_hour(self, market: str) -> float:
        """Return dollars per hour of all devices."""
        own = self.trainer.devices * self.trainer.layout.device.price(market)
        return own + (self.sample.count * self.sample.device.price(market) if self.sample.engine == SERVER else 0)

    @property
    def family(self) -> tuple:
        """What plans share that a ranking shows once."""
        layout, sample = self.trainer.layout, self.sample
        return (self.schedule, sample.engine, _way(layout).split()[0], sample.stages > 1, layout.device.name,
                sample.device.name)  # fmt: skip


def trainers(job: Job, pools: Sequence[Pool], space: Space) -> Iterator[Trainer]:
    """Yield the trainer's layouts of every pool, whether they fit or not."""
    for pool in pools:
        for layout in train_layouts(job, pool, space):
            for served in reward_places(job, pool, space):
                if layout.count + (REWARD_DEVICES if served else 0) <= pool.count:
                    seconds = scored(job, layout, served).seconds + update_time(job, layout).seconds
                    yield Trainer(pool, layout, served, seconds, train_memory(job, layout, served))


def candidates(job: Job, pools: Sequence[Pool], space: Space) -> Iterator[Candidate]:
    """Yield the combinations that fit, of each division of the devices with its fastest forwards.

    What stays in memory while a rollout is sampled does not depend on the settings of a forward, so the fastest
    forward that fits is the best one with every sampler.
    """
    fastest: dict[tuple, Trainer] = {}
    for trainer in trainers(job, pools, space):
        if trainer.peak <= usable_bytes(trainer.layout.device, job.margin):
            known = fastest.setdefault(trainer.division, trainer)
            if trainer.seconds < known.seconds:
                fastest[trainer.division] = trainer
    if "sync" in space.schedules:
        for trainer in fastest.values():
            yield from _sharing(job, trainer, space)
    if SERVER in space.engines and fastest:
        servers = _servers(job, pools, space)
        for trainer in fastest.values():
            if not trainer.layout.is_staged:  # Training stages sample themselves.
                yield from _serving(job, trainer, servers, space)


def _sharing(job: Job, trainer: Trainer, space: Space) -> Iterator[Candidate]:
    """Yield the fastest sampler of each engine on the trainer's own devices that fits."""
    layout = trainer.layout
    # Before a rollout these are free again; weights of training stages count with the stage that samples.
    freed = ("activations", "logits", "transient", "buffers", *(["weights"] if layout.is_staged else []))
    kept = sum(value for part, value in trainer.memory["score"].items() if part not in freed)
    room = usable_bytes(layout.device, job.margin) - kept
    for engine in (LOCAL, PIPELINED, COLOCATED):
        fitting = [
            (sampling_time(job, layout, sample), sample)
            for sample in inner_layouts(job, layout, engine, trainer.pool, space.stages, space.split)
            if engine in space.engines and sum(sample_memory(job, layout, sample, {})["generate"].values()) <= room
        ]
        if fitting:
            time, sample = min(fitting, key=lambda entry: entry[0].seconds)
            seconds = iteration_seconds("sync", time, trainer.seconds, publish_seconds(job, layout, sample))
            yield Candidate("sync", trainer, sample, seconds)


def _servers(job: Job, pools: Sequence[Pool], space: Space) -> list[tuple[Pool, SampleLayout, PhaseTime]]:
    """Return the layouts of servers that fit; of those that differ in rows alone, the fastest without its tail too."""
    groups: dict[tuple, list[tuple[Pool, SampleLayout, PhaseTime]]] = {}
    for pool in pools:
        for layout in server_layouts(job, pool, space):
            if sum(engine_parts(job, layout).values()) <= usable_bytes(pool.device):
                key = (pool, layout.tensor, layout.stages, layout.replicas)
                groups.setdefault(key, []).append((pool, layout, generate_time(job, layout)))
    chosen = []
    for group in groups.values():
        best = [min(group, key=lambda e: e[2].seconds), min(group, key=lambda e: e[2].seconds - e[2].tail)]
        chosen += best[: 1 if best[0] is best[1] else 2]
    return chosen


def _serving(
    job: Job, trainer: Trainer, servers: Sequence[tuple[Pool, SampleLayout, PhaseTime]], space: Space
) -> Iterator[Candidate]:
    """Yield a trainer with each of the servers that the pool has devices for, in each schedule."""
    for pool, layout, time in servers:
        if pool != trainer.pool or trainer.devices + layout.count <= pool.count:
            publish = publish_seconds(job, trainer.layout, layout)
            for schedule in space.schedules:
                seconds = iteration_seconds(schedule, time, trainer.seconds, publish)
                yield Candidate(schedule, trainer, layout, seconds)


# --- the ranking ----------------------------------------------------------------------------------------------------


def value_of(objective: str, seconds: float, count: int, usd_per_hour: float) -> tuple[float, ...]:
    """Return what an objective makes as small as possible; ties go to fewer seconds, dollars and devices."""
    cost = seconds * usd_per_hour
    return {"time": (seconds, cost, count), "cost": (cost, seconds, count), "gpus": (count, seconds, cost)}[objective]


@dataclass(frozen=True)
class Ranked:
    """A plan in the ranking, and why it is not the first."""

    plan: Plan
    why: str


def search(
    job: Job, pools: Sequence[Pool], space: Space, objective: str = "time", market: str = "on_demand", most: int = 8
) -> list[Ranked]:
    """Return the best plan of each family of plans that fits, the best first; [] if none fits.

    A family is a schedule, an engine, and a division of the devices. The first is the best of all plans.

    Args:
        most: plans that are returned.
    """

    def value(candidate: Candidate) -> tuple[float, ...]:
        numbers = value_of(objective, candidate.seconds, candidate.count, candidate.usd_per_hour(market))
        # Next to a sampler that takes longer, the trainer's speed does not change the iteration.
        return (*numbers, candidate.trainer.seconds)

    best: dict[tuple, Candidate] = {}
    for candidate in candidates(job, pools, space):
        known = best.setdefault(candidate.family, candidate)
        if value(candidate) < value(known):
            best[candidate.family] = candidate
    plans = [
        evaluate(job, c.trainer.layout, c.sample, c.schedule, c.trainer.has_reward_server)
        for c in sorted(best.values(), key=value)[:most]
    ]
    return [Ranked(plan, why_not(plan, plans[0], objective, market)) for plan in plans]


def why_not(plan: Plan, winner: Plan, objective: str, market: str) -> str:
    """Return in words what a plan has worse than the winner; "" of the winner."""
    if plan is winner:
        return ""
    words = []
    cost = plan.iteration_s * plan.usd_per_hour(market) / (winner.iteration_s * winner.usd_per_hour(market))
    ratio = plan.iteration_s / winner.iteration_s
    if objective == "cost" or (ratio < 1.005 and cost >= 1.005):
        words.append(f"costs {cost:.2f} times as much")
    if objective == "gpus" and plan.count > winner.count:
        words.append(f"takes {plan.count} devices instead of {winner.count}")
    if ratio < 0.995:
        words.append("is faster")
    elif ratio < 1.005:
        words.append("is as fast")
    else:
        words.append(f"takes {ratio:.2f} times as long")
        losses = {name: plan.phases[name].seconds - winner.phases[name].seconds for name in plan.phases}
        name = max(losses, key=losses.__getitem__)
        phase = plan.phases[name]
        if losses[name] > 0:
            words.append(f"{name} needs {losses[name]:.1f} s more, most of it {phase.bottleneck}")
        elif plan.schedule == "sync" and winner.schedule != "sync":
            words.append("its phases wait for each other")
        else:
            words.append(f"publishing takes {plan.publish_s:.1f} s")
    idle = {name: share for name, share in plan.idle().items() if share > 0.25}
    words += [f"{name} idle {share:.0%}" for name, share in idle.items()]
    return "; ".join(words)


# --- what does not fit ----------------------------------------------------------------------------------------------


def rejected(job: Job, pools: Sequence[Pool], space: Space) -> list[str]:
    """Return why the layouts that come closest to fitting do not, one line per way to divide the base."""
    closest: dict[str, tuple[float, str]] = {}
    engines = [engine for engine in (LOCAL, PIPELINED) if engine in space.engines] or [LOCAL]
    for trainer in trainers(job, pools, space):
        layout, way = trainer.layout, _way(trainer.layout)
        room = usable_bytes(layout.device, job.margin)
        for engine in engines:
            for sample in inner_layouts(job, layout, engine, trainer.pool, space.stages, space.split):
                memory = trainer.memory | sample_memory(job, layout, sample, trainer.memory["score"])
                phase = max(memory, key=lambda name: sum(memory[name].values()))
                needed, part = sum(memory[phase].values()), max(memory[phase], key=memory[phase].__getitem__)
                if needed > room and (way not in closest or needed / room < closest[way][0]):
                    text = (
                        f"{way} ({layout.device.name}): {phase} needs {needed / GIB:.1f} of {room / GIB:.1f} GiB, of"
                        f" which {part} {memory[phase][part] / GIB:.1f}"
                    )
                    closest[way] = (needed / room, text)
    lines = [text for _, text in sorted(closest.values())]
    obstacle = stage_obstacle(job, space)
    if obstacle is not None and _offers_stages(space) and max(pool.count for pool in pools) > 1:
        lines.append(f"training in pipeline stages is not tried: {obstacle}")
    return lines


def _way(layout: TrainLayout) -> str:
    """Return how a layout divides the base, in words."""
    if layout.is_staged:
        return f"trained in {layout.stages} stages"
    if layout.tensor > 1:
        return f"tensor parallel x{layout.tensor}"
    return f"sharded over {layout.shards}" if layout.shards > 1 else "whole base on each device"


def smallest_hardware(job: Job, catalog: Catalog, space: Space, market: str) -> tuple[Pool, float] | None:
    """Return the cheapest count of one device on which some plan fits, and its dollars per hour."""
    found: list[tuple[float, int, Pool]] = []
    for device in catalog.devices.values():
        if device.is_cpu:
            continue
        for count in COUNTS:
            price = count * device.price(market)
            if found and price >= min(found)[0]:
                break
            pool = Pool(device, count, min(count, 8))
            one = replace(space, tokens=(), schedules=("sync",), engines=(LOCAL, PIPELINED))
            if next(candidates(_smallest_forward(job), (pool,), one), None) is not None:
                found.append((price, count, pool))
                break
    if not found:
        return None
    price, _, pool = min(found, key=lambda entry: entry[:2])
    return pool, price


def _smallest_forward(job: Job) -> Job:
    """Return the job with one row in a forward and one that decodes, checkpointed: what needs the least memory."""
    return replace(job, microbatch_rows=1, microbatch_tokens=None, is_checkpointed=True, num_minibatches=1)


def size_for_all(job: Job, pools: Sequence[Pool], space: Space, best: Plan) -> int | None:
    """Return a larger rollout_batch_size with which the fastest plan uses every device; None if it is not nearby.

    Tried are the next sizes that all devices, or all but the servers of the best plan, divide into equal minibatches.
    """
    total = sum(pool.count for pool in pools)
    for processes in dict.fromkeys((best.train.count + total - best.count, total)):
        unit = processes * job.num_minibatches // math.gcd(job.num_minibatches, job.num_generations)
        size = (job.rollout_batch_size // unit + 1) * unit
        ranking = search(replace(job, rollout_batch_size=size), pools, space, most=1)
        if ranking and ranking[0].plan.count == total:
            return size
    return None
