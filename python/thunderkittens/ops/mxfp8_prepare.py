"""MXFP8 operands that are kept for products on the fp8 tensor cores.

`mxfp8_prepare` is what `mxfp8_gemm(path="rebased")` does with its operands before it multiplies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import emulation
from ..reference._block_scaled import plain_scales, swizzle_scales
from ..reference.mxfp8_prepare import Mxfp8Operand, rescale
from ._block_scaled import (
    FP8,
    mapped_first,
    require_flag,
    require_matrix,
    require_same_device,
    require_scale,
    require_tensor,
)
from ._registration import register

BLOCK = 32
SCALES = (torch.float8_e8m0fnu, torch.uint8)
_op = torch.ops.thunderkittens.mxfp8_prepare.default


def mxfp8_prepare(data: Tensor, scale: Tensor, *, swizzle: bool = True) -> Mxfp8Operand:
    """An MXFP8 operand, a weight for example, with what `tk.mxfp8_gemm(path="rebased")` needs of
    it, made once instead of in every call.

    Each block's elements are multiplied by a power of two, so that all of a row are relative to one
    scale, and stored in e4m3. That is exact but for elements that become small. Where one would
    move by more than 2^-9 of the largest magnitude of its block, which is how much bfloat16 rounds
    that one, the rows go into the tile mask, and products with them use `data` and `scale`.
    Not differentiable.

    Args:
        data: (rows, K), or (E, rows, K), float8_e4m3fn or float8_e5m2; any strides. A weight (N, K)
            stands for b = (K, N).
        scale: float8_e8m0fnu, or the same bytes as uint8, of the shape that `tk.mxfp8_quantize`
            gives it, on data's device.
        swizzle: whether the scales lie in the 128x4 layout, or plain.

    Returns:
        An `Mxfp8Operand`, a named tuple of plain tensors: data and scale (in the 128x4 layout), as
        they were given where possible, and codes, factor and marks. It takes twice the memory of
        data. `Mxfp8Operand(*tensors)` restores one that has been saved.

    Raises:
        TypeError: data or scale is no dense tensor of these dtypes, or they are on different
            devices; swizzle is no bool.
        ValueError: data has another number of dimensions, or scale another shape.
        NotImplementedError: `torch.func.vmap` maps a plain scale.
    """
    require_flag("mxfp8_prepare", "swizzle", swizzle)
    _check(data, scale, swizzle)
    if not swizzle and torch._C._functorch.is_batchedtensor(scale):
        raise NotImplementedError(
            "tk.mxfp8_prepare: vmap over scale needs it in the 128x4 layout (swizzle=True)"
        )
    codes, factor, marks = _op(data, scale, swizzle)
    if not swizzle:
        scale = swizzle_scales(scale.view(torch.uint8)).view(torch.float8_e8m0fnu)
    return Mxfp8Operand(data, scale, codes, factor, marks)


def _check(data: Any, scale: Any, swizzle: bool) -> None:
    op = "mxfp8_prepare"
    require_matrix(op, "data", data, FP8)
    require_tensor(op, "scale", scale, SCALES)
    require_same_device(op, "scale", scale, "data", data)
    require_scale(op, "scale", scale, data.shape, BLOCK, swizzle)


# What the op thunderkittens::mxfp8_prepare does beside the CUDA implementation.


def _fake(data: Tensor, scale: Tensor, swizzle: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    _check(data, scale, swizzle)
    *batch, rows, columns = data.shape
    pitch, words = (columns + 15) // 16 * 16, (rows + 127) // 128
    return (
        data.new_empty((*batch, rows, pitch), dtype=torch.float8_e4m3fn),
        data.new_empty((*batch, rows), dtype=torch.float32),
        data.new_empty((*batch, words, 8), dtype=torch.uint8),
    )


def _cpu(data: Tensor, scale: Tensor, swizzle: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    _check(data, scale, swizzle)
    if emulation.active():
        arrays = {"data": data, "scale": scale.view(torch.uint8)}
        result = emulation.run("mxfp8_prepare", arrays, swizzle=swizzle)
        return result["codes"], result["factor"], result["marks"].view(torch.uint8)
    rows, columns = data.shape[-2:]
    plain = scale.view(torch.uint8)
    if swizzle:
        plain = plain_scales(plain, rows, -(-columns // BLOCK))
    return rescale(data, plain)


def _vmap_rule(
    info: Any, in_dims: tuple[Any, ...], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    data, scale = (mapped_first(args[i], in_dims[i], info.batch_size) for i in range(2))
    sizes = data.shape[:-2]
    results = _op(data.flatten(0, -3), scale.flatten(0, -3), *args[2:])
    return tuple(x.unflatten(0, sizes) for x in results), (0, 0, 0)


register("mxfp8_prepare", fake=_fake, cpu=_cpu, vmap=_vmap_rule, differentiable=False)
