"""`tk.layer_norm` in plain PyTorch: the formula, in float32 (float64 for float64)."""

from __future__ import annotations

from torch import Tensor

from ._norm import residual_sum, wide_dtype


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`(v - mean(v)) / sqrt(mean((v - mean(v))^2) + eps) * weight + bias` of
    `v = dropout(x) + residual`.

    The sum is rounded to the residual's dtype before it is normalised, and the result once to x's.

    Args:
        x: (..., D), any floating-point dtype.
        weight: (D,).
        bias: (D,).
        eps: added to the variance.
        residual: of x's shape; its sum with x is returned too, in its dtype.
        dropout_p: the probability that an element of x does not count, in steps of 2^-16.
        seed: int64, one number, which says which elements these are.

    Returns:
        out, like x; with a residual (out, sum).
    """
    wide = wide_dtype(x, weight, residual)
    total = residual_sum(x, residual, dropout_p, seed, wide)
    values = total.to(wide)
    values = values - values.mean(-1, keepdim=True)
    values = values * (values.square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is not None:
        values = values * weight.to(wide)
    if bias is not None:
        values = values + bias.to(wide)
    out = values.to(x.dtype)
    return out if residual is None else (out, total)
