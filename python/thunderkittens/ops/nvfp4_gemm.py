"""Products with NVFP4 weights.

`nvfp4_gemm` brings the operands to what the op takes, activations of 16 bits and a prepared weight,
and calls it. Activations of NVFP4 become bfloat16 first, which holds elements times scales exactly;
a weight that is not prepared is prepared first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import emulation
from ..reference.nvfp4_gemm import nvfp4_gemm as reference_nvfp4_gemm
from ..reference.nvfp4_prepare import Nvfp4Weight
from ._block_scaled import require_flag
from ._eager_autograd import differentiable
from ._gemm_backward import activation_gradient
from ._gradient_call import gradient_of_ops, one_by_one
from ._registration import (
    autocast_active,
    autocast_operands,
    forward_mode_active,
    refuse_forward_mode,
    register,
    transform_active,
)
from .fp8_gemm import ACTIVATIONS
from .nvfp4_dequantize import nvfp4_dequantize, require_quantized
from .nvfp4_prepare import nvfp4_prepare, prepared_shape, require_weight

_NAME = "tk.nvfp4_gemm"
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_OF_A, _OF_B = ("a", "scale_a", "global_scale_a"), ("b", "scale_b", "global_scale_b")
_CODES = (torch.uint8, torch.float4_e2m1fn_x2)
_op = torch.ops.thunderkittens.nvfp4_gemm.default
_restore = torch.ops.thunderkittens.nvfp4_dequantize.prepared
_dense_product = torch.ops.thunderkittens.gemm_forward.default


def nvfp4_gemm(
    a: Tensor,
    b: Nvfp4Weight | Tensor,
    *,
    scale_a: Tensor | None = None,
    global_scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    global_scale_b: Tensor | None = None,
    swizzle: bool = True,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    offs: Tensor | None = None,
) -> Tensor:
    """`activation(global_scale * (a @ b^T) + bias)` with a weight b of NVFP4, rounded once.

    a is bfloat16 or float16, or NVFP4 too. Elements times the scales of their blocks are exact in
    16 bits; their products are summed in float32, and multiplied by the scales of the matrices in
    float32. Reruns give the same bits. With `weight = tk.nvfp4_prepare(*tk.nvfp4_quantize(w))` the
    product is `tk.nvfp4_gemm(x, weight)`; a weight that is not prepared is prepared in each call,
    and an NVFP4 a is converted to bfloat16 in each call.

    Differentiable once with respect to a (of 16 bits) and bias: the gradient of a is a product with
    the dequantised weight, the weight itself has none. Under autocast, an a of 16 or 32 bits and
    bias are converted to the autocast dtype.

    Args:
        a: (..., M, K), bfloat16 or float16, any strides; or (M, K / 2) NVFP4 codes, as
            float4_e2m1fn_x2 or uint8. K is a multiple of 16.
        b: an `Nvfp4Weight`, or (N, K / 2) NVFP4 codes; of E matrices with offs.
        scale_a: float8_e4m3fn, the scales of the blocks of a, where a is codes.
        global_scale_a: float32 (), the scale of a, where a is codes.
        scale_b: float8_e4m3fn, the scales of the blocks of b, where b is codes.
        global_scale_b: float32 () or (E,), the scale of b, where b is codes.
        swizzle: whether scale_a and scale_b lie in the 128x4 layout, or plain.
        bias: (N,), dtype of a (bfloat16 where a is codes).
        activation: None, "relu", "gelu", "gelu_tanh" (the approximation by tanh) or "silu".
        out_dtype: torch.bfloat16, torch.float16 or torch.float32; None is that of a, bfloat16 where
            a is codes.
        offs: int32 (E,), the ends of the groups of a's rows, ascending: group e, which may be
            empty, is multiplied with matrix e. Rows behind the last group give 0. Read on the
            device.

    Returns:
        (..., M, N) of out_dtype, contiguous.

    Raises:
        TypeError: an operand is no dense tensor, has an unsupported dtype, or is on another device
            than a; a scale is missing, or given although its operand needs none; out_dtype is none
            of the above.
        ValueError: shapes do not match, or activation is none of the above.
        RuntimeError: a gradient is wanted and there are groups.

    The formula is `tk.reference.nvfp4_gemm`.
    """
    require_flag("nvfp4_gemm", "swizzle", swizzle)
    if activation not in ACTIVATIONS:
        raise ValueError(f"{_NAME}: activation is {activation!r}; it must be one of {ACTIVATIONS}")
    _require_tensor("a", a)
    if not isinstance(b, Nvfp4Weight):
        _require_tensor("b", b)
    coded = a.dtype in _CODES
    _check_scales("a", coded, scale_a, global_scale_a)
    _check_scales("b", not isinstance(b, Nvfp4Weight), scale_b, global_scale_b)
    if not isinstance(b, Nvfp4Weight):
        assert scale_b is not None
        assert global_scale_b is not None
        require_weight("nvfp4_gemm", _OF_B, b, scale_b, global_scale_b, swizzle)
        b = nvfp4_prepare(b, scale_b, global_scale_b, swizzle=swizzle)
    scale = b.global_scale
    if coded:
        assert scale_a is not None
        assert global_scale_a is not None
        _require_tensor("global_scale_a", global_scale_a)
        if a.dim() != 2 or global_scale_a.shape != ():
            raise ValueError(
                f"{_NAME}: a has shape {tuple(a.shape)} and global_scale_a has shape "
                f"{tuple(global_scale_a.shape)}; of NVFP4 they must be (M, K / 2) and ()"
            )
        require_quantized("nvfp4_gemm", _OF_A, a, scale_a, global_scale_a, swizzle)
        one = torch.ones_like(global_scale_a)
        a = nvfp4_dequantize(a, scale_a, one, swizzle=swizzle)
        scale = scale * global_scale_a
    elif autocast_active():
        a, bias = autocast_operands(a, bias)
    _check(a, b.data, scale, b.rows, b.columns, bias, out_dtype, offs)
    rows = a if a.dim() == 2 else a.flatten(0, -2)
    code = ACTIVATIONS.index(activation)
    if forward_mode_active():
        refuse_forward_mode("nvfp4_gemm", a, bias)
    wanted = a.requires_grad or (bias is not None and bias.requires_grad)
    # Under the transforms of torch.func, tensors do not tell whose gradient will be wanted.
    if (torch.is_grad_enabled() and wanted) or (transform_active() and offs is None):
        if offs is not None:
            raise RuntimeError(
                f"{_NAME}: a product of groups (offs) has no gradient; detach a and bias, or call "
                "it under torch.no_grad()"
            )
        out = _recorded(rows, b.data, scale, b.rows, bias, code, out_dtype)
    else:
        out = _op(rows, b.data, scale, b.rows, bias, code, out_dtype, offs)
    result: Tensor = out if a.dim() == 2 else out.view(*a.shape[:-1], b.rows)
    return result


def _require_tensor(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{_NAME}: {name} must be a torch.Tensor, got {type(x).__name__}")
    if x.layout is not torch.strided:
        raise TypeError(f"{_NAME}: {name} must be a dense tensor (torch.strided), got {x.layout}")


def _check_scales(name: str, coded: bool, scale: Any, global_scale: Any) -> None:
    for key, x in ((f"scale_{name}", scale), (f"global_scale_{name}", global_scale)):
        if coded and x is None:
            raise TypeError(f"{_NAME}: {name} is NVFP4 codes and {key} is missing")
        if not coded and x is not None:
            raise TypeError(f"{_NAME}: {key} is given, but {name} is not NVFP4 codes")


def _check(
    a: Any,
    data: Any,
    scale: Any,
    n: int,
    k: int,
    bias: Any,
    out_dtype: Any,
    offs: Any,
) -> None:
    given = {"a": a, "b": data, "b's global_scale": scale}
    given |= {key: x for key, x in (("bias", bias), ("offs", offs)) if x is not None}
    for key, x in given.items():
        _require_tensor(key, x)
        if x.device != a.device:
            raise TypeError(f"{_NAME}: {key} is on {x.device}, a is on {a.device}")
    if a.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(
            f"{_NAME}: a is {a.dtype}; supported are torch.bfloat16, torch.float16 and NVFP4 codes "
            "(torch.float4_e2m1fn_x2 or torch.uint8)"
        )
    for key, x, dtype in (
        ("b", data, torch.uint8),
        ("b's global_scale", scale, torch.float32),
        ("bias", bias, a.dtype),
        ("offs", offs, torch.int32),
    ):
        if x is not None and x.dtype != dtype:
            raise TypeError(f"{_NAME}: {key} is {x.dtype}; supported is {dtype}")
    if out_dtype is not None and out_dtype not in _OUT_DTYPES:
        raise TypeError(
            f"{_NAME}: out_dtype is {out_dtype}; supported are torch.bfloat16, torch.float16 and "
            "torch.float32"
        )
    if a.dim() < 2 or (offs is not None and a.dim() != 2) or a.shape[-1] != k:
        raise ValueError(
            f"{_NAME}: a has shape {tuple(a.shape)}; it must be (..., M, {k}), {k} being the "
            "columns of b, and (M, K) with offs"
        )
    groups = () if offs is None else (data.shape[0],)
    if (
        data.dim() != 3 + len(groups)
        or tuple(data.shape[-3:]) != prepared_shape(n, k)
        or k % 16 != 0
        or tuple(scale.shape) != groups
    ):
        raise ValueError(
            f"{_NAME}: b has shape {tuple(data.shape)} and its global_scale has shape "
            f"{tuple(scale.shape)}; they are no prepared weight of {n} x {k} "
            f"({'one matrix' if offs is None else 'one matrix per group'})"
        )
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(
            f"{_NAME}: bias has shape {tuple(bias.shape)}; it must be ({n},), one value per row of "
            "b"
        )
    if offs is not None and tuple(offs.shape) != groups:
        raise ValueError(
            f"{_NAME}: offs has shape {tuple(offs.shape)}; it must be {groups}, the end of the "
            "rows of each matrix of b"
        )


def _gradients(
    grad: Tensor,
    a: Tensor,
    data: Tensor,
    scale: Tensor,
    n: int,
    bias: Tensor | None,
    activation: int,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor]:
    """Gradients of a and bias, nothing where they are not needed."""
    grad_a, grad_bias = grad.new_empty((0,)), grad.new_empty((0,))
    if activation != 0:
        z = _op(a, data, scale, n, bias, 0, torch.float32, None)
        grad = activation_gradient(grad.float(), z, activation, 0)
    if needs[0]:
        weight = _restore(data, torch.ones_like(scale), n, a.shape[-1], a.dtype)
        grad_a = _dense_product(grad.to(a.dtype), weight, None, torch.float32)
        grad_a = (grad_a * scale).to(a.dtype)
    if needs[1]:
        grad_bias = grad.sum(0, dtype=torch.float32).to(a.dtype)
    return grad_a, grad_bias


_any_gradients = gradient_of_ops("nvfp4_gemm", _gradients)


def _forward(
    a: Tensor,
    data: Tensor,
    scale: Tensor,
    n: int,
    bias: Tensor | None,
    activation: int,
    out_dtype: torch.dtype | None,
) -> Tensor:
    result: Tensor = _op(a, data, scale, n, bias, activation, out_dtype, None)
    return result


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, data, scale, ctx.n, bias, ctx.activation, _ = inputs
    ctx.save_for_backward(a, data, scale, bias)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, data, scale, bias = ctx.saved_tensors
    needs = ctx.needs_input_grad[0], ctx.needs_input_grad[4]
    of_a, of_bias = _any_gradients(grad, a, data, scale, ctx.n, bias, ctx.activation, needs)
    grad_a, grad_bias = of_a if needs[0] else None, of_bias if needs[1] else None
    return grad_a, None, None, None, grad_bias, None, None


_recorded = differentiable("nvfp4_gemm", _forward, _save, _backward, one_by_one, _op)


# What the op thunderkittens::nvfp4_gemm does beside the CUDA implementation.


def _check_op(
    a: Tensor,
    b: Tensor,
    global_scale: Tensor,
    n: int,
    bias: Tensor | None,
    activation: int,
    out_dtype: torch.dtype | None,
    offs: Tensor | None,
) -> torch.dtype:
    _check(a, b, global_scale, n, a.shape[-1], bias, out_dtype, offs)
    if a.dim() != 2:
        raise ValueError(f"thunderkittens::nvfp4_gemm: a has shape {tuple(a.shape)}; it is (M, K)")
    if not 0 <= activation < len(ACTIVATIONS):
        raise ValueError(f"thunderkittens::nvfp4_gemm: activation is {activation}; it is 0 to 4")
    return out_dtype or a.dtype


def _fake(
    a: Tensor, b: Tensor, global_scale: Tensor, n: int, bias: Tensor | None = None,
    activation: int = 0, out_dtype: torch.dtype | None = None, offs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    dtype = _check_op(a, b, global_scale, n, bias, activation, out_dtype, offs)
    return a.new_empty((a.shape[0], n), dtype=dtype)


def _cpu(
    a: Tensor, b: Tensor, global_scale: Tensor, n: int, bias: Tensor | None = None,
    activation: int = 0, out_dtype: torch.dtype | None = None, offs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    dtype = _check_op(a, b, global_scale, n, bias, activation, out_dtype, offs)
    if emulation.active():
        return emulation.run(
            "nvfp4_gemm",
            {"a": a, "b": b, "global_scale": global_scale, "bias": bias, "offs": offs},
            n=n,
            activation=activation,
            out_dtype=emulation.NAMES[dtype],
        )["out"]
    return reference_nvfp4_gemm(
        a,
        Nvfp4Weight(b, global_scale, n, a.shape[1]),
        bias=bias,
        activation=ACTIVATIONS[activation],
        out_dtype=dtype,
        offs=offs,
    )


def _flops(a_shape: Any, b_shape: Any, scale_shape: Any, n: int, *args: Any, **kwargs: Any) -> int:
    """2 M N K."""
    operations: int = 2 * a_shape[0] * a_shape[1] * n
    return operations


register("nvfp4_gemm", fake=_fake, cpu=_cpu, flops=_flops, vmap=one_by_one(_op))
