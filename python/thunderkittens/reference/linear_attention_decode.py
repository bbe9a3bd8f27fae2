"""`tk.linear_attention_decode` in plain PyTorch: a few more tokens of decayed linear attention, by
its definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ._recurrent import wide_dtype
from .linear_attention import linear_attention
from .ssd_decode import gathered, scatter


def linear_attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    decay: Tensor | None = None,
    g: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    state_indices: Tensor | None = None,
) -> Tensor:
    """`tk.reference.linear_attention` on T tokens that continue from a state, which is changed in
    place.

    Args:
        q: (B, Hk, T, K), any floating-point dtype; k, v, decay, g and scale as in
            `linear_attention`.
        state: (slots, H, K, V), any floating-point dtype; with state_v_first (slots, H, V, K).
        state_v_first: the order of the state's dimensions.
        state_indices: (B,), the slot of each sequence; -1 for none, whose output is 0. None is slot
            i for sequence i.

    Returns:
        out (B, H, T, V).
    """
    states, taken, given = gathered(state, state_indices, wide_dtype(q))
    out, after = linear_attention(
        q, k, v, decay=decay, g=g, scale=scale, initial_state=states, return_state=True,
        state_v_first=state_v_first,
    )  # fmt: skip
    scatter(state, after, taken, given)
    return torch.where(given[:, None, None, None], out, torch.zeros_like(out))
