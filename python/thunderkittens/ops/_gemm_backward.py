"""The gradient of what an activation of `tk.gemm` is applied to, from the gradient of its result.

Without a gate it is one kernel of PyTorch. With one it is the op `gemm_backward`, which goes over
memory once where PyTorch's operations take six passes, or, where the gradient is to be
differentiated itself, these operations.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import emulation
from ..reference.gemm import activate
from ._gradient_call import one_by_one, refuse_double_backward
from ._registration import register

# By their numbers.
NAMES = (None, "relu", "gelu", "gelu_tanh", "silu")

_through_gate = torch.ops.thunderkittens.gemm_backward.default


def activation_gradient(grad: Tensor, z: Tensor, activation: int, gate: int) -> Tensor:
    """The gradient with respect to z."""
    if gate and not torch.is_grad_enabled():
        result: Tensor = _through_gate(grad, z, activation, gate)
        return result
    return _composed(grad, z, activation, gate)


def _composed(grad: Tensor, z: Tensor, activation: int, gate: int) -> Tensor:
    aten = torch.ops.aten
    result: Tensor
    if gate:
        gates, values = z.chunk(2, dim=-1) if gate == 1 else (z[..., ::2], z[..., 1::2])
        activated = activate(gates, NAMES[activation])
        pair = (_composed(grad * values, gates, activation, 0), grad * activated)
        return torch.cat(pair, -1) if gate == 1 else torch.stack(pair, -1).flatten(-2)
    if NAMES[activation] == "relu":
        result = aten.threshold_backward(grad, z, 0)
        return result
    if NAMES[activation] == "silu":
        if not torch.is_grad_enabled():
            result = aten.silu_backward(grad, z)
            return result
        wide = z.float()  # PyTorch's kernel has no derivative
        sigmoid = torch.sigmoid(wide)
        return (grad.float() * sigmoid * (1 + wide * (1 - sigmoid))).to(grad.dtype)
    if activation == 0:
        return grad
    approximate = "tanh" if NAMES[activation] == "gelu_tanh" else "none"
    result = aten.gelu_backward(grad, z, approximate=approximate)
    return result


def _check(grad: Tensor, z: Tensor, activation: int, gate: int) -> None:
    name = "thunderkittens::gemm_backward"
    if grad.dtype != z.dtype:
        raise TypeError(f"{name}: z is {z.dtype}, grad is {grad.dtype}")
    if grad.dim() not in (2, 3) or tuple(z.shape) != (*grad.shape[:-1], 2 * grad.shape[-1]):
        raise ValueError(
            f"{name}: z has shape {tuple(z.shape)}, grad has shape {tuple(grad.shape)}; they must "
            "have two or three dimensions, and z twice as many columns"
        )
    if activation not in (NAMES.index("gelu"), NAMES.index("silu")) or gate not in (1, 2):
        raise ValueError(
            f"{name}: activation is {activation} and gate is {gate}; activation must be 2 (gelu) "
            "or 4 (silu), gate 1 (blocked) or 2 (interleaved)"
        )


def _fake(grad: Tensor, z: Tensor, activation: int, gate: int) -> Tensor:
    _check(grad, z, activation, gate)
    return z.new_empty(z.shape)


def _cpu(grad: Tensor, z: Tensor, activation: int, gate: int) -> Tensor:
    _check(grad, z, activation, gate)
    if emulation.active():
        arrays = {"grad": grad, "z": z}
        return emulation.run("gemm_backward", arrays, activation=activation, gate=gate)["out"]
    with torch.no_grad():
        return _composed(grad.float(), z.float(), activation, gate).to(z.dtype)


def _flops(grad_shape: Any, *args: Any, **kwargs: Any) -> int:
    """Two multiplications per gate; those of the activation are not counted."""
    operations: int = 2 * math.prod(grad_shape)
    return operations


register("gemm_backward", fake=_fake, cpu=_cpu, flops=_flops, vmap=one_by_one(_through_gate))
torch.library.register_autograd("thunderkittens::gemm_backward", refuse_double_backward("gemm"))
