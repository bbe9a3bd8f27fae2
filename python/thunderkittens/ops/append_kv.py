"""New keys and values into a cache, in place."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import emulation
from ..reference.append_kv import append_kv as reference_append
from . import _cache as cache
from ._memory import require_apart
from ._registration import (
    call_checked,
    register,
    require_device,
    require_operands,
    transform_active,
)

_NAME = "append_kv"
_OPERANDS: tuple[str, ...] = ("k_cache", "v_cache", "k", "v")
_NVFP4_OPERANDS = (*_OPERANDS[:2], "k_block_scale", "v_block_scale", *_OPERANDS[2:])
MOST_CODES = 256  # of a row of a cache of 8 or 4 bits, which a warp writes
_op = torch.ops.thunderkittens.append_kv.default


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
    """Writes new keys and values into a cache, at places that the device looks up.

    A token goes behind the keys that its sequence has (`seq_lens`), by way of the page table, or
    into a slot of its own (`slot_mapping`). What falls outside of the cache or of the table is left
    out. The host reads nothing, so that a CUDA graph replays with other lengths, pages and slots.
    There is no gradient. On CPU tensors it runs `tk.reference.append_kv`.

    Args:
        k: (B, s, Hkv, D), or packed (T, Hkv, D), bfloat16 or float16, any strides; D a multiple of
            8.
        v: (B, s, Hkv, Dv), or (T, Hkv, Dv), dtype and device of k.
        k_cache: (pages, page_size, Hkv, D), dtype and device of k, or float8_e4m3fn, float8_e5m2
            or int8, with D up to 256; or NVFP4, with k_block_scale: (pages, page_size, Hkv, D / 2),
            float4_e2m1fn_x2 or uint8, D a multiple of 32. Strides of the first three dimensions are
            multiples of 16 bytes. It is changed in place. Without page_table a page is a sequence.
        v_cache: (pages, page_size, Hkv, Dv), likewise.
        page_table: (sequences, pages of one), int32: key j of a sequence is in page j // page_size
            of its row, at j % page_size. What is behind the new keys is not read.
        seq_lens: (B,), int32: keys that each sequence has before. Tokens of a negative one are left
            out until the first key.
        slot_mapping: (T,), int64, contiguous, in place of seq_lens and page_table: page * page_size
            + offset of each token; a negative one is left out.
        cache_batch_idx: (B,), int32: which row of the table, or which page, a sequence has. None:
            in order. No two sequences may write to one place.
        cu_seqlens_k_new: (B + 1,), int32, for packed tokens with seq_lens: where those of a
            sequence begin.
        rotary_cos: (length, R / 2), dtype and device of k, contiguous: the keys are rotated on the
            way, in their first R columns, a multiple of 16.
        rotary_sin: likewise.
        rotary_positions: (T,), int32: rows of the table. None: where the token stands in its
            sequence. Needed with slot_mapping.
        rotary_seqlens: (B,), int32: the position of each sequence's first new token. None:
            seq_lens.
        rotary_interleaved: neighbouring columns are pairs, else columns i and i + R / 2.
        k_scale: of a cache of 8 bits, float32: keys are divided by it and rounded, what is too
            large to the largest code. One, or (B, Hkv), or (pages, page_size, Hkv), which is
            written: the largest of a token's head, over 448, 57344 or 127. None: 1. Of NVFP4 one,
            or (B, Hkv): the global_scale of `tk.nvfp4_quantize`, the largest of all keys over 2688.
        v_scale: likewise.
        k_block_scale: (pages, page_size, Hkv, D / 16), float8_e4m3fn, strides in multiples of 4
            bytes: scales of blocks of 16 elements of NVFP4, which are written. Codes and scales are
            those of `tk.nvfp4_quantize`, rounded to nearest even.
        v_block_scale: (pages, page_size, Hkv, Dv / 16), likewise; both or none.

    Returns:
        nothing.

    Raises:
        TypeError: what is no dense tensor, dtypes, devices.
        ValueError: shapes and strides that do not fit, seq_lens and slot_mapping both or neither,
            caches that overlap an operand or themselves.
        RuntimeError: a transform of `torch.func` is active.
    """
    if transform_active():
        raise RuntimeError(
            "tk.append_kv changes the caches in place and cannot be called under the transforms of "
            "torch.func"
        )
    if not torch.compiler.is_compiling():
        names, written = _OPERANDS, 2
        operands: tuple[Any, ...] = (k_cache, v_cache, k, v)
        if k_block_scale is not None and v_block_scale is not None:
            names, written = _NVFP4_OPERANDS, 4
            operands = (k_cache, v_cache, k_block_scale, v_block_scale, k, v)
        for x in operands:
            if not isinstance(x, Tensor):
                break
        else:
            require_apart(_NAME, names, operands, written)
    args: tuple[Any, ...] = (k, v, k_cache, v_cache, page_table, seq_lens)
    if (  # an argument that is left out costs the host less than its default
        slot_mapping is not None
        or cache_batch_idx is not None
        or cu_seqlens_k_new is not None
        or rotary_cos is not None
        or rotary_sin is not None
        or rotary_positions is not None
        or rotary_seqlens is not None
        or k_scale is not None
        or v_scale is not None
        or k_block_scale is not None
        or v_block_scale is not None
    ):
        args += (
            *(slot_mapping, cache_batch_idx, cu_seqlens_k_new, rotary_cos, rotary_sin),
            *(rotary_positions, rotary_seqlens, bool(rotary_interleaved), k_scale, v_scale),
            *(k_block_scale, v_block_scale),
        )
    call_checked(_op, args, _require)


def _require(args: tuple[Any, ...]) -> None:
    require_append(*args)


def require_append(
    k: Any, v: Any, k_cache: Any, v_cache: Any, page_table: Any = None, seq_lens: Any = None,
    slot_mapping: Any = None, cache_batch_idx: Any = None, cu_seqlens_k_new: Any = None,
    rotary_cos: Any = None, rotary_sin: Any = None, rotary_positions: Any = None,
    rotary_seqlens: Any = None, rotary_interleaved: bool = False, k_scale: Any = None,
    v_scale: Any = None, k_block_scale: Any = None, v_block_scale: Any = None,
) -> None:  # fmt: skip
    """Raises what `append_kv` documents."""
    require_operands(_NAME, ("k", "v"), k, v)
    if k.dim() not in (3, 4) or v.dim() != k.dim() or v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"tk.{_NAME}: k has shape {tuple(k.shape)}, v has {tuple(v.shape)}; they must be (B, "
            "s, H, D) or (T, H, D), equal but for the head dim"
        )
    for name, x in (("k", k), ("v", v)):
        if x.shape[-1] % 8 or x.shape[-1] == 0:
            raise ValueError(
                f"tk.{_NAME}: {name} has head dim {x.shape[-1]}; it must be a multiple of 8"
            )
    cache.require_caches(_NAME, k_cache, v_cache, "k", k, k_block_scale, v_block_scale)
    nvfp4 = k_block_scale is not None
    dims = cache.columns(k_cache, k_block_scale), cache.columns(v_cache, v_block_scale)
    expected = (k.shape[-2], k.shape[-1], v.shape[-1])
    if (k_cache.shape[2], *dims) != expected:
        raise ValueError(
            f"tk.{_NAME}: k_cache has shape {tuple(k_cache.shape)} and v_cache has "
            f"{tuple(v_cache.shape)}; they must have {expected[0]} heads of {expected[1]} and "
            f"{expected[2]}"
        )
    if k_cache.element_size() == 1 and max(dims) > MOST_CODES:
        raise ValueError(
            f"tk.{_NAME}: head dims are {dims[0]} and {dims[1]}; those of caches of 8 and 4 bits "
            f"must be at most {MOST_CODES}"
        )
    tokens = k.shape[0] * k.shape[1] if k.dim() == 4 else k.shape[0]
    if (seq_lens is None) == (slot_mapping is None):
        raise ValueError(f"tk.{_NAME}: either seq_lens or slot_mapping must say where tokens go")
    if slot_mapping is not None:
        if not isinstance(slot_mapping, Tensor) or slot_mapping.dtype is not torch.int64:
            what = getattr(slot_mapping, "dtype", type(slot_mapping).__name__)
            raise TypeError(f"tk.{_NAME}: slot_mapping is {what}; it must be torch.int64")
        require_device(_NAME, "slot_mapping", slot_mapping, "k", k)
        if tuple(slot_mapping.shape) != (tokens,) or not slot_mapping.is_contiguous():
            raise ValueError(
                f"tk.{_NAME}: slot_mapping has shape {tuple(slot_mapping.shape)}; it must be "
                f"({tokens},), contiguous"
            )
    else:
        batch = k.shape[0] if k.dim() == 4 else None
        cache.require_integers(_NAME, "seq_lens", seq_lens, k, batch)
        batch = seq_lens.shape[0]
        if k.dim() == 3:
            if cu_seqlens_k_new is None:
                raise ValueError(
                    f"tk.{_NAME}: packed keys with seq_lens need cu_seqlens_k_new, which says "
                    "whose they are"
                )
            cache.require_integers(_NAME, "cu_seqlens_k_new", cu_seqlens_k_new, k, batch + 1)
        cache.require_pages(_NAME, k_cache, page_table, cache_batch_idx, batch, k)
    batch = None if slot_mapping is not None else seq_lens.shape[0]
    cache.require_scale(_NAME, "k_scale", k_scale, k_cache, batch, nvfp4)
    cache.require_scale(_NAME, "v_scale", v_scale, v_cache, batch, nvfp4)
    cache.require_rotary(_NAME, rotary_cos, rotary_sin, "k", k)
    if rotary_cos is not None:
        if rotary_positions is not None:
            cache.require_integers(_NAME, "rotary_positions", rotary_positions, k, tokens)
        if rotary_seqlens is not None:
            cache.require_integers(_NAME, "rotary_seqlens", rotary_seqlens, k, batch)
        if rotary_positions is None and slot_mapping is not None:
            raise ValueError(f"tk.{_NAME}: with slot_mapping rotary needs rotary_positions")


_FIELDS = (
    *("k", "v", "k_cache", "v_cache", "page_table", "seq_lens", "slot_mapping", "cache_batch_idx"),
    *("cu_seqlens_k_new", "rotary_cos", "rotary_sin", "rotary_positions", "rotary_seqlens"),
    *("rotary_interleaved", "k_scale", "v_scale", "k_block_scale", "v_block_scale"),
)
_DEFAULTS = (*(None,) * 9, False, *(None,) * 4)


def _fake(*args: Any) -> None:
    require_append(*args)


def _cpu(*args: Any) -> None:
    require_append(*args)
    given = dict(zip(_FIELDS, (*args, *_DEFAULTS[len(args) - 4 :]), strict=True))
    if emulation.active() and args[0].numel() > 0 and args[2].numel() > 0:
        interleaved = given.pop("rotary_interleaved")
        if given["slot_mapping"] is not None:  # the emulator has pairs of 32 bits
            given["slot_mapping"] = given["slot_mapping"].view(torch.int32)
        int8 = cache.as_bytes(given)
        emulation.run(_NAME, given, rotary_interleaved=interleaved, int8=int8)
        return
    operands = [given.pop(name) for name in _FIELDS[:4]]
    reference_append(*operands, **given)


def _flops(k_shape: Any, v_shape: Any, *args: Any, **kwargs: Any) -> int:
    """Of the rotation: three operations for each element of a key at most."""
    operations: int = 3 * math.prod(k_shape)
    return operations


register(_NAME, fake=_fake, cpu=_cpu, flops=_flops, differentiable=False)
