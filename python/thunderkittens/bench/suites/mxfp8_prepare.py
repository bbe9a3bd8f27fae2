"""MXFP8 operands rescaled for the fp8 tensor cores, beside a copy and plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import models
from ..block_scaled_work import SHAPES, Matrices, copy_of, exactly
from ..cases import Expected, Implementation, Inputs

__all__ = ["SHAPES", "cases", "host_calls", "implementations"]


DRAWN_PEERS = ("copy",)
OF_MODEL = models.kept


def oracle(x: Tensor, data: Tensor, scale: Tensor) -> Iterator[Expected]:
    import thunderkittens as tk

    return exactly(tuple(tk.reference.mxfp8_prepare(data, scale))[2:], (0, 1))


def inputs(x: Tensor, variant: str) -> Inputs:
    import thunderkittens as tk

    data, scale = tk.mxfp8_quantize(x)
    return {"x": x, "data": data, "scale": scale}


_work = Matrices(
    lambda size, _: 2 + 1 / 32,
    inputs,
    oracle,
    multiple=32,
    copied=2,
    problem=lambda rows, columns, draw: {"rows": rows, "columns": columns},
)
cases, drawn = _work.cases, _work.drawn


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the peers."""
    import thunderkittens as tk

    return {
        "thunderkittens": lambda x, data, scale: tuple(tk.mxfp8_prepare(data, scale))[2:],
        "PyTorch": lambda x, data, scale: tuple(tk.reference.mxfp8_prepare(data, scale))[2:],
        "copy": copy_of("data"),
    }


def host_calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Calls on 128 x 128 elements."""
    import thunderkittens as tk

    data, scale = tk.mxfp8_quantize(torch.randn(128, 128, dtype=torch.bfloat16, device=device))
    return {"thunderkittens.mxfp8_prepare": lambda: tk.mxfp8_prepare(data, scale)}
