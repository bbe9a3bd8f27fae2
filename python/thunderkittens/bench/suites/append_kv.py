"""New keys and values into a paged cache, beside a copy of as many bytes.

All of the caches is checked: what is written, and that nothing else is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import models
from ..cases import Case, Expected, Implementation, Inputs, Prepared, random_normal
from ..choices import cases_of, parameters_of
from ..drawn import ANY, Draw
from .attention_paged import BYTES, CACHES, SCALES

PAGE, BEFORE = 64, 1000  # tokens of a page, keys that a sequence has
PIECE = 256  # pages that are checked at a time

SHAPES: dict[str, list[tuple[int, int, int, int, str]]] = {
    "default": [
        *((batch, 1, 8, 128, "same") for batch in (1, 64, 256)),
        (1, 4096, 8, 128, "same"),
        (64, 1, 8, 128, "e4m3"),
        (1, 4096, 8, 128, "e4m3"),
        (1, 4096, 8, 128, "int8"),
        (64, 1, 8, 128, "nvfp4"),
        (1, 4096, 8, 128, "nvfp4"),
    ],
    "tiny": [(2, 1, 2, 64, "same"), (1, 3, 2, 64, "e4m3"), (1, 3, 2, 64, "nvfp4")],
}

DRAWN_CLASSES = (ANY,)
DRAWN_PEERS = ("copy",)
OF_MODEL = models.append_kv


def oracle(
    k: Tensor,
    v: Tensor,
    caches: list[Tensor],
    table: Tensor,
    seq_lens: Tensor,
    scales: list[Tensor],
) -> Iterator[Expected]:
    """Caches and scales after the formula, from what they were before the op."""
    from ...reference import append_kv

    made = [torch.zeros_like(x) for x in caches] + [torch.ones_like(x) for x in scales]
    named: dict[str, Any] = dict(zip(SCALES, made[2:], strict=False))
    append_kv(k, v, made[0], made[1], page_table=table, seq_lens=seq_lens, **named)
    for output, x in enumerate(made):
        for first in range(0, len(x), PIECE):
            pages = slice(first, first + PIECE)
            yield Expected(output, pages, x[pages].float(), x[pages])


def make_case(batch: int, count: int, heads: int, dim: int, cache: str, dtype: torch.dtype) -> Case:
    """So many new tokens of each sequence; a cache of 8 bits has a scale for each token, one of
    NVFP4 bytes of codes, and for each 16 elements."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        pages = -(-(BEFORE + count) // PAGE)
        order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(batch))
        shape = (batch * pages, PAGE, heads)
        columns, dtypes = dim, CACHES.get(cache, dtype)
        scales = [torch.ones(shape, device=device) for _ in range(0 if cache == "same" else 2)]
        if cache == "nvfp4":
            columns, dtypes = dim // 2, torch.uint8
            one = [torch.ones(1, device=device) for _ in range(2)]
            blocks = torch.ones(*shape, dim // 16, device=device).to(torch.float8_e4m3fn)
            scales = [*one, blocks, blocks.clone()]
        return {
            "k": random_normal(batch, count, heads, dim, dtype=dtype, generator=generator),
            "v": random_normal(batch, count, heads, dim, dtype=dtype, generator=generator),
            "caches": [torch.zeros(*shape, columns, device=device).to(dtypes) for _ in range(2)],
            "table": order.view(batch, pages).to(device, torch.int32),
            "seq_lens": torch.full((batch,), BEFORE, dtype=torch.int32, device=device),
            "scales": scales,
        }

    size = BYTES.get(cache, float(dtype.itemsize))
    numbers = 2.0 * batch * count * heads * dim
    name = f"{batch} x {count}, {heads} heads of {dim}"
    return Case(
        name=f"{name}, {cache}" if cache != "same" else name,
        make_inputs=make_inputs,
        flops=0.0,
        bytes=numbers * (dtype.itemsize + size),
        groups=("16 bits" if cache == "same" else cache,),
        parameters=parameters_of(
            name, dtype, batch=batch, count=count, heads=heads, head_dim=dim, cache=cache
        ),
        oracle=oracle,
    )


cases = cases_of(SHAPES, make_case)


def drawn(draw: Draw) -> Case:
    """Sequences and tokens of any number."""
    batch, count = draw.size(1, 256), draw.size(1, 64)
    heads, dim = draw.size(1, 16), draw.choice((64, 128, 256))
    cache = draw.choice(("same", *BYTES))
    case = make_case(batch, count, heads, dim, cache, draw.dtype)
    return draw.case(case, peer_bytes=case.bytes)


def ours(
    k: Tensor,
    v: Tensor,
    caches: list[Tensor],
    table: Tensor,
    seq_lens: Tensor,
    scales: list[Tensor],
) -> tuple[Tensor, ...]:
    import thunderkittens as tk

    options: dict[str, Any] = dict(zip(SCALES, scales, strict=False))
    tk.append_kv(k, v, caches[0], caches[1], page_table=table, seq_lens=seq_lens, **options)
    return (*caches, *scales)


def prepare_copy(k: Tensor, v: Tensor, **inputs: Any) -> Callable[[], Any]:
    """Reads and writes the keys and values once."""
    to = torch.empty_like(k), torch.empty_like(v)

    def copy() -> Tensor:
        to[0].copy_(k)
        return to[1].copy_(v)

    return copy


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the copy."""
    return {
        "thunderkittens": ours,
        "copy": Prepared(prepare_copy, another_problem=True),
    }


def host_calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    """A call on a token."""
    import thunderkittens as tk

    k = torch.randn(1, 1, 1, 64, dtype=torch.bfloat16, device=device)
    caches = [torch.zeros(1, 64, 1, 64, dtype=torch.bfloat16, device=device) for _ in range(2)]
    lengths = torch.zeros(1, dtype=torch.int32, device=device)
    return {
        "thunderkittens.append_kv": lambda: tk.append_kv(k, k, *caches, seq_lens=lengths),
    }
