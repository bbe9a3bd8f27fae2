"""Based for one more token per sequence, with the state changed in place."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import emulation
from ..reference.based import FEATURES, BasedState
from ..reference.based_decode import based_decode as reference_based_decode
from ._memory import require_apart
from ._registration import (
    autocast_active,
    autocast_operands,
    forward_mode_active,
    refuse_forward_mode,
    register,
    require_operands,
    transform_active,
)
from .based import ELEMENTS, State, require_eps, require_state, require_value_dim

_op = torch.ops.thunderkittens.based_decode.default
_NAMES = ("the state's numerator", "the state's denominator", "q", "k", "v")


def based_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    *,
    normalize: bool = False,
    eps: float = 1e-12,
) -> Tensor:
    """One step of `tk.based` for a batch of sequences: adds the token to the state, in place, and
    returns the token's output. The same values as `tk.based` on one token with
    `initial_state=state, return_state=True`, in one kernel that reads and writes the state once.

    All arithmetic is in float32. Every stride is accepted; a state is changed where it is if each
    head's part is packed and a multiple of 16 bytes from the others, and copied there and back
    otherwise. There is no gradient: a call that would need one raises. Works under `torch.compile`
    and `torch.export` and in CUDA graphs; on CPU tensors it runs `tk.reference.based_decode`.

    Args:
        q: (B, H, 1, 16), bfloat16 or float16.
        k: (B, H, 1, 16), dtype and device of q.
        v: (B, H, 1, Dv), dtype and device of q; Dv a multiple of 8 from 8 to 256.
        state: the state of the tokens before, as `tk.based(..., return_state=True)` returns it;
            zeros for none. Both tensors are changed in place, and overlap neither an operand nor
            each other nor, as expanded ones do, themselves: code that `torch.compile` made does not
            check this.
        normalize: divide by the sum of the weights, plus eps, as in `tk.based`.
        eps: added to the sum of the weights.

    Returns:
        out (B, H, 1, Dv) of q's dtype, contiguous.

    Raises:
        TypeError: an operand is no dense tensor, has an unsupported dtype (float32 included) or one
            that differs from q's, or is on another device; a state that is not two float32 tensors.
        ValueError: a shape that does not fit the above, an eps that is negative or not finite, or a
            state that overlaps an operand or itself.
        RuntimeError: a gradient is wanted, or a transform of `torch.func` is active.
    """
    if autocast_active():
        q, k, v = autocast_operands(q, k, v)
    if not isinstance(state, tuple | list) or len(state) != 2:
        raise TypeError(
            "tk.based_decode: state must be a BasedState (numerator, denominator), got "
            f"{type(state).__name__}"
        )
    numerator, denominator = state
    based_decode_shape(q, k, v, numerator, denominator, eps)
    tensors = (q, k, v, numerator, denominator)
    if forward_mode_active():
        refuse_forward_mode("based_decode", *tensors)
    if transform_active():
        raise RuntimeError(
            "tk.based_decode changes the state in place and cannot be called under the transforms "
            "of torch.func; tk.based can, on one token"
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError(
            "tk.based_decode has no gradient, and an operand requires one: call it under "
            "torch.no_grad(), or tk.based on one token"
        )
    if not torch.compiler.is_compiling():
        require_apart("based_decode", _NAMES, (numerator, denominator, q, k, v), written=2)
    result: Tensor = _op(q, k, v, numerator, denominator, bool(normalize), float(eps))
    return result


def based_decode_shape(
    q: Tensor, k: Tensor, v: Tensor, numerator: Any, denominator: Any, eps: float = 0.0
) -> tuple[int, int, int, int]:
    """Shape of the output, (B, H, 1, Dv); raises what `based_decode` documents."""
    require_operands("based_decode", ("q", "k", "v"), q, k, v)
    for name, x, columns in (("q", q, ELEMENTS), ("k", k, ELEMENTS), ("v", v, None)):
        expected = (*q.shape[:2], 1, x.shape[-1] if columns is None else columns)
        if x.dim() != 4 or q.dim() != 4 or tuple(x.shape) != expected:
            form = f"(B, H, 1, {columns or 'Dv'})"
            raise ValueError(
                f"tk.based_decode: {name} has shape {tuple(x.shape)}; it must be {form}, with the "
                f"batch and the heads of q, whose shape is {tuple(q.shape)}"
            )
    require_value_dim("based_decode", v.shape[3])
    require_eps("based_decode", eps)
    batch, heads, columns = q.shape[0], q.shape[1], v.shape[3]
    require_state("based_decode", q, numerator, denominator, (batch, heads, FEATURES, columns))
    return batch, heads, 1, columns


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    normalize: bool = False,
    eps: float = 1e-12,
) -> Tensor:
    return q.new_empty(based_decode_shape(q, k, v, numerator, denominator, eps))


def _cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    normalize: bool = False,
    eps: float = 1e-12,
) -> Tensor:
    based_decode_shape(q, k, v, numerator, denominator, eps)
    if emulation.active() and v.numel() > 0:
        arrays = {"q": q, "k": k, "v": v, "numerator": numerator, "denominator": denominator}
        return emulation.run("based_decode", arrays, normalize=normalize, eps=eps)["out"]
    state = BasedState(numerator, denominator)
    return reference_based_decode(q, k, v, state, normalize=normalize, eps=eps).contiguous()


def _flops(q_shape: Any, k_shape: Any, v_shape: Any, *args: Any, **kwargs: Any) -> int:
    """The state's change and its product with the features, a multiplication and an addition per
    element each."""
    operations: int = 4 * math.prod(v_shape) * FEATURES
    return operations


register("based_decode", fake=_fake, cpu=_cpu, flops=_flops, autocast=3, differentiable=False)
