"""`tk.fp8_quantize` in plain PyTorch: scales from the largest magnitudes, and a rounding to fp8."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

SMALLEST_AMAX = 2.0**-110


def fp8_quantize(
    x: Tensor,
    granularity: str = "row",
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale: Tensor | None = None,
    transposed: bool = False,
) -> tuple[Tensor, ...]:
    """x as codes * scale: codes = round(x * (MAX / amax)), scale = amax / MAX, in float32, with
    amax the largest magnitude of the elements that share a scale, and at least 2^-110.

    Args:
        x: (..., K), any floating-point dtype that float32 holds.
        granularity: "tensor", "row", "1x128" (128 neighbours of a row) or "128x128".
        dtype: torch.float8_e4m3fn (MAX is 448) or torch.float8_e5m2 (57344). Values saturate at
            MAX, ties go to even.
        scale: for "tensor": the scale, instead of that of the formula; x is multiplied by
            1 / scale.
        transposed: x is a matrix; codes and scales of its transpose follow.

    Returns:
        codes (..., K) and scale: (), (..., 1), (..., ceil(K / 128)), or (..., ceil(M / 128),
        ceil(K / 128)); if transposed, those of x^T after them.
    """
    limit = x.new_full((), torch.finfo(dtype).max, dtype=torch.float32)
    values = x.float()
    lengths = {"tensor": None, "row": None, "1x128": (1, 128), "128x128": (128, 128)}[granularity]
    if granularity == "tensor" and scale is not None:
        scales, factor = scale.reshape(()), torch.ones_like(limit) / scale.reshape(())
        # A copy: an output of an op is no view of its input.
        scales = scales.clone()
    else:
        if lengths is None:
            magnitudes = values.abs() if granularity == "row" else values.abs().reshape(-1)
            if magnitudes.shape[-1] == 0:
                amax = values.new_zeros((*magnitudes.shape[:-1], 1))
            else:
                amax = magnitudes.amax(-1, keepdim=True)
            amax = amax if granularity == "row" else amax.reshape(())
        else:
            amax = _blocks(values.abs(), *lengths)
        # NaN stays.
        amax = torch.where(amax < SMALLEST_AMAX, SMALLEST_AMAX, amax)
        # Divisions by tensors: PyTorch multiplies by the reciprocal of a number.
        scales, factor = torch.div(amax, limit.expand_as(amax)), torch.div(limit, amax)
        if lengths is not None:
            factor = _spread(factor, values.shape, *lengths)
    values = (values * factor).clamp(-float(limit), float(limit))
    # NaN has no sign.
    codes = torch.where(values.isnan(), torch.nan, values).to(dtype).contiguous()
    if granularity == "1x128" and x.dim() == 2:
        scales = _rows_adjacent(scales)
    if not transposed:
        return codes, scales
    more = fp8_quantize(x.mT.contiguous(), granularity, dtype=dtype, scale=scale)
    return codes, scales, *more


def _blocks(magnitudes: Tensor, rows: int, cols: int) -> Tensor:
    """The largest value of each block; ragged ones are filled with zeros."""
    if rows == 1:
        filled = pad(magnitudes, (0, -magnitudes.shape[-1] % cols))
        return _amax(filled.unflatten(-1, (filled.shape[-1] // cols, cols)), (-1,))
    m, k = magnitudes.shape[-2:]
    filled = pad(magnitudes, (0, -k % cols, 0, -m % rows))
    filled = filled.unflatten(-1, (filled.shape[-1] // cols, cols))
    return _amax(filled.unflatten(-3, (filled.shape[-3] // rows, rows)), (-1, -3))


def _amax(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x.amax(dims)


def _spread(factor: Tensor, shape: torch.Size, rows: int, cols: int) -> Tensor:
    """The factor of each element's block."""
    factor = factor.repeat_interleave(cols, -1)[..., : shape[-1]]
    return factor if rows == 1 else factor.repeat_interleave(rows, -2)[..., : shape[-2], :]


def _rows_adjacent(scales: Tensor) -> Tensor:
    """In the memory layout of the op: neighbouring rows adjacent, padded to multiples of four."""
    m, blocks = scales.shape
    whole = scales.new_empty(blocks, max(m + -m % 4, 1))
    view = whole[:, :m].t()
    view.copy_(scales)
    return view
