"""`tk.rms_norm` in plain PyTorch: the formula, in float32 (float64 for float64)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ._norm import residual_sum, wide_dtype


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    gate: Tensor | None = None,
    gate_first: bool = False,
    group_size: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`v / sqrt(mean(v^2) + eps) * (weight + weight_offset)` of `v = dropout(x) + residual`, or of
    `v = x * silu(gate)` where the gate comes first; else the result is multiplied by silu(gate).

    The sum is rounded to the residual's dtype before it is normalised, and the result once to x's.

    Args:
        x: (..., D), any floating-point dtype.
        weight: (D,).
        eps: added to the mean of the squares.
        weight_offset: added to the weight; 1 for weights that are stored around 0.
        residual: of x's shape; its sum with x is returned too, in its dtype.
        dropout_p: the probability that an element of x does not count, in steps of 2^-16.
        seed: int64, one number, which says which elements these are.
        gate: of x's shape.
        gate_first: whether the gate is applied to x, instead of to the result.
        group_size: so many neighbours are normalised together, instead of all D.

    Returns:
        out, like x; with a residual (out, sum).
    """
    wide = wide_dtype(x, weight, residual, gate)
    total = residual_sum(x, residual, dropout_p, seed, wide)
    values = total.to(wide)
    if gate is not None and gate_first:
        values = values * F.silu(gate.to(wide))
    rows = values.unflatten(-1, (-1, group_size or x.shape[-1]))
    rows = rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
    values = rows.flatten(-2)
    if weight is not None:
        values = values * (weight.to(wide) + weight_offset)
    if gate is not None and not gate_first:
        values = values * F.silu(gate.to(wide))
    out = values.to(x.dtype)
    return out if residual is None else (out, total)
