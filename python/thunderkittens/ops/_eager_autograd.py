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
_AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)
_ABOVE = DispatchKeySet(_AUTOGRAD) | _AUTOCAST
for _key in ("AutogradOther", "AutogradNestedTensor"):
    _ABOVE = _ABOVE | DispatchKeySet(getattr(DispatchKey, _key))
_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


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


def below_autocast(call: Call, *args: Any) -> Any:
    """A call whose ops skip autocast, of which the operands are converted already."""
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return call(*args)


def differentiable(
    name: str,
    call: Call,
    save: Call,
    backward: Call,
    vmap_rule: Callable[[Call], Call] | None = None,
    op: Call | None = None,
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
        op: where `call` is a function, an op of the same arguments that a node in C++ may record.
    """
    of_op = isinstance(call, torch._ops.OpOverload)
    if isinstance(call, torch._ops.OpOverload):
        torch.library.register_autograd(call, backward, setup_context=save)
    eager = _eager(name, call, save, backward)
    op = call if op is None else op
    has_node = _has_node(op)

    def recorded(*args: Any) -> Any:
        if plain():
            if not has_node:
                return eager(*args)
            return below_autocast(op, *args) if autocast_active() else op(*args)
        if of_op and not (transform_active() and vmap_rule is not None):
            return call(*args)
        return apply(*args)

    class Transformed(Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            return call(*args)

        setup_context = staticmethod(save)

    apply: Call = Transformed.apply
    Transformed.backward = staticmethod(backward)  # type: ignore[method-assign]
    if vmap_rule is not None:
        Transformed.vmap = staticmethod(vmap_rule(recorded))  # type: ignore[method-assign]
    return recorded


def _has_node(call: Call) -> bool:
    """Whether `call` is an op that a node in C++ records."""
    if not _load.has_nodes or not isinstance(call, torch._ops.OpOverload):
        return False
    suffix = "" if call._overloadname == "default" else f".{call._overloadname}"
    name = f"{call._schema.name}{suffix}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutogradCUDA")


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
