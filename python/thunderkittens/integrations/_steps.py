"""A step of generation as one tensor, which a model hands from the function that makes its mask to
its layers.

A row's queries are its newest tokens. So two numbers say what a row sees in a cache: how many keys
it has there, and how many of them are padding before its tokens. With the schedule of
`tk.attention_schedule`, which all layers of the same heads and window share, they are rows of one
tensor of int32. Nothing of it is read by the host. What the host has to know is in its shape:

    (rows, columns, 1, 1)     queries see the keys up to their own
    (1, rows, columns, 1)     queries see all keys
    two rows                  the keys of each row of the batch, and the padding before
    more rows                 the schedule, then these two; how many more says for which heads and
                              window it was made
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.attention_schedule import attention_schedule

TILE_ROWS = 64  # of the kernel: the queries of all heads that share a head of keys
MOST = 16  # kinds of schedules; calls of others make their own
_known: list[tuple[Any, ...]] = []
_lock = threading.Lock()


@dataclass(frozen=True)
class Step:
    """What `tk.attention_decode` takes: (B,), (B,), and a schedule or None."""

    seq_lens: Tensor
    leftpad: Tensor
    schedule: Tensor | None
    causal: bool


def heads_of(config: Any) -> tuple[int, int, int] | None:
    """Heads of queries and of keys, and their dimension, of a model's configuration."""
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or heads < 1:
        return None
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    if not isinstance(kv_heads, int) or not isinstance(dim, int) or heads % kv_heads:
        return None
    return heads, kv_heads, dim


def is_step(config: Any, batch: int, queries: int, keys: int) -> bool:
    """Whether the kernel for few queries is the one to take: there are keys before the queries, and
    the queries of the heads that share keys are rows of one of its tiles, so that keys are read
    once. Where the configuration does not say the heads, it has to be one query."""
    heads = heads_of(config)
    rows = TILE_ROWS * queries if heads is None else queries * (heads[0] // heads[1])
    return batch > 0 and 0 < queries < keys and rows <= TILE_ROWS


def pack(
    keys: Tensor, padding: Tensor, queries: int, causal: bool, left: int, config: Any
) -> Tensor:
    """The tensor of a step.

    Args:
        keys: (B,), int32: how many keys each row has, padding included.
        padding: (B,), int32: how many of them are padding before its tokens.
        queries: how many queries a row has.
        causal: whether a query sees no later keys.
        left: how many keys before its own a query sees; -1: all.
        config: the model's configuration, or None.
    """
    heads, number, schedule = heads_of(config), None, None
    if heads is not None and heads[2] % 8 == 0 and 8 <= heads[2] <= 256:
        number = _number((*heads, left, causal))
    if heads is not None and number is not None:
        schedule = attention_schedule(
            keys,
            *heads,
            max_seqlen_q=queries,
            cache_leftpad=padding,
            causal=causal,
            window_size=_window(left, causal),
        )
    if number is None or schedule is None or schedule.shape[0] < keys.shape[0]:
        packed = torch.stack([keys, padding])
    else:
        packed = schedule.new_zeros(3 + number, schedule.shape[0])
        packed[0] = schedule
        packed[1, : keys.shape[0]] = keys
        packed[2, : keys.shape[0]] = padding
    return packed[:, :, None, None] if causal else packed[None, :, :, None]


def unpack(mask: Tensor, batch: int) -> tuple[Tensor, bool] | None:
    """The rows of a step's tensor, and whether it is causal; None of another mask."""
    if batch == 0 or mask.dtype is not torch.int32 or mask.shape[3] != 1:
        return None
    return (mask[:, :, 0, 0], True) if mask.shape[0] > 1 else (mask[0, :, :, 0], False)


def of_layer(
    rows: Tensor, causal: bool, query: Tensor, key: Tensor, left: int, config: Any
) -> Step:
    """The step of a layer: the schedule belongs to it if the layer has the heads, the dimension and
    the window that it was made for.

    Args:
        rows: of `unpack`.
        causal: likewise.
        query: (B, Hq, S, D).
        key: (B, Hkv, N, D).
        left: how many keys before its own a query sees; -1: all.
        config: the layer's configuration, or None.
    """
    batch, schedule = query.shape[0], None
    if rows.shape[0] > 2:
        heads = heads_of(config)
        same = heads is not None and heads == (query.shape[1], key.shape[1], query.shape[3])
        if heads is not None and same and _number((*heads, left, causal)) == rows.shape[0] - 3:
            schedule = rows[0]
        rows = rows[1:3]
    return Step(rows[0, :batch], rows[1, :batch], schedule, causal)


def _window(left: int, causal: bool) -> tuple[int, int]:
    return left, -1 if causal else left


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _number(kind: tuple[Any, ...]) -> int | None:
    """Of heads, dimension, window and causality, the number that stands for them in the shape of a
    tensor, the same in all of this process; None when there are too many."""
    with _lock:
        if kind not in _known and len(_known) < MOST:
            _known.append(kind)
        return _known.index(kind) if kind in _known else None
