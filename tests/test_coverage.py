"""tools/coverage.py: what it counts, and that the tests of kernels hold the level of its record."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tool():
    """By its file, as there is a package of its name."""
    spec = importlib.util.spec_from_file_location("coverage_tool", ROOT / "tools/coverage.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


KERNEL = """template <int n> [[gnu::always_inline]] inline int f(int x) {
    if constexpr (n > 1) {
        if (x > 5) return 1;
    }
    if (x > n) return x > 2 ? 2 : 3;
    if (n == 1 && x < 9) x += 7;
    switch (x) {
        case 1: return 4;
        case 5: x = 0; break;
    }
    return x + 3;
}
"""


def clang_that_counts():
    """One that the build takes, and whose llvm-cov is there."""
    for name in ("clang++", *(f"clang++-{n}" for n in range(30, 15, -1))):
        if path := shutil.which(name):
            version = subprocess.check_output([path, "-dumpversion"], text=True)
            command = [path, "-print-prog-name=llvm-cov"]
            program = subprocess.check_output(command, text=True).strip()
            if int(version.split(".")[0]) >= 16 and shutil.which(program):
                return path
    return None


CLANG = clang_that_counts()


@pytest.mark.skipif(CLANG is None, reason="needs clang++ and llvm-cov")
@pytest.mark.parametrize("family", ["sm90", "sm80"])
def test_branches_of_all_instances_are_added_up(family, tool, tmp_path, monkeypatch):
    """A branch is one of the source: what one instance takes, the others need not. What counts is
    what the build's list names."""
    monkeypatch.delenv("LLVM_PROFILE_FILE", raising=False)
    build, kernel = tmp_path / "build", tmp_path / f"csrc/f_{family}.cuh"
    for folder in (build, kernel.parent):
        folder.mkdir(parents=True)
    kernel.write_text(KERNEL)
    calls = "int main() { return f<1>(2) + f<1>(1) + f<2>(1) == 18 ? 0 : 1; }\n"
    (build / "main.cpp").write_text(f'#include "csrc/{kernel.name}"\n' + calls)
    (build / "CMakeCache.txt").write_text(f"CMAKE_CXX_COMPILER:FILEPATH={CLANG}\n")
    flags = ["-fcoverage-mapping", "-fprofile-instr-generate=.coverage.counts/%m.profraw", "-O1"]
    flags += [f"-ffile-prefix-map={tmp_path}=.", "-fcoverage-compilation-dir=.", "-std=c++20"]
    flags += [f"-I{tmp_path}"]
    listed = re.search(r'"(\[clang\].*?)"', (ROOT / "CMakeLists.txt").read_text())
    (build / "coverage.list").write_text(listed[1].replace(r"\n", "\n"))
    flags += ["-fprofile-list=coverage.list"]
    command = [CLANG, *flags, "main.cpp", "-o", "_emulator.so"]
    subprocess.run(command, cwd=build, check=True)
    subprocess.run([build / "_emulator.so"], cwd=tmp_path, check=True)
    command = [sys.executable, ROOT / "tools/coverage.py", build, "--missing", "--fail-under"]
    for level, status in (("60", 0), ("61", 1)):
        result = subprocess.run([*command, level], cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == status, result.stdout + result.stderr
        assert re.search(rf" 6/10 +60\.0%  csrc/f_{family}\.cuh\n", result.stdout), result.stdout
        assert "lines 9\n" in result.stdout
        assert "branches 3 true, 5 true, 6 false, 9 case 5\n" in result.stdout
    subprocess.run([*command, "0", "--record", "record.json"], cwd=tmp_path, check=True)
    entry = json.loads((tmp_path / "record.json").read_text())[f"csrc/{kernel.name}"]
    assert entry["branches"] == [6, 10]
    assert entry["code"] == tool.hash_of(KERNEL)


# ---- the record ----


def test_the_record_holds(tool):
    """The way to measure again is in CONTRIBUTING.md, "How good the tests of a kernel are"."""
    record = json.loads((ROOT / tool.RECORD).read_text())
    assert tool.problems(record, tool.hashes(ROOT)) == []


def entry_of(code, taken, every):
    return {"code": code, "lines": [taken, every], "branches": [taken, every]}


def test_what_a_record_does_not_hold_for(tool):
    record = {"a": entry_of("1", 86, 90), "b": entry_of("2", 10, 10)}
    now = {"a": "1", "b": "2"}
    assert tool.problems(record, now) == []
    assert tool.problems(record, {"a": "1", "moved": "2"}) == []
    assert tool.problems(record, {"a": "1"}) == []  # b is gone
    assert tool.problems(record, now | {"c": "3"}) == ["c is not in the record"]
    (changed,) = tool.problems(record, {"a": "1", "b": "3"})
    assert "files with 10/100  10.0% of the branches have changed" in changed
    assert changed.endswith(": b")
    assert tool.problems(record | {"a": entry_of("1", 87, 91)}, {"a": "1", "b": "3"}) == []
    (low,) = tool.problems(record | {"b": entry_of("2", 5, 10)}, now)
    assert "the tests take 91/100  91.0% of the branches; the bar is 92%" in low
    assert tool.problems({}, {})  # of nothing


def test_some_files_are_recorded_where_they_are_no_less(tool, capsys):
    old = {"a": entry_of("1", 8, 10), "b": entry_of("2", 9, 10), "old": entry_of("3", 5, 5)}
    rows = {"a": [1, 2, 3, 10], "b": [7, 8, 19, 20], "c": [1, 1, 2, 2]}
    now = {"a": "1", "b": "4", "c": "5", "moved": "3"}
    every = tool.updated(old, rows, now, "")
    assert {name: entry["branches"] for name, entry in every.items()} == {
        "a": [3, 10], "b": [19, 20], "c": [2, 2], "moved": [0, 0],
    }  # fmt: skip
    some = tool.updated(old, rows, now, "a|b")
    assert some == {"a": old["a"], "b": every["b"], "moved": old["old"]}
    assert capsys.readouterr().out == "not recorded: a has 3/10  30.0%, in the record 8/10  80.0%\n"


def test_comments_and_blanks_are_no_code(tool):
    code = '#include "a.h"\nint f() { return 1; }  // one\nauto s = "//";\n'
    same = '#include "b.h"\n/* one\n  */int f() {\n    return 1;\n}\nauto s = "//";\n'
    assert tool.hash_of(code) == tool.hash_of(same)
    for other in (code.replace("1", "2"), code.replace('"//"', '"/"'), "#define a\n" + code):
        assert tool.hash_of(code) != tool.hash_of(other)
