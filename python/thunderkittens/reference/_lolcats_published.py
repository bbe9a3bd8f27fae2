"""LoLCATS as its authors' PyTorch code computes it, where that differs from `lolcats`: in prompts
whose length is no multiple of 64 and in decoding. By its definition, as `lolcats` is."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from .lolcats import CACHE, WINDOW, LolcatsState, cached_positions, lolcats_features


def published_masks(length: int, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """(N, N), bool: for which pairs of a query and a key a prompt of N tokens has a softmax weight,
    and for which a linear one. The blocks of 64 tokens are counted from the end, so that the first
    one is the shorter one. Up to 64 tokens, the published masks let every pair have both."""
    token = torch.arange(length, device=device)
    block = (token + -length % WINDOW) // WINDOW
    causal = token <= token[:, None]
    near = causal & (block[:, None] - block <= 1)
    return near, causal if length <= WINDOW else causal & ~near


def last_tokens(x: Tensor) -> Tensor:
    """The cache (B, Hkv, 128, D) of the last 64 tokens of x (B, Hkv, N, D); 0 where it has none."""
    first = max(x.shape[2] - WINDOW, 0)
    kept = x[:, :, first:]
    return functional.pad(kept, (0, 0, 0, CACHE - kept.shape[2])).roll(first % CACHE, 2)


def published_lolcats(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_map: Tensor,
    k_map: Tensor,
    alpha: Tensor,
    beta: Tensor,
) -> tuple[Tensor, LolcatsState]:
    """`lolcats(..., window="published", return_state=True)`."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, heads, length, dim = q.shape
    group = heads // max(k.shape[1], 1)
    keys, values = (x.to(wide).repeat_interleave(group, 1) for x in (k, v))
    near, linear = published_masks(length, q.device)
    scores = torch.matmul(q.to(wide), keys.mT) / math.sqrt(dim)
    scores = scores.masked_fill(~near, -math.inf)
    maxima = scores.amax(-1, keepdim=True) if length > 0 else scores
    a, b = (x.to(wide)[:, None, None] for x in (alpha, beta))
    features_q = lolcats_features(q.to(wide), q_map.to(wide))
    features_k = lolcats_features(keys, k_map.to(wide))
    products = torch.matmul(features_q, features_k.mT).masked_fill(~linear, 0)
    weights = b * (scores - maxima).exp() + a * products
    out = torch.matmul(weights, values) / weights.sum(-1, keepdim=True)
    folded = max(length - WINDOW, 0)
    before = features_k[:, :, :folded]
    lengths = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    state = LolcatsState(
        torch.matmul(before.mT, values[:, :, :folded]),
        before.sum(2),
        last_tokens(k),
        last_tokens(v),
        lengths,
    )
    return out.to(q.dtype), state


def published_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_map: Tensor,
    k_map: Tensor,
    alpha: Tensor,
    beta: Tensor,
    state: LolcatsState,
) -> tuple[Tensor, LolcatsState]:
    """One token behind those of `state`: (out, the state after it). Before it, the token 64 before
    it goes from the caches into the sums, if there is one."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads, dim = q.shape[1], q.shape[3]
    group = heads // max(k.shape[1], 1)
    before = state.lengths.long()

    def rows(cache: Tensor, row: Tensor) -> Tensor:
        return cache.gather(2, row[:, None, None, None].expand(-1, cache.shape[1], 1, dim))

    leaving = (before - WINDOW) % CACHE
    leaves = (before >= WINDOW)[:, None, None, None]
    key, value = (
        torch.where(leaves, rows(x, leaving), 0).to(wide).repeat_interleave(group, 1)
        for x in (state.keys, state.values)
    )
    features = lolcats_features(key, k_map.to(wide)) * leaves
    numerator = state.numerator.to(wide) + torch.matmul(features.mT, value)
    denominator = state.denominator.to(wide) + features[:, :, 0]

    row = torch.arange(CACHE, device=q.device)
    own = (row == (before % CACHE)[:, None])[:, None, :, None]
    new_keys, new_values = (
        torch.where(own, x, cache) for x, cache in ((k, state.keys), (v, state.values))
    )
    position = cached_positions(before + 1, "published")
    there = (position >= 0)[:, None, :, None]
    keys, values = (
        torch.where(there, x, 0).to(wide).repeat_interleave(group, 1)
        for x in (new_keys, new_values)
    )
    scores = torch.matmul(q.to(wide), keys.mT) / math.sqrt(dim)
    scores = scores.masked_fill(~there.mT, -math.inf)
    a, b = (x.to(wide)[:, None, None] for x in (alpha, beta))
    weights = b * (scores - scores.amax(-1, keepdim=True)).exp()
    features_q = lolcats_features(q.to(wide), q_map.to(wide))
    out = torch.matmul(weights, values) + a * torch.matmul(features_q, numerator)
    total = weights.sum(-1, keepdim=True)
    total = total + a * torch.matmul(features_q, denominator[..., None])
    lengths = (before + 1).to(torch.int32)
    return (out / total).to(q.dtype), LolcatsState(
        numerator, denominator, new_keys, new_values, lengths
    )
