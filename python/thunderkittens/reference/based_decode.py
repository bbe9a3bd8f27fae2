"""`tk.based_decode` in plain PyTorch: one more token of Based, by its definition."""

from __future__ import annotations

import torch
from torch import Tensor

from .based import BasedState, based_features


def based_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: BasedState | tuple[Tensor, Tensor],
    *,
    normalize: bool = False,
    eps: float = 1e-12,
) -> Tensor:
    """`numerator += phi(k) v^T`, `denominator += phi(k)`, both in place; then `o = phi(q)
    numerator`, in float32 (in float64 when q is float64), rounded once to q's dtype.

    Args:
        q: (B, H, 1, 16), any floating-point dtype.
        k: (B, H, 1, 16).
        v: (B, H, 1, Dv).
        state: numerator (B, H, 153, Dv) and denominator (B, H, 153), changed in place.
        normalize: divide by the product of phi(q) with the denominator, plus eps.
        eps: added to that product.

    Returns:
        out (B, H, 1, Dv).
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    numerator, denominator = state
    keys = based_features(k.to(wide))
    numerator += keys.mT @ v.to(wide)
    denominator += keys.squeeze(2)
    queries = based_features(q.to(wide))
    out = queries @ numerator.to(wide)
    if normalize:
        out = out / (queries @ denominator.to(wide).unsqueeze(3) + eps)
    return out.to(q.dtype)
