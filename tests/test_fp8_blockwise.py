"""`tk.fp8_gemm` with block-wise scales alone, which have kernels of their own."""

import pytest
import torch

import thunderkittens as tk
from test_emulator import E4M3, FP8_TILE, FP8_TILES, POLICIES, fp8_operands, integers


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tile", [t for t in FP8_TILES if t[-1] == "blockwise"], ids=lambda t: t[1])
def test_fp8_gemm_with_blockwise_scales_alone(tile, policy):
    """Tiles of one step and of several, that begin and end inside a block of scales and inside a
    tile, both types of output, with and without a bias; and what other kernels compute."""
    config = dict(zip(FP8_TILE, tile, strict=False)) | {"consumers": 2, "swap_ab": False}
    config |= {"blockwise_only": True, "blocks": 2, "splits": 1}
    half = torch.float16
    for m, n, k, dtype in ((330, 616, 100, half), (129, 456, 784, torch.bfloat16)):
        a, b, scale_a, scale_b, expected = fp8_operands(m, n, k, "block")
        a, b = a.to(E4M3), b.t().contiguous().t().to(E4M3)
        bias = integers(n, dtype=torch.bfloat16) if dtype == half else None
        with tk.emulate(policy, seed=k, config=config) as run:
            out = tk.fp8_gemm(a, b, scale_a, scale_b, bias=bias, out_dtype=dtype)
        if bias is not None:
            expected = expected + bias.float()
        assert torch.equal(out, expected.to(dtype)), (m, n, k)
        assert (run.kernels[0]["blockwise_only"], run.kernels[0]["block_n"]) == (True, tile[1])
