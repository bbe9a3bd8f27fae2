"""The emulator: every kernel's every configuration on it. test_emulator_defects.py has what it
must find."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import thunderkittens as tk
from thunderkittens import _C, emulation

if emulation.problem is not None:
    pytest.skip(emulation.problem, allow_module_level=True)

POLICIES = emulation.POLICIES
DTYPES = (torch.bfloat16, torch.float16)
HERE = Path(__file__).resolve().parent


def integers(*shape: int, dtype: torch.dtype, limit: int = 4) -> torch.Tensor:
    return torch.randint(-limit, limit + 1, shape).to(dtype)


# ---- gemm; kernels for one tile per block have files of their own, test_gemm_*.py ----

OTHERS = "portable|swap_ab|fused|split_k|align_rows|_cluster|short_k|64x64_single_wave|runtime"
TILE = ("block_m", "block_n", "stages", "consumers")
TILES = sorted(
    {
        tuple(int(k["fields"][name]) for name in TILE)
        for k in _C.kernels()
        if k["op"] == "gemm" and not re.search(OTHERS, k["name"])
    }
)


def tile_config(tile: tuple[int, ...]) -> dict[str, int]:
    """The numbers of a tile under the names of the configuration's fields, without what other
    kernels have."""
    others = {"cluster_tile": False, "swap_ab": False}
    return dict(zip(TILE, tile, strict=True)) | others


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t[0]}x{t[1]}")
def test_gemm_is_exact_on_integers(tile, dtype, policy):
    """Every layout of the operands, ragged sizes, several tiles per block, either way out."""
    for m, n, k in ((200, 264, 200), (65, 40, 24)):
        for a_m_major in (False, True):
            for b_n_major in (False, True):
                out_dtype = torch.float32 if a_m_major == (m == 200) else dtype
                a = integers(m, k, dtype=dtype)
                b = integers(k, n, dtype=dtype)
                if a_m_major:
                    a = a.t().contiguous().t()
                if not b_n_major:
                    b = b.t().contiguous().t()
                expected = (a.float() @ b.float()).to(out_dtype)
                config = tile_config(tile) | {"evict_first_b": b_n_major}
                with tk.emulate(policy, seed=m, config=config, sm_count=2) as run:
                    out = tk.gemm(a, b, out_dtype=out_dtype)
                assert torch.equal(out, expected), (m, n, k, a_m_major, b_n_major)
                chosen = run.kernels[0]
                assert (chosen["block_m"], chosen["block_n"]) == tile[:2]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", [t for t in TILES if t[:2] == (128, 256)], ids=str)
def test_gemm_of_tiles_of_two_widths(tile, dtype, policy):
    """Rows of tiles with and without one more, either way out, sums that leave late and at once."""
    columns, n = 2, 496
    choice = {"columns": columns, "extra_rows": 2, "raster_group": 1, "blocks": 2}
    for number, k in enumerate((328, 72)):
        a, b = integers(330, k, dtype=dtype), integers(k, n, dtype=dtype)
        bias = integers(n, dtype=dtype) if number else None
        expected = a.float() @ b.float() + (bias.float() if number else 0)
        for b_n_major in (False, True):
            right = b if b_n_major else b.t().contiguous().t()
            with tk.emulate(policy, seed=k, config=tile_config(tile) | choice) as run:
                out = tk.gemm(a, right, bias=bias)
            assert torch.equal(out, expected.to(dtype)), (k, b_n_major)
            assert run.kernels[0]["columns"] == columns


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemm_with_epilogue_warps(dtype, policy):
    """Integers that either dtype holds: every layout, ragged sizes, a batch, one tile and several
    per block, with and without a residual and an aux output."""
    config = {"block_m": 128, "block_n": 256, "stages": 4, "consumers": 2, "fused": True}
    shapes = ((1, 200, 264, 250), (1, 130, 776, 320), (3, 70, 40, 264), (1, 65, 520, 700))
    for number, (batch, m, n, k) in enumerate(shapes):
        a_m_major, b_n_major = number % 2 == 1, number < 2
        a = integers(batch, m, k, dtype=dtype, limit=1)
        b = integers(batch, k, n, dtype=dtype, limit=1)
        if a_m_major:
            a = a.mT.contiguous().mT
        if not b_n_major:
            b = b.mT.contiguous().mT
        bias, residual = integers(n, dtype=dtype), integers(batch, m, n, dtype=dtype)
        options = {"bias": bias, "activation": "relu", "beta": 2.0}
        if number != 1:
            options["residual"] = residual
        if batch == 1:
            a, b = a[0], b[0]
            options = {x: y[0] if x == "residual" else y for x, y in options.items()}
        a.requires_grad_(number > 0)
        z = a.detach().float() @ b.float() + bias.float()
        expected = z.relu() + 2 * options["residual"].float() if number != 1 else z.relu()
        with tk.emulate(policy, seed=m, config=config | {"store_interval": 1}, sm_count=2) as run:
            out = tk.gemm(a, b, **options)
        assert run.kernels[0]["store_interval"] == 1
        assert torch.equal(out.float(), expected)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [None, "blocked", "interleaved"])
def test_gemm_fused_in_tiles_of_two_widths(layout, dtype, policy):
    """By epilogue warps or by the consumers, with an aux output or not, in either order of b: bit
    for bit what tiles of one width have, and exact without a gate."""
    config = {"block_m": 128, "block_n": 256, "stages": 4, "consumers": 2, "fused": True}
    config |= {"raster_group": 1, "blocks": 2}
    m, n = 260, 496
    for number, (k, spacing) in enumerate(((328, 1), (264, 1), (72, 0))):
        a, b = integers(m, k, dtype=dtype, limit=1), integers(k, n, dtype=dtype, limit=1)
        bias = integers(n, dtype=dtype)
        z = a.float() @ b.float() + bias.float()
        gate, value = (z[:, ::2], z[:, 1::2]) if layout == "interleaved" else z.split(n // 2, dim=1)
        expected = torch.nn.functional.silu(gate) * value if layout else z.relu()
        residual = integers(*expected.shape, dtype=dtype) if number else None
        if number:
            expected = expected + residual.float()
        a.requires_grad_(number == 0)
        right = b if number % 2 else b.t().contiguous().t()
        options = {"bias": bias, "residual": residual, "activation": "swiglu" if layout else "relu"}
        if layout:
            options["gate_layout"] = layout
        results = []
        for widths in ({"columns": 0, "extra_rows": 0}, {"columns": 2, "extra_rows": 1}):
            forced = config | widths | {"store_interval": spacing}
            with tk.emulate(policy, seed=k, config=forced, sm_count=2):
                results.append(tk.gemm(a, right, **options).detach())
        assert torch.equal(*results), (k, spacing)
        if layout:
            torch.testing.assert_close(results[0].float(), expected, rtol=2**-6, atol=2**-6)
        else:
            assert torch.equal(results[0], expected.to(dtype)), (k, spacing)


@pytest.mark.parametrize("n", [136, 37, 38])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gemm_with_bias_and_batch(n, out_dtype):
    """Columns that TMA can store and those that it cannot."""
    a = integers(3, 70, 72, dtype=torch.float16)
    b = integers(3, 72, n, dtype=torch.float16)
    bias = integers(n, dtype=torch.float16)
    with tk.emulate("late_mma"):
        out = tk.gemm(a, b, bias=bias, out_dtype=out_dtype)
    assert torch.equal(out, (a.float() @ b.float() + bias.float()).to(out_dtype))


def test_gemm_on_random_inputs_is_as_exact_as_the_hardware():
    """Sums are cut, not rounded, at every step: within twice eps * sum |a| |b|."""
    a, b = torch.randn(130, 300, dtype=torch.bfloat16), torch.randn(300, 130, dtype=torch.bfloat16)
    with tk.emulate():
        out = tk.gemm(a, b, out_dtype=torch.float32)
    error = (out.double() - a.double() @ b.double()).abs()
    assert (error <= 2**-22 * (a.double().abs() @ b.double().abs())).all()


def test_gradients_run_emulated_kernels():
    a = torch.randn(40, 64, dtype=torch.bfloat16, requires_grad=True)
    b = torch.randn(64, 48, dtype=torch.bfloat16, requires_grad=True)
    with tk.emulate() as run:
        tk.gemm(a, b).sum().backward()
    assert len(run.kernels) == 3
    torch.testing.assert_close(a.grad, b.sum(1).expand(40, 64), atol=0.25, rtol=0.02)


# ---- attention; its kernels are in test_attention_kernels.py ----


def test_attention_scales():
    q, k, v = (torch.randn(1, 1, 64, 64, dtype=torch.bfloat16) for _ in range(3))
    for scale in (-0.1, 0.0, 0.5):
        with tk.emulate():
            out = tk.attention(q, k, v, scale=scale)
        torch.testing.assert_close(
            out, tk.reference.attention(q, k, v, scale=scale), atol=0.02, rtol=0.02
        )


# ---- fp8 ----

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_TILE = ("block_m", "block_n", "block_k", "stages", "buffers")
FP8_TILES = sorted(
    {
        (*(int(k["fields"][name]) for name in FP8_TILE), k["name"].split("_")[2])
        for k in _C.kernels()
        if k["op"] == "fp8_gemm" and not re.search("swap_ab|split_k|portable", k["name"])
    }
)


def fp8_operands(m, n, k, kind):
    """Integers, scales that round nothing away, and the product."""
    a, b = torch.randint(-2, 3, (m, k)).float(), torch.randint(-2, 3, (k, n)).float()
    k_blocks, n_blocks = -(-k // 128), -(-n // 128)
    shape_a = {"tensor": (1, 1), "row": (m, 1)}.get(kind, (k_blocks, m))
    shape_b = {
        "tensor": (1, 1),
        "row": (1, n),
        "block": (k_blocks, n_blocks),
        "fine": (k_blocks, n),
    }
    scale_a, scale_b = (
        2.0 ** torch.randint(-1, 2, shape).float() for shape in (shape_a, shape_b[kind])
    )
    if kind in ("block", "fine"):
        scale_a = scale_a.t()
    expected = tk.reference.fp8_gemm(a, b, scale_a, scale_b, out_dtype=torch.float32)
    return a, b, scale_a, scale_b, expected


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tile", FP8_TILES, ids=lambda t: f"{t[-1]}{t[0]}x{t[1]}")
def test_fp8_gemm_is_exact_on_integers(tile, policy):
    """Every tile with every kind of scales that it takes, ragged sizes, several tiles per block."""
    block_n, sums = tile[1], tile[-1]
    config = dict(zip(FP8_TILE, tile, strict=False)) | {"consumers": 2, "swap_ab": False}
    config |= {"splits": 1, "blockwise_only": sums == "blockwise", "cluster_m": 1, "cluster_n": 1}
    config["sums"] = {"fast": 0, "1d1d": 2}.get(sums, 1)
    promoted = ["tensor", "row", "block"]
    kinds = {"fast": ["row"], "promoted": promoted, "1d1d": ["fine"], "blockwise": ["block"]}[sums]
    for number, kind in enumerate(kinds):
        if kind == "block" and block_n % 64:
            continue
        # Of rows also as fp32, which leaves another way.
        outputs = [torch.bfloat16, torch.float32] if kind == "row" else [torch.bfloat16]
        sizes = [(200, 400, 272), (65, 40, 144)]
        if kind in ("block", "fine"):
            sizes.append((65, 136, 784))  # more than four blocks of scales, and a part of one
        for (m, n, k), out_dtype in itertools.product(sizes, outputs):
            a, b, scale_a, scale_b, expected = fp8_operands(m, n, k, kind)
            dtypes = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)][number]
            with tk.emulate(policy, seed=m, config=config | {"blocks": 2}) as run:
                out = tk.fp8_gemm(
                    a.to(dtypes[0]),
                    b.t().contiguous().t().to(dtypes[1]),
                    scale_a,
                    scale_b,
                    out_dtype=out_dtype,
                    accurate=sums != "fast",
                )
            assert torch.equal(out, expected.to(out.dtype)), (kind, m, n, k, out_dtype)
            assert run.kernels[0]["block_n"] == block_n


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(
    "tile", [t for t in FP8_TILES if t[1] in (176, 256) and t[-1] == "fast"], ids=str
)
def test_fp8_gemm_of_fast_tiles_of_two_widths(tile, cluster, policy):
    """Rows of tiles with and without one more, either way out, sums that leave late and at once."""
    columns, n = (2, 488) if tile[1] == 256 else (3, 504)
    config = dict(zip(FP8_TILE, tile, strict=False)) | {"consumers": 2, "swap_ab": False}
    config |= {"columns": columns, "extra_rows": 1, "raster_group": 1, "splits": 1, "sums": 0}
    config |= {"cluster_m": cluster, "cluster_n": 1, "blocks": 2 * cluster}
    for m, k, dtypes in ((330, 656, (E4M3, E5M2)), (200, 144, (E5M2, E4M3))):
        a, b, scale_a, scale_b, expected = fp8_operands(m, n, k, "row")
        a, b = a.to(dtypes[0]), b.t().contiguous().t().to(dtypes[1])
        bias = torch.randint(-3, 4, (n,)).bfloat16()
        with tk.emulate(policy, seed=k, config=config) as run:
            out = tk.fp8_gemm(a, b, scale_a, scale_b, bias=bias, accurate=False)
        assert torch.equal(out, (expected + bias).bfloat16()), (m, k)
        assert (run.kernels[0]["columns"], run.kernels[0]["block_n"]) == (columns, tile[1])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "tile", [t for t in FP8_TILES if (t[-1], t[1]) == ("promoted", 256)], ids=lambda t: t[-1]
)
def test_fp8_gemm_of_tiles_of_two_widths(tile, policy):
    """Rows of tiles with and without one more, of one step and of several, all kinds of scales;
    those of blocks, and fp32 values, have one width. Scales alone, of tensors or rows, have a
    kernel of their own. Blocks have several of the eight tiles, one, or none."""
    config = dict(zip(FP8_TILE, tile, strict=False)) | {"consumers": 2, "swap_ab": False}
    config |= {"columns": 2, "extra_rows": 2, "raster_group": 1, "splits": 1, "sums": 1}
    config |= {"blockwise_only": False, "cluster_m": 1, "cluster_n": 1}
    half, full = torch.bfloat16, torch.float32
    cases = [("tensor", 272, half), ("row", 528, half), ("row", 100, torch.float16)]
    cases += [("row", 656, half), ("tensor", 100, half), ("block", 272, half), ("row", 272, full)]
    few = [("row", 264, half, 9), ("tensor", 100, torch.float16, 9)]
    for kind, k, dtype, blocks in [*((*case, 2) for case in cases), *few]:
        a, b, scale_a, scale_b, expected = fp8_operands(330, 496, k, kind)
        b = b.t().contiguous().t()
        bias = integers(496, dtype=half) if kind == "row" and k in (272, 528) else None
        if bias is not None:
            expected = expected + bias.float()
        with tk.emulate(policy, seed=k, config=config | {"blocks": blocks}) as run:
            out = tk.fp8_gemm(a.to(E4M3), b.to(E4M3), scale_a, scale_b, bias=bias, out_dtype=dtype)
        assert torch.equal(out, expected.to(dtype)), (kind, k, dtype)
        name, whole = run.kernels[0]["kernel"], kind != "block" and bias is None and dtype != full
        assert (run.kernels[0]["columns"], name.endswith("_rowwise")) == (2, whole)


# Ways to add up a tile, with scales for each: clusters share the loads of all.
SUMS = [("fast", "row"), ("promoted", "row"), ("promoted", "block"), ("blockwise", "block")]
SUMS += [("1d1d", "fine")]
CLUSTERS = [*(((2, 2), policy) for policy in POLICIES), ((2, 1), "late_mma"), ((1, 2), "on_wait")]


@pytest.mark.parametrize(("cluster", "policy"), CLUSTERS, ids=str)
@pytest.mark.parametrize(("sums", "kind"), SUMS)
def test_fp8_gemm_in_clusters(sums, kind, cluster, policy):
    """More steps than stages, clusters whose last blocks have no rows or columns of their own."""
    tile = max(t for t in FP8_TILES if t[-1] == sums)
    config = dict(zip(FP8_TILE, tile, strict=False)) | {"consumers": 2, "swap_ab": False}
    config |= {"splits": 1, "blockwise_only": sums == "blockwise", "cluster_m": 1, "cluster_n": 1}
    config["sums"] = {"fast": 0, "1d1d": 2}.get(sums, 1)
    config |= {"cluster_m": cluster[0], "cluster_n": cluster[1]}
    config["blocks"] = cluster[0] * cluster[1]
    a, b, scale_a, scale_b, expected = fp8_operands(300, 520, 720, kind)
    a, b = a.to(E4M3), b.t().contiguous().t().to(E4M3)
    with tk.emulate(policy, seed=1, config=config) as run:
        out = tk.fp8_gemm(a, b, scale_a, scale_b, accurate=sums != "fast")
    assert torch.equal(out, expected.bfloat16())
    chosen = run.kernels[0]
    assert (chosen["cluster_m"], chosen["cluster_n"]) == cluster
    assert f"_{sums}_" in chosen["kernel"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("splits", "clusters"), [(1, 2), (2, 2), (4, 2), (2, 4), (3, 4)])
@pytest.mark.parametrize("m", [1, 17, 64])
def test_fp8_gemm_of_few_rows(m, splits, clusters, policy):
    """All kinds of scales, with and without a division of k, all ways out."""
    n, k = 200, 2200
    config = {"strategy": "swap_ab", "swap_ab": True, "block_n": 64, "block_k": 512}
    config |= {"buffers": 2, "consumers": 1, "splits": splits, "blocks": clusters * splits}
    config["block_m"], config["stages"] = {1: (16, 5), 17: (32, 4), 64: (64, 3)}[m]
    for number, kind in enumerate(("tensor", "row", "block", "fine")):
        a, b, scale_a, scale_b, expected = fp8_operands(m, n, k, kind)
        bias = torch.randint(-3, 4, (n,)).bfloat16() if number % 2 else None
        with tk.emulate(policy, seed=m, config=config) as run:
            out = tk.fp8_gemm(
                a.to(E5M2 if number == 1 else E4M3),
                b.t().contiguous().t().to(E4M3),
                scale_a,
                scale_b,
                bias=bias,
                activation="relu" if number == 3 else None,
            )
        if bias is not None:
            expected = expected + bias
        if number == 3:
            expected = expected.relu()
        assert torch.equal(out, expected.bfloat16()), kind
        assert run.kernels[0]["swap_ab"]


# ---- the emulator itself ----


def test_kernels_are_chosen_as_on_the_gpu():
    # At a multiple of 128 bytes, where a CPU's memory need not begin.
    memory = torch.randn(512 * 512 + 64, dtype=torch.bfloat16)
    a = memory[-memory.data_ptr() % 128 // 2 :][: 512 * 512].view(512, 512)
    device = _C.DeviceProperties(
        sm_count=132, shared_bytes_per_block=232448, l2_bytes=50 << 20, major=9, minor=0
    )
    problem = {"m": 512, "n": 512, "k": 512, "batch": 1, "dtype": "bf16", "out_dtype": "bf16"}
    problem |= {"a_m_major": False, "b_n_major": True}
    with tk.emulate() as run:
        tk.gemm(a, a)
    chosen = _C.choose("gemm", problem, device)
    assert chosen["strategy"] == "single_wave_64x64"
    assert run.kernels == [chosen]


def test_random_order_is_drawn_from_the_seed():
    a = torch.randn(70, 300, dtype=torch.bfloat16)
    results = []
    for seed in (1, 1, 2):
        with tk.emulate("random", seed):
            results.append(tk.gemm(a, a.t()))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("threads", [1, 4])
def test_clusters_on_several_host_threads(threads):
    a = integers(600, 64, dtype=torch.bfloat16)
    with tk.emulate(host_threads=threads):
        out = tk.gemm(a, a.t(), out_dtype=torch.float32)
    assert torch.equal(out, a.float() @ a.t().float())


def test_reference_outside_and_wrong_policies():
    a = torch.randn(16, 16, dtype=torch.bfloat16)
    with tk.emulate() as run:
        pass
    tk.gemm(a, a)
    assert run.kernels == []
    with pytest.raises(ValueError, match=r"tk\.emulate: policy is 'lazy'"), tk.emulate("lazy"):
        pass
    with pytest.raises(RuntimeError, match="forced"), tk.emulate(config={"nothing": 1}):
        tk.gemm(a, a)


def test_speed():
    """A limit for one core, of which the emulator takes about a thirtieth."""
    a = torch.randn(512, 512, dtype=torch.bfloat16)
    q = torch.randn(1, 2, 512, 64, dtype=torch.bfloat16)
    for call in (lambda: tk.gemm(a, a), lambda: tk.attention(q, q, q)):
        with tk.emulate():
            start = time.perf_counter()
            call()
            assert time.perf_counter() - start < 5


def test_numpy_without_torch():
    """The module runs kernels on NumPy arrays in a process that has no torch."""
    module = emulation._module
    assert module is not None
    program = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_emulator", {module.__file__!r})
emulator = importlib.util.module_from_spec(spec)
spec.loader.exec_module(emulator)
import numpy as np
a = np.arange(64 * 32, dtype=np.float16).reshape(64, 32) % 5
out, chosen = emulator.run("gemm", {{"a": a, "b": a.T}}, {{"out_dtype": "fp32"}}, policy="eager")
assert np.array_equal(out["out"], a.astype(np.float32) @ a.T.astype(np.float32))
assert chosen["kernel"].startswith("fp16_")
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_headers_are_of_a_folder_that_has_all(tmp_path, monkeypatch):
    """pip has them in three packages, of which torch brings but one."""
    monkeypatch.setenv("THUNDERKITTENS_CUDA_HOME", str(tmp_path))
    include = tmp_path / "include"
    for name in ("cuda_fp8.h", "crt/host_config.h", "nv/target"):
        assert emulation.cuda_headers() != include
        (include / name).parent.mkdir(parents=True, exist_ok=True)
        (include / name).touch()
    assert emulation.cuda_headers() == include


@pytest.mark.timeout(300)
def test_the_example_runs():
    """Its kernel is compiled by the C++ compiler and runs under every policy."""
    if emulation.cuda_headers() is None:
        pytest.skip(emulation.NO_HEADERS)
    example = HERE.parent / "examples/write_a_kernel/run.py"
    result = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    for policy in POLICIES:
        assert f"emulator, {policy}: right" in result.stdout


# ---- fidelity: the same kernels on the GPU ----

FIDELITY = [(64, 64, 64), (200, 264, 136), (257, 512, 1000), (1024, 1024, 512), (1500, 2048, 256)]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", FIDELITY, ids=str)
def test_gemm_is_that_of_the_gpu(shape, dtype, layout):
    """Bit for bit: integers, whose sums are exact, and random numbers."""
    m, n, k = shape

    def laid_out(x: torch.Tensor, order: str) -> torch.Tensor:
        return x if order == "n" else x.t().contiguous().t()

    for fill in (integers, lambda *size, dtype: torch.randn(size).to(dtype)):
        a = laid_out(fill(m, k, dtype=dtype), layout[0])
        b = laid_out(fill(k, n, dtype=dtype), layout[1])
        on_gpu = tk.gemm(a.cuda(), b.cuda(), out_dtype=torch.float32).cpu()
        with tk.emulate(host_threads=4, check_order=False):
            emulated = tk.gemm(a, b, out_dtype=torch.float32)
        assert torch.equal(on_gpu, emulated)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True, "upper_left"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_attention_is_that_of_the_gpu(dim, dtype, causal):
    for length_q, length_k in ((300, 300), (129, 700), (513, 190)):
        q = torch.randn(2, 4, length_q, dim, dtype=dtype)
        k, v = (torch.randn(2, 2, length_k, dim, dtype=dtype) for _ in range(2))
        options = {"causal": causal, "return_lse": True}
        on_gpu = tk.attention(q.cuda(), k.cuda(), v.cuda(), **options)
        with tk.emulate(host_threads=4, check_order=False):
            emulated = tk.attention(q, k, v, **options)
        # exp2 differs in its last bits, which rounding P and the output to 16 bits may show.
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(on_gpu[0].cpu(), emulated[0], atol=2 * eps, rtol=2 * eps)
        torch.testing.assert_close(on_gpu[1].cpu(), emulated[1], atol=1e-5, rtol=1e-5)
