"""The portable kernels of `tk.fp8_gemm`, by their names, on the emulator."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from helpers.policies import POLICIES
from test_fp8_gemm import E4M3, E5M2, FP32, blocks, place, powers
from test_gemm_kernels import by_name, named
from test_portable import GPUS, device
from thunderkittens import _C, emulation

if emulation.problem is not None:
    pytest.skip(emulation.problem, allow_module_level=True)

FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
NAMES = r"(e4m3|e5m2)_(e4m3|e5m2)(_blockwise)?_(\d+)x(\d+)_portable"


def tile_of(name) -> dict[str, object]:
    """Fields of a choice that force a tile."""
    return {"strategy": "portable", "block_m": int(name[4]), "block_n": int(name[5])}


def scales(kind: str, m: int, n: int, k: int) -> list[torch.Tensor]:
    shapes = {
        "row": ((m, 1), (1, n)),
        "block": ((m, blocks(k)), (blocks(k), blocks(n))),
        "fine": ((m, blocks(k)), (blocks(k), n)),
    }[kind]
    return [powers(shape, "cpu") for shape in shapes]


def of_integers(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-2, 3, (rows, columns)).to(dtype)


@pytest.mark.parametrize("name", named("fp8_gemm", NAMES), ids=by_name)
def test_every_kernel(name):
    """Tiles that are cut off at each side; as many stages of k as the ring has, fewer and more; an
    odd k, behind whose end there is NaN; under policies that the kernels share."""
    for i, (dm, dn, k) in enumerate(
        ((8, 16, 520), (-100, -98, 160), (-27, 13, 1281), (3, -1, 384))
    ):
        m, n = max(1, int(name[4]) + dm), max(1, int(name[5]) + dn)
        a, b = of_integers(m, k, FORMATS[name[1]]), of_integers(n, k, FORMATS[name[2]]).t()
        kinds = ("block", "fine") if name[3] else ("row",)
        scale = scales(kinds[i % len(kinds)], m, n, k)
        policy = POLICIES[i % len(POLICIES)]
        with tk.emulate(policy, seed=k, portable=True, config=tile_of(name)) as run:
            out = tk.fp8_gemm(place(a, "sliced"), b, *scale, out_dtype=FP32)
        expected = tk.reference.fp8_gemm(a, b, *scale, out_dtype=FP32)
        assert torch.equal(out, expected)
        assert run.kernels[0]["kernel"] == name[0]


@pytest.mark.parametrize("kind", ["row", "block", "fine"])
def test_nan_stays_in_its_row_and_column(kind):
    """Codes of NaN, which have to be looked for: in either operand, of either sign, beside a group
    of others."""
    m, n, k = 70, 140, 300
    for pair in ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)):
        a, b = of_integers(m, k, pair[0]), of_integers(n, k, pair[1])
        a.view(torch.uint8)[37, 299] = 0xFF
        b.view(torch.uint8)[[5, 139], [0, 130]] = 0x7F
        scale = scales(kind, m, n, k)
        with tk.emulate("late_mma", seed=1, portable=True):
            out = tk.fp8_gemm(a, b.t(), *scale, out_dtype=FP32)
        expected = tk.reference.fp8_gemm(a, b.t(), *scale, out_dtype=FP32)
        assert expected[37].isnan().all()
        assert expected[:, [5, 139]].isnan().all()
        assert torch.equal(out.nan_to_num(1e9), expected.nan_to_num(1e9))


@pytest.mark.parametrize("gpu", GPUS)
def test_the_choice(gpu):
    """A small tile for few, a large one for many; one of its own for block-wise scales."""

    def choice(m: int, n: int, k: int, **fields) -> dict[str, object]:
        problem = {"m": m, "n": n, "k": k, "groups": 1, "grouped": False, "activated": False}
        problem |= {"a_dtype": "e4m3", "b_dtype": "e4m3", "out_dtype": "bf16", "accurate": True}
        problem |= {"blockwise": False, "blockwise_1d1d": False} | fields
        return _C.choose("fp8_gemm", problem, device(gpu, portable_only=True))

    assert choice(8192, 8192, 8192)["block_m"] == 128
    assert choice(16, 4096, 4096)["block_m"] == 64
    assert choice(512, 512, 512)["sums"] != choice(512, 512, 512, blockwise=True)["sums"]
    assert {choice(m, m, m)["strategy"] for m in (1, 1000)} == {"portable"}


def test_scales_of_rows_that_are_no_powers():
    """Sums are multiplied once, by the product of both scales."""
    a, b = of_integers(40, 200, E4M3), of_integers(50, 200, E4M3)
    scale = (torch.rand(40, 1) + 0.1, torch.rand(1, 50) + 0.1)
    with tk.emulate("random", seed=1, portable=True):
        out = tk.fp8_gemm(a, b.t(), *scale, out_dtype=FP32)
    sums = a.float() @ b.float().t()
    assert torch.equal(out, sums * (scale[0] * scale[1]))
