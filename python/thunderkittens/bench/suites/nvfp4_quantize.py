"""Quantising to NVFP4, with a given global scale and one that is found, beside a copy and plain
PyTorch. What is found takes a second reading of the matrix, and its bytes are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import models
from ..block_scaled_work import SHAPES, Matrices, copy_of, exactly
from ..cases import Expected, Implementation, Inputs

__all__ = ["SHAPES", "cases", "host_calls", "implementations"]

VARIANTS: dict[str, dict[str, Any]] = {
    "given": {},
    "given 16x16": {"block": "16x16"},
    "given stochastic": {"seed": 1},
    "found": {},
}


DRAWN_FORMS = tuple(VARIANTS)
DRAWN_PEERS = ("copy",)
OF_MODEL = models.matrices


def oracle(x: Tensor, **call: Any) -> Iterator[Expected]:
    """The scales; PyTorch has no arithmetic for the elements, which the tests check."""
    import thunderkittens as tk

    return exactly(tk.reference.nvfp4_quantize(x, **call), (1, 2))


def inputs(x: Tensor, variant: str) -> Inputs:
    call = dict(VARIANTS[variant])
    if variant != "found":
        call["global_scale"] = torch.full((), 6.0 / 2688, device=x.device)
    if "seed" in call:
        call["seed"] = torch.tensor(call["seed"], device=x.device)
    return {"x": x, **call}


_work = Matrices(
    lambda size, variant: size * (2 if variant == "found" else 1) + 1 / 2 + 1 / 16,
    inputs,
    oracle,
    tuple(VARIANTS),
    multiple=16,
    problem=lambda rows, columns, draw: {
        "rows": rows,
        "columns": columns,
        "dtype": draw.code,
        "square": "16x16" in draw.form,
        "stochastic": "stochastic" in draw.form,
    },
)
cases, drawn = _work.cases, _work.drawn


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the peers."""
    import thunderkittens as tk

    return {
        "thunderkittens": lambda x, **call: tk.nvfp4_quantize(x, **call),
        "PyTorch": lambda x, **call: tk.reference.nvfp4_quantize(x, **call),
        "copy": copy_of("x"),
    }


def host_calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Calls on 128 x 128 elements."""
    import thunderkittens as tk

    x = torch.randn(128, 128, dtype=torch.bfloat16, device=device)
    scale = torch.ones((), device=device)
    return {
        "thunderkittens.nvfp4_quantize": lambda: tk.nvfp4_quantize(x),
        "thunderkittens.nvfp4_quantize, given": lambda: tk.nvfp4_quantize(x, global_scale=scale),
    }
