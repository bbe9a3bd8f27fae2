"""Products of MXFP8 matrices.

`mxfp8_gemm` checks the operands, chooses between the two ways to multiply them that Hopper has, and
calls the op. The result has no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import emulation
from ..reference._block_scaled import swizzle_scales
from ..reference.mxfp8_gemm import finished, mxfp8_values
from ..reference.mxfp8_prepare import Mxfp8Operand
from ._block_scaled import (
    FP8,
    listed,
    require_choice,
    require_flag,
    require_same_device,
    require_scale,
    require_tensor,
    scale_shape,
)
from ._gradient_call import one_by_one
from ._registration import register, transform_active
from .fp8_gemm import ACTIVATIONS
from .mxfp8_prepare import BLOCK, SCALES

PATHS = ("exact", "rebased")
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NAME = "mxfp8_gemm"
_op = torch.ops.thunderkittens.mxfp8_gemm.default


def mxfp8_gemm(
    a: Tensor | Mxfp8Operand,
    b: Tensor | Mxfp8Operand,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    path: str | None = None,
    swizzle: bool = True,
    offs: Tensor | None = None,
) -> Tensor:
    """`activation(a @ b + bias)` of MXFP8 operands, summed in float32 and rounded once.

    With x (M, K) and w (N, K) quantised by `tk.mxfp8_quantize`, `tk.mxfp8_gemm(x_data,
    w_data.t(), x_scale, w_scale)` is x @ w.t(): scale_b is that of w, as the layout of scales
    cannot be transposed. The same tensors go to `torch.nn.functional.scaled_mm` on Blackwell. The
    result has no gradient.

    Hopper's tensor cores have no scales of blocks. There are two paths:

    - "exact": elements times their scales are exact in bfloat16, in which the tensor cores multiply
      them, but for extreme scales (bytes below 3 and above 246, with e5m2 below 10 and above 239):
      products of 2^128 and more become infinite, those below 2^-126 are rounded to multiples of
      2^-133.
    - "rebased": the elements of a row are brought to one scale, in e4m3, and multiplied by the fp8
      tensor cores, sums of 128 of k being added in float32: about twice as fast for many rows. No
      element moves by more than 2^-9 of the largest magnitude of its block; products with 128 rows
      of a or of b's transpose in which one would are computed by the exact path. The device
      decides, the host does not wait. `tk.mxfp8_prepare` does this once for an operand that is
      kept. For up to 64 rows of a, float8_e4m3fn with scales in the 128x4 layout, nothing is
      rescaled: the fp8 tensor cores multiply blocks of 32, whose sums are scaled in float32.

    Args:
        a: (M, K), float8_e4m3fn or float8_e5m2, any strides; or an `Mxfp8Operand`.
        b: (K, N), the same; or an `Mxfp8Operand` of its transpose (N, K). Read where it is if its
            columns are adjacent along K. (E, K, N) with offs.
        scale_a: of a, float8_e8m0fnu or the same bytes as uint8, of the shape that
            `tk.mxfp8_quantize` gives it, or flat. None with an `Mxfp8Operand`.
        scale_b: the same of b's transpose.
        bias: (N,), bfloat16.
        activation: None, "relu", "gelu", "gelu_tanh" (the approximation by tanh) or "silu".
        out_dtype: torch.bfloat16, torch.float16 or torch.float32.
        path: "exact" or "rebased"; None is "rebased" if an operand is an `Mxfp8Operand`, else
            "exact".
        swizzle: whether scale_a and scale_b lie in the 128x4 layout, or plain.
        offs: int32 (E,), the ends of the groups of a's rows, ascending, as in `tk.fp8_gemm`: group
            e, which may be empty, is multiplied with b[e]. Rows behind the last group give 0. Read
            on the device. For the exact path. On Hopper the kernel is that for few rows, of each
            group; on other GPUs all of b is made bfloat16 first, in memory of the call. b is read
            where it is if its columns are adjacent along K and begin at multiples of 16 bytes, else
            copied. Scales are in the 128x4 layout: plain ones are brought to it in each call. The
            op `thunderkittens::mxfp8_gemm` itself raises a RuntimeError for plain scales of groups.

    Returns:
        (M, N) of out_dtype, contiguous.

    Raises:
        TypeError: an operand is no dense tensor, has an unsupported dtype, or is on another device
            than a; a scale is missing; out_dtype, path or swizzle is of the wrong kind.
        ValueError: shapes do not match, or activation or path is none of the above.

    The formula is `tk.reference.mxfp8_gemm`.
    """
    require_flag(_NAME, "swizzle", swizzle)
    rebased = isinstance(a, Mxfp8Operand) or isinstance(b, Mxfp8Operand)
    if path is not None:
        require_choice(_NAME, "path", path, PATHS)
        rebased = path == "rebased"
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"tk.mxfp8_gemm: activation is {activation!r}; it must be one of {ACTIVATIONS}"
        )
    if offs is not None and rebased:
        raise ValueError(
            "tk.mxfp8_gemm: groups (offs) are multiplied by the exact path alone; path is 'rebased'"
        )
    prepared_a, left, of_left, swizzle_a = _operand("a", a, scale_a, swizzle)
    prepared_b, right, of_right, swizzle_b = _operand("b", b, scale_b, swizzle)
    if prepared_b[0] is not None:
        right = right.t()
    if not rebased:
        prepared_a = prepared_b = (None, None, None)
    of_left = _shaped(left, of_left, swizzle_a)
    of_right = _shaped(right, of_right, swizzle_b, True)
    _check(left, right, of_left, of_right, bias, out_dtype, swizzle_a, swizzle_b, offs)
    code = ACTIVATIONS.index(activation)
    if offs is not None:
        call = _Groups.apply if transform_active() else _groups
        out: Tensor = call(left, right, of_left, of_right, bias, code, out_dtype, swizzle, offs)
        return out
    result: Tensor = _op(
        *(left, right, of_left, of_right, bias, code, out_dtype, rebased, swizzle_a, swizzle_b),
        *(*prepared_a, *prepared_b, None),
    )
    return result


def _groups(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    activation: int,
    out_dtype: torch.dtype,
    swizzle: bool,
    offs: Tensor,
) -> Tensor:
    """The product of groups, of operands as its kernel takes them: K a multiple of 16 and not 0,
    scales in the 128x4 layout."""
    if not swizzle:
        scale_a, scale_b = (
            swizzle_scales(x.view(torch.uint8)).view(torch.float8_e8m0fnu)
            for x in (scale_a, scale_b)
        )
    k = a.shape[1]
    missing = 16 if k == 0 else -k % 16
    if missing:
        # PyTorch cannot pad fp8; zeros are zero bytes.
        a = functional.pad(a.view(torch.uint8), (0, missing)).view(a.dtype)
        turned = functional.pad(b.mT.contiguous().view(torch.uint8), (0, missing)).view(b.dtype)
        b = turned.mT
    if k == 0:
        scale_a = scale_a.new_zeros(scale_shape(a.shape, BLOCK, True), dtype=torch.uint8)
        scale_b = scale_b.new_zeros(scale_shape(b.mT.shape, BLOCK, True), dtype=torch.uint8)
    options = bias, activation, out_dtype, False, True, True
    out: Tensor = _op(a, b, scale_a, scale_b, *options, *(None,) * 6, offs)
    return out


class _Groups(torch.autograd.Function):
    """`_groups` under the transforms of `torch.func`: bytes cannot be mapped as another dtype."""

    @staticmethod
    def forward(*args: Any) -> Tensor:
        return _groups(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
        return (None,) * 9

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return one_by_one(_Groups.apply)(info, in_dims, *args)


def _operand(name: str, x: Any, scale: Any, swizzle: bool) -> tuple[Any, Any, Any, bool]:
    """What has been prepared of an operand, its data, scale, and whether that is swizzled."""
    if not isinstance(x, Mxfp8Operand):
        if scale is None:
            raise TypeError(
                f"tk.mxfp8_gemm: scale_{name} is missing; it may be None only if {name} is an "
                "Mxfp8Operand"
            )
        return (None, None, None), x, scale, swizzle
    if scale is not None:
        raise TypeError(
            f"tk.mxfp8_gemm: {name} is an Mxfp8Operand, which has its scale; scale_{name} must be "
            "None"
        )
    for part in x:
        require_tensor(_NAME, f"a part of {name}", part, (*FP8, *SCALES, torch.float32))
        if part.device != x.data.device:
            raise TypeError(f"tk.mxfp8_gemm: the parts of {name} are on different devices")
    if x.data.dim() != 2:
        raise ValueError(
            f"tk.mxfp8_gemm: {name} is an Mxfp8Operand of shape {tuple(x.data.shape)}; it must be "
            "a matrix"
        )
    rows, columns = x.data.shape
    expected = ((rows, (columns + 15) // 16 * 16), (rows,), ((rows + 127) // 128, 8))
    for field, tensor, shape in zip(x._fields[2:], x[2:], expected, strict=True):
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"tk.mxfp8_gemm: {field} of the Mxfp8Operand {name} has shape "
                f"{tuple(tensor.shape)}; for data of {(rows, columns)} it is {shape}"
            )
    return (x.codes, x.factor, x.marks), x.data, x.scale, True


def _shaped(x: Any, scale: Any, swizzle: bool, transposed: bool = False) -> Any:
    """A flat scale in its two dimensions."""
    if (
        not isinstance(scale, Tensor)
        or not isinstance(x, Tensor)
        or (scale.dim() != 1 or x.dim() != 2)
    ):
        return scale
    shape = scale_shape(x.shape[::-1] if transposed else x.shape, BLOCK, swizzle)
    return scale.reshape(shape) if scale.numel() == shape[0] * shape[1] else scale


def _check(
    a: Any,
    b: Any,
    scale_a: Any,
    scale_b: Any,
    bias: Any,
    out_dtype: Any,
    swizzle_a: bool,
    swizzle_b: bool,
    offs: Any,
) -> None:
    for key, x, dtypes in (
        ("a", a, FP8),
        ("b", b, FP8),
        ("scale_a", scale_a, SCALES),
        ("scale_b", scale_b, SCALES),
        ("bias", bias, (torch.bfloat16,)),
        ("offs", offs, (torch.int32,)),
    ):
        if key not in ("bias", "offs") or x is not None:
            require_tensor(_NAME, key, x, dtypes)
            require_same_device(_NAME, key, x, "a", a)
    if out_dtype not in _OUT_DTYPES:
        raise TypeError(
            f"tk.mxfp8_gemm: out_dtype is {out_dtype}; supported are {listed(_OUT_DTYPES)}"
        )
    dims = 2 if offs is None else 3
    if a.dim() != 2 or b.dim() != dims or a.shape[1] != b.shape[-2]:
        raise ValueError(
            f"tk.mxfp8_gemm: a has shape {tuple(a.shape)} and b has shape {tuple(b.shape)}; "
            f"expected (M, K) @ {'(K, N)' if offs is None else '(E, K, N), with offs'}"
        )
    require_scale(_NAME, "scale_a", scale_a, a.shape, BLOCK, swizzle_a)
    require_scale(_NAME, "scale_b", scale_b, b.mT.shape, BLOCK, swizzle_b)
    if bias is not None and tuple(bias.shape) != (b.shape[-1],):
        raise ValueError(
            f"tk.mxfp8_gemm: bias has shape {tuple(bias.shape)}; it must be ({b.shape[-1]},), one "
            "value per column of b"
        )
    if offs is not None and tuple(offs.shape) != (b.shape[0],):
        raise ValueError(
            f"tk.mxfp8_gemm: offs has shape {tuple(offs.shape)}; it must be ({b.shape[0]},), the "
            "end of the rows of each matrix of b"
        )


# What the op thunderkittens::mxfp8_gemm does beside the CUDA implementation.


def _check_op(args: tuple[Any, ...]) -> torch.dtype:
    a, b, scale_a, scale_b, bias, activation, out_dtype, _, swizzle_a, swizzle_b = args[:10]
    out_dtype = out_dtype or torch.bfloat16
    _check(a, b, scale_a, scale_b, bias, out_dtype, swizzle_a, swizzle_b, args[-1])
    if not 0 <= activation < len(ACTIVATIONS):
        raise ValueError(f"thunderkittens::mxfp8_gemm: activation is {activation}; it is 0 to 4")
    return out_dtype


_DEFAULTS = (None, 0, None, False, True, True, None, None, None, None, None, None, None)
_ARGUMENTS = (
    *("bias", "activation", "out_dtype", "rebased", "swizzle_a", "swizzle_b"),
    *("codes_a", "factor_a", "marks_a", "codes_b", "factor_b", "marks_b"),
    "offs",
)


def _complete(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of the schema, in its order."""
    rest = args[4:]
    names, defaults = _ARGUMENTS[len(rest) :], _DEFAULTS[len(rest) :]
    return (*args, *(kwargs.get(n, d) for n, d in zip(names, defaults, strict=True)))


def _fake(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *args: Any, **kw: Any) -> Tensor:
    dtype = _check_op(_complete((a, b, scale_a, scale_b, *args), kw))
    return a.new_empty((a.shape[0], b.shape[-1]), dtype=dtype)


def _cpu(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *args: Any, **kw: Any) -> Tensor:
    every = _complete((a, b, scale_a, scale_b, *args), kw)
    dtype = _check_op(every)
    bias, activation, _, rebased, swizzle_a, swizzle_b = every[4:10]
    if emulation.active():
        arrays = {"a": a, "b": b, "bias": bias}
        arrays |= {"scale_a": scale_a.view(torch.uint8), "scale_b": scale_b.view(torch.uint8)}
        arrays |= dict(zip(_ARGUMENTS[6:], every[10:], strict=True))
        return emulation.run(
            _NAME,
            arrays,
            activation=activation,
            out_dtype=emulation.NAMES[dtype],
            rebased=rebased,
            swizzle_a=swizzle_a,
            swizzle_b=swizzle_b,
        )["out"]
    left = mxfp8_values(a, scale_a, swizzle_a, torch.float32)
    right = mxfp8_values(b.mT, scale_b, swizzle_b, torch.float32)
    return finished(left, right, bias, ACTIVATIONS[activation], dtype, every[-1])


def _flops(a_shape: Any, b_shape: Any, *args: Any, **kwargs: Any) -> int:
    """2 M N K."""
    operations: int = 2 * a_shape[0] * a_shape[1] * b_shape[-1]
    return operations


register(_NAME, fake=_fake, cpu=_cpu, flops=_flops, vmap=one_by_one(_op), differentiable=False)
