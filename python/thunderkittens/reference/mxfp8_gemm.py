"""`tk.mxfp8_gemm` in plain PyTorch: a product of the values that elements and scales stand for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._block_scaled import e8m0_value, plain_scales
from .fp8_gemm import ACTIVATIONS

BLOCK = 32


def mxfp8_gemm(
    a: Tensor | tuple[Any, ...],
    b: Tensor | tuple[Any, ...],
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    path: str | None = None,
    swizzle: bool = True,
    offs: Tensor | None = None,
) -> Tensor:
    """`activation(a @ b + bias)` of what the operands stand for, in float32 (in float64 for an
    out_dtype of float64), rounded once.

    Args:
        a: (M, K), float8_e4m3fn or float8_e5m2; or what `tk.mxfp8_prepare` gives.
        b: (K, N), the same; or what `tk.mxfp8_prepare` gives for its transpose. (E, K, N) with
            offs.
        scale_a: of a, as `tk.mxfp8_quantize` makes it.
        scale_b: of b's transpose.
        bias: (N,).
        activation: None, "relu", "gelu", "gelu_tanh" or "silu".
        out_dtype: dtype of the result.
        path: no meaning here: the product is that of the operands as they were quantised.
        swizzle: whether the scales lie in the 128x4 layout.
        offs: (E,), ends of the groups of rows of a; group e is multiplied with b[e], rows behind
            the last group give 0.

    Returns:
        (M, N).
    """
    wide = torch.float64 if out_dtype == torch.float64 else torch.float32
    if isinstance(a, tuple):
        left = mxfp8_values(a[0], a[1], True, wide)
    else:
        assert scale_a is not None
        left = mxfp8_values(a, scale_a, swizzle, wide)
    if isinstance(b, tuple):
        right = mxfp8_values(b[0], b[1], True, wide)
    else:
        assert scale_b is not None
        right = mxfp8_values(b.mT, scale_b, swizzle, wide)
    return finished(left, right, bias, activation, out_dtype, offs)


def finished(
    left: Tensor,
    right: Tensor,
    bias: Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype,
    offs: Tensor | None,
) -> Tensor:
    """The product of (M, K) and the transpose of (N, K), or of groups with (E, N, K), and what
    follows it."""
    end = left.shape[0]
    if offs is None:
        product = left @ right.mT
    else:
        product, end = left.new_zeros(left.shape[0], right.shape[-2]), 0
        for group, given in enumerate(offs.tolist()):
            begin, end = end, min(max(given, end), left.shape[0])
            product[begin:end] = left[begin:end] @ right[group].mT
    if bias is not None:
        product = product + bias.to(product.dtype)
    product = ACTIVATIONS[activation](product)
    if end < left.shape[0]:
        product = torch.cat([product[:end], torch.zeros_like(product[end:])])
    return product.to(out_dtype)


def mxfp8_values(data: Tensor, scale: Tensor, swizzle: bool, dtype: torch.dtype) -> Tensor:
    """Elements times the scales of their blocks; in float64 all of them are exact."""
    rows, columns = data.shape[-2:]
    scale = scale.view(torch.uint8)
    if swizzle:
        scale = plain_scales(scale, rows, -(-columns // BLOCK))
    factors = e8m0_value(scale.long()).to(dtype).repeat_interleave(BLOCK, -1)[..., :columns]
    return data.to(dtype) * factors
