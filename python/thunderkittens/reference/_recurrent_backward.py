"""Gradients of the references of the recurrent ops, chunk by chunk: by the chain rule of their
formulas, in the dtype that these compute in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ._recurrent import (
    LEAST_LOG_DECAY,
    decayed_attention,
    packed_decayed_attention,
    sequences,
    wide_dtype,
)
from .ssd import step_sizes

_CHUNK = 64


def decayed_attention_backward(
    grad_out: Tensor,
    grad_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g and state of `decayed_attention`, all of one dtype.

    With S before a chunk, dS behind it, c the sums of log decays in it, and for i >= j
    `W_ij = (dO_i . v_j) e^(c_i - c_j)` and `P_ij = (q_i . k_j) e^(c_i - c_j)`:

        dQ = W K + e^c dO S^T        dK = W^T Q + e^(c_last - c) V dS^T
        dV = P^T dO + e^(c_last - c) K dS
        dc = rows of dQ . Q - rows of dK . K, and <e^(c_last) S + K^T e^(c_last - c) V, dS> at last
        dS <- e^(c_last) dS + (e^c Q)^T dO
    """
    shape = q.shape
    heads = v.shape[1] // q.shape[1] if q.shape[1] > 0 else 1
    q, k = q.repeat_interleave(heads, 1), k.repeat_interleave(heads, 1)
    kept = g >= LEAST_LOG_DECAY
    g = g.clamp(min=LEAST_LOG_DECAY)
    begins = range(0, v.shape[2], _CHUNK)
    states = []
    for begin in begins:
        states.append(state)
        here = (slice(None), slice(None), slice(begin, begin + _CHUNK))
        state = decayed_attention(q[here], k[here], v[here], g[here], state)[1]
    dq, dk, dv, dg = (torch.zeros_like(x) for x in (q, k, v, g))
    for begin, before in zip(reversed(begins), reversed(states), strict=True):
        here = (slice(None), slice(None), slice(begin, begin + _CHUNK))
        queries, keys, values, gradient, c = q[here], k[here], v[here], grad_out[here], g[here]
        c = c.cumsum(2)
        later = torch.ones(c.shape[2], c.shape[2], dtype=torch.bool, device=c.device).triu(1)
        decays = (c.unsqueeze(3) - c.unsqueeze(2)).masked_fill(later, -torch.inf).exp()
        until, rest = c.exp().unsqueeze(3), (c[:, :, -1:] - c).exp().unsqueeze(3)
        weights = torch.matmul(queries, keys.mT) * decays
        products = torch.matmul(gradient, values.mT) * decays
        total = c[:, :, -1].exp()[..., None, None]
        behind = before * total + torch.matmul((keys * rest).mT, values)
        dq[here] = torch.matmul(products, keys) + until * torch.matmul(gradient, before.mT)
        dk[here] = torch.matmul(products.mT, queries) + rest * torch.matmul(values, grad_state.mT)
        dv[here] = torch.matmul(weights.mT, gradient) + rest * torch.matmul(keys, grad_state)
        dc = (dq[here] * queries).sum(3) - (dk[here] * keys).sum(3)
        dc[:, :, -1] += (behind * grad_state).sum((2, 3))
        dg[here] = dc.flip(2).cumsum(2).flip(2)
        grad_state = total * grad_state + torch.matmul((queries * until).mT, gradient)
    dq, dk = (x.unflatten(1, (shape[1], heads)).sum(2) for x in (dq, dk))
    return dq, dk, dv, dg.masked_fill(~kept, 0), grad_state


def packed_decayed_attention_backward(
    grad_out: Tensor,
    grad_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, ...]:
    """The same of `packed_decayed_attention`."""
    count = v.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    zeros = v.new_zeros(count, v.shape[1], k.shape[3], v.shape[3])
    state = zeros if state is None else state
    grad_state = zeros if grad_state is None else grad_state
    if cu_seqlens is None:
        return decayed_attention_backward(grad_out, grad_state, q, k, v, g, state)
    results = [torch.zeros_like(x) for x in (q, k, v, g, state)]
    for i, (begin, end) in enumerate(sequences(v.shape[2], cu_seqlens)):
        do, queries, keys, values, logs = (x[:, :, begin:end] for x in (grad_out, q, k, v, g))
        own = slice(i, i + 1)
        found = decayed_attention_backward(
            do, grad_state[own], queries, keys, values, logs, state[own]
        )
        for result, part in zip(results[:4], found[:4], strict=True):
            result[:, :, begin:end] = part
        results[4][i : i + 1] = found[4]
    return tuple(results)


def linear_attention_backward(
    grad_out: Tensor, grad_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *,
    decay: Tensor | None = None, g: Tensor | None = None, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, scale: float | None = None, state_v_first: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, decay, g and initial_state of `linear_attention`, also of those that
    are None; grad_state is that of the state that it returns."""
    wide = wide_dtype(q)
    logs = v.new_zeros(v.shape[:3], dtype=wide)
    if decay is not None:
        logs = logs + decay.to(wide)[:, None]
    if g is not None:
        logs = logs + g.to(wide)
    state, grad_state = (
        x if x is None else x.to(wide).mT if state_v_first else x.to(wide)
        for x in (initial_state, grad_state)
    )
    if scale is None:
        scale = q.shape[3] ** -0.5
    dq, dk, dv, dg, initial = packed_decayed_attention_backward(
        grad_out.to(wide), grad_state, q.to(wide) * scale, k.to(wide), v.to(wide), logs, state,
        cu_seqlens,
    )  # fmt: skip
    return [dq * scale, dk, dv, dg.sum((0, 2)), dg, initial.mT if state_v_first else initial]


def ssd_backward(
    grad_out: Tensor, grad_state: Tensor | None, x: Tensor, dt: Tensor, A: Tensor, B: Tensor,
    C: Tensor, *, D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> list[Any]:  # fmt: skip
    """Gradients of x, dt, A, B, C, D, z, dt_bias and initial_state of `ssd`, None for D and z that
    are; grad_state is that of the state that it returns."""
    wide = wide_dtype(x)
    values, gradient = x.to(wide), grad_out.to(wide)
    if cu_seqlens is not None:  # outputs of tokens of no sequence are 0
        whole, gradient = gradient, torch.zeros_like(gradient)
        for begin, end in sequences(x.shape[2], cu_seqlens):
            gradient[:, :, begin:end] = whole[:, :, begin:end]
    steps = step_sizes(dt, dt_bias, dt_softplus, dt_limit, wide)
    logs, rates = steps * A.to(wide)[:, None], A.to(wide)[:, None]
    state, grad_state = (y if y is None else y.to(wide).mT for y in (initial_state, grad_state))
    keys, queries = B.to(wide), C.to(wide)
    skip = torch.zeros_like(A, dtype=wide) if D is None else D.to(wide)
    skip = skip[:, None, None] if skip.dim() == 1 else skip[:, None, :]
    weighted = values * steps.unsqueeze(3)
    grad_z = None
    if z is not None:
        gate = z.to(wide)
        arguments = (queries, keys, weighted, logs, state, cu_seqlens)
        out = packed_decayed_attention(*arguments)[0] + values * skip
        sigmoid = gate.sigmoid()
        grad_z = gradient * out * sigmoid * (1 + gate * (1 - sigmoid))
        gradient = gradient * functional.silu(gate)
    dC, dB, dv, dg, initial = packed_decayed_attention_backward(
        gradient, grad_state, queries, keys, weighted, logs, state, cu_seqlens
    )
    dx = dv * steps.unsqueeze(3) + gradient * skip
    dd = (dv * values).sum(3) + dg * rates
    given = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias.to(wide)[:, None]
    raw = functional.softplus(given) if dt_softplus else given
    dd = dd.masked_fill((raw < dt_limit[0]) | (raw > dt_limit[1]), 0)
    if dt_softplus:
        dd = dd * given.sigmoid()
    dD = None
    if D is not None:
        dD = (gradient * values).sum((0, 2) if D.dim() == 2 else (0, 2, 3))
    return [dx, dd, (dg * steps).sum((0, 2)), dB, dC, dD, grad_z, dd.sum((0, 2)), initial.mT]
