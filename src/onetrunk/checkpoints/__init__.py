"""All that is saved and resumed: checkpoints that are complete or absent, and verified before they are used."""
