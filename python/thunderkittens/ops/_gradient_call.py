"""What gradients that are ops of their own have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ._registration import transform_active

Call = Callable[..., Any]


def refuse_double_backward(op: str) -> Callable[..., NoReturn]:
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise RuntimeError(
            f"tk.{op}: the gradient cannot be differentiated again (double backward); "
            f"tk.reference.{op} can"
        )

    return backward


def one_by_one(call: Call) -> Call:
    """A rule for `torch.func.vmap`: one call after the other."""

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
        return (Function.apply if transform_active() else gradient)(*args)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            return gradient(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            pass

        backward = staticmethod(refuse_double_backward(op))
        vmap = staticmethod(vmap_rule(call))

    return call
