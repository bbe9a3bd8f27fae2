"""Quantisation to fp8 beside a copy of as many bytes, and beside the formula in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import models
from ..cases import Case, Expected, Implementation, Inputs, Prepared, random_normal
from ..choices import Names, cases_of, parameters_of
from ..drawn import Draw, matrix

KINDS = ("tensor", "row", "1x128", "128x128")
SHAPES: dict[str, list[tuple[int, int]]] = {
    "default": [(8192, 8192), (4096, 7168), (128, 8192)],
    "rated": [(8192, 8192)],
    "tiny": [(130, 264)],
}


DRAWN_FORMS = KINDS
DRAWN_PEERS = ("copy",)
OF_MODEL = models.matrices


CHOICES = (Names(KINDS),)


def make_case(m: int, k: int, kind: str, transposed: bool, dtype: torch.dtype) -> Case:
    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        x = random_normal(m, k, dtype=dtype, generator=generator)
        return {"x": x, "granularity": kind, "transposed": transposed}

    def oracle(x: Tensor, granularity: str, transposed: bool) -> Iterator[Expected]:
        import thunderkittens as tk

        parts = tk.reference.fp8_quantize(x, granularity, transposed=transposed)
        for i in range(1, len(parts), 2):
            yield Expected(i, ..., parts[i].double(), parts[i])

    # Two passes over x where a scale depends on more than is at hand when it is read.
    reads = 2 if kind == "tensor" or (kind == "row" and transposed) else 1
    return Case(
        name=f"{kind}{', transposed' * transposed} {m} x {k}",
        make_inputs=make_inputs,
        flops=0.0,
        bytes=float(m * k * (dtype.itemsize * reads + 1 + transposed)),
        groups=(kind,),
        parameters=parameters_of(f"{m}x{k}", dtype, m=m, k=k, kind=kind, transposed=transposed),
        oracle=oracle,
    )


cases = cases_of(SHAPES, make_case, *CHOICES, (False, True))


def drawn(draw: Draw) -> Case:
    """A matrix, with or without the transposed result."""
    m, k = matrix(draw)
    transposed = draw.chance(0.5)
    case = make_case(m, k, draw.form, transposed, draw.dtype)
    problem = draw.problem(m=m, k=k, granularity=KINDS.index(draw.form), transposed=transposed)
    return draw.case(case, problem=problem)


def _copy(x: Tensor, granularity: str, transposed: bool) -> Callable[[], Any]:
    reads = 2 if granularity == "tensor" or (granularity == "row" and transposed) else 1
    count = x.numel() * (x.element_size() * reads + 1 + transposed) // 2
    source = torch.randint(0, 255, (count,), dtype=torch.uint8, device=x.device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the peers."""
    import thunderkittens as tk

    return {
        "thunderkittens": lambda x, granularity, transposed: tk.fp8_quantize(
            x, granularity, transposed=transposed
        ),
        "copy": Prepared(_copy, another_problem=True),
        "PyTorch": lambda x, granularity, transposed: tk.reference.fp8_quantize(
            x, granularity, transposed=transposed
        ),
    }


def host_calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    """A call on 128 x 128 values."""
    import thunderkittens as tk

    x = torch.randn(128, 128, dtype=torch.bfloat16, device=device)
    return {"thunderkittens.fp8_quantize": lambda: tk.fp8_quantize(x, "row")}
