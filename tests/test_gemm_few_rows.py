"""`tk.gemm` for few rows with swap-AB: sums that are exact, and the same in any order."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch

import thunderkittens as tk
from helpers.layouts import matrix
from helpers.numerics import integers
from test_gemm_fused import BF16, FP16, FP32, normal
from test_gemm_kernels import H200
from thunderkittens import _C
from thunderkittens.emulation import POLICIES

# M, N and K of the kernels' own choice, by the blocks of a cluster that divide K.
FEW_ROWS = {1: (64, 8199, 1031), 2: (16, 2112, 7177), 3: (29, 2056, 2047)}


def swap_ab(fused: bool, m: int, **problem: object) -> dict[str, object]:
    """The fields of swap-AB's kernel for so many rows, to force it where another one is chosen."""
    names = ("strategy", "block_m", "block_n", "block_k", "stages", "consumers", "swap_ab")
    names += ("cluster_tile", "share_m", "share_n", "per_sm", "fused")
    problem |= {"m": m, "n": 4096, "k": 4096, "fused": fused}
    found = [c for c in _C.candidates("gemm", problem, H200) if c["swap_ab"]]
    best = min(found, key=lambda c: (c["block_m"], c["splits"]))
    return {name: best[name] for name in names}


@pytest.mark.parametrize("layout", ["sliced", "sliced_t"])
@pytest.mark.parametrize("splits", FEW_ROWS)
def test_few_rows_are_exact(device, layout, splits):
    """Either order of b, with NaN around the operands, with and without a division of K, all ways
    out, and with a residual, which another kernel adds."""
    emulated = type(device) is not str
    # With more SMs clusters of another kernel would have these products.
    emulate = partial(tk.emulate, sm_count=16)
    config = {"splits": splits, "blocks": 2 * splits, "evict_first_b": splits == 1}
    shapes = [FEW_ROWS[splits]] if device == "cuda" else [(1, 199, 769), (17, 136, 641)]
    for policy in POLICIES if emulated else ("none",):
        for m, n, k in [*shapes, (29, 199, 523)]:
            for dtype in (BF16, FP16):
                fill = partial(integers, low=-2, high=2, dtype=dtype, device=device)
                a, b, bias, residual = fill(m, k), fill(k, n), fill(n), fill(m, n)
                exact = a.float() @ b.float() + bias.float()
                left, right = matrix(a, "sliced"), matrix(b, layout)
                wide = FP32 if dtype == BF16 else BF16
                b_n_major = layout == "sliced"
                plain, fused = (config | swap_ab(x, m, b_n_major=b_n_major) for x in (False, True))
                with emulate(policy, config=plain) if emulated else nullcontext() as run:
                    out = tk.gemm(left, right, bias=bias)
                    out_wide = tk.gemm(left, right, bias=bias, out_dtype=wide)
                with emulate(policy, config=fused) if emulated else nullcontext():
                    out_sum = tk.gemm(left, right, bias=bias, residual=residual)
                assert torch.equal(out, exact.to(dtype))
                assert torch.equal(out_wide, exact.to(wide))
                assert torch.equal(out_sum, (exact + residual.float()).to(dtype))
                if emulated:
                    chosen = run.kernels[0]
                    assert chosen["swap_ab"]
                    assert chosen["b_n_major"] == (layout == "sliced")


@pytest.mark.parametrize("layout", ["packed", "packed_t"])
def test_reruns_of_divided_sums(device, layout):
    """Of normal numbers, whose sums depend on their order: blocks that divide k give the same bits
    in whatever order they arrive, that of the emulator's policies and seeds included."""
    emulated = type(device) is not str
    shapes = [(1, 2112, 7177), (17, 7168, 2048), (61, 2056, 16383), (128, 576, 4096)]
    for number, (m, n, k) in enumerate(shapes if device == "cuda" else [(17, 136, 1100)]):
        a, b = normal((m, k), BF16, device), matrix(normal((k, n), BF16, device), layout)
        residual = normal((m, n), FP32, device)
        runs = []
        for policy in POLICIES if emulated else range(5):
            b_n_major = layout == "packed"
            plain, fused = (
                {"splits": 3, "blocks": 6} | swap_ab(x, m, b_n_major=b_n_major)
                for x in (False, True)
            )
            emulate = partial(tk.emulate, policy, seed=number, sm_count=16)
            with emulate(config=plain) if emulated else nullcontext() as run:
                sums = tk.gemm(a, b, out_dtype=FP32)
            with emulate(config=fused) if emulated else nullcontext():
                activated = tk.gemm(a, b, activation="silu")
                runs.append((sums, activated, tk.gemm(a, b, residual=residual, out_dtype=FP32)))
            assert not emulated or run.kernels[0]["splits"] == 3
        for again in runs[1:]:
            assert all(torch.equal(x, y) for x, y in zip(again, runs[0], strict=True))
