"""From MXFP8 to a wide dtype, beside a copy of the result's size and plain PyTorch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import models
from ..block_scaled_work import SHAPES, copy_of, exactly, make_case
from ..cases import Case, Expected, Implementation, Inputs
from ..choices import sizes_of
from ..drawn import Draw, matrix

__all__ = ["SHAPES", "add_arguments", "cases", "host_calls", "implementations", "options"]


DRAWN_PEERS = ("copy",)
OF_MODEL = models.kept


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


def options(args: argparse.Namespace) -> dict[str, Any]:
    return {}


def oracle(x: Tensor, data: Tensor, scale: Tensor) -> Iterator[Expected]:
    import thunderkittens as tk

    return exactly((tk.reference.mxfp8_dequantize(data, scale, dtype=x.dtype),), (0,))


def inputs(x: Tensor) -> Inputs:
    import thunderkittens as tk

    data, scale = tk.mxfp8_quantize(x)
    return {"x": x, "data": data, "scale": scale}


def cases(
    shapes: str | list[Any] = "default", *, dtype: torch.dtype = torch.bfloat16
) -> list[Case]:
    """The cases of a set of shapes. ValueError for a name there is not."""
    return [
        make_case(*size, "rows", dtype.itemsize + 1 + 1 / 32, dtype, inputs, oracle)
        for size in sizes_of(SHAPES, shapes)
    ]


def drawn(draw: Draw) -> Case:
    """A matrix."""
    rows, columns = matrix(draw, 32)
    case = make_case(
        rows, columns, "rows", draw.dtype.itemsize + 1 + 1 / 32, draw.dtype, inputs, oracle
    )
    return draw.case(
        case,
        f"{case.name}, {draw.code}",
        peer_bytes=2 * draw.dtype.itemsize * rows * columns,
        problem={"rows": rows, "columns": columns, "dtype": draw.code},
    )


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
