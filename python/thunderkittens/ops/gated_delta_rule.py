"""The gated delta rule over sequences.

`gated_delta_rule` checks the operands and calls `gated_delta_rule_forward`, or the differentiable
op `gated_delta_rule` when a gradient is wanted, whose gradient is the op
`gated_delta_rule_backward` (`_gated_delta_rule_backward.py`).
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from .. import emulation
from .._signatures import as_gated_delta_rule
from ..reference.gated_delta_rule import gated_delta_rule as reference_gated_delta_rule
from . import _gated_delta_rule_backward as gradient
from ._eager_autograd import differentiable
from ._gated_delta_rule import (
    DEFAULTS,
    OPERANDS,
    gated_delta_rule_shape,
    options_of,
    require_edges_in_order,
    require_scale,
    state_shape,
    vmap_rule,
)
from ._registration import (
    autocast_active,
    autocast_operands,
    call_checked,
    filled,
    forward_mode_active,
    plain_call,
    refuse_forward_mode,
    register_both,
    transform_active,
    wants_gradient,
)

_forward = torch.ops.thunderkittens.gated_delta_rule_forward.default
_differentiable = torch.ops.thunderkittens.gated_delta_rule.default


@as_gated_delta_rule
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_v_first: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The gated delta rule (Gated DeltaNet): for each token, with the state S of K x V,
    `S <- exp(g) S; u = beta (v - S^T k); S <- S + k u^T; o = scale S^T q`.

    It is computed in chunks of 64 tokens, exactly whatever the decays are: no part of the past is
    left out. States, sums and gates are in float32; operands of products, among them a copy of the
    state per chunk, are rounded to q's dtype. Every stride is accepted: q, k and v are read where
    they are as long as the last stride is 1 and the base and the other strides are multiples of 16
    bytes, and are copied otherwise. Differentiable with respect to all operands and the initial
    state, also through the final state; reruns have the same bits. It cannot be differentiated
    again. Under autocast, q, k and v are converted to the autocast dtype. Works under
    `torch.compile`, `torch.export`, `torch.func.vmap` (not with cu_seqlens) and `torch.func.grad`;
    on CPU tensors it runs `tk.reference.gated_delta_rule`.

    Args:
        q: (B, H, T, K), bfloat16 or float16; K a multiple of 8 from 8 to 128. T may be 0.
        k: (B, H, T, K), dtype and device of q. Its rows have a length of at most about 1, by
            qk_l2norm or by the caller: beta |k|^2 above 2 lets states grow without bound.
        v: (B, HV, T, V), dtype and device of q; HV a multiple of H, V a multiple of 8 from 8 to
            256. Value head h has the queries and keys of head h // (HV / H).
        g: (B, HV, T), float32 or q's dtype: the natural logarithm of the decay, at most 0; minus
            infinity forgets all before the token. With A_log, what the gate is made of.
        beta: (B, HV, T), float32 or q's dtype, from 0 to 2.
        scale: of the output; None is K^-1/2.
        initial_state: (B, HV, K, V), float32 or bfloat16, any strides; None is zeros.
        return_state: also return the state after the last token.
        cu_seqlens: (N + 1,), int32, on q's device: B is 1, and the tokens are those of N sequences,
            one after the other; 0, then the sums of the first lengths, which do not decrease and do
            not exceed T. It is read on the GPU. States are then (N, HV, K, V). A sequence may have
            no tokens: its state stays.
        qk_l2norm: divide each row of q and k by sqrt(sum x^2 + 1e-6).
        beta_sigmoid: beta is the sigmoid of what is given.
        allow_neg_eigval: beta is twice the sigmoid of what is given; only with beta_sigmoid.
        A_log: (HV,), float32: the log decay is `-exp(A_log) softplus(g + dt_bias)`.
        dt_bias: (HV,), float32, only with A_log.
        state_v_first: initial and final states are (B, HV, V, K).

    Returns:
        out (B, HV, T, V) of q's dtype, contiguous; with return_state (out, state), of the dtype of
        initial_state, or float32. Tokens after the last sequence give 0.

    Raises:
        TypeError: an operand is no dense tensor, has an unsupported dtype or one that differs from
            q's, or is on another device; a wrong dtype of g, beta, a state, A_log, dt_bias or
            cu_seqlens; a scale that is no number.
        ValueError: a shape that does not fit the above; dt_bias without A_log; allow_neg_eigval
            without beta_sigmoid; a scale that is not finite; on a CPU, cu_seqlens out of order.

    The formula is `tk.reference.gated_delta_rule`; Yang et al., "Gated Delta Networks: Improving
    Mamba2 with delta rule", arXiv:2412.06464.
    """
    if scale is not None:
        require_scale("gated_delta_rule", scale)
        scale = float(scale)
    if not return_state and not torch.compiler.is_compiling():
        plain = _plain(
            *(q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens, scale, qk_l2norm),
            *(beta_sigmoid, allow_neg_eigval, state_v_first),
        )
        if plain is not NotImplemented:
            return cast(Tensor, plain)
    if autocast_active():
        q, k, v = autocast_operands(q, k, v)
    tensors = (q, k, v, g, beta, initial_state, A_log, dt_bias)
    args = (
        *tensors, cu_seqlens, scale, bool(qk_l2norm), bool(beta_sigmoid), bool(allow_neg_eigval),
        bool(state_v_first),
    )  # fmt: skip
    if forward_mode_active():
        _check(args)
        refuse_forward_mode("gated_delta_rule", *tensors)
    if return_state or wants_gradient(tensors) or transform_active():
        out, state = call_checked(_recorded, (*args, bool(return_state)), _check)
        return (out, state) if return_state else out
    result: Tensor = call_checked(_forward, args, _check)
    return result


def _check(args: tuple[Any, ...]) -> None:
    gated_delta_rule_shape(*args[:10], *args[11:14])


_plain = plain_call(_forward, _check)


# What the ops do beside the CUDA implementation.


def _empty(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta, *rest = (*args, *DEFAULTS[len(args) - 5 :])
    initial, A_log, dt_bias, edges, scale, _, sigmoid, double, v_first, return_state = rest
    shape = gated_delta_rule_shape(
        q, k, v, g, beta, initial, A_log, dt_bias, edges, scale, sigmoid, double, v_first
    )
    states = state_shape(q, v, edges, v_first)
    if not return_state:
        states = (0, *states[1:])
    dtype = torch.float32 if initial is None else initial.dtype
    return q.new_empty(shape), q.new_empty(states, dtype=dtype)


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    return _empty(args)


def _cpu(*args: Any) -> tuple[Tensor, ...]:
    results = _empty(args)
    q, k, v, g, beta, *rest = (*args, *DEFAULTS[len(args) - 5 :])
    initial, A_log, dt_bias, edges, *options = rest
    return_state = options.pop()
    if edges is not None:
        require_edges_in_order("gated_delta_rule", edges, q.shape[2])
    values: list[Any]
    if emulation.active() and results[0].numel() > 0:
        arrays = dict(zip(OPERANDS, (q, k, v, g, beta, *rest[:4]), strict=True))
        found = emulation.run(
            "gated_delta_rule", arrays, **options_of(options, q), return_state=return_state
        )
        values = [found.get("out"), found.get("state")]
    else:
        values = list(
            reference_gated_delta_rule(
                q,
                k,
                v,
                g,
                beta,
                initial_state=initial,
                A_log=A_log,
                dt_bias=dt_bias,
                cu_seqlens=edges,
                return_state=True,
                **options_of(options, q),
            )
        )
    return filled(results, values)


def _flops(q_shape: Any, k_shape: Any, v_shape: Any, *args: Any, **kwargs: Any) -> int:
    """Products of chunks of 64 tokens, a multiplication and an addition each: those of the keys and
    queries per head, those with values and the state per value head."""
    tokens, values = math.prod(q_shape[:3]), math.prod(v_shape[:3])
    keys, columns = q_shape[3], v_shape[3]
    operations: int = 2 * (tokens * 2 * 64 * keys + values * columns * (3 * keys + 2 * 64))
    return operations


def _save_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    arguments = (*inputs, *DEFAULTS[len(inputs) - 5 :])
    *options, return_state = arguments[9:]
    ctx.options, ctx.return_state = options, return_state
    ctx.save_for_backward(*arguments[:9], output[0].new_empty(0))
    ctx.out_shape = output[0].shape
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_state: Tensor | None
) -> tuple[Tensor | None, ...]:
    *tensors, like = ctx.saved_tensors
    wanted = (*ctx.needs_input_grad, *(False,) * 15)[:8]
    if not ctx.return_state:
        grad_state = None
    if grad_out is None:
        grad_out = like.new_zeros(ctx.out_shape)
    grads = gradient.call(grad_out.to(like.dtype), grad_state, *tensors, *ctx.options, list(wanted))
    needed = (x if want else None for x, want in zip(grads, wanted, strict=True))
    return (*needed, *(None,) * 7)


_recorded = differentiable("gated_delta_rule", _differentiable, _save_context, _backward, vmap_rule)

register_both("gated_delta_rule", fake=_fake, cpu=_cpu, flops=_flops, vmap=vmap_rule, autocast=3)
