"""The memory of a model in service, and the largest context that it leaves room for."""

import pytest

from training.calculator.serving_fit import UBATCH_TOKENS, Served

MODEL = Served(
    file_bytes=1 << 30, cache_bytes_per_token=1 << 17, vocab_size=32000, inner_size=8192, context_length=8192
)


def test_the_parts_add_up():
    batch = UBATCH_TOKENS * (32000 + 6 * 8192 + 4096) * 4
    assert MODEL.total_bytes(4096) == (1 << 30) + 4096 * (1 << 17) + batch
    assert MODEL.total_bytes(4096, slots=3) - MODEL.total_bytes(4096) == 2 * 4096 * (1 << 17)


@pytest.mark.parametrize("slots", [1, 4])
def test_the_largest_context_fits_and_the_next_does_not(slots: int):
    memory = MODEL.total_bytes(2048, slots) + 1
    assert MODEL.largest_context_tokens(memory, slots) == 2048
    assert MODEL.largest_context_tokens(MODEL.total_bytes(2048, slots) - 1, slots) == 2048 - 256


def test_ends():
    assert MODEL.largest_context_tokens(1 << 30) == 0
    assert MODEL.largest_context_tokens(1 << 40) == 8192
    odd = Served(1, 1, 1, 1, context_length=300)
    assert odd.largest_context_tokens(1 << 40) == 300 and odd.largest_context_tokens(odd.total_bytes(300) - 1) == 256
