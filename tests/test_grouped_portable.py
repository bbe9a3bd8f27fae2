"""The portable kernels of `tk.grouped_gemm`, by their names, on the emulator."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from helpers.policies import DTYPES, POLICIES
from test_gemm_kernels import by_name, integers, named
from thunderkittens import emulation

if emulation.problem is not None:
    pytest.skip(emulation.problem, allow_module_level=True)


def operands(order: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Whose groups a kernel of that order multiplies: of rows, or of k; ends lie anywhere."""
    ends = torch.tensor([70, 70, 75, 211], dtype=torch.int32)
    if order == "tn":
        return (
            integers(77, 219, dtype=dtype).mT.contiguous().mT,
            integers(219, 138, dtype=dtype),
            ends,
        )
    b = integers(4, 200, 138, dtype=dtype)
    right = b if order == "nn" else b.mT.contiguous().mT
    return integers(219, 200, dtype=dtype), right, ends


@pytest.mark.parametrize(
    "name", named("grouped_gemm", r"(bf16|fp16)_([nt])([nt])_(\d+)x(\d+)_portable"), ids=by_name
)
def test_every_kernel(name):
    """Groups that end within tiles, one without elements, and what is of no group."""
    a, b, ends = operands(name[2] + name[3], DTYPES[name[1] == "fp16"])
    expected = tk.reference.grouped_gemm(a, b, ends)
    tile = int(name[4])
    config = {"block_m": tile, "block_n": tile, "stages": 3 if tile == 128 else 4}
    for policy in POLICIES:
        with tk.emulate(policy, seed=tile, portable=True, config=config) as run:
            out = tk.grouped_gemm(a, b, ends)
        assert torch.equal(out, expected)
        assert run.kernels[0]["kernel"] == name[0]
