"""`tk.attention_schedule`: that parts are equal, for any lengths; wrong calls. What calls do with a
schedule is tested in test_attention_paged.py."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from helpers.attention import emulated
from thunderkittens.bench.accuracy import check
from thunderkittens.bench.suites import attention_schedule

FLAGS = ("test_schema", "test_autograd_registration", "test_faketensor")
HEADER = 4  # integers before the positions, csrc/attention/decode/decode.h
ITEM_COST, BLOCK = 3, 64


def ints(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def positions(schedule, parts):
    """(line, tile, block) where each part begins, and the end; a line is a head of a sequence."""
    return schedule[HEADER : HEADER + 4 * (parts + 1)].reshape(-1, 4)[:, :3].tolist()


def cost_before(position, lengths, heads):
    """Of what lies before a position, by the costs that the kernel counts."""
    line, _, block = position
    blocks = [-(-n // BLOCK) + ITEM_COST for n in lengths] * heads
    return sum(blocks[:line]) + block + (ITEM_COST if block > 0 else 0)


@pytest.mark.emulator
@pytest.mark.parametrize("sms", [1, 7, 40])
@pytest.mark.parametrize(
    "lengths", [[1000], [0, 0], [16, 8000, 500, 0, 64], [100] * 300, [64 * i for i in range(20)]]
)
def test_parts_are_equal(lengths, sms):
    heads = 2
    with tk.emulate(sm_count=sms) as run:
        schedule = tk.attention_schedule(ints(lengths), 8, heads, 128)
        made = tk.attention_schedule(ints(lengths), 8, heads, 128)
    assert torch.equal(schedule[: HEADER + 4 * (2 * sms + 1)], made[: HEADER + 4 * (2 * sms + 1)])
    parts = 2 * sms  # two blocks to a multiprocessor
    at = positions(schedule, parts)
    assert at[0][1:] == [0, 0]
    end = [heads * len(lengths), 0, 0]
    assert at[-1] == end
    assert at == sorted(at)
    costs = [cost_before(position, lengths, heads) for position in at]
    total = cost_before(end, lengths, heads)
    used = at.index(end)
    most = min(parts, total)
    if len({-(-n // BLOCK) for n in lengths}) > 1:
        assert used == most
    else:  # a few less, where fewer items are cut then
        assert most - most // 16 <= used <= most
    for p, cost in enumerate(costs[:used]):
        assert abs(cost - total * p / used) <= ITEM_COST + 1
    assert not run.kernels or all(k["kernel"] for k in run.kernels)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("batch", "heads", "used"),
    [
        (16, 8, 256),  # two parts to an item
        (64, 8, 256),  # two items to a part
        (1, 8, 264),  # 33 parts to an item
        (1, 131, 262),
        (1, 150, 264),  # 150 would be far fewer
        (37, 1, 259),  # seven parts to an item
        (62, 8, 248),  # two items to a part; one part fewer would be too few
        (124, 1, 248),  # two parts to an item, likewise
    ],
)
def test_parts_fit_equal_sequences(batch, heads, used):
    with tk.emulate(sm_count=132):
        schedule = tk.attention_schedule(ints([4096] * batch), heads, heads, 128)
    at = positions(schedule, 264)
    assert at.index([batch * heads, 0, 0]) == used
    if batch > 1:
        assert sum(block > 0 for _, _, block in at) == max(used - batch * heads, 0)


@pytest.mark.emulator
@pytest.mark.parametrize("lengths", [[4096] * 5, [16, 8000, 500, 0, 64]])
@pytest.mark.parametrize(("heads", "of_head"), [(1, 66), (8, 8), (33, 2), (35, None)])
def test_heads_are_cut_alike(lengths, heads, of_head):
    """Where as many parts for each leave out a sixteenth at most: 35 heads would leave out 31."""
    with tk.emulate(sm_count=33):
        schedule = tk.attention_schedule(ints(lengths), heads, heads, 128)
    at = positions(schedule, 66)
    used = at.index([heads * len(lengths), 0, 0])
    if of_head is None:
        assert used > 35
        return
    each = used // heads
    assert used == each * heads
    assert of_head - of_head // 16 <= each <= of_head
    for p in range(used):
        line, tile, block = at[p % each]
        assert at[p] == [p // each * len(lengths) + line, tile, block]


@pytest.mark.emulator
@pytest.mark.parametrize("split", [None, 64])
def test_no_part_has_sequences_without_queries(split):
    offsets = ints([0, 0, 0])
    with tk.emulate(sm_count=5):
        schedule = tk.attention_schedule(
            ints([300, 300]), 8, 2, 64, max_seqlen_q=4, cu_seqlens_q=offsets, split_size=split
        )
    assert positions(schedule, 10) == [[4, 0, 0]] * 11


@pytest.mark.emulator
@pytest.mark.parametrize("sms", [1, 7, 132])
@pytest.mark.parametrize("heads", [(8, 2), (128, 1), (130, 2)])
@pytest.mark.parametrize("lengths", [(16, 8000, 500, 0, 64) * 30, (100,) * 300])
def test_the_benchmark_checks_parts(lengths, heads, sms):
    case = attention_schedule.make_case(lengths, *heads, 128)
    inputs = case.make_inputs(torch.device("cpu"), torch.Generator())
    with tk.emulate(sm_count=sms):
        schedule = attention_schedule.ours(**inputs)
        assert check(case, inputs, {"op": (schedule,)})["op"].passed
        end = heads[1] * len(lengths)
        for place, wrong in ((4 * sms, 0), (4 * sms, end), (0, 1), (8 * sms, 1), (4 * sms + 1, -1)):
            changed = schedule.clone()
            changed[HEADER + place] = wrong
            assert not check(case, inputs, {"op": (changed,)})["op"].passed


@pytest.mark.emulator
def test_a_split_size_cuts_at_its_multiples():
    """Each part begins less than a split before it would without, or at the begin of an item."""
    lengths, heads, blocks = [1000, 10, 777], 2, 3
    with tk.emulate(sm_count=5):
        schedule = tk.attention_schedule(ints(lengths), 8, heads, 128, split_size=64 * blocks)
    at = positions(schedule, 10)
    total = cost_before([heads * len(lengths), 0, 0], lengths, heads)
    for p, position in enumerate(at):
        assert position[2] % blocks == 0
        least = total * p / 10 - blocks - (ITEM_COST if position[2] == 0 else 0)
        assert least < cost_before(position, lengths, heads) <= total * p / 10


def test_opcheck(device):
    op = torch.ops.thunderkittens.attention_schedule.default
    args = (ints([37, 5], device), 8, 2, 64, 64)
    if not emulated(device):
        torch.library.opcheck(op, args, test_utils=FLAGS)


WRONG = [
    (([1.0],), {}, TypeError, "seq_lens must be a torch.Tensor"),
    ((torch.zeros(2),), {}, TypeError, "seq_lens is torch.float32; it must be torch.int32"),
    ((ints([[1]]),), {}, ValueError, "it must have one dimension"),
    ((ints([1]), 3, 2), {}, ValueError, "k has 2 heads, q has 3"),
    ((ints([1]), 2, 2, 100), {}, ValueError, "q has head dim 100; it must be a multiple of 8"),
    ((ints([1]), 2, 2, 64), {"split_size": 70}, ValueError, "split_size is 70; it must be a"),
    ((ints([1]), 2, 2, 64), {"new_keys": -1}, ValueError, "new_keys is -1; it must be at least 0"),
    ((ints([1]),), {"cu_seqlens_q": ints([1])}, ValueError, "cu_seqlens_q has 1 elements"),
]


@pytest.mark.parametrize(("args", "options", "error", "words"), WRONG)
def test_wrong_calls(device, args, options, error, words):
    def moved(x):
        return x.to(device) if isinstance(x, torch.Tensor) else x

    args = (*map(moved, args), *(8, 2, 64)[len(args) - 1 :])
    options = {name: moved(x) for name, x in options.items()}
    with pytest.raises(error, match=f"tk.attention_schedule: .*{words}"):
        tk.attention_schedule(*args, **options)
