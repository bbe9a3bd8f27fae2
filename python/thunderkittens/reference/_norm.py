"""What the norms have in common: the row that is normalised, and dropout from a seed."""

from __future__ import annotations

import torch
from torch import Tensor

from .nvfp4_quantize import philox

UNIT = 8  # elements that share a draw


def wide_dtype(*tensors: Tensor | None) -> torch.dtype:
    """What is computed in: float64 where a tensor has it, else float32."""
    is_double = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return torch.float64 if is_double else torch.float32


def dropout_factors(shape: torch.Size, p: float, seed: Tensor) -> Tensor:
    """What the elements are multiplied by: 0, or the inverse of the share that is kept.

    Eight neighbours of a row take 16 bits each of Philox4x32-10, whose key is the seed and whose
    counter is the number of the eight, counted along rows of whole eights. Those below p * 2^16,
    rounded, are dropped.

    Args:
        shape: (..., D).
        p: the probability, in steps of 2^-16.
        seed: int64, one number.

    Returns:
        shape, float64.
    """
    dropped = min(round(p * 65536), 65535)
    columns = shape[-1]
    units = -(-columns // UNIT)
    rows = shape[:-1].numel()
    counter = torch.arange(rows * units, device=seed.device)
    words = torch.stack(philox(counter, seed, torch.zeros_like(counter)), -1)
    draws = torch.stack([words & 0xFFFF, words >> 16], -1)
    draws = draws.reshape(rows, units * UNIT)[:, :columns].reshape(shape)
    factors: Tensor = (draws >= dropped).double() * (65536 / (65536 - dropped))
    return factors


def residual_sum(
    x: Tensor, residual: Tensor | None, dropout_p: float, seed: Tensor | None, wide: torch.dtype
) -> Tensor:
    """The row that is normalised, in the dtype in which it is returned: x, dropped, plus the
    residual."""
    if residual is None:
        return x
    values = x.to(wide)
    if dropout_p > 0 and seed is not None:
        values = values * dropout_factors(x.shape, dropout_p, seed).to(wide)
    return (values + residual.to(wide)).to(residual.dtype)


def norm_gradients(
    grad_out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    gate: Tensor | None = None,
    *,
    layer: bool,
    eps: float,
    weight_offset: float = 0.0,
    gate_first: bool = False,
    group_size: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a norm with respect to what was normalised, to the weight, and to the gate
    or, of a layer norm, the bias; in float32 at least.

    With n the normalised row and g the gradient times the weight, means over the row:
    `rstd * (g - n mean(g n))`, of a layer norm less `rstd * mean(g)`.
    """
    wide = wide_dtype(grad_out, x, weight, gate)
    columns = x.shape[-1]
    size = group_size or columns

    def grouped(values: Tensor) -> Tensor:
        rows: Tensor = values.unflatten(-1, (-1, size))
        return rows

    values, dy = x.to(wide), grad_out.to(wide)
    factors = torch.ones(columns, dtype=wide, device=x.device)
    if weight is not None:
        factors = weight.to(wide) + weight_offset
    if gate is not None:
        z = gate.to(wide)
        sigmoid = z.sigmoid()
        silu, slope = z * sigmoid, sigmoid * (1 + z * (1 - sigmoid))
        if gate_first:
            values = values * silu
    rows = grouped(values)
    if layer:
        rows = rows - rows.mean(-1, keepdim=True)
    rstd = (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
    n = (rows * rstd).flatten(-2)
    weighted = dy * silu if gate is not None and not gate_first else dy
    g = grouped(weighted * factors)
    change = g - grouped(n) * (g * grouped(n)).mean(-1, keepdim=True)
    if layer:
        change = change - g.mean(-1, keepdim=True)
    dv = (change * rstd).flatten(-2)
    d_weight = (weighted * n).reshape(-1, columns).sum(0)
    if layer:
        return dv, d_weight, dy.reshape(-1, columns).sum(0)
    if gate is None:
        return dv, d_weight, dy.new_empty(0)
    if gate_first:
        return dv * silu, d_weight, dv * x.to(wide) * slope
    return dv, d_weight, dy * n * factors * slope
