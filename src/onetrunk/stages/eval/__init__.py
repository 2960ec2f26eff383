"""The stage `onetrunk eval`: held-out prompts, scores, and win rates."""

from onetrunk.stages.eval.evaluate import main, parse_eval

__all__ = ["main", "parse_eval"]
