"""Caches of NVFP4: `tk.attention_paged` reads them, `tk.append_kv` writes them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import thunderkittens as tk
from helpers import block_scaled
from helpers.attention import emulated
from helpers.cover import cover, over
from helpers.paged import (
    LAYOUTS,
    NAN_SCALE,
    Case,
    lay_out,
    normal,
    nvfp4_elements,
    put_nvfp4,
    to_nvfp4,
)
from thunderkittens import emulation
from thunderkittens.emulation import POLICIES

BF16, FP16 = torch.bfloat16, torch.float16
FP4, E4M3 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
FLAGS = ("test_autograd_registration", "test_faketensor")  # torch.allclose has no fp8
DIMS = [(64, 64), (128, 128), (96, 32), (192, 128), (256, 256)]


def scale_of(kind, made, magnitude):
    if kind == "none":
        return None
    if kind == "one":
        return torch.tensor(magnitude, device=made.device)
    shape = (len(made.lengths), made.heads[1])
    return magnitude * (torch.rand(shape, device=made.device) + 0.2)


def cases(device, intensity):
    return cover(
        {
            # Up to 8 and 16 rows of a key head, and more, have kernels of their own.
            "kernel": list(itertools.product(DIMS, (BF16, FP16), (2, 4, 5))),
            "k_scale": ["none", "one", "heads"],
            "v_scale": ["none", "one", "heads"],
            "q_scale": ["none", "one", "heads"],
            "magnitude": [1.0, 1e-4, 100.0],
            "size": [1, 16, 64, 100],
            "layout": LAYOUTS,
            "split": [None, 128],
            "option": ["plain", "softcap", "window", "leftpad", "sink"],
        },
        intensity,
    )


@pytest.mark.all_twins
@over(cases)
def test_values(device, case):
    """Rows behind the last key of a sequence have scales that are NaN."""
    dims, dtype, queries = case["kernel"]
    made = Case(
        *([300, 0, 77, 128], [queries] * 4, (8, 2), dims),
        **{"size": case["size"], "dtype": dtype, "device": device},
    )
    to_nvfp4(made, case["layout"])
    softcap = 4.0 if case["option"] == "softcap" else 0.0
    made.options |= {"split_size": case["split"], "softcap": softcap}
    if case["option"] == "window":
        made.options["window_size"] = (70, -1)
    elif case["option"] == "leftpad":
        made.options["cache_leftpad"] = made.ints([100, 0, 77, 1])
    elif case["option"] == "sink":
        made.options["sink"] = torch.randn(8, device=device)
    options = {
        "k_scale": scale_of(case["k_scale"], made, 1.0),
        "v_scale": scale_of(case["v_scale"], made, case["magnitude"]),
        "q_scale": scale_of(case["q_scale"], made, 1.0),
    }
    largest = float(made.elements[1].nan_to_num(0).abs().max())
    if options["v_scale"] is not None:
        largest *= float(options["v_scale"].max())
    made.check_of_halves(*made.run(**options), largest, softcap, **options)


@pytest.mark.emulator
@pytest.mark.parametrize("sms", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [7, 16, 128])
def test_policies(policy, sms, size):
    """Rings that wrap, of blocks that producers take in turn; items that several parts share."""
    for dims, dtype, queries in (((128, 64), FP16, 2), ((64, 64), BF16, 4), ((256, 256), BF16, 1)):
        lengths = [1200, 3, 0, 130]
        made = Case(lengths, [queries] * 4, dims=dims, dtype=dtype, seed=sms, size=size)
        to_nvfp4(made, "NHD")
        largest = float(made.elements[1].nan_to_num(0).abs().max())
        with tk.emulate(policy, seed=sms, sm_count=sms):
            out, lse = made.run()
        made.check_of_halves(out, lse, largest)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_code_with_every_scale(device, dim):
    """Sequences of one key: its value is the result, and its elements are what queries of one
    element each find. Scales of zero, negative ones, the largest and the smallest among them."""
    heads, blocks = 8, dim // 16
    batch = 256 // (heads * blocks)
    made = Case([1] * batch, [dim] * batch, (heads, heads), (dim, dim), 2, FP16, device=device)
    made.options |= {"causal": False, "scale": 1.0}
    made.q = torch.eye(dim, dtype=FP16, device=device).view(1, dim, 1, dim)
    made.q = made.q.expand(batch, dim, heads, dim)
    codes = [torch.zeros(*made.k_cache.shape[:3], dim // 2, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.full((*x.shape[:3], blocks), NAN_SCALE, dtype=torch.uint8) for x in codes]
    page = made.table[:, 0].long().cpu()
    for x in codes:  # each block has all 16 codes, in some order
        order = torch.rand(batch, heads, blocks, 16).argsort(-1).to(torch.uint8)
        x[page, 0] = (order[..., ::2] | order[..., 1::2] << 4).flatten(-2)
    for x in scales:
        every = torch.randperm(256).to(torch.uint8)
        every[(every & 127) == NAN_SCALE] = 0
        x[page, 0] = every.view(batch, heads, blocks)
    put_nvfp4(made, codes, scales)
    k, v = (nvfp4_elements(c, s)[page, 0] for c, s in zip(codes, scales, strict=True))
    out, lse = made.run()
    assert torch.equal(out.double().cpu(), v.unsqueeze(1).expand(out.shape))
    torch.testing.assert_close(lse.double().cpu(), k, rtol=1e-6, atol=1e-6)


def test_a_scale_that_is_not_a_number(device):
    """It is seen where its block is, and nowhere else."""
    made = Case([70, 70], [1, 1], device=device)
    to_nvfp4(made, "HND")
    page, offset = int(made.table[0, 4]), 3  # key 67 of the first sequence
    scale = made.options["v_block_scale"].view(torch.uint8)
    scale[page, offset, 1, 2] = NAN_SCALE
    out, _ = made.run()
    wrong = torch.zeros(out.shape, dtype=torch.bool)
    wrong[0, 0, 2:, 32:48] = True  # the query heads of the second head of values
    assert torch.equal(out.isnan().cpu(), wrong)


def test_nothing_behind_the_last_row_is_read(device):
    """Scales of a head that end within a word, at the end of the memory."""
    made = Case([16], [1], (2, 1), (96, 32), device=device)
    to_nvfp4(made, "NHD")
    made.table.zero_()
    names = ("k_block_scale", "v_block_scale")
    rows = [made.options[name] for name in names]
    page = int(made.places[0, 0])
    made.elements = tuple(x[page : page + 1] for x in made.elements)
    made.k_cache, made.v_cache = (x[page : page + 1] for x in (made.k_cache, made.v_cache))
    made.options |= {name: x[page : page + 1] for name, x in zip(names, rows, strict=True)}
    largest = float(made.elements[1].abs().max())
    made.check_of_halves(*made.run(), largest)


def test_results_do_not_depend_on_the_batch(device):
    made = Case([400, 65, 3], [2] * 3, (8, 2), (128, 128), device=device)
    to_nvfp4(made, "joined")
    out, lse = made.run(split_size=128)
    scales = {name: x for name, x in made.options.items() if "block_scale" in name}
    for b in range(3):
        alone, alone_lse = tk.attention_paged(
            *(made.q[b : b + 1], made.k_cache, made.v_cache),
            *(made.table[b : b + 1], made.seq_lens[b : b + 1]),
            **{**scales, "split_size": 128, "return_lse": True},
        )
        assert torch.equal(alone[0], out[b])
        assert torch.equal(alone_lse[0], lse[b])


def test_bytes_and_schedules(device):
    """uint8 is taken as well; schedules are those of caches of codes."""
    made = Case([300, 65], [1, 1], dims=(192, 128), device=device)
    to_nvfp4(made, "NHD")
    out, lse = made.run()
    schedule = tk.attention_schedule(made.seq_lens, *made.heads, *made.dims, codes=True)
    made.k_cache, made.v_cache = (x.view(torch.uint8) for x in (made.k_cache, made.v_cache))
    again = made.run(schedule=schedule)
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], lse)


# ---- new keys ----


def empty(dims, device, layout="NHD", pages=4, size=8, heads=3):
    """Caches and their scales, full of some bytes."""
    parts = [
        tuple(torch.full((pages, size, heads, dim // n), 0x55, dtype=torch.uint8) for dim in dims)
        for n in (2, 16)
    ]
    codes = lay_out(tuple(x.to(device) for x in parts[0]), layout, 16)
    scales = lay_out(tuple(x.to(device) for x in parts[1]), layout, 4)
    caches = [x.view(FP4) for x in codes]
    return caches, dict(
        zip(("k_block_scale", "v_block_scale"), (x.view(E4M3) for x in scales), strict=True)
    )


def new_tokens(shape, dims, dtype, device):
    """Numbers of many magnitudes, zeros, infinity and NaN among them."""
    k, v = (normal((*shape, dim), dtype, device) for dim in dims)
    v = v * torch.exp(3 * torch.randn((*v.shape[:-1], 1), device=device)).to(dtype)
    k[0, 0, 0, :16] = 0
    k[0, 1, 0, 3] = torch.nan
    k[0, 1, 1, 5] = -torch.inf
    k[0, 2, 2] = 1e-7
    v[0, 0, 0] = torch.finfo(FP16).max
    return k, v


@pytest.mark.parametrize("scale", [None, 1 / 448, "heads", 0.0, 1e-44, 1e38], ids=str)
@pytest.mark.parametrize(
    ("dims", "dtype", "layout"),
    [((64, 64), BF16, "HND"), ((96, 128), FP16, "joined"), ((256, 32), BF16, "spread")],
    ids=lambda x: str(x).removeprefix("torch."),
)
def test_appended_bits(device, dims, dtype, layout, scale):
    """Those of an oracle in NumPy; nothing else of the caches changes."""
    k, v = new_tokens((2, 4, 3), dims, dtype, device)
    caches, scales = empty(dims, device, layout)
    given = torch.rand(2, 3) + 0.01 if scale == "heads" else scale
    if scale is not None:
        factor = torch.as_tensor(given, dtype=torch.float32).to(device)
        scales |= {"k_scale": factor, "v_scale": factor}
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32, device=device)
    lengths = torch.tensor([6, 0], dtype=torch.int32, device=device)
    assert tk.append_kv(k, v, *caches, page_table=table, seq_lens=lengths, **scales) is None
    places = [[(3, 6), (3, 7), (1, 0), (1, 1)], [(0, 0), (0, 1), (0, 2), (0, 3)]]
    results = zip((k, v), caches, (scales["k_block_scale"], scales["v_block_scale"]), strict=True)
    for x, cache, blocks in results:
        expected = [torch.full(y.shape, 0x55, dtype=torch.uint8) for y in (cache, blocks)]
        for b, head in itertools.product(range(2), range(3)):
            own = float(given[b, head]) if scale == "heads" else 1.0 if scale is None else scale
            elements, wanted, _ = block_scaled.nvfp4(x[b, :, head], own, False)
            rows = torch.from_numpy(np.ascontiguousarray(block_scaled.packed(elements)))
            for i, (page, offset) in enumerate(places[b]):
                expected[0][page, offset, head] = rows[i]
                expected[1][page, offset, head] = torch.from_numpy(wanted[i])
        assert torch.equal(cache.view(torch.uint8).cpu(), expected[0])
        assert torch.equal(blocks.view(torch.uint8).cpu(), expected[1])


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_slots_and_rotary(device, dtype):
    """Keys are rotated, then rounded."""
    k, v = (normal((9, 3, 64), dtype, device) for _ in range(2))
    slots = torch.tensor([5, -1, 31, 32, 8, 9, 0, 16, 17], device=device)
    angle = torch.rand(40, 32, device=device) * 6
    options = {"rotary_cos": angle.cos().to(dtype), "rotary_sin": angle.sin().to(dtype)}
    options["rotary_positions"] = torch.arange(9, dtype=torch.int32, device=device)
    options["k_scale"] = options["v_scale"] = torch.tensor(0.002, device=device)
    caches, scales = empty((64, 64), device)
    plain = torch.zeros(2, 4, 8, 3, 64, dtype=dtype, device=device)
    tk.append_kv(k, v, *caches, slot_mapping=slots, **options, **scales)
    del options["k_scale"], options["v_scale"]
    tk.append_kv(k, v, *plain, slot_mapping=slots, **options)
    kept = slots[(slots >= 0) & (slots < 32)]
    for x, cache, scale in zip(plain, caches, scales.values(), strict=True):
        rows = x.flatten(0, 1)[kept].flatten(0, 1)
        one = torch.tensor(0.002, device=device)
        codes, blocks, _ = tk.reference.nvfp4_quantize(rows, global_scale=one, swizzle=False)
        for to, made in ((cache, codes), (scale, blocks)):
            written = to.view(torch.uint8).flatten(0, 1)[kept].flatten(0, 1)
            assert torch.equal(written, made.view(torch.uint8))


def test_new_keys_in_the_call(device):
    """Written before the queries see them: as by two calls."""
    k, v = (normal((2, 2, 3, 64), BF16, device) for _ in range(2))
    q = normal((2, 2, 6, 64), BF16, device)
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32, device=device)
    lengths = torch.tensor([7, 0], dtype=torch.int32, device=device)
    scale = torch.tensor(1 / 448, device=device)
    results = []
    for together in (True, False):
        caches, scales = empty((64, 64), device)
        scales |= {"k_scale": scale, "v_scale": scale}
        if together:
            out = tk.attention_paged(q, *caches, table, lengths, k=k, v=v, **scales)
        else:
            tk.append_kv(k, v, *caches, page_table=table, seq_lens=lengths, **scales)
            out = tk.attention_paged(q, *caches, table, lengths + 2, **scales)
        results.append([out, *(x.view(torch.uint8) for x in (*caches, scales["k_block_scale"]))])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)
    # The second sequence has the new keys alone.
    codes, blocks = (x.view(torch.uint8)[0, 0] for x in (caches[1], scales["v_block_scale"]))
    values = nvfp4_elements(codes, blocks) / 448
    expected = values.repeat_interleave(2, 0)
    torch.testing.assert_close(
        results[0][0][1, 0].double(), expected, rtol=torch.finfo(BF16).eps, atol=0
    )


# ---- PyTorch, wrong calls ----


def test_opcheck(device):
    if emulated(device):
        pytest.skip("the emulator is not traced")
    caches, scales = empty((64, 64), device)
    for x in scales.values():
        x.fill_(0.5)
    k = normal((2, 1, 3, 64), BF16, device)
    lengths = torch.tensor([7, 0], dtype=torch.int32, device=device)
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32, device=device)
    ops = torch.ops.thunderkittens
    caches = [x.view(torch.uint8) for x in caches]  # PyTorch fills no fresh float4
    options = {"page_table": table, "seq_lens": lengths, **scales}
    torch.library.opcheck(ops.append_kv.default, (k, k, *caches), options, test_utils=FLAGS)
    args = (k, *caches, table, lengths)
    torch.library.opcheck(ops.attention_paged.default, args, scales, test_utils=FLAGS)


def test_compiles(device, monkeypatch):
    if emulated(device):
        pytest.skip("the emulator is not traced")
    made = Case([37, 5], [1, 1], device=device)
    to_nvfp4(made, "NHD")
    made.options = {name: x for name, x in made.options.items() if "block_scale" in name}
    # torch cannot fill memory of that dtype, which its compiler would ask it to.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    compiled = torch.compile(tk.attention_paged, fullgraph=True, dynamic=True)
    with torch.no_grad():
        out = compiled(*made.arguments, **made.options)
    assert torch.equal(out, made.run()[0])


WRONG = [
    ({"k_block_scale": None}, ValueError, "k_block_scale and v_block_scale must be given together"),
    (
        {"k_block_scale": None, "v_block_scale": None},
        TypeError,
        "k_cache is torch.float4_e2m1fn_x2, . is torch.bfloat16; it must be that, or one of",
    ),
    (
        {"k_cache": lambda x: torch.zeros(x.shape, dtype=BF16)},
        TypeError,
        "k_cache is torch.bfloat16; with k_block_scale it must be one of",
    ),
    ({"k_cache": lambda x: x.view(torch.uint8)}, TypeError, "k_cache is torch.uint8, v_cache is"),
    ({"k_cache": lambda x: x[..., :24]}, ValueError, "k_cache has 24 columns, of two elements"),
    (
        {"v_block_scale": lambda x: x.view(torch.uint8)},
        TypeError,
        "v_block_scale is torch.uint8; it must be torch.float8_e4m3fn",
    ),
    (
        {"v_block_scale": lambda x: x[..., :2]},
        ValueError,
        r"v_block_scale has shape \(4, 8, 3, 2\); it must be \(4, 8, 3, 4\), a scale for each 16",
    ),
    (
        {"k_block_scale": lambda x: torch.zeros(4, 8, 3, 5, device=x.device).to(E4M3)[..., :4]},
        ValueError,
        "k_block_scale has strides .*; those of a token's head must be adjacent, and begin at",
    ),
    (
        {"v_scale": lambda x: torch.ones(4, 8, 3)},
        ValueError,
        r"v_scale has shape \(4, 8, 3\); with block scales it must have one element, or be \(2, 3",
    ),
]


@pytest.mark.parametrize(("changed", "error", "words"), WRONG)
@pytest.mark.parametrize("op", ["append_kv", "attention_paged"])
def test_wrong_calls(op, changed, error, words):
    (k_cache, v_cache), scales = empty((64, 64), "cpu")
    call = {"k_cache": k_cache, "v_cache": v_cache, "v_scale": None, **scales}
    call |= {name: x(call[name]) if callable(x) else x for name, x in changed.items()}
    k = normal((2, 1, 3, 64), BF16, "cpu")
    call |= {"seq_lens": torch.zeros(2).int(), "page_table": torch.zeros(2, 2).int()}
    call |= {"k": k, "v": k} if op == "append_kv" else {"q": k}
    with pytest.raises(error, match=f"tk.{op}: {words}"):
        getattr(tk, op)(**call)


def unpadded(x):
    return torch.zeros(4, 8, 3, 5).to(E4M3)[..., :4]


CHECKED = [
    ({"k_block_scale": None}, "must be given together"),
    ({"k_block_scale": lambda x: x[..., :2]}, "must have a scale for each 16 elements of k_cache"),
    ({"v_block_scale": lambda x: x[:2]}, "must have a scale for each 16 elements of v_cache"),
    ({"v_block_scale": unpadded}, "rows that begin at multiples of 4 bytes; got strides"),
    ({"v_block_scale": lambda x: x[0]}, "v_block_scale must have 4 dimensions"),
    ({"k_block_scale": lambda x: x.to(BF16)}, "k_block_scale must be torch.float8_e4m3fn"),
    ({"v_scale": lambda x: torch.ones(4, 8, 3)}, "must have one element, or be of sequences"),
    ({"k_cache": lambda x: x.to(BF16), "v_cache": lambda x: x.to(BF16)}, "with k_block_scale it"),
    (
        {
            "k_cache": lambda x: x[..., :24],
            "k_block_scale": lambda x: x[..., :3],
            **dict.fromkeys(("k", "q"), lambda x: x[..., :48].contiguous()),
        },
        "head dimensions of NVFP4 must be multiples of 32, got 48 and 64",
    ),
]


@pytest.mark.emulator
@pytest.mark.parametrize(("changed", "words"), CHECKED)
@pytest.mark.parametrize("op", ["append_kv", "attention_paged"])
def test_the_op_checks_on_its_own(op, changed, words):
    """What Python has not checked, as of exported graphs."""
    (k_cache, v_cache), scales = empty((64, 64), "cpu")
    k = normal((2, 1, 3, 64), BF16, "cpu")
    arrays = {"k_cache": k_cache.view(E4M3), "v_cache": v_cache.view(E4M3), "v_scale": None}
    arrays |= {"q": k, "k": k, "v": k, "seq_lens": torch.zeros(2).int(), **scales}
    arrays |= {name: x(arrays[name]) if callable(x) else x for name, x in changed.items()}
    with tk.emulate(), pytest.raises(RuntimeError, match=f"tk.{op}: .*{words}"):
        emulation.run(op, arrays)


def test_scales_must_not_overlap():
    (k_cache, v_cache), scales = empty((64, 64), "cpu")
    k = normal((2, 1, 3, 64), BF16, "cpu")
    scales["v_block_scale"] = scales["k_block_scale"]
    with pytest.raises(ValueError, match="k_block_scale overlaps v_block_scale"):
        tk.append_kv(k, k, k_cache, v_cache, seq_lens=torch.zeros(2).int(), **scales)
