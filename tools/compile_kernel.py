"""Compiler launcher for kernels: runs nvcc and keeps what ptxas says of each kernel.

    compile_kernel.py [--compress OBJCOPY] --cut FOLDER ... -- [ccache] nvcc ... -o x.cu.o

ptxas's report (registers, stack, spills, barriers) and the size of each kernel's code, read from
the object file, are written beside the object as `x.cu.o.json` for kernel_table.py, a row for each
architecture that the kernel is compiled for; warnings and errors are passed on. Each FOLDER that
occurs in the object (line information holds absolute paths) is replaced by an equally long
`./////`, which leaves every offset in the file as it is and the path valid relative to the source
tree. --compress brings the object's GPU images, and its PTX, to some eighth at the end, as
`nvcc --compress-mode=size` would have done before the code could be measured."""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cuda_elf

PTXAS_ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
PTXAS_PROPERTIES = re.compile(r"Function properties for (\S+)")
PTXAS_SPILLS = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
PTXAS_USED = re.compile(r"Used (\d+) registers")
PTXAS_BARRIERS = re.compile(r"used (\d+) barriers")
PTXAS_SHARED = re.compile(r"(\d+) bytes smem")
PTXAS_NOISE = re.compile(r"^ptxas info\s*:|bytes stack frame,|^\s*$")
# ptxas reports as "info" that it could not keep wgmma asynchronous: it then runs several times
# slower.
SERIALISED = re.compile(r"wgmma.*serializ|\(C75\d\d\)|[Pp]otential [Pp]erformance [Ll]oss")


def parse_ptxas(text: str) -> dict:
    """The kernels, of each architecture, and the warnings, of the output of `ptxas -v`."""
    kernels: dict[str, dict] = {}  # of the architecture that the lines are about, by mangled name
    found: list[dict] = []
    arch = ""
    warnings = []
    entry = function = None
    for line in text.splitlines():
        if SERIALISED.search(line):
            warnings.append(line.strip())
        if match := PTXAS_ENTRY.search(line):
            entry = match[1]
            if arch != match[2]:
                arch, kernels = match[2], {}
            kernels[entry] = {"symbol": entry, "arch": arch}
            found.append(kernels[entry])
        elif match := PTXAS_PROPERTIES.search(line):
            function = match[1]
        elif (match := PTXAS_SPILLS.search(line)) and entry:
            # A function that was not inlined is reported too: its stack and spills count for the
            # kernel.
            kernel = kernels[function] if function in kernels else kernels[entry]
            for key, value in zip(
                ("stack_bytes", "spill_store_bytes", "spill_load_bytes"),
                match.groups(),
                strict=True,
            ):
                kernel[key] = kernel.get(key, 0) + int(value)
        elif (match := PTXAS_USED.search(line)) and entry:
            kernel = kernels[entry]
            kernel["registers"] = int(match[1])
            for key, pattern in (
                ("barriers", PTXAS_BARRIERS),
                ("static_shared_bytes", PTXAS_SHARED),
            ):
                number = pattern.search(line)
                kernel[key] = int(number[1]) if number else 0
    return {"kernels": found, "warnings": warnings}


def number_of(arch: str) -> int:
    """90 of "sm_90a"."""
    return int(re.sub(r"\D", "", arch))


def code_sizes(image: bytes) -> dict[tuple[int, str], int]:
    """Bytes of machine code by architecture and mangled kernel name, of all GPU images within an
    object file."""
    return {
        (entry.number, section.name.removeprefix(".text.")): len(section.data)
        for entry in cuda_elf.entries(image)
        if entry.kind == "elf"
        for sections in cuda_elf.images(b"\0" + entry.data)
        for section in sections
        if section.name.startswith(".text.")
    }


def cut_paths(image: bytes, folders: list[str]) -> bytes:
    """The image with each folder's path replaced by one of the same length that names no place."""
    variants = {f for folder in folders for f in (folder, str(Path(folder).resolve()))}
    for folder in sorted(variants, key=len, reverse=True):
        path = folder.encode()
        if len(path) > 1:
            pattern = re.compile(re.escape(path) + rb"(?=[/\0])")
            image = pattern.sub(b"." + b"/" * (len(path) - 1), image)
    return image


def compress(target: Path, fatbinary: Path, objcopy: str, archs: set[str]) -> None:
    """Replaces the GPU images of an object file, and its PTX, by compressed ones. All else in the
    file refers to the beginning of their section alone. `archs` are the images', in full."""
    names = {number_of(arch): arch.removeprefix("sm_") for arch in archs}
    with tempfile.TemporaryDirectory() as folder:
        packed = Path(folder, "packed")
        command = [str(fatbinary), f"--create={packed}", "-64"]
        command += ["--compress-all", "--compress-mode=size"]
        for i, entry in enumerate(cuda_elf.entries(target.read_bytes())):
            image = Path(folder, f"image{i}")
            image.write_bytes(entry.data)
            name = names[entry.number] if entry.kind == "elf" else entry.number
            command.append(f"--image3=kind={entry.kind},sm={name},file={image}")
        subprocess.run(command, check=True)
        subprocess.run([objcopy, "--update-section", f".nv_fatbin={packed}", target], check=True)


def main(arguments: list[str]) -> int:
    split = arguments.index("--")
    options = list(zip(arguments[:split:2], arguments[1:split:2], strict=True))
    folders = [value for name, value in options if name == "--cut"]
    objcopy = dict(options).get("--compress")
    command = arguments[split + 1 :]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    sys.stdout.write(done.stdout)
    output = done.stdout + done.stderr
    noise = PTXAS_NOISE if done.returncode == 0 else re.compile(r"(?!)")
    for line in done.stderr.splitlines():
        if SERIALISED.search(line) or not noise.search(line):
            print(line, file=sys.stderr)
    if done.returncode == 0 and "-o" in command:
        target = Path(command[command.index("-o") + 1])
        image = target.read_bytes()
        report = {**parse_ptxas(output), "seconds": round(time.monotonic() - start, 1)}
        sizes = code_sizes(image)
        for kernel in report["kernels"]:
            at = (number_of(kernel["arch"]), kernel["symbol"])
            kernel["code_bytes"] = sizes.get(at, 0)
        cut = cut_paths(image, folders)
        if cut != image:
            target.write_bytes(cut)
        if objcopy and b".nv_fatbin" in image:
            nvcc = next(Path(part) for part in command if Path(part).name == "nvcc")
            archs = {kernel["arch"] for kernel in report["kernels"]}
            compress(target, nvcc.with_name("fatbinary"), objcopy, archs)
        target.with_name(target.name + ".json").write_text(json.dumps(report, indent=1))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
