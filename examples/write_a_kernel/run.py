"""Tries a kernel on the emulator, then on the GPU: `python examples/write_a_kernel/run.py`.

gelu_linear.cu is compiled twice: by the C++ compiler for the emulator, and by nvcc where there is a
GPU. Both libraries have the same function and are called the same way, with the addresses of
tensors in CPU or GPU memory.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

import thunderkittens as tk
from thunderkittens import emulation

SOURCE = Path(__file__).with_name("gelu_linear.cu")


def build_for_emulator(folder: Path) -> ctypes.CDLL:
    library = folder / "gelu_linear_emulated.so"
    flags = ["-Wno-unknown-pragmas"]
    command = emulation.compile_command(SOURCE, output=library, shared=True, flags=flags)
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def build_for_gpu(folder: Path, nvcc: str) -> ctypes.CDLL:
    library = folder / "gelu_linear.so"
    command = [
        nvcc,
        "-std=c++20",
        "-O3",
        "--expt-relaxed-constexpr",
        "-gencode=arch=compute_90a,code=sm_90a",
    ]
    command += ["-shared", "-Xcompiler=-fPIC", f"-I{tk.get_include()}/kittens", str(SOURCE)]
    subprocess.run([*command, "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def gelu_linear(
    library: ctypes.CDLL, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    y = x.new_empty(x.shape[0], w.shape[0])
    stream = torch.cuda.current_stream().cuda_stream if x.is_cuda else 0
    library.gelu_linear.restype = ctypes.c_char_p
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, w, bias, y)]
    sizes = [ctypes.c_int(n) for n in (x.shape[0], w.shape[0], x.shape[1])]
    error = library.gelu_linear(*pointers, *sizes, ctypes.c_void_p(stream))
    if error is not None:
        raise RuntimeError(error.decode())
    return y


def check(library: ctypes.CDLL, device: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    x = torch.randn(m, k, dtype=torch.bfloat16, device=device)
    w = torch.randn(n, k, dtype=torch.bfloat16, device=device) / k**0.5
    bias = torch.randn(n, device=device)
    y = gelu_linear(library, x, w, bias)
    expected = torch.nn.functional.gelu(x.double() @ w.double().t() + bias, approximate="tanh")
    torch.testing.assert_close(y.double(), expected, atol=1e-2, rtol=1e-2)


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = build_for_emulator(folder)
        for policy in emulation.POLICIES:
            os.environ["KITTENS_POLICY"] = policy
            for shape in ((64, 128, 64), (200, 264, 328)):
                check(library, "cpu", shape)
            print(f"emulator, {policy}: right")
        nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        if not torch.cuda.is_available() or not Path(nvcc).exists():
            print("no GPU or no nvcc: that is all here")
            return
        library = build_for_gpu(folder, nvcc)
        check(library, "cuda", (4096, 4096, 4096))
        print(f"{torch.cuda.get_device_name()}: right")


if __name__ == "__main__":
    main()
