"""Whole stretches of work made of the single commands: the demo's round trip, later a night's round."""
