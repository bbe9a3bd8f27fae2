"""RMSNorm beside PyTorch's, a copy of as many bytes and, where they are installed, quack's and
Liger's."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import models
from ..cases import Implementation, Prepared
from ..choices import Names
from ..host import Differentiable
from ..norm_work import SHAPES, Norm, prepare_copy

KINDS = ("plain", "residual", "gated", "backward")
EPS = 1e-6

DRAWN_FORMS = KINDS
DRAWN_PEERS = ("copy",)
OF_MODEL = models.rows


def ours(x: Tensor, weight: Tensor, **options: Any) -> Any:
    import thunderkittens as tk

    return tk.rms_norm(x, weight, eps=EPS, **options)


def formula(x: Tensor, weight: Tensor, **options: Any) -> Any:
    from ...reference import rms_norm

    return rms_norm(x, weight, eps=EPS, **options)


def pytorch(
    x: Tensor, weight: Tensor, residual: Tensor | None = None, gate: Tensor | None = None
) -> Any:
    """PyTorch's norm, after an addition or before a gate."""
    total = x if residual is None else x + residual
    out = F.rms_norm(total, (x.shape[-1],), weight, EPS)
    if gate is not None:
        out = out * F.silu(gate)
    return out if residual is None else (out, total)


def quack(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Any:
    from quack import rmsnorm

    if residual is None:
        return rmsnorm(x, weight, eps=EPS)
    return rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True)


def liger(x: Tensor, weight: Tensor) -> Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    out: Tensor = LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)
    return out


NORM = Norm(KINDS, ("weight",), ours, formula)
cases, drawn = NORM.cases, NORM.drawn
__all__ = ["KINDS", "SHAPES", "cases", "drawn"]


CHOICES = (Names(KINDS),)


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the peers."""
    found: dict[str, Implementation] = {
        "thunderkittens": NORM.implementation(ours),
        "copy": Prepared(prepare_copy, another_problem=True),
        "PyTorch": NORM.implementation(pytorch),
    }
    if device.type == "cuda":
        for module, name, function in (
            ("quack", "quack", quack),
            ("liger_kernel", "Liger", liger),
        ):
            if importlib.util.find_spec(module) is not None:
                found[name] = NORM.implementation(function)
    return found


def host_calls(device: torch.device) -> dict[str, Differentiable]:
    """Calls on 128 rows of 1024 elements."""
    x = torch.randn(128, 1024, dtype=torch.bfloat16, device=device)
    weight = torch.randn(1024, dtype=torch.bfloat16, device=device)
    return {
        "thunderkittens.rms_norm": Differentiable(ours, (x, weight)),
        "PyTorch": Differentiable(pytorch, (x, weight)),
    }
