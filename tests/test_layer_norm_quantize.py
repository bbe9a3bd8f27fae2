"""`tk.layer_norm_quantize`: bit by bit the norm and the quantiser, against the formula in float64,
layouts, sizes, wrong calls. What it shares with `tk.rms_norm_quantize` is tested there."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from helpers.attention import emulated
from helpers.cover import cover, over, over_forced
from helpers.guard import assert_guards_intact
from helpers.layouts import embed, unaligned
from helpers.norm_quantize import (
    OUTPUTS,
    assert_close_to_formula,
    assert_same,
    in_two_steps,
    scale_for,
)
from helpers.norms import BF16, DTYPES, FP16, FP32, normal


def assert_both(x, weight, bias, **options):
    """The op does what the norm and the quantiser do one after the other."""
    actual = tk.layer_norm_quantize(x, weight, bias, **options)
    assert_same(actual, in_two_steps("layer_norm", x, weight, bias, **options))


def cases(device, intensity):
    return cover(
        {
            "dtype": DTYPES,
            "output": OUTPUTS,
            "residual": (None, "same", "fp32"),
            "factors": (None, "weight", "both"),
            "wide": (False, True),
            "width": (2, 8, 24, 40, 96, 130, 256, 264, 1000, 1536, 2880),
            "rows": ((3, 5), (1,), (130,)),
            "swizzle": (True, False),
        },
        max(intensity, 1) + (emulated(device) is False),
    )


@over(cases)
def test_bits(device, case):
    dtype, width = case["dtype"], case["width"]
    shape = (*case["rows"], width)
    options = scale_for(case["output"], device) | {"output": case["output"]}
    if case["residual"] is not None:
        options["residual"] = normal(shape, FP32 if case["residual"] == "fp32" else dtype, device)
    of_factors = FP32 if case["wide"] else dtype
    factors = {None: 0, "weight": 1, "both": 2}[case["factors"]]
    given = [normal((width,), of_factors, device) for _ in range(factors)]
    weight, bias = (*given, None, None)[:2]
    x = normal(shape, dtype, device, mean=2.0)
    assert_both(x, weight, bias, swizzle=case["swizzle"], eps=1e-6, **options)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 130, 1032])
def test_values(device, output, dtype, width):
    """Within half a step of the codes of what float64 gives."""
    options = scale_for(output, device) | {"output": output}
    x = normal((6, width), dtype, device, mean=1.0)
    factors = [normal((width,), dtype, device) for _ in range(2)]
    assert_close_to_formula("layer_norm", x, *factors, **options)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize(("width", "dtype"), [(16384, BF16), (16416, FP16), (20002, FP32)])
def test_wide_rows(device, output, width, dtype):
    """By a whole block, from its registers or from memory."""
    options = scale_for(output, device) | {"output": output}
    x, residual = (normal((2, width), dtype, device) for _ in range(2))
    factors = [normal((width,), FP32, device) for _ in range(2)]
    assert_both(x, *factors, residual=residual, **options)


@pytest.mark.parametrize("output", ["fp8_tensor", "fp8_row", "fp8_1x128"])
@pytest.mark.parametrize("width", [1, 7, 129, 1001])
def test_odd_rows(device, output, width):
    options = scale_for(output, device) | {"output": output}
    x, weight = normal((9, width), BF16, device), normal((width,), BF16, device)
    assert_both(x, weight, weight, residual=normal((9, width), FP32, device), **options)


@over_forced(["registers", "memory"], OUTPUTS)
def test_every_path(device, case):
    """Past the end of a row there is no mean that would have a magnitude."""
    path, output = case
    options = scale_for(output, device) | {"output": output}
    x = normal((5, 1080), FP16, device, mean=50.0)
    expected = in_two_steps("layer_norm", x, **options)
    with tk.emulate(config={"path": path}, portable=tk.emulation.portable()) as run:
        assert_same(tk.layer_norm_quantize(x, **options), expected)
    assert run.kernels[0]["path"] == path


@pytest.mark.parametrize("output", ["fp8_row", "nvfp4"])
@pytest.mark.parametrize("place", [embed, unaligned])
def test_layouts(device, output, place):
    x, residual = (normal((3, 4, 288), BF16, device) for _ in range(2))
    weight, bias = (normal((288,), BF16, device) for _ in range(2))
    options = scale_for(output, device) | {"output": output}
    expected = tk.layer_norm_quantize(x, weight, bias, residual=residual, **options)
    actual = tk.layer_norm_quantize(
        place(x), place(weight[None])[0], place(bias[None])[0], residual=place(residual), **options
    )
    assert_same(actual, expected)


def test_exact_rows(device):
    """Rows of equal magnitudes around a mean are normalised without a rounding."""
    signs = torch.randint(0, 2, (5, 32), device=device) * 2 - 1
    signs = torch.cat([signs, -signs], -1)
    weight = torch.randint(-8, 9, (64,), device=device)
    bias = torch.randint(-4, 5, (64,), device=device)
    x = (signs * 2.0 ** torch.arange(-2, 3, device=device)[:, None] + 8).to(BF16)
    one = torch.ones((), device=device)
    data, _ = tk.layer_norm_quantize(
        x, weight.float(), bias.float(), "fp8_tensor", scale=one, eps=0.0
    )
    assert torch.equal(data.float(), (signs * weight + bias).float())


@pytest.mark.parametrize("output", OUTPUTS)
def test_no_rows(device, output):
    options = scale_for(output, device) | {"output": output}
    x = torch.zeros(3, 0, 16, device=device)
    data, _, total = tk.layer_norm_quantize(x, residual=x, **options)
    assert data.numel() == 0
    assert total.shape == x.shape


@pytest.mark.parametrize("output", OUTPUTS)
def test_numbers_that_are_no_numbers(device, output):
    """They stay in their row."""
    x = normal((5, 520), FP32, device)
    x[1, 3], x[2, 5], x[3] = torch.nan, torch.inf, 1
    options = scale_for(output, device) | {"output": output}
    assert_both(x, None, None, swizzle=False, **options)


@pytest.mark.parametrize("name", ["x", "weight", "bias", "residual"])
def test_no_gradient(device, name):
    tensors = {n: torch.ones(2, 16, device=device) for n in ("x", "residual")}
    tensors |= {n: torch.ones(16, device=device) for n in ("weight", "bias")}
    tensors[name].requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient, and an operand requires one: call it"):
        tk.layer_norm_quantize(**tensors)
    with torch.no_grad():
        results = tk.layer_norm_quantize(**tensors)
    assert not any(y.requires_grad for y in results)


@pytest.mark.gpu
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("width", [4096, 4098, 40000])
def test_guards(device, width, output):
    x = torch.randn(1 + (1 << 21) // width, width, device=device).bfloat16()
    factor = normal((width,), BF16, device)
    options = scale_for(output, device) | {"output": output}
    assert_guards_intact(lambda: tk.layer_norm_quantize(x, factor, factor, residual=x, **options))


X, W, ONE = torch.ones(2, 8), torch.ones(8), torch.tensor(1.0)
WRONG = [
    (((3,), W), {}, TypeError, "x must be a torch.Tensor, got tuple"),
    ((X.double(), W), {}, TypeError, "x is torch.float64"),
    ((X.to_sparse(), W), {}, TypeError, "x must be a dense tensor"),
    ((torch.tensor(1.0), W), {}, ValueError, r"x has shape \(\)"),
    ((torch.ones(3, 0),), {}, ValueError, r"x has shape \(3, 0\)"),
    ((X, torch.ones(7)), {}, ValueError, r"weight has shape \(7,\)"),
    ((X, W.half()), {}, TypeError, "weight is torch.float16"),
    ((X, W.to("meta")), {}, TypeError, "weight is on meta"),
    ((X, W, torch.ones(9)), {}, ValueError, r"bias has shape \(9,\)"),
    ((X, W, [0.0] * 8), {}, TypeError, "bias must be a torch.Tensor, got list"),
    ((X, None, W), {}, ValueError, "bias needs a weight"),
    ((X.half(), W.half(), W), {}, TypeError, "bias is torch.float32, weight is torch.float16"),
    ((X, W), {"eps": -1.0}, ValueError, "eps is -1"),
    ((X, W), {"eps": "small"}, TypeError, "eps must be a number, got str"),
    ((X, W), {"residual": X[:1]}, ValueError, r"residual has shape \(1, 8\)"),
    ((X, W), {"residual": X.half()}, TypeError, "residual is torch.float16"),
    ((X, W, W, "row"), {}, ValueError, "output is 'row'; it must be 'fp8_tensor'"),
    ((X, W, W, None), {}, TypeError, "output must be a str, got NoneType"),
    ((X, W), {"swizzle": "yes"}, TypeError, "swizzle must be True or False, got 'yes'"),
    ((X, W, W, "fp8_tensor"), {}, ValueError, "output 'fp8_tensor' needs a scale"),
    ((X, W, W, "nvfp4"), {}, ValueError, "output 'nvfp4' needs a scale"),
    ((X, W), {"scale": ONE}, ValueError, "'fp8_row' finds its scales, and takes none"),
    ((X, W, W, "nvfp4"), {"scale": 1.0}, TypeError, "scale must be a torch.Tensor, got float"),
    ((X, W, W, "nvfp4"), {"scale": W}, ValueError, r"scale has shape \(8,\)"),
    ((X[:, :7], None, None, "nvfp4"), {"scale": ONE}, ValueError, "dimension must be even"),
]


def on(device, value):
    return value.to(device) if isinstance(value, torch.Tensor) and not value.is_meta else value


@pytest.mark.parametrize(("args", "options", "error", "words"), WRONG)
def test_wrong_calls(device, args, options, error, words):
    args = [on(device, x) for x in args]
    options = {name: on(device, x) for name, x in options.items()}
    with pytest.raises(error, match=f"tk.layer_norm_quantize: .*{words}"):
        tk.layer_norm_quantize(*args, **options)
