"""The defects that the emulator must find.

The kernels of `kittens/emulator/*.cuh` hold planted mistakes, one at a time. A mistake counts
as found when it raises an error, ends in a deadlock report or gives wrong values under on_wait or
late_mma, the two policies that every test should run. Without one, all policies must be silent.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.emulated import compile_program
from thunderkittens import emulation

if emulation.problem is not None:
    pytest.skip(emulation.problem, allow_module_level=True)

POLICIES = emulation.POLICIES
HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def defects(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Runs a defect under a policy for some seeds; one line each."""
    program = compile_program(
        HERE / "kittens/emulator/defects.cpp",
        output=tmp_path_factory.mktemp("defects") / "defects",
        flags=["-Wno-unknown-pragmas"],
    )

    def run(*arguments: object) -> list[str]:
        line = [str(program), *map(str, arguments)]
        return subprocess.run(
            line, check=True, capture_output=True, text=True, timeout=300
        ).stdout.splitlines()

    return run


OVERWRITES = "to shared address 0x.* last read by block .* lane .*: no barrier"
# What the message must say; None where a defect shows in the values alone.
FOUND = {
    "missing_full_wait": "no wait for the phase",
    "wrong_phase": "no wait for",
    "early_release": "which an operation in flight .* still reads",
    "missing_empty_wait": "room for 0|still reads|no wait",
    "expect_too_few_bytes": "-16 bytes pending",
    "expect_too_many_bytes": " 16 bytes pending",
    "missing_mma_wait": None,
    "missing_accumulator_fence": "without wgmma_fence",
    "missing_commit": None,
    "wrong_swizzle": None,
    "swapped_transpose": None,
    "wrong_tile_coordinate": None,
    "misaligned_coordinate": "must be a multiple of 16 bytes",
    "lost_arrive": "deadlock.*mbarrier 0x[0-9a-f]+ .*1 of 2 arrivals",
    "too_many_arrivals": "room for|still reads",
    "missing_init_fence": "no mbarrier_init_fence",
    "missing_init_barrier": "no barrier .* between the initialisation|not an initialised mbarrier",
    "missing_store_fence": "no fence.proxy.async",
    "store_without_read_wait": "no tma_store_read_wait",
    "too_many_registers": "wants 256 per thread",
    "registers_of_one_block": "increase_registers to 240 is past the block's budget of 32768",
    "registers_past_launch": "wants 240 per thread",
    "wrong_barrier_count": "named barrier 1: this thread counts",
    "early_access_to_global_memory": "before wait_for_dependencies",
    "diverging_warpgroup": "the warpgroup diverges",
    "missing_operand_fence": "no fence.proxy.async",
    "missing_operand_barrier": r"no barrier \(release and acquire\)",
    "operand_written_in_flight": "operand A of a wgmma in flight",
    "tile_written_in_flight": "wgmma|still reads",
    "missing_block_barrier": r"no barrier \(release and acquire\)",
    "missing_warp_barrier": r"no barrier \(release and acquire\)",
    "diverging_shuffle": "other lanes of its warp in shuffle_xor",
    "missing_cp_async_wait": "no cp_async_wait",
    "tall_grid": r"a grid of \(1, 65536, 1\) blocks; at most \(2147483647, 65535, 65535\)",
    "global_store_out_of_bounds": "out of bounds: byte 1024 of 'out', which has 1024",
    "shared_store_out_of_bounds": "out of bounds; the block has",
    "misaligned_load": "is not a multiple of 16 bytes",
    "store_into_input": "writes to 'in', which is an input",
    "missing_cluster_barrier": "between the initialisation|not an initialised mbarrier",
    "missing_exit_barrier": "which has ended",
    "relaxed_release": r"no barrier \(release and acquire\)",
    "wrong_multicast_mask": "of a cluster of 2",
    "lost_turn": "deadlock.*warp 0, lanes 0x1: waits for what it polls",
    "tile_before_segment": "begins before its segment",
    "segment_beyond_rows": "segment is not within the layout's rows",
    "wrong_segment": None,
    "store_before_others_have_read": f"store_shared {OVERWRITES}",
    "store_before_other_lanes_have_read": f"store_shared {OVERWRITES}",
    "cp_async_before_others_have_read": f"cp_async {OVERWRITES}",
    "arrival_before_other_lanes_have_read": f"bulk_load {OVERWRITES}",
    "arrival_of_half_the_warps": f"bulk_load {OVERWRITES}",
    "store_before_a_copy_has_read": f"store_shared {OVERWRITES}",
    "stmatrix_before_ldmatrix": f"stmatrix {OVERWRITES}",
    "message_taken_by_a_relaxed_arrival": f"store_cluster_shared {OVERWRITES}",
    "store_before_the_peer_has_read": f"store_shared {OVERWRITES}",
    "store_before_the_peer_has_copied": "still reads|last read by a copy that signals mbarrier",
    "block_ends_before_its_copy": "the block ends while a copy to another block still reads",
    "rows_of_another_warp": "stmatrix .* which an operation in flight .* still reads",
    "operand_before_all_parts_are_over": "which warp 1's part of a wgmma reads: no barrier",
    "one_part_tells_of_all": "store_shared .* which warp 1's part of a wgmma reads: no barrier",
    "stage_of_one_block": "tma_load_multicast .* (reads|writes: no wait)",
    "stage_of_a_product_in_flight": "tma_load_multicast .* reads",
}


@pytest.mark.parametrize("defect", FOUND)
def test_a_planted_defect_is_found(defects, defect):
    lines = defects(defect, "on_wait", 1) + defects(defect, "late_mma", 1)
    assert any(line != "right" for line in lines)
    if FOUND[defect] is None:
        return
    assert any(re.search(FOUND[defect], line) for line in lines), lines
    # The message says where.
    assert any(re.search(r"kernel void defects::\w+<.*(block|grid of) \(\d", x) for x in lines)


def test_the_table_of_defects_is_complete(defects):
    assert {line.split()[0] for line in defects()} == {"none", *FOUND}


@pytest.mark.parametrize("policy", POLICIES)
def test_correct_kernels_raise_no_alarm(defects, policy):
    assert defects("none", policy, 20) == ["right"] * 20


def test_a_deadlock_names_what_each_warp_waits_for(defects):
    (line,) = defects("lost_arrive", "on_wait", 1)
    first, *warps = line.split("|")
    assert "deadlock in kernel" in first
    assert all(re.search(r"block \(0, 0, 0\), warp \d+.*: waits for", w) for w in warps)
    assert any("warp 8, lanes 0x1: waits for" in w for w in warps)  # the producer's one thread
