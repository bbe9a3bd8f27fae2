"""From MXFP8 back to a wide dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import emulation
from ..reference.mxfp8_dequantize import mxfp8_dequantize as reference_mxfp8_dequantize
from ._block_scaled import (
    FP8,
    WIDE,
    mapped_first,
    require_dtype,
    require_flag,
    require_matrix,
    require_same_device,
    require_scale,
    require_tensor,
    second_to_last,
)
from ._registration import register

BLOCK = 32
_op = torch.ops.thunderkittens.mxfp8_dequantize.default


def mxfp8_dequantize(
    data: Tensor,
    scale: Tensor,
    *,
    axis: int = -1,
    swizzle: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Elements times the scales of their blocks, `data * 2^(byte - 127)`, rounded once to dtype.

    In float32 the product is exact, but where it overflows. A scale of 255 makes its block NaN. Not
    differentiable. Autocast leaves the operands as they are.

    Args:
        data: (M, K) or (B, M, K), float8_e4m3fn or float8_e5m2; any strides, read where it lies if
            its elements are adjacent along the axis.
        scale: float8_e8m0fnu, or the same bytes as uint8, of the shape that `tk.mxfp8_quantize`
            gives it, on data's device.
        axis: along which the blocks lie, -1 or -2, or the same two counted from the front.
        swizzle: whether the scales lie in the 128x4 layout, or plain.
        dtype: torch.bfloat16, torch.float16 or torch.float32.

    Returns:
        Of the shape of data and of dtype; contiguous along the axis.

    Raises:
        TypeError: data or scale is no dense tensor of these dtypes, or they are on different
            devices; dtype, axis or swizzle is of the wrong kind.
        ValueError: data has another number of dimensions, scale another shape, or axis is none
            of the last two.

    The formula is `tk.reference.mxfp8_dequantize`.
    """
    require_matrix("mxfp8_dequantize", "data", data, FP8)
    require_flag("mxfp8_dequantize", "swizzle", swizzle)
    down = second_to_last("mxfp8_dequantize", axis, data.dim())
    if down:
        data = data.mT
    _check(data, scale, dtype, swizzle)
    out: Tensor = _op(data, scale, dtype, swizzle)
    return out.mT if down else out


def _check(data: Tensor, scale: Tensor, dtype: torch.dtype, swizzle: bool) -> None:
    op = "mxfp8_dequantize"
    require_matrix(op, "data", data, FP8)
    require_tensor(op, "scale", scale, (torch.float8_e8m0fnu, torch.uint8))
    require_same_device(op, "scale", scale, "data", data)
    require_dtype(op, dtype, WIDE)
    require_scale(op, "scale", scale, data.shape, BLOCK, swizzle)


def _fake(data: Tensor, scale: Tensor, dtype: torch.dtype, swizzle: bool = True) -> Tensor:
    _check(data, scale, dtype, swizzle)
    return data.new_empty(data.shape, dtype=dtype)


def _cpu(data: Tensor, scale: Tensor, dtype: torch.dtype, swizzle: bool = True) -> Tensor:
    _check(data, scale, dtype, swizzle)
    if emulation.active():
        return emulation.run(
            "mxfp8_dequantize",
            {"data": data.view(torch.uint8), "scale": scale.view(torch.uint8)},
            data_dtype=emulation.NAMES[data.dtype],
            dtype=emulation.NAMES[dtype],
            swizzle=swizzle,
        )["out"]
    return reference_mxfp8_dequantize(data, scale, swizzle=swizzle, dtype=dtype)


def _vmap_rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
    data, scale = (mapped_first(args[i], in_dims[i], info.batch_size) for i in range(2))
    sizes = data.shape[:-2]
    out = _op(data.flatten(0, -3), scale.flatten(0, -3), *args[2:])
    return out.unflatten(0, sizes), 0


register("mxfp8_dequantize", fake=_fake, cpu=_cpu, vmap=_vmap_rule, differentiable=False)
