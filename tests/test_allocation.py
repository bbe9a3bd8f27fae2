"""Memory that the ops allocate: PyTorch's own exception where there is none left, and the layout of
`torch.empty_like` without its call."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import thunderkittens as tk
from helpers.samples import (
    MUTATING,
    SAMPLES,
    assert_equal,
    every_differentiable_sample,
    every_sample,
    forward_and_backward,
    leaves,
    state_of,
    with_state,
)

ROOT = Path(__file__).resolve().parents[1]


# ---- csrc/common/tensor.h, on CPU tensors ----


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory):
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("allocation") / "allocation.so"
    torch_folder = Path(torch.__file__).parent
    command = [
        *(compiler, "-std=c++20", "-O0", "-fPIC", "-shared", "-fvisibility=hidden"),
        *(f"-I{ROOT}", "-isystem", f"{torch_folder}/include", '-DTHUNDERKITTENS_ARCHS=""'),
        *("-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000"),
        *(f"{ROOT}/tests/helpers/allocation.cpp", "-o", str(library)),
        *(f"-L{torch_folder}/lib", "-ltorch_cpu", "-ldl"),
    ]
    subprocess.run(command, check=True)
    torch.ops.load_library(str(library))
    return torch.ops.thunderkittens_tests


@pytest.mark.parametrize("quietly", [False, True])
@pytest.mark.parametrize("function", [True, False])
def test_allocation(ops, function, quietly):
    """A tensor like another's that is released again, whichever way it was allocated."""
    like = torch.zeros(2, dtype=torch.bfloat16)
    for sizes, strides in [((2, 3), (1, 2)), ((0, 4), (4, 1)), ((), ()), ((5, 2), (64, 1))]:
        x = ops.allocate(like, sizes, strides, function, quietly)
        assert (x.shape, x.stride(), x.dtype, x.device) == (sizes, strides, like.dtype, like.device)
        x.fill_(3)
        assert (x.float() == 3).all()
    size = 1 << 28
    for _ in range(64):
        ops.allocate(like, [size], [1], function, quietly)


@pytest.mark.parametrize("quietly", [False, True])
def test_exhausted_memory_is_pytorchs_own_error(ops, quietly, capfd):
    """The very exception, through the frames of an op on the stable ABI."""
    size = 1 << 50
    with pytest.raises(RuntimeError) as expected:
        torch.empty(size)
    with pytest.raises(type(expected.value)) as actual:
        ops.allocate(torch.zeros(1), [size], [1], True, quietly)
    assert str(actual.value) == str(expected.value)
    printed = capfd.readouterr().err
    if not quietly:
        assert not printed
    assert ops.allocate(torch.zeros(1), [3], [1], True, quietly).shape == (3,)


def test_exceptions_keep_their_type(ops):
    """As torch.OutOfMemoryError must: here that of a device which there is not."""
    with pytest.raises(NotImplementedError, match="Could not run 'aten::empty_strided'"):
        ops.throw_another(torch.zeros(1))


def test_a_torch_without_the_function(ops):
    """Then the stable ABI tells only that it failed."""
    with pytest.raises(
        RuntimeError, match=r"cannot allocate .* shape \(1125899906842624,\), torch"
    ):
        ops.allocate(torch.zeros(1), [1 << 50], [1], False, True)


def draw(rng: random.Random) -> torch.Tensor:
    """Any strides: permuted, sliced, expanded, overlapping, with dimensions of 0 and 1."""
    shape = [rng.choice([0, 1, 1, 2, 3, 4]) for _ in range(rng.randint(0, 5))]
    x = torch.zeros(shape)
    for _ in range(rng.randint(0, 3) if shape else 0):
        kind = rng.choice(["permute", "narrow", "expand"])
        if kind == "permute":
            x = x.permute(rng.sample(range(x.dim()), x.dim()))
        elif kind == "narrow":
            i = rng.randrange(x.dim())
            x = x.narrow(i, 0, rng.randint(0, x.shape[i]))
        else:
            x = x.expand([rng.randint(1, 3) if n == 1 else n for n in x.shape])
    if rng.random() < 0.25:
        x = torch.arange(1000.0).as_strided(x.shape, [rng.randint(0, 5) for _ in x.shape])
    return x


def test_layouts_are_those_of_pytorch(ops):
    rng = random.Random(1)
    for _ in range(3000):
        x = draw(rng)
        assert ops.empty_as(x).stride() == torch.empty_like(x).stride(), (x.shape, x.stride())
        for copy in (ops.packed(x), ops.aligned(x)):
            assert copy.is_contiguous()
            assert torch.equal(copy, x)
        assert (ops.packed(x).data_ptr() == x.data_ptr()) == x.is_contiguous() or x.numel() == 0
    flat = torch.arange(9.0)
    assert ops.aligned(flat).data_ptr() == flat.data_ptr()
    copy = ops.aligned(flat[1:])
    assert copy.data_ptr() % 16 == 0
    assert torch.equal(copy, flat[1:])


# ---- every op, on the GPU ----


@contextmanager
def exhausted_memory() -> Iterator[list[torch.Tensor]]:
    """No memory is left for this process, however much the GPU has: nothing new is allocated, and
    what the allocator still had is held by the tensors of the list, the smallest last."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.0)
    held: list[torch.Tensor] = []
    try:
        size = 1 << 30
        while size >= 512:
            try:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                size //= 2
        yield held
    finally:
        held.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


def fails(call) -> bool:
    """Whether memory does not suffice; then PyTorch's message says so."""
    try:
        call()
    except torch.OutOfMemoryError as error:
        message = str(error)
    else:
        return False
    assert message.startswith("CUDA out of memory. Tried to allocate "), message
    return True


def check_exhausted(call, capfd: pytest.CaptureFixture[str]) -> None:
    """`call` with no memory, with more and more, and with enough: PyTorch's error, nothing else,
    and at last its result."""
    expected = call()
    with exhausted_memory() as held:
        assert fails(call)
        while held:
            # Another allocation of the call's is now the first that fails.
            held.pop()
            if not fails(call):
                break
    assert_equal(call(), expected)
    assert "aoti_torch" not in capfd.readouterr().err


def without_copies(sample, tensors):
    """The call, whose first allocation is the op's: not that of a copied state."""
    if sample.op not in MUTATING:
        return lambda: forward_and_backward(sample.function, tensors)
    kept = state_of(sample.op, tensors)
    state = tuple(x.clone() for x in kept)
    arguments = with_state(sample.op, tensors, state)

    def call():
        # The state is written to as often as the call succeeds.
        for x, y in zip(state, kept, strict=True):
            x.copy_(y)
        return [getattr(tk, sample.op)(*arguments, **sample.options)]

    return call


@pytest.mark.gpu
@every_sample
def test_exhausted_memory(sample, capfd):
    check_exhausted(without_copies(sample, leaves(sample, "cuda")), capfd)


@pytest.mark.gpu
@every_differentiable_sample
def test_exhausted_memory_in_the_backward(sample, capfd):
    tensors = leaves(sample, "cuda")
    outputs = [y for y in sample.function(*tensors) if y.requires_grad]
    inputs = [x for x in tensors if x.requires_grad]
    grads = [torch.randn_like(y) for y in outputs]

    def call():
        return torch.autograd.grad(outputs, inputs, grads, retain_graph=True)

    check_exhausted(call, capfd)


def nvfp4_calls():
    """The ops that SAMPLES does not have, and what copies operands of theirs."""
    x = torch.randn(256, 512, dtype=torch.bfloat16, device="cuda")
    quantised = tk.nvfp4_quantize(x)
    weight = tk.nvfp4_prepare(*quantised)
    bias = torch.randn(512, device="cuda", dtype=torch.bfloat16)[::2]
    return {
        "nvfp4_prepare": lambda: [tk.nvfp4_prepare(*quantised).data],
        "nvfp4_gemm": lambda: [tk.nvfp4_gemm(x, weight, bias=bias)],
        "nvfp4_gemm_strided": lambda: [tk.nvfp4_gemm(x.t().contiguous().t(), weight)],
    }


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nvfp4_prepare", "nvfp4_gemm", "nvfp4_gemm_strided"])
def test_exhausted_memory_of_nvfp4(name, capfd):
    check_exhausted(nvfp4_calls()[name], capfd)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [-0.125, 0.0])
@pytest.mark.parametrize("layout", ["packed", "spread"])
def test_exhausted_memory_of_rare_copies(scale, layout, capfd):
    """Of queries with another sign, and of operands that TMA cannot read."""
    q, k, v = (torch.randn(2, 2, 100, 64, dtype=torch.float16, device="cuda") for _ in range(3))
    if layout == "spread":
        q, k, v = (x.mT.contiguous().mT for x in (q, k, v))
    check_exhausted(lambda: [tk.attention(q, k, v, scale=scale)], capfd)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gemm_fused", "attention_lse"])
def test_exhausted_memory_when_compiled(name, capfd):
    sample = SAMPLES[name]
    torch.compiler.reset()
    compiled = torch.compile(sample.function, fullgraph=True)
    tensors = leaves(sample, "cuda")
    forward_and_backward(compiled, tensors)
    check_exhausted(lambda: forward_and_backward(compiled, tensors), capfd)


@pytest.mark.gpu
def test_callers_who_look_for_a_batch_that_fits():
    """The use that the exception's type is for."""
    found = 0
    with exhausted_memory():
        for batch in (64, 8, 1):
            try:
                x = torch.empty(batch, 64, 64, dtype=torch.bfloat16, device="cuda")
                tk.gemm(x, x)
            except torch.OutOfMemoryError:
                continue
            found = batch
    assert found == 0
    x = torch.ones(8, 64, 64, dtype=torch.bfloat16, device="cuda")
    assert (tk.gemm(x, x) == 64).all()
