"""The recurrent layers of `thunderkittens.nn`: the tensors of published layers, values and
gradients beside theirs, generation with caches and slots, packed sequences."""

from __future__ import annotations

import copy

import pytest
import torch

import thunderkittens as tk
from thunderkittens import nn as layers

pytest.importorskip("transformers")

from helpers import hybrid
from helpers.hybrid import EVERY, MODELS, WIDTH

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
every_layer = pytest.mark.parametrize("name", EVERY)
every_model = pytest.mark.parametrize("name", MODELS)
# One for each kind of layer, and of what it is made of.
typical = pytest.mark.parametrize("name", ["Bamba", "Qwen3Next", "Qwen3_5Text", "fla"])
# For what takes long: one of them at the lowest intensity.
at_least_one = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.intensity(1 if name == "Qwen3Next" else 2))
        for name in typical.args[1]
    ],
)


def tokens(*shape, device="cpu", dtype=FP64):
    return torch.randn(*shape, WIDTH, device=device).to(dtype)


def integers(*numbers, device="cpu"):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def edges_of(lengths, device="cpu"):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def pair(name, device, dtype):
    """A layer of transformers and this package's with its tensors."""
    reference, _ = hybrid.theirs(name)
    reference = reference.to(device, dtype)
    layer = hybrid.ours(name, device, dtype)
    layer.load_state_dict(reference.state_dict())
    return reference, layer


def results(run, layer, x, weight):
    """The output, and the gradients of x and of the layer's parameters by their names."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    out = run(x)
    (out * weight.to(out.dtype)).sum().backward()
    return {"out": out.detach(), "x": x.grad} | {n: p.grad for n, p in layer.named_parameters()}


def relative(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def joined(parts):
    """Vectors as one: the largest of a few errors says little."""
    vectors = [x.double() for x in parts.values() if x.dim() == 1]
    rest = {name: x for name, x in parts.items() if x.dim() > 1}
    return rest | {"vectors": torch.cat(vectors)} if vectors else rest


def assert_as_good(found, exact, plain):
    """The project's rule for whole layers: in the root mean square an error is at most twice that
    of the plain layer, plus one rounding."""
    rounding = torch.finfo(found["out"].dtype).eps / 2
    assert found.keys() == plain.keys() == exact.keys()
    found, exact, plain = map(joined, (found, exact, plain))
    for part, expected in exact.items():
        bound = 2 * relative(plain[part], expected) + rounding
        assert relative(found[part], expected) <= bound, part


# Published layers


@every_model
def test_names_and_shapes(name):
    reference, _ = hybrid.theirs(name)
    ours, theirs = (
        {name: tuple(x.shape) for name, x in layer.state_dict().items()}
        for layer in (hybrid.ours(name), reference)
    )
    assert ours == theirs


def test_names_of_flash_linear_attention():
    """Of the layers with 6 heads of 128, values twice as wide."""
    layer = layers.GatedDeltaNet(1024, 6, value_dim=256, published="fla", device="meta")
    assert {name: tuple(x.shape) for name, x in layer.state_dict().items()} == {
        "q_proj.weight": (768, 1024),
        "k_proj.weight": (768, 1024),
        "v_proj.weight": (1536, 1024),
        "a_proj.weight": (6, 1024),
        "b_proj.weight": (6, 1024),
        "g_proj.weight": (1536, 1024),
        "q_conv1d.weight": (768, 1, 4),
        "k_conv1d.weight": (768, 1, 4),
        "v_conv1d.weight": (1536, 1, 4),
        "A_log": (6,),
        "dt_bias": (6,),
        "o_norm.weight": (256,),
        "o_proj.weight": (1024, 1536),
    }
    assert layer.o_norm.eps == 1e-5


def test_sizes_of_published_models():
    """Nemotron-H 8B, Granite 4 small and Qwen3-Next 80B, by the sizes of their configurations."""
    nemotron = layers.Mamba2Mixer(4096, 128, 64, 128, groups=8, device="meta")
    assert nemotron.in_proj.weight.shape == (18560, 4096)
    assert nemotron.conv1d.weight.shape == (10240, 1, 4)
    granite = layers.Mamba2Mixer(4096, 128, 64, 128, device="meta")
    assert granite.in_proj.weight.shape == (16768, 4096)
    qwen = layers.GatedDeltaNet(2048, 16, value_heads=32, published="qwen3_next", device="meta")
    assert qwen.in_proj_qkvz.weight.shape == (12288, 2048)
    assert qwen.in_proj_ba.weight.shape == (64, 2048)
    assert qwen.conv1d.weight.shape == (8192, 1, 4)
    assert qwen.norm.weight.shape == (128,)
    assert qwen.out_proj.weight.shape == (2048, 4096)


@pytest.mark.parametrize("value_heads", [2, 4])
def test_tensors_of_qwen3_next_without_their_order(value_heads):
    """A layer with separate projections loads them too, as a part of a model: rows are sorted."""
    options = {**hybrid.DELTA, "value_heads": value_heads}
    given = layers.GatedDeltaNet(WIDTH, published="qwen3_next", **options)
    layer = layers.GatedDeltaNet(WIDTH, published="qwen3_5", **options)
    state = {f"mixer.{name}": x for name, x in given.state_dict().items()}
    kept = dict(state)
    assert not any(torch.nn.ModuleDict({"mixer": layer}).load_state_dict(state))
    assert state.keys() == kept.keys()
    x = tokens(2, 9, dtype=FP32)
    torch.testing.assert_close(layer(x), given(x))
    state["mixer.in_proj_qkvz.weight"] = torch.zeros(7, WIDTH)
    with pytest.raises(RuntimeError, match="in_proj_qkvz"):
        torch.nn.ModuleDict({"mixer": layer}).load_state_dict(state)


# Values and gradients


@every_layer
def test_values(device, name):
    """In float64 the formula's, a token at a time."""
    layer = hybrid.ours(name, device)
    for length in (1, 3, 70):
        x = tokens(2, length, device=device)
        torch.testing.assert_close(layer(x), hybrid.formula(layer, x), rtol=1e-9, atol=1e-9)


@every_layer
def test_gradients(device, name):
    layer = hybrid.ours(name, device)
    x, weight = tokens(2, 66, device=device), tokens(2, 66, device=device)
    found = results(layer, layer, x, weight)
    expected = results(lambda y: hybrid.formula(layer, y), layer, x, weight)
    for part, grad in expected.items():
        assert relative(found[part], grad) < 1e-9, part


@every_model
def test_as_in_transformers(device, name):
    """Outputs and gradients in float32 are as near to the formula in float64."""
    reference, layer = pair(name, device, FP32)
    wide = copy.deepcopy(layer).double()
    x, weight = tokens(2, 70, device=device, dtype=FP32), tokens(2, 70, device=device, dtype=FP32)
    found = results(layer, layer, x, weight)
    plain = results(reference, reference, x, weight)
    expected = results(lambda y: hybrid.formula(wide, y), wide, x.double(), weight.double())
    assert all(relative(plain[part], exact) < 1e-4 for part, exact in expected.items())
    assert_as_good(found, expected, plain)


@every_model
def test_low_precision(device, name):
    """By the ops, in bfloat16, and by autocast."""
    reference, layer = pair(name, device, BF16)
    wide = copy.deepcopy(layer).double()
    x, weight = tokens(2, 70, device=device, dtype=BF16), tokens(2, 70, device=device)
    plain = results(reference, reference, x, weight)
    expected = results(lambda y: hybrid.formula(wide, y), wide, x.double(), weight)
    assert all(relative(plain[part], exact) < 0.2 for part, exact in expected.items())
    assert_as_good(results(layer, layer, x, weight), expected, plain)
    single = copy.deepcopy(wide).float()
    with torch.autocast(torch.device(device).type, BF16):
        found = single(x.float()).detach()
    assert found.dtype == BF16
    assert_as_good({"out": found}, {"out": expected["out"]}, {"out": plain["out"]})


# Generation


def in_parts(layer, x, parts, cache, **options):
    outs = [layer(part, cache, **options) for part in x.split(parts, 1)]
    return torch.cat(outs, 1)


@every_layer
@torch.no_grad()
def test_generation(device, name):
    """A prompt in parts, and steps of one token and of several, give what the whole gives."""
    layer = hybrid.ours(name, device)
    x = tokens(2, 60, device=device)
    cache = layer.new_cache(2)
    assert cache.state.dtype == cache.conv.dtype == FP64
    before = cache.conv.data_ptr(), cache.state.data_ptr()
    found = in_parts(layer, x, [30, 2, 9, *[1] * 6, 8, 5], cache)
    torch.testing.assert_close(found, layer(x), rtol=1e-9, atol=1e-9)
    assert before == (cache.conv.data_ptr(), cache.state.data_ptr())


@every_layer
@torch.no_grad()
def test_generation_in_low_precision(device, name):
    """By the ops, in bfloat16, and by autocast: as far from float64 as the whole sequence is."""
    layer = hybrid.ours(name, device, BF16)
    x = tokens(2, 90, device=device, dtype=BF16)
    wide = copy.deepcopy(layer).double()
    exact, whole = wide(x.double()), layer(x)
    cache = layer.new_cache(2)
    assert cache.conv.dtype == BF16
    assert cache.state.dtype == FP32
    parts = [64, *[1] * 9, 9, 8]
    found = in_parts(layer, x, parts, cache)
    assert_as_good({"out": found}, {"out": exact}, {"out": whole})
    single = wide.float()
    with torch.autocast(torch.device(device).type, BF16):
        cache = single.new_cache(2)
        assert cache.conv.dtype == BF16
        found = in_parts(single, x.float(), parts, cache)
    assert_as_good({"out": found}, {"out": exact}, {"out": whole})


@every_model
@torch.no_grad()
def test_steps_as_in_transformers(device, name):
    """Step by step over a cache of transformers, and over ours."""
    reference, layer = pair(name, device, FP32)
    config = hybrid.theirs(name)[1]
    x = tokens(2, 20, device=device)
    exact = hybrid.formula(copy.deepcopy(layer).double(), x)
    x = x.float()
    # Its steps do not limit step sizes, which its prefill does.
    if name not in ("Mamba2", "NemotronH", "Zamba2"):
        past = hybrid.cache_of(config)
        plain = torch.cat([reference(part, past) for part in x.split([12, *[1] * 8], 1)], 1)
        assert relative(plain, exact) < 1e-4
    found = in_parts(layer, x, [12, *[1] * 8], layer.new_cache(2))
    assert relative(found, exact) < 1e-5


@typical
@torch.no_grad()
def test_slots(device, name):
    """Sequences have places of a pool in any order, and enter and leave it; a row of -1 is of none,
    and no other place changes."""
    layer = hybrid.ours(name, device)
    x = tokens(3, 20, device=device)
    whole = layer(x)
    cache = layer.new_cache(6)
    cache.conv.normal_()
    cache.state.normal_()
    untouched = [cache.conv.clone(), cache.state.clone()]
    cache.reset([4, 1])
    cache.reset(integers(5, device=device))

    first = layer(x[:, :9], cache, slots=integers(4, 1, 5, device=device))
    torch.testing.assert_close(first, whole[:, :9], rtol=1e-9, atol=1e-9)
    for begin, end in ((9, 10), (10, 15), (15, 19)):  # steps
        rows = torch.stack([x[2], x[0], x[0]])[:, begin:end]
        out = layer(rows, cache, slots=integers(5, -1, 4, device=device))
        torch.testing.assert_close(out[[2, 0]], whole[[0, 2], begin:end], rtol=1e-9, atol=1e-9)
    out = layer(x[1:2, 9:], cache, slots=integers(1, device=device))
    torch.testing.assert_close(out, whole[1:2, 9:], rtol=1e-9, atol=1e-9)
    for now, then in zip((cache.conv, cache.state), untouched, strict=True):
        assert torch.equal(now[[0, 2, 3]], then[[0, 2, 3]])


@typical
@torch.no_grad()
def test_a_prompt_without_slots_is_not_written(device, name):
    layer = hybrid.ours(name, device)
    x = tokens(2, 11, device=device)
    alone = layer.new_cache(1)
    layer(x[1:], alone)
    for places in (1, 3):
        cache = layer.new_cache(places)
        cache.conv.normal_()
        cache.state.normal_()
        before = [cache.conv.clone(), cache.state.clone()]
        layer(x, cache, slots=integers(-1, -1, device=device))
        assert torch.equal(cache.conv, before[0])
        assert torch.equal(cache.state, before[1])
    for rows, slots in ((x, (-1, 2)), (x.flip(0), (2, -1))):
        cache.reset()
        layer(rows, cache, slots=integers(*slots, device=device))
        for pool, one in ((cache.conv, alone.conv), (cache.state, alone.state)):
            assert not pool[:2].any()
            torch.testing.assert_close(pool[2:], one)
    layer(x[:0], cache, slots=integers(device=device))


@typical
@torch.no_grad()
def test_packed_prompts(device, name):
    """Sequences behind each other are those alone, also over a cache, and without tokens."""
    layer = hybrid.ours(name, device)
    lengths = [5, 0, 17, 1]
    x = tokens(1, sum(lengths), device=device)
    edges, slots = edges_of(lengths, device), integers(3, 0, 2, 4, device=device)
    cache = layer.new_cache(5)
    for cu_seqlens in (edges, edges):  # the second continues
        found = layer(x, cache, slots=slots, cu_seqlens=cu_seqlens)
    bare = layer(x, cu_seqlens=edges)
    begin = 0
    for slot, length in zip((3, 0, 2, 4), lengths, strict=True):
        part = x[:, begin : begin + length]
        if length:
            here = slice(begin, begin + length)
            torch.testing.assert_close(bare[:, here], layer(part), rtol=1e-9, atol=1e-9)
        alone = layer.new_cache(1)
        twice = layer(torch.cat([part, part], 1), alone)
        torch.testing.assert_close(found[:, begin : begin + length], twice[:, length:])
        torch.testing.assert_close(cache.conv[slot], alone.conv[0])
        torch.testing.assert_close(cache.state[slot], alone.state[0])
        begin += length
    assert not cache.state[1].any()


@typical
def test_gradients_of_packed_sequences(device, name):
    layer = hybrid.ours(name, device)
    lengths = [30, 7, 0, 29]
    x, weight = tokens(1, 66, device=device), tokens(1, 66, device=device)
    edges = edges_of(lengths, device)
    found = results(lambda y: layer(y, cu_seqlens=edges), layer, x, weight)

    def apart(y):
        return torch.cat([layer(part) for part in y.split(lengths, 1) if part.shape[1]], 1)

    expected = results(apart, layer, x, weight)
    for part, grad in expected.items():
        assert relative(found[part], grad) < 1e-9, part


@typical
def test_gradients_behind_a_cache(device, name):
    """Of the tokens of the call; those before count as they are."""
    layer = hybrid.ours(name, device)
    x = tokens(2, 14, device=device)
    weight = tokens(2, 4, device=device)
    cache = layer.new_cache(2)
    with torch.no_grad():
        layer(x[:, :10], cache)
    kept = [cache.conv.clone(), cache.state.clone()]
    found = results(lambda y: layer(y, cache), layer, x[:, 10:], weight)
    again = layers.RecurrentCache(*kept)
    slots = integers(0, 1, device=device)
    same = results(lambda y: layer(y, again, slots=slots), layer, x[:, 10:], weight)

    def whole(y):
        return layer(torch.cat([x[:, :10], y], 1))[:, 10:]

    expected = results(whole, layer, x[:, 10:], weight)
    for part in ("out", "x"):
        assert relative(found[part], expected[part]) < 1e-9
    for part, grad in found.items():
        assert torch.equal(same[part], grad)
    assert torch.equal(cache.state, again.state)
    assert torch.equal(cache.conv, again.conv)


@typical
@torch.no_grad()
def test_parts_of_a_pool(device, name):
    """A cache of tensors with strides of their own, and states of 16 bits."""
    layer = hybrid.ours(name, device, BF16)
    x = tokens(2, 40, device=device, dtype=BF16)
    new = layer.new_cache(2, state_dtype=BF16)
    assert new.state.dtype == BF16
    pool = torch.zeros(2, 3, new.conv[0].numel() + 1000, dtype=BF16, device=device)
    conv = pool[:, 1, : new.conv[0].numel()].unflatten(-1, new.conv.shape[1:])
    states = torch.zeros(2, 2, *new.state.shape[1:], dtype=BF16, device=device)
    cache = layers.RecurrentCache(conv, states[:, 1])
    parts = [33, 1, 1, 5]
    found, expected = in_parts(layer, x, parts, cache), in_parts(layer, x, parts, new)
    assert torch.equal(found, expected)
    assert torch.equal(cache.conv, new.conv)
    assert torch.equal(cache.state, new.state)
    assert not states[:, 0].any()
    assert not pool[:, ::2].any()
    assert relative(found, layer(x)) < 2e-2


# The rest


@at_least_one
def test_compiled(device, name):
    """One graph of a training step, and of a step over a cache."""
    torch._dynamo.reset()
    layer = hybrid.ours(name, device, BF16)
    x = tokens(2, 20, device=device, dtype=BF16)
    weight = tokens(2, 20, device=device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = results(compiled, layer, x, weight)
    for part, expected in results(layer, layer, x, weight).items():
        torch.testing.assert_close(found[part], expected)
    slots = integers(2, 0, device=device)
    with torch.no_grad():
        outs = []
        for run in (compiled, layer):
            cache = layer.new_cache(3)
            run(x[:, :12], cache, slots=slots)
            outs.append([run(x[:, 12:13], cache, slots=slots), cache.conv, cache.state])
    for a, b in zip(*outs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
@typical
@torch.no_grad()
def test_cuda_graph_of_a_step(device, name):
    """A replay takes the slots of the moment."""
    layer = hybrid.ours(name, device, BF16)
    cache, other = layer.new_cache(4), layer.new_cache(4)
    x = tokens(2, 30, device=device, dtype=BF16)
    slots = integers(3, 1, device=device)
    for each in (cache, other):
        layer(x, each, slots=slots)
    token, stream = x[:, :1].clone(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer(token, layer.new_cache(4), slots=slots)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(token, cache, slots=slots)
    for rows in ((3, 1), (1, -1), (3, 1), (0, 2)):
        token.copy_(tokens(2, 1, device=device))
        slots.copy_(integers(*rows, device=device))
        graph.replay()
        torch.testing.assert_close(out, layer(token, other, slots=slots))
    torch.testing.assert_close(cache.state, other.state)


@pytest.mark.emulator
@pytest.mark.parametrize("name", ["Bamba", "Qwen3Next"])
def test_kernels(name):
    """The kernels of a training step and of generation, on the emulator."""
    reference, layer = pair(name, "cpu", BF16)
    wide = copy.deepcopy(layer).double()
    x, weight = tokens(1, 67, dtype=BF16), tokens(1, 67)
    plain = results(reference, reference, x, weight)
    expected = results(lambda y: hybrid.formula(wide, y), wide, x.double(), weight)
    with tk.emulate():
        assert_as_good(results(layer, layer, x, weight), expected, plain)
        with torch.no_grad():
            cache = layer.new_cache(2)
            slots = integers(1)
            found = in_parts(layer, x, [64, 1, 2], cache, slots=slots)
            packed = layer(x, cu_seqlens=edges_of([40, 27]))
    assert_as_good({"out": found}, {"out": expected["out"]}, {"out": plain["out"]})
    apart = torch.cat([wide(part.double()) for part in x.split([40, 27], 1)], 1).detach()
    assert relative(packed, apart) < 2 * relative(plain["out"], expected["out"]) + 2**-8


def mamba(**options):
    return layers.Mamba2Mixer(WIDTH, **{**hybrid.MIXER, **options})


def delta(**options):
    return layers.GatedDeltaNet(WIDTH, **{**hybrid.DELTA, **options})


WRONG = {
    "groups": (lambda: mamba(groups=4), "6 heads are no multiple of 4 groups"),
    "no groups": (lambda: mamba(groups=0), "no multiple of 0 groups"),
    "heads of values": (lambda: delta(value_heads=3), "3 heads of values are no multiple"),
    "family": (lambda: delta(published="rwkv"), "published is 'rwkv'"),
    "gate": (lambda: delta(gate=False), "may have none"),
}


@pytest.mark.parametrize(("call", "words"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(call, words):
    with pytest.raises(ValueError, match=words):
        call()


WRONG_CALLS = {
    "dimensions": (ValueError, {"x": (3,)}, {}, "must be \\(B, N, width\\)"),
    "packed batch": (ValueError, {"x": (2, 3)}, {"cu_seqlens": integers(0, 3)}, "it must be 1"),
    "no cache": (ValueError, {"x": (2, 3)}, {"slots": integers(0, 1)}, "there is none"),
    "slots of a cache": (ValueError, {"x": (3, 3), "slots": 2}, {}, "2 slots for 3 sequences"),
    "packed, slots of a cache": (
        ValueError,
        {"x": (1, 3), "slots": 1},
        {"cu_seqlens": integers(0, 1, 3)},
        "1 slots for 2 sequences",
    ),
    "kind of slots": (TypeError, {"x": (2, 3), "slots": 4}, {"slots": [0, 1]}, "got list"),
    "dtype of slots": (
        TypeError,
        {"x": (2, 3), "slots": 4},
        {"slots": torch.tensor([0, 1])},
        "got torch.int64",
    ),
    "number of slots": (
        ValueError,
        {"x": (2, 3), "slots": 4},
        {"slots": integers(0)},
        "slots has shape \\(1,\\)",
    ),
}


@pytest.mark.parametrize(
    ("error", "sizes", "options", "words"), WRONG_CALLS.values(), ids=WRONG_CALLS
)
@pytest.mark.parametrize("make", [mamba, delta])
def test_wrong_calls(make, error, sizes, options, words):
    layer = make()
    cache = layer.new_cache(sizes["slots"]) if "slots" in sizes else None
    with pytest.raises(error, match=f"tk.nn.{type(layer).__name__}: .*{words}"):
        layer(tokens(*sizes["x"], dtype=FP32), cache, **options)


def test_numbers_of_heads_stay_in_float32():
    """16 bits are too few for decays near 1; a checkpoint's, of whatever dtype, are loaded."""
    for make in (mamba, delta):
        layer = make(dtype=BF16)
        assert layer.A_log.dtype == layer.dt_bias.dtype == FP32
        assert layer.out_proj.weight.dtype == BF16
        state = {name: x.to(BF16) for name, x in layer.state_dict().items()}
        layer.load_state_dict(state)
        assert torch.equal(layer.A_log, state["A_log"].float())
        steps = torch.nn.functional.softplus(layer.dt_bias)
        assert bool((steps > 0.9e-3).all())
        assert bool((steps < 0.11).all())


def test_linear_layers_are_converted():
    """`tk.convert` finds the projections."""
    layer = delta(dtype=BF16)
    x = tokens(2, 9, dtype=BF16)
    before = layer(x)
    report = tk.convert(layer, "gemm")
    assert {x.name for x in report.converted} == {
        "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"
    }  # fmt: skip
    torch.testing.assert_close(layer(x), before, rtol=2e-2, atol=2e-2)
