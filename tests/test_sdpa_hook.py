"""`tk.sdpa`: registration, and what becomes of calls of PyTorch's function.

On a CPU, the kernels of this package run on the emulator. There the op of PyTorch that its function
chooses for CPU tensors is taken as it is in use; those for CUDA are in test_sdpa_ops.py. Tests on a
GPU are in test_sdpa_cuda.py.
"""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import thunderkittens as tk
from helpers.attention import BF16, FP32, normal
from helpers.numerics import assert_accurate
from thunderkittens.integrations import sdpa_hook

OP = "_scaled_dot_product_flash_attention_for_cpu"
NAMES = [(key, name) for key, ops in sdpa_hook._sdpa_ops.OPS.items() for name in ops]


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Every test begins and ends with PyTorch's kernels in place, and an empty report."""
    before = kernels()
    tk.sdpa_report(reset=True)
    yield
    assert not sdpa_hook._overrides
    assert kernels() == before


def kernels():
    """What is registered for the ops."""
    return [
        repr(torch.library.get_kernel(f"aten::{op}", key))
        for key, name in NAMES
        for op in (name, f"{name}_backward")
        if sdpa_hook._has_kernel(op, key)
    ]


def operands(dtype=BF16, length=33, grad=True):
    return [normal((1, 2, length, 64), dtype, "cpu").requires_grad_(grad) for _ in range(3)]


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def expected(*operands):
    """Output and gradients by the formula in float64."""
    wide = [x.detach().double().requires_grad_() for x in operands]
    with sdpa_kernel(SDPBackend.MATH):
        out = attend(*wide)
    out.backward(torch.ones_like(out))
    return [out.detach(), *(x.grad for x in wide)]


def assert_close(actual, reference):
    for x, y in zip(actual, reference, strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-2, rtol=2e-2)


def taken(backward=False):
    """How many calls our kernels have taken, and how many were left to PyTorch's."""
    calls = [c for c in tk.sdpa_report() if c.op.endswith("_backward") == backward]
    return tuple(sum(c.calls for c in calls if c.taken is one) for one in (True, False))


# Registration.


def test_nothing_is_registered_by_the_import():
    code = (
        "import torch\n"
        f"op = 'aten::{OP}'\n"
        "before = repr(torch.library.get_kernel(op, 'CPU'))\n"
        "import thunderkittens.integrations.sdpa_hook as hook\n"
        "assert not hook._overrides and 'torch._dynamo' not in __import__('sys').modules\n"
        "assert repr(torch.library.get_kernel(op, 'CPU')) == before\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_enable_and_disable():
    before = kernels()
    for _ in range(2):
        tk.enable_sdpa()
        during = kernels()
        tk.enable_sdpa()
        assert kernels() == during
        assert all(ours != torchs for ours, torchs in zip(during, before, strict=True))
        tk.disable_sdpa()
        assert kernels() == before
        tk.disable_sdpa()


def test_blocks_and_enabling_together():
    before = kernels()
    with tk.sdpa():
        with tk.sdpa():
            assert kernels() != before
        assert kernels() != before
        tk.enable_sdpa()
        tk.disable_sdpa()
        assert kernels() != before
        tk.enable_sdpa()
    assert kernels() != before
    tk.disable_sdpa()
    with pytest.raises(ZeroDivisionError), tk.sdpa():
        raise ZeroDivisionError
    assert kernels() == before


def test_registering_does_not_warn(recwarn):
    with tk.sdpa():
        attend(*operands())
    assert not recwarn.list


def test_threads_may_enter_and_leave_at_once():
    def enter():
        for _ in range(20):
            with tk.sdpa():
                attend(*operands(grad=False))

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken() == (0, 80)


def test_a_name_of_activate_flash_attention_impl():
    attention = torch.nn.attention
    assert sdpa_hook.NAME in attention.list_flash_attention_impls()
    before = kernels()
    for _ in range(2):
        attention.activate_flash_attention_impl("TK")
        assert attention.current_flash_attention_impl() == "TK"
        assert kernels() != before
    attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None
    assert kernels() == before


# Calls.


@pytest.mark.emulator
def test_calls_and_their_report():
    tensors = operands()
    reference = expected(*tensors)
    tk.sdpa_report(reset=True)
    assert str(tk.sdpa_report()) == "no call of scaled_dot_product_attention has come by"
    with tk.sdpa():
        with tk.emulate() as run:
            out = attend(*tensors)
            out.backward(torch.ones_like(out))
        attend(*tensors)
        F.scaled_dot_product_attention(*tensors, dropout_p=0.5)  # by the formula
    assert_close([out.detach(), *(x.grad for x in tensors)], reference)
    assert len(run.kernels) == 2
    report = tk.sdpa_report()
    assert list(report) == [
        (OP, True, "", 1),
        (OP, False, "CPU tensors outside of tk.emulate()", 1),
        (f"{OP}_backward", True, "", 1),
    ]
    assert report[0].op == OP
    assert report[0].taken
    assert report[0].calls == 1
    lines = str(report).splitlines()
    assert len(lines) == 3
    assert lines[1].endswith("PyTorch: CPU tensors outside of tk.emulate()")
    attend(*tensors)
    assert tk.sdpa_report(reset=True) == report
    assert not tk.sdpa_report()


@pytest.mark.emulator
@pytest.mark.parametrize("forward_is_ours", [True, False])
@pytest.mark.parametrize("by", ["emulator", "disabling"])
def test_forward_and_backward_of_different_kernels(forward_is_ours, by):
    """Either backward takes what either forward has left."""
    tensors = operands()
    reference = expected(*tensors)
    ours = tk.emulate if by == "emulator" else tk.sdpa
    outer = tk.sdpa if by == "emulator" else tk.emulate
    with outer():
        if forward_is_ours:
            with ours():
                out = attend(*tensors)
            out.backward(torch.ones_like(out))
        else:
            out = attend(*tensors)
            with ours():
                out.backward(torch.ones_like(out))
    assert_close([out.detach(), *(x.grad for x in tensors)], reference)
    assert taken()[0] == forward_is_ours
    assert taken(backward=True)[0] == (not forward_is_ours)


@pytest.mark.emulator
def test_autocast():
    tensors = operands(FP32)
    reference = expected(*tensors)
    with tk.sdpa(), tk.emulate():
        with torch.autocast("cpu", BF16):
            out = attend(*tensors)
        assert out.dtype == BF16
        out.backward(torch.ones_like(out))
    assert_close([out.detach(), *(x.grad for x in tensors)], reference)
    assert taken() == taken(backward=True) == (1, 0)


@pytest.mark.emulator
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant):
    tensors = operands()
    reference = expected(*tensors)
    with tk.sdpa(), tk.emulate():
        out = checkpoint(attend, *tensors, use_reentrant=reentrant)
        out.backward(torch.ones_like(out))
    assert_close([out.detach(), *(x.grad for x in tensors)], reference)
    assert taken() == (2, 0)
    assert taken(backward=True) == (1, 0)


@pytest.mark.emulator
def test_compiled_code_follows_without_recompiling():
    torch._dynamo.reset()
    tensors = operands()
    reference = expected(*tensors)
    tk.sdpa_report(reset=True)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")

    def step():
        for x in tensors:
            x.grad = None
        out = compiled(*tensors)
        out.backward(torch.ones_like(out))
        assert_close([out.detach(), *(x.grad for x in tensors)], reference)

    step()
    assert taken() == (0, 0)
    with torch._dynamo.config.patch(error_on_recompile=True), tk.emulate():
        with tk.sdpa():
            step()
        assert taken() == taken(backward=True) == (1, 0)
        step()
        assert taken() == (1, 0)
    torch._dynamo.reset()
    with tk.sdpa(), tk.emulate():
        step()
    assert taken() == taken(backward=True) == (2, 0)


@pytest.mark.emulator
def test_export():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return attend(q, k, v)

    tensors = operands(grad=False)
    exported = torch.export.export(Model(), tuple(tensors))
    for program in (exported, exported.run_decompositions({})):
        tk.sdpa_report(reset=True)
        out = program.module()(*tensors)
        with tk.sdpa(), tk.emulate():
            torch.testing.assert_close(program.module()(*tensors), out, atol=2e-2, rtol=2e-2)
        assert taken() == (1, 0)


@pytest.mark.emulator
def test_dynamo_leaves_the_kernels_alone():
    """A function that breaks its graph before the call: what Dynamo compiles after it is not the
    inside of a kernel."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    @torch._dynamo.disable(recursive=False)
    def outside(q, k, v):
        return attend(q, k, v)

    def model(q, k, v):
        return outside(q + 1, k, v) + 1

    tensors = operands(grad=False)
    with tk.sdpa(), tk.emulate():
        torch.compile(model, backend=backend)(*tensors)
    assert taken() == (1, 0)
    calls = [n.target for graph in graphs for n in graph.graph.nodes if n.op == "call_function"]
    assert not [c for c in calls if "thunderkittens" in str(c)]
    torch._dynamo.reset()


def test_what_is_left_to_pytorch_is_as_before():
    """Masks, other dtypes and CPU tensors, with gradients, to the bit."""
    mask = torch.ones(33, 33, dtype=torch.bool).tril(3)
    for dtype, options in ((BF16, {}), (FP32, {"is_causal": True}), (FP32, {"attn_mask": mask})):
        tensors = operands(dtype)
        results = []
        for block in (tk.sdpa, torch.enable_grad):
            with block():
                out = F.scaled_dot_product_attention(*tensors, **options)
                results.append([out, *torch.autograd.grad(out.float().sum(), tensors)])
        for ours, torchs in zip(*results, strict=True):
            assert torch.equal(ours, torchs)
    assert taken() == taken(backward=True) == (0, 3)


@pytest.mark.emulator
def test_double_backward_is_refused_as_pytorch_refuses_it():
    tensors = operands()
    messages = []
    for block in (tk.sdpa, torch.enable_grad):
        with block(), tk.emulate():
            out = attend(*tensors)
            (grad,) = torch.autograd.grad(out.float().sum(), tensors[:1], create_graph=True)
            with pytest.raises(RuntimeError) as error:
                grad.float().sum().backward()
            messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.mark.emulator
def test_inference_mode_leaves_nothing_behind():
    """What is kept from call to call can be saved for a backward, whichever call was the first."""
    override = sdpa_hook.Override("CPU", sdpa_hook._sdpa_ops.OPS["CUDA"])
    try:
        with tk.emulate():
            for name in sdpa_hook._sdpa_ops.OPS["CUDA"]:
                op = getattr(torch.ops.aten, name).default
                args = () if "flash" in name else (None, True)
                tensors = operands(length=8)
                with torch.inference_mode():
                    op(*(x.detach() for x in tensors), *args)
                op(*tensors, *args)[0].sum().backward()
    finally:
        override.remove()
    assert taken() == (6, 0)
    assert taken(backward=True) == (3, 0)


@pytest.mark.emulator
def test_accuracy_is_that_of_attention():
    tensors = operands(length=70, grad=False)
    with tk.emulate():
        with tk.sdpa():
            out = attend(*tensors)
        assert torch.equal(out, tk.attention(*tensors, causal="upper_left"))
    assert_accurate(out, expected(*tensors)[0], attend(*tensors))
