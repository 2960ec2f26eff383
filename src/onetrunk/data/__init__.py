"""Rows of datasets: prompts, completions and preferences from files or the Hub, checked and tokenized."""
