"""Causal depthwise convolutions of a few taps along a sequence.

`causal_conv1d` calls `causal_conv1d_forward`, or the differentiable op `causal_conv1d` when a
gradient is wanted, whose gradient is the op `causal_conv1d_backward`. The ops check what they are
given themselves; what is documented is raised when they have failed.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from .. import emulation
from .._signatures import as_causal_conv1d
from ..reference.causal_conv1d import causal_conv1d as reference_conv
from ..reference.causal_conv1d import causal_conv1d_backward as reference_backward
from ._eager_autograd import differentiable
from ._gradient_call import gradient_call, one_by_one, refuse_double_backward
from ._registration import (
    autocast_active,
    autocast_operands,
    call_checked,
    filled,
    forward_mode_active,
    plain_call,
    refuse_forward_mode,
    register,
    register_both,
    require_device,
    transform_active,
    wants_gradient,
)

MIN_WIDTH, MAX_WIDTH = 2, 4
ACTIVATIONS: dict[str | None, int] = {None: 0, "silu": 4}
NAMES = {0: None, 4: "silu"}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NAME = "causal_conv1d"
_forward = torch.ops.thunderkittens.causal_conv1d_forward.default
_differentiable = torch.ops.thunderkittens.causal_conv1d.default
_gradient = torch.ops.thunderkittens.causal_conv1d_backward.default


@as_causal_conv1d
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal depthwise convolution along the tokens, `out[b, c, t] = act(bias[c] + sum over w < W
    of weight[c, w] x[b, c, t - W + 1 + w])`, with zeros or a state before the first token.

    The arguments are those of `torch.nn.functional.conv1d` with `groups=C`, without the dimension
    of size 1 of its weight. Arithmetic is in float32, rounded once. x is read where it is, in any
    layout, and out has its layout: `x.transpose(1, 2)` of a contiguous (B, T, C) tensor gives such
    a view. Both orders run at the speed of memory where vectors of 16 bytes can be accessed, that
    is, where the adjacent dimension has a multiple of 16 bytes, and the base and the other strides
    are such; elsewhere elements are accessed, which is slower. Differentiable with respect to x,
    weight, bias and the initial state, also through the final state; reruns have the same bits. It
    cannot be differentiated again. Under autocast, x and the initial state are converted to the
    autocast dtype. Works
    under `torch.compile`, `torch.export`, `torch.func.vmap` and `torch.func.grad`; on CPU tensors
    it runs `tk.reference.causal_conv1d`.

    Args:
        x: (B, C, T), bfloat16, float16 or float32. T may be 0.
        weight: (C, W) with 2 to 4 taps, of x's dtype or float32; the last is that of the token
            itself.
        bias: (C,), of x's dtype or float32, or None.
        activation: None or "silu", applied to the sum.
        initial_state: (B, C, W - 1) of x's dtype, the inputs before the first token, the latest
            last; None for zeros.
        return_state: also return the last W - 1 inputs of each sequence, what the next call or
            `tk.causal_conv1d_update` continues from.
        cu_seqlens: (N + 1,), int32, on x's device: 0, then the sums of the first lengths of N
            sequences that are packed along T; B must be 1, and states are (N, C, W - 1). They are
            read on the GPU. Sequences may be empty. Tokens behind the last sequence give 0.

    Returns:
        out of x's shape, dtype and strides (as `torch.empty_like` has them); with return_state
        (out, state), where state is contiguous and of x's dtype.

    Raises:
        TypeError: what is no dense tensor, dtypes, devices.
        ValueError: shapes that do not fit the above, an unknown activation, and, on a CPU,
            cumulative lengths that do not fit.

    The formula is `tk.reference.causal_conv1d`; Gu and Dao, "Mamba: linear-time sequence modeling
    with selective state spaces", arXiv:2312.00752.
    """
    code = ACTIVATIONS.get(activation, -1) if activation is None or activation == "silu" else -1
    if code < 0:
        refuse_activation(_NAME, activation)
    if not return_state and not torch.compiler.is_compiling():
        plain = _plain(x, weight, bias, code, initial_state, cu_seqlens)
        if plain is not NotImplemented:
            return cast(Tensor, plain)
    if autocast_active():
        x, initial_state = autocast_operands(x, initial_state)
    args = (x, weight, bias, code, initial_state, cu_seqlens)
    if forward_mode_active():
        refuse_forward_mode(_NAME, *(t for t in args[:5] if isinstance(t, Tensor)))
    if return_state or wants_gradient(args) or transform_active():
        out, state = call_checked(_recorded, (*args, bool(return_state)), _check)
        return (out, state) if return_state else out
    result: Tensor = call_checked(_forward, args, _check)
    return result


def refuse_activation(op: str, activation: Any) -> None:
    """Raises what the ops document of an activation that they do not know."""
    if not isinstance(activation, str | None):
        raise TypeError(
            f"tk.{op}: activation must be a string or None, got {type(activation).__name__}"
        )
    raise ValueError(f'tk.{op}: activation is {activation!r}; it must be None or "silu"')


def require_dense(op: str, name: str, x: Any) -> None:
    """Raises TypeError unless x is a dense tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"tk.{op}: {name} must be a torch.Tensor, got {type(x).__name__}")
    if x.layout is not torch.strided or x.is_nested:
        raise TypeError(f"tk.{op}: {name} must be a dense tensor (torch.strided), got {x.layout}")


def require_taps(op: str, x: Any, weight: Any, bias: Any) -> None:
    """Raises what the ops document unless x, whose second dimension has the channels, has one of
    the dtypes, and weight and bias fit it."""
    require_dense(op, "x", x)
    if x.dtype not in _DTYPES:
        raise TypeError(
            f"tk.{op}: x is {x.dtype}; supported are torch.bfloat16, torch.float16 and "
            "torch.float32"
        )
    require_dense(op, "weight", weight)
    if weight.dim() != 2 or not MIN_WIDTH <= weight.shape[1] <= MAX_WIDTH:
        raise ValueError(
            f"tk.{op}: weight has shape {tuple(weight.shape)}; it must be (C, W), of "
            f"{MIN_WIDTH} to {MAX_WIDTH} taps"
        )
    if weight.shape[0] != x.shape[1]:
        raise ValueError(
            f"tk.{op}: weight has {weight.shape[0]} channels, x has {x.shape[1]}; they must be "
            "equal"
        )
    if bias is not None:
        require_dense(op, "bias", bias)
        if tuple(bias.shape) != (x.shape[1],):
            raise ValueError(
                f"tk.{op}: bias has shape {tuple(bias.shape)}; it must be {(x.shape[1],)}"
            )
    for name, y in (("weight", weight), ("bias", bias)):
        if y is None:
            continue
        if y.dtype not in (x.dtype, torch.float32):
            raise TypeError(
                f"tk.{op}: {name} is {y.dtype}; it must have the dtype of x, {x.dtype}, or be "
                "torch.float32"
            )
        require_device(op, name, y, "x", x)


def require_int32(op: str, name: str, y: Any, x: Tensor) -> None:
    """Raises TypeError unless y is a dense int32 tensor where x is."""
    require_dense(op, name, y)
    if y.dtype is not torch.int32:
        raise TypeError(f"tk.{op}: {name} is {y.dtype}; it must be torch.int32")
    require_device(op, name, y, "x", x)


def require_state(op: str, name: str, state: Any, x: Tensor) -> None:
    """Raises TypeError unless a state has x's dtype and device."""
    require_dense(op, name, state)
    if state.dtype is not x.dtype:
        raise TypeError(
            f"tk.{op}: {name} is {state.dtype}, x is {x.dtype}; they must have the same dtype"
        )
    require_device(op, name, state, "x", x)


def causal_conv1d_shape(
    x: Any,
    weight: Any,
    bias: Any = None,
    activation: int = 0,
    state: Any = None,
    cu_seqlens: Any = None,
) -> tuple[Any, int, int]:
    """Shape of a state, (N, C, W - 1); raises what `causal_conv1d` documents."""
    if activation not in NAMES:
        raise ValueError(f"tk.{_NAME}: activation is {activation}; it must be 0 (none) or 4 (silu)")
    require_dense(_NAME, "x", x)
    if x.dim() != 3:
        raise ValueError(
            f"tk.{_NAME}: x has shape {tuple(x.shape)}; it must have 3 dimensions, (B, C, T)"
        )
    require_taps(_NAME, x, weight, bias)
    sequences = x.shape[0]
    if cu_seqlens is not None:
        require_int32(_NAME, "cu_seqlens", cu_seqlens, x)
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            raise ValueError(
                f"tk.{_NAME}: cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be "
                "(sequences + 1,)"
            )
        if x.shape[0] != 1:
            raise ValueError(
                f"tk.{_NAME}: x has a batch of {x.shape[0]}; with cu_seqlens, sequences are packed "
                "along T, and it must be 1"
            )
        sequences = cu_seqlens.shape[0] - 1
    shape = (sequences, x.shape[1], weight.shape[1] - 1)
    if state is not None:
        require_state(_NAME, "initial_state", state, x)
        if tuple(state.shape) != shape:
            raise ValueError(
                f"tk.{_NAME}: initial_state has shape {tuple(state.shape)}; it must be "
                f"(sequences, C, W - 1), {shape}"
            )
    return shape


def _check(args: tuple[Any, ...]) -> None:
    causal_conv1d_shape(*args[:6])


_plain = plain_call(_forward, _check)


def _require_edges(cu_seqlens: Tensor | None, length: int) -> None:
    """Raises ValueError for cumulative lengths that contradict each other or x."""
    if cu_seqlens is None:
        return
    edges = cu_seqlens.tolist()
    if edges[0] != 0 or edges[-1] > length or any(end < begin for begin, end in pairwise(edges)):
        raise ValueError(
            f"tk.{_NAME}: cu_seqlens is {edges}; it must start with 0, not decrease and not exceed "
            f"the {length} tokens"
        )


# What the ops do beside the CUDA implementation.

# The dispatcher drops trailing arguments that have their default value.
_DEFAULTS: tuple[Any, ...] = (None, 0, None, None, False)


def _fake(x: Tensor, weight: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    bias, activation, state, cu_seqlens, return_state = (*args, *_DEFAULTS[len(args) :])
    shape = causal_conv1d_shape(x, weight, bias, activation, state, cu_seqlens)
    return torch.empty_like(x), x.new_empty((shape[0] if return_state else 0, *shape[1:]))


def _cpu(x: Tensor, weight: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    results = _fake(x, weight, *args)
    bias, activation, state, cu_seqlens, return_state = (*args, *_DEFAULTS[len(args) :])
    _require_edges(cu_seqlens, x.shape[2])
    values: Any
    if emulation.active() and any(y.numel() > 0 for y in results):
        arrays = {"x": x, "weight": weight, "bias": bias, "state": state, "cu_seqlens": cu_seqlens}
        found = emulation.run(_NAME, arrays, activation=activation, return_state=return_state)
        values = found["out"], found.get("state", results[1])
    else:
        values = reference_conv(
            x,
            weight,
            bias,
            activation=NAMES[activation],
            initial_state=state,
            return_state=True,
            cu_seqlens=cu_seqlens,
        )
    return filled(results, values)


_BACKWARD_DEFAULTS: tuple[Any, ...] = (None, 0, None, None, (True, True, True, True))


def _backward_arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*args, *_BACKWARD_DEFAULTS[len(args) - 4 :])


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    grad_out, grad_state, x, weight, bias, activation, state, cu_seqlens, needs = (
        _backward_arguments(args)
    )
    shape = causal_conv1d_shape(x, weight, bias, activation, state, cu_seqlens)
    expected = (("grad_out", grad_out, tuple(x.shape)), ("grad_state", grad_state, shape))
    for name, y, required in expected:
        if y is not None and (tuple(y.shape) != required or y.dtype is not x.dtype):
            raise ValueError(
                f"thunderkittens::causal_conv1d_backward: {name} is {y.dtype} of shape "
                f"{tuple(y.shape)}; it must be {x.dtype} of shape {required}"
            )
    return (
        torch.empty_like(x) if needs[0] else x.new_empty(0),
        weight.new_empty(weight.shape if needs[1] else 0),
        weight.new_empty(0) if bias is None else bias.new_empty(bias.shape if needs[2] else 0),
        x.new_empty(shape if needs[3] and state is not None else 0),
    )


_RESULTS = ("grad_x", "grad_weight", "grad_bias", "grad_state")


def _cpu_backward(*args: Any) -> tuple[Tensor, ...]:
    results = _fake_backward(*args)
    grad_out, grad_state, x, weight, bias, activation, state, cu_seqlens, needs = (
        _backward_arguments(args)
    )
    _require_edges(cu_seqlens, x.shape[2])
    values: Any
    if emulation.active() and x.numel() > 0:
        arrays = {"grad_out": grad_out, "grad_state": grad_state, "x": x, "weight": weight}
        arrays |= {"bias": bias, "state": state, "cu_seqlens": cu_seqlens}
        names = ("needs_x", "needs_weight", "needs_bias", "needs_state")
        wanted = dict(zip(names, map(bool, needs), strict=True))
        found = emulation.run("causal_conv1d_backward", arrays, activation=activation, **wanted)
        values = [found[name] for name in _RESULTS]
    else:
        values = reference_backward(
            grad_out,
            grad_state,
            x,
            weight,
            bias,
            activation=NAMES[activation],
            initial_state=state,
            cu_seqlens=cu_seqlens,
        )
    return filled(results, values)


def _flops(x_shape: Any, weight_shape: Any, *args: Any, **kwargs: Any) -> int:
    """A multiplication and an addition for each tap of each output."""
    operations: int = 2 * math.prod(x_shape) * weight_shape[1]
    return operations


def _flops_backward(*args: Any, **kwargs: Any) -> int:
    """The outputs once more, and the gradients of x and of the weights."""
    return 3 * _flops(*args[2:4])


def _save_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    arguments = (*inputs, *_DEFAULTS[len(inputs) - 2 :])
    x, weight, bias, activation, state, cu_seqlens, return_state = arguments
    ctx.activation, ctx.return_state = activation, return_state
    ctx.save_for_backward(x, weight, bias, state, cu_seqlens)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_state: Tensor | None
) -> tuple[Tensor | None, ...]:
    x, weight, bias, state, cu_seqlens = ctx.saved_tensors
    wanted = (*ctx.needs_input_grad, *(False,) * 7)[:7]
    needs = [*wanted[:3], wanted[4]]
    if not ctx.return_state:
        grad_state = None
    if grad_out is None:
        grad_out = torch.zeros_like(x)
    if grad_state is not None:
        grad_state = grad_state.to(x.dtype)
    dx, dweight, dbias, dstate = _any_gradient(
        grad_out.to(x.dtype), grad_state, x, weight, bias, ctx.activation, state, cu_seqlens, needs
    )
    return (
        dx if needs[0] else None,
        dweight if needs[1] else None,
        dbias if needs[2] else None,
        None,
        dstate if needs[3] else None,
        None,
        None,
    )


_any_gradient = gradient_call(_NAME, _gradient, one_by_one)
_recorded = differentiable(_NAME, _differentiable, _save_context, _backward, one_by_one)

register_both(_NAME, fake=_fake, cpu=_cpu, flops=_flops, vmap=one_by_one, autocast=1)
register(
    "causal_conv1d_backward",
    fake=_fake_backward,
    cpu=_cpu_backward,
    flops=_flops_backward,
    vmap=one_by_one(_gradient),
)
torch.library.register_autograd(
    "thunderkittens::causal_conv1d_backward", refuse_double_backward(_NAME)
)
