"""Which GPUs run which kernels: those for Hopper, and the portable ones for all that came with
Ampere or later. What is asked is pure, so the GPUs need not be here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import thunderkittens as tk
from thunderkittens import _C, emulation, info

ROOT = Path(__file__).resolve().parents[1]
#: Compute capability, multiprocessors, shared memory of a block and L2 cache, in bytes, of some
#: GPUs (CUDA Programming Guide, technical specifications; data sheets).
GPUS = {
    "A100": ((8, 0), 108, 163 << 10, 40 << 20),
    "A10": ((8, 6), 72, 99 << 10, 6 << 20),
    "RTX 3090": ((8, 6), 82, 99 << 10, 6 << 20),
    "Orin": ((8, 7), 16, 163 << 10, 4 << 20),
    "L4": ((8, 9), 58, 99 << 10, 48 << 20),
    "L40S": ((8, 9), 142, 99 << 10, 96 << 20),
    "RTX 4090": ((8, 9), 128, 99 << 10, 72 << 20),
    "H100": ((9, 0), 132, 227 << 10, 50 << 20),
    "B200": ((10, 0), 148, 227 << 10, 126 << 20),
    "RTX 5090": ((12, 0), 170, 99 << 10, 96 << 20),
    "RTX PRO 6000": ((12, 0), 188, 99 << 10, 128 << 20),
    "GB10": ((12, 1), 48, 99 << 10, 24 << 20),
}
#: By the compute capability's major version.
ADA = {"L4", "L40S", "RTX 4090"}
AMPERE = {"A100", "A10", "RTX 3090", "Orin"}
CONSUMER_BLACKWELL = {"RTX 5090", "RTX PRO 6000", "GB10"}
#: What CMakeLists.txt has by default.
DEFAULT = "80,90a"


def device(name: str, **fields: int | bool) -> _C.DeviceProperties:
    (major, minor), sm_count, shared_bytes, l2_bytes = GPUS[name]
    properties = {
        "sm_count": sm_count,
        "shared_bytes_per_block": shared_bytes,
        "l2_bytes": l2_bytes,
        "major": major,
        "minor": minor,
    }
    return _C.DeviceProperties(**(properties | fields))


def portable_ops() -> set[str]:
    return {kernel["op"] for kernel in _C.kernels() if kernel["arch"] == 80}


@pytest.mark.parametrize("name", GPUS)
def test_hopper_alone_runs_native_kernels(name):
    assert _C.runs_native(device(name)) == (name == "H100")
    assert not _C.runs_native(device(name, portable_only=True))


@pytest.mark.parametrize(
    ("architectures", "native", "portable"),
    [
        ("90a", {"H100"}, set()),
        ("80,90a", {"H100"}, {*GPUS}),
        ("80-virtual", set(), {*GPUS}),
        (DEFAULT, {"H100"}, {*GPUS}),
        ("80-real", set(), AMPERE | ADA),
        ("86-real,90-real", set(), (AMPERE | ADA | {"H100"}) - {"A100"}),
        ("89,90a", {"H100"}, {*GPUS} - AMPERE),
        ("90a,120-real", {"H100"}, CONSUMER_BLACKWELL),
        ("100a", {"B200"}, set()),
        ("", set(), set()),
    ],
)
def test_what_a_build_runs_on(architectures, native, portable):
    """Machine code runs on later minor versions, PTX on all later GPUs, and that of an architecture
    with a letter on that alone."""
    for kind, expected in ((True, native), (False, portable)):
        found = {name for name in GPUS if _C.holds_code_for(device(name), kind, architectures)}
        assert found == expected
    assert not _C.holds_code_for(device("H100", portable_only=True), True, architectures)


def test_what_the_driver_compiles():
    """Of the default: nothing for GPUs whose major version has machine code."""
    text = (ROOT / "CMakeLists.txt").read_text()
    listed = re.search(r'THUNDERKITTENS_CUDA_ARCHS "(.*)" CACHE', text)
    assert listed is not None
    assert listed[1].replace(";", ",") == DEFAULT
    as_it_is = {name for name in GPUS if _C.holds_machine_code_for(device(name), DEFAULT)}
    compiled = {"B200", *CONSUMER_BLACKWELL}
    assert as_it_is == {*GPUS} - compiled
    for name in GPUS:
        gpu = device(name, portable_only=True)
        assert _C.holds_machine_code_for(gpu, DEFAULT) == (name not in {"H100", *compiled})
        assert not _C.holds_machine_code_for(gpu, "80-virtual")
        text = info._portable_state(gpu, DEFAULT)
        how = "compiled by the driver" if name in {"H100", *compiled} else "machine code"
        assert f"portable kernels, {how}" in text
        assert portable_ops() == set(text.removeprefix("ready for ").split(" (")[0].split(", "))


@pytest.mark.parametrize("name", GPUS)
def test_the_portable_kernels_that_are_chosen_fit(name):
    """Within the shared memory that a block may have."""
    gpu = device(name, portable_only=True)
    shared = {(k["op"], k["name"]): k["shared_bytes"] for k in _C.kernels()}
    for op in sorted(portable_ops()):
        for problem in info.EXAMPLES[op].values():
            kernel = _C.choose(op, problem, gpu)["kernel"]
            assert shared[op, kernel] <= gpu.shared_bytes_per_block


@pytest.mark.parametrize("name", GPUS)
def test_an_op_says_whether_it_has_a_kernel(name):
    """Where it has no portable one, a GPU that is no Hopper gets the reason."""
    gpu = device(name)
    for op in _C.ops():
        problem = next(iter(info.EXAMPLES[op].values()))
        reason = _C.unsupported(op, problem, gpu)
        assert reason == _C.no_code_for(gpu, op)
        if _C.no_code_for(gpu) == "":
            assert (reason == "") == (_C.runs_native(gpu) or op in portable_ops())


def test_portable_kernels_can_be_asked_for(monkeypatch):
    """Of every part of the package, by the environment."""
    for name in ("PORTABLE", "SHARED_BYTES"):
        monkeypatch.delenv(f"THUNDERKITTENS_{name}", raising=False)
    gpu = device("H100")
    assert not gpu.restricted().portable_only
    monkeypatch.setenv("THUNDERKITTENS_PORTABLE", "1")
    monkeypatch.setenv("THUNDERKITTENS_SHARED_BYTES", "101376")
    found = gpu.restricted()
    assert found.portable_only
    assert found.shared_bytes_per_block == 101376
    assert found.sm_count == gpu.sm_count
    assert device("A10", shared_bytes_per_block=50000).restricted().shared_bytes_per_block == 50000
    for text in ("none", "-1"):
        monkeypatch.setenv("THUNDERKITTENS_SHARED_BYTES", text)
        with pytest.raises(RuntimeError, match=f"SHARED_BYTES is '{text}'; it must be a number"):
            gpu.restricted()


@pytest.mark.skipif(emulation.problem is not None, reason=str(emulation.problem))
def test_the_emulator_is_restricted_as_gpus_are(monkeypatch):
    ops = {*_C.ops()} & {*emulation._module.ops()}
    monkeypatch.delenv("THUNDERKITTENS_PORTABLE", raising=False)

    def supported() -> set[str]:
        return {op for op in ops if emulation.supports(op, next(iter(info.EXAMPLES[op].values())))}

    assert supported() == ops
    with tk.emulate(portable=True):
        assert supported() == ops & portable_ops()
    monkeypatch.setenv("THUNDERKITTENS_PORTABLE", "1")
    assert supported() == ops & portable_ops()
