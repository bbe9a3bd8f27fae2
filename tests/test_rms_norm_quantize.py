"""`tk.rms_norm_quantize`: bit by bit the norm and the quantiser, against the formula in float64,
layouts, sizes, edge values, products, wrong calls."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from helpers.attention import emulated
from helpers.cover import cover, over, over_forced
from helpers.guard import assert_guards_intact
from helpers.layouts import embed, spread, unaligned
from helpers.norm_quantize import (
    OUTPUTS,
    assert_close_to_formula,
    assert_same,
    bits,
    in_two_steps,
    scale_for,
)
from helpers.norms import BF16, DTYPES, FP16, FP32, normal


def assert_both(x, weight, **options):
    """The op does what the norm and the quantiser do one after the other."""
    actual = tk.rms_norm_quantize(x, weight, **options)
    assert_same(actual, in_two_steps("rms_norm", x, weight, **options))


def cases(device, intensity):
    return cover(
        {
            "dtype": DTYPES,
            "output": OUTPUTS,
            "residual": (None, "same", "fp32"),
            "weight": (None, "same", "fp32"),
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
    weight = None
    if case["weight"] is not None:
        weight = normal((width,), FP32 if case["weight"] == "fp32" else dtype, device)
    x = normal(shape, dtype, device)
    assert_both(x, weight, swizzle=case["swizzle"], weight_offset=1.0, eps=1e-5, **options)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 130, 1032])
def test_values(device, output, dtype, width):
    """Within half a step of the codes of what float64 gives."""
    options = scale_for(output, device) | {"output": output}
    x, weight = normal((6, width), dtype, device), normal((width,), dtype, device)
    assert_close_to_formula("rms_norm", x, weight, **options)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize(
    ("width", "dtype"), [(8192, BF16), (16384, FP16), (16416, BF16), (20002, FP32), (40000, FP16)]
)
def test_wide_rows(device, output, width, dtype):
    """By a whole block, from its registers or from memory."""
    options = scale_for(output, device) | {"output": output}
    x, residual = (normal((2, width), dtype, device) for _ in range(2))
    assert_both(x, normal((width,), FP32, device), residual=residual, **options)


@pytest.mark.parametrize("output", ["fp8_tensor", "fp8_row", "fp8_1x128"])
@pytest.mark.parametrize("width", [7, 129, 1001])
def test_odd_rows(device, output, width):
    options = scale_for(output, device) | {"output": output}
    x, weight = normal((9, width), BF16, device), normal((width,), BF16, device)
    assert_both(x, weight, residual=normal((9, width), FP32, device), **options)


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "embedded": embed,
    "unaligned": unaligned,
    "spread": spread,
    "heads": lambda x: embed(x, order=(2, 0, 1, 3)),
    "expanded": lambda x: x[:, :1].expand(x.shape),
}


@pytest.mark.parametrize("width", [64, 288])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("output", ["fp8_1x128", "nvfp4"])
def test_layouts(device, layout, width, output):
    """Operands of different strides; what is between their elements is NaN."""
    shape = (3, 4, 5, width)
    x, residual = (normal(shape, BF16, device) for _ in range(2))
    weight = normal((width,), BF16, device)
    options = scale_for(output, device) | {"output": output}
    expected = tk.rms_norm_quantize(LAYOUTS[layout](x).clone(), weight, residual=residual,
                                    **options)  # fmt: skip
    for y, z in ((LAYOUTS[layout](x), residual), (LAYOUTS[layout](x).clone(), spread(residual))):
        assert_same(tk.rms_norm_quantize(y, weight, residual=z, **options), expected)


@pytest.mark.parametrize("output", OUTPUTS)
def test_more_dimensions(device, output):
    options = scale_for(output, device) | {"output": output}
    x = normal((2, 1, 3, 2, 2, 40), BF16, device).transpose(0, 2)
    assert_both(x, normal((40,), BF16, device), **options)
    assert_both(x, None, swizzle=False, **options)
    assert_both(x[0, 0, 0, 0, 0], None, swizzle=False, **options)


@over_forced(["registers", "memory"], OUTPUTS, [264, 512, 1344])
def test_every_path(device, case):
    """Kernels for rows that are not aligned also take those that are."""
    path, output, width = case
    options = scale_for(output, device) | {"output": output}
    x, weight = normal((5, width), FP16, device), normal((width,), FP32, device)
    expected = in_two_steps("rms_norm", x, weight, **options)
    with tk.emulate(config={"path": path}, portable=tk.emulation.portable()) as run:
        assert_same(tk.rms_norm_quantize(x, weight, **options), expected)
    assert run.kernels[0]["path"] == path


def test_the_row_is_not_rounded_before(device):
    """A row of one in 257 neighbours that bfloat16 would round: the scale of the row is that of
    float32."""
    x = torch.ones(2, 256, dtype=BF16, device=device)
    weight = torch.full((256,), 1 + 2.0**-12, dtype=FP32, device=device)
    _, scale = tk.rms_norm_quantize(x, weight, eps=0.0)
    assert torch.equal(scale, (weight[:2, None] / torch.full_like(scale, 448)))


@pytest.mark.parametrize("width", [8, 264, 4096])
def test_exact_rows(device, width):
    """Rows of powers of two are normalised without a rounding; so are codes of small integers."""
    signs = torch.randint(0, 2, (5, width), device=device) * 2 - 1
    powers = 2.0 ** torch.arange(-2, 3, device=device)[:, None]
    weight = torch.randint(-8, 9, (width,), device=device)
    weight[0] = 7
    x, one = (signs * powers).to(BF16), torch.ones((), device=device)
    for output, dtype in (("fp8_tensor", FP32), ("nvfp4", FP32)):
        weights = weight.clamp(-6, 6) // 2 * 2 if output == "nvfp4" else weight
        weights = torch.where(weights.abs() == 6, 6, weights)
        data, scale = tk.rms_norm_quantize(
            x, weights.to(dtype), output, scale=one, swizzle=False, eps=0.0
        )
        if output == "nvfp4":
            found = tk.reference.nvfp4_dequantize(data, scale, one, dtype=FP32, swizzle=False)
            # Exact where the largest of a block is 6, its scale 1.
            exact = (weights.abs().unflatten(-1, (-1, 8)).amax(-1) == 6).repeat_interleave(8)
            if width % 16 == 0:
                exact = exact.unflatten(0, (-1, 16)).any(-1).repeat_interleave(16)
            assert torch.equal(found[:, exact], (signs * weights)[:, exact].float())
        else:
            assert torch.equal(data.float(), (signs * weights).float())
            assert torch.equal(scale, one)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 16), (0, 40000)])
def test_no_rows(device, shape, output):
    options = scale_for(output, device) | {"output": output}
    x = torch.zeros(shape, device=device)
    data, scale, total = tk.rms_norm_quantize(x, residual=x, **options)
    assert data.numel() == 0
    assert total.shape == shape
    if output == "fp8_tensor":
        assert torch.equal(scale, options["scale"])
    else:
        assert scale.numel() == 0


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("width", [72, 520])
def test_numbers_that_are_no_numbers(device, output, width):
    """They stay in their row, and zeros, subnormals and large numbers have finite codes."""
    x = normal((7, width), FP32, device)
    x[1, 3], x[2, 5], x[3] = torch.nan, torch.inf, 0
    x[4] *= 1e-30
    x[5] *= 1e18
    options = scale_for(output, device) | {"output": output}
    weight = normal((width,), FP32, device)
    weight[-1] = 1e30
    for w in (None, weight):
        assert_both(x, w, swizzle=False, **options)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan"), 1e-44, 3e38])
@pytest.mark.parametrize("output", ["fp8_tensor", "nvfp4"])
def test_scales_of_any_kind(device, output, value):
    """As the quantisers take them."""
    x = normal((3, 288), FP32, device)
    assert_both(x, None, output=output, scale=torch.tensor(value, device=device))


@pytest.mark.parametrize("exponent", [-126, -112, -110, -60, 0, 60, 120])
def test_scales_of_rows_of_any_size(device, exponent):
    """From zeros and subnormals to the largest: the scale is the rounded quotient."""
    x = torch.ones(4, 512, device=device)
    weight = (torch.rand(512, device=device) + 1) * 2.0**exponent
    for output in ("fp8_row", "fp8_1x128"):
        assert_both(x, weight, output=output)


def test_one_element_is_a_scale_too(device):
    x = normal((4, 64), BF16, device)
    options = {"output": "fp8_tensor"}
    expected = tk.rms_norm_quantize(x, scale=torch.tensor(0.5, device=device), **options)
    actual = tk.rms_norm_quantize(x, scale=torch.tensor([[0.5]], device=device), **options)
    assert_same(actual, expected)


@pytest.mark.parametrize(("output", "of_weight"), [("fp8_row", "row"), ("fp8_1x128", "128x128")])
def test_products_of_fp8(device, output, of_weight):
    """fp8_gemm takes codes and scales as they are."""
    x, w = normal((40, 256), BF16, device), normal((72, 256), BF16, device)
    a, scale_a = tk.rms_norm_quantize(x, output=output)
    b, scale_b = tk.fp8_quantize(w, of_weight)
    out = tk.fp8_gemm(a, b.t(), scale_a, scale_b.t(), out_dtype=FP32)
    exact = tk.reference.rms_norm(x.double()) @ w.double().t()
    assert float((out.double() - exact).norm() / exact.norm()) < 0.05


def test_products_of_nvfp4(device):
    x, w = normal((40, 256), BF16, device), normal((72, 256), BF16, device)
    scale = torch.tensor(4 / 2688, device=device)
    a, scale_a = tk.rms_norm_quantize(x, output="nvfp4", scale=scale)
    weight = tk.nvfp4_prepare(*tk.nvfp4_quantize(w))
    out = tk.nvfp4_gemm(a, weight, scale_a=scale_a, global_scale_a=scale, out_dtype=FP32)
    exact = tk.reference.rms_norm(x.double()) @ w.double().t()
    assert float((out.double() - exact).norm() / exact.norm()) < 0.2


@pytest.mark.parametrize("output", OUTPUTS)
def test_vmap(device, output):
    options = scale_for(output, device) | {"output": output}
    x, weight = normal((3, 4, 32), BF16, device), normal((32,), BF16, device)
    found = torch.func.vmap(lambda y: tk.rms_norm_quantize(y, weight, residual=y, **options))(x)
    for i in range(3):
        one = tk.rms_norm_quantize(x[i], weight, residual=x[i], **options)
        for y, z in zip(found, one, strict=True):
            assert torch.equal(bits(y)[i], bits(z))


@pytest.mark.parametrize("name", ["x", "weight", "residual"])
def test_no_gradient(device, name):
    """Refused where one would be wanted; under no_grad() a parameter is a tensor as others."""
    tensors = {n: torch.ones(2, 16, device=device) for n in ("x", "residual")}
    tensors["weight"] = torch.ones(16, device=device)
    tensors[name].requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient, and an operand requires one: call it"):
        tk.rms_norm_quantize(**tensors)
    with torch.no_grad():
        results = tk.rms_norm_quantize(**tensors)
    assert not any(y.requires_grad for y in results)


@pytest.mark.gpu
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("width", [4096, 4098, 40000])
def test_guards(device, width, output):
    x = torch.randn(1 + (1 << 21) // width, width, device=device).bfloat16()
    weight = normal((width,), BF16, device)
    options = scale_for(output, device) | {"output": output}
    assert_guards_intact(lambda: tk.rms_norm_quantize(x, weight, residual=x, **options))


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("output", OUTPUTS)
def test_offsets_beyond_32_bits(device, output):
    x = torch.zeros(1 << 21, 2112, dtype=BF16, device=device)
    x[-1] = 3
    options = scale_for(output, device) | {"output": output, "swizzle": False}
    data, scale = tk.rms_norm_quantize(x, eps=0.5, **options)
    last = tk.rms_norm_quantize(x[-1:], eps=0.5, **options)
    assert torch.equal(data[-1:].view(torch.uint8), last[0].view(torch.uint8))
    assert not bool(data[:-1].view(torch.uint8).any())
    if output != "fp8_tensor":
        assert torch.equal(scale[-1:].contiguous(), last[1].contiguous())


X, W, ONE = torch.ones(2, 8), torch.ones(8), torch.tensor(1.0)
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
    ((X, W, "row"), {}, ValueError, "output is 'row'; it must be 'fp8_tensor'"),
    ((X, W, 1), {}, TypeError, "output must be a str, got int"),
    ((X, W), {"swizzle": 1}, TypeError, "swizzle must be True or False, got 1"),
    ((X, W, "fp8_tensor"), {}, ValueError, "output 'fp8_tensor' needs a scale"),
    ((X, W, "nvfp4"), {}, ValueError, "output 'nvfp4' needs a scale"),
    ((X, W, "fp8_row"), {"scale": ONE}, ValueError, "'fp8_row' finds its scales, and takes none"),
    ((X, W, "fp8_1x128"), {"scale": ONE}, ValueError, "'fp8_1x128' finds its scales"),
    ((X, W, "nvfp4"), {"scale": 1.0}, TypeError, "scale must be a torch.Tensor, got float"),
    ((X, W, "nvfp4"), {"scale": ONE.half()}, TypeError, "scale is torch.float16"),
    ((X, W, "nvfp4"), {"scale": W}, ValueError, r"scale has shape \(8,\)"),
    ((X, W, "fp8_tensor"), {"scale": ONE.to("meta")}, TypeError, "scale is on meta"),
    ((X[:, :7], W[:7], "nvfp4"), {"scale": ONE}, ValueError, "its last dimension must be even"),
]


def on(device, value):
    return value.to(device) if isinstance(value, torch.Tensor) and not value.is_meta else value


@pytest.mark.parametrize(("args", "options", "error", "words"), WRONG)
def test_wrong_calls(device, args, options, error, words):
    args = [on(device, x) for x in args]
    options = {name: on(device, x) for name, x in options.items()}
    with pytest.raises(error, match=f"tk.rms_norm_quantize: .*{words}"):
        tk.rms_norm_quantize(*args, **options)
