"""What every op tells PyTorch about itself, and the helpers that the public functions share.

The schemas are registered in C++ (csrc/library.cpp); this module adds the Python side to them: fake
and CPU implementation, autocast, vmap and flop formula. Autograd is registered by each op's module,
because only some ops have it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from .. import _load

_NAMESPACE = "thunderkittens"
_Results = TypeVar("_Results", bound=tuple[Tensor, ...])
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")

# Whether autocast is on for any device: then the public functions convert before they check.
autocast_active = torch._C._is_any_autocast_enabled

# Whether a transform of `torch.func` is active. Those that differentiate need an
# `autograd.Function`: what `torch.library.register_autograd` sets up fails under them.
transform_active = torch._C._are_functorch_transforms_active


def no_products(*args: Any, **kwargs: Any) -> int:
    """None: PyTorch's formulas count products of matrices alone."""
    return 0


def register(
    name: str,
    *,
    fake: Callable[..., Any],
    cpu: Callable[..., Any],
    flops: Callable[..., int] = no_products,
    cuda: Callable[..., Any] | None = None,
    vmap: Callable[..., Any] | None = None,
    autocast: int = 0,
    differentiable: bool = True,
) -> None:
    """Adds the Python side to the op `thunderkittens::name`.

    Args:
        name: the op's name in the schemas, or an overload that `overload` has defined.
        fake: the op on tensors without data; it raises what the op would raise.
        cpu: the op on CPU tensors.
        flops: number of floating-point operations, from the shapes of the arguments.
        cuda: the op on CUDA tensors, where it is not compiled.
        vmap: rule for `torch.func.vmap`, as `torch.library.register_vmap` takes it.
        autocast: the number of leading arguments that autocast converts.
        differentiable: whether autograd is registered elsewhere, or not wanted for a twin without;
            else results never require gradients.
    """
    qualified = f"{_NAMESPACE}::{name}"
    packet_name, _, overload_name = name.partition(".")
    packet = getattr(getattr(torch.ops, _NAMESPACE), packet_name)
    op = getattr(packet, overload_name or "default")
    if not differentiable:
        cpu = torch.no_grad()(cpu)
    torch.library.register_fake(qualified, fake, lib=_library)
    _library.impl(name, cpu, "CPU")
    if cuda is not None:
        _library.impl(name, cuda, "CUDA")
    if not overload_name:
        register_flop_formula(packet)(flops)
    if vmap is not None:
        torch.library.register_vmap(qualified, vmap, lib=_library)
    if not differentiable:
        _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        _library.impl(name, _autocast_kernel(op, device_type, autocast), key)


def register_both(
    name: str,
    *,
    fake: Callable[..., Any],
    cpu: Callable[..., Any],
    flops: Callable[..., int],
    vmap: Callable[[Any], Callable[..., Any]],
    autocast: int = 0,
) -> None:
    """Adds the Python side to `name` and to `name_forward`, its twin without autograd, which
    returns the first result alone.

    `vmap` makes the rule of the former from the op. The others are as `register` takes them.
    """

    def first(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: function(*args)[0]

    ops = getattr(torch.ops, _NAMESPACE)
    forward, op = (getattr(ops, twin).default for twin in (f"{name}_forward", name))
    add = functools.partial(register, flops=flops, autocast=autocast)
    add(f"{name}_forward", fake=first(fake), cpu=first(cpu), vmap=one_by_one(forward))
    add(name, fake=fake, cpu=cpu, vmap=vmap(op))


def filled(results: _Results, values: Iterable[Tensor | None]) -> _Results:
    """The results of an op on the CPU with their values; None is zero."""
    for result, value in zip(results, values, strict=True):
        if result.numel() > 0:
            result.copy_(value.view(result.shape)) if value is not None else result.zero_()
    return results


def require_device(op: str, name: str, x: Tensor, first: str, like: Tensor) -> None:
    """Raises TypeError unless x is where `like` is, which is called `first`."""
    if x.device != like.device:
        raise TypeError(
            f"tk.{op}: {name} is on {x.device}, {first} is on {like.device}; they must be on one "
            "device"
        )


def overload(name: str, overload_name: str) -> Any:
    """Defines `thunderkittens::name.overload_name`, another implementation of an op."""
    schema = str(getattr(getattr(torch.ops, _NAMESPACE), name).default._schema)
    _library.define(f"{name}.{overload_name}{schema.removeprefix(f'{_NAMESPACE}::{name}')}")
    return getattr(getattr(getattr(torch.ops, _NAMESPACE), name), overload_name)


def one_by_one(op: Any) -> Callable[..., tuple[Any, Any]]:
    """A rule for `torch.func.vmap` that calls the op for each index of the mapped dimension."""

    def taken(x: Any, dim: Any, index: int) -> Any:
        if isinstance(x, list | tuple) and isinstance(dim, list | tuple):
            return [taken(y, d, index) for y, d in zip(x, dim, strict=True)]
        return x.select(dim, index) if isinstance(x, Tensor) and dim is not None else x

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        results = [
            op(*(taken(x, dim, i) for x, dim in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(torch.stack(x) for x in zip(*results, strict=True)), (0,) * len(results[0])

    return of_any_size(rule)


def compiled(name: str) -> bool:
    """Whether an op has a compiled implementation for CUDA."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{_NAMESPACE}::{name}", "CUDA")


def of_any_size(rule: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """A rule for `torch.func.vmap` that also serves a mapped dimension without elements: by a call
    with one, of zeros, of whose results nothing is kept."""

    def with_one(x: Any, dim: Any) -> Any:
        if not isinstance(x, Tensor) or not isinstance(dim, int):
            return x
        dim %= x.dim()
        return x.new_zeros((*x.shape[:dim], 1, *x.shape[dim + 1 :]))

    def kept(x: Any, dim: Any) -> Any:
        return x.narrow(dim, 0, 0) if isinstance(x, Tensor) and dim is not None else x

    def any_size(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        if info.batch_size > 0:
            return rule(info, in_dims, *args)
        padded = (with_one(x, dim) for x, dim in zip(args, in_dims, strict=True))
        results, dims = rule(info._replace(batch_size=1), in_dims, *padded)
        if isinstance(results, Tensor):
            return kept(results, dims), dims
        return tuple(kept(x, dim) for x, dim in zip(results, dims, strict=True)), dims

    return any_size


def _autocast_kernel(op: Any, device_type: str, count: int) -> Callable[..., Any]:
    """Converts the first `count` arguments, and keeps autocast out of the op's implementation."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        operands = (autocast_operand(x, device_type, dtype) for x in args[:count])
        with torch.autocast(device_type, enabled=False):
            return op(*operands, *args[count:], **kwargs)

    return kernel


def autocast_operand(operand: Any, device_type: str, dtype: torch.dtype) -> Any:
    """`operand` in `dtype` where autocast converts it: a floating-point tensor of the device type
    that is not float64."""
    if (
        isinstance(operand, Tensor)
        and operand.device.type == device_type
        and operand.is_floating_point()
        and operand.dtype not in (dtype, torch.float64)
    ):
        return operand.to(dtype)
    return operand


def autocast_operands(*operands: Any) -> tuple[Any, ...]:
    """The operands as the active autocast regions want them."""
    for device_type in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            operands = tuple(autocast_operand(x, device_type, dtype) for x in operands)
    return operands


def forward_mode_active() -> bool:
    """Whether forward-mode differentiation is active."""
    return forward_ad._current_level >= 0


def refuse_forward_mode(op: str, *operands: Tensor | None) -> None:
    """Raises RuntimeError when an operand carries a tangent, which the op would drop silently."""
    for x in operands:
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise RuntimeError(
                f"tk.{op}: forward-mode differentiation (jvp) is not supported; tk.reference.{op} "
                "supports it"
            )


def refuse_in_place(op: str, tensors: Sequence[Any], instead: str) -> None:
    """Raises what an op that changes an operand in place, and has no gradient, refuses; `instead`
    names what computes the same with one."""
    if forward_mode_active():
        refuse_forward_mode(op, *(x for x in tensors if isinstance(x, Tensor)))
    if transform_active():
        name = instead.partition(" ")[0]
        raise RuntimeError(
            f"tk.{op} changes the state in place and cannot be called under the transforms of "
            f"torch.func; {name} can"
        )
    if wants_gradient(tensors):
        raise RuntimeError(
            f"tk.{op} has no gradient, and an operand requires one: call it under "
            f"torch.no_grad(), or {instead}"
        )


def wants_gradient(operands: Sequence[Any]) -> bool:
    """Whether a call has to be recorded: gradients are enabled, and an operand requires one."""
    if torch.is_grad_enabled():
        for x in operands:
            if isinstance(x, Tensor) and x.requires_grad:
                return True
    return False


Check = Callable[[tuple[Any, ...]], Any]


def _without_frame(op: Callable[..., Any]) -> Callable[..., Any]:
    """What an op calls when it is called itself, which spares a frame of Python."""
    return getattr(op, "_op", op) if type(op) is OpOverload else op


def _explain(args: tuple[Any, ...], problem: Exception, check: Check) -> NoReturn:
    if not isinstance(problem, torch.OutOfMemoryError):
        check(args)
    raise problem


def call_checked(op: Callable[..., Any], args: tuple[Any, ...], check: Check) -> Any:
    """A call of an op that checks its arguments itself, in C++ or in its CPU implementation.

    `check` raises what is documented, with the public names. It takes as long as the call, so that
    eager calls run it where the op has failed alone.
    """
    if torch.compiler.is_compiling():
        check(args)
        return op(*args)
    try:
        return _without_frame(op)(*args)
    except (RuntimeError, TypeError, ValueError) as error:
        problem = error
    _explain(args, problem, check)


def plain_call(
    op: OpOverload, check: Check, recorded: OpOverload | None = None
) -> Callable[..., Any]:
    """What a public function calls first where no compiler is active: NotImplemented where it has
    more to do than to call the op, as for autocast or a gradient, else what `call_checked` would
    return, with less host time. With `recorded`, an op of the same arguments whose gradient a node
    in C++ records, calls that want a gradient are of that op."""
    return _load.plain(
        op._op,
        lambda args, problem: _explain(args, problem, check),
        None if recorded is None else recorded._op,
    )


def _retry(
    op: OpOverload, args: tuple[Any, ...], problem: Exception, check: Check, require_apart: Check
) -> Any:
    if isinstance(problem, torch.OutOfMemoryError):
        raise problem
    check(args)
    require_apart(args)
    if "may share memory" not in str(problem):
        raise problem
    return op(*args)


def call_in_place(op: OpOverload, args: tuple[Any, ...], check: Check, require_apart: Check) -> Any:
    """As `call_checked`, of an op that changes an operand in place.

    Its last argument, `apart`, makes it refuse memory that may be shared, which it tells by
    addresses alone, in C++. `require_apart` raises where memory is shared, which takes as long as
    the call; where it does not, the op is called without that argument. Compiled code is not
    checked.
    """
    if torch.compiler.is_compiling():
        check(args)
        return op(*args)
    try:
        return _without_frame(op)(*args, True)
    except (RuntimeError, TypeError, ValueError) as error:
        problem = error
    return _retry(op, args, problem, check, require_apart)


def plain_call_in_place(op: OpOverload, check: Check, require_apart: Check) -> Callable[..., Any]:
    """`plain_call` of an op as `call_in_place` calls it; the last argument, `apart`, is given."""

    def failed(args: tuple[Any, ...], problem: Exception) -> Any:
        return _retry(op, args[:-1], problem, check, require_apart)

    return _load.plain(op._op, failed)


def require_operands(op: str, names: Sequence[str], *operands: Any) -> None:
    """Raises TypeError unless the operands are dense tensors of one dtype, that the tensor cores
    multiply here, on one device."""
    first = operands[0]
    if isinstance(first, Tensor):
        dtype, device = first.dtype, first.device
        if dtype is torch.bfloat16 or dtype is torch.float16:
            for x in operands:
                if (
                    not isinstance(x, Tensor)
                    or x.dtype is not dtype
                    or x.device != device
                    or x.layout is not torch.strided
                    or x.is_nested
                ):
                    break
            else:
                return
    raise TypeError(f"tk.{op}: {_operand_fault(names, operands)}")


def _operand_fault(names: Sequence[str], operands: Sequence[Any]) -> str:
    for name, x in zip(names, operands, strict=True):
        if not isinstance(x, Tensor):
            return f"{name} must be a torch.Tensor, got {type(x).__name__}"
        if x.layout is not torch.strided:
            return f"{name} must be a dense tensor (torch.strided), got {x.layout}"
        if x.is_nested:
            return f"{name} must be a dense tensor, got a nested one"
    name, first = names[0], operands[0]
    if first.dtype not in (torch.bfloat16, torch.float16):
        return (
            f"{name} is {first.dtype}; supported are torch.bfloat16 and torch.float16 (convert "
            "with .to(), or use torch.autocast)"
        )
    for other, x in zip(names[1:], operands[1:], strict=True):
        if x.dtype != first.dtype:
            return f"{other} is {x.dtype}, {name} is {first.dtype}; they must have the same dtype"
        if x.device != first.device:
            return (
                f"{other} is on {x.device}, {name} is on {first.device}; they must be on one device"
            )
    raise AssertionError("require_operands and _operand_fault disagree")
