"""LayerNorm with results in fp8 and NVFP4, beside the two passes that it takes the place of, and a
copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import models
from ..cases import Implementation
from ..choices import Names
from ..norm_quantize_work import COPY, KINDS, QuantizingNorm, in_two_passes
from ..norm_work import SHAPES

DRAWN_FORMS = KINDS
DRAWN_PEERS = ("copy",)
OF_MODEL = models.rows


def ours(**inputs: Any) -> Any:
    import thunderkittens as tk

    return tk.layer_norm_quantize(**inputs)


def formula(**inputs: Any) -> Any:
    from ...reference import layer_norm_quantize

    return layer_norm_quantize(**inputs)


def norm(**inputs: Any) -> Any:
    import thunderkittens as tk

    return tk.layer_norm(**inputs)


NORM = QuantizingNorm(("weight", "bias"), formula)
cases, drawn = NORM.cases, NORM.drawn
__all__ = ["KINDS", "SHAPES", "cases", "drawn"]


CHOICES = (Names(KINDS),)


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the peers."""
    return {"thunderkittens": ours, "copy": COPY, "two passes": in_two_passes(norm)}


def host_calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Calls on 128 rows of 1024 elements."""
    x = torch.randn(128, 1024, dtype=torch.bfloat16, device=device)
    weight, bias = torch.randn(2, 1024, dtype=torch.bfloat16, device=device)
    call = {"x": x, "weight": weight, "bias": bias}
    return {
        "thunderkittens.layer_norm_quantize": lambda: ours(**call),
        "two passes": lambda: in_two_passes(norm)(output="fp8_row", **call),
    }
