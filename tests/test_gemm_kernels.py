"""Which of gemm's kernels runs, on the emulator: those for one tile per block, clusters that divide
k, rows that two tiles compute."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import thunderkittens as tk
from thunderkittens import _C, emulation

if emulation.problem is not None:
    pytest.skip(emulation.problem, allow_module_level=True)

POLICIES = emulation.POLICIES
DTYPES = (torch.bfloat16, torch.float16)
H200 = _C.DeviceProperties(
    sm_count=132, shared_bytes_per_block=232448, l2_bytes=50 << 20, major=9, minor=0
)
SHAPES = {(128, 256): (4, 2), (128, 128): (6, 2), (64, 128): (8, 1), (64, 64): (10, 1)}
NT_SHAPES = {(128, 112): (6, 2), (128, 176): (5, 2), (128, 224): (4, 2)}
NN_SHAPES = {(128, 192): (4, 2)}


def integers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-4, 5, shape).to(dtype)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tile", SHAPES | NT_SHAPES | NN_SHAPES, ids=lambda t: f"{t[0]}x{t[1]}")
def test_gemm_in_one_round(tile, batch):
    """A block for each tile: the grid has their shape, and they leave as a block's last tile."""
    a = integers(batch, 140, 264, dtype=torch.bfloat16)
    b = integers(batch, 264, 272, dtype=torch.bfloat16)
    rows, columns = math.ceil(140 / tile[0]), math.ceil(272 / tile[1])
    stages, consumers = (SHAPES | NT_SHAPES | NN_SHAPES)[tile]
    config = {"block_m": tile[0], "block_n": tile[1], "stages": stages, "consumers": consumers}
    config |= {"band": rows, "blocks": batch * rows * columns}
    for a_m_major in [False, True] if tile in SHAPES else [False]:
        for b_n_major in [False] if tile in NT_SHAPES else [True] if tile in NN_SHAPES else [0, 1]:
            left = a.mT.contiguous().mT if a_m_major else a
            right = b if b_n_major else b.mT.contiguous().mT
            with tk.emulate("random", seed=batch, config=config) as run:
                out = tk.gemm(left, right)
            assert torch.equal(out, (a.float() @ b.float()).bfloat16()), (a_m_major, b_n_major)
            assert run.kernels[0]["kernel"].endswith("_once") == (tile == (128, 256))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemm_of_several_tiles(dtype, policy):
    """The four pieces of a finished tile leave in every step of the next one, or in every second
    where there are enough: too few, just enough, and many; sums as they are and with a bias."""
    config = {"block_m": 128, "block_n": 256, "stages": 4, "consumers": 2, "blocks": 2}
    for number, k in enumerate((256, 384, 448, 512, 1048)):
        a_m_major, b_n_major = number % 2 == 1, number < 2
        a, b = integers(3, 72, k, dtype=dtype), integers(3, k, 264, dtype=dtype)
        bias = integers(264, dtype=dtype) if number % 3 == 2 else None
        expected = a.float() @ b.float() + (0 if bias is None else bias.float())
        left = a.mT.contiguous().mT if a_m_major else a
        right = b if b_n_major else b.mT.contiguous().mT
        with tk.emulate(policy, seed=k, config=config) as run:
            out = tk.gemm(left, right, bias=bias)
        assert torch.equal(out, expected.to(dtype)), (k, a_m_major, b_n_major)
        assert run.kernels[0]["kernel"].endswith("_128x256")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemm_of_single_tiles(dtype, policy):
    """Tiles of whole columns, one per block, have a kernel of their own, unless there is a bias or
    another type: fewer steps than stages, as many, and more; rows that two tiles compute."""
    for batch, m, n, k in (
        (1, 128, 128, 24),
        (2, 128, 64, 640),
        (2, 72, 64, 72),
        (1, 128, 64, 1416),
    ):
        rows = -(-m // 64)
        config = {"block_m": 64, "block_n": 64, "stages": 10, "consumers": 1, "band": rows}
        config["blocks"] = batch * rows * (n // 64)
        for a_m_major, b_n_major, b_once in itertools.product((False, True), repeat=3):
            a, b = integers(batch, m, k, dtype=dtype), integers(batch, k, n, dtype=dtype)
            expected = a.float() @ b.float()
            a = a.mT.contiguous().mT if a_m_major else a
            b = b if b_n_major else b.mT.contiguous().mT
            with tk.emulate(policy, seed=k, config=config | {"b_once": b_once}) as run:
                out = tk.gemm(a, b)
            assert torch.equal(out, expected.to(dtype)), (m, n, k, a_m_major, b_n_major)
            assert run.kernels[0]["kernel"].endswith("_64x64_single")
    with tk.emulate(policy, config=config) as run:
        out = tk.gemm(a[0], b[0], bias=torch.ones(n, dtype=dtype), out_dtype=torch.float32)
    assert torch.equal(out, expected[0] + 1)
    assert run.kernels[0]["kernel"].endswith("_64x64")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("m", [70, 130])
def test_gemm_divides_a_long_k(m, policy):
    """Clusters of the kernel for few rows divide k, also where there are several rows of tiles."""
    for k, splits in ((4096, 4), (2048, 1)):
        chosen = _C.choose("gemm", {"m": 128, "n": 576, "k": k, "batch": 1}, H200)
        assert (chosen["streamed"], chosen["splits"]) == (splits > 1, splits)
    config = {"block_m": 64, "block_n": 64, "stages": 6, "consumers": 1, "block_k": 128}
    config |= {"streamed": True, "splits": 3, "blocks": 6}
    for b_n_major in (False, True):
        a, b = integers(m, 520, dtype=torch.bfloat16), integers(520, 136, dtype=torch.bfloat16)
        right = b if b_n_major else b.t().contiguous().t()
        with tk.emulate(policy, seed=m, config=config) as run:
            out = tk.gemm(a, right)
        assert torch.equal(out, (a.float() @ b.float()).bfloat16()), b_n_major
        assert run.kernels[0]["kernel"].endswith("_stream_64x64")
