"""The accuracy rule: what an implementation returned, held against the case's oracle.

An error may be at most twice that of the same formula in plain PyTorch at the op's precision, plus
one rounding of the output and what the op's documented sums lose; this must hold for the largest
element and in the Frobenius norm. NaN fails.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .cases import Case, Inputs


@dataclass(frozen=True)
class Accuracy:
    """Errors against the exact result: relative by the Frobenius norm, and the largest element's.

    `yardstick` is the relative error of plain PyTorch at the op's precision.
    """

    relative: float
    largest: float
    yardstick: float
    passed: bool


def rounding_of(dtype: torch.dtype) -> float:
    """The relative error of rounding to dtype; none for codes, which are integers."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0


@dataclass
class Sums:
    """Running figures of one output tensor against its expected pieces."""

    squares: float = 0.0
    error_squares: float = 0.0
    plain_squares: float = 0.0
    largest: float = 0.0
    excess: float = 0.0
    plain_largest: float = 0.0
    allowance: float = 0.0

    def add(self, output: Tensor, exact: Tensor, plain: Tensor, allowance: float) -> None:
        rounding = rounding_of(output.dtype)
        error = (output.to(exact.dtype) - exact).abs()
        error = torch.where(error.isfinite(), error, torch.inf)
        plain_error = (plain.to(exact.dtype) - exact).abs()
        self.squares += float(exact.double().square().sum())
        self.error_squares += float(error.double().square().sum())
        self.plain_squares += float(plain_error.double().square().sum())
        self.largest = max(self.largest, float(error.max()))
        allowed = rounding * exact.abs() + allowance * exact.abs().max()
        self.excess = max(self.excess, float((error - allowed).max()))
        self.allowance = max(self.allowance, allowance)
        self.plain_largest = max(self.plain_largest, float(plain_error.max()))

    def verdict(self, dtype: torch.dtype) -> Accuracy:
        norm = self.squares**0.5 or 1.0
        relative, yardstick = self.error_squares**0.5 / norm, self.plain_squares**0.5 / norm
        rounding = rounding_of(dtype)
        limit = 2 * yardstick + rounding + self.allowance
        passed = self.excess <= 2 * self.plain_largest and relative <= limit
        return Accuracy(relative, self.largest, yardstick, passed)


def as_tensors(result: object) -> tuple[Tensor, ...]:
    """An implementation's result as a tuple of tensors."""
    if isinstance(result, Tensor):
        return (result,)
    if isinstance(result, (tuple, list)) and all(isinstance(item, Tensor) for item in result):
        return tuple(result)
    kind = type(result).__name__
    raise TypeError(f"an implementation returned {kind}; expected a tensor or a tuple of tensors")


@torch.no_grad()
def check(
    case: Case, inputs: Inputs, results: dict[str, tuple[Tensor, ...]]
) -> dict[str, Accuracy]:
    """Accuracy of each implementation: its worst output. Empty for a case without oracle."""
    if case.oracle is None:
        return {}
    sums: dict[str, dict[int, Sums]] = {name: {} for name in results}
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for piece in case.oracle(**inputs):
            for name, outputs in results.items():
                output, at = outputs[piece.output], piece.index
                part = at(output) if callable(at) else output[at]
                if part.shape != piece.exact.shape:
                    expected = f"expected {tuple(piece.exact.shape)} at {piece.index}"
                    raise ValueError(f"{case.name}: {name} has {tuple(part.shape)}, {expected}")
                of_output = sums[name].setdefault(piece.output, Sums())
                of_output.add(part, piece.exact, piece.plain, piece.allowance)
    finally:
        torch.set_float32_matmul_precision(precision)
    return {
        name: max(
            (total.verdict(results[name][output].dtype) for output, total in totals.items()),
            key=lambda accuracy: (not accuracy.passed, accuracy.relative),
        )
        for name, totals in sums.items()
    }
