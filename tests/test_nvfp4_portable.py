"""The portable kernels of `tk.nvfp4_gemm`, by their names, on the emulator, and their choice, which
is pure: the GPUs need not be here."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from helpers.policies import DTYPES, every_dtype_and_policy
from test_gemm_kernels import by_name, named
from test_nvfp4_gemm import FP32, check, prepared
from test_portable import GPUS, device
from thunderkittens import _C, emulation
from thunderkittens.reference.nvfp4_prepare import values

if emulation.problem is not None:
    pytest.skip(emulation.problem, allow_module_level=True)

# Rows of a and of the weight.
TILES = [(128, 128), (64, 128), (64, 64)]


def tile_of(tokens: int, columns: int) -> dict[str, object]:
    """Fields of a choice that force a tile."""
    return {"strategy": "portable", "tokens": tokens, "row_groups": columns // 64}


def few_rows(strips: int, stages: int, warps: int = 8, tokens: int = 16) -> dict[str, object]:
    fields = {"strips": strips, "stages": stages, "k_groups": warps, "tokens": tokens}
    return {"strategy": "portable_few_rows"} | fields


@pytest.mark.parametrize(
    "name", named("nvfp4_gemm", r"nvfp4_(bf16|fp16)_(\d+)x(\d+)_portable"), ids=by_name
)
def test_every_kernel(name):
    """Tiles that are cut off at each side, as many stages of k as the ring has, fewer and more."""
    dtype = DTYPES[name[1] == "fp16"]
    columns, tokens = int(name[2]), int(name[3])
    for m, n, k in ((tokens + 8, columns + 16, 272), (13, 30, 16), (5, 72, 640)):
        weight = prepared(n, k)
        a = (torch.randn(m, k) / k**0.5).to(dtype)
        with tk.emulate("random", seed=k, portable=True, config=tile_of(tokens, columns)) as run:
            out = tk.nvfp4_gemm(a, weight, out_dtype=FP32)
        check(out, a, weight)
        assert run.kernels[0]["kernel"] == name[0]


@every_dtype_and_policy
@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t[0]}x{t[1]}")
def test_the_ring_goes_round(tile, dtype, policy):
    """Stages are filled anew while others are read. A row with a single one gives a column of the
    weight, to the bit."""
    for k in (64, 192, 448, 720):
        weight = prepared(136, k)
        a = torch.zeros(70, k, dtype=dtype)
        column = torch.randint(0, k, (70,))
        a[torch.arange(70), column] = 1
        with tk.emulate(policy, seed=k, portable=True, config=tile_of(*tile)):
            out = tk.nvfp4_gemm(a, weight, out_dtype=FP32)
        dense = values(weight.data, 136, k) * weight.global_scale
        assert torch.equal(out, dense[:, column].t())


@every_dtype_and_policy
@pytest.mark.parametrize(("strips", "tokens"), [(1, 8), (2, 16), (3, 8), (4, 16), (7, 8), (7, 16)])
def test_few_rows(strips, tokens, dtype, policy):
    """Rings of every depth that go round, 8 and 16 warps, warps without a piece of k, the last tile
    with fewer strips, strips of three rows of pieces in a tile, several tiles of rows of a."""
    for m, n, k, stages, warps in (
        (11, 470, 1616, 2, 8),
        (16, 72, 208, 3, 8),
        (1, 9, 16, 6, 8),
        (37, 330, 592, 4, 8),
        (5, 120, 4112, 3, 16),
        (2, 40, 2896, 5, 8),
    ):
        weight = prepared(n, k)
        a = (torch.randn(m, k) / k**0.5).to(dtype)
        fit = 232448 // (warps * (tokens * 128 + strips * 576))
        config = few_rows(strips, min(stages, fit), warps, tokens)
        with tk.emulate(policy, seed=k, portable=True, config=config) as run:
            out = tk.nvfp4_gemm(a, weight, out_dtype=FP32)
        check(out, a, weight)
        assert run.kernels[0]["kernel"].endswith(f"_{tokens}_few_rows_portable")


@pytest.mark.parametrize(
    "config", [*(tile_of(*tile) for tile in TILES), few_rows(3, 2)], ids=lambda c: c["strategy"]
)
def test_groups(config):
    """That end within tiles, that have no rows, and rows of no group; ends behind the rows are
    those of the rows."""
    sizes, k, n = (40, 0, 3, 130), 272, 200
    weight = prepared(len(sizes), n, k)
    m = sum(sizes) + 5
    bias = torch.randn(n).bfloat16()
    for ends in (torch.tensor(sizes).cumsum(0), torch.tensor([40, 40, m + 9, 2**31 - 1])):
        a = (torch.randn(m, k) / k**0.5).bfloat16()
        behind = min(int(ends[-1]), m)
        a[behind:] = torch.nan
        options = {"bias": bias, "activation": "silu"}
        with tk.emulate("late_mma", seed=1, portable=True, config=config):
            out = tk.nvfp4_gemm(a, weight, offs=ends.int(), **options)
        begin = 0
        for e, end in enumerate(ends.clamp(max=m).tolist()):
            one = tk.Nvfp4Weight(weight.data[e], weight.global_scale[e], n, k)
            check(out[begin:end], a[begin:end], one, **options)
            begin = end
        assert not out[behind:].any()


def choice(gpu: str, m: int, n: int, k: int, **fields) -> dict[str, object]:
    problem = {"m": m, "n": n, "k": k, "groups": 1, "grouped": False}
    problem |= {"dtype": "bf16", "out_dtype": "bf16"} | fields
    return _C.choose("nvfp4_gemm", problem, device(gpu, portable_only=True))


@pytest.mark.parametrize("gpu", GPUS)
def test_the_choice(gpu):
    """To 16 rows, of each group, the kernel for few rows, and as many stages as fit; for many the
    largest tile."""
    _, sm_count, shared_bytes, _ = GPUS[gpu]
    for m, n, k in ((1, 4096, 4096), (16, 14336, 4096), (16, 28672, 8192), (3, 40, 32)):
        few = choice(gpu, m, n, k)
        assert few["strategy"] == "portable_few_rows"
        assert few["stages"] >= 2
        assert few["tokens"] == (8 if m <= 8 else 16)
        of_warp = few["stages"] * (few["tokens"] * 128 + 576 * few["strips"])
        assert few["k_groups"] * of_warp <= shared_bytes
        tiles = -(-n // (16 * few["strips"]))
        assert tiles >= min(sm_count, -(-n // 112))
    assert choice(gpu, 128, 4096, 4096, groups=8, grouped=True)["tokens"] == 16
    many = choice(gpu, 8192, 8192, 4096)
    assert (many["strategy"], many["tokens"], many["row_groups"]) == ("portable", 128, 2)
    assert choice(gpu, 17, 1024, 4096)["tokens"] == 64
