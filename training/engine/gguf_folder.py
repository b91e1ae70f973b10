"""A GGUF file turned into a Hugging Face folder: numbers unpacked to float32 by transformers, the tokenizer made whole.

Owns what transformers leaves out of a GGUF's tokenizer: the pre-tokenizer by llama.cpp's name, and whether BOS is
added.
"""

import contextlib
import io
from pathlib import Path

from training.core import files
from training.core.errors import UserError
from training.tokenizer import artifact, pretokenizers

_WEIGHTS = "model.safetensors"


def convert(gguf: Path, folder: Path) -> None:
    """Write weights, configuration and tokenizer of a GGUF into a folder. Raises UserError for one not understood."""
    with contextlib.redirect_stderr(io.StringIO()):  # a bar that no setting of transformers turns off
        _write_tokenizer(gguf, folder)
        _write_model(gguf, folder)


def _write_model(gguf: Path, folder: Path) -> None:
    import torch
    import transformers
    from safetensors.torch import save_file

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
    )
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        for name in model._tied_weights_keys or ():
            weights.pop(name, None)
    save_file(weights, folder / _WEIGHTS, {"format": "pt"})
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    for name in ("quantization_config", "_name_or_path"):
        config.pop(name, None)
    files.write_json(folder / "config.json", config)
    files.write_json(folder / "generation_config.json", model.generation_config.to_diff_dict())


def _write_tokenizer(gguf: Path, folder: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    tokenizer.save_pretrained(folder)
    facts = _facts(gguf)
    name = facts.get("tokenizer.ggml.pre", "gpt-2")
    if name not in pretokenizers.CONFIGURATIONS:
        raise UserError(
            "the file's pre-tokenizer is not known here", where=gguf, found=name,
            expected=", ".join(pretokenizers.CONFIGURATIONS),
        )  # fmt: skip
    content = files.read_json(folder / artifact.TOKENIZER)
    content |= {"pre_tokenizer": pretokenizers.CONFIGURATIONS[name], "normalizer": None, "post_processor": None}
    content["model"]["ignore_merges"] = pretokenizers.ignores_merges(name)
    files.write_json(folder / artifact.TOKENIZER, content)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {f"{role}_token": getattr(tokenizer, f"{role}_token") for role in ("bos", "eos", "pad", "unk")}
    config |= {"add_bos_token": bool(facts.get("tokenizer.ggml.add_bos_token")), "add_eos_token": False}
    files.write_json(folder / artifact.CONFIG, config)


def _facts(gguf: Path) -> dict[str, object]:
    from gguf import GGUFReader

    wanted = ("tokenizer.ggml.pre", "tokenizer.ggml.add_bos_token")
    fields = GGUFReader(gguf).fields
    return {name: fields[name].contents() for name in wanted if name in fields}
