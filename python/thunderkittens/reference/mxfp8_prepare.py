"""`tk.mxfp8_prepare` in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._block_scaled import blocks_of, plain_scales, swizzle_scales, to_fp8

BLOCK = 32
#: Exponents of the scales of rows, beyond which the rows go into the tile mask.
MAX_EXPONENT = 96


class Mxfp8Operand(NamedTuple):
    """An MXFP8 operand that is kept, with what the rescaled products need of it.

    Plain tensors: they can be saved, moved and registered as buffers one by one, and
    `Mxfp8Operand(*tensors)` is the operand again.

    Attributes:
        data: (rows, K), the elements as they were quantised.
        scale: of data, in the 128x4 layout.
        codes: float8_e4m3fn (rows, K rounded up to 16), the elements relative to their row's scale.
        factor: float32 (rows,), the scale of each row, a power of two.
        marks: the tile mask, uint8 (rows / 128 rounded up, 8): where not 0, `codes` is not good
            enough for some of 16 rows of 128, and products with those use data and scale.
    """

    data: Tensor
    scale: Tensor
    codes: Tensor
    factor: Tensor
    marks: Tensor


def mxfp8_prepare(data: Tensor, scale: Tensor, *, swizzle: bool = True) -> Mxfp8Operand:
    """Elements relative to the largest scale of their row, in e4m3.

    Args:
        data: (..., rows, K), float8_e4m3fn or float8_e5m2.
        scale: as `tk.mxfp8_quantize` makes it.
        swizzle: whether the scales lie in the 128x4 layout.

    Returns:
        An `Mxfp8Operand`.
    """
    rows, columns = data.shape[-2:]
    plain = scale.view(torch.uint8)
    if swizzle:
        plain = plain_scales(plain, rows, -(-columns // BLOCK))
    else:
        scale = swizzle_scales(plain).view(torch.float8_e8m0fnu)
    codes, factor, marks = rescale(data, plain)
    return Mxfp8Operand(data, scale, codes, factor, marks)


def rescale(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, factors and marks of elements with plain scales."""
    is_e5m2 = data.dtype == torch.float8_e5m2
    byte = scale.long()
    largest = F.pad(torch.where(byte == 255, 0, byte), (0, 1)).amax(-1, keepdim=True)
    shift = largest - byte
    exponent = largest.squeeze(-1) - 127 + (7 if is_e5m2 else 0)
    beyond = exponent.abs() > MAX_EXPONENT
    factor = torch.exp2(torch.where(beyond, 0, exponent).float())
    # In e4m3 the largest exponent is 8, in e5m2 15.
    down = torch.exp2(-(shift + (7 if is_e5m2 else 0)).clamp(max=100).float())
    values = blocks_of(data.float(), BLOCK)
    codes = to_fp8(values * down.unsqueeze(-1), torch.float8_e4m3fn)
    # An element moves by at most 2^-10, half of e4m3's smallest number.
    some = (values != 0).any(-1)
    small = ~(codes.float().abs() >= 0.5).any(-1) & ~(codes.float().isnan().any(-1))
    marked = some & (beyond.unsqueeze(-1) | (small & ((shift > 0) | is_e5m2)))
    marked |= byte == 255
    if is_e5m2:
        marked |= ~values.isfinite().all(-1)
    of_rows = F.pad(marked.any(-1), (0, -data.shape[-2] % 128))
    # Of 128 rows a mark stands for four neighbours and the same 32, 64 and 96 further on.
    marks = of_rows.unflatten(-1, (-1, 4, 8, 4)).any(-1).any(-2).to(torch.uint8)
    flat = codes.flatten(-2).view(torch.uint8)[..., : data.shape[-1]]
    flat = F.pad(flat, (0, -data.shape[-1] % 16))
    return flat.view(torch.float8_e4m3fn), factor, marks
