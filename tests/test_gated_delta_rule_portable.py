"""The portable kernels of `tk.gated_delta_rule` on the emulator: operands that lie anywhere,
options, and what is chosen. `test_gated_delta_rule.py` has their values over gates and segments,
`test_gated_delta_rule_gradient.py` those of the gradient."""

from __future__ import annotations

import pytest
import torch

import thunderkittens as tk
from helpers.delta_rule import BF16, FP16, assert_delta_rule, operands, some_state
from helpers.delta_rule_gradient import gradients
from helpers.delta_rule_gradient import operands as gradient_operands
from helpers.layouts import HEAD_LAYOUTS, heads, unaligned
from test_portable import GPUS, device
from thunderkittens import _C

pytestmark = pytest.mark.emulator


@pytest.fixture(autouse=True)
def portable_kernels():
    with tk.emulate("random", seed=7, portable=True):
        yield


@pytest.mark.parametrize("layout", HEAD_LAYOUTS)
def test_layouts(layout):
    q, k, v, g, beta = operands((2, 2, 4, 70, 64, 72))
    right = tk.gated_delta_rule(q, k, v, g, beta)
    others = [heads(x.unsqueeze(3).expand(*x.shape, 8), layout)[..., 0] for x in (g, beta)]
    found = tk.gated_delta_rule(*(heads(x, layout) for x in (q, k, v)), *others)
    assert torch.equal(found, right)


def test_expanded_operands():
    q, k, v, g, beta = operands((1, 4, 4, 70, 64, 64))
    k, v, g = k[:, :1].expand_as(k), v[:, :, :1].expand_as(v), g[:, :, :1].expand_as(g)
    found = tk.gated_delta_rule(q, k, v, g, beta)
    assert torch.equal(found, tk.gated_delta_rule(q, *(x.contiguous() for x in (k, v, g)), beta))


@pytest.mark.parametrize("place", [torch.Tensor.clone, unaligned, lambda x: x.mT.contiguous().mT])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_states_of_any_layout(dtype, place):
    tensors = operands((2, 1, 2, 30, 64, 40))
    initial = some_state((2, 2, 64, 40), dtype=dtype)
    results = tk.gated_delta_rule(*tensors, initial_state=place(initial), return_state=True)
    right = tk.gated_delta_rule(*tensors, initial_state=initial, return_state=True)
    for x, y in zip(results, right, strict=True):
        assert torch.equal(x, y)
    assert_delta_rule(right, *tensors, initial_state=initial)


@pytest.mark.parametrize("split", [1, 64, 77, 199])
def test_a_sequence_in_parts(split):
    tensors = operands((1, 1, 2, 200, 128, 64))
    first, state = tk.gated_delta_rule(*(x[:, :, :split] for x in tensors), return_state=True)
    second, state = tk.gated_delta_rule(
        *(x[:, :, split:] for x in tensors), initial_state=state, return_state=True
    )
    assert_delta_rule((torch.cat([first, second], 2), state), *tensors)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("dims", [(8, 8), (64, 192), (72, 136), (128, 256)])
@pytest.mark.parametrize("length", [0, 1, 63, 65, 129])
def test_dimensions(length, dims, dtype):
    tensors = operands((1, 1, 2, length, *dims), dtype)
    options = {"initial_state": some_state((1, 2, *dims)), "scale": 0.7}
    results = tk.gated_delta_rule(*tensors, return_state=True, **options)
    assert_delta_rule(results, *tensors, **options)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_norms_and_gates_of_packed_sequences(dims, raw):
    edges = [0, 0, 3, 70, 70, 140]
    q, k, v, g, beta = operands((1, 2, 4, 150, *dims))
    options = {
        "cu_seqlens": torch.tensor(edges, dtype=torch.int32),
        "initial_state": some_state((len(edges) - 1, 4, *dims)),
        "qk_l2norm": True,
    }
    if raw:
        g, beta = torch.randn(2, 1, 4, 150).to(BF16)
        options |= {"A_log": torch.randn(4), "dt_bias": torch.randn(4), "beta_sigmoid": True}
    out, state = tk.gated_delta_rule(3 * q, 5 * k, v, g, beta, return_state=True, **options)
    assert_delta_rule((out, state), 3 * q, 5 * k, v, g, beta, **options)
    assert not out[:, :, edges[-1] :].any()
    assert torch.equal(state[0], options["initial_state"][0])


@pytest.mark.parametrize("policy", ["on_wait", "late_mma", "eager"])
def test_policies(policy):
    """Of a call with segments and its gradient, whenever copies arrive."""
    tensors = operands((1, 1, 2, 300, 64, 72))
    x = gradient_operands(200, heads=2, ratio=2, dims=(64, 128), edges=[0, 70, 198], raw=True)

    def found(policy):
        with tk.emulate(policy, seed=3, portable=True, config={"segments": 3}):
            results = tk.gated_delta_rule(*tensors, return_state=True)
        with tk.emulate(policy, seed=3, portable=True):
            return [*results, *gradients(x).values()]

    for y, right in zip(found(policy), found("random"), strict=True):
        assert torch.equal(y, right)


@pytest.mark.parametrize("name", GPUS)
def test_choice(name):
    """Kernels for every call that Hopper's take; segments of few heads."""
    gpu = device(name, portable_only=True, shared_bytes_per_block=99 << 10)
    problem = {"sequences": 1, "heads": 4, "value_heads": 8, "length": 8192}
    for op in ("gated_delta_rule", "gated_delta_rule_backward"):
        for key_dim in (8, 64, 128):
            for value_dim in (8, 64, 136, 256):
                dims = {"key_dim": key_dim, "value_dim": value_dim}
                reason = _C.unsupported(op, {**problem, **dims}, gpu)
                assert reason == _C.no_code_for(gpu, op)
                found = _C.choose(op, {**problem, **dims}, gpu)
                assert found["kernel"].endswith(f"_k{64 if key_dim <= 64 else 128}_portable")
                assert op == "gated_delta_rule" or found["slices"] == -(-value_dim // 64)
    few = {**problem, "heads": 1, "value_heads": 2, "value_dim": 64}
    assert _C.choose("gated_delta_rule", few, gpu)["segments"] > 1
    many = {**problem, "value_heads": 4 * gpu.sm_count, "length": 200}
    assert _C.choose("gated_delta_rule", many, gpu)["segments"] == 1


def test_shared_memory(monkeypatch):
    """99 KB, which every GPU has, are enough for the largest call, and less is refused."""
    x = gradient_operands(70, dims=(128, 256))
    monkeypatch.setenv("THUNDERKITTENS_SHARED_BYTES", str(99 << 10))
    gradients(x)
    tensors = [x[name] for name in ("q", "k", "v", "g", "beta")]
    tk.gated_delta_rule(*tensors)
    monkeypatch.setenv("THUNDERKITTENS_SHARED_BYTES", str(64 << 10))
    with pytest.raises(RuntimeError, match=r"the kernels need \d+ bytes of shared memory"):
        tk.gated_delta_rule(*tensors)
