"""LayerNorm whose result is fp8 or NVFP4, for the product that follows.

`layer_norm_quantize` brings output and scale to the forms that the op takes. The result has no
gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..reference.layer_norm_quantize import layer_norm_quantize as reference_layer_norm_quantize
from . import _norm_quantize as shared

_op = torch.ops.thunderkittens.layer_norm_quantize.default


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
    """`tk.layer_norm`, of which the result is quantised, in one pass over memory.

    Of v, which is x or with a residual x + residual,
    `(v - mean(v)) / sqrt(var(v) + eps) * weight + bias` is computed in float32 and quantised from
    there: it is rounded once, to codes, and not to x's dtype before. Codes and scales are, bit for
    bit, those that `tk.fp8_quantize` or `tk.nvfp4_quantize` makes of the float32 rows, which
    `tk.layer_norm` returns for v, weight and bias in float32. The sum is rounded to the residual's
    dtype, normalised as it is returned, and not quantised.

    Every stride is accepted; tensors whose last dimension is not adjacent are copied. The result
    has no gradient: an operand that requires one is refused where gradients are enabled. Autocast
    leaves its tensors as they are. Works under `torch.compile`, `torch.export` and
    `torch.func.vmap`; on CPU tensors it runs `tk.reference.layer_norm_quantize`.

    Args:
        x: (..., D), bfloat16, float16 or float32. D is even for "nvfp4".
        weight: (D,), of x's dtype or float32. None: ones.
        bias: (D,), of the weight's dtype; not without a weight. None: zeros.
        output: which elements share a scale. "fp8_tensor", all, whose scale is given; "fp8_row",
            those of a row; "fp8_1x128", 128 neighbours of a row; "nvfp4", 16 neighbours of a row,
            beside the global scale that is given.
        scale: float32, one element, for "fp8_tensor" and "nvfp4", for instance of an earlier batch:
            the result is about codes * scale, or codes * block scale * scale.
        swizzle: whether the scales of "nvfp4" lie in the 128x4 layout, or plain.
        eps: added to the variance.
        residual: of x's shape, and of its dtype or float32.

    Returns:
        (data, data_scale), with a residual (data, data_scale, sum). data is float8_e4m3fn of x's
        shape, for "nvfp4" float4_e2m1fn_x2 (..., D / 2); contiguous. data_scale is float32: () for
        "fp8_tensor", (..., 1) for "fp8_row", and for "fp8_1x128" (..., ceil(D / 128)) with
        neighbouring rows adjacent in memory, as `tk.fp8_gemm` reads it. For "nvfp4" it is
        float8_e4m3fn: plain (..., ceil(D / 16)), and with swizzle that of the matrix of all M rows,
        (roundup(M, 128), roundup(ceil(D / 16), 4)), zero in the padding. sum has x's shape and the
        residual's dtype.

    Raises:
        TypeError: a tensor is no dense tensor, has an unsupported dtype or is on another device.
        ValueError: a shape does not fit the above, a number is out of its range, output is none of
            the above, or a scale is missing, or given where it is to be found.
        RuntimeError: an operand requires a gradient.

    The formula is `tk.reference.layer_norm_quantize`.
    """
    code, scale = shared.code_of("layer_norm_quantize", output, swizzle, scale)
    return shared.call(
        "layer_norm_quantize",
        _op,
        (x, weight, bias, residual, scale, code, swizzle, eps),
        (x, weight, bias, residual),
        _check,
        residual is not None,
    )


def _check(args: tuple[Any, ...]) -> None:
    x, weight, bias, residual, scale, output, _, eps = args
    shared.check_quantize("layer_norm_quantize", x, weight, bias, residual, scale, output, eps)


# What the op does beside the CUDA implementation.

# The dispatcher drops trailing arguments that have their default value.
_DEFAULTS: tuple[Any, ...] = (None, None, None, None, None, 1, True, 1e-5)


def _filled(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*args, *_DEFAULTS[len(args) :])


def _fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    args = _filled(args)
    _check(args)
    x, _, _, residual, _, output, swizzle, _ = args
    return shared.empty_results(x, residual, output, swizzle)


def _cpu(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    args = _filled(args)
    _check(args)
    x, weight, bias, residual, scale, output, swizzle, eps = args
    return shared.on_cpu(
        "layer_norm_quantize",
        reference_layer_norm_quantize,
        {"x": x, "weight": weight, "bias": bias, "residual": residual, "scale": scale},
        output,
        swizzle,
        eps=eps,
    )


shared.register_quantize("layer_norm_quantize", _fake, _cpu)
