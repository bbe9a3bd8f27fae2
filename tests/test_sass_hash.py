"""tools/sass_hash.py on libraries put together from GPU images of a few bytes."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def image(kernels: dict[str, tuple[bytes, bytes, int]]) -> bytes:
    """A GPU image: kernels by name, with their code, constants and number of registers."""
    sections = [(".shstrtab", b"", 0)]
    for name, (code, constants, registers) in kernels.items():
        sections.append((f".text.{name}", code, registers << 24))
        sections.append((f".nv.constant2.{name}", constants, 0))
        sections.append((f".nv.constant0.{name}", name.encode(), 0))
    names = b"".join(name.encode() + b"\0" for name, _, _ in sections)
    contents = [names, *(data for _, data, _ in sections[1:])]
    table_at = 64 + sum(map(len, contents))
    header = struct.pack("<4sBB10xHH", b"\x7fELF", 2, 1, 2, 190)
    header += struct.pack("<IQQQIHHHHHH", 1, 0, 0, table_at, 0, 64, 0, 0, 64, len(sections), 0)
    table, name_at, at = b"", 0, 64
    for (name, _, info), data in zip(sections, contents, strict=True):
        table += struct.pack("<IIQQQQIIQQ", name_at, 1, 0, 0, at, len(data), 0, info, 1, 0)
        name_at, at = name_at + len(name) + 1, at + len(data)
    return header + b"".join(contents) + table


def library(path: Path, *images: bytes) -> Path:
    path.write_bytes(b"\x7fELF\x02\x01 of the host " + b"between".join(images) + b"end")
    return path


def run(*arguments: Path | str) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "tools/sass_hash.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, done.stdout


ONE, TWO = (b"code of one", b"literal", 168), (b"code of two", b"", 90)


def test_a_renamed_kernel_is_the_same(tmp_path):
    old = library(tmp_path / "old.so", image({"one": ONE, "two": TWO}))
    new = library(tmp_path / "new.so", image({"two": TWO}), image({"moved_one": ONE}))
    status, text = run(old, new)
    assert status == 0
    assert "same 2, changed 0, gone 0, added 0" in text


@pytest.mark.parametrize(
    "change",
    [
        (b"code of ONE", ONE[1], ONE[2]),
        (ONE[0], b"another", ONE[2]),
        (ONE[0], ONE[1], ONE[2] + 8),
    ],
    ids=["code", "constants", "registers"],
)
def test_a_changed_kernel_is_named(tmp_path, change):
    old = library(tmp_path / "old.so", image({"one": ONE, "two": TWO}))
    new = library(tmp_path / "new.so", image({"one": change, "two": TWO}))
    status, text = run(old, new)
    assert status == 1
    assert "same 1, changed 1, gone 0, added 0" in text
    assert f"changed: {len(change[0])} bytes, one" in text


def test_kernels_gone_and_added(tmp_path):
    old = library(tmp_path / "old.so", image({"one": ONE, "twin": ONE}))
    new = library(tmp_path / "new.so", image({"one": ONE, "other": TWO}))
    status, text = run(old, new)
    assert status == 1
    assert "same 1, changed 0, gone 1, added 1" in text
    assert "gone: 11 bytes, twin" in text
    assert "added: 11 bytes, other" in text


def test_saved_hashes_stand_for_a_build(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    library(package / "_cuda.so", image({"one": ONE, "two": TWO}))
    status, text = run(package, "--save", tmp_path / "hashes.json")
    assert status == 0
    assert "2 kernels" in text
    saved = json.loads((tmp_path / "hashes.json").read_text())["kernels"]
    assert {row["symbol"] for row in saved} == {"one", "two"}
    assert run(tmp_path / "hashes.json", package)[0] == 0
