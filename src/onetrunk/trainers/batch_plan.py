"""How the completions of a rollout are dealt to processes, optimizer steps and forwards: whole numbers alone."""

from __future__ import annotations

from dataclasses import dataclass

from onetrunk.trainers.ppo_config import PPOConfig


@dataclass(frozen=True)
class BatchPlan:
    """How a rollout is dealt out.

    Args:
        rows_per_rank: completions per process and rollout.
        prompts_per_rank: prompts per process and rollout.
        rows_per_minibatch: completions per process and optimizer step.
        rows_per_pack: most completions in one forward.
    """

    prompts_per_rank: int
    rows_per_rank: int
    rows_per_minibatch: int
    rows_per_pack: int


def plan_batches(config: PPOConfig, world_size: int) -> BatchPlan:
    """Return the BatchPlan of a config on `world_size` processes.

    Raises:
        ValueError: a division that leaves a rest; the sentence names values that divide.
    """
    prompts, rest = divmod(config.rollout_batch_size, world_size)
    if rest or not prompts:
        raise ValueError(
            f"rollout_batch_size {config.rollout_batch_size} is not divisible by {world_size} processes; set it to"
            f" {max(1, round(config.rollout_batch_size / world_size)) * world_size}"
        )
    rows = prompts * config.num_generations
    if rows % config.num_minibatches:
        divisors = [d for d in range(1, rows + 1) if rows % d == 0]
        near = sorted(divisors, key=lambda d: abs(d - config.num_minibatches))[:2]
        raise ValueError(
            f"the {rows} completions of a process (rollout_batch_size {config.rollout_batch_size}, {world_size}"
            f" processes, num_generations {config.num_generations}) are not divisible by {config.num_minibatches}"
            f" minibatches; set num_minibatches to {' or '.join(str(d) for d in sorted(near))}"
        )
    rows_per_minibatch = rows // config.num_minibatches
    rows_per_pack = min(config.per_device_train_batch_size, rows_per_minibatch)
    return BatchPlan(prompts, rows, rows_per_minibatch, rows_per_pack)
