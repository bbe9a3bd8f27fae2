"""A linear layer whose three products, forward and both gradients, are of fp8 matrices.

Built on the ops `fp8_quantize` and `fp8_gemm`. Each product sums over another dimension, so each
matrix is quantised in two ways, along its rows and along those of its transpose, in one pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .fp8_gemm import fp8_gemm
from .fp8_quantize import FP8_DTYPES, fp8_quantize

# How (activations and their gradients, weights) are quantised.
SCALING = {"row": ("row", "row"), "block": ("1x128", "128x128")}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scaling: str = "block",
    grad_dtype: torch.dtype = torch.float8_e4m3fn,
    accurate: bool = True,
) -> Tensor:
    """`x @ weight.T + bias` with x and weight rounded to fp8, for training.

    The gradients of x and weight are products of fp8 matrices too: of the rounded gradient of the
    output with the rounded weight and x. x is saved as fp8 codes, half the bytes of bfloat16. Under
    autocast, x, weight and bias are converted to the autocast dtype. Differentiable once.

    Args:
        x: (..., K), bfloat16, float16 or float32.
        weight: (N, K).
        bias: (N,).
        scaling: "row": a scale for each row of what is multiplied. "block": a scale for 1 x 128
            elements of x and of gradients, and for 128 x 128 of the weight.
        grad_dtype: fp8 dtype of the gradient of the output: float8_e4m3fn or float8_e5m2.
        accurate: as in `tk.fp8_gemm`.

    Returns:
        (..., N), of x's dtype.

    Raises:
        TypeError: an operand is no tensor of a supported dtype, or on another device than x, or
            grad_dtype is not fp8.
        ValueError: shapes do not match, or scaling is none of the above.
    """
    for name, t in (("x", x), ("weight", weight), ("bias", bias)):
        if t is None and name == "bias":
            continue
        if not isinstance(t, Tensor) or t.dtype not in _DTYPES:
            what = t.dtype if isinstance(t, Tensor) else type(t).__name__
            raise TypeError(
                f"tk.fp8_linear: {name} must be a bfloat16, float16 or float32 tensor, got {what}"
            )
        if t.device != x.device:
            raise TypeError(f"tk.fp8_linear: {name} is on {t.device}, x is on {x.device}")
    if grad_dtype not in FP8_DTYPES:
        raise TypeError(f"tk.fp8_linear: grad_dtype is {grad_dtype}; it must be fp8")
    if scaling not in SCALING:
        raise ValueError(
            f"tk.fp8_linear: scaling is {scaling!r}; it must be one of {tuple(SCALING)}"
        )
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"tk.fp8_linear: x has shape {tuple(x.shape)} and weight has shape "
            f"{tuple(weight.shape)}; they must be (..., K) and (N, K)"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(
            f"tk.fp8_linear: bias has shape {tuple(bias.shape)}; it must be ({weight.shape[0]},), "
            "one value per row of weight"
        )
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    rows = x.reshape(-1, x.shape[-1])
    out = _Linear.apply(rows, weight, bias, scaling, grad_dtype, accurate)
    return out.reshape(*x.shape[:-1], weight.shape[0])


class Fp8Linear(torch.nn.Linear):
    """`torch.nn.Linear` computed by `fp8_linear`; parameters stay in their own dtype.

    Args:
        scaling, grad_dtype, accurate: as in `fp8_linear`; the rest as in `torch.nn.Linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        scaling: str = "block",
        grad_dtype: torch.dtype = torch.float8_e4m3fn,
        accurate: bool = True,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.scaling, self.grad_dtype, self.accurate = scaling, grad_dtype, accurate

    def forward(self, input: Tensor) -> Tensor:
        return fp8_linear(
            input,
            self.weight,
            self.bias,
            scaling=self.scaling,
            grad_dtype=self.grad_dtype,
            accurate=self.accurate,
        )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scaling: str,
        grad_dtype: torch.dtype,
        accurate: bool,
    ) -> Tensor:
        of_x, of_weight = SCALING[scaling]
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        codes_x, scale_x, *x_t = fp8_quantize(x, of_x, transposed=needs_weight)
        codes_w, scale_w, *weight_t = fp8_quantize(weight, of_weight, transposed=needs_x)
        ctx.save_for_backward(*x_t, *weight_t)
        ctx.options = scaling, grad_dtype, accurate, needs_x, needs_weight
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return fp8_gemm(
            codes_x,
            codes_w.t(),
            scale_x,
            scale_w.t(),
            bias=bias,
            out_dtype=x.dtype,
            accurate=accurate,
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scaling, grad_dtype, accurate, needs_x, needs_weight = ctx.options
        dtype_x, dtype_weight, dtype_bias = ctx.dtypes
        saved = list(ctx.saved_tensors)
        codes, scale, *grad_t = fp8_quantize(
            grad, SCALING[scaling][0], dtype=grad_dtype, transposed=needs_weight
        )
        grad_x = grad_weight = grad_bias = None
        if needs_weight:
            codes_x, scale_x = saved[:2]
            grad_weight = fp8_gemm(
                grad_t[0],
                codes_x.t(),
                grad_t[1],
                scale_x.t(),
                out_dtype=dtype_weight,
                accurate=accurate,
            )
        if needs_x:
            codes_w, scale_w = saved[-2:]
            grad_x = fp8_gemm(
                codes, codes_w.t(), scale, scale_w.t(), out_dtype=dtype_x, accurate=accurate
            )
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0, dtype=torch.float32).to(dtype_bias)
        return grad_x, grad_weight, grad_bias, None, None, None
