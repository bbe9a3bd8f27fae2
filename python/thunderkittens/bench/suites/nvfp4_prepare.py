"""NVFP4 weights into the layout of their product, beside a copy of the weight in two bytes per
element and plain PyTorch."""

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


def oracle(x: Tensor, **operands: Any) -> Iterator[Expected]:
    import thunderkittens as tk

    return exactly((tk.reference.nvfp4_prepare(**operands).data,), (0,))


def inputs(x: Tensor, variant: str) -> Inputs:
    import thunderkittens as tk

    x = x[:, : x.shape[1] // 16 * 16]
    weight, block_scale, global_scale = tk.nvfp4_quantize(x)
    return {"x": x, "weight": weight, "block_scale": block_scale, "global_scale": global_scale}


_work = Matrices(
    lambda size, _: 2 * (1 / 2 + 1 / 16),
    inputs,
    oracle,
    multiple=16,
    problem=lambda rows, columns, draw: {"n": rows, "k": columns},
)
cases, drawn = _work.cases, _work.drawn


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the peers."""
    import thunderkittens as tk

    return {
        "thunderkittens": lambda x, **parts: tk.nvfp4_prepare(**parts).data,
        "PyTorch": lambda x, **parts: tk.reference.nvfp4_prepare(**parts).data,
        "copy": copy_of("x"),
    }


def host_calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Calls on 128 x 128 elements."""
    import thunderkittens as tk

    parts = tk.nvfp4_quantize(torch.randn(128, 128, dtype=torch.bfloat16, device=device))
    return {"thunderkittens.nvfp4_prepare": lambda: tk.nvfp4_prepare(*parts)}
