"""What CUDA's kernels allocate where torch's own on a CPU allocate otherwise: stand-ins with tensors of those sizes.

They compute nothing. Sources: aten/src/ATen/native/cuda/SoftMax.cu (softmax_backward_cuda_out), Dropout.cu,
transformers/cuda/attention.cu and attention_backward.cu (memory-efficient attention), and flash-attention's
flash_api.cpp (mha_fwd, mha_bwd).

Legend: B sequences, H heads, S positions, D head dimension. This module imports torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch import nn

_FLASH = "trainyard_flash_attention"
_FLASH_ROWS = 128


class _Softmax(torch.autograd.Function):
    """Reads 16 bits and writes float32 in one kernel; its backward keeps a float32 product beside its answer."""

    @staticmethod
    def forward(ctx, x):
        ctx.dtype = x.dtype
        out = torch.empty(x.shape, dtype=torch.float32)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        product = grad * out
        answer = torch.empty(out.shape, dtype=ctx.dtype)
        del product
        return answer


class _Dropout(torch.autograd.Function):
    """Keeps a mask of one byte an element."""

    @staticmethod
    def forward(ctx, x):
        mask = torch.empty(x.shape, dtype=torch.bool)
        ctx.save_for_backward(mask)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        return torch.empty_like(grad)


class _Attention(torch.autograd.Function):
    """A fused kernel: keeps q, k, v, the mask, the output and a float32 sum a row; no scores exist.

    Its backward sums the queries' gradient in float32 where they have 16 bits; flash attention pads that to 128 rows
    and writes the keys' and values' gradients for every query head before it reduces them.
    """

    @staticmethod
    def forward(ctx, q_BHSD, k_BHSD, v_BHSD, mask, is_flash):
        out_BHSD = torch.empty_like(q_BHSD)  # in the queries' own order in memory (flash_api.cpp)
        sums_BHS = torch.empty(q_BHSD.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q_BHSD, k_BHSD, v_BHSD, mask, out_BHSD, sums_BHS)
        ctx.is_flash = is_flash
        return out_BHSD

    @staticmethod
    def backward(ctx, grad):
        q_BHSD, k_BHSD, v_BHSD, _, _, sums_BHS = ctx.saved_tensors
        rows = -(-q_BHSD.shape[2] // _FLASH_ROWS) * _FLASH_ROWS if ctx.is_flash else q_BHSD.shape[2]
        delta = torch.empty(sums_BHS.shape, dtype=torch.float32)
        answers = [_rows_first(q_BHSD)]
        summed = None
        if q_BHSD.element_size() < 4:
            summed = torch.empty((*q_BHSD.shape[:2], rows, q_BHSD.shape[3]), dtype=torch.float32)
        for part_BHSD in (k_BHSD, v_BHSD):
            whole = None
            if ctx.is_flash and part_BHSD.shape[1] != q_BHSD.shape[1]:
                whole = torch.empty((part_BHSD.shape[0], q_BHSD.shape[1], *part_BHSD.shape[2:]), dtype=q_BHSD.dtype)
            answers.append(_rows_first(part_BHSD))
            del whole
        del delta, summed
        return *answers, None, None


def _rows_first(like_BHSD: torch.Tensor, width: int | None = None) -> torch.Tensor:
    """A new tensor of this shape whose heads lie side by side in memory, as the fused kernels write."""
    B, H, S, D = like_BHSD.shape
    return torch.empty((B, S, H, width or D), dtype=like_BHSD.dtype).transpose(1, 2)


def _sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty(attn_mask.shape, dtype=query.dtype)  # it is added to the scores
    return _Attention.apply(query, key, value, attn_mask, False)


def _flash(module, query, key, value, attention_mask=None, dropout=0.0, **more):
    return _Attention.apply(query, key, value, None, True).transpose(1, 2), None


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return _Dropout.apply(x) if training and p > 0 else x


@contextlib.contextmanager
def of_cuda() -> Iterator[None]:
    """Let modules run as they would on a GPU."""
    from transformers.integrations import sdpa_attention

    softmax = nn.functional.softmax

    def fused(x: torch.Tensor, dim: int | None = None, dtype: torch.dtype | None = None, **more: object):
        return _Softmax.apply(x) if dtype == torch.float32 else softmax(x, dim=dim, dtype=dtype, **more)

    with (
        mock.patch.object(nn.functional, "softmax", fused),
        mock.patch.object(nn.functional, "dropout", _dropout),
        mock.patch.object(nn.functional, "scaled_dot_product_attention", _sdpa),
        # Keys and values are expanded to the query heads: the kernels of older cards take them no other way.
        mock.patch.object(sdpa_attention, "use_gqa_in_sdpa", lambda *_, **__: False),
    ):
        yield


def flash_attention() -> str:
    """Make transformers know the stand-in for FlashAttention 2, which needs no mask; returns its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_FLASH, _flash)
    AttentionMaskInterface.register(_FLASH, lambda *_, **__: None)
    return _FLASH


def no_packed_rows() -> contextlib.AbstractContextManager:
    """Say that no row holds two documents, which transformers cannot see of fake tensors."""
    from transformers import masking_utils

    return mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda *_, **__: None)
