"""`tk.ssd_decode` in plain PyTorch: a few more tokens of Mamba-2, by its definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ._recurrent import wide_dtype
from .ssd import ssd


def ssd_decode(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    state_indices: Tensor | None = None,
) -> Tensor:
    """`tk.reference.ssd` on T tokens that continue from a state, which is changed in place.

    Args:
        x: (B, H, T, P), any floating-point dtype; dt, A, B, C, D, z, dt_bias and the options of dt
            as in `ssd`.
        state: (slots, H, P, N), any floating-point dtype.
        state_indices: (B,), the slot of each sequence; -1 for none, whose output is 0. None is slot
            i for sequence i.

    Returns:
        y (B, H, T, P).
    """
    states, taken, given = gathered(state, state_indices, wide_dtype(x))
    out, after = ssd(
        x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit,
        initial_state=states, return_state=True,
    )  # fmt: skip
    scatter(state, after, taken, given)
    return torch.where(given[:, None, None, None], out, torch.zeros_like(out))


def gathered(
    state: Tensor, indices: Tensor | None, wide: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The states of sequences, their slots, and whether a sequence has one."""
    if indices is None:
        taken = torch.arange(state.shape[0], device=state.device)
        return state.to(wide), taken, torch.ones_like(taken, dtype=torch.bool)
    given = indices >= 0
    taken = indices.clamp(min=0).long()
    shape = (taken.numel(), *state.shape[1:])
    states = state[taken] if state.shape[0] > 0 else state.new_zeros(shape)
    return states.to(wide), taken, given


def scatter(state: Tensor, after: Tensor, taken: Tensor, given: Tensor) -> None:
    """Writes the states of the sequences that have a slot."""
    state[taken[given]] = after[given].to(state.dtype)
