"""`tk.rotary` in plain PyTorch: pairs of elements are rotated by the angle of their position."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    offsets: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    heads: int | None = None,
    in_place: bool = False,
) -> Tensor:
    """`a' = a cos - b sin`, `b' = b cos + a sin` for the pairs (a, b) of the first R elements, in
    float32 (float64 for float64), rounded once; other elements and heads stay as they are.

    Args:
        x: (B, H, T, D), or packed sequences (tokens, H, D); any floating-point dtype.
        cos: (S, R / 2), a row for each position, or (B, T, R / 2), one for each token.
        sin: as cos.
        positions: integers (T,) or (B, T); packed (tokens,). None: 0, 1, ... in each sequence.
        offsets: integers (B,), added to the positions of a sequence.
        cu_seqlens: integers (B + 1,), where the packed sequences begin and end. Tokens behind the
            last stay as they are.
        interleaved: whether pairs are neighbours (2 i, 2 i + 1), instead of (i, i + R / 2).
        inverse: rotates back.
        heads: how many heads are rotated, the first ones. None: all.
        in_place: x itself is changed and returned.

    Returns:
        like x. Where a position has no row, the elements of pairs are NaN.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    packed = x.dim() == 3
    values = x.unsqueeze(0).transpose(1, 2) if packed else x  # (B, H, T, D)
    batch, _, length, _ = values.shape
    half = cos.shape[-1]
    if cos.dim() == 3:
        c, s = cos.to(wide), sin.to(wide)
    else:
        at = torch.arange(length, device=x.device).expand(batch, length)
        if positions is not None:
            at = positions.to(torch.int64).expand(batch, length)
        sequence = torch.arange(batch, device=x.device)[:, None].expand(batch, length)
        inside = torch.ones_like(at, dtype=torch.bool)
        if cu_seqlens is not None:
            edges = cu_seqlens.to(torch.int64)
            token = torch.arange(length, device=x.device)
            sequence = torch.searchsorted(edges, token, right=True)[None] - 1
            inside = (token < edges[-1])[None]
            sequence = sequence.clamp(0, max(edges.numel() - 2, 0))
            if positions is None:
                at = at - edges[sequence]
        if offsets is not None and offsets.numel() > 0:
            at = at + offsets.to(torch.int64)[sequence]
        known = (at >= 0) & (at < cos.shape[0])
        rows = at.clamp(0, max(cos.shape[0] - 1, 0))
        outside = torch.full((), float("nan"), dtype=wide, device=x.device)
        if cos.shape[0] == 0:
            c = s = outside.expand(*at.shape, half)
        else:
            c = torch.where(known[..., None], cos.to(wide)[rows], outside)
            s = torch.where(known[..., None], sin.to(wide)[rows], outside)
        c = torch.where(inside[..., None], c, torch.ones_like(c))
        s = torch.where(inside[..., None], s, torch.zeros_like(s))
    if inverse:
        s = -s
    c, s = c[:, None], s[:, None]
    count = values.shape[1] if heads is None else heads
    turned = values[:, :count, :, : 2 * half].to(wide)
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        pairs = torch.cat([a * c - b * s, b * c + a * s], -1)
    first = torch.cat([pairs.to(x.dtype), values[:, :count, :, 2 * half :]], -1)
    out = torch.cat([first, values[:, count:]], 1)
    out = out.transpose(1, 2).squeeze(0) if packed else out
    return x.copy_(out) if in_place else out
