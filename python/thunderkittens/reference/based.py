"""`tk.based` in plain PyTorch: linear attention with the second-order Taylor features of the
exponential, by its definition, with the whole matrix of weights in memory."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

#: Features of a token with 16 elements: 1, the elements, their squares, their products in pairs.
FEATURES = 153


class BasedState(NamedTuple):
    """What Based keeps of the tokens so far, in float32: with phi = `based_features`,

    numerator (B, H, 153, Dv) is the sum of phi(k) v^T, denominator (B, H, 153) that of phi(k).
    """

    numerator: Tensor
    denominator: Tensor


def based_features(x: Tensor) -> Tensor:
    """phi(x), (..., 153), of x (..., 16): 1, x_a / 2, x_a^2 / (4 sqrt 2), and x_a x_b / 4 for a < b.

    phi(q) . phi(k) = 1 + s + s^2 / 2 for s = q . k / 4.
    """
    first, second = torch.triu_indices(x.shape[-1], x.shape[-1], 1, device=x.device)
    return torch.cat(
        [
            torch.ones_like(x[..., :1]),
            x / 2,
            x * x / (4 * math.sqrt(2.0)),
            x[..., first] * x[..., second] / 4,
        ],
        -1,
    )


def based(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    normalize: bool = False,
    eps: float = 1e-12,
    initial_state: BasedState | tuple[Tensor, Tensor] | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, BasedState]:
    """`o_i = sum over j <= i of (1 + s_ij + s_ij^2 / 2) v_j` with `s_ij = q_i . k_j / 4`, in float32
    (in float64 when q is float64), rounded once to q's dtype.

    Args:
        q: (B, H, N, 16), any floating-point dtype.
        k: (B, H, N, 16).
        v: (B, H, N, Dv).
        normalize: divide row i by the sum of its weights, plus eps.
        eps: added to that sum.
        initial_state: state of the tokens before the first.
        return_state: also return the state after the last token.

    Returns:
        out (B, H, N, Dv), or (out, state).
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    queries, keys, values = q.to(wide), k.to(wide), v.to(wide)
    scores = torch.matmul(queries, keys.mT) / 4
    weights = (1 + scores + scores * scores / 2).tril()
    out, total = torch.matmul(weights, values), weights.sum(-1)
    if initial_state is not None:
        before = BasedState(*(x.to(wide) for x in initial_state))
        features = based_features(queries)
        out = out + torch.matmul(features, before.numerator)
        total = total + torch.matmul(features, before.denominator.unsqueeze(-1)).squeeze(-1)
    if normalize:
        out = out / (total + eps).unsqueeze(-1)
    out = out.to(q.dtype)
    if not return_state:
        return out
    features = based_features(keys)
    state = BasedState(torch.matmul(features.mT, values), features.sum(-2))
    if initial_state is not None:
        state = BasedState(*(x + y for x, y in zip(state, before, strict=True)))
    return out, state
