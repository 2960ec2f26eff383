"""The verdict on a run, computed from its record: what rose, what it cost, what fell, what raised an alarm, what next.

A change counts only if it is beyond its noise: the 95% interval of the difference is on one side of 0. The noise is
that of the same prompts before and after, or, without held-out prompts, of the rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

from onetrunk.judges.labels import statistics_warnings
from onetrunk.ppo.monitoring.alarm_rules import RULES, quantile
from onetrunk.report.runs import Run, pairs_of, stage_runs

GOOD, MIXED, BAD = LEVELS = ("good", "mixed", "bad")
# The stages whose result is a policy; of several, a pipeline is judged by the last kind.
TRAINED = ("ppo", "eval")
# A policy is far from its reference from this many nats per completion and per token on.
FAR, FAR_PER_TOKEN = 10.0, 1.0
MONITOR = "monitor"
# Of a reward model: a correlation of scores with lengths, and an agreement with the teacher, that are worth a word.
LENGTH_BOUND, FAITHFUL = 0.7, 0.9
# A held-out loss this many times the last training loss means overfitting.
BY_HEART = 1.25
HOLD_OUT = "hold out rows (eval_size or eval_dataset_name), which are scored before and after training"


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
        count: how many prompts have both scores, or how many values a series has.
        unit: what was counted.
    """

    before: float
    after: float
    low: float = math.nan
    high: float = math.nan
    count: int = 0
    unit: str = "prompts"

    @classmethod
    def of(cls, before: Sequence[float], after: Sequence[float]) -> Change:
        """Return the change of scores of the same prompts."""
        gains = [b - a for a, b in zip(before, after, strict=True)]
        half = quantile(len(gains) - 1) * stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
        return cls(fmean(before), fmean(after), fmean(gains) - half, fmean(gains) + half, len(gains))

    @classmethod
    def along(cls, values: Sequence[float], unit: str, noisy: slice = slice(None)) -> Change:
        """Return the change from the first to the last tenth of a series of independent values.

        The noise of a value is estimated from the differences of neighbours, to which a trend adds little (von
        Neumann 1941); two thirds of them count as independent.

        Args:
            noisy: the part of the series from which the noise is estimated.
        """
        part = max(1, len(values) // 10)
        before, after = fmean(values[:part]), fmean(values[-part:])
        squares = [(b - a) ** 2 for a, b in pairwise(values[noisy])]
        half = quantile(len(squares) * 2 // 3) * math.sqrt(fmean(squares or [math.nan]) / part)
        return cls(before, after, after - before - half, after - before + half, len(values), unit)

    @property
    def is_known(self) -> bool:
        return not math.isnan(self.low)

    @property
    def sign(self) -> int:
        """1 if the score rose beyond its noise, -1 if it fell, else 0, also if the noise is not known."""
        return (self.low > 0) - (self.high < 0)

    def __str__(self) -> str:
        values = f"from {self.before:.3g} to {self.after:.3g}"
        if not self.is_known:
            return f"went {values}, which may be noise"
        way = {1: "rose", -1: "fell", 0: "did not change beyond its noise,"}[self.sign]
        return f"{way} {values} ({self.low:+.3g} to {self.high:+.3g}, {self.count} {self.unit})"


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
        return self.run.verb != "ppo" or self.run.status.startswith("finished")

    @property
    def has_held_out(self) -> bool:
        """Whether the score is that of held-out prompts."""
        return self.score is not None and self.score.unit == "prompts"

    @property
    def is_far(self) -> bool:
        """Whether the policy speaks another language than the reference; without beta no alarm sees it."""
        after = self.run.results.get("policy") or {}
        kl, length = after.get("kl/ref") or 0.0, after.get("completion/length") or 1.0
        return kl > max(FAR, FAR_PER_TOKEN * length)

    @property
    def level(self) -> str:
        low, high = _win_interval(self.run)
        sign = 0 if self.score is None else self.score.sign
        if sign < 0 or high < 0.5 or any(alarm.ended_run for alarm in self.run.alarms()):
            return BAD
        is_won = sign > 0 or low > 0.5
        doubts = self.is_far or self.fallen or self.lasting or _unjudged(self.run)
        return GOOD if is_won and self.is_over and not doubts else MIXED

    @property
    def findings(self) -> list[str]:
        clauses = [] if self.is_over else [self.run.status]
        clauses += contest_clauses(self.run)
        if self.score is not None:
            where = "the score of held-out prompts" if self.has_held_out else "the score"
            clauses.append(f"{where} {self.score}{cost_text(self.run)}")
            clauses += [] if self.has_held_out else ["no held-out prompts were scored before and after"]
        clauses += ["that is far from the reference"] if self.is_far else []
        clauses += [f"{name} {change}" for name, change in self.fallen.items()]
        return clauses + [(name == MONITOR and fallen_judge(self.run)) or f"alarm {name}" for name in self.lasting]

    @property
    def advice(self) -> str:
        if not self.is_over:
            is_running = self.run.status.startswith("running")
            return "wait" if is_running else "the same command with --resume auto continues it"
        if self.is_far and self.level != BAD:
            return "raise beta or lower learning_rate, and read the samples"
        if self.lasting:
            rule = RULES.get(self.lasting[0])
            return rule.change if rule else "read the largest gains, and raise beta or correct the reward"
        if _unjudged(self.run):
            return "the same command asks the judge for the missing pairs again"
        if self.fallen and self.level != BAD:
            return f"if {next(iter(self.fallen))} matters, give it a weight in reward_weights, or raise beta"
        if self.level == BAD:
            return "lower learning_rate, and read the largest losses"
        if self.level == MIXED:
            if self.run.verb == "ppo" and not self.has_held_out:
                return HOLD_OUT
            return (
                "read the samples; raise learning_rate or num_rollouts, or use a reward that tells completions apart"
            )
        folder = self.run.results.get("model") if self.run.verb == "eval" else self.run.folder
        is_adapter = self.run.verb == "ppo" or "reference" in self.run.results
        return f"onetrunk chat {folder}" + " --compare" * is_adapter


def verdict_of(run: Run) -> Verdict | None:
    """Return the verdict on a stage or a pipeline; None where nothing is known."""
    if run.verb == "run":
        return pipeline_verdict(stage_runs(run))
    if run.verb not in TRAINED:
        return groundwork_verdict(run)
    facts = Facts(run, score_change(run), fallen_parts(run), lasting_alarms(run))
    has_facts = facts.score is not None or facts.lasting or contest_clauses(run) or not facts.is_over
    return Verdict(facts.level, facts.findings, facts.advice) if has_facts else None


def groundwork_verdict(run: Run) -> Verdict | None:
    """Return the verdict on what PPO builds on: preference rows, a reward model, its student, a fine-tuned model."""
    match run.results:
        case {"fidelity": {"agreement_interval": [None, *_]}} | {"held_out": {"accuracy_interval": [None, *_]}}:
            return Verdict(MIXED, ["too few held-out pairs are decided for a verdict"], "hold out more pairs")
        case {"about": {"mode": "revise"}, "counts": {"completions": made, "blank_completions": blank, **rest}}:
            cut = rest.get("cut_revisions", 0)
            found = [f"{made - blank:,} of {made:,} completions are revised"]
            found += [f"{cut:,} revisions are cut off, and sft would learn to end there"] if cut else []
            advice = f"read some, then onetrunk sft --dataset_name {run.folder}"
            advice = "raise max_completion_length" if cut > made / 10 else advice
            return Verdict(MIXED if blank or cut else GOOD, found, advice)
        case {"counts": {"labelled": labelled, "pairs": pairs}}:
            doubts = statistics_warnings(run.results)
            level = BAD if not labelled else MIXED if doubts else GOOD
            advice = f"onetrunk reward --dataset_name {run.folder}"
            if run.results["counts"].get("unjudged"):
                advice = "the same command asks the judge for the missing pairs again"
            elif not labelled:
                advice = "take another judge, or another constitution"
            return Verdict(level, [f"{labelled:,} of {pairs:,} pairs are labelled", *doubts], advice)
        case {"fidelity": {"agreement": agreement, "agreement_interval": interval}}:
            level = BAD if interval[0] <= 0.5 else GOOD if agreement >= FAITHFUL else MIXED
            found = f"the student orders {_percent(agreement, interval)} of the held-out pairs as its teacher does"
            more = "train longer, with more rows, or take a larger student"
            return Verdict(level, [found], f"onetrunk ppo --reward_funcs {run.folder}" if level == GOOD else more)
        case {"held_out": {"accuracy": accuracy, "accuracy_interval": interval, **rest}}:
            found = [f"it orders {_percent(accuracy, interval)} of the held-out pairs as they are labelled"]
            bound = rest.get("length/score_correlation") or 0.0
            if abs(bound) >= LENGTH_BOUND:
                found.append(f"its scores follow the length (correlation {bound:+.2f})")
            if interval[0] <= 0.5:
                return Verdict(BAD, found, "read the pairs; change learning_rate, or train longer")
            if len(found) > 1:
                return Verdict(MIXED, found, "balance the lengths of the pairs")
            return Verdict(GOOD, found, f"onetrunk distill --teacher {run.folder}, or ppo with it in reward_funcs")
    return loss_verdict(run)


def loss_verdict(run: Run) -> Verdict | None:
    """Return the verdict on supervised fine-tuning; None without two logged losses."""
    _, losses = run.series("loss")
    if len(losses) < 2 or run.verb != "sft":
        return None
    # The first values fall too steeply to say how noisy the others are.
    change = Change.along(losses, "logged values", noisy=slice(1, None))
    found = [f"the training loss {change}"]
    held_out = run.results.get("eval_loss")
    found += [] if held_out is None else [f"the held-out loss is {held_out:.3g}"]
    if change.sign > 0:
        return Verdict(BAD, found, "lower learning_rate, and look at the rows")
    if not change.sign:
        return Verdict(MIXED, found, "train longer, or lower logging_steps, so that more losses are compared")
    if held_out is not None and held_out > BY_HEART * losses[-1]:
        return Verdict(MIXED, [*found, "it overfits"], "fewer epochs, or more rows")
    return Verdict(GOOD, found, f"onetrunk chat {run.folder}")


def pipeline_verdict(stages: dict[str, Run]) -> Verdict | None:
    """Return the verdict on a chain: that of its last evaluation, or else of PPO, and no better than the worst one."""
    verdicts = {name: verdict for name, run in stages.items() if (verdict := verdict_of(run)) is not None}
    if not verdicts:
        return None
    # An evaluation has prompts that no stage was trained on.
    order = {verb: place for place, verb in enumerate(TRAINED, 1)}
    chosen = max(verdicts, key=lambda name: (order.get(stages[name].verb, 0), list(verdicts).index(name)))
    worst = max(verdicts.values(), key=lambda verdict: LEVELS.index(verdict.level))
    final = verdicts[chosen]
    doubts = [f"{name}: {'; '.join(v.findings)}" for name, v in verdicts.items() if v.level != GOOD and name != chosen]
    return Verdict(worst.level, [*final.findings, *doubts], (final if final.level == worst.level else worst).advice)


def score_change(run: Run) -> Change | None:
    """Return how the score changed: over the same prompts, or between the means, or over the training rollouts."""
    pairs = _scored_pairs(run, "score")
    if pairs:
        return Change.of(*pairs)
    sides = _sides(run)
    means = [side.get("score/mean") for side in sides]
    if None in means:
        means = run.series("score/mean")[1]
        return Change.along(means, "rollouts") if len(means) > 1 else None
    num_prompts = run.results.get("num_prompts") or 0
    spread = [side.get("score/std") for side in sides]
    half = math.nan
    if num_prompts and None not in spread:
        half = quantile(num_prompts - 1) * math.hypot(*spread) / math.sqrt(num_prompts)
    gain = means[1] - means[0]
    return Change(*means, gain - half, gain + half, num_prompts)


def fallen_parts(run: Run) -> dict[str, Change]:
    """Return which of several reward functions fell beyond their noise, by name."""
    names = dict.fromkeys(name for row in run.after for name in row if name.startswith("score/"))
    if len(names) == 1:  # It is the score itself.
        return {}
    changes = {name.removeprefix("score/"): Change.of(*pairs) for name in names if (pairs := _scored_pairs(run, name))}
    return {name: change for name, change in changes.items() if change.sign < 0}


def contest_clauses(run: Run) -> list[str]:
    """Return who won the comparison of an evaluation, and how many pairs have no verdict."""
    rate = run.results.get("win_rate")
    if not isinstance(rate, dict) or rate.get("discrete_win_rate") is None:
        return []
    won = f"it wins {_percent(rate['discrete_win_rate'], _win_interval(run))} of the pairs"
    clauses = [f"{won} against {rate.get('opponent')} by the judge {rate.get('judge')}"]
    if _unjudged(run):
        clauses.append(f"{_unjudged(run)} pairs have no verdict, because the judge did not answer")
    return clauses


def cost_text(run: Run) -> str:
    """Return what the change cost: the KL, and how long completions were and are."""
    before, after = _sides(run)
    if not after:
        _, kls = run.series("kl/ref")
        return f", at a KL of {kls[-1]:.1f} nats" if kls else ""
    kl = f", at a KL of {after['kl/ref']:.1f} nats" if after.get("kl/ref") is not None else ""
    lengths = [side.get("completion/length") for side in (before, after)]
    return kl if None in lengths else f"{kl}, {lengths[0]:.0f} tokens per completion before and {lengths[1]:.0f} after"


def lasting_alarms(run: Run) -> list[str]:
    """Return the alarms that ended the run or lasted until its end, the worst first."""

    def lasts(name: str) -> bool:
        if name == MONITOR:  # Its alarm ends where the judge falls no further; what it has lost stays lost.
            return fallen_judge(run) is not None
        _, values = run.series(f"alarm/{name}")
        return bool(values) and values[-1] > 0

    return list(dict.fromkeys(alarm.name for alarm in run.alarms() if alarm.ended_run or lasts(alarm.name)))


def fallen_judge(run: Run) -> str | None:
    """Return how far the monitor's judge is below where it began, in words; None if it is not."""
    _, scores = run.series("judge/score")
    change = Change.along(scores, "measurements") if len(scores) > 1 else None
    return f"the judge that PPO does not see {change}" if change is not None and change.sign < 0 else None


def _sides(run: Run) -> list[dict[str, float]]:
    """Return the metrics of the model that the policy is compared with, and of the policy; {} if there are none."""
    before = "opponent" if "opponent" in run.results else "reference"
    return [run.results.get(side) or {} for side in (before, "policy")]


def _scored_pairs(run: Run, key: str) -> tuple[list[float], list[float]] | None:
    """Return the scores under a key of the prompts that have one before and after; None if there are none."""
    sides = [[row.get(key) for row in pair] for pair in pairs_of(run)]
    known = [side for side in sides if all(isinstance(value, (int, float)) for value in side)]
    return tuple(map(list, zip(*known, strict=True))) if known else None  # type: ignore[return-value]


def _win_interval(run: Run) -> tuple[float, float]:
    rate = run.results.get("win_rate")
    known = rate.get("discrete_win_rate_interval") if isinstance(rate, dict) else None
    return tuple(known) if known and None not in known else (0.0, 1.0)


def _percent(value: float, interval: Sequence[float]) -> str:
    return f"{value:.1%} ({interval[0]:.1%} to {interval[1]:.1%})"


def _unjudged(run: Run) -> int:
    rate = run.results.get("win_rate")
    return (rate.get("unjudged") or 0) if isinstance(rate, dict) else 0
