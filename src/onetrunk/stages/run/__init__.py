"""The stage `onetrunk run`: a pipeline of stages as one resumable chain."""
