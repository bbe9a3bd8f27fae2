"""What the ops of the gated delta rule share: checks of their operands, and the rule for
`torch.func.vmap`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ._registration import of_any_size, require_device, require_operands

MAX_KEY_DIM, MAX_VALUE_DIM = 128, 256
OPERANDS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias", "cu_seqlens")
# The dispatcher drops trailing arguments that have their default value: of initial_state, A_log,
# dt_bias and cu_seqlens, of the options, and of return_state.
DEFAULTS: tuple[Any, ...] = (None,) * 4 + (None, False, False, False, False) + (False,)
STATE_DTYPES = (torch.float32, torch.bfloat16)


def options_of(options: Any, q: Tensor) -> dict[str, Any]:
    """The options of the schemas by name, with the scale that is meant."""
    scale, norm, sigmoid, double, v_first = options
    return {
        "scale": q.shape[3] ** -0.5 if scale is None else scale,
        "qk_l2norm": norm,
        "beta_sigmoid": sigmoid,
        "allow_neg_eigval": double,
        "state_v_first": v_first,
    }


def state_shape(
    q: Tensor, v: Tensor, cu_seqlens: Tensor | None, v_first: bool
) -> tuple[int, int, int, int]:
    """The shape of the states of all sequences."""
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    keys, columns = q.shape[3], v.shape[3]
    inner = (columns, keys) if v_first else (keys, columns)
    return (sequences, v.shape[1], *inner)


def gated_delta_rule_shape(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, cu_seqlens: Tensor | None = None,
    scale: float | None = None, beta_sigmoid: bool = False, allow_neg_eigval: bool = False,
    state_v_first: bool = False,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Shape of the output, (B, HV, T, V); raises what `gated_delta_rule` documents."""
    op = "gated_delta_rule"
    shape = operands_shape(op, q, k, v, g, beta)
    require_gate(op, q, v, A_log, dt_bias)
    require_options(op, scale, beta_sigmoid, allow_neg_eigval)
    if cu_seqlens is not None:
        _require_edges(op, cu_seqlens, q)
    if initial_state is not None:
        expected = state_shape(q, v, cu_seqlens, state_v_first)
        require_state(op, "initial_state", initial_state, q, expected)
    return shape


def operands_shape(
    op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[int, int, int, int]:
    """Shape of the output; raises unless the operands of the tokens fit each other."""
    require_operands(op, ("q", "k", "v"), q, k, v)
    shape_q, shape_k, shape_v = q.shape, k.shape, v.shape
    if not len(shape_q) == len(shape_k) == len(shape_v) == 4:
        raise ValueError(
            f"tk.{op}: q has shape {tuple(shape_q)}, k has {tuple(shape_k)}, v has "
            f"{tuple(shape_v)}; they must have 4 dimensions, (B, H, T, D)"
        )
    batch, heads, length, keys = shape_q
    if shape_k != shape_q:
        raise ValueError(
            f"tk.{op}: k has shape {tuple(shape_k)}, q has {tuple(shape_q)}; they must be equal"
        )
    if shape_v[0] != batch or shape_v[2] != length:
        raise ValueError(
            f"tk.{op}: v has shape {tuple(shape_v)}, q has {tuple(shape_q)}; batch and length must "
            "be equal"
        )
    value_heads, columns = shape_v[1], shape_v[3]
    if value_heads != heads and (heads == 0 or value_heads % heads != 0):
        raise ValueError(
            f"tk.{op}: v has {value_heads} heads, q has {heads}; v's must be a multiple of q's"
        )
    if keys % 8 != 0 or keys < 8 or keys > MAX_KEY_DIM:
        raise ValueError(
            f"tk.{op}: q has {keys} columns; they must be a multiple of 8 from 8 to {MAX_KEY_DIM}"
        )
    if columns % 8 != 0 or columns < 8 or columns > MAX_VALUE_DIM:
        raise ValueError(
            f"tk.{op}: v has {columns} columns; they must be a multiple of 8 from 8 to "
            f"{MAX_VALUE_DIM}"
        )
    for name, x in (("g", g), ("beta", beta)):
        _require_tensor(op, name, x, q, (torch.float32, q.dtype))
        _require_shape(op, name, x, (batch, value_heads, length))
    return batch, value_heads, length, columns


def require_gate(op: str, q: Tensor, v: Tensor, A_log: Any, dt_bias: Any) -> None:
    """Raises unless what the gate is made of fits v's heads."""
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is not None:
            _require_tensor(op, name, x, q, (torch.float32,))
            _require_shape(op, name, x, (v.shape[1],))
    if dt_bias is not None and A_log is None:
        raise ValueError(f"tk.{op}: dt_bias is given without A_log; the gate needs both or A_log")


def require_scale(op: str, scale: Any) -> None:
    """Raises unless outputs may be multiplied by scale."""
    if not isinstance(scale, int | float | torch.SymFloat):
        raise TypeError(f"tk.{op}: scale must be a number, got {type(scale).__name__}")
    if not math.isfinite(scale):
        raise ValueError(f"tk.{op}: scale is {scale}; it must be finite")


def require_options(op: str, scale: Any, beta_sigmoid: bool, allow_neg_eigval: bool) -> None:
    """Raises unless the options fit each other."""
    if scale is not None:
        require_scale(op, scale)
    if allow_neg_eigval and not beta_sigmoid:
        raise ValueError(
            f"tk.{op}: allow_neg_eigval doubles the sigmoid of beta and needs beta_sigmoid; a beta "
            "that is given as it is may be up to 2"
        )


def require_state(op: str, name: str, x: Any, q: Tensor, shape: tuple[int, ...]) -> None:
    """Raises unless a state fits the operands."""
    _require_tensor(op, name, x, q, STATE_DTYPES)
    _require_shape(op, name, x, shape)


def require_edges_in_order(op: str, cu_seqlens: Tensor, length: int) -> None:
    """Raises unless the values of cumulative lengths are possible; for CPU tensors."""
    edges = cu_seqlens.tolist()
    if edges[0] != 0 or edges != sorted(edges) or edges[-1] > length:
        raise ValueError(
            f"tk.{op}: cu_seqlens is {edges}; it must begin with 0, not decrease and end at no "
            f"more than {length}"
        )


def _require_edges(op: str, cu_seqlens: Any, q: Tensor) -> None:
    _require_tensor(op, "cu_seqlens", cu_seqlens, q, (torch.int32,))
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"tk.{op}: cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be (N + 1,), with N "
            "of at least 1"
        )
    if q.shape[0] != 1:
        raise ValueError(
            f"tk.{op}: q has batch size {q.shape[0]}; with cu_seqlens it must be 1, the tokens of "
            "all sequences in one row"
        )


def _require_tensor(op: str, name: str, x: Any, q: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested:
        kind = (
            type(x).__name__ if not isinstance(x, Tensor) else "nested" if x.is_nested else x.layout
        )
        raise TypeError(f"tk.{op}: {name} must be a dense tensor, got {kind}")
    if x.dtype not in dtypes:
        names = " or ".join(dict.fromkeys(str(d) for d in dtypes))
        raise TypeError(f"tk.{op}: {name} is {x.dtype}; it must be {names}")
    require_device(op, name, x, "q", q)


def _require_shape(op: str, name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"tk.{op}: {name} has shape {tuple(x.shape)}; it must be {tuple(shape)}")


def vmap_rule(call: Any) -> Any:
    """The rule for `torch.func.vmap`: one call after the other, since heads of the gate and packed
    sequences have no dimension of a batch."""

    @of_any_size
    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        def taken(x: Any, dim: Any, i: int) -> Any:
            mapped = isinstance(x, Tensor) and isinstance(dim, int)
            return x.select(dim, i) if mapped else x

        results = [
            call(*(taken(x, dim, i) for x, dim in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        stacks = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
        return stacks, (0,) * len(stacks)

    return rule
