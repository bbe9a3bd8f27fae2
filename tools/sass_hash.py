"""Compares the machine code of two builds, kernel by kernel.

    sass_hash.py PACKAGE --save hashes.json      keep the hashes of a build
    sass_hash.py OLD NEW                         compare two builds; exit status 1 if they differ

PACKAGE, OLD and NEW are a package's folder, a library, an object file, or a file that --save has
written. A kernel's hash is of its instructions, its constants and its number of registers, not of
its name: a kernel that was moved or renamed keeps it. Kernels whose hash is in both builds are the
same. Of the others, those with the same name have changed; the rest is in one build alone."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import cuda_elf


class Kernel(NamedTuple):
    """A kernel's machine code; `code_bytes` is the size of its instructions."""

    hash: str
    symbol: str
    code_bytes: int


def kernels_of_image(sections: list[cuda_elf.Section]) -> list[Kernel]:
    by_name = {section.name: section for section in sections}
    kernels = []
    for name, section in by_name.items():
        if not name.startswith(".text."):
            continue
        symbol = name.removeprefix(".text.")
        # Bank 0 holds the parameters, which have no contents here; 2 and up the literals.
        constants = b"".join(
            by_name[constant].data
            for bank in range(1, 8)
            if (constant := f".nv.constant{bank}.{symbol}") in by_name
        )
        digest = hashlib.sha256(section.data + constants)
        digest.update((section.info >> 24).to_bytes(1, "little"))  # registers
        kernels.append(Kernel(digest.hexdigest()[:16], symbol, len(section.data)))
    return kernels


def read(path: Path) -> list[Kernel]:
    """The kernels of a build."""
    if path.is_dir():
        libraries = sorted(path.glob("_cuda*.so")) or sorted(path.glob("thunderkittens/_cuda*.so"))
        if not libraries:
            raise SystemExit(f"{path} has no _cuda.so")
        path = libraries[0]
    if path.suffix == ".json":
        return [Kernel(**row) for row in json.loads(path.read_text())["kernels"]]
    kernels = [k for image in cuda_elf.images(path.read_bytes()) for k in kernels_of_image(image)]
    if not kernels:
        raise SystemExit(f"{path} holds no GPU image: build with -DTHUNDERKITTENS_COMPRESS=OFF")
    return sorted(kernels, key=lambda k: k.symbol)


def demangled(symbols: list[str]) -> list[str]:
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if not tool or not symbols:
        return symbols
    done = subprocess.run([tool], input="\n".join(symbols), capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else symbols


def unmatched(kernels: list[Kernel], others: list[Kernel]) -> list[Kernel]:
    """The kernels whose hash is not among the others, each of which stands for one."""
    left = Counter(k.hash for k in others)
    rest = []
    for kernel in kernels:
        if left[kernel.hash] > 0:
            left[kernel.hash] -= 1
        else:
            rest.append(kernel)
    return rest


def compare(old: list[Kernel], new: list[Kernel]) -> dict[str, list[Kernel]]:
    """The kernels that are not the same in both builds: changed (as they are now), gone, added."""
    gone, added = unmatched(old, new), unmatched(new, old)
    names_gone, names_added = {k.symbol for k in gone}, {k.symbol for k in added}
    return {
        "changed": [k for k in added if k.symbol in names_gone],
        "gone": [k for k in gone if k.symbol not in names_added],
        "added": [k for k in added if k.symbol not in names_gone],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("builds", nargs="+", type=Path, help="one build, or an old and a new one")
    parser.add_argument("--save", type=Path, help="write the hashes of the last build as JSON")
    arguments = parser.parse_args()
    if len(arguments.builds) > 2:
        parser.error("at most two builds")
    builds = [read(path) for path in arguments.builds]
    if arguments.save:
        rows = [kernel._asdict() for kernel in builds[-1]]
        arguments.save.write_text(json.dumps({"kernels": rows}, indent=1) + "\n")
    print(
        ", ".join(f"{p}: {len(k)} kernels" for p, k in zip(arguments.builds, builds, strict=True))
    )
    if len(builds) == 1:
        return 0
    differences = compare(*builds)
    same = len(builds[1]) - len(differences["changed"]) - len(differences["added"])
    print(f"same {same}, " + ", ".join(f"{kind} {len(k)}" for kind, k in differences.items()))
    for kind, kernels in differences.items():
        for kernel, name in zip(kernels, demangled([k.symbol for k in kernels]), strict=True):
            print(f"{kind}: {kernel.code_bytes} bytes, {name}")
    return 1 if any(differences.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
