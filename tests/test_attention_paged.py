"""`tk.attention_paged` and `tk.attention_decode`: values over any pages, lengths and options, what
must not change a bit, and wrong calls."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import thunderkittens as tk
from helpers.attention import emulated
from helpers.cover import cover, over
from helpers.paged import CODES, LAYOUTS, Case, normal, to_nvfp4

BF16, FP16 = torch.bfloat16, torch.float16
FLAGS = ("test_schema", "test_autograd_registration", "test_faketensor")
SCALES = {"k_scale": 0.5, "v_scale": 2.0}
LENGTHS = {
    "some": [70, 1, 64, 129],
    "empty": [0, 40, 0],
    "one": [700],
    "long and short": [3, 400, 65, 17, 0],
}
LONG = {
    "mixed": [16 * i * i % 5000 for i in range(40)],
    "decode": [4096 - i for i in range(16)],
    "very long": [100_000],
    "many": [100 + i % 7 for i in range(1500)],
}
DIMS = [(64, 64), (128, 128), (80, 80), (192, 128), (256, 256), (64, 40)]
CODE_DIMS = [(64, 64), (128, 128), (80, 48), (192, 128), (256, 256)]


def cases(device, intensity):
    return cover(
        {
            "lengths": [*LENGTHS, *(LONG if device == "cuda" else {})],
            "dims_and_dtype": list(itertools.product(DIMS, (BF16, FP16))),
            "heads": [(1, 1), (8, 2), (6, 6), (20, 4), (5, 1)],
            "size": [1, 3, 16, 64, 100],
            "queries": [1, 4, 20, "mixed"],
            "split": [None, 64, 192],
            "layout": LAYOUTS,
            "options": [
                "plain",
                "window",
                "softcap",
                "sink",
                "alibi",
                "mask",
                "leftpad",
                "chunk",
                "full",
            ],
        },
        intensity,
    )


def case_of(case, device, seed=0):
    rng = random.Random(seed)
    lengths = {**LENGTHS, **LONG}[case["lengths"]]
    packed = case["queries"] == "mixed"
    queries = [rng.choice((0, 1, 2, 7, 30)) if packed else case["queries"] for _ in lengths]
    tokens = sum(queries)
    options = {"split_size": case["split"]}
    heads, kind = case["heads"][0], case["options"]
    if kind == "window":
        options["window_size"] = (rng.choice((0, 30, 100)), -1)
    elif kind == "softcap":
        options["softcap"] = 3.0
    elif kind == "sink":
        options["sink"] = torch.randn(heads, device=device)
    elif kind == "alibi":
        options["alibi_slopes"] = torch.rand(heads, device=device)
    elif kind == "mask":
        words = -(-max(queries) // 32)
        options["mask"] = torch.randint(
            -(2**31), 2**31 - 1, (tokens, words), dtype=torch.int32, device=device
        )
    elif kind == "leftpad":
        first = [rng.randint(0, n) for n in lengths]
        options["cache_leftpad"] = torch.tensor(first, dtype=torch.int32, device=device)
    elif kind == "chunk":
        first = [rng.randint(0, n) for n in lengths]
        options["cache_leftpad"] = torch.tensor(first, dtype=torch.int32, device=device)
        options["attention_chunk"] = rng.choice((1, 30, 100, 10_000))
    elif kind == "full":
        options["causal"] = False
    fields = {name: case[name] for name in ("heads", "size", "layout")}
    fields["dims"], fields["dtype"] = case["dims_and_dtype"]
    made = Case(
        lengths, queries, packed=packed, seed=seed, device=device, options=options, **fields
    )
    if "cache_leftpad" in options:
        made.spoil(first)
    return made


@pytest.mark.all_twins
@over(cases)
def test_values(device, case):
    if case["lengths"] == "many" and case["size"] < 16:
        case = {**case, "size": 16}
    made = case_of(case, device)
    if made.q.numel() > 0:
        made.check(*made.run())


@pytest.mark.parametrize("leftpad", [0, 60])
def test_queries_before_the_first_key_have_an_empty_chunk(device, leftpad):
    """A sequence with more queries than keys: the first of them stand before its keys, and so do
    their chunks. The last stands at the last key."""
    lengths, count, chunk = [leftpad + 5, leftpad + 70, leftpad], 75, 3
    options = {"causal": False, "attention_chunk": chunk}
    made = Case(lengths, [count] * 3, (2, 1), device=device, options=options)
    made.options["cache_leftpad"] = made.ints([leftpad] * 3)
    out, lse = made.run()
    made.check(out, lse)
    for b, n in enumerate(lengths):
        keys = n - leftpad
        for i in range(count):
            position = i + keys - count  # among the keys that are seen
            if position < 0:
                assert bool((lse[b, :, i] == -torch.inf).all())
                assert bool((out[b, i] == 0).all())
            else:
                assert bool(lse[b, :, i].isfinite().all())


def code_cases(device, intensity):
    return cover(
        {
            "format": CODES,
            # Up to 8 and 16 rows of a key head, and more, have kernels of their own.
            "kernel": list(itertools.product(CODE_DIMS, (BF16, FP16), (2, 4, 5))),
            "k_scale": ["none", "one", "heads", "tokens"],
            "v_scale": ["none", "one", "heads", "tokens"],
            "q_scale": ["none", "one", "heads"],
            "magnitude": [1.0, 1e-4, 100.0],
            "spread": [0.3, 3.0],
            "query": [1.0, 1e-7],
            "split": [None, 128],
            "softcap": [0.0, 4.0],
        },
        intensity,
    )


def scales_of(kind, made, magnitude, spread):
    """Factors of values about as large as `magnitude`."""
    device, (pages, size, heads) = made.device, made.k_cache.shape[:3]
    if kind == "none":
        return None
    if kind == "one":
        return torch.tensor(magnitude, device=device)
    if kind == "heads":
        return magnitude * (torch.rand(len(made.lengths), heads, device=device) + 0.2)
    factors = magnitude * torch.exp(spread * torch.randn(pages, heads, size, device=device))
    return factors.clamp(max=20 * magnitude).transpose(1, 2)


@pytest.mark.all_twins
@over(code_cases)
def test_values_of_codes(device, case):
    """See `Case.check_of_halves`."""
    dims, dtype, queries = case["kernel"]
    made = Case([300, 0, 77, 129], [queries] * 4, (8, 2), dims, dtype=dtype, device=device)
    unit = encode(made, case["format"])
    made.q *= 1.0 if dtype is FP16 else case["query"]
    made.options |= {"split_size": case["split"], "softcap": case["softcap"]}
    options = {
        "k_scale": scales_of(case["k_scale"], made, 1 / unit, case["spread"]),
        "v_scale": scales_of(case["v_scale"], made, case["magnitude"] / unit, case["spread"]),
        "q_scale": scales_of(case["q_scale"], made, 1.0, 0.0),
    }
    check_codes(made, **options)


def encode(made, format):
    """Makes codes of the caches; returns the factor that lets them fill their range."""
    unit = {torch.int8: 60.0, torch.float8_e4m3fn: 60.0, torch.float8_e5m2: 3.0}[format]
    wide = [x.nan_to_num(0).float() * unit for x in (made.k_cache, made.v_cache)]
    if format is torch.int8:
        wide = [x.round().clamp(-128, 127) for x in wide]
    made.k_cache, made.v_cache = (x.to(format) for x in wide)
    return unit


def check_codes(made, **options):
    out, lse = made.run(**options)
    largest = float(made.v_cache.float().abs().max())
    if options.get("v_scale") is not None:
        largest *= float(options["v_scale"].max())
    softcap = made.options.get("softcap", 0.0)
    made.check_of_halves(out, lse, largest, softcap, **options)


def option_cases(device, intensity):
    """Of caches of codes, whose rows are multiples of 16 elements."""
    return [
        {**case, "format": CODES[i % len(CODES)]}
        for i, case in enumerate(cases(device, intensity))
        if case["dims_and_dtype"][0][1] % 16 == 0 and case["lengths"] in LENGTHS
    ]


@over(option_cases)
def test_options_of_codes(device, case):
    made = case_of(case, device, seed=1)
    encode(made, case["format"])
    if made.q.numel() > 0:
        check_codes(made)


@pytest.mark.emulator
@pytest.mark.parametrize("policy", ["on_wait", "late_mma", "random"])
@pytest.mark.parametrize("sms", [1, 3, 7])
def test_parts_of_any_number(policy, sms):
    """Items that are cut by several parts, parts of several items."""
    for split in (None, 128):
        made = Case([700, 3, 0, 130, 65], [2] * 5, options={"split_size": split}, seed=sms)
        with tk.emulate(policy, seed=sms, sm_count=sms):
            out, lse = made.run()
        made.check(out, lse)


def one_of(made, b):
    """The arguments of a call with sequence b alone."""
    table = made.table[b : b + 1]
    return (made.q[b : b + 1], made.k_cache, made.v_cache, table, made.seq_lens[b : b + 1])


@pytest.mark.parametrize("lengths", [[700, 65, 3, 129], [300] * 3])
def test_a_split_size_makes_results_independent_of_the_batch(device, lengths):
    made = Case(lengths, [2] * len(lengths), (8, 2), (128, 128), device=device)
    out, lse = made.run(split_size=128)
    made.check(out, lse)
    for b in range(len(lengths)):
        alone = tk.attention_paged(*one_of(made, b), split_size=128, return_lse=True)
        assert torch.equal(alone[0][0], out[b])
        assert torch.equal(alone[1][0], lse[b])


def test_pages_change_no_bit(device):
    """Neither their order nor their size, nor whether there are any."""
    first = Case([200, 77], [1, 1], size=8, seed=1, device=device)
    out, lse = first.run()
    rows = [first.table[b, : -(-n // 8)].long() for b, n in enumerate((200, 77))]
    keys, values = (
        [x[row].flatten(0, 1)[:n] for row, n in zip(rows, (200, 77), strict=True)]
        for x in (first.k_cache, first.v_cache)
    )
    for size, pages in ((8, True), (1, True), (50, True), (0, False)):
        other = Case([200, 77], [1, 1], size=size, pages=pages, seed=5, device=device)
        other.q = first.q
        for b, n in enumerate((200, 77)):
            index = torch.arange(n, device=device)
            page = other.table[b][index // other.size].long()
            other.k_cache[page, index % other.size] = keys[b]
            other.v_cache[page, index % other.size] = values[b]
        again = other.run()
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)


def test_attention_decode(device):
    made = Case([50, 7], [1, 1], pages=False, device=device)
    out, lse = made.run()
    made.check(out, lse)
    rows = made.options["cache_batch_idx"].long()
    caches = [x[rows] for x in (made.k_cache, made.v_cache)]
    again = tk.attention_decode(made.q, *caches, made.seq_lens, return_lse=True)
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], lse)


# ---- schedules ----


def schedule_of(made, **more):
    return tk.attention_schedule(
        made.seq_lens,
        *made.heads,
        *made.dims,
        max_seqlen_q=made.options.get("max_seqlen_q", made.queries[0]),
        cu_seqlens_q=made.options.get("cu_seqlens_q"),
        **more,
    )


@pytest.mark.parametrize("split", [None, 64])
def test_a_schedule_serves_all_layers(device, split):
    made = Case([300, 0, 65], [3, 1, 2], packed=True, device=device)
    out, lse = made.run(split_size=split)
    schedule = schedule_of(made, split_size=split)
    for _ in range(2):
        again = made.run(split_size=split, schedule=schedule)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)


def test_schedules_of_other_calls_give_no_number(device):
    """Of other lengths, for the sequences that have them; of other arguments, for all."""
    made = Case([300, 100], [1, 1], device=device)
    if emulated(device) or device == "cuda":
        schedule = schedule_of(made)
        made.seq_lens[1] -= 1
        out, lse = made.run(schedule=schedule)
        assert bool(out[1].isnan().all())
        assert bool(lse[1].isnan().all())
        assert not bool(out[0].isnan().any())
        out, lse = made.run(schedule=schedule, causal=False)
        assert bool(out.isnan().all())
        assert bool(lse.isnan().all())


def test_schedules_of_another_size_are_refused(device):
    made = Case([300, 100], [1, 1], device=device)
    if emulated(device) or device == "cuda":
        with pytest.raises(RuntimeError, match=r"schedule must have \d+ numbers for this call"):
            made.run(schedule=schedule_of(made)[:-1].clone())


# ---- new keys in the call ----


def with_new(made, new, device, **options):
    """New keys and values for a case whose cache has room for them."""
    shape = (len(made.lengths), new, made.heads[1])
    k, v = (normal((*shape, dim), made.dtype, device) for dim in made.dims)
    return {"k": k, "v": v, **options}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("rotary", "begins"), [(0, False), (16, False), (64, True)])
def test_new_keys(device, rotary, begins, interleaved):
    """Written, rotated, and seen by the queries, which are rotated, too."""
    made = Case([37, 0, 64], [2, 2, 2], capacity=90, size=9, device=device)
    for b in range(3):  # pages for what comes
        made.table[b] = made.places[b].to(device)
    new = with_new(made, 2, device)
    if rotary:
        angle = torch.rand(100, rotary // 2, device=device) * 6
        new |= {"rotary_cos": angle.cos().to(BF16), "rotary_sin": angle.sin().to(BF16)}
        new["rotary_interleaved"] = interleaved
        if begins:
            new["rotary_seqlens"] = made.ints([50, 3, 0])
    caches = [x.clone() for x in (made.k_cache, made.v_cache)]
    out, lse = made.run(**new)
    options = {name: x for name, x in new.items() if name not in ("k", "v")}
    tk.reference.append_kv(
        new["k"], new["v"], *caches, page_table=made.table, seq_lens=made.seq_lens, **options
    )
    for x, y in zip((made.k_cache, made.v_cache), caches, strict=True):
        assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))
    for b in range(3):  # pages that nothing was written to
        made.table[b, -(-(made.lengths[b] + 2) // made.size) :] = -1
    if rotary:  # queries are rounded once more
        expected, _ = made.expected(new_keys=2, **options)
        torch.testing.assert_close(out.double(), expected, atol=3e-2, rtol=3e-2)
    else:
        made.check(out, lse, new_keys=2)


# ---- PyTorch ----


def test_opcheck(device):
    if emulated(device):
        pytest.skip("the emulator is not traced")
    made = Case([37, 5], [1, 2], packed=True, device=device)
    args = (*made.arguments, made.options["cu_seqlens_q"], 2)
    torch.library.opcheck(torch.ops.thunderkittens.attention_paged.default, args, test_utils=FLAGS)
    made = Case([37, 5], [1, 1], device=device)
    few = torch.ops.thunderkittens.attention_paged_forward.default
    checks = tuple(x for x in FLAGS if x != "test_autograd_registration")
    torch.library.opcheck(few, (*made.arguments, None), test_utils=checks)


@pytest.mark.parametrize("form", ["same", "codes", "nvfp4"])
def test_calls_of_few_arguments(device, form):
    """Most calls go to an op without the options that they do not have: the same bits."""
    made = Case([37, 5, 130], [2] * 3, (8, 2), (128, 64), device=device)
    options = {}
    if form == "codes":
        made.k_cache, made.v_cache = (x.to(CODES[0]) for x in (made.k_cache, made.v_cache))
    elif form == "nvfp4":
        to_nvfp4(made, "NHD")
        options = dict(made.options)
    if form != "same":
        options |= {n: torch.tensor(x, device=device) for n, x in SCALES.items()}
    lengths = made.seq_lens - 1
    given = {"max_seqlen_q": 2, "new_keys": 1}
    schedule = tk.attention_schedule(lengths, 8, 2, 128, 64, **given, codes=form != "same")
    args = (*made.arguments[:4], lengths)
    expected, _ = torch.ops.thunderkittens.attention_paged(
        *args, **given, **options, schedule=schedule, scale=0.3
    )
    names = (*SCALES, "k_block_scale", "v_block_scale")
    few = torch.ops.thunderkittens.attention_paged_forward(
        *args, schedule, *(options.get(n) for n in names), 0.3, 1
    )
    assert torch.equal(few, expected)
    assert bool(few.isfinite().all())
    out = tk.attention_paged(*made.arguments, **options)
    assert torch.equal(out, made.run(**options)[0])


def test_compiles(device):
    if emulated(device):
        pytest.skip("the emulator is not traced")
    made = Case([37, 5], [1, 1], device=device)
    compiled = torch.compile(tk.attention_paged, fullgraph=True, dynamic=True)
    with torch.no_grad():
        assert torch.equal(compiled(*made.arguments), tk.attention_paged(*made.arguments))


@pytest.mark.gpu
def test_a_graph_replays_with_other_lengths():
    made = Case([300, 0, 900], [1, 1, 1], capacity=1000, device="cuda")
    others = [
        Case(n, [1] * 3, capacity=1000, seed=i, device="cuda")
        for i, n in enumerate(([1, 1000, 65], [0, 0, 0], [999, 998, 997]))
    ]
    made.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = made.run()
    for other in (*others, made):
        for x, y in zip(made.arguments, other.arguments, strict=True):
            x.copy_(y)
        graph.replay()
        expected = other.run()
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])


@pytest.mark.large
@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    """In elements and in bytes."""
    pages, size = 2**32 // (64 * 2 * 128) + 3, 64
    k = torch.empty(pages, size, 2, 128, dtype=BF16, device="cuda")
    last = k[-2:].copy_(normal((2, size, 2, 128), BF16, "cuda"))
    q = normal((1, 1, 8, 128), BF16, "cuda")
    lengths = torch.tensor([100], dtype=torch.int32, device="cuda")
    table = torch.tensor([[pages - 2, pages - 1]], dtype=torch.int32, device="cuda")
    out = tk.attention_paged(q, k, k, table, lengths)
    expected = tk.attention_paged(q, last, last, table - (pages - 2), lengths)
    assert torch.equal(out, expected)


# ---- wrong calls ----

WRONG = [
    ({"q": lambda m: m.q.float()}, TypeError, "q is torch.float32; supported are"),
    ({"q": lambda m: m.q[0]}, ValueError, r"q has shape .*; it must be \(B, s, heads, head dim\)"),
    ({"q": lambda m: m.q[..., :63]}, ValueError, "q has head dim 63; it must be a multiple of 8"),
    ({"q": lambda m: m.q[:, :, :3]}, ValueError, "k has 2 heads, q has 3; q's heads must be"),
    ({"k_cache": lambda m: m.k_cache.half()}, TypeError, "k_cache is torch.float16, q is"),
    ({"k_cache": lambda m: m.k_cache[0]}, ValueError, "k_cache has shape .*; it must have 4"),
    ({"v_cache": lambda m: m.v_cache[:1]}, ValueError, "all but their head dims must be equal"),
    ({"page_table": lambda m: m.table.long()}, TypeError, "page_table is torch.int64; it must be"),
    ({"page_table": lambda m: m.table[:1]}, ValueError, "page_table has 1 sequences, seq_lens has"),
    ({"seq_lens": lambda m: m.seq_lens.long()}, TypeError, "seq_lens is torch.int64; it must be"),
    ({"seq_lens": lambda m: m.seq_lens[:1]}, ValueError, "seq_lens has 1 elements; it must have 2"),
    ({"split_size": 100}, ValueError, "split_size is 100; it must be a multiple of 64"),
    ({"window_size": (-2, 0)}, ValueError, r"window_size is \(-2, 0\)"),
    ({"k": lambda m: m.q[:, :, :2]}, ValueError, "k and v must be given together"),
    ({"rotary_cos": lambda m: m.q[0, 0]}, ValueError, "need k and v"),
    ({"cu_seqlens_q": lambda m: m.ints([0, 1, 2])}, ValueError, "packed queries need max_seqlen_q"),
    ({"mask": lambda m: m.table}, ValueError, r"mask has shape .*; it must be \(4, words\)"),
    ({"scale": float("nan")}, ValueError, "scale is nan; it must be finite"),
]


@pytest.mark.parametrize(("changed", "error", "words"), WRONG)
def test_wrong_calls(device, changed, error, words):
    made = Case([37, 5], [2, 2], device=device)
    names = ("q", "k_cache", "v_cache", "page_table", "seq_lens")
    arguments = dict(zip(names, made.arguments, strict=True))
    arguments |= {name: x(made) if callable(x) else x for name, x in changed.items()}
    with pytest.raises(error, match=f"tk.attention_paged: .*{words}"):
        tk.attention_paged(**arguments)


def test_gradients_are_refused():
    made = Case([37, 5], [1, 1])
    made.q.requires_grad_()
    with pytest.raises(RuntimeError, match="has no gradient, and an operand requires one"):
        made.run()
    with torch.no_grad():
        made.run()
