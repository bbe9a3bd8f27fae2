"""A drop-in for `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from ..ops.attention import attention

_DTYPES = (torch.bfloat16, torch.float16)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`tk.attention` where it computes the same, and PyTorch's own function elsewhere.

    `tk.attention` takes dense bfloat16 or float16 tensors (B, H, S, D) on a CUDA device, without
    dropout, and without a mask or with one of `torch.nn.attention.bias.causal_upper_left` and
    `causal_lower_right`. The function has the signature and the meaning of PyTorch's, so a model
    that calls it through a name of its own can be switched over:

        from thunderkittens.integrations.sdpa import scaled_dot_product_attention

    Args:
        query: (..., Hq, Sq, D).
        key: (..., Hkv, Sk, D).
        value: (..., Hkv, Sk, Dv).
        attn_mask: as PyTorch takes it.
        dropout_p: probability of dropping a weight.
        is_causal: row i sees the keys j <= i.
        scale: factor of the scores; None is 1 / sqrt(D).
        enable_gqa: whether key and value may have fewer heads than query.

    Returns:
        (..., Hq, Sq, Dv).
    """
    causal: Any = "upper_left" if is_causal else False
    mask = attn_mask
    if isinstance(mask, CausalBias) and not is_causal:
        lower = mask.variant == CausalVariant.LOWER_RIGHT
        causal, mask = "lower_right" if lower else "upper_left", None
    if mask is None and dropout_p == 0.0 and _fits(query, key, value, enable_gqa):
        return attention(query, key, value, causal=causal, scale=scale)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def _fits(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether `tk.attention` takes the operands on a GPU."""
    return query.is_cuda and _suits(query, key, value, enable_gqa)


def _suits(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether shapes and dtypes are those of `tk.attention`."""
    if query.dtype not in _DTYPES:
        return False
    for x in (query, key, value):
        # Nested tensors are PyTorch's; other shapes broadcast there.
        if x.dim() != 4 or x.layout is not torch.strided or x.is_nested:
            return False
        if x.dtype is not query.dtype or x.device != query.device:
            return False
        if x.shape[3] % 8 != 0 or not 8 <= x.shape[3] <= 256:
            return False
    heads, heads_k = query.shape[1], key.shape[1]
    return (
        key.shape[:3] == value.shape[:3]
        and key.shape[0] == query.shape[0]
        and key.shape[3] == query.shape[3]
        and (heads == heads_k or (enable_gqa and heads_k > 0 and heads % heads_k == 0))
    )
