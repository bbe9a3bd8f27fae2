"""`tk.gemm` in plain PyTorch: a product that is accumulated in a wide format and rounded once."""

from __future__ import annotations

import torch
from torch import Tensor


def gemm(
    a: Tensor, b: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`a @ b + bias`, accumulated in float32 (in float64 when a is float64), rounded once to
    out_dtype.

    Args:
        a: (..., M, K), any floating-point dtype.
        b: (K, N) or (..., K, N); batch dimensions broadcast as in `torch.matmul`.
        bias: (N,), added to every row before the rounding.
        out_dtype: dtype of the result; None is that of `a`.

    Returns:
        (..., M, N). K = 0 gives the bias, or zeros.
    """
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    product = torch.matmul(a.to(wide), b.to(wide))
    if bias is not None:
        product = product + bias.to(wide)
    return product.to(out_dtype or a.dtype)
