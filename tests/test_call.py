"""Calls of ops by the module _call: the same results and errors as torch's own, which calls that it
does not know go to."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

import thunderkittens as tk
from helpers.samples import assert_equal, every_sample
from thunderkittens import _load

OPS = torch.ops.thunderkittens
pytestmark = pytest.mark.skipif(not _load.has_calls, reason="_call does not fit this torch")


class Pass(TorchFunctionMode):
    """Sees every call, so that none is plain."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def torchs(op):
    """What the op calls without the module."""
    return torch._C._get_operation_overload(op._schema.name, op._schema.overload_name)[0]


def calls_of(monkeypatch, sample, device):
    """The ops that a call of the public function calls, with their arguments."""
    seen = []

    class Noted:
        def __init__(self, op, function):
            self.op, self.function = op, function

        def __call__(self, *args, **kwargs):
            seen.append((self.op, args, kwargs))
            return self.function(*args, **kwargs)

    for op in every_op():
        monkeypatch.setattr(op, "_op", Noted(op, op._op))
    with torch.no_grad(), Pass():
        sample.function(*sample.tensors(device))
    monkeypatch.undo()
    return seen


def every_op():
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("thunderkittens::")]
    for name in names:
        packet, _, overload = name.removeprefix("thunderkittens::").partition(".")
        yield getattr(getattr(OPS, packet), overload or "default")


def listed(result):
    return list(result) if isinstance(result, tuple) else [x for x in (result,) if x is not None]


def copied(args):
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in args]


@every_sample
def test_results_are_those_of_torchs_call(sample, device, monkeypatch):
    calls = calls_of(monkeypatch, sample, device)
    assert calls
    with torch.no_grad():
        for op, args, keywords in calls:
            given, again = copied(args), copied(args)
            results = listed(op(*given, **keywords))
            expected = listed(torchs(op)(*again, **keywords))
            assert_equal([x for x in results if x is not None], expected)
            assert_equal(*([x for x in y if isinstance(x, torch.Tensor)] for y in (given, again)))


def test_most_ops_have_it():
    """All but those that take lists, or arguments by their names alone."""
    without = [op for op in every_op() if type(op._op).__name__ != "Call"]
    assert all("[" in str(op._schema) or "*" in str(op._schema) for op in without)
    assert OPS.ssd_forward.default not in without


@every_sample
def test_plain_calls_are_those_of_others(sample, device):
    tensors = sample.tensors(device)
    given, again = copied(tensors), copied(tensors)
    with torch.no_grad():
        results = listed(sample.function(*given))
        with Pass():
            expected = listed(sample.function(*again))
    assert_equal(results, expected)
    assert_equal(given, again)


@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 16)])
def test_recorded_calls_are_those_of_others(device, shape, activation):
    """Of `tk.gemm`, which calls the op that records a gradient likewise."""
    values = [torch.randn(s, device=device).bfloat16() for s in (shape, (8, 16), (8,))]

    def results():
        x, weight, bias = leaves = [v.clone().requires_grad_() for v in values]
        out = tk.gemm(x, weight.t(), bias=bias, activation=activation, alpha=0.5)
        assert isinstance(out, torch.Tensor)
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    actual = results()
    with Pass():
        assert_equal(actual, results())


PLAIN = {
    "rms_norm": lambda x, w: tk.rms_norm(x, w),
    "layer_norm": lambda x, w: tk.layer_norm(x, w),
    "rotary": lambda x, w: tk.rotary(x.view(1, 1, 3, 16), w.view(1, 16)[:, :8].expand(3, 8),
                                     w.view(1, 16)[:, 8:].expand(3, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_calls_that_are_not_plain(name, device):
    """A gradient is recorded, a tangent refused, a transform applied, and an error worded."""
    call = PLAIN[name]
    x, w = X.to(device), W.to(device)
    leaf = x.clone().requires_grad_()
    assert call(leaf, w).requires_grad
    assert not call(x, w).requires_grad
    with torch.no_grad():
        assert not call(leaf, w).requires_grad
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        call(forward_ad.make_dual(x, x), w)
    assert torch.func.vmap(call, (0, None))(torch.stack((x, x)), w).shape[0] == 2
    with pytest.raises(TypeError, match=f"tk.{name}: x "):
        call(x.to(torch.int32), w)


def outcome(function, *args, **keywords):
    try:
        return listed(function(*args, **keywords))
    except Exception as error:
        return type(error), str(error)


X, W = torch.ones(3, 16), torch.ones(16)


@pytest.mark.parametrize(
    "args",
    [
        (),
        (X,),
        (X, None),
        (X, W),
        (X, W, None, 1),
        (X, W, None, True),
        (X, W, None, 1e-6, 0.0, 1),
        (X, W, None, 1e-6, 0.0, False, 8),
        (X, W, None, 1e-6, 0.0, False, 1 << 70),
        (X, W, None, 1e-6, 0.0, False, 2.0),
        (X, W, None, 1e-6, 0.0, False, 0, 0),
        (X, W, None, torch.tensor(1e-6)),
        (None, W),
        ([1.0], W),
        (X, torch.ones(15)),
        (X.to(torch.int32), W),
        (torch.nn.Parameter(X), torch.nn.Parameter(W)),
    ],
)
def test_what_fits_and_what_does_not(args):
    op = OPS.rms_norm_forward.single
    with torch.no_grad():
        ours, torch_own = outcome(op, *args), outcome(torchs(op), *args)
    assert str(ours) == str(torch_own)


def test_keywords():
    op = OPS.rms_norm_forward.single
    assert_equal(listed(op(X, weight=W, eps=0.5)), listed(op(X, W, None, 0.5)))
    assert outcome(op, X, wait=1) == outcome(torchs(op), X, wait=1)


def test_overrides_see_the_call():
    seen = []

    class Mode(Pass):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return super().__torch_function__(function, types, args, kwargs)

    class Subclass(torch.Tensor):
        pass

    op = OPS.rms_norm_forward.single
    with Mode():
        op(X, W)
    assert any("rms_norm_forward" in x for x in seen)
    assert type(op(X.as_subclass(Subclass), W)) is Subclass


def test_an_error_of_the_op_leaves_nothing_behind():
    op = OPS.rms_norm_forward.single
    for _ in range(3):
        with pytest.raises(ValueError, match="weight has shape"):
            op(X, torch.ones(15))
    assert torch.equal(op(X, W), tk.rms_norm(X, W))
