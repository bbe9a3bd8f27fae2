"""`tk.gated_delta_rule_decode` in plain PyTorch: the recurrence on few tokens, with the states
changed in place."""

from __future__ import annotations

import torch
from torch import Tensor

from .gated_delta_rule import gated_delta_rule


def gated_delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    state_indices: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_v_first: bool = False,
) -> Tensor:
    """Brings the states up to date, and returns the tokens' outputs (B, HV, T, V).

    Args:
        q: (B, H, T, K).
        k: (B, H, T, K).
        v: (B, HV, T, V).
        g: (B, HV, T).
        beta: (B, HV, T).
        state: (B, HV, K, V), or (slots, HV, K, V) with state_indices.
        state_indices: (B,), the slot of each sequence; a sequence of slot -1 is skipped, and its
            outputs are zero.
        scale, qk_l2norm, beta_sigmoid, allow_neg_eigval, A_log, dt_bias, state_v_first: as for
            `gated_delta_rule`.
    """
    slots = torch.arange(q.shape[0], device=q.device)
    if state_indices is not None:
        slots = state_indices.long()
    kept = slots >= 0
    out = torch.zeros(v.shape, dtype=q.dtype, device=q.device)
    chosen = slots[kept]
    result, after = gated_delta_rule(
        *(x[kept] for x in (q, k, v, g, beta)),
        scale=scale,
        initial_state=state[chosen],
        return_state=True,
        qk_l2norm=qk_l2norm,
        beta_sigmoid=beta_sigmoid,
        allow_neg_eigval=allow_neg_eigval,
        A_log=A_log,
        dt_bias=dt_bias,
        state_v_first=state_v_first,
    )
    out[kept] = result
    state[chosen] = after
    return out
