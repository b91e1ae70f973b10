"""The trainer: one loop, its schedule, optimizer, checkpoints and stop rules. What a batch is and what its loss is
belongs to `training.objectives`."""
