"""Trainyard: from raw text to a model served by llama.cpp on one workstation, every step proved."""

__version__ = "0.1.0"
