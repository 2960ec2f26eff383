"""The stage `onetrunk prefs`: prompts -> completions -> a judge -> preference rows."""

from onetrunk.stages.prefs.stage import main

__all__ = ["main"]
