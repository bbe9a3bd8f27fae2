"""`thunderkittens.nn`: parameter names, values against plain PyTorch, generation with caches."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import thunderkittens as tk
from thunderkittens import nn as layers

BF16 = torch.bfloat16
WIDTH = 256


def based(device="cpu", dtype=torch.float64, **options):
    return layers.BasedAttention(WIDTH, 4, **options).to(device, dtype)


def sliding(device="cpu", dtype=torch.float64, **options):
    return layers.SlidingAttention(WIDTH, 4, window_size=24, **options).to(device, dtype)


def lolcats(device="cpu", dtype=torch.float64, **options):
    # With this window steps continue a prompt; for the other, see test_lolcats_published.py.
    options = {"window": "terrace", "kv_heads": 2, "features": 32} | options
    layer = layers.LolcatsAttention(WIDTH, 4, **options).to(device, dtype)
    with torch.no_grad():
        layer.window_factors.add_(torch.randn_like(layer.window_factors))
    return layer


MODELS = {
    "based": (based, {}),
    "based, no denominator, norm": (based, {"normalize": False, "norm": True}),
    "sliding": (sliding, {}),
    "sliding, grouped": (sliding, {"kv_heads": 2, "rotary_dim": 32, "bias": False}),
    "lolcats": (lolcats, {}),
    "lolcats, affine, biases": (lolcats, {"affine": True, "bias": True, "theta": 5e5}),
}
every_model = pytest.mark.parametrize(("make", "options"), MODELS.values(), ids=MODELS)


# The layers' formulas, written apart from theirs.


def heads(x, count):
    return x.view(*x.shape[:2], count, -1).transpose(1, 2)


def rotated(x, dim, theta):
    """By complex numbers."""
    rates = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=x.device) / dim)
    angles = torch.arange(x.shape[2], device=x.device)[:, None] * rates
    turn = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.complex(x[..., : dim // 2].double(), x[..., dim // 2 : dim].double()) * turn
    return torch.cat([pairs.real, pairs.imag, x[..., dim:].double()], -1)


def plain_based(layer, x):
    q, k, v = (heads(p(x), 4) for p in (layer.proj_q, layer.proj_k, layer.proj_v))
    s = q @ k.mT / 4
    weights = (1 + s + s**2 / 2).tril()
    y = weights @ v
    if layer.normalize:
        y = y / weights.sum(-1, keepdim=True)
    if layer.g_norm is not None:
        y = y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * layer.g_norm.weight
    return layer.out_proj(y.transpose(1, 2).flatten(2))


def plain_sliding(layer, x):
    size, count = layer.head_dim, layer.kv_heads
    q, k, v = layer.Wqkv(x).split([4 * size, count * size, count * size], -1)
    q, k, v = heads(q, 4), heads(k, count), heads(v, count)
    q, k = (rotated(t, layer.rotary.dim, 10000.0) for t in (q, k))
    k, v = (t.repeat_interleave(4 // count, 1) for t in (k, v))
    i = torch.arange(x.shape[1], device=x.device)
    distance = i[:, None] - i
    s = (q @ k.mT / math.sqrt(size)).masked_fill((distance < 0) | (distance > 12), -math.inf)
    return layer.out_proj((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


def plain_lolcats(layer, x, theta):
    q, k, v = heads(layer.q_proj(x), 4), heads(layer.k_proj(x), 2), heads(layer.v_proj(x), 2)
    q, k = rotated(q, 64, theta), rotated(k, 64, theta)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)

    def features(t, weight):
        z = t @ weight.mlp.layer
        return torch.cat([z.softmax(-1), (-z).softmax(-1)], -1)

    blocks = torch.arange(x.shape[1], device=x.device) // 64
    near = (blocks[:, None] - blocks <= 1).tril()
    beta = layer.window_factors.float().sigmoid().double()
    alpha = 1 - beta if layer.affine else 1
    s = (q @ k.mT / 8).masked_fill(~near, -math.inf)
    weights = beta * (s - s.amax(-1, keepdim=True)).exp()
    linear = features(q, layer.feature_map_q) @ features(k, layer.feature_map_k).mT
    weights = weights + alpha * linear.tril().masked_fill(near, 0)
    y = weights @ v / weights.sum(-1, keepdim=True)
    return layer.o_proj(y.transpose(1, 2).flatten(2))


def plain(layer, x, options):
    if isinstance(layer, layers.BasedAttention):
        return plain_based(layer, x)
    if isinstance(layer, layers.SlidingAttention):
        return plain_sliding(layer, x)
    return plain_lolcats(layer, x, options.get("theta", 1e4))


@every_model
def test_values(device, make, options):
    torch.manual_seed(1)
    layer = make(device, **options)
    for length in (1, 50, 200):
        x = torch.randn(2, length, WIDTH, dtype=torch.float64, device=device)
        torch.testing.assert_close(layer(x), plain(layer, x, options), rtol=1e-6, atol=1e-6)


@every_model
def test_low_precision(device, make, options):
    """By the ops, in bfloat16, and by autocast."""
    torch.manual_seed(2)
    layer = make(device, BF16, **options)
    exact = make(device, **options)
    exact.load_state_dict({name: x.double() for name, x in layer.state_dict().items()})
    x = torch.randn(2, 150, WIDTH, device=device).to(BF16)
    with torch.no_grad():
        expected = exact(x.double())
    out = layer(x).detach()
    assert out.dtype == BF16
    assert float((out - expected).norm() / expected.norm()) < 2e-2
    wide = exact.float()
    with torch.autocast(torch.device(device).type, BF16):
        out = wide(x.float()).detach()
    assert float((out - expected).norm() / expected.norm()) < 2e-2


@every_model
@pytest.mark.parametrize("dtype", [torch.float64, BF16])
def test_generation(device, make, options, dtype):
    """Prefill in parts and single steps give what the whole sequence gives."""
    torch.manual_seed(3)
    layer = make(device, dtype, **options)
    x = torch.randn(2, 140, WIDTH, device=device).to(dtype)
    parts = [100, 7, *[1] * 33] if dtype == torch.float64 else [125, *[1] * 15]
    with torch.no_grad():
        whole = layer(x)
        cache = layer.new_cache(2)
        outputs = [layer(part, cache) for part in x.split(parts, 1)]
    error = (torch.cat(outputs, 1).double() - whole.double()).norm() / whole.double().norm()
    assert float(error) < (1e-5 if dtype == torch.float64 else 2e-2)


@every_model
def test_generation_by_autocast(device, make, options):
    torch.manual_seed(5)
    layer = make(device, torch.float32, **options)
    x = torch.randn(2, 140, WIDTH, device=device)
    with torch.no_grad(), torch.autocast(torch.device(device).type, BF16):
        whole = layer(x)
        cache = layer.new_cache(2)
        outputs = [layer(part, cache) for part in x.split([125, *[1] * 15], 1)]
    error = (torch.cat(outputs, 1) - whole).float().norm() / whole.float().norm()
    assert float(error) < 2e-2


@every_model
def test_training(device, make, options):
    torch.manual_seed(4)
    layer = make(device, **options)
    x = torch.randn(1, 130, WIDTH, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.randn(1, 130, WIDTH, dtype=torch.float64, device=device)
    leaves = [x, *layer.parameters()]
    found = torch.autograd.grad((layer(x) * weight).sum(), leaves)
    expected = torch.autograd.grad((plain(layer, x, options) * weight).sum(), leaves)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


# Published checkpoints


def names(layer):
    return {name: tuple(x.shape) for name, x in layer.state_dict().items()}


def test_lolcats_names():
    """Of Llama 3.1 8B, and those of a small model loaded as a part of it."""
    layer = layers.LolcatsAttention(4096, 32, kv_heads=8, theta=5e5, device="meta")
    assert names(layer) == {
        "q_proj.weight": (4096, 4096),
        "k_proj.weight": (1024, 4096),
        "v_proj.weight": (1024, 4096),
        "o_proj.weight": (4096, 4096),
        "feature_map_q.mlp.layer": (32, 128, 64),
        "feature_map_k.mlp.layer": (32, 128, 64),
        "window_factors": (1, 32, 1, 1),
    }
    layer = lolcats(dtype=torch.float32)
    model = torch.nn.ModuleDict({"self_attn": layer})
    state = {f"self_attn.{name}": x + 1 for name, x in layer.state_dict().items()}
    state["self_attn.rotary_emb.inv_freq"] = torch.zeros(32)
    assert not any(model.load_state_dict(state))
    assert torch.equal(layer.feature_map_q.weight, state["self_attn.feature_map_q.mlp.layer"])


def test_based_names():
    """Of the models with 360 million and 1.3 billion parameters."""
    for width in (1024, 1792):
        layer = layers.BasedAttention(width, 16, norm=True, device="meta")
        assert names(layer) == {
            "proj_q.weight": (256, width),
            "proj_k.weight": (256, width),
            "proj_v.weight": (width, width),
            "out_proj.weight": (width, width),
            "g_norm.weight": (width // 16,),
        }
        layer = layers.SlidingAttention(width, 16, window_size=256, device="meta")
        assert names(layer) == {
            "Wqkv.weight": (3 * width, width),
            "Wqkv.bias": (3 * width,),
            "out_proj.weight": (width, width),
            "out_proj.bias": (width,),
        }
        assert layer.left == 128


# The rest


def test_positions_from_outside():
    """cos and sin as transformers makes them: the halves are equal."""
    layer = lolcats()
    x = torch.randn(2, 30, WIDTH, dtype=torch.float64)
    cos, sin = (torch.cat([t, t], -1) for t in layer.rotary(torch.arange(30)))
    out = layer(x, position_embeddings=(cos[None].expand(2, -1, -1), sin[None].expand(2, -1, -1)))
    torch.testing.assert_close(out, layer(x))


def test_sequences_of_different_lengths():
    layer = lolcats()
    x = torch.randn(2, 80, WIDTH, dtype=torch.float64)
    together = layer.new_cache(2)
    with torch.no_grad():
        for i, length in enumerate((70, 20)):
            alone = layer.new_cache(1)
            layer(x[i : i + 1, :length], alone)
            for target, source in zip(together.state, alone.state, strict=True):
                target[i : i + 1] = source
        token = torch.stack([x[0, 70], x[1, 20]])[:, None]
        out = layer(token, together)
        assert together.state.lengths.tolist() == [71, 21]
        whole = layer(x)
    torch.testing.assert_close(out[0, 0], whole[0, 70], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[1, 0], whole[1, 20], rtol=1e-5, atol=1e-5)


def test_llama3_scaling():
    """High frequencies stay, low ones are divided by the factor."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = layers.Rotary(128, 5e5).frequencies
    scaled = layers.Rotary(128, 5e5, scaling).frequencies
    wavelength = 2 * math.pi / plain
    assert torch.equal(scaled[wavelength < 2048], plain[wavelength < 2048])
    torch.testing.assert_close(scaled[wavelength > 8192], plain[wavelength > 8192] / 8)
    assert bool((scaled.diff() < 0).all())


def test_frequencies_stay_in_float32():
    layer = lolcats(dtype=BF16)
    assert layer.rotary.frequencies.dtype == torch.float32
    assert "rotary.frequencies" not in layer.state_dict()


@pytest.mark.gpu
def test_cuda_graph_of_a_step(device):
    for make, options in ((based, {}), (lolcats, {}), (lolcats, {"window": "published"})):
        layer = make(device, BF16, **options)
        cache, other = layer.new_cache(2), layer.new_cache(2)
        x = torch.randn(2, 70, WIDTH, device=device).to(BF16)
        with torch.no_grad():
            layer(x, cache)
            layer(x, other)
            token = torch.randn(2, 1, WIDTH, device=device).to(BF16)
            warm = layer.new_cache(2)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                layer(token, warm)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = layer(token, cache)
            for _ in range(5):
                token.copy_(torch.randn(2, 1, WIDTH, device=device))
                graph.replay()
                torch.testing.assert_close(out, layer(token, other))


WRONG = {
    "width": (lambda: layers.BasedAttention(100, 3), "no multiple"),
    "heads": (lambda: layers.SlidingAttention(128, 4, kv_heads=3), "divide"),
    "kv_heads": (lambda: layers.LolcatsAttention(128, 4, kv_heads=3), "divide"),
    "rotary": (lambda: layers.Rotary(7), "even"),
    "scaling": (lambda: layers.Rotary(8, scaling={"rope_type": "yarn"}), "yarn"),
}


@pytest.mark.parametrize(("call", "words"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(call, words):
    with pytest.raises(ValueError, match=words):
        call()
    assert tk.nn is layers


@pytest.mark.timeout(300)
def test_the_example_runs():
    """At its tiniest size."""
    example = Path(__file__).parents[1] / "examples/convert_to_lolcats.py"
    result = subprocess.run(
        [sys.executable, str(example), "--size", "tiny", "--device", "cpu"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("loss ") == 4
