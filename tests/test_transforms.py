"""What every op must do under the transforms of `torch.func`, and the count of its operations."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import thunderkittens as tk
from helpers.samples import (
    DIFFERENTIABLE,
    SAMPLES,
    assert_close,
    assert_equal,
    every_differentiable_sample,
    every_mappable_sample,
    forward_and_backward,
    leaves,
    one_per_op,
)

# torch.func


def mapped(sample, device, dims, size=3):
    """Operands with a mapped dimension at the places in `dims` (None: not mapped)."""
    stacks = [sample.tensors(device) for _ in range(size)]
    single = sample.tensors(device)
    return [
        single[i] if dim is None else torch.stack([s[i] for s in stacks], dim)
        for i, dim in enumerate(dims)
    ]


def looped(function, tensors, dims, size=3):
    results = [
        function(
            *(x if dim is None else x.select(dim, i) for x, dim in zip(tensors, dims, strict=True))
        )
        for i in range(size)
    ]
    return [torch.stack(parts) for parts in zip(*results, strict=True)]


MAPPED = [
    (0, 0, 0),
    (1, 0, 1),
    (0, None, 0),
    (None, 1, 0),
    (None, 0, None),
    (0, None, None),
    (-1, -1, -1),
]


def dims_of(sample, pattern):
    """The mapped dimension of each tensor; the pattern repeats for those after the third."""
    dims = tuple(pattern[i % 3] if mappable else None for i, mappable in enumerate(sample.mappable))
    return dims if any(dim is not None for dim in dims) else (0, *dims[1:])


def assert_all_close(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        assert_close(x, y)


def assert_gradients(sample, actual, expected, otherwise):
    """`otherwise`, but for gemm with an activation, where the op keeps what the activation was
    applied to in the operands' dtype, which transforms keep in float32, for attention of more
    sequences or heads, for which another kernel may be chosen, and for the maps and factors of
    LoLCATS (the last four), whose gradients over a mapped dimension are rounded once, not one by
    one."""
    exact = len(expected)
    of_attention = sample.op.startswith("attention") and otherwise is assert_all_close
    if of_attention or sample.options.get("activation") is not None:
        exact = 0
    elif sample.op == "lolcats":
        exact -= 4
    otherwise(actual[:exact], expected[:exact])
    for x, y in zip(actual[exact:], expected[exact:], strict=True):
        # The output, which a gradient starts from, is rounded to the operands' dtype.
        dtype = sample.dtype if of_attention else y.dtype
        bound = 4 * torch.finfo(dtype).eps * y.double().abs().max()
        assert float((x.double() - y.double()).abs().max()) <= bound


@pytest.mark.parametrize("pattern", MAPPED)
@every_mappable_sample
def test_vmap(device, sample, pattern):
    """An activation has shorter formulas in some kernels, and which one runs depends on how the
    operands lie: such results differ by a rounding of the largest."""
    dims = dims_of(sample, pattern)
    tensors = mapped(sample, device, dims)
    results = torch.func.vmap(sample.function, in_dims=dims)(*tensors)
    expected = looped(sample.function, tensors, dims)
    if sample.options.get("activation") is None:
        assert_all_close(results, expected)
        return
    for x, y in zip(results, expected, strict=True):
        bound = torch.finfo(y.dtype).eps * y.double().abs().max()
        assert float((x.double() - y.double()).abs().max()) <= bound


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("gemm_bias", (None, None, 0)),
        ("attention_options", (None, None, None, None, 0)),
        ("attention_options", (0, None, 0, None, None)),
        ("attention_options", (None, None, None, 2, None)),
        ("attention_varlen_sink", (None, None, None, None, None, None, 1)),
        ("attention_varlen_sink", (0, None, None, None, None, 1, None)),
    ],
)
def test_vmap_over_some(device, name, dims):
    """Over the bias, sink or slopes alone, and not over them."""
    sample = SAMPLES[name]
    tensors = mapped(sample, device, dims)
    results = torch.func.vmap(sample.function, in_dims=dims)(*tensors)
    assert_all_close(results, looped(sample.function, tensors, dims))


def variants(x, kind):
    """Four tensors like x. Floats of one byte have no arithmetic. Gates, scales and time steps keep
    their sign, without which a state may overflow."""
    if kind in ("gate", "float32"):
        return [x, 2 * x, x / 2, x]
    if x.element_size() > 1:
        return [x, x + 1, x - 1, x]
    y = x.view(torch.uint8)
    return [x, y.flip(0).view(x.dtype), y.flip(-1).view(x.dtype), x]


@every_mappable_sample
def test_vmap_twice(device, sample):
    dims = dims_of(sample, (0, 0, 0))
    outer = [
        x if dim is None else torch.stack(variants(x, sample.kind(i))).unflatten(0, (2, 2))
        for i, (x, dim) in enumerate(zip(sample.tensors(device), dims, strict=True))
    ]
    function = torch.func.vmap(torch.func.vmap(sample.function, in_dims=dims), in_dims=dims)
    if sample.op.endswith("norm_quantize") and sample.options.get("output") == "nvfp4":
        with pytest.raises(RuntimeError, match="vmap within another one is not supported"):
            function(*outer)
        return
    twice = function(*outer)
    once = torch.func.vmap(sample.function, in_dims=dims)(
        *(x if dim is None else x.flatten(0, 1) for x, dim in zip(outer, dims, strict=True))
    )
    # The comparison says nothing about a call whose operands the op is not for.
    assert all(x.isfinite().all() for x in once if x.is_floating_point() and x.itemsize > 1)
    assert_all_close([x.flatten(0, 1) for x in twice], once)


@every_differentiable_sample
def test_vmap_of_ops_and_gradients_outside(device, sample):
    """vmap inside, ordinary autograd outside."""
    dims = dims_of(sample, (0, 0, 0))
    tensors = [
        x.requires_grad_(sample.kind(i) in DIFFERENTIABLE)
        for i, x in enumerate(mapped(sample, device, dims))
    ]
    actual = forward_and_backward(torch.func.vmap(sample.function, in_dims=dims), tensors)
    expected = forward_and_backward(lambda *x: looped(sample.function, x, dims), tensors)
    assert_gradients(sample, actual, expected, assert_all_close)


@every_differentiable_sample
def test_func_grad(device, sample):
    """torch.func.grad, and per-sample gradients by mapping it."""
    tensors = leaves(sample, device)
    arguments = tuple(i for i, x in enumerate(tensors) if x.requires_grad)
    dims = dims_of(sample, (0, 0, 0))

    def loss(*xs):
        return sum(y.float().square().sum() for y in sample.function(*xs))

    expected = torch.autograd.grad(loss(*tensors), [tensors[i] for i in arguments])
    plain = [x.detach() for x in tensors]
    actual = torch.func.grad(loss, arguments)(*plain)
    assert_gradients(sample, actual, expected, assert_equal)
    stacked = [
        x if dim is None else torch.stack([x, x]) for x, dim in zip(plain, dims, strict=True)
    ]
    mapped_grads = torch.func.vmap(torch.func.grad(loss, arguments), in_dims=dims)(*stacked)
    assert_gradients(sample, [x[1] for x in mapped_grads], expected, assert_all_close)


def test_vmap_cannot_map_lengths(device):
    sample = SAMPLES["attention_varlen"]
    tensors = [torch.stack([x, x]) for x in sample.tensors(device)]
    with pytest.raises(ValueError, match="cannot map cu_seqlens"):
        torch.func.vmap(sample.function)(*tensors)


@one_per_op
def test_forward_mode_is_refused(device, sample):
    """Dropping the tangents silently would give wrong derivatives."""
    tensors = tuple(sample.tensors(device))
    fixed = tensors[1:]
    with pytest.raises(RuntimeError, match="forward-mode differentiation"):
        torch.func.jvp(lambda x: sample.function(x, *fixed), tensors[:1], tensors[:1])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tensors[0], tensors[0])
        with pytest.raises(RuntimeError, match="forward-mode differentiation"):
            sample.function(dual, *fixed)
        sample.function(*tensors)


# Flops


def counted(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "shapes", [((33, 72), (72, 40)), ((2, 33, 72), (72, 40)), ((3, 5, 7), (3, 7, 2))]
)
def test_flops_of_gemm(device, shapes):
    """As many as PyTorch counts for its own product, forward and backward."""
    a, b = (torch.randn(s, device=device).bfloat16().requires_grad_() for s in shapes)
    assert counted(lambda: tk.gemm(a.detach(), b.detach())) == counted(
        lambda: a.detach() @ b.detach()
    )
    assert counted(lambda: tk.gemm(a, b).sum().backward()) == counted(
        lambda: torch.matmul(a, b).sum().backward()
    )


@pytest.mark.parametrize("causal", [False, True])
def test_flops_of_attention(device, causal):
    """As many as PyTorch counts for its own attention, which does not subtract masked scores."""
    q = torch.randn(2, 4, 33, 64, device=device).bfloat16().requires_grad_()
    k, v = (torch.randn(2, 2, 45, 64, device=device).bfloat16().requires_grad_() for _ in range(2))
    product = 2 * 2 * 4 * 33 * 45 * 64
    assert (
        counted(lambda: tk.attention(q.detach(), k.detach(), v.detach(), causal=causal))
        == 2 * product
    )
    assert counted(lambda: tk.attention(q, k, v, causal=causal, return_lse=True)) == 2 * product
    assert counted(lambda: tk.attention(q, k, v, causal=causal).sum().backward()) == 7 * product
    half = counted(lambda: tk.attention(q.detach(), k, v.detach(), causal=causal).sum().backward())
    assert half == 5 * product


def test_flops_of_packed_sequences(device):
    """As those of a batch of sequences that all have the maximal length."""
    q = torch.randn(2 * 33, 4, 64, device=device).bfloat16().requires_grad_()
    k, v = (torch.randn(2 * 45, 2, n, device=device).bfloat16() for n in (64, 32))
    edges = [torch.arange(3, dtype=torch.int32, device=device) * n for n in (33, 45)]
    product = 2 * 2 * 4 * 33 * 45
    call = lambda q: tk.attention_varlen(q, k, v, *edges, 33, 45)  # noqa: E731
    assert counted(lambda: call(q.detach())) == (64 + 32) * product
    # Of the backward pass: the scores, dP and dQ.
    assert counted(lambda: call(q).sum().backward()) == (64 + 32 + 64 + 32 + 64) * product
