"""Calls from threads that have not used CUDA: the driver has no current context there, which the
encoding of tensor maps needs. PyTorch's own threads of the backward are such, too."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import thunderkittens as tk
from helpers.samples import (
    MUTATING,
    assert_equal,
    every_differentiable_sample,
    every_sample,
    leaves,
    state_of,
    with_state,
)
from thunderkittens import emulation

HERE = Path(__file__).resolve().parent
THREADS = 8


def has_context() -> bool:
    context = ctypes.c_void_p()
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value is not None


def check_fresh_threads(calls, expected) -> None:
    """Each of `calls` in a thread of its own, all at a time, as the first that it does with CUDA;
    and once more."""
    failures = []
    start = threading.Barrier(len(calls))

    def work(call):
        try:
            start.wait()
            assert not has_context()
            for _ in range(2):
                assert_equal(call(), expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def forward_of(sample, tensors):
    """The call, whose first work on the GPU is the op's: not the copy of a state."""
    if sample.op not in MUTATING:
        return lambda: sample.function(*tensors)
    kept = state_of(sample.op, tensors)
    state = tuple(x.clone() for x in kept)
    arguments = with_state(sample.op, tensors, state)

    def call():
        out = getattr(tk, sample.op)(*arguments, **sample.options)
        for x, y in zip(state, kept, strict=True):
            x.copy_(y)
        return [out]

    return call


# In a new thread the first device is the current one, also for tensors on the second.
@pytest.fixture(params=range(max(1, min(2, torch.cuda.device_count()))))
def gpu(request: pytest.FixtureRequest) -> str:
    return f"cuda:{request.param}"


@pytest.mark.gpu
@every_sample
def test_forward(gpu, sample):
    tensors = [x.detach() for x in leaves(sample, gpu)]
    expected = forward_of(sample, tensors)()
    torch.cuda.synchronize(gpu)
    check_fresh_threads([forward_of(sample, tensors) for _ in range(THREADS)], expected)


@pytest.mark.gpu
@every_differentiable_sample
def test_forward_that_records(gpu, sample):
    tensors = leaves(sample, gpu)
    expected = sample.function(*tensors)
    torch.cuda.synchronize(gpu)
    check_fresh_threads([lambda: sample.function(*tensors)] * THREADS, expected)


@pytest.mark.gpu
@every_differentiable_sample
def test_gradient(gpu, sample):
    """In the calling thread, so that the gradient's ops are what it does first."""
    tensors = leaves(sample, gpu)
    outputs = [y for y in sample.function(*tensors) if y.requires_grad]
    inputs = [x for x in tensors if x.requires_grad]
    grads = [torch.randn_like(y) for y in outputs]

    def call():
        with torch.autograd.set_multithreading_enabled(False):
            return torch.autograd.grad(outputs, inputs, grads, retain_graph=True)

    expected = call()
    torch.cuda.synchronize(gpu)
    check_fresh_threads([call] * THREADS, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["nvfp4_gemm", "nvfp4_prepare"])
def test_nvfp4(gpu, op):
    """The ops that are not among the samples."""
    x = torch.randn(64, 128, dtype=torch.bfloat16, device=gpu)
    quantised = tk.nvfp4_quantize(x)
    weight = tk.nvfp4_prepare(*quantised)

    def call():
        return [tk.nvfp4_gemm(x, weight) if op == "nvfp4_gemm" else tk.nvfp4_prepare(*quantised)[0]]

    expected = call()
    torch.cuda.synchronize(gpu)
    check_fresh_threads([call] * THREADS, expected)


@pytest.mark.gpu
def test_a_process_whose_first_call_is_a_thread_s():
    """With nothing of CUDA's in use but the inputs, in PyTorch's threads of the backward too."""
    program = """
import threading
import torch
import thunderkittens as tk

x = torch.eye(64, dtype=torch.bfloat16, device="cuda").requires_grad_()
results = []

def work():
    out = tk.gemm(x, x)
    results.append([out, *torch.autograd.grad(out.sum(), [x])])

threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(results) == 8
for out, grad in results:
    assert torch.equal(out, x)
    assert (grad == 2).all()
print("right")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == "right\n", done.stderr


# ---- what the driver's refusals lead to, with a driver of the test's own ----


def test_refusals(tmp_path):
    if emulation.cuda_headers() is None:
        pytest.skip(emulation.NO_HEADERS)
    program = tmp_path / "contexts"
    source = HERE / "kittens/emulator/contexts.cpp"
    command = emulation.compile_command(
        source, output=program, flags=["-O0", "-Wno-unknown-pragmas"]
    )
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    # Refusals; how often the driver was asked and a context made current; what came of it.
    assert done.stdout.splitlines() == [
        "asked 1, made 0: a map",
        "201 asked 2, made 1: a map",
        "3 asked 2, made 1: a map",
        "201 201 asked 2, made 1: an error",
        "1 asked 1, made 0: an error",
        "201 1 asked 2, made 1: an error",
    ]
