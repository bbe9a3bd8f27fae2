"""`tk.rotary`: values against the formula in float64, positions, packed sequences, layouts, in
place, gradients, wrong calls."""

from __future__ import annotations

import itertools

import pytest
import torch

import thunderkittens as tk
from helpers.attention import emulated
from helpers.cover import cover, over
from helpers.guard import assert_guards_intact
from helpers.layouts import embed, spread, unaligned
from helpers.norms import BF16, DTYPES, FP32, normal, wide
from helpers.numerics import assert_accurate

ROWS = 23


def tables(half, dtype, device, rows=ROWS):
    angle = 8 * torch.randn(rows, half, device=device)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def assert_rotary(x, cos, sin, **options):
    out = tk.rotary(x, cos, sin, **options)
    named = {name: wide(value) for name, value in options.items()}
    expected = tk.reference.rotary(x.double(), cos.double(), sin.double(), **named)
    plain = tk.reference.rotary(x, cos, sin, **options)
    assert out.dtype == x.dtype
    adjacent = x if x.stride(-1) == 1 else x.contiguous()
    assert out.stride() == torch.empty_like(adjacent).stride()
    assert_accurate(out, expected, plain, slack=2e-7)
    return out


def options_of(kind, batch, length, device):
    integers = torch.int64 if "64" in kind else torch.int32
    if kind.startswith("positions"):
        shape = (batch, length) if "each" in kind else (length,)
        return {"positions": torch.randint(0, ROWS, shape, device=device, dtype=integers)}
    if kind.startswith("offsets"):
        return {"offsets": torch.arange(batch, device=device, dtype=integers) * 3}
    if kind == "both":
        positions = torch.arange(length, device=device).flip(0)
        return {"positions": positions, "offsets": torch.ones(batch, device=device).int()}
    return {}


def cases(device, intensity):
    return cover(
        {
            "dtype": DTYPES,
            "table": ("same", "fp32"),
            "dims": ((64, 64), (128, 128), (128, 32), (96, 16), (7, 6), (40, 20), (24, 8), (1, 0)),
            "interleaved": (False, True),
            "inverse": (False, True),
            "heads": (None, 0, 1, 5),
            "where": (
                *("rows", "positions", "positions64", "positions of each", "offsets"),
                *("offsets64", "both"),
            ),
            "layout": ("bhtd", "bthd", "unaligned"),
        },
        max(intensity, 1) + (emulated(device) is False),
    )


def placed(x, layout):
    if layout == "bthd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return unaligned(x) if layout == "unaligned" else x


@over(cases)
def test_values(device, case):
    dim, rotated = case["dims"]
    x = placed(normal((2, 6, 9, dim), case["dtype"], device), case["layout"])
    cos, sin = tables(rotated // 2, FP32 if case["table"] == "fp32" else case["dtype"], device)
    options = options_of(case["where"], 2, 9, device)
    options |= {name: case[name] for name in ("interleaved", "inverse", "heads")}
    out = assert_rotary(x, cos, sin, **options)
    again = x.clone(memory_format=torch.preserve_format)
    assert tk.rotary(again, cos, sin, in_place=True, **options) is again
    assert torch.equal(again, out)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_right_angles(device, dtype, interleaved):
    """Rotations by quarters of a circle are exact."""
    quarters = torch.arange(8, device=device)[:, None].expand(8, 16)
    cos = torch.tensor([1, 0, -1, 0], device=device, dtype=dtype)[quarters % 4]
    sin = torch.tensor([0, 1, 0, -1], device=device, dtype=dtype)[quarters % 4]
    x = torch.randint(-99, 99, (1, 3, 8, 40), device=device).to(dtype)
    out = tk.rotary(x, cos, sin, interleaved=interleaved)
    assert torch.equal(out, tk.reference.rotary(x, cos, sin, interleaved=interleaved))
    assert torch.equal(out[:, :, 0], x[:, :, 0])
    assert torch.equal(out[..., 32:], x[..., 32:])
    first, second = (0, 1) if interleaved else (0, 16)
    assert torch.equal(out[:, :, 1, second], x[:, :, 1, first])
    assert torch.equal(out[:, :, 1, first], -x[:, :, 1, second])


@pytest.mark.parametrize("interleaved", [False, True])
def test_there_and_back(device, interleaved):
    x = normal((2, 3, 9, 64), FP32, device)
    cos, sin = tables(16, FP32, device)
    out = tk.rotary(x, cos, sin, interleaved=interleaved)
    back = tk.rotary(out, cos, sin, interleaved=interleaved, inverse=True)
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "edges", [[0, 4, 4, 11], [0, 0, 9], [0], [0, 1, 2, 3, 4, 5, 6, 11], [2, 7]]
)
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("positions", [False, True])
def test_packed_sequences(device, edges, offsets, positions):
    """Each sequence begins at position 0; what belongs to none stays as it is."""
    x = normal((11, 5, 64), BF16, device)
    cos, sin = tables(32, FP32, device)
    options = {"cu_seqlens": torch.tensor(edges, dtype=torch.int32, device=device)}
    if edges[0] > 0:
        # Nothing precedes the first sequence.
        options["cu_seqlens"] -= edges[0]
    if offsets:
        options["offsets"] = torch.arange(len(edges) - 1, device=device) * 2
    if positions:
        options["positions"] = torch.arange(11, device=device).flip(0)
    out = assert_rotary(x, cos, sin, **options)
    end = int(options["cu_seqlens"][-1])
    assert torch.equal(out[end:], x[end:])
    if not positions and not offsets:
        for begin, stop in itertools.pairwise(edges):
            part = slice(begin - edges[0], stop - edges[0])
            assert torch.equal(out[part], tk.rotary(x[part], cos, sin))


def test_rows_of_tokens(device):
    """Tables as transformers make them, of which one half is given."""
    x = normal((2, 3, 9, 64), BF16, device)
    cos, sin = (t.view(2, 9, 64) for t in tables(64, BF16, device, rows=18))
    assert_rotary(x, cos[..., :32], sin[..., :32])
    assert_rotary(x, cos[..., ::2], sin[..., 1::2])


def test_positions_outside_of_the_table(device):
    """They give NaN, in their pairs alone."""
    x = normal((1, 2, 4, 24), BF16, device)
    cos, sin = tables(8, FP32, device)
    positions = torch.tensor([-1, 0, ROWS - 1, ROWS], device=device)
    out = tk.rotary(x, cos, sin, positions=positions)
    assert bool(out[:, :, [0, 3], :16].isnan().all())
    assert bool(out[:, :, [1, 2]].isfinite().all())
    assert torch.equal(out[..., 16:], x[..., 16:])
    empty = cos[:0], sin[:0]
    assert bool(tk.rotary(x, *empty)[..., :16].isnan().all())


def test_queries_and_keys_of_one_tensor(device):
    """One call rotates both and leaves the values."""
    qkv = normal((2, 9, 4 + 2 + 2, 64), BF16, device)
    cos, sin = tables(32, FP32, device)
    q, k, v = qkv.split([4, 2, 2], 2)
    expected = [tk.rotary(x.transpose(1, 2), cos, sin) for x in (q, k)]
    values = v.clone()
    heads = qkv.transpose(1, 2)
    out = tk.rotary(heads, cos, sin, heads=6)
    assert torch.equal(out, torch.cat([*expected, values.transpose(1, 2)], 1))
    tk.rotary(heads, cos, sin, heads=6, in_place=True)
    assert torch.equal(heads, out)
    assert torch.equal(v, values)


LAYOUTS = {
    "embedded": embed,
    "tokens first": lambda x: embed(x, order=(2, 0, 1, 3)),
    "spread": spread,
    "unaligned": unaligned,
    "expanded": lambda x: x[:, :1].expand(x.shape),
    "columns": lambda x: x.mT.contiguous().mT,
}


@pytest.mark.parametrize("dim", [64, 37])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, layout, dim):
    """Operands of other strides; what is between their elements is NaN."""
    x = normal((2, 3, 5, dim), BF16, device)
    cos, sin = tables(dim // 2, FP32, device)
    assert_rotary(LAYOUTS[layout](x), cos, sin)
    assert_rotary(x, embed(cos), sin)
    assert_rotary(x, cos.mT.contiguous().mT, sin)
    if layout in ("embedded", "tokens first", "unaligned"):
        there = LAYOUTS[layout](x)
        tk.rotary(there, cos, sin, in_place=True)
        assert torch.equal(there, tk.rotary(x, cos, sin))
        whole = there if there._base is None else there._base
        assert bool(whole.isnan().any())


@pytest.mark.parametrize(
    "shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 3, 0, 8), (2, 3, 4, 0), (0, 2, 8)]
)
def test_nothing_to_rotate(device, shape):
    x = torch.zeros(shape, device=device)
    cos, sin = tables(min(4, shape[-1] // 2), FP32, device)
    assert tk.rotary(x, cos, sin).shape == shape
    assert tk.rotary(x, cos, sin, in_place=True) is x


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_gradients(device, dtype, interleaved):
    """The rotation back, which has a gradient itself."""
    x = normal((2, 5, 9, 40), dtype, device).requires_grad_()
    cos, sin = tables(12, FP32, device)
    options = {"interleaved": interleaved, "heads": 3, "offsets": torch.tensor([1, 2]).to(device)}
    out = tk.rotary(x, cos, sin, **options)
    grad = normal(x.shape, dtype, device).requires_grad_()
    (dx,) = torch.autograd.grad(out, x, grad, create_graph=True)
    assert torch.equal(dx, tk.rotary(grad, cos, sin, inverse=True, **options))
    other = normal(x.shape, dtype, device)
    (twice,) = torch.autograd.grad(dx, grad, other)
    assert torch.equal(twice, tk.rotary(other, cos, sin, **options))


@pytest.mark.parametrize("shape", [(2, 4, 9, 64), (9, 4, 64)])
def test_in_place_on_the_graph(device, shape):
    """What has no gradient may be rotated in place where gradients are recorded."""
    x = normal(shape, BF16, device)
    cos, sin = tables(32, FP32, device)
    expected = tk.rotary(x, cos, sin)
    compiled = torch.compile(
        lambda y: tk.rotary(y * 1.0, cos, sin, in_place=True) * 2.0, fullgraph=True,
        backend="aot_eager",
    )  # fmt: skip
    if not emulated(device):
        assert torch.equal(compiled(x), expected * 2.0)
    tk.rotary(x, cos, sin, in_place=True)
    assert torch.equal(x, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [128, 127])
def test_guards(device, dim):
    x = torch.randn(2, 8, 1024, dim, device=device).bfloat16()
    cos, sin = tables(dim // 2, FP32, device, rows=1024)
    assert_guards_intact(lambda: tk.rotary(x, cos, sin))


@pytest.mark.gpu
@pytest.mark.large
def test_offsets_beyond_32_bits(device):
    x = torch.ones(1, 17, 1 << 20, 128, dtype=BF16, device=device)
    cos, sin = tables(64, FP32, device, rows=1 << 20)
    out = tk.rotary(x, cos, sin)
    assert torch.equal(out[:, -1:, -1:], tk.rotary(x[:, -1:, -1:], cos[-1:], sin[-1:]))


X, C = torch.ones(2, 3, 4, 8), torch.ones(9, 4)
PACKED, EDGES = torch.ones(5, 3, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
WRONG = [
    (([1.0], C, C), {}, TypeError, "x must be a torch.Tensor, got list"),
    ((X.double(), C, C), {}, TypeError, "x is torch.float64"),
    ((X.to_sparse(), C, C), {}, TypeError, "x must be a dense tensor"),
    ((X[0, 0], C, C), {}, ValueError, r"x has shape \(4, 8\)"),
    ((X, C.half(), C.half()), {}, TypeError, "cos is torch.float16"),
    ((X, None, C), {}, TypeError, "cos must be a torch.Tensor, got NoneType"),
    ((X, C, C.bfloat16()), {}, TypeError, "sin is torch.bfloat16"),
    ((X, C, C[:5]), {}, ValueError, r"sin has shape \(5, 4\), cos has \(9, 4\)"),
    ((X, C[0], C[0]), {}, ValueError, r"cos has shape \(4,\)"),
    ((X, torch.ones(9, 5), torch.ones(9, 5)), {}, ValueError, "cos has 5 columns"),
    ((X, torch.ones(2, 5, 4), torch.ones(2, 5, 4)), {}, ValueError, r"cos has shape \(2, 5, 4\)"),
    ((PACKED, torch.ones(1, 5, 4), torch.ones(1, 5, 4)), {}, ValueError, "cos has shape"),
    ((X, C.to("meta"), C.to("meta")), {}, TypeError, "cos is on meta"),
    ((X, C, C), {"heads": 4}, ValueError, "heads is 4; x has 3"),
    ((X, C, C), {"heads": -1}, ValueError, "heads is -1"),
    ((X, C, C), {"heads": 1.5}, TypeError, "heads must be an int, got float"),
    ((X, C, C), {"positions": torch.zeros(5).int()}, ValueError, r"positions has shape \(5,\)"),
    ((X, C, C), {"positions": torch.zeros(4)}, TypeError, "positions is torch.float32"),
    ((X, C, C), {"positions": 3}, TypeError, "positions must be a torch.Tensor, got int"),
    ((X, C, C), {"offsets": torch.zeros(3).int()}, ValueError, r"offsets has shape \(3,\)"),
    ((X, C, C), {"offsets": torch.zeros(2, 1).int()}, ValueError, r"offsets has shape \(2, 1\)"),
    ((X, C, C), {"cu_seqlens": EDGES}, ValueError, "cu_seqlens is for packed sequences"),
    ((PACKED, C, C), {"cu_seqlens": EDGES.long()}, TypeError, "cu_seqlens is torch.int64"),
    ((PACKED, C, C), {"cu_seqlens": EDGES[:0]}, ValueError, r"cu_seqlens has shape \(0,\)"),
    (
        (PACKED, C, C),
        {"cu_seqlens": EDGES, "offsets": torch.zeros(1).int()},
        *(ValueError, r"offsets has shape \(1,\); it must be \(2,\)"),
    ),
    (
        (X, torch.ones(2, 4, 4), torch.ones(2, 4, 4)),
        {"offsets": torch.zeros(2).int()},
        *(ValueError, "offsets cannot be given with cos of 3 dimensions"),
    ),
    ((X, C.clone().requires_grad_(), C), {}, ValueError, "cos requires a gradient"),
    ((X.clone().requires_grad_(), C, C), {"in_place": True}, ValueError, "requires a gradient"),
    ((X.mT.contiguous().mT, C, C), {"in_place": True}, ValueError, "to be adjacent"),
    ((X[:, :1].expand(2, 3, 4, 8), C, C), {"in_place": True}, ValueError, "memory of its own"),
]


@pytest.mark.parametrize(("args", "options", "error", "words"), WRONG)
def test_wrong_calls(device, args, options, error, words):
    def on(value):
        if not isinstance(value, torch.Tensor) or value.is_meta:
            return value
        if value.layout is torch.strided and 0 in value.stride():  # a copy would have no 0
            return value[:, :1].to(device).expand(value.shape)
        return value.to(device)

    options = {name: on(x) for name, x in options.items()}
    with pytest.raises(error, match=f"tk.rotary: .*{words}"):
        tk.rotary(*map(on, args), **options)
