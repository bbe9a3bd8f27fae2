"""What every op must do: be registered with all that PyTorch asks for, be documented, and work
under streams, graphs, threads, compilation, export and autocast."""

from __future__ import annotations

import inspect
import threading

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

import thunderkittens as tk
from helpers.cover import alternate
from helpers.direct_calls import direct_calls
from helpers.samples import (
    CAST,
    MUTATING,
    SAMPLES,
    assert_close,
    assert_equal,
    equal,
    every_graph,
    every_sample,
    forward_and_backward,
    leaves,
    one_per_op,
)

NAMESPACE = "thunderkittens"
OPS = sorted(
    name.partition("::")[2]
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith(NAMESPACE + "::")
    # An op that is made of others leaves all of this to them: fp8_linear.
    and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
)
# Ops without a gradient of their own; their tests do with their operands what is done here with
# SAMPLES.
WITHOUT_GRADIENT = {"nvfp4_gemm", "nvfp4_prepare"}
# Likewise; that they have none is said by a kernel for Autograd.
INFERENCE = {"attention_paged", "attention_schedule", "append_kv", "merge_attention"}
PUBLIC = sorted({sample.op for sample in SAMPLES.values()} | WITHOUT_GRADIENT | INFERENCE)

# Registration and documentation


@pytest.mark.parametrize("name", OPS)
def test_registration(name):
    qualified = f"{NAMESPACE}::{name}"

    def has(key):
        return torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key)

    assert has("CPU")
    assert has("CUDA")
    assert has("Meta")
    packet, _, overload = name.partition(".")
    changes = overload in ("out", "in_place") or name in MUTATING
    assert has("FuncTorchBatched") or changes
    packet = getattr(torch.ops.thunderkittens, packet)
    assert packet in flop_registry
    assert getattr(packet, overload or "default")._schema.is_mutable is changes
    # The raw op for calls without gradients has no autograd, and a differentiable twin.
    base = name.partition(".")[0]
    assert has("Autograd") == (not base.endswith("_forward") and name not in WITHOUT_GRADIENT)
    if base.endswith("_forward"):
        assert base.removesuffix("_forward") in OPS
    assert has("AutocastCPU")
    assert has("AutocastCUDA")


def test_every_op_has_a_public_function():
    names = {name.partition(".")[0] for name in OPS}
    assert {x.removesuffix("_forward").removesuffix("_backward") for x in names} == set(PUBLIC)
    assert set(PUBLIC) <= set(tk.__all__)
    assert all(hasattr(tk, name) for name in tk.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_documentation(name):
    function = getattr(tk, name)
    text = inspect.getdoc(function)
    assert all(f"\n{section}:\n" in text for section in ("Args", "Returns", "Raises"))
    signature = inspect.signature(function)
    assert all(f"{parameter}:" in text for parameter in signature.parameters)
    assert all(p.kind is not p.VAR_KEYWORD for p in signature.parameters.values())
    assert all(p.annotation is not p.empty for p in signature.parameters.values())
    assert signature.return_annotation is not signature.empty
    reference = getattr(tk.reference, name)
    assert list(inspect.signature(reference).parameters) == list(signature.parameters)
    assert inspect.getdoc(reference)


# Calls


@every_sample
def test_reruns_are_bit_equal(device, sample):
    tensors = leaves(sample, device)
    first = forward_and_backward(sample.function, tensors)
    for _ in range(5):
        assert_equal(forward_and_backward(sample.function, tensors), first)


@every_sample
def test_paths_agree(device, sample):
    """With and without gradients, in inference mode, and through the differentiable op."""
    tensors = leaves(sample, device)
    expected = [x.detach() for x in sample.function(*tensors)]
    with torch.no_grad():
        assert_equal(sample.function(*tensors), expected)
    with torch.inference_mode():
        assert_equal(sample.function(*tensors), expected)
    plain = [x.detach() for x in tensors]
    results = sample.function(*plain)
    assert_equal(results, expected)
    assert not any(x.requires_grad for x in results)
    parameters = [
        torch.nn.Parameter(x) if leaf.requires_grad else x
        for x, leaf in zip(plain, tensors, strict=True)
    ]
    assert_equal([x.detach() for x in sample.function(*parameters)], expected)


@every_sample
def test_inputs_are_left_alone(device, sample):
    tensors = leaves(sample, device)
    copies = [x.detach().clone() for x in tensors]
    forward_and_backward(sample.function, tensors)
    assert all(equal(x, y) for x, y in zip(tensors, copies, strict=True))


@one_per_op
def test_checkpoint(device, sample):
    tensors = leaves(sample, device)
    expected = forward_and_backward(sample.function, tensors)

    def recomputed(*xs):
        return checkpoint(sample.function, *xs, use_reentrant=False)

    assert_equal(forward_and_backward(recomputed, tensors), expected)


@every_graph
def test_threads(device, sample):
    tensors = leaves(sample, device)
    expected = forward_and_backward(sample.function, tensors)
    failures = []
    start = threading.Barrier(6)

    def work():
        try:
            start.wait()
            mine = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
            for _ in range(10):
                assert_equal(forward_and_backward(sample.function, mine), expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.mark.gpu
@every_sample
def test_side_stream(device, sample):
    """The op waits for what its own stream holds, and for nothing else."""
    source = sample.tensors(device)
    expected = sample.function(*source)
    targets = [torch.zeros_like(x) for x in source]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for target, x in zip(targets, source, strict=True):
            target.copy_(x)
        outputs = sample.function(*targets)
        busy = not stream.query()
    assert busy, "the call waited for its stream"
    stream.synchronize()
    assert_equal(outputs, expected)


@pytest.mark.gpu
@every_sample
def test_cuda_graph(device, sample):
    static = leaves(sample, device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            forward_and_backward(sample.function, static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_and_backward(sample.function, static)
    for _ in range(3):
        fresh = leaves(sample, device)
        with torch.no_grad():
            for target, x in zip(static, fresh, strict=True):
                target.copy_(x)
        graph.replay()
        expected = forward_and_backward(sample.function, static)
        assert all(equal(x, y) for x, y in zip(captured, expected, strict=True))


@pytest.mark.gpu
@every_sample
def test_every_device(device, sample):
    """On each device while another is current, and back."""
    count = torch.cuda.device_count()
    tensors = leaves(sample, "cuda:0")
    expected = forward_and_backward(sample.function, tensors)
    for index in (*range(count), 0):
        there = [copy_to(x, f"cuda:{index}") for x in tensors]
        with torch.cuda.device((index + 1) % count):
            results = forward_and_backward(sample.function, there)
        assert all(x.device.index == index for x in results)
        assert_equal([x.to("cuda:0") for x in results], expected)
        assert torch.cuda.current_device() == 0


def copy_to(x, device):
    y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return y.copy_(x.detach()).requires_grad_(x.requires_grad)


@every_sample
def test_meta_tensors(device, sample):
    tensors = sample.tensors(device)
    real = sample.function(*tensors)
    meta = sample.function(*(copy_to(x, "meta").detach() for x in tensors))
    for x, y in zip(meta, real, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


# PyTorch's own checks, compilation, export


def comparable(arguments):
    """Whether the check for changed inputs can compare them: torch.allclose has no fp8."""
    floats = [x for x in arguments if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return all(x.element_size() > 1 for x in floats)


@every_graph
def test_opcheck(device, sample):
    for op, arguments in direct_calls(sample, device):
        overloads = [op]
        if isinstance(op, torch._ops.OpOverloadPacket):  # those that take the same arguments
            names = [name for name in op.overloads() if name not in ("fused", "out", "prepared")]
            overloads = [getattr(op, name) for name in names]
        for overload in overloads:
            tests = ("test_schema",) if comparable(arguments) else ()
            tests += ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
            result = torch.library.opcheck(overload, arguments, test_utils=tests)
            assert set(result.values()) == {"SUCCESS"}


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compilers(device, intensity):
    # Inductor takes from 10 to 30 s per graph, most of it in a C++ compiler on a CPU.
    # At the lowest intensity the last sample of each op; with dynamic shapes it is the first.
    names = list(SAMPLES)
    graphs = names if intensity > 1 else list({SAMPLES[name].op: name for name in names}.values())
    few = ["attention"] if device == "cpu" else ["attention_varlen_sink", "gemm_bias"]
    inductor = names if intensity > 2 else few
    return [("aot_eager", name) for name in graphs] + [("inductor", name) for name in inductor]


@pytest.mark.cases.with_args(compilers)
@pytest.mark.usefixtures("fresh_compiler")
def test_compile(device, case):
    """Forward and backward in one graph each, on non-contiguous inputs."""
    backend, name = case
    sample = SAMPLES[name]

    def model(*tensors):
        # Floats of one byte have no arithmetic.
        outputs = sample.function(
            *(x * 1.0 if x.is_floating_point() and x.element_size() > 1 else x for x in tensors)
        )
        return tuple(y * 2.0 if y.element_size() > 1 else y for y in outputs)

    tensors = leaves(sample, device)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    expected = forward_and_backward(model, tensors)
    actual = forward_and_backward(compiled, tensors)
    for x, y in zip(actual, expected, strict=True):
        assert_close(x, y)
    with torch.no_grad():
        for x, y in zip(compiled(*tensors), expected, strict=False):
            assert_close(x, y)


@every_graph
@pytest.mark.usefixtures("fresh_compiler")
def test_compile_with_dynamic_shapes(device, sample):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(sample.function, fullgraph=True, backend=counter, dynamic=True)
    for longer in (0, 5, 64, 200):
        tensors = leaves(sample, device, longer=longer)
        expected = forward_and_backward(sample.function, tensors)
        actual = forward_and_backward(compiled, tensors)
        for x, y in zip(actual, expected, strict=True):
            assert_close(x, y)
    assert counter.frame_count <= 2


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_errors(device):
    """A wrong call is wrong in compiled code too, with the same words."""
    q = torch.zeros(1, 4, 8, 64, dtype=torch.bfloat16, device=device)
    compiled = torch.compile(lambda q, k: tk.attention(q, k, k), backend="eager")
    with pytest.raises(Exception, match="q's heads must be a multiple"):
        compiled(q, q[:, :3])


class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


@alternate(("strict", "name"), [False, True], list(SAMPLES))
@pytest.mark.usefixtures("fresh_compiler")
def test_export(device, name, strict):
    sample = SAMPLES[name]
    tensors = sample.tensors(device)
    length = torch.export.Dim("length", min=2, max=4096)
    dynamic = [
        {i: length if sample.op == "gemm" else torch.export.Dim.AUTO
         for i in range(x.dim()) if (index, i) in sample.dynamic}
        for index, x in enumerate(tensors)
    ]  # fmt: skip
    program = torch.export.export(
        Module(sample.function), tuple(tensors), dynamic_shapes=(tuple(dynamic),), strict=strict
    )
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert sum(target.startswith(NAMESPACE) for target in targets) == sample.op_calls
    for longer in (0, 31):
        tensors = sample.tensors(device, longer=longer)
        for x, y in zip(program.module()(*tensors), sample.function(*tensors), strict=True):
            assert_close(x, y)


# Autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_sample
def test_autocast(device, sample, dtype):
    """The operands are converted, and nothing else."""
    tensors = [
        x.to(dtype) if sample.kind(i) == "cache" else x
        for i, x in enumerate(leaves(sample, device, dtype=torch.float32))
    ]
    cast = [
        x.detach().to(dtype).requires_grad_(x.requires_grad) if sample.kind(i) in CAST else x
        for i, x in enumerate(tensors)
    ]
    expected = forward_and_backward(sample.function, cast)
    with torch.autocast(device, dtype):
        outputs = sample.function(*tensors)
        actual = forward_and_backward(sample.function, tensors)
    for x, y in zip(outputs, expected, strict=False):
        assert equal(x, y)
    for x, y in zip(actual, expected, strict=True):
        assert equal(x, y.to(x.dtype))
    assert all(x.dtype == torch.float32 for x in actual[len(outputs) :])


@one_per_op
def test_autocast_of_the_ops(device, sample):
    """Autocast also reaches an op that is called from an exported graph."""
    with torch.autocast(device, torch.bfloat16):
        for op, arguments in direct_calls(sample, device):
            if op.__name__.endswith("backward"):
                continue
            wide = [
                x.detach().float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                for x in arguments
            ]
            result = op(*wide)
            result = result if isinstance(result, torch.Tensor) else result[0]
            assert result.dtype == torch.bfloat16


@one_per_op
def test_autocast_refuses_what_it_does_not_convert(device, sample):
    tensors = sample.tensors(device, dtype=torch.float64)
    with torch.autocast(device, torch.bfloat16), pytest.raises(TypeError, match=r"torch\.float64"):
        sample.function(*tensors)
    tensors = sample.tensors(device, dtype=torch.float32)
    with (
        torch.autocast(device, torch.bfloat16),
        torch.autocast(device, enabled=False),
        pytest.raises(TypeError, match=r"torch\.float32"),
    ):
        sample.function(*tensors)
