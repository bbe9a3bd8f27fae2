"""`tk.nvfp4_prepare` in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._block_scaled import plain_scales
from .nvfp4_dequantize import BLOCK, VALUES

#: Rows and columns of a piece, and its bytes: the elements, and their scales.
PIECE = 64
PIECE_BYTES = PIECE * PIECE // 2 + PIECE * PIECE // BLOCK
#: Where the bits of an element (sign, the two of the exponent, mantissa) lie in its half of a word,
#: for the four elements of the half; a sign of 16 or more is in the other half.
BITS = ((9, 2, 1, 0), (13, 6, 5, 4), (19, 12, 11, 10), (15, 8, 7, 14))


class Nvfp4Weight(NamedTuple):
    """An NVFP4 matrix, or one per expert, as `tk.nvfp4_prepare` makes it for `tk.nvfp4_gemm`.

    Plain tensors and numbers: register the tensors as buffers, or save the tuple. The layout of
    `data` is that of `tk.reference.nvfp4_prepare`; `to` moves the tensors.
    """

    data: Tensor  #: uint8 (ceil(N / 64), ceil(K / 64), 2304), or (E, ...)
    global_scale: Tensor  #: float32 () or (E,)
    rows: int  #: N
    columns: int  #: K

    def to(self, device: torch.device | str) -> Nvfp4Weight:
        """The same on another device."""
        return self._replace(data=self.data.to(device), global_scale=self.global_scale.to(device))


def nvfp4_prepare(
    weight: Tensor, block_scale: Tensor, global_scale: Tensor, *, swizzle: bool = True
) -> Nvfp4Weight:
    """An NVFP4 matrix in the order in which the kernel of `tk.nvfp4_gemm` needs it.

    A piece of 64 x 64 elements is four strips of 16 rows, each 512 bytes of elements and 64 of
    scales. Thread t of 32 has rows r = t // 4 and r + 8 of a strip. Of each 16 columns, columns
    2 q, 2 q + 1, 2 q + 8 and 2 q + 9 with q = t % 4 are its word of 32 bits, the even ones in the
    low half; `BITS` is the order in a half, of (r, 2 q), (r + 8, 2 q), (r, 2 q + 8) and
    (r + 8, 2 q + 8).
    A thread's four words are side by side. The scales are bytes eeeeemmm, 2^(e - 10) * (1 + m / 8);
    NaN is e = 19; the sign of a scale, and a scale of zero, are in the elements.

    Args:
        weight: (..., N, K / 2), float4_e2m1fn_x2 or its bytes; K is a multiple of 16.
        block_scale: float8_e4m3fn, as `tk.nvfp4_quantize` makes it.
        global_scale: float32, of the leading dimensions.
        swizzle: whether the blocks' scales lie in the 128x4 layout.

    Returns:
        An `Nvfp4Weight`; `data` is uint8 (..., ceil(N / 64), ceil(K / 64), 2304).
    """
    data = prepared(weight, block_scale, swizzle)
    return Nvfp4Weight(data, global_scale, weight.shape[-2], 2 * weight.shape[-1])


def prepared(weight: Tensor, block_scale: Tensor, swizzle: bool) -> Tensor:
    """The `data` of an `Nvfp4Weight`."""
    codes = weight.view(torch.uint8).int()
    codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    n, k = codes.shape[-2:]
    scale = block_scale.view(torch.uint8)
    if swizzle:
        scale = plain_scales(scale, n, k // BLOCK)
    scale = scale.int()
    signs = (scale >> 7 << 3).repeat_interleave(BLOCK, -1)
    zeros = (scale & 127 == 0).repeat_interleave(BLOCK, -1)
    codes = torch.where(zeros, 0, codes ^ signs)
    scale = _scale_bytes(weight.device)[scale & 127]

    padding = (0, -k % PIECE, 0, -n % PIECE)
    codes = F.pad(codes, padding)
    scale = F.pad(scale, (0, padding[1] // BLOCK, 0, padding[3]))
    rows, columns = codes.shape[-2] // PIECE, codes.shape[-1] // PIECE
    # row: piece, warp, half, line; column: piece, product, half, q, odd
    codes = codes.unflatten(-1, (columns, 4, 2, 4, 2)).unflatten(-6, (rows, 4, 2, 8))
    # piece, piece, warp, line, q, product, column half, row half, odd
    codes = codes.movedim((-9, -5, -8, -6, -2, -4, -3, -7, -1), tuple(range(-9, 0)))
    word = torch.zeros(codes.shape[:-3], dtype=torch.int64, device=weight.device)
    for i, (sign, *others) in enumerate(BITS):
        for odd in range(2):
            code = codes[..., i // 2, i % 2, odd].long()
            word |= (code >> 3) << (sign + 16 * odd) % 32
            for bit, place in zip((2, 1, 0), others, strict=True):
                word |= (code >> bit & 1) << place + 16 * odd
    words = torch.stack([word >> 8 * i & 255 for i in range(4)], -1).flatten(-4)
    # row: piece, warp, half, line; column: piece, pair of products, product
    scale = scale.unflatten(-1, (columns, 2, 2)).unflatten(-4, (rows, 4, 2, 8))
    scale = scale.movedim((-7, -3, -6, -4, -2, -5, -1), tuple(range(-7, 0)))
    return torch.cat((words, scale.flatten(-4)), -1).flatten(-2).to(torch.uint8)


def values(data: Tensor, rows: int, columns: int) -> Tensor:
    """Elements times the scales of their blocks, from the `data` of an `Nvfp4Weight`: float32
    (..., rows, columns)."""
    row_pieces, column_pieces = data.shape[-3:-1]
    strips = data.long().unflatten(-1, (4, PIECE_BYTES // 4))
    bytes_ = strips[..., :512].unflatten(-1, (8, 4, 4, 4))
    word = sum(bytes_[..., i] << 8 * i for i in range(4))
    codes = []
    for sign, *others in BITS:
        for odd in range(2):
            code = (word >> (sign + 16 * odd) % 32 & 1) << 3
            for bit, place in zip((2, 1, 0), others, strict=True):
                code |= (word >> place + 16 * odd & 1) << bit
            codes.append(code)
    # piece, piece, warp, line, q, product, column half, row half, odd
    code = torch.stack(codes, -1).unflatten(-1, (2, 2, 2))
    # row: piece, warp, half, line; column: piece, product, half, q, odd
    code = code.movedim((-9, -7, -2, -6, -8, -4, -3, -5, -1), tuple(range(-9, 0)))
    code = code.flatten(-9, -6).flatten(-5)
    scale = strips[..., 512:].unflatten(-1, (8, 2, 2, 2))
    # piece, piece, warp, line, pair of products, row half, product
    scale = scale.movedim((-7, -5, -2, -4, -6, -3, -1), tuple(range(-7, 0)))
    scale = scale.flatten(-7, -4).flatten(-3)
    factor = torch.exp2((scale >> 3).float() - 10) * (1 + (scale & 7) / 8)
    factor = torch.where(scale == 19 * 8 + 7, torch.nan, factor).repeat_interleave(BLOCK, -1)
    table = torch.tensor([*VALUES, *(-v for v in VALUES)], device=data.device)
    assert code.shape[-2:] == (row_pieces * PIECE, column_pieces * PIECE)
    return (table[code] * factor)[..., :rows, :columns]


def _scale_bytes(device: torch.device) -> Tensor:
    """The byte of each e4m3 value without its sign."""
    codes = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    mantissa, exponent = torch.frexp(codes)  # 0.5 <= mantissa < 1
    table = (exponent + 9) * 8 + (16 * mantissa - 8).int()
    table[0], table[127] = 0, 19 * 8 + 7
    return table.to(device=device, dtype=torch.int32)
