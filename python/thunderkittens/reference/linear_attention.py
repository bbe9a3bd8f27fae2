"""`tk.linear_attention` in plain PyTorch: causal linear attention with a scalar decay per head, by
its definition."""

from __future__ import annotations

from torch import Tensor

from .._signatures import as_linear_attention
from ._recurrent import packed_decayed_attention, wide_dtype


@as_linear_attention
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: Tensor | None = None,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """With the log decay `l_t = decay + g_t`, for each head

        S_t = e^(l_t) S_(t-1) + k_t v_t^T        S in R^(K x V)
        o_t = scale S_t^T q_t

    in float32 (in float64 when q is float64), rounded once to q's dtype.

    Args:
        q: (B, Hk, T, K), any floating-point dtype.
        k: (B, Hk, T, K).
        v: (B, H, T, V); H is a multiple of Hk.
        decay: (H,), log decay of every token; none is 0.
        g: (B, H, T), log decay of a token; none is 0.
        scale: none is K^-0.5.
        initial_state: (B, H, K, V), or (sequences, H, K, V); with state_v_first (.., V, K).
        return_state: also return the state after the last token.
        state_v_first: the order of the state's dimensions.
        cu_seqlens: (sequences + 1,), the first token of each packed sequence; B is then 1.

    Returns:
        out (B, H, T, V), or (out, state).
    """
    wide = wide_dtype(q)
    logs = v.new_zeros(v.shape[:3], dtype=wide)
    if decay is not None:
        logs = logs + decay.to(wide)[:, None]
    if g is not None:
        logs = logs + g.to(wide)
    state = None if initial_state is None else initial_state.to(wide)
    if state is not None and state_v_first:
        state = state.mT
    if scale is None:
        scale = q.shape[3] ** -0.5
    out, after = packed_decayed_attention(
        q.to(wide) * scale, k.to(wide), v.to(wide), logs, state, cu_seqlens
    )
    out = out.to(q.dtype)
    if not return_state:
        return out
    return out, (after.mT if state_v_first else after).contiguous()
