"""Products of fp8 matrices with scales.

`fp8_gemm` checks the operands, brings the scales to the forms that the op takes and calls it. The
result has no gradient; `fp8_linear` is differentiable.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import emulation
from ..reference.fp8_gemm import fp8_gemm as reference_fp8_gemm
from ._gradient_call import one_by_one
from ._registration import register
from .fp8_quantize import FP8_DTYPES

ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_op = torch.ops.thunderkittens.fp8_gemm.default


def fp8_gemm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    accurate: bool = True,
    offs: Tensor | None = None,
) -> Tensor:
    """`activation((a * scale_a) @ (b * scale_b) + bias)` of fp8 operands, rounded once.

    With w (N, K) quantised by `tk.fp8_quantize`, b is `codes.t()` and scale_b is `scale.t()`, for
    every granularity. Operands whose K is contiguous, as in that case, are read where they are; of
    others a transposed copy is made first, because the tensor cores take 8-bit operands in this
    order alone. The result has no gradient.

    Args:
        a: (M, K), float8_e4m3fn or float8_e5m2, any strides.
        b: (K, N), the same; not both are e5m2. (E, K, N) with offs.
        scale_a: float32, one element or (M, 1); or (M, ceil(K / 128)) for 1 x 128 elements of a.
        scale_b: float32, one element or (1, N); with the latter of scale_a (ceil(K / 128),
            ceil(N / 128)) for 128 x 128 elements of b, or (ceil(K / 128), N) for 1 x 128 of b's
            transpose. With offs, each may have a leading dimension E.
        bias: (N,), bfloat16, float16 or float32.
        activation: None, "relu", "gelu", "gelu_tanh" (the approximation by tanh) or "silu".
        out_dtype: torch.bfloat16, torch.float16 or torch.float32.
        accurate: sums of 128 of k are added in float32. If False, and the scales are not of 128 of
            k, all are left to the tensor cores, which keep about 14 bits of a sum of fp8
            products: faster.
        offs: int32 (E,), the ends of the groups of a's rows, ascending: group e, which may be
            empty, is multiplied with b[e]. Rows behind the last group give 0. Read on the device.

    Returns:
        (M, N) of out_dtype, contiguous.

    Raises:
        TypeError: an operand is no dense tensor, has an unsupported dtype, or is on another device
            than a; out_dtype is none of the above.
        ValueError: shapes do not match, or activation is none of the above.

    The formula is `tk.reference.fp8_gemm`.
    """
    _check(a, b, scale_a, scale_b, bias, out_dtype, offs)
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"tk.fp8_gemm: activation is {activation!r}; it must be one of {ACTIVATIONS}"
        )
    scale_a, scale_b = _matrix(scale_a), _matrix(scale_b)
    _check_scales(a, b, scale_a, scale_b)
    code = ACTIVATIONS.index(activation)
    result: Tensor = _op(a, b, scale_a, scale_b, bias, code, out_dtype, accurate, offs)
    return result


def _matrix(scale: Tensor) -> Tensor:
    return scale.reshape(1, 1) if scale.dim() < 2 and scale.numel() == 1 else scale


def _check(
    a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, out_dtype: Any, offs: Any
) -> None:
    name = "tk.fp8_gemm"
    given = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b}
    given |= {key: x for key, x in (("bias", bias), ("offs", offs)) if x is not None}
    allowed = {
        "a": FP8_DTYPES,
        "b": FP8_DTYPES,
        "scale_a": (torch.float32,),
        "scale_b": (torch.float32,),
        "bias": _OUT_DTYPES,
        "offs": (torch.int32,),
    }
    for key, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: {key} must be a torch.Tensor, got {type(x).__name__}")
        if x.layout is not torch.strided:
            raise TypeError(f"{name}: {key} must be a dense tensor (torch.strided), got {x.layout}")
        if x.dtype not in allowed[key]:
            names = " or ".join(map(str, allowed[key]))
            raise TypeError(f"{name}: {key} is {x.dtype}; supported is {names}")
        if x.device != a.device:
            raise TypeError(f"{name}: {key} is on {x.device}, a is on {a.device}")
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise TypeError(f"{name}: a and b are both torch.float8_e5m2; one must be e4m3fn")
    if out_dtype not in _OUT_DTYPES:
        raise TypeError(
            f"{name}: out_dtype is {out_dtype}; supported are torch.bfloat16, torch.float16 and "
            "torch.float32"
        )
    dims = 2 if offs is None else 3
    if a.dim() != 2 or b.dim() != dims:
        raise ValueError(
            f"{name}: a has shape {tuple(a.shape)} and b has shape {tuple(b.shape)}; they must "
            f"have 2 and {dims} dimensions"
        )
    if a.shape[1] != b.shape[-2]:
        raise ValueError(
            f"{name}: a has shape {tuple(a.shape)} and b has shape {tuple(b.shape)}; the last "
            f"dimension of a ({a.shape[1]}) must equal the second to last of b ({b.shape[-2]})"
        )
    if bias is not None and tuple(bias.shape) != (b.shape[-1],):
        raise ValueError(
            f"{name}: bias has shape {tuple(bias.shape)}; it must be ({b.shape[-1]},), one value "
            "per column of b"
        )
    if offs is not None and tuple(offs.shape) != (b.shape[0],):
        raise ValueError(
            f"{name}: offs has shape {tuple(offs.shape)}; it must be ({b.shape[0]},), the end of "
            "the rows of each matrix of b"
        )


def _check_scales(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> None:
    (m, k), n = a.shape, b.shape[-1]
    k_blocks, n_blocks = (k + 127) // 128, (n + 127) // 128
    if scale_a.dim() == 2 and (
        scale_b.dim() == 2 or (scale_b.dim() == b.dim() and scale_b.shape[0] == b.shape[0])
    ):
        (a_rows, a_cols), (b_rows, b_cols) = scale_a.shape, scale_b.shape[-2:]
        # Dynamo does not find a symbolic size that is a formula in a tuple.
        columns = n if b_cols == n else n_blocks
        if a_rows in (1, m) and a_cols == 1 and b_rows == 1 and b_cols in (1, n):
            return
        if a_rows == m and a_cols == b_rows == k_blocks and b_cols == columns:
            return
    raise ValueError(
        f"tk.fp8_gemm: scale_a has shape {tuple(scale_a.shape)} and scale_b has shape "
        f"{tuple(scale_b.shape)}; they must be (1 or {m}, 1) and (1, 1 or {n}), or "
        f"({m}, {k_blocks}) and ({k_blocks}, {n_blocks} or {n})"
    )


# What the op thunderkittens::fp8_gemm does beside the CUDA implementation.


def _check_op(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    activation: int,
    out_dtype: torch.dtype | None,
    offs: Tensor | None,
) -> torch.dtype:
    out_dtype = out_dtype or torch.bfloat16
    _check(a, b, scale_a, scale_b, bias, out_dtype, offs)
    _check_scales(a, b, scale_a, scale_b)
    if not 0 <= activation < len(ACTIVATIONS):
        raise ValueError(f"thunderkittens::fp8_gemm: activation is {activation}; it is 0 to 4")
    return out_dtype


def _fake(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None,
    activation: int = 0, out_dtype: torch.dtype | None = None, accurate: bool = True,
    offs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    dtype = _check_op(a, b, scale_a, scale_b, bias, activation, out_dtype, offs)
    return a.new_empty((a.shape[0], b.shape[-1]), dtype=dtype)


def _cpu(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None,
    activation: int = 0, out_dtype: torch.dtype | None = None, accurate: bool = True,
    offs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    dtype = _check_op(a, b, scale_a, scale_b, bias, activation, out_dtype, offs)
    if emulation.active():
        arrays = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b}
        return emulation.run(
            "fp8_gemm",
            {**arrays, "bias": bias, "offs": offs},
            activation=activation,
            out_dtype=emulation.NAMES[dtype],
            accurate=accurate,
        )["out"]
    return reference_fp8_gemm(
        a,
        b,
        scale_a,
        scale_b,
        bias=bias,
        activation=ACTIVATIONS[activation],
        out_dtype=dtype,
        offs=offs,
    )


def _flops(a_shape: Any, b_shape: Any, *args: Any, **kwargs: Any) -> int:
    """2 M N K."""
    operations: int = 2 * a_shape[0] * a_shape[1] * b_shape[-1]
    return operations


register(
    "fp8_gemm",
    fake=_fake,
    cpu=_cpu,
    flops=_flops,
    vmap=one_by_one(_op),
    differentiable=False,
)
