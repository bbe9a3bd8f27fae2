"""The tools that judge the tests of kernels: mutations of sources, and calls that are repeated."""

from __future__ import annotations

import re
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
