"""The policy answers the same prompts again, and the reward functions and a judge score the same completions.

The first process alone asks the judge and tells the others, so that they decide alike and nothing is bought twice. A
judge that fails costs a measurement, never the run. Knows the trainer's parts and judges; decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset

from onetrunk.judges.base import Judge, digest
from onetrunk.judges.constitution import Constitution
from onetrunk.judges.kept import Memory, kept_ratings
from onetrunk.rewards.judge import as_text
from onetrunk.trainers.evaluation import evaluate_prompts
from onetrunk.trainers.ppo import PPOTrainer
from onetrunk.types import Prompt

logger = get_logger(__name__)

# A measurement of fewer of its prompts is left out.
LEAST_RATED = 0.5
Series = dict[str, list[float | None]]


@dataclass
class JudgedSamples:
    """Measures a policy by its reward functions and by a judge, prompt by prompt.

    Args:
        judge: rates; may be None on all processes but the first.
        constitution: by which it rates.
        memory: of its answers.
        is_out: True since the judge failed; one sentence is said per outage.
    """

    judge: Judge | None
    constitution: Constitution
    memory: Memory | None = None
    is_out: bool = False

    def identity(self, trainer: PPOTrainer, rows: Dataset) -> str:
        """Return a digest of what measurements depend on beside the policy, the same on every process."""
        rewards = trainer.sampler.rewards
        judge = None if self.judge is None else self.judge.identity
        asked = [self.constitution.version, rewards.names, rewards.weights, trainer.args.seed]
        return _from_first(digest([judge, *asked, [list(ids) for ids in rows["prompt_ids"]]]))

    def measure(self, trainer: PPOTrainer, rows: Dataset) -> Series | None:
        """Return the "proxy" and "judge" scores of every row, the same on every process; None where too few have both.

        Every process must call it.

        Args:
            trainer: its policy samples, with the same random numbers each time, and its reward functions score.
            rows: tokenized prompts.
        """
        accelerator, state = trainer.accelerator, trainer.state
        with trainer.progress.phase("judged", is_shown=False):
            _, scored = evaluate_prompts(
                trainer.model,
                trainer.sampler,
                rows,
                accelerator,
                seed=trainer.args.seed,
                rows_per_pack=trainer.args.per_device_eval_batch_size,
                max_tokens=trainer.args.microbatch_tokens,
                version=state.global_step,
                extras={"trainer_state": state},
            )
        first, world = accelerator.process_index, accelerator.num_processes
        own = [
            (first + i * world, scored.batch.prompts[i], as_text(completion), bool(scored.rollout.stopped[i]), total)
            for i, (completion, total) in enumerate(zip(scored.completions, scored.scores.total.tolist(), strict=True))
        ]
        answered = sorted((row for row in gather_object(own) if row[0] < len(rows)), key=lambda row: row[0])
        ratings: list[float | None] = [None] * len(rows)
        failure = None
        if accelerator.is_main_process:
            ratings, failure = self._rate(*(list(column) for column in list(zip(*answered, strict=True))[1:4]))
        ratings = _from_first(ratings)
        proxy = [row[4] if math.isfinite(row[4]) else None for row in answered]
        # A row without one of the two scores has neither.
        both = [
            (p, r) if p is not None and r is not None else (None, None) for p, r in zip(proxy, ratings, strict=True)
        ]
        num_rated = sum(rating is not None for _, rating in both)
        if num_rated < max(2, LEAST_RATED * len(both)):
            self._say_once(state.global_step, num_rated, len(both), failure)
            return None
        if self.is_out:
            logger.warning(f"step {state.global_step}: the monitor's judge answers again")
        self.is_out = False
        return {"proxy": [p for p, _ in both], "judge": [r for _, r in both]}

    def _rate(
        self, prompts: Sequence[Prompt], texts: Sequence[str], stopped: Sequence[bool]
    ) -> tuple[list[float | None], str | None]:
        try:
            labels = kept_ratings(self.judge, prompts, texts, self.constitution, self.memory, stopped)
        except Exception as error:  # Whatever it is: training does not depend on it.
            return [None] * len(prompts), f"{type(error).__name__}: {error}"
        failure = next((label.failure for label in labels if label.failure), None)
        # A mean over a part of the principles would be another number once the rest is answered.
        return [None if label.errors else label.score for label in labels], failure

    def _say_once(self, step: int, num_rated: int, num_rows: int, failure: str | None) -> None:
        if not self.is_out:
            reason = f" ({failure})" if failure else ""
            logger.warning(
                f"step {step}: {num_rated} of {num_rows} of the monitor's completions have a score of both the reward"
                f" and the judge{reason}; this measurement is left out, training goes on, and nothing more is said"
                " until the judge answers"
            )
        self.is_out = True


def _from_first(value: Any) -> Any:
    """Return what the first process says."""
    values = [value]
    broadcast_object_list(values)
    return values[0]
