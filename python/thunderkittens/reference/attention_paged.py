"""`tk.attention_paged` and `tk.attention_decode` in plain PyTorch: sequence by sequence, keys are
gathered from the cache."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .append_kv import append_kv, rotate
from .attention import band
from .nvfp4_dequantize import nvfp4_dequantize


def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    rotary_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_block_scale: Tensor | None = None,
    v_block_scale: Tensor | None = None,
    schedule: Tensor | None = None,
    split_size: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention_paged` when new keys are in the cache.

    Args:
        q: (B, s, Hq, D), or packed (T, Hq, D) with cu_seqlens_q.
        k_cache: (pages, page_size, Hkv, D).
        v_cache: (pages, page_size, Hkv, Dv).
        page_table: (sequences, pages of one), key j of a sequence is in page j // page_size of its
            row, at j % page_size; None: a page for each sequence.
        seq_lens: (B,) keys of each sequence, those of its queries among them, but for new ones.
        cu_seqlens_q: (B + 1,) for packed queries.
        max_seqlen_q: not needed here.
        k, v: (B, s_new, Hkv, D and Dv), or packed with cu_seqlens_k_new: new keys and values, which
            `append_kv` writes into the cache first; seq_lens are without them.
        cu_seqlens_k_new: (B + 1,) for packed new keys; None: cu_seqlens_q.
        slot_mapping: as for `append_kv`, where they go.
        cache_batch_idx: (B,) row of the table, or page, of each sequence; None: in order.
        cache_leftpad: (B,) the first keys that are not seen.
        causal, window_size, softcap, alibi_slopes, sink, scale: as for `attention`, by the length
            of each sequence; masks are aligned to its end.
        attention_chunk: a query sees the keys of its own chunk of so many alone, counted from
            the first key that is seen; 0 or None: all.
        mask: (tokens, words) int32, a row for each query: bit i % 32 of word i // 32 says whether
            it sees key n - s + i, where n and s are the sequence's keys and queries. Earlier keys
            are all seen; causal does not count.
        k_scale, v_scale: factors of what the caches hold: one, (B, Hkv), or (pages, page_size,
            Hkv).
        k_block_scale, v_block_scale: (pages, page_size, Hkv, D / 16 and Dv / 16), e4m3, of caches
            of NVFP4: these have D / 2 and Dv / 2 bytes, of two codes of e2m1 each.
        q_scale: factor of the queries, one or (B, Hkv).
        rotary_cos, rotary_sin, rotary_interleaved: as for `append_kv`'s `rotate`, of the queries:
            their first stands at the first new key, and so do the others unless the call is causal
            or has a window. rotary_seqlens: (B,), where that stands; None: seq_lens.
        split_size, schedule: without effect.
        return_lse: also return the natural logarithm of the sum of exponentials.

    Returns:
        out of q's shape with Dv columns, or (out, lse) with lse (B, Hq, s), or (Hq, T) of packed
        queries, in the format of the computation. A row that sees no key gives 0 and -inf.
    """
    new_keys = 0
    if k is not None and v is not None:
        if k.dim() == 4:
            new_keys = k.shape[1]
        elif cu_seqlens_k_new is None:
            cu_seqlens_k_new = cu_seqlens_q
        places: dict[str, Tensor | None] = {"slot_mapping": slot_mapping}
        if slot_mapping is None:
            places = {
                "page_table": page_table,
                "seq_lens": seq_lens,
                "cache_batch_idx": cache_batch_idx,
                "cu_seqlens_k_new": None if new_keys else cu_seqlens_k_new,
                "rotary_seqlens": rotary_seqlens,
            }
        append_kv(
            k,
            v,
            k_cache,
            v_cache,
            **places,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            rotary_interleaved=rotary_interleaved,
            k_scale=k_scale,
            v_scale=v_scale,
            k_block_scale=k_block_scale,
            v_block_scale=v_block_scale,
        )
    return attention_of_cache(
        q,
        k_cache,
        v_cache,
        page_table,
        seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new if k is not None and not new_keys else None,
        new_keys=new_keys,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sink=sink,
        mask=mask,
        scale=scale,
        k_scale=k_scale,
        v_scale=v_scale,
        q_scale=q_scale,
        k_block_scale=k_block_scale,
        v_block_scale=v_block_scale,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        rotary_seqlens=rotary_seqlens,
        return_lse=return_lse,
    )


def attention_of_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    new_keys: int = 0,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_block_scale: Tensor | None = None,
    v_block_scale: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    rotary_seqlens: Tensor | None = None,
    split_size: int | None = None,
    schedule: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention_paged` when the new keys have been written.

    Args:
        cu_seqlens_k_new: (B + 1,) where new keys of sequences began.
        new_keys: their number where all sequences have as many.

    The others are those of `attention_paged`.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    packed = cu_seqlens_q is not None
    tokens = q if packed else q.flatten(0, 1)
    edges = (
        cu_seqlens_q.tolist()
        if cu_seqlens_q is not None
        else [b * q.shape[1] for b in range(q.shape[0] + 1)]
    )
    heads = q.shape[-2]
    value_dim = v_cache.shape[3] * (1 if v_block_scale is None else 2)
    out = q.new_zeros((*tokens.shape[:2], value_dim))
    lse = torch.full((heads, len(tokens)), -math.inf, dtype=wide, device=q.device)
    moves = causal or window_size != (-1, -1)
    new = [new_keys] * len(seq_lens)
    if cu_seqlens_k_new is not None:
        new = cu_seqlens_k_new.diff().tolist()
    for b, before in enumerate(seq_lens.tolist()):
        keys = max(before + new[b], 0)
        rows = slice(edges[b], edges[b + 1])
        queries = rows.stop - rows.start
        line = b if cache_batch_idx is None else int(cache_batch_idx[b])
        first = 0 if cache_leftpad is None else int(cache_leftpad[b])
        if queries == 0:
            continue
        index = torch.arange(keys, device=q.device)
        if page_table is None:
            pages, offsets = torch.full_like(index, line), index
        else:
            size = k_cache.shape[1]
            pages, offsets = page_table[line][index // size].long(), index % size
        k, v = (
            _elements(x, s, pages, offsets).to(wide)
            for x, s in ((k_cache, k_block_scale), (v_cache, v_block_scale))
        )
        k, v = (
            x if s is None else x * _factor(s, b, pages, offsets).to(wide)
            for x, s in ((k, k_scale), (v, v_scale))
        )
        for x in (k, v):
            x[:first] = 0  # may be no numbers
        low, high, diagonal = band(bool(causal) and mask is None, window_size, queries, keys)
        offset = index - torch.arange(queries, device=q.device).unsqueeze(1)
        seen = (index >= first).expand(queries, keys)
        if low is not None:
            seen = seen & (offset >= low)
        if high is not None:
            seen = seen & (offset <= high)
        if attention_chunk:
            # Queries before the first key have chunks of negative numbers, and see none.
            own = torch.arange(queries, device=q.device) + diagonal - first
            chunks = (index - first).clamp(min=0) // attention_chunk
            seen = seen & (chunks == (own // attention_chunk).unsqueeze(1))
        if mask is not None:
            seen = seen & _bits(mask[rows], keys - queries, keys)
        rotated = tokens[rows]
        if rotary_cos is not None and rotary_sin is not None:
            begin = before if rotary_seqlens is None else int(rotary_seqlens[b])
            at = begin + index.new_tensor(range(queries)) * moves
            rotated = rotate(rotated, rotary_cos, rotary_sin, at, rotary_interleaved)
        group = heads // k.shape[1]
        x = torch.einsum("shd,nhd->hsn", rotated.to(wide), k.repeat_interleave(group, 1))
        x = x * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if q_scale is not None:
            factor = q_scale if q_scale.dim() < 2 else q_scale[b].repeat_interleave(group)
            x = x * factor.to(wide).reshape(-1, 1, 1)
        if softcap:
            x = softcap * torch.tanh(x / softcap)
        if alibi_slopes is not None:
            slopes = alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[b]
            x = x - slopes.to(wide)[:, None, None] * (offset - diagonal).abs()
        x = x.masked_fill(~seen, -math.inf)
        total = x.logsumexp(2) if keys else x.new_full(x.shape[:2], -math.inf)
        if sink is not None:
            total = torch.logaddexp(total, sink.to(wide).unsqueeze(1))
        weights = torch.exp(x - total.masked_fill(total == -math.inf, 0.0).unsqueeze(2))
        values = v.repeat_interleave(group, 1)
        out[rows] = torch.einsum("hsn,nhd->shd", weights, values).to(q.dtype)
        lse[:, rows] = total
    if not packed:
        out = out.unflatten(0, q.shape[:2])
        lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()
    return (out, lse) if return_lse else out


def _elements(cache: Tensor, block_scale: Tensor | None, pages: Tensor, offsets: Tensor) -> Tensor:
    """(keys, heads, dim) of a cache; PyTorch does not index all formats of 8 bits."""
    if cache.element_size() > 1:
        return cache[pages, offsets]
    rows = cache.view(torch.uint8)[pages, offsets]
    if block_scale is None:
        return rows.view(cache.dtype)
    scales = block_scale.view(torch.uint8)[pages, offsets].view(torch.float8_e4m3fn)
    one = torch.ones(len(rows), device=rows.device)  # the values are exact
    return nvfp4_dequantize(rows, scales, one, swizzle=False, dtype=torch.float32)


def _factor(scale: Tensor, b: int, pages: Tensor, offsets: Tensor) -> Tensor:
    """What a sequence's keys (keys, heads, dim) are to be multiplied by."""
    if scale.numel() == 1 and scale.dim() < 2:
        return scale
    return (scale[pages, offsets] if scale.dim() == 3 else scale[b]).unsqueeze(-1)


def _bits(mask: Tensor, before: int, keys: int) -> Tensor:
    """(queries, keys): what the mask of a sequence's queries lets them see."""
    words = mask.long() & 0xFFFFFFFF
    index = torch.arange(keys, device=mask.device) - before
    inside = index.clamp(0, 32 * mask.shape[1] - 1)
    bits = (words[:, inside // 32] >> (inside % 32)) & 1
    return (index < 0) | ((bits != 0) & (index < 32 * mask.shape[1]))
