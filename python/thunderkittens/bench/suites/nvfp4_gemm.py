"""Products with NVFP4 weights beside `torch.matmul` in bf16 with the dequantised weight.

A weight (N, K) is multiplied with M rows of random normal values. Kinds: `weight`, activations of
bf16 and a prepared weight, and `both`, operands of NVFP4 as `tk.nvfp4_quantize` makes them, whose
conversion and preparation are part of the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import models
from ..cases import Case, Expected, Implementation, Inputs, random_normal
from ..choices import Names, cases_of, product_case
from ..drawn import Draw, product
from ..host import Differentiable

KINDS = ("weight", "both")
WEIGHTS = ((8192, 8192), (28672, 8192))
ROWS = (1, 4, 16, 32, 64, 128, 256, 1024, 4096)
SHAPES: dict[str, list[tuple[int, int, int]]] = {
    "default": [(m, n, k) for n, k in WEIGHTS for m in ROWS],
    "rated": [(m, n, k) for n, k in WEIGHTS for m in ROWS],
    "skinny": [(m, n, k) for n, k in WEIGHTS for m in (1, 16, 64)],
    "tiny": [(5, 64, 64), (80, 48, 272)],
}


DRAWN_FORMS = KINDS
DRAWN_DEFAULT = ("weight",)
DRAWN_PEERS = ("torch.matmul",)
OF_MODEL = models.quantised


CHOICES = (Names(KINDS, ("weight",)),)


def make_case(m: int, n: int, k: int, kind: str, dtype: torch.dtype) -> Case:
    """The product of (m, k) and the transpose of (n, k)."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        import thunderkittens as tk

        x = random_normal(m, k, dtype=dtype, generator=generator)
        codes, scale, factor = tk.nvfp4_quantize(
            random_normal(n, k, dtype=dtype, generator=generator)
        )
        dense = tk.nvfp4_dequantize(codes, scale, factor, dtype=dtype)
        if kind == "weight":
            return {"a": x, "b": tk.nvfp4_prepare(codes, scale, factor), "dense": dense}
        data, scale_a, factor_a = tk.nvfp4_quantize(x)
        return {
            "a": data,
            "b": codes,
            "dense": dense,
            "scales": {
                "scale_a": scale_a,
                "global_scale_a": factor_a,
                "scale_b": scale,
                "global_scale_b": factor,
            },
            "dense_a": tk.nvfp4_dequantize(data, scale_a, factor_a, dtype=dtype),
        }

    def oracle(a: Tensor, b: Any, dense: Tensor, **rest: Any) -> Iterator[Expected]:
        import thunderkittens as tk

        scales = rest.get("scales", {})
        exact = tk.reference.nvfp4_gemm(a, b, **scales, out_dtype=torch.float32)
        yield Expected(0, slice(None), exact, exact.to(dtype))

    return product_case(
        m,
        n,
        k,
        kind,
        dtype,
        bytes_moved=(2.0 if kind == "weight" else 9 / 16) * m * k + n * k * 9 / 16 + 2.0 * m * n,
        make_inputs=make_inputs,
        oracle=oracle,
    )


cases = cases_of(SHAPES, make_case, *CHOICES)


def drawn(draw: Draw) -> Case:
    """A product with a prepared weight, or of two operands of NVFP4."""
    m, n, k = product(draw, 32)
    case = make_case(m, n, k, draw.form, draw.dtype)
    problem = draw.problem(m=m, n=n, k=k, out_dtype=draw.code)
    return draw.case(case, problem=problem)


def _ours(a: Tensor, b: Any, dense: Tensor, **rest: Any) -> Tensor:
    import thunderkittens as tk

    return tk.nvfp4_gemm(a, b, **rest.get("scales", {}))


def _matmul(a: Tensor, b: Any, dense: Tensor, **rest: Any) -> Tensor:
    """In the dtype of the dequantised operands."""
    return torch.matmul(rest.get("dense_a", a), dense.t())


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the peers."""
    return {"thunderkittens": _ours, "torch.matmul": _matmul}


def host_calls(device: torch.device) -> dict[str, Differentiable]:
    """Calls on a problem of 128 x 128 x 128."""
    import thunderkittens as tk

    x, w = (torch.randn(128, 128, dtype=torch.bfloat16, device=device) for _ in range(2))
    weight = tk.nvfp4_prepare(*tk.nvfp4_quantize(w))
    return {
        "thunderkittens.nvfp4_gemm": Differentiable(lambda x: tk.nvfp4_gemm(x, weight), (x,)),
        "torch.matmul": Differentiable(lambda x: torch.matmul(x, w.t()), (x,)),
    }
