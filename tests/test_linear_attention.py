"""`tk.linear_attention`: values, states, packed sequences and refusals, against the reference in
float64."""

from __future__ import annotations

import math

import pytest
import torch

import thunderkittens as tk
from helpers.layouts import HEAD_LAYOUTS, heads, spread, unaligned
from helpers.recurrent import assert_linear, normal
from thunderkittens import _C, info

BF16, FP16 = torch.bfloat16, torch.float16
H200 = _C.DeviceProperties(**info.EXAMPLE_GPU)
LENGTHS = [1, 16, 63, 64, 65, 129, 211, 2049]


def call(
    shape, dims, *, key_heads=1, dtype=BF16, device="cpu", gates="both", state=True, **options
):
    """Operands and options; decays as those of retention."""
    (batch, count, length), (keys, columns) = shape, dims
    q, k = (normal((batch, key_heads, length, keys), dtype, device) for _ in "qk")
    v = normal((batch, count, length, columns), dtype, device)
    if gates in ("decay", "both"):
        options["decay"] = torch.log1p(-(2.0 ** (-5 - torch.arange(count, device=device))))
    if gates in ("g", "both"):
        options["g"] = -torch.rand(batch, count, length, device=device) / 4
    if state:
        sequences = options["cu_seqlens"].numel() - 1 if "cu_seqlens" in options else batch
        order = (columns, keys) if options.get("state_v_first") else (keys, columns)
        options["initial_state"] = normal((sequences, count, *order), device=device)
    return [q, k, v], options


def edges(bounds, device):
    return torch.tensor(bounds, dtype=torch.int32, device=device)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (16, 256)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_values(device, dtype, dims):
    for length in LENGTHS if device == "cuda" else LENGTHS[:-1]:
        operands, options = call((2, 2, length), dims, key_heads=2, dtype=dtype, device=device)
        found = tk.linear_attention(*operands, **options, return_state=True)
        assert_linear(found, operands, options)


@pytest.mark.parametrize("gates", ["none", "decay", "g", "both"])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_gates_and_heads(device, key_heads, state, gates):
    operands, options = call(
        (2, 4, 140), (40, 72), key_heads=key_heads, device=device, gates=gates, state=state
    )
    found = tk.linear_attention(*operands, **options, return_state=True)
    assert_linear(found, operands, options)


@pytest.mark.parametrize("scale", [1.0, -0.5, 0.01])
@pytest.mark.parametrize("v_first", [False, True])
def test_scale_and_order_of_the_state(device, v_first, scale):
    """Keys and values have different sizes, so that no order passes for the other."""
    operands, options = call(
        (1, 2, 100), (64, 40), device=device, scale=scale, state_v_first=v_first
    )
    found = tk.linear_attention(*operands, **options, return_state=True)
    assert found[1].shape == ((1, 2, 40, 64) if v_first else (1, 2, 64, 40))
    assert_linear(found, operands, options)


def test_slopes_of_lightning_attention(device):
    """A decay of e^-s per token, with slopes up to 1."""
    operands, options = call((1, 4, 300), (128, 128), key_heads=4, device=device, gates="none")
    options["decay"] = -torch.tensor([0.0, 0.1, 0.84, 1.0], device=device)
    found = tk.linear_attention(*operands, **options, scale=1.0, return_state=True)
    assert_linear(found, operands, {**options, "scale": 1.0})


def test_equals_ssd(device):
    """With steps of 1 both ops are the same kernel, whose bits they have."""
    q, k = (normal((1, 2, 150, 64), BF16, device) for _ in "qk")
    v, A = normal((1, 4, 150, 64), BF16, device), -torch.rand(4, device=device)
    ones = torch.ones(1, 4, 150, device=device)
    out, state = tk.linear_attention(
        q, k, v, decay=A, scale=1.0, state_v_first=True, return_state=True
    )
    expected = tk.ssd(v, ones, A, k, q, return_state=True)
    torch.testing.assert_close(out, expected[0], rtol=2**-7, atol=1e-2)
    torch.testing.assert_close(state, expected[1], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("layout", HEAD_LAYOUTS)
def test_layouts(device, layout):
    operands, options = call((2, 4, 130), (64, 64), key_heads=2, device=device)
    moved = [heads(x, layout) for x in operands]
    changed = {**options, "g": spread(options["g"]), "decay": spread(options["decay"])}
    found = tk.linear_attention(*moved, **changed, return_state=True)
    assert_linear(found, operands, options)
    if device == "cuda":  # products of a CPU depend on the layout
        expected = tk.linear_attention(*operands, **options, return_state=True)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


def test_expanded_operands(device):
    operands, options = call((2, 4, 70), (64, 64), key_heads=4, device=device)
    q, k, v = operands
    k = k[:, :1].expand_as(k)
    found = tk.linear_attention(q, k, v, **options, return_state=True)
    assert_linear(found, [q, k.contiguous(), v], options)


@pytest.mark.parametrize("bounds", [[0, 0, 64, 65, 200, 200], [5, 100, 180]])
@pytest.mark.parametrize("v_first", [False, True])
def test_packed_sequences(device, v_first, bounds):
    operands, options = call(
        (1, 4, bounds[-1] + 3), (24, 72), key_heads=2, device=device, state_v_first=v_first,
        cu_seqlens=edges(bounds, device),
    )  # fmt: skip
    found = tk.linear_attention(*operands, **options, return_state=True)
    assert_linear(found, operands, options)


@pytest.mark.parametrize("split", [1, 64, 77, 199])
def test_a_sequence_in_parts(device, split):
    operands, options = call((1, 2, 200), (64, 64), device=device)
    whole = tk.linear_attention(*operands, **options, return_state=True)
    outs, g = [], options.pop("g")
    for part in (slice(0, split), slice(split, None)):
        cut = [x[:, :, part] for x in operands]
        out, options["initial_state"] = tk.linear_attention(
            *cut, **options, g=g[:, :, part], return_state=True
        )
        outs.append(out)
    for a, b in zip((torch.cat(outs, 2), options["initial_state"]), whole, strict=True):
        error = (a.double() - b.double()).square().mean().sqrt()
        assert float(error / b.double().square().mean().sqrt()) < 6e-3


@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 0, 5), (2, 2, 0)])
def test_nothing_to_compute(device, shape):
    operands, options = call(shape, (64, 40), key_heads=shape[1], device=device, gates="g")
    out, state = tk.linear_attention(*operands, **options, return_state=True)
    assert out.shape == operands[2].shape
    assert torch.equal(state, options["initial_state"])


def test_integers_are_exact(device):
    """One-hot keys, and a half of what was there before with each token."""
    length = 12
    k = torch.eye(64, dtype=BF16, device=device)[:length].view(1, 1, length, 64)
    v = torch.full((1, 1, length, 64), 2.0, dtype=BF16, device=device)
    q = torch.ones_like(k)
    g = torch.full((1, 1, length), -math.inf, device=device)
    out = tk.linear_attention(q, k, v, g=g, scale=1.0)
    assert torch.equal(out, v)
    out, state = tk.linear_attention(q, k, v, scale=1.0, return_state=True)
    count = 2 * torch.arange(1, length + 1, device=device).to(BF16)
    assert torch.equal(out, count.view(1, 1, -1, 1).expand_as(v))
    assert torch.equal(state[0, 0, :length], v[0, 0].float())


Q, V, DECAY = (torch.zeros(2, 2, 5, 8, dtype=BF16), torch.zeros(2, 4, 5, 16, dtype=BF16),
               torch.zeros(4))  # fmt: skip
EDGES = torch.tensor([0, 5], dtype=torch.int32)
WRONG = {
    "no tensor": (([1], Q, V), {}, TypeError, "q must be a torch.Tensor"),
    "float32": ((Q.float(), Q.float(), V.float()), {}, TypeError, "torch.float32"),
    "mixed": ((Q, Q.half(), V), {}, TypeError, "k is torch.float16"),
    "sparse": ((Q, Q, V.to_sparse()), {}, TypeError, "dense"),
    "device": ((Q, Q.to("meta"), V), {}, TypeError, "one device"),
    "3-D": ((Q[0], Q[0], V[0]), {}, ValueError, "4 dimensions"),
    "v's dimensions": ((Q, Q, V[0]), {}, ValueError, "4 dimensions"),
    "k's shape": ((Q, Q[:, :, :4], V), {}, ValueError, "k has shape"),
    "v's length": ((Q, Q, V[:, :, :4]), {}, ValueError, "v has shape"),
    "v's batch": ((Q, Q, V[:1]), {}, ValueError, "v has shape"),
    "v's heads": ((Q, Q, V[:, :3]), {}, ValueError, "multiple of q's"),
    "no heads": ((Q[:, :0], Q[:, :0], V), {}, ValueError, "multiple of q's"),
    "v's columns": ((Q, Q, V[..., :12]), {}, ValueError, "12 columns"),
    "many columns": ((Q, Q, V.repeat(1, 1, 1, 17)), {}, ValueError, "272 columns"),
    "q's columns": ((Q[..., :4], Q[..., :4], V), {}, ValueError, "4 columns"),
    "decay's shape": ((Q, Q, V), {"decay": DECAY[:2]}, ValueError, "decay has shape"),
    "decay's dtype": ((Q, Q, V), {"decay": DECAY.double()}, TypeError, "decay is torch.float64"),
    "g's shape": ((Q, Q, V), {"g": torch.zeros(2, 2, 5)}, ValueError, "g has shape"),
    "g no tensor": ((Q, Q, V), {"g": 0.5}, TypeError, "g must be a dense tensor"),
    "scale": ((Q, Q, V), {"scale": "1"}, TypeError, "scale must be a number"),
    "scale nan": ((Q, Q, V), {"scale": math.nan}, ValueError, "scale is nan"),
    "state's shape": ((Q, Q, V), {"initial_state": torch.zeros(2, 4, 16, 8)}, ValueError,
                      "initial_state has shape"),
    "state's order": ((Q, Q, V), {"initial_state": torch.zeros(2, 4, 8, 16),
                                  "state_v_first": True}, ValueError, "initial_state has shape"),
    "state's dtype": ((Q, Q, V), {"initial_state": torch.zeros(2, 4, 8, 16).half()}, TypeError,
                      "initial_state is torch.float16"),
    "order": ((Q, Q, V), {"state_v_first": "yes"}, TypeError, "state_v_first must be a bool"),
    "return_state": ((Q, Q, V), {"return_state": None}, TypeError, "return_state must be"),
    "edges and batch": ((Q, Q, V), {"cu_seqlens": EDGES}, ValueError, "batch size 2"),
    "edges' dtype": ((Q[:1], Q[:1], V[:1]), {"cu_seqlens": EDGES.float()}, TypeError,
                     "cu_seqlens is torch.float32"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "options", "error", "words"), WRONG.values(), ids=WRONG)
def test_wrong_calls(args, options, error, words):
    with pytest.raises(error, match=words):
        tk.linear_attention(*args, **options)


# The kernel on the emulator. test_ssd.py has every instance.

EMULATED = [
    ((130, 64, 64), "both", 1, 1, "on_wait"),
    ((200, 128, 128), "decay", 1, 2, "random"),
    ((150, 24, 72), "g", 2, 3, "late_mma"),
    ((70, 64, 256), "none", 4, 1, "eager"),
]


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(("sizes", "gates", "key_heads", "segments", "policy"), EMULATED)
def test_emulated(sizes, gates, key_heads, segments, policy, v_first, dtype):
    length, keys, columns = sizes
    operands, options = call(
        (1, 4, length), (keys, columns), key_heads=key_heads, dtype=dtype, gates=gates,
        state_v_first=v_first,
    )  # fmt: skip
    with tk.emulate(policy, seed=length, config={"segments": segments}):
        found = tk.linear_attention(*operands, **options, return_state=True)
    assert_linear(found, operands, options)


@pytest.mark.emulator
@pytest.mark.parametrize("segments", [1, 3])
def test_emulated_packed_sequences(segments):
    bounds = [5, 5, 100, 240]
    operands, options = call((1, 2, 243), (64, 64), cu_seqlens=edges(bounds, "cpu"))
    with tk.emulate("random", config={"segments": segments}):
        found = tk.linear_attention(*operands, **options, return_state=True)
    assert_linear(found, operands, options)


@pytest.mark.emulator
def test_emulated_layouts():
    """Operands that no tensor map describes, and gates by their strides: the same bits."""
    operands, options = call((2, 2, 70), (40, 24))
    with tk.emulate():
        expected = tk.linear_attention(*operands, **options, return_state=True)
        q, k, v = operands
        options["g"], options["initial_state"] = (
            spread(options["g"]), unaligned(options["initial_state"]),
        )  # fmt: skip
        moved = [unaligned(q), spread(k), heads(v, "bshd")]
        found = tk.linear_attention(*moved, **options, return_state=True)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_the_choice():
    """Few heads are cut into segments, many are not; slices of a head share a block."""
    sizes = {"dtype": "bf16", "key_dim": 128, "value_dim": 64, "length": 8192, "batch": 1}
    few = _C.choose("ssd", {**sizes, "heads": 8, "groups": 1}, H200)
    many = _C.choose("ssd", {**sizes, "heads": 528, "groups": 1}, H200)
    wide = _C.choose("ssd", {**sizes, "value_dim": 128, "heads": 256, "groups": 256}, H200)
    assert few["segments"] > 1
    assert many["segments"] == 1
    assert many["warpgroups"] == wide["warpgroups"] == 2
