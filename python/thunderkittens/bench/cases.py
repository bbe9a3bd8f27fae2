"""What is measured: cases (a problem with its inputs, work and oracle) and implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]


class NotApplicableError(ValueError):
    """An implementation raises it for a case that it is no measure of: no figure, and no note."""


@dataclass(frozen=True)
class Expected:
    """A part of the right answer: output number `output` should be `exact` at `index`.

    `index` may also be a function, of the output. `exact` is fp32 or fp64. `plain` is the same part
    by the op's formula in plain PyTorch at the op's precision; its error is the yardstick.
    """

    output: int
    index: Any
    exact: Tensor
    plain: Tensor
    allowance: float = 0.0


@dataclass(frozen=True)
class Case:
    """One problem; an implementation is called with `**make_inputs(device, generator)`.

    `flops`, `bytes` and `exponentials` are the least the problem needs (every input read once,
    every output written once), and `operands` what the tensor cores multiply, bf16 or fp8: all that
    tables and profiles take shares of. `groups` are the sets of cases over which ratios are
    averaged, the first one also heads a section of the table; `oracle` yields the expected outputs
    piece by piece, so that a reference never needs the memory of all at once.
    """

    name: str
    make_inputs: Callable[[torch.device, torch.Generator], Inputs]
    flops: float
    bytes: float = 0.0
    groups: tuple[str, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    oracle: Callable[..., Iterator[Expected]] | None = None
    exponentials: float = 0.0
    operands: str = "bf16"


@dataclass(frozen=True)
class Prepared:
    """An implementation with an untimed part: `prepare(**inputs)` returns the call to time.

    A backward pass is one: its preparation runs the forward pass. One that runs `another_problem`
    than the case's is timed, and neither checked nor rated. One that is to be timed `apart` has
    rounds of its own after those of the others, whose clock its power would lower.
    """

    prepare: Callable[..., Callable[[], Any]]
    another_problem: bool = False
    apart: bool = False


Implementation = Callable[..., Any] | Prepared


def bind(implementation: Implementation, inputs: Inputs) -> Callable[[], Any]:
    """The call without arguments that runs `implementation` on `inputs`."""
    if isinstance(implementation, Prepared):
        return implementation.prepare(**inputs)
    return lambda: implementation(**inputs)


def random_normal(*shape: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """N(0, 1) on the generator's device. Never zeros: they draw less power and flatter."""
    return torch.randn(shape, dtype=dtype, device=generator.device, generator=generator)
