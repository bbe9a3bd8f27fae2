"""GEMM beside cuBLAS (`torch.matmul`), in the four layouts of its operands.

A layout is two letters, one per operand: N is stored as it is multiplied, row by row; T is stored
transposed and passed as a view. NT is what a linear layer does: activations times the transpose of
a weight.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..cases import Case, Expected, Implementation, Inputs, random_normal

LAYOUTS = ("NN", "NT", "TN", "TT")
SQUARES = (512, 1024, 2048, 4096, 8192)
RATED = (2048, 4096, 8192)  # sizes whose mean ratio is the op's headline
SHAPES: dict[str, list[tuple[int, int, int]]] = {
    "default": [*((size,) * 3 for size in SQUARES), (4096, 11008, 4096), (4097, 1003, 777)],
    "square": [(size,) * 3 for size in SQUARES],
    "rated": [(size,) * 3 for size in RATED],
    "skinny": [(m, n, k) for n, k in ((4096, 7168), (7168, 2048)) for m in (1, 16, 64, 128, 256)],
    "tiny": [(64, 64, 64), (65, 33, 17)],
}
LARGE = (16384, 16384, 16384)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layouts",
        default="NN,NT",
        help="operand layouts, a comma-separated part of NN,NT,TN,TT (default: NN,NT)",
    )
    parser.add_argument("--large", action="store_true", help="add M = N = K = 16384")


def options(args: argparse.Namespace) -> dict[str, Any]:
    return {"layouts": tuple(args.layouts.upper().split(",")), "large": args.large}


def oracle(a: Tensor, b: Tensor) -> Iterator[Expected]:
    yield Expected(0, slice(None), a.float() @ b.float(), a @ b)


def make_case(m: int, n: int, k: int, layout: str, dtype: torch.dtype) -> Case:
    """The product of (m, k) and (k, n)."""

    def operand(rows: int, columns: int, kind: str, generator: torch.Generator) -> Tensor:
        if kind == "T":
            return random_normal(columns, rows, dtype=dtype, generator=generator).t()
        return random_normal(rows, columns, dtype=dtype, generator=generator)

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        a, b = operand(m, k, layout[0], generator), operand(k, n, layout[1], generator)
        return {"a": a, "b": b}

    square = m == n == k
    groups = [layout, f"{layout}, M=N=K in 2048, 4096, 8192"] if square and m in RATED else [layout]
    return Case(
        name=f"{layout} {m} x {n} x {k}",
        make_inputs=make_inputs,
        flops=2.0 * m * n * k,
        bytes=dtype.itemsize * float(m * k + k * n + m * n),
        groups=tuple(groups),
        parameters={
            "label": str(m) if square else f"{m}x{n}\nx{k}",
            "m": m,
            "n": n,
            "k": k,
            "layout": layout,
            "dtype": str(dtype).removeprefix("torch."),
        },
        oracle=oracle,
    )


def cases(
    shapes: str = "default",
    *,
    dtype: torch.dtype = torch.bfloat16,
    layouts: Sequence[str] = ("NN", "NT"),
    large: bool = False,
) -> list[Case]:
    """The cases of a set of shapes in each layout. ValueError for a name there is not."""
    unknown = [layout for layout in layouts if layout not in LAYOUTS]
    if unknown:
        raise ValueError(
            f"layout {unknown[0]!r} is unknown; expected a part of {','.join(LAYOUTS)}"
        )
    if shapes not in SHAPES:
        raise ValueError(f"shapes {shapes!r} is unknown; expected one of {', '.join(SHAPES)}")
    sizes = SHAPES[shapes] + ([LARGE] if large else [])
    return [make_case(*size, layout, dtype) for layout in layouts for size in sizes]


def implementations(device: torch.device) -> dict[str, Implementation]:
    """This package's op first, then the peers."""
    import thunderkittens as tk

    return {
        "thunderkittens": lambda a, b: tk.gemm(a, b),
        "cuBLAS" if device.type == "cuda" else "PyTorch": lambda a, b: torch.matmul(a, b),
    }


def host_calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Calls on a problem of 128 x 128 x 128, bf16."""
    import thunderkittens as tk

    a = torch.randn(128, 128, dtype=torch.bfloat16, device=device)
    b = torch.randn(128, 128, dtype=torch.bfloat16, device=device)
    return {
        "thunderkittens.gemm": lambda: tk.gemm(a, b),
        "torch.matmul": lambda: torch.matmul(a, b),
    }
