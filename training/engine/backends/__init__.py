"""Whose loop trains a recipe: the contract, this trainer's own, TRL's and Unsloth's, one module each."""
