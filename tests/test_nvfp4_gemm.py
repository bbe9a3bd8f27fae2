"""`tk.nvfp4_gemm`: every kernel, values, layouts, groups, epilogues, gradients, wrong calls."""

from __future__ import annotations

import re

import pytest
import torch

import thunderkittens as tk
from helpers.cover import alternate, cover, over
from helpers.layouts import matrix
from helpers.numerics import accumulation_slack, assert_accurate
from thunderkittens import _C, info
from thunderkittens.reference.nvfp4_prepare import values

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BYTE, E4M3 = torch.uint8, torch.float8_e4m3fn
OP = torch.ops.thunderkittens.nvfp4_gemm.default
ACTIVATIONS = [None, "relu", "gelu", "gelu_tanh", "silu"]
SHAPES = [
    (1, 1, 16),
    (3, 130, 80),
    (17, 64, 272),
    (40, 257, 128),
    (70, 63, 144),
    (130, 200, 64),
    (0, 5, 16),
    (5, 0, 16),
    (5, 7, 0),
]
SHAPES_CUDA = [
    (300, 1003, 1776),
    (16, 8192, 8192),
    (64, 4099, 4096),
    (61, 8190, 4112),
    (1000, 2112, 7168),
    (257, 8, 4096),
    (33, 300, 10000),
    (50, 34000, 2304),
    (100, 17100, 2304),
    (200, 17100, 2304),
]


def quantised(*shape, device="cpu"):
    """Codes, scales of blocks in the plain layout, scales of matrices."""
    *batch, n, k = shape
    codes = torch.randint(0, 256, (*batch, n, k // 2), dtype=BYTE)
    scale = (torch.rand(*batch, n, k // 16) * 3 + 0.1).to(E4M3)
    factor = torch.rand(batch) + 0.5
    return codes.to(device), scale.to(device), factor.to(device)


def prepared(*shape, device="cpu"):
    return tk.nvfp4_prepare(*quantised(*shape, device=device), swizzle=False)


def exact(a, weight, **options):
    return tk.reference.nvfp4_gemm(a.double(), weight, out_dtype=torch.float64, **options)


def check(actual, a, weight, **options):
    plain = tk.reference.nvfp4_gemm(a, weight, out_dtype=actual.dtype, **options)
    expected = exact(a, weight, **options)
    if expected.numel() == 0:
        assert actual.shape == expected.shape
        return
    dense = values(weight.data, weight.rows, weight.columns) * weight.global_scale
    slack = accumulation_slack(a, dense.t()).amax()
    if options.get("activation") is not None:
        # The slopes of the functions, and their approximations in float32.
        slack = 2 * slack + 4e-6 * (1 + expected.abs().amax())
    assert_accurate(actual, expected, plain, slack=slack)


def cases(device, intensity):
    return cover(
        {
            "shape": SHAPES + SHAPES_CUDA * (device == "cuda"),
            "dtype": [BF16, FP16],
            "layout": ["packed", "packed_t", "sliced", "unaligned"],
            "out": [None, BF16, FP16, FP32],
            "bias": [False, True],
            "activation": ACTIVATIONS,
        },
        intensity,
    )


@over(cases)
def test_accuracy(device, case):
    m, n, k = case["shape"]
    weight = prepared(n, k, device=device)
    a = (torch.randn(m, k) / max(k, 1) ** 0.5).to(case["dtype"]).to(device)
    bias = torch.randn(n).to(case["dtype"]).to(device) if case["bias"] else None
    out = tk.nvfp4_gemm(
        matrix(a, case["layout"]),
        weight,
        bias=bias,
        activation=case["activation"],
        out_dtype=case["out"],
    )
    assert out.dtype == (case["out"] or case["dtype"])
    assert out.is_contiguous()
    check(out, a, weight, bias=bias, activation=case["activation"])


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("m", [1, 2, 15, 16, 31, 33, 64, 65, 128, 129, 256, 300])
def test_one_hot_rows_select(device, m, dtype):
    """A row with a single one gives a column of the dequantised weight, to the bit."""
    weight = prepared(70, 160, device=device)
    a = torch.zeros(m, 160, dtype=dtype, device=device)
    column = torch.randint(0, 160, (m,), device=device)
    a[torch.arange(m, device=device), column] = 1
    out = tk.nvfp4_gemm(a, weight, out_dtype=FP32)
    dense = values(weight.data, 70, 160)
    assert torch.equal(out, (dense * weight.global_scale)[:, column].t())


# Rows of a, of the weight in 64, warpgroups that divide k, k of a stage in 64, stages.
TILES = [
    (32, 2, 2, 4, 5),
    (64, 2, 1, 2, 6),
    (64, 4, 1, 2, 4),
    (128, 2, 1, 1, 8),
    (256, 2, 1, 1, 5),
]


@pytest.mark.emulator
@alternate(
    ("cluster", "dtype"),
    ["alone", "split", "split_once", "shared", "stream_k", "shared_stream_k"],
    [BF16, FP16],
)
@pytest.mark.parametrize("tile", TILES)
def test_every_kernel_on_the_emulator(tile, dtype, cluster):
    """A few blocks, more tiles than blocks, ragged in every dimension, adversarial order."""
    if "shared" in cluster and tile[0] < 256:
        return
    names = ("tokens", "row_groups", "k_groups", "pieces", "stages")
    splits, multicast = 1 + ("split" in cluster), 1 + ("shared" in cluster)
    config = dict(zip(names, tile, strict=True)) | {"splits": splits, "multicast": multicast}
    config["stream_k"] = "stream_k" in cluster
    config["blocks"] = (5 if config["stream_k"] else 2) * splits * multicast
    m = min(tile[0] + 3, 130)
    if cluster == "split_once":  # a tile per cluster
        config["blocks"] = splits * -(-290 // (64 * tile[1])) * -(-m // tile[0])
    weight = prepared(290, 592)
    a = (torch.randn(m, 592) / 24).to(dtype)
    results = []
    for policy in ("on_wait", "late_mma", "random"):
        with tk.emulate(policy, seed=3, config=config):
            results.append(tk.nvfp4_gemm(a, weight, out_dtype=FP32))
    check(results[0], a, weight)
    assert all(torch.equal(x, results[0]) for x in results)


@pytest.mark.emulator
@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 14, 15, 40])
@pytest.mark.parametrize(
    ("tile", "m", "dtype"), [(TILES[1], 70, BF16), (TILES[3], 90, FP16), (TILES[4], 30, BF16)]
)
def test_equal_ranges_on_the_emulator(tile, m, dtype, blocks):
    """Tiles of one block and of many, ends of ranges at ends of tiles, ranges without work."""
    names = ("tokens", "row_groups", "k_groups", "pieces", "stages")
    config = dict(zip(names, tile, strict=True)) | {"splits": 1, "multicast": 1}
    config |= {"stream_k": True, "blocks": blocks}
    weight = prepared(290, 592)
    a = (torch.randn(m, 592) / 24).to(dtype)
    results = []
    for policy in ("on_wait", "random"):
        with tk.emulate(policy, seed=blocks, config=config):
            results.append(tk.nvfp4_gemm(a, weight, out_dtype=FP32))
    check(results[0], a, weight)
    assert torch.equal(*results)


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("m", "n", "k"), [(64, 600, 1040), (33, 256, 592), (2, 290, 64)])
def test_exchange_on_the_emulator(m, n, k, dtype):
    """Blocks that divide k, which may have none of it, and exchange sums through memory."""
    names = ("tokens", "row_groups", "k_groups", "pieces", "stages", "split_k")
    config = dict(zip(names, (64, 4, 1, 2, 5, 4), strict=True)) | {"splits": 1, "multicast": 1}
    config |= {"stream_k": False, "blocks": 4 * -(-n // 256)}
    weight = prepared(n, k)
    a = (torch.randn(m, k) / k**0.5).to(dtype)
    bias = torch.randn(n).to(dtype)
    options = {"bias": bias, "activation": "silu", "out_dtype": FP32}
    results = []
    for policy in ("on_wait", "late_mma", "random"):
        with tk.emulate(policy, seed=m, config=config):
            results.append(tk.nvfp4_gemm(a, weight, **options))
    check(results[0], a, weight, bias=bias, activation="silu")
    assert all(torch.equal(x, results[0]) for x in results)


def test_where_sums_are_exchanged():
    device = _C.DeviceProperties(**info.EXAMPLE_GPU)

    def exchange(m, n, k=8192, **more):
        return _C.choose("nvfp4_gemm", {"m": m, "n": n, "k": k} | more, device)["split_k"]

    assert all(exchange(m, n) == 4 for m in (33, 64) for n in (7168, 8192))
    assert all(exchange(m, 8192) == 1 for m in (1, 16, 32, 65, 128, 256))
    assert all(exchange(64, n) == 1 for n in (4096, 8500, 28672))
    assert exchange(64, 8192, k=1024) == 1
    assert exchange(64, 8192, grouped=True, groups=1) == 1


def test_where_ranges_are_equal():
    device = _C.DeviceProperties(**info.EXAMPLE_GPU)

    def ranges(m, n, k=8192, **more):
        return _C.choose("nvfp4_gemm", {"m": m, "n": n, "k": k} | more, device)["stream_k"]

    assert all(ranges(m, 28672) for m in (64, 128, 256, 512))
    assert not any(ranges(m, 8192) for m in (1, 16, 32, 64, 128, 256, 512, 1024))
    assert not any(ranges(m, n) for m in (1, 16, 4096) for n in (8192, 28672))
    assert not ranges(256, 28672, k=512)
    assert not ranges(256, 28672, grouped=True, groups=1)


@pytest.mark.emulator
@pytest.mark.parametrize("strips", [1, 2, 3, 4, 7, 8, 13, 14, 16])
@pytest.mark.parametrize(("tokens", "m", "dtype"), [(8, 11, BF16), (16, 16, BF16), (16, 21, FP16)])
def test_few_rows_on_the_emulator(tokens, m, dtype, strips):
    """The same of the kernel for few rows, whose warps share the work in other ways."""
    names = ("row_groups", "k_groups", "pieces", "stages")
    config = dict.fromkeys(names, 0) | {"tokens": tokens, "strips": strips, "blocks": 2}
    weight = prepared(470, 1040 if strips == 13 else 592)
    a = (torch.randn(m, weight.columns) / 24).to(dtype)
    results = []
    for policy in ("on_wait", "random"):
        with tk.emulate(policy, seed=3, config=config):
            results.append(tk.nvfp4_gemm(a, weight, out_dtype=FP32))
    check(results[0], a, weight)
    assert all(torch.equal(x, results[0]) for x in results)


@pytest.mark.parametrize("m", [1, 20, 70])
def test_both_operands(device, m):
    x, w = torch.randn(m, 144), torch.randn(100, 144)
    a, scale_a, factor_a = tk.reference.nvfp4_quantize(x.to(device, BF16))
    b, scale_b, factor_b = tk.reference.nvfp4_quantize(w.to(device, BF16))
    scales = {
        "scale_a": scale_a,
        "global_scale_a": factor_a,
        "scale_b": scale_b,
        "global_scale_b": factor_b,
    }
    wide = [
        tk.reference.nvfp4_dequantize(*t, dtype=FP32).double()
        for t in ((a, scale_a, factor_a), (b, scale_b, factor_b))
    ]
    expected = wide[0] @ wide[1].t()
    for out_dtype in (None, FP32):
        out = tk.nvfp4_gemm(a, b, **scales, out_dtype=out_dtype)
        assert out.dtype == (out_dtype or BF16)
        plain = tk.reference.nvfp4_gemm(a, b, **scales, out_dtype=out_dtype)
        assert_accurate(out, expected, plain, slack=accumulation_slack(wide[0], wide[1].t()))
    weight = tk.nvfp4_prepare(b, scale_b, factor_b)
    again = tk.nvfp4_gemm(a, weight, scale_a=scale_a, global_scale_a=factor_a, out_dtype=FP32)
    assert torch.equal(again, out)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("sizes", [(3, 0, 40, 1), (0, 0, 0, 0), (20, 20, 20, 4), (64, 0, 0, 0)])
@pytest.mark.parametrize("behind", [0, 5])
def test_groups(device, sizes, behind, dtype):
    weight = prepared(4, 70, 80, device=device)
    offs = torch.tensor(sizes).cumsum(0).int().to(device)
    m = sum(sizes) + behind
    a = torch.randn(m, 80).to(dtype).to(device)
    bias = torch.randn(70).to(dtype).to(device)
    a[sum(sizes) :] = torch.nan
    out = tk.nvfp4_gemm(a, weight, offs=offs, bias=bias, activation="silu")
    assert not out[sum(sizes) :].any()
    begin = 0
    for e, size in enumerate(sizes):
        one = tk.Nvfp4Weight(weight.data[e], weight.global_scale[e], 70, 80)
        rows = slice(begin, begin + size)
        check(out[rows], a[rows], one, bias=bias, activation="silu")
        begin += size


def test_many_groups(device):
    """More groups than blocks, of few rows each, with one that has most."""
    sizes = [1] * 20 + [50] + [0, 2] * 10
    weight = prepared(len(sizes), 65, 32, device=device)
    offs = torch.tensor(sizes).cumsum(0).int().to(device)
    a = torch.randn(sum(sizes), 32).to(BF16).to(device)
    out = tk.nvfp4_gemm(a, weight, offs=offs, out_dtype=FP32)
    plain = tk.reference.nvfp4_gemm(a, weight, offs=offs, out_dtype=FP32)
    expected = exact(a, weight, offs=offs)
    # 32 products per sum.
    assert_accurate(out, expected, plain, slack=1e-6 * float(expected.abs().max()))


def test_extreme_values(device):
    """NaN in a block reaches its row alone; infinities and the largest scales pass."""
    codes, scale, factor = quantised(70, 96, device=device)
    scale.view(BYTE)[3, 2] = 0x7F
    scale.view(BYTE)[4, 1] = 0x7E
    scale.view(BYTE)[5, :] = 0
    weight = tk.nvfp4_prepare(codes, scale, factor, swizzle=False)
    a = torch.ones(4, 96, dtype=BF16, device=device)
    out = tk.nvfp4_gemm(a, weight, out_dtype=FP32)
    assert out[:, 3].isnan().all()
    assert not out[:, 5].any()
    rest = [i for i in range(70) if i != 3]
    assert torch.equal(out[:, rest].isnan().sum(), torch.zeros((), device=device, dtype=int))
    torch.testing.assert_close(
        out[:, rest].double(), exact(a, weight)[:, rest], atol=0.1, rtol=1e-5
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gradient(device, dtype, activation):
    """That of the same formula with the dequantised weight."""
    weight = prepared(72, 80, device=device)
    a = (torch.randn(2, 9, 80, device=device) / 9).to(dtype).requires_grad_()
    bias = torch.randn(72, device=device).to(dtype).requires_grad_()
    out = tk.nvfp4_gemm(a, weight, bias=bias, activation=activation)
    assert out.shape == (2, 9, 72)
    grad = torch.randn_like(out)
    actual = torch.autograd.grad(out, (a, bias), grad)
    results = []
    for wide in (torch.float64, dtype):
        x, y = (t.detach().to(wide).requires_grad_() for t in (a, bias))
        dense = (values(weight.data, 72, 80) * weight.global_scale).to(wide)
        z = x @ dense.t() + y
        if activation is not None:
            z = {
                "relu": torch.relu,
                "gelu": torch.nn.functional.gelu,
                "gelu_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
                "silu": torch.nn.functional.silu,
            }[activation](z)
        results.append(torch.autograd.grad(z, (x, y), grad.to(wide)))
    for got, expected, plain in zip(actual, *results, strict=True):
        assert got.dtype == dtype
        assert_accurate(got, expected, plain, slack=1e-3 * float(expected.abs().max()))


def test_no_gradient_of_groups(device):
    weight = prepared(1, 64, 64, device=device)
    a = torch.randn(4, 64, device=device).to(BF16).requires_grad_()
    offs = torch.tensor([4], dtype=torch.int32, device=device)
    with pytest.raises(RuntimeError, match="groups"):
        tk.nvfp4_gemm(a, weight, offs=offs)
    with torch.no_grad():
        assert tk.nvfp4_gemm(a, weight, offs=offs).shape == (4, 64)


def test_autocast(device):
    weight = prepared(64, 64, device=device)
    a = torch.randn(4, 64, device=device)
    with torch.autocast(torch.device(device).type, dtype=BF16):
        out = tk.nvfp4_gemm(a, weight)
    assert torch.equal(out, tk.nvfp4_gemm(a.to(BF16), weight))


def zeros(*shape, dtype=BF16):
    return torch.zeros(*shape, dtype=dtype)


WEIGHT = (zeros(2, 1, 2304, dtype=BYTE), torch.ones(()), 72, 32)
CODES = zeros(72, 16, dtype=BYTE)
SCALE = zeros(72, 2, dtype=E4M3)
ONE = torch.ones(())
WRONG_CALLS = {
    "a's kind": (([1], WEIGHT), {}, TypeError, "a must be a torch.Tensor"),
    "a's dtype": ((zeros(4, 32, dtype=FP32), WEIGHT), {}, TypeError, "a is torch.float32"),
    "a's columns": ((zeros(4, 48), WEIGHT), {}, ValueError, "32 being the columns of b"),
    "a's dimensions": ((zeros(32), WEIGHT), {}, ValueError, "M, 32"),
    "rows": ((zeros(4, 32), (*WEIGHT[:2], 129, 32)), {}, ValueError, "129 x 32"),
    "columns": ((zeros(4, 24), (*WEIGHT[:3], 24)), {}, ValueError, "72 x 24"),
    "scales": ((zeros(4, 32), (WEIGHT[0], ONE[None], 72, 32)), {}, ValueError, "global_scale"),
    "scale's dtype": ((zeros(4, 32), (WEIGHT[0], ONE.to(BF16), 72, 32)), {}, TypeError, "scale"),
    "data's dtype": ((zeros(4, 32), (WEIGHT[0].int(), *WEIGHT[1:])), {}, TypeError, "b is"),
    "no scale_b": ((zeros(4, 32), CODES), {}, TypeError, "scale_b is missing"),
    "no global_scale_b": (
        (zeros(4, 32), CODES),
        {"scale_b": SCALE},
        TypeError,
        "global_scale_b is missing",
    ),
    "no scale_a": ((zeros(4, 16, dtype=BYTE), WEIGHT), {}, TypeError, "scale_a is missing"),
    "scale_a": ((zeros(4, 32), WEIGHT), {"scale_a": SCALE}, TypeError, "scale_a is given"),
    "scale_b": ((zeros(4, 32), WEIGHT), {"scale_b": SCALE}, TypeError, "scale_b is given"),
    "global_scale_a": (
        (zeros(72, 16, dtype=BYTE), WEIGHT),
        {"scale_a": SCALE, "global_scale_a": ONE[None], "swizzle": False},
        ValueError,
        "global_scale_a",
    ),
    "swizzle": ((zeros(4, 32), WEIGHT), {"swizzle": 1}, TypeError, "swizzle"),
    "bias": ((zeros(4, 32), WEIGHT), {"bias": zeros(71)}, ValueError, "bias has shape"),
    "bias's dtype": ((zeros(4, 32), WEIGHT), {"bias": zeros(72, dtype=FP16)}, TypeError, "bias is"),
    "activation": ((zeros(4, 32), WEIGHT), {"activation": "tanh"}, ValueError, "activation"),
    "out_dtype": ((zeros(4, 32), WEIGHT), {"out_dtype": torch.float64}, TypeError, "out_dtype"),
    "offs": (
        (zeros(4, 32), WEIGHT),
        {"offs": zeros(2, dtype=torch.int32)},
        ValueError,
        "one matrix per group",
    ),
    "offs's dtype": (
        (zeros(4, 32), WEIGHT),
        {"offs": zeros(2, dtype=torch.int64)},
        TypeError,
        "offs is",
    ),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_calls(device, name):
    (a, b), keywords, error, words = WRONG_CALLS[name]

    def put(x):
        return x.to(device) if isinstance(x, torch.Tensor) else x

    b = tk.Nvfp4Weight(*map(put, b)) if isinstance(b, tuple) else put(b)
    with pytest.raises(error, match=f"^tk.nvfp4_gemm: .*{words}"):
        tk.nvfp4_gemm(put(a), b, **{key: put(x) for key, x in keywords.items()})


CALL = {"a": zeros(72, 32), "b": CODES, "scale_b": SCALE, "global_scale_b": ONE, "swizzle": False}
CODED = CALL | {"a": CODES, "scale_a": SCALE, "global_scale_a": ONE}
WRONG_CODES = {
    "b": (TypeError, "torch.float32; supported are", CALL, CODES.float()),
    "b of one row": (ValueError, "has shape (16,); it must be (M, K) or (B, M, K)", CALL, CODES[0]),
    "b of 24": (ValueError, "24 columns in 12 bytes; they must be", CALL, CODES[:, :12]),
    "scale_b": (TypeError, "torch.float32; supported are", CALL, SCALE.float()),
    "scale_b short": (ValueError, "(71, 2); the scales of (72, 32) in the plain", CALL, SCALE[1:]),
    "global_scale_b": (TypeError, "torch.bfloat16; supported are", CALL, ONE.to(BF16)),
    "global_scale_b one": (ValueError, "(1,); it must be (), one value", CALL, ONE[None]),
    "scale_a": (TypeError, "torch.float32; supported are", CODED, SCALE.float()),
    "scale_a short": (ValueError, "(71, 2); the scales of (72, 32) in the plain", CODED, SCALE[1:]),
    "global_scale_a": (TypeError, "torch.float16; supported are", CODED, ONE.to(FP16)),
}


@pytest.mark.parametrize("name", WRONG_CODES)
def test_wrong_codes(name):
    """What is prepared or dequantised first is refused in the words of this op and its argument."""
    error, words, call, wrong = WRONG_CODES[name]
    argument = name.split()[0]
    with pytest.raises(error, match=f"^tk.nvfp4_gemm: {argument} .*{re.escape(words)}"):
        tk.nvfp4_gemm(**call | {argument: wrong})


OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def sample(device):
    weight = prepared(72, 80, device=device)
    a = torch.randn(9, 80, device=device).to(BF16)
    return a, weight, torch.randn(72, device=device).to(BF16)


def test_opcheck(device):
    a, weight, bias = sample(device)
    arguments = (a, weight.data, weight.global_scale, weight.rows, bias, 4, FP32)
    assert set(torch.library.opcheck(OP, arguments, test_utils=OPCHECKS).values()) == {"SUCCESS"}
    grouped = prepared(2, 72, 80, device=device)
    offs = torch.tensor([4, 7], dtype=torch.int32, device=device)
    arguments = (a, grouped.data, grouped.global_scale, grouped.rows)
    torch.library.opcheck(OP, arguments, {"offs": offs}, test_utils=OPCHECKS)


@pytest.mark.parametrize("gradient", [False, True])
def test_compile(device, gradient):
    a, weight, bias = sample(device)

    def call(x, w, b):
        return tk.nvfp4_gemm(x, w, bias=b, activation="gelu")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    x, y = a.clone().requires_grad_(gradient), a.clone().requires_grad_(gradient)
    out, expected = compiled(x, weight, bias), call(y, weight, bias)
    assert torch.equal(out, expected)
    if gradient:
        out.sum().backward()
        expected.sum().backward()
        assert torch.equal(x.grad, y.grad)


def test_export(device):
    a, weight, bias = sample(device)

    class Module(torch.nn.Module):
        def forward(self, x, data, scale, row):
            return tk.nvfp4_gemm(x, tk.Nvfp4Weight(data, scale, 72, 80), bias=row)

    tensors = (a, weight.data, weight.global_scale, bias)
    program = torch.export.export(Module(), tensors)
    assert torch.equal(program.module()(*tensors), Module()(*tensors))


def test_vmap(device):
    _, weight, _ = sample(device)
    a = torch.randn(3, 9, 80, device=device).to(BF16)
    out = torch.func.vmap(lambda x: OP(x, weight.data, weight.global_scale, weight.rows))(a)
    assert torch.equal(out, tk.nvfp4_gemm(a, weight))


def test_transforms(device):
    """Gradients by torch.func, per sample too; no second or forward derivative, silently or not."""
    weight = prepared(24, 48, device=device)
    a, bias = (
        torch.randn(2, 20, 48, device=device).to(BF16),
        torch.randn(24, device=device).to(BF16),
    )

    def loss(a, bias):
        return tk.nvfp4_gemm(a, weight, bias=bias, activation="silu").float().square().sum()

    leaves = [x.clone().requires_grad_() for x in (a[1], bias)]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    plain = torch.func.grad(loss, (0, 1))
    mapped = torch.func.vmap(plain, (0, None))(a, bias)
    for once, each, e in zip(plain(a[1], bias), mapped, expected, strict=True):
        assert torch.equal(once, e)
        assert torch.equal(each[1], e)
    first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)[0]
    with pytest.raises(RuntimeError, match=r"differentiated again .*; tk.reference.nvfp4_gemm can"):
        first.float().square().sum().backward()
    with pytest.raises(RuntimeError, match="forward-mode differentiation"):
        torch.func.jvp(lambda a: tk.nvfp4_gemm(a, weight), (a,), (a,))


def test_reruns_are_bit_equal(device):
    weight = prepared(130, 1040, device=device)
    a = torch.randn(5, 1040, device=device).to(BF16)
    first = tk.nvfp4_gemm(a, weight)
    assert all(torch.equal(tk.nvfp4_gemm(a, weight), first) for _ in range(3))


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n"), [(50, 34000), (60, 8000), (100, 17100), (200, 17100)])
def test_waiting_blocks_in_streams(device, m, n):
    """Blocks that wait for others, of kernels that have the GPU's SMs together."""
    weight = prepared(n, 2304, device=device)
    a = (torch.randn(m, 2304, device=device) / 48).to(BF16)
    expected = tk.nvfp4_gemm(a, weight)
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    torch.cuda.synchronize()
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(tk.nvfp4_gemm(a, weight))
    torch.cuda.synchronize()
    assert all(torch.equal(x, expected) for x in results)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tk.nvfp4_gemm(a, weight)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.gpu
def test_cuda_graph_and_stream(device):
    a, weight, bias = sample(device)
    expected = tk.nvfp4_gemm(a, weight, bias=bias)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(tk.nvfp4_gemm(a, weight, bias=bias), expected)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tk.nvfp4_gemm(a, weight, bias=bias)
    a.mul_(2)
    graph.replay()
    assert torch.equal(out, tk.nvfp4_gemm(a, weight, bias=bias))
