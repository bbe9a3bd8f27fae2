"""The portable kernel of gemm, by its name, on the emulator: it runs where the kernels for Hopper
do not, or may not. Its choice of tiles is pure, so the GPUs need not be here."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import thunderkittens as tk
from helpers.numerics import accumulation_slack, assert_accurate
from helpers.policies import DTYPES, every_dtype_and_policy
from test_gemm_kernels import by_name, integers, named
from test_portable import GPUS, device
from thunderkittens import _C, emulation

if emulation.problem is not None:
    pytest.skip(emulation.problem, allow_module_level=True)

KERNELS = {k["name"]: k for k in _C.kernels() if k["op"] == "gemm" and k["arch"] == 80}
TILES = [(128, 256), (128, 128), (64, 128), (64, 64)]
FIELDS = ("strategy", "block_m", "block_n", "stages", "consumers")


def tile_of(block_m: int, block_n: int) -> dict[str, object]:
    """Fields of a choice that force a tile."""
    fields = KERNELS[f"bf16_nn_{block_m}x{block_n}_portable"]["fields"]
    return {name: fields[name] for name in FIELDS}


def stored(x: torch.Tensor, transposed: bool) -> torch.Tensor:
    return x.mT.contiguous().mT if transposed else x


@pytest.mark.parametrize(
    "name", named("gemm", r"(bf16|fp16)_([nt])([nt])_(\d+)x(\d+)_portable"), ids=by_name
)
def test_every_kernel(name):
    """Tiles that are cut off at each side, as many stages of k as the ring has, fewer and more."""
    dtype = DTYPES[name[1] == "fp16"]
    tile = int(name[4]), int(name[5])
    for batch, m, n, k in ((1, tile[0] + 8, tile[1] + 16, 264), (2, 13, 30, 8), (1, 5, 72, 640)):
        a, b = integers(batch, m, k, dtype=dtype), integers(batch, k, n, dtype=dtype)
        left, right = stored(a, name[2] == "t"), stored(b, name[3] == "t")
        with tk.emulate("random", seed=k, portable=True, config=tile_of(*tile)) as run:
            out = tk.gemm(left, right)
        assert torch.equal(out, (a.float() @ b.float()).to(dtype))
        assert run.kernels[0]["kernel"] == name[0]


@every_dtype_and_policy
@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t[0]}x{t[1]}")
def test_the_ring_goes_round(tile, dtype, policy):
    """Stages are filled anew while others are read: some that are whole, and the end of k, which is
    not; both ways to hand them over."""
    for k, layout in ((64, "nn"), (192, "tt"), (448, "nt"), (712, "tn")):
        a, b = integers(70, k, dtype=dtype), integers(k, 136, dtype=dtype)
        left, right = stored(a, layout[0] == "t"), stored(b, layout[1] == "t")
        with tk.emulate(policy, seed=k, portable=True, config=tile_of(*tile)) as run:
            out = tk.gemm(left, right)
        assert torch.equal(out, (a.float() @ b.float()).to(dtype))
        assert run.kernels[0]["kernel"].endswith(f"_{tile[0]}x{tile[1]}_portable")


@pytest.mark.parametrize("gate_layout", ["blocked", "interleaved"])
@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t[0]}x{t[1]}")
def test_gates(tile, gate_layout):
    """The columns of b that a tile has lie in two places, or are pairs: also where the output ends
    within the columns of a warp, and where its rows are aligned to nothing."""
    for columns, transposed, out_dtype in (
        (tile[1] // 2 + 40, False, torch.float32),
        (tile[1] // 2 + 21, True, torch.bfloat16),
        (16, False, torch.bfloat16),
        (3, True, torch.float16),
    ):
        a = integers(tile[0] + 3, 72, dtype=torch.bfloat16) / 8
        b = integers(72, 2 * columns, dtype=torch.bfloat16) / 8
        bias = integers(2 * columns, dtype=torch.bfloat16) / 4
        residual = torch.randn(tile[0] + 3, columns).to(out_dtype)
        options = {"bias": bias, "activation": "swiglu", "residual": residual, "beta": 0.5}
        options |= {"gate_layout": gate_layout, "out_dtype": out_dtype}
        with tk.emulate("late_mma", seed=columns, portable=True, config=tile_of(*tile)) as run:
            out = tk.gemm(a, stored(b, transposed), **options)
        assert run.kernels[0]["kernel"].endswith("_portable")
        exact = {k: x.double() if isinstance(x, torch.Tensor) else x for k, x in options.items()}
        exact["out_dtype"] = torch.float64
        expected = tk.reference.gemm(a.double(), b.double(), **exact)
        plain = tk.reference.gemm(a.float(), b.float(), **_floats(options)).to(out_dtype)
        assert_accurate(out, expected, plain, slack=8 * accumulation_slack(a, b).amax())


def _floats(options: dict[str, object]) -> dict[str, object]:
    found = {k: x.float() if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    return found | {"out_dtype": torch.float32}


@pytest.mark.parametrize("layout", list(itertools.product("nt", repeat=2)), ids="".join)
def test_operands_at_any_address(layout):
    """Whose rows begin at no multiples of 16 bytes: they are copied first, as on Hopper."""
    memory = integers(2, 90, 150, dtype=torch.bfloat16)
    a, b = memory[0, 1:71, 1:78], memory[1, 3:80, 5:138]
    expected = (a.float() @ b.float()).bfloat16()
    left = a if layout[0] == "n" else memory[0].mT.contiguous().mT[1:71, 1:78]
    right = b if layout[1] == "n" else memory[1].mT.contiguous().mT[3:80, 5:138]
    with tk.emulate("random", seed=1, portable=True) as run:
        out = tk.gemm(left, right)
    assert torch.equal(out, expected)
    assert run.kernels[0]["kernel"].endswith("_portable")


@pytest.mark.parametrize(
    "name", named("gemm_backward", "(bf16|fp16|fp32)_(blocked|interleaved)_portable"), ids=by_name
)
def test_the_gradient_through_a_gate(name):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name[1]]
    layout = 1 + ["blocked", "interleaved"].index(name[2])
    for columns in (64, 21):
        grad, z = integers(5, columns, dtype=dtype), integers(5, 2 * columns, dtype=dtype)
        with tk.emulate(portable=True) as run:
            out = torch.ops.thunderkittens.gemm_backward(grad, z, 4, layout)
        with tk.emulate():
            same = torch.ops.thunderkittens.gemm_backward(grad, z, 4, layout)
        assert torch.equal(out, same)
        assert run.kernels[0]["kernel"] == name[0]


def test_the_environment_decides(monkeypatch):
    a, b = integers(40, 64, dtype=torch.float16), integers(64, 48, dtype=torch.float16)
    monkeypatch.delenv("THUNDERKITTENS_PORTABLE", raising=False)
    with tk.emulate() as run:
        tk.gemm(a, b)
        monkeypatch.setenv("THUNDERKITTENS_PORTABLE", "1")
        tk.gemm(a, b)
        monkeypatch.setenv("THUNDERKITTENS_SHARED_BYTES", "101376")
        tk.gemm(a, b)
    names = [kernel["kernel"] for kernel in run.kernels]
    assert [name.endswith("_portable") for name in names] == [False, True, True]


# ---- the choice ----


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_has_tiles_that_fit(name):
    """In shared memory, of the problem's dtype and layout, and of the candidates."""
    gpu = device(name, portable_only=True)
    sizes = (1, 17, 300, 4096)
    for m, n, k, layout in itertools.product(sizes, sizes, (8, 4096), range(4)):
        problem = {"m": m, "n": n, "k": k, "dtype": "fp16"}
        problem |= {"a_m_major": layout % 2 == 1, "b_n_major": layout // 2 == 1}
        assert _C.unsupported("gemm", problem, gpu) == _C.no_code_for(gpu)
        found = _C.candidates("gemm", problem, gpu)
        assert found[0] == _C.choose("gemm", problem, gpu)
        for choice in found:
            kernel = KERNELS[choice["kernel"]]
            assert kernel["shared_bytes"] <= gpu.shared_bytes_per_block
            assert {"dtype": "fp16"}.items() <= choice.items()
            assert all(
                kernel["fields"][field] == problem[field] for field in problem if "major" in field
            )
            tiles = math.ceil(m / choice["block_m"]) * math.ceil(n / choice["block_n"])
            assert choice["blocks"] == tiles
            assert 1 <= choice["raster_group"] <= math.ceil(m / choice["block_m"])


def test_little_shared_memory_is_told():
    gpu = device("A10", portable_only=True, shared_bytes_per_block=48 << 10)
    reason = _C.unsupported("gemm", {"m": 64, "n": 64, "k": 64}, gpu)
    assert reason in (_C.no_code_for(gpu), "") or "bytes of shared memory per block" in reason
    if _C.no_code_for(gpu) == "":
        assert "this GPU has 49152" in reason


def test_large_products_have_large_tiles():
    """The largest where they fit, on GPUs of 99 KB the largest of those; small ones where there
    would be fewer tiles than multiprocessors."""
    problem = {"m": 8192, "n": 8192, "k": 8192}
    tiles = {name: _C.choose("gemm", problem, device(name, portable_only=True)) for name in GPUS}
    sizes = {name: (choice["block_m"], choice["block_n"]) for name, choice in tiles.items()}
    few_bytes = {name for name, (_, _, shared_bytes, _) in GPUS.items() if shared_bytes == 99 << 10}
    assert {sizes[name] for name in few_bytes} == {(128, 128)}
    assert {sizes[name] for name in ("A100", "H100", "B200")} <= {(128, 128), (128, 256)}
    few = _C.choose("gemm", problem | {"m": 64, "n": 512}, device("A100"))
    assert (few["block_m"], few["block_n"]) == (64, 64)
