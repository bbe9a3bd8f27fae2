"""MXFP8 GEMM beside bf16 cuBLAS (`torch.matmul`) on the same values.

A weight (N, K) is multiplied with M rows; both are quantised from random normal values. Kinds: the
path `exact`, the path `rebased` from operands as they were quantised, and `prepared`, the same with
both operands prepared (`kept`: the weight alone).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import models
from ..cases import Case, Expected, Implementation, Inputs, Prepared, random_normal
from ..choices import PRODUCTS, Names, cases_of, product_case
from ..drawn import Draw, product

KINDS = ("exact", "rebased", "kept", "prepared")
SHAPES = PRODUCTS
# The sets that `--save` keeps a file of.
SAVED = ("default", "skinny")


DRAWN_FORMS = KINDS
DRAWN_PEERS = ("torch.matmul bf16",)
OF_MODEL = models.quantised


CHOICES = (Names(KINDS),)


def make_case(m: int, n: int, k: int, kind: str, dtype: torch.dtype) -> Case:
    """The product of (m, k) and the transpose of (n, k)."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        import thunderkittens as tk

        x = random_normal(m, k, dtype=dtype, generator=generator)
        w = random_normal(n, k, dtype=dtype, generator=generator)
        a, scale_a = tk.mxfp8_quantize(x)
        b, scale_b = tk.mxfp8_quantize(w)
        return {"a": a, "b": b.t(), "scale_a": scale_a, "scale_b": scale_b, "kind": kind}

    def oracle(
        a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, kind: str
    ) -> Iterator[Expected]:
        import thunderkittens as tk

        exact = tk.reference.mxfp8_gemm(a, b, scale_a, scale_b, out_dtype=torch.float32)
        yield Expected(0, slice(None), exact, exact.to(dtype))

    return product_case(
        m,
        n,
        k,
        kind,
        dtype,
        operands="bf16" if kind == "exact" else "fp8",
        bytes_moved=float((m * k + k * n) * 33 / 32 + 2 * m * n),
        make_inputs=make_inputs,
        oracle=oracle,
    )


cases = cases_of(SHAPES, make_case, *CHOICES)


def drawn(draw: Draw) -> Case:
    """A product of one of the kinds, from a row of decoding on."""
    m, n, k = product(draw, 32)
    case = make_case(m, n, k, draw.form, torch.bfloat16)
    rebased = draw.form != "exact"
    return draw.case(case, case.name, problem={"m": m, "n": n, "k": k, "rebased": rebased})


def _ours(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, kind: str) -> Any:
    import thunderkittens as tk

    if kind in ("exact", "rebased"):
        return lambda: tk.mxfp8_gemm(a, b, scale_a, scale_b, path=kind)
    right = tk.mxfp8_prepare(b.t(), scale_b)
    if kind == "kept":
        return lambda: tk.mxfp8_gemm(a, right, scale_a)
    left = tk.mxfp8_prepare(a, scale_a)
    return lambda: tk.mxfp8_gemm(left, right)


def _bf16(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, kind: str) -> Any:
    import thunderkittens as tk

    left = tk.mxfp8_dequantize(a, scale_a)
    right = tk.mxfp8_dequantize(b.t(), scale_b)
    return lambda: left @ right.t()


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the peer: operands that are bf16 already."""
    return {"thunderkittens": Prepared(_ours), "torch.matmul bf16": Prepared(_bf16)}


def host_calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Calls on a problem of 128 x 128 x 128."""
    import thunderkittens as tk

    a, scale = tk.mxfp8_quantize(torch.randn(128, 128, dtype=torch.bfloat16, device=device))
    kept = tk.mxfp8_prepare(a, scale)
    return {
        "thunderkittens.mxfp8_gemm": lambda: tk.mxfp8_gemm(a, a.t(), scale, scale),
        "thunderkittens.mxfp8_gemm, prepared": lambda: tk.mxfp8_gemm(kept, kept),
    }
