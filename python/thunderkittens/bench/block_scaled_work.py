"""What the suites of the quantisers share: matrices, bytes, peers.

The least time is that of the bytes that must move; "copy" is PyTorch's copy of the same matrix, two
bytes read and two written per element, as a measure of the memory. "PyTorch" is the formula in
plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .cases import Case, Expected, Inputs, Prepared, random_normal
from .choices import dtype_name

SHAPES: dict[str, list[tuple[int, int]]] = {
    "default": [(8192, 8192), (4096, 4096), (16384, 8192), (4096, 28672), (8191, 8200)],
    "rated": [(8192, 8192)],
    "tiny": [(64, 64), (130, 72)],
}


def make_case(
    rows: int,
    columns: int,
    variant: str,
    bytes_per_element: float,
    dtype: torch.dtype,
    inputs: Callable[[Tensor], Inputs],
    oracle: Callable[..., Iterator[Expected]],
) -> Case:
    """A case whose inputs are made of a random matrix."""

    def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
        return inputs(random_normal(rows, columns, dtype=dtype, generator=generator))

    return Case(
        name=f"{variant} {rows} x {columns}",
        make_inputs=make_inputs,
        flops=0.0,
        bytes=bytes_per_element * rows * columns,
        groups=(variant,),
        parameters={
            "label": f"{rows}x{columns}",
            "rows": rows,
            "columns": columns,
            "variant": variant,
            "dtype": dtype_name(dtype),
        },
        oracle=oracle,
    )


def exactly(results: tuple[Tensor, ...], outputs: tuple[int, ...]) -> Iterator[Expected]:
    """What has to be met to the bit."""
    for i in outputs:
        value = results[i].float()
        yield Expected(i, ..., value, value)


def copy_of(name: str) -> Prepared:
    """PyTorch's copy of an input."""

    def prepare(**inputs: Any) -> Callable[[], Tensor]:
        source: Tensor = inputs[name]
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return Prepared(prepare, another_problem=True)
