"""`tk.grouped_gemm` in plain PyTorch: one product per group."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_gemm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """The products of the groups, in float32 (in float64 when a is float64), rounded once.

    Group e is [offs[e - 1], offs[e]) of one dimension, from 0 on; ends outside of it, or before
    that of an earlier group, are moved there.

    Args:
        a: (M, K), or (E, M, K) with a two-dimensional b; any floating-point dtype.
        b: (K, N), or (E, K, N) with a two-dimensional a.
        offs: (E,), integers.

    Returns:
        b three-dimensional: (M, N), the rows of group e are a[group e] @ b[e]. a three-dimensional:
        (M, N), the columns of group e are a[e] @ b[:, group e]. Neither: (E, M, N),
        a[:, group e] @ b[group e]. What belongs to no group is 0.
    """
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    left, right = a.to(wide), b.to(wide)
    divides_rows, divides_columns = b.dim() == 3, a.dim() == 3
    total = a.shape[-2] if divides_rows else b.shape[-1] if divides_columns else a.shape[-1]
    parts = []
    begin = 0
    for group, offset in enumerate(offs.tolist()):
        end = min(max(offset, begin), total)
        if divides_rows:
            parts.append(left[begin:end] @ right[group])
        elif divides_columns:
            parts.append(left[group] @ right[:, begin:end])
        else:
            parts.append(left[:, begin:end] @ right[begin:end])
        begin = end
    m, n = a.shape[-2], b.shape[-1]
    if divides_rows:
        result = torch.cat([*parts, left.new_zeros(total - begin, n)])
    elif divides_columns:
        result = torch.cat([*parts, left.new_zeros(m, total - begin)], dim=1)
    else:
        result = torch.stack(parts) if parts else left.new_zeros(0, m, n)
    return result.to(a.dtype)
