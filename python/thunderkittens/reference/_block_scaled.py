"""What the block-scaled formats share: blocks, e8m0 scales, the 128x4 layout of scales."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
#: floor(log2) of the largest element, for the rule "floor".
FP8_MAX_EXPONENT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}


def blocks_of(x: Tensor, block: int) -> Tensor:
    """(..., K) as (..., ceil(K / block), block), zeros past the end."""
    result: Tensor = F.pad(x, (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))
    return result


def bits_of(x: Tensor) -> Tensor:
    """The bits of float32 as int64 in [0, 2^32)."""
    return x.contiguous().view(torch.int32).long() & 0xFFFFFFFF


def float_of(bits: Tensor) -> Tensor:
    """float32 of int64 bits that are below 2^31."""
    return bits.to(torch.int32).view(torch.float32)


def e8m0_inverse(byte: Tensor) -> Tensor:
    """2^(127 - byte) in float32; NaN for 255."""
    bits = torch.where(byte == 254, 0x400000, (254 - byte).clamp(min=0) << 23)
    return float_of(torch.where(byte == 255, 0x7FC00000, bits))


def e8m0_value(byte: Tensor) -> Tensor:
    """2^(byte - 127) in float32; NaN for 255."""
    bits = torch.where(byte == 0, 0x400000, byte << 23)
    return float_of(torch.where(byte == 255, 0x7FC00000, bits))


def to_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to nearest even and saturated, infinity too; every NaN is 0x7f."""
    top = FP8_MAX[dtype]
    codes = x.clamp(-top, top).to(dtype).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, codes).to(torch.uint8).view(dtype)


def swizzle_scales(scale: Tensor) -> Tensor:
    """Scales (..., R, C) of one byte each in the 128x4 layout, (..., roundup(R, 128),
    roundup(C, 4)), zero in the padding.

    128 rows by 4 columns are an atom of 512 bytes, in which row r, column c lies at
    r % 32 * 16 + r // 32 * 4 + c; the atoms of the first 128 rows come first.
    """
    scale = F.pad(scale, (0, -scale.shape[-1] % 4, 0, -scale.shape[-2] % 128))
    *batch, rows, columns = scale.shape
    atoms = scale.reshape(*batch, rows // 128, 4, 32, columns // 4, 4)
    # down, group, line, across, column -> down, across, line, group, column
    return atoms.movedim((-5, -2, -3, -4), (-5, -4, -3, -2)).reshape(*batch, rows, columns)


def plain_scales(scale: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `swizzle_scales`: (..., rows, columns)."""
    *batch, padded_rows, padded_columns = scale.shape
    atoms = scale.reshape(*batch, padded_rows // 128, padded_columns // 4, 32, 4, 4)
    plain = atoms.movedim((-5, -4, -3, -2), (-5, -2, -3, -4))
    return plain.reshape(*batch, padded_rows, padded_columns)[..., :rows, :columns]
