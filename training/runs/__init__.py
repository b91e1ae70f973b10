"""The run folder: its record, its events, its checkpoints' pointers, and what is seen of it. It knows no torch and trains
nothing."""
