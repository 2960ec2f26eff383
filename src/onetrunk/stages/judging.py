"""Load the judge that a stage's settings name."""

from __future__ import annotations

from onetrunk.judges.base import Judge
from onetrunk.judges.constitution import Constitution, load_constitution
from onetrunk.judges.load import JudgeConfig, check_judge, load_judge
from onetrunk.rewards.resolve import resolve_reward


def load_judge_parts(settings: JudgeConfig, asks: bool = True) -> tuple[Judge | None, Constitution]:
    """Return the judge, its servers checked, and its constitution; without `asks` None in place of the judge.

    Raises:
        ValueError, TypeError, RuntimeError: a constitution or a judge is not valid.
    """
    constitution = load_constitution(settings.constitution)
    if not asks:
        return None, constitution
    judge = load_judge(settings, resolve_reward)
    check_judge(judge)
    return judge, constitution
