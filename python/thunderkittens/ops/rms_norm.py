"""RMSNorm, with a residual, dropout or a gate.

`rms_norm` calls `rms_norm_forward`, or the differentiable op `rms_norm` when a gradient is wanted,
whose gradient is the op `rms_norm_backward`.
"""

from __future__ import annotations

from typing import Any, cast, overload

import torch
from torch import Tensor

from .. import emulation
from ..reference._norm import norm_gradients
from ..reference.rms_norm import rms_norm as reference_rms_norm
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

_forward = torch.ops.thunderkittens.rms_norm_forward.default
_single = torch.ops.thunderkittens.rms_norm_forward.single
_differentiable = torch.ops.thunderkittens.rms_norm.default
_gradient = torch.ops.thunderkittens.rms_norm_backward.default


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = ...,
    *,
    eps: float = ...,
    weight_offset: float = ...,
    residual: None = ...,
    gate: Tensor | None = ...,
    gate_first: bool = ...,
    group_size: int | None = ...,
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = ...,
    *,
    eps: float = ...,
    weight_offset: float = ...,
    residual: Tensor,
    dropout_p: float = ...,
    seed: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    gate: Tensor | None = None,
    gate_first: bool = False,
    group_size: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`v / sqrt(mean(v^2) + eps) * (weight + weight_offset)` of each row, in one pass over memory.

    v is x; with a residual `dropout(x) + residual`, which is returned too; with a gate that comes
    first `x * silu(gate)`. Otherwise a gate multiplies the result by silu(gate). Everything is
    computed in float32 and rounded once; the sum is rounded to the residual's dtype and normalised
    as it is returned, as an addition before the norm would be. Every stride is accepted; tensors
    whose last dimension is not adjacent are copied. Differentiable with respect to x, weight,
    residual and gate; reruns have the same bits. It cannot be differentiated again. Autocast leaves
    its tensors as they are. Works under `torch.compile`, `torch.export`, `torch.func.vmap` and
    `torch.func.grad`; on CPU tensors it runs `tk.reference.rms_norm`.

    Args:
        x: (..., D), bfloat16, float16 or float32.
        weight: (D,), of x's dtype or float32. None: ones, to which weight_offset does not add.
        eps: added to the mean of the squares.
        weight_offset: added to the weight in float32; 1 for weights that are stored around 0.
        residual: of x's shape, and of its dtype or float32.
        dropout_p: the probability that an element of x does not count, in steps of 2^-16; the
            others are divided by the share that is kept. It needs a residual and a seed.
        seed: int64, one number, on the device of x. Philox4x32-10 of the seed and of the place in x
            says which elements are dropped: equal seeds give equal results, on every device.
        gate: of x's shape and dtype; not with a residual.
        gate_first: whether the gate is applied to x (Mamba-2), instead of to the result (gated
            delta rule).
        group_size: so many neighbours of a row are normalised together, instead of all D.

    Returns:
        out, of x's shape and dtype, contiguous; with a residual (out, sum), the sum in the
        residual's dtype.

    Raises:
        TypeError: a tensor is no dense tensor, has an unsupported dtype or is on another device.
        ValueError: a shape does not fit the above, a number is out of its range, or options exclude
            each other.

    The formula is `tk.reference.rms_norm`; Zhang and Sennrich, "Root mean square layer
    normalization", arXiv:1910.07467.
    """
    if group_size is not None and group_size == 0:
        raise ValueError("tk.rms_norm: group_size is 0; it must divide the elements of a row")
    size = 0 if group_size is None else group_size
    no_dropout = type(dropout_p) is float and dropout_p == 0.0
    if residual is None and seed is None and no_dropout and not torch.compiler.is_compiling():
        single = _plain(x, weight, gate, eps, weight_offset, gate_first, size)
        if single is not NotImplemented:
            return cast(Tensor, single)
    args = (x, weight, residual, gate, seed, eps, weight_offset, dropout_p, gate_first, size)
    if forward_mode_active():
        _check(args)
        refuse_forward_mode("rms_norm", x, weight, residual, gate)
    wanted = transform_active() or wants_gradient(args[:4])
    if residual is None and seed is None and no_dropout and not wanted:
        alone = (x, weight, gate, eps, weight_offset, gate_first, size)
        result: Tensor = call_checked(_single, alone, _check_single)
        return result
    out, total = call_checked(_recorded if wanted else _forward, args, _check)
    return out if residual is None else (out, total)


def _check(args: tuple[Any, ...]) -> None:
    x, weight, residual, gate, seed, eps, weight_offset, dropout_p, gate_first, group_size = args
    shared.check_norm(
        "rms_norm", x, weight, None, residual, gate, seed, eps, dropout_p, weight_offset,
        gate_first, group_size,
    )  # fmt: skip


def _check_single(args: tuple[Any, ...]) -> None:
    _check(_without_residual(args))


_plain = plain_call(_single, _check_single)


# What the ops do beside the CUDA implementation.

# The dispatcher drops trailing arguments that have their default value.
_DEFAULTS: tuple[Any, ...] = (None, None, None, None, None, 1e-6, 0.0, 0.0, False, 0)
_NAMES = ("eps", "weight_offset", "dropout_p", "gate_first", "group_size")


def _filled(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*args, *_DEFAULTS[len(args) :])


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    args = _filled(args)
    _check(args)
    return shared.empty_results(args[0], args[2])


def _cpu(*args: Any) -> tuple[Tensor, Tensor]:
    args = _filled(args)
    _check(args)
    x, weight, residual, gate, seed = args[:5]
    options = dict(zip(_NAMES, args[5:], strict=True))
    out, total = shared.empty_results(x, residual)
    if x.numel() == 0:
        return out, total
    if emulation.active():
        arrays = {"x": x, "weight": weight, "residual": residual, "gate": gate, "seed": seed}
        found = shared.emulated("rms_norm", arrays, **options)
        out.copy_(found["out"].view(x.shape))
        if residual is not None:
            total.copy_(found["sum"].view(x.shape))
        return out, total
    options["group_size"] = options["group_size"] or None
    with torch.no_grad():
        result = reference_rms_norm(x, weight, residual=residual, gate=gate, seed=seed, **options)
    for to, value in zip((out, total), result if residual is not None else (result,), strict=False):
        to.copy_(value)
    return out, total


_SINGLE_DEFAULTS: tuple[Any, ...] = (None, None, 1e-6, 0.0, False, 0)


def _without_residual(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of `rms_norm_forward` for those of its overload without a residual."""
    x, weight, gate, *numbers = (*args, *_SINGLE_DEFAULTS[len(args) - 1 :])
    return (x, weight, None, gate, None, *numbers[:2], 0.0, *numbers[2:])


def _fake_single(*args: Any) -> Tensor:
    return _fake(*_without_residual(args))[0]


def _cpu_single(*args: Any) -> Tensor:
    return _cpu(*_without_residual(args))[0]


_BACKWARD_DEFAULTS: tuple[Any, ...] = (1e-6, 0.0, 0.0, False, 0, (True,) * 4)


def _backward_filled(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*args, *_BACKWARD_DEFAULTS[len(args) - 6 :])


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    args = _backward_filled(args)
    grad_out, grad_sum, x, weight, gate = args[:5]
    shared.check_gradient("rms_norm", grad_out, grad_sum, x)
    last = (gate is not None, x.shape, grad_out.dtype)
    return shared.empty_gradients(grad_out, x, weight, args[8], args[11], last)


def _cpu_backward(*args: Any) -> tuple[Tensor, ...]:
    args = _backward_filled(args)
    results = _fake_backward(*args)
    grad_out, grad_sum, x, weight, gate, seed, *numbers, needs = args
    options = dict(zip(_NAMES, numbers, strict=True))
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
            "gate": gate,
            "seed": seed,
        }
        names = ("x", "residual", "weight", "last")
        wanted = {f"needs_{n}": bool(v) for n, v in zip(names, needs, strict=True)}
        found = shared.emulated("rms_norm_backward", arrays, **options, **wanted)
        values = [found[n] for n in names]
    else:
        dropout_p = options.pop("dropout_p")
        total, *rest = norm_gradients(grad_out, x, weight, gate, layer=False, **options)
        of_x, of_residual = shared.residual_gradients(
            total, grad_sum, grad_out.dtype, x.dtype, dropout_p, seed
        )
        values = [of_x, of_residual, *rest]
    return filled(results, values)


def _save_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, residual, gate, seed, *ctx.numbers = _filled(inputs)
    # What was normalised; x itself need not live on where it was added to a residual.
    ctx.save_for_backward(x if residual is None else output[1], weight, gate, seed)
    ctx.dtype, ctx.with_residual = x.dtype, residual is not None
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_sum: Tensor | None
) -> tuple[Tensor | None, ...]:
    x, weight, gate, seed = ctx.saved_tensors
    wanted = (*ctx.needs_input_grad, *(False,) * 10)[:10]
    if not ctx.with_residual:
        grad_sum = None
    if grad_out is None:
        grad_out = torch.zeros_like(x, dtype=ctx.dtype)
    needs = [wanted[0], wanted[2], wanted[1], wanted[3]]
    dx, dresidual, dweight, dgate = _any_gradient(
        grad_out, grad_sum, x, weight, gate, seed, *ctx.numbers, needs
    )
    if not shared.is_separate(x, ctx.dtype, ctx.numbers[2]):
        dresidual = dx
    return (
        dx if wanted[0] else None,
        dweight if wanted[1] else None,
        dresidual if wanted[2] else None,
        dgate if wanted[3] else None,
        *(None,) * 6,
    )


_any_gradient = gradient_call("rms_norm", _gradient, one_by_one)
_recorded = differentiable("rms_norm", _differentiable, _save_context, _backward, one_by_one)

shared.register_norm(
    "rms_norm",
    whole=(_fake, _cpu),
    single=(_fake_single, _cpu_single),
    backward=(_fake_backward, _cpu_backward),
)
