"""What the ops on caches of keys and values share: checks of caches, lengths and page tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _load
from . import _attention as shared

BLOCK = 64  # keys of a block of the kernels
CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)  # of caches of 8 bits
NVFP4 = (torch.float4_e2m1fn_x2, torch.uint8)  # two elements each, with scales of blocks
NV_BLOCK = 16  # elements of a scale


def require_integers(op: str, name: str, x: Any, like: Tensor, length: Any = None) -> None:
    """Raises unless x is int32 of one dimension, adjacent, on the device of `like`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"tk.{op}: {name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype is not torch.int32:
        raise TypeError(f"tk.{op}: {name} is {x.dtype}; it must be torch.int32")
    if x.device != like.device:
        raise TypeError(
            f"tk.{op}: {name} is on {x.device}, the other tensors are on {like.device}; they must "
            "be on one device"
        )
    if x.dim() != 1 or (x.shape[0] > 1 and x.stride(0) != 1):
        raise ValueError(
            f"tk.{op}: {name} has shape {tuple(x.shape)} and strides {x.stride()}; it must have "
            "one dimension, contiguous"
        )
    if length is not None and x.shape[0] != length:
        raise ValueError(f"tk.{op}: {name} has {x.shape[0]} elements; it must have {length}")


def require_size(op: str, name: str, x: Any, least: int = 0) -> None:
    """Raises unless x is an integer of at least so much."""
    if not isinstance(x, shared.INTEGERS) or isinstance(x, bool):
        raise TypeError(f"tk.{op}: {name} must be an integer, got {type(x).__name__}")
    if x < least:
        raise ValueError(f"tk.{op}: {name} is {x}; it must be at least {least}")


def columns(cache: Tensor, block_scale: Tensor | None) -> int:
    """How many elements a row of a cache has."""
    return cache.shape[3] * (1 if block_scale is None else 2)


def as_bytes(arrays: dict[str, Any]) -> bool:
    """Gives the emulator the codes that it has no type of as those of another format of 8 bits;
    whether they are int8."""
    int8 = arrays["k_cache"].dtype is torch.int8
    for name in ("k_cache", "v_cache"):
        if int8 or arrays[name].dtype in NVFP4:
            arrays[name] = arrays[name].view(torch.float8_e4m3fn)
    return int8


def require_caches(
    op: str,
    k_cache: Tensor,
    v_cache: Tensor,
    name: str,
    like: Tensor,
    k_block_scale: Any = None,
    v_block_scale: Any = None,
) -> None:
    """Raises unless the caches are (pages, page_size, Hkv, D) and (.., Dv), rows of 16 bytes; of
    NVFP4, with scales of blocks, half as many columns."""
    if (k_block_scale is None) != (v_block_scale is None):
        raise ValueError(f"tk.{op}: k_block_scale and v_block_scale must be given together")
    for what, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(x, Tensor):
            raise TypeError(f"tk.{op}: {what} must be a torch.Tensor, got {type(x).__name__}")
        if k_block_scale is None and x.dtype is not like.dtype and x.dtype not in CODES:
            raise TypeError(
                f"tk.{op}: {what} is {x.dtype}, {name} is {like.dtype}; it must be that, or one of "
                f"{', '.join(map(str, CODES))}, or with k_block_scale torch.float4_e2m1fn_x2"
            )
        if k_block_scale is not None and x.dtype not in NVFP4:
            raise TypeError(
                f"tk.{op}: {what} is {x.dtype}; with k_block_scale it must be one of "
                f"{', '.join(map(str, NVFP4))}"
            )
        if x.device != like.device:
            raise TypeError(
                f"tk.{op}: {what} is on {x.device}, {name} is on {like.device}; they must be on "
                "one device"
            )
        if x.dim() != 4:
            raise ValueError(
                f"tk.{op}: {what} has shape {tuple(x.shape)}; it must have 4 dimensions, (pages, "
                "page size, heads, head dim)"
            )
        strides = [s for n, s in zip(x.shape[:3], x.stride()[:3], strict=True) if n > 1]
        adjacent = x.shape[3] == 1 or x.stride(3) == 1
        step = 16 // x.element_size()
        if not adjacent or any(s % step for s in strides):
            raise ValueError(
                f"tk.{op}: {what} has strides {x.stride()}; a token's head must be adjacent, and "
                f"begin at a multiple of {step} elements"
            )
    if k_cache.dtype is not v_cache.dtype:
        raise TypeError(
            f"tk.{op}: k_cache is {k_cache.dtype}, v_cache is {v_cache.dtype}; they must be equal"
        )
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"tk.{op}: k_cache has shape {tuple(k_cache.shape)}, v_cache has "
            f"{tuple(v_cache.shape)}; all but their head dims must be equal"
        )
    if k_block_scale is not None:
        require_block_scale(op, "k", k_block_scale, k_cache)
        require_block_scale(op, "v", v_block_scale, v_cache)


def require_block_scale(op: str, which: str, scale: Any, cache: Tensor) -> None:
    """Raises unless a scale is e4m3, of each block of an NVFP4 cache, rows of 4 bytes."""
    name = f"{which}_block_scale"
    if not isinstance(scale, Tensor) or scale.dtype is not torch.float8_e4m3fn:
        what = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
        raise TypeError(f"tk.{op}: {name} is {what}; it must be torch.float8_e4m3fn")
    if scale.device != cache.device:
        raise TypeError(
            f"tk.{op}: {name} is on {scale.device}, the cache is on {cache.device}; they must be "
            "on one device"
        )
    dim = 2 * cache.shape[3]
    if dim % 32:
        raise ValueError(
            f"tk.{op}: {which}_cache has {cache.shape[3]} columns, of two elements each; the head "
            "dim of NVFP4 must be a multiple of 32"
        )
    expected = (*cache.shape[:3], dim // NV_BLOCK)
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"tk.{op}: {name} has shape {tuple(scale.shape)}; it must be {expected}, a scale for "
            f"each {NV_BLOCK} elements of {which}_cache"
        )
    strides = [s for n, s in zip(scale.shape[:3], scale.stride()[:3], strict=True) if n > 1]
    if scale.stride(3) != 1 or any(s % 4 for s in strides):
        raise ValueError(
            f"tk.{op}: {name} has strides {scale.stride()}; those of a token's head must be "
            "adjacent, and begin at a multiple of 4"
        )


def require_scale(
    op: str, name: str, scale: Any, cache: Tensor, batch: Any, nvfp4: bool = False
) -> None:
    """Raises unless a scale is fp32 of one element, (B, Hkv), or of the tokens of a cache of 8
    bits."""
    if scale is None:
        return
    if not isinstance(scale, Tensor) or scale.dtype is not torch.float32:
        what = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
        raise TypeError(f"tk.{op}: {name} is {what}; it must be torch.float32")
    if scale.device != cache.device:
        raise TypeError(
            f"tk.{op}: {name} is on {scale.device}, the cache is on {cache.device}; they must be "
            "on one device"
        )
    if cache.dtype not in CODES and not nvfp4:
        raise ValueError(f"tk.{op}: {name} is for caches of 8 or 4 bits; this one is {cache.dtype}")
    shape, heads = tuple(scale.shape), cache.shape[2]
    if nvfp4 and shape not in ((), (1,), (batch, heads)):
        raise ValueError(
            f"tk.{op}: {name} has shape {shape}; with block scales it must have one element, or be "
            f"({batch}, {heads}), of sequences and heads"
        )
    if shape not in ((), (1,), (batch, heads), tuple(cache.shape[:3])):
        raise ValueError(
            f"tk.{op}: {name} has shape {shape}; it must have one element, or be ({batch}, {heads})"
            f", of sequences and heads, or {tuple(cache.shape[:3])}, of the cache's tokens"
        )


def require_pages(
    op: str, k_cache: Tensor, table: Any, rows: Any, batch: Any, like: Tensor
) -> None:
    """Raises unless there is a row of the table, or a page, for each sequence."""
    lines, what = k_cache.shape[0], "k_cache"
    if table is not None:
        if not isinstance(table, Tensor):
            raise TypeError(
                f"tk.{op}: page_table must be a torch.Tensor, got {type(table).__name__}"
            )
        if table.dtype is not torch.int32:
            raise TypeError(f"tk.{op}: page_table is {table.dtype}; it must be torch.int32")
        if table.device != like.device:
            raise TypeError(
                f"tk.{op}: page_table is on {table.device}, the other tensors are on "
                f"{like.device}; they must be on one device"
            )
        if table.dim() != 2 or (table.shape[1] > 1 and table.stride(1) != 1):
            raise ValueError(
                f"tk.{op}: page_table has shape {tuple(table.shape)} and strides "
                f"{table.stride()}; it must be (sequences, pages), with adjacent rows"
            )
        lines, what = table.shape[0], "page_table"
    if rows is not None:
        require_integers(op, "cache_batch_idx", rows, like, batch)
    elif lines < batch:
        raise ValueError(
            f"tk.{op}: {what} has {lines} sequences, seq_lens has {batch}; there must be one for "
            "each, or cache_batch_idx says which"
        )


def require_rotary(op: str, cos: Any, sin: Any, name: str, like: Tensor) -> None:
    """Raises unless the table is two of (positions, dim / 2) for rows of the head dim of `like`."""
    if cos is None and sin is None:
        return
    for what, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(x, Tensor):
            raise TypeError(f"tk.{op}: {what} must be a torch.Tensor, got {type(x).__name__}")
        if x.dtype is not like.dtype or x.device != like.device:
            raise TypeError(
                f"tk.{op}: {what} is {x.dtype} on {x.device}, {name} is {like.dtype} on "
                f"{like.device}; they must be equal"
            )
        if x.dim() != 2 or not x.is_contiguous() or x.shape != cos.shape or x.shape[0] == 0:
            raise ValueError(
                f"tk.{op}: {what} has shape {tuple(x.shape)} and strides {x.stride()}; rotary_cos "
                "and rotary_sin must be (positions, rotary dim / 2), contiguous"
            )
    dim = 2 * cos.shape[1]
    if dim == 0 or dim % 16 or dim > like.shape[-1]:
        raise ValueError(
            f"tk.{op}: rotary_cos has {cos.shape[1]} columns; they must be a multiple of 8, and at "
            f"most half of the head dim {like.shape[-1]}"
        )


def choice(problem: dict[str, Any], device: torch.device, sm_count: int) -> dict[str, Any]:
    """What is chosen for a problem on a device, or on one with so many multiprocessors."""
    module = _load.compiled_module()
    if device.type == "cuda":
        properties = shared._device_properties(
            torch.cuda.current_device() if device.index is None else device.index
        )
    else:
        from ..info import EXAMPLE_GPU

        properties = module.DeviceProperties(**{**EXAMPLE_GPU, "sm_count": sm_count})
    chosen: dict[str, Any] = module.choose("attention_paged", problem, properties)
    return chosen


def schedule_numbers(problem: dict[str, Any], device: torch.device, sm_count: int) -> int:
    """How many integers a schedule has, on a device, or on one with so many multiprocessors."""
    return int(choice(problem, device, sm_count)["schedule_ints"])


def window(op: str, window_size: Sequence[int]) -> tuple[int, int]:
    """The pair as the ops take it."""
    if (
        not isinstance(window_size, tuple | list)
        or len(window_size) != 2
        or not all(isinstance(x, shared.INTEGERS) and not isinstance(x, bool) for x in window_size)
    ):
        raise TypeError(
            f"tk.{op}: window_size must be a pair of integers (left, right), got {window_size!r}"
        )
    left, right = window_size
    if left < -1 or right < -1:
        raise ValueError(
            f"tk.{op}: window_size is ({left}, {right}); left and right must be at least 0, or -1 "
            "(unbounded)"
        )
    return left, right


def require_split_size(op: str, split_size: Any) -> int:
    """The number as the ops take it, 0 for None."""
    if split_size is None:
        return 0
    require_size(op, "split_size", split_size, BLOCK)
    if split_size % BLOCK:
        raise ValueError(f"tk.{op}: split_size is {split_size}; it must be a multiple of {BLOCK}")
    return int(split_size)
