"""The stage `onetrunk prefs`: prompts -> completions -> a judge -> preference rows."""
