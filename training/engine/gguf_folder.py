"""A GGUF file turned into a Hugging Face folder: numbers unpacked to float32 by transformers, the tokenizer by us."""

import contextlib
import io
from pathlib import Path

from training.core import files
from training.tokenizer import gguf_vocabulary

_WEIGHTS = "model.safetensors"


def convert(gguf: Path, folder: Path) -> None:
    """Write weights, configuration and tokenizer of a GGUF into a folder. Raises UserError for one not understood."""
    gguf_vocabulary.to_folder(gguf, folder)
    with contextlib.redirect_stderr(io.StringIO()):  # a bar that no setting of transformers turns off
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
