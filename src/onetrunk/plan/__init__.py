"""What a PPO run needs before it is paid for: memory, time, cost, and the best parallel plan for each phase.

Arithmetic on the numbers of a config.json; neither torch nor transformers is imported.
"""
