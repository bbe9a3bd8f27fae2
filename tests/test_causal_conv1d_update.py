"""`tk.causal_conv1d_update`: outputs and states against the whole convolution; wrong calls."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from helpers.convolution import BF16, FP16, FP32, normal
from helpers.cover import cover, over
from helpers.layouts import embed, unaligned
from thunderkittens import _C

H200 = _C.DeviceProperties(
    sm_count=132, shared_bytes_per_block=232448, l2_bytes=50 << 20, major=9, minor=0
)
FLAGS = ("test_schema", "test_autograd_registration", "test_faketensor")


def strided(x, layout):
    """x with other strides, NaN around it: channels adjacent, in a larger cache, or unaligned."""
    if layout == "channels":
        order = (0, 2, 1)[: x.dim()] if x.dim() == 3 else (1, 0)
        return embed(x, order=order)
    return embed(x, margin=1) if layout == "cache" else x.contiguous().clone()


def cases(device, intensity):
    return cover(
        {
            "batch": [1, 3, 8],
            "channels": [1, 16, 300, 1500] + [8192] * (device == "cuda"),
            "tokens": [None, 1, 2, 5],
            "extra": [0, 1, 3, 9],
            "width": [2, 3, 4],
            "dtype": [BF16, FP16, FP32],
            "wide": [False, True],
            "bias": [False, True],
            "activation": [None, "silu"],
            "layout": ["channels", "cache", "packed"],
            "slots": [False, True],
        },
        max(intensity, 2) if device == "cpu" else intensity,
    )


@over(cases)
def test_steps_are_the_whole(device, case):
    """The outputs have the bits of `tk.causal_conv1d`; states keep the last inputs; others stay."""
    batch, channels, width = case["batch"], case["channels"], case["width"]
    length, dtype = case["tokens"] or 1, case["dtype"]
    kept = width - 1 + case["extra"]
    x = normal((batch, channels, length), dtype, device)
    weight = normal((channels, width), FP32 if case["wide"] else dtype, device)
    bias = normal((channels,), dtype, device) if case["bias"] else None
    options = {"bias": bias, "activation": case["activation"]}
    count = batch + 2 if case["slots"] else batch
    before = normal((count, channels, kept), dtype, device)
    state = strided(before, case["layout"])
    slots = None
    used = torch.arange(batch, device=device)
    if case["slots"]:
        used = torch.randperm(count, device=device)[:batch]
        slots = used.to(torch.int32)
    tokens = x if case["tokens"] else x[..., 0]
    out = tk.causal_conv1d_update(
        strided(tokens, case["layout"]), state, weight, slots=slots, **options
    )
    expected = tk.causal_conv1d(
        x, weight, initial_state=before[used][..., kept - width + 1 :], **options
    )
    expected = expected if case["tokens"] else expected[..., 0]
    if type(device) is str and device == "cpu":  # whose vectors are other ones
        torch.testing.assert_close(out, expected)
    else:
        assert torch.equal(out, expected)
    after = before.clone()
    after[used] = torch.cat([before[used], x], -1)[..., length:]
    assert torch.equal(state, after)
    base = state._base
    if base is not None and case["layout"] != "packed":
        assert int(base.isnan().sum()) == base.numel() - state.numel()


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.emulator
def test_every_kernel_is_exact(tokens, width, dtype, portable):
    x = torch.randint(-3, 4, (2, 1100, tokens)).to(dtype)
    weight = torch.randint(-3, 4, (1100, width)).to(dtype)
    state = torch.randint(-3, 4, (2, 1100, width - 1)).to(dtype)
    other = state.clone()
    with tk.emulate("random", seed=tokens, portable=portable) as run:
        out = tk.causal_conv1d_update(x, state, weight)
    assert torch.equal(out, tk.reference.causal_conv1d_update(x, other, weight))
    assert torch.equal(state, other)
    name = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
    assert run.kernels[0]["kernel"] == f"update_{name}_{width}{'_portable' * portable}"


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("layout", ["tokens", "channels"])
@pytest.mark.emulator
def test_vectors_of_channels(layout, width, dtype, portable):
    """A warp goes along sequences, some of which have no state; columns that are not full."""
    batch, channels = 7, 536
    x = torch.randint(-3, 4, (batch, channels)).to(dtype)
    weight = torch.randint(-3, 4, (channels, width)).to(dtype)
    bias = torch.randint(-3, 4, (channels,)).float()
    before = torch.randint(-3, 4, (batch + 2, channels, width - 1)).to(dtype)
    slots = torch.tensor([8, -1, 0, 9, 3, 4, 7], dtype=torch.int32)
    for rows in (1, 2, 5, 32):
        state, other = strided(before, "channels" if layout == "channels" else ""), before.clone()
        with tk.emulate("late_mma", portable=portable, config={"rows": rows}) as run:
            out = tk.causal_conv1d_update(x, state, weight, bias, slots=slots)
        expected = tk.reference.causal_conv1d_update(x, other, weight, bias, slots=slots)
        assert torch.equal(out, expected)
        assert torch.equal(state, other)
        # Of two taps a state is one input, whose channels are adjacent either way.
        assert run.kernels[0]["layout"] == ("tokens" if width == 2 else layout)
        assert run.kernels[0]["rows"] == rows


@pytest.mark.parametrize("off", ["x", "state", "longer", "channels", "tokens"])
@pytest.mark.emulator
def test_vectors_that_do_not_fit(off):
    """They are taken element by element."""
    channels = 12 if off == "channels" else 16
    x, weight = normal((3, channels), BF16, "cpu"), normal((channels, 4), BF16, "cpu")
    if off == "tokens":
        x = normal((3, channels, 2), BF16, "cpu")
    state = normal((3, channels, 4 if off == "longer" else 3), BF16, "cpu")
    other = state.clone()
    x = unaligned(x) if off == "x" else x
    state = unaligned(state) if off == "state" else state
    with tk.emulate() as run:
        out = tk.causal_conv1d_update(x, state, weight)
    assert run.kernels[0]["layout"] == "any"
    torch.testing.assert_close(out, tk.reference.causal_conv1d_update(x, other, weight))
    assert torch.equal(state, other)


def test_rows_of_a_warp():
    """More than one as soon as there are more than the device takes at once."""
    problem = {"channels": 8192, "layout": "tokens"}
    rows = [_C.choose("causal_conv1d_update", {**problem, "batch": n}, H200)["rows"]
            for n in (1, 16, 1024, 1 << 16)]  # fmt: skip
    assert rows[0] == 1
    assert rows == sorted(rows)
    assert rows[3] > rows[1]


@pytest.mark.parametrize("tokens", [1, 4])
def test_slots_that_are_not_there(device, tokens):
    """They are left out, and their outputs are 0."""
    x, weight = normal((5, 24, tokens), BF16, device), normal((24, 4), BF16, device)
    state = normal((3, 24, 3), BF16, device)
    before = state.clone()
    slots = torch.tensor([2, -1, 0, 3, -5], dtype=torch.int32, device=device)
    out = tk.causal_conv1d_update(x, state, weight, activation="silu", slots=slots)
    there = torch.tensor([0, 2], device=device)
    expected = tk.causal_conv1d(x[there], weight, activation="silu",
                                initial_state=before[[2, 0]])  # fmt: skip
    assert torch.equal(out[there], expected)
    assert bool((out[[1, 3, 4]] == 0).all())
    assert torch.equal(state[1], before[1])
    assert not torch.equal(state[0], before[0])


def test_decoding_equals_prefill(device):
    x, weight = normal((2, 24, 40), BF16, device), normal((24, 4), BF16, device)
    whole, end = tk.causal_conv1d(x, weight, activation="silu", return_state=True)
    out, state = tk.causal_conv1d(x[..., :30], weight, activation="silu", return_state=True)
    outs = [out]
    for t in range(30, 40):
        outs.append(tk.causal_conv1d_update(x[..., t], state, weight, activation="silu")[..., None])
    assert torch.equal(torch.cat(outs, -1), whole)
    assert torch.equal(state, end)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0), (2, 8, 0)])
def test_nothing_to_compute(device, shape):
    weight = normal((shape[1], 4), BF16, device)
    state = normal((shape[0], shape[1], 3), BF16, device)
    before = state.clone()
    assert tk.causal_conv1d_update(normal(shape, BF16, device), state, weight).shape == shape
    assert torch.equal(state, before)


@pytest.mark.parametrize("slots", [False, True])
def test_opcheck(slots):
    arguments = [torch.randn(2, 8).bfloat16(), torch.randn(2, 8, 3).bfloat16(), torch.randn(8, 4)]
    arguments += [None, 4, torch.tensor([1, -1], dtype=torch.int32) if slots else None]
    op = torch.ops.thunderkittens.causal_conv1d_update.default
    tests = (*FLAGS, "test_aot_dispatch_dynamic")
    result = torch.library.opcheck(op, tuple(arguments), test_utils=tests)
    assert set(result.values()) == {"SUCCESS"}
    assert op._schema.is_mutable


def test_compile():
    """In one graph, with a state that changes from step to step."""
    torch._dynamo.reset()

    def step(x, state, weight):
        return tk.causal_conv1d_update(x * 1.0, state, weight, activation="silu") * 2.0

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    weight = torch.randn(16, 4)
    for batch in (2, 5):
        state = torch.randn(batch, 16, 3).bfloat16()
        other = state.clone()
        for _ in range(3):
            x = torch.randn(batch, 16).bfloat16()
            assert torch.equal(compiled(x, state, weight), step(x, other, weight))
        assert torch.equal(state, other)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_autocast(device, dtype):
    """x is converted; weights stay what they are, and the state has the dtype of the region."""
    x, weight = torch.randn(2, 8, device=device), torch.randn(8, 4, device=device)
    state = normal((2, 8, 3), dtype, device)
    other = state.clone()
    with torch.autocast(str(device), dtype):
        out = tk.causal_conv1d_update(x, state, weight)
    assert torch.equal(out, tk.causal_conv1d_update(x.to(dtype), other, weight))
    assert torch.equal(state, other)


@pytest.mark.gpu
def test_cuda_graph(device):
    x, weight = normal((3, 512), BF16, device), normal((512, 4), BF16, device)
    state = normal((3, 512, 3), BF16, device)
    other = state.clone()
    tk.causal_conv1d_update(x, state.clone(), weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tk.causal_conv1d_update(x, state, weight)
    for _ in range(4):
        x.copy_(normal((3, 512), BF16, device))
        graph.replay()
        assert torch.equal(out, tk.causal_conv1d_update(x, other, weight))
    assert torch.equal(state, other)


def test_no_gradient():
    x, state, weight = torch.randn(2, 8), torch.randn(2, 8, 3), torch.randn(8, 4)
    with pytest.raises(RuntimeError, match="no gradient"):
        tk.causal_conv1d_update(x, state, weight.requires_grad_())
    with torch.no_grad():
        tk.causal_conv1d_update(x, state, weight)
    with pytest.raises(RuntimeError, match="transforms"):
        torch.func.vmap(lambda y: tk.causal_conv1d_update(y, state, weight.detach()))(x[None])


X, W, B = torch.zeros(2, 8, dtype=BF16), torch.zeros(8, 4, dtype=BF16), torch.zeros(8)
S, I = torch.zeros(2, 8, 3, dtype=BF16), torch.tensor([0, 1], dtype=torch.int32)
WRONG = {
    "no tensor": ((1, S, W), {}, TypeError, "x must be a torch.Tensor"),
    "x's dtype": ((X.double(), S, W), {}, TypeError, "x is torch.float64"),
    "1-D": ((X[0], S, W), {}, ValueError, "x has shape"),
    "4-D": ((X[..., None, None], S, W), {}, ValueError, "x has shape"),
    "sparse": ((X.to_sparse(), S, W), {}, TypeError, "x must be a dense tensor"),
    "no state": ((X, None, W), {}, TypeError, "state must be a torch.Tensor"),
    "sparse state": ((X, S.to_sparse(), W), {}, TypeError, "state must be a dense tensor"),
    "state's dtype": ((X, S.float(), W), {}, TypeError, "state is torch.float32"),
    "state's device": ((X, S.to("meta"), W), {}, TypeError, "state is on meta"),
    "state's channels": ((X, S[:, :4], W), {}, ValueError, "state has shape"),
    "short state": ((X, S[..., :2], W), {}, ValueError, "3 or more"),
    "state's dims": ((X, S[0], W), {}, ValueError, "state has shape"),
    "state's batch": ((X, S[:1], W), {}, ValueError, "state has 1 sequences, x has 2"),
    "weight's kind": ((X, S, [1]), {}, TypeError, "weight must be"),
    "weight's shape": ((X, S, W[0]), {}, ValueError, "weight has shape"),
    "weight's channels": ((X, S, W[:4]), {}, ValueError, "weight has 4 channels"),
    "weight's dtype": ((X, S, W.half()), {}, TypeError, "weight is torch.float16"),
    "bias's shape": ((X, S, W, B[:2]), {}, ValueError, "bias has shape"),
    "bias's dtype": ((X, S, W, B.half()), {}, TypeError, "bias is torch.float16"),
    "activation": ((X, S, W), {"activation": "relu"}, ValueError, "activation is 'relu'"),
    "activation's kind": ((X, S, W), {"activation": 4}, TypeError, "activation must be"),
    "slots' kind": ((X, S, W), {"slots": [0, 1]}, TypeError, "slots must be"),
    "slots' dtype": ((X, S, W), {"slots": I.long()}, TypeError, "slots is torch.int64"),
    "slots' shape": ((X, S, W), {"slots": I[:1]}, ValueError, "slots has shape"),
    "slots' device": ((X, S, W), {"slots": I.to("meta")}, TypeError, "slots is on meta"),
    "expanded state": ((X, S[:1].expand(2, 8, 3), W), {}, ValueError, "a place of its own"),
    "overlap": ((S[..., 0], S, W), {}, ValueError, "state overlaps x"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "options", "error", "words"), WRONG.values(), ids=WRONG)
def test_wrong_calls(args, options, error, words):
    with pytest.raises(error, match=words):
        tk.causal_conv1d_update(*args, **options)
