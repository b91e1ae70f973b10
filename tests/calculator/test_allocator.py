"""The caching allocator's rules by hand, and the replay of a step against the formula."""

import itertools

import pytest

from training.calculator.allocator import CachingAllocator
from training.calculator.formula import instants
from training.calculator.plan import Plan
from training.calculator.replay import replay

MIB = 1 << 20


def test_small_requests_share_a_segment_of_2_mib():
    allocator = CachingAllocator()
    blocks = [allocator.new(1) for _ in range(3)]
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (3 * 512, 2 * MIB)
    for block in blocks:
        allocator.free(block)
    assert (allocator.allocated_bytes, allocator.peak_allocated_bytes) == (0, 3 * 512)
    allocator.new(MIB)  # the three have become one with the rest
    assert allocator.reserved_bytes == 2 * MIB


def test_a_rest_of_a_mib_is_not_split_off_and_counts_as_allocated():
    allocator = CachingAllocator()
    allocator.new(11 * MIB)  # a segment of 12
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (12 * MIB, 12 * MIB)
    first, second = allocator.new(9 * MIB), allocator.new(10 * MIB)  # a segment of 20
    assert allocator.reserved_bytes == 32 * MIB and second.size == 11 * MIB
    allocator.free(first)
    allocator.new(2 * MIB)
    assert allocator.reserved_bytes == 32 * MIB and allocator.allocated_bytes == 12 * MIB + 11 * MIB + 2 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken():
    allocator = CachingAllocator()
    large, small = allocator.new(40 * MIB), allocator.new(30 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.new(29 * MIB).size == 30 * MIB and allocator.new(31 * MIB).size == 31 * MIB
    assert allocator.new(0) is None and allocator.reserved_bytes == 70 * MIB


def test_an_expandable_segment_grows_at_its_end_and_splits_every_rest():
    allocator = CachingAllocator(expands=True)
    first = allocator.new(11 * MIB)  # one page of 20, the rest of 9 split off
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (11 * MIB, 20 * MIB)
    second = allocator.new(30 * MIB)  # 21 more than the free end: two pages
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (41 * MIB, 60 * MIB)
    allocator.free(first)
    allocator.free(second)
    allocator.new(60 * MIB)  # all of it is one block again
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (60 * MIB, 60 * MIB)
    allocator.new(512)
    assert allocator.reserved_bytes == 62 * MIB


def test_expandable_segments_reserve_less_for_a_step(recipe):
    fixed, growing = (
        replay(Plan.of(recipe(*SHAPE, "data.seq_len=700", f"memory.expandable_segments={flag}")))
        for flag in ("false", "true")
    )
    assert growing.reserved_bytes < fixed.reserved_bytes
    assert 1 <= growing.ratio < 1.03


SHAPE = (
    "model.arch.vocab_size=32000", "model.arch.hidden_size=1024", "model.arch.intermediate_size=2816",
    "model.arch.num_hidden_layers=6", "model.arch.num_attention_heads=16", "model.arch.max_position_embeddings=2048",
    "data.micro_batch=2",
)  # fmt: skip


@pytest.mark.parametrize("weights", ["bf16", "fp32"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("profile", ["trainyard", "hf"])
def test_the_formula_and_a_walk_through_the_step_agree_within_half_a_percent(recipe, weights, attention, profile):
    """32 recipes of a small shape, every combination: two ways to the same allocated peak."""
    for checkpointing, tied, impl, length, accumulate in itertools.product(
        ("true", "false"), ("true", "false"), ("fused", "foreach"), (256, 1024), (1, 2)
    ):
        changed = recipe(
            *SHAPE, f"memory.weights={weights}", f"memory.attention={attention}", f"memory.profile={profile}",
            f"memory.gradient_checkpointing={checkpointing}", f"model.arch.tie_word_embeddings={tied}",
            f"optimizer.impl={impl}", f"data.seq_len={length}", f"batch.accumulate={accumulate}",
        )  # fmt: skip
        plan = Plan.of(changed)
        walked = replay(plan)
        summed = max(instant.num_bytes for instant in instants(plan, walked))
        assert summed == pytest.approx(walked.allocated_bytes, rel=0.005), (
            checkpointing,
            tied,
            impl,
            length,
            accumulate,
        )
        assert walked.reserved_bytes >= walked.allocated_bytes
