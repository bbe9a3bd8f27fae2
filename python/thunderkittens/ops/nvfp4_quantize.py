"""Quantisation to NVFP4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import emulation
from ..reference.nvfp4_quantize import nvfp4_quantize as reference_nvfp4_quantize
from ._block_scaled import (
    WIDE,
    mapped_first,
    require_choice,
    require_flag,
    require_matrix,
    require_same_device,
    require_tensor,
    scale_shape,
)
from ._registration import register

BLOCK = 16
FP4, E4M3 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
_op = torch.ops.thunderkittens.nvfp4_quantize.default


def nvfp4_quantize(
    x: Tensor,
    *,
    global_scale: Tensor | None = None,
    block: str = "1x16",
    swizzle: bool = True,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantises to NVFP4: e2m1 elements, 16 neighbours of which share an e4m3 scale, and a global
    scale in float32 per matrix. x is about `data * block_scale * global_scale`.

    The recipe is that of NVIDIA's Transformer Engine, to the bit, every operation in float32. With
    the largest magnitude G of the matrix, `encode = min(2688 / G, FLT_MAX)`. With that of a block,
    b, its scale is `e4m3(min(b * (encode * fl(1/6)), FLT_MAX))`, and its elements are
    `e2m1(x * min(1 / (scale * (1 / encode)), FLT_MAX))`, both rounded to nearest even and
    saturated. Where G is 0, infinite or NaN, encode and the global scale are 1. A NaN in a block
    makes its scale NaN (0x7f) and its elements 7, which `tk.nvfp4_dequantize` makes NaN.

    Where the global scale is to be found, x is read twice, by two kernels on the caller's stream;
    the host waits for nothing. x is read where it lies if its base and row strides are multiples
    of 16 bytes and its elements adjacent, and is copied otherwise. Not differentiable. Autocast
    leaves x as it is.

    Args:
        x: (M, K) or (B, M, K), bfloat16, float16 or float32; K even.
        global_scale: float32, () or (B,), on the device of x: the scales to take, with
            `encode = 1 / global_scale`, e.g. of an earlier batch. None: those of x, G / 2688.
        block: "1x16", along K, or "16x16", for weights that are also used transposed: each square
            has one scale, which is returned for each of its rows.
        swizzle: whether the blocks' scales lie in the 128x4 layout (`SwizzleType.SWIZZLE_32_4_4`
            of PyTorch), or plain.
        seed: int64, one number, on the device of x: rounds elements stochastically. A magnitude
            between two values is rounded up with a probability that is its place between them, in
            steps of 2^-9, from Philox4x32-10 with the seed as key and the place in x as counter;
            equal seeds give equal results.

    Returns:
        (data, block_scale, global_scale). data: float4_e2m1fn_x2, (..., M, K / 2), the element of
        even index in the low four bits. block_scale: float8_e4m3fn, (..., M, ceil(K / 16)), and
        with swizzle (..., roundup(M, 128), roundup(ceil(K / 16), 4)), zero in the padding.
        global_scale: float32, () or (B,).

    Raises:
        TypeError: x, global_scale or seed is no dense tensor of these dtypes, or they are on
            different devices; block or swizzle is of the wrong kind.
        ValueError: x has another number of dimensions, K is odd, global_scale has another shape,
            seed more than one element, or block is neither of the two.

    The formula is `tk.reference.nvfp4_quantize`.
    """
    require_choice("nvfp4_quantize", "block", block, ("1x16", "16x16"))
    require_flag("nvfp4_quantize", "swizzle", swizzle)
    _check(x, global_scale, seed)
    data, block_scale, scale = _op(x, global_scale, block == "16x16", swizzle, seed)
    return data, block_scale, scale


def _check(x: Tensor, global_scale: Tensor | None, seed: Tensor | None) -> None:
    op = "nvfp4_quantize"
    require_matrix(op, "x", x, WIDE)
    if x.shape[-1] % 2:
        raise ValueError(
            f"tk.{op}: x has shape {tuple(x.shape)}; its last dimension must be even, because two "
            "elements share a byte"
        )
    if global_scale is not None:
        require_tensor(op, "global_scale", global_scale, (torch.float32,))
        require_same_device(op, "global_scale", global_scale, "x", x)
        if global_scale.shape != x.shape[:-2]:
            raise ValueError(
                f"tk.{op}: global_scale has shape {tuple(global_scale.shape)}; it must be "
                f"{tuple(x.shape[:-2])}, one value per matrix"
            )
    if seed is not None:
        require_tensor(op, "seed", seed, (torch.int64,))
        require_same_device(op, "seed", seed, "x", x)
        if seed.numel() != 1:
            raise ValueError(f"tk.{op}: seed has shape {tuple(seed.shape)}; it must be one number")


def _fake(
    x: Tensor,
    global_scale: Tensor | None = None,
    square: bool = False,
    swizzle: bool = True,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, global_scale, seed)
    return (
        x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=FP4),
        x.new_empty(scale_shape(x.shape, BLOCK, swizzle), dtype=E4M3),
        x.new_empty(x.shape[:-2], dtype=torch.float32),
    )


def _cpu(
    x: Tensor,
    global_scale: Tensor | None = None,
    square: bool = False,
    swizzle: bool = True,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, global_scale, seed)
    if emulation.active():
        words = None if seed is None else seed.reshape(1).view(torch.int32)
        results = emulation.run(
            "nvfp4_quantize",
            {"x": x, "global_scale": global_scale, "seed": words},
            square=square,
            swizzle=swizzle,
        )
        return (
            results["data"].view(FP4),
            results["block_scale"].view(E4M3),
            results["global_scale"],
        )
    return reference_nvfp4_quantize(
        x,
        global_scale=global_scale,
        block="16x16" if square else "1x16",
        swizzle=swizzle,
        seed=seed,
    )


def _vmap_rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    defaults: tuple[Any, ...] = (None, None, False, True, None)
    x, global_scale, square, swizzle, seed = (*args, *defaults[len(args) :])
    dims = (*in_dims, None, None, None, None)[:5]
    if dims[4] is not None:
        raise RuntimeError("tk.nvfp4_quantize: torch.func.vmap over seed is not supported")
    x = mapped_first(x, dims[0], info.batch_size)
    sizes = x.shape[:-2]
    if global_scale is not None:
        global_scale = mapped_first(global_scale, dims[1], info.batch_size).flatten()
    results = _op(x.flatten(0, -3), global_scale, square, swizzle, seed)
    return tuple(r.unflatten(0, sizes) for r in results), (0, 0, 0)


register("nvfp4_quantize", fake=_fake, cpu=_cpu, vmap=_vmap_rule, differentiable=False)
