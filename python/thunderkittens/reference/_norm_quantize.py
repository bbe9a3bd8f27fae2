"""What the quantising norms have in common: codes of a normalised row."""

from __future__ import annotations

import torch
from torch import Tensor

from .fp8_quantize import fp8_quantize
from .nvfp4_quantize import nvfp4_quantize

OUTPUTS = ("fp8_tensor", "fp8_row", "fp8_1x128", "nvfp4")


def quantized(
    rows: Tensor, output: str, scale: Tensor | None, swizzle: bool
) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows as `tk.fp8_quantize` and `tk.nvfp4_quantize` find them, of the rows
    in float32.

    Args:
        rows: (..., D), any floating-point dtype.
        output: "fp8_tensor", "fp8_row", "fp8_1x128" or "nvfp4".
        scale: float32, one element: that of the tensor in fp8, the global one in NVFP4.
        swizzle: whether the scales of NVFP4 lie in the 128x4 layout, as those of one matrix.

    Returns:
        Codes (..., D), of NVFP4 (..., D / 2), and scales: () of a tensor, (..., 1) of rows,
        (..., ceil(D / 128)) and (..., ceil(D / 16)) of blocks, or those in the 128x4 layout.
    """
    matrix = rows.float().reshape(rows.shape[:-1].numel(), rows.shape[-1])
    if output == "nvfp4":
        assert scale is not None
        codes, scales, _ = nvfp4_quantize(matrix, global_scale=scale.reshape(()), swizzle=swizzle)
        width = codes.shape[-1]
        codes = codes.view(torch.uint8).reshape(*rows.shape[:-1], width)
        codes = codes.view(torch.float4_e2m1fn_x2)
        if swizzle:
            return codes, scales
    else:
        codes, scales = fp8_quantize(matrix, output.removeprefix("fp8_"), scale=scale)
        codes = codes.reshape(rows.shape)
        if output == "fp8_tensor":
            return codes, scales
    return codes, scales.reshape(*rows.shape[:-1], scales.shape[-1])
