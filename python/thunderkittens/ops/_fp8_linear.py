"""A linear layer whose three products, forward and both gradients, are of fp8 matrices.

Built on the ops `fp8_quantize` and `fp8_gemm`. Each product sums over another dimension, so each
matrix is quantised in two ways, along its rows and along those of its transpose, in one pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _load
from ._eager_autograd import differentiable, plain
from ._gradient_call import gradient_of_ops, one_by_one
from ._registration import autocast_active, transform_active
from .fp8_quantize import FP8_DTYPES, GRANULARITIES

# How (activations and their gradients, weights) are quantised.
SCALING = {"row": ("row", "row"), "block": ("1x128", "128x128")}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The ops themselves: what their public functions check is right by construction.
_quantize = torch.ops.thunderkittens.fp8_quantize.default
_product = torch.ops.thunderkittens.fp8_gemm.default
# All of it in C++, with the node of its gradient.
_composed = torch.ops.thunderkittens.fp8_linear.default if _load.has_nodes else None


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
    output with the rounded weight and x. x is saved as fp8 codes, half the bytes of bfloat16; where
    no gradient is wanted, nothing is. Reruns give the same bits. Under autocast, x, weight and bias
    are converted to the autocast dtype. Differentiable once. Works under `torch.compile`,
    `torch.export`, `torch.func.vmap` (one call after the other) and `torch.func.grad`.

    Args:
        x: (..., K), bfloat16, float16 or float32, any strides.
        weight: (N, K), one of these dtypes, on the device of x.
        bias: (N,), likewise.
        scaling: "row": a scale for each row of what is multiplied. "block": a scale for 1 x 128
            elements of x and of gradients, and for 128 x 128 of the weight.
        grad_dtype: fp8 dtype of the gradient of the output: float8_e4m3fn or float8_e5m2.
        accurate: as in `tk.fp8_gemm`.

    Returns:
        (..., N), of x's dtype, or the autocast dtype; gradients have the dtypes of what they
        belong to.

    Raises:
        TypeError: an operand is no dense tensor of a supported dtype, or is on another device than
            x; grad_dtype is not fp8.
        ValueError: shapes do not match, or scaling is none of the above.
        RuntimeError: its gradient is differentiated again.

    The formula is `tk.reference.fp8_linear`.
    """
    _check(x, weight, bias, scaling, grad_dtype)
    kind = x.device.type
    cast = None
    if autocast_active() and kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        cast = torch.get_autocast_dtype(kind)
    rows = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    if _composed is not None and plain():
        of_x, of_weight = (GRANULARITIES.index(of) for of in SCALING[scaling])
        out = _composed(rows, weight, bias, cast, of_x, of_weight, grad_dtype, accurate)
        result: Tensor = out.reshape(*x.shape[:-1], weight.shape[0])
        return result
    # Under the transforms of torch.func, tensors do not tell whose gradient will be wanted.
    needs_x = needs_weight = transform_active()
    if not needs_x and torch.is_grad_enabled():
        needs_x, needs_weight = x.requires_grad, weight.requires_grad
    options = scaling, grad_dtype, accurate
    wanted = (
        needs_x
        or needs_weight
        or (torch.is_grad_enabled() and bias is not None and bias.requires_grad)
    )
    call = _recorded if wanted else _forward
    out = call(rows, weight, bias, cast, options, needs_x, needs_weight)[0]
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _check(x: Any, weight: Any, bias: Any, scaling: Any, grad_dtype: Any) -> None:
    name = "tk.fp8_linear"
    for key, t in (("x", x), ("weight", weight), ("bias", bias)):
        if t is None and key == "bias":
            continue
        if not isinstance(t, Tensor) or t.dtype not in _DTYPES:
            what = t.dtype if isinstance(t, Tensor) else type(t).__name__
            raise TypeError(
                f"{name}: {key} must be a bfloat16, float16 or float32 tensor, got {what}"
            )
        if t.layout is not torch.strided:
            raise TypeError(f"{name}: {key} must be a dense tensor (torch.strided), got {t.layout}")
        if t.device != x.device:
            raise TypeError(f"{name}: {key} is on {t.device}, x is on {x.device}")
    if grad_dtype not in FP8_DTYPES:
        raise TypeError(f"{name}: grad_dtype is {grad_dtype}; it must be fp8")
    if scaling not in SCALING:
        raise ValueError(f"{name}: scaling is {scaling!r}; it must be one of {tuple(SCALING)}")
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{name}: x has shape {tuple(x.shape)} and weight has shape {tuple(weight.shape)}; "
            "they must be (..., K) and (N, K)"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(
            f"{name}: bias has shape {tuple(bias.shape)}; it must be ({weight.shape[0]},), one "
            "value per row of weight"
        )


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


def _quantized(
    x: Tensor, of: str, dtype: torch.dtype, transposed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _quantize(
        x, GRANULARITIES.index(of), dtype, None, transposed
    )
    return result


def _gradients(
    grad: Tensor,
    weight: Tensor,
    codes_x: Tensor,
    scale_x: Tensor,
    codes_w: Tensor,
    scale_w: Tensor,
    dtype_x: torch.dtype,
    options: tuple[Any, ...],
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight, nothing where they are not needed. Of the weight only the dtype
    counts: it is an argument so that autograd knows on what the results depend."""
    scaling, grad_dtype, accurate = options
    codes, scale, codes_t, scale_t = _quantized(grad, SCALING[scaling][0], grad_dtype, needs[1])
    grad_x, grad_weight = grad.new_empty((0,)), grad.new_empty((0,))
    if needs[0]:
        grad_x = _product(codes, codes_w.t(), scale, scale_w.t(), None, 0, dtype_x, accurate, None)
    if needs[1]:
        grad_weight = _product(
            codes_t, codes_x.t(), scale_t, scale_x.t(), None, 0, weight.dtype, accurate, None
        )
    return grad_x, grad_weight


_any_gradients = gradient_of_ops("fp8_linear", _gradients, reference=False)


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cast: torch.dtype | None,
    options: tuple[Any, ...],
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, ...]:
    """The product of rows, and what the gradients need: codes and scales of both transposes."""
    of_x, of_weight = SCALING[options[0]]
    if cast is not None:
        # Here, not before: the graph keeps the weight that it was given, and no copy.
        x, weight = x.to(cast), weight.to(cast)
        bias = None if bias is None else bias.to(cast)
    codes_x, scale_x, *x_t = _quantized(x, of_x, torch.float8_e4m3fn, needs_weight)
    codes_w, scale_w, *weight_t = _quantized(weight, of_weight, torch.float8_e4m3fn, needs_x)
    out = _product(codes_x, codes_w.t(), scale_x, scale_w.t(), bias, 0, x.dtype, options[2], None)
    return out, *x_t, *weight_t


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, ctx.options, _, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(weight, *output[1:])
    ctx.dtypes = x.dtype, None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    weight, *saved = ctx.saved_tensors
    dtype_x, dtype_bias = ctx.dtypes
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    grad_x = grad_weight = grad_bias = None
    if needs_x or needs_weight:
        needs = needs_x, needs_weight
        of_x, of_weight = _any_gradients(grad, weight, *saved, dtype_x, ctx.options, needs)
        grad_x = of_x if needs_x else None
        grad_weight = of_weight if needs_weight else None
    if needs_bias:
        grad_bias = grad.sum(0, dtype=torch.float32).to(dtype_bias)
    return grad_x, grad_weight, grad_bias, None, None, None, None


_recorded = differentiable("fp8_linear", _forward, _save, _backward, one_by_one)
