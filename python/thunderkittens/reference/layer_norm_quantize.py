"""`tk.layer_norm_quantize` in plain PyTorch: `layer_norm` in float32 (float64 for float64), and a
quantisation of what it gives, without a rounding in between."""

from __future__ import annotations

from torch import Tensor

from ._norm import residual_sum, wide_dtype
from ._norm_quantize import quantized
from .layer_norm import layer_norm


def layer_norm_quantize(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    output: str = "fp8_row",
    *,
    scale: Tensor | None = None,
    swizzle: bool = True,
    eps: float = 1e-5,
    residual: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Codes and scales of `(v - mean(v)) / sqrt(mean((v - mean(v))^2) + eps) * weight + bias` of
    `v = x + residual`, in float32.

    The sum is rounded to the residual's dtype before it is normalised.

    Args:
        x: (..., D), any floating-point dtype.
        weight: (D,).
        bias: (D,).
        output: "fp8_tensor", "fp8_row", "fp8_1x128" (128 neighbours of a row) or "nvfp4".
        scale: float32, one element, for "fp8_tensor" and "nvfp4".
        swizzle: whether the scales of "nvfp4" lie in the 128x4 layout.
        eps: added to the variance.
        residual: of x's shape; its sum with x is returned too, in its dtype.

    Returns:
        (data, scale), with a residual (data, scale, sum).
    """
    wide = wide_dtype(x, weight, residual)
    total = residual_sum(x, residual, 0.0, None, wide)
    rows = layer_norm(total.to(wide), weight, bias, eps=eps)
    assert isinstance(rows, Tensor)
    codes = quantized(rows, output, scale, swizzle)
    return codes if residual is None else (*codes, total)
