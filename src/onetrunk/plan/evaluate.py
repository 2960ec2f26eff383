"""One plan: layouts of training and sampling, with memory by part, seconds by phase, idle shares, and cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from onetrunk.plan.hardware import GIB, MARKETS, Catalog, Device
from onetrunk.plan.job import MARGIN, Job
from onetrunk.plan.memory import sample_memory, train_memory
from onetrunk.plan.timing import (
    COLOCATED,
    OWN_LOOP,
    SERVER,
    PhaseTime,
    SampleLayout,
    TrainLayout,
    band,
    generate_time,
    packs_of,
    publish_seconds,
    score_time,
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
        schedule: sync, one_step or async.
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
    """Return the seconds of generation; the trainer's own loop reads the base as the trainer holds it."""
    return generate_time(replace(job, base_bytes=train.base_bytes) if sample.engine in OWN_LOOP else job, sample)


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
    if plan.sample.engine == COLOCATED:
        parts["sleeping engine"] = 2.0 * job.shape.parameters / plan.sample.tensor / GIB
    return parts


# --- cost -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """What a run takes.

    Args:
        hours: of the whole run.
        low_hours, high_hours: the band.
        device_hours: by device.
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
        f"{kept} checkpoints": kept * (CHECKPOINT_BYTES * job.trained_weights + rollout) / GB,
        "result": 4.0 * job.trained_weights / GB,
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
