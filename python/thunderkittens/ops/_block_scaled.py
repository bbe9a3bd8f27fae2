"""What the ops of the block-scaled formats share: checks, shapes, the rule for vmap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

WIDE = (torch.bfloat16, torch.float16, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def require_matrix(op: str, name: str, x: Any, dtypes: Sequence[torch.dtype]) -> None:
    """Raises unless x is a dense (M, K) or (B, M, K) tensor of one of the dtypes."""
    require_tensor(op, name, x, dtypes)
    if x.dim() not in (2, 3):
        raise ValueError(
            f"tk.{op}: {name} has shape {tuple(x.shape)}; it must be (M, K) or (B, M, K)"
        )


def require_tensor(op: str, name: str, x: Any, dtypes: Sequence[torch.dtype]) -> None:
    """Raises TypeError unless x is a dense tensor of one of the dtypes."""
    if not isinstance(x, Tensor):
        raise TypeError(f"tk.{op}: {name} must be a torch.Tensor, got {type(x).__name__}")
    if x.layout is not torch.strided:
        raise TypeError(f"tk.{op}: {name} must be a dense tensor (torch.strided), got {x.layout}")
    if x.dtype not in dtypes:
        raise TypeError(f"tk.{op}: {name} is {x.dtype}; supported are {listed(dtypes)}")


def require_same_device(op: str, name: str, x: Tensor, first_name: str, first: Tensor) -> None:
    if x.device != first.device:
        raise TypeError(
            f"tk.{op}: {name} is on {x.device}, {first_name} is on {first.device}; they must be "
            "on one device"
        )


def require_flag(op: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"tk.{op}: {name} must be True or False, got {value!r}")


def require_choice(op: str, name: str, value: Any, choices: Sequence[str]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"tk.{op}: {name} must be a str, got {type(value).__name__}")
    if value not in choices:
        raise ValueError(
            f"tk.{op}: {name} is {value!r}; it must be {' or '.join(map(repr, choices))}"
        )


def require_dtype(op: str, dtype: Any, dtypes: Sequence[torch.dtype]) -> None:
    if dtype not in dtypes:
        raise TypeError(f"tk.{op}: dtype is {dtype}; supported are {listed(dtypes)}")


def listed(dtypes: Sequence[torch.dtype]) -> str:
    """The dtypes in words."""
    names = [str(dtype) for dtype in dtypes]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def second_to_last(op: str, axis: Any, dims: int) -> bool:
    """Whether the axis is that of the rows; raises unless it is one of the last two."""
    if not isinstance(axis, int) or isinstance(axis, bool):
        raise TypeError(f"tk.{op}: axis must be an int, got {type(axis).__name__}")
    if axis in (-1, dims - 1):
        return False
    if axis in (-2, dims - 2):
        return True
    raise ValueError(f"tk.{op}: axis is {axis}; it must be -1 or -2 ({dims - 1} or {dims - 2})")


def scale_shape(shape: Sequence[int], block: int, swizzle: bool) -> tuple[int, ...]:
    """Shape of the scales of (..., M, K): padded in the 128x4 layout."""
    *batch, rows, columns = shape
    blocks = (columns + block - 1) // block
    if swizzle:
        return (*batch, (rows + 127) // 128 * 128, (blocks + 3) // 4 * 4)
    return (*batch, rows, blocks)


def require_scale(
    op: str, name: str, scale: Tensor, shape: Sequence[int], block: int, swizzle: bool
) -> None:
    """Raises ValueError unless the scales are those of a matrix of this shape."""
    expected = scale_shape(shape, block, swizzle)
    if tuple(scale.shape) != expected:
        layout = "in the 128x4 layout" if swizzle else "in the plain layout (swizzle=False)"
        raise ValueError(
            f"tk.{op}: {name} has shape {tuple(scale.shape)}; the scales of "
            f"{tuple(shape)} {layout} are {expected}"
        )


def mapped_first(x: Tensor, dim: int | None, size: int) -> Tensor:
    """x with the mapped dimension, of this size, as the first."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
