"""The verdict on a run, computed from its record: what rose, what it cost, what fell, what raised an alarm, what next.

A change counts only if it is beyond its noise: the 95% interval of the mean difference over the same prompts is on
one side of 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from onetrunk.ppo.monitoring.alarm_rules import RULES
from onetrunk.report.runs import Run, pairs_of, stage_runs

GOOD, MIXED, BAD = LEVELS = ("good", "mixed", "bad")
Z = 1.96
TRAINED = ("ppo", "eval")


@dataclass(frozen=True)
class Verdict:
    """A verdict.

    Args:
        level: one of LEVELS.
        findings: clauses, the most important one first.
        advice: what to do next.
    """

    level: str
    findings: Sequence[str]
    advice: str

    def __str__(self) -> str:
        text = "; ".join(self.findings)
        return f"{text[:1].upper()}{text[1:]}. Next: {self.advice}."


@dataclass(frozen=True)
class Change:
    """The change of a score from before training to after it.

    Args:
        before, after: means.
        low, high: 95% interval of the difference of the means; NaN if it is not known.
        num_prompts: how many prompts have both scores.
    """

    before: float
    after: float
    low: float = math.nan
    high: float = math.nan
    num_prompts: int = 0

    @classmethod
    def of(cls, before: Sequence[float], after: Sequence[float]) -> Change:
        """Return the change of scores of the same prompts."""
        gains = [b - a for a, b in zip(before, after, strict=True)]
        half = Z * stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
        return cls(fmean(before), fmean(after), fmean(gains) - half, fmean(gains) + half, len(gains))

    @property
    def sign(self) -> int:
        """1 if the score rose beyond its noise, -1 if it fell, else 0."""
        if math.isnan(self.low):
            return (self.after > self.before) - (self.after < self.before)
        return (self.low > 0) - (self.high < 0)

    def __str__(self) -> str:
        way = {1: "rose", -1: "fell", 0: "did not change beyond its noise,"}[self.sign]
        known = not math.isnan(self.low)
        interval = f" ({self.low:+.3g} to {self.high:+.3g}, {self.num_prompts} prompts)" if known else ""
        return f"{way} from {self.before:.3g} to {self.after:.3g}{interval}"


@dataclass(frozen=True)
class Facts:
    """What the verdict on a run depends on.

    Args:
        score: how the score changed; None if there is none.
        fallen: the reward functions that lost.
        lasting: the alarms that ended the run or lasted until its end, the worst first.
    """

    run: Run
    score: Change | None
    fallen: dict[str, Change]
    lasting: Sequence[str]

    @property
    def is_over(self) -> bool:
        """Whether the run has come to its end."""
        return self.run.verb != "ppo" or self.run.status.startswith("finished")

    @property
    def level(self) -> str:
        """One of LEVELS."""
        low, high = _win_interval(self.run)
        sign = 0 if self.score is None else self.score.sign
        if sign < 0 or high < 0.5 or any(alarm.ended_run for alarm in self.run.alarms()):
            return BAD
        is_won = sign > 0 or low > 0.5
        return GOOD if is_won and self.is_over and not (self.fallen or self.lasting or _unjudged(self.run)) else MIXED

    @property
    def findings(self) -> list[str]:
        """The clauses of the verdict."""
        clauses = [] if self.is_over else [self.run.status]
        clauses += contest_clauses(self.run)
        if self.score is not None:
            where = "the score of held-out prompts" if self.score.num_prompts else "the score"
            clauses.append(f"{where} {self.score}{cost_text(self.run)}")
        clauses += [f"{name} {change}" for name, change in self.fallen.items()]
        return clauses + [f"alarm {name}" for name in self.lasting]

    @property
    def advice(self) -> str:
        """What to do next."""
        if not self.is_over:
            is_running = self.run.status.startswith("running")
            return "wait" if is_running else "the same command with --resume auto continues it"
        if self.lasting:
            rule = RULES.get(self.lasting[0])
            return rule.change if rule else "read the largest gains, and raise beta or correct the reward"
        if _unjudged(self.run):
            return "the same command asks the judge for the missing pairs again"
        if self.fallen:
            return f"if {next(iter(self.fallen))} matters, give it a weight in reward_weights, or raise beta"
        if self.level == BAD:
            return "lower learning_rate, and read the largest losses"
        if self.level == MIXED:
            return (
                "read the samples; raise learning_rate or num_rollouts, or use a reward that tells completions apart"
            )
        folder = self.run.results.get("model") if self.run.verb == "eval" else self.run.folder
        is_adapter = self.run.verb == "ppo" or "reference" in self.run.results
        return f"onetrunk chat {folder}" + " --compare" * is_adapter


def verdict_of(run: Run) -> Verdict | None:
    """Return the verdict on a PPO run, an evaluation or a pipeline; None for another stage, or with nothing known."""
    if run.verb == "run":
        return pipeline_verdict(stage_runs(run))
    facts = Facts(run, score_change(run), fallen_parts(run), lasting_alarms(run))
    has_facts = facts.score is not None or facts.lasting or contest_clauses(run)
    return Verdict(facts.level, facts.findings, facts.advice) if run.verb in TRAINED and has_facts else None


def pipeline_verdict(stages: dict[str, Run]) -> Verdict | None:
    """Return the verdict on a chain: that of its last evaluation, or else of PPO, and no better than the worst one."""
    verdicts = {name: verdict for name, run in stages.items() if (verdict := verdict_of(run)) is not None}
    if not verdicts:
        return None
    # An evaluation has prompts that no stage was trained on.
    chosen = max(verdicts, key=lambda name: (stages[name].verb == "eval", list(verdicts).index(name)))
    worst = max(verdicts.values(), key=lambda verdict: LEVELS.index(verdict.level))
    doubts = [f"{name}: {'; '.join(v.findings)}" for name, v in verdicts.items() if v.level != GOOD and name != chosen]
    return Verdict(worst.level, [*verdicts[chosen].findings, *doubts], worst.advice)


def score_change(run: Run) -> Change | None:
    """Return how the score changed: over the same prompts, or between the means, or over the training rollouts."""
    pairs = _scored_pairs(run, "score")
    if pairs:
        return Change.of(*pairs)
    sides = (run.results.get("reference") or {}), (run.results.get("policy") or {})
    means = [side.get("score/mean") for side in sides]
    if None in means:
        means = run.series("score/mean")[1]
        part = max(1, len(means) // 10)
        return Change(fmean(means[:part]), fmean(means[-part:])) if len(means) > 1 else None
    num_prompts = run.results.get("num_prompts") or 0
    spread = [side.get("score/std") for side in sides]
    if None in spread or not num_prompts:
        return Change(*means)
    half = Z * math.hypot(*spread) / math.sqrt(num_prompts)
    gain = means[1] - means[0]
    return Change(*means, gain - half, gain + half, num_prompts)


def fallen_parts(run: Run) -> dict[str, Change]:
    """Return the reward functions whose scores fell beyond their noise, by name."""
    names = dict.fromkeys(name for row in run.after for name in row if name.startswith("score/"))
    changes = {name.removeprefix("score/"): Change.of(*pairs) for name in names if (pairs := _scored_pairs(run, name))}
    return {name: change for name, change in changes.items() if change.sign < 0}


def contest_clauses(run: Run) -> list[str]:
    """Return who won the comparison of an evaluation, and how many pairs have no verdict."""
    rate = run.results.get("win_rate")
    if not isinstance(rate, dict) or rate.get("discrete_win_rate") is None:
        return []
    low, high = _win_interval(run)
    won = f"it wins {rate['discrete_win_rate']:.1%} of the pairs against {rate.get('opponent')}"
    clauses = [f"{won} ({low:.1%} to {high:.1%}) by the judge {rate.get('judge')}"]
    if _unjudged(run):
        clauses.append(f"{_unjudged(run)} pairs have no verdict, because the judge did not answer")
    return clauses


def cost_text(run: Run) -> str:
    """Return what the change cost: the KL, and how long completions were and are."""
    before, after = (run.results.get(side) or {} for side in ("reference", "policy"))
    if not after:
        _, kls = run.series("kl/ref")
        return f", at a KL of {kls[-1]:.1f} nats" if kls else ""
    kl = f", at a KL of {after['kl/ref']:.1f} nats" if after.get("kl/ref") is not None else ""
    lengths = [side.get("completion/length") for side in (before, after)]
    return kl if None in lengths else f"{kl}, {lengths[0]:.0f} tokens long before and {lengths[1]:.0f} now"


def lasting_alarms(run: Run) -> list[str]:
    """Return the alarms that ended the run or lasted until its end, the worst first."""

    def lasts(name: str) -> bool:
        _, values = run.series("judge/alarm" if name == "monitor" else f"alarm/{name}")
        return bool(values) and values[-1] > 0

    return list(dict.fromkeys(alarm.name for alarm in run.alarms() if alarm.ended_run or lasts(alarm.name)))


def _scored_pairs(run: Run, key: str) -> tuple[list[float], list[float]] | None:
    """Return the scores under a key of the prompts that have one before and after; None if there are none."""
    sides = [[row.get(key) for row in pair] for pair in pairs_of(run)]
    known = [side for side in sides if all(isinstance(value, (int, float)) for value in side)]
    return tuple(map(list, zip(*known, strict=True))) if known else None  # type: ignore[return-value]


def _win_interval(run: Run) -> tuple[float, float]:
    rate = run.results.get("win_rate")
    known = rate.get("discrete_win_rate_interval") if isinstance(rate, dict) else None
    return tuple(known or (0.0, 1.0))


def _unjudged(run: Run) -> int:
    rate = run.results.get("win_rate")
    return (rate.get("unjudged") or 0) if isinstance(rate, dict) else 0
