"""Reads the GPU images (ELF files of machine EM_CUDA) that object files and libraries hold, as nvcc
writes them with --compress-mode=none."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

_MAGIC = b"\x7fELF\x02\x01"
_EM_CUDA = 190
_SHT_NOBITS = 8


# Of a fat binary, and what its entries are.
_FAT_MAGIC = struct.pack("<I", 0xBA55ED50)
_KINDS = {1: "ptx", 2: "elf"}


class Entry(NamedTuple):
    """What a fat binary holds for an architecture: a GPU image ("elf"), or "ptx"."""

    kind: str
    number: int
    data: bytes


class Section(NamedTuple):
    """A section of a GPU image; `info` is the field sh_info of its header."""

    name: str
    data: bytes
    info: int


def images(file: bytes) -> Iterator[list[Section]]:
    """The sections of each GPU image within an object file or library."""
    for start in _starts(file):
        yield _sections(file, start)


def entries(file: bytes) -> Iterator[Entry]:
    """What the fat binaries within an object file or library hold, in their order."""
    at = file.find(_FAT_MAGIC)
    while at >= 0:
        _, _, header_bytes, size = struct.unpack_from("<IHHQ", file, at)
        first, end = at + header_bytes, at + header_bytes + size
        while first < end:
            kind, _, entry_header, entry_bytes = struct.unpack_from("<HHIQ", file, first)
            number = struct.unpack_from("<I", file, first + 28)[0]
            data = file[first + entry_header : first + entry_header + entry_bytes]
            if kind not in _KINDS or not data:
                raise ValueError("a fat binary of a form that is not known")
            yield Entry(_KINDS[kind], number, data.rstrip(b"\0") if kind == 1 else data)
            first += entry_header + entry_bytes
        at = file.find(_FAT_MAGIC, end)


def _starts(file: bytes) -> Iterator[int]:
    # The file itself is an ELF file of the host: the search begins behind its magic number.
    start = file.find(_MAGIC, 1)
    while start >= 0:
        if struct.unpack_from("<H", file, start + 18)[0] == _EM_CUDA:
            yield start
        start = file.find(_MAGIC, start + 1)


def _sections(file: bytes, start: int) -> list[Section]:
    table_at = start + struct.unpack_from("<Q", file, start + 40)[0]
    entry_bytes, entries, names_index = struct.unpack_from("<HHH", file, start + 58)
    headers = [
        struct.unpack_from("<IIQQQQII", file, table_at + i * entry_bytes) for i in range(entries)
    ]
    names_at = start + headers[names_index][4]
    sections = []
    for name_offset, kind, _flags, _address, offset, size, _link, info in headers:
        name_at = names_at + name_offset
        name = file[name_at : file.index(b"\0", name_at)].decode()
        data = b"" if kind == _SHT_NOBITS else file[start + offset : start + offset + size]
        sections.append(Section(name, data, info))
    return sections
