"""`tk.lolcats_decode` in plain PyTorch: one token more of each sequence."""

from __future__ import annotations

from torch import Tensor

from ._lolcats_published import published_decode
from .lolcats import LolcatsState, Window, lolcats


def lolcats_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_map: Tensor,
    k_map: Tensor,
    alpha: Tensor,
    beta: Tensor,
    state: LolcatsState,
    *,
    window: Window = "terrace",
) -> Tensor:
    """`lolcats` of one token behind those of `state`, which is replaced by the state after it.

    Args:
        q: (B, H, 1, D).
        k: (B, Hkv, 1, D).
        v: (B, Hkv, 1, D).
        q_map, k_map, alpha, beta: as `lolcats` takes them.
        state: its tensors are written.
        window: "terrace" for the weights of `lolcats`; "published" for what the authors' code
            computes in decoding: softmax weights of the last 64 tokens, linear ones of all before
            them.

    Returns:
        out (B, H, 1, D).
    """
    operands = (q, k, v, q_map, k_map, alpha, beta)
    if window == "published":
        out, after = published_decode(*operands, state)
    else:
        out, after = lolcats(*operands, initial_state=state, return_state=True)
    for old, new in zip(state, after, strict=True):
        old.copy_(new)
    return out
