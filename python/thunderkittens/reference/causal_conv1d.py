"""`tk.causal_conv1d` in plain PyTorch: a causal depthwise convolution of a few taps, by its
definition."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from .._signatures import as_causal_conv1d


@as_causal_conv1d
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`out[t] = act(bias + sum over w < W of weight[w] x[t - W + 1 + w])` in each channel, in
    float32 (in float64 when x is float64), rounded once to x's dtype.

    Args:
        x: (B, C, T), any floating-point dtype.
        weight: (C, W).
        bias: (C,), or None for zero.
        activation: None or "silu".
        initial_state: (B, C, W - 1), the inputs before the first one; None for zeros.
        return_state: also return the last W - 1 inputs of each sequence.
        cu_seqlens: (N + 1,) cumulative lengths of sequences that are packed along T, B = 1; states
            are then (N, C, W - 1), and tokens in no sequence give zero.

    Returns:
        out of x's shape, or with return_state (out, state).
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    width = weight.shape[1]
    taps = weight.to(wide)
    outs, states, at = [], [], 0
    for begin, end, inputs in padded_sequences(x, width, initial_state, cu_seqlens):
        z = torch.zeros_like(inputs[..., width - 1 :], dtype=wide)
        for w in range(width):
            z = z + taps[:, w, None] * inputs[..., w : w + end - begin].to(wide)
        if bias is not None:
            z = z + bias.to(wide)[:, None]
        out = torch.nn.functional.silu(z) if activation == "silu" else z
        outs += [torch.zeros_like(x[..., at:begin]), out.to(x.dtype)]
        states.append(inputs[..., end - begin :])
        at = end
    out = torch.cat([*outs, torch.zeros_like(x[..., at:])], -1)
    if not return_state:
        return out
    return out, torch.cat(states) if states else x.new_zeros((0, x.shape[1], width - 1))


def padded_sequences(
    x: Tensor, width: int, state: Tensor | None, cu_seqlens: Tensor | None
) -> Iterator[tuple[int, int, Tensor]]:
    """The begin and the end of each sequence, and its inputs behind those of its state: one
    sequence for a whole batch, unless they are packed."""
    edges = [0, x.shape[2]] if cu_seqlens is None else cu_seqlens.tolist()
    for i, (begin, end) in enumerate(pairwise(edges)):
        if state is None:
            before = x.new_zeros((*x.shape[:2], width - 1))
        else:
            before = state if cu_seqlens is None else state[i : i + 1]
        yield begin, end, torch.cat([before.to(x.dtype), x[..., begin:end]], -1)


def causal_conv1d_backward(
    grad_out: Tensor, grad_state: Tensor | None, x: Tensor, weight: Tensor,
    bias: Tensor | None = None, *, activation: str | None = None,
    initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient of `causal_conv1d`, in float32 (in float64 when x is float64), each rounded once
    to the dtype of its argument.

    Args:
        grad_out: the gradient of out.
        grad_state: that of the final state, or None for zeros.
        x, weight, bias, activation, initial_state, cu_seqlens: as in `causal_conv1d`.

    Returns:
        The gradients of x, weight, bias (that of a bias of zero where there is none) and the
        initial state.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    width, taps = weight.shape[1], weight.to(wide)
    dx = torch.zeros_like(x, dtype=wide)
    dweight, dbias = torch.zeros_like(taps), torch.zeros_like(taps[:, 0])
    states = []
    sequences = padded_sequences(x, width, initial_state, cu_seqlens)
    for i, (begin, end, inputs) in enumerate(sequences):
        values, length = inputs.to(wide), end - begin
        dz = grad_out[..., begin:end].to(wide)
        if activation == "silu":
            z = torch.zeros_like(dz)
            if bias is not None:
                z = z + bias.to(wide)[:, None]
            for w in range(width):
                z = z + taps[:, w, None] * values[..., w : w + length]
            share = torch.sigmoid(z)
            dz = dz * (share + z * share * (1 - share))
        through = torch.zeros_like(values)
        if grad_state is not None:
            through[..., length:] += grad_state if cu_seqlens is None else grad_state[i : i + 1]
        for w in range(width):
            through[..., w : w + length] += taps[:, w, None] * dz
            dweight[:, w] += (dz * values[..., w : w + length]).sum((0, 2))
        dbias += dz.sum((0, 2))
        dx[..., begin:end] = through[..., width - 1 :]
        states.append(through[..., : width - 1])
    empty = x.new_zeros((0, x.shape[1], width - 1))
    return (
        dx.to(x.dtype),
        dweight.to(weight.dtype),
        dbias.to(weight.dtype if bias is None else bias.dtype),
        (torch.cat(states) if states else empty).to(x.dtype),
    )
