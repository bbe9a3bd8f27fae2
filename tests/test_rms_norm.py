"""`tk.rms_norm`: values and gradients against the formula in float64, layouts, dropout, wrong
calls."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from helpers.attention import emulated
from helpers.cover import cover, over, over_forced
from helpers.guard import assert_guards_intact
from helpers.layouts import embed, spread, unaligned
from helpers.norms import BF16, DTYPES, FP16, FP32, assert_gradients, assert_norm, normal

SEED = 1234567890123
FORMS = ("plain", "residual", "wide residual", "dropout", "gated", "gate first", "grouped")


def call_of(form, dtype, shape, device):
    """Tensors and options of a form of the call."""
    options, tensors = {}, {}
    if form in ("residual", "wide residual", "dropout"):
        tensors["residual"] = normal(shape, FP32 if form == "wide residual" else dtype, device)
    if form == "dropout":
        options = {"dropout_p": 0.3, "seed": torch.tensor([SEED], device=device)}
    if form in ("gated", "gate first", "grouped"):
        tensors["gate"] = normal(shape, dtype, device)
        options["gate_first"] = form == "gate first"
    if form == "grouped":
        options["group_size"] = shape[-1] // 3 if shape[-1] % 3 == 0 else 1
    return tensors, options


def cases(device, intensity):
    return cover(
        {
            "dtype": DTYPES,
            "form": FORMS,
            "weight": (None, "same", "fp32"),
            "width": (1, 7, 8, 96, 129, 1000, 1536, 2880),
            "offset": (0.0, 1.0),
        },
        max(intensity, 1) + (emulated(device) is False),
    )


@over(cases)
def test_values(device, case):
    dtype, width = case["dtype"], case["width"]
    shape = (3, 5, width)
    tensors, options = call_of(case["form"], dtype, shape, device)
    weight = None
    if case["weight"] is not None:
        weight = normal((width,), dtype if case["weight"] == "same" else FP32, device)
    x = normal(shape, dtype, device)
    assert_norm("rms_norm", x, weight, weight_offset=case["offset"], **tensors, **options)


@pytest.mark.parametrize(
    ("width", "dtype", "form"),
    [
        (8192, BF16, "plain"),
        (12288, FP16, "gated"),
        (16416, BF16, "residual"),
        (20000, FP32, "plain"),
        (20000, FP16, "wide residual"),
        (40000, FP32, "residual"),
        (65536, FP16, "dropout"),
        (70000, BF16, "residual"),
        (17000, BF16, "gate first"),
        (17000, FP32, "gated"),
        (20001, BF16, "residual"),
        (65521, FP16, "plain"),
        (65530, FP16, "wide residual"),
        (9001, BF16, "gated"),
        (17003, FP32, "gate first"),
    ],
)
def test_wide_rows(device, width, dtype, form):
    """Held in the registers of a block, or read several times."""
    tensors, options = call_of(form, dtype, (2, width), device)
    assert_norm(
        "rms_norm", normal((2, width), dtype, device), normal((width,), FP32, device), **tensors,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", [7, 9, 130, 1001, 4097])
@pytest.mark.parametrize("weight_dtype", [BF16, FP32, None])
def test_rows_that_follow_each_other(device, width, form, weight_dtype):
    """Each begins elsewhere in 16 bytes."""
    tensors, options = call_of(form, BF16, (19, width), device)
    weight = None if weight_dtype is None else normal((width,), weight_dtype, device)
    assert_norm("rms_norm", normal((19, width), BF16, device), weight, **tensors, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 6, 256, 4096, 16416])
def test_exact_rows(device, width, dtype):
    """Rows of powers of two are normalised without a rounding."""
    signs = torch.randint(0, 2, (5, width), device=device) * 2 - 1
    powers = 2.0 ** torch.arange(-2, 3, device=device)[:, None]
    weight = torch.randint(-8, 9, (width,), device=device).to(dtype)
    out = tk.rms_norm((signs * powers).to(dtype), weight, eps=0.0)
    assert torch.equal(out, (signs * weight).to(dtype))
    total = torch.randint(-8, 9, (5, width), device=device).to(dtype)
    residual = (signs * powers).to(dtype) - total
    out, found = tk.rms_norm(total, weight, eps=0.0, residual=residual)
    assert torch.equal(found, (signs * powers).to(dtype))
    assert torch.equal(out, (signs * weight).to(dtype))


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "embedded": embed,
    "unaligned": unaligned,
    "spread": spread,
    "heads": lambda x: embed(x, order=(2, 0, 1, 3)),
    "expanded": lambda x: x[:, :1].expand(x.shape),
}


@pytest.mark.parametrize("width", [64, 37])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["residual", "gated"])
def test_layouts(device, layout, width, form):
    """Operands of different strides; what is between their elements is NaN."""
    shape = (3, 4, 5, width)
    tensors, _ = call_of(form, BF16, shape, device)
    x, weight = normal(shape, BF16, device), normal((width,), BF16, device)
    strided = {name: LAYOUTS[layout](t) for name, t in tensors.items()}
    assert_norm("rms_norm", x, weight, **strided)
    assert_norm("rms_norm", LAYOUTS[layout](x), weight, **tensors)
    names = ("x", "weight", *tensors)
    assert_gradients("rms_norm", names, [LAYOUTS[layout](x), weight, *strided.values()])


def test_more_dimensions(device):
    x = normal((2, 1, 3, 2, 2, 40), BF16, device)
    assert_norm("rms_norm", x.transpose(0, 2), normal((40,), BF16, device))
    assert_norm("rms_norm", x[0, 0, 0, 0, 0], normal((40,), BF16, device))


def gradient_cases(device, intensity):
    return cover(
        {
            "dtype": DTYPES,
            "form": FORMS,
            "weight": (None, "same", "fp32"),
            "width": (6, 8, 96, 129, 1536, 2880),
        },
        max(intensity, 1) + (emulated(device) is False),
    )


@over(gradient_cases)
def test_gradients(device, case):
    dtype, width = case["dtype"], case["width"]
    shape = (3, 7, width)
    tensors, options = call_of(case["form"], dtype, shape, device)
    named = {"x": normal(shape, dtype, device)}
    if case["weight"] is not None:
        named["weight"] = normal((width,), dtype if case["weight"] == "same" else FP32, device)
    named |= tensors
    assert_gradients("rms_norm", tuple(named), list(named.values()), **options)


@pytest.mark.parametrize(
    ("rows", "width", "group"),
    [
        *((700, 32, None), (300, 24, 8), (90, 21, 3), (40, 384, 128)),
        *((45, 1032, None), (11, 4104, None), (5, 8200, None), (23, 8272, 4136)),
        *((5, 16416, None), (21, 1001, None), (9, 522, None), (10, 9004, None), (3, 20001, None)),
    ],
)
def test_gradients_of_many_rows(device, rows, width, group):
    """More than the teams of an emulated GPU of one SM, which take several each."""
    named = {"x": normal((rows, width), BF16, device), "weight": normal((width,), FP32, device)}
    options = {} if group is None else {"group_size": group}

    def check():
        assert_gradients("rms_norm", tuple(named), list(named.values()), **options)

    if emulated(device):
        with tk.emulate(sm_count=1, portable=tk.emulation.portable()):
            check()
    else:
        check()


@pytest.mark.parametrize(
    ("width", "form"),
    [
        (9000, "plain"),
        (8192, "gated"),
        (17000, "residual"),
        (33000, "wide residual"),
        pytest.param(65529, "residual", marks=pytest.mark.intensity(2)),
        pytest.param(70000, "plain", marks=pytest.mark.intensity(2)),
        (5001, "wide residual"),
        (3001, "dropout"),
    ],
)
def test_gradients_of_wide_rows(device, width, form):
    tensors, options = call_of(form, BF16, (3, width), device)
    named = {"x": normal((3, width), BF16, device), "weight": normal((width,), BF16, device)}
    named |= tensors
    assert_gradients("rms_norm", tuple(named), list(named.values()), **options)


@over_forced(["registers", "memory"], [BF16, FP32])
def test_every_path(device, case):
    """Kernels for rows that are not aligned also take those that are."""
    path, dtype = case
    x, weight = normal((9, 128), dtype, device), normal((128,), FP32, device)
    with tk.emulate(config={"path": path}, portable=tk.emulation.portable()):
        assert_norm("rms_norm", x, weight)
        assert_gradients("rms_norm", ("x", "weight"), [x, weight])


@pytest.mark.parametrize("wanted", [("x",), ("weight",), ("residual",), ("x", "residual")])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_gradients_that_are_wanted(device, wanted, dropout_p):
    tensors = {
        "x": normal((4, 40), BF16, device),
        "weight": normal((40,), BF16, device),
        "residual": normal((4, 40), BF16, device),
    }
    options = {"dropout_p": dropout_p, "seed": torch.tensor(SEED, device=device)}

    def gradients(names):
        leaves = {n: x.clone().requires_grad_(n in names) for n, x in tensors.items()}
        out, _ = tk.rms_norm(**leaves, **options)
        return torch.autograd.grad(out.sum(), [leaves[n] for n in names])

    everything = dict(zip(tensors, gradients(tuple(tensors)), strict=True))
    for name, grad in zip(wanted, gradients(wanted), strict=True):
        assert torch.equal(grad, everything[name])


@pytest.mark.parametrize("which", [0, 1])
def test_a_gradient_of_one_result(device, which):
    leaves = [normal((4, 48), FP32, device).requires_grad_() for _ in range(2)]
    result = tk.rms_norm(leaves[0], residual=leaves[1])[which]
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    expected = tk.reference.rms_norm(doubles[0], residual=doubles[1])[which]
    for x, y in zip(
        torch.autograd.grad(result.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), doubles),
        strict=True,
    ):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("p", [0.0, 1e-6, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("width", [64, 37])
def test_dropout(device, width, p):
    """Elements are dropped as often as p says, differently for each seed, and alike in the
    gradient."""
    x = torch.ones(400, width, device=device, requires_grad=True)
    zeros = torch.zeros(400, width, device=device)
    totals = []
    for number in (SEED, -5):
        seed = torch.tensor([number], device=device)
        _, total = tk.rms_norm(x, residual=zeros, dropout_p=p, seed=seed)
        dropped = round(p * 65536)
        kept = total != 0
        expected = torch.where(kept, 65536 / (65536 - dropped), 0.0)
        torch.testing.assert_close(total, expected)
        share = 1 - float(kept.float().mean())
        q = dropped / 65536
        assert abs(share - q) <= 6 * (q * (1 - q) / total.numel()) ** 0.5
        (grad,) = torch.autograd.grad(total.sum(), x)
        assert torch.equal(grad, total.detach())
        factors = tk.reference._norm.dropout_factors(x.shape, p, seed)
        assert torch.equal(kept, factors != 0)
        totals.append(total)
    assert torch.equal(*totals) == (round(p * 65536) == 0)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 16), (0, 40000)])
def test_no_rows(device, shape):
    x = torch.zeros(shape, device=device, requires_grad=True)
    weight = torch.ones(shape[-1], device=device, requires_grad=True)
    out, total = tk.rms_norm(x, weight, residual=x)
    assert out.shape == total.shape == shape
    grads = torch.autograd.grad(out.sum() + total.sum(), [x, weight])
    assert grads[0].shape == shape
    assert torch.equal(grads[1], torch.zeros_like(weight))


def test_numbers_that_are_no_numbers(device):
    """They stay in their row."""
    x = normal((4, 64), BF16, device)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    out = tk.rms_norm(x)
    expected = tk.reference.rms_norm(x)
    assert torch.equal(out.isnan(), expected.isnan())
    assert bool(out[[0, 3]].isfinite().all())


def test_a_residual_is_normalised_as_it_is_returned(device):
    x, residual = (normal((6, 96), BF16, device) for _ in range(2))
    out, total = tk.rms_norm(x, residual=residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(out, tk.rms_norm(total))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [4096, 4097, 40000])
def test_guards(device, width):
    x = torch.randn(1 + (1 << 21) // width, width, device=device).bfloat16()
    weight = normal((width,), BF16, device)
    assert_guards_intact(lambda: tk.rms_norm(x, weight, residual=x))


@pytest.mark.gpu
@pytest.mark.large
def test_offsets_beyond_32_bits(device):
    x = torch.zeros(1 << 20, 2112, dtype=BF16, device=device)
    x[-1] = 3
    out = tk.rms_norm(x, eps=0.5)
    torch.testing.assert_close(out[-1], tk.reference.rms_norm(x[-1], eps=0.5))
    assert not bool(out[:-1].any())


X, W = torch.ones(2, 8), torch.ones(8)
SEED_TENSOR = torch.tensor([1])
WRONG = [
    (((3,), W), {}, TypeError, "x must be a torch.Tensor, got tuple"),
    ((X.double(), W), {}, TypeError, "x is torch.float64"),
    ((X.long(), W), {}, TypeError, "x is torch.int64"),
    ((X.to_sparse(), W), {}, TypeError, "x must be a dense tensor"),
    ((torch.tensor(1.0), W), {}, ValueError, r"x has shape \(\)"),
    ((torch.ones(3, 0),), {}, ValueError, r"x has shape \(3, 0\)"),
    ((X, torch.ones(7)), {}, ValueError, r"weight has shape \(7,\)"),
    ((X, torch.ones(1, 8)), {}, ValueError, r"weight has shape \(1, 8\)"),
    ((X, W.half()), {}, TypeError, "weight is torch.float16"),
    ((X, [1.0] * 8), {}, TypeError, "weight must be a torch.Tensor, got list"),
    ((X, W.to("meta")), {}, TypeError, "weight is on meta"),
    ((X, W), {"eps": -1.0}, ValueError, "eps is -1"),
    ((X, W), {"eps": float("nan")}, ValueError, "eps is nan"),
    ((X, W), {"eps": "small"}, TypeError, "eps must be a number, got str"),
    ((X, W), {"weight_offset": float("inf")}, ValueError, "weight_offset is inf"),
    ((X, W), {"residual": X[:1]}, ValueError, r"residual has shape \(1, 8\)"),
    ((X, W), {"residual": X.half()}, TypeError, "residual is torch.float16"),
    ((X, W), {"gate": X.bfloat16()}, TypeError, "gate is torch.bfloat16"),
    ((X, W), {"gate": X[0]}, ValueError, r"gate has shape \(8,\)"),
    ((X, W), {"gate": X, "residual": X}, ValueError, "gate cannot be given with a residual"),
    ((X, W), {"gate_first": True}, ValueError, "gate_first needs a gate"),
    ((X, W), {"group_size": 3}, ValueError, "group_size is 3"),
    ((X, W), {"group_size": 0}, ValueError, "group_size is 0"),
    ((X, W), {"group_size": -2}, ValueError, "group_size is -2"),
    ((X, W), {"group_size": 2.0}, TypeError, "group_size must be an int, got float"),
    ((X, W), {"group_size": 4, "residual": X}, ValueError, "group_size cannot be given"),
    ((X, W), {"dropout_p": 0.1}, ValueError, "dropout_p is 0.1, which needs a residual"),
    ((X, W), {"dropout_p": 0.1, "residual": X}, ValueError, "which needs a seed"),
    ((X, W), {"dropout_p": 1.0, "residual": X}, ValueError, "dropout_p is 1.0"),
    ((X, W), {"residual": X, "seed": torch.tensor([1.0])}, TypeError, "seed is torch.float32"),
    ((X, W), {"residual": X, "seed": torch.tensor([1, 2])}, ValueError, r"seed has shape \(2,\)"),
]


def on(device, value):
    return value.to(device) if isinstance(value, torch.Tensor) and not value.is_meta else value


@pytest.mark.parametrize(("args", "options", "error", "words"), WRONG)
@pytest.mark.parametrize("recorded", [False, True])
def test_wrong_calls(device, args, options, error, words, recorded):
    args = [on(device, x) for x in args]
    if recorded and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
        args[0] = args[0].detach().requires_grad_()
    options = {name: on(device, x) for name, x in options.items()}
    with pytest.raises(error, match=f"tk.rms_norm: .*{words}"):
        tk.rms_norm(*args, **options)
