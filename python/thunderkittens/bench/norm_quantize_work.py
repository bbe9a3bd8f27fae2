"""What the suites of the quantising norms share: cases, and a copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cases import Case, Expected, Inputs, Prepared, random_normal
from .choices import Names, cases_of, parameters_of
from .drawn import Draw, matrix
from .norm_work import SHAPES

KINDS = ("fp8_row", "fp8_1x128", "fp8_tensor", "nvfp4")
# Bytes that are written for an element, codes and scales.
WRITTEN = {"fp8_row": 1.0, "fp8_1x128": 1 + 4 / 128, "fp8_tensor": 1.0, "nvfp4": 1 / 2 + 1 / 16}
# Scales that results of a magnitude up to 4 fill.
GIVEN = {"fp8_tensor": 4 / 448, "nvfp4": 4 / 2688}
# The first rows, which the oracle looks at: those of one tile of the 128x4 layout.
ROWS = 128
# A step between the largest codes.
STEP = 32.0


def moved(kind: str, residual: bool, itemsize: int) -> float:
    """Bytes that are read and written for an element."""
    return itemsize * (3 if residual else 1) + WRITTEN[kind]


@dataclass(frozen=True)
class QuantizingNorm:
    """The cases of a norm in each output, with and without a residual."""

    parameters: tuple[str, ...]  # operands of a row
    reference: Callable[..., tuple[Tensor, ...]]

    def make(self, rows: int, width: int, kind: str, residual: bool, dtype: torch.dtype) -> Case:
        """A case of an output, on rows of so many elements."""

        def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
            def draw(*shape: int) -> Tensor:
                return random_normal(*shape, dtype=dtype, generator=generator)

            inputs: Inputs = {"x": draw(rows, width), "output": kind}
            inputs |= {name: draw(width) for name in self.parameters}
            if kind in GIVEN:
                inputs["scale"] = torch.full((), GIVEN[kind], device=device)
            if residual:
                inputs["residual"] = draw(rows, width)
            return inputs

        return Case(
            name=f"{kind}{', residual' * residual} {rows} x {width}",
            make_inputs=make_inputs,
            flops=0.0,
            bytes=float(rows * width * moved(kind, residual, dtype.itemsize)),
            groups=(kind,),
            parameters=parameters_of(
                f"{rows}x{width}", dtype, rows=rows, width=width, kind=kind, residual=residual
            ),
            oracle=self.oracle,
        )

    @property
    def cases(self) -> Callable[..., list[Case]]:
        """The function `cases` of the suite."""
        return cases_of(SHAPES, self.make, Names(KINDS), (False, True))

    def drawn(self, draw: Draw) -> Case:
        """Rows of any number and width."""
        rows, width = matrix(draw, 2 if draw.form == "nvfp4" else 1)
        residual = draw.chance(0.5)
        case = self.make(rows, width, draw.form, residual, draw.dtype)
        problem = draw.problem(
            rows=rows, width=width, sum_dtype=draw.code, output=("fp8_tensor", "fp8_row",
            "fp8_1x128", "nvfp4").index(draw.form), aligned=width % 8 == 0,
        )  # fmt: skip
        return draw.case(case, problem=problem, peer_bytes=case.bytes)

    def oracle(self, output: str, scale: Tensor | None = None, **inputs: Any) -> Iterator[Expected]:
        """Scales of the first rows, in float64 and at the op's precision, or codes where the scale
        is given; a result between two codes may have either."""
        some = {
            name: value[:ROWS] if name in ("x", "residual") else value
            for name, value in inputs.items()
        }
        double = {name: value.double() for name, value in some.items()}
        exact = self.reference(**double, output=output, scale=scale)
        plain = self.reference(**some, output=output, scale=scale)
        part = 0 if output == "fp8_tensor" else 1
        allowance = STEP if output in GIVEN else 0.0
        yield Expected(part, slice(ROWS), exact[part].double(), plain[part], allowance)
        if len(exact) > 2:
            yield Expected(2, slice(ROWS), exact[2], plain[2])


def prepare_copy(x: Tensor, output: str, **rest: Any) -> Callable[[], Any]:
    """Reads and writes half of the bytes of the case each."""
    count = int(x.numel() * moved(output, "residual" in rest, x.element_size())) // 2
    source = torch.randint(0, 255, (count,), dtype=torch.uint8, device=x.device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


COPY = Prepared(prepare_copy, another_problem=True)


def in_two_passes(norm: Callable[..., Any]) -> Callable[..., Any]:
    """This package's norm, in x's dtype, and the quantisation of what it gives."""

    def run(output: str, scale: Tensor | None = None, **inputs: Any) -> tuple[Tensor, ...]:
        import thunderkittens as tk

        result = norm(**inputs)
        rows, *total = result if isinstance(result, tuple) else (result,)
        if output == "nvfp4":
            data, scales, _ = tk.nvfp4_quantize(rows, global_scale=scale)
        else:
            data, scales = tk.fp8_quantize(rows, output.removeprefix("fp8_"), scale=scale)
        return data, scales, *total

    return run
