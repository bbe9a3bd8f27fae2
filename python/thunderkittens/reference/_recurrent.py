"""What the references of the recurrent ops share: linear attention with a scalar decay per token
and head, chunk by chunk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

#: Log decays are taken as this at the least. Its exponential is 0 in float32, and differences of
#: cumulative sums keep their precision: a decay of 0 (a log decay of -inf) may be given.
LEAST_LOG_DECAY = -128.0
_CHUNK = 64


def wide_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def decayed_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`S_t = e^(g_t) S_(t-1) + k_t v_t^T` and `o_t = S_t^T q_t`, all of one dtype.

    Args:
        q: (B, G, T, K), a head of q and k for H / G heads of v.
        k: (B, G, T, K).
        v: (B, H, T, V).
        g: (B, H, T), log decays.
        state: (B, H, K, V), before the first token.

    Returns:
        out (B, H, T, V), and the state after the last token.
    """
    heads = v.shape[1] // q.shape[1] if q.shape[1] > 0 else 1
    q, k = q.repeat_interleave(heads, 1), k.repeat_interleave(heads, 1)
    g = g.clamp(min=LEAST_LOG_DECAY)
    outs = [v[:, :, :0]]
    for begin in range(0, v.shape[2], _CHUNK):
        queries, keys, values, c = (x[:, :, begin : begin + _CHUNK] for x in (q, k, v, g))
        c = c.cumsum(2)
        later = torch.ones(c.shape[2], c.shape[2], dtype=torch.bool, device=c.device).triu(1)
        differences = c.unsqueeze(3) - c.unsqueeze(2)
        weights = torch.matmul(queries, keys.mT)
        weights = weights * differences.masked_fill(later, -torch.inf).exp()
        before = torch.matmul(queries, state) * c.exp().unsqueeze(3)
        outs.append(torch.matmul(weights, values) + before)
        rest = (c[:, :, -1:] - c).exp().unsqueeze(3)
        added = torch.matmul((keys * rest).mT, values)
        state = state * c[:, :, -1].exp()[..., None, None] + added
    return torch.cat(outs, 2), state


def sequences(length: int, cu_seqlens: Tensor | None) -> Iterator[tuple[int, int]]:
    """The first token of each packed sequence, and the one behind its last."""
    bounds = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
    for begin, end in itertools.pairwise(bounds):
        yield min(max(begin, 0), length), min(max(end, begin, 0), length)


def packed_decayed_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`decayed_attention` of packed sequences, (1, heads, tokens, dim), each with its own state, or
    of a batch. Tokens of no sequence give 0."""
    if state is None:
        count = v.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        state = v.new_zeros(count, v.shape[1], k.shape[3], v.shape[3])
    if cu_seqlens is None:
        return decayed_attention(q, k, v, g, state)
    out, states = torch.zeros_like(v), []
    for i, (begin, end) in enumerate(sequences(v.shape[2], cu_seqlens)):
        queries, keys, values, logs = (x[:, :, begin:end] for x in (q, k, v, g))
        part, after = decayed_attention(queries, keys, values, logs, state[i : i + 1])
        before, behind = out[:, :, :begin], out[:, :, end:]
        out = torch.cat([before, part, behind], 2)
        states.append(after)
    return out, torch.cat([state[:0], *states])


def in_sequences(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Whether tokens of x (B, H, T, D) are of a packed sequence, (T, 1)."""
    rows = torch.arange(x.shape[2], device=x.device)
    return ((rows >= cu_seqlens[0]) & (rows < cu_seqlens[-1])).unsqueeze(1)
