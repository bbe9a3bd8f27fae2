"""`tk.based_decode`: values and states against the reference in float64, and against prefill."""

from __future__ import annotations

import math

import pytest
import torch

import thunderkittens as tk

BF16, FP16 = torch.bfloat16, torch.float16
FLAGS = ("test_schema", "test_autograd_registration", "test_faketensor")


def normal(shape, dtype, device):
    return torch.randn(shape, device=device).to(dtype)


def token(batch, heads, columns, dtype, device):
    return [normal((batch, heads, 1, d), dtype, device) for d in (16, 16, columns)]


def some_state(batch, heads, columns, device):
    """That of 100 tokens."""
    _, k, v = (normal((batch, heads, 100, d), BF16, device) for d in (16, 16, columns))
    phi = tk.reference.based_features(k.float())
    return tk.BasedState(phi.mT @ v.float(), phi.sum(2))


def copied(state, dtype=torch.float32):
    return tk.BasedState(*(x.to(dtype, copy=True) for x in state))


def assert_step(step, tensors, state, **options):
    """The output and the state of a step, which is as exact as float32 sums are."""
    expected_state = copied(state, torch.float64)
    expected = tk.reference.based_decode(*(x.double() for x in tensors), expected_state, **options)
    out = step(*tensors, state, **options)
    rounding = {BF16: 2**-8, FP16: 2**-11}[out.dtype]
    scale = float(expected.abs().mean())
    torch.testing.assert_close(out.double(), expected, rtol=rounding, atol=1e-4 * scale)
    for x, y in zip(state, expected_state, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("columns", [64, 112, 128, 8, 256])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_values(device, dtype, normalize, columns):
    for batch, heads in ((1, 1), (3, 2), (40, 16) if device == "cuda" else (5, 3)):
        state = some_state(batch, heads, columns, device)
        tensors = token(batch, heads, columns, dtype, device)
        assert_step(tk.based_decode, tensors, state, normalize=normalize, eps=0.5)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("columns", [64, 112])
def test_decoding_equals_prefill(device, columns, normalize):
    q, k, v = (normal((2, 3, 90, d), BF16, device) for d in (16, 16, columns))
    whole, end = tk.based(q, k, v, normalize=normalize, return_state=True)
    _, state = tk.based(*(x[:, :, :70] for x in (q, k, v)), return_state=True)
    steps = [
        tk.based_decode(*(x[:, :, i : i + 1] for x in (q, k, v)), state, normalize=normalize)
        for i in range(70, 90)
    ]
    expected = whole[:, :, 70:].double()
    error = (torch.cat(steps, 2).double() - expected).square().mean().sqrt()
    assert float(error / expected.square().mean().sqrt()) < 6e-3
    scale = end.numerator.square().mean().sqrt()
    assert float((state.numerator - end.numerator).square().mean().sqrt() / scale) < 3e-3
    torch.testing.assert_close(state.denominator, end.denominator, rtol=1e-5, atol=1e-4)


def test_from_nothing(device):
    q, k, v = token(2, 2, 64, BF16, device)
    zeros = tk.BasedState(*(torch.zeros_like(x) for x in some_state(2, 2, 64, device)))
    out = tk.based_decode(q, k, v, tuple(zeros), normalize=True)
    torch.testing.assert_close(out, v)
    _, state = tk.based(q, k, v, return_state=True)
    torch.testing.assert_close(zeros.denominator, state.denominator)


def strided(x, layout):
    """x with other strides: heads before batches, in a larger buffer, or at an odd address."""
    if layout == "heads first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "in a cache":
        cache = torch.full((x.shape[0], 3, *x.shape[1:]), math.nan, device=x.device).to(x.dtype)
        return cache[:, 1].copy_(x)
    buffer = torch.full((x.numel() + 1,), math.nan, device=x.device).to(x.dtype)
    return buffer[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("layout", ["heads first", "in a cache", "unaligned"])
def test_layouts(device, layout):
    """The state is changed where it is, and nothing beside it."""
    state, tensors = some_state(2, 3, 64, device), token(2, 3, 64, BF16, device)
    expected_state = copied(state)
    expected = tk.based_decode(*tensors, expected_state, normalize=True)
    there = tk.BasedState(*(strided(x, layout) for x in state))
    out = tk.based_decode(*(strided(x, layout) for x in tensors), there, normalize=True)
    assert torch.equal(out, expected)
    for x, y in zip(there, expected_state, strict=True):
        assert torch.equal(x, y)
    if layout == "in a cache":
        base = there.numerator._base
        assert bool(base[:, [0, 2]].isnan().all())


def test_reruns_are_bit_equal(device):
    state, tensors = some_state(5, 3, 112, device), token(5, 3, 112, BF16, device)
    runs = []
    for _ in range(3):
        mine = copied(state)
        runs.append((tk.based_decode(*tensors, mine, normalize=True), *mine))
    for run in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("shape", [(0, 2), (2, 0)])
def test_nothing_to_compute(device, shape):
    state = some_state(*shape, 64, device)
    assert tk.based_decode(*token(*shape, 64, BF16, device), state).shape == (*shape, 1, 64)


# PyTorch


@pytest.mark.parametrize("normalize", [False, True])
def test_opcheck(device, normalize):
    arguments = (*token(2, 2, 64, BF16, device), *some_state(2, 2, 64, device), normalize, 1e-6)
    op = torch.ops.thunderkittens.based_decode.default
    result = torch.library.opcheck(op, arguments, test_utils=(*FLAGS, "test_aot_dispatch_dynamic"))
    assert set(result.values()) == {"SUCCESS"}
    assert op._schema.is_mutable


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compile(device, backend):
    """In one graph, with a state that changes from step to step, and dynamic batches."""
    torch._dynamo.reset()

    def step(q, k, v, numerator, denominator):
        out = tk.based_decode(q * 1.0, k, v, (numerator, denominator), normalize=True)
        return out * 2.0

    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=True)
    for batch in (2, 5):
        state = some_state(batch, 2, 64, device)
        other = copied(state)
        for _ in range(3):
            tensors = token(batch, 2, 64, BF16, device)
            assert torch.equal(compiled(*tensors, *state), step(*tensors, *other))
        assert all(torch.equal(x, y) for x, y in zip(state, other, strict=True))


def test_export(device):
    class Step(torch.nn.Module):
        def forward(self, q, k, v, numerator, denominator):
            return tk.based_decode(q, k, v, (numerator, denominator))

    arguments = (*token(2, 2, 64, BF16, device), *some_state(2, 2, 64, device))
    program = torch.export.export(Step(), arguments)
    state = some_state(2, 2, 64, device)
    other = copied(state)
    out = program.module()(*arguments[:3], *state)
    assert torch.equal(out, tk.based_decode(*arguments[:3], other))
    assert torch.equal(state.numerator, other.numerator)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_autocast(device, dtype):
    state, tensors = some_state(2, 2, 64, device), token(2, 2, 64, torch.float32, device)
    other = copied(state)
    expected = tk.based_decode(*(x.to(dtype) for x in tensors), other)
    with torch.autocast(device, dtype):
        out = tk.based_decode(*tensors, state)
    assert torch.equal(out, expected)
    assert torch.equal(state.numerator, other.numerator)


@pytest.mark.gpu
def test_cuda_graph(device):
    state, static = some_state(3, 2, 64, device), token(3, 2, 64, BF16, device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        tk.based_decode(*static, copied(state))
    torch.cuda.current_stream().wait_stream(stream)
    other = copied(state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tk.based_decode(*static, state, normalize=True)
    for _ in range(4):
        fresh = token(3, 2, 64, BF16, device)
        for x, y in zip(static, fresh, strict=True):
            x.copy_(y)
        graph.replay()
        assert torch.equal(out, tk.based_decode(*fresh, other, normalize=True))
    assert torch.equal(state.numerator, other.numerator)


@pytest.mark.gpu
def test_side_stream(device):
    state, tensors = some_state(3, 2, 64, device), token(3, 2, 64, BF16, device)
    other = copied(state)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        out = tk.based_decode(*tensors, state)
        assert not stream.query(), "the call waited for its stream"
    stream.synchronize()
    assert torch.equal(out, tk.based_decode(*tensors, other))


def test_no_gradient():
    state = some_state(1, 1, 64, "cpu")
    q, k, v = token(1, 1, 64, BF16, "cpu")
    with pytest.raises(RuntimeError, match="no gradient"):
        tk.based_decode(q.requires_grad_(), k, v, state)
    with torch.no_grad():
        tk.based_decode(q, k, v, state)
    with pytest.raises(RuntimeError, match="transforms"):
        torch.func.vmap(lambda v: tk.based_decode(q.detach(), k, v, state))(v[None])


Q, K, V = (torch.zeros(2, 3, 1, d, dtype=BF16) for d in (16, 16, 64))
N, D = torch.zeros(2, 3, 153, 64), torch.zeros(2, 3, 153)
WRONG = {
    "no tensor": (([1], K, V, (N, D)), {}, TypeError, "q must be a torch.Tensor"),
    "k no tensor": ((Q, None, V, (N, D)), {}, TypeError, "k must be a torch.Tensor"),
    "float32": ((Q.float(), K.float(), V.float(), (N, D)), {}, TypeError, "torch.float32"),
    "mixed": ((Q, K.half(), V, (N, D)), {}, TypeError, "k is torch.float16"),
    "sparse": ((Q, K, V.to_sparse(), (N, D)), {}, TypeError, "dense"),
    "device": ((Q, K.to("meta"), V, (N, D)), {}, TypeError, "one device"),
    "3-D": ((Q[0], K[0], V[0], (N, D)), {}, ValueError, "q has shape"),
    "two tokens": ((Q.repeat(1, 1, 2, 1), K, V, (N, D)), {}, ValueError, "q has shape"),
    "elements": ((Q[..., :8], K[..., :8], V, (N, D)), {}, ValueError, "q has shape"),
    "k's tokens": ((Q, K.repeat(1, 1, 2, 1), V, (N, D)), {}, ValueError, "k has shape"),
    "k's heads": ((Q, K[:, :1], V, (N, D)), {}, ValueError, "k has shape"),
    "v's heads": ((Q, K, V[:, :2], (N, D)), {}, ValueError, "v has shape"),
    "v's batch": ((Q, K, V[:1], (N, D)), {}, ValueError, "v has shape"),
    "columns": ((Q, K, V[..., :60], (N, D)), {}, ValueError, "multiple of 8"),
    "many columns": ((Q, K, V.repeat(1, 1, 1, 5), (N, D)), {}, ValueError, "320 columns"),
    "eps": ((Q, K, V, (N, D)), {"eps": -1.0}, ValueError, "eps is -1.0"),
    "no state": ((Q, K, V, None), {}, TypeError, "state must be"),
    "one part": ((Q, K, V, (N,)), {}, TypeError, "state must be"),
    "no denominator": ((Q, K, V, (N, None)), {}, TypeError, "denominator"),
    "state's dtype": ((Q, K, V, (N.half(), D)), {}, TypeError, "numerator is torch.float16"),
    "state's device": ((Q, K, V, (N.to("meta"), D)), {}, TypeError, "numerator is on meta"),
    "state's shape": ((Q, K, V, (N[..., :32], D)), {}, ValueError, "numerator has shape"),
    "state's rows": ((Q, K, V, (N, D[..., :17])), {}, ValueError, "denominator has shape"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "options", "error", "words"), WRONG.values(), ids=WRONG)
def test_wrong_calls(args, options, error, words):
    with pytest.raises(error, match=words):
        tk.based_decode(*args, **options)


# The kernels on the emulator, that for Hopper and the portable one.


@pytest.mark.emulator
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("threads", [256, 512])
@pytest.mark.parametrize(
    ("columns", "dtype", "normalize"),
    [(64, BF16, True), (112, BF16, False), (128, FP16, True), (8, FP16, False), (256, BF16, True)],
)
def test_emulated(columns, dtype, normalize, threads, portable):
    state, tensors = some_state(2, 3, columns, "cpu"), token(2, 3, columns, dtype, "cpu")
    with tk.emulate("random", portable=portable, config={"threads": threads}) as run:
        assert_step(tk.based_decode, tensors, state, normalize=normalize)
    assert [(x["threads"], x["portable"]) for x in run.kernels] == [(threads, portable)]


@pytest.mark.emulator
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("layout", ["heads first", "in a cache", "unaligned"])
def test_emulated_layouts(layout, portable):
    with tk.emulate(portable=portable):
        test_layouts("cpu", layout)
