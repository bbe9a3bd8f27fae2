"""`tk.fp8_gemm` in plain PyTorch: a product of the values that codes and scales stand for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}


def fp8_gemm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    accurate: bool = True,
    offs: Tensor | None = None,
) -> Tensor:
    """`activation((a * scale_a) @ (b * scale_b) + bias)` in float32 (in float64 for an out_dtype of
    float64), rounded once.

    Args:
        a: (M, K), fp8 or any floating-point dtype.
        b: (K, N), or (E, K, N) with offs.
        scale_a: one element or (M, 1), or (M, ceil(K / 128)) for 1 x 128 elements of a.
        scale_b: one element or (1, N), or for blocks (ceil(K / 128), ceil(N / 128)) or
            (ceil(K / 128), N); with offs these may have a leading dimension E.
        bias: (N,).
        activation: None, "relu", "gelu", "gelu_tanh" or "silu".
        out_dtype: dtype of the result.
        accurate: no meaning here; sums are in float32.
        offs: (E,), ends of the groups of rows of a; group e is multiplied with b[e], rows behind
            the last group give 0.

    Returns:
        (M, N).
    """
    wide = torch.float64 if out_dtype == torch.float64 else torch.float32
    m, k = a.shape
    n = b.shape[-1]
    left = a.to(wide) * _spread(scale_a.to(wide), (m, k), (1, 128))
    right = b.to(wide) * _spread(scale_b.to(wide), (k, n), (128, 128))
    if offs is None:
        product = left @ right
    else:
        product = left.new_zeros(m, n)
        begin = 0
        for group, end in enumerate(offs.tolist()):
            end = min(max(end, begin), m)
            product[begin:end] = left[begin:end] @ right[group]
            begin = end
    if bias is not None:
        product = product + bias.to(wide)
    product = ACTIVATIONS[activation](product)
    if offs is not None:
        product = torch.where(torch.arange(m, device=a.device)[:, None] < begin, product, 0)
    return product.to(out_dtype)


def _spread(scale: Tensor, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """Scales that broadcast over a matrix of this shape."""
    if scale.dim() < 2:
        return scale.reshape(1, 1)
    for dim in (0, 1):
        length = scale.shape[dim - 2]
        if length not in (1, shape[dim]):
            scale = scale.repeat_interleave(block[dim] if block[dim] > 1 else 1, dim - 2)
            scale = scale.narrow(dim - 2, 0, shape[dim])
    return scale
