"""`tk.mxfp8_dequantize` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ._block_scaled import e8m0_value, plain_scales

BLOCK = 32


def mxfp8_dequantize(
    data: Tensor,
    scale: Tensor,
    *,
    axis: int = -1,
    swizzle: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Elements times the scales of their blocks, rounded once to dtype.

    Args:
        data: (..., M, K), float8_e4m3fn or float8_e5m2.
        scale: float8_e8m0fnu, or its bytes, as `tk.mxfp8_quantize` makes it.
        axis: along which the blocks lie, -1 or -2.
        swizzle: whether the scales lie in the 128x4 layout.
        dtype: of the result.

    Returns:
        (..., M, K) of dtype.
    """
    if axis in (-2, data.dim() - 2):
        return mxfp8_dequantize(data.mT, scale, swizzle=swizzle, dtype=dtype).mT
    rows, columns = data.shape[-2:]
    scale = scale.view(torch.uint8)
    if swizzle:
        scale = plain_scales(scale, rows, -(-columns // BLOCK))
    factors = e8m0_value(scale.long()).repeat_interleave(BLOCK, -1)[..., :columns]
    return (data.to(torch.float32) * factors).to(dtype).contiguous()
