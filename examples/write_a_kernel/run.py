"""Tries a kernel on the emulator, then on the GPU: `python examples/write_a_kernel/run.py`.

gelu_linear.cu is compiled twice: by the C++ compiler for the emulator, and by nvcc where there is a
GPU. Both modules have the same function, of CPU and of CUDA tensors.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

import thunderkittens as tk
from thunderkittens import emulation

SOURCE = Path(__file__).with_name("gelu_linear.cu")


def build_for_gpu() -> ModuleType:
    return cpp_extension.load(
        "gelu_linear",
        [str(SOURCE)],
        extra_include_paths=[tk.get_include()],
        extra_cuda_cflags=["-std=c++20", "-O3", "-gencode=arch=compute_90a,code=sm_90a"],
    )


def check(module: ModuleType, device: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    x = torch.randn(m, k, dtype=torch.bfloat16, device=device)
    w = torch.randn(n, k, dtype=torch.bfloat16, device=device) / k**0.5
    bias = torch.randn(n, device=device)
    y = module.gelu_linear(x, w, bias)
    expected = torch.nn.functional.gelu(x.double() @ w.double().t() + bias, approximate="tanh")
    torch.testing.assert_close(y.double(), expected, atol=1e-2, rtol=1e-2)


def main() -> None:
    torch.manual_seed(0)
    module = emulation.load("gelu_linear", SOURCE)
    for policy in emulation.POLICIES:
        for shape in ((64, 128, 64), (200, 264, 328)):
            with tk.emulate(policy):
                check(module, "cpu", shape)
        print(f"emulator, {policy}: right")
    if not torch.cuda.is_available() or cpp_extension.CUDA_HOME is None:
        print("no GPU or no nvcc: that is all here")
        return
    check(build_for_gpu(), "cuda", (4096, 4096, 4096))
    print(f"{torch.cuda.get_device_name()}: right")


if __name__ == "__main__":
    main()
