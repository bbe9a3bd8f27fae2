"""Merging attention over parts of the keys, beside a copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import models
from ..cases import Case, Expected, Implementation, Inputs, Prepared, random_normal
from ..choices import cases_of, parameters_of
from ..drawn import ANY, Draw

SHAPES: dict[str, list[tuple[int, int, int, int]]] = {
    "default": [(2, 64, 32, 128), (2, 8192, 32, 128), (8, 4096, 32, 128), (2, 65536, 8, 64)],
    "tiny": [(2, 3, 4, 64)],
}

DRAWN_CLASSES = (ANY,)
DRAWN_PEERS = ("copy",)
OF_MODEL = models.merge_attention


def oracle(outs: list[Tensor], lses: list[Tensor]) -> Iterator[Expected]:
    """In float32 and at the op's precision."""
    from ...reference import merge_attention

    exact, _ = merge_attention([x.float() for x in outs], lses)
    plain, _ = merge_attention(outs, lses)
    yield Expected(0, ..., exact, plain)


def make_case(count: int, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> Case:
    """So many parts of results (tokens, heads, dim)."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        outs = [
            random_normal(tokens, heads, dim, dtype=dtype, generator=generator)
            for _ in range(count)
        ]
        lses = [
            random_normal(heads, tokens, dtype=torch.float32, generator=generator)
            for _ in range(count)
        ]
        return {"outs": outs, "lses": lses}

    rows = tokens * heads
    return Case(
        name=f"{count} of {tokens} x {heads} x {dim}",
        make_inputs=make_inputs,
        flops=2.0 * count * rows * dim,
        bytes=float((count + 1) * rows * (dim * dtype.itemsize + 4)),
        groups=("merge",),
        parameters=parameters_of(
            f"{count} of {tokens}", dtype, count=count, tokens=tokens, heads=heads, head_dim=dim
        ),
        oracle=oracle,
    )


cases = cases_of(SHAPES, make_case)


def drawn(draw: Draw) -> Case:
    """Parts of any number and size."""
    sizes = draw.size(2, 8), draw.size(1, 16384), draw.size(1, 32), draw.choice((64, 128, 256))
    case = make_case(*sizes, draw.dtype)
    return draw.case(case, peer_bytes=case.bytes)


def ours(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    import thunderkittens as tk

    return tk.merge_attention(outs, lses)


def prepare_copy(outs: list[Tensor], lses: list[Tensor]) -> Callable[[], Any]:
    """Reads and writes half of the bytes of all parts and the result each."""
    numbers = sum(x.numel() for x in outs) + outs[0].numel()
    to = outs[0].new_empty(numbers // 2)
    source = torch.cat([x.flatten() for x in outs])[: numbers // 2].clone()
    return lambda: to[: source.numel()].copy_(source)


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the copy."""
    return {
        "thunderkittens": ours,
        "copy": Prepared(prepare_copy, another_problem=True),
    }


def host_calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    """A call on two parts of one row."""
    import thunderkittens as tk

    outs = [torch.randn(1, 1, 64, dtype=torch.bfloat16, device=device) for _ in range(2)]
    lses = [torch.randn(1, 1, device=device) for _ in range(2)]
    return {"thunderkittens.merge_attention": lambda: tk.merge_attention(outs, lses)}
