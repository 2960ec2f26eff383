"""The stage `onetrunk prefs`: prompts -> completions -> a judge -> preference rows."""

from onetrunk.stages.prefs.stage import main, parse_prefs

__all__ = ["main", "parse_prefs"]
