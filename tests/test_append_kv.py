"""`tk.append_kv`: bits against the reference, what else of a cache stays as it was, wrong calls."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from helpers.attention import emulated
from helpers.cover import cover, over
from helpers.paged import CODES, LAYOUTS, empty_caches, normal

BF16, FP16 = torch.bfloat16, torch.float16
FLAGS = ("test_schema", "test_autograd_registration", "test_faketensor")


def cases(device, intensity):
    return cover(
        {
            "by": ["table", "slots", "sequence"],
            "packed": [False, True],
            "dims": [(64, 64), (128, 128), (192, 128), (8, 40)],
            "heads": [1, 2, 9],
            "size": [1, 3, 16, 64],
            "layout": LAYOUTS,
            "rotary": [None, 16, "all"],
            "interleaved": [False, True],
            "positions": [False, True],
            "indexed": [False, True],
            "dtype": [BF16, FP16],
        },
        intensity,
    )


def ints(values, device, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)


def call_of(case, device):
    """Arguments for three sequences that have 5, 0 and 40 keys, with room for a few less than come
    to the last one."""
    size = 43 if case["by"] == "sequence" else case["size"]
    counts = [2, 0, 7] if case["packed"] else [4, 4, 4]
    tokens, columns = sum(counts), -(-43 // size)
    shape = (tokens,) if case["packed"] else (3, 4)
    heads, dims, dtype = case["heads"], case["dims"], case["dtype"]
    k, v = (normal((*shape, heads, dim), dtype, device) for dim in dims)
    caches = empty_caches(3 * columns + 2, size, heads, dims, case["layout"], k[:0])
    options = {}
    if case["by"] == "slots":
        slots = torch.randperm(size * (3 * columns + 2))[:tokens].long()
        slots[0], slots[-1] = -1, size * (3 * columns + 2)
        options["slot_mapping"] = slots.to(device)
    else:
        options["seq_lens"] = ints([5, 0, 40], device)
        if case["indexed"]:
            options["cache_batch_idx"] = ints([2, 0, 1], device)
        if case["packed"]:
            options["cu_seqlens_k_new"] = ints([0, 2, 2, 9], device)
        if case["by"] == "table":
            table = torch.randperm(3 * columns + 2)[: 3 * columns].reshape(3, columns)
            options["page_table"] = table.to(device, torch.int32)
    dim = {None: 0, "all": dims[0] // 16 * 16}.get(case["rotary"], min(16, dims[0] // 16 * 16))
    if dim:
        angle = torch.rand(60, dim // 2, device=device) * 6
        options |= {"rotary_cos": angle.cos().to(dtype), "rotary_sin": angle.sin().to(dtype)}
        options["rotary_interleaved"] = case["interleaved"]
        if case["positions"] or case["by"] == "slots":
            positions = torch.randint(0, 60, (tokens,), dtype=torch.int32)
            options["rotary_positions"] = positions.to(device)
    return [k, v, *caches], options


@pytest.mark.all_twins
@over(cases)
def test_bits(device, case):
    """Of what is written, and NaN, as before, everywhere else; rotated keys to a rounding."""
    (k, v, *caches), options = call_of(case, device)
    expected = [x.clone() for x in caches]
    tk.reference.append_kv(k, v, *expected, **options)
    assert tk.append_kv(k, v, *caches, **options) is None
    for x, y, rotated in zip(caches, expected, ("rotary_cos" in options, False), strict=True):
        assert torch.equal(x.isnan(), y.isnan())
        if rotated:
            eps = torch.finfo(x.dtype).eps
            torch.testing.assert_close(x, y, rtol=eps, atol=eps / 4, equal_nan=True)
        else:
            assert torch.equal(x.nan_to_num(7), y.nan_to_num(7))


@pytest.mark.parametrize("format", CODES, ids=str)
@pytest.mark.parametrize("scales", ["none", "one", "heads", "tokens"])
@pytest.mark.parametrize(
    ("dims", "dtype"), [((64, 64), BF16), ((192, 128), FP16), ((256, 80), BF16)]
)
def test_codes(device, dims, dtype, scales, format):
    """Bits of codes and scales; what is too large saturates."""
    shape = (2, 3, 2)
    k, v = (normal((*shape, dim), dtype, device) * 30 for dim in dims)
    k[0, 0, 0, 0] = torch.finfo(FP16).max
    v[1, 1, 1] = 0
    caches = [torch.zeros(4, 8, 2, dim, device=device).to(format) for dim in dims]
    options = {"page_table": ints([[3, 1], [0, 2]], device), "seq_lens": ints([7, 2], device)}
    sizes = {"one": (), "heads": (2, 2), "tokens": (4, 8, 2)}.get(scales)
    if sizes is not None:
        options |= {name: torch.rand(sizes, device=device) + 0.1 for name in ("k_scale", "v_scale")}
    expected = [x.clone() for x in caches]
    wanted = {name: x.clone() for name, x in options.items()}
    tk.append_kv(k, v, *caches, **options)
    tk.reference.append_kv(k, v, *expected, **wanted)
    for name, x in wanted.items():
        assert torch.equal(options[name], x)
    for x, y in zip(caches, expected, strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def test_memory_between_heads_is_not_written(device):
    k = normal((1, 3, 2, 64), BF16, device)
    whole = torch.full((4, 8, 2, 3, 64), 5.0, dtype=BF16, device=device)
    k_cache, v_cache = whole[:, :, :, 0], whole[:, :, :, 2]
    table, lengths = ints([[3, 1]], device), ints([7], device)
    tk.append_kv(k, k, k_cache, v_cache, page_table=table, seq_lens=lengths)
    for cache in (k_cache, v_cache):
        assert torch.equal(torch.cat((cache[3, 7:], cache[1, :2])), k[0])
    assert bool((whole[:, :, :, 1] == 5).all())
    assert int((whole != 5).any(-1).sum()) == 2 * 3 * 2


def test_a_negative_length_leaves_tokens_out(device):
    """As engines have it where a batch is padded: what lies before the first key has no place."""
    k = normal((3, 2, 1, 64), BF16, device)
    for table in (ints([[3, 1], [0, 2], [4, 5]], device), None):
        caches = [torch.zeros(6, 8, 1, 64, dtype=BF16, device=device) for _ in range(2)]
        tk.append_kv(k, k, *caches, page_table=table, seq_lens=ints([3, -2, -1], device))
        first, third = (3, 4) if table is not None else (0, 2)
        for cache in caches:
            assert torch.equal(cache[first, 3:5], k[0])
            assert torch.equal(cache[third, 0], k[2, 1])
            assert int((cache != 0).any(-1).sum()) == 3


@pytest.mark.gpu
def test_a_graph_replays_with_other_lengths():
    k = normal((2, 1, 2, 64), BF16, "cuda")
    cache = torch.zeros(4, 8, 2, 64, dtype=BF16, device="cuda")
    other = torch.zeros_like(cache)
    table, lengths = ints([[0, 1], [2, 3]], "cuda"), ints([0, 9], "cuda")
    arguments = {"page_table": table, "seq_lens": lengths}
    tk.append_kv(k, k, cache, other, **arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tk.append_kv(k, k, cache, other, **arguments)
    cache.zero_()
    lengths.copy_(ints([5, 15], "cuda"))
    graph.replay()
    assert torch.equal(cache[0, 5], k[0, 0])
    assert torch.equal(cache[3, 7], k[1, 0])
    assert int((cache != 0).any(-1).sum()) == 4


def test_opcheck(device):
    if emulated(device):
        pytest.skip("the emulator is not traced")
    case = {"by": "table", "packed": False, "indexed": True, "dims": (64, 64), "heads": 2}
    case |= {"size": 16, "layout": "NHD", "rotary": 16, "interleaved": True, "positions": False}
    case["dtype"] = BF16
    tensors, options = call_of(case, device)
    tensors[2:] = [x.nan_to_num(0) for x in tensors[2:]]
    op = torch.ops.thunderkittens.append_kv.default
    torch.library.opcheck(op, tuple(tensors), options, test_utils=FLAGS)


WRONG = [
    ({"k": lambda k: k.float()}, TypeError, "k is torch.float32; supported are"),
    ({"v": lambda k: k[:, :1]}, ValueError, "k has shape .*, v has"),
    ({"k_cache": lambda k: k.half()}, TypeError, "k_cache is torch.float16, k is"),
    ({"k_cache": lambda k: k[..., :1, :]}, ValueError, "all but their head dims must be equal"),
    ({"seq_lens": None}, ValueError, "either seq_lens or slot_mapping must say"),
    ({"slot_mapping": lambda k: torch.zeros(4).long()}, ValueError, "either seq_lens or slot_"),
    (
        {"seq_lens": None, "slot_mapping": lambda k: torch.zeros(4)},
        TypeError,
        "slot_mapping is torch.float32; it must be torch.int64",
    ),
    ({"seq_lens": lambda k: torch.zeros(2).long()}, TypeError, "seq_lens is torch.int64"),
    ({"page_table": lambda k: torch.zeros(1, 2).int()}, ValueError, "page_table has 1 sequences"),
    (
        {"rotary_cos": lambda k: k[0, :, 0, :8].clone()},
        TypeError,
        "rotary_sin must be a torch.Tensor",
    ),
    ({"k_cache": lambda k: k, "v_cache": lambda k: k}, ValueError, "k_cache overlaps v_cache"),
    (
        {
            **{name: lambda k: k.repeat(1, 1, 1, 5) for name in ("k", "v")},
            **dict.fromkeys(
                ("k_cache", "v_cache"), lambda k: torch.zeros(2, 8, 2, 320).to(torch.int8)
            ),
        },
        ValueError,
        "head dims are 320 and 320; those of caches of 8 and 4 bits must be at most 256",
    ),
]


@pytest.mark.parametrize(("changed", "error", "words"), WRONG)
def test_wrong_calls(device, changed, error, words):
    k = normal((2, 2, 2, 64), BF16, device)
    call = {"k": k, "v": k, "seq_lens": torch.zeros(2, device=device).int()}
    call |= {x: torch.zeros(2, 8, 2, 64, dtype=BF16, device=device) for x in ("k_cache", "v_cache")}
    other = k.clone()
    for name, x in changed.items():
        made = x(other) if callable(x) else x
        call[name] = made.to(device) if isinstance(made, torch.Tensor) else made
    with pytest.raises(error, match=f"tk.append_kv: .*{words}"):
        tk.append_kv(**call)
