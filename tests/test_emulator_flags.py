"""Defects of order in global memory that the emulator must find, and launches that come twice.

The kernels of `kittens/emulator/flags.cuh` hold planted mistakes, one at a time, as those of
`test_emulator_defects.py` do. Each is launched twice on the same memory: a flag that is left set is
a mistake of the second launch.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import thunderkittens as tk
from helpers.emulated import compile_program
from thunderkittens import emulation

if emulation.problem is not None:
    pytest.skip(emulation.problem, allow_module_level=True)

POLICIES = emulation.POLICIES
HERE = Path(__file__).resolve().parent
UNORDERED = r"no barrier or flag \(release and acquire\) in between"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Runs a defect under a policy for some seeds; one line each."""
    program = compile_program(
        HERE / "kittens/emulator/flags.cpp",
        output=tmp_path_factory.mktemp("flags") / "flags",
        flags=["-Wno-unknown-pragmas"],
    )

    def run(*arguments: object) -> list[str]:
        line = [str(program), *map(str, arguments)]
        return subprocess.run(
            line, check=True, capture_output=True, text=True, timeout=300
        ).stdout.splitlines()

    return run


FOUND = {
    "missing_barrier_before_release": f"load_global of byte 4 of 'work'.*{UNORDERED}",
    "missing_barrier_after_acquire": f"load_global of byte 4 of 'work'.*{UNORDERED}",
    "missing_acquire": f"load_global of byte .* of 'work'.*{UNORDERED}",
    "released_too_early": f"load_global of byte 0 of 'work'.*{UNORDERED}",
    "flag_left_set": f"load_global of byte 0 of 'work'.*{UNORDERED}",
    "missing_release_fence": f"byte 0 of 'flags'.*{UNORDERED}",
    "missing_acquire_fence": f"byte 0 of 'flags'.*{UNORDERED}",
    "miscounted": UNORDERED,
    "counter_left_set": f"load_global of byte 0 of 'work'.*{UNORDERED}",
    "missing_proxy_fence": r"bulk_load of byte 0 of 'work'.*no fence.proxy.async \(fence_async\)",
    "fence_of_shared_memory": "bulk_load of byte 0 of 'work'.*no fence.proxy.async",
    "missing_store_wait": "a TMA store of .* that is in flight: no tma_store_wait",
    "wait_for_reads_only": "a TMA store of .* that is in flight: no tma_store_wait",
    "two_writers": f"store_global to byte .* of 'out'.*{UNORDERED}",
    "addition_before_store": f"reduce_add_global to byte .* of 'out'.*{UNORDERED}",
    "copy_onto_addition": f"store_global to byte .* of 'out'.*{UNORDERED}",
    "overlapping_copies_differ": "bulk_store to byte 592 of 'out' brings another value than",
    "store_differs_from_copy": "bulk_store to byte 80 of 'out' brings another value than",
}


@pytest.mark.parametrize("defect", FOUND)
def test_a_planted_defect_is_found(flags, defect):
    lines = flags(defect, "on_wait", 2) + flags(defect, "late_mma", 2)
    assert any(re.search(FOUND[defect], line) for line in lines), lines
    assert any(re.search(r"kernel void defects::\w+<.*block \(\d", line) for line in lines)


def test_the_table_of_defects_is_complete(flags):
    assert {line.split()[0] for line in flags()} == {"none", *FOUND}


@pytest.mark.parametrize("policy", POLICIES)
def test_correct_kernels_raise_no_alarm(flags, policy):
    """On one host thread and on two, by turns."""
    assert flags("none", policy, 20) == ["right"] * 20


# ---- calls whose kernels have a workspace, twice on the same memory ----


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("splits", "blocks"), [(3, 3), (4, 4)])
def test_a_replayed_split_k_product(policy, splits, blocks):
    """Partial sums of split-K, and of stream-K with its fix-up."""
    m, n, k = (128, 136, 520) if splits == 3 else (128, 264, 1160)
    a, b = torch.randint(-4, 5, (m, k)).bfloat16(), torch.randint(-4, 5, (k, n)).bfloat16()
    tile = {"strategy": "split_k", "block_m": 128, "block_n": 192, "stages": 5, "consumers": 2}
    tile |= {"splits": splits, "blocks": blocks}
    with tk.emulate(policy, seed=n, config=tile, replay=True) as run:
        out = tk.gemm(a, b)
    assert "split_k" in run.kernels[0]["kernel"]
    assert torch.equal(out, (a.float() @ b.float()).bfloat16())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dim", [128, 256])
def test_a_replayed_gradient_of_attention_in_order(policy, dim):
    """Blocks add to dQ in turns, which a kernel before clears."""
    q, k, v = (torch.randn(1, 1, 200, dim).bfloat16().requires_grad_() for _ in range(3))
    torch.use_deterministic_algorithms(True)
    try:
        gradients = []
        for replay in (False, True):
            with tk.emulate(policy, seed=dim, sm_count=8, replay=replay):
                out = tk.attention(q, k, v, causal=True)
                gradients.append(torch.autograd.grad(out.float().square().sum(), (q, k, v)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))
