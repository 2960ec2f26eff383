"""Faster or smaller ways to run the trunk that change no result."""
