"""RMSNorm with results in fp8 and NVFP4, beside the two passes that it takes the place of, a copy
of as many bytes and, where they are installed, FlashInfer's and vLLM's."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import models
from ..cases import Implementation, NotApplicableError
from ..choices import Names
from ..norm_quantize_work import COPY, KINDS, QuantizingNorm, in_two_passes
from ..norm_work import SHAPES

EPS = 1e-6

DRAWN_FORMS = KINDS
DRAWN_PEERS = ("copy",)
OF_MODEL = models.rows


def ours(**inputs: Any) -> Any:
    import thunderkittens as tk

    return tk.rms_norm_quantize(**inputs, eps=EPS)


def formula(**inputs: Any) -> Any:
    from ...reference import rms_norm_quantize

    return rms_norm_quantize(**inputs, eps=EPS)


def norm(**inputs: Any) -> Any:
    import thunderkittens as tk

    return tk.rms_norm(**inputs, eps=EPS)


def flashinfer(x: Tensor, weight: Tensor, output: str, scale: Tensor) -> Any:
    """With a scale that is given."""
    from flashinfer.norm import rmsnorm_quant

    if output != "fp8_tensor":
        raise NotApplicableError
    data = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    rmsnorm_quant(data, x, weight, scale.reshape(1), EPS)
    return data, scale


def vllm(x: Tensor, weight: Tensor, output: str) -> Any:
    """With scales of rows."""
    from vllm._custom_ops import rms_norm_dynamic_per_token_quant

    if output != "fp8_row":
        raise NotApplicableError
    return rms_norm_dynamic_per_token_quant(x, weight, EPS, torch.float8_e4m3fn)


NORM = QuantizingNorm(("weight",), formula)
cases, drawn = NORM.cases, NORM.drawn
__all__ = ["KINDS", "SHAPES", "cases", "drawn"]


CHOICES = (Names(KINDS),)


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the peers."""
    found: dict[str, Implementation] = {
        "thunderkittens": ours,
        "copy": COPY,
        "two passes": in_two_passes(norm),
    }
    if device.type == "cuda":
        for module, name, function in (
            ("flashinfer", "FlashInfer", flashinfer),
            ("vllm", "vLLM", vllm),
        ):
            if importlib.util.find_spec(module) is not None:
                found[name] = function
    return found


def host_calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Calls on 128 rows of 1024 elements."""
    x = torch.randn(128, 1024, dtype=torch.bfloat16, device=device)
    weight = torch.randn(1024, dtype=torch.bfloat16, device=device)
    return {
        "thunderkittens.rms_norm_quantize": lambda: ours(x=x, weight=weight),
        "two passes": lambda: in_two_passes(norm)(output="fp8_row", x=x, weight=weight),
    }
