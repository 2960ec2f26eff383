"""Seconds of the stages around PPO on the devices of a plan: labelling, reward training, and distillation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onetrunk.costs import ModelShape, forward_flops, head_flops
from onetrunk.plan.evaluate import Plan
from onetrunk.plan.job import Job
from onetrunk.plan.shapes import ModelFacts
from onetrunk.plan.timing import PADDING, PhaseTime, SampleLayout, exposed_seconds, generate_time, product_seconds

# A judge reads the prompt, both completions and a constitution of about this many tokens, in both orders.
JUDGE_TEXT, ORDERS = 300, 2
# Tokens of a forward in a training of a reward model.
FORWARD = 8192


@dataclass(frozen=True)
class Around:
    """What the stages around PPO work on; 0: a stage is left out.

    Args:
        label_prompts: prompts whose completions a judge compares.
        completions: of each of them.
        judge: model of the judge; None: the policy's base.
        reward_pairs: pairs that a reward model of the base's shape is trained on.
        distill_rows: completions on which a student learns the reward model's scores.
        student: model of the student; None: the base.
    """

    label_prompts: int = 0
    completions: int = 4
    judge: ModelFacts | None = None
    reward_pairs: int = 0
    distill_rows: int = 0
    student: ModelFacts | None = None


def around_times(job: Job, plan: Plan, around: Around) -> dict[str, PhaseTime]:
    """Return the seconds of each stage that is wanted."""
    times: dict[str, PhaseTime] = {}
    if around.label_prompts:
        times["label"] = _label_time(job, plan, around)
    if around.reward_pairs:
        tokens = 2 * around.reward_pairs * job.lengths.row * PADDING
        times["reward training"] = _training_time(plan, job.shape, tokens, job.itemsize, is_full=False)
    if around.distill_rows:
        tokens = around.distill_rows * job.lengths.row * PADDING
        student = job.shape if around.student is None else around.student.shape
        teacher = job.shape if job.reward is None else job.reward
        parts = dict(_training_time(plan, student, tokens, job.itemsize, is_full=True).parts)
        parts["teacher"] = _forward_seconds(plan, teacher, tokens, job.itemsize)
        times["distillation"] = PhaseTime(parts)
    return times


def _label_time(job: Job, plan: Plan, around: Around) -> PhaseTime:
    rows = around.label_prompts * around.completions
    sample: SampleLayout = plan.sample
    many = replace(job, max_rollout_rows=job.max_rollout_rows or 128, num_generations=around.completions)
    sampling = generate_time(many, sample, rows)
    judge = job.shape if around.judge is None else around.judge.shape
    pairs = around.label_prompts * around.completions * (around.completions - 1) / 2
    read = pairs * ORDERS * (JUDGE_TEXT + job.lengths.prompt + 2 * job.lengths.completion)
    return PhaseTime({"sampling": sampling.seconds, "judge": _forward_seconds(plan, judge, read, job.itemsize)})


def _forward_seconds(plan: Plan, shape: ModelShape, tokens: float, itemsize: float) -> float:
    layout = plan.train
    rates = layout.device.rates
    seconds = product_seconds(
        shape, layout.device, itemsize, matrix_flops=forward_flops(shape, 1, shape.num_layers) * tokens, tokens=FORWARD
    )
    launches = tokens / FORWARD * shape.num_layers * rates.layer_s / 3
    return (seconds + exposed_seconds(layout.device, launches, seconds)) / layout.count


def _training_time(plan: Plan, shape: ModelShape, tokens: float, itemsize: float, is_full: bool) -> PhaseTime:
    layout, rates = plan.train, plan.train.device.rates
    flops = (forward_flops(shape, 1, shape.num_layers) + head_flops(shape, 1) / shape.vocab_size) * tokens
    passes = 3.0 if is_full else 2.0
    compute = product_seconds(shape, layout.device, itemsize, matrix_flops=flops * passes, tokens=FORWARD)
    launches = tokens / FORWARD * shape.num_layers * (rates.layer_s + (0.0 if is_full else rates.adapter_layer_s))
    launches = exposed_seconds(layout.device, launches, compute)
    return PhaseTime({"compute": compute / layout.count, "launches": launches / layout.count})
