"""`tk.fp8_gemm`: values, scales, layouts, groups, epilogues, wrong calls."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import thunderkittens as tk
from helpers.cover import alternate, cover, over
from helpers.layouts import matrix
from helpers.numerics import assert_accurate, fp8_products
from thunderkittens import emulation

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KINDS = ["tensor", "row", "mixed", "block", "fine"]
PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]
SHAPES = [
    (1, 1, 1),
    (7, 129, 16),
    (129, 112, 272),
    (64, 264, 128),
    (130, 7, 144),
    (530, 1032, 72),  # more tiles of 64 x 64 than SMs, from here on
    (833, 640, 140),
    (0, 5, 7),
    (5, 0, 7),
    (5, 7, 0),
]
SHAPES_CUDA = [
    (1000, 1003, 777),
    (4096, 2112, 7168),
    (257, 8, 4096),
    (3, 4099, 4096),
    (300, 300, 10007),
    (129, 28672, 200),
    (31, 28672, 1031),
    (512, 2112, 7168),  # tiles whose width fits the problem
    (130, 1000, 8192),
]


def blocks(n):
    return -(-n // 128)


def scale_shapes(kind, m, n, k):
    return {
        "tensor": ((), (1,)),
        "row": ((m, 1), (1, n)),
        "mixed": ((m, 1), ()),
        "block": ((m, blocks(k)), (blocks(k), blocks(n))),
        "fine": ((m, blocks(k)), (blocks(k), n)),
    }[kind]


def powers(shape, device):
    """Scales that round nothing away: 1/2, 1, 2."""
    return 2.0 ** torch.randint(-1, 2, shape, device=device).float()


def cases(device, intensity):
    return cover(
        {
            "shape": SHAPES + SHAPES_CUDA * (device == "cuda"),
            "kind": KINDS,
            "pair": PAIRS,
            "layout_a": ["packed", "packed_t", "sliced", "sliced_t", "unaligned"],
            "layout_b": ["packed", "packed_t", "sliced", "sliced_t", "unaligned"],
            "out": [BF16, FP16, FP32],
            "bias": [None, BF16, FP32],
            "accurate": [True, False],
        },
        intensity,
    )


def place(x, layout):
    """As `matrix`, through 8-bit integers: NaN around the values is the code 0x7f."""
    dtype = x.dtype
    if layout.endswith("_t"):
        return place(x.mT.contiguous(), layout.removesuffix("_t")).mT
    rows, cols = x.shape
    codes = x.view(torch.uint8)
    pad, shift = {"packed": (0, 0), "sliced": (16 + -cols % 16, 16), "unaligned": (3, 1)}[layout]
    whole = torch.full((rows, cols + pad + shift), 0x7F, dtype=torch.uint8, device=x.device)
    view = whole[:, shift : shift + cols]
    view.copy_(codes)
    return view.view(dtype) if layout != "packed" else x.contiguous()


@over(cases)
def test_integers_are_exact(device, case):
    """Sums of small integers are exact on the tensor cores too: only the rounding of the output
    is left, in every layout, format and kind of scale."""
    m, n, k = case["shape"]
    a = torch.randint(-2, 3, (m, k), device=device).float()
    b = torch.randint(-2, 3, (k, n), device=device).float()
    scale_a, scale_b = (powers(s, device) for s in scale_shapes(case["kind"], m, n, k))
    bias = None
    if case["bias"] is not None:
        bias = torch.randint(-3, 4, (n,), device=device).to(case["bias"])
    out = tk.fp8_gemm(
        place(a.to(case["pair"][0]), case["layout_a"]),
        place(b.to(case["pair"][1]), case["layout_b"]),
        scale_a,
        scale_b,
        bias=bias,
        out_dtype=case["out"],
        accurate=case["accurate"],
    )
    expected = tk.reference.fp8_gemm(a, b, scale_a, scale_b, bias=bias, out_dtype=torch.float64)
    assert out.dtype == case["out"]
    assert out.is_contiguous()
    assert torch.equal(out, expected.to(case["out"]))


def normal(shape, dtype, device):
    return torch.randn(shape, device=device).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pair", PAIRS)
def test_accuracy(device, kind, pair):
    """Against float64 of the same codes and scales."""
    m, n, k = (130, 264, 400) if device == "cpu" else (1000, 1003, 4096)
    a, b = normal((m, k), pair[0], device), normal((n, k), pair[1], device).t()
    scale_a, scale_b = (torch.rand(s, device=device) + 0.5 for s in scale_shapes(kind, m, n, k))
    expected = tk.reference.fp8_gemm(a, b, scale_a, scale_b, out_dtype=torch.float64)
    plain = tk.reference.fp8_gemm(a, b, scale_a, scale_b, out_dtype=BF16)
    left = tk.reference.fp8_gemm(
        a.float().abs(), b.float().abs(), scale_a, scale_b, out_dtype=torch.float64
    )
    # The tensor cores keep 13 bits behind the point of the largest of the products that they add,
    # 128 of k at a time.
    for accurate, slack in ((True, 2.0**-13 * left / max(k // 128, 1)), (False, 2.0**-13 * left)):
        out = tk.fp8_gemm(a, b, scale_a, scale_b, accurate=accurate)
        assert_accurate(out, expected, plain, slack=slack)


def any_bytes(shape, dtype, device):
    """Finite values of all codes."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    values = codes.view(dtype)
    return torch.where(values.float().isfinite(), codes, 0).to(torch.uint8).view(dtype)


def cut_off(shape, dtype, device):
    """One large product in 128, beside which those of the others are cut off whole."""
    x = torch.full(shape, 2.5, device=device)
    x[:, ::128] = 256
    return x.to(dtype)


def cancelled(shape, dtype, device):
    """The same, with a second large product that takes it away again."""
    x = cut_off(shape, dtype, device).float()
    x[: shape[0] // 2, 64::128] = 256
    x[shape[0] // 2 :, 64::128] = -256
    return x.to(dtype)


@pytest.mark.parametrize("pair", PAIRS)
@alternate(
    ("fill", "kind"),
    [any_bytes, cut_off, cancelled, normal],
    ["tensor", "row", "block", "fine"],
)
def test_bound_of_sums(device, fill, pair, kind):
    """Of all codes, and where the bound is nearly reached: the sums of 128 miss by no more than
    what the tensor cores cut, and are added in fp32. Without promotion one sum has all of k."""
    for m, n, k in ((20, 136, 512), (130, 264, 784), *[(1000, 520, 2048)] * (device == "cuda")):
        a, b = fill((m, k), pair[0], device), fill((n, k), pair[1], device).t()
        scale_a, scale_b = (torch.rand(s, device=device) + 0.5 for s in scale_shapes(kind, m, n, k))
        left, right = (x.float().double() for x in (a, b))
        factor_a, factor_b = torch.ones_like(left), torch.ones_like(right)
        if kind in ("block", "fine"):
            factor_a = scale_a.double().repeat_interleave(128, 1)[:, :k]
            factor_b = scale_b.double().repeat_interleave(128, 0)[:k]
            if kind == "block":
                factor_b = factor_b.repeat_interleave(128, 1)[:, :n]
        whole = 1.0 if kind in ("block", "fine") else scale_a.double() * scale_b.double()
        expected = ((left * factor_a) @ (right * factor_b)) * whole
        absolute = ((left * factor_a).abs() @ (right * factor_b).abs()) * whole
        bound = torch.zeros_like(expected)
        for first in range(0, k, 128):
            part = slice(first, first + 128)
            factors = factor_a[:, first, None] * factor_b[first] * whole
            bound += factors * fp8_products(a[:, part], b[part])[1]
        # A product with a factor and a sum per 128 of k, then the scales.
        bound += 2.0**-24 * (2 * -(-k // 128) + 4) * (absolute + bound)
        out = tk.fp8_gemm(a, b, scale_a, scale_b, out_dtype=FP32)
        assert bool(((out.double() - expected).abs() <= bound).all())
        if kind == "tensor":  # in whatever order blocks that divide k add theirs
            out = tk.fp8_gemm(a, b, scale_a, scale_b, out_dtype=FP32, accurate=False)
            steps = -(-k // 32)
            bound = 34 * steps * 2.0**-13 * absolute
            assert bool(((out.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("accurate", [True, False])
@pytest.mark.parametrize("out_dtype", [BF16, FP32])
@pytest.mark.parametrize(("m", "n"), [(70, 40), (770, 720)])
def test_activations(device, activation, accurate, out_dtype, m, n):
    """Of exact sums, from -20 to 20; few tiles and more than there are SMs."""
    a = torch.randint(-2, 3, (m, 64), device=device).to(E4M3)
    b = torch.randint(-2, 3, (64, n), device=device).to(E4M3)
    scale, bias = torch.tensor(0.5, device=device), torch.randn(n, device=device)
    options = {"bias": bias, "activation": activation}
    expected = tk.reference.fp8_gemm(a, b, scale, scale, out_dtype=torch.float64, **options)
    plain = tk.reference.fp8_gemm(a, b, scale, scale, out_dtype=out_dtype, **options)
    out = tk.fp8_gemm(a, b, scale, scale, out_dtype=out_dtype, accurate=accurate, **options)
    # exp and the reciprocal are the hardware's approximations, of 2^-22 each.
    assert_accurate(out, expected, plain, slack=2.0**-20 * expected.abs())


@pytest.mark.emulator
@pytest.mark.parametrize("policy", emulation.POLICIES)
@pytest.mark.parametrize("columns", [0, 3])
@pytest.mark.parametrize("accurate", [False, True])
def test_calls_with_scales_alone(accurate, columns, policy):
    """They have a kernel of their own, ping-pong or promoted: tiles of one and two widths, of
    one step, of fewer than there are stages and of more; blocks with several tiles, with one and
    with none."""
    config = {"block_m": 128, "block_n": 176, "block_k": 128}
    config |= {"stages": 4, "buffers": 3} if accurate else {"stages": 5, "buffers": 2}
    config |= {"consumers": 2, "swap_ab": False, "splits": 1, "raster_group": 1}
    config |= {"sums": int(accurate), "cluster_m": 1, "cluster_n": 1}
    config |= {"columns": columns, "extra_rows": min(columns, 1)}
    n = 504
    cases = [("tensor", 330, 272, 2), ("row", 330, 720, 2), ("mixed", 200, 100, 4)]
    cases += [("tensor", 129, 144, 1), ("row", 65, 400, 3 if columns else 5)]
    for number, (kind, m, k, blocks_at_work) in enumerate(cases):
        a, b = torch.randint(-2, 3, (m, k)).float(), torch.randint(-2, 3, (n, k)).float().t()
        scales = [powers(shape, "cpu") for shape in scale_shapes(kind, m, n, k)]
        dtype = BF16 if number % 2 else FP16
        arguments = (a.to(E4M3), b.to(E4M3), *scales)
        options = {"out_dtype": dtype, "accurate": accurate}
        with tk.emulate(policy, seed=k, config=config | {"blocks": blocks_at_work}) as run:
            out = tk.fp8_gemm(*arguments, **options)
            general = tk.fp8_gemm(*arguments, bias=torch.zeros(n, dtype=dtype), **options)
        expected = tk.reference.fp8_gemm(a, b, *scales, out_dtype=torch.float64)
        assert torch.equal(out, expected.to(dtype)), (kind, m, k)
        assert torch.equal(out, general), (kind, m, k)
        assert (run.kernels[0]["columns"], run.kernels[0]["block_n"]) == (columns, 176)
        assert [kernel["kernel"].endswith("_rowwise") for kernel in run.kernels] == [True, False]


def test_one_hot_rows_select(device):
    """Rows of a that select one row of b each: the result is b, with its scales, bit by bit."""
    k, n = 256, 264
    a = torch.eye(k, device=device).to(E4M3)
    codes, scale = tk.fp8_quantize(torch.randn(n, k, device=device), "128x128")
    ones = torch.ones(k, 2, device=device)
    out = tk.fp8_gemm(a, codes.t(), ones, scale.t(), out_dtype=FP32)
    expected = codes.float() * scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    assert torch.equal(out, expected.t())


GROUPS = [[5, 0, 130, 1], [0, 0], [300], [128, 128, 0], [0, 7, 0, 0, 140]]


@pytest.mark.parametrize("sizes", GROUPS)
@pytest.mark.parametrize("behind", [0, 9])
@pytest.mark.parametrize("kind", ["block", "row", "tensor", "fine"])
def test_groups(device, sizes, behind, kind):
    m, n, k, count = sum(sizes) + behind, 136, 144, len(sizes)
    a = torch.randint(-2, 3, (m, k), device=device).float()
    if behind:
        a[-behind:] = float("nan")
    b = torch.randint(-2, 3, (count, n, k), device=device).float().mT
    shape_a, shape_b = scale_shapes(kind, m, n, k)
    scale_a = powers(shape_a, device)
    scale_b = powers(shape_b if kind == "tensor" else (count, *shape_b), device)
    offs = torch.tensor(sizes, device=device).cumsum(0).int()
    out = tk.fp8_gemm(a.to(E4M3), b.to(E4M3), scale_a, scale_b, offs=offs)
    expected = tk.reference.fp8_gemm(
        a.nan_to_num(), b, scale_a, scale_b, out_dtype=torch.float64, offs=offs
    )
    assert torch.equal(out, expected.to(BF16))
    assert not out[m - behind :].any()


@pytest.mark.parametrize("offs", [[-3, 5, 5, 100], [20, 10, 30, 25], [50, 60, 70, 80], [-1] * 4])
@pytest.mark.parametrize("kind", ["block", "row"])
def test_offsets_out_of_range(device, offs, kind):
    """They are moved to where they make sense, as those of `tk.grouped_gemm`."""
    m, n, k = 40, 72, 144
    a = torch.randint(-2, 3, (m, k), device=device).float()
    b = torch.randint(-2, 3, (4, n, k), device=device).float().mT
    shape_a, shape_b = scale_shapes(kind, m, n, k)
    scale_a, scale_b = powers(shape_a, device), powers((4, *shape_b), device)
    ends, last = [], 0
    for x in offs:
        last = min(max(x, last), m)
        ends.append(last)
    given, moved = (torch.tensor(x, dtype=torch.int32, device=device) for x in (offs, ends))
    out = tk.fp8_gemm(a.to(E4M3), b.to(E4M3), scale_a, scale_b, offs=given)
    expected = tk.reference.fp8_gemm(a, b, scale_a, scale_b, offs=moved)
    assert torch.equal(out, expected)
    assert torch.equal(tk.reference.fp8_gemm(a, b, scale_a, scale_b, offs=given), expected)


@pytest.mark.parametrize("kind", ["block", "row", "fine"])
def test_a_group_beside_one_of_nan(device, kind):
    sizes, n, k = [3, 70, 1, 5, 0, 66], 136, 144
    m = sum(sizes)
    ends = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    a = torch.randint(-2, 3, (m, k), device=device).float()
    b = torch.randint(-2, 3, (len(sizes), n, k), device=device).float().mT
    shape_a, shape_b = scale_shapes(kind, m, n, k)
    scale_a, scale_b = powers(shape_a, device), powers((len(sizes), *shape_b), device)
    offs = torch.tensor(ends[1:], dtype=torch.int32, device=device)
    clean = tk.reference.fp8_gemm(a, b, scale_a, scale_b, offs=offs)
    a[3:73], b[3] = float("nan"), float("nan")
    out = tk.fp8_gemm(a.to(E4M3), b.to(E4M3), scale_a, scale_b, offs=offs)
    for group in range(len(sizes)):
        part = slice(ends[group], ends[group + 1])
        same = torch.equal(out[part], clean[part])
        assert bool(out[part].isnan().all()) if group in (1, 3) else same


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["packed_t", "sliced", "sliced_t", "unaligned", "spread"])
def test_scales_with_strides(device, kind, layout):
    """NaN between and around them; and a bias that is not contiguous."""
    for m, n, k in ((70, 200, 300), (7, 136, 520)):
        a = torch.randint(-2, 3, (m, k), device=device).to(E4M3)
        b = torch.randint(-2, 3, (n, k), device=device).to(E4M3).t()
        scales = [powers(s, device) for s in scale_shapes(kind, m, n, k)]
        bias = torch.randint(-3, 4, (n, 2), device=device).to(BF16)[:, 0]
        placed = [matrix(s, layout) if s.dim() == 2 else s for s in scales]
        out = tk.fp8_gemm(a, b, *placed, bias=bias)
        assert torch.equal(out, tk.reference.fp8_gemm(a, b, *scales, bias=bias))


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("kind", ["row", "block", "groups"])
@pytest.mark.parametrize("layout", ["packed", "packed_t"])
@pytest.mark.parametrize(("m", "n", "k"), [((1 << 20) + 3, 8, 2056), ((1 << 16) + 1, 32784, 16)])
def test_more_than_2_31_elements(device, kind, layout, m, n, k):
    """Of a, also where a transposed copy is made, or of the result."""
    a = torch.randint(-2, 3, (m, k), device=device, dtype=torch.int8).to(E4M3)
    b = torch.randint(-2, 3, (n, k), device=device).to(E4M3).t()
    shape_a, shape_b = scale_shapes("row" if kind == "row" else "block", m, n, k)
    scale_a, scale_b = powers(shape_a, device), powers(shape_b, device)
    offs = None
    last = b
    if kind == "groups":
        b, scale_b = b.expand(2, k, n), scale_b.expand(2, *scale_b.shape)
        offs = torch.tensor([m // 3, m], dtype=torch.int32, device=device)
    out = tk.fp8_gemm(place(a, layout), b, scale_a, scale_b, offs=offs)
    assert max(a.numel(), out.numel()) > 2**31
    ends = slice(-200, None)
    scale_b = scale_b[-1] if kind == "groups" else scale_b
    for rows in (slice(0, 200), ends):
        expected = tk.reference.fp8_gemm(a[rows], last, scale_a[rows], scale_b)
        assert torch.equal(out[rows], expected)


def test_quantised_operands(device):
    """Codes and scales as `fp8_quantize` gives them, for each granularity."""
    x, w = torch.randn(130, 272, device=device), torch.randn(140, 272, device=device)
    for of_x, of_w in (("tensor", "tensor"), ("row", "row"), ("1x128", "128x128"),
                       ("1x128", "1x128")):  # fmt: skip
        a, scale_a = tk.fp8_quantize(x, of_x)
        b, scale_b = tk.fp8_quantize(w, of_w)
        scale_b = scale_b if of_w == "tensor" else scale_b.t()
        out = tk.fp8_gemm(a, b.t(), scale_a, scale_b, out_dtype=FP32)
        error = (out - x @ w.t()).norm() / (x @ w.t()).norm()
        assert float(error) < 2.0**-4


def zeros(*shape, dtype=E4M3):
    return torch.zeros(shape).to(dtype)


A, B, S = zeros(3, 256), zeros(256, 160), torch.ones(())
WRONG = {
    "a": (TypeError, "a must be a torch.Tensor, got list", ([1], B, S, S), {}),
    "a bf16": (TypeError, "a is torch.bfloat16", (A.to(BF16), B, S, S), {}),
    "b bf16": (TypeError, "b is torch.bfloat16", (A, B.to(BF16), S, S), {}),
    "e5m2": (TypeError, "both torch.float8_e5m2", (A.to(E5M2), B.to(E5M2), S, S), {}),
    "scale": (TypeError, "scale_a must be a torch.Tensor, got float", (A, B, 1.0, S), {}),
    "scale bf16": (TypeError, "scale_b is torch.bfloat16", (A, B, S, S.to(BF16)), {}),
    "device": (TypeError, "b is on meta", (A, B.to("meta"), S, S), {}),
    "out_dtype": (TypeError, "out_dtype is torch.int8", (A, B, S, S), {"out_dtype": torch.int8}),
    "bias": (TypeError, "bias is torch.int64", (A, B, S, S), {"bias": torch.zeros(160).long()}),
    "offs": (TypeError, "offs is torch.int64", (A, B[None], S, S), {"offs": torch.tensor([3])}),
    "inner": (ValueError, "must equal the second to last", (A, B.mT, S, S), {}),
    "dims": (ValueError, "must have 2 and 2 dimensions", (A[0], B, S, S), {}),
    "dims b": (ValueError, "2 and 2", (A, B[None], S, S), {}),
    "dims offs": (ValueError, "2 and 3", (A, B, S, S), {"offs": torch.tensor([3]).int()}),
    "offs shape": (
        ValueError,
        "offs has shape (2,)",
        (A, B[None], S, S),
        {"offs": torch.tensor([3, 3]).int()},
    ),
    "bias shape": (ValueError, "must be (160,)", (A, B, S, S), {"bias": torch.zeros(3)}),
    "activation": (ValueError, "activation is 'tanh'", (A, B, S, S), {"activation": "tanh"}),
    "rows": (ValueError, "scale_a has shape (2, 1)", (A, B, torch.ones(2, 1), S), {}),
    "columns": (ValueError, "(1, 3)", (A, B, S, torch.ones(1, 3)), {}),
    "half block": (ValueError, "(3, 2)", (A, B, torch.ones(3, 2), S), {}),
    "vector": (ValueError, "(3,)", (A, B, torch.ones(3), S), {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(device, name):
    error, words, operands, options = WRONG[name]

    def put(x):
        return x.to(device) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x

    with pytest.raises(error) as caught:
        tk.fp8_gemm(*map(put, operands), **{key: put(x) for key, x in options.items()})
    assert words in str(caught.value)


# What test_library.py asks of the ops whose operands have gradients


def sample(device):
    x, w = torch.randn(40, 272, device=device), torch.randn(24, 272, device=device)
    a, scale_a = tk.fp8_quantize(x, "1x128")
    b, scale_b = tk.fp8_quantize(w, "128x128")
    return a, b.t(), scale_a, scale_b.t(), torch.randn(24, device=device)


# The schema check multiplies its inputs, which PyTorch cannot with fp8.
OPCHECKS = ("test_autograd_registration", "test_faketensor")


def call(a, b, scale_a, scale_b, bias):
    return tk.fp8_gemm(a, b, scale_a, scale_b, bias=bias, activation="silu")


def test_opcheck(device):
    a, b, scale_a, scale_b, bias = sample(device)
    op = torch.ops.thunderkittens.fp8_gemm.default
    for arguments in ((a, b, scale_a, scale_b, bias, 4), (a, b, scale_a, scale_b)):
        result = torch.library.opcheck(op, arguments, test_utils=OPCHECKS)
        assert set(result.values()) == {"SUCCESS"}
    offs = torch.tensor([7, 40], dtype=torch.int32, device=device)
    stack = torch.stack([b.t().view(torch.uint8)] * 2).view(b.dtype).mT
    arguments = (a, stack, scale_a, torch.stack([scale_b] * 2))
    torch.library.opcheck(op, arguments, {"offs": offs}, test_utils=OPCHECKS)


@pytest.mark.parametrize("k", [511, 639])
def test_odd_k_at_the_end_of_a_stage(device, k):
    """The byte behind the last element completes a stage of the ring: it does not count."""
    a, b = (torch.ones(n, k, device=device).to(E4M3) for n in (20, 24))
    one = torch.ones((), device=device)
    out = tk.fp8_gemm(a, b.t(), one, one, out_dtype=FP32)
    assert torch.equal(out, torch.full_like(out, k))


def test_reruns_are_bit_equal(device):
    """Also where blocks divide k, in whatever order they arrive, that of the emulator's policies
    and seeds included."""
    tensors = sample(device)
    first = call(*tensors)
    assert all(torch.equal(call(*tensors), first) for _ in range(3))
    emulated = type(device) is not str
    shapes = [(1, 2112, 7168), (17, 7168, 2048), (61, 2056, 16383), (130, 1000, 8192)]
    for m, n, k in shapes if device == "cuda" else [(17, 200, 2200)]:
        x, w = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
        for of_x, of_w in (("row", "row"), ("1x128", "128x128")):
            (a, scale_a), (b, scale_b) = tk.fp8_quantize(x, of_x), tk.fp8_quantize(w, of_w)
            runs = []
            for policy in emulation.POLICIES if emulated else range(4):
                config = {"splits": 3, "blocks": 6}
                with tk.emulate(policy, config=config) if emulated else nullcontext() as run:
                    out_dtype = FP32 if m <= 64 else BF16
                    runs.append(tk.fp8_gemm(a, b.t(), scale_a, scale_b.t(), out_dtype=out_dtype))
                assert not emulated or run.kernels[0]["splits"] == 3
            assert all(torch.equal(y, runs[0]) for y in runs)


def test_compile_and_export(device):
    torch._dynamo.reset()
    tensors = sample(device)
    expected = call(*tensors)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors), expected)

    class Module(torch.nn.Module):
        def forward(self, *tensors):
            return call(*tensors)

    program = torch.export.export(Module(), tensors)
    assert torch.equal(program.module()(*tensors), expected)


def test_vmap(device):
    a, b, scale_a, scale_b, bias = sample(device)
    biases = torch.stack([bias, 2 * bias])
    mapped = torch.func.vmap(call, in_dims=(None, None, None, None, 0))
    actual = mapped(a, b, scale_a, scale_b, biases)
    assert torch.equal(actual[1], call(a, b, scale_a, scale_b, 2 * bias))


@pytest.mark.gpu
def test_cuda_graph_and_stream(device):
    tensors = sample(device)
    expected = call(*tensors)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(*tensors)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(*tensors)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, expected)


def test_layout_helper():
    """The view has the values and lies between NaN."""
    x = torch.randn(5, 7).to(E4M3)
    for layout in ("packed", "sliced", "unaligned", "packed_t", "sliced_t"):
        assert torch.equal(place(x, layout).float(), x.float())
    assert torch.equal(matrix(x.float(), "packed"), x.float())
