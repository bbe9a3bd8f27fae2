"""fp8_gemm's tiles of run-time widths in clusters, on the emulator: blocks beside each other that
share loads by multicast, and blocks that divide k."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from test_gemm_kernels import DTYPES, E4M3, H200, POLICIES, split_k_config
from thunderkittens import _C, emulation

if emulation.problem is not None:
    pytest.skip(emulation.problem, allow_module_level=True)

# Columns of a tile, blocks along m and n that share loads, how many divide k; rows, columns, k.
SHARED = [
    (96, (2, 1, 1), (130, 100, 1040)),
    (64, (1, 2, 1), (60, 150, 1300)),
    (112, (2, 2, 2), (260, 300, 784)),
    (128, (4, 1, 2), (400, 72, 528)),
    (160, (1, 4, 2), (7, 500, 656)),
    (176, (2, 1, 3), (129, 200, 1072)),
    (192, (1, 2, 4), (20, 200, 1168)),
    (256, (2, 4, 1), (257, 1000, 144)),
]
# Of tiles with block-wise scales.
BLOCKWISE = [
    (64, (1, 1, 4), (30, 200, 1152)),
    (128, (1, 2, 2), (130, 300, 1040)),
    (128, (2, 1, 1), (200, 136, 128)),
    (256, (2, 2, 1), (129, 400, 640)),
]


@pytest.mark.parametrize("accurate", [False, True])
@pytest.mark.parametrize("number", range(len(SHARED)))
def test_blocks_share_loads(number, accurate):
    """Slices that begin behind the last row or column, blocks without a tile of their own, rings
    that wrap, ranges of k of different lengths."""
    block_n, (*share, splits), (m, n, k) = SHARED[number]
    a, b = torch.randint(-2, 3, (m, k)).float(), torch.randint(-2, 3, (k, n)).float()
    shapes = ((m, 1), (1, n)) if number % 2 else ((1, 1), (1, 1))
    scales = [2.0 ** torch.randint(-1, 2, shape).float() for shape in shapes]
    bias = torch.randint(-3, 4, (n,)).to(torch.bfloat16) if number % 3 == 0 else None
    options = {"accurate": accurate, "bias": bias, "out_dtype": DTYPES[number // 2 % 2]}
    right = b.t().contiguous().t().to(E4M3)
    config = split_k_config(block_n, splits, accurate=accurate, share=tuple(share))
    policy = POLICIES[number % len(POLICIES)]
    with tk.emulate(policy, seed=n, config=config) as run:
        out = tk.fp8_gemm(a.to(E4M3), right, *scales, **options)
    assert torch.equal(out, tk.reference.fp8_gemm(a, b, *scales, **options))
    assert run.kernels[0]["strategy"] == "split_k"
    assert [run.kernels[0][name] for name in ("cluster_m", "cluster_n")] == share


@pytest.mark.parametrize("number", range(len(BLOCKWISE)))
def test_blockwise_scales(number):
    """With strides of any order; a bias; tiles that begin within a block of columns."""
    block_n, (*share, splits), (m, n, k) = BLOCKWISE[number]
    a, b = torch.randint(-2, 3, (m, k)).float(), torch.randint(-2, 3, (k, n)).float()
    of_a = 2.0 ** torch.randint(-1, 2, (m, -(-k // 128))).float()
    of_b = 2.0 ** torch.randint(-1, 2, (-(-k // 128), -(-n // 128))).float()
    if number % 2:
        of_a = of_a.t().contiguous().t()
    bias = torch.randint(-3, 4, (n,)).to(torch.bfloat16) if number == 1 else None
    right = b.t().contiguous().t().to(E4M3)
    config = split_k_config(block_n, splits, accurate=True, share=tuple(share))
    with tk.emulate(POLICIES[number % len(POLICIES)], seed=n, config=config) as run:
        out = tk.fp8_gemm(a.to(E4M3), right, of_a, of_b, bias=bias)
    assert torch.equal(out, tk.reference.fp8_gemm(a, b, of_a, of_b, bias=bias))
    assert run.kernels[0]["strategy"] == "split_k"


@pytest.mark.parametrize("accurate", [False, True])
def test_sharing_changes_no_bits(accurate):
    a, b = torch.randn(150, 900).to(E4M3), torch.randn(200, 900).to(E4M3).t()
    scales = torch.rand(150, 1), torch.rand(1, 200)
    for splits in (1, 4):
        runs = []
        for share in ((1, 1), (2, 1), (1, 2)):
            config = split_k_config(96, splits, accurate=accurate, share=share)
            with tk.emulate("late_mma", seed=splits, config=config):
                runs.append(tk.fp8_gemm(a, b, *scales, accurate=accurate))
        assert all(torch.equal(run, runs[0]) for run in runs)


@pytest.mark.parametrize("m", [1, 60, 300, 2000])
def test_candidates_begin_with_the_choice(m):
    names = {kernel["name"] for kernel in _C.kernels() if kernel["op"] == "fp8_gemm"}
    for fields in ({}, {"accurate": False}, {"blockwise": True}, {"grouped": True, "groups": 3}):
        problem = {"m": m, "n": 1000, "k": 2000} | fields
        found = _C.candidates("fp8_gemm", problem, H200)
        assert found[0] == _C.choose("fp8_gemm", problem, H200)
        assert {one["kernel"] for one in found} <= names
        assert all(found.count(one) == 1 for one in found)
        assert len(found) == 1 if "grouped" in fields else len(found) > 4
