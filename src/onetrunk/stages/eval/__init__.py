"""The stage `onetrunk eval`: held-out prompts, scores, and win rates."""
