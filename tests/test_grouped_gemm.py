"""`tk.grouped_gemm`: the three forms, groups of all sizes, layouts, gradients, wrong calls."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import thunderkittens as tk
from helpers.cover import cover, over
from helpers.layouts import NAN, matrix
from helpers.numerics import accumulation_slack, assert_accurate, integers
from thunderkittens import _C, info

BF16, FP16 = torch.bfloat16, torch.float16
FORMS = ("rows", "columns", "parts")
GROUPS = [
    [5, 0, 130, 1],
    [0, 0],
    [300],
    [128, 128, 0],
    [0, 7, 0, 0, 140],
    [1] * 40,
    [63, 65, 64, 1, 0, 2],
]
LAYOUTS = ["packed", "packed_t", "sliced", "sliced_t", "unaligned", "odd_t"]


def offsets(sizes, device):
    return torch.tensor(sizes, device=device).cumsum(0).int()


def shapes(form, total, groups, m, n, k):
    """Of a and b; `total` stands for the dimension that is divided."""
    return {
        "rows": ((total, k), (groups, k, n)),
        "columns": ((groups, m, k), (k, total)),
        "parts": ((m, total), (total, n)),
    }[form]


def cases(device, intensity):
    return cover(
        {
            "form": list(FORMS),
            "sizes": GROUPS,
            "behind": [0, 9],
            "shape": [(40, 136, 72), (130, 7, 200), (7, 264, 16), (1, 1, 1), (64, 129, 64)],
            "layout_a": LAYOUTS,
            "layout_b": LAYOUTS,
            "dtype": [BF16, FP16],
        },
        intensity,
    )


def spoil(form, a, b, begin):
    """NaN in what belongs to no group."""
    if form == "rows":
        a[begin:] = NAN
    elif form == "columns":
        b[:, begin:] = NAN
    else:
        a[:, begin:] = NAN
        b[begin:] = NAN


@over(cases)
def test_integers_are_exact(device, case):
    """Bit by bit, with NaN around the operands and in what belongs to no group."""
    sizes, form, behind = case["sizes"], case["form"], case["behind"]
    m, n, k = case["shape"]
    shape_a, shape_b = shapes(form, sum(sizes) + behind, len(sizes), m, n, k)
    a = integers(*shape_a, low=-2, high=2, dtype=case["dtype"], device=device)
    b = integers(*shape_b, low=-2, high=2, dtype=case["dtype"], device=device)
    offs = offsets(sizes, device)
    expected = tk.reference.grouped_gemm(a.double(), b.double(), offs).to(case["dtype"])
    spoil(form, a, b, sum(sizes))
    out = tk.grouped_gemm(matrix(a, case["layout_a"]), matrix(b, case["layout_b"]), offs)
    assert out.dtype == case["dtype"]
    assert out.is_contiguous()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("transposed", [False, True])
def test_one_element_before_an_edge(device, form, transposed):
    """Groups of one less than what is multiplied, and stored, at a time: 16 of k, or 16 rows."""
    sizes = [15, 64, 79]
    a_shape, b_shape = shapes(form, sum(sizes), len(sizes), 40, 48, 72)
    a = integers(*a_shape, low=-2, high=2, dtype=BF16, device=device)
    b = integers(*b_shape, low=-2, high=2, dtype=BF16, device=device)
    offs = offsets(sizes, device)
    layout = "packed_t" if transposed else "packed"
    out = tk.grouped_gemm(matrix(a, layout), matrix(b, layout), offs)
    assert torch.equal(out, tk.reference.grouped_gemm(a.double(), b.double(), offs).to(BF16))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_neighbour_of_nan(device, form, transposed):
    """Groups of NaN beside others, that begin and end in the middle of tiles and of 16 bytes."""
    sizes = [3, 70, 1, 5, 0, 66]
    a_shape, b_shape = shapes(form, sum(sizes), len(sizes), 40, 48, 72)
    a = integers(*a_shape, low=-2, high=2, dtype=BF16, device=device)
    b = integers(*b_shape, low=-2, high=2, dtype=BF16, device=device)
    offs = offsets(sizes, device)
    clean = tk.reference.grouped_gemm(a, b, offs)
    ends = [0, *offs.tolist()]
    for group in (1, 3):
        part = slice(ends[group], ends[group + 1])
        if form == "rows":
            a[part] = NAN
        else:
            b[(slice(None), part) if form == "columns" else part] = NAN
        if form == "parts":
            a[:, part] = 0
    layout = "packed_t" if transposed else "packed"
    out = tk.grouped_gemm(matrix(a, layout), matrix(b, layout), offs)
    for group in range(len(sizes)):
        part = slice(ends[group], ends[group + 1])
        if form == "rows":
            got, want = out[part], clean[part]
        elif form == "columns":
            got, want = out[:, part], clean[:, part]
        else:
            got, want = out[group], clean[group]
        assert torch.isnan(got).all() if group in (1, 3) else torch.equal(got, want)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_accuracy(device, form, dtype):
    sizes = [17, 100, 0, 83] if device == "cpu" else [1700, 1000, 0, 3001, 7]
    m, n, k = (40, 136, 272) if device == "cpu" else (515, 1003, 4096)
    a, b = (
        torch.randn(s, device=device).to(dtype)
        for s in shapes(form, sum(sizes), len(sizes), m, n, k)
    )
    offs = offsets(sizes, device)
    out = tk.grouped_gemm(a, b, offs)
    ends = [0, *offs.tolist()]
    for group in range(len(sizes)):
        part = slice(ends[group], ends[group + 1])
        if form == "rows":
            x, y, got = a[part], b[group], out[part]
        elif form == "columns":
            x, y, got = a[group], b[:, part], out[:, part]
        else:
            x, y, got = a[:, part], b[part], out[group]
        if x.shape[1] == 0:
            assert not got.any()
            continue
        slack = accumulation_slack(x, y)
        assert_accurate(got, x.double() @ y.double(), x @ y, slack=slack)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "offs",
    [
        [-3, 5, 5, 100],
        [20, 10, 30, 25],
        [50, 60, 70, 80],
        [-1, -2, -3, -4],
        [2**31 - 1, -(2**31), 0, 40],
    ],
)
def test_offsets_out_of_range(device, form, offs):
    """They are moved to where they make sense, as documented."""
    a_shape, b_shape = shapes(form, 40, 4, 24, 32, 16)
    a = integers(*a_shape, low=-2, high=2, dtype=BF16, device=device)
    b = integers(*b_shape, low=-2, high=2, dtype=BF16, device=device)
    ends, last = [], 0
    for x in offs:
        last = min(max(x, last), 40)
        ends.append(last)
    given, moved = (torch.tensor(x, dtype=torch.int32, device=device) for x in (offs, ends))
    out = tk.grouped_gemm(a, b, given)
    assert torch.equal(out, tk.reference.grouped_gemm(a, b, moved))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("sizes", "m", "n", "k"),
    [([], 5, 7, 8), ([0, 0], 5, 7, 8), ([3, 2], 0, 7, 8), ([3, 2], 5, 0, 8), ([3, 2], 5, 7, 0)],
)
def test_nothing(device, form, sizes, m, n, k):
    a_shape, b_shape = shapes(form, sum(sizes), len(sizes), m, n, k)
    a, b = (torch.randn(s, device=device).to(BF16) for s in (a_shape, b_shape))
    offs = offsets(sizes, device)
    out = tk.grouped_gemm(a, b, offs)
    expected = tk.reference.grouped_gemm(a, b, offs)
    assert out.shape == expected.shape
    torch.testing.assert_close(out, expected)


def test_many_groups(device):
    """More than a warp looks at at a time."""
    generator = torch.Generator().manual_seed(0)
    sizes = (torch.randint(0, 4, (100,), generator=generator) * 3).tolist()
    a = integers(sum(sizes) + 5, 24, low=-2, high=2, dtype=BF16, device=device)
    b = integers(100, 24, 16, low=-2, high=2, dtype=BF16, device=device)
    offs = offsets(sizes, device)
    assert torch.equal(tk.grouped_gemm(a, b, offs), tk.reference.grouped_gemm(a, b, offs))


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(129, 2112, 1031), (7, 28672, 264), (2112, 8, 28672)])
def test_sizes_of_models(device, form, shape):
    sizes = [1, 0, 1009, 128]
    a, b = (
        integers(*s, low=-2, high=2, dtype=BF16, device=device)
        for s in shapes(form, sum(sizes) + 3, len(sizes), *shape)
    )
    offs = offsets(sizes, device)
    expected = tk.reference.grouped_gemm(a.float(), b.float(), offs).to(BF16)
    spoil(form, a, b, sum(sizes))
    assert torch.equal(tk.grouped_gemm(a, matrix(b, "packed_t"), offs), expected)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize(
    ("form", "m", "n", "k", "total"),
    [
        ("rows", None, 8, 2056, (1 << 20) + 3),
        ("rows", None, 32776, 16, (1 << 16) + 1),
        ("columns", 8, None, 2056, (1 << 20) + 3),
        ("parts", 16384, 65544, None, 35),
    ],
)
def test_more_than_2_31_elements(device, form, m, n, k, total):
    """Of a, b or the result, two groups; the ends of the last."""
    first = total // 3
    a, b = (
        integers(*s, low=-2, high=2, dtype=BF16, device=device)
        for s in shapes(form, total, 2, m, n, k)
    )
    offs = torch.tensor([first, total], dtype=torch.int32, device=device)
    out = tk.grouped_gemm(a, b, offs)
    assert max(x.numel() for x in (a, b, out)) > 2**31
    ends = slice(-200, None)
    x, y, got = {
        "rows": lambda: (a[ends], b[1][:, ends], out[ends, ends]),
        "columns": lambda: (a[1][ends], b[:, ends], out[ends, ends]),
        "parts": lambda: (a[ends, first:], b[first:, ends], out[1][ends, ends]),
    }[form]()
    assert torch.equal(got, (x.double() @ y.double()).to(BF16))


def test_expanded_and_strided_operands(device):
    a = integers(50, 24, low=-2, high=2, dtype=BF16, device=device)
    b = integers(24, 16, low=-2, high=2, dtype=BF16, device=device).expand(3, 24, 16)
    offs = torch.tensor([10, 99, 35, 99, 50, 99], dtype=torch.int32, device=device)[::2]
    assert torch.equal(tk.grouped_gemm(a, b, offs), tk.reference.grouped_gemm(a, b, offs))


KERNELS = [(128, 256, 4, 2), (128, 128, 6, 2), (64, 128, 8, 1)]


@pytest.mark.emulator
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: f"{k[0]}x{k[1]}")
@pytest.mark.parametrize("policy", ["late_mma", "random"])
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
def test_every_kernel(form, kernel, policy, transposed):
    """On the emulator, few blocks: each has several tiles, and raster groups of one row of them."""
    sizes = [5, 0, 133, 1, 260]
    shape_a, shape_b = shapes(form, sum(sizes) + 3, len(sizes), 137, 264, 72)
    a = integers(*shape_a, low=-2, high=2, dtype=BF16, device="cpu")
    b = integers(*shape_b, low=-2, high=2, dtype=BF16, device="cpu")
    offs = offsets(sizes, "cpu")
    expected = tk.reference.grouped_gemm(a, b, offs)
    spoil(form, a, b, sum(sizes))
    a, b = (
        matrix(x, "sliced_t" if t else "packed") for x, t in zip((a, b), transposed, strict=True)
    )
    config = dict(zip(("block_m", "block_n", "stages", "consumers"), kernel, strict=True))
    with tk.emulate(policy, seed=1, config={**config, "blocks": 2, "raster_group": 1}) as run:
        out = tk.grouped_gemm(a, b, offs)
    assert torch.equal(out, expected)
    assert run.kernels[-1]["kernel"].endswith(f"{kernel[0]}x{kernel[1]}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
def test_long_and_short_sums(form, transposed):
    """On the emulator: subtiles of a tile are stored during a next one of many steps, few, or none
    that is whole, whose last step ends anywhere in 16 of k."""
    sizes = [500, 64, 1, 13, 16, 24, 0, 100, 451, 33]
    shape_a, shape_b = shapes(form, sum(sizes) + 6, len(sizes), 136, 264, 460)
    a = integers(*shape_a, low=-1, high=1, dtype=BF16, device="cpu")
    b = integers(*shape_b, low=-1, high=1, dtype=BF16, device="cpu")
    offs = offsets(sizes, "cpu")
    expected = tk.reference.grouped_gemm(a, b, offs)
    spoil(form, a, b, sum(sizes))
    a, b = (
        matrix(x, "sliced_t" if t else "packed") for x, t in zip((a, b), transposed, strict=True)
    )
    config = {"block_m": 128, "block_n": 256, "stages": 4, "consumers": 2, "blocks": 3}
    with tk.emulate("random", seed=2, config=config):
        out = tk.grouped_gemm(a, b, offs)
    assert torch.equal(out, expected)


# Sizes of groups, columns, blocks: rows of tiles with and without one more tile, a group with both,
# more groups than a warp has lanes, columns that end in the middle of a tile and of 16 bytes.
WIDTHS = [
    ([5, 0, 300, 1, 260], 496, 3),
    ([5, 0, 300, 1, 260], 1000, 7),
    ([700], 760, 5),
    ([0, 2, 129] * 13 + [0, 0], 529, 7),
]


def assert_in_two_widths(a, b, offs, expected, blocks, policy, seed):
    choice = {"block_m": 128, "block_n": 256, "stages": 4, "consumers": 2, "blocks": blocks}
    for layout_a, layout_b in (("packed", "packed_t"), ("sliced_t", "sliced")):
        config = {**choice, "raster_group": 2, "two_widths": True}
        with tk.emulate(policy, seed=seed, config=config) as run:
            out = tk.grouped_gemm(matrix(a, layout_a), matrix(b, layout_b), offs)
        assert torch.equal(out, expected), (layout_a, layout_b)
        assert run.kernels[-1]["two_widths"]


@pytest.mark.emulator
@pytest.mark.parametrize(("policy", "dtype"), [("late_mma", BF16), ("random", FP16)])
@pytest.mark.parametrize("number", range(len(WIDTHS)))
def test_tiles_of_two_widths(number, policy, dtype):
    """On the emulator, whose few blocks count the rows of tiles as 132 would."""
    sizes, n, blocks = WIDTHS[number]
    a = integers(sum(sizes) + 3, 72, low=-2, high=2, dtype=dtype, device="cpu")
    b = integers(len(sizes), 72, n, low=-2, high=2, dtype=dtype, device="cpu")
    offs = offsets(sizes, "cpu")
    expected = tk.reference.grouped_gemm(a, b, offs)
    spoil("rows", a, b, sum(sizes))
    assert_in_two_widths(a, b, offs, expected, blocks, policy, seed=n)


# Sizes of groups, rows, blocks: groups that get one more column of tiles or several, that have one
# that is not full, that are too narrow for it, that begin and end in the middle of 16 bytes.
COLUMN_WIDTHS = [
    ([480, 256, 512, 0, 240], 260, 5),
    ([1000, 5, 731], 130, 3),
    ([1500], 129, 7),
    ([16, 240, 17, 255, 0, 496] * 5, 9, 11),
]


@pytest.mark.emulator
@pytest.mark.parametrize(("policy", "dtype"), [("late_mma", BF16), ("random", FP16)])
@pytest.mark.parametrize("number", range(len(COLUMN_WIDTHS)))
def test_columns_of_two_widths(number, policy, dtype):
    sizes, m, blocks = COLUMN_WIDTHS[number]
    a = integers(len(sizes), m, 72, low=-2, high=2, dtype=dtype, device="cpu")
    b = integers(72, sum(sizes) + 3, low=-2, high=2, dtype=dtype, device="cpu")
    offs = offsets(sizes, "cpu")
    expected = tk.reference.grouped_gemm(a, b, offs)
    spoil("columns", a, b, sum(sizes))
    assert_in_two_widths(a, b, offs, expected, blocks, policy, seed=m)


@pytest.mark.emulator
@pytest.mark.parametrize(("policy", "dtype"), [("late_mma", BF16), ("random", FP16)])
@pytest.mark.parametrize("layout_b", ["packed", "sliced_t"])
@pytest.mark.parametrize("layout_a", ["sliced", "packed_t"])
def test_parts_of_two_widths(layout_a, layout_b, policy, dtype):
    """Rows of tiles with and without one more tile; sums of whole steps, of parts, of nothing."""
    sizes = [130, 0, 9, 64, 77]
    a = integers(260, sum(sizes) + 3, low=-2, high=2, dtype=dtype, device="cpu")
    b = integers(sum(sizes) + 3, 760, low=-2, high=2, dtype=dtype, device="cpu")
    offs = offsets(sizes, "cpu")
    expected = tk.reference.grouped_gemm(a, b, offs)
    spoil("parts", a, b, sum(sizes))
    config = {
        "block_m": 128,
        "block_n": 256,
        "stages": 4,
        "consumers": 2,
        "blocks": 11,
        "raster_group": 2,
    }
    with tk.emulate(policy, seed=3, config={**config, "two_widths": True}) as run:
        out = tk.grouped_gemm(matrix(a, layout_a), matrix(b, layout_b), offs)
    assert torch.equal(out, expected)
    assert run.kernels[-1]["two_widths"]


def test_which_tiles_have_two_widths():
    device = _C.DeviceProperties(**info.EXAMPLE_GPU)
    problem = {"m": 32768, "n": 4096, "k": 7168, "groups": 8, "grouped": 0, "dtype": "bf16"}

    def two_widths(**other):
        layout = {"a_m_major": False, "b_n_major": False}
        return _C.choose("grouped_gemm", problem | layout | other, device)["two_widths"]

    assert two_widths()
    assert two_widths(b_n_major=True, groups=64)
    assert not two_widths(groups=65)
    assert two_widths(a_m_major=True)
    assert two_widths(grouped=1, m=4096, n=131072, groups=31)
    assert not two_widths(grouped=1, m=4096, n=131072, groups=32)
    assert not two_widths(grouped=1, m=4096, n=131072, groups=31, b_n_major=True)
    weights = {"grouped": 2, "m": 4096, "n": 7168, "a_m_major": True, "b_n_major": True}
    assert two_widths(**weights, k=32768)
    assert two_widths(**weights, k=2048 * 8)
    assert not two_widths(**weights, k=2048 * 8 - 1)
    assert not two_widths(m=300, groups=64)
    assert not two_widths(m=2048, n=2048, groups=4)


# Gradients


@pytest.mark.parametrize("form", FORMS)
def test_gradients(device, form):
    """Against float64 autograd of the reference; twice."""
    sizes = [5, 0, 17, 1]
    tensors = [
        torch.randn(s, device=device).to(BF16)
        for s in shapes(form, sum(sizes) + 4, len(sizes), 24, 40, 32)
    ]
    offs = offsets(sizes, device)

    def gradients(function, dtype):
        a, b = (x.to(dtype).requires_grad_() for x in tensors)
        out = function(a, b, offs)
        weight = torch.cos(torch.arange(out.numel(), device=device)).view(out.shape).to(dtype)
        first = torch.autograd.grad(out, (a, b), weight, create_graph=True)
        return [*first, *torch.autograd.grad(first[0].float().square().sum(), (b,))]

    actual = gradients(tk.grouped_gemm, BF16)
    expected = gradients(tk.reference.grouped_gemm, torch.float64)
    plain = gradients(tk.reference.grouped_gemm, BF16)
    for x, y, z in zip(actual[:2], expected[:2], plain[:2], strict=True):
        assert_accurate(*(t.detach() for t in (x, y, z)), slack=2.0**-20 * float(y.abs().max()))
    torch.testing.assert_close(actual[2].double(), expected[2], rtol=2**-5, atol=2.0**-3)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_lie_as_the_operands_do(device, form):
    """Column by column too; and the values are those of operands that lie row by row."""
    sizes = [5, 0, 17, 1]
    a, b = (
        torch.randint(-2, 3, s, device=device).to(BF16)
        for s in shapes(form, sum(sizes) + 4, len(sizes), 24, 40, 32)
    )
    offs = offsets(sizes, device)

    def gradients(a, b):
        a, b = a.requires_grad_(), b.requires_grad_()
        out = tk.grouped_gemm(a, b, offs)
        weight = (torch.arange(out.numel(), device=device) % 5 - 2).view(out.shape).to(BF16)
        return torch.autograd.grad(out, (a, b), weight)

    rows = gradients(a.clone(), b.clone())
    columns = gradients(a.mT.contiguous().mT, b.mT.contiguous().mT)
    for x, y, operand in zip(rows, columns, (a, b), strict=True):
        assert torch.equal(x, y)
        assert x.stride() == operand.stride()
        assert y.mT.is_contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_against_grouped_mm(device, form):
    """The same semantics as PyTorch's, where that takes the call."""
    sizes = [64, 0, 160, 16]
    shape_a, shape_b = shapes(form, sum(sizes), len(sizes), 128, 256, 192)
    a = integers(*shape_a, low=-2, high=2, dtype=BF16, device=device)
    b = integers(*shape_b, low=-2, high=2, dtype=BF16, device=device)
    offs = offsets(sizes, device)
    assert torch.equal(tk.grouped_gemm(a, b, offs), functional.grouped_mm(a, b, offs=offs))


@pytest.mark.gpu
def test_offsets_are_read_on_the_device(device):
    """A captured call follows offsets that are written later."""
    a = integers(300, 64, low=-2, high=2, dtype=BF16, device=device)
    b = integers(4, 64, 128, low=-2, high=2, dtype=BF16, device=device)
    offs = offsets([300, 0, 0, 0], device)
    tk.grouped_gemm(a, b, offs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tk.grouped_gemm(a, b, offs)
    for sizes in ([100, 0, 100, 100], [0, 0, 0, 0], [1, 298, 0, 0]):
        offs.copy_(offsets(sizes, device))
        graph.replay()
        assert torch.equal(out, tk.reference.grouped_gemm(a, b, offs))


# Wrong calls

A, B = torch.zeros(6, 16, dtype=BF16), torch.zeros(2, 16, 8, dtype=BF16)
OFFS = torch.tensor([3, 6], dtype=torch.int32)
WRONG = {
    "a": (TypeError, "a must be a torch.Tensor, got list", ([1], B, OFFS)),
    "b": (TypeError, "b must be a torch.Tensor, got int", (A, 3, OFFS)),
    "offs": (TypeError, "offs must be a torch.Tensor, got list", (A, B, [3, 6])),
    "offs none": (TypeError, "offs must be a torch.Tensor, got NoneType", (A, B, None)),
    "a float": (TypeError, "a is torch.float32", (A.float(), B.float(), OFFS)),
    "a int": (TypeError, "a is torch.int32", (A.int(), B.int(), OFFS)),
    "b half": (TypeError, "b is torch.float16, a is torch.bfloat16", (A, B.half(), OFFS)),
    "offs long": (TypeError, "offs is torch.int64", (A, B, OFFS.long())),
    "offs float": (TypeError, "offs is torch.float32", (A, B, OFFS.float())),
    "sparse": (TypeError, "dense tensor", (A.to_sparse(), B, OFFS)),
    "b device": (TypeError, "b is on meta", (A, B.to("meta"), OFFS)),
    "offs device": (TypeError, "offs is on meta", (A, B, OFFS.to("meta"))),
    "a vector": (ValueError, "a has shape (16,)", (A[0], B, OFFS)),
    "b vector": (ValueError, "b has shape (16,)", (A, A[0], OFFS)),
    "both 3d": (ValueError, "they must be (M, K) and (E, K, N)", (A[None], B[:1], OFFS[:1])),
    "4d": (ValueError, "they must be (M, K) and (E, K, N)", (A, B[None], OFFS)),
    "inner": (ValueError, "must equal the second to last of b (8)", (A, B.mT, OFFS)),
    "inner 2d": (ValueError, "must equal the second to last of b (6)", (A, A, OFFS)),
    "offs scalar": (ValueError, "offs has shape (); it must be (E,)", (A, B, OFFS[0])),
    "offs 2d": (ValueError, "offs has shape (1, 2)", (A, B, OFFS[None])),
    "few": (ValueError, "it must be (2,), the end of the group of each matrix of b",
            (A, B, OFFS[:1])),
    "few of a": (ValueError, "it must be (2,), the end of the group of each matrix of a",
                 (B.mT, A.mT, OFFS[:1])),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(device, name):
    error, words, operands = WRONG[name]
    put = [
        x.to(device) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x
        for x in operands
    ]
    with pytest.raises(error) as caught:
        tk.grouped_gemm(*put)
    assert words in str(caught.value)


def test_forward_mode_is_refused(device):
    a, b, offs = A.to(device), B.to(device), OFFS.to(device)
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(RuntimeError, match="forward-mode"),
    ):
        tk.grouped_gemm(torch.autograd.forward_ad.make_dual(a, a), b, offs)
