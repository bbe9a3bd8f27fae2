"""`tk.nvfp4_gemm` with groups whose tiles have a k that the blocks of clusters divide."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from helpers.cover import alternate
from test_nvfp4_gemm import BF16, FP32, TILES, check, prepared


@pytest.mark.emulator
@alternate(("blocks", "splits"), [1, 3, 40], [2, 4])
@pytest.mark.parametrize("tile", [TILES[0], TILES[3]])
def test_groups_whose_k_is_divided_on_the_emulator(tile, splits, blocks):
    """Clusters with several tiles and, as only the device knows the groups, with none."""
    names = ("tokens", "row_groups", "k_groups", "pieces", "stages")
    config = dict(zip(names, tile, strict=True)) | {"splits": splits, "multicast": 1}
    config |= {"stream_k": False, "blocks": blocks * splits}
    sizes, k = (40, 0, 3, 0), 592
    weight = prepared(len(sizes), 290, k)
    offs = torch.tensor(sizes).cumsum(0).int()
    a = (torch.randn(sum(sizes) + 5, k) / k**0.5).to(BF16)
    results = []
    for policy in ("on_wait", "random"):
        with tk.emulate(policy, seed=blocks, config=config):
            results.append(tk.nvfp4_gemm(a, weight, offs=offs, out_dtype=FP32))
    assert torch.equal(*results)
    assert not results[0][sum(sizes) :].any()
    for e, begin in ((0, 0), (2, 40)):
        one = tk.Nvfp4Weight(weight.data[e], weight.global_scale[e], 290, k)
        rows = slice(begin, begin + sizes[e])
        check(results[0][rows], a[rows], one)


@pytest.mark.emulator
@pytest.mark.parametrize("tile", TILES)
def test_ends_behind_the_rows_are_those_of_the_rows(tile):
    """No row is written that is not there."""
    names = ("tokens", "row_groups", "k_groups", "pieces", "stages")
    config = dict(zip(names, tile, strict=True)) | {"splits": 1, "multicast": 1, "blocks": 3}
    config |= {"stream_k": False}
    weight = prepared(3, 200, 256)
    m = 2 * tile[0]
    a = torch.randn(m, 256).to(BF16)
    results = []
    for ends in ((5, m, m), (5, m + 40, 2**31 - 1)):
        with tk.emulate("late_mma", seed=1, config=config):
            results.append(tk.nvfp4_gemm(a, weight, offs=torch.tensor(ends, dtype=torch.int32)))
    assert torch.equal(*results)
    for e, rows in ((0, slice(0, 5)), (1, slice(5, m))):
        one = tk.Nvfp4Weight(weight.data[e], weight.global_scale[e], 200, 256)
        check(results[0][rows], a[rows], one)


@pytest.mark.parametrize("ends", [(300, 300, 1000), (0, 0, 0), (1, 2, 3), (1000, 1000, 1000)])
def test_groups_of_few_tiles(device, ends):
    """As the op chooses: k is divided, for as many tiles as there may be."""
    n, k = (768, 512) if device == "cuda" else (200, 512)
    weight = prepared(3, n, k, device=device)
    a = (torch.randn(1000, k) / k**0.5).to(BF16).to(device)
    offs = torch.tensor(ends, dtype=torch.int32, device=device)
    out = tk.nvfp4_gemm(a, weight, offs=offs)
    begin = 0
    for e, end in enumerate(ends):
        one = tk.Nvfp4Weight(weight.data[e], weight.global_scale[e], n, k)
        check(out[begin:end], a[begin:end], one)
        begin = end
    assert not out[begin:].any()
