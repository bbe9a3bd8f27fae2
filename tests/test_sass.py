"""The kernels' machine code is the same whether the emulator is in the tree or not.

One instantiation of each family is compiled for sm_90a from this tree, and from a copy without the
emulated back end; both are disassembled. It needs nvcc and cuobjdump (a CUDA toolkit's, or those
that pip installed, Triton's cuobjdump included), and no GPU.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.toolkit import find_tool

ROOT = Path(__file__).resolve().parents[1]
# Files of csrc/*/instances.txt, and what all instances have that are compiled here of each.
KERNELS = [
    ("gemm/bf16_one_consumer", ".block_n = 64,"),
    ("attention/forward_bf16", ".block_m = 64,"),
]
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


def written(file: str, field: str, folder: Path) -> Path:
    """A file that instantiates kernels, without those that do not have the field."""
    family, stem = file.split("/")
    source = ROOT / "csrc" / family / "instances.txt"
    command = [sys.executable, str(ROOT / "tools/instances.py"), str(source), str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    path = folder / f"{stem}.cu"
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith("template ") or field in line]
    assert any(line.startswith("template ") for line in kept)
    path.write_text("".join(kept))
    return path


def machine_code(tree: Path, kernel: Path, output: Path) -> str:
    flags = ["-std=c++20", "-O3", "-gencode", "arch=compute_90a,code=sm_90a", "-cubin", "-I."]
    flags.append('-DTHUNDERKITTENS_ARCHS="90a"')
    command = [tool("nvcc"), *flags, str(kernel), "-o", str(output)]
    subprocess.run(command, cwd=tree, check=True)
    command = [tool("cuobjdump"), "-sass", str(output)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("file", "field"), KERNELS, ids=[k[0].split("/")[0] for k in KERNELS])
def test_machine_code_does_not_depend_on_the_emulator(file, field, without_emulator, tmp_path):
    assert not any(path.name in EMULATOR for path in without_emulator.rglob("*"))
    source = written(file, field, tmp_path / "instances")
    here = machine_code(ROOT, source, tmp_path / "with.cubin")
    there = machine_code(without_emulator, source, tmp_path / "without.cubin")
    assert "HGMMA" in here
    assert here == there
