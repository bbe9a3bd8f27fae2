"""`tk.causal_conv1d_update` in plain PyTorch: the next tokens of a causal convolution, by its
definition."""

from __future__ import annotations

import torch
from torch import Tensor

from .causal_conv1d import causal_conv1d


def causal_conv1d_update(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """`causal_conv1d` of the next tokens, from the last inputs in `state`, which is moved on in
    place: it keeps as many inputs as it has places.

    Args:
        x: (B, C) or (B, C, T), any floating-point dtype.
        state: (B, C, L) or, with slots, (slots, C, L), L at least W - 1.
        weight: (C, W).
        bias: (C,), or None for zero.
        activation: None or "silu".
        slots: (B,), of whose places in `state` a sequence has which; one that is not there, as -1,
            is left out, and its output is zero.

    Returns:
        out of x's shape.
    """
    tokens = x.unsqueeze(2) if x.dim() == 2 else x
    out = torch.zeros_like(tokens)
    places = range(tokens.shape[0]) if slots is None else slots.tolist()
    for i, place in enumerate(places):
        if not 0 <= place < state.shape[0]:
            continue
        kept = state[place : place + 1].to(x.dtype)
        out[i : i + 1] = causal_conv1d(
            tokens[i : i + 1],
            weight,
            bias,
            activation=activation,
            initial_state=kept[..., kept.shape[2] - (weight.shape[1] - 1) :],
        )
        moved = torch.cat([kept, tokens[i : i + 1]], -1)[..., tokens.shape[2] :]
        state[place : place + 1] = moved
    return out.view(x.shape) if x.dim() == 2 else out
