"""No false alarm: a shipped kernel is right in whatever order copies, products and threads take
their turns. A small problem of each kind of kernel, under every policy and with several seeds; the
results have the same bits in all of them. `tools/seeds.py` does the same with every kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import thunderkittens as tk
from helpers.lolcats import operands as lolcats_operands
from thunderkittens import emulation

if emulation.problem is not None:
    pytest.skip(emulation.problem, allow_module_level=True)

pytestmark = pytest.mark.emulator
SEEDS = {1: 1, 2: 1, 3: 5, 4: 20}


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def bits(x: Tensor) -> Tensor:
    return x.detach().flatten().view(torch.uint8)


def attention(dim: int) -> tuple[Tensor, ...]:
    """And its gradient, in a fixed order."""
    q, k, v = (bf16(1, 2, 150, dim).requires_grad_() for _ in range(3))
    out = tk.attention(q, k, v, causal=True)
    return (out, *torch.autograd.grad(out.float().square().sum(), (q, k, v)))


def fp8() -> tuple[Tensor, ...]:
    (a, scale_a), (b, scale_b) = (
        tk.fp8_quantize(bf16(*shape), of)
        for shape, of in (((70, 272), "1x128"), ((136, 272), "128x128"))
    )
    return a, scale_a, b, scale_b, tk.fp8_gemm(a, b.t(), scale_a, scale_b.t())


def mxfp8() -> tuple[Tensor, ...]:
    (a, scale_a), (b, scale_b) = (tk.mxfp8_quantize(bf16(rows, 288)) for rows in (70, 136))
    return a, scale_a, b, scale_b, tk.mxfp8_gemm(a, b.t(), scale_a, scale_b)


def nvfp4() -> tuple[Tensor, ...]:
    weight = tk.nvfp4_prepare(*tk.nvfp4_quantize(bf16(136, 288)))
    return (tk.nvfp4_gemm(bf16(70, 288), weight),)


def lolcats() -> tuple[Tensor, ...]:
    return (tk.lolcats(*lolcats_operands(1, 2, 1, 260, 64, 32, torch.float16)),)


def grouped() -> tuple[Tensor, ...]:
    ends = torch.tensor([30, 30, 95], dtype=torch.int32)
    return (tk.grouped_gemm(bf16(100, 72), bf16(3, 72, 136), ends),)


CALLS: dict[str, Callable[[], tuple[Tensor, ...]]] = {
    "attention": lambda: attention(64),
    "attention of head dimension 192": lambda: attention(192),
    "based": lambda: (tk.based(bf16(1, 2, 140, 16), bf16(1, 2, 140, 16), bf16(1, 2, 140, 64)),),
    "fp8_gemm": fp8,
    "gemm": lambda: (tk.gemm(bf16(129, 136), bf16(136, 112)),),
    # The last row of tiles overlaps the one before, which threads store.
    "gemm of columns": lambda: (tk.gemm(bf16(131, 136)[:, :129].t(), bf16(128, 136)[:, :131].t()),),
    "grouped_gemm": grouped,
    "lolcats": lolcats,
    "mxfp8_gemm": mxfp8,
    "nvfp4_gemm": nvfp4,
}


@pytest.mark.parametrize("name", CALLS)
def test_no_alarm_in_any_order(name: str, intensity: int) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for seed in range(SEEDS[intensity]):
            for policy in emulation.POLICIES:
                torch.manual_seed(len(name))
                with tk.emulate(policy, seed=seed, sm_count=4) as run:
                    runs.append(CALLS[name]())
                assert run.kernels
    finally:
        torch.use_deterministic_algorithms(False)
    for other in runs[1:]:
        for x, y in zip(runs[0], other, strict=True):
            assert torch.equal(bits(x), bits(y))


def test_one_arrival_stands_for_a_warpgroup_where_no_order_is_checked():
    """As where it is checked: the warps that have not waited yet have read, too."""
    a, b = bf16(300, 700), bf16(700, 512)
    config = {"block_m": 128, "block_n": 256, "stages": 4, "consumers": 2}
    for seed in range(3):
        with tk.emulate("random", seed, config=config | {"blocks": 2}, check_order=False):
            out = tk.gemm(a, b)
        torch.testing.assert_close(out.float(), a.float() @ b.float(), rtol=2e-2, atol=0.3)
