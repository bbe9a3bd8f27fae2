"""flash-attn's functions for caches of keys and values, on `tk.attention_paged`.

Names, layouts and semantics are those of flash-attn 3; `block_table` is flash-attn 2's name of
`page_table`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .ops.attention_paged import attention_paged
from .ops.attention_schedule import attention_schedule

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    block_table: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the newest queries over a cache, into which new keys may go first.

    Args:
        q: (B, s, Hq, D), or packed (T, Hq, D) with cu_seqlens_q; bfloat16, float16 or fp8, whose
            results are bfloat16.
        k_cache: (B_c, capacity, Hkv, D), or (pages, page size, Hkv, D) with page_table; changed in
            place where k is given.
        v_cache: likewise, with Dv.
        k: (B, s_new, Hkv, D), or packed with cu_seqlens_k_new: written behind cache_seqlens keys.
        v: likewise.
        qv: must be None; it is of multi-head latent attention.
        rotary_cos: (length, R / 2), for new keys and queries.
        rotary_sin: likewise.
        cache_seqlens: keys of each sequence before the new ones, (B,) int32 or one integer. None:
            the capacity.
        cache_batch_idx: (B,), int32: rows of the cache, or of the page table.
        cache_leftpad: (B,), int32: keys before are not seen.
        page_table: (sequences, pages), int32.
        cu_seqlens_q: (B + 1,), int32.
        cu_seqlens_k_new: (B + 1,), int32.
        max_seqlen_q: at least the queries of any sequence, with cu_seqlens_q.
        rotary_seqlens: (B,), int32: position of the first new key. None: cache_seqlens.
        q_descale, k_descale, v_descale: (B, Hkv), float32, factors of fp8.
        softmax_scale: factor of the scores; None is 1 / sqrt(D).
        causal: row i sees the keys j <= i + n - s alone.
        window_size: (left, right), negative numbers are unbounded.
        attention_chunk: a query sees the keys of its own chunk of so many alone; 0: all.
        softcap: if positive, a scaled score s becomes softcap * tanh(s / softcap).
        rotary_interleaved: neighbouring columns are pairs, else the two halves.
        scheduler_metadata: of `get_scheduler_metadata`.
        num_splits: 1: keys are not split, so that a sequence's result has the same bits in any
            batch. Other numbers are left to the schedule.
        pack_gqa: without effect; heads that share keys are always rows of one tile.
        sm_margin: without effect.
        return_softmax_lse: also return the LSE.
        block_table: flash-attn 2's name of page_table.
        alibi_slopes: (Hq,) or (B, Hq), float32.
        s_aux: (Hq,), logits of attention sinks.

    Returns:
        out of q's shape with Dv columns; or (out, lse), lse (B, Hq, s) or (Hq, T), float32.

    Raises:
        TypeError: qv is given; and as `tk.attention_paged`.
        ValueError: as `tk.attention_paged`.
    """
    if qv is not None:
        raise TypeError(
            "tk.compat.flash_attn_with_kvcache: qv is not supported; it is of multi-head latent "
            "attention"
        )
    table = block_table if page_table is None else page_table
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
    if not isinstance(cache_seqlens, Tensor):
        keys = capacity if cache_seqlens is None else cache_seqlens
        cache_seqlens = torch.full((batch,), keys, dtype=torch.int32, device=q.device)
    q, k, v, rotary_cos, rotary_sin = map(_widened, (q, k, v, rotary_cos, rotary_sin))
    if scheduler_metadata is not None:
        scheduler_metadata = scheduler_metadata[int(k is not None)]
    with torch.no_grad():
        return attention_paged(
            q,
            k_cache,
            v_cache,
            table,
            cache_seqlens,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            k=k,
            v=v,
            cu_seqlens_k_new=cu_seqlens_k_new,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            rotary_interleaved=rotary_interleaved,
            rotary_seqlens=rotary_seqlens if rotary_cos is not None else None,
            cache_batch_idx=cache_batch_idx,
            cache_leftpad=cache_leftpad,
            causal=causal,
            window_size=_window(window_size),
            attention_chunk=attention_chunk or None,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sink=None if s_aux is None else s_aux.float(),
            scale=softmax_scale,
            k_scale=k_descale,
            v_scale=v_descale,
            q_scale=q_descale,
            schedule=scheduler_metadata,
            split_size=_split_size(num_splits),
            return_lse=return_softmax_lse,
        )


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """The schedules of calls with these lengths: one for calls without new keys and one for calls
    that append max_seqlen_k_new of them, or those of cu_seqlens_k_new.

    Args:
        batch_size: sequences; cache_seqlens says it, too.
        max_seqlen_q: as the call has it; of queries that are not packed their number.
        max_seqlen_k: without effect.
        num_heads_q, num_heads_kv, headdim, headdim_v: of the call.
        cache_seqlens, cu_seqlens_q, cu_seqlens_k_new, cache_leftpad: as the call has them.
        qkv_dtype: of the cache.
        page_size, has_softcap, pack_gqa, sm_margin: without effect.
        max_seqlen_k_new: new keys of each sequence.
        causal, window_size, attention_chunk, num_splits: as the call has them.

    Returns:
        int32, of two rows; the contents are the kernels' own.
    """
    options: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": max_seqlen_q,
        "cache_leftpad": cache_leftpad,
        "causal": causal,
        "window_size": _window(window_size),
        "attention_chunk": attention_chunk or None,
        "split_size": _split_size(num_splits),
        "codes": qkv_dtype in (*_FP8, torch.int8),
    }
    appended: dict[str, Any] = {"cu_seqlens_k_new": cu_seqlens_k_new}
    if cu_seqlens_k_new is None:
        appended = {"new_keys": max_seqlen_k_new}
    value_dim = headdim if headdim_v is None else headdim_v
    made = [
        attention_schedule(
            cache_seqlens, num_heads_q, num_heads_kv, headdim, value_dim, **options, **more
        )
        for more in ({}, appended)
    ]
    return torch.stack(made)


def _widened(x: Any) -> Any:
    """fp8 in bfloat16, which holds it exactly."""
    return x.to(torch.bfloat16) if isinstance(x, Tensor) and x.dtype in _FP8 else x


def _window(window_size: Any) -> tuple[int, int]:
    left, right = (max(int(x), -1) for x in window_size)
    return left, right


def _split_size(num_splits: int) -> int | None:
    """More keys than there are: none are split."""
    return 1 << 27 if num_splits == 1 else None
