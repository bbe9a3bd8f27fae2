"""What `rms_norm_quantize` and `layer_norm_quantize` share: checks, shapes, calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import emulation
from ..reference._norm_quantize import OUTPUTS
from . import _norm
from ._block_scaled import (
    require_choice,
    require_flag,
    require_same_device,
    require_tensor,
    scale_shape,
)
from ._gradient_call import one_by_one
from ._registration import call_checked, register

_FP4, _E4M3 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
_TENSOR, _ROW, _ROW_BLOCK, _NVFP4 = range(len(OUTPUTS))


def code_of(op: str, output: Any, swizzle: Any, scale: Any) -> tuple[int, Tensor | None]:
    """The op's code of an output, and the scale as the op takes it."""
    require_choice(op, "output", output, OUTPUTS)
    require_flag(op, "swizzle", swizzle)
    if isinstance(scale, Tensor) and scale.numel() == 1 and scale.layout is torch.strided:
        scale = scale.reshape(())
    return OUTPUTS.index(output), scale


def call(
    op: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    operands: Sequence[Any],
    check: Callable[[tuple[Any, ...]], None],
    with_sum: bool,
) -> tuple[Tensor, ...]:
    """The results of a call; RuntimeError where an operand requires a gradient."""
    if torch.is_grad_enabled():
        for tensor in operands:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                raise RuntimeError(
                    f"tk.{op} has no gradient, and an operand requires one: call it under "
                    "torch.no_grad(), or detach its operands"
                )
    results = call_checked(function, args, check)
    return tuple(results) if with_sum else tuple(results[:2])


def check_quantize(
    op: str,
    x: Any,
    weight: Any,
    bias: Any,
    residual: Any,
    scale: Any,
    output: int,
    eps: Any,
    weight_offset: Any = 0.0,
) -> None:
    """Raises what the quantising norms document."""
    _norm.check_norm(op, x, weight, bias, residual, None, None, eps, 0.0, weight_offset)
    if not 0 <= output < len(OUTPUTS):
        raise ValueError(
            f"thunderkittens::{op}: output is {output}; it must be from 0 to {len(OUTPUTS) - 1}"
        )
    kind = OUTPUTS[output]
    if output in (_TENSOR, _NVFP4):
        if scale is None:
            raise ValueError(
                f"tk.{op}: output {kind!r} needs a scale, that of the whole result, which is not "
                "known before the last row; give one, or take 'fp8_row' or 'fp8_1x128'"
            )
        require_tensor(op, "scale", scale, (torch.float32,))
        require_same_device(op, "scale", scale, "x", x)
        if scale.dim() > 0:
            raise ValueError(
                f"tk.{op}: scale has shape {tuple(scale.shape)}; it must have one element"
            )
    elif scale is not None:
        raise ValueError(f"tk.{op}: output {kind!r} finds its scales, and takes none")
    if output == _NVFP4 and x.shape[-1] % 2:
        raise ValueError(
            f"tk.{op}: x has shape {tuple(x.shape)}; its last dimension must be even for 'nvfp4', "
            "because two elements share a byte"
        )


def empty_results(
    x: Tensor, residual: Tensor | None, output: int, swizzle: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Results of a quantising norm without their values."""
    total = x.new_empty(0) if residual is None else residual.new_empty(x.shape)
    *lead, width = x.shape
    if output == _NVFP4:
        # As bytes, because torch cannot fill new fp4, as it does where it must be deterministic.
        data = x.new_empty((*lead, width // 2), dtype=torch.uint8).view(_FP4)
        shape = scale_shape((_product(lead), width), 16, True)
        if not swizzle:
            shape = (*lead, (width + 15) // 16)
        return data, x.new_empty(shape, dtype=_E4M3), total
    data = x.new_empty(x.shape, dtype=_E4M3)
    if output == _TENSOR:
        return data, x.new_empty((), dtype=torch.float32), total
    if output == _ROW:
        return data, x.new_empty((*lead, 1), dtype=torch.float32), total
    strides: list[Any] = []
    packed: Any = 1
    for size in reversed(lead):
        strides.insert(0, packed)
        packed = packed * torch.sym_max(size, 1)
    pitch = torch.sym_max((_product(lead) + 3) // 4 * 4, 1)
    scale = x.new_empty_strided(
        (*lead, (width + 127) // 128), (*strides, pitch), dtype=torch.float32
    )
    return data, scale, total


def _product(sizes: Sequence[Any]) -> Any:
    product: Any = 1
    for size in sizes:
        product = product * size
    return product


def on_cpu(
    op: str,
    reference: Callable[..., tuple[Tensor, ...]],
    tensors: dict[str, Tensor | None],
    output: int,
    swizzle: bool,
    **numbers: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The op on the emulator, or by its formula."""
    x, residual = tensors["x"], tensors["residual"]
    assert x is not None
    expected = empty_results(x.detach(), residual, output, swizzle)
    if emulation.active():
        found = _norm.emulated(op, dict(tensors), output=output, swizzle=swizzle, **numbers)
        values = [found["data"], found["scale"], found["sum"]]
    else:
        values = list(
            reference(**tensors, output=OUTPUTS[output], swizzle=swizzle, **numbers),
        )
    total = values[2] if residual is not None else expected[2]
    data = values[0].view(torch.uint8).reshape(expected[0].shape).view(expected[0].dtype)
    scale = expected[1]
    scale.copy_(values[1].reshape(scale.shape))
    return data, scale, total.reshape(expected[2].shape)


def register_quantize(op: str, fake: Callable[..., Any], cpu: Callable[..., Any]) -> None:
    """The Python side of the op."""
    function = getattr(torch.ops.thunderkittens, op).default

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        packed = []

        def stackable(*args: Any) -> tuple[Tensor, ...]:
            # Elements of fp4 cannot be stacked; bytes can.
            data, *rest = function(*args)
            packed.append(data.dtype == _FP4)
            if not packed[0]:
                return data, *rest
            if torch._C._functorch.is_batchedtensor(data):
                raise RuntimeError(
                    f"tk.{op}: torch.func.vmap within another one is not supported with output "
                    "'nvfp4', whose elements cannot be stacked"
                )
            return data.view(torch.uint8), *rest

        (data, *rest), dims = one_by_one(stackable)(info, in_dims, *args)
        return (data.view(_FP4) if packed[0] else data, *rest), dims

    register(op, fake=fake, cpu=cpu, vmap=rule, differentiable=False)
