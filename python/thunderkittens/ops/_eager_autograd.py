"""How a call records its gradient: at the host cost of PyTorch's own ops where it can.

Three mechanisms serve the same two formulas, what to save and what the gradients are. What
`torch.library.register_autograd` sets up serves compilers, tracers and dispatch modes; a `Function`
with `setup_context` the transforms of `torch.func`. Both run some 10 to 40 us of Python in each
call, more than the op itself. Where none of these is active, ops are called below autograd and
autocast, whose Python kernels then do not run either, and recorded by a node in C++
(csrc/autograd), where the installed torch is the one that it was built with; else by a `Function`
with `forward(ctx, ...)`, in some 5 us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.autograd.function import Function, FunctionMeta

from .. import _load
from ._registration import autocast_active, transform_active

Call = Callable[..., Any]

_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing_state = torch._C._get_tracing_state
_apply = torch._C._FunctionBase.__dict__["apply"]

# What `torch._C._AutoDispatchBelowAutograd` excludes, and autocast, which public functions apply.
_AUTOGRAD = DispatchKey.AutogradFunctionality
_ABOVE = DispatchKeySet(_AUTOGRAD)
for _key in ("AutogradOther", "AutogradNestedTensor", "AutocastCPU", "AutocastCUDA"):
    _ABOVE = _ABOVE | DispatchKeySet(getattr(DispatchKey, _key))
_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


# Whether nodes in C++ record where there are any; tests also try without.
use_nodes = True


def plain() -> bool:
    """Whether a call is followed by autograd alone: by no compiler or tracer, no transform of
    `torch.func` and no dispatch mode."""
    return not (
        torch.compiler.is_compiling()
        or transform_active()
        or _dispatch_modes()
        or _tracing_state() is not None
    )


def below_autograd(call: Call, *args: Any) -> Any:
    """A call whose ops skip autograd and autocast."""
    if autocast_active() or _excluded(_AUTOGRAD):
        with torch._C._ExcludeDispatchKeyGuard(_ABOVE):
            return call(*args)
    # A third of what the guard costs.
    _exclude(_AUTOGRAD, True)
    try:
        return call(*args)
    finally:
        _exclude(_AUTOGRAD, False)


def differentiable(
    name: str,
    call: Call,
    save: Call,
    backward: Call,
    vmap_rule: Callable[[Call], Call] | None = None,
    has_node: Callable[..., bool] | None = None,
) -> Call:
    """`call` as what records its gradient.

    Args:
        name: what the nodes of the graph are called.
        call: an op, which gets its autograd registration here, or a function of several ops.
        save: `setup_context` of `torch.autograd.Function`. Trailing arguments that have their
            default value may be missing.
        backward: its `backward`.
        vmap_rule: makes the rule for `torch.func.vmap` of what is returned; without it, an op does
            without the transforms of `torch.func`.
        has_node: whether a call's gradient is what its node in C++ computes; None: always.
    """
    of_op = isinstance(call, torch._ops.OpOverload)
    if isinstance(call, torch._ops.OpOverload):
        torch.library.register_autograd(call, backward, setup_context=save)
    eager = _eager(name, call, save, backward)
    node = _node(call)

    def recorded(*args: Any) -> Any:
        if plain():
            if node is not None and use_nodes and (has_node is None or has_node(*args)):
                return node(*args)
            return eager(*args)
        if of_op and not (transform_active() and vmap_rule is not None):
            return call(*args)
        return Transformed.apply(*args)

    class Transformed(Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            return call(*args)

        setup_context = staticmethod(save)

    Transformed.backward = staticmethod(backward)  # type: ignore[method-assign]
    if vmap_rule is not None:
        Transformed.vmap = staticmethod(vmap_rule(recorded))  # type: ignore[method-assign]
    return recorded


def _node(call: Call) -> Call | None:
    """The op that records `call` by a node in C++, or None."""
    if not _load.has_nodes or not isinstance(call, torch._ops.OpOverload):
        return None
    packet = getattr(torch.ops.thunderkittens_autograd, call._schema.name.split("::")[1], None)
    return getattr(packet, call._overloadname, None)


def _eager(name: str, call: Call, save: Call, backward: Call) -> Call:
    def forward(ctx: Any, *args: Any) -> Any:
        output = below_autograd(call, *args)
        save(ctx, args, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = FunctionMeta(f"thunderkittens_{name}", (Function,), methods)
    # What the engine calls, without a look at which of `backward` and `vjp` is defined.
    function._backward_cls.apply = backward
    # `Function.apply` looks for transforms before it calls this.
    bound: Call = _apply.__get__(None, function)
    return bound
