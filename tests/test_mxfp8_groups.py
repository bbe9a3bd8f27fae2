"""`tk.mxfp8_gemm` of groups: values, empty groups, rows behind the last, memory of the weights."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from test_mxfp8_gemm import BF16, E4M3, E5M2, operand, swizzled

GROUPS = [[5, 0, 130, 1], [0, 0], [70], [64, 0, 64], [0, 7, 0, 0, 140]]


@pytest.mark.parametrize("sizes", GROUPS)
@pytest.mark.parametrize("behind", [0, 9])
@pytest.mark.parametrize("k", [144, 72, 0])
@pytest.mark.parametrize("swizzle", [True, False])
def test_groups(device, sizes, behind, k, swizzle):
    """Each group with a weight of its own; rows behind the last give 0, NaN or not."""
    m, n, count = sum(sizes) + behind, 136, len(sizes)
    kind = E5M2 if behind else E4M3
    a, scale_a = operand(m, k, E4M3, False, device)
    if behind and k:
        a.view(torch.uint8)[-behind:] = 0x7F
    data = torch.randint(-2, 3, (count, n, k), device=device).to(kind)
    scale_b = torch.randint(126, 129, (count, n, -(-k // 32)), device=device).to(torch.uint8)
    bias = torch.randint(-3, 4, (n,), device=device).to(BF16)
    if swizzle:
        scale_a = swizzled(scale_a.view(torch.uint8), True)
        scale_b = tk.reference._block_scaled.swizzle_scales(scale_b)
    given = (a, data.mT, scale_a, scale_b)
    options = {"bias": bias, "swizzle": swizzle, "activation": "relu" if swizzle else None}
    options["offs"] = torch.tensor(sizes, device=device).cumsum(0).int()
    out = tk.mxfp8_gemm(*given, **options)
    expected = tk.reference.mxfp8_gemm(*given, out_dtype=torch.float64, **options)
    assert torch.equal(out, expected.to(BF16))
    assert not out[m - behind :].any()


@pytest.mark.parametrize("layout", ["packed", "rows", "offset", "apart", "columns"])
def test_layouts_of_groups(device, layout):
    """b's columns along K, adjacent or not, from multiples of 16 bytes on or not, and groups that
    are no multiple of them apart."""
    count, n, k = 3, 40, 64
    codes = torch.randint(-2, 3, (count, n, k), device=device).to(E4M3)
    if layout == "columns":
        weight = codes.mT.contiguous().mT
    else:
        pitch = 72 if layout == "rows" else k
        apart = n * pitch + 8 * (layout == "apart")
        memory = torch.zeros(8 + count * apart, device=device).to(E4M3)
        place = ((count, n, k), (apart, pitch, 1), 8 * (layout == "offset"))
        weight = memory.as_strided(*place)
        weight.copy_(codes)
    a, scale_a = operand(9, k, E4M3, True, device)
    scale_b = torch.full((count, n, 2), 128, dtype=torch.uint8, device=device)
    scale_b = tk.reference._block_scaled.swizzle_scales(scale_b)
    offs = torch.tensor([4, 4, 9], dtype=torch.int32, device=device)
    out = tk.mxfp8_gemm(a, weight.mT, scale_a, scale_b, offs=offs)
    assert torch.equal(out, tk.mxfp8_gemm(a, codes.mT, scale_a, scale_b, offs=offs))
