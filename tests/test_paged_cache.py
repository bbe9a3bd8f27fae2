"""`tk.nn.PagedCache`: generation loops against attention over all that each sequence has seen."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing

import thunderkittens as tk
from helpers.numerics import assert_accurate
from thunderkittens import reference
from thunderkittens.nn import paged
from thunderkittens.reference.append_kv import rotate

BF16, FP64 = torch.bfloat16, torch.float64
LAYERS, BATCH, HEADS, KV_HEADS, DIM, VALUE_DIM = 2, 3, 4, 2, 16, 24


def make(dtype=FP64, device="cpu", **options):
    options = {"max_length": 40, "page_size": 8, "value_dim": VALUE_DIM, **options}
    return tk.nn.PagedCache(
        LAYERS, BATCH, KV_HEADS, options.pop("head_dim", DIM), dtype=dtype, device=device, **options
    )


def tokens(*shape, dtype=FP64, device="cpu", dims=(DIM, VALUE_DIM)):
    """Queries, keys and values of new tokens."""
    sizes = (HEADS, dims[0]), (KV_HEADS, dims[0]), (KV_HEADS, dims[1])
    return [torch.randn(*shape, *size, device=device).to(dtype) for size in sizes]


class Loop:
    """A loop over a cache in float64, and what each sequence has seen, of each layer."""

    def __init__(self, cache, **options):
        self.cache, self.options = cache, options
        self.seen = [[None] * BATCH for _ in range(LAYERS)]

    def step(self, count, rows=None, lengths=None, **options):
        chosen = list(range(BATCH)) if rows is None else rows
        self.cache.reserve(count, rows)
        index = None if rows is None else torch.tensor(rows, dtype=torch.int32)
        step = self.cache.step(count, rows=index, **options)
        for layer in range(LAYERS):
            q, k, v = tokens(len(chosen), count)
            out = step.attend(layer, q, k, v, **self.options)
            assert out.shape == (len(chosen), count, HEADS, VALUE_DIM)
            for n, row in enumerate(chosen):
                if int(self.cache.lengths[row]) >= 0:
                    real = count if lengths is None else lengths[n]
                    self.check(layer, row, *(x[n, :real] for x in (q, k, v)), out[n, :real])
        step.advance(None if lengths is None else torch.tensor(lengths, dtype=torch.int32))

    def check(self, layer, row, q, k, v, out):
        before = self.seen[layer][row]
        k, v = (
            (k, v) if before is None else (torch.cat(x) for x in zip(before, (k, v), strict=True))
        )
        self.seen[layer][row] = k, v
        operands = (x.transpose(0, 1)[None] for x in (q, k, v))
        wanted = reference.attention(*operands, causal=True, **self.options)
        torch.testing.assert_close(out, wanted[0].transpose(0, 1))

    def end(self, row):
        for layer in self.seen:
            layer[row] = None


@pytest.mark.parametrize(
    "options", [{}, {"window_size": (5, 0), "softcap": 3.0, "sink": torch.randn(HEADS).double()}]
)
def test_a_loop(options):
    """Prompts of several lengths, steps of one and of several tokens, of which some are not
    accepted, sequences that end, and a new one that begins beside those that run."""
    loop = Loop(make(pages=13), **options)
    cache = loop.cache
    loop.step(11, lengths=[11, 4, 7], prompt=True)
    cache.synchronize()
    assert cache.lengths.tolist() == [11, 4, 7]
    for _ in range(3):
        loop.step(1)
    loop.step(3, lengths=[3, 1, 2])
    cache.synchronize()
    assert cache.lengths.tolist() == [17, 8, 12]
    cache.finish([0])
    loop.end(0)
    table = cache.page_table.tolist()
    assert table[0] == [-1] * 5
    loop.step(2)
    assert cache.lengths.clamp(min=-1).tolist() == [-1, 10, 14]
    cache.reset([0])
    loop.step(6, rows=[0], prompt=True)
    loop.step(2, rows=[2, 0])
    loop.step(1)
    assert cache.lengths.tolist() == [9, 11, 17]
    pages = [page for row in cache.page_table.tolist() for page in row if page >= 0]
    assert len(set(pages)) == len(pages) == 2 + 2 + 3
    cache.reset()
    loop.seen = [[None] * BATCH for _ in range(LAYERS)]
    loop.step(2)
    assert cache.lengths.tolist() == [2, 2, 2]


def test_sequences_that_do_not_run():
    """Nothing of the cache changes by them, and no page is read."""
    cache = make()
    for x in (*cache.k, *cache.v):
        x.fill_(torch.nan)
    cache.finish([1])
    cache.reserve(1)
    step = cache.step(1)
    assert step.lengths.clamp(min=-1).tolist() == [0, -1, 0]
    assert step.positions.tolist() == [[0], [0], [0]]
    q, k, v = tokens(BATCH, 1)
    out = step.attend(1, q, k, v)
    step.advance()
    assert not out[1].any()
    assert cache.lengths.clamp(min=-1).tolist() == [1, -1, 1]
    assert int(cache.k[1].isfinite().all(-1).sum()) == 2 * KV_HEADS
    assert bool(cache.k[0].isnan().all())


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved):
    """Queries and keys are rotated by their positions, in prompts and in steps."""
    cache = make(page_size=3)
    angles = torch.outer(torch.arange(40).double(), torch.rand(8).double())
    options = {"rotary_interleaved": interleaved}
    options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    seen = []
    for count in (5, 1, 2):
        cache.reserve(count)
        step = cache.step(count, prompt=not seen)
        q, k, v = tokens(BATCH, count)
        out = step.attend(0, q, k, v, **options)
        at = step.positions.flatten()
        table = options["rotary_cos"], options["rotary_sin"], at, interleaved
        q, k = (rotate(x.flatten(0, 1), *table).view(x.shape) for x in (q, k))
        seen.append((k, v))
        step.advance()
        keys, values = (torch.cat(x, 1) for x in zip(*seen, strict=True))
        operands = (x.transpose(1, 2) for x in (q, keys, values))
        wanted = reference.attention(*operands, causal=True).transpose(1, 2)
        torch.testing.assert_close(out, wanted)


def test_layers_share_a_schedule(monkeypatch):
    """Those of the same window, in each step."""
    made = []

    def schedule(*args, **options):
        made.append(options["window_size"])
        return tk.attention_schedule(*args, **options)

    monkeypatch.setattr(paged, "attention_schedule", schedule)
    cache = make(BF16, value_dim=DIM)
    for _ in range(2):
        cache.reserve(1)
        step = cache.step(1)
        for window in ((-1, -1), (4, 0), (-1, -1)):
            step.attend(0, *tokens(BATCH, 1, dtype=BF16, dims=(DIM, DIM)), window_size=window)
        step.advance()
    assert made == [(-1, -1), (4, 0)] * 2


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        (BF16, "token"),
        (torch.float8_e4m3fn, "token"),
        (torch.int8, "token"),
        (torch.int8, "tensor"),
        (torch.float4_e2m1fn_x2, "token"),
    ],
)
def test_kernels(dtype, scales):
    """A prompt and two steps, one sequence of which has ended, on the emulator: the cache is that
    of the formula, and what is read of it too."""
    options = {"head_dim": 64, "value_dim": 64, "page_size": 16, "scales": scales}
    caches = [make(dtype, **options) for _ in range(2)]
    for cache in caches:
        cache.finish([1])
        for factors in (cache.k_scales or [], cache.v_scales or []):
            for factor in factors:
                factor.fill_(0.03)
    for count, prompt in ((18, True), (1, False), (3, False)):
        q, k, v = tokens(BATCH, count, dtype=BF16, dims=(64, 64))
        results = []
        for cache in caches:
            cache.reserve(count)
            step = cache.step(count, prompt=prompt)
            if cache is caches[0]:
                with tk.emulate():
                    results.append(step.attend(0, q, k, v))
            else:
                results.append(step.attend(0, q, k, v))
            lengths = step.lengths.clone()
            step.advance()
        ours, theirs = caches
        written = ours.lengths > 0
        for x, y in zip((ours.k[0], ours.v[0]), (theirs.k[0], theirs.v[0]), strict=True):
            used = ours.page_table[written][:, :1].flatten().long()
            here = (z.view(torch.uint8)[used][:, : int(ours.lengths.max())] for z in (x, y))
            assert torch.equal(*here)
        factors = {}
        if ours.codes:
            factors = {"k_scale": theirs.k_scales[0], "v_scale": theirs.v_scales[0]}
        if theirs.k_block_scales:
            factors["k_block_scale"] = theirs.k_block_scales[0]
            factors["v_block_scale"] = theirs.v_block_scales[0]
        if prompt:
            operands = (x.double().transpose(1, 2) for x in (q, k, v))
            exact = reference.attention(*operands, causal=True).transpose(1, 2)
        else:
            place = theirs.k[0], theirs.v[0], theirs.page_table, lengths + count
            if not theirs.codes:
                place = *(x.double() for x in place[:2]), *place[2:]
            exact = reference.attention_paged(q.double(), *place, **factors)
        running = [0, 2]
        assert_accurate(*(x[running] for x in (results[0], exact, results[1])))


def test_compiled():
    """A step is one graph, which serves all steps: lengths, ends and pages are no part of it."""
    counter = torch._dynamo.testing.CompileCounter()
    caches = [make(BF16, value_dim=DIM) for _ in range(2)]

    def model(x, cache):
        step = cache.step(1)
        for layer in range(LAYERS):
            out = step.attend(layer, *x)
            x = x[0] + out, *x[1:]
        step.advance()
        return x[0]

    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for n in range(10):
        x = tokens(BATCH, 1, dtype=BF16, dims=(DIM, DIM))
        found = []
        for cache, call in zip(caches, (compiled, model), strict=True):
            if n == 6:
                cache.finish([2])
            cache.reserve(1)
            found.append(call(x, cache)[:2])
        torch.testing.assert_close(*found)
    assert counter.frame_count == 1
    for x, y in zip(*([c.lengths, c.page_table] for c in caches), strict=True):
        assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float8_e4m3fn, torch.float4_e2m1fn_x2])
@pytest.mark.parametrize("mode", ["graph", "reduce-overhead"])
def test_cuda_graphs(dtype, mode):
    """One graph replays over pages that are new, sequences that end and that begin."""
    options = {"head_dim": 128, "value_dim": 128, "max_length": 300, "page_size": 16}
    caches = [make(dtype, "cuda", **options) for _ in range(2)]
    x = [torch.empty(BATCH, 1, n, 128, dtype=BF16, device="cuda") for n in (4, 2, 2)]

    def model(cache):
        step = cache.step(1)
        q, k, v = x
        for layer in range(LAYERS):
            q = step.attend(layer, q, k, v)
        step.advance()
        return q

    def refill():
        for y in x:
            y.normal_()

    refill()
    for cache in caches:
        cache.reserve(40)
        step = cache.step(40, prompt=True)
        for layer in range(LAYERS):
            long = (y.expand(-1, 40, -1, -1) for y in x)
            step.attend(layer, *long)
        step.advance()
    if mode == "graph":
        before = caches[0].lengths.clone()
        caches[0].reserve(1)
        model(caches[0])
        caches[0].lengths.copy_(before)
        caches[0].synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = model(caches[0])

        def call(cache):
            graph.replay()
            return made
    else:
        call = torch.compile(model, fullgraph=True, mode=mode)
    for n in range(100):
        refill()
        if n == 30:
            for cache in caches:
                cache.finish([1])
        if n == 60:
            for cache in caches:
                cache.reset([1])
        results = []
        for cache, step in zip(caches, (call, model), strict=True):
            cache.reserve(1)
            results.append(step(cache).clone())
        rows = [0, 2] if 30 <= n < 60 else [0, 1, 2]
        assert torch.equal(results[0][rows], results[1][rows])
        assert torch.equal(caches[0].lengths, caches[1].lengths)


def test_wrong_calls():
    for options, words in (
        ({"page_size": 0}, "page_size is 0; it must be at least 1"),
        ({"max_length": -1}, "max_length is -1; it must be at least 1"),
        ({"scales": "row"}, "scales is 'row'; it must be one of"),
    ):
        with pytest.raises(ValueError, match=f"tk.nn.PagedCache: {words}"):
            make(**options)
    with pytest.raises(TypeError, match=r"dtype is torch\.int32; it must be of 16 bits, or one of"):
        make(torch.int32)
    with pytest.raises(ValueError, match=r"head dims of NVFP4 are \(96, 64\); they must be mult"):
        make(torch.float4_e2m1fn_x2, head_dim=96, value_dim=64)
    cache = make()
    cache.lengths[2] = 1
    with pytest.raises(RuntimeError, match="prompt=True, and a sequence has keys, which its new"):
        cache.step(3, prompt=True)
    cache = make(pages=4)
    with pytest.raises(ValueError, match="sequence 0 would have 41 keys; max_length is 40"):
        cache.reserve(41)
    with pytest.raises(RuntimeError, match="6 more pages are needed, and 4 are free; finish a"):
        cache.reserve(9)
    cache.reserve([20, 8], rows=[1, 2])
    assert (cache.page_table >= 0).sum(1).tolist() == [0, 3, 1]
    cache.finish([1])
    cache.reserve([24, 8, 0])  # of a sequence that does not run nothing is reserved
    assert (cache.page_table >= 0).sum(1).tolist() == [3, 0, 1]
