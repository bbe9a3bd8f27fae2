"""`tk.mxfp8_gemm`: values on both paths, extreme scales, layouts, epilogues, prepared operands,
data that trips the guard, wrong calls."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

import thunderkittens as tk
from helpers import block_scaled as oracle
from helpers import launched
from helpers.cover import cover, over
from helpers.numerics import assert_accurate
from test_mxfp8_dequantize import place

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PATHS = ("exact", "rebased")
SHAPES = [
    (1, 1, 1),
    (7, 129, 16),
    (129, 112, 272),
    (70, 264, 128),
    (130, 7, 145),
    (16, 200, 1056),
    (33, 70, 400),
    (64, 264, 1296),
    (0, 5, 7),
    (5, 0, 7),
    (5, 7, 0),
]
SHAPES_CUDA = [(1000, 1003, 777), (4096, 2112, 7168), (257, 8, 4096), (3, 4099, 4096)]
SHAPES_CUDA += [(64, 2112, 7168), (1, 4096, 7168), (16, 7168, 2048), (33, 28672, 1024)]


def swizzled(plain, swizzle):
    if not swizzle:
        return plain.view(E8M0)
    flat, _ = oracle_layout(plain)
    return flat.view(E8M0)


def oracle_layout(plain):
    """Scales in the 128x4 layout, element by element, by its formula."""
    rows, columns = plain.shape
    padded = -(-rows // 128) * 128, -(-columns // 4) * 4
    r, c = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    offset = (r // 128 * (padded[1] // 4) + c // 4) * 512
    offset += r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    out = torch.zeros(padded[0] * padded[1], dtype=torch.uint8)
    out[torch.from_numpy(offset.ravel()).long()] = plain.cpu().flatten()
    return out.view(padded).to(plain.device), offset


def operand(rows, columns, kind, swizzle, device, spread=3):
    """Small integers times powers of two that lie close together: sums are exact."""
    data = torch.randint(-2, 3, (rows, columns), device=device).to(kind)
    blocks = -(-columns // 32)
    scale = torch.randint(127 - spread // 2, 128 + spread // 2, (rows, blocks), device=device)
    return data, swizzled(scale.to(torch.uint8), swizzle)


def cases(device, intensity):
    return cover(
        {
            "shape": SHAPES + SHAPES_CUDA * (device == "cuda"),
            "path": PATHS,
            "kind_a": [E4M3, E5M2],
            "kind_b": [E4M3, E5M2],
            "layout_a": ["packed", "packed_t", "odd", "spread"],
            "layout_b": ["packed", "packed_t", "odd", "spread"],
            "out": [BF16, FP16, FP32],
            "bias": [True, False],
            "swizzle": [True, False],
        },
        intensity,
    )


@over(cases)
def test_integers_are_exact(device, case):
    """Only the rounding of the output is left, in every layout, format and shape, on both paths."""
    m, n, k = case["shape"]
    a, scale_a = operand(m, k, case["kind_a"], case["swizzle"], device)
    b, scale_b = operand(n, k, case["kind_b"], case["swizzle"], device)
    bias = torch.randint(-3, 4, (n,), device=device).to(BF16) if case["bias"] else None
    out = tk.mxfp8_gemm(
        place(a.view(torch.uint8), case["kind_a"], case["layout_a"]),
        place(b.view(torch.uint8), case["kind_b"], case["layout_b"]).t(),
        scale_a,
        scale_b,
        bias=bias,
        out_dtype=case["out"],
        path=case["path"],
        swizzle=case["swizzle"],
    )
    expected = tk.reference.mxfp8_gemm(
        a, b.t(), scale_a, scale_b, bias=bias, out_dtype=torch.float64, swizzle=case["swizzle"]
    )
    assert out.dtype == case["out"]
    assert out.is_contiguous()
    assert torch.equal(out, expected.to(case["out"]))


def quantised(x, **options):
    return tk.reference.mxfp8_quantize(x, **options)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind_a", [E4M3, E5M2])
@pytest.mark.parametrize("kind_b", [E4M3, E5M2])
def test_one_hot_rows_give_the_weight(device, path, kind_a, kind_b):
    """Rows of a that select one column of the weight each: the result is the dequantised weight,
    bit by bit where the path is exact, else where elements have not moved."""
    k, n = 96, 136
    a, scale_a = quantised(torch.eye(k, device=device).to(BF16), dtype=kind_a)
    w = torch.randn(n, k, device=device).to(BF16)
    data, scale = quantised(w, dtype=kind_b)
    out = tk.mxfp8_gemm(a, data.t(), scale_a, scale, out_dtype=FP32, path=path)
    expected = tk.reference.mxfp8_dequantize(data, scale, dtype=FP32).t()
    if path == "exact":
        assert torch.equal(out, expected)
        return
    largest = expected.t().reshape(n, -1, 32).abs().amax(-1, keepdim=True).expand(-1, -1, 32)
    assert bool(((out - expected).abs() <= 2.0**-9 * largest.reshape(n, k).t()).all())
    assert float((out != expected).float().mean()) < (0.01 if kind_b == E4M3 else 0.02)


def distributions(device):
    m, n, k = (70, 136, 256) if device != "cuda" else (300, 1003, 4096)
    x, w = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    outliers = torch.where(torch.rand_like(x) < 2**-8, 100.0, 1.0)
    between = 2.0 ** torch.randint(-12, 13, (m, k // 32), device=device).float()
    inside = torch.where(torch.arange(k, device=device) % 32 == 5, 2.0**11, 1.0)
    rows = torch.exp2(torch.randint(-20, 21, (m, 1), device=device).float())
    return {
        "normal": (x, w),
        "outliers": (x * outliers, w),
        "inside blocks": (x * inside, w),
        "between blocks": (x * between.repeat_interleave(32, -1), w),
        "both between": (
            x * between.repeat_interleave(32, -1),
            w * 2.0 ** -torch.randint(0, 24, (n, 1), device=device).float(),
        ),
        "rows": (x * rows, w),
    }


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kinds", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E5M2)])
@pytest.mark.parametrize("name", distributions("cpu"))
def test_accuracy(device, path, kinds, name):
    """Against float64 of what the operands stand for. On the exact path one rounding of the output
    and what fp32 sums cost; on the rescaled one also what its elements may move, and the 13 bits
    that the tensor cores keep of a sum of fp8 products."""
    x, w = distributions(device)[name]
    a, scale_a = quantised(x.to(BF16), dtype=kinds[0])
    b, scale_b = quantised(w.to(BF16), dtype=kinds[1])
    expected = tk.reference.mxfp8_gemm(a, b.t(), scale_a, scale_b, out_dtype=torch.float64)
    plain = tk.reference.mxfp8_gemm(a, b.t(), scale_a, scale_b, out_dtype=BF16)
    wide = tk.reference.mxfp8_dequantize(a, scale_a, dtype=FP32).double()
    other = tk.reference.mxfp8_dequantize(b, scale_b, dtype=FP32).double()
    slack = 2.0**-22 * x.shape[1] ** 0.5 * (wide.abs() @ other.abs().t())
    if path == "rebased":
        slack = slack + moved(wide) @ other.abs().t() + wide.abs() @ moved(other).t()
        slack = slack + 2.0**-13 * (wide.abs() @ other.abs().t())
    out = tk.mxfp8_gemm(a, b.t(), scale_a, scale_b, path=path)
    assert_accurate(out, expected, plain, slack=slack)


def moved(x):
    """How much rescaling may move elements: 2^-9 of the largest of their block."""
    blocks = x.abs().unflatten(-1, (-1, 32))
    return (2.0**-9 * blocks.amax(-1, keepdim=True)).expand_as(blocks).flatten(-2)


@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("path", PATHS)
def test_every_scale(device, kind, path):
    """A weight whose rows have all scales, by one: exact from 2^-133 to below 2^128, rounded there
    and infinite here, as `tk.mxfp8_dequantize` has it."""
    n, k = 256, 32
    data = torch.arange(k, dtype=torch.uint8, device=device).repeat(n, 1) * 4
    data[:, -1] = 0x7E if kind == E4M3 else 0x7B
    scale = torch.arange(256, dtype=torch.uint8, device=device).unsqueeze(1)
    one = torch.zeros(k, k, device=device).fill_diagonal_(1.0).to(E4M3)
    ones = torch.full((k, 1), 127, dtype=torch.uint8, device=device)
    b = data.view(kind).t()
    out = tk.mxfp8_gemm(one, b, ones, scale, out_dtype=FP32, path=path, swizzle=False)
    expected = tk.reference.mxfp8_dequantize(data.view(kind), scale, swizzle=False, dtype=BF16)
    expected = expected.float().t()
    # NaN and infinity reach the other elements of their column: 0 times either is NaN.
    finite = expected.isfinite().all(0)
    tiny = torch.finfo(FP32).tiny
    same = (out == expected) | ((expected.abs() < tiny) & (out.abs() <= tiny))
    assert bool(same[:, finite].all())
    assert not bool(out[:, ~finite].isfinite().any(0).all())
    assert int(finite.sum()) > 230


GUARDED = {
    # What is done to the scales (M, K / 32) of a, and whether it marks row 3.
    "nothing": (lambda s: None, False),
    "eight below": (lambda s: s[3, 1].sub_(8), False),
    "ten below": (lambda s: s[3, 1].sub_(10), True),
    "one above": (lambda s: s[3, 2].add_(12), True),
    "row beyond": (lambda s: s[3].add_(100), True),
    "all rows apart": (lambda s: s.add_(torch.arange(s.shape[0])[:, None] % 64), False),
    "nan": (lambda s: s[3, 0].fill_(255), True),
}


@pytest.mark.parametrize("name", GUARDED)
@pytest.mark.parametrize("side", ["a", "b"])
def test_guard(device, name, side):
    """Data that trips the guard gets the exact path's bits, in its tiles; data that does not, does
    not. An fp32 result shows the difference: 2^-10 of a small block."""
    change, trips = GUARDED[name]
    m, n, k = 140, 270, 128
    rows = m if side == "a" else n
    data = torch.full((rows, k), 1.0, device=device)
    data[:, ::2] = 448.0
    data[:, 33:64:2] = 1.0 + 2.0**-3
    data = data.to(E4M3)
    scale = torch.full((rows, k // 32), 127, dtype=torch.uint8)
    change(scale)
    scale = scale.to(device)
    other = torch.eye(k, device=device).repeat(3, 1)[: n if side == "a" else m].contiguous()
    other, other_scale = quantised(other.to(BF16), swizzle=False)
    given = (data, other.t(), scale, other_scale)
    if side == "b":
        given = (other, data.t(), other_scale, scale)
    exact, out = (tk.mxfp8_gemm(*given, out_dtype=FP32, path=path, swizzle=False) for path in PATHS)
    marks = tk.mxfp8_prepare(data, scale, swizzle=False).marks
    assert bool(marks[0].any()) == trips
    assert not marks[1:].any()
    if side == "b":
        out, exact = out.t(), exact.t()
    if trips:
        same = (out[:128] == exact[:128]) | (out[:128].isnan() & exact[:128].isnan())
        assert bool(same.all())
    elif name == "eight below" and launched.rescales(device):
        assert not torch.equal(out[3], exact[3])
        assert float(((out - exact)[3] / exact[3].clamp(min=1e-30)).abs().max()) < 0.2


def test_zero_blocks_do_not_trip(device):
    """Their scale is the smallest there is, and says nothing."""
    x = torch.randn(130, 256, device=device)
    x[:, 32:64] = 0
    x[7] = 0
    a, scale_a = quantised(x.to(BF16))
    operand = tk.mxfp8_prepare(a, scale_a)
    assert not operand.marks.any()
    w, scale_w = quantised(torch.randn(40, 256, device=device).to(BF16))
    out = tk.mxfp8_gemm(operand, w.t(), None, scale_w, out_dtype=FP32)
    assert not out[7].any()


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("path", PATHS)
def test_activations(device, activation, path):
    a, scale_a = operand(70, 64, E4M3, True, device, 1)
    b, scale_b = operand(40, 64, E4M3, True, device, 1)
    bias = torch.randn(40, device=device).to(BF16)
    options = {"bias": bias, "activation": activation}
    given = (a, b.t(), scale_a, scale_b)
    expected = tk.reference.mxfp8_gemm(*given, out_dtype=torch.float64, **options)
    plain = tk.reference.mxfp8_gemm(*given, out_dtype=BF16, **options)
    out = tk.mxfp8_gemm(*given, path=path, **options)
    # exp and the reciprocal are the hardware's approximations, of 2^-22 each.
    assert_accurate(out, expected, plain, slack=2.0**-20 * expected.abs())


@pytest.mark.parametrize("swizzle", [True, False])
@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_prepared_operands(device, swizzle, kind):
    """Prepared or not, the same bits; saved and restored, too."""
    x, w = torch.randn(70, 272, device=device), torch.randn(140, 272, device=device)
    a, scale_a = quantised(x.to(BF16), swizzle=swizzle)
    b, scale_b = quantised(w.to(BF16), dtype=kind, swizzle=swizzle)
    expected = tk.mxfp8_gemm(a, b.t(), scale_a, scale_b, path="rebased", swizzle=swizzle)
    left = tk.mxfp8_prepare(a, scale_a, swizzle=swizzle)
    right = tk.mxfp8_prepare(b, scale_b, swizzle=swizzle)
    assert torch.equal(tk.mxfp8_gemm(a, right, scale_a, swizzle=swizzle), expected)
    assert torch.equal(tk.mxfp8_gemm(left, b.t(), None, scale_b, swizzle=swizzle), expected)
    assert torch.equal(tk.mxfp8_gemm(left, right), expected)
    exact = tk.mxfp8_gemm(a, b.t(), scale_a, scale_b, swizzle=swizzle)
    assert torch.equal(tk.mxfp8_gemm(left, right, path="exact"), exact)


@pytest.mark.gpu
def test_a_large_kept_weight(device):
    """40 rows: beside a weight of so many elements that is kept, a is rescaled by a pass."""
    x, w = torch.randn(40, 8192, device=device), torch.randn(16384, 8192, device=device)
    a, scale_a = quantised(x.to(BF16))
    b, scale_b = quantised(w.to(BF16))
    exact = tk.mxfp8_gemm(a, b.t(), scale_a, scale_b, out_dtype=FP32)
    out = tk.mxfp8_gemm(a, tk.mxfp8_prepare(b, scale_b), scale_a, out_dtype=FP32)
    assert (out - exact).abs().max() <= 2.0**-7 * exact.abs().max()


def test_state_dict_round_trip(device, tmp_path):
    class Layer(torch.nn.Module):
        def __init__(self, operand):
            super().__init__()
            for name, tensor in operand._asdict().items():
                self.register_buffer(name, tensor)

        def forward(self, x, scale):
            weight = tk.Mxfp8Operand(*(getattr(self, f) for f in tk.Mxfp8Operand._fields))
            return tk.mxfp8_gemm(x, weight, scale)

    weights = [quantised(torch.randn(40, 96, device=device).to(BF16)) for _ in range(2)]
    layer, other = (Layer(tk.mxfp8_prepare(*w)) for w in weights)
    x, scale = quantised(torch.randn(7, 96, device=device).to(BF16))
    expected = layer(x, scale)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    assert not torch.equal(other(x, scale), expected)
    other.load_state_dict(torch.load(tmp_path / "layer.pt"))
    assert torch.equal(other(x, scale), expected)


def test_layouts_of_checkpoints(device):
    """Scales as `scaled_mm` takes them on Blackwell (flat, 128x4), and as torchao stores them
    (plain, under the rule floor), uint8 as Transformer Engine does."""
    x, w = torch.randn(130, 160, device=device), torch.randn(48, 160, device=device)
    a, scale_a = oracle.mxfp8(x.to(BF16), "floor", E4M3)
    b, scale_b = oracle.mxfp8(w.to(BF16), "floor", E4M3)
    a, b = (torch.from_numpy(codes).to(device).view(E4M3) for codes in (a, b))
    plain = [torch.from_numpy(s).to(device) for s in (scale_a, scale_b)]
    expected = tk.mxfp8_gemm(a, b.t(), *plain, swizzle=False)
    laid = [oracle_layout(s)[0] for s in plain]
    assert torch.equal(tk.mxfp8_gemm(a, b.t(), *laid), expected)
    assert torch.equal(tk.mxfp8_gemm(a, b.t(), *(s.view(E8M0) for s in laid)), expected)
    assert torch.equal(tk.mxfp8_gemm(a, b.t(), *(s.flatten() for s in laid)), expected)
    exact = tk.reference.mxfp8_gemm(a, b.t(), *plain, swizzle=False, out_dtype=torch.float64)
    error = (expected.double() - exact).norm() / exact.norm()
    assert float(error) < 2.0**-8
    assert hasattr(functional, "scaled_mm") == hasattr(functional, "SwizzleType")


def zeros(*shape, dtype=E4M3):
    return torch.zeros(shape).to(dtype)


def scales(*shape):
    return torch.full(shape, 127, dtype=torch.uint8)


A, B, SA, SB = zeros(3, 256), zeros(256, 160), scales(3, 8), scales(160, 8)
KEPT = tk.reference.mxfp8_prepare(B.t(), SB, swizzle=False)
WRONG = {
    "a": (TypeError, "a must be a torch.Tensor, got list", ([1], B, SA, SB), {}),
    "a bf16": (TypeError, "a is torch.bfloat16; supported", (A.to(BF16), B, SA, SB), {}),
    "b bf16": (TypeError, "b is torch.bfloat16", (A, B.to(BF16), SA, SB), {}),
    "b bytes": (TypeError, "b is torch.uint8", (A, B.view(torch.uint8), SA, SB), {}),
    "sparse": (TypeError, "a must be a dense tensor", (A.float().to_sparse(), B, SA, SB), {}),
    "scale": (TypeError, "scale_a must be a torch.Tensor, got float", (A, B, 1.0, SB), {}),
    "no scale": (TypeError, "scale_b is missing", (A, B, SA), {}),
    "two scales": (TypeError, "scale_b must be None", (A, KEPT, SA, SB), {}),
    "scale fp32": (TypeError, "scale_b is torch.float32", (A, B, SA, SB.float()), {}),
    "device": (TypeError, "b is on meta, a is on", (A, B.to("meta"), SA, SB), {}),
    "scale device": (TypeError, "scale_a is on meta", (A, B, SA.to("meta"), SB), {}),
    "out_dtype": (TypeError, "out_dtype is torch.int8", (A, B, SA, SB), {"out_dtype": torch.int8}),
    "bias": (TypeError, "bias is torch.float32", (A, B, SA, SB), {"bias": torch.zeros(160)}),
    "path": (ValueError, "path is 'fast'", (A, B, SA, SB), {"path": "fast"}),
    "path type": (TypeError, "path must be a str", (A, B, SA, SB), {"path": 1}),
    "swizzle": (TypeError, "swizzle must be True or False", (A, B, SA, SB), {"swizzle": None}),
    "activation": (ValueError, "activation is 'tanh'", (A, B, SA, SB), {"activation": "tanh"}),
    "inner": (ValueError, "expected (M, K) @ (K, N)", (A, B.mT, SA, SB), {}),
    "vector": (ValueError, "expected (M, K) @ (K, N)", (A[0], B, SA, SB), {}),
    "batch": (ValueError, "expected (M, K) @ (K, N)", (A, B[None], SA, SB), {}),
    "rows": (ValueError, "scale_a has shape (2, 8)", (A, B, SA[:2], SB), {}),
    "transposed scale": (ValueError, "scale_b has shape (8, 160)", (A, B, SA, SB.t()), {}),
    "swizzled": (ValueError, "128x4 layout are (128, 8)", (A, B, SA, SB), {"swizzle": True}),
    "bias shape": (ValueError, "must be (160,)", (A, B, SA, SB), {"bias": zeros(3, dtype=BF16)}),
    "kept shape": (
        ValueError,
        "factor of the Mxfp8Operand b has shape (159,)",
        (A, KEPT._replace(factor=KEPT.factor[1:]), SA),
        {},
    ),
    "offs": (
        TypeError,
        "offs is torch.int64",
        (A, B[None], SA, SB[None]),
        {"offs": torch.tensor([3])},
    ),
    "offs shape": (
        ValueError,
        "offs has shape (2,)",
        (A, B[None], SA, SB[None]),
        {"offs": torch.tensor([3, 3]).int()},
    ),
    "offs dims": (
        ValueError,
        "expected (M, K) @ (E, K, N), with offs",
        (A, B, SA, SB),
        {"offs": torch.tensor([3]).int()},
    ),
    "offs rebased": (
        ValueError,
        "multiplied by the exact path alone",
        (A, B[None], SA, SB[None]),
        {"offs": torch.tensor([3]).int(), "path": "rebased"},
    ),
    "kept inner": (ValueError, "expected (M, K)", (A[:, :32], KEPT, SA[:, :1]), {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(device, name):
    error, words, operands, options = WRONG[name]

    def put(x):
        if isinstance(x, tuple):
            return tk.Mxfp8Operand(*map(put, x))
        return x.to(device) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x

    options = {"swizzle": False, **options}
    with pytest.raises(error) as caught:
        tk.mxfp8_gemm(*map(put, operands), **{key: put(x) for key, x in options.items()})
    assert words in str(caught.value)


# What test_library.py asks of the ops whose operands have gradients


def sample(device):
    x, w = torch.randn(40, 272, device=device), torch.randn(24, 272, device=device)
    a, scale_a = quantised(x.to(BF16))
    b, scale_b = quantised(w.to(BF16), dtype=E5M2)
    return a, b.t(), scale_a, scale_b, torch.randn(24, device=device).to(BF16)


# The schema check multiplies its inputs, which PyTorch cannot with fp8.
OPCHECKS = ("test_autograd_registration", "test_faketensor")


def call(a, b, scale_a, scale_b, bias, path="rebased"):
    return tk.mxfp8_gemm(a, b, scale_a, scale_b, bias=bias, activation="silu", path=path)


def test_opcheck(device):
    a, b, scale_a, scale_b, bias = sample(device)
    op = torch.ops.thunderkittens.mxfp8_gemm.default
    kept = tk.mxfp8_prepare(b.t(), scale_b)
    for arguments in (
        (a, b, scale_a, scale_b, bias, 4),
        (a, b, scale_a, scale_b),
        (a, b, scale_a, scale_b, None, 0, None, True, True, True, None, None, None, *kept[2:]),
    ):
        result = torch.library.opcheck(op, arguments, test_utils=OPCHECKS)
        assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("path", PATHS)
def test_reruns_are_bit_equal(device, path):
    tensors = sample(device)
    first = call(*tensors, path)
    assert all(torch.equal(call(*tensors, path), first) for _ in range(3))
    assert not first.requires_grad


@pytest.mark.parametrize("path", PATHS)
def test_compile_and_export(device, path):
    torch._dynamo.reset()
    tensors = sample(device)
    expected = call(*tensors, path)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors, path), expected)

    class Module(torch.nn.Module):
        def forward(self, *tensors):
            return call(*tensors, path)

    program = torch.export.export(Module(), tensors)
    assert torch.equal(program.module()(*tensors), expected)


def test_compile_with_prepared(device):
    torch._dynamo.reset()
    a, b, scale_a, scale_b, bias = sample(device)
    kept = tk.mxfp8_prepare(b.t(), scale_b)

    def layer(x, scale, *parts):
        return tk.mxfp8_gemm(x, tk.Mxfp8Operand(*parts), scale, bias=bias)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, scale_a, *kept), layer(a, scale_a, *kept))


def test_vmap(device):
    a, b, scale_a, scale_b, bias = sample(device)
    biases = torch.stack([bias, 2 * bias])
    mapped = torch.func.vmap(call, in_dims=(None, None, None, None, 0))
    actual = mapped(a, b, scale_a, scale_b, biases)
    assert torch.equal(actual[1], call(a, b, scale_a, scale_b, 2 * bias))


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
def test_cuda_graph_and_stream(device, path):
    tensors = sample(device)
    expected = call(*tensors, path)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(*tensors, path)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(*tensors, path)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, expected)


def few_rows(m, n, k, device, scales=(110, 145)):
    """Random codes of e4m3 but NaN, with scales far apart."""
    operands = []
    for rows in (m, n):
        data = torch.randint(0, 256, (rows, k), device=device, dtype=torch.uint8)
        data = torch.where(data & 127 == 127, 1, data).to(torch.uint8)
        scale = torch.randint(*scales, (rows, k // 32), device=device, dtype=torch.uint8)
        operands += [data.view(E4M3), swizzled(scale, True)]
    a, scale_a, b, scale_b = operands
    return a, b.t(), scale_a, scale_b


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("m", [1, 16, 17, 32, 33, 64])
def test_few_rows_with_scales_far_apart(device, m, path):
    """Products of blocks are scaled in fp32: nothing is rescaled, and nothing guarded."""
    n, k = 200, 1056
    given = few_rows(m, n, k, device)
    a, scale_a, b, scale_b = given[0], given[2], given[1].t(), given[3]
    wide, other = (
        tk.reference.mxfp8_dequantize(*x, dtype=FP32).double() for x in ((a, scale_a), (b, scale_b))
    )
    slack = 2.0**-22 * k**0.5 * (wide.abs() @ other.abs().t())
    if path == "rebased":
        # Each of 32 products is cut to 13 bits below the exponent of the largest.
        terms = wide.abs().unflatten(1, (-1, 32))[:, None] * other.abs().unflatten(1, (-1, 32))
        slack = slack + 32 * 2.0**-13 * terms.amax(-1).sum(-1)
    out = tk.mxfp8_gemm(*given, out_dtype=FP32, path=path)
    assert bool(((out.double() - wide @ other.t()).abs() <= slack).all())


@pytest.mark.parametrize(("m", "n"), [(200, 129), (129, 200), (200, 257), (257, 128)])
@pytest.mark.parametrize("last_of_a", [True, False])
def test_a_last_row_that_no_scale_serves(device, m, n, last_of_a):
    """Its tile goes through the kernel with a tile mask, also where it is alone in its rows or
    columns of tiles: half of its blocks are 2^30 larger, and meet zeros."""
    a, scale_a = operand(m, 320, E4M3, False, device, spread=1)
    b, scale_b = operand(n, 320, E4M3, False, device, spread=1)
    scale, other = (scale_a, b) if last_of_a else (scale_b, a)
    scale.view(torch.uint8)[-1] = torch.tensor([110, 140] * 5, dtype=torch.uint8)
    other.view(torch.uint8).unflatten(1, (5, 2, 32))[:, :, 1] = 0
    given = (a, b.t(), scale_a, scale_b)
    out = tk.mxfp8_gemm(*given, path="rebased", out_dtype=FP32, swizzle=False)
    expected = tk.reference.mxfp8_gemm(*given, out_dtype=FP32, swizzle=False)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("swizzle", [True, False])
def test_nan_among_the_codes(device, path, kind, swizzle):
    """A NaN that its block's scale does not show makes its row or column NaN, no other."""
    a, scale_a = operand(40, 192, E4M3, swizzle, device)
    b, scale_b = operand(136, 192, kind, swizzle, device)
    expected = tk.mxfp8_gemm(a, b.t(), scale_a, scale_b, path=path, swizzle=swizzle)
    a.view(torch.uint8)[7, 100] = 0x7F
    b.view(torch.uint8)[70, 3] = 0xFF
    out = tk.mxfp8_gemm(a, b.t(), scale_a, scale_b, path=path, swizzle=swizzle)
    assert bool(out[7].isnan().all())
    assert bool(out[:, 70].isnan().all())
    rows, columns = torch.arange(40) != 7, torch.arange(136) != 70
    assert torch.equal(out[rows][:, columns], expected[rows][:, columns])


@pytest.mark.parametrize(("rows", "shift"), [(5, 3), (5, 4), (70, 3)])
@pytest.mark.parametrize("path", PATHS)
def test_scales_of_any_alignment(device, path, rows, shift):
    given = few_rows(rows, 136, 160, device, (120, 130))
    expected = tk.mxfp8_gemm(*given, path=path)
    shifted = []
    for scale in given[2:]:
        room = torch.empty(scale.numel() + shift, dtype=torch.uint8, device=device)
        room[shift:] = scale.view(torch.uint8).flatten()
        shifted.append(room[shift:].view(scale.shape).view(E8M0))
    assert torch.equal(tk.mxfp8_gemm(*given[:2], *shifted, path=path), expected)
