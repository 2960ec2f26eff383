"""What credit over compacted contexts is worth: the courier game, with the exact J of the policy as a share of J*.

    python scripts/bench/compaction.py                  # an hour on 1 core
    python scripts/bench/compaction.py --compactions 2 --arms chain inside

A key has to survive `compactions` summaries of one word (tests/courier.py); 80 rollouts of 128 episodes. The root of
the repository must be in PYTHONPATH. Results: learning/README.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from typing import Any

os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import datasets
import torch
from torch import Tensor

from onetrunk.models.trunk import PackOutput
from onetrunk.ops.advantages import gae
from onetrunk.ppo.experience import ExperienceStream
from onetrunk.types import Pack
from tests.courier import START, Courier, Tables, courier_model, make_courier_trainer, objective, optimum

LAM = 0.95


class Segmented(ExperienceStream):
    """A stream that knows the contexts of an episode."""

    # Tokens with which a context begins.
    start: tuple[int, ...] = (START,)

    def segments(self, pack: Pack) -> Tensor:
        """Return the number of the segment of each token, [R, C]."""
        ids, begins = pack.completion_ids, torch.ones_like(pack.completion_mask)
        for back, token in enumerate(reversed(self.start)):
            begins &= ids.roll(back, 1) == token
        begins[:, : len(self.start) - 1] = False
        return begins.cumsum(1)


class Masked(Segmented):
    """Summaries, the last turns of all segments but the last, do not train."""

    def add_rewards(self, packs: Any, scores: Any, scored: Any) -> Any:
        rewarded = super().add_rewards(packs, scores, scored)
        for item in rewarded:
            turns, number = item.pack.turns, self.segments(item.pack)
            is_later = number < number.max(1, keepdim=True).values
            for segment in range(int(number.max())):
                last = turns.masked_fill(number != segment, -1).max(1, keepdim=True).values
                item.loss_mask.logical_and_((turns != last) | (number != segment) | ~is_later)
        return rewarded


class Inside(Segmented):
    """GAE ends with each segment: the reward, paid in the last one, does not reach the summaries."""

    def estimate(self, pack: Pack, output: PackOutput, rewards: Tensor, stopped: Tensor, lam: float) -> Any:
        advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
        number = self.segments(pack)
        for segment in range(int(number.max()) + 1):
            mask = pack.completion_mask & (number == segment)
            own = gae(self.paid(pack, rewards, mask), output.values, mask, self.config.gamma, lam, None)
            advantages, returns = advantages + own[0], returns + own[1]
        return advantages * self.discount(pack), returns

    def paid(self, pack: Pack, rewards: Tensor, mask: Tensor) -> Tensor:
        """Return the rewards of a segment."""
        return rewards * mask

    def discount(self, pack: Pack) -> Tensor | float:
        """Return what advantages are multiplied by."""
        return 1.0


class Corrected(Inside):
    """The paper's credit: each segment ends with the final reward, times (gamma lam)^(tokens after the segment)."""

    def paid(self, pack: Pack, rewards: Tensor, mask: Tensor) -> Tensor:
        last = mask.long() * torch.arange(1, mask.shape[1] + 1)
        ends = last == last.max(1, keepdim=True).values.clamp(min=1)
        final = pack.completion_mask.long() * torch.arange(1, mask.shape[1] + 1)
        score = rewards.gather(1, final.argmax(1, keepdim=True))
        return torch.where(ends & mask, score, rewards * mask)

    def discount(self, pack: Pack) -> Tensor:
        number, mask = self.segments(pack), pack.completion_mask
        later = [(mask & (number > segment)).sum(1) for segment in range(int(number.max()) + 1)]
        return (self.config.gamma * self.config.lam) ** torch.stack(later, 1).gather(1, number).float()


# Streams, and settings.
ARMS: dict[str, tuple[type[ExperienceStream], dict[str, Any]]] = {
    "chain": (ExperienceStream, {}),
    "chain, lam 0.95": (ExperienceStream, {"lam": LAM}),
    "the paper's correction, lam 0.95": (Corrected, {"lam": LAM}),
    "inside segments": (Inside, {}),
    "summaries masked": (Masked, {}),
}


def run(arm: str, courier: Courier, seed: int, rollouts: int) -> float:
    """Train once; return the share of J* that the policy attains."""
    stream, settings = ARMS[arm]
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_courier_trainer(
            courier, seed, folder, num_rollouts=rollouts, learning_rate=2e-3, log_completions=False, **settings
        )
        trainer.stream_class = stream
        trainer.train()
    reference = Tables.of(courier_model(courier, seed), courier)
    reached = objective(Tables.of(trainer.model.eval(), courier), reference, courier).item()
    return reached / optimum(reference, courier)


def main(arguments: list[str] | None = None) -> int:
    summary, _, details = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compactions", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--rollouts", type=int, default=80)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    print("| credit | " + " | ".join(f"{n} compactions" for n in given.compactions) + " | CPU seconds of a run |")
    print("|---" * (2 + len(given.compactions)) + "|", flush=True)
    for arm in given.arms:
        cells, start = [], time.process_time()
        for n in given.compactions:
            shares = [run(arm, Courier(n), seed, given.rollouts) for seed in given.seeds]
            cells.append(f"{sum(shares) / len(shares):.3f} ({min(shares):.3f})")
        seconds = (time.process_time() - start) / (len(given.compactions) * len(given.seeds))
        print(f"| {arm} | " + " | ".join(cells) + f" | {seconds:.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
