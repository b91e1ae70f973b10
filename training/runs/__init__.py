"""The run folder: its record, its events, its checkpoints' pointers, and what is seen of it. It trains nothing."""
