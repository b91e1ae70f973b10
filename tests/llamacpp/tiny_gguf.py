"""The tiny GGUF with what export would put beside it: a manifest and a fingerprint."""

from pathlib import Path

from training.core import files
from training.llamacpp.tiny import BOS_ID, SPECIALS, VOCAB_SIZE, byte_letters, parameters, write

__all__ = ["BOS_ID", "SPECIALS", "VOCAB_SIZE", "byte_letters", "parameters", "write"]


def fingerprint(client: object) -> dict:
    """A fingerprint as export takes it, by asking a running server."""
    prompts = [[BOS_ID, *text] for text in (b"one", b"two 22", b"\tthree", b"4 4 4")]
    return {"server": "test", "prompts": [{"ids": ids, "top": client.top_logprobs(ids, 5)} for ids in prompts]}


def write_manifest(path: Path, fingerprint: dict, **changes: object) -> dict:
    """Write the manifest beside a GGUF, as export would."""
    manifest = {
        "schema": 1, "kind": "gguf", "name": path.stem.rsplit("-", 1)[0], "file": path.name,
        **files.file_record(path), "tensor_sha256": "0" * 64, "quant_type": "F16", "architecture": "llama",
        "vocab_size": VOCAB_SIZE, "context_length": 256, "parameters": parameters(), "run": "a-run", "step": 1,
        "weights_sha256": "1" * 64, "base": None, "method": "pretrain",
        "tokenizer": {"name": "tiny", "hash": "2" * 64, "pre_tokenizer": "llama-bpe", "add_bos": True},
        "dataset": None, "recipe_sha256": "3" * 64, "llama_cpp": {"commit": "0c1e57098", "build": 11312},
        "tool": {"version": "0", "commit": None}, "parity": {}, "fingerprint": fingerprint,
    } | changes  # fmt: skip
    files.write_json(path.with_suffix(".manifest.json"), manifest)
    return manifest
