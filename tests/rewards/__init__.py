"""Tests of `onetrunk.rewards`."""
