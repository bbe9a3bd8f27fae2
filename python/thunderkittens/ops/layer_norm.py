"""LayerNorm, with a residual and dropout.

`layer_norm` calls `layer_norm_forward`, or the differentiable op `layer_norm` when a gradient is
wanted, whose gradient is the op `layer_norm_backward`.
"""

from __future__ import annotations

from typing import Any, cast, overload

import torch
from torch import Tensor

from .. import emulation
from ..reference._norm import norm_gradients
from ..reference.layer_norm import layer_norm as reference_layer_norm
from . import _norm as shared
from ._eager_autograd import differentiable
from ._gradient_call import gradient_call, one_by_one
from ._registration import (
    call_checked,
    filled,
    forward_mode_active,
    plain_call,
    refuse_forward_mode,
    transform_active,
    wants_gradient,
)

_forward = torch.ops.thunderkittens.layer_norm_forward.default
_single = torch.ops.thunderkittens.layer_norm_forward.single
_differentiable = torch.ops.thunderkittens.layer_norm.default
_gradient = torch.ops.thunderkittens.layer_norm_backward.default


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    *,
    eps: float = ...,
    residual: None = ...,
) -> Tensor: ...


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    *,
    eps: float = ...,
    residual: Tensor,
    dropout_p: float = ...,
    seed: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`(v - mean(v)) / sqrt(var(v) + eps) * weight + bias` of each row, in one pass over memory.

    v is x, or with a residual `dropout(x) + residual`, which is returned too; var is the mean of
    the squared differences from the mean. Everything is computed in float32 and rounded once; the
    sum is rounded to the residual's dtype and normalised as it is returned, as an addition before
    the norm would be. Every stride is accepted; tensors whose last dimension is not adjacent are
    copied. Differentiable with respect to x, weight, bias and residual; reruns have the same bits.
    It cannot be differentiated again. Autocast leaves its tensors as they are. Works under
    `torch.compile`, `torch.export`, `torch.func.vmap` and `torch.func.grad`; on CPU tensors it runs
    `tk.reference.layer_norm`.

    Args:
        x: (..., D), bfloat16, float16 or float32.
        weight: (D,), of x's dtype or float32. None: ones.
        bias: (D,), of the weight's dtype; not without a weight. None: zeros.
        eps: added to the variance.
        residual: of x's shape, and of its dtype or float32.
        dropout_p: the probability that an element of x does not count, in steps of 2^-16; the
            others are divided by the share that is kept. It needs a residual and a seed.
        seed: int64, one number, on the device of x. Philox4x32-10 of the seed and of the place in x
            says which elements are dropped: equal seeds give equal results, on every device.

    Returns:
        out, of x's shape and dtype, contiguous; with a residual (out, sum), the sum in the
        residual's dtype.

    Raises:
        TypeError: a tensor is no dense tensor, has an unsupported dtype or is on another device.
        ValueError: a shape does not fit the above, a number is out of its range, or options exclude
            each other.

    The formula is `tk.reference.layer_norm`; Ba, Kiros and Hinton, "Layer normalization",
    arXiv:1607.06450.
    """
    no_dropout = type(dropout_p) is float and dropout_p == 0.0
    if residual is None and seed is None and no_dropout and not torch.compiler.is_compiling():
        single = _plain(x, weight, bias, eps)
        if single is not NotImplemented:
            return cast(Tensor, single)
    args = (x, weight, bias, residual, seed, eps, dropout_p)
    if forward_mode_active():
        _check(args)
        refuse_forward_mode("layer_norm", x, weight, bias, residual)
    wanted = transform_active() or wants_gradient(args[:4])
    if residual is None and seed is None and no_dropout and not wanted:
        result: Tensor = call_checked(_single, (x, weight, bias, eps), _check_single)
        return result
    out, total = call_checked(_recorded if wanted else _forward, args, _check)
    return out if residual is None else (out, total)


def _check(args: tuple[Any, ...]) -> None:
    x, weight, bias, residual, seed, eps, dropout_p = args
    shared.check_norm("layer_norm", x, weight, bias, residual, None, seed, eps, dropout_p)


def _check_single(args: tuple[Any, ...]) -> None:
    _check(_without_residual(args))


_plain = plain_call(_single, _check_single)


# What the ops do beside the CUDA implementation.

# The dispatcher drops trailing arguments that have their default value.
_DEFAULTS: tuple[Any, ...] = (None, None, None, None, None, 1e-5, 0.0)


def _filled(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*args, *_DEFAULTS[len(args) :])


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    args = _filled(args)
    _check(args)
    return shared.empty_results(args[0], args[3])


def _cpu(*args: Any) -> tuple[Tensor, Tensor]:
    args = _filled(args)
    _check(args)
    x, weight, bias, residual, seed, eps, dropout_p = args
    out, total = shared.empty_results(x, residual)
    if x.numel() == 0:
        return out, total
    if emulation.active():
        arrays = {"x": x, "weight": weight, "bias": bias, "residual": residual, "seed": seed}
        found = shared.emulated("layer_norm", arrays, eps=eps, dropout_p=dropout_p)
        out.copy_(found["out"].view(x.shape))
        if residual is not None:
            total.copy_(found["sum"].view(x.shape))
        return out, total
    with torch.no_grad():
        result = reference_layer_norm(
            x, weight, bias, eps=eps, residual=residual, dropout_p=dropout_p, seed=seed
        )
    for to, value in zip((out, total), result if residual is not None else (result,), strict=False):
        to.copy_(value)
    return out, total


_SINGLE_DEFAULTS: tuple[Any, ...] = (None, None, 1e-5)


def _without_residual(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of `layer_norm_forward` for those of its overload without a residual."""
    x, weight, bias, eps = (*args, *_SINGLE_DEFAULTS[len(args) - 1 :])
    return (x, weight, bias, None, None, eps, 0.0)


def _fake_single(*args: Any) -> Tensor:
    return _fake(*_without_residual(args))[0]


def _cpu_single(*args: Any) -> Tensor:
    return _cpu(*_without_residual(args))[0]


_BACKWARD_DEFAULTS: tuple[Any, ...] = (1e-5, 0.0, (True,) * 4)


def _backward_filled(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*args, *_BACKWARD_DEFAULTS[len(args) - 5 :])


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    args = _backward_filled(args)
    grad_out, grad_sum, x, weight = args[:4]
    shared.check_gradient("layer_norm", grad_out, grad_sum, x)
    dtype = grad_out.dtype if weight is None else weight.dtype
    last = (weight is not None, x.shape[-1], dtype)
    return shared.empty_gradients(grad_out, x, weight, args[6], args[7], last)


def _cpu_backward(*args: Any) -> tuple[Tensor, ...]:
    args = _backward_filled(args)
    results = _fake_backward(*args)
    grad_out, grad_sum, x, weight, seed, eps, dropout_p, needs = args
    if x.numel() == 0:
        for result in results:
            result.zero_()
        return results
    if emulation.active():
        arrays = {
            "grad_out": grad_out,
            "grad_sum": grad_sum,
            "x": x,
            "weight": weight,
            "seed": seed,
        }
        names = ("x", "residual", "weight", "last")
        wanted = {f"needs_{n}": bool(v) for n, v in zip(names, needs, strict=True)}
        found = shared.emulated(
            "layer_norm_backward", arrays, eps=eps, dropout_p=dropout_p, **wanted
        )
        values = [found[n] for n in names]
    else:
        total, *rest = norm_gradients(grad_out, x, weight, layer=True, eps=eps)
        of_x, of_residual = shared.residual_gradients(
            total, grad_sum, grad_out.dtype, x.dtype, dropout_p, seed
        )
        values = [of_x, of_residual, *rest]
    return filled(results, values)


def _save_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, residual, seed, *ctx.numbers = _filled(inputs)
    # What was normalised; x itself need not live on where it was added to a residual.
    ctx.save_for_backward(x if residual is None else output[1], weight, seed)
    ctx.dtype, ctx.with_residual = x.dtype, residual is not None
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_sum: Tensor | None
) -> tuple[Tensor | None, ...]:
    x, weight, seed = ctx.saved_tensors
    wanted = (*ctx.needs_input_grad, *(False,) * 7)[:7]
    if not ctx.with_residual:
        grad_sum = None
    if grad_out is None:
        grad_out = torch.zeros_like(x, dtype=ctx.dtype)
    needs = [wanted[0], wanted[3], wanted[1], wanted[2]]
    dx, dresidual, dweight, dbias = _any_gradient(
        grad_out, grad_sum, x, weight, seed, *ctx.numbers, needs
    )
    if not shared.is_separate(x, ctx.dtype, ctx.numbers[1]):
        dresidual = dx
    return (
        dx if wanted[0] else None,
        dweight if wanted[1] else None,
        dbias if wanted[2] else None,
        dresidual if wanted[3] else None,
        *(None,) * 3,
    )


_any_gradient = gradient_call("layer_norm", _gradient, one_by_one)
_recorded = differentiable("layer_norm", _differentiable, _save_context, _backward, one_by_one)

shared.register_norm(
    "layer_norm",
    whole=(_fake, _cpu),
    single=(_fake_single, _cpu_single),
    backward=(_fake_backward, _cpu_backward),
)
