"""Compiles the portable kernels for every target, and tells what became of each of them.

    targets.py                                   all, for 8.0, 8.9, 9.0 and 12.0
    targets.py --only gemm/portable_64x64        some files; a regular expression
    targets.py --target 120 --json rows.json     a target; with all that is known of each kernel

The compiler runs once for a file that instantiates kernels (tools/instances.py), for PTX of the
architecture that its name says; the assembler makes the machine code of each target from that, as
the driver does. Of a kernel and target the table has registers, bytes that are spilled and other
local memory, shared memory (static, and with the package on the path also dynamic), and of the
machine code how many instructions it has of some kinds:

    products    of the tensor cores
    ldmatrix    loads of fragments that are four matrices wide, of all
    copies      asynchronous ones of 16 bytes, of all
    conversions of numbers
    unpacked    those of fp8, in whose products GPUs without such products have f16 instead
    local       loads and stores of local memory

Of a target it has the processor's time and the bytes of code, with those that a compressed package
has in brackets. The exit status is 1 where a kernel spills, or one with products uses local memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import cuda_elf
import instances
import kernel_table
from compile_kernel import parse_ptxas

ROOT = Path(__file__).resolve().parents[1]
TARGETS = (80, 89, 90, 120)
# What is counted of the machine code: all instructions of a kind, and those as wide as can be.
PRODUCTS = re.compile(r"[HIQO]MMA\b")
LDMATRIX, WIDE_LDMATRIX = re.compile(r"LDSM\b"), re.compile(r"LDSM\b.*\.M\w*88\.4$")
COPIES, WIDE_COPIES = re.compile(r"LDGSTS\b"), re.compile(r"LDGSTS\b.*\.128\b")
CONVERSIONS = re.compile(r"(F2FP?|I2FP?|F2IP?)\b")
UNPACKED = re.compile(r"F2FP\b.*\.UNPACK")
LOCAL = re.compile(r"(LDL|STL)\b")
KINDS = {
    "products": PRODUCTS,
    "ldmatrix": LDMATRIX,
    "wide_ldmatrix": WIDE_LDMATRIX,
    "copies": COPIES,
    "wide_copies": WIDE_COPIES,
    "conversions": CONVERSIONS,
    "unpacked": UNPACKED,
    "local": LOCAL,
}
COLUMNS = {
    "family": "family",
    "name": "kernel",
    "arch": "arch",
    "registers": "regs",
    "spilled": "spilled",
    "stack_bytes": "stack",
    "shared": "shared",
    "code_bytes": "code",
    "products": "products",
    "ldmatrix_text": "ldmatrix",
    "copies_text": "copies",
    "conversions": "conversions",
    "unpacked": "unpacked",
    "local": "local",
}


def census(sass: str) -> dict[str, dict[str, int]]:
    """By the kernels of what cuobjdump prints: the instructions of each kind."""
    counts: dict[str, dict[str, int]] = {}
    mine: dict[str, int] = {}
    for line in sass.splitlines():
        if match := re.search(r"Function : (\S+)", line):
            mine = counts[match[1]] = dict.fromkeys(KINDS, 0)
        elif match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line):
            for kind, pattern in KINDS.items():
                mine[kind] += bool(pattern.match(match[1]))
    return counts


def problems(rows: list[dict]) -> list[str]:
    """What no kernel may have, by a sentence for each that does."""
    found = []
    for row in rows:
        name = f"{row['family']}/{row.get('name', row['source'])} for {row['arch']}"
        if spilled := row["spill_store_bytes"] + row["spill_load_bytes"]:
            found.append(f"{name} spills: {spilled} bytes are stored and loaded")
        elif row["products"] and (row["stack_bytes"] or row["local"]):
            bytes_, count = row["stack_bytes"], row["local"]
            found.append(f"{name} has {bytes_} bytes of local memory, and {count} accesses to it")
    return found


class Compiler:
    """The toolkit's programs. Keeps the processor's time of each step."""

    def __init__(self, nvcc: str, folder: Path) -> None:
        self.folder = folder
        self.programs = {"nvcc": nvcc}
        for name in ("ptxas", "fatbinary", "cuobjdump"):
            beside = Path(nvcc).with_name(name)
            program = str(beside) if beside.is_file() else shutil.which(name)
            if program is None:
                raise SystemExit(f"targets.py: no {name}, neither beside {nvcc} nor on the path")
            self.programs[name] = program
        self.seconds: dict[str, float] = defaultdict(float)
        self.bytes: dict[str, int] = defaultdict(int)
        self.packed_bytes: dict[str, int] = defaultdict(int)

    def run(self, step: str, program: str, *arguments: str) -> str:
        """What it prints. A step's time is that of the processor, with the programs that it
        starts."""
        command = [self.programs[program], *arguments]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        self.seconds[step] += usage.ru_utime + usage.ru_stime
        if process.returncode != 0:
            raise SystemExit(f"targets.py: {program} failed\n{' '.join(command)}\n{text}")
        return text

    def account(self, step: str, kind: str, number: int, file: Path) -> None:
        """Adds the bytes of what a step has made, and of the same compressed."""
        packed = self.folder / "packed"
        options = [f"--create={packed}", "-64", "--compress-all", "--compress-mode=size"]
        self.run("", "fatbinary", *options, f"--image3=kind={kind},sm={number},file={file}")
        self.bytes[step] += file.stat().st_size
        self.packed_bytes[step] += packed.stat().st_size

    def ptx(self, source: Path, number: int) -> Path:
        target, step = self.folder / "x.ptx", f"PTX of compute_{number}"
        flags = ["-std=c++20", "-O3", "-DNDEBUG", '-DTHUNDERKITTENS_ARCHS="80,90a"', "-I."]
        self.run(
            step, "nvcc", *flags, f"-arch=compute_{number}", "-ptx", str(source), "-o", str(target)
        )
        self.account(step, "ptx", number, target)
        return target

    def kernels(self, ptx: Path, target: int) -> list[dict]:
        """ptxas's report of each kernel, with the census of its machine code."""
        cubin, step = self.folder / "x.cubin", f"sm_{target}"
        report = parse_ptxas(
            self.run(step, "ptxas", "-v", f"-arch=sm_{target}", str(ptx), "-o", str(cubin))
        )
        self.account(step, "elf", target, cubin)
        sizes = {
            section.name.removeprefix(".text."): len(section.data)
            for sections in cuda_elf.images(b"\0" + cubin.read_bytes())
            for section in sections
        }
        counts = census(self.run("", "cuobjdump", "-sass", str(cubin)))
        return [
            {**kernel, "code_bytes": sizes[kernel["symbol"]], **counts[kernel["symbol"]]}
            for kernel in report["kernels"]
        ]


def sources(only: str, folder: Path) -> list[tuple[str, Path, int]]:
    """(family, file, architecture) of the files of portable kernels, written into the folder."""
    found = []
    for path in sorted((ROOT / "csrc").glob("*/instances.txt")):
        family = path.parent.name
        for stem in instances.write(path, folder / family, [".cu"]):
            number = int(instances.family_of(stem))
            if number != 90 and re.search(only, f"{family}/{stem}"):
                found.append((family, folder / family / f"{stem}.cu", number))
    return found


def named(rows: list[dict]) -> list[dict]:
    """With the registry's name and dynamic shared memory, where the package is on the path."""
    try:
        from thunderkittens import info
    except ImportError:
        return rows
    return info.with_registry(rows)


def compiled(compiler: Compiler, only: str, targets: list[int]) -> list[dict]:
    rows = []
    for family, source, number in sources(only, compiler.folder):
        print(f"{family}/{source.stem}", file=sys.stderr)
        ptx = compiler.ptx(source, number)
        for target in targets:
            if target >= number:
                for kernel in compiler.kernels(ptx, target):
                    row = kernel_table.row_of(kernel, family, source.stem, [])
                    rows.append(row | {kind: kernel[kind] for kind in KINDS})
    return named(rows)


def print_all(rows: list[dict], compiler: Compiler) -> None:
    shown = [
        {
            "name": row["source"],
            **row,
            "arch": row["arch"].removeprefix("sm_"),
            "spilled": row["spill_store_bytes"] + row["spill_load_bytes"],
            "shared": row["static_shared_bytes"] + row.get("shared_bytes", 0),
            "ldmatrix_text": f"{row['wide_ldmatrix']} of {row['ldmatrix']}",
            "copies_text": f"{row['wide_copies']} of {row['copies']}",
        }
        for row in rows
    ]
    kernel_table.print_columns(shown, COLUMNS)
    for step in compiler.bytes:
        print(
            f"{step}: {compiler.seconds[step]:.0f} CPU-seconds, {compiler.bytes[step]:,} bytes "
            f"({compiler.packed_bytes[step]:,})"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="a regular expression for family/file")
    parser.add_argument("--target", type=int, action="append", help=f"in place of {TARGETS}")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--nvcc", default=os.environ.get("CUDACXX") or shutil.which("nvcc"))
    args = parser.parse_args()
    if args.nvcc is None:
        raise SystemExit("targets.py: no nvcc; name one by --nvcc or CUDACXX")
    with tempfile.TemporaryDirectory() as folder:
        compiler = Compiler(args.nvcc, Path(folder))
        rows = compiled(compiler, args.only, args.target or list(TARGETS))
    if not rows:
        raise SystemExit("targets.py: there is no such file of portable kernels")
    print_all(rows, compiler)
    if args.json:
        args.json.write_text(json.dumps({"kernels": rows}, indent=1) + "\n")
    found = problems(rows)
    for problem in found:
        print(problem, file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
