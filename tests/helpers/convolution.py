"""Operands of causal convolutions, and what they should give."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .layouts import embed, unaligned

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# With the layout of the kernel that takes them, where channels and tokens are multiples of 8.
LAYOUTS = {
    "channels": "channels",
    "channels_sliced": "channels",
    "tokens": "tokens",
    "tokens_sliced": "tokens",
    "spread": "any",
    "unaligned": "any",
}


def place(x: Tensor, layout: str) -> Tensor:
    """x (B, C, T) in one of LAYOUTS, with NaN around it."""
    if layout == "channels":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "channels_sliced":
        return embed(x, order=(0, 2, 1))
    if layout == "tokens_sliced":
        return embed(x)
    if layout == "spread":
        return embed(x, order=(2, 1, 0))
    return unaligned(x) if layout == "unaligned" else x.contiguous()


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def edges(lengths: list[int], device: str) -> Tensor:
    """Cumulative lengths."""
    sums = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    return sums.to(torch.int32).to(device)


def operands(case: dict[str, Any], device: str) -> dict[str, Any]:
    """x, weight, bias and keywords of a call, of a case's dtype, width, shape, layout, bias,
    activation, state and packing."""
    (batch, channels, length), width, dtype = case["shape"], case["width"], case["dtype"]
    packed = case.get("packed")
    if packed is not None:
        batch, length = 1, sum(packed) + 3
    taps_dtype = FP32 if case["wide"] else dtype
    sequences = batch if packed is None else len(packed)
    given: dict[str, Any] = {
        "x": place(normal((batch, channels, length), dtype, device), case["layout"]),
        "weight": normal((channels, width), taps_dtype, device),
        "bias": normal((channels,), FP32, device) if case["bias"] else None,
        "activation": case["activation"],
    }
    if case["state"]:
        given["initial_state"] = normal((sequences, channels, width - 1), dtype, device)
    if packed is not None:
        given["cu_seqlens"] = edges(packed, device)
    return given


def exact(given: dict[str, Any]) -> dict[str, Any]:
    """The same in float64."""
    return {
        name: x.detach().double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in given.items()
    }


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """The formula by PyTorch's own convolution at x's precision, for inputs without a state."""
    taps = weight.to(x.dtype).unsqueeze(1)
    offsets = None if bias is None else bias.to(x.dtype)
    padded = torch.nn.functional.pad(x, (weight.shape[1] - 1, 0))
    out = torch.nn.functional.conv1d(padded, taps, offsets, groups=x.shape[1])
    return torch.nn.functional.silu(out) if activation == "silu" else out
