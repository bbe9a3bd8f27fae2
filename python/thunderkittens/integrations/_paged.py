"""Continuous batching of transformers (`generate_batch`, `ContinuousBatchingManager`).

transformers hands a batch of several sequences over as one row of tokens, with cumulative lengths.
Where each sequence has one new token, it also hands over the cache's pages and a block table:
`tk.attention_paged` writes the new keys and attends, in place, with one schedule for all layers of
a step. Of other batches, as with prompts, transformers itself has written the new keys, and has
gathered all keys of the batch by its read indices, before a model calls its attention; pages and
table are not told then. So `tk.attention_varlen` attends to that copy.

Releases before 5.24 leave to a model's attention what is said of transformers above: to write the
new keys, to gather, and to pick what belongs to the layer. `update` does that, by their cache.

transformers decides by the name of an implementation what it prepares: one with "flash" in it gets
lengths in place of masks of the full size, and block tables if there is also a 2 or a 3. It then
looks the functions of flash-attn up, by the name; they are those of `tk.compat`.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..ops.attention_paged import attention_paged
from ..ops.attention_schedule import attention_schedule
from ..ops.attention_varlen import attention_varlen
from ._steps import TILE_ROWS

SUFFIX = "_flash3"
_names: set[str] = set()


def provide(name: str) -> None:
    """Has transformers find flash-attn's functions under a name, where it looks for them."""
    _names.add(name)
    module = importlib.import_module("transformers.modeling_flash_attention_utils")
    found = getattr(module, "_lazy_imports", None)
    if found is None or getattr(found, "_tk_provides", False):
        return

    def imports(implementation: str | None, *args: Any, **options: Any) -> Any:
        if implementation not in _names:
            return found(implementation, *args, **options)
        functions: Any = compat
        padding = (getattr(module, x, None) for x in ("_pad_input", "_unpad_input"))
        return (
            functions.flash_attn_func,
            functions.flash_attn_varlen_func,
            functions.flash_attn_with_kvcache,
            *padding,
        )

    imports._tk_provides = True  # type: ignore[attr-defined]
    module._lazy_imports = imports  # type: ignore[attr-defined]


def update(
    cache: Any, module: Any, key: Tensor, value: Tensor, told: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The keys and values that a layer attends to, as models from transformers 5.24 on have them
    before they call their attention: gathered, or, with a block table, those of the new tokens.

    Args:
        cache: transformers' `PagedAttentionCache`.
        module: the layer.
        key: (1, Hkv, T, D), the new ones.
        value: likewise.
        told: what transformers tells all layers; in place, it becomes what it tells this one.
    """
    layer = module.layer_idx
    found: Any
    if "max_seqlen_k" not in told:  # from 5.19 on
        found = cache.update(key, value, layer, told)
        return found  # type: ignore[no-any-return]
    # Of layers of two kinds, lengths are told by kind.
    kind = "sliding_attention" if getattr(module, "sliding_window", None) else "full_attention"
    lengths, longest = told["cu_seq_lens_k"], told["max_seqlen_k"]
    if isinstance(lengths, dict):
        lengths, longest = lengths[kind], longest[kind]
    told |= {"cu_seq_lens_k": lengths, "max_length_k": longest}
    told["max_length_q"] = told["max_seqlen_q"]
    table = told.get("block_table")
    if table is None:
        found = cache.update(key, value, layer, told["read_index"], told["write_index"])
        key, value = (x.transpose(0, 1).unsqueeze(0) for x in found)
        return key, value
    if hasattr(cache, "get_cache_for_block_table"):  # 5.18
        group, k_cache, v_cache = cache.get_cache_for_block_table(layer)
    else:
        group, place = cache.layer_index_to_group_indices[layer]
        k_cache, v_cache = (
            x[place].unflatten(0, (-1, cache.block_size))
            for x in (cache.key_cache, cache.value_cache)
        )
    told |= {"block_table": table[group], "k_cache": k_cache, "v_cache": v_cache}
    return key, value


def require(edges_q: Any, edges_k: Any, k_cache: Any, v_cache: Any, table: Any) -> None:
    """Raises TypeError where lengths or pages are not told as `paged_attention_forward` says: a
    release that tells them in another way is refused, as its keys may be elsewhere."""
    for name, x in (("cu_seq_lens_q", edges_q), ("cu_seq_lens_k", edges_k)):
        if not isinstance(x, Tensor):
            raise TypeError(
                f"thunderkittens: {name} is a {type(x).__name__}, expected a torch.Tensor; this "
                "release of transformers tells lengths in a way that is not known here"
            )
    if table is not None and (table.dim() != 2 or k_cache is None or v_cache is None):
        raise TypeError(
            f"thunderkittens: block_table has {table.dim()} dimensions, expected 2, with k_cache "
            "and v_cache; this release of transformers tells pages in a way that is not known here"
        )


def packed_mask(
    edges_q: Tensor, edges_k: Tensor, queries: int, keys: int, causal: bool, left: int
) -> Tensor:
    """What the queries of packed sequences see, (1, 1, queries, keys) bool. Those behind the last
    sequence see all keys, so that their softmax is finite."""
    i = torch.arange(queries, device=edges_q.device)
    j = torch.arange(keys, device=edges_q.device)
    last = edges_q.shape[0] - 2
    of_q = torch.searchsorted(edges_q[1:].contiguous(), i, right=True)
    of_k = torch.searchsorted(edges_k[1:].contiguous(), j, right=True)
    row = of_q.clamp(max=last)
    diagonal = (i - edges_q[1:][row] + edges_k[1:][row])[:, None]
    seen = (of_q[:, None] == of_k) & (of_q <= last)[:, None]
    if causal:
        seen = seen & (j <= diagonal)
    if left >= 0:
        seen = seen & (j >= diagonal - left)
    return (seen | ~seen.any(-1, keepdim=True))[None, None]


def decode(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    edges: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """The attention of one new token per sequence, whose keys go into the pages.

    Args:
        module: the layer.
        query: (1, Hq, B, D).
        key: (1, Hkv, B, D), the new ones.
        value: (1, Hkv, B, D).
        k_cache: (pages, page size, Hkv, D).
        v_cache: likewise.
        table: (B, pages of one), int32.
        edges: (B + 1,), int32: cumulative numbers of keys, with the new ones. Rows of padding have
            none: nothing is written for them, and they see nothing.
        options: of `attention_paged`.
    """
    q, k, v = (x[0].transpose(0, 1).unsqueeze(1) for x in (query, key, value))
    shape = query.shape[1], key.shape[1], query.shape[3]
    lengths, schedule = _shared(module, edges[: q.shape[0] + 1], edges, shape, options)
    out: Any = attention_paged(
        q, k_cache, v_cache, table, lengths, k=k, v=v, schedule=schedule, **options
    )
    return out.transpose(0, 1)  # type: ignore[no-any-return]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edges_q: Tensor,
    edges_k: Tensor,
    lengths: tuple[int, int],
    options: dict[str, Any],
) -> Tensor:
    """The attention of packed sequences, (1, Hq, T, D) over gathered keys (1, Hkv, N, D)."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    # Behind the last sequence there may be tokens of padding: they are a sequence without keys.
    edges_q = torch.nn.functional.pad(edges_q, (0, 1), value=q.shape[0])
    edges_k = torch.cat([edges_k, edges_k[-1:]])
    out: Tensor = attention_varlen(q, k, v, edges_q, edges_k, *lengths, **options)
    return out.unsqueeze(0)


def _shared(
    module: Any, edges: Tensor, step: Tensor, shape: tuple[int, ...], options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Lengths before the new tokens, and a schedule, which layers behind the first one share: they
    are remembered on the tensor that transformers makes for a step. A layer that is not behind
    the one before begins another step."""
    shared = not torch.compiler.is_compiling() and shape[0] // shape[1] <= TILE_ROWS
    layer = getattr(module, "layer_idx", None)
    before: Any = getattr(step, "_tk_step", None) if shared and layer is not None else None
    if before is None or layer <= before["layer"]:
        before = {"lengths": (edges[1:] - edges[:-1] - 1).to(torch.int32)}
    if not shared:
        return before["lengths"], None
    kind = (shape, options["window_size"])
    if kind not in before:
        before[kind] = attention_schedule(
            before["lengths"], *shape, new_keys=1, window_size=options["window_size"]
        )
    before["layer"] = layer
    step._tk_step = before  # type: ignore[attr-defined]
    return before["lengths"], before[kind]
