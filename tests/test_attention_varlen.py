"""`tk.attention_varlen`: values and gradients of packed sequences, sequence by sequence, and what
lies beside them; wrong calls."""

from __future__ import annotations

import sys
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

import thunderkittens as tk
from helpers.attention import (
    BF16,
    DIMS,
    EMULATED_DIMS,
    FP16,
    FP32,
    HEADS,
    INF,
    MASKS,
    SCORES,
    assert_attention,
    assert_gradients,
    call_options,
    emulated,
    gradient_devices,
    gradients,
    normal,
    plain_attention,
    plain_low_lse,
    plain_lse,
    sink_noise,
)
from helpers.cover import alternate, cover, over
from helpers.guard import assert_guards_intact
from helpers.layouts import embed

LENGTHS = {  # of each sequence, in q and in k
    "one": [(70, 90)],
    "equal": [(65, 65)] * 3,
    "mixed": [(5, 7), (64, 64), (1, 130), (129, 40)],
    "empty": [(0, 0), (3, 0), (0, 9), (40, 33), (0, 0)],
    "all empty": [(0, 0), (0, 0)],
    "none": [],
    "ones": [(1, 1)] * 9,
}
LONG = {
    "many": [(i * 37 % 300, i * 53 % 400) for i in range(40)],
    "long": [(1023, 1024), (17, 2048), (2048, 2048)],
    "decode": [(1, 1000 + 111 * i) for i in range(8)],
    "short and long": [(4099, 4099), (1, 1), (130, 7)],
}
LAYOUTS = ("packed", "sliced", "projection", "heads_first", "spread")


def place(x, layout):
    """(T, H, D) in one of LAYOUTS."""
    if layout == "sliced":
        return embed(x)
    if layout == "projection":  # q, k and v of one token side by side
        return torch.stack([x * torch.nan, x, x * torch.nan], 1)[:, 1]
    if layout == "heads_first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "spread":
        return torch.stack([x, x * torch.nan], 3)[..., 0]
    return x


class Batch:
    """Operands of a case, with `tail` tokens of NaN after the last sequence."""

    def __init__(self, case, device, tail=3):
        lengths = case["lengths"]
        self.lengths = {**LENGTHS, **LONG}[lengths] if isinstance(lengths, str) else lengths
        self.edges = [[0, *accumulate(pair[i] for pair in self.lengths)] for i in (0, 1)]
        (heads_q, heads_k), (dim, value_dim) = case["heads"], case["dim"]
        self.tensors = []
        for side, heads, width in ((0, heads_q, dim), (1, heads_k, dim), (1, heads_k, value_dim)):
            x = normal((self.edges[side][-1] + tail, heads, width), case["dtype"], device)
            x[self.edges[side][-1] :] = torch.nan
            self.tensors.append(x)
        self.options = call_options(case, device, batch=len(self.lengths))
        self.packing = (
            *(torch.tensor(e, dtype=torch.int32, device=device) for e in self.edges),
            *(max((pair[i] for pair in self.lengths), default=0) + case["slack"] for i in (0, 1)),
        )

    def parts(self, *tensors, side=None):
        """Each sequence of (T, H, D) tensors, by default q, k and v, as (1, H, S, D)."""
        sides = (0, 1, 1) if side is None else (side,) * len(tensors)
        for index in range(len(self.lengths)):
            yield [
                x[slice(*self.edges[s][index : index + 2])].transpose(0, 1).unsqueeze(0)
                for s, x in zip(sides, tensors, strict=True)
            ]

    def part_options(self):
        """The options of each sequence: a row of the slopes."""
        slopes = self.options.get("alibi_slopes")
        for index in range(len(self.lengths)):
            if slopes is not None and slopes.dim() == 2:
                yield {**self.options, "alibi_slopes": slopes[index]}
            else:
                yield self.options

    def logs(self, lse):
        """Each sequence of (H, T), as (1, H, S)."""
        return [lse[:, a:b].unsqueeze(0).contiguous() for a, b in pairwise(self.edges[0])]


def cases(device, intensity):
    return cover(
        {
            "lengths": [*LENGTHS, *(LONG if device == "cuda" else {})],
            "dim": EMULATED_DIMS if emulated(device) else DIMS,
            "heads": HEADS,
            "mask": MASKS,
            "scores": SCORES,
            "layout": LAYOUTS,
            "dtype": [BF16, FP16],
            "scale": [None, -0.05],
            "slack": [0, 100],
            "lse": [True, False],
        },
        intensity,
    )


@over(cases)
def test_accuracy(device, case):
    batch = Batch(case, device)
    q, k, v = batch.tensors
    placed = [place(x, case["layout"]) for x in (q, k, v)]
    result = tk.attention_varlen(*placed, *batch.packing, **batch.options, return_lse=case["lse"])
    out, lse = result if case["lse"] else (result, None)
    assert out.shape == (*q.shape[:2], v.shape[2])
    if q.shape == out.shape:
        assert out.stride() == torch.empty_like(placed[0]).stride()
    assert bool((out[batch.edges[0][-1] :] == 0).all())
    logs = [None] * len(batch.lengths)
    if lse is not None:
        assert lse.shape == (q.shape[1], q.shape[0])
        assert bool((lse[:, batch.edges[0][-1] :] == -INF).all())
        logs = batch.logs(lse)
    for (part,), log, operands, options in zip(
        batch.parts(out, side=0), logs, batch.parts(q, k, v), batch.part_options(), strict=True
    ):
        assert_attention(part if log is None else (part, log), *operands, **options)


def gradient_cases(device, intensity):
    if not gradient_devices(device):
        return []
    return cover(
        {
            "lengths": [*LENGTHS, *(LONG if device == "cuda" else {})],
            "dim": EMULATED_DIMS if emulated(device) else DIMS,
            "heads": HEADS,
            "mask": MASKS,
            "scores": SCORES,
            "layout": LAYOUTS,
            "dtype": [BF16, FP16],
            "scale": [None, -0.1],
            "slack": [0, 100],
            "lse": ["out", "both"],
            "needs": [(1, 1, 1, 1), (1, 0, 0, 0), (0, 1, 1, 0), (0, 0, 1, 0), (0, 0, 0, 1)],
            "deterministic": [None, False, True],
        },
        intensity,
    )


@over(gradient_cases)
def test_gradients(device, case):
    batch = Batch(case, device)
    q, k, v = batch.tensors
    sink = batch.options.pop("sink", None)
    tensors = [q, k, v] + ([] if sink is None else [sink])
    needs = [bool(n) for n in case["needs"][: len(tensors)]]
    if not any(needs):
        needs[0] = True
    grad_out = normal((*q.shape[:2], v.shape[2]), q.dtype, device)
    grad_out[batch.edges[0][-1] :] = torch.nan
    grad_lse = torch.randn(q.shape[1], q.shape[0], device=device)

    leaves = [
        (place(x, case["layout"]) if x.dim() == 3 else x).detach().requires_grad_(need)
        for x, need in zip(tensors, needs, strict=True)
    ]
    hidden = torch.cat(
        [
            plain_lse(x, y, **{**options, "sink": sink})[0] == -INF
            for (x, y, _), options in zip(batch.parts(q, k, v), batch.part_options(), strict=True)
        ]
        or [torch.zeros(q.shape[1], 0, dtype=torch.bool, device=device)],
        1,
    )
    grad_lse[:, : hidden.shape[1]][hidden] = 0

    def call(q, k, v, sink=None):
        return tk.attention_varlen(
            q, k, v, *batch.packing, **batch.options, sink=sink,
            deterministic=case["deterministic"], return_lse=True,
        )  # fmt: skip

    actual = gradients(call, leaves, case["lse"], grad_out, grad_lse)

    def expected_with(function, convert):
        """Sums over the sequences of what `function` gives for each."""
        whole = [convert(x).detach().requires_grad_(n) for x, n in zip(tensors, needs, strict=True)]
        sums = [torch.zeros_like(x) for x in whole if x.requires_grad]
        for index, options in enumerate(batch.part_options()):
            rows = slice(*batch.edges[0][index : index + 2])
            columns = slice(*batch.edges[1][index : index + 2])
            if rows.start == rows.stop:
                continue
            dense = [
                x[s].transpose(0, 1).unsqueeze(0)
                for x, s in zip(whole, (rows, columns, columns), strict=False)
            ] + whole[3:]
            out, lse = function(*dense[:3], **{**options, "sink": [*dense, None][3]})
            outputs = [(out, grad_out[rows].transpose(0, 1).unsqueeze(0).to(out.dtype))]
            if case["lse"] == "both":
                outputs.append((lse, grad_lse[:, rows].unsqueeze(0).to(lse.dtype)))
            outputs = [pair for pair in outputs if pair[0].requires_grad]
            if not outputs:
                continue
            parts = torch.autograd.grad(
                [x for x, _ in outputs],
                [x for x in whole if x.requires_grad],
                [g for _, g in outputs],
                allow_unused=True,
            )
            for total, part in zip(sums, parts, strict=True):
                if part is not None:
                    total += part.nan_to_num()
        return sums

    expected = expected_with(
        lambda *x, **o: tk.reference.attention(*x, **o, return_lse=True), torch.Tensor.double
    )
    plain = expected_with(
        lambda q, k, v, **o: (plain_attention(q, k, v, **o), plain_low_lse(q, k, **o)),
        lambda x: x,
    )
    noise = 0.0
    if sink is not None:
        noise = sum(
            (
                sink_noise(*operands, *grad, **{**options, "sink": sink})
                for operands, grad, options in zip(
                    batch.parts(q, k, v),
                    batch.parts(grad_out, side=0),
                    batch.part_options(),
                    strict=True,
                )
            ),
            0.0,
        )
    assert_gradients(actual, expected, plain, noise=noise)


def example(device, dtype=BF16, dim=64, lengths="mixed", heads=(4, 2), **case):
    values = {"lengths": lengths, "dim": (dim, dim), "heads": heads, "dtype": dtype, "slack": 0}
    return Batch({**values, **case}, device, tail=0)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), max_size=6),
    heads=st.sampled_from(HEADS),
    dim=st.sampled_from([(64, 64), (40, 72)]),
    mask=st.sampled_from(MASKS),
    scores=st.sampled_from(SCORES),
    tail=st.integers(0, 70),
)
def test_any_lengths(device, lengths, heads, dim, mask, scores, tail):
    case = {"lengths": lengths, "heads": heads, "dim": dim, "dtype": BF16, "slack": 0}
    batch = Batch({**case, "mask": mask, "scores": scores}, device, tail=tail)
    out, lse = tk.attention_varlen(*batch.tensors, *batch.packing, **batch.options, return_lse=True)
    assert bool((out[batch.edges[0][-1] :] == 0).all())
    for (part,), log, operands, options in zip(
        batch.parts(out, side=0),
        batch.logs(lse),
        batch.parts(*batch.tensors),
        batch.part_options(),
        strict=True,
    ):
        assert_attention((part, log), *operands, **options)


@alternate(("dim", "causal"), [64, 96, 128, 256], [False, True])
def test_neighbours_do_not_touch(device, causal, dim):
    """NaN and infinities in one sequence stay there, forward and backward."""
    batch = example(device, dim=dim)
    clean = [x.clone() for x in batch.tensors]
    for side, x in zip((0, 1, 1), batch.tensors, strict=True):
        for index, value in ((1, torch.nan), (3, torch.inf)):
            x[slice(*batch.edges[side][index : index + 2])] = value
    results = []
    for tensors in (clean, batch.tensors):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out, lse = tk.attention_varlen(*leaves, *batch.packing, causal=causal, return_lse=True)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        results.append([out, lse.t(), *grads])
    for side, x, y in zip((0, 0, 0, 1, 1), *results, strict=True):
        for index in (0, 2):
            part = slice(*batch.edges[side][index : index + 2])
            assert torch.equal(x[part], y[part])


def test_many_rows_behind_the_last_sequence(device):
    """Several tiles of each head: they see nothing, whatever they hold."""
    q, k, v = (torch.randn(n, 3, 64, dtype=BF16, device=device) for n in (300, 70, 70))
    ends = torch.tensor([0, 70], dtype=torch.int32, device=device)
    q[70:] = torch.nan
    out, lse = tk.attention_varlen(q, k, v, ends, ends, 70, 70, return_lse=True)
    assert not out[70:].any()
    assert bool((lse[:, 70:] == -torch.inf).all())
    alone = tk.attention_varlen(q[:70], k, v, ends, ends, 70, 70)
    assert torch.equal(out[:70], alone)
    one = [x[:70].transpose(0, 1)[None] for x in (q, k, v)]
    assert_attention((out[:70].transpose(0, 1)[None], lse[None, :, :70].contiguous()), *one)


def test_equal_lengths_are_a_batch(device):
    """The same as `tk.attention` of the sequences side by side."""
    batch = example(device, lengths="equal")
    dense = [x.unflatten(0, (3, 65)).transpose(1, 2) for x in batch.tensors]
    for options in ({"causal": True}, {"window_size": (9, 4), "softcap": 3.0}):
        packed = tk.attention_varlen(*batch.tensors, *batch.packing, **options)
        expected = tk.attention(*dense, **options).transpose(1, 2).flatten(0, 1)
        torch.testing.assert_close(packed, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
def test_more_sequences_than_a_grid_is_wide(device):
    count, length = 70000, 3
    edges = torch.arange(0, length * count + 1, length, dtype=torch.int32, device=device)
    tensors = [normal((length * count, 1, 8), BF16, device) for _ in range(4)]
    results = []
    for n in (count, 5):
        leaves = [x[-n * length :].detach().requires_grad_() for x in tensors[:3]]
        packing = (edges[: n + 1], edges[: n + 1], length, length)
        out = tk.attention_varlen(*leaves, *packing, causal=True)
        results.append([out, *torch.autograd.grad(out, leaves, tensors[3][-n * length :])])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x[-5 * length :], y, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("lengths", ["mixed", "ones"])
def test_one_token_for_all(device, lengths):
    """Operands and gradients expanded over the tokens: rows that are no distance apart."""
    batch = example(device, lengths=lengths)
    for scale in (None, -0.1):
        results = []
        for place in (torch.Tensor.contiguous, torch.Tensor.detach):
            leaves = [place(x[:1].expand_as(x)).requires_grad_() for x in batch.tensors]
            out = tk.attention_varlen(*leaves, *batch.packing, scale=scale, deterministic=True)
            grad = place(torch.ones_like(out)[:1].expand_as(out))
            results.append([out, *torch.autograd.grad(out, leaves, grad)])
        for x, y in zip(*results, strict=True):
            assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"causal": True, "window_size": (50, 0)}], ids=str)
def test_no_synchronisation(device, options):
    batch = example(device, lengths="many")
    leaves = [x.requires_grad_() for x in batch.tensors]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tk.attention_varlen(*leaves, *batch.packing, **options).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_graph_serves_other_lengths(device):
    """The lengths are read when the kernels run."""
    batch = example(device, lengths="mixed")
    q, k, v = batch.tensors
    edges = [x.clone() for x in batch.packing[:2]]
    call = lambda: tk.attention_varlen(q, k, v, *edges, 300, 300, causal=True)  # noqa: E731
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for lengths in ([0, 50, 60, 61, 199], [0, 0, 199, 199, 199], [0, 1, 2, 3, 4]):
        edges[0].copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, call())


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_writes_nothing_outside(device, dim):
    batch = example(device, dim=dim, lengths="long", heads=(8, 2))
    assert_guards_intact(
        lambda: tk.attention_varlen(*batch.tensors, *batch.packing, causal=True, return_lse=True)
    )


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_code_serves_all_lengths(device):
    """One recompilation, for sizes that change at all, and none after it."""
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def step(q, k, v, edges_q, edges_k, longest_q, longest_k):
        return tk.attention_varlen(
            q, k, v, edges_q, edges_k, longest_q, longest_k, causal=True, window_size=(20, -1)
        )

    counts = []
    for lengths in ("mixed", "equal", "empty", "one", "ones", "mixed"):
        batch = example(device, lengths=lengths, slack=len(lengths))
        leaves = [x.requires_grad_() for x in batch.tensors]
        out = step(*leaves, *batch.packing)
        grads = torch.autograd.grad(out.float().square().sum(), leaves)
        expected = tk.attention_varlen(*leaves, *batch.packing, causal=True, window_size=(20, -1))
        torch.testing.assert_close(out, expected)
        assert all(bool(torch.isfinite(x).all()) for x in grads)
        counts.append(counter.frame_count)
    assert counts[-1] == counts[1] <= 2


def test_double_backward_is_refused(device):
    batch = example(device)
    leaves = [x.requires_grad_() for x in batch.tensors]
    out = tk.attention_varlen(*leaves, *batch.packing)
    (grad,) = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"tk.attention_varlen: .*double backward"):
        grad.sum().backward()


def test_blocks_of_the_gradient(device, monkeypatch):
    """Several blocks per sequence give what one gives."""
    batch = example(device, dtype=FP16, scores=("softcap", "sink"))
    leaves = [x.requires_grad_() for x in batch.tensors]
    results = []
    for scores in (1, 1 << 26):
        module = sys.modules["thunderkittens.reference.attention"]
        monkeypatch.setattr(module, "_BLOCK_SCORES", scores)
        out = tk.attention_varlen(*leaves, *batch.packing, **batch.options)
        results.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, atol=2e-3, rtol=2e-2)


# Wrong calls


def zeros(*shape, dtype=BF16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def edges(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


Q, K = zeros(9, 4, 64), zeros(11, 2, 64)
GOOD = {
    "q": Q,
    "k": K,
    "v": K,
    "cu_seqlens_q": edges(0, 4, 9),
    "cu_seqlens_k": edges(0, 4, 11),
    "max_seqlen_q": 5,
    "max_seqlen_k": 7,
}
WRONG = {
    "4 dimensions": (ValueError, "must have 3 dimensions, (tokens, H, D)", {"q": Q[None]}),
    "tokens of v": (ValueError, "k has 11 tokens of 2 heads, v has 10 of 2", {"v": K[:10]}),
    "heads": (ValueError, "k has 3 heads, q has 4; q's heads",
              dict.fromkeys("kv", zeros(11, 3, 64))),
    "head dim": (ValueError, "q has head dim 60", {"q": Q[..., :60]}),
    "head dim of k": (ValueError, "q has head dim 64, k has 32", {"k": K[..., :32]}),
    "head dim of v": (ValueError, "v has head dim 4", {"v": K[..., :4]}),
    "float32": (TypeError, "q is torch.float32", {"q": Q.float()}),
    "lengths list": (TypeError, "cu_seqlens_q must be a torch.Tensor, got list",
                     {"cu_seqlens_q": [0, 9]}),
    "lengths int64": (TypeError, "cu_seqlens_k is torch.int64; it must be torch.int32",
                      {"cu_seqlens_k": edges(0, 4, 11, dtype=torch.int64)}),
    "lengths elsewhere": (TypeError, "cu_seqlens_k is on meta, q is on",
                          {"cu_seqlens_k": edges(0, 4, 11).to("meta")}),
    "no lengths": (ValueError, "cu_seqlens_q has shape (0,)", {"cu_seqlens_q": edges()}),
    "lengths 2-D": (ValueError, "it must be (sequences + 1,)", {"cu_seqlens_q": edges(0, 9)[None]}),
    "lengths apart": (ValueError, "strides (2,)", {"cu_seqlens_q": edges(0, 0, 4, 4, 9)[::2]}),
    "different counts": (ValueError, "cu_seqlens_q has 3 elements, cu_seqlens_k has 2",
                         {"cu_seqlens_k": edges(0, 11)}),
    "maximum float": (TypeError, "max_seqlen_q must be an integer, got float",
                      {"max_seqlen_q": 5.0}),
    "maximum tensor": (TypeError, "max_seqlen_k must be an integer, got Tensor",
                       {"max_seqlen_k": edges(7)}),
    "maximum negative": (ValueError, "max_seqlen_k is -1; it must not be", {"max_seqlen_k": -1}),
    "slopes": (ValueError, "alibi_slopes has shape (3, 4); it must be (4,) or (2, 4)",
               {"alibi_slopes": zeros(3, 4, dtype=FP32)}),
    "attn_mask": (TypeError, "tk.attention_varlen: got an unexpected keyword argument 'attn_mask'; "
                  "arbitrary masks", {"attn_mask": None}),
    "causal": (ValueError, "tk.attention_varlen: causal is 'left'", {"causal": "left"}),
    "window": (ValueError, "tk.attention_varlen: window_size is (-3, 0)", {"window_size": (-3, 0)}),
}  # fmt: skip
# What a call on a GPU cannot know.
WRONG_VALUES = {
    "first not 0": ("cu_seqlens_q is [1, 4, 9]; it must start with 0",
                    {"cu_seqlens_q": edges(1, 4, 9)}),
    "decreasing": ("cu_seqlens_k is [0, 12, 11]", {"cu_seqlens_k": edges(0, 12, 11)}),
    "beyond the tokens": ("not exceed the 9 tokens", {"cu_seqlens_q": edges(0, 4, 10)}),
    "longer than the maximum": ("max_seqlen_k is 6; a sequence has 7", {"max_seqlen_k": 6}),
}  # fmt: skip


def with_strides(x, device):
    """The tensor on the device, with the gaps between its elements that `to` would close."""
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device).copy_(x)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(device, name):
    error, words, changes = WRONG[name]
    call = {
        key: with_strides(x, device) if isinstance(x, torch.Tensor) and x.is_cpu else x
        for key, x in {**GOOD, **changes}.items()
    }
    with pytest.raises(error) as caught:
        tk.attention_varlen(**call)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_wrong_lengths_on_a_cpu(name):
    words, changes = WRONG_VALUES[name]
    with pytest.raises(ValueError) as caught:
        tk.attention_varlen(**{**GOOD, **changes})
    assert words in str(caught.value)
