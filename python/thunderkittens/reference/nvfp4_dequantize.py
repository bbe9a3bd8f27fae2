"""`tk.nvfp4_dequantize` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ._block_scaled import plain_scales

BLOCK = 16
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nvfp4_dequantize(
    data: Tensor,
    block_scale: Tensor,
    global_scale: Tensor,
    *,
    swizzle: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Elements times the scale of their block, which is exact, times that of the matrix, in
    float32; rounded once to dtype.

    Args:
        data: (..., M, K / 2), float4_e2m1fn_x2 or its bytes.
        block_scale: float8_e4m3fn, as `tk.nvfp4_quantize` makes it.
        global_scale: float32, of the batch dimensions.
        swizzle: whether the blocks' scales lie in the 128x4 layout.
        dtype: of the result.

    Returns:
        (..., M, K) of dtype.
    """
    codes = data.view(torch.uint8).long()
    rows, columns = codes.shape[-2], 2 * codes.shape[-1]
    codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    table = torch.tensor([*VALUES, *(-v for v in VALUES)], dtype=torch.float32, device=data.device)
    if swizzle:
        scale = block_scale.view(torch.uint8)
        scale = plain_scales(scale, rows, -(-columns // BLOCK)).contiguous()
        block_scale = scale.view(torch.float8_e4m3fn)
    factors = block_scale.to(torch.float32).repeat_interleave(BLOCK, -1)[..., :columns]
    return (table[codes] * factors * global_scale[..., None, None]).to(dtype)
