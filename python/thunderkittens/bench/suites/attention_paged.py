"""Attention over a paged cache beside a copy of as many bytes, and flash-attention 3 where it is.

A step has to read the keys and values of every sequence once; so does the copy of half as many
bytes, which also writes them. Schedules are made before, as once for all layers of a model.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import models
from ..cases import (
    Case,
    Expected,
    Implementation,
    Inputs,
    NotApplicableError,
    Prepared,
    random_normal,
)
from ..choices import parameters_of, sizes_of
from ..drawn import ANY, Draw, within


class Point(NamedTuple):
    """Keys of each sequence, queries of each, heads, head dimension, page size, cache."""

    lengths: tuple[int, ...]
    queries: int = 1
    heads: tuple[int, int] = (32, 8)
    dim: int = 128
    page: int = 64
    cache: str = "same"


PREFILL = 128  # queries from which on keys might as well be gathered
CACHES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
BYTES = {"nvfp4": 0.5 + 1 / 16, **dict.fromkeys(CACHES, 1.0)}  # of an element
SCALES = ("k_scale", "v_scale", "k_block_scale", "v_block_scale")  # of NVFP4


def mixed(count: int, least: int, most: int) -> tuple[int, ...]:
    """Lengths from `least` to `most`, evenly spread and shuffled."""
    generator = torch.Generator().manual_seed(count)
    spread = torch.linspace(least, most, count).int()
    return tuple(spread[torch.randperm(count, generator=generator)].tolist())


# Batch and keys.
SIZES = ((1, 4096), (1, 32768), (1, 131072), (16, 4096), (64, 4096), (128, 1024), (128, 4096))
EQUAL = [Point((n,) * batch) for batch, n in (*SIZES, (256, 512))]
SHAPES: dict[str, list[Any]] = {
    "default": [
        *EQUAL,
        Point((4641, 45118, 1730, 1696), 4),
        Point(mixed(64, 16, 8192)),
        *(Point((8192,) * 16, s) for s in (2, 4, 8, 16)),
        Point((4096,) * 64, 1, (64, 8), 64),
        Point((4096,) * 16, 1, (16, 8), 256),
    ],
    "pages": [Point((4096,) * 16, page=page) for page in (1, 16, 64, 128, 256)],
    "e4m3": [point._replace(cache="e4m3") for point in EQUAL],
    "int8": [point._replace(cache="int8") for point in EQUAL],
    "nvfp4": [point._replace(cache="nvfp4") for point in EQUAL],
    "prefill": [
        Point((8192,), s, page=page) for page in (16, 64) for s in (128, 256, 512, 1024, 2048, 4096)
    ],
    "tiny": [
        Point((40, 7), 1, (4, 2), 64, 16),
        Point((40,), 2, (4, 2), 64, 1, "e4m3"),
        Point((40,), 1, (4, 2), 64, 16, "nvfp4"),
    ],
}

DRAWN_CLASSES = (ANY,)
DRAWN_PEERS = ("copy",)
OF_MODEL = models.attention_paged


def oracle(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    seq_lens: Tensor,
    scales: list[Tensor],
    **rest: Any,
) -> Iterator[Expected]:
    """In float32, and with weights and values rounded as they are for the tensor cores."""
    from ...reference import attention_paged

    options = named(scales)
    for b in range(len(seq_lens)):
        cache = (k_cache, v_cache, table[b : b + 1], seq_lens[b : b + 1])
        part = q[b : b + 1]
        exact, _ = attention_paged(part.float(), *cache, **options, return_lse=True)
        plain, _ = attention_paged(part, *cache, **options, return_lse=True)
        yield Expected(0, slice(b, b + 1), exact, plain, 2.0**-8)


def named(scales: list[Tensor]) -> dict[str, Any]:
    """The scales as options of the op."""
    return dict(zip(SCALES, scales, strict=False))


def nvfp4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The codes of a cache, the scales of their blocks, and that of the whole."""
    import thunderkittens as tk

    codes, blocks, whole = tk.nvfp4_quantize(x.flatten(0, 2), swizzle=False)
    return codes.view(*x.shape[:3], -1), blocks.view(*x.shape[:3], -1), whole


def make_case(point: Point, dtype: torch.dtype) -> Case:
    """A step of so many queries for each sequence, pages in random order."""
    lengths, queries, (heads, kv_heads), dim, page, cache = point
    longest, batch = max(lengths), len(lengths)

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        counts = [-(-n // page) for n in lengths]
        total, columns = sum(counts), -(-longest // page)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(total)).int()
        table = torch.full((batch, columns), -1, dtype=torch.int32)
        for b, pages in enumerate(order.split(counts)):
            table[b, : len(pages)] = pages

        def normal(*shape: int) -> Tensor:
            return random_normal(*shape, dtype=dtype, generator=generator)

        def filled() -> Tensor:
            x = normal(total, page, kv_heads, dim)
            if cache == "int8":
                return (x.float() * 30).round().clamp(-128, 127).to(torch.int8)
            return x.to(CACHES.get(cache, dtype))

        q, k_cache, v_cache = normal(batch, queries, heads, dim), filled(), filled()
        scales: list[Tensor] = []
        if cache == "nvfp4":
            (k_cache, k_blocks, k_scale), (v_cache, v_blocks, v_scale) = map(
                nvfp4, (k_cache, v_cache)
            )
            scales = [k_scale, v_scale, k_blocks, v_blocks]
        return {
            "q": q,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "table": table.to(device),
            "seq_lens": torch.tensor(lengths, dtype=torch.int32, device=device),
            "scales": scales,
        }

    size = BYTES.get(cache, float(dtype.itemsize))
    tokens = batch * queries
    equal = len(set(lengths)) == 1
    text = f"{batch} x {longest}" if equal else f"{batch} of {min(lengths)} to {longest}"
    text += f", {queries} queries" if queries > 1 else ""
    name = f"{text}, {heads}/{kv_heads} heads of {dim}, pages of {page}"
    kind = "16 bits" if cache == "same" else cache
    parameters = parameters_of(
        text, dtype, lengths=list(lengths), queries=queries, heads=heads, kv_heads=kv_heads,
        head_dim=dim, page_size=page, cache=cache,
    )  # fmt: skip
    return Case(
        name=f"{name}, {cache}" if cache != "same" else name,
        make_inputs=make_inputs,
        flops=4.0 * heads * dim * queries * sum(lengths),
        bytes=2.0 * size * kv_heads * dim * sum(lengths)
        + 2.0 * dtype.itemsize * tokens * heads * dim,
        groups=(kind, f"{kind}, {'one query' if queries == 1 else 'several'}"),
        parameters=parameters,
        oracle=oracle if heads * queries * sum(lengths) <= 1 << 28 else None,
        exponentials=float(heads * queries * sum(lengths)),
    )


def cases(
    shapes: str | list[Any] = "default", *, dtype: torch.dtype = torch.bfloat16
) -> list[Case]:
    """The cases of a set of shapes, or of given points. ValueError for a name there is not."""
    return [make_case(Point(*point), dtype) for point in sizes_of(SHAPES, shapes)]


def drawn(draw: Draw) -> Case:
    """Sequences of lengths that are log-uniform each, grouped heads, any page size."""

    def sizes() -> tuple[list[int], int, int, int, int]:
        lengths = [draw.size(16, 65536) for _ in range(draw.size(1, 128))]
        return (
            lengths,
            draw.choice((1, 1, 1, 2, 4, 16)),
            draw.size(1, 8),
            draw.choice((1, 4, 8)),
            draw.choice((64, 128, 256)),
        )

    lengths, queries, kv_heads, group, dim = within(
        draw, sizes, lambda s: sum(s[0]) * s[2] * s[4] <= 1 << 30
    )
    page = draw.choice((1, 16, 64, 256))
    cache = draw.choice(("same", "same", *BYTES))
    point = Point(tuple(lengths), queries, (kv_heads * group, kv_heads), dim, page, cache)
    case = make_case(point, draw.dtype)
    size = BYTES.get(cache, 2.0)
    return draw.case(
        case,
        peer_bytes=2.0 * size * sum(lengths) * kv_heads * dim,
    )


Cache = tuple[Tensor, Tensor, Tensor, Tensor]


def prepare_ours(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    seq_lens: Tensor,
    scales: list[Tensor],
) -> Callable[[], Any]:
    """With a schedule that was made before."""
    import thunderkittens as tk

    heads, options = (q.shape[2], k_cache.shape[2]), named(scales)
    codes, dim = k_cache.element_size() == 1, q.shape[3]
    schedule = tk.attention_schedule(seq_lens, *heads, dim, max_seqlen_q=q.shape[1], codes=codes)
    return lambda: tk.attention_paged(
        q, k_cache, v_cache, table, seq_lens, schedule=schedule, **options
    )


def prepare_copy(
    k_cache: Tensor, table: Tensor, seq_lens: Tensor, scales: list[Tensor], **inputs: Any
) -> Callable[[], Any]:
    """Of the pages of keys: as many bytes, read and written, as are read of keys and values."""
    if not scales:
        to = torch.empty_like(k_cache)
        return lambda: to.copy_(k_cache)
    pairs = [(torch.empty_like(x), x) for x in (y.view(torch.uint8) for y in (k_cache, scales[2]))]
    return lambda: [place.copy_(x) for place, x in pairs]


def prepare_varlen(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    seq_lens: Tensor,
    scales: list[Tensor],
) -> Callable[[], Any]:
    """`tk.attention_varlen` of many queries, on the same keys, which were gathered before."""
    import thunderkittens as tk

    batch, queries = q.shape[:2]
    if queries < PREFILL or scales:
        raise NotApplicableError(f"of at least {PREFILL} queries a sequence, and not of NVFP4")
    lengths = seq_lens.tolist()
    rows = list(zip(table, lengths, strict=True))
    edges = torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    keys, values = (
        torch.cat([x[row.clamp(min=0)].flatten(0, 1)[:n] for row, n in rows])
        for x in (k_cache, v_cache)
    )
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * queries
    packed = (q.flatten(0, 1), keys, values, starts, edges, queries, max(lengths))
    return lambda: tk.attention_varlen(*packed, causal=True).unflatten(0, (batch, queries))


def flash_attention_3(dtype: torch.dtype | None = None) -> Prepared | None:
    """`flash_attn_with_kvcache` of flash-attention 3, with its metadata made before. It multiplies
    in the dtype of the cache: of one of 8 bits, `dtype`, it has queries that are rounded before."""
    try:
        module = importlib.import_module("flash_attn_interface")
    except ImportError:
        return None

    def prepare(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        table: Tensor,
        seq_lens: Tensor,
        scales: list[Tensor],
    ) -> Callable[[], Any]:
        if k_cache.dtype != (dtype or q.dtype) or scales:
            raise NotApplicableError(f"of caches of {dtype or 'the dtype of the queries'}")
        q = q.to(k_cache.dtype)
        batch, queries, heads, dim = q.shape
        capacity = table.shape[1] * k_cache.shape[1]
        metadata = module.get_scheduler_metadata(
            *(batch, queries, capacity, heads, k_cache.shape[2], dim, seq_lens, q.dtype),
            page_size=k_cache.shape[1],
            causal=True,
        )
        return lambda: module.flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            cache_seqlens=seq_lens,
            page_table=table,
            causal=True,
            scheduler_metadata=metadata,
        )

    return Prepared(prepare, another_problem=dtype is not None)


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the copy, and flash-attention 3 where it is installed."""
    found: dict[str, Implementation] = {
        "thunderkittens": Prepared(prepare_ours),
        "copy": Prepared(prepare_copy, another_problem=True),
        "attention_varlen": Prepared(prepare_varlen),
    }
    if device.type == "cuda":
        for name, dtype in (("", None), (", queries of e4m3", torch.float8_e4m3fn)):
            theirs = flash_attention_3(dtype)
            if theirs is not None:
                found[f"flash-attention 3{name}"] = theirs
    return found


def host_calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Calls on two short sequences, with and without a schedule."""
    import thunderkittens as tk

    q, cache = (
        torch.randn(*shape, dtype=torch.bfloat16, device=device)
        for shape in ((2, 1, 8, 128), (4, 64, 2, 128))
    )
    table = torch.arange(4, dtype=torch.int32, device=device).view(2, 2)
    lengths = torch.tensor([100, 128], dtype=torch.int32, device=device)
    schedule = tk.attention_schedule(lengths, 8, 2, 128)
    return {
        "thunderkittens.attention_paged": lambda: tk.attention_paged(
            q, cache, cache, table, lengths, schedule=schedule
        ),
        "thunderkittens.attention_paged, no schedule": lambda: tk.attention_paged(
            q, cache, cache, table, lengths
        ),
    }
