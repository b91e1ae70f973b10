"""Packing: every record once, none cut, few rows, the same plan every time."""

import numpy as np
import pytest

from training.data import packing


@pytest.mark.parametrize("seed", range(5))
def test_every_record_is_in_one_row_and_no_row_is_too_long(seed: int):
    """B29: input = packed, as numbers."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 65, 500)
    packs = packing.plan(lengths, 64)
    assert sorted(packs.records) == list(range(500)) and packs.num_tokens == lengths.sum()
    sums = [lengths[packs.row(row)].sum() for row in range(packs.num_rows)]
    assert max(sums) <= 64 and sum(sums) == lengths.sum()
    fewest = -(-lengths.sum() // 64)
    assert fewest <= packs.num_rows <= 11 / 9 * fewest + 1
    again = packing.plan(lengths, 64)
    assert (again.records == packs.records).all() and (again.offsets == packs.offsets).all()


def test_the_best_fit_is_taken():
    packs = packing.plan(np.array([6, 5, 4, 3, 2]), 10)
    assert [sorted(packs.row(row).tolist()) for row in range(packs.num_rows)] == [[0, 2], [1, 3, 4]]
    assert packs.padding_share == 0.0


def test_padding_is_told_and_nothing_packs_to_nothing():
    assert packing.plan(np.array([6, 6]), 10).padding_share == pytest.approx(0.4)
    assert packing.plan(np.array([], np.int64), 10).num_rows == 0
    assert packing.alone(np.array([3, 4]), 10).row(1).tolist() == [1]


def test_many_records_are_packed_at_once():
    lengths = np.random.default_rng(0).integers(1, 500, 100_000)
    assert packing.plan(lengths, 1024).padding_share < 0.01
