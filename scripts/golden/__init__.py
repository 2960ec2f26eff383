"""The parts of golden.py."""
