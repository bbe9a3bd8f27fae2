"""NVFP4 weights in the order in which the kernel of `tk.nvfp4_gemm` needs them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import emulation
from ..reference.nvfp4_prepare import PIECE, PIECE_BYTES, Nvfp4Weight, prepared, values
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
_op = torch.ops.thunderkittens.nvfp4_prepare.default
_restore = torch.ops.thunderkittens.nvfp4_dequantize.prepared


def nvfp4_prepare(
    weight: Tensor, block_scale: Tensor, global_scale: Tensor, *, swizzle: bool = True
) -> Nvfp4Weight:
    """An NVFP4 weight in the layout that `tk.nvfp4_gemm` multiplies with, made once.

    The result holds the same values in the same number of bytes (both dimensions rounded up to
    multiples of 64), and takes activations of either dtype. It consists of plain tensors and
    numbers; the layout, which `tk.reference.nvfp4_prepare` documents, is the same for every device
    and stays the same from the first release on. Not differentiable.

    Args:
        weight: (N, K / 2), or (E, N, K / 2) for E experts, float4_e2m1fn_x2 or the same bytes as
            uint8, the element of even index in the low four bits; K is a multiple of 16.
        block_scale: float8_e4m3fn, of the shape that `tk.nvfp4_quantize` gives it.
        global_scale: float32, () or (E,): what elements times scales have to be multiplied by.
        swizzle: whether the blocks' scales lie in the 128x4 layout, or plain.

    Returns:
        An `Nvfp4Weight`: data, global_scale, rows (N) and columns (K).

    Raises:
        TypeError: an operand is no dense tensor of these dtypes, or they are on different devices;
            swizzle is no bool.
        ValueError: weight has another number of dimensions, K is no multiple of 16, or a scale has
            another shape.

    The layout is that of `tk.reference.nvfp4_prepare`.
    """
    require_flag("nvfp4_prepare", "swizzle", swizzle)
    require_weight("nvfp4_prepare", _NAMES, weight, block_scale, global_scale, swizzle)
    data = _op(weight, block_scale, swizzle)
    return Nvfp4Weight(data, global_scale, weight.shape[-2], 2 * weight.shape[-1])


_NAMES = ("weight", "block_scale", "global_scale")


def require_weight(
    op: str,
    names: tuple[str, str, str],
    weight: Any,
    block_scale: Any,
    global_scale: Any,
    swizzle: bool,
) -> None:
    """Raises what `nvfp4_prepare` documents, in the words of an op whose arguments have these
    names."""
    _check(weight, block_scale, swizzle, op, names)
    require_tensor(op, names[2], global_scale, (torch.float32,))
    require_same_device(op, names[2], global_scale, names[0], weight)
    if global_scale.shape != weight.shape[:-2]:
        raise ValueError(
            f"tk.{op}: {names[2]} has shape {tuple(global_scale.shape)}; it must be "
            f"{tuple(weight.shape[:-2])}, one value per matrix"
        )


def prepared_shape(rows: int, columns: int) -> tuple[int, int, int]:
    """The shape of a prepared matrix."""
    return -(-rows // PIECE), -(-columns // PIECE), PIECE_BYTES


def _check(
    weight: Any,
    block_scale: Any,
    swizzle: bool,
    op: str = "nvfp4_prepare",
    names: tuple[str, ...] = _NAMES,
) -> None:
    of_weight, of_scale = names[:2]
    require_matrix(op, of_weight, weight, (torch.float4_e2m1fn_x2, torch.uint8))
    require_tensor(op, of_scale, block_scale, (torch.float8_e4m3fn,))
    require_same_device(op, of_scale, block_scale, of_weight, weight)
    columns = 2 * weight.shape[-1]
    if columns % BLOCK != 0:
        raise ValueError(
            f"tk.{op}: {of_weight} has {columns} columns in {weight.shape[-1]} bytes; they must be "
            f"a multiple of {BLOCK}"
        )
    shape = (*weight.shape[:-1], columns)
    require_scale(op, of_scale, block_scale, shape, BLOCK, swizzle)


def _fake(data: Tensor, block_scale: Tensor, swizzle: bool = True) -> Tensor:
    _check(data, block_scale, swizzle)
    shape = (*data.shape[:-2], *prepared_shape(data.shape[-2], 2 * data.shape[-1]))
    return data.new_empty(shape, dtype=torch.uint8)


def _cpu(data: Tensor, block_scale: Tensor, swizzle: bool = True) -> Tensor:
    _check(data, block_scale, swizzle)
    if emulation.active():
        bytes_ = {"data": data.view(torch.uint8), "block_scale": block_scale.view(torch.uint8)}
        out = emulation.run("nvfp4_prepare", bytes_, swizzle=swizzle)["out"]
        return out.view(torch.uint8)
    return prepared(data, block_scale, swizzle)


def _vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
    data, block_scale = (mapped_first(args[i], in_dims[i], info.batch_size) for i in range(2))
    out = _op(data.flatten(0, -3), block_scale.flatten(0, -3), *args[2:])
    return out.unflatten(0, data.shape[:-2]), 0


# Back to values: thunderkittens::nvfp4_dequantize.prepared.


def _check_prepared(
    data: Tensor, global_scale: Tensor, rows: int, columns: int, dtype: torch.dtype
) -> None:
    op = "nvfp4_dequantize"
    require_tensor(op, "data", data, (torch.uint8,))
    require_tensor(op, "global_scale", global_scale, (torch.float32,))
    require_same_device(op, "global_scale", global_scale, "data", data)
    require_dtype(op, dtype, WIDE)
    if data.dim() not in (3, 4) or tuple(data.shape[-3:]) != prepared_shape(rows, columns):
        raise ValueError(
            f"tk.{op}: data has shape {tuple(data.shape)}; it is no prepared weight of {rows} x "
            f"{columns}"
        )
    if global_scale.shape != data.shape[:-3]:
        raise ValueError(
            f"tk.{op}: global_scale has shape {tuple(global_scale.shape)}; it must be "
            f"{tuple(data.shape[:-3])}, one value per matrix"
        )


def _restore_fake(
    data: Tensor, global_scale: Tensor, rows: int, columns: int, dtype: torch.dtype
) -> Tensor:
    _check_prepared(data, global_scale, rows, columns, dtype)
    return data.new_empty((*data.shape[:-3], rows, columns), dtype=dtype)


def _restore_cpu(
    data: Tensor, global_scale: Tensor, rows: int, columns: int, dtype: torch.dtype
) -> Tensor:
    _check_prepared(data, global_scale, rows, columns, dtype)
    if emulation.active():
        return emulation.run(
            "nvfp4_dequantize.prepared",
            {"data": data, "global_scale": global_scale},
            rows=rows,
            columns=columns,
            dtype=emulation.NAMES[dtype],
        )["out"]
    return (values(data, rows, columns) * global_scale[..., None, None]).to(dtype)


def _restore_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
    data, scale = (mapped_first(args[i], in_dims[i], info.batch_size) for i in range(2))
    sizes = data.shape[:-3]
    out = _restore(data.flatten(0, -4), scale.flatten(), *args[2:])
    return out.unflatten(0, sizes), 0


register("nvfp4_prepare", fake=_fake, cpu=_cpu, vmap=_vmap)
register(
    "nvfp4_dequantize.prepared",
    fake=_restore_fake,
    cpu=_restore_cpu,
    vmap=_restore_vmap,
    differentiable=False,
)
