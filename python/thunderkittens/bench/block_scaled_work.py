"""What the suites of the quantisers share: matrices, bytes, peers.

The least time is that of the bytes that must move; "copy" is PyTorch's copy of the same matrix, two
bytes read and two written per element, as a measure of the memory. "PyTorch" is the formula in
plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cases import Case, Expected, Inputs, Prepared, random_normal
from .choices import cases_of, parameters_of
from .drawn import Draw, matrix

SHAPES: dict[str, list[tuple[int, int]]] = {
    "default": [(8192, 8192), (4096, 4096), (16384, 8192), (4096, 28672), (8191, 8200)],
    "rated": [(8192, 8192)],
    "tiny": [(64, 64), (130, 72)],
}


@dataclass(frozen=True)
class Matrices:
    """The cases of an op on a matrix, in some variants."""

    # By size of an element of the matrix and variant: bytes that move, for each element.
    moved: Callable[[int, str], float]
    inputs: Callable[[Tensor, str], Inputs]
    oracle: Callable[..., Iterator[Expected]]
    variants: tuple[str, ...] = ("rows",)
    # Of drawn matrices: what their columns are a multiple of; the bytes that the copy moves, for
    # each element, None: those of two matrices; what else tells problems apart.
    multiple: int = 1
    copied: float | None = None
    problem: Callable[[int, int, Draw], dict[str, Any]] | None = None

    def make(self, rows: int, columns: int, variant: str, dtype: torch.dtype) -> Case:
        """A case whose inputs are made of a random matrix."""

        def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
            x = random_normal(rows, columns, dtype=dtype, generator=generator)
            return self.inputs(x, variant)

        return Case(
            name=f"{variant} {rows} x {columns}",
            make_inputs=make_inputs,
            flops=0.0,
            bytes=self.moved(dtype.itemsize, variant) * rows * columns,
            groups=(variant,),
            parameters=parameters_of(
                f"{rows}x{columns}", dtype, rows=rows, columns=columns, variant=variant
            ),
            oracle=self.oracle,
        )

    @property
    def cases(self) -> Callable[..., list[Case]]:
        """The function `cases` of the suite."""
        return cases_of(SHAPES, self.make, self.variants)

    def drawn(self, draw: Draw) -> Case:
        """A matrix, in the variant that is drawn, if there are several."""
        rows, columns = matrix(draw, self.multiple)
        variant = draw.form if len(self.variants) > 1 else self.variants[0]
        case = self.make(rows, columns, variant, draw.dtype)
        copied = 2 * draw.dtype.itemsize if self.copied is None else self.copied
        problem: dict[str, Any] = {"rows": rows, "columns": columns, "dtype": draw.code}
        return draw.case(
            case,
            peer_bytes=copied * rows * columns,
            problem=self.problem(rows, columns, draw) if self.problem else problem,
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
