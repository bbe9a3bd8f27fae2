"""`tk.sdpa` on a GPU: which kernels PyTorch's function runs, in every way to call it."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint

import thunderkittens as tk
from helpers.attention import BF16, FP16, FP32, normal
from thunderkittens import _load
from thunderkittens.integrations import sdpa_hook

pytestmark = pytest.mark.gpu

FLASH = "_scaled_dot_product_flash_attention"
CUDNN = "_scaled_dot_product_cudnn_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
BACKENDS = {
    FLASH: SDPBackend.FLASH_ATTENTION,
    CUDNN: SDPBackend.CUDNN_ATTENTION,
    EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
}


@pytest.fixture(autouse=True)
def nothing_is_left():
    tk.sdpa_report(reset=True)
    yield
    assert not sdpa_hook._overrides
    tk.sdpa_report(reset=True)


def operands(dtype=BF16, lengths=(200, 200), heads=(4, 4), dim=64, value_dim=None, grad=True):
    (rows, keys), (heads_q, heads_k) = lengths, heads
    shapes = (
        (2, rows, heads_q, dim),
        (2, keys, heads_k, dim),
        (2, keys, heads_k, value_dim or dim),
    )
    return [normal(s, dtype, "cuda").transpose(1, 2).requires_grad_(grad) for s in shapes]


def attend(q, k, v, **options):
    if q.shape[1] != k.shape[1]:
        options["enable_gqa"] = True
    return F.scaled_dot_product_attention(q, k, v, **options)


def causally(q, k, v):
    return attend(q, k, v, is_causal=True)


def results(function, tensors, **options):
    """Output and gradients."""
    out = function(*tensors, **options)
    grad = torch.linspace(-1, 1, out.numel(), device=out.device).reshape(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad)]


def by_formula(tensors, **options):
    wide = [x.detach().double().requires_grad_() for x in tensors]
    with sdpa_kernel(SDPBackend.MATH):
        return results(attend, wide, **options)


def assert_close(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        error = (x.double() - y.double()).norm() / y.double().norm()
        assert float(error) < 1e-2


def calls():
    """The report, without what autograd has called; True for calls that our kernels took."""
    return {(c.op, c.taken): c.calls for c in tk.sdpa_report()}


def assert_taken(*ops):
    """Every call was taken, each op's forward and backward once."""
    assert calls() == {(f"{op}{suffix}", True): 1 for op in ops for suffix in ("", "_backward")}


CALLS = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "float16": ({"dtype": FP16}, {"is_causal": True}),
    "scale": ({}, {"scale": 0.3}),
    "one query": ({"lengths": (1, 300)}, {}),
    "more keys": ({"lengths": (100, 300)}, {}),
    "more rows": ({"lengths": (300, 100)}, {}),
    "prime lengths": ({"lengths": (211, 307)}, {}),
    "groups": ({"heads": (8, 2)}, {"is_causal": True}),
    "dim 128": ({"dim": 128}, {"is_causal": True}),
    "dim 256": ({"dim": 256}, {"is_causal": True}),
    "dim 40": ({"dim": 40}, {"is_causal": True}),
    "192 and 128": ({"dim": 192, "value_dim": 128}, {"is_causal": True}),
}


@pytest.mark.parametrize("name", CALLS)
def test_default_priority(name):
    """Whatever PyTorch prefers, it is our kernels that run: the output has their bits."""
    sizes, options = CALLS[name]
    tensors = operands(**sizes)
    with tk.sdpa():
        actual = results(attend, tensors, **options)
    report = calls()
    assert sum(report.values()) == 2
    assert all(taken for _, taken in report)
    causal = "upper_left" if options.get("is_causal") else False
    ours = tk.attention(*tensors, causal=causal, scale=options.get("scale"))
    assert torch.equal(actual[0], ours)
    assert_close(actual, by_formula(tensors, **options))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("op", BACKENDS)
def test_chosen_backends(op, name):
    sizes, options = CALLS[name]
    tensors = operands(**sizes)
    with sdpa_kernel(BACKENDS[op]):
        try:
            results(attend, tensors, **options)
        except RuntimeError:
            pytest.skip("PyTorch has no such kernel")
        with tk.sdpa():
            actual = results(attend, tensors, **options)
    assert_taken(op)
    assert_close(actual, by_formula(tensors, **options))


def test_the_formula_is_left_alone():
    tensors = operands()
    with tk.sdpa(), sdpa_kernel(SDPBackend.MATH):
        results(attend, tensors)
    assert not tk.sdpa_report()


@pytest.mark.parametrize("op", BACKENDS)
@pytest.mark.parametrize("lengths", [(200, 200), (100, 300), (300, 100)])
def test_alignment_of_causal_masks(op, lengths):
    """Ours is that of PyTorch's kernel of the same op, called directly."""
    q, k, v = operands(lengths=lengths, grad=False)
    if op == FLASH and lengths[0] > lengths[1]:
        return  # left to PyTorch
    args = () if op == FLASH else (None, True)
    overload = getattr(torch.ops.aten, op).default
    torchs = overload(q, k, v, *args, is_causal=True)
    with tk.sdpa():
        ours = overload(q, k, v, *args, is_causal=True)
    assert_close([ours[0]], [torchs[0]])
    torch.testing.assert_close(ours[1], torchs[1], atol=1e-3, rtol=1e-3)
    assert [type(x) for x in ours] == [type(x) for x in torchs]


@pytest.mark.parametrize("forward_is_ours", [True, False])
@pytest.mark.parametrize("name", ["plain", "causal", "prime lengths", "groups", "dim 256"])
@pytest.mark.parametrize("op", BACKENDS)
def test_forward_and_backward_of_different_kernels(op, name, forward_is_ours):
    """What is disabled, or enabled, between the two."""
    sizes, options = CALLS[name]
    tensors = operands(**sizes)
    ours, torchs = tk.sdpa, contextlib.nullcontext
    first, second = (ours, torchs) if forward_is_ours else (torchs, ours)
    expected = by_formula(tensors, **options)
    with sdpa_kernel(BACKENDS[op]):
        try:
            results(attend, tensors, **options)
        except RuntimeError:
            pytest.skip("PyTorch has no such kernel")
        with first():
            out = attend(*tensors, **options)
    grad = torch.linspace(-1, 1, out.numel(), device=out.device).reshape(out.shape).to(out.dtype)
    with second():
        grads = torch.autograd.grad(out, tensors, grad)
    assert calls() == {(op if forward_is_ours else f"{op}_backward", True): 1}
    assert_close([out.detach(), *grads], expected)


LEFT = {
    "dropout": ({}, {"dropout_p": 0.2}),
    "float32": ({"dtype": FP32}, {"is_causal": True}),
    "mask": ({}, {"attn_mask": "mask"}),
    "bias": ({}, {"attn_mask": "bias"}),
    "dim 320": ({"dim": 320}, {}),
}


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.parametrize("op", [None, *BACKENDS])
def test_what_is_left_to_pytorch_is_as_before(op, name):
    """To the bit, in both directions; the report has the reason."""
    sizes, options = LEFT[name]
    options = dict(options)
    if "attn_mask" in options:
        mask = torch.ones(200, 200, dtype=torch.bool, device="cuda").tril(5)
        options["attn_mask"] = mask if name == "mask" else mask.to(BF16)
    tensors = operands(**sizes)
    chosen = sdpa_kernel(BACKENDS[op]) if op else contextlib.nullcontext()
    found = []
    with chosen:
        for block in (contextlib.nullcontext, tk.sdpa):
            torch.manual_seed(3)
            # With warn_only, PyTorch's kernels stay as they are.
            torch.use_deterministic_algorithms(True)
            try:
                with block():
                    found.append(results(attend, tensors, **options))
            except RuntimeError:
                assert block is contextlib.nullcontext
                pytest.skip("PyTorch has no such kernel")
            finally:
                torch.use_deterministic_algorithms(False)
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)
    assert all(not c.taken and c.reason for c in tk.sdpa_report())


def test_odd_head_dims_come_padded():
    """PyTorch pads them for its flash attention, which then is ours."""
    tensors = operands(dim=60)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), tk.sdpa():
        actual = results(attend, tensors, is_causal=True)
    assert_taken(FLASH)
    assert_close(actual, by_formula(tensors, is_causal=True))


@pytest.mark.parametrize("lengths", [(100, 300), (300, 100)])
def test_causal_masks_by_their_type(lengths):
    tensors = operands(lengths=lengths)
    for mask in (causal_upper_left(*lengths), causal_lower_right(*lengths)):
        tk.sdpa_report(reset=True)
        expected = results(attend, tensors, attn_mask=mask)
        with tk.sdpa():
            actual = results(attend, tensors, attn_mask=mask)
        keep = torch.isfinite(expected[0]).all(-1)
        torch.testing.assert_close(actual[0][keep], expected[0][keep], atol=2e-2, rtol=2e-2)
        empty = lengths[0] > lengths[1] and mask.variant == mask.variant.LOWER_RIGHT
        assert all(taken == (not empty) for _, taken in calls())


def test_autocast():
    tensors = operands(FP32)
    with tk.sdpa(), torch.autocast("cuda", BF16):
        out = causally(*tensors)
    with tk.sdpa():
        grads = torch.autograd.grad(out, tensors, torch.ones_like(out))
    assert out.dtype == BF16
    assert all(x.dtype == FP32 for x in grads)
    assert sum(calls().values()) == 2
    assert all(taken for _, taken in calls())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant):
    tensors = operands()
    with tk.sdpa():
        out = checkpoint(causally, *tensors, use_reentrant=reentrant)
        out.backward(torch.ones_like(out))
    assert sorted(calls().values()) == [1, 2]
    assert all(taken for _, taken in calls())


@pytest.mark.parametrize("layout", ["rows outside", "heads outside"])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("op", [None, *BACKENDS])
def test_compiled_code_follows_without_recompiling(op, mode, layout):
    torch._dynamo.reset()
    tensors = operands(lengths=(256, 256))
    if layout == "heads outside":
        tensors = [x.detach().contiguous().requires_grad_() for x in tensors]
    expected = by_formula(tensors, is_causal=True)
    compiled = torch.compile(causally, fullgraph=True, mode=mode)
    chosen = sdpa_kernel(BACKENDS[op]) if op else contextlib.nullcontext()

    def steps(count=3):
        for _ in range(count):
            torch.compiler.cudagraph_mark_step_begin()
            assert_close([x.clone() for x in results(compiled, tensors)], expected)

    with chosen:
        with tk.sdpa():
            steps()
        assert calls()
        assert all(taken for _, taken in calls())
        if mode is None:  # what a CUDA graph has recorded stays in it
            tk.sdpa_report(reset=True)
            with torch._dynamo.config.patch(error_on_recompile=True):
                steps()
                assert not calls()
                with tk.sdpa():
                    steps()
            assert all(taken for _, taken in calls())
            assert set(calls().values()) == {3}
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_inference(mode):
    torch._dynamo.reset()
    tensors = operands(grad=False)
    compiled = torch.compile(causally, fullgraph=True, mode=mode)
    expected = by_formula([x.detach().requires_grad_() for x in tensors], is_causal=True)[:1]
    with tk.sdpa(), torch.no_grad():
        for _ in range(3):
            assert_close([compiled(*tensors).clone()], expected)
    assert all(taken for _, taken in calls())
    torch._dynamo.reset()


def test_export():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return causally(q, k, v)

    tensors = operands(grad=False)
    expected = causally(*tensors)
    exported = torch.export.export(Model(), tuple(tensors))
    for program in (exported, exported.run_decompositions({})):
        tk.sdpa_report(reset=True)
        with tk.sdpa():
            assert_close([program.module()(*tensors)], [expected])
        assert list(calls().values()) == [1]
        assert all(taken for _, taken in calls())


def test_cuda_graph():
    q, k, v = operands(grad=False)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with tk.sdpa(), torch.cuda.stream(stream):
        causally(q, k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = causally(q, k, v)
    torch.cuda.current_stream().wait_stream(stream)
    q.normal_()
    graph.replay()
    assert torch.equal(out, tk.attention(q, k, v, causal="upper_left"))


def test_graphed_callable():
    tensors = operands()
    expected = results(causally, tensors)

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return causally(q, k, v)

    with tk.sdpa():
        graphed = torch.cuda.make_graphed_callables(Model(), tuple(tensors))
        assert_close(results(graphed, tensors), expected)


def test_transforms():
    tensors = [x[None].repeat(3, 1, 1, 1, 1) for x in operands(grad=False)]

    def loss(q, k, v):
        return causally(q, k, v).float().square().sum()

    function = torch.func.vmap(torch.func.grad(loss))
    expected = function(*tensors)
    with tk.sdpa():
        assert_close([function(*tensors)], [expected])
    assert all(taken for _, taken in calls())


def test_deterministic_gradients():
    tensors = operands(lengths=(1000, 1000), heads=(8, 2), dim=128)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with tk.sdpa():
        runs = [results(causally, tensors) for _ in range(5)]
    torch.use_deterministic_algorithms(False)
    assert all(taken for _, taken in calls())
    for run in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(run, runs[0], strict=True))


def test_double_backward_is_refused():
    tensors = operands()
    with tk.sdpa():
        out = causally(*tensors)
        grads = torch.autograd.grad(out.float().square().sum(), tensors, create_graph=True)
        with pytest.raises(RuntimeError):
            grads[0].float().sum().backward()


def test_streams_and_strides():
    """Slices of a packed projection, on another stream."""
    packed = normal((2, 200, 3, 4, 64), BF16, "cuda").requires_grad_()

    def model(packed):
        return causally(*(x.transpose(1, 2) for x in packed.unbind(2)))

    expected = results(model, [packed])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with tk.sdpa(), torch.cuda.stream(stream):
        actual = results(model, [packed])
    torch.cuda.current_stream().wait_stream(stream)
    assert_close(actual, expected)
    assert all(taken for _, taken in calls())


def fill_memory(tensor):
    """What takes the memory that PyTorch's allocator has left for tensors of this size: blocks that
    earlier tests have freed may lie between blocks that are in use."""
    held = []
    with contextlib.suppress(torch.OutOfMemoryError):
        while True:
            held.append(torch.empty_like(tensor))
    return held


@pytest.mark.parametrize("in_cpp", [False, True])
def test_errors_of_kernels_are_python_exceptions(in_cpp, monkeypatch):
    """There is no memory for the results."""
    if not in_cpp:
        monkeypatch.setattr(_load, "has_nodes", False)
    q, k, v = torch.randn(3, 2, 16, 4096, 128, device="cuda", dtype=torch.bfloat16)
    whole = torch.cuda.get_device_properties(q.device).total_memory
    with tk.sdpa():
        causally(q, k, v)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / whole)
        try:
            held = fill_memory(q)
            with pytest.raises(torch.OutOfMemoryError):
                causally(q, k, v)
            del held
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)


def test_activation_by_name():
    torch.nn.attention.activate_flash_attention_impl("TK")
    try:
        results(causally, operands())
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert sum(calls().values()) == 2
    assert all(taken for _, taken in calls())
