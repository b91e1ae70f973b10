"""Packing for pretraining: every token once, no document sees another, losses independent of the batch."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from training.objectives.contract import measure
from training.objectives.loss import logits_of, summed_nats
from training.objectives.stream import StreamRows
from training.objectives.trained_rows import HeadWithRows

BOS, EOS, PAD, VOCAB = 0, 1, 2, 32


@dataclasses.dataclass
class Split:
    """The part of a TokenSplit that an objective reads."""

    tokens: np.ndarray
    offsets: np.ndarray

    @property
    def records(self) -> np.ndarray:
        return np.arange(len(self.offsets) - 1)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


def rows_of(documents: list[list[int]], seq_len: int) -> StreamRows:
    stream = np.array([token for document in documents for token in (BOS, *document, EOS)], dtype=np.uint16)
    sizes = np.ones(VOCAB, dtype=np.int32)
    sizes[[BOS, EOS, PAD]] = 0
    offsets = np.cumsum([0, *(len(document) + 2 for document in documents)])
    return StreamRows(Split(stream, offsets), sizes, seq_len=seq_len, pad_id=PAD)


def tiny_llama(seed: int = 0) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("seq_len", [1, 2, 3, 5, 64])
def test_every_token_is_a_label_exactly_once(seq_len: int):
    """B29: documents of 4, 2, 3 and 1 tokens, rows that cut them anywhere."""
    rows = rows_of([[3, 4, 5, 6], [7, 8], [9, 10, 11], [12]], seq_len)
    labels_N = rows.batch(np.arange(rows.num_rows)).tensors["labels_N"]
    assert sorted(labels_N.tolist()) == [EOS] * 4 + list(range(3, 13))


def test_positions_restart_at_each_document_and_bos_is_never_a_label():
    """B28, the trial's labels: 5 within the documents, and one end of text each."""
    rows = rows_of([[11, 12, 13], [21, 22, 23, 24]], 16)
    batch = rows.batch(np.array([0])).tensors
    assert batch["positions_BT"][0, :11].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]
    assert batch["labels_N"].tolist() == [11, 12, 13, EOS, 21, 22, 23, 24, EOS]
    assert batch["trained_N"].tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert batch["input_ids_BT"][0, 11:].tolist() == [PAD] * 5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_document_does_not_see_its_neighbour(attention: str):
    """B28: the loss of B is the same alone, behind A, and behind another A."""
    model = tiny_llama()
    model.set_attn_implementation(attention)
    b = [21, 22, 23, 24]
    alone = measure(model, rows_of([b], 16), np.array([0]), 1)
    behind = [measure(model, rows_of([a, b], 16), np.array([0]), 1) for a in ([11, 12, 13], [14, 15, 16])]
    firsts = [measure(model, rows_of([a], 16), np.array([0]), 1) for a in ([11, 12, 13], [14, 15, 16])]
    for both, first in zip(behind, firsts, strict=True):
        assert both.nats - first.nats == pytest.approx(alone.nats, abs=1e-4)
    assert firsts[0].nats != pytest.approx(firsts[1].nats, abs=1e-4)


def test_the_measured_loss_does_not_depend_on_the_batch():
    """B81: sums over tokens, so that a short last batch counts for what it is."""
    generator = np.random.default_rng(1)
    documents = [generator.integers(3, VOCAB, size=size).tolist() for size in (9, 1, 30, 4, 17)]
    rows = rows_of(documents, 8)
    model = tiny_llama()
    scores = [measure(model, rows, np.arange(rows.num_rows), batch) for batch in (1, 2, 4)]
    assert {score.num_tokens for score in scores} == {9 + 1 + 30 + 4 + 17 + 5}
    assert {score.num_bytes for score in scores} == {9 + 1 + 30 + 4 + 17}
    for score in scores[1:]:
        assert score.loss_nats == pytest.approx(scores[0].loss_nats, abs=1e-6)


def _with_rows(head: torch.nn.Linear) -> HeadWithRows:
    head.requires_grad_(False)
    return HeadWithRows(head, torch.nn.Parameter(torch.randn(2, 16)), VOCAB - 2)


def _capped(head: torch.nn.Linear) -> torch.nn.Module:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(final_logit_softcapping=2.0))
    return logits_of(SimpleNamespace(get_output_embeddings=lambda: head, config=config))


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("kind", ["trained", "frozen", "with trained rows", "capped"])
def test_the_chunked_loss_has_the_value_and_gradient_of_the_whole(chunk: int, kind: str):
    torch.manual_seed(0)
    labels_N = torch.randint(0, VOCAB, (7,))
    found = []
    for size in (0, chunk):
        torch.manual_seed(1)
        head = torch.nn.Linear(16, VOCAB, bias=False)
        hidden_ND = torch.randn(7, 16, requires_grad=True)
        logits = {"with trained rows": _with_rows, "capped": _capped}.get(kind, lambda head: head)(head)
        if kind == "frozen":
            head.requires_grad_(False)
        trained = list(logits.parameters())
        (3 * summed_nats(logits, hidden_ND, (labels_N,), size) / 7).backward()
        with torch.no_grad():
            nats = summed_nats(logits, hidden_ND, (labels_N,), size)
        found.append([nats, hidden_ND.grad, *(one.grad for one in trained if one.requires_grad)])
    assert len(found[0]) == (2 if kind == "frozen" else 3)
    for whole, chunked in zip(*found, strict=True):
        assert torch.allclose(whole, chunked, rtol=1e-5, atol=1e-6)


def test_chunks_keep_fewer_logits_alive():
    """A chunk's graph is walked before the next one's logits are made."""
    head, hidden_ND = torch.nn.Linear(16, VOCAB), torch.randn(64, 16, requires_grad=True)
    labels_N = torch.zeros(64, dtype=torch.long)
    saved: dict[int, int] = {}
    for chunk in (0, 8):
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t):
            summed_nats(head, hidden_ND, (labels_N,), chunk)
        saved[chunk] = max(sizes)
    assert saved[0] >= 64 * VOCAB > saved[8]


@pytest.mark.parametrize("seq_len", [1, 2, 3, 5, 64])
def test_the_lines_of_a_row_are_those_whose_tokens_it_reads(seq_len: int):
    """Tokens and the label behind the row's end; every line is named by some row."""
    documents = [[3, 4, 5, 6], [7, 8], [9, 10, 11], [12]]
    rows = rows_of(documents, seq_len)
    of_token = np.repeat(np.arange(4), [len(document) + 2 for document in documents]) + 1
    for row in range(rows.num_rows):
        wanted = sorted(set(of_token[row * seq_len : (row + 1) * seq_len + 1].tolist()))
        assert rows.lines(np.array([row])) == wanted
    assert rows.lines(np.arange(rows.num_rows)) == [1, 2, 3, 4] and rows.lengths.tolist() == [seq_len] * rows.num_rows
