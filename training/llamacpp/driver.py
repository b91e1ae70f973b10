"""Runs the pinned converter in a process of its own; started by `training.llamacpp.convert` and by nothing else.

The converter knows a pre-tokenizer by a hash over one text's ids, which no vocabulary trained here can have. So the
name, which our side has checked against the tokenizer's own configuration, is put in the place of that one look-up;
no file of llama.cpp is edited. One process writes several types: the imports cost more than a small conversion.
It dies with the process that started it.
Arguments: PARENT SOURCE MODEL PRE_TOKENIZER NAME TYPE=OUTPUT ...
Source: llama.cpp `conversion/base.py`, `TextModel.get_vocab_base_pre`.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: str, source: str, model: str, pre_tokenizer: str, name: str, *outputs: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the parent died before the conversion started")
    sys.path.insert(0, source)
    import convert_hf_to_gguf
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: pre_tokenizer
    for pair in outputs:
        quant, _, output = pair.partition("=")
        sys.argv = ["convert_hf_to_gguf.py", model, "--outtype", quant.lower(), "--outfile", output]
        sys.argv += ["--model-name", name]
        convert_hf_to_gguf.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
