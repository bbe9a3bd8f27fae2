"""Tensors in awkward layouts, with NaN wherever a kernel has no business to read."""

from __future__ import annotations

import torch
from torch import Tensor

NAN = float("nan")

# Rows and columns of matrices that end around the edges of tiles of 128 x 128, of vectors and of
# words: columns of which some are odd, and even ones.
RAGGED = [(129, 131), (130, 264), (145, 127), (128, 257), (3, 1), (1, 143)]
RAGGED_PAIRS = [(129, 130), (130, 264), (145, 126), (128, 258), (3, 2), (1, 142)]


def embed(values: Tensor, *, margin: int = 8, order: tuple[int, ...] | None = None) -> Tensor:
    """`values` as the middle of a larger tensor of NaN, `margin` elements away from its edges in
    every dimension; `order` lists the dimensions from the outermost in memory to the innermost."""
    order = order or tuple(range(values.dim()))
    # A margin of 8 elements and rows of a multiple of 8 keep an alignment of 16 bytes.
    shape = [values.shape[i] + 2 * margin for i in order]
    shape[-1] += -shape[-1] % 8
    big = torch.full(shape, NAN, dtype=values.dtype, device=values.device)
    inverse = [order.index(i) for i in range(values.dim())]
    view = big.permute(inverse)[tuple(slice(margin, margin + n) for n in values.shape)]
    view.copy_(values)
    return view


def unaligned(values: Tensor) -> Tensor:
    """Contiguous, but with a base address that is only a multiple of 2 bytes, NaN on both sides."""
    flat = torch.full((values.numel() + 2,), NAN, dtype=values.dtype, device=values.device)
    view = flat[1:-1].view(values.shape)
    view.copy_(values)
    return view


def spread(values: Tensor) -> Tensor:
    """Every second element of a tensor of NaN, in the last dimension."""
    big = torch.full(
        (*values.shape[:-1], 2 * values.shape[-1]), NAN, dtype=values.dtype, device=values.device
    )
    big[..., ::2] = values
    return big[..., ::2]


def odd_stride(values: Tensor) -> Tensor:
    """Rows that are an odd number of elements apart, NaN between them."""
    rows, columns = values.shape[-2:]
    big = torch.full(
        (*values.shape[:-2], rows, columns + 1 + columns % 2),
        NAN,
        dtype=values.dtype,
        device=values.device,
    )
    big[..., :columns] = values
    return big[..., :columns]


def at_any_element(values: Tensor, offset: int, gap: int) -> Tensor:
    """Rows of `values` (rows, columns), the first at element `offset` of memory that begins at a
    multiple of 16 bytes, `gap` elements between them; NaN, or bytes of ones, in the gaps and in
    front, and where the last row ends, the memory does."""
    rows, columns = values.shape
    nothing = NAN if values.dtype.is_floating_point else 0xFF
    length = offset + (rows - 1) * (columns + gap) + columns
    flat = torch.full((length,), nothing, dtype=values.dtype, device=values.device)
    view = flat.as_strided((rows, columns), (columns + gap, 1), offset)
    view.copy_(values)
    return view


def matrix(values: Tensor, layout: str) -> Tensor:
    """`values` (..., rows, columns) in one of MATRIX_LAYOUTS."""
    if layout.endswith("_t"):
        return matrix(values.mT.contiguous(), layout.removesuffix("_t")).mT
    return {
        "packed": Tensor.contiguous,
        "sliced": embed,
        "unaligned": unaligned,
        "odd": odd_stride,
        "spread": spread,
    }[layout](values)


MATRIX_LAYOUTS = (
    "packed",
    "packed_t",
    "sliced",
    "sliced_t",
    "unaligned",
    "unaligned_t",
    "odd",
    "odd_t",
    "spread",
)


def heads(values: Tensor, layout: str) -> Tensor:
    """`values` (B, H, S, D) in one of HEAD_LAYOUTS."""
    if layout == "bshd":
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "bshd_sliced":
        return embed(values, order=(0, 2, 1, 3))
    if layout == "sbhd":
        return values.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    if layout == "spread_d":
        return values.mT.contiguous().mT
    return matrix(values, layout)


HEAD_LAYOUTS = (
    "packed",
    "bshd",
    "bshd_sliced",
    "sbhd",
    "sliced",
    "unaligned",
    "odd",
    "spread",
    "spread_d",
)
