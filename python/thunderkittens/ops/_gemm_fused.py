"""`tk.gemm` with an epilogue: activation, gate, residual, factors, a result given by the caller.

The ops are overloads of those of the plain product: `gemm_forward.fused`, the differentiable
`gemm.fused`, which keeps what the activation was applied to, and `gemm_forward.out`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import emulation
from ..reference.gemm import GATED, activate
from ..reference.gemm import gemm as reference_gemm
from . import _memory as memory
from ._eager_autograd import differentiable
from ._gemm_backward import NAMES, activation_gradient
from ._gemm_product import (
    OUT_DTYPES,
    broadcast_product,
    gemm_shape,
    op_shape,
    plain_product,
    product,
    product_gradients,
    vmap_product,
)
from ._registration import (
    autocast_operand,
    forward_mode_active,
    plain_call,
    refuse_forward_mode,
    register,
    transform_active,
)

_forward = torch.ops.thunderkittens.gemm_forward.fused
_differentiable = torch.ops.thunderkittens.gemm.fused
_out = torch.ops.thunderkittens.gemm_forward.out

LAYOUTS = ("blocked", "interleaved")
RESULTS = (torch.bfloat16, torch.float16, torch.float32)


def fused(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    alpha: float,
    beta: float,
    gate_layout: str,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
) -> Tensor:
    """`gemm` with an epilogue: checks, the forms that the ops take, the call."""
    number, gate = codes(activation, gate_layout)
    alpha, beta = check_factor("alpha", alpha), check_factor("beta", beta)
    shape = result_shape(gemm_shape(a, b, bias, out_dtype), gate)
    dtype = out_dtype or (a.dtype if out is None or not isinstance(out, Tensor) else out.dtype)
    if residual is not None:
        check_like_result("residual", residual, shape, dtype, a.device)
    if out is not None:
        check_like_result("out", out, shape, dtype, a.device)
        if dtype not in OUT_DTYPES:
            raise TypeError(f"tk.gemm: out is {dtype}; supported are the dtypes of out_dtype")
        if shape[-1] > 1 and out.stride(-1) != 1:
            raise ValueError(
                f"tk.gemm: out has strides {out.stride()}; the elements of its last dimension must "
                "be adjacent"
            )
        if not torch.compiler.is_compiling():
            check_memory(out, a, b, bias, residual)
    if transform_active() and out is None:
        z = broadcast_product(product, a, b, None, torch.float32) * alpha
        z = z if bias is None else z + bias
        return composed(z, dtype, residual, activation, gate_layout, beta)

    def multiply(x: Tensor, y: Tensor, row: Tensor | None, _: torch.dtype | None) -> Tensor:
        # The rows of the result as the operands of the op have them.
        form = (*x.shape[:-1], shape[-1])
        addend = None if residual is None else residual.reshape(form)
        options = (row, dtype, addend, number, gate, alpha, beta)
        if out is None:
            return fused_product(x, y, *options)
        if out.is_contiguous() or tuple(out.shape) == form:
            fused_product(x, y, *options, out=out.view(form))
            return out
        result = out.new_empty(form)
        fused_product(x, y, *options, out=result)
        return out.copy_(result.view(shape))

    result = broadcast_product(multiply, a, b, bias, out_dtype, columns=shape[-1])
    return result if out is None else out


def codes(activation: str | None, gate_layout: str) -> tuple[int, int]:
    """The numbers that the ops take for an activation and its gate."""
    for name, value, known in (
        ("activation", activation, (*NAMES[1:], *GATED)),
        ("gate_layout", gate_layout, LAYOUTS),
    ):
        if not isinstance(value, str) and not (value is None and name == "activation"):
            raise TypeError(f"tk.gemm: {name} must be a string, got {type(value).__name__}")
        if value is not None and value not in known:
            raise ValueError(f"tk.gemm: {name} is {value!r}; it must be one of {known}")
    if activation in GATED:
        return NAMES.index(GATED[activation]), 1 + LAYOUTS.index(gate_layout)
    return NAMES.index(activation), 0


#: `codes` of everything that it takes.
KINDS = {
    (activation, layout): codes(activation, layout)
    for activation in (None, *NAMES[1:], *GATED)
    for layout in LAYOUTS
}


def name_of(activation: int, gate: int) -> tuple[str | None, str]:
    """The names that the reference takes."""
    if gate == 0:
        return NAMES[activation], "blocked"
    plain = {plain: gated for gated, plain in GATED.items()}
    return plain[str(NAMES[activation])], LAYOUTS[gate - 1]


def check_like_result(
    name: str, x: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raises unless x has the shape, the dtype and the device of the result."""
    if not isinstance(x, Tensor):
        raise TypeError(f"tk.gemm: {name} must be a torch.Tensor, got {type(x).__name__}")
    if x.layout is not torch.strided:
        raise TypeError(f"tk.gemm: {name} must be a dense tensor (torch.strided), got {x.layout}")
    if x.dtype != dtype:
        raise TypeError(f"tk.gemm: {name} is {x.dtype}, the result is {dtype}; they must be equal")
    if x.device != device:
        raise TypeError(f"tk.gemm: {name} is on {x.device}, a is on {device}")
    if tuple(x.shape) != shape:
        raise ValueError(
            f"tk.gemm: {name} has shape {tuple(x.shape)}; it must be that of the result, {shape}"
        )


def check_memory(out: Tensor, *operands: Tensor | None) -> None:
    """Raises where blocks that write to `out` would change what others write or read."""
    if not memory.has_addresses(out):
        return
    if memory.repeats(out):
        raise ValueError(
            f"tk.gemm: out has shape {tuple(out.shape)} and strides {out.stride()}; each element "
            "must have a place of its own"
        )
    for name, x in zip(("a", "b", "bias", "residual"), operands, strict=True):
        if x is None or (name == "residual" and _same_elements(x, out)):
            continue
        if memory.overlap(x, out):
            raise ValueError(
                f"tk.gemm: out overlaps {name}; it may be the residual, and overlap no other "
                "operand"
            )


def _same_elements(x: Tensor, y: Tensor) -> bool:
    if x is y:
        return True
    steps = zip(x.shape, x.stride(), y.stride(), strict=False)
    return (
        x.data_ptr() == y.data_ptr()
        and x.shape == y.shape
        and all(length == 1 or one == other for length, one, other in steps)
    )


def autocast_residual(
    a: Tensor, residual: Any, out_dtype: torch.dtype | None, out: Any
) -> Tensor | None:
    """The residual in the dtype of the result where autocast converts: that of a, or as given."""
    dtype = out_dtype or (out.dtype if isinstance(out, Tensor) else getattr(a, "dtype", None))
    kind = residual.device.type if isinstance(residual, Tensor) else "cpu"
    if dtype in RESULTS and kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        residual = autocast_operand(residual, kind, dtype)
    return residual  # type: ignore[no-any-return]


def check_factor(name: str, value: Any) -> float:
    """alpha or beta as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"tk.gemm: {name} must be a number, got {type(value).__name__}")
    return float(value)


def fused_product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    residual: Tensor | None,
    activation: int,
    gate: int,
    alpha: float,
    beta: float,
    out: Tensor | None = None,
) -> Tensor:
    """The call in the forms that the ops take, by the op that will do."""
    options = (bias, out_dtype, residual, activation, gate, alpha, beta)
    tensors = [x for x in (a, b, bias, residual) if x is not None]
    if forward_mode_active():
        refuse_forward_mode("gemm", *tensors)
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if out is not None:
        if transform_active():
            raise RuntimeError("tk.gemm: out cannot be given under the transforms of torch.func")
        if wanted or (torch.is_grad_enabled() and out.requires_grad):
            raise RuntimeError(
                "tk.gemm: out is given and a gradient is wanted; leave out away, or call it under "
                "torch.no_grad()"
            )
        _out(a, b, *options, out=out)
        return out
    if wanted:
        result: Tensor = _recorded(a, b, *options)[0]
        return result
    value: Tensor = _forward(a, b, *options)
    return value


def composed(
    z: Tensor,
    out_dtype: torch.dtype,
    residual: Tensor | None,
    activation: str | None,
    gate_layout: str,
    beta: float,
) -> Tensor:
    """The epilogue as operations of PyTorch, for the transforms of `torch.func`."""
    result = activate(z, activation, gate_layout)
    if residual is not None:
        result = result + beta * residual.to(result.dtype)
    return result.to(out_dtype)


# What the ops do beside the CUDA implementation.


def _shapes(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    residual: Tensor | None,
    activation: int,
    gate: int,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the result and of what the activation is applied to."""
    z = op_shape(a, b, bias, out_dtype)
    if not 0 <= activation < len(NAMES) or not 0 <= gate <= len(LAYOUTS):
        raise ValueError(
            f"thunderkittens::gemm: activation is {activation} and gate {gate}; expected 0 to "
            f"{len(NAMES) - 1} and 0 to {len(LAYOUTS)}"
        )
    shape = result_shape(z, gate)
    if residual is not None:
        check_like_result("residual", residual, shape, out_dtype or a.dtype, a.device)
    return shape, z


def result_shape(z: tuple[int, ...], gate: int) -> tuple[int, ...]:
    """Shape of the result, from that of the product."""
    if gate == 0:
        return z
    if z[-1] % 2 != 0:
        raise ValueError(f"tk.gemm: b has {z[-1]} columns; a gated activation needs an even number")
    return (*z[:-1], z[-1] // 2)


def _fake_forward(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
    activation: int = 0,
    gate: int = 0,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Tensor:
    shape, _ = _shapes(a, b, bias, out_dtype, residual, activation, gate)
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


def _fake(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
    activation: int = 0,
    gate: int = 0,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> tuple[Tensor, Tensor]:
    shape, z = _shapes(a, b, bias, out_dtype, residual, activation, gate)
    keeps = activation != 0 or gate != 0
    dtype = out_dtype or a.dtype
    return a.new_empty(shape, dtype=dtype), a.new_empty(z if keeps else (0,), dtype=dtype)


def _complete(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """The dispatcher drops trailing arguments that have their default value."""
    defaults = (None, None, None, 0, 0, 1.0, 1.0)
    return options + defaults[len(options) :]


def _compute(
    a: Tensor, b: Tensor, options: tuple[Any, ...], keep: bool, given: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The result, written to `given` where that is possible, and what the activation is applied to
    if it is to be kept, else nothing."""
    bias, out_dtype, residual, activation, gate, alpha, beta = _complete(options)
    _shapes(a, b, bias, out_dtype, residual, activation, gate)
    dtype = out_dtype or a.dtype
    keep = keep and (activation != 0 or gate != 0)
    if emulation.active():
        arrays = emulation.run(
            "gemm",
            {"a": a, "b": b, "bias": bias, "residual": residual, "out": given},
            out_dtype=emulation.NAMES[dtype],
            activation=activation,
            gate=gate,
            alpha=alpha,
            beta=beta,
            keep=keep,
        )
        return arrays["out"], arrays.get("aux", a.new_empty((0,), dtype=dtype))
    name, layout = name_of(activation, gate)
    z = reference_gemm(a, b, bias=bias, alpha=alpha, out_dtype=torch.float32)
    out = composed(z, dtype, residual, name, layout, beta)
    return out, z.to(dtype) if keep else a.new_empty((0,), dtype=dtype)


def _cpu(a: Tensor, b: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return _compute(a, b, options, True)


def _cpu_forward(a: Tensor, b: Tensor, *options: Any) -> Tensor:
    return _compute(a, b, options, False)[0]


def _cpu_out(a: Tensor, b: Tensor, *options: Any, out: Tensor) -> None:
    result = _compute(a, b, options, False, out)[0]
    if result.data_ptr() != out.data_ptr():
        out.copy_(result)


def _fake_out(a: Tensor, b: Tensor, *options: Any, out: Tensor, **named: Any) -> None:
    result = _fake_forward(a, b, *options, **named)
    check_like_result("out", out, tuple(result.shape), result.dtype, result.device)


def _flops(a_shape: Any, b_shape: Any, *args: Any, **kwargs: Any) -> int:
    operations: int = 2 * math.prod(a_shape) * b_shape[-1]
    return operations


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    a, b = inputs[:2]
    bias, _, residual, activation, gate, alpha, beta = _complete(inputs[2:])
    ctx.options = (activation, gate, alpha, beta)
    ctx.has = (bias is not None, residual is not None)
    # z has a gradient where a gradient is differentiated; else none, and no zeros in its place.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a, b, output[1])


def _backward(ctx: Any, grad: Tensor | None, grad_z: Tensor | None) -> tuple[Tensor | None, ...]:
    a, b, z = ctx.saved_tensors
    activation, gate, alpha, beta = ctx.options
    needs = (*ctx.needs_input_grad, *(False,) * 9)[:9]
    has_bias, has_residual = ctx.has
    wants_residual = has_residual and needs[4] and grad is not None
    grad_residual = beta * grad if wants_residual else None
    if grad is None:
        grad = grad_z
    elif activation or gate:
        inner = activation_gradient(grad, z, activation, gate)
        grad = inner if grad_z is None else inner + grad_z
    if grad is None:
        return (None,) * 9
    multiply = plain_product if alpha == 1 else partial(_scaled_product, alpha)
    grads = product_gradients(a, b, grad, multiply, needs[0], needs[1], has_bias and needs[2])
    return (*grads, None, grad_residual, None, None, None, None)


def _scaled_product(alpha: float, a: Tensor, b: Tensor) -> Tensor:
    return fused(a, b, None, None, None, alpha, 1.0, "blocked", None, None)


def _vmap(info: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Tensor, Tensor, str]:
    """Result and z of the ops under `torch.func.vmap`, by operations of PyTorch after the
    product."""
    a, b = args[:2]
    bias, out_dtype, residual, activation, gate, alpha, beta = _complete(args[2:])
    dims = (*in_dims, *(None,) * 9)[:5]
    dtype = out_dtype or a.dtype
    if dims[0] is None and dims[1] is None:
        a, dims = a.unsqueeze(0).expand(info.batch_size, *a.shape), (0, *dims[1:])
    z = vmap_product(info, dims[:2], a, b, None, torch.float32)[0] * alpha
    if bias is not None:
        if dims[2] is not None:
            bias = bias.movedim(dims[2], 0)
            bias = bias.reshape(bias.shape[0], *(1,) * (z.dim() - 2), bias.shape[1])
        z = z + bias
    if residual is not None and dims[4] is not None:
        residual = residual.movedim(dims[4], 0)
    name, layout = name_of(activation, gate)
    return composed(z, dtype, residual, name, layout, beta), z.to(dtype), name or ""


def _vmap_forward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
    return _vmap(info, in_dims, args)[0], 0


def _vmap_fused(
    info: Any, in_dims: tuple[Any, ...], *args: Any
) -> tuple[tuple[Tensor, Tensor], tuple[int, int | None]]:
    out, z, name = _vmap(info, in_dims, args)
    return (out, z if name else z.new_empty((0,))), (0, 0 if name else None)


register(
    "gemm_forward.fused",
    fake=_fake_forward,
    cpu=_cpu_forward,
    flops=_flops,
    vmap=_vmap_forward,
    autocast=3,
)
register("gemm.fused", fake=_fake, cpu=_cpu, flops=_flops, vmap=_vmap_fused, autocast=3)
register("gemm_forward.out", fake=_fake_out, cpu=_cpu_out, flops=_flops)
_recorded = differentiable("gemm_fused", _differentiable, _setup_context, _backward)


def _check_plain(args: tuple[Any, ...]) -> None:
    result_shape(gemm_shape(*args[:4]), args[6])


plain_fused = plain_call(_forward, _check_plain, _differentiable)
