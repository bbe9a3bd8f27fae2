"""`tk.mxfp8_gemm` with fused dequantization: the bits of the pass and the product of bf16 that it
stands for, whichever warps dequantize what."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from helpers.streams import check_streams_and_graph
from test_compiled_module import H200
from test_emulator import POLICIES
from test_mxfp8_gemm import BF16, E4M3, E5M2, FP16, FP32, operand, quantised
from thunderkittens import _C

TILES = {256: "fused_dequant", 176: "fused_dequant_176"}  # by their columns
# Rows that end in an item, in a region, in both; k that ends in a block of scales, in a region.
SHAPES = [(384, 512, 544), (200, 400, 304), (129, 257, 512), (80, 16, 16), (130, 700, 1056)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sm_count", [1, 3])
@pytest.mark.parametrize("block_n", TILES)
def test_integers_are_exact(block_n, shape, sm_count, policy):
    m, n, k = shape
    odd = sm_count == 1
    a, scale_a = operand(m, k, E5M2 if odd else E4M3, True, "cpu")
    b, scale_b = operand(n, k, E4M3, True, "cpu")
    bias = torch.randint(-3, 4, (n,)).to(BF16) if odd else None
    out_dtype = (BF16, FP16, FP32)[(m + sm_count) % 3]
    given = (a, b.t(), scale_a, scale_b)
    blocks = min(sm_count, -(-m // 128) * -(-n // block_n))
    config = {"strategy": "fused_dequant", "block_n": block_n, "raster_group": 2, "blocks": blocks}
    with tk.emulate(policy, seed=m, config=config, sm_count=sm_count) as run:
        out = tk.mxfp8_gemm(*given, bias=bias, out_dtype=out_dtype)
    assert [kernel["kernel"] for kernel in run.kernels] == [TILES[block_n]]
    expected = tk.reference.mxfp8_gemm(*given, bias=bias, out_dtype=torch.float64)
    assert torch.equal(out, expected.to(out_dtype))


def any_codes(rows, k, device):
    """Every code and every scale, NaN too."""
    data = torch.randint(0, 256, (rows, k), device=device, dtype=torch.uint8)
    data = torch.where((data & 127 == 127) & (torch.rand_like(data, dtype=FP32) < 0.999), 1, data)
    scale = torch.randint(90, 165, (rows, k // 32), device=device, dtype=torch.uint8)
    scale[5, 3] = 255
    return data.view(E4M3), scale


def laid_out(scale):
    return tk.reference._block_scaled.swizzle_scales(scale.view(torch.uint8))


def test_any_codes_and_rows_apart():
    """Strides, codes and scales of all kinds: the bits of the way that plain scales take."""
    (a, scale_a), (b, scale_b) = any_codes(150, 288, "cpu"), any_codes(270, 288, "cpu")
    room = torch.empty(150, 320, dtype=torch.uint8).fill_(0x7F)
    room[:, :288] = a.view(torch.uint8)
    a = room.view(E4M3)[:, :288]
    config = {"strategy": "fused_dequant", "block_n": 256, "raster_group": 2, "blocks": 2}
    with tk.emulate("random", seed=1, config=config, sm_count=2):
        out = tk.mxfp8_gemm(a, b.t(), laid_out(scale_a), laid_out(scale_b), out_dtype=FP32)
    with tk.emulate():
        expected = tk.mxfp8_gemm(a, b.t(), scale_a, scale_b, out_dtype=FP32, swizzle=False)
    assert torch.equal(out.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_choice():
    """The kernel that expands where its tiles fill the GPU and it can read the operands."""
    large = {"m": 4096, "n": 8192, "k": 8192}
    assert _C.choose("mxfp8_gemm", large, H200)["kernel"] == "fused_dequant"
    for other in (
        {"m": 64},
        {"m": 512},
        {"n": 256},
        {"k": 8200},
        {"fused": True},
        {"readable": False},
        {"readable_a": False},
        {"short_rows": False},
    ):
        assert _C.choose("mxfp8_gemm", large | other, H200)["kernel"] != "fused_dequant"
    assert _C.choose("mxfp8_gemm", large | {"rescaled": True}, H200)["strategy"] == "rescale"
    narrow = _C.choose("mxfp8_gemm", {"m": 4096, "n": 2112, "k": 7168}, H200)
    assert narrow["kernel"] == "fused_dequant_176"


LARGE = [(4096, 4096, 7168), (4096, 7168, 2048), (1024, 8192, 4096), (2100, 5003, 1040)]
NARROW = [(4096, 2112, 7168), (4100, 2100, 2064)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGE + NARROW, ids=str)
@pytest.mark.parametrize("kinds", [(E4M3, E4M3), (E4M3, E5M2)])
def test_the_bits_of_the_pass(device, shape, kinds):
    """Plain scales go the other way: a pass, and a product of bf16."""
    m, n, k = shape
    a, scale_a = quantised(torch.randn(m, k, device=device).to(BF16), dtype=kinds[0], swizzle=False)
    b, scale_b = quantised(torch.randn(n, k, device=device).to(BF16), dtype=kinds[1], swizzle=False)
    expected = tk.mxfp8_gemm(a, b.t(), scale_a, scale_b, swizzle=False)
    for _ in range(20):
        assert torch.equal(tk.mxfp8_gemm(a, b.t(), laid_out(scale_a), laid_out(scale_b)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [4096, 2112])
def test_streams_and_graph(device, n):
    """Two calls at a time share the GPU's SMs: blocks of either may be there without the others."""
    m, k = 4096, 2048
    name = "fused_dequant" if n == 4096 else "fused_dequant_176"
    assert _C.choose("mxfp8_gemm", {"m": m, "n": n, "k": k}, H200)["kernel"] == name
    pairs = []
    for _ in range(2):
        a = quantised(torch.randn(m, k, device=device).to(BF16))
        b = quantised(torch.randn(n, k, device=device).to(BF16))
        pairs.append((a[0], b[0].t(), a[1], b[1]))
    check_streams_and_graph(tk.mxfp8_gemm, pairs)
