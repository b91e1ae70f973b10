"""The run folder: its record, its events and its checkpoints' pointers. It knows no torch and trains nothing."""
