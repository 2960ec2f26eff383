"""Judges of `onetrunk ppo`: one as a reward function, and another one that monitors the reward.

Their answers are kept in a ledger in the run's folder, so that a resumed run gets the same answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from onetrunk.feedback.ledger import Ledger
from onetrunk.judges.judge_config import REWARD, JudgeConfig
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.monitoring.hacking_monitor import HackingMonitor
from onetrunk.ppo.reference_completions import KEPT_FOLDER, sample_references
from onetrunk.ppo.settings import MONITOR_ACTIONS, check_monitor
from onetrunk.ppo.trainer import PPOTrainer
from onetrunk.rewards.judge_reward import JudgeReward, PairwiseReward
from onetrunk.rewards.reward import RewardFunction
from onetrunk.stages.arguments import PPODataArguments
from onetrunk.stages.judging import load_judge_parts, measured_words
from onetrunk.utils.options import option

# Words in reward_funcs that stand for the judge.
JUDGE, PAIRWISE = "judge", "pairwise"


@dataclass
class PPOJudgeArguments:
    """A judge as a reward function, and another judge that monitors the reward."""

    judge_report: str | None = option(
        None, "output_dir of onetrunk judge, which measured the judge of this run: the model card quotes it."
    )
    monitor_judge: list[str] | None = option(
        None,
        "Specs of a judge that is not part of the reward, as in judge. It rates completions of held-out prompts during"
        " training, and an alarm is raised where the reward rises while its ratings fall.",
    )
    monitor_constitution: str | None = option(None, "YAML file with its principles; None: constitution.")
    monitor_rubric: dict[str, str] | None = option(None, "Its rubric, where it is one; None: rubric.")
    monitor_every: int = option(1, "Rollouts between two of its measurements.")
    monitor_rows: int = option(64, "Number of held-out prompts that it rates; without held-out rows training prompts.")
    monitor_action: str = option("warn", "At an alarm: warn, or stop training.", MONITOR_ACTIONS)

    def __post_init__(self) -> None:
        if isinstance(self.monitor_judge, str):
            self.monitor_judge = [self.monitor_judge]
        check_monitor(self.monitor_every, self.monitor_action, self.monitor_rows)
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


def check_judges(
    data: PPODataArguments,
    args: PPOConfig,
    model_args: Any,
    settings: JudgeConfig,
    arguments: PPOJudgeArguments,
) -> None:
    """Raise ValueError for a judge without settings, settings without a judge, or a judge that monitors itself."""
    reward_funcs = data.reward_funcs
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
    if arguments.judge_report and not settings.judge and not arguments.monitor_judge:
        raise ValueError("judge_report is set and no judge is; name the judge that it measured, or leave it out")
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
    """The loaded judges of a run."""

    reward_funcs: list[str | RewardFunction]  # With functions in place of the words judge and pairwise.
    monitor: HackingMonitor | None
    measured: dict[str, str] = field(default_factory=dict)  # What the card says about the judges.

    def begin(self, trainer: PPOTrainer) -> None:
        """Attach the monitor, and sample the completions that pairwise rewards compare with."""
        trainer.card_facts = tuple(self.measured.items())
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

    Raises:
        ValueError: a constitution or a judge is not valid.
        RuntimeError: another process uses the ledger.
    """
    if not settings.judge and not arguments.monitor_judge:
        yield RunJudges(list(reward_funcs), None)
        return
    settings = replace(settings, judge_device=settings.judge_device or str(args.device))
    # The monitor first: it may only be a constitution, so mistakes in it are reported before a model loads.
    watching = judging = None
    if arguments.monitor_judge:
        watching = load_judge_parts(arguments.monitor_settings(settings), asks=args.process_index == 0)
    if settings.judge:
        judging = load_judge_parts(settings)
    asked = [parts[0] for parts in (judging, watching) if parts is not None and parts[0] is not None]
    measured = measured_words(arguments.judge_report, asked) if args.process_index == 0 else {}
    with Ledger(Path(args.output_dir) / KEPT_FOLDER / f"judged-{args.process_index}.db") as ledger:
        rewards: dict[str, RewardFunction] = {}
        if judging is not None:
            rewards[JUDGE] = JudgeReward(*judging, memory=ledger)
            rewards[PAIRWISE] = PairwiseReward(*judging, memory=ledger)
        monitor = None
        if watching is not None:
            monitor = HackingMonitor(
                *watching,
                every=arguments.monitor_every,
                action=arguments.monitor_action,
                num_rows=arguments.monitor_rows,
                memory=ledger,
            )
        yield RunJudges([rewards.get(spec, spec) for spec in reward_funcs], monitor, measured)
