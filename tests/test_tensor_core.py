"""The arithmetic of the tensor cores on the emulator, against results of an H200, bit for bit.

`tensor_core.npz` holds single instructions on an H200: rows of A and B, C, and D = C + A B^T, as
bits, in pieces of 4 x 4 results. Their operands are drawn from several distributions: narrow and
wide ranges of exponents, all bit patterns, zeros, subnormals, the smallest and the largest numbers,
infinities and NaN; C is near the products' sum, cancels it, or lies far away.

    <A>_<B>_<C and D>.a, .b, .c    operands
                     .wgmma        wgmma, m64n64
                     .mma          mma.sync, where it differs from wgmma: with 8-bit operands
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from helpers.emulated import compile_program
from helpers.toolkit import find_tool

HERE = Path(__file__).resolve().parent
FROZEN = np.load(HERE / "tensor_core.npz")
# In the order of instructions.cu.
KINDS = [
    "bf16_bf16_f32",
    "f16_f16_f32",
    "e4m3_e4m3_f32",
    "e4m3_e5m2_f32",
    "e5m2_e4m3_f32",
    "e5m2_e5m2_f32",
    "f16_f16_f16",
    "e4m3_e4m3_f16",
]
INSTRUCTIONS = [(kind, how) for kind in KINDS for how in ("wgmma", "mma")]
INSTRUCTIONS.remove(("e4m3_e4m3_f16", "mma"))  # the library has none
PIECE, PIECES = 4, 16  # pieces lie on the diagonal of a 64 x 64 product


def build(back_end: str, output: Path) -> None:
    sources = [HERE / "kittens/instructions.cu"]
    if back_end == "emulator":
        sources.append(HERE / "kittens/emulator/device_memory.cpp")
        compile_program(*sources, output=output)
        return
    nvcc = find_tool("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc: set CUDACXX")
    sources.append(HERE / "kittens/device_memory.cu")
    flags = ["-std=c++20", "-gencode", "arch=compute_90a,code=sm_90a"]
    flags += ["--expt-relaxed-constexpr", f"-I{HERE.parent}/kittens"]
    subprocess.run([nvcc, *flags, *map(str, sources), "-o", str(output)], check=True)


@pytest.fixture(
    scope="module", params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)], ids=str
)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("instructions") / request.param
    build(request.param, output)
    return output


def spread(pieces: np.ndarray, products: int) -> np.ndarray:
    """Rows of pieces (n, 4, K) as those of 64 x K products."""
    rows = np.zeros((products * PIECES, *pieces.shape[1:]), pieces.dtype)
    rows[: len(pieces)] = pieces
    return rows


def is_nan(bits: np.ndarray) -> np.ndarray:
    return np.isnan(bits.view(np.float16 if bits.itemsize == 2 else np.float32))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "how"), INSTRUCTIONS, ids=str)
def test_results_are_those_of_an_h200(program, tmp_path, kind, how):
    a, b, c = (FROZEN[f"{kind}.{name}"] for name in "abc")
    expected = FROZEN[f"{kind}.{how}"] if f"{kind}.{how}" in FROZEN else FROZEN[f"{kind}.wgmma"]
    products = -(-len(a) // PIECES)
    diagonal = np.zeros((products, PIECES, PIECE, PIECES, PIECE), c.dtype)
    each = np.arange(PIECES)
    # Advanced indices in front and behind: their dimension comes first.
    diagonal[:, each, :, each, :] = (
        spread(c, products).reshape(products, PIECES, PIECE, PIECE).swapaxes(0, 1)
    )
    operands = (spread(a, products), spread(b, products), diagonal)
    (tmp_path / "in").write_bytes(b"".join(x.tobytes() for x in operands))
    numbers = [KINDS.index(kind), ("wgmma", "mma").index(how), products]
    subprocess.run(
        [str(program), *map(str, numbers), str(tmp_path / "in"), str(tmp_path / "out")],
        check=True,
        timeout=120,
    )
    out = np.fromfile(tmp_path / "out", c.dtype).reshape(diagonal.shape)
    results = out[:, each, :, each, :].swapaxes(0, 1).reshape(-1, PIECE, PIECE)[: len(a)]
    assert np.array_equal(results, expected)
    assert 0 < is_nan(expected).sum() < expected.size / 4
    assert len(np.unique(expected)) > expected.size / 3
