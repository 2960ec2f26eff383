"""Seconds of each phase of an iteration, with what bounds them: products, memory bandwidth, launches, or links.

A decoded token reads the weights once for all rows; a forward multiplies them once per token. So generation is bound
by bandwidth or launches, scoring and update by products. Every number of a device comes from `hardware.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from onetrunk.costs import SCORED_AT_ONCE, ModelShape, decode_split
from onetrunk.plan.costs import (
    Streams,
    forward_flops,
    gathers,
    head_flops,
    kv_cache_bytes,
    layers_above,
    operations_of,
    slowest_stage,
    stage_streams,
)
from onetrunk.plan.hardware import Device
from onetrunk.plan.job import HALF_BYTES, INT8_BYTES, Job, Lengths, base_weights_bytes

# Engines that sample: the trainer's own loop, the same with the layers divided over its processes, a vLLM engine in
# them, vLLM servers on devices of their own.
LOCAL, PIPELINED, COLOCATED, SERVER = "local", "pipelined", "colocate", "server"
OWN_LOOP = (LOCAL, PIPELINED)
ENGINES = (LOCAL, PIPELINED, COLOCATED, SERVER)
# Tokens of a pack over those of its rows, which are sorted by length.
PADDING = 1.1
# A served adapter that is not merged costs 1.33 to 1.39 times as much per token (measured by vLLM's users).
UNMERGED = 1.36
# Host memory to device, where weights are reloaded after sleeping; bytes per second.
RELOAD = 20e9
# Loading an adapter on a server, and its calls (8 to 44 ms measured, with margin for several servers).
PUBLISH_S = 0.1
# Latency of a collective between devices.
LATENCY_S = 2e-5
# On a GPU few rows are slow because the weights are read for them, which is counted as bandwidth.
WHOLE = 1e9
# Launches of a forward with its backward that is not checkpointed, over those of one that is.
UNCHECKPOINTED = 0.75
# Points at which the falling number of decoding rows is read.
SEGMENTS = 24
# Truth over prediction. Without a calibration, 9 of 10 step times of a program that the rates were not fitted to lie
# between these factors (tests/plan/test_measurements.py); after one, an estimate of ours.
BAND_CALIBRATED, BAND = (0.75, 1.35), (0.65, 2.0)


@dataclass(frozen=True)
class TrainLayout:
    """How score and update run.

    Args:
        data: processes, or pipelines of them, with different rows.
        tensor: devices that divide every matrix.
        shards: devices that share one copy of the base; 1: each has it whole.
        per_node: devices of one machine.
        base_bytes: bytes of a weight.
        rows, tokens: most rows and tokens of a forward.
        stages: devices of a pipeline, each with layers of its own; 1: every device runs all layers.
        split: layers of each stage; empty: those that the run chooses by itself.
        serves_reward: the reward model has one more device of its own.
    """

    device: Device
    data: int
    tensor: int = 1
    shards: int = 1
    per_node: int = 8
    base_bytes: float = 2.0
    rows: int = 8
    tokens: int = 8192
    is_checkpointed: bool = False
    is_offloaded: bool = False
    stages: int = 1
    split: tuple[int, ...] = ()
    serves_reward: bool = False

    @property
    def count(self) -> int:
        """Devices of the trainer's processes."""
        return self.data * self.tensor * self.stages

    @property
    def is_staged(self) -> bool:
        """Whether it trains in the stages of a pipeline."""
        return self.stages > 1

    @property
    def held(self) -> str:
        """How the devices hold the base, in words."""
        if self.is_staged:
            return f"{self.stages} stages"
        if self.tensor > 1:
            return f"{self.tensor} per matrix"
        return f"{self.shards} shards" if self.shards > 1 else "whole base"

    @property
    def words(self) -> str:
        """How the devices are divided, in words."""
        return f"{self.data} x {self.held}"


@dataclass(frozen=True)
class SampleLayout:
    """How completions are sampled.

    Args:
        replicas: samplers with different rows.
        tensor: devices that divide every matrix of a sampler.
        stages: of a PIPELINED sampler, with as many independent batches in flight: token t+1 needs the last stage's
            sample of token t, so one batch would leave all stages but one idle.
        rows: most rows of a replica that decode at once.
        split: layers of each stage; empty: those that the run chooses by itself.
        per_node: devices of one machine.
    """

    device: Device
    engine: str
    replicas: int
    tensor: int = 1
    stages: int = 1
    rows: int = 1_000_000
    split: tuple[int, ...] = ()
    per_node: int = 8

    @property
    def count(self) -> int:
        """Devices in all."""
        return self.replicas * self.tensor * self.stages


def split_of(layout: TrainLayout | SampleLayout, shape: ModelShape) -> tuple[int, ...]:
    """Return the layers of each stage of a layout."""
    return layout.split or decode_split(shape, layout.stages)


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of a phase by what they are spent on.

    Args:
        tail: seconds of them that go to the last, longest completions: what the same tokens would not take, had all
            rows of a batch ended together.
        launched: seconds in which a GPU's host launches its operations at least.
    """

    parts: dict[str, float] = field(default_factory=dict)
    tail: float = 0.0
    launched: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the phase."""
        return sum(self.parts.values())

    @property
    def bottleneck(self) -> str:
        """What takes most of the time."""
        return max(self.parts, key=self.parts.__getitem__) if self.parts else "nothing"


def band(device: Device) -> tuple[float, float]:
    """Return the factors between which a time is expected, over the predicted one."""
    return BAND_CALIBRATED if device.rates.is_calibrated else BAND


def peak(device: Device, itemsize: float) -> float:
    """Return the peak of the products, operations per second; float32 on a GPU runs at half of bfloat16."""
    return device.tflops * 1e12 * (0.5 if itemsize > 2 and not device.is_cpu else 1.0)


def product_seconds(
    shape: ModelShape,
    device: Device,
    itemsize: float,
    *,
    matrix_flops: float,
    attention_flops: float = 0.0,
    tokens: float,
) -> float:
    """Return the seconds of products on one device."""
    rates = device.rates
    share = rates.matmul * rates.saturation(shape.hidden_size, tokens)
    return (matrix_flops / share + attention_flops / rates.attention) / (peak(device, itemsize) * device.kernels)


def unpack_seconds(device: Device, weights: float, base_bytes: float) -> float:
    """Return the seconds in which a device unpacks that many weights; only those of a quantised base are packed."""
    if base_bytes > INT8_BYTES:
        return 0.0
    return weights * device.rates.unpack_bytes / (device.bandwidth_gb_s * 1e9)


def exposed_seconds(device: Device, launches: float, computed: float) -> float:
    """Return the part of `launches` that the work on a device does not hide; on a CPU nothing is hidden."""
    return launches if device.is_cpu else max(0.0, launches - computed)


def launched_phase(device: Device, parts: dict[str, float], operations: float, tail: float = 0.0) -> PhaseTime:
    """Return a phase of this many operations, which takes at least as long as their launches."""
    launched = 0.0 if device.is_cpu else operations * device.rates.launch_s
    rest = max(0.0, launched - sum(parts.values()))
    return PhaseTime(parts | {"launches": parts.get("launches", 0.0) + rest}, tail, launched)


def link_seconds(device: Device, num_bytes: float, is_inside: bool) -> float:
    """Return the seconds in which a device sends bytes inside its machine, or to another one."""
    return num_bytes / ((device.link_gb_s if is_inside else device.network_gb_s) * 1e9 * device.rates.link)


def _is_pipeline_inside(layout: TrainLayout | SampleLayout) -> bool:
    """Whether pipelines of consecutive processes never cross machines."""
    return layout.count <= layout.per_node or layout.per_node % layout.stages == 0


def engine_bytes(job: Job, layout: SampleLayout) -> float:
    """Return the bytes of a weight in a vLLM engine: a server loads the checkpoint, any other the trainer's base."""
    if layout.engine != SERVER:
        return job.base_bytes
    # On a GPU vLLM computes adapters in 16 bits only.
    return job.model.itemsize if layout.device.is_cpu else min(HALF_BYTES, job.model.itemsize)


def step_parts(job: Job, layout: SampleLayout, rows: float, context: float) -> dict[str, float]:
    """Return the seconds of one decoded token of `rows` rows, on all stages of a replica, by part."""
    shape, device, rates = job.shape, layout.device, layout.device.rates
    is_local, divided = layout.engine in OWN_LOOP, layout.tensor
    base_bytes = job.base_bytes if is_local else engine_bytes(job, layout)
    itemsize = job.itemsize if is_local else max(HALF_BYTES, base_bytes)
    head = shape.head_parameters * (HALF_BYTES if base_bytes <= INT8_BYTES else base_bytes)
    read = shape.num_layers * _touched_weights(shape, rows) * base_bytes + head
    read += kv_cache_bytes(shape, 1, 1) * itemsize * rows * context
    bandwidth = read / divided / (device.bandwidth_gb_s * 1e9 * rates.bandwidth)
    flops = (forward_flops(shape, 1, shape.num_layers) + head_flops(shape, 1)) * rows
    attention = 4 * rows * context * shape.num_layers * shape.num_heads * shape.head_dim
    share = rates.decode_matmul * rates.saturation(shape.hidden_size, rows if device.is_cpu else WHOLE)
    compute = (flops / share + attention / rates.attention) / peak(device, itemsize) / divided
    parts = {"bandwidth": max(0.0, bandwidth - compute), "compute": compute}
    if is_local:
        # Every stage has the overhead of a step.
        launches = shape.num_layers * rates.decode_layer_s + layout.stages * rates.decode_step_s + rows * rates.row_s
        # For one row there are kernels that multiply packed weights.
        if rows > 1:
            parts["compute"] += unpack_seconds(device, shape.num_layers * shape.layer_parameters, base_bytes)
        parts["launches"] = exposed_seconds(device, launches, sum(parts.values()))
    else:
        parts = {name: value * UNMERGED for name, value in parts.items()}
        parts["launches"] = rates.served_step_s + shape.num_layers * rates.served_layer_s + rows * rates.served_row_s
    if divided > 1:
        wire = rows * shape.hidden_size * itemsize * 2 * (divided - 1) / divided
        parts["link"] = 2 * shape.num_layers * (link_seconds(device, wire, True) + LATENCY_S)
    if layout.stages > 1:
        wire = (layout.stages - 1) * rows * shape.hidden_size * itemsize
        parts["link"] = layout.stages * LATENCY_S + link_seconds(device, wire, _is_pipeline_inside(layout))
    return parts


def _touched_weights(shape: ModelShape, rows: float) -> float:
    """Return the weights of a layer that at least one of the rows runs through; of a mixture, not all experts."""
    if not shape.num_experts:
        return shape.layer_parameters
    share = 1 - (1 - shape.experts_per_token / shape.num_experts) ** max(1.0, rows)
    extra = shape.layer_parameters - shape.active_layer_parameters
    return shape.active_layer_parameters + extra * max(0.0, share - shape.experts_per_token / shape.num_experts)


def most_rows_of(job: Job, layout: SampleLayout) -> int:
    """Return the most rows of a replica that decode at once; `max_rollout_rows` bounds those of each process."""
    if layout.engine not in OWN_LOOP or not job.max_rollout_rows:
        return layout.rows
    return min(layout.rows, job.max_rollout_rows * layout.stages)


def decode_seconds(
    step: Callable[[float, float], dict[str, float]], rows: float, most_rows: float, lengths: Lengths
) -> PhaseTime:
    """Return the seconds until all rows of a replica are done.

    While rows wait, `most_rows` decode; then their number falls as completions end, and the last ones decode almost
    alone, which is the tail.
    """
    together, middle = min(rows, most_rows), lengths.prompt + lengths.completion / 2
    full = step(together, middle)
    total = dict.fromkeys(full, 0.0)
    steps = [(full, (rows - together) * lengths.completion / together)]
    width, shares = _falling(lengths, together, rows > together)
    for i, share in enumerate(shares):
        steps.append((step(max(1.0, together * share), lengths.prompt + width * (i + 0.5)), width))
    for parts, number in steps:
        for name, value in parts.items():
            total[name] += value * number
    # The same tokens, had no row ended before the others.
    even = sum(full.values()) * rows * lengths.completion / together
    return PhaseTime(total, max(0.0, sum(total.values()) - even))


@functools.lru_cache(maxsize=4096)
def _falling(lengths: Lengths, rows: float, is_refilled: bool) -> tuple[float, tuple[float, ...]]:
    """Return the steps of a segment, and the share of rows that still decode in the middle of each segment.

    The end is where less than half a row is expected to be left.
    """
    ends = max(1.0, lengths.quantile(1 - min(0.5, 0.5 / rows)))
    width = ends / SEGMENTS
    shares = [lengths.survival(width * (i + 0.5)) for i in range(SEGMENTS)]
    if is_refilled:
        # Rows that joined at different times have on average run for a while.
        area = sum(shares)
        shares = [sum(shares[i:]) / area for i in range(SEGMENTS)]
    return width, tuple(shares)


def generate_time(job: Job, layout: SampleLayout) -> PhaseTime:
    """Return the seconds of a rollout: prompts, then one token after the other until the longest completion."""
    shape, device, stages = job.shape, layout.device, layout.stages
    mine = math.ceil(job.rows / layout.replicas)
    # Stages of whole layers are not quite equally fast.
    factor = slowest_stage(shape, split_of(layout, shape)) if stages > 1 else 1.0

    def step(alive: float, context: float) -> dict[str, float]:
        return {name: value * factor for name, value in step_parts(job, layout, alive, context).items()}

    most_rows = max(1.0, most_rows_of(job, layout) / stages)
    decoding = decode_seconds(step, mine / stages, most_rows, job.lengths)
    # A prompt with several completions runs once in this process.
    prompts = mine / (job.num_generations if layout.engine in OWN_LOOP else 1) * job.lengths.prompt
    prefill = product_seconds(
        shape,
        device,
        job.itemsize,
        matrix_flops=forward_flops(shape, int(prompts), shape.num_layers),
        attention_flops=4 * prompts * job.lengths.prompt / 2 * shape.num_layers * shape.num_heads * shape.head_dim,
        tokens=prompts,
    )
    parts, operations = decoding.parts | {"prompts": prefill / layout.tensor / stages}, 0.0
    if layout.engine in OWN_LOOP:  # An engine replays its launches as a CUDA graph.
        operations = operations_of(job.itemsize).of_token(shape.num_layers, job.adapted_layers)
        operations *= decode_seconds(lambda *_: {"steps": 1.0}, mine / stages, most_rows, job.lengths).seconds
    return launched_phase(device, parts, operations, decoding.tail)


@dataclass(frozen=True)
class Packs:
    """The packs of one process: their number, the tokens of each with padding, and those of completions."""

    number: int
    tokens: float
    completion: float


def packs_of(job: Job, layout: TrainLayout) -> Packs:
    """Return the packs that a process forms of its rows of a rollout."""
    rows = max(1, job.rows // layout.data)
    padding = 1.0 if job.is_padding_free else PADDING
    per_minibatch = max(1, rows // job.num_minibatches)
    most_rows = min(layout.rows, per_minibatch, max(1, int(layout.tokens // (job.lengths.row * padding))))
    number = job.num_minibatches * math.ceil(per_minibatch / most_rows)
    return Packs(number, rows * job.lengths.row * padding / number, rows * job.lengths.completion * padding / number)


@dataclass(frozen=True)
class Share:
    """What one process runs of a forward: frozen layers below the adapters, layers with adapters, and the head.

    Args:
        after, before: what crosses to the next stage of a pipeline, and from the stage before.
    """

    below: int
    above: int
    has_head: bool = True
    before: Streams = Streams(0, 0, 0)
    after: Streams = Streams(0, 0, 0)


def shares_of(job: Job, layout: TrainLayout) -> list[Share]:
    """Return what the stages of a layout run; without stages it is one share, of all layers."""
    if not layout.is_staged:
        return [Share(job.shape.num_layers - job.adapted_layers, job.adapted_layers)]
    sizes, streams = split_of(layout, job.shape), streams_of(job, layout)
    return [
        Share(size - mine, mine, stage == len(sizes) - 1, streams[stage], streams[stage + 1])
        for stage, (size, mine) in enumerate(zip(sizes, layers_above(sizes, job.adapted_layers), strict=True))
    ]


def streams_of(job: Job, layout: TrainLayout) -> tuple[Streams, ...]:
    """Return the hidden states that cross each boundary of the stages of a layout."""
    return stage_streams(split_of(layout, job.shape), job.adapted_layers, job.has_reference)


def in_stages(stages: Sequence[dict[str, float]], packs: int, fills: int) -> dict[str, float]:
    """Return the seconds of a pipeline by part: those of its slowest stage, and the time in which that stage waits.

    The first of a sequence of packs passes all other stages before the last stage can begin, and the last pack passes
    them after the first stage has ended: P stages need M + P - 1 times the seconds of a pack for M packs.

    Args:
        stages: seconds of each stage by part, for all packs.
        packs: in all.
        fills: sequences that they come in; the pipeline is empty before each.
    """
    slowest = max(stages, key=lambda parts: sum(parts.values()))
    if len(stages) == 1:
        return slowest
    return slowest | {"bubble": sum(slowest.values()) * fills * (len(stages) - 1) / packs}


def score_time(job: Job, layout: TrainLayout) -> PhaseTime:
    """Return the seconds of scoring: old logprobs, values, reference, and a reward model of its own."""
    packs = packs_of(job, layout)
    stages = [_score_parts(job, layout, packs, share) for share in shares_of(job, layout)]
    parts = in_stages(stages, packs.number, math.ceil(packs.number / (SCORED_AT_ONCE * layout.stages)))
    if layout.shards > 1:
        parts["link"] = _gather_seconds(job, layout, packs, "score", parts["compute"])
    if job.reward is not None:
        reward = _reward_seconds(job, layout)
        # A reward server works at the same time as the model.
        parts["reward"] = max(0.0, reward - sum(parts.values())) if layout.serves_reward else reward
    below = 0 if job.captures_states and not layout.is_staged else job.shape.num_layers - job.adapted_layers
    above, reference = job.adapted_layers, job.has_reference * job.adapted_layers
    operations = packs.number * operations_of(job.itemsize).of_score(above + reference + below, above)
    return launched_phase(layout.device, parts, operations / layout.stages)


def _score_parts(job: Job, layout: TrainLayout, packs: Packs, share: Share) -> dict[str, float]:
    """Return the seconds in which a process scores all packs, without what it waits for."""
    roles = 1 + job.has_reference
    # States that sampling provides stay in the process; a stage has none of the layers before its own.
    layers = roles * share.above + (0 if job.captures_states and not layout.is_staged else share.below)
    heads = (1 + job.has_reference) * packs.completion if share.has_head else 0.0
    parts = _forward_parts(job, layout, packs, layers, heads, passes=1.0)
    rates = layout.device.rates
    launches = layers * rates.layer_s / 3 + share.above * (roles - job.has_reference) * rates.adapter_layer_s / 3
    launches = packs.number * (launches + roles * rates.forward_s / 3)
    parts["launches"] = exposed_seconds(layout.device, launches, parts["compute"])
    parts["other"] = packs.number * packs.tokens * rates.token_s
    if layout.is_staged:
        parts["link"] = packs.number * _send_seconds(job, layout, packs, share.after.scored)
    return parts


def update_time(job: Job, layout: TrainLayout) -> PhaseTime:
    """Return the seconds of all epochs of the update of a rollout."""
    packs, epochs, steps = packs_of(job, layout), job.num_ppo_epochs, job.num_ppo_epochs * job.num_minibatches
    stages = [_update_parts(job, layout, packs, share) for share in shares_of(job, layout)]
    parts = {name: value * epochs for name, value in in_stages(stages, packs.number, job.num_minibatches).items()}
    parts["other"] += steps * layout.device.rates.step_s
    link = _reduce_seconds(job, layout) * steps + parts.pop("link", 0.0)
    if layout.shards > 1:
        link += _gather_seconds(job, layout, packs, "update", parts["compute"])
    frozen = job.shape.num_layers - job.adapted_layers if layout.is_staged or not job.keeps_states else 0
    operations = operations_of(job.itemsize).of_update(job.adapted_layers, frozen, layout.is_checkpointed)
    parts |= {"link": link} if link else {}
    return launched_phase(layout.device, parts, epochs * packs.number * operations / layout.stages)


def _update_parts(job: Job, layout: TrainLayout, packs: Packs, share: Share) -> dict[str, float]:
    """Return the seconds in which a process runs an epoch over all packs, without what it waits for."""
    rates = layout.device.rates
    # Forward, the gradient of every input, and with checkpointing the forward again.
    passes = 3.0 if layout.is_checkpointed else 2.0
    heads = 1.5 * packs.completion if share.has_head else 0.0
    parts = _forward_parts(job, layout, packs, share.above, heads, passes=passes)
    per_layer = (rates.layer_s + rates.adapter_layer_s) * (1.0 if layout.is_checkpointed else UNCHECKPOINTED)
    launches = share.above * per_layer + rates.forward_s
    if share.below and (layout.is_staged or not job.keeps_states):
        lower = _forward_parts(job, layout, packs, share.below, 0.0, passes=1.0)
        parts = {name: value + lower[name] for name, value in parts.items()}
        launches += share.below * rates.layer_s / 3
    parts["launches"] = exposed_seconds(layout.device, packs.number * launches, parts["compute"])
    parts["other"] = packs.number * packs.tokens * rates.token_s
    if layout.is_offloaded:
        stored = packs.tokens * job.shape.hidden_size * job.itemsize * share.above * packs.number
        parts["offload"] = 2 * stored / RELOAD
    if layout.is_staged:
        sent = _send_seconds(job, layout, packs, share.after.trained)
        parts["link"] = packs.number * (sent + _send_seconds(job, layout, packs, share.before.gradients))
    return parts


def _send_seconds(job: Job, layout: TrainLayout, packs: Packs, states: int) -> float:
    """Return the seconds in which a stage sends the hidden states of a pack; what it receives crosses meanwhile."""
    wire = states * packs.tokens * job.shape.hidden_size * job.itemsize
    return link_seconds(layout.device, wire, _is_pipeline_inside(layout)) + LATENCY_S if states else 0.0


def _forward_parts(
    job: Job, layout: TrainLayout, packs: Packs, layers: float, head_tokens: float, passes: float
) -> dict[str, float]:
    """Return the seconds of products, and of collectives of tensor parallelism, of all packs of a process."""
    shape, device = job.shape, layout.device
    matrix = forward_flops(shape, 1, 1) * packs.tokens * layers + head_flops(shape, 1) * head_tokens
    attention = 4 * packs.tokens * layers * (job.lengths.row / 2) * shape.num_heads * shape.head_dim
    # The backward of attention computes its products again: 2.5 times the forward.
    attention_passes = passes if passes <= 1 else passes + 0.5
    seconds = product_seconds(
        shape,
        device,
        job.itemsize,
        matrix_flops=matrix * passes * packs.number,
        attention_flops=attention * attention_passes * packs.number,
        tokens=packs.tokens,
    )
    unpacked = packs.number * passes * layers * shape.layer_parameters
    parts = {"compute": seconds / layout.tensor + unpack_seconds(device, unpacked, layout.base_bytes)}
    if layout.tensor > 1:
        wire = packs.tokens * shape.hidden_size * job.itemsize * 2 * (layout.tensor - 1) / layout.tensor
        parts["link"] = packs.number * layers * passes * 2 * (link_seconds(device, wire, True) + LATENCY_S)
    return parts


def _reward_seconds(job: Job, layout: TrainLayout) -> float:
    """Return the seconds in which a reward model scores a rollout, in each process or on a device of its own."""
    reward, rates = job.reward, layout.device.rates
    rows = max(1, job.rows if layout.serves_reward else job.rows // layout.data)
    together = min(rows, layout.rows)
    flops = forward_flops(reward, int(rows * job.lengths.row * PADDING), reward.num_layers)
    tokens = together * job.lengths.row
    products = product_seconds(reward, layout.device, job.itemsize, matrix_flops=flops, tokens=tokens)
    launches = math.ceil(rows / together) * (reward.num_layers * rates.layer_s / 3 + rates.forward_s / 3)
    return products + exposed_seconds(layout.device, launches, products)


def _gather_seconds(job: Job, layout: TrainLayout, packs: Packs, phase: str, compute: float) -> float:
    """Return the seconds of gathering a sharded base that the products do not hide."""
    counts = gathers(
        job.shape,
        job.shape.num_layers - job.adapted_layers,
        packs.number,
        job.num_ppo_epochs,
        has_reference=job.has_reference,
        lower_layers="sampling" if job.captures_states else "scoring" if job.keeps_states else "every",
    )[phase]
    moved = counts.num_bytes(job.shape, layout.base_bytes) * (1 - 1 / layout.shards) / layout.tensor
    if layout.is_checkpointed and phase == "update":
        moved *= 1.5
    seconds = link_seconds(layout.device, moved, layout.shards <= layout.per_node)
    return max(0.0, seconds - compute) + 0.1 * min(seconds, compute)


def _reduce_seconds(job: Job, layout: TrainLayout) -> float:
    """Return the seconds of one all-reduce of the gradients of everything that trains."""
    if layout.count == 1:
        return 0.0
    moved = 2 * 4 * job.adapter_weights * (layout.count - 1) / layout.count
    return link_seconds(layout.device, moved, layout.count <= layout.per_node) + LATENCY_S * layout.count


def shares_base(job: Job, train: TrainLayout, sample: SampleLayout) -> bool:
    """Return whether a trainer and the engine in its process hold one copy of the base (`rollouts/colocate.py`)."""
    return sample.engine == COLOCATED and train.base_bytes >= HALF_BYTES and not job.shape.num_experts


def publish_seconds(job: Job, train: TrainLayout, sample: SampleLayout) -> float:
    """Return the seconds between an update and the next rollout: adapters to servers, weights that are reloaded."""
    if sample.engine in OWN_LOOP:
        if train.shards == 1:
            return 0.0
        whole = base_weights_bytes(job.shape, train.base_bytes) / train.tensor
        return link_seconds(train.device, whole, train.shards <= train.per_node)
    if sample.engine == SERVER:
        return PUBLISH_S + 2.0 * job.adapter_weights / (sample.device.network_gb_s * 1e9) * sample.replicas
    if shares_base(job, train, sample):
        return PUBLISH_S
    # The engine wakes up: its weights return from host memory.
    return PUBLISH_S + 2.0 * job.shape.parameters / sample.tensor / RELOAD


# A judge reads the prompt, both completions and a constitution of about this many tokens, in both orders.
JUDGE_TEXT, ORDERS = 300, 2
# Tokens of a forward in these stages; rows that decode at once, where the recipe does not say.
FORWARD, LABELLED_ROWS = 8192, 128


def label_time(
    job: Job, train: TrainLayout, sample: SampleLayout, prompts: int, completions: int, judge: ModelShape
) -> PhaseTime:
    """Return the seconds of sampling `completions` of each prompt and of judging every pair of them."""
    sampled = replace(
        job, rollout_batch_size=prompts, num_generations=completions,
        max_rollout_rows=job.max_rollout_rows or LABELLED_ROWS,
    )  # fmt: skip
    pairs = prompts * completions * (completions - 1) / 2
    tokens = pairs * ORDERS * (JUDGE_TEXT + job.lengths.prompt + 2 * job.lengths.completion)
    judged = _stage_parts(job, train, judge, tokens, 1, train.device.rates.layer_s / 3)
    return PhaseTime({"sampling": generate_time(sampled, sample).seconds, "judge": sum(judged.values())})


def reward_training_time(job: Job, train: TrainLayout, pairs: int) -> PhaseTime:
    """Return the seconds of training a reward model with adapters on the base, on both completions of each pair."""
    per_layer_s = train.device.rates.layer_s + train.device.rates.adapter_layer_s
    return PhaseTime(_stage_parts(job, train, job.shape, 2 * pairs * job.lengths.row * PADDING, 2, per_layer_s))


def distillation_time(job: Job, train: TrainLayout, rows: int, student: ModelShape) -> PhaseTime:
    """Return the seconds in which a student trains as a whole on the scores that the reward model gives to rows."""
    tokens, layer_s = rows * job.lengths.row * PADDING, train.device.rates.layer_s
    teacher = _stage_parts(job, train, job.reward or job.shape, tokens, 1, layer_s / 3)
    return PhaseTime(_stage_parts(job, train, student, tokens, 3, layer_s) | {"teacher": sum(teacher.values())})


def _stage_parts(
    job: Job, train: TrainLayout, shape: ModelShape, tokens: float, passes: float, per_layer_s: float
) -> dict[str, float]:
    """Return the seconds in which the trainer's devices share the forwards and backwards of a model on tokens."""
    flops = passes * forward_flops(shape, 1, shape.num_layers) * tokens
    compute = product_seconds(shape, train.device, job.itemsize, matrix_flops=flops, tokens=FORWARD)
    launches = exposed_seconds(train.device, tokens / FORWARD * shape.num_layers * per_layer_s, compute)
    return {"compute": compute / train.count, "launches": launches / train.count}
