"""`tk.layer_norm`: values and gradients against the formula in float64, layouts, wrong calls."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from helpers.attention import emulated
from helpers.cover import cover, over, over_forced
from helpers.guard import assert_guards_intact
from helpers.layouts import embed, spread, unaligned
from helpers.norms import BF16, DTYPES, FP16, FP32, assert_gradients, assert_norm, normal

SEED = 9876543210987
FORMS = ("plain", "residual", "wide residual", "dropout")


def residual_of(form, dtype, shape, device):
    if form == "plain":
        return {}, {}
    tensors = {"residual": normal(shape, FP32 if form == "wide residual" else dtype, device)}
    if form != "dropout":
        return tensors, {}
    return tensors, {"dropout_p": 0.4, "seed": torch.tensor(SEED, device=device)}


def parameters(kind, width, dtype, device):
    """Weight and bias: "none", "weight", "both", or "fp32"."""
    if kind == "none":
        return {}
    dtype = FP32 if kind == "fp32" else dtype
    names = ("weight",) if kind == "weight" else ("weight", "bias")
    return {name: normal((width,), dtype, device) for name in names}


def cases(device, intensity):
    return cover(
        {
            "dtype": DTYPES,
            "form": FORMS,
            "parameters": ("none", "weight", "both", "fp32"),
            "width": (2, 7, 8, 96, 129, 1000, 1536, 2880),
            "mean": (0.0, 3.0),
        },
        max(intensity, 1) + (emulated(device) is False),
    )


@over(cases)
def test_values(device, case):
    dtype, width = case["dtype"], case["width"]
    shape = (3, 5, width)
    tensors, options = residual_of(case["form"], dtype, shape, device)
    tensors |= parameters(case["parameters"], width, dtype, device)
    x = normal(shape, dtype, device, case["mean"])
    assert_norm("layer_norm", x, **tensors, **options)


@pytest.mark.parametrize(
    ("width", "dtype", "form"),
    [
        (8192, BF16, "plain"),
        (16416, BF16, "residual"),
        (20000, FP32, "plain"),
        (20000, FP16, "wide residual"),
        (65536, FP16, "dropout"),
        (70000, BF16, "residual"),
        (20001, BF16, "plain"),
        (65521, FP16, "residual"),
        (30003, FP32, "plain"),
    ],
)
def test_wide_rows(device, width, dtype, form):
    """Held in the registers of a block, or read several times."""
    tensors, options = residual_of(form, dtype, (2, width), device)
    tensors |= parameters("fp32", width, dtype, device)
    assert_norm("layer_norm", normal((2, width), dtype, device, 1.0), **tensors, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", [7, 9, 130, 1001, 4097])
@pytest.mark.parametrize("kind", ["fp32", "both"])
def test_rows_that_follow_each_other(device, width, form, kind):
    """Each begins elsewhere in 16 bytes."""
    tensors, options = residual_of(form, BF16, (19, width), device)
    tensors |= parameters(kind, width, BF16, device)
    assert_norm("layer_norm", normal((19, width), BF16, device, 1.0), **tensors, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 6, 256, 4096, 16416])
def test_exact_rows(device, width, dtype):
    """Rows of as many m + d as m - d, of powers of two d, are normalised without a rounding."""
    signs = torch.ones(5, width, device=device)
    signs[:, ::2] = -1
    powers = 2.0 ** torch.arange(-2, 3, device=device)[:, None]
    weight, bias = (torch.randint(-8, 9, (width,), device=device).to(dtype) for _ in range(2))
    out = tk.layer_norm((signs * powers + 5).to(dtype), weight, bias, eps=0.0)
    assert torch.equal(out, (signs * weight + bias).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 8, 700])
def test_rows_of_equal_elements(device, width, dtype):
    """They are the bias, and have no gradient."""
    x = torch.full((4, width), 3.0, dtype=dtype, device=device, requires_grad=True)
    weight, bias = (normal((width,), dtype, device) for _ in range(2))
    out = tk.layer_norm(x, weight, bias)
    assert torch.equal(out, bias.expand(4, width))
    if width == 1:
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert not bool(grad.any())


def test_a_large_mean(device):
    """Squares are those of differences from the mean."""
    # The mean itself is rounded.
    rounding = 1000 * torch.finfo(FP32).eps
    for shape in ((6, 256), (2, 40000)):
        assert_norm("layer_norm", normal(shape, FP32, device) + 1000, slack=rounding)


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "embedded": embed,
    "unaligned": unaligned,
    "spread": spread,
    "expanded": lambda x: x[:, :1].expand(x.shape),
}


@pytest.mark.parametrize("width", [64, 37])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, layout, width):
    """Operands of different strides; what is between their elements is NaN."""
    shape = (3, 4, width)
    x, residual = (normal(shape, BF16, device) for _ in range(2))
    tensors = parameters("both", width, BF16, device)
    assert_norm("layer_norm", x, residual=LAYOUTS[layout](residual), **tensors)
    assert_norm("layer_norm", LAYOUTS[layout](x), residual=residual, **tensors)
    named = {"x": LAYOUTS[layout](x), **tensors, "residual": LAYOUTS[layout](residual)}
    assert_gradients("layer_norm", tuple(named), list(named.values()))


def gradient_cases(device, intensity):
    return cover(
        {
            "dtype": DTYPES,
            "form": FORMS,
            "parameters": ("none", "weight", "both", "fp32"),
            "width": (6, 8, 96, 129, 1536, 2880),
        },
        max(intensity, 1) + (emulated(device) is False),
    )


@over(gradient_cases)
def test_gradients(device, case):
    dtype, width = case["dtype"], case["width"]
    shape = (3, 7, width)
    tensors, options = residual_of(case["form"], dtype, shape, device)
    named = {"x": normal(shape, dtype, device, 1.0)}
    named |= parameters(case["parameters"], width, dtype, device) | tensors
    assert_gradients("layer_norm", tuple(named), list(named.values()), **options)


@pytest.mark.parametrize(
    ("rows", "width"),
    [
        *((500, 32), (60, 160), (45, 1032), (11, 4104), (5, 8200), (90, 21)),
        *((5, 16416), (21, 1001), (9, 522), (10, 9004), (3, 20001)),
    ],
)
def test_gradients_of_many_rows(device, rows, width):
    """More than the teams of an emulated GPU of one SM, which take several each."""
    named = {"x": normal((rows, width), BF16, device), **parameters("both", width, FP32, device)}

    def check():
        assert_gradients("layer_norm", tuple(named), list(named.values()))

    if emulated(device):
        with tk.emulate(sm_count=1, portable=tk.emulation.portable()):
            check()
    else:
        check()


@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        *((9000, BF16), (8192, FP16), (33000, FP16), (5001, FP32)),
        *(
            pytest.param(*case, marks=pytest.mark.intensity(2))
            for case in ((8500, FP32), (20000, FP32), (65529, BF16), (70000, BF16), (9003, FP16))
        ),
    ],
)
def test_gradients_of_wide_rows(device, width, dtype):
    named = {"x": normal((3, width), dtype, device), **parameters("both", width, dtype, device)}
    assert_gradients("layer_norm", tuple(named), list(named.values()))


@over_forced(["registers", "memory"], [BF16, FP32])
def test_every_path(device, case):
    """Kernels for rows that are not aligned also take those that are."""
    path, dtype = case
    named = {"x": normal((9, 128), dtype, device), **parameters("both", 128, FP32, device)}
    with tk.emulate(config={"path": path}, portable=tk.emulation.portable()):
        assert_norm("layer_norm", *named.values())
        assert_gradients("layer_norm", tuple(named), list(named.values()))


@pytest.mark.parametrize("wanted", [("x",), ("weight",), ("bias",), ("residual",)])
def test_gradients_that_are_wanted(device, wanted):
    tensors = {
        "x": normal((4, 40), BF16, device),
        **parameters("both", 40, BF16, device),
        "residual": normal((4, 40), BF16, device),
    }

    def gradients(names):
        leaves = {n: x.clone().requires_grad_(n in names) for n, x in tensors.items()}
        out, _ = tk.layer_norm(**leaves)
        return torch.autograd.grad(out.square().sum(), [leaves[n] for n in names])

    everything = dict(zip(tensors, gradients(tuple(tensors)), strict=True))
    for name, grad in zip(wanted, gradients(wanted), strict=True):
        assert torch.equal(grad, everything[name])


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 16), (0, 40000)])
def test_no_rows(device, shape):
    x = torch.zeros(shape, device=device, requires_grad=True)
    weight, bias = (torch.ones(shape[-1], device=device, requires_grad=True) for _ in range(2))
    out = tk.layer_norm(x, weight, bias)
    assert out.shape == shape
    grads = torch.autograd.grad(out.sum(), [x, weight, bias])
    assert grads[0].shape == shape
    assert torch.equal(grads[1], torch.zeros_like(weight))
    assert torch.equal(grads[2], torch.zeros_like(bias))


def test_against_pytorch(device):
    """The arguments mean what those of torch.nn.functional.layer_norm do."""
    x, weight, bias = normal((5, 96), FP32, device), *parameters("both", 96, FP32, device).values()
    expected = torch.nn.functional.layer_norm(x, (96,), weight, bias, 1e-3)
    torch.testing.assert_close(tk.layer_norm(x, weight, bias, eps=1e-3), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [4096, 4097, 40000])
def test_guards(device, width):
    x = torch.randn(1 + (1 << 21) // width, width, device=device).bfloat16()
    tensors = parameters("both", width, BF16, device)
    assert_guards_intact(lambda: tk.layer_norm(x, residual=x, **tensors))


X, W = torch.ones(2, 8), torch.ones(8)
WRONG = [
    (((3,), W), {}, TypeError, "x must be a torch.Tensor, got tuple"),
    ((X.double(), W), {}, TypeError, "x is torch.float64"),
    ((X.to_sparse(), W), {}, TypeError, "x must be a dense tensor"),
    ((torch.tensor(1.0), W), {}, ValueError, r"x has shape \(\)"),
    ((torch.ones(3, 0),), {}, ValueError, r"x has shape \(3, 0\)"),
    ((X, torch.ones(7)), {}, ValueError, r"weight has shape \(7,\)"),
    ((X, W.half()), {}, TypeError, "weight is torch.float16"),
    ((X, 1.0), {}, TypeError, "weight must be a torch.Tensor, got float"),
    ((X, W, torch.ones(9)), {}, ValueError, r"bias has shape \(9,\)"),
    ((X, W, W.bfloat16()), {}, TypeError, "bias is torch.bfloat16"),
    ((X.half(), W, W.half()), {}, TypeError, "bias is torch.float16, weight is torch.float32"),
    ((X, None, W), {}, ValueError, "bias needs a weight"),
    ((X, W, 0.0), {}, TypeError, "bias must be a torch.Tensor, got float"),
    ((X, W), {"eps": -1.0}, ValueError, "eps is -1"),
    ((X, W), {"eps": float("inf")}, ValueError, "eps is inf"),
    ((X, W), {"eps": None}, TypeError, "eps must be a number, got NoneType"),
    ((X, W), {"residual": X[:1]}, ValueError, r"residual has shape \(1, 8\)"),
    ((X, W), {"residual": X.half()}, TypeError, "residual is torch.float16"),
    ((X, W), {"residual": X.to("meta")}, TypeError, "residual is on meta"),
    ((X, W), {"dropout_p": 0.1}, ValueError, "dropout_p is 0.1, which needs a residual"),
    ((X, W), {"dropout_p": 0.1, "residual": X}, ValueError, "which needs a seed"),
    ((X, W), {"dropout_p": -0.1, "residual": X}, ValueError, "dropout_p is -0.1"),
    ((X, W), {"residual": X, "seed": torch.tensor([1.0])}, TypeError, "seed is torch.float32"),
    ((X, W), {"residual": X, "seed": torch.tensor([1, 2])}, ValueError, r"seed has shape \(2,\)"),
]


def on(device, value):
    return value.to(device) if isinstance(value, torch.Tensor) and not value.is_meta else value


@pytest.mark.parametrize(("args", "options", "error", "words"), WRONG)
def test_wrong_calls(device, args, options, error, words):
    options = {name: on(device, x) for name, x in options.items()}
    with pytest.raises(error, match=f"tk.layer_norm: .*{words}"):
        tk.layer_norm(*(on(device, x) for x in args), **options)
