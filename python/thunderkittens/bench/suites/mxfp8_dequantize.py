"""From MXFP8 to a wide dtype, beside a copy of the result's size and plain PyTorch."""

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

    return exactly((tk.reference.mxfp8_dequantize(data, scale, dtype=x.dtype),), (0,))


def inputs(x: Tensor, variant: str) -> Inputs:
    import thunderkittens as tk

    data, scale = tk.mxfp8_quantize(x)
    return {"x": x, "data": data, "scale": scale}


_work = Matrices(lambda size, _: size + 1 + 1 / 32, inputs, oracle, multiple=32)
cases, drawn = _work.cases, _work.drawn


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the peers."""
    import thunderkittens as tk

    return {
        "thunderkittens": lambda x, data, scale: tk.mxfp8_dequantize(data, scale, dtype=x.dtype),
        "PyTorch": lambda x, data, scale: tk.reference.mxfp8_dequantize(data, scale, dtype=x.dtype),
        "copy": copy_of("x"),
    }


def host_calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Calls on 128 x 128 elements."""
    import thunderkittens as tk

    data, scale = tk.mxfp8_quantize(torch.randn(128, 128, dtype=torch.bfloat16, device=device))
    return {"thunderkittens.mxfp8_dequantize": lambda: tk.mxfp8_dequantize(data, scale)}
