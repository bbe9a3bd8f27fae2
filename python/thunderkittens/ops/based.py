"""Based: causal linear attention with second-order Taylor features.

`based` checks the operands and calls `based_forward`, or the differentiable op `based` when a
gradient is wanted, whose gradient is the op `based_backward`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import emulation
from .._signatures import as_based
from ..reference.based import FEATURES, BasedState
from ..reference.based import based as reference_based
from ..reference.based import based_backward as reference_based_backward
from ._eager_autograd import differentiable
from ._gradient_call import gradient_call, refuse_double_backward
from ._registration import (
    autocast_active,
    autocast_operands,
    filled,
    forward_mode_active,
    of_any_size,
    refuse_forward_mode,
    register,
    require_device,
    require_operands,
    transform_active,
)

ELEMENTS = 16
MAX_VALUE_DIM = 256
_forward = torch.ops.thunderkittens.based_forward.default
_differentiable = torch.ops.thunderkittens.based.default
_gradient = torch.ops.thunderkittens.based_backward.default
State = BasedState | tuple[Tensor, Tensor]


@as_based
def based(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    normalize: bool = False,
    eps: float = 1e-12,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, BasedState]:
    """Causal linear attention whose weights are the second-order Taylor polynomial of the
    exponential: `o_i = sum over j <= i of (1 + s_ij + s_ij^2 / 2) v_j` with `s_ij = q_i . k_j / 4`.

    Time and memory are linear in N. Sums are kept in float32; operands of products, among them a
    copy of the state per 64 tokens, are rounded to q's dtype. Every stride is accepted: operands
    are read where they are as long as the last stride is 1 and the base and the other strides are
    multiples of 16 bytes, and are copied otherwise. Differentiable with respect to q, k, v and the
    initial state, also through the final state; reruns have the same bits. It cannot be
    differentiated again. Under autocast, q, k and v are converted to the autocast dtype. Works
    under `torch.compile`, `torch.export`, `torch.func.vmap` and `torch.func.grad`; on CPU tensors
    it runs `tk.reference.based`.

    Args:
        q: (B, H, N, 16), bfloat16 or float16. N may be 0. In float16, weights (|q . k| up to 1400)
            and products of two elements of k must stay below 65504.
        k: (B, H, N, 16), dtype and device of q.
        v: (B, H, N, Dv), dtype and device of q; Dv a multiple of 8 from 8 to 256.
        normalize: divide each row by the sum of its weights, plus eps (the paper's model); without,
            a normalization usually follows.
        eps: added to the sum of the weights.
        initial_state: the state of the tokens before, as `return_state` gives it: two float32
            tensors, numerator (B, H, 153, Dv) and denominator (B, H, 153).
        return_state: also return the state after the last token: what the next call, or
            decoding, continues from.

    Returns:
        out (B, H, N, Dv) of q's dtype, contiguous; with return_state (out, state), a `BasedState`
        (numerator, denominator) of phi(k) v^T and phi(k) summed over the tokens, in float32, with
        the features phi of `tk.reference.based_features`.

    Raises:
        TypeError: an operand is no dense tensor, has an unsupported dtype (float32 included) or one
            that differs from q's, or is on another device; a state that is not two float32 tensors.
        ValueError: a shape that does not fit the above, or an eps that is negative or not finite.

    The formula is `tk.reference.based`; Arora et al., "Simple linear attention language models
    balance the recall-throughput tradeoff", arXiv:2402.18668.
    """
    if autocast_active():
        q, k, v = autocast_operands(q, k, v)
    numerator, denominator = _parts(initial_state)
    based_shape(q, k, v, numerator, denominator, eps)
    args = (q, k, v, bool(normalize), float(eps), numerator, denominator, bool(return_state))
    tensors = [q, k, v] if numerator is None else [q, k, v, numerator, denominator]
    if forward_mode_active():
        refuse_forward_mode("based", *tensors)
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors if x is not None)
    if wanted or transform_active():
        out, *state, _ = _recorded(*args)
    else:
        out, *state = _forward(*args)
    return (out, BasedState(*state)) if return_state else out


def based_linear_prefill(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`based` under ThunderKittens' name and with its results: no denominator, and the state with
    all 273 features.

    Args:
        q: (B, H, N, 16), bfloat16 or float16.
        k: (B, H, N, 16).
        v: (B, H, N, Dv).

    Returns:
        (o, kv_concat): o (B, H, N, Dv); kv_concat (B, H, 273, Dv), float32: row 0 the sum of v,
        row 1 + a of k_a v / 2, row 17 + 16 a + b of k_a k_b v / (4 sqrt 2). ThunderKittens' kernel
        rounds it to bfloat16.

    Raises:
        TypeError, ValueError: as `based`.
    """
    out, state = based(q, k, v, return_state=True)
    return out, expanded_numerator(state.numerator)


def expanded_numerator(numerator: Tensor) -> Tensor:
    """(B, H, 273, Dv) of (B, H, 153, Dv): every product of two elements twice."""
    low, high = torch.triu_indices(ELEMENTS, ELEMENTS, 1, device=numerator.device)
    linear, squares, products = numerator.split([1 + ELEMENTS, ELEMENTS, low.numel()], 2)
    pairs = numerator.new_empty(*numerator.shape[:2], ELEMENTS, ELEMENTS, numerator.shape[3])
    diagonal = torch.arange(ELEMENTS, device=numerator.device)
    pairs[:, :, diagonal, diagonal] = squares
    pairs[:, :, low, high] = pairs[:, :, high, low] = products / math.sqrt(2.0)
    return torch.cat([linear, pairs.flatten(2, 3)], 2)


def _parts(state: State | None) -> tuple[Tensor | None, Tensor | None]:
    if state is None:
        return None, None
    if not isinstance(state, tuple | list) or len(state) != 2:
        raise TypeError(
            "tk.based: initial_state must be a BasedState (numerator, denominator), got "
            f"{type(state).__name__}"
        )
    if state[0] is None:
        raise TypeError("tk.based: the state's numerator must be a dense tensor, got NoneType")
    return state[0], state[1]


def based_shape(
    q: Tensor, k: Tensor, v: Tensor, numerator: Tensor | None = None,
    denominator: Tensor | None = None, eps: float = 0.0,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Shape of the output, (B, H, N, Dv); raises what `based` documents."""
    require_operands("based", ("q", "k", "v"), q, k, v)
    shape_q, shape_k, shape_v = q.shape, k.shape, v.shape
    if not len(shape_q) == len(shape_k) == len(shape_v) == 4:
        raise ValueError(
            f"tk.based: q has shape {tuple(shape_q)}, k has {tuple(shape_k)}, v has "
            f"{tuple(shape_v)}; they must have 4 dimensions, (B, H, N, D)"
        )
    if shape_q[3] != ELEMENTS:
        raise ValueError(
            f"tk.based: q has {shape_q[3]} elements per token; the features are those of {ELEMENTS}"
        )
    if shape_k != shape_q:
        raise ValueError(
            f"tk.based: k has shape {tuple(shape_k)}, q has {tuple(shape_q)}; they must be equal"
        )
    if shape_v[:3] != shape_q[:3]:
        raise ValueError(
            f"tk.based: v has shape {tuple(shape_v)}, q has {tuple(shape_q)}; batch, heads and "
            "length must be equal"
        )
    require_value_dim("based", shape_v[3])
    require_eps("based", eps)
    batch, heads, length, columns = *shape_q[:3], shape_v[3]
    if numerator is not None or denominator is not None:
        require_state("based", q, numerator, denominator, (batch, heads, FEATURES, columns))
    return batch, heads, length, columns


def require_value_dim(op: str, columns: int) -> None:
    """Raises ValueError unless the kernels take values of so many columns."""
    if columns % 8 != 0 or columns < 8 or columns > MAX_VALUE_DIM:
        raise ValueError(
            f"tk.{op}: v has {columns} columns; they must be a multiple of 8 from 8 to "
            f"{MAX_VALUE_DIM}"
        )


def require_eps(op: str, eps: float) -> None:
    """Raises unless eps may be added to a sum of weights."""
    if not isinstance(eps, int | float | torch.SymFloat):
        raise TypeError(f"tk.{op}: eps must be a number, got {type(eps).__name__}")
    if not (eps >= 0 and eps < math.inf):
        raise ValueError(f"tk.{op}: eps is {eps}; it must be finite and at least 0")


def require_state(op: str, q: Tensor, numerator: Any, denominator: Any, shape: Any) -> None:
    """Raises what the ops document unless the state fits q; shape is the numerator's."""
    for name, x, expected in (
        ("numerator", numerator, shape),
        ("denominator", denominator, shape[:3]),
    ):
        if not isinstance(x, Tensor) or x.layout is not torch.strided:
            kind = x.layout if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"tk.{op}: the state's {name} must be a dense tensor, got {kind}")
        if x.dtype != torch.float32:
            raise TypeError(f"tk.{op}: the state's {name} is {x.dtype}; it must be torch.float32")
        require_device(op, f"the state's {name}", x, "q", q)
        if tuple(x.shape) != tuple(expected):
            raise ValueError(
                f"tk.{op}: the state's {name} has shape {tuple(x.shape)}; it must be "
                f"{tuple(expected)}"
            )


# What the ops do beside the CUDA implementation.

# The dispatcher drops trailing arguments that have their default value.
_DEFAULTS: tuple[Any, ...] = (False, 1e-12, None, None, False)


def _empty(
    q: Tensor, k: Tensor, v: Tensor, args: tuple[Any, ...], keep_rows: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    normalize, eps, numerator, denominator, return_state = (*args, *_DEFAULTS[len(args) :])
    shape = based_shape(q, k, v, numerator, denominator, eps)
    batch, heads, length, columns = shape
    states = batch if return_state else 0
    wide = torch.float32
    return (
        q.new_empty(shape),
        q.new_empty((states, heads, FEATURES, columns), dtype=wide),
        q.new_empty((states, heads, FEATURES), dtype=wide),
        q.new_empty((batch if keep_rows and normalize else 0, heads, length), dtype=wide),
    )


def _fake(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return _empty(q, k, v, args, True)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return _empty(q, k, v, args, False)[:3]


def _cpu(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, ...]:
    results = _empty(q, k, v, args, True)
    values: list[Any]
    normalize, eps, numerator, denominator, return_state = (*args, *_DEFAULTS[len(args) :])
    if emulation.active() and results[0].numel() > 0:
        arrays = {"q": q, "k": k, "v": v, "numerator": numerator, "denominator": denominator}
        found = emulation.run(
            "based", arrays, normalize=normalize, eps=eps, return_state=return_state
        )
        values = [found.get(n) for n in ("out", "numerator", "denominator", "denominators")]
    else:
        initial = None if numerator is None else BasedState(numerator, denominator)
        out, state = reference_based(
            q, k, v, normalize=normalize, eps=eps, initial_state=initial, return_state=True
        )
        rows = None
        if normalize:
            ones = torch.ones_like(v[..., :1], dtype=torch.float32)
            if initial is not None:
                initial = BasedState(denominator.unsqueeze(3), denominator)
            rows = reference_based(q.float(), k.float(), ones, initial_state=initial)[..., 0] + eps
        values = [out, *state, rows]
    return filled(results, values)


def _cpu_forward(*args: Any) -> tuple[Tensor, ...]:
    return _cpu(*args)[:3]


_BACKWARD_DEFAULTS: tuple[Any, ...] = (False, None, None, (True, True, True, True))


def _empty_gradients(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    args = (*args, *_BACKWARD_DEFAULTS[len(args) - 8 :])
    grad_out, _, _, q, k, v, out, denominators = args[:8]
    normalize, numerator, denominator, needs = args[8:]
    shape = based_shape(q, k, v, numerator, denominator)
    for name, x in (("grad_out", grad_out), ("out", out)):
        if tuple(x.shape) != shape:
            raise ValueError(
                f"thunderkittens::based_backward: {name} has shape {tuple(x.shape)}; it must be "
                f"{shape}"
            )
    if normalize and tuple(denominators.shape) != shape[:3]:
        raise ValueError(
            "thunderkittens::based_backward: denominators has shape "
            f"{tuple(denominators.shape)}; it must be {shape[:3]}"
        )
    batch, heads, _, columns = shape
    states = batch if needs[3] and numerator is not None else 0
    return (
        *(x.new_empty(x.shape if n else 0) for x, n in zip((q, k, v), needs[:3], strict=True)),
        q.new_empty((states, heads, FEATURES, columns), dtype=torch.float32),
        q.new_empty((states, heads, FEATURES), dtype=torch.float32),
    )


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    return _empty_gradients(args)


def _cpu_backward(*args: Any) -> tuple[Tensor, ...]:
    results = _empty_gradients(args)
    args = (*args, *_BACKWARD_DEFAULTS[len(args) - 8 :])
    grad_out, grad_numerator, grad_denominator, q, k, v, out, denominators = args[:8]
    normalize, numerator, denominator, needs = args[8:]
    values: list[Tensor | None]
    if emulation.active() and out.numel() > 0:
        rows = denominators if normalize else q.new_zeros(1).float()
        arrays = {
            "grad_out": grad_out,
            "grad_numerator": grad_numerator,
            "grad_denominator": grad_denominator,
            "q": q,
            "k": k,
            "v": v,
            "out": out,
            "denominators": rows,
            "numerator": numerator,
            "denominator": denominator,
        }
        names = ("q", "k", "v", "state")
        wanted = {f"needs_{n}": bool(x) for n, x in zip(names, needs, strict=True)}
        found = emulation.run("based_backward", arrays, normalize=normalize, **wanted)
        values = [found.get(n) for n in ("dq", "dk", "dv", "numerator", "denominator")]
    else:
        values = _reference_gradients(args)
    return filled(results, values)


def _reference_gradients(args: tuple[Any, ...]) -> list[Tensor | None]:
    grad_out, grad_numerator, grad_denominator, q, k, v, out, denominators = args[:8]
    normalize, numerator, denominator, _ = args[8:]
    grad_state = None
    if grad_numerator is not None:
        if grad_denominator is None:
            grad_denominator = torch.zeros_like(grad_numerator[..., 0])
        grad_state = BasedState(grad_numerator, grad_denominator)
    dq, dk, dv, grad_initial = reference_based_backward(
        grad_out,
        grad_state,
        q,
        k,
        v,
        out,
        denominators,
        normalize=normalize,
        initial_state=None if numerator is None else BasedState(numerator, denominator),
    )
    return [dq, dk, dv, *grad_initial]


def _flops(q_shape: Any, k_shape: Any, v_shape: Any, *args: Any, **kwargs: Any) -> int:
    """Products within chunks of 64 tokens, and of the features with the state, as a multiplication
    and an addition each."""
    tokens = math.prod(q_shape[:3])
    operations: int = 2 * tokens * (64 * (ELEMENTS + v_shape[3]) + 2 * FEATURES * v_shape[3])
    return operations


def _flops_backward(*args: Any, **kwargs: Any) -> int:
    q_shape, _, v_shape = args[3:6]
    tokens, columns = math.prod(q_shape[:3]), v_shape[3]
    within = 64 * (2 * (2 * ELEMENTS + columns) + columns)
    operations: int = 2 * tokens * (within + 5 * FEATURES * columns)
    return operations


def _save_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    arguments = (*inputs, *_DEFAULTS[len(inputs) - 3 :])
    q, k, v, normalize, _, numerator, denominator, return_state = arguments
    ctx.normalize, ctx.return_state = normalize, return_state
    ctx.save_for_backward(q, k, v, output[0], output[3], numerator, denominator)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any,
    grad_out: Tensor | None,
    grad_numerator: Tensor | None,
    grad_denominator: Tensor | None,
    grad_rows: Tensor | None,
) -> tuple[Tensor | None, ...]:
    q, k, v, out, rows, numerator, denominator = ctx.saved_tensors
    wanted = (*ctx.needs_input_grad, *(False,) * 8)[:8]
    needs = [*wanted[:3], bool(wanted[5] or wanted[6])]
    if not ctx.return_state:
        grad_numerator = grad_denominator = None
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    if grad_numerator is None and grad_denominator is not None:
        shape = (*q.shape[:2], FEATURES, v.shape[3])
        grad_numerator = q.new_zeros(shape, dtype=torch.float32)
    dq, dk, dv, d_numerator, d_denominator = _any_gradient(
        grad_out.to(q.dtype), grad_numerator, grad_denominator, q, k, v, out, rows, ctx.normalize,
        numerator, denominator, needs,
    )  # fmt: skip
    return (
        dq if needs[0] else None,
        dk if needs[1] else None,
        dv if needs[2] else None,
        None,
        None,
        d_numerator if wanted[5] else None,
        d_denominator if wanted[6] else None,
        None,
    )


def _fold(x: Any, dim: int | None, size: int) -> Any:
    """Merges the mapped dimension into the batch."""
    if not isinstance(x, Tensor):
        return x
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _vmap_rule(call: Any) -> Any:
    """The rule for `torch.func.vmap`, by merging the mapped dimension into the batch."""

    @of_any_size
    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        size = info.batch_size
        dims = [None if isinstance(dim, list | tuple) else dim for dim in in_dims]
        results = call(*(_fold(x, dim, size) for x, dim in zip(args, dims, strict=True)))
        # What is not wanted has no elements, and no batch.
        unfolded = tuple(
            x.unflatten(0, (size, x.shape[0] // size)) if x.dim() > 1 else x.expand(size, 0)
            for x in results
        )
        return unfolded, (0,) * len(unfolded)

    return rule


_any_gradient = gradient_call("based", _gradient, _vmap_rule)
_recorded = differentiable("based", _differentiable, _save_context, _backward, _vmap_rule)

for _name, _op, _fake_op, _cpu_op in (
    ("based_forward", _forward, _fake_forward, _cpu_forward),
    ("based", _differentiable, _fake, _cpu),
):
    register(_name, fake=_fake_op, cpu=_cpu_op, flops=_flops, vmap=_vmap_rule(_op), autocast=3)
register(
    "based_backward",
    fake=_fake_backward,
    cpu=_cpu_backward,
    flops=_flops_backward,
    vmap=_vmap_rule(_gradient),
)
torch.library.register_autograd("thunderkittens::based_backward", refuse_double_backward("based"))
