"""One plan: layouts of training and sampling, with memory by part, seconds by phase, idle shares, and cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from onetrunk.costs import (
    kept_activations_bytes,
    layers_above,
    packs_in_flight,
    sampling_bytes,
    stage_buffers,
    stage_weights,
    trunk_states_bytes,
)
from onetrunk.plan.hardware import GIB, Device
from onetrunk.plan.job import MARGIN, Job
from onetrunk.plan.memory import (
    FP32,
    Training,
    base_weights_bytes,
    decode_parts,
    server_parts,
    training_parts,
)
from onetrunk.plan.timing import (
    COLOCATED,
    LOCAL,
    OWN_LOOP,
    PADDING,
    PIPELINED,
    SERVER,
    PhaseTime,
    SampleLayout,
    TrainLayout,
    generate_time,
    most_rows_of,
    packs_of,
    product_seconds,
    publish_seconds,
    score_time,
    streams_of,
    update_time,
)

# Devices of a reward server, which has the size of one model.
REWARD_DEVICES = 1
ASYNC_STALENESS = 2


@dataclass(frozen=True)
class Plan:
    """A plan and what it needs.

    Args:
        schedule: sync, one_step or async.
        train, sample: how the phases run.
        has_reward_server: the reward model has a device of its own.
        phases: seconds of generate, score and update by part.
        publish_s: seconds between an update and the next rollout.
        iteration_s: seconds of an iteration in the long run.
        memory: bytes of a device by part, for each phase, and for "server" where there is one.
        margin: share of a trainer's device that stays free.
    """

    schedule: str
    train: TrainLayout
    sample: SampleLayout
    has_reward_server: bool
    phases: Mapping[str, PhaseTime]
    publish_s: float
    iteration_s: float
    memory: Mapping[str, Mapping[str, float]]
    margin: float = MARGIN

    @property
    def devices(self) -> dict[str, int]:
        """Devices in all, by name."""
        counts = {self.train.device.name: self.train.count}
        if self.sample.engine == SERVER:
            name = self.sample.device.name
            counts[name] = counts.get(name, 0) + self.sample.count
        if self.has_reward_server:
            name = self.train.device.name
            counts[name] += REWARD_DEVICES
        return counts

    @property
    def count(self) -> int:
        """Devices in all."""
        return sum(self.devices.values())

    def usd_per_hour(self, market: str) -> float:
        """Return dollars per hour of all devices."""
        known = {self.train.device.name: self.train.device, self.sample.device.name: self.sample.device}
        return sum(known[name].price(market) * count for name, count in self.devices.items())

    def device_of(self, phase: str) -> Device:
        """Return the device whose memory a phase takes."""
        return self.sample.device if phase == "server" else self.train.device

    def peaks(self) -> dict[str, float]:
        """Return the bytes of a device at the peak of each phase."""
        return {phase: sum(parts.values()) for phase, parts in self.memory.items()}

    def usable(self, phase: str) -> float:
        """Return the bytes of a device that a phase may use."""
        return usable_bytes(self.device_of(phase), MARGIN if phase == "server" else self.margin)

    def shortage(self) -> tuple[str, float, float] | None:
        """Return the phase that lacks most, its bytes and those that a device has; None if all fit."""
        lacks = [(p, b, self.usable(p)) for p, b in self.peaks().items()]
        worst = max(lacks, key=lambda entry: entry[1] / entry[2])
        return worst if worst[1] > worst[2] else None

    def idle(self) -> dict[str, float]:
        """Return the share of an iteration in which the devices of each pool wait."""
        score, update = (self.phases[name].seconds for name in ("score", "update"))
        generate = self.phases["generate"].seconds
        if self.sample.engine != SERVER:
            return {"trainer": 0.0}
        waits = {
            "trainer": 1 - (score + update) / self.iteration_s,
            "sampler": 1 - min(1.0, generate / self.iteration_s),
        }
        return {name: max(0.0, share) for name, share in waits.items()}


def usable_bytes(device: Device, margin: float = MARGIN) -> float:
    """Return the bytes of a device that a plan may use; a server, which takes its memory at its start, by default."""
    return device.memory_gib * GIB * (1 - margin)


def train_memory(job: Job, train: TrainLayout, has_reward_server: bool) -> dict[str, dict[str, float]]:
    """Return the bytes of a trainer's device, by part, in scoring and in the update.

    Of training stages it is the one that needs most in each phase.
    """
    stages = train_memories(job, train, has_reward_server)
    return {
        phase: max((stage[phase] for stage in stages), key=lambda parts: sum(parts.values()))
        for phase in ("score", "update")
    }


def train_memories(job: Job, train: TrainLayout, has_reward_server: bool) -> list[dict[str, dict[str, float]]]:
    """Return the bytes of the device of each training stage, by phase and part; without stages there is one."""
    if not train.is_staged:
        return [_process_memory(job, train, has_reward_server, job.adapted_layers)]
    sizes, streams = train.sizes(job.shape), streams_of(job, train)
    weights, above = stage_weights(job.shape, sizes), layers_above(sizes, job.adapted_layers)
    all_packs, tokens = packs_of(job, train).number, forward_tokens(job, train)
    packs = all_packs // job.num_minibatches
    state = tokens * job.shape.hidden_size * job.itemsize
    shared, found = _process_memory(job, train, has_reward_server, 0), []
    for stage, layers in enumerate(above):
        flying = layers * job.trained_copies * packs_in_flight(stage, len(sizes), packs)
        kept = kept_activations_bytes(job.shape, tokens, flying, job.itemsize, train.is_checkpointed)
        own = {"weights": weights[stage] * train.base_bytes}
        score, update = (held * state for held in stage_buffers(streams, stage, packs, all_packs))
        active = shared["update"]["activations"] + kept * train.device.rates.working_set
        found.append(
            {
                "score": shared["score"] | own | {"buffers": score},
                "update": shared["update"] | own | {"buffers": update, "activations": active},
            }
        )
    return found


def _process_memory(job: Job, train: TrainLayout, has_reward_server: bool, layers: int) -> dict[str, dict[str, float]]:
    """Return the bytes of a process in scoring and in the update; `layers` keep the activations of a pack."""
    rates = train.device.rates
    tokens = forward_tokens(job, train)
    training = Training(
        job.shape, tokens, train.base_bytes, job.trained_weights, job.optimizer_bytes, train.shards, train.tensor,
        layers * job.trained_copies, job.itemsize, is_checkpointed=train.is_checkpointed,
        is_offloaded=train.is_offloaded, gathers=train.shards > 1,
    )  # fmt: skip
    update = training_parts(training)
    update["adapters"] += FP32 * job.frozen_copies * job.adapter_weights
    update["activations"] *= rates.working_set
    update["runtime"] += rates.runtime_gib * GIB
    rows = max(1, job.rows // train.data)
    # A sharded or divided base keeps the states on each device of a group; training stages keep none.
    if job.adapted_layers < job.shape.num_layers and job.keeps_states and not train.is_staged:
        held = int(rows * job.lengths.row * (1.0 if job.is_padding_free else PADDING))
        update["states"] = trunk_states_bytes(job.shape, held, int(job.itemsize))
    if job.reward is not None and not has_reward_server:
        update["reward"] = job.reward.parameters * job.reward_bytes
    score = dict(update)
    # Without gradients one layer's working set stands at a time.
    alone = training_parts(replace(training, is_checkpointed=True, layers=1))
    score["activations"] = alone["activations"] * rates.working_set
    score["gradients"] = 0.0
    return {"score": score, "update": update}


def forward_tokens(job: Job, train: TrainLayout) -> int:
    """Return the most tokens of a forward of a layout."""
    rows = max(1, job.rows // train.data // job.num_minibatches)
    most = min(rows, train.rows) * job.lengths.width
    return int(min(most, max(train.tokens, job.lengths.width)))


# Parts that stay while a trainer's device samples.
KEPT = ("weights", "adapters", "gradients", "optimizer", "states", "reward", "runtime")


def _kept(trainer: Mapping[str, float]) -> dict[str, float]:
    """Return the bytes of a trainer's device that stay while it samples, by part."""
    return {name: trainer[name] for name in KEPT if name in trainer}


def sample_memory(
    job: Job, train: TrainLayout, sample: SampleLayout, trainer: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Return the bytes of a device while it samples; "server" where the sampler has devices of its own.

    Of a pipeline of the trainer's processes it is the stage that needs most.

    Args:
        trainer: bytes by part in scoring, of which weights and what belongs to them stay.
    """
    if sample.engine == PIPELINED:
        heaviest = max(stage_parts(job, train, sample), key=lambda stage: sum(stage.values()))
        return {"generate": _kept(trainer) | heaviest}
    if sample.engine == LOCAL:
        parts = _kept(trainer)
        added = decode_parts(job.shape, _decoding_rows(job, sample), job.lengths.width, job.itemsize, sample.tensor)
        if train.shards > 1:
            added["transient"] = base_weights_bytes(job.shape, train.base_bytes) / train.tensor
        return {"generate": parts | added}
    served = engine_parts(job, sample)
    if sample.engine == SERVER:
        return {"server": served}
    parts = _kept(trainer)
    for name, value in served.items():
        parts[name] = parts.get(name, 0.0) + value
    return {"generate": parts}


def engine_parts(job: Job, sample: SampleLayout) -> dict[str, float]:
    """Return the bytes of a device that a vLLM engine takes, by part; of rows of mean length, because it has pages."""
    adapters = job.adapter_weights * (2 + (1 if job.schedule == "sync" else ASYNC_STALENESS))
    rows, base_bytes = _decoding_rows(job, sample), min(2.0, job.base_bytes)
    return server_parts(job.shape, rows, job.lengths.row, base_bytes, adapters, sample.tensor, sample.stages)


def _decoding_rows(job: Job, sample: SampleLayout) -> float:
    return min(-(-job.rows // sample.replicas), most_rows_of(job, sample))


def stage_parts(job: Job, train: TrainLayout, sample: SampleLayout) -> list[dict[str, float]]:
    """Return the bytes that sampling adds in each stage of a PIPELINED sampler, by part.

    Stages that also train differ in their weights, which are among the parts then.
    """
    rows = _decoding_rows(job, sample)
    sizes = sample.sizes(job.shape)
    stages = sampling_bytes(
        job.shape,
        sizes,
        rows,
        job.lengths.width,
        job.itemsize,
        batches=sample.in_flight,
        gathered=train.base_bytes if train.shards > 1 else 0.0,
    )
    if not train.is_staged:
        return stages
    weights = stage_weights(job.shape, sizes)
    return [parts | {"weights": n * train.base_bytes} for parts, n in zip(stages, weights, strict=True)]


def stage_memory(job: Job, plan: Plan) -> dict[str, list[dict[str, float]]]:
    """Return the bytes of each training stage of a plan by part, for each phase."""
    stages = train_memories(job, plan.train, plan.has_reward_server)
    sampling = stage_parts(job, plan.train, plan.sample)
    return {
        "generate": [_kept(stage["score"]) | parts for stage, parts in zip(stages, sampling, strict=True)],
        "score": [stage["score"] for stage in stages],
        "update": [stage["update"] for stage in stages],
    }


def reward_seconds(job: Job, train: TrainLayout) -> float:
    """Return the seconds in which a reward server scores a rollout."""
    tokens = job.rows * job.lengths.row * PADDING
    return product_seconds(
        job.reward,
        train.device,
        2.0,
        matrix_flops=2.0 * job.reward.num_layers * job.reward.active_layer_parameters * tokens,
        tokens=tokens / max(1, job.rows) * 32,
    )


def scored(job: Job, train: TrainLayout, has_reward_server: bool) -> PhaseTime:
    """Return the seconds of scoring; a reward server works at the same time as the model."""
    if not has_reward_server:
        return score_time(job, train)
    own = score_time(replace(job, reward=None), train)
    waiting = max(0.0, reward_seconds(job, train) - own.seconds)
    return PhaseTime(own.parts | ({"reward": waiting} if waiting else {}))


def sampling_time(job: Job, train: TrainLayout, sample: SampleLayout) -> PhaseTime:
    """Return the seconds of generation; the trainer's own loop reads the base as the trainer holds it."""
    return generate_time(replace(job, base_bytes=train.base_bytes) if sample.engine in OWN_LOOP else job, sample)


def iteration_seconds(schedule: str, generate: PhaseTime, train_s: float, publish_s: float) -> float:
    """Return the seconds of an iteration in the long run.

    sync: one after the other. one_step: a rollout is sampled during an update. async: the same, and the tail of a
    rollout is filled with rows of the next.
    """
    if schedule == "sync":
        return generate.seconds + train_s + publish_s
    sampling = generate.seconds - (generate.tail if schedule == "async" else 0.0)
    return max(sampling, train_s) + publish_s


def evaluate(
    job: Job, train: TrainLayout, sample: SampleLayout, schedule: str, has_reward_server: bool = False
) -> Plan:
    """Return a plan with everything that it needs, whether it fits or not."""
    memory = train_memory(job, train, has_reward_server)
    memory |= sample_memory(job, train, sample, memory["score"])
    generate, score = sampling_time(job, train, sample), scored(job, train, has_reward_server)
    update, publish = update_time(job, train), publish_seconds(job, train, sample)
    total = iteration_seconds(schedule, generate, score.seconds + update.seconds, publish)
    phases = {"generate": generate, "score": score, "update": update}
    return Plan(schedule, train, sample, has_reward_server, phases, publish, total, memory, job.margin)


def host_gib(job: Job, plan: Plan) -> dict[str, float]:
    """Return the GiB of system memory per trainer device, by what takes them."""
    parts = {
        "process": 4.0,
        "weights while loading": job.shape.parameters * job.model.itemsize / GIB / plan.train.per_node,
    }
    if plan.train.is_offloaded:
        packs = packs_of(job, plan.train)
        stored = packs.tokens * job.shape.hidden_size * job.itemsize * job.adapted_layers
        parts["offloaded activations"] = stored / GIB
    if plan.sample.engine == COLOCATED:
        parts["sleeping engine"] = 2.0 * job.shape.parameters / plan.sample.tensor / GIB
    return parts


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
