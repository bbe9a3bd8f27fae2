"""`tk.mxfp8_quantize`: bit by bit against an oracle in NumPy and the reference; layouts, sizes,
options, wrong calls."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import thunderkittens as tk
from helpers import block_scaled as oracle
from helpers.cover import cover, over
from helpers.guard import assert_guards_intact
from helpers.layouts import MATRIX_LAYOUTS, RAGGED, at_any_element, matrix

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [
    (1, 1),
    (128, 128),
    (1, 32),
    (32, 1),
    (129, 33),
    (127, 200),
    (40, 264),
    (300, 31),
    (3, 130, 70),
    (2, 64, 128),
]
EMPTY = [(0, 32), (5, 0), (0, 0), (0, 4, 4), (2, 0, 7)]


def oracle_of(x, rule="rceil", dtype=E4M3, swizzle=True):
    codes, scale = oracle.mxfp8(x, rule, dtype)
    return codes, oracle.swizzled(scale) if swizzle else scale


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for x, y in zip(actual, expected, strict=True):
        assert oracle.same_bits(x, y)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("rule", ["rceil", "floor"])
def test_every_bf16_as_the_largest(device, rule, dtype):
    """Of a block: zeros, subnormal numbers, infinities and NaN among them."""
    x = oracle.every_largest(32).to(device)
    for matrix_of_it, axis in ((x, -1), (x.mT.contiguous(), -2)):
        data, scale = tk.mxfp8_quantize(matrix_of_it, axis=axis, rule=rule, dtype=dtype)
        assert_same((data if axis == -1 else data.mT, scale), oracle_of(x, rule, dtype))


@pytest.mark.parametrize("rule", ["rceil", "floor"])
def test_tiny_numbers(device, rule):
    x = oracle.some_tiny().to(device)
    assert_same(tk.mxfp8_quantize(x, rule=rule), oracle_of(x, rule))


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448), (E5M2, 57344)])
def test_scales_are_those_of_quotients(device, dtype, largest):
    """At every step of the byte: that of the exact quotient with the largest element, but for one
    number per format, whose quotient in float32 is rounded down to a power of two."""
    least = np.float32(largest * 2.0**-127)
    steps = [np.float32(largest * 2.0**n) for n in range(-127, 128) if largest * 2.0**n < 2.0**128]
    places = sorted({int(x.view(np.uint32)) + i for x in steps for i in range(-2, 3)})
    numbers = np.array(places, dtype=np.uint32).view(np.float32)
    expected = []
    for a in numbers:
        quotient = Fraction(float(a)) / largest
        exponent = next(n for n in range(-127, 128) if quotient <= Fraction(2) ** n)
        expected.append(0 if a == np.nextafter(least, np.float32(1)) else exponent + 127)
    x = torch.zeros(len(numbers), 32, device=device)
    x[:, 7] = torch.from_numpy(numbers).to(device)
    data, scale = tk.mxfp8_quantize(x, dtype=dtype, swizzle=False)
    assert scale.view(torch.uint8)[:, 0].tolist() == expected
    # Nothing is cut off: an element is the nearest to its number.
    made = tk.mxfp8_dequantize(data, scale, swizzle=False, dtype=FP32)[:, 7].double().cpu().numpy()
    wide = numbers.astype(np.float64)
    assert bool((np.abs(made - wide) <= wide * 2.0 ** (-3 if dtype == E5M2 else -4)).all())


def test_ties(device):
    """Numbers half way between elements, at every scale."""
    halves = (oracle.E4M3[:-1] + oracle.E4M3[1:]) / 2
    row = torch.tensor([448.0, *halves[-31:]])
    x = torch.stack([row, -row]).repeat(50, 1) * 2.0 ** torch.arange(-60, 40).unsqueeze(1)
    x = x.to(BF16).to(device)
    assert_same(tk.mxfp8_quantize(x), oracle_of(x))


def cases(device, intensity):
    return cover(
        {
            "shape": SHAPES + [(1000, 1032), (2048, 1024)] * (device == "cuda"),
            "layout": MATRIX_LAYOUTS,
            "source": [BF16, FP16, FP32],
            "dtype": [E4M3, E5M2],
            "rule": ["rceil", "floor"],
            "swizzle": [True, False],
            "axis": [-1, -2],
            "transpose": [False, True],
        },
        intensity,
    )


@over(cases)
def test_options(device, case):
    """Against the reference, and where that is exact, the oracle."""
    x = torch.randn(case["shape"], device=device) * torch.randn(case["shape"], device=device).exp()
    x = x.to(case["source"])
    options = {name: case[name] for name in ("axis", "rule", "dtype", "swizzle", "transpose")}
    results = tk.mxfp8_quantize(matrix(x, case["layout"]), **options)
    expected = tk.reference.mxfp8_quantize(x.cpu(), **options)
    assert_same(results, expected)
    along = case["axis"]
    for i, (y, of) in enumerate(zip(results, (x, x, x.mT, x.mT), strict=False)):
        if i % 2 == 0:
            assert y.dtype == case["dtype"]
            assert y.shape == of.shape
            assert (y if along == -1 else y.mT).is_contiguous()
        else:
            assert y.dtype == torch.float8_e8m0fnu
            assert y.is_contiguous()
    if x.dim() == 2 and case["source"] != FP32:
        of = x if along == -1 else x.mT
        expected = oracle_of(of, case["rule"], case["dtype"], case["swizzle"])
        assert_same((results[0] if along == -1 else results[0].mT, results[1]), expected)


@pytest.mark.parametrize("source", [BF16, FP16, FP32])
@pytest.mark.parametrize("offset", range(8))
def test_rows_at_any_byte(device, offset, source):
    """Read from any element, in tiles with and without edges, and written to any byte."""
    sizes = [*RAGGED, (272, 133)]
    rows, columns = sizes[offset % len(sizes)]
    for gap in (0, 1, 5):
        x = torch.randn(rows, columns, device=device).to(source)
        expected = tk.reference.mxfp8_quantize(x.cpu(), transpose=True)
        placed = at_any_element(x, offset, gap)
        assert_same(tk.mxfp8_quantize(placed, transpose=True), expected)
        assert_same(tk.mxfp8_quantize(placed), expected[:2])
        data, scale = tk.mxfp8_quantize(placed, axis=-2)
        assert_same((data.mT, scale), expected[2:])
        across = at_any_element(x.mT.contiguous(), offset, gap).mT
        assert_same(tk.mxfp8_quantize(across, transpose=True), expected)


def test_both_orientations_are_those_of_each(device):
    x = torch.randn(200, 300, device=device).to(BF16)
    data, scale, data_t, scale_t = tk.mxfp8_quantize(x, transpose=True)
    assert_same((data, scale), tk.mxfp8_quantize(x))
    assert_same((data_t, scale_t), tk.mxfp8_quantize(x.mT))
    down, down_scale = tk.mxfp8_quantize(x, axis=-2)
    assert_same((data_t.mT, scale_t), (down, down_scale))


def test_axes_count_from_the_front_too(device):
    for shape in ((70, 40), (2, 70, 40)):
        x = torch.randn(shape, device=device).to(BF16)
        for axis in (-1, -2):
            same = tk.mxfp8_quantize(x, axis=axis)
            assert_same(tk.mxfp8_quantize(x, axis=len(shape) + axis), same)
            back = tk.mxfp8_dequantize(*same, axis=axis)
            assert torch.equal(tk.mxfp8_dequantize(*same, axis=len(shape) + axis), back)


def test_a_batch_is_its_matrices(device):
    x = torch.randn(3, 50, 70, device=device).to(BF16)
    results = tk.mxfp8_quantize(x, transpose=True)
    for i in range(3):
        assert_same([y[i] for y in results], tk.mxfp8_quantize(x[i], transpose=True))


@pytest.mark.parametrize("shape", EMPTY)
def test_empty(device, shape):
    x = torch.zeros(shape, dtype=BF16, device=device)
    expected = tk.reference.mxfp8_quantize(x, transpose=True)
    for y, e in zip(tk.mxfp8_quantize(x, transpose=True), expected, strict=True):
        assert (y.shape, y.dtype) == (e.shape, e.dtype)


def test_scale_layout_and_padding(device):
    """Every scale where the formula of the layout has it, and zeros elsewhere."""
    x = torch.randn(130, 160, device=device).to(BF16)
    _, plain = tk.mxfp8_quantize(x, swizzle=False)
    _, scale = tk.mxfp8_quantize(x)
    assert plain.shape == (130, 5)
    assert scale.shape == (256, 8)
    assert oracle.same_bits(scale, oracle.swizzled(plain.view(torch.uint8).cpu().numpy()))
    bytes_of = scale.view(torch.uint8).flatten()
    for row, column in ((0, 0), (31, 3), (32, 0), (127, 4), (128, 1), (129, 4)):
        offset = (row // 128 * 2 + column // 4) * 512
        offset += row % 32 * 16 + row % 128 // 32 * 4 + column % 4
        assert int(bytes_of[offset]) == int(plain.view(torch.uint8)[row, column])


def test_quality(device):
    """Signal to noise for normal numbers, in dB: rceil 31.5, floor 30.7."""
    x = torch.randn(512, 512, device=device).to(BF16)
    for rule, expected in (("rceil", 31.5), ("floor", 30.7)):
        y = tk.mxfp8_dequantize(*tk.mxfp8_quantize(x, rule=rule), dtype=FP32)
        noise = 20 * math.log10(float(x.float().norm() / (y - x.float()).norm()))
        assert abs(noise - expected) < 0.15


def test_gradients_stop(device):
    x = torch.randn(32, 32, device=device, requires_grad=True)
    assert not any(y.requires_grad for y in tk.mxfp8_quantize(x, transpose=True))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2048, 1024), (2051, 1032)])
def test_writes_nothing_outside(device, shape):
    x = torch.randn(shape, device=device).to(BF16)
    assert_guards_intact(lambda: tk.mxfp8_quantize(x, transpose=True))


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_2_31_elements(device):
    x = torch.zeros((1 << 16) + 3, 32776, dtype=BF16, device=device)
    x[-200:, -200:] = torch.randn(200, 200, device=device)
    data, scale = tk.mxfp8_quantize(x, swizzle=False)
    codes, scales = oracle_of(x[-256:], swizzle=False)
    assert_same((data[-256:], scale[-256:]), (codes, scales))


X = torch.zeros(4, 32, dtype=BF16)
WRONG = {
    "list": (TypeError, "x must be a torch.Tensor, got list", [[1.0]], {}),
    "none": (TypeError, "x must be a torch.Tensor, got NoneType", None, {}),
    "array": (TypeError, "x must be a torch.Tensor, got ndarray", np.zeros((2, 2)), {}),
    "sparse": (TypeError, "x must be a dense tensor", X.float().to_sparse(), {}),
    "float64": (TypeError, "x is torch.float64; supported are torch.bfloat16,", X.double(), {}),
    "integers": (TypeError, "x is torch.int32", X.int(), {}),
    "fp8": (TypeError, "x is torch.float8_e4m3fn", X.to(E4M3), {}),
    "complex": (TypeError, "x is torch.complex64", X.to(torch.complex64), {}),
    "vector": (ValueError, "x has shape (32,); it must be (M, K) or (B, M, K)", X[0], {}),
    "scalar": (ValueError, "x has shape (); it must be", X[0, 0], {}),
    "four dimensions": (ValueError, "x has shape (1, 1, 4, 32)", X[None, None], {}),
    "axis 0 of three": (ValueError, "must be -1 or -2 (2 or 1)", X[None], {"axis": 0}),
    "axis 2": (ValueError, "axis is 2; it must be -1 or -2", X, {"axis": 2}),
    "axis -3": (ValueError, "axis is -3; it must be -1 or -2", X[None], {"axis": -3}),
    "axis none": (TypeError, "axis must be an int, got NoneType", X, {"axis": None}),
    "axis bool": (TypeError, "axis must be an int, got bool", X, {"axis": True}),
    "rule": (ValueError, "rule is 'even'; it must be 'rceil' or 'floor'", X, {"rule": "even"}),
    "rule none": (TypeError, "rule must be a str, got NoneType", X, {"rule": None}),
    "dtype bf16": (TypeError, "dtype is torch.bfloat16; supported are", X, {"dtype": BF16}),
    "dtype none": (TypeError, "dtype is None; supported are", X, {"dtype": None}),
    "dtype str": (TypeError, "dtype is e4m3; supported are", X, {"dtype": "e4m3"}),
    "swizzle": (TypeError, "swizzle must be True or False, got 1", X, {"swizzle": 1}),
    "transpose": (TypeError, "transpose must be True or False", X, {"transpose": "yes"}),
    "unknown": (TypeError, "alpha", X, {"alpha": 1}),
    "by position": (TypeError, "positional", X, None),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(device, name):
    error, words, x, options = WRONG[name]
    x = x.to(device) if isinstance(x, torch.Tensor) else x
    with pytest.raises(error) as caught:
        if options is None:
            tk.mxfp8_quantize(x, -1)
        else:
            tk.mxfp8_quantize(x, **options)
    assert words in str(caught.value)
