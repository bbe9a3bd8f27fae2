"""`tk.lolcats` in plain PyTorch: softmax attention over a terraced window and linear attention with
learned features before it, under one denominator, by its definition, with the whole matrices of
weights in memory."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .._signatures import as_lolcats

#: Tokens of a block; a query sees its own block and the one before it by softmax.
WINDOW = 64
#: Tokens that a state's caches have room for: token p lies in slot p % CACHE.
CACHE = 2 * WINDOW
#: Which keys have softmax weights: see `lolcats`.
Window = Literal["terrace", "published"]


class LolcatsState(NamedTuple):
    """What LoLCATS keeps of the n tokens so far, with phi = `lolcats_features` of the keys:

    numerator (B, H, 2F, D), float32: phi(k) v^T summed over the first 64 (n // 64 - 1) tokens;
    denominator (B, H, 2F), float32: phi(k) summed over the same tokens;
    keys, values (B, Hkv, 128, D), of k's dtype: the tokens after those, token p in row p % 128;
    lengths (B,), int32: n of each sequence.

    That of window="published" has the sums over all but the last 64 tokens, and these in its
    caches. Where n is a multiple of 64, or less, both are the same.
    """

    numerator: Tensor
    denominator: Tensor
    keys: Tensor
    values: Tensor
    lengths: Tensor


def lolcats_features(x: Tensor, weight: Tensor) -> Tensor:
    """phi(x) = [softmax(x W), softmax(-x W)], (B, H, N, 2F), of x (B, H, N, D), W (H, D, F)."""
    projected = torch.matmul(x, weight)
    return torch.cat([projected.softmax(-1), (-projected).softmax(-1)], -1)


def folded_tokens(lengths: Tensor, window: Window = "terrace") -> Tensor:
    """How many of the first tokens of sequences of these lengths are in the sums of a state."""
    if window == "published":
        return (lengths - WINDOW).clamp(min=0)
    return (lengths // WINDOW - 1).clamp(min=0) * WINDOW


def cached_positions(lengths: Tensor, window: Window = "terrace") -> Tensor:
    """(B, 128): which token is in each row of a state's caches; -1 for none."""
    row = torch.arange(CACHE, device=lengths.device)
    last = lengths.long()[:, None] - 1
    position = last - (last - row) % CACHE
    return position.masked_fill(position < folded_tokens(last + 1, window), -1)


def empty_state(
    batch: int,
    heads: int,
    kv_heads: int,
    dim: int,
    features: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> LolcatsState:
    """The state of no tokens; `features` is F, of one sign."""
    sums = torch.zeros(batch, heads, 2 * features, dim + 1, dtype=torch.float32, device=device)
    cache = torch.zeros(batch, kv_heads, CACHE, dim, dtype=dtype, device=device)
    lengths = torch.zeros(batch, dtype=torch.int32, device=device)
    return LolcatsState(
        sums[..., :dim].contiguous(), sums[..., dim].contiguous(), cache, cache.clone(), lengths
    )


PROMPT_ONLY = (
    'tk.lolcats: window="published" takes a whole prompt and no initial_state; what follows goes '
    'through tk.lolcats_decode(..., window="published"), one token at a time'
)


class LolcatsRows(NamedTuple):
    """Of each query, (B, H, N): the largest score in its window, and the sum of its weights."""

    maxima: Tensor
    denominators: Tensor


@as_lolcats
def lolcats(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_map: Tensor,
    k_map: Tensor,
    alpha: Tensor,
    beta: Tensor,
    *,
    window: Window = "terrace",
    initial_state: LolcatsState | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, LolcatsState]:
    """With a_ij = q_i . k_j / sqrt(D), and c_i the maximum of a_ij over the window of i,

        out_i = (sum over the window of beta exp(a_ij - c_i) v_j
                 + sum before it of alpha phi_q(q_i) . phi_k(k_j) v_j) / (the same without v_j)

    where the window of i is all j <= i in the block of 64 tokens of i or in the one before; in
    float32 (in float64 when q is float64), rounded once to q's dtype.

    With window="published" it is what the authors' PyTorch code computes for a prompt of N tokens:
    the blocks are counted from its end, and up to 64 tokens all pairs have both weights.

    Args:
        q: (B, H, N, D), any floating-point dtype.
        k: (B, Hkv, N, D); head h of q goes with head h // (H / Hkv) of k and v.
        v: (B, Hkv, N, D).
        q_map: (H, D, F), the features' weights for q.
        k_map: (H, D, F), those for k, one for each head of q.
        alpha: (H,), factor of the weights before the window.
        beta: (H,), factor of the weights in it.
        window: "terrace", or "published".
        initial_state: state of the tokens before the first; none with "published".
        return_state: also return the state after the last token.

    Returns:
        out (B, H, N, D), or (out, state).
    """
    if window == "published":
        if initial_state is not None:
            raise ValueError(PROMPT_ONLY)
        out, after = published_lolcats(q, k, v, q_map, k_map, alpha, beta)
        return (out, after) if return_state else out
    out, _, state = lolcats_rows(
        q, k, v, q_map, k_map, alpha, beta, initial_state=initial_state, return_state=return_state
    )
    return out if state is None else (out, state)


def lolcats_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_map: Tensor,
    k_map: Tensor,
    alpha: Tensor,
    beta: Tensor,
    *,
    initial_state: LolcatsState | None = None,
    return_state: bool = False,
) -> tuple[Tensor, LolcatsRows, LolcatsState | None]:
    """`lolcats`, and what its gradient needs of the rows."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, heads, length, dim = q.shape
    group = heads // max(k.shape[1], 1)
    before = torch.zeros(batch, dtype=torch.long, device=q.device)
    keys, values = k, v
    if initial_state is not None:
        before = initial_state.lengths.long()
        keys = torch.cat([initial_state.keys.to(k.dtype), k], 2)
        values = torch.cat([initial_state.values.to(v.dtype), v], 2)
    queries = before[:, None] + torch.arange(length, device=q.device)  # positions
    tokens = queries if initial_state is None else torch.cat([cached_positions(before), queries], 1)
    # Rows of the caches that hold nothing take part in nothing.
    there = (tokens >= 0)[:, None, :, None]
    wide_keys = torch.where(there, keys, 0).to(wide).repeat_interleave(group, 1)
    wide_values = torch.where(there, values, 0).to(wide).repeat_interleave(group, 1)
    distance = (
        queries[:, None, :, None] // WINDOW
        - tokens.div(WINDOW, rounding_mode="floor")[:, None, None]
    )
    seen = (tokens[:, None, None] >= 0) & (tokens[:, None, None] <= queries[:, None, :, None])
    scores = torch.matmul(q.to(wide), wide_keys.mT) / math.sqrt(dim)
    scores = scores.masked_fill(~(seen & (distance <= 1)), -math.inf)
    maxima = scores.amax(-1, keepdim=True) if scores.shape[-1] > 0 else scores.sum(-1, keepdim=True)
    a, b = (x.to(wide)[:, None, None] for x in (alpha, beta))
    features_q = lolcats_features(q.to(wide), q_map.to(wide))
    features_k = lolcats_features(wide_keys, k_map.to(wide))
    linear = torch.matmul(features_q, features_k.mT).masked_fill(~(seen & (distance >= 2)), 0)
    weights = b * (scores - maxima).exp() + a * linear
    out, total = torch.matmul(weights, wide_values), weights.sum(-1)
    if initial_state is not None:
        numerator, denominator = (x.to(wide) for x in initial_state[:2])
        out = out + a * torch.matmul(features_q, numerator)
        total = total + a[..., 0] * torch.matmul(features_q, denominator[..., None])[..., 0]
    out = (out / total.unsqueeze(-1)).to(q.dtype)
    rows = LolcatsRows(maxima[..., 0], total)
    if not return_state:
        return out, rows, None
    after = before + length
    folded = (tokens >= 0) & (tokens < folded_tokens(after)[:, None])
    summed = features_k * folded[:, None, :, None]
    new_numerator, new_denominator = torch.matmul(summed.mT, wide_values), summed.sum(2)
    if initial_state is not None:
        new_numerator, new_denominator = new_numerator + numerator, new_denominator + denominator
    wanted = cached_positions(after)
    caches = []
    for x in (keys, values):
        place = torch.zeros_like(wanted)
        if x.shape[2] > 0:
            place = (tokens[:, None] == wanted[:, :, None]).int().argmax(2)
            picked = x.gather(2, place[:, None, :, None].expand(-1, x.shape[1], -1, dim))
        else:
            picked = x.new_zeros(*x.shape[:2], CACHE, dim)
        caches.append(torch.where((wanted >= 0)[:, None, :, None], picked, 0))
    state = LolcatsState(
        new_numerator, new_denominator, caches[0], caches[1], after.to(torch.int32)
    )
    return out, rows, state


# It is made of the definitions above.
from ._lolcats_published import published_lolcats  # noqa: E402
