"""A GGUF file turned into a Hugging Face folder: numbers unpacked to float32 by transformers, the tokenizer by us."""

import contextlib
import io
from pathlib import Path

from training.core import files
from training.tokenizer import gguf_vocabulary


def convert(gguf: Path, folder: Path) -> None:
    """Write weights, configuration and tokenizer of a GGUF into a folder. Raises UserError for one not understood."""
    gguf_vocabulary.to_folder(gguf, folder)
    with contextlib.redirect_stderr(io.StringIO()):  # a bar that no setting of transformers turns off
        _write_model(gguf, folder)


def _write_model(gguf: Path, folder: Path) -> None:
    import torch
    import transformers
    from safetensors.torch import save_file

    from training.objectives.trainee import Trainee

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
    )
    whole = Trainee(model)
    weights = {name: tensor.contiguous() for name, tensor in whole.weights().items()}
    save_file(weights, folder / whole.weights_file, {"format": "pt"})
    config = whole.settings()
    config.pop("quantization_config", None)
    files.write_json(folder / whole.settings_file, config)
    files.write_json(folder / "generation_config.json", model.generation_config.to_diff_dict())
