"""What the recurrent ops check of their arguments in the same way."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ._memory import require_apart
from ._registration import require_device

MAX_KEY_DIM = 128
MAX_VALUE_DIM = 256
#: What a number per token or head may be stored in, beside the dtype of the operands.
WIDE = torch.float32


def require_dim(op: str, name: str, what: str, size: int, most: int) -> None:
    """Raises ValueError unless the kernels take rows of so many elements."""
    if size % 8 != 0 or size < 8 or size > most:
        raise ValueError(
            f"tk.{op}: {name} has {size} {what}; they must be a multiple of 8 from 8 to {most}"
        )


def require_like(
    op: str, name: str, x: Any, shapes: tuple[tuple[Any, ...], ...], first: str, like: Tensor
) -> None:
    """Raises unless x is a dense tensor of one of the shapes, of float32 or the dtype of `like`."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        kind = x.layout if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"tk.{op}: {name} must be a dense tensor, got {kind}")
    if x.dtype not in (WIDE, like.dtype):
        raise TypeError(
            f"tk.{op}: {name} is {x.dtype}; it must be torch.float32 or {first}'s {like.dtype}"
        )
    require_device(op, name, x, first, like)
    if tuple(x.shape) not in shapes:
        expected = " or ".join(str(shape) for shape in shapes)
        raise ValueError(
            f"tk.{op}: {name} has shape {tuple(x.shape)}; it must be {expected}, as {first} has "
            f"shape {tuple(like.shape)}"
        )


def require_state(
    op: str,
    name: str,
    x: Any,
    shape: tuple[Any, ...],
    first: str,
    like: Tensor,
    dtypes: tuple[torch.dtype, ...] = (WIDE,),
) -> None:
    """Raises unless x can be a state of the shape; a size of None may be any."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        kind = x.layout if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"tk.{op}: {name} must be a dense tensor, got {kind}")
    if x.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"tk.{op}: {name} is {x.dtype}; it must be {expected}")
    require_device(op, name, x, first, like)
    fits = x.dim() == len(shape) and all(
        n is None or m == n for m, n in zip(x.shape, shape, strict=True)
    )
    if not fits:
        expected = ", ".join("slots" if n is None else str(n) for n in shape)
        raise ValueError(f"tk.{op}: {name} has shape {tuple(x.shape)}; it must be ({expected})")


def require_indices(op: str, name: str, x: Any, first: str, like: Tensor) -> None:
    """Raises unless x is a contiguous vector of int32."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        kind = x.layout if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"tk.{op}: {name} must be a dense tensor, got {kind}")
    if x.dtype != torch.int32:
        raise TypeError(f"tk.{op}: {name} is {x.dtype}; it must be torch.int32")
    require_device(op, name, x, first, like)
    if x.dim() != 1 or (x.numel() > 1 and x.stride(0) != 1):
        raise ValueError(
            f"tk.{op}: {name} has shape {tuple(x.shape)} and strides {x.stride()}; it must be a "
            "contiguous vector"
        )


def require_sequences(op: str, cu_seqlens: Any, first: str, like: Tensor) -> int:
    """The number of packed sequences; raises unless the offsets can be theirs."""
    require_indices(op, "cu_seqlens", cu_seqlens, first, like)
    if cu_seqlens.numel() < 1:
        raise ValueError(
            f"tk.{op}: cu_seqlens has no elements; it must have one more than there are sequences"
        )
    if like.shape[0] != 1:
        raise ValueError(
            f"tk.{op}: {first} has batch size {like.shape[0]}; with cu_seqlens it must be 1"
        )
    return int(cu_seqlens.shape[0]) - 1


def require_flag(op: str, name: str, value: Any) -> None:
    """Raises TypeError unless value is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"tk.{op}: {name} must be a bool, got {type(value).__name__}")


def require_number(op: str, name: str, value: Any) -> None:
    """Raises TypeError unless value is a number."""
    if isinstance(value, bool) or not isinstance(value, int | float | torch.SymFloat):
        raise TypeError(f"tk.{op}: {name} must be a number, got {type(value).__name__}")


def require_scale(op: str, scale: Any) -> None:
    """Raises unless scores may be multiplied by scale."""
    if scale is None:
        return
    require_number(op, "scale", scale)
    if not -math.inf < scale < math.inf:
        raise ValueError(f"tk.{op}: scale is {scale}; it must be finite")


def require_heads(op: str, heads: int, groups: int, value: str, key: str) -> None:
    """Raises ValueError unless heads of `value` share those of `key` evenly."""
    if (groups == 0) != (heads == 0) or (groups > 0 and heads % groups != 0):
        raise ValueError(
            f"tk.{op}: {key} has {groups} heads, {value} has {heads}; {value}'s heads must be a "
            f"multiple of {key}'s"
        )


MAX_TOKENS = 8


def require_decode(
    op: str, state: Any, shape: tuple[Any, ...], indices: Any, first: str, like: Tensor
) -> None:
    """Raises unless a step of decoding can change the states; shape is that of one, and `like` has
    the batch and the tokens."""
    batch, tokens = like.shape[0], like.shape[2]
    if tokens < 1 or tokens > MAX_TOKENS:
        raise ValueError(
            f"tk.{op}: {first} has {tokens} tokens per sequence; they must be from 1 to "
            f"{MAX_TOKENS}"
        )
    slots = batch if indices is None else None
    require_state(op, "the state", state, (slots, *shape), first, like, (WIDE, like.dtype))
    if indices is None:
        return
    require_indices(op, "state_indices", indices, first, like)
    if indices.shape[0] != batch:
        raise ValueError(
            f"tk.{op}: state_indices has {indices.shape[0]} elements; it must have the {batch} of "
            f"{first}'s batch"
        )


def require_state_apart(op: str, names: tuple[str, ...], tensors: tuple[Any, ...]) -> None:
    """Raises ValueError where the state, the first tensor, shares memory with another one, or with
    itself."""
    given = [(name, x) for name, x in zip(names, tensors, strict=True) if x is not None]
    require_apart(op, [name for name, _ in given], [x for _, x in given], written=1)
