"""Plans of rows: nothing cut, nothing lost, little padding, and what shares a row does not see each other."""

import numpy as np
import pytest

from training.data.packing import alone, plan


def drawn(count: int, seq_len: int, seed: int = 0) -> np.ndarray:
    lengths = np.random.default_rng(seed).lognormal(np.log(seq_len / 8), 0.8, count)
    return np.clip(lengths.astype(int), 1, seq_len)


def sums(packs, lengths: np.ndarray) -> list[int]:
    return [int(lengths[packs.row(number)].sum()) for number in range(packs.num_rows)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("count", "seq_len"), [(1, 4), (7, 8), (300, 64), (3000, 512)])
def test_every_sample_lies_whole_in_one_row(count, seq_len, seed):
    """B29: tokens in are tokens in rows."""
    lengths = drawn(count, seq_len, seed)
    packs = plan(lengths, seq_len, seed)
    assert sorted(packs.samples.tolist()) == list(range(count))
    assert max(sums(packs, lengths)) <= seq_len and min(sums(packs, lengths)) > 0
    assert sum(sums(packs, lengths)) == packs.num_tokens == lengths.sum()
    assert packs.padding_share == pytest.approx(1 - lengths.sum() / (packs.num_rows * seq_len))


def test_by_hand():
    packs = plan([3, 5, 2, 6, 8, 4], 8, seed=7)
    rows = sorted(sorted(packs.row(number).tolist()) for number in range(packs.num_rows))
    assert rows == [[0, 1], [2, 3], [4], [5]] and packs.padding_share == 4 / 32


def test_there_are_no_more_rows_than_best_fit_decreasing_needs():
    lengths = drawn(3000, 512)
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [(room, number) for number, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting)[1]] -= length
        else:
            rooms.append(512 - length)
    packs = plan(lengths, 512, seed=7)
    assert packs.num_rows <= len(rooms) + 1 and packs.padding_share < 0.02


def test_the_plan_is_of_seed_and_epoch():
    lengths = drawn(500, 64)
    same, again = plan(lengths, 64, 7, 1), plan(lengths, 64, 7, 1)
    assert np.array_equal(same.samples, again.samples) and np.array_equal(same.starts, again.starts)
    others = [plan(lengths, 64, 7, 2), plan(lengths, 64, 8, 1)]
    assert not any(np.array_equal(same.samples, other.samples) for other in others)
    met = [{tuple(sorted(packs.row(n).tolist())) for n in range(packs.num_rows)} for packs in (same, *others)]
    assert len(met[0] & met[1]) < len(met[0]) / 2, "other samples meet in another epoch"


@pytest.mark.parametrize("lengths", [[3, 9], [0, 3]])
def test_what_does_not_fit_is_no_plan(lengths):
    with pytest.raises(ValueError, match="do not fit"):
        plan(lengths, 8, seed=7)


def test_one_sample_a_row():
    packs = alone([3, 4], 10)
    assert [packs.row(number).tolist() for number in range(packs.num_rows)] == [[0], [1]]
    assert packs.num_tokens == 7 and packs.padding_share == pytest.approx(1 - 7 / 20)


def test_nothing_makes_no_rows():
    packs = plan([], 8, seed=7)
    assert packs.num_rows == 0 and packs.padding_share == 0.0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_what_shares_a_row_does_not_see_each_other(attention):
    """B28: B's logits are those of B alone, whatever A is, when positions restart; also with padding behind."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, attn_implementation=attention, **shape)
    model = LlamaForCausalLM(config).eval()

    def logits(*documents: list[int], padding: int = 0) -> torch.Tensor:
        ids = [one for document in documents for one in document] + [0] * padding
        positions = [place for document in documents for place in range(len(document))] + list(range(padding))
        rows = [torch.tensor([values, values]) for values in (ids, positions)]  # two rows of a batch
        with torch.inference_mode():
            return model(input_ids=rows[0], position_ids=rows[1], use_cache=False).logits[0]

    alone = logits([21, 22, 23, 24])
    for first in ([11, 12, 13], [14, 15, 16]):
        packed = logits(first, [21, 22, 23, 24], padding=3)
        assert (packed[3:7] - alone).abs().max() < 1e-4
    assert (logits([11, 12, 13, 21, 22, 23, 24])[3:] - alone).abs().max() > 1e-3, "seen, they would differ"
