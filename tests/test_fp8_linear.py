"""`tk.fp8_linear`: its products against those of what it rounds, and training with it."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import thunderkittens as tk
from helpers.cover import cover, over
from helpers.layouts import matrix
from thunderkittens import emulation

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def relative(x, y):
    x, y = x.detach().double(), y.detach().double()
    return float((x - y).norm() / y.norm())


def products(x, w, bias, grad, scaling, grad_dtype, accurate):
    """Output and gradients as products of what the quantiser gives, one op at a time."""
    of_x, of_w = {"row": ("row", "row"), "block": ("1x128", "128x128")}[scaling]
    options = {"accurate": accurate}
    a, scale_a, a_t, scale_a_t = tk.fp8_quantize(x, of_x, transposed=True)
    b, scale_b, b_t, scale_b_t = tk.fp8_quantize(w, of_w, transposed=True)
    g, scale_g, g_t, scale_g_t = tk.fp8_quantize(grad, of_x, dtype=grad_dtype, transposed=True)
    out = tk.fp8_gemm(a, b.t(), scale_a, scale_b.t(), bias=bias, out_dtype=x.dtype, **options)
    grad_x = tk.fp8_gemm(g, b_t.t(), scale_g, scale_b_t.t(), out_dtype=x.dtype, **options)
    grad_w = tk.fp8_gemm(g_t, a_t.t(), scale_g_t, scale_a_t.t(), out_dtype=w.dtype, **options)
    grad_bias = None if bias is None else grad.sum(0, dtype=FP32).to(bias.dtype)
    return [y for y in (out, grad_x, grad_w, grad_bias) if y is not None]


def cases(device, intensity):
    return cover(
        {
            # Rows, K, N.
            "shape": [(1, 1, 1), (7, 129, 16), (129, 272, 112), (64, 131, 7), (0, 8, 9), (5, 8, 0)]
            + [(1000, 1024, 2112), (300, 777, 520)] * (device == "cuda"),
            "scaling": ["row", "block"],
            "grad_dtype": [E4M3, E5M2],
            "accurate": [True, False],
            "dtypes": [(BF16, BF16), (FP32, FP32), (BF16, FP32), (FP16, BF16)],
            "bias": [True, False],
            "layout": ["packed", "packed_t", "sliced", "unaligned"],
            "emulated": [False, True] if device == "cpu" and emulation.problem is None else [False],
        },
        intensity,
    )


@over(cases)
def test_is_three_products(device, case):
    """Bit by bit, of rows with any strides, on all back ends, with the gradient of each operand
    alone too; and the reference's."""
    (m, k, n), (dtype, of_weight) = case["shape"], case["dtypes"]
    x = matrix(torch.randn(m, k, device=device).to(dtype), case["layout"])
    w = matrix((torch.randn(n, k, device=device) / 8).to(of_weight), case["layout"])
    bias = torch.randn(n, device=device).to(dtype) if case["bias"] else None
    grad = matrix(torch.randn(m, n, device=device).to(dtype), case["layout"])
    options = {key: case[key] for key in ("scaling", "grad_dtype", "accurate")}
    with tk.emulate("late_mma", seed=m) if case["emulated"] else nullcontext():
        leaves = [t.detach().requires_grad_() for t in (x, w, bias) if t is not None]
        out = tk.fp8_linear(*leaves, **options)
        actual = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
        expected = products(x, w, bias, grad, **options)
        alone = []
        for i in range(len(leaves)):
            single = [t.detach().requires_grad_(i == j) for j, t in enumerate(leaves)]
            alone += torch.autograd.grad(tk.fp8_linear(*single, **options), single[i], grad)
    for y, e in zip(actual, expected, strict=True):
        assert (y.dtype, y.shape) == (e.dtype, e.shape)
        assert torch.equal(y, e)
    for y, e in zip(alone, actual[1:], strict=True):
        assert torch.equal(y, e)
    again = tk.reference.fp8_linear(*leaves, **options)
    reference = [again, *torch.autograd.grad(again, leaves, grad)]
    # Sums on the tensor cores keep 13 bits.
    kept = 2.0**-12 if case["accurate"] else 2.0**-13 * (2 + max(m, n, k) / 32)
    for y, e in zip(actual, [t.detach() for t in reference], strict=True):
        assert y.dtype == e.dtype
        if y.numel():
            assert float((y.double() - e.double()).norm()) <= (
                kept + torch.finfo(y.dtype).eps
            ) * float(e.double().norm())


@pytest.mark.parametrize("scaling", ["row", "block"])
@pytest.mark.parametrize("grad_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_gradients(device, scaling, grad_dtype):
    """Each result differs from that of the unrounded product by about two roundings to fp8."""
    x = torch.randn(3, 50, 264, device=device, requires_grad=True)
    w = torch.randn(136, 264, device=device, requires_grad=True)
    bias = torch.randn(136, device=device, requires_grad=True)
    grad = torch.randn(3, 50, 136, device=device)
    out = tk.fp8_linear(x, w, bias, scaling=scaling, grad_dtype=grad_dtype)
    actual = torch.autograd.grad(out, (x, w, bias), grad)
    plain = torch.nn.functional.linear(x, w, bias)
    expected = torch.autograd.grad(plain, (x, w, bias), grad)
    bound = 0.05 if grad_dtype == torch.float8_e4m3fn else 0.09
    assert relative(out, plain) < 0.05
    for a, e in zip(actual[:2], expected[:2], strict=True):
        assert a.dtype == e.dtype
        assert relative(a, e) < bound
    torch.testing.assert_close(actual[2], expected[2])


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_only_what_is_needed(device, needs):
    x = torch.randn(20, 32, device=device).requires_grad_(needs[0])
    w = torch.randn(24, 32, device=device).requires_grad_(needs[1])
    out = tk.fp8_linear(x, w)
    assert out.requires_grad == any(needs)
    if any(needs):
        out.sum().backward()
        assert [t.grad is not None for t in (x, w)] == list(needs)


class Calls(TorchDispatchMode):
    """What the quantiser has been asked for: whether also for the transpose."""

    def __init__(self):
        super().__init__()
        self.transposed = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.thunderkittens.fp8_quantize.default:
            self.transposed.append(len(args) > 4 and args[4])
        return function(*args, **(kwargs or {}))


def test_nothing_is_made_for_gradients_that_nobody_wants(device):
    x, layer = torch.randn(20, 32, device=device), tk.Fp8Linear(32, 24, device=device)
    expected = layer(x).detach()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, Calls() as calls:
            assert torch.equal(layer(x), expected)
        assert calls.transposed == [False, False]
    with Calls() as calls:
        layer(x)
    assert calls.transposed == [True, False]  # that of x, for the gradient of the weight


def test_what_a_graph_holds(device):
    """x in eight bits and its scales; of the weight itself no copy, autocast or not."""
    layer = tk.Fp8Linear(512, 256, device=device)
    x = torch.randn(1024, 512, device=device, dtype=BF16)
    for autocast in (False, True):
        held = {}

        def pack(t, held=held):
            held[t.untyped_storage().data_ptr()] = t
            return t

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
            torch.autocast(device, BF16, enabled=autocast),
        ):
            out = layer(x.requires_grad_())
        total = sum(t.nbytes for t in held.values()) - layer.weight.nbytes
        assert layer.weight.untyped_storage().data_ptr() in held
        assert total <= 1.04 * (x.numel() + layer.weight.numel())
        out.sum().backward()
        assert layer.weight.grad.dtype == FP32


def train(layer, device, steps=60, compiled=False):
    """Losses of a small network that learns a fixed one."""
    torch.manual_seed(0)
    make = {"bf16": torch.nn.Linear, "row": tk.Fp8Linear, "block": tk.Fp8Linear}[layer]
    options = {} if layer == "bf16" else {"scaling": layer}
    net = torch.nn.Sequential(
        make(64, 160, **options), torch.nn.GELU(), make(160, 64, **options)
    ).to(device, BF16)
    step = torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net
    teacher = torch.randn(64, 64, device=device, dtype=BF16) / 8
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        x = torch.randn(192, 64, device=device, dtype=BF16)
        loss = torch.nn.functional.mse_loss(step(x).float(), torch.tanh(x @ teacher).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return torch.tensor(losses)


@pytest.mark.parametrize("scaling", ["row", "block"])
def test_training_follows_bf16(device, scaling):
    """The loss falls as in bfloat16: the same curve within a tenth, smoothed over ten steps."""
    fp8, bf16 = train(scaling, device), train("bf16", device)
    smooth = lambda x: x.unfold(0, 10, 5).mean(-1)  # noqa: E731
    assert float(bf16[-10:].mean()) < 0.5 * float(bf16[:5].mean())
    assert bool(((smooth(fp8) - smooth(bf16)).abs() < 0.1 * smooth(bf16)).all())


def test_training_compiled(device):
    """The same curve, bit by bit."""
    torch._dynamo.reset()
    assert torch.equal(train("block", device, 10, compiled=True), train("block", device, 10))


def test_autocast(device):
    x, layer = torch.randn(5, 32, device=device), tk.Fp8Linear(32, 16).to(device)
    with torch.autocast(device, BF16):
        assert layer(x).dtype == BF16
    assert layer(x).dtype == FP32


# What test_library.py asks of the ops


def sample(device, rows=40):
    x = torch.randn(2, rows, 272, device=device, dtype=BF16).transpose(0, 1)
    w, bias = torch.randn(24, 272, device=device), torch.randn(24, device=device)
    return [t.requires_grad_() for t in (x, w, bias)]


def with_gradients(function, leaves):
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]


def assert_same(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


@pytest.mark.parametrize("autocast", [False, True])
def test_compile(device, autocast):
    """Forward and backward in one graph each, for all lengths."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(tk.fp8_linear, fullgraph=True, backend=counter, dynamic=True)
    for rows in (40, 45, 129):
        leaves = sample(device, rows)
        with torch.autocast(device, FP16, enabled=autocast):
            expected = with_gradients(tk.fp8_linear, leaves)
            assert_same(with_gradients(compiled, leaves), expected)
    assert counter.frame_count <= 2
    with torch.no_grad():
        assert torch.equal(compiled(*leaves), tk.fp8_linear(*leaves))


@pytest.mark.parametrize("strict", [False, True])
def test_export(device, strict):
    layer = tk.Fp8Linear(272, 24, device=device, dtype=BF16)
    x = sample(device)[0].detach()
    shapes = ({0: torch.export.Dim.AUTO},)
    with torch.no_grad():  # without the transposes, whose number of blocks would be fixed
        program = torch.export.export(layer, (x,), dynamic_shapes=shapes, strict=strict)
    for rows in (40, 71):
        x = sample(device, rows)[0].detach()
        assert torch.equal(program.module()(x), layer(x))


def test_transforms(device):
    """Gradients by torch.func, per sample too; vmap inside and outside."""
    leaves = sample(device)
    plain = [t.detach() for t in leaves]

    def loss(*tensors):
        return tk.fp8_linear(*tensors).float().square().sum()

    expected = torch.autograd.grad(loss(*leaves), leaves)
    assert_same(torch.func.grad(loss, (0, 1, 2))(*plain), expected)
    one, two = plain[0][:20], plain[0][20:]
    loop = [tk.fp8_linear(x, *plain[1:]) for x in (one, two)]
    stack = torch.stack([one, two])
    in_dims = (0, None, None)
    assert_same(torch.func.vmap(tk.fp8_linear, in_dims)(stack, *plain[1:]), loop)
    per_sample = torch.func.vmap(torch.func.grad(loss, (0, 1)), in_dims)(stack, *plain[1:])
    for i, x in enumerate((one, two)):
        assert_same([g[i] for g in per_sample], torch.func.grad(loss, (0, 1))(x, *plain[1:]))
    mapped = torch.func.vmap(tk.fp8_linear, in_dims)
    outside = torch.func.grad(lambda x: mapped(x, *plain[1:]).float().square().sum())(stack)
    assert_same(outside, per_sample[0])


def test_no_second_derivative(device):
    """Nor is one dropped silently, as of a penalty on gradients."""
    x, w, bias = sample(device)
    for loss in (lambda y: y.sum(), lambda y: y.float().square().sum()):
        first = torch.autograd.grad(loss(tk.fp8_linear(x, w, bias)), x, create_graph=True)[0]
        with pytest.raises(RuntimeError, match=r"tk\.fp8_linear: .* \(double backward\)$"):
            first.float().square().sum().backward()
    with pytest.raises(RuntimeError, match="forward"):
        torch.func.jvp(lambda x: tk.fp8_linear(x, w), (x.detach(),), (x.detach(),))


def test_meta_and_fake_tensors(device):
    leaves = sample(device)
    real = tk.fp8_linear(*leaves)
    meta = tk.fp8_linear(*(t.detach().to("meta") for t in leaves))
    with FakeTensorMode() as mode:
        fake = tk.fp8_linear(*(mode.from_tensor(t) for t in leaves))
        assert fake.requires_grad
        fake.sum().backward()
    for y in (meta, fake):
        assert (y.shape, y.dtype, y.stride()) == (real.shape, real.dtype, real.stride())


def test_reruns_are_bit_equal(device):
    leaves = sample(device)
    first = with_gradients(tk.fp8_linear, leaves)
    for _ in range(3):
        assert_same(with_gradients(tk.fp8_linear, leaves), first)


def test_copies_and_files(device, tmp_path):
    layer = tk.Fp8Linear(16, 8, bias=False, device=device, scaling="row", grad_dtype=E5M2)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    plain = torch.nn.Linear(16, 8, bias=False, device=device)
    plain.load_state_dict(torch.load(tmp_path / "layer.pt"))
    x = torch.randn(4, 16, device=device)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert torch.equal(plain.weight, layer.weight)


@pytest.mark.gpu
def test_cuda_graph_and_stream(device):
    leaves = sample(device)
    expected = with_gradients(tk.fp8_linear, leaves)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        with_gradients(tk.fp8_linear, leaves)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = with_gradients(tk.fp8_linear, leaves)
    for y in captured:
        y.zero_()
    graph.replay()
    assert_same(captured, expected)


WRONG = {
    "list": (TypeError, "x must be a bfloat16, float16 or float32 tensor, got list", {"x": [1.0]}),
    "double": (TypeError, "x must be a bfloat16", {"x": torch.zeros(4, 8).double()}),
    "weight": (TypeError, "weight must be a bfloat16", {"weight": torch.zeros(5, 8).long()}),
    "bias": (TypeError, "bias must be a bfloat16", {"bias": 0.0}),
    "sparse": (TypeError, "weight must be a dense", {"weight": torch.zeros(5, 8).to_sparse()}),
    "device": (TypeError, "weight is on meta", {"weight": torch.zeros(5, 8, device="meta")}),
    "device of bias": (TypeError, "bias is on meta", {"bias": torch.zeros(5, device="meta")}),
    "grad_dtype": (TypeError, "grad_dtype is torch.bfloat16", {"grad_dtype": BF16}),
    "scaling": (ValueError, "scaling is 'tensor'; it must be", {"scaling": "tensor"}),
    "inner": (ValueError, "(4, 8) and weight has shape (8, 5)", {"weight": torch.zeros(8, 5)}),
    "vector": (ValueError, "weight has shape (8,)", {"weight": torch.zeros(8)}),
    "scalar": (ValueError, "x has shape ()", {"x": torch.zeros(())}),
    "bias shape": (ValueError, "bias has shape (8,); it must be (5,)", {"bias": torch.zeros(8)}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(device, name):
    error, words, other = WRONG[name]
    call = {"x": torch.zeros(4, 8), "weight": torch.zeros(5, 8)} | other
    call = {
        key: t.to(device) if isinstance(t, torch.Tensor) and t.device.type == "cpu" else t
        for key, t in call.items()
    }
    with pytest.raises(error) as caught:
        tk.fp8_linear(call.pop("x"), **call)
    assert str(caught.value).startswith("tk.fp8_linear: ")
    assert words in str(caught.value)
