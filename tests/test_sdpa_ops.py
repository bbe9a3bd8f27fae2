"""The kernels of `tk.sdpa` for PyTorch's ops of CUDA, on CPU tensors.

The ops have no CPU kernels of their own, but a schema, shapes without data and autograd: so ours
are registered for the CPU here, where they run on the emulator.
"""

from __future__ import annotations

import inspect
import math
from contextlib import ExitStack

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import thunderkittens as tk
from helpers.attention import BF16, FP16, FP32, normal
from thunderkittens import _load, emulation
from thunderkittens.integrations import _sdpa_ops, sdpa_hook

aten = torch.ops.aten
FLASH = "_scaled_dot_product_flash_attention"
CUDNN = "_scaled_dot_product_cudnn_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
FOR_CPU = "_scaled_dot_product_flash_attention_for_cpu"
CUDA_OPS = (FLASH, CUDNN, EFFICIENT)
ALL_OPS = (*CUDA_OPS, FOR_CPU)
MAKERS = {name: make for ops in _sdpa_ops.OPS.values() for name, make in ops.items()}
LOWER_RIGHT = (FLASH,)
KINDS = ("", "_backward")


@pytest.fixture(params=["Python", "C++"])
def on_cpu(request, monkeypatch):
    """The kernels are registered for CPU tensors, and emulated: those in Python alone, or with
    those in C++ before them."""
    if request.param == "Python":
        monkeypatch.setattr(_load, "has_nodes", False)
    elif not _load.has_nodes:
        pytest.skip("_autograd.so does not fit this torch")
    override = sdpa_hook.Override("CPU", MAKERS)
    tk.sdpa_report(reset=True)
    with tk.emulate() as run:
        yield run
    override.remove()


@pytest.mark.emulator
@pytest.mark.parametrize("name", [FLASH, CUDNN])
def test_what_is_in_cpp_takes_plain_calls_alone(on_cpu, name):
    """Others go on to Python's kernels."""
    if not _load.has_nodes:
        return  # the fixture's other parameter

    def taken():
        counts = torch.ops.thunderkittens_sdpa.counts()
        return [dict(zip(_sdpa_ops.IN_CPP, counts, strict=True))[f"{name}{x}"] for x in KINDS]

    before = taken()
    q, k, v = (laid_out("heads outside", (1, 2, 8, 64)).requires_grad_() for _ in range(3))
    call(name, q, k, v)[0].sum().backward()
    assert taken() == [n + 1 for n in before]
    if name == CUDNN:
        call(name, q, k, laid_out("heads outside", (1, 2, 8, 72)))
    else:  # rows that see no key, which Python leaves to PyTorch
        with pytest.raises(NotImplementedError, match="no kernel for CPU"):
            call(name, q, k[:, :, :4], v[:, :, :4], is_causal=True)
    assert taken() == [n + 1 for n in before]


def arguments(name, compute_lse=True):
    """What stands between the operands and dropout in the op's arguments."""
    return (None, compute_lse) if name in (CUDNN, EFFICIENT) else ()


def call(name, q, k, v, compute_lse=True, **options):
    return getattr(aten, name).default(q, k, v, *arguments(name, compute_lse), **options)


def laid_out(layout, shape, dtype=BF16):
    """A tensor (B, H, S, D) of some layout in memory."""
    batch, heads, length, dim = shape
    if layout == "heads outside":
        return normal(shape, dtype, "cpu")
    if layout == "rows outside":
        return normal((batch, length, heads, dim), dtype, "cpu").transpose(1, 2)
    if layout == "packed":
        return normal((batch, length, 3, heads, dim), dtype, "cpu")[:, :, 1].transpose(1, 2)
    if layout == "expanded":
        return normal((batch, 1, length, dim), dtype, "cpu").expand(shape)
    assert layout == "batch inside"
    return normal((heads, length, batch, dim), dtype, "cpu").permute(2, 0, 1, 3)


LAYOUTS = ("heads outside", "rows outside", "packed", "expanded", "batch inside")


def described(results):
    """Shape, dtype and strides, but of dimensions of size 1, of each result."""
    return [
        (
            tuple(x.shape),
            x.dtype,
            tuple(s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1),
        )
        if isinstance(x, torch.Tensor)
        else x
        for x in results
    ]


def on_meta(x):
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def backward_arguments(name, results, grad, q, k, v, causal=False):
    """What autograd passes to the op's backward."""
    out, lse, *rest = results
    if name == FLASH:
        return (grad, q, k, v, out, lse, *rest[:4], 0.0, causal, *rest[4:6])
    if name == CUDNN:
        return (grad, q, k, v, out, lse, *rest[4:6], None, *rest[:4], 0.0, causal)
    if name == EFFICIENT:
        return (grad, q, k, v, None, out, lse, *rest, 0.0, [True, True, True, False], causal)
    return (grad, q, k, v, out, lse, 0.0, causal)


@pytest.mark.emulator
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ALL_OPS)
def test_results_are_what_compiled_graphs_expect(on_cpu, name, layout):
    """Shapes, dtypes and strides are those of PyTorch's functions for tensors without data."""
    q, k, v = (laid_out(layout, (2, 2, n, 40)) for n in (9, 11, 11))
    if name in (CUDNN, EFFICIENT):
        v = laid_out(layout, (2, 2, 11, 72))
    metas = [on_meta(x) for x in (q, k, v)]
    for compute_lse in (True, False):
        results = call(name, q, k, v, compute_lse)
        expected = call(name, *metas, compute_lse)
        if name == CUDNN and not compute_lse:  # then nobody reads the others
            results, expected = results[:1], expected[:1]
        assert described(results) == described(expected)
        if not compute_lse:
            break
        grad = laid_out(layout, tuple(results[0].shape))
        args = backward_arguments(name, results, grad, q, k, v)
        backward = getattr(aten, f"{name}_backward").default
        meta_args = [on_meta(x) for x in args]
        assert described(backward(*args)) == described(backward(*meta_args))
    assert all(call.taken for call in tk.sdpa_report())


@pytest.mark.parametrize("name", ALL_OPS)
def test_signatures_are_those_of_the_ops(name):
    """Names, order, defaults and keywords, by which the dispatcher calls."""
    kernels = MAKERS[name](print, print)
    for op, kernel in zip((name, f"{name}_backward"), kernels, strict=True):
        schema = getattr(aten, op).default._schema
        parameters = inspect.signature(kernel).parameters
        assert list(parameters) == [a.name.removesuffix("_") for a in schema.arguments]
        for argument, parameter in zip(schema.arguments, parameters.values(), strict=True):
            assert (parameter.kind is parameter.KEYWORD_ONLY) == argument.kwarg_only
            empty = parameter.default is parameter.empty
            assert empty == (not argument.has_default_value())
            assert empty or parameter.default == argument.default_value


def reference(q, k, v, causal, scale=None):
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = tk.reference.attention(*wide, causal=causal, scale=scale, return_lse=True)
    return wide, out, lse


@pytest.mark.emulator
@pytest.mark.parametrize("lengths", [(33, 33), (20, 45), (45, 20)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ALL_OPS)
def test_values_and_gradients(on_cpu, name, causal, lengths):
    """By the op's own alignment of causal masks; the LSE is the natural logarithm."""
    rows, keys = lengths
    if name == FLASH and causal and rows > keys:
        return  # left to PyTorch, because rows see no key
    heads = 2 if name == EFFICIENT else 1
    q = laid_out("rows outside", (1, 2, rows, 64)).requires_grad_()
    k, v = (laid_out("packed", (1, heads, keys, 64)).requires_grad_() for _ in range(2))
    alignment = causal and (True if name in LOWER_RIGHT else "upper_left")
    wide, expected, expected_lse = reference(q, k, v, alignment, 0.2)
    results = call(name, q, k, v, is_causal=causal, scale=0.2)
    lse = results[1].reshape(1, 2, -1)[..., :rows]
    torch.testing.assert_close(results[0].double(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), expected_lse.detach(), atol=1e-3, rtol=1e-3)
    grad = normal(expected.shape, BF16, "cpu")
    results[0].backward(grad)
    expected.backward(grad.double())
    for x, y in zip((q, k, v), wide, strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, atol=3e-2, rtol=3e-2)
    assert [(c.taken, c.calls) for c in tk.sdpa_report()] == [(True, 1)] * 2
    if name == EFFICIENT:
        assert bool((results[1][..., rows:] == math.inf).all())


@pytest.mark.emulator
@pytest.mark.parametrize("name", CUDA_OPS)
@pytest.mark.parametrize("on_cpu", ["Python"], indirect=True)
def test_the_state_of_random_numbers_is_shared(on_cpu, name):
    """It is on the CPU, as that of PyTorch's efficient attention, and costs no allocation."""
    places = {FLASH: (6, 7), CUDNN: (6, 7), EFFICIENT: (2, 3)}[name]
    q, k, v = (laid_out("heads outside", (1, 1, 8, 64)).requires_grad_() for _ in range(3))
    first, second = ([call(name, q, k, v)[i] for i in places] for _ in range(2))
    assert all(x.data_ptr() == y.data_ptr() for x, y in zip(first, second, strict=True))
    assert not any(x.requires_grad for x in first)


@pytest.mark.parametrize("flash", [True, False])
def test_the_state_of_a_cuda_graph_is_its_own(flash, monkeypatch):
    """Where a graph is recorded, its results must be on the GPU, in its memory."""
    monkeypatch.setattr(_sdpa_ops, "_capturing", lambda: True)
    with FakeTensorMode():
        query = torch.empty(1, 1, 8, 64, dtype=BF16, device="cuda")
        own = _sdpa_ops._random_state(query, flash)
    monkeypatch.setattr(_sdpa_ops, "_capturing", lambda: False)
    shared = _sdpa_ops._random_state(query, flash)
    for x, y in zip(own, shared, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert (x.device.type, y.device.type) == ("cuda", "cpu")


@pytest.mark.emulator
@pytest.mark.parametrize("name", ALL_OPS)
def test_determinism_is_asked_for(on_cpu, name, monkeypatch):
    seen = []
    run = emulation.run

    def watched(op, arrays, **scalars):
        if op == "attention_backward":
            seen.append(bool(scalars.get("deterministic")))
        return run(op, arrays, **scalars)

    monkeypatch.setattr(emulation, "run", watched)
    q, k, v = (laid_out("heads outside", (1, 1, 8, 64)).requires_grad_() for _ in range(3))
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            call(name, q, k, v)[0].sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert seen == [False, True]


@pytest.mark.emulator
@pytest.mark.parametrize("name", ALL_OPS)
def test_backward_under_autocast_keeps_its_dtype(on_cpu, name):
    """Autocast of another dtype changes nothing in a kernel, which is below it."""
    q, k, v = (laid_out("heads outside", (1, 1, 8, 64), FP16).requires_grad_() for _ in range(3))
    with torch.autocast("cpu", BF16):
        with torch.autocast("cpu", enabled=False):
            out = call(name, q, k, v)[0]
        out.sum().backward()
    assert out.dtype == q.grad.dtype == FP16


@pytest.mark.emulator
@pytest.mark.parametrize("name", CUDA_OPS)
def test_compiled(on_cpu, name):
    torch._dynamo.reset()
    q, k, v = (laid_out("rows outside", (1, 2, 12, 64)).requires_grad_() for _ in range(3))

    def attend(q, k, v):
        return call(name, q, k, v, is_causal=True)[0]

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    results = [
        [out := function(q, k, v), *torch.autograd.grad(out.float().sum(), (q, k, v))]
        for function in (attend, compiled)
    ]
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)
        assert x.stride() == y.stride()
    torch._dynamo.reset()


# What is left to PyTorch.


class Recorder:
    """Stands for PyTorch's kernel."""

    def __init__(self):
        self.calls = []

    def __call__(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return "of PyTorch"


def tensors(dtype=BF16, dim=64, value_dim=None, heads=(2, 2), lengths=(8, 8), batches=(1, 1)):
    (heads_q, heads_k), (rows, keys), (batch, batch_k) = heads, lengths, batches
    return (
        normal((batch, heads_q, rows, dim), dtype, "cpu"),
        normal((batch_k, heads_k, keys, dim), dtype, "cpu"),
        normal((batch_k, heads_k, keys, value_dim or dim), dtype, "cpu"),
    )


# Operands, options, a part of the reason, and the ops that it is about.
REFUSED = {
    "dropout": (tensors(), {"dropout_p": 0.1}, "dropout", ALL_OPS),
    "float32": (tensors(FP32), {}, "float32", ALL_OPS),
    "mixed dtypes": ((*tensors()[:2], tensors(FP16)[2]), {}, "float16", ALL_OPS),
    "head dim of 60": (tensors(dim=60), {}, "head dims 60", ALL_OPS),
    "head dim of 264": (tensors(dim=264), {}, "head dims 264", ALL_OPS),
    "value of 4": (tensors(value_dim=4), {}, "head dims 64, 64, 4", ALL_OPS),
    "value of 72": (tensors(value_dim=72), {}, "head dim of the value", (FLASH, FOR_CPU)),
    "3 heads and 2": (tensors(heads=(3, 2)), {}, "3 heads", ALL_OPS),
    "no rows": (tensors(lengths=(0, 8)), {}, "empty", ALL_OPS),
    "no keys": (tensors(lengths=(8, 0)), {}, "empty", ALL_OPS),
    "no batch": (tensors(batches=(0, 0)), {}, "empty", ALL_OPS),
    "no heads": (tensors(heads=(0, 0)), {}, "empty", ALL_OPS),
    "broadcast batch": (tensors(batches=(2, 1)), {}, "broadcast", ALL_OPS),
    "3 dimensions": (tuple(x[0] for x in tensors()), {}, "4 dimensions", ALL_OPS),
    "scale of inf": (tensors(), {"scale": math.inf}, "scale", ALL_OPS),
    "scale of nan": (tensors(), {"scale": math.nan}, "scale", ALL_OPS),
    "empty rows": (tensors(lengths=(9, 8)), {"is_causal": True}, "no key", (FLASH,)),
    "debug mask": (tensors(), {"return_debug_mask": True}, "debug", (FLASH, CUDNN)),
    "bias": (tensors(), {"attn_bias": torch.zeros(8, 8)}, "mask", (CUDNN, EFFICIENT)),
    "mask": (tensors(), {"attn_mask": torch.zeros(8, 8)}, "mask", (FOR_CPU,)),
    "many rows": (
        tuple(x[:, :, :1].expand(1 << 13, 1 << 13, 8, 64) for x in tensors(heads=(1, 1))),
        {},
        "rows",
        ALL_OPS,
    ),
}


@pytest.mark.emulator
@pytest.mark.parametrize("name", ALL_OPS)
@pytest.mark.parametrize("case", REFUSED)
def test_left_to_pytorch(case, name):
    """With the arguments as they were, and the reason in the report, in both directions."""
    (q, k, v), options, reason, names = REFUSED[case]
    if name not in names:
        return
    recorders = Recorder(), Recorder()
    forward, backward = MAKERS[name](*recorders)
    bias = options.get("attn_bias")
    given = {key: x for key, x in options.items() if key != "attn_bias"}
    lse = (bias, True) if name in (CUDNN, EFFICIENT) else ()
    tk.sdpa_report(reset=True)
    with tk.emulate():
        assert forward(q, k, v, *lse, **given) == "of PyTorch"
        causal = options.get("is_causal", False)
        rest = [q, q] if name == EFFICIENT else [None, None, 1, 1, q, q, None]
        args = list(backward_arguments(name, (q, q, *rest), q, q, k, v, causal))
        dropout = next(i for i, x in enumerate(args) if isinstance(x, float))
        args[dropout] = options.get("dropout_p", 0.0)
        if bias is not None:
            args[args.index(None) if name == EFFICIENT else 8] = bias
        keywords = {key: x for key, x in options.items() if key in ("scale", "attn_mask")}
        if case != "debug mask":
            assert backward(*args, **keywords) == "of PyTorch"
    report = tk.sdpa_report(reset=True)
    assert len(report) == len([r for r in recorders if r.calls])
    assert not any(call.taken for call in report)
    assert all(reason in call.reason for call in report)
    # Every argument has arrived, in the order of the schema.
    for recorder, op in zip(recorders, (name, f"{name}_backward"), strict=True):
        for args_seen, keywords_seen in recorder.calls:
            schema = getattr(aten, op).default._schema
            positional = [a for a in schema.arguments if not a.kwarg_only]
            assert len(args_seen) == len(positional)
            assert set(keywords_seen) == {a.name for a in schema.arguments if a.kwarg_only}
    if recorders[1].calls:
        seen = recorders[1].calls[0][0]
        assert all(x is y for x, y in zip(seen, args, strict=True))


@pytest.mark.parametrize("name", CUDA_OPS)
def test_there_may_be_no_kernel_of_pytorch(name, monkeypatch):
    monkeypatch.setattr(_load, "has_nodes", False)
    override = sdpa_hook.Override("CPU", {name: MAKERS[name]})
    with ExitStack() as stack:
        stack.callback(override.remove)
        with pytest.raises(NotImplementedError, match="no kernel for CPU"):
            call(name, *tensors())
    with pytest.raises(NotImplementedError):
        call(name, *tensors())


def test_devices_without_kernels(monkeypatch):
    _sdpa_ops._device_refusal.cache_clear()
    monkeypatch.setattr(_load, "cuda_problem", "a sentence")
    assert _sdpa_ops._device_refusal(0) == "a sentence"
    _sdpa_ops._device_refusal.cache_clear()
