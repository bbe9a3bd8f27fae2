"""Caches of keys and values for the tests of the ops on them: pages in any order, NaN wherever
nothing is to be read, and page numbers that lead nowhere behind a sequence's last."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import thunderkittens as tk
from helpers.block_scaled import E2M1, E4M3
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
    # What the caches hold, in float64, where the reference is not to find it out itself.
    elements: tuple[Tensor, Tensor] | None = None

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

    def spoil(self, first: list[int]) -> None:
        """Makes NaN of the keys and values before the first that are seen."""
        for b, count in enumerate(first):
            for key in range(count):
                page = int(self.table[b, key // self.size])
                for cache in (self.k_cache, self.v_cache):
                    cache[page, key % self.size] = torch.nan

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
        options = {**self.options, **more}
        if self.elements is not None:
            k, v = self.elements
            options = {name: x for name, x in options.items() if "block_scale" not in name}
        v = v.double()
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

    def check_of_halves(
        self, out: Tensor, lse: Tensor, largest: float, softcap: float = 0.0, **more: Any
    ) -> None:
        """Products are of fp16, the elements and the scales of keys exact; those of values are
        rounded once, with the weights, and what is below 2^-15 of the largest loses bits."""
        expected, expected_lse = self.expected(**more)
        spread, _ = self.expected(torch.abs, **more)
        least, most = torch.finfo(torch.float16).eps, torch.finfo(self.dtype)
        softcap = softcap * 2.0**-10 if self.dtype is torch.bfloat16 else 0.0
        bound = (least + softcap) * spread + most.eps / 2 * expected.abs() + 2.0**-24 * largest
        bound = bound + most.tiny * most.eps
        assert bool(((out.double() - expected).abs() <= bound).all())
        same = (lse.double() == expected_lse) | ((lse - expected_lse).abs() <= 1e-4 + softcap)
        assert bool(same.all())


# ---- NVFP4 ----

NAN_SCALE = 0x7F


def lay_out(parts: tuple[Tensor, Tensor], layout: str, step: int) -> tuple[Tensor, Tensor]:
    """Bytes of K and of V, (pages, size, heads, columns), in some layout of memory, in which rows
    begin at multiples of `step`. What lies between them is NaN of e4m3."""
    widths = [-(-x.shape[3] // step) * step for x in parts]
    pages, size, heads = parts[0].shape[:3]

    def filled(*shape: int) -> Tensor:
        return parts[0].new_full(shape, NAN_SCALE)

    if layout == "joined":
        whole = filled(pages, heads, size, sum(widths)).transpose(1, 2)
        places = [whole[..., : widths[0]], whole[..., widths[0] :]]
    elif layout == "HND":
        places = [filled(pages, heads, size, n).transpose(1, 2) for n in widths]
    elif layout == "spread":
        places = [filled(pages, 3, size, heads, n)[:, 1] for n in widths]
    else:
        places = [filled(pages, size, heads, n) for n in widths]
    places = [place[..., : x.shape[3]] for place, x in zip(places, parts, strict=True)]
    for place, x in zip(places, parts, strict=True):
        place.copy_(x)
    return places[0], places[1]


def nvfp4_elements(codes: Tensor, scales: Tensor) -> Tensor:
    """What bytes of codes and of scales are, in float64."""
    values = torch.tensor([*E2M1, *-E2M1], dtype=torch.float64, device=codes.device)
    pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    magnitudes = torch.tensor([*E4M3, torch.nan], dtype=torch.float64, device=codes.device)
    signs = torch.where(scales >= 128, -1.0, 1.0)
    factors = magnitudes[(scales & 127).long()] * signs
    return values[pairs] * factors.repeat_interleave(16, -1)


def to_nvfp4(made: Case, layout: str) -> None:
    """Makes the caches of a case NVFP4: any codes, scales of keys and values that are there about
    as large as 1 over some codes, of all others NaN."""
    caches = (made.k_cache, made.v_cache)
    codes, scales = [], []
    for cache in caches:
        *shape, dim = cache.shape
        codes.append(torch.randint(0, 256, (*shape, dim // 2), dtype=torch.uint8))
        drawn = torch.randint(0x20, 0x30, (*shape, dim // 16))  # 2^-3 to 2^-1
        drawn[torch.rand(drawn.shape) < 0.05] = 0
        missing = cache.isnan().all(-1, keepdim=True).cpu()
        scales.append(torch.where(missing, NAN_SCALE, drawn).to(torch.uint8))
    made.elements = tuple(
        nvfp4_elements(c, s).to(made.device) for c, s in zip(codes, scales, strict=True)
    )
    put_nvfp4(made, codes, scales, layout)


def put_nvfp4(made: Case, codes: Any, scales: Any, layout: str = "NHD") -> None:
    """Gives a case caches of these bytes."""
    on_device = [tuple(x.to(made.device) for x in pair) for pair in (codes, scales)]
    made.k_cache, made.v_cache = (
        x.view(torch.float4_e2m1fn_x2) for x in lay_out(on_device[0], layout, 16)
    )
    made.options["k_block_scale"], made.options["v_block_scale"] = (
        x.view(torch.float8_e4m3fn) for x in lay_out(on_device[1], layout, 4)
    )
