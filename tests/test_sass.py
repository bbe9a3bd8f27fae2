"""The kernels' machine code is the same whether the emulator is in the tree or not, and once it is
compressed; and portable kernels have the instructions that they are written for.

One instantiation of each family is compiled for sm_90a from this tree, and from a copy without the
emulated back end; both are disassembled. It needs nvcc and cuobjdump (a CUDA toolkit's, or those
that pip installed, Triton's cuobjdump included), and no GPU.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.toolkit import find_tool

ROOT = Path(__file__).resolve().parents[1]
# Files of csrc/*/instances.txt, and what all instances have that are compiled here of each.
KERNELS = [
    ("gemm/single_wave_64x64", ["DType::bf16"]),
    ("attention/forward_bf16", [".block_m = 64,"]),
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


def written(file: str, fields: list[str], folder: Path) -> Path:
    """A file that instantiates kernels, without those that do not have all the fields."""
    family, stem = file.split("/")
    source = ROOT / "csrc" / family / "instances.txt"
    command = [sys.executable, str(ROOT / "tools/instances.py"), str(source), str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    path = folder / f"{stem}.cu"
    lines = path.read_text().splitlines(keepends=True)

    def has_all(line: str) -> bool:
        return all(field in line for field in fields)

    kept = [line for line in lines if not line.startswith("template ") or has_all(line)]
    assert any(line.startswith("template ") for line in kept)
    path.write_text("".join(kept))
    return path


def machine_code(tree: Path, kernel: Path, output: Path, arch: str = "90a") -> str:
    target = f"arch=compute_{arch},code=sm_{arch}"
    flags = ["-std=c++20", "-O3", "-gencode", target, "-cubin", "-I."]
    flags.append('-DTHUNDERKITTENS_ARCHS="90a"')
    command = [tool("nvcc"), *flags, str(kernel), "-o", str(output)]
    subprocess.run(command, cwd=tree, check=True)
    command = [tool("cuobjdump"), "-sass", str(output)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("file", "fields"), KERNELS, ids=[k[0].split("/")[0] for k in KERNELS])
def test_machine_code_does_not_depend_on_the_emulator(file, fields, without_emulator, tmp_path):
    assert not any(path.name in EMULATOR for path in without_emulator.rglob("*"))
    source = written(file, fields, tmp_path / "instances")
    here = machine_code(ROOT, source, tmp_path / "with.cubin")
    there = machine_code(without_emulator, source, tmp_path / "without.cubin")
    assert "HGMMA" in here
    assert here == there


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", ["80", "90", "120"])
def test_portable_kernels_keep_the_tensor_cores_busy(arch, tmp_path):
    """Of the loop over whole stages: 8 loads of fragments and 4 copies for 32 products, between
    these, and no registers that are moved about or kept in memory."""
    source = written(
        "gemm/portable_128x128_sm80", ["Layout::nt", "DType::bf16"], tmp_path / "instances"
    )
    text = machine_code(ROOT, source, tmp_path / "x.cubin", arch)
    code = re.findall(r"/\*([0-9a-f]{4,})\*/ +(?:@!?U?P\d+ +)?([A-Z][\w.]*)([^/]*)", text)
    assert not {name for _, name, _ in code if name.startswith(("LDL", "STL"))}
    places = {int(at, 16): i for i, (at, _, _) in enumerate(code)}
    loops = [
        [name for _, name, _ in code[places[target] : i + 1]]
        for i, (at, name, rest) in enumerate(code)
        if name.startswith("BRA") and (found := re.search(r"0x([0-9a-f]+)", rest))
        if (target := int(found[1], 16)) < int(at, 16)
    ]
    loop = next(x for x in loops if sum(name.startswith("HMMA") for name in x) == 128)
    assert sum(name.startswith("LDSM.16.M") and name.endswith(".4") for name in loop) == 32
    copies = [name for name in loop if name.startswith("LDGSTS")]
    assert len(copies) == 16
    assert all("BYPASS" in name and name.endswith(".128") for name in copies)
    assert sum(name.startswith(("MOV", "IMAD.MOV")) for name in loop) < 8
    assert len(loop) < 300


def test_compressed_machine_code_is_the_same(tmp_path):
    """As the launcher of the compiler leaves an object file, which may be of several GPUs."""
    source, plain = tmp_path / "x.cu", tmp_path / "plain.o"
    lines = "\n".join(f"x[{i}] = __sinf(x[{i}] * {i}.5f);" for i in range(200))
    source.write_text(f"__global__ void kernel(float* x) {{ {lines} }}")
    nvcc, objcopy = tool("nvcc"), shutil.which("objcopy")
    if objcopy is None:
        pytest.skip("no objcopy: it comes with g++'s binutils")
    flags = ["-gencode", "arch=compute_90a,code=sm_90a", "-Xptxas=-v", "--compress-mode=none"]
    flags += ["-gencode", "arch=compute_80,code=[sm_80,compute_80]"]
    launcher = [sys.executable, str(ROOT / "tools/compile_kernel.py")]
    code = []
    for options, target in (([], plain), (["--compress", objcopy], tmp_path / "x.o")):
        command = [*launcher, *options, "--", nvcc, *flags, "-c", str(source), "-o", str(target)]
        subprocess.run(command, check=True)
        command = [tool("cuobjdump"), "-sass", "-ptx", str(target)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        code.append([x for x in text.splitlines() if x != "compressed" and "ptxasOptions" not in x])
    assert sum("Function : " in line for line in code[0]) == 2
    assert sum(".target sm_80" in line for line in code[0]) == 1
    assert code[0] == code[1]
    assert target.stat().st_size < plain.stat().st_size
    reports = [path.with_name(f"{path.name}.json").read_text() for path in (plain, target)]
    sizes = [[k["code_bytes"] for k in json.loads(report)["kernels"]] for report in reports]
    assert sizes[0] == sizes[1]
    assert len(sizes[0]) == 2
    assert all(sizes[0])
