"""Judges: given a principle and two completions, how probably is the first one better?"""
