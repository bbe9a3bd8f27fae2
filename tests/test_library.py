"""What every op must do: be registered with all that PyTorch asks for, be documented, and work
under streams, graphs, threads, compilation, export, autocast and the transforms of `torch.func`."""

from __future__ import annotations

import inspect
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import thunderkittens as tk
from helpers.samples import SAMPLES

NAMESPACE = "thunderkittens"
OPS = sorted(
    name.partition("::")[2]
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith(NAMESPACE + "::")
)
PUBLIC = sorted({sample.op for sample in SAMPLES.values()})

every_sample = pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
one_per_op = pytest.mark.parametrize(
    "sample", [SAMPLES["gemm_bias"], SAMPLES["attention_lse"]], ids=["gemm", "attention"]
)


def leaves(sample, device, **options):
    return [x.detach().requires_grad_() for x in sample.tensors(device, **options)]


def forward_and_backward(function, tensors):
    """Outputs and gradients of a call, with a fixed gradient of the outputs."""
    outputs = function(*tensors)
    loss = sum((y.float() * torch.cos(torch.arange(y.numel(), device=y.device)).view(y.shape)).sum()
               for y in outputs)  # fmt: skip
    return [*outputs, *torch.autograd.grad(loss, tensors)]


def assert_equal(actual, expected):
    """Bit by bit, strides included."""
    assert len(actual) == len(expected)
    for x, y in zip(actual, expected, strict=True):
        assert x.stride() == y.stride()
        assert torch.equal(x, y)


# Registration and documentation


@pytest.mark.parametrize("name", OPS)
def test_registration(name):
    qualified = f"{NAMESPACE}::{name}"

    def has(key):
        return torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key)

    assert has("CPU")
    assert has("CUDA")
    assert has("Meta")
    assert has("FuncTorchBatched")
    packet = getattr(torch.ops.thunderkittens, name)
    assert packet in flop_registry
    assert packet.default._schema.is_mutable is False
    # The raw op for calls without gradients has no autograd, and a differentiable twin.
    assert has("Autograd") == (not name.endswith("_forward"))
    if name.endswith("_forward"):
        assert name.removesuffix("_forward") in OPS
    assert has("AutocastCPU")
    assert has("AutocastCUDA")


def test_every_op_has_a_public_function():
    assert {name.removesuffix("_forward").removesuffix("_backward") for name in OPS} == set(PUBLIC)
    assert set(PUBLIC) <= set(tk.__all__)
    assert all(hasattr(tk, name) for name in tk.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_documentation(name):
    function = getattr(tk, name)
    text = inspect.getdoc(function)
    assert all(f"\n{section}:\n" in text for section in ("Args", "Returns", "Raises"))
    signature = inspect.signature(function)
    assert all(f"{parameter}:" in text for parameter in signature.parameters)
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
    parameters = [torch.nn.Parameter(x) for x in plain]
    assert_equal([x.detach() for x in sample.function(*parameters)], expected)


@every_sample
def test_inputs_are_left_alone(device, sample):
    tensors = leaves(sample, device)
    copies = [x.detach().clone() for x in tensors]
    forward_and_backward(sample.function, tensors)
    assert all(torch.equal(x, y) for x, y in zip(tensors, copies, strict=True))


@one_per_op
def test_checkpoint(device, sample):
    tensors = leaves(sample, device)
    expected = forward_and_backward(sample.function, tensors)

    def recomputed(*xs):
        return checkpoint(sample.function, *xs, use_reentrant=False)

    assert_equal(forward_and_backward(recomputed, tensors), expected)


@every_sample
def test_threads(device, sample):
    tensors = leaves(sample, device)
    expected = forward_and_backward(sample.function, tensors)
    failures = []
    start = threading.Barrier(6)

    def work():
        try:
            start.wait()
            mine = [x.detach().requires_grad_() for x in tensors]
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
    assert_equal([x.clone() for x in outputs], [x.clone() for x in expected])


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
        assert all(torch.equal(x, y) for x, y in zip(captured, expected, strict=True))


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
    return y.copy_(x.detach()).requires_grad_()


@every_sample
def test_meta_tensors(device, sample):
    tensors = sample.tensors(device)
    real = sample.function(*tensors)
    meta = sample.function(*(copy_to(x, "meta").detach() for x in tensors))
    for x, y in zip(meta, real, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


# PyTorch's own checks, compilation, export


def direct_calls(sample, device):
    """Calls of the ops behind a sample; tensors require gradients where that is allowed."""
    ops = torch.ops.thunderkittens
    tensors = sample.tensors(device)
    if sample.op == "gemm":
        arguments = (*tensors, *(None,) * (3 - len(tensors)), sample.options.get("out_dtype"))
        yield ops.gemm_forward, arguments
        yield (
            ops.gemm,
            (*(x.requires_grad_() for x in leaves(sample, device)), *arguments[len(tensors) :]),
        )
        return
    mode = {True: 1, "upper_left": 2}[sample.options["causal"]]
    scale = sample.options.get("scale")
    yield ops.attention_forward, (*tensors, mode, scale)
    yield ops.attention, (*leaves(sample, device), mode, scale)
    out, lse = ops.attention(*tensors, mode, scale)
    for needs, grad_lse in (([True] * 3, lse), ([False, True, False], None)):
        yield ops.attention_backward, (out, grad_lse, *tensors, out, lse, mode, scale, needs)


@every_sample
def test_opcheck(device, sample):
    for op, arguments in direct_calls(sample, device):
        result = torch.library.opcheck(op.default, arguments)
        assert set(result.values()) == {"SUCCESS"}


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compilers(device, intensity):
    # Inductor takes from 10 to 30 s per graph, most of it in a C++ compiler on a CPU.
    names = list(SAMPLES)
    few = ["attention"] if device == "cpu" else ["attention_lse", "gemm_bias"]
    inductor = names if intensity > 2 else few
    return [("aot_eager", name) for name in names] + [("inductor", name) for name in inductor]


@pytest.mark.cases.with_args(compilers)
@pytest.mark.usefixtures("fresh_compiler")
def test_compile(device, case):
    """Forward and backward in one graph each, on non-contiguous inputs."""
    backend, name = case
    sample = SAMPLES[name]

    def model(*tensors):
        outputs = sample.function(*(x * 1.0 for x in tensors))
        return tuple(y * 2.0 for y in outputs)

    tensors = leaves(sample, device)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    expected = forward_and_backward(model, tensors)
    actual = forward_and_backward(compiled, tensors)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y)
    with torch.no_grad():
        for x, y in zip(compiled(*tensors), expected, strict=False):
            torch.testing.assert_close(x, y)


@every_sample
@pytest.mark.usefixtures("fresh_compiler")
def test_compile_with_dynamic_shapes(device, sample):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(sample.function, fullgraph=True, backend=counter, dynamic=True)
    for longer in (0, 5, 64, 200):
        tensors = leaves(sample, device, longer=longer)
        expected = forward_and_backward(sample.function, tensors)
        actual = forward_and_backward(compiled, tensors)
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, y)
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


@pytest.mark.parametrize("strict", [False, True])
@every_sample
@pytest.mark.usefixtures("fresh_compiler")
def test_export(device, sample, strict):
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
    assert sum(target.startswith(NAMESPACE) for target in targets) == 1
    for longer in (0, 31):
        tensors = sample.tensors(device, longer=longer)
        for x, y in zip(program.module()(*tensors), sample.function(*tensors), strict=True):
            torch.testing.assert_close(x, y)


# Autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_sample
def test_autocast(device, sample, dtype):
    tensors = [x.requires_grad_() for x in sample.tensors(device, dtype=torch.float32)]
    cast = [x.detach().to(dtype).requires_grad_() for x in tensors]
    expected = forward_and_backward(sample.function, cast)
    with torch.autocast(device, dtype):
        outputs = sample.function(*tensors)
        actual = forward_and_backward(sample.function, tensors)
    for x, y in zip(outputs, expected, strict=False):
        assert torch.equal(x, y)
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x, y.to(x.dtype))
    assert all(x.dtype == torch.float32 for x in actual[len(outputs) :])


@one_per_op
def test_autocast_of_the_ops(device, sample):
    """Autocast also reaches an op that is called from an exported graph."""
    with torch.autocast(device, torch.bfloat16):
        for op, arguments in direct_calls(sample, device):
            if op.__name__.endswith("backward"):
                continue
            wide = [x.detach().float() if isinstance(x, torch.Tensor) else x for x in arguments]
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


# torch.func


def mapped(sample, device, dims, size=3):
    """Operands with a mapped dimension at the places in `dims` (None: not mapped)."""
    stacks = [sample.tensors(device) for _ in range(size)]
    single = sample.tensors(device)
    return [
        single[i] if dim is None else torch.stack([s[i] for s in stacks], dim)
        for i, dim in enumerate(dims)
    ]


def looped(function, tensors, dims, size=3):
    results = [
        function(
            *(x if dim is None else x.select(dim, i) for x, dim in zip(tensors, dims, strict=True))
        )
        for i in range(size)
    ]
    return [torch.stack(parts) for parts in zip(*results, strict=True)]


MAPPED = [
    (0, 0, 0),
    (1, 0, 1),
    (0, None, 0),
    (None, 1, 0),
    (None, 0, None),
    (0, None, None),
    (-1, -1, -1),
]


@pytest.mark.parametrize("pattern", MAPPED)
@every_sample
def test_vmap(device, sample, pattern):
    dims = pattern[: len(sample.shapes)]
    tensors = mapped(sample, device, dims)
    results = torch.func.vmap(sample.function, in_dims=dims)(*tensors)
    for x, y in zip(results, looped(sample.function, tensors, dims), strict=True):
        torch.testing.assert_close(x, y)


def test_vmap_over_the_bias_alone(device):
    sample = SAMPLES["gemm_bias"]
    tensors = mapped(sample, device, (None, None, 0))
    results = torch.func.vmap(sample.function, in_dims=(None, None, 0))(*tensors)
    for x, y in zip(results, looped(sample.function, tensors, (None, None, 0)), strict=True):
        torch.testing.assert_close(x, y)


@every_sample
def test_vmap_twice(device, sample):
    outer = [torch.stack([x, x + 1, x - 1, x]).unflatten(0, (2, 2)) for x in sample.tensors(device)]
    twice = torch.func.vmap(torch.func.vmap(sample.function))(*outer)
    once = torch.func.vmap(sample.function)(*(x.flatten(0, 1) for x in outer))
    for x, y in zip(twice, once, strict=True):
        torch.testing.assert_close(x.flatten(0, 1), y)


@every_sample
def test_vmap_of_ops_and_gradients_outside(device, sample):
    """vmap inside, ordinary autograd outside."""
    tensors = [x.requires_grad_() for x in mapped(sample, device, (0,) * len(sample.shapes))]
    dims = (0,) * len(tensors)
    actual = forward_and_backward(torch.func.vmap(sample.function), tensors)
    expected = forward_and_backward(lambda *x: looped(sample.function, x, dims), tensors)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y)


@every_sample
def test_func_grad(device, sample):
    """torch.func.grad, and per-sample gradients by mapping it."""
    tensors = leaves(sample, device)
    arguments = tuple(range(len(tensors)))

    def loss(*xs):
        return sum(y.float().square().sum() for y in sample.function(*xs))

    expected = torch.autograd.grad(loss(*tensors), tensors)
    plain = [x.detach() for x in tensors]
    assert_equal(torch.func.grad(loss, arguments)(*plain), expected)
    stacked = [torch.stack([x, x]) for x in plain]
    mapped_grads = torch.func.vmap(torch.func.grad(loss, arguments))(*stacked)
    for x, y in zip(mapped_grads, expected, strict=True):
        torch.testing.assert_close(x[1], y)


@one_per_op
def test_forward_mode_is_refused(device, sample):
    """Dropping the tangents silently would give wrong derivatives."""
    tensors = tuple(sample.tensors(device))
    with pytest.raises(RuntimeError, match="forward-mode differentiation"):
        torch.func.jvp(sample.function, tensors, tensors)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tensors[0], tensors[0])
        with pytest.raises(RuntimeError, match="forward-mode differentiation"):
            sample.function(dual, *tensors[1:])
        sample.function(*tensors)


# Flops


def counted(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "shapes", [((33, 72), (72, 40)), ((2, 33, 72), (72, 40)), ((3, 5, 7), (3, 7, 2))]
)
def test_flops_of_gemm(device, shapes):
    """As many as PyTorch counts for its own product, forward and backward."""
    a, b = (torch.randn(s, device=device).bfloat16().requires_grad_() for s in shapes)
    assert counted(lambda: tk.gemm(a.detach(), b.detach())) == counted(
        lambda: a.detach() @ b.detach()
    )
    assert counted(lambda: tk.gemm(a, b).sum().backward()) == counted(
        lambda: torch.matmul(a, b).sum().backward()
    )


@pytest.mark.parametrize("causal", [False, True])
def test_flops_of_attention(device, causal):
    """As many as PyTorch counts for its own attention, which does not subtract masked scores."""
    q = torch.randn(2, 4, 33, 64, device=device).bfloat16().requires_grad_()
    k, v = (torch.randn(2, 2, 45, 64, device=device).bfloat16().requires_grad_() for _ in range(2))
    product = 2 * 2 * 4 * 33 * 45 * 64
    assert (
        counted(lambda: tk.attention(q.detach(), k.detach(), v.detach(), causal=causal))
        == 2 * product
    )
    assert counted(lambda: tk.attention(q, k, v, causal=causal, return_lse=True)) == 2 * product
    assert counted(lambda: tk.attention(q, k, v, causal=causal).sum().backward()) == 7 * product
    half = counted(lambda: tk.attention(q.detach(), k, v.detach(), causal=causal).sum().backward())
    assert half == 5 * product
