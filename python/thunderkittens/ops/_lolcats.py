"""What the ops of LoLCATS share: their states, the checks of shapes, flops, the rule for vmap."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..reference.lolcats import CACHE, WINDOW, LolcatsState
from ._registration import of_any_size, require_device, require_operands

HEAD_DIMS, FEATURES = (64, 128), (32, 64)
NAMES = ("q", "k", "v", "q_map", "k_map")
State = LolcatsState | tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def state_parts(op: str, state: State | None) -> tuple[Tensor | None, ...]:
    """The tensors of a state, or None for each."""
    if state is None:
        return (None,) * 5
    if not isinstance(state, tuple | list) or len(state) != 5:
        raise TypeError(
            f"tk.{op}: a state must be a LolcatsState (numerator, denominator, keys, values, "
            f"lengths), got {type(state).__name__}"
        )
    if state[0] is None:
        raise TypeError(f"tk.{op}: the state's numerator must be a dense tensor, got NoneType")
    return tuple(state)


def require_window(op: str, window: str) -> None:
    if window not in ("terrace", "published"):
        raise ValueError(f'tk.{op}: window must be "terrace" or "published", got {window!r}')


class Sizes(NamedTuple):
    """What a call's tensors are made of."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    dim: int
    features: int

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        cache = (self.batch, self.kv_heads, CACHE, self.dim)
        sums = (self.batch, self.heads, 2 * self.features)
        return (*sums, self.dim), sums, cache, cache, (self.batch,)


def lolcats_shape(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_map: Tensor,
    k_map: Tensor,
    alpha: Tensor,
    beta: Tensor,
    *state: Tensor | None,
    op: str = "lolcats",
) -> Sizes:
    """The sizes of a call; raises what `lolcats` documents."""
    require_operands(op, NAMES, q, k, v, q_map, k_map)
    shape = q.shape
    for name, x, form in (("q", q, "(B, H, N, D)"), ("k", k, "(B, Hkv, N, D)")):
        if x.dim() != 4:
            raise ValueError(
                f"tk.{op}: {name} has shape {tuple(x.shape)}; it must have 4 dimensions, {form}"
            )
    batch, heads, length, dim = shape
    kv_heads = k.shape[1]
    if dim not in HEAD_DIMS:
        raise ValueError(f"tk.{op}: q has head dimension {dim}; it must be 64 or 128")
    if tuple(k.shape) != (batch, kv_heads, length, dim):
        raise ValueError(
            f"tk.{op}: k has shape {tuple(k.shape)}, q has {tuple(shape)}; batch, length and head "
            "dimension must be equal"
        )
    if (heads % kv_heads != 0 or heads == 0) if kv_heads > 0 else heads > 0:
        raise ValueError(
            f"tk.{op}: k has {kv_heads} heads, q has {heads}; q's heads must be a multiple of k's"
        )
    if v.shape != k.shape:
        raise ValueError(
            f"tk.{op}: v has shape {tuple(v.shape)}, k has {tuple(k.shape)}; they must be equal"
        )
    features = q_map.shape[-1] if q_map.dim() == 3 else 0
    if tuple(q_map.shape) != (heads, dim, features) or features not in FEATURES:
        raise ValueError(
            f"tk.{op}: q_map has shape {tuple(q_map.shape)}; it must be ({heads}, {dim}, F) with "
            "F 32 or 64"
        )
    if k_map.shape != q_map.shape:
        raise ValueError(
            f"tk.{op}: k_map has shape {tuple(k_map.shape)}, q_map has {tuple(q_map.shape)}; they "
            "must be equal"
        )
    for name, factor in (("alpha", alpha), ("beta", beta)):
        _require(op, name, factor, q, torch.float32, (heads,))
    sizes = Sizes(batch, heads, kv_heads, length, dim, features)
    if any(x is not None for x in state):
        dtypes = (torch.float32, torch.float32, q.dtype, q.dtype, torch.int32)
        parts = zip(LolcatsState._fields, state, dtypes, sizes.state_shapes(), strict=True)
        for name, part, dtype, expected in parts:
            _require(op, f"the state's {name}", part, q, dtype, expected)
    return sizes


def _require(
    op: str, name: str, x: Any, q: Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        kind = x.layout if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"tk.{op}: {name} must be a dense tensor, got {kind}")
    if x.dtype != dtype:
        raise TypeError(f"tk.{op}: {name} is {x.dtype}; it must be {dtype}")
    require_device(op, f"the state's {name}", x, "q", q)
    if tuple(x.shape) != shape:
        raise ValueError(f"tk.{op}: {name} has shape {tuple(x.shape)}; it must be {shape}")


# The dispatcher drops trailing arguments that have their default value.
DEFAULTS: tuple[Any, ...] = (None, None, None, None, None, False)


def with_defaults(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """All 13 arguments of `lolcats`: seven operands, five parts of a state, return_state."""
    return (*args, *DEFAULTS[len(args) - 7 :])


def lolcats_flops(q_shape: Any, k_shape: Any, v_shape: Any, map_shape: Any, *_: Any) -> int:
    """Of the features, two blocks of scores and values, and the state, each product as a
    multiplication and an addition."""
    tokens, dim, features = math.prod(q_shape[:3]), q_shape[3], map_shape[2]
    operations: int = 2 * tokens * dim * (2 * features + 2 * 2 * WINDOW + 2 * 2 * features)
    return operations


def fold_rule(call: Any, shared: range) -> Any:
    """The rule for `torch.func.vmap`, by merging the mapped dimension into the batch. The arguments
    in `shared` have no batch and must not be mapped."""

    @of_any_size
    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        size, folded = info.batch_size, []
        for i, (x, dim) in enumerate(zip(args, in_dims, strict=True)):
            if not isinstance(x, Tensor) or i in shared:
                if isinstance(x, Tensor) and dim is not None:
                    raise RuntimeError(
                        "tk.lolcats: torch.func.vmap over maps, alpha or beta is not supported"
                    )
                folded.append(x)
                continue
            x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            folded.append(x.flatten(0, 1))
        results = call(*folded)
        unfolded = tuple(x.unflatten(0, (size, x.shape[0] // size)) for x in results)
        return unfolded, (0,) * len(unfolded)

    return rule
