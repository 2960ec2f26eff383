"""PPO on one frozen trunk: the trainer, its experience stream, and what watches them."""
