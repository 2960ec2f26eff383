"""The stage `onetrunk eval`: held-out prompts, scores, and win rates."""

from onetrunk.stages.eval.stage import main, parse_eval

__all__ = ["main", "parse_eval"]
