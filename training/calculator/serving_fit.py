"""Will a model fit where it is to be served: its file, the keys and values of its context, and what a batch needs.

Owns the sum and the largest context that it allows. A batch's buffers are counted from above: the logits of every token
of it, and the widest activations. Source: llama.cpp `src/llama-context.cpp`, `graph_reserve`: the worst batch is
reserved at start, `ubatch` tokens with a logit for each.
"""

from dataclasses import dataclass

UBATCH_TOKENS = 512  # llama.cpp's default, and ours
_STEP_TOKENS = 256  # llama.cpp rounds a context up to a multiple
_FLOAT_BYTES = 4
_WIDE_ACTIVATIONS = 6  # a block's gate, up and product, and the copies around them


@dataclass(frozen=True)
class Served:
    """A model's figures as its GGUF header has them."""

    file_bytes: int
    cache_bytes_per_token: int
    vocab_size: int
    inner_size: int
    context_length: int

    def batch_bytes(self, context_tokens: int) -> int:
        """What a batch of `UBATCH_TOKENS` needs at this context of each slot: logits, activations, the mask."""
        floats = self.vocab_size + _WIDE_ACTIVATIONS * self.inner_size + context_tokens
        return UBATCH_TOKENS * floats * _FLOAT_BYTES

    def total_bytes(self, context_tokens: int, slots: int = 1) -> int:
        """All of it, at a context of each slot."""
        return self.file_bytes + slots * context_tokens * self.cache_bytes_per_token + self.batch_bytes(context_tokens)

    def largest_context_tokens(self, memory_bytes: int, slots: int = 1) -> int:
        """The largest context of each slot that fits, a multiple of 256 up to the model's own; 0 where none does."""
        steps = self.context_length // _STEP_TOKENS
        low, high = 0, steps
        while low < high:
            middle = (low + high + 1) // 2
            if self.total_bytes(middle * _STEP_TOKENS, slots) <= memory_bytes:
                low = middle
            else:
                high = middle - 1
        whole = low == steps and self.total_bytes(self.context_length, slots) <= memory_bytes
        return self.context_length if whole else low * _STEP_TOKENS
