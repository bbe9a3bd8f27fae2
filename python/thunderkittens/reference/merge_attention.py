"""`tk.merge_attention` in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """`sum_i exp(lse_i - lse) * out_i`, where lse is the logarithm of the sum of exp(lse_i).

    Args:
        outs: (B, s, H, D) or packed (T, H, D), of one shape.
        lses: (B, H, s) or (H, T); infinite ones, of either sign, are of rows that saw no key.

    Returns:
        (out, lse), of the shapes of the first ones; a row that saw no key gives 0 and -inf.
    """
    wide = torch.float64 if outs[0].dtype == torch.float64 else torch.float32
    parts = torch.stack([lse.to(wide) for lse in lses])
    parts = parts.masked_fill(parts == math.inf, -math.inf)
    lse = parts.logsumexp(0)
    weights = torch.exp(parts - lse.masked_fill(lse == -math.inf, 0.0)).mT.unsqueeze(-1)
    out = sum(torch.where(w == 0, 0.0, w * x.to(wide)) for w, x in zip(weights, outs, strict=True))
    assert isinstance(out, Tensor)
    return out.to(outs[0].dtype), lse
