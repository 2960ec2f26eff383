"""Verbs around the stages: looking at runs and machines, serving a model, and recipes."""
