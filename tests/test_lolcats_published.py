"""`window="published"`: what the authors' PyTorch code computes for prompts of any length and in
the steps that follow, here token by token from its description, in float64."""

from __future__ import annotations

import math

import pytest
import torch

import thunderkittens as tk
from helpers.lolcats import error, exact, operands, part, rounding_of_factors
from helpers.numerics import assert_accurate

BF16, FP16 = torch.bfloat16, torch.float16
LIMIT = {BF16: 5e-3, FP16: 1e-3}
LENGTHS = [1, 63, 64, 65, 100, 127, 128, 129, 200]
NAMES = ("q", "k", "v", "q_map", "k_map", "alpha", "beta")
PUBLISHED = {"window": "published"}


def token_output(inputs, i, window, linear):
    """What token i gets: softmax weights of the tokens of `window`, linear ones of `linear`."""
    q, k, v, q_map, k_map, alpha, beta = inputs
    group = q.shape[1] // k.shape[1]
    query = q[:, :, i]

    def chosen(x, tokens):
        return x[:, :, list(tokens)].repeat_interleave(group, 1)

    def features(x, weight):
        z = torch.einsum("bh...d,hdf->bh...f", x, weight)
        return torch.cat([z.softmax(-1), z.neg().softmax(-1)], -1)

    near = torch.einsum("bhd,bhjd->bhj", query, chosen(k, window)) / math.sqrt(q.shape[-1])
    near = beta[:, None] * (near - near.max(-1, keepdim=True).values).exp()
    far = torch.einsum("bhf,bhjf->bhj", features(query, q_map), features(chosen(k, linear), k_map))
    far = alpha[:, None] * far
    out = torch.einsum("bhj,bhjd->bhd", near, chosen(v, window))
    out = out + torch.einsum("bhj,bhjd->bhd", far, chosen(v, linear))
    return out / (near.sum(-1) + far.sum(-1))[..., None]


def prompt_output(inputs):
    """The blocks of 64 end where the prompt ends: the first may be shorter. A window is the token's
    own block up to it, and the one before. A prompt of up to 64 tokens has linear weights there."""
    length = inputs[0].shape[2]
    rows = []
    for i in range(length):
        block_end = length - (length - 1 - i) // 64 * 64
        first = max(block_end - 128, 0)
        linear = range(i + 1) if length <= 64 else range(first)
        rows.append(token_output(inputs, i, range(first, i + 1), linear))
    return torch.stack(rows, 2)


def step_outputs(inputs, begin, end):
    """The window slides: the last 64 tokens with the new one; all before have linear weights."""
    rows = []
    for i in range(begin, end):
        first = max(i - 63, 0)
        rows.append(token_output(inputs, i, range(first, i + 1), range(first)))
    return torch.stack(rows, 2)


def doubles(inputs):
    return [x.double() for x in inputs]


def steps(inputs, state, begin, end):
    outs = [
        tk.lolcats_decode(*part(inputs, i, i + 1), state, **PUBLISHED) for i in range(begin, end)
    ]
    return torch.cat(outs, 2)


def assert_state(state, inputs, length, limit):
    """Of all but the last 64 tokens the sums, and those verbatim."""
    _, k, v, _, k_map, *_ = doubles(inputs)
    folded = max(length - 64, 0)
    z = k[:, :, :folded].repeat_interleave(k_map.shape[0] // k.shape[1], 1) @ k_map
    features = torch.cat([z.softmax(-1), (-z).softmax(-1)], -1)
    values = v[:, :, :folded].repeat_interleave(k_map.shape[0] // k.shape[1], 1)
    assert error(state.numerator, features.mT @ values) < limit
    assert error(state.denominator, features.sum(2)) < limit
    assert state.lengths.tolist() == [length] * k.shape[0]
    for cache, tokens in ((state.keys, inputs[1]), (state.values, inputs[2])):
        for token in range(folded, length):
            assert torch.equal(cache[:, :, token % 128], tokens[:, :, token])


@pytest.mark.parametrize("length", LENGTHS)
def test_reference(length):
    """Prompt and ten steps, exactly."""
    inputs = doubles(operands(2, 4, 2, length + 10, 64, 32))
    prompt = part(inputs, 0, length)
    out, state = tk.reference.lolcats(*prompt, return_state=True, **PUBLISHED)
    torch.testing.assert_close(out, prompt_output(prompt), rtol=1e-12, atol=1e-12)
    assert_state(state, prompt, length, 1e-12)
    for i in range(length, length + 10):
        out = tk.reference.lolcats_decode(*part(inputs, i, i + 1), state, **PUBLISHED)
        expected = step_outputs(inputs, i, i + 1)
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)  # sums are in float32


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("length", LENGTHS)
def test_prompt(device, length, dtype):
    for dim, features in ((128, 64), (64, 32)):
        inputs = operands(2, 4, 2, length, dim, features, dtype, device)
        out, state = tk.lolcats(*inputs, return_state=True, **PUBLISHED)
        assert out.dtype == dtype
        assert out.is_contiguous()
        assert error(out, prompt_output(doubles(inputs))) < LIMIT[dtype]
        assert_state(state, inputs, length, 4e-3)
        assert torch.equal(tk.lolcats(*inputs, **PUBLISHED), out)


@pytest.mark.parametrize("length", LENGTHS)
def test_prompt_and_steps(device, length):
    inputs = operands(2, 4, 2, length + 70, 64, 64, BF16, device)
    more = 70 if device == "cuda" else 5
    _, state = tk.lolcats(*part(inputs, 0, length), return_state=True, **PUBLISHED)
    out = steps(inputs, state, length, length + more)
    assert error(out, step_outputs(doubles(inputs), length, length + more)) < LIMIT[BF16]
    assert_state(state, part(inputs, 0, length + more), length + more, 4e-3)


def test_steps_from_the_first_token(device):
    length = 140 if device == "cuda" else 6
    inputs = operands(2, 2, 1, length, 128, 64, FP16, device)
    state = tk.reference.empty_state(2, 2, 1, 128, 64, dtype=FP16, device=device)
    out = steps(inputs, state, 0, length)
    assert error(out, step_outputs(doubles(inputs), 0, length)) < LIMIT[FP16]


@pytest.mark.parametrize("length", [128, 192])
def test_same_as_terrace(device, length):
    """As in training: at multiples of 64, from 128 on."""
    inputs = operands(1, 2, 1, length, 64, 64, BF16, device)
    out, state = tk.lolcats(*inputs, return_state=True, **PUBLISHED)
    expected, end = tk.lolcats(*inputs, return_state=True)
    assert torch.equal(out, expected)
    assert all(torch.equal(x, y) for x, y in zip(state, end, strict=True))


def test_difference_from_terrace():
    """Prompts of up to 64 tokens, and of more than 128 that are no multiple of 64; all steps that
    see more than 64 tokens."""
    inputs = operands(1, 2, 1, 200, 64, 64)
    for length in (40, 100, 130):
        some = part(inputs, 0, length)
        expected, end = exact(some)
        found = prompt_output(doubles(some))
        assert (error(found, expected) > 1e-2) == (length != 100)
        token = doubles(part(inputs, length, length + 1))
        expected = tk.reference.lolcats_decode(*token, end)
        found = step_outputs(doubles(inputs), length, length + 1)
        assert (error(found, expected) > 1e-2) == (length > 63)


@pytest.mark.parametrize("length", [5, 64, 65, 100, 128, 129, 300])
def test_gradients(device, length):
    """Also through the first block's sums."""
    inputs = operands(2, 4, 2, length, 64, 32, BF16, device)

    def weights_of(out):
        return torch.cos(torch.arange(out.numel(), device=device)).view(out.shape).to(BF16)

    def gradients(function, leaves):
        leaves = [x.detach().requires_grad_() for x in leaves]
        out = function(*leaves)
        return torch.autograd.grad(out, leaves, weights_of(out).to(out.dtype))

    def reference(*args):
        return tk.reference.lolcats(*args, **PUBLISHED)

    found = gradients(lambda *args: tk.lolcats(*args, **PUBLISHED), inputs)
    expected = gradients(reference, doubles(inputs))
    rounded = gradients(reference, inputs)
    factor_slack = rounding_of_factors(inputs, weights_of, **PUBLISHED)
    for name, x, y, z in zip(NAMES, found, expected, rounded, strict=True):
        slack = torch.finfo(BF16).eps * y.square().mean().sqrt() + 1e-6
        assert_accurate(x, y, z, slack=slack + factor_slack.get(name, 0.0))


def test_gradient_of_the_first_block():
    """In float32 nothing hides: the sums' gradient, by itself."""
    inputs = operands(1, 2, 1, 150, 64, 32)
    some = [x.float() for x in inputs]
    k, v = (x.clone().requires_grad_() for x in inputs[1:3])
    tk.lolcats(inputs[0], k, v, *inputs[3:], **PUBLISHED)[:, :, 100:].sum().backward()
    k_exact, v_exact = (x.clone().requires_grad_() for x in some[1:3])
    out = tk.reference.lolcats(some[0], k_exact, v_exact, *some[3:], **PUBLISHED)
    out[:, :, 100:].sum().backward()
    first = slice(0, 150 % 64)
    assert float(v_exact.grad[:, :, first].abs().max()) > 0
    assert error(v.grad[:, :, first], v_exact.grad[:, :, first]) < 1e-2
    assert error(k.grad[:, :, first], k_exact.grad[:, :, first]) < 3e-2


@pytest.mark.parametrize("length", [0, 64, 100])
@pytest.mark.parametrize("empty", ["batch", "heads"])
def test_nothing(device, length, empty):
    batch, heads = (0, 2) if empty == "batch" else (2, 0)
    inputs = operands(batch, heads, heads, length, 64, 32, BF16, device)
    out, state = tk.lolcats(*inputs, return_state=True, **PUBLISHED)
    assert out.shape == inputs[0].shape
    assert state.lengths.tolist() == [length] * batch
    inputs = operands(2, 2, 1, 0, 64, 32, BF16, device)
    assert tk.lolcats(*inputs, **PUBLISHED).shape == inputs[0].shape


@pytest.mark.parametrize("length", [40, 100])
def test_autocast(device, length):
    inputs = operands(1, 2, 1, length, 64, 32, BF16, device)
    wide = [x.float() for x in inputs]
    with torch.autocast(torch.device(device).type, BF16):
        assert torch.equal(tk.lolcats(*wide, **PUBLISHED), tk.lolcats(*inputs, **PUBLISHED))


def test_layer(device):
    """Generation by a layer: prompt, then tokens together and one by one."""
    torch.manual_seed(1)
    layer = tk.nn.LolcatsAttention(128, 2, kv_heads=1, features=32).to(device, torch.float64)
    assert layer.window == "published"
    x = torch.randn(2, 110, 128, dtype=torch.float64, device=device)
    with torch.no_grad():
        q, k, v = layer.queries_keys_values(x)
        beta = layer.window_factors.flatten().sigmoid()
        maps = layer.feature_map_q.weight, layer.feature_map_k.weight
        inputs = [q, k, v, *maps, torch.ones_like(beta), beta]
        expected = torch.cat(
            [prompt_output(part(inputs, 0, 100)), step_outputs(inputs, 100, 110)], 2
        )
        expected = layer.o_proj(expected.transpose(1, 2).flatten(2))
        cache = layer.new_cache(2)
        nothing = layer(x[:, :0], cache)
        out = [layer(piece, cache) for piece in x.split([100, 7, 1, 1, 1], 1)]
        out.append(layer(x[:, :0], cache))
    torch.testing.assert_close(torch.cat([nothing, *out], 1), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="no gradient behind the prompt"):
        layer(x[:, :2], cache)


def test_wrong_calls():
    inputs = operands(1, 2, 1, 70, 64, 32)
    state = tk.reference.empty_state(1, 2, 1, 64, 32)
    for module in (tk, tk.reference):
        with pytest.raises(ValueError, match="no initial_state"):
            module.lolcats(*inputs, initial_state=state, **PUBLISHED)
    with pytest.raises(ValueError, match='window must be "terrace" or "published", got'):
        tk.lolcats(*inputs, window="sliding")
    with pytest.raises(ValueError, match='window must be "terrace" or "published", got'):
        tk.lolcats_decode(*part(inputs, 0, 1), state, window="sliding")
    with pytest.raises(ValueError, match="LolcatsAttention: window must be"):
        tk.nn.LolcatsAttention(128, 2, window="sliding")


def test_compiled(device):
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(tk.lolcats, fullgraph=True, backend=backend)
    step = torch.compile(tk.lolcats_decode, fullgraph=True, backend=backend)
    inputs = operands(1, 2, 1, 101, 64, 32, BF16, device)
    prompt = part(inputs, 0, 100)
    out, state = compiled(*prompt, return_state=True, **PUBLISHED)
    expected, other = tk.lolcats(*prompt, return_state=True, **PUBLISHED)
    assert error(out, expected) < LIMIT[BF16]
    token = part(inputs, 100)
    out = step(*token, state, **PUBLISHED)
    assert error(out, tk.lolcats_decode(*token, other, **PUBLISHED)) < LIMIT[BF16]
    assert state.lengths.tolist() == [101]


# The kernels on the emulator, those for Hopper and the portable ones.


@pytest.mark.emulator
@pytest.mark.parametrize("length", [100, 129, 200])
@pytest.mark.parametrize("portable", [False, True])
def test_emulated_prompt(portable, length):
    inputs = operands(1, 2, 1, length, 64, 32)
    with tk.emulate(portable=portable) as run:
        out, state = tk.lolcats(*inputs, return_state=True, **PUBLISHED)
    assert len(run.kernels) == (1 if length < 128 else 2)
    assert error(out, prompt_output(doubles(inputs))) < LIMIT[BF16]
    assert_state(state, inputs, length, 4e-3)


@pytest.mark.all_twins
@pytest.mark.emulator
@pytest.mark.parametrize(("dim", "features"), [(128, 64), (64, 64), (128, 32), (64, 32)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("portable", [False, True])
def test_emulated_steps(portable, dtype, dim, features):
    """Sequences around the lengths from which tokens leave the window, and beyond the caches."""
    lengths = [0, 62, 63, 64, 65, 130]
    all_inputs = operands(len(lengths), 2, 1, max(lengths) + 2, dim, features, dtype)
    states = []
    for b, length in enumerate(lengths):
        one = [x[b : b + 1] for x in all_inputs[:3]] + all_inputs[3:]
        end = tk.reference.lolcats(*part(one, 0, length), return_state=True, **PUBLISHED)[1]
        # What no row has may be anything.
        there = tk.reference.cached_positions(end.lengths, "published") >= 0
        hidden = ~there[:, None, :, None]
        caches = (x.masked_fill(hidden, math.nan) for x in (end.keys, end.values))
        states.append(tk.LolcatsState(*end[:2], *caches, end.lengths))
    state = tk.LolcatsState(*(torch.cat(x) for x in zip(*states, strict=True)))
    for step in range(2):
        token = [
            torch.stack([x[b, :, n + step] for b, n in enumerate(lengths)])[:, :, None]
            for x in all_inputs[:3]
        ]
        with tk.emulate("random", portable=portable) as run:
            out = tk.lolcats_decode(*token, *all_inputs[3:], state, **PUBLISHED)
        assert [x["portable"] for x in run.kernels] == [portable]
        for b, n in enumerate(lengths):
            one = [x[b : b + 1].double() for x in all_inputs[:3]] + doubles(all_inputs[3:])
            expected = step_outputs(one, n + step, n + step + 1)
            assert error(out[b : b + 1], expected) < LIMIT[dtype]
    assert state.lengths.tolist() == [n + 2 for n in lengths]
    for b, n in enumerate(lengths):
        one = [x[b : b + 1, :, : n + 2] for x in all_inputs[:3]] + all_inputs[3:]
        assert_state(tk.LolcatsState(*(x[b : b + 1] for x in state)), one, n + 2, 4e-3)
