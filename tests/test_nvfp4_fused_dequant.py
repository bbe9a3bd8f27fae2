"""`tk.nvfp4_gemm` of many rows, with fused dequantization: exact values, whichever warps dequantize
what."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from helpers.layouts import matrix
from helpers.streams import check_streams_and_graph
from test_compiled_module import H200
from test_emulator import POLICIES
from test_nvfp4_gemm import ACTIVATIONS, BF16, FP16, FP32, check, prepared
from thunderkittens import _C
from thunderkittens.reference.nvfp4_prepare import values

# Rows that end in an item, in a piece, in a region; k that ends in a block of scales, in a piece.
SHAPES = [(200, 328, 272), (130, 700, 1040), (80, 16, 16), (129, 257, 512), (3, 1, 16)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ragged_sizes(shape, policy):
    m, n, k = shape
    odd = m % 2 == 1
    dtype = FP16 if odd else BF16
    weight = prepared(n, k)
    a = matrix((torch.randn(m, k) / k**0.5).to(dtype), "sliced")
    bias = torch.randn(n).to(dtype) if m != 200 else None
    out_dtype = (BF16, FP16, FP32)[m % 3]
    config = {"strategy": "fused_dequant", "raster_group": 2, "blocks": 2 + odd}
    with tk.emulate(policy, seed=m, config=config) as run:
        out = tk.nvfp4_gemm(a, weight, bias=bias, out_dtype=out_dtype)
    name = "nvfp4_fp16_fused_dequant" if odd else "nvfp4_bf16_fused_dequant"
    assert [kernel["kernel"] for kernel in run.kernels] == [name]
    check(out, a, weight, bias=bias)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("out_dtype", [BF16, FP32])
def test_activations(activation, out_dtype):
    weight, a = prepared(80, 64), (torch.randn(70, 64) / 8).to(BF16)
    options = {"bias": torch.randn(80).to(BF16), "activation": activation}
    with tk.emulate(config={"strategy": "fused_dequant", "blocks": 1}):
        out = tk.nvfp4_gemm(a, weight, out_dtype=out_dtype, **options)
    check(out, a, weight, **options)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_one_hot_rows_select(dtype):
    """A row with a single one gives a column of the dequantised weight, to the bit; k = 0 zeros."""
    weight, column = prepared(70, 160), torch.randint(0, 160, (150,))
    a = torch.zeros(150, 160, dtype=dtype)
    a[torch.arange(150), column] = 1
    with tk.emulate("random", seed=2, config={"strategy": "fused_dequant", "blocks": 2}):
        out = tk.nvfp4_gemm(a, weight, out_dtype=FP32)
        zero = tk.nvfp4_gemm(a[:, :0], prepared(70, 0), out_dtype=FP32)
    dense = values(weight.data, 70, 160) * weight.global_scale
    assert torch.equal(out, dense[:, column].t())
    assert torch.equal(zero, torch.zeros(150, 70))


def test_choice():
    """Where rows are many, and the expanded weight is no more than a gigabyte."""
    large = {"m": 4096, "n": 24576, "k": 1536}
    for dtype in ("bf16", "fp16"):
        name = _C.choose("nvfp4_gemm", large | {"dtype": dtype}, H200)["kernel"]
        assert name == f"nvfp4_{dtype}_fused_dequant"
    for other in ({"m": 256}, {"n": 400000}, {"grouped": True, "groups": 2}):
        assert _C.choose("nvfp4_gemm", large | other, H200)["strategy"] != "fused_dequant"


LARGE = [(2048, 24576, 1536), (4096, 7168, 2048), (4100, 5003, 1040)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_large_products(device, shape, dtype):
    """A product of the weight's values, which 16 bits hold; the factor is a power of two."""
    m, n, k = shape
    problem = {"m": m, "n": n, "k": k, "dtype": "bf16" if dtype is BF16 else "fp16"}
    assert _C.choose("nvfp4_gemm", problem, H200)["strategy"] == "fused_dequant"
    weight = prepared(n, k, device=device)
    weight = weight._replace(global_scale=torch.full_like(weight.global_scale, 0.5))
    dense = (values(weight.data, n, k) * weight.global_scale).to(dtype)
    a = torch.randn(m, k, device=device).to(dtype)
    bias = torch.randn(n, device=device).to(dtype)
    expected = tk.gemm(a, dense.t(), bias=bias, activation="silu", out_dtype=FP32)
    options = {"bias": bias, "activation": "silu", "out_dtype": FP32}
    first = tk.nvfp4_gemm(a, weight, **options)
    torch.testing.assert_close(first, expected, rtol=2.0**-12, atol=2.0**-12 * float(k**0.5))
    for _ in range(20):
        assert torch.equal(tk.nvfp4_gemm(a, weight, **options), first)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_large_one_hot_rows_select(device, dtype):
    m, n, k = 4096, 5000, 2064
    problem = {"m": m, "n": n, "k": k, "dtype": "bf16" if dtype is BF16 else "fp16"}
    assert _C.choose("nvfp4_gemm", problem, H200)["strategy"] == "fused_dequant"
    weight, column = prepared(n, k, device=device), torch.randint(0, k, (m,), device=device)
    a = torch.zeros(m, k, dtype=dtype, device=device)
    a[torch.arange(m, device=device), column] = 1
    dense = values(weight.data, n, k) * weight.global_scale
    assert torch.equal(tk.nvfp4_gemm(a, weight, out_dtype=FP32), dense[:, column].t())


@pytest.mark.gpu
def test_streams_and_graph(device):
    """Two calls at a time share the GPU's SMs: blocks of either may be there without the others."""
    m, n, k = 4096, 4096, 2048
    assert _C.choose("nvfp4_gemm", {"m": m, "n": n, "k": k}, H200)["strategy"] == "fused_dequant"
    pairs = [
        (torch.randn(m, k, device=device).to(BF16), prepared(n, k, device=device)) for _ in range(2)
    ]
    check_streams_and_graph(tk.nvfp4_gemm, pairs)
