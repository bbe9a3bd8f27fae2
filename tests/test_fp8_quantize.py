"""`tk.fp8_quantize`: codes and scales bit by bit, edge values, the transpose, wrong calls."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import thunderkittens as tk
from helpers.cover import cover, over
from helpers.layouts import RAGGED, at_any_element, matrix

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GRANULARITIES = ["tensor", "row", "1x128", "128x128"]


def assert_same_bits(actual, expected):
    assert len(actual) == len(expected)
    for x, y in zip(actual, expected, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
        if x.element_size() == 1:
            x, y = x.view(torch.uint8), y.view(torch.uint8)
        else:
            x, y = (z.nan_to_num(nan=-1.0) for z in (x, y))
        assert torch.equal(x.to(y.device), y)


def cases(device, intensity):
    return cover(
        {
            "shape": [(1, 1), (7, 129), (130, 264), (128, 128), (5, 2200), (0, 9), (9, 0)]
            + [(2048, 8192), (300, 20000), (1111, 777)] * (device == "cuda"),
            "granularity": GRANULARITIES,
            "transposed": [False, True],
            "dtype": [BF16, FP16, FP32],
            "format": [E4M3, E5M2],
            "layout": ["packed", "packed_t", "sliced", "unaligned"],
        },
        intensity,
    )


@over(cases)
def test_bits(device, case):
    x = (torch.randn(case["shape"], device=device) * 3).to(case["dtype"])
    options = {"dtype": case["format"], "transposed": case["transposed"]}
    actual = tk.fp8_quantize(matrix(x, case["layout"]), case["granularity"], **options)
    expected = tk.reference.fp8_quantize(x.cpu(), case["granularity"], **options)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("format", [E4M3, E5M2])
@pytest.mark.parametrize("odd", [0, 1])
def test_long_rows(device, granularity, format, odd):
    """Which one to eight warps share, with a chunk or several for each; aligned or not."""
    for k in (1024, 1032, 2056, 4104, 8208):
        x = torch.randn(9, k + odd, device=device).to(BF16 if k % 16 else FP32)
        actual = tk.fp8_quantize(x, granularity, dtype=format)
        assert_same_bits(actual, tk.reference.fp8_quantize(x.cpu(), granularity, dtype=format))


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_rows_that_mean_nothing(device, dtype, given):
    """With one scale, x is taken as long rows if it has no gaps: with and without a rest, which may
    hold the largest; and not where it has gaps, or begins between vectors."""
    scale = torch.tensor(0.02, device=device) if given else None
    for rows, columns, place in ((64, 96, -1), (32, 192, 0), (751, 700, -1), (725, 725, -1)):
        x = torch.randn(rows * columns + 1, device=device).to(dtype)
        for first in (0, 1):
            one = x[first : first + rows * columns].view(rows, columns)
            one.view(-1)[place] = 7.5
            for y in (one, one[:, :-8]):
                actual = tk.fp8_quantize(y, "tensor", scale=scale)
                expected = tk.reference.fp8_quantize(
                    y.cpu(), "tensor", scale=None if scale is None else scale.cpu()
                )
                assert_same_bits(actual, expected)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("format", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_whole_tiles(device, granularity, format, dtype):
    """With the transpose: tiles without an edge, beside others with one, and whose transposed rows
    do not begin at 16 bytes."""
    for shape in ((256, 136), (272, 256), (136, 128)):
        x = torch.randn(shape, device=device).to(dtype)
        options = {"dtype": format, "transposed": True}
        actual = tk.fp8_quantize(x, granularity, **options)
        assert_same_bits(actual, tk.reference.fp8_quantize(x.cpu(), granularity, **options))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("offset", range(8))
def test_rows_at_any_byte(device, granularity, transposed, offset):
    """Read from any element, in tiles with and without edges, and written to any byte."""
    shapes = [*RAGGED, (272, 133), (9, 4105)]
    dtype = (BF16, FP16, FP32)[(offset + transposed) % 3]
    for gap in (0, 1, 5):
        x = torch.randn(shapes[offset], device=device).to(dtype)
        options = {"dtype": (E4M3, E5M2)[gap % 2], "transposed": transposed}
        actual = tk.fp8_quantize(at_any_element(x, offset, gap), granularity, **options)
        assert_same_bits(actual, tk.reference.fp8_quantize(x.cpu(), granularity, **options))


EDGES = [0.0, -0.0, 1e-45, -1e-45, 1e-39, 2.0**-126, 2.0**-110, 448.0, -448.0, 1e-9, 57344.0, 1.0]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("format", [E4M3, E5M2])
@pytest.mark.parametrize("special", [None, float("inf"), -float("inf"), float("nan")])
def test_edges(device, granularity, format, special):
    """Zeros, subnormals, the largest values, infinities and NaN, each beside ordinary groups."""
    x = torch.zeros(130, 264, device=device)
    x[0, : len(EDGES)] = torch.tensor(EDGES, device=device)
    x[1, :5] = torch.tensor([1e-39, -3e-42, 0.0, 1e-45, 2e-39], device=device)
    x[2] = torch.randn(264, device=device) * 1e38
    if special is not None:
        x[129, 263], x[3, 130] = special, special
    actual = tk.fp8_quantize(x, granularity, dtype=format, transposed=True)
    expected = tk.reference.fp8_quantize(x.cpu(), granularity, dtype=format, transposed=True)
    assert_same_bits(actual, expected)
    codes, scale = actual[:2]
    if granularity == "row":
        back = codes.float() * scale
        assert bool(torch.isfinite(back[4:129]).all())
        if special is not None:
            assert bool(torch.isnan(back[129]).any())


def round_to_format(x, mantissa, smallest, largest):
    """Independent of any library: float64 to a format of `mantissa` bits, ties to even."""
    magnitude = np.abs(x)
    exponent = np.floor(np.log2(np.where(magnitude > 0, magnitude, 1)))
    step = 2.0 ** (np.maximum(exponent, smallest) - mantissa)
    rounded = np.minimum(np.round(magnitude / step) * step, largest)
    return np.copysign(rounded, x)


@pytest.mark.parametrize(("format", "bits"), [(E4M3, (3, -6, 448.0)), (E5M2, (2, -14, 57344.0))])
def test_rounding_by_an_oracle(device, format, bits):
    """Every bfloat16 in a range of binades, with the scale 1: codes are the nearest values."""
    patterns = np.arange(0x3000, 0x4800, dtype=np.uint16)
    values = np.concatenate([patterns, patterns | 0x8000])
    x = torch.from_numpy(values.view(np.int16)).view(BF16).to(device).reshape(-1, 128)
    one = torch.ones((), device=device)
    codes, scale = tk.fp8_quantize(x, "tensor", dtype=format, scale=one)
    assert float(scale) == 1
    expected = round_to_format(x.double().cpu().numpy(), *bits)
    assert np.array_equal(codes.double().cpu().numpy(), expected)


def test_given_scale(device):
    x = torch.randn(40, 72, device=device)
    scale = torch.tensor([0.37], device=device)
    for transposed in (False, True):
        actual = tk.fp8_quantize(x, "tensor", scale=scale, transposed=transposed)
        expected = tk.reference.fp8_quantize(
            x.cpu(), "tensor", scale=scale.cpu(), transposed=transposed
        )
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_batches(device, granularity):
    x = torch.randn(2, 3, 130, 136, device=device, dtype=FP32).to(BF16)
    codes, scale = tk.fp8_quantize(x, granularity)
    expected = tk.reference.fp8_quantize(x.cpu(), granularity)
    assert torch.equal(codes.cpu().view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(scale.cpu(), expected[1])


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("transposed", [False, True])
def test_more_than_2_31_elements(device, granularity, transposed):
    """The first and the last rows; of the transpose the last group of 128, which is of 3."""
    m, k = (1 << 20) + 3, 2056
    x = torch.randn(m, k, device=device, dtype=BF16)
    assert x.numel() > 2**31
    scale = torch.full((), 0.01, device=device) if granularity == "tensor" else None
    codes, scales, *t = tk.fp8_quantize(x, granularity, scale=scale, transposed=transposed)
    for rows in (slice(0, 256), slice(1 << 20, None)):
        part = codes[rows], scales if granularity == "tensor" else scales[rows]
        if granularity == "128x128":
            part = codes[rows], scales[:2] if rows.start == 0 else scales[-1:]
        expected = tk.reference.fp8_quantize(x[rows], granularity, scale=scale)
        assert torch.equal(part[0].view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(part[1], expected[1])
    if transposed:
        of = {"row": x[:, :8]}.get(granularity, x[1 << 20 :])
        codes_t, scales_t = tk.reference.fp8_quantize(of.t().contiguous(), granularity, scale=scale)
        last = t[0][:8] if granularity == "row" else t[0][:, 1 << 20 :]
        assert torch.equal(last.view(torch.uint8), codes_t.view(torch.uint8))
        if granularity in ("row", "tensor"):
            assert torch.equal(t[1][:8] if granularity == "row" else t[1], scales_t)
        else:
            assert torch.equal(t[1][:, -1:], scales_t)


def test_error_is_a_rounding(device):
    x = torch.randn(129, 300, device=device)
    for granularity in ("tensor", "row"):
        codes, scale = tk.fp8_quantize(x, granularity)
        error = (codes.float() * scale - x).abs()
        assert bool((error <= x.abs() / 16 + scale * 2.0**-10).all())


# What test_library.py asks of the ops whose operands have gradients


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("transposed", [False, True])
def test_opcheck_and_compile(device, granularity, transposed):
    torch._dynamo.reset()
    x = torch.randn(40, 272, device=device).to(BF16)
    op = torch.ops.thunderkittens.fp8_quantize.default
    arguments = (x, GRANULARITIES.index(granularity), E5M2, None, transposed)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    result = torch.library.opcheck(op, arguments, test_utils=tests)
    assert set(result.values()) == {"SUCCESS"}

    def call(x):
        return tk.fp8_quantize(x, granularity, transposed=transposed)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x), call(x))


def test_vmap(device):
    x = torch.randn(3, 40, 136, device=device)

    codes, scale = torch.func.vmap(lambda x: tk.fp8_quantize(x, "1x128"))(x)
    expected = tk.fp8_quantize(x[1], "1x128")
    assert torch.equal(codes[1].float(), expected[0].float())
    assert torch.equal(scale[1], expected[1])


X = torch.zeros(4, 8, dtype=BF16)
WRONG = {
    "list": (TypeError, "x must be a torch.Tensor, got list", [1.0], {}),
    "integers": (TypeError, "x is torch.int64; supported are", X.long(), {}),
    "float64": (TypeError, "x is torch.float64", X.double(), {}),
    "sparse": (TypeError, "dense", X.float().to_sparse(), {}),
    "dtype": (TypeError, "dtype is torch.int8", X, {"dtype": torch.int8}),
    "dtype fnuz": (TypeError, "dtype is torch.float8", X, {"dtype": torch.float8_e4m3fnuz}),
    "granularity": (ValueError, "granularity is 'column'", X, {"granularity": "column"}),
    "vector": (ValueError, "at least 2 dimensions", X[0], {"granularity": "128x128"}),
    "scalar": (ValueError, "at least 1 dimensions", X[0, 0], {"granularity": "row"}),
    "transposed": (ValueError, "needs a matrix", X[None], {"transposed": True}),
    "scale": (ValueError, "must have one element", X, {"scale": torch.ones(1)}),
    "scale 2": (ValueError, "one", X, {"granularity": "tensor", "scale": torch.ones(2)}),
    "scale int": (TypeError, "scale must be", X, {"granularity": "tensor", "scale": 1.0}),
    "scale bf16": (TypeError, "float32", X, {"granularity": "tensor", "scale": X[0, :1]}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(device, name):
    error, words, x, options = WRONG[name]
    place = lambda t: t.to(device) if isinstance(t, torch.Tensor) else t  # noqa: E731
    with pytest.raises(error) as caught:
        tk.fp8_quantize(place(x), **{key: place(value) for key, value in options.items()})
    assert words in str(caught.value)
