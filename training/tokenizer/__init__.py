"""Byte-level BPE that llama.cpp can read: training, the artifact, and the pre-tokenizers that both sides know."""
