"""Jobs and pools for the tests of the planner."""

from dataclasses import replace

from onetrunk.costs import ModelShape
from onetrunk.plan.hardware import Device, Pool
from onetrunk.plan.job import Job, Lengths, ModelFacts, read_model

SMALL = ModelShape(1000, 64, 4, 128, 4, 2, 16)
LENGTHS = Lengths(100, 100, 200, 150)


def job(**changes) -> Job:
    """Return a job on a small model: 16 prompts, 2 minibatches."""
    base = Job(
        ModelFacts("small", SMALL, 2.0, "a test"), 2.0, 2.0, LENGTHS, adapted_layers=4, rollout_batch_size=16,
        num_minibatches=2, num_rollouts=10, save_every=10,
    )  # fmt: skip
    return replace(base, **changes)


def job_7b(**changes) -> Job:
    """Return a job on the shape of Qwen2.5-7B: 128 prompts, 512 + 512 tokens at most."""
    model = read_model("Qwen/Qwen2.5-7B")
    base = Job(
        model, 2.0, 2.0, Lengths(256, 256, 512, 512), adapted_layers=28, rollout_batch_size=128, num_minibatches=4,
        num_ppo_epochs=2, microbatch_rows=128, microbatch_tokens=16384, num_rollouts=200, save_every=100,
    )  # fmt: skip
    return replace(base, **changes)


def device(**changes) -> Device:
    """Return a GPU of round numbers."""
    return replace(Device("D", 80.0, 1000.0, 3000.0, 400.0, 50.0, 200.0, 2.0), **changes)


def pool(count: int, **changes) -> Pool:
    """Return GPUs of round numbers, 8 to a machine."""
    return Pool(device(**changes), count, min(count, 8))
