"""The lists of what is compiled, `csrc/<family>/instances.txt`, and the tool that reads them.

A kernel that no list names would be missed by the linker alone. One that only a list names would be
compiled for nobody: the table of kernels is compared with the registry in test_package.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LISTS = sorted((ROOT / "csrc").glob("*/instances.txt"))
LIST = """
# Of a family that is not there.
[enums]
dtype = DType

[a kernel]
header = room/a_sm90.cuh
namespace = some
function =
    void launch<config_of({...})>(const Params&, Stream);
    void prepare<$dtype,
        $rows>(Stream)
instances =
    # The fields of an entry may stand on lines of their own.
    ${dtype}_a
        rows=64,128 dtype=bf16,fp16
    bf16_fused   rows=64 dtype=bf16 fused=true

[what is no template]
header = room/b_sm90.cuh
namespace = some
instances = b
"""
BF16 = """\
// Written from csrc/some/instances.txt by tools/instances.py.
#include "csrc/some/room/a_sm90.cuh"

namespace thunderkittens::some {
template void launch<config_of({.rows = 64, .dtype = DType::bf16})>(const Params&, Stream);
template void prepare<DType::bf16, 64>(Stream);
template void launch<config_of({.rows = 128, .dtype = DType::bf16})>(const Params&, Stream);
template void prepare<DType::bf16, 128>(Stream);
}  // namespace thunderkittens::some
"""


def run(source: Path, folder: Path, *suffixes: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/instances.py"), str(source), str(folder)]
    command += [word for suffix in suffixes for word in ("--suffix", suffix)]
    return subprocess.run(command, capture_output=True, text=True)


def listed(folder: Path, text: str) -> Path:
    source = folder / "some/instances.txt"
    source.parent.mkdir(exist_ok=True)
    source.write_text(text)
    return source


def test_a_list_becomes_files(tmp_path):
    done = run(listed(tmp_path, LIST), tmp_path / "out", ".cu", ".cpp")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["bf16_a", "fp16_a", "bf16_fused", "b"]
    files = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    stems = done.stdout.split()
    assert files.keys() == {f"{stem}{suffix}" for stem in stems for suffix in (".cu", ".cpp")}
    assert files["bf16_a.cu"] == files["bf16_a.cpp"] == BF16
    assert ".dtype = DType::bf16, .fused = true})" in files["bf16_fused.cu"]
    assert "template" not in files["b.cu"]


def test_sections_share_a_file(tmp_path):
    text = LIST.replace("namespace = some\ninstances = b", "namespace = other\ninstances = bf16_a")
    done = run(listed(tmp_path, text), tmp_path / "out")
    assert done.stdout.split() == ["bf16_a", "fp16_a", "bf16_fused"], done.stderr
    first, _, rest = BF16.partition("\n\n")
    both = f'{first}\n#include "csrc/some/room/b_sm90.cuh"\n\n{rest}'
    other = "\nnamespace thunderkittens::other {\n}  // namespace thunderkittens::other\n"
    assert (tmp_path / "out/bf16_a.cu").read_text() == both + other


def test_only_what_changes_is_written_again(tmp_path):
    out = tmp_path / "out"
    run(listed(tmp_path, LIST), out)
    for path in out.iterdir():
        os.utime(path, (1, 1))
    done = run(listed(tmp_path, LIST.replace("fused=true", "fused=false")), out)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir() if path.stat().st_mtime != 1} == {"bf16_fused.cu"}
    assert run(listed(tmp_path, LIST.partition("[what")[0]), out).returncode == 0
    assert not (out / "b.cu").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("header = room/a_sm90.cuh\n", "", "[a kernel]: 'header' is not given"),
        ("dtype=bf16 fused", "dtype= fused", "'dtype=' is not a new field and its values"),
        ("dtype=bf16 fused=true", "rows=64", "'rows=64' is not a new field"),
        ("dtype=bf16,fp16", "dtype=bf16,bf16", "bf16_a has this twice: void launch<"),
        ("${dtype}_a", "${type}_a", "'type' is not given"),
        ("$rows>", "$columns>", "'columns' is not given"),
        ("instances = b", "instances = a-b", "'a-b' is no stem of a file"),
        ("instances = b", "instances = b_sm80", "b_sm80 has to be named as its header, for room/b"),
        ("header = room/b_sm90.cuh", "header = room/b_sm80.cuh", "b has to be named as its header"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(old, new, message, tmp_path):
    assert LIST.count(old) == 1
    done = run(listed(tmp_path, LIST.replace(old, new)), tmp_path / "out")
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("source", LISTS, ids=lambda path: path.parent.name)
def test_a_header_of_a_list_is_there(source, tmp_path):
    run(source, tmp_path)
    for path in tmp_path.iterdir():
        included = [line for line in path.read_text().split("\n") if line.startswith("#include")]
        assert all((ROOT / line.split('"')[1]).is_file() for line in included), path.name
