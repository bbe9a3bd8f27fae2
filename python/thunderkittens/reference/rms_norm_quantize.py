"""`tk.rms_norm_quantize` in plain PyTorch: `rms_norm` in float32 (float64 for float64), and a
quantisation of what it gives, without a rounding in between."""

from __future__ import annotations

from torch import Tensor

from ._norm import residual_sum, wide_dtype
from ._norm_quantize import quantized
from .rms_norm import rms_norm


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor | None = None,
    output: str = "fp8_row",
    *,
    scale: Tensor | None = None,
    swizzle: bool = True,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Codes and scales of `v / sqrt(mean(v^2) + eps) * (weight + weight_offset)` of
    `v = x + residual`, in float32.

    The sum is rounded to the residual's dtype before it is normalised.

    Args:
        x: (..., D), any floating-point dtype.
        weight: (D,).
        output: "fp8_tensor", "fp8_row", "fp8_1x128" (128 neighbours of a row) or "nvfp4".
        scale: float32, one element, for "fp8_tensor" and "nvfp4".
        swizzle: whether the scales of "nvfp4" lie in the 128x4 layout.
        eps: added to the mean of the squares.
        weight_offset: added to the weight.
        residual: of x's shape; its sum with x is returned too, in its dtype.

    Returns:
        (data, scale), with a residual (data, scale, sum).
    """
    wide = wide_dtype(x, weight, residual)
    total = residual_sum(x, residual, 0.0, None, wide)
    rows = rms_norm(total.to(wide), weight, eps=eps, weight_offset=weight_offset)
    assert isinstance(rows, Tensor)
    codes = quantized(rows, output, scale, swizzle)
    return codes if residual is None else (*codes, total)
