"""More matrices, heads or groups than 65535, where two of a grid's dimensions end: every op that
has such a number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import thunderkittens as tk
from helpers.samples import equal
from thunderkittens import _C, emulation, info

MANY = 70000
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def integers(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Whose products and sums are exact, in whatever order."""
    return torch.randint(-2, 3, shape, device="cuda").to(dtype)


def one_each(b: Tensor) -> Tensor:
    """Ends of groups of one row."""
    return torch.arange(1, len(b) + 1, dtype=torch.int32, device=b.device)


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    grad = torch.linspace(-1, 1, out[0].numel(), device=out.device).to(out.dtype).view(out[0].shape)
    return [out, *torch.autograd.grad(out, leaves, grad.expand_as(out))]


def swiglu(a: Tensor, b: Tensor) -> list[Tensor]:
    return with_gradients(lambda a, b: tk.gemm(a, b, activation="swiglu"), a, b)


def based(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    return with_gradients(lambda *x: tk.based(*x, normalize=True), q, k, v)


def lolcats(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(5)
    maps = [torch.randn(1, 64, 32, device="cuda", generator=generator).to(BF16) for _ in range(2)]
    factor = torch.ones(1, device="cuda")
    return with_gradients(lambda *x: tk.lolcats(*x, *maps, factor, factor), q, k, v)


def decode(q: Tensor, k: Tensor, v: Tensor, *before: Tensor) -> list[Tensor]:
    after = tk.BasedState(*(x.clone() for x in before))
    return [tk.based_decode(q, k, v, after), *after]


def grouped(a: Tensor, b: Tensor) -> list[Tensor]:
    return [tk.grouped_gemm(a, b, one_each(b))]


def fp8(a: Tensor, b: Tensor) -> list[Tensor]:
    """b as its columns lie, which are transposed first."""
    scales = [torch.ones(shape, device=a.device) for shape in ((len(a), 1), (1, 16))]
    return [tk.fp8_gemm(a, b, *scales, offs=one_each(b))]


def mxfp8(a: Tensor, b: Tensor) -> list[Tensor]:
    shapes = (len(a), 2), (len(b), 16, 2)
    scales = [torch.full(x, 127, dtype=torch.uint8, device=a.device) for x in shapes]
    return [tk.mxfp8_gemm(a, b, *scales, swizzle=False, offs=one_each(b))]


def nvfp4(a: Tensor, b: Tensor) -> list[Tensor]:
    weight = tk.nvfp4_prepare(*tk.nvfp4_quantize(b, swizzle=False), swizzle=False)
    return [tk.nvfp4_gemm(a, weight, offs=one_each(b))]


def mxfp8_both_ways(x: Tensor) -> list[Tensor]:
    codes, scale = tk.mxfp8_quantize(x, swizzle=False)
    return [codes, scale, tk.mxfp8_dequantize(codes, scale, swizzle=False)]


def nvfp4_both_ways(x: Tensor, **options) -> list[Tensor]:
    made = tk.nvfp4_quantize(x, swizzle=False, **options)
    return [*made, tk.nvfp4_dequantize(*made, swizzle=False)]


def tokens(n: int, length: int, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    return normal(n, 1, length, 16), normal(n, 1, length, 16), normal(n, 1, length, value_dim)


def state(n: int, value_dim: int) -> tuple[Tensor, Tensor]:
    return (
        normal(n, 1, 153, value_dim, dtype=torch.float32),
        normal(n, 1, 153, dtype=torch.float32),
    )


Case = tuple[Callable[[int], tuple[Tensor, ...]], Callable[..., list[Tensor]]]
# The operands of so many, and the function. The first give the same bits for fewer of them.
EXACT: dict[str, Case] = {
    "gemm": (lambda n: (integers(n, 3, 16), integers(n, 16, 8)), lambda *x: [tk.gemm(*x)]),
    "grouped_gemm": (lambda n: (integers(n, 16), integers(n, 16, 8)), grouped),
    "fp8_gemm": (lambda n: (integers(n, 16, dtype=E4M3), integers(n, 16, 16, dtype=E4M3)), fp8),
    "mxfp8_gemm": (lambda n: (integers(n, 64, dtype=E4M3), integers(n, 64, 16, dtype=E4M3)), mxfp8),
    "mxfp8_quantize": (lambda n: (normal(n, 3, 64),), mxfp8_both_ways),
    "nvfp4_quantize": (lambda n: (normal(n, 3, 32),), nvfp4_both_ways),
    "nvfp4_quantize_squares": (
        lambda n: (normal(n, 17, 16, dtype=torch.float32),),
        lambda x: nvfp4_both_ways(x, block="16x16"),
    ),
}
CLOSE: dict[str, Case] = {
    "gemm_swiglu": (lambda n: (normal(n, 3, 16), normal(n, 16, 16)), swiglu),
    "nvfp4_gemm": (lambda n: (integers(n, 64), integers(n, 16, 64)), nvfp4),
    "based": (lambda n: tokens(n, 3, 8), based),
    "based_chunks": (lambda n: tokens(n, 130, 8), based),
    "based_decode": (lambda n: (*tokens(n, 1, 8), *state(n, 8)), decode),
    "lolcats": (lambda n: tuple(normal(n, 1, 3, 64) for _ in range(3)), lolcats),
    "lolcats_chunks": (lambda n: tuple(normal(n, 1, 70, 64) for _ in range(3)), lolcats),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXACT | CLOSE)
def test_the_last_of_many(name):
    make, function = (EXACT | CLOSE)[name]
    operands = make(MANY)
    results = function(*operands)
    for some in (slice(-3, None), slice(0, 2)):
        few = function(*(x[some].contiguous() for x in operands))
        for x, y in zip(results, few, strict=True):
            assert len(x) == MANY
            if name in EXACT:
                assert equal(x[some].contiguous(), y.contiguous())
            else:
                torch.testing.assert_close(x[some], y, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("op", "problem"),
    [
        ("nvfp4_quantize", {"rows": 3, "columns": 32, "batch": MANY}),
        ("nvfp4_quantize", {"rows": 1, "columns": 2, "batch": 10**9}),
        ("nvfp4_dequantize", {"rows": 3, "columns": 32, "batch": MANY}),
        ("mxfp8_quantize", {"rows": 3, "columns": 32, "batch": MANY}),
        ("mxfp8_dequantize", {"rows": 3, "columns": 32, "batch": MANY}),
        ("gemm", {"m": 3, "n": 8, "k": 16, "batch": MANY}),
        ("based", {"batch": MANY, "heads": 16, "length": 64, "value_dim": 64}),
        ("attention", {"batch": MANY, "q_heads": 16, "kv_heads": 16, "q_length": 64,
                       "k_length": 64, "head_dim": 64, "value_dim": 64}),
    ],
)  # fmt: skip
@pytest.mark.emulator
def test_a_number_is_no_reason(op, problem):
    assert emulation.supports(op, problem)


def test_products_of_one_round_are_few():
    """Where the other dimensions of a grid count tiles and matrices, a round holds all of them, or
    they end before the dimensions do."""
    for m, n, batch in [(1, 1 << 24, 1), (1 << 24, 1, 1), (1, 1, MANY), (130, 70, 9)]:
        problem = {"m": m, "n": n, "k": 64, "batch": batch}
        device = _C.DeviceProperties(**info.EXAMPLE_GPU)
        choice = _C.choose("gemm", problem, device)
        ends = choice["strategy"] == "cluster_tile" and max(n, batch * choice["splits"]) < 1 << 16
        assert ends or choice["blocks"] <= 2 * device.sm_count
