"""`tk.gemm`: values, layouts, batches, gradients, wrong calls. What holds for every op (streams,
graphs, threads, compilation ...) is in test_library.py."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import thunderkittens as tk
from helpers.cover import cover, over
from helpers.guard import assert_guards_intact
from helpers.layouts import MATRIX_LAYOUTS, matrix
from helpers.numerics import accumulation_slack, assert_accurate, integers

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

SHAPES = [  # M, N, K
    (1, 1, 1),
    (7, 129, 1),
    (1, 7, 129),
    (127, 129, 65),
    (129, 127, 64),
    (64, 64, 64),
    (130, 131, 257),
    (128, 256, 64),
    (16, 8, 40),
    (3, 112, 89),
    (0, 5, 7),
    (5, 0, 7),
    (5, 7, 0),
]
SHAPES_CUDA = [
    (1000, 1003, 777),
    (2048, 2048, 2048),
    (257, 8, 4096),
    (8, 4096, 512),
    (1, 4099, 4096),
    (4099, 1, 333),
    (300, 300, 10007),
    (129, 28672, 200),
    (31, 28672, 1031),
    (1009, 112, 2112),
    (7, 2112, 28672),
    (4097, 1003, 777),
    (2500, 2504, 1600),  # tiles of widths that vary
    (300, 1000, 8192),  # split-K
    (500, 2112, 7168),
    (1000, 2112, 7168),  # stream-K
    (2040, 2112, 7168),
]


def cases(device, intensity):
    return cover(
        {
            "shape": SHAPES + SHAPES_CUDA * (device == "cuda"),
            "layout_a": MATRIX_LAYOUTS,
            "layout_b": MATRIX_LAYOUTS,
            "dtype": [BF16, FP16],
            "out": [None, BF16, FP16, FP32],
            "bias": [True, False],
        },
        intensity,
    )


def operands(shape, dtype, device, fill):
    m, n, k = shape
    return fill((m, k), dtype, device), fill((k, n), dtype, device), fill((n,), dtype, device)


def normal(shape, dtype, device):
    return torch.randn(shape, device=device).to(dtype)


def small_integers(shape, dtype, device):
    return integers(*shape, low=-4, high=4, dtype=dtype, device=device)


def plain_gemm(a, b, bias, out_dtype):
    """The formula in plain PyTorch at the op's precision."""
    if a.is_cuda and a.numel() and b.numel():
        product = torch.mm(a, b, out_dtype=FP32)
    else:
        product = a.float() @ b.float()
    return (product if bias is None else product + bias.float()).to(out_dtype or a.dtype)


@over(cases)
def test_accuracy(device, case):
    a, b, bias = operands(case["shape"], case["dtype"], device, normal)
    bias = bias if case["bias"] else None
    out = tk.gemm(
        matrix(a, case["layout_a"]), matrix(b, case["layout_b"]), bias=bias, out_dtype=case["out"]
    )
    assert out.dtype == (case["out"] or case["dtype"])
    assert out.is_contiguous()
    assert_accurate(
        out,
        tk.reference.gemm(a.double(), b.double(), bias=None if bias is None else bias.double()),
        plain_gemm(a, b, bias, case["out"]),
        slack=accumulation_slack(a, b),
    )


@over(cases)
def test_integers_are_exact(device, case):
    """Sums of small integers are exact in float32, so only the last rounding is left."""
    a, b, bias = operands(case["shape"], case["dtype"], device, small_integers)
    bias = bias if case["bias"] else None
    out = tk.gemm(
        matrix(a, case["layout_a"]), matrix(b, case["layout_b"]), bias=bias, out_dtype=case["out"]
    )
    expected = a.double() @ b.double() + (0 if bias is None else bias.double())
    assert torch.equal(out, expected.to(out.dtype))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("layout", MATRIX_LAYOUTS)
def test_one_hot_operands_select(device, layout, dtype):
    """Rows of a that select rows of b, and columns of b that select columns of a: bit by bit."""
    for m, n, k in ((129, 112, 131), (17, 264, 72)) + ((1009, 2112, 513),) * (device == "cuda"):
        rows, columns = (torch.randint(k, (size,), device=device) for size in (m, n))
        a, b = normal((m, k), dtype, device), normal((k, n), dtype, device)
        one = torch.eye(k, dtype=dtype, device=device)
        assert torch.equal(tk.gemm(matrix(one[rows], layout), matrix(b, layout)), b[rows])
        out = tk.gemm(matrix(a, layout), matrix(one[:, columns], layout))
        assert torch.equal(out, a[:, columns])


BATCHES = [  # of a, of b
    ((3,), ()),
    ((2, 3), ()),
    ((2, 3), (1,)),
    ((2, 3), (1, 1)),
    ((3,), (3,)),
    ((), (3,)),
    ((1,), (3,)),
    ((3,), (1,)),
    ((), (1,)),
    ((2, 1), (3,)),
    ((2, 3), (2, 3)),
    ((2, 3), (3,)),
    ((1, 3), (2, 1)),
    ((0,), ()),
    ((2, 0), (2, 1)),
    ((1,), (1,)),
]


def batch_cases(device, intensity):
    return cover(
        {
            "batches": BATCHES,
            "shape": [(5, 24, 16), (1, 7, 9), (130, 40, 72), (3, 0, 8), (4, 8, 0)],
            "layout_a": ["packed", "packed_t", "sliced", "unaligned", "outer"],
            "layout_b": ["packed", "packed_t", "sliced", "outer"],
            "bias": [True, False],
        },
        intensity,
    )


def batched(values, layout):
    """Layout "outer": the rows of all matrices of the batch alternate in memory."""
    if layout == "outer" and values.dim() > 2:
        return values.movedim(-2, 0).contiguous().movedim(0, -2)
    return matrix(values, "packed" if layout == "outer" else layout)


ROWS = {
    "contiguous": lambda x: x,
    "rows apart": lambda x: torch.cat([x, x], 2)[..., : x.shape[2]],
    "batches apart": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "rows outside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "columns": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "the same rows": lambda x: x[:1].expand_as(x),
    "not aligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x),
}


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("form", ROWS)
def test_rows_of_a_batch(device, form, rows):
    """They are those of one matrix where they lie evenly, and of several elsewhere."""
    x = ROWS[form](small_integers((3, rows, 72), BF16, device))
    weight = small_integers((40, 72), BF16, device)
    for activation in (None, "relu"):
        out = tk.gemm(x, weight.t(), activation=activation)
        expected = tk.reference.gemm(x.double(), weight.double().t(), activation=activation)
        assert torch.equal(out, expected.to(BF16))


@over(batch_cases)
def test_batches(device, case):
    (m, n, k), (batch_a, batch_b) = case["shape"], case["batches"]
    a = small_integers((*batch_a, m, k), BF16, device)
    b = small_integers((*batch_b, k, n), BF16, device)
    bias = small_integers((n,), BF16, device) if case["bias"] else None
    out = tk.gemm(batched(a, case["layout_a"]), batched(b, case["layout_b"]), bias=bias)
    expected = torch.matmul(a.double(), b.double()) + (0 if bias is None else bias.double())
    assert out.is_contiguous()
    assert torch.equal(out, expected.to(BF16))


@pytest.mark.parametrize("expanded", ["rows_a", "columns_a", "rows_b", "columns_b", "bias"])
def test_expanded_operands(device, expanded):
    a, b, bias = operands((33, 40, 72), BF16, device, small_integers)
    a = {"rows_a": a[:1].expand(33, -1), "columns_a": a[:, :1].expand(-1, 72)}.get(expanded, a)
    b = {"rows_b": b[:1].expand(72, -1), "columns_b": b[:, :1].expand(-1, 40)}.get(expanded, b)
    bias = bias[:1].expand(40) if expanded == "bias" else bias
    expected = a.double() @ b.double() + bias.double()
    assert torch.equal(tk.gemm(a, b, bias=bias), expected.to(BF16))


def test_strided_bias(device):
    a, b, bias = operands((9, 40, 16), FP16, device, small_integers)
    wide = torch.full((81,), float("nan"), dtype=FP16, device=device)[1:].view(40, 2)
    wide[:, 0] = bias
    expected = a.double() @ b.double() + bias.double()
    assert torch.equal(tk.gemm(a, b, bias=wide[:, 0]), expected.half())


def test_one_rounding(device):
    """The bias is added before the rounding: 256 + 1 is no bfloat16, 256 + 1 + 1 is."""
    a = torch.ones(1, 257, dtype=BF16, device=device)
    bias = torch.ones(1, dtype=BF16, device=device)
    assert tk.gemm(a, a.mT, bias=bias).item() == 258.0


def test_infinities_stay_where_they_belong(device):
    a, b, _ = operands((70, 40, 33), FP16, device, normal)
    a[3, 5], a[9, 1] = float("inf"), float("nan")
    out = tk.gemm(a, b)
    assert bool(torch.isnan(out[9]).all())
    assert bool(torch.isinf(out[3]).all())
    rest = [i for i in range(70) if i not in (3, 9)]
    assert bool(torch.isfinite(out[rest]).all())


def test_overflow_gives_infinity(device):
    a = torch.full((4, 64), 128.0, dtype=FP16, device=device)
    assert bool(torch.isposinf(tk.gemm(a, a.mT)).all())
    assert bool((tk.gemm(a, a.mT, out_dtype=FP32) == 64 * 128.0**2).all())
    assert bool((tk.gemm(a, a.mT, out_dtype=BF16) == 64 * 128.0**2).all())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1031, 1040, 200), (1024, 1536, 64), (1111, 777, 129)])
@pytest.mark.parametrize("out_dtype", [BF16, FP32])
def test_writes_nothing_outside(device, shape, out_dtype):
    a, b, bias = operands(shape, BF16, device, normal)
    assert_guards_intact(lambda: tk.gemm(a, b, bias=bias, out_dtype=out_dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("layout_a", ["packed", "packed_t", "sliced", "sliced_t"])
@pytest.mark.parametrize("layout_b", ["packed", "packed_t", "sliced", "sliced_t"])
def test_no_copy_where_strides_will_do(device, layout_a, layout_b):
    a, b, _ = operands((4096, 4096, 4096), BF16, device, normal)
    a, b = matrix(a, layout_a), matrix(b, layout_b)
    tk.gemm(a, b)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = tk.gemm(a, b)
    extra = torch.cuda.max_memory_allocated() - before - out.nbytes
    assert extra < a.nbytes // 2


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize(
    "shape", [((1 << 20) + 3, 8, 2056), (8, (1 << 20) + 8, 2056), ((1 << 16) + 1, 32776, 16)]
)
def test_more_than_2_31_elements(device, shape):
    m, n, k = shape
    a = small_integers((m, k), BF16, device)
    b = small_integers((n, k), BF16, device).mT
    out = tk.gemm(a, b)
    assert max(a.numel(), b.numel(), out.numel()) > 2**31
    rows, columns = slice(-200, None), slice(-200, None)
    expected = a[rows].double() @ b[:, columns].double()
    assert torch.equal(out[rows, columns], expected.to(BF16))
    assert torch.equal(out[:1, :1], (a[:1].double() @ b[:, :1].double()).to(BF16))


# Gradients


def gradient_cases(device, intensity):
    return cover(
        {
            "batches": [
                ((), ()),
                ((3,), ()),
                ((2, 3), ()),
                ((3,), (3,)),
                ((2, 1), (3,)),
                ((), (3,)),
            ],
            "shape": [(33, 40, 72), (7, 1, 5), (128, 64, 64), (0, 5, 7), (5, 7, 0)]
            + [(1000, 777, 520)] * (device == "cuda"),
            "layout_a": ["packed", "packed_t", "sliced", "unaligned"],
            "layout_b": ["packed", "packed_t", "sliced"],
            "dtype": [BF16, FP16],
            "out": [None, FP32],
            "needs": [n for n in itertools.product((True, False), repeat=3) if any(n)],
        },
        intensity,
    )


@over(gradient_cases)
def test_gradients(device, case):
    (m, n, k), (batch_a, batch_b), dtype = case["shape"], case["batches"], case["dtype"]
    values = [normal(s, dtype, device) for s in ((*batch_a, m, k), (*batch_b, k, n), (n,))]
    placed = [
        batched(values[0], case["layout_a"]),
        batched(values[1], case["layout_b"]),
        values[2],
    ]
    leaves = [
        x.detach().requires_grad_(need) for x, need in zip(placed, case["needs"], strict=True)
    ]
    out = tk.gemm(leaves[0], leaves[1], bias=leaves[2], out_dtype=case["out"])
    grad = normal(out.shape, out.dtype, device)
    out.backward(grad)

    def autograd(function, kind):
        xs = [x.to(kind).requires_grad_() for x in values]
        y = function(*xs)
        return torch.autograd.grad(y, xs, grad.to(y.dtype))

    expected = autograd(lambda a, b, c: torch.matmul(a, b) + c, torch.float64)
    plain = autograd(lambda a, b, c: torch.matmul(a, b) + c, dtype)
    for leaf, need, e, p in zip(leaves, case["needs"], expected, plain, strict=True):
        assert (leaf.grad is not None) == need
        if need:
            assert leaf.grad.dtype == dtype
            # The gradient of the output is rounded to the operands' dtype: one more rounding.
            slack = torch.finfo(dtype).eps * e.abs().max() if e.numel() else 0.0
            assert_accurate(leaf.grad, e, p, slack=slack)


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_gradients_lie_as_the_operands_do(device, batch, activation):
    """Autograd copies a gradient whose strides are not those of the tensor it is of."""
    a, w = normal((*batch, 24, 40), BF16, device), normal((*batch, 16, 40), BF16, device)
    a = a.mT.contiguous().mT.requires_grad_()
    w.requires_grad_()
    b = w.mT
    out = tk.gemm(a, b, activation=activation)
    grad = normal(out.shape, BF16, device)
    grads = torch.autograd.grad(out, (a, b, w), grad, retain_graph=True)
    assert [g.stride() for g in grads] == [a.stride(), b.stride(), w.stride()]
    out.backward(grad)
    assert a.grad.stride() == a.stride()
    assert w.grad.stride() == w.stride()


def test_weight_gradient_sums_in_float32(device):
    """256 + 1 + 1 ... over the batch: a sum of bfloat16 partial results would stay at 256."""
    a = torch.ones(257, 1, 8, dtype=BF16, device=device)
    a[0] = 256
    for x in (a, a.expand(257, 1, 8).transpose(1, 2).contiguous().transpose(1, 2)):
        w = torch.ones(8, 8, dtype=BF16, device=device, requires_grad=True)
        tk.gemm(x, w).sum().backward()
        assert bool((w.grad == 512).all())


def test_double_backward(device):
    leaves = [normal(s, FP16, device) for s in ((9, 24), (24, 16), (16,))]

    def second_order(function, kind):
        xs = [x.to(kind).requires_grad_() for x in leaves]
        y = function(*xs).to(FP32 if kind == FP16 else kind)
        first = torch.autograd.grad((y**3).sum() / 1000, xs, create_graph=True)
        return torch.autograd.grad(sum((g.to(y.dtype) ** 2).sum() for g in first) / 1000, xs)

    actual = second_order(lambda a, b, c: tk.gemm(a, b, bias=c), FP16)
    expected = second_order(lambda a, b, c: a @ b + c, torch.float64)
    plain = second_order(lambda a, b, c: a @ b + c, FP16)
    for x, e, p in zip(actual, expected, plain, strict=True):
        assert_accurate(x, e, p, slack=2 * torch.finfo(FP16).eps * e.abs().max())


def test_no_graph_when_no_gradient_is_wanted(device):
    a, b, _ = operands((4, 4, 4), BF16, device, normal)
    assert tk.gemm(a, b).grad_fn is None
    a.requires_grad_()
    assert tk.gemm(a, b).grad_fn is not None
    with torch.no_grad():
        assert not tk.gemm(a, b).requires_grad


# Wrong calls


def zeros(*shape, dtype=BF16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


A, B, C = zeros(3, 4), zeros(4, 5), zeros(5)

WRONG = {
    "a is a list": (TypeError, "tk.gemm: a must be a torch.Tensor, got list", [[1.0]], B, {}),
    "b is None": (TypeError, "tk.gemm: b must be a torch.Tensor, got NoneType", A, None, {}),
    "b is an array": (TypeError, "b must be a torch.Tensor, got ndarray", A, B.float().numpy(), {}),
    "bias is a number": (TypeError, "bias must be a torch.Tensor, got float", A, B, {"bias": 1.0}),
    "a is sparse": (TypeError, "a must be a dense tensor", A.float().to_sparse(), B, {}),
    "float32": (TypeError, "a is torch.float32; supported are torch.bfloat16", A.float(), B, {}),
    "float32 both": (TypeError, "a is torch.float32; supported", A.float(), B.float(), {}),
    "float64": (TypeError, "a is torch.float64; supported", A.double(), B.double(), {}),
    "integers": (TypeError, "a is torch.int64; supported", A.long(), B.long(), {}),
    "complex": (TypeError, "a is torch.complex64", A.to(torch.complex64), B, {}),
    "mixed": (
        TypeError,
        "b is torch.float16, a is torch.bfloat16; they must have",
        A,
        B.half(),
        {},
    ),
    "bias float32": (TypeError, "bias is torch.float32, a is", A, B, {"bias": C.float()}),
    "bias float16": (TypeError, "bias is torch.float16, a is", A, B, {"bias": C.half()}),
    "device of b": (TypeError, "b is on meta, a is on cpu; they must be on", A, B.to("meta"), {}),
    "device of bias": (TypeError, "bias is on meta, a is on cpu", A, B, {"bias": C.to("meta")}),
    "out_dtype float64": (
        TypeError,
        "out_dtype is torch.float64",
        A,
        B,
        {"out_dtype": torch.double},
    ),
    "out_dtype int8": (TypeError, "out_dtype is torch.int8", A, B, {"out_dtype": torch.int8}),
    "out_dtype str": (
        TypeError,
        "out_dtype is bfloat16; supported",
        A,
        B,
        {"out_dtype": "bfloat16"},
    ),
    "bias by position": (TypeError, "positional", A, B, None),
    "unknown option": (TypeError, "gamma", A, B, {"gamma": 2}),
    "a is a vector": (ValueError, "a has shape (4,); it must have at least 2", zeros(4), B, {}),
    "b is a vector": (ValueError, "b has shape (4,); it must have at least 2", A, zeros(4), {}),
    "a is a scalar": (ValueError, "a has shape (); it must have at least 2", zeros(), B, {}),
    "inner": (
        ValueError,
        "last dimension of a (3) must equal the second to last of b (4)",
        A.mT,
        B,
        {},
    ),
    "inner batched": (ValueError, "last dimension of a (4) must", A, zeros(2, 3, 5), {}),
    "batch": (ValueError, "(2,) of a and (3,) of b do not", zeros(2, 3, 4), zeros(3, 4, 5), {}),
    "batch 0": (ValueError, "(0,) of a and (3,) of b do not", zeros(0, 3, 4), zeros(3, 4, 5), {}),
    "batch 2": (ValueError, "do not broadcast", zeros(2, 3, 3, 4), zeros(2, 2, 4, 5), {}),
    "bias length": (ValueError, "bias has shape (4,); it must be (5,)", A, B, {"bias": zeros(4)}),
    "bias of one": (ValueError, "bias has shape (1,); it must be (5,)", A, B, {"bias": zeros(1)}),
    "bias matrix": (ValueError, "bias has shape (1, 5); it must be", A, B, {"bias": zeros(1, 5)}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(device, name):
    error, words, a, b, options = WRONG[name]

    def place(x):
        return x.to(device) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x

    words = words.replace("on cpu", f"on {torch.empty(0, device=device).device}")
    with pytest.raises(error) as caught:
        if options is None:
            tk.gemm(place(a), place(b), place(C))
        else:
            tk.gemm(place(a), place(b), **{key: place(x) for key, x in options.items()})
    assert words in str(caught.value)


def test_wrong_forms_of_the_op(device):
    for op in (torch.ops.thunderkittens.gemm_forward, torch.ops.thunderkittens.gemm):
        for a, b in (((3, 4), (2, 4, 5)), ((2, 3, 4), (1, 4, 5)), ((1, 2, 3, 4), (4, 5))):
            with pytest.raises((ValueError, RuntimeError), match="gemm"):
                op(zeros(*a, device=device), zeros(*b, device=device))


# Properties

LENGTHS = st.integers(0, 17)
DTYPES = st.sampled_from([BF16, BF16, BF16, FP16, FP32])


@st.composite
def any_call(draw):
    """Operands of random shapes, strides and dtypes, mostly ones that fit together."""
    m, n, k = draw(LENGTHS), draw(LENGTHS), draw(LENGTHS)
    batch = draw(st.lists(st.integers(0, 3), max_size=2))
    other = draw(st.sampled_from([batch, batch[1:], [], [1] * len(batch), [2]]))
    shape_a, shape_b, shape_bias = [*batch, m, k], [*other, k, n], [n]
    fault = draw(st.sampled_from([None] * 6 + ["a", "b", "bias"]))
    if fault is not None:
        target = {"a": shape_a, "b": shape_b, "bias": shape_bias}[fault]
        target[draw(st.integers(0, len(target) - 1))] += draw(st.integers(1, 2))
        if draw(st.booleans()):
            target.pop()
    dtype = draw(DTYPES)
    dtypes = [dtype, draw(st.sampled_from([dtype] * 8 + [FP16])), dtype]
    layouts = [draw(st.sampled_from(MATRIX_LAYOUTS)) for _ in range(2)]
    bias = draw(st.booleans())
    out_dtype = draw(st.sampled_from([None, BF16, FP16, FP32, None, torch.float64]))
    return (shape_a, shape_b, shape_bias if bias else None), dtypes, layouts, out_dtype


def build(call, device):
    (shape_a, shape_b, shape_bias), dtypes, layouts, out_dtype = call
    tensors = []
    for shape, dtype, layout in zip((shape_a, shape_b), dtypes, layouts, strict=False):
        x = torch.randn(shape, device=device).to(dtype)
        tensors.append(matrix(x, layout) if len(shape) >= 2 else x)
    bias = None if shape_bias is None else torch.randn(shape_bias, device=device).to(dtypes[2])
    return (*tensors, bias, out_dtype)


def outcome(function):
    """What a call does: shape, dtype and strides of the result, or the error."""
    try:
        out = function()
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    return out.shape, out.dtype, out.stride(), out.device


@given(call=any_call())
def test_fake_agrees(device, call):
    a, b, bias, out_dtype = build(call, device)
    real = outcome(lambda: tk.gemm(a, b, bias=bias, out_dtype=out_dtype))
    with FakeTensorMode() as mode:
        fakes = [None if x is None else mode.from_tensor(x) for x in (a, b, bias)]
        fake = outcome(lambda: tk.gemm(fakes[0], fakes[1], bias=fakes[2], out_dtype=out_dtype))
    assert real == fake
    if isinstance(real[0], torch.Size):
        assert real[0] == torch.matmul(a.double(), b.double()).shape


@pytest.mark.gpu
@given(call=any_call())
def test_op_guards_itself(device, call):
    """The C++ op refuses what the shape function refuses, and nothing else."""
    arguments = build(call, device)
    op = torch.ops.thunderkittens.gemm_forward
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        expected = outcome(lambda: op(*fakes))
    if isinstance(expected[0], torch.Size):
        assert outcome(lambda: op(*arguments)) == expected
    else:
        with pytest.raises(RuntimeError):
            op(*arguments)


@pytest.mark.parametrize("b_n_major", [False, True])
def test_the_same_bits_again(device, b_n_major):
    """On a GPU, where blocks divide k: who ends first is another one in each run."""
    m, n, k = (300, 1000, 16384) if device == "cuda" else (130, 72, 200)
    a, b, _ = operands((m, n, k), BF16, device, normal)
    if not b_n_major:
        b = b.t().contiguous().t()
    out = tk.gemm(a, b)
    for _ in range(20 if device == "cuda" else 1):
        assert torch.equal(tk.gemm(a, b), out)
