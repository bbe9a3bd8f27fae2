"""What gradients that can be computed once have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ._eager_autograd import Call, below_autograd, plain
from ._registration import of_any_size, transform_active


def refuse_double_backward(op: str, reference: bool = True) -> Callable[..., NoReturn]:
    """A backward that raises; `reference` is whether `tk.reference.<op>` can do what it refuses."""
    instead = f"; tk.reference.{op} can" if reference else ""

    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise RuntimeError(
            f"tk.{op}: the gradient cannot be differentiated again (double backward){instead}"
        )

    return backward


def one_by_one(call: Call) -> Call:
    """A rule for `torch.func.vmap`: one call after the other."""

    @of_any_size
    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        def select(x: Any, dim: Any, i: int) -> Any:
            return x.select(dim, i) if isinstance(x, Tensor) and dim is not None else x

        results = [
            call(*(select(x, dim, i) for x, dim in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        stacks = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
        return stacks, (0,) * len(stacks)

    return rule


def gradient_call(op: str, gradient: Call, vmap_rule: Callable[[Call], Any]) -> Call:
    """The op that computes the gradient of `op`, as what also works under `torch.func`.

    Its transforms that differentiate need an `autograd.Function`: what
    `torch.library.register_autograd` sets up fails under them. `vmap_rule` makes the rule for
    `torch.func.vmap` of what is returned.
    """

    def call(*args: Any) -> Any:
        # With gradients enabled, the gradient itself is recorded, so as to refuse it.
        if not torch.is_grad_enabled() and plain():
            return below_autograd(gradient, *args)
        return (once.apply if transform_active() else gradient)(*args)

    once = _differentiable_once(gradient, refuse_double_backward(op), vmap_rule(call))
    return call


def gradient_of_ops(op: str, gradients: Call, reference: bool = True) -> Call:
    """The gradients of `op` that several ops compute: to ask for their own is an error.

    `reference` is whether `tk.reference.<op>` can be differentiated again.
    """

    def call(*args: Any) -> Any:
        if not torch.is_grad_enabled() and plain():
            return below_autograd(gradients, *args)
        # Compiled code cannot be differentiated twice at all.
        return (gradients if torch.compiler.is_compiling() else once.apply)(*args)

    refuse = refuse_double_backward(op, reference)
    once = _differentiable_once(gradients, refuse, one_by_one(call))
    return call


def _differentiable_once(gradients: Call, refuse: Callable[..., NoReturn], vmap_rule: Call) -> Any:
    """An `autograd.Function` of the gradients."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            with torch.no_grad():
                return gradients(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            pass

        backward = staticmethod(refuse)
        vmap = staticmethod(vmap_rule)

    return Function
