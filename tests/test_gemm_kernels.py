"""Which of gemm's kernels runs, on the emulator: single-wave, split-K, stream-K,
rows that two tiles compute; and every kernel of the family by its name."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch

import thunderkittens as tk
from helpers.policies import DTYPES, every_dtype_and_policy
from thunderkittens import _C, emulation

if emulation.problem is not None:
    pytest.skip(emulation.problem, allow_module_level=True)

POLICIES = emulation.POLICIES
H200 = _C.DeviceProperties(
    sm_count=132, shared_bytes_per_block=232448, l2_bytes=50 << 20, major=9, minor=0
)
SHAPES = {(128, 256): (4, 2), (128, 128): (6, 2), (64, 128): (8, 1)}


def integers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-4, 5, shape).to(dtype)


@pytest.mark.parametrize(("batch", "dtype"), [(1, torch.bfloat16), (3, torch.float16)])
@pytest.mark.parametrize("tile", [(128, 256), (128, 128)], ids=lambda t: f"{t[0]}x{t[1]}")
def test_gemm_in_one_wave(tile, batch, dtype):
    """A block for each tile: the grid has their shape, and they leave as a block's last tile."""
    a = integers(batch, 136, 264, dtype=dtype)
    b = integers(batch, 264, 272, dtype=dtype)
    rows, columns = math.ceil(136 / tile[0]), math.ceil(272 / tile[1])
    stages, consumers = SHAPES[tile]
    config = {"block_m": tile[0], "block_n": tile[1], "stages": stages, "consumers": consumers}
    config |= {"raster_group": rows, "blocks": batch * rows * columns}
    for a_m_major, b_n_major in itertools.product((False, True), repeat=2):
        left = a.mT.contiguous().mT if a_m_major else a
        right = b if b_n_major else b.mT.contiguous().mT
        with tk.emulate("random", seed=batch, config=config) as run:
            out = tk.gemm(left, right)
        assert torch.equal(out, (a.float() @ b.float()).to(dtype)), (a_m_major, b_n_major)
        once = "_single_wave" if tile == (128, 256) else ""
        name = f"{'nt'[a_m_major]}{'tn'[b_n_major]}_{tile[0]}x{tile[1]}{once}"
        assert run.kernels[0]["kernel"].partition("_")[2] == name


@every_dtype_and_policy
def test_gemm_of_several_tiles(dtype, policy):
    """The four subtiles of a finished tile are stored in every step of the next one, or in every
    second where there are enough: too few, just enough, and many; sums as they are, and with a
    bias."""
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


@every_dtype_and_policy
def test_gemm_of_single_wave_64x64(dtype, policy):
    """Tiles of whole columns, one per block, have a kernel of their own; cluster tiles are what
    runs where there is a bias or another type. Fewer steps than stages, as many, and more; rows
    that two tiles compute."""
    for batch, m, n, k in (
        (1, 128, 128, 24),
        (2, 128, 64, 640),
        (2, 72, 64, 72),
        (1, 128, 64, 1416),
    ):
        rows = -(-m // 64)
        config = {"block_m": 64, "block_n": 64, "stages": 10, "consumers": 1, "raster_group": rows}
        config |= {"blocks": batch * rows * (n // 64), "strategy": "single_wave_64x64"}
        for a_m_major, b_n_major, evict_first_b in itertools.product((False, True), repeat=3):
            a, b = integers(batch, m, k, dtype=dtype), integers(batch, k, n, dtype=dtype)
            expected = a.float() @ b.float()
            a = a.mT.contiguous().mT if a_m_major else a
            b = b if b_n_major else b.mT.contiguous().mT
            with tk.emulate(
                policy, seed=k, config=config | {"evict_first_b": evict_first_b}
            ) as run:
                out = tk.gemm(a, b)
            assert torch.equal(out, expected.to(dtype)), (m, n, k, a_m_major, b_n_major)
            assert run.kernels[0]["kernel"].endswith("_64x64_single_wave")
    with tk.emulate(policy, config=config) as run:
        out = tk.gemm(a[0], b[0], bias=torch.ones(n, dtype=dtype), out_dtype=torch.float32)
    assert torch.equal(out, expected[0] + 1)
    assert run.kernels[0]["kernel"].endswith("_64x64_cluster")


# ---- split-K and stream-K ----

# Columns of a tile and stages; rows, columns, k, how many blocks divide k, and how many there are.
SPLIT_K = [
    # Split-K: every block of a tile finishes a share of it.
    ((128, 7), (128, 136, 200, 2, 4)),
    ((192, 5), (200, 200, 520, 3, 12)),
    ((128, 7), (130, 120, 1096, 8, 16)),
    ((192, 5), (129, 392, 456, 7, 42)),
    # Stream-K: two blocks for a tile; three for two tiles, the last row of which overlaps
    # the one before; fewer tiles than the groups have room for.
    ((192, 5), (128, 264, 1160, 4, 4)),
    ((192, 5), (200, 264, 1928, 3, 6)),
    ((128, 7), (128, 300, 1928, 3, 6)),
    # Twelve blocks for five tiles: some have several helping peers, and some peers help two tiles.
    ((128, 7), (128, 600, 1352, 12, 12)),
    # A whole tile for each block, and one of which two blocks compute a part before.
    ((192, 5), (256, 384, 1096, 3, 3)),
    ((128, 7), (250, 320, 1096, 4, 4)),
    # Which leaves nothing to split.
    ((128, 7), (250, 256, 200, 4, 4)),
    # Other tiles compute what has no room in these, where rows of the output are not whole words,
    # or there are too few.
    ((128, 7), (130, 132, 1160, 3, 6)),
    ((192, 5), (100, 64, 1160, 2, 2)),
    ((192, 5), (128, 264, 520, 4, 4)),
    ((128, 7), (128, 264, 1928, 13, 13)),
    ((128, 7), (256, 256, 136, 3, 3)),
]


@every_dtype_and_policy
@pytest.mark.parametrize("b_n_major", [False, True])
def test_gemm_split_k(b_n_major, dtype, policy):
    for number, ((block_n, stages), (m, n, k, splits, blocks)) in enumerate(SPLIT_K):
        a, b, bias = (integers(*shape, dtype=dtype) for shape in ((m, k), (k, n), (n,)))
        bias = bias if number % 2 == 0 else None
        expected = a.float() @ b.float() + (0 if bias is None else bias.float())
        if not b_n_major:
            b = b.t().contiguous().t()
        tile = {"block_m": 128, "block_n": block_n, "stages": stages, "consumers": 2}
        tile |= {"strategy": "split_k", "splits": splits, "blocks": blocks}
        tile["evict_first_b"] = number % 3 == 0
        with tk.emulate(policy, seed=n, config=tile) as run:
            out = tk.gemm(a, b, bias=bias)
        assert torch.equal(out, expected.to(dtype)), (m, n, k, splits)
        itself = m >= 128 and n % 8 == 0
        assert run.kernels[0]["splits"] == (splits if itself else 1)
        assert ("split_k" in run.kernels[0]["kernel"]) == itself


@pytest.mark.parametrize("tile", [(128, 7), (192, 5)])
@pytest.mark.parametrize("offset", [0, 2])
def test_gemm_stream_k_beside_others(offset, tile):
    """Into a part of rows, from a multiple of 16 bytes on or not; reruns have the same bits."""
    a, b = torch.randn(200, 1928).bfloat16(), torch.randn(1928, 200).bfloat16()
    config = {"block_m": 128, "block_n": tile[0], "stages": tile[1], "consumers": 2}
    config |= {"strategy": "split_k", "splits": 3, "blocks": 6}
    runs = []
    for policy in POLICIES:
        around = torch.full((200, 208), math.nan, dtype=torch.bfloat16)
        with tk.emulate(policy, seed=offset, config=config):
            tk.gemm(a, b, out=around[:, offset : offset + 200])
        assert around[:, :offset].isnan().all()
        assert around[:, offset + 200 :].isnan().all()
        runs.append(around[:, offset : offset + 200])
    assert all(torch.equal(x, runs[0]) for x in runs[1:])
    torch.testing.assert_close(runs[0].float(), a.float() @ b.float(), rtol=1e-2, atol=1e-2)


# ---- fp8 tiles whose width fits the problem ----

E4M3 = torch.float8_e4m3fn

# Columns of a tile; rows, columns, k, and how many blocks divide k.
FP8_SPLIT_K = [
    (96, (128, 136, 640, 2)),
    (96, (65, 100, 1552, 8)),
    (112, (200, 203, 400, 3)),
    (128, (70, 250, 1104, 4)),
    (136, (130, 300, 1040, 2)),
    (144, (100, 288, 16, 1)),
    (160, (257, 24, 272, 1)),
    (176, (129, 180, 400, 4)),
    (192, (128, 200, 272, 3)),
    (224, (140, 456, 1168, 1)),
    (224, (130, 7, 528, 2)),
]


def split_k_config(block_n: int, splits: int) -> dict[str, object]:
    config = {"block_m": 128, "block_n": block_n, "block_k": 128, "swap_ab": False}
    config |= {"strategy": "split_k", "stages": 0, "buffers": 0, "consumers": 2}
    return config | {"splits": splits}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("accurate", [False, True])
def test_fp8_gemm_split_k(accurate, policy):
    """Every width, one and several blocks for a tile, ragged rows, columns and k, scales of rows
    and of tensors, both types of outputs."""
    for number, (block_n, (m, n, k, splits)) in enumerate(FP8_SPLIT_K):
        a, b = torch.randint(-2, 3, (m, k)).float(), torch.randint(-2, 3, (k, n)).float()
        shapes = ((m, 1), (1, n)) if number % 2 else ((1, 1), (1, n) if number % 4 else (1, 1))
        scales = [2.0 ** torch.randint(-1, 2, shape).float() for shape in shapes]
        bias = torch.randint(-3, 4, (n,)).to(torch.bfloat16) if number % 3 else None
        options = {"accurate": accurate, "bias": bias, "out_dtype": DTYPES[number // 2 % 2]}
        right = b.t().contiguous().t().to(E4M3)
        with tk.emulate(policy, seed=n, config=split_k_config(block_n, splits)) as run:
            out = tk.fp8_gemm(a.to(E4M3), right, *scales, **options)
        assert torch.equal(out, tk.reference.fp8_gemm(a, b, *scales, **options)), (m, n, k, splits)
        kind = "promoted" if accurate else "fast"
        assert run.kernels[0]["kernel"] == f"e4m3_e4m3_split_k_{kind}"
        assert (run.kernels[0]["block_n"], run.kernels[0]["splits"]) == (block_n, splits)


@pytest.mark.parametrize("accurate", [False, True])
@pytest.mark.parametrize("options", [{"activation": "relu"}, {"out_dtype": torch.float32}], ids=str)
def test_what_fp8_split_k_leaves_to_others(options, accurate):
    a, b = torch.randint(-2, 3, (130, 400)).float(), torch.randint(-2, 3, (400, 200)).float()
    scales, options = (torch.ones(()), torch.ones(())), options | {"accurate": accurate}
    right = b.t().contiguous().t().to(E4M3)
    with tk.emulate("late_mma", seed=1, config=split_k_config(112, 2)):
        out = tk.fp8_gemm(a.to(E4M3), right, *scales, **options)
    assert torch.equal(out, tk.reference.fp8_gemm(a, b, *scales, **options))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("splits", [1, 2, 4, 8])
def test_rows_of_split_k_tiles_are_of_one_tile(splits, policy):
    """Large parts of k that cancel show in which order they are added. That may depend on a row's
    place among the 16 of a warp, and not on which tile stores it last."""
    a, b = torch.zeros(200, 1024), torch.zeros(1024, 100)
    a[:, :256], a[:, 256], a[:, 512:768] = 448, 1, -448
    b[:] = 448
    b[256:512] = 1
    left, right = a.to(E4M3), b.t().contiguous().to(E4M3).t()
    options = {"bias": torch.full((100,), 3.0, dtype=torch.bfloat16), "accurate": True}
    with tk.emulate(policy, seed=splits, config=split_k_config(96, splits)):
        out = tk.fp8_gemm(left, right, torch.ones(()), torch.ones(()), **options)
    assert torch.equal(out[16:], out[:-16])
    # The small part is lost, or not.
    assert set(out.unique().tolist()) <= {3.0, 4.0}


@pytest.mark.parametrize("accurate", [False, True])
def test_reruns_of_fp8_split_k(accurate):
    """The same bits, in whatever order blocks arrive."""
    a, b = torch.randn(130, 1100).to(E4M3), torch.randn(100, 1100).to(E4M3).t()
    scales = torch.rand(130, 1), torch.rand(1, 100)
    runs = []
    for policy, seed in itertools.product(POLICIES, range(2)):
        with tk.emulate(policy, seed=seed, config=split_k_config(96, 4)):
            runs.append(tk.fp8_gemm(a, b, *scales, accurate=accurate))
    assert all(torch.equal(run, runs[0]) for run in runs)


@pytest.mark.parametrize(
    ("m", "n", "k", "width", "splits"),
    [
        (512, 2112, 7168, 136, 2),
        (1024, 2112, 7168, 136, 1),
        (256, 2112, 7168, 96, 2),
        (128, 2112, 7168, 96, 4),
        (128, 512, 16384, 96, 8),
        (512, 7168, 16384, 224, 1),
        (256, 8192, 8192, 128, 1),
    ],
)
def test_fp8_gemm_fits_few_tiles(m, n, k, width, splits):
    """All tiles at work at a time; what the kernel does not compute is left to others."""
    problem = {"m": m, "n": n, "k": k, "a_dtype": "e4m3", "b_dtype": "e4m3", "out_dtype": "bf16"}
    for accurate in (False, True):
        chosen = _C.choose("fp8_gemm", problem | {"accurate": accurate}, H200)
        found = (chosen["strategy"], chosen["block_n"], chosen["splits"])
        assert found == ("split_k", width, splits)
        assert chosen["blocks"] == -(-m // 128) * -(-n // width) * splits <= H200.sm_count
    others = {
        "activated": True,
        "blockwise": True,
        "out_dtype": "fp32",
        "b_dtype": "e5m2",
        "m": 16384,
    }
    for name, value in others.items():
        assert _C.choose("fp8_gemm", problem | {name: value}, H200)["strategy"] != "split_k", name
    read = {"m": 128, "n": 28672, "k": 8192}  # from memory, for as long in any tiles
    assert _C.choose("fp8_gemm", problem | read, H200)["strategy"] != "split_k"


# ---- every kernel of the registry, by its name ----


def named(op: str, pattern: str) -> list[re.Match[str]]:
    found = [re.fullmatch(pattern, k["name"]) for k in _C.kernels() if k["op"] == op]
    return [match for match in found if match is not None]


def by_name(match: re.Match[str]) -> str:
    return match[0]


@pytest.mark.parametrize(
    "name", named("gemm", r"(bf16|fp16)_([nt])([nt])_(\d+)x(\d+)_fused"), ids=by_name
)
def test_every_fused_kernel(name):
    """Several tiles per block, ragged sizes; with a residual, and an aux output."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name[1]]
    tile = int(name[4]), int(name[5])
    stages, consumers = SHAPES[tile]
    config = {"block_m": tile[0], "block_n": tile[1], "stages": stages, "consumers": consumers}
    config |= {"block_k": 64, "fused": True, "swap_ab": False, "splits": 1}
    a = torch.randint(-2, 3, (200, 136)).to(dtype)
    b = torch.randint(-2, 3, (136, 264)).to(dtype)
    bias, residual = integers(264, dtype=dtype), integers(200, 264, dtype=dtype)
    z = a.float() @ b.float() + bias.float()
    left = a.t().contiguous().t() if name[2] == "t" else a
    right = b if name[3] == "n" else b.t().contiguous().t()
    left.requires_grad_()
    with tk.emulate("late_mma", seed=tile[1], config=config, sm_count=2) as run:
        out = tk.gemm(left, right, bias=bias, residual=residual, activation="relu", beta=2.0)
    assert torch.equal(out.float(), (z.relu() + 2 * residual.float()).to(dtype).float())
    assert run.kernels[0]["kernel"] == name[0]


@pytest.mark.parametrize("out_dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ["relu", "geglu"])
def test_values_kept_in_rows_of_odd_length(activation, out_dtype):
    """What the fused epilogue stores for the gradient lies one element off every second row; with
    a gate, the last column of the gates has a neighbour that is none."""
    dtype = torch.float16 if out_dtype == torch.float16 else torch.bfloat16
    config = {"block_m": 64, "block_n": 128, "stages": 8, "consumers": 1, "block_k": 64}
    config |= {"fused": True, "swap_ab": False, "splits": 1}
    a = torch.randint(-2, 3, (70, 40)).to(dtype)
    b = torch.randint(-2, 3, (40, 131 if activation == "relu" else 262)).to(dtype)
    residual = integers(70, 131, dtype=out_dtype)
    options = {"residual": residual, "activation": activation, "out_dtype": out_dtype}
    saved: list[torch.Tensor] = []
    with (
        tk.emulate("late_mma", seed=1, config=config, sm_count=2) as run,
        torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x),
    ):
        out = tk.gemm(a.clone().requires_grad_(), b, **options)
    assert run.kernels[0]["kernel"].endswith("_64x128_fused")
    z = a.float() @ b.float()
    assert any(torch.equal(x, z.to(out_dtype)) for x in saved if x.shape == z.shape)
    assert activation != "relu" or torch.equal(out, (z.relu() + residual).to(out_dtype))


FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@pytest.mark.parametrize(
    "name",
    named("fp8_gemm", r"(e\dm\d)_(e\dm\d)_(fast|promoted|1d1d|swap_ab)_(\d+)x(\d+)"),
    ids=by_name,
)
def test_every_fp8_kernel(name):
    """Every pair of formats in every tile, several tiles per block, ragged sizes."""
    block_m, block_n, kind = int(name[4]), int(name[5]), name[3]
    fields = next(k["fields"] for k in _C.kernels() if k["name"] == name[0])
    m, n, k = (block_m - 3, 200, 1040) if kind == "swap_ab" else (200, 400, 272)
    config = {**fields, "splits": 1, "blocks": 2}
    a, b = torch.randint(-2, 3, (m, k)).float(), torch.randint(-2, 3, (k, n)).float()
    blocks = -(-k // 128)
    shapes = ((m, blocks), (blocks, n)) if kind == "1d1d" else ((m, 1), (1, n))
    scales = [2.0 ** torch.randint(-1, 2, shape).float() for shape in shapes]
    if kind == "1d1d":
        scales[0] = scales[0].t().contiguous().t()
    right = b.t().contiguous().t().to(FP8[name[2]])
    options = {"accurate": kind != "fast", "out_dtype": torch.float32}
    with tk.emulate("late_mma", seed=block_n, config=config) as run:
        out = tk.fp8_gemm(a.to(FP8[name[1]]), right, *scales, **options)
    assert torch.equal(out, tk.reference.fp8_gemm(a, b, *scales, **options))
    assert run.kernels[0]["kernel"] == name[0]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("granularity", ["tensor", "given", "row", "1x128", "128x128"])
def test_every_pass_of_the_quantiser(granularity, transposed, dtype):
    """Each type of input in each pass, the two that find magnitudes included."""
    x = torch.randn(130, 200).to(dtype)
    options = {"transposed": transposed}
    if granularity == "given":
        granularity, options["scale"] = "tensor", torch.tensor(0.03)
    with tk.emulate("late_mma", seed=1):
        found = tk.fp8_quantize(x, granularity, **options)
    expected = tk.reference.fp8_quantize(x, granularity, **options)
    for y, e in zip(found, expected, strict=True):
        assert torch.equal(y.float(), e.float())


@pytest.mark.parametrize("pair", [("e4m3", "e4m3"), ("e5m2", "e4m3")], ids=str)
def test_transposing_pass(pair):
    """Of operands whose k is not contiguous, both of them."""
    a, b = torch.randint(-2, 3, (70, 150)).float(), torch.randint(-2, 3, (150, 90)).float()
    one = torch.ones(1, 1)
    left = a.t().contiguous().to(FP8[pair[0]]).t()
    with tk.emulate("late_mma", seed=1):
        out = tk.fp8_gemm(left, b.to(FP8[pair[1]]), one, one, out_dtype=torch.float32)
    assert torch.equal(out, a @ b)
