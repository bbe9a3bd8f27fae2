"""Sizes of 0: every op with each dimension of its operands 0 in turn, and every two of them, batch
dimensions too. The results are those of the formula: a product over nothing is 0, what follows the
product applies to it, a weight that nothing was multiplied with has a gradient of zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import thunderkittens as tk
from helpers.numerics import assert_accurate
from helpers.samples import equal
from helpers.sizes import CALLS, Call, Draw, tensors_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Ops whose reference also computes in float64, from operands of that dtype.
WIDE = ("gemm", "grouped_gemm", "attention", "attention_varlen", "based", "lolcats")


def reference_of(call: Call) -> Any:
    reference = getattr(tk.reference, call.op)
    if call.function == "hedgehog":
        return lambda q, k, v, qmap, kmap, alphas, betas: _hedgehog(
            *reference(q, k, v, qmap, kmap, alphas, betas, return_state=True)
        )
    if call.function == "based_linear_prefill":
        from thunderkittens.ops.based import expanded_numerator

        def prefill(**arguments: Tensor) -> tuple[Tensor, Tensor]:
            out, state = reference(**arguments, return_state=True)
            return out, expanded_numerator(state.numerator)

        return prefill
    return reference


def _hedgehog(out: Tensor, state: tk.LolcatsState) -> tuple[Tensor, ...]:
    return out, state.numerator, state.denominator.unsqueeze(2)


def copied(arguments: Any, wide: bool) -> Any:
    """Arguments with leaves of their own, in float64 where `wide`."""
    if isinstance(arguments, dict):
        return {name: copied(x, wide) for name, x in arguments.items()}
    if isinstance(arguments, tuple):
        parts = [copied(x, wide) for x in arguments]
        return type(arguments)(*parts) if hasattr(arguments, "_fields") else tuple(parts)
    if wide and arguments in (BF16, FP16, FP32):
        return torch.float64
    if not isinstance(arguments, Tensor):
        return arguments
    x = arguments.detach()
    x = x.double() if wide and x.dtype in (BF16, FP16, FP32) else x.clone()
    return x.requires_grad_(arguments.requires_grad)


def results(function: Any, arguments: dict[str, Any], op: bool = True) -> list[Tensor]:
    """What a call returns and the state that it changes, then the gradients of what has any: every
    leaf has one of an op, and of a reference zeros where it leaves the leaf out."""
    outputs = tensors_of(function(**arguments))
    leaves = [x for x in tensors_of(arguments) if x.requires_grad]
    found = [x.detach() for x in (*outputs, *tensors_of(arguments.get("state", ())))]
    if not leaves:
        return found
    # There is no gradient through a state of LoLCATS.
    ends = outputs[:1] if {"alpha", "alphas"} & arguments.keys() and "q" in arguments else outputs
    grads = []
    for y in ends:
        grad = torch.arange(y.numel(), device=y.device).reshape(y.shape) % 5 - 2
        grads.append(torch.where(y.isfinite(), grad, 0).to(y.dtype))
    pairs = [(y, grad) for y, grad in zip(ends, grads, strict=True) if op or y.requires_grad]
    if not pairs:
        return [*found, *(torch.zeros_like(x) for x in leaves)]
    options = {} if op else {"allow_unused": True, "materialize_grads": True}
    ends, grads = ([pair[i] for pair in pairs] for i in (0, 1))
    return [*found, *torch.autograd.grad(ends, leaves, grads, **options)]


@pytest.mark.parametrize("name", CALLS)
def test_every_dimension(device, name, intensity):
    call = CALLS[name]
    function = getattr(tk, call.function or call.op)
    for sizes in call.zeros(1 if intensity == 1 else 2):
        arguments = call.build(Draw(device), sizes)
        words = call.errors(sizes)
        if words:
            with pytest.raises(ValueError, match=f"^tk.{call.op}: ") as raised:
                function(**arguments)
            assert any(x in str(raised.value) for x in words), sizes
            continue
        wide, plain = (copied(arguments, w) for w in (True, False))
        actual = results(function, arguments)
        expected = results(reference_of(call), plain, op=False)
        exact = results(reference_of(call), wide, op=False) if call.op in WIDE else expected
        assert len(actual) == len(expected)
        for x, y, z in zip(actual, expected, exact, strict=True):
            assert x.shape == y.shape, sizes
            if call.op in WIDE and x.dtype in (BF16, FP16, FP32):
                # As much as the approximations of an activation in float32 are allowed.
                curved = call.op == "gemm" and z.numel() > 0
                assert_accurate(x, z, y, slack=4e-6 * (1 + z.abs().amax()) if curved else 0.0)
            else:
                assert x.dtype == y.dtype
                assert equal(x, y), sizes


def test_products_over_nothing(device):
    """K = 0, with every epilogue, by the functions of PyTorch; and M or N = 0 of gradients."""
    draw = Draw(device)
    for batch in ((), (2,), (2, 3)):
        a, b = draw.operand(*batch, 3, 0), draw.operand(0, 8)
        bias, residual = draw.operand(8), draw.operand(*batch, 3, 8)
        assert torch.equal(tk.gemm(a, b), torch.zeros(*batch, 3, 8, dtype=BF16, device=device))
        out = tk.gemm(a, b, bias=bias, activation="relu", residual=residual, beta=2.0, alpha=3.0)
        assert torch.equal(out, bias.relu() + 2 * residual)
        wide = torch.full((*batch, 3, 16), 7.0, dtype=FP32, device=device)
        tk.gemm(a.detach(), b.detach(), bias=bias.detach(), out=wide[..., 4:12])
        assert torch.equal(wide[..., 4:12], bias.float().expand(*batch, 3, 8))
        assert bool((wide[..., :4] == 7).all())
        linear = tk.fp8_linear(a, b.t(), bias)
        assert torch.equal(linear, bias.expand(*batch, 3, 8))
        grads = torch.autograd.grad(linear.sum(), [a, b, bias])
        assert [x.shape for x in grads] == [a.shape, b.shape, bias.shape]
        assert torch.equal(grads[2], torch.full_like(bias, linear.numel() // 8))
    x, weight = draw.operand(2, 0, 16), draw.operand(8, 16)
    for call in (lambda: tk.gemm(x, weight.t()), lambda: tk.fp8_linear(x, weight)):
        out = call()
        assert out.shape == (2, 0, 8)
        grads = torch.autograd.grad(out.sum(), [x, weight])
        assert grads[0].shape == x.shape
        assert torch.equal(grads[1], torch.zeros_like(weight))
    ends = torch.tensor([1, 1, 2], dtype=torch.int32, device=device)
    parts = tk.gemm(draw.operand(4, 0), draw.operand(0, 8)).expand(3, 4, 8)
    grouped = tk.grouped_gemm(draw.operand(4, 0), draw.operand(0, 8), ends)
    assert torch.equal(grouped, parts)


def test_scales_of_nothing(device):
    """Quantising nothing gives the scales of zeros."""
    least = 2.0**-110 / 448
    for shape, granularity, expected in (
        ((2, 3, 0), "tensor", ()),
        ((2, 0, 3), "tensor", ()),
        ((2, 3, 0), "row", (2, 3, 1)),
        ((2, 0, 3), "1x128", (2, 0, 1)),
        ((2, 0, 300), "128x128", (2, 0, 3)),
        ((2, 3, 0), "128x128", (2, 1, 0)),
        ((0, 3, 4), "128x128", (0, 1, 1)),
    ):
        codes, scale = tk.fp8_quantize(torch.zeros(shape, device=device), granularity)
        assert (codes.shape, scale.shape) == (shape, expected)
        assert bool((scale == torch.tensor(least, device=device)).all())
    for shape in ((2, 0, 32), (2, 3, 0)):
        data, scale, overall = tk.nvfp4_quantize(torch.zeros(shape, device=device))
        assert data.shape == (*shape[:2], shape[2] // 2)
        assert scale.numel() == 0
        assert torch.equal(overall, torch.ones(2, device=device))


def test_attention_without_keys(device):
    """Rows that see no key give 0, and as their LSE -inf, or the sink's logit; the gradient goes to
    the sink alone."""
    draw = Draw(device)
    q, k, v = draw.operand(2, 4, 3, 64), draw.operand(2, 2, 0, 64), draw.operand(2, 2, 0, 64)
    sink = draw.operand(4, dtype=FP32)
    for given in (None, sink):
        out, lse = tk.attention(q, k, v, sink=given, return_lse=True)
        assert bool((out == 0).all())
        row = torch.full((4,), -torch.inf, device=device) if given is None else sink
        assert torch.equal(lse, row[:, None].expand(2, 4, 3))
    grads = torch.autograd.grad(out.sum() + lse.sum(), [q, k, v, sink])
    assert bool((grads[0] == 0).all())
    assert [x.shape for x in grads[1:3]] == [k.shape, v.shape]
    assert torch.equal(grads[3], torch.full_like(sink, 6))


def test_sequences_without_heads_grow(device):
    """A state of LoLCATS without heads still counts its tokens."""
    sizes = {"B": 2, "H": 0, "G": 0, "N": 5, "D": 64, "F": 32}
    call = CALLS["lolcats_state"].build(Draw(device), sizes)
    _, state = tk.lolcats(**call)
    assert state.lengths.tolist() == [8, 8]
    call["initial_state"] = None
    assert tk.lolcats(**call)[1].lengths.tolist() == [5, 5]
    step = CALLS["lolcats_decode"].build(Draw(device), sizes)
    tk.lolcats_decode(**step)
    assert step["state"].lengths.tolist() == [4, 4]


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if "decode" not in call.op])
def test_mapping_over_nothing(device, name):
    """`torch.func.vmap` over a dimension of 0 of the first operand: the shapes are those of one."""
    call = CALLS[name]
    arguments = call.build(Draw(device), call.sizes)
    arguments = {k: x.detach() if isinstance(x, Tensor) else x for k, x in arguments.items()}
    if call.op == "lolcats":
        arguments.pop("initial_state", None)
    first = next(k for k, x in arguments.items() if isinstance(x, Tensor))
    function = getattr(tk, call.function or call.op)

    def mapped(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensors_of(function(**{**arguments, first: x})))

    one = torch.func.vmap(mapped)(arguments[first].unsqueeze(0))
    nothing = torch.func.vmap(mapped)(arguments[first].unsqueeze(0)[:0])
    for x, y in zip(nothing, one, strict=True):
        assert (x.shape, x.dtype) == ((0, *y.shape[1:]), y.dtype)


COMPILED = {
    "gemm_batches": "K",
    "gemm_broadcast": "B",
    "grouped_rows": "E",
    "attention_sink": "T",
    "fp8_quantize_128x128_1": "M",
    "fp8_linear_block_3": "K",
    "fp8_linear_row_2": "B",
    "mxfp8_gemm": "K",
    "nvfp4_gemm_batch": "K",
    "based_state": "N",
    "lolcats": "N",
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(device, name):
    torch._dynamo.reset()
    call = CALLS[name]
    function = getattr(tk, call.op)
    arguments = call.build(Draw(device), {**call.sizes, COMPILED[name]: 0})
    expected = results(function, copied(arguments, False))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for x, y in zip(results(compiled, arguments), expected, strict=True):
        assert equal(x, y)


def modules(device: str) -> dict[str, torch.nn.Module]:
    options = {"device": device, "dtype": BF16}
    return {
        "linear": tk.Fp8Linear(64, 128, **options),
        "based": tk.nn.BasedAttention(128, 2, norm=True, **options),
        "lolcats": tk.nn.LolcatsAttention(128, 2, kv_heads=1, features=32, **options),
        "mamba2": tk.nn.Mamba2Mixer(128, 4, 16, 32, groups=2, **options),
        "gated delta": tk.nn.GatedDeltaNet(128, 2, key_dim=16, value_dim=24, **options),
        "sliding": tk.nn.SlidingAttention(128, 2, window_size=8, **options),
    }


@pytest.mark.parametrize("name", ["linear", "based", "lolcats", "mamba2", "gated delta", "sliding"])
def test_modules(device, name):
    """No sequences, and sequences of no tokens, also after a cache's and before more."""
    module = modules(device)[name]
    width = 64 if name == "linear" else 128
    for shape in ((0, 5, width), (2, 0, width), (0, 0, width)):
        x = torch.randn(shape, device=device).to(BF16).requires_grad_()
        out = module(x)
        assert out.shape == (*shape[:2], 128)
        grads = torch.autograd.grad(out.sum(), [x, *module.parameters()])
        assert all(bool((grad == 0).all()) for grad in grads)
    if name not in ("linear", "sliding"):
        x = torch.randn(2, 5, width, device=device).to(BF16)
        with torch.no_grad():
            caches = module.new_cache(2), module.new_cache(2)
            whole = module(x, caches[0])
            parts = [module(part, caches[1]) for part in (x[:, :0], x, x[:, :0])]
        assert torch.equal(torch.cat(parts, 1), whole)
        for y, z in zip(*(cache.state for cache in caches), strict=True):
            assert torch.equal(y, z)
