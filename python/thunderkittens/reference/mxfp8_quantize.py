"""`tk.mxfp8_quantize` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ._block_scaled import (
    FP8_MAX,
    FP8_MAX_EXPONENT,
    bits_of,
    blocks_of,
    e8m0_inverse,
    swizzle_scales,
    to_fp8,
)

BLOCK = 32


def mxfp8_quantize(
    x: Tensor,
    *,
    axis: int = -1,
    rule: str = "rceil",
    dtype: torch.dtype = torch.float8_e4m3fn,
    swizzle: bool = True,
    transpose: bool = False,
) -> tuple[Tensor, ...]:
    """Blocks of 32 neighbours along `axis`, each with a scale 2^(byte - 127).

    Args:
        x: (..., M, K), any floating-point dtype; taken as float32.
        axis: -1 or -2, or the same two counted from the front.
        rule: "rceil", the scale is the block's largest magnitude divided by the largest element,
            rounded up to a power of two; or "floor", it is the power of two below the largest
            magnitude, divided by that below the largest element.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        swizzle: whether the scales lie in the 128x4 layout.
        transpose: whether to return the same of the transpose of x besides.

    Returns:
        The elements, of the shape of x, and the scales, float8_e8m0fnu.
    """
    if axis in (-2, x.dim() - 2):
        results = mxfp8_quantize(x.mT, rule=rule, dtype=dtype, swizzle=swizzle, transpose=transpose)
        return tuple(r.mT if i % 2 == 0 else r for i, r in enumerate(results))
    blocks = blocks_of(x.to(torch.float32), BLOCK)
    byte = scale_byte(blocks.abs().amax(-1), rule, dtype)
    data = to_fp8(blocks * e8m0_inverse(byte).unsqueeze(-1), dtype)
    data = data.view(torch.uint8).flatten(-2)[..., : x.shape[-1]].contiguous().view(dtype)
    scale = byte.to(torch.uint8)
    scale = (swizzle_scales(scale) if swizzle else scale).contiguous().view(torch.float8_e8m0fnu)
    if not transpose:
        return data, scale
    return data, scale, *mxfp8_quantize(x.mT, rule=rule, dtype=dtype, swizzle=swizzle)


def scale_byte(largest: Tensor, rule: str, dtype: torch.dtype) -> Tensor:
    """The e8m0 byte of blocks with these largest magnitudes, as int64."""
    if rule == "floor":
        exponent = bits_of(largest) >> 23
        byte = torch.where(largest.isinf(), 254, (exponent - FP8_MAX_EXPONENT[dtype]).clamp(min=0))
    else:
        # The product with the reciprocal gives the byte of the float32 quotient, for every number.
        reciprocal = torch.tensor(1.0 / FP8_MAX[dtype], dtype=torch.float32, device=largest.device)
        bits = bits_of(largest * reciprocal)
        byte = torch.where(bits <= 0x400000, 0, (bits + 0x7FFFFF >> 23).clamp(max=254))
    return torch.where(largest.isnan(), 255, byte)
