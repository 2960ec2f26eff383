"""Money and storage of a run: device hours on a market, gigabytes that are kept, bytes that leave a machine."""

from __future__ import annotations

from dataclasses import dataclass

from onetrunk.plan.evaluate import Plan
from onetrunk.plan.hardware import MARKETS, Catalog
from onetrunk.plan.job import Job
from onetrunk.plan.timing import band

GB = 1e9
# Loading, the check of the largest pack, the last save.
START_S = 180.0
# A float32 weight and the two numbers of Adam in a checkpoint of what trains.
CHECKPOINT_BYTES = 12
# Bytes of a token of a rollout in a checkpoint: ids, logprobs of sampler, policy and reference, value, advantage.
ROLLOUT_BYTES = 32
# Text of a prompt or a completion, per token.
TEXT_BYTES = 4.5
HOURS_PER_MONTH = 730.0


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
    checkpoint = CHECKPOINT_BYTES * job.trained_weights + ROLLOUT_BYTES * job.rows * job.lengths.row
    steps = job.optimizer_steps
    made = steps // job.save_every if job.save_every else 0
    kept = min(made, max(2, job.keeps_checkpoints)) if job.keeps_checkpoints else made
    return {
        "base model": job.shape.parameters * job.model.itemsize / GB,
        "reward model": 0.0 if job.reward is None else job.reward.parameters * job.reward_bytes / GB,
        f"{kept} checkpoints": kept * checkpoint / GB,
        "result": 4.0 * job.trained_weights / GB,
        "rollout in work": ROLLOUT_BYTES * job.rows * job.lengths.row / GB,
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


def check_budget(cost: Cost, market: str, budget: float | None) -> None:
    """Raise ValueError if a run costs more than the budget."""
    if budget is not None and cost.total(market) > budget:
        raise ValueError(
            f"the cheapest plan costs ${cost.total(market):,.2f} ({market}), and the budget is ${budget:,.2f}; lower"
            " num_rollouts or num_ppo_epochs, take another market (--market spot), or raise --budget"
        )
