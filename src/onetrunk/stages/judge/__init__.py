"""The stage `onetrunk judge`: how well judges agree with people, and what they are biased by."""

from onetrunk.stages.judge.measure import main, parse_judge

__all__ = ["main", "parse_judge"]
