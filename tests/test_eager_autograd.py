"""How eager calls record their gradients: by a node or a `Function` of their own where autograd
alone follows them, by the registered formulas else, with the same results, and as PyTorch's own ops
do.

All tests run with the nodes in C++, where torch fits them, and in a process without them.
"""

import gc
import os
import re
import subprocess
import sys
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import thunderkittens as tk
from helpers.samples import (
    SAMPLES,
    assert_equal,
    every_differentiable_graph,
    every_differentiable_sample,
    forward_and_backward,
    leaves,
)
from thunderkittens import _load
from thunderkittens.ops import _eager_autograd, _gradient_call

BF16 = torch.bfloat16
# Calls of several ops, which have no schema of their own.
COMPOSED = {
    "fp8_linear": lambda x, w, bias: tk.fp8_linear(x, w, bias),
    "fp8_linear_rows": lambda x, w, bias: tk.fp8_linear(x, w, bias, scaling="row"),
    "nvfp4_gemm": lambda x, w, bias: tk.nvfp4_gemm(
        x, tk.nvfp4_prepare(*tk.nvfp4_quantize(w.detach())), bias=bias, activation="gelu"
    ),
}
every_composed_call = pytest.mark.parametrize("name", COMPOSED)
ONCE = ("attention", "attention_varlen", "based", "causal_conv1d", "gated_delta_rule")
ONCE += ("layer_norm", "linear_attention", "lolcats", "rms_norm", "ssd")


def composed(name, device):
    """The call, and operands that require gradients."""
    shapes = ((33, 64), (48, 64), (48,))
    tensors = [torch.randn(shape, device=device).to(BF16) for shape in shapes]
    wanted = (True, name != "nvfp4_gemm", True)
    tensors = [x.requires_grad_(w) for x, w in zip(tensors, wanted, strict=True)]
    return lambda *x: (COMPOSED[name](*x),), tensors


@pytest.fixture
def registered(monkeypatch):
    """Calls take the way of those under a compiler, a transform or a dispatch mode."""

    def use():
        for module in (_eager_autograd, _gradient_call):
            monkeypatch.setattr(module, "plain", lambda: False)

    return use


def nodes(output):
    """Names of the nodes of a graph."""
    found, todo = set(), [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo += [x for x, _ in node.next_functions]
    return {node.name() for node in found}


def eager(output):
    return any(name.startswith("thunderkittens_") for name in nodes(output))


@every_differentiable_sample
def test_a_plain_call_is_recorded_by_its_own_function(device, sample):
    output = sample.function(*leaves(sample, device))[0]
    assert eager(output)
    assert not any(name.startswith("GeneratedBackward") for name in nodes(output))


@every_differentiable_sample
def test_dispatch_modes_see_the_ops(device, sample):
    """A counter of operations, as an example."""
    tensors = leaves(sample, device)
    with FlopCounterMode(display=False) as counter:
        output = sample.function(*tensors)[0]
        output.float().sum().backward()
    assert _load.has_nodes or not eager(output)
    assert any(sample.op in str(op) for op in counter.get_flop_counts()["Global"])


@every_composed_call
def test_a_plain_composed_call_is_recorded_by_its_own_function(device, name):
    call, tensors = composed(name, device)
    assert eager(call(*tensors)[0])


def test_what_is_plain():
    def call(x):
        return x + 1 if _eager_autograd.plain() else x + 2

    x = torch.zeros(2)
    assert torch.equal(call(x), x + 1)
    with FlopCounterMode(display=False):
        assert torch.equal(call(x), x + 2)
    assert torch.equal(torch.compile(call, fullgraph=True, backend="eager")(x), x + 2)
    assert torch.equal(torch.func.vmap(call)(x), x + 2)
    assert torch.equal(torch.func.grad(lambda y: (call(y) * y).sum())(x), x + 2)
    for strict in (True, False):
        program = torch.export.export(torch.nn.ReLU(), (x,), strict=strict)  # no state is left
        assert torch.equal(program.module()(x), x)
    assert torch.equal(call(x), x + 1)


@every_differentiable_sample
def test_both_ways_agree(device, sample, registered):
    tensors = leaves(sample, device)
    actual = forward_and_backward(sample.function, tensors)
    registered()
    assert_equal(actual, forward_and_backward(sample.function, tensors))


@every_composed_call
def test_both_ways_of_composed_calls_agree(device, name, registered):
    call, tensors = composed(name, device)
    actual = forward_and_backward(call, tensors)
    registered()
    assert_equal(actual, forward_and_backward(call, tensors))


@every_differentiable_sample
def test_both_ways_agree_under_autocast(device, sample, registered):
    """Gradients have the dtypes of what they belong to."""
    tensors = leaves(sample, device, dtype=torch.float32)

    def run():
        with torch.autocast(device, dtype=BF16):
            outputs = sample.function(*tensors)
        inputs = [x for x in tensors if x.requires_grad]
        loss = sum(y.float().square().sum() for y in outputs)
        return outputs, torch.autograd.grad(loss, inputs)

    outputs, grads = run()
    assert eager(outputs[0])
    assert [x.dtype for x in grads] == [x.dtype for x in tensors if x.requires_grad]
    registered()
    expected = run()
    assert_equal(outputs, expected[0])
    assert_equal(grads, expected[1])


@every_differentiable_sample
def test_only_what_requires_a_gradient_gets_one(device, sample):
    tensors = leaves(sample, device)
    inputs = [x for x in tensors if x.requires_grad]
    outputs = sample.function(*tensors)
    grads = torch.autograd.grad(outputs[0].float().sum(), inputs)
    for alone, expected in zip(inputs, grads, strict=True):
        fresh = [x.detach().requires_grad_(x is alone) for x in tensors]
        output = sample.function(*fresh)[0]
        output.float().sum().backward()
        (given,) = (x.grad for x in fresh if x.grad is not None)
        if device == "cuda":  # attention adds up in the order that is fastest for what is asked for
            torch.testing.assert_close(given, expected, atol=0.05, rtol=0.05)
        else:
            assert torch.equal(given, expected)


def test_an_output_that_is_not_used_has_no_gradient(device):
    """The LSE alone, the output alone, or both."""
    sample = SAMPLES["attention_lse"]
    tensors = leaves(sample, device)
    out, lse = sample.function(*tensors)
    of_out = torch.autograd.grad(out.float().sum(), tensors, retain_graph=True)
    of_lse = torch.autograd.grad(lse.sum(), tensors[:2], retain_graph=True)
    both = torch.autograd.grad(out.float().sum() + lse.sum(), tensors)
    for x, y, z in zip(of_out, of_lse, both, strict=False):
        torch.testing.assert_close(x.float() + y.float(), z.float(), atol=0.05, rtol=0.05)
    assert torch.equal(of_out[2], both[2])


@every_differentiable_sample
def test_a_second_backward_is_refused_and_memory_freed(device, sample):
    tensors = leaves(sample, device)
    output = sample.function(*tensors)[0].float().sum()
    output.backward(retain_graph=True)
    output.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        output.backward()


@every_differentiable_sample
def test_a_double_backward(device, sample):
    tensors = leaves(sample, device)
    output = sample.function(*tensors)[0]
    (grad,) = torch.autograd.grad(output.float().square().sum(), tensors[0], create_graph=True)
    if sample.op in ONCE:
        with pytest.raises(RuntimeError, match=rf"tk\.{sample.op}: .*double backward"):
            grad.float().sum().backward()
    else:
        grad.float().sum().backward()
        assert tensors[0].grad is not None


@every_composed_call
def test_a_double_backward_of_a_composed_call(device, name):
    call, tensors = composed(name, device)
    (grad,) = torch.autograd.grad(
        call(*tensors)[0].float().square().sum(), tensors[0], create_graph=True
    )
    with pytest.raises(RuntimeError, match=r"tk\.\w+: .*double backward"):
        grad.float().sum().backward()


@every_differentiable_sample
def test_a_changed_operand_is_noticed(device, sample):
    tensors = leaves(sample, device)
    copies = [x.clone() if x.requires_grad else x for x in tensors]
    output = sample.function(*copies)[0]
    copies[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.float().sum().backward()


@every_differentiable_graph
def test_nothing_keeps_an_output_alive(device, sample):
    """Neither before nor after its backward pass, without a collection of cycles."""
    tensors = leaves(sample, device)
    gc.collect()
    gc.disable()
    try:
        for backward in (False, True):
            outputs = sample.function(*tensors)
            references = [weakref.ref(x) for x in outputs]
            if backward:
                outputs[0].backward(torch.ones_like(outputs[0]))
            del outputs
            assert [reference() for reference in references] == [None] * len(references)
    finally:
        gc.enable()


@every_differentiable_sample
def test_hooks_of_saved_tensors_and_checkpoints(device, sample):
    tensors = leaves(sample, device)
    expected = forward_and_backward(sample.function, tensors)
    packed = []

    def pack(x):
        packed.append(x)
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: packed[i]):
        actual = forward_and_backward(sample.function, tensors)
    assert packed
    assert_equal(actual, expected)
    for reentrant in (False, True):
        found = checkpoint(sample.function, *tensors, use_reentrant=reentrant)
        for x in tensors:
            x.grad = None
        found[0].backward(torch.ones_like(found[0]))
        grads = [x.grad for x in tensors if x.requires_grad]
        output = sample.function(*tensors)[0]
        inputs = [x for x in tensors if x.requires_grad]
        plain = torch.autograd.grad(output, inputs, torch.ones_like(output))
        for x, y in zip(grads, plain, strict=True):
            assert torch.equal(x, y)


def test_hooks_of_tensors_and_nodes(device):
    tensors = leaves(SAMPLES["attention"], device)
    seen = []
    tensors[0].register_hook(lambda grad: seen.append("tensor") or 2 * grad)
    output = tk.attention(*tensors, causal=True)
    output.grad_fn.register_prehook(lambda grads: seen.append("before"))
    output.grad_fn.register_hook(lambda of_inputs, of_outputs: seen.append("after"))
    once = torch.autograd.grad(output.sum(), tensors)
    fresh = [x.detach().requires_grad_() for x in tensors]
    plain = torch.autograd.grad(tk.attention(*fresh, causal=True).sum(), fresh)
    assert seen == ["before", "after", "tensor"]
    assert_equal(once, [2 * plain[0], *plain[1:]])


def test_anomaly_mode(device):
    tensors = leaves(SAMPLES["attention"], device)
    with torch.autograd.detect_anomaly(check_nan=True):
        grads = forward_and_backward(SAMPLES["attention"].function, tensors)
    assert_equal(grads, forward_and_backward(SAMPLES["attention"].function, tensors))
    with (
        torch.autograd.detect_anomaly(check_nan=True),
        pytest.raises(RuntimeError, match=r"thunderkittens_attentionBackward.* nan values"),
    ):
        tk.attention(*tensors, causal=True).backward(torch.full_like(tensors[0], torch.nan))


def test_batched_gradients(device):
    """`is_grads_batched` maps the backward pass with `torch.func.vmap`."""
    tensors = leaves(SAMPLES["attention"], device)
    output = tk.attention(*tensors, causal=True)
    grad = torch.randn(3, *output.shape, device=device).to(output.dtype)
    batched = torch.autograd.grad(output, tensors, grad, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        single = torch.autograd.grad(output, tensors, grad[i], retain_graph=True)
        for x, y in zip(batched, single, strict=True):
            torch.testing.assert_close(x[i], y)


def test_a_tensor_that_outlived_its_transform(device):
    """It is seen as what it wraps."""
    a, b = (torch.randn(8, 8, device=device).to(BF16) for _ in range(2))
    kept = []
    torch.func.grad(lambda x: (kept.append(x * 1), x.float().sum())[1])(a)
    weight = b.requires_grad_()
    (grad,) = torch.autograd.grad(tk.gemm(kept[0], weight).float().sum(), weight)
    (expected,) = torch.autograd.grad(tk.gemm(a, weight).float().sum(), weight)
    assert torch.equal(grad, expected)


OPS_WITH_NODES = (
    *("attention", "attention_varlen", "based", "causal_conv1d", "gated_delta_rule", "gemm"),
    *("grouped_gemm", "layer_norm", "linear_attention", "lolcats", "rms_norm", "rotary", "ssd"),
)


@pytest.mark.skipif(not _load.has_nodes, reason="there are no nodes in C++ for this torch")
@pytest.mark.timeout(600)
def test_without_nodes_in_cpp(device, intensity):
    """What another version of torch does."""
    names = f"{device} and not without_nodes"
    if intensity == 1:  # the compiler takes most of the time
        names += f" and (not compiled_autograd or compiled_autograd[{device}-rms_norm])"
    command = ["-m", "pytest", __file__, "-q", "-x", "-p", "no:cacheprovider", "-k", names]
    command.append(f"--intensity={intensity}")
    result = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"THUNDERKITTENS_AUTOGRAD_NODES": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > 100


def test_which_calls_have_a_node_in_cpp(device):
    """All that are differentiable, unless it is off."""
    samples = [x for x in SAMPLES.values() if x.op in OPS_WITH_NODES]
    assert {x.op for x in samples} == set(OPS_WITH_NODES)
    outputs = [(x, x.function(*leaves(x, device))[0]) for x in samples]
    for name in COMPOSED:
        call, tensors = composed(name, device)
        outputs.append((name, call(*tensors)[0]))
    for sample, output in outputs:
        node = output.grad_fn
        while not node.name().startswith("thunderkittens_"):
            node = node.next_functions[0][0]
        in_python = isinstance(node, torch.autograd.function.BackwardCFunction)
        assert in_python != _load.has_nodes, sample


@pytest.mark.skipif(not _load.has_nodes, reason="there are no nodes in C++ for this torch")
def test_an_op_of_ops_has_no_kernel_that_explains_its_absence():
    """Where CUDA kernels are missing, each op says why; one that is made of others leaves it to
    them."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has_kernel("thunderkittens::fp8_linear", "CompositeImplicitAutograd")
    assert not has_kernel("thunderkittens::fp8_linear", "CUDA")
    assert has_kernel("thunderkittens::fp8_gemm", "CUDA")


def test_which_arguments_get_a_gradient(device):
    """Of each subset of what requires one, and of each subset that is asked for."""
    sample = SAMPLES["attention_options"]
    tensors = leaves(sample, device)
    output = sample.function(*tensors)[0]
    inputs = [x for x in tensors if x.requires_grad]
    grad = torch.ones_like(output)
    every = torch.autograd.grad(output, inputs, grad, retain_graph=True)
    for x, expected in zip(inputs, every, strict=True):
        (alone,) = torch.autograd.grad(output, [x], grad, retain_graph=True)
        torch.testing.assert_close(alone, expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize(
    "activation", [None, "relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu"]
)
@pytest.mark.parametrize("gate_layout", ["blocked", "interleaved"])
def test_gradients_of_gradients_of_products(device, activation, gate_layout):
    """Twice differentiated, against the reference's, with factors, bias and residual."""
    if activation not in ("swiglu", "geglu") and gate_layout != "blocked":
        return
    columns = 40 if activation in ("swiglu", "geglu") else 80
    shapes = ((2, 33, 64), (64, 80), (80,), (2, 33, columns))
    values = [torch.randn(shape, device=device).to(BF16) for shape in shapes]
    options = {"activation": activation, "gate_layout": gate_layout, "alpha": 0.5, "beta": 2.0}
    results = []
    for function, dtype in ((tk.gemm, BF16), (tk.reference.gemm, torch.float64)):
        a, b, bias, residual = (x.to(dtype).requires_grad_() for x in values)
        out = function(a, b, bias=bias, residual=residual, **options)
        first = torch.autograd.grad(
            (out.double() ** 2).sum() / 100, (a, b, bias, residual), create_graph=True
        )
        penalty = sum((x.double() ** 2).sum() for x in first) / 100
        results.append((*first, *torch.autograd.grad(penalty, (a, b, bias, residual))))
    for actual, expected in zip(*results, strict=True):
        error = (actual.double() - expected).norm() / expected.norm()
        assert error < 0.03


def test_a_gradient_through_a_returned_state_of_lolcats_is_refused(device):
    sample = SAMPLES["lolcats"]
    tensors = leaves(sample, device)
    _, state = tk.lolcats(*tensors, return_state=True)
    with pytest.raises(RuntimeError, match=r"tk\.lolcats: there is no gradient through"):
        state.numerator.sum().backward()


@every_differentiable_graph
def test_compiled_autograd(device, sample):
    """An eager graph whose backward pass is compiled."""
    tensors = leaves(sample, device)
    inputs = [x for x in tensors if x.requires_grad]

    def grads():
        for x in inputs:
            x.grad = None
        sample.function(*tensors)[0].float().square().sum().backward()
        return [x.grad for x in inputs]

    expected = grads()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        actual = grads()
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y)
