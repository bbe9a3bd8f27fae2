"""`attn_implementation="thunderkittens"` for the models of Hugging Face's transformers.

    import thunderkittens.integrations.transformers as integration

    integration.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="thunderkittens")

The names that models pass to their attention function are those of transformers 5. Models make
their masks by a function of ours, `attention_mask`. Plain causal masks, with a window or without,
and those of encoders need no tensor. Of a padded batch the edges are computed on the device, once
for all layers, and `tk.attention_varlen` reads them there. Of a few queries over a cache, as in
generation, it is lengths and a schedule, and `tk.attention_decode` reads the cache in place: up to
64 queries of all heads that share a head of keys, which are one tile of its kernel. Other masks are
tensors as PyTorch's `scaled_dot_product_attention` takes them.

For continuous batching, `generate_batch`, the name is "thunderkittens_flash3": see `_paged`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import emulation
from ..ops._registration import forward_mode_active, transform_active
from ..ops.attention import attention
from ..ops.attention_paged import attention_decode
from ..ops.attention_varlen import attention_varlen
from . import _paged, _steps
from ._padding import dense_mask, packed_edges, token_range
from .sdpa import _suits

NAME = "thunderkittens"
PADDING = ("contiguous", "any")
_HOLES = (
    "thunderkittens: the attention mask has padding between the tokens of a row, as where prompts "
    "are padded on the right and text is generated; pad them on the left, or call "
    "integrations.transformers.register(padding='any')"
)


def register(name: str = NAME, *, padding: str = "contiguous") -> None:
    """Makes `attention_forward` and `attention_mask` known to transformers under a name, and
    `paged_attention_forward` under the name with "_flash3" behind it.

    Args:
        name: what models are given as `attn_implementation`. With "_flash3" behind it, it is for
            continuous batching: transformers knows by that what to prepare.
        padding: what the masks of padded batches may be. "contiguous": the tokens of a row stand
            together, with padding before them, after them, or both. The host never reads a mask. If
            padding stands between tokens, a mask on a CPU is taken as with "any", and one on a GPU
            fails an assertion there, with a message. "any": also between the tokens. Padded batches
            go to PyTorch's attention, with masks of the full size.

    Raises:
        ImportError: transformers is not installed, or has no attention interface.
        ValueError: padding is none of the above.
    """
    if padding not in PADDING:
        raise ValueError(f"thunderkittens: padding is {padding!r}; it must be one of {PADDING}")
    transformers = importlib.import_module("transformers")
    masks = importlib.import_module("transformers.masking_utils")
    transformers.AttentionInterface.register(name, attention_forward)
    function = attention_mask if padding == "contiguous" else partial(attention_mask, holes=True)
    masks.AttentionMaskInterface.register(name, function)
    if hasattr(transformers, "ContinuousBatchingConfig"):
        paged = name + _paged.SUFFIX
        transformers.AttentionInterface.register(paged, paged_attention_forward)
        masks.AttentionMaskInterface.register(paged, function)
        # Up to release 5.18, "paged|" is put before the name under continuous batching. Without a
        # function for masks, models make none then.
        transformers.AttentionInterface.register(f"paged|{paged}", _batched_attention_forward)
        for known in (paged, f"paged|{paged}"):
            _paged.provide(known)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    holes: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of a model's layers, as transformers asks for it.

    Args:
        batch_size: B.
        q_length: how many queries there are.
        kv_length: how many keys.
        q_offset: the position of the first query.
        kv_offset: the position of the first key.
        mask_function: which keys a query sees.
        attention_mask: (B, positions), bool: which tokens are no padding.
        local_size: the window of a layer that has one.
        device: where the mask is needed.
        holes: whether padding may stand between tokens.
        kwargs: what else transformers passes to its own functions.

    Returns:
        None, where the causal mask, the window and the lengths say all. Of a padded batch, the
        edges of its sequences, int32, (1, 1, 2, 4 * B + 1), or (1, 2, 1, 4 * B + 1) where queries
        see later keys too: models pass on what has four dimensions. Of a few queries over a cache,
        where kernels run, lengths and a schedule as `_steps` packs them. Otherwise a mask as
        `scaled_dot_product_attention` takes it.
    """
    masks = _masking()
    causal = mask_function is masks.causal_mask_function or (
        local_size is not None
        and _is_window(masks, mask_function, local_size, kwargs, kv_length > q_length)
    )
    dense = partial(
        masks.sdpa_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        device=device,
        # None would mean that a mask is causal, or not, as PyTorch's function aligns it.
        **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
    )
    if not causal and mask_function is not masks.bidirectional_mask_function:
        made: Tensor | None = dense()
        return made
    # How many keys there are up to the last query's; a static cache has more.
    used = q_offset - kv_offset + q_length if causal else kv_length
    config = kwargs.get("config")
    step = _serves(device, kwargs.get("dtype"))
    step = step and _steps.is_step(config, batch_size, q_length, kv_length)
    plain = attention_mask is None and isinstance(used, int) and used == kv_length
    if plain and not (step and causal):
        return None
    real = masks.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if real is not None:
        if holes:
            made = dense()
            return made
        real = real[:, kv_offset : kv_offset + kv_length]
    begin, end, broken = token_range(real, batch_size, kv_length, used, device)
    if broken is not None:
        if broken.device.type == "cpu" and not torch.compiler.is_compiling():
            if bool(broken.any()):
                made = dense()
                return made
        else:
            torch._assert_async(~broken.any(), _HOLES)
    if step:
        # Padding behind a row's tokens is seen by queries that are padding alone.
        keys = token_range(None, batch_size, kv_length, used, device)[1] if causal else end
        left = local_size - 1 if causal and local_size is not None else -1
        return _steps.pack(keys, begin, q_length, causal, left, config)
    edges = packed_edges(begin, end, q_offset - kv_offset, q_length, kv_length, every=not causal)
    return edges[None, None] if causal else edges[None, :, None]


def _masking() -> Any:
    """transformers' module of masks, which is loaded when `attention_mask` is asked for one."""
    return sys.modules["transformers.masking_utils"]


def _is_window(
    masks: Any, function: Any, size: int, given: dict[str, Any], behind: bool = False
) -> bool:
    """Whether a mask function is that of a causal window, and nothing is added to it; `behind` says
    whether there are keys before the queries."""
    window = masks.sliding_window_causal_mask_function(size)
    if torch.compiler.is_compiling():
        # Closures cannot be looked into here. A window that may be left to PyTorch's causal flag,
        # and is no chunk, has nothing added. A step on a static cache does not say so; behind a
        # cache, what is added makes it another function.
        plain = given.get("allow_is_causal_skip") or (
            behind and function.__code__ is window.__code__
        )
        config = given.get("config")
        chunks = config is None or getattr(config, "attention_chunk_size", None) is not None
        return bool(plain) and not given.get("use_vmap") and not chunks
    if getattr(function, "__code__", None) is not window.__code__:
        return False
    parts, expected = (f.__closure__[0].cell_contents for f in (function, window))
    return (
        len(parts) == 2
        and parts[1] is expected[1]
        and parts[0].__code__ is expected[0].__code__
        and parts[0].__closure__[0].cell_contents == size
    )


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer, as transformers calls it.

    Calls in bfloat16 or float16 on a GPU, or on the emulator inside of `tk.emulate()`, go to
    `tk.attention`, those of padded batches to `tk.attention_varlen`, and steps of generation to
    `tk.attention_decode`: causal, with windows, softcap and sinks. Masks that are tensors of the
    full size, dropout, biases, other dtypes and CPU tensors go to PyTorch: to
    `torch.nn.functional.scaled_dot_product_attention`, or, with softcap or sinks, which that has
    not, to the formula.

    Args:
        module: the layer; its `is_causal` is used when the argument is None.
        query: (B, Hq, Sq, D).
        key: (B, Hkv, Sk, D).
        value: (B, Hkv, Sk, Dv).
        attention_mask: what this module's `attention_mask` returns, or a mask as
            `scaled_dot_product_attention` takes it.
        dropout: probability of dropping a weight.
        scaling: factor of the scores; None is 1 / sqrt(D).
        is_causal: whether a row sees no later keys, where there is no mask. The last row sees all.
        sliding_window: a row sees so many keys, its own included.
        softcap: cap of the scores.
        s_aux: (Hq,), logits of attention sinks.
        position_bias: broadcast to (B, Hq, Sq, Sk), added to the scores.
        kwargs: what else models pass is not needed.

    Returns:
        (B, Sq, Hq, Dv), and None for the weights. Rows of padding hold finite values.
    """
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    left = sliding_window - 1 if sliding_window else -1
    edges, step = None, None
    if attention_mask is not None and attention_mask.dtype is torch.int32:
        found = _steps.unpack(attention_mask, query.shape[0])
        if found is None:
            causal = attention_mask.shape[1] == 1
            edges = attention_mask.flatten(0, 2)
        else:
            causal = found[1]
            step = _steps.of_layer(*found, query, key, left, getattr(module, "config", None))
    window = (left, -1 if causal else left)
    plain = attention_mask is None or edges is not None or step is not None
    taken = plain and not dropout and position_bias is None and _takes(query, key, value)
    if step is not None and not (taken and _without_gradients(query, key, value, s_aux)):
        begin, end, queries = step.leftpad, step.seq_lens, query.shape[2]
        first, every = end - queries, not causal
        edges = packed_edges(begin, end, first, queries, key.shape[2], every=every)
        step = None
    if taken:
        options = {"causal": causal, **_options(query, window, softcap, scaling, s_aux)}
        if step is not None:
            q, k, v = query.transpose(1, 2), _rows(key), _rows(value)
            options |= {"cache_leftpad": step.leftpad, "schedule": step.schedule}
            stepped: Any = attention_decode(q, k, v, step.seq_lens, **options)
            return stepped, None
        if edges is None:
            return attention(query, key, value, **options).transpose(1, 2), None
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        lengths = query.shape[2], key.shape[2]
        packed = attention_varlen(q, k, v, edges[0], edges[1], *lengths, **options)
        return packed.unflatten(0, (query.shape[0], lengths[0])), None
    mask = attention_mask
    # PyTorch's own causal mask is aligned to the upper left corner, and it has no windows.
    square = query.shape[2] == key.shape[2]
    simple = causal and mask is None and left < 0 and square
    if edges is not None or (mask is None and not simple and (causal or left >= 0)):
        sizes = query.shape[0], query.shape[2], key.shape[2]
        mask = dense_mask(edges, *sizes, causal, window, query.device)
    if softcap or s_aux is not None or position_bias is not None:
        if simple:
            sizes = query.shape[0], query.shape[2], key.shape[2]
            mask = dense_mask(None, *sizes, True, window, query.device)
        out = _formula(
            query, key, value, mask, dropout, scaling, softcap or 0.0, s_aux, position_bias
        )
    else:
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=simple,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return out.transpose(1, 2).contiguous(), None


def paged_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    block_table: Tensor | None = None,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer under continuous batching, as transformers calls it.

    With a block table, `tk.attention_paged` writes the new keys into the pages and attends to them
    in place. Without, transformers has gathered the keys of the batch, and `tk.attention_varlen`
    attends to that copy: the pages are not told. Calls without lengths are `attention_forward`'s.

    Args:
        module: the layer.
        query: (1, Hq, T, D), the new tokens of all sequences.
        key: (1, Hkv, T, D) with a block table, else (1, Hkv, N, D), the keys of all sequences.
        value: likewise.
        attention_mask: None under continuous batching.
        dropout: as for `attention_forward`.
        cu_seq_lens_q: (B + 1,), int32: cumulative numbers of new tokens.
        cu_seq_lens_k: (B + 1,), int32: cumulative numbers of keys, those of new tokens among them.
        max_length_q: at least the new tokens of any sequence; None: T.
        max_length_k: at least the keys of any; None: N.
        block_table: (B, pages), int32, where each sequence has one new token.
        k_cache: (pages, page size, Hkv, D), with a block table.
        v_cache: likewise.
        cache: transformers' cache, in the releases that leave it to this function. There, `key` and
            `value` are those of the new tokens, and what belongs to the layers is not yet the
            layer's own: see `_paged.update`.
        kwargs: those of `attention_forward`.

    Returns:
        (1, T, Hq, Dv), and None for the weights.

    Raises:
        TypeError: lengths or pages are told in a way that this function does not know.
    """
    if cu_seq_lens_q is None and cu_seq_lens_k is None:
        out = attention_forward(module, query, key, value, attention_mask, dropout, **kwargs)
        return out
    if cache is not None:
        told = {"cu_seq_lens_k": cu_seq_lens_k, "max_length_q": max_length_q, **kwargs}
        told |= {"max_length_k": max_length_k, "block_table": block_table}
        key, value = _paged.update(cache, module, key, value, told)
        given = query, key, value, attention_mask, dropout, cu_seq_lens_q
        return paged_attention_forward(module, *given, **told)
    edges: tuple[Any, Any] = (cu_seq_lens_q, cu_seq_lens_k)
    pages: tuple[Any, Any, Any] = (k_cache, v_cache, block_table)
    _paged.require(*edges, *pages)
    window = kwargs.get("sliding_window")
    left = window - 1 if window else -1
    scores = (kwargs.get(name) for name in ("softcap", "scaling", "s_aux"))
    options = _options(query, (left, -1), *scores)
    if block_table is not None:
        return _paged.decode(module, query, key, value, *pages, edges[1], options), None
    lengths = (
        query.shape[2] if max_length_q is None else max_length_q,
        key.shape[2] if max_length_k is None else max_length_k,
    )
    if not dropout and _takes(query, key, value):
        causal = {"causal": True, **options}
        return _paged.attend(query, key, value, *edges, lengths, causal), None
    mask = _paged.packed_mask(*edges, query.shape[2], key.shape[2], True, left)
    return attention_forward(module, query, key, value, mask, dropout, **kwargs)


def _batched_attention_forward(*operands: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """`paged_attention_forward`, for continuous batching alone: there are no masks."""
    if kwargs.get("cu_seq_lens_q") is None:
        raise ValueError(
            "thunderkittens: this attn_implementation is for continuous batching alone, and the "
            "call tells no lengths; give the name without what stands before '|'"
        )
    return paged_attention_forward(*operands, **kwargs)


def _options(
    query: Tensor,
    window: tuple[int, int],
    softcap: float | None,
    scale: float | None,
    sink: Tensor | None,
) -> dict[str, Any]:
    """What the ops take of a layer's scores."""
    if sink is not None and sink.dtype is not torch.float32:
        sink = sink.to(query.dtype)
    return {"window_size": window, "softcap": softcap or 0.0, "scale": scale, "sink": sink}


def _rows(cache: Tensor) -> Tensor:
    """Keys or values (B, H, N, D) as a cache (B, N, H, D), in place where rows are of 16 bytes."""
    strides = [s for n, s in zip(cache.shape[:3], cache.stride()[:3], strict=True) if n > 1]
    if cache.stride(3) != 1 or any(s % 8 for s in strides):
        cache = cache.contiguous()
    return cache.transpose(1, 2)


def _without_gradients(*operands: Tensor | None) -> bool:
    """Whether nothing is differentiated or transformed: the kernel for caches has no gradient."""
    if transform_active() or forward_mode_active():
        return False
    wanted = any(x.requires_grad for x in operands if x is not None)
    return not (torch.is_grad_enabled() and wanted)


def _serves(device: torch.device | str, dtype: torch.dtype | None) -> bool:
    """Whether kernels will run on a model's tensors, of this dtype or by autocast."""
    kind = torch.device(device).type
    if kind != "cuda" and not _emulated():
        return False
    return dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(kind)


def _takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernels take the operands."""
    return (query.is_cuda or _emulated()) and _suits(query, key, value, True)


def _emulated() -> bool:
    """Whether CPU tensors go to the emulator; what is compiled does not."""
    return not torch.compiler.is_compiling() and emulation.active()


def _formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float | None,
    softcap: float,
    sink: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Attention in PyTorch, with what its own function lacks; the softmax is in float32."""
    batch, heads, rows, dim = query.shape
    groups = heads // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    scores = query @ key.mT * (dim**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        if mask.dtype is torch.bool:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + mask
    if sink is not None:
        column = sink.to(scores.dtype).view(1, heads, 1, 1).expand(batch, heads, rows, 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    if sink is not None:
        weights = weights[..., :-1]
    return F.dropout(weights, dropout) @ value
