"""`tk.gated_delta_rule`: values, states and refusals, against the reference in float64."""

from __future__ import annotations

import math

import pytest
import torch

import thunderkittens as tk
from helpers.delta_rule import (
    BF16,
    FP16,
    GATES,
    KEYS,
    assert_delta_rule,
    operands,
    some_state,
)
from helpers.layouts import HEAD_LAYOUTS, heads, unaligned
from thunderkittens import _C

H200 = _C.DeviceProperties(
    sm_count=132, shared_bytes_per_block=232448, l2_bytes=50 << 20, major=9, minor=0
)
EDGES = [0, 15, 16, 17, 63, 64, 65, 127, 129]


def lengths(device):
    """Those that a CPU takes in time."""
    return [*EDGES, 1000, 4096] if device == "cuda" else EDGES


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_lengths(device, dtype, v_first):
    for length in lengths(device):
        tensors = operands((2, 1, 2, length, 128, 64), dtype, device)
        options = {
            "initial_state": some_state((2, 2, 128, 64), device, v_first),
            "state_v_first": v_first,
        }
        results = tk.gated_delta_rule(*tensors, **options, return_state=True)
        assert_delta_rule(results, *tensors, **options)


@pytest.mark.parametrize("dims", [(64, 64), (64, 128), (128, 128), (128, 256), (8, 8), (96, 72)])
@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
def test_dimensions_and_grouped_values(device, ratio, dims):
    tensors = operands((1, 2, 2 * ratio, 70, *dims), BF16, device)
    assert_delta_rule(tk.gated_delta_rule(*tensors, return_state=True), *tensors)


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("most", [1.0, 1.8])
@pytest.mark.parametrize("gate", GATES)
def test_gates_and_keys(device, gate, most, keys):
    tensors = operands((1, 4, 8, 100, 128, 64), BF16, device, gate=gate, keys=keys, most=most)
    assert_delta_rule(tk.gated_delta_rule(*tensors, return_state=True), *tensors)


def test_what_is_made_in_the_kernel(device):
    """Norms, gates and betas, beside those that the caller makes."""
    q, k, v, _, _ = operands((2, 2, 4, 100, 64, 72), BF16, device)
    q, k = 3 * q, 5 * k
    a, b = torch.randn(2, 2, 4, 100, device=device)
    A_log, dt_bias = torch.randn(2, 4, device=device)
    for options in (
        {"qk_l2norm": True, "A_log": A_log, "dt_bias": dt_bias, "beta_sigmoid": True},
        {"qk_l2norm": True, "A_log": A_log, "beta_sigmoid": True, "allow_neg_eigval": True},
    ):
        results = tk.gated_delta_rule(q, k, v, a.to(BF16), b.to(BF16), return_state=True, **options)
        assert_delta_rule(results, q, k, v, a.to(BF16), b.to(BF16), **options)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_scale(device, scale):
    tensors = operands((1, 1, 1, 40, 64, 64), BF16, device)
    assert_delta_rule(
        tk.gated_delta_rule(*tensors, scale=scale, return_state=True), *tensors, scale=scale
    )


@pytest.mark.parametrize("layout", HEAD_LAYOUTS)
def test_layouts(device, layout):
    q, k, v, g, beta = operands((2, 2, 4, 70, 64, 72), BF16, device)
    right = tk.gated_delta_rule(q, k, v, g, beta)
    others = [heads(x.unsqueeze(3).expand(*x.shape, 8), layout)[..., 0] for x in (g, beta)]
    found = tk.gated_delta_rule(*(heads(x, layout) for x in (q, k, v)), *others)
    assert torch.equal(found, right)


def test_expanded_operands(device):
    q, k, v, g, beta = operands((1, 4, 4, 70, 64, 64), BF16, device)
    k, v, g = k[:, :1].expand_as(k), v[:, :, :1].expand_as(v), g[:, :, :1].expand_as(g)
    found = tk.gated_delta_rule(q, k, v, g, beta)
    assert torch.equal(found, tk.gated_delta_rule(q, *(x.contiguous() for x in (k, v, g)), beta))


@pytest.mark.parametrize("split", [1, 64, 77, 199])
def test_a_sequence_in_parts(device, split):
    tensors = operands((1, 1, 2, 200, 128, 64), BF16, device)
    first, state = tk.gated_delta_rule(*(x[:, :, :split] for x in tensors), return_state=True)
    second, state = tk.gated_delta_rule(
        *(x[:, :, split:] for x in tensors), initial_state=state, return_state=True
    )
    assert_delta_rule((torch.cat([first, second], 2), state), *tensors)


@pytest.mark.parametrize("place", [torch.Tensor.clone, unaligned, lambda x: x.mT.contiguous().mT])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_states_of_any_layout(device, dtype, place):
    tensors = operands((2, 1, 2, 30, 64, 40), BF16, device)
    initial = some_state((2, 2, 64, 40), device, dtype=dtype)
    results = tk.gated_delta_rule(*tensors, initial_state=place(initial), return_state=True)
    assert results[1].dtype == dtype
    for x, y in zip(
        results,
        tk.gated_delta_rule(*tensors, initial_state=initial, return_state=True),
        strict=True,
    ):
        assert torch.equal(x, y)


@pytest.mark.parametrize("edges", [[0, 100], [0, 1, 1, 64, 129, 140], [0, 0, 0]])
def test_packed_sequences(device, edges):
    """Each as if it were alone, whatever its neighbours hold."""
    tensors = operands((1, 2, 4, 150, 64, 72), BF16, device)
    count = len(edges) - 1
    initial = some_state((count, 4, 64, 72), device)
    cu_seqlens = torch.tensor(edges, dtype=torch.int32, device=device)
    options = {"initial_state": initial, "cu_seqlens": cu_seqlens}
    out, state = tk.gated_delta_rule(*tensors, return_state=True, **options)
    assert_delta_rule((out, state), *tensors, **options)
    assert not out[:, :, edges[-1] :].any()
    for n in range(count):
        if edges[n] == edges[n + 1]:
            assert torch.equal(state[n], initial[n])


def test_neighbours_do_not_matter(device):
    tensors = operands((1, 1, 1, 150, 64, 64), BF16, device)
    cu_seqlens = torch.tensor([0, 70, 110], dtype=torch.int32, device=device)
    right = tk.gated_delta_rule(*tensors, cu_seqlens=cu_seqlens)
    for x in tensors:
        x[:, :, 70:] = math.nan
    assert torch.equal(tk.gated_delta_rule(*tensors, cu_seqlens=cu_seqlens)[:, :, :70],
                       right[:, :, :70])  # fmt: skip


@pytest.mark.parametrize("shape", [(0, 2, 4, 5), (2, 0, 0, 5), (2, 2, 4, 0)])
def test_nothing_to_compute(device, shape):
    tensors = [x.requires_grad_() for x in operands((*shape, 64, 64), BF16, device)]
    initial = some_state((shape[0], shape[2], 64, 64), device)
    out, state = tk.gated_delta_rule(*tensors, initial_state=initial, return_state=True)
    assert out.shape == tensors[2].shape
    assert torch.equal(state, initial)
    out.sum().backward()
    assert tensors[0].grad.shape == tensors[0].shape


def counting(device, length=150):
    """Keys that come again every 8 tokens, each with beta 1: what a key reads is the value of its
    latest token, and the state holds these."""
    keys = torch.arange(length, device=device) % 8
    k = torch.nn.functional.one_hot(keys, 64).to(BF16).view(1, 1, length, 64)
    v = torch.randint(-100, 100, (1, 1, length, 64), device=device).to(BF16)
    zeros, ones = torch.zeros(2, 1, 1, length, device=device)
    return k, k, v, zeros, ones + 1


def test_integers_are_exact(device):
    q, k, v, g, beta = counting(device)
    out, state = tk.gated_delta_rule(q, k, v, g, beta, scale=1.0, return_state=True)
    assert torch.equal(out, v)
    latest = v[0, 0, -8:][torch.argsort(torch.arange(142, 150) % 8)].float()
    assert torch.equal(state[0, 0, :8], latest)
    assert not state[0, 0, 8:].any()


def test_reference_in_chunks():
    tensors = [x.double() for x in operands((2, 2, 4, 150, 32, 24), gate="strong")]
    options = {"initial_state": some_state((2, 4, 32, 24)).double(), "qk_l2norm": True}
    for x, y in zip(
        tk.reference.gated_delta_rule(*tensors, return_state=True, **options),
        tk.reference.gated_delta_rule_chunked(*tensors, **options),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_choice():
    """Two consumers where heads fill the GPU, one where they do not or have no more columns;
    segments where they do not fill it either. A kernel prepares all chunks before, unless heads
    that fill the GPU have keys of their own, or there is hardly a chunk."""

    def choice(value_heads, **fields):
        problem = {"sequences": 1, "heads": 4, "value_heads": value_heads, "length": 8192}
        found = _C.choose("gated_delta_rule", {**problem, **fields}, H200)
        return found["consumers"], found["segments"]

    assert choice(264) == (2, 1)
    assert choice(264, value_dim=64) == (1, 1)
    assert choice(64, length=200) == (1, 1)
    assert choice(8)[1] > 1
    assert choice(4, length=1 << 17)[1] > choice(4)[1]

    def preparers(value_heads, **fields):
        problem = {"sequences": 1, "heads": 4, "value_heads": value_heads, "length": 8192}
        return _C.choose("gated_delta_rule", {**problem, **fields}, H200)["preparers"]

    assert preparers(32) == preparers(8) == preparers(264) == 0
    assert preparers(32, sequences=8, heads=32, length=4096) == 1
    assert preparers(32, length=64) > 0


Q, K = torch.zeros(2, 2, 3, 5, 64, dtype=BF16)
V = torch.zeros(2, 6, 5, 72, dtype=BF16)
G = torch.zeros(2, 6, 5)
STATE, EDGE = torch.zeros(2, 6, 64, 72), torch.tensor([0, 5], dtype=torch.int32)
HEAD = torch.zeros(6)
WRONG = {
    "no tensor": (([1], K, V, G, G), {}, TypeError, "q must be a torch.Tensor"),
    "k no tensor": ((Q, None, V, G, G), {}, TypeError, "k must be a torch.Tensor"),
    "float32": ((Q.float(), K.float(), V.float(), G, G), {}, TypeError, "torch.float32"),
    "mixed": ((Q, K.half(), V, G, G), {}, TypeError, "k is torch.float16"),
    "sparse": ((Q, K, V.to_sparse(), G, G), {}, TypeError, "dense"),
    "device": ((Q, K.to("meta"), V, G, G), {}, TypeError, "one device"),
    "3-D": ((Q[0], K[0], V[0], G, G), {}, ValueError, "4 dimensions"),
    "k's length": ((Q, K[:, :, :4], V, G, G), {}, ValueError, "k has shape"),
    "v's batch": ((Q, K, V[:1], G, G), {}, ValueError, "v has shape"),
    "v's heads": ((Q, K, V[:, :4], G, G), {}, ValueError, "v has 4 heads"),
    "keys": ((Q[..., :60], K[..., :60], V, G, G), {}, ValueError, "q has 60 columns"),
    "many keys": ((Q.repeat(1, 1, 1, 3), K.repeat(1, 1, 1, 3), V, G, G), {}, ValueError, "192 col"),
    "columns": ((Q, K, V[..., :60], G, G), {}, ValueError, "v has 60 columns"),
    "many columns": ((Q, K, V.repeat(1, 1, 1, 5), G, G), {}, ValueError, "360 columns"),
    "g no tensor": ((Q, K, V, None, G), {}, TypeError, "g must be a dense tensor"),
    "g's dtype": ((Q, K, V, G.double(), G), {}, TypeError, "g is torch.float64"),
    "g's shape": ((Q, K, V, G[:, :3], G), {}, ValueError, "g has shape"),
    "beta's device": ((Q, K, V, G, G.to("meta")), {}, TypeError, "beta is on meta"),
    "beta's shape": ((Q, K, V, G, G[..., :4]), {}, ValueError, "beta has shape"),
    "scale": ((Q, K, V, G, G), {"scale": "1"}, TypeError, "scale must be a number"),
    "scale nan": ((Q, K, V, G, G), {"scale": math.nan}, ValueError, "scale is nan"),
    "doubled": ((Q, K, V, G, G), {"allow_neg_eigval": True}, ValueError, "beta_sigmoid"),
    "A_log": ((Q, K, V, G, G), {"A_log": HEAD.half()}, TypeError, "A_log is torch.float16"),
    "A_log's shape": ((Q, K, V, G, G), {"A_log": HEAD[:3]}, ValueError, "A_log has shape"),
    "dt_bias": ((Q, K, V, G, G), {"dt_bias": HEAD}, ValueError, "without A_log"),
    "state": ((Q, K, V, G, G), {"initial_state": [1]}, TypeError, "initial_state must be"),
    "state's dtype": ((Q, K, V, G, G), {"initial_state": STATE.half()}, TypeError,
                      "initial_state is torch.float16"),
    "state's order": ((Q, K, V, G, G), {"initial_state": STATE, "state_v_first": True}, ValueError,
                      "initial_state has shape"),
    "edges": ((Q, K, V, G, G), {"cu_seqlens": EDGE.long()}, TypeError, "cu_seqlens is torch.int64"),
    "edges' shape": ((Q, K, V, G, G), {"cu_seqlens": EDGE[:1]}, ValueError, "cu_seqlens has shape"),
    "batch": ((Q, K, V, G, G), {"cu_seqlens": EDGE}, ValueError, "batch size 2"),
    "order": (tuple(x[:1] for x in (Q, K, V, G, G)), {"cu_seqlens": EDGE.flip(0)}, ValueError,
              "must begin with 0"),
    "end": (tuple(x[:1] for x in (Q, K, V, G, G)), {"cu_seqlens": EDGE + EDGE}, ValueError,
            "end at no more"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "options", "error", "words"), WRONG.values(), ids=WRONG)
def test_wrong_calls(args, options, error, words):
    with pytest.raises(error, match=words):
        tk.gated_delta_rule(*args, **options)


# The kernels on the emulator.

EMULATED = [
    # (B, H, HV, T, K, V), consumers, segments, gate, keys, most of beta, edges, policy
    ((1, 1, 1, 64, 64, 64), 1, 1, "weak", "random", 1.0, None, "on_wait"),
    ((2, 1, 2, 65, 96, 72), 1, 1, "mamba", "random", 1.8, None, "late_mma"),
    ((1, 1, 1, 330, 128, 64), 1, 1, "strong", "correlated", 1.0, None, "random"),
    ((1, 1, 1, 330, 128, 128), 2, 1, "mamba", "correlated", 1.8, None, "random"),
    ((1, 1, 1, 130, 128, 136), 2, 1, "weak", "identical", 1.0, None, "on_wait"),
    ((1, 4, 8, 100, 64, 72), 2, 1, "none", "identical", 1.8, None, "late_mma"),
    ((1, 1, 2, 150, 64, 72), 2, 1, "resets", "random", 1.0, [0, 1, 1, 64, 140], "random"),
    ((1, 2, 2, 100, 128, 8), 1, 1, "overflow", "random", 1.0, [0, 0, 17, 100], "eager"),
    ((1, 1, 1, 400, 128, 64), 1, 4, "mamba", "random", 1.8, None, "random"),
    ((2, 1, 1, 250, 64, 72), 1, 2, "resets", "correlated", 1.0, None, "late_mma"),
    ((1, 1, 1, 290, 96, 136), 2, 5, "weak", "identical", 1.0, None, "on_wait"),
    ((1, 1, 1, 280, 64, 72), 2, 3, "strong", "random", 1.0, [0, 1, 1, 64, 270], "eager"),
]


FAMILIES = ["fused", "walk", "portable"]


def config_of(consumers, segments, family):
    preparers = 3 - consumers if family == "fused" else 0
    return {"consumers": consumers, "preparers": preparers, "segments": segments}


@pytest.mark.emulator
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("shape", "consumers", "segments", "gate", "keys", "most", "edges", "policy"), EMULATED
)
def test_emulated(dtype, shape, consumers, segments, gate, keys, most, edges, policy, family):
    tensors = operands(shape, dtype, gate=gate, keys=keys, most=most)
    options = {"state_v_first": gate == "mamba"}
    count = shape[0]
    if edges is not None:
        options["cu_seqlens"] = torch.tensor(edges, dtype=torch.int32)
        count = len(edges) - 1
    if gate not in ("weak", "none"):
        options["initial_state"] = some_state(
            (count, shape[2], *shape[4:]),
            v_first=options["state_v_first"],
            dtype=BF16 if gate == "strong" else torch.float32,
        )
    with tk.emulate(
        policy,
        seed=5,
        portable=family == "portable",
        config=config_of(consumers, segments, family),
    ) as run:
        results = tk.gated_delta_rule(*tensors, return_state=True, **options)
    name = "bf16" if dtype == BF16 else "fp16"
    key_dim = 64 if shape[4] <= 64 else 128
    first = "walk" if family == "walk" else "forward"
    kind = "portable" if family == "portable" else f"{64 * consumers}_columns"
    assert [x["kernel"] for x in run.kernels] == [f"{first}_{name}_k{key_dim}_{kind}"]
    assert_delta_rule(results, *tensors, **options)


@pytest.mark.emulator
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("consumers", [1, 2])
def test_emulated_gates(consumers, family):
    """What is made in the kernel, of operands that lie anyhow."""
    q, k, v, _, _ = operands((1, 2, 4, 140, 64, 128))
    q, k = heads(3 * q, "bshd"), heads(5 * k, "sliced")
    a, b = torch.randn(2, 1, 140, 4).to(BF16).mT
    A_log, dt_bias = torch.randn(2, 4)
    options = {"qk_l2norm": True, "A_log": A_log, "dt_bias": dt_bias, "beta_sigmoid": True,
               "allow_neg_eigval": True, "scale": 0.5}  # fmt: skip
    config = config_of(consumers, consumers, family)
    with tk.emulate("random", portable=family == "portable", config=config):
        results = tk.gated_delta_rule(q, k, v, a, b, return_state=True, **options)
    assert_delta_rule(results, q, k, v, a, b, **options)


@pytest.mark.emulator
@pytest.mark.parametrize("portable", [False, True])
def test_emulated_integers_and_neighbours(portable):
    q, k, v, g, beta = counting("cpu")
    with tk.emulate("random", portable=portable):
        out, state = tk.gated_delta_rule(q, k, v, g, beta, scale=1.0, return_state=True)
        assert torch.equal(out, v)
        assert not state[0, 0, 8:].any()
        cu_seqlens = torch.tensor([0, 70, 110], dtype=torch.int32)
        for x in (v, g, beta):
            x[:, :, 70:] = math.nan
        alone = tk.gated_delta_rule(q, k, v, g, beta, scale=1.0, cu_seqlens=cu_seqlens)
    assert torch.equal(alone[:, :, :70], out[:, :, :70])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 4, 8, 300, 128, 128), (4, 64, 64, 130, 128, 128)])
def test_reruns_have_the_same_bits(device, shape):
    tensors = operands(shape, BF16, device)
    first = tk.gated_delta_rule(*tensors, return_state=True)
    for _ in range(100):
        for x, y in zip(first, tk.gated_delta_rule(*tensors, return_state=True), strict=True):
            assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", GATES)
def test_long_sequences(device, gate):
    """All that a sequence remembers, over hundreds of chunks."""
    tensors = operands((1, 1, 2, 20000, 64, 64), FP16, device, gate=gate)
    out, state = tk.gated_delta_rule(*tensors, return_state=True)
    right = tk.reference.gated_delta_rule_chunked(*(x.double() for x in tensors))
    for x, y in zip((out, state), right, strict=True):
        assert float((x.double() - y).norm() / y.norm()) < 4e-3
