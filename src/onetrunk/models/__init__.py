"""The trunk and its branches: adapters, value head and reward models, and how they are loaded."""
