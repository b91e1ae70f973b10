"""Memory fit: what a recipe's training step will need, before anything is allocated."""
