"""`tk.fp8_linear` in plain PyTorch: three products of quantised matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .fp8_gemm import fp8_gemm
from .fp8_quantize import fp8_quantize

E4M3 = torch.float8_e4m3fn


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scaling: str = "block",
    grad_dtype: torch.dtype = E4M3,
    accurate: bool = True,
) -> Tensor:
    """`x @ weight.T + bias` of the rounded x and weight, in float32. The gradient of x is that of
    the output, rounded, times the rounded weight; that of weight the transpose of the former,
    rounded, times the rounded x. Of each product both operands are rounded along the dimension that
    it sums over: "row", by one scale for all of that; "block", by a scale for 128 of it, which
    blocks of 128 x 128 of the weight share.

    Args:
        x: (..., K).
        weight: (N, K).
        bias: (N,), not rounded; its gradient is the sum of that of the output.
        scaling: "row" or "block".
        grad_dtype: fp8 dtype of the gradient of the output; x and weight are float8_e4m3fn.
        accurate: no meaning here; sums are in float32.

    Returns:
        (..., N), of x's dtype.
    """
    rows = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    linear: Callable[..., Tensor] = _Linear.apply
    out = linear(rows, weight, bias, scaling, grad_dtype)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def product(x: Tensor, y: Tensor, of: tuple[str, str], dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """`x @ y.T` of the rounded x and y, in float32."""
    a, scale_a = fp8_quantize(x, of[0], dtype=dtypes[0])
    b, scale_b = fp8_quantize(y, of[1], dtype=dtypes[1])
    return fp8_gemm(a, b.t(), scale_a, scale_b.t(), out_dtype=torch.float32)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scaling: str,
        grad_dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dtypes = (grad_dtype, E4M3), None if bias is None else bias.dtype
        # x and gradients; the weight.
        ctx.of = {"row": ("row", "row"), "block": ("1x128", "128x128")}[scaling]
        out = product(x, weight, ctx.of, (E4M3, E4M3))
        return (out if bias is None else out + bias.float()).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dtypes, dtype_bias = ctx.dtypes
        grad_x = product(grad, weight.t(), ctx.of, dtypes).to(x.dtype)
        grad_weight = product(grad.t(), x.t(), (ctx.of[0],) * 2, dtypes).to(weight.dtype)
        grad_bias = None
        if dtype_bias is not None:
            grad_bias = grad.sum(0, dtype=torch.float32).to(dtype_bias)
        return grad_x, grad_weight, grad_bias, None, None
