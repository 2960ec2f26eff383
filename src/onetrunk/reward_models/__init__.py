"""Training of reward models: on preferences, or distilled from a teacher."""
