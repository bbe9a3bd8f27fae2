"""`tk.ssd`: values, states, packed sequences and refusals, against the reference in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

import thunderkittens as tk
from helpers.layouts import HEAD_LAYOUTS, heads, spread, unaligned
from helpers.recurrent import GROUPS_AND_SHAPES, assert_ssd, normal, ssd_call, wide

BF16, FP16 = torch.bfloat16, torch.float16
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 127, 129, 211, 2049]


def sizes(device):
    """Those that a CPU takes in time."""
    return LENGTHS if device == "cuda" else LENGTHS[:-1]


@pytest.mark.parametrize("dims", [(64, 128), (64, 64), (128, 16)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_values(device, dtype, dims):
    for length in sizes(device):
        operands, options = ssd_call((2, 3, length), dims, dtype=dtype, device=device)
        assert_ssd(tk.ssd(*operands, **options, return_state=True), operands, options)


@pytest.mark.parametrize(("groups", "dims"), GROUPS_AND_SHAPES)
def test_groups_and_shapes(device, groups, dims):
    operands, options = ssd_call((2, 8, 140), dims, groups=groups, device=device)
    assert_ssd(tk.ssd(*operands, **options, return_state=True), operands, options)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("skip", ["", "head", "column"])
@pytest.mark.parametrize("state", [False, True])
def test_options(device, state, skip, gate):
    operands, options = ssd_call(
        (1, 4, 100), (40, 64), groups=2, device=device, gate=gate, skip=skip, state=state
    )
    assert_ssd(tk.ssd(*operands, **options, return_state=True), operands, options)


@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("limit", [(0.0, math.inf), (0.0, 0.2), (0.01, 0.1)])
def test_step_sizes(device, limit, softplus):
    operands, options = ssd_call((1, 4, 100), (64, 64), device=device)
    options.update(dt_softplus=softplus, dt_limit=limit)
    assert_ssd(tk.ssd(*operands, **options, return_state=True), operands, options)


def test_numbers_in_the_dtype_of_x(device):
    """A model in bfloat16 has all of its parameters so."""
    operands, options = ssd_call((2, 4, 70), (64, 64), device=device)
    names = ("D", "dt_bias")
    narrow = {name: x.to(BF16) if name in names else x for name, x in options.items()}
    operands[1:3] = [x.to(BF16) for x in operands[1:3]]
    found = tk.ssd(*operands, **narrow)
    wide_options = {name: x.float() if name in names else x for name, x in narrow.items()}
    x, dt, A, B, C = operands
    assert torch.equal(found, tk.ssd(x, dt.float(), A.float(), B, C, **wide_options))


@pytest.mark.parametrize("layout", HEAD_LAYOUTS)
def test_layouts(device, layout):
    operands, options = ssd_call((2, 4, 130), (64, 64), groups=2, device=device)
    expected = tk.ssd(*operands, **options, return_state=True)
    x, dt, A, B, C = operands
    moved = [heads(x, layout), spread(dt), spread(A), heads(B, layout), heads(C, layout)]
    changed = {**options, "z": heads(options["z"], layout), "D": unaligned(options["D"])}
    changed["initial_state"] = options["initial_state"].mT.contiguous().mT
    found = tk.ssd(*moved, **changed, return_state=True)
    assert_ssd(found, operands, options)
    if device == "cuda":  # products of a CPU depend on the layout
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


def test_layout_of_models(device):
    """(B, T, H, P) and (B, T, G, N), as models have them, as parts of one projection."""
    batch, length, count, columns, groups, keys = 2, 70, 4, 64, 2, 64
    whole = normal((batch, length, count * columns + 2 * groups * keys), BF16, device)
    x, B, C = whole.split([count * columns, groups * keys, groups * keys], 2)
    x = x.unflatten(2, (count, columns)).transpose(1, 2)
    B, C = (y.unflatten(2, (groups, keys)).transpose(1, 2) for y in (B, C))
    dt = torch.rand(batch, length, count, device=device)
    A = -torch.rand(count, device=device)
    found = tk.ssd(x, dt.transpose(1, 2), A, B, C)
    packed = [y.contiguous() for y in (x, dt.transpose(1, 2), A, B, C)]
    assert torch.equal(found, tk.ssd(*packed))


@pytest.mark.parametrize("split", [1, 63, 64, 77, 199])
def test_a_sequence_in_parts(device, split):
    """The state handed over gives what one call gives."""
    operands, options = ssd_call((1, 2, 200), (64, 64), device=device, gate=False)
    x, dt, A, B, C = operands
    whole = tk.ssd(*operands, **options, return_state=True)
    outs = []
    for part in (slice(0, split), slice(split, None)):
        cut = [x[:, :, part], dt[:, :, part], A, B[:, :, part], C[:, :, part]]
        out, options["initial_state"] = tk.ssd(*cut, **options, return_state=True)
        outs.append(out)
    parts = (torch.cat(outs, 2), options["initial_state"])
    for a, b in zip(parts, whole, strict=True):
        error = (a.double() - b.double()).square().mean().sqrt()
        assert float(error / b.double().square().mean().sqrt()) < 6e-3


PACKED = [[0, 130], [0, 0, 64, 65, 200, 200], [0, 7, 71, 135, 150], [5, 100, 180]]


@pytest.mark.parametrize("bounds", PACKED)
@pytest.mark.parametrize("dims", [(64, 128), (40, 24)])
def test_packed_sequences(device, dims, bounds):
    """Also tokens before the first sequence and behind the last, whose outputs are 0."""
    length = bounds[-1] + 3 * (bounds[0] > 0)
    operands, options = ssd_call(
        (1, 4, length), dims, groups=2, device=device, cu_seqlens=bounds, skip="column"
    )
    found = tk.ssd(*operands, **options, return_state=True)
    assert_ssd(found, operands, options)
    assert bool((found[0][:, :, : bounds[0]] == 0).all())
    assert bool((found[0][:, :, bounds[-1] :] == 0).all())


def test_a_sequence_does_not_see_its_neighbours(device):
    operands, options = ssd_call((1, 2, 150), (64, 64), device=device, cu_seqlens=[0, 70, 150])
    expected = tk.ssd(*operands, **options, return_state=True)
    x, dt, A, B, C = (y.clone() for y in operands)
    for y in (x, dt, B, C):
        y[:, :, 70:] = math.nan
    options["initial_state"][1] = math.inf
    out, state = tk.ssd(x, dt, A, B, C, **options, return_state=True)
    assert torch.equal(out[:, :, :70], expected[0][:, :, :70])
    assert torch.equal(state[0], expected[1][0])
    assert bool(out[:, :, 70:].isnan().all())


def test_no_sequences(device):
    operands, options = ssd_call((1, 2, 10), (64, 64), device=device, cu_seqlens=[0])
    out, state = tk.ssd(*operands, **options, return_state=True)
    assert torch.equal(out, torch.zeros_like(operands[0]))
    assert state.shape == (0, 2, 64, 64)


@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 0, 5), (2, 2, 0)])
def test_nothing_to_compute(device, shape):
    groups = min(1, shape[1])
    operands, options = ssd_call(shape, (64, 64), groups=groups, device=device)
    out, state = tk.ssd(*operands, **options, return_state=True)
    assert out.shape == operands[0].shape
    assert torch.equal(state, options["initial_state"])


def test_integers_are_exact(device):
    """No decay, steps of 1 and one element of B and C: outputs count the tokens."""
    x = torch.ones(1, 2, 150, 64, dtype=BF16, device=device)
    dt, A = torch.ones(1, 2, 150, device=device), torch.zeros(2, device=device)
    B = functional.pad(torch.ones(1, 1, 150, 1, dtype=BF16, device=device), (0, 63))
    out, state = tk.ssd(x, dt, A, B, B, return_state=True)
    count = torch.arange(1, 151, device=device).to(BF16).view(1, 1, -1, 1).expand_as(x)
    assert torch.equal(out, count)
    expected = torch.zeros(1, 2, 64, 64, device=device)
    expected[..., 0] = 150
    assert torch.equal(state, expected)


def test_resets(device):
    """Log decays of -inf and far below what float32's exponential holds: no NaN, and nothing of
    the tokens before."""
    operands, options = ssd_call((1, 2, 200), (64, 64), device=device, gate=False)
    x, dt, A, B, C = operands
    options = {"dt_limit": (0.0, math.inf), "dt_softplus": False}
    dt = dt.abs() / 16
    dt[:, :, ::50] = 100.0
    A = torch.tensor([-16.0, -math.inf], device=device)
    out, state = tk.ssd(x, dt, A, B, C, **options, return_state=True)
    assert_ssd((out, state), [x, dt, A, B, C], options)
    for begin in (50, 150):
        cut = [x[:, :, begin:], dt[:, :, begin:], A, B[:, :, begin:], C[:, :, begin:]]
        part = tk.reference.ssd(*map(wide, cut))
        error = (out[:, :, begin:].double() - part).square().mean().sqrt()
        assert float(error / part.square().mean().sqrt()) < 6e-3


def test_nan_of_a_step_size_is_seen(device):
    operands, options = ssd_call((1, 2, 70), (64, 64), device=device)
    operands[1][0, 1, 3] = math.nan
    out = tk.ssd(*operands, **options)
    assert bool(out[0, 1, 3].isnan().all())
    assert not bool(out[0, 0].isnan().any())


def mamba3(q, k, v, dt, A, trap, gate):
    """Mamba-3 (SISO) token by token: the value of a token also enters with the next one."""
    state = q.new_zeros(*v.shape[:2], v.shape[3], q.shape[3])
    weight, outs = torch.sigmoid(trap), []
    before = torch.zeros_like(state)
    for t in range(v.shape[2]):
        decay = (A * dt[:, :, t]).exp()[..., None, None]
        step, share = dt[:, :, t, None, None], weight[:, :, t, None, None]
        new = v[:, :, t, :, None] * k[:, :, t, None, :]
        state = decay * state + (1 - share) * step * decay * before + share * step * new
        before = new
        outs.append((state @ q[:, :, t, :, None]).squeeze(3))
    return torch.stack(outs, 2) * functional.silu(gate)


def test_mamba3_by_other_keys(device):
    """What the documents say: weights in the keys, and a corrected output."""
    (batch, count, length), columns, keys = (1, 2, 100), 64, 64
    q, k = (normal((batch, count, length, keys), BF16, device) for _ in "qk")
    v, gate = (normal((batch, count, length, columns), BF16, device) for _ in "vz")
    dt = torch.rand(batch, count, length, device=device) / 4
    A, trap = -torch.rand(count, device=device), normal((batch, count, length), device=device)
    expected = mamba3(*(x.double() for x in (q, k, v, dt, A, trap, gate)))

    later = functional.pad(((1 - torch.sigmoid(trap)) * dt)[:, :, 1:], (0, 1))
    weight = torch.sigmoid(trap) * dt + later
    own = later * (q.float() * k.float()).sum(3)
    out = tk.linear_attention(
        q, (weight.unsqueeze(3) * k.float()).to(BF16), v, g=A[:, None] * dt, scale=1.0
    )
    found = (out.float() - own.unsqueeze(3) * v.float()) * functional.silu(gate.float())
    error = (found.double() - expected).square().mean().sqrt()
    assert float(error / expected.square().mean().sqrt()) < 8e-3


X, DT, A = torch.zeros(2, 4, 5, 16, dtype=BF16), torch.zeros(2, 4, 5), torch.zeros(4)
B = torch.zeros(2, 2, 5, 8, dtype=BF16)
EDGES = torch.tensor([0, 5], dtype=torch.int32)
ONE = (X[:1], DT[:1], A, B[:1], B[:1])
WRONG = {
    "no tensor": (([1], DT, A, B, B), {}, TypeError, "x must be a torch.Tensor"),
    "float32": ((X.float(), DT, A, B.float(), B.float()), {}, TypeError, "torch.float32"),
    "mixed": ((X, DT, A, B.half(), B), {}, TypeError, "B is torch.float16"),
    "sparse": ((X, DT, A, B, B.to_sparse()), {}, TypeError, "dense"),
    "device": ((X, DT, A, B.to("meta"), B), {}, TypeError, "one device"),
    "3-D": ((X[0], DT, A, B, B), {}, ValueError, "4 dimensions"),
    "B's dimensions": ((X, DT, A, B[0], B[0]), {}, ValueError, "4 dimensions"),
    "B's length": ((X, DT, A, B[:, :, :4], B[:, :, :4]), {}, ValueError, "B has shape"),
    "C's shape": ((X, DT, A, B, B[:, :1]), {}, ValueError, "C has shape"),
    "groups": ((X[:, :3], DT[:, :3], A[:3], B, B), {}, ValueError, "multiple of B's"),
    "columns": ((X[..., :12], DT, A, B, B), {}, ValueError, "12 columns"),
    "many keys": ((X, DT, A, *[B.repeat(1, 1, 1, 17)] * 2), {}, ValueError, "136 columns"),
    "dt's shape": ((X, DT[:, :, :4], A, B, B), {}, ValueError, "dt has shape"),
    "dt's dtype": ((X, DT.double(), A, B, B), {}, TypeError, "dt is torch.float64"),
    "dt no tensor": ((X, None, A, B, B), {}, TypeError, "dt must be a dense tensor"),
    "A's shape": ((X, DT, A[:3], B, B), {}, ValueError, "A has shape"),
    "A's device": ((X, DT, A.to("meta"), B, B), {}, TypeError, "A is on meta"),
    "D's shape": ((X, DT, A, B, B), {"D": A[:2]}, ValueError, "D has shape"),
    "z's shape": ((X, DT, A, B, B), {"z": X[:, :2]}, ValueError, "z has shape"),
    "z's dtype": ((X, DT, A, B, B), {"z": X.half()}, TypeError, "z is torch.float16"),
    "bias": ((X, DT, A, B, B), {"dt_bias": A[:2]}, ValueError, "dt_bias has shape"),
    "softplus": ((X, DT, A, B, B), {"dt_softplus": 1}, TypeError, "dt_softplus must be a bool"),
    "limit": ((X, DT, A, B, B), {"dt_limit": 1.0}, TypeError, "dt_limit must be two numbers"),
    "limit's number": ((X, DT, A, B, B), {"dt_limit": (0, "a")}, TypeError, "must be a number"),
    "negative limit": ((X, DT, A, B, B), {"dt_limit": (-1, 1)}, ValueError, "dt_limit is"),
    "limit nan": ((X, DT, A, B, B), {"dt_limit": (0, math.nan)}, ValueError, "dt_limit is"),
    "state's shape": ((X, DT, A, B, B), {"initial_state": torch.zeros(2, 4, 8, 16)}, ValueError,
                      "initial_state has shape"),
    "state's dtype": ((X, DT, A, B, B), {"initial_state": X[:, :, :, :8]}, TypeError,
                      "initial_state is torch.bfloat16"),
    "return_state": ((X, DT, A, B, B), {"return_state": 1}, TypeError, "return_state must be"),
    "edges' dtype": (ONE, {"cu_seqlens": EDGES.long()}, TypeError, "cu_seqlens is torch.int64"),
    "edges' shape": (ONE, {"cu_seqlens": EDGES[None]}, ValueError, "contiguous vector"),
    "no edges": (ONE, {"cu_seqlens": EDGES[:0]}, ValueError, "has no elements"),
    "edges and batch": ((X, DT, A, B, B), {"cu_seqlens": EDGES}, ValueError, "batch size 2"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "options", "error", "words"), WRONG.values(), ids=WRONG)
def test_wrong_calls(args, options, error, words):
    with pytest.raises(error, match=words):
        tk.ssd(*args, **options)


# The kernel on the emulator: every instance, segments, and policies.

EMULATED = [
    (130, (64, 128), 1, 1, 2, "on_wait"),
    (300, (64, 128), 2, 3, 1, "random"),
    (200, (72, 104), 2, 2, 1, "late_mma"),
    (150, (128, 128), 2, 1, 2, "eager"),
    (270, (64, 64), 3, 5, 1, "random"),
    (100, (40, 24), 3, 1, 2, "on_wait"),
    (200, (64, 64), 1, 2, 4, "late_mma"),
    (1, (8, 8), 1, 1, 4, "on_wait"),
]


@pytest.mark.all_twins
@pytest.mark.emulator
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("length", "dims", "warpgroups", "segments", "groups", "policy"), EMULATED)
def test_emulated(dtype, length, dims, warpgroups, segments, groups, policy):
    operands, options = ssd_call((1, 4, length), dims, groups=groups, dtype=dtype, skip="column")
    forced = {"warpgroups": warpgroups, "segments": segments}
    with tk.emulate(policy, seed=length, config=forced, replay=segments > 1) as run:
        found = tk.ssd(*operands, **options, return_state=True)
    keys = 64 if dims[1] <= 64 else 128
    name = f"forward_{'bf16' if dtype == BF16 else 'fp16'}_keys{keys}_{warpgroups}warpgroups"
    assert [x["kernel"] for x in run.kernels] == [name]
    assert_ssd(found, operands, options)


@pytest.mark.emulator
@pytest.mark.parametrize("bounds", PACKED)
@pytest.mark.parametrize("segments", [1, 3])
def test_emulated_packed_sequences(segments, bounds):
    length = bounds[-1] + 3 * (bounds[0] > 0)
    operands, options = ssd_call(
        (1, 4, length), (40, 72), groups=2, cu_seqlens=bounds, gate=segments == 1
    )
    with tk.emulate("random", seed=segments, config={"segments": segments}):
        found = tk.ssd(*operands, **options, return_state=True)
    assert_ssd(found, operands, options)


@pytest.mark.emulator
def test_emulated_layouts():
    """States by their strides, operands that no tensor map describes."""
    operands, options = ssd_call((2, 2, 70), (40, 24))
    with tk.emulate():
        expected = tk.ssd(*operands, **options, return_state=True)
        x, dt, A, B, C = operands
        options["initial_state"] = options["initial_state"].mT.contiguous().mT
        options["z"] = spread(options["z"])
        moved = [unaligned(x), spread(dt), spread(A), heads(B, "bshd"), unaligned(C)]
        found = tk.ssd(*moved, **options, return_state=True)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.emulator
def test_emulated_neighbours():
    """What is not a number in one sequence stays there."""
    with tk.emulate("late_mma"):
        test_a_sequence_does_not_see_its_neighbours("cpu")


@pytest.mark.emulator
@pytest.mark.parametrize("column", [0, 5, 63])
def test_emulated_state_beyond_half(column):
    """A state of which a column is beyond what half can hold: all of it is scaled."""
    operands, options = ssd_call((1, 1, 200), (64, 64), dtype=FP16, gate=False, skip="")
    operands[3] *= 2.0**-3
    options["initial_state"][..., column] = 3e6
    operands[2] *= 0
    options["initial_state"][..., :column] *= 1e-3
    operands[4][..., column] *= 2.0**-12
    with tk.emulate("late_mma"):
        found = tk.ssd(*operands, **options, return_state=True)
    expected = tk.reference.ssd(
        *map(wide, operands), **{k: wide(x) for k, x in options.items()}, return_state=True
    )
    for a, b in zip(found, expected, strict=True):
        error = (a.double() - b).square().mean().sqrt()
        assert float(error / b.square().mean().sqrt()) < 3e-3
