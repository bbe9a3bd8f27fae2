"""`tk.compat.flash_attn_with_kvcache`: flash-attn's arguments, against the reference."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from helpers.cover import cover, over
from helpers.paged import Case, normal
from thunderkittens.reference.attention_paged import attention_of_cache

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def cases(device, intensity):
    return cover(
        {
            "heads": [(6, 6), (6, 1), (6, 3)],
            "new": [None, "all", "some"],
            "mask": ["none", "causal", "local", "chunk"],
            "interleaved": [False, True],
            "rotary": [0, 32, 64],
            "size": [None, 1, 4, 128],
            "leftpad": [False, True],
            "packed": [False, True],
            "num_splits": [0, 1, 3],
            "metadata": [False, True],
            "dtype": [BF16, E4M3],
        },
        intensity,
    )


@over(cases)
def test_values(device, case):
    lengths, appends = [40, 0, 129], case["new"] is not None
    made = Case(
        lengths,
        [3, 0, 2] if case["packed"] else [3, 3, 3],
        case["heads"],
        packed=case["packed"],
        size=case["size"] or 16,
        pages=case["size"] is not None,
        capacity=140,
        device=device,
    )
    caches = [x.nan_to_num(0) for x in (made.k_cache, made.v_cache)]
    table = made.places.to(device) if made.pages else None
    if case["dtype"] is E4M3:
        caches = [x.to(E4M3) for x in caches]
        made.q = made.q.to(E4M3).to(BF16)
    options = {"causal": case["mask"] in ("causal", "chunk")}
    if case["mask"] == "local":
        options["window_size"] = (50, 3)
    if case["mask"] == "chunk":
        options["attention_chunk"] = 33
    if case["leftpad"]:
        options["cache_leftpad"] = made.ints([7, 0, 100])
    count = 3 if case["new"] == "all" else 2
    new, rotary = {}, {}
    if appends:
        shape = (5,) if case["packed"] else (3, count)
        new = {name: normal((*shape, made.heads[1], 64), BF16, device) for name in ("k", "v")}
        if case["packed"]:
            options["cu_seqlens_k_new"] = made.edges([2, 2, 1])
        if case["dtype"] is E4M3:
            new = {name: x.to(E4M3).to(BF16) for name, x in new.items()}
        if case["rotary"]:
            angle = torch.rand(150, case["rotary"] // 2, device=device) * 6
            rotary = {"rotary_cos": angle.cos().to(BF16), "rotary_sin": angle.sin().to(BF16)}
            rotary["rotary_interleaved"] = case["interleaved"]
    packing = {n: made.options[n] for n in ("cu_seqlens_q", "max_seqlen_q") if case["packed"]}
    rows = {} if made.pages else {"cache_batch_idx": made.options["cache_batch_idx"]}
    if not made.pages:  # an empty sequence has no row there
        rows["cache_batch_idx"] = made.places[:, 0].to(device)

    expected = [x.clone() for x in caches]
    if appends:
        places = {**rotary, **rows, "page_table": table, "seq_lens": made.seq_lens}
        if case["packed"]:
            places["cu_seqlens_k_new"] = options["cu_seqlens_k_new"]
        tk.reference.append_kv(new["k"], new["v"], *expected, **places)
    more = {} if case["packed"] or not appends else {"new_keys": count}
    wanted, _ = attention_of_cache(
        made.q.double(),
        *expected,
        table,
        made.seq_lens,
        **{**options, **more, **rotary, **rows, **packing},
        return_lse=True,
    )
    metadata = None
    if case["metadata"]:
        metadata = tk.compat.get_scheduler_metadata(
            3,
            max(made.queries),
            140,
            *made.heads,
            64,
            made.seq_lens,
            case["dtype"],
            **{n: x for n, x in packing.items() if n == "cu_seqlens_q"},
            **options,
            max_seqlen_k_new=count,
            num_splits=case["num_splits"],
        )
    narrow = {n: x.to(case["dtype"]) for n, x in new.items()}
    out, _ = tk.compat.flash_attn_with_kvcache(
        made.q.to(case["dtype"]),
        *caches,
        **narrow,
        **rotary,
        **options,
        **packing,
        **rows,
        cache_seqlens=made.seq_lens,
        page_table=table,
        scheduler_metadata=metadata,
        num_splits=case["num_splits"],
        return_softmax_lse=True,
    )
    assert out.dtype is BF16
    torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=2e-2)
    for x, y in zip(caches, expected, strict=True):
        torch.testing.assert_close(x.float(), y.float(), atol=2e-2, rtol=2**-3 if rotary else 0)


def test_defaults(device):
    """The whole capacity, one length for all, flash-attn 2's names, pages that are not."""
    q, cache = normal((2, 1, 4, 64), BF16, device), normal((2, 30, 2, 64), BF16, device)
    whole = tk.compat.flash_attn_with_kvcache(q, cache, cache)
    torch.testing.assert_close(
        whole, tk.compat.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=30)
    )
    table = torch.tensor([[0], [1]], dtype=torch.int32, device=device)
    paged = tk.compat.flash_attn_with_kvcache(q, cache, cache, block_table=table)
    assert torch.equal(paged, whole)
    expected = tk.compat.flash_attn_func(q, cache, cache)
    torch.testing.assert_close(whole, expected, atol=2e-2, rtol=2e-2)


def test_multi_head_latent_attention_is_refused():
    q = normal((2, 1, 4, 64), BF16, "cpu")
    with pytest.raises(TypeError, match="qv is not supported; it is of multi-head latent"):
        tk.compat.flash_attn_with_kvcache(q, q, q, qv=q)
