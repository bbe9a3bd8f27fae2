"""gemm's run-time tiles on the emulator: every kernel, layout and cluster, operands that change
places, tiles of consumers above each other and side by side; which products choose them."""

from __future__ import annotations

import itertools

import pytest
import torch

import thunderkittens as tk
from helpers.policies import every_dtype_and_policy
from test_gemm_clusters import LAYOUTS, choose, laid_out
from test_gemm_kernels import H200, integers
from thunderkittens import _C, emulation

if emulation.problem is not None:
    pytest.skip(emulation.problem, allow_module_level=True)

# Rows and width of a consumer's tile, and whether the consumers' tiles lie side by side.
TILES = [(64, 64, False), (64, 144, False), (64, 256, False), (64, 80, True), (64, 192, True)]
TILES += [(128, 96, False), (128, 160, False), (128, 144, True), (128, 160, True)]
TILES += [(192, 64, False), (192, 112, False), (192, 80, True), (192, 112, True)]
CLUSTERS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4)]


def forced(tile, swap_ab, share_m=1, share_n=1, **schedule):
    rows, width, side_by_side = tile
    size = [rows if side_by_side else 2 * rows, 2 * width if side_by_side else width]
    block_m, block_n = reversed(size) if swap_ab else size
    config = {"strategy": "runtime_tile", "block_m": block_m, "block_n": block_n, "stages": 0}
    config |= {"consumers": 2, "block_k": 64, "swap_ab": swap_ab, "fused": False}
    config |= {"cluster_tile": False, "share_m": share_m, "share_n": share_n, "splits": 1}
    return config | {"blocks": share_m * share_n, "raster_group": 2} | schedule


@every_dtype_and_policy
@pytest.mark.parametrize(("number", "tile"), enumerate(TILES), ids=str)
def test_every_tile(number, tile, dtype, policy):
    """Rows, columns and steps that tiles have in part; tiles that others follow, and last ones; a
    bias and a factor; batches."""
    for turn, (swap_ab, layout) in enumerate(itertools.product((False, True), LAYOUTS)):
        if (turn + number) % 2:
            continue
        share_m, share_n = CLUSTERS[(turn + number) // 2 % 8]
        config = forced(tile, swap_ab, share_m, share_n)
        config["blocks"] *= 1 + number % 2 if share_m * share_n < 4 else 1
        batch, k = 1 + turn // 2 % 2, 64 * (2 + number % 3) + 24
        m = config["block_m"] * (1 + number % 2) + 24
        n = config["block_n"] * (1 if share_m * share_n > 4 else 2 - number % 2) + 40
        a, b = integers(batch, m, k, dtype=dtype), integers(batch, k, n, dtype=dtype)
        bias = integers(n, dtype=dtype) if turn % 3 else None
        alpha = 2.0 if turn % 3 == 2 else 1.0
        left, right = laid_out(a, b, *layout)
        with tk.emulate(policy, seed=number, config=config) as run:
            out = tk.gemm(left, right, bias=bias, alpha=alpha)
        expected = alpha * (a.float() @ b.float()) + (0 if bias is None else bias.float())
        assert torch.equal(out, expected.to(dtype)), (swap_ab, layout)
        assert run.kernels[0]["kernel"].partition("_")[2] == f"runtime_tile_{tile[0]}"


@pytest.mark.parametrize(("share_m", "share_n"), CLUSTERS, ids=str)
@pytest.mark.parametrize("swap_ab", [False, True], ids=("", "swap_ab"))
def test_every_cluster(share_m, share_n, swap_ab):
    """Clusters whose last blocks have no rows or columns of their own, more steps than stages; b
    without a batch; rows that begin anywhere, and no k."""
    for turn, layout in enumerate(LAYOUTS):
        config = forced((64, 80 + 16 * turn, False), swap_ab, share_m, share_n)
        m, n = config["block_m"] + 8, config["block_n"] * max(1, share_n - 1) + 16
        a = integers(1 + turn % 2, m, 64 * 11 + 8, dtype=torch.bfloat16)
        b = integers(64 * 11 + 8, n, dtype=torch.bfloat16)
        left, right = laid_out(a, b, *layout)
        with tk.emulate("random", seed=turn, config=config) as run:
            out = tk.gemm(left, right)
        assert torch.equal(out, (a.float() @ b.float()).bfloat16()), layout
        assert run.kernels[0]["kernel"] == "bf16_runtime_tile_64"
    a, b = integers(70, 65, dtype=torch.bfloat16), integers(65, 72, dtype=torch.bfloat16)
    with tk.emulate("late_mma", config=config) as run:
        out = tk.gemm(a, b)
    assert torch.equal(out, (a.float() @ b.float()).bfloat16())
    assert run.kernels[-1]["kernel"] == "bf16_runtime_tile_64"
    with tk.emulate("late_mma", config=config) as run:
        out = tk.gemm(a[:, :0], b[:0], bias=b[0])
    assert torch.equal(out, b[0].expand(70, -1))
    assert len(run.kernels) == 1


def test_what_its_store_cannot_write_runs_elsewhere():
    """An output whose rows TMA cannot store."""
    config = forced((64, 80, False), False)
    a, b = integers(70, 64, dtype=torch.float16), integers(64, 72, dtype=torch.float16)
    out = torch.empty(70, 76, dtype=torch.float16)[:, :72]
    with tk.emulate("random", config=config) as run:
        tk.gemm(a, b, out=out)
    assert torch.equal(out, (a.float() @ b.float()).half())
    assert run.kernels[0]["kernel"] == "fp16_nn_128x256"


def test_which_products_choose_it():
    """Long ones without an epilogue, of rows that TMA stores; the larger off the lines of the L2
    cache share loads over clusters."""
    rows = {"a_m_major": False, "b_n_major": False, "a_alignment": 16, "b_alignment": 16}
    large = choose(5955, 3720, 2104, **rows)
    assert large["strategy"] == "runtime_tile"
    assert large["share_m"] * large["share_n"] > 1
    tiles = -(-5955 // large["block_m"]) * -(-3720 // large["block_n"])
    assert large["blocks"] <= 132
    assert tiles > 132
    for problem in ((128, 128, 64), (5955, 3724, 2104)):
        assert choose(*problem, **rows)["strategy"] != "runtime_tile"
    assert choose(5955, 3720, 2104, fused=True, **rows)["strategy"] != "runtime_tile"
    problem = {"m": 5955, "n": 3720, "k": 2104, "batch": 1, **rows}
    found = [c for c in _C.candidates("gemm", problem, H200) if c["strategy"] == "runtime_tile"]
    assert len(found) > 500
    assert len({c["kernel"] for c in found}) == 3
