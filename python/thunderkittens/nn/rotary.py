"""Rotary position embeddings in the convention of Llama, and of flash-attn's default: the first
half of the rotated elements goes with the second."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Angles of positions, and the rotation by them. It has no state to save.

    Args:
        dim: elements that are rotated, an even number; the others of a head are left alone.
        theta: the base of the frequencies, `theta ** (-2 i / dim)`.
        scaling: None, or Llama 3.1's entries "factor", "low_freq_factor", "high_freq_factor" and
            "original_max_position_embeddings".

    Raises:
        ValueError: dim is odd, or scaling is of another kind.
    """

    frequencies: Tensor

    def __init__(
        self,
        dim: int,
        theta: float = 10000.0,
        scaling: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if dim <= 0 or dim % 2 != 0:
            raise ValueError(f"tk.nn.Rotary: dim is {dim}; it must be a positive even number")
        self.dim = dim
        exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
        frequencies = theta**-exponents
        if scaling is not None:
            frequencies = _scaled_as_llama3(frequencies, scaling)
        self.register_buffer("frequencies", frequencies.float(), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Rotary:
        """Moves to devices, and stays in float32."""
        frequencies = self.frequencies
        apply: Callable[..., Any] = super()._apply
        apply(fn, recurse)
        self.frequencies = frequencies.to(self.frequencies.device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32, (..., N, dim / 2), of positions (..., N)."""
        angles = positions.unsqueeze(-1).float() * self.frequencies
        return angles.cos(), angles.sin()

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (B, H, N, D) turned by angles (N, dim / 2) or (B, N, dim / 2), in x's dtype."""
        if cos.dim() == 3:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        half = self.dim // 2
        wide = torch.promote_types(x.dtype, torch.float32)
        first, second = x[..., :half].to(wide), x[..., half : self.dim].to(wide)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
        return turned if self.dim == x.shape[-1] else torch.cat([turned, x[..., self.dim :]], -1)


def _scaled_as_llama3(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Low frequencies are divided by the factor, high ones are kept, between them in between."""
    kind = scaling.get("rope_type", scaling.get("type", "llama3"))
    if kind != "llama3":
        raise ValueError(f"tk.nn.Rotary: scaling of type {kind!r}; only 'llama3' is supported")
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * ((1 - share) / factor + share)
