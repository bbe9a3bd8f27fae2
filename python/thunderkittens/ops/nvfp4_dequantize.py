"""From NVFP4 back to a wide dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import emulation
from ..reference.nvfp4_dequantize import nvfp4_dequantize as reference_nvfp4_dequantize
from ._block_scaled import (
    WIDE,
    mapped_first,
    require_dtype,
    require_flag,
    require_matrix,
    require_same_device,
    require_scale,
    require_tensor,
)
from ._registration import register

BLOCK = 16
_op = torch.ops.thunderkittens.nvfp4_dequantize.default


def nvfp4_dequantize(
    data: Tensor,
    block_scale: Tensor,
    global_scale: Tensor,
    *,
    swizzle: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Elements times the scales of their blocks, which is exact, times that of the matrix, in
    float32; rounded once to dtype.

    Not differentiable. Autocast leaves the operands as they are.

    Args:
        data: (M, K / 2) or (B, M, K / 2), float4_e2m1fn_x2 or the same bytes as uint8, the element
            of even index in the low four bits; read where it lies if its rows are contiguous.
        block_scale: float8_e4m3fn, of the shape that `tk.nvfp4_quantize` gives it.
        global_scale: float32, () or (B,).
        swizzle: whether the blocks' scales lie in the 128x4 layout, or plain.
        dtype: torch.bfloat16, torch.float16 or torch.float32.

    Returns:
        (M, K) or (B, M, K) of dtype, contiguous.

    Raises:
        TypeError: an operand is no dense tensor of these dtypes, or they are on different devices;
            dtype or swizzle is of the wrong kind.
        ValueError: data has another number of dimensions, or a scale another shape.

    The formula is `tk.reference.nvfp4_dequantize`.
    """
    require_flag("nvfp4_dequantize", "swizzle", swizzle)
    _check(data, block_scale, global_scale, dtype, swizzle)
    out: Tensor = _op(data, block_scale, global_scale, dtype, swizzle)
    return out


_NAMES = ("data", "block_scale", "global_scale")


def _check(
    data: Tensor, block_scale: Tensor, global_scale: Tensor, dtype: torch.dtype, swizzle: bool
) -> None:
    require_dtype("nvfp4_dequantize", dtype, WIDE)
    require_quantized("nvfp4_dequantize", _NAMES, data, block_scale, global_scale, swizzle)


def require_quantized(
    op: str,
    names: tuple[str, str, str],
    data: Any,
    block_scale: Any,
    global_scale: Any,
    swizzle: bool,
) -> None:
    """Raises what `nvfp4_dequantize` documents, in the words of an op with arguments of these
    names."""
    of_data, of_block, of_matrix = names
    require_matrix(op, of_data, data, (torch.float4_e2m1fn_x2, torch.uint8))
    require_tensor(op, of_block, block_scale, (torch.float8_e4m3fn,))
    require_tensor(op, of_matrix, global_scale, (torch.float32,))
    require_same_device(op, of_block, block_scale, of_data, data)
    require_same_device(op, of_matrix, global_scale, of_data, data)
    shape = (*data.shape[:-1], 2 * data.shape[-1])
    require_scale(op, of_block, block_scale, shape, BLOCK, swizzle)
    if global_scale.shape != data.shape[:-2]:
        raise ValueError(
            f"tk.{op}: {of_matrix} has shape {tuple(global_scale.shape)}; it must be "
            f"{tuple(data.shape[:-2])}, one value per matrix"
        )


def _fake(
    data: Tensor,
    block_scale: Tensor,
    global_scale: Tensor,
    dtype: torch.dtype,
    swizzle: bool = True,
) -> Tensor:
    _check(data, block_scale, global_scale, dtype, swizzle)
    return data.new_empty((*data.shape[:-1], 2 * data.shape[-1]), dtype=dtype)


def _cpu(
    data: Tensor,
    block_scale: Tensor,
    global_scale: Tensor,
    dtype: torch.dtype,
    swizzle: bool = True,
) -> Tensor:
    _check(data, block_scale, global_scale, dtype, swizzle)
    if emulation.active():
        return emulation.run(
            "nvfp4_dequantize",
            {
                "data": data.view(torch.uint8),
                "block_scale": block_scale.view(torch.uint8),
                "global_scale": global_scale,
            },
            dtype=emulation.NAMES[dtype],
            swizzle=swizzle,
        )["out"]
    return reference_nvfp4_dequantize(data, block_scale, global_scale, swizzle=swizzle, dtype=dtype)


def _vmap_rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
    operands = [mapped_first(args[i], in_dims[i], info.batch_size) for i in range(3)]
    sizes = operands[0].shape[:-2]
    data, block_scale = (x.flatten(0, -3) for x in operands[:2])
    out = _op(data, block_scale, operands[2].flatten(), *args[3:])
    return out.unflatten(0, sizes), 0


register("nvfp4_dequantize", fake=_fake, cpu=_cpu, vmap=_vmap_rule, differentiable=False)
