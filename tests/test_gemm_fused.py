"""`tk.gemm` with an epilogue: values, layouts, gradients, wrong calls."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import thunderkittens as tk
from helpers.cover import cover, over
from helpers.layouts import matrix
from helpers.numerics import accumulation_slack, assert_accurate, integers

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ACTIVATIONS = [None, "relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu"]
GATED = ("swiglu", "geglu")

SHAPES = [  # M, N, K
    (1, 2, 1),
    (7, 130, 72),
    (130, 136, 40),
    (16, 264, 200),
    (33, 72, 520),
    (70, 520, 64),
    (129, 38, 300),
    (0, 6, 8),
    (5, 0, 8),
    (5, 6, 0),
]
SHAPES_CUDA = [
    (1000, 1004, 777),
    (2048, 2048, 256),
    (64, 7168, 2048),
    (8, 24576, 512),
    (16, 2112, 7168),
    (1, 4098, 4096),
    (4097, 1040, 520),
]


def cases(device, intensity):
    return cover(
        {
            "shape": SHAPES + SHAPES_CUDA * (device == "cuda"),
            "activation": ACTIVATIONS,
            "gate_layout": ["blocked", "interleaved"],
            "layout_a": ["packed", "packed_t", "sliced", "unaligned"],
            "layout_b": ["packed", "packed_t", "sliced"],
            "dtype": [BF16, FP16],
            "out": [None, FP32],
            "bias": [True, False],
            "residual": [None, "packed", "sliced", "unaligned", "packed_t"],
            "factors": [(1.0, 1.0), (0.5, 2.0), (-1.0, 0.25)],
        },
        intensity,
    )


def operands(case, device, fill):
    m, n, k = case["shape"]
    columns = n // 2 if case["activation"] in GATED else n
    dtype, out = case["dtype"], case["out"] or case["dtype"]
    return {
        "a": fill((m, k), dtype, device),
        "b": fill((k, n), dtype, device),
        "bias": fill((n,), dtype, device) if case["bias"] else None,
        "residual": fill((m, columns), out, device) if case["residual"] else None,
    }


def normal(shape, dtype, device):
    return (torch.randn(shape, device=device) / 2).to(dtype)


def small_integers(shape, dtype, device):
    return integers(*shape, low=-2, high=2, dtype=dtype, device=device)


def options_of(case):
    alpha, beta = case["factors"]
    return {
        "activation": case["activation"],
        "gate_layout": case["gate_layout"],
        "alpha": alpha,
        "beta": beta,
        "out_dtype": case["out"],
    }


def placed(x, case):
    residual = x["residual"]
    if residual is not None:
        residual = matrix(residual, case["residual"])
    return (
        (matrix(x["a"], case["layout_a"]), matrix(x["b"], case["layout_b"])),
        {"bias": x["bias"], "residual": residual},
    )


def doubles(x):
    return {key: None if value is None else value.double() for key, value in x.items()}


def plain_fused(x, case):
    """The formula in plain PyTorch, one operation after the other, each rounded."""
    options = options_of(case)
    out = options.pop("out_dtype") or case["dtype"]
    z = options["alpha"] * (x["a"].float() @ x["b"].float())
    z = (z if x["bias"] is None else z + x["bias"].float()).to(out)
    result = tk.reference.gemm(
        z,
        torch.eye(z.shape[-1], dtype=out, device=z.device),
        **{k: options[k] for k in ("activation", "gate_layout")},
    )
    if x["residual"] is not None:
        result = (result.float() + options["beta"] * x["residual"].float()).to(out)
    return result


@over(cases)
def test_accuracy(device, case):
    x = operands(case, device, normal)
    positional, named = placed(x, case)
    out = tk.gemm(*positional, **named, **options_of(case))
    assert out.dtype == (case["out"] or case["dtype"])
    assert out.is_contiguous()
    expected = tk.reference.gemm(**doubles(x), **{**options_of(case), "out_dtype": torch.float64})
    slack = accumulation_slack(x["a"], x["b"]).amax() if expected.numel() else 0.0
    size = expected.abs().amax() if expected.numel() else 0.0
    # The approximations of exp and erf in float32.
    slack = 8 * slack * (1 + size) + 4e-6 * (1 + size)
    assert_accurate(out, expected, plain_fused(x, case), slack=slack)


def long_cases(device, intensity):
    return cover(
        {
            "shape": [(2500, 4360, 4096), (4097, 2056, 4200)]
            if device == "cuda"
            else [(300, 520, 264)],
            "activation": [None, "relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu"],
            "gate_layout": ["blocked", "interleaved"],
            "layout_a": ["packed", "packed_t"],
            "layout_b": ["packed", "packed_t"],
            "dtype": [BF16, FP16],
            "bias": [True, False],
            "residual": [None, "packed", "sliced", "unaligned"],
            "keep": [True, False],
            "factors": [(1.0, 1.0), (0.5, 2.0)],
        },
        intensity,
    )


@over(long_cases)
def test_finished_beside_the_main_loop(device, case):
    """With a long K other warps than those that multiply finish a tile
    (dense/epilogue_warps_sm90.cuh)."""
    case = {**case, "out": None}
    x = operands(case, device, normal)
    x["b"] = (x["b"] / case["shape"][2] ** 0.5).to(case["dtype"])
    positional, named = placed(x, case)
    positional[0].requires_grad_(case["keep"])
    run = partial(tk.gemm, *positional, **named, **options_of(case))
    if type(device) is str:
        out = run().detach()
    else:
        tile = {"block_m": 128, "block_n": 256, "stages": 4, "consumers": 2, "swap_ab": False}
        tile |= {"block_k": 64, "fused": True, "store_interval": 1}
        with tk.emulate(seed=1, config=tile, sm_count=2):
            out = run().detach()
    # What follows would keep every step of the reference's sum for a gradient of a.
    positional[0].requires_grad_(False)
    if device == "cuda":
        assert torch.equal(out, run())
    expected = tk.reference.gemm(**doubles(x), **{**options_of(case), "out_dtype": torch.float64})
    slack = 8 * accumulation_slack(x["a"], x["b"]).amax() + 4e-6 * (1 + expected.abs().amax())
    assert_accurate(out, expected, plain_fused(x, case), slack=slack)


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_2_31_elements(device):
    """Of the result, the residual and what is kept for the gradient."""
    m, n, k = (1 << 16) + 1, 32776, 16
    a = small_integers((m, k), BF16, device)
    b = matrix(small_integers((k, n), BF16, device), "packed_t")
    residual = torch.ones(m, n, dtype=BF16, device=device)
    a.requires_grad_()
    out = tk.gemm(a, b, activation="relu", residual=residual, beta=2.0)
    assert out.numel() > 2**31
    ends = slice(-200, None)
    z = a[ends].detach().float() @ b[:, ends].float()
    assert torch.equal(out[ends, ends], (z.relu() + 2).to(BF16))
    grad = torch.zeros_like(out)
    grad[ends, ends] = 1
    out.backward(grad)
    assert torch.equal(a.grad[ends], ((z > 0).float() @ b[:, ends].float().t()).to(BF16))
    assert not a.grad[:-200].any()


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("columns", [8, 256])
def test_curves(device, activation, dtype, columns):
    """With one product in a sum z is exact: what the formula of the activation costs."""
    special = [0.0, -0.0, 1e-3, -1e-3, 300.0, -300.0, 3e4, -3e4, float("nan")]
    if type(device) is not str or device != "cpu":  # PyTorch's own gelu makes NaN of it in float32
        special.append(float("inf"))
    z = torch.cat([torch.linspace(-12, 12, 241), torch.tensor(special)]).to(dtype)
    b = torch.ones(1, columns, dtype=dtype)
    out = tk.gemm(z[:, None].to(device), b.to(device), activation=activation).cpu().double()
    expected = tk.reference.gemm(
        z[:, None].double(), b.double(), activation=activation, out_dtype=torch.float64
    )
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isinf(), expected.isinf())
    finite = expected.isfinite()
    size = z.double()[:, None].abs().expand_as(expected)[finite]
    formula = 0.0 if activation == "relu" else 2**-10.5 if dtype is BF16 else 1e-6
    bound = torch.finfo(dtype).eps / 2 * expected[finite].abs() + formula * size + 1e-7
    assert bool(((out - expected)[finite].abs() <= bound).all())


@over(cases)
def test_integers_are_exact(device, case):
    """Without a curved activation small integers stay exact in float32."""
    if case["activation"] not in (None, "relu"):
        case = {**case, "activation": "relu"}
    case = {**case, "out": FP32}
    x = operands(case, device, small_integers)
    positional, named = placed(x, case)
    out = tk.gemm(*positional, **named, **options_of(case))
    expected = tk.reference.gemm(**doubles(x), **{**options_of(case), "out_dtype": torch.float64})
    assert torch.equal(out, expected.float())


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 32, 33, 64, 65])
@pytest.mark.parametrize("layout", ["packed", "packed_t"])
def test_few_rows(device, rows, layout):
    """Integers are exact however k is divided; reruns give the same bits."""
    for n, k in ((72, 1100), (200, 264), (1, 64)):
        a = small_integers((rows, k), BF16, device)
        b = matrix(small_integers((k, n), BF16, device), layout)
        bias = small_integers((n,), BF16, device)
        for out_dtype in (BF16, FP32):
            out = tk.gemm(a, b, bias=bias, alpha=0.5, out_dtype=out_dtype)
            expected = 0.5 * (a.double() @ b.double()) + bias.double()
            assert torch.equal(out, expected.to(out_dtype))
            again = tk.gemm(a, b, bias=bias, alpha=0.5, out_dtype=out_dtype)
            assert torch.equal(out, again)


@pytest.mark.parametrize("batches", [((3,), ()), ((3,), (3,)), ((2, 1), (3,)), ((), (3,))])
def test_batches(device, batches):
    a = normal((*batches[0], 5, 24), BF16, device)
    b = normal((*batches[1], 24, 16), BF16, device)
    shape = torch.matmul(a.float(), b.float()).shape
    residual = normal((*shape[:-1], 8), BF16, device)
    options = {"activation": "swiglu", "residual": residual, "beta": 0.5}
    out = tk.gemm(a, b, **options)
    expected = tk.reference.gemm(a, b, **options, out_dtype=FP32)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("layout", ["packed", "sliced", "padded"])
@pytest.mark.parametrize("rows", [5, 70])
def test_out(device, layout, rows):
    a, b = small_integers((rows, 40), BF16, device), small_integers((40, 24), BF16, device)
    wide = torch.full((rows, 50), 7.0, device=device, dtype=FP32)
    out = {"packed": wide[:, :24].clone(), "sliced": wide[:, 8:32], "padded": wide[:, 1:25]}[layout]
    assert tk.gemm(a, b, out=out) is out
    assert torch.equal(out, a.float() @ b.float())
    if layout != "packed":
        first = 8 if layout == "sliced" else 1
        assert bool((wide[:, :first] == 7).all())
        assert bool((wide[:, first + 24 :] == 7).all())
    # In place of the residual.
    assert tk.gemm(a, b, residual=out, out=out, activation="relu", beta=2.0) is out
    product = a.float() @ b.float()
    assert torch.equal(out, product.relu() + 2 * product)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_out_decides_the_dtype(device, dtype):
    """Without out_dtype, out does, and of the residual too; with one, they must agree."""
    a, b = normal((5, 40), BF16, device), normal((40, 24), BF16, device)
    out = torch.empty(5, 24, dtype=dtype, device=device)
    for options in ({}, {"out_dtype": dtype}):
        assert tk.gemm(a, b, **options, out=out) is out
        assert torch.equal(out, tk.gemm(a, b, out_dtype=dtype))
    residual = normal((5, 24), dtype, device)
    tk.gemm(a, b, residual=residual, out=out)
    assert torch.equal(out, tk.gemm(a, b, residual=residual, out_dtype=dtype))
    for other in {BF16, FP16, FP32} - {dtype}:
        with pytest.raises(TypeError, match=f"out is {dtype}, the result is {other}"):
            tk.gemm(a, b, out_dtype=other, out=out)
        with pytest.raises(TypeError, match=f"residual is {other}, the result is {dtype}"):
            tk.gemm(a, b, residual=residual.to(other), out=out)


def test_out_of_a_batch(device):
    """Matrices whose rows alternate in memory, and a shape that is copied to."""
    a, b = small_integers((2, 3, 5, 40), BF16, device), small_integers((40, 24), BF16, device)
    expected = a.float() @ b.float()
    for x, y in ((a[0], b), (a, b), (a[0], b.expand(3, 40, 24))):
        wide = torch.full((*x.shape[-2:-1], *x.shape[:-2], 40), 7.0, device=device, dtype=FP32)
        out = wide[..., 8:32].movedim(0, -2)
        assert tk.gemm(x, y, out=out) is out
        assert torch.equal(out, expected if x is a else expected[0])
        assert bool((wide[..., :8] == 7).all())
        assert bool((wide[..., 32:] == 7).all())


def test_out_compiled(device):
    torch._dynamo.reset()
    a, b = small_integers((5, 40), BF16, device), small_integers((40, 24), BF16, device)
    op, options = torch.ops.thunderkittens.gemm_forward.out, (None, FP32, None, 1, 0, 1.0, 1.0)
    out = torch.empty(5, 24, device=device)
    result = torch.library.opcheck(op, (a, b, *options), {"out": out})
    assert set(result.values()) == {"SUCCESS"}

    def step(a, b, out):
        tk.gemm(a, b, out=out)
        return tk.gemm(a, b, residual=out, beta=2.0, out=out)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, b, out), 3 * (a.float() @ b.float()))
    assert torch.equal(out, 3 * (a.float() @ b.float()))


def test_out_under_autocast(device):
    """The residual takes the dtype of the result: float32 sums stay float32."""
    a, b = (torch.randint(-2, 3, s, device=device).float() for s in ((5, 40), (40, 24)))
    total = torch.full((5, 24), 2.0**-20, device=device)
    start = total.clone()
    with torch.autocast(device, BF16):
        assert tk.gemm(a, b, residual=total, out=total) is total
        wide = tk.gemm(a, b, residual=start, out_dtype=FP32)
        assert tk.gemm(a, b, residual=start).dtype == BF16
        assert tk.gemm(a, b, residual=start, out_dtype=FP16).dtype == FP16
    assert torch.equal(total, a @ b + start)
    assert torch.equal(wide, total)


def test_out_refuses_shared_memory(device):
    a = torch.zeros(24, 24, dtype=BF16, device=device)
    storage = torch.zeros(25 * 24, dtype=BF16, device=device)
    other, shifted = storage[: 24 * 24].view(24, 24), storage[24:].view(24, 24)
    for out in (storage[:24].expand(24, 24), storage.as_strided((24, 24), (20, 1))):
        with pytest.raises(ValueError, match="each element must have a place of its own"):
            tk.gemm(a, a, out=out)
    wrong = [((a, other), {}, a, "a"), ((other, a), {}, a, "b"), ((other, a), {}, shifted, "a")]
    wrong += [((other, other), {"bias": a[0]}, a, "bias")]
    wrong += [((a, a), {"residual": x}, other, "residual") for x in (other.t(), shifted)]
    for operands, options, out, name in wrong:
        with pytest.raises(ValueError, match=f"out overlaps {name}; it may be the residual"):
            tk.gemm(*operands, **options, out=out)
    # Columns of one matrix are apart.
    both, b = (torch.ones(s, dtype=BF16, device=device) for s in ((4, 16), (8, 8)))
    tk.gemm(both[:, :8], b, residual=both[:, 8:], out=both[:, 8:])
    assert bool((both[:, :8] == 1).all())
    assert bool((both[:, 8:] == 9).all())
    # The strides of dimensions of one element do not matter.
    one = torch.ones(1, 8, 8, dtype=BF16, device=device)
    residual = one.as_strided((1, 8, 8), (3, 8, 1))
    tk.gemm(one.clone(), one.clone(), residual=residual, out=one)
    assert bool((one == 9).all())


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_out_ends_anywhere(device, dtype):
    """Rows of a slice begin at multiples of 16 bytes and end anywhere: what is behind them stays as
    it is, whichever kernel runs."""
    for rows, columns, k in ((5, 21, 40), (1, 3, 8), (70, 70, 40), (140, 273, 328), (200, 521, 72)):
        a, b = small_integers((rows, k), BF16, device), small_integers((k, columns), BF16, device)
        product = a.float() @ b.float()
        wide = torch.full((rows, columns // 16 * 16 + 32), 7.0, device=device, dtype=dtype)
        for options, expected in (({}, product), ({"activation": "relu"}, product.relu())):
            expected = torch.nn.functional.pad(
                expected.to(dtype), (8, wide.shape[1] - columns - 8), value=7.0
            )
            tk.gemm(a, b, out=wide[:, 8 : 8 + columns], **options)
            assert torch.equal(wide, expected), (rows, columns, options)
        tk.gemm(a, b.t().contiguous().t(), out=wide[:, 8 : 8 + columns])
        assert torch.equal(wide[:, 8 : 8 + columns], product.to(dtype))
        assert bool((wide[:, 8 + columns :] == 7).all())


def test_out_refuses_gradients(device):
    a = torch.zeros(4, 8, dtype=BF16, device=device, requires_grad=True)
    out = torch.zeros(4, 4, dtype=BF16, device=device)
    b = torch.zeros(8, 4, dtype=BF16, device=device)
    with pytest.raises(RuntimeError, match="out is given and a gradient is wanted"):
        tk.gemm(a, b, out=out)
    with torch.no_grad():
        assert tk.gemm(a, b, out=out) is out


def gradient_cases(device, intensity):
    return cover(
        {
            "shape": [(33, 40, 72), (70, 264, 40), (0, 6, 8), (5, 6, 0)]
            + [(1000, 776, 520)] * (device == "cuda"),
            "activation": ACTIVATIONS,
            "gate_layout": ["blocked", "interleaved"],
            "layout_a": ["packed", "packed_t"],
            "layout_b": ["packed", "packed_t"],
            "dtype": [BF16, FP16],
            "out": [None, FP32],
            "bias": [True, False],
            "residual": [None, "packed"],
            "factors": [(1.0, 1.0), (0.5, 2.0)],
        },
        intensity,
    )


@over(gradient_cases)
def test_gradients(device, case):
    x = operands(case, device, normal)
    positional, named = placed(x, case)
    leaves = {"a": positional[0], "b": positional[1], **named}
    leaves = {k: v.detach().requires_grad_() for k, v in leaves.items() if v is not None}
    out = tk.gemm(**leaves, **options_of(case))
    grad = normal(out.shape, out.dtype, device)
    out.backward(grad)

    def autograd(kind):
        xs = {k: x[k].to(kind).requires_grad_() for k in leaves}
        y = tk.reference.gemm(**xs, **{**options_of(case), "out_dtype": kind})
        return torch.autograd.grad(y, list(xs.values()), grad.to(kind))

    for leaf, e in zip(leaves.values(), autograd(torch.float64), strict=True):
        assert leaf.grad is not None
        assert leaf.grad.dtype == leaf.dtype
        if e.numel():
            eps = torch.finfo(case["dtype"]).eps
            error = (leaf.grad.double() - e).abs().max()
            assert error <= 8 * eps * e.abs().max() + eps


@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
def test_bias_at_any_address(device, activation):
    """A bias that a bulk copy can bring, and one that it cannot, of whole and of other columns."""
    shapes = [(33, 72, 264)] + [(1100, 4096, 1088), (2048, 4080, 520)] * (device == "cuda")
    for m, n, k in shapes:
        a, b = normal((m, k), BF16, device), normal((n, k), BF16, device).mT
        bias = normal((n,), BF16, device)
        expected = tk.gemm(a, b, bias=bias, activation=activation)
        for offset in (1, 8):
            wide = torch.full((n + 16,), torch.nan, dtype=BF16, device=device)
            elsewhere = wide[offset : offset + n].copy_(bias)
            assert torch.equal(tk.gemm(a, b, bias=elsewhere, activation=activation), expected)


def test_double_backward(device):
    a = normal((9, 24), BF16, device).requires_grad_()
    b = normal((24, 16), BF16, device).requires_grad_()

    def second_order(function, kind):
        xs = [x.detach().to(kind).requires_grad_() for x in (a, b)]
        y = function(*xs).double()
        first = torch.autograd.grad((y**2).sum(), xs, create_graph=True)
        return torch.autograd.grad(sum((g.double() ** 2).sum() for g in first), xs)

    for activation in ("silu", "gelu_tanh", "swiglu"):
        actual = second_order(lambda p, q: tk.gemm(p, q, activation=activation), BF16)  # noqa: B023
        expected = second_order(
            lambda p, q: tk.reference.gemm(p, q, activation=activation),  # noqa: B023
            torch.float64,
        )
        for x, e in zip(actual, expected, strict=True):
            assert (x.double() - e).abs().max() <= 0.05 * e.abs().max()


def test_transforms(device):
    a, b = normal((3, 5, 24), BF16, device), normal((24, 16), BF16, device)
    mapped = torch.func.vmap(lambda x: tk.gemm(x, b, activation="geglu"))(a)
    expected = tk.reference.gemm(a, b, activation="geglu", out_dtype=FP32)
    torch.testing.assert_close(mapped.float(), expected, atol=2e-2, rtol=2e-2)
    grads = torch.func.grad(lambda x: tk.gemm(x, b, activation="silu").float().sum())(a)
    assert grads.shape == a.shape


A, B, C = (torch.zeros(s, dtype=BF16) for s in ((3, 4), (4, 6), (6,)))
R = torch.zeros(3, 6, dtype=BF16)
WRONG = {
    "activation": (ValueError, "activation is 'tanh'; it must be one of", {"activation": "tanh"}),
    "activation type": (TypeError, "activation must be a string, got int", {"activation": 1}),
    "gate_layout": (ValueError, "gate_layout is 'odd'; it must be", {"gate_layout": "odd"}),
    "gate_layout type": (TypeError, "gate_layout must be a string", {"gate_layout": None}),
    "alpha": (TypeError, "alpha must be a number, got str", {"alpha": "1"}),
    "alpha tensor": (TypeError, "alpha must be a number, got Tensor", {"alpha": torch.ones(())}),
    "beta alone": (TypeError, "beta must be a number, got str", {"beta": "1"}),
    "beta": (TypeError, "beta must be a number", {"beta": torch.ones(1), "activation": "relu"}),
    "residual": (TypeError, "residual must be a torch.Tensor, got float", {"residual": 1.0}),
    "residual shape": (ValueError, "residual has shape (3, 4); it must be", {"residual": A}),
    "residual dtype": (TypeError, "residual is torch.float16, the result", {"residual": R.half()}),
    "residual of a gate": (
        ValueError,
        "residual has shape (3, 6); it must be that of the result, (3, 3)",
        {"residual": R, "activation": "swiglu"},
    ),
    "residual wide": (
        TypeError,
        "residual is torch.bfloat16, the result is torch.float32",
        {"residual": R, "out_dtype": FP32},
    ),
    "out": (TypeError, "out must be a torch.Tensor, got list", {"out": []}),
    "out shape": (ValueError, "out has shape (3, 4)", {"out": A}),
    "out dtype": (TypeError, "out is torch.float64", {"out": R.double()}),
    "out and out_dtype": (TypeError, "out is torch.bfloat16", {"out": R, "out_dtype": FP32}),
    "out strides": (
        ValueError,
        "the elements of its last dimension",
        {"out": R.t().contiguous().t()},
    ),
    "bias": (ValueError, "bias has shape (3,)", {"bias": C[:3], "activation": "relu"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(device, name):
    error, words, options = WRONG[name]

    def place(x):
        return x.to(device) if isinstance(x, torch.Tensor) else x

    with pytest.raises(error) as caught:
        tk.gemm(place(A), place(B), **{key: place(x) for key, x in options.items()})
    assert words in str(caught.value)


def test_odd_columns_have_no_gate(device):
    a, b = torch.zeros(3, 4, dtype=BF16, device=device), torch.zeros(4, 5, dtype=BF16).to(device)
    with pytest.raises(ValueError, match="b has 5 columns; a gated activation needs an even"):
        tk.gemm(a, b, activation="geglu")
