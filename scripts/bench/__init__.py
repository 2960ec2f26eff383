"""The parts of scripts/bench.py, and the processes that it starts (those import nothing of this package)."""
