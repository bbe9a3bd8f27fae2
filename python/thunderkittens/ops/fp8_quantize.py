"""Quantisation to fp8, with one scale for a tensor, a row, 128 neighbours or 128 x 128 elements.

`fp8_quantize` brings x to the form that the op takes, (M, K), by a view. The result has no
gradient; `fp8_linear` is differentiable.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import emulation
from ..reference.fp8_quantize import fp8_quantize as reference_fp8_quantize
from ._gradient_call import one_by_one
from ._registration import register

GRANULARITIES = ("tensor", "row", "1x128", "128x128")
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_INPUTS = (torch.bfloat16, torch.float16, torch.float32)
_op = torch.ops.thunderkittens.fp8_quantize.default


def fp8_quantize(
    x: Tensor,
    granularity: str = "row",
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale: Tensor | None = None,
    transposed: bool = False,
) -> tuple[Tensor, ...]:
    """Codes and scales with `x = codes * scale`, up to rounding.

    `scale = amax / MAX` and `codes = round(x * (MAX / amax))` in float32, where amax is the largest
    magnitude of the elements that share a scale, and at least 2^-110, so that zeros give zeros.
    Ties go to even, values saturate at MAX. Elements that share a scale with an infinity or NaN
    become NaN when multiplied back: overflow is not hidden. One pass over memory, two for "tensor"
    without a scale and for "row" transposed. The result has no gradient.

    Args:
        x: (..., K), bfloat16, float16 or float32, any strides.
        granularity: which elements share a scale: "tensor" all, "row" those of a row, "1x128" 128
            neighbours of a row, "128x128" a block of a matrix.
        dtype: torch.float8_e4m3fn (MAX is 448) or torch.float8_e5m2 (57344).
        scale: float32 with one element, for "tensor" alone: the scale to be used.
        transposed: x is a matrix (M, K); the codes (K, M) and scales of its transpose are made at
            the same time, as a weight's gradient needs them.

    Returns:
        codes, of x's shape, contiguous, and the float32 scale: () for "tensor", (..., 1) for "row",
        (..., ceil(K / 128)) for "1x128" (a matrix's with neighbouring rows adjacent in memory, as
        products read them), (..., ceil(M / 128), ceil(K / 128)) for "128x128". If transposed, codes
        and scale of x^T follow.

    Raises:
        TypeError: x or scale is no dense tensor of a supported dtype, or dtype is not fp8.
        ValueError: granularity is none of the above, x has too few dimensions, scale has not one
            element or is given with another granularity, or transposed is asked of what is no
            matrix.

    The formula is `tk.reference.fp8_quantize`.
    """
    _check(x, granularity, dtype, scale, transposed)
    code = GRANULARITIES.index(granularity)
    if x.dim() > 2 and granularity == "128x128":
        matrices = [_op(part, code, dtype) for part in x.flatten(0, -3)]
        if not matrices:
            blocks = [-(-n // 128) for n in x.shape[-2:]]
            return x.new_empty(x.shape, dtype=dtype), x.new_empty(
                (*x.shape[:-2], *blocks), dtype=torch.float32
            )
        stacks = [torch.stack([m[i] for m in matrices]) for i in (0, 1)]
        return tuple(s.reshape(*x.shape[:-2], *s.shape[1:]) for s in stacks)
    matrix = x if x.dim() == 2 else x.reshape(_rows(x), x.shape[-1] if x.dim() else 1)
    codes, scales, codes_t, scales_t = _op(matrix, code, dtype, scale, transposed)
    if transposed:
        return codes, scales, codes_t, scales_t
    if x.dim() != 2:
        codes = codes.reshape(x.shape)
        if granularity != "tensor":
            scales = scales.reshape(*x.shape[:-1], scales.shape[-1])
    return codes, scales


def _rows(x: Tensor) -> int:
    rows = 1
    for n in x.shape[:-1]:
        rows *= n
    return rows


def _check(
    x: Any, granularity: Any, dtype: Any, scale: Any, transposed: bool, least: int = 0
) -> None:
    name = "tk.fp8_quantize"
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: x must be a torch.Tensor, got {type(x).__name__}")
    if x.layout is not torch.strided:
        raise TypeError(f"{name}: x must be a dense tensor (torch.strided), got {x.layout}")
    if x.dtype not in _INPUTS:
        raise TypeError(
            f"{name}: x is {x.dtype}; supported are torch.bfloat16, torch.float16 and torch.float32"
        )
    if dtype not in FP8_DTYPES:
        raise TypeError(
            f"{name}: dtype is {dtype}; supported are torch.float8_e4m3fn and torch.float8_e5m2"
        )
    if granularity not in GRANULARITIES:
        raise ValueError(
            f"{name}: granularity is {granularity!r}; it must be one of {GRANULARITIES}"
        )
    needed = {"tensor": 0, "row": 1, "1x128": 1, "128x128": 2}[granularity]
    if x.dim() < needed:
        raise ValueError(
            f"{name}: x has shape {tuple(x.shape)}; granularity {granularity!r} needs at least "
            f"{needed} dimensions"
        )
    if transposed and x.dim() != 2:
        raise ValueError(
            f"{name}: x has shape {tuple(x.shape)}; transposed needs a matrix (2 dimensions)"
        )
    if scale is None:
        return
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
        what = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
        raise TypeError(f"{name}: scale must be a float32 tensor, got {what}")
    if scale.device != x.device:
        raise TypeError(f"{name}: scale is on {scale.device}, x is on {x.device}")
    if granularity != "tensor" or scale.numel() != 1:
        raise ValueError(
            f"{name}: scale has shape {tuple(scale.shape)} with granularity {granularity!r}; it "
            "must have one element, and can be given for 'tensor' alone"
        )


# What the op thunderkittens::fp8_quantize does beside the CUDA implementation.


def _check_op(
    x: Tensor, granularity: int, dtype: torch.dtype | None, scale: Tensor | None, transposed: bool
) -> tuple[str, torch.dtype]:
    if not 0 <= granularity < len(GRANULARITIES) or x.dim() != 2:
        raise ValueError(
            f"thunderkittens::fp8_quantize: granularity is {granularity} and x has shape "
            f"{tuple(x.shape)}; the op takes 0 to 3 and a matrix"
        )
    dtype = dtype or torch.float8_e4m3fn
    _check(x, GRANULARITIES[granularity], dtype, scale, transposed)
    return GRANULARITIES[granularity], dtype


def _empty_scales(x: Tensor, granularity: str, m: Any, k: Any) -> Tensor:
    if granularity == "tensor":
        return x.new_empty((), dtype=torch.float32)
    if granularity == "row":
        return x.new_empty((m, 1), dtype=torch.float32)
    blocks = (k + 127) // 128
    if granularity == "128x128":
        return x.new_empty(((m + 127) // 128, blocks), dtype=torch.float32)
    pitch = torch.sym_max((m + 3) // 4 * 4, 1)
    return x.new_empty_strided((m, blocks), (1, pitch), dtype=torch.float32)


def _fake(
    x: Tensor,
    granularity: int = 1,
    dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
    transposed: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kind, dtype = _check_op(x, granularity, dtype, scale, transposed)
    m, k = x.shape
    scales = _empty_scales(x, kind, m, k)
    if not transposed:
        nothing = x.new_empty((0,), dtype=dtype), x.new_empty((0,), dtype=torch.float32)
        return x.new_empty((m, k), dtype=dtype), scales, *nothing
    return (
        x.new_empty((m, k), dtype=dtype),
        scales,
        x.new_empty((k, m), dtype=dtype),
        _empty_scales(x, kind, k, m),
    )


def _cpu(
    x: Tensor,
    granularity: int = 1,
    dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
    transposed: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kind, dtype = _check_op(x, granularity, dtype, scale, transposed)
    if emulation.active():
        results = emulation.run(
            "fp8_quantize",
            {"x": x, "scale": scale},
            granularity=granularity,
            dtype=emulation.NAMES[dtype],
            transposed=transposed,
        )
        found = [results.get(name) for name in ("out", "scale", "out_t", "scale_t")]
    else:
        found = list(
            reference_fp8_quantize(x, kind, dtype=dtype, scale=scale, transposed=transposed)
        )
        found += [None] * (4 - len(found))
    if not transposed:
        found[2:] = x.new_empty((0,), dtype=dtype), x.new_empty((0,), dtype=torch.float32)
    return tuple(found)  # type: ignore[return-value]


register(
    "fp8_quantize",
    fake=_fake,
    cpu=_cpu,
    vmap=one_by_one(_op),
    differentiable=False,
)
