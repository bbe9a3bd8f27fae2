"""`tk.nvfp4_gemm` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from .fp8_gemm import ACTIVATIONS
from .nvfp4_dequantize import nvfp4_dequantize
from .nvfp4_prepare import Nvfp4Weight, values


def nvfp4_gemm(
    a: Tensor,
    b: Nvfp4Weight | Tensor,
    *,
    scale_a: Tensor | None = None,
    global_scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    global_scale_b: Tensor | None = None,
    swizzle: bool = True,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    offs: Tensor | None = None,
) -> Tensor:
    """`activation(global_scale * (a @ b^T) + bias)`, b and perhaps a of NVFP4.

    Elements times the scales of their blocks are exact in 16 bits; their product is taken in
    float32, or in float64 where a has that dtype, and multiplied by the scales of the matrices.

    Args:
        a: (M, K) of a floating dtype; or (M, K / 2) codes with scale_a and global_scale_a.
        b: an `Nvfp4Weight` of (N, K), or (N, K / 2) codes with scale_b and global_scale_b; with
            offs of (E, N, K).
        scale_a, global_scale_a, scale_b, global_scale_b: as `tk.nvfp4_quantize` makes them.
        swizzle: whether the blocks' scales lie in the 128x4 layout.
        bias: (N,).
        activation: None, "relu", "gelu", "gelu_tanh" or "silu".
        out_dtype: None is that of a, bfloat16 where a is NVFP4.
        offs: (E,), the ends of the groups of a's rows.

    Returns:
        (M, N) of out_dtype.
    """
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    if isinstance(b, Nvfp4Weight):
        factors, scale = values(b.data, b.rows, b.columns), b.global_scale
    else:
        assert scale_b is not None
        assert global_scale_b is not None
        one = torch.ones_like(global_scale_b)
        factors = nvfp4_dequantize(b, scale_b, one, swizzle=swizzle, dtype=torch.float32)
        scale = global_scale_b
    if scale_a is not None:
        assert global_scale_a is not None
        one = torch.ones_like(global_scale_a)
        a = nvfp4_dequantize(a, scale_a, one, swizzle=swizzle, dtype=torch.float32)
        scale = scale * global_scale_a
        out_dtype = out_dtype or torch.bfloat16
    out_dtype = out_dtype or a.dtype
    a, factors, scale = a.to(wide), factors.to(wide), scale.to(wide)
    if offs is None:
        z = a @ factors.mT * scale
    else:
        # One product per row with the matrix of its group; rows of none have a matrix of zeros.
        rows = torch.arange(a.shape[0], device=a.device)
        group = torch.searchsorted(offs.cummax(0).values.to(rows.dtype), rows, right=True)
        z = a.new_zeros(a.shape[0], factors.shape[-2])
        for i in range(factors.shape[0]):
            z = torch.where((group == i)[:, None], a @ factors[i].mT * scale[i], z)
    if bias is not None:
        z = z + bias
    if activation is not None:
        z = ACTIVATIONS[activation](z)
    if offs is not None:
        z = torch.where((group < factors.shape[0])[:, None], z, 0)
    return z.to(out_dtype)
