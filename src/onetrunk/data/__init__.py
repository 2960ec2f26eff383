"""Rows: prompts and preferences from files or the Hub, checked and put through chat templates."""
