"""`tk.ssd` in plain PyTorch: the state-space duality layer of Mamba-2, by its definition."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .._signatures import as_ssd
from ._recurrent import in_sequences, packed_decayed_attention, wide_dtype


@as_ssd
def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """With `d_t = clamp(softplus(dt_t + dt_bias), *dt_limit)`, for each head

        S_t = e^(A d_t) S_(t-1) + d_t x_t B_t^T        S in R^(P x N)
        y_t = (S_t C_t + D x_t) silu(z_t)

    in float32 (in float64 when x is float64), rounded once to x's dtype.

    Args:
        x: (B, H, T, P), any floating-point dtype.
        dt: (B, H, T).
        A: (H,).
        B: (B, G, T, N); H is a multiple of G.
        C: (B, G, T, N).
        D: (H,) or (H, P); none is 0.
        z: (B, H, T, P); none is no gate.
        dt_bias: (H,).
        dt_softplus: whether softplus is taken of dt + dt_bias.
        dt_limit: bounds of d.
        initial_state: (B, H, P, N), or (sequences, H, P, N).
        return_state: also return the state after the last token.
        cu_seqlens: (sequences + 1,), the first token of each packed sequence; B is then 1.

    Returns:
        y (B, H, T, P), or (y, state).
    """
    wide = wide_dtype(x)
    values, steps = x.to(wide), step_sizes(dt, dt_bias, dt_softplus, dt_limit, wide)
    g = steps * A.to(wide)[:, None]
    state = None if initial_state is None else initial_state.to(wide).mT
    out, after = packed_decayed_attention(
        C.to(wide), B.to(wide), values * steps.unsqueeze(3), g, state, cu_seqlens
    )
    if D is not None:
        skip = D.to(wide)
        out = out + values * (skip[:, None, None] if skip.dim() == 1 else skip[:, None, :])
    if z is not None:
        out = out * functional.silu(z.to(wide))
    if cu_seqlens is not None:
        out = torch.where(in_sequences(x, cu_seqlens), out, torch.zeros_like(out))
    out = out.to(x.dtype)
    return (out, after.mT.contiguous()) if return_state else out


def step_sizes(
    dt: Tensor,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    wide: torch.dtype,
) -> Tensor:
    """d of `ssd`, (B, H, T), from dt (B, H, T) and dt_bias (H,)."""
    steps = dt.to(wide)
    if dt_bias is not None:
        steps = steps + dt_bias.to(wide)[:, None]
    if dt_softplus:
        steps = functional.softplus(steps)
    return steps.clamp(*dt_limit)
