"""Quantising to MXFP8, one orientation, the other, and both, beside a copy and plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import models
from ..block_scaled_work import SHAPES, Matrices, copy_of, exactly
from ..cases import Expected, Implementation, Inputs

__all__ = ["SHAPES", "cases", "host_calls", "implementations"]

OPTIONS: dict[str, dict[str, Any]] = {
    "rows": {},
    "columns": {"axis": -2},
    "both": {"transpose": True},
}


DRAWN_FORMS = tuple(OPTIONS)
DRAWN_PEERS = ("copy",)
OF_MODEL = models.matrices


def oracle(x: Tensor, **call: Any) -> Iterator[Expected]:
    import thunderkittens as tk

    results = tk.reference.mxfp8_quantize(x, **call)
    return exactly(results, tuple(range(len(results))))


def inputs(x: Tensor, variant: str) -> Inputs:
    return {"x": x, **OPTIONS[variant]}


_work = Matrices(
    lambda size, variant: size + (2 if variant == "both" else 1) * (1 + 1 / 32),
    inputs,
    oracle,
    tuple(OPTIONS),
    problem=lambda rows, columns, draw: {
        "rows": rows,
        "columns": columns,
        "dtype": draw.code,
        "transpose": draw.form == "both",
        "row_major": draw.form != "columns",
    },
)
cases, drawn = _work.cases, _work.drawn


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
