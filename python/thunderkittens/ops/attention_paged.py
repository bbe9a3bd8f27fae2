"""Attention of the newest queries of sequences over their keys in a cache."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from .. import emulation
from ..reference.attention_paged import attention_of_cache
from . import _attention as shared
from . import _cache as cache
from ._registration import (
    call_checked,
    forward_mode_active,
    one_by_one,
    plain_call,
    refuse_forward_mode,
    register,
    require_device,
    require_operands,
    transform_active,
    wants_gradient,
)
from .append_kv import append_kv

_NAME = "attention_paged"
_op = torch.ops.thunderkittens.attention_paged.default
# Of the options that most calls have; each argument of an op costs the host time.
_forward = torch.ops.thunderkittens.attention_paged_forward.default


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
    window_size: tuple[int, int] = shared.UNBOUNDED,
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
    """Attention of the newest queries of each sequence over its keys, which are pages of a cache.

    All lengths, page tables and schedules are on the GPU and are never read by the host: a CUDA
    graph replays with other lengths, pages and finished sequences. Memory behind a sequence's last
    key, and entries of the table behind its last page, are not looked at. Reruns give the same
    bits. There is no gradient. On CPU tensors it runs `tk.reference.attention_paged`.

    Args:
        q: (B, s, Hq, D), or packed (T, Hq, D) with cu_seqlens_q, bfloat16 or float16, any strides.
            D is a multiple of 8 from 8 to 256.
        k_cache: (pages, page_size, Hkv, D), a page size from 1 on, dtype and device of q; or
            float8_e4m3fn, float8_e5m2 or int8; or NVFP4, with k_block_scale: (pages, page_size,
            Hkv, D / 2), float4_e2m1fn_x2 or the same bytes as uint8, the element of even index in
            the low four bits, D a multiple of 32. Strides of the first three dimensions are free,
            in multiples of 16 bytes. Hq is a multiple of Hkv.
        v_cache: (pages, page_size, Hkv, Dv), likewise, with strides of its own.
        page_table: (sequences, pages of one), int32: key j of a sequence is in page j // page_size
            of its row, at j % page_size. None: page b is sequence b.
        seq_lens: (B,), int32: keys of each sequence, those of the queries among them; with `k` the
            keys before these are appended. Where it ends up below 0 there are none, as of a row
            that only fills the batch.
        cu_seqlens_q: (B + 1,), int32: packed queries of sequence b are cu_seqlens_q[b] to
            cu_seqlens_q[b + 1] - 1.
        max_seqlen_q: at least the queries of any sequence, needed with cu_seqlens_q.
        k: (B, s, Hkv, D), or packed (T, Hkv, D), dtype of q: new keys, written into the cache
            before, see `tk.append_kv`.
        v: (B, s, Hkv, Dv), or (T, Hkv, Dv): the new values; both or none.
        cu_seqlens_k_new: (B + 1,), int32, for packed new keys. None: cu_seqlens_q.
        slot_mapping: (T,), int64: where new keys go, see `tk.append_kv`. None: behind the others.
        rotary_cos: (length, R / 2), dtype and device of q: the new keys are rotated by their
            positions; so are the queries, which all stand at the first new key unless the call is
            causal or has a window.
        rotary_sin: likewise.
        rotary_interleaved: neighbouring columns are pairs, else columns i and i + R / 2.
        rotary_seqlens: (B,), int32: the position of each sequence's first new key. None: seq_lens.
        cache_batch_idx: (B,), int32: which row of the table, or which page, a sequence has.
        cache_leftpad: (B,), int32: keys before are not seen.
        causal: row i of s sees the keys j <= i + n - s, where n are the sequence's keys.
        window_size: as for `tk.attention`, beside the diagonal j = i + n - s.
        attention_chunk: a query sees the keys of its own chunk of so many alone, counted from the
            first key that is seen, by the position of its diagonal. One that stands before that
            key, as where there are more queries than keys, sees none. None: all keys.
        softcap: as for `tk.attention`.
        alibi_slopes: (Hq,) or (B, Hq), float32, as for `tk.attention`.
        sink: (Hq,), as for `tk.attention`.
        mask: (tokens, words), int32, a row for each query: bit i % 32 of word i // 32 says whether
            it sees key n - s + i, so that drafted tokens may be a tree. It sees all earlier keys;
            causal does not count.
        scale: as for `tk.attention`; None is 1 / sqrt(D).
        k_scale: factor of a cache of 8 or 4 bits, float32: one, or (B, Hkv), or (pages, page_size,
            Hkv), of each token and head, by strides; of NVFP4 one of the first two. Keys are
            exactly code times factor; what is computed with them is in float16, which values times
            their factors must fit.
        v_scale: likewise.
        q_scale: factor of the queries, float32, one or (B, Hkv), with such a cache: queries that
            are fp8 may be given as bfloat16, which holds them exactly.
        k_block_scale: (pages, page_size, Hkv, D / 16), float8_e4m3fn: scales of blocks of 16
            elements of a key, which make the cache one of NVFP4. An element is exactly code times
            scale times k_scale. Strides are free, in multiples of 4 bytes; the layout is plain, not
            that of 128x4 atoms.
        v_block_scale: (pages, page_size, Hkv, Dv / 16), likewise; both or none.
        schedule: of `tk.attention_schedule`, from the same arguments, for all layers of a step.
            None: the call makes its own.
        split_size: a multiple of 64: keys are cut at multiples of it, and nowhere else, so that a
            sequence's result has the same bits in any batch. None: so that the GPU is full.
        return_lse: also return the LSE.

    Returns:
        out of q's shape with Dv columns, contiguous; with return_lse (out, lse), where lse is (B,
        Hq, s), or (Hq, T) of packed queries, float32. A row that sees no key gives 0, and -inf.
        Tokens behind the last packed sequence are not written.

    Raises:
        TypeError: what is no dense tensor, dtypes, devices.
        ValueError: shapes, strides and numbers that do not fit.
        RuntimeError: a gradient is wanted, or a transform of `torch.func` is active.

    The formula is `tk.reference.attention_paged`.
    """
    # The options that most calls have. Compilers do not trace whether two tuples are one.
    short = (
        not torch.compiler.is_dynamo_compiling()
        and window_size is shared.UNBOUNDED
        and cu_seqlens_q is None
        and not return_lse
        and causal is True
        and attention_chunk is None
        and softcap == 0.0
        and split_size is None
        and cache_batch_idx is None
        and cache_leftpad is None
        and alibi_slopes is None
        and sink is None
        and mask is None
        and q_scale is None
        and rotary_cos is None
    )
    if short and k is None and v is None and rotary_sin is None and slot_mapping is None:
        plain = _plain(  # not by a tuple of arguments, which takes time
            q, k_cache, v_cache, page_table, seq_lens, schedule, k_scale, v_scale, k_block_scale,
            v_block_scale, scale,
        )  # fmt: skip
        if plain is not NotImplemented:
            return cast(Tensor, plain)
    _refuse_gradients(q, k, v, k_cache, v_cache, sink)
    left, right = (-1, -1) if short else cache.window(_NAME, window_size)
    new_keys, chunk = 0, 0
    if attention_chunk is not None:
        cache.require_size(_NAME, "attention_chunk", attention_chunk, 1)
        chunk = attention_chunk
    if (k is None) != (v is None):
        raise ValueError(f"tk.{_NAME}: k and v must be given together")
    if k is not None and v is not None:
        require_operands(_NAME, ("q", "k", "v"), q, k, v)
        if k.dim() == 3 and cu_seqlens_k_new is None:
            cu_seqlens_k_new = cu_seqlens_q
        if k.dim() == 4:
            new_keys = k.shape[1]
        by_slot = slot_mapping is not None
        append_kv(
            k,
            v,
            k_cache,
            v_cache,
            page_table=None if by_slot else page_table,
            seq_lens=None if by_slot else seq_lens,
            slot_mapping=slot_mapping,
            cache_batch_idx=None if by_slot else cache_batch_idx,
            cu_seqlens_k_new=None if by_slot else cu_seqlens_k_new,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            rotary_interleaved=rotary_interleaved,
            rotary_seqlens=None if by_slot else rotary_seqlens,
            k_scale=k_scale,
            v_scale=v_scale,
            k_block_scale=k_block_scale,
            v_block_scale=v_block_scale,
        )
    elif rotary_cos is not None or rotary_sin is not None or slot_mapping is not None:
        raise ValueError(f"tk.{_NAME}: rotary_cos, rotary_sin and slot_mapping need k and v")
    if short and (k is None or new_keys):
        some = (
            *(q, k_cache, v_cache, page_table, seq_lens, schedule, k_scale, v_scale),
            *(k_block_scale, v_block_scale, scale, new_keys),
        )
        return cast(Tensor, call_checked(_forward, some, _check_some))
    if cu_seqlens_q is None:
        max_seqlen_q = q.shape[1] if isinstance(q, Tensor) and q.dim() == 4 else 0
    elif max_seqlen_q is None:
        raise ValueError(f"tk.{_NAME}: packed queries need max_seqlen_q, a bound of their number")
    if isinstance(sink, Tensor) and sink.dtype is q.dtype:
        sink = sink.float()
    args = (
        *(q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, max_seqlen_q),
        *(cu_seqlens_k_new if k is not None and new_keys == 0 else None, new_keys, cache_leftpad),
        *(bool(causal), left, right, chunk, cache.require_split_size(_NAME, split_size)),
        *(cache_batch_idx, scale, softcap, alibi_slopes, sink, mask, schedule),
        *(rotary_cos, rotary_sin, bool(rotary_interleaved), rotary_seqlens, k_scale, v_scale),
        *(q_scale, k_block_scale, v_block_scale),
    )
    out, lse = call_checked(_op, args, _checked)
    return (out, lse) if return_lse else out


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`tk.attention_paged` on a cache without pages: each sequence has a place of its own.

    Args:
        q: as for `tk.attention_paged`.
        k_cache: (sequences, capacity, Hkv, D), by strides.
        v_cache: (sequences, capacity, Hkv, Dv), by strides.
        cache_seqlens: (B,), int32: keys of each sequence; with `k` those before these are appended.
        options: the keywords of `tk.attention_paged`.

    Returns:
        as `tk.attention_paged`.

    Raises:
        TypeError, ValueError, RuntimeError: as `tk.attention_paged`.
    """
    return attention_paged(q, k_cache, v_cache, None, cache_seqlens, **options)


def _refuse_gradients(*tensors: Tensor | None) -> None:
    if forward_mode_active():
        refuse_forward_mode(_NAME, *(x for x in tensors if isinstance(x, Tensor)))
    if transform_active():
        raise RuntimeError(f"tk.{_NAME}: cannot be called under the transforms of torch.func")
    if wants_gradient(tensors):
        raise RuntimeError(
            f"tk.{_NAME} has no gradient, and an operand requires one: call it under "
            "torch.no_grad(), or tk.attention on the keys themselves"
        )


_FIELDS = (
    *("q", "k_cache", "v_cache", "page_table", "seq_lens", "cu_seqlens_q", "max_seqlen_q"),
    *("cu_seqlens_k_new", "new_keys", "cache_leftpad", "causal", "window_left", "window_right"),
    *(
        "attention_chunk",
        "split_size",
        "cache_batch_idx",
        "scale",
        "softcap",
        "alibi_slopes",
        "sink",
        "mask",
    ),
    *("schedule", "rotary_cos", "rotary_sin", "rotary_interleaved", "rotary_seqlens"),
    *("k_scale", "v_scale", "q_scale", "k_block_scale", "v_block_scale"),
)
_DEFAULTS = (
    *(None, 1, None, 0, None, True, -1, -1, 0, 0, None, None, 0.0, None, None, None, None),
    *(None, None, False, None, None, None, None, None, None),
)
_TENSORS = (
    *("q", "k_cache", "v_cache", "page_table", "seq_lens", "cu_seqlens_q", "cu_seqlens_k_new"),
    *("cache_leftpad", "cache_batch_idx", "alibi_slopes", "sink", "mask", "schedule"),
    *("rotary_cos", "rotary_sin", "rotary_seqlens", "k_scale", "v_scale", "q_scale"),
    *("k_block_scale", "v_block_scale"),
)


def _checked(args: tuple[Any, ...]) -> tuple[dict[str, Any], tuple[tuple[int, ...], ...]]:
    """The arguments by name and the shapes of the results; raises what the op would."""
    given = dict(zip(_FIELDS, (*args, *_DEFAULTS[len(args) - 5 :]), strict=True))
    q, k_cache, v_cache, seq_lens = (given[x] for x in ("q", "k_cache", "v_cache", "seq_lens"))
    require_operands(_NAME, ("q",), q)
    packed = given["cu_seqlens_q"] is not None
    if q.dim() != (3 if packed else 4):
        form = (
            "(tokens, heads, head dim) with cu_seqlens_q" if packed else "(B, s, heads, head dim)"
        )
        raise ValueError(f"tk.{_NAME}: q has shape {tuple(q.shape)}; it must be {form}")
    block_scales = given["k_block_scale"], given["v_block_scale"]
    cache.require_caches(_NAME, k_cache, v_cache, "q", q, *block_scales)
    nvfp4 = block_scales[0] is not None
    key_dim, value_dim = (
        cache.columns(x, s) for x, s in zip((k_cache, v_cache), block_scales, strict=True)
    )
    shared.require_dims(_NAME, q.shape[-1], key_dim, value_dim)
    shared.require_heads(_NAME, q.shape[-2], k_cache.shape[2])
    cache.require_integers(_NAME, "seq_lens", seq_lens, q, None if packed else q.shape[0])
    batch = seq_lens.shape[0]
    for name, extra in (("cu_seqlens_q", 1), ("cu_seqlens_k_new", 1), ("cache_leftpad", 0)):
        if given[name] is not None:
            cache.require_integers(_NAME, name, given[name], q, batch + extra)
    cache.require_pages(_NAME, k_cache, given["page_table"], given["cache_batch_idx"], batch, q)
    cache.require_size(_NAME, "max_seqlen_q", given["max_seqlen_q"])
    shared.require_mask(_NAME, 0, given["scale"])
    heads_first = q.unsqueeze(0).transpose(1, 2) if packed else q.transpose(1, 2)
    options = (given["scale"], given["softcap"], given["alibi_slopes"], given["sink"])
    shared.require_options(_NAME, heads_first, batch, *options)
    for name in ("alibi_slopes", "sink"):
        x = given[name]
        if x is not None and x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(f"tk.{_NAME}: {name} must have adjacent elements")
    tokens = q.shape[0] if packed else q.shape[0] * q.shape[1]
    mask = given["mask"]
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype is not torch.int32:
            what = getattr(mask, "dtype", type(mask).__name__)
            raise TypeError(f"tk.{_NAME}: mask is {what}; it must be torch.int32")
        require_device(_NAME, "mask", mask, "q", q)
        adjacent = mask.dim() == 2 and (mask.shape[1] <= 1 or mask.stride(1) == 1)
        if not adjacent or mask.shape[0] != tokens:
            raise ValueError(
                f"tk.{_NAME}: mask has shape {tuple(mask.shape)}; it must be ({tokens}, words), a "
                "row for each query, adjacent"
            )
    if given["schedule"] is not None:
        cache.require_integers(_NAME, "schedule", given["schedule"], q)
    cache.require_rotary(_NAME, given["rotary_cos"], given["rotary_sin"], "q", q)
    for name in ("k_scale", "v_scale", "q_scale"):
        cache.require_scale(_NAME, name, given[name], k_cache, batch, nvfp4)
    if given["q_scale"] is not None and given["q_scale"].dim() == 3:
        raise ValueError(f"tk.{_NAME}: q_scale must have one element, or be of sequences and heads")
    if given["rotary_seqlens"] is not None:
        cache.require_integers(_NAME, "rotary_seqlens", given["rotary_seqlens"], q, batch)
    out_shape = (*q.shape[:-1], value_dim)
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return given, (out_shape, lse_shape)


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    given, (out_shape, lse_shape) = _checked(args)
    q = given["q"]
    return q.new_empty(out_shape), q.new_empty(lse_shape, dtype=torch.float32)


def _cpu(*args: Any) -> tuple[Tensor, Tensor]:
    given, (out_shape, _) = _checked(args)
    if emulation.active() and 0 not in out_shape:
        arrays = {name: given.pop(name) for name in _TENSORS}
        result = emulation.run(_NAME, arrays, **given, int8=cache.as_bytes(arrays))
        return result["out"], result["lse"]
    left, right = given.pop("window_left"), given.pop("window_right")
    q, k_cache, v_cache, table, lengths = (given.pop(x) for x in _FIELDS[:5])
    out, lse = attention_of_cache(
        q, k_cache, v_cache, table, lengths, **given, window_size=(left, right), return_lse=True
    )
    return out.contiguous(), lse.contiguous()


def _flops(q_shape: Any, k_shape: Any, v_shape: Any, *args: Any, **kwargs: Any) -> int:
    """Two products, as if every sequence filled its pages."""
    table = args[0] if args else None
    keys = k_shape[1] * (table[1] if table is not None else 1)
    # A cache of NVFP4 has two elements in each column.
    value_dim = v_shape[3] * q_shape[-1] // k_shape[3]
    operations: int = 2 * math.prod(q_shape[:-1]) * keys * (q_shape[-1] + value_dim)
    return operations


register(
    _NAME,
    fake=_fake,
    cpu=_cpu,
    flops=_flops,
    vmap=one_by_one(_op),
    differentiable=False,
)


def _general(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    seq_lens: Tensor,
    schedule: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_block_scale: Tensor | None = None,
    v_block_scale: Tensor | None = None,
    scale: float | None = None,
    new_keys: int = 0,
) -> tuple[Any, ...]:
    """Arguments of attention_paged_forward as those of the op with all options."""
    queries = q.shape[1] if isinstance(q, Tensor) and q.dim() == 4 else 0
    return (
        *(q, k_cache, v_cache, page_table, seq_lens, None, queries, None, new_keys, None),
        *(True, -1, -1, 0, 0, None, scale, 0.0, None, None, None, schedule, None, None, False),
        *(None, k_scale, v_scale, None, k_block_scale, v_block_scale),
    )


def _check_some(args: tuple[Any, ...]) -> None:
    _checked(_general(*args))


_plain = plain_call(_forward, _check_some)

register(
    "attention_paged_forward",
    fake=lambda *args: _fake(*_general(*args))[0],
    cpu=lambda *args: _cpu(*_general(*args))[0],
    flops=_flops,
    vmap=one_by_one(_forward),
)
