"""Quantisation to MXFP8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import emulation
from ..reference.mxfp8_quantize import mxfp8_quantize as reference_mxfp8_quantize
from ._block_scaled import (
    FP8,
    WIDE,
    require_choice,
    require_dtype,
    require_flag,
    require_matrix,
    scale_shape,
    second_to_last,
)
from ._registration import register

BLOCK = 32
E8M0 = torch.float8_e8m0fnu
_op = torch.ops.thunderkittens.mxfp8_quantize.default


def mxfp8_quantize(
    x: Tensor,
    *,
    axis: int = -1,
    rule: str = "rceil",
    dtype: torch.dtype = torch.float8_e4m3fn,
    swizzle: bool = True,
    transpose: bool = False,
) -> tuple[Tensor, ...]:
    """Quantises to MXFP8: fp8 elements, 32 neighbours of which share a power of two.

    The element is `x * 2^(127 - byte)`, rounded to nearest even and saturated; the scale's byte is
    that of the largest magnitude of the block. A block of zeros has byte 0; one with an infinity
    has 254, and the infinity becomes the largest element; one with a NaN has 255, and all of its
    elements are NaN (0x7f). A last block that is not full counts as filled up with zeros.

    One pass over x makes both orientations. x is read where it lies, row-major or column-major, if
    its base and its other strides are multiples of 16 bytes, and is copied otherwise. Not
    differentiable: no gradient flows to x. Autocast leaves x as it is.

    Args:
        x: (M, K) or (B, M, K), bfloat16, float16 or float32.
        axis: along which the blocks lie: -1, or -2, which is quantising the transpose; or the same
            two counted from the front, as PyTorch counts dimensions. Data is contiguous along this
            axis.
        rule: of the scale. "rceil" (NVIDIA's): the largest magnitude divided by the largest element
            of dtype, rounded up to a power of two, so that no number saturates. "floor" (OCP
            MX 1.0): the power of two at or below the largest magnitude, divided by that of the
            largest element.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        swizzle: whether the scales lie in the 128x4 layout (`SwizzleType.SWIZZLE_32_4_4` of
            PyTorch), which the tensor cores of Blackwell and `torch.nn.functional.scaled_mm` read,
            or plain, one after the other.
        transpose: whether to return data and scale of `x.mT` besides, for products that sum over
            the other dimension.

    Returns:
        (data, scale), or (data, scale, data_t, scale_t). data has the shape of x, and data_t that
        of x.mT, of dtype. scale is float8_e8m0fnu, (..., M, ceil(K / 32)) for axis -1, and with
        swizzle (..., roundup(M, 128), roundup(ceil(K / 32), 4)), zero in the padding; for axis -2
        K and M change places.

    Raises:
        TypeError: x is no dense tensor of these dtypes; dtype, axis, rule, swizzle or transpose is
            of the wrong kind.
        ValueError: x has another number of dimensions, axis is none of the last two, or rule is
            neither of the two.

    The formula is `tk.reference.mxfp8_quantize`.
    """
    require_matrix("mxfp8_quantize", "x", x, WIDE)
    require_choice("mxfp8_quantize", "rule", rule, ("rceil", "floor"))
    require_dtype("mxfp8_quantize", dtype, FP8)
    require_flag("mxfp8_quantize", "swizzle", swizzle)
    require_flag("mxfp8_quantize", "transpose", transpose)
    down = second_to_last("mxfp8_quantize", axis, x.dim())
    data, scale, data_t, scale_t = _op(
        x.mT if down else x, dtype, rule == "floor", swizzle, transpose
    )
    if down:
        data = data.mT
    if not transpose:
        return data, scale
    return data, scale, data_t.mT if down else data_t, scale_t


def _shapes(x: Tensor, dtype: torch.dtype, swizzle: bool, transpose: bool) -> list[tuple[int, ...]]:
    """Shapes of what the op returns."""
    require_matrix("mxfp8_quantize", "x", x, WIDE)
    require_dtype("mxfp8_quantize", dtype, FP8)
    shapes = [tuple(x.shape), scale_shape(x.shape, BLOCK, swizzle)]
    if not transpose:
        return [*shapes, (0,), (0,)]
    turned = (*x.shape[:-2], x.shape[-1], x.shape[-2])
    return [*shapes, turned, scale_shape(turned, BLOCK, swizzle)]


def _fake(
    x: Tensor,
    dtype: torch.dtype,
    floor: bool = False,
    swizzle: bool = True,
    transpose: bool = False,
) -> tuple[Tensor, ...]:
    shapes = _shapes(x, dtype, swizzle, transpose)
    return tuple(
        x.new_empty(shape, dtype=E8M0 if i % 2 else dtype) for i, shape in enumerate(shapes)
    )


def _cpu(
    x: Tensor,
    dtype: torch.dtype,
    floor: bool = False,
    swizzle: bool = True,
    transpose: bool = False,
) -> tuple[Tensor, ...]:
    _shapes(x, dtype, swizzle, transpose)
    if emulation.active():
        results = emulation.run(
            "mxfp8_quantize",
            {"x": x},
            data_dtype=emulation.NAMES[dtype],
            floor=floor,
            swizzle=swizzle,
            transpose=transpose,
        )
        made = [results["data"].view(dtype), results["scale"].view(E8M0)]
        if transpose:
            made += [results["data_t"].view(dtype), results["scale_t"].view(E8M0)]
    else:
        rule = "floor" if floor else "rceil"
        made = list(
            reference_mxfp8_quantize(
                x, rule=rule, dtype=dtype, swizzle=swizzle, transpose=transpose
            )
        )
    if not transpose:
        made += [x.new_empty(0, dtype=dtype), x.new_empty(0, dtype=E8M0)]
    return tuple(made)


def _vmap_rule(info: Any, in_dims: tuple[Any, ...], x: Tensor, *options: Any) -> tuple[Any, Any]:
    x = x.movedim(in_dims[0], 0)
    sizes = x.shape[:-2]
    results = _op(x.flatten(0, -3), *options)
    out_dims = tuple(None if r.dim() == 1 else 0 for r in results)
    results = tuple(r if r.dim() == 1 else r.unflatten(0, sizes) for r in results)
    return results, out_dims


register("mxfp8_quantize", fake=_fake, cpu=_cpu, vmap=_vmap_rule, differentiable=False)
