"""tools/targets.py: what it counts of machine code, and that it refuses kernels that spill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.toolkit import find_tool
from test_build_tools import load

ROOT = Path(__file__).resolve().parents[1]
targets = load("targets")

SASS = """
\tcode for sm_80
\t\tFunction : _Z1fv
        /*0000*/                   LDGSTS.E.BYPASS.LTC128B.128 [R2], [R4.64] ;  /* 0x01 */
                                                                        /* 0x02 */
        /*0010*/              @!P0 LDGSTS.E [R2+0x10], [R4.64] ;  /* 0x01 */
        /*0020*/                   LDSM.16.M88.4 R12, [R8] ;  /* 0x01 */
        /*0030*/                   LDSM.16.MT88.4 R12, [R8] ;  /* 0x01 */
        /*0040*/                   LDSM.16.M88.2 R12, [R8] ;  /* 0x01 */
        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;  /* 0x01 */
        /*0060*/                   IMMA.16832.S8.S8 R4, R8, R12, R4 ;  /* 0x01 */
        /*0070*/              @UP1 F2FP.BF16.F32.PACK_AB R4, R5, R4 ;  /* 0x01 */
        /*0080*/                   F2FP.F16.E4M3.UNPACK_B R4, R5 ;  /* 0x01 */
        /*0090*/                   HMMA.16816.F32 R4, R8, R12, R4 ;  /* 0x01 */
        /*00a0*/                   IMAD.MOV.U32 R1, RZ, RZ, R2 ;  /* 0x01 */
        /*00b0*/              @P1  LDL.LU R1, [R2] ;  /* 0x01 */
\t\tFunction : _Z1gv
        /*0000*/                   EXIT ;  /* 0x01 */
"""


def test_instructions_are_counted_by_kernel():
    found = targets.census(SASS)
    assert found["_Z1fv"] == {
        "products": 3,
        "ldmatrix": 3,
        "wide_ldmatrix": 2,
        "copies": 2,
        "wide_copies": 1,
        "conversions": 2,
        "unpacked": 1,
        "local": 1,
    }
    assert not any(found["_Z1gv"].values())


def row(**fields: int) -> dict:
    values = {"family": "gemm", "source": "x", "arch": "sm_80", "stack_bytes": 0, "local": 0}
    values |= {"products": 64}
    return values | {"spill_store_bytes": 0, "spill_load_bytes": 0} | fields


def test_what_no_kernel_may_have():
    assert targets.problems([row()]) == []
    (spills,) = targets.problems([row(), row(spill_load_bytes=8, stack_bytes=8, local=2)])
    assert spills == "gemm/x for sm_80 spills: 8 bytes are stored and loaded"
    for fields in ({"stack_bytes": 16}, {"local": 3}):
        (local,) = targets.problems([row(**fields)])
        assert "bytes of local memory" in local
        assert targets.problems([row(products=0, **fields)]) == []


def environment() -> dict[str, str]:
    """With the disassembler on the path, which may be beside another compiler."""
    nvcc, cuobjdump = find_tool("nvcc"), find_tool("cuobjdump")
    if nvcc is None or cuobjdump is None:
        pytest.skip("no nvcc or no cuobjdump: set CUDA_HOME to a CUDA toolkit's folder")
    path = os.pathsep.join([os.environ["PATH"], str(Path(cuobjdump).parent)])
    return os.environ | {"CUDACXX": nvcc, "PATH": path}


@pytest.mark.timeout(600)
def test_a_portable_kernel_for_every_target(tmp_path):
    rows = tmp_path / "rows.json"
    command = [sys.executable, str(ROOT / "tools/targets.py"), "--only", "gemm/portable_64x64"]
    command += ["--json", str(rows)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = json.loads(rows.read_text())["kernels"]
    assert sorted({k["arch"] for k in kernels}) == ["sm_120", "sm_80", "sm_89", "sm_90"]
    assert len(kernels) == 8 * 4
    for kernel in kernels:
        assert 0 < kernel["registers"] <= 128
        assert kernel["products"] > kernel["unpacked"] == kernel["local"] == 0
        assert kernel["wide_ldmatrix"] == kernel["ldmatrix"] > 0
        assert kernel["wide_copies"] == kernel["copies"] > 0
        assert kernel["code_bytes"] > 0
    assert "sm_120: " in done.stdout


@pytest.mark.timeout(600)
def test_local_memory_is_found_in_machine_code(tmp_path, monkeypatch):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    source = tmp_path / "x.cu"
    source.write_text("""
        __global__ void kernel(float* x, int n) {
            float values[64];
            for (int i = 0; i < 64; ++i) values[i] = x[i] * i;
            for (int i = 0; i < n; ++i) x[i] = values[(i * n) & 63];
        }
    """)
    compiler = targets.Compiler(os.environ["CUDACXX"], tmp_path)
    (kernel,) = compiler.kernels(compiler.ptx(source, 80), 120)
    assert (kernel["stack_bytes"], kernel["spill_load_bytes"]) == (256, 0)
    assert kernel["local"] > 0
    assert len(targets.problems([row() | kernel | {"products": 64}])) == 1
    assert all(compiler.seconds[step] > 0 for step in ("PTX of compute_80", "sm_120"))
    assert compiler.bytes["sm_120"] > compiler.packed_bytes["sm_120"] > 0
