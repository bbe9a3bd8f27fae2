"""Caches of keys and values for the tests of the ops on them: pages in any order, NaN wherever
nothing is to be read, and page numbers that lead nowhere behind a sequence's last."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import thunderkittens as tk
from thunderkittens.reference.attention_paged import attention_of_cache

CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
LAYOUTS = ("NHD", "HND", "joined", "spread")
NOWHERE = (-1, 2147480000, -2147480000)


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def empty_caches(
    pages: int, size: int, heads: int, dims: tuple[int, int], layout: str, like: Tensor
) -> list[Tensor]:
    """Caches of K and of V, (pages, size, heads, dim) in some layout of memory, full of NaN."""
    k, v = dims
    if layout == "joined":  # K and V of a head side by side
        whole = like.new_full((pages, heads, size, k + v), torch.nan).transpose(1, 2)
        return [whole[..., :k], whole[..., k:]]
    shapes = [(pages, size, heads, dim) for dim in dims]
    if layout == "HND":
        return [like.new_full((p, h, s, d), torch.nan).transpose(1, 2) for p, s, h, d in shapes]
    if layout == "spread":  # pages of other layers between
        return [like.new_full((p, 3, *rest), torch.nan)[:, 1] for p, *rest in shapes]
    return [like.new_full(shape, torch.nan) for shape in shapes]


@dataclass
class Case:
    """Sequences with so many keys and queries, their cache, and a call's arguments."""

    lengths: list[int]
    queries: list[int]
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    size: int = 16
    dtype: torch.dtype = torch.bfloat16
    packed: bool = False
    layout: str = "NHD"
    pages: bool = True
    capacity: int = 0  # keys that a row of the table has room for; 0: the longest sequence
    seed: int = 0
    device: Any = "cpu"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        batch, most = len(self.lengths), max(self.capacity, *self.lengths, 1)
        q_heads, kv_heads = self.heads
        if not self.pages:
            self.size = most
        count = -(-most // self.size)
        total = count * batch + 3
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        self.k_cache, self.v_cache = empty_caches(
            total, self.size, kv_heads, self.dims, self.layout, like
        )
        places = torch.tensor(rng.sample(range(total), count * batch)).reshape(batch, count)
        self.table = torch.tensor(
            [[rng.choice(NOWHERE) for _ in range(count)] for _ in range(batch)], dtype=torch.int32
        ).reshape(batch, count)
        for b, keys in enumerate(self.lengths):
            for j in range(-(-keys // self.size)):
                page, here = int(places[b, j]), min(self.size, keys - j * self.size)
                self.table[b, j] = page
                self.k_cache[page, :here] = normal(
                    (here, kv_heads, self.dims[0]), self.dtype, self.device
                )
                self.v_cache[page, :here] = normal(
                    (here, kv_heads, self.dims[1]), self.dtype, self.device
                )
        self.places = places.to(torch.int32)
        self.table = self.table.to(self.device)
        tokens = sum(self.queries)
        shape = (tokens,) if self.packed else (batch, self.queries[0])
        self.q = normal((*shape, q_heads, self.dims[0]), self.dtype, self.device)
        self.seq_lens = self.ints(self.lengths)
        self.options = dict(self.options)
        if self.packed:
            self.options["cu_seqlens_q"] = self.edges(self.queries)
            self.options["max_seqlen_q"] = max(self.queries)
        if not self.pages:
            self.options["cache_batch_idx"] = self.table[:, 0].clamp(min=0).contiguous()

    def ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def edges(self, counts: list[int]) -> Tensor:
        return self.ints([sum(counts[:i]) for i in range(len(counts) + 1)])

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (
            self.q,
            self.k_cache,
            self.v_cache,
            self.table if self.pages else None,
            self.seq_lens,
        )

    def run(self, **more: Any) -> tuple[Tensor, Tensor]:
        out, lse = tk.attention_paged(*self.arguments, **{**self.options, **more}, return_lse=True)
        return out, lse

    def expected(self, v_of: Any = None, **more: Any) -> tuple[Tensor, Tensor]:
        """The reference in float64, on the values or on a function of them."""
        q, k, v, table, lengths = self.arguments
        v = v.double()
        options = {**self.options, **more}
        wide = {
            name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
            for name, x in options.items()
        }
        out, lse = attention_of_cache(
            q.double(),
            k.double(),
            v if v_of is None else v_of(v),
            table,
            lengths,
            **wide,
            return_lse=True,
        )
        return out, lse

    def check(self, out: Tensor, lse: Tensor, **more: Any) -> None:
        """Weights are rounded once, and so is the output; a softcap of bfloat16 is approximated."""
        expected, expected_lse = self.expected(**more)
        spread, _ = self.expected(torch.abs, **more)
        eps = torch.finfo(self.dtype).eps
        softcap = self.options.get("softcap", 0.0)
        relative = eps + (softcap * 2.0**-10 if self.dtype is torch.bfloat16 else 0.0)
        bound = relative * spread + eps / 2 * expected.abs() + 1e-6
        error = (out.double() - expected).abs()
        assert bool((error <= bound).all()), f"{float((error / bound).max()):.2f} times the bound"
        slack = 1e-4 + softcap * 2.0**-10
        same = (lse.double() == expected_lse) | ((lse - expected_lse).abs() <= slack)
        assert bool(same.all())
