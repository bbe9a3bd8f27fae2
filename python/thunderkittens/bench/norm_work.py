"""What the suites of the norms share: kinds of calls, cases, and a copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cases import Case, Expected, Inputs, Prepared, random_normal
from .choices import Names, cases_of, parameters_of
from .drawn import Draw, matrix

SHAPES: dict[str, list[tuple[int, int]]] = {
    "default": [
        *((32768, 1024), (32768, 4096), (16384, 8192), (4096, 4096), (8192, 16384), (2048, 65536)),
        *((262144, 128), (128, 4096)),
    ],
    "rated": [(32768, 4096), (16384, 8192), (8192, 16384)],
    "tiny": [(9, 72), (3, 264)],
}
# Rows that are read and written in each kind.
MOVED = {"plain": 2, "residual": 4, "gated": 3, "backward": 3}


@dataclass(frozen=True)
class Norm:
    """The cases of a norm, in some kinds; `call` takes the inputs of a case but `kind`, and
    `reference` the same. The gradient is that of the plain call."""

    kinds: tuple[str, ...]
    parameters: tuple[str, ...]  # operands of a row
    call: Callable[..., Any]
    reference: Callable[..., Any]

    def make(self, rows: int, width: int, kind: str, dtype: torch.dtype) -> Case:
        """A case of a kind, on rows of so many elements."""

        def make_inputs(device: torch.device, generator: torch.Generator) -> Inputs:
            def draw(*shape: int) -> Tensor:
                return random_normal(*shape, dtype=dtype, generator=generator)

            inputs: Inputs = {"x": draw(rows, width), "kind": kind}
            inputs |= {name: draw(width) for name in self.parameters}
            other = {"residual": "residual", "gated": "gate", "backward": "grad"}.get(kind)
            return inputs if other is None else {**inputs, other: draw(rows, width)}

        return Case(
            name=f"{kind} {rows} x {width}",
            make_inputs=make_inputs,
            flops=0.0,
            bytes=float(MOVED[kind] * rows * width * dtype.itemsize),
            groups=(kind,),
            parameters=parameters_of(f"{rows}x{width}", dtype, rows=rows, width=width, kind=kind),
            oracle=self.oracle,
        )

    @property
    def cases(self) -> Callable[..., list[Case]]:
        """The function `cases` of the suite."""
        return cases_of(SHAPES, self.make, Names(self.kinds))

    def drawn(self, draw: Draw) -> Case:
        """Rows of any number and width."""
        case = self.make(*matrix(draw), draw.form, draw.dtype)
        return draw.case(case, peer_bytes=case.bytes)

    def oracle(self, kind: str, **inputs: Any) -> Iterator[Expected]:
        """The first rows, in float64 and at the op's precision."""
        some = {
            name: value[:64] if name in ("x", "residual", "gate", "grad") else value
            for name, value in inputs.items()
        }
        if kind == "backward":
            grad = some.pop("grad")
            exact = _gradients(self.reference, _double(some), grad.double())[0]
            yield Expected(0, slice(64), exact, _gradients(self.reference, some, grad)[0])
            return
        exact, plain = self.reference(**_double(some)), self.reference(**some)
        if isinstance(exact, Tensor):
            yield Expected(0, slice(64), exact, plain)
            return
        for i, (e, p) in enumerate(zip(exact, plain, strict=True)):
            yield Expected(i, slice(64), e, p)

    def implementation(self, function: Callable[..., Any]) -> Prepared:
        """A function of the inputs, and its gradient, as what is timed."""

        def prepare(kind: str, **inputs: Any) -> Callable[[], Any]:
            if kind != "backward":
                return lambda: function(**inputs)
            leaves, out, grad = _recorded(function, inputs)
            return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)

        return Prepared(prepare)


def _double(inputs: Inputs) -> Inputs:
    return {name: value.double() for name, value in inputs.items()}


def _recorded(function: Callable[..., Any], inputs: Inputs) -> tuple[list[Tensor], Any, Any]:
    values = dict(inputs)
    grad = values.pop("grad", None)
    leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
    with torch.enable_grad():
        return list(leaves.values()), function(**leaves), grad


def _gradients(function: Callable[..., Any], inputs: Inputs, grad: Tensor) -> tuple[Tensor, ...]:
    leaves, out, _ = _recorded(function, inputs)
    return torch.autograd.grad(out, leaves, grad)


def prepare_copy(kind: str, x: Tensor, **rest: Any) -> Callable[[], Any]:
    """Reads and writes half of the bytes of the case each."""
    source = torch.randn(MOVED[kind] * x.numel() // 2, device=x.device).to(x.dtype)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
