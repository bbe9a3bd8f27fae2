"""`tk.attention_paged` of many queries, which the kernels of `tk.attention` answer: values over
pages, layouts and options, and which calls they are."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from helpers.attention import emulated
from helpers.cover import cover, over
from helpers.paged import LAYOUTS, Case
from thunderkittens import _C, info

BF16, FP16 = torch.bfloat16, torch.float16
# Sequences with more queries than keys, without keys, and with keys before the queries.
QUERIES, LENGTHS = [150, 3, 129, 300], [331, 0, 200, 90]


def cases(device, intensity):
    return cover(
        {
            "dims": [(64, 64), (128, 128), (80, 40), (192, 128), (256, 256)],
            "heads": [(2, 1), (3, 3)],
            "size": [8, 16, 24, 64, 256, None],
            "packed": [True, False],
            "layout": LAYOUTS,
            "dtype": [BF16, FP16],
            "options": ["plain", "window", "softcap", "alibi", "sink", "full"],
        },
        intensity,
    )


def case_of(case, device):
    kind, heads = case["options"], case["heads"]
    options = {
        "plain": {},
        "window": {"window_size": (100, -1)},
        "softcap": {"softcap": 3.0},
        "alibi": {"alibi_slopes": torch.rand(heads[0], device=device)},
        "sink": {"sink": torch.randn(heads[0], device=device)},
        "full": {"causal": False},
    }[kind]
    pages = case["size"] is not None
    queries = QUERIES if case["packed"] else [140] * len(LENGTHS)
    fields = {name: case[name] for name in ("heads", "dims", "layout", "dtype", "packed")}
    fields |= {"pages": pages, "size": case["size"] or 1}
    return Case(LENGTHS, queries, device=device, options=options, **fields)


@over(cases)
def test_values(device, case):
    made = case_of(case, device)
    made.check(*made.run())


def kernel_of(made, **more):
    """The name of the kernel that answers a call, whose values are checked."""
    with tk.emulate("on_wait") as run:
        out, lse = made.run(**more)
    made.check(out, lse, **more)
    return run.kernels[-1]["kernel"]


def long_case(**fields):
    return Case([200, 140], [130, 126], (2, 1), packed=True, **fields)


@pytest.mark.emulator
def test_which_calls_they_are():
    """At least 128 queries on average, of caches whose pages one transfer after another reaches."""
    assert kernel_of(long_case()).startswith("forward_bf16_d64_")
    assert kernel_of(Case([200, 140], [130, 125], (2, 1), packed=True)).startswith("decode_")
    assert kernel_of(long_case(size=12)).startswith("decode_")
    assert kernel_of(long_case(), split_size=64).startswith("decode_")
    assert kernel_of(long_case(), cache_leftpad=torch.tensor([3, 0]).int()).startswith("decode_")
    assert kernel_of(long_case(), attention_chunk=50).startswith("decode_")
    words = torch.randint(-(2**31), 2**31 - 1, (256, 5), dtype=torch.int32)
    assert kernel_of(long_case(), mask=words).startswith("decode_")


@pytest.mark.emulator
def test_pages_between_rows():
    """Pages that do not lie a whole number of rows apart, which the kernels of attention refuse."""
    made = long_case()
    for name in ("k_cache", "v_cache"):
        x = getattr(made, name)
        page = x[0].numel() + 8
        memory = torch.full((len(x) * page,), torch.nan, dtype=x.dtype)
        y = memory.as_strided(x.shape, (page, *x.stride()[1:]))
        y.copy_(x)
        setattr(made, name, y)
        assert kernel_of(made).startswith("decode_")


def test_new_keys(device):
    """Written by the call, then seen."""
    made = Case([0, 70], [130, 130], (2, 1), capacity=200, size=8, device=device)
    for b in range(2):
        made.table[b] = made.places[b].to(device)
    k, v = (torch.randn(2, 130, 1, 64, device=device).to(BF16) for _ in range(2))
    out, lse = made.run(k=k, v=v)
    for b, n in enumerate((130, 200)):
        made.table[b, -(-n // made.size) :] = -1
    made.check(out, lse, new_keys=130)


def test_tokens_behind_the_last_sequence(device):
    made = Case([200, 140], [150, 126], (2, 1), packed=True, device=device)
    made.q = torch.cat((made.q, made.q[:70]))
    out, lse = made.run()
    count = sum(made.queries)
    if emulated(device) or device == "cuda":
        assert not bool(out[count:].any())
        assert bool((lse[:, count:] == -torch.inf).all())
    made.q = made.q[:count]
    made.check(out[:count], lse[:, :count])


@pytest.mark.parametrize("policy", ["eager", "late_mma", "random"])
@pytest.mark.emulator
def test_rings_of_pages_that_wrap(policy):
    """One multiprocessor has all tiles, of more key blocks than stages."""
    made = Case([900, 500], [129, 127], (2, 1), (128, 128), 16, packed=True)
    with tk.emulate(policy, seed=3, sm_count=1):
        out, lse = made.run()
    made.check(out, lse)


def test_the_choice_asks_for_many_queries_alone():
    problem = {"batch": 4, "q_heads": 8, "kv_heads": 2, "head_dim": 128, "value_dim": 128}
    problem |= {"q_length": 600, "k_length": 1000, "page_size": 16}

    device = _C.DeviceProperties(**info.EXAMPLE_GPU)

    def prefills(**more):
        return _C.choose("attention_paged", {**problem, "tokens": 512, **more}, device)["prefill"]

    assert prefills()
    assert not prefills(tokens=511)
    assert not prefills(page_size=20)
    assert not prefills(codes=True)
    assert not prefills(rotary=True)
