"""Rows of records with answers: labels, padding by length, packing without sight of a neighbour, the plain loss."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.objectives.test_stream import VOCAB, tiny_llama
from training.objectives.contract import measure
from training.objectives.records import RecordRows


@dataclasses.dataclass
class Split:
    """The part of a TokenSplit that an objective reads."""

    tokens: np.ndarray
    offsets: np.ndarray
    trained: np.ndarray

    @property
    def records(self) -> np.ndarray:
        return np.arange(len(self.offsets) - 1) * 10  # nine of ten were left out


def rows_of(records: list[list[int]], trained: list[list[int]], **settings) -> RecordRows:
    offsets = np.cumsum([0, *map(len, records)]).astype(np.uint64)
    split = Split(np.concatenate(records).astype(np.uint16), offsets, np.concatenate(trained).astype(np.uint8))
    return RecordRows(split, np.ones(VOCAB, np.int64), **{"seq_len": 32, **settings})


def labels_BT(rows: RecordRows, chosen: list[int]) -> list[list[int]]:
    """What each position of a batch is to predict; -100 for nothing."""
    tensors = rows.batch(np.array(chosen)).tensors
    flat = torch.full((tensors["input_ids_BT"].numel(),), -100)
    flat[tensors["trained_N"]] = tensors["labels_N"]
    return flat.view(tensors["input_ids_BT"].shape).tolist()


def test_padding_is_known_by_length_and_an_end_that_looks_like_it_is_trained():
    """B22: pad id = end id = 2; one trained end a row, and no label on padding."""
    rows = rows_of([[1, 5, 6, 2], [1, 7, 2]], [[0, 1, 1, 1], [0, 1, 1]], pad_id=2)
    assert labels_BT(rows, [0, 1]) == [[5, 6, 2], [7, 2, -100]]
    assert rows.batch(np.array([0, 1])).tensors["input_ids_BT"].tolist() == [[1, 5, 6], [1, 7, 2]]
    assert rows.batch(np.array([1])).tensors["input_ids_BT"].shape == (1, 2)  # the longest of a batch decides


def test_a_padded_row_is_what_it_is_alone():
    """B22: what stands behind a record changes nothing of it, with no mask at all."""
    model = tiny_llama()
    records, trained = [[3, 4, 5, 6, 7, 8, 9], [10, 11, 12]], [[0, 0, 1, 1, 1, 1, 1], [0, 1, 1]]
    rows = rows_of(records, trained)
    both = measure(model, rows, np.array([0, 1]), 2)
    alone = [measure(model, rows, np.array([row]), 1) for row in (0, 1)]
    assert both.nats == pytest.approx(sum(score.nats for score in alone), abs=1e-5)
    other = rows_of([records[0], [10, 11, 13]], trained)  # only the label differs
    assert measure(model, other, np.array([1]), 1).num_tokens == 2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_records_do_not_see_each_other(attention: str):
    """B28: the loss of B is the same alone, behind A, and behind another A; 5 labels, none of them a first token."""
    model = tiny_llama()
    model.set_attn_implementation(attention)
    b, all_trained = [21, 22, 23, 24], [[1, 1, 1], [1, 1, 1, 1]]
    alone = measure(model, rows_of([b], all_trained[1:]), np.array([0]), 1)
    for a in ([11, 12, 13], [14, 15, 16]):
        packed = rows_of([a, b], all_trained, packs=True, seq_len=16)
        assert packed.num_rows == 1
        score = measure(model, packed, np.array([0]), 1)
        first = measure(model, rows_of([a], all_trained[:1]), np.array([0]), 1)
        assert score.num_tokens == 5 and score.nats - first.nats == pytest.approx(alone.nats, abs=1e-4)
    positions = packed.batch(np.array([0])).tensors["positions_BT"][0].tolist()
    assert positions == [0, 1, 2, 0, 1]  # the longer one first; a last token is no input


def test_packed_rows_of_unequal_length_are_what_they_are_alone():
    model = tiny_llama()
    generator = np.random.default_rng(3)
    records = [generator.integers(3, VOCAB, size).tolist() for size in (9, 2, 5, 7, 3, 3, 8)]
    trained = [[0] + [1] * (len(record) - 1) for record in records]
    plain = rows_of(records, trained)
    packed = rows_of(records, trained, packs=True, seq_len=11)
    assert packed.num_rows < len(records) and sorted(packed.packs.samples) == list(range(len(records)))
    wanted = measure(model, plain, np.arange(plain.num_rows), 1)
    for micro_batch in (1, 2, packed.num_rows):
        found = measure(model, packed, np.arange(packed.num_rows), micro_batch)
        assert found.num_tokens == wanted.num_tokens and found.nats == pytest.approx(wanted.nats, abs=1e-4)


def test_the_loss_is_that_of_the_model_itself():
    """Value and gradient of the plain loss, to 1e-5: labels -100 where nothing is trained, a mask over padding."""
    records = [[3, 4, 5, 6, 7, 8, 9], [10, 11, 12]]
    trained = [[0, 0, 1, 0, 1, 1, 1], [0, 1, 1]]
    gradients = []
    for chunk in (0, 2):
        model = tiny_llama()
        rows = rows_of(records, trained, loss_chunk=chunk)
        batch = rows.batch(np.array([0, 1]))
        nats = rows.loss(model, batch.tensors) / batch.num_tokens
        nats.backward()
        gradients.append((nats.item(), [parameter.grad for parameter in model.parameters()]))
    model = tiny_llama()
    ids = torch.tensor([records[0], records[1] + [0] * 4])
    mask = torch.tensor([[1] * 7, [1] * 3 + [0] * 4])
    labels = torch.where(torch.tensor([trained[0], trained[1] + [0] * 4]) == 1, ids, -100)
    plain = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    plain.backward()
    for value, grads in gradients:
        assert value == pytest.approx(plain.item(), abs=1e-5)
        for mine, theirs in zip(grads, model.parameters(), strict=True):
            assert torch.allclose(mine, theirs.grad, atol=1e-5)


def test_a_batch_without_a_label_has_a_loss_of_zero_and_no_nan():
    """B19."""
    rows = rows_of([[3, 4, 5]], [[1, 0, 0]])
    batch = rows.batch(np.array([0]))
    model = tiny_llama()
    nats = rows.loss(model, batch.tensors)
    nats.backward()
    assert batch.num_tokens == 0 and nats.item() == 0.0
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None)


# ---- models whose logits are more than their head gives


def _gemma() -> torch.nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, final_logit_softcapping=0.05, attn_implementation="eager",
        )
    )  # fmt: skip


def _granite() -> torch.nn.Module:
    from transformers import GraniteConfig, GraniteForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return GraniteForCausalLM(GraniteConfig(vocab_size=VOCAB, num_key_value_heads=1, logits_scaling=8.0, **sizes))


def _odd() -> torch.nn.Module:
    model = tiny_llama()
    own = type(model).forward

    class Odd(type(model)):
        def forward(self, *args, **kwargs):
            output = own(self, *args, **kwargs)
            output.logits = output.logits * 3 + 1
            return output

    model.__class__ = Odd
    return model


@pytest.mark.parametrize(("make", "whole"), [(_gemma, False), (_granite, False), (_odd, True)])
def test_a_soft_cap_a_scale_and_anything_else_of_a_model_counts(make, whole: bool):
    """R15: the head alone where that is all there is; else the model's own logits."""
    from training.objectives import base
    from training.objectives.loss import WHOLE_LOGITS

    torch.manual_seed(0)
    model = make().eval()
    base.look(model, packs=False)
    assert getattr(model, WHOLE_LOGITS, False) == whole
    record = [3, 4, 5, 6, 7]
    score = measure(model, rows_of([record], [[0, 1, 1, 1, 1]]), np.array([0]), 1)
    ids = torch.tensor([record])
    logits = model(input_ids=ids).logits[0, :-1].float()
    plain = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
    assert score.nats == pytest.approx(plain.item(), abs=1e-4)


@pytest.mark.parametrize("packs", [False, True])
def test_rows_know_their_lengths_and_their_lines(packs: bool):
    """The lengths are those of a batch's rows without padding; of a packed row every record's line is told."""
    records = [[1, 5, 6, 2], [1, 7, 2], [1, 8, 9, 10, 2]]
    rows = rows_of(records, [[0] + [1] * (len(record) - 1) for record in records], packs=packs, seq_len=8)
    lines = [rows.lines(np.array([row])) for row in range(rows.num_rows)]
    assert sorted(line for own in lines for line in own) == [1, 11, 21]
    for row, own in enumerate(lines):
        assert rows.lengths[row] == sum(len(records[line // 10]) - 1 for line in own)
        assert rows.batch(np.array([row])).tensors["input_ids_BT"].shape[1] == rows.lengths[row]
