"""The rules by which a result is right."""

from __future__ import annotations

import torch
from torch import Tensor

# The kernels' arithmetic is that of the instructions with `.ftz`.
FLUSHED = torch.finfo(torch.float32).tiny


def assert_accurate(
    actual: Tensor, expected: Tensor, plain: Tensor, *, slack: Tensor | float = 0.0, rows: int = 0
) -> None:
    """The floating-point rule.

    The error of `actual` against `expected` (float64) is at most twice that of `plain`, the same
    formula in plain PyTorch at the op's precision, plus one rounding of the output: element by
    element against the largest error of `plain`, and in the root mean square. With `rows`, the
    second also holds for every group of that many rows of the second to last dimension, so that a
    fault where the values are small does not hide behind errors where they are large.

    `slack` is added where `plain` may be exact by luck: what float32 accumulation costs. What is
    below float32's smallest normal number may be flushed to zero.
    """
    assert actual.shape == expected.shape
    actual64, plain64 = actual.double(), plain.double()
    finite = torch.isfinite(expected)
    same = (actual64 == expected) | (torch.isnan(actual64) & torch.isnan(expected))
    assert bool(torch.where(finite, torch.isfinite(actual64), same).all()), (
        "infinities or NaN differ"
    )
    error = torch.where(finite, actual64 - expected, 0.0).abs()
    plain_error = torch.where(finite, plain64 - expected, 0.0).abs()
    if error.numel() == 0:
        return
    info = torch.finfo(actual.dtype)
    magnitude = torch.where(finite, expected, 0.0).abs()
    rounding = info.eps / 2 * magnitude + info.tiny * info.eps + slack + FLUSHED
    excess = error - (2 * plain_error.max() + rounding)
    assert float(excess.max()) <= 0, (
        f"error {float(error.max()):.3e}, of plain PyTorch {float(plain_error.max()):.3e}, "
        f"{int((excess > 0).sum())} of {excess.numel()} elements beyond the bound"
    )
    for e, p, r in zip(*(_groups(x, rows) for x in (error, plain_error, rounding)), strict=True):
        bound = 2 * p.square().mean(-1).sqrt() + r.square().mean(-1).sqrt()
        over = e.square().mean(-1).sqrt() / bound
        assert float(over.max()) <= 1, f"root mean square error {float(over.max()):.2f} times bound"


def _groups(x: Tensor, rows: int) -> list[Tensor]:
    whole = [x.reshape(1, -1)]
    if rows == 0 or x.dim() < 2 or x.shape[-2] < 2 * rows:
        return whole
    count = x.shape[-2] // rows
    return [*whole, x[..., : count * rows, :].reshape(-1, rows * x.shape[-1])]


def integers(*shape: int, low: int, high: int, dtype: torch.dtype, device: str) -> Tensor:
    """Random integers from low to high inclusive."""
    return torch.randint(low, high + 1, shape, device=device).to(dtype)


@torch.no_grad()
def accumulation_slack(a: Tensor, b: Tensor) -> Tensor:
    """What the sum over k in float32 may cost each element of a @ b.

    On the GPU the tensor cores add 16 products at a time to a running sum and truncate it, so every
    step costs up to one unit in the last place of the sum so far. Where K is divided such a sum
    begins anywhere in it, and is the difference of two sums from the start. In plain PyTorch
    products are summed in many short chains.
    """
    eps = torch.finfo(torch.float32).eps
    a, b = a.double(), b.double()
    if not a.is_cuda:
        return 4 * eps * (a.abs() @ b.abs())
    total = a.new_zeros(a.shape[0], b.shape[1])
    lowest, highest, bound = (total.clone() for _ in range(3))
    for k in range(0, a.shape[1], 16):
        total += a[:, k : k + 16] @ b[k : k + 16]
        lowest, highest = torch.minimum(lowest, total), torch.maximum(highest, total)
        bound += torch.maximum(highest - total, total - lowest)
    return eps * bound


def powers_of_two(x: Tensor) -> Tensor:
    """The largest powers of two that do not exceed |x|, in float64; 0 for 0."""
    _, exponent = torch.frexp(x.double())
    return torch.where(
        x == 0, 0.0, torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent - 1)
    )


@torch.no_grad()
def fp8_products(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The product of fp8 matrices (M, K) and (K, N) in float64, and by how much the tensor cores
    may miss it when they add all of K, for any codes but NaN and infinities.

    An instruction adds 32 products and the sum so far. Of each of these terms it cuts what is below
    2^-13 of the power of two of the largest, where that of a product is the product of its
    factors', and that of a subnormal factor the smallest normal one. Then it cuts the sum to 13
    bits behind its first (docs/numerics.md).
    """
    cut = 2.0**-13
    powers = []
    for x in (a, b):
        power = powers_of_two(x.double()).clamp_min(torch.finfo(x.dtype).smallest_normal)
        powers.append(torch.where(x.float() == 0, 0.0, power))
    a, b = a.double(), b.double()
    total = a.new_zeros(a.shape[0], b.shape[1])
    error = torch.zeros_like(total)
    for k in range(0, a.shape[1], 32):
        step = slice(k, k + 32)
        largest = powers_of_two(total.abs() + error)
        terms = ((a[:, step] != 0).double() @ (b[step] != 0).double()) + (largest != 0)
        for i in range(k, min(k + 32, a.shape[1])):
            largest = torch.maximum(largest, powers[0][:, i, None] * powers[1][i])
        total += a[:, step] @ b[step]
        error += cut * terms * largest
        error += cut * powers_of_two(total.abs() + error)
    return total, error
