"""`tk.gated_delta_rule` in plain PyTorch: by its definition, token by token, and in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._signatures import as_gated_delta_rule

L2_EPS = 1e-6


class DeltaRuleOperands(NamedTuple):
    """What the recurrence reads, in float32 (in float64 when q is float64), per value head:

    q (B, HV, T, K) with the scale, k (B, HV, T, K), v (B, HV, T, V), g and beta (B, HV, T).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def delta_rule_gate(a: Tensor, A_log: Tensor, dt_bias: Tensor | None = None) -> Tensor:
    """The log decay `-exp(A_log) softplus(a + dt_bias)`, a (B, HV, T), A_log and dt_bias (HV,)."""
    if dt_bias is not None:
        a = a + dt_bias.to(a.dtype).unsqueeze(-1)
    return -A_log.to(a.dtype).exp().unsqueeze(-1) * F.softplus(a)


def l2_normalized(x: Tensor) -> Tensor:
    """`x / sqrt(sum x^2 + 1e-6)` over the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def delta_rule_operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> DeltaRuleOperands:
    """The operands of the recurrence, with all that `gated_delta_rule` makes of its arguments."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    ratio = v.shape[1] // max(q.shape[1], 1)
    queries, keys, values, gates, betas = (x.to(wide) for x in (q, k, v, g, beta))
    if qk_l2norm:
        queries, keys = l2_normalized(queries), l2_normalized(keys)
    if A_log is not None:
        gates = delta_rule_gate(gates, A_log, dt_bias)
    if beta_sigmoid:
        betas = betas.sigmoid() * (2.0 if allow_neg_eigval else 1.0)
    queries = queries * (q.shape[-1] ** -0.5 if scale is None else scale)
    if ratio != 1:
        queries, keys = (x.repeat_interleave(ratio, 1) for x in (queries, keys))
    return DeltaRuleOperands(queries, keys, values, gates, betas)


def delta_rule_tokens(x: DeltaRuleOperands, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence, a token at a time: the outputs (B, HV, T, V), and the state (B, HV, K, V)."""
    decay = x.g.exp()
    outs = []
    for t in range(x.q.shape[2]):
        key = x.k[:, :, t]
        state = decay[:, :, t, None, None] * state
        seen = torch.matmul(key.unsqueeze(-2), state).squeeze(-2)
        new = x.beta[:, :, t, None] * (x.v[:, :, t] - seen)
        state = state + key.unsqueeze(-1) * new.unsqueeze(-2)
        outs.append(torch.matmul(x.q[:, :, t].unsqueeze(-2), state).squeeze(-2))
    return (torch.stack(outs, 2) if outs else torch.zeros_like(x.v)), state


def delta_rule_chunks(
    x: DeltaRuleOperands, state: Tensor, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """The same by products of chunks, as the kernels compute it.

    With c the sums of g within the chunk, G_ij = exp(c_i - c_j) for j <= i, and S the state before:
    `T = (I + stril(diag(beta) K K^T) o G)^-1`, `U = T diag(beta) (V - exp(c) K S)`,
    `O = exp(c) Q S + (tril(Q K^T) o G) U`, `S' = exp(c_last) S + (exp(c_last - c) K)^T U`.
    """
    outs = []
    for parts in zip(*(y.split(chunk, 2) for y in x), strict=True):
        q, k, v, g, beta = parts
        if q.shape[2] == 0:
            continue
        within = g.clamp(min=-200.0).cumsum(2)
        difference = within.unsqueeze(3) - within.unsqueeze(2)
        decay = difference.tril().exp().tril()
        scores = beta.unsqueeze(3) * torch.matmul(k, k.mT) * decay
        identity = torch.eye(q.shape[2], dtype=q.dtype, device=q.device)
        before = within.exp().unsqueeze(3)
        rest = beta.unsqueeze(3) * (v - before * torch.matmul(k, state))
        new = torch.linalg.solve_triangular(
            identity + scores.tril(-1), rest, upper=False, unitriangular=True
        )
        outs.append(
            before * torch.matmul(q, state) + torch.matmul(torch.matmul(q, k.mT) * decay, new)
        )
        last = within[:, :, -1:]
        after = (last - within).exp().unsqueeze(3)
        state = last.exp().unsqueeze(3) * state + torch.matmul((after * k).mT, new)
    return (torch.cat(outs, 2) if outs else torch.zeros_like(x.v)), state


@as_gated_delta_rule
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_v_first: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The gated delta rule: for each token `S <- exp(g) S; u = beta (v - S^T k); S <- S + k u^T;
    o = scale S^T q`, in float32 (in float64 when q is float64), rounded once to q's dtype.

    Args:
        q: (B, H, T, K), any floating-point dtype.
        k: (B, H, T, K).
        v: (B, HV, T, V); value head h has the queries and keys of head h // (HV / H).
        g: (B, HV, T), the log of the decay; with A_log, what the gate is made of.
        beta: (B, HV, T).
        scale: None is K^-1/2.
        initial_state: (B, HV, K, V), per sequence; None is zeros.
        return_state: also return the state after the last token.
        cu_seqlens: (N + 1,), where the N sequences begin of which the tokens are a row; B is 1.
        qk_l2norm: normalise q and k, `l2_normalized`.
        beta_sigmoid: beta is the sigmoid of what is given.
        allow_neg_eigval: twice that.
        A_log: (HV,); the log decay is then `delta_rule_gate(g, A_log, dt_bias)`.
        dt_bias: (HV,), or None.
        state_v_first: states are (B, HV, V, K).

    Returns:
        out (B, HV, T, V), or (out, state); the state has the dtype of the initial one, or that of
        the arithmetic.
    """
    x = delta_rule_operands(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        qk_l2norm=qk_l2norm,
        beta_sigmoid=beta_sigmoid,
        allow_neg_eigval=allow_neg_eigval,
        A_log=A_log,
        dt_bias=dt_bias,
    )
    out, state = _over_sequences(delta_rule_tokens, x, initial_state, cu_seqlens, state_v_first)
    return (out.to(q.dtype), state) if return_state else out.to(q.dtype)


def gated_delta_rule_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule(..., return_state=True)` by `delta_rule_chunks`, in fewer steps."""
    x = delta_rule_operands(q, k, v, g, beta, **options)
    out, state = _over_sequences(delta_rule_chunks, x, initial_state, cu_seqlens, state_v_first)
    return out.to(q.dtype), state


def _over_sequences(
    run: Callable[[DeltaRuleOperands, Tensor], tuple[Tensor, Tensor]],
    x: DeltaRuleOperands,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
) -> tuple[Tensor, Tensor]:
    sequences = x.v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (sequences, x.v.shape[1], x.k.shape[3], x.v.shape[3])
    if initial_state is None:
        before = x.v.new_zeros(shape)
    else:
        before = (initial_state.mT if state_v_first else initial_state).to(x.v.dtype).contiguous()
    if cu_seqlens is None:
        out, state = run(x, before)
    else:
        edges = cu_seqlens.tolist()
        outs, states = [x.v.new_zeros((*x.v.shape[:2], edges[0], x.v.shape[3]))], []
        for n in range(sequences):
            part = DeltaRuleOperands(*(y[:, :, edges[n] : edges[n + 1]] for y in x))
            result, last = run(part, before[n : n + 1])
            outs.append(result)
            states.append(last)
        rest = x.v.shape[2] - edges[-1]
        outs.append(x.v.new_zeros((*x.v.shape[:2], rest, x.v.shape[3])))
        out, state = torch.cat(outs, 2), torch.cat(states)
    if initial_state is not None:
        state = state.to(initial_state.dtype)
    return out, (state.mT if state_v_first else state)
