"""The caching allocator against a slow one that is written from its rules alone, on random requests and on steps."""

import random

import pytest

from training.calculator import loading, replay
from training.calculator.allocator import CachingAllocator
from training.calculator.plan import Plan

KIB, MIB = 1 << 10, 1 << 20


class Slow:
    """Segments as lists of [size, asked, age]; every free piece is looked at, every time. Asked 0 is free."""

    def __init__(self, expands: bool = False):
        self.expands = expands
        self.segments: list[tuple[bool, list[list[int]]]] = []
        self.age = self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0

    def aged(self, size: int, asked: int = 0) -> list[int]:
        self.age += 1
        return [size, asked, self.age]

    def new(self, num_bytes: int) -> list[int] | None:
        if num_bytes <= 0:
            return None
        size = max(512, -(-num_bytes // 512) * 512)
        is_small = size <= MIB
        pool = [pieces for small, pieces in self.segments if small == is_small]
        free = [(p[0], p[2], p, pieces) for pieces in pool for p in pieces if not p[1] and p[0] >= size]
        if free:
            _, _, piece, pieces = min(free, key=lambda one: one[:2])
        elif self.expands:
            piece, pieces = self.grown(size, is_small)
        else:
            whole = 2 * MIB if is_small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            piece = self.aged(whole)
            pieces = [piece]
            self.segments.append((is_small, pieces))
            self.reserved_bytes += whole
        rest = piece[0] - size
        if rest >= 512 if is_small or self.expands else rest > MIB:
            pieces.insert(pieces.index(piece) + 1, self.aged(rest))
            piece[0] = size
        piece[1] = num_bytes
        self.allocated_bytes += piece[0]
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return piece

    def grown(self, size: int, is_small: bool) -> tuple[list[int], list]:
        """Pages at the end of the pool's one segment, joined with its last piece where that is free."""
        pieces = next((pieces for small, pieces in self.segments if small == is_small), None)
        if pieces is None:
            self.segments.append((is_small, pieces := []))
        page, last = 2 * MIB if is_small else 20 * MIB, pieces[-1] if pieces and not pieces[-1][1] else None
        pages = -(-(size - (last[0] if last else 0)) // page) * page
        self.reserved_bytes += pages
        if last is None:
            pieces.append(last := self.aged(0))
        else:
            self.age += 1
        last[0] += pages
        return last, pieces

    def free(self, piece: list[int] | None) -> None:
        if piece is None:
            return
        self.allocated_bytes -= piece[0]
        piece[1] = 0
        pieces = next(pieces for _, pieces in self.segments if any(one is piece for one in pieces))
        place = next(at for at, one in enumerate(pieces) if one is piece)
        for other in (place + 1, place - 1):
            if 0 <= other < len(pieces) and not pieces[other][1]:
                piece[0] += pieces[other][0]
                pieces[other][0] = 0
        pieces[:] = [one for one in pieces if one[0]]

    @property
    def counts(self) -> tuple[int, ...]:
        return counts(self)


def counts(allocator: CachingAllocator | Slow) -> tuple[int, ...]:
    return (
        allocator.allocated_bytes, allocator.reserved_bytes,
        allocator.peak_allocated_bytes, allocator.peak_reserved_bytes,
    )  # fmt: skip


@pytest.mark.parametrize("expands", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_random_requests_end_as_in_the_slow_allocator(seed, expands):
    choose = random.Random(seed)
    quick, slow, held = CachingAllocator(expands=expands), Slow(expands), []
    sizes = [1, 512, 700, 40 * KIB, 300 * KIB, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 11 * MIB, 37 * MIB]
    for _ in range(1500):
        if held and choose.random() < 0.48:
            one, other = held.pop(choose.randrange(len(held)))
            quick.free(one)
            slow.free(other)
        else:
            size = choose.choice(sizes) + choose.choice((0, 0, 1, 5000))
            held.append((quick.new(size), slow.new(size)))
        assert counts(quick) == slow.counts
    assert quick.asked_bytes == sum(other[1] for _, other in held)


RECIPES = (
    [], ["memory.gradient_checkpointing=false", "memory.attention=eager"],
    ["memory.weights=bf16", "optimizer.impl=foreach", "batch.accumulate=2", "model.arch.hidden_size=512"],
)  # fmt: skip


@pytest.mark.parametrize("overrides", RECIPES, ids=" ".join)
def test_a_replay_ends_as_in_the_slow_allocator(recipe, overrides):
    _compare(Plan.of(recipe(*overrides)))


@pytest.mark.parametrize("weights", ["nf4", "bf16"])
def test_a_replay_of_adapters_ends_as_in_the_slow_allocator(recipe, weights):
    method = "qlora" if weights == "nf4" else "lora"
    overrides = (f"memory.weights={weights}", "memory.profile=hf", "batch.accumulate=2", "data.seq_len=300")
    _compare(Plan.of(recipe(*overrides, base="smollm2-135m-instruct", method=method)))


def _compare(plan: Plan) -> None:
    """The whole replay, on the loaded model that is kept and on one that is loaded again."""
    slow = Slow()
    loading.load(slow, plan)
    kept = loading.loaded(plan)
    assert counts(kept) == slow.counts
    steps = [replay.Step(plan, slow), replay.Step(plan, kept)]
    for _ in range(2):
        for step in steps:
            step.run()
        assert counts(kept) == slow.counts
    found = replay.replay(plan)
    assert (found.allocated_bytes, found.reserved_bytes) == slow.counts[2:]
    assert replay.replay(plan) == found


def test_a_kept_model_is_that_of_its_own_settings(recipe):
    """Shape, type and rank decide what is loaded; nothing of one recipe shows in another."""
    sizes = [
        loading.loaded(Plan.of(recipe(*changes))).asked_bytes
        for changes in ([], ["memory.weights=bf16"], ["model.arch.num_hidden_layers=5"], [])
    ]
    assert sizes[0] == 2 * sizes[1] == sizes[3] == 4 * Plan.of(recipe()).shape.parameters
    assert sizes[2] > sizes[0]
