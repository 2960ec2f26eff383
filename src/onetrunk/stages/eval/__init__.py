"""The stage `onetrunk eval`: held-out prompts, scores, and win rates."""

from onetrunk.stages.eval.stage import main

__all__ = ["main"]
