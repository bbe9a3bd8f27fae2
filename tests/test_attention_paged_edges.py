"""Attention over a cache and what writes into one, on the emulator: sequences around each edge of a
tile, parts that begin anywhere, rings that wrap, numbers in memory that lead nowhere."""

from __future__ import annotations

import os

import pytest
import torch

import thunderkittens as tk
from helpers.paged import CODES, Case, empty_caches, normal, to_nvfp4
from thunderkittens import emulation

if emulation.problem is not None:
    pytest.skip(emulation.problem, allow_module_level=True)

BF16, FP16 = torch.bfloat16, torch.float16
POLICIES = emulation.POLICIES
PORTABLE = pytest.param(True, id="portable", marks=pytest.mark.intensity(2))


@pytest.fixture(autouse=True, params=[pytest.param(False, id="hopper"), PORTABLE])
def kernels(request, monkeypatch):
    """Those for Hopper, and those that other GPUs get."""
    if request.param:
        monkeypatch.setenv("THUNDERKITTENS_PORTABLE", "1")


def ints(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


# ---- what a row sees ----

# Lengths around the edges of blocks of 64 keys, for tiles of 64 rows that 13 queries of five heads
# fill and one row more.
EDGES = [12, 13, 14, 51, 52, 53, 63, 64, 65, 75, 76, 77, 78, 127, 128, 129, 140, 141, 191, 192]
OPTIONS = {
    "causal": {},
    "window": {"window_size": (64, 0)},
    "short window": {"window_size": (7, -1)},
    "both sides": {"causal": False, "window_size": (64, 3)},
    "chunk": {"attention_chunk": 64},
    "short chunk": {"attention_chunk": 7},
    "chunks of one": {"attention_chunk": 1},
    "full": {"causal": False},
}


@pytest.mark.parametrize("split", [None, 64])
@pytest.mark.parametrize("options", OPTIONS)
def test_rows_see_the_keys_up_to_the_edge(options, split):
    made = Case(EDGES, [13] * len(EDGES), (5, 1), options=OPTIONS[options], size=24)
    with tk.emulate("on_wait", seed=1, sm_count=8):
        made.check(*made.run(split_size=split))


@pytest.mark.parametrize("more", [{}, {"window_size": (60, -1)}, {"attention_chunk": 100}])
@pytest.mark.parametrize("split", [None, 64, 192])
def test_keys_before_the_first(split, more):
    """First keys at and beside the edges of blocks, of splits, and at the end."""
    first = [0, 1, 63, 64, 65, 127, 128, 129, 192, 255, 256, 300, 301, 400, 200, 330, 64, 700]
    lengths = [300] * 14 + [900] * 4
    made = Case(lengths, [2] * len(first), options={"split_size": split, **more})
    made.options["cache_leftpad"] = ints(first)
    with tk.emulate("late_mma", seed=1, sm_count=17):
        made.check(*made.run())


@pytest.mark.parametrize("queries", [1, 31, 32, 33, 64, 65])
def test_masks_of_any_number_of_words(queries):
    """Over keys whose newest begin anywhere in a block; what lies behind a row's last word is
    another row's."""
    lengths = [queries, queries + 1, 64, 95, 96, 97, 127, 128, 160]
    lengths = [max(n, queries) for n in lengths]
    words = -(-queries // 32)
    made = Case(lengths, [queries] * len(lengths), (2, 1))
    shape = (queries * len(lengths), words)
    mask = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)
    with tk.emulate("eager", seed=queries, sm_count=4):
        made.check(*made.run(mask=mask), mask=mask)


# ---- parts, slots and rings ----


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_rings_wrap(dims, policy):
    """One multiprocessor has all the keys: more than twice as many blocks as slots."""
    made = Case([1500, 70], [1, 1], (2, 1), dims, size=40)
    with tk.emulate(policy, seed=1, sm_count=1):
        made.check(*made.run())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_rings_of_codes_wrap(dims, policy):
    """Scales of tokens, so far apart that blocks need other powers of two. One key has all of a
    row's weight, so that its value is exact."""
    made = Case([700, 70], [1, 1], (2, 1), dims, size=40)
    keys, values = (
        torch.randint_like(x, -n, n + 1) for n, x in ((1, made.k_cache), (9, made.v_cache))
    )
    made.q = torch.randint_like(made.q, 1, 3)
    made.q[..., 8:16] *= 64  # one lane's
    for b, n in enumerate(made.lengths):
        keys[int(made.table[b, n // 3 // made.size]), n // 3 % made.size] = 127
    made.k_cache, made.v_cache = keys.to(torch.int8), values.to(torch.int8)
    shape = made.k_cache.shape[:3]
    options = {"k_scale": torch.ones(shape), "v_scale": 2.0 ** torch.randint(-5, 6, shape).float()}
    with tk.emulate(policy, seed=1, sm_count=1):
        out, lse = made.run(**options)
    expected, expected_lse = made.expected(**options)
    assert torch.equal(out, expected.to(BF16))
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=0)


@pytest.mark.parametrize("others", [[70, 0], [70]])
@pytest.mark.parametrize("keys", [1, 65, 200, 260, 330, 520, 600, 1030, 1100])
@pytest.mark.parametrize("dims", [(64, 64), (256, 256)])
def test_splits_of_any_number_are_combined(keys, others, dims):
    """By one, two, four and eight warps for a row; rows that do not fill a block of warps; of some
    items and of all."""
    options = {"split_size": 64, "sink": torch.randn(6)}
    lengths = [keys, *others]
    made = Case(lengths, [1] * len(lengths), (6, 2), dims, options=options)
    with tk.emulate("random", seed=keys, sm_count=1):
        made.check(*made.run())


@pytest.mark.parametrize("queries", [[0, 0, 0, 0], [40, 0, 3, 21], [1, 2, 3, 4], [0, 22, 0, 0]])
@pytest.mark.parametrize("split", [None, 128])
@pytest.mark.parametrize("sms", [1, 13])
def test_packed_queries(sms, split, queries):
    """Tiles that end inside of a query, sequences without queries and without keys."""
    made = Case([300, 40, 0, 193], queries, (3, 1), packed=True, options={"split_size": split})
    with tk.emulate("random", seed=sms, sm_count=sms):
        out, lse = made.run(max_seqlen_q=40)
    if sum(queries) > 0:
        made.check(out, lse)


def test_lengths_and_offsets_that_are_out_of_range():
    """They count as the nearest that are possible: nothing else is read or written."""
    made = Case([100, 100, 112], [2, 4, 2], packed=True)
    made.seq_lens = ints([100, -5, 2**30])
    made.options["cu_seqlens_q"] = ints([-3, 4, 6, 90])
    with tk.emulate("on_wait", sm_count=2):
        out, lse = made.run(max_seqlen_q=2)
    for rows in ([0, 1], [6, 7]):
        assert bool(out[rows].isfinite().all() & lse[:, rows].isfinite().all())
    assert bool((out[2:4].view(torch.int16) == -1).all())  # as memory is that nothing has written
    assert bool((out[4:6] == 0).all() & (lse[:, 4:6] == -torch.inf).all())


@pytest.mark.parametrize("packed", [False, True])
def test_a_schedule_of_another_call_spoils_every_row(packed):
    queries = [3, 1, 2] if packed else [3, 3, 3]
    made = Case([100, 30, 0], queries, (6, 2), (64, 40), packed=packed)
    with tk.emulate(sm_count=2):
        schedule = tk.attention_schedule(
            made.seq_lens, 6, 2, 64, 40, max_seqlen_q=3,
            cu_seqlens_q=made.options.get("cu_seqlens_q"),
        )  # fmt: skip
        out, lse = made.run(schedule=schedule, causal=False)
    for x, integers in ((out, torch.int16), (lse, torch.int32)):
        assert bool(x.isnan().all())
        assert bool((x.view(integers) != -1).all())  # not as memory that nothing has written


def test_numbers_of_a_schedule_that_are_out_of_range():
    """They count as the nearest, and the sequence as one that has changed."""
    made = Case([64, 100], [2, 2])
    with tk.emulate("on_wait", sm_count=1):
        schedule = tk.attention_schedule(made.seq_lens, *made.heads, *made.dims, max_seqlen_q=2)
        for most in ([2**30, 2**30], [100, 2**30], [2**30, 2], [-1, 2]):
            wrong = schedule.clone()
            lengths = 4 + 4 * 3  # behind the header and the places of two parts
            assert wrong[lengths : lengths + 4].tolist() == [64, 2, 100, 2]
            wrong[lengths + 2 : lengths + 4] = ints(most)
            out, lse = made.run(schedule=wrong)
            assert not bool(out[0].isnan().any() | lse[0].isnan().any())
            if most[0] != 100:
                assert bool(out[1].isnan().all() & lse[1].isnan().all())


@pytest.mark.parametrize(
    ("sms", "heads", "of_head"), [(1, (3, 3), 1), (2, (4, 2), 3), (3, (3, 3), 3), (2, (7, 7), 0)]
)
def test_parts_of_each_head(sms, heads, of_head):
    """Which block has which part of an NVFP4 cache, by the number of parts that a head has, changes
    no bit, whatever that number is."""
    made = Case([700, 300], [1, 1], heads, (128, 128))
    to_nvfp4(made, "NHD")
    with tk.emulate("on_wait", sm_count=sms):
        schedule = tk.attention_schedule(made.seq_lens, *made.heads, *made.dims, codes=True)
        if not os.environ.get("THUNDERKITTENS_PORTABLE"):
            assert schedule[2].item() == of_head
        expected = made.run(schedule=schedule)
        made.check(*expected)
        for other in (-1, 0, 1, 2, 5, 2**31 - 1):
            schedule[2] = other
            for x, y in zip(made.run(schedule=schedule), expected, strict=True):
                assert torch.equal(x, y)


@pytest.mark.parametrize("scales", ["none", "tokens"])
def test_queries_of_zeros_see_all_keys_alike(scales):
    made = Case([100, 30], [2, 2], size=16)
    made.q[:, 1] = 0
    made.k_cache, made.v_cache = (torch.randint(-9, 10, x.shape).to(torch.int8) for x in (
        made.k_cache, made.v_cache))  # fmt: skip
    shape = made.k_cache.shape[:3]
    options = (
        {} if scales == "none" else {"k_scale": torch.ones(shape), "v_scale": torch.ones(shape)}
    )
    with tk.emulate("on_wait", sm_count=1):
        out, lse = made.run(**options)
    _, expected = made.expected(**options)
    torch.testing.assert_close(lse[..., 1].double(), expected[..., 1], rtol=1e-6, atol=0)
    assert bool(out.isfinite().all())


# ---- rotary ----


@pytest.mark.parametrize(
    "options",
    [{"window_size": (0, -1)}, {"window_size": (-1, 0)}, {"window_size": (3, 1)}, {}],
    ids=str,
)
@pytest.mark.parametrize("columns", [16, 64])
def test_queries_turn_where_masks_depend_on_them(options, columns):
    """Without a mask of positions all queries of a sequence stand where the new keys begin."""
    made = Case([37, 0, 64], [3] * 3, capacity=90, size=9, options={"causal": False, **options})
    for b in range(3):
        made.table[b] = made.places[b]
    k, v = (normal((3, 3, made.heads[1], dim), BF16, "cpu") for dim in made.dims)
    angle = torch.rand(60, columns // 2) * 6  # fewer than there are positions
    turn = {"rotary_cos": angle.cos().to(BF16), "rotary_sin": angle.sin().to(BF16)}
    with tk.emulate("late_mma", sm_count=2):
        out, _ = made.run(k=k, v=v, **turn)
    for b in range(3):
        made.table[b, -(-(made.lengths[b] + 3) // made.size) :] = -1
    expected, _ = made.expected(new_keys=3, **turn)
    torch.testing.assert_close(out.double(), expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("columns", [16, 64])
def test_positions_outside_of_the_table(columns, interleaved):
    """They turn as its nearest; all columns, or some."""
    positions = ints([-5, -1, 0, 1, 18, 19, 20, 1000])
    k = normal((8, 1, 64), FP16, "cpu")
    angle = torch.rand(20, columns // 2) * 6
    call = {"rotary_cos": angle.cos().half(), "rotary_sin": angle.sin().half()}
    call |= {"rotary_interleaved": interleaved, "rotary_positions": positions}
    caches = [torch.zeros(1, 8, 1, 64, dtype=FP16) for _ in range(4)]
    slots = torch.arange(8)
    tk.reference.append_kv(k, k, *caches[:2], slot_mapping=slots, **call)
    with tk.emulate("on_wait"):
        tk.append_kv(k, k, *caches[2:], slot_mapping=slots, **call)
    eps = torch.finfo(FP16).eps
    torch.testing.assert_close(caches[2], caches[0], rtol=eps, atol=eps / 4)
    assert torch.equal(caches[3], caches[1])


# ---- new keys ----


@pytest.mark.parametrize("format", [BF16, *CODES], ids=str)
@pytest.mark.parametrize("counts", [[2, 0, 7, 1], [0, 0, 3, 0], [1, 1, 1, 1], [5]])
def test_packed_new_keys(counts, format):
    """Of sequences found by their offsets, and tokens behind the last; pages that are nowhere."""
    batch, tokens = len(counts), sum(counts) + 2
    k, v = (normal((tokens, 2, dim), BF16, "cpu") for dim in (192, 64))
    k_cache, v_cache = empty_caches(9, 4, 2, (192, 64), "NHD", k)
    caches = [torch.where(x.isnan(), 3, x).to(format) for x in (k_cache, v_cache)]
    table = ints([[8, 0, 3], [-1, 9, 1], [2, 5, 7], [-1, 4, 6]])[:batch]
    edges = [sum(counts[:i]) for i in range(batch + 1)]
    before = ints([3, 2, 6, 8])[:batch]
    options = {"page_table": table, "seq_lens": before}
    if format is not BF16:
        options |= {"k_scale": torch.ones(9, 4, 2), "v_scale": torch.ones(9, 4, 2)}
    wanted = {name: x.clone() for name, x in options.items()}
    expected = [x.clone() for x in caches]
    inside = [x[: sum(counts)] for x in (k, v)]
    tk.reference.append_kv(*inside, *expected, cu_seqlens_k_new=ints(edges), **wanted)
    with tk.emulate("random", seed=batch):
        tk.append_kv(k, v, *caches, cu_seqlens_k_new=ints(edges), **options)
    for x, y in zip((*caches, *options.values()), (*expected, *wanted.values()), strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.parametrize("format", [BF16, torch.int8], ids=str)
def test_new_keys_of_any_strides(format):
    """Sequences, tokens and heads lie apart."""
    whole = normal((2, 5, 3, 3, 64), BF16, "cpu")
    k, v = whole[:, :3, :2, 0], whole[:, 1:4, 1:, 2]
    caches = [torch.zeros(2, 8, 2, 64).to(format) for _ in range(4)]
    call = {"seq_lens": ints([3, 0])}
    tk.reference.append_kv(k, v, *caches[:2], **call)
    with tk.emulate("random"):
        tk.append_kv(k, v, *caches[2:], **call)
    for x, y in zip(caches[:2], caches[2:], strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("format", [BF16, torch.int8], ids=str)
@pytest.mark.parametrize("pages", [[-1, 0], [6, 1], [5, -7], [2, 2**30]])
def test_pages_that_are_nowhere_are_not_written(pages, format):
    """Beside the cache there is other memory, which stays as it was."""
    k = normal((1, 5, 1, 64), BF16, "cpu")
    memory = [torch.full((10, 4, 1, 64), 7.0).to(format) for _ in range(2)]
    caches = [x[2:8] for x in memory]
    expected = [x.clone() for x in memory]
    slots = ints([-1, 24, 23, -30, 2**40], torch.int64)  # of 24
    for call in ({"page_table": ints([pages]), "seq_lens": ints([2])}, {"slot_mapping": slots}):
        tk.reference.append_kv(k, k, *[x[2:8] for x in expected], **call)
        with tk.emulate("eager"):
            tk.append_kv(k, k, *caches, **call)
    for x, y in zip(memory, expected, strict=True):
        assert torch.equal(x, y)
