"""Quantising to MXFP8, one orientation, the other, and both, beside a copy and plain PyTorch."""

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

OPTIONS: dict[str, dict[str, Any]] = {
    "rows": {},
    "columns": {"axis": -2},
    "both": {"transpose": True},
}


DRAWN_FORMS = tuple(OPTIONS)
DRAWN_PEERS = ("copy",)
OF_MODEL = models.matrices


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


def options(args: argparse.Namespace) -> dict[str, Any]:
    return {}


def oracle(x: Tensor, **call: Any) -> Iterator[Expected]:
    import thunderkittens as tk

    results = tk.reference.mxfp8_quantize(x, **call)
    return exactly(results, tuple(range(len(results))))


def inputs_of(variant: str) -> Callable[[Tensor], Inputs]:
    return lambda x: {"x": x, **OPTIONS[variant]}


def cases(
    shapes: str | list[Any] = "default", *, dtype: torch.dtype = torch.bfloat16
) -> list[Case]:
    """The cases of a set of shapes. ValueError for a name there is not."""
    return [
        make_case(
            *size,
            variant,
            dtype.itemsize + (2 if variant == "both" else 1) * (1 + 1 / 32),
            dtype,
            inputs_of(variant),
            oracle,
        )
        for variant in OPTIONS
        for size in sizes_of(SHAPES, shapes)
    ]


def drawn(draw: Draw) -> Case:
    """A matrix, quantised in one orientation, the other, or both."""
    rows, columns = matrix(draw)
    moved = draw.dtype.itemsize + (2 if draw.form == "both" else 1) * (1 + 1 / 32)
    case = make_case(rows, columns, draw.form, moved, draw.dtype, inputs_of(draw.form), oracle)
    return draw.case(
        case,
        f"{case.name}, {draw.code}",
        peer_bytes=2 * draw.dtype.itemsize * rows * columns,
        problem={
            "rows": rows,
            "columns": columns,
            "dtype": draw.code,
            "transpose": draw.form == "both",
            "row_major": draw.form != "columns",
        },
    )


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the peers."""
    import thunderkittens as tk

    return {
        "thunderkittens": lambda x, **call: tk.mxfp8_quantize(x, **call),
        "PyTorch": lambda x, **call: tk.reference.mxfp8_quantize(x, **call),
        "copy": copy_of("x"),
    }


def host_calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Calls on 128 x 128 elements."""
    import thunderkittens as tk

    x = torch.randn(128, 128, dtype=torch.bfloat16, device=device)
    return {
        "thunderkittens.mxfp8_quantize": lambda: tk.mxfp8_quantize(x),
        "thunderkittens.mxfp8_quantize, both": lambda: tk.mxfp8_quantize(x, transpose=True),
    }
