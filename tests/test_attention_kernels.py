"""Every kernel of attention on the emulator, whatever the choice would be: ragged lengths, masks,
score options, packed sequences, under every policy."""

from __future__ import annotations

import re
import zlib
from itertools import pairwise

import pytest
import torch

import thunderkittens as tk
from helpers.attention import (
    assert_attention,
    assert_gradients,
    normal,
    plain_attention,
    plain_low_lse,
    score_options,
    sink_noise,
)
from thunderkittens import _C, emulation

if emulation.problem is not None:
    pytest.skip(emulation.problem, allow_module_level=True)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PATTERN = re.compile(
    r"(forward|split|backward)_(bf16|fp16)_d(\d+)(?:v(\d+))?_(\d+)x(\d+)(_modified)?$"
)


def kernels(op, *kinds):
    """Names of the kernels, with the fields of their configuration."""
    found = []
    for kernel in _C.kernels():
        match = PATTERN.match(kernel["name"]) if kernel["op"] == op else None
        if match and match[1] in kinds:
            stages = int(re.search(r"(\d+) stages", kernel["config"])[1])
            found.append((kernel["name"], match, stages))
    return found


def fields(match, stages):
    _, _, dim, value_dim, rows, keys, modified = match.groups()
    config = {"head_dim": int(dim), "stages": stages, "modified": modified is not None}
    if match[1] == "backward":
        wide = {"value_dim": int(value_dim or dim)} if int(dim) > 128 else {}
        return config | {"block_m": int(rows)} | wide
    config |= {"value_dim": int(value_dim or dim), "block_n": int(keys)}
    config |= {"warpgroups": int(rows) // 64}
    # Those that split the keys have the score options all in one kernel.
    return config | ({"splits": 3, "modified": True} if match[1] == "split" else {"splits": 0})


def problems(match):
    """Lengths and options, dense; the last ones are also those of packed sequences."""
    if match[1] == "split":
        yield (1, 300), {"causal": True}, ("sink",)
        yield (5, 190), {"window_size": (70, 3)}, ("softcap", "alibi")
    elif match[7]:
        yield (150, 190), {"causal": "upper_left"}, ("softcap", "alibi_batch", "sink")
        yield (130, 70), {"window_size": (40, 20)}, ("alibi",)
    else:
        yield (200, 77), {}, ()
        yield (130, 200), {"causal": True, "window_size": (90, -1)}, ("sink",)


def policies(name):
    """All for bf16, and for fp16 the two that find the most."""
    return emulation.POLICIES if "_bf16_" in name else emulation.POLICIES[:2]


def cases(op, *kinds):
    return [
        pytest.param(name, match, stages, policy, id=f"{name}-{policy}")
        for name, match, stages in kernels(op, *kinds)
        for policy in policies(name)
    ]


def operands(match, lengths, batch=1):
    dtype, dim = DTYPES[match[2]], int(match[3])
    value_dim = int(match[4] or dim)
    shapes = [(batch, 4, lengths[0], dim - 8), (batch, 2, lengths[1], dim - 8)]
    shapes.append((batch, 2, lengths[1], value_dim))
    return [normal(shape, dtype, "cpu") for shape in shapes]


@pytest.mark.parametrize(
    ("name", "match", "stages", "policy"), cases("attention", "forward", "split")
)
def test_forward(name, match, stages, policy):
    torch.manual_seed(zlib.crc32(name.encode()))
    for lengths, mask, scores in problems(match):
        q, k, v = operands(match, lengths)
        options = {**mask, **score_options(scores, 4, 1, "cpu")}
        with tk.emulate(policy, seed=lengths[0], config=fields(match, stages), sm_count=3) as run:
            result = tk.attention(q, k, v, **options, return_lse=True)
        assert [kernel["kernel"] for kernel in run.kernels] == [name]
        assert_attention(result, q, k, v, **options)

    # The last problem's options, on sequences of which some have no tokens.
    lengths = [(1, 140), (0, 9), (lengths[0] // 2, lengths[0] // 3), (3, 0)]
    q, k, v = operands(match, tuple(map(sum, zip(*lengths, strict=True))))
    packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    edges = [[0, *torch.tensor(side).cumsum(0).tolist()] for side in zip(*lengths, strict=True)]
    tensors = [torch.tensor(e, dtype=torch.int32) for e in edges]
    with tk.emulate(policy, seed=1, config=fields(match, stages), sm_count=3):
        out, lse = tk.attention_varlen(*packed, *tensors, 140, 150, **options, return_lse=True)
    for (a, b), (c, d) in zip(*map(pairwise, edges), strict=True):
        part = out[a:b].transpose(0, 1).unsqueeze(0), lse[:, a:b].unsqueeze(0).contiguous()
        assert_attention(part, q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], **options)


@pytest.mark.parametrize(
    ("name", "match", "stages", "policy"), cases("attention_backward", "backward")
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_backward(name, match, stages, policy, deterministic):
    torch.manual_seed(zlib.crc32(name.encode()))
    for lengths, mask, scores in problems(match):
        q, k, v = operands(match, lengths)
        options = {**mask, **score_options(scores, 4, 1, "cpu")}
        sink = options.pop("sink", None)
        tensors = [q, k, v] + ([] if sink is None else [sink])
        out, lse = tk.attention(q, k, v, **options, sink=sink, return_lse=True)
        grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
        grad_lse[lse == -torch.inf] = 0
        mode = {False: 0, True: 1, "upper_left": 2}[options.get("causal", False)]
        with tk.emulate(policy, seed=lengths[0], config=fields(match, stages), sm_count=3) as run:
            actual = torch.ops.thunderkittens.attention_backward(
                grad_out, grad_lse, q, k, v, out, lse, mode, None,
                *options.get("window_size", (-1, -1)), options.get("softcap", 0.0),
                options.get("alibi_slopes"), sink, deterministic, [True] * 4,
            )  # fmt: skip
        assert [kernel["kernel"] for kernel in run.kernels] == [name]

        def gradients(
            function, convert, tensors=tensors, options=options, grads=(grad_out, grad_lse)
        ):
            leaves = [convert(x).detach().requires_grad_() for x in tensors]
            sink = leaves[3] if len(leaves) > 3 else None
            outputs = function(*leaves[:3], sink=sink, **options)
            grads = [g.to(x.dtype) for g, x in zip(grads, outputs, strict=True)]
            return torch.autograd.grad(outputs, leaves, grads)

        expected = gradients(
            lambda *x, **o: tk.reference.attention(*x, **o, return_lse=True), torch.Tensor.double
        )
        plain = gradients(
            lambda q, k, v, **o: (plain_attention(q, k, v, **o), plain_low_lse(q, k, **o)),
            lambda x: x,
        )
        noise = 0.0 if sink is None else sink_noise(q, k, v, grad_out, sink=sink, **options)
        assert_gradients(actual[: len(tensors)], expected, plain, noise=noise)


@pytest.mark.parametrize(
    ("name", "match", "stages", "policy"), cases("attention_backward", "backward")
)
def test_backward_of_packed_sequences(name, match, stages, policy):
    """Some of which have no tokens, in a fixed order."""
    torch.manual_seed(zlib.crc32(name.encode()))
    (rows, keys), mask, scores = list(problems(match))[-1]
    lengths = [(1, 140), (0, 9), (rows, keys), (3, 0)]
    q, k, v = operands(match, tuple(map(sum, zip(*lengths, strict=True))))
    options = {**mask, **score_options(scores, 4, 1, "cpu")}
    sink = options.pop("sink", None)
    packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    edges = [[0, *torch.tensor(side).cumsum(0).tolist()] for side in zip(*lengths, strict=True)]
    packing = [*(torch.tensor(e, dtype=torch.int32) for e in edges), 150, 200]
    out, lse = tk.attention_varlen(*packed, *packing, **options, sink=sink, return_lse=True)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    grad_lse[lse == -torch.inf] = 0
    with tk.emulate(policy, seed=rows, config=fields(match, stages), sm_count=3) as run:
        actual = torch.ops.thunderkittens.attention_varlen_backward(
            grad_out, grad_lse, *packed, out, lse, *packing,
            int(options.get("causal", False)), None, *options.get("window_size", (-1, -1)),
            options.get("softcap", 0.0), options.get("alibi_slopes"), sink, True, [True] * 4,
        )  # fmt: skip
    assert [kernel["kernel"] for kernel in run.kernels] == [name]
    for (a, b), (c, d) in zip(*map(pairwise, edges), strict=True):
        parts = [q[:, :, a:b], k[:, :, c:d], v[:, :, c:d]]
        grads = grad_out[a:b].transpose(0, 1)[None], grad_lse[:, a:b][None]

        def gradients(function, convert, parts=parts, grads=grads):
            leaves = [convert(x).detach().requires_grad_() for x in parts]
            outputs = function(*leaves, sink=None if sink is None else convert(sink), **options)
            pairs = [g.to(x.dtype) for g, x in zip(grads, outputs, strict=True)]
            return torch.autograd.grad(outputs, leaves, pairs)

        if b == a or d == c:
            assert all(bool((x == 0).all()) for x in (actual[0][a:b], actual[1][c:d]))
            continue
        expected = gradients(
            lambda *x, **o: tk.reference.attention(*x, **o, return_lse=True), torch.Tensor.double
        )
        plain = gradients(
            lambda q, k, v, **o: (plain_attention(q, k, v, **o), plain_low_lse(q, k, **o)),
            lambda x: x,
        )
        ends = ((a, b), (c, d), (c, d))
        mine = [
            x[first:last].transpose(0, 1)[None]
            for x, (first, last) in zip(actual, ends, strict=False)
        ]
        assert_gradients(mine, expected, plain)
