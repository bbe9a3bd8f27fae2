"""Where kernels arrive at a semaphore while loads from shared memory are on their way.

    pending_loads.py FILE ...      object files, libraries or cubins, built with
                                   -DTHUNDERKITTENS_COMPRESS=OFF, or written by cuobjdump -xelf

No arrival waits for a load whose register is used behind it only. If the arrival hands a slot
back that TMA fills next, such a load can read what comes next (docs/manual.md, "Semaphores"). A
line is a kernel, with the addresses of the arrivals and, of each, of the first and the last load
that may be on its way. Whether a load is of the slot that is handed back, the reader of the source
must tell.

Loads from shared memory and shuffles end in their order, so that who waits for one has those
before it as well. Code is read in the order of its addresses; only exits change that."""

from __future__ import annotations

import argparse
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import cuda_elf

# Of an instruction's 16 bytes, the lowest 12 bits; NEVER is the predicate !PT above these. The
# control bits from 105 on: stall cycles, yield, the scoreboard that the result sets, the one that
# the operands' reading sets, and those that it waits for.
LOADS = {0x984, 0x83B}  # LDS, LDSM
SHUFFLES = {0x389, 0x589, 0x989, 0xF89}
ARRIVE, EXIT, NEVER = 0x9A7, 0x94D, 0xF
SCOREBOARDS = 6


class Arrival(NamedTuple):
    """Addresses: of the arrival, and of the first and last load on its way."""

    address: int
    first: int
    last: int


def arrivals(code: bytes) -> Iterator[Arrival]:
    """Those with loads on their way, of a kernel's machine code."""
    loads: list[int] = []
    done = 0
    set_by = [0] * SCOREBOARDS  # how many of the loads are done once it is clear
    for address in range(0, len(code), 16):
        low, high = struct.unpack_from("<QQ", code, address)
        kind, control = low & 0xFFF, high >> 41
        result, waits = control >> 5 & 7, control >> 11 & 0x3F
        done = max([done, *(set_by[s] for s in range(SCOREBOARDS) if waits >> s & 1)])
        if kind in LOADS and low >> 12 & 0xF != NEVER:
            loads.append(address)
        if kind in LOADS | SHUFFLES and result < SCOREBOARDS:
            set_by[result] = len(loads)
        if kind == EXIT:
            loads, done, set_by = [], 0, [0] * SCOREBOARDS
        if kind == ARRIVE and done < len(loads):
            yield Arrival(address, loads[done], loads[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    for path in parser.parse_args().files:
        for sections in cuda_elf.images(b"\0" + path.read_bytes()):
            for section in sections:
                found = list(arrivals(section.data)) if section.name.startswith(".text.") else []
                if found:
                    places = " ".join(f"{a.address:x}<-{a.first:x}..{a.last:x}" for a in found)
                    print(path.name, section.name.removeprefix(".text."), places)


if __name__ == "__main__":
    main()
