"""The tools that judge the tests of kernels: mutations of sources, and what the tests execute."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = """#pragma once
// wait(in_a_comment, phase);
template <int stages, bool a = (stages < 3)>
void kernel(Ring<stages> ring, int rows) {
    constexpr bool few = stages < 4;
    for (int row = 0; row < rows; row += 8, ring.advance()) {
        if (few) wait(shared.full[ring.stage], ring.phase);
        else skip(row / group);
        warpgroup::mma_async_wait<1>();
        if (row > 0) release(previous);
    }
    tma::expect_bytes(full, count * 2);
    load(elements(b, 0, head + 1, column));
    arch::fence_async_shared();
    warpgroup::sync(1);
    arch::store_release_global(flag, 1u);
    init_semaphore(full, 1), init_semaphore(empty, consumers * blocks);
    if (multicast) meet_cluster();
    for (int slot = 0; more(); phase = ++slot == g.stages ? wrapped(slot) : phase) {
        wait_cluster(shared.summed, phase);
        tma_load(TmaCoordinates{0, first, 0, batch}, 1u << (in_m * blocks));
        add(arch::map_shared_rank(from, rank));
        arrive_remote(shared.summed, 0);
    }
}
"""
# Of each class, by what it is called, and the line as it is written.
EXPECTED = {
    ("wait", "left out"): [
        "if (few) (M ? (void)0 : (void)(wait(shared.full[ring.stage], ring.phase)));",
        "(M ? (void)0 : (void)(warpgroup::mma_async_wait<1>()));",
        "if (multicast) (M ? (void)0 : (void)(meet_cluster()));",
        "(M ? (void)0 : (void)(wait_cluster(shared.summed, phase)));",
    ],
    ("phase", "phase"): [
        "if (few) wait(shared.full[ring.stage], (ring.phase) ^ M);",
        "wait_cluster(shared.summed, (phase) ^ M);",
    ],
    ("phase", "a stage fewer"): [
        "for (int slot = 0; more(); phase = ++slot == M + g.stages ? wrapped(slot) : phase) {"
    ],
    ("phase", "stage ring.stage"): ["if (few) wait(shared.full[other(ring.stage)], ring.phase);"],
    ("phase", "stage previous"): ["if (row > 0) release(other(previous));"],
    ("phase", "left out"): [
        "for (int row = 0; row < rows; row += 8, (M ? (void)0 : (void)(ring.advance()))) {"
    ],
    ("early", "before warpgroup::mma_async_wait<1>()"): [
        "{ if (M) { if (row > 0) release(previous); } } warpgroup::mma_async_wait<1>();"
    ],
    ("early", "one more product in flight"): [
        "(M ? (void)(warpgroup::mma_async_wait<1 + 1>()) : (void)(warpgroup::mma_async_wait<1>()));"
    ],
    ("bytes", "an arrival fewer"): [
        "init_semaphore(full, 1), init_semaphore(empty, M + consumers * blocks);"
    ],
    ("bytes", "16"): ["tma::expect_bytes(full, 16 * M + count * 2);"],
    ("boundary", "< 1"): ["for (int row = 0; row < M + rows; row += 8, ring.advance()) {"],
    ("boundary", "> 1"): ["if (row > M + 0) release(previous);"],
    ("index", "bit"): ["tma_load(TmaCoordinates{0, first, 0, batch}, 1u << M + (in_m * blocks));"],
    ("index", "block"): [
        "add(arch::map_shared_rank(from, other(rank)));",
        "arrive_remote(shared.summed, other(0));",
    ],
    ("index", "coordinate 1"): [
        "tma_load(TmaCoordinates{0, M + first, 0, batch}, 1u << (in_m * blocks));"
    ],
    ("index", "coordinate 0"): ["load(elements(M + b, 0, head + 1, column));"],
    ("index", "coordinate 2"): ["load(elements(b, 0, M + head + 1, column));"],
    ("index", "coordinate 3"): [
        "load(elements(b, 0, head + 1, M + column));",
        "tma_load(TmaCoordinates{0, first, 0, M + batch}, 1u << (in_m * blocks));",
    ],
    ("index", "/ group"): ["else skip(row / (M + group));"],
    ("fence", "left out"): ["(M ? (void)0 : (void)(arch::fence_async_shared()));"],
    ("barrier", "left out"): ["(M ? (void)0 : (void)(warpgroup::sync(1)));"],
    ("flag", "before warpgroup::sync(1)"): [
        "{ if (M) { arch::store_release_global(flag, 1u); } } warpgroup::sync(1);"
    ],
    ("flag", "no order"): [
        "(M ? (arch::store_global(flag, 1u)) : (arch::store_release_global(flag, 1u)));"
    ],
}


@pytest.fixture
def mutations(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import mutations

    return mutations


def test_mutations_of_every_class(mutations):
    source = mutations.Source("csrc/some/kernel_sm90.cuh", SOURCE)
    for finder in mutations.FINDERS:
        finder(source)
    every, written = source.found, {}
    assert {m.kind for m in every} == set(mutations.CLASSES)
    for m in every:
        source.found = [m]
        lines = mutations.mutated(source).splitlines()
        first = next(line for line in lines if "tk_" in line).strip()
        first = re.sub(r"-?tk_mutant\(-1\)", "M", first.replace("tk_other(-1, ", "other("))
        written.setdefault((m.kind, re.sub("[+-](?=1)", "", m.what)), []).append(first)
    assert {
        key: [line.replace("-16", "16") for line in lines] for key, lines in written.items()
    } == (EXPECTED)


def test_the_set_is_large_and_spread(mutations):
    _, every = mutations.all_mutations()
    selected = mutations.chosen(every, per_file=2, seed=0)
    assert len({m.key for m in every}) == len(every)
    assert len(selected) >= 150
    assert {m.kind for m in selected} == set(mutations.CLASSES)
    assert selected == mutations.chosen(every, per_file=2, seed=0)


def test_mutations_without_a_reason_to_survive_are_not_excused(mutations):
    """Lines of the list that no source has are of code that has changed."""
    _, every = mutations.all_mutations()
    keys = {m.key for m in every}
    for line in (ROOT / "tools/mutants_unseen.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            assert line.rsplit(" | ", 1)[0] in keys


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
    """One whose llvm-cov is there."""
    for name in ("clang++", *(f"clang++-{n}" for n in range(30, 15, -1))):
        if path := shutil.which(name):
            command = [path, "-print-prog-name=llvm-cov"]
            if shutil.which(subprocess.check_output(command, text=True).strip()):
                return path
    return None


CLANG = clang_that_counts()


@pytest.mark.skipif(CLANG is None, reason="needs clang++ and llvm-cov")
def test_branches_of_all_instances_are_added_up(tmp_path, monkeypatch):
    """A branch is one of the source: what one instance takes, the others need not."""
    monkeypatch.delenv("LLVM_PROFILE_FILE", raising=False)
    build, kernel = tmp_path / "build", tmp_path / "csrc/f_sm90.cuh"
    for folder in (build, kernel.parent):
        folder.mkdir(parents=True)
    kernel.write_text(KERNEL)
    calls = "int main() { return f<1>(2) + f<1>(1) + f<2>(1) == 18 ? 0 : 1; }\n"
    (build / "main.cpp").write_text('#include "csrc/f_sm90.cuh"\n' + calls)
    (build / "CMakeCache.txt").write_text(f"CMAKE_CXX_COMPILER:FILEPATH={CLANG}\n")
    flags = ["-fcoverage-mapping", "-fprofile-instr-generate=.coverage.counts/%m.profraw", "-O1"]
    flags += [f"-ffile-prefix-map={tmp_path}=.", "-fcoverage-compilation-dir=.", "-std=c++20"]
    flags += [f"-I{tmp_path}"]
    command = [CLANG, *flags, "main.cpp", "-o", "_emulator.so"]
    subprocess.run(command, cwd=build, check=True)
    subprocess.run([build / "_emulator.so"], cwd=tmp_path, check=True)
    command = [sys.executable, ROOT / "tools/coverage.py", build, "--missing", "--fail-under"]
    for level, status in (("60", 0), ("61", 1)):
        result = subprocess.run([*command, level], cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == status, result.stdout + result.stderr
        assert re.search(r" 6/10 +60\.0%  csrc/f_sm90\.cuh\n", result.stdout), result.stdout
        assert "lines 9\n" in result.stdout
        assert "branches 3 true, 5 true, 6 false, 9 case 5\n" in result.stdout


def test_recorded_arrays_lie_as_they_did(monkeypatch):
    """With their strides and alignment, and the bytes in between, which a kernel must not read."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    import seeds

    for x in (
        np.arange(240, dtype=np.int16).reshape(10, 24)[1:7, 3:19:2].T,
        np.broadcast_to(np.float32(3), (4, 5)),
        np.ones((0, 3), np.uint8),
    ):
        y = seeds.unpacked(seeds.packed(x))
        assert np.array_equal(x, y)
        assert y.dtype == x.dtype
        assert not np.shares_memory(x, y)
        if x.size:
            assert x.strides == y.strides
            places = [a.__array_interface__["data"][0] % seeds.ALIGNMENT for a in (x, y)]
            assert places[0] == places[1]
