"""The kernels' machine code is the same whether the emulator is in the tree or not.

One instantiation of each family is compiled for sm_90a from this tree, and from a copy without the
emulated back end; both are disassembled. It needs nvcc and cuobjdump (a CUDA toolkit's, or those
that pip installed, Triton's cuobjdump included), and no GPU.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from helpers.toolkit import find_tool

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ["csrc/gemm/inst/bf16_64x64.cu", "csrc/attention/inst/forward_bf16_d64_64x64.cu"]
EMULATOR = ("emulated", "emulated.cpp", "emulated.h", "emulator")  # names of files and folders


def tool(name: str) -> str:
    found = find_tool(name)
    if found is None:
        pytest.skip(f"no {name}: set CUDA_HOME to a CUDA toolkit's folder")
    return found


@pytest.fixture(scope="module")
def without_emulator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("tree")
    for folder in ("kittens", "csrc"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns(*EMULATOR))
    return tree


def machine_code(tree: Path, kernel: str, output: Path) -> str:
    flags = ["-std=c++20", "-O3", "-gencode", "arch=compute_90a,code=sm_90a", "-cubin", "-I."]
    flags.append('-DTHUNDERKITTENS_ARCHS="90a"')
    command = [tool("nvcc"), *flags, kernel, "-o", str(output)]
    subprocess.run(command, cwd=tree, check=True)
    command = [tool("cuobjdump"), "-sass", str(output)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.split("/")[1])
def test_machine_code_does_not_depend_on_the_emulator(kernel, without_emulator, tmp_path):
    assert not any(path.name in EMULATOR for path in without_emulator.rglob("*"))
    here = machine_code(ROOT, kernel, tmp_path / "with.cubin")
    there = machine_code(without_emulator, kernel, tmp_path / "without.cubin")
    assert "HGMMA" in here
    assert here == there
