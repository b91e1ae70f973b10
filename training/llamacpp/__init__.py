"""llama.cpp: the pinned source, its converter, and its server as a process with a client."""
