"""The tile library's own tests, in four parts.

- Layouts: the fragment and swizzle functions against formulas written here, compiled by g++ alone.
- Errors: every file of `compile_fail/` must be refused with the sentence in its first line.
- Kernels: the sections of the unit tests' program, on a GPU. It is built here unless the
  environment variable THUNDERKITTENS_UNIT_TESTS names a built one.
- The same program on the emulator, everywhere, under each of its policies
  (THUNDERKITTENS_EMULATED_UNIT_TESTS names a built one).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from helpers.toolkit import find_tool

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

SECTIONS = [
    "memory/cluster",
    "memory/ragged",
    "memory/tile/async",
    "memory/tile/global",
    "memory/tile/shared",
    "memory/tile/tma",
    "memory/vec",
    "mma/warp",
    "mma/warpgroup/bf16",
    "mma/warpgroup/f16",
    "mma/warpgroup/fp8",
    "mma/warpgroup/shapes",
    "pipeline/lcf",
    "pipeline/lcsf",
    "register/conversions",
    "register/maps",
    "register/masks",
    "register/reductions",
    "register/vec",
    "shared/conversions",
    "shared/maps",
    "shared/masks",
    "shared/reductions",
    "shared/vec",
    "sync/barriers",
    "sync/clusters",
    "sync/launches",
    "sync/semaphores",
]


def has_gpu() -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return False
    return count.value > 0


def needs_nvcc() -> str:
    nvcc = find_tool("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc: set CUDACXX or install nvidia-cuda-nvcc")
    return nvcc


# ---- layouts ----


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    """The lines of layout_tables.cpp's output by their first word."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("layouts") / "layout_tables"
    command = [compiler, "-std=c++20", f"-I{ROOT}/kittens", f"{HERE}/layout_tables.cpp", "-o"]
    subprocess.run([*command, str(program)], check=True)
    output = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    lines = defaultdict(list)
    for line in output.splitlines():
        first, *rest = line.split()
        lines[first].append(rest)
    return lines


@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize("count", [2, 4])
def test_fragments_are_those_of_the_tensor_cores(tables, layout, count):
    """The A fragments of mma.m16n8k16 and m16n8k32, as the PTX ISA tabulates them."""
    seen = set()
    for kind, *numbers in tables["fragment"]:
        packing, lane, register, element, row, col = map(int, numbers)
        if kind != layout or packing != count:
            continue
        i = register * count + element  # a_i of the PTX ISA
        expected_row = lane // 4 + (8 if i // count % 2 else 0)
        expected_col = lane % 4 * count + i % count + (4 * count if i >= 2 * count else 0)
        if layout == "col":
            expected_row, expected_col = expected_col, expected_row
        assert (row, col) == (expected_row, expected_col)
        seen.add((row, col))
    assert len(seen) == 32 * 4 * count


def expected_address(swizzle, element_bytes, rows, cols, row, col) -> int:
    """Column stripes of the swizzle's width; in each, 16-byte chunks move within their row by the
    row's number in units of what one 128-byte line holds."""
    byte = col * element_bytes
    if swizzle == 0:
        return row * cols * element_bytes + byte
    stripe, within = divmod(byte, swizzle)
    chunk, rest = divmod(within, 16)
    chunks = swizzle // 16
    rows_per_line = 128 // swizzle
    chunk ^= row // rows_per_line % chunks
    return stripe * rows * swizzle + row * swizzle + chunk * 16 + rest


def test_swizzles(tables):
    assert len(tables["tile"]) == 72
    for line in tables["tile"]:
        swizzle, size, rows, cols, *addresses = map(int, line)
        places = [(row, col) for row in range(rows) for col in range(cols)]
        expected = [expected_address(swizzle, size, rows, cols, *place) for place in places]
        assert addresses == expected
        assert sorted(addresses) == list(range(0, rows * cols * size, size))


def test_swizzles_are_free_of_bank_conflicts(tables):
    """Eight rows at one 16-byte column, which ldmatrix reads at once, lie in all 32 banks."""
    for line in tables["tile"]:
        swizzle, size, rows, cols, *addresses = map(int, line)
        if swizzle == 0:
            continue
        for first in range(0, rows, 8):
            for col in range(0, cols, 16 // size):
                column = [addresses[(first + i) * cols + col] for i in range(8)]
                assert len({address % 128 // 16 for address in column}) == 8


def test_widest_swizzle(tables):
    for row_bytes, swizzle in (map(int, line) for line in tables["widest"]):
        assert swizzle == max([w for w in (32, 64, 128) if row_bytes % w == 0], default=0)


# ---- what must not compile ----

SNIPPETS = sorted(path.stem for path in (HERE / "compile_fail").glob("*.cu"))


def compile_snippet(stem: str) -> tuple[int, str]:
    command = [needs_nvcc(), "-std=c++20", "-arch=sm_90a", f"-I{ROOT}/kittens", "-ptx"]
    source = HERE / "compile_fail" / f"{stem}.cu"
    result = subprocess.run(
        [*command, str(source), "-o", os.devnull], capture_output=True, text=True, check=False
    )
    return result.returncode, result.stdout + result.stderr


def test_there_are_snippets():
    assert len(SNIPPETS) > 12
    assert "valid" in SNIPPETS


# Some of them at the lowest intensity.
@pytest.mark.parametrize(
    "stem",
    [
        pytest.param(stem, marks=pytest.mark.intensity(2 if i % 3 and stem != "valid" else 1))
        for i, stem in enumerate(SNIPPETS)
    ],
)
def test_compile_error(stem):
    code, output = compile_snippet(stem)
    first = (HERE / "compile_fail" / f"{stem}.cu").read_text().partition("\n")[0]
    if stem == "valid":
        assert code == 0, output
        return
    assert code != 0, "the snippet compiles"
    expected = first.removeprefix("// error: ")
    assert expected != first
    assert expected in output, output
    errors = [line for line in output.splitlines() if ": error:" in line]
    assert expected in errors[0], "the sentence is not the first error"


# ---- kernels ----


@pytest.fixture(scope="session")
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if not has_gpu():
        pytest.skip("no GPU")
    if built := os.environ.get("THUNDERKITTENS_UNIT_TESTS"):
        return built
    nvcc = needs_nvcc()
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("no cmake to build the unit tests with")
    intensity = request.config.getoption("intensity", default=2)
    folder = tmp_path_factory.mktemp("unit")
    options = [f"-DCMAKE_CUDA_COMPILER={nvcc}", f"-DINTENSITY={intensity}"]
    for command in (
        [cmake, "-S", str(HERE), "-B", str(folder), *options],
        [cmake, "--build", str(folder), "-j", str(os.cpu_count() or 2)],
    ):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return str(folder / "unit_tests")


@pytest.mark.timeout(1800)  # the first one waits for the build
@pytest.mark.parametrize("section", SECTIONS)
def test_section(program, section):
    command = [program, "--filter", section + "/", "--dump", str(ROOT / "failures" / "kittens")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    *_, passed, _failed, failed = result.stdout.splitlines()[-1].split()
    assert int(passed) > 0, "the section has no cases"
    assert int(failed) == 0


def test_sections_are_complete(program):
    listed = subprocess.run([program, "--sections"], capture_output=True, text=True, check=True)
    assert listed.stdout.split() == SECTIONS


# ---- kernels on the emulator ----


@pytest.fixture(scope="session")
def emulated_program(tmp_path_factory: pytest.TempPathFactory) -> str:
    if built := os.environ.get("THUNDERKITTENS_EMULATED_UNIT_TESTS"):
        return built
    from thunderkittens import emulation

    headers, cmake = emulation.cuda_headers(), shutil.which("cmake")
    if headers is None:
        pytest.skip(emulation.NO_HEADERS)
    if cmake is None:
        pytest.skip("no cmake to build the unit tests with")
    folder = tmp_path_factory.mktemp("emulated_unit")
    options = ["-DEMULATED=ON", f"-DCUDA_HEADERS={headers}", "-DINTENSITY=1"]
    options.append(f"-DMACHINE={emulation._machine()}")
    for command in (
        [cmake, "-S", str(HERE), "-B", str(folder), "-DCMAKE_BUILD_TYPE=None", *options],
        [cmake, "--build", str(folder), "-j", str(os.cpu_count() or 2)],
    ):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return str(folder / "unit_tests")


@pytest.mark.timeout(1800)  # the first one waits for the build
@pytest.mark.parametrize(
    "policy",
    ["on_wait", "late_mma", pytest.param("eager", marks=pytest.mark.intensity(2)), "random"],
)
def test_emulated_sections(emulated_program, policy):
    environment = os.environ | {"KITTENS_POLICY": policy, "KITTENS_SEED": "1"}
    result = subprocess.run(
        [emulated_program],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=environment,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    sections = [line.split() for line in result.stdout.splitlines() if line.startswith("SECTION")]
    assert [section[1] for section in sections] == SECTIONS
    assert all(int(passed) > 0 and failed == "0" for *_, passed, _, failed in sections)
