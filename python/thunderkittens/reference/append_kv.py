"""`tk.append_kv` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from .nvfp4_quantize import nvfp4_quantize

# Of codes of 8 bits.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: Tensor | None = None,
    seq_lens: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_positions: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    rotary_interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_block_scale: Tensor | None = None,
    v_block_scale: Tensor | None = None,
) -> None:
    """Writes new keys, rotated if there is a table, and values into a cache.

    Args:
        k: (B, s, Hkv, D), or packed (T, Hkv, D).
        v: (B, s, Hkv, Dv), or (T, Hkv, Dv).
        k_cache, v_cache: (pages, page_size, Hkv, D and Dv); changed in place.
        page_table, cache_batch_idx: as for `attention_paged`.
        seq_lens: (B,) keys that each sequence has; the new ones come behind.
        slot_mapping: (T,) in place of these: page * page_size + offset of each token; a negative
            one is left out.
        cu_seqlens_k_new: (B + 1,) where packed tokens of a sequence are.
        rotary_cos, rotary_sin, rotary_interleaved: as for `rotate`.
        rotary_positions: (T,); None: where a token goes in its sequence.
        rotary_seqlens: (B,) positions of the sequences' first new tokens; None: seq_lens.
        k_scale, v_scale: of caches of 8 bits: one, or (B, Hkv), by which tokens are divided, or
            (pages, page_size, Hkv), which is written: the largest of each head of a token over the
            largest code. Of caches of NVFP4: one, or (B, Hkv), the global scale of
            `nvfp4_quantize`.
        k_block_scale, v_block_scale: (pages, page_size, Hkv, D / 16 and Dv / 16), e4m3, which are
            written: caches of NVFP4, of D / 2 and Dv / 2 bytes.
    """
    size = k_cache.shape[1]
    tokens = [x.flatten(0, 1) if x.dim() == 4 else x for x in (k, v)]
    count = len(tokens[0])
    owners = torch.zeros(count, dtype=torch.long, device=k.device)
    positions = torch.zeros(count, dtype=torch.long, device=k.device)
    if slot_mapping is not None:
        slots = slot_mapping.long()
    else:
        assert seq_lens is not None
        slots = torch.full((count,), -1, dtype=torch.long, device=k.device)
        edges = (
            cu_seqlens_k_new.tolist()
            if cu_seqlens_k_new is not None
            else [b * k.shape[1] for b in range(k.shape[0] + 1)]
        )
        for b, before in enumerate(seq_lens.tolist()):
            rows = slice(edges[b], edges[b + 1])
            at = torch.arange(rows.stop - rows.start, device=k.device) + before
            line = b if cache_batch_idx is None else int(cache_batch_idx[b])
            if page_table is None:
                pages, offsets = torch.full_like(at, line), at
                inside = (at >= 0) & (at < size)
            else:
                inside = (at >= 0) & (at < size * page_table.shape[1])
                pages = page_table[line][(at // size).clamp(0, page_table.shape[1] - 1)].long()
                offsets = at % size
            slots[rows] = torch.where(inside & (pages >= 0), pages * size + offsets, -1)
            begin = before if rotary_seqlens is None else int(rotary_seqlens[b])
            positions[rows] = at - before + begin
            owners[rows] = b
    if rotary_positions is not None:
        positions = rotary_positions.long()
    keys = tokens[0]
    if rotary_cos is not None and rotary_sin is not None:
        keys = rotate(keys, rotary_cos, rotary_sin, positions, rotary_interleaved)
    kept = (slots >= 0) & (slots < size * k_cache.shape[0])
    places = slots[kept] // size, slots[kept] % size
    for cache, x, scale, block_scale in (
        (k_cache, keys, k_scale, k_block_scale),
        (v_cache, tokens[1], v_scale, v_block_scale),
    ):
        new = x[kept]
        if cache.element_size() > 1:
            cache[places] = new
            continue
        wide = new.float()
        if scale is not None and scale.dim() == 3:
            # By a tensor: a Python number's reciprocal would be multiplied by on a GPU.
            largest = wide.new_full((), LARGEST[cache.dtype])
            scale[places] = factor = wide.abs().amax(-1) / largest
        elif scale is None or scale.numel() == 1:
            factor = torch.ones((), device=k.device) if scale is None else scale
        else:
            factor = scale[owners[kept]]
        if block_scale is not None:
            # As matrices of one row, since each may have a scale of its own.
            codes, blocks, _ = nvfp4_quantize(
                new.flatten(0, 1).unsqueeze(1),
                global_scale=factor.reshape(factor.shape or 1).expand(new.shape[:2]).flatten(),
                swizzle=False,
            )
            for to, made in ((cache, codes), (block_scale, blocks)):
                made = made.view(torch.uint8).squeeze(1).unflatten(0, new.shape[:2])
                to.view(torch.uint8)[places] = made
            continue
        if factor.dim() > 1:
            factor = factor.unsqueeze(-1)
        quotient = torch.where(factor == 0, 0.0, wide / factor)
        if cache.dtype is torch.int8:
            codes = quotient.round().clamp(-128, 127).to(torch.int8)
        else:
            most = LARGEST[cache.dtype]
            codes = quotient.clamp(-most, most).to(cache.dtype)
        cache.view(torch.uint8)[places] = codes.view(torch.uint8)


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool = False
) -> Tensor:
    """Rotary embedding of the first columns of rows, in float32 (float64 of such), rounded once.

    Args:
        x: (T, H, D).
        cos, sin: (length, R / 2); R <= D columns are rotated, in pairs: neighbours if interleaved,
            else columns i and i + R / 2.
        positions: (T,) rows of the table; those outside take its nearest.
        interleaved: which columns are pairs.

    Returns:
        (T, H, D), of the dtype of x.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    columns = 2 * cos.shape[1]
    line = positions.long().clamp(0, cos.shape[0] - 1)
    c, s = (table.to(wide)[line].unsqueeze(1) for table in (cos, sin))
    turned = x[..., :columns].to(wide)
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * c - b * s, b * c + a * s), -1)
    return torch.cat((turned.to(x.dtype), x[..., columns:]), -1)
