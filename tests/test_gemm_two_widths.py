"""gemm's tiles of two widths on the emulator: balanced tiling, alone and with a fused
epilogue, of the consumers or of epilogue warps."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from helpers.numerics import accumulation_slack, assert_accurate
from test_gemm_fused import doubles, normal, operands, options_of, placed, plain_fused
from test_gemm_kernels import DTYPES, POLICIES, integers
from thunderkittens import emulation

if emulation.problem is not None:
    pytest.skip(emulation.problem, allow_module_level=True)

# Two rows of tiles with a wide and a narrow one each, and a row of three narrow ones.
TILES = {"block_m": 128, "block_n": 256, "stages": 4, "consumers": 2, "swap_ab": False}
WIDTHS = {"columns": 2, "extra_rows": 1, "raster_group": 2}
N = 488


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("b_n_major", [False, True])
def test_tiles_of_two_widths(b_n_major, policy):
    """One block has several tiles of either width; more steps than stages, and fewer."""
    dtype = DTYPES[b_n_major]
    for k, with_bias in ((200, True), (520, False)):
        a, b, bias = (integers(*shape, dtype=dtype) for shape in ((330, k), (k, N), (N,)))
        expected = a.float() @ b.float() + (bias.float() if with_bias else 0)
        right = b if b_n_major else b.t().contiguous().t()
        with tk.emulate(policy, seed=k, config=TILES | WIDTHS | {"blocks": 2}) as run:
            out = tk.gemm(a, right, bias=bias if with_bias else None)
        assert torch.equal(out, expected.to(dtype)), k
        assert run.kernels[0]["columns"] == 2
        assert run.kernels[0]["kernel"].endswith("_128x256")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interval", [0, 1])
@pytest.mark.parametrize(
    ("activation", "gate_layout"),
    [
        ("relu", "blocked"),
        ("gelu", "blocked"),
        ("gelu_tanh", "blocked"),
        ("silu", "blocked"),
        ("swiglu", "blocked"),
        ("geglu", "interleaved"),
    ],
)
@pytest.mark.parametrize("keep", [False, True])
def test_fused_tiles_of_two_widths(activation, gate_layout, interval, dtype, keep):
    """By the consumers, and with an interval of stores by epilogue warps."""
    n = {"swiglu": 2 * 232, "geglu": 2 * 248}.get(activation, N)
    case = {"shape": (330, n, 328), "activation": activation, "bias": True}
    case |= {"gate_layout": gate_layout, "dtype": dtype, "out": None, "factors": (0.5, 2.0)}
    case |= {"layout_a": "packed", "layout_b": "packed_t", "residual": keep and "packed"}
    x = operands(case, "cpu", normal)
    x["b"] = (x["b"] / 18).to(dtype)
    positional, named = placed(x, case)
    positional[0].requires_grad_(keep)
    config = TILES | WIDTHS | {"block_k": 64, "fused": True, "store_interval": interval}
    with tk.emulate("random", seed=1, config=config | {"blocks": 2}) as run:
        out = tk.gemm(*positional, **named, **options_of(case)).detach()
    positional[0].requires_grad_(False)
    assert run.kernels[0]["kernel"].endswith("_128x256_fused")
    expected = tk.reference.gemm(**doubles(x), **{**options_of(case), "out_dtype": torch.float64})
    slack = 8 * accumulation_slack(x["a"], x["b"]).amax() + 4e-6 * (1 + expected.abs().amax())
    assert_accurate(out, expected, plain_fused(x, case), slack=slack)
