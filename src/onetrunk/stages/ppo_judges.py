"""The judges of a PPO run: as reward functions, and as the monitor of the others. Loads them, and keeps their answers.

Answers stand in a ledger beside the run, so that a run which goes on from a checkpoint meets the same ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onetrunk.feedback.ledger import Ledger
from onetrunk.judges.base import Judge
from onetrunk.judges.constitution import Constitution, load_constitution
from onetrunk.judges.load import JudgeSettings, check_judge, load_judge
from onetrunk.ppo.monitor import HackingMonitor
from onetrunk.ppo.reference_completions import FOLDER, sample_references
from onetrunk.ppo.trainer import PPOTrainer
from onetrunk.rewards.base import RewardFunction
from onetrunk.rewards.judge import JudgeReward, PairwiseReward
from onetrunk.rewards.resolve import resolve_reward
from onetrunk.stages.ppo import JUDGE, PAIRWISE, PPOJudgeArguments


@dataclass(frozen=True)
class RunJudges:
    """What judges do in a run.

    Args:
        reward_funcs: those of the recipe, with reward functions in place of the words judge and pairwise.
        monitor: None: nobody watches.
    """

    reward_funcs: list[str | RewardFunction]
    monitor: HackingMonitor | None

    def begin(self, trainer: PPOTrainer) -> None:
        """Let the monitor watch, and sample what pairwise rewards compare with."""
        if self.monitor is not None:
            self.monitor.attach(trainer)
        pairwise = [reward for reward in self.reward_funcs if isinstance(reward, PairwiseReward)]
        if pairwise:
            more = [] if self.monitor is None else [self.monitor.rows]
            found = sample_references(trainer, more)
            for reward in pairwise:
                reward.references.update(found)


@contextlib.contextmanager
def run_judges(
    reward_funcs: Sequence[str], args: Any, settings: JudgeSettings, arguments: PPOJudgeArguments
) -> Iterator[RunJudges]:
    """Yield the judges of a run, loaded; none of its models but theirs is.

    Args:
        reward_funcs: texts of the recipe.
        args: PPOConfig.
        settings: of the judge in the reward.
        arguments: of pairwise rewards and the monitor.

    Raises:
        ValueError: a constitution or a judge that is none.
        RuntimeError: another process uses the ledger.
    """
    if not settings.judge and not arguments.monitor_judge:
        yield RunJudges(list(reward_funcs), None)
        return
    settings = replace(settings, judge_device=settings.judge_device or str(args.device))
    path = Path(args.output_dir) / FOLDER / f"judged-{args.process_index}.jsonl"
    with contextlib.ExitStack() as stack:
        # Mistakes in either are said before a model loads.
        watching = _monitor_parts(args, settings, arguments) if arguments.monitor_judge else None
        judging = _loaded(settings) if settings.judge else None
        ledger = stack.enter_context(Ledger(path))
        rewards: dict[str, RewardFunction] = {}
        if judging is not None:
            rewards[JUDGE] = JudgeReward(*judging, memory=ledger)
            numbers = {"beta": arguments.pairwise_beta, "floor": arguments.pairwise_floor}
            rewards[PAIRWISE] = PairwiseReward(*judging, memory=ledger, **numbers)
        monitor = None
        if watching is not None:
            monitor = HackingMonitor(
                *watching,
                every=arguments.monitor_every,
                window=arguments.monitor_window,
                action=arguments.monitor_action,
                num_rows=arguments.monitor_rows,
                memory=ledger,
            )
        yield RunJudges([rewards.get(spec, spec) for spec in reward_funcs], monitor)


def _loaded(settings: JudgeSettings) -> tuple[Judge, Constitution]:
    constitution = load_constitution(settings.constitution)
    judge = load_judge(settings, resolve_reward)
    check_judge(judge)
    return judge, constitution


def _monitor_parts(
    args: Any, settings: JudgeSettings, arguments: PPOJudgeArguments
) -> tuple[Judge | None, Constitution]:
    own = arguments.monitor_settings(settings)
    if args.process_index:
        # The first process asks.
        return None, load_constitution(own.constitution)
    return _loaded(own)
