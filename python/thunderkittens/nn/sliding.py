"""Softmax attention over a short window, which stands beside the linear layers of Based models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import reference
from ..ops.attention import attention
from .based import KERNEL_DTYPES
from .rotary import Rotary


@dataclass
class SlidingCache:
    """Keys and values, (B, Hkv, up to `left`, D), of the last tokens, and how many there were."""

    keys: Tensor | None = None
    values: Tensor | None = None
    length: int = 0


class SlidingAttention(nn.Module):
    """Causal `tk.attention` over a window, with the parameters of the published models' layers:
    `Wqkv.weight` ((H + 2 Hkv) * D, width), rows of q, k, v in this order, `out_proj.weight` (width,
    width), and their biases.

    Args:
        width: elements of a token; a head has width / heads of them.
        heads: number of query heads H.
        kv_heads: number of key and value heads, H by default.
        window_size: as in the models' configurations: a token sees itself and the window_size // 2
            tokens before it.
        rotary_dim: how many elements of a head are rotated; all by default, 0 for none.
        theta: base of the rotary frequencies.
        bias: whether the projections have biases.

    Raises:
        ValueError: sizes that do not fit.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        window_size: int = 128,
        rotary_dim: int | None = None,
        theta: float = 10000.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads or heads
        if width % heads != 0 or heads % self.kv_heads != 0:
            raise ValueError(
                f"tk.nn.SlidingAttention: width {width}, {heads} heads and {self.kv_heads} of keys "
                "do not divide each other"
            )
        self.head_dim, self.left = width // heads, window_size // 2
        rotated = self.head_dim if rotary_dim is None else rotary_dim
        self.rotary = Rotary(rotated, theta, device=device) if rotated > 0 else None
        rows = self.head_dim * (heads + 2 * self.kv_heads)
        self.Wqkv = nn.Linear(width, rows, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(width, width, bias=bias, device=device, dtype=dtype)

    def new_cache(self, batch: int) -> SlidingCache:
        """The cache of sequences without tokens."""
        return SlidingCache()

    def forward(self, x: Tensor, cache: SlidingCache | None = None) -> Tensor:
        """x (B, N, width) to (B, N, width); with a cache the tokens follow those of earlier
        calls."""
        qkv = self.Wqkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        if self.rotary is not None:
            before = 0 if cache is None else cache.length
            cos, sin = self.rotary(torch.arange(before, before + x.shape[1], device=x.device))
            q, k = self.rotary.rotate(q, cos, sin), self.rotary.rotate(k, cos, sin)
        if cache is not None:
            k, v = self._remember(cache, k, v)
        attend: Any = attention if q.dtype in KERNEL_DTYPES else reference.attention
        out: Tensor = attend(q, k, v, causal=True, window_size=(self.left, 0))
        result: Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        return result

    def _remember(self, cache: SlidingCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values that the new tokens see; the cache keeps those the next will see."""
        cache.length += k.shape[2]
        if cache.keys is not None and cache.values is not None:
            k, v = torch.cat([cache.keys, k], 2), torch.cat([cache.values, v], 2)
        first = max(0, k.shape[2] - self.left)
        cache.keys, cache.values = (x[:, :, first:].detach() for x in (k, v))
        return k, v
