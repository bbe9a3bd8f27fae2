"""`tk.based` in plain PyTorch: linear attention with the second-order Taylor features of the
exponential, by its definition, with the whole matrix of weights in memory."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._signatures import as_based

#: Features of a token with 16 elements: 1, the elements, their squares, their products in pairs.
FEATURES = 153


class BasedState(NamedTuple):
    """What Based keeps of the tokens so far, in float32: with phi = `based_features`,

    numerator (B, H, 153, Dv) is the sum of phi(k) v^T, denominator (B, H, 153) that of phi(k).
    """

    numerator: Tensor
    denominator: Tensor


def based_features(x: Tensor) -> Tensor:
    """phi(x), (..., 153), of x (..., 16): 1, x_a / 2, x_a^2 / (4 sqrt 2), x_a x_b / 4 for a < b.

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


@as_based
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
    """`o_i = sum over j <= i of (1 + s_ij + s_ij^2 / 2) v_j` with `s_ij = q_i . k_j / 4`, in
    float32 (in float64 when q is float64), rounded once to q's dtype.

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


def _gradient_of_elements(x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of x (..., 16) from that of its features (..., 153)."""
    count = x.shape[-1]
    first, second = torch.triu_indices(count, count, 1, device=x.device)
    pairs = grad[..., 1 + 2 * count :] / 4
    result = grad[..., 1 : 1 + count] / 2
    result = result + x * grad[..., 1 + count : 1 + 2 * count] / (2 * math.sqrt(2.0))
    result = result.index_add(-1, first, pairs * x[..., second])
    return result.index_add(-1, second, pairs * x[..., first])


def based_backward(
    grad_out: Tensor,
    grad_state: BasedState | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    denominators: Tensor,
    *,
    normalize: bool = False,
    initial_state: BasedState | None = None,
) -> tuple[Tensor, Tensor, Tensor, BasedState]:
    """Gradients of `based` with respect to q, k, v and the initial state.

    `denominators` are those of the rows, with eps; unused without `normalize`. With w = 1 /
    denominator, the denominator's gradient is -w dO . O, and that of a weight w dO_i . v_j plus it.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    queries, keys, values, grad = (x.to(wide) for x in (q, k, v, grad_out))
    scores = torch.matmul(queries, keys.mT) / 4
    weights = (1 + scores + scores * scores / 2).tril()
    grad_total = torch.zeros_like(grad[..., :1])
    if normalize:
        reciprocal = 1 / denominators.to(wide).unsqueeze(-1)
        grad_total = -reciprocal * (grad * out.to(wide)).sum(-1, keepdim=True)
        grad = grad * reciprocal
    grad_scores = ((torch.matmul(grad, values.mT) + grad_total) * (1 + scores)).tril() / 4
    dq, dk = torch.matmul(grad_scores, keys), torch.matmul(grad_scores.mT, queries)
    dv = torch.matmul(weights.mT, grad)
    features = based_features(queries)
    before = BasedState(torch.matmul(features.mT, grad), (features * grad_total).sum(-2))
    if initial_state is not None:
        state = BasedState(*(x.to(wide) for x in initial_state))
        inner = torch.matmul(grad, state.numerator.mT) + grad_total * state.denominator.unsqueeze(2)
        dq = dq + _gradient_of_elements(queries, inner)
    if grad_state is not None:
        after = BasedState(*(x.to(wide) for x in grad_state))
        inner = torch.matmul(values, after.numerator.mT) + after.denominator.unsqueeze(2)
        dk = dk + _gradient_of_elements(keys, inner)
        dv = dv + torch.matmul(based_features(keys), after.numerator)
        before = BasedState(*(x + y for x, y in zip(before, after, strict=True)))
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), before
