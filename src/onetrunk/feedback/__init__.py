"""Feedback: prompts in, labelled rows out. Resumable; no answer is paid for twice."""
