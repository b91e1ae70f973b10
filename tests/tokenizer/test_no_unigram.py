"""Why a Unigram tokenizer is refused: the converter of the pin takes its tokenizer.json for BPE and stops."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REAL_CACHE
from training.core.errors import IntegrityError
from training.llamacpp import source
from training.tokenizer import artifact


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A decoder's folder with a Unigram tokenizer.json, as the library trains one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.Unigram())
    library.pre_tokenizer, library.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    library.train_from_iterator([Path(json.__file__).read_text()] * 3, trainer)
    library.save(str(tmp_path / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    sizes = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4) | {
        "hidden_size": 64,
        "num_hidden_layers": 1,
    }
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": library.get_vocab_size(),
        "intermediate_size": 128, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, **sizes,
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **roles}))
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_it_is_refused_by_name(folder: Path):
    with pytest.raises(IntegrityError, match="is none that llama") as caught:
        artifact.of_folder(folder)
    assert "Metaspace" in caught.value.found


@pytest.mark.slow
def test_the_converter_of_the_pin_takes_it_for_bpe_and_stops(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The day this fails, a Unigram tokenizer can be exported, and docs/tokenizer.md is out of date."""
    monkeypatch.setenv("TRAINYARD_CACHE", str(REAL_CACHE))
    converter = source.require_source() / "convert_hf_to_gguf.py"
    command = [sys.executable, str(converter), str(folder), "--vocab-only", "--outfile", str(folder / "out.gguf")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and not (folder / "out.gguf").exists()
    assert "BPE pre-tokenizer was not recognized" in done.stderr
