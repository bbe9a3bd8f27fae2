"""LayerNorm beside PyTorch's, and beside a copy of as many bytes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import models
from ..cases import Implementation, Prepared
from ..choices import Names
from ..host import Differentiable
from ..norm_work import SHAPES, Norm, prepare_copy

KINDS = ("plain", "residual", "backward")

DRAWN_FORMS = KINDS
DRAWN_PEERS = ("copy",)
OF_MODEL = models.rows


def ours(x: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> Any:
    import thunderkittens as tk

    return tk.layer_norm(x, weight, bias, **options)


def formula(x: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> Any:
    from ...reference import layer_norm

    return layer_norm(x, weight, bias, **options)


def pytorch(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> Any:
    """PyTorch's norm, after an addition."""
    total = x if residual is None else x + residual
    out = F.layer_norm(total, (x.shape[-1],), weight, bias)
    return out if residual is None else (out, total)


NORM = Norm(KINDS, ("weight", "bias"), ours, formula)
cases, drawn = NORM.cases, NORM.drawn
__all__ = ["KINDS", "SHAPES", "cases", "drawn"]


CHOICES = (Names(KINDS),)


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the peers."""
    return {
        "thunderkittens": NORM.implementation(ours),
        "copy": Prepared(prepare_copy, another_problem=True),
        "PyTorch": NORM.implementation(pytorch),
    }


def host_calls(device: torch.device) -> dict[str, Differentiable]:
    """Calls on 128 rows of 1024 elements."""
    x = torch.randn(128, 1024, dtype=torch.bfloat16, device=device)
    row = torch.randn(2, 1024, dtype=torch.bfloat16, device=device)
    return {
        "thunderkittens.layer_norm": Differentiable(ours, (x, *row)),
        "PyTorch": Differentiable(pytorch, (x, *row)),
    }
