"""The build's own tools: reading what ptxas reports, and cutting the building machine's paths.

They decide what `kernels.json` says, and with it whether a kernel that spills is noticed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from test_sass_hash import image

TOOLS = Path(__file__).resolve().parents[1] / "tools"

REPORT = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4goodv' for 'sm_90a'
ptxas info    : Function properties for _Z4goodv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 1024 bytes smem
ptxas info    : Compile time = 11.772 ms
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to insufficient register resources for the wgmma pipeline in the function '_Z3badv'
ptxas info    : Compiling entry function '_Z3badv' for 'sm_90a'
ptxas info    : Function properties for _Z3badv
    48 bytes stack frame, 44 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 255 registers
"""


def load(name: str) -> ModuleType:
    """A tool as it runs: with the others beside it."""
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(TOOLS))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(TOOLS))
    return module


compile_kernel = load("compile_kernel")
kernel_table = load("kernel_table")


def test_ptxas_report_is_read():
    report = compile_kernel.parse_ptxas(REPORT)
    good, bad = report["kernels"]
    assert good == {
        "symbol": "_Z4goodv",
        "arch": "sm_90a",
        "stack_bytes": 0,
        "spill_store_bytes": 0,
        "spill_load_bytes": 0,
        "registers": 168,
        "barriers": 9,
        "static_shared_bytes": 1024,
    }
    assert (bad["stack_bytes"], bad["spill_store_bytes"], bad["spill_load_bytes"]) == (48, 44, 40)
    assert len(report["warnings"]) == 1


def test_spills_of_a_called_function_count_for_its_kernel():
    called = REPORT + (
        "ptxas info    : Function properties for _Z6helperv\n"
        "    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\n"
    )
    assert compile_kernel.parse_ptxas(called)["kernels"][1]["spill_store_bytes"] == 48


def test_table_gives_a_warning_to_the_kernel_that_it_names(tmp_path):
    target = tmp_path / "instances/gemm/x.cu.o"
    target.parent.mkdir(parents=True)
    report = compile_kernel.parse_ptxas(REPORT)
    for kernel in report["kernels"]:
        kernel["code_bytes"] = 128
    target.with_name("x.cu.o.json").write_text(json.dumps(report))
    bad, good = kernel_table.collect([target])
    assert (bad["family"], bad["source"], bad["symbol"]) == ("gemm", "x", "_Z3badv")
    assert len(bad["warnings"]) == 1
    assert good["warnings"] == []


def fat_binary(*entries: tuple[int, int, bytes]) -> bytes:
    """A fat binary of entries: of a kind, for an architecture, with their contents."""
    body = b""
    for kind, number, data in entries:
        padded = data + b"\0" * (-len(data) % 8)
        body += struct.pack("<HHIQIIHHI32x", kind, 0x101, 64, len(padded), 0, 0, 0, 0, number)
        body += padded
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_kernels_of_several_architectures_are_told_apart():
    """As nvcc writes them one after the other, in what it says and in the object."""
    two = REPORT + REPORT.replace("sm_90a", "sm_120").replace("Used 168", "Used 190")
    kernels = compile_kernel.parse_ptxas(two)["kernels"]
    found = [(k["symbol"], k["arch"], k["registers"]) for k in kernels]
    assert found == [
        ("_Z4goodv", "sm_90a", 168),
        ("_Z3badv", "sm_90a", 255),
        ("_Z4goodv", "sm_120", 190),
        ("_Z3badv", "sm_120", 255),
    ]
    images = [image({"one": (code, b"", 40)}) for code in (b"of 8.0", b"longer, of 12.0")]
    entries = (2, 80, images[0]), (1, 80, b".target sm_80"), (2, 120, images[1])
    file = b"\x7fELF\x02\x01 of the host " + fat_binary(*entries) + b"end"
    assert compile_kernel.code_sizes(file) == {(80, "one"): 6, (120, "one"): 15}
    kinds = [(e.kind, e.number) for e in compile_kernel.cuda_elf.entries(file)]
    assert kinds == [("elf", 80), ("ptx", 80), ("elf", 120)]


def test_paths_are_cut_to_the_same_length():
    folder = "/home/someone/project"
    image = f"a\0{folder}/csrc/x.cuh\0{folder}\0{folder}-other/x\0".encode()
    cut = compile_kernel.cut_paths(image, [folder])
    assert len(cut) == len(image)
    dots = "." + "/" * (len(folder) - 1)
    assert cut == f"a\0{dots}/csrc/x.cuh\0{dots}\0{folder}-other/x\0".encode()
    assert os.path.normpath(f"{dots}/csrc/x.cuh") == "csrc/x.cuh"


@pytest.mark.parametrize("status", [0, 3])
def test_launcher_passes_on_the_compiler_s_status_and_errors(tmp_path, status):
    compiler = tmp_path / "compiler.py"
    compiler.write_text(
        "import pathlib, sys\n"
        f"sys.stderr.write({REPORT!r} + 'x.cu(3): warning: look here\\n')\n"
        "pathlib.Path(sys.argv[2]).write_bytes(b'object')\n"
        f"sys.exit({status})\n"
    )
    target = tmp_path / "x.cu.o"
    command = [sys.executable, str(TOOLS / "compile_kernel.py"), "--cut", str(tmp_path), "--"]
    command += [sys.executable, str(compiler), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == status
    assert "look here" in done.stderr
    assert "serialized" in done.stderr
    assert ("Used 168" in done.stderr) == (status != 0), "what ptxas says is kept for the table"
    assert target.with_name("x.cu.o.json").exists() == (status == 0)


CODES = [
    # the entries, and what nvcc makes of the files of sm80 and of sm89
    ("80", "arch=compute_80,code=[sm_80,compute_80]", ""),
    (
        "80 120-real",
        "arch=compute_80,code=[sm_80,compute_80,sm_120]",
        "arch=compute_120,code=[sm_120]",
    ),
    (
        "120-real 89 80",
        "arch=compute_80,code=[sm_80,compute_80,sm_120]",
        "arch=compute_89,code=[sm_89,compute_89,sm_120]",
    ),
    ("80-virtual", "arch=compute_80,code=[compute_80]", ""),
    (
        "86-real 121-real 120-real",
        "arch=compute_86,code=[sm_86,sm_120]",
        "arch=compute_120,code=[sm_120]",
    ),
]


@pytest.mark.parametrize(("entries", "sm80", "sm89"), CODES)
def test_what_portable_files_are_compiled_for(entries, sm80, sm89, tmp_path):
    """The compiler runs once for a file, and a minor version has no machine code of its own where
    an earlier one has."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("no cmake")
    text = (TOOLS.parent / "cmake/Families.cmake").read_text()
    function = re.search(r"function\(tk_portable_code .*?endfunction\(\)\n", text, re.DOTALL)
    assert function is not None
    ask = "".join(
        f"set(portable {entries.replace(' ', ';')})\n"
        "list(SORT portable COMPARE NATURAL)\n"
        f"tk_portable_code({number} code ${{portable}})\nmessage(STATUS ${{code}})\n"
        for number in (80, 89)
    )
    script = tmp_path / "ask.cmake"
    script.write_text(function[0] + ask)
    done = subprocess.run([cmake, "-P", script], check=True, capture_output=True, text=True)
    found = [line.removeprefix("--").strip() for line in done.stdout.splitlines()]
    assert found[0] == sm80
    assert found[1] == sm89
