"""The stage `onetrunk run`: a pipeline of stages as one resumable chain."""

from onetrunk.stages.run.stage import main

__all__ = ["main"]
