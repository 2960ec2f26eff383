"""The judges of a PPO run: one in the reward, and one that monitors it.

This module holds their settings and checks, and loads them. Answers are kept in a ledger in the run's folder, so that
a resumed run gets the same answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from onetrunk.feedback.ledger import Ledger
from onetrunk.judges.base import Judge
from onetrunk.judges.constitution import Constitution, load_constitution
from onetrunk.judges.load import REWARD, JudgeConfig, check_judge, load_judge
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.evaluation import KEPT_FOLDER, sample_references
from onetrunk.ppo.monitor import ACTIONS, HackingMonitor, check_settings
from onetrunk.ppo.trainer import PPOTrainer
from onetrunk.rewards.base import RewardFunction
from onetrunk.rewards.judge import JudgeReward, PairwiseReward
from onetrunk.rewards.resolve import resolve_reward
from onetrunk.utils.options import option

# Words in reward_funcs that stand for the judge.
JUDGE, PAIRWISE = "judge", "pairwise"


@dataclass
class PPOJudgeArguments:
    """A judge as a reward function, and another judge that monitors the reward."""

    pairwise_beta: float = option(
        1.0, "reward_funcs pairwise: reward = pairwise_beta * log P(completion better than the reference's); above 0."
    )
    pairwise_floor: float = option(0.01, "Lower bound of that probability, above 0 and below 0.5.")
    monitor_judge: list[str] | None = option(
        None,
        "Specs of a judge that is not part of the reward, as in judge. It rates completions of held-out prompts during"
        " training, and an alarm is raised where the reward rises while its ratings fall.",
    )
    monitor_constitution: str | None = option(None, "YAML file with its principles; None: constitution.")
    monitor_rubric: dict[str, str] | None = option(None, "Its rubric, where it is one; None: rubric.")
    monitor_every: int = option(1, "Rollouts between two of its measurements.")
    monitor_rows: int = option(64, "Number of held-out prompts that it rates; without held-out rows training prompts.")
    monitor_window: int = option(
        5, "Number of measurements over which the reward must rise and the judge fall for an alarm; 2 or more."
    )
    monitor_action: str = option("warn", "At an alarm: warn, or stop training.", ACTIONS)

    def __post_init__(self) -> None:
        if isinstance(self.monitor_judge, str):
            self.monitor_judge = [self.monitor_judge]
        check_settings(self.monitor_every, self.monitor_window, self.monitor_action, self.monitor_rows)
        if not self.pairwise_beta > 0:
            raise ValueError(f"pairwise_beta is {self.pairwise_beta}; set a number above 0, such as 1")
        if not 0 < self.pairwise_floor < 0.5:
            raise ValueError(f"pairwise_floor is {self.pairwise_floor}; set a number above 0 and below 0.5")
        changed = [
            f.name for f in fields(self) if f.name.startswith("monitor_") and getattr(self, f.name) != f.default
        ]
        if changed and not self.monitor_judge:
            raise ValueError(f"{changed[0]} is set and monitor_judge is not; name a judge, or leave {changed[0]} out")

    def monitor_settings(self, settings: JudgeConfig) -> JudgeConfig:
        """Return the settings of the monitor's judge: those of the reward's judge with the monitor's own values."""
        return replace(
            settings,
            judge=self.monitor_judge,
            constitution=self.monitor_constitution or settings.constitution,
            rubric=self.monitor_rubric or (settings.rubric if "rubric" in self.monitor_judge else None),
        )


def check_judges(reward_funcs: Sequence[str], settings: JudgeConfig, arguments: PPOJudgeArguments) -> None:
    """Raise ValueError for a judge without settings, settings without a judge, or a judge that monitors itself."""
    words = [word for word in (JUDGE, PAIRWISE) if word in reward_funcs]
    if words and not settings.judge:
        raise ValueError(f"reward_funcs names {words[0]}, and judge is not set; name who judges, such as rubric")
    if settings.judge and not words:
        raise ValueError(
            f"judge is set, and reward_funcs names neither {JUDGE} (its rating) nor {PAIRWISE} (log P of being better"
            " than the reference's completion); add one of them, or leave judge out (monitor_judge only watches)"
        )
    if words and not settings.constitution:
        raise ValueError("judge is set and constitution is not; a judge judges by one: name a YAML file")
    if not arguments.monitor_judge:
        return
    monitor = arguments.monitor_settings(settings)
    if not monitor.constitution:
        raise ValueError("monitor_judge is set, and neither monitor_constitution nor constitution; name a YAML file")
    same = [spec for spec in arguments.monitor_judge if spec.removeprefix(REWARD) in reward_funcs]
    if words and monitor == settings:
        same = list(arguments.monitor_judge)
    if same:
        raise ValueError(
            f"monitor_judge {same[0]} is what the reward is made of, and would see no gap; name a judge that PPO does"
            " not see"
        )


@dataclass(frozen=True)
class RunJudges:
    """The loaded judges of a run.

    Args:
        reward_funcs: those of the recipe, with reward functions in place of the words judge and pairwise.
        monitor: None without a monitor.
    """

    reward_funcs: list[str | RewardFunction]
    monitor: HackingMonitor | None

    def begin(self, trainer: PPOTrainer) -> None:
        """Attach the monitor, and sample the completions that pairwise rewards compare with."""
        if self.monitor is not None:
            self.monitor.attach(trainer)
        pairwise = [reward for reward in self.reward_funcs if isinstance(reward, PairwiseReward)]
        if pairwise:
            references = sample_references(trainer, [] if self.monitor is None else [self.monitor.rows])
            for reward in pairwise:
                reward.references.update(references)


@contextlib.contextmanager
def run_judges(
    reward_funcs: Sequence[str], args: PPOConfig, settings: JudgeConfig, arguments: PPOJudgeArguments
) -> Iterator[RunJudges]:
    """Load the judges before any other model, and yield them.

    Args:
        reward_funcs: those of the recipe.
        args: settings of the run.
        settings: of the judge in the reward.
        arguments: of pairwise rewards and the monitor.

    Raises:
        ValueError: a constitution or a judge is not valid.
        RuntimeError: another process uses the ledger.
    """
    if not settings.judge and not arguments.monitor_judge:
        yield RunJudges(list(reward_funcs), None)
        return
    settings = replace(settings, judge_device=settings.judge_device or str(args.device))
    path = Path(args.output_dir) / KEPT_FOLDER / f"judged-{args.process_index}.jsonl"
    with contextlib.ExitStack() as stack:
        # The monitor first: it may only be a constitution, so mistakes in it are reported before a model loads.
        monitor_parts = _monitor_parts(args, settings, arguments) if arguments.monitor_judge else None
        judge_parts = _load_parts(settings) if settings.judge else None
        ledger = stack.enter_context(Ledger(path))
        rewards: dict[str, RewardFunction] = {}
        if judge_parts is not None:
            rewards[JUDGE] = JudgeReward(*judge_parts, memory=ledger)
            numbers = {"beta": arguments.pairwise_beta, "floor": arguments.pairwise_floor}
            rewards[PAIRWISE] = PairwiseReward(*judge_parts, memory=ledger, **numbers)
        monitor = None
        if monitor_parts is not None:
            monitor = HackingMonitor(
                *monitor_parts,
                every=arguments.monitor_every,
                window=arguments.monitor_window,
                action=arguments.monitor_action,
                num_rows=arguments.monitor_rows,
                memory=ledger,
            )
        yield RunJudges([rewards.get(spec, spec) for spec in reward_funcs], monitor)


def _monitor_parts(
    args: PPOConfig, settings: JudgeConfig, arguments: PPOJudgeArguments
) -> tuple[Judge | None, Constitution]:
    monitor = arguments.monitor_settings(settings)
    if args.process_index:
        return None, load_constitution(monitor.constitution)  # Only the first process asks the judge.
    return _load_parts(monitor)


def _load_parts(settings: JudgeConfig) -> tuple[Judge, Constitution]:
    constitution = load_constitution(settings.constitution)
    judge = load_judge(settings, resolve_reward)
    check_judge(judge)
    return judge, constitution
