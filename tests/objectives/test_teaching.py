"""What a teacher said, as `objectives.teaching` writes it, is part of what `data-verify` holds to its hashes."""

from pathlib import Path

import numpy as np

from tests.data.test_supervised import talk
from tests.data.test_tokens import make_dataset, make_tokenizer, texts
from training.cli import main
from training.data import tokens
from training.data.supervision import Settings
from training.objectives import teaching


def test_a_teachers_recording_is_verified_with_the_data_set_that_it_lies_in(tmp_path: Path, capsys):
    tokenizer = make_tokenizer(make_dataset(tmp_path, [{"text": text} for text in texts() if text.strip()]))
    data = make_dataset(tmp_path, [talk(f"question {i}", f"answer {i}") | {"group": str(i)} for i in range(40)])
    split = tokens.open_split(tokens.tokenize(data, tokenizer, Settings("assistant", 80)), "train")
    teacher = teaching.Identity("best", "a" * 64, "huggingface", "float32")
    with teaching.record(split, teacher, 2, tokenizer.vocab_size) as recording:
        for document in range(split.num_documents):
            ids, places = teaching.labels_of(split, document)
            top_NK = np.stack([ids[places], np.zeros_like(ids[places])], axis=1)
            shares_NC = np.log(np.tile([0.5, 0.25, 0.25], (len(places), 1)))
            recording.write([teaching.Said(top_NK, shares_NC, shares_NC[:, 0])])
    folder = teaching.folder_of(split, teacher, 2)
    assert main(["data-verify", str(data.folder)]) == 0
    told = f"1 recording: best@{folder.name} ({split.num_trained_tokens:,} labels, top 2 of each)"
    assert told in capsys.readouterr().err
    said = folder / "train.logprobs.bin"
    changed = bytearray(said.read_bytes())
    changed[0] ^= 1
    said.write_bytes(changed)
    assert main(["data-verify", str(data.folder)]) == 5
    error = capsys.readouterr().err
    assert f"teachers/{folder.name}/train.logprobs.bin: a file's bytes have changed" in error.replace("\n", "")
